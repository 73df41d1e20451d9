"""A loop over time as one operation: `scan` applies a step again and again and keeps every state.

Written as a plain loop, a recurrence of T steps is T copies of its operations, forwards and
backwards, and T small products for the gradient of each weight, which are then added up.  Here

- one step is traced once, below autograd, and cut in two: a forward half that keeps what the
  backward half needs, and a backward half that gives the gradient of the state before,
- forward half and backward half run T times each, in the order of time and against it,
- the gradients of weights and inputs follow from one more step over all T at once: given every
  state and the gradient of every state, nothing depends on the step before any more.

Two operators hold the loops, so that a traced update has one node for each and takes no longer to
trace or compile when sequences are longer.  On an accelerator a compiled update compiles the two
halves once (see `set_compiler`) and calls them T times; otherwise they run operation by operation.

Shapes: T steps, S seeds, B batch.  States are `[S, B, ...]`, inputs `[T, S, B, ...]`, weights
`[S, ...]`; what comes back is `[T, S, B, ...]`.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import Graph, GraphModule, Node

Tensors: TypeAlias = tuple[Tensor, ...]
Result = TypeVar("Result")


class Step(Protocol):
    """One step of a recurrence, a function of its arguments alone.

    Two steps with the same `repr` do the same, whatever the process.
    """

    def __call__(
        self, state: Tensors, inputs: Tensors, weights: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return the next state, shaped and typed as the one before, and outputs."""
        ...


