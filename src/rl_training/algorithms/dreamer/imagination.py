"""Imagined continuations: a policy followed in a world model, without observations.

Shapes: S seeds, B sequences, T steps, N = B T starts, H horizon, A action, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.models.dreamer import DreamerActor, WorldModel
from rl_training.models.rssm import RSSMState
from rl_training.rng import Rng


@dataclass(frozen=True)
class Dream:
    """Imagined continuations of N states: H + 1 states each, H actions between them."""

    features: Tensor
    """`[S, N, H + 1, F]`."""
    action: Tensor
    """`[S, N, H, A]`, as the policy drew them."""
    reward: Tensor
    """Of arriving at each state, `[S, N, H + 1]`."""
    continues: Tensor
    """Chance that each state is not terminal, `[S, N, H + 1]`; known for the first."""


@torch.no_grad()
def imagine(
    model: WorldModel,
    actor: DreamerActor,
    start: RSSMState,
    terminated: Tensor,
    *,
    horizon: int,
    rng: Rng,
) -> Dream:
    """Follow the policy from states `[S, B, T, ...]`; no gradient flows through the steps.

    Args:
        model: The world.
        actor: The policy.
        start: Where to begin.
        terminated: Whether these states are terminal, `[S, B, T]`.
        horizon: H.
        rng: Source of actions and latents.
    """
    state = RSSMState(start.deter.flatten(1, 2), start.latent.flatten(1, 2))
    rows = state.deter.shape[1]
    acting = actor.draw_noise(rng, horizon, rows).unbind(1)
    latent = model.rssm.latent.draw_noise(rng, horizon, rows).unbind(1)
    features, actions = [state.features], []
    for step in range(horizon):
        action = actor.sample(features[-1], acting[step])
        state = model.rssm.imagine_step(state, actor.executed(action), latent[step])
        features.append(state.features)
        actions.append(action)
    every = torch.stack(features, 2)  # [S, N, H + 1, F]
    flat, shape = every.flatten(1, 2), every.shape[:3]
    known = 1 - terminated.flatten(1).unsqueeze(-1).to(every.dtype)
    continues = torch.cat((known, model.continuation(flat).view(shape)[..., 1:]), -1)
    return Dream(every, torch.stack(actions, 2), model.reward(flat).view(shape), continues)
