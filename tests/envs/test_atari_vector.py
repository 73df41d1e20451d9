"""Atari games in the threads of ALE's vector interface: what our wrappers show, frame by frame."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("ale_py")

from helpers.steps import same_steps
from rl_training.envs import SeedVectorEnv, evaluation_kwargs, make_env
from rl_training.envs.atari import FIRE, NOOP, AtariFrames, AtariLives, AtariOptions
from rl_training.envs.atari import emulator_kwargs as emulator
from rl_training.envs.backends import atari_vector, kinds, processes
from rl_training.envs.backends.atari_vector import AtariVector
from rl_training.envs.backends.kinds import Mode, SyncEnvs
from rl_training.envs.backends.processes import WorkerEnvs
from rl_training.envs.spec import Array
from rl_training.envs.step import Step
from rl_training.envs.wrappers import PixelObservation
from rl_training.errors import CheckpointError, ConfigError, EnvError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import read_manifest
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import small_config

GAMES = ("ALE/Pong-v5", "ALE/Breakout-v5", "ALE/SpaceInvaders-v5")
BREAKOUT = GAMES[1]


def native(
    env_id: str = BREAKOUT,
    num_envs: int = 1,
    seeds: tuple[int, ...] = (0,),
    mode: Mode = "native",
    threads: int = 0,
    **atari: Any,
) -> SeedVectorEnv:
    kwargs: dict[str, Any] = {"wrappers": {"atari": atari}}
    return SeedVectorEnv.make(env_id, kwargs, num_envs, seeds, mode, threads=threads)


class HeldStart(AtariFrames):
    """A game begins as it does natively: FIRE is held for all frames of a step."""

    idle = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        frame = self._shrink(self._screen())
        for action in (*[NOOP] * self.idle, *[FIRE] * self._fires):
            frame = self._hold(action)[0]
        self._lives = self.lives
        return frame, {}


def wrapped(env_id: str, options: AtariOptions, idle: int = 0) -> Any:
    frames = HeldStart(make_env(env_id, emulator(options)), options)
    frames.idle = idle
    return PixelObservation(AtariLives(frames, options), None, 4, channel_first=True)


def assert_close(left: Array, right: Array) -> float:
    """At most one grey level apart; returns the share of pixels that are."""
    difference = np.abs(left.astype(int) - right.astype(int))
    assert difference.max() <= 1
    return float((difference > 0).mean())


@pytest.mark.parametrize("fire_reset", [False, True])
@pytest.mark.parametrize("episodic_life", [False, True])
@pytest.mark.parametrize("env_id", GAMES)
def test_frames_rewards_and_ends_are_those_of_our_wrappers(
    env_id: str, episodic_life: bool, fire_reset: bool
) -> None:
    options = AtariOptions(noop_max=0, fire_reset=fire_reset, episodic_life=episodic_life)
    envs = native(env_id, **options.model_dump())
    one = wrapped(env_id, options)
    obs, other = envs.reset()[0, 0], one.reset(seed=0)[0]
    shares = []
    for action in np.random.default_rng(1).integers(0, 4, 500).tolist():
        shares.append(assert_close(obs, other))
        step = envs.step(np.array([[action]]))
        other, reward, terminated, truncated, _ = one.step(action)
        ends = (bool(step.terminated[0, 0]), bool(step.truncated[0, 0]))
        assert (float(step.reward[0, 0]), *ends) == (reward, terminated, truncated)
        if not one.env._game_over:  # the interface does not show how a game ends
            shares.append(assert_close(step.final_obs[0, 0], other))
        if terminated or truncated:
            other, _ = one.reset()
        obs = step.obs[0, 0]
    assert np.mean(shares) < 1e-3
    envs.close()


def test_emulators_need_no_seed_for_equal_games() -> None:
    # A game's start is drawn by us, so that another seed plays the same game after it.
    envs = [native(seeds=(seed,), noop_max=0) for seed in (0, 5)]
    for env in envs:
        env.reset()
    for action in np.random.default_rng(0).integers(0, 4, (200, 1, 1)):
        left, right = (env.step(action) for env in envs)
        np.testing.assert_array_equal(left.obs, right.obs)


def test_idle_holds_at_the_start_are_drawn_for_each_environment() -> None:
    envs = native(num_envs=8, noop_max=30, episodic_life=False)
    envs.reset()
    assert isinstance(envs.backend, AtariVector)
    frames = [lane.playing.frame_number for lane in envs.backend.lanes]
    assert set(frames) <= {4 * holds for holds in range(8)}
    assert len(set(frames)) > 2
    idle = frames[0] // 4
    one = wrapped(BREAKOUT, AtariOptions(noop_max=0, episodic_life=False), idle)
    assert_close(envs.backend.observations()[0, 0], one.reset(seed=0)[0])


def played(envs: SeedVectorEnv, key: int, steps: int) -> list[Step]:
    shape = (steps, envs.num_seeds, envs.num_envs)
    return [envs.step(action) for action in np.random.default_rng(key).integers(0, 4, shape)]


def test_seeds_and_the_number_of_threads_do_not_influence_a_seed() -> None:
    both = native(num_envs=2, seeds=(3, 4))
    alone = native(num_envs=2, seeds=(4,), threads=1)
    assert alone.backend.note is not None
    assert "one thread" in alone.backend.note
    np.testing.assert_array_equal(both.reset()[1:], alone.reset())
    for action in np.random.default_rng(0).integers(0, 4, (250, 2, 2)):
        left, right = both.step(action), alone.step(action[1:])
        for field in Step._fields:
            np.testing.assert_array_equal(getattr(left, field)[1:], getattr(right, field))


def test_parts_that_are_stepped_in_turns_are_the_whole() -> None:
    whole, turns = (native(num_envs=5, seeds=(3, 4), fire_reset=True) for _ in "ab")
    np.testing.assert_array_equal(whole.reset(), turns.reset())
    assert [(part.start, part.stop) for part in turns.parts] == [(0, 2), (2, 5)]
    steps: list[list[Step]] = [[], []]
    actions = np.random.default_rng(0).integers(0, 4, (250, 2, 5))
    for number, action in enumerate(actions):
        for index, part in enumerate(turns.parts):
            if number:
                steps[index].append(turns.end(index))
            turns.begin(action[:, part], index)
    for index in range(2):
        steps[index].append(turns.end(index))
    for number, action in enumerate(actions):
        wanted = whole.step(action)
        for field in Step._fields:
            parts = [getattr(steps[index][number], field) for index in range(2)]
            np.testing.assert_array_equal(np.concatenate(parts, 1), getattr(wanted, field))
    assert turns.num_steps() == whole.num_steps() == len(actions)
    assert compare_states(turns.snapshot(), whole.snapshot()) == []
    with pytest.raises(EnvError, match="the game has actions 0 to 3"):
        turns.begin(np.full((2, 2), 4), 0)


def test_limits_truncate_and_begin_a_new_game() -> None:
    kwargs = {"wrappers": {"atari": {"noop_max": 0, "episodic_life": False}}}
    for limit in ({"max_episode_steps": 7}, {"max_num_frames_per_episode": 28}):
        envs = SeedVectorEnv.make("ALE/Pong-v5", kwargs | limit, 2, (0,), "native")
        first = envs.reset()
        steps = played(envs, 0, 14)
        ends = [bool(step.truncated.all()) for step in steps]
        assert ends == [False] * 6 + [True] + [False] * 6 + [True]
        assert not any(step.terminated.any() for step in steps)
        np.testing.assert_array_equal(steps[6].obs, first)
        assert (steps[6].final_obs != steps[6].obs).any()


def test_limits_and_lives_are_counted_as_our_wrappers_count_them() -> None:
    options = AtariOptions(noop_max=0, fire_reset=True)
    kwargs = {"wrappers": {"atari": options.model_dump()}, "max_episode_steps": 45}
    envs = SeedVectorEnv.make(BREAKOUT, kwargs, 1, (0,), "native")
    frames = gym.wrappers.TimeLimit(
        HeldStart(make_env(BREAKOUT, emulator(options)), options), max_episode_steps=45
    )
    one = AtariLives(frames, options)
    envs.reset()
    one.reset(seed=0)
    both = 0
    for action in np.random.default_rng(1).integers(0, 4, 400).tolist():
        step = envs.step(np.array([[action]]))
        _, reward, terminated, truncated, _ = one.step(action)
        ends = (bool(step.terminated[0, 0]), bool(step.truncated[0, 0]))
        assert (float(step.reward[0, 0]), *ends) == (reward, terminated, truncated)
        if terminated or truncated:
            one.reset()
            both += truncated
    assert both > 5


def test_evaluation_plays_whole_games_for_their_own_scores() -> None:
    kwargs = {"wrappers": {"atari": {"fire_reset": True}, "reward_scale": 0.5}}
    envs = SeedVectorEnv.make(BREAKOUT, evaluation_kwargs(kwargs), 1, (0,), "native")
    envs.reset()
    lives = []
    for _ in range(2000):
        step = envs.step(np.full((1, 1), 3))
        assert isinstance(envs.backend, AtariVector)
        if step.terminated.any():
            break
        lives.append(envs.backend.lanes[0].playing.lives)
    assert step.terminated.all()
    assert sorted(set(lives)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("sticky", [False, True])
def test_a_snapshot_is_replayed_to_the_same_bits(sticky: bool) -> None:
    first, second = (native(num_envs=2, sticky_actions=sticky, fire_reset=True) for _ in "ab")
    first.reset()
    played(first, 0, 220)  # beyond the first game
    state = first.snapshot()
    assert first.resume_level == "replay"
    assert [part["kind"] for part in state["per_seed"]] == ["atari_vector"]
    second.reset()
    played(second, 5, 30)
    report = second.restore(state)
    assert (report.level, report.restarted, report.messages) == ("replay", [], [])
    for left, right in zip(played(first, 1, 200), played(second, 1, 200), strict=True):
        assert same_steps(left, right)


@pytest.mark.parametrize("limit", [3, 40])
def test_games_that_wait_for_their_turn_leave_no_trace(limit: int) -> None:
    """Whether the next game was ready, half begun or given up, the same games are played."""

    def make() -> SeedVectorEnv:
        kwargs = {"wrappers": {"atari": {}}, "max_episode_steps": limit}
        return SeedVectorEnv.make(BREAKOUT, kwargs, 3, (0,), "native")

    through = make()
    through.reset()
    steps = played(through, 0, 90)
    assert sum(int(step.truncated.sum()) for step in steps) > 3
    for at in (0, 1, 5, 14, 45):
        cut = make()
        cut.reset()
        played(cut, 0, at)
        state = cut.snapshot()
        cut.restore(state)  # in place, while the next games are on their way
        fresh = make()
        fresh.restore(state)
        actions = np.random.default_rng(0).integers(4, size=(90, 1, 3))[at:]
        for action, wanted in zip(actions, steps[at:], strict=True):
            assert same_steps(cut.step(action), wanted)
            assert same_steps(fresh.step(action), wanted)


def test_a_replay_that_arrives_elsewhere_says_that_a_new_game_begins() -> None:
    envs = native(num_envs=2, seeds=(7,))
    envs.reset()
    played(envs, 0, 20)
    state = envs.snapshot()
    state["per_seed"][0]["games"][1]["sent"][:] = 0
    report = envs.restore(state)
    assert (report.level, report.restarted) == ("restart", [1])
    (said,) = report.messages
    assert said.startswith(f"environment {BREAKOUT} (index 1, seed 7): replaying its actions gave")
    assert said.endswith("a new game was begun")
    played(envs, 1, 5)


def test_a_long_game_begins_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atari_vector, "MAX_REPLAY_ACTIONS", 10)
    envs = native("ALE/Pong-v5")
    envs.reset()
    played(envs, 0, 20)
    state = envs.snapshot()
    assert envs.resume_level == "restart"
    report = envs.restore(state)
    assert report.restarted == [0]
    assert "its game was longer than 10 actions; a new game was begun" in report.messages[0]


def test_snapshots_of_the_other_backend_are_refused_in_both_directions() -> None:
    fast, slow = native(), native(mode="sync")
    for envs in (fast, slow):
        envs.reset()
    for one, other in ((fast, slow), (slow, fast)):
        with pytest.raises(CheckpointError, match=r"kind is .* resume with the vector_mode"):
            one.restore(other.snapshot())


def test_auto_keeps_the_wrappers_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kinds, processes):
        monkeypatch.setattr(module, "usable_cores", lambda: 3)
    envs = native(mode="auto", num_envs=4)
    assert isinstance(envs.backend, SyncEnvs)
    assert envs.note is not None
    assert "vector_mode native is faster but its frames may differ by one grey level" in envs.note
    chosen = native(num_envs=3)
    assert chosen.note == (
        "3 environments run in vector_mode native: all at once on 3 threads of ALE's vector "
        "interface"
    )


def test_auto_takes_processes_where_there_are_cores_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (kinds, processes):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    for few in (native(mode="auto", num_envs=3), native(mode="auto", num_envs=4, threads=3)):
        assert isinstance(few.backend, SyncEnvs)
    spread = native(mode="auto", num_envs=3, seeds=(0, 1))
    assert isinstance(spread.backend, WorkerEnvs)
    assert str(spread.note).startswith(
        "6 environments run in vector_mode async: in 3 processes with 2 each; vector_mode native "
        "is faster but"
    )
    alone = native(mode="sync", num_envs=3, seeds=(0, 1))
    assert np.array_equal(spread.reset(), alone.reset())
    for left, right in zip(played(spread, 3, 150), played(alone, 3, 150), strict=True):
        assert same_steps(left, right)
    again = native(mode="auto", num_envs=3, seeds=(0, 1))
    again.restore(alone.snapshot())
    for left, right in zip(played(again, 4, 50), played(alone, 4, 50), strict=True):
        assert same_steps(left, right)
    for envs in (spread, again):
        envs.close()


class OwnGame(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper around a game."""


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({}, "wrappers.atari is not set"),
        ({"wrappers": {"atari": {}}, "mode": 4}, r"env_kwargs\.mode cannot be had there; of"),
        (
            {"wrappers": {"atari": {}}, "render_mode": "rgb_array"},
            r"env_kwargs\.render_mode cannot be had",
        ),
        ({"wrappers": {"atari": {}}, "no_such_key": 1}, "no_such_key"),
        ({"wrappers": {"atari": {"no_such_option": 1}}}, r"atari\.no_such_option"),
    ],
)
def test_what_cannot_be_had_natively_is_one_sentence(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        SeedVectorEnv.make(BREAKOUT, kwargs, 1, (0,), "native")
    assert "\n" not in str(caught.value)


def test_a_wrapped_game_is_not_native() -> None:
    made = gym.make(BREAKOUT)
    registered = gym.registry[BREAKOUT]
    gym.register(
        "ALE/Wrapped-v0",
        entry_point=registered.entry_point,
        kwargs=dict(registered.kwargs),
        additional_wrappers=(OwnGame.wrapper_spec(),),
    )
    gym.register("ALE/Other-v0", entry_point=f"{__name__}:OwnGame", kwargs={"env": made})
    try:
        for env_id, said in (
            ("ALE/Wrapped-v0", "stands for a wrapped ale_py.env:AtariEnv"),
            ("ALE/Other-v0", "stands for .*:OwnGame"),
        ):
            reason = atari_vector.why_no_atari_vector(env_id, {"wrappers": {"atari": {}}})
            assert reason is not None
            assert re.search(said, reason)
    finally:
        del gym.registry["ALE/Wrapped-v0"], gym.registry["ALE/Other-v0"]
        made.close()


def test_an_old_ale_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ale_py.__version__", "0.10.2")
    with pytest.raises(
        ConfigError, match=r"needs ale-py 0\.12 or newer, and 0\.10\.2 is installed"
    ):
        native()


def test_an_action_that_the_game_does_not_have_is_an_error_and_does_not_hang() -> None:
    envs = native()
    envs.reset()
    backend = envs.backend
    with pytest.raises(ValueError, match="actions 0 to 3, got"):
        backend.step(np.array([[4]]))


def test_evaluation_takes_the_backend_of_training() -> None:
    kwargs: dict[str, Any] = {"wrappers": {"atari": {}}}
    for mode, kind in (("native", AtariVector), ("auto", SyncEnvs), ("async", SyncEnvs)):
        evaluator = Evaluator(BREAKOUT, kwargs, (0,), mode=mode)  # type: ignore[arg-type]
        assert isinstance(evaluator._environments(1).backend, kind)
        evaluator.close()


def test_a_run_resumes_to_the_bit_by_replay(tmp_path: Path) -> None:
    config = small_config(
        "dqn",
        tmp_path,
        task=BREAKOUT,
        env_kwargs={"max_episode_steps": 60, "wrappers": {"atari": {"fire_reset": True}}},
        vector_mode="native",
        eval_episodes=0,
        algo_kwargs={"train_frequency": 8, "eval_interval": 0},
    )
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    assert report.resume_level == "replay"


class Messages(Callback):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


def test_a_resumed_run_keeps_the_backend_and_says_where_a_new_game_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(
        "dqn",
        tmp_path,
        task=BREAKOUT,
        env_kwargs={"wrappers": {"atari": {}}},
        vector_mode="native",
        eval_episodes=0,
        algo_kwargs={"train_frequency": 8, "eval_interval": 0},
    )
    way = "1 environment runs in vector_mode native: all at once on one thread of ALE's vector"
    for limit, level in ((20_000, "replay"), (10, "restart")):
        monkeypatch.setattr(atari_vector, "MAX_REPLAY_ACTIONS", limit)
        cut = train(config.replace(run_name=level), stop_at=60)
        assert read_manifest(cut.checkpoint_path).header["resume_level"] == level
        messages = Messages()
        resume_training(cut.run_dir, callbacks=[messages])
        assert any(text.startswith(way) for text in messages.texts)
        assert any("a new game was begun" in t for t in messages.texts) == (level == "restart")
