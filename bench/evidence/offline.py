"""`python -m bench.evidence.offline`: what offline methods learn from given data, beside a peer.

Trains every method on every dataset with every seed, each in a single-threaded process of its own,
evaluates the last checkpoint, and prints one table.  Sizes, budgets, rates, reward scale, data and
the seeds of the episodes are the same on both sides.  CQL of the peer runs twice: with our weight,
and with the weight, the learned multiplier and the rates that are its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from bench.evidence.offline_job import METHODS, Job, make_job
from bench.speed.compare import ROOT
from bench.speed.machine import available_cores
from rl_training.data.datasets.sources import DatasetKind, load_transition_dataset
from rl_training.errors import RLTrainingError
from rl_training.experiment.zoo import processor

PEER = "d3rlpy"
DEFAULTS = f"{PEER} defaults"
MODULES = {"ours": "bench.evidence.offline_ours", PEER: "bench.peers.d3rlpy_offline"}
KINDS: dict[str, DatasetKind] = {".npz": "npz", ".hdf5": "hdf5", ".h5": "hdf5"}
Results = dict[str, dict[str, Any]]
"""A job as JSON to its returns and seconds."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A dataset, as all sides read it."""

    name: str
    """With the beginning of its digest, so that results of other data are never taken for its."""
    behaviour: float
    """Mean return of its episodes."""
    path: Path


def prepare(path: Path, env_id: str, folder: Path) -> Data:
    """Read a dataset and write the copy that all sides learn from, actions inside the box."""
    dataset = load_transition_dataset(KINDS[path.suffix], path=str(path))
    box: Any = gymnasium.make(env_id).action_space
    columns = dict(dataset.columns())
    columns["actions"] = np.clip(columns["actions"], box.low, box.high)
    copy = folder / f"{path.stem}.npz"
    np.savez(copy, **columns)  # type: ignore[arg-type]  # numpy's stub has one keyword of its own
    behaviour = float(dataset.episode_returns().mean())
    return Data(name=f"{path.stem}@{dataset.digest()[:8]}", behaviour=behaviour, path=copy)


def make_jobs(options: argparse.Namespace, data: Sequence[Data]) -> list[Job]:
    """Return all jobs, those that take longest first."""
    changes = {"env_id": options.env_id, "episodes": options.episodes}
    if options.updates is not None:
        changes["updates"] = options.updates
    jobs = []
    for method in METHODS:
        if method not in options.methods:
            continue
        for side in _sides(method, peer=options.peer is not None):
            if side == "ours" and options.peer_only:
                continue
            more = changes | ({"accelerate": options.accelerate} if side == "ours" else {})
            jobs += [make_job(side, method, d.name, s, **more) for d in data for s in options.seeds]
    return jobs


def _sides(method: str, *, peer: bool) -> tuple[str, ...]:
    if not peer:
        return ("ours",)
    return ("ours", PEER, DEFAULTS) if method == "cql" else ("ours", PEER)


