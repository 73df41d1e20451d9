"""What the command line asks for, and how the benchmark says that something cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class BenchError(Exception):
    """A row cannot be measured; the others can."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a whole benchmark."""

    peers: Mapping[str, str] = field(default_factory=dict)
    """Name of a peer to the interpreter that has it."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Name of a peer that is no package to the folder with its sources."""
    threads: int = 1
    repeats: int = 5
    cold: bool = False
    """Compile everything anew, in a cache that is thrown away."""
    device: str = "cuda"
    """Device of the accelerator rows."""
    accelerate: str | None = None
    """How the accelerator rows run updates; None is `graph` on CUDA and `compile` on the CPU."""
    seeds: tuple[int, ...] | None = None
    """Numbers of seeds of the accelerator rows; None is what each row says."""
    precisions: tuple[str, ...] | None = None
    """Precisions of the accelerator rows; None is what each row says."""
    algos: tuple[str, ...] | None = None
    """Algorithms of `gpu-update`, or some of `gpu-actors`; None is what each row says."""
    seconds: float = 3.0
    """How long an accelerator row times updates, per repeat."""
    steps: int | None = None
    """Steps of whole runs, per seed; None is what each row says."""
    overrides: tuple[str, ...] = ()
    """Settings of whole runs beside those of their rows."""
    preset: str = "sac/pendulum"
    """What `gpu-seeds` trains."""
    profile: bool = False
    """Count kernels in the accelerator rows."""
