"""Shows an agent at work: frames of whole episodes for a video, or a window to watch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_training.envs.factory import close_env, guarded, make_env
from rl_training.envs.options import evaluation_kwargs
from rl_training.envs.spec import AnyEnv
from rl_training.errors import (
    ConfigError,
    DataError,
    EnvError,
    MissingExtraError,
    described,
    exit_is_error,
)
from rl_training.output_files import written_beside
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.workflows import LoadedAgent

Frame = NDArray[np.uint8]
"""Height, width, red green blue."""
FORMATS = (".mp4", ".gif", ".webm")
DEFAULT_FPS = 30


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Episodes that were shown."""

    returns: tuple[float, ...]
    steps: int
    path: Path | None = None


@exit_is_error("recording")
def record_agent(
    agent: LoadedAgent,
    target: Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
    fps: int | None = None,
    max_steps: int | None = None,
    deterministic: bool | None = None,
) -> Shown:
    """Record whole episodes of the policy.

    Args:
        agent: Who acts.
        target: File to write; its ending says which format, one of `FORMATS`.
        episodes: How many, one after the other.
        seed: Seed of the episodes; None takes one that training never used.
        fps: Frames per second; None asks the environment.
        max_steps: Cut each episode after so many steps; None does not.
        deterministic: Take the policy's best actions, or sample; None does as the run's
            `eval_deterministic` says.

    Raises:
        ConfigError: For another ending, or numbers out of range.
        MissingExtraError: Without imageio and imageio-ffmpeg.
        EnvError: When the environment gives no frames.
    """
    if target.suffix not in FORMATS:
        raise ConfigError(
            f"{target.name}: a video ends in {', '.join(FORMATS)}, got {target.suffix or 'nothing'}"
        )
    _check(episodes, fps, max_steps)
    open_writer = _writer_maker()
    with _environment(agent, "rgb_array") as env:
        rate = fps or int(env.metadata.get("render_fps") or DEFAULT_FPS)
        try:
            with written_beside(target) as part, open_writer(part, rate) as write:
                show = _Show(agent, env, max_steps, deterministic, _camera(env, write))
                shown = show.play(episodes, seed)
        except OSError as error:
            raise DataError(f"{target} cannot be written ({error}); choose another file") from None
    return Shown(returns=shown.returns, steps=shown.steps, path=target)


@exit_is_error("watching")
def watch_agent(
    agent: LoadedAgent,
    *,
    episodes: int = 1,
    seed: int | None = None,
    max_steps: int | None = None,
    deterministic: bool | None = None,
) -> Shown:
    """Show whole episodes of the policy in a window, at the environment's speed.

    Raises:
        EnvError: When the environment has no window, or the machine no screen.
    """
    _check(episodes, None, max_steps)
    if sys.platform == "linux" and not any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    ):
        # SDL would draw into nothing without a word.
        raise EnvError(
            "this machine has no screen: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            "use `rl-training record` to write a video instead"
        )
    with _environment(agent, "human") as env:
        return _Show(agent, env, max_steps, deterministic, lambda: None).play(episodes, seed)


