"""Mathematics of Gaussian dynamics ensembles: likelihood, bounds, uncertainty, who predicts whom.

References: PETS (Chua et al., 2018, arXiv:1805.12114), MOPO (Yu et al., 2020, arXiv:2005.13239).
Shapes: S seeds, M members, E members in use, B batch, I inputs, O = obs_dim + 1 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.rng import Rng

_CHUNK = 256
"""Rows per member that a CPU runs through all layers before the next: they stay in its cache."""


class Prediction(NamedTuple):
    """What members predict for their rows, each `[S, E, B, ...]`."""

    mean: Tensor
    """Of the change of the observation, then of the reward, `[..., O]`."""
    logvar: Tensor
    terminal: Tensor | None
    """Logit of the end of the episode `[...]`, where that is learned."""


@dataclass(frozen=True)
class Members:
    """The weights of some members of each seed, ready to run: one batched product per layer."""

    weights: tuple[Tensor, ...]
    """`[S E, inputs, outputs]` per layer."""
    biases: tuple[Tensor, ...]
    """`[S E, 1, outputs]` per layer."""
    max_logvar: Tensor
    """`[S, E, 1, O]`."""
    min_logvar: Tensor
    center: Tensor | None
    """Mean of the inputs `[S, 1, 1, I]`; None where the first layer takes them as they are."""
    scale: Tensor | None
    """One over their standard deviation `[S, 1, 1, I]`."""

    @property
    def count(self) -> int:
        """Members per seed, E."""
        return self.max_logvar.shape[1]

    def folded(self, *, keep_reward: bool = True) -> Members:
        """Return the same with the standardisation in the first layer, for many calls.

        Args:
            keep_reward: Predict the reward; without it `Prediction` ends with the observation.
        """
        weight, bias = self.weights[0], self.biases[0]
        if self.center is not None and self.scale is not None:
            lead = (-1, self.count, -1, -1)
            scale = self.scale.expand(lead).flatten(0, 1)
            shift = (self.center * self.scale).expand(lead).flatten(0, 1)
            bias = bias - torch.bmm(shift, weight)
            weight = weight * scale.transpose(1, 2)
        members = replace(
            self,
            weights=(weight, *self.weights[1:]),
            biases=(bias, *self.biases[1:]),
            center=None,
            scale=None,
        )
        return members if keep_reward else members._without_reward()

    def _without_reward(self) -> Members:
        size = self.max_logvar.shape[-1]

        def cut(x: Tensor) -> Tensor:
            return torch.cat(
                (x[..., : size - 1], x[..., size : 2 * size - 1], x[..., 2 * size :]), -1
            )

        return replace(
            self,
            weights=(*self.weights[:-1], cut(self.weights[-1])),
            biases=(*self.biases[:-1], cut(self.biases[-1])),
            max_logvar=self.max_logvar[..., :-1],
            min_logvar=self.min_logvar[..., :-1],
        )

    def __call__(self, x: Tensor) -> Prediction:
        """Predict from `[S, E, B, I]`, or from `[S, 1, B, I]` rows that all members see."""
        seeds, _, rows, _ = x.shape
        if self.center is not None and self.scale is not None:
            x = (x - self.center) * self.scale
        x = x.expand(-1, self.count, -1, -1).flatten(0, 1)
        if x.device.type == "cpu" and rows > 2 * _CHUNK and not torch.is_grad_enabled():
            out = torch.cat([self._layers(part) for part in torch.split(x, _CHUNK, 1)], 1)
        else:
            out = self._layers(x)
        return self._heads(out.view(seeds, self.count, rows, -1))

    def _layers(self, x: Tensor) -> Tensor:
        last = len(self.weights) - 1
        in_place = not torch.is_grad_enabled()
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x.to(weight.dtype), weight)
            if index < last:
                x = functional.silu(x, inplace=in_place)
        return x

    def _heads(self, out: Tensor) -> Prediction:
        size = self.max_logvar.shape[-1]
        logvar = soft_bounds(out[..., size : 2 * size], self.min_logvar, self.max_logvar)
        learned = out.shape[-1] > 2 * size
        return Prediction(out[..., :size], logvar, out[..., -1] if learned else None)


def soft_bounds(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Bring log-variances smoothly between bounds (PETS, App. A.1).

    The second bound lifts what the first one left, so `high` may be passed by at most
    log(1 + exp(low - high)), 3e-5 at the initial bounds.
    """
    raw = high - functional.softplus(high - raw)
    return low + functional.softplus(raw - low)


