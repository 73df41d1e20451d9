"""The dynamics ensemble of MBPO, MOPO and PETS: its settings, its table of rows, its loss, its fit.

The loss is that of PETS (Chua et al., 2018, Eq. 1 and App. A.1 of arXiv:1805.12114), maximum
likelihood of the change of the observation and the reward.  A fit has a hold-out set, snapshots, an
early stop and elites as in the authors' code of MBPO (Janner et al., 2019, arXiv:1906.08253) and
MOPO (Yu et al., 2020, arXiv:2005.13239).  It begins with statistics of its rows, under which the
model predicts what it did, a new optimizer state, and the hold-out error of the weights it has:
what it returns is never worse.

Rows are tables `[.., W]` with the columns observation, action, change of observation, reward,
terminated.  Shapes: S seeds, M members, B batch, W columns, N rows, n rows to fit on, H rows held
out, O outputs.

Deviations of the loss: it is that of standardised targets, whose gradient is the same but for the
bounds of the log-variance; the mean's gradient is weighed by the variance (`balanced_nll`), without
which Hopper's reward is learned to R2 0.79 where 0.95 is possible; the bounds' penalty counts once
per member, as each has its own.

Deviations of the fit: the hold-out error is that of standardised targets, so that every output
counts; theirs is in raw units, and the largest output alone decides.  Patience counts gradient
steps beside epochs.  A row that is held out stays held out in later fits: drawn again for each fit,
the set would hold rows that the weights have learned by heart.  The optimizer begins again with
each fit.  The last batch of an epoch is filled up from the epoch's beginning, so that all batches
have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn import functional

from rl_training.algorithms.base import Metrics, UpdateResult
from rl_training.algorithms.config import OptimizerSettings
from rl_training.algorithms.optim import TensorList, make_optimizer
from rl_training.data.batch import TransitionBatch
from rl_training.data.normalizer import divisor
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, DataError, SpecMismatch
from rl_training.models.mlp_mopo import (
    WEIGHT_DECAY,
    MLPMOPOEnsembleModel,
    Prediction,
    Statistics,
    balanced_nll,
    mean_disagreement,
    take_rows,
)
from rl_training.rng import Rng
from rl_training.state import Counter, Stateful
from rl_training.validation import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    list_to_tuple,
)
from rl_training.validation import Sizes as LayerSizes

BETA = 0.5
"""Exponent of the variance that weighs the error of the mean; 0 is the paper's likelihood."""

Decays = Annotated[
    tuple[NonNegativeFloat, ...],
    Field(min_length=1),
    BeforeValidator(
        list_to_tuple,
        json_schema_input_type=Annotated[list[NonNegativeFloat], Field(min_length=1)],
    ),
]

MOST_ENTRIES = 1_000

Entries = Annotated[
    tuple[NonNegativeInt, ...],
    Field(max_length=MOST_ENTRIES),
    BeforeValidator(
        list_to_tuple,
        json_schema_input_type=Annotated[list[NonNegativeInt], Field(max_length=MOST_ENTRIES)],
    ),
]
"""Numbers of entries of the observation, from 0."""


class EnsembleConfig(Settings):
    """Settings of the dynamics ensemble."""

    model_hidden_sizes: LayerSizes = (200, 200, 200, 200)
    """Widths of the hidden layers of each member."""
    num_ensembles: PositiveInt = 7
    """Members of the ensemble."""
    model_learning_rate: PositiveFloat = 1e-3
    """Learning rate of the ensemble."""
    model_weight_decay: Decays = WEIGHT_DECAY
    """L2 penalty of each layer's weights; stretched to the number of layers where that differs."""
    model_nll_beta: Fraction = BETA
    """Exponent of the predicted variance that weighs errors of the mean; 0 is the likelihood, 1
    least squares."""
    model_learn_logvar_bounds: bool = True
    """Learn the bounds of the log-variance of standardised targets; false keeps -10 and 0.5."""
    model_learn_terminations: bool = False
    """Learn when episodes end, for tasks whose termination function is not known."""
    model_learn_reward: bool = True
    """Learn the reward; false needs a known `reward_function`."""
    model_angles: Entries = ()
    """Entries of the observation that the model sees as sine and cosine."""
    model_hidden: Entries = ()
    """Entries of the observation that the model does not see, such as the place of a runner."""
    model_no_delta: Entries = ()
    """Entries of the observation whose next value is predicted in place of their change."""


