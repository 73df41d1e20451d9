"""What a learner remembers between the steps of an episode while it acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from rl_training.rng import Rng
from rl_training.state import Stateful


class ActingState(Stateful):
    """What acting remembers of the episodes in progress: tensors `[S, n, ...]`, 0 at their start.

    An `Rng` among the attributes is carried on across episodes.
    """

    def begin_episodes(self, starts: Tensor) -> None:
        """Forget the episode before in environments that are at a start, `starts` `[S, n]`."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.masked_fill_(seed_env_view(starts, value.ndim), 0)

    def draw_from(self, rng: Rng) -> None:
        """Take the randomness of what follows from `rng` in place of the state's own."""
        for name, value in vars(self).items():
            if isinstance(value, Rng):
                setattr(self, name, rng)


class ActingPart(NamedTuple):
    """A function that acting spends its time in; it changes nothing and draws nothing."""

    call: Callable[..., Any]
    examples: Callable[[], tuple[Any, ...]]
    """Arguments of the shapes that it will have."""


def seed_env_view(values: Tensor, ndim: int) -> Tensor:
    """View `[S, n]` as `[S, n, 1, ...]` with `ndim` axes."""
    return values.view(*values.shape, *[1] * (ndim - 2))
