"""Functions of a transition that the user names: when episodes end, what is rewarded.

Such a function takes tensors `obs [B, D], action [B, A], next_obs [B, D]`, actions in the
environment's units, and gives `[B]`: bool for terminations, float32 for rewards.  An own one is
named as `module:function` and marked by a decorator.  The name may stem from a stranger's
checkpoint: calling whatever it names, `os:system` say, would make the file a program; a marked
function was at least written to be called from here.  Importing its module runs code as well, so
whoever looks up a function says whether that is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rl_training.envs.named_modules import import_named
from rl_training.envs.spec import EnvSpec
from rl_training.errors import EnvError, described

StateFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_CHECK_ROWS = 5
"""No other size that occurs, so that a wrong axis shows."""


@dataclass(frozen=True)
class Kind:
    """What is asked of one kind of function."""

    word: str
    """How a message calls it."""
    decorator: str
    dtype: torch.dtype
    marked: set[StateFunction] = field(default_factory=set)


TERMINATION = Kind("termination function", "termination_function", torch.bool)
REWARD = Kind("reward function", "reward_function", torch.float32)


def termination_function(function: StateFunction) -> StateFunction:
    """Mark a function `(obs, action, next_obs) -> [B] bool` as one that says where episodes end."""
    TERMINATION.marked.add(function)
    return function


def reward_function(function: StateFunction) -> StateFunction:
    """Mark a function `(obs, action, next_obs) -> [B] float32` as one that gives rewards."""
    REWARD.marked.add(function)
    return function


class BoundFunction:
    """A function of transitions in learner units with leading axes `[S, B, ...]`."""

    def __init__(
        self, function: StateFunction, env: EnvSpec, device: torch.device | str = "cpu"
    ) -> None:
        self.function = function
        self.low = self.high = None
        if env.action_low is not None and env.action_high is not None:
            self.low = torch.tensor(env.action_low, device=device)
            self.high = torch.tensor(env.action_high, device=device)

    def __call__(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        """Return `[S, B]` for tensors `[S, B, ...]`, actions in learner units."""
        if self.low is not None and self.high is not None:
            # Both sides weighted, so that -1 and 1 give the bounds exactly.
            weight = (action.clamp(-1, 1) + 1) * 0.5
            action = (1 - weight) * self.low + weight * self.high
        flat = self.function(obs.flatten(0, -2), action.flatten(0, -2), next_obs.flatten(0, -2))
        return flat.view(obs.shape[:-1])


class NotImportedError(EnvError):
    """A function whose module is not imported yet, where importing it is not allowed."""


def own_function(name: str, kind: Kind, *, may_import: bool = True) -> StateFunction:
    """Return the function that `module:function` names.

    Args:
        name: `module:function`.
        kind: What the function is used for.
        may_import: Import the module if that has not been done.

    Raises:
        NotImportedError: The module would have to be imported, and that is not allowed.
        EnvError: The module cannot be imported, has no such attribute, or that is not marked.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise EnvError(
            f"{kind.word} {name!r} is not the name of one; an own function is named as "
            "module:function, for instance my_tasks:fell_over"
        )
    if not may_import and module_name not in sys.modules:
        raise NotImportedError(
            f"{kind.word} {name}: module {module_name!r} is named by the checkpoint and was not "
            "imported, because importing runs its code; if you trust it, import it in Python "
            "before loading the checkpoint, or use rl-training eval"
        )
    module = import_named(module_name, f"{kind.word} {name}")
    # Not getattr: a module's own __getattr__ may import more.
    function = vars(module).get(attribute)
    # Looked for rather than looked up: what is named need not be hashable.
    if not any(function is marked for marked in kind.marked):
        raise EnvError(
            f"{kind.word} {name} is {'missing' if function is None else 'not marked as one'} and "
            "was not called; write the function and put "
            f"@rl_training.envs.tasks.functions.{kind.decorator} above it"
        )
    assert function is not None
    marked: StateFunction = function
    return marked


def check_function(function: StateFunction, name: str, kind: Kind, env: EnvSpec) -> None:
    """Try a function on a few rows of zeros.

    Raises:
        EnvError: It fails, or gives another shape or dtype than it should.
    """
    rows = torch.zeros(_CHECK_ROWS, env.obs_dim)
    wanted = f"[B] {str(kind.dtype).removeprefix('torch.')}"
    try:
        result: object = function(rows, torch.zeros(_CHECK_ROWS, env.action_dim), rows.clone())
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{kind.word} {name} failed on a batch of {_CHECK_ROWS} rows of {env.env_id} "
            f"({described(error)}); it takes obs [B, {env.obs_dim}], action "
            f"[B, {env.action_dim}], next_obs [B, {env.obs_dim}] and gives {wanted}"
        ) from error
    if not isinstance(result, Tensor):
        got = f"a {type(result).__name__}"
    elif result.shape != (_CHECK_ROWS,) or result.dtype != kind.dtype:
        got = f"{list(result.shape)} {str(result.dtype).removeprefix('torch.')}"
    else:
        return
    raise EnvError(
        f"{kind.word} {name} must give {wanted} for a batch of B rows, got {got} for B = "
        f"{_CHECK_ROWS}; reduce over the last axis only"
    )


def family_of(env_id: str) -> str:
    """Return `Hopper` for `Hopper-v5`; ids with a module in front have no built-in functions."""
    return env_id.rpartition("-v")[0]
