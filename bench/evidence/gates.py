"""The learning gates: for every method a task, a budget and what ten seeds must reach.

The figure of a seed is the mean return of 100 episodes with the **last** checkpoint, from start
states that are the same for all seeds.  A gate has two bars: for the interquartile mean over the
seeds, and for the worst of them.  None of the seeds may have had a part in choosing a preset's
settings: a gate whose settings change after its seeds were seen takes others.  `make evidence` runs
all gates and writes what they reached into docs/results.md; `make learn` runs the quick ones as
tests, on three of the ten seeds and against the bar of the worst alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rl_training.cli.commands import parse_seeds
from rl_training.errors import ConfigError
from rl_training.experiment import zoo
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.resources import ASSETS
from rl_training.validation import suggest

Cost = Literal["quick", "medium"]
"""Three seeds on two cores: up to ten minutes, or up to half an hour."""
SEEDS = tuple(range(1000, 1010))
"""Those that are reported, unless a gate names others."""
FRESH_SEEDS = tuple(range(1100, 1110))
"""Those of a gate whose settings were changed once its figures on `SEEDS` had been seen."""
NUM_QUICK_SEEDS = 3
"""So many of a gate's seeds are those of `make learn`."""
QUICK_SEEDS = SEEDS[:NUM_QUICK_SEEDS]
EPISODES, EPISODE_SEED = zoo.EPISODES, zoo.EPISODE_SEED
"""Of a seed's figure: how many, and the seed of their start states."""
DATA_VARIABLE = "RL_DATA"
"""Names the folder with recorded data where no option does."""
CIRCUMSTANCES = ("accelerate", "device", "threads", "vector_mode")
"""Settings that a gate may be run with on a given machine without being another gate."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What one method must learn."""

    preset: str
    steps: int
    """Budget of a seed, in the preset's unit: environment steps, offline gradient steps."""
    iqm_bar: float
    """Least interquartile mean of the seeds' mean returns."""
    bar: float
    """Least mean return of the worst seed."""
    random: float
    """What a random policy gets: the mean of 1,000 episodes."""
    cost: Cost
    chosen_on: tuple[int, ...]
    """Seeds on which the preset's settings were looked at before they were as they are."""
    settings: tuple[str, ...] = ()
    """What differs from the preset, as `--set` takes it."""
    data: str | None = None
    """File of recorded data that it learns from."""
    data_key: str = "dataset"
    """How the settings that name the data begin."""
    seeds: tuple[int, ...] = SEEDS
    """Those that are reported."""
    episodes: int = EPISODES

    @property
    def algo(self) -> str:
        """Name of the method."""
        return self.preset.partition("/")[0]

    @property
    def slug(self) -> str:
        """Name of the gate's files."""
        return self.preset.replace("/", "-")

    def overrides(self, data: str | None) -> tuple[str, ...]:
        """Return the settings that change the preset, the data at this place among them."""
        if self.data is None:
            return self.settings
        key = f"algo_kwargs.{self.data_key}"
        return (*self.settings, f"{key}_kind=npz", f"{key}_path={data}")

    def config(self, folder: Path | None, circumstances: Sequence[str] = ()) -> TrainConfig:
        """Return the run of all seeds side by side, on the data in this folder."""
        path = None if folder is None or self.data is None else str(folder / self.data)
        changes = {"seeds": list(self.seeds), "total_timesteps": self.steps, "run_name": self.slug}
        return load_config(self.preset, (*self.overrides(path), *circumstances), changes)

    def trained(self) -> dict[str, Any]:
        """Return task, budget and all settings that are given, the preset's among them.

        By this a record is known to be of the gate as it stands: presets change.
        """
        changes = {"total_timesteps": self.steps}
        config = load_config(self.preset, self.overrides(self.data), changes)
        names = ("env_id", "env_kwargs", "num_envs", "total_timesteps", "algo_kwargs")
        return {name: getattr(config, name) for name in names}

    def commands(self, circumstances: Sequence[str] = ()) -> tuple[str, ...]:
        """Return what a user types to train the same runs, and to evaluate them."""
        words = ["rl-training", "train", "--config", self.preset]
        words += ["--seeds", seeds_text(self.seeds)]
        if load_config(self.preset).total_timesteps != self.steps:
            words += ["--total-timesteps", str(self.steps)]
        sets = (*self.overrides(self.data), *circumstances, f"run_name={self.slug}")
        words += [word for text in sets for word in ("--set", text)]
        evaluation = (
            f"rl-training eval --checkpoint runs/{self.slug} --episodes {self.episodes} "
            f"--seed {EPISODE_SEED}"
        )
        return shlex.join(words), evaluation

    def missing(self, folder: Path | None) -> str | None:
        """Return why the gate cannot be run, where its data is not there."""
        if self.data is None or (folder is not None and (folder / self.data).is_file()):
            return None
        where = "no folder with data is named" if folder is None else f"{folder} does not hold it"
        return (
            f"{self.preset} is skipped: it learns from {self.data}, and {where}; name the folder "
            f"with --data or {DATA_VARIABLE}"
        )


def seeds_text(seeds: Sequence[int]) -> str:
    """Return seeds as `--seeds` takes them: `0..7` where they follow one another."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) > 1 and list(seeds) == list(range(first, last + 1)):
        return f"{first}..{last}"
    return ",".join(map(str, seeds))


SUFFIX = ".gate.yaml"
"""A gate is declared beside its preset: `sac/pendulum.gate.yaml` holds that of `sac/pendulum`."""


def _read_gates() -> tuple[Gate, ...]:
    root = ASSETS / "configs"
    gates = []
    for path in sorted(root.rglob(f"*{SUFFIX}")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        preset = path.relative_to(root).as_posix().removesuffix(SUFFIX)
        values["settings"] = tuple(values.get("settings", ()))
        for name in {"chosen_on", "seeds"} & values.keys():
            values[name] = _seeds(values[name])
        gates.append(Gate(preset=preset, **values))
    return tuple(gates)


def _seeds(entries: Sequence[int | str]) -> tuple[int, ...]:
    """Read a list of seeds and of ranges such as `10..12`, both ends included."""
    return tuple(seed for entry in entries for seed in parse_seeds(str(entry)))


GATES = _read_gates()


def quick_gates() -> tuple[Gate, ...]:
    """Return the gates that `make learn` runs."""
    return tuple(gate for gate in GATES if gate.cost == "quick")


def find_gates(names: Sequence[str]) -> tuple[Gate, ...]:
    """Return the gates of these names, presets or methods, in the table's order; all for none.

    Raises:
        ConfigError: When there is no such gate.
    """
    known = {word for gate in GATES for word in (gate.preset, gate.algo)}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{name!r} is not a learning gate{suggest(name, known)}; name a method or its "
                "preset, or none for all"
            )
    return tuple(gate for gate in GATES if not names or {gate.preset, gate.algo} & set(names))
