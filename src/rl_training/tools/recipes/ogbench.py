"""OGBench's datasets by the authors' recipes (Park et al., 2024, arXiv:2410.20092).

Environments and scripted oracles are those of the `ogbench` package; episodes, noise and lengths
are those of `data_gen_scripts/commands.sh` in the authors' repository.  One deviation: there, one
generator runs through all episodes; here, each episode has its own seed, so that it is the same
whoever makes it and whenever.  The data has the published distribution, not the published bits.

Processes that make episodes import this module, so it imports no PyTorch.
Shapes: T transitions of an episode, q positions, v velocities, b buttons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_training.envs.factory import close_env, make_env
from rl_training.envs.ogbench import numpy_seeded, register_ogbench
from rl_training.envs.spec import AnyEnv
from rl_training.errors import DataError
from rl_training.validation import suggest

Array = NDArray[Any]
Kind = Literal["play", "noisy", "navigate", "stitch"]
Cell = tuple[int, int]
SPLITS = ("train", "validation")
STITCH_CELLS = 4
"""Steps through the maze from start to goal in `stitch` data."""
NUM_TASKS = 5
"""Each environment has tasks 1 to 5."""
_NAME = re.compile(r"(.+?)(-singletask(?:-task(\d+))?)?(?:-v0)?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one dataset is made."""

    name: str
    """As OGBench calls it, without `-v0`: `cube-single-play`."""
    env: str
    """`cube-single`."""
    kind: Kind
    episodes: int
    """Published number of training episodes; for validation it is a tenth."""
    episode_steps: int
    """Transitions of an episode.  The authors record one more observation and drop its row."""
    noise: float
    """Standard deviation of the noise on actions (mazes), or its level in the oracles."""
    p_random_action: float = 0.0
    """Share of steps with a random action in place of the oracle's."""

    @property
    def rows(self) -> int:
        """Published number of training rows."""
        return self.episodes * self.episode_steps

    def env_id(self, task: int | None = None) -> str:
        """Return the id of the environment, or of one of its single tasks (0: the default)."""
        suffix = "" if task is None else "-singletask" if task == 0 else f"-singletask-task{task}"
        return f"{self.env}{suffix}-v0"


