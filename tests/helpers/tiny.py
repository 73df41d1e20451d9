"""Runs of seconds: small nets, short episodes, few steps, for every registered algorithm."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rl_training.cli import main
from rl_training.experiment.checkpoint.codec import digest_state
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.testing.contract import SMALL_MODEL, SMALL_WORLD_MODEL

ROOT = Path(__file__).resolve().parents[2]
STEPS = 64
SMALL: dict[str, Any] = {
    "hidden_sizes": [16],
    "batch_size": 8,
    "learning_starts": 16,
    "buffer_capacity": 500,
    "num_steps": 16,
    "sequence_length": 4,
    "burn_in": 1,
    "memory_size": 8,
    "minibatch_size": 8,
    "update_epochs": 1,
    "dataset_size": 200,
    "initial_random_steps": 16,
    "eval_interval": 0,
    **SMALL_MODEL,
    **SMALL_WORLD_MODEL,
}
"""Small values of settings, used by the algorithms that have them."""


def tiny_config(
    algo: str, output_dir: Path, *, algo_kwargs: Mapping[str, Any] | None = None, **changes: Any
) -> TrainConfig:
    """A run of an algorithm that takes a fraction of a second."""
    spec = get_algorithm_spec(algo)
    env_id = "CartPole-v1" if "discrete" in spec.action_kinds else "Pendulum-v1"
    small = {key: value for key, value in SMALL.items() if key in spec.config_class.model_fields}
    values: dict[str, Any] = {
        "algo": algo,
        "env_id": env_id,
        "total_timesteps": STEPS,
        "output_dir": str(output_dir),
        "run_name": "run",
        "device": "cpu",
        "eval_episodes": 1,
        "log_interval": 16,
        "checkpoint_interval": 32,
        "tensorboard": False,
        "env_kwargs": {"max_episode_steps": 20},
    }
    return TrainConfig(**(values | changes), algo_kwargs=small | dict(algo_kwargs or {}))


def write_tiny(folder: Path, algo: str = "sac", name: str = "tiny.yaml", **changes: Any) -> Path:
    """Write such a run as YAML; its output goes to `folder`/runs."""
    path = folder / name
    path.write_text(tiny_config(algo, folder / "runs", **changes).to_yaml(), encoding="utf-8")
    return path


def learner_digest(path: Path) -> str:
    """Digest of the learner in a checkpoint, or in a run's newest one."""
    return digest_state(open_checkpoint(path).states["learner"])


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def values(self) -> dict[str, str]:
        """The `name=value` lines of its output."""
        return dict(re.findall(r"^(\w+)=(.*)$", self.out, re.MULTILINE))

    def sentence(self) -> str:
        """The one line of a user's mistake, after checking that it is one."""
        assert self.code == 2, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")


def run_cli(*arguments: object) -> Outcome:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    words = ["rl-training", *map(str, arguments)]
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", words):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


def clean_environment() -> dict[str, str]:
    """This process's environment without what would switch colours on, and with the package."""
    drop = {"FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "PYTHONWARNINGS"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run_python(*arguments: object, cwd: Path | None = None, timeout: float = 120) -> Outcome:
    """Run Python in a process of its own."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env=clean_environment(),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
