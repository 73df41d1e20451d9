"""Generative Adversarial Imitation Learning (Ho & Ermon, 2016, arXiv:1606.03476).

A discriminator learns to tell the expert's pairs (s, a) from the policy's, and the policy is
trained on a reward made of its logit; the environment's own reward is never looked at.

Sign: D(s, a) = sigmoid(logit) is the probability of "expert", so the optimal logit is
log rho_expert(s, a) - log rho_policy(s, a) (the paper's D is 1 - D here).

Overrides: setup, step.
Deviations: PPO in place of TRPO; causal entropy is PPO's `ent_coef`; several discriminator steps
    per rollout, on demand over the last rollouts; regularisers and more reward forms, two of them
    as later work has them (arXiv:1704.00028, 1802.05957, 1710.11248, 1809.02925).  Of images the
    discriminator sees features of its own encoder, and the gradient penalty is taken there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import StepOutput, add_weighted
from rl_training.algorithms.bc import action_error
from rl_training.algorithms.gail.config import GAILConfig
from rl_training.algorithms.gail.losses import (
    discriminator_loss,
    imitation_reward,
    interpolate,
    penalty_of_norm,
)
from rl_training.algorithms.optim import Adam
from rl_training.algorithms.pixel_config import PixelConfig, encoder_for, reads_parts
from rl_training.algorithms.ppo import PPO, ppo_networks
from rl_training.algorithms.ppo import SPEC as PPO_SPEC
from rl_training.algorithms.sources import RolloutSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop, Phase
from rl_training.data.batch import RolloutBatch
from rl_training.data.datasets.expert_config import ExpertSettings
from rl_training.data.normalizer import RunningNorm
from rl_training.data.replay.pairs import GeneratorReplay, Pairs
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator
from rl_training.rng import Rng
from rl_training.state import transient

CONDITIONAL_SAMPLES = 8
"""Actions over which the mean logit of a state is taken where they cannot all be summed."""


class GAIL(PPO):
    """PPO on the reward of a discriminator."""

    config_class = GAILConfig
    parts = (ExpertSettings, PixelConfig, RolloutSettings)
    config: GAILConfig
    network_names = ("model", "discriminator")
    compiled = (*PPO.compiled, "discriminator_step")
    discriminator: MLPGAILDiscriminator
    read_only = ("_shown",)
    """Attributes whose tensors learning does not change."""
    _shown: transient[Pairs] | None = None
    """The demonstrations, which are not part of the state: a checkpoint has their digest beside the
    learner, so an agent can be loaded without them."""

    def setup(self) -> None:
        """Add the discriminator's optimizer and statistics, and a replay of what the policy did."""
        super().setup()
        self.discriminator_optimizer = self.network_optimizer(
            self.discriminator.parameters(),
            "discriminator_learning_rate",
            eps="discriminator_adam_epsilon",
        )
        shape = (self.model.obs_dim,)
        self.discriminator_norm = RunningNorm(self.num_seeds, shape, self.device)
        self.reward_norm = RunningNorm(self.num_seeds, (), self.device)
        past = self.config.discriminator_rollouts - 1
        self.generator_replay = GeneratorReplay(past, self.num_seeds, self.device)

    def see_data(self, buffer: ReplayBuffer) -> None:
        """Clone the demonstrations for a while, where a warm start is asked for."""
        self.attach(buffer)
        if self.config.bc_warmup_updates:
            self.clone_expert()

    def clone_expert(self) -> None:
        """Fit the policy's mode to the expert; a Gaussian keeps its deviation, to explore with."""
        expert, config = self.expert, self.config
        if self.normalizes:
            shown = expert.obs.expand(self.num_seeds, -1, -1)
            self.obs_norm.update(self.as_floats(shown).float())
        optimizer = Adam(self.model.mode_parameters(), config.bc_warmup_learning_rate)
        for _ in range(config.bc_warmup_updates):
            index = self.rng.integers(expert.num_rows, config.discriminator_batch_size)
            obs, action, _ = expert.take(index)
            shown = self.normalize(obs)
            features = self.model.embed(shown)
            if self.model.discrete:
                row_loss = -self.model.log_prob_entropy(features, action, self.allowed(shown))[0]
            else:
                row_loss = action_error(self.model.mode(features), action)
            optimizer.minimize(row_loss.mean(1))

    def step(self, batch: RolloutBatch) -> StepOutput:
        """Update the discriminator, then the policy on its rewards (Algorithm 1)."""
        current = Pairs.of_rollout(batch)
        metrics = self.update_discriminator(current)
        reward = self.reward(current)
        metrics["imitation_reward"] = reward.mean(1)
        output = super().step(replace(batch, reward=reward.view_as(batch.reward)))
        self.generator_replay.add(current)
        steps = output.num_gradient_steps + self.config.discriminator_updates
        return StepOutput(output.metrics | metrics, num_gradient_steps=steps)

    def update_discriminator(self, current: Pairs) -> dict[str, Tensor]:
        """Take `discriminator_updates` steps; returns the means of their metrics."""
        config, size = self.config, self.config.discriminator_batch_size
        drawn = config.discriminator_updates * size
        expert = self.expert.take(self.rng.integers(self.expert.num_rows, drawn))
        generated = self.generator_replay.with_current(current)
        policy = generated.take(self.rng.integers(generated.num_rows, drawn))
        if self.standardizes:
            for side in (expert, current):  # half of the statistics each, whatever their sizes
                self.discriminator_norm.update(side.obs.float(), weight=current.num_rows)
        steps = []
        for start in range(0, drawn, size):
            mix = self.rng.uniform(size, 1)
            stop = start + size
            sides = expert.slice(start, stop), policy.slice(start, stop)
            steps.append(self.discriminator_step(*sides, mix))
        return {name: torch.stack([step[name] for step in steps]).mean(0) for name in steps[0]}

    # The discriminator

    def discriminator_step(self, expert: Pairs, policy: Pairs, mix: Tensor) -> dict[str, Tensor]:
        """Take one step on equally many pairs of both sides; `mix` is uniform, `[S, B, 1]`."""
        self.discriminator.refresh()
        # What a compiled program is called with is plain tuples.
        expert, policy = Pairs(*expert), Pairs(*policy)
        shown, generated = self.inputs(expert), self.inputs(policy)
        expert_logit, policy_logit = self.logits_of(shown), self.logits_of(generated)
        loss = self.loss_of(expert_logit, policy_logit, expert.ended, policy.ended)
        penalty = torch.zeros_like(loss)
        if "gradient_penalty" in self.varied or self.config.gradient_penalty > 0:
            # Features are data here: an encoder must not move to where the slope is right.
            between = interpolate(shown.detach(), generated.detach(), mix)
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
        """Return E_{a ~ pi(.|s)}[logit(s, a)], `[S, R]`: a sum where an action is one number.

        Args:
            pairs: Whose states they are.
            features: What the discriminator sees of them, `[S, R, E]`.
        """
        join = self.discriminator.inputs
        shown = self.normalize(pairs.obs)
        embedding, allowed = self.model.embed(shown), self.allowed(shown)
        if self.model.discrete and not self.model.choices.sizes:
            total = torch.zeros_like(pairs.ended)
            for action in range(self.model.action_dim):
                same = torch.full_like(pairs.action, action)
                chance = self.model.log_prob_entropy(embedding, same, allowed)[0].exp()
                total = total + chance * self.logits_of(join(features, same))
            return total
        noise = self.model.draw_noise(self.rng, CONDITIONAL_SAMPLES, pairs.num_rows)
        drawn = [self.model.sample(embedding, part, allowed) for part in noise.unbind(1)]
        logits = [self.logits_of(join(features, action)) for action in drawn]
        return torch.stack(logits).mean(0)

    # The demonstrations

    def attach(self, buffer: ReplayBuffer) -> None:
        """Take the demonstrations; called whenever a run starts or is resumed."""
        self._shown = transient(Pairs.of_buffer(buffer))

    @property
    def expert(self) -> Pairs:
        """The demonstrations.

        Raises:
            ConfigError: When there are none.
        """
        if self._shown is None:
            raise ConfigError(
                f"{type(self).__name__} has no demonstrations; give it some with "
                "attach(DatasetBuffer(dataset)) before its first update"
            )
        return self._shown.value


