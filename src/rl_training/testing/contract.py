"""What the contract suite needs of any algorithm: a small configuration, a batch, a guard."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.sources import SequenceReplay
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.data.batch import RolloutBatch, SequenceBatch, TransitionBatch
from rl_training.envs.factory import probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.games import Catch
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec, import_plugin
from rl_training.models.heads import uniform_allowed
from rl_training.runtime.replay import load_buffer
from rl_training.state import leaves_in

SMALL_MODEL: dict[str, Any] = {
    "model_hidden_sizes": [16, 16],
    "num_ensembles": 3,
    "num_elites": 2,
    "model_batch_size": 16,
    "model_max_epochs": 2,
    "model_patience_updates": 1,
    "rollout_batch_size": 24,
    "rollout_horizon": 2,
    "rollouts_kept": 2,
    "rollout_refresh_interval": 25,
    "model_train_frequency": 50,
    "planning_horizon": 4,
    "planning_candidates": 8,
    "planning_topk": 3,
    "planning_iterations": 2,
    "planning_particles": 6,
}
"""Small values of the settings of a dynamics ensemble, and of planning in one."""
SMALL_WORLD_MODEL: dict[str, Any] = {
    "size": "tiny",
    "deter_size": 16,
    "model_hidden_size": 16,
    "units": 16,
    "cnn_depth": 4,
    "latent_groups": 4,
    "latent_classes": 4,
    "num_bins": 41,
    "batch_length": 8,
    "imagination_horizon": 3,
    "warmup_updates": 0,
    "actor_learning_rate": 1e-3,
}
"""Small values of the settings of a recurrent world model."""
SMALL: dict[str, Any] = {
    "hidden_sizes": [16, 16],
    "features_dim": 16,
    "batch_size": 8,
    "buffer_capacity": 400,
    "learning_starts": 20,
    "num_steps": 16,
    "sequence_length": 4,
    "burn_in": 1,
    "memory_size": 16,
    "minibatch_size": 16,
    "update_epochs": 2,
    "target_update_interval": 3,
    "policy_noise": 0.2,  # smaller noise of targets would hide what it and its bound do
    "dataset_size": 200,
    "expert_dataset_size": 200,
    "discriminator_hidden_sizes": [16, 16],
    "discriminator_features_dim": 16,
    "discriminator_head_hidden_sizes": [16],
    "discriminator_batch_size": 16,
    "discriminator_updates": 2,
    "initial_random_steps": 20,
    **SMALL_WORLD_MODEL,
    # Every step of a sequence is traced by itself, and so is every layer.
    "batch_length": 4,
    "imagination_horizon": 2,
    "mlp_layers": 1,
    "train_ratio": 16,
    "eval_interval": 60,
    **SMALL_MODEL,
}
"""Values that make any algorithm quick; each is used where the algorithm has such a setting."""

AT_MOST: dict[str, int] = {
    "gradient_updates_per_step": 2,
    "num_critics": 3,
    "policy_delay": 3,
    "train_frequency": 4,
}
"""Bounds on defaults that would make tests slow, or too short to see what comes once a round."""

OWN_WIDTHS: dict[str, Any] = {
    "actor_hidden_sizes": [16, 16],
    "critic_hidden_sizes": [16, 16],
}
"""Values of settings that are small anyway where they follow others."""
STATISTICAL = 32
"""Rows of a batch that is normalised by its own statistics: of a unit that fires on all rows the
bias has no gradient but rounding, by whose sign Adam moves it."""

CHOSEN = "RL_TRAINING_TESTED"
"""Variable that names the algorithms to test, separated by commas; unset means the package's."""


def names_under_test() -> tuple[str, ...]:
    """Return the algorithms that the suite goes through, with plug-ins imported."""
    chosen = os.environ.get(CHOSEN)
    if not chosen:
        return algorithm_names()
    for name in chosen.split(","):
        import_plugin(name)
    return tuple(chosen.split(","))


Batch = TransitionBatch | RolloutBatch | SequenceBatch
TASK = {
    "continuous": "Pendulum-v1",
    "discrete": "CartPole-v1",
    "multi_discrete": f"{__name__}:Switches",
}
PIXEL_TASK = "rl_training/Catch-v0"


class CatchImages(Catch):
    """Catch with channels last, as rendered images have them."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (10, 10, 2), np.uint8)

    def _obs(self) -> Any:
        return np.ascontiguousarray(super()._obs().transpose(1, 2, 0))


class SteeredImages(CatchImages):
    """The same, steered by a continuous action."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, action: Any) -> Any:
        """Stay near 0, else move to its side."""
        side = float(np.ravel(action)[0])
        return super().step(0 if abs(side) < 1 / 3 else 1 if side < 0 else 2)


