"""`overlap`: actions are chosen one round of updates earlier, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.errors import ConfigError
from rl_training.runtime.collector import ActionAhead
from rl_training.runtime.compile.runner import ReplayRunner
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config
from rl_training.transfer import HostCopy


def events(folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> list[tuple[str, int]]:
    """Train, and return what was done in which order, with the updates done before it."""
    found: list[tuple[str, int]] = []
    act, update = ReplayRunner.act, ReplayRunner.update

    def noting_act(runner: ReplayRunner, obs: Any) -> HostCopy:
        found.append(("act", runner.learner.num_updates.value))
        return act(runner, obs)

    def noting_update(runner: ReplayRunner, count: int) -> None:
        found.append(("update", runner.learner.num_updates.value))
        update(runner, count)

    monkeypatch.setattr(ReplayRunner, "act", noting_act)
    monkeypatch.setattr(ReplayRunner, "update", noting_update)
    settings = {"learning_starts": 10, "train_frequency": 1}
    train(
        small_config(
            "sac",
            folder,
            overlap=overlap,
            total_timesteps=14,
            algo_kwargs=settings,
            eval_episodes=0,
        )
    )
    return found


def test_each_action_is_one_update_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plain = events(tmp_path / "plain", patch, overlap=False)
    ahead = events(tmp_path / "ahead", monkeypatch, overlap=True)
    updates = [("update", count) for count in range(4)]
    assert [e for e in plain if e[0] == "update"] == updates
    assert [e for e in ahead if e[0] == "update"] == updates
    # Steps 11 to 14 act after 0, 1, 2, 3 updates; with overlap after 0, 0, 1, 2, and the action of
    # step 15 is chosen before the last update.
    assert [count for kind, count in plain if kind == "act"] == [0, 1, 2, 3]
    assert [count for kind, count in ahead if kind == "act"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("algo", ["ppo", "iql"])
def test_methods_that_do_not_act_while_they_learn_refuse_it(algo: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"overlap is true, but {algo} does not learn from"):
        train(small_config(algo, tmp_path, overlap=True))
    assert not list(tmp_path.iterdir())


def test_the_action_that_waits_is_taken_once_and_saved() -> None:
    ahead, other = ActionAhead(2, 3, ()), ActionAhead(2, 3, ())
    assert ahead.take() is None
    other.load_state_dict(ahead.state_dict())
    assert other.take() is None
    ahead.put(HostCopy.of(torch.arange(6).view(2, 3)))
    other.load_state_dict(ahead.state_dict())
    taken = other.take()
    assert taken is not None
    assert np.array_equal(taken.array(), np.arange(6).reshape(2, 3))
    assert taken.array().dtype == np.int64
    assert other.take() is None
