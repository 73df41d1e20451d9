"""How a learner acts, and what it remembers between the steps of an episode while it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


class Acts(Stateful):
    """The part of a learner that acts; shapes: S seeds, n environments per seed."""

    rng: Rng
    """Source of the learner's randomness."""

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions for `obs` `[S, n, ...]` as the networks see them; a method's own part."""
        raise NotImplementedError

    def normalize(self, obs: Tensor) -> Tensor:
        """Return observations as the networks see them."""
        return obs

    def act(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Choose actions for `obs` `[S, n, ...]` in learner units (continuous ones in [-1, 1])."""
        return self.choose(self.normalize(obs), explore=explore)

    def initial_acting_state(self, num_envs: int) -> ActingState | None:  # noqa: ARG002
        """Return what acting must remember between steps; None where that is nothing.

        Whoever acts owns it: training, evaluation and prediction each have their own.
        """
        return None

    def act_from(
        self,
        state: ActingState | None,  # noqa: ARG002 - used by learners that have one
        obs: Tensor,
        *,
        explore: bool = False,
    ) -> Tensor:
        """Choose actions like `act`, and move `state` on by this step, in place."""
        return self.act(obs, explore=explore)

    def sample_from(self, state: ActingState | None, obs: Tensor) -> Tensor:
        """Draw actions from the policy that was learned, and move `state` on by this step.

        Exploring may add randomness to learn from, which is no part of that policy; a method that
        does so overrides this.
        """
        return self.act_from(state, obs, explore=True)

    def follow(self, state: ActingState | None, obs: Tensor, action: Tensor) -> None:
        """Move `state` on by a step from `obs` in which somebody else chose `action`, in place."""

    def draw_action(self, obs: Tensor) -> Tensor:
        """Draw actions like `sample_from` for `obs` `[S, n, ...]`, as at the start of episodes."""
        state = self.initial_acting_state(obs.shape[1])
        if state is not None:
            state.draw_from(self.rng)  # its own would draw the same numbers in every call
        return self.sample_from(state, obs)

    @contextmanager
    def drawing_from(self, rng: Rng) -> Iterator[None]:
        """Draw from another generator within; the learner's own stays where it is."""
        own, self.rng = self.rng, rng
        try:
            yield
        finally:
            self.rng = own

    def acting_parts(self, num_envs: int) -> dict[str, ActingPart]:  # noqa: ARG002
        """Return what of acting is to be compiled, by name; nothing means acting as a whole."""
        return {}

    def use_programs(self, programs: Mapping[str, Callable[..., Any]], num_envs: int) -> None:
        """Use programs of `acting_parts` for so many environments from now on."""

    def acting_flops(self, num_envs: int) -> float:  # noqa: ARG002
        """Multiplications of one call of `act_from`, where it costs more than an update."""
        return 0.0

    def random_action(self, num_envs: int) -> Tensor:
        """Draw uniformly random actions `[S, n, ...]` in learner units."""
        raise NotImplementedError


def seed_env_view(values: Tensor, ndim: int) -> Tensor:
    """View `[S, n]` as `[S, n, 1, ...]` with `ndim` axes."""
    return values.view(*values.shape, *[1] * (ndim - 2))
