"""Makes one environment from an id and `env_kwargs`, and tries it.

An id is a registered one (`CartPole-v1`), Gymnasium's `module:Registered-v0`, or `module:Class` for
an own environment, a subclass of `gymnasium.Env`. Ids come out of checkpoints too, so nothing but
such a class is ever called; naming a module does import it, which runs its top-level code.

`env_kwargs` may hold `max_episode_steps`, `render_mode` and `wrappers`; everything else goes to the
environment's constructor. `wrappers` is a list of wrappers (`envs/options.py`), or a mapping that
may hold:

- `chain: [...]`: that list;
- `pixels: {resize_shape: [height, width], frame_stack: 1, channel_first: true}`: image
  observations, rendered where the environment has none of its own;
- `atari: {}`: the usual preprocessing of Atari games, see `AtariOptions`;
- `reward_scale: 0.1` and `clip_reward: true` (to [-1, 1]) or `clip_reward: [low, high]`, in this
  order; they change what is learned from, and no return in logs and evaluations.

- `action_mask: auto`, `info` or `off`: where the mask of allowed actions comes from.

An observation that is not a plain Box becomes a row of its parts (`envs/observing.py`).
`probe_env` checks on a throwaway instance that the result keeps Gymnasium's contract.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.envs.atari import AtariFrames, AtariLives, AtariOptions, emulator_kwargs
from rl_training.envs.given import is_given, make_given
from rl_training.envs.named_modules import import_named
from rl_training.envs.observing import with_rows
from rl_training.envs.ogbench import SeededTask, is_ogbench, register_ogbench
from rl_training.envs.options import (
    PixelOptions,
    WrapperOptions,
    is_atari,
    wrapped_by,
    wrapper_options,
)
from rl_training.envs.several_agents import refuse_several_agents
from rl_training.envs.spec import AnyEnv, EnvSpec, check_reward
from rl_training.envs.tasks.games import register_games
from rl_training.envs.tasks.goals import register_goal_tasks
from rl_training.envs.tasks.spaces_only import register_spaces_only
from rl_training.envs.wrappers import PixelObservation, RewardTransform
from rl_training.errors import (
    ConfigError,
    EnvError,
    MissingExtraError,
    RLTrainingError,
    described,
)

logger = logging.getLogger(__name__)
register_games()
register_goal_tasks()
register_spaces_only()

_EXTRA_OF_MODULE = {
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.box2d": "box2d",
    "ogbench": "ogbench",
}
_REFUSED_ARGUMENT = re.compile(
    r"(?:unexpected|multiple values for) (?:keyword )?argument '([^']+)'"
)


def make_env(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> AnyEnv:
    """Make one environment with its wrappers.

    Raises:
        EnvError: The id is unknown (near matches are named), `module:name` names something other
            than a subclass of `gymnasium.Env`, or the environment cannot be made.
        ConfigError: `env_kwargs` holds something the environment or its wrappers do not take.
        MissingExtraError: An optional dependency is missing.
    """
    kwargs = dict(env_kwargs or {})
    options = wrapper_options(env_id, kwargs.pop("wrappers", None))
    max_episode_steps = _episode_limit(env_id, kwargs.pop("max_episode_steps", None))
    if kwargs.get("render_mode") is None:
        kwargs.pop("render_mode", None)
    if is_given(env_id):
        given = guarded_given(env_id, kwargs, max_episode_steps)
        return _wrapped(given, options, env_id)
    own_class = _is_own_class(env_id)
    if options.pixels is not None and _takes_render_mode(env_id, own_class):
        kwargs.setdefault("render_mode", "rgb_array")
    if own_class:
        env = _make_own(env_id, kwargs)
        if max_episode_steps is not None:
            env = gym.wrappers.TimeLimit(env, max_episode_steps)
    elif options.atari is not None:
        env = _make_atari(env_id, kwargs, max_episode_steps, options.atari)
    else:
        env = _make_registered(env_id, kwargs, max_episode_steps)
    return _wrapped(env, options, env_id)


def class_name(env_id: str) -> str:
    """The class that an id stands for, as `module:Class`, without making one; or the empty text."""
    if is_given(env_id):
        return ""
    if _is_own_class(env_id):
        return full_name(_own_class(env_id))
    registered = gym.registry.get(env_id.rpartition(":")[2])
    return "" if registered is None else full_name(registered.entry_point)


def full_name(entry_point: object) -> str:
    """`module:Class` of a class; a text says so already."""
    if isinstance(entry_point, type):
        return f"{entry_point.__module__}:{entry_point.__qualname__}"
    return str(entry_point)


def close_env(env: AnyEnv, label: str) -> None:
    """Close an environment whose work is done; a failure is a warning, because nothing is lost."""
    try:
        env.close()
    except Exception as error:
        logger.warning("%s: close failed with %s: %s", label, type(error).__name__, error)


def _episode_limit(env_id: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"env_kwargs.max_episode_steps of {env_id} must be an integer >= 1, got {value!r}"
        )
    return value


def guarded_given(env_id: str, kwargs: dict[str, Any], max_episode_steps: int | None) -> AnyEnv:
    """Make an environment that was handed over in Python; every failure is one of our errors."""
    env: AnyEnv = _construct(env_id, lambda **given: make_given(env_id, given), None, kwargs)
    return env if max_episode_steps is None else gym.wrappers.TimeLimit(env, max_episode_steps)


def _is_own_class(env_id: str) -> bool:
    """Whether `module:name` names an attribute of the module rather than a registered id."""
    if ":" not in env_id:
        return False
    module_name, _, name = env_id.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise EnvError(
            f"environment {env_id!r}: {module_name!r} is not the name of a module; an own "
            "environment is named as module:Class, for instance my_tasks:Corridor"
        )
    if module_name.endswith(".py"):
        raise EnvError(
            f"environment {env_id}: {module_name} is a file; name its module, "
            f"{module_name.removesuffix('.py')}:{name}, with its folder on PYTHONPATH"
        )
    module = import_named(module_name, f"environment {env_id}")
    # Importing may have registered the name, as Gymnasium's own `module:Registered-v0` form
    # expects.
    if name in gym.registry:
        return False
    if not hasattr(module, name):
        raise EnvError(
            f"environment {env_id}: module {module_name!r} has no attribute {name!r} and registers "
            "no such id"
            f"{_suggest(name, [*vars(module), *gym.registry])}"
        )
    return True


def _takes_render_mode(env_id: str, own_class: bool) -> bool:
    """Whether it can be asked to render; environments with images of their own often cannot."""
    if not own_class:
        return True
    return "render_mode" in _constructor_parameters(_own_class(env_id))


def _own_class(env_id: str) -> type[AnyEnv]:
    """The class that `module:name` names.

    The id may stem from a stranger's checkpoint: calling whatever it names, `os:system` say, would
    make the file a program. A class of environments was at least written to be made from here.
    """
    module_name, _, name = env_id.partition(":")
    named = getattr(import_named(module_name, f"environment {env_id}"), name)
    if not (isinstance(named, type) and issubclass(named, gym.Env)):
        refuse_several_agents(named, env_id)
        what = f"the class {name}" if isinstance(named, type) else f"a {type(named).__name__}"
        raise EnvError(
            f"environment {env_id} is {what}, not a subclass of gymnasium.Env, and was not called; "
            "name a class of environments, or register a function with gymnasium.register and "
            "name its id as module:Registered-v0"
        )
    return named


def _make_own(env_id: str, kwargs: dict[str, Any]) -> AnyEnv:
    creator = _own_class(env_id)
    env: object = _construct(env_id, creator, creator, kwargs)
    if not isinstance(env, gym.Env):  # A class may give something else from __new__.
        raise EnvError(
            f"environment {env_id} gave {type(env).__name__}, not a gymnasium.Env; remove its "
            "__new__ or let it return an instance of the class"
        )
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, spaces.Space):
            raise EnvError(
                f"environment {env_id}: its {name} must be a gymnasium.Space, got {space!r}; set "
                "it in __init__"
            )
    return env


def _make_registered(env_id: str, kwargs: dict[str, Any], max_episode_steps: int | None) -> AnyEnv:
    if is_atari(env_id):
        register_atari(env_id)
    if is_ogbench(env_id) and env_id not in gym.registry:
        register_ogbench(f"environment {env_id}")
    if ":" not in env_id:
        _check_registered(env_id)

    def create(**constructor_kwargs: Any) -> AnyEnv:
        # Our probe checks the contract once; Gymnasium's checker would cost a layer on every step.
        return gym.make(
            env_id,
            max_episode_steps=max_episode_steps,
            disable_env_checker=True,
            **constructor_kwargs,
        )

    entry_point = gym.registry[env_id.rpartition(":")[2]].entry_point
    with _without_known_warnings(str(entry_point)):
        env: AnyEnv = _construct(env_id, create, entry_point, kwargs)
        if str(entry_point).startswith("ogbench."):
            env = SeededTask(env)
    return env


def _make_atari(
    env_id: str, kwargs: dict[str, Any], max_episode_steps: int | None, options: AtariOptions
) -> AnyEnv:
    """Make a game with its preprocessing; a limit of steps counts those of the agent."""
    env = _make_registered(env_id, emulator_kwargs(options) | kwargs, None)
    env = AtariFrames(env, options)
    if max_episode_steps is not None:
        env = gym.wrappers.TimeLimit(env, max_episode_steps)
    env = AtariLives(env, options)
    return PixelObservation(env, None, options.frame_stack, channel_first=True)


def _check_registered(env_id: str) -> None:
    if env_id not in gym.registry:
        raise EnvError(
            f"environment {env_id!r} is not registered with "
            f"Gymnasium{_suggest(env_id, [*gym.registry])}; an own "
            f"environment is named as module:Class"
        )


def _suggest(name: str, candidates: list[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(by_lower[match] for match in close)}?)" if close else ""


def register_atari(env_id: str) -> None:
    """Make the games known to Gymnasium.

    Raises:
        MissingExtraError: ale-py is not installed.
    """
    if importlib.util.find_spec("ale_py") is None:
        raise MissingExtraError(
            f'environment {env_id} needs Atari support; run: pip install "rl-training[atari]"'
        )
    ale_py = importlib.import_module("ale_py")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else a banner for every game
    gym.register_envs(ale_py)


def _construct(
    env_id: str, creator: Callable[..., Any], entry_point: Any, kwargs: dict[str, Any]
) -> Any:
    """Call the creator; every failure becomes one of our errors."""
    try:
        return creator(**kwargs)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise _missing_dependency(env_id, entry_point, error) from error
    except TypeError as error:
        # Only this part of the message names the culprit: Gymnasium appends all keywords given.
        refused = _REFUSED_ARGUMENT.search(str(error))
        unknown = refused.group(1) if refused else ""
        if unknown not in kwargs:
            raise EnvError(f"environment {env_id} could not be made: {error}") from error
        accepted = _constructor_parameters(entry_point)
        known = f"; it takes {', '.join(accepted)}" if accepted else ""
        raise ConfigError(
            f"env_kwargs.{unknown} (value {kwargs[unknown]!r}) is not an argument of "
            f"{env_id}{known}; "
            f"max_episode_steps, render_mode and wrappers are taken for every environment"
        ) from error
    except RLTrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"environment {env_id} could not be made with {kwargs}: {described(error)}"
        ) from error


def _missing_dependency(env_id: str, entry_point: Any, error: Exception) -> MissingExtraError:
    extras = (e for module, e in _EXTRA_OF_MODULE.items() if str(entry_point).startswith(module))
    extra = next(extras, None)
    advice = f'run: pip install "rl-training[{extra}]"' if extra else "install it"
    return MissingExtraError(
        f"environment {env_id} needs a package that is not installed ({error}); {advice}"
    )


def _constructor_parameters(entry_point: Any) -> list[str]:
    """Names of the constructor's arguments, as far as they can be found."""
    if isinstance(entry_point, str):
        entry_point = gym.envs.registration.load_env_creator(entry_point)
    try:
        parameters = inspect.signature(entry_point).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in named]


