"""What CQL and COMBO share: actions proposed for a state, their values, and a soft maximum of them.

log sum_a exp Q(s, a) is estimated by importance sampling, with actions drawn uniformly, from
pi(.|s) and from pi(.|s') (App. F of arXiv:2006.04779).
Shapes: S seeds, N critics, B batch, n actions per state of each kind, A action.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_training.models.actor_with_critics import MLPSACModel, tanh_gaussian_sample
from rl_training.rng import Rng


def several_actions(
    model: MLPSACModel, rng: Rng, obs: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """Draw actions `[S, B, n, A]` from the policy at `obs`, with log densities `[S, B, n]`."""
    mean, log_std = model.policy(obs)
    noise = rng.normal(obs.shape[1], samples, model.action_dim)
    return tanh_gaussian_sample(mean.unsqueeze(2), log_std.unsqueeze(2), noise)


def proposals(
    model: MLPSACModel, rng: Rng, obs: Tensor, next_obs: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """Draw actions `[S, B, 3n, A]` for every state, with the log density each was drawn by.

    They are n uniform ones, n from pi(.|s) and n from pi(.|s').
    """
    here, log_here = several_actions(model, rng, obs, samples)
    after, log_after = several_actions(model, rng, next_obs, samples)
    uniform = rng.uniform(obs.shape[1], samples, model.action_dim) * 2 - 1
    log_uniform = torch.full_like(log_here, -model.action_dim * math.log(2.0))
    actions = torch.cat((uniform, here, after), 2)
    return actions, torch.cat((log_uniform, log_here, log_after), 2)


def q_of_several(
    model: MLPSACModel,
    obs: Tensor,
    actions: Tensor,
    critic: nn.Module | None = None,
    members: Tensor | None = None,
) -> Tensor:
    """Return Q of several actions per state, `[S, N, B, n]`."""
    samples = actions.shape[2]
    states = obs.unsqueeze(2).expand(-1, -1, samples, -1).flatten(1, 2)
    q = model.q_values(states, actions.flatten(1, 2), critic, members)
    return q.view(*q.shape[:-1], -1, samples)


def soft_maximum(q: Tensor, log_density: Tensor, temperature: float) -> Tensor:
    """Return T log sum_a exp((Q(s, a) - log density) / T), `[S, N, B]`, of Q `[S, N, B, 3n]`.

    As in the authors' code the terms are summed, not averaged, which adds the logarithm of their
    number.
    """
    weighted = (q - log_density.unsqueeze(1)) / temperature
    return temperature * torch.logsumexp(weighted, -1)
