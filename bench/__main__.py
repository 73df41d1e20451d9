"""`python -m bench`: ours and the peer's figure, interleaved chunk by chunk, and their ratio.

`--peer-python` names an interpreter that has Stable-Baselines3 (`pip install stable-baselines3` in
an environment of its own); without it the peer is looked for in this one and skipped when absent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench.sizes import UNIT


class Side:
    """A worker process that times one chunk when asked to."""

    def __init__(self, python: str, side: str, row: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "bench.worker", side, row, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.figures: list[float] = []

    def ready(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() == "ready"

    def time_chunk(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.figures.append(float(self.process.stdout.readline()))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(row: str, peer_python: str, threads: int, repeats: int) -> dict[str, object]:
    ours = Side(sys.executable, "ours", row, threads)
    if not ours.ready():
        raise SystemExit(f"our side of {row} failed")
    peer = Side(peer_python, "sb3", row, threads)
    have_peer = peer.ready()
    for _ in range(repeats):
        ours.time_chunk()
        if have_peer:
            peer.time_chunk()
    ours.stop()
    peer.stop()
    mine = statistics.median(ours.figures)
    theirs = statistics.median(peer.figures) if have_peer else None
    return {
        "row": row,
        "unit": UNIT[row],
        "threads": threads,
        "ours": mine,
        "stable_baselines3": theirs,
        "ratio": mine / theirs if theirs else None,
        "all_ours": ours.figures,
        "all_peer": peer.figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=list(UNIT), help=", ".join(UNIT))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = []
    print(f"{'row':6} {'unit':18} {'ours':>10} {'SB3':>10} {'ratio':>7}")
    for row in options.rows:
        result = measure(row, options.peer_python, options.threads, options.repeats)
        results.append(result)
        theirs, ratio = result["stable_baselines3"], result["ratio"]
        peer = f"{theirs:>10,.0f} {ratio:>6.2f}x" if theirs else "not installed"
        print(f"{row:6} {result['unit']:18} {result['ours']:>10,.0f} {peer}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
