"""Callbacks, early stopping, and that watching a run does not change it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from helpers.tiny import ROOT, STEPS, learner_digest, tiny_config
from helpers.warm import run_warm
from rl_training import TrainConfig
from rl_training.algorithms.config import EarlyStopping
from rl_training.cli.display import display_for
from rl_training.errors import NonFiniteError
from rl_training.experiment.checkpointing import list_checkpoints, open_checkpoint
from rl_training.experiment.logging import MetricLogger, read_metrics
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.callbacks import Callback, StopRule, TrainerState
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training


class Diary(Callback):
    """Writes down what happens."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.start_step = -1
        self.last: TrainerState | None = None

    def on_start(self, state: TrainerState) -> None:
        self.events.append(("start", state.step))
        self.start_step = state.start_step

    def on_step(self, state: TrainerState) -> None:
        self.events.append(("step", state.step))

    def on_log(self, state: TrainerState, values: Mapping[str, float]) -> None:
        assert values["learning_rate"] > 0
        self.events.append(("log", state.step))

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        assert [len(episodes) for episodes in returns] == [1]
        assert state.metrics["eval_return_mean"] == returns[0][0]
        self.events.append(("evaluation", state.step))

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:
        assert all((path / "manifest.json").is_file() for path in paths)
        self.events.append(("checkpoint", state.step))

    def on_message(self, state: TrainerState, text: str) -> None:
        self.events.append((text, state.step))

    def on_end(self, state: TrainerState) -> None:
        self.events.append(("end", state.step))
        self.last = state