class SteeredCatch(SteeredImages):
    """Catch, steered by a continuous action."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (2, 10, 10), np.uint8)

    def _obs(self) -> Any:
        return Catch._obs(self)


class Refused(AssertionError):
    """An action that the mask of a task does not allow was taken."""


class Parts(gym.Env[dict[str, Any], Any]):
    """Random observations of every kind of part, and a reward for large actions.

    Of discrete actions some are allowed at a time, at least one of each part; others end the run.
    """

    sizes: tuple[int, ...] = (3,)
    """Numbers of values of each part of an action; empty where actions are continuous."""

    def __init__(self) -> None:
        """Set the task up."""
        numbers = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        whole = spaces.Discrete(4, start=1)
        parts: dict[str, Any] = {
            "state": spaces.Tuple((numbers, whole)),
            "keys": spaces.MultiBinary(2),
            "tools": spaces.MultiDiscrete([2, 3]),
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "room": spaces.Discrete(600),
        }
        self.action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)
        if self.sizes:
            parts["action_mask"] = spaces.MultiBinary(sum(self.sizes))
            self.action_space = spaces.Discrete(self.sizes[0], start=2)
        if len(self.sizes) > 1:
            self.action_space = spaces.MultiDiscrete(list(self.sizes), start=[2] * len(self.sizes))
        self.observation_space = spaces.Dict(parts)
        self._time = 0
        self._mask = np.ones(sum(self.sizes), np.int8)

    def _obs(self) -> dict[str, Any]:
        draw = self.np_random.integers
        values: dict[str, Any] = {
            "state": (self.np_random.normal(size=3), int(draw(1, 5))),
            "keys": draw(0, 2, 2).astype(np.int8),
            "tools": draw(0, [2, 3]),
            "camera": draw(0, 256, (8, 8, 3)).astype(np.uint8),
            "room": int(draw(600)),
        }
        if self.sizes:
            masks = [draw(0, 2, size) for size in self.sizes]
            for mask in masks:
                mask[draw(len(mask))] = 1
            values["action_mask"] = self._mask = np.concatenate(masks).astype(np.int8)
        return values

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode of 20 steps."""
        super().reset(seed=seed, options=options)
        self._time = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        """Pay the sum of the action."""
        self._time += 1
        if self.sizes:
            first = np.cumsum((0, *self.sizes[:-1]))
            if not self._mask[first + np.ravel(action) - 2].all():
                raise Refused(f"action {action} with mask {self._mask}")
        return self._obs(), float(np.sum(action)), self._time >= 20, False, {}

    def get_state(self) -> dict[str, Any]:
        """Return what the next steps depend on, beside the generator."""
        return {"time": self._time, "mask": self._mask.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._time, self._mask = state["time"], state["mask"].copy()


class SteeredParts(Parts):
    """The same with continuous actions."""

    sizes = ()


class SwitchedParts(Parts):
    """The same with actions of two whole numbers."""

    sizes = (3, 2)


class Switches(gym.Env[Any, Any]):
    """Show a number for each of two switches; an action pays for each that is set to its number."""

    def __init__(self) -> None:
        """Set the task up."""
        self.observation_space = spaces.Box(0.0, 2.0, (2,), np.float32)
        self.action_space: Any = spaces.MultiDiscrete([3, 2], start=[1, 0])
        self._wanted = np.zeros(2, np.int64)

    def _obs(self) -> Any:
        self._wanted = self.np_random.integers(0, [3, 2])
        return self._wanted.astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode; only a limit of steps ends it."""
        super().reset(seed=seed, options=options)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        """Count the switches that were set well."""
        assert self.action_space.contains(action), action
        right = np.asarray(action) - (1, 0) == self._wanted
        return self._obs(), float(right.sum()), False, False, {}

    def get_state(self) -> dict[str, Any]:
        """Return what the next steps depend on, beside the generator."""
        return {"wanted": self._wanted.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._wanted = state["wanted"].copy()


def pixel_task(algo: str) -> str:
    """Return a task of images whose actions an algorithm takes."""
    discrete = "discrete" in get_algorithm_spec(algo).action_kinds
    return PIXEL_TASK if discrete else f"{__name__}:SteeredCatch"


def image_task(algo: str) -> str:
    """Return the same with images whose channels come last."""
    discrete = "discrete" in get_algorithm_spec(algo).action_kinds
    return f"{__name__}:{'CatchImages' if discrete else 'SteeredImages'}"


PARTS_TASKS: dict[str, type[Parts]] = {
    "discrete": Parts,
    "continuous": SteeredParts,
    "multi_discrete": SwitchedParts,
}


def parts_tasks(algo: str) -> list[str]:
    """Return tasks whose observations have every kind of part, one for each kind of its actions."""
    spec = get_algorithm_spec(algo)
    tasks = [PARTS_TASKS[kind] for kind in spec.action_kinds] if "image" in spec.leaf_kinds else []
    if "mask" not in spec.leaf_kinds:
        tasks = [task for task in tasks if not task.sizes]
    return [f"{__name__}:{task.__name__}" for task in tasks]


def parts_task(algo: str) -> str:
    """Return the first of them."""
    return parts_tasks(algo)[0]


def small_settings(spec: AlgorithmSpec, **changes: Any) -> dict[str, Any]:
    """Return settings that make an algorithm quick, with changes."""
    fields = spec.config_class.model_fields
    has = {k: v for k, v in fields.items() if v.annotation is not type(None)}  # None alone is none
    small = {k: v for k, v in SMALL.items() if k in has}
    small |= {k: v for k, v in AT_MOST.items() if k in fields and fields[k].default > v}
    small |= {k: v for k, v in OWN_WIDTHS.items() if k in fields and fields[k].default is not None}
    if "renorm_momentum" in fields:
        small["batch_size"] = STATISTICAL
    return small | changes


def small_config(
    algo: str, folder: Path | str, *, task: str | None = None, **changes: Any
) -> TrainConfig:
    """Return a run of an algorithm that takes a second or two, with changes."""
    spec = get_algorithm_spec(algo)
    settings = small_settings(spec, **changes.pop("algo_kwargs", {}))
    base: dict[str, Any] = {
        "algo": algo,
        "env_id": task or TASK[spec.action_kinds[0]],
        "total_timesteps": 160,
        "eval_episodes": 2,
        "log_interval": 40,
        "checkpoint_interval": 50,
        "tensorboard": False,
        "output_dir": str(folder),
        "device": "cpu",
        "env_kwargs": {"max_episode_steps": 30},
    }
    return TrainConfig(**(base | changes), algo_kwargs=settings)


def build(
    algo: str,
    seeds: tuple[int, ...] = (0,),
    task: str | None = None,
    varied: Mapping[str, Sequence[float]] | None = None,
    **settings: Any,
) -> tuple[AnyLearner, EnvSpec]:
    """Build a small learner, as a run would, and the description of its task."""
    spec = get_algorithm_spec(algo)
    env = probe_env(task or TASK[spec.action_kinds[0]], {})
    config = spec.config_class(**small_settings(spec, **settings))
    learner = spec.build(env, config, seeds, varied=varied)
    if isinstance(learner, GAIL):
        learner.attach(load_buffer(learner, env)[0])
    return learner, env


def above_rounding(algo: str) -> dict[str, Any]:
    """Return settings under which two ways to compute an update may be compared.

    Without an epsilon an optimizer moves by the signs of gradients that are only rounding errors.
    Batch normalisation makes such gradients: of biases whose mean it takes off again.
    """
    fields = get_algorithm_spec(algo).config_class.model_fields
    is_tiny = fields["adam_epsilon"].default < 1e-8
    return {"adam_epsilon": 1e-4} if is_tiny or "renorm_momentum" in fields else {}


def make_batch(algo: str, env: EnvSpec, seeds: tuple[int, ...], key: int = 0) -> Batch:
    """Draw a batch whose part for a seed depends on that seed alone."""
    parts = [_one_seed(algo, env, seed, key) for seed in seeds]
    kind = type(parts[0])
    joined: dict[str, Any] = {}
    for name, value in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        joined[name] = None if value is None else torch.cat(values)
    return kind(**joined)


def _one_seed(algo: str, env: EnvSpec, seed: int, key: int) -> Batch:
    spec = get_algorithm_spec(algo)
    generator = torch.Generator().manual_seed(1000 * seed + key)
    sequences = issubclass(spec.config_class, SequenceReplay)
    lead = (1, 16, 4) if spec.loop is Loop.ON_POLICY else (1, 8, 6) if sequences else (1, 8)

    def normal(*shape: int) -> Tensor:
        return torch.randn((*lead, *shape), generator=generator)

    if env.actions_are_counted:
        numbers = [torch.randint(size, lead, generator=generator) for size in env.choices]
        action = numbers[0] if env.action_kind == "discrete" else torch.stack(numbers, -1)
    else:
        action = normal(env.action_dim).tanh()
    ended = torch.rand(lead, generator=generator) < 0.2
    obs = random_obs(env, lead, generator)
    common = {"obs": obs, "action": nearest_allowed(env, obs, action), "reward": normal()}
    if sequences:
        first = torch.rand(lead, generator=generator) < 0.2
        first[..., 0] = True
        return SequenceBatch(**common, is_first=first, terminated=ended)
    common["next_obs"] = random_obs(env, lead, generator)
    if spec.loop is Loop.ON_POLICY:
        cut = torch.rand(lead, generator=generator) < 0.2
        return RolloutBatch(**common, terminated=ended, truncated=cut)
    if spec.learner.needs_next_action:
        common["next_action"] = normal(env.action_dim).tanh()
        common["next_action_mask"] = (torch.rand(lead, generator=generator) < 0.8).float()
    return TransitionBatch(**common, discount=0.99 * (~ended).float())


def nearest_allowed(env: EnvSpec, obs: Tensor, action: Tensor) -> Tensor:
    """Replace those parts of actions that the task does not allow in `obs` by some that it does."""
    if env.observation is None or not env.mask_size:
        return action
    masks = torch.split(env.observation.allowed(obs), list(env.choices), -1)
    numbers = [action] if env.action_kind == "discrete" else action.unbind(-1)
    parts = [
        torch.where(
            mask.gather(-1, number.unsqueeze(-1)).squeeze(-1),
            number,
            uniform_allowed((number + 0.5) / mask.shape[-1], mask),
        )
        for number, mask in zip(numbers, masks, strict=True)
    ]
    return parts[0] if env.action_kind == "discrete" else torch.stack(parts, -1)


def random_obs(env: EnvSpec, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw observations `[*lead, ...]` of the type that the task gives."""
    shape = (*lead, *env.obs_shape)
    if env.observation is not None:
        key = int(torch.randint(2**31, (), generator=generator))
        return torch.from_numpy(env.example_observations(math.prod(lead), key)).view(shape)
    if env.obs_dtype == "uint8":
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)


