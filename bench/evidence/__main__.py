"""`python -m bench.evidence`: runs the learning gates and writes down what they reached.

Every gate trains its ten seeds side by side, as `rl-training train --seeds` does, and evaluates the
last checkpoint of each on 100 episodes, whose start states are the same for all seeds.  After each
gate its record and its learning curve are written, and the page of results beside them is rendered
from all records in the folder, so that gates can be run on different days.  Exits with 1 when a bar
was missed, with 2 when a gate could not be run, and with 75 when it was stopped.

With `--jobs N` gates run N at a time, each in a process of its own on one thread.  They can be
stopped at any time; `--runs FOLDER --missing` goes on from there.

`--suite mujoco` (atari, pixels) is something else, the proof at benchmark scale: see
`python -m bench.evidence --suite mujoco --help`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.evidence import suite
from bench.evidence.gates import CIRCUMSTANCES, DATA_VARIABLE, EPISODES, Gate, find_gates
from bench.evidence.jobs import STOPPED, Ended, Work, run_all
from bench.evidence.page import render
from bench.evidence.record import Record, longest_first, measure, read_records, write_record
from bench.speed.compare import ROOT
from bench.speed.table import format_number
from rl_training.cli.commands import parse_seeds
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.runtime.results import TrainingInterrupted
from rl_training.sweeps.worker import follow
from rl_training.validation import suggest

RECORDS = ROOT / "docs" / "evidence"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="GATE", help="methods or presets, such as ppo/cartpole (all)")
    add("--data", metavar="FOLDER", help=f"folder with recorded data ({DATA_VARIABLE})")
    add("--out", type=Path, default=RECORDS, help="where records are kept")
    add("--seeds", help="a try: others than a gate's own, 1,2,3 or 0..7")
    add("--steps", type=int, help="a try: another budget than a gate's own")
    add("--episodes", type=int, help=f"a try: others than {EPISODES} for each seed")
    add(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="keep the runs here, and go on with those that are there (they are thrown away)",
    )
    add("--jobs", type=int, metavar="N", help="so many gates at once, each on one thread")
    add(
        *("--set", "-s"),
        dest="circumstances",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"how it runs on this machine: {', '.join(CIRCUMSTANCES)}",
    )
    add("--missing", action="store_true", help="only gates not measured as they stand now")
    add("--render", action="store_true", help="run nothing, only render the records")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and render; returns 1 when a bar was missed, 2 when the input cannot be used."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        # Its options are its own: gates have bars and records of another kind.
        return suite.main(words) if "--suite" in words else _run(make_parser().parse_args(words))
    except TrainingInterrupted as error:
        print(error, file=sys.stderr)
        return STOPPED
    except RLTrainingError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    gates, data = _asked(options), _data_folder(options.data)
    _check(options)
    if options.missing:
        known = read_records(options.out, gates)
        gates = [g for g in gates if g.preset not in known or not known[g.preset].is_of(g)]
    chosen = [] if options.render else _runnable(gates, data)
    for gate in chosen:  # a wrong setting is told now, not after the gates before it
        gate.config(data, options.circumstances)
    if options.jobs is None:
        code = _one_by_one(chosen, data, options)
    else:
        code = _side_by_side(chosen, data, options)
    if not options.child:
        page = render(options.out)
        print(f"rendered {page}" if page else f"no page of results beside {options.out}")
    return code


def _asked(options: argparse.Namespace) -> list[Gate]:
    """Return the gates that are named, changed as a try asks for."""
    changes = {
        "seeds": None if options.seeds is None else tuple(parse_seeds(options.seeds)),
        "steps": options.steps,
        "episodes": options.episodes,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return [replace(gate, **given) for gate in find_gates(options.names)]


def _one_by_one(gates: Sequence[Gate], data: Path | None, options: argparse.Namespace) -> int:
    if options.child:
        threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    missed = False
    for gate in gates:
        with _runs_folder(options.runs) as runs:
            record = measure(gate, runs, data=data, circumstances=options.circumstances)
        missed = missed or not record.met
        # After every gate: a long benchmark may be cut short.
        write_record(options.out, gate, record)
        print(told(record), flush=True)
        if not options.child:
            render(options.out)
    # Python exits with 1 when it breaks, too; who started a child reads the verdict in its record.
    return int(missed and not options.child)


def _side_by_side(gates: Sequence[Gate], data: Path | None, options: argparse.Namespace) -> int:
    codes = {0}
    by_name = {gate.slug: gate for gate in gates}
    circumstances = options.circumstances
    if not any(text.startswith("threads=") for text in circumstances):
        circumstances = [*circumstances, "threads=1"]

    def command(gate: Gate) -> list[str]:
        words = [sys.executable, "-m", "bench.evidence", gate.preset, "--child"]
        words += ["--out", str(options.out), "--runs", str(runs)]
        words += [] if data is None else ["--data", str(data)]
        tries = {"seeds": options.seeds, "steps": options.steps, "episodes": options.episodes}
        for name, value in tries.items():
            words += [] if value is None else [f"--{name}", str(value)]
        return [*words, *(word for text in circumstances for word in ("--set", text))]

    def report(ended: Ended) -> None:
        gate = by_name[ended.work.name]
        if ended.done:
            record = read_records(options.out, [gate])[gate.preset]
            codes.add(int(not record.met))
            print(told(record), flush=True)
            render(options.out)
        else:
            codes.add(2)
            print(f"{gate.preset} FAILED with code {ended.code}: {ended.last_line}", flush=True)

    with _runs_folder(options.runs) as runs:
        ordered = longest_first(gates, [RECORDS, options.out])
        logs = runs / "logs"
        works = [Work(g.slug, command(g), logs / f"{g.slug}.log") for g in ordered]
        left = run_all(works, options.jobs, report)
    if left:
        names = ", ".join(by_name[ended.work.name].preset for ended in left)
        again = "with --missing and the same --runs to go on" if options.runs else "from scratch"
        print(f"stopped; not measured: {names}; call it again {again}", flush=True)
        return STOPPED
    return max(codes)


def _runnable(gates: Sequence[Gate], data: Path | None) -> list[Gate]:
    """Return the gates whose data is there; says why not of each other one."""
    reasons = {gate: gate.missing(data) for gate in gates}
    for reason in filter(None, reasons.values()):
        print(reason, flush=True)
    return [gate for gate, reason in reasons.items() if reason is None]


def told(record: Record) -> str:
    """Return the line of a gate that was run."""
    final = record.final
    verdict = "met" if record.met else "MISSED"
    return (
        f"{record.gate} at {record.steps:,} steps, last checkpoint, {len(record.seeds)} seeds, "
        f"{record.episodes} episodes each: IQM {format_number(final.iqm)} "
        f"(bar {record.iqm_bar:g}), worst seed {format_number(final.min)} (bar {record.bar:g}); "
        f"{verdict}; {record.seconds:.0f} s on {record.machine.device}"
    )


def _data_folder(asked: str | None) -> Path | None:
    """Return the folder of an option or of the environment, which must be there if it is named."""
    named = asked or os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = "--data" if asked else DATA_VARIABLE
        raise ConfigError(f"{origin} {named}: there is no such folder; name one that holds npz")
    return folder


def _check(options: argparse.Namespace) -> None:
    for text in options.circumstances:
        key = text.partition("=")[0]
        if key not in CIRCUMSTANCES:
            raise ConfigError(
                f"--set {text}: a gate stays what it is, only {', '.join(CIRCUMSTANCES)} may be "
                f"set{suggest(key, CIRCUMSTANCES)}"
            )
    for name in ("jobs", "steps", "episodes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be >= 1, got {value}")
    tries = [name for name in ("seeds", "steps", "episodes") if getattr(options, name) is not None]
    if tries and options.out.resolve() == RECORDS.resolve():
        raise ConfigError(
            f"--{tries[0]} makes this a try, not the gate: name another folder for its record with "
            "--out"
        )


@contextmanager
def _runs_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
