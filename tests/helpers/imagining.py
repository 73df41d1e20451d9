"""Small learners with a model of the dynamics, and hand-made roll-outs."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch

from rl_training.algorithms.combo import COMBO
from rl_training.algorithms.dynamics.imagination import Imagined, Rules
from rl_training.algorithms.mbpo import MBPO
from rl_training.algorithms.mobile import MOBILE
from rl_training.algorithms.mopo import MOPO
from rl_training.models import MLPMOPOEnsembleModel, MLPSACModel
from rl_training.rng import Rng
from rl_training.testing.contract import SMALL_MODEL

OBS, ACTION = 3, 1
Imagining = MOPO | MBPO | MOBILE | COMBO
LearnerT = TypeVar("LearnerT", MOPO, MBPO, MOBILE, COMBO)


def make_learner(
    kind: type[LearnerT], seeds: tuple[int, ...] = (0,), num_elites: int = 2, **settings: Any
) -> LearnerT:
    """A learner of tasks with three numbers to see and one to choose."""
    policy = MLPSACModel(OBS, ACTION, (16,), rng=Rng(seeds, "networks"))
    rng = Rng(seeds, "networks")
    model = MLPMOPOEnsembleModel(OBS, ACTION, (16, 16), 3, num_elites=num_elites, rng=rng)
    fields = kind.settings_class().model_fields
    small = {name: value for name, value in SMALL_MODEL.items() if name in fields}
    # The networks above are given, so their sizes in the settings would be ignored.
    for name in ("model_hidden_sizes", "num_ensembles", "num_elites"):
        small.pop(name)
    given: dict[str, Any] = small | {"batch_size": 8} | settings
    return kind(policy_model=policy, dynamics_model=model, seeds=seeds, **given)


def imagine(learner: Imagining, obs: torch.Tensor, horizon: int, rules: Rules) -> Imagined:
    """What the loop lets a learner imagine."""
    policy = partial(learner.act, explore=True)
    return learner.imagination.rollout(policy, learner.rng, obs, horizon, rules)


def rollout(valid: list[bool], **changes: torch.Tensor) -> Imagined:
    """One seed's roll-out whose rows are told apart by their reward, 0, 1, 2, ..."""
    count = len(valid)
    values: dict[str, torch.Tensor] = {
        "obs": torch.arange(count).float().view(1, count, 1).expand(-1, -1, OBS),
        "action": torch.zeros(1, count, ACTION),
        "reward": torch.arange(count).float().unsqueeze(0),
        "next_obs": torch.ones(1, count, OBS),
        "terminated": torch.zeros(1, count, dtype=torch.bool),
        "valid": torch.tensor([valid]),
        "penalty": torch.zeros(1, count),
        "member": torch.zeros(1, count, dtype=torch.int64),
    }
    return Imagined(**values | changes)
