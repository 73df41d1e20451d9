"""Where a method's batches come from: its own replay, recorded data, or both.

These are the parts of a method's settings that its loop reads.  A learner names its part in
`parts`; `algo_kwargs` holds their fields beside the learner's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from rl_training.data.datasets.config import DatasetSettings, DatasetStorage
from rl_training.data.replay.hindsight import Strategy
from rl_training.validation import (
    LARGEST_INT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveInt,
    Settings,
    StrictModel,
    Whole,
)

if TYPE_CHECKING:
    from rl_training.algorithms.base import AnyLearner

BatchRatio = Fraction | Literal["union"]
"""Share of a batch from recorded data, or draws from the union of data and experience."""


class Pacing(NamedTuple):
    """How many updates belong to the steps up to `step`: `step // every * times // shared_by`.

    A whole number of the step alone: what is owed needs no account of its own.
    """

    every: int
    times: int
    shared_by: int = 1


class ReplaySettings(Settings):
    """How experience is kept and paced; units are environment steps per seed."""

    buffer_capacity: PositiveInt = 1_000_000
    """Transitions kept; the oldest are overwritten."""
    batch_size: PositiveInt = 256
    """Transitions per gradient step and seed."""
    learning_starts: NonNegativeInt = 1_000
    """Steps of uniformly random actions before the first update."""
    random_action_hold: PositiveInt = 1
    """Steps for which an environment repeats each of these random actions. Longer actions reach
    states that independent ones never do (Dabney et al., 2021, arXiv:2006.01782)."""
    train_frequency: PositiveInt = 1
    """Environment steps between two rounds of updates."""

    @property
    def random_steps(self) -> int:
        """Steps of uniformly random actions."""
        return self.learning_starts

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        raise NotImplementedError

    @property
    def rows_per_update(self) -> int:
        """Transitions drawn for an update, per seed."""
        return self.batch_size

    @property
    def steps_per_update(self) -> int:
        """Steps learned from in an update, per seed."""
        return self.rows_per_update

    @property
    def pacing(self) -> Pacing:
        """When updates are due, were there no `learning_starts`."""
        return Pacing(self.train_frequency, self.updates_per_round)

    @model_validator(mode="after")
    def _capacity_holds_a_batch(self) -> ReplaySettings:
        if self.buffer_capacity < self.batch_size:
            raise ValueError(
                f"buffer_capacity must be >= batch_size ({self.batch_size}), "
                f"got {self.buffer_capacity}"
            )
        return self


class SequenceReplay(ReplaySettings):
    """How experience is kept, drawn and paced by a learner with a memory."""

    batch_size: PositiveInt = 16
    """Sequences per gradient step and seed."""
    batch_length: Annotated[int, Field(ge=2, le=LARGEST_INT), Whole] = 64
    """Steps of a sequence."""
    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; a round is every `train_frequency` steps."""
    train_ratio: PositiveInt | None = None
    """Steps learned from per environment step, in place of `train_frequency` and
    `gradient_updates_per_step`; with 16 sequences of 64, 512 is an update every second step."""

    stored_latents: bool = True
    """Store the belief after each step that was learned from, and start sequences with it;
    otherwise the past of a sequence is not known."""
    newest_first: bool = True
    """Learn from new steps before others are drawn uniformly."""

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        return self.gradient_updates_per_step

    @property
    def steps_per_update(self) -> int:
        """Steps learned from in an update, per seed."""
        return self.batch_size * self.batch_length

    @property
    def pacing(self) -> Pacing:
        """When updates are due; by `train_ratio` where it is given."""
        if self.train_ratio is None:
            return super().pacing
        return Pacing(1, self.train_ratio, self.steps_per_update)

    @model_validator(mode="after")
    def _capacity_holds_a_sequence(self) -> SequenceReplay:
        if self.buffer_capacity < self.batch_length:
            raise ValueError(
                f"buffer_capacity must be >= batch_length ({self.batch_length}), "
                f"got {self.buffer_capacity}"
            )
        return self


class TransitionReplay(ReplaySettings):
    """How experience is kept, drawn and paced by a learner of values."""

    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; with `train_frequency` 1 this is the update-to-data ratio."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping; stops at the end of an episode."""
    prioritized: bool = False
    """Draw transitions by their last TD error (Schaul et al., 2016) instead of uniformly."""
    priority_exponent: NonNegativeFloat = 0.6
    """Exponent of the priorities; 0 draws uniformly."""
    importance_exponent: Fraction = 0.4
    """Exponent of the importance weights at the start; it reaches 1 at the end of the run."""
    hindsight: Strategy | None = None
    """Learn from most transitions as if their goal had been one that their episode achieved: after
    a later step (`future`), the last one (`final`) or any (`episode`). For tasks whose observation
    has `achieved_goal` and `desired_goal` (Andrychowicz et al., 2017); null keeps the goals."""
    hindsight_goals: PositiveInt = 4
    """k: of k + 1 drawn transitions, k have such a goal on average."""
    reward_scale: Number = 1.0
    """Factor on every reward that is learned from; returns are reported without it."""
    reward_shift: Number = 0.0
    """Added to every reward after scaling."""
    random_shift: NonNegativeInt = 0
    """Shift the images of every batch by up to so many pixels along each axis, each sample by its
    own draw (DrQ, Kostrikov et al., 2020; 4 for images of 84 x 84); the replay keeps them as they
    were. 0 does not shift; a task without images refuses any other number."""
    normalize_observations: bool = False
    """Standardise observations by the running mean and deviation of all observations so far;
    the replay keeps raw ones, and the statistics are in the checkpoint."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, clipped to +-10; the
    replay keeps raw rewards, and returns are reported without it."""

    @model_validator(mode="after")
    def _rewards_are_scaled_once(self) -> TransitionReplay:
        changed = self.reward_scale != 1 or self.reward_shift != 0
        if self.normalize_rewards and changed and not isinstance(self, DatasetSettings):
            raise ValueError(
                "normalize_rewards finds the scale of rewards by itself; leave reward_scale and "
                "reward_shift out"
            )
        return self

    @property
    def updates_per_round(self) -> int:
        """Updates every `train_frequency` steps."""
        return self.gradient_updates_per_step


