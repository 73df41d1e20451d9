"""State that is found, not listed.

`Stateful` walks an object's attributes and collects every tensor and everything that has a
`state_dict`.  What is found is what a checkpoint holds, so nobody can forget a multiplier or a
counter.  Lists, tuples and mappings are not walked: one that holds tensors which no part holds is
an error (`require_found`), unless it is marked as `transient`.
Convention: tensors with at least one axis carry the seed axis first; 0-d tensors and numbers are
shared by all seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rl_training.errors import CheckpointError, UnsavedStateError

StateDict = dict[str, Any]
T = TypeVar("T")


class transient(Generic[T]):  # noqa: N801 - read as a word: `self.box = transient((low, high))`
    """A value that no checkpoint holds, because it follows from the settings or the task."""

    def __init__(self, value: T) -> None:
        self.value = value


class Counter:
    """A whole number that belongs to the checkpoint."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> StateDict:
        """Return the count."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self.value = int(state["value"])


class Scalar:
    """A number that changes during a run: a scheduled learning rate, a row count.

    It is set again after a resume, not saved, and is a 0-d tensor, so that compiled updates read
    its current value.
    """

    def __init__(
        self, value: float, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.value = value
        self.tensor = torch.full((), value, dtype=dtype, device=device)
        self._host = self.tensor.numpy() if self.tensor.device.type == "cpu" else None

    def moved(self, value: float) -> None:
        """Note that work on the device has changed the tensor to `value` already."""
        self.value = value

    def set(self, value: float) -> None:
        """Change the number; costs nothing when it stays the same."""
        if value == self.value:
            return
        self.value = value
        if self._host is not None:
            self._host[...] = value
        else:
            self.tensor.fill_(value)


class PerSeed:
    """A setting that differs between the members of a group, `[S]`; it is not saved."""

    def __init__(self, values: Sequence[float], device: torch.device | str) -> None:
        self.values = tuple(values)
        self.tensor = torch.tensor(self.values, dtype=torch.float32, device=device)


class Stateful:
    """Base of objects whose state is discovered by walking their attributes."""

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) or hasattr(value, "state_dict"):
                yield name, value

    def state_dict(self) -> StateDict:
        """Return the state of every part, by attribute name."""
        return {name: _state_of(value) for name, value in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every part in place; a missing or extra part is an error."""
        parts = dict(self._parts())
        owner = type(self).__name__
        require_same_keys(parts, state, owner)
        for name, value in parts.items():
            _load_into(value, state[name], f"{owner}.{name}")


def require_found(owner: Stateful) -> None:
    """Refuse containers of tensors that a checkpoint would silently leave out.

    Tensors that a part holds too, such as the parameters of a network, may be in a list as well.

    Raises:
        UnsavedStateError: Naming the attribute, and what to do.
    """
    known = {id(tensor) for _, part in owner._parts() for tensor in _tensors_in(part)}
    for name, value in vars(owner).items():
        if not isinstance(value, list | tuple | dict | set):
            continue
        if any(id(tensor) not in known for tensor in _tensors_in(value)):
            raise UnsavedStateError(
                f"{type(owner).__name__}.{name} is a {type(value).__name__} that holds tensors, "
                "and no checkpoint would hold them; make each an attribute, or wrap it in "
                "rl_training.state.transient if it need not be saved"
            )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    elif hasattr(value, "state_dict"):
        items = vars(value).values()
    return [tensor for item in items for tensor in _tensors_in(item)]


def leaves_in(tree: Any) -> dict[tuple[str, ...], Any]:
    """Return what nested dicts hold, by the keys that lead there; a list is a leaf."""
    if not isinstance(tree, dict):
        return {(): tree}
    inner = ((key, leaves_in(value)) for key, value in tree.items())
    return {(key, *path): leaf for key, leaves in inner for path, leaf in leaves.items()}


def tensors_in(tree: Any) -> dict[tuple[str, ...], Tensor]:
    """Return the tensors of a state, by the keys that lead there."""
    return {path: leaf for path, leaf in leaves_in(tree).items() if isinstance(leaf, Tensor)}


def require_same_keys(have: Mapping[str, Any], saved: Mapping[str, Any], owner: str) -> None:
    """Fail loudly when a saved state lacks a part or has one too many."""
    missing, extra = sorted(have.keys() - saved.keys()), sorted(saved.keys() - have.keys())
    if missing or extra:
        raise CheckpointError(
            f"the saved state of {owner} does not fit: missing {missing or 'nothing'}, "
            f"unexpected {extra or 'nothing'}; it was written by another version or algorithm."
        )


def _state_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, nn.Module):
        return {name: tensor.detach() for name, tensor in value.state_dict().items()}
    return value.state_dict()


def _load_into(value: Any, saved: Any, name: str) -> None:
    if isinstance(value, Tensor):
        copy_tensor(value, saved, name)
    elif isinstance(value, nn.Module):
        have = value.state_dict()
        require_same_keys(have, saved, name)
        for key, tensor in have.items():
            copy_tensor(tensor, saved[key], f"{name}.{key}")
    else:
        value.load_state_dict(saved)


def copy_tensor(target: Tensor, saved: Tensor, name: str) -> None:
    """Copy `saved` into `target` in place, so that captured graphs and views stay valid."""
    if target.shape != saved.shape or target.dtype != saved.dtype:
        raise CheckpointError(
            f"{name} is {tuple(saved.shape)} {saved.dtype} in the checkpoint but "
            f"{tuple(target.shape)} {target.dtype} here; the configuration differs."
        )
    with torch.no_grad():
        target.copy_(saved)
