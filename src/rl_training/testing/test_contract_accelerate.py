"""The contract of compiled updates, for every registered algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner, OnPolicyLearner
from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.sources import replay_settings
from rl_training.algorithms.spec import Loop
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.layers import set_precision
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.compile import runner as accelerate
from rl_training.runtime.compile.cache import Program, Request, as_traced
from rl_training.runtime.compile.equivalence import Undo, compare, effect_of_rounding
from rl_training.runtime.compile.programs import (
    count_of_phase,
    counted,
    example_arguments,
    replay_sources,
    rollout_sources,
)
from rl_training.runtime.compile.trace import Source, trace, trace_once
from rl_training.runtime.phases.imagination import synthetic_buffer
from rl_training.runtime.replay import load_buffer, make_replay
from rl_training.runtime.train import train
from rl_training.testing.contract import (
    PIXEL_TASK,
    above_rounding,
    build,
    has_settings,
    names_under_test,
    nearest_allowed,
    parts_tasks,
    pixel_task,
    rate_name,
    small_config,
    takes_pixels,
    varying_values,
)

every_algorithm = pytest.mark.parametrize("algo", names_under_test())
SEEDS = (3, 5)


def sources_of(
    algo: str, seeds: tuple[int, ...] = SEEDS, **settings: Any
) -> tuple[AnyLearner, EnvSpec, dict[str, Source]]:
    learner, env = build(algo, seeds, **settings)
    if isinstance(learner, OnPolicyLearner):
        return learner, env, rollout_sources(learner, 2)
    names = list(get_algorithm_spec(algo).metrics)
    if replay_settings(learner.config) is None:
        buffer, _ = load_buffer(learner, env)
        learner.see_data(buffer)
        return learner, env, replay_sources(learner, with_imagined(learner, buffer), names)
    replay = filled_replay(learner, env, seeds)
    return learner, env, replay_sources(learner, with_imagined(learner, replay), names)


def filled_replay(learner: AnyLearner, env: EnvSpec, seeds: tuple[int, ...]) -> ReplayBuffer:
    settings = replay_settings(learner.config)
    assert settings is not None
    replay = make_replay(settings, env, 2, learner)
    fill(replay, env)
    generator = torch.Generator().manual_seed(1)
    priorities = torch.rand(len(seeds), 100, generator=generator)
    replay.update_priorities(torch.arange(100).expand(len(seeds), -1), priorities)
    return replay


def with_imagined(learner: AnyLearner, real: ReplayBuffer) -> ReplayBuffer:
    """What batches are drawn from: real rows, mixed with others where the learner imagines."""
    imagination = imagination_of(learner)
    if imagination is None:
        return real
    buffer = synthetic_buffer(imagination, real)
    fill(buffer, None)
    return buffer


def fill(replay: ReplayBuffer, env: EnvSpec | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, rows in replay.rows.items():
        if rows.is_floating_point():
            rows.copy_(torch.randn(rows.shape, generator=generator))
        else:
            assert env is not None
            rows.copy_(torch.randint(env.action_dim, rows.shape, generator=generator))
        if name in ("continues", "truncated"):
            rows.copy_((rows > 0).float())
        if name in ("age", "slot"):  # of frames: no stacks, and successors in the next rows
            rows.fill_(0.0 if name == "age" else -1.0)
    if env is not None and env.observation is not None:
        show_parts(replay.rows, env)
    replay.set_inserted(min(100, replay.capacity))


def show_parts(rows: Mapping[str, Tensor], env: EnvSpec) -> None:
    """Write observations that the task might give, with masks that allow something and actions."""
    for key, name in enumerate(("obs", "next_obs")):
        if name in rows:
            shape = rows[name].shape
            shown = env.example_observations(shape[:-1].numel(), key)
            rows[name].copy_(torch.from_numpy(shown).view(shape))
    if "next_obs" in rows:  # in sequences an action is beside the observation that it led to
        rows["action"].copy_(nearest_allowed(env, rows["obs"], rows["action"]))


def interpreted(source: Source, arguments: tuple[Any, ...]) -> Program:
    """The traced graph, run operation by operation: what a compiler starts from."""
    undo = Undo(source)
    made = trace(source, arguments)
    undo()
    constants = [node.target for node in made.graph.graph.nodes if node.op == "get_attr"]
    assert not constants, f"{source.name}: the compiler takes no constants, {constants}"
    return as_traced(made, source)


def grid_of(algo: str, *, shift: int = 0) -> dict[str, tuple[float, ...]]:
    """Values for SEEDS of every setting that may vary, with a learned temperature."""
    names = get_algorithm_spec(algo).config_class.may_vary()
    return {n: varying_values(algo, n, 2 + shift)[shift:] for n in names if n != "alpha"}


OTHER_WAYS: dict[Loop, list[dict[str, Any]]] = {
    Loop.OFF_POLICY: [{"n_step": 3, "prioritized": True}],
    Loop.ON_POLICY: [{"target_kl": 0.01, "normalize_obs": True}],
    Loop.OFFLINE: [
        {"n_step": 3, "normalize_observations": True},
        {"dataset_mix": [{"kind": "random", "weight": 3.0}, {"kind": "random"}]},
    ],
}
NOISY = {"noisy": True, "dueling": True}
STANDARDISED = {"normalize_observations": True, "normalize_rewards": True}


def continues_online(algo: str) -> bool:
    return get_algorithm_spec(algo).continues_online


OWN_WAYS: dict[str, list[dict[str, Any]]] = {
    "iql": [{"policy_dropout": 0.2, "value_layer_norm": True}],
    **{
        name: [{"task": pixel_task(name), "random_shift": 2, "share_encoder": True}]
        for name in ("sac", "td3", "discrete_sac")
    },
    "cql": [
        {"calibrated": True, "n_step": 3},
        {"calibrated": True, "online": {"buffer_capacity": 400}},
        {"calibrated": True, "online": {"buffer_capacity": 400, "offline_batch_ratio": "union"}},
    ],
    "gail": [
        {"gradient_penalty": 10.0, "spectral_norm": True, "label_smoothing": 0.1},
        {"absorbing_states": True, "normalize_reward": True, "discriminator_rollouts": 3},
        {"task": PIXEL_TASK, "gradient_penalty": 1.0, "absorbing_states": True},
    ],
    "pqn": [STANDARDISED],
    "recurrent_dqn": [STANDARDISED | {"n_step": 2}],
    "recurrent_sac": [STANDARDISED | {"n_step": 2}],
}
"""Settings that take another way through an update, beside those that a loop's methods share."""


