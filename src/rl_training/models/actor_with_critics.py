"""Networks of off-policy actor-critics: an actor and critics beside it.

`MLPSACModel` has the tanh-Gaussian policy of the soft family, whose density is here too,
`SmoothSACModel` the same with another bound of the deviation,
`MLPDiscreteSACModel` a categorical one and critics of all actions, `MLPTQCModel` critics that tell
quantiles, `MLPCrossQModel` batch renormalisation, `MLPTD3Model` a deterministic policy,
`MLPIQLModel` a Gaussian and a state value, `MLPDiscreteIQLModel` a categorical one beside it,
`MLPFQLModel` one that maps noise to actions, and the flow that it is distilled from.
Shapes: S seeds, N critics, B batch, A action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.batch_renorm import RenormedMLP
from rl_training.models.heads import (
    LOG_2,
    LOG_SQRT_2PI,
    categorical_log_prob_entropy,
    gaussian_log_prob,
    gumbel_sample,
    only_allowed,
)
from rl_training.models.layers import ActivationName, StackedMLP, WeightsName
from rl_training.models.own_encoder import EncodedMLP, LentEncoder
from rl_training.rng import Rng


class ActorWithCritics(nn.Module):
    """Actor on observations and critics `(obs, action) -> Q`, for S seeds.

    A subclass says how many numbers its policy needs per action dimension and what they mean.
    """

    outputs_per_action: ClassVar[int] = 1
    noise_per_action: ClassVar[int] = 0
    """Numbers of noise that the actor reads beside an observation, per action dimension."""
    discrete: ClassVar[bool] = False
    """Whether critics tell Q of every action, in place of one that they read."""
    normalizes_actor: ClassVar[bool] = False
    """Whether `use_layer_norm` is for the actor too."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        actor_hidden_sizes: Sequence[int] | None = None,
        critic_hidden_sizes: Sequence[int] | None = None,
        activation: ActivationName = "relu",
        num_critics: int = 2,
        use_layer_norm: bool = False,
        weight_init: WeightsName = "uniform",
        encoder: Callable[[Rng], Any] | None = None,
        share_encoder: bool = False,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            actor_hidden_sizes: Those of the actor; None is `hidden_sizes`.
            critic_hidden_sizes: Those of every network that tells values; None is `hidden_sizes`.
            activation: What follows each hidden layer.
            num_critics: Members of the critic ensemble, N.
            use_layer_norm: Normalise the critics' hidden layers, and of a class that says so the
                actor's.
            weight_init: How the weights of every network are drawn.
            encoder: Makes what turns observations into features, one for every network.
            share_encoder: Let the actor read the features of the critics' encoder.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        self._make_encoder = encoder
        self.activation: ActivationName = activation
        self._weights: WeightsName = weight_init
        self._actor_norm = use_layer_norm and self.normalizes_actor
        actor_sizes = hidden_sizes if actor_hidden_sizes is None else actor_hidden_sizes
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        if not share_encoder:
            self.actor = self._actor(actor_sizes, rng)
        self.critic = self.network(
            (*critic_sizes, self.outputs_per_critic),
            rng,
            beside=0 if self.discrete else action_dim,
            members=(num_critics,),
            layer_norm=use_layer_norm,
        )
        if share_encoder:
            self._make_encoder = lambda _: LentEncoder(self.critic.encoder)
            self.actor = self._actor(actor_sizes, rng)
            self._make_encoder = encoder
        self.build_more(actor_sizes, critic_sizes, rng)

    def _actor(self, sizes: Sequence[int], rng: Rng) -> Any:
        return self.network(
            (*sizes, self.outputs_per_action * self.action_dim),
            rng,
            beside=self.noise_per_action * self.action_dim,
            layer_norm=self._actor_norm,
        )

    @property
    def outputs_per_critic(self) -> int:
        """Numbers that a critic tells."""
        return self.action_dim if self.discrete else 1

    def stacked(self, sizes: Sequence[int], rng: Rng, **options: Any) -> StackedMLP:
        """Build the layers of a network from inputs, hidden widths and outputs."""
        return StackedMLP(sizes, rng, **options)

    def network(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        beside: int = 0,
        members: tuple[int, ...] = (),
        layer_norm: bool = False,
    ) -> StackedMLP | EncodedMLP:
        """Build a network of observations, or of the features of an encoder of its own.

        Args:
            sizes: Hidden widths, outputs.
            rng: Source of the initial weights.
            beside: Entries of inputs beside an observation.
            members: Axes of members.
            layer_norm: Normalise hidden layers.
        """
        encoder = None if self._make_encoder is None else self._make_encoder(rng)
        inputs = beside + (self.obs_dim if encoder is None else encoder.embedding_dim)
        layers = self.stacked(
            (inputs, *sizes),
            rng,
            members=members,
            activation=self.activation,
            layer_norm=layer_norm,
            weights=self._weights,
        )
        return layers if encoder is None else EncodedMLP(encoder, layers)

    def build_more(self, actor_sizes: Sequence[int], critic_sizes: Sequence[int], rng: Rng) -> None:
        """Build what a subclass has beside actor and critics; values have `critic_sizes`."""

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q of every member `[S, N, B]`, by `critic` (a target) or the model's own.

        Args:
            obs: Observations `[S, B, D]`.
            action: Actions `[S, B, A]`.
            critic: Another ensemble than the model's own.
            members: Which of them to evaluate, a slice or `[S, Z]` for each seed; None is all.
        """
        return read_beside(critic or self.critic, obs, action, members=members).squeeze(-1)


def read_beside(
    network: nn.Module, obs: Tensor, *beside: Tensor, members: Tensor | slice | None = None
) -> Tensor:
    """Apply a network, all or some of its members, to observations and vectors `[S, B, I]`."""
    if isinstance(network, EncodedMLP):
        return network.forward(obs, *beside, members=members)
    x = torch.cat((obs, *beside), -1)
    out: Tensor = network.forward(x) if members is None else network.forward(x, members)
    return out


def tanh_gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Squash a Gaussian sample by tanh.

    The log density subtracts `log(1 - tanh(u)^2)`, written as `2 (log 2 - u - softplus(-2u))`,
    which stays finite for large u (Haarnoja et al., 2018, App. C of arXiv:1801.01290).

    Returns:
        The action in (-1, 1) `[..., A]` and its log density `[...]`.
    """
    pre_tanh = mean + log_std.exp() * noise
    # What does not depend on the sample is taken out of the sum over action dimensions.
    constant = mean.shape[-1] * (LOG_SQRT_2PI + 2 * LOG_2)
    half_log_det = pre_tanh + functional.softplus(-2 * pre_tanh)
    log_prob = (2 * half_log_det - log_std - 0.5 * noise.square()).sum(-1) - constant
    return torch.tanh(pre_tanh), log_prob


