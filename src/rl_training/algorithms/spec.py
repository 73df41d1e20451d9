"""One declaration per algorithm, from which everything else follows.

Training, evaluation, resume, prediction, the command line, the API class, the docs tables and the
contract tests are all derived from `AlgorithmSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import torch
from torch import nn

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.sources import OfflineToOnlineSettings, replay_settings
from rl_training.envs.spec import ActionKind, EnvSpec
from rl_training.errors import ConfigError, RLTrainingError, SpecMismatch
from rl_training.observations import LeafKind, ObservationSpec
from rl_training.rng import Rng, ShapeRng, TooManyDrawsError

VECTOR_LEAVES: tuple[LeafKind, ...] = ("numbers", "flags", "one_hot")
"""Parts of an observation that a vector can hold."""
_CALLED: dict[LeafKind, str] = {
    "numbers": "numbers",
    "flags": "flags",
    "one_hot": "whole numbers",
    "index": "whole numbers of many values",
    "image": "an image",
    "mask": "a mask of actions",
}


class Loop(Enum):
    """The loop that runs an algorithm, by name, so that algorithms never import the runtime."""

    OFF_POLICY = "off_policy"
    ON_POLICY = "on_policy"
    OFFLINE = "offline"


class Phase(Enum):
    """What a method adds to its loop, by name; `runtime/loops.py` says what each does."""

    PRIOR_DATA = "prior_data"
    IMAGINATION = "imagination"
    WORLD_MODEL_HEALTH = "world_model_health"
    DEMONSTRATIONS = "demonstrations"


PAPERS = {
    "arXiv": "https://arxiv.org/abs/",
    "doi": "https://doi.org/",
    "PMLR": "https://proceedings.mlr.press/",
}
"""Where papers are by the kind of their number, which is what comes before the colon."""


def paper_address(paper: str) -> str | None:
    """Return the address of a paper, such as `arXiv:2006.04779`; None for an unknown kind."""
    kind, _, number = paper.partition(":")
    return PAPERS[kind] + number if kind in PAPERS else None


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """What the package must know about an algorithm."""

    name: str
    title: str
    paper: str
    """Such as `arXiv:2006.04779`; see `PAPERS`."""
    summary: str
    learner: type[AnyLearner]
    networks: Callable[[EnvSpec, Any, Rng], Mapping[str, nn.Module]]
    loop: Loop
    action_kinds: tuple[ActionKind, ...]
    metrics: Mapping[str, str]
    """Every metric of an update with its meaning; the contract tests hold the learner to it."""
    obs_ndims: tuple[int, ...] = (1,)
    """Numbers of axes an observation may have."""
    counterpart: str | None = None
    """Name of the same method for the other kind of actions."""
    leaf_kinds: tuple[LeafKind, ...] = get_args(LeafKind)
    """What the parts of an observation may be, where it is more than a vector."""
    phases: tuple[Phase, ...] = ()
    """What it adds to its loop."""
    eval_deterministic: bool = True
    """What a run's `eval_deterministic` is where it does not say: false where samples are the
    policy, and no action of it is the best."""

    @property
    def config_class(self) -> type[AlgoConfig]:
        """The class of all its settings, as the learner declares them."""
        return self.learner.settings_class()

    @property
    def spaces(self) -> dict[str, bool]:
        """Which kinds of spaces it takes, by the names of the documentation's table."""
        counted = any(kind != "continuous" for kind in self.action_kinds)
        return {
            "vector": 1 in self.obs_ndims,
            "image": 3 in self.obs_ndims,
            "parts": set(VECTOR_LEAVES) <= set(self.leaf_kinds),
            "many values": "index" in self.leaf_kinds,
            "image among parts": "image" in self.leaf_kinds,
            "Discrete": "discrete" in self.action_kinds,
            "MultiDiscrete": "multi_discrete" in self.action_kinds,
            "Box": "continuous" in self.action_kinds,
            "mask": counted and "mask" in self.leaf_kinds,
        }

    @property
    def continues_online(self) -> bool:
        """Whether an offline method can continue online with its own update, by its settings."""
        return issubclass(self.config_class, OfflineToOnlineSettings)

    @property
    def loop_phases(self) -> tuple[Phase, ...]:
        """The phases of a run: online, an offline method has its dataset as prior data."""
        return (*self.phases, Phase.PRIOR_DATA) if self.continues_online else self.phases

    def loop_of(self, config: AlgoConfig) -> Loop:
        """Return the loop under these settings: an offline method may have been sent online."""
        goes_online = self.loop is Loop.OFFLINE and replay_settings(config) is not None
        return Loop.OFF_POLICY if goes_online else self.loop

    def check_env(self, env: EnvSpec, config: AlgoConfig) -> None:
        """Refuse a task the algorithm cannot take under these settings.

        Raises:
            SpecMismatch: Naming the task, the space and what is allowed.
        """
        if env.action_kind not in self.action_kinds:
            advice = "`rl-training list` shows what each algorithm takes."
            if self.counterpart is not None and env.action_kind != "multi_discrete":
                advice = f"{self.counterpart} is the same method for them; {advice}"
            raise SpecMismatch(
                f"{self.name} needs {' or '.join(self.action_kinds)} actions, but {env.env_id} has "
                f"{env.action_kind} ones; {advice}"
            )
        parts = env.observation
        if parts is not None and parts.needs_encoder:
            self._check_parts(parts, env.env_id)
        ndims, ndim = self.obs_ndims, len(env.obs_shape)
        if ndim not in ndims:
            beside = ndim == 3 and "image" in self.leaf_kinds
            advice = "flatten them" + (", or give the image as a part of a Dict" if beside else "")
            axes = " or ".join(map(str, ndims)) + (" axis" if ndims == (1,) else " axes")
            raise SpecMismatch(
                f"{self.name} takes observations with {axes}, but those of {env.env_id} have shape "
                f"{tuple(env.obs_shape)}; {advice}"
            )
        if ndim > 1:
            _refuse_standardized(env, config)
        _check_shift(env, config)

    def _check_parts(self, parts: ObservationSpec, env_id: str) -> None:
        others = [leaf for leaf in parts.leaves if leaf.kind not in self.leaf_kinds]
        if others:
            named = ", ".join(f"{leaf.name} ({_CALLED[leaf.kind]})" for leaf in others)
            taken = ", ".join(_CALLED[kind] for kind in self.leaf_kinds)
            advice = "leave them out with a wrapper (env_kwargs.wrappers)"
            if all(leaf.kind == "mask" for leaf in others):
                advice = "set env_kwargs.wrappers.action_mask to off to go without masks"
            raise SpecMismatch(
                f"{self.name} does not take these parts of the observations of {env_id}: {named}; "
                f"it takes {taken}; {advice}, or use another method"
            )

    def outline(self, env: EnvSpec, config: AlgoConfig, most_tensors: int) -> AnyLearner:
        """Build the learner of one seed without memory: its tensors have shapes and no numbers.

        Args:
            env: The task.
            config: The settings.
            most_tensors: Drawn tensors beyond which the learner is refused, as building very many
                takes long even without memory.

        Raises:
            SpecMismatch: The algorithm cannot take the task.
            ConfigError: The settings ask for more tensors, or for larger ones than can be counted.
        """
        self.check_env(env, config)
        try:
            networks = self.networks(env, config, ShapeRng(1, most_tensors))
            return self.learner(config=config, seeds=(0,), varied=None, **networks)
        except TooManyDrawsError:
            raise ConfigError(
                f"the settings of {self.name} ask for networks of more than {most_tensors:,} "
                "tensors; use fewer layers"
            ) from None
        except (RuntimeError, OverflowError, TypeError) as error:
            if isinstance(error, RLTrainingError):
                raise
            raise ConfigError(
                f"the settings of {self.name} ask for tensors larger than any memory "
                f"({str(error).splitlines()[0][:200]}); use smaller networks"
            ) from None

    def build(
        self,
        env: EnvSpec,
        config: AlgoConfig,
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        varied: Mapping[str, Sequence[float]] | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        may_import: bool = False,
    ) -> AnyLearner:
        """Build the learner of this algorithm for a task and a group.

        Args:
            env: The task.
            config: What the members share.
            seeds: One seed per member.
            device: Where it learns.
            varied: Settings in which members differ, with one value for each.
            env_kwargs: How the environment is made, for learners that know its rules.
            may_import: Import modules that the settings name, where the task will be run anyway.
        """
        self.check_env(env, config)
        networks = self.networks(env, config, Rng(seeds, "networks", device))
        learner = self.learner(config=config, seeds=seeds, varied=varied, **networks)
        learner.see_task(env, env_kwargs or {}, may_import)
        return learner


