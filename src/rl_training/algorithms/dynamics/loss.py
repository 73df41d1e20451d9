"""What the dynamics ensemble of MOPO, MBPO and PETS learns from, and its loss.

PETS (Chua et al., 2018, Eq. 1 and App. A.1 of arXiv:1805.12114): maximum likelihood of the change
of the observation and the reward.

Rows are tables `[.., W]` with the columns observation, action, change of observation, reward,
terminated.  Shapes: S seeds, M members, B batch, N rows, O outputs.

Deviations: the loss is that of standardised targets, whose gradient is the same but for the bounds
of the log-variance; the mean's gradient is weighed by the variance (`balanced_nll`), without which
Hopper's reward is learned to R2 0.79 where 0.95 is possible; the bounds' penalty counts once per
member, as each has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import divisor
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.models.dynamics import Prediction, Statistics, balanced_nll, mean_disagreement
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel

BOUND_WEIGHT = 0.01
"""Of the sum of upper minus lower bounds of the log-variance, in the loss."""

BETA = 0.5
"""Exponent of the variance that weighs the error of the mean; 0 is the paper's likelihood."""


def model_rows(
    obs: Tensor, action: Tensor, reward: Tensor, next_obs: Tensor, terminated: Tensor
) -> Tensor:
    """Put transitions `[.., B, D]`, `[.., B]` into the table `[.., B, W]` that fitting takes."""
    ends = (reward.unsqueeze(-1), terminated.to(obs.dtype).unsqueeze(-1))
    return torch.cat((obs, action, next_obs - obs, *ends), -1)


def batch_rows(batch: TransitionBatch) -> Tensor:
    """Return a batch as a table `[S, B, W]`; it must be one of single steps, not of n."""
    return model_rows(batch.obs, batch.action, batch.reward, batch.next_obs, batch.discount == 0)


def buffer_rows(buffer: ReplayBuffer) -> Tensor:
    """Return all rows a buffer holds as a table `[S, N, W]`, or `[1, N, W]` if seeds share it.

    A truncated row is no terminal one, and its `next_obs` is the true successor.
    """
    rows = {name: rows[:, : len(buffer)] for name, rows in buffer.rows.items()}
    ends = rows["continues"] == 0
    return model_rows(rows["obs"], rows["action"], rows["reward"], rows["next_obs"], ends)


@torch.no_grad()
def fit_statistics(model: MLPMOPOEnsembleModel, rows: Tensor, index: Tensor | None = None) -> None:
    """Standardise inputs and targets by mean and deviation of a table, or of some of its rows.

    Args:
        model: The ensemble; what it predicts stays as it is, see its `standardise`.
        rows: `[S or 1, N, W]`.
        index: Rows of each seed `[S, n]`.
    """
    found = []
    for seed in range(model.num_seeds):
        table = rows[min(seed, rows.shape[0] - 1)]
        table = table if index is None else table.index_select(0, index[seed])
        size = model.obs_dim
        action = table[:, size : size + model.action_dim]
        inputs = torch.cat((model.features(table[:, :size]), action), -1)
        found.append([_mean_and_divisor(x) for x in (inputs, model.targets(table))])
    (input_mean, divisors), (target_mean, deviation) = (
        (torch.stack(part).view(model.num_seeds, 1, 1, -1) for part in zip(*pairs, strict=True))
        for pairs in zip(*found, strict=True)
    )
    model.standardise(Statistics(input_mean, model.seen / divisors, target_mean, deviation))


def _mean_and_divisor(x: Tensor) -> tuple[Tensor, Tensor]:
    deviation, mean = torch.std_mean(x, 0, correction=0)
    return mean, divisor(mean, deviation)


def dealt_rows(rows: Tensor, members: int) -> Tensor:
    """Deal rows `[S, B, W]` out to members, `[S, M, B // M, W]`; fewer than M go to all of them."""
    share = rows.shape[1] // members
    if share == 0:
        return rows.unsqueeze(1)
    return rows[:, : members * share].view(rows.shape[0], members, share, -1)


def mopo_model_loss(
    model: MLPMOPOEnsembleModel, rows: Tensor, beta: float = BETA
) -> dict[str, Tensor]:
    """Negative log-likelihood of every member, summed over members, and what it was made of.

    Args:
        model: The ensemble.
        rows: `[S, 1, B, W]`, shared by all members, or `[S, M, B, W]`, each its own.
        beta: See `balanced_nll`.

    Returns:
        `mopo_model_loss [S]`, to be minimised; `reward_mae` and `delta_obs_mae [S]`, and, for
        shared rows, `ensemble_disagreement [S]`.
    """
    size = model.obs_dim + model.action_dim
    members, statistics = model.members(), model.statistics
    target = (model.targets(rows) - statistics.target_mean) / statistics.target_scale
    predicted = members.standardised(rows[..., :size])
    nll = balanced_nll(predicted.mean, predicted.logvar, target, beta)  # [S, M, B, O]
    loss = nll.mean((2, 3)).sum(1)
    if model.learn_logvar_bounds:
        loss = loss + BOUND_WEIGHT * (model.max_logvar - model.min_logvar).sum((1, 2, 3))
    if predicted.terminal is not None:
        ends = rows[..., -1].expand_as(predicted.terminal)
        entropy = functional.binary_cross_entropy_with_logits(
            predicted.terminal, ends, reduction="none"
        )
        loss = loss + entropy.mean(2).sum(1)
    return {"mopo_model_loss": loss} | _errors(model, predicted, target)


@torch.no_grad()
def _errors(
    model: MLPMOPOEnsembleModel, predicted: Prediction, target: Tensor
) -> dict[str, Tensor]:
    """Return mean absolute errors and disagreement in the units of the data, each `[S]`."""
    scale = model.target_scale
    error = ((predicted.mean - target).abs().mean((1, 2), keepdim=True) * scale)[:, 0, 0]  # [S, O]
    size = model.obs_dim
    # Without a reward to learn there is no error in it.
    reward = error[:, size] if model.learn_reward else torch.zeros_like(error[:, 0])
    found = {"reward_mae": reward, "delta_obs_mae": error[:, :size].mean(1)}
    if target.shape[1] == 1:
        found["ensemble_disagreement"] = mean_disagreement(predicted.mean * scale).mean(1)
    return found
