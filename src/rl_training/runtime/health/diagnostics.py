"""What is written down when a run stops because of NaN, infinity or a broken environment.

One JSON file of at most some hundred kilobytes in the run's folder: what was found, where the
numbers were, and which checkpoint is the last good one.  It is for people; nothing reads it back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rl_training._version import __version__
from rl_training.errors import (
    CheckpointError,
    NonFiniteError,
    RLTrainingError,
    full_traceback,
    last_own_frame,
)
from rl_training.experiment.checkpoint import files
from rl_training.state import tensors_in

if TYPE_CHECKING:
    from rl_training.runtime.session import Session

FOLDER = "diagnostics"
MOST_TRACEBACK = 20_000
"""Characters of a traceback; its beginning, where the first cause is, is kept."""
MAX_TENSORS = 400
"""Tensors described in a file; a learner has some dozens."""
NOT_CHECKED = frozenset({"clock", "stop_rule", "collector"})
"""Parts that may hold infinity or NaN: the best return is one until the first evaluation."""
_E = TypeVar("_E", bound=RLTrainingError)


def non_finite(states: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity and must not; one host read each.

    Args:
        states: The states of the run's parts.
    """
    checked = {name: state for name, state in states.items() if name not in NOT_CHECKED}
    return [
        ".".join(path)
        for path, tensor in tensors_in(checked).items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def require_finite_metrics(session: Session, rows: Sequence[Mapping[str, float]]) -> None:
    """Stop a run whose averages since the last log line are not finite.

    Raises:
        NonFiniteError: Naming the metrics, the member of the group, the step and the update.
    """
    firsts = session.recorder.first_bad()
    for member, row, first in zip(session.config.members, rows, firsts, strict=True):
        bad = [name for name, value in row.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"{', '.join(bad)} of {member.label} became non-finite by step {session.step}, in "
                f"update {min(first.values())} since step {session.state.start_step}; nothing was "
                "saved after the last checkpoint. Lower learning_rate or scale the rewards, then "
                f"`rl-training resume --checkpoint {session.run_dir}`"
            )


def with_diagnostics(session: Session, error: _E) -> _E:
    """Return the error with the place of a file that describes the run as it was found."""
    path = _write(session, error)
    if path is None:
        return error
    return type(error)(f"{error}; the state of the run is described in {path}")


def note_failure(session: Session, error: Exception) -> None:
    """Describe a run that the user's own callback or plug-in ended; a note on the error says where.

    The error itself stays what it is, for it is the user's to catch.
    """
    path = _write(session, error)
    if path is not None:
        notes = [*getattr(error, "__notes__", ()), f"the state of the run is described in {path}"]
        error.__notes__ = notes  # `add_note` came with Python 3.11


def _write(session: Session, error: Exception) -> Path | None:
    """Write the description; None where it cannot be, for what stopped the run matters more."""
    folder = session.state.run_dir / FOLDER
    path = folder / f"step_{session.step}.json"
    try:
        files.make_parents(folder)
        files.remove_file(path)
        files.write_file(path, [json.dumps(describe(session, error), indent=1).encode()])
    except (OSError, CheckpointError):
        return None
    return path


def describe(session: Session, error: Exception) -> dict[str, Any]:
    """Return what there is to know about a run that stopped, as JSON."""
    states = {name: session.parts[name].state_dict() for name in ("learner", "recorder")}
    tensors = list(tensors_in(states).items())[:MAX_TENSORS]
    members = [member.label for member in session.config.members]
    rates = [session.learner.schedule_values(index) for index in range(len(members))]
    return {
        "error": type(error).__name__,
        "message": str(error),
        "own_code": last_own_frame(error),
        "traceback": full_traceback(error)[:MOST_TRACEBACK],
        "rl_training": __version__,
        "step": session.step,
        "gradient_steps": session.recorder.total_gradient_steps.value,
        "last_checkpoints": [str(path) for path in session.newest_checkpoints],
        "first_bad_update": dict(zip(members, session.recorder.first_bad(), strict=True)),
        "not_finite": non_finite(states),
        "tensors": {".".join(path): _describe_tensor(tensor) for path, tensor in tensors},
        "schedules": dict(zip(members, rates, strict=True)),
        "metrics": {name: _number(value) for name, value in session.state.metrics.items()},
        "config": session.config.resolved(),
    }


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    values = tensor.detach().double().cpu().flatten()
    finite = values[values.isfinite()]
    return {
        "shape": list(tensor.shape),
        "nan": int(values.isnan().sum()),
        "infinite": int(values.isinf().sum()),
        "largest": _number(float(finite.abs().max())) if len(finite) else None,
        "rms": _number(float(torch.sqrt(finite.square().mean()))) if len(finite) else None,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
