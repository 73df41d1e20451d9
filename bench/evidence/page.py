"""The generated parts of docs/results.md and of the methods' pages, and the plots."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from bench.evidence.gates import GATES, Gate
from bench.evidence.record import Earlier, Record, read_earlier, read_records
from bench.speed.machine import BUSY
from bench.speed.table import format_number
from rl_training.errors import DataError
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.statistics import LEVEL
from rl_training.reporting.charts import COLORS, Line, Size, chart_file
from rl_training.reporting.page import duration

PAGE = "results.md"
"""The page beside the folder of the records."""
PACKAGED = Path("src/rl_training/assets/measured.yaml")
"""What `rl-training list presets` shows of the records, seen from the root of the repository."""
SIZE = Size(width=640, height=240)
COLUMNS = (
    *("method", "preset", "steps", "settings chosen on seeds", "reported seeds"),
    *(f"IQM [{LEVEL:.0%}]", "IQM bar", "worst seed", "worst-seed bar", "met", "device", "time"),
)
_BAR = COLORS + 7
"""Grey and dashed, see `Line.number`."""
_PART = re.compile(r"(<!-- generated: evidence -->\n).*?(<!-- end generated -->)", re.DOTALL)
_METHOD_PART = re.compile(r"(<!-- generated: results -->\n).*?(<!-- end generated -->)", re.DOTALL)
_WIDTH = 96
"""Of a line of a command."""


def plot(record: Record) -> str:
    """Return the learning curve of a gate as an SVG file, the worst seed's bar as a dashed line."""
    points = [point for point in record.curve() if point.iqm is not None]
    line = Line(
        label=record.gate,
        number=0,
        points=tuple((p.step, p.iqm) for p in points if p.iqm is not None),
        band=tuple(
            (p.step, p.low, p.high) for p in points if p.low is not None and p.high is not None
        ),
        faint=tuple(tuple(zip(s.steps, s.curve, strict=True)) for s in record.seeds),
    )
    steps = [step for seed in record.seeds for step in seed.steps] or [0, record.steps]
    bar = Line(
        label="bar",
        number=_BAR,
        points=((min(steps), record.bar), (max(steps), record.bar)),
    )
    return chart_file([line, bar] if line.points else [bar], SIZE, _alt(record))


def _alt(record: Record) -> str:
    worst = format_number(record.final.min)
    return f"{record.gate}: return over steps; worst seed {worst}, its bar {record.bar:g}"


def section(
    folder: Path,
    records: Mapping[str, Record],
    gates: Sequence[Gate] = GATES,
    earlier: Mapping[str, Earlier] | None = None,
) -> str:
    """Return the table of all gates and, for each that was measured, plot, machine and commands.

    Args:
        folder: Where the plots are, as the page links to them.
        records: What was measured, by the names of the gates; what is not of a gate as it stands
            is left out.
        gates: All gates, in order.
        earlier: What gates reached on three seeds, shown for those without a record.
    """
    before = earlier or {}
    known = {gate.preset: records[gate.preset] for gate in _measured(gates, records)}
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for gate in gates:
        cells = _row(gate, known.get(gate.preset), before.get(gate.preset))
        lines.append(f"| {' | '.join(cells)} |")
    met = sum(record.met for record in known.values())
    lines += ["", f"{len(known)} of {len(gates)} gates are measured on ten seeds; {met} are met."]
    for gate in gates:
        if gate.preset in known:
            lines += ["", *_part(folder, gate, known[gate.preset])]
    return "\n".join(lines)


def method_section(
    folder: Path, algo: str, records: Mapping[str, Record], gates: Sequence[Gate] = GATES
) -> str:
    """Return what the page of a method shows of its gates: a table, and the curve of each.

    Args:
        folder: Where the plots are, as the page links to them.
        algo: The method.
        records: What was measured, by the names of the gates.
        gates: All gates.
    """
    own = [gate for gate in gates if gate.algo == algo]
    if not own:
        return "No gate is declared for this method yet."
    known = {gate.preset: records[gate.preset] for gate in _measured(own, records)}
    lines = [f"| {' | '.join(COLUMNS[1:])} |", f"|{' --- |' * len(COLUMNS[1:])}"]
    for gate in own:
        cells = _row(gate, known.get(gate.preset), None)
        lines.append(f"| {' | '.join(cells[1:])} |")
    for gate in own:
        if gate.preset in known:
            anchor = re.sub(r"[^\w-]", "", gate.preset)
            lines += ["", f"![{_alt(known[gate.preset])}]({(folder / gate.slug).as_posix()}.svg)"]
            lines += ["", f"`{gate.preset}`: [commands and machine](../{PAGE}#{anchor})."]
    return "\n".join(lines)


def _measured(gates: Sequence[Gate], records: Mapping[str, Record]) -> list[Gate]:
    return [g for g in gates if g.preset in records and records[g.preset].is_of(g)]


