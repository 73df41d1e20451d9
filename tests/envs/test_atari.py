"""Atari games: preprocessing, lives, whole games for evaluation, exact resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.tiny import run_cli
from rl_training.envs import evaluation_kwargs, make_env, probe_env
from rl_training.envs.atari import (
    AtariFrames,
    AtariLives,
    AtariOptions,
    _Shrink,
    emulator_kwargs,
)
from rl_training.envs.backends.atari_vector import why_no_atari_vector
from rl_training.envs.snapshot import SnapshotWrapper
from rl_training.errors import ConfigError
from rl_training.runtime.verify import verify_resume
from rl_training.testing.contract import small_config

GAME = "ALE/Breakout-v5"
HAS_ATARI = importlib.util.find_spec("ale_py") is not None
needs_atari = pytest.mark.skipif(not HAS_ATARI, reason="needs the atari extra")


def game(**atari: Any) -> Any:
    return make_env(GAME, {"wrappers": {"atari": atari}})


@pytest.mark.skipif(HAS_ATARI, reason="the atari extra is installed")
@pytest.mark.parametrize("preset", ["dqn/breakout_atari", "ppo/breakout_atari"])
def test_without_the_extra_a_preset_says_in_one_line_which_to_install(
    preset: str, tmp_path: Path
) -> None:
    said = run_cli("train", "-c", preset, "--output-dir", tmp_path).sentence()
    assert 'pip install "rl-training[atari]"' in said
    assert not list(tmp_path.iterdir())


def test_atari_preprocessing_is_for_atari_games() -> None:
    with pytest.raises(ConfigError, match=r"games named ALE/"):
        make_env("CartPole-v1", {"wrappers": {"atari": {}}})
    with pytest.raises(ConfigError, match=r"atari\.frame_skip"):
        make_env(GAME, {"wrappers": {"atari": {"frame_skip": 0}}})
    with pytest.raises(ConfigError, match=r"remove one of the keys"):
        make_env(GAME, {"wrappers": {"atari": {}, "pixels": {}}})


def test_evaluation_plays_whole_games_for_their_own_scores() -> None:
    kwargs = {"mode": 0, "wrappers": {"atari": {"frame_skip": 2}, "reward_scale": 0.5}}
    for_evaluation = evaluation_kwargs(kwargs)
    options = AtariOptions.model_validate(for_evaluation["wrappers"]["atari"])
    assert (options.episodic_life, options.clip_reward, options.frame_skip) == (False, False, 2)
    assert "reward_scale" not in for_evaluation["wrappers"]
    assert kwargs["wrappers"] == {"atari": {"frame_skip": 2}, "reward_scale": 0.5}
    assert evaluation_kwargs({"wrappers": {"pixels": {}}}) == {"wrappers": {"pixels": {}}}


@needs_atari
def test_the_task_is_four_grey_frames() -> None:
    spec = probe_env(GAME, {"wrappers": {"atari": {}}})
    assert (spec.obs_shape, spec.obs_dtype, spec.frame_stack) == ((4, 84, 84), "uint8", 4)


@needs_atari
@pytest.mark.parametrize("frame_skip", [1, 4])
def test_frames_are_those_of_gymnasiums_preprocessing(frame_skip: int) -> None:
    pytest.importorskip("cv2")
    import gymnasium as gym

    options = AtariOptions(noop_max=0, frame_skip=frame_skip)
    ours = make_env(GAME, emulator_kwargs(options))
    theirs = gym.make(GAME, frameskip=1, repeat_action_probability=0.0)
    left: Any = AtariFrames(ours, options)
    right: Any = gym.wrappers.AtariPreprocessing(theirs, noop_max=0, frame_skip=frame_skip)
    obs, other = left.reset(seed=3)[0], right.reset(seed=3)[0]
    scored = 0.0
    for step in range(120):
        # Both round an average of areas; it may fall on either side of a half.
        assert np.abs(obs[..., 0].astype(int) - other.astype(int)).max() <= 1, step
        action = step % 4
        obs, reward, ended, _, _ = left.step(action)
        other, their_reward, their_end, _, _ = right.step(action)
        assert (reward, ended) == (their_reward, their_end)
        scored += reward
    assert obs.std() > 0
    assert scored >= 0


@needs_atari
def test_a_lost_life_ends_an_episode_but_not_the_game() -> None:
    env = game(fire_reset=True, noop_max=0)
    env.reset(seed=0)
    lives, first_obs = [], []
    for _ in range(3):
        ended = False
        while not ended:
            _, _, ended, _, _ = env.step(0)
        lives.append(env.unwrapped.ale.lives())
        frames = env.reset()[0]
        first_obs.append(all((frame == frames[0]).all() for frame in frames))
    assert lives == [4, 3, 2]
    assert env.unwrapped.ale.lives() == 2
    assert first_obs == [True] * 3


@needs_atari
def test_a_whole_game_takes_all_lives_and_fire_is_pressed_for_each() -> None:
    env = game(fire_reset=True, noop_max=0, episodic_life=False, clip_reward=False)
    env.reset(seed=0)
    steps, ended = 0, False
    while not ended and steps < 3000:
        _, _, ended, _, _ = env.step(0)
        steps += 1
    assert ended, "without FIRE the ball would wait for ever"
    assert env.unwrapped.ale.lives() == 0


class Emulator(gym.Env[Any, Any]):
    """A game without pictures in which every 10th frame costs a life; it waits for FIRE."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (128,), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.frames: list[int] = []
        self.ale = self
        self.left, self.since, self.waits = 3, 0, True

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "RIGHT", "LEFT"]

    def getScreenDims(self) -> tuple[int, int]:  # noqa: N802 - the emulator's name
        return 40, 36

    def getScreenGrayscale(self, screen: np.ndarray) -> None:  # noqa: N802
        screen[:] = len(self.frames)

    def lives(self) -> int:
        return self.left

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left, self.since, self.waits = 3, 0, True
        return np.zeros(128, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.frames.append(int(action))
        self.waits = self.waits and action != 1
        self.since += not self.waits
        if self.since == 10:
            self.left, self.since, self.waits = self.left - 1, 0, True
        return np.zeros(128, np.uint8), 1.0, self.left == 0, False, {}


@pytest.mark.parametrize("episodic_life", [False, True])
def test_every_step_holds_the_action_that_it_was_given(episodic_life: bool) -> None:
    emulator = Emulator()
    options = AtariOptions(
        noop_max=0, screen_size=36, fire_reset=True, episodic_life=episodic_life, clip_reward=False
    )
    env = AtariLives(AtariFrames(emulator, options), options)
    env.reset(seed=0)
    ended, lost = False, []
    while emulator.left:
        if ended:
            env.reset()
        start, before = len(emulator.frames), emulator.left
        obs, reward, ended, _, _ = env.step(3)
        held = emulator.frames[start:]
        assert set(held[:4]) == {3}, "another action than the one that a replay holds"
        if emulator.left < before:
            lost.append((held[4:], emulator.waits))
        else:
            assert held == [3, 3, 3, 3]
        assert reward == len(held)
        assert obs[0, 0, 0] == len(emulator.frames), "what is seen is what the game shows"
    # FIRE follows in the step that loses the life, and the next one is the agent's again.
    assert lost == [([1, 1, 1, 1], False), ([1, 1, 1, 1], False), ([], True)]


class Lives:
    """Says how many lives are left."""

    def __init__(self) -> None:
        self.left = 3

    def lives(self) -> int:
        return self.left


def test_rewards_are_reduced_to_their_sign_in_training_alone() -> None:
    from helpers.envs import CounterEnv

    rewards = {}
    for clip in (True, False):
        base: Any = CounterEnv(length=5)
        base.ale = Lives()
        env = AtariLives(base, AtariOptions(clip_reward=clip))
        env.reset(seed=0)
        rewards[clip] = [env.step(0)[1] for _ in range(3)]
    assert rewards == {True: [1.0, 1.0, 1.0], False: [1.0, 2.0, 3.0]}


@needs_atari
def test_idle_steps_are_drawn_and_sticky_actions_can_be_had() -> None:
    starts = {game(noop_max=30).reset(seed=seed)[0].tobytes() for seed in range(4)}
    env = game(noop_max=30)
    frames = set()
    for seed in range(8):
        env.reset(seed=seed)
        frames.add(env.unwrapped.ale.getEpisodeFrameNumber())
    assert starts
    assert len(frames) > 3
    assert max(frames) <= 30
    assert game(sticky_actions=True).unwrapped.ale.getFloat(
        "repeat_action_probability"
    ) == pytest.approx(0.25)
    assert game().unwrapped.ale.getFloat("repeat_action_probability") == 0.0


@needs_atari
@pytest.mark.parametrize("sticky", [False, True])
def test_a_game_goes_on_exactly_from_a_snapshot(sticky: bool) -> None:
    def made() -> SnapshotWrapper:
        return SnapshotWrapper(game(sticky_actions=sticky, fire_reset=True))

    def play(env: SnapshotWrapper, key: int, steps: int) -> list[bytes]:
        seen = []
        for action in np.random.default_rng(key).integers(0, 4, steps):
            obs, reward, ended, _, _ = env.step(int(action))
            seen.append(obs.tobytes() + repr((reward, ended)).encode())
            if ended:
                seen.append(env.reset()[0].tobytes())
        return seen

    first, second = made(), made()
    assert (first.family, first.resume_level) == ("atari", "exact")
    first.reset(seed=3)
    play(first, 0, 150)
    second.reset(seed=8)
    assert second.restore(first.snapshot()) is None
    assert play(first, 1, 250) == play(second, 1, 250)


@needs_atari
def test_a_run_on_atari_resumes_to_the_bit(tmp_path: Path) -> None:
    config = small_config(
        "dqn",
        tmp_path,
        task=GAME,
        env_kwargs={"max_episode_steps": 60, "wrappers": {"atari": {"fire_reset": True}}},
        eval_episodes=0,
        algo_kwargs={"train_frequency": 8, "eval_interval": 0},
    )
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    assert report.resume_level == "exact"


@needs_atari
def test_coloured_frames_are_the_screens_colours_shrunk_one_by_one() -> None:
    grey, coloured = (game(noop_max=0, screen_size=64, frame_stack=1, grayscale=g) for g in (1, 0))
    assert grey.observation_space.shape == (1, 64, 64)
    assert coloured.observation_space.shape == (3, 64, 64)
    obs, _ = coloured.reset(seed=0)
    screen = np.asarray(coloured.unwrapped.ale.getScreenRGB())
    shrink = _Shrink(screen.shape[0], screen.shape[1], 64)
    for colour in range(3):
        assert np.array_equal(obs[colour], shrink(screen[..., colour])[..., 0])
    assert not np.array_equal(obs[0], obs[2])


@needs_atari
def test_colours_are_not_taken_by_the_vector_interface() -> None:
    reason = why_no_atari_vector(GAME, {"wrappers": {"atari": {"grayscale": False}}})
    assert reason is not None
    assert "grayscale is false" in reason
