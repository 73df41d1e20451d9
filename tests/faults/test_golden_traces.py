"""The first updates of every algorithm are what they were (R19); see `helpers/golden.py`."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.golden import FOLDER, differences, stored, trace
from rl_training.algorithms import optim
from rl_training.experiment.registry import algorithm_names


def now(algo: str, noise: float = 0.0) -> dict[str, Any]:
    return trace(algo, stored(algo)["settings"], noise=noise)


@pytest.mark.parametrize("algo", algorithm_names())
def test_the_first_updates_are_what_they_were(algo: str) -> None:
    found = differences(stored(algo), now(algo))
    assert found == [], "if the change is meant: scripts/update_golden.py, and say so in the log"


@pytest.mark.slow
@pytest.mark.parametrize("algo", algorithm_names())
def test_what_another_machine_would_round_otherwise_is_no_difference(algo: str) -> None:
    assert differences(stored(algo), now(algo, noise=1e-6)) == []


@pytest.mark.parametrize("algo", ["bc", "dqn", "ppo", "sac"])
def test_a_small_change_of_the_mathematics_is_seen(
    algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam with a step too large by a quarter."""
    original = optim.Optimizer.__init__

    def larger(self: optim.Optimizer, parameters: Any, learning_rate: object, **more: Any) -> None:
        assert isinstance(learning_rate, float)
        original(self, parameters, 1.25 * learning_rate, **more)

    monkeypatch.setattr(optim.Optimizer, "__init__", larger)
    assert differences(stored(algo), now(algo)) != []


def test_no_trace_is_left_of_an_algorithm_that_is_gone() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == list(algorithm_names())
