"""The speed of this package beside its peers and against its bars, as one table.

Sides of a row run in processes of their own and take turns, chunk by chunk; the figure is the
median of the repeats.  `ours` is compiled (`accelerate: compile`), `eager` is not.  A peer is
looked for in this interpreter unless --peer names another; a row without its peer says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.speed.compare import PEER_PACKAGES
from bench.speed.figures import Figure
from bench.speed.machine import describe, headline
from bench.speed.options import BenchError, Options
from bench.speed.rows import ALGOS, ROWS, Row, names_of
from bench.speed.table import WIDTH, format_failure, format_figure, header


def _rows_help() -> str:
    told = {row.name: f"{row.what}{_bars_of(row)}" for row in ROWS.values()} | {
        "cpu": "all rows that need no accelerator; the default",
        "gpu": "all rows that do; their bars are for one H200",
    }
    lines = [
        textwrap.fill(text, WIDTH - 2, initial_indent=f"  {name:11} ", subsequent_indent=" " * 14)
        for name, text in told.items()
    ]
    peers = "Peers live in environments of their own; docs/performance.md has the commands."
    return "\n".join(["rows:", *lines, "", peers])


def _bars_of(row: Row) -> str:
    bars = [str(row.bar)] if row.bar is not None else []
    bars += [f"{name} {bar}" for name, bar in row.bars.items()]
    return f" (bar {', '.join(bars)})" if bars else ""


def _peer(text: str) -> tuple[str, str]:
    name, separator, python = text.partition("=")
    if not separator or name not in PEER_PACKAGES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PYTHON with a name of {', '.join(PEER_PACKAGES)}"
        )
    return name, python


def _peer_path(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or PEER_PACKAGES.get(name) != "" or not Path(folder).is_dir():
        names = ", ".join(name for name, package in PEER_PACKAGES.items() if not package)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=FOLDER with a name of {names} and a folder that is there"
        )
    return name, str(Path(folder).resolve())


def _row(text: str) -> str:
    if text not in (*ROWS, "cpu", "gpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a row, cpu or gpu")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _precisions(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {"fp32", "tf32", "bf16"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of fp32, tf32 and bf16")
    return names


def _algos(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(ALGOS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(ALGOS)}")
    return names


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=_rows_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("rows", nargs="*", type=_row, metavar="ROW", help="rows to measure, see below")
    add(
        "--peer",
        dest="peers",
        action="append",
        type=_peer,
        metavar="NAME=PYTHON",
        help=f"interpreter of a peer ({', '.join(PEER_PACKAGES)}); may be given several times",
    )
    add(
        "--peer-path",
        dest="paths",
        action="append",
        type=_peer_path,
        metavar="NAME=FOLDER",
        help="sources of a peer that is no package (dreamerv3_torch)",
    )
    # The name it had while there was one peer.
    add("--peer-python", dest="sb3", default=None, help=argparse.SUPPRESS)
    add("--threads", type=_positive, default=1, help="CPU threads of every side (1)")
    add("--repeats", type=_positive, default=5, help="timed chunks per side (5)")
    add("--cold", action="store_true", help="compile in empty caches, to see how long it takes")
    add("--json", type=Path, metavar="FILE", help="write machine, samples, medians and ratios")
    gpu = parser.add_argument_group("accelerator rows")
    gpu.add_argument("--device", default="cuda", help="cuda, cuda:<n>, or cpu to try them (cuda)")
    gpu.add_argument("--accelerate", choices=("off", "compile", "graph"), help="how updates run")
    gpu.add_argument("--seeds", type=_numbers, metavar="N,...", help="numbers of seeds")
    gpu.add_argument("--precisions", type=_precisions, metavar="P,...", help="fp32, tf32, bf16")
    gpu.add_argument("--algo", type=_algos, metavar="A,...", help=", ".join(ALGOS))
    gpu.add_argument("--seconds", type=float, default=3.0, help="length of a repeat of updates (3)")
    gpu.add_argument("--preset", default="sac/pendulum", help="preset of gpu-seeds (sac/pendulum)")
    gpu.add_argument("--steps", type=_positive, help="steps of whole runs, per seed")
    gpu.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting of whole runs, to try them; may be given several times",
    )
    gpu.add_argument("--profile", action="store_true", help="count the kernels of an update")
    return parser


def parse(arguments: Sequence[str] | None) -> tuple[list[str], Options, Path | None]:
    """Return the rows to measure, the options and where to write JSON."""
    given = make_parser().parse_args(arguments)
    rows: list[str] = []
    for name in given.rows or ["cpu"]:
        rows += names_of(name) if name in ("cpu", "gpu") else [name]
    options = Options(
        peers=dict(given.peers or ()) | ({"sb3": given.sb3} if given.sb3 else {}),
        paths=dict(given.paths or ()),
        threads=given.threads,
        repeats=given.repeats,
        cold=given.cold,
        device=given.device,
        accelerate=given.accelerate,
        seeds=given.seeds,
        precisions=given.precisions,
        algos=given.algo,
        seconds=given.seconds,
        steps=given.steps,
        overrides=tuple(given.overrides),
        preset=given.preset,
        profile=given.profile,
    )
    return list(dict.fromkeys(rows)), options, given.json


def report(machine: dict[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {"machine": machine, "figures": [figure.to_json() for figure in figures]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when a row could not be measured."""
    rows, options, path = parse(arguments)
    machine = describe(options.threads)
    print(headline(machine, options.repeats), header(), sep="\n\n", flush=True)
    figures: list[Figure] = []
    failed = False
    for name in rows:
        row = ROWS[name]
        try:
            for figure in importlib.import_module(f"bench.speed.{row.measure}").measure(
                row, options
            ):
                figures.append(figure)
                print(format_figure(figure, colour=sys.stdout.isatty()), flush=True)
                if path is not None:  # after every figure: a long benchmark may be cut short
                    path.write_text(json.dumps(report(machine, figures), indent=2))
        except BenchError as error:
            failed = True
            print(format_failure(name, str(error)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
