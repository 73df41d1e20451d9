"""Services that get a run's metrics beside its own log: Weights & Biases, MLflow.

One small interface; each service is imported when it is asked for.  A service that fails during a
run is left out from then on, with a warning: it must not cost the run.  A run that is resumed
hands its log to the service again, and what the service has already is left out: it ends with every
line once, whatever was lost on its side or sent after the checkpoint.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_training.errors import MissingExtraError, RLTrainingError
from rl_training.experiment.checkpoint.files import is_plain
from rl_training.experiment.config import TrainConfig, flat_settings

logger = logging.getLogger(__name__)
PROJECT = "rl-training"
LONGEST_VALUE = 500
"""Characters of a parameter that MLflow keeps."""
MOST_PARAMETERS = 100
"""Parameters that MLflow takes in one request."""
MLFLOW_FILE = "mlflow_run.txt"
WANDB_FILE = "wandb_run.txt"


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


class Service(Tracker, Protocol):
    """A tracker that outlives the process, so that a resumed run finds what it had sent."""

    def has(self, name: str, step: int) -> bool:
        """Tell whether an earlier process of the run has sent this."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a service is told about a run."""

    folder: Path
    config: Mapping[str, Any]
    """Every setting, nested."""

    @property
    def group(self) -> str | None:
        """Name of the group it is a member of."""
        return self.folder.parent.name if self.folder.name.startswith("seed_") else None

    @property
    def name(self) -> str:
        """The folder's name, with that of its group before it."""
        return self.folder.name if self.group is None else f"{self.group}-{self.folder.name}"

    @property
    def tags(self) -> list[str]:
        """Words to find the run again."""
        return list(self.config.get("tags", ()))


def trackers_for(
    config: TrainConfig, folders: Sequence[Path], *, is_new: bool
) -> list[list[Tracker]]:
    """Open the services of each member of a group, or of a run by itself.

    Raises:
        RLTrainingError: When a new run's service cannot be opened; those opened before it are
            closed.  A run that is resumed continues without: its log is replayed the next time.
    """
    everyone: list[list[Tracker]] = []
    with ExitStack() as undo:
        for member, folder in zip(config.members, folders, strict=True):
            run = TrackedRun(folder=folder, config=config.for_member(member).resolved())
            opened = open_trackers(config.trackers, run, is_new=is_new)
            for tracker in opened:
                undo.callback(tracker.close)
            everyone.append(opened)
        undo.pop_all()
    return everyone


def require_tracker(name: str) -> None:
    """Refuse a service whose package is missing, before anything is written.

    Raises:
        MissingExtraError: Naming the extra.
    """
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise MissingExtraError(
            f'trackers names {name}, which is not installed; pip install "rl-training[{name}]"'
        )


def open_trackers(names: Sequence[str], run: TrackedRun, *, is_new: bool = True) -> list[Tracker]:
    """Open the services of these names for a run.

    Raises:
        RLTrainingError: When a service cannot be opened: nobody has logged in, no server answers.
    """
    makers: dict[str, Callable[[TrackedRun], Service]] = {
        "wandb": WandbTracker,
        "mlflow": MlflowTracker,
    }
    opened: list[Tracker] = []
    with ExitStack() as undo:
        for name in names:
            try:
                opened.append(Guarded(name, makers[name](run)))
                undo.callback(opened[-1].close)
            except Exception as error:  # noqa: PERF203 - services raise whatever they like
                if is_new:
                    raise RLTrainingError(
                        f"trackers: {name} cannot be used here ({_one_line(error)}); log in or "
                        "start its server, or leave it out by --set trackers=[]"
                    ) from None
                logger.warning(
                    "%s cannot be used here (%s); the run continues without it",
                    name,
                    _one_line(error),
                )
        undo.pop_all()
    return opened


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST_VALUE, placeholder=" ...")


class WandbTracker:
    """A run of Weights & Biases; resumed, it is the same one.

    Project, entity and mode come from its own variables (`WANDB_PROJECT`, `WANDB_MODE`, ...).
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        kept = run.folder / WANDB_FILE
        if not is_plain(kept):
            kept.unlink(missing_ok=True)  # the target of a link is not an id to be sent out
            # Not made of the path: a run there before would be found, and its steps passed over.
            kept.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            tags=run.tags,
            id=kept.read_text(encoding="utf-8").strip(),
            dir=str(run.folder.resolve()),
            config=dict(run.config),
            resume="allow",
            reinit="create_new",  # seeds of a group are runs side by side
        )
        self._begins = self._run.step  # after the last one the service has; 0 when offline

    def has(self, name: str, step: int) -> bool:  # noqa: ARG002 - a line there is whole
        """Tell whether the service would pass over this step; offline files are whole each."""
        return bool(step < self._begins)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send them."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow; its id is kept in the run's folder, so that a resumed run continues in it.

    The server comes from `MLFLOW_TRACKING_URI`, the experiment from `MLFLOW_EXPERIMENT_NAME`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._param, self._client = Metric, Param, mlflow.MlflowClient()
        self._last: dict[str, int] = {}
        kept = run.folder / MLFLOW_FILE
        with _short_patience():
            if is_plain(kept):
                self._id = kept.read_text(encoding="utf-8").strip()
                self._take_up()
            else:
                self._id = self._create(run)
                kept.unlink(missing_ok=True)
                kept.write_text(self._id, encoding="utf-8")

    def _take_up(self) -> None:
        self._client.update_run(self._id, status="RUNNING")
        for name in self._client.get_run(self._id).data.metrics:
            history = self._client.get_metric_history(self._id, name)
            self._last[name] = max(metric.step for metric in history)

    def _create(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"group": run.group, "tags": ", ".join(run.tags)}
        made = self._client.create_run(
            place, run_name=run.name, tags={key: value for key, value in tags.items() if value}
        )
        run_id = str(made.info.run_id)
        parameters = [
            self._param(k, str(v)[:LONGEST_VALUE]) for k, v in flat_settings(run.config).items()
        ]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + MOST_PARAMETERS])
        return run_id

    def has(self, name: str, step: int) -> bool:
        """Tell whether the service has this number, or a later one."""
        return step <= self._last.get(name, -1)

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


@contextmanager
def _short_patience() -> Iterator[None]:
    """Let MLflow ask a silent server for some 15 seconds, not four minutes, before a run begins."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    if name in os.environ:
        yield
        return
    os.environ[name] = "3"
    try:
        yield
    finally:
        del os.environ[name]


class Guarded:
    """Keeps a service's failures from the run, and from the service what it has already."""

    def __init__(self, name: str, tracker: Service) -> None:
        self._name, self._tracker = name, tracker
        self._broken = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand on what is finite and new, unless the service has failed before."""
        new = {
            name: value
            for name, value in values.items()
            if math.isfinite(value) and not self._tracker.has(name, step)
        }
        if new:
            self._try(lambda: self._tracker.log(new, step))

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
                "%s failed (%s); the run continues without it, its own log is whole",
                self._name,
                _one_line(error),
            )
