"""TD3+BC (Fujimoto & Gu, 2021, arXiv:2106.06860).

TD3 with one more term: the policy maximises lambda Q(s, pi(s)) - (pi(s) - a)^2, where lambda
divides by the mean size of Q, so that the weight of the two terms does not depend on the rewards.

Deviations: those of TD3; observations are divided by their deviation, at least 1e-3, and clipped to
    +-10, where the authors divide by std + 1e-3; entries that are constant in the data are not
    scaled; actions are cloned in [-1, 1] whatever the action box (theirs: in its own units, which
    scales cloning where it is larger); online, actions get Gaussian noise and the weight of
    cloning may fall linearly.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rl_training.algorithms.actor_critic import Loss
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import OfflineToOnlineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.td3 import TD3, TD3Config, td3_loss, td3_networks
from rl_training.data.batch import TransitionBatch
from rl_training.state import Scalar
from rl_training.validation import Fraction, PositiveFloat


class TD3BCConfig(TD3Config):
    """Settings of TD3+BC."""

    varying: ClassVar[frozenset[str]] = frozenset({"bc_alpha"})

    normalize_observations: bool = True
    """Standardise observations by the dataset's mean and deviation."""
    bc_alpha: PositiveFloat = 2.5
    """Weight of Q against cloning; towards 0 the policy clones the data."""
    cloning_end: Fraction = 1.0
    """Factor that the cloning term of an online run falls to, linearly; 0 ends as TD3."""


class TD3BC(TD3):
    """TD3 whose policy is also pulled to the actions of the data."""

    config_class = TD3BCConfig
    parts = (LearningRate, OfflineToOnlineSettings)
    config: TD3BCConfig
    actor_metrics = ("actor_loss", "bc_loss", "q_weight")

    def setup(self) -> None:
        """Add the factor of cloning."""
        super().setup()
        self.cloning = Scalar(1.0, self.device)

    def set_progress(self, progress: float) -> None:
        """Move the schedules, and online the weight of cloning."""
        super().set_progress(progress)
        if self.part(OfflineToOnlineSettings).online is not None:
            self.cloning.set(1 + (self.config.cloning_end - 1) * self.progress)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """E[-lambda Q_1(s, pi(s)) + c (pi(s) - a)^2] with lambda = alpha / E|Q_1| (Eq. 5 and 6).

        The paper has c = 1; online it may fall with the progress of the run (`cloning_end`).
        """
        action, q = self.policy_value(batch.obs)
        weight = self.setting("bc_alpha") / q.detach().abs().mean(1)  # [S]
        cloning = (action - batch.action).square().mean((1, 2))
        loss = self.cloning.tensor * cloning - weight * q.mean(1)
        return loss, {"bc_loss": cloning.detach(), "q_weight": weight}


def td3_bc_loss(learner: TD3BC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    return td3_loss(learner, learner.normalized(batch))


SPEC = AlgorithmSpec(
    name="td3_bc",
    title="TD3 with Behaviour Cloning",
    paper="arXiv:2106.06860",
    summary="offline; deterministic actor-critic held to the data by cloning; continuous actions",
    learner=TD3BC,
    networks=td3_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "cloning error - lambda Q",
        "bc_loss": "squared distance of the policy's actions to the data's",
        "q_weight": "lambda: weight of Q in the actor's loss",
        "target_q_mean": "mean regression target",
    },
)
