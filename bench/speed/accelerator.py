"""What the accelerator rows share: the device, and how updates run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.speed.figures import Figure
from bench.speed.options import BenchError, Options
from bench.speed.rows import Row
from rl_training.errors import RLTrainingError

PRECISIONS = ("fp32", "tf32", "bf16")


def choose_device(row: str, options: Options) -> torch.device:
    """Return the device that was asked for.

    Raises:
        BenchError: When it is not there.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"{row} needs a CUDA device and PyTorch sees none here; run it where there is one, or "
            "try its code with --device cpu"
        )
    return device


def choose_accelerate(device: torch.device, options: Options) -> str:
    """Return the value of `accelerate`."""
    return options.accelerate or ("graph" if device.type == "cuda" else "compile")


def failing_softly(measure: Callable[[], Figure], empty: Callable[..., Figure]) -> Figure:
    """Measure, or return an empty figure that says why not, so that the next ones are measured.

    Running out of the device's memory is such a reason, and a RuntimeError.
    """
    try:
        return measure()
    except (RLTrainingError, RuntimeError) as error:
        return empty(notes=[f"failed: {error}".splitlines()[0]])


def synchronizer(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until the device has done all it was given."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def device_name(device: torch.device) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def each_precision(
    row: Row, options: Options, measure: Callable[[Row, Options, torch.device, str], Figure]
) -> Iterator[Figure]:
    """Measure in every precision that the device has; one that fails does not stop the rest."""
    device = choose_device(row.name, options)
    torch.set_num_threads(options.threads)
    for precision in options.precisions or PRECISIONS:
        if precision == "tf32" and device.type != "cuda":
            continue
        label = f"{row.name} {precision}"
        empty = partial(Figure, row=row.name, label=label, unit=row.unit, samples={})
        yield failing_softly(partial(measure, row, options, device, precision), empty)
