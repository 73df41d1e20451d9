"""Compiles traces and keeps the results on disk.

On a CPU a trace becomes a shared library, made by a separate process that builds the same learner
from the same settings: the run continues meanwhile and later loads the library in a millisecond.
On an accelerator the trace is compiled in this process; PyTorch caches its code on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rl_training.experiment.registry import plugin_sources
from rl_training.models.fused_mlp import Precision
from rl_training.models.scan import set_compiler
from rl_training.runtime.compile.trace import CompileError as CompileError
from rl_training.runtime.compile.trace import (
    Source,
    Trace,
    decompositions,
    flatten,
    owned_tensors,
    unflatten,
)

PACKAGE = Path(__file__).resolve().parents[2]
LIBRARY, DESCRIPTION = "program.so", "program.json"
CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Program:
    """A compiled function, bound to the tensors of its owners."""

    call: Callable[[list[Tensor]], Sequence[Tensor]]
    state: tuple[Tensor, ...]
    arguments: tuple[int, ...]
    output: Any

    def __call__(self, *arguments: Any) -> Any:
        """Run it; the owners' tensors change as if the function itself had run.

        A program reads its arguments where the examples it was made from had them, contiguous; a
        slice lies elsewhere.
        """
        given: Sequence[Tensor] = ()
        if self.arguments:
            plain = all(isinstance(argument, Tensor) for argument in arguments)
            flat = arguments if plain else flatten(list(arguments))[0]
            given = [flat[i].contiguous() for i in self.arguments]
        outputs = self.call([*self.state, *given])
        return outputs[0] if self.output == "tensor" else unflatten(self.output, iter(outputs))


@dataclass(frozen=True)
class Request:
    """What a compiling process must know to build the same learner."""

    config: dict[str, Any]
    env_spec: dict[str, Any]
    device: str
    threads: int
    precision: Precision
    programs: tuple[str, ...]
    data: dict[str, Any] | None = None
    """`DatasetShape` of recorded data: the number of rows is a constant of its programs."""

    @property
    def key(self) -> str:
        """Name of the result: it depends on the settings, the code and the machine."""
        config = {k: v for k, v in self.config.items() if k in _RELEVANT}
        # Of settings that vary only the names matter: their values are inputs of a program.
        grid = self.config["grid"]
        config["algo_kwargs"] = {k: v for k, v in config["algo_kwargs"].items() if k not in grid}
        config["members"] = math.prod([len(self.config["seeds"] or [0]), *map(len, grid.values())])
        config["varied"] = sorted(grid)
        own = hashlib.sha256()
        for name in (self.config["algo"], str(self.config["algo_kwargs"].get("encoder"))):
            for file in plugin_sources(name):
                own.update(file.read_bytes())
        parts = [asdict(self) | {"config": config}, _fingerprint(), own.hexdigest()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


_RELEVANT = ("algo", "algo_kwargs", "num_envs", "env_kwargs")


@cache
def _fingerprint() -> list[str]:
    """What a program depends on beside its settings: our code, PyTorch, the processor."""
    code = hashlib.sha256()
    for part in ("algorithms", "models", "data", "envs", "rng.py", "state.py", "runtime"):
        path = PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            code.update(file.read_bytes())
    return [code.hexdigest(), torch.__version__, platform.python_version(), processor()]


@cache
def processor() -> str:
    """Return a name of the processor that tells its instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    model = sorted({line for line in lines if line.startswith("model name")})
    flags = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    digest = hashlib.sha256("".join(flags).encode()).hexdigest()[:8]
    return f"{platform.machine()} {' '.join(m.split(':')[1].strip() for m in model)} {digest}"


