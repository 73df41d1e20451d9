"""TD3: Twin Delayed Deep Deterministic policy gradient (Fujimoto et al., 2018, arXiv:1802.09477).

DDPG with three remedies for critics that promise too much: targets use the least of the critics
(clipped double Q-learning, Sec. 4.2), the policy and all targets move once in several updates of
the critics (Sec. 5.2), and noise on the target policy's action makes similar actions have similar
values (target policy smoothing, Sec. 5.3).

Deviations: defaults are those of the authors' later code (256x256 networks, batches of 256,
    learning rate 3e-4, 25,000 random steps), not of the paper (400x300, 100, 1e-3, 10,000 or
    1,000); updates begin when the random steps end, as in that code.  Noise is added in [-1, 1]
    and the smoothed action is clipped to it, again as in the code.  `num_critics` may exceed two,
    targets take the minimum of all.  Metrics of the actor are those of its last step.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import ActorCritic, ActorCriticConfig, Loss, networks_of
from rl_training.algorithms.base import ActingState, frozen_copy, polyak_update, td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import TransitionReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.validation import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings


class TD3Config(ActorCriticConfig):
    """Settings of TD3, wherever its data comes from."""

    varying: ClassVar[frozenset[str]] = frozenset(
        {"policy_noise", "noise_clip", "exploration_noise"}
    )

    policy_noise: NonNegativeFloat = 0.2
    """Deviation of the noise on the target policy's actions."""
    noise_clip: NonNegativeFloat = 0.5
    """Largest size of that noise."""
    policy_delay: PositiveInt = 2
    """Critic updates per update of the policy and the targets."""
    exploration_noise: NonNegativeFloat = 0.1
    """Deviation of the noise on actions that explore, in learner units; 0 does not explore."""


class TD3Replay(TransitionReplay):
    """How TD3 keeps and paces experience; defaults are those of the authors' code."""

    learning_starts: NonNegativeInt = 25_000
    """Steps of uniformly random actions before the first update."""


class TD3(ActorCritic):
    """Twin critics and a deterministic policy that moves less often than they do."""

    config_class: ClassVar[type[Settings]] = TD3Config
    parts: ClassVar[tuple[type[Settings], ...]] = (LearningRate, TD3Replay)
    config: TD3Config
    model: MLPTD3Model
    actor_metrics: ClassVar[tuple[str, ...]] = ("actor_loss",)
    has_target_actor: ClassVar[bool] = True
    """Whether the actions of targets come from a slower copy of the policy."""

    def setup(self) -> None:
        """Add the target policy, where there is one."""
        super().setup()
        if self.has_target_actor:
            self.target_actor = frozen_copy(self.model.actor)
            self.target_actor_parameters = list(self.target_actor.parameters())

    @property
    def actor_delay(self) -> int:
        """Updates of the critics per update of the policy and the targets."""
        return self.config.policy_delay

    def smoothed_action(self, next_obs: Tensor) -> Tensor:
        """Return a' = clip(pi'(s') + clip(eps, -c, c), -1, 1) with eps ~ N(0, sigma) (Sec. 5.3)."""
        noise = self.rng.normal(next_obs.shape[1], self.model.action_dim)
        noise = noise * self.setting("policy_noise", ndim=3)
        bound = self.setting("noise_clip", ndim=3)
        noise = noise.clamp(-bound, bound)  # type: ignore[arg-type]  # two numbers or two tensors
        actor = self.target_actor if self.has_target_actor else None
        return (self.model.policy(next_obs, actor) + noise).clamp(-1, 1)

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Clipped double Q (Eq. 10) at the smoothed action: r + discount min_i Q'_i(s', a')."""
        action = self.smoothed_action(batch.next_obs)
        q = self.model.q_values(batch.next_obs, action, self.target_critic).amin(1)
        target = td_target(batch.reward, batch.discount, q)
        return target, {"target_q_mean": target}

    def policy_value(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return pi(s) `[S, B, A]` and Q_1(s, pi(s)) `[S, B]`: the first critic alone leads."""
        action = self.model.policy(obs)
        return action, self.model.q_values(obs, action, members=slice(1))[:, 0]

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """-E[Q_1(s, pi(s))]: its gradient is the deterministic policy gradient (Eq. 1)."""
        _, q = self.policy_value(batch.obs)
        return -q.mean(1), {}

    def update_targets(self) -> None:
        """Move both targets, when the policy has moved (Algorithm 1)."""
        if self.moves_actor():
            super().update_targets()
            tau = self.setting("tau")
            polyak_update(self.target_actor_parameters, self.actor_optimizer.parameters, tau)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Return the policy's action, with noise when exploring."""
        action = self.model.policy(obs)
        if not explore:
            return action
        return self.explored(action, self.setting("exploration_noise", ndim=3))

    def explored(self, action: Tensor, deviation: float | Tensor) -> Tensor:
        """Add noise of a deviation to actions `[S, n, A]`, and clip them."""
        noise = self.rng.normal(*action.shape[1:])
        return (action + deviation * noise).clamp(-1, 1)

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:  # noqa: ARG002
        """Return the policy's action: it has no noise but that of exploring."""
        return self.act(obs)


def td3_loss(learner: TD3, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    with torch.no_grad():
        target, metrics = learner.td_target(batch)
    actor_loss, actor_metrics = learner.actor_loss(batch)
    losses = {"critic_loss": learner.critic_loss(batch, target)[0], "actor_loss": actor_loss}
    return losses | metrics | actor_metrics


td3_networks = networks_of(MLPTD3Model)


SPEC = AlgorithmSpec(
    name="td3",
    title="Twin Delayed DDPG",
    paper="arXiv:1802.09477",
    summary="off-policy deterministic actor-critic with twin critics; continuous actions",
    learner=TD3,
    networks=td3_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    obs_ndims=(1, 3),
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "-Q of the first critic at the policy's actions",
        "target_q_mean": "mean regression target",
    },
)
