"""Many MuJoCo simulations on a thread pool: the C interface behind `mujoco.batch`.

`mujoco.batch.Batch` steps the same pool, but has no way to call `mj_rnePostConstraint` after a
step, which Gymnasium does and without which contact forces (`cfrc_ext`) are not Gymnasium's. The C
interface has one: `mjb_apply`. Each simulation keeps an MjData of its own (`persistent`), so that
a simulation's contacts are still there when the forces are asked for.

Results do not depend on the number of threads. L simulations; arrays are [L, ...] and live: they
show what the simulator's memory holds.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.envs.spec import Array

_STAGE_NONE, _STAGE_ALL = 0, 3  # mjtStage: none, and all up to accelerations (mj_forward)
_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
# Result and arguments of each function of mujoco/mjbatch.h that is used here.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mjb_makeBatch": (_POINTER, [_POINTER, _INT, _POINTER, _TEXT, _INT]),
    "mjb_deleteBatch": (None, [_POINTER]),
    "mjb_nstate": (_INT, [_POINTER]),
    "mjb_state": (_POINTER, [_POINTER]),
    "mjb_stateComponent": (_POINTER, [_POINTER, _INT, _POINTER]),
    "mjb_output": (_POINTER, [_POINTER, _TEXT, _POINTER, _POINTER]),
    "mjb_step": (_INT, [_POINTER, _POINTER, _INT, _INT, _INT]),
    "mjb_forward": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "mjb_reset": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _INT]),
    "mjb_apply": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT]),
    "mjb_getData": (None, [_POINTER, _INT, _POINTER]),
    "mjb_status": (_POINTER, [_POINTER]),
    "mjb_error": (_TEXT, [_POINTER, _INT]),
}


class SimulationError(RuntimeError):
    """MuJoCo refused to continue with one of the simulations."""

    def __init__(self, lane: int, message: str) -> None:
        super().__init__(message)
        self.lane = lane


class _Config(ctypes.Structure):
    """`mjBatchConfig`."""

    _fields_ = (("nthread", ctypes.c_int), ("persistent", ctypes.c_bool))


class _Memory:
    """Memory of a batch, which stays as long as an array shows it."""

    def __init__(self, batch: _Batch, address: int, shape: tuple[int, ...]) -> None:
        self.batch = batch
        self.__array_interface__ = {
            "version": 3,
            "typestr": "<f8",
            "data": (address, False),
            "shape": shape,
        }


class _Batch:
    """Owns an `mjBatch`."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self.address = address
        weakref.finalize(self, library.mjb_deleteBatch, address)