@contextmanager
def _without_known_warnings(entry_point: str) -> Iterator[None]:
    """Keep back the warnings that third parties cause at load, and no others."""
    with warnings.catch_warnings():
        # SWIG's types as Box2D has them; turned into an error, it would crash the interpreter.
        swig = r"builtin type \w+ has no __module__ attribute"
        warnings.filterwarnings("ignore", message=swig, category=DeprecationWarning)
        # OGBench loads a viewer, which misses a screen, and rounds the bounds of its actions.
        warnings.filterwarnings("ignore", module="glfw")
        if entry_point.startswith("ogbench"):
            warnings.filterwarnings("ignore", message=r".*precision lowered by casting")
        simulated = entry_point.startswith(("gymnasium.envs.mujoco", "ogbench"))
        if simulated and importlib.util.find_spec("mujoco"):
            with _mujoco_warnings_logged():
                yield
        else:
            yield


@contextmanager
def _mujoco_warnings_logged() -> Iterator[None]:
    """Log MuJoCo's warnings, save the one deprecation that Gymnasium's own models cause.

    MuJoCo would otherwise print them and write MUJOCO_LOG.TXT into the working folder.
    """
    mujoco = importlib.import_module("mujoco")
    previous = mujoco.get_mju_user_warning()

    def handler(message: str) -> None:
        if "'settotalmass' is deprecated" not in message:
            logger.warning("MuJoCo: %s", message)

    mujoco.set_mju_user_warning(handler)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)


