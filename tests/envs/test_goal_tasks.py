"""The built-in tasks with goals, and what tasks pay for goals that they did not give."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.envs import make_env
from rl_training.envs.factory import probe_env
from rl_training.envs.goal_rewards import GoalColumns, RulePayer, TaskPayer, goal_rewards
from rl_training.envs.snapshot import SnapshotWrapper
from rl_training.envs.tasks.goals import BitFlip, PointReach
from rl_training.errors import ConfigError, EnvError

ROBOTICS = "gymnasium_robotics:PointMaze_UMaze-v3"
needs_robotics = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium_robotics") is None, reason="not installed"
)
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("rl_training/BitFlip-v0", {"bits": 4}),
    ("rl_training/PointReach-v0", {"threshold": 0.5}),
    ("helpers.envs:AskedFlip", {"bits": 4}),
    ("helpers.envs:AskedReach", {"threshold": 0.5}),
]


def test_flipping_the_bits_that_differ_is_the_shortest_way() -> None:
    task = BitFlip()
    obs, _ = task.reset(seed=1)
    assert task.observation_space.contains(obs)
    differing = np.flatnonzero(obs["achieved_goal"] != obs["desired_goal"])
    rewards, outcomes = [], []
    for bit in differing:
        before = obs
        obs, reward, terminated, truncated, info = task.step(bit)
        assert np.flatnonzero(before["observation"] != obs["observation"]).tolist() == [bit]
        rewards.append(reward)
        outcomes.append((terminated, truncated, info["is_success"]))
    assert rewards == [-1.0] * (len(differing) - 1) + [0.0]
    assert outcomes[-1] == (True, False, True)
    assert set(outcomes[:-1]) == {(False, False, False)}


def test_an_episode_is_as_long_as_the_row_has_bits() -> None:
    task = BitFlip(bits=6)
    task.reset(seed=0)
    task.goal = 1 - task.state
    ends = [task.step(0)[2:4] for _ in range(6)]
    assert ends == [(False, False)] * 5 + [(False, True)]
    for seed in range(20):
        obs, _ = BitFlip(bits=1).reset(seed=seed)
        assert obs["achieved_goal"] != obs["desired_goal"], "it never begins at its goal"


def test_a_push_moves_the_point_and_edges_stop_it() -> None:
    task = PointReach()
    obs, _ = task.reset(seed=0)
    assert task.observation_space.contains(obs)
    task.set_state({"place": [0.0, 0.99], "velocity": [0.0, 0.5], "goal": [0.01, 1.0]})
    obs, reward, terminated, truncated, info = task.step(np.array([1.0, -2.0]))
    np.testing.assert_allclose(obs["observation"], [0.01, 1.0, 0.1, 0.0], atol=1e-7)
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"is_success": True})
    _, reward, _, _, info = task.step(np.array([1.0, 0.0]))
    assert reward == 0.0
    task.goal = np.array([-0.5, 0.0], np.float32)
    assert task.step(np.zeros(2))[1] == -1.0


@pytest.mark.parametrize(("env_id", "kwargs"), TASKS[:2])
def test_a_snapshot_goes_on_with_the_same_goal(env_id: str, kwargs: dict[str, Any]) -> None:
    first = SnapshotWrapper(make_env(env_id, kwargs), env_id)
    first.env.action_space.seed(0)
    first.reset(seed=3)
    actions = [first.env.action_space.sample() for _ in range(30)]

    def play(env: SnapshotWrapper, actions: list[Any]) -> list[Any]:
        seen = []
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            seen.append((obs.tolist(), reward, terminated, truncated))
            if terminated or truncated:
                seen.append(env.reset()[0].tolist())
        return seen

    play(first, actions[:6])
    assert first.resume_level == "exact"
    state = first.snapshot()
    second = SnapshotWrapper(make_env(env_id, kwargs), env_id)
    assert second.restore(state) is None
    assert play(second, actions[6:]) == play(first, actions[6:])


@pytest.mark.parametrize(("env_id", "kwargs"), TASKS)
def test_other_goals_are_paid_for_as_the_task_itself_would(
    env_id: str, kwargs: dict[str, Any]
) -> None:
    paying = goal_rewards(probe_env(env_id, kwargs), kwargs)
    rule_is_known = env_id.startswith("rl_training/")
    assert isinstance(paying.payer, RulePayer if rule_is_known else TaskPayer)
    assert paying.on_host != rule_is_known
    task: Any = make_env(env_id, kwargs).unwrapped
    rng = np.random.default_rng(0)
    if "Flip" in env_id:
        goals = rng.integers(0, 2, (2, 5, 40, 4)).astype(np.float32)
    else:
        goals = rng.uniform(-1, 1, (2, 5, 40, 2)).astype(np.float32)
    reward, ends = paying(*torch.from_numpy(goals))
    assert reward.dtype == torch.float32
    for place in np.ndindex(5, 40):
        pair = goals[0][place], goals[1][place]
        assert reward[place] == task.compute_reward(*pair, {})
        if "Flip" in env_id:
            assert ends is not None
            assert bool(ends[place]) == bool(task.compute_terminated(*pair, {}))
    assert {-1.0, 0.0} == set(reward.flatten().tolist())
    assert (ends is None) == ("Reach" in env_id), "without compute_terminated ends stay"


def test_a_batch_is_handed_over_at_once_where_the_task_takes_one() -> None:
    payers = [
        goal_rewards(probe_env(env_id, kwargs), kwargs).payer
        for env_id, kwargs in (TASKS[3], TASKS[2])
    ]
    assert [payer.reward._takes_batches for payer in payers] == [True, False]  # type: ignore[attr-defined]


def test_a_wrapped_task_is_asked_as_its_rule_may_not_hold() -> None:
    timed = {"max_episode_steps": 7, "wrappers": {"reward_scale": 2.0, "clip_reward": [-1, 1]}}
    paying = goal_rewards(probe_env("rl_training/BitFlip-v0", timed), timed)
    assert not paying.on_host, "what scales rewards is not around the task"
    ones = torch.ones(2, 20)
    assert paying(ones, ones)[0].tolist() == [0.0, 0.0]
    assert paying(ones, 0 * ones)[0].tolist() == [-1.0, -1.0], "twice -1, clipped"
    chained = {"wrappers": ["RecordEpisodeStatistics"]}
    assert goal_rewards(probe_env("rl_training/BitFlip-v0", chained), chained).on_host


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        (
            "CartPole-v1",
            r"hindsight needs observations with the parts achieved_goal and desired_goal, but "
            r"those of CartPole-v1 are a single array \[4\]; set it to null, or take such a task",
        ),
        (
            "helpers.envs:UnequalGoals",
            r"of one shape and type, .* are numbers \[2\] of float32 and numbers \[3\] of float32",
        ),
        ("helpers.envs:DearFlip", r"gave reward -1\.5, but compute_reward says -1 for its goals"),
        ("helpers.envs:EndlessFlip", r"gave terminated 0, but compute_terminated says 1"),
        ("helpers.envs:LogFlip", r"compute_reward\(.*\) must be finite, got nan"),
    ],
)
def test_what_cannot_be_paid_is_said_in_a_sentence(env_id: str, sentence: str) -> None:
    kwargs = {"bits": 1} if env_id.endswith("EndlessFlip") else {}
    with pytest.raises((ConfigError, EnvError), match=sentence) as caught:
        goal_rewards(probe_env(env_id, kwargs), kwargs)
    assert "\n" not in str(caught.value).replace("\n ", " ")


def test_a_task_without_the_method_is_told_which() -> None:
    env_id = "helpers.envs:WordlessGoals"
    with pytest.raises(
        EnvError, match=r"method compute_reward\(achieved_goal, desired_goal, info\)"
    ):
        goal_rewards(probe_env(env_id), {})


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [("BitFlip", {"bits": 0}), ("BitFlip", {"bits": 2000}), ("PointReach", {"threshold": 0.0})],
)
def test_sizes_that_make_no_task_are_refused(env_id: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"env_kwargs.{next(iter(kwargs))} must be"):
        make_env(f"rl_training/{env_id}-v0", kwargs)


def test_goals_are_found_in_rows_of_bytes() -> None:
    spec = probe_env("helpers.envs:SeenGoals")
    columns = GoalColumns.of(spec)
    assert columns.in_bytes
    row = make_env("helpers.envs:SeenGoals").reset(seed=0)[0]
    given = torch.from_numpy(row)[None]
    for place, goal in ((columns.achieved, [0.25, -2.0]), (columns.desired, [1e6, 1 / 3])):
        assert columns.numbers(given[..., place]).tolist() == [np.array(goal, np.float32).tolist()]


@needs_robotics
def test_a_maze_of_gymnasium_robotics_pays_for_other_goals() -> None:
    for kwargs in ({}, {"continuing_task": False}):
        paying = goal_rewards(probe_env(ROBOTICS, kwargs), kwargs)
        assert paying.on_host
        goals = torch.rand(2, 3, 8, 2, generator=torch.Generator().manual_seed(0))
        reward, ends = paying(*goals)
        near = (goals[0] - goals[1]).norm(dim=-1) <= 0.45
        assert torch.equal(reward, near.float())
        assert ends is not None
        assert torch.equal(ends, near & (kwargs.get("continuing_task") is False))
