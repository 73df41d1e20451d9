"""A learner, its full replay or dataset and the runner that its loop would use, without a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.speed.noise import noise_columns
from bench.speed.pace import Pace
from bench.speed.sizes import OFFLINE, SAC
from bench.speed.timers import Timers
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.sources import OfflineSettings, ReplaySettings
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.frames import CONTINUES
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.layers import set_precision
from rl_training.runtime.compile.runner import Accelerator, ReplayRunner
from rl_training.runtime.recorder import MetricRecorder
from rl_training.runtime.replay import make_replay

PLANNED = 10**9
"""Updates the run is said to have; a benchmark ends when it is told to."""

LEAST_ACTIONS = 2
"""Made-up discrete actions are below this, so that every task has them."""
_CONSTANT = {"continues": 1.0, "truncated": 0.0, "age": 1_000.0, "slot": CONTINUES}
"""Fields of replayed rows that say where episodes begin and end."""
_ONLINE: dict[str, Any] = {"buffer_capacity": SAC.buffer}
_SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("sac", "redq", "droq", "crossq", "tqc"), _ONLINE),
    "simba_v2": _ONLINE | {"hidden_sizes": (512, 512)},
    "cql": {
        "num_critics": OFFLINE.num_critics,
        "num_cql_samples": OFFLINE.cql_samples,
        "cql_alpha": OFFLINE.cql_weight,
    },
    "iql": {"num_critics": OFFLINE.num_critics},
    "td3_bc": {
        "num_critics": OFFLINE.num_critics,
        "policy_delay": OFFLINE.policy_delay,
        "normalize_observations": False,  # as in the peer's defaults
    },
}


def update_config(algo: str, **changes: Any) -> TrainConfig:
    """Return a run of an algorithm with the sizes of the comparison."""
    settings = {
        "batch_size": SAC.batch,
        "hidden_sizes": SAC.hidden,
        "eval_interval": 0,
    } | _SETTINGS[algo]
    if "buffer_capacity" not in settings:
        # The compiling process traces with rows of these shapes; ours are those of the peers.
        settings |= {"dataset_kind": "random", "dataset_size": SAC.buffer}
    return TrainConfig(
        **{
            "algo": algo,
            "env_id": "bench.speed.task:Task",
            "total_timesteps": PLANNED,
            "eval_episodes": 0,
            "checkpoint_interval": 0,
            "tensorboard": False,
            "algo_kwargs": settings | changes.pop("algo_kwargs", {}),
        }
        | changes
    )


def task_spec() -> EnvSpec:
    """Return a task with the sizes of the comparison."""
    return EnvSpec(
        env_id="bench.speed.task:Task",
        obs_shape=(SAC.obs,),
        obs_dtype="float32",
        action_kind="continuous",
        action_shape=(SAC.action,),
        action_dtype="float32",
        action_low=(-1.0,) * SAC.action,
        action_high=(1.0,) * SAC.action,
    )


def build_learner(config: TrainConfig, env: EnvSpec, device: torch.device) -> AnyLearner:
    """Build the learner as `train` does."""
    spec = get_algorithm_spec(config.algo)
    learner = spec.build(env, config.algo_config, config.all_seeds, device)
    set_precision(learner, config.precision)
    return learner


def full_replay(config: TrainConfig, env: EnvSpec, learner: AnyLearner) -> ReplayBuffer:
    """Build the replay of a run and fill it with noise."""
    assert isinstance(config.algo_config, ReplaySettings)
    replay = make_replay(config.algo_config, env, config.num_envs, learner)
    insert_noise(replay, replay.capacity)
    return replay


def noise_buffer(config: TrainConfig, device: torch.device) -> DatasetBuffer:
    """Build the buffer of an offline run from the noise that the peers learn from."""
    assert isinstance(config.algo_config, OfflineSettings)
    noise = noise_columns()
    dataset = OfflineDataset(
        observations=noise["observations"],
        actions=noise["actions"],
        rewards=noise["rewards"],
        next_observations=np.roll(noise["observations"], -1, 0),
        terminations=noise["terminals"] > 0,
        truncations=np.zeros(SAC.buffer, bool),
        learner_units=True,
    )
    return DatasetBuffer(
        dataset, seeds=config.all_seeds, gamma=config.algo_config.gamma, device=device
    )


def insert_noise(replay: ReplayBuffer, count: int) -> None:
    """Insert `count` transitions of noise, no episode ending in them."""
    index = torch.arange(replay.inserted.value, replay.inserted.value + count) % replay.capacity
    index = index.to(replay.device)
    for name, rows in replay.rows.items():
        shape = (rows.shape[0], count, *rows.shape[2:])
        if name in _CONSTANT:
            noise = torch.full(shape, _CONSTANT[name], device=replay.device)
        elif rows.dtype.is_floating_point:
            noise = 0.3 * torch.randn(shape, device=replay.device)
        else:
            highest = 256 if rows.dtype == torch.uint8 else LEAST_ACTIONS
            noise = torch.randint(highest, shape, dtype=rows.dtype, device=replay.device)
        rows.index_copy_(1, index, noise.to(rows.dtype))
    replay.set_inserted(replay.inserted.value + count)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Updates of one learner, ready to run."""

    runner: ReplayRunner
    learner: AnyLearner
    messages: list[str]
    """What the run would have told the user."""

    def close(self) -> None:
        """Stop what was started."""
        self.runner.accelerator.close()

    def sizes(self) -> dict[str, int]:
        """Return what must be equal on all sides: parameters of one seed, rows, batch."""
        learner: Any = self.learner
        model, seeds = learner.model, learner.num_seeds
        parts = {"actor": model.actor, "critics": model.critic}
        if hasattr(model, "value_net"):
            parts["value"] = model.value_net
        found = {
            f"parameters of {name}": sum(p.numel() for p in part.parameters()) // seeds
            for name, part in parts.items()
        }
        if hasattr(model, "log_std"):
            found["parameters of actor"] += model.log_std.numel() // seeds
        return found | {"rows": len(self.runner.replay), "batch": learner.config.batch_size}


def prepare_updates(
    config: TrainConfig, device: torch.device, env: EnvSpec | None = None
) -> Updates:
    """Build everything that the algorithm's loop builds to do its updates."""
    env = env or task_spec()
    learner = build_learner(config, env, device)
    replay: ReplayBuffer
    if isinstance(config.algo_config, OfflineSettings):
        replay = noise_buffer(config, device)
        learner.see_data(replay)
    else:
        replay = full_replay(config, env, learner)
    metrics = list(get_algorithm_spec(config.algo).metrics)
    recorder = MetricRecorder(metrics, len(config.all_seeds), learner.device)
    messages: list[str] = []
    accelerator = Accelerator(config, env, learner, messages.append)
    runner = ReplayRunner(accelerator, learner, replay, recorder, PLANNED)
    return Updates(runner=runner, learner=learner, messages=messages)


@contextmanager
def timing_compiler() -> Iterator[Timers]:
    """Take the time that compiled programs are waited for."""
    timers = Timers()
    with timers.watching([(Accelerator, "programs", "compile")]):
        yield timers


def update_at_pace(pace: Pace, updates: Updates, sizes: dict[str, int]) -> None:
    """Do the first update, which waits for the compiler, then chunks of them."""
    with timing_compiler() as timers:
        updates.runner.update(1)
    pace.tell(compile_seconds=timers.seconds["compile"], messages=updates.messages, sizes=sizes)
    while pace.begin():
        updates.runner.update(pace.settings.chunk)
        pace.end(pace.settings.chunk)
    updates.close()