def gail_loss(learner: GAIL, expert: Pairs, policy: Pairs) -> Tensor:
    """Compute the discriminator's loss `[S]`, without penalty, at the current parameters."""
    logits = learner.logits(expert), learner.logits(policy)
    return learner.loss_of(*logits, expert.ended, policy.ended)


def gail_networks(env: EnvSpec, config: GAILConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the networks for a task: PPO's, then the discriminator with an encoder of its own."""
    networks = ppo_networks(env, config, rng)
    sizes, encoder = config.discriminator_hidden_sizes, None
    if len(env.obs_shape) > 1 or reads_parts(env):
        sizes = config.discriminator_head_hidden_sizes
        encoder = encoder_for(env, config, rng, features=config.discriminator_features)
    networks["discriminator"] = MLPGAILDiscriminator(
        env.obs_dim,
        env.action_dim,
        sizes,
        discrete=env.actions_are_counted,
        action_sizes=env.action_sizes,
        encoder=encoder,
        spectral_norm=config.spectral_norm,
        absorbing=config.absorbing_states,
        action_limit=env.action_limit,
        rng=rng,
    )
    return networks


SPEC = AlgorithmSpec(
    name="gail",
    title="Generative Adversarial Imitation Learning",
    paper="arXiv:1606.03476",
    summary="imitation, on-policy; PPO on a learned reward; discrete and continuous actions",
    learner=GAIL,
    networks=gail_networks,
    loop=Loop.ON_POLICY,
    phases=(Phase.DEMONSTRATIONS,),
    action_kinds=("discrete", "continuous", "multi_discrete"),
    obs_ndims=(1, 3),
    metrics={
        **PPO_SPEC.metrics,
        "discriminator_loss": "cross-entropy of the discriminator; log 2 is a blind one",
        "gradient_penalty": "mean squared distance of the logit's gradient from its wanted norm",
        "expert_recognised": "share of expert pairs taken for such; both shares tend to a half",
        "policy_recognised": "share of the policy's pairs taken for such",
        "imitation_reward": "mean reward that the policy was given",
    },
)