class Compiler(Protocol):
    """Who compiles the halves of a step."""

    decompositions: dict[Any, Callable[..., Any]]
    """Operations that are taken apart while a step is traced."""

    def __call__(self, graph: GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        """Return a function that does what the graph does to such inputs."""
        ...


class Scanned(NamedTuple):
    """What a recurrence went through."""

    states: Tensors
    """After each step, `[T, S, B, ...]`."""
    outputs: Tensors
    """Of each step, `[T, S, B, ...]`."""


_steps: dict[str, Step] = {}
_halves: dict[tuple[Any, ...], Halves] = {}
_compilers: list[Compiler] = []


def set_compiler(compiler: Compiler) -> None:
    """Let recurrences of traced updates be compiled, by `compiler`."""
    _compilers[:] = [compiler]


def scan(step: Step, state: Tensors, inputs: Tensors, weights: Tensors) -> Scanned:
    """Apply `step` T times, to each of `inputs` in turn.

    Gradients flow to the first state, the inputs and the weights, but have none of their own.

    Args:
        step: What is repeated.
        state: Before the first step, `[S, B, ...]` each.
        inputs: Of all steps, `[T, S, B, ...]` each; at least one.
        weights: What every step uses, `[S, ...]` each.
    """
    name = repr(step)
    _steps[name] = step
    counts = (len(state), len(inputs))
    # On a CPU programs are compiled by another process, and a run should not wait for the halves.
    compiled = bool(_compilers) and state[0].device.type == "cuda" and _is_traced()
    flat = _Scan.apply(name, counts, compiled, *state, *inputs, *weights)  # type: ignore[no-untyped-call]
    return Scanned(flat[: len(state)], flat[len(state) :])


class _Scan(torch.autograd.Function):
    """The loop forwards, the loop backwards, and one step over all of time for the weights."""

    @staticmethod
    def forward(
        ctx: Any, name: str, counts: tuple[int, int], compiled: bool, *tensors: Tensor
    ) -> Tensors:
        """Keep what the backward half needs if anything needs a gradient."""
        state, inputs, weights = _parted(tensors, counts)
        save = any(ctx.needs_input_grad)
        with _only_noted():
            results = torch.ops.rl_training.scan(state, inputs, weights, name, save, compiled)
        halves = _halves_of(name, state, inputs, weights, save, compiled)
        states, outputs, saved = _parted(results, (len(state), halves.num_outputs))
        if save:
            ctx.name, ctx.counts, ctx.compiled = name, counts, compiled
            ctx.num_saved = len(saved)
            ctx.save_for_backward(*saved, *states, *tensors)
        # The state before the first step is kept in front of the others.
        return (*(each[1:] for each in states), *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Carry gradients back through time, then hand them to weights and inputs at once."""
        num_states = ctx.counts[0]
        saved, states, tensors = _parted(ctx.saved_tensors, (ctx.num_saved, num_states))
        _, inputs, weights = _parted(tensors, ctx.counts)
        of_states, of_outputs = gradients[:num_states], gradients[num_states:]
        with _only_noted():
            arrived = torch.ops.rl_training.scan_backward(
                of_states, of_outputs, saved, states, inputs, weights, ctx.name, ctx.compiled
            )
        needed = ctx.needs_input_grad[3 + num_states :]
        tangents = (*(each[1:] for each in arrived), *of_outputs)
        befores = tuple(each[:-1] for each in states)
        rest = _over_all_steps(_steps[ctx.name], befores, inputs, weights, tangents, needed)
        return (None, None, None, *(each[0] for each in arrived), *rest)


def _over_all_steps(
    step: Step,
    befores: Tensors,
    inputs: Tensors,
    weights: Tensors,
    tangents: Tensors,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of inputs and weights from one step with T B rows.

    Args:
        step: The step.
        befores: States before each step, `[T, S, B, ...]`.
        inputs: Of each step.
        weights: Shared by all.
        tangents: Gradients of states and outputs after each step.
        needed: Which inputs and weights have a gradient.
    """
    with torch.enable_grad():
        rows = [_rows(each).detach() for each in inputs]
        every = [*rows, *(weight.detach() for weight in weights)]
        for tensor, wanted in zip(every, needed, strict=True):
            tensor.requires_grad_(wanted)
        leaves = [tensor for tensor in every if tensor.requires_grad]
        if not leaves:
            return [None] * len(every)
        after, outputs = step(
            tuple(_rows(each) for each in befores),
            tuple(every[: len(inputs)]),
            tuple(every[len(inputs) :]),
        )
    results = [
        (result, _rows(tangent))
        for result, tangent in zip((*after, *outputs), tangents, strict=True)
        if result.requires_grad
    ]
    made = iter(
        torch.autograd.grad(
            [result for result, _ in results],
            leaves,
            [tangent for _, tangent in results],
            allow_unused=True,
        )
    )
    steps, batch = inputs[0].shape[0], inputs[0].shape[2]
    gradients: list[Tensor | None] = []
    for index, tensor in enumerate(every):
        gradient = next(made) if tensor.requires_grad else None
        if gradient is not None and index < len(inputs):
            gradient = gradient.reshape(gradient.shape[0], steps, batch, *gradient.shape[2:])
            gradient = gradient.transpose(0, 1)
        gradients.append(gradient)
    return gradients


def _rows(x: Tensor) -> Tensor:
    """`[T, S, B, ...]` as `[S, T B, ...]`."""
    return x.transpose(0, 1).flatten(1, 2)


def _parted(tensors: Sequence[Tensor], counts: tuple[int, int]) -> tuple[Tensors, Tensors, Tensors]:
    """Cut a flat sequence into the first, the next and the rest."""
    first, second = counts[0], sum(counts)
    return tuple(tensors[:first]), tuple(tensors[first:second]), tuple(tensors[second:])


def _is_traced() -> bool:
    """Whether operations are being noted down to make a program of them."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


_noted = threading.local()


@contextmanager
def _only_noted() -> Iterator[None]:
    """Run a step operation by operation: a traced call is not yet a reason to compile it."""
    _noted.now = True
    try:
        yield
    finally:
        _noted.now = False


# The two operators


@torch.library.custom_op("rl_training::scan", mutates_args=())
def _forward(
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    step: str,
    save: bool,
    compiled: bool,
) -> list[Tensor]:
    """Return states `[T + 1, ...]`, the given one first, outputs `[T, ...]`, and what was kept."""
    halves = _halves_of(step, state, inputs, weights, save, compiled)
    forward = halves.functions()[0]
    inputs = [each.contiguous() for each in inputs]
    weights = [each.contiguous() for each in weights]
    results = halves.allocate(state, inputs[0].shape[0])
    states, others = results[: len(state)], results[len(state) :]
    for kept, first in zip(states, state, strict=True):
        kept[0].copy_(first)
    for t in range(inputs[0].shape[0]):
        forward(
            *(each[t] for each in states),
            *(each[t] for each in inputs),
            *weights,
            *(each[t + 1] for each in states),
            *(each[t] for each in others),
        )
    return results


@_forward.register_fake
def _forward_shapes(
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    step: str,
    save: bool,
    compiled: bool,
) -> list[Tensor]:
    halves = _halves_of(step, state, inputs, weights, save, compiled)
    return halves.allocate(state, inputs[0].shape[0])


@torch.library.custom_op("rl_training::scan_backward", mutates_args=())
def _backward(
    of_states: Sequence[Tensor],
    of_outputs: Sequence[Tensor],
    saved: Sequence[Tensor],
    states: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    step: str,
    compiled: bool,
) -> list[Tensor]:
    """Return the whole gradients of all states, `[T + 1, ...]`, the first one's first."""
    first = [each[0] for each in states]
    backward = _halves_of(step, first, inputs, weights, True, compiled).functions()[1]
    inputs = [each.contiguous() for each in inputs]
    weights = [each.contiguous() for each in weights]
    saved = [each.contiguous() for each in saved]
    states = [each.contiguous() for each in states]
    of_outputs = [each.contiguous() for each in of_outputs]
    arrived = []
    for own in of_states:
        whole = own.new_empty(own.shape[0] + 1, *own.shape[1:])
        whole[0].zero_()
        whole[1:].copy_(own)
        arrived.append(whole)
    for t in reversed(range(inputs[0].shape[0])):
        backward(
            *(each[t] for each in states),
            *(each[t] for each in inputs),
            *weights,
            *(each[t] for each in saved),
            *(each[t + 1] for each in arrived),
            *(each[t] for each in of_outputs),
            *(each[t] for each in arrived),  # the gradient of the state before is added here
        )
    return arrived


@_backward.register_fake
def _backward_shapes(
    of_states: Sequence[Tensor],
    of_outputs: Sequence[Tensor],  # noqa: ARG001 - the operator's arguments
    saved: Sequence[Tensor],  # noqa: ARG001
    states: Sequence[Tensor],  # noqa: ARG001
    inputs: Sequence[Tensor],  # noqa: ARG001
    weights: Sequence[Tensor],  # noqa: ARG001
    step: str,  # noqa: ARG001
    compiled: bool,  # noqa: ARG001
) -> list[Tensor]:
    return [own.new_empty(own.shape[0] + 1, *own.shape[1:]) for own in of_states]


# A step and its gradient, traced once and cut in two


@dataclass
class Halves:
    """Functions of one step that write their results into given tensors.

    Forwards: (state, inputs, weights) and where to put state, outputs and what is kept.
    Backwards: (state, inputs, weights, kept, gradients of state and outputs after) and what the
    gradients of the state before are added to.
    """

    graphs: list[GraphModule]
    """The forward half, and where something is kept the backward half."""
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Of outputs, then of what is kept."""
    num_outputs: int
    device: torch.device
    compiler: Compiler | None
    compiled: list[Callable[..., Any]] | None = None

    def functions(self) -> list[Callable[..., Any]]:
        """Return what to call, compiled by the first call that needs it."""
        if self.compiler is None or getattr(_noted, "now", False):
            return list(self.graphs)
        if self.compiled is None:
            self.compiled = _apart(self._compile)
        return self.compiled

    def _compile(self) -> list[Callable[..., Any]]:
        assert self.compiler is not None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad():
            return [self.compiler(graph, _examples(graph, self.device)) for graph in self.graphs]

    def allocate(self, state: Sequence[Tensor], steps: int) -> list[Tensor]:
        """Return memory for the results of all steps."""
        return [
            *(each.new_empty(steps + 1, *each.shape) for each in state),
            *(state[0].new_empty(steps, *shape, dtype=dtype) for shape, dtype in self.shapes),
        ]


def _halves_of(
    name: str,
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    save: bool,
    compiled: bool,
) -> Halves:
    """Return the halves of a step for tensors of such shapes; `inputs` are of all steps."""
    every = (
        *((tuple(each.shape), each.dtype) for each in state),
        *((tuple(each.shape[1:]), each.dtype) for each in inputs),
        *((tuple(each.shape), each.dtype) for each in weights),
    )
    device = state[0].device
    key = (name, every, len(state), len(inputs), device, save, compiled)
    if key not in _halves:
        counts = (len(state), len(inputs))
        compiler = _compilers[0] if compiled else None
        # In a thread of its own: nothing that notes, fakes or leaves out operations here does so
        # there.
        _halves[key] = _apart(
            lambda: _make_halves(_steps[name], every, counts, device, save, compiler)
        )
    return _halves[key]


def _apart(function: Callable[[], Result]) -> Result:
    """Call a function in another thread."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # handed on below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _make_halves(
    step: Step,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    counts: tuple[int, int],
    device: torch.device,
    save: bool,
    compiler: Compiler | None,
) -> Halves:
    """Trace a step, with its gradient if that will be asked for, and cut it in two."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        examples = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        state, inputs, weights = _parted(examples, counts)
        after, outputs = step(state, inputs, weights)
        tangents = [torch.empty_like(each) for each in (*after, *outputs)] if save else []
    for old, new in zip(state, after, strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype), "a step keeps the state's form"

    def joint(*tensors: Tensor) -> Tensors:
        leaves, step_inputs, step_weights = _parted(tensors[: len(examples)], counts)
        with torch.set_grad_enabled(save):
            leaves = tuple(each.detach().requires_grad_(save) for each in leaves)
            new, made = step(leaves, step_inputs, step_weights)
        results = (*new, *made)
        back = _gradients(results, leaves, tensors[len(examples) :]) if save else ()
        return (*(result.detach() for result in results), *back)

    table = {} if compiler is None else compiler.decompositions
    whole = make_fx(joint, decomposition_table=table, tracing_mode="fake")(*examples, *tangents)
    cut = _Cut(whole, len(examples), counts, len(after) + len(outputs))
    graphs = [cut.forward(), *([cut.backward()] if save else [])]
    kept = tuple((tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in cut.saved)
    made = tuple((tuple(each.shape), each.dtype) for each in outputs)
    return Halves(graphs, made + kept, len(outputs), device, compiler)


def _gradients(results: Tensors, leaves: Tensors, tangents: Tensors) -> Tensors:
    """Gradients of the state before from those of the results; 0 where there is none."""
    pairs = [(r, g) for r, g in zip(results, tangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad(
        [result for result, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
    )
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(found, leaves, strict=True)
    )


def _examples(graph: GraphModule, device: torch.device) -> list[Tensor]:
    """Return tensors as a half takes them."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [
        torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=device)
        for node in nodes
    ]


