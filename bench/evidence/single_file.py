"""The scripts of `examples/single_file` against the package: what they learn, and in what time.

`python -m bench.evidence.single_file learn` trains each script on the seeds of its method's gate
and evaluates the result as the gate does: 100 episodes from common start states.
`python -m bench.evidence.single_file time` trains script and package in turns, without evaluations,
each in a process of its own on one thread.  The package begins with an empty cache of compiled
programs; its first run, which fills it, is a record of its own.
`python -m bench.evidence.single_file render` writes the records' tables into docs/single_file.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.evidence.gates import SEEDS, Gate, find_gates, seeds_text
from bench.evidence.record import read_records
from bench.evidence.rows import Row, read, write_rows
from rl_training.cli.commands import parse_seeds
from rl_training.experiment.config import load_config
from rl_training.experiment.statistics import interquartile_mean
from rl_training.runtime.train import train

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
RECORDS = ROOT / "docs" / "studies" / "single_file.csv"
PAGE = ROOT / "docs" / "single_file.md"
COLUMNS = ("script", "figure", "side", "run", "value", "wall_seconds", "cpu_seconds")
"""`figure` is `return` (`run` is the seed, `value` the mean) or `time` (`run` is the turn, or
`first` with an empty cache; `value` is the number of seeds)."""
PRESETS = {"sac": "sac/pendulum", "ppo": "ppo/cartpole", "dqn": "dqn/cartpole"}
"""The preset whose task and settings a script has."""
CACHE_VARIABLE = "RL_TRAINING_CACHE"
SIDES = ("script", "package", "package4")
TIMED_SEEDS = {"script": 1, "package": 1, "package4": 4}
FIRST = "first"


@dataclass(frozen=True)
class Spent:
    """What a training took."""

    wall: float
    cpu: float


def gate_of(script: str) -> Gate:
    """Return the gate of the method that a script shows."""
    (gate,) = find_gates([PRESETS[script]])
    return gate


def script_module(script: str) -> Any:
    """Import a script."""
    return importlib.import_module(f"examples.single_file.{script}")


def returns_of(script: str, seed: int, episodes: int) -> tuple[float, Spent]:
    """Train a script on a seed and return the mean return of its last policy."""
    module = script_module(script)
    start, used = time.perf_counter(), time.process_time()
    agent = module.train(module.Settings(seed=seed))
    spent = Spent(time.perf_counter() - start, time.process_time() - used)
    returns = module.evaluate(agent, episodes)
    return sum(returns) / episodes, spent


def time_of(script: str, side: str) -> Spent:
    """Train without evaluations on one side, and return what that took."""
    if side == "script":
        module = script_module(script)
        settings = module.Settings(eval_interval=0)
        start, used = time.perf_counter(), time.process_time()
        module.train(settings)
        return Spent(time.perf_counter() - start, time.process_time() - used)
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"output_dir": folder, "eval_episodes": 0, "threads": 1}
        if TIMED_SEEDS[side] > 1:
            changes["seeds"] = list(range(TIMED_SEEDS[side]))
        config = load_config(PRESETS[script], ("eval_interval=0",), changes)
        start, used = time.perf_counter(), time.process_time()
        train(config)
        return Spent(time.perf_counter() - start, time.process_time() - used)


def in_a_process(*words: str, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run a part of this module in a process of its own, on one thread, and return what it says."""
    command = [sys.executable, "-m", "bench.evidence.single_file", *words]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def merge(path: Path, row: Row) -> None:
    """Put a record into the file, in the place of an older one of the same run."""
    same = ("script", "figure", "side", "run")
    kept = [old for old in read(path) if any(old[name] != row[name] for name in same)]
    write_rows(path, COLUMNS, [*kept, row])


def learn(scripts: Sequence[str], seeds: Sequence[int], out: Path) -> None:
    """Measure what scripts learn."""
    for script in scripts:
        gate = gate_of(script)
        for seed in seeds:
            told = in_a_process("one", script, str(seed), str(gate.episodes))
            row = {"script": script, "figure": "return", "side": "script", "run": str(seed)}
            merge(out, row | _numbers(told))
            print(f"{script} seed {seed}: {told['value']:.2f}", flush=True)
        values = [value for seed, value in measured(out, script) if seed in seeds]
        iqm = float(interquartile_mean(values))
        print(
            f"{script}: interquartile mean {iqm:.2f} (bar {gate.iqm_bar}), worst "
            f"{min(values):.2f} (bar {gate.bar})"
        )


def measured(path: Path, script: str) -> list[tuple[int, float]]:
    """Return seeds and mean returns of a script, in the order of the seeds."""
    rows = [r for r in read(path) if (r["script"], r["figure"]) == (script, "return")]
    return sorted((int(row["run"]), float(row["value"])) for row in rows)


def measure_time(scripts: Sequence[str], sides: Sequence[str], turns: int, out: Path) -> None:
    """Measure how long some sides take, in turns; several seeds at once are measured once."""
    for script in scripts:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {CACHE_VARIABLE: cache}
            for side in sides:
                if side != "script":
                    _time(script, side, FIRST, out, environment)
            for turn in range(turns):
                for side in sides:
                    if turn == 0 or TIMED_SEEDS[side] == 1:
                        _time(script, side, str(turn), out, environment)


