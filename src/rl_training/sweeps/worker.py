"""`python -m rl_training.sweeps.worker JOB.yaml`: does one job in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from rl_training.errors import RLTrainingError
from rl_training.sweeps.jobs import do_job

EXIT_CODES = {"done": 0, "stopped": 0, "failed": 2, "interrupted": 75}
LOOK_SECONDS = 0.5


def main(path: str) -> int:
    """Do the job; a parent that dies takes it along, saved."""
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    try:
        outcome = do_job(Path(path))
    except RLTrainingError as error:  # a description that cannot be read
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODES["failed"]
    if outcome.message:
        print(f"error: {outcome.message}", file=sys.stderr)
    return EXIT_CODES[outcome.state]


def follow(parent: int) -> None:
    """End this process by SIGTERM, which lets it save, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
