"""Observations and rewards normalised by what a run has seen: the numbers, and where they stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from rl_training import DQN, PPO, SAC
from rl_training.algorithms.base import AnyLearner, OnPolicyLearner
from rl_training.algorithms.spec import Loop
from rl_training.data.batch import RolloutBatch, SequenceBatch, TransitionBatch
from rl_training.data.datasets.config import DatasetSettings
from rl_training.data.normalizer import DiscountedReturns, ReturnScale, RunningNorm
from rl_training.errors import ConfigError, SpecMismatch
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.models.rows import as_floats, is_number
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.collector import RunningStatistics
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.testing.contract import (
    PIXEL_TASK,
    Parts,
    build,
    flat_state,
    make_batch,
    no_host_reads,
    small_config,
)
from rl_training.tools.export import export_agent

BOTH: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
ONLINE = [
    name
    for name in algorithm_names()
    if {"normalize_observations", "normalize_rewards"}
    <= get_algorithm_spec(name).config_class.model_fields.keys()
    and not issubclass(get_algorithm_spec(name).config_class, DatasetSettings)
    and name != "gail"
]
TRANSITIONS, ROLLOUTS, SEQUENCES = (
    [name for name in ONLINE if get_algorithm_spec(name).learner.batch_class is kind]
    for kind in (TransitionBatch, RolloutBatch, SequenceBatch)
)
Array = NDArray[Any]


def slow_scale(reward: Array, ended: Array, gamma: float) -> tuple[Array, Array]:
    """Every discounted return `[T, n]` in turn, and their variance in the end; one seed."""
    running, seen = np.zeros(reward.shape[1]), []
    for step in range(len(reward)):
        running = gamma * running + reward[step]
        seen.append(running.copy())
        running[ended[step]] = 0
    returns = np.array(seen)
    return returns, returns.var()


def test_the_running_statistics_are_those_of_all_rows_at_once() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(300, 2, size=(2, 4_000, 3))  # far from 0: float32 would not do
    norm = RunningNorm(2, (3,), "cpu", torch.float64)
    for start in range(0, 4_000, 2):
        norm.update(torch.from_numpy(rows[:, start : start + 2].astype(np.float32)))
    exact = rows.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(norm.mean[:, 0], exact.mean(1), rtol=1e-9)
    np.testing.assert_allclose(norm.variance[:, 0], exact.var(1), rtol=1e-7)
    x = torch.from_numpy(rows[:, :5].astype(np.float32))
    wanted = (exact[:, :5] - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
    assert norm(x).dtype == torch.float32
    np.testing.assert_allclose(norm(x), wanted, atol=1e-4)


def test_rewards_are_scaled_by_the_return_as_a_slow_version_does_it() -> None:
    rng = np.random.default_rng(1)
    seeds, steps, envs, gamma = 2, 200, 3, 0.9
    reward = rng.normal(0.5, 5.0, size=(steps, seeds, envs))
    ended = rng.random((steps, seeds, envs)) < 0.1
    scale, returns = ReturnScale(seeds, "cpu"), DiscountedReturns(seeds, envs, "cpu")
    for step in range(steps):
        row = torch.from_numpy(reward[step].astype(np.float32))
        returns.add(row, torch.from_numpy(ended[step]), gamma, scale)
    single = reward.astype(np.float32).astype(np.float64)
    for seed in range(seeds):
        each, variance = slow_scale(single[:, seed], ended[:, seed], gamma)
        np.testing.assert_allclose(scale.variance[seed], variance, rtol=1e-9)
        wanted = np.where(ended[-1, seed], 0.0, each[-1])
        np.testing.assert_allclose(returns.returns[seed], wanted, rtol=1e-9)
        drawn = torch.tensor([[1.0, -3.0, 1e6, -1e6]] * seeds)
        expected = np.clip(np.array([1, -3, 1e6, -1e6]) / np.sqrt(variance + 1e-8), -10, 10)
        np.testing.assert_allclose(scale(drawn)[seed], expected, rtol=1e-6)
    assert scale(torch.ones(seeds, 4, 5)).shape == (seeds, 4, 5)


def test_rewards_that_never_come_are_scaled_to_nothing() -> None:
    scale, returns = ReturnScale(1, "cpu"), DiscountedReturns(1, 2, "cpu")
    for _ in range(5):
        returns.add(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), 0.99, scale)
    assert scale(torch.zeros(1, 3)).abs().sum() == 0


class Told(Parts):
    """A task of every kind of part, with goals, that notes what it showed, paid and ended."""

    notes: ClassVar[list[tuple[int, dict[str, Any], float, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        seen = cast(gym.spaces.Dict, self.observation_space)
        goal: gym.Space[Any] = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        goals = {"achieved_goal": goal, "desired_goal": goal}
        self.observation_space = gym.spaces.Dict(goals | dict(seen))
        self._shown: dict[str, Any] = {}

    def _obs(self) -> dict[str, Any]:
        goals = self.np_random.normal(5.0, 2.0, (2, 2)).astype(np.float32)
        self._shown = {"achieved_goal": goals[0], "desired_goal": goals[1], **super()._obs()}
        return self._shown

    def compute_reward(self, achieved: Array, desired: Array, info: Any) -> Any:
        return (achieved - desired).sum(-1)

    def step(self, action: Any) -> Any:
        before = self._shown
        obs, _, terminated, _, info = super().step(action)
        reward = float(self.compute_reward(obs["achieved_goal"], obs["desired_goal"], info))
        cut = not terminated and self._time >= 13 and self.np_random.random() < 0.5
        Told.notes.append((id(self), before, reward, terminated or cut))
        return obs, reward, terminated, cut, info


class SteeredTold(Told):
    """The same with continuous actions."""

    sizes = ()


def numbers_of(obs: dict[str, Any]) -> Array:
    """The real numbers of an observation, which alone are standardised."""
    return np.concatenate([obs["achieved_goal"], obs["desired_goal"], obs["state"][0]])


@pytest.mark.expensive(only=("recurrent_dqn", "pqn"))
@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("dqn", {"n_step": 3, "prioritized": True}),
        ("dqn", {"n_step": 2, "hindsight": "future"}),
        ("c51", {"n_step": 3}),
        ("discrete_sac", {}),
        ("pqn", {}),
        ("ppo", {}),
        ("recurrent_ppo", {}),
        ("recurrent_dqn", {"n_step": 3}),
        ("recurrent_sac", {}),
        ("redq", {"n_step": 3, "prioritized": True}),
        ("droq", {}),
        ("crossq", {}),
        ("tqc", {"hindsight": "final"}),
    ],
)
def test_a_runs_statistics_are_those_of_all_that_its_task_showed_and_paid(
    algo: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Against NumPy, over ends and time limits; what is no number of the task stays as it is."""
    steered = "discrete" not in get_algorithm_spec(algo).action_kinds
    config = small_config(
        algo,
        tmp_path,
        task=f"{__name__}:{'SteeredTold' if steered else 'Told'}",
        env_kwargs={},
        num_envs=2,
        total_timesteps=128,
        eval_episodes=0,
        accelerate="off",
        algo_kwargs=BOTH | {"eval_interval": 0} | settings,
    )
    Told.notes.clear()
    learner = load_agent(train(config).run_dir, device="cpu").learner
    lanes: dict[int, list[tuple[dict[str, Any], float, bool]]] = {}
    for env, obs, reward, ended in Told.notes:
        lanes.setdefault(env, []).append((obs, reward, ended))
    steps = [lane for lane in lanes.values() if len(lane) == 64]
    assert len(steps) == 2, {env: len(lane) for env, lane in lanes.items()}
    numbers = np.array([numbers_of(obs) for lane in steps for obs, _, _ in lane])
    assert learner.obs_parts is not None
    columns = is_number(learner.obs_parts, "cpu").numpy()
    mean, variance = (
        part[0, 0].double().numpy()[columns]
        for part in (learner.obs_norm.mean, learner.obs_norm.variance)
    )
    # A row has its parts in an order of its own, so they are looked up by name.
    order = np.argsort(mean), np.argsort(numbers.mean(0))
    np.testing.assert_allclose(mean[order[0]], numbers.mean(0)[order[1]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance[order[0]], numbers.var(0)[order[1]], rtol=1e-4)
    paid, ends = (np.array([[row[place] for row in lane] for lane in steps]).T for place in (1, 2))
    _, expected = slow_scale(paid.astype(np.float32), ends, config.algo_config.gamma)
    assert ends.sum() > 4
    np.testing.assert_allclose(learner.return_norm.variance[0, 0], expected, rtol=1e-5)
    rows = torch.from_numpy(learner.obs_parts.example_rows(5, np.random.default_rng(1)))
    floats = as_floats(learner.obs_parts, rows).numpy()
    shown = learner.normalize(rows[None])[0].numpy()
    wanted = ((floats[:, columns] - mean) / np.sqrt(variance)).clip(-10, 10)
    np.testing.assert_allclose(shown[:, columns], wanted, rtol=1e-4, atol=1e-5)
    assert np.array_equal(shown[:, ~columns], floats[:, ~columns])
    assert columns.sum() == numbers.shape[1]


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_a_run_has_the_statistics_of_what_its_replay_holds(algo: str, tmp_path: Path) -> None:
    """The replay keeps observations and rewards as they were."""
    config = small_config(algo, tmp_path, num_envs=2, algo_kwargs=BOTH | {"buffer_capacity": 1_000})
    loaded = open_checkpoint(train(config).checkpoint_path)
    pieces = [rows for _, rows in loaded.read_segments("replay")]
    rows = {key: torch.cat([piece[key] for piece in pieces], 1)[0].numpy() for key in pieces[0]}
    assert len(rows["obs"]) == 160
    state = loaded.states["learner"]
    obs = rows["obs"].astype(np.float64)
    np.testing.assert_allclose(state["obs_norm"]["mean"][0, 0], obs.mean(0), rtol=1e-6)
    np.testing.assert_allclose(state["obs_norm"]["variance"][0, 0], obs.var(0), rtol=1e-6)
    reward = rows["reward"].reshape(-1, 2).astype(np.float64)
    ended = ((rows["continues"] == 0) | (rows["truncated"] > 0)).reshape(-1, 2)
    assert ended.any()
    _, variance = slow_scale(reward, ended, config.algo_config.gamma)
    np.testing.assert_allclose(state["return_norm"]["variance"][0, 0], variance, rtol=1e-6)
    assert np.abs(reward).max() > 0.5, "as the task paid them"


def shown(learner: AnyLearner, algo: str, env: Any, seeds: tuple[int, ...]) -> None:
    """Let a learner see a few steps, which differ between seeds."""
    returns = learner.initial_returns(2)
    for key in range(6):
        batch: Any = make_batch(algo, env, seeds, 50 + key)
        obs = batch.obs.flatten(1, -2)[:, :2] * 3 + 1
        reward = batch.reward.flatten(1)[:, :2] * 7
        ended = torch.tensor([[key == 3, False]] * len(seeds))
        learner.see_step(obs, reward, ended, returns)


@pytest.mark.parametrize("algo", TRANSITIONS)
def test_a_batch_is_normalised_by_the_statistics_of_now(algo: str) -> None:
    learner, env = build(algo, **BOTH)
    with no_host_reads():
        shown(learner, algo, env, (0,))
    batch = make_batch(algo, env, (0,))
    assert isinstance(batch, TransitionBatch)
    made = learner.normalized(batch)
    norm, scale = learner.obs_norm, learner.return_norm
    wanted = (batch.obs.double() - norm.mean) / norm.variance.sqrt()
    torch.testing.assert_close(made.obs, wanted.clamp(-10, 10).float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(made.next_obs, norm(batch.next_obs))
    reward = batch.reward / (scale.variance + 1e-8).sqrt()
    torch.testing.assert_close(made.reward, reward.clamp(-10, 10).float())
    before = flat_state(learner.state_dict())
    with no_host_reads():
        learner.update(batch)
    after = flat_state(learner.state_dict())
    for name, value in before.items():
        if name.startswith(("obs_norm", "return_norm")):
            assert torch.equal(value, after[name]), "an update leaves the statistics alone"


def test_ppo_learns_from_scaled_rewards_and_moves_observations_with_the_rollout() -> None:
    scaled, env = build("ppo", **BOTH)
    plain, _ = build("ppo", normalize_observations=True)
    assert isinstance(scaled.return_norm, ReturnScale)
    shown(scaled, "ppo", env, (0,))
    assert scaled.obs_norm.count == 0
    batch: Any = make_batch("ppo", env, (0,))
    by_hand = type(batch)(**vars(batch) | {"reward": scaled.return_norm(batch.reward)})
    scaled.update(batch)
    plain.update(by_hand)
    torch.testing.assert_close(scaled.obs_norm.mean[:, 0], batch.obs.flatten(1, 2).mean(1))
    for name, value in flat_state(plain.state_dict()).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, flat_state(scaled.state_dict())[name]), name


def fixed(learner: AnyLearner, mean: float = 0.0, deviation: float = 1.0) -> None:
    """Let all statistics be these, as if they came of very much."""
    for norm in (learner.obs_norm, learner.return_norm):
        norm.mean.fill_(mean)
        norm.variance.fill_(deviation**2)
        norm.count.fill_(1e12)


@pytest.mark.parametrize("algo", [*ROLLOUTS, *SEQUENCES])
def test_an_update_is_that_of_a_batch_standardised_by_hand(algo: str) -> None:
    """A rollout, or replayed sequences: the same losses and the same parameters after it."""
    ours, env = build(algo, **BOTH)
    plain, _ = build(algo)
    fixed(ours, 3.0, 2.0)
    batch: Any = make_batch(algo, env, (0,))
    fields = vars(batch) | {"reward": batch.reward / 2}  # rewards keep their mean
    for name in {"obs", "next_obs"} & fields.keys():
        fields[name] = ((fields[name] - 3) / 2).clamp(-10, 10)
    metrics, by_hand = (
        learner.update(given).metrics
        for learner, given in ((ours, batch), (plain, type(batch)(**fields)))
    )
    assert dict(metrics) == pytest.approx(dict(by_hand), rel=1e-3, abs=1e-5)
    state = flat_state(ours.state_dict())
    for name, value in flat_state(plain.state_dict()).items():
        if isinstance(value, Tensor) and "norm" not in name and value.is_floating_point():
            torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("algo", ROLLOUTS)
def test_a_rollout_is_gathered_by_one_policy_and_moves_the_statistics_then(algo: str) -> None:
    learner, env = build(algo, **BOTH)
    shown(learner, algo, env, (0,))
    assert learner.obs_norm.count == 0
    assert learner.return_norm.count > 0
    batch: Any = make_batch(algo, env, (0,))
    obs = batch.obs[:, 0]
    fixed(learner, 0.5, 3.0)
    assert isinstance(learner, OnPolicyLearner)
    noise = learner.draw_noise(1, obs.shape[1])[:, 0]
    by_hand, _ = build(algo)
    assert isinstance(by_hand, OnPolicyLearner)
    states = [agent.initial_acting_state(obs.shape[1]) for agent in (learner, by_hand)]
    drawn = [
        agent.sample(given, noise) if state is None else agent.sample_on(state, given, noise)
        for agent, given, state in zip(
            (learner, by_hand), (obs, (obs - 0.5) / 3), states, strict=True
        )
    ]
    torch.testing.assert_close(drawn[0], drawn[1])
    learner.obs_norm.count.zero_()
    learner.update(batch)
    torch.testing.assert_close(
        learner.obs_norm.mean[:, 0], batch.obs.flatten(1, 2).mean(1), check_dtype=False
    )


@pytest.mark.expensive(only=("pqn", "recurrent_sac"))
@pytest.mark.parametrize("algo", ONLINE)
def test_all_ways_to_act_see_standardised_observations(algo: str) -> None:
    ours, env = build(algo, **BOTH)
    plain, _ = build(algo)
    fixed(ours, 3.0, 2.0)
    batch: Any = make_batch(algo, env, (0,))
    obs = batch.obs.flatten(1, -2)
    shown_by_hand = ((obs - 3) / 2).clamp(-10, 10)
    with torch.no_grad():
        for way in ("act", "draw_action"):
            torch.testing.assert_close(getattr(ours, way)(obs), getattr(plain, way)(shown_by_hand))
        exploring = [
            agent.act(given, explore=True) for agent, given in ((ours, obs), (plain, shown_by_hand))
        ]
    torch.testing.assert_close(*exploring)


@pytest.mark.parametrize("algo", ONLINE)
def test_stacked_seeds_have_the_statistics_of_single_ones(algo: str) -> None:
    seeds = (3, 5)
    group, env = build(algo, seeds, **BOTH)
    shown(group, algo, env, seeds)
    for index, seed in enumerate(seeds):
        single, _ = build(algo, (seed,), **BOTH)
        shown(single, algo, env, (seed,))
        for part in ("obs_norm", "return_norm"):
            ours, theirs = getattr(group, part), getattr(single, part)
            assert torch.equal(ours.mean[index], theirs.mean[0])
            assert torch.equal(ours.variance[index], theirs.variance[0])


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("sac", {"num_envs": 3}),
        ("sac", {"overlap": True}),
        ("td3", {}),
        ("dqn", {"algo_kwargs": {"n_step": 3, "prioritized": True}}),
        ("qr_dqn", {}),
        ("mbpo", {}),
        ("ppo", {"num_envs": 2}),
        ("gail", {"algo_kwargs": {"normalize_rewards": False}}),
        ("pqn", {"num_envs": 2}),
        ("recurrent_ppo", {"num_envs": 2}),
        ("recurrent_dqn", {"num_envs": 2}),
        ("recurrent_sac", {}),
    ],
)
def test_a_run_is_cut_and_goes_on_to_the_bit(
    algo: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = BOTH | changes.pop("algo_kwargs", {})
    report = verify_resume(small_config(algo, tmp_path, algo_kwargs=settings, **changes), 90)
    assert report.identical, report


def test_an_episode_that_began_anew_on_resume_has_a_return_of_its_own() -> None:
    learner, _ = build("sac", **BOTH)
    statistics = RunningStatistics(learner, 2)
    returns = statistics.parts()["returns"]
    assert isinstance(returns, DiscountedReturns)
    returns.returns.fill_(5.0)
    statistics.begin(torch.tensor([[True, False]]))
    assert returns.returns.tolist() == [[0.0, 5.0]]


@pytest.mark.matrix
def test_seeds_side_by_side_do_what_each_does_alone(tmp_path: Path) -> None:
    """Whole runs, with an optimizer of other moments beside the statistics."""
    settings = BOTH | {"optimizer": {"type": "sgd", "momentum": 0.9}}
    group = train(small_config("sac", tmp_path / "group", seeds=[3, 5], algo_kwargs=settings))
    members = sorted(path.parent for path in Path(group.run_dir).glob("*/checkpoints"))
    assert len(members) == 2
    for seed, member in zip((3, 5), members, strict=True):
        alone = train(small_config("sac", tmp_path / f"{seed}", seed=seed, algo_kwargs=settings))
        states = [open_checkpoint(path).states["learner"] for path in (alone.run_dir, member)]
        single, together = (flat_state(state) for state in states)
        assert single.keys() == together.keys()
        for name, value in single.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                torch.testing.assert_close(value, together[name], rtol=1e-4, atol=1e-5, msg=name)


def test_evaluation_uses_frozen_statistics_and_pays_the_tasks_own_reward(tmp_path: Path) -> None:
    settings = BOTH | {"learning_starts": 50, "batch_size": 16, "output_dir": str(tmp_path)}
    agent = SAC("Pendulum-v1", **settings)
    agent.learn(120, progress=False)
    learner = agent._agent().learner
    before = flat_state(learner.state_dict())
    result = agent.evaluate(episodes=1, seed=7)
    assert all(
        torch.equal(value, before[name])
        for name, value in flat_state(learner.state_dict()).items()
        if isinstance(value, Tensor)
    )
    assert result.metrics["eval_return_mean"] < -100, "Pendulum's own, not a share of it"
    # The saved file, the module and the exported program have the statistics too.
    env = gym.make("Pendulum-v1")
    obs = np.stack([env.reset(seed=seed)[0] for seed in range(5)])
    action = agent.predict(obs)
    saved = agent.save(tmp_path / "agent.safetensors")
    assert np.array_equal(SAC.load(saved).predict(obs), action)
    with torch.no_grad():
        assert np.allclose(agent.policy(torch.from_numpy(obs)).numpy(), action, atol=1e-6)
    exported = export_agent(agent._agent(), tmp_path / "policy.pt2", "torch")
    assert exported.largest_difference <= 1e-6
    unlike = SAC("Pendulum-v1", batch_size=16)
    assert "obs_norm" not in unlike._agent().learner.state_dict(), "only where asked for"


def test_a_new_run_takes_the_statistics_of_a_saved_agent_over(tmp_path: Path) -> None:
    first = train(tiny_config("sac", tmp_path / "first", algo_kwargs=BOTH))
    again = tiny_config(
        "sac",
        tmp_path / "again",
        algo_kwargs=BOTH | {"learning_starts": 60},
        from_checkpoint=str(first.run_dir),
    )
    one, two = (open_checkpoint(r.checkpoint_path).states["learner"] for r in (first, train(again)))
    assert two["obs_norm"]["count"] == one["obs_norm"]["count"] + 64
    assert two["return_norm"]["count"] == one["return_norm"]["count"] + 64
    for unlike in ({"normalize_rewards": False}, {"normalize_observations": False}):
        other = again.replace(algo_kwargs=again.algo_kwargs | unlike, run_name="other")
        with pytest.raises(SpecMismatch, match=f"{next(iter(unlike))} to the same value"):
            train(other)


def test_all_doors_lead_to_the_same_run(tmp_path: Path) -> None:
    by_file = train(tiny_config("ppo", tmp_path / "file", algo_kwargs=BOTH)).run_dir
    options = ("-s", "normalize_observations=true", "-s", "normalize_rewards=true")
    file = write_tiny(tmp_path, "ppo")
    outcome = run_cli("train", "--config", file, "--output-dir", tmp_path / "cli", *options)
    assert outcome.code == 0, outcome.err
    agent = PPO(tiny_config("ppo", tmp_path / "python"), normalize_obs=True, normalize_rewards=True)
    by_python = agent.learn(progress=False).run_dir
    runs = (by_file, Path(outcome.values["run_dir"]), by_python)
    assert len({learner_digest(run) for run in runs}) == 1


@pytest.mark.parametrize(
    ("algo", "settings", "message"),
    [
        ("pets", {"normalize_observations": True}, "its model standardises what it is given"),
        ("pets", {"normalize_rewards": True}, "its model predicts the task's own rewards"),
        ("dreamer", {"normalize_observations": True}, "symlogs of vectors"),
        ("dreamer", {"normalize_rewards": True}, "divides returns by their range"),
        ("gail", {"normalize_rewards": True}, "GAIL does not learn from the task's rewards"),
        ("sac", {"normalize_rewards": True, "reward_scale": 0.1}, "leave reward_scale and"),
        ("sac", {"normalize_observations": 1}, "normalize_observations must be true or false"),
    ],
)
def test_a_mistake_is_one_sentence(
    algo: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(algo, tmp_path, algo_kwargs=settings)


def test_every_online_method_has_both_settings_or_a_reason() -> None:
    without = {
        name
        for name in algorithm_names()
        if get_algorithm_spec(name).loop is not Loop.OFFLINE
        and not BOTH.keys() <= get_algorithm_spec(name).config_class.model_fields.keys()
    }
    assert without == {"pets", "dreamer"}
    for name in without:
        assert BOTH.keys() <= get_algorithm_spec(name).config_class.why_not.keys()


def test_images_are_not_standardised() -> None:
    with pytest.raises(ConfigError, match=r"normalize_observations is true, but .* gives images"):
        DQN(PIXEL_TASK, normalize_observations=True).predict(np.zeros((2, 10, 10), np.uint8))
