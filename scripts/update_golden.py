"""Write the golden traces anew, of all algorithms or of those named.

To be used when a change is meant to alter learning: the traces go into the same commit, with a line
in the changelog.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def main() -> None:
    """Write what differs and say which."""
    from helpers.golden import write
    from rl_training.experiment.registry import algorithm_names

    for algo in sys.argv[1:] or algorithm_names():
        print(f"{algo}: {'written' if write(algo) else 'as it was'}")


if __name__ == "__main__":
    main()
