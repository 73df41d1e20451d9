"""A plain replay to save, a short way to save it, and a state with every kind of leaf."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.experiment.checkpointing import save_checkpoint

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
DTYPES += [torch.float32, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.int8]


class Ring:
    """A replay of `capacity` rows and S seeds, as plain as it can be."""

    def __init__(self, capacity: int = 50, segment_rows: int = 8, seeds: int = 2) -> None:
        self.segment_rows = segment_rows
        self.capacity = capacity
        self.total = 0
        self.obs = torch.zeros(seeds, capacity, 3)
        self.done = torch.zeros(seeds, capacity, dtype=torch.bool)

    def add(self, count: int, salt: int = 0) -> None:
        for _ in range(count):
            place = self.total % self.capacity
            seeds = torch.arange(self.obs.shape[0])
            self.obs[:, place] = (self.total + 1000 * seeds + salt)[:, None] + torch.arange(3) / 4
            self.done[:, place] = (self.total + seeds) % 5 == 0
            self.total += 1

    def segment_range(self) -> tuple[int, int]:
        return max(0, self.total - self.capacity), self.total

    def read_rows(self, start: int, stop: int) -> dict[str, Tensor]:
        assert self.segment_range()[0] <= start <= stop <= self.total
        places = torch.arange(start, stop) % self.capacity
        return {"obs": self.obs[:, places], "done": self.done[:, places]}

    def load_rows(self, start: int, rows: Mapping[str, Tensor]) -> None:
        assert self.total in (0, start)
        places = torch.arange(start, start + rows["obs"].shape[1]) % self.capacity
        self.obs[:, places] = rows["obs"]
        self.done[:, places] = rows["done"]
        self.total = start + len(places)


def save(run: Path, step: int, ring: Ring | None = None, **more: Any) -> Path:
    state = {"learner": {"w": torch.full((1, 3), float(step)), "n": step}, "clock": {"t": step}}
    segmented = {"replay": ring} if ring is not None else {}
    return save_checkpoint(run, step, header={"a": step}, states=state, segmented=segmented, **more)


def awkward_tree() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    return {
        "views": {"a": base[:, ::2], "b": base[1:], "whole": base, "transposed": base.T},
        "empty": torch.zeros(0, 3),
        "stride_0": torch.ones(1).as_strided((1,), (0,)),
        "zero_d": torch.tensor(1.5, dtype=torch.bfloat16),
        "dtypes": [torch.ones(2, 2).to(dtype) for dtype in DTYPES],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "arrays": {
            "reversed": np.arange(5)[::-1],
            "big_endian": np.array([1.5, np.nan], dtype=">f4"),
            "zero_d": np.array(3, dtype=np.uint32),
            "read_only": np.broadcast_to(np.float16(2), (2, 3)),
            "empty": np.zeros((0, 2), dtype=np.int16),
        },
        "pcg": 2**127 + 12345,
        "huge": -(10**6000),
        "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf, nan, 1.7976931348623157e308],
        "text": "päth/~$\u2028",
        "none": None,
        "flags": (True, False, 0, 1),
        "$tensor": {"$$x": 1, "": {}, "a/b~c": [[], {}], "dtype": torch.ones(1)},
    }
