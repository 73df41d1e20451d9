"""What `test_<algo>_trainer_smoke.py` and `test_<algo>_reference_script.py` share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.warm import run_warm
from rl_training.algorithms.config import AlgoConfig
from rl_training.errors import ConfigError
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import TrainFunction
from rl_training.testing.contract import small_config

ROOT = Path(__file__).resolve().parents[2]


def trainer_test(algo: str) -> Callable[[Path], None]:
    """Return the test of `train_<algo>`."""

    def test(tmp_path: Path) -> None:
        check_trainer(algo, tmp_path)

    return test


def reference_script_test(algo: str, *settings: str) -> Callable[[Path], None]:
    """Return the test of the algorithm's reference examples; by default that of SAC alone runs.

    Args:
        algo: The algorithm.
        *settings: `name=value` of `--set`, where the examples are too slow as they are; runs are
            then evaluated on one episode too.
    """
    options = [f"--set={setting}" for setting in settings]
    options += ["--set=eval_episodes=1", "--episodes=1"] if settings else []

    def test(tmp_path: Path) -> None:
        check_reference_script(algo, tmp_path, *options)

    return test if algo == "sac" else pytest.mark.matrix(test)


def check_trainer(algo: str, folder: Path) -> None:
    """`train_<algo>` trains, says where the run is, and refuses another algorithm's config."""
    module = importlib.import_module(f"rl_training.runtime.{algo}_trainer")
    train: TrainFunction = getattr(module, f"train_{algo}")
    config = small_config(algo, folder)
    assert isinstance(config.algo_config, AlgoConfig)
    result = train(config, run_suffix="smoke")
    assert isinstance(result, TrainResult)
    assert result.run_dir.name.endswith("_smoke")
    assert result.checkpoint_path.is_dir()
    assert result.metrics["global_step"] >= config.total_timesteps
    assert np.isfinite(result.metrics["eval_return_mean"])
    other = next(name for name in algorithm_names() if name != algo)
    with pytest.raises(ConfigError, match=f"train_{algo} was given"):
        train(small_config(other, folder))


def check_reference_script(algo: str, folder: Path, *options: str) -> None:
    """Every reference example of the algorithm runs in seconds with few steps."""
    examples = sorted((ROOT / "examples").glob(f"{algo}_*_reference.py"))
    assert examples
    for example in examples:
        done = run_warm(example, "--total-timesteps", "600", *options, cwd=folder, timeout=240)
        assert done.code == 0, done.err
        assert "eval_return_mean=" in done.out
        assert "action for" in done.out