def has_bf16() -> bool:
    """Whether the processor has instructions for bf16 products."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def cache_folder() -> Path:
    """Return where compiled programs are kept: `$RL_TRAINING_CACHE`, or the user's cache folder.

    Raises:
        CompileError: When it belongs to somebody else, whose code we would run.
    """
    base = os.environ.get("RL_TRAINING_CACHE")
    if base is None:
        base = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rl_training"
        )
    folder = Path(base) / "programs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise CompileError(f"the cache {folder} belongs to another user; set RL_TRAINING_CACHE")
    return folder


def keep_generated_code() -> None:
    """Let PyTorch keep what it generates beside our programs, unless the user says where.

    Its own choice is a folder for temporary files, which does not outlive the machine's next start.
    """
    if CODE_FOLDER not in os.environ:
        os.environ[CODE_FOLDER] = str(cache_folder().parent / "generated")


class CompileJob:
    """A process that compiles the programs of a request, unless the cache has them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.folder = cache_folder() / request.key
        self._process: subprocess.Popen[bytes] | None = None
        self._work: Path | None = None
        if self._cached():
            return
        self._work = Path(tempfile.mkdtemp(prefix=".compiling-", dir=self.folder.parent))
        (self._work / "request.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
        with open(self._work / "log.txt", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_training.runtime.compile.worker", str(self._work)],
                stdout=log,
                stderr=subprocess.STDOUT,
                # A plug-in or a task of the user may lie beside the script that was started.
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def _cached(self) -> bool:
        return all((self.folder / name / DESCRIPTION).is_file() for name in self.request.programs)

    @property
    def is_cached(self) -> bool:
        """Whether nothing had to be compiled."""
        return self._process is None

    def wait(self) -> None:
        """Wait until the programs are in the cache.

        Raises:
            CompileError: When the process failed, with the last line of what it said.
        """
        if self._process is None:
            return
        code = self._process.wait()
        assert self._work is not None
        if code != 0:
            said = (self._work / "log.txt").read_text(errors="replace").strip().splitlines()
            reason = said[-1] if said and code > 0 else f"it died of signal {-code}"
            raise CompileError(f"the compiling process failed: {reason}")
        try:
            os.rename(self._work, self.folder)
        except OSError as error:
            if not self._cached():  # else another run was faster
                raise CompileError(f"cannot write to the cache {self.folder}: {error}") from error
        self.close()

    def load(self, source: Source) -> Program:
        """Return the program of `source`, bound to its owners.

        Raises:
            CompileError: When it does not fit them or cannot be loaded.
        """
        return load_library(source, self.folder / source.name)

    def close(self) -> None:
        """Stop compiling and clean up; may be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None


def write_library(made: Trace, source: Source, folder: Path) -> None:
    """Compile a trace into a shared library with a description beside it.

    Raises:
        CompileError: When it calls operators of the package, which no library can hold.
    """
    import torch._inductor as inductor

    if made.own_operators:
        raise CompileError(
            f"{source.name} calls {', '.join(made.own_operators)}, which a library cannot hold"
        )
    folder.mkdir(parents=True)
    owned = owned_tensors(source.owners)
    examples = tuple(
        node.meta["val"] for node in made.graph.graph.nodes if node.op == "placeholder"
    )
    with torch.no_grad():
        library = inductor.aot_compile(
            made.graph, examples, options={"aot_inductor.output_path": str(folder / LIBRARY)}
        )
    assert library == str(folder / LIBRARY), library
    described = {
        "inputs": [[p, list(owned[p].shape), str(owned[p].dtype)] for p in made.inputs],
        "arguments": made.arguments,
        "output": made.output,
    }
    (folder / DESCRIPTION).write_text(json.dumps(described), encoding="utf-8")


def load_library(source: Source, folder: Path) -> Program:
    """Bind the library in `folder` to the owners of `source`.

    Raises:
        CompileError: When it does not fit them or cannot be loaded.
    """
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    owned = owned_tensors(source.owners)
    state = []
    for path, shape, dtype in described["inputs"]:
        tensor = owned.get(path)
        if tensor is None or [list(tensor.shape), str(tensor.dtype)] != [shape, dtype]:
            raise CompileError(f"{source.name}: {path} is not {dtype} {shape} here")
        state.append(tensor.detach())
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
    except RuntimeError as error:
        raise CompileError(f"{folder / LIBRARY} cannot be loaded: {error}") from error
    return Program(runner.run, tuple(state), tuple(described["arguments"]), described["output"])


CUDA_OPTIONS: dict[str, Any] = {
    # Kernels are cut by rule, not by timing them: a busy machine would choose badly, and a resumed
    # run might choose otherwise and sum in another order.
    "deterministic": True,
    # Random numbers and gathered rows are made once, not again in every sum that needs them.
    "realize_opcount_threshold": 10,
    "realize_reads_threshold": 2,
}
COMBINED: dict[str, Any] = {
    # Kernels that do not wait for each other become one. For small tensors most of a kernel's time
    # is its launch.
    "combo_kernels": True,
    "combo_kernels_autotune": 0,
}
NORMS = ("aten.native_layer_norm", "aten.native_group_norm", "aten.rsqrt")
"""Operations of layers that divide rows by a sum over them; that of unit vectors is another."""


def cuda_options(num_seeds: int, graph: GraphModule) -> dict[str, Any]:
    """Return how the compiler makes kernels of a graph.

    Kernels are combined for one seed alone, those of many are slower together, cut into blocks of
    one size; and only where nothing is normalised.  A combined kernel that holds whole rows is
    20 MB of assembly, over which the assembler sits for minutes.

    Args:
        num_seeds: Of how many seeds its tensors are.
        graph: What is compiled.
    """
    plain = num_seeds > 1 or any(_normalises(node) for node in graph.graph.nodes)
    return CUDA_OPTIONS if plain else CUDA_OPTIONS | COMBINED


def _normalises(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target == torch.ops.aten.linalg_vector_norm.default:
        axes = node.args[2] if len(node.args) > 2 else None
        return bool(axes)  # that of all gradients, for clipping, has none
    return str(node.target).startswith(NORMS)


class StepCompiler:
    """Compiles the halves of a step that a traced update repeats over time, see `models.scan`."""

    def __init__(self) -> None:
        self.decompositions = decompositions()

    def __call__(self, graph: GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile one half."""
        import torch._inductor as inductor

        keep_generated_code()
        state = examples[0]  # [S, B, ...]
        options = cuda_options(state.shape[0], graph) if state.is_cuda else None
        compiled: Callable[..., Any] = inductor.compile(graph, list(examples), options=options)
        return compiled


set_compiler(StepCompiler())


def compile_here(made: Trace, source: Source, num_seeds: int) -> Program:
    """Compile a trace in this process.

    Args:
        made: The trace.
        source: What was traced.
        num_seeds: How many seeds its tensors are of.

    Raises:
        CompileError: When the compiler gives up.
    """
    import torch._inductor as inductor

    examples = [node.meta["val"] for node in made.graph.graph.nodes if node.op == "placeholder"]
    on_cuda = any(example.is_cuda for example in examples)
    keep_generated_code()
    if on_cuda:
        let_copy(made.graph)
    try:
        with torch.no_grad():
            options = cuda_options(num_seeds, made.graph) if on_cuda else None
            compiled = inductor.compile(made.graph, examples, options=options)
    except Exception as error:  # whatever the compiler raises, the run can continue
        raise CompileError(f"{source.name}: {type(error).__name__}: {error}") from error

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            result: Sequence[Tensor] = compiled(*inputs)
        return result

    return _bound(call, made, source)


def let_copy(graph: GraphModule) -> None:
    """Let the compiler copy where a view was traced.

    Kernels may lay out what they return, images above all, otherwise than the compiler expects.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()


def as_traced(made: Trace, source: Source) -> Program:
    """Bind a trace as it is: its operations one by one, without Python or autograd around them."""

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            result: Sequence[Tensor] = made.graph(*inputs)
        return result

    return _bound(call, made, source)


def _bound(
    call: Callable[[list[Tensor]], Sequence[Tensor]], made: Trace, source: Source
) -> Program:
    owned = owned_tensors(source.owners)
    state = tuple(owned[path].detach() for path in made.inputs)
    return Program(call, state, made.arguments, made.output)
