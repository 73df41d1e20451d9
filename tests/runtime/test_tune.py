"""Tuning: the space, trials that go on after a kill, pruning, and the held-out figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from helpers.tiny import run_cli, write_tiny
from rl_training.errors import ConfigError, MissingExtraError, RLTrainingError
from rl_training.experiment.config import load_config
from rl_training.runtime.train import train
from rl_training.sweeps import tuning
from rl_training.sweeps.jobs import STOP_FILE, Job, Outcome, do_job
from rl_training.sweeps.search import parse_dimension
from rl_training.sweeps.tuning import TunePlan, Tuner, final_returns

RATE = "learning_rate=1e-4..1e-2:log"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path, total_timesteps=32, algo_kwargs={"eval_interval": 16})


def plan_of(tiny: Path, **changes: Any) -> TunePlan:
    values: dict[str, Any] = {"search": (RATE, "gamma=0.9,0.99"), "trials": 4, "held_out": (8, 9)}
    return TunePlan(config=str(tiny), **(values | changes))


class InProcess:
    """Does jobs at once, and dies with the job of a given number."""

    slots = 1

    def __init__(self, dies_at: int = -1) -> None:
        self.names: list[str] = []
        self._dies_at = dies_at
        self._ended: list[tuple[Job, Outcome]] = []

    def start(self, job: Job) -> None:
        self.names.append(job.name)
        if len(self.names) == self._dies_at:
            train(job.config, stop_at=20)
            raise KeyboardInterrupt
        self._ended.append((job, do_job(job.file)))

    def ended(self) -> list[tuple[Job, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        pass


# The space


def test_ranges_and_choices_are_read() -> None:
    log = parse_dimension(RATE)
    assert (log.key, log.low, log.high) == ("algo_kwargs.learning_rate", 1e-4, 1e-2)
    assert (log.log, log.whole) == (True, False)
    whole = parse_dimension("num_envs=1..4")
    assert (whole.key, whole.whole, whole.ends()) == ("num_envs", True, ("1", "4"))
    choice = parse_dimension("hidden_sizes=[8,8],[16]")
    assert choice.choices == ("[8,8]", "[16]")


@pytest.mark.parametrize("text", ["a", "a=1..", "a=2..1", "a=0..1:log", "a=1..2:exp", "=1..2"])
def test_a_bad_range_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_dimension(text if text != "=1..2" else "=1,")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": ("learning_rote=1..2",)}, "did you mean learning_rate"),
        ({"search": ("gamma=0.9..2.0",)}, "gamma must be <= 1"),
        ({"search": (RATE, RATE)}, "names a setting twice"),
        ({"search": ()}, "at least one --search"),
        ({"trials": 0}, "--trials must be >= 1"),
        ({"held_out": (0, 1)}, "seed 0 is among --seeds and --held-out"),
        ({"sampler": "magic"}, "--sampler must be one of tpe"),
        ({"pruner": "axe"}, "--pruner must be one of median"),
        ({"overrides": ("eval_episodes=0",)}, "tune compares evaluations"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tuner(plan_of(tiny, **changes), tmp_path / "tune")
    assert not (tmp_path / "tune").exists()


# The study


def trials_of(tuner: Tuner) -> list[tuple[int, dict[str, Any], float | None]]:
    return [(t.number, t.params, t.value) for t in tuner.study.get_trials()]


@pytest.mark.matrix
def test_a_study_that_was_killed_ends_as_one_that_was_not(tiny: Path, tmp_path: Path) -> None:
    whole = Tuner(plan_of(tiny), tmp_path / "whole")
    result = whole.run(InProcess())
    with pytest.raises(KeyboardInterrupt):
        Tuner(plan_of(tiny), tmp_path / "killed").run(InProcess(dies_at=3))
    said: list[str] = []
    killed = Tuner(plan_of(tiny), tmp_path / "killed", said.append)
    runner = InProcess()
    again = killed.run(runner)
    assert said[0] == "trial 2 was under way: it continues"
    assert runner.names[:2] == ["trial_0002", "trial_0003"]
    assert trials_of(killed) == trials_of(whole)
    assert (again.best_trial, again.held_out) == (result.best_trial, result.held_out)


@pytest.mark.matrix
def test_the_result_is_that_of_seeds_the_search_has_not_seen(tiny: Path, tmp_path: Path) -> None:
    tuner = Tuner(plan_of(tiny, trials=2, baseline=True, seeds=(3, 4)), tmp_path / "tune")
    runner = InProcess()
    result = tuner.run(runner)
    best = tuner.study.best_trial
    assert (result.best_trial, result.best_value) == (best.number, best.value)
    assert (result.finished, result.pruned, result.failed) == (2, 0, 0)
    config = load_config(result.config_file)
    assert config.algo_kwargs["learning_rate"] == best.params["algo_kwargs.learning_rate"]
    held = load_config(tmp_path / "tune" / runner.names[-2] / "config.yaml")
    assert held.seeds == (8, 9)
    assert held.algo_kwargs["learning_rate"] == config.algo_kwargs["learning_rate"]
    base = load_config(tmp_path / "tune" / runner.names[-1] / "config.yaml")
    assert base.algo_kwargs["learning_rate"] != config.algo_kwargs["learning_rate"]
    assert len(result.held_out) == len(result.baseline) == 2
    # Asked again with the same number of trials, nothing is left to do.
    more = InProcess()
    assert (
        Tuner(plan_of(tiny, trials=2, baseline=True, seeds=(3, 4)), tmp_path / "tune")
        .run(more)
        .held_out
        == result.held_out
    )
    assert more.names == []


@pytest.mark.matrix
def test_a_hopeless_trial_is_asked_to_stop(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneEvaluation(InProcess):
        """Stands still after the first evaluation, until it has been looked at."""

        def start(self, job: Job) -> None:
            if not job.name.startswith("trial_0001"):
                super().start(job)
                return
            self.waiting: Job | None = job
            train(job.config, stop_at=18)

        def ended(self) -> list[tuple[Job, Outcome]]:
            waiting = getattr(self, "waiting", None)
            if waiting is not None and (waiting.folder / STOP_FILE).exists():
                self.waiting = None
                return [(waiting, do_job(waiting.file))]
            return super().ended()

    hopeless = optuna.pruners.ThresholdPruner(lower=1e9)
    monkeypatch.setattr(tuning, "make_pruner", lambda *_: hopeless)
    tuner = Tuner(plan_of(tiny, trials=2), tmp_path / "tune")
    result = tuner.run(OneEvaluation())
    assert (result.finished, result.pruned) == (1, 1)
    pruned = tuner.study.get_trials()[1]
    assert list(pruned.intermediate_values) == [16]


def test_a_failing_trial_counts_as_such(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Outcome(state="failed", message="no luck")
    monkeypatch.setattr("test_tune.do_job", lambda _: failed)
    with pytest.raises(RLTrainingError, match=r"no trial of .* came to an end"):
        Tuner(plan_of(tiny, trials=2), tmp_path / "tune").run(InProcess())


def test_the_folder_of_another_study_is_refused(tiny: Path, tmp_path: Path) -> None:
    Tuner(plan_of(tiny), tmp_path / "tune")
    Tuner(plan_of(tiny, trials=9), tmp_path / "tune")
    with pytest.raises(ConfigError, match="holds another study: its sampler is 'tpe'"):
        Tuner(plan_of(tiny, sampler="random"), tmp_path / "tune")


def test_random_search_draws_different_settings(tiny: Path, tmp_path: Path) -> None:
    plan = plan_of(tiny, trials=2, sampler="random", search=(RATE,), pruner="halving")
    tuner = Tuner(plan, tmp_path / "tune")
    tuner.run(InProcess())
    rates = [t.params["algo_kwargs.learning_rate"] for t in tuner.study.get_trials()]
    assert len(set(rates)) == 2


def test_final_returns_need_every_seed(tiny: Path, tmp_path: Path) -> None:
    tuner = Tuner(plan_of(tiny, seeds=(1, 2)), tmp_path / "tune")
    job = tuner._job("trial_0000", {}, (1, 2))
    assert final_returns(job) == []
    do_job(job.file)
    assert len(final_returns(job)) == 2


def test_without_optuna_the_extra_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[tune\]"):
        Tuner(plan_of(tiny), tmp_path / "tune")


# The command line


@pytest.mark.matrix
def test_tune_prints_what_scripts_need(tiny: Path, tmp_path: Path) -> None:
    options = ["tune", "-c", tiny, "-o", tmp_path / "tune", "--search", RATE, "--trials", 1]
    done = run_cli(*options, "--held-out", "7", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["held_out_iqm"] == facts["held_out_low"] == facts["held_out_high"]
    assert Path(facts["best_config"]).is_file()
    again = run_cli(*options, "--held-out", "7")
    assert again.values["best_trial"] == "0"
    wrong = run_cli("tune", "-c", tiny, "-o", tmp_path / "t", "--search", "gamma").sentence()
    assert "--search 'gamma' must look like" in wrong
    assert "--sampler must be" in run_cli(*options, "--sampler", "x").sentence()
