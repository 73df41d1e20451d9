"""Ray, where something asks for it: the import, and the connection."""

from __future__ import annotations

import os
from typing import Any

from rl_training.errors import MissingExtraError, RLTrainingError


def import_ray(wanted_by: str) -> Any:
    """Return the module.

    Raises:
        MissingExtraError: When it is not installed; `wanted_by` says what needs it.
    """
    # Ray would otherwise make environments of its own for a driver started by another tool.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Left alone, it hides the GPUs from tasks that ask for none, and warns that it will not.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError(f'{wanted_by} needs Ray; pip install "rl-training[ray]"') from None
    return ray


def connect(ray: Any, address: str | None = None) -> bool:
    """Connect to a cluster unless that has been done; returns whether it was done here.

    Args:
        ray: The module.
        address: Of a running cluster, or `auto`; None takes `RAY_ADDRESS`, else begins one here.

    Raises:
        RLTrainingError: When no cluster answers at the address.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RLTrainingError(
            f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}); start one "
            "with `ray start --head`, or leave the address out"
        ) from None
    return True
