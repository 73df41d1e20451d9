"""One side of one row in a process of its own: `python -m bench.worker ours ppo 1`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    side, row, threads = sys.argv[1:4]
    import torch

    torch.set_num_threads(int(threads))
    chunk = getattr(importlib.import_module(f"bench.{side}"), row)()
    chunk()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(chunk(), flush=True)


if __name__ == "__main__":
    main()
