"""Cells of the suites: methods on tasks, and for offline ones on data sets, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl_training.data.datasets.scores import SCORE
from rl_training.experiment.summary import SUCCESS

RETURN = "eval_return_mean"
"""Metric: mean return of an evaluation during training."""
LAST = "last_checkpoint_return_mean"
"""Metric: mean return of the last checkpoint, 100 episodes from common start states."""
FIGURES = {
    "return": (RETURN, LAST),
    "score": (SCORE, "last_checkpoint_score"),
    "success": (SUCCESS, "last_checkpoint_success_rate"),
}
"""What a task is judged by: its metric during training, and that of the last checkpoint."""
MUJOCO = ("halfcheetah", "hopper", "walker2d", "ant", "humanoid")
FIVE, THREE, EIGHT = tuple(range(2000, 2005)), tuple(range(2000, 2003)), tuple(range(2000, 2008))
"""Seeds that chose no setting."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A method on a task."""

    suite: str
    preset: str
    steps: int
    seeds: tuple[int, ...]
    data: str = ""
    """Data set that it learns from, as `rl-training data make` names it."""
    settings: tuple[str, ...] = field(default=(), repr=False)
    """What the paper changes for this task or data set."""
    figure: str = "return"
    """One of `FIGURES`."""
    label: str = ""
    """Name of the task or its data, where it is not that of the preset."""

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.preset.partition("/")[0]

    @property
    def task(self) -> str:
        """Task of the preset: `halfcheetah`, `pong`."""
        return self.preset.partition("/")[2].removesuffix("_atari")

    @property
    def short(self) -> str:
        """Name in tables, records and `--tasks`: `pong`, `ant_v4`, `hopper-medium`."""
        return self.label or self.task

    @property
    def slug(self) -> str:
        """Name of the record's files."""
        return f"{self.method}-{self.short}"

    @property
    def evaluated(self) -> str:
        """Metric of its evaluations during training."""
        return FIGURES[self.figure][0]

    @property
    def last(self) -> str:
        """Metric of its last checkpoints."""
        return FIGURES[self.figure][1]

    def all_settings(self, data: Path) -> list[str]:
        """Return what differs from the preset.

        Args:
            data: Folder in which `data make` puts data sets.
        """
        path = [f"algo_kwargs.dataset_path={data / self.data}"] if self.data else []
        return [*self.settings, *path]


def _cells(
    suite: str, method: str, tasks: Sequence[str], steps: int, seeds: Sequence[int]
) -> list[Cell]:
    return [
        Cell(suite=suite, preset=f"{method}/{task}", steps=steps, seeds=tuple(seeds))
        for task in tasks
    ]


VALUE_BASED = ("dqn", "qr_dqn", "iqn", "fqf")
MILLION = 1_000_000
LEVELS = ("medium", "medium-replay", "medium-expert")
OF_DATA = {
    # By method and task, for each of `LEVELS`: ReBRAC as in CORL, MOPO as in its authors' code.
    ("rebrac", "halfcheetah"): (
        ("beta_actor=0.001", "beta_critic=0.01"),
        ("beta_actor=0.01", "beta_critic=0.001"),
        ("beta_actor=0.01", "beta_critic=0.1"),
    ),
    ("rebrac", "hopper"): (
        ("beta_actor=0.01", "beta_critic=0.01"),
        ("beta_actor=0.05", "beta_critic=0.5"),
        ("beta_actor=0.1", "beta_critic=0.01"),
    ),
    ("rebrac", "walker2d"): (
        ("beta_actor=0.05", "beta_critic=0.1"),
        ("beta_actor=0.05", "beta_critic=0.01"),
        ("beta_actor=0.01", "beta_critic=0.01"),
    ),
    ("mopo", "halfcheetah"): (
        ("rollout_horizon=1", "penalty_coef=1"),
        ("rollout_horizon=5", "penalty_coef=1"),
        ("rollout_horizon=5", "penalty_coef=5"),
    ),
    ("mopo", "hopper"): (
        ("rollout_horizon=5", "penalty_coef=5"),
        ("rollout_horizon=5", "penalty_coef=1"),
        ("rollout_horizon=5", "penalty_coef=1"),
    ),
    ("mopo", "walker2d"): (
        ("rollout_horizon=5", "penalty_coef=5"),
        ("rollout_horizon=1", "penalty_coef=1"),
        ("rollout_horizon=1", "penalty_coef=2"),
    ),
}
TARGET_ENTROPY = {"halfcheetah": -3, "hopper": -1, "walker2d": -3}
"""MOPO's, as in MBPO's code."""
MANIPULATION = {
    "cube_single": "cube-single",
    "cube_double": "cube-double",
    "scene": "scene",
    "puzzle_3x3": "puzzle-3x3",
    "puzzle_4x4": "puzzle-4x4",
}


