"""How large a learner is, known before any of it is allocated.

Settings may come from a stranger's checkpoint, or be a slip of the keyboard: either way the machine
must not be the one to find out.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, ConfigError, SpecMismatch
from rl_training.experiment.checkpoint.tensors import MAX_TENSORS
from rl_training.runtime.checkpoints.saver import usable
from rl_training.runtime.replay import require_free
from rl_training.state import tensors_in


def require_same_shapes(
    spec: AlgorithmSpec, env: EnvSpec, config: AlgoConfig, state: Any, where: str
) -> None:
    """Refuse a learner's state of one seed that the settings beside it do not describe.

    Raises:
        CheckpointError: Naming a tensor whose shape differs.
    """
    # What building draws ends up in the state, as one tensor or as a few that are combined.
    most = 2 * len(tensors_in(state)) + 64
    try:
        outline = spec.outline(env, config, most)
    except (ConfigError, SpecMismatch) as error:
        raise CheckpointError(
            f"{where}: its settings do not describe what it holds ({error}); it was not written by "
            "this package, so use another checkpoint."
        ) from None
    with usable("learner", where):
        outline.load_state_dict(state)


def require_learner_fits(
    spec: AlgorithmSpec, env: EnvSpec, config: AlgoConfig, num_seeds: int, device: torch.device
) -> None:
    """Refuse settings whose learner cannot fit into memory.

    Raises:
        ConfigError: With the sizes.
    """
    state = spec.outline(env, config, MAX_TENSORS).state_dict()
    needed = num_seeds * sum(tensor.nbytes for tensor in tensors_in(state).values())
    what = f"the learner of {spec.name} with {num_seeds} member{'s' if num_seeds > 1 else ''}"
    require_free(needed, what, device, "use smaller networks or fewer members")
