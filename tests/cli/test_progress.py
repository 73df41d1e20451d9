"""The progress display: recent speed and remaining time, by a clock that the test moves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.tiny import tiny_config
from rl_training.cli.display import Pace, ProgressDisplay
from rl_training.runtime import session
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train


def run(pace: Pace, now: float, step: int, seconds: float, speed: float) -> tuple[float, int]:
    """Train at some speed, ten steps of the loop a second."""
    ticks = round(seconds * 10)
    for tick in range(1, ticks + 1):
        pace.step(now + tick / 10, step + round(tick * speed / 10))
    return now + seconds, step + round(seconds * speed)


def test_the_speed_is_the_recent_one_and_not_the_mean() -> None:
    pace = Pace(100.0, 0)
    now, step = run(pace, 100.0, 0, 300, 10)  # compiling, say
    assert pace.speed == pytest.approx(10)
    now, step = run(pace, now, step, 30, 1000)
    mean = step / (now - 100.0)
    assert mean < 110
    assert pace.speed > 900
    assert pace.remaining(step + 10_000) == pytest.approx(10_000 / pace.speed)


def test_nothing_is_claimed_before_the_first_step() -> None:
    pace = Pace(5.0, 0)
    assert pace.remaining(1000) is None
    pace.evaluated()
    pace.saved(9.0)
    assert (pace.speed, pace.remaining(1000)) == (0.0, None)


def test_evaluations_and_saves_do_not_make_the_remaining_time_jump() -> None:
    pace, now, step = Pace(0.0, 0), 0.0, 0
    total, errors, jumps = 100_000, [], []
    # 20 s of training, 5 s of evaluation, 1 s of saving, over and over: 26 s for 2,000 steps.
    for _ in range(40):
        now, step = run(pace, now, step, 20, 100)
        before = pace.remaining(total)
        pace.evaluated()
        now, step = now + 5.1, step + 10
        pace.step(now, step)
        now += 1.0
        pace.saved(now)
        after = pace.remaining(total)
        assert before is not None
        assert after is not None
        assert pace.speed == pytest.approx(100, rel=0.02)
        jumps.append(abs(after - before + 6.1) / before)
        errors.append(abs(after / ((total - step) / 2010 * 26.1) - 1))
    assert max(jumps[3:]) < 0.1
    assert max(errors[3:]) < 0.1


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shown(start_step: int, speed: int, tmp_path: Path) -> str:
    """What the bar says after 30 s at some speed."""
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    clock = Clock()
    display = ProgressDisplay(console, clock)
    state = TrainerState("sac", "Task-v0", (0,), tmp_path, 1_000_000)
    state.step = state.start_step = start_step
    display.on_start(state)
    for _ in range(300):
        clock.now += 0.1
        state.step += speed // 10
        display.on_step(state)
    display.on_end(state)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_bar_shows_the_speed_and_what_it_means_for_the_rest(tmp_path: Path) -> None:
    text = shown(0, 1000, tmp_path)
    assert "1,000 steps/s" in text
    assert "eta 0:16:10" in text  # 970,000 steps are left


def test_a_resumed_run_estimates_from_its_own_steps_alone(tmp_path: Path) -> None:
    text = shown(900_000, 1000, tmp_path)
    assert "resuming at step 900,000" in text
    assert "1,000 steps/s" in text
    assert "eta 0:01:10" in text


class SlowStart(Callback):
    """Makes the clock of the session go: steps before 30 take a second, later ones a tenth."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def on_step(self, state: TrainerState) -> None:
        self.now += 1.0 if state.step < 30 else 0.1


def test_a_line_of_metrics_has_the_speed_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SlowStart()

    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=clock.monotonic))
    config = tiny_config("sac", tmp_path, log_interval=10, total_timesteps=60, num_envs=1)
    result = train(config, callbacks=[clock])
    text = (result.run_dir / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    speeds = [line["time/steps_per_second"] for line in lines if "time/steps_per_second" in line]
    elapsed = [line["time/elapsed_seconds"] for line in lines if "time/elapsed_seconds" in line]
    assert speeds[1] == pytest.approx(1.0)
    assert speeds[-1] == pytest.approx(10.0)
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] == pytest.approx(29 + 0.1 * 30, rel=0.1)