def _recipes() -> dict[str, Recipe]:
    found = []
    for maze, long_episodes in (("medium", 1), ("large", 1), ("giant", 2), ("teleport", 1)):
        env = f"pointmaze-{maze}"
        shape = {"episodes": 1000 // long_episodes, "episode_steps": 1000 * long_episodes}
        found += [
            Recipe(name=f"{env}-navigate", env=env, kind="navigate", noise=0.5, **shape),
            Recipe(
                name=f"{env}-stitch",
                env=env,
                kind="stitch",
                noise=0.5,
                episodes=5000,
                episode_steps=200,
            ),
        ]
    arms = {
        "cube-single": (1000, 0.1),
        "cube-double": (1000, 0.1),
        "cube-triple": (3000, 0.1),
        "scene": (1000, 0.1),
        "puzzle-3x3": (1000, 0.2),
        "puzzle-4x4": (1000, 0.2),
        "puzzle-4x5": (3000, 0.2),
        "puzzle-4x6": (5000, 0.2),
    }
    for env, (episodes, p_random_action) in arms.items():
        shape = {"episodes": episodes, "episode_steps": 1000}
        found += [
            Recipe(name=f"{env}-play", env=env, kind="play", noise=0.1, **shape),
            Recipe(
                name=f"{env}-noisy",
                env=env,
                kind="noisy",
                noise=0.1,
                p_random_action=p_random_action,
                **shape,
            ),
        ]
    return {recipe.name: recipe for recipe in found}


RECIPES = _recipes()


def find_recipe(name: str) -> tuple[Recipe, int | None]:
    """Return the recipe that a name means, and the number of its single task.

    Args:
        name: `cube-single-play`, `cube-single-play-singletask` (task 0, the default one) or
            `cube-single-play-singletask-task2`; a final `-v0` may be there.

    Raises:
        DataError: When there is no such recipe or task, with the nearest name.
    """
    parts = _NAME.fullmatch(name)
    base = name if parts is None else parts[1]
    if parts is None or base not in RECIPES:
        raise DataError(
            f"ogbench/{name} cannot be made{suggest(base, RECIPES)}; `rl-training data make "
            "--list` shows all (mazes of ants and humanoids need a trained expert)"
        )
    if parts[2] is None:
        return RECIPES[base], None
    task = 0 if parts[3] is None else int(parts[3])
    if parts[3] is not None and not 1 <= task <= NUM_TASKS:
        raise DataError(f"ogbench/{name}: tasks are task1 to task{NUM_TASKS}, got task{task}")
    return RECIPES[base], task


@dataclass
class EpisodeMaker:
    """Makes episodes of a recipe, each by itself; its environment is made at the first one."""

    recipe: Recipe
    seed: int
    _env: AnyEnv | None = field(default=None, init=False)

    def __call__(self, split: str, number: int) -> dict[str, Array]:
        """Make an episode; the same arguments give the same bits.

        Returns:
            Columns `observations [T + 1, ...]` (the last one is the successor of row T - 1),
            `actions`, `qpos [T, q]`, `qvel [T, v]` and, where there are buttons,
            `button_states [T, b]`.
        """
        # An episode of the scene in which the cube was lost is made again from its next seed.
        for attempt in range(1000):
            key = [self.seed, SPLITS.index(split), number, attempt]
            start, noise = np.random.SeedSequence(key).generate_state(2).tolist()
            with numpy_seeded(noise):
                columns = self._episode(int(start), np.random.default_rng([noise, 1]))
            if self.recipe.env != "scene" or _cube_is_visible(columns.pop("all_qpos")):
                columns.pop("all_qpos", None)
                return columns
        raise DataError(f"ogbench/{self.recipe.name}: episode {number} loses its cube every time")

    @property
    def env(self) -> AnyEnv:
        """The environment, in which no goal ends an episode."""
        if self._env is None:
            register_ogbench(f"ogbench/{self.recipe.name}")
            kwargs: dict[str, Any] = {
                "terminate_at_goal": False,
                "max_episode_steps": self.recipe.episode_steps + 1,
            }
            if self.recipe.kind in ("play", "noisy"):
                kwargs["mode"] = "data_collection"
            self._env = make_env(self.recipe.env_id(), kwargs)
        return self._env

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            close_env(self._env, self.recipe.env_id())
            self._env = None

    def _episode(self, start: int, rng: np.random.Generator) -> dict[str, Array]:
        if self.recipe.kind in ("play", "noisy"):
            return _manipulated(self.recipe, self.env, start, rng)
        return _navigated(self.recipe, self.env, start, rng)


@dataclass
class _Record:
    """The steps of an episode."""

    observations: list[Array] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)
    qpos: list[Array] = field(default_factory=list)
    qvel: list[Array] = field(default_factory=list)
    button_states: list[Array] = field(default_factory=list)

    def add(self, obs: Array, action: Array, info: dict[str, Any]) -> None:
        """Note a step by the info that it gave, which knows the state before it."""
        self.observations.append(obs)
        self.actions.append(action)
        self.qpos.append(info["prev_qpos"])
        self.qvel.append(info["prev_qvel"])
        if "prev_button_states" in info:
            self.button_states.append(info["prev_button_states"])

    def columns(self, last: Array) -> dict[str, Array]:
        """Return the columns; `last` is the observation after the last step."""
        found = {
            "observations": np.array([*self.observations, last], np.float32),
            "actions": np.array(self.actions, np.float32),
            "qpos": np.array(self.qpos, np.float32),
            "qvel": np.array(self.qvel, np.float32),
        }
        if self.button_states:
            found["button_states"] = np.array(self.button_states, np.int8)
        return found


# The robot arm


