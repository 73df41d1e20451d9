"""Layers with leading axes: many seeds, or many seeds of many critics, in one batched product.

Linear maps, convolutions, normalisations, the perceptrons made of them, and the number format of
their products: everything else stays in single precision.
Shapes: S seeds, N ensemble members, B batch, I inputs, O outputs; of images C channels in,
O channels out, H height, W width.
Parameters are `[S, ...]` or `[S, N, ...]`; a forward pass maps `[*lead, B, I]` to `[*lead, B, O]`.
With S = N = 1 a batched product costs the same as a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting  # an exported batch has any size: it decides nothing
from torch.nn import functional

from rl_training.models.fused_mlp import Precision, fused_mlp
from rl_training.rng import Rng

Activation = Callable[[Tensor], Tensor]
ActivationName: TypeAlias = Literal["relu", "tanh", "elu", "gelu", "silu", "leaky_relu", "mish"]
"""Activations that a user may choose."""
Init = Callable[[Rng, tuple[int, ...], int, int], Tensor]
"""Draws weights `[S, *members, I, O]` from (rng, members, outputs, inputs)."""
RMS_EPS = 1e-4
"""Added to the mean square before its root is taken."""
SIGMA_START = 0.5
"""Initial scale of factorised noise times the square root of a layer's inputs (Section 3.2)."""


def _tanh_in_place(x: Tensor) -> Tensor:
    """Overwrite `x` with 2 sigmoid(2x) - 1: on a CPU torch.tanh takes three times as long."""
    x.add_(x).sigmoid_()
    return x.add_(x).sub_(1)


class _Tanh(torch.autograd.Function):
    """Hyperbolic tangent in place, which the layer before it allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Overwrite `x`."""
        ctx.mark_dirty(x)
        ctx.save_for_backward(_tanh_in_place(x))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Multiply by 1 - tanh^2."""
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, y)  # type: ignore[no-any-return]


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent of a layer's output; large ones on a CPU take the faster way."""
    if x.device.type != "cpu" or is_exporting() or x.numel() < 4096:
        return torch.tanh(x)
    if not x.requires_grad:
        return _tanh_in_place(x)
    result: Tensor = _Tanh.apply(x)  # type: ignore[no-untyped-call]
    return result


ACTIVATIONS: dict[str, Activation] = {
    # In place: the product before it is not needed for the gradient, and memory is the bottleneck.
    "relu": torch.relu_,
    "tanh": tanh,
    "silu": functional.silu,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "leaky_relu": functional.leaky_relu,
    "mish": functional.mish,
}


def uniform_init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
    """Draw weights [S, *members, I, O] uniformly in +-1/sqrt(inputs), PyTorch's own default."""
    return (rng.uniform(*members, inputs, outputs) * 2 - 1) / math.sqrt(inputs)


def orthogonal_init(gain: float) -> Init:
    """Return an initialiser that draws orthogonal weights scaled by `gain` (Saxe et al., 2013)."""

    def init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
        tall, wide = max(outputs, inputs), min(outputs, inputs)
        q, r = torch.linalg.qr(rng.normal(*members, tall, wide))
        # The sign makes the distribution uniform over orthogonal matrices.
        q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
        weight: Tensor = gain * (q if inputs >= outputs else q.mT).contiguous()
        return weight

    return init


def glorot_init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
    """Draw weights uniformly with variance 2 / (inputs + outputs) (Glorot & Bengio, 2010)."""
    return (rng.uniform(*members, inputs, outputs) * 2 - 1) * math.sqrt(6 / (inputs + outputs))


def scaled_init(scale: float) -> Init:
    """Return an initialiser: normal, cut at two deviations, of variance scale^2 / inputs."""

    def init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
        # Cut at two deviations, a standard normal has this deviation left.
        return rng.truncated_normal(*members, inputs, outputs) * (
            scale / (0.8796 * math.sqrt(inputs))
        )

    return init


