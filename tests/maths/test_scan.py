"""A loop over time as one operation: values, gradients, what is traced of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl_training.models import scan as scan_module
from rl_training.models.scan import Scanned, Tensors, scan
from rl_training.runtime.compile.cache import StepCompiler

T, S, B, D, I = 5, 2, 3, 4, 2


@dataclass(frozen=True)
class Cell:
    """h' = tanh(h W + x U) k + c with a counter c' = c + mean h'; also gives h'^2."""

    gain: float = 1.0

    def __call__(
        self, state: Tensors, inputs: Tensors, weights: Tensors
    ) -> tuple[Tensors, Tensors]:
        (h, c), (x, keep), (w, u) = state, inputs, weights
        h = h * keep
        new = torch.tanh(torch.bmm(h, w) * self.gain + torch.bmm(x, u)) + c
        return (new, c + new.mean(-1, keepdim=True)), (new.square(),)


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensors, Tensors, Tensors]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    keep = (torch.rand(T, S, B, 1, generator=generator) > 0.3).to(dtype)
    return (
        (draw(S, B, D).requires_grad_(), draw(S, B, 1).requires_grad_()),
        (draw(T, S, B, I).requires_grad_(), keep),
        (draw(S, D, D).requires_grad_(), draw(S, I, D).requires_grad_()),
    )


def plain_loop(step: Cell, state: Tensors, inputs: Tensors, weights: Tensors) -> Scanned:
    """The same with autograd through every step."""
    states, outputs = [], []
    for t in range(inputs[0].shape[0]):
        state, made = step(state, tuple(each[t] for each in inputs), weights)
        states.append(state)
        outputs.append(made)
    return Scanned(
        tuple(torch.stack(each) for each in zip(*states, strict=True)),
        tuple(torch.stack(each) for each in zip(*outputs, strict=True)),
    )


def weighted_sum(found: Scanned) -> Tensor:
    """A number that depends on every entry in its own way."""
    total = torch.zeros((), dtype=found.states[0].dtype)
    for each in (*found.states, *found.outputs):
        factors = torch.arange(1.0, each.numel() + 1, dtype=each.dtype).view(each.shape)
        total = total + (each * torch.cos(factors)).sum()
    return total


def test_values_and_gradients_are_those_of_the_plain_loop() -> None:
    state, inputs, weights = given()
    leaves = [each for each in (*state, *inputs, *weights) if each.requires_grad]
    ours, theirs = scan(Cell(), state, inputs, weights), plain_loop(Cell(), state, inputs, weights)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0.0)
    gradients = [torch.autograd.grad(weighted_sum(each), leaves) for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0.0)


@pytest.mark.matrix
def test_gradients_are_those_of_small_differences() -> None:
    state, inputs, weights = given()
    keep = inputs[1]

    def flat(h: Tensor, c: Tensor, x: Tensor, w: Tensor, u: Tensor) -> Tensors:
        found = scan(Cell(0.5), (h, c), (x, keep), (w, u))
        return (*found.states, *found.outputs)

    assert torch.autograd.gradcheck(flat, (*state, inputs[0], *weights), fast_mode=False)


@pytest.mark.parametrize("wanted", ["state", "inputs", "weights"])
def test_each_gradient_can_be_had_by_itself(wanted: str) -> None:
    parts = dict(zip(("state", "inputs", "weights"), given(), strict=True))
    some = {
        name: each if name == wanted else tuple(x.detach() for x in each)
        for name, each in parts.items()
    }
    leaves = [each for each in some[wanted] if each.requires_grad]
    every = (some["state"], some["inputs"], some["weights"])
    gradients = [
        torch.autograd.grad(weighted_sum(scan(Cell(), *every)), leaves),
        torch.autograd.grad(weighted_sum(plain_loop(Cell(), *every)), leaves),
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0.0)


def test_a_part_of_the_results_teaches_as_in_the_plain_loop() -> None:
    state, inputs, weights = given()
    gradients = [
        torch.autograd.grad(run(Cell(), state, inputs, weights).outputs[0][2].sum(), weights)
        for run in (scan, plain_loop)
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0.0)


def test_seeds_do_not_meet() -> None:
    state, inputs, weights = given()
    both = scan(Cell(), state, inputs, weights)
    for seed in range(S):
        alone = scan(
            Cell(),
            tuple(each[seed : seed + 1] for each in state),
            tuple(each[:, seed : seed + 1] for each in inputs),
            tuple(each[seed : seed + 1] for each in weights),
        )
        torch.testing.assert_close(alone.states[0][:, 0], both.states[0][:, seed])


def test_a_traced_update_holds_two_nodes_however_long_the_sequence() -> None:
    state, inputs, weights = given(torch.float32)

    def update(w: Tensor, u: Tensor, x: Tensor, keep: Tensor) -> Tensors:
        found = scan(Cell(), tuple(each.detach() for each in state), (x, keep), (w, u))
        return torch.autograd.grad(found.outputs[0].sum(), (w, u))

    def nodes(repeats: int) -> list[str]:
        longer = [each.detach().repeat(repeats, 1, 1, 1) for each in inputs]
        graph = make_fx(update)(*weights, *longer).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    short, long = nodes(1), nodes(8)
    assert len(short) == len(long)
    assert [name for name in long if "rl_training.scan" in name] == [
        "rl_training.scan.default",
        "rl_training.scan_backward.default",
    ]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_halves_do_what_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    state, inputs, weights = given(torch.float32)
    plain = [tuple(each.detach() for each in part) for part in (state, inputs, weights)]
    monkeypatch.setattr(scan_module, "_compilers", [StepCompiler()])
    name = repr(Cell(0.25))
    scan(Cell(0.25), *plain)  # makes the step known
    forward, backward = torch.ops.rl_training.scan, torch.ops.rl_training.scan_backward
    found = [forward(*plain, name, True, compiled) for compiled in (False, True)]
    gradients = []
    for compiled, results in enumerate(found):
        states, outputs, kept = results[:2], results[2:3], results[3:]
        ones = [torch.ones_like(each[1:]) for each in states]
        one = [torch.ones_like(each) for each in outputs]
        arguments = (ones, one, kept, states, plain[1], plain[2], name, bool(compiled))
        gradients.append(backward(*arguments))
        torch.testing.assert_close(results[:3], found[0][:3])
    torch.testing.assert_close(*gradients)
