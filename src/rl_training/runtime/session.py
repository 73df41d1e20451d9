"""The run: step counter, logs, evaluation, checkpoints and reasons to stop.

A loop registers its parts, calls `begin`, and then, once per pass, `advance` and `tick`; everything
periodic happens in `tick`, in one fixed order: log, evaluate, save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from rl_training.algorithms.base import AnyLearner, UpdateResult
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.checkpointing import LoadedCheckpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import MetricLogger, open_loggers
from rl_training.experiment.runs import member_folders
from rl_training.experiment.summary import summarize_group, write_summary
from rl_training.runtime.callbacks import (
    Callback,
    LearnerView,
    SignalFlag,
    StopRule,
    TrainerState,
)
from rl_training.runtime.checkpoints.saver import (
    ADJUSTMENTS,
    SUCCESSES,
    Part,
    Saver,
    restore_parts,
)
from rl_training.runtime.checkpoints.warm_start import Origin
from rl_training.runtime.compile.runner import Accelerator
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.health.diagnostics import require_finite_metrics
from rl_training.runtime.health.monitors import Monitors, largest_reward
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.results import TrainingInterrupted, TrainResult, summarize_returns
from rl_training.state import Counter, Stateful


class Clock(Stateful):
    """Steps done, steps planned, and the best evaluation of each member."""

    def __init__(self, planned: int, num_seeds: int, eval_episodes: int) -> None:
        self.step = Counter()
        self.planned = Counter(planned)
        self.evaluated_at = Counter(-1)
        self.best_return = torch.full((num_seeds,), -torch.inf, dtype=torch.float64)
        self.best_step = torch.full((num_seeds,), -1, dtype=torch.int64)
        shape = (num_seeds, eval_episodes)
        self.last_returns = torch.full(shape, torch.nan, dtype=torch.float64)


class Successes(Stateful):
    """Whether the episodes of the last evaluation succeeded; -1 where the task does not say."""

    def __init__(self, num_seeds: int, eval_episodes: int) -> None:
        self.last = torch.full((num_seeds, eval_episodes), -1.0, dtype=torch.float64)

    def note(self, successes: Sequence[Sequence[float]] | None) -> None:
        """Keep what an evaluation gave."""
        if successes is None:
            self.last.fill_(-1.0)
        else:
            self.last.copy_(torch.tensor(successes, dtype=torch.float64))

    def of(self, index: int) -> list[float] | None:
        """Return those of a member, where the task says so."""
        found: list[float] = self.last[index].tolist()
        return None if -1.0 in found else found


class Adjustments(Stateful):
    """What callbacks have changed about the run."""

    def __init__(self) -> None:
        self.learning_rate_factor = torch.ones((), dtype=torch.float64)


class Session:
    """One run in progress."""

    def __init__(
        self,
        config: TrainConfig,
        spec: AlgorithmSpec,
        env_spec: EnvSpec,
        folder: AbstractContextManager[Path],
        *,
        callbacks: Sequence[Callback] = (),
        signals: SignalFlag | None = None,
        resume_level: Callable[[], str],
        restore_from: Sequence[LoadedCheckpoint] = (),
        continues: Path | None = None,
        origin: Origin | None = None,
        stop_at: int | None = None,
    ) -> None:
        self.config, self.spec, self.env_spec = config, spec, env_spec
        self.seeds = config.all_seeds
        self.total = config.total_timesteps
        self.clock = Clock(self.total, len(self.seeds), config.eval_episodes)
        self.stop_rule = StopRule(config.algo_config.early_stopping)
        self.adjustments = Adjustments()
        self.successes = Successes(len(self.seeds), config.eval_episodes)
        self.parts: dict[str, Part] = {
            "clock": self.clock,
            "stop_rule": self.stop_rule,
            ADJUSTMENTS: self.adjustments,
            SUCCESSES: self.successes,
        }
        self.callbacks = tuple(callbacks)
        # Most observe events only, and a call per step would cost a fast loop dearly.
        unwatched = Callback.on_step  # a hook may also be set on the object itself
        self._watchers = [
            c for c in callbacks if getattr(c.on_step, "__func__", 0) is not unwatched
        ]
        self.state = TrainerState(
            config.algo, config.env_id, self.seeds, Path(), total_timesteps=self.total
        )
        self.accelerator: Accelerator
        self.counts: Callable[[], dict[str, float]] = dict
        """Numbers of the loop, the same for all seeds, for the log and the result."""
        self._signals = signals or SignalFlag()
        self._restore_from, self._continues = restore_from, continues
        self._origin = origin
        self._stop_at = stop_at
        self._previous = self._next_event = 0
        self._folder = folder
        self._resume_level = resume_level
        self._resources = ExitStack()
        self.vector_note: str | None = None
        """How the environments run, said at the start."""
        self.has_begun = False
        """Whether the run has its folder and its logs, until they are closed."""
        self._loggers: list[MetricLogger] = []
        self._started = self._last_save = time.monotonic()
        self._last_line = (0.0, 0, 0.0)
        """Seconds, step and speed of the last line of metrics, or of the start."""

    # Before the first step

    def register(self, learner: AnyLearner, **parts: Part) -> None:
        """Name the parts of the run that a checkpoint must hold."""
        self.learner = learner
        self.recorder = MetricRecorder(list(self.spec.metrics), len(self.seeds), learner.device)
        self.parts |= {
            "learner": learner,
            "recorder": self.recorder,
            "accelerator": self.accelerator,
            **parts,
        }

    @cached_property
    def _evaluator(self) -> Evaluator:
        """Runs the episodes of evaluations; made for the first one."""
        config = self.config
        evaluator = Evaluator(
            config.env_id,
            config.env_kwargs,
            self.seeds,
            deterministic=config.eval_deterministic,
            mode=config.vector_mode,
            threads=config.env_threads,
        )
        self._resources.callback(evaluator.close)
        return evaluator

    @cached_property
    def _monitors(self) -> Monitors:
        """Look for signs of divergence in lines of the log; made for the first one."""
        settings = self.learner.config
        return Monitors(
            getattr(settings, "gamma", 1.0),
            lambda: largest_reward(self.parts.get("replay")),
            one_epoch=getattr(settings, "update_epochs", 0) == 1,
        )

    @property
    def folders(self) -> list[Path]:
        """Folder of each member; the run's own for a single one."""
        return list(self._folders)

    @property
    def has_origin(self) -> bool:
        """Whether the run began with the networks of another."""
        return self.config.from_checkpoint is not None

    def begin(
        self,
        start: Callable[[], None],
        see_data: Callable[[], None] = lambda: None,
        notes: Sequence[str] = (),
    ) -> None:
        """Take the run up from its checkpoint, or begin a new one.

        The folder is made here, when everything else has been: a mistake leaves nothing behind.

        Args:
            start: Called when a new run begins.
            see_data: Called after it, unless the learner has its statistics from another run.
            notes: What there is to say about the data; also kept in the log and in checkpoints.
        """
        messages = [] if self._origin is None else self._origin.take_over(self.learner, self.parts)
        if self._restore_from:
            messages += restore_parts(self._restore_from, self.parts)
        self.run_dir = self.state.run_dir = self._resources.enter_context(self._folder)
        self._folders = member_folders(self.run_dir, self.config)
        self._saver = Saver(self.config, self.env_spec, self._folders, self._resume_level, notes)
        messages += self._start_or_take_up(start, see_data)
        step = self.clock.step.value
        self._previous = self.state.step = self.state.start_step = step
        self._last_line = (time.monotonic() - self._started, step, 0.0)
        is_new = not self._restore_from or self._continues is not None
        offsets = [] if is_new else [c.header["log_offset"] for c in self._restore_from]
        self._loggers = open_loggers(self.config, self.run_dir, self._folders, offsets, step)
        self.has_begun = True
        self.state.learner = LearnerView(self.learner)
        self.state.learning_rate_factor = float(self.adjustments.learning_rate_factor)
        self.learner.rate_factor = self.state.learning_rate_factor
        messages += [logger.note for logger in self._loggers if logger.note is not None]
        for logger in self._loggers if not offsets else ():
            logger.log_notes(notes)
        for callback in self.callbacks:
            callback.on_start(self.state)
        ways = [] if self.vector_note is None else [self.vector_note]
        for message in (*messages, *ways, *self._warnings(), *notes):
            self.say(message)
        if self._origin is not None:
            # What was taken over is worth this much; saved, the run needs the other no more.
            self.evaluate()
        if self._origin is not None or self._continues is not None:
            self.save()

    def _start_or_take_up(
        self, start: Callable[[], None], see_data: Callable[[], None]
    ) -> list[str]:
        """Begin a new run, or continue after its checkpoints; returns messages."""
        if self._restore_from:
            return self._saver.take_up(self._restore_from, self._continues)
        start()
        if self._origin is None:
            see_data()
        else:
            self._saver.origins = self._origin.records()
        return []

    def _warnings(self) -> list[str]:
        messages = self._saver.space_warnings(self.parts)
        if self.step >= self.total:
            messages.append(
                f"the run is complete at step {self.step}; give it a larger total_timesteps to "
                "continue"
            )
        if self._resume_level() == "restart":
            messages.append(
                f"{self.config.env_id} cannot be saved and restored: a resumed run will begin a "
                "new episode there, so it will not equal an uninterrupted one"
            )
        return messages

    # During the run

    @property
    def step(self) -> int:
        """Environment (or gradient) steps done, per seed."""
        return self.clock.step.value

    @property
    def progress(self) -> float:
        """Share of the planned run that is done; an extended run stays at 1."""
        return self.progress_at(self.clock.step.value)

    def progress_at(self, step: int) -> float:
        """Share of the planned run that is done at `step`."""
        return min(1.0, step / self.clock.planned.value)

    def next_stop(self) -> int:
        """Return the step up to which nothing periodic is due."""
        due = [self.total, self._next_periodic()]
        return min(due if self._stop_at is None else [*due, max(self._stop_at, self.step + 1)])

    def running(self) -> bool:
        """Tell whether the loop should take another step."""
        return self.step < self.total and self.state.stop_reason is None

    def advance(self, steps: int) -> None:
        """Count steps."""
        self._previous = self.clock.step.value
        self.clock.step.value += steps

    def crossed(self, interval: int) -> bool:
        """Tell whether the last advance reached or passed a multiple of `interval`."""
        return interval > 0 and self.step // interval > self._previous // interval

    def record(self, result: UpdateResult) -> None:
        """Take in the metrics of an update."""
        self.recorder.record(result)

    def tick(self) -> None:
        """Do the periodic work that is due at this step."""
        self.state.step = self.step
        if self.step < self._next_event and not self._signals.received:
            for callback in self._watchers:
                callback.on_step(self.state)
            if self._watchers and (self._signals.received or self._is_asked()):
                self.pause(self._obey_callbacks())
            return
        if self.crossed(self.config.log_interval):
            self.log()
        new_best = False
        if self.crossed(self.config.algo_config.eval_interval):
            new_best = self.evaluate()
        for callback in self._watchers:
            callback.on_step(self.state)
        new_best = self._obey_callbacks() or new_best
        self.pause(new_best or self.crossed(self.config.checkpoint_interval))
        if self._stop_at is not None and self.step >= self._stop_at:
            self.state.request_stop("stop_at")
        self._next_event = self._next_due()

    def _is_asked(self) -> bool:
        """Tell whether callbacks have asked for something but to stop."""
        state = self.state
        rate_moved = state.learning_rate_factor != self.learner.rate_factor
        return bool(rate_moved or state.wants_save or state.wants_evaluation or state.to_log)

    def _obey_callbacks(self) -> bool:
        """Do what callbacks have asked for; returns whether to save."""
        state = self.state
        self.adjustments.learning_rate_factor.fill_(state.learning_rate_factor)
        self.learner.rate_factor = state.learning_rate_factor
        self._write_for_callbacks()
        due = state.wants_save
        if state.wants_evaluation:
            due = self.evaluate() or due
        state.wants_save = state.wants_evaluation = False
        return due

    def _write_for_callbacks(self) -> None:
        values, self.state.to_log = self.state.to_log, {}
        if values:
            self.log_extra("callback", [values] * len(self.seeds))

    def pause(self, due: bool = False) -> None:
        """Save when that is due, and leave when a signal asks for it.

        Long work at the beginning of a pass calls this too; resumed there, it must know from its
        own state how far it was.
        """
        interrupted = self._signals.received is not None
        if due or interrupted or self._overdue():
            self.save()
        if interrupted:
            self.close()
            raise TrainingInterrupted(
                str(self._signals.received), self.run_dir, self._saver.newest[0], self.step
            )

    def _next_due(self) -> int:
        """Return the first step at which anything periodic is due; until then `tick` may pass."""
        if self._stop_at is not None or self.config.checkpoint_minutes is not None:
            return 0
        return self._next_periodic()

    def _next_periodic(self) -> int:
        config = self.config
        intervals = (
            config.log_interval,
            config.algo_config.eval_interval,
            config.checkpoint_interval,
        )
        return min((self.step // every + 1) * every for every in intervals if every > 0)

    def _overdue(self) -> bool:
        minutes = self.config.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._last_save > 60 * minutes

    def log(self) -> None:
        """Write the averages since the last line; stops the run when one is not finite."""
        rows = self.recorder.flush()
        require_finite_metrics(self, rows)
        collector = self.parts.get("collector")
        elapsed = time.monotonic() - self._started
        speed = self._speed_since_last_line(elapsed)
        for index, (row, logger) in enumerate(zip(rows, self._loggers, strict=True)):
            row |= self.learner.schedule_values(index)
            if collector is not None:
                row |= collector.summary(index)  # type: ignore[attr-defined]
            row |= self._counts() | {
                "time/steps_per_second": speed,
                "time/elapsed_seconds": elapsed,
            }
            logger.log("train", self.step, row)
        self._publish(rows)
        for sign in self._monitors.look(rows):
            self.say(f"step {self.step}: {sign}")
        for callback in self.callbacks:
            callback.on_log(self.state, self.state.metrics)

    def _speed_since_last_line(self, elapsed: float) -> float:
        last_elapsed, last_step, speed = self._last_line
        if self.step > last_step:  # The last line of a run may be of a step that has one already.
            speed = (self.step - last_step) / max(elapsed - last_elapsed, 1e-9)
        self._last_line = (elapsed, self.step, speed)
        return speed

    def log_extra(self, kind: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Write a line of another kind, a mapping per seed, beside those of training."""
        for row, logger in zip(rows, self._loggers, strict=True):
            logger.log(kind, self.step, row)
        self._publish(rows)

    def _publish(self, rows: Sequence[Mapping[str, float]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        for name in names:
            values = [row[name] for row in rows if name in row]
            self.state.metrics[name] = float(np.mean(values))

    def evaluate(self) -> bool:
        """Evaluate every seed; returns whether one of them has a new best."""
        if self.config.eval_episodes == 0:
            return False
        returns = self._evaluator.evaluate(self.learner, self.config.eval_episodes, self.step)
        self.clock.last_returns.copy_(torch.tensor(returns, dtype=torch.float64))
        self.clock.evaluated_at.value = self.step
        self.successes.note(self._evaluator.successes)
        rows = [
            summarize_returns(episodes, self.config.scores, self.successes.of(index))
            for index, episodes in enumerate(returns)
        ]
        for row, logger in zip(rows, self._loggers, strict=True):
            logger.log("eval", self.step, row)
        means = torch.tensor([row["eval_return_mean"] for row in rows], dtype=torch.float64)
        better = means > self.clock.best_return
        self.clock.best_step[better] = self.step
        self.clock.best_return.copy_(torch.maximum(means, self.clock.best_return))
        self._publish(rows)
        for callback in self.callbacks:
            callback.on_evaluation(self.state, returns)
        self._write_for_callbacks()  # also after the last evaluation, which no pass follows
        reason = self.stop_rule.judge(self.step, returns)
        if reason is not None:
            self.state.request_stop(reason)
        return bool(better.any())

    def save(self) -> None:
        """Write a checkpoint per seed and remove those no longer kept."""
        for logger in self._loggers:
            logger.sync()
        paths = self._saver.save(
            self.step,
            self.parts,
            log_offsets=[logger.offset for logger in self._loggers],
            best_steps=self.clock.best_step.tolist(),
        )
        self._last_save = time.monotonic()
        for callback in self.callbacks:
            callback.on_checkpoint(self.state, paths)

    @property
    def newest_checkpoints(self) -> list[Path]:
        """The newest checkpoint of each seed; none before the first."""
        return self._saver.newest

    def say(self, text: str) -> None:
        """Tell the user something."""
        for callback in self.callbacks:
            callback.on_message(self.state, text)

    # After the last step

    def finish(self) -> TrainResult:
        """Evaluate and save the final state, and return where everything is."""
        unevaluated = self.clock.evaluated_at.value != self.step
        cut = self.state.stop_reason == "stop_at"
        if unevaluated and not cut:
            self.evaluate()
        # An evaluation after the last checkpoint changes the state, so it is saved again.
        if (unevaluated and not cut) or not self._saver.is_saved(self.step):
            self.save()
        result = self._result()  # a group's summary is written while the folder is still held
        self.close()
        return result

    def _result(self) -> TrainResult:
        per_seed = tuple(
            TrainResult(folder, path, self._final_metrics(index), self.state.stop_reason)
            for index, (folder, path) in enumerate(
                zip(self._folders, self._saver.newest, strict=True)
            )
        )
        if len(per_seed) == 1:
            return per_seed[0]
        summary = summarize_group(self.config.members, self._folders, [r.metrics for r in per_seed])
        write_summary(self.run_dir, summary)
        names = per_seed[0].metrics
        means = {name: float(np.mean([r.metrics[name] for r in per_seed])) for name in names}
        return TrainResult(
            self.run_dir,
            per_seed[0].checkpoint_path,
            means | summary.metrics(),
            self.state.stop_reason,
            per_seed,
        )

    def _final_metrics(self, index: int) -> dict[str, float]:
        metrics = {"global_step": float(self.step)}
        evaluated = self.clock.evaluated_at.value >= 0
        returns = self.clock.last_returns[index].tolist() if evaluated else []
        metrics |= summarize_returns(returns, self.config.scores, self.successes.of(index))
        return metrics | self._counts()

    def _counts(self) -> dict[str, float]:
        return self.counts() | {"gradient_steps": float(self.recorder.total_gradient_steps.value)}

    def close(self) -> None:
        """Close logs and evaluation environments and let go of the folder; may be called twice."""
        for logger in self._loggers:
            logger.close()
        self._resources.close()
        if not self.has_begun:
            return
        self.has_begun = False
        for callback in self.callbacks:
            callback.on_end(self.state)
