"""Categorical DQN, C51 (Bellemare et al., 2017, arXiv:1707.06887), and with it Rainbow.

The return of an action is a distribution over fixed atoms z_1 < ... < z_N.  The target moves the
atoms of the best next action by r + gamma z, shares each one's probability between its neighbours
on the support (Eq. 7), and the prediction is moved towards it by the KL divergence.

All settings together are Rainbow (Hessel et al., 2018, arXiv:1710.02298): `double`, `dueling`,
`n_step: 3`, `prioritized`, `noisy`; priorities are the divergence, as there.

Overrides: td_loss, q_values.
Deviations: the loss is the divergence, which differs from the papers' cross-entropy by a constant;
    double Q-learning is the default, as in DQN here; dueling streams differ in one linear layer,
    where Rainbow gives each a hidden layer; Adam as in the papers.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import td_target, weighted_mean
from rl_training.algorithms.losses import categorical_projection
from rl_training.algorithms.quantile import of_action, require_outputs, return_network
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.algorithms.value_based import ValueBased, ValueBasedConfig
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.quantile_networks import QuantileNetwork
from rl_training.rng import Rng
from rl_training.validation import LARGEST_FLOAT

Return = Annotated[float, Field(gt=-LARGEST_FLOAT, lt=LARGEST_FLOAT)]


class C51Config(ValueBasedConfig):
    """Settings of C51."""

    num_atoms: Annotated[int, Field(ge=2, le=10_000)] = 51
    """Atoms of the return's distribution."""
    v_min: Return = -10.0
    """Return of the first atom; smaller ones count as this."""
    v_max: Return = 10.0
    """Return of the last atom; larger ones count as this."""

    @model_validator(mode="after")
    def _support_is_an_interval(self) -> C51Config:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min must be < v_max ({self.v_max:g}), got {self.v_min:g}")
        return self


class C51(ValueBased):
    """Regression of categorical distributions of the return."""

    config_class = C51Config
    config: C51Config
    q_network: QuantileNetwork

    def setup(self) -> None:
        """Check the number of atoms."""
        require_outputs("num_atoms", self.config.num_atoms, self.q_network.num_quantiles)
        super().setup()

    def atoms(self) -> Tensor:
        """Return the support z `[N]`."""
        config = self.config
        return torch.linspace(config.v_min, config.v_max, config.num_atoms, device=self.device)

    def mean(self, probability: Tensor) -> Tensor:
        """Return the mean `[...]` of distributions over the atoms `[..., N]`."""
        return (probability * self.atoms()).sum(-1)

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return Q `[S, B, A]`, the mean of the distribution."""
        logits: Tensor = (network or self.q_network)(obs)
        return self.mean(logits.softmax(-1))

    def target_distribution(self, batch: TransitionBatch) -> Tensor:
        """Probability of each atom `[S, B, N]` after a step, by the best next action's (Eq. 7)."""
        probability = self.target_network(batch.next_obs).softmax(-1)  # [S, B, A, N]
        q = self.q_values(batch.next_obs) if self.config.double else self.mean(probability)
        reward, discount = batch.reward.unsqueeze(-1), batch.discount.unsqueeze(-1)
        moved = td_target(reward, discount, self.atoms())  # [S, B, N]
        best = of_action(probability, self.greedy(batch.next_obs, q))
        return categorical_projection(moved, best, self.atoms())

    def td_loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """KL divergence of the prediction from the target, weighted by importance."""
        with torch.no_grad(), self.noise(self.q_network, self.target_network):
            target = self.target_distribution(batch)
        with self.noise(self.q_network):
            logits = of_action(self.q_network(batch.obs), batch.action)  # [S, B, N]
        log_prob = logits.log_softmax(-1)
        divergence = (torch.xlogy(target, target) - target * log_prob).sum(-1)  # [S, B]
        value, goal = self.mean(log_prob.detach().exp()), self.mean(target)
        metrics = {"q_value_mean": value, "target_mean": goal}
        metrics["td_error_mean"] = (value - goal).abs()
        priority = divergence.detach().clamp(min=0)  # below 0 by rounding
        return weighted_mean(divergence, batch.weight), metrics, priority


def c51_loss(learner: C51, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute C51's loss and metrics at the current parameters without changing them."""
    loss, metrics, _ = learner.td_loss(batch)
    return {"loss": loss, **metrics}


def c51_networks(env: EnvSpec, config: C51Config, rng: Rng) -> dict[str, nn.Module]:
    """Build the network for a task; its outputs are the logits of the atoms."""
    return {"q_network": return_network(env, config, config.num_atoms, rng)}


SPEC = AlgorithmSpec(
    name="c51",
    title="Categorical DQN",
    paper="arXiv:1707.06887",
    summary="value-based, distributional; atoms at fixed returns, Rainbow; discrete actions",
    learner=C51,
    networks=c51_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("discrete",),
    obs_ndims=(1, 3),
    metrics={
        "loss": "KL divergence of the prediction from the target distribution",
        "q_value_mean": "mean Q of the actions taken",
        "target_mean": "mean of the target distribution",
        "td_error_mean": "mean absolute difference of Q and the mean of the target",
    },
)
