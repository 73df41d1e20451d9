"""How far the dynamics ensemble can be trusted: numbers per seed, for the log.

None of them is used in learning.  Draws are numbered by the fit, so that looking leaves no trace.
Shapes: S seeds, M members, B rows, K steps, D observation, W columns of the table of `fit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.algorithms.dynamics.imagination import Imagination, Imagined, Penalty, uncertainty
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel, take_rows
from rl_training.rng import Rng

WITHIN_1_SIGMA = math.erf(1 / math.sqrt(2))
WITHIN_2_SIGMA = math.erf(2 / math.sqrt(2))
MOST_NAMED = 32
"""Entries of an observation that the log shows one by one."""


@torch.no_grad()
def calibration(model: MLPMOPOEnsembleModel, rows: Tensor) -> dict[str, Tensor]:
    """Share of outputs within one and two predicted deviations of the mean, each `[S]`.

    Args:
        model: The ensemble.
        rows: Rows it has not seen `[S, B, W]`.

    Returns:
        `within_1_sigma` (0.683 if calibrated), also by output, `within_2_sigma` (0.954), and
        `calibration_error`, the larger distance of the two from these.
    """
    size = model.obs_dim + model.action_dim
    mean, logvar, _ = model.members()(rows[..., :size].unsqueeze(1))
    distance = (model.targets(rows).unsqueeze(1) - mean).abs() * torch.exp(-0.5 * logvar)
    each = (distance <= 1).float().mean((1, 2))  # [S, O]
    one, two = each.mean(1), (distance <= 2).float().mean((1, 2, 3))
    error = torch.maximum((one - WITHIN_1_SIGMA).abs(), (two - WITHIN_2_SIGMA).abs())
    shares = {"within_1_sigma": one, "within_2_sigma": two, "calibration_error": error}
    return shares | named_outputs(model, "within_1_sigma", each)


def named_outputs(model: MLPMOPOEnsembleModel, name: str, values: Tensor) -> dict[str, Tensor]:
    """Name values `[S, O]` by output, `name_obs_0` to `name_reward`.

    Of more observations than `MOST_NAMED` only the reward is named.
    """
    size, named = model.obs_dim, {}
    if size <= MOST_NAMED:
        named = {f"{name}_obs_{entry}": values[:, entry] for entry in range(size)}
    return named | ({f"{name}_reward": values[:, size]} if model.learn_reward else {})


@torch.no_grad()
def penalty_correlation(
    model: MLPMOPOEnsembleModel, rows: Tensor, penalty: Penalty = "aleatoric"
) -> Tensor:
    """Correlation `[S]` of the penalty with the true error of the members' mean; 0 if constant.

    Near 1 the penalty points at what the model does not know, at 0 it is noise.
    """
    size = model.obs_dim + model.action_dim
    predicted = model.members()(rows[..., :size].unsqueeze(1))
    guess = uncertainty(penalty, predicted, model.obs_dim)
    error = (model.targets(rows) - predicted.mean.mean(1)).square().sum(-1).sqrt()
    guess, error = guess - guess.mean(1, keepdim=True), error - error.mean(1, keepdim=True)
    size_of_both = (guess.square().sum(1) * error.square().sum(1)).sqrt()
    return (guess * error).sum(1) / size_of_both.clamp(min=1e-12)


@torch.no_grad()
def open_loop_error(model: MLPMOPOEnsembleModel, obs: Tensor, actions: Tensor) -> Tensor:
    """Root mean squared error of the elites' mean after 1 to K steps without correction.

    Each elite follows its own mean; the mean over elites is compared with what really came.

    Args:
        model: The ensemble.
        obs: Real sequences `[S, B, K + 1, D]`.
        actions: What was done in them `[S, B, K, A]`, in learner units.

    Returns:
        `[S, K]`, in units of the observation.
    """
    members = model.elite_members()
    state = obs[:, None, :, 0].expand(-1, members.count, -1, -1)
    errors = []
    for step in range(actions.shape[2]):
        action = actions[:, None, :, step].expand(-1, members.count, -1, -1)
        state = model.next_obs(state, members(torch.cat((state, action), -1)).mean)
        errors.append((state.mean(1) - obs[:, :, step + 1]).square().mean((1, 2)).sqrt())
    return torch.stack(errors, 1)


def real_sequences(
    buffer: ReplayBuffer, rng: Rng, count: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw sequences of consecutive rows, for `open_loop_error`; reads nothing back.

    A draw that crosses the end of an episode or the newest row is replaced by one that does not,
    if among `4 count` draws there are enough.

    Returns:
        `obs [S, count, length + 1, D]`, `actions [S, count, length, A]`, and which of them lie
        within one episode, `[S, count]`.
    """
    size = len(buffer)
    first, _ = buffer.segment_range() if buffer.segment_range is not None else (0, size)
    start = first + rng.integers(max(size - (length - 1) * buffer.num_envs, 1), 4 * count)
    steps = torch.arange(length, device=start.device) * buffer.num_envs
    index = (start.unsqueeze(-1) + steps) % buffer.capacity  # [S, 4 count, K]
    flat = index.flatten(1)
    rows = {
        name: buffer.rows[name].expand(rng.num_seeds, *buffer.rows[name].shape[1:])
        for name in ("obs", "action", "next_obs", "continues", "truncated")
    }
    ends = (rows["continues"] == 0) | (rows["truncated"] != 0)
    here = take_rows(rows["next_obs"], flat).view(*index.shape, -1)[:, :, :-1]
    there = take_rows(rows["obs"], flat).view(*index.shape, -1)[:, :, 1:]
    # Rows of a dataset may have been shuffled or left out without a mark.
    torn = (here != there).any(-1).any(-1)
    broken = torn | ends.gather(1, flat).view_as(index)[..., :-1].any(-1)
    order = broken.to(torch.int8).argsort(dim=1, stable=True)[:, :count]
    kept = index.gather(1, order.unsqueeze(-1).expand(-1, -1, length))
    shape = (*kept.shape, -1)
    obs = take_rows(rows["obs"], kept.flatten(1)).view(shape)
    last = take_rows(rows["next_obs"], kept[..., -1]).unsqueeze(2)
    actions = take_rows(rows["action"], kept.flatten(1)).view(shape)
    inside = ~broken.gather(1, order) & (size > (length - 1) * buffer.num_envs)
    return torch.cat((obs, last), 2), actions, inside


