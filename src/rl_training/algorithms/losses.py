"""Losses and advantages of papers as pure functions of tensors, each with its equation.

What all learners do with a loss (`td_target`, `weighted_mean`, `add_weighted`) is in `base`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def huber(prediction: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    """Huber function of the difference: quadratic below `kappa`, linear above it."""
    return functional.huber_loss(prediction, target, reduction="none", delta=kappa)


def expectile_loss(error: Tensor, expectile: float | Tensor) -> Tensor:
    """Asymmetric square `|tau - 1(u < 0)| u^2` per sample (Eq. 3 of arXiv:2110.06169).

    At 0.5 it is half of the square; towards 1 the minimiser moves to the largest target.

    Args:
        error: Target minus prediction, u, `[S, B]`.
        expectile: tau in (0, 1), a number or `[S, 1]`.
    """
    below = (error < 0).to(error.dtype)
    return (expectile - below).abs() * error.square()


def midpoints(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the fractions (2i - 1) / 2N, i = 1 .. N, `[N]` (Lemma 2 of arXiv:1710.10044)."""
    return (torch.arange(count, device=device) + 0.5) / count


def quantile_huber(
    prediction: Tensor,
    target: Tensor,
    tau: Tensor,
    kappa: float,
    target_weight: Tensor | None = None,
) -> Tensor:
    """Quantile Huber loss per sample (Eq. 10 of arXiv:1710.10044), `[...]`.

    `|tau_i - 1(u < 0)| L(u) / kappa` with u = target_j - prediction_i and L the Huber function:
    the mean over targets, summed over predictions.

    Args:
        prediction: Quantiles `[..., N]`.
        target: Samples or quantiles of the target distribution `[..., M]`.
        tau: Fractions of the predictions, broadcast to `[..., N]`.
        kappa: Width of the quadratic part; 0 gives the plain quantile loss `|tau - 1(u < 0)| |u|`.
        target_weight: Probability of each target `[..., M]`; without it all are equally likely.
    """
    error = target.unsqueeze(-2) - prediction.unsqueeze(-1)  # [..., N, M]
    size = error.abs()
    if kappa > 0:
        near = size.clamp(max=kappa)
        size = near * (size - 0.5 * near) / kappa
    below = (error.detach() < 0).to(error.dtype)
    each = (tau.unsqueeze(-1) - below).abs() * size  # [..., N, M]
    if target_weight is None:
        return each.mean(-1).sum(-1)
    return (each * target_weight.unsqueeze(-2)).sum((-2, -1))


def categorical_projection(moved: Tensor, probability: Tensor, atoms: Tensor) -> Tensor:
    """Distribute the probability of moved atoms over fixed ones (Eq. 7 of arXiv:1707.06887).

    `sum_j max(0, 1 - |clip(x_j, z_1, z_N) - z_i| / dz) p_j`: each is shared between its two
    neighbours, so that the mean stays inside the support; beyond it an end takes all.

    Args:
        moved: Where the atoms are now, x `[..., N]`.
        probability: Of each, p `[..., N]`.
        atoms: The support z `[N]`, at equal distances dz.

    Returns:
        The probability of each atom of the support, `[..., N]`.
    """
    width = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    place = (moved.clamp(atoms[0], atoms[-1]) - atoms[0]) / width  # in units of the distance
    index = torch.arange(len(atoms), device=atoms.device, dtype=atoms.dtype)
    share = 1 - (place.unsqueeze(-2) - index.unsqueeze(-1)).abs()  # [..., i, j]
    return (share.clamp(min=0) * probability.unsqueeze(-2)).sum(-1)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., 2016, Eq. 16 of arXiv:1506.02438).

    `delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)` and
    `A_t = delta_t + gamma lambda (1 - ended_t) A_{t+1}`: a time limit keeps its bootstrap but stops
    the sum, since the next row belongs to another episode.

    Args:
        reward: `[S, T, n]`, as are all tensors here and the result.
        value: V(s_t).
        next_value: V of the true successor of each step.
        terminated: The episode reached a terminal state.
        truncated: The episode was cut by a time limit.
        gamma: Discount.
        gae_lambda: 0 gives one-step advantages, 1 Monte-Carlo returns minus the value.
    """
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    decay = (~(terminated | truncated)).to(delta.dtype) * (gamma * gae_lambda)
    return sums_backwards(delta, decay)


def lambda_returns(
    reward: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    q_lambda: float,
) -> Tensor:
    """Return Q(lambda) targets (Eq. 9 of arXiv:2407.04811).

    `G_t = r_t + gamma (lambda G_{t+1} + (1 - lambda) V(s_{t+1}))`; where the rollout or an episode
    stops after t, `G_t = r_t + gamma (1 - terminated_t) V(s_{t+1})`: a time limit has a future.

    Args:
        reward: `[S, T, n]`, as are all tensors here and the result.
        next_value: V of the true successor of each step, such as max_a Q(s_{t+1}, a).
        terminated: The episode reached a terminal state.
        truncated: The episode was cut by a time limit.
        gamma: Discount.
        q_lambda: 0 gives one-step targets, 1 the rewards to the end with a bootstrap there.
    """
    share = (~(terminated | truncated)).to(reward.dtype) * q_lambda
    share = torch.cat((share[:, :-1], torch.zeros_like(share[:, -1:])), 1)
    future = (1 - share) * next_value.masked_fill(terminated, 0.0)
    return sums_backwards(torch.add(reward, future, alpha=gamma), gamma * share)


def sums_backwards(terms: Tensor, decay: Tensor) -> Tensor:
    """Return x_t = terms_t + decay_t x_{t+1} along the second axis, from its end backwards."""
    terms_, decays = terms.unbind(1), decay.unbind(1)
    sums = [terms_[-1]]
    for step in range(len(terms_) - 2, -1, -1):
        sums.append(torch.addcmul(terms_[step], decays[step], sums[-1]))
    return torch.stack(sums[::-1], 1)


def ppo_policy_loss(ratio: Tensor, advantage: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate per sample, to be minimised (Eq. 7 of arXiv:1707.06347)."""
    low, high = 1 - clip_coef, 1 + clip_coef
    clipped = ratio.clamp(low, high)  # type: ignore[arg-type]  # two numbers or two tensors
    return -torch.minimum(ratio * advantage, clipped * advantage)


def ppo_value_loss(
    value: Tensor, old_value: Tensor, target: Tensor, clip: float | Tensor | None
) -> Tensor:
    """Half squared error per sample; with `clip` the worse of plain and clipped prediction."""
    error = functional.mse_loss(value, target, reduction="none")
    if clip is not None:
        change = (value - old_value).clamp(-clip, clip)  # type: ignore[arg-type]  # as above
        clipped = old_value + change
        error = torch.maximum(error, (clipped - target).square())
    return 0.5 * error
