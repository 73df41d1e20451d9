"""The built-in reach task from pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_training.envs import make_env
from rl_training.envs.snapshot import SnapshotWrapper
from rl_training.envs.tasks.pixel_reach import EPISODE, LARGEST_MOVE, PixelReach
from rl_training.errors import ConfigError

TASK = "rl_training/PixelReach-v0"


def centre(channel: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Where on the table a disc was drawn."""
    weights = channel / channel.sum()
    at = (np.arange(size) + 0.5) / size * 2 - 1
    return np.array([weights.sum(1) @ at, weights.sum(0) @ at])


@pytest.mark.parametrize("size", [24, 48])
def test_an_image_shows_both_places_between_pixels(size: int) -> None:
    env = PixelReach(size)
    obs, _ = env.reset(seed=0)
    for place, goal in (([0.3, -0.62], [0.0, 0.0]), ([-0.51, 0.4], [0.77, 0.13])):
        env.set_state({"place": np.array(place), "goal": np.array(goal)})
        obs = env.step(np.zeros(2))[0]
        assert env.observation_space.contains(obs)
        assert centre(obs[0], size) == pytest.approx(place, abs=0.03)
        assert centre(obs[1], size) == pytest.approx(goal, abs=0.03)


def test_a_move_is_bounded_and_stops_at_the_edge_and_the_reward_is_minus_the_distance() -> None:
    env = PixelReach()
    env.reset(seed=0)
    env.set_state({"place": np.array([0.9, 0.0]), "goal": np.array([1.0, 0.3])})
    _, reward, terminated, truncated, _ = env.step(np.array([0.5, 7.0], np.float32))
    assert env.place == pytest.approx([1.0, LARGEST_MOVE])
    assert reward == pytest.approx(-0.1)
    _, reward, _, _, _ = env.step(np.array([1.0, 0.5], np.float32))
    assert env.place == pytest.approx([1.0, 0.3])
    assert reward == pytest.approx(0.0, abs=1e-6)
    assert not terminated
    assert not truncated


def test_an_episode_is_cut_off_after_its_steps() -> None:
    env = make_env(TASK)
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(EPISODE)]
    assert ends == [(False, False)] * (EPISODE - 1) + [(False, True)]


def test_the_returns_of_a_random_and_of_the_best_player_are_what_the_task_says() -> None:
    env, generator = PixelReach(8), np.random.default_rng(0)
    returns: dict[str, list[float]] = {"random": [], "best": []}
    for seed in range(200):
        for player, kept in returns.items():
            env.reset(seed=seed)
            total = 0.0
            for _ in range(EPISODE):
                straight = np.clip((env.goal - env.place) / LARGEST_MOVE, -1, 1)
                total += env.step(straight if player == "best" else generator.uniform(-1, 1, 2))[1]
            kept.append(total)
    assert np.mean(returns["best"]) == pytest.approx(-2.3, abs=0.3)
    assert np.mean(returns["random"]) == pytest.approx(-26, abs=2)


def test_it_goes_on_exactly_from_a_snapshot() -> None:
    def made() -> SnapshotWrapper:
        return SnapshotWrapper(make_env(TASK))

    def play(env: SnapshotWrapper) -> list[bytes]:
        shown = []
        for action in np.random.default_rng(1).uniform(-1, 1, (60, 2)).astype(np.float32):
            obs, reward, _, ended, _ = env.step(action)
            shown.append(obs.tobytes() + repr(reward).encode())
            if ended:
                shown.append(env.reset()[0].tobytes())
        return shown

    first, second = made(), made()
    assert first.resume_level == "exact"
    first.reset(seed=3)
    for _ in range(7):
        first.step(np.full(2, 0.3, np.float32))
    second.reset(seed=8)
    assert second.restore(first.snapshot()) is None
    assert play(first) == play(second)


@pytest.mark.parametrize("size", [7, 513, True])
def test_a_size_that_makes_no_image_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="image_size must be from 8 to 512"):
        make_env(TASK, {"image_size": size})
