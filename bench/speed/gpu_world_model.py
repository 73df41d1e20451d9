"""Row `gpu-dreamer`: train steps of Dreamer on the device beside those of its eager form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.speed.accelerator import (
    choose_accelerate,
    device_name,
    each_precision,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.options import Options
from bench.speed.rows import Row
from bench.speed.world_model import dreamer_config, prepare_dreamer

EAGER = "own eager form"
CHUNK = 8
"""Updates that are handed over at a time: as many as one captured graph holds."""


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Measure a train step in every precision."""
    return each_precision(row, options, _measure_one)


def _measure_one(row: Row, options: Options, device: torch.device, precision: str) -> Figure:
    accelerate = choose_accelerate(device, options)
    samples, notes = {}, []
    for name, how in ((accelerate, accelerate), (EAGER, "off")):
        samples[name], messages, preparation = _rates(how, precision, options, device)
        notes += [m for m in messages if FALLBACK in m]
        if how != "off":
            notes.append(f"{preparation:.1f} s to trace and capture, not counted")
    return Figure(
        row=row.name,
        label=f"{row.name} {precision}",
        unit=row.unit,
        samples=samples,
        bar=row.bar if device.type == "cuda" else None,
        notes=tuple(notes),
        extra={"device": device_name(device), "precision": precision},
    )


def _rates(
    how: Any, precision: Any, options: Options, device: torch.device
) -> tuple[list[float], list[str], float]:
    """Train steps per second of every repeat, what was said, and seconds of preparation."""
    wait, start = synchronizer(device), time.perf_counter()
    config = dreamer_config(
        accelerate=how, precision=precision, threads=options.threads, device=str(device)
    )
    runner, messages = prepare_dreamer(config, device)
    chunk = 1 if how == "off" else CHUNK
    runner.update(chunk)
    wait()
    preparation = time.perf_counter() - start
    samples = []
    for _ in range(options.repeats):
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < options.seconds:
            runner.update(chunk)
            wait()
            count += chunk
        samples.append(count / (time.perf_counter() - begun))
    runner.accelerator.close()
    return samples, messages, preparation