WeightsName = Literal["uniform", "orthogonal", "glorot"]
"""How a network's weights are drawn; biases start at zero but for `uniform`."""


def layer_init(weights: WeightsName, *, is_last: bool) -> Init | None:
    """Return the initialiser of one layer; None is PyTorch's own."""
    if weights == "orthogonal":
        return orthogonal_init(1.0 if is_last else math.sqrt(2))
    return glorot_init if weights == "glorot" else None


def chosen_members(tensor: Tensor, members: Tensor | slice | None) -> Tensor:
    """Return parameters `[S, N, ...]` of some members: a slice of all, or `[S, Z]` per seed."""
    if members is None:
        return tensor
    if isinstance(members, slice):
        return tensor[:, members]
    seeds, count = tensor.shape[:2]
    first = torch.arange(0, seeds * count, count, device=tensor.device).unsqueeze(1)  # [S, 1]
    rows = tensor.flatten(0, 1).index_select(0, (members + first).flatten())
    return rows.view(*members.shape, *tensor.shape[2:])


class StackedLinear(nn.Module):
    """Linear layers side by side: weight `[S, *members, I, O]`, bias `[S, *members, 1, O]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        rng: Rng,
        members: tuple[int, ...] = (),
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter((init or uniform_init)(rng, members, outputs, inputs))
        bias = torch.zeros(rng.num_seeds, *members, 1, outputs, device=rng.device)
        if init is None:
            bias = (rng.uniform(*members, 1, outputs) * 2 - 1) / math.sqrt(inputs)
        self.bias = nn.Parameter(bias)
        self.compute_dtype: torch.dtype | None = None
        """Format of the product and its result; None is that of the parameters."""

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of the map, which a noisy layer makes of its parameters."""
        return self.weight, self.bias

    def operands(self, members: Tensor | slice | None = None) -> tuple[Tensor, Tensor]:
        """Return weight and bias of all or some members, in the format of the product."""
        weight, bias = self.affine()
        if members is not None:
            weight, bias = chosen_members(weight, members), chosen_members(bias, members)
        if self.compute_dtype is None:
            return weight, bias
        return weight.to(self.compute_dtype), bias.to(self.compute_dtype)

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Map `[*lead, B, I]` to `[*lead, B, O]`, by all or some members."""
        weight, bias = self.operands(members)
        x = x.to(weight.dtype)
        if weight.ndim == 3:
            return torch.baddbmm(bias, x, weight)
        out = torch.baddbmm(bias.flatten(0, -3), x.flatten(0, -3), weight.flatten(0, -3))
        return out.view(*weight.shape[:-2], *out.shape[-2:])


class StackedNoisyLinear(StackedLinear):
    """A linear layer whose weights carry learned, factorised Gaussian noise (arXiv:1706.10295).

    `w = mu + sigma * f(e_in) f(e_out)^T` and `b = mu_b + sigma_b * f(e_out)` with
    `f(x) = sign(x) sqrt|x|` (Eqs. 10 and 11).  Without noise the layer is the one of its means.
    """

    def __init__(self, inputs: int, outputs: int, rng: Rng) -> None:
        super().__init__(inputs, outputs, rng)
        start = SIGMA_START / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, start))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, start))
        self.noise: tuple[Tensor, Tensor] | None = None
        """f of the noise of inputs `[S, I, 1]` and outputs `[S, 1, O]`; None uses the means."""

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias under the current noise."""
        if self.noise is None:
            return self.weight, self.bias
        of_inputs, of_outputs = self.noise
        weight = torch.addcmul(self.weight, self.weight_sigma, of_inputs * of_outputs)
        return weight, torch.addcmul(self.bias, self.bias_sigma, of_outputs)


