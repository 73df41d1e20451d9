"""Stacked MLPs in few kernel launches: one forward, one for all gradients.

A small network spends its time on launches, not on products.  Here the last three layers of every
network of a stack run inside one Triton kernel (`mlp_kernels`), and so does their whole backward
pass.  `fused_mlp` and `plain_mlp` mean the same; `supports` says where the kernels can run, and
`fused_mlp` is `plain_mlp` elsewhere.

Shapes: G networks (seeds times members), N networks in a row that share inputs, B batch, I inputs,
O outputs.  `x [G / N, B, I]`, weights `[G, I, O]`, biases `[G, 1, O]`, result `[G, B, O]`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Precision = Literal["fp32", "tf32", "bf16"]

MANY = 4
"""Networks up to this number are cut into small programs."""
MAX_INPUTS, MAX_HIDDEN, MAX_OUTPUTS = 128, 1024, 64
MAX_ROWS = 2048
"""Larger batches of many networks keep the device busy, and library products are faster at them."""
# Three products of rounded halves lose less than 1e-6, and run on the matrix units.
_DOT = {"fp32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut; the kernels say what each number means."""

    rows: int
    """Rows of the batch that a program works on at a time."""
    columns: int
    """Hidden units of a program; fewer mean more programs and more parts to add up."""
    depth: int
    """Units of the other hidden layer per step."""
    row_blocks: int = 1
    """Programs that share the batch, when the first weights need a gradient."""
    height: int = 64
    """Rows of a tile of the middle weights."""
    width: int = 64
    """Columns of a tile of the middle weights."""
    tile_depth: int = 64
    """Rows of the batch per step of such a tile."""
    warps: int = 4
    """Groups of 32 threads per program."""
    stages: int = 3
    """Steps whose loads are under way at once."""


def forward_blocks(G: int, precision: str) -> Blocks:
    """Cut few networks into many small programs, and many networks so that weights are reused."""
    if G <= MANY:
        return Blocks(rows=16 if G == 1 else 32, columns=32, depth=64, stages=4)
    if G <= 32:
        return Blocks(rows=64, columns=64, depth=64)
    if precision == "bf16":
        return Blocks(rows=128, columns=256, depth=32, warps=8)
    return Blocks(rows=64, columns=128, depth=32)


def backward_blocks(G: int, precision: str, need_w: bool) -> Blocks:
    """Cut the backward pass, likewise; without weights no program holds sums over the batch."""
    if G <= MANY:
        return Blocks(rows=32, columns=32, depth=64, row_blocks=8, height=32, width=64)
    if G <= 32:
        return Blocks(rows=64, columns=64, depth=64, row_blocks=4)
    if precision == "bf16":
        rows = 64 if need_w else 128
        return Blocks(rows=rows, columns=128, depth=32, height=128, width=128, warps=8)
    return Blocks(rows=64, columns=64, depth=32, height=64, width=64, tile_depth=32)


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    """Whether Triton is installed; looked up once, without importing it."""
    return importlib.util.find_spec("triton") is not None


def supports(
    x: Tensor,
    weights: Sequence[Tensor],
    precision: Precision = "bf16",
    *,
    activation: str = "relu",
) -> bool:
    """Whether the kernels can run: Triton on CUDA, relu, two or more hidden layers, fitting sizes.

    More than four networks only in bf16: batched products of single precision are faster there, and
    on an H200 tf32 kernels with large row blocks did not repeat bit-exactly.  The last three layers
    count: at most 128 inputs (or hidden units before them), 1024 hidden units and 64 outputs.  Of
    many networks a batch may have 2048 rows: beyond, library products are faster.
    Layer normalisation is for the caller to rule out.
    """
    if activation != "relu" or len(weights) < 3:
        return False
    if x.device.type != "cuda" and not _interpreted():
        return False
    if not _has_triton():
        return False
    if precision != "bf16" and weights[0].shape[0] > MANY and not _interpreted():
        return False
    inputs, hidden = weights[-3].shape[-2:]
    last_hidden, outputs = weights[-1].shape[-2:]
    sizes = inputs <= MAX_INPUTS and max(hidden, last_hidden) <= MAX_HIDDEN
    sizes = sizes and (x.shape[-2] <= MAX_ROWS or weights[0].shape[0] <= MANY)
    single = all(tensor.dtype == torch.float32 for tensor in (x, *weights))
    return sizes and outputs <= MAX_OUTPUTS and single


