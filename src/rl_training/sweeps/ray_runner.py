"""Jobs as tasks of a Ray cluster whose machines share the folder.

A task names its CPUs and GPUs; one whose machine dies is given to another by Ray and resumes from
the run's last checkpoint, because that is what doing a job twice means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_training.cluster import connect, import_ray
from rl_training.errors import ConfigError
from rl_training.sweeps.jobs import Job, Outcome, do_job
from rl_training.sweeps.runners import RayOptions


class RayRunner:
    """Submits every job at once; Ray decides when and where it runs."""

    slots = 1_000_000

    def __init__(self, options: RayOptions, retries: int = 2) -> None:
        """Connect to a cluster, or begin one here.

        Raises:
            MissingExtraError: Without Ray.
            ConfigError: For numbers out of range.
            RLTrainingError: When no cluster answers at the address.
        """
        if options.cpus <= 0 or options.gpus < 0:
            raise ConfigError(
                f"--cpus must be > 0 and --gpus >= 0, got {options.cpus} and {options.gpus}"
            )
        ray = self._ray = import_ray("--runner ray")
        self._began = connect(ray, options.address)
        # A job that was killed with its machine has cost nobody an attempt of its own.
        self._task = ray.remote(
            num_cpus=options.cpus, num_gpus=options.gpus, max_retries=max(retries, 0) + 3
        )(_do)
        self._retries = retries
        self._running: dict[Any, tuple[Job, int]] = {}

    def start(self, job: Job) -> None:
        """Submit a job."""
        self._submit(job, 0)

    def _submit(self, job: Job, tries: int) -> None:
        self._running[self._task.remote(str(job.file))] = (job, tries)

    def ended(self) -> list[tuple[Job, Outcome]]:
        """Return what has ended, and submit what was interrupted again."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(
            list(self._running), num_returns=len(self._running), timeout=0, fetch_local=False
        )
        found = []
        for reference in ready:
            job, tries = self._running.pop(reference)
            outcome = self._result(reference)
            if outcome.state == "interrupted" and tries < self._retries:
                self._submit(job, tries + 1)
            else:
                found.append((job, outcome))
        return found

    def _result(self, reference: Any) -> Outcome:
        try:
            return Outcome.model_validate_json(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            return Outcome(state="failed", message=lines[-1] if lines else type(error).__name__)

    def close(self) -> None:
        """Cancel what still runs; it resumes from its last checkpoint another time."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running = {}
        if self._began:
            self._ray.shutdown()


def _do(file: str) -> str:
    """Do a job inside a task; text comes back, so that versions of classes do not matter."""
    return do_job(Path(file)).model_dump_json()
