"""An ensemble of Gaussian dynamics networks, shared by MOPO, MBPO and PETS, and its mathematics.

All members of all seeds run in one batched product per layer.  Each member is the network of PETS
(Chua et al., 2018, App. A.1 of arXiv:1805.12114): swish layers, Gaussian heads for the change of
the observation and the reward, learned soft bounds of the log-variance, inputs standardised.  What
the members do not know together is a penalty of MOPO (Yu et al., 2020, arXiv:2005.13239).
Shapes: S seeds, M members, E members in use, B batch, D observation, A action, I inputs of the
network, O outputs: D, and 1 for the reward where that is learned.

Deviations: targets are standardised too, and the bounds of the log-variance are in those units, so
that one scale of the weights, one learning rate and one pair of bounds suit every output; inputs
and outputs are in the units of the data.  New statistics leave the function as it was: the first
and the last layer are re-expressed.  Every member has bounds of its own, where the authors' code
shares them, so that a member's best snapshot is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from rl_training.errors import CheckpointError, ConfigError, SpecMismatch
from rl_training.models.layers import StackedLinear
from rl_training.output_files import written_beside
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


WEIGHT_DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
"""Per layer, of four hidden ones and the output, as in the authors' code of PETS and MBPO."""
MAX_LOGVAR, MIN_LOGVAR = 0.5, -10.0
"""Initial bounds of the log-variance of standardised targets."""
_FORMAT = "rl_training dynamics ensemble"


def truncated_normal_init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
    """Draw weights `[S, *members, I, O]` from N(0, 1 / 4I), cut at two deviations."""
    return rng.truncated_normal(*members, inputs, outputs) / (2 * math.sqrt(inputs))


class Angles:
    """Shows a network the sine and cosine of some entries of an observation, after all entries."""

    def __init__(self, entries: Sequence[int]) -> None:
        self.entries = tuple(entries)

    def __call__(self, obs: Tensor) -> Tensor:
        """Return `[.., D + 2 len(entries)]`."""
        angles = [obs[..., entry : entry + 1] for entry in self.entries]
        return torch.cat((obs, *(x.sin() for x in angles), *(x.cos() for x in angles)), -1)


