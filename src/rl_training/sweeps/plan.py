"""Which runs a sweep has: presets, values of any setting, seeds; every combination is a job."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.errors import ConfigError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.sweeps.jobs import Job, make_job

LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Everything a sweep varies, and what all its runs share."""

    configs: tuple[str, ...]
    """Presets or YAML files."""
    grid: tuple[str, ...] = ()
    """`key=value,value,...` texts; the key is one that `--set` takes, or a setting's own name."""
    seeds: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()
    """`key=value` texts for every run."""

    def jobs(self, folder: Path) -> list[Job]:
        """Return the jobs, seeds innermost; everything is checked before anything runs.

        Raises:
            ConfigError: For a mistake in any of the runs.
        """
        axes = [split_axis(text) for text in self.grid]
        names = [name for name, _ in axes]
        if len(set(names)) != len(names):
            raise ConfigError("--grid names a setting twice; put all its values into one")
        jobs = []
        for source in self.configs:
            for values in itertools.product(*(values for _, values in axes)):
                point = dict(zip(names, values, strict=True))
                config = load_point(source, point, self.overrides)
                for seed in self.seeds:
                    one = config.replace(seed=seed, seeds=None)
                    jobs.append(make_job(one, folder, job_name(source, point, seed)))
        _require_different(jobs)
        return jobs


def load_point(source: str, point: dict[str, str], overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration at a point: the preset, what all share, then the point's values."""
    sets = [*overrides, *(f"{full_key(name)}={value}" for name, value in point.items())]
    config = load_config(source, sets, may_import=True)
    if config.grid:
        raise ConfigError(f"{source} has a grid of its own; name its values by --grid instead")
    return config


def full_key(name: str) -> str:
    """Return the key that `--set` takes: a plain name that is not a field is a setting's."""
    return name if "." in name or name in TrainConfig.model_fields else f"algo_kwargs.{name}"


def split_axis(text: str) -> tuple[str, list[str]]:
    """Read `key=value,value`; commas inside brackets belong to a value.

    Raises:
        ConfigError: When the text is of another form.
    """
    name, separator, rest = text.partition("=")
    values = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", rest)]
    if not separator or not name or not all(values):
        raise ConfigError(f"{text!r} must look like learning_rate=1e-4,3e-4")
    if len(set(values)) != len(values):
        raise ConfigError(f"{text!r} names a value twice")
    return name, values


def job_name(source: str, point: dict[str, str], seed: int) -> str:
    """Return the name of a run's folder, the same whenever it is asked for."""
    path = Path(source)
    stem = path.stem if path.is_file() else path.as_posix().removesuffix(".yaml")
    parts = [stem, *(f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in point.items())]
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", "-".join(parts))
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:10]
        name = f"{name[: LONGEST_NAME - 11]}-{digest}"
    return f"{name}-seed_{seed}"


def _require_different(jobs: Sequence[Job]) -> None:
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two runs of the sweep would be called {twice[0]}; give each configuration and value "
            "once"
        )