def shift_tasks(algo: str) -> list[str]:
    """Return tasks whose images an algorithm can shift."""
    if not has_settings(algo, {"random_shift": 2}):
        return []
    return [*([pixel_task(algo)] if takes_pixels(algo) else []), *parts_tasks(algo)]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (name, settings)
    for name in names_under_test()
    for settings in (
        {},
        *(way for way in OTHER_WAYS[get_algorithm_spec(name).loop] if has_settings(name, way)),
        *([NOISY] if "noisy" in get_algorithm_spec(name).config_class.model_fields else []),
        *([{"online": {"buffer_capacity": 400}}] if continues_online(name) else []),
        *OWN_WAYS.get(name, []),
        {"varied": grid_of(name)},
        *([{"task": pixel_task(name)}] if takes_pixels(name) else []),
        *({"task": task} for task in parts_tasks(name)),
        *({"task": task, "random_shift": 2} for task in shift_tasks(name)),
    )
]


@pytest.mark.expensive(only=("sac", "ppo"))
@pytest.mark.parametrize(("algo", "settings"), VARIANTS)
def test_the_traced_update_does_what_the_eager_one_does(
    algo: str, settings: dict[str, Any]
) -> None:
    learner, env, sources = sources_of(algo, **above_rounding(algo) | settings)
    for name, source in sources.items():
        with counted(learner, count_of_phase(learner, name)):
            arguments = example_arguments(source, learner, env, 2)
            program = interpreted(source, arguments)
            for _ in range(2):
                gap = compare(source, program, arguments)
                assert gap is not None
                assert gap.size < 1e-3, f"{name}: {gap}"
                program(*arguments)


@pytest.mark.expensive(only=("sac",))
@every_algorithm
def test_a_trace_is_the_same_for_other_values_that_vary_and_at_every_stage_of_a_run(
    algo: str,
) -> None:
    codes: list[dict[str, str]] = []
    for shift, progress in ((0, 0.0), (1, 0.6)):
        learner, env, sources = sources_of(algo, varied=grid_of(algo, shift=shift))
        learner.set_progress(progress)
        traces = {}
        for name, source in sources.items():
            with counted(learner, count_of_phase(learner, name)):
                traces[name] = trace_once(source, example_arguments(source, learner, env, 2))
        codes.append({name: made.graph.code for name, made in traces.items()})
        used = {path for made in traces.values() for path in made.inputs}
        assert any(f"learner.varied.{rate_name(algo)}" in path for path in used)
    assert codes[0] == codes[1]


def request_for(config: TrainConfig) -> Request:
    return Request(
        config=config.resolved(),
        env_spec={},
        device="cpu",
        threads=1,
        precision="fp32",
        programs=("act",),
    )


