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

from rl_training.algorithms.base import StepOutput
from rl_training.algorithms.bc import action_error
from rl_training.algorithms.gail.config import GAILConfig
from rl_training.algorithms.gail.demonstrations import Demonstrated
from rl_training.algorithms.gail.discriminator import Discriminating
from rl_training.algorithms.optim import Adam
from rl_training.algorithms.pixel_config import encoder_for
from rl_training.algorithms.ppo import PPO, ppo_networks
from rl_training.algorithms.ppo import SPEC as PPO_SPEC
from rl_training.algorithms.spec import AlgorithmSpec, Loop, Phase
from rl_training.data.batch import RolloutBatch
from rl_training.data.replay.pairs import GeneratorReplay, Pairs
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator
from rl_training.rng import Rng


class GAIL(Discriminating, Demonstrated):
    """PPO on the reward of a discriminator."""

    config_class = GAILConfig
    config: GAILConfig
    network_names = ("model", "discriminator")
    compiled = (*PPO.compiled, "discriminator_step")

    def setup(self) -> None:
        """Add a replay of what the policy did."""
        super().setup()
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
        if config.normalize_obs:
            self.obs_norm.update(expert.obs.expand(self.num_seeds, -1, -1).float())
        optimizer = Adam(self.model.mode_parameters(), config.bc_warmup_learning_rate)
        for _ in range(config.bc_warmup_updates):
            index = self.rng.integers(expert.num_rows, config.discriminator_batch_size)
            obs, action, _ = expert.take(index)
            features = self.model.embed(self.normalize(obs))
            if self.model.discrete:
                row_loss = -self.model.log_prob_entropy(features, action)[0]
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
            shown, made = expert.slice(start, stop), policy.slice(start, stop)
            steps.append(self.discriminator_step(shown, made, mix))
        return {name: torch.stack([step[name] for step in steps]).mean(0) for name in steps[0]}


def gail_loss(learner: GAIL, expert: Pairs, policy: Pairs) -> Tensor:
    """Compute the discriminator's loss `[S]`, without penalty, at the current parameters."""
    logits = learner.logits(expert), learner.logits(policy)
    return learner.loss_of(*logits, expert.ended, policy.ended)


def gail_networks(env: EnvSpec, config: GAILConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the networks for a task: PPO's, then the discriminator with an encoder of its own."""
    networks = ppo_networks(env, config, rng)
    sizes, encoder = config.discriminator_hidden_sizes, None
    if len(env.obs_shape) > 1:
        sizes = config.discriminator_head_hidden_sizes
        encoder = encoder_for(env, config, rng, features=config.discriminator_features)
    networks["discriminator"] = MLPGAILDiscriminator(
        env.obs_dim,
        env.action_dim,
        sizes,
        discrete=env.action_kind == "discrete",
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
    action_kinds=("discrete", "continuous"),
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