def imagined_terminals(rollout: Imagined, starts: int) -> Tensor:
    """Share of the `starts` rollouts of each seed that ended in the model's mind, `[S]`."""
    return (rollout.terminated & rollout.valid).sum(1) / starts


def exploitation(rollout: Imagined, real_rewards: Tensor, quantile: float = 0.95) -> Tensor:
    """Alarm `[S]`: by how many deviations the mean imagined reward passes what is real.

    The bar is a high quantile of the real rewards `[S or 1, N]`.  A policy is not better on
    average than all but the best of the data without reason: above 0 it has most likely found an
    error of the model.
    """
    valid = rollout.valid.float()
    mean = (rollout.reward.nan_to_num() * valid).sum(1) / valid.sum(1).clamp(min=1)
    # At most a hundred thousand of them: sorting more tells nothing more.
    real = real_rewards[:, :: max(1, real_rewards.shape[1] // 100_000)]
    deviation = real.std(1, correction=0).clamp(min=1e-6)
    return (mean - torch.quantile(real, quantile, dim=1)) / deviation


MOST_ROWS = 1_000
"""Held-out rows that are looked at."""
SEQUENCES, LENGTH = 100, 5
"""Real sequences that are predicted open loop, and their length."""


def fit_health(
    imagination: Imagination, real: ReplayBuffer, rows: Tensor, fitted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what there is to say after a fit, each `[S]`.

    Args:
        imagination: Whose model was fitted.
        real: Where its rows came from.
        rows: The table it was fitted to.
        fitted: What the fit returned.
    """
    model = imagination.model
    held_out = fitted["held_out"][:, :MOST_ROWS]
    unseen = take_rows(rows.expand(model.num_seeds, -1, -1), held_out)
    kind = imagination.penalty_kind
    values = {
        f"holdout_error_{member}": error
        for member, error in enumerate(fitted["holdout_error"].unbind(1))
    }
    values |= {name: v for name, v in fitted.items() if name not in ("holdout_error", "held_out")}
    # Of the elites, which are rolled out: 1 is perfect, 0 no better than the mean of the data.
    errors = imagination.trainer.output_errors(rows, held_out)  # [S, M, O]
    errors = take_rows(errors, model.elites).mean(1)
    values |= named_outputs(model, "r2", 1 - errors)
    values |= calibration(model, unseen)
    values["penalty_correlation"] = penalty_correlation(
        model, unseen, "aleatoric" if kind == "none" else kind
    )
    return values | _open_loop(imagination, real)


def _open_loop(imagination: Imagination, real: ReplayBuffer) -> dict[str, Tensor]:
    """Error after 1 to `LENGTH` steps; empty where no episode is long enough."""
    rng = Rng(imagination.seeds, "model health", imagination.device)
    rng.seek(imagination.trainer.num_fits.value)
    obs, actions, inside = real_sequences(real, rng, SEQUENCES, LENGTH)
    usable = int(inside.sum(1).min())  # whole ones come first
    if usable == 0:
        return {}
    errors = open_loop_error(imagination.model, obs[:, :usable], actions[:, :usable])
    return {f"open_loop_error_{step + 1}": error for step, error in enumerate(errors.unbind(1))}


def rollout_health(
    imagination: Imagination, real: ReplayBuffer, imagined: Imagined, horizon: int
) -> dict[str, Tensor]:
    """Return what there is to say about rollouts, each `[S]`."""
    starts = imagination.config.rollout_batch_size
    valid = imagined.valid.float()
    count = valid.sum(1).clamp(min=1)
    rewards = real.rows["reward"][:, : len(real)].expand(imagination.model.num_seeds, -1)
    above = exploitation(imagined, rewards)
    return {
        "rollout_horizon": torch.full_like(count, horizon),
        "rollout_length": valid.sum(1) / starts,
        "imagined_terminals": imagined_terminals(imagined, starts),
        "imagined_reward": (imagined.reward.nan_to_num() * valid).sum(1) / count,
        "rollout_penalty": (imagined.penalty.nan_to_num() * valid).sum(1) / count,
        "exploitation": above,
        "exploitation_alarm": (above > 0).float(),
    }


def per_seed(values: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Turn tensors `[S]` into a mapping per seed, with one transfer."""
    table = torch.stack([value.double() for value in values.values()], 1).tolist()
    return [dict(zip(values, row, strict=True)) for row in table]