@functools.cache
def why_unavailable() -> str | None:
    """Why the installed MuJoCo cannot run simulations in a batch; None if it can."""
    try:
        import mujoco
    except ImportError as error:
        return f'MuJoCo cannot be imported ({error}); run: pip install "rl-training[mujoco]"'
    try:
        _library()
    except (AttributeError, OSError, StopIteration):
        return (
            f"mujoco {mujoco.__version__} has no mujoco.batch, which 3.17 and newer have; "
            'run: pip install "mujoco>=3.17"'
        )
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    """MuJoCo's own library, which its bindings have loaded already."""
    import mujoco

    names = ("libmujoco*.so*", "libmujoco*.dylib", "mujoco.dll")
    folder = Path(mujoco.__file__).parent
    library = ctypes.CDLL(str(next(path for name in names for path in folder.glob(name))))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Simulations:
    """L simulations of one model.

    Args:
        model: An `mujoco.MjModel`; it is copied.
        data: An `mujoco.MjData` of the model, which shows the shapes of its fields.
        count: L.
        threads: At most so many, the caller's included.
    """

    def __init__(self, model: Any, data: Any, count: int, threads: int) -> None:
        self._library = _library()
        self._data, self._count = data, count
        self._bound: dict[str, Array] = {}
        config = _Config(min(threads, count), True)
        error = ctypes.create_string_buffer(1000)
        make = self._library.mjb_makeBatch
        address = make(model._address, count, ctypes.byref(config), error, len(error))
        if address is None:
            raise RuntimeError(f"MuJoCo cannot run {count} simulations: {error.value.decode()}")
        self._batch = _Batch(self._library, address)
        self._address: int = address
        self._rne = ctypes.cast(self._library.mj_rnePostConstraint, ctypes.c_void_p)
        shape = (count, self._library.mjb_nstate(address))
        self._state_address: int = self._library.mjb_state(address)
        self.state = self._array(self._state_address, shape)
        """Integration states [L, ...]; a row is all that decides about the future."""

    def _array(self, address: int, shape: tuple[int, ...]) -> Array:
        if 0 in shape:
            return np.zeros(shape)
        return np.asarray(_Memory(self._batch, address, shape))

    def bind(self, name: str) -> Array:
        """Show an MjData field of float64, [L, ...].

        `qpos`, `qvel` and `ctrl` are part of the state and may be written. Others are brought up to
        date by every call; after a step they belong to the start of its last substep.
        """
        if name not in self._bound:
            self._bound[name] = self._field(name, getattr(self._data, name).shape)
        return self._bound[name]

    def _field(self, name: str, shape: tuple[int, ...]) -> Array:
        import mujoco

        component = {
            "qpos": mujoco.mjtState.mjSTATE_QPOS,
            "qvel": mujoco.mjtState.mjSTATE_QVEL,
            "ctrl": mujoco.mjtState.mjSTATE_CTRL,
        }.get(name)
        if component is not None:
            first = self._library.mjb_stateComponent(self._address, int(component), None)
            at = (first - self._state_address) // self.state.itemsize
            return self.state[:, at : at + shape[0]]
        address = self._library.mjb_output(self._address, name.encode(), None, None)
        assert address is not None, name
        return self._array(address, (self._count, *shape))

    def step(self, num_substeps: int) -> None:
        """Call `mj_step` so often in each simulation."""
        self._call(self._library.mjb_step, None, num_substeps, _STAGE_NONE)

    def contact_forces(self) -> None:
        """Call `mj_rnePostConstraint`, which sets `cfrc_ext`, as Gymnasium does after a step."""
        self._call(self._library.mjb_apply, None, self._rne, None, 0)
        # `mjb_apply` leaves the bound fields alone; a call that computes nothing renews them.
        self._call(self._library.mjb_forward, None, _STAGE_NONE)

    def reset(self, lanes: Array) -> None:
        """Call `mj_resetData`; lanes are int32, ascending."""
        self._call(self._library.mjb_reset, lanes, None, _STAGE_NONE)

    def forward(self, lanes: Array) -> None:
        """Call `mj_forward`; lanes are int32, ascending."""
        self._call(self._library.mjb_forward, lanes, _STAGE_ALL)

    def copy_data(self, lane: int, data: Any) -> None:
        """Copy everything of a simulation into an `mujoco.MjData` of the same model."""
        self._library.mjb_getData(self._address, lane, data._address)

    def set_data(self, lane: int, model: Any, data: Any) -> None:
        """Take the state of an `mujoco.MjData`, and its values of all bound fields."""
        import mujoco

        row = self.state[lane]
        mujoco.mj_getState(model, data, row, mujoco.mjtState.mjSTATE_INTEGRATION)
        for name, field in self._bound.items():
            field[lane] = getattr(data, name)

    def _call(self, function: Callable[..., int], lanes: Array | None, *arguments: object) -> None:
        if lanes is None:
            num_failed = function(self._address, None, self._count, *arguments)
        else:
            assert lanes.dtype == np.int32, lanes.dtype
            num_failed = function(self._address, lanes.ctypes.data, len(lanes), *arguments)
        if num_failed:
            raise self._failure()

    def _failure(self) -> SimulationError:
        address = self._library.mjb_status(self._address)
        status = (ctypes.c_int * self._count).from_address(address)
        lane = next(index for index, failed in enumerate(status) if failed)
        return SimulationError(lane, self._library.mjb_error(self._address, lane).decode())
