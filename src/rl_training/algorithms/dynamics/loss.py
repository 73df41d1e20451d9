"""What the dynamics ensemble of MOPO, MBPO and PETS learns from, and its loss.

PETS (Chua et al., 2018, Eq. 1 and App. A.1 of arXiv:1805.12114): maximum likelihood of the change
of the observation and the reward.

Rows are tables `[.., W]` with the columns observation, action, change of observation, reward,
terminated.  Shapes: S seeds, M members, B batch, N rows, O outputs.

Deviations: the reward is learned even where a known function replaces it in roll-outs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import divisor
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.models.dynamics import Prediction, gaussian_nll, mean_disagreement
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel

BOUND_WEIGHT = 0.01
"""Of the sum of upper minus lower bounds of the log-variance, in the loss."""


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
    """Standardise inputs by mean and deviation of a table, or of rows `index` `[S, n]` of it.

    Args:
        model: The ensemble.
        rows: `[S or 1, N, W]`; only the columns of observation and action are read.
        index: Rows of each seed.
    """
    size = model.input_mean.shape[-1]
    for seed in range(model.num_seeds):
        inputs = rows[min(seed, rows.shape[0] - 1), :, :size]
        inputs = inputs if index is None else inputs.index_select(0, index[seed])
        deviation, mean = torch.std_mean(inputs, 0, correction=0)
        model.input_mean[seed, 0, 0] = mean
        model.input_scale[seed, 0, 0] = 1 / divisor(mean, deviation)


def dealt_rows(rows: Tensor, members: int) -> Tensor:
    """Deal rows `[S, B, W]` out to members, `[S, M, B // M, W]`; fewer than M go to all of them."""
    share = rows.shape[1] // members
    if share == 0:
        return rows.unsqueeze(1)
    return rows[:, : members * share].view(rows.shape[0], members, share, -1)


def mopo_model_loss(model: MLPMOPOEnsembleModel, rows: Tensor) -> dict[str, Tensor]:
    """Negative log-likelihood of every member, summed over members, and what it was made of.

    Args:
        model: The ensemble.
        rows: `[S, 1, B, W]`, shared by all members, or `[S, M, B, W]`, each its own.

    Returns:
        `mopo_model_loss [S]`, to be minimised; `reward_mae` and `delta_obs_mae [S]`, and, for
        shared rows, `ensemble_disagreement [S]`.
    """
    size = model.obs_dim + model.action_dim
    target = rows[..., size:-1]
    predicted = model.members()(rows[..., :size])
    nll = gaussian_nll(predicted.mean, predicted.logvar, target)  # [S, M, B, O]
    loss = nll.mean((2, 3)).sum(1)
    if model.learn_logvar_bounds:
        loss = loss + BOUND_WEIGHT * (model.max_logvar - model.min_logvar).sum((1, 2, 3))
    if predicted.terminal is not None:
        ends = rows[..., -1].expand_as(predicted.terminal)
        entropy = functional.binary_cross_entropy_with_logits(
            predicted.terminal, ends, reduction="none"
        )
        loss = loss + entropy.mean(2).sum(1)
    return {"mopo_model_loss": loss} | _errors(predicted, target)


@torch.no_grad()
def _errors(predicted: Prediction, target: Tensor) -> dict[str, Tensor]:
    error = (predicted.mean - target).abs().mean((1, 2))  # [S, O]
    found = {"reward_mae": error[:, -1], "delta_obs_mae": error[:, :-1].mean(1)}
    if target.shape[1] == 1:
        found["ensemble_disagreement"] = mean_disagreement(predicted.mean).mean(1)
    return found