def _wrapped(env: AnyEnv, options: WrapperOptions, env_id: str) -> AnyEnv:
    env = wrapped_by(env, options.chain, env_id)
    if options.pixels is not None:
        env = _with_pixels(env, options.pixels)
    env = with_rows(env, env_id, options.action_mask)
    if options.reward_scale != 1.0 or options.clip_reward is not False:
        env = RewardTransform(env, options.reward_scale, *options.reward_bounds)
    return env


def _with_pixels(env: AnyEnv, options: PixelOptions) -> AnyEnv:
    space = env.observation_space
    has_images = isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8
    if not has_images:
        try:
            env = gym.wrappers.AddRenderObservation(env, render_only=True)
        except Exception as error:
            raise EnvError(
                f"env_kwargs.wrappers.pixels: {env} cannot be rendered to an array ({error}); it "
                f"needs render_mode rgb_array, or uint8 images [height, width, channels] as "
                f"observations"
            ) from error
    return PixelObservation(env, options.resize_shape, options.frame_stack, options.channel_first)


def probe_env(
    env_id: str, env_kwargs: Mapping[str, Any] | None = None, seed: int = 0, num_steps: int = 2
) -> EnvSpec:
    """Check Gymnasium's contract on a throwaway instance and return its spec.

    Raises:
        EnvError: `reset` or `step` gives something else than the contract says; the message says
            what.
        SpecMismatch: A space cannot be used.
    """
    with _same_folder():
        return _probed(env_id, env_kwargs, seed, num_steps)


