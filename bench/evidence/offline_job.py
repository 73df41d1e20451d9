"""One training of the offline table, as all sides read it; peers import this in their environment.

`python -m bench.evidence.offline_job MODULE JOB FILE` trains by the module's `train_offline`,
evaluates, and writes the returns to standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Policy = Callable[[Array], Array]
"""From observations `[B, ...]` to actions `[B, A]` in the task's units."""
FIRST_EPISODE = 10_000
"""Seed of the first evaluation episode; the others follow it, the same for every job."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Sizes and budget of a method, the same on all sides."""

    updates: int
    batch: int = 256
    hidden: tuple[int, ...] = (256, 256)
    learning_rate: float = 3e-4
    tau: float = 0.005
    reward_scale: float = 0.1
    weight: float
    """`cql_alpha` of CQL, `beta` of IQL, `bc_alpha` of TD3+BC."""


METHODS = {
    "cql": Method(
        updates=6_000, batch=128, hidden=(128, 128), learning_rate=1e-3, tau=0.02, weight=0.3
    ),
    "iql": Method(updates=12_000, weight=10.0),
    "td3_bc": Method(
        updates=12_000, batch=128, hidden=(128, 128), learning_rate=1e-3, tau=0.02, weight=6.0
    ),
}
"""As in the presets for Pendulum, of TD3+BC and IQL as they were when both sides were compared;
started in this order, those that take longest first."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One method on one dataset with one seed on one side."""

    side: str
    """`ours`, the name of a peer, or that with ` defaults`: the peer's own rates and weights."""
    method: str
    data: str
    """Name and digest of the dataset."""
    seed: int
    env_id: str = "Pendulum-v1"
    updates: int
    batch: int
    hidden: tuple[int, ...]
    learning_rate: float
    tau: float
    reward_scale: float
    weight: float
    episodes: int = 20
    accelerate: str = "off"
    """How our updates run."""

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"hidden": tuple(values["hidden"])})

    def to_json(self) -> str:
        """Write all of it, in one spelling, so that it also serves as a key."""
        return json.dumps(asdict(self), sort_keys=True)


def make_job(side: str, method: str, data: str, seed: int, **more: Any) -> Job:
    """Return a job with the method's sizes and budget; `more` replaces some."""
    settings = asdict(METHODS[method]) | more
    return Job(side=side, method=method, data=data, seed=seed, **settings)


def evaluate(policy: Policy, env_id: str, episodes: int) -> list[float]:
    """Return the returns of whole episodes, whose seeds are the same for every policy."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(env_id)
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=FIRST_EPISODE + episode)
        total, over = 0.0, False
        while not over:
            action = policy(np.asarray(obs, np.float32)[None])[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def main() -> None:
    """Train, evaluate what was trained last, and answer."""
    module, text, path = sys.argv[1:4]
    # Libraries print to standard output; the answer must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    job, start = Job.from_json(text), time.perf_counter()
    policy = importlib.import_module(module).train_offline(job, path)
    seconds = time.perf_counter() - start
    returns = evaluate(policy, job.env_id, job.episodes)
    answers.write(json.dumps({"returns": returns, "training_seconds": seconds}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
