"""When compiled programs are used, and what happens when they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.sources import replay_settings
from rl_training.data.replay.pairs import Pairs
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.factory import probe_env
from rl_training.experiment.checkpoint.codec import digest_state
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.compile import cuda_graph
from rl_training.runtime.compile import runner as accelerate
from rl_training.runtime.compile.cache import (
    CompileError,
    CompileJob,
    Program,
    Request,
    cache_folder,
    cuda_options,
    let_copy,
    write_library,
)
from rl_training.runtime.compile.equivalence import compare
from rl_training.runtime.compile.programs import (
    count_of_phase,
    counted,
    example_arguments,
    replay_sources,
)
from rl_training.runtime.compile.runner import Accelerator
from rl_training.runtime.compile.trace import (
    Source,
    Trace,
    contiguous,
    flatten,
    owned_tensors,
    trace,
    unflatten,
)
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.replay import make_replay
from rl_training.runtime.train import train
from rl_training.state import Counter, Scalar, Stateful
from rl_training.testing.contract import small_config


class Messages(Callback):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


class Counting(Stateful):
    """Something with a tensor, a scheduled number and a Python number."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.step = Scalar(2.0, "cpu")
        self.python_number = 5.0

    def add(self, x: Tensor) -> dict[str, Tensor]:
        self.total += x * self.step.tensor
        return {"sum": self.total.sum(), "copy": self.total * self.python_number}


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, AnyLearner, list[str]]:
    env = probe_env(config.env_id, config.env_kwargs)
    spec = get_algorithm_spec(config.algo)
    learner = spec.build(env, config.algo_config, config.all_seeds)
    said: list[str] = []
    return Accelerator(config, env, learner, said.append), learner, said


def test_a_trace_reads_and_writes_the_owners_tensors() -> None:
    owner = Counting()
    made = trace(Source("add", owner.add, {"owner": owner}), (torch.ones(3),))
    assert made.inputs == ("owner.total", "owner.step.tensor")
    assert made.arguments == (0,)
    owner.step.set(10.0)
    total = torch.tensor([1.0, 2.0, 3.0])
    found = made.graph(total, owner.step.tensor, torch.full((3,), 0.5))
    assert torch.equal(total, torch.tensor([6.0, 7.0, 8.0])), "the scheduled number is an input"
    result = unflatten(made.output, iter(found))
    assert torch.equal(result["copy"], total * 5), "a Python number is a constant"


def test_a_function_that_reads_a_number_back_cannot_be_traced() -> None:
    owner = Counting()

    def bad() -> Tensor:
        return owner.total * float(owner.total.sum())

    with pytest.raises(
        CompileError, match=r"bad reads a number back .*`.*float\(owner\.total"
    ) as e:
        trace(Source("bad", bad, {"owner": owner}))
    assert "test_accelerate.py:" in str(e.value)