class DynamicsConfig(EnsembleConfig):
    """Settings of the dynamics ensemble and of fitting it."""

    num_elites: PositiveInt | None = None
    """Members with the smallest hold-out error, which rollouts draw from; null is 5, or all if
    there are fewer."""
    model_batch_size: PositiveInt = 256
    """Transitions per gradient step and member."""
    model_bootstrap: Literal["replacement", "shuffle"] = "replacement"
    """`replacement` gives each member rows drawn with replacement once per fit, `shuffle` all rows
    in an order of its own."""
    model_holdout_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the rows held out from fitting, to stop and to choose elites by."""
    model_holdout_max: PositiveInt = 5_000
    """Most rows held out."""
    model_patience: PositiveInt = 5
    """Epochs without a gain in hold-out error after which a fit ends."""
    model_patience_updates: PositiveInt = 300
    """Gradient steps without a gain that a fit waits for as well: few rows make short epochs."""
    model_min_improvement: Fraction = 0.01
    """Least relative gain in the members' mean hold-out error for which a fit continues."""
    model_min_gain: NonNegativeFloat = 5e-4
    """The same as a share of the targets' variance: without noise in the data, relative gains never
    end."""
    model_max_epochs: PositiveInt | None = None
    """Most epochs of one fit; null leaves it to the patience."""


def dynamics_network(env: EnvSpec, config: EnsembleConfig, rng: Rng) -> MLPMOPOEnsembleModel:
    """Build the ensemble for a task; without a hold-out set to choose by, all are elites.

    Raises:
        SpecMismatch: For discrete actions, or observations that are not vectors.
    """
    if env.action_kind != "continuous":
        raise SpecMismatch(
            f"environment {env.env_id}: the dynamics ensemble takes continuous actions, got "
            f"{env.num_actions} discrete ones; use a task with a Box of actions, or a method for "
            "discrete actions such as dqn"
        )
    if len(env.obs_shape) != 1 or env.obs_dtype == "uint8":
        raise SpecMismatch(
            f"environment {env.env_id}: the dynamics ensemble takes observations that are vectors "
            f"of numbers, got shape {env.obs_shape} of {env.obs_dtype}; remove the pixel wrapper, "
            "or flatten the observations with gymnasium.wrappers.FlattenObservation"
        )
    return MLPMOPOEnsembleModel(
        env.obs_dim,
        env.action_dim,
        config.model_hidden_sizes,
        config.num_ensembles,
        num_elites=config.num_elites
        if isinstance(config, DynamicsConfig)
        else config.num_ensembles,
        learn_logvar_bounds=config.model_learn_logvar_bounds,
        learn_terminations=config.model_learn_terminations,
        learn_reward=config.model_learn_reward,
        angles=config.model_angles,
        hidden=config.model_hidden,
        no_delta=config.model_no_delta,
        weight_decay=config.model_weight_decay,
        rng=rng,
    )


BOUND_WEIGHT = 0.01
"""Of the sum of upper minus lower bounds of the log-variance, in the loss."""


def model_rows(
    obs: Tensor, action: Tensor, reward: Tensor, next_obs: Tensor, terminated: Tensor
) -> Tensor:
    """Put transitions `[.., B, D]`, `[.., B]` into the table `[.., B, W]` that fitting takes."""
    ends = (reward.unsqueeze(-1), terminated.to(obs.dtype).unsqueeze(-1))
    return torch.cat((obs, action, next_obs - obs, *ends), -1)


def batch_rows(batch: TransitionBatch) -> Tensor:
    """Return a batch as a table `[S, B, W]`; it must be one of single steps, not of n."""
    return model_rows(batch.obs, batch.action, batch.reward, batch.next_obs, batch.discount == 0)


def buffer_rows(buffer: ReplayBuffer) -> Tensor:
    """Return all rows a buffer holds as a table `[S, N, W]`, or `[1, N, W]` if seeds share it.

    A truncated row is not terminal, and its `next_obs` is the true successor.
    """
    rows = {name: rows[:, : len(buffer)] for name, rows in buffer.rows.items()}
    ends = rows["continues"] == 0
    return model_rows(rows["obs"], rows["action"], rows["reward"], rows["next_obs"], ends)


