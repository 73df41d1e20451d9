"""NaN and infinity: found, named, described in a file, and never in a checkpoint (R15)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.datasets import columns_of, toy_data, write_columns
from helpers.faults import Tried
from rl_training.algorithms.optim import Adam, Optimizer
from rl_training.algorithms.spec import Loop
from rl_training.envs.backends.kinds import SyncEnvs
from rl_training.envs.factory import probe_env
from rl_training.errors import DataError, EnvError, NonFiniteError, RLTrainingError
from rl_training.experiment.checkpointing import list_checkpoints, load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.health.diagnostics import non_finite
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import small_config

NAN, INF = float("nan"), float("inf")
Plant = Callable[[pytest.MonkeyPatch, int, float], None]


def at_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, count: int, spoil: Callable[..., Any]
) -> None:
    """Let `spoil(result, *args)` change what the `count`-th call returns, or what it was given."""
    original = getattr(owner, name)
    calls = [0]

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls[0] += 1
        return spoil(result, *args) if calls[0] == count else result

    patch.setattr(owner, name, spoiled)


def in_gradient(patch: pytest.MonkeyPatch, count: int, value: float) -> None:
    def spoil(found: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:
        last = found[-1].contiguous()
        last.view(-1)[0] = value
        return (*found[:-1], last)

    at_call(patch, torch.autograd, "grad", count, spoil)


def in_weights(patch: pytest.MonkeyPatch, count: int, value: float) -> None:
    def spoil(result: Any, optimizer: Optimizer, *_: Any) -> Any:
        with torch.no_grad():
            optimizer.parameters[0].view(-1)[0] = value
        return result

    at_call(patch, Adam, "apply", count, spoil)


def in_a_metric(patch: pytest.MonkeyPatch, count: int, value: float) -> None:
    """A loss that is not finite though its gradient is."""

    def spoil(_: Any, recorder: MetricRecorder, *__: Any) -> None:
        last = recorder._pending[0][-1]
        recorder._pending[0][-1] = torch.full_like(last, value)

    at_call(patch, MetricRecorder, "record", count, spoil)


def in_an_observation(patch: pytest.MonkeyPatch, count: int, value: float) -> None:
    def spoil(result: Any, *_: Any) -> Any:
        obs = np.array(result[0])
        obs.reshape(-1)[0] = value
        return (obs, *result[1:])

    at_call(patch, SyncEnvs, "step", count, spoil)


def in_a_reward(patch: pytest.MonkeyPatch, count: int, value: float) -> None:
    def spoil(result: Any, *_: Any) -> Any:
        return (result[0], np.full_like(result[1], value), *result[2:])

    at_call(patch, SyncEnvs, "step", count, spoil)


LEARNER_FAULTS: dict[str, Plant] = {
    "gradient": in_gradient,
    "weights": in_weights,
    "loss": in_a_metric,
}
ENV_FAULTS: dict[str, Plant] = {"observation": in_an_observation, "reward": in_a_reward}
UPDATES = {Loop.ON_POLICY: 3, Loop.OFF_POLICY: 45, Loop.OFFLINE: 65}


@contextmanager
def planted(plant: Plant, count: int, value: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, count, value)
        yield


def require_good(run: Path) -> int:
    """Check that every checkpoint of a run is finite; returns the newest step."""
    entries = list_checkpoints(run)
    for entry in entries:
        assert non_finite(load_checkpoint(entry.path).states) == [], entry.path
    if (run / "best.json").exists():
        assert json.loads((run / "best.json").read_text())["step"] in {e.step for e in entries}
    return entries[-1].step if entries else -1


def stopped(config: TrainConfig, plant: Plant, count: int, value: float) -> RLTrainingError:
    with planted(plant, count, value), pytest.raises((NonFiniteError, EnvError)) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    return caught.value


def bundle(error: RLTrainingError) -> dict[str, Any]:
    match = re.search(r"described in (.*\.json)$", str(error))
    assert match, str(error)
    path = Path(match[1])
    assert path.stat().st_size < 300_000
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["error"] == type(error).__name__
    return found


def quiet_config(algo: str, folder: Path, **changes: Any) -> TrainConfig:
    """A small run in a folder of a known name."""
    return small_config(algo, folder, run_name="run", **changes)


@pytest.mark.expensive
@pytest.mark.parametrize(
    "where", ["gradient", "loss", pytest.param("weights", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("algo", algorithm_names())
def test_a_bad_update_is_never_saved_and_is_described(
    algo: str, where: str, tried: Tried, tmp_path: Path
) -> None:
    # No log line is written before the next checkpoint is due, so that saving has to notice.
    count = UPDATES[get_algorithm_spec(algo).loop]
    value = INF if where == "loss" else NAN
    config = quiet_config(algo, tmp_path, log_interval=1000, total_timesteps=130)
    error = stopped(config, LEARNER_FAULTS[where], count, value)
    newest = require_good(tmp_path / "run")
    found = bundle(error)
    tried(f"NaN or infinity in {where}", algo, 1, int(newest >= found["step"] > 0))
    assert newest < found["step"] or newest == -1
    assert found["not_finite"] or found["first_bad_update"]["seed 0"]
    assert found["config"]["algo"] == algo


@pytest.mark.expensive
@pytest.mark.parametrize("where", ENV_FAULTS)
@pytest.mark.parametrize(
    "algo", [a for a in algorithm_names() if get_algorithm_spec(a).loop is not Loop.OFFLINE]
)
def test_a_bad_environment_stops_the_run_before_anything_is_learned_from_it(
    algo: str, where: str, tried: Tried, tmp_path: Path
) -> None:
    config = quiet_config(algo, tmp_path, eval_episodes=0)
    error = stopped(config, ENV_FAULTS[where], 75, INF)
    assert isinstance(error, EnvError)
    assert re.search(
        rf"index 0, seed 0\) gave a {where} that is not finite at step 7\d", str(error)
    )
    newest = require_good(tmp_path / "run")
    tried(f"NaN or infinity in {where}", algo, 1, int(newest > 75))
    assert 0 < newest <= 75
    assert bundle(error)["not_finite"] == []  # nothing was learned from it


@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_the_run_can_be_resumed_once_the_cause_is_gone(algo: str, tmp_path: Path) -> None:
    count = UPDATES[get_algorithm_spec(algo).loop] + 2
    stopped(quiet_config(algo, tmp_path), in_gradient, count, NAN)
    resumed = resume_training(tmp_path / "run")
    assert resumed.metrics["global_step"] >= 160
    require_good(tmp_path / "run")


def test_the_first_bad_update_and_its_metric_are_named(tmp_path: Path) -> None:
    config = small_config("dqn", tmp_path, log_interval=40, checkpoint_interval=0)
    error = stopped(config, in_a_metric, 5, NAN)
    assert "loss of seed 0 became non-finite by step 40, in update 5 since step 0" in str(error)
    assert bundle(error)["first_bad_update"] == {"seed 0": {"loss": 5}}


def test_the_bad_member_of_a_group_is_named(tmp_path: Path) -> None:
    def spoil(gradients: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        gradients[-1][1].view(-1)[0] = NAN  # of the second seed
        return gradients

    config = small_config("dqn", tmp_path, seeds=[4, 9], checkpoint_interval=0)
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, Optimizer, "gradients", 5, spoil)
        with pytest.raises(
            NonFiniteError, match="of seed 9 became non-finite by step 40"
        ) as caught:
            train(config)
    assert set(bundle(caught.value)["first_bad_update"]) == {"seed 4", "seed 9"}
    assert bundle(caught.value)["first_bad_update"]["seed 4"] == {}


def test_a_diverged_policy_never_becomes_the_best(tmp_path: Path) -> None:
    """The evaluation of broken weights is the best of all, and still nothing of it is kept."""
    config = small_config("dqn", tmp_path, run_name="run", log_interval=1000)
    with pytest.MonkeyPatch.context() as patch:
        in_weights(patch, 70, NAN)
        patch.setattr(
            Evaluator,
            "evaluate",
            lambda self, learner, episodes, step: [[float(step)] * episodes],
        )
        with pytest.raises(NonFiniteError, match=r"learner\.q_network.* holds NaN or infinity"):
            train(config)
    newest = require_good(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "best.json").read_text())["step"] <= newest < 100


def test_a_signal_does_not_save_a_diverged_learner(tmp_path: Path) -> None:
    import os
    import signal

    from rl_training.runtime.callbacks import Callback, TrainerState

    class Interrupt(Callback):
        def on_step(self, state: TrainerState) -> None:
            if state.step == 80:
                os.kill(os.getpid(), signal.SIGTERM)

    config = quiet_config("dqn", tmp_path, log_interval=1000, eval_episodes=0)
    with planted(in_weights, 50, NAN), pytest.raises(NonFiniteError, match="no checkpoint was"):
        train(config, callbacks=[Interrupt()])
    assert require_good(tmp_path / "run") == 50


def test_a_full_disk_does_not_hide_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.experiment.checkpoint import files

    original = files.write_file

    def refuse(path: Path, chunks: Any) -> Any:
        if path.parent.name == "diagnostics":
            raise OSError(28, "No space left on device")
        return original(path, chunks)

    monkeypatch.setattr(files, "write_file", refuse)
    config = small_config("dqn", tmp_path, checkpoint_interval=0)
    with planted(in_a_metric, 5, NAN), pytest.raises(NonFiniteError, match="loss of seed 0"):
        train(config)


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "next_observations"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_dataset_that_is_not_finite_is_refused_before_a_folder_is_made(
    column: str, value: float, tmp_path: Path
) -> None:
    task = probe_env("Pendulum-v1", {})
    columns = columns_of(toy_data(task=task))
    columns[column].reshape(len(columns[column]), -1)[7, 0] = value
    path = write_columns(tmp_path / "data.npz", columns)
    source = {"dataset_kind": "npz", "dataset_path": str(path)}
    config = small_config("td3_bc", tmp_path / "runs", algo_kwargs=source)
    with pytest.raises(DataError, match=f"{column} holds NaN or infinity at row 7"):
        train(config)
    assert not (tmp_path / "runs").exists()
