"""What a learning gate reached: measured by the package's own training, kept as a small file."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from pydantic import ValidationError

from bench.evidence.gates import EPISODES, GATES, Gate
from bench.speed.machine import describe
from rl_training._version import __version__
from rl_training.errors import DataError
from rl_training.experiment.checkpointing import read_manifest
from rl_training.experiment.summary import (
    CurvePoint,
    FinalReturn,
    curve_of,
    evaluations,
    over_seeds,
)
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import choose_device, train
from rl_training.runtime.workflows import evaluate_checkpoint
from rl_training.validation import Integers, StrictModel, Texts

_NUMBERS = re.compile(r'\[\s+([^\[\]{}"]*?)\s+\]')
_DIGITS = 3
"""Decimals of returns; more would be noise."""


class Machine(StrictModel):
    """Where and when."""

    processor: str
    cores: int
    threads: int
    device: str
    """`cpu`, or the name of the accelerator."""
    system: str
    python: str
    torch: str | None
    rl_training: str
    date: str
    others: float
    """Cores that other processes kept busy during the training, on average."""


class SeedRecord(StrictModel):
    """One seed."""

    seed: int
    mean: float
    """Of `returns`; this is what is held against the bar."""
    returns: tuple[float, ...]
    """Fresh episodes with the last checkpoint."""
    steps: Integers
    """When the run was evaluated."""
    curve: tuple[float, ...]
    """Mean return of each of these evaluations."""


class Record(StrictModel):
    """One gate."""

    gate: str
    """The preset."""
    settings: Texts
    """What differs from the preset, with the plain name of the data."""
    trained: dict[str, Any]
    """Task, budget and all settings that were given, see `Gate.trained`."""
    data_digest: str | None
    """Beginning of the SHA-256 of the data's file."""
    circumstances: Texts
    commands: Texts
    """Training, then the evaluation of each seed."""
    steps: int
    """Steps that every seed has done."""
    seeds: tuple[SeedRecord, ...]
    final: FinalReturn
    """Figures over the seeds' means."""
    bar: float
    random: float
    met: bool
    """Whether no seed is below the bar."""
    seconds: float
    """Wall clock of the training of all seeds, evaluations included."""
    machine: Machine

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the interquartile mean over seeds, with its interval, by step."""
        return curve_of([dict(zip(s.steps, s.curve, strict=True)) for s in self.seeds])


def measure(
    gate: Gate,
    runs: Path,
    *,
    data: Path | None = None,
    seeds: Sequence[int] | None = None,
    circumstances: Sequence[str] = (),
) -> Record:
    """Train a gate's seeds side by side and evaluate the last checkpoint of each.

    Args:
        gate: What to learn.
        runs: Folder in which the run's own folder is made.
        data: Folder with recorded data.
        seeds: Others than the gate's.
        circumstances: Settings of `CIRCUMSTANCES`, as `--set` takes them.

    Raises:
        RLTrainingError: When a setting, the data or the folder cannot be used.
    """
    chosen = tuple(seeds or gate.seeds)
    config = gate.config(data, chosen, circumstances).replace(output_dir=str(runs))
    given = gate.trained()  # now: somebody may edit the preset while this runs
    start = _cpu_times()
    result = train(config)
    seconds, busy, own = np.subtract(_cpu_times(), start).tolist()
    members = result.per_seed or (result,)  # a group of one has no members beside itself
    trained = [
        _seed(seed, member, config.device) for seed, member in zip(chosen, members, strict=True)
    ]
    final = over_seeds([seed.mean for seed, _ in trained])
    return Record(
        gate=gate.preset,
        settings=gate.overrides(gate.data),
        trained=given,
        data_digest=_digest(data, gate.data),
        circumstances=tuple(circumstances),
        commands=gate.commands(chosen, circumstances),
        steps=min(steps for _, steps in trained),
        seeds=tuple(seed for seed, _ in trained),
        final=FinalReturn(**{k: _rounded(v) for k, v in final.model_dump().items()}),
        bar=gate.bar,
        random=gate.random,
        met=all(seed.mean >= gate.bar for seed, _ in trained),
        seconds=round(seconds, 1),
        machine=_machine(members[0], config.device, max(busy - own, 0.0) / seconds),
    )


def _machine(run: TrainResult, device_name: str, others: float) -> Machine:
    """Describe where a run has just ended, and on how many threads it was."""
    facts = describe(threads=read_manifest(run.checkpoint_path).header["threads"])
    del facts["load"], facts["platform"]  # ours is in the one, and too much in the other
    device = choose_device(device_name)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine(
        **facts
        | {"system": f"{platform.system()} {platform.machine()}", "device": kind}
        | {"rl_training": __version__, "others": round(others, 2)}
    )


def _cpu_times() -> tuple[float, float, float]:
    """Return the clock, and the seconds that all processes and this one with its children took."""
    times, process = psutil.cpu_times(), psutil.Process()
    busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    mine = process.cpu_times()
    own = mine.user + mine.system + mine.children_user + mine.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended a moment ago
            own += sum(child.cpu_times()[:2])
    return time.perf_counter(), busy, own


def _seed(seed: int, member: TrainResult, device: str) -> tuple[SeedRecord, int]:
    """Evaluate a seed; returns its part of the record and the step of its checkpoint."""
    found = evaluate_checkpoint(member.checkpoint_path, EPISODES, device=device)
    log = evaluations(member.run_dir)
    record = SeedRecord(
        seed=seed,
        mean=round(found.metrics["eval_return_mean"], _DIGITS),
        returns=tuple(round(value, _DIGITS) for value in found.returns),
        steps=tuple(log),
        curve=tuple(round(value, _DIGITS) for value in log.values()),
    )
    return record, found.step


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _digest(folder: Path | None, name: str | None) -> str | None:
    if folder is None or name is None:
        return None
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()[:12]


def record_path(folder: Path, gate: Gate) -> Path:
    """Return where a gate's record is kept."""
    return folder / f"{gate.slug}.json"


def write_record(folder: Path, gate: Gate, record: Record) -> Path:
    """Write a record, a list of numbers on one line.

    Raises:
        DataError: When the file cannot be written.
    """
    path = record_path(folder, gate)
    text = json.dumps(record.model_dump(mode="json"), indent=1)
    short = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{short}\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}); choose another folder with --out"
        ) from None
    return path


def read_records(folder: Path, gates: Sequence[Gate] = GATES) -> dict[str, Record]:
    """Return the records that are there, by the names of their gates.

    Raises:
        DataError: When a file is not a record.
    """
    paths = {gate.preset: record_path(folder, gate) for gate in gates}
    return {name: _read(path) for name, path in paths.items() if path.is_file()}


def _read(path: Path) -> Record:
    try:
        content: Any = path.read_text(encoding="utf-8")
        return Record.model_validate_json(content)
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a record of this version ({str(error).splitlines()[0]}); run its gate "
            "again"
        ) from None
