"""Conservative Q-Learning (Kumar et al., 2020, arXiv:2006.04779), variant CQL(H).

SAC on a dataset, whose critics are pushed down where the policy would go and up at the data: the
penalty is log sum_a exp Q(s, a) - Q(s, a_data) (Eq. 4), estimated by importance sampling with
actions drawn uniformly, from pi(.|s) and from pi(.|s'), `num_cql_samples` each (App. F).

As in the authors' code: deterministic backup by default, an actor and temperature with a smaller
rate, a multiplier of the Lagrange form that is learned through its logarithm and bounded by 1e6.

Deviations: the policy runs once per state for all of its samples; the actor follows the critics
    after their step and the temperature moves last (theirs: losses before any step, temperature
    first); the multiplier starts at `cql_alpha` (theirs: at 1, times a fixed weight); target
    critics start as copies (theirs: with weights of their own); no clipping of the policy's mean
    while cloning; initial weights are PyTorch's, two hidden layers by default (theirs: three).

`calibrated` gives Cal-QL (Nakamoto et al., 2023, arXiv:2303.05479): Q of the policy's actions is
pushed down to the return-to-go of the data at most, so that the critics are on the scale of true
values when a run continues online.  Deviations: after a truncation the episode's mean reward is
assumed to continue forever, which is the authors' rule for episodes of a sparse task that never
succeed; online, rows of episodes in progress have no bound yet, where the authors learn from an
episode when it is over.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import Loss
from rl_training.algorithms.base import td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.conservative import (
    proposals,
    q_of_several,
    several_actions,
    soft_maximum,
)
from rl_training.algorithms.sac import SAC, SACConfig, sac_loss, sac_networks
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.errors import DataError
from rl_training.models.actor_with_critics import (
    MLPSACModel,
    tanh_gaussian_log_prob,
    tanh_gaussian_sample,
)
from rl_training.validation import NonNegativeInt, PositiveFloat, PositiveInt

CLONING, IMPROVING = 0, 1
MAX_MULTIPLIER = 1e6


class CQLConfig(SACConfig):
    """Settings of CQL."""

    varying: ClassVar[frozenset[str]] = frozenset({"cql_alpha"})

    actor_learning_rate: PositiveFloat | None = 1e-4
    """Learning rate of the actor, and of a learned temperature; null uses `learning_rate`."""
    cql_alpha: PositiveFloat = 5.0
    """Weight of the conservative penalty; of the Lagrange form, the start of its multiplier."""
    num_cql_samples: PositiveInt = 10
    """Actions per state drawn uniformly, from pi(.|s) and from pi(.|s'): three times this many."""
    cql_temperature: PositiveFloat = 1.0
    """Temperature of the log-sum-exp."""
    cql_target_gap: PositiveFloat | None = None
    """Value at which a learned multiplier keeps the penalty (Eq. 30); null keeps `cql_alpha` fixed.
    The authors' threshold of 5 is on the penalty times their weight of 5, so it is a gap of 1."""
    calibrated: bool = False
    """Do not push values of the policy's actions below the return-to-go of the data: Cal-QL,
    for runs that continue online; the rows must be in time order."""
    backup: Literal["deterministic", "entropy", "max"] = "deterministic"
    """Target: min Q, min Q with the entropy term of SAC, or the largest of several actions."""
    bc_warmup_updates: NonNegativeInt = 0
    """First updates in which the actor clones the data instead of following the critics; not
    online, where the actor has learned."""


class CQL(SAC):
    """SAC with conservative critics."""

    config_class = CQLConfig
    parts = (LearningRate, OfflineToOnlineSettings)
    config: CQLConfig
    model: MLPSACModel

    def setup(self) -> None:
        """Add the multiplier."""
        super().setup()
        if self.config.cql_target_gap is not None:
            start = torch.ones(self.num_seeds, device=self.device) * self.setting("cql_alpha")
            self.log_multiplier = nn.Parameter(start.log())
            self.multiplier_optimizer = self.adam([self.log_multiplier])

    def phase(self) -> int:
        """Tell whether the actor clones the data or follows the critics."""
        warmup = (
            self.config.bc_warmup_updates
            if self.part(OfflineToOnlineSettings).online is None
            else 0
        )
        return CLONING if self.num_updates.value < warmup else IMPROVING

    def td_target(self, batch: TransitionBatch) -> Loss:
        """Regression target by the chosen backup, with the entropy term it holds."""
        if self.config.backup == "entropy":
            return super().td_target(batch)
        if self.config.backup == "max":
            q = self.best_of_several(batch.next_obs)
        else:
            action, _ = self.sample_action(batch.next_obs)
            members = self.target_members()
            q = self.model.q_values(batch.next_obs, action, self.target_critic, members).amin(1)
        target = td_target(batch.reward, batch.discount, q)
        return target, {"target_q_mean": target, "entropy_term": torch.zeros_like(target)}

    def best_of_several(self, obs: Tensor) -> Tensor:
        """Return min_i max_a Q_i(s, a) over `num_cql_samples` policy actions, `[S, B]`."""
        actions, _ = self.several_actions(obs)
        q = self.q_of_several(obs, actions, self.target_critic, self.target_members())
        return q.amax(-1).amin(1)

    def critic_loss(
        self, batch: TransitionBatch, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """TD error plus the weighted penalty, summed over critics."""
        q = self.model.q_values(batch.obs, batch.action)  # [S, N, B]
        td_loss, td_error = self.squared_error(q, batch, target)
        gap = self.penalty(batch, q)  # [S, N]
        threshold = self.config.cql_target_gap
        if threshold is None:
            loss = td_loss + self.setting("cql_alpha") * gap.sum(1)
        else:
            loss = td_loss + self.multiplier().detach() * (gap - threshold).sum(1)
        return loss, {"cql_penalty": gap.detach().mean(1), "td_loss": td_loss.detach()}, td_error

    def multiplier(self) -> Tensor:
        """Return the learned weight of the penalty, `[S]`."""
        return self.log_multiplier.exp().clamp(max=MAX_MULTIPLIER)

    def update_multipliers(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the temperature, and the multiplier by how far the penalty is from its gap."""
        if self.config.cql_target_gap is not None:
            excess = measured["cql_penalty"] - self.config.cql_target_gap
            self.multiplier_optimizer.minimize(-self.multiplier() * excess)
        return super().update_multipliers(measured)

    def penalty(self, batch: TransitionBatch, data_q: Tensor) -> Tensor:
        """Estimate log sum_a exp Q(s, a) - Q(s, a_data) for every critic, `[S, N]`.

        The second term is given as `data_q` `[S, N, B]`.  Thresholds of the Lagrange form are
        stated for a sum of terms, see `soft_maximum`.
        """
        with torch.no_grad():
            actions, log_density = self.proposals(batch)  # [S, B, 3n, A], [S, B, 3n]
        q = self.bounded(self.q_of_several(batch.obs, actions), batch)  # [S, N, B, 3n]
        pushed_down = soft_maximum(q, log_density, self.config.cql_temperature)
        return (pushed_down - data_q).mean(-1)

    @property
    def needs_return_to_go(self) -> bool:
        """Whether the penalty is bounded by it."""
        return self.config.calibrated

    def bounded(self, q: Tensor, batch: TransitionBatch) -> Tensor:
        """Return Q of the proposed actions `[S, N, B, 3n]`, bounded below where `calibrated`.

        max(Q(s, a), G) with the return-to-go G for the policy's actions (Eq. 5 of
        arXiv:2303.05479), which come after n uniform ones; at the bound no gradient flows.

        Raises:
            DataError: When there must be returns-to-go, and the batch has none.
        """
        if not self.config.calibrated:
            return q
        if batch.return_to_go is None:
            raise DataError(
                "the batch has no returns_to_go, which cql needs with calibrated: give the "
                "discounted rewards to the end of each row's episode, or draw from "
                "DatasetBuffer(dataset, returns_to_go=True)"
            )
        samples = self.config.num_cql_samples
        bound = batch.return_to_go[:, None, :, None]  # [S, 1, B, 1]
        return torch.cat((q[..., :samples], torch.maximum(q[..., samples:], bound)), -1)

    def proposals(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Draw actions for every state and return them with the log density each was drawn by."""
        samples = self.config.num_cql_samples
        return proposals(self.model, self.rng, batch.obs, batch.next_obs, samples)

    def several_actions(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[S, B, n, A]` from the policy at `obs`, with log densities `[S, B, n]`."""
        return several_actions(self.model, self.rng, obs, self.config.num_cql_samples)

    def q_of_several(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | None = None,
    ) -> Tensor:
        """Return Q of several actions per state, `[S, N, B, n]`."""
        return q_of_several(self.model, obs, actions, critic, members)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """SAC's loss; while cloning, alpha log pi(a|s) - log pi(a_data|s)."""
        if self.phase() == IMPROVING:
            return super().actor_loss(batch)
        mean, log_std = self.model.policy(batch.obs)
        noise = self.rng.normal(batch.obs.shape[1], self.model.action_dim)
        _, log_prob = tanh_gaussian_sample(mean, log_std, noise)
        cloning = tanh_gaussian_log_prob(mean, log_std, batch.action)
        alpha = self.log_alpha.detach().exp().unsqueeze(1)
        metrics = {"q_mean": torch.zeros_like(log_prob), "entropy": -log_prob.detach().mean(1)}
        return (alpha * log_prob - cloning).mean(1), metrics


def cql_loss(learner: CQL, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute CQL's losses and metrics at the current parameters without changing them."""
    return sac_loss(learner, learner.normalized(batch))


SPEC = AlgorithmSpec(
    name="cql",
    title="Conservative Q-Learning",
    paper="arXiv:2006.04779",
    summary="offline; SAC with critics that are pessimistic off the data; continuous actions",
    learner=CQL,
    networks=sac_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    counterpart="discrete_cql",
    metrics={
        "critic_loss": "TD error plus weighted penalty, summed over critics",
        "actor_loss": "alpha log pi - min Q, or the cloning loss",
        "target_q_mean": "mean regression target",
        "entropy_term": "mean of -alpha log pi(a'|s') in the target",
        "cql_penalty": "log-sum-exp of Q minus Q of the data, mean over critics",
        "td_loss": "squared TD error, summed over critics",
        "q_mean": "mean of min Q at the policy's actions",
        "alpha": "temperature",
        "entropy": "policy entropy, estimated on the batch",
    },
)
