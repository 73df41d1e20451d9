"""OGBench's recipes: the authors' format and rewards to the last bit, seeds, and what is reused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.tiny import Outcome, run_cli
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.check import check_dataset
from rl_training.envs.factory import make_env, probe_env
from rl_training.tools.recipes import ogbench
from rl_training.tools.recipes.ogbench import EpisodeMaker, _cells_at, _free_cells, find_recipe

Array = NDArray[Any]
OFFICIAL = pytest.importorskip("ogbench")
OFFICIAL_VERSION = version("ogbench")
MAZE, STEPS = "pointmaze-medium-navigate", 30
ARMS = tuple(
    pytest.param(name, marks=pytest.mark.matrix)
    for name in ("cube-double-play", "scene-noisy", "puzzle-3x3-play")
)
"""To build the simulation of an arm takes a second each time."""


@pytest.fixture(autouse=True)
def short_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every recipe one of 20 episodes of 30 steps, in a folder of its own."""
    short = {
        name: replace(recipe, episodes=20, episode_steps=STEPS)
        for name, recipe in ogbench.RECIPES.items()
    }
    monkeypatch.setattr(ogbench, "RECIPES", short)
    monkeypatch.chdir(tmp_path)


def make(name: str, *arguments: object) -> Outcome:
    return run_cli("data", "make", f"ogbench/{name}", "--jobs", 1, *arguments)


def column(folder: str, name: str) -> Array:
    found: Array = np.load(Path("datasets/ogbench", folder, f"{name}.npy"))
    return found


# Recipes


def test_recipes_are_those_of_the_authors_script() -> None:
    real = ogbench._recipes()
    assert len(real) == 24
    sizes = {name: (r.episodes, r.episode_steps) for name, r in real.items()}
    assert sizes["pointmaze-giant-navigate"] == (500, 2000)
    assert sizes["pointmaze-teleport-stitch"] == (5000, 200)
    assert sizes["cube-triple-noisy"] == (3000, 1000)
    assert sizes["puzzle-4x6-play"] == (5000, 1000)
    assert {r.rows for n, r in real.items() if "pointmaze" in n} == {1_000_000}
    noises = {(r.kind, r.noise, r.p_random_action) for r in real.values()}
    assert noises == {
        ("navigate", 0.5, 0.0),
        ("stitch", 0.5, 0.0),
        ("play", 0.1, 0.0),
        ("noisy", 0.1, 0.1),
        ("noisy", 0.1, 0.2),
    }


@pytest.mark.parametrize(
    ("name", "found", "task"),
    [
        ("cube-single-play", "cube-single-play", None),
        ("cube-single-play-v0", "cube-single-play", None),
        ("scene-play-singletask", "scene-play", 0),
        ("scene-play-singletask-v0", "scene-play", 0),
        ("puzzle-4x4-noisy-singletask-task5-v0", "puzzle-4x4-noisy", 5),
    ],
)
def test_names_are_those_of_ogbench(name: str, found: str, task: int | None) -> None:
    recipe, number = find_recipe(name)
    assert (recipe.name, number) == (found, task)
    assert recipe.env_id(number) in _registered()


def _registered() -> set[str]:
    import gymnasium

    return set(gymnasium.registry)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cube-singel-play", "did you mean cube-single-play"),
        ("antmaze-medium-navigate", "need a trained expert"),
        ("cube-single-play-singletask-task6", "tasks are task1 to task5, got task6"),
        ("", "cannot be made"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(name: str, sentence: str) -> None:
    assert sentence in make(name).sentence()


@pytest.mark.parametrize("maze", ["medium", "large", "giant", "teleport"])
def test_cells_of_a_maze_are_those_of_a_plain_search(maze: str) -> None:
    env: Any = make_env(f"pointmaze-{maze}-v0").unwrapped
    cells, crossings = _free_cells(env.maze_map)
    assert (
        set(cells)
        == {(i, j) for (i, j), wall in np.ndenumerate(env.maze_map) if wall == 0}
        >= set(crossings)
    )
    for cell in cells:
        i, j = cell
        around = [env.maze_map[i + di, j + dj] for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1))]
        assert (cell in crossings) == (around not in ([0, 0, 1, 1], [1, 1, 0, 0]))
        # The package's own search, from this cell.
        _, steps = env.get_oracle_subgoal(env.ij_to_xy(cell), env.ij_to_xy(cell))
        assert sorted(_cells_at(env.maze_map, cell, 4)) == sorted(
            zip(*np.nonzero(steps == 4), strict=True)
        )


