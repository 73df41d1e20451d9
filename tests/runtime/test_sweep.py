"""Sweeps: which runs they have, that done ones are left alone and broken ones resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import clean_environment, learner_digest, run_cli, tiny_config, write_tiny
from rl_training.errors import ConfigError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.runtime.train import train
from rl_training.sweeps.jobs import Job, Outcome, do_job, make_job, write_jobs
from rl_training.sweeps.plan import SweepPlan, split_axis
from rl_training.sweeps.runners import LocalRunner, closing, do_all


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path, total_timesteps=48)


def plan_of(tiny: Path, **changes: Any) -> SweepPlan:
    return SweepPlan(configs=(str(tiny),), **changes)


class InProcess:
    """Does jobs at once in this process."""

    slots = 1

    def __init__(self) -> None:
        self.started: list[str] = []
        self._ended: list[tuple[Job, Outcome]] = []

    def start(self, job: Job) -> None:
        self.started.append(job.name)
        self._ended.append((job, do_job(job.file)))

    def ended(self) -> list[tuple[Job, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        pass


# The plan


def test_every_combination_is_a_run_of_its_own(tiny: Path, tmp_path: Path) -> None:
    plan = plan_of(
        tiny,
        grid=("learning_rate=1e-3,3e-3", "num_envs=1,2"),
        seeds=(0, 1),
        overrides=("device=cpu",),
    )
    jobs = plan.jobs(tmp_path / "sweep")
    assert len({job.name for job in jobs}) == len(jobs) == 8
    found = {
        (j.config.algo_kwargs["learning_rate"], j.config.num_envs, j.config.seed) for j in jobs
    }
    assert len(found) == 8
    assert all(j.folder == tmp_path / "sweep" / j.name for j in jobs)
    assert [j.name for j in plan.jobs(tmp_path / "sweep")] == [j.name for j in jobs]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2", ["1", "2"]),
        ("algo_kwargs.hidden_sizes=[8,8],[16]", ["[8,8]", "[16]"]),
        ("a={x: 1, y: 2},null", ["{x: 1, y: 2}", "null"]),
    ],
)
def test_commas_in_brackets_belong_to_a_value(text: str, values: list[str]) -> None:
    assert split_axis(text)[1] == values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ("learning_rate",)}, "must look like"),
        ({"grid": ("learning_rate=1e-3,",)}, "must look like"),
        ({"grid": ("learning_rate=1e-3,1e-3",)}, "names a value twice"),
        ({"grid": ("gamma=0.9", "gamma=0.8")}, "names a setting twice"),
        ({"grid": ("learning_rote=1e-3",)}, "did you mean learning_rate"),
        ({"grid": ("gamma=7",)}, "gamma must be <= 1"),
        ({"seeds": (1, 1)}, "would be called"),
    ],
)
def test_a_mistake_in_any_run_is_found_before_one_starts(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tiny, **changes).jobs(tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_long_names_stay_different(tiny: Path, tmp_path: Path) -> None:
    sizes = [f"[{','.join(['16'] * 60)},{last}]" for last in (8, 9)]
    jobs = plan_of(tiny, grid=(f"hidden_sizes={','.join(sizes)}",)).jobs(tmp_path)
    assert len({job.name for job in jobs}) == 2
    assert all(len(job.name) < 140 for job in jobs)


# Doing jobs


def test_a_done_job_is_not_done_again(tiny: Path, tmp_path: Path) -> None:
    jobs = plan_of(tiny, seeds=(0, 1)).jobs(tmp_path / "sweep")
    write_jobs(jobs)
    runner = InProcess()
    first = do_all(jobs, runner)
    assert {outcome.state for outcome in first.values()} == {"done"}
    again = InProcess()
    assert do_all(jobs, again) == first
    assert (len(runner.started), again.started) == (2, [])
    assert do_job(jobs[0].file) == first[jobs[0].name]


def test_a_broken_job_resumes_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = make_job(tiny_config("sac", tmp_path), tmp_path / "a", "run")
    broken = make_job(tiny_config("sac", tmp_path), tmp_path / "b", "run")
    write_jobs([whole, broken])
    train(broken.config, stop_at=40)
    assert [entry.step for entry in list_checkpoints(broken.folder)][-1] == 40
    assert do_job(whole.file).state == do_job(broken.file).state == "done"
    assert learner_digest(whole.folder) == learner_digest(broken.folder)


def test_what_is_left_of_a_run_that_never_began_is_begun_anew(tmp_path: Path) -> None:
    job = make_job(tiny_config("sac", tmp_path, total_timesteps=24), tmp_path / "a", "run")
    write_jobs([job])
    job.folder.mkdir()
    (job.folder / "outcome.json").write_text('{"state": "do')
    assert do_job(job.file).state == "done"


def test_a_users_mistake_is_an_outcome(tmp_path: Path) -> None:
    job = make_job(tiny_config("sac", tmp_path, env_id="nowhere:Nothing"), tmp_path / "a", "run")
    write_jobs([job])
    outcome = do_job(job.file)
    assert outcome.state == "failed"
    assert "nowhere" in outcome.message
    assert job.outcome() is None


def test_a_job_asked_to_stop_ends_at_its_next_evaluation(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, algo_kwargs={"eval_interval": 16})
    job = make_job(config, tmp_path / "a", "run")
    write_jobs([job])
    train(job.config, stop_at=20)
    job.ask_to_stop()
    outcome = do_job(job.file)
    assert (outcome.state, outcome.metrics["global_step"]) == ("stopped", 32.0)
    assert outcome.is_final


def test_other_settings_under_the_same_name_are_refused(tiny: Path, tmp_path: Path) -> None:
    write_jobs(plan_of(tiny).jobs(tmp_path / "sweep"))
    with pytest.raises(ConfigError, match="describes another run of that name"):
        write_jobs(plan_of(tiny, overrides=("num_envs=2",)).jobs(tmp_path / "sweep"))


# Processes


@pytest.mark.matrix
def test_a_process_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, total_timesteps=400, checkpoint_interval=100)
    whole, job = (make_job(config, tmp_path / name, "run") for name in ("a", "b"))
    write_jobs([whole, job])
    assert do_job(whole.file).state == "done"
    with closing(LocalRunner(retries=1)) as runner:
        runner.start(job)
        assert isinstance(runner, LocalRunner)
        while not list_checkpoints(job.folder):
            time.sleep(0.02)
        os.kill(runner._running[0].process.pid, signal.SIGKILL)
        found: list[tuple[Job, Outcome]] = []
        while not found:
            found = runner.ended()
            time.sleep(0.05)
    assert found[0][1].state == "done"
    assert learner_digest(whole.folder) == learner_digest(job.folder)


@pytest.mark.matrix
def test_closing_a_runner_lets_its_jobs_save(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, total_timesteps=200_000, checkpoint_interval=0)
    job = make_job(config, tmp_path / "a", "run")
    write_jobs([job])
    with closing(LocalRunner()) as runner:
        runner.start(job)
        while not (job.folder / "metrics.jsonl").exists():
            time.sleep(0.02)
    assert list_checkpoints(job.folder)
    assert job.outcome() is None, "it wants to go on"


@pytest.mark.matrix
def test_a_mistake_of_a_process_is_told_and_not_tried_again(tmp_path: Path) -> None:
    job = make_job(tiny_config("sac", tmp_path, env_id="nowhere:Nothing"), tmp_path / "a", "run")
    write_jobs([job])
    with closing(LocalRunner(retries=5)) as runner:
        outcomes = do_all([job], runner)
    assert outcomes["run"].state == "failed"
    assert "nowhere" in outcomes["run"].message


# The command line


@pytest.mark.matrix
def test_a_sweep_ends_with_a_leaderboard_and_goes_on_where_it_was(
    tiny: Path, tmp_path: Path
) -> None:
    options = ["sweep", "-c", tiny, "--grid", "gamma=0.9,0.8", "-o", tmp_path / "sweep"]
    listed = run_cli(*options, "--dry-run").out.split()
    assert listed == ["tiny-gamma_0.9-seed_0", "tiny-gamma_0.8-seed_0"]
    assert not (tmp_path / "sweep").exists()
    done = run_cli(*options, "--jobs", 2)
    assert done.code == 0, done.err
    assert "sac · gamma 0.9" in done.out
    assert done.err.count("started") == 2
    more = run_cli(*options, "--seeds", "0", "--json")
    assert "started" not in more.err
    assert {facts["state"] for facts in json.loads(more.out).values()} == {"done"}


def test_bad_sweeps_are_one_sentence(tiny: Path, tmp_path: Path) -> None:
    options = ["sweep", "-c", tiny, "-o", tmp_path / "sweep"]
    assert "--jobs must be >= 1" in run_cli(*options, "-j", 0).sentence()
    assert "local or ray" in run_cli(*options, "--runner", "slurm").sentence()
    assert "must look like" in run_cli(*options, "--grid", "x").sentence()
    assert "--seeds must look like" in run_cli(*options, "--seeds", "a").sentence()
    assert "--cpus must be > 0" in run_cli(*options, "--runner", "ray", "--cpus", 0).sentence()
    assert "neither a file nor a preset" in run_cli("sweep", "-c", "sac/no", "-o", "x").sentence()
    assert not (tmp_path / "sweep").exists()


@pytest.mark.matrix
def test_a_failing_run_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    bad = write_tiny(tmp_path, env_id="nowhere:Nothing")
    done = run_cli("sweep", "-c", bad, "-o", tmp_path / "sweep")
    assert done.code == 2
    assert "1 of 1 runs are not done; the first is" in done.err


@pytest.mark.matrix
def test_children_of_a_killed_sweep_save_and_go(tmp_path: Path) -> None:
    config = write_tiny(tmp_path, total_timesteps=200_000, checkpoint_interval=0)
    words = ["-m", "rl_training", "sweep", "-c", config, "-o", tmp_path / "sweep"]
    parent = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 60
    while not list((tmp_path / "sweep").glob("*/metrics.jsonl")) and time.monotonic() < limit:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    (run,) = [path.parent for path in (tmp_path / "sweep").glob("*/metrics.jsonl")]
    while not list_checkpoints(run) and time.monotonic() < limit:
        time.sleep(0.05)
    assert list_checkpoints(run), "the child has saved"
