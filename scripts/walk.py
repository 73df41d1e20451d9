"""Count the files and functions of the package that one walk through it visits.

Four walks, on one CPU thread, eagerly: an environment step of SAC up to and including its gradient
step, the same of MBPO and of Dreamer, and a resume up to its first step. Counted are calls of
Python functions whose file lies in the package, comprehensions and lambdas among them: distinct
files, distinct functions, and how often a call lies in another file than the call before. This is
how the table of the move into rooms was counted; at its start (commit 541b0fc) it gives 25, 35 and
60 files for SAC, Dreamer and the resume.

    python scripts/walk.py            a table
    python scripts/walk.py --files    and the files of each walk, with the number of calls in each
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from numpy.typing import NDArray

import rl_training
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.collector import CollectedStep, Collector
from rl_training.runtime.session import Session
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

PACKAGE = str(Path(rl_training.__file__).parent) + "/"
WARM_UP = 40
"""Passes of the loop before the one that is counted; at least one update lies in them."""
LAST = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {
        "env_id": "Pendulum-v1",
        "algo_kwargs": {
            "hidden_sizes": [16, 16],
            "batch_size": 8,
            "buffer_capacity": 400,
            "learning_starts": 20,
            "eval_interval": 1000,
        },
    },
    "mbpo": {
        "env_id": "Pendulum-v1",
        "algo_kwargs": {
            "hidden_sizes": [16, 16],
            "batch_size": 8,
            "buffer_capacity": 400,
            "learning_starts": 20,
            "eval_interval": 1000,
            "model_hidden_sizes": [16],
            "num_ensembles": 2,
            "model_batch_size": 16,
            "model_max_epochs": 1,
            "model_train_frequency": 10,  # a fit and a rollout in the pass that is counted
            "rollout_batch_size": 16,
        },
    },
    "dreamer": {
        "env_id": "rl_training/Catch-v0",
        "algo_kwargs": {
            "size": "tiny",
            "deter_size": 16,
            "model_hidden_size": 16,
            "units": 16,
            "cnn_depth": 4,
            "latent_groups": 4,
            "latent_classes": 4,
            "num_bins": 41,
            "batch_size": 8,
            "batch_length": 4,
            "imagination_horizon": 2,
            "buffer_capacity": 400,
            "learning_starts": 20,
            "warmup_updates": 0,
            "train_ratio": 32,  # one update a step
            "eval_interval": 1000,
        },
    },
}


class Walk:
    """Calls in the package between `start` and `stop`."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []

    def start(self) -> None:
        """Begin to listen; what was heard before is forgotten."""
        self.calls.clear()
        sys.setprofile(self._hear)

    def stop(self) -> None:
        """Listen no more."""
        sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls.append(code)

    def files(self) -> Counter[str]:
        """Return the calls in each file."""
        return Counter(code.co_filename.removeprefix(PACKAGE) for code in self.calls)

    def row(self) -> tuple[int, int, int, int]:
        """Return distinct files, distinct functions, changes of file, and calls."""
        names = [code.co_filename for code in self.calls]
        changes = sum(a != b for a, b in itertools.pairwise(names))
        return len(set(names)), len(set(self.calls)), changes, len(names)


class Done(BaseException):
    """The walk is over; nobody else catches it."""


def config(algo: str, folder: Path) -> TrainConfig:
    """Return a small run of one seed and one environment."""
    return TrainConfig.model_validate(
        {
            "algo": algo,
            "total_timesteps": LAST,
            "eval_episodes": 1,
            "output_dir": str(folder),
            "threads": 1,
            "device": "cpu",
            "accelerate": "off",
            **SETTINGS[algo],
        }
    )


def one_step(algo: str, folder: Path) -> Walk:
    """Walk through one pass of the loop, without what `Session.tick` does after it."""
    walk, passes = Walk(), 0
    tick: Callable[[Session], None] = Session.tick

    def counted(session: Session) -> None:
        nonlocal passes
        walk.stop()
        passes += 1
        if passes == WARM_UP + 1:
            raise Done
        tick(session)
        if passes == WARM_UP:
            walk.start()

    setattr(Session, "tick", counted)  # noqa: B010 - a method is replaced on purpose
    try:
        train(config(algo, folder))
    except Done:
        return walk
    finally:
        walk.stop()
        setattr(Session, "tick", tick)  # noqa: B010
    raise AssertionError("the run ended before the walk")


def resumed(folder: Path) -> Walk:
    """Walk through a resume of SAC until its environment is to be stepped."""
    walk = Walk()
    checkpoint = train(config("sac", folder)).checkpoint_path
    step = Collector.step

    def first(collector: Collector, action: NDArray[Any]) -> CollectedStep:  # noqa: ARG001
        walk.stop()
        raise Done

    setattr(Collector, "step", first)  # noqa: B010 - a method is replaced on purpose
    try:
        walk.start()
        resume_training(checkpoint, total_timesteps=LAST + 20)
    except Done:
        return walk
    finally:
        walk.stop()
        setattr(Collector, "step", step)  # noqa: B010
    raise AssertionError("the run was not resumed")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="also list the files of each walk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walks = {
            "SAC, one step to its gradient": one_step("sac", folder / "sac"),
            "MBPO, one step to its gradient, with a fit and a rollout": one_step(
                "mbpo", folder / "mbpo"
            ),
            "Dreamer, the same": one_step("dreamer", folder / "dreamer"),
            "resume until the first step": resumed(folder / "resume"),
        }
    print("| walk | files | functions | changes of file | calls |\n|---|---|---|---|---|")
    for title, walk in walks.items():
        print(f"| {title} | {' | '.join(map(str, walk.row()))} |")
    for title, walk in walks.items() if options.files else ():
        print(f"\n{title}")
        for file, calls in sorted(walk.files().items()):
            print(f"{calls:7} {file}")


if __name__ == "__main__":
    main()
