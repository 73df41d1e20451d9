"""Turns a function that uses tensors of other objects into one graph of tensor operations.

The function is run once, for real, under PyTorch's proxy tracer, which sees operations below
autograd: losses, gradients, optimizer and target updates become one graph, whatever Python was
between them.  Tensors are told apart by identity, so the learner's own code runs unchanged on its
own tensors; those it used become inputs of the graph.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from rl_training.errors import RLTrainingError
from rl_training.rng import Rng
from rl_training.runtime.compile.stages import EARLY, LATE, at_stage
from rl_training.state import PerSeed, Scalar, transient

Owners = Mapping[str, object]
_TORCH = str(Path(torch.__file__).parent)


class CompileError(RLTrainingError):
    """A program could not be compiled or loaded; the run continues without it."""


@dataclass(frozen=True)
class Source:
    """A function that may be compiled, and the objects whose tensors it reads and writes."""

    name: str
    function: Callable[..., Any]
    owners: Owners
    feed: Callable[[], tuple[Any, ...]] | None = None
    """Makes the arguments of each call, where the loop does not give them."""
    examples: Callable[[], tuple[Any, ...]] | None = None
    """Makes arguments like those of `feed` and leaves no trace."""


@dataclass(frozen=True)
class Trace:
    """One graph: inputs are tensors of the owners, then the arguments; outputs are a flat tuple."""

    graph: GraphModule
    inputs: tuple[str, ...]
    """Paths of the owners' tensors that the graph uses."""
    arguments: tuple[int, ...]
    """Positions of the flattened arguments that it uses."""
    output: Any
    """Structure of what the function returned, see `flatten`."""

    @property
    def num_operations(self) -> int:
        """How many operations it has."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)

    @property
    def own_operators(self) -> list[str]:
        """Names of the package's own operators that it calls, such as the loop over time."""
        targets = {node.target for node in self.graph.graph.nodes if node.op == "call_function"}
        names = {str(target) for target in targets}
        return sorted(name for name in names if name.startswith("rl_training."))


def owned_tensors(owners: Owners) -> dict[str, Tensor]:
    """Return every tensor the owners hold, by path; one held twice has the first path."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = list(owners.items())[::-1]
    while left:
        path, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[path] = value
        else:
            left += [(f"{path}.{name}", item) for name, item in _children(value)][::-1]
    return found


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Scalar | PerSeed | transient) or hasattr(value, "state_dict"):
        return list(vars(value).items())
    return []


def owned_rngs(owners: Owners) -> list[Rng]:
    """Return the sources of randomness among the owners' attributes."""
    return [
        value
        for owner in owners.values()
        for value in vars(owner).values()
        if isinstance(value, Rng)
    ]


@contextmanager
def tensor_randomness(owners: Owners) -> Iterator[None]:
    """Let the owners draw random numbers by tensor operations, which can be traced."""
    rngs = owned_rngs(owners)
    before = [rng.as_tensors for rng in rngs]
    for rng in rngs:
        rng.as_tensors = True
    try:
        yield
    finally:
        for rng, value in zip(rngs, before, strict=True):
            rng.as_tensors = value


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of nested tuples, mappings and dataclasses, and their structure.

    The structure is plain data: `"tensor"`, null, a list, or a mapping.
    """
    if isinstance(value, Tensor):
        return [value], "tensor"
    if value is None:
        return [], None
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        parts = {name: flatten(item) for name, item in value.items()}
        tensors = [tensor for found, _ in parts.values() for tensor in found]
        return tensors, {name: structure for name, (_, structure) in parts.items()}
    assert isinstance(value, list | tuple), f"cannot be traced: {value!r}"
    items = [flatten(item) for item in value]
    return [tensor for found, _ in items for tensor in found], [spec for _, spec in items]


def unflatten(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Put tensors back into the structure of `flatten`; lists come back as tuples."""
    if structure is None:
        return None
    if structure == "tensor":
        return next(tensors)
    if isinstance(structure, Mapping):
        return {name: unflatten(item, tensors) for name, item in structure.items()}
    return tuple(unflatten(item, tensors) for item in structure)


def contiguous(value: Any) -> Any:
    """Return nested tuples, mappings and dataclasses with every tensor contiguous."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.contiguous()
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **contiguous(fields))
        return leaf

    return tree_map(moved, value)


def trace(source: Source, arguments: Sequence[Any] = ()) -> Trace:
    """Run `source` on `arguments` and return what it did as a graph; the owners' tensors change.

    It is run at two stages of a run: a number of Python's is a constant of the graph, so that one
    which changes meanwhile would be frozen.

    Raises:
        CompileError: When there is such a number, or one is read back from a tensor, naming the
            line of code.
    """
    try:
        with at_stage(source.owners, EARLY):
            early = trace_once(source, arguments)
        with at_stage(source.owners, LATE):
            late = trace_once(source, arguments)
    except RuntimeError as error:
        raise CompileError(f"{source.name} {_untraceable(error)}") from error
    if _first_difference(early.graph, late.graph) is None:
        return early
    # Once more with the lines of code that operations come from, which cost much to keep.
    with at_stage(source.owners, LATE), _noting_lines():
        late = trace_once(source, arguments)
    raise CompileError(f"{source.name} {_frozen(early.graph, late.graph)}")


def trace_once(source: Source, arguments: Sequence[Any] = ()) -> Trace:
    """Run `source` at the present stage of the run; its numbers of Python's are not checked."""
    from torch.fx.experimental.proxy_tensor import make_fx

    owned = owned_tensors(source.owners)
    flat_arguments, _ = flatten(list(arguments))
    structure: list[Any] = []

    def run(*_: Tensor) -> tuple[Tensor, ...]:
        tensors, spec = flatten(source.function(*arguments))
        structure.append(spec)
        return tuple(tensor.detach() for tensor in tensors)

    with tensor_randomness(source.owners):
        made = make_fx(run, decomposition_table=decompositions())(*owned.values(), *flat_arguments)
    graph: GraphModule = made
    examples = [*owned.values(), *flat_arguments]
    used = _drop_unused_inputs(graph, examples)
    paths = list(owned)
    return Trace(
        graph,
        tuple(paths[i] for i in used if i < len(paths)),
        tuple(i - len(paths) for i in used if i >= len(paths)),
        structure[0],
    )