def _manipulated(
    recipe: Recipe, env: AnyEnv, start: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Let oracles work on one random target after the other."""
    base: Any = env.unwrapped
    oracles = _oracles(recipe, env)
    obs, info = env.reset(seed=start)
    low, high = STACKING.get(recipe.env, (0.5, 0.5))
    p_stack = rng.uniform(low, high)
    xi = rng.uniform(0, recipe.noise)
    """Noise of this episode where the oracle is Markovian."""
    deviation = xi * np.array([1.0, 1.0, 1.0, 3.0, 10.0])
    oracle = oracles[info["privileged/target_task"]]
    oracle.reset(obs, info)
    record = _Record()
    for _ in range(recipe.episode_steps):
        if rng.random() < recipe.p_random_action:
            action = rng.uniform(-1.0, 1.0, 5)
        else:
            action = np.array(oracle.select_action(obs, info))
            if recipe.kind == "noisy":
                action = action + rng.normal(0.0, deviation)
        action = np.clip(action, -1.0, 1.0)
        successor, _, _, _, info = env.step(action)
        if oracle.done:
            oracle_obs, oracle_info = base.set_new_target(p_stack=p_stack)
            oracle = oracles[oracle_info["privileged/target_task"]]
            oracle.reset(oracle_obs, oracle_info)
        record.add(obs, action, info)
        obs = successor
    columns = record.columns(obs)
    columns["all_qpos"] = np.array([*record.qpos, info["qpos"]])
    return columns


STACKING = {
    "cube-single": (0.0, 0.0),
    "cube-double": (0.0, 0.25),
    "cube-triple": (0.05, 0.35),
}
"""Range of an episode's probability that a target is on top of another cube."""


def _oracles(recipe: Recipe, env: AnyEnv) -> dict[str, Any]:
    """Return the oracle of each kind of target, with the settings of the authors' script."""
    from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle
    from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
    from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle
    from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle
    from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
    from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
    from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
    from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle

    makers: dict[str, Callable[..., Any]]
    if recipe.kind == "play":
        settings = {"env": env, "noise": recipe.noise, "noise_smoothing": 0.5}
        makers = {
            "cube": CubePlanOracle,
            "button": ButtonPlanOracle,
            "drawer": DrawerPlanOracle,
            "window": WindowPlanOracle,
        }
    else:
        settings = {"env": env, "min_norm": 0.4}
        makers = {
            "cube": CubeMarkovOracle,
            "button": ButtonMarkovOracle,
            "drawer": DrawerMarkovOracle,
            "window": WindowMarkovOracle,
        }
    family = recipe.env.partition("-")[0]
    if family == "cube":
        return {"cube": makers["cube"](**settings)}
    if family == "puzzle":
        return {"button": makers["button"](**settings, gripper_always_closed=True)}
    found = {name: make(**settings) for name, make in makers.items() if name != "cube"}
    limit = {"max_step": 100} if recipe.kind == "noisy" else {}
    return found | {"cube": makers["cube"](**settings, **limit)}


def _cube_is_visible(qpos: Array) -> bool:
    """Whether the scene's cube never lay where no camera sees it, unless in the drawer."""
    side, height = qpos[:, 15], qpos[:, 16]
    too_far_left = (side <= -0.3) & ((height < 0.06) | (height > 0.08))
    return not ((side >= 0.29).any() or too_far_left.any())


# The point in a maze


def _navigated(
    recipe: Recipe, env: AnyEnv, start: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Walk towards random goals by the shortest way, with noise."""
    base: Any = env.unwrapped
    cells, crossings = _free_cells(base.maze_map)
    begin = cells[rng.integers(len(cells))]
    if recipe.kind == "navigate":
        goal = crossings[rng.integers(len(crossings))]
    else:
        near = _cells_at(base.maze_map, begin, STITCH_CELLS)
        goal = near[rng.integers(len(near))] if near else begin
    task = {"task_info": {"init_ij": begin, "goal_ij": goal}}
    obs, _ = env.reset(seed=start, options=task)
    record = _Record()
    for _ in range(recipe.episode_steps):
        place = base.get_xy()
        subgoal, _ = base.get_oracle_subgoal(place, base.cur_goal_xy)
        direction = (subgoal - place) / (np.linalg.norm(subgoal - place) + 1e-6)
        action = np.clip(direction + rng.normal(0.0, recipe.noise, direction.shape), -1.0, 1.0)
        successor, _, _, _, info = env.step(action)
        if info["success"] and recipe.kind == "navigate":
            base.set_goal(crossings[rng.integers(len(crossings))])
        record.add(obs, action, info)
        obs = successor
    return record.columns(obs)


def _free_cells(maze: Array) -> tuple[list[Cell], list[Cell]]:
    """Return all cells without a wall, and those of them that are not a straight corridor."""
    cells = [(int(i), int(j)) for i, j in np.argwhere(maze == 0)]
    crossings = []
    for i, j in cells:
        vertical = (maze[i - 1, j], maze[i + 1, j])
        horizontal = (maze[i, j - 1], maze[i, j + 1])
        if {(vertical, horizontal), (horizontal, vertical)} & {((0, 0), (1, 1))}:
            continue
        crossings.append((i, j))
    return cells, crossings


def _cells_at(maze: Array, start: Cell, distance: int) -> list[Cell]:
    """Return the cells to which the shortest way has so many steps."""
    seen, border = {start}, [start]
    for _ in range(distance):
        reached: list[Cell] = []
        for i, j in border:
            around: Sequence[Cell] = ((i - 1, j), (i, j - 1), (i + 1, j), (i, j + 1))
            fresh = [cell for cell in around if maze[cell] == 0 and cell not in seen]
            seen.update(fresh)
            reached += fresh
        border = reached
    return border
