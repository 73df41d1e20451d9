"""What a learner with a discriminator of (s, a) does with it: its loss, its step, its reward.

D(s, a) = sigmoid(logit) is the probability of "expert", so the optimal logit is
log rho_expert(s, a) - log rho_policy(s, a).
Shapes: S seeds, B batch, R rows, E features, I inputs, A actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.gail.config import GAILConfig
from rl_training.algorithms.gail.losses import (
    discriminator_loss,
    imitation_reward,
    interpolate,
    penalty_of_norm,
)
from rl_training.algorithms.losses import add_weighted
from rl_training.algorithms.ppo import PPO
from rl_training.data.normalizer import RunningNorm
from rl_training.data.replay.pairs import Pairs
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator

CONDITIONAL_SAMPLES = 8
"""Actions over which the mean logit of a state is taken where there is no sum over all."""


class Discriminating(PPO):
    """An on-policy learner that is paid by a discriminator."""

    config: GAILConfig
    discriminator: MLPGAILDiscriminator

    def setup(self) -> None:
        """Add the discriminator's optimizer and statistics."""
        super().setup()
        self.discriminator_optimizer = self.adam(
            self.discriminator.parameters(),
            "discriminator_learning_rate",
            eps="discriminator_adam_epsilon",
        )
        shape = (self.model.obs_dim,)
        self.discriminator_norm = RunningNorm(self.num_seeds, shape, self.device)
        self.reward_norm = RunningNorm(self.num_seeds, (), self.device)

    def discriminator_step(self, expert: Pairs, policy: Pairs, mix: Tensor) -> dict[str, Tensor]:
        """Take one step on equally many pairs of both sides; `mix` is uniform, `[S, B, 1]`."""
        self.discriminator.refresh()
        # What a compiled program is called with is plain tuples.
        expert, policy = Pairs(*expert), Pairs(*policy)
        shown, made = self.inputs(expert), self.inputs(policy)
        expert_logit, policy_logit = self.logits_of(shown), self.logits_of(made)
        loss = self.loss_of(expert_logit, policy_logit, expert.ended, policy.ended)
        penalty = torch.zeros_like(loss)
        if "gradient_penalty" in self.varied or self.config.gradient_penalty > 0:
            # Features are data here: an encoder shall not flee to where the slope is right.
            between = interpolate(shown.detach(), made.detach(), mix)
            gradient = self.discriminator.input_gradient(between)
            penalty = penalty_of_norm(gradient, self.config.gradient_penalty_norm)
        total = add_weighted(loss, penalty, self.setting("gradient_penalty"))
        self.discriminator_optimizer.minimize(total)
        return {
            "discriminator_loss": loss.detach(),
            "gradient_penalty": penalty.detach(),
            "expert_recognised": (expert_logit[:, : expert.num_rows] > 0).float().mean(1),
            "policy_recognised": (policy_logit[:, : policy.num_rows] < 0).float().mean(1),
        }

    def loss_of(
        self, expert: Tensor, policy: Tensor, expert_ended: Tensor, policy_ended: Tensor
    ) -> Tensor:
        """Return the loss `[S]` without penalty, of the logits of both sides."""
        return discriminator_loss(
            expert,
            policy,
            self.absorbing_weights(expert_ended),
            self.absorbing_weights(policy_ended),
            self.config.label_smoothing,
        )

    @property
    def standardizes(self) -> bool:
        """Whether the discriminator sees standardised observations; images never are."""
        return self.config.normalize_discriminator_obs and self.discriminator.encoder is None

    def features(self, obs: Tensor) -> Tensor:
        """Return what the discriminator sees of observations, `[S, B, E]`."""
        return self.discriminator.embed(self.discriminator_norm(obs) if self.standardizes else obs)

    def inputs(self, pairs: Pairs) -> Tensor:
        """Return what the discriminator's MLP is given of pairs, `[S, B, I]`."""
        return self.discriminator.inputs(self.features(pairs.obs), pairs.action)

    def logits(self, pairs: Pairs) -> Tensor:
        """Return the logits of pairs, followed by that of the absorbing state if there is one."""
        return self.logits_of(self.inputs(pairs))

    def logits_of(self, rows: Tensor) -> Tensor:
        """Return the logits of inputs `[S, B, I]`, and that of the absorbing state."""
        if self.config.absorbing_states:
            rows = torch.cat([rows, self.discriminator.absorbing_input()], 1)
        return self.discriminator.forward(rows)

    @property
    def absorbing_steps(self) -> float:
        """Discounted steps after a termination, sum of gamma^k over k >= 1."""
        return self.config.gamma / (1 - self.config.gamma)

    def absorbing_weights(self, ended: Tensor) -> Tensor | None:
        """Weights `[S, B + 1]`: 1 per pair, and the steps that terminations `[S, B]` lead to."""
        if not self.config.absorbing_states:
            return None
        after = self.absorbing_steps * ended.sum(1, keepdim=True)
        return torch.cat([torch.ones_like(ended), after], 1)

    @torch.no_grad()
    def reward(self, pairs: Pairs) -> Tensor:
        """Return the reward of pairs, `[S, R]`, by the discriminator alone.

        With absorbing states, a termination is also paid for all that comes after it (Section 4.1
        of arXiv:1809.02925): r + sum_k gamma^k r_absorbing.
        """
        features = self.features(pairs.obs)
        logits = self.logits_of(self.discriminator.inputs(features, pairs.action))
        rewards = imitation_reward(logits, self.config.reward_form)
        own = rewards[:, : pairs.num_rows]
        if self.config.reward_form == "conditional":
            own = own - self.expected_logit(pairs, features)
        if self.config.normalize_reward:
            self.reward_norm.update(own)
            scale = self.reward_norm.divisor()
            own, rewards = own / scale, rewards / scale
        if self.config.absorbing_states:
            own = own + pairs.ended * self.absorbing_steps * rewards[:, -1:]
        return own

    def expected_logit(self, pairs: Pairs, features: Tensor) -> Tensor:
        """Return E_{a ~ pi(.|s)}[logit(s, a)], `[S, R]`: a sum where actions are discrete.

        Args:
            pairs: Whose states they are.
            features: What the discriminator sees of them, `[S, R, E]`.
        """
        join = self.discriminator.inputs
        embedding = self.model.embed(self.normalize(pairs.obs))
        if self.model.discrete:
            total = torch.zeros_like(pairs.ended)
            for action in range(self.model.action_dim):
                same = torch.full_like(pairs.action, action)
                chance = self.model.log_prob_entropy(embedding, same)[0].exp()
                total = total + chance * self.logits_of(join(features, same))
            return total
        noise = self.model.draw_noise(self.rng, CONDITIONAL_SAMPLES, pairs.num_rows)
        drawn = [self.model.sample(embedding, part) for part in noise.unbind(1)]
        logits = [self.logits_of(join(features, action)) for action in drawn]
        return torch.stack(logits).mean(0)
