"""Row `gpu-pets`: milliseconds of one planned action, as the loop plans it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from bench.speed.accelerator import (
    choose_accelerate,
    device_name,
    each_precision,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.model_based import PLANNING, planning_config, planning_task, prepare_planner
from bench.speed.options import Options
from bench.speed.rows import Row
from bench.speed.sizes import PETS


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Measure an action in every precision."""
    return each_precision(row, options, _measure_one)


def _measure_one(row: Row, options: Options, device: torch.device, precision: str) -> Figure:
    accelerate, wait = choose_accelerate(device, options), synchronizer(device)
    config = planning_config(accelerate, precision, options.threads, **PLANNING)
    start = time.perf_counter()
    runner, _, messages = prepare_planner(config, planning_task(), device)
    obs = np.zeros((1, 1, PETS.obs), np.float32)
    samples = []
    try:
        with torch.inference_mode():
            # The action goes to the environment, so that each waits for the device.
            runner.act(obs)
            wait()
            preparation = time.perf_counter() - start
            for _ in range(options.repeats):
                count, begun = 0, time.perf_counter()
                while time.perf_counter() - begun < options.seconds:
                    runner.act(obs).array()
                    count += 1
                samples.append(1e3 * (time.perf_counter() - begun) / count)
    finally:
        runner.accelerator.close()
    notes = [m for m in messages if FALLBACK in m]
    notes.append(f"{preparation:.1f} s to compile and capture, not counted")
    return Figure(
        row=row.name,
        label=f"{row.name} {precision}",
        unit=row.unit,
        samples={accelerate: samples},
        bar=row.bar if device.type == "cuda" else None,
        notes=tuple(notes),
        extra={"device": device_name(device), "precision": precision},
    )
