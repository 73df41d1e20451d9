"""`python -m rl_training.testing my_module:SPEC`: the contract suite on a method of your own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rl_training.errors import RLTrainingError
from rl_training.experiment.registry import get_algorithm_spec, import_plugin

USAGE = """usage: python -m rl_training.testing NAME[,NAME...] [options of pytest]

NAME is a method of the package, an installed plug-in, or module:SPEC.  Tests that take minutes are
left out; -m "slow or not slow" runs them too."""


def main(arguments: list[str]) -> int:
    """Run the suite; the exit code is pytest's, or 2 for a mistake of the user."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    names, *options = arguments
    try:
        import pytest
    except ImportError:
        print("error: the suite needs pytest: pip install 'rl-training[testing]'", file=sys.stderr)
        return 2
    try:
        for name in names.split(","):
            import_plugin(name)
            get_algorithm_spec(name)
    except RLTrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["RL_TRAINING_TESTED"] = names
    # No settings of the folder it is started in: a suite means the same everywhere.
    fixed = ["-c", os.devnull, "-p", "rl_training.testing.fixtures", "-p", "no:cacheprovider"]
    marks = ["-m", "not slow", "-W", "error", "-q"]
    return pytest.main([*fixed, *marks, str(Path(__file__).parent), *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