def linear_layer(inputs: int, outputs: int, rng: Rng, noisy: bool) -> StackedLinear:
    """Build a linear layer, with learned noise when asked for."""
    return (
        StackedNoisyLinear(inputs, outputs, rng) if noisy else StackedLinear(inputs, outputs, rng)
    )


def noisy_layers(module: nn.Module) -> list[StackedNoisyLinear]:
    """Return the noisy layers of a network, in order."""
    return [part for part in module.modules() if isinstance(part, StackedNoisyLinear)]


@contextmanager
def fresh_noise(layers: Sequence[StackedNoisyLinear], rng: Rng) -> Iterator[None]:
    """Let noisy layers use noise drawn now, in one draw for all of them; then their means again."""
    if not layers:  # no draw, so that networks without noise leave the numbers of others alone
        yield
        return
    sizes = [size for layer in layers for size in layer.weight.shape[-2:]]
    noise = rng.normal(sum(sizes))
    shaped = noise.sign() * noise.abs().sqrt()
    parts = iter(torch.split(shaped, sizes, -1))
    for layer in layers:
        layer.noise = next(parts).unsqueeze(-1), next(parts).unsqueeze(-2)
    try:
        yield
    finally:
        for layer in layers:
            layer.noise = None


LAYER_NORM_EPS = 1e-5
"""Added to the variance, as by PyTorch."""


class StackedLayerNorm(nn.Module):
    """Layer normalisation with its own scale and shift per seed and member."""

    def __init__(
        self, size: int, rng: Rng, members: tuple[int, ...] = (), *, channels: bool = False
    ) -> None:
        """Build the layer.

        Args:
            size: Entries that are normalised together.
            rng: Gives the number of seeds and the device.
            members: Axes of members.
            channels: Normalise `[S, B, C, H, W]` over C in place of `[S, B, I]` over I.
        """
        super().__init__()
        shape = (rng.num_seeds, *members, 1, size, *([1, 1] if channels else []))
        self.size, self.channels = size, channels
        self.scale = nn.Parameter(torch.ones(shape, device=rng.device))
        self.shift = nn.Parameter(torch.zeros(shape, device=rng.device))

    def operands(self, members: Tensor | slice | None = None) -> tuple[Tensor, Tensor]:
        """Return scale and shift of all or some members."""
        if members is None:
            return self.scale, self.shift
        return chosen_members(self.scale, members), chosen_members(self.shift, members)

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Normalise over the last axis, or the channels, for all or some members."""
        scale, shift = self.operands(members)
        if self.channels:
            variance, mean = torch.var_mean(x.float(), -3, correction=0, keepdim=True)
            return torch.addcmul(shift, (x - mean) * torch.rsqrt(variance + LAYER_NORM_EPS), scale)
        return torch.addcmul(shift, functional.layer_norm(x, (self.size,)), scale)


def rms_norm(x: Tensor, scale: Tensor, axis: int = -1) -> Tensor:
    """Divide by the root of the mean square over an axis, in single precision, and scale."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().mean(axis, keepdim=True) + RMS_EPS) * scale


class StackedRMSNorm(nn.Module):
    """Division by the root of the mean square (Zhang & Sennrich, 2019), with a learned scale."""

    def __init__(self, size: int, rng: Rng, *, channels: bool = False) -> None:
        """Build the layer.

        Args:
            size: Entries that are normalised together.
            rng: Gives the number of seeds and the device.
            channels: Normalise `[S, B, C, H, W]` over C in place of `[S, B, I]` over I.
        """
        super().__init__()
        self.size, self.channels = size, channels
        shape = (size, 1, 1) if channels else (size,)
        self.scale = nn.Parameter(torch.ones(rng.num_seeds, 1, *shape, device=rng.device))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return rms_norm(x, self.scale, -3 if self.channels else -1)


BLOCK_ROWS = 1024
"""Vectors that a network takes through all of its layers at a time on a CPU."""