@pytest.mark.parametrize(
    "next_value",
    [
        lambda learner, obs: obs.sum(-1) * float(obs.max()),
        lambda learner, obs: obs.sum(-1) * learner.progress,
    ],
    ids=["read back", "frozen"],
)
def test_a_run_whose_update_cannot_be_traced_goes_on_as_if_nothing_had_been_tried(
    next_value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("dqn", tmp_path).replace(accelerate="compile")
    accelerator, learner, said = make_accelerator(config)
    settings = replay_settings(learner.config)
    assert settings is not None
    replay = make_replay(settings, accelerator.env, 1, learner)
    replay.set_inserted(100)
    monkeypatch.setattr(learner, "next_value", lambda obs: next_value(learner, obs))
    source = replay_sources(learner, replay, list(get_algorithm_spec("dqn").metrics))["update-0"]
    before = digest_state(learner.state_dict())
    # The path of CUDA, and of a compiling process that failed.
    assert accelerator.programs([source]) == {}
    assert digest_state(learner.state_dict()) == before
    (text,) = said
    assert text.startswith("running without compiled updates: update-0 ")
    assert "test_accelerate.py:" in text


def frozen_next_values(learner: Any, replay: ReplayBuffer) -> dict[str, Callable[[Tensor], Any]]:
    """Ways to take a number that changes during a run from Python, by what the error names."""
    return {
        "learner.epsilon()": lambda obs: obs.sum(-1) * learner.epsilon(),
        "learner.optimizer.rate.value": lambda obs: obs.sum(-1) * learner.optimizer.rate.value,
        "learner.num_updates.value % 97": lambda obs: obs.sum(-1) + learner.num_updates.value % 97,
        "torch.tensor(learner.progress)": lambda obs: obs.sum(-1) * torch.tensor(learner.progress),
        "obs.amin(-1)": lambda obs: obs.amax(-1) if learner.progress < 0.5 else obs.amin(-1),
        "len(replay) / 400": lambda obs: obs.sum(-1) * (len(replay) / 400),
        "replay.progress": lambda obs: obs.sum(-1) * replay.progress,
    }


@pytest.mark.matrix
def test_a_number_that_changes_during_a_run_is_refused_and_named_on_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"n_step": 3, "prioritized": True, "lr_schedule": {"type": "linear"}}
    config = small_config("dqn", tmp_path, algo_kwargs=changes)
    accelerator, learner, said = make_accelerator(config.replace(accelerate="compile"))
    settings = replay_settings(learner.config)
    assert settings is not None
    replay = make_replay(settings, accelerator.env, 1, learner)
    replay.set_inserted(150)
    learner.set_progress(0.25)
    replay.set_progress(0.25)
    metrics = list(get_algorithm_spec("dqn").metrics)
    sources = replay_sources(learner, replay, metrics)
    assert list(sources) == ["act", "update-0", "update-1"]
    before = scheduled(learner, replay)
    for code, next_value in frozen_next_values(learner, replay).items():
        monkeypatch.setattr(learner, "next_value", next_value)
        # The second program too: schedules are back where they were after the first.
        for name in ("update-0", "update-1"):
            with pytest.raises(CompileError) as caught:
                trace(sources[name])
            text = str(caught.value)
            assert text.startswith(f"{name} would freeze a number that changes during a run")
            assert "test_accelerate.py" in text
            assert code in text, (code, text)
        assert scheduled(learner, replay) == before
    # The path of CUDA, and of a compiling process that failed: the run goes on without programs.
    assert accelerator.programs([sources["update-0"]]) == {}
    assert "running without compiled updates: update-0 would freeze" in said[-1]
    monkeypatch.undo()
    for name, source in sources.items():
        with counted(learner, count_of_phase(learner, name)):
            trace(source, example_arguments(source, learner, accelerator.env, 1))
    assert scheduled(learner, replay) == before


def scheduled(learner: AnyLearner, replay: ReplayBuffer) -> list[float]:
    """Everything that depends on the stage of a run."""
    owned = owned_tensors({"learner": learner, "replay": replay})
    numbers = [float(t) for path, t in owned.items() if path.endswith(".tensor")]
    counts = [learner.num_updates.value, replay.inserted.value, len(replay)]
    return [learner.progress, replay.progress, *counts, *numbers]


def test_structures_survive_flattening() -> None:
    value = {"a": torch.ones(1), "b": (torch.zeros(2), None, [torch.ones(3)])}
    tensors, structure = flatten(value)
    back = unflatten(json.loads(json.dumps(structure)), iter(tensors))
    assert back["b"][1] is None
    assert back["b"][2][0] is tensors[2]


def test_every_tensor_is_found_once_by_a_path() -> None:
    owner = Counting()
    assert list(owned_tensors({"x": owner, "y": {"again": owner.total}})) == [
        "x.total",
        "x.step.tensor",
    ]