def gaussian_nll(mean: Tensor, logvar: Tensor, target: Tensor) -> Tensor:
    """Twice the negative log-likelihood of Gaussians, without log 2 pi (PETS, Eq. 1)."""
    return (mean - target).square() * torch.exp(-logvar) + logvar


def max_aleatoric(logvar: Tensor) -> Tensor:
    """MOPO's penalty `[S, B]`: the largest norm of a member's predicted deviations (Sec. 4.3)."""
    return logvar.exp().sum(-1).amax(1).sqrt()


def mean_disagreement(mean: Tensor) -> Tensor:
    """How far the members' means spread `[S, B]`: their deviation, averaged over outputs."""
    return mean.std(1, correction=0).mean(-1)


@dataclass(frozen=True)
class Assignment:
    """Which member predicts which row, in equal shares, so that a row costs one member's work.

    A row's member is uniform over the members; shares are exact rather than binomial, which keeps
    shapes fixed.
    """

    order: Tensor
    """Rows sorted by member `[S, E * share]`; the last few may stand twice to fill the share."""
    place: Tensor
    """Where each row stands in `order` `[S, B]`."""
    slot: Tensor
    """The member of each row, as a number below E, `[S, B]`."""
    count: int

    @classmethod
    def draw(cls, rng: Rng, rows: int, count: int) -> Assignment:
        """Draw an assignment of `rows` rows to `count` members for every seed."""
        order = rng.permutation(rows)
        return cls.of(order, count)

    @classmethod
    def of(cls, order: Tensor, count: int) -> Assignment:
        """Give the first share of `order` `[S, B]`, a permutation, to the first member, and on."""
        rows = order.shape[1]
        share = -(-rows // count)
        number = torch.arange(rows, device=order.device).expand_as(order)
        place = torch.empty_like(order).scatter(1, order, number)
        missing = share * count - rows
        # More rows may be missing than there are, for fewer rows than members.
        fill = order.repeat(1, -(-missing // rows))[:, :missing]
        return cls(torch.cat((order, fill), 1), place, place // share, count)

    def __call__(self, members: Members, x: Tensor) -> Prediction:
        """Predict rows `[S, B, I]`, each by its member; results are `[S, B, ...]`."""
        shares = take_rows(x, self.order).view(x.shape[0], self.count, -1, x.shape[-1])
        mean, logvar, terminal = members(shares)
        return Prediction(
            take_rows(mean.flatten(1, 2), self.place),
            take_rows(logvar.flatten(1, 2), self.place),
            None if terminal is None else terminal.flatten(1).gather(1, self.place),
        )

    def pick(self, predicted: Prediction) -> Prediction:
        """Of what all members predict for all rows, `[S, E, B, ...]`, keep each row's own."""
        mean, logvar, terminal = predicted
        rows = self.slot.view(self.slot.shape[0], 1, -1, 1).expand(-1, -1, -1, mean.shape[-1])
        return Prediction(
            mean.gather(1, rows).squeeze(1),
            logvar.gather(1, rows).squeeze(1),
            None if terminal is None else terminal.gather(1, self.slot.unsqueeze(1)).squeeze(1),
        )


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` `[S, K]` of each seed's `x` `[S, B, D]`."""
    if x.shape[0] == 1:
        return x[0].index_select(0, index[0]).unsqueeze(0)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def sample_gaussian(predicted: Prediction, rng: Rng) -> Tensor:
    """Draw change of observation and reward `[S, B, O]` from rows' own predictions."""
    noise = rng.normal(*predicted.mean.shape[1:])
    return torch.addcmul(predicted.mean, torch.exp(0.5 * predicted.logvar), noise)


def resized(values: Sequence[float], length: int) -> tuple[float, ...]:
    """Stretch a list of per-layer values to another number of layers: ends stay, nearest between.

    Example:
        >>> resized((1.0, 2.0, 3.0, 3.0, 4.0), 3)
        (1.0, 3.0, 4.0)
    """
    if length == 1 or len(values) == 1:
        return (values[-1],) * length
    step = (len(values) - 1) / (length - 1)
    return tuple(values[int(step * index + 0.5)] for index in range(length))
