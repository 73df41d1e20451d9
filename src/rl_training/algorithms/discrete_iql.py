"""Implicit Q-Learning (Kostrikov et al., 2021, arXiv:2110.06169) for discrete actions.

IQL with critics that tell Q of every action and a categorical policy.  Although the maximum over
actions would be at hand, it is not taken: value and target only look at actions of the data.

Overrides: choose, log_prob.
Deviations: those of IQL; its paper has continuous actions alone.  The policy is greedy unless it
    samples.
"""

from __future__ import annotations

from torch import Tensor

from rl_training.algorithms.actor_critic import networks_of
from rl_training.algorithms.iql import IQL, iql_loss
from rl_training.algorithms.iql import SPEC as IQL_SPEC
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.models.actor_with_critics import MLPDiscreteIQLModel


class DiscreteIQL(IQL):
    """Expectile value, critics of all actions, and advantage-weighted cloning."""

    model: MLPDiscreteIQLModel

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Sample from the policy when exploring, else take its most likely action."""
        allowed = self.allowed(obs)
        if explore:
            return self.model.sample(obs, self.rng, allowed)
        return self.model.logits(obs, allowed).argmax(-1)

    def log_prob(self, batch: TransitionBatch) -> Tensor:
        """Return the policy's log probability of the data's actions, `[S, B]`."""
        return self.model.log_prob(batch.obs, batch.action, self.allowed(batch.obs))


def discrete_iql_loss(learner: DiscreteIQL, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the losses and metrics at the current parameters without changing them."""
    return iql_loss(learner, batch)


SPEC = AlgorithmSpec(
    name="discrete_iql",
    title="Discrete Implicit Q-Learning",
    paper="arXiv:2110.06169",
    summary="offline; expectile value and advantage-weighted cloning; discrete actions",
    learner=DiscreteIQL,
    networks=networks_of(MLPDiscreteIQLModel, "value_layer_norm"),
    loop=Loop.OFFLINE,
    action_kinds=("discrete",),
    counterpart="iql",
    metrics=IQL_SPEC.metrics,
)