@pytest.mark.parametrize(
    ("settings", "steps", "first"),
    [
        ({}, 10_000, math.inf),
        ({"hidden_sizes": [256, 256], "batch_size": 256}, 10**6, 4_500),
        ({"hidden_sizes": [64, 64], "batch_size": 64}, 10**6, 60_000),
    ],
)
def test_auto_compiles_long_runs_at_an_update_that_only_settings_decide(
    settings: dict[str, Any], steps: int, first: float, tmp_path: Path
) -> None:
    config = tiny_config("sac", tmp_path, algo_kwargs={"buffer_capacity": 10_000} | settings)
    accelerator, learner, _ = make_accelerator(config)
    batch_size = config.algo_kwargs["batch_size"]
    found = accelerator.first_update(steps, 1, batch_size)
    assert found == pytest.approx(first, rel=0.3) if first < math.inf else found == first
    assert found == make_accelerator(config)[0].first_update(steps, 1, batch_size)
    assert (
        make_accelerator(config.replace(accelerate="off"))[0].first_update(steps, 1, 8) == math.inf
    )
    assert make_accelerator(config.replace(accelerate="compile"))[0].first_update(9, 1, 8) == 0
    assert learner.num_updates.value == 0


@pytest.mark.parametrize(("key", "value"), [("accelerate", "graph"), ("precision", "tf32")])
def test_what_needs_cuda_is_refused_on_a_cpu_and_nothing_is_left(
    key: str, value: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, "dqn")
    outcome = run_cli("train", "--config", path, "--set", f"{key}={value}")
    assert f"{key} {value} needs a CUDA device" in outcome.sentence()
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.matrix
def test_a_compiler_that_fails_leaves_an_eager_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/no-compiler")
    # What PyTorch has compiled before on this machine needs no compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "generated"))
    messages = Messages()
    config = small_config("dqn", tmp_path, total_timesteps=60, accelerate="compile")
    # This process has read CXX already, if it has compiled anything.
    with inductor.patch({"cpp.cxx": ("/nowhere/no-compiler",)}):
        result = train(config, callbacks=[messages])
    assert result.metrics["gradient_steps"] == 40
    assert any("running without compiled updates" in text for text in messages.texts)
    assert not list((tmp_path / "cache" / "programs").glob("*")), "nothing half done is kept"


def test_a_program_that_differs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_job: CompileJob, source: Source) -> Program:
        state = tuple(t.detach() for t in owned_tensors(source.owners).values())
        # Does nothing, and claims the metrics are one.
        shape = (1,) if source.name == "act" else (1, 4)
        return Program(lambda _: [torch.ones(shape)], state, (), "tensor")

    class NoJob(CompileJob):
        def __init__(self, request: Request) -> None:
            self.request, self._process, self._work = request, None, None

    monkeypatch.setattr(NoJob, "load", wrong)
    monkeypatch.setattr(accelerate, "CompileJob", NoJob)
    messages = Messages()
    config = small_config("dqn", tmp_path, total_timesteps=60)
    compiled = train(config.replace(accelerate="compile"), callbacks=[messages])
    assert any("differs from eager" in text for text in messages.texts), messages.texts
    eager = train(config.replace(accelerate="off"))
    assert compiled.metrics == eager.metrics


def test_a_comparison_finds_a_wrong_rate_and_restores_the_state() -> None:
    owner = Counting()
    source = Source("add", owner.add, {"owner": owner})

    def half(inputs: list[Tensor]) -> list[Tensor]:
        inputs[0].add_(inputs[1])
        return [inputs[0].sum(), inputs[0] * 5]

    program = Program(half, (owner.total,), (0,), {"sum": "tensor", "copy": "tensor"})
    gap = compare(source, program, (torch.ones(3),))
    assert gap is not None
    assert gap.size == pytest.approx(0.5)
    assert torch.equal(owner.total, torch.zeros(3))


