"""Row `gpu-dreamer`: train steps of Dreamer on the device, at the comparison's size and at 12m.

The size of the comparison is measured beside its own eager form.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.speed.accelerator import (
    choose_accelerate,
    choose_device,
    device_name,
    each_precision,
    failing_softly,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.options import Options
from bench.speed.rows import Row
from bench.speed.world_model import dreamer_config, prepare_dreamer
from rl_training.runtime.compile.runner import ReplayRunner

EAGER = "own eager form"
CHUNK = 8
"""Updates that are handed over at a time: as many as one captured graph holds."""
PUBLISHED = "12m"


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Measure a train step in every precision, at both sizes."""
    yield from each_precision(row, options, _compared)
    device = choose_device(row.name, options)
    for precision in options.precisions or ("bf16",):
        label = f"{row.name} {PUBLISHED} {precision}"
        yield failing_softly(
            partial(_published, row, options, device, precision, label),
            partial(Figure, row=row.name, label=label, unit=row.unit, samples={}),
        )


def _compared(row: Row, options: Options, device: torch.device, precision: str) -> Figure:
    accelerate = choose_accelerate(device, options)
    samples, notes = {}, []
    for name, how in ((accelerate, accelerate), (EAGER, "off")):
        samples[name], told = _rates(how, precision, options, device, None)
        notes += told
    return Figure(
        row=row.name,
        label=f"{row.name} {precision}",
        unit=row.unit,
        samples=samples,
        bar=row.bar if device.type == "cuda" else None,
        notes=tuple(notes),
        extra={"device": device_name(device), "precision": precision},
    )


def _published(
    row: Row, options: Options, device: torch.device, precision: str, label: str
) -> Figure:
    accelerate = choose_accelerate(device, options)
    samples, notes = _rates(accelerate, precision, options, device, PUBLISHED)
    return Figure(
        row=row.name,
        label=label,
        unit=row.unit,
        samples={accelerate: samples},
        notes=tuple(notes),
        extra={"device": device_name(device), "precision": precision, "size": PUBLISHED},
    )


def _rates(
    how: Any, precision: Any, options: Options, device: torch.device, size: str | None
) -> tuple[list[float], list[str]]:
    """Train steps per second of every repeat, and what there is to say."""
    wait, start = synchronizer(device), time.perf_counter()
    config = dreamer_config(
        size, accelerate=how, precision=precision, threads=options.threads, device=str(device)
    )
    runner, messages = prepare_dreamer(config, device)
    chunk = 1 if how == "off" else CHUNK
    runner.update(chunk)
    wait()
    notes = [message for message in messages if FALLBACK in message]
    if how != "off":
        seconds = time.perf_counter() - start
        notes.append(f"{seconds:.1f} s to trace, compile and capture, not counted")
        notes.append(f"{_kernels(runner, device):,} kernels a train step")
    samples = []
    for _ in range(options.repeats):
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < options.seconds:
            runner.update(chunk)
            wait()
            count += chunk
        samples.append(count / (time.perf_counter() - begun))
    runner.accelerator.close()
    return samples, notes


def _kernels(runner: ReplayRunner, device: torch.device) -> int:
    """Count what one train step launches on the device; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        runner.update(1)
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages())