# Episodes


@pytest.mark.parametrize("name", [MAZE, ARMS[1]])
def test_an_episode_depends_on_its_arguments_alone(name: str) -> None:
    recipe, _ = find_recipe(name)
    used, fresh = EpisodeMaker(recipe, 3), EpisodeMaker(recipe, 3)
    others = [used("train", 0), used("validation", 1)]
    again, first = used("train", 1), fresh("train", 1)
    for key, values in first.items():
        np.testing.assert_array_equal(again[key], values)
    assert not any(np.array_equal(first["actions"], other["actions"]) for other in others)
    assert not np.array_equal(EpisodeMaker(recipe, 4)("train", 1)["actions"], first["actions"])
    used.close()
    fresh.close()


def test_making_episodes_leaves_numpys_generator_alone() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    EpisodeMaker(find_recipe(MAZE)[0], 0)("train", 0)
    np.testing.assert_array_equal(
        np.random.get_state()[1],  # type: ignore[index]  # noqa: NPY002
        before,
    )


def test_a_lost_cube_is_seen() -> None:
    qpos = np.zeros((5, 25))
    assert ogbench._cube_is_visible(qpos)
    for side, height, visible in ((0.3, 0.0, False), (-0.31, 0.05, False), (-0.31, 0.07, True)):
        changed = qpos.copy()
        changed[3, 15:17] = side, height
        assert ogbench._cube_is_visible(changed) is visible


@pytest.mark.parametrize(
    "name",
    ["pointmaze-large-stitch", pytest.param("cube-single-play", marks=pytest.mark.matrix)],
)
def test_oracles_do_what_they_are_for(name: str) -> None:
    recipe = replace(find_recipe(name)[0], episode_steps=200)
    made = EpisodeMaker(recipe, 0)("train", 0)
    assert np.abs(made["actions"]).max() <= 1.0
    if "maze" in name:
        # Four cells of four units, unless the goal was the start itself.
        assert np.linalg.norm(made["observations"][-1] - made["observations"][0]) > 4.0
    else:
        # The cube has been lifted, and is on the table again.
        height = made["qpos"][:, 16]
        assert height.max() > 0.08
        assert height.min() > 0.0


# Rewards, and the authors' own loader


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("name", [MAZE, *ARMS])
def test_a_single_task_is_what_ogbench_would_load(name: str, tmp_path: Path) -> None:
    done = make(f"{name}-singletask-task3", "--rows", 60, "--no-validation")
    assert done.code == 0, done.err
    ours = load_transition_dataset("npy", path=f"datasets/ogbench/{name}-singletask-task3")

    # The same episodes in the published form: one more row each, and only one kind of end.
    recipe, _ = find_recipe(name)
    maker = EpisodeMaker(recipe, 0)
    published: dict[str, list[Array]] = {}
    for number in range(2):
        episode = maker("train", number)
        episode["terminals"] = np.arange(STEPS + 1) == STEPS
        for key, values in episode.items():
            extra = () if len(values) == STEPS + 1 else values[-1:]
            published.setdefault(key, []).append(
                np.concatenate([values, extra]) if len(extra) else values
            )
    columns = {key: np.concatenate(values) for key, values in published.items()}
    for file in ("data.npz", "data-val.npz"):
        np.savez(tmp_path / file, allow_pickle=False, **columns)
    env, theirs, _ = OFFICIAL.make_env_and_datasets(
        f"{name}-singletask-task3-v0", dataset_path=str(tmp_path / "data.npz")
    )
    assert env.unwrapped._reward_task_id == ours.provenance["task"] == 3
    for key in ("observations", "actions", "next_observations", "rewards"):
        np.testing.assert_array_equal(getattr(ours, key), theirs[key], strict=True)
    np.testing.assert_array_equal(ours.terminations, theirs["masks"] == 0)
    np.testing.assert_array_equal(ours.truncations, theirs["terminals"] == 1)