def takes_pixels(algo: str) -> bool:
    """Tell whether an algorithm takes images."""
    return 3 in get_algorithm_spec(algo).obs_ndims


def takes_parts(algo: str) -> bool:
    """Tell whether an algorithm takes observations that are more than a vector."""
    return bool(parts_tasks(algo))


class _NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise AssertionError("a tensor was read on the host inside update")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Make every way to read a tensor's value on the host raise."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read on the host inside update")

    with pytest.MonkeyPatch.context() as patch, _NoHostReads():  # type: ignore[no-untyped-call]
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, forbidden)
        yield


def has_settings(algo: str, names: Mapping[str, Any]) -> bool:
    """Whether the algorithm has all of these settings; a variant that needs others is left out."""
    return names.keys() <= get_algorithm_spec(algo).config_class.model_fields.keys()


def varying_values(algo: str, name: str, count: int) -> tuple[float, ...]:
    """Return values of a setting that lie apart and change what a few updates do."""
    settings = get_algorithm_spec(algo).config_class
    assert name in settings.may_vary()
    if name == "target_entropy":
        return tuple(-3.0 + 4.0 * index for index in range(count))
    default = settings.model_fields[name].default
    usual = default if isinstance(default, float) and default > 0 else 0.02
    largest = {
        "tau": 0.9,
        "policy_noise": 0.2,
        "clip_coef": 0.003,
        "ent_coef": 1.0,
        "entropy_coef": 1.0,
        "actor_learning_rate": 0.01,
        "fraction_learning_rate": 0.01,
    }.get(name, usual)
    return tuple(largest / 3**index for index in range(count))


def rate_name(algo: str) -> str:
    """Return the setting that holds the learning rate of the first optimizer."""
    settings = get_algorithm_spec(algo).config_class
    names = (
        "learning_rate",
        "policy_learning_rate",
        "model_learning_rate",
        "world_model_learning_rate",
    )
    return next(name for name in names if name in settings.model_fields)


def assert_member_equals(group: AnyLearner, index: int, single: AnyLearner) -> None:
    """Compare the state of one member of a group with that of a learner of its own, to rounding."""
    stacked = flat_state(group.state_dict())
    for name, value in flat_state(single.state_dict()).items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            assert stacked[name] == value, name
        elif value.is_floating_point():
            member = stacked[name][index : index + 1]
            torch.testing.assert_close(member, value, rtol=2e-4, atol=2e-5, msg=name)
        else:
            assert torch.equal(stacked[name][index : index + 1], value), name


def flat_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a nested state by dotted name; tensors are copies."""
    return {
        ".".join(path): leaf.clone() if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves_in(state).items()
    }
