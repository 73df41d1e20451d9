"""Where metrics go besides the run's own log: TensorBoard, Weights & Biases, MLflow.

One small interface; each service is imported when it is asked for.  A service that fails during a
run is left out from then on, with a warning: it must not cost the run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_training.errors import MissingExtraError, RLTrainingError
from rl_training.experiment.config import TrainConfig, flat_settings

logger = logging.getLogger(__name__)
PROJECT = "rl-training"
LONGEST_VALUE = 500
"""Characters of a parameter that MLflow keeps."""
MLFLOW_FILE = "mlflow_run.txt"


class Tracker(Protocol):
    """Takes the metrics of one run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take finite numbers of a step; names are `kind/name`."""
        ...

    def flush(self) -> None:
        """Hand on what is held back."""
        ...

    def close(self) -> None:
        """End."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a service is told about a run."""

    folder: Path
    config: Mapping[str, Any]
    """Every setting, nested."""
    step: int
    """Where the run begins or goes on."""

    @property
    def name(self) -> str:
        """The folder's name, with that of its group before it."""
        in_group = self.folder.name.startswith("seed_")
        return "-".join(self.folder.parts[-2:]) if in_group else self.folder.name


def trackers_for(config: TrainConfig, index: int, folder: Path, step: int) -> list[Tracker]:
    """Open the services of a group's member, or of a run by itself."""
    if not config.trackers:
        return []
    own = config.for_member(config.members[index])
    return open_trackers(
        config.trackers, TrackedRun(folder=folder, config=own.resolved(), step=step)
    )


def require_trackers(names: Sequence[str]) -> None:
    """Refuse services whose package is missing, before anything is written.

    Raises:
        MissingExtraError: Naming the extra.
    """
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise MissingExtraError(
                f'trackers names {name}, which is not installed; pip install "rl-training[{name}]"'
            )


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Open the services of these names for a run.

    Raises:
        RLTrainingError: When a service cannot be opened: nobody has logged in, no server answers.
    """
    makers: dict[str, Callable[[TrackedRun], Tracker]] = {
        "wandb": WandbTracker,
        "mlflow": MlflowTracker,
    }
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(Guarded(name, makers[name](run)))
        except Exception as error:  # noqa: PERF203 - services raise whatever they like
            raise RLTrainingError(
                f"trackers: {name} cannot be used here ({type(error).__name__}: {error}); log in "
                "or start its server, or leave it out by --set trackers=[]"
            ) from None
    return opened


def tensorboard_tracker(folder: Path, step: int) -> Tracker | None:
    """Return a writer of TensorBoard files, or None where that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None  # the extra is not installed; `doctor` says so
    return TensorBoardTracker(SummaryWriter(str(folder), purge_step=step + 1 if step else None))


class TensorBoardTracker:
    """Event files in the run's folder; a resumed run drops what came after its checkpoint."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Force them to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; taken up again, it is the same one.

    Project, entity and mode come from its own variables (`WANDB_PROJECT`, `WANDB_MODE`, ...).
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        place = str(run.folder.resolve())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=hashlib.sha256(place.encode()).hexdigest()[:16],
            dir=place,
            config=dict(run.config),
            resume="allow",
            reinit="create_new",  # seeds of a group are runs side by side
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send them; steps that a resumed run repeats are dropped by the service."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow; its id is kept in the run's folder, so that a resumed run goes on in it.

    The server comes from `MLFLOW_TRACKING_URI`, the experiment from `MLFLOW_EXPERIMENT_NAME`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, mlflow.MlflowClient()
        kept = run.folder / MLFLOW_FILE
        if kept.is_file():
            self._id = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(place, run_name=run.name).info.run_id)
        kept.write_text(self._id, encoding="utf-8")
        parameters = [
            Param(k, str(v)[:LONGEST_VALUE]) for k, v in flat_settings(run.config).items()
        ]
        self._client.log_batch(self._id, params=parameters)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send them in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class Guarded:
    """Keeps a service's failures from the run."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._broken = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand on what is finite, unless the service has failed before."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._try(lambda: self._tracker.log(finite, step))

    def flush(self) -> None:
        """Hand on what is held back."""
        self._try(self._tracker.flush)

    def close(self) -> None:
        """End."""
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # services raise whatever their networks raise
            self._broken = True
            logger.warning(
                "%s failed (%s: %s); the run goes on without it, its own log is whole",
                self._name,
                type(error).__name__,
                error,
            )
