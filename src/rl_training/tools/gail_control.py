"""Does an imitating run imitate?  The same run with experts that show nothing, and the gap.

A reward that is never negative pays for staying alive, one that is never positive for ending soon,
whoever the expert was.  Where a control does as well as the real demonstrations, that is what was
learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.datasets.expert_config import ExpertSettings, load_expert
from rl_training.data.datasets.writers import save_dataset
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.train import train
from rl_training.tools.collect import CollectPlan, collect_dataset

REAL, SHUFFLED, RANDOM = "real", "shuffled", "random"


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """What came of one kind of expert."""

    experts: str
    run_dir: Path
    returns: tuple[float, ...]
    """Final evaluation of each seed, by the environment's own reward."""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.returns))


@dataclass(frozen=True, kw_only=True)
class ControlReport:
    """The three runs, and what the data itself returned."""

    rows: tuple[ControlRow, ...]
    expert_return: float
    """Mean return of the demonstrated episodes."""
    random_return: float
    """Mean return of a uniformly random policy."""

    def gap(self, row: ControlRow) -> float:
        """How much better the run with real experts is than this one."""
        return self.rows[0].mean - row.mean

    def share(self, row: ControlRow) -> float:
        """The gap as a share of what lies between a random policy and the expert."""
        width = abs(self.expert_return - self.random_return)
        return self.gap(row) / max(width, 1e-9)

    def imitates(self, least: float) -> bool:
        """Whether both controls fall behind by at least this share."""
        return all(self.share(row) >= least for row in self.rows[1:])


def run_controls(
    config: TrainConfig,
    *,
    callbacks: Callable[[str], Sequence[Callback]] = lambda _: (),
) -> ControlReport:
    """Train three times: with real experts, with shuffled actions, with a random policy's data.

    Args:
        config: A run of GAIL with real demonstrations.
        callbacks: Gives the observers of the run whose kind of experts it is told.

    Raises:
        ConfigError: When it is not such a run.
        DataError: When the demonstrations cannot be read.
    """
    settings = _checked(config)
    task = probe_env(config.env_id, config.env_kwargs)
    expert = load_expert(settings, task)
    plan = CollectPlan(
        env_id=config.env_id,
        env_kwargs=config.env_kwargs,
        steps=max(len(expert), 1_000),
        seed=settings.expert_dataset_seed,
    )
    drawn = collect_dataset(plan)
    path = Path(config.output_dir) / f"random-experts-{config.env_id.replace('/', '-')}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_dataset(drawn, path, "npz", force=True)
    whole = {"expert_trajectories": None, "expert_subsample": 1, "expert_dataset_id": None}
    changes: dict[str, dict[str, Any]] = {
        REAL: {},
        SHUFFLED: {"expert_shuffle_actions": True},
        RANDOM: whole | {"expert_dataset_kind": "npz", "expert_dataset_path": str(path.resolve())},
    }
    rows = []
    for experts, change in changes.items():
        changed = config.replace(algo_kwargs=config.algo_kwargs | change)
        result = train(changed, run_suffix=experts, callbacks=callbacks(experts))
        members = result.per_seed or (result,)
        returns = tuple(float(member.metrics["eval_return_mean"]) for member in members)
        rows.append(ControlRow(experts=experts, run_dir=result.run_dir, returns=returns))
    return ControlReport(
        rows=tuple(rows),
        expert_return=float(expert.episode_returns().mean()),
        random_return=float(drawn.episode_returns().mean()),
    )


def _checked(config: TrainConfig) -> ExpertSettings:
    settings = config.algo_config
    if not isinstance(settings, ExpertSettings):
        raise ConfigError(f"gail-control needs a configuration of algo gail, got {config.algo!r}")
    if settings.expert_dataset_kind == "random":
        raise ConfigError(
            "gail-control needs real demonstrations, but algo_kwargs.expert_dataset_kind is "
            "random; give it npz, npy, hdf5 or minari with a path or an id"
        )
    if settings.expert_shuffle_actions:
        raise ConfigError(
            "algo_kwargs.expert_shuffle_actions is true, but gail-control shuffles by itself; "
            "leave it out"
        )
    if config.eval_episodes == 0:
        raise ConfigError(
            "gail-control compares evaluations, but eval_episodes is 0; use 5 or more"
        )
    return settings