def run(job: Job, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Do a job in a process of its own.

    Raises:
        RuntimeError: When it fails, with its last words.
    """
    environment = dict(os.environ)
    python, side = sys.executable, job.side.partition(" ")[0]
    if side == PEER:
        python = options.peer
        # A peer has an environment of its own, into which our packages must not leak.
        environment.pop("PYTHONPATH", None)
        if options.peer_path:
            environment["PYTHONPATH"] = os.pathsep.join(
                str(Path(part).absolute()) for part in options.peer_path.split(os.pathsep)
            )
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-m", "bench.evidence.offline_job", MODULES[side], job.to_json(), str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_all(
    jobs: Sequence[Job], data: Sequence[Data], results: Results, options: argparse.Namespace
) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """Do what is not in the results yet, several at once; gives each as it ends, or why not."""
    paths = {d.name: d.path for d in data}
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(run, job, paths[job.data], options): job
            for job in jobs
            if job.to_json() not in results
        }
        try:
            for future in as_completed(waiting):
                error = future.exception()
                yield waiting[future], future.result() if error is None else str(error)
        finally:
            pool.shutdown(cancel_futures=True)


def table(jobs: Sequence[Job], data: Sequence[Data], results: Results) -> str:
    """Return a line per method and dataset: mean and, in brackets, the mean of every seed."""
    means: dict[tuple[str, str, str], list[float]] = {}
    for job in jobs:
        if job.to_json() in results:
            key = (job.method, job.data, job.side)
            means.setdefault(key, []).append(statistics.fmean(results[job.to_json()]["returns"]))
    with_peer = any(job.side != "ours" for job in jobs)
    lines = [["method", "dataset", "data", "ours", *([PEER] if with_peer else [])]]
    for method in dict.fromkeys(job.method for job in jobs):
        for d in data:
            cells = [method, d.name.partition("@")[0], f"{d.behaviour:.0f}"]
            sides = ("ours", PEER) if with_peer else ("ours",)
            lines.append([*cells, *(_cell(means.get((method, d.name, s))) for s in sides)])
            if (method, d.name, DEFAULTS) in means:
                cell = _cell(means[method, d.name, DEFAULTS])
                lines.append([method, f"  {PEER}'s defaults", "", "", cell])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _cell(seeds: list[float] | None) -> str:
    if not seeds:
        return "-"
    return f"{statistics.fmean(seeds):.0f} ({' '.join(f'{seed:.0f}' for seed in seeds)})"


def _file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(KINDS)}")
    return path


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _peer(text: str) -> str:
    name, _, python = text.partition("=")
    if name != PEER or not python:
        raise argparse.ArgumentTypeError(f"{text!r} is not {PEER}=PYTHON")
    return python


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence.offline", description=__doc__)
    add = parser.add_argument
    add("--data", nargs="+", type=_file, default=[], metavar="FILE", help="npz or D4RL's HDF5")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--env-id", default="Pendulum-v1", help="where policies are evaluated (Pendulum-v1)")
    add("--episodes", type=_positive, default=20, help="of every evaluation (20)")
    add("--updates", type=_positive, help="in place of the methods' own budgets, to try it")
    add("--accelerate", choices=("off", "compile", "auto"), default="off", help="our updates (off)")
    add("--jobs", type=_positive, default=available_cores(), help="processes at once (all cores)")
    add("--peer", type=_peer, metavar=f"{PEER}=PYTHON", help="interpreter that has the peer")
    add("--peer-only", action="store_true", help="train the peer alone; ours in another call")
    add("--peer-path", metavar="PATH", help="PYTHONPATH of the peer, from where this is started")
    add("--json", type=Path, metavar="FILE", help="kept between calls: what it holds is not redone")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and print; returns 1 when a job failed, 2 when there is nothing to learn from."""
    options = make_parser().parse_args(arguments)
    if not options.data:
        print("no data: name files with --data FILE ...")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = [prepare(path, options.env_id, Path(folder)) for path in options.data]
        except RLTrainingError as error:
            print(error)
            return 2
        return _train(options, data)


def _train(options: argparse.Namespace, data: Sequence[Data]) -> int:
    report: dict[str, Any] = {"behaviour": {}, "results": {}}
    if options.json is not None and options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    report["behaviour"] |= {d.name: d.behaviour for d in data}
    jobs, results, failed = make_jobs(options, data), report["results"], False
    for job, result in run_all(jobs, data, results, options):
        name = f"{job.side} {job.method} {job.data} seed {job.seed}"
        if isinstance(result, str):
            failed = True
            print(f"{name} failed: {result}", flush=True)
            continue
        results[job.to_json()] = result | {"machine": processor()}
        mean = statistics.fmean(result["returns"])
        print(f"{name}: {mean:.1f}, {result['training_seconds']:.0f} s", flush=True)
        if options.json is not None:  # after every job: a long benchmark may be cut short
            options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\n{table(jobs, data, results)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
