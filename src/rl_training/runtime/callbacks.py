"""Who may stop a run or change its course: callbacks, early stopping, signals.

Callbacks observe a run, and may ask it to stop, save, evaluate or change its learning rate.  Each
request is carried out at the end of the pass in which it is made, in the run's fixed order.  A
callback cannot change a parameter: the learner that it sees is a view.
"""

from __future__ import annotations

import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_training.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rl_training.algorithms.base import AnyLearner
    from rl_training.algorithms.config import EarlyStopping


class LearnerView:
    """What a callback sees of the learner; everything it returns is a copy."""

    def __init__(self, learner: AnyLearner) -> None:
        self._learner = learner

    @property
    def num_updates(self) -> int:
        """Updates done so far."""
        return self._learner.num_updates.value

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the method."""
        return self._learner.config.model_dump()

    def networks(self) -> dict[str, torch.nn.Module]:
        """Return copies of the networks; parameters have the seeds as their first axis."""
        import copy

        return {n: copy.deepcopy(getattr(self._learner, n)) for n in self._learner.network_names}

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        """Choose the best actions for `obs` `[S, n, ...]`, in learner units."""
        import torch

        with torch.inference_mode():
            return self._learner.act(obs.to(self._learner.device), explore=False)


@dataclass
class TrainerState:
    """What a callback sees of a run, and what it may ask for."""

    algo: str
    """Name of the method."""
    env_id: str
    """The task."""
    seeds: tuple[int, ...]
    """The seeds that train side by side."""
    run_dir: Path
    """The run's folder."""
    total_timesteps: int
    """Step at which the run ends."""
    step: int = 0
    """Steps done so far, per seed."""
    start_step: int = 0
    """Step at which this process started: 0, or where it resumed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest value of every metric, averaged over seeds."""
    stop_reason: str | None = None
    """Why the run is to stop; None while it continues."""
    learner: LearnerView | None = None
    """The learner, to look at; None before the run begins."""
    learning_rate_factor: float = 1.0
    """Factor on all learning rates, besides their schedule; part of the checkpoint."""
    wants_save: bool = False
    """Whether a checkpoint was asked for; see `request_save`."""
    wants_evaluation: bool = False
    """Whether an evaluation was asked for; see `request_evaluation`."""
    to_log: dict[str, float] = field(default_factory=dict)
    """Numbers that `log` was given and that are not written yet."""

    def request_stop(self, reason: str) -> None:
        """Ask the run to end after the current step; it is saved as usual."""
        self.stop_reason = self.stop_reason or reason

    def request_save(self) -> None:
        """Ask for a checkpoint after the current step."""
        self.wants_save = True

    def request_evaluation(self) -> None:
        """Ask for an evaluation after the current step."""
        self.wants_evaluation = True

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply every learning rate by `factor`, besides its schedule, from the next update on.

        Raises:
            ConfigError: When the factor is not a number above 0.
        """
        if not 0 < factor < float("inf"):
            raise ConfigError(f"scale_learning_rate(factor) must be > 0 and finite, got {factor!r}")
        self.learning_rate_factor = float(factor)

    def log(self, values: Mapping[str, float]) -> None:
        """Write numbers of your own to the run's log, as a line of kind `callback`."""
        self.to_log |= {name: float(value) for name, value in values.items()}


class Callback:
    """Base of callbacks; override what you need."""

    def on_start(self, state: TrainerState) -> None:
        """The run starts or is resumed."""

    def on_step(self, state: TrainerState) -> None:
        """One pass of the loop is done; called often, so be quick."""

    def on_log(self, state: TrainerState, values: Mapping[str, float]) -> None:
        """Metrics were written; `values` are averages over seeds."""

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """An evaluation is done; `returns` holds the episode returns of each seed."""

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:
        """A checkpoint was written, one folder per seed."""

    def on_message(self, state: TrainerState, text: str) -> None:
        """Called with a message for the user."""

    def on_end(self, state: TrainerState) -> None:
        """The run is over, finished or stopped."""


StepFunction: TypeAlias = Callable[[TrainerState], object]
Callbacks: TypeAlias = Callback | StepFunction | Sequence[Callback | StepFunction]


