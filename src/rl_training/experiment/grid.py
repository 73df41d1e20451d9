"""The members of a group: every point of a grid of settings, with every seed.

A group of seeds alone is the grid with one point, at which nothing differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_training.algorithms.config import AlgoConfig
from rl_training.errors import ConfigError
from rl_training.validation import parse, suggest

Point = Mapping[str, float]
"""Values of the settings that vary, by name."""


@dataclass(frozen=True)
class Member:
    """One run of a group."""

    seed: int
    point: Point = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Name of its folder: `seed_3`, or `seed_3-learning_rate_0.0003-alpha_0.1`."""
        values = (f"-{name}_{number_text(value)}" for name, value in self.point.items())
        return f"seed_{self.seed}{''.join(values)}"

    @property
    def label(self) -> str:
        """What a person reads: `seed 3`, or `seed 3, learning_rate 0.0003, alpha 0.1`."""
        return ", ".join(filter(None, (f"seed {self.seed}", point_text(self.point))))


def number_text(value: float) -> str:
    """Write a number short, but never so short that it becomes another."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def point_text(point: Point) -> str:
    """Write a point as `learning_rate 0.0003, alpha 0.1`."""
    return ", ".join(f"{name} {number_text(value)}" for name, value in point.items())


def points_of(grid: Mapping[str, Sequence[float]]) -> Iterator[Point]:
    """Return every combination of the values; of no settings there is one, the empty one."""
    for values in itertools.product(*grid.values()):
        yield {name: float(value) for name, value in zip(grid, values, strict=True)}


def members_of(seeds: Sequence[int], grid: Mapping[str, Sequence[float]]) -> tuple[Member, ...]:
    """Return the members, point by point: each has all seeds."""
    return tuple(Member(seed, point) for point in points_of(grid) for seed in seeds)


def check_grid(
    model: type[AlgoConfig], settings: Mapping[str, Any], grid: Mapping[Any, Any]
) -> None:
    """Refuse a grid that cannot be trained.

    Args:
        model: The algorithm's settings class.
        settings: What the points share.
        grid: Names of settings with the values that each takes.

    Raises:
        ConfigError: Naming the setting, the value and what is allowed.
    """
    for name, values in grid.items():
        _check_name(model, name)
        _check_values(name, values)
    for point in points_of(grid):
        parse(model, {**settings, **point}, "grid.")


def _check_name(model: type[AlgoConfig], name: object) -> None:
    allowed = model.may_vary()
    if name in allowed:
        return
    if name in model.model_fields:
        raise ConfigError(
            f"grid.{name} cannot differ between members of a group; these can: "
            f"{', '.join(allowed)}. Train one group for each value of {name}"
        )
    hint = suggest(str(name), allowed) or f" (allowed: {', '.join(allowed)})"
    raise ConfigError(f"grid.{name} is not a field of {model.__name__} that can vary{hint}")


def _check_values(name: str, values: object) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise ConfigError(
            f"grid.{name} must be a list of numbers, at least one, such as [0.1, 0.2], "
            f"got {'null' if values is None else repr(values)}"
        )
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            shown = "null" if value is None else repr(value)
            raise ConfigError(f"grid.{name}[{index}] must be a number, got {shown}")
    if len(set(values)) != len(values):
        raise ConfigError(f"grid.{name}: must be different numbers, got {list(values)}")
