"""Behaviour cloning (Pomerleau, 1991, doi:10.1162/neco.1991.3.1.88).

Supervised learning of actions: the policy maximises the likelihood of those demonstrated, by
cross-entropy where they are discrete and a Gaussian's density, or its mean's squared error, where
they are continuous.

Deviations: a tanh MLP, or convolutions for images, with a Gaussian or categorical head, where the
    paper has a sigmoid network with a Gaussian bump over discretised steering; the Gaussian's
    deviation does not depend on the state, so its mean is the least-squares fit.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from rl_training.algorithms.base import StepOutput, TransitionLearner, weighted_mean
from rl_training.algorithms.config import AlgoConfig, part_of
from rl_training.algorithms.pixel_config import PixelConfig, shared_encoder
from rl_training.algorithms.sources import OfflineSettings
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.layers import ActivationName
from rl_training.models.mlp_policy import MLPPolicyModel
from rl_training.rng import Rng
from rl_training.validation import Number, PositiveFloat


class BCConfig(AlgoConfig):
    """Settings of behaviour cloning; rewards of the data are never used."""

    varying: ClassVar[frozenset[str]] = frozenset({"learning_rate"})

    learning_rate: PositiveFloat = 1e-3
    """Learning rate."""
    loss: Literal["nll", "mse"] = "nll"
    """Negative log-likelihood, or, for continuous actions, squared error of the mean alone."""
    activation: ActivationName | None = None
    """What follows each hidden layer; null is tanh, and relu up to the features of an image, whose
    convolutions always have relu."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this norm, per seed; null does not."""
    initial_log_std: Number = -0.5
    """Start of the Gaussian policy's log standard deviation."""


class BC(TransitionLearner):
    """Maximum likelihood of the data's actions."""

    config_class = BCConfig
    parts = (OfflineSettings, PixelConfig)
    config: BCConfig
    model: MLPPolicyModel

    def setup(self) -> None:
        """Create the optimizer."""
        model, config = self.model, self.config
        if config.loss == "mse" and model.discrete:
            raise ConfigError("loss is mse, but the actions are discrete; use nll (cross-entropy)")
        # Squared error says nothing about the deviation, so it stays where it is.
        trained = model.mode_parameters() if config.loss == "mse" else model.parameters()
        self.optimizer = self.network_optimizer(trained, max_grad_norm=config.max_grad_norm)

    def step(self, batch: TransitionBatch) -> StepOutput:
        """Take one step up the likelihood."""
        loss, metrics = self.loss(batch)
        self.optimizer.minimize(loss)
        return StepOutput({"loss": loss} | metrics)

    def loss(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """-E[log pi(a|s)], or E|a - mu(s)|^2, `[S]`; observations as the network sees them."""
        features, allowed = self.model.embed(batch.obs), self.allowed(batch.obs)
        log_prob, entropy = self.model.log_prob_entropy(features, batch.action, allowed)
        error = action_error(self.model.mode(features, allowed), batch.action)
        row_loss = error if self.config.loss == "mse" else -log_prob
        metrics = {"entropy": entropy.detach(), "action_error": error.detach()}
        return weighted_mean(row_loss, batch.weight), metrics

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Take the most likely action, or sample one when exploring a likelihood was fitted."""
        features, allowed = self.model.embed(obs), self.allowed(obs)
        if not explore or self.config.loss == "mse":
            return self.model.mode(features, allowed)
        return self.model.sample(features, self.model.draw_noise(self.rng, obs.shape[1]), allowed)


def action_error(chosen: Tensor, action: Tensor) -> Tensor:
    """Squared distance `[S, B]` of continuous actions `[S, B, A]`; 1 where discrete ones differ.

    Of multi-discrete ones `[S, B, K]` it is the share of the parts that differ.
    """
    if not action.is_floating_point():
        differs = (chosen != action).float()
        return differs if action.ndim == 2 else differs.mean(-1)
    return (chosen - action).square().sum(-1)


def bc_loss(learner: BC, batch: TransitionBatch) -> dict[str, Tensor]:
    """Compute the loss and metrics at the current parameters without changing them."""
    loss, metrics = learner.loss(learner.normalized(batch))
    return {"loss": loss} | metrics


def bc_networks(env: EnvSpec, config: BCConfig, rng: Rng) -> dict[str, nn.Module]:
    """Build the policy for a task."""
    images, sizes = len(env.obs_shape) > 1, part_of(config, PixelConfig)
    model = MLPPolicyModel(
        env.obs_dim,
        env.action_dim,
        sizes.head_hidden_sizes if images else sizes.hidden_sizes,
        discrete=env.actions_are_counted,
        action_sizes=env.action_sizes,
        encoder=shared_encoder(env, config, rng, config.activation or "relu"),
        activation=config.activation or "tanh",
        initial_log_std=config.initial_log_std,
        rng=rng,
    )
    return {"model": model}


SPEC = AlgorithmSpec(
    name="bc",
    title="Behaviour Cloning",
    paper="doi:10.1162/neco.1991.3.1.88",
    summary="imitation, offline; supervised learning of actions; discrete and continuous actions",
    learner=BC,
    networks=bc_networks,
    loop=Loop.OFFLINE,
    action_kinds=("discrete", "continuous", "multi_discrete"),
    obs_ndims=(1, 3),
    metrics={
        "loss": "negative log-likelihood, or squared error, of the data's actions",
        "entropy": "policy entropy",
        "action_error": "share of other actions than the data's, or mean squared distance to them",
    },
)