_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze"}
    | {"squeeze", "slice", "select", "alias", "detach", "as_strided", "unbind", "split"}
    | {"split_with_sizes", "unflatten"}
)


def _is_view(node: Node) -> bool:
    """Whether a node only looks at its argument in another way, so that nothing need be kept."""
    if node.target is operator.getitem:
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and packet.__name__ in _VIEWS


class _Cut:
    """Cuts the graph of a step with its gradient where gradients begin."""

    def __init__(
        self,
        whole: GraphModule,
        num_given: int,
        counts: tuple[int, int],
        num_results: int,
    ) -> None:
        """Find what belongs to which half.

        Args:
            whole: (state, inputs, weights, gradients after) -> (state, outputs, gradients before).
            num_given: Tensors before the gradients.
            counts: Of states and inputs.
            num_results: States and outputs that come out.
        """
        self.whole = whole
        nodes = list(whole.graph.nodes)
        holders = [node for node in nodes if node.op == "placeholder"]
        self.given, self.tangents = holders[:num_given], holders[num_given:]
        results = list(nodes[-1].args[0])
        self.results, self.gradients = results[:num_results], results[num_results:]
        moving = set(self.given[: sum(counts)])  # what differs from step to step
        late: set[Node] = set(self.tangents)
        for node in nodes[:-1]:
            if late.intersection(node.all_input_nodes):
                late.add(node)
            elif moving.intersection(node.all_input_nodes):
                moving.add(node)
        self.saved: list[Node] = []
        """What the forward half keeps for the backward half."""
        self.again: set[Node] = set()
        """What the backward half does once more: views, and what depends on weights alone."""
        read = [each for node in nodes if node in late for each in node.all_input_nodes]
        for node in (*read, *self.gradients):
            self._reach(node, late, moving)

    def _reach(self, node: Node, late: set[Node], moving: set[Node]) -> None:
        """Make a value of the forward half available in the backward half."""
        if node in late or node.op == "placeholder" or node in self.saved or node in self.again:
            return
        if node in moving and not _is_view(node):
            self.saved.append(node)
            return
        for argument in node.all_input_nodes:
            self._reach(argument, late, moving)
        self.again.add(node)

    def forward(self) -> GraphModule:
        """Return the forward half, which writes its results into its last arguments."""
        graph, values = Graph(), {}
        for node in self.given:
            values[node] = self._holder(graph, node)
        kept = [*self.results, *self.saved]
        self._copy(graph, values, kept)
        for index, node in enumerate(kept):
            place = graph.placeholder(f"result_{index}")
            place.meta["val"] = node.meta["val"]
            graph.call_function(torch.ops.aten.copy_.default, (place, values[node]))
        return self._finished(graph)

    def backward(self) -> GraphModule:
        """Return the backward half, which adds its results to its last arguments."""
        graph, values = Graph(), {}
        for node in (*self.given, *self.saved, *self.tangents):
            values[node] = self._holder(graph, node)
        self._copy(graph, values, self.gradients)
        for index, node in enumerate(self.gradients):
            place = graph.placeholder(f"result_{index}")
            place.meta["val"] = self.given[index].meta["val"]
            graph.call_function(torch.ops.aten.add_.Tensor, (place, values[node]))
        return self._finished(graph)

    @staticmethod
    def _holder(graph: Graph, node: Node) -> Node:
        made = graph.placeholder(node.name)
        made.meta["val"] = node.meta["val"]
        return made

    def _copy(self, graph: Graph, values: dict[Node, Node], wanted: Sequence[Node]) -> None:
        """Copy what `wanted` needs and is not there yet, in the order of the whole graph."""
        needed: set[Node] = set()
        left = [node for node in wanted if node not in values]
        while left:
            node = left.pop()
            if node in needed:
                continue
            needed.add(node)
            left += [each for each in node.all_input_nodes if each not in values]
        for node in self.whole.graph.nodes:
            if node in needed:
                values[node] = graph.node_copy(node, lambda each: values[each])

    def _finished(self, graph: Graph) -> GraphModule:
        # Placeholders of results were made after the operations; they must come first.
        nodes = list(graph.nodes)
        first = next((node for node in nodes if node.op != "placeholder"), None)
        if first is not None:
            for node in nodes:
                if node.op == "placeholder":
                    first.prepend(node)
        graph.output(())
        graph.lint()
        return GraphModule(self.whole, graph)
