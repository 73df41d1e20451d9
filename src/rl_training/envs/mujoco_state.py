"""The state of a MuJoCo simulation, such that the continuation is bit-identical.

The integration state (positions, velocities, warm start, time, controls) determines the next
`mj_step`, but rewards and observations also read derived fields before that step recomputes them:
a body's position at the start of a step, for instance. After `mj_step` those fields belong to the
start of the last substep, so `mj_forward` at the restored state would give other bits. They are
therefore kept as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_training.envs.plain import State

_DERIVED = (
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "xanchor",
    "xaxis",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
    "subtree_com",
    "subtree_linvel",
    "subtree_angmom",
    "cinert",
    "cvel",
    "cdof",
    "cacc",
    "cfrc_int",
    "cfrc_ext",
    "qacc",
    "qfrc_bias",
    "qfrc_passive",
    "qfrc_actuator",
    "qfrc_smooth",
    "qacc_smooth",
    "qfrc_constraint",
    "qfrc_inverse",
    "actuator_force",
    "actuator_length",
    "actuator_velocity",
    "ten_length",
    "ten_velocity",
    "sensordata",
    "energy",
)


def mujoco_state(base: Any) -> State:
    """Integration state and derived fields of an environment with `model` and `data`."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(base.model, kind), dtype=np.float64)
    mujoco.mj_getState(base.model, base.data, integration, kind)
    derived = {name: np.array(getattr(base.data, name)) for name in _DERIVED}
    return {"integration": integration, "derived": derived}


def set_mujoco_state(base: Any, state: State) -> None:
    """Put back what `mujoco_state` gave."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.ascontiguousarray(state["integration"], dtype=np.float64)
    mujoco.mj_setState(base.model, base.data, integration, kind)
    # mj_forward fills the contacts, but also writes the warm start and the derived fields: both are
    # put back after it.
    mujoco.mj_forward(base.model, base.data)
    mujoco.mj_setState(base.model, base.data, integration, kind)
    for name in _DERIVED:
        getattr(base.data, name)[...] = state["derived"][name]
