"""The number of threads: asked for, remembered, or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.contract import build
from rl_training.runtime import threads
from rl_training.runtime.threads import choose_threads


@pytest.fixture(autouse=True)
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path))
    monkeypatch.setattr(threads, "_available_cores", lambda: 4)
    monkeypatch.setattr(threads, "_others_are_busy", lambda: False)


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
    assert choose_threads(0, build("sac")[0]) == chosen


def test_beside_busy_processes_it_is_one_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.5})
    with monkeypatch.context() as busy:
        busy.setattr(threads, "_others_are_busy", lambda: True)
        assert choose_threads(0, learner) == 1
    assert timed == []
    assert choose_threads(0, learner) == 2


def test_the_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build("sac")[0]
    timed = pretend(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.5})
    assert choose_threads(0, learner) == 2
    assert timed == [1, 2, 4]
    pretend(monkeypatch, {1: 1.0, 2: 9.0, 4: 9.0})
    assert choose_threads(0, learner) == 2
    assert choose_threads(0, build("sac", hidden_sizes=[64, 64])[0]) == 1, (
        "other work, other choice"
    )


def test_what_is_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pretend(monkeypatch, {})
    assert choose_threads(3, build("sac")[0]) == 3


def test_a_choice_that_cannot_be_remembered_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {1: 1.0, 2: 0.1, 4: 0.1})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "file"))
    assert choose_threads(0, build("sac")[0]) == 1


def test_measuring_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    choose_threads(0, build("sac")[0])
    assert torch.get_num_threads() == before
