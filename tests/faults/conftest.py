"""The table of the fault tests, printed at the end of the session."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from helpers.faults import PROPERTY
from helpers.faults import tried as tried
from helpers.fork_server import ForkServer, fork_server


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """One process that forks the runs of a session."""
    with fork_server() as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print test, algorithm, count tried, failures."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and report.when == "call":
                    test, algo, count, failures = value
                    rows[test, algo][0] += count
                    rows[test, algo][1] += failures
    if not rows or "RL_FAULTS_KILLS" not in os.environ:
        return  # the ordinary suite has enough to say
    terminalreporter.write_line("")
    terminalreporter.write_line("| test | algorithm | tried | failures |")
    terminalreporter.write_line("| --- | --- | ---: | ---: |")
    for (test, algo), (count, failures) in sorted(rows.items()):
        terminalreporter.write_line(f"| {test} | {algo} | {count} | {failures} |")
    for test in dict.fromkeys(test for test, _ in sorted(rows)):
        counts = [row for (name, _), row in rows.items() if name == test]
        total, failed = (sum(row[i] for row in counts) for i in (0, 1))
        terminalreporter.write_line(f"| {test} | **all** | {total} | {failed} |")
