"""Hindsight against a slow version that walks through episodes, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.hindsight import (
    UNKNOWN,
    HindsightReplayBuffer,
    PrioritizedHindsightReplayBuffer,
    Strategy,
)
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.envs.goal_rewards import GoalColumns, GoalRewards, RulePayer
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.goals import GoalRule, same
from rl_training.envs.wrappers import RewardMap
from rl_training.runtime.compile.cache import as_traced
from rl_training.runtime.compile.trace import Source, tensor_randomness, trace
from rl_training.spaces import observation_spec

Array = NDArray[Any]
ENVS, GAMMA, STEPS = 3, 0.9, 70
STRATEGIES: tuple[Strategy, ...] = ("future", "final", "episode")
PARTS = observation_spec(
    spaces.Dict(
        {
            "achieved_goal": spaces.Box(-np.inf, np.inf, (2,)),
            "desired_goal": spaces.Box(-np.inf, np.inf, (2,)),
            "observation": spaces.Box(-np.inf, np.inf, (1,)),
        }
    ),
    "goals",
)
PLACE = {name: PARTS.columns(name) for name in PARTS.names()}
SPEC = EnvSpec(
    env_id="goals",
    obs_shape=(PARTS.width,),
    obs_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    num_actions=2,
    action_dtype="int64",
    observation=PARTS,
)


@dataclass
class Told:
    """A step as it happened; what it achieved names it."""

    begins: int
    achieved: tuple[float, float]
    reward: float
    terminated: bool
    truncated: bool


class Story:
    """What happens in the environments of some seeds; a seed's part does not depend on others."""

    def __init__(self, seeds: Iterable[int], steps: int = STEPS, longest: int = 9) -> None:
        self.told = {
            seed: [self._lane(seed, env, steps, longest) for env in range(ENVS)] for seed in seeds
        }
        self.seeds = tuple(self.told)

    def _lane(self, seed: int, env: int, steps: int, longest: int) -> list[Told]:
        rng = np.random.default_rng([seed, env])
        lane: list[Told] = []
        begins = 0
        for step in range(steps):
            ends = bool(rng.random() < 2 / longest)
            terminated = ends and bool(rng.random() < 0.5)
            truncated = ends and (not terminated or bool(rng.random() < 0.2))
            achieved = (float(100 * seed + env), float(step))
            lane.append(Told(begins, achieved, float(rng.normal()), terminated, truncated))
            begins = step + 1 if ends else begins
        return lane

    def row(self, seed: int, env: int, step: int, *, after: bool) -> Array:
        """What is seen before or after a step; what was achieved before an episode is -1."""
        told = self.told[seed][env][step]
        row = np.zeros(PARTS.width, np.float32)
        row[PLACE["desired_goal"]] = (-7, told.begins)
        first = step == told.begins and not after
        earlier = (-1.0, -1.0) if first else self.told[seed][env][step - 1].achieved
        row[PLACE["achieved_goal"]] = told.achieved if after else earlier
        row[PLACE["observation"]] = step + after
        return row

    def arrays(self, step: int) -> StepArrays:
        def of(name: str, dtype: Any) -> Array:
            told = [[getattr(lane[step], name) for lane in self.told[s]] for s in self.seeds]
            return np.array(told, dtype)

        obs, next_obs = (
            np.array([[self.row(s, e, step, after=a) for e in range(ENVS)] for s in self.seeds])
            for a in (False, True)
        )
        action = np.full((len(self.seeds), ENVS), step % 2)
        ends = of("terminated", bool), of("truncated", bool)
        return StepArrays(obs, action, of("reward", np.float32), next_obs, *ends)

    def add_to(self, replay: ReplayBuffer, steps: Iterable[int]) -> None:
        for step in steps:
            replay.add_step(self.arrays(step))


