"""How far a world model can be trusted: real sequences predicted without looking.

Shapes: S seeds, B sequences, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.data.batch import SequenceBatch
from rl_training.models.dreamer import WorldModel
from rl_training.models.rssm import RSSMState
from rl_training.rng import Rng


@dataclass(frozen=True)
class OpenLoop:
    """Observations of sequences, and what the model took them for."""

    real: Tensor
    """In the units that the model predicts, `[S, B, T, ...]`."""
    reconstructed: Tensor
    """The same, with every observation seen."""
    predicted: Tensor
    """The same; reconstructed while it looks, imagined afterwards."""
    blind: Tensor
    """Steps since the model last saw an observation, int64 `[S, B, T]`; 0 where it did."""


@torch.no_grad()
def open_loop(
    model: WorldModel, batch: SequenceBatch, action: Tensor, context: int, rng: Rng
) -> OpenLoop:
    """Follow sequences for some steps, then predict the rest from the real actions alone.

    Where another episode begins the model looks once more: nothing could tell how.

    Args:
        model: The world model.
        batch: Real sequences.
        action: Their actions as vectors, `[S, B, T, A]`.
        context: Steps that are seen.
        rng: Source of the latents.
    """
    seeds, rows, steps = batch.is_first.shape
    embedding: Tensor = model.encoder(batch.obs.flatten(1, 2)).view(seeds, rows, steps, -1)
    noise = model.rssm.latent.draw_noise(rng, rows, steps)
    keep = 1 - batch.is_first.to(torch.float32).unsqueeze(-1)
    state = model.rssm.initial(seeds, rows, embedding.device)
    if batch.start is not None:
        state = model.rssm.state_of(batch.start)
    sighted = model.rssm.observe(embedding, action, batch.is_first, noise, state).state
    count = torch.zeros(seeds, rows, dtype=torch.int64, device=embedding.device)
    features, blind = [], []
    for step in range(steps):
        left = keep[:, :, step]
        before = RSSMState(state.deter * left, state.latent * left)
        taken = action[:, :, step] * left
        observed = model.rssm.observe_step(before, taken, embedding[:, :, step], noise[:, :, step])
        guessed = model.rssm.imagine_step(before, taken, noise[:, :, step])
        looks = batch.is_first[:, :, step] | (step < context)
        latent = torch.where(looks.unsqueeze(-1), observed.latent, guessed.latent)
        state = RSSMState(observed.deter, latent)
        count = torch.where(looks, torch.zeros_like(count), count + 1)
        features.append(state.features)
        blind.append(count)
    real = model.decoder.target(batch.obs)
    reconstructed, predicted = (
        model.decoder(each.flatten(1, 2)).view(real.shape)
        for each in (sighted.features, torch.stack(features, 2))
    )
    return OpenLoop(real, reconstructed, predicted, torch.stack(blind, 2))


def open_loop_errors(loop: OpenLoop) -> tuple[Tensor, Tensor]:
    """Return the mean squared error after each number of blind steps from 0 on, and their number.

    Returns:
        Errors `[S, T]`, 0 where there is nothing to compare, and of how many steps each is.
    """
    error = (loop.predicted - loop.real).square().flatten(3).mean(-1)  # [S, B, T]
    numbers = torch.arange(loop.real.shape[2], device=error.device)
    chosen = (loop.blind.unsqueeze(-1) == numbers).to(error.dtype)  # [S, B, T, T]
    counts = chosen.sum((1, 2))
    return (error.unsqueeze(-1) * chosen).sum((1, 2)) / counts.clamp(min=1), counts