@torch.no_grad()
def fit_statistics(model: MLPMOPOEnsembleModel, rows: Tensor, index: Tensor | None = None) -> None:
    """Standardise inputs and targets by mean and deviation of a table, or of some of its rows.

    Args:
        model: The ensemble; what it predicts stays as it is, see its `standardise`.
        rows: `[S or 1, N, W]`.
        index: Rows of each seed `[S, n]`.
    """
    statistics = []
    for seed in range(model.num_seeds):
        table = rows[min(seed, rows.shape[0] - 1)]
        table = table if index is None else table.index_select(0, index[seed])
        size = model.obs_dim
        action = table[:, size : size + model.action_dim]
        inputs = torch.cat((model.features(table[:, :size]), action), -1)
        statistics.append([_mean_and_divisor(x) for x in (inputs, model.targets(table))])
    (input_mean, divisors), (target_mean, deviation) = (
        (torch.stack(part).view(model.num_seeds, 1, 1, -1) for part in zip(*pairs, strict=True))
        for pairs in zip(*statistics, strict=True)
    )
    model.standardise(Statistics(input_mean, model.seen / divisors, target_mean, deviation))


def _mean_and_divisor(x: Tensor) -> tuple[Tensor, Tensor]:
    deviation, mean = torch.std_mean(x, 0, correction=0)
    return mean, divisor(mean, deviation)


def dealt_rows(rows: Tensor, members: int) -> Tensor:
    """Deal rows `[S, B, W]` out to members, `[S, M, B // M, W]`; fewer than M go to all of them."""
    share = rows.shape[1] // members
    if share == 0:
        return rows.unsqueeze(1)
    return rows[:, : members * share].view(rows.shape[0], members, share, -1)


def mopo_model_loss(
    model: MLPMOPOEnsembleModel, rows: Tensor, beta: float = BETA
) -> dict[str, Tensor]:
    """Negative log-likelihood of every member, summed over members, and what it was made of.

    Args:
        model: The ensemble.
        rows: `[S, 1, B, W]`, shared by all members, or `[S, M, B, W]`, each its own.
        beta: See `balanced_nll`.

    Returns:
        `mopo_model_loss [S]`, to be minimised; `reward_mae` and `delta_obs_mae [S]`, and, for
        shared rows, `ensemble_disagreement [S]`.
    """
    size = model.obs_dim + model.action_dim
    members, statistics = model.members(), model.statistics
    target = (model.targets(rows) - statistics.target_mean) / statistics.target_scale
    predicted = members.standardised(rows[..., :size])
    nll = balanced_nll(predicted.mean, predicted.logvar, target, beta)  # [S, M, B, O]
    loss = nll.mean((2, 3)).sum(1)
    if model.learn_logvar_bounds:
        loss = loss + BOUND_WEIGHT * (model.max_logvar - model.min_logvar).sum((1, 2, 3))
    if predicted.terminal is not None:
        ends = rows[..., -1].expand_as(predicted.terminal)
        entropy = functional.binary_cross_entropy_with_logits(
            predicted.terminal, ends, reduction="none"
        )
        loss = loss + entropy.mean(2).sum(1)
    return {"mopo_model_loss": loss} | _errors(model, predicted, target)


@torch.no_grad()
def _errors(
    model: MLPMOPOEnsembleModel, predicted: Prediction, target: Tensor
) -> dict[str, Tensor]:
    """Return mean absolute errors and disagreement in the units of the data, each `[S]`."""
    scale = model.target_scale
    error = ((predicted.mean - target).abs().mean((1, 2), keepdim=True) * scale)[:, 0, 0]  # [S, O]
    size = model.obs_dim
    # Without a reward to learn there is no error in it.
    reward = error[:, size] if model.learn_reward else torch.zeros_like(error[:, 0])
    errors = {"reward_mae": reward, "delta_obs_mae": error[:, :size].mean(1)}
    if target.shape[1] == 1:
        errors["ensemble_disagreement"] = mean_disagreement(predicted.mean * scale).mean(1)
    return errors


_FIT, _EPOCH = 1 << 32, 16
"""Numbered draws between two fits and between two epochs; those of the first fit begin at `_FIT`,
below are the draws that all fits share."""
_WORST = 1e30
"""An error before the first; infinity would be taken for divergence when a run is saved."""


