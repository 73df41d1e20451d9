"""Lines of the log that say how far a model can be trusted; nothing here is learned from.

Draws are numbered by the fit, so that looking leaves no trace.  Shapes: S seeds, M members.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.algorithms.dynamics.health import (
    calibration,
    exploitation,
    imagined_terminals,
    named_outputs,
    open_loop_error,
    penalty_correlation,
    real_sequences,
)
from rl_training.algorithms.dynamics.imagination import Imagination
from rl_training.algorithms.dynamics.rollout import Imagined
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.models.dynamics import take_rows
from rl_training.rng import Rng

MOST_ROWS = 1_000
"""Held-out rows that are looked at."""
SEQUENCES, LENGTH = 100, 5
"""Real sequences that are predicted open loop, and their length."""


def fit_health(
    imagination: Imagination, real: ReplayBuffer, rows: Tensor, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what there is to say after a fit, each `[S]`.

    Args:
        imagination: Whose model was fitted.
        real: Where its rows came from.
        rows: The table it was fitted to.
        found: What the fit returned.
    """
    model = imagination.model
    held_out = found["held_out"][:, :MOST_ROWS]
    unseen = take_rows(rows.expand(model.num_seeds, -1, -1), held_out)
    kind = imagination.penalty_kind
    values = {
        f"holdout_error_{member}": error
        for member, error in enumerate(found["holdout_error"].unbind(1))
    }
    values |= {name: v for name, v in found.items() if name not in ("holdout_error", "held_out")}
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
    usable = int(inside.sum(1).min())  # whole ones stand first
    if usable == 0:
        return {}
    errors = open_loop_error(imagination.model, obs[:, :usable], actions[:, :usable])
    return {f"open_loop_error_{step + 1}": error for step, error in enumerate(errors.unbind(1))}


def rollout_health(
    imagination: Imagination, real: ReplayBuffer, made: Imagined, horizon: int
) -> dict[str, Tensor]:
    """Return what there is to say about roll-outs, each `[S]`."""
    starts = imagination.config.rollout_batch_size
    valid = made.valid.float()
    count = valid.sum(1).clamp(min=1)
    rewards = real.rows["reward"][:, : len(real)].expand(imagination.model.num_seeds, -1)
    above = exploitation(made, rewards)
    return {
        "rollout_horizon": torch.full_like(count, horizon),
        "rollout_length": valid.sum(1) / starts,
        "imagined_terminals": imagined_terminals(made, starts),
        "imagined_reward": (made.reward.nan_to_num() * valid).sum(1) / count,
        "rollout_penalty": (made.penalty.nan_to_num() * valid).sum(1) / count,
        "exploitation": above,
        "exploitation_alarm": (above > 0).float(),
    }


def per_seed(values: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Turn tensors `[S]` into a mapping per seed, with one transfer."""
    table = torch.stack([value.double() for value in values.values()], 1).tolist()
    return [dict(zip(values, row, strict=True)) for row in table]
