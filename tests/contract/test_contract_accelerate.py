"""The contract of compiled updates, for every registered algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.contract import build, small_config
from rl_training.algorithms.base import AnyLearner, OnPolicyLearner
from rl_training.algorithms.replay_config import ReplayConfig
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.models.precision import set_precision
from rl_training.runtime.accelerate import Undo, compare
from rl_training.runtime.compiling import Program
from rl_training.runtime.replay import make_replay
from rl_training.runtime.sources import (
    count_of_phase,
    counted,
    example_arguments,
    replay_sources,
    rollout_sources,
)
from rl_training.runtime.tracing import Source, owned_tensors, trace
from rl_training.runtime.train import train
from rl_training.runtime.verify import verify_resume

every_algorithm = pytest.mark.parametrize("algo", algorithm_names())
SEEDS = (3, 5)


def sources_of(algo: str, **settings: Any) -> tuple[AnyLearner, EnvSpec, dict[str, Source]]:
    learner, env = build(algo, SEEDS, **settings)
    if isinstance(learner, OnPolicyLearner):
        return learner, env, rollout_sources(learner)
    assert isinstance(learner.config, ReplayConfig)
    replay = make_replay(learner.config, env, 2, SEEDS, learner.device)
    generator = torch.Generator().manual_seed(0)
    for name, rows in replay.rows.items():
        if rows.is_floating_point():
            rows.copy_(torch.randn(rows.shape, generator=generator))
        else:
            rows.copy_(torch.randint(env.action_dim, rows.shape, generator=generator))
        if name in ("continues", "truncated"):
            rows.copy_((rows > 0).float())
    replay.set_inserted(100)
    fill = torch.rand(len(SEEDS), 100, generator=generator)
    replay.update_priorities(torch.arange(100).expand(len(SEEDS), -1), fill)
    return learner, env, replay_sources(learner, replay, list(get_algorithm_spec(algo).metrics))


def interpreted(source: Source, arguments: tuple[Any, ...]) -> Program:
    """The traced graph, run operation by operation: what a compiler starts from."""
    undo = Undo(source)
    made = trace(source, arguments)
    undo()
    owned = owned_tensors(source.owners)
    state = tuple(owned[path].detach() for path in made.inputs)

    def call(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return made.graph(*inputs)

    return Program(call, state, made.arguments, made.output)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (name, settings)
    for name in algorithm_names()
    for settings in (
        {},
        *(
            [{"n_step": 3, "prioritized": True}]
            if "prioritized" in get_algorithm_spec(name).config_class.model_fields
            else [{"target_kl": 0.01, "normalize_obs": True}]
        ),
    )
]


@pytest.mark.parametrize(("algo", "settings"), VARIANTS)
def test_the_traced_update_does_what_the_eager_one_does(
    algo: str, settings: dict[str, Any]
) -> None:
    learner, env, sources = sources_of(algo, **settings)
    for name, source in sources.items():
        with counted(learner, count_of_phase(learner, name)):
            arguments = example_arguments(name, learner, env, 2)
            program = interpreted(source, arguments)
            for _ in range(3):
                gap = compare(source, program, arguments)
                assert gap is not None
                assert gap.size < 1e-3, f"{name}: {gap}"
                program(*arguments)


@every_algorithm
def test_a_traced_update_is_the_same_at_every_stage_of_a_run(algo: str) -> None:
    learner, env, sources = sources_of(algo)
    for name, source in sources.items():
        with counted(learner, count_of_phase(learner, name)):
            arguments = example_arguments(name, learner, env, 2)
            learner.set_progress(0.0)
            first = trace(source, arguments)
            learner.set_progress(0.6)
            assert trace(source, arguments).graph.code == first.graph.code


@every_algorithm
def test_an_update_in_bf16_stays_close_to_one_in_fp32(algo: str) -> None:
    learner, env, sources = sources_of(algo)
    for name, source in sources.items():
        if name in ("act", "sample"):
            continue
        arguments = example_arguments(name, learner, env, 2)
        program = interpreted(source, arguments)
        set_precision(learner, "bf16")
        gap = compare(source, program, arguments)
        set_precision(learner, "fp32")
        assert gap is not None
        assert 1e-5 < gap.size < 0.3, f"{name}: {gap}"


@every_algorithm
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_run_resumes_to_the_bit(algo: str, precision: str, tmp_path: Path) -> None:
    config = small_config(algo, tmp_path, accelerate="compile", precision=precision, seeds=[1, 2])
    report = verify_resume(config, 70)
    assert report.identical, report.lines()


def test_a_compiled_dqn_resumes_to_the_bit_and_learns_as_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "cache"))
    config = small_config("dqn", tmp_path, accelerate="compile")
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    programs = list((tmp_path / "cache" / "programs").glob("*/*/program.so"))
    assert sorted(path.parent.name for path in programs) == ["act", "update-0", "update-1"]
    eager = train(config.replace(accelerate="off"))
    compiled = train(config)
    assert compiled.metrics["gradient_steps"] == eager.metrics["gradient_steps"]
    assert compiled.metrics["eval_return_mean"] == eager.metrics["eval_return_mean"]
