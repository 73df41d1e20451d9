"""Random shifts of images, the augmentation of DrQ (arXiv:2004.13649, Sec. 3.1) and DrQ-v2.

An image is padded by repeating its border, and cropped back to its size at a random place.  That is
one look-up of pixels, so no padded copy is made.
Shapes: S seeds, B batch, C channels, H height, W width, R entries of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.observations import ObservationSpec
from rl_training.rng import Rng


def random_shift(obs: Tensor, pad: int, rng: Rng, parts: ObservationSpec | None = None) -> Tensor:
    """Shift the images of a batch, each sample by its own draw.

    The frames of a stack are one image: its channels move together.  Of observations of several
    parts only the images change, each by a draw of its own.

    Args:
        obs: Images `[S, B, C, H, W]`, or rows `[S, B, R]`.
        pad: Largest shift in pixels, along each axis and to either side.
        rng: Draws the shifts, uniformly.
        parts: What a row holds; None where observations are images.
    """
    if parts is None:
        return crop(obs, _places(obs, pad, rng), pad)
    rows = obs.clone()
    for leaf in parts.leaves:
        if leaf.kind == "image":
            columns = parts.columns(leaf.name, in_bytes=obs.dtype == torch.uint8)
            entries = obs[..., columns]
            if leaf.is_wide and obs.dtype == torch.uint8:  # four bytes of a row are one number
                entries = entries.contiguous().view(torch.float32)
            images = entries.reshape(*obs.shape[:2], *leaf.row_shape)
            moved = crop(images, _places(obs, pad, rng), pad).flatten(2)
            rows[..., columns] = moved.view(obs.dtype)
    return rows


def crop(images: Tensor, place: Tensor, pad: int) -> Tensor:
    """Cut each image out of itself padded by `pad` pixels of its border, `[S, B, C, H, W]`.

    Args:
        images: `[S, B, C, H, W]`.
        place: Row and column at which a crop begins, from 0 to 2 `pad`, `[S, B, 2]`; `pad` is the
            image itself.
        pad: Pixels of padding.
    """
    height, width = images.shape[-2:]
    first_row, first_column = (place - pad).unbind(-1)  # [S, B] each
    rows = _within(first_row, height)  # [S, B, H]
    columns = _within(first_column, width)  # [S, B, W]
    pixel = (rows.unsqueeze(-1) * width + columns.unsqueeze(-2)).flatten(2)  # [S, B, H W]
    of_all_channels = pixel.unsqueeze(2).expand(-1, -1, images.shape[2], -1)
    return images.flatten(3).gather(-1, of_all_channels).view(images.shape)


def _within(first: Tensor, size: int) -> Tensor:
    """Count up from `first` `[S, B]`, and stay on the border beyond it: `[S, B, size]`."""
    steps = torch.arange(size, device=first.device)
    return (first.unsqueeze(-1) + steps).clamp(0, size - 1)


def _places(obs: Tensor, pad: int, rng: Rng) -> Tensor:
    return rng.integers(2 * pad + 1, obs.shape[1], 2)