def test_programs_are_kept_apart_by_what_they_depend_on(tmp_path: Path) -> None:
    config = tiny_config("dqn", tmp_path)

    def key(**changes: Any) -> str:
        request = Request(
            config=config.replace(**changes).resolved(),
            env_spec=probe_env("CartPole-v1", {}).model_dump(mode="json"),
            device="cpu",
            threads=1,
            precision="fp32",
            programs=("act",),
        )
        return request.key

    assert key() == key(seed=5) == key(run_name="other", total_timesteps=9)
    others = [key(num_envs=2), key(seeds=[1, 2]), key(algo_kwargs={"batch_size": 4})]
    assert len({key(), *others}) == 4


def test_the_cache_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "programs"
    assert cache_folder().stat().st_mode & 0o077 == 0
    monkeypatch.setattr("os.getuid", lambda: -5)
    with pytest.raises(CompileError, match="another user"):
        cache_folder()


@pytest.mark.matrix
def test_a_worker_that_dies_makes_the_run_compile_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeadJob(CompileJob):
        def __init__(self, request: Request) -> None:
            self.request, self._process, self._work = request, None, None

        def wait(self) -> None:
            raise CompileError("the compiling process failed: it died of signal 11")

    def interpret(made: Trace, source: Source, _: int) -> Program:
        owned = owned_tensors(source.owners)
        state = tuple(owned[path].detach() for path in made.inputs)

        def call(inputs: list[Tensor]) -> Any:
            with torch.no_grad():
                return made.graph(*inputs)

        return Program(call, state, made.arguments, made.output)

    monkeypatch.setattr(accelerate, "CompileJob", DeadJob)
    monkeypatch.setattr(accelerate, "compile_here", interpret)
    messages = Messages()
    config = small_config("dqn", tmp_path, total_timesteps=60)
    compiled = train(config.replace(accelerate="compile"), callbacks=[messages])
    assert any("signal 11; compiling in this process" in text for text in messages.texts)
    saved = load_checkpoint(compiled.checkpoint_path).states
    assert saved["accelerator"]["decision"]["value"] == accelerate.COMPILED
    eager = train(config.replace(accelerate="off"))
    assert compiled.metrics == eager.metrics


def test_a_program_is_given_slices_as_contiguous_tensors() -> None:
    seen: list[Tensor] = []

    def call(inputs: list[Tensor]) -> list[Tensor]:
        seen.extend(inputs)
        return inputs

    program = Program(call, (), (0, 1), "tensor")
    noise = torch.arange(24.0).view(2, 4, 3)
    program(noise[:, 1], noise.transpose(0, 1))
    assert all(tensor.is_contiguous() for tensor in seen)
    assert torch.equal(seen[0], noise[:, 1])


def test_examples_keep_their_types_and_become_contiguous() -> None:
    column = torch.arange(24.0).view(2, 4, 3)[:, 1:3]
    pairs = Pairs(column, column, column[..., 0])
    found, (other,) = contiguous((pairs, [column]))
    assert isinstance(found, Pairs)
    assert all(tensor.is_contiguous() for tensor in (*found, other))
    assert torch.equal(found.obs, column)


def test_what_was_traced_as_a_view_may_be_copied_and_still_changes_what_is_owned() -> None:
    def function(images: Tensor, state: Tensor) -> Tensor:
        flat = images.view(len(images), -1)
        state.view(-1).add_(flat.sum(0))
        return flat * 2

    images, state = torch.arange(48.0).view(2, 2, 3, 4), torch.zeros(2, 12)
    graph = make_fx(function)(images, state)
    turned = images.contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view"):
        graph(turned, state.clone())
    let_copy(graph)
    owned = torch.zeros(2, 12)
    torch.testing.assert_close(graph(turned, owned), turned.flatten(1) * 2)
    torch.testing.assert_close(owned.flatten(), turned.flatten(1).sum(0))