def make(
    strategy: Strategy = "future",
    *,
    kind: Any = HindsightReplayBuffer,
    seeds: tuple[int, ...] = (4, 5),
    share: float = 1.0,
    capacity: int = 60,
    n_step: int = 1,
    terminates: bool = False,
    transform: RewardMap | None = None,
    **options: Any,
) -> HindsightReplayBuffer:
    payer = RulePayer(GoalRule(same, terminates))
    goals = GoalRewards(GoalColumns.of(SPEC), payer, transform)
    own = {"goals": goals, "strategy": strategy, "share": share}
    made: HindsightReplayBuffer = kind(
        capacity,
        (PARTS.width,),
        action_dtype=torch.int64,
        num_envs=ENVS,
        seeds=seeds,
        gamma=GAMMA,
        n_step=n_step,
        **own,
        **options,
    )
    return made


def steps_of(replay: ReplayBuffer, index: Tensor, newest: int) -> tuple[Array, Array]:
    """Which step and environment rows hold, when `newest` steps have been stored."""
    size = replay.capacity // ENVS
    row = index.numpy() // ENVS
    last = (newest - 1) % size
    return newest - 1 - (last - row) % size, index.numpy() % ENVS


def allowed_goals(lane: list[Told], step: int, newest: int, kept: int, strategy: str) -> list[int]:
    """The steps whose goals may be drawn, found by walking through the episode."""
    last = step
    while not (lane[last].terminated or lane[last].truncated) and last + 1 < newest:
        last += 1
    if strategy == "final":
        return [last]
    first = step
    while strategy == "episode" and first > lane[step].begins and first - 1 >= newest - kept:
        first -= 1
    return list(range(first, last + 1))


def slow_return(
    lane: list[Told], step: int, newest: int, goal: int, n_step: int, terminates: bool
) -> tuple[float, float, int]:
    """Sum, discount of the bootstrap, and last step, if `goal` is what step `goal` achieved."""
    total, stopped = 0.0, False
    for k in range(n_step):
        told, last = lane[step + k], step + k
        reached = last == goal
        total += GAMMA**k * (0.0 if reached else -1.0)
        stopped = reached if terminates else told.terminated
        if stopped or told.terminated or told.truncated or last + 1 == newest:
            break
    return total, 0.0 if stopped else GAMMA ** (last - step + 1), last


