"""`python -m bench.evidence.learning`: does the fast path learn as well as the plain one?

Trains a preset eagerly in fp32, one seed per process; compiled in bf16, one seed per process; and
compiled in bf16, all seeds at once, on the accelerator where there is one.  Prints the
interquartile mean of the evaluations with its 95% interval for each, and whether they overlap.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.experiment.config import load_config
from rl_training.experiment.statistics import bootstrap_intervals, interquartile_mean
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.train import train

FAST = {"accelerate": "compile", "precision": "bf16"}
NAMES = {
    "eager": "eager fp32, one by one",
    "compiled": "compiled bf16, one by one",
    "together": "compiled bf16, together",
}
PLAIN = {"accelerate": "off", "precision": "fp32"}


@dataclass(frozen=True)
class Job:
    preset: str
    overrides: tuple[str, ...]
    changes: dict[str, Any]


class Curve(Callback):
    """Mean return of every seed at every evaluation, and what the run said."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.returns: list[list[float]] = []
        self.messages: list[str] = []

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        self.steps.append(state.step)
        self.returns.append([float(np.mean(episodes)) for episodes in returns])

    def on_message(self, state: TrainerState, text: str) -> None:
        self.messages.append(text)


def run(job: Job) -> dict[str, Any]:
    """Train once; returns steps, returns `[T][S]`, messages and seconds."""
    curve, start = Curve(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        changes = {"output_dir": folder, "tensorboard": False, "checkpoint_interval": 0}
        train(load_config(job.preset, job.overrides, changes | job.changes), callbacks=[curve])
    return vars(curve) | {"seconds": time.perf_counter() - start}


def run_singly(
    preset: str, overrides: tuple[str, ...], how: dict[str, Any], seeds: range, workers: int
) -> dict[str, Any]:
    jobs = [
        Job(preset, overrides, how | {"seed": seed, "device": "cpu", "threads": 1})
        for seed in seeds
    ]
    with ProcessPoolExecutor(workers) as pool:
        if how["accelerate"] == "compile":
            # One for a moment first, so that the others find its programs in the cache.
            short = load_config(preset, overrides).algo_kwargs["learning_starts"] + 10
            brief = replace(jobs[0], overrides=(*overrides, f"total_timesteps={short}"))
            pool.submit(run, brief).result()
        results = list(pool.map(run, jobs))
    length = min(len(result["steps"]) for result in results)
    return {
        "steps": results[0]["steps"][:length],
        "returns": [[r["returns"][t][0] for r in results] for t in range(length)],
        "seconds": [result["seconds"] for result in results],
        "messages": sorted({text for result in results for text in result["messages"]}),
    }


def run_together(preset: str, overrides: tuple[str, ...], seeds: range) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    how = FAST | {"accelerate": "graph" if cuda else "compile", "device": "auto"}
    result = run(Job(preset, overrides, how | {"seeds": list(seeds)}))
    return result | {"seconds": [result["seconds"]]}


def summarize(name: str, result: dict[str, Any]) -> dict[str, Any]:
    rows = np.array(result["returns"])  # [T, S]
    bounds = bootstrap_intervals(rows, interquartile_mean)
    last = rows[-1]
    iqm = interquartile_mean(rows)
    print(
        f"{name:34} {rows.shape[1]:3} seeds  IQM {iqm[-1]:9.1f}  95% [{bounds[-1][0]:9.1f}, "
        f"{bounds[-1][1]:9.1f}]  min {last.min():9.1f}  {np.mean(result['seconds']):6.0f} s a run",
        flush=True,
    )
    for text in result["messages"]:
        print(f"    {text}")
    return result | {"iqm": iqm.tolist(), "interval": np.asarray(bounds).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="sac/pendulum")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--singles", type=int, default=6, help="seeds trained one by one")
    parser.add_argument("--group", type=int, default=16, help="seeds trained together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--parts", default=",".join(NAMES), help="which of them to run now")
    parser.add_argument("--json", type=Path, help="kept between calls, so that parts add up")
    options = parser.parse_args()
    overrides = (
        f"total_timesteps={options.steps}",
        f"eval_episodes={options.episodes}",
        f"algo_kwargs.eval_interval={options.steps // 10}",
    )
    singles, workers = range(options.singles), options.workers
    parts = {
        "eager": partial(run_singly, options.preset, overrides, PLAIN, singles, workers),
        "compiled": partial(run_singly, options.preset, overrides, FAST, singles, workers),
        "together": partial(run_together, options.preset, overrides, range(options.group)),
    }
    found: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.is_file():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    for part in options.parts.split(","):
        found[part] = summarize(NAMES[part], parts[part]())
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    lows, highs = zip(*(result["interval"][-1] for result in found.values()), strict=True)
    print("intervals overlap" if max(lows) <= min(highs) else "intervals do NOT overlap")


if __name__ == "__main__":
    main()