def tanh_gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Log density `[...]` of a given action in [-1, 1] under the squashed Gaussian.

    Actions at the bounds have infinite `atanh`; they are moved inside by 1e-6.
    """
    pre_tanh = torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6))
    noise = (pre_tanh - mean) * torch.exp(-log_std)
    log_det = 2 * (LOG_2 - pre_tanh - functional.softplus(-2 * pre_tanh))
    return gaussian_log_prob(noise, log_std) - log_det.sum(-1)


def within(raw: Tensor, low: float, high: float) -> Tensor:
    """Map what a network tells smoothly into a range: 0 into its middle."""
    return low + (high - low) * 0.5 * (1 + torch.tanh(raw))


class MLPSACModel(ActorWithCritics):
    """Policy `obs -> (mean, log_std)` and critics `(obs, action) -> Q`, for S seeds."""

    outputs_per_action = 2
    log_std_range: ClassVar[tuple[float, float]] = (-20.0, 2.0)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation before the tanh, each `[S, B, A]`."""
        mean, log_std = self.actor.forward(obs).chunk(2, -1)
        return mean, log_std.clamp(*self.log_std_range)


class SmoothSACModel(MLPSACModel):
    """`MLPSACModel` whose log deviation goes through a tanh into its range, and is never cut."""

    log_std_range: ClassVar[tuple[float, float]] = (-10.0, 2.0)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation before the tanh, each `[S, B, A]`."""
        mean, raw = self.actor.forward(obs).chunk(2, -1)
        return mean, within(raw, *self.log_std_range)


class MLPDiscreteSACModel(ActorWithCritics):
    """Categorical policy and critics `obs -> Q(., a)`, for S seeds."""

    discrete = True

    def logits(self, obs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the policy's logits `[S, B, A]`; `allowed`, of the same shape, masks actions."""
        return only_allowed(self.actor.forward(obs), allowed)

    def sample(self, obs: Tensor, rng: Rng, allowed: Tensor | None = None) -> Tensor:
        """Draw actions `[S, B]` from the policy."""
        noise = rng.exponential(obs.shape[1], self.action_dim).log()
        return gumbel_sample(self.logits(obs, allowed), noise)

    def all_q_values(
        self, obs: Tensor, critic: nn.Module | None = None, members: Tensor | slice | None = None
    ) -> Tensor:
        """Return Q of every action by every member, `[S, N, B, A]`; arguments as of `q_values`."""
        return read_beside(critic or self.critic, obs, members=members)

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q of actions `[S, B]` by every member `[S, N, B]`; arguments as of the base."""
        q = self.all_q_values(obs, critic, members)
        chosen = action[:, None, :, None].expand(-1, q.shape[1], -1, -1)
        return q.gather(-1, chosen).squeeze(-1)


class MLPTQCModel(MLPSACModel):
    """`MLPSACModel` whose critics tell M quantiles of the return each."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_quantiles: int = 25,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            num_quantiles: M.
            **options: As for `ActorWithCritics`.
        """
        self.num_quantiles = num_quantiles
        super().__init__(obs_dim, action_dim, hidden_sizes, **options)

    @property
    def outputs_per_critic(self) -> int:
        """M."""
        return self.num_quantiles

    def quantiles(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return the quantiles of every member `[S, N, B, M]`; arguments as of `q_values`."""
        return read_beside(critic or self.critic, obs, action, members=members)

    def q_values(
        self,
        obs: Tensor,
        action: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q of every member `[S, N, B]`, the mean of its quantiles."""
        return self.quantiles(obs, action, critic, members).mean(-1)


class MLPCrossQModel(MLPSACModel):
    """`MLPSACModel` with batch renormalisation in actor and critics."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        renorm_momentum: float = 0.99,
        renorm_warmup: int = 100_000,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            renorm_momentum: See `StackedBatchRenorm`.
            renorm_warmup: See `StackedBatchRenorm`.
            **options: As for `ActorWithCritics`.
        """
        self._renorm: dict[str, Any] = {"momentum": renorm_momentum, "warmup": renorm_warmup}
        super().__init__(obs_dim, action_dim, hidden_sizes, **options)

    def stacked(self, sizes: Sequence[int], rng: Rng, **options: Any) -> StackedMLP:
        """Build the layers of a network, with the normalisations."""
        return RenormedMLP(sizes, rng, **self._renorm, **options)


class MLPTD3Model(ActorWithCritics):
    """Policy `obs -> action in (-1, 1)` and critics `(obs, action) -> Q`, for S seeds."""

    def policy(self, obs: Tensor, actor: nn.Module | None = None) -> Tensor:
        """Return the action `[S, B, A]`, by `actor` (a target) or the model's own."""
        return torch.tanh((actor or self.actor).forward(obs))


class MLPIQLModel(ActorWithCritics):
    """Policy, critics `(obs, action) -> Q` and value `obs -> V`, for S seeds."""

    log_std_range: ClassVar[tuple[float, float]] = (-5.0, 2.0)

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        value_layer_norm: bool = False,
        **options: Any,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action, or number of discrete ones.
            hidden_sizes: Widths of the hidden layers of every network that has none of its own.
            value_layer_norm: Normalise the value's hidden layers.
            **options: As for `ActorWithCritics`.
        """
        self._value_layer_norm = value_layer_norm
        super().__init__(obs_dim, action_dim, hidden_sizes, **options)

    def build_more(
        self,
        actor_sizes: Sequence[int],  # noqa: ARG002
        critic_sizes: Sequence[int],
        rng: Rng,
    ) -> None:
        """Build the value, and the deviation of the policy, which does not depend on the state."""
        if not self.discrete:
            deviation = torch.zeros(rng.num_seeds, 1, self.action_dim, device=rng.device)
            self.log_std = nn.Parameter(deviation)
        self.value_net = self.network((*critic_sizes, 1), rng, layer_norm=self._value_layer_norm)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Return what the policy's loss moves."""
        return [*self.actor.parameters(), self.log_std]

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean `[S, B, A]` in (-1, 1) and log standard deviation `[S, 1, A]`."""
        mean = torch.tanh(self.actor.forward(obs))
        return mean, self.log_std.clamp(*self.log_std_range)

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the log density `[S, B]` of actions; the Gaussian itself is not squashed."""
        mean, log_std = self.policy(obs)
        return gaussian_log_prob((action - mean) * torch.exp(-log_std), log_std)

    def value(self, obs: Tensor) -> Tensor:
        """Return V(s), `[S, B]`."""
        return self.value_net.forward(obs).squeeze(-1)


class MLPDiscreteIQLModel(MLPDiscreteSACModel, MLPIQLModel):
    """Categorical policy, critics `obs -> Q(., a)` and value `obs -> V`, for S seeds."""

    def policy_parameters(self) -> list[nn.Parameter]:
        """Return what the policy's loss moves."""
        return list(self.actor.parameters())

    def log_prob(self, obs: Tensor, action: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the log probability `[S, B]` of actions `[S, B]`."""
        return categorical_log_prob_entropy(self.logits(obs, allowed), action)[0]


class MLPFQLModel(ActorWithCritics):
    """One-step policy `(obs, noise) -> action`, the flow that it learns from, and critics."""

    noise_per_action = 1

    def build_more(
        self,
        actor_sizes: Sequence[int],
        critic_sizes: Sequence[int],  # noqa: ARG002
        rng: Rng,
    ) -> None:
        """Build the flow: it reads an action on its way and the time beside an observation."""
        self.flow = self.network((*actor_sizes, self.action_dim), rng, beside=self.action_dim + 1)

    def policy(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Return the one-step policy's action `[S, B, A]` for noise `[S, B, A]`; not clipped."""
        return read_beside(self.actor, obs, noise)

    def velocity(self, obs: Tensor, action: Tensor, time: Tensor) -> Tensor:
        """Return the flow's velocity `[S, B, A]` at `action` `[S, B, A]` and `time` `[S, B, 1]`."""
        return read_beside(self.flow, obs, action, time)

    def flow_action(self, obs: Tensor, noise: Tensor, steps: int) -> Tensor:
        """Follow the flow from noise at time 0 to an action at time 1 by Euler's method; clipped.

        Args:
            obs: Observations `[S, B, D]`.
            noise: Where to start, `[S, B, A]`.
            steps: Steps of equal length.
        """
        action = noise
        for index in range(steps):
            time = noise.new_full((*noise.shape[:-1], 1), index / steps)
            action = action + self.velocity(obs, action, time) / steps
        return action.clamp(-1, 1)
