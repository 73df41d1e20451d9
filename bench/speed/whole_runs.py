"""Rows `loop-*` and `gpu-seeds`: whole runs through `train()`, and where their time goes.

Evaluations are part of a run, as often as its preset asks for them; what does not grow with its
length (compiling, the checkpoint at the end) is told beside the figure. Clocks around methods tell
where the time goes until a little after half-time; the figure is that of the rest, without them.
The same environments with random actions and nothing else, timed right after the run, tell how fast
it could be at best.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.speed.accelerator import (
    choose_accelerate,
    choose_device,
    device_name,
    failing_softly,
    synchronizer,
)
from bench.speed.compare import FALLBACK
from bench.speed.figures import Figure
from bench.speed.options import Options
from bench.speed.rows import Row
from bench.speed.timers import Timers, Watched
from rl_training.algorithms.base import OnPolicyLearner
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.compile.cuda_graph import CapturedPolicy, CapturedUpdates
from rl_training.runtime.compile.runner import Accelerator, ModelRunner, ReplayRunner, RolloutRunner
from rl_training.runtime.phases.imagination import ImaginationPhase
from rl_training.runtime.session import Session
from rl_training.runtime.train import train
from rl_training.transfer import HostCopy


@dataclass(frozen=True)
class Run:
    """What a row trains."""

    preset: str
    steps: int
    """Environment steps per seed."""
    seeds: tuple[int, ...] = (1,)
    """Numbers of seeds side by side, each measured by itself."""
    overrides: tuple[str, ...] = ()
    precision: str = "bf16"


OVERRIDES = (
    "eval_episodes=0",
    "algo_kwargs.eval_interval=0",
    "algo_kwargs.learning_starts=500",
    "algo_kwargs.buffer_capacity=100000",
)
_SOON = ("algo_kwargs.learning_starts=500",)
_HUMANOID = ("env_id=Humanoid-v5", "algo_kwargs.buffer_capacity=100000")
_CHEETAHS = (
    *("env_id=HalfCheetah-v5", "num_envs=64", "algo_kwargs.minibatch_size=4096"),
    # As the preset was when this was first measured.
    *("algo_kwargs.normalize_rewards=false", "algo_kwargs.recompute_advantages=false"),
)
_GAMES = ("vector_mode=native", "eval_episodes=0")
_DQN = (*_GAMES, "algo_kwargs.learning_starts=2000")
_DREAMER = ("eval_episodes=0", "algo_kwargs.learning_starts=256")
_MBPO = ("eval_episodes=0", "algo_kwargs.learning_starts=1000")
RUNS: dict[str, Run] = {
    "loop-sac": Run("sac/halfcheetah", 50_000, (1, 32), _SOON),
    "loop-sac-overlap": Run("sac/halfcheetah", 50_000, (1, 32), (*_SOON, "overlap=true")),
    "loop-humanoid": Run("sac/halfcheetah", 12_500, (16,), (*_SOON, *_HUMANOID)),
    "loop-ppo-cheetah": Run("ppo/hopper", 500_000, (4,), _CHEETAHS, "tf32"),
    "loop-ppo-breakout": Run(
        "ppo/breakout_atari",
        200_000,
        overrides=(*_GAMES, "num_envs=64", "algo_kwargs.minibatch_size=2048"),
    ),
    "loop-dqn-breakout": Run("dqn/breakout_atari", 60_000, overrides=_DQN),
    "loop-dqn-overlap": Run("dqn/breakout_atari", 60_000, overrides=(*_DQN, "overlap=true")),
    "loop-dreamer": Run("dreamer/pong_atari", 4_000, overrides=_DREAMER),
    "loop-mbpo": Run("mbpo/hopper", 4_000, (5,), _MBPO, "tf32"),
}
WATCHED: tuple[Watched, ...] = (
    (SeedVectorEnv, "step", "environments"),
    (ReplayRunner, "act", "acting"),
    (RolloutRunner, "sample", "acting"),
    (HostCopy, "array", "waiting for actions"),
    (ReplayRunner, "update", "updates"),
    (ReplayRunner, "begin", "updates"),
    (ReplayRunner, "take_in", "storing, updates, acting"),
    (OnPolicyLearner, "update", "updates"),
    (Accelerator, "programs", "compiling"),
    (CapturedUpdates, "__init__", "compiling"),
    (CapturedPolicy, "capture", "compiling"),
    (ReplayBuffer, "add_step", "replay insertion"),
    (ModelRunner, "fit", "fits of the model"),
    (ImaginationPhase, "_refresh", "roll-outs"),
    (Session, "log", "logging"),
    (Session, "evaluate", "evaluation"),
    (Session, "save", "saving"),
)
NOT_STEPPING = ("compiling", "saving")
"""Labels that do not grow with the length of a run."""
_FREQUENT = (
    "environments",
    "acting",
    "waiting for actions",
    "updates",
    "storing, updates, acting",
    "replay insertion",
)
FREQUENT = [method for method in WATCHED if method[2] in _FREQUENT]
"""Methods that are called in every step."""


class _Watch(Callback):
    """Times the halves of a run, and keeps what it says."""

    def __init__(self, timers: Timers, steps: int) -> None:
        self.num_envs = 1
        self.messages: list[str] = []
        self.seconds = 0.0
        """From the first step to the end."""
        self.shares: dict[str, float] = {}
        """Seconds by label of the first half."""
        self.first_steps = 0
        """Steps of the first half."""
        self.stepping = 0.0
        """Seconds of the second half, without what does not grow with the length of a run."""
        self._start = self._half = 0.0
        self._timers, self._steps = timers, steps

    def on_start(self, state: TrainerState) -> None:
        """Start the clocks."""
        self._timers.restart()
        self._start = self._half = time.perf_counter()

    def on_log(self, state: TrainerState, values: Mapping[str, float]) -> None:
        """Take the clocks away after half-time, where an evaluation may have been."""
        if not self.first_steps and 2 * state.step > self._steps:
            self._timers.leave(FREQUENT)
            self.shares, self.first_steps = dict(self._timers.seconds), state.step
            self._half = time.perf_counter()

    def on_message(self, state: TrainerState, text: str) -> None:
        """Keep a message."""
        self.messages.append(text)

    def on_end(self, state: TrainerState) -> None:
        """Stop the clock."""
        now, seconds = time.perf_counter(), self._timers.seconds
        self.seconds = now - self._start
        fixed = sum(seconds[label] - self.shares.get(label, 0.0) for label in NOT_STEPPING)
        self.stepping = now - self._half - fixed


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Run each number of seeds once, and with `--profile` once more to split the device's time.

    The second run waits for the device at every change of label, which alone tells what it is busy
    with but makes the run slower. Without it, time is the host's: it waits for the device where it
    needs an action.
    """
    device = choose_device(row.name, options)
    run = RUNS.get(row.name) or Run(options.preset, 5_000, (1, 32), OVERRIDES, "fp32")
    if options.steps is not None:
        run = replace(run, steps=options.steps)
    run = replace(run, overrides=(*run.overrides, *options.overrides))
    for count in options.seeds or run.seeds:
        for precision in options.precisions or (run.precision,):
            yield failing_softly(
                partial(_measure_one, row, options, run, device, count, precision),
                partial(_figure, row, count, precision, {}),
            )


