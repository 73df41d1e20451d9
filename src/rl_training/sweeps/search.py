"""The space that a tune searches: ranges and choices of any setting, written as texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.errors import ConfigError
from rl_training.sweeps.plan import full_key, split_axis
from rl_training.validation import suggest

SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "halving", "none")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One setting and what it may be: a range, or choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    """Whether only integers are meant, because both ends are."""
    choices: tuple[str, ...] = ()

    def suggest(self, trial: Any) -> str:
        """Ask a trial for a value, as a text that `--set` takes."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, list(self.choices)))
        if self.whole:
            return str(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.log)))

    def text_of(self, value: Any) -> str:
        """Write a value that a finished trial had, as `suggest` wrote it."""
        if self.choices:
            return str(value)
        return str(int(value)) if self.whole else repr(float(value))

    def ends(self) -> tuple[str, ...]:
        """Return values that a configuration must be able to take."""
        return self.choices or (self.text_of(self.low), self.text_of(self.high))


def parse_dimension(text: str) -> Dimension:
    """Read `learning_rate=1e-4..1e-2:log`, `batch_size=64..512` or `batch_size=64,128,256`.

    Raises:
        ConfigError: When it is of another form, or a range is empty.
    """
    name, _, rest = text.partition("=")
    found = _RANGE.fullmatch(rest.strip())
    if found is None:
        if ".." in rest or "=" not in text:
            raise ConfigError(
                f"--search {text!r} must look like learning_rate=1e-4..1e-2:log, hidden=16..256 or "
                "batch_size=64,128,256"
            )
        name, values = split_axis(text)
        return Dimension(key=full_key(name), choices=tuple(values))
    low, high, log = found[1], found[2], found[3] is not None
    if float(low) >= float(high) or (log and float(low) <= 0):
        raise ConfigError(
            f"--search {text!r}: the first end must be below the second"
            f"{', and above 0 on a log scale' if log else ''}"
        )
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high))
    return Dimension(key=full_key(name), low=float(low), high=float(high), log=log, whole=whole)


def make_sampler(optuna: Any, name: str, seed: int) -> Any:
    """Return a sampler by name.

    Raises:
        ConfigError: For another name.
    """
    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=False),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    return _chosen(samplers, name, "--sampler")


def make_pruner(optuna: Any, name: str, total: int) -> Any:
    """Return a pruner by name, for runs of `total` steps.

    The first fifth of a run is spared: what is learned there says little about its end.

    Raises:
        ConfigError: For another name.
    """
    pruners = {
        "median": lambda: optuna.pruners.MedianPruner(
            n_startup_trials=5, n_warmup_steps=total // 5
        ),
        "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, total // 5)),
        "none": lambda: optuna.pruners.NopPruner(),
    }
    return _chosen(pruners, name, "--pruner")


def _chosen(makers: dict[str, Any], name: str, option: str) -> Any:
    if name not in makers:
        raise ConfigError(f"{option} {name!r} is not known{suggest(name, makers)}")
    return makers[name]()


def require_known(sampler: str, pruner: str, dimensions: Sequence[Dimension]) -> None:
    """Refuse names and spaces that cannot be used, before a study is begun."""
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    if pruner not in PRUNERS:
        raise ConfigError(f"--pruner must be one of {', '.join(PRUNERS)}, got {pruner!r}")
    keys = [dimension.key for dimension in dimensions]
    if not keys:
        raise ConfigError("tune needs at least one --search, such as learning_rate=1e-4..1e-2:log")
    if len(set(keys)) != len(keys):
        raise ConfigError("--search names a setting twice; put all its values into one")
