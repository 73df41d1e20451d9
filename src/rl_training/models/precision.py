"""The number format of matrix products: everything else stays in single precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_training.models.fused_mlp import Precision
from rl_training.models.layers import (
    StackedConv2d,
    StackedConvTranspose2d,
    StackedLinear,
    StackedMLP,
)


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