@pytest.mark.parametrize("terminates", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_draw_is_what_a_slow_relabeller_allows(
    strategy: Strategy, n_step: int, terminates: bool
) -> None:
    story = Story((4, 5))
    replay = make(strategy, n_step=n_step, terminates=terminates)
    kept, cut_off, in_progress = replay.capacity // ENVS, 0, 0
    for newest in (1, 2, 7, 20, 21, 33, STEPS):  # before, while and after the ring is full
        story.add_to(replay, range(replay.inserted.value // ENVS, newest))
        for _ in range(4):
            batch = replay.sample(32)
            assert batch.index is not None
            steps, envs = steps_of(replay, batch.index, newest)
            for s, seed in enumerate(story.seeds):
                for b, (step, env) in enumerate(zip(steps[s], envs[s], strict=True)):
                    lane = story.told[seed][env]
                    goal = batch.obs[s, b, PLACE["desired_goal"]]
                    assert goal[0] == 100 * seed + env, "a goal of this seed and environment"
                    chosen = int(goal[1])
                    allowed = allowed_goals(lane, step, newest, kept, strategy)
                    assert chosen in allowed
                    cut_off += lane[step].begins < newest - kept
                    in_progress += allowed[-1] == newest - 1
                    paid, discount, last = slow_return(
                        lane, step, newest, chosen, n_step, terminates
                    )
                    assert batch.reward[s, b].item() == pytest.approx(paid, abs=1e-6)
                    assert batch.discount[s, b].item() == pytest.approx(discount, abs=1e-6)
                    for ours, at, after in ((batch.obs, step, False), (batch.next_obs, last, True)):
                        row = story.row(seed, env, at, after=after)
                        row[PLACE["desired_goal"]] = goal
                        np.testing.assert_array_equal(ours[s, b].numpy(), row)
                    assert batch.action[s, b] == step % 2
    assert cut_off, "episodes whose beginning is overwritten occurred"
    assert in_progress, "and episodes in progress"


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_goals_are_uniform_among_those_allowed(strategy: Strategy) -> None:
    story, replay = Story((4,)), make(strategy, seeds=(4,), capacity=90)
    story.add_to(replay, range(30))
    drawn: dict[tuple[int, int], list[int]] = {}
    for _ in range(60):
        batch = replay.sample(512)
        assert batch.index is not None
        steps, envs = steps_of(replay, batch.index, 30)
        goals = batch.obs[0, :, PLACE["desired_goal"]][:, 1].int().tolist()
        for step, env, goal in zip(steps[0].tolist(), envs[0].tolist(), goals, strict=True):
            drawn.setdefault((step, env), []).append(goal)
    assert len(drawn) == 90, "every row is drawn"
    for (step, env), goals in drawn.items():
        allowed = allowed_goals(story.told[4][env], step, 30, 30, strategy)
        share = 1 / len(allowed)
        for goal in allowed:
            frequency = goals.count(goal) / len(goals)
            assert abs(frequency - share) < 5 * np.sqrt(share * (1 - share) / len(goals)) + 1e-9


@pytest.mark.parametrize("goals", [1, 4])
def test_the_share_of_other_goals_is_k_of_k_plus_1(goals: int) -> None:
    share = goals / (goals + 1)
    story, replay = Story((4, 5)), make(share=share)
    story.add_to(replay, range(30))
    changed = torch.cat(
        [replay.sample(500).obs[..., PLACE["desired_goal"].start] for _ in range(20)], 1
    )
    found = (changed != -7).float().mean(1)  # [S], of 10,000 rows each
    assert (abs(found - share) < 5 * (share * (1 - share) / 10_000) ** 0.5).all()


@pytest.mark.parametrize("n_step", [1, 3])
def test_without_a_share_batches_are_those_of_a_plain_replay(n_step: int) -> None:
    story, replay = Story((4, 5)), make("episode", share=0.0, n_step=n_step, terminates=True)
    plain = ReplayBuffer(
        60,
        (PARTS.width,),
        action_dtype=torch.int64,
        num_envs=ENVS,
        seeds=(4, 5),
        gamma=GAMMA,
        n_step=n_step,
    )
    for buffer in (replay, plain):
        story.add_to(buffer, range(33))
    assert_same(replay.sample(64), plain.sample(64))


def assert_same(left: TransitionBatch, right: TransitionBatch) -> None:
    for name in ("obs", "action", "reward", "next_obs", "discount", "index"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


def test_rewards_are_mapped_and_scaled_as_stored_ones_are() -> None:
    transform = RewardMap(scale=0.7, low=-0.5)
    story, replay = Story((4, 5)), make(transform=transform, reward_scale=3.0, reward_shift=0.25)
    story.add_to(replay, range(20))
    assert set(replay.sample(256).reward.flatten().tolist()) == {0.25, -0.5 * 3 + 0.25}


@pytest.mark.parametrize("kind", [HindsightReplayBuffer, PrioritizedHindsightReplayBuffer])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stacked_seeds_draw_what_each_draws_alone(strategy: Strategy, kind: Any) -> None:
    group = make(strategy, seeds=(4, 5, 6), share=0.8, n_step=2, kind=kind)
    Story((4, 5, 6)).add_to(group, range(33))
    together = [group.sample(16) for _ in range(3)]
    for place, seed in enumerate((4, 5, 6)):
        alone = make(strategy, seeds=(seed,), share=0.8, n_step=2, kind=kind)
        Story((seed,)).add_to(alone, range(33))
        for batch in together:
            own = alone.sample(16)
            for name in ("obs", "reward", "next_obs", "discount", "index"):
                assert torch.equal(getattr(batch, name)[place], getattr(own, name)[0]), name


@pytest.mark.parametrize("kind", [HindsightReplayBuffer, PrioritizedHindsightReplayBuffer])
@pytest.mark.parametrize("cut", [3, 20, 31])
def test_a_restored_replay_goes_on_in_the_middle_of_episodes(cut: int, kind: Any) -> None:
    story = Story((4, 5))
    whole, stopped, restored = (make("episode", kind=kind, share=0.8) for _ in range(3))
    story.add_to(whole, range(40))
    story.add_to(stopped, range(cut))
    start, stop = stopped.segment_range()
    restored.load_state_dict(stopped.state_dict())
    restored.load_rows(start, stopped.read_rows(start, stop))
    story.add_to(restored, range(cut, 40))
    for name, tensor in whole.places.state_dict().items():
        assert torch.equal(restored.places.state_dict()[name], tensor), name
    assert_same(restored.sample(64), whole.sample(64))


def test_an_episode_that_could_not_be_kept_ends_where_the_run_was_cut() -> None:
    """Environments without snapshots begin a new one: its goals are none of the old one's."""
    story = Story((4,), longest=10**6)  # one long episode
    stopped, restored = make(seeds=(4,)), make(seeds=(4,))
    story.add_to(stopped, range(5))
    restored.load_state_dict(stopped.state_dict())
    restored.load_rows(0, stopped.read_rows(0, 5 * ENVS))
    step = story.arrays(5)
    step.obs[0, 1] += 1  # the environment in the middle is not where it was
    restored.add_step(step)
    left = restored.places.left[0, : 6 * ENVS].view(6, ENVS)
    assert left[:, 1].tolist() == [4, 3, 2, 1, 0, UNKNOWN]
    assert (left[:, [0, 2]] == UNKNOWN).all()
    assert restored.places.ages[0, : 6 * ENVS].view(6, ENVS)[5].tolist() == [5, 0, 5]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("episode", HindsightReplayBuffer),
        pytest.param("future", PrioritizedHindsightReplayBuffer, marks=pytest.mark.matrix),
        pytest.param("final", HindsightReplayBuffer, marks=pytest.mark.matrix),
    ],
)
def test_a_traced_draw_is_the_eager_one(strategy: Strategy, kind: Any) -> None:
    story = Story((4, 5))
    replay, same_one = (make(strategy, kind=kind, share=0.8, n_step=2) for _ in range(2))
    for buffer in (replay, same_one):
        story.add_to(buffer, range(15))

    def draw() -> dict[str, Tensor]:
        batch = replay.sample(32)
        assert batch.index is not None
        names = ("obs", "action", "reward", "next_obs", "discount", "index")
        return {name: getattr(batch, name) for name in names}

    source = Source("draw", draw, {"replay": replay})
    before = replay.rng.state_dict()
    made = trace(source)
    replay.rng.load_state_dict(before)
    assert not [n.target for n in made.graph.graph.nodes if n.op == "get_attr"], "no constants"
    program = as_traced(made, source)
    for stored in (15, 33):  # the same program serves while the ring fills
        for buffer in (replay, same_one):
            story.add_to(buffer, range(buffer.inserted.value // ENVS, stored))
        with tensor_randomness({"replay": same_one}):
            expected = same_one.sample(32)
        ours = program()
        for name, tensor in ours.items():
            assert torch.equal(tensor, getattr(expected, name)), name


def test_priorities_are_kept_by_row() -> None:
    story, replay = (
        Story((4,), longest=10**6),
        make(kind=PrioritizedHindsightReplayBuffer, seeds=(4,), priority_exponent=1.0),
    )
    story.add_to(replay, range(20))
    index = torch.arange(60).unsqueeze(0)
    replay.update_priorities(index, (index == 17).float())
    batch = replay.sample(200)
    assert batch.index is not None
    assert (batch.index == 17).float().mean() > 0.95
    steps = batch.obs[0, :, PLACE["desired_goal"]][:, 1]
    assert len(set(steps.tolist())) > 1, "each draw has a goal of its own"
    assert batch.weight is not None
    assert batch.weight.max() == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [HindsightReplayBuffer, PrioritizedHindsightReplayBuffer])
def test_an_accelerator_draws_what_the_host_does(kind: Any, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    story, direct = Story((4, 5)), make("episode", kind=kind, n_step=3, share=0.8)
    staged = make("episode", kind=kind, n_step=3, share=0.8, device=device)
    staged._arrays = None  # on a CPU too, go the way of an accelerator
    for steps in (range(9), range(9, 33)):
        for buffer in (direct, staged):
            story.add_to(buffer, steps)
        ours, theirs = staged.sample(32), direct.sample(32)
        for name in ("obs", "action", "next_obs", "index"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
        for name in ("reward", "discount"):
            torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name))