class StopAt(Callback):
    """Asks for the end at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, state: TrainerState) -> None:
        if state.step >= self.step:
            state.request_stop("that is enough")
            state.request_stop("a second reason")


def test_callbacks_hear_of_everything_in_order(tmp_path: Path) -> None:
    diary = Diary()
    config = tiny_config(
        "ppo", tmp_path, checkpoint_interval=48, log_interval=32, algo_kwargs={"eval_interval": 48}
    )
    train(config, callbacks=[diary])
    assert diary.events == [
        ("start", 0),
        ("step", 16),
        ("log", 32),
        ("step", 32),
        ("evaluation", 48),
        ("step", 48),
        ("checkpoint", 48),
        ("log", 64),
        ("step", 64),
        ("evaluation", 64),
        ("checkpoint", 64),
        ("end", 64),
    ]
    assert diary.last is not None
    assert diary.last.stop_reason is None


def test_callbacks_of_a_resumed_run_know_where_it_began(tmp_path: Path) -> None:
    config = tiny_config("ppo", tmp_path)
    cut = train(config, stop_at=32)
    diary = Diary()
    resume_training(cut.run_dir, callbacks=[diary])
    assert diary.start_step == 32
    assert [step for event, step in diary.events if event == "step"] == [48, 64]


@pytest.mark.expensive
def test_a_callback_may_end_the_run_which_is_saved_and_can_be_resumed(
    algo: str, tmp_path: Path
) -> None:
    config = tiny_config(algo, tmp_path)
    diary = Diary()
    result = train(config, callbacks=[StopAt(32), diary])
    assert result.stop_reason == "that is enough"
    assert result.metrics["global_step"] == 32
    assert result.metrics["eval_episodes"] == 1
    assert diary.events[-1] == ("end", 32)
    resumed = resume_training(result.run_dir)
    assert resumed.stop_reason is None
    whole = train(config.replace(run_name="whole"))
    assert learner_digest(resumed.run_dir) == learner_digest(whole.run_dir)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_callbacks_hear_the_end_of_a_run_that_fails(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_step(self, state: TrainerState) -> None:
            raise NonFiniteError("as if")

    diary = Diary()
    with pytest.raises(NonFiniteError):
        train(tiny_config("ppo", tmp_path), callbacks=[diary, Failing()])
    assert diary.events[-1][0] == "end"


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_the_live_display_is_for_terminals_only(
    terminal: bool, quiet: bool, tmp_path: Path
) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    config = tiny_config("ppo", tmp_path, algo_kwargs={"eval_interval": 32})
    train(config, callbacks=[display_for(console, quiet=quiet)])
    live = terminal and not quiet
    assert ("steps/s" in text.getvalue()) == live
    assert ("\x1b[" in text.getvalue()) == live
    assert "64/64" in text.getvalue() if live else "step=64 eval_return_mean=" in text.getvalue()


# Early stopping


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"target": 10.0}, [9, 10], [None, "reached"]),
        ({"target": 10.0, "patience": 2}, [10, 9, 10, 11], [None, None, None, "reached"]),
        ({"target": 10.0, "min_steps": 25}, [10, 10, 10], [None, None, "reached"]),
        ({"patience": 2}, [5, 5, 4], [None, None, "gained nothing"]),
        ({"patience": 2}, [5, 4, 6, 6, 5], [None, None, None, None, "gained nothing"]),
        ({"patience": 1, "min_delta": 1.0}, [5, 6.5, 7], [None, None, "gained nothing"]),
    ],
)
def test_the_rule_stops_when_it_says(
    settings: dict[str, Any], values: list[float], expected: list[str | None]
) -> None:
    rule = StopRule(EarlyStopping(**settings))
    reasons = [rule.judge(10 * (n + 1), [[value]]) for n, value in enumerate(values)]
    assert [reason is None for reason in reasons] == [words is None for words in expected]
    assert expected[-1] is not None
    assert expected[-1] in str(reasons[-1])


@pytest.mark.parametrize(
    ("metric", "value"),
    [("eval_return_mean", 3.0), ("eval_return_min", 0.5), ("eval_return_median", 2.5)],
)
def test_the_rule_takes_the_mean_over_seeds_of_its_metric(metric: str, value: float) -> None:
    returns = [[0.0, 2.0, 7.0], [1.0, 3.0, 5.0]]
    for target, stops in ((value, True), (value + 1e-6, False)):
        settings = EarlyStopping(metric=metric, target=target)  # type: ignore[arg-type]  # drawn
        assert (StopRule(settings).judge(1, returns) is not None) == stops


def test_without_settings_nothing_stops() -> None:
    assert StopRule(None).judge(10**9, [[10.0**9]]) is None


@pytest.mark.parametrize(
    "settings", [{"target": -1e9, "patience": 3}, {"patience": 2, "min_delta": 1e9}]
)
def test_early_stopping_ends_the_run_and_remembers_across_a_resume(
    settings: dict[str, float], tmp_path: Path
) -> None:
    kwargs = {"eval_interval": 16, "early_stopping": settings}
    config = tiny_config("sac", tmp_path, total_timesteps=640, algo_kwargs=kwargs)
    whole = train(config)
    assert whole.metrics["global_step"] == 48
    assert whole.stop_reason is not None
    cut = train(config.replace(run_name="cut"), stop_at=20)
    resumed = resume_training(cut.run_dir)
    assert resumed.metrics["global_step"] == 48
    assert resumed.stop_reason == whole.stop_reason
    assert learner_digest(resumed.run_dir) == learner_digest(whole.run_dir)


# Watching changes nothing


@pytest.fixture(scope="module", params=algorithm_names())
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """An algorithm and the digest of its learner after a run that nobody watches."""
    config = tiny_config(
        request.param,
        tmp_path_factory.mktemp("plain"),
        eval_episodes=0,
        log_interval=STEPS * 10,
        checkpoint_interval=0,
    )
    return request.param, learner_digest(train(config).run_dir)


WATCHED: dict[str, Callable[[Path, str], TrainConfig]] = {
    "evaluating": lambda folder, algo: tiny_config(
        algo, folder, eval_episodes=3, algo_kwargs={"eval_interval": 7}
    ),
    "logging": lambda folder, algo: tiny_config(algo, folder, log_interval=1),
    "checkpoints": lambda folder, algo: tiny_config(
        algo, folder, checkpoint_interval=10, keep_checkpoints=1
    ),
    "by the clock": lambda folder, algo: tiny_config(algo, folder, checkpoint_minutes=1e-3),
    "tensorboard": lambda folder, algo: tiny_config(algo, folder, tensorboard=True),
    "early stopping": lambda folder, algo: tiny_config(
        algo, folder, algo_kwargs={"eval_interval": 16, "early_stopping": {"target": 1e9}}
    ),
}


@pytest.mark.expensive(only=("sac", "ppo"))
@pytest.mark.parametrize("watch", WATCHED)
def test_watching_a_run_does_not_change_it(
    watch: str, plain: tuple[str, str], tmp_path: Path
) -> None:
    algo, digest = plain
    run = train(WATCHED[watch](tmp_path, algo)).run_dir
    assert learner_digest(run) == digest
    assert (run / "tensorboard").exists() == (watch == "tensorboard")


@pytest.mark.expensive
def test_another_seed_does_change_it(plain: tuple[str, str], tmp_path: Path) -> None:
    algo, digest = plain
    assert learner_digest(train(tiny_config(algo, tmp_path, seed=1)).run_dir) != digest


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_environments_in_processes_give_the_same_run(algo: str, tmp_path: Path) -> None:
    digests = {
        mode: learner_digest(
            train(tiny_config(algo, tmp_path, run_name=mode, vector_mode=mode, num_envs=2)).run_dir
        )
        for mode in ("sync", "async")
    }
    assert digests["sync"] == digests["async"]


# Metrics


def lines_without_time(run: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from helpers.tiny import tiny_config
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.train import train

class Kill(Callback):
    def on_step(self, state):
        if state.step == 45:
            os.kill(os.getpid(), signal.SIGKILL)

config = tiny_config("sac", Path(sys.argv[2]), log_interval=5, algo_kwargs={"eval_interval": 20})
train(config.replace(run_name="killed"), callbacks=[Kill()])
"""


