"""Row `gpu-seeds`: whole runs of a preset, several seeds in one, and their time split."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.speed.accelerator import (
    choose_accelerate,
    choose_device,
    device_name,
    failing_softly,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.options import Options
from bench.speed.rows import Row
from bench.speed.timers import Timers, Watched
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.experiment.config import load_config
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.collector import Collector
from rl_training.runtime.compile.cuda_graph import CapturedUpdates
from rl_training.runtime.compile.runner import Accelerator, ReplayRunner
from rl_training.runtime.session import Session
from rl_training.runtime.train import train

SEEDS = (1, 32)
OVERRIDES = (
    "algo_kwargs.eval_interval=0",
    "algo_kwargs.learning_starts=500",
    "algo_kwargs.buffer_capacity=100000",
)
WATCHED: tuple[Watched, ...] = (
    (SeedVectorEnv, "step", "environments"),
    (ReplayRunner, "act", "acting"),
    (ReplayRunner, "update", "updates"),
    (Accelerator, "programs", "compiling"),
    (CapturedUpdates, "__init__", "compiling"),
    (Collector, "observation", "transfer"),
    (Collector, "step", "transfer"),  # less its environments: actions to the host, episode books
    (ReplayBuffer, "add", "replay insertion"),
    (Session, "log", "logging"),
    (Session, "save", "saving"),
)
NOT_STEPPING = ("compiling", "saving")
"""Labels that do not grow with the length of a run."""


class _Watch(Callback):
    """Times a run from its first step to its end, and keeps what it says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.messages: list[str] = []
        self._start = 0.0

    def on_start(self, state: TrainerState) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_message(self, state: TrainerState, text: str) -> None:
        """Keep a message."""
        self.messages.append(text)

    def on_end(self, state: TrainerState) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._start


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Run each number of seeds once as it is and, on an accelerator, once more to split its time.

    The second run waits for the device at every change of label, which alone tells what it is busy
    with but makes the run slower.
    """
    device = choose_device(row.name, options)
    for count in options.seeds or SEEDS:
        for precision in options.precisions or ("fp32",):
            yield failing_softly(
                partial(_measure_one, row, options, device, count, precision),
                partial(_figure, row, count, precision, {}),
            )


def _measure_one(
    row: Row, options: Options, device: torch.device, count: int, precision: str
) -> Figure:
    timers = Timers()
    watch = _run(options, device, count, precision, timers)
    spent = timers.seconds
    seconds = watch.seconds - sum(spent[label] for label in NOT_STEPPING)
    split = spent
    if device.type == "cuda":
        synchronized = Timers(synchronizer(device))
        _run(options, device, count, precision, synchronized)
        split = synchronized.seconds
    shares = _shares(split)
    notes = [m for m in watch.messages if FALLBACK in m]
    notes.append(
        f"{options.steps:,} steps of {count} seed{'s' if count > 1 else ''} in {seconds:.1f} s, "
        f"and {spent['compiling']:.1f} s to compile, {spent['saving']:.1f} s to save at the end"
    )
    notes.append(", ".join(f"{label} {100 * share:.0f}%" for label, share in shares.items()))
    extra = {
        "steps": options.steps,
        "device": device_name(device),
        "wall_seconds": watch.seconds,
        "seconds": dict(spent),
        "seconds_synchronized": dict(split),
        "shares": shares,
    }
    samples = {choose_accelerate(device, options): [count * options.steps / seconds]}
    return _figure(row, count, precision, samples, notes=notes, extra=extra)


def _figure(
    row: Row,
    count: int,
    precision: str,
    samples: Mapping[str, Sequence[float]],
    *,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Figure:
    return Figure(
        row=row.name,
        label=f"{row.name} {count} {precision}",
        unit="env steps/s",
        samples=samples,
        notes=tuple(notes),
        extra={"seeds": count, "precision": precision} | dict(extra or {}),
    )


def _run(
    options: Options, device: torch.device, count: int, precision: str, timers: Timers
) -> _Watch:
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {
            "seeds": list(range(count)),
            "total_timesteps": options.steps,
            "device": str(device),
            "threads": options.threads,
            "accelerate": choose_accelerate(device, options),
            "precision": precision,
            "eval_episodes": 0,
            "checkpoint_interval": 0,
            "tensorboard": False,
            "output_dir": folder,
        }
        config = load_config(options.preset, OVERRIDES, changes)
        with timers.watching(WATCHED):
            train(config, callbacks=[watch])
    return watch


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Shares of the time that grows with the steps, largest first."""
    stepping = {label: spent for label, spent in seconds.items() if label not in NOT_STEPPING}
    total = sum(stepping.values())
    return {
        label: stepping[label] / total for label in sorted(stepping, key=lambda x: -stepping[x])
    }