def _probed(
    env_id: str, env_kwargs: Mapping[str, Any] | None, seed: int, num_steps: int
) -> EnvSpec:
    env = make_env(env_id, env_kwargs)
    try:
        spec = EnvSpec.from_env(env, env_id)
        env.action_space.seed(seed)
        last = guarded(env_id, "reset", lambda: env.reset(seed=seed))
        _check_reset(spec, last)
        generator = np.random.default_rng(seed)
        for _ in range(num_steps):
            if spec.mask_size:
                action = spec.allowed_action(last[0], generator)
            else:
                action = env.action_space.sample()
            take_step = functools.partial(_step, env, action)
            last = guarded(env_id, f"step({action})", take_step)
            if _check_step(spec, last):
                break
    except BaseException:
        with suppress(Exception):  # the first error says more
            env.close()
        raise
    guarded(env_id, "close", env.close)
    return spec


@contextmanager
def _same_folder() -> Iterator[None]:
    """Return to the working directory, which a throwaway environment may change."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


def guarded(env_id: str, what: str, call: Callable[[], Any]) -> Any:
    """Call user code; whatever it raises is an `EnvError` that says `what` was called."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise EnvError(f"environment {env_id}: {what} raised {described(error)}") from error


def _check_reset(spec: EnvSpec, result: object) -> None:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvError(
            f"environment {spec.env_id}: reset must return (obs, info) with info a dict, got "
            f"{_shape_of(result)}"
        )
    _check_obs(spec, result[0], "reset")


def _step(env: AnyEnv, action: Any) -> object:
    """Take one step; a result that wrappers cannot unpack is returned as the task gave it."""
    try:
        return env.step(action)
    except ValueError:
        own: Any = env.unwrapped.step(action)
        if isinstance(own, tuple) and len(own) == 5:
            raise
        return own


def _check_step(spec: EnvSpec, result: object) -> bool:
    """Check one step; returns whether the episode ended."""
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"environment {spec.env_id}: step must return (obs, reward, terminated, truncated, "
            "info), "
            f"got {_shape_of(result)}"
        )
    obs, reward, terminated, truncated, _ = result
    _check_obs(spec, obs, "step")
    try:
        finite = bool(np.isfinite(float(reward)))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise EnvError(
            f"environment {spec.env_id}: the reward of step must be one finite number, got "
            f"{reward!r}"
        )
    guarded(spec.env_id, "step", lambda: check_reward(reward))
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise EnvError(f"environment {spec.env_id}: {name} must be a bool, got {flag!r}")
    return bool(terminated or truncated)


def _check_obs(spec: EnvSpec, obs: object, where: str) -> None:
    shape, dtype = getattr(obs, "shape", None), str(getattr(obs, "dtype", type(obs).__name__))
    if shape != spec.obs_shape or dtype != spec.obs_dtype:
        raise EnvError(
            f"environment {spec.env_id}: the observation of {where} has shape {shape} and dtype "
            f"{dtype}, but "
            f"its observation space says {spec.obs_shape} and {spec.obs_dtype}; make the two agree"
        )
    if not np.isfinite(np.asarray(obs)).all():
        raise EnvError(
            f"environment {spec.env_id}: the observation of {where} is not finite: {obs!r}"
        )


def _shape_of(result: object) -> str:
    kind = type(result).__name__
    return f"a {kind} of length {len(result)}" if isinstance(result, (tuple, list)) else f"a {kind}"