@pytest.mark.matrix
def test_metrics_of_a_killed_and_resumed_run_are_those_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    assert run_warm("-c", KILLED, ROOT / "tests", tmp_path).code == -9
    killed = tmp_path / "killed"
    assert [entry.step for entry in list_checkpoints(killed)][-1] < 45
    assert read_metrics(killed)[-1]["step"] == 45
    resume_training(killed)
    config = tiny_config("sac", tmp_path, log_interval=5, algo_kwargs={"eval_interval": 20})
    whole = train(config).run_dir
    assert lines_without_time(killed) == lines_without_time(whole)
    assert learner_digest(killed) == learner_digest(whole)


@pytest.mark.expensive
def test_each_step_stands_once_in_the_metrics_and_in_order(config: TrainConfig) -> None:
    cut = train(config, stop_at=32)
    resume_training(cut.run_dir)
    steps = [row["step"] for row in read_metrics(cut.run_dir, "train")]
    assert steps == [16, 32, 48, 64]


def test_a_torn_line_is_left_out_and_cut_off_on_resume(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path, tensorboard=False, resume_offset=0, step=0)
    logger.log("train", 1, {"a": 1.0, "b": float("nan"), "c": float("-inf")})
    offset = logger.offset
    logger.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ki')
    assert read_metrics(tmp_path) == [
        {"step": 1, "kind": "train", "a": 1.0, "b": "nan", "c": "-inf"}
    ]
    again = MetricLogger(tmp_path, tensorboard=False, resume_offset=offset, step=1)
    again.log("eval", 2, {"a": 2.0})
    again.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert [row["step"] for row in read_metrics(tmp_path, "eval")] == [2]


def test_the_best_so_far_is_remembered_across_a_resume(tmp_path: Path) -> None:
    config = tiny_config("ppo", tmp_path, algo_kwargs={"eval_interval": 16})
    cut = train(config, stop_at=32)
    before = open_checkpoint(cut.run_dir).states["clock"]
    after = open_checkpoint(resume_training(cut.run_dir).run_dir).states["clock"]
    assert after["best_return"].item() >= before["best_return"].item()
    evaluations = {r["step"]: r["eval_return_mean"] for r in read_metrics(cut.run_dir, "eval")}
    assert after["best_return"].item() == max(evaluations.values())


@pytest.mark.parametrize(("mode", "values"), [("max", (1.0, 3.0, 2.0)), ("min", (3.0, 1.0, 2.0))])
def test_early_stopping_knows_which_way_is_better(
    mode: Literal["max", "min"], values: tuple[float, ...]
) -> None:
    patient = StopRule(EarlyStopping(mode=mode, patience=1))
    assert [patient.judge(1, [[value]]) is not None for value in values] == [False, False, True]
    target = StopRule(EarlyStopping(mode=mode, target=values[1]))
    assert [target.judge(1, [[value]]) is not None for value in values] == [False, True, False]