class DynamicsTrainer(Stateful):
    """Fits an ensemble; its state is everything but the weights, which are the model's own.

    `fit` may be cut between two epochs: with the state restored, the next `fit` on the same rows
    continues where the last one was.  A seed draws by (fit, epoch), so it does the same alone or in
    a group whose other seeds take longer.
    """

    def __init__(
        self,
        model: MLPMOPOEnsembleModel,
        config: DynamicsConfig,
        seeds: Sequence[int] = (0,),
        *,
        adam_epsilon: float = 1e-8,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        """Create the optimizer and an empty record.

        Args:
            model: The ensemble.
            config: How it is fitted.
            seeds: One per seed of the model.
            adam_epsilon: See `AlgoConfig`.
            optimizer: Which optimizer it has; None is Adam.

        Raises:
            ConfigError: When the number of seeds is not the model's.
        """
        if len(seeds) != model.num_seeds:
            raise ConfigError(
                f"the dynamics ensemble was built for {model.num_seeds} seeds, got {len(seeds)}: "
                f"{list(seeds)}; give as many as its rng had"
            )
        # In a tuple, which `Stateful` does not enter: the learner saves the model once.
        self._models = (model,)
        self.config = config
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(
            optimizer or OptimizerSettings(),
            parameters,
            config.model_learning_rate,
            eps=adam_epsilon,
            weight_decay=model.decays(),
            count_per_seed=True,
        )
        device = parameters[0].device
        self.rng = Rng(seeds, "dynamics", device)
        self.best = TensorList([p.detach().clone() for p in parameters])
        lead = (model.num_seeds, model.num_ensembles)
        self.best_error = torch.full(lead, _WORST, device=device)
        """Hold-out error of each member's snapshot `[S, M]`; after a fit, of the member."""
        self.mark = torch.zeros(model.num_seeds, device=device)
        """Mean of `best_error` at the latest gain that counts, per seed."""
        self.stale = torch.zeros(model.num_seeds, dtype=torch.int64, device=device)
        """Gradient steps since that gain, per seed."""
        self.active = torch.ones(model.num_seeds, dtype=torch.bool, device=device)
        """Seeds whose fit continues."""
        self.epochs = torch.zeros(model.num_seeds, dtype=torch.int64, device=device)
        """Epochs of the latest fit, per seed."""
        self.num_fits, self.epoch = Counter(), Counter()
        self.run_step: Callable[[Tensor, Tensor | None], dict[str, Tensor]] = self.step
        """How a gradient step is taken; a compiled form may replace it."""

    @property
    def model(self) -> MLPMOPOEnsembleModel:
        """The ensemble."""
        return self._models[0]

    # A fixed number of updates

    def update(
        self, batch: TransitionBatch | Mapping[str, Tensor], *, per_member: bool = False
    ) -> UpdateResult:
        """Take one gradient step on a batch `[S, B, ...]`, or `[B, ...]` for one seed.

        Args:
            batch: Transitions, or a mapping with `obs, actions, rewards, next_obs, dones`.
            per_member: Deal the rows out, so that each member learns from B / M of its own; all
                learn from all of them otherwise.
        """
        if not isinstance(batch, TransitionBatch):
            seeds = self.model.num_seeds
            batch = TransitionBatch.from_mapping(batch, gamma=1.0, num_seeds=seeds)
        rows = batch_rows(batch)
        members = self.model.num_ensembles if per_member else 1
        share = rows.shape[1] // members
        if share == 0:
            raise DataError(
                f"a batch of {rows.shape[1]} rows cannot be dealt out to {members} members; draw "
                "num_ensembles * model_batch_size rows"
            )
        dealt = rows[:, : members * share].view(rows.shape[0], members, share, -1)
        return UpdateResult(metrics=Metrics(self.run_step(dealt, None)))

    def step(self, rows: Tensor, active: Tensor | None = None) -> dict[str, Tensor]:
        """Take one gradient step on `[S, 1 or M, B, W]`, for the seeds that are `active` `[S]`.

        Tensor operations only, so that it can be compiled.
        """
        metrics = mopo_model_loss(self.model, rows, self.config.model_nll_beta)
        self.optimizer.minimize(metrics["mopo_model_loss"], active)
        return {name: value.detach() for name, value in metrics.items()}

    def fit_statistics(self, rows: Tensor, index: Tensor | None = None) -> None:
        """Standardise by mean and deviation of `rows` `[S or 1, N, W]`, or some of them.

        Args:
            rows: The table.
            index: Rows of each seed `[S, n]`.
        """
        fit_statistics(self.model, rows, index)

    # Fitting until the hold-out error stays

    def fit(
        self,
        rows: Tensor,
        on_epoch: Callable[[DynamicsTrainer], None] | None = None,
        updates: int | None = None,
    ) -> dict[str, Tensor]:
        """Fit all members until no hold-out error gets better; reads one number back per epoch.

        Args:
            rows: The table `[S, N, W]`, or `[1, N, W]` for all seeds.
            on_epoch: Called after each epoch but the last, for instance to save.
            updates: Take so many gradient steps instead, whatever the hold-out error does; the last
                epoch is cut short.

        Returns:
            `holdout_error [S, M]` of standardised targets, `epochs [S]`, the rows that were
            `held_out` `[S, H]`, and the metrics of the last gradient step `[S]`.

        Raises:
            DataError: When the rows are too few to hold some out, or are of another width.
        """
        held_out, kept = self._split(rows)
        if self.epoch.value == 0:
            self._begin(rows, held_out, kept)
        metrics: dict[str, Tensor] = {}
        while (running := int(self.active.sum())) > 0:
            if self.epoch.value and on_epoch is not None:
                on_epoch(self)
            # All active is the common case, and a mask costs three copies of the parameters.
            mask = None if running == self.model.num_seeds else self.active
            done = self.epoch.value * self.epoch_steps(rows)
            metrics = self._run_epoch(rows, kept, mask, None if updates is None else updates - done)
            self._note(self.holdout_errors(rows, held_out), self.epoch_steps(rows))
            if updates is not None:
                self.active.fill_(done + self.epoch_steps(rows) < updates)
        self._finish()
        summary = {"holdout_error": self.best_error, "epochs": self.epochs, "held_out": held_out}
        return summary | metrics

    def epoch_steps(self, rows: Tensor) -> int:
        """Return the gradient steps of one epoch on the table `rows`."""
        count = rows.shape[1]
        return -(-(count - self._num_held_out(count)) // self.config.model_batch_size)

    def require_rows(self, count: int) -> None:
        """Refuse fewer transitions than can be split.

        Raises:
            DataError: Saying how many it takes.
        """
        ratio = self.config.model_holdout_ratio
        if self._num_held_out(count) < 1:
            raise DataError(
                f"the dynamics ensemble cannot be fitted to {count} transitions: "
                f"model_holdout_ratio = {ratio} of them must be at least one; "
                f"give {int(-(-1 // ratio))} or more, or raise model_holdout_ratio"
            )

    def _num_held_out(self, count: int) -> int:
        share = int(count * self.config.model_holdout_ratio)
        return min(share, self.config.model_holdout_max)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers `[S, H]` to hold out and `[S, n]` to fit on, the same for a whole fit."""
        count = rows.shape[1]
        width = 2 * self.model.obs_dim + self.model.action_dim + 2
        if rows.shape[2] != width or rows.shape[0] not in (1, self.model.num_seeds):
            raise DataError(
                f"the table of transitions is {tuple(rows.shape)}, the dynamics ensemble takes "
                f"[{self.model.num_seeds} or 1, N, {width}]; make it with model_rows"
            )
        self.require_rows(count)
        return self._held_out(count)

    def _held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Take one row of each of H stretches of the table, chosen once and for all.

        A row keeps its place in the table, and the numbers drawn for a stretch do not depend on
        how many follow.  Of more stretches than may be held out those with the least number count:
        a later stretch may take an earlier one's place, never the other way round.
        """
        ratio, most = self.config.model_holdout_ratio, self._num_held_out(count)
        stretches = int(count * ratio)
        self.rng.seek(0)
        within, rank = self.rng.uniform(stretches), self.rng.uniform(stretches)  # [S, stretches]
        bounds = torch.arange(stretches + 1, device=within.device, dtype=torch.float64) / ratio
        first = bounds.ceil().long().clamp(max=count)
        row = first[:-1] + (within * (first[1:] - first[:-1])).long()
        held = row.gather(1, rank.argsort(dim=1, stable=True)[:, :most])
        is_held = torch.zeros(held.shape[0], count, dtype=torch.int8, device=held.device)
        order = is_held.scatter_(1, held, 1).argsort(dim=1, stable=True)
        return held, order[:, : count - most]

    @torch.no_grad()
    def _begin(self, rows: Tensor, held_out: Tensor, kept: Tensor) -> None:
        self.fit_statistics(rows, kept)
        self.optimizer.reset()
        for kept_tensor, now in zip(self.best.tensors, self.optimizer.parameters, strict=True):
            kept_tensor.copy_(now)
        error = self.holdout_errors(rows, held_out)
        self.best_error.copy_(error.nan_to_num(_WORST, _WORST))
        self.mark.copy_(self.best_error.mean(1))
        self.stale.zero_()
        self.epochs.zero_()
        self.active.fill_(True)

    def _run_epoch(
        self, rows: Tensor, kept: Tensor, mask: Tensor | None, most: int | None
    ) -> dict[str, Tensor]:
        """Take the gradient steps of one epoch, or the first few of them."""
        size, total = self.config.model_batch_size, kept.shape[1]
        steps = self.epoch_steps(rows)
        index = self._epoch_order(total)  # [S, M, n]
        fill = index.repeat(1, 1, -(-size * steps // total))[..., : size * steps]
        chosen = take_rows(kept.unsqueeze(-1), fill.flatten(1)).view_as(fill)
        table, shift = rows.flatten(0, 1), rows.shape[1] if rows.shape[0] > 1 else 0
        first = torch.arange(chosen.shape[0], device=rows.device).view(-1, 1, 1) * shift
        metrics: dict[str, Tensor] = {}
        for part in torch.split(chosen + first, size, 2)[:most]:
            batch = table.index_select(0, part.flatten()).view(*part.shape, -1)
            metrics = self.run_step(batch, mask)
        return metrics

    def _epoch_order(self, total: int) -> Tensor:
        """In which order each member sees the rows in this epoch, `[S, M, n]`."""
        members, start = self.model.num_ensembles, (self.num_fits.value + 1) * _FIT
        self.rng.seek(start + (self.epoch.value + 1) * _EPOCH)
        order = self.rng.permutation(total, members)
        if self.config.model_bootstrap == "shuffle":
            return order
        self.rng.seek(start + 1)  # the same draw in every epoch of a fit
        return self.rng.integers(total, members, total).gather(2, order)

    @torch.no_grad()
    def output_errors(self, rows: Tensor, index: Tensor) -> Tensor:
        """Mean squared error of every member and output, `[S, M, O]`, of standardised targets.

        Args:
            rows: The table.
            index: Rows of it `[S, H]`.
        """
        model = self.model
        size = model.obs_dim + model.action_dim
        held = take_rows(rows.expand(index.shape[0], -1, -1), index).unsqueeze(1)
        mean = model.members().standardised(held[..., :size]).mean
        target = (model.targets(held) - model.target_mean) / model.target_scale
        return (mean - target).square().mean(2)

    def holdout_errors(self, rows: Tensor, index: Tensor) -> Tensor:
        """Mean of `output_errors` over the outputs, `[S, M]`."""
        return self.output_errors(rows, index).mean(2)

    @torch.no_grad()
    def _note(self, error: Tensor, steps: int) -> None:
        """Keep the members that got better, and stop seeds in which none did for long enough."""
        config = self.config
        # A seed that rests keeps weights and error, so nothing of it can get better.
        better = error < self.best_error  # [S, M]
        self.best_error.copy_(torch.where(better, error, self.best_error))
        for kept, now in zip(self.best.tensors, self.optimizer.parameters, strict=True):
            kept.copy_(torch.where(better.view(*better.shape, 1, 1), now, kept))
        reached = self.best_error.mean(1)
        gain = (config.model_min_improvement * self.mark).clamp(min=config.model_min_gain)
        passed = reached < self.mark - gain  # [S]
        self.mark.copy_(torch.where(passed, reached, self.mark))
        self.epochs += self.active
        self.stale.copy_(torch.where(passed, 0, self.stale + steps))
        patience = max(config.model_patience * steps, config.model_patience_updates)
        self.active &= self.stale < patience
        if config.model_max_epochs is not None:
            self.active &= self.epochs < config.model_max_epochs
        self.epoch.value += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """Go back to each member's best weights and choose the elites."""
        for kept, now in zip(self.best.tensors, self.optimizer.parameters, strict=True):
            now.copy_(kept)
        order = self.best_error.argsort(dim=1, stable=True)
        self.model.elites.copy_(order[:, : self.model.num_elites])
        self.model.fitted.fill_(1)
        self.num_fits.value += 1
        self.epoch.value = 0
