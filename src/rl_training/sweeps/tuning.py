"""Search for settings with Optuna, resumable, with seeds held out for the final figure.

A trial is one job; its seeds are trained side by side.  Optuna lives in this process alone: it
reads evaluations from the runs' logs and asks hopeless runs to stop.  The study is a database file
in its folder, and the sampler of trial n is seeded by n, so that a study that was killed and
resumed continues as it would have.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_training.errors import ConfigError, MissingExtraError, RLTrainingError
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import METRICS_FILE
from rl_training.experiment.runs import member_folders
from rl_training.experiment.statistics import bootstrap_interval, interquartile_mean
from rl_training.experiment.summary import evaluations
from rl_training.rng import derive_seed
from rl_training.sweeps.jobs import Job, Outcome, make_job, write_jobs
from rl_training.sweeps.plan import load_point
from rl_training.sweeps.runners import Runner, do_all
from rl_training.sweeps.search import (
    Dimension,
    make_pruner,
    make_sampler,
    parse_dimension,
    require_known,
)

STUDY_FILE, PLAN_FILE, BEST_FILE = "study.db", "tune.json", "best.yaml"
POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class TunePlan:
    """What is searched, and how."""

    config: str
    search: tuple[str, ...]
    trials: int = 20
    seeds: tuple[int, ...] = (0,)
    """Seeds of every trial."""
    held_out: tuple[int, ...] = (1000, 1001, 1002)
    """Seeds of the final figure, which no trial has seen."""
    overrides: tuple[str, ...] = ()
    sampler: str = "tpe"
    pruner: str = "median"
    sampler_seed: int = 0
    baseline: bool = False
    """Whether the configuration as it was is trained on the held-out seeds too."""

    def dimensions(self) -> list[Dimension]:
        """Return the space.

        Raises:
            ConfigError: For a mistake in it, or in a configuration at its ends.
        """
        found = [parse_dimension(text) for text in self.search]
        require_known(self.sampler, self.pruner, found)
        if self.trials < 1:
            raise ConfigError(f"--trials must be >= 1, got {self.trials}")
        common = sorted(set(self.seeds) & set(self.held_out))
        if common:
            raise ConfigError(
                f"seed {common[0]} is among --seeds and --held-out; the final figure needs seeds "
                "that the search has not seen"
            )
        first = {dimension.key: dimension.ends()[0] for dimension in found}
        for dimension in found:
            for value in dimension.ends():
                config = load_point(self.config, first | {dimension.key: value}, self.overrides)
                _require_evaluations(config)
        return found


def _require_evaluations(config: TrainConfig) -> None:
    if config.eval_episodes == 0:
        raise ConfigError("tune compares evaluations, but eval_episodes is 0; use 5 or more")


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What came of a search."""

    best_trial: int
    best_value: float
    """Of the trials' own seeds: the highest of many, so it flatters."""
    best_settings: dict[str, str]
    finished: int
    pruned: int
    failed: int
    held_out: tuple[float, ...]
    """Final returns on the held-out seeds."""
    baseline: tuple[float, ...] = ()
    config_file: Path = field(default=Path())

    @property
    def figure(self) -> tuple[float, float, float]:
        """Interquartile mean of the held-out returns, and its interval."""
        return iqm_with_interval(self.held_out)


