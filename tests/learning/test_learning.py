"""Proof that the presets learn: three seeds, the last checkpoint, twenty fresh episodes.

`make learn` runs this; it takes about fifteen minutes on two cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.experiment.config import load_config
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint

BARS = [
    ("sac/pendulum", 10_000, -200.0),
    ("ppo/cartpole", 100_000, 475.0),
    ("dqn/cartpole", 50_000, 475.0),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("preset", "steps", "bar"), BARS)
def test_three_seeds_reach_the_bar(preset: str, steps: int, bar: float, tmp_path: Path) -> None:
    config = load_config(preset, changes={"seeds": [0, 1, 2], "output_dir": str(tmp_path)})
    assert config.total_timesteps == steps
    result = train(config)
    returns = {
        member.run_dir.name: evaluate_checkpoint(member.checkpoint_path, 20).metrics[
            "eval_return_mean"
        ]
        for member in result.per_seed
    }
    print(f"{preset} at {steps:,} steps, last checkpoint, 20 episodes each: {returns}")
    assert all(value >= bar for value in returns.values()), returns
