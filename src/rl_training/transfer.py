"""Moves numbers between the host and an accelerator without making either wait for the other.

Host memory that a transfer reads or writes is pinned and transfers are asynchronous.  What happens
in every step of a loop is captured once as a CUDA graph, so that a step costs one launch.  On a CPU
nothing has to move, and the same code runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.errors import ConfigError

_ALIGNMENT = 64


def pinned_like(tensor: Tensor) -> Tensor:
    """Return host memory for a tensor; pinned where that one is on an accelerator."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


class Staging:
    """Named arrays of the host that reach a device in one transfer.

    What `writable` returns is written to, `send` copies all of it, and `device` holds the copies.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[Sequence[int], torch.dtype]],
        device: torch.device,
    ) -> None:
        """Allocate both sides.

        Args:
            fields: Shape and type of each array.
            device: Where they go.
        """
        spans: dict[str, slice] = {}
        end = 0
        for name, (shape, dtype) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            spans[name] = slice(end, end + size)
            end += size + -size % _ALIGNMENT
        self._target = torch.zeros(end, dtype=torch.uint8, device=device)
        self._source = pinned_like(self._target)

        def view(memory: Tensor, name: str) -> Tensor:
            shape, dtype = fields[name]
            return memory[spans[name]].view(dtype).view(*shape)

        self._host: dict[str, NDArray[Any]] = {
            name: view(self._source, name).numpy() for name in fields
        }
        self.device = {name: view(self._target, name) for name in fields}
        self._sent = _event() if device.type == "cuda" else None

    def writable(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the host, when the transfer before has read them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host

    def send(self) -> None:
        """Begin to copy everything to the device; may be captured."""
        self._target.copy_(self._source, non_blocking=True)

    def mark_sent(self) -> torch.cuda.Event | None:
        """Let `writable` wait for all work that was begun so far; returns what it waits for."""
        if self._sent is not None:
            self._sent.record()
        return self._sent


def _event(*, in_graph: bool = False) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(external=in_graph)  # type: ignore[no-untyped-call]
    return event


class Arrival:
    """Tells when a point inside a captured graph has been reached; on a CPU it always has been."""

    def __init__(self, device: torch.device) -> None:
        self.event = _event(in_graph=True) if device.type == "cuda" else None

    def mark(self) -> None:
        """Mark this point of the graph."""
        if self.event is not None:
            self.event.record()


class Captured:
    """A function of tensors that keep their places, as one CUDA graph; on a CPU the function."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._captures = function, device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Do what the function does; it is run by Python only once, to be captured."""
        if not self._captures:
            self._function()
            return
        if self._graph is None:
            self._graph = capture(self._function)
        self._graph.replay()


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what a function does on the device; nothing is done until the graph is replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        function()
    return graph


class HostCopy:
    """A tensor on its way to the host, where it has arrived when an event says so."""

    def __init__(self, host: Tensor, arrived: torch.cuda.Event | None = None) -> None:
        self._host, self._arrived = host.numpy(), arrived

    @classmethod
    def of(cls, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host."""
        if tensor.device.type == "cpu":
            return cls(tensor)
        host = pinned_like(tensor)
        host.copy_(tensor, non_blocking=True)
        arrived = _event()
        arrived.record()
        return cls(host, arrived)

    def array(self) -> NDArray[Any]:
        """Wait for it; the array belongs to the caller."""
        if self._arrived is None:
            return self._host
        self._arrived.synchronize()
        return self._host.copy()


def choose_device(name: str) -> torch.device:
    """Return the device meant by a name.

    Raises:
        ConfigError: For a name that is none, or a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:<n>, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices; "
            "use auto or cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:<n>, got {name!r}")
    return device


def device_name(name: str) -> str:
    """Return what people call the device meant by a name: `cpu`, or the accelerator's own name."""
    device = choose_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
