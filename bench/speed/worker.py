"""One side of one row in its own process: `python -m bench.speed.worker MODULE WORK SETTINGS`."""

from __future__ import annotations

import importlib
import json
import os
import sys

from bench.speed.pace import Pace, WorkSettings


def main() -> None:
    """Do the work that the arguments name, at the pace that standard input asks for."""
    module, work, settings = sys.argv[1:4]
    # Libraries print to standard output; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pace = Pace(WorkSettings(**json.loads(settings)), sys.stdin, answers)
    try:
        import torch

        torch.set_num_threads(pace.settings.threads)
        getattr(importlib.import_module(module), work)(pace)
    except ModuleNotFoundError as error:
        pace.fail(f"{error.name} is not installed")
    except Exception as error:
        pace.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        raise


if __name__ == "__main__":
    main()
