"""A task whose return distribution is known by hand, for learners of quantiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.quantile import QuantileLearner
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.testing.contract import build, make_batch

LATER, FIRST = 0.0, 1.0
"""The two states, as observations."""
STATES = torch.tensor([[[FIRST], [LATER]]])  # [1, 2, 1]
MEANS = {FIRST: 1.75, LATER: 1.5}
"""Expected returns of the states."""


def two_point_batch() -> TransitionBatch:
    """All transitions, in proportion.

    The later state ends with 0 a quarter of the time and with 2 otherwise; the first gives 1, is
    discounted by a half, and leads there.  So the returns are 0 or 2, and 1 or 2.
    """
    obs = torch.tensor([[[LATER]] * 4 + [[FIRST]] * 4]).view(1, 8, 1)
    return TransitionBatch(
        obs=obs,
        action=torch.zeros(1, 8, dtype=torch.int64),
        reward=torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]]),
        next_obs=torch.zeros(1, 8, 1),
        discount=torch.tensor([[0.0] * 4 + [0.5] * 4]),
    )


def transitions(algo: str, seeds: tuple[int, ...] = (0,), key: int = 0) -> TransitionBatch:
    """Random transitions of CartPole's shapes."""
    batch = make_batch(algo, build(algo)[1], seeds, key)
    assert isinstance(batch, TransitionBatch)
    return batch


def learner_of(algo: str, num_actions: int = 1, obs_dim: int = 1, **settings: Any) -> Any:
    """A small learner for a made-up task; typed by the test that asked for it."""
    env = EnvSpec(
        env_id="made-up",
        obs_shape=(obs_dim,),
        obs_dtype="float32",
        action_kind="discrete",
        action_shape=(),
        num_actions=num_actions,
        action_dtype="int64",
    )
    spec = get_algorithm_spec(algo)
    config = spec.config_class(**({"hidden_sizes": (32,)} | settings))
    return spec.build(env, config, (0,))


def trained_on_two_points(algo: str, **settings: Any) -> QuantileLearner:
    """Learn the two distributions; the step size falls to nothing, so that quantiles rest."""
    given = {"learning_rate": 0.02, "kappa": 0.0, "target_update_interval": 20}
    schedule = {"lr_schedule": {"type": "linear"}}
    learner: QuantileLearner = learner_of(algo, **given | schedule | settings)
    batch, updates = two_point_batch(), 600
    for update in range(updates):
        learner.set_progress(update / updates)
        learner.update(batch)
    return learner


@torch.no_grad()
def values_of(learner: QuantileLearner) -> Tensor:
    """Q of the only action in the first and the later state, `[2]`."""
    return learner.q_values(STATES)[0, :, 0]
