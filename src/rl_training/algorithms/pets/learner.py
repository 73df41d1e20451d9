"""PETS: Probabilistic Ensembles with Trajectory Sampling (Chua et al., 2018, arXiv:1805.12114).

A dynamics ensemble is fitted to everything seen so far by maximum likelihood; each action is the
first of a plan found by the cross-entropy method, rated by particles that follow members of the
ensemble.  There is no policy: what is left of a plan starts the next search.
Shapes: S seeds, n environments, B batch, M members, H steps, D observation, A action.

Deviations: those of the ensemble (`models.mlp_mopo`, `algorithms.dynamics.fit`); members learn
    from batches drawn independently from the whole replay instead of from one bootstrap sample
    each; updates continue from the last weights and moments, in rounds of fixed length; the reward
    is learned too, and used where the task's own is not known; actions are planned in learner
    units, [-1, 1].
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from rl_training.algorithms.base import StepOutput
from rl_training.algorithms.dynamics.fit import (
    BETA,
    EnsembleConfig,
    batch_rows,
    buffer_rows,
    dealt_rows,
    dynamics_network,
    fit_statistics,
    mopo_model_loss,
)
from rl_training.algorithms.pets.config import PETSConfig
from rl_training.algorithms.pets.planned import Planned
from rl_training.algorithms.sources import ReplaySettings
from rl_training.algorithms.spec import VECTOR_LEAVES, AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel, gaussian_nll
from rl_training.rng import Rng


def pets_loss(model: nn.Module, batch: TransitionBatch, beta: float = BETA) -> dict[str, Tensor]:
    """Negative log-likelihood of change of observation and reward (Eq. 1), summed over members.

    Args:
        model: The ensemble, or any module with `predict_distribution`.
        batch: Single steps `[S, B, ...]`; members of the ensemble learn from B // M rows each, of
            another module from all of them.
        beta: Of the ensemble, see `balanced_nll`.

    Returns:
        `model_loss [S]`, to be minimised, and mean absolute errors `reward_mae`, `delta_obs_mae`.
    """
    rows = batch_rows(batch)
    if isinstance(model, MLPMOPOEnsembleModel):
        losses = mopo_model_loss(model, dealt_rows(rows, model.num_ensembles), beta)
        names = {"model_loss": "mopo_model_loss"}
        return {n: losses[names.get(n, n)] for n in ("model_loss", "reward_mae", "delta_obs_mae")}
    known: Any = model
    inputs = (batch.obs[0], batch.action[0]) if rows.shape[0] == 1 else (batch.obs, batch.action)
    losses = known.predict_distribution(*inputs)
    mean, logvar = (part.view(rows.shape[0], -1, *part.shape[-2:]) for part in losses)
    target = rows[:, None, :, -mean.shape[-1] - 1 : -1]
    error = (mean - target).detach().abs().mean((1, 2))
    return {
        "model_loss": gaussian_nll(mean, logvar, target).mean((2, 3)).sum(1),
        "reward_mae": error[:, -1],
        "delta_obs_mae": error[:, :-1].mean(1),
    }


class PETS(Planned):
    """Model learning, and planning in the model."""

    config_class = PETSConfig
    parts = (EnsembleConfig, ReplaySettings)
    config: PETSConfig
    network_names: ClassVar[tuple[str, ...]] = ("dynamics_model",)

    def setup(self) -> None:
        """Create the optimizer."""
        super().setup()
        model = self.dynamics_model
        parameters = [p for p in model.parameters() if p.requires_grad]
        decays = model.decays() if isinstance(model, MLPMOPOEnsembleModel) else None
        if parameters:
            self.optimizer = self.network_optimizer(
                parameters, "model_learning_rate", weight_decay=decays
            )

    def begin_round(self, buffer: ReplayBuffer) -> None:
        """Standardise what the model takes and gives by all that was seen."""
        if isinstance(self.dynamics_model, MLPMOPOEnsembleModel):
            fit_statistics(self.dynamics_model, buffer_rows(buffer))
            self.dynamics_model.fitted.fill_(1)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Take one gradient step of all members."""
        if not hasattr(self, "optimizer"):
            raise ConfigError(
                f"{type(self.dynamics_model).__name__} has no parameters to learn; plan through it "
                "with plan_action, without updates"
            )
        beta = self.part(EnsembleConfig).model_nll_beta
        metrics = pets_loss(self.dynamics_model, batch, beta)
        self.optimizer.minimize(metrics["model_loss"])
        return StepOutput(metrics)


def pets_networks(env: EnvSpec, config: EnsembleConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the ensemble."""
    return {"dynamics_model": dynamics_network(env, config, rng)}


SPEC = AlgorithmSpec(
    name="pets",
    title="Probabilistic Ensembles with Trajectory Sampling",
    paper="arXiv:1805.12114",
    summary="model-based planning with a dynamics ensemble; continuous actions",
    learner=PETS,
    networks=pets_networks,
    loop=Loop.OFF_POLICY,
    action_kinds=("continuous",),
    leaf_kinds=VECTOR_LEAVES,
    metrics={
        "model_loss": "negative log-likelihood, summed over members, with the bounds' penalty",
        "reward_mae": "mean absolute error of the predicted reward",
        "delta_obs_mae": "mean absolute error of the predicted change of the observation",
    },
)