class FunctionCallback(Callback):
    """Calls a function after every pass; the run stops when it returns False."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function

    def on_step(self, state: TrainerState) -> None:
        """Call it."""
        if self.function(state) is False:
            name = getattr(self.function, "__name__", "the callback")
            state.request_stop(f"{name} returned False")


def as_callbacks(given: Callbacks | None) -> tuple[Callback, ...]:
    """Return one callback or function, or a list of them, as callbacks.

    Raises:
        ConfigError: When one is neither.
    """
    if given is None:
        return ()
    listed = list(given) if isinstance(given, Sequence) else [given]
    return tuple(_as_callback(one) for one in listed)


def _as_callback(given: object) -> Callback:
    if isinstance(given, Callback):
        return given
    if isinstance(given, type) and issubclass(given, Callback):
        raise ConfigError(
            f"callbacks: {given.__name__} is a class; give an instance, {given.__name__}()"
        )
    if callable(given):
        return FunctionCallback(given)
    raise ConfigError(
        "callbacks must be rl_training.Callback objects or functions of the run's state, got "
        f"{given!r}"
    )


class StopOnReturn(Callback):
    """Stops once the mean evaluation return has reached a target several times in a row."""

    def __init__(self, target: float, patience: int = 1) -> None:
        self.target, self.patience, self._count = target, patience, 0

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:  # noqa: ARG002
        """Count evaluations at the target."""
        reached = state.metrics["eval_return_mean"] >= self.target
        self._count = self._count + 1 if reached else 0
        if self._count >= self.patience:
            state.request_stop(f"eval_return_mean reached {self.target:g}")


class SaveEvery(Callback):
    """Asks for a checkpoint every `steps` steps, besides those of `checkpoint_interval`."""

    def __init__(self, steps: int) -> None:
        self.steps, self._next = steps, steps

    def on_start(self, state: TrainerState) -> None:
        """Start counting at the run's step."""
        self._next = (state.step // self.steps + 1) * self.steps

    def on_step(self, state: TrainerState) -> None:
        """Ask when it is time."""
        if state.step >= self._next:
            self._next = (state.step // self.steps + 1) * self.steps
            state.request_save()


class PruneTrial(Callback):
    """Reports evaluations to an Optuna trial and stops the run where it would be pruned."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:  # noqa: ARG002
        """Report the mean return at this step."""
        self.trial.report(state.metrics["eval_return_mean"], state.step)
        if self.trial.should_prune():
            state.request_stop("pruned by Optuna")


_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "eval_return_mean": statistics.fmean,
    "eval_return_min": min,
    "eval_return_median": statistics.median,
}


class StopRule:
    """Decides after each evaluation whether a run has reached its target, or gains nothing more."""

    def __init__(self, settings: EarlyStopping | None) -> None:
        self.settings = settings
        self.best: float | None = None
        self.streak = 0

    def judge(self, step: int, returns: Sequence[Sequence[float]]) -> str | None:
        """Take in an evaluation (episode returns per seed) and return a reason to stop, or None."""
        if self.settings is None:
            return None
        summary = _SUMMARIES[self.settings.metric]
        value = statistics.fmean([summary(episodes) for episodes in returns])
        reason = self._reached(value) if self.settings.target is not None else self._stalled(value)
        return reason if step >= self.settings.min_steps else None

    def _reached(self, value: float) -> str | None:
        assert self.settings is not None
        assert self.settings.target is not None
        sign = 1 if self.settings.mode == "max" else -1
        self.streak = self.streak + 1 if sign * (value - self.settings.target) >= 0 else 0
        if self.streak < self.settings.patience:
            return None
        return f"{self.settings.metric} {value:.1f} reached the target {self.settings.target:g}"

    def _stalled(self, value: float) -> str | None:
        assert self.settings is not None
        sign = 1 if self.settings.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.settings.min_delta:
            self.best, self.streak = value, 0
            return None
        self.streak += 1
        if self.streak < self.settings.patience:
            return None
        return f"{self.settings.metric} gained nothing in {self.streak} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's memory."""
        return {"best": self.best, "streak": self.streak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rule's memory."""
        self.best, self.streak = state["best"], state["streak"]


class SignalFlag:
    """Name of the signal that arrived (SIGTERM, SIGINT, SIGUSR1), or None.

    The first one is remembered, and the loop saves a checkpoint at its next step; from then on the
    default handlers are back, so a second one ends the process at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None


@contextmanager
def watch_signals() -> Iterator[SignalFlag]:
    """Catch stop signals while the block runs; outside the main thread this does nothing."""
    flag = SignalFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    watched = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGUSR1"):
        watched.append(signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in watched}

    def remember(number: int, _frame: FrameType | None) -> None:
        flag.received = signal.Signals(number).name
        for other, handler in before.items():
            signal.signal(other, handler)

    for number in watched:
        signal.signal(number, remember)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
