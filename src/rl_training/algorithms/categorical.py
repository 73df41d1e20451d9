"""What actor-critics with categorical critics share: settings, target and loss.

A critic tells the distribution of the return over K fixed atoms.  The target moves the atoms of a
target critic by the Bellman equation and projects them back; the loss is the cross-entropy.
Shapes: S seeds, N critics, B batch, K atoms.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import weighted_mean
from rl_training.algorithms.losses import categorical_projection
from rl_training.data.batch import TransitionBatch
from rl_training.models.categorical_critics import CategoricalCritics
from rl_training.validation import LARGEST_FLOAT, Settings, Whole

Return = Annotated[float, Field(gt=-LARGEST_FLOAT, lt=LARGEST_FLOAT)]


class CategoricalSettings(Settings):
    """The atoms of categorical critics, and how a target is made of several."""

    num_atoms: Annotated[int, Field(ge=2, le=10_001), Whole] = 101
    """Atoms of a return's distribution."""
    v_min: Return = -250.0
    """Return of the first atom; smaller ones count as this."""
    v_max: Return = 250.0
    """Return of the last atom; larger ones count as this. `beyond_atoms` tells whether the range
    is too small."""
    use_cdq: bool = True
    """Clipped double Q: all critics learn the target of the one that expects least, and the actor
    climbs the least of them; otherwise each learns its own, and the actor climbs their mean."""

    @property
    def reach(self) -> float:
        """Size of a return that is between the atoms whatever its sign, if there is one."""
        ends = sorted((abs(self.v_min), abs(self.v_max)))
        return ends[0] or ends[1]

    @model_validator(mode="after")
    def _support_is_an_interval(self) -> CategoricalSettings:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min must be < v_max ({self.v_max:g}), got {self.v_min:g}")
        return self


def bellman_atoms(
    model: CategoricalCritics, batch: TransitionBatch, bonus: Tensor | None = None
) -> Tensor:
    """Return `r + discount (z + bonus)` of every atom z, `[S, B, K]`; a bonus is `[S, B]`."""
    atoms = model.atoms if bonus is None else model.atoms + bonus.unsqueeze(-1)
    return torch.addcmul(batch.reward.unsqueeze(-1), batch.discount.unsqueeze(-1), atoms)


def least_expecting(probability: Tensor, moved: Tensor, model: CategoricalCritics) -> Tensor:
    """Return the distribution `[S, 1, B, K]` of the critic whose target has the least mean.

    The projection keeps the mean of what is clipped to the atoms' range, so the projected means
    are known before anything is projected.

    Args:
        probability: Of each atom by each critic, `[S, N, B, K]`.
        moved: Where the atoms are now, `[S, B, K]`.
        model: Whose atoms they are.
    """
    inside = moved.clamp(model.atoms[0], model.atoms[-1])
    means = (probability * inside.unsqueeze(1)).sum(-1)  # [S, N, B]
    index = means.argmin(1, keepdim=True).unsqueeze(-1)  # [S, 1, B, 1]
    return probability.gather(1, index.expand(-1, -1, -1, probability.shape[-1]))


def categorical_target(
    model: CategoricalCritics, moved: Tensor, log_probs: Tensor, *, use_cdq: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Project the moved atoms of the target critics on the atoms; returns metrics besides.

    The target is `[S, 1, B, K]` with `use_cdq`, one for all critics, and `[S, N, B, K]` without.

    Args:
        model: Whose atoms they are.
        moved: Where the atoms are now, `[S, B, K]`.
        log_probs: Of each atom by each target critic, `[S, N, B, K]`.
        use_cdq: Take the critic that expects least.
    """
    probability = log_probs.exp()
    if use_cdq:
        probability = least_expecting(probability, moved, model)
    target = categorical_projection(moved.unsqueeze(1), probability, model.atoms)
    beyond = (moved < model.atoms[0]) | (moved > model.atoms[-1])
    return target, {
        "target_q_mean": (target * model.atoms).sum(-1).mean(1),
        "beyond_atoms": (probability * beyond.unsqueeze(1)).sum(-1).mean(1),
    }


def categorical_loss(
    model: CategoricalCritics, batch: TransitionBatch, target: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Cross-entropy to the target, summed over critics; also the error of the means `[S, B]`.

    Args:
        model: The critics.
        batch: Transitions.
        target: Probabilities of the atoms, `[S, N, B, K]`, or `[S, 1, B, K]` for all critics.
    """
    log_probs = model.value_log_probs(batch.obs, batch.action)  # [S, N, B, K]
    entropy = -(target * log_probs).sum(-1)
    weight = None if batch.weight is None else batch.weight.unsqueeze(1)
    loss = weighted_mean(entropy, weight).sum(1)
    mean = (target * model.atoms).sum(-1)
    error = (model.expected(log_probs.detach()) - mean).abs().mean(1)
    return loss, {}, error
