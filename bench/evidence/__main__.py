"""`python -m bench.evidence`: runs the learning gates and writes down what they reached.

Every gate trains its seeds side by side, as `rl-training train --seeds` does, and evaluates the
last checkpoint of each on 20 fresh episodes.  After each gate its record and its learning curve
are written, and the page of results beside them is rendered from all records in the folder, so that
gates can be run on different days.  Exits with 1 when a seed missed its bar.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.evidence.gates import CIRCUMSTANCES, DATA_VARIABLE, EPISODES, Gate, find_gates
from bench.evidence.page import render
from bench.evidence.record import Record, measure, read_records, write_record
from bench.speed.compare import ROOT
from bench.speed.table import format_number
from rl_training.cli.commands import parse_seeds
from rl_training.errors import ConfigError, RLTrainingError
from rl_training.validation import suggest


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="GATE", help="methods or presets, such as ppo/cartpole (all)")
    add("--data", metavar="FOLDER", help=f"folder with recorded data ({DATA_VARIABLE})")
    add("--out", type=Path, default=ROOT / "docs" / "evidence", help="where records are kept")
    add("--seeds", help="others than a gate's own: 1,2,3 or 0..7")
    add("--runs", type=Path, metavar="FOLDER", help="keep the runs here (they are thrown away)")
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and render; returns 1 when a bar was missed, 2 when the input cannot be used."""
    options = make_parser().parse_args(arguments)
    try:
        return _run(options)
    except RLTrainingError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    gates, data = find_gates(options.names), _data_folder(options.data)
    seeds = None if options.seeds is None else parse_seeds(options.seeds)
    _check_circumstances(options.circumstances)
    if options.missing:
        known = {name: record.trained for name, record in read_records(options.out).items()}
        gates = tuple(gate for gate in gates if known.get(gate.preset) != gate.trained())
    chosen = [] if options.render else _runnable(gates, data)
    for gate in chosen:  # a wrong setting is told now, not after the gates before it
        gate.config(data, seeds or gate.seeds, options.circumstances)
    missed = False
    for gate in chosen:
        with _runs_folder(options.runs) as runs:
            record = measure(
                gate, runs, data=data, seeds=seeds, circumstances=options.circumstances
            )
        missed = missed or not record.met
        print(told(gate, record), flush=True)
        # After every gate: a long benchmark may be cut short.
        write_record(options.out, gate, record)
        render(options.out)
    page = render(options.out)
    print(f"rendered {page}" if page else f"no page of results beside {options.out}")
    return int(missed)


def _runnable(gates: Sequence[Gate], data: Path | None) -> list[Gate]:
    """Return the gates whose data is there; says why not of each other one."""
    reasons = {gate: gate.missing(data) for gate in gates}
    for reason in filter(None, reasons.values()):
        print(reason, flush=True)
    return [gate for gate, reason in reasons.items() if reason is None]


def told(gate: Gate, record: Record) -> str:
    """Return the line of a gate that was run."""
    returns = ", ".join(format_number(seed.mean) for seed in record.seeds)
    verdict = "met" if record.met else "MISSED"
    return (
        f"{gate.preset} at {record.steps:,} steps, last checkpoint, {EPISODES} episodes each: "
        f"{returns}; bar {gate.bar:g} {verdict}; {record.seconds:.0f} s"
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


def _check_circumstances(texts: Sequence[str]) -> None:
    for text in texts:
        key = text.partition("=")[0]
        if key not in CIRCUMSTANCES:
            raise ConfigError(
                f"--set {text}: a gate stays what it is, only {', '.join(CIRCUMSTANCES)} may be "
                f"set{suggest(key, CIRCUMSTANCES)}"
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
