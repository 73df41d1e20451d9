"""What every learner has in common: building from keywords, one `update`, `act`, and a found state.

A learner is mathematics.  It knows no environment, file, logger or loop, and `update` never reads a
number back from the device.  Shapes: S seeds, B batch, n environments per seed, A action.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.config import AlgoConfig, PartT, combined, part_of
from rl_training.algorithms.optim import (
    Adam,
    Optimizer,
    learning_rate_factor,
    make_optimizer,
    seed_view,
)
from rl_training.algorithms.sources import RolloutSettings, RolloutStatistics
from rl_training.data.batch import RolloutBatch, RolloutRows, SequenceBatch, TransitionBatch
from rl_training.data.datasets.config import DatasetSettings
from rl_training.data.normalizer import DiscountedReturns, ReturnScale, RunningNorm
from rl_training.data.random_shift import random_shift
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.heads import uniform_allowed
from rl_training.models.memory import Recurrent
from rl_training.models.rows import as_floats, is_number
from rl_training.observations import ObservationSpec
from rl_training.rng import Rng
from rl_training.state import Counter, PerSeed, Stateful, require_found, transient
from rl_training.validation import Settings, parse

BatchT = TypeVar("BatchT", TransitionBatch, RolloutBatch, SequenceBatch)


class Metrics(Mapping[str, float]):
    """Named results of an update: tensors `[S]` or `[S, B]` inside, their mean when read.

    Reading synchronises with the device, and only reading does; loops use `tensors`.  Means over a
    batch are left to whoever reads, who does many at once.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {
            name: tensor.detach() if tensor.requires_grad else tensor
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> float:
        return float(self.tensors[name].float().mean())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"


@dataclass(slots=True, kw_only=True)
class UpdateResult:
    """What one call of `update` did."""

    metrics: Metrics
    num_gradient_steps: int = 1
    priority: Tensor | None = None
    """New priorities of the sampled rows `[S, B]`; the loop hands them to the replay buffer."""


@dataclass(slots=True)
class StepOutput:
    """What an algorithm's `step` returns; metrics are tensors `[S]` or `[S, B]`."""

    metrics: dict[str, Tensor]
    priority: Tensor | None = None
    beliefs: Tensor | None = None
    """What a learner with a memory believed after each observation of its batch, `[S, B, T, F]`."""
    num_gradient_steps: int = 1


class ActingState(Stateful):
    """What acting remembers of the episodes in progress: tensors `[S, n, ...]`, 0 at their start.

    An `Rng` among the attributes is carried on across episodes.
    """

    def begin_episodes(self, starts: Tensor) -> None:
        """Forget the episode before in environments that are at a start, `starts` `[S, n]`."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.masked_fill_(seed_env_view(starts, value.ndim), 0)

    def draw_from(self, rng: Rng) -> None:
        """Take the randomness of what follows from `rng` in place of the state's own."""
        for name, value in vars(self).items():
            if isinstance(value, Rng):
                setattr(self, name, rng)


class Remembered(ActingState):
    """What a recurrent layer remembers of the episodes in progress, `[S, n, M]`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class ActingPart(NamedTuple):
    """A function that acting spends its time in; it changes nothing and draws nothing."""

    call: Callable[..., Any]
    examples: Callable[[], tuple[Any, ...]]
    """Arguments of the shapes that it will have."""


class Learner(Stateful, Generic[BatchT]):
    """Base class of algorithms.

    A subclass names its networks in `network_names`, creates targets and optimizers in `setup`, and
    implements `step` (one update) and `choose` (an action).  It has no constructor of its own.
    """

    config_class: ClassVar[type[Settings]]
    """The method's own settings."""
    parts: ClassVar[tuple[type[Settings], ...]] = ()
    """Settings of its parts: where its data comes from, its encoder, its model."""
    config: AlgoConfig
    network_names: ClassVar[tuple[str, ...]] = ("model",)
    batch_class: ClassVar[Any] = TransitionBatch
    """What it learns from: `TransitionBatch`, `RolloutBatch` or `SequenceBatch`."""
    needs_next_action: ClassVar[bool] = False
    """Whether batches of a dataset hold the action that the data took next; offline only."""

    def __init__(
        self,
        *,
        config: AlgoConfig | None = None,
        seeds: Sequence[int] = (0,),
        varied: Mapping[str, Sequence[float]] | None = None,
        **keywords: Any,
    ) -> None:
        """Build the learner.

        Args:
            config: The typed settings; alternatively give its fields as keywords.
            seeds: Seeds of the learner's own randomness, one per member of the group.
            varied: Settings that differ between members, with one value for each; `config` then
                holds those of the first.
            **keywords: The networks of `network_names`, and fields of the config.

        Raises:
            ConfigError: For a missing network, an unknown field or a value out of range.
        """
        for name in self.network_names:
            network = keywords.pop(name, None)
            if not isinstance(network, nn.Module):
                raise ConfigError(
                    f"{type(self).__name__}({name}=...) must be a torch module, got {network!r}"
                )
            setattr(self, name, network)
        self.config = config if config is not None else parse(self.settings_class(), keywords)
        if config is not None and keywords:
            raise ConfigError(f"give either config or its fields, not both: {sorted(keywords)}")
        first = getattr(self, self.network_names[0])
        parameter = next(first.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.seeds, self.num_seeds = tuple(seeds), len(seeds)
        self._vary(varied or {})
        self.rng = Rng(seeds, "learner", self.device)
        self.num_updates = Counter()
        self.progress = 0.0
        self.rate_factor = 1.0
        """What the run multiplies learning rates by, beside their schedule."""
        self._scheduled_factor = math.nan  # what the optimizers have now; not yet any
        self.setup_inputs()
        self.setup()
        require_found(self)
        self.set_progress(0.0)

    # What an algorithm provides

    def setup(self) -> None:
        """Create target networks, optimizers and multipliers."""
        raise NotImplementedError

    def step(self, batch: BatchT) -> StepOutput:
        """Do one update: tensor operations and choices by `phase`, so that it can be compiled.

        Observations are as the networks see them.
        """
        raise NotImplementedError

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions for `obs` `[S, n, ...]` as the networks see them; a method's own part."""
        raise NotImplementedError

    def phase(self) -> int:
        """Which kind of update the next one is, where not all are alike (targets, delayed actors).

        A function of `num_updates`; each value is compiled by itself.
        """
        return 0

    @property
    def needs_return_to_go(self) -> bool:
        """Whether batches of a dataset, and of experience beside one, hold returns-to-go."""
        return False

    def see_task(self, env: EnvSpec, env_kwargs: Mapping[str, Any], may_import: bool) -> None:
        """Take what is known of the task but shapes; `may_import` lets it import named modules."""

    def begin_round(self, buffer: ReplayBuffer) -> None:
        """Take statistics of the replay before a round of updates."""

    # What is common

    @classmethod
    def settings_class(cls) -> type[AlgoConfig]:
        """Return the class of all settings, the method's own and those of its parts."""
        return combined(cls.config_class, cls.parts)

    def part(self, kind: type[PartT]) -> PartT:
        """Return the settings as one of `parts`."""
        return part_of(self.config, kind)

    def as_batch(self, batch: BatchT | Mapping[str, Tensor]) -> BatchT:
        """Return a mapping of tensors as a batch of the learner's kind."""
        if not isinstance(batch, Mapping):
            return batch
        converted: BatchT = self.batch_class.from_mapping(
            batch, gamma=self.config.gamma, num_seeds=self.num_seeds
        )
        return converted

    def learn(self, batch: BatchT) -> StepOutput:
        """Do one update on a batch as it was drawn; eager and compiled runs both execute this."""
        return self.step(self.normalized(self.shifted(batch)))

    def update(
        self,
        batch: BatchT | Mapping[str, Tensor],
        *,
        global_step: int | None = None,  # noqa: ARG002 - part of the public contract
    ) -> UpdateResult:
        """Learn from a batch, or from a mapping with `obs, actions, rewards, next_obs, dones`."""
        output = self.learn(self.as_batch(batch))
        self.num_updates.value += 1
        return UpdateResult(
            metrics=Metrics(output.metrics),
            num_gradient_steps=output.num_gradient_steps,
            priority=output.priority,
        )

    # Images shifted at random, observations standardised by the statistics of a dataset, or of all
    # that was seen so far, and rewards scaled by those of the return, where the settings ask for it

    def setup_inputs(self) -> None:
        """Create the statistics: mean 0 and variance 1 until data is seen."""
        self.obs_parts = _parts_read_by(getattr(self, self.network_names[0]))
        """What rows of observations hold, where the networks take them apart."""
        self.masks_actions = self.obs_parts is not None and self.obs_parts.mask_size > 0
        """Whether observations end with the mask of allowed actions."""
        if self.obs_parts is not None:
            self._is_number = transient(is_number(self.obs_parts, self.device))
        self.random_shift: int = getattr(self.config, "random_shift", 0)
        """Largest shift of the images of batches in pixels."""
        self.normalizes = observations_are_normalized(self.config)
        """Whether the networks see standardised observations."""
        from_data = isinstance(self.config, DatasetSettings)
        if from_data:
            self.obs_norm = self.statistics(torch.float32)
        elif self.normalizes:
            self.obs_norm = self.statistics(torch.float64)
        self.counts_observations = self.normalizes and not from_data
        """Whether every step moves the statistics of observations."""
        # Of recorded data, this setting has been followed when the data was opened.
        scales = getattr(self.config, "normalize_rewards", False) and not from_data
        self.scales_rewards: bool = scales
        """Whether the statistics of the return scale the rewards of batches."""
        if scales:
            self.return_norm = self.return_statistics()

    def statistics(self, dtype: torch.dtype) -> RunningNorm:
        """Create statistics of observations."""
        obs_dim: int = getattr(self, self.network_names[0]).obs_dim
        return RunningNorm(self.num_seeds, (obs_dim,), self.device, dtype)

    def return_statistics(self) -> ReturnScale:
        """Create the statistics of the return that scale rewards."""
        return ReturnScale(self.num_seeds, self.device)

    def initial_returns(self, num_envs: int) -> DiscountedReturns | None:
        """Return what the loop must remember to scale rewards; None where it need not."""
        if not self.scales_rewards:
            return None
        return DiscountedReturns(self.num_seeds, num_envs, self.device)

    def see_step(
        self, obs: Tensor, reward: Tensor, ended: Tensor, returns: DiscountedReturns | None
    ) -> None:
        """Take a step of the environments into the running statistics.

        Args:
            obs: What was acted on, `[S, n, ...]`.
            reward: What came of it, to learn from, `[S, n]`.
            ended: Where episodes terminated or were truncated, `[S, n]`.
            returns: From `initial_returns`; moved on in place.
        """
        if self.counts_observations:
            self.obs_norm.update(self.as_floats(obs))
        if returns is not None:
            returns.add(reward, ended, self.config.gamma, self.return_norm)

    def see_data(self, buffer: ReplayBuffer) -> None:
        """Take mean and variance of a dataset's observations, once per run, before learning."""
        if self.normalizes:
            for rows, weight in buffer.observation_blocks():
                shown = rows.expand(self.num_seeds, -1, -1)
                self.obs_norm.update(self.as_floats(shown).float(), weight)

    def as_floats(self, obs: Tensor) -> Tensor:
        """Return observations in the form that is standardised: rows of bytes as their numbers."""
        return obs if self.obs_parts is None else as_floats(self.obs_parts, obs)

    def allowed(self, obs: Tensor) -> Tensor | None:
        """Tell which actions a task allows in `obs` `[S, B, ...]`: bool `[S, B, A]`.

        None where it allows all everywhere.  Standardising observations leaves the mask as it is.
        """
        if not self.masks_actions:
            return None
        assert self.obs_parts is not None
        mask: Tensor = self.obs_parts.allowed(obs)
        return mask

    def normalize(self, obs: Tensor) -> Tensor:
        """Standardise observations `[S, B, ...]` when asked to; of several parts, the numbers."""
        if not self.normalizes:
            return obs
        if self.obs_parts is None:
            return self.obs_norm(obs)
        floats = self.as_floats(obs)
        return torch.where(self._is_number.value, self.obs_norm(floats), floats)

    def scaled(self, reward: Tensor) -> Tensor:
        """Scale rewards `[S, ...]` by the deviation of the return when asked to."""
        return self.return_norm(reward) if self.scales_rewards else reward

    def shifted(self, batch: BatchT) -> BatchT:
        """Shift the images of a batch when asked to, those of s and of s' by draws of their own."""
        pad, parts = self.random_shift, self.obs_parts
        if not pad:
            return batch
        assert isinstance(batch, TransitionBatch)
        return replace(
            batch,
            obs=random_shift(batch.obs, pad, self.rng, parts),
            next_obs=random_shift(batch.next_obs, pad, self.rng, parts),
        )

    def normalized(self, batch: BatchT) -> BatchT:
        """Standardise the observations and scale the rewards of a batch when asked to.

        By the statistics of now: a replay keeps what was seen, so that a row means the same
        whenever it is drawn.  A return over n steps is scaled, and clipped, as one reward.
        """
        if not (self.normalizes or self.scales_rewards):
            return batch
        assert not isinstance(batch, SequenceBatch)
        return replace(
            batch,
            obs=self.normalize(batch.obs),
            next_obs=self.normalize(batch.next_obs),
            reward=self.scaled(batch.reward),
        )

    # Acting

    def act(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions for `obs` `[S, n, ...]` in learner units (continuous ones in [-1, 1]).

        With a memory, as at the start of episodes.
        """
        return self.choose(self.shown(None, obs), explore=explore)

    @property
    def memory_network(self) -> Recurrent | None:
        """The network by whose memory the policy acts; None where it has none."""
        return None

    def initial_acting_state(self, num_envs: int) -> ActingState | None:
        """Return what acting must remember between steps; None where that is nothing.

        Whoever acts owns it: training, evaluation and prediction each have their own.
        """
        network = self.memory_network
        if network is None:
            return None
        return Remembered(network.memory.initial(num_envs, self.device))

    def exploring_state(self, num_envs: int) -> ActingState | None:
        """Return what acting in training must remember, where exploring remembers more."""
        return self.initial_acting_state(num_envs)

    def shown(self, state: ActingState | None, obs: Tensor) -> Tensor:
        """Return what `choose` reads: standardised observations `[S, n, ...]`.

        With a memory it is what the network remembers after them, and the mask of actions where
        there is one; `state` is moved on by this step, in place, and None is an empty one.
        """
        shown, network = self.normalize(obs), self.memory_network
        if network is None:
            return shown
        if state is None:
            state = Remembered(network.memory.initial(obs.shape[1], self.device))
        assert isinstance(state, Remembered)
        with torch.no_grad():
            state.memory.copy_(network.remember(shown, state.memory))
        rows = network.memory.output(state.memory)
        mask = self.mask_of(shown)
        return rows if mask is None else torch.cat((rows, mask), -1)

    def mask_of(self, obs: Tensor) -> Tensor | None:
        """Return the mask of actions in `obs` `[..., W]` as numbers; None without one."""
        allowed = self.allowed(obs)
        return None if allowed is None else allowed.float()

    def act_from(self, state: ActingState | None, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions like `act`, and move `state` on by this step, in place."""
        return self.choose(self.shown(state, obs), explore=explore)

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:
        """Draw actions from the policy that was learned, and move `state` on by this step.

        Exploring may add randomness to learn from, which is not part of that policy; a method that
        does so overrides this.
        """
        return self.act_from(state, obs, explore=True)

    def follow(self, state: ActingState | None, obs: Tensor, action: Tensor) -> None:  # noqa: ARG002
        """Move `state` on by a step from `obs` in which somebody else chose `action`, in place."""
        if state is not None:
            self.shown(state, obs)

    def draw_action(self, obs: Tensor) -> Tensor:
        """Draw actions like `sample_from` for `obs` `[S, n, ...]`, as at the start of episodes."""
        state = self.initial_acting_state(obs.shape[1])
        if state is not None:
            state.draw_from(self.rng)  # its own would draw the same numbers in every call
        return self.sample_from(state, obs)

    @contextmanager
    def drawing_from(self, rng: Rng) -> Iterator[None]:
        """Draw from another generator within; the learner's own stays where it is."""
        own, self.rng = self.rng, rng
        try:
            yield
        finally:
            self.rng = own

    def acting_parts(self, num_envs: int) -> dict[str, ActingPart]:  # noqa: ARG002
        """Return what of acting is to be compiled, by name; nothing means acting as a whole."""
        return {}

    def use_programs(self, programs: Mapping[str, Callable[..., Any]], num_envs: int) -> None:
        """Use programs of `acting_parts` for so many environments from now on."""

    def acting_flops(self, num_envs: int) -> float:  # noqa: ARG002
        """Multiplications of one call of `act_from`, where it costs more than an update."""
        return 0.0

    @property
    def serial_steps(self) -> int:
        """Steps of an update that follow one another, such as those of a sequence; most take one.

        By it a run on an accelerator, where each launches its own kernels, tells how long an eager
        update takes.
        """
        return 1

    def random_action(self, num_envs: int, allowed: Tensor | None = None) -> Tensor:
        """Draw uniformly random actions `[S, n, ...]` in learner units.

        Args:
            num_envs: n.
            allowed: Which actions are allowed, `[S, n, A]`; None where all are.
        """
        raise NotImplementedError

    def random_choice(self, num_actions: int, num_envs: int, allowed: Tensor | None) -> Tensor:
        """Draw one of so many actions for each environment `[S, n]`; arguments as above."""
        if allowed is not None:
            return uniform_allowed(self.rng.uniform(num_envs), allowed)
        drawn: Tensor = self.rng.integers(num_actions, num_envs)
        return drawn

    # Settings and schedules

    def _vary(self, varied: Mapping[str, Sequence[float]]) -> None:
        allowed = self.settings_class().may_vary()
        for name, values in varied.items():
            if name not in allowed or len(values) != self.num_seeds:
                raise ConfigError(
                    f"varied {name} = {list(values)}: must be one of {', '.join(allowed)} with "
                    f"{self.num_seeds} values, one per member"
                )
        self.varied = {name: PerSeed(values, self.device) for name, values in varied.items()}
        if varied:
            first = {name: values[0] for name, values in varied.items()}
            self.config = type(self.config)(**dict(self.config) | first)

    def setting(self, name: str, ndim: int = 1) -> float | Tensor:
        """Return a number of the config, or, where it varies, a tensor `[S, 1, ...]`.

        Args:
            name: One of `settings_class().may_vary()`.
            ndim: Axes of the tensors it is combined with: 1 for `[S]`, 2 for `[S, B]`.
        """
        if name in self.varied:
            return seed_view(self.varied[name].tensor, ndim)
        number: float = getattr(self.config, name)
        return number

    def network_optimizer(
        self,
        parameters: Iterable[Tensor],
        rate: str = "learning_rate",
        *,
        eps: str = "adam_epsilon",
        max_grad_norm: float | None = None,
        weight_decay: Mapping[Tensor, float] | None = None,
        adaptive_clip: float | None = None,
        warmup: int = 0,
    ) -> Optimizer:
        """Create the chosen optimizer for networks, with the setting `rate` as learning rate.

        Args:
            parameters: Of the networks.
            rate: Name of the setting that holds the learning rate.
            eps: Name of the setting that holds epsilon, where the optimizer is given none.
            max_grad_norm: Clip each seed's gradient to this norm.
            weight_decay: Decay of single parameters, in place of the optimizer's own.
            adaptive_clip: Clip the gradient of each tensor to this share of the tensor's norm.
            warmup: Steps over which the learning rate grows from 0.
        """
        return make_optimizer(
            self.config.optimizer,
            parameters,
            self.rate(rate),
            eps=getattr(self.config, eps),
            max_grad_norm=max_grad_norm,
            weight_decay=weight_decay,
            adaptive_clip=adaptive_clip,
            warmup=warmup,
        )

    def adam(self, parameters: Iterable[Tensor], rate: str = "learning_rate") -> Adam:
        """Create what moves single numbers, such as a temperature, by the setting `rate`."""
        return Adam(parameters, self.rate(rate), eps=self.config.adam_epsilon)

    def rate(self, name: str) -> float | PerSeed:
        """Return the setting `name` as an optimizer's learning rate, per seed where it varies."""
        number: float | PerSeed = self.varied.get(name) or getattr(self.config, name)
        return number

    def set_progress(self, progress: float) -> None:
        """Move every schedule to `progress`, the share of the planned run that is done."""
        self.progress = min(max(progress, 0.0), 1.0)
        factor = self.rate_factor * learning_rate_factor(self.config.lr_schedule, self.progress)
        if factor != self._scheduled_factor:
            self._scheduled_factor = factor
            for optimizer in self.optimizers():
                optimizer.rate.set(optimizer.base_learning_rate * factor)

    def schedule_values(self, index: int = 0) -> dict[str, float]:
        """Return what the schedules give a member at the current progress, for the log."""
        rates = [optimizer.rate_of(index) for optimizer in self.optimizers()]
        return {"learning_rate": rates[0]} if rates else {}

    @property
    def belief_size(self) -> int:
        """F: entries of what is believed after a step, which a replay may keep; 0 is nothing."""
        return 0

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers, found among the attributes."""
        return [value for value in vars(self).values() if isinstance(value, Optimizer)]


AnyLearner: TypeAlias = Learner[Any]


TransitionLearner: TypeAlias = Learner[TransitionBatch]
"""A learner that learns from single transitions, whatever their order."""


class OnPolicyLearner(Learner[RolloutBatch]):
    """A learner that learns from rollouts of its own current policy."""

    batch_class = RolloutBatch
    compiled: ClassVar[tuple[str, ...]] = ("minibatch_step",)
    """Methods that `step` calls many times and that are compiled, each with its first arguments."""

    def setup_inputs(self) -> None:
        """Create the statistics; with `RolloutStatistics` those of observations move by rollouts.

        A policy is then one throughout its own rollout.
        """
        super().setup_inputs()
        if isinstance(self.config, RolloutStatistics):
            self.counts_observations = False

    def normalized(self, batch: RolloutBatch) -> RolloutBatch:
        """Leave a rollout to a method that standardises what it computes of one."""
        return batch if isinstance(self.config, RolloutStatistics) else super().normalized(batch)

    def see_rollout(self, batch: RolloutBatch) -> None:
        """Move the statistics of observations by a rollout that was learned from."""
        if self.normalizes:
            self.obs_norm.update(self.as_floats(batch.obs.flatten(1, 2)))

    @property
    def rollout_steps(self) -> int:
        """Steps of each environment per rollout."""
        return self.part(RolloutSettings).num_steps

    @property
    def row_steps(self) -> int:
        """Steps in a row of what `epochs` goes through: more than one where rows are sequences."""
        return 1

    def gradient_steps(self, rows: int) -> tuple[int, int]:
        """Return how many gradient steps an update on `rows` rows takes, and of how many rows."""
        settings = self.part(RolloutSettings)
        size = min(settings.minibatch_size // self.row_steps, rows)
        return settings.update_epochs * (rows // size), size

    def epochs(
        self, data: RolloutRows, again: Callable[[], RolloutRows] | None = None
    ) -> tuple[dict[str, Tensor], int]:
        """Step through all rows several times, in an order drawn for each epoch and seed.

        Args:
            data: The rows.
            again: Makes them again before every epoch but the first; None keeps them.

        Returns:
            The means of the metrics of `minibatch_step`, and the number of gradient steps.
        """
        total = data.action.shape[1]
        size = self.gradient_steps(total)[1]
        active = torch.ones(self.num_seeds, dtype=torch.bool, device=self.device)
        steps = []
        for epoch in range(self.part(RolloutSettings).update_epochs):
            if epoch and again is not None:
                data = again()
            shuffled = data.rows(self.rng.permutation(total))
            for start in range(0, total - size + 1, size):
                metrics, active = self.minibatch_step(shuffled.slice(start, start + size), active)
                steps.append(metrics)
        means = {name: torch.stack([step[name] for step in steps]).mean(0) for name in steps[0]}
        return means, len(steps)

    def draw_noise(self, num_steps: int, num_envs: int) -> Tensor:
        """Draw the randomness of a whole rollout at once, `[S, T, n, ...]`."""
        raise NotImplementedError

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Sample an action from the policy, given the noise of one step `[S, n, ...]`."""
        raise NotImplementedError

    def initial_acting_state(self, num_envs: int) -> Remembered | None:
        """Return the memory before an episode; None where the policy has none."""
        state = super().initial_acting_state(num_envs)
        assert state is None or isinstance(state, Remembered)
        return state

    def sample_on(self, state: Remembered, obs: Tensor, noise: Tensor) -> Tensor:
        """Sample like `sample`, and move on in place what acting remembers."""
        raise NotImplementedError

    def minibatch_step(self, batch: Any, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step for the `active` seeds; returns metrics and who still is."""
        raise NotImplementedError


def replay_step(learner: AnyLearner, replay: ReplayBuffer, rows: int) -> StepOutput:
    """Draw a batch of `rows` per seed, learn from it, and send priorities or beliefs back.

    Eager and compiled runs execute this same function; `runtime/compile` only decides who does.
    """
    return learn_from(learner, replay, replay.sample(rows))


def learn_from(learner: AnyLearner, replay: ReplayBuffer, batch: Any) -> StepOutput:
    """Learn from a batch that was drawn from a replay, and send priorities or beliefs back."""
    output = learner.learn(batch)
    if batch.index is not None and output.priority is not None:
        replay.update_priorities(batch.index, output.priority)
    if batch.index is not None and output.beliefs is not None:
        replay.keep_beliefs(batch.index, output.beliefs)
    return output


def _parts_read_by(network: nn.Module) -> ObservationSpec | None:
    """Return what rows hold that an encoder of the network takes apart; None without one."""
    parts = (getattr(module, "parts", None) for module in network.modules())
    return next((part for part in parts if isinstance(part, ObservationSpec)), None)


def observations_are_normalized(config: Settings) -> bool:
    """Whether settings ask for standardised observations, by either name."""
    names = ("normalize_observations", "normalize_obs")
    return any(getattr(config, name, False) for name in names)


def seed_env_view(values: Tensor, ndim: int) -> Tensor:
    """View `[S, n]` as `[S, n, 1, ...]` with `ndim` axes."""
    return values.view(*values.shape, *[1] * (ndim - 2))


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Bootstrapped return `r + discount * V(s')`; `discount` is zero at terminations only."""
    return torch.addcmul(reward, discount, next_value)


def weighted_mean(loss: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over the last axis, with importance weights when there are any."""
    return (loss if weight is None else loss * weight).mean(-1)


def add_weighted(loss: Tensor, term: Tensor, weight: float | Tensor) -> Tensor:
    """Return `loss + weight * term`, all `[S]`; the weight is a number or one per seed."""
    if isinstance(weight, Tensor):
        return torch.addcmul(loss, weight, term)
    return torch.add(loss, term, alpha=weight)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy that takes no gradients, for target networks."""
    return copy.deepcopy(module).requires_grad_(False)


def polyak_update(target: Sequence[Tensor], source: Sequence[Tensor], tau: float | Tensor) -> None:
    """Move `target` towards `source`: target <- (1 - tau) target + tau source; tau may be `[S]`."""
    with torch.no_grad():
        if not isinstance(tau, Tensor):
            torch._foreach_lerp_(list(target), list(source), tau)
            return
        for old, new in zip(target, source, strict=True):
            old.lerp_(new, seed_view(tau, old.ndim))