def _locomotion() -> list[Cell]:
    """Return the cells of data sets that `data make locomotion/...` makes."""
    cells = []
    for method in ("iql", "td3_bc", "rebrac", "cql", "mopo"):
        for task, env_id in (
            ("halfcheetah", "HalfCheetah-v5"),
            ("hopper", "Hopper-v5"),
            ("walker2d", "Walker2d-v5"),
        ):
            common = [f"env_id={env_id}"]
            common += [f"target_entropy={TARGET_ENTROPY[task]}"] if method == "mopo" else []
            own = OF_DATA.get((method, task), ((),) * len(LEVELS))
            cells += [
                Cell(
                    suite="locomotion",
                    preset=f"{method}/halfcheetah",
                    steps=MILLION,
                    seeds=FIVE,
                    data=f"locomotion/{task}-{level}",
                    settings=(*common, *settings),
                    figure="score",
                    label=f"{task}-{level}",
                )
                for level, settings in zip(LEVELS, own, strict=True)
            ]
    return cells


def _manipulation() -> list[Cell]:
    """Return the cells of what `data make ogbench/...` makes, each with its default task."""
    return [
        replace(cell, data=f"ogbench/{MANIPULATION[cell.short]}-play-singletask", figure="success")
        for method in ("fql", "rebrac", "iql", "bc")
        for cell in _cells("manipulation", method, tuple(MANIPULATION), MILLION, EIGHT)
    ]


SUITE: tuple[Cell, ...] = (
    *_cells("mujoco", "sac", MUJOCO, MILLION, FIVE),
    # Published figures are of v4, whose Ant and Humanoid are other tasks than those of v5.
    *(
        replace(cell, label=f"{cell.task}_v4", settings=(f"env_id={cell.task.title()}-v4",))
        for cell in _cells("mujoco", "sac", ("ant", "humanoid"), MILLION, FIVE)
    ),
    *_cells("mujoco", "ppo", MUJOCO, MILLION, FIVE),
    *_cells("atari", "ppo", ("pong_atari", "breakout_atari"), 10 * MILLION, THREE),
    *_cells("mujoco", "td3", MUJOCO, MILLION, FIVE),
    *_cells("mujoco-300k", "crossq", MUJOCO, 300_000, FIVE),
    *_cells("mujoco-300k", "redq", MUJOCO[:3], 300_000, FIVE),
    *_cells("mujoco-300k", "droq", MUJOCO[:3], 300_000, FIVE),
    *_cells("mujoco", "simba_v2", ("hopper", "walker2d", "ant"), MILLION, FIVE),
    *_cells("mujoco", "tqc", ("humanoid",), MILLION, FIVE),
    *_cells("mujoco", "fast_td3", ("halfcheetah", "humanoid"), 12_800_000, FIVE),
    *(
        cell
        for method in VALUE_BASED
        for cell in _cells("atari", method, ("pong_atari",), 2 * MILLION, THREE)
    ),
    *_cells("pixels", "dreamer", ("pong_atari", "boxing_atari", "breakout_atari"), 100_000, THREE),
    *(
        cell
        for method in VALUE_BASED
        for cell in _cells("atari", method, ("breakout_atari",), 10 * MILLION, THREE)
    ),
    *_cells(
        "atari",
        "ppo",
        ("qbert_atari", "seaquest_atari", "space_invaders_atari"),
        10 * MILLION,
        THREE,
    ),
    *_locomotion(),
    *_manipulation(),
)
"""All cells in the order in which they get time on an accelerator."""
SUITES = tuple(dict.fromkeys(cell.suite for cell in SUITE))
