"""Template of learners of return distributions by quantile regression, on the value-based template.

A variant says how it predicts the quantiles of the actions taken and those of the next state; the
loss, its priorities and the metrics are here.  Shapes: S seeds, B batch, A actions, N quantiles
predicted, M quantiles of the target.
"""

from __future__ import annotations

from torch import Tensor

from rl_training.algorithms.base import td_target, weighted_mean
from rl_training.algorithms.config import part_of
from rl_training.algorithms.losses import quantile_huber
from rl_training.algorithms.pixel_config import PixelConfig, encoder_for
from rl_training.algorithms.value_based import Exploration, ValueBased, ValueBasedConfig
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.quantile_networks import QuantileNetwork
from rl_training.rng import Rng
from rl_training.validation import NonNegativeFloat, PositiveInt

QUANTILE_METRICS = {
    "loss": "quantile Huber loss, summed over quantiles",
    "q_value_mean": "mean Q of the actions taken",
    "target_mean": "mean of the target distribution",
    "td_error_mean": "mean absolute difference of Q and the mean of the target",
}
"""What every learner of quantiles reports."""


class QuantileConfig(ValueBasedConfig):
    """Settings of every learner of quantiles."""

    num_quantiles: PositiveInt = 200
    """Quantiles of the return that are learned per action."""
    kappa: NonNegativeFloat = 1.0
    """Error below which the quantile loss is quadratic; 0 gives the plain quantile loss."""


class QuantileLearner(ValueBased):
    """Quantile regression of the return of the actions taken."""

    config: QuantileConfig

    def regress(
        self,
        batch: TransitionBatch,
        quantiles: Tensor,
        tau: Tensor,
        next_quantiles: Tensor,
        *,
        widths: Tensor | None = None,
        target_weight: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss `[S]`, metrics, and the loss per sample as priorities `[S, B]`.

        Args:
            batch: The transitions.
            quantiles: Predicted for the actions taken, `[S, B, N]`.
            tau: Their fractions, broadcast to `[S, B, N]`.
            next_quantiles: Of the return from s' on, `[S, B, M]`, without gradient.
            widths: Probability of each quantile `[S, B, N]`; all the same without.
            target_weight: Probability of each target `[S, B, M]`; all the same without.
        """
        reward, discount = batch.reward.unsqueeze(-1), batch.discount.unsqueeze(-1)
        target = td_target(reward, discount, next_quantiles)  # [S, B, M]
        each = quantile_huber(quantiles, target, tau, self.config.kappa, target_weight)  # [S, B]
        value, goal = expectation(quantiles.detach(), widths), expectation(target, widths)
        metrics = {"q_value_mean": value, "target_mean": goal}
        metrics["td_error_mean"] = (value - goal).abs()
        return weighted_mean(each, batch.weight), metrics, each.detach()


def require_outputs(setting: str, given: int, count: int) -> None:
    """Refuse a network that says another number of things of a return than the settings."""
    if count != given:
        raise ConfigError(f"{setting} is {given}, but q_network has {count}; give both the same")


def expectation(quantiles: Tensor, widths: Tensor | None = None) -> Tensor:
    """Return the mean `[...]` of a distribution of quantiles `[..., N]`, weighted by `widths`."""
    return quantiles.mean(-1) if widths is None else (quantiles * widths).sum(-1)


def of_action(quantiles: Tensor, action: Tensor) -> Tensor:
    """Pick the quantiles `[S, B, N]` of one action `[S, B]` per state from `[S, B, A, N]`."""
    index = action[..., None, None].expand(-1, -1, 1, quantiles.shape[-1])
    return quantiles.gather(2, index).squeeze(2)


def return_network(
    env: EnvSpec, config: ValueBasedConfig, outputs: int, rng: Rng
) -> QuantileNetwork:
    """Build a network that says so many numbers of the return of every action."""
    more, noisy = part_of(config, PixelConfig).head_hidden_sizes, part_of(config, Exploration).noisy
    return QuantileNetwork(
        encoder_for(env, config, rng, more=more, activation=config.activation, noisy=noisy),
        env.action_dim,
        outputs,
        dueling=config.dueling,
        noisy=noisy,
        rng=rng,
    )
