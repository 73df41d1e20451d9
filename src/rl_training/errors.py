"""The errors a user can cause.

Every message answers, in one sentence: what is wrong, where, which value, what is allowed, what to
do next. The command line prints such an error without a traceback and exits with code 2.
"""


class RLTrainingError(Exception):
    """Base of every error that is the user's to mend."""


class ConfigError(RLTrainingError, ValueError):
    """A configuration key, type or value that cannot be used."""


class EnvError(RLTrainingError, ValueError):
    """An environment that cannot be made, or breaks Gymnasium's contract."""


class DataError(RLTrainingError, ValueError):
    """A dataset or batch that cannot be used."""


class SpecMismatch(RLTrainingError, ValueError):
    """An algorithm and a task (or a checkpoint and a task) that do not fit together."""


class CheckpointError(RLTrainingError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another kind than expected."""


class MissingExtraError(RLTrainingError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


class NonFiniteError(RLTrainingError, ArithmeticError):
    """NaN or infinity where training must not go on."""