def plain_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = "fp32"
) -> Tensor:
    """Apply the layers by batched products, with relu between them.

    `tf32` and `fp32` differ only by `torch.set_float32_matmul_precision`, which is the caller's.
    """
    G = weights[0].shape[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = x.to(dtype)
    if x.shape[0] != G:
        x = x.unsqueeze(1).expand(-1, G // x.shape[0], -1, -1).flatten(0, 1)
    last = len(weights) - 1
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(bias.to(dtype), x, weight.to(dtype))
        if index < last:
            x = torch.relu(x)
    return x.float()


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = "fp32"
) -> Tensor:
    """Apply the layers with relu between them, the last three in one kernel where supported.

    Layers before the last three are plain batched products.  Gradients have no gradients of their
    own here; an algorithm that differentiates twice uses `plain_mlp`.
    """
    if not supports(x, weights, precision):
        return plain_mlp(x, weights, biases, precision)
    if len(weights) > 3:
        x = torch.relu(plain_mlp(x, weights[:-3], biases[:-3], precision))
    layers = [t.contiguous() for pair in zip(weights, biases, strict=True) for t in pair][-6:]
    x = x.contiguous()
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *layers))
    out: Tensor = _FusedMLP.apply(precision, save, x, *layers)  # type: ignore[no-untyped-call]
    return out