def _measure_one(
    row: Row, options: Options, run: Run, device: torch.device, count: int, precision: str
) -> Figure:
    timers = Timers()
    watch = _run(options, run, device, count, precision, timers)
    spent, split = timers.seconds, watch.shares
    if device.type == "cuda" and options.profile:
        synchronized = Timers(synchronizer(device))
        split = _run(options, run, device, count, precision, synchronized).shares
    shares = _shares(split)
    steps = run.steps - watch.first_steps
    rate, alone = count * steps / watch.stepping, _environments_alone(options, run, device, count)
    notes = [m for m in watch.messages if FALLBACK in m]
    notes.append(
        f"{steps:,} steps of {count} seed{'s' if count > 1 else ''} in {watch.stepping:.1f} s, "
        f"{run.steps:,} in {watch.seconds:.1f} s with {spent['compiling']:.1f} s to compile and "
        f"{spent['saving']:.1f} s to save at the end"
    )
    notes.append(f"its environments alone: {alone:,.0f} env steps/s; {rate / alone:.0%} of that")
    passes = watch.first_steps / watch.num_envs
    notes.append(
        ", ".join(
            f"{label} {100 * share:.0f}% ({1e6 * split[label] / passes:.0f})"
            for label, share in shares.items()
        )
        + " (microseconds per step of all environments)"
    )
    extra = {
        "steps": run.steps,
        "device": device_name(device),
        "wall_seconds": watch.seconds,
        "seconds": dict(spent),
        "seconds_synchronized": dict(split),
        "shares": shares,
        "environments_alone": alone,
    }
    samples = {choose_accelerate(device, options): [rate]}
    return _figure(row, count, precision, samples, notes=notes, extra=extra)


