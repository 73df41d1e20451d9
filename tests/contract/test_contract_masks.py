"""The contract of masks, for every method that takes them: nothing that is forbidden is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from helpers.envs import MaskedEnv
from helpers.tiny import run_cli
from rl_training.algorithms.base import AnyLearner, Learner, OnPolicyLearner, Remembered
from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.spec import Loop
from rl_training.envs.observing import with_rows
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.loops import HeldActions
from rl_training.runtime.replay import load_buffer
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent, load_agent
from rl_training.testing.contract import (
    PARTS_TASKS,
    build,
    has_settings,
    parts_tasks,
    small_config,
    small_settings,
)
from rl_training.tools.export import export_agent

MASKED = [name for name in algorithm_names() if get_algorithm_spec(name).spaces["mask"]]
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(7, start=3),
    "multi_discrete": spaces.MultiDiscrete([5, 2, 3]),
}
PAIRS = [
    (name, kind)
    for name in MASKED
    for kind in ACTIONS
    if kind in get_algorithm_spec(name).action_kinds
]
every_pair = pytest.mark.parametrize(("algo", "kind"), PAIRS)
every_method = pytest.mark.parametrize("algo", MASKED)
SEEDS = (0, 1)
Act = Callable[[Tensor], Tensor]


def test_the_methods_with_masks_are_those_of_discrete_actions_but_dreamer() -> None:
    counted = {
        name
        for name in algorithm_names()
        if set(get_algorithm_spec(name).action_kinds) - {"continuous"}
    }
    assert set(MASKED) == counted - {"dreamer"}
    assert len(PAIRS) > len(MASKED)


def masked_task(kind: str) -> EnvSpec:
    env = MaskedEnv()
    env.action_space = ACTIONS[kind]
    return EnvSpec.from_env(with_rows(env, "mine"), "mine")


def learner_of(algo: str, task: EnvSpec, **settings: Any) -> AnyLearner:
    spec = get_algorithm_spec(algo)
    has = {key: value for key, value in settings.items() if has_settings(algo, {key: value})}
    learner = spec.build(task, spec.config_class(**small_settings(spec, **has)), SEEDS)
    if isinstance(learner, GAIL):
        learner.attach(load_buffer(learner, task)[0])
    return learner


def rows_of(task: EnvSpec, count: int, generator: np.random.Generator) -> Tensor:
    """Observations `[S, n, W]` whose masks allow from one to all values of each part."""
    assert task.observation is not None
    rows = task.example_observations(count * len(SEEDS), int(generator.integers(1 << 31)))
    share = generator.choice([0.0, 0.2, 0.5, 0.9], (len(rows), 1))
    mask = (generator.random((len(rows), task.mask_size)) < share).astype(rows.dtype)
    task.observation.leaves[-1].fill(mask)
    # Where nothing was allowed, everything is now: leave one value, whichever it is.
    for size, end in zip(task.choices, np.cumsum(task.choices).tolist(), strict=True):
        part = mask[:, end - size : end]
        alone = part.all(1) & (generator.random(len(part)) < 0.8)
        part[alone] = np.eye(size)[generator.integers(size, size=int(alone.sum()))]
    rows[:, -task.mask_size :] = mask
    return torch.from_numpy(rows).view(len(SEEDS), count, -1)


def forbidden(task: EnvSpec, obs: Tensor, action: Tensor) -> int:
    """Count actions of which a part is not allowed."""
    numbers = action.reshape(*obs.shape[:2], -1).numpy()  # [S, n, K]
    mask = obs[..., -task.mask_size :].numpy()
    first = np.cumsum((0, *task.choices[:-1]))
    assert ((numbers >= 0) & (numbers < task.choices)).all()
    return int((np.take_along_axis(mask, numbers + first, -1) == 0).any(-1).sum())


def ways_to_act(learner: AnyLearner, count: int) -> Iterator[tuple[str, Act]]:
    """Yield every way in which a learner chooses actions for `count` environments per seed."""
    yield "deterministic", lambda obs: learner.act(obs)
    for progress in (0.0, 0.05, 1.0):  # of the schedule of epsilon, where there is one

        def explore(obs: Tensor, progress: float = progress) -> Tensor:
            learner.set_progress(progress)
            return learner.act(obs, explore=True)

        yield f"exploring at {progress}", explore
    state = learner.initial_acting_state(count)
    yield "sampled in evaluation", lambda obs: learner.sample_from(state, obs)
    yield "first of an episode", learner.draw_action
    if isinstance(learner, OnPolicyLearner):
        yield "of a rollout", lambda obs: of_rollout(learner, obs)
    elif type(learner).random_action is not Learner.random_action:
        for hold in (1, 3):
            yield f"warm-up, held {hold}", warm_up(HeldActions(learner, count, hold))


def warm_up(held: HeldActions) -> Act:
    return lambda obs: held.at(0, obs.numpy())


def of_rollout(learner: OnPolicyLearner, obs: Tensor) -> Tensor:
    noise = learner.draw_noise(1, obs.shape[1])[:, 0]
    state = learner.initial_acting_state(obs.shape[1])
    if isinstance(state, Remembered):
        return learner.sample_on(state, obs, noise)
    return learner.sample(obs, noise)


def act_many(algo: str, kind: str, steps: int, count: int = 2_000, **settings: Any) -> int:
    """Act so many steps and more, in all ways in turn; returns how many were forbidden."""
    task, generator = masked_task(kind), np.random.default_rng(0)
    learner, done, wrong = learner_of(algo, task, eval_epsilon=0.3, **settings), 0, 0
    if learner.normalizes:  # by the statistics of masks that allow more than those of now
        learner.obs_norm.update(1 + 3 * learner.as_floats(rows_of(task, count, generator)).float())
    ways = list(ways_to_act(learner, count))
    with torch.inference_mode():
        while done < steps:
            for _, act in ways:
                obs = rows_of(task, count, generator)
                wrong += forbidden(task, obs, act(obs))
                done += obs.shape[0] * obs.shape[1]
    assert done >= steps
    return wrong


@every_pair
def test_no_forbidden_action_is_taken(algo: str, kind: str) -> None:
    assert act_many(algo, kind, 5_000, count=400) == 0


@pytest.mark.slow
@every_pair
def test_no_forbidden_action_is_taken_in_a_million_steps(algo: str, kind: str) -> None:
    assert act_many(algo, kind, 1_000_000) == 0


@pytest.mark.parametrize("algo", [n for n in MASKED if has_settings(n, {"noisy": True})])
def test_noise_on_the_weights_chooses_among_allowed_actions(algo: str) -> None:
    assert act_many(algo, "discrete", 5_000, count=400, noisy=True) == 0


@pytest.mark.parametrize(
    "algo", [n for n in MASKED if has_settings(n, {"normalize_observations": True})]
)
def test_standardised_observations_keep_their_mask(algo: str) -> None:
    kind = get_algorithm_spec(algo).action_kinds[0]
    assert act_many(algo, kind, 3_000, count=200, normalize_observations=True) == 0


@every_pair
def test_without_the_mask_forbidden_actions_would_be_taken_in_every_way(
    algo: str, kind: str
) -> None:
    task, generator = masked_task(kind), np.random.default_rng(0)
    learner = learner_of(algo, task, eval_epsilon=0.3)
    learner.masks_actions = False
    with torch.inference_mode():
        for name, act in ways_to_act(learner, 200):
            obs = rows_of(task, 200, generator)
            assert forbidden(task, obs, act(obs)) > 40, name


@pytest.mark.parametrize(
    "algo",
    [n for n in MASKED if n == "pqn" or get_algorithm_spec(n).loop is Loop.OFF_POLICY],
)
def test_random_actions_are_uniform_among_those_allowed(algo: str) -> None:
    """In the warm-up, or by an epsilon of 1."""
    task = masked_task("discrete")
    learner = learner_of(algo, task)
    obs = rows_of(task, 1, np.random.default_rng(1))[:1].expand(2, 3_000, -1).clone()
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0])
    obs[..., -7:] = mask
    learner.set_progress(0.0)
    with torch.inference_mode():
        allowed = learner.allowed(obs)
        drawn = (
            learner.act(obs, explore=True)
            if algo == "pqn"
            else learner.random_action(3_000, allowed)
        )
    counts = torch.bincount(drawn.flatten(), minlength=7)
    assert (counts > 0).tolist() == mask.bool().tolist()
    chosen = counts[mask.bool()].float()
    assert ((chosen - 2_000).square() / 2_000).sum() < 13.9, "99.9 % of chi-square with 2"


# Whole runs: the task refuses what its mask does not allow


def masked_parts(algo: str) -> list[str]:
    return [
        task for task in parts_tasks(algo) if not task.endswith(PARTS_TASKS["continuous"].__name__)
    ]


@pytest.mark.expensive(only=("dqn",))
@every_method
def test_runs_evaluations_and_warm_ups_take_allowed_actions_alone(
    algo: str, tmp_path: Path
) -> None:
    """With n-step returns and priorities where there is a replay."""
    wanted = {"n_step": 3, "prioritized": True, "learning_starts": 60}
    extra = {key: value for key, value in wanted.items() if has_settings(algo, {key: value})}
    for task in masked_parts(algo):
        config = small_config(
            *(algo, tmp_path),
            task=task,
            env_kwargs={},
            num_envs=2 if get_algorithm_spec(algo).loop is not Loop.OFFLINE else 1,
            algo_kwargs=extra,
            accelerate="off",
        )
        run = train(config)
        assert np.isfinite(run.metrics["eval_return_mean"])
        agent = load_agent(run.run_dir, device="cpu")
        for deterministic in (True, False):
            evaluator = Evaluator(task, {}, (0,), deterministic=deterministic)
            evaluator.evaluate(agent.learner, 4, 0)
            evaluator.close()


def test_the_command_line_evaluates_with_masks(tmp_path: Path) -> None:
    (task,) = masked_parts("dqn")
    short: dict[str, Any] = {"total_timesteps": 40, "accelerate": "off"}
    run = train(small_config("dqn", tmp_path, task=task, env_kwargs={}, **short))
    done = run_cli("eval", "--checkpoint", run.run_dir, "--episodes", 3)
    assert done.code == 0, done.err


# Predicting, and as a program


def parts_with_mask(task: EnvSpec, count: int) -> tuple[dict[str, NDArray[Any]], Tensor]:
    """Observations by part, and the same as rows."""
    assert task.observation is not None
    obs = task.observation.examples(count, np.random.default_rng(5))
    mask = obs["action_mask"]
    mask[:] = np.random.default_rng(6).random(mask.shape) < 0.3
    task.observation.leaves[-1].fill(mask)
    rows = task.observation.pack(task.observation.nested(obs), 1)
    return obs, torch.from_numpy(rows)


def assert_allowed(task: EnvSpec, rows: Tensor, actions: NDArray[Any]) -> None:
    index = torch.from_numpy(task.unscale_action(actions))
    assert forbidden(task, rows.view(1, len(rows), -1), index) == 0


@every_method
def test_predictions_are_allowed(algo: str) -> None:
    for name in masked_parts(algo):
        learner, task = build(algo, task=name)
        agent = LoadedAgent(learner, small_config(algo, "nowhere", task=name), task, 5)
        obs, rows = parts_with_mask(task, 200)
        assert task.observation is not None
        for deterministic in (True, False):
            given = task.observation.nested(obs)
            assert_allowed(task, rows, agent.predict(given, deterministic=deterministic))
            one = task.observation.nested({name: part[0] for name, part in obs.items()})
            first = agent.predict(one, deterministic=deterministic)
            assert_allowed(task, rows[:1], np.asarray(first)[None])


@pytest.mark.matrix  # of one method, test_export.py compares the file with the original by default
@every_method
def test_an_exported_policy_takes_allowed_actions_alone(algo: str, tmp_path: Path) -> None:
    """The same actions as those of the checkpoint that it was made of."""
    for name in masked_parts(algo):
        run = train(
            small_config(
                algo, tmp_path, task=name, env_kwargs={}, total_timesteps=64, eval_episodes=0
            )
        )
        agent = load_agent(run.run_dir, device="cpu")
        task = agent.env_spec
        state = agent.learner.initial_acting_state(1_000)
        # Entries of a memory are compared too; those of an LSTM's cell are larger than 1.
        largest = 1e-6 if state is None else 1e-5
        assert export_agent(agent, tmp_path / "policy.onnx").largest_difference <= largest
        session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
        obs, rows = parts_with_mask(task, 1_000)
        given = {f"obs/{name}": part for name, part in obs.items()}
        if state is not None:
            memory = vars(state)["memory"][0].numpy()
            given["state_memory"] = memory
        action = session.run(["action"], given)[0]
        assert_allowed(task, rows, action)
        assert task.observation is not None
        expected = agent.predict(task.observation.nested(obs))
        np.testing.assert_allclose(action, expected, atol=1e-6)
        free = {**given, "obs/action_mask": np.ones_like(obs["action_mask"])}
        assert (session.run(["action"], free)[0] != action).any(), "the mask decides"