def in_blocks(network: Callable[[Tensor], Tensor], x: Tensor, rows: int, axis: int) -> Tensor:
    """Apply a network, on a CPU to so many rows of a large batch at a time: they stay in its cache.

    The batch's axis in the result is the one that it has in `x`, counted from the same end.
    """
    if x.device.type != "cpu" or is_exporting() or x.shape[axis] < 2 * rows:
        return network(x)
    return torch.cat([network(part) for part in torch.split(x, rows, axis)], axis)


class StackedMLP(nn.Module):
    """A multilayer perceptron with leading seed (and member) axes."""

    def __init__(
        self,
        sizes: Sequence[int],
        rng: Rng,
        *,
        members: tuple[int, ...] = (),
        activation: str = "relu",
        layer_norm: bool = False,
        orthogonal: float | None = None,
        weights: WeightsName = "uniform",
        noisy: bool = False,
    ) -> None:
        """Build the layers.

        Args:
            sizes: Inputs, hidden widths, outputs.
            rng: Where the initial weights come from; also fixes S and the device.
            members: Extra leading axes after the seed axis, such as `(num_critics,)`.
            activation: A key of `ACTIVATIONS`.
            layer_norm: Normalise before each activation.
            orthogonal: Gain of the last layer for orthogonal weights (hidden layers get sqrt 2 and
                biases start at zero); None draws as `weights` says.
            weights: How weights are drawn.
            noisy: Let the layers carry learned noise; for networks without members, uniform.
        """
        super().__init__()
        assert not (noisy and (members or orthogonal is not None or weights != "uniform"))
        self.activation = ACTIVATIONS[activation]
        self.members = members
        last = len(sizes) - 2
        layers: list[StackedLinear] = []
        norms: list[StackedLayerNorm | None] = []
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            init = layer_init(weights, is_last=index == last)
            if orthogonal is not None:
                init = orthogonal_init(orthogonal if index == last else math.sqrt(2))
            layers.append(
                StackedNoisyLinear(inputs, outputs, rng)
                if noisy
                else StackedLinear(inputs, outputs, rng, members, init)
            )
            norms.append(StackedLayerNorm(outputs, rng, members) if layer_norm else None)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norm for norm in norms[:-1] if norm is not None)
        # Plain tuples beside the registered lists: walking a ModuleList costs more than a product.
        self._hidden = tuple(zip(layers[:-1], norms[:-1], strict=True))
        self._output = (layers[-1],)
        self.fused: Precision | None = None
        """Run as one kernel in this number format, where that exists; set while traced."""
        self._fusible = activation == "relu" and not layer_norm
        self.masks: tuple[Tensor, ...] | None = None
        """What hidden layers' outputs are multiplied by, `[S, *members, B, H]` each; before the
        layer normalisation where there is one.  None is by nothing."""

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return tuple(layer.weight.shape[-1] for layer, _ in self._hidden)

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        """Map `[S, B, I]` (shared by all members) to `[S, *members, B, O]`.

        Args:
            x: Inputs.
            members: Which of one axis of members to evaluate, `[S, Z]` or a slice; None is all.
        """
        if self.masks is not None:
            return self._masked(x, self.masks, members)
        if self.fused is not None and self._fusible:
            return self._in_one_kernel(x, self.fused, members)
        return in_blocks(partial(self._whole, members=members), x, BLOCK_ROWS, axis=-2)

    def _whole(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        if len(self.members) == 1 and x.shape[0] == 1 and x.device.type == "cpu":
            return self._one_by_one(x, members)
        x = self._shared(x, members)
        # `forward` directly: small networks spend as long in Module.__call__ as in the product.
        for layer, norm in self._hidden:
            x = layer.forward(x, members)
            x = self.activation(x if norm is None else norm.forward(x, members))
        return self._output[0].forward(x, members).float()

    def _shared(self, x: Tensor, members: Tensor | slice | None) -> Tensor:
        """Show the same inputs to all members that are evaluated, `[S, *members, B, I]`."""
        if not self.members:
            return x
        lead = chosen_members(self._output[0].bias, members).shape[:-2]
        return x.unsqueeze(1).expand(*lead, -1, -1)

    def _masked(self, x: Tensor, masks: Sequence[Tensor], members: Tensor | slice | None) -> Tensor:
        x = self._shared(x, members)
        for (layer, norm), every in zip(self._hidden, masks, strict=True):
            x, mask = layer.forward(x, members), chosen_members(every, members)
            if norm is None:
                x = self.activation(x) * mask
            else:  # as in DroQ: what is left is normalised
                x = self.activation(norm.forward(x * mask, members))
        return self._output[0].forward(x, members).float()

    def _in_one_kernel(
        self, x: Tensor, precision: Precision, members: Tensor | slice | None
    ) -> Tensor:
        layers = (*(layer for layer, _ in self._hidden), self._output[0])
        affine = [[chosen_members(t, members) for t in layer.affine()] for layer in layers]
        weights = [weight.flatten(0, -3) for weight, _ in affine]
        out = fused_mlp(x, weights, [bias.flatten(0, -3) for _, bias in affine], precision)
        return out.view(*affine[-1][0].shape[:-2], *out.shape[-2:])

    def _one_by_one(self, x: Tensor, members: Tensor | slice | None) -> Tensor:
        """One seed on a CPU: plain products, member after member, beat batched ones by some 5%."""
        layers = (*self._hidden, (self._output[0], None))
        operands = [layer.operands(members) for layer, _ in layers]
        scales = [None if norm is None else norm.operands(members) for _, norm in layers]
        weights = [weight[0].unbind(0) for weight, _ in operands]
        biases = [bias[0].unbind(0) for _, bias in operands]
        first = x[0].to(operands[0][0].dtype)
        outputs = []
        for member in range(len(weights[0])):
            hidden = first
            for index, (_, norm) in enumerate(layers):
                hidden = torch.addmm(biases[index][member], hidden, weights[index][member])
                affine = scales[index]
                if norm is not None and affine is not None:
                    scale, shift = affine
                    hidden = functional.layer_norm(hidden, (norm.size,))
                    hidden = torch.addcmul(shift[0, member], hidden, scale[0, member])
                    hidden = hidden.to(first.dtype)
                if index < len(self._hidden):
                    hidden = self.activation(hidden)
            outputs.append(hidden)
        return torch.stack(outputs).unsqueeze(0).float()


@contextmanager
def dropout(network: nn.Module, rate: float, rows: int, rng: Rng) -> Iterator[None]:
    """Let a network drop this share of its hidden outputs (Srivastava et al., 2014).

    What is left is scaled up, so that the mean stays.  Members drop their own.  At a rate of 0
    nothing is drawn, and the numbers of others stay as they are.

    Args:
        network: A `StackedMLP`, or one behind an encoder, which drops nothing.
        rate: The share.
        rows: B of what the network will be shown.
        rng: Draws what is dropped.
    """
    if rate == 0:
        yield
        return
    (layers,) = [part for part in network.modules() if isinstance(part, StackedMLP)]
    kept = (rng.uniform(*layers.members, rows, size) >= rate for size in layers.hidden_sizes)
    layers.masks = tuple(mask.float() / (1 - rate) for mask in kept)
    try:
        yield
    finally:
        layers.masks = None


class NormedMLP(nn.Module):
    """Hidden layers of linear map, RMS normalisation and SiLU, then a linear output."""

    def __init__(self, sizes: Sequence[int], rng: Rng, *, output_scale: float = 1.0) -> None:
        """Build the layers.

        Args:
            sizes: Inputs, hidden widths, outputs.
            rng: Source of the initial weights.
            output_scale: Scale of the initial weights of the output; 0 begins with zeros.
        """
        super().__init__()
        hidden = sizes[:-1]
        self.layers = nn.ModuleList(
            StackedLinear(inputs, outputs, rng, (), scaled_init(1.0))
            for inputs, outputs in pairwise(hidden)
        )
        self.norms = nn.ModuleList(StackedRMSNorm(width, rng) for width in hidden[1:])
        self.output = StackedLinear(hidden[-1], sizes[-1], rng, (), scaled_init(output_scale))

    def operands(self) -> tuple[Tensor, ...]:
        """Return weight, bias and scale of each hidden layer, then weight and bias of the last."""
        found: list[Tensor] = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            assert isinstance(layer, StackedLinear)
            assert isinstance(norm, StackedRMSNorm)
            found += [*layer.operands(), norm.scale]
        return (*found, *self.output.operands())

    def forward(self, x: Tensor) -> Tensor:
        """Map `[S, B, I]` to `[S, B, O]`."""
        return in_blocks(self._whole, x, BLOCK_ROWS, axis=1)

    def _whole(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.silu(norm(layer(x)))
        output: Tensor = self.output(x)
        return output.float()


class StackedConv2d(nn.Module):
    """Convolutions side by side: weight `[S, O, C, k, k]`, bias `[S, O]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        rng: Rng,
        *,
        stride: int = 1,
        padding: int = 0,
        init: Init | None = None,
        layer_norm: bool = False,
    ) -> None:
        """Build the layer.

        Args:
            inputs: C.
            outputs: O.
            kernel: Height and width of the kernel.
            rng: Source of the initial weights; its number of seeds is S.
            stride: Pixels between two places of the kernel.
            padding: Zeros around the image.
            init: Draws the weights as those of a linear layer over the kernel's inputs, with zero
                biases; None is uniform, PyTorch's own default, for both.
            layer_norm: Normalise the outputs of each pixel.
        """
        super().__init__()
        self.norm = StackedLayerNorm(outputs, rng, channels=True) if layer_norm else None
        self.stride, self.padding = stride, padding
        fan_in = inputs * kernel * kernel
        flat = (init or uniform_init)(rng, (), outputs, fan_in)  # [S, C k k, O]
        # Contiguous, as gradients are: optimizers run over the memory of both side by side.
        weight = flat.mT.contiguous().view(-1, outputs, inputs, kernel, kernel)
        self.weight = nn.Parameter(weight)
        bias = torch.zeros(rng.num_seeds, outputs, device=rng.device)
        if init is None:
            bias = (rng.uniform(outputs) * 2 - 1) / math.sqrt(fan_in)
        self.bias = nn.Parameter(bias)
        self.compute_dtype: torch.dtype | None = None
        """Format of the product and its result; None is that of the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[S, B, C, H, W]` to `[S, B, O, H', W']`."""
        out = self._convolved(x)
        return out if self.norm is None else self.norm.forward(out)

    def _convolved(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or self.weight.dtype
        x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        if x.shape[0] == 1 or x.device.type == "cpu":
            return self._one_by_one(x, weight, bias)
        S, B, C, H, W = x.shape
        joined = x.transpose(0, 1).reshape(B, S * C, H, W)
        out = functional.conv2d(
            joined, weight.flatten(0, 1), bias.flatten(), self.stride, self.padding, groups=S
        )
        return out.view(B, S, -1, *out.shape[-2:]).transpose(0, 1)

    def _one_by_one(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """One seed is a plain convolution; on a CPU several are faster so than as groups."""
        images = [x[seed] for seed in range(x.shape[0])]
        # For a single image kernels are free to ignore the order, and a compiler cannot tell.
        on_tensor_cores = x.dtype == torch.bfloat16 and x.shape[1] > 1
        if x.device.type == "cpu" or on_tensor_cores:
            # With channels innermost the gradients take two thirds of the time on a CPU. On an
            # accelerator no images are turned around, and norms over channels read them in order.
            images = [image.contiguous(memory_format=torch.channels_last) for image in images]
        outputs = [
            functional.conv2d(image, weight[seed], bias[seed], self.stride, self.padding)
            for seed, image in enumerate(images)
        ]
        return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)


class StackedConvTranspose2d(nn.Module):
    """Transposed convolutions side by side: weight `[S, C, O, k, k]`, bias `[S, O]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        rng: Rng,
        *,
        stride: int,
        padding: int,
        init: Init,
    ) -> None:
        """Build the layer.

        Args:
            inputs: C.
            outputs: O.
            kernel: Height and width of the kernel.
            rng: Source of the initial weights; its number of seeds is S.
            stride: Pixels between two places of the kernel in the larger image.
            padding: Pixels that are cut off around it.
            init: Draws the weights as those of a linear layer with the inputs that meet in one
                pixel; biases are 0.
        """
        super().__init__()
        self.stride, self.padding = stride, padding
        overlap = max(kernel // stride, 1) ** 2
        flat = init(rng, (), outputs * kernel * kernel // overlap, inputs * overlap)
        weight = flat.reshape(-1, inputs, outputs, kernel, kernel)
        self.weight = nn.Parameter(weight.contiguous())
        self.bias = nn.Parameter(torch.zeros(rng.num_seeds, outputs, device=rng.device))
        self.compute_dtype: torch.dtype | None = None
        """Format of the product and its result; None is that of the parameters."""

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Map `[S, B, C, H, W]` to `[S, B, O, height, width]`, twice as large or one more."""
        dtype = self.compute_dtype or self.weight.dtype
        x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        fill = (height - self._size(x.shape[-2]), width - self._size(x.shape[-1]))
        if x.shape[0] == 1 or x.device.type == "cpu":
            outputs = [
                functional.conv_transpose2d(
                    x[seed], weight[seed], bias[seed], self.stride, self.padding, fill
                )
                for seed in range(x.shape[0])
            ]
            return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)
        S, B, C, H, W = x.shape
        joined = x.transpose(0, 1).reshape(B, S * C, H, W)
        out = functional.conv_transpose2d(
            joined, weight.flatten(0, 1), bias.flatten(), self.stride, self.padding, fill, groups=S
        )
        return out.view(B, S, -1, height, width).transpose(0, 1)

    def _size(self, length: int) -> int:
        return (length - 1) * self.stride - 2 * self.padding + self.weight.shape[-1]


def max_pool(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Take the largest value under each place of the kernel, `[S, B, C, H', W']`."""
    pooled = functional.max_pool2d(x.flatten(0, 1), kernel, stride, padding)
    return pooled.view(*x.shape[:2], *pooled.shape[1:])


def set_precision(learner: Any, precision: Precision) -> None:
    """Let the layers of a learner's networks multiply in bf16, or in their own format.

    Parameters, optimizer state, losses and everything between networks stay float32; tf32 is a
    property of the device and set for the whole process.
    """
    for module in _modules(learner):
        set_layers(module, precision)
    if learner.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def set_layers(module: nn.Module, precision: Precision) -> None:
    """Let a module's layers multiply in bf16, or in their own format."""
    for layer in module.modules():
        if isinstance(layer, StackedLinear | StackedConv2d | StackedConvTranspose2d):
            layer.compute_dtype = torch.bfloat16 if precision == "bf16" else None


@contextmanager
def fused_networks(learner: Any, precision: Precision) -> Iterator[None]:
    """Let a learner's networks run as single kernels where these exist."""
    networks = [
        part
        for module in _modules(learner)
        for part in module.modules()
        if isinstance(part, StackedMLP)
    ]
    for network in networks:
        network.fused = precision if learner.device.type == "cuda" else None
    try:
        yield
    finally:
        for network in networks:
            network.fused = None


def _modules(learner: Any) -> Iterator[nn.Module]:
    for value in vars(learner).values():
        if isinstance(value, nn.Module):
            yield value