class PriorSettings(DatasetSettings, TransitionReplay):
    """Which prior data to use beside experience, and how much of each batch comes from it.

    What is done to the rewards of the prior data is done to those of the task as well.
    """

    offline_batch_ratio: BatchRatio = 0.5
    """Share of every batch that is drawn from the prior data: 0 ignores it, 1 uses nothing else;
    `union` draws uniformly from prior data and experience together."""
    offline_pretrain_updates: NonNegativeInt = 0
    """Updates on the prior data alone, before the first environment step."""

    @model_validator(mode="after")
    def _rows_can_be_drawn(self) -> PriorSettings:
        require_on_device(self.dataset_storage)
        if self.hindsight is not None:
            raise ValueError(
                "hindsight changes the goals of a run's own transitions alone, not of prior data "
                "beside them; set it to null, or use sac or td3"
            )
        if self.offline_batch_ratio == "union" and self.prioritized:
            raise ValueError(
                "offline_batch_ratio union draws uniformly, so prioritized must be false; give a "
                "share between 0 and 1 to draw the run's own rows by priority"
            )
        return self


class OfflineSettings(DatasetSettings):
    """Which data to learn from, and how batches are drawn; steps are gradient steps."""

    batch_size: PositiveInt = 256
    """Transitions per gradient step and seed."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping; stops at the end of an episode."""


class OnlineSettings(StrictModel):
    """How an offline learner continues online; units are environment steps per seed."""

    offline_batch_ratio: BatchRatio = 0.5
    """Share of every batch that is drawn from the dataset: 0 learns from new experience alone;
    `union` draws uniformly from dataset and experience together."""
    buffer_capacity: PositiveInt = 1_000_000
    """New transitions kept; the oldest are overwritten."""
    learning_starts: NonNegativeInt = 1_000
    """Steps before the first update: the policy's own after a checkpoint, else random ones."""
    train_frequency: PositiveInt = 1
    """Environment steps between two rounds of updates."""
    gradient_updates_per_step: PositiveInt = 1
    """Updates per round; with `train_frequency` 1 this is the update-to-data ratio."""


class OfflineToOnlineSettings(OfflineSettings):
    """Data of an offline learner that may continue online with its own update."""

    online: OnlineSettings | None = None
    """Step environments and learn from them too; null does so only with `from_checkpoint`."""

    @model_validator(mode="after")
    def _fits_going_online(self) -> OfflineToOnlineSettings:
        if self.online is None:
            return self
        require_on_device(self.dataset_storage)
        if self.online.buffer_capacity < self.batch_size:
            raise ValueError(
                f"online.buffer_capacity must be >= batch_size ({self.batch_size}), "
                f"got {self.online.buffer_capacity}"
            )
        return self


class RolloutSettings(Settings):
    """How an on-policy method gathers rollouts, and how often it goes through one."""

    num_steps: PositiveInt = 128
    """Steps of each environment per rollout."""
    update_epochs: PositiveInt = 4
    """Passes over a rollout."""
    minibatch_size: PositiveInt = 256
    """Transitions per gradient step and seed; a last short minibatch is dropped."""


class RolloutStatistics(Settings):
    """What a learner standardises when it prepares a rollout."""

    normalize_observations: bool = False
    """Standardise observations by running statistics, which are part of the checkpoint and move
    once a rollout, after it was learned from."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, clipped to +-10; returns
    are reported without it."""


def replay_settings(config: Settings) -> ReplaySettings | None:
    """Return how experience is kept, mixed and paced; None for a run that keeps none."""
    if isinstance(config, ReplaySettings):
        return config
    if not isinstance(config, OfflineToOnlineSettings) or config.online is None:
        return None
    common = PriorSettings.model_fields.keys() & type(config).model_fields.keys()
    settings = {name: getattr(config, name) for name in common}
    return PriorSettings(**settings | dict(config.online))


def rows_per_update(learner: AnyLearner) -> int:
    """Return how many transitions an update takes, per seed."""
    settings = learner.config
    if isinstance(settings, ReplaySettings):
        return settings.rows_per_update
    return learner.part(OfflineSettings).batch_size


def steps_per_update(learner: AnyLearner) -> int:
    """Return how many steps an update learns from, per seed: a sequence counts for many."""
    settings = learner.config
    if isinstance(settings, ReplaySettings):
        return settings.steps_per_update
    return rows_per_update(learner)


def pretrain_updates(learner: AnyLearner) -> int:
    """Return how many updates a learner does before the first environment step."""
    config = learner.config
    return config.offline_pretrain_updates if isinstance(config, PriorSettings) else 0


def require_on_device(storage: DatasetStorage) -> None:
    """Refuse data on disk where batches hold new experience too; `auto` then means `device`.

    Raises:
        ValueError: When rows are to be mapped.
    """
    # Rows on disk are drawn outside of a compiled update, new ones inside it.
    if storage == "mapped":
        raise ValueError(
            "dataset_storage mapped is for offline training; batches with new experience are drawn "
            "on the device: use device"
        )