def test_a_program_is_shared_by_grids_of_other_values_and_seeds() -> None:
    def key(**changes: Any) -> str:
        return request_for(small_config("dqn", "runs", **changes)).key

    rates = {"learning_rate": [1e-3, 1e-4]}
    kept = key(seeds=[1, 2], grid=rates)
    assert key(seeds=[5, 6], grid={"learning_rate": [0.5, 0.2]}) == kept
    assert key(seed=1, grid={"learning_rate": [0.1, 0.2, 0.3, 0.4]}) == kept
    other = [
        key(seeds=[1, 2, 3, 4]),
        key(seeds=[1, 2, 3], grid=rates),
        key(seeds=[1, 2], grid={"tau": [0.5, 1.0]}),
        key(grid=rates | {"tau": [0.5, 1.0]}),
        key(seeds=[1, 2], grid=rates, algo_kwargs={"tau": 0.5}),
    ]
    assert len({kept, *other}) == 6


@pytest.mark.expensive(only=("sac",))
@every_algorithm
def test_an_update_in_bf16_stays_close_to_one_in_fp32(algo: str) -> None:
    # Many rows and seeds: a gradient that happens to cancel in a small batch is all rounding.
    larger = {"batch_size": 128, "minibatch_size": 64}
    fields = get_algorithm_spec(algo).config_class.model_fields
    settings = {name: value for name, value in larger.items() if name in fields}
    learner, env, sources = sources_of(algo, tuple(range(8)), **settings)
    for name, source in sources.items():
        if name in ("act", "sample"):
            continue
        with counted(learner, count_of_phase(learner, name)):
            arguments = example_arguments(source, learner, env, 2)
            program = interpreted(source, arguments)
            set_precision(learner, "bf16")
            gap = compare(source, program, arguments)
            set_precision(learner, "fp32")
            assert gap is not None
            allowed = 0.3
            if gap.size >= allowed:  # as in a run: an update may amplify any rounding as much
                rounding = accelerate.ROUNDING["bf16"]
                allowed = max(allowed, effect_of_rounding(source, arguments, rounding))
        assert 1e-5 < gap.size < allowed, f"{name}: {gap}"


@every_algorithm
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_run_resumes_to_the_bit(algo: str, precision: str, tmp_path: Path) -> None:
    config = small_config(algo, tmp_path, accelerate="compile", precision=precision, seeds=[1, 2])
    report = verify_resume(config, 70)
    assert report.identical, report.lines()


def test_a_discriminator_that_knows_absorbing_states_is_traced() -> None:
    learner, env, sources = sources_of("gail", absorbing_states=True)
    source = sources["discriminator_step"]
    arguments = example_arguments(source, learner, env, 2)
    gap = compare(source, interpreted(source, arguments), arguments)
    assert gap is None or gap.size < 1e-4


@every_algorithm
@pytest.mark.slow
def test_a_compiled_group_learns_what_an_eager_one_does(algo: str, tmp_path: Path) -> None:
    config = small_config(algo, tmp_path, seeds=[1, 2], eval_episodes=0)
    eager = logged_updates(algo, train(config.replace(accelerate="off")).run_dir)
    compiled = logged_updates(algo, train(config.replace(accelerate="compile")).run_dir)
    assert len(eager) == len(compiled) > 1
    for one, other in zip(eager, compiled, strict=True):
        assert one == pytest.approx(other, rel=0.02, abs=1e-3)


def logged_updates(algo: str, folder: Path) -> list[dict[str, float]]:
    """Return what the updates of every seed logged."""
    names = list(get_algorithm_spec(algo).metrics)
    lines = [x for p in sorted(folder.rglob("metrics.jsonl")) for x in p.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in names} for row in rows if set(names) <= set(row)]


@pytest.mark.matrix
def test_compiled_runs_resume_to_the_bit_whenever_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "cache"))
    config = small_config("dqn", tmp_path, accelerate="compile")
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    programs = list((tmp_path / "cache" / "programs").glob("*/*/program.so"))
    assert sorted(path.parent.name for path in programs) == ["act", "update-0", "update-1"]

    # A run that compiles beside its first thirty updates, cut before and after it changes over.
    monkeypatch.setattr(accelerate, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(accelerate, "EAGER_SECONDS", 0.0122)
    digests = set()
    for cut in (40, 70):
        report = verify_resume(config.replace(accelerate="auto"), cut)
        assert report.identical, report.lines()
        digests.add(report.digest)
    assert len(digests) == 1
    saved = load_checkpoint(train(config.replace(accelerate="auto")).checkpoint_path).states
    assert saved["accelerator"]["decision"]["value"] == accelerate.COMPILED

    eager = train(config.replace(accelerate="off"))
    compiled = train(config)
    assert compiled.metrics == eager.metrics, "so short a run does not feel rounding"