def test_several_updates_are_captured_as_one_graph_when_they_are_first_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[int] = []
    done: list[int] = []

    def capture(function: Callable[[], None]) -> SimpleNamespace:
        before = len(done)
        function()  # to see how many updates are in it; a graph would do nothing yet
        captured.append(len(done) - before)
        del done[before:]
        return SimpleNamespace(replay=function)

    monkeypatch.setattr(cuda_graph, "capture", capture)
    recorder: Any = SimpleNamespace(
        prepare_keeping=lambda: None, keep=lambda row: None, count_kept=lambda count: None
    )
    learner: Any = SimpleNamespace(num_updates=Counter(), phase=lambda: 0)
    program: Any = lambda: done.append(1)  # noqa: E731
    updates = cuda_graph.CapturedUpdates(learner, recorder, program, 0)
    assert [updates(count) for count in (1, 7, 1)] == [1, 1, 1]
    assert captured == [1]
    most = cuda_graph.STEPS_PER_REPLAY
    assert [updates(count) for count in (most + 2, most, 2)] == [most, most, 1]
    assert captured == [1, most]
    assert len(done) == 4 + 2 * most


def test_programs_may_arrive_while_a_run_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acting is in inference mode, whose tensors updates could not write to."""
    monkeypatch.setattr(cuda_graph, "capture", lambda function: SimpleNamespace(replay=function))
    recorder = MetricRecorder(["loss"], 1, torch.device("cpu"))
    learner: Any = SimpleNamespace(num_updates=Counter(), phase=lambda: 0)
    program: Any = lambda: torch.ones(1, 1)  # noqa: E731
    with torch.inference_mode():
        updates = cuda_graph.CapturedUpdates(learner, recorder, program, 0)
    assert [updates(1), updates(1)] == [1, 1]
    assert recorder.updates.value == 2


@pytest.mark.parametrize(
    ("serial_steps", "planned", "first"), [(1, 10_000, math.inf), (1, 20_000, 0), (79, 500, 0)]
)
def test_a_run_on_an_accelerator_is_compiled_where_its_eager_updates_would_take_long(
    serial_steps: int, planned: int, first: float
) -> None:
    learner = SimpleNamespace(device=torch.device("cuda"), serial_steps=serial_steps)
    run: Any = SimpleNamespace(
        learner=learner, config=SimpleNamespace(precision="fp32"), mode="auto", _failed=False
    )
    assert Accelerator.first_update(run, planned, 1, 256) == first


def test_steps_through_time_follow_one_another() -> None:
    config = small_config("dreamer", Path(), algo_kwargs={"batch_length": 7})
    env = probe_env(config.env_id, config.env_kwargs)
    spec = get_algorithm_spec("dreamer")
    learner = spec.build(env, config.algo_config, (0,), torch.device("cpu"))
    assert learner.serial_steps == 7 + config.algo_config.imagination_horizon  # type: ignore[attr-defined]


def test_a_library_is_not_asked_to_hold_the_operators_of_the_package(tmp_path: Path) -> None:
    """It could be written and not be called: the run then compiles in its own process."""
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    graph.output(graph.call_function(torch.ops.rl_training.norms.default, (values,)))
    made = Trace(torch.fx.GraphModule({}, graph), inputs=(), arguments=(0,), output=None)
    assert made.own_operators == ["rl_training.norms.default"]
    source = Source("update-0", lambda: None, {})
    with pytest.raises(CompileError, match=r"update-0 calls rl_training\.norms\.default, which a"):
        write_library(made, source, tmp_path / "library")
    assert not (tmp_path / "library").exists()


def _graph_of(function: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    return make_fx(function)(torch.ones(1, 4, 3))


@pytest.mark.parametrize(
    ("function", "combined"),
    [
        (lambda x: (x * x).sum(-1).sqrt(), True),
        (torch.linalg.vector_norm, True),  # of all gradients, for clipping
        (lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), False),
        (lambda x: nn.functional.layer_norm(x, (3,)), False),
        (lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), False),
    ],
)
def test_kernels_are_combined_where_no_row_is_normalised(
    function: Callable[[Tensor], Tensor], combined: bool
) -> None:
    """Combined with whole rows, a kernel keeps the assembler busy for minutes."""
    graph = _graph_of(function)
    assert cuda_options(1, graph).get("combo_kernels", False) is combined
    assert "combo_kernels" not in cuda_options(2, graph)
