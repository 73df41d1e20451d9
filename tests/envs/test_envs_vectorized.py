"""Vectorised CartPole: the bits of environments run one by one, alone or with other seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.envs import CounterEnv
from helpers.steps import random_actions, same_steps
from helpers.vector_env import VectorEnv
from rl_training.envs import SeedVectorEnv
from rl_training.envs.backends import kinds as backends
from rl_training.envs.backends.classic import MaskedCartPole

COUNTER = f"{CounterEnv.__module__}:CounterEnv"


@pytest.mark.parametrize("num_envs", [1, 3])
def test_vectorised_cartpole_resets_in_the_step_that_ends(
    num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_MIN_VECTORIZED", 1)
    env = VectorEnv("CartPole-v1", {"max_episode_steps": 3}, num_envs, seed=0)
    assert isinstance(env.backend, MaskedCartPole)
    env.reset()
    for t in range(1, 13):
        step = env.step(np.full(num_envs, t % 2))
        assert step.truncated.tolist() == [t % 3 == 0] * num_envs
        moved = np.abs(step.final_obs - step.obs).max(axis=1) > 0
        assert moved.tolist() == [t % 3 == 0] * num_envs
        assert step.reward.tolist() == [1.0] * num_envs
        if t % 3 == 0:
            assert (np.abs(step.obs) <= 0.05).all(), "a start state"
            assert np.abs(step.final_obs[:, 1]).min() > 0.05, "three pushes move the cart"


@pytest.mark.parametrize("kwargs", [{}, {"max_episode_steps": 3}])
def test_vectorised_cartpole_is_bit_identical_to_sync(kwargs: dict[str, int]) -> None:
    fast = VectorEnv("CartPole-v1", kwargs, 5, seed=3)
    slow = VectorEnv("CartPole-v1", kwargs, 5, seed=3, mode="sync")
    assert isinstance(fast.backend, MaskedCartPole)
    assert not isinstance(slow.backend, MaskedCartPole)
    assert np.array_equal(fast.reset(), slow.reset())
    for actions in random_actions(fast.spec, (300, 5)):
        assert same_steps(fast.step(actions), slow.step(actions))


def test_vectorised_cartpole_is_bit_identical_over_whole_episodes() -> None:
    fast = VectorEnv("CartPole-v1", {}, 7, seed=1)
    slow = VectorEnv("CartPole-v1", {}, 7, seed=1, mode="sync")
    obs, _ = fast.reset(), slow.reset()
    truncated = 0
    for _ in range(1100):
        # Keeps the pole up, so that states far from the start and the time limit are met.
        left, right = ((env.step((obs[:, 2] + obs[:, 3] > 0).astype(int))) for env in (fast, slow))
        assert same_steps(left, right)
        obs = left.obs
        truncated += int(left.truncated.sum())
    assert truncated >= 7


@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.parametrize("kwargs", [{}, {"max_episode_steps": 9}])
def test_vectorised_seeds_equal_seeds_alone_and_resume_alone(
    num_envs: int, kwargs: dict[str, int]
) -> None:
    seeds = (3, 8, 0, 11)
    together = SeedVectorEnv.make("CartPole-v1", kwargs, num_envs, seeds)
    assert isinstance(together.backend, MaskedCartPole)
    alone = [SeedVectorEnv.make("CartPole-v1", kwargs, num_envs, [s], "auto") for s in seeds]
    together.reset()
    for env in alone:
        env.reset()
    rng = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(60):
            actions = rng.integers(0, 2, (4, num_envs))
            step = together.step(actions)
            parts = [env.step(a[None]) for env, a in zip(alone, actions, strict=True)]
            for name, array in step._asdict().items():
                expected = np.concatenate([getattr(part, name) for part in parts])
                assert array.tobytes() == expected.tobytes(), name
        state = together.snapshot()
        assert repr(state["per_seed"]) == repr([e.snapshot()["per_seed"][0] for e in alone])
        # Seeds go on alone from what they left together, and together from what they left alone.
        shuffled = [state["per_seed"][i] for i in (1, 0, 3, 2)]
        assert together.restore({"per_seed": shuffled}).level == "exact"
        for env, part in zip(alone, shuffled, strict=True):
            env.restore({"per_seed": [part]})


@pytest.mark.parametrize(
    ("env_id", "kwargs", "num_envs"),
    [("CartPole-v1", {}, 3), ("CartPole-v1", {"render_mode": "rgb_array"}, 8), (COUNTER, {}, 8)],
)
def test_only_plain_large_cartpole_is_vectorised(
    env_id: str, kwargs: dict[str, Any], num_envs: int
) -> None:
    env = VectorEnv(env_id, kwargs, num_envs, seed=0)
    assert not isinstance(env.backend, MaskedCartPole)
    env.close()


def test_masked_cartpole_never_resets_by_itself() -> None:
    env = MaskedCartPole((1, 1), max_episode_steps=2)
    env.reset([0])
    flags = [bool(env.step(np.ones((1, 1), dtype=np.int64))[3][0, 0]) for _ in range(4)]
    assert flags == [False, True, True, True]