@contextmanager
def _noting_lines() -> Iterator[None]:
    """Keep the lines of code that operations come from; PyTorch itself keeps those of modules."""
    original = Graph.create_node

    def create_node(graph: Graph, *arguments: Any, **options: Any) -> Node:
        node = original(graph, *arguments, **options)
        frames = traceback.extract_stack()[:-1]
        outside = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
        node.stack_trace = (
            f"{Path(outside[-1].filename).name}:{outside[-1].lineno}, `{outside[-1].line}`"
        )
        return node

    # There is no hook for it.
    Graph.create_node = create_node  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Graph.create_node = original  # type: ignore[method-assign]


def _first_difference(left: GraphModule, right: GraphModule) -> tuple[Node, Node] | None:
    """Return the first operations in which two graphs differ; None when they are the same."""
    for a, b in zip_longest(left.graph.nodes, right.graph.nodes):
        if a is None or b is None:
            last = [list(graph.graph.nodes)[-1] for graph in (left, right)]
            return a or last[0], b or last[1]
        if _described(a, left) != _described(b, right):
            return a, b
    return None


def _described(node: Node, graph: GraphModule) -> str:
    """Return an operation as text, with the values of constant tensors."""
    if node.op == "get_attr":
        return f"constant {getattr(graph, str(node.target)).tolist()}"
    return f"{node.op} {node.target} {node.args} {node.kwargs}"


def _frozen(early: GraphModule, late: GraphModule) -> str:
    """Say which number of a program changes during a run, and where it comes from."""
    nodes = _first_difference(early, late)
    assert nodes is not None
    leaves = [tree_leaves((node.args, node.kwargs)) for node in nodes]
    pairs = [
        f"{a} early in a run and {b} late"
        for a, b in zip(*leaves, strict=False)
        if not isinstance(a, Node) and not isinstance(b, Node) and a != b
    ]
    constants = [_described(node, graph) for node, graph in zip(nodes, (early, late), strict=True)]
    change = pairs[0] if pairs else f"{constants[0]} early in a run and {constants[1]} late"
    return (
        f"would freeze a number that changes during a run: {change}, in {nodes[1].target} at "
        f"{nodes[1].stack_trace}; keep it in a Scalar that set_progress sets, and read its tensor"
    )


def _untraceable(error: RuntimeError) -> str:
    """Say what the tracer could not follow, and where it is."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    place = f"{Path(outside[-1].filename).name}:{outside[-1].lineno}, `{outside[-1].line}`"
    if "tracing tensor" in str(error):
        return (
            f"reads a number back from a tensor at {place}; keep it a tensor, choose by "
            "torch.where, or by phase() where the choice follows from the number of updates"
        )
    return f"cannot be traced at {place}: {str(error).strip().splitlines()[0]}"


def _drop_unused_inputs(graph: GraphModule, examples: Sequence[Tensor]) -> list[int]:
    """Remove inputs nobody reads; returns the positions of the others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    used = []
    fake = FakeTensorMode()
    for node in list(graph.graph.nodes):
        node.meta.pop("val", None)
        node.meta.pop("tensor_meta", None)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, (node, example) in enumerate(zip(placeholders, examples, strict=True)):
        if node.users:
            used.append(index)
            node.meta["val"] = fake.from_tensor(example.detach())
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations that a compiler does better with when they are taken apart."""
    aten = torch.ops.aten
    return {
        aten._fused_adam_.default: _adam,
        aten._fused_adam_.tensor_lr: _adam,
        aten._foreach_lerp_.Scalar: _lerp,
        aten.addmm.default: _addmm,
        aten.baddbmm.default: _baddbmm,
        aten.bmm.default: _bmm,
    }


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    _max_second: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    grad_scale: Tensor | None = None,
    **_: Any,
) -> None:
    """Adam as element-wise operations (Kingma & Ba, 2015, end of Section 2)."""
    # By memory: while tracing, the one count of all tensors comes as another object for each.
    different = {step.data_ptr(): step for step in steps}
    rates = {
        key: (lr / (1 - beta1**step), (1 - beta2**step).sqrt()) for key, step in different.items()
    }
    for p, g, m, v, step in zip(parameters, gradients, first, second, steps, strict=True):
        size, root = rates[step.data_ptr()]
        g = g if grad_scale is None else g / grad_scale
        g = g if weight_decay == 0.0 else g + weight_decay * p
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.sub_(size * m / (v.sqrt() / root + eps))


def _lerp(targets: list[Tensor], sources: list[Tensor], weight: float) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, weight)


def _addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    # Apart, the bias goes into the same loop as the activation.
    return torch.mm(x, w) + bias if beta == alpha == 1 else NotImplemented


def _baddbmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return torch.bmm(x, w) + bias if beta == alpha == 1 else NotImplemented


def _bmm(x: Tensor, w: Tensor) -> Any:
    return torch.mm(x[0], w[0]).unsqueeze(0) if x.shape[0] == 1 else NotImplemented
