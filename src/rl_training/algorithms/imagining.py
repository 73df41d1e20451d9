"""What MOPO and MBPO share: SAC on transitions that an ensemble of dynamics imagined.

The ensemble is fitted by `dynamics_fit.py`, rolled out by `dynamics_rollout.py`; a subclass says
what an imagined transition is worth.  The loop decides when (`runtime/imagining.py`).
Shapes: S seeds, B starts, K imagined rows, D observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Metrics, StepOutput, UpdateResult
from rl_training.algorithms.dynamics.config import dynamics_network
from rl_training.algorithms.dynamics.fit import DynamicsTrainer
from rl_training.algorithms.dynamics.rollout import (
    Imagined,
    ModelEnv,
    Penalty,
    TransitionFunction,
)
from rl_training.algorithms.imagination_config import ImaginationConfig
from rl_training.algorithms.sac import SAC, SoftSettings, sac_networks
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.dynamics import take_rows
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng


class ImaginingConfig(SoftSettings, ImaginationConfig):
    """Settings of a soft actor-critic and of what it imagines."""


@dataclass(frozen=True)
class Rules:
    """What is known of a task beside its data."""

    termination: TransitionFunction | None = None
    """Where episodes end; None is the model's own head, or never without one."""
    reward: TransitionFunction | None = None
    """Reward on the scale of the data; None takes the model's."""


class Imagining(SAC):
    """SAC with a model of the dynamics beside it."""

    network_names: ClassVar[tuple[str, ...]] = ("policy_model", "dynamics_model")
    critic_rate = "policy_learning_rate"
    config: ImaginingConfig
    policy_model: MLPSACModel
    dynamics_model: MLPMOPOEnsembleModel
    loss_name: ClassVar[str]
    """Metric of the model's loss."""

    @property
    def model(self) -> MLPSACModel:  # type: ignore[override]  # read only, under SAC's name
        """The actor and the critics."""
        return self.policy_model

    @property
    def penalty_kind(self) -> Penalty:
        """Which uncertainty roll-outs measure."""
        return "none"

    def setup(self) -> None:
        """Add the trainer of the model, which has an optimizer and randomness of its own."""
        super().setup()
        self.dynamics = DynamicsTrainer(
            self.dynamics_model, self.config, self.seeds, adam_epsilon=self.config.adam_epsilon
        )
        self.model_loss = torch.zeros(self.num_seeds, device=self.device)
        """Of the latest gradient step of the model, `[S]`."""

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Do SAC's update; the model stays as it is."""
        output = super().step(batch)
        output.metrics[self.loss_name] = self.model_loss.clone()
        return output

    # The model

    def update_model(
        self, batch: TransitionBatch | Mapping[str, Tensor], *, per_member: bool = False
    ) -> UpdateResult:
        """Take one gradient step of the model on real transitions; see `DynamicsTrainer.update`."""
        found = self.dynamics.update(batch, per_member=per_member).metrics.tensors
        return UpdateResult(metrics=Metrics(self._named(found)))

    def fit_model(
        self, rows: Tensor, on_epoch: Callable[[DynamicsTrainer], None] | None = None
    ) -> dict[str, Tensor]:
        """Fit the model to the table `rows` as the settings say; see `DynamicsTrainer.fit`."""
        return self._named(self.dynamics.fit(rows, on_epoch, self.config.model_updates))

    def _named(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.model_loss.copy_(found["mopo_model_loss"])
        return {self.loss_name if n == "mopo_model_loss" else n: v for n, v in found.items()}

    # What it imagines

    @torch.no_grad()
    def imagine(self, obs: Tensor, horizon: int, rules: Rules) -> Imagined:
        """Follow the exploring policy from `obs` `[S, B, D]` inside the model."""
        env = ModelEnv(
            self.dynamics_model,
            self.rng,
            sampling=self.config.rollout_sampling,
            penalty=self.penalty_kind,
            termination=rules.termination,
            reward=rules.reward,
        )
        return env.rollout(obs, partial(self.act, explore=True), horizon)

    def imagined_reward(self, made: Imagined) -> Tensor:
        """Return what imagined transitions are worth to the policy, `[S, K]`."""
        return made.reward


def rows_that_count(made: Imagined) -> Imagined:
    """Replace rows that do not count by ones that do, each about equally often; reads nothing back.

    Every seed then has the same number of rows, whenever its roll-outs ended.
    """
    order = (~made.valid).to(torch.int8).argsort(dim=1, stable=True)  # those that count first
    count = made.valid.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(order.shape[1], device=order.device) % count
    index = order.gather(1, place)
    parts = {field.name: getattr(made, field.name) for field in fields(made)}
    return Imagined(
        **{
            name: take_rows(part, index) if part.ndim == 3 else part.gather(1, index)
            for name, part in parts.items()
        }
    )


def imagining_networks(env: EnvSpec, config: ImaginingConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build actor and critics, and the ensemble."""
    ensemble = dynamics_network(env, config, rng)
    return {"policy_model": sac_networks(env, config, rng)["model"], "dynamics_model": ensemble}


IMAGINING_METRICS = {
    "critic_loss": "squared TD error, summed over critics",
    "actor_loss": "alpha log pi - min Q",
    "target_q_mean": "mean regression target",
    "entropy_term": "mean of -alpha log pi(a'|s') in the target",
    "q_mean": "mean of min Q at the policy's actions",
    "alpha": "temperature",
    "entropy": "policy entropy, estimated on the batch",
}
"""Of the policy's update; a method adds the loss of its model."""
