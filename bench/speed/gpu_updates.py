"""Rows `gpu-sac`, `gpu-update`, `gpu-actors`: updates of many seeds at once, as loops run them.

In `gpu-actors` SAC, which comes first, is the side that the others are compared with.  An
environment step of REDQ and DroQ has twenty updates, one of the others has one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.speed.accelerator import (
    PRECISIONS,
    choose_accelerate,
    choose_device,
    device_name,
    failing_softly,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.options import Options
from bench.speed.rows import Bar, Row
from bench.speed.updates import Updates, prepare_updates, update_config
from rl_training.runtime.compile.cuda_graph import STEPS_PER_REPLAY

SEEDS: dict[str, tuple[int, ...]] = {"sac": (1, 32, 128)}
FEW_SEEDS: tuple[int, ...] = (1, 32)
ALGOS = ("cql", "iql", "td3_bc")
NARROW: dict[str, dict[str, Any]] = {
    "crossq": {"critic_hidden_sizes": [64, 64]},
    "tqc": {"critic_hidden_sizes": [64, 64]},
    "redq": {"num_critics": 3},
    "simba_v2": {"hidden_sizes": [64, 64]},
}
"""Settings for a CPU, where figures only show that a row can be measured."""
PROFILED = 64
TOP = 6


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Measure every number of seeds in every precision; one that fails does not stop the rest."""
    device = choose_device(row.name, options)
    torch.set_num_threads(options.threads)
    beside: dict[tuple[int, str], list[float]] = {}
    for work in _works(row, options):
        if work.precision == "tf32" and device.type != "cuda":
            continue
        made = failing_softly(
            partial(_measure_one, row, options, device, work), partial(_figure, row, work, {})
        )
        case = work.count, work.precision
        if work.algo == "sac":
            beside[case] = [rate for rates in made.samples.values() for rate in rates]
        elif case in beside:
            made = replace(made, samples={**made.samples, "sac": beside[case]})
        yield made
        if device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Work:
    """One line of the row."""

    algo: str
    count: int
    """Number of seeds."""
    precision: str

    @property
    def bar_name(self) -> str:
        """Name of its bar, if it has one."""
        return f"{self.algo} {self.count} seed{'s' if self.count > 1 else ''}"


def _works(row: Row, options: Options) -> Iterator[Work]:
    asked = [algo for algo in row.algos if algo in (options.algos or row.algos)]
    for algo in asked or row.algos or options.algos or ALGOS:
        seeds = options.seeds or SEEDS.get(algo, FEW_SEEDS)
        for count, precision in itertools.product(seeds, options.precisions or PRECISIONS):
            yield Work(algo, count, precision)


def _measure_one(row: Row, options: Options, device: torch.device, work: Work) -> Figure:
    accelerate, count = choose_accelerate(device, options), work.count
    config = update_config(
        work.algo,
        accelerate=accelerate,
        precision=work.precision,
        seeds=list(range(count)),
        threads=options.threads,
        device=str(device),
        algo_kwargs={} if device.type == "cuda" else NARROW.get(work.algo, {}),
    )
    wait = synchronizer(device)
    updates = prepare_updates(config, device)
    try:
        start = time.perf_counter()
        updates.runner.update(STEPS_PER_REPLAY)
        wait()
        preparation = time.perf_counter() - start
        rates = _rates(updates, wait, options)
        notes = [m for m in updates.messages if FALLBACK in m]
        extra: dict[str, Any] = {
            "device": device_name(device),
            "gradient_steps_per_second": rates,
            "seconds_to_compile_and_capture": preparation,
        }
        if options.profile:
            extra["profile"] = profile_updates(updates, wait, device)
            notes.append(_describe_profile(extra["profile"], device))
        if count > 1:
            notes.append(f"{sorted(rates)[len(rates) // 2]:,.0f} gradient steps/s for all seeds")
        notes.append(f"{preparation:.1f} s to compile and capture, not counted")
    finally:
        updates.close()
    bar = row.bars.get(work.bar_name) if device.type == "cuda" else None
    samples = {accelerate: [rate * count for rate in rates]}
    return _figure(row, work, samples, bar=bar, notes=notes, extra=extra)


def _figure(
    row: Row,
    work: Work,
    samples: dict[str, list[float]],
    *,
    bar: Bar | None = None,
    notes: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
) -> Figure:
    return Figure(
        row=row.name,
        label=f"gpu-{work.algo} {work.count} {work.precision}",
        unit="gradient steps/s" if work.count == 1 else "seed-steps/s",
        samples=samples,
        bar=bar,
        notes=tuple(notes),
        extra={"algo": work.algo, "seeds": work.count, "precision": work.precision} | (extra or {}),
    )


def _rates(updates: Updates, wait: Callable[[], object], options: Options) -> list[float]:
    """Time many updates per call; the first calls find out how many last long enough."""

    def rate(amount: int) -> float:
        wait()
        start = time.perf_counter()
        updates.runner.update(amount)
        wait()
        return amount / (time.perf_counter() - start)

    rate(STEPS_PER_REPLAY)
    guess = rate(4 * STEPS_PER_REPLAY)
    # A multiple, so that graphs of several steps are used throughout.
    amount = max(1, round(guess * options.seconds / STEPS_PER_REPLAY)) * STEPS_PER_REPLAY
    return [rate(amount) for _ in range(options.repeats)]


def profile_updates(
    updates: Updates, wait: Callable[[], object], device: torch.device
) -> dict[str, Any]:
    """Count what runs on the device per update, and say what takes longest.

    On the CPU these are the operations that PyTorch records; compiled code is one of them.
    """
    on_cuda = device.type == "cuda"
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    wait()
    with profile(activities=[activity], acc_events=True) as profiler:
        updates.runner.update(PROFILED)
        wait()
    events = [event for event in profiler.events() or [] if event.device_type == kind]
    seconds: dict[str, float] = {}
    for event in events:
        spent = event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
        seconds[event.name] = seconds.get(event.name, 0.0) + spent * 1e-6
    top = sorted(seconds, key=lambda name: -seconds[name])[:TOP]
    return {
        "kernels_per_update": len(events) / PROFILED,
        "device_microseconds_per_update": 1e6 * sum(seconds.values()) / PROFILED,
        "top": {name: 1e6 * seconds[name] / PROFILED for name in top},
    }


def _describe_profile(found: dict[str, Any], device: torch.device) -> str:
    word = "kernels" if device.type == "cuda" else "operations"
    top = ", ".join(f"{name[:40]} {spent:.1f}" for name, spent in found["top"].items())
    return (
        f"{found['kernels_per_update']:.1f} {word} an update, "
        f"{found['device_microseconds_per_update']:.0f} microseconds of work: {top}"
    )
