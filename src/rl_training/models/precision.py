"""The number format of matrix products: everything else stays in single precision."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from rl_training.models.layers import StackedLinear

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]


def set_precision(learner: Any, precision: str) -> None:
    """Let the layers of a learner's networks multiply in bf16, or in their own format.

    Parameters, optimizer state, losses and everything between networks stay float32; tf32 is a
    property of the device and set for the whole process.
    """
    dtype = torch.bfloat16 if precision == "bf16" else None
    for value in vars(learner).values():
        if isinstance(value, nn.Module):
            for module in value.modules():
                if isinstance(module, StackedLinear):
                    module.compute_dtype = dtype
    if learner.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