def _figure(
    row: Row,
    count: int,
    precision: str,
    samples: Mapping[str, Sequence[float]],
    *,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Figure:
    return Figure(
        row=row.name,
        label=f"{row.name} {count} {precision}",
        unit="env steps/s",
        samples=samples,
        bar=row.bars.get("one" if count == 1 else "many"),
        notes=tuple(notes),
        extra={"seeds": count, "precision": precision} | dict(extra or {}),
    )


def _run(
    options: Options,
    run: Run,
    device: torch.device,
    count: int,
    precision: str,
    timers: Timers,
) -> _Watch:
    watch = _Watch(timers, run.steps)
    with tempfile.TemporaryDirectory() as folder:
        changes = {"precision": precision, "output_dir": folder}
        config = _config(options, run, device, count, **changes)
        watch.num_envs = config.num_envs
        with timers.watching(WATCHED):
            train(config, callbacks=[watch])
    return watch


def _config(
    options: Options, run: Run, device: torch.device, count: int, **changes: Any
) -> TrainConfig:
    own: dict[str, Any] = {
        "seeds": list(range(count)),
        "total_timesteps": run.steps,
        "device": str(device),
        "threads": options.threads,
        "accelerate": choose_accelerate(device, options),
        "checkpoint_interval": 0,
        "log_interval": max(1, run.steps // 10),
        "tensorboard": False,
    }
    return load_config(run.preset, run.overrides, own | changes)


def _environments_alone(
    options: Options, run: Run, device: torch.device, count: int, seconds: float = 3.0
) -> float:
    """Environment steps per second of a run's environments with random actions."""
    config = _config(options, run, device, count)
    envs = SeedVectorEnv.make(
        config.env_id,
        config.env_kwargs,
        config.num_envs,
        config.all_seeds,
        config.vector_mode,
        threads=config.env_threads,
    )
    rng = np.random.default_rng(0)
    shape = (64, envs.num_seeds, envs.num_envs)
    actions: NDArray[Any]
    if envs.spec.num_actions is None:
        actions = rng.uniform(-1, 1, (*shape, *envs.spec.action_shape)).astype(np.float32)
    else:
        actions = rng.integers(0, envs.spec.num_actions, shape)
    try:
        envs.reset()
        for action in actions:
            envs.step(action)
        steps, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            envs.step(actions[steps % len(actions)])
            steps += 1
        return steps * envs.num_seeds * envs.num_envs / spent
    finally:
        envs.close()


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Shares of the time that grows with the steps, largest first."""
    stepping = {label: spent for label, spent in seconds.items() if label not in NOT_STEPPING}
    total = sum(stepping.values())
    return {
        label: stepping[label] / total for label in sorted(stepping, key=lambda x: -stepping[x])
    }