def test_rewards_are_what_the_task_itself_pays() -> None:
    """-1 per step in the maze until the goal is near, which is a termination."""
    make(f"{MAZE}-singletask-task1", "--rows", 600, "--no-validation")
    env: Any = make_env("pointmaze-medium-singletask-task1-v0")
    env.reset(seed=0)
    goal = np.array(env.unwrapped.cur_goal_xy)
    folder = f"{MAZE}-singletask-task1"
    near = np.linalg.norm(column(folder, "observations") - goal, axis=1) <= 1.0
    np.testing.assert_array_equal(column(folder, "rewards"), np.where(near, 0.0, -1.0))
    np.testing.assert_array_equal(column(folder, "terminations"), near)
    assert column(folder, "truncations").nonzero()[0].tolist() == list(range(29, 600, 30))


@pytest.mark.matrix
def test_the_default_task_is_ogbenchs() -> None:
    done = make("cube-single-play-singletask", "--rows", 30, "--no-validation")
    meta = json.loads(Path("datasets/ogbench/cube-single-play-singletask/meta.json").read_text())
    assert meta["env"] == done.values["env"] == "cube-single-singletask-v0"
    assert meta["provenance"]["task"] == 2


# What is written


def test_the_rows_fit_their_task_and_have_no_fault() -> None:
    done = make(f"{MAZE}-singletask", "--fraction", 0.5)
    assert done.code == 0, done.err
    assert (done.values["transitions"], done.values["trajectories"]) == ("300", "10")
    assert done.values["validation_transitions"] == "30"
    spec = probe_env(done.values["env"])
    dataset = load_transition_dataset(
        "npy", path=done.values["dataset_path"], env_spec=spec, mark_ends=False
    )
    assert dataset.digest() == done.values["digest"] == dataset.provenance["digest"]
    faults = [f for f in check_dataset(dataset, spec) if f.level != "note"]
    assert not faults
    shown = run_cli("data", "inspect", done.values["dataset_path"])
    assert f"ogbench/{MAZE}" in shown.out
    assert not list(Path("datasets/ogbench").glob(".*"))


def test_where_it_came_from_is_kept_in_every_format() -> None:
    make(MAZE, "--rows", 30, "--no-validation")
    first = load_transition_dataset("npy", path=f"datasets/ogbench/{MAZE}").provenance
    assert first["versions"]["ogbench"] == OFFICIAL_VERSION
    assert (first["seed"], first["episodes"], first["noise"]) == (0, 1, 0.5)
    for name in ("data.npz", "data.hdf5"):
        if name.endswith("hdf5"):
            pytest.importorskip("h5py")
        assert run_cli("data", "convert", f"datasets/ogbench/{MAZE}", name).code == 0
        kind = name.partition(".")[2]
        assert load_transition_dataset(kind, path=name).provenance == first


def test_the_same_command_again_takes_what_is_there() -> None:
    first = make(MAZE, "--rows", 60)
    again = make(MAZE, "--rows", 60)
    assert (first.values["made"], again.values["made"]) == ("now", "before")
    assert first.values["digest"] == again.values["digest"]
    other = make(MAZE, "--rows", 90).sentence()
    assert "exists already and is something else (episodes 2 instead of 3)" in other
    assert make(MAZE, "--rows", 90, "--force").values["transitions"] == "90"


def test_single_tasks_share_the_rows_that_are_there() -> None:
    make(MAZE, "--rows", 60, "--seed", 5)
    done = make(f"{MAZE}-singletask-task2")  # neither size nor seed: those of what is there
    assert done.code == 0, done.err
    assert done.values["transitions"] == "60"
    for name in ("observations", "actions", "next_observations"):
        ours = Path("datasets/ogbench", f"{MAZE}-singletask-task2", f"{name}.npy")
        assert ours.samefile(Path("datasets/ogbench", MAZE, f"{name}.npy"))
    assert make(f"{MAZE}-singletask-task2").values["made"] == "before"
    assert "seed 5 instead of 1" in make(f"{MAZE}-singletask-task2", "--seed", 1).sentence()
    assert "episodes 2 instead of 1" in make(f"{MAZE}-singletask", "--rows", 1).sentence()


