"""ReBRAC (Tarasov et al., 2023, arXiv:2305.09836).

TD3+BC with the penalty in two places, each with its own weight: the policy is pulled to the actions
of the data, and the value of the next state falls with the distance between the policy's next
action and the one that the data took.  Critics have LayerNorm, networks three hidden layers,
batches 1024 rows.

Overrides: td_target, policy_value, actor_loss.
Deviations: the last row of a truncated episode has no next action and gets no penalty, where the
    authors leave the row out.  LayerNorm comes before the activation, not after; initial weights
    are PyTorch's, without the authors' small last layer and hidden biases of 0.1.  The target
    policy follows the policy after its step, not before.  `beta_actor` and `beta_critic` have one
    default, where the authors choose both per dataset.  Distances are measured in [-1, 1] whatever
    the action box.  Observations are clipped to +-10 deviations where they are standardised.
    `num_critics` and `n_step` may be any number; with `n_step` the next action is the one after the
    last reward.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rl_training.algorithms.actor_critic import Loss
from rl_training.algorithms.base import td_target
from rl_training.algorithms.config import LearningRate
from rl_training.algorithms.sources import OfflineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.td3 import TD3, TD3Config, td3_loss, td3_networks
from rl_training.data.batch import TransitionBatch
from rl_training.errors import DataError
from rl_training.validation import NonNegativeFloat, PositiveFloat, PositiveInt, Sizes


class ReBRACConfig(TD3Config):
    """Settings of ReBRAC."""

    varying: ClassVar[frozenset[str]] = frozenset({"beta_actor", "beta_critic"})

    beta_actor: NonNegativeFloat = 0.01
    """Weight of cloning against Q in the policy's loss; 0 does not clone, a large value only
    clones."""
    beta_critic: NonNegativeFloat = 0.01
    """Weight of the penalty on the next action in the critics' target; 0 gives TD3's target."""
    normalize_q: bool = True
    """Divide Q by its mean size in the policy's loss, so that the scale of rewards does not
    matter."""
    normalize_observations: bool = False
    """Standardise observations by the dataset's mean and deviation."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of the critics, and of the actor unless it has its own."""
    batch_size: PositiveInt = 1024
    """Transitions per gradient step and seed."""
    hidden_sizes: Sizes = (256, 256, 256)
    """Widths of the hidden layers of actor and critics."""
    use_layer_norm: bool = True
    """Normalise the critics' hidden layers."""


class ReBRAC(TD3):
    """TD3 with a penalty on actions unlike the data's, in the policy and in the critics."""

    config_class = ReBRACConfig
    parts = (LearningRate, OfflineSettings)
    config: ReBRACConfig
    actor_metrics = ("actor_loss", "bc_loss", "q_weight")
    needs_next_action = True

    def td_target(self, batch: TransitionBatch) -> Loss:
        """TD3's target less the penalty: r + discount (min_i Q'_i(s', a~') - beta |a~' - a'|^2).

        a~' is the smoothed action, a' the next action of the data, beta is `beta_critic` (Sec. 3).
        Where no next action is recorded the target is TD3's.

        Raises:
            DataError: When the batch holds no next actions.
        """
        action = self.smoothed_action(batch.next_obs)
        q = self.model.q_values(batch.next_obs, action, self.target_critic).amin(1)
        penalty = next_action_penalty(action, batch)
        value = q - self.setting("beta_critic", ndim=2) * penalty
        target = td_target(batch.reward, batch.discount, value)
        return target, {"target_q_mean": target, "next_action_penalty": penalty}

    def policy_value(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return pi(s) `[S, B, A]` and min_i Q_i(s, pi(s)) `[S, B]`: all critics lead."""
        action = self.model.policy(obs)
        return action, self.model.q_values(obs, action).amin(1)

    def actor_loss(self, batch: TransitionBatch) -> Loss:
        """E[beta_actor |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s))] with lambda = 1 / E|min_i Q_i|.

        Distances are summed over the entries of the action, as in the authors' code.
        """
        action, q = self.policy_value(batch.obs)
        size = q.detach().abs().mean(1)  # [S]
        weight = size.reciprocal() if self.config.normalize_q else size.new_ones(size.shape)
        cloning = squared_distance(action, batch.action).mean(1)
        loss = self.setting("beta_actor") * cloning - weight * q.mean(1)
        return loss, {"bc_loss": cloning.detach(), "q_weight": weight}


def squared_distance(first: Tensor, second: Tensor) -> Tensor:
    """Squared distance `[S, B]` of actions `[S, B, A]`, summed over their entries."""
    return (first - second).square().sum(-1)


def next_action_penalty(action: Tensor, batch: TransitionBatch) -> Tensor:
    """Squared distance `[S, B]` to the next actions of the data; 0 where none is recorded.

    Raises:
        DataError: When the batch holds no next actions.
    """
    if batch.next_action is None:
        raise DataError(
            "the batch has no next_actions, which rebrac needs: give the data's action at next_obs "
            "(and next_action_mask, 0 where there is none), or draw from "
            "DatasetBuffer(dataset, next_actions=True)"
        )
    distance = squared_distance(action, batch.next_action)
    return distance if batch.next_action_mask is None else distance * batch.next_action_mask


def rebrac_loss(learner: ReBRAC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    return td3_loss(learner, learner.normalized(batch))


SPEC = AlgorithmSpec(
    name="rebrac",
    title="Revisited Behaviour-Regularised Actor-Critic",
    paper="arXiv:2305.09836",
    summary="offline; TD3+BC with a penalty in the critics too; continuous actions",
    learner=ReBRAC,
    networks=td3_networks,
    loop=Loop.OFFLINE,
    action_kinds=("continuous",),
    metrics={
        "critic_loss": "squared TD error, summed over critics",
        "actor_loss": "beta_actor x cloning error - lambda Q",
        "bc_loss": "squared distance of the policy's actions to the data's, summed over entries",
        "q_weight": "lambda: weight of Q in the actor's loss",
        "target_q_mean": "mean regression target",
        "next_action_penalty": "squared distance of the target's next actions to the data's",
    },
)