def _refuse_standardized(env: EnvSpec, config: AlgoConfig) -> None:
    """Refuse to standardise images.

    Raises:
        ConfigError: Naming the setting that asks for it.
    """
    for key in ("normalize_observations", "normalize_obs"):
        if getattr(config, key, False):
            raise ConfigError(
                f"algo_kwargs.{key} is true, but {env.env_id} gives images, which are scaled to "
                "[0, 1] as they are; set it to false"
            )


def _check_shift(env: EnvSpec, config: AlgoConfig) -> None:
    """Refuse to shift what is not an image, or an image out of itself.

    Raises:
        ConfigError: Naming the setting and the task.
    """
    pad: int = getattr(config, "random_shift", 0)
    if pad == 0:
        return
    leaves = () if env.observation is None else env.observation.leaves
    shapes = [leaf.row_shape for leaf in leaves if leaf.kind == "image"]
    if len(env.obs_shape) == 3:
        shapes.append(tuple(env.obs_shape))
    if not shapes:
        raise ConfigError(
            f"algo_kwargs.random_shift is {pad}, but {env.env_id} gives no images to shift; set it "
            "to 0"
        )
    smallest = min(side for shape in shapes for side in shape[1:])
    if pad >= smallest:
        raise ConfigError(
            f"algo_kwargs.random_shift is {pad}, but {env.env_id} gives images of {smallest} "
            f"pixels; it must be from 0 to {smallest - 1}, such as 4 for 84"
        )