def test_what_belongs_to_somebody_else_is_not_replaced() -> None:
    folder = Path("datasets/ogbench", MAZE)
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    assert "exists already" in make(MAZE, "--rows", 30, "--no-validation").sentence()
    done = make(MAZE, "--rows", 30, "--no-validation", "--force")
    assert "has other things in it" in done.err.splitlines()[-1]
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rows", 10, "--fraction", 0.5), "either --rows or --fraction"),
        (("--rows", 0), "--rows must be >= 1"),
        (("--fraction", 1.5), "--fraction must be above 0 and at most 1"),
        (("--fraction", "nan"), "--fraction must be above 0 and at most 1"),
    ],
)
def test_wrong_sizes_are_one_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    assert sentence in make(MAZE, *arguments).sentence()


def test_other_families_are_one_sentence() -> None:
    assert "cannot be made" in run_cli("data", "make", "d4rl/hopper").sentence()
    assert "say what to make" in run_cli("data", "make").sentence()
    assert "ogbench/scene-noisy" in run_cli("data", "make", "--list").out


def test_a_file_in_the_way_of_the_folder_is_one_sentence() -> None:
    Path("datasets").write_text("")
    assert "cannot be written" in make(MAZE, "--rows", 30).sentence()


def test_two_commands_do_not_work_on_one_set() -> None:
    from filelock import FileLock

    folder = Path("datasets/ogbench").absolute()
    folder.mkdir(parents=True)
    with FileLock(folder / f".{MAZE}.parts.lock"):
        assert "another command is at work" in make(MAZE, "--rows", 30).sentence()


@pytest.mark.matrix
def test_jobs_change_no_bit_of_real_episodes() -> None:
    alone = make("cube-single-play", "--rows", 90, "--out", "alone").values
    together = run_cli(
        "data", "make", "ogbench/cube-single-play", "--rows", 90, "--out", "both", "--jobs", 2
    ).values
    assert alone["digest"] == together["digest"]


# The environments


@pytest.mark.parametrize(
    "env_id",
    [
        "pointmaze-teleport-singletask-v0",
        pytest.param("scene-singletask-v0", marks=pytest.mark.matrix),
    ],
)
def test_a_seed_is_a_whole_episode(env_id: str) -> None:
    def episode(before: int) -> Array:
        env = make_env(env_id)
        rng = np.random.default_rng(7)
        if before:
            env.reset(seed=before)
            for _ in range(20):
                env.step(rng.uniform(-1, 1, env.action_space.shape or ()))
        rng = np.random.default_rng(7)
        seen = [env.reset(seed=1)[0]]
        seen += [env.step(rng.uniform(-1, 1, env.action_space.shape or ()))[0] for _ in range(20)]
        seen.append(env.reset()[0])
        env.close()
        return np.array(seen)

    np.testing.assert_array_equal(episode(0), episode(9))


def test_an_unknown_task_names_the_nearest() -> None:
    from rl_training.errors import EnvError

    with pytest.raises(EnvError, match="did you mean cube-single-v0"):
        make_env("cube-singel-v0")


@pytest.mark.matrix
def test_iql_learns_from_it_and_is_judged_by_success() -> None:
    made = make(f"{MAZE}-singletask", "--rows", 60, "--no-validation").values
    done = run_cli(
        *("train", "--algo", "iql", "--env", made["env"], "--total-timesteps", 20, "--quiet"),
        *("-s", f"dataset_path={made['dataset_path']}", "-s", "hidden_sizes=[8]"),
        *("-s", "batch_size=8", "-s", "eval_episodes=2", "-s", "env_kwargs.max_episode_steps=5"),
        *("-s", "device=cpu", "--seeds", "0,1"),
    )
    assert done.code == 0, done.err
    assert done.values["eval_success_rate"] == "0.0000"
    assert done.values["eval_return_mean"] == "-5.0000"
