"""Signs of divergence fire on what diverges and keep quiet on what learns (R16)."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.golden import stored
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.health.monitors import Monitors
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

QUIET = {"approx_kl": 0.01, "clip_fraction": 0.1, "entropy": 0.6, "q_mean": -400.0}


def watch(gamma: float = 0.99, reward: float | None = 2.0) -> Monitors:
    return Monitors(gamma, lambda: reward)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"q_mean": 2001.0}, "values"),
        ({"target_mean": -1e6}, "values"),
        ({"approx_kl": 0.51}, "kl"),
        ({"approx_kl": 0.0, "clip_fraction": 0.0}, "dead"),
        ({"entropy": 0.0}, "entropy"),
    ],
)
def test_each_sign_is_seen(changes: dict[str, float], kind: str) -> None:
    assert list(watch().signs(QUIET | changes)) == [kind]


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_mean": 1999.0}, {"q_mean": -900.0}, {"entropy": -3.0}, {"approx_kl": 0.0}],
)
def test_what_may_be_is_no_sign(changes: dict[str, float]) -> None:
    assert watch().signs(QUIET | changes) == {}


def test_a_policy_that_goes_through_its_rollout_once_may_be_that_of_the_rollout() -> None:
    still = QUIET | {"approx_kl": 0.0, "clip_fraction": 0.0}
    assert Monitors(0.99, lambda: 2.0, one_epoch=True).signs(still) == {}


def test_where_nothing_bounds_the_values_only_enormous_ones_are_a_sign() -> None:
    for monitors in (watch(gamma=1.0), watch(reward=None)):
        assert monitors.signs({"q_mean": 1e8}) == {}
        assert "values" in monitors.signs({"q_mean": 1e10})


def test_each_sign_is_spoken_of_once() -> None:
    monitors = watch()
    assert len(monitors.look([{"q_mean": 1e7}, {"q_mean": 1e8}])) == 1
    assert monitors.look([{"q_mean": 1e9}]) == []
    assert len(monitors.look([{"approx_kl": 3.0}])) == 1


@pytest.mark.parametrize("algo", algorithm_names())
def test_golden_traces_show_no_sign(algo: str) -> None:
    metrics = stored(algo)["metrics"]
    rows = [
        {name: values[i] for name, values in metrics.items()}
        for i in range(len(next(iter(metrics.values()))))
    ]
    assert watch().look(rows) == []


class Listener(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.heard.append(text)


def test_a_run_is_told_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MetricRecorder.flush

    def exploded(self: MetricRecorder) -> list[dict[str, float]]:
        return [row | {"q_value_mean": 1e6} if row else row for row in original(self)]

    monkeypatch.setattr(MetricRecorder, "flush", exploded)
    listener = Listener()
    result = train(small_config("dqn", tmp_path, total_timesteps=80), callbacks=[listener])
    assert result.metrics["global_step"] == 80
    assert [text for text in listener.heard if "the values explode" in text] == [
        "step 40: q_value_mean is 1e+06, beyond 1e+03, 10 times what the rewards allow: the values "
        "explode; lower learning_rate, update targets more slowly, or scale the rewards"
    ]
