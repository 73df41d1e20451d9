"""Template of off-policy actor-critics: critic, then actor, then multipliers, then targets.

Hooks return losses `[S]` and metrics; only `step` and `improve` below move optimizers, so the order
of an update is written once.  The policy may move once in several updates of the critics
(`actor_delay`); its metrics are then those of its last step, zero before the first.
Shapes: S seeds, N critics, B batch, A action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import (
    StepOutput,
    TransitionLearner,
    frozen_copy,
    polyak_update,
    weighted_mean,
)
from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.own_encoders import OwnEncoder, encoder_of, own_encoder
from rl_training.algorithms.pixel_config import built_in, features_encoder, reads_parts
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.encoders import EncoderName
from rl_training.models.layers import ActivationName, WeightsName
from rl_training.rng import Rng
from rl_training.state import Stateful
from rl_training.validation import Fraction, PositiveFloat, PositiveInt, Sizes

Loss = tuple[Tensor, dict[str, Tensor]]
WITH_ACTOR, CRITICS_ONLY = 0, 1
"""Phases of an update."""


class ActorCriticConfig(AlgoConfig):
    """Settings of every off-policy actor-critic but the learning rate of its critics."""

    varying: ClassVar[frozenset[str]] = frozenset({"actor_learning_rate", "tau"})

    hidden_sizes: Sizes = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    actor_hidden_sizes: Sizes | None = None
    """Widths of the actor's hidden layers; null uses `hidden_sizes`."""
    critic_hidden_sizes: Sizes | None = None
    """Widths of the hidden layers of critics and state values; null uses `hidden_sizes`."""
    activation: ActivationName = "relu"
    """What follows each hidden layer of actor and critics."""
    encoder: EncoderName | OwnEncoder | None = None
    """Convolutions for images, a set for each network: `nature`, `impala`, `small`, or null, chosen
    by their size; or `module:function`, which makes each network's features."""
    features_dim: PositiveInt | None = 50
    """Width of the layer after the convolutions of each network; null has none."""
    share_encoder: bool = False
    """Let the actor read the features of the critics' encoder, which the critics' loss alone trains
    (Yarats et al., 2021), in place of an encoder of its own."""
    actor_learning_rate: PositiveFloat | None = None
    """Learning rate of the actor, and of a learned temperature; null uses that of the critics."""
    tau: Fraction = 0.005
    """Share of the critics that moves into their targets at each update; 1 copies them."""
    num_critics: PositiveInt = 2
    """Members of the critic ensemble; targets use their minimum."""
    use_layer_norm: bool = False
    """Normalise the critics' hidden layers."""
    weight_init: WeightsName = "uniform"
    """How initial weights are drawn: `uniform` is PyTorch's own, `orthogonal` that of many JAX
    codes, `glorot` that of SAC's authors; the last two have zero biases."""
    max_grad_norm: PositiveFloat | None = None
    """Clip each network's gradient to this norm, per seed; null does not."""


class LastMetrics(Stateful):
    """The metrics of the last actor step, `[S]` each; part of the checkpoint."""

    def __init__(self, names: tuple[str, ...], num_seeds: int, device: torch.device) -> None:
        self._names = names
        for name in names:
            setattr(self, name, torch.zeros(num_seeds, device=device))

    def keep(self, metrics: Mapping[str, Tensor]) -> None:
        """Take the metrics of an actor step, tensors `[S]` or `[S, B]`."""
        with torch.no_grad():
            for name in self._names:
                value = metrics[name]
                getattr(self, name).copy_(value if value.ndim == 1 else value.mean(1))

    def read(self) -> dict[str, Tensor]:
        """Return copies, which later steps do not change."""
        return {name: getattr(self, name).clone() for name in self._names}


