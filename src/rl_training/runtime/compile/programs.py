"""What the loops hand over to be compiled, and example arguments for it.

Used by the run and by the compiling process, so that both mean the same by a name.
Shapes: S seeds, B batch, T steps of a rollout, n environments per seed, M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import (
    ActingState,
    AnyLearner,
    OnPolicyLearner,
    Remembered,
    StepOutput,
    learn_from,
    replay_step,
)
from rl_training.algorithms.dynamics.imagination import Imagination, imagination_of
from rl_training.algorithms.sources import replay_settings, rows_per_update
from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.data.replay.hindsight import Hindsight
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.rng import Rng
from rl_training.runtime.compile.trace import Source, contiguous

FREQUENT = 32
"""Kinds of updates rarer than one in this many stay eager: compiling them would not pay."""


MODEL_STEP, MASKED_MODEL_STEP = "model_step", "masked_model_step"
MODEL_STEPS = (MODEL_STEP, MASKED_MODEL_STEP)
ACTING_PART = "act-"
"""Names of what is compiled of acting begin with this where it is not acting as a whole."""
LATE = 10**9
"""A number of updates by which every warm-up is over."""


def packed_step(learner: AnyLearner, replay: ReplayBuffer, metrics: Sequence[str]) -> Tensor:
    """Do `replay_step` and return the means of the metrics `[S, M]`."""
    return _packed(learner, replay_step(learner, replay, rows_per_update(learner)), metrics)


def packed_learning(
    learner: AnyLearner, replay: ReplayBuffer, metrics: Sequence[str], batch: TransitionBatch
) -> Tensor:
    """Do what follows the drawing of a batch and return the means of the metrics `[S, M]`."""
    return _packed(learner, learn_from(learner, replay, batch), metrics)


def _packed(learner: AnyLearner, output: StepOutput, metrics: Sequence[str]) -> Tensor:
    found = output.metrics
    rows = [found[name].detach().float().reshape(learner.num_seeds, -1) for name in metrics]
    return torch.stack([row.mean(1) for row in rows], 1)


def replay_sources(
    learner: AnyLearner,
    replay: ReplayBuffer,
    metrics: Sequence[str],
    acting: ActingState | None = None,
) -> dict[str, Source]:
    """Return acting, and one update per frequent phase, of the off-policy loop.

    Args:
        learner: Who acts and learns.
        replay: What it learns from.
        metrics: Names of what an update measures.
        acting: What the loop acts from; None is a new one, to trace with.
    """
    sources: list[Source] = []
    if replay_settings(learner.config) is not None:
        sources += _acting_sources(learner, replay.num_envs, acting)
    sources += [
        _update_source(update_name(phase), learner, replay, metrics)
        for phase in frequent_phases(learner)
    ]
    return {source.name: source for source in sources} | model_sources(learner)


def _acting_sources(
    learner: AnyLearner, num_envs: int, acting: ActingState | None
) -> Iterator[Source]:
    owners: dict[str, object] = {"learner": learner}
    parts = learner.acting_parts(num_envs)
    for name, part in parts.items():
        yield Source(ACTING_PART + name, part.call, owners, examples=part.examples)
    if not parts:
        acting = acting or learner.exploring_state(num_envs)
        if acting is not None:
            owners["acting"] = acting
        yield Source("act", partial(learner.act_from, acting, explore=True), owners)


def _update_source(
    name: str, learner: AnyLearner, replay: ReplayBuffer, metrics: Sequence[str]
) -> Source:
    """Return an update with the drawing of its batch inside, where that is done by tensors."""
    owners: dict[str, object] = {"learner": learner, "replay": replay}
    if not isinstance(replay, MappedBuffer | Hindsight) or not replay.drawn_outside:
        return Source(name, partial(packed_step, learner, replay, metrics), owners)
    if isinstance(replay, MappedBuffer):  # nothing of it is a tensor that an update uses
        del owners["replay"]
    size = rows_per_update(learner)
    return Source(
        name,
        partial(packed_learning, learner, replay, metrics),
        owners,
        feed=lambda: (replay.sample(size),),
        examples=lambda: (replay.example(size),),
    )


def model_sources(learner: AnyLearner) -> dict[str, Source]:
    """Return one gradient step of the model of the dynamics, for all seeds and for some."""
    imagination = imagination_of(learner)
    if imagination is None:
        return {}
    trainer, owners = imagination.trainer, {"learner": learner}
    shape = model_batch_shape(imagination)

    def rows() -> Tensor:
        # Not zeros: a gradient that vanishes tells nothing when a program is compared.
        return Rng(range(learner.num_seeds), "example", learner.device).normal(*shape[1:])

    def masked() -> tuple[Tensor, Tensor]:
        active = torch.arange(learner.num_seeds, device=learner.device) % 2 == 0
        return rows(), active

    sources = [Source(MODEL_STEP, trainer.step, owners, examples=lambda: (rows(),))]
    if learner.num_seeds > 1:
        sources.append(Source(MASKED_MODEL_STEP, trainer.step, owners, examples=masked))
    return {source.name: source for source in sources}


def model_batch_shape(imagination: Imagination) -> tuple[int, ...]:
    """Shape of the rows of a gradient step of the model, `[S, M, B, W]`."""
    model = imagination.model
    width = 2 * model.obs_dim + model.action_dim + 2
    return model.num_seeds, model.num_ensembles, imagination.config.model_batch_size, width


def rollout_sources(
    learner: OnPolicyLearner, num_envs: int, acting: Remembered | None = None
) -> dict[str, Source]:
    """Return acting, and each kind of gradient step, of the on-policy loop.

    Args:
        learner: Who acts and learns.
        num_envs: In how many environments per seed.
        acting: What the loop acts from; None is a new one, to trace with.
    """
    owners: dict[str, object] = {"learner": learner}
    acting = acting or learner.initial_acting_state(num_envs)
    sample = Source("sample", sampling(learner, acting), owners)
    if acting is not None:
        sample = replace(sample, owners=owners | {"acting": acting})
    sources = {name: Source(name, getattr(learner, name), owners) for name in learner.compiled}
    return {"sample": sample} | sources


def sampling(
    learner: OnPolicyLearner, acting: Remembered | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how rollouts are acted in: actions for observations, given the noise of a step."""
    return learner.sample if acting is None else partial(learner.sample_on, acting)