def _row(gate: Gate, record: Record | None, earlier: Earlier | None) -> list[str]:
    title = get_algorithm_spec(gate.algo).title
    cells = [f"[{title}](algorithms/{gate.algo}.md)", f"`{gate.preset}`"]
    steps = gate.steps if record is None else record.steps
    cells += [f"{steps:,}", _ranges(gate.chosen_on), _ranges(gate.seeds)]
    iqm_bar, bar = f"{gate.iqm_bar:g}", f"{gate.bar:g}"
    if record is None:
        what = "not measured yet on ten seeds" + ("" if earlier is None else _three(earlier))
        return [*cells, what, iqm_bar, "", bar, "", "", ""]
    return [
        *cells,
        _interval(record),
        iqm_bar,
        format_number(record.final.min),
        bar,
        "yes" if record.met else "**no**",
        record.machine.device,
        duration(record.seconds),
    ]


def _three(earlier: Earlier) -> str:
    returns = ", ".join(format_number(value) for value in earlier.returns)
    return f" (before: seeds {_ranges(earlier.seeds)}, 20 episodes each: {returns})"


def _ranges(seeds: Sequence[int]) -> str:
    """Write seeds as people do: `0 to 2, 10, 40 to 51`."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)


def _interval(record: Record) -> str:
    final = record.final
    middle, low, high = map(format_number, (final.iqm, final.iqm_low, final.iqm_high))
    return f"{middle} [{low}, {high}]"


def _part(folder: Path, gate: Gate, record: Record) -> list[str]:
    data = ""
    if gate.data is not None:
        data = f" Learned from `{gate.data}` (SHA-256 {record.data_digest}...)."
    seeds = _ranges([seed.seed for seed in record.seeds])
    returns = ", ".join(format_number(seed.mean) for seed in record.seeds)
    return [
        f"### `{gate.preset}`",
        "",
        f"![{_alt(record)}]({(folder / gate.slug).as_posix()}.svg)",
        "",
        f"{record.trained['env_id']}; a random policy gets {format_number(record.random)}.{data} "
        f"Seeds {seeds}, {record.episodes} episodes each: {returns}. {_machine(record)}",
        "",
        "```bash",
        *(_wrapped(command) for command in record.commands),
        "```",
    ]


def _machine(record: Record) -> str:
    machine = record.machine
    where = f"{machine.processor}, {machine.cores} cores" + (
        "" if machine.device == "cpu" else f", {machine.device}"
    )
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
    text = (
        f"{len(record.seeds)} seeds side by side in {duration(record.seconds)} on {where}; "
        f"{threads}, torch {machine.torch}, Python {machine.python}, rl-training "
        f"{machine.rl_training}, {machine.date[:10]}."
    )
    if machine.others > BUSY * machine.cores:
        text += f" Other processes kept {machine.others:.1f} cores busy, so the time is rough."
    return text


def _wrapped(command: str) -> str:
    """Break a long command before its options."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def rendered(page: Path, folder: Path, gates: Sequence[Gate] = GATES) -> str:
    """Return the text that a page should have.

    Raises:
        DataError: When the page has no place for the gates, or a record cannot be read.
    """
    text = page.read_text(encoding="utf-8")
    if not _PART.search(text):
        raise DataError(
            f"{page} has no place for the gates; write <!-- generated: evidence --> and, below, "
            "<!-- end generated --> where they belong"
        )
    place = Path(os.path.relpath(folder, page.parent))
    part = section(place, read_records(folder, gates), gates, read_earlier(folder, gates))
    return _PART.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def rendered_method(page: Path, folder: Path, gates: Sequence[Gate] = GATES) -> str:
    """Return the text that the page of a method should have.

    Raises:
        DataError: When a record cannot be read.
    """
    place = Path(os.path.relpath(folder, page.parent))
    part = method_section(place, page.stem, read_records(folder, gates), gates)
    text = page.read_text(encoding="utf-8")
    return _METHOD_PART.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def packaged_text(folder: Path, gates: Sequence[Gate] = GATES) -> str:
    """Return the figures that come with the package, as YAML.

    Gates that were not measured on ten seeds have those of three.
    """
    records, earlier = read_records(folder, gates), read_earlier(folder, gates)
    known = {gate.preset: records[gate.preset] for gate in _measured(gates, records)}
    figures = {}
    for preset in sorted({*known, *earlier}):
        found = known.get(preset) or earlier[preset]
        figures[preset] = {
            "value": found.iqm,
            "seconds": found.seconds,
            "seeds": len(found.seeds),
            "steps": found.steps,
            "real_data": found.data_digest is not None,
        }
    head = "# Generated from docs/evidence by `python -m bench.evidence --render`.\n"
    return head + yaml.safe_dump(figures, sort_keys=False)


def render(folder: Path, gates: Sequence[Gate] = GATES) -> Path | None:
    """Write the plots, and the parts of the pages beside the folder; returns the page of results.

    In the repository the packaged figures are written too.

    Raises:
        DataError: As `rendered`, or when a file cannot be written.
    """
    page = folder.parent / PAGE
    try:
        records = read_records(folder, gates)
        for gate in _measured(gates, records):
            path = folder / f"{gate.slug}.svg"
            path.write_text(plot(records[gate.preset]), encoding="utf-8")
        if not page.is_file():
            return None
        page.write_text(rendered(page, folder, gates), encoding="utf-8")
        for method in sorted((folder.parent / "algorithms").glob("*.md")):
            method.write_text(rendered_method(method, folder, gates), encoding="utf-8")
        packaged = folder.parent.parent / PACKAGED
        if packaged.is_file():
            packaged.write_text(packaged_text(folder, gates), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{error.filename} cannot be written ({error.strerror})") from None
    return page
