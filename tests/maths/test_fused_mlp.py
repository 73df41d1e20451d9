"""The fused stacked MLP means what the plain one means: values, gradients, traces."""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl_training.models import fused_mlp as module
from rl_training.models.fused_mlp import Blocks, Precision, fused_mlp, plain_mlp, supports

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_kernels = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
    reason="needs Triton, with a GPU or with TRITON_INTERPRET=1",
)
# On a GPU tf32 keeps ten bits, and units near zero switch; the interpreter computes it in full.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5 if INTERPRETED else 0.05, "bf16": 1e-4}


class Network:
    """A random stack with inputs, and a random direction to differentiate along."""

    def __init__(self, seeds: int, members: int, batch: int, sizes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        G = seeds * members

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(DEVICE)

        self.x = normal(seeds, batch, sizes[0])
        self.weights = [normal(G, i, o, scale=i**-0.5) for i, o in pairwise(sizes)]
        self.biases = [normal(G, 1, o, scale=0.1) for o in sizes[1:]]
        self.direction = normal(G, batch, sizes[-1])

    def results(
        self, mlp: Any, precision: str, *, need_x: bool = True, need_w: bool = True
    ) -> list[Tensor]:
        """The output and all gradients that are asked for."""
        layers = [*self.weights, *self.biases]
        for tensor, needed in [(self.x, need_x), *((layer, need_w) for layer in layers)]:
            tensor.requires_grad_(needed)
        wanted = [tensor for tensor in (self.x, *layers) if tensor.requires_grad]
        out = mlp(self.x, self.weights, self.biases, precision)
        gradients = torch.autograd.grad((out * self.direction).sum(), wanted)
        return [out.detach(), *gradients]


class RoundedProduct(torch.autograd.Function):
    """A batched product whose operands are rounded to bfloat16, here and in its gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.bmm(rounded(a), rounded(b))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = rounded(gradient)
        return torch.bmm(gradient, rounded(b).mT), torch.bmm(rounded(a).mT, gradient)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def exact_mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], precision: str) -> Tensor:
    """The reference with single-precision sums, where `plain_mlp` rounds sums to bfloat16 too."""
    if precision != "bf16":
        return plain_mlp(x, weights, biases)
    x = x.repeat_interleave(weights[0].shape[0] // x.shape[0], 0)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        product: Tensor = RoundedProduct.apply(x, weight)  # type: ignore[no-untyped-call]
        x = torch.relu(product + bias) if index < len(weights) - 1 else product + bias
    return x


def assert_equal(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a - b).norm() <= tolerance * b.norm()


def test_plain_mlp_is_a_chain_of_linear_layers_with_relu() -> None:
    net = Network(2, 3, 5, (4, 7, 6, 2))
    out = plain_mlp(net.x, net.weights, net.biases)
    assert out.shape == (6, 5, 2)
    for g in range(6):
        h = net.x[g // 3]
        for index in range(3):
            h = h @ net.weights[index][g] + net.biases[index][g]
            h = h.clamp(min=0) if index < 2 else h
        torch.testing.assert_close(out[g], h)


def test_plain_mlp_in_bfloat16_returns_single_precision_close_to_the_truth() -> None:
    net = Network(1, 2, 5, (4, 7, 6, 2))
    out = plain_mlp(net.x, net.weights, net.biases, "bf16")
    exact = plain_mlp(net.x, net.weights, net.biases)
    assert out.dtype == torch.float32
    assert not torch.equal(out, exact)
    torch.testing.assert_close(out, exact, atol=0.05, rtol=0.05)


def test_supports_refuses_what_the_kernels_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(module, "_has_triton", lambda: True)

    def supported(*sizes: int, activation: str = "relu", seeds: int = 1, batch: int = 2) -> bool:
        net = Network(seeds, 1, batch, sizes)
        return supports(net.x, net.weights, activation=activation)

    assert supported(17, 256, 256, 12)
    assert supported(300, 64, 64, 64, 1), "only the last three layers are fused"
    assert not supported(17, 256, 256, 12, activation="tanh")
    assert not supported(17, 256, 12), "one hidden layer"
    assert not supported(129, 64, 64, 1), "too many inputs"
    assert not supported(8, 8, 8, 65), "too many outputs"
    assert supported(8, 8, 8, 1, batch=2049)
    assert supported(8, 8, 8, 1, seeds=5, batch=2048)
    assert not supported(8, 8, 8, 1, seeds=5, batch=2049), "library products are faster"
    net = Network(1, 1, 2, (3, 4, 4, 1))
    assert not supports(net.x.double(), net.weights)
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    assert not supported(17, 256, 256, 12)


def test_the_fused_mlp_falls_back_to_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    net = Network(2, 2, 5, (4, 7, 6, 2))
    assert_equal(net.results(fused_mlp, "fp32"), net.results(plain_mlp, "fp32"), 0)


@runs_kernels
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(
    ("seeds", "members", "batch", "sizes"),
    [
        (1, 2, 40, (23, 40, 50, 1)),
        (2, 1, 33, (17, 40, 50, 12)),
        (2, 2, 20, (5, 150, 20, 6)),
    ],
)
def test_fused_values_and_gradients_equal_plain_ones(
    seeds: int, members: int, batch: int, sizes: tuple[int, ...], precision: Precision
) -> None:
    net = Network(seeds, members, batch, sizes)
    expected = net.results(exact_mlp, precision)
    # The last layer of one output is no matrix product and rounds nothing, unlike the reference.
    tolerance = 0.01 if precision == "bf16" and sizes[-1] == 1 else TOLERANCE[precision]
    assert_equal(net.results(fused_mlp, precision), expected, tolerance)


@runs_kernels
def test_layers_before_the_last_three_may_be_any_number() -> None:
    net = Network(2, 2, 16, (300, 8, 8, 8, 8, 1))
    assert supports(net.x, net.weights)
    assert_equal(net.results(fused_mlp, "fp32"), net.results(plain_mlp, "fp32"), 1e-5)


@runs_kernels
@pytest.mark.parametrize("few", [True, False])
def test_every_way_of_cutting_the_work_gives_the_same(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"height": 16, "width": 32, "tile_depth": 16, "row_blocks": 3} if few else {}
    blocks = Blocks(rows=16, columns=16 if few else 256, depth=16, **shape)
    monkeypatch.setattr(module, "forward_blocks", lambda *_: blocks)
    monkeypatch.setattr(module, "backward_blocks", lambda *_: blocks)
    net = Network(2, 2, 70, (5, 40, 50, 3))
    assert_equal(net.results(fused_mlp, "fp32"), net.results(plain_mlp, "fp32"), 1e-5)


@runs_kernels
@pytest.mark.parametrize(("need_x", "need_w"), [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed_are_computed(need_x: bool, need_w: bool) -> None:
    net = Network(1, 2, 20, (5, 20, 20, 2))

    def results(mlp: Any) -> list[Tensor]:
        return net.results(mlp, "fp32", need_x=need_x, need_w=need_w)

    assert_equal(results(fused_mlp), results(plain_mlp), 1e-5)
    hidden = torch.zeros(2, 20, 20, device=DEVICE)
    dout = torch.zeros(2, 20, 2, device=DEVICE)
    dx, *layers = torch.ops.rl_training.mlp_backward(
        dout, net.x, *net.weights, hidden, hidden, "fp32", need_x, need_w
    )
    assert (dx.numel() > 0) == need_x
    assert [layer.numel() > 0 for layer in layers] == [need_w] * 6


@runs_kernels
def test_gradients_repeat_to_the_bit() -> None:
    net = Network(1, 2, 40, (23, 40, 50, 1))
    first, second = (net.results(fused_mlp, "tf32") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@runs_kernels
def test_a_diverged_network_shows() -> None:
    net = Network(1, 1, 16, (3, 8, 8, 1))
    net.weights[0][0, 1, 2] = torch.nan
    assert fused_mlp(net.x, net.weights, net.biases).isnan().all()


@runs_kernels
def test_hidden_layers_are_kept_only_for_gradients() -> None:
    net = Network(1, 1, 16, (3, 8, 8, 1))
    net.weights[0].requires_grad_()

    def value(x: Tensor) -> Tensor:
        with torch.no_grad():
            return fused_mlp(x, net.weights, net.biases)

    (call,) = (n for n in make_fx(value)(net.x).graph.nodes if "mlp_forward" in str(n.target))
    assert call.args[-1] is False


@runs_kernels
def test_a_trace_of_an_update_holds_two_opaque_operators() -> None:
    net = Network(1, 2, 20, (5, 20, 20, 1))

    def update(x: Tensor, *layers: Tensor) -> list[Tensor]:
        leaves = [layer.detach().requires_grad_() for layer in layers]
        loss = fused_mlp(x, leaves[:3], leaves[3:]).square().mean()
        return [
            layer - gradient
            for layer, gradient in zip(layers, torch.autograd.grad(loss, leaves), strict=True)
        ]

    arguments = (net.x, *net.weights, *net.biases)
    graph = make_fx(update)(*arguments)
    names = [str(node.target) for node in graph.graph.nodes]
    operators = [name for name in names if name.startswith("rl_training")]
    assert operators == ["rl_training.mlp_forward.default", "rl_training.mlp_backward.default"]
    assert_equal(graph(*arguments), update(*arguments), 0)


@runs_kernels
@pytest.mark.parametrize(("need_x", "need_w"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_shapes_told_to_a_compiler_are_those_computed(
    precision: str, need_x: bool, need_w: bool
) -> None:
    net = Network(1, 2, 20, (5, 20, 24, 3))
    operators = torch.ops.rl_training
    layers = [t for pair in zip(net.weights, net.biases, strict=True) for t in pair]
    forward = (net.x, *layers, precision, True)
    torch.library.opcheck(operators.mlp_forward.default, forward, test_utils="test_faketensor")
    _, h1, h2 = operators.mlp_forward(*forward)
    backward = (net.direction, net.x, *net.weights, h1, h2, precision, need_x, need_w)
    torch.library.opcheck(operators.mlp_backward.default, backward, test_utils="test_faketensor")