def iqm_with_interval(returns: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean and the ends of its interval."""
    interval = bootstrap_interval(returns, interquartile_mean)
    return float(interquartile_mean(returns)), interval.low, interval.high


@dataclass
class _Trial:
    """A trial in progress."""

    number: int
    handle: Any
    """Optuna's."""
    job: Job
    reported: set[int] = field(default_factory=set)
    log_size: int = -1
    """Of its logs when they were last read: long ones are read only when there is more."""
    pruned: bool = False


class Tuner:
    """A study in a folder."""

    def __init__(
        self, plan: TunePlan, folder: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Open the study, or begin it.

        Raises:
            ConfigError: When the plan cannot be used, or the folder holds another study.
            MissingExtraError: Without Optuna.
        """
        self.plan, self.folder, self._say = plan, folder, say
        self.dimensions = plan.dimensions()
        self.optuna = _import_optuna()
        self._keep_plan()
        storage = f"sqlite:///{(folder / STUDY_FILE).resolve()}"
        self.study = self.optuna.create_study(
            study_name="tune",
            storage=storage,
            direction="maximize",
            load_if_exists=True,
            pruner=make_pruner(self.optuna, plan.pruner, self._steps()),
        )

    def _steps(self) -> int:
        first = {dimension.key: dimension.ends()[0] for dimension in self.dimensions}
        return load_point(self.plan.config, first, self.plan.overrides).total_timesteps

    def _keep_plan(self) -> None:
        """Write the plan, or refuse one that is not the folder's."""
        path = self.folder / PLAN_FILE
        mine = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.plan).items()}
        flexible = ("trials", "held_out", "baseline")
        if path.is_file():
            there = json.loads(path.read_text(encoding="utf-8"))
            different = [k for k in mine if k not in flexible and there.get(k) != mine[k]]
            if different:
                raise ConfigError(
                    f"{self.folder} holds another study: its {different[0]} is "
                    f"{there.get(different[0])!r}, not {mine[different[0]]!r}; give the same, or "
                    "another --output folder"
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(mine, indent=2), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror})") from None

    def run(self, runner: Runner) -> TuneResult:
        """Do the trials that are left, then the final runs.

        Raises:
            RLTrainingError: When no trial came to an end, or a final run failed.
        """
        running = self._unfinished()
        for trial in running:
            self._say(f"trial {trial.number} was under way: it continues")
            runner.start(trial.job)
        while running or len(self.study.get_trials(deepcopy=False)) < self.plan.trials:
            while (
                len(running) < min(runner.slots, self.plan.trials)
                and len(self.study.get_trials(deepcopy=False)) < self.plan.trials
            ):
                running.append(self._begin(runner))
            for trial in running:
                self._watch(trial)
            for job, outcome in runner.ended():
                trial = next(t for t in running if t.job.name == job.name)
                running.remove(trial)
                self._end(trial, outcome)
            time.sleep(POLL_SECONDS)
        return self._conclude(runner)

    def _unfinished(self) -> list[_Trial]:
        """Return the trials that a killed process left behind, to be resumed."""
        state = self.optuna.trial.TrialState.RUNNING
        found = []
        for frozen in self.study.get_trials(deepcopy=False, states=(state,)):
            if len(frozen.params) < len(self.dimensions):
                # Killed while it was asked for: it has no settings to continue with.
                self.study.tell(frozen.number, state=self.optuna.trial.TrialState.FAIL)
                continue
            point = {d.key: d.text_of(frozen.params[d.key]) for d in self.dimensions}
            handle = self.optuna.trial.Trial(self.study, frozen._trial_id)
            reported = set(frozen.intermediate_values)
            job = self._job(f"trial_{frozen.number:04d}", point, self.plan.seeds)
            found.append(_Trial(frozen.number, handle, job, reported))
        return found

    def _begin(self, runner: Runner) -> _Trial:
        number = len(self.study.get_trials(deepcopy=False))
        seed = derive_seed(self.plan.sampler_seed, "tune", number) % 2**31
        self.study.sampler = make_sampler(self.optuna, self.plan.sampler, seed)
        handle = self.study.ask()
        point = {d.key: d.suggest(handle) for d in self.dimensions}
        job = self._job(f"trial_{handle.number:04d}", point, self.plan.seeds)
        self._say(f"trial {handle.number}: {', '.join(f'{k}={v}' for k, v in point.items())}")
        runner.start(job)
        return _Trial(handle.number, handle, job)

    def _job(self, name: str, point: dict[str, str], seeds: Sequence[int]) -> Job:
        config = load_point(self.plan.config, point, self.plan.overrides)
        several = tuple(seeds) if len(seeds) > 1 else None
        job = make_job(config.replace(seed=seeds[0], seeds=several), self.folder, name)
        write_jobs([job])
        return job

    def _watch(self, trial: _Trial, *, ended: bool = False) -> None:
        """Report new evaluations to Optuna, and ask the run to stop when it says so."""
        size = _log_size(trial.job)
        if size == trial.log_size:
            return
        trial.log_size = size
        for step, value in sorted(mean_curve(trial.job).items()):
            if trial.pruned or step in trial.reported:
                continue
            trial.reported.add(step)
            trial.handle.report(value, step)
            if not ended and trial.handle.should_prune():
                trial.pruned = True
                trial.job.ask_to_stop()

    def _end(self, trial: _Trial, outcome: Outcome) -> None:
        states = self.optuna.trial.TrialState
        self._watch(trial, ended=True)
        returns = final_returns(trial.job) if outcome.is_final else []
        value = float(interquartile_mean(returns)) if returns else math.nan
        if outcome.state == "stopped":
            self.study.tell(trial.number, state=states.PRUNED)
            self._say(f"trial {trial.number} pruned at step {max(trial.reported, default=0)}")
        elif math.isfinite(value):
            self.study.tell(trial.number, value)
            self._say(f"trial {trial.number} reached {value:.2f}")
        elif outcome.state == "interrupted":
            raise RLTrainingError(f"trial {trial.number} was interrupted; start tune again")
        else:
            self.study.tell(trial.number, state=states.FAIL)
            self._say(f"trial {trial.number} failed: {outcome.message or 'returns not finite'}")

    def _conclude(self, runner: Runner) -> TuneResult:
        states = self.optuna.trial.TrialState
        trials = self.study.get_trials(deepcopy=False)
        count = {state: sum(t.state == state for t in trials) for state in states}
        if not count[states.COMPLETE]:
            raise RLTrainingError(
                f"no trial of {self.folder} came to an end; the logs in {self.folder / 'jobs'} say "
                "why"
            )
        best = self.study.best_trial
        point = {d.key: d.text_of(best.params[d.key]) for d in self.dimensions}
        config = load_point(self.plan.config, point, self.plan.overrides)
        (self.folder / BEST_FILE).write_text(config.to_yaml(), encoding="utf-8")
        final, base = self._final_runs(runner, best.number, point)
        return TuneResult(
            best_trial=best.number,
            best_value=float(best.value),
            best_settings=point,
            finished=count[states.COMPLETE],
            pruned=count[states.PRUNED],
            failed=count[states.FAIL],
            held_out=tuple(final),
            baseline=tuple(base),
            config_file=self.folder / BEST_FILE,
        )

    def _final_runs(
        self, runner: Runner, number: int, point: dict[str, str]
    ) -> tuple[list[float], list[float]]:
        """Train the best settings, and the original ones where asked, on the held-out seeds."""
        seeds = "_".join(map(str, self.plan.held_out))
        jobs = [self._job(f"held_out_trial_{number:04d}-{seeds}", point, self.plan.held_out)]
        if self.plan.baseline:
            jobs.append(self._job(f"held_out_baseline-{seeds}", {}, self.plan.held_out))
        self._say(f"training trial {number}'s settings on the held-out seeds")
        outcomes = do_all(jobs, runner)
        for job in jobs:
            if outcomes[job.name].state != "done":
                raise RLTrainingError(
                    f"{job.folder} is not done ({outcomes[job.name].message}); start tune again"
                )
        returns = [final_returns(job) for job in jobs]
        return returns[0], returns[1] if self.plan.baseline else []


def _members(job: Job) -> list[Path]:
    return member_folders(job.folder, job.config)


def _log_size(job: Job) -> int:
    logs = [folder / METRICS_FILE for folder in _members(job)]
    return sum(log.stat().st_size for log in logs if log.is_file())


def mean_curve(job: Job) -> dict[int, float]:
    """Return the mean over seeds of the evaluations that all of them have, where finite."""
    logs = [evaluations(folder) for folder in _members(job)]
    steps = set.intersection(*(set(log) for log in logs))
    means = {step: sum(log[step] for log in logs) / len(logs) for step in steps}
    return {step: value for step, value in means.items() if math.isfinite(value)}


def final_returns(job: Job) -> list[float]:
    """Return the last evaluation of each seed; none where one was never evaluated."""
    logs = [evaluations(folder) for folder in _members(job)]
    return [log[max(log)] for log in logs] if all(logs) else []


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtraError('tune needs Optuna; pip install "rl-training[tune]"') from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna
