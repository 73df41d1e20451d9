"""What a checkpoint says about its run, checked before any of it is used.

The manifest's digest shows that a header was not damaged, not that it is honest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import LoadedCheckpoint
from rl_training.experiment.config import MAX_THREADS
from rl_training.validation import parse

_Count = Annotated[int, Field(ge=0)]


class RunHeader(BaseModel):
    """The fields that loops and workflows read; a newer version may write more."""

    model_config = ConfigDict(strict=True, extra="ignore")

    run_id: str | None = None
    config: dict[str, Any]
    env_spec: dict[str, Any]
    seed: _Count
    log_offset: _Count
    best_step: Annotated[int, Field(ge=-1)]
    resume_level: str
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    device: str
    group: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    rewards: list[float] | None = None
    notes: list[str] | None = None


def checked(loaded: LoadedCheckpoint) -> LoadedCheckpoint:
    """Return a checkpoint whose description can be relied on.

    Raises:
        CheckpointError: Naming what is missing or wrong in it.
    """
    check_header(loaded.header, loaded.path)
    return loaded


def check_header(header: object, path: Path) -> None:
    """Refuse a description that lacks something or has it of another type."""
    try:
        if not isinstance(header, Mapping):
            raise ConfigError(f"it is a {type(header).__name__}")
        parse(RunHeader, header)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} describes its run in a way that cannot be used ({error}); it was not written "
            f"by this package, so use another checkpoint."
        ) from None
