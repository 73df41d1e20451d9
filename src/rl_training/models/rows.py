"""Rows of observations as tensors: their parts, and the float32 form that is standardised.

A row of bytes turns into float32 with its pixels as numbers from 0 to 255; networks read either.
Shapes: W entries of a row; any leading axes; B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl_training.observations import FLOAT_BYTES, LeafSpec, ObservationSpec


def split(parts: ObservationSpec, rows: Tensor) -> dict[str, Tensor]:
    """Return the leaves of rows `[..., W]` by name, each `[..., *row_shape]`.

    All are float32 but the images of rows of bytes.
    """
    in_bytes = rows.dtype == torch.uint8
    # Bytes that were cast to floats would be read at other places.
    assert rows.shape[-1] == (parts.width if in_bytes else parts.num_floats)
    wide = _wide_floats(parts, rows) if in_bytes else rows
    leaves, place = {}, 0
    for leaf in parts.order:
        size = math.prod(leaf.row_shape)
        if in_bytes and leaf.is_wide:
            value = wide[..., place : place + size]
            place += size
        else:
            value = rows[..., parts.columns(leaf.name, in_bytes=in_bytes)]
            value = value if leaf.kind == "image" else value.to(torch.float32)
        leaves[leaf.name] = value.view(*rows.shape[:-1], *leaf.row_shape)
    return leaves


def as_floats(parts: ObservationSpec, rows: Tensor) -> Tensor:
    """Return rows in their float32 form, whatever they are stored as."""
    if rows.dtype != torch.uint8:
        return rows
    rest = [
        rows[..., parts.columns(leaf.name, in_bytes=True)].to(torch.float32)
        for leaf in parts.order
        if not leaf.is_wide
    ]
    return torch.cat([_wide_floats(parts, rows), *rest], -1)


def _wide_floats(parts: ObservationSpec, rows: Tensor) -> Tensor:
    """Return what rows of bytes hold as floats, `[..., num_wide]`."""
    return rows[..., : parts.num_wide * FLOAT_BYTES].contiguous().view(torch.float32)


def is_number(parts: ObservationSpec, device: torch.device | str) -> Tensor:
    """Tell which entries of the float32 form are real numbers, not flags, counts or pixels."""
    return torch.cat(
        [
            torch.full((math.prod(leaf.row_shape),), leaf.kind == "numbers", device=device)
            for leaf in parts.order
        ]
    )


def join(parts: ObservationSpec, leaves: Mapping[str, Tensor]) -> Tensor:
    """Turn leaves `[B, *shape]` as the task has them into rows in their float32 form."""
    return torch.cat([_in_row(leaf, leaves[leaf.name]) for leaf in parts.order], -1)


def _in_row(leaf: LeafSpec, value: Tensor) -> Tensor:
    """Turn a batch `[B, *shape]` into its part of a float32 row, `[B, n]`."""
    if leaf.kind == "image" and leaf.channels_last:
        value = value.permute(0, 3, 1, 2)
    flat = value.flatten(1) if leaf.shape else value.unsqueeze(1)
    if not leaf.is_discrete:
        return flat.to(torch.float32)
    index = flat - torch.tensor(leaf.starts, device=flat.device)
    if leaf.kind == "index":
        return index.to(torch.float32)
    # Column c of a row tells whether entry `owner[c]` has the value `own[c]`.
    owner = np.repeat(np.arange(len(leaf.sizes)), leaf.sizes)
    own = np.concatenate([np.arange(size) for size in leaf.sizes])
    columns = index[:, torch.from_numpy(owner).to(flat.device)]
    return (columns == torch.from_numpy(own).to(flat.device)).to(torch.float32)
