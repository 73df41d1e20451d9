"""Dreamer (Hafner et al., 2023, arXiv:2301.04104; with the latents of the first, 1912.01603).

A recurrent state-space model learns to predict observations, rewards and ends of episodes from
sequences of experience.  Policy and value learn in imagined continuations of every state that was
seen.
Shapes: S seeds, n environments, B sequences, T steps, N = B T starts, H horizon, A action,
F features, K bins, D deterministic, Z stochastic.

Networks, sizes, losses and optimizer are those of the authors' code of 2024.  Their one optimizer
is three of the same learning rate here: LaProp is element-wise and clips tensor by tensor.

Deviations, with reasons in docs/algorithms/dreamer.md: beliefs that sequences begin with come from
    learning, not from acting; the policy over discrete actions has the paper's uniform share;
    whether the start of an imagined path is terminal is known; reward and value begin with
    improbable far bins; states are float32, products may be bf16; random actions come first;
    the default size is 12m; the warm-up begins
    one step further; a stretch of new steps has one less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import (
    ActingState,
    Learner,
    StepOutput,
    add_weighted,
    frozen_copy,
    polyak_update,
)
from rl_training.algorithms.dreamer.config import DreamerConfig
from rl_training.algorithms.dreamer.losses import (
    PercentileRange,
    actor_loss,
    continue_loss,
    kl_terms,
    lambda_return,
    path_weights,
)
from rl_training.algorithms.optim import (
    Optimizer,
    learning_rate_factor,
    minimize_together,
    seed_view,
)
from rl_training.algorithms.pixel_config import reads_parts
from rl_training.algorithms.sources import SequenceReplay
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop, Phase
from rl_training.data.batch import SequenceBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.dreamer import (
    DreamerActor,
    DreamerCritic,
    WorldModel,
    follow_policy,
)
from rl_training.models.rssm import RSSMSequence, RSSMState
from rl_training.rng import Rng
from rl_training.state import Scalar


class DreamerState(ActingState):
    """Of each environment: the belief about where it is, and the last action."""

    def __init__(self, rng: Rng, num_envs: int, deter: int, latent: int, action: int) -> None:
        """Begin with nothing known.

        Args:
            rng: Source of latents and actions; a part of this state.
            num_envs: n.
            deter: D.
            latent: Z.
            action: A.
        """
        self.rng = rng
        lead = (rng.num_seeds, num_envs)
        self.deter = torch.zeros(*lead, deter, device=rng.device)
        self.latent = torch.zeros(*lead, latent, device=rng.device)
        self.action = torch.zeros(*lead, action, device=rng.device)

    @property
    def belief(self) -> RSSMState:
        """The state of the world model."""
        return RSSMState(self.deter, self.latent)

    def advance(self, belief: RSSMState, action: Tensor) -> None:
        """Take the belief and the action of this step."""
        self.deter.copy_(belief.deter)
        self.latent.copy_(belief.latent)
        self.action.copy_(action)


def encode_action(action: Tensor, actor: DreamerActor) -> Tensor:
    """Return actions as the networks see them, `[..., A]`: discrete ones as one-hot vectors."""
    if not actor.discrete:
        return action
    numbers = torch.arange(actor.action_dim, device=action.device)
    return (action.unsqueeze(-1) == numbers).to(torch.float32)


@dataclass(frozen=True)
class Dream:
    """Imagined continuations of N states: H + 1 states each, H actions between them."""

    features: Tensor
    """`[S, H + 1, N, F]`."""
    action: Tensor
    """`[S, H, N, A]`, as the policy drew them."""
    reward: Tensor
    """Of arriving at each state, `[S, H + 1, N]`."""
    continues: Tensor
    """What the head for continuation says of each state, `[S, H + 1, N]`; known for the first."""


@torch.no_grad()
def imagine(
    model: WorldModel,
    actor: DreamerActor,
    start: RSSMState,
    terminated: Tensor,
    *,
    horizon: int,
    rng: Rng,
) -> Dream:
    """Follow the policy from states `[S, B, T, ...]`; no gradient flows through the steps.

    Args:
        model: The world.
        actor: The policy.
        start: Where to begin.
        terminated: Whether these states are terminal, `[S, B, T]`.
        horizon: H.
        rng: Source of actions and latents.
    """
    first = RSSMState(start.deter.flatten(1, 2), start.latent.flatten(1, 2))
    rows = first.deter.shape[1]
    acting = actor.draw_noise(rng, horizon, rows)
    latent = model.rssm.latent.draw_noise(rng, horizon, rows)
    path = follow_policy(model.rssm, actor, first, acting, latent)
    later = torch.cat(path.states, -1)  # [H, S, N, F]
    every = torch.cat((first.features.unsqueeze(0), later)).transpose(0, 1)  # [S, H + 1, N, F]
    flat, shape = every.flatten(1, 2), every.shape[:3]
    known = 1 - terminated.flatten(1).unsqueeze(1).to(every.dtype)
    continues = torch.cat((known, model.continuation(flat).view(shape)[:, 1:]), 1)
    action = path.outputs[0].transpose(0, 1)
    return Dream(every, action, model.reward(flat).view(shape), continues)


class Dreamer(Learner[SequenceBatch]):
    """A world model, and an actor-critic that learns inside it and acts on what it believes."""

    config_class = DreamerConfig
    parts = (SequenceReplay,)
    config: DreamerConfig
    network_names: ClassVar[tuple[str, ...]] = ("world_model", "actor", "critic")
    batch_class = SequenceBatch
    world_model: WorldModel
    actor: DreamerActor
    critic: DreamerCritic

    def setup(self) -> None:
        """Create optimizers, the averaged critic and the range of returns."""
        config = self.config

        def optimizer(network: nn.Module, rate: str) -> Optimizer:
            return self.network_optimizer(
                network.parameters(),
                rate,
                adaptive_clip=config.adaptive_clip,
                warmup=config.warmup_updates,
            )

        self.world_model_optimizer = optimizer(self.world_model, "world_model_learning_rate")
        self.actor_optimizer = optimizer(self.actor, "actor_learning_rate")
        self.critic_optimizer = optimizer(self.critic, "critic_learning_rate")
        self.target_critic = frozen_copy(self.critic)
        self.return_range = PercentileRange(
            self.num_seeds, self.device, rate=config.return_range_rate
        )
        self.entropy_factor = Scalar(1.0, self.device)

    @property
    def belief_size(self) -> int:
        """F: the features of a state."""
        return self.world_model.feature_dim

    @property
    def serial_steps(self) -> int:
        """Those of a sequence, then those that are imagined."""
        return self.part(SequenceReplay).batch_length + self.config.imagination_horizon

    def set_progress(self, progress: float) -> None:
        """Move every schedule, that of the entropy too."""
        super().set_progress(progress)
        schedule = self.config.entropy_coef_schedule
        self.entropy_factor.set(learning_rate_factor(schedule, self.progress))

    def step(self, batch: SequenceBatch) -> StepOutput:
        """Take one gradient step of all networks."""
        action = encode_action(batch.action, self.actor)
        start = None if batch.start is None else self.world_model.rssm.state_of(batch.start)
        observed = self.world_model.observe(batch.obs, action, batch.is_first, self.rng, start)
        model_loss, metrics = self.model_loss(batch, observed)
        dream = imagine(
            self.world_model,
            self.actor,
            observed.state.detach(),
            batch.terminated,
            horizon=self.config.imagination_horizon,
            rng=self.rng,
        )
        policy_loss, value_loss, returns, behaviour = self.behaviour_losses(dream)
        replay_loss, replay_return = self.replay_value_loss(batch, observed.state.features, returns)
        loss = add_weighted(model_loss, replay_loss, self.config.replay_value_scale)
        minimize_together(
            loss + policy_loss + value_loss,
            (self.world_model_optimizer, self.actor_optimizer, self.critic_optimizer),
        )
        rate = self.config.target_critic_rate
        polyak_update(list(self.target_critic.parameters()), list(self.critic.parameters()), rate)
        metrics |= behaviour | {
            "replay_value_loss": replay_loss.detach(),
            "replay_return": replay_return,
        }
        return StepOutput(metrics, beliefs=observed.state.features.detach())

    def model_loss(
        self, batch: SequenceBatch, observed: RSSMSequence
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the world model `[S]`, and what it is made of.

        Squared error of pixels or symlogs, cross-entropies of reward and end, and the two halves of
        the divergence between posterior and prior.
        """
        model, config = self.world_model, self.config
        features = observed.state.features.flatten(1, 2)  # [S, N, F]
        obs = model.decoder.loss(model.decoder(features), batch.obs.flatten(1, 2)).mean(1)
        logits = model.reward_head(features)
        reward = model.reward_bins.loss(logits, batch.reward.flatten(1)).mean(1)
        ends = model.continue_head(features).squeeze(-1)
        discount = config.gamma if config.discounted_continuation else 1.0
        continues = continue_loss(ends, batch.terminated.flatten(1), discount).mean(1)
        kl = model.rssm.latent.kl
        dynamics, representation = (
            term.mean((1, 2))
            for term in kl_terms(kl, observed.posterior, observed.prior, config.free_nats)
        )
        loss = obs + reward + continues
        loss = add_weighted(loss, dynamics, config.dynamics_scale)
        loss = add_weighted(loss, representation, config.representation_scale)
        with torch.no_grad():
            divergence = kl(observed.posterior, observed.prior).mean((1, 2))
        parts = {"model_loss": loss, "obs_loss": obs, "reward_loss": reward}
        parts |= {"continue_loss": continues, "kl": divergence, "dynamics_loss": dynamics}
        parts["representation_loss"] = representation
        return loss, {name: value.detach() for name, value in parts.items()}

    def behaviour_losses(self, dream: Dream) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Losses of policy and value `[S]`, returns of the starts `[S, N]`, and metrics."""
        config = self.config
        features = dream.features[:, :-1].flatten(1, 2)
        logits = self.critic(features)  # [S, H N, K]
        # Where the head for continuation says it, the discount is in what it says.
        gamma = 1.0 if config.discounted_continuation else config.gamma
        with torch.no_grad():
            last = self.critic.value(dream.features[:, -1]).unsqueeze(1)
            here = self.critic.bins.mean(logits).view(last.shape[0], -1, last.shape[-1])
            value = torch.cat((here, last), 1)  # [S, H + 1, N]
            discount = gamma * dream.continues
            returns = lambda_return(
                dream.reward.mT, discount.mT, value.mT, config.return_lambda
            ).mT  # [S, H, N]
            weight = path_weights(dream.continues.mT, gamma).mT[:, :-1].flatten(1)
            self.return_range.update(returns.flatten(1))
            advantage = (returns - here) / seed_view(self.return_range.scale(), 3)
        log_prob, entropy = self.actor.log_prob_entropy(features, dream.action.flatten(1, 2))
        bonus = self.setting("entropy_coef", ndim=2) * self.entropy_factor.tensor
        policy = (weight * actor_loss(log_prob, entropy, advantage.flatten(1), bonus)).mean(1)
        critic = (weight * self._value_loss(logits, features, returns.flatten(1))).mean(1)
        metrics = {
            "actor_loss": policy,
            "critic_loss": critic,
            "entropy": entropy.mean(1),
            "value_mean": here.mean((1, 2)),
            "imagined_return": returns[:, 0].mean(1),
            "return_range": self.return_range.scale(),
        }
        return policy, critic, returns[:, 0], {n: v.detach() for n, v in metrics.items()}

    def replay_value_loss(
        self, batch: SequenceBatch, features: Tensor, boot: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Critic loss on returns with real rewards, bootstrapped by imagined ones; and their mean.

        Its gradient reaches the states, so that they hold what the value needs.

        Args:
            batch: The sequences.
            features: Of their states, `[S, B, T, F]`.
            boot: Imagined returns from these, `[S, N]`.
        """
        boot = boot.view(batch.reward.shape)
        discount = self.config.gamma * (1 - batch.terminated.to(boot.dtype))
        follows = 1 - batch.is_first.to(boot.dtype)
        # A state whose successor belongs to another past is the last: returns stop there.
        trace = torch.cat((follows[..., 1:], torch.zeros_like(follows[..., :1])), -1)
        trace = trace * self.config.return_lambda
        returns = lambda_return(batch.reward, discount, boot, trace).flatten(1)  # [S, B (T - 1)]
        weight = follows[..., 1:].flatten(1)
        known = features[:, :, :-1].flatten(1, 2)
        loss = (weight * self._value_loss(self.critic(known), known, returns)).mean(1)
        mean = (weight * returns).sum(1) / weight.sum(1).clamp(min=1)
        return loss, mean

    def _value_loss(self, logits: Tensor, features: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy to returns, and to what the averaged critic predicts, `[S, R]`."""
        bins = self.critic.bins
        with torch.no_grad():
            slow = bins.mean(self.target_critic(features))
        pull = self.config.target_critic_scale * bins.loss(logits, slow)
        return bins.loss(logits, target) + pull

    # Acting: on the belief that the world model has of each environment

    def initial_acting_state(self, num_envs: int) -> DreamerState:
        """Return what is known before an episode: nothing; and the randomness of acting."""
        rng = Rng(self.seeds, "acting", self.device)
        rssm = self.world_model.rssm
        return DreamerState(rng, num_envs, rssm.deter_size, rssm.latent.size, self.actor.action_dim)

    @torch.no_grad()
    def act_from(self, state: ActingState | None, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Take in `obs` `[S, n, ...]` and act on the belief that follows."""
        assert isinstance(state, DreamerState)
        actor, belief = self.actor, self._believe(state, obs)
        features = belief.features
        if explore:
            action = actor.sample(features, actor.draw_noise(state.rng, obs.shape[1]))
        else:
            action = actor.mode(features)
        action = actor.executed(action)
        state.advance(belief, action)
        return action.argmax(-1) if actor.discrete else action

    @torch.no_grad()
    def follow(self, state: ActingState | None, obs: Tensor, action: Tensor) -> None:
        """Take in `obs` `[S, n, ...]` and remember that `action` was taken there."""
        assert isinstance(state, DreamerState)
        state.advance(self._believe(state, obs), encode_action(action, self.actor))

    def _believe(self, state: DreamerState, obs: Tensor) -> RSSMState:
        """Return the belief after `obs` `[S, n, ...]`."""
        model = self.world_model
        noise = model.rssm.latent.draw_noise(state.rng, obs.shape[1])
        return model.rssm.observe_step(state.belief, state.action, model.encoder(obs), noise)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Act on `obs` `[S, n, ...]` as at the start of an episode."""
        return self.act_from(self.initial_acting_state(obs.shape[1]), obs, explore=explore)

    def random_action(
        self,
        num_envs: int,
        allowed: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Draw uniformly random actions."""
        if self.actor.discrete:
            return self.rng.integers(self.actor.action_dim, num_envs)
        return self.rng.uniform(num_envs, self.actor.action_dim) * 2 - 1


def dreamer_networks(env: EnvSpec, config: DreamerConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the networks for a task."""
    size = config.widths()
    model = WorldModel(
        env.obs_shape,
        env.action_dim,
        size,
        obs_scale=1 / 255 if env.obs_dtype == "uint8" else 1.0,
        parts=env.observation if reads_parts(env) else None,
        latents=config.latents,
        num_bins=config.num_bins,
        rng=rng,
    )
    discrete = env.action_kind == "discrete"
    return {
        "world_model": model,
        "actor": DreamerActor(model.feature_dim, env.action_dim, size, discrete=discrete, rng=rng),
        "critic": DreamerCritic(model.feature_dim, size, num_bins=config.num_bins, rng=rng),
    }


SPEC = AlgorithmSpec(
    name="dreamer",
    title="Dreamer",
    paper="arXiv:2301.04104",
    summary="world model; actor-critic in imagination; images and vectors, all actions",
    learner=Dreamer,
    networks=dreamer_networks,
    loop=Loop.OFF_POLICY,
    phases=(Phase.WORLD_MODEL_HEALTH,),
    leaf_kinds=(*VECTOR_LEAVES, "index", "image"),
    action_kinds=("discrete", "continuous"),
    obs_ndims=(1, 3),
    metrics={
        "model_loss": "whole loss of the world model",
        "obs_loss": "squared error of predicted observations, summed over an observation",
        "reward_loss": "cross-entropy of the reward",
        "continue_loss": "cross-entropy of the end of episodes",
        "kl": "divergence of posterior and prior in nats",
        "dynamics_loss": "the same with free nats, which teaches the prior",
        "representation_loss": "the same with free nats, which teaches the posterior",
        "actor_loss": "REINFORCE with entropy bonus, in imagination",
        "critic_loss": "cross-entropy to imagined returns and to the averaged critic",
        "replay_value_loss": "the same for returns with real rewards",
        "entropy": "policy entropy in imagination",
        "value_mean": "mean value of imagined states",
        "imagined_return": "mean imagined return of states from the replay",
        "replay_return": "mean return of the same states with real rewards",
        "return_range": "distance of the 5th and the 95th percentile of returns, at least 1",
    },
)
