"""Observations of several parts, and the single row that carries them through the package.

A task may observe a dictionary, a tuple or whole numbers.  Its `ObservationSpec` lists the parts,
called leaves, and the place of each in a row.  Environments, replay, datasets and checkpoints hold
rows; only networks, and callers that pass an observation, look at leaves.  A row is float32.
Where there are uint8 images it is bytes instead, so that pixels stay small, and each float takes
four of them.  `models/rows.py` has what is done with rows as tensors; nothing here needs PyTorch.
Shapes: W entries of a row; any leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_training.errors import DataError
from rl_training.validation import PositiveInt

Array: TypeAlias = NDArray[Any]
ObservationLike: TypeAlias = ArrayLike | Mapping[str, Any] | tuple[Any, ...]
"""An observation as a task gives it: numbers, or dictionaries and tuples of them."""
LeafKind: TypeAlias = Literal["numbers", "flags", "one_hot", "index", "image", "mask"]
NumberType = Annotated[str, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64|96|128))$")]
"""NumPy name of a type of numbers, never of objects or structures."""
MOST_LEAVES = 1_000
FLOAT_BYTES = 4
LONGEST_TEXT = 80
"""Characters of a value in a message."""


class LeafSpec(BaseModel):
    """One part of an observation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: tuple[str, ...]
    """Keys that lead to it; positions in a tuple count from 0. Empty where it is the whole
    observation."""
    kind: LeafKind
    """What a row holds of it: real numbers, zeros and ones, one-hot vectors, whole numbers that
    networks embed, an image, or the mask of allowed actions."""
    shape: tuple[PositiveInt, ...]
    """As the task gives it."""
    dtype: NumberType
    sizes: tuple[PositiveInt, ...] = ()
    """Numbers of values of discrete entries; of a mask, of the parts of an action."""
    starts: tuple[int, ...] = ()
    """Their first values."""
    channels_last: bool = False
    """Whether the task gives an image as `[height, width, channels]`; a row has channels first."""

    @model_validator(mode="after")
    def _is_consistent(self) -> LeafSpec:
        """Refuse what no task could have: a spec may come from a stranger's checkpoint."""
        entries, is_mask = math.prod(self.shape), self.kind == "mask"
        starts = len(self.sizes) if self.is_discrete else 0
        if (self.is_discrete or is_mask) != bool(self.sizes) or len(self.starts) != starts:
            raise ValueError(f"sizes {self.sizes} and starts {self.starts} of {self.kind}")
        if self.sizes and entries != (sum(self.sizes) if is_mask else len(self.sizes)):
            raise ValueError(f"sizes {self.sizes} for shape {self.shape}")
        if self.kind == "image" and len(self.shape) != 3:
            raise ValueError(f"an image of shape {self.shape}")
        return self

    @property
    def name(self) -> str:
        """The path as a text."""
        return "/".join(self.path) or "observation"

    @property
    def is_discrete(self) -> bool:
        """Whether its entries count values."""
        return self.kind in ("one_hot", "index")

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape in which networks read it."""
        if self.kind == "image":
            height, width, channels = self.shape
            return (channels, height, width) if self.channels_last else self.shape
        return (sum(self.sizes) if self.kind == "one_hot" else math.prod(self.shape),)

    @property
    def is_wide(self) -> bool:
        """Whether a row of bytes holds it as floats."""
        return self.kind == "index" or (self.kind in ("numbers", "image") and self.dtype != "uint8")

    def row(self, value: Any, lead: int) -> Array:
        """Turn values as the task has them into their part of a row, `[*leading, n]`.

        Args:
            value: The values.
            lead: Number of leading axes.

        Raises:
            ValueError: The shape is another one, or a value is out of range.
        """
        given = np.asarray(value)
        if given.dtype.kind not in "biuf":
            raise ValueError(f"{self.name} must be numbers, got {str(value)[:LONGEST_TEXT]!r}")
        if given.shape[lead:] != self.shape:
            raise ValueError(f"{self.name} has shape {given.shape[lead:]}, not {self.shape}")
        batch = given.shape[:lead]
        if self.kind == "image" and self.channels_last:
            given = np.moveaxis(given, -1, lead)
        flat = given.reshape(*batch, math.prod(self.shape))
        if self.is_discrete:
            return self._counted(flat)
        if self.kind in ("flags", "mask") and not ((flat == 0) | (flat == 1)).all():
            raise ValueError(
                f"{self.name} must be zeros and ones, got {_short(flat.ravel().tolist())}"
            )
        if self.dtype == "uint8":
            self._require_bytes(flat)
        return flat

    def _require_bytes(self, values: Array) -> None:
        """Refuse what a byte cannot hold, such as pixels that were scaled to [0, 1]."""
        if values.dtype == np.uint8:
            return
        whole = (values >= 0) & (values <= 255) & (values == np.floor(values))  # false for NaN
        if not whole.all():
            raise ValueError(
                f"{self.name} must be whole numbers from 0 to 255, got {values[~whole][0]}"
            )

    def _counted(self, values: Array) -> Array:
        """Count whole numbers from 0; one-hot where rows hold them so."""
        with np.errstate(invalid="ignore"):  # NaN and infinity become a number that is none of them
            whole = values.astype(np.int64)
        index = whole - self.starts
        if ((index < 0) | (index >= self.sizes) | (values != whole)).any():
            raise ValueError(
                f"{self.name} is {_short(values.tolist())}, but its entries have "
                f"{_short(self.sizes)} values from {_short(self.starts)}"
            )
        if self.kind == "index":
            return index
        # The columns of an entry follow those of the entries before it.
        first = np.cumsum((0, *self.sizes[:-1]))
        one_hot = np.zeros((*index.shape[:-1], sum(self.sizes)), np.uint8)
        np.put_along_axis(one_hot, index + first, 1, -1)
        return one_hot

    def fill(self, mask: Array) -> Array:
        """Let a mask `[*leading, n]` allow all values of the parts of which it allows none.

        Returns:
            Where that was so, for each part, `[*leading, parts]`.
        """
        ends = np.cumsum(self.sizes).tolist()
        missing = []
        for size, end in zip(self.sizes, ends, strict=True):
            part = mask[..., end - size : end]
            missing.append(~part.any(-1))
            part[missing[-1]] = 1
        return np.stack(missing, -1)

    def example(self, count: int, generator: np.random.Generator) -> Array:
        """Draw a batch `[count, *shape]` that the task might give."""
        shape, dtype = (count, *self.shape), np.dtype(self.dtype)
        if self.is_discrete:
            sizes, starts = (np.reshape(part, self.shape) for part in (self.sizes, self.starts))
            return np.asarray(generator.integers(0, sizes, shape) + starts, dtype)
        if self.kind in ("flags", "mask"):
            flags = generator.integers(0, 2, shape)
            if self.kind == "mask":
                self.fill(flags.reshape(count, -1))
            return flags.astype(dtype)
        if dtype == np.uint8:
            return generator.integers(0, 256, shape, dtype)
        return (2 * generator.standard_normal(shape)).astype(dtype)


class ObservationSpec(BaseModel):
    """The leaves of an observation, and where each is in a row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    leaves: Annotated[tuple[LeafSpec, ...], Field(min_length=1, max_length=MOST_LEAVES)]
    """In the order of the task's space; a mask of actions is the last."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ObservationSpec:
        """Refuse what no task could have: a spec may come from a stranger's checkpoint."""
        names = self.names()
        if len(set(names)) != len(names):
            raise ValueError(f"leaves of the same name: {names}")
        if any(leaf.kind == "mask" for leaf in self.leaves[:-1]):
            raise ValueError("the mask of actions must be the last leaf")
        return self

    @property
    def in_bytes(self) -> bool:
        """Whether the task's rows are bytes."""
        return any(leaf.kind == "image" and leaf.dtype == "uint8" for leaf in self.leaves)

    @property
    def needs_encoder(self) -> bool:
        """Whether a row is more than a vector that a layer can read as it is."""
        return any(leaf.kind in ("image", "index", "mask") for leaf in self.leaves)

    @property
    def mask_size(self) -> int:
        """Entries of the mask of actions, the last of every row; 0 without one."""
        last = self.leaves[-1]
        return math.prod(last.shape) if last.kind == "mask" else 0

    @cached_property
    def order(self) -> tuple[LeafSpec, ...]:
        """The leaves in the order of a row: first what bytes hold as floats, last the mask."""
        return tuple(sorted(self.leaves, key=lambda leaf: (leaf.kind == "mask", not leaf.is_wide)))

    @cached_property
    def _places(self) -> dict[bool, dict[str, slice]]:
        """Where each leaf is, by name, in rows of floats and in rows of bytes."""
        places: dict[bool, dict[str, slice]] = {}
        for in_bytes in (False, True):
            start, columns = 0, {}
            for leaf in self.order:
                size = math.prod(leaf.row_shape)
                if in_bytes and leaf.is_wide:
                    size *= FLOAT_BYTES
                if in_bytes and leaf.kind == "mask":
                    start += -(start + size) % FLOAT_BYTES  # padding is before the mask
                columns[leaf.name] = slice(start, start + size)
                start += size
            places[in_bytes] = columns
        return places

    def columns(self, name: str, *, in_bytes: bool = False) -> slice:
        """Return where a leaf is in a row.

        Args:
            name: Its path, joined by slashes.
            in_bytes: Whether the row is bytes.
        """
        return self._places[in_bytes][name]

    @cached_property
    def width(self) -> int:
        """W: entries of the task's rows."""
        last = max(place.stop for place in self._places[self.in_bytes].values())
        # A whole number of floats, so that the floats of every row are aligned.
        padding = -last % FLOAT_BYTES if self.in_bytes else 0
        return int(last + padding)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the task's rows."""
        return np.dtype(np.uint8 if self.in_bytes else np.float32)

    @cached_property
    def num_wide(self) -> int:
        """Floats at the beginning of a row of bytes."""
        return sum(math.prod(leaf.row_shape) for leaf in self.order if leaf.is_wide)

    def names(self) -> list[str]:
        """Return the leaves' names."""
        return [leaf.name for leaf in self.leaves]

    # Observations to rows

    def pack(self, obs: Any, lead: int = 0, *, ended: bool = False) -> Array:
        """Turn an observation as the task gives it, or a batch of them, into rows.

        Args:
            obs: Nested dictionaries and tuples down to the leaves.
            lead: Leading axes of a batch; the same for all leaves.
            ended: Whether the episode is over: a mask that allows nothing then allows everything,
                as nobody acts by it.

        Raises:
            ValueError: It does not belong to this task; the message names the leaf.
        """
        values = {leaf.name: leaf.row(_at(obs, leaf.path), lead) for leaf in self.order}
        rows = self._packed(values, lead)
        if self.mask_size:
            leaf = self.leaves[-1]
            if leaf.fill(rows[..., -self.mask_size :]).any() and not ended:
                of_each = " of each part of the action" if len(leaf.sizes) > 1 else ""
                raise ValueError(
                    f"{leaf.name} allows no action; at least one of its entries{of_each} must be 1"
                )
        return rows

    def _packed(self, values: Mapping[str, Array], lead: int) -> Array:
        batch = next(iter(values.values())).shape[:lead]
        for name, value in values.items():
            if value.shape[:lead] != batch:
                raise ValueError(f"{name} is a batch of {value.shape[:lead]}, others of {batch}")
        rows = np.zeros((*batch, self.width), self.dtype)
        floats = (
            rows[..., : self.num_wide * FLOAT_BYTES].view(np.float32) if self.in_bytes else rows
        )
        place = 0
        with np.errstate(over="ignore", invalid="ignore"):  # what becomes infinite is refused
            for leaf in self.order:
                value = values[leaf.name]
                if leaf.is_wide and self.in_bytes:
                    floats[..., place : place + value.shape[-1]] = value
                    place += value.shape[-1]
                else:
                    rows[..., self.columns(leaf.name, in_bytes=self.in_bytes)] = value
            if not np.isfinite(floats).all():
                finite = {n: np.isfinite(v.astype(np.float32)) for n, v in values.items()}
                bad = next(name for name, flags in finite.items() if not flags.all())
                worst = values[bad][~finite[bad]][0]
                raise ValueError(f"{bad} holds {worst}, which is not a finite float32")
        return rows

    def pack_given(self, obs: Any) -> tuple[Array, bool]:
        """Turn what a user handed over into rows `[B, W]`; also tells whether it was a single one.

        Args:
            obs: An observation as the task gives it, a batch of them, or rows themselves.

        Raises:
            DataError: It does not belong to this task; the message names the leaf.
        """
        try:
            if not isinstance(obs, Mapping | tuple) and self._are_rows(given := np.asarray(obs)):
                rows, lead = given.astype(self.dtype, copy=False), given.ndim - 1
            else:
                first = np.asarray(_at(obs, self.leaves[0].path))
                lead = first.ndim - len(self.leaves[0].shape)
                if lead in (0, 1):
                    rows = self.pack(obs, lead)
            if lead not in (0, 1):
                raise ValueError("it is neither one observation nor a batch of them")
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"the observation does not fit the task: {error}; its parts are {self.described()}"
            ) from None
        return (rows, False) if lead else (rows[None], True)

    def _are_rows(self, given: Array) -> bool:
        """Whether an array holds rows, and not the whole numbers of a task that observes them."""
        of_kind = given.dtype == np.uint8 if self.in_bytes else given.dtype.kind == "f"
        return bool(of_kind and given.ndim and given.shape[-1] == self.width)

    def described(self) -> str:
        """Name the leaves and their shapes."""
        return ", ".join(f"{leaf.name} {list(leaf.shape)}" for leaf in self.leaves)

    def allowed(self, rows: Any) -> Any:
        """Tell which actions are allowed in rows `[..., W]`, arrays or tensors: bool `[..., A]`."""
        return rows[..., -self.mask_size :] > 0

    @cached_property
    def num_floats(self) -> int:
        """Entries of a row in its float32 form."""
        return sum(math.prod(leaf.row_shape) for leaf in self.leaves)

    def examples(self, count: int, generator: np.random.Generator) -> dict[str, Array]:
        """Draw leaves `[count, *shape]` that the task might give: normal numbers, any pixel."""
        return {leaf.name: leaf.example(count, generator) for leaf in self.leaves}

    def example_rows(self, count: int, generator: np.random.Generator) -> Array:
        """Draw rows `[count, W]` that the task might give."""
        leaves = self.examples(count, generator)
        return self._packed({leaf.name: leaf.row(leaves[leaf.name], 1) for leaf in self.order}, 1)

    # Leaves by name, without their nesting: how exported programs take them

    def nested(self, leaves: Mapping[str, Any]) -> Any:
        """Put leaves by name into dictionaries of dictionaries, which `pack` takes."""
        if self.names() == ["observation"] and not self.leaves[0].path:
            return leaves["observation"]
        tree: dict[str, Any] = {}
        for leaf in self.leaves:
            inner = tree
            for key in leaf.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[leaf.path[-1]] = leaves[leaf.name]
        return tree


def _short(numbers: Sequence[Any]) -> str:
    """Write numbers into a sentence, not at any length."""
    text = ", ".join(map(str, numbers))
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def _at(obs: Any, path: Sequence[str]) -> Any:
    """Return the part of an observation that a path leads to."""
    for depth, key in enumerate(path):
        if isinstance(obs, Mapping):
            if key not in obs:
                raise ValueError(f"{'/'.join(path[: depth + 1])} is missing")
            obs = obs[key]
        elif isinstance(obs, tuple | list) and key.isdigit() and int(key) < len(obs):
            obs = obs[int(key)]
        else:
            where = "/".join(path[:depth]) or "it"
            raise ValueError(f"{where} must have a part {key!r}, got {type(obs).__name__}")
    return obs