class _FusedMLP(torch.autograd.Function):
    """Two hidden layers and the output layer, from the two custom operators below."""

    @staticmethod
    def forward(ctx: Any, precision: str, save: bool, x: Tensor, *layers: Tensor) -> Tensor:
        """Keep the hidden layers if anything needs a gradient."""
        parts, h1, h2 = torch.ops.rl_training.mlp_forward(x, *layers, precision, save)
        if save:
            ctx.precision = precision
            ctx.save_for_backward(x, *layers[::2], h1, h2)
        return _add_parts(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs, or of the layers, or both."""
        x, w1, w2, w3, h1, h2 = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3:])
        # A mean over the batch hands down an expanded gradient, which the kernel cannot read.
        dx, *gradients = torch.ops.rl_training.mlp_backward(
            dout.contiguous(), x, w1, w2, w3, h1, h2, ctx.precision, need_x, need_w
        )
        result: list[Tensor | None] = [None] * 9
        if need_x:
            # Each part by itself, then the members: short sums are inlined by a compiler.
            result[2] = _add_parts(_add_parts(dx).view(x.shape[0], -1, *x.shape[1:]))
        if need_w:
            result[3:] = [_add_parts(gradients[0]), _add_parts(gradients[1]), *gradients[2:]]
        return tuple(result)


def _add_parts(parts: Tensor) -> Tensor:
    """Sum `[G, parts, ...]` over the parts, always in the same order."""
    return parts.squeeze(1) if parts.shape[1] == 1 else parts.sum(1)


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one launch."""

    G: int
    shared: int
    B: int
    I: int
    H1: int
    H2: int
    O: int

    @classmethod
    def of(cls, x: Tensor, w1: Tensor, w3: Tensor) -> _Sizes:
        G, I, H1 = w1.shape
        assert G % x.shape[0] == 0
        return cls(G, G // x.shape[0], x.shape[1], I, H1, w3.shape[1], w3.shape[2])

    def constants(self, precision: str) -> dict[str, int | str]:
        """The compile-time arguments that both kernels take."""
        dot = "rounded" if precision == "bf16" and _interpreted() else _DOT[precision]
        return {
            "B": self.B,
            "I": self.I,
            "H1": self.H1,
            "H2": self.H2,
            "O": self.O,
            "PADDED_I": _power_of_two(self.I),
            "PADDED_O": _power_of_two(self.O),
            "SHARED": self.shared,
            "PRECISION": dot,
        }


def _power_of_two(size: int) -> int:
    """The least power of two that holds `size`, at least the 16 that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


def _parts(size: int, block: int) -> int:
    return -(-size // block)


def _launch_options(blocks: Blocks) -> dict[str, int]:
    return {"num_warps": blocks.warps, "num_stages": blocks.stages}


def _forward_columns(sizes: _Sizes, blocks: Blocks) -> int:
    return min(blocks.columns, _power_of_two(sizes.H2))


def _empty_forward(x: Tensor, w1: Tensor, w3: Tensor, precision: str, save: bool) -> list[Tensor]:
    """Room for the parts of the output and the hidden layers."""
    sizes = _Sizes.of(x, w1, w3)
    columns = _forward_columns(sizes, forward_blocks(sizes.G, precision))
    parts = x.new_empty(sizes.G, _parts(sizes.H2, columns), sizes.B, sizes.O)
    # Half as many bytes; the products would round to this type in any case.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = (sizes.G, sizes.B) if save else (0, 0)
    hidden = [x.new_empty(*shape, width, dtype=dtype) for width in (sizes.H1, sizes.H2)]
    return [parts, *hidden]


def _mlp_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    w3: Tensor,
    b3: Tensor,
    precision: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel."""
    from rl_training.models import mlp_kernels

    sizes = _Sizes.of(x, w1, w3)
    blocks = forward_blocks(sizes.G, precision)
    out, h1, h2 = _empty_forward(x, w1, w3, precision, save)
    grid = (sizes.G * _parts(sizes.B, blocks.rows) * out.shape[1],)
    tensors = (x, w1, b1, w2, b2, w3, b3, h1, h2, out)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        mlp_kernels.forward_kernel[grid](
            *tensors,
            **sizes.constants(precision),
            ROWS=blocks.rows,
            COLUMNS=_forward_columns(sizes, blocks),
            DEPTH=min(blocks.depth, _power_of_two(sizes.H1)),
            SAVE=save,
            **_launch_options(blocks),
        )
    return out, h1, h2


def _backward_constants(
    sizes: _Sizes, precision: str, need_x: bool, need_w: bool
) -> dict[str, int | bool]:
    """The compile-time arguments of the backward kernel that say how its work is cut."""
    blocks = backward_blocks(sizes.G, precision, need_w)
    most = _parts(sizes.B, blocks.rows)
    h1, h2 = _power_of_two(sizes.H1), _power_of_two(sizes.H2)
    return {
        "ROWS": blocks.rows,
        "COLUMNS": min(blocks.columns, h1),
        "DEPTH": min(blocks.depth, h2),
        "BLOCKS": min(blocks.row_blocks, most) if need_w else most,
        "HEIGHT": min(blocks.height, h1),
        "WIDTH": min(blocks.width, h2),
        "TILE_DEPTH": min(blocks.tile_depth, _power_of_two(sizes.B)),
        "NEED_X": need_x,
        "NEED_W": need_w,
    }


def _empty_backward(sizes: _Sizes, cut: dict[str, int | bool], dout: Tensor) -> list[Tensor]:
    """Room for the gradients; no bytes for those that nobody needs."""
    G, B, I, H1, H2, O = sizes.G, sizes.B, sizes.I, sizes.H1, sizes.H2, sizes.O
    x_networks = G if cut["NEED_X"] else 0
    w_networks = G if cut["NEED_W"] else 0
    dx = dout.new_empty(x_networks, _parts(H1, cut["COLUMNS"]), B, I)
    first = ((cut["BLOCKS"], I, H1), (cut["BLOCKS"], 1, H1))
    shapes = (*first, (H1, H2), (1, H2), (H2, O), (1, O))
    return [dx, *(dout.new_empty(w_networks, *shape) for shape in shapes)]


def _mlp_backward(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    h1: Tensor,
    h2: Tensor,
    precision: str,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, ...]:
    """Launch the backward kernel."""
    from rl_training.models import mlp_kernels

    sizes = _Sizes.of(x, w1, w3)
    blocks = backward_blocks(sizes.G, precision, need_w)
    cut = _backward_constants(sizes, precision, need_x, need_w)
    gradients = _empty_backward(sizes, cut, dout)
    programs = _parts(sizes.H1, cut["COLUMNS"]) * cut["BLOCKS"]
    if need_w:
        programs += (_parts(sizes.H1, cut["HEIGHT"]) + 1) * _parts(sizes.H2, cut["WIDTH"])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        mlp_kernels.backward_kernel[(sizes.G * programs,)](
            *(dout, x, w1, w2, w3, h1, h2, *gradients),
            **sizes.constants(precision),
            **cut,
            **_launch_options(blocks),
        )
    return tuple(gradients)


_forward_operator = torch.library.custom_op(
    "rl_training::mlp_forward",
    _mlp_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor w3, Tensor b3, "
    "str precision, bool save) -> (Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "rl_training::mlp_backward",
    _mlp_backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor x, Tensor w1, Tensor w2, Tensor w3, Tensor h1, Tensor h2, "
    "str precision, bool need_x, bool need_w) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_forward_operator.register_fake
def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Shapes alone, for tracing."""
    x, w1, _, _, _, w3, _, precision, save = arguments
    return tuple(_empty_forward(x, w1, w3, precision, save))


@_backward_operator.register_fake
def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Shapes alone, for tracing."""
    dout, x, w1, _, w3, _, _, precision, need_x, need_w = arguments
    sizes = _Sizes.of(x, w1, w3)
    return tuple(
        _empty_backward(sizes, _backward_constants(sizes, precision, need_x, need_w), dout)
    )
