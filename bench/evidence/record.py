"""What a learning gate reached: measured by the package's own training, kept as a small file."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pydantic import ValidationError

from bench.evidence.gates import EPISODE_SEED, GATES, Gate
from bench.evidence.training import train_or_resume
from bench.speed.machine import describe
from rl_training._version import __version__
from rl_training.errors import DataError
from rl_training.experiment.checkpointing import read_manifest
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.summary import (
    CurvePoint,
    FinalReturn,
    curve_of,
    evaluations,
    over_seeds,
)
from rl_training.runtime.results import EvalResult, TrainResult
from rl_training.runtime.workflows import evaluate_group
from rl_training.transfer import device_name
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
    """Of `returns`; this is what is held against the bars."""
    returns: tuple[float, ...]
    """Episodes with the last checkpoint, from the same start states for every seed."""
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
    """Training, then the evaluation of all seeds."""
    steps: int
    """Steps that every seed has done."""
    seeds: tuple[SeedRecord, ...]
    final: FinalReturn
    """Figures over the seeds' means."""
    episodes: int
    """Of each seed."""
    episode_seed: int
    """Of their start states."""
    iqm_bar: float
    bar: float
    random: float
    met: bool
    """Whether the interquartile mean reaches `iqm_bar`, and the worst seed `bar`."""
    seconds: float
    """Wall clock of the training of all seeds, evaluations included."""
    machine: Machine

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the interquartile mean over seeds, with its interval, by step."""
        return curve_of([dict(zip(s.steps, s.curve, strict=True)) for s in self.seeds])

    @property
    def iqm(self) -> float | None:
        """Interquartile mean over the seeds."""
        return self.final.iqm

    def is_of(self, gate: Gate) -> bool:
        """Tell whether this is a measurement of the gate as it stands, not of some other budget."""
        return (
            self.trained == gate.trained()
            and tuple(seed.seed for seed in self.seeds) == gate.seeds
            and (self.episodes, self.episode_seed) == (gate.episodes, EPISODE_SEED)
            and (self.iqm_bar, self.bar) == (gate.iqm_bar, gate.bar)
        )


def measure(
    gate: Gate,
    runs: Path,
    *,
    data: Path | None = None,
    circumstances: Sequence[str] = (),
) -> Record:
    """Train a gate's seeds side by side and evaluate the last checkpoint of each.

    Args:
        gate: What to learn.
        runs: Folder in which the run's own folder is made; a run of the same settings that is
            there already is taken up again.
        data: Folder with recorded data.
        circumstances: Settings of `CIRCUMSTANCES`, as `--set` takes them.

    Raises:
        RLTrainingError: When a setting, the data or the folder cannot be used.
    """
    config = gate.config(data, circumstances).replace(output_dir=str(runs))
    given = gate.trained()  # now: somebody may edit the preset while this runs
    folder = runs / gate.slug
    earlier, start = earlier_seconds(folder / f"seed_{gate.seeds[0]}"), _cpu_times()
    result = train_or_resume(config, folder)
    seconds, busy, own = np.subtract(_cpu_times(), start).tolist()
    found = evaluate_group(folder, gate.episodes, seed=EPISODE_SEED, device=config.device)
    trained = [_seed(seed, folder, found) for seed in gate.seeds]
    final = over_seeds([seed.mean for seed in trained])
    assert final.iqm is not None
    assert final.min is not None
    return Record(
        gate=gate.preset,
        settings=gate.overrides(gate.data),
        trained=given,
        data_digest=_digest(data, gate.data),
        circumstances=tuple(circumstances),
        commands=gate.commands(circumstances),
        steps=min(result.step for result in found.values()),
        seeds=tuple(trained),
        final=FinalReturn(**{k: _rounded(v) for k, v in final.model_dump().items()}),
        episodes=gate.episodes,
        episode_seed=EPISODE_SEED,
        iqm_bar=gate.iqm_bar,
        bar=gate.bar,
        random=gate.random,
        met=final.iqm >= gate.iqm_bar and final.min >= gate.bar,
        seconds=round(earlier + seconds, 1),
        machine=_machine(result, config.device, max(busy - own, 0.0) / seconds),
    )


def earlier_seconds(folder: Path) -> float:
    """Return how long a run trained before it was stopped, as its log says; 0 for a new one."""
    rows = read_metrics(folder, "train")
    clock = [float(row["time/elapsed_seconds"]) for row in rows if "time/elapsed_seconds" in row]
    # It begins at 0 whenever a run is taken up again.
    return sum(end for end, after in pairwise([*clock, 0.0]) if after < end)


def _machine(run: TrainResult, asked: str, others: float) -> Machine:
    """Describe where a run has just ended, and on how many threads it was."""
    checkpoint = (run.per_seed or (run,))[0].checkpoint_path
    facts = describe(threads=read_manifest(checkpoint).header["threads"])
    del facts["load"], facts["platform"]  # ours is in the one, and too much in the other
    return Machine(
        **facts
        | {"system": f"{platform.system()} {platform.machine()}", "device": device_name(asked)}
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


def _seed(seed: int, run: Path, found: Mapping[str, EvalResult]) -> SeedRecord:
    """Return a seed's part of the record: what it got at the end, and its learning curve."""
    name = f"seed_{seed}"
    log, returns = evaluations(run / name), found[name].returns
    return SeedRecord(
        seed=seed,
        mean=round(statistics.fmean(returns), _DIGITS),
        returns=tuple(round(value, _DIGITS) for value in returns),
        steps=tuple(log),
        curve=tuple(round(value, _DIGITS) for value in log.values()),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _digest(folder: Path | None, name: str | None) -> str | None:
    if folder is None or name is None:
        return None
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()[:12]


class Earlier(StrictModel):
    """What a gate reached when it still had three seeds and 20 episodes for each."""

    trained: dict[str, Any]
    seeds: Integers
    returns: tuple[float, ...]
    """The mean of each seed."""
    steps: int
    seconds: float
    data_digest: str | None
    date: str

    @property
    def iqm(self) -> float | None:
        """Interquartile mean over the seeds."""
        return _rounded(over_seeds(self.returns).iqm)


EARLIER = "three_seeds.json"


def read_earlier(folder: Path, gates: Sequence[Gate] = GATES) -> dict[str, Earlier]:
    """Return the earlier figures of the gates whose settings are still those, by their names."""
    path = folder / EARLIER
    if not path.is_file():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    found = {
        g: Earlier.model_validate_json(json.dumps(known[g.preset]))
        for g in gates
        if g.preset in known
    }
    return {g.preset: earlier for g, earlier in found.items() if earlier.trained == g.trained()}


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


def longest_first(gates: Sequence[Gate], folders: Sequence[Path]) -> list[Gate]:
    """Sort gates by how long they took when last measured; those never measured come first.

    Args:
        gates: What to sort.
        folders: With records; what a later one says counts.
    """
    seconds: dict[str, float] = {}
    for folder in folders:
        seconds |= {name: each.seconds for name, each in read_earlier(folder, gates).items()}
        seconds |= {name: record.seconds for name, record in read_records(folder, gates).items()}
    return sorted(gates, key=lambda gate: -seconds.get(gate.preset, math.inf))