def _time(script: str, side: str, run: str, out: Path, environment: Mapping[str, str]) -> None:
    told = in_a_process("spent", script, side, environment=environment)
    row = {"script": script, "figure": "time", "side": side, "run": run}
    merge(out, row | _numbers(told))
    wall, cpu = told["wall_seconds"], told["cpu_seconds"]
    print(f"{script} {side} {run}: {wall:.1f} s, {cpu:.1f} CPU-seconds", flush=True)


# What the page shows


def returns_table(path: Path) -> str:
    """Return the table of what the scripts learned, beside the package's own record."""
    lines = [
        "| script | gate | seeds | interquartile mean | worst seed | package, 1000..1009 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for script in PRESETS:
        gate, values = gate_of(script), dict(measured(path, script))
        name = f"[`{gate.preset}`](results.md#{gate.preset.replace('/', '')})"
        if not values:
            lines.append(f"| `{script}.py` | {name} | none yet | | | |")
            continue
        iqm, worst = float(interquartile_mean(list(values.values()))), min(values.values())
        theirs = read_records(EVIDENCE, [gate]).get(gate.preset)
        beside = "not measured" if theirs is None else f"{theirs.iqm:.1f}, {theirs.final.min:.1f}"
        lines.append(
            f"| `{script}.py` | {name} | {seeds_text(sorted(values))} "
            f"| {iqm:.1f}, {_held(iqm, gate.iqm_bar)} | {worst:.1f}, {_held(worst, gate.bar)} "
            f"| {beside} |"
        )
    return "\n".join(lines)


def _held(value: float, bar: float) -> str:
    return f"{'reaches' if value >= bar else '**misses**'} {bar:g}"


def times_table(path: Path) -> str:
    """Return the table of processor times and wall times."""
    lines = [
        "| method | script | package | package, first run | package, 4 seeds at once |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [row for row in read(path) if row["figure"] == "time"]
    for script in PRESETS:
        cells = [
            _time_of(
                [
                    r
                    for r in rows
                    if (r["script"], r["side"]) == (script, side) and (r["run"] == FIRST) == first
                ]
            )
            for side, first in (
                ("script", False),
                ("package", False),
                ("package", True),
                ("package4", False),
            )
        ]
        lines.append(f"| {script.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time_of(rows: Sequence[Row]) -> str:
    """Return the medians over runs as `processor's time (wall time)`."""
    if not rows:
        return "not measured yet"
    wall, cpu = (
        statistics.median(float(row[name]) for row in rows)
        for name in ("wall_seconds", "cpu_seconds")
    )
    return f"{cpu:.0f} s ({wall:.0f})"


def rendered(text: str, path: Path) -> str:
    """Return the page with its two tables as the records have them."""
    for name, table in (("returns", returns_table(path)), ("times", times_table(path))):
        begin, end = f"<!-- generated: single_file_{name} -->\n", "<!-- end generated -->"
        before, _, rest = text.partition(begin)
        assert rest, f"the page has no part {begin.strip()}"
        text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return text


def _numbers(told: dict[str, float]) -> Row:
    return {name: f"{value:.2f}" for name, value in told.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or do one part of it as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("learn", "time"):
        command = commands.add_parser(name)
        command.add_argument("scripts", nargs="*", choices=[[], *PRESETS], metavar="SCRIPT")
        command.add_argument("--out", type=Path, default=RECORDS)
    commands.choices["learn"].add_argument("--seeds", default=f"{SEEDS[0]}..{SEEDS[-1]}")
    commands.choices["time"].add_argument("--turns", type=int, default=3)
    commands.choices["time"].add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    commands.add_parser("render").add_argument("--out", type=Path, default=RECORDS)
    one = commands.add_parser("one", help="(internal) train a script on a seed")
    one.add_argument("script")
    one.add_argument("seed", type=int)
    one.add_argument("episodes", type=int)
    spent = commands.add_parser("spent", help="(internal) train one side")
    spent.add_argument("script")
    spent.add_argument("side", choices=SIDES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.command == "learn":
        learn(options.scripts or list(PRESETS), parse_seeds(options.seeds), options.out)
    elif options.command == "time":
        measure_time(options.scripts or list(PRESETS), options.sides, options.turns, options.out)
    elif options.command == "render":
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), options.out), encoding="utf-8")
    elif options.command == "one":
        value, took = returns_of(options.script, options.seed, options.episodes)
        _tell(value, took)
    else:
        _tell(TIMED_SEEDS[options.side], time_of(options.script, options.side))
    return 0


def _tell(value: float, took: Spent) -> None:
    """Print the last line of a process, which the process that asked for it reads."""
    print(json.dumps({"value": value, "wall_seconds": took.wall, "cpu_seconds": took.cpu}))


if __name__ == "__main__":
    sys.exit(main())
