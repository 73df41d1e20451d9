"""What networks are asked for during an update."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn


def rows_asked(monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> list[tuple[int, int]]:
    """Return a list that gets the rows and members of every call of an ensemble from now on."""
    asked: list[tuple[int, int]] = []
    forward = network.forward

    def watched(x: Tensor, *options: Any) -> Tensor:
        out: Tensor = forward(x, *options)  # [S, N, B, 1]
        asked.append((out.shape[-2], out.shape[1]))
        return out

    monkeypatch.setattr(network, "forward", watched)
    return asked