class ActorCritic(TransitionLearner):
    """Critic regression to a target, then policy improvement against the critics."""

    config: ActorCriticConfig
    critic_rate: ClassVar[str] = "learning_rate"
    """Name of the setting that holds the critics' learning rate."""
    actor_metrics: ClassVar[tuple[str, ...]] = ()
    """What `improve` measures, where the actor does not move at every update."""
    has_target_critic: ClassVar[bool] = True
    """Whether targets come from a slower copy of the critics."""
    model: Any  # networks `actor` and `critic`, `q_values`, `action_dim`

    def setup(self) -> None:
        """Create target critics and one optimizer per network."""
        config = self.config
        if self.has_target_critic:
            self.target_critic = frozen_copy(self.model.critic)
            self.target_parameters = list(self.target_critic.parameters())
        self.critic_optimizer = self.network_optimizer(
            self.model.critic.parameters(), self.critic_rate, max_grad_norm=config.max_grad_norm
        )
        self.actor_optimizer = self.network_optimizer(
            self.model.actor.parameters(), self.actor_rate, max_grad_norm=config.max_grad_norm
        )
        if self.actor_metrics:
            self.last = LastMetrics(self.actor_metrics, self.num_seeds, self.device)

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the policy."""
        return 1

    def moves_actor(self) -> bool:
        """Whether the next update, or the one in progress, moves the policy."""
        return (self.num_updates.value + 1) % self.actor_delay == 0

    def phase(self) -> int:
        """Tell whether the next update moves the policy."""
        return WITH_ACTOR if self.moves_actor() else CRITICS_ONLY

    @property
    def actor_rate(self) -> str:
        """Name of the setting that holds the actor's learning rate."""
        own = self.config.actor_learning_rate is not None
        return "actor_learning_rate" if own else self.critic_rate

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do one update of critics, actor, multipliers and targets."""
        critic_loss, critic_metrics, td_error = self.regress(batch)
        self.critic_optimizer.minimize(critic_loss)
        actor_metrics = self.improve(batch, critic_metrics)
        self.update_targets()
        metrics = {"critic_loss": critic_loss} | critic_metrics | actor_metrics
        return StepOutput(metrics, priority=td_error)

    def regress(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the critics' loss `[S]` against their target, metrics, the TD error `[S, B]`."""
        with torch.no_grad():
            target, target_metrics = self.td_target(batch)  # [S, B]
        loss, metrics, td_error = self.critic_loss(batch, target)
        return loss, target_metrics | metrics, td_error

    def improve(self, batch: TransitionBatch, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move actor and multipliers when it is their turn; returns their metrics.

        Args:
            batch: Transitions.
            measured: Metrics of the critics.
        """
        if not self.moves_actor():
            return self.last.read()
        actor_loss, actor_metrics = self.actor_loss(batch)
        self.actor_optimizer.minimize(actor_loss)
        multiplier_metrics = self.update_multipliers(measured | actor_metrics)
        metrics = {"actor_loss": actor_loss} | actor_metrics | multiplier_metrics
        if not self.actor_metrics:
            return metrics
        self.last.keep(metrics)
        return self.last.read()

    def update_targets(self) -> None:
        """Move the target critics, where there are any."""
        if not self.has_target_critic:
            return
        tau = self.setting("tau")
        polyak_update(self.target_parameters, self.critic_optimizer.parameters, tau)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Return the regression target `[S, B]` and metrics."""
        raise NotImplementedError

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Mean squared error of every critic, summed over critics; also the TD error `[S, B]`."""
        q = self.model.q_values(batch.obs, batch.action)  # [S, N, B]
        loss, td_error = self.squared_error(q, batch, target)
        return loss, {}, td_error

    def squared_error(
        self, q: Tensor, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the regression loss `[S]` of given Q `[S, N, B]`, and the TD error `[S, B]`."""
        error = q - target.unsqueeze(1)
        weight = None if batch.weight is None else batch.weight.unsqueeze(1)
        loss = weighted_mean(error.square(), weight).sum(1)
        return loss, error.detach().abs().mean(1)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """Return the policy's loss `[S]` and metrics."""
        raise NotImplementedError

    def update_multipliers(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Move temperatures and the like by what the losses measured; returns metrics."""
        return {}

    def random_action(self, num_envs: int, allowed: Tensor | None = None) -> Tensor:
        """Draw actions uniformly, continuous ones from [-1, 1]^A."""
        if self.model.discrete:
            return self.random_choice(self.model.action_dim, num_envs, allowed)
        return self.rng.uniform(num_envs, self.model.action_dim) * 2 - 1


def networks_of(model_class: type[nn.Module], *more: str) -> Callable[..., dict[str, nn.Module]]:
    """Return the function that builds a learner's `model` for a task and its settings.

    Args:
        model_class: Takes what every actor-critic's networks take.
        *more: Names of settings that it takes besides.
    """

    def networks(env: EnvSpec, config: ActorCriticConfig, rng: Rng) -> dict[str, nn.Module]:
        encoder = _encoder_of_each(env, config)
        if config.share_encoder and encoder is None:
            raise ConfigError(
                f"algo_kwargs.share_encoder is true, but {env.env_id} gives vectors, which no "
                "encoder reads; set it to false"
            )
        model = model_class(
            env.obs_dim,
            env.action_dim,
            config.hidden_sizes,
            actor_hidden_sizes=config.actor_hidden_sizes,
            critic_hidden_sizes=config.critic_hidden_sizes,
            activation=config.activation,
            num_critics=config.num_critics,
            use_layer_norm=config.use_layer_norm,
            weight_init=config.weight_init,
            encoder=encoder,
            share_encoder=config.share_encoder,
            rng=rng,
            **{setting: getattr(config, setting) for setting in more},
        )
        return {"model": model}

    return networks


def _encoder_of_each(env: EnvSpec, config: ActorCriticConfig) -> Callable[[Rng], nn.Module] | None:
    """Return what builds the encoder of one network; None where its layers read vectors."""
    own = encoder_of(config)
    if own is not None:
        return partial(own_encoder, env, own)
    if len(env.obs_shape) == 1 and not reads_parts(env):
        return None
    sizes = () if config.features_dim is None else (config.features_dim,)
    return partial(features_encoder, env, built_in(config.encoder), sizes)
