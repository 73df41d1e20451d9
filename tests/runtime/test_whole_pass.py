"""A pass of the off-policy loop as one graph does what its parts do one by one.

On an accelerator it is captured; here the same function runs as it is.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.runtime.compile.cuda_graph import CapturedPass
from rl_training.runtime.compile.programs import packed_step
from rl_training.runtime.compile.runner import ReplayRunner
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.state import tensors_in
from rl_training.testing.contract import small_config

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sac": ("sac", {}, {}),
    "sac, two environments": ("sac", {"num_envs": 2}, {}),
    "sac, two updates in three steps": (
        "sac",
        {},
        {"train_frequency": 3, "gradient_updates_per_step": 2},
    ),
    "sac, overlap": ("sac", {"overlap": True}, {}),
    "td3, two phases": ("td3", {}, {"policy_delay": 2}),
    "dqn, n-step": ("dqn", {}, {"n_step": 3, "epsilon_start": 0.1, "epsilon_end": 0.1}),
    "sac, a full ring": ("sac", {}, {"buffer_capacity": 40}),
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let runs on the CPU take the way of an accelerator; returns the phases of each pass."""
    found: list[tuple[int, ...]] = []
    take_in, call = ReplayRunner.take_in, CapturedPass.__call__

    def build(runner: ReplayRunner, *arguments: Any) -> Any:
        if runner._pass is None and runner._is_whole:
            learner, replay = runner.learner, runner.replay
            replay._arrays = None  # as on an accelerator, rows are staged
            step: Any = partial(packed_step, learner, replay, runner.recorder.names)
            act = partial(learner.act_from, None, explore=True)
            runner._pass = CapturedPass(
                learner,
                replay,
                runner.recorder,
                torch.inference_mode()(act),
                {0: step, 1: step},
                acts_first=runner.accelerator.config.overlap,
            )
        return take_in(runner, *arguments)

    def noting(self: CapturedPass, seen: Any, obs: Any, phases: tuple[int, ...]) -> Any:
        found.append(phases)
        return call(self, seen, obs, phases)

    monkeypatch.setattr(ReplayRunner, "take_in", build)
    monkeypatch.setattr(CapturedPass, "__call__", noting)
    return found


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pass with updates had begun them before its step."""
    found: list[bool] = []
    begin = CapturedPass.begin

    def noting(self: CapturedPass, count: int) -> None:
        begin(self, count)
        if count:
            found.append(self._begun is not None)

    monkeypatch.setattr(CapturedPass, "begin", noting)
    return found


def learned(path: Path) -> dict[str, Any]:
    """What a run has learned and seen; a whole pass has drawn for the next action already."""
    states = load_checkpoint(path).states
    learner = {name: part for name, part in states["learner"].items() if name != "rng"}
    return {"learner": learner} | {name: states[name] for name in ("replay", "collector", "clock")}


def assert_same(left: Any, right: Any) -> None:
    tensors, others = tensors_in(left), tensors_in(right)
    assert tensors.keys() == others.keys()
    for path, tensor in tensors.items():
        assert torch.equal(tensor, others[path]), path


def run(name: str, folder: Path, stop_at: int | None = None, **changes: Any) -> Any:
    algo, config, settings = CASES[name]
    algo_kwargs = {"learning_starts": 20, "train_frequency": 1, **settings}
    return train(
        small_config(
            algo,
            folder,
            total_timesteps=90,
            eval_episodes=1,
            log_interval=17,
            algo_kwargs=algo_kwargs,
            **config,
            **changes,
        ),
        stop_at=stop_at,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_whole_pass_is_its_parts(
    name: str,
    tmp_path: Path,
    passes: list[tuple[int, ...]],
    early: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run(name, tmp_path / "whole")
    assert passes, "no pass was taken as a whole"
    overlaps = CASES[name][1].get("overlap", False)
    assert set(early) == ({False} if overlaps else {False, True}), "updates before their steps"
    with monkeypatch.context() as patch:
        patch.setattr(ReplayRunner, "take_in", lambda *_: None)
        parts = run(name, tmp_path / "parts")
    assert_same(learned(whole.checkpoint_path), learned(parts.checkpoint_path))
    assert whole.metrics["eval_return_mean"] == parts.metrics["eval_return_mean"]


@pytest.mark.parametrize("name", ["sac", "sac, overlap", "td3, two phases"])
def test_a_run_cut_between_whole_passes_goes_on_as_it_was(
    name: str, tmp_path: Path, passes: list[tuple[int, ...]]
) -> None:
    through = run(name, tmp_path / "through")
    cut = run(name, tmp_path / "cut", stop_at=41)
    resumed = resume_training(cut.run_dir)
    assert passes
    for part in ("learner", "replay", "collector", "recorder", "ahead"):
        assert_same(
            load_checkpoint(resumed.checkpoint_path).states[part],
            load_checkpoint(through.checkpoint_path).states[part],
        )


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # a warning of the compiler's is no reason to stay eager
@pytest.mark.parametrize("name", CASES)
def test_a_captured_pass_is_its_parts_and_can_be_cut(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    changes: dict[str, Any] = {"device": "cuda", "accelerate": "graph"}
    calls: list[int] = []
    call = CapturedPass.__call__

    def counting(self: CapturedPass, *arguments: Any) -> Any:
        calls.append(1)
        return call(self, *arguments)

    monkeypatch.setattr(CapturedPass, "__call__", counting)
    through = run(name, tmp_path / "through", **changes)
    assert len(calls) > 30  # of 35 with two environments, 70 with one
    cut = run(name, tmp_path / "cut", stop_at=41, **changes)
    resumed = resume_training(cut.run_dir)
    for part in ("learner", "replay", "collector", "recorder", "ahead"):
        assert_same(
            load_checkpoint(resumed.checkpoint_path).states[part],
            load_checkpoint(through.checkpoint_path).states[part],
        )
    monkeypatch.setattr(ReplayRunner, "take_in", lambda *_: None)
    parts = run(name, tmp_path / "parts", **changes)
    assert_same(learned(through.checkpoint_path), learned(parts.checkpoint_path))
