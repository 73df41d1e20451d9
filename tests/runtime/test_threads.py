"""The number of threads: asked for, given by the environment, remembered, or measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.tiny import tiny_config
from rl_training.errors import ConfigError
from rl_training.experiment.checkpointing import read_manifest
from rl_training.runtime import threads
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.threads import ThreadChoice, choose_threads, thread_count
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import build


@pytest.fixture(autouse=True)
def four_idle_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_available_cores", lambda: [0, 1, 2, 3])
    with_idle(monkeypatch, 4.0)
    with thread_count(3):
        yield
        assert torch.get_num_threads() == 3, "the caller keeps its own number"


def with_idle(monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
    monkeypatch.setattr(threads, "_idle_cores", lambda: cores)


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Replace the stopwatch; returns the list of what was timed."""
    timed: list[int] = []

    def clock(_left: torch.Tensor, _right: torch.Tensor, count: int) -> float:
        timed.append(count)
        return seconds[count]

    monkeypatch.setattr(threads, "_seconds", clock)
    return timed


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.5, 4: 0.45}, 2),
        ({1: 1.0, 2: 0.9, 4: 0.88}, 1),
        ({1: 1.0, 2: 5.0, 4: 9.0}, 1),
    ],
)
def test_more_threads_are_taken_only_when_clearly_faster(
    seconds: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, seconds)
    assert choose_threads(0, build("sac")[0]).threads == chosen


def test_a_busy_machine_is_measured_only_as_far_as_it_is_idle_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.3})
    for idle, chosen, measured in ((0.2, 1, []), (2.1, 2, [1, 2]), (3.9, 4, [1, 2, 4])):
        with_idle(monkeypatch, idle)
        timed.clear()
        # Nothing is known of a quieter machine, so there is nothing to say about it either.
        assert choose_threads(0, learner) == ThreadChoice(chosen)
        assert timed == measured


def test_a_number_from_a_quiet_machine_is_not_used_on_a_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.45})
    assert choose_threads(0, learner).threads == 2
    timed.clear()
    for idle, chosen in ((0.0, 1), (1.2, 1), (1.6, 2), (2.3, 2), (4.0, 2)):
        with_idle(monkeypatch, idle)
        choice = choose_threads(0, learner)
        assert choice.threads == chosen
        if chosen == 1:
            assert f"only {idle:.1f} of 4 cores are idle" in str(choice.note)
            assert "would get 2" in str(choice.note)
        else:
            assert choice.note is None
    assert timed == []


def test_the_choice_is_remembered_per_kind_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.5})
    assert choose_threads(0, learner).threads == 2
    assert timed == [1, 2, 4]
    pretend(monkeypatch, {1: 1.0, 2: 9.0, 4: 9.0})
    assert choose_threads(0, learner).threads == 2
    assert choose_threads(0, build("sac", hidden_sizes=[64, 64])[0]).threads == 1


def test_what_is_asked_for_or_given_by_the_environment_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.5})
    assert choose_threads(3, learner).threads == 3
    for text, chosen in {"5": 5, " 6,2": 6, "99999": 1024}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert choose_threads(0, learner).threads == chosen
        assert choose_threads(0, learner, saved=2).threads == chosen
        assert choose_threads(3, learner, saved=2).threads == 3
    assert not timed
    for text in ("", "0", "-1", "many"):  # OpenMP ignores these too
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert choose_threads(0, learner).threads == 2


def test_a_choice_that_cannot_be_remembered_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {1: 1.0, 2: 0.1, 4: 0.1})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "file"))
    assert choose_threads(0, build("sac")[0]).threads == 1


def test_measuring_works_and_leaves_the_number_of_threads_alone() -> None:
    assert choose_threads(0, build("sac")[0]).threads in (1, 2, 4)


def test_idle_cores_are_counted_among_those_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(threads, "_available_cores", lambda: [1, 3, 9])
    monkeypatch.setattr("psutil.cpu_percent", lambda **_: [100.0, 25.0, 100.0, 0.0])
    assert threads._idle_cores() == 1.75


class Failing(Callback):
    """Fails in the first step; keeps how many threads there were, and what was said."""

    def __init__(self, *, fail: bool = True) -> None:
        self.fail = fail
        self.threads = 0
        self.said: list[str] = []

    def on_step(self, state: TrainerState) -> None:
        self.threads = torch.get_num_threads()
        if self.fail:
            raise ZeroDivisionError

    def on_message(self, state: TrainerState, text: str) -> None:
        self.said.append(text)


def test_a_run_has_its_threads_and_the_caller_its_own_also_after_an_error(tmp_path: Path) -> None:
    failing = Failing()
    with pytest.raises(ZeroDivisionError):
        train(tiny_config("ppo", tmp_path, threads=2), callbacks=[failing])
    assert failing.threads == 2
    assert torch.get_num_threads() == 3
    with pytest.raises(ConfigError):
        train(tiny_config("ppo", tmp_path, threads=2, device="cuda:99"))
    with pytest.raises(ConfigError, match="threads must be <= 1024, got 1025"):
        tiny_config("ppo", tmp_path, threads=1025)


def test_a_resumed_run_keeps_its_threads_and_says_when_another_number_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("ppo", tmp_path, run_name="run")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run = train(config, stop_at=1).run_dir
    monkeypatch.delenv("OMP_NUM_THREADS")

    def resume(end: int, expected: int, threads: int | None = None) -> list[str]:
        watcher = Failing(fail=False)
        result = resume_training(
            run, total_timesteps=config.total_timesteps * end, threads=threads, callbacks=[watcher]
        )
        assert watcher.threads == expected
        assert read_manifest(result.checkpoint_path).header["threads"] == expected
        return [text for text in watcher.said if "thread" in text]

    assert resume(1, 2) == []
    with_idle(monkeypatch, 0.4)
    (crowded,) = resume(2, 2)
    assert "keeps its 2 threads" in crowded
    assert "only 0.4 of 4 cores are idle" in crowded
    (changed,) = resume(3, 1, threads=1)
    assert "saved with threads=2 and continues with threads=1" in changed
    assert resume(4, 1) == []