def update_name(phase: int) -> str:
    """Name of the update of one phase."""
    return f"update-{phase}"


def frequent_phases(learner: AnyLearner) -> list[int]:
    """Return the phases that are worth a program."""
    with counted(learner, 0):
        phases = []
        for count in range(LATE, LATE + 4 * FREQUENT):  # past any warm-up
            learner.num_updates.value = count
            phases.append(learner.phase())
    return [phase for phase in sorted(set(phases)) if phases.count(phase) >= 4]


@contextmanager
def counted(learner: AnyLearner, count: int) -> Iterator[None]:
    """Let the learner believe it had done `count` updates."""
    before = learner.num_updates.value
    learner.num_updates.value = count
    try:
        yield
    finally:
        learner.num_updates.value = before


def count_of_phase(learner: AnyLearner, name: str) -> int:
    """Return a number of updates after which the next is of the phase that `name` is of."""
    if not name.startswith("update-"):
        return 0
    wanted = int(name.removeprefix("update-"))
    for count in chain(range(LATE, LATE + 10_000), range(10_000)):
        with counted(learner, count):
            if learner.phase() == wanted:
                return count
    raise AssertionError(f"no update is of phase {wanted}")


def example_arguments(
    source: Source, learner: AnyLearner, env: EnvSpec, num_envs: int
) -> tuple[Any, ...]:
    """Return contiguous arguments with the shapes that the loop will use."""
    return tuple(contiguous(value) for value in _examples(source, learner, env, num_envs))


def _examples(source: Source, learner: AnyLearner, env: EnvSpec, num_envs: int) -> tuple[Any, ...]:
    name = source.name
    if source.examples is not None:
        return source.examples()
    obs = _example_obs(learner, env, num_envs)
    if name == "act":
        return (obs,)
    if name.startswith("update-"):
        return ()
    assert isinstance(learner, OnPolicyLearner)
    if name == "sample":
        return obs, learner.draw_noise(1, num_envs)[:, 0]
    return _first_call(learner, name, example_rollout(learner, env, num_envs))


def _example_obs(learner: AnyLearner, env: EnvSpec, *lead: int) -> Tensor:
    """Return random observations `[S, *lead, ...]` of the type that the task gives."""
    if env.observation is not None:
        count = learner.num_seeds * math.prod(lead)
        rows = torch.from_numpy(env.example_observations(count, 0)).to(learner.device)
        return rows.view(learner.num_seeds, *lead, *env.obs_shape)
    rng = Rng(range(learner.num_seeds), "example", learner.device)
    shape = (*lead, *env.obs_shape)
    if env.obs_dtype == "uint8":
        return rng.integers(256, *shape).to(torch.uint8)
    return rng.normal(*shape)


def example_rollout(learner: OnPolicyLearner, env: EnvSpec, num_envs: int) -> RolloutBatch:
    """Return a rollout of random numbers."""
    lead = (learner.num_seeds, learner.rollout_steps, num_envs)
    obs = _example_obs(learner, env, *lead[1:])
    action = torch.zeros(*lead, *env.action_entries, device=learner.device)
    never = torch.zeros(lead, dtype=torch.bool, device=learner.device)
    return RolloutBatch(
        obs=obs,
        action=action.long() if env.actions_are_counted else action,
        reward=torch.ones(lead, device=learner.device),
        next_obs=obs.roll(1, 1),
        terminated=never,
        truncated=never,
    )


class _CalledError(Exception):
    """Ends an update at the call that was waited for."""


def _first_call(learner: OnPolicyLearner, name: str, rollout: RolloutBatch) -> tuple[Any, ...]:
    """Return what the learner's method `name` is first called with when it learns.

    The update goes no further, so that it leaves nothing in what is kept from rollout to rollout.
    """
    calls: list[tuple[Any, ...]] = []

    def watched(*arguments: Any) -> Any:
        calls.append(arguments)
        raise _CalledError

    setattr(learner, name, watched)
    try:
        learner.learn(rollout)
    except _CalledError:
        return calls[0]
    finally:
        delattr(learner, name)
    raise AssertionError(f"an update does not call {name}")