def _check(episodes: int, fps: int | None, max_steps: int | None) -> None:
    for name, value in (("episodes", episodes), ("fps", fps), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")


@contextmanager
def _environment(agent: LoadedAgent, render_mode: str) -> Iterator[AnyEnv]:
    """Make the task with pictures."""
    agent.import_task()
    env_id, kwargs = agent.config.env_id, evaluation_kwargs(agent.config.env_kwargs)
    plain = make_env(env_id, kwargs)
    modes = plain.metadata.get("render_modes") or ()
    close_env(plain, f"environment {env_id}")
    if render_mode not in modes:
        there = ", ".join(modes) or "none"
        raise EnvError(f"{env_id} has no render mode {render_mode}; it has: {there}")
    with _without_a_screen() if render_mode == "rgb_array" else nullcontext():
        env = make_env(env_id, kwargs | {"render_mode": render_mode})
        try:
            yield env
        finally:
            close_env(env, f"environment {env_id}")


@contextmanager
def _without_a_screen() -> Iterator[None]:
    """Let drawings by SDL look for no display, which they do not need but complain of."""
    name = "SDL_VIDEODRIVER"
    before = os.environ.get(name)
    os.environ[name] = before or "dummy"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


class _Show:
    """Episodes of an agent, with something to be done after every frame."""

    def __init__(
        self,
        agent: LoadedAgent,
        env: AnyEnv,
        max_steps: int | None,
        deterministic: bool | None,
        after: Callable[[], None],
    ) -> None:
        self.learner, self.spec, self.env = agent.learner, agent.env_spec, env
        self.base_seed = derive_seed(agent.config.seed, "video")
        self.max_steps, self.after = max_steps, after
        best = agent.config.eval_deterministic if deterministic is None else deterministic
        self.act = self.learner.act_from if best else self.learner.sample_from

    def play(self, episodes: int, seed: int | None) -> Shown:
        """Play episodes; the same seed gives the same ones."""
        first = self.base_seed if seed is None else seed
        played = [self._episode(first + episode) for episode in range(episodes)]
        returns = tuple(total for total, _ in played)
        return Shown(returns=returns, steps=sum(length for _, length in played))

    def _episode(self, seed: int) -> tuple[float, int]:
        learner, spec = self.learner, self.spec
        rng = Rng((seed,), "video", learner.device)
        state = learner.initial_acting_state(1)
        if state is not None:
            state.draw_from(rng)
        begin = functools.partial(self.env.reset, seed=seed % 2**31)
        obs, _ = guarded(spec.env_id, "reset", begin)
        self.after()
        total, length, over = 0.0, 0, False
        while not over and (self.max_steps is None or length < self.max_steps):
            shown = torch.from_numpy(
                np.ascontiguousarray(obs, dtype=spec.learner_dtype)[None, None]
            )
            with torch.inference_mode(), learner.drawing_from(rng):
                action = self.act(state, shown.to(learner.device))
            scaled = spec.scale_action(action[0, 0].cpu().numpy())
            chosen: Any = int(scaled) if spec.action_kind == "discrete" else scaled
            step = guarded(spec.env_id, f"step({chosen})", functools.partial(self.env.step, chosen))
            obs, reward, terminated, truncated, _ = step
            self.after()
            total, length, over = total + float(reward), length + 1, terminated or truncated
        return total, length


def _camera(env: AnyEnv, write: Callable[[Frame], None]) -> Callable[[], None]:
    """Return what renders the environment and adds the frame to a video."""
    first: list[tuple[int, ...]] = []

    def shoot() -> None:
        picture = _frame(env)
        first[:] = first or [picture.shape]
        if picture.shape != first[0]:
            raise EnvError(
                f"the environment's render() returns frames {first[0]}, then {picture.shape}; all "
                "frames of a video must have the same size"
            )
        write(picture)

    return shoot


def _frame(env: AnyEnv) -> Frame:
    """Return a frame whose sides are even, as video codecs need them."""
    try:
        picture: Any = env.render()
    except Exception as error:  # drivers of screens raise whatever they like
        raise EnvError(
            f"drawing the environment failed ({described(error)}); on a machine "
            "without a screen MuJoCo needs MUJOCO_GL=egl or osmesa"
        ) from None
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.dtype != np.uint8:
        raise EnvError(
            "the environment's render() does not return an image [height, width, 3] of uint8"
        )
    if min(picture.shape) < 2:
        raise EnvError(f"the environment's render() returns an empty image {picture.shape}")
    height, width = picture.shape[0] // 2 * 2, picture.shape[1] // 2 * 2
    return np.ascontiguousarray(picture[:height, :width, :3], dtype=np.uint8)


def _writer_maker() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - the program that imageio calls
    except ImportError as error:
        raise MissingExtraError(
            f'recording a video needs {error.name}; pip install "rl-training[video]"'
        ) from None

    @contextmanager
    def open_writer(target: Path, fps: int) -> Iterator[Callable[[Frame], None]]:
        if target.suffix == ".gif":
            # A gif counts hundredths of a second.
            writer = imageio.get_writer(target, mode="I", duration=1000 / fps, loop=0)
        else:
            writer = imageio.get_writer(target, fps=fps, macro_block_size=2)
        try:
            yield writer.append_data
        except BaseException:
            # By itself it would not close then, and ffmpeg would continue writing its file.
            with suppress(Exception):
                writer.close()
            raise
        writer.close()

    return open_writer