class MLPMOPOEnsembleModel(nn.Module):
    """Members `(obs, action) -> N(change of obs and reward)`, for S seeds."""

    input_mean: Tensor
    input_scale: Tensor
    target_mean: Tensor
    target_scale: Tensor
    fitted: Tensor
    elites: Tensor

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (200, 200, 200, 200),
        num_ensembles: int = 7,
        *,
        num_elites: int | None = None,
        learn_logvar_bounds: bool = True,
        learn_terminations: bool = False,
        learn_reward: bool = True,
        obs_process: ObsProcess | None = None,
        angles: Sequence[int] = (),
        hidden: Sequence[int] = (),
        no_delta: Sequence[int] = (),
        weight_decay: Sequence[float] = WEIGHT_DECAY,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action, in learner units.
            hidden_sizes: Widths of the hidden layers.
            num_ensembles: Members M.
            num_elites: Members that rollouts draw from, those of least hold-out error once
                fitted; None is 5, or all of fewer.
            learn_logvar_bounds: Learn the bounds of the log-variance; otherwise they stay.
            learn_terminations: Add a head for the end of the episode.
            learn_reward: Predict the reward; False where it is known.
            obs_process: What the networks are shown of observations `[.., D]`; None is the
                observation, with sine and cosine of `angles` in place of these.
            angles: Entries of the observation that are angles.
            hidden: Entries of the observation that the networks are not shown, such as the place of
                a runner, on which nothing depends.
            no_delta: Entries whose next value is predicted, not their change.
            weight_decay: Per layer; stretched to the number of layers where that differs.
            rng: Source of the initial weights; its number of seeds is S.

        Raises:
            ConfigError: For sizes that make no ensemble, or entries that the observation has not.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        _check_sizes(obs_dim, action_dim, num_ensembles, num_elites)
        _check_entries(
            obs_dim, obs_process, {"angles": angles, "hidden": hidden, "no_delta": no_delta}
        )
        self.obs_dim, self.action_dim, self.num_ensembles = obs_dim, action_dim, num_ensembles
        self.num_elites = min(5, num_ensembles) if num_elites is None else num_elites
        self.num_seeds = rng.num_seeds
        self.hidden_sizes, self.learn_reward = tuple(hidden_sizes), learn_reward
        self.angles, self.hidden, self.no_delta = tuple(angles), tuple(hidden), tuple(no_delta)
        self.process = Angles(angles) if angles else obs_process
        shown = torch.zeros(1, obs_dim, device=rng.device)
        features = obs_dim if self.process is None else self.process(shown).shape[-1]
        outputs = obs_dim + learn_reward
        sizes = (features + action_dim, *hidden_sizes, 2 * outputs + learn_terminations)
        self.layers = nn.ModuleList(
            StackedLinear(i, o, rng, (num_ensembles,), truncated_normal_init)
            for i, o in pairwise(sizes)
        )
        self.weight_decay = resized(weight_decay, len(self.layers))
        self.learn_terminations, self.learn_logvar_bounds = learn_terminations, learn_logvar_bounds
        lead = (self.num_seeds, num_ensembles, 1, outputs)
        for name, value in (("max_logvar", MAX_LOGVAR), ("min_logvar", MIN_LOGVAR)):
            bound = torch.full(lead, value, device=rng.device)
            self.register_parameter(name, nn.Parameter(bound, requires_grad=learn_logvar_bounds))
        self.max_logvar: nn.Parameter
        self.min_logvar: nn.Parameter
        for name, size in (("input", sizes[0]), ("target", outputs)):
            shape = (self.num_seeds, 1, 1, size)
            self.register_buffer(f"{name}_mean", torch.zeros(shape, device=rng.device))
            self.register_buffer(f"{name}_scale", torch.ones(shape, device=rng.device))
        self.register_buffer("fitted", torch.zeros(self.num_seeds, device=rng.device))
        """1 for seeds whose weights were learned under their statistics, `[S]`."""
        is_shown = torch.ones(sizes[0], device=rng.device)
        is_shown[[*self.hidden, *self.angles]] = 0
        keeps = torch.ones(obs_dim, device=rng.device)
        keeps[list(self.no_delta)] = 0
        self.seen = is_shown
        """0 for inputs that the networks are not shown, `[I]`; no buffer, as it follows from the
        arguments."""
        self.keeps = keeps
        """1 for entries whose change is predicted, 0 for those predicted themselves, `[D]`."""
        every = torch.arange(self.num_elites, device=rng.device)
        self.register_buffer("elites", every.expand(self.num_seeds, -1).clone())
        self.sampling_rng = Rng(range(self.num_seeds), "dynamics sampling", rng.device)
        """Randomness of `sample_transition` when the caller gives none; not in checkpoints."""

    @property
    def statistics(self) -> Statistics:
        """What inputs and targets are standardised by."""
        return Statistics(self.input_mean, self.input_scale, self.target_mean, self.target_scale)

    def features(self, obs: Tensor) -> Tensor:
        """Return what the networks are shown of observations `[.., D]`."""
        return obs if self.process is None else self.process(obs)

    def targets(self, rows: Tensor) -> Tensor:
        """Return what is to be predicted `[.., O]` for rows of the table of `algorithms.dynamics`.

        Args:
            rows: Observation, action, change of observation, reward, terminated, `[.., W]`.
        """
        size = self.obs_dim
        change = rows[..., size + self.action_dim : 2 * size + self.action_dim]
        if self.no_delta:
            change = change + (1 - self.keeps) * rows[..., :size]
        return torch.cat((change, rows[..., -2:-1]), -1) if self.learn_reward else change

    def next_obs(self, obs: Tensor, outputs: Tensor) -> Tensor:
        """Return the next observation `[.., D]` for drawn or predicted outputs `[.., O]`."""
        change = outputs[..., : self.obs_dim]
        return torch.addcmul(change, obs, self.keeps) if self.no_delta else obs + change

    @torch.no_grad()
    def standardise(self, new: Statistics) -> None:
        """Take new statistics and leave the function as it is, for seeds that are `fitted`.

        With z = (x - m) s before and z' = (x - m') s' after, W z + b = W' z' + b' for
        W' = W s / s', b' = b + (m' - m) s W; of the outputs likewise.  A log-variance moves by
        2 log(deviation / deviation').  Learned bounds move with it where that widens them: where
        it would not, they stay, so that larger targets do not meet bounds made for smaller ones.
        """
        old, learned = self.statistics, self.fitted.view(-1, 1, 1, 1) > 0
        size = self.target_mean.shape[-1]
        first, last = self.layers[0], self.layers[-1]
        assert isinstance(first, StackedLinear)
        assert isinstance(last, StackedLinear)
        ratio = torch.where(learned & (new.input_scale > 0), old.input_scale / new.input_scale, 1)
        shift = torch.where(learned, (new.input_mean - old.input_mean) * old.input_scale, 0)
        first.bias.add_(shift.matmul(first.weight))
        first.weight.mul_(ratio.transpose(2, 3))
        ratio = torch.where(learned, old.target_scale / new.target_scale, 1)
        shift = (old.target_mean - new.target_mean) / new.target_scale
        last.weight[..., :size] *= ratio
        last.bias[..., :size] *= ratio
        last.bias[..., :size] += torch.where(learned, shift, 0)
        last.bias[..., size : 2 * size] += 2 * ratio.log()
        if self.learn_logvar_bounds:
            self.max_logvar.add_(2 * ratio.log().clamp(min=0))
            self.min_logvar.add_(2 * ratio.log().clamp(max=0))
        self.input_mean.copy_(new.input_mean)
        self.input_scale.copy_(new.input_scale)
        self.target_mean.copy_(new.target_mean)
        self.target_scale.copy_(new.target_scale)

    def save(self, path: str | Path) -> None:
        """Write the fitted ensemble to a safetensors file, for `load`.

        Raises:
            ConfigError: For an `obs_process` of your own, which a file cannot hold.
        """
        if self.process is not None and not self.angles:
            raise ConfigError(
                "an ensemble with an obs_process of your own cannot be saved by itself: a file "
                "holds no code; save its state_dict and build the model again"
            )
        facts = {name: getattr(self, name) for name in _SAVED}
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with written_beside(Path(path)) as part:
            save_file(tensors, part, {"format": _FORMAT, "model": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> MLPMOPOEnsembleModel:
        """Read an ensemble that `save` has written.

        Raises:
            CheckpointError: For a file that does not hold such an ensemble.
        """
        try:
            with safe_open(path, "pt", str(device)) as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header.get("format") != _FORMAT:
                raise ValueError("it was not written by the ensemble's save()")
            facts: dict[str, Any] = json.loads(header["model"])
            seeds = facts.pop("num_seeds")
            model = cls(**facts, rng=Rng(range(seeds), "model", device))
            model.load_state_dict(tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a dynamics ensemble: {error}"
            ) from error
        return model

    def members(self, index: Tensor | None = None) -> Members:
        """Return all members, or those of `index` `[S, E]`, ready to run.

        With an index the weights are copied, so take them once per rollout, not once per step.
        """
        layers = [layer for layer in self.layers if isinstance(layer, StackedLinear)]
        operands = [layer.operands() for layer in layers]
        # Inputs and predictions of three digits would be the model's error; the layers between
        # do nine tenths of the work.
        for end in (0, -1):
            operands[end] = layers[end].weight, layers[end].bias
        weights = [_chosen(weight, index).flatten(0, 1) for weight, _ in operands]
        biases = [_chosen(bias, index).flatten(0, 1) for _, bias in operands]
        return Members(
            tuple(weights),
            tuple(biases),
            _chosen(self.max_logvar, index),
            _chosen(self.min_logvar, index),
            self.statistics,
            self.obs_dim,
            self.process,
        )

    def elite_members(self) -> Members:
        """Return the elites, ready to run."""
        return self.members(self.elites)

    def decays(self) -> dict[Tensor, float]:
        """Return the weight decay of each weight matrix; biases and bounds have none."""
        layers = [layer for layer in self.layers if isinstance(layer, StackedLinear)]
        return {layer.weight: d for layer, d in zip(layers, self.weight_decay, strict=True)}

    def predict_distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log-variances of change of observation and reward, by every member.

        Args:
            obs: `[B, obs_dim]` for one seed, or `[S, B, obs_dim]`.
            actions: `[B, action_dim]` or `[S, B, action_dim]`, in learner units.

        Returns:
            Two tensors `[M, B, O]`, or `[S, M, B, O]`, in the units of the data.

        Raises:
            SpecMismatch: For other shapes.
        """
        x, alone = self._inputs(obs, actions)
        mean, logvar, _ = self.members()(x.unsqueeze(1))
        return (mean[0], logvar[0]) if alone else (mean, logvar)

    @torch.no_grad()
    def sample_transition(
        self, obs: Tensor, actions: Tensor, *, rng: Rng | None = None
    ) -> dict[str, Tensor]:
        """Draw what may come next, each row from a random elite.

        Args:
            obs: `[B, obs_dim]` for one seed, or `[S, B, obs_dim]`.
            actions: `[B, action_dim]` or `[S, B, action_dim]`, in learner units.
            rng: Whose randomness to use; learners give theirs.

        Returns:
            `next_obs [.., B, obs_dim]`, `rewards [.., B]` where they are learned, and
            `disagreement [.., B]`, the deviation of the members' means averaged over outputs.
        """
        x, alone = self._inputs(obs, actions)
        rng = rng or self.sampling_rng
        everyone = self.members()(x.unsqueeze(1))
        slots = Assignment.draw(rng, x.shape[1], self.num_elites).slot
        whom = Assignment(slots, slots, self.elites.gather(1, slots), self.num_ensembles)
        drawn = sample_gaussian(whom.pick(everyone), rng)
        result = {
            "next_obs": self.next_obs(x[..., : self.obs_dim], drawn),
            "disagreement": mean_disagreement(everyone.mean),
        }
        if self.learn_reward:
            result["rewards"] = drawn[..., -1]
        return {name: value[0] for name, value in result.items()} if alone else result

    def _inputs(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, bool]:
        """Return `[S, B, I]`, and whether the seed axis was left out."""
        alone = obs.ndim == 2 and self.num_seeds == 1
        lead = obs.shape[:-1] if not alone else (1, obs.shape[0])
        fits = len(lead) == 2 and lead[0] == self.num_seeds and obs.shape[-1] == self.obs_dim
        if not fits or actions.shape != (*obs.shape[:-1], self.action_dim):
            raise SpecMismatch(
                f"the dynamics ensemble takes obs [{self.num_seeds}, B, {self.obs_dim}] and "
                f"actions [{self.num_seeds}, B, {self.action_dim}] (the first axis may be left out "
                f"for one seed), got {tuple(obs.shape)} and {tuple(actions.shape)}"
            )
        return torch.cat((obs, actions), -1).view(*lead, -1), alone


_SAVED = (
    *("obs_dim", "action_dim", "hidden_sizes", "num_ensembles", "num_elites", "num_seeds"),
    *("learn_logvar_bounds", "learn_terminations", "learn_reward"),
    *("angles", "hidden", "no_delta", "weight_decay"),
)
"""What the constructor needs to build the ensemble of a file again."""


def _chosen(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Members `index` `[S, E]` of `[S, M, ...]`."""
    if index is None:
        return tensor
    seeds = torch.arange(tensor.shape[0], device=tensor.device).unsqueeze(1)
    return tensor[seeds, index]


def _check_sizes(obs_dim: int, action_dim: int, members: int, elites: int | None) -> None:
    if min(obs_dim, action_dim, members) < 1:
        raise ConfigError(
            "obs_dim, action_dim and num_ensembles of the dynamics ensemble must be >= 1, got "
            f"{obs_dim}, {action_dim} and {members}"
        )
    if elites is not None and not 1 <= elites <= members:
        raise ConfigError(
            f"num_elites must be between 1 and num_ensembles = {members}, got {elites}"
        )


def _check_entries(
    obs_dim: int, process: ObsProcess | None, named: dict[str, Sequence[int]]
) -> None:
    for name, entries in named.items():
        wrong = [entry for entry in entries if not 0 <= entry < obs_dim]
        if wrong:
            raise ConfigError(
                f"{name} of the dynamics ensemble must be entries of the observation, 0 to "
                f"{obs_dim - 1}, got {wrong[0]}"
            )
    if process is not None and (named["angles"] or named["hidden"]):
        raise ConfigError("the dynamics ensemble takes obs_process, or angles and hidden, not both")
