"""`Collector`: what it hands on, and its books of episodes."""

from __future__ import annotations

import numpy as np
import torch

from helpers.envs import CounterEnv
from rl_training.envs import SeedVectorEnv
from rl_training.runtime.collector import WINDOW, Collector

COUNTER = f"{CounterEnv.__module__}:CounterEnv"


def started(length: int = 3, num_envs: int = 2) -> Collector:
    collector = Collector(
        SeedVectorEnv.make(COUNTER, {"length": length}, num_envs, [0, 1]), torch.device("cpu")
    )
    collector.start()
    return collector


def step(collector: Collector, times: int) -> None:
    for _ in range(times):
        collector.step(np.zeros((2, collector.envs.num_envs), np.int64))


def test_a_step_holds_what_was_seen_and_what_came_of_it() -> None:
    collector = started()
    seen = collector.obs
    collected = collector.step(np.ones((2, 2), np.int64))
    assert collected.obs is seen
    assert collected.action.tolist() == [[1, 1], [1, 1]]
    assert collector.obs is collected.step.obs


def test_returns_and_lengths_are_those_of_the_episodes() -> None:
    collector = started(length=3)
    assert collector.summary(0) == {}
    step(collector, 2)
    assert collector.episode_length.tolist() == [[2, 2], [2, 2]]
    assert collector.episode_return.tolist() == [[3, 3], [3, 3]]  # rewards 1, 2
    step(collector, 2)
    assert collector.episode_length.tolist() == [[1, 1], [1, 1]]
    assert collector.episode_return.tolist() == [[1, 1], [1, 1]]
    expected = {"rollout/return_mean": 6, "rollout/length_mean": 3, "rollout/episodes": 2}
    assert [collector.summary(seed) for seed in (0, 1)] == [expected] * 2


def test_it_tells_where_episodes_begin() -> None:
    collector = started(length=3)
    found = []
    for _ in range(7):
        assert collector.at_start == bool(collector.starts().any())
        found.append(collector.at_start)
        step(collector, 1)
    assert found == [True, False, False, True, False, False, True]


def test_the_summary_is_of_the_last_episodes() -> None:
    collector = started(length=1)
    step(collector, WINDOW)
    collector.recent[0] = 0.0
    step(collector, 1)
    assert collector.summary(0)["rollout/episodes"] == 2 * WINDOW + 2
    assert collector.recent[0, :, 1].sum() == 2, "one place for each of the two environments"


def test_the_books_go_on_after_a_round_trip() -> None:
    run, resumed = started(length=4), started(length=4)
    step(run, 6)
    step(resumed, 1)
    state = run.state_dict()
    assert state["episode_length"].tolist() == [[2, 2], [2, 2]]
    assert resumed.load_state_dict(state) == []
    for collector in (run, resumed):
        step(collector, 5)
    for name in ("obs", "episode_return", "episode_length", "recent", "episodes"):
        assert np.array_equal(getattr(run, name), getattr(resumed, name)), name
