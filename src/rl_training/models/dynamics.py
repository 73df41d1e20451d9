"""Mathematics of Gaussian dynamics ensembles: likelihood, bounds, uncertainty, who predicts whom.

References: PETS (Chua et al., 2018, arXiv:1805.12114), MOPO (Yu et al., 2020, arXiv:2005.13239).
Shapes: S seeds, M members, E members in use, B batch, D observation, A action, I inputs of the
network, O outputs: D, and 1 for the reward where that is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rl_training.rng import Rng

_CHUNK = 256
"""Rows per member that a CPU runs through all layers before the next: they stay in its cache."""


ObsProcess = Callable[[Tensor], Tensor]
"""Observations `[.., D]` to what a network is shown of them."""


class Prediction(NamedTuple):
    """What members predict for their rows, each `[S, E, B, ...]`."""

    mean: Tensor
    """Of the change of the observation, then of the reward if it is learned, `[..., O]`."""
    logvar: Tensor
    terminal: Tensor | None
    """Logit of the end of the episode `[...]`, where that is learned."""


@dataclass(frozen=True)
class Statistics:
    """Mean and deviation that standardise what a network takes and gives."""

    input_mean: Tensor
    """`[S, 1, 1, I]`."""
    input_scale: Tensor
    """One over the deviation of the inputs; 0 hides an input."""
    target_mean: Tensor
    """`[S, 1, 1, O]`."""
    target_scale: Tensor
    """Deviation of the targets."""


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
    statistics: Statistics | None
    """None where the first and the last layer speak the units of the data."""
    obs_dim: int
    process: ObsProcess | None = None
    """What is made of an observation before the first layer."""

    @property
    def count(self) -> int:
        """Members per seed, E."""
        return self.max_logvar.shape[1]

    def folded(self, *, keep_reward: bool = True) -> Members:
        """Return the same with the standardisation inside the layers, for many calls.

        Args:
            keep_reward: Predict the reward; without it `Prediction` ends with the observation.
        """
        members = self if self.statistics is None else self._folded(self.statistics)
        has_reward = self.max_logvar.shape[-1] > self.obs_dim
        return members._without_reward() if has_reward and not keep_reward else members

    def _folded(self, statistics: Statistics) -> Members:
        size, lead = self.max_logvar.shape[-1], (-1, self.count, -1, -1)
        center, scale, mean, deviation = (
            x.expand(lead).flatten(0, 1)
            for x in (
                statistics.input_mean * statistics.input_scale,
                statistics.input_scale,
                statistics.target_mean,
                statistics.target_scale,
            )
        )
        weights, biases = list(self.weights), list(self.biases)
        biases[0] = biases[0] - torch.bmm(center, weights[0])
        weights[0] = weights[0] * scale.transpose(1, 2)
        last, bias = weights[-1], biases[-1]
        weights[-1] = torch.cat((last[..., :size] * deviation, last[..., size:]), -1)
        # The soft bounds move along with what they bound.
        shift = 2 * deviation.log()
        parts = (
            torch.addcmul(mean, bias[..., :size], deviation),
            bias[..., size : 2 * size] + shift,
            bias[..., 2 * size :],
        )
        biases[-1] = torch.cat(parts, -1)
        moved = 2 * statistics.target_scale.log()
        return replace(
            self,
            weights=tuple(weights),
            biases=tuple(biases),
            max_logvar=self.max_logvar + moved,
            min_logvar=self.min_logvar + moved,
            statistics=None,
        )

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
        """Predict from observations and actions, in the units of the data.

        Args:
            x: `[S, E, B, D + A]`, or `[S, 1, B, D + A]` rows that all members see.
        """
        mean, logvar, terminal = self.standardised(x)
        statistics = self.statistics
        if statistics is not None:
            mean = torch.addcmul(statistics.target_mean, mean, statistics.target_scale)
            logvar = logvar + 2 * statistics.target_scale.log()
        return Prediction(mean, logvar, terminal)

    def standardised(self, x: Tensor) -> Prediction:
        """Predict the standardised targets; see `__call__`."""
        if self.process is not None:
            x = torch.cat((self.process(x[..., : self.obs_dim]), x[..., self.obs_dim :]), -1)
        seeds, _, rows, _ = x.shape
        if self.statistics is not None:
            x = (x - self.statistics.input_mean) * self.statistics.input_scale
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


def balanced_nll(mean: Tensor, logvar: Tensor, target: Tensor, beta: float) -> Tensor:
    """The value of `gaussian_nll` with another gradient of the mean: times variance^beta.

    Under the likelihood a row whose error is large gets a large variance, which then takes its
    error's weight away: heavy tails are explained as noise and never learned.  As in Seitzer et al.
    (2022, Eq. 4 of arXiv:2203.09168), but for the mean alone: the variance is fitted by likelihood.
    0 is the likelihood, 1 least squares.
    """
    if beta == 0:
        return gaussian_nll(mean, logvar, target)
    error = (mean - target).square() * torch.exp((beta - 1) * logvar.detach())
    return gaussian_nll(mean.detach(), logvar, target) + error - error.detach()


def max_aleatoric(logvar: Tensor) -> Tensor:
    """MOPO's penalty `[S, B]`: the largest norm of a member's predicted deviations (Sec. 4.3)."""
    return logvar.exp().sum(-1).amax(1).sqrt()


def max_mean_deviation(mean: Tensor) -> Tensor:
    """MOPO's ablation `[S, B]`: the largest distance of a member's mean from the mean of all."""
    return (mean - mean.mean(1, keepdim=True)).square().sum(-1).amax(1).sqrt()


def mean_disagreement(mean: Tensor) -> Tensor:
    """How far the members' means spread `[S, B]`: their deviation, averaged over outputs."""
    return mean.std(1, correction=0).mean(-1)


@dataclass(frozen=True)
class Assignment:
    """Which member predicts which row, in equal shares, so that a row costs one member's work.

    A row's member is uniform over the members; shares are exact rather than binomial, which keeps
    shapes fixed.  Where the rows cannot be shared out evenly, chance says who has fewer.
    """

    order: Tensor
    """Rows sorted by member `[S, E * share]`; places of a share that is not full hold row 0."""
    place: Tensor
    """Where each row is in `order` `[S, B]`."""
    slot: Tensor
    """The member of each row, as a number below E, `[S, B]`."""
    count: int

    @classmethod
    def draw(cls, rng: Rng, rows: int, count: int) -> Assignment:
        """Draw an assignment of `rows` rows to `count` members for every seed."""
        return cls.of(rng.permutation(rows), rng.permutation(count))

    @classmethod
    def of(cls, position: Tensor, members: Tensor) -> Assignment:
        """Give the first share of positions to the first of the members, and so on.

        Args:
            position: Of each row, a permutation `[S, B]`.
            members: In which order they take shares, a permutation `[S, E]`.
        """
        rows, count = position.shape[1], members.shape[1]
        share = -(-rows // count)
        slot = members.gather(1, position // share)
        place = slot * share + position % share
        number = torch.arange(rows, device=position.device).expand_as(position)
        empty = torch.zeros_like(position[:, :1]).expand(-1, share * count)
        return cls(empty.scatter(1, place, number), place, slot, count)

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
