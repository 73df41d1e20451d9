"""Proximal Policy Optimization (Schulman et al., 2017, arXiv:1707.06347).

Several epochs of minibatch ascent on the clipped surrogate (Eq. 7), with generalised advantages and
a value regression on the same rollout.

Deviations: time limits bootstrap; old log densities and values are computed in one pass over the
    finished rollout, by the parameters that gathered it; the KL stop freezes a seed's parameters
    for the rest of the update instead of leaving the loop, so that nothing is read back from the
    device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import OnPolicyLearner, StepOutput, add_weighted
from rl_training.algorithms.config import AlgoConfig, LRSchedule, part_of
from rl_training.algorithms.losses import gae, ppo_policy_loss, ppo_value_loss
from rl_training.algorithms.optim import learning_rate_factor
from rl_training.algorithms.pixel_config import PixelConfig, shared_encoder
from rl_training.algorithms.sources import RolloutSettings, RolloutStatistics
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import RolloutBatch, RolloutRows
from rl_training.envs.spec import EnvSpec
from rl_training.models.layers import ActivationName
from rl_training.models.mlp_actor_critic import ActorCriticModel
from rl_training.rng import Rng
from rl_training.state import Scalar
from rl_training.validation import (
    Fraction,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    Settings,
    Sizes,
)


class PPOConfig(RolloutStatistics, AlgoConfig):
    """Settings of PPO."""

    varying: ClassVar[frozenset[str]] = frozenset(
        {"learning_rate", "clip_coef", "ent_coef", "vf_coef"}
    )

    hidden_sizes: Sizes = (64, 64)
    """Widths of the hidden layers of policy and value network for vectors, which share none."""
    actor_hidden_sizes: Sizes | None = None
    """Widths of the policy's own hidden layers; null uses `hidden_sizes`, or, after the features of
    an image, `head_hidden_sizes`."""
    critic_hidden_sizes: Sizes | None = None
    """The same for the value network."""
    activation: ActivationName | None = None
    """What follows each hidden layer; null is tanh for vectors and relu for images, whose
    convolutions always have relu."""
    learning_rate: PositiveFloat = 3e-4
    """Learning rate."""
    adam_epsilon: PositiveFloat = 1e-5
    """What Adam adds to the root of the mean squared gradient; as in the authors' code."""
    clip_coef: PositiveFloat = 0.2
    """Half width of the interval the probability ratio is clipped to."""
    ent_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    vf_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    gae_lambda: Fraction = 0.95
    """0 gives one-step advantages, 1 Monte-Carlo ones."""
    clip_value: PositiveFloat | None = None
    """Clip the change of the value prediction to this; null does not."""
    clip_schedule: LRSchedule = Field(default=LRSchedule())
    """Schedule of `clip_coef` and `clip_value`, a factor on both."""
    normalize_advantage: bool = True
    """Standardise advantages in each minibatch."""
    recompute_advantages: bool = False
    """Compute values and advantages again before each epoch (Andrychowicz et al., 2020), with
    the current value network; false keeps those of the first."""
    normalize_obs: bool = False
    """The older name of `normalize_observations`; both work."""
    target_kl: PositiveFloat | None = None
    """Freeze the networks for the rest of an update once the KL divergence exceeds this."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Clip the gradient to this norm, per seed; null does not."""
    initial_log_std: Number = 0.0
    """Start of the Gaussian policy's log standard deviation."""


@dataclass(frozen=True)
class Minibatch(RolloutRows):
    """Rows of a rollout with what was computed once for all epochs, `[S, B, ...]`."""

    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor


class PPO(OnPolicyLearner):
    """Clipped policy-gradient with minibatch epochs."""

    config_class: ClassVar[type[Settings]] = PPOConfig
    parts: ClassVar[tuple[type[Settings], ...]] = (PixelConfig, RolloutSettings)
    config: PPOConfig
    model: ActorCriticModel

    def setup(self) -> None:
        """Create the optimizer."""
        self.optimizer = self.network_optimizer(
            self.model.parameters(), max_grad_norm=self.config.max_grad_norm
        )
        # A constant clip costs no multiplication, and its program has it as a number.
        schedule = self.config.clip_schedule
        self.clip_factor = None if schedule == LRSchedule() else Scalar(1.0, self.device)

    def set_progress(self, progress: float) -> None:
        """Move the learning rate and the clip."""
        super().set_progress(progress)
        if self.clip_factor is not None:
            self.clip_factor.set(learning_rate_factor(self.config.clip_schedule, self.progress))

    def schedule_values(self, index: int = 0) -> dict[str, float]:
        """Return the learning rate, and the clip where it has a schedule."""
        values = super().schedule_values(index)
        if self.clip_factor is None:
            return values
        varied = self.varied.get("clip_coef")
        base = self.config.clip_coef if varied is None else varied.values[index]
        return values | {"clip_coef": base * self.clip_factor.value}

    def scheduled(self, clip: float | Tensor) -> float | Tensor:
        """Return a clip as its schedule has it now."""
        return clip if self.clip_factor is None else clip * self.clip_factor.tensor

    def setup_inputs(self) -> None:
        """Create the statistics, also where they are not used: checkpoints have always had them."""
        super().setup_inputs()
        self.obs_norm = self.statistics(torch.float32)

    def step(self, batch: RolloutBatch) -> StepOutput:
        """Do several epochs of minibatch steps on a rollout."""
        data = self.prepare(batch)

        def prepared_again() -> Minibatch:
            return replace(self.prepare(batch), log_prob=data.log_prob)

        again = prepared_again if self.config.recompute_advantages else None
        summary, steps = self.epochs(data, again)
        self.see_rollout(batch)
        summary["explained_variance"] = explained_variance(
            data.value.flatten(1), data.target.flatten(1)
        )
        return StepOutput(summary, num_gradient_steps=steps)

    @torch.no_grad()
    def prepare(self, batch: RolloutBatch) -> Minibatch:
        """Compute old log densities, values, advantages and value targets of a rollout."""
        obs = self.normalize(batch.obs.flatten(1, 2))  # [S, T * n, ...]
        next_obs = self.normalize(batch.next_obs.flatten(1, 2))
        action = batch.action.flatten(1, 2)
        features = self.model.embed(obs)
        log_prob, _ = self.model.log_prob_entropy(features, action, self.allowed(obs))
        value = self.model.value(features)
        next_value = self.model.value(self.model.embed(next_obs))
        advantage = self.advantages(batch, value, next_value)
        return Minibatch(obs, action, log_prob, value, advantage, advantage + value)

    def advantages(self, batch: RolloutBatch, value: Tensor, next_value: Tensor) -> Tensor:
        """Generalised advantages of a rollout, and of values like them, `[S, T * n]`."""
        return gae(
            self.scaled(batch.reward),
            value.view_as(batch.reward),
            next_value.view_as(batch.reward),
            batch.terminated,
            batch.truncated,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        ).flatten(1, 2)

    def loss(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective (Eq. 9) of a minibatch, `[S]`, and its parts."""
        return self.objective(self.model.embed(batch.obs), batch)

    def objective(self, features: Tensor, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate + value error - entropy bonus (Eq. 9), `[S]`, and its parts.

        Args:
            features: What policy and value read, `[S, B, E]`.
            batch: The rest of the rows.
        """
        config = self.config
        allowed = self.allowed(batch.obs)
        log_prob, entropy = self.model.log_prob_entropy(features, batch.action, allowed)
        value = self.model.value(features)
        advantage = batch.advantage
        if config.normalize_advantage and advantage.shape[1] > 1:
            std, mean = torch.std_mean(advantage, 1, keepdim=True)
            advantage = (advantage - mean) / (std + 1e-8)
        log_ratio = log_prob - batch.log_prob
        clip_coef = self.scheduled(self.setting("clip_coef", ndim=2))
        clip_value = None if config.clip_value is None else self.scheduled(config.clip_value)
        policy_loss = ppo_policy_loss(log_ratio.exp(), advantage, clip_coef).mean(1)
        value_loss = ppo_value_loss(value, batch.value, batch.target, clip_value).mean(1)
        loss = add_weighted(policy_loss, value_loss, self.setting("vf_coef"))
        mean_entropy, ent_coef = entropy.mean(1), self.setting("ent_coef")
        if isinstance(ent_coef, Tensor) or ent_coef > 0:
            loss = add_weighted(loss, mean_entropy, -ent_coef)
        change = log_ratio.detach()
        clipped = (change.exp() - 1).abs() > clip_coef
        return loss, {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": mean_entropy.detach(),
            "approx_kl": approx_kl(change),
            "clip_fraction": clipped.float().mean(1),
        }

    def minibatch_step(self, batch: Minibatch, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step for the seeds that are still `active`."""
        loss, metrics = self.loss(batch)
        if self.config.target_kl is None:
            self.optimizer.minimize(loss)
        else:
            active = active & (metrics["approx_kl"] <= self.config.target_kl)
            self.optimizer.minimize(loss, active)
        return metrics, active

    def draw_noise(self, num_steps: int, num_envs: int) -> Tensor:
        """Draw the randomness of a whole rollout at once, `[S, T, n, A]`."""
        return self.model.draw_noise(self.rng, num_steps, num_envs)

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Sample an action from the policy, given noise `[S, n, A]`."""
        shown = self.normalize(obs)
        return self.model.sample(self.model.embed(shown), noise, self.allowed(shown))

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take its mode."""
        if explore:
            noise = self.draw_noise(1, obs.shape[1])[:, 0]
            return self.model.sample(self.model.embed(obs), noise, self.allowed(obs))
        return self.model.mode(self.model.embed(obs), self.allowed(obs))


def ppo_loss(learner: PPO, batch: RolloutBatch) -> dict[str, Tensor]:
    """Compute PPO's losses and metrics over a whole rollout without changing the parameters."""
    return learner.loss(learner.prepare(batch))[1]


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Estimate the KL divergence from the old policy, `[S]`.

    The mean of r - 1 - log r is unbiased and never negative, unlike that of -log r.
    """
    return (log_ratio.exp() - 1 - log_ratio).mean(1)


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Share of the targets' variance the values explain, `[S]`; 1 is perfect, 0 is a constant."""
    spread = target.var(1, correction=0).clamp(min=1e-8)
    return 1 - (target - value).var(1, correction=0) / spread


class NetworkOptions(TypedDict):
    """What settings and task say about the networks, by the names of `ActorCriticModel`."""

    hidden_sizes: Sizes
    critic_hidden_sizes: Sizes
    discrete: bool
    action_sizes: tuple[int, ...]
    activation: ActivationName
    initial_log_std: float


def network_options(env: EnvSpec, config: PPOConfig) -> NetworkOptions:
    """Return what settings and task say about the networks."""
    images = len(env.obs_shape) > 1
    sizes, activation = config.hidden_sizes, config.activation or "tanh"
    if images:
        activation = config.activation or "relu"
        sizes = part_of(config, PixelConfig).head_hidden_sizes
    actor_sizes, critic_sizes = config.actor_hidden_sizes, config.critic_hidden_sizes
    return NetworkOptions(
        hidden_sizes=sizes if actor_sizes is None else actor_sizes,
        critic_hidden_sizes=sizes if critic_sizes is None else critic_sizes,
        discrete=env.actions_are_counted,
        action_sizes=env.action_sizes,
        activation=activation,
        initial_log_std=config.initial_log_std,
    )


def ppo_networks(env: EnvSpec, config: PPOConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the networks for a task."""
    options = network_options(env, config)
    encoder = shared_encoder(env, config, rng, options["activation"])
    model = ActorCriticModel(encoder, env.obs_dim, env.action_dim, rng=rng, **options)
    return {"model": model}


SPEC = AlgorithmSpec(
    name="ppo",
    title="Proximal Policy Optimization",
    paper="arXiv:1707.06347",
    summary="on-policy; clipped surrogate; discrete and continuous actions",
    learner=PPO,
    networks=ppo_networks,
    loop=Loop.ON_POLICY,
    action_kinds=("discrete", "continuous", "multi_discrete"),
    obs_ndims=(1, 3),
    metrics={
        "loss": "whole objective",
        "policy_loss": "clipped surrogate",
        "value_loss": "half squared error of the value",
        "entropy": "policy entropy",
        "approx_kl": "estimated KL divergence from the rollout's policy",
        "clip_fraction": "share of ratios outside the clip interval",
        "explained_variance": "share of the return's variance that the value explains",
    },
)
