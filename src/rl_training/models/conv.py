"""Convolutions with a seed axis.

Shapes: S seeds, B batch, C channels in, O channels out, H height, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.layers import Init, uniform_init
from rl_training.rng import Rng


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
        """
        super().__init__()
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
        if x.device.type == "cpu":
            # With channels innermost the gradients take two thirds of the time.
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
