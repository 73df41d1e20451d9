"""Every item of a checkpoint counts (R3): without it nothing loads, changed it changes the run.

A state is found by walking attributes; these tests walk what was found and take each leaf away, and
change each leaf, one at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.faults import Tried, final_state, leaves, setting
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import RLTrainingError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import LoadedCheckpoint, open_checkpoint
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime import workflows
from rl_training.runtime.checkpoints.saver import Saver, usable
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import small_config

Leaf = tuple[Any, ...]
SAMPLE = setting("LEAVES", 12)
CUT, END = 70, 130


def at(tree: Any, path: Leaf) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed_value(value: Any) -> Any:
    """Another value of the same type and shape."""
    if isinstance(value, torch.Tensor):
        return torch.from_numpy(np.array(changed_value(value.cpu().numpy())))
    if isinstance(value, np.ndarray):
        other = np.array(value)
        first = other.reshape(-1)
        if first.size:
            first[0] = not first[0] if other.dtype == np.bool_ else first[0] + 1
        return other
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 1 if value is None else f"{value}x"


def same_leaves(tree: Any) -> Any:
    """Copy the mappings and lists of a state, but not what they hold."""
    if isinstance(tree, dict):
        return {key: same_leaves(value) for key, value in tree.items()}
    return [same_leaves(value) for value in tree] if isinstance(tree, list) else tree


def without(tree: Any, path: Leaf) -> Any:
    tree = same_leaves(tree)
    del at(tree, path[:-1])[path[-1]]
    return tree


def with_change(tree: Any, path: Leaf) -> Any:
    tree = same_leaves(tree)
    at(tree, path[:-1])[path[-1]] = changed_value(at(tree, path))
    return tree


def is_empty(value: Any) -> bool:
    """A tensor without elements, such as metrics that wait for nothing, has nothing to change."""
    return isinstance(value, torch.Tensor | np.ndarray) and 0 in value.shape


@pytest.fixture(scope="module", params=algorithm_names())
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """An algorithm, the parts of a run of it that was cut, and where it is."""
    parts: dict[str, Any] = {}
    original = Saver.save

    def save(self: Saver, step: int, found: Any, **options: Any) -> Any:
        parts.update(found)
        return original(self, step, found, **options)

    folder = tmp_path_factory.mktemp("inventory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", save)
        result = train(
            small_config(request.param, folder, run_name="cut", total_timesteps=END), stop_at=CUT
        )
    return request.param, parts, result.run_dir


def load(part: Any, name: str, state: Any) -> None:
    with usable(name, "test"):
        part.load_state_dict(state)


@pytest.mark.expensive
def test_without_any_leaf_nothing_loads(
    run: tuple[str, dict[str, Any], Path], tried: Tried
) -> None:
    algo, parts, _ = run
    count, silent = 0, []
    for name, part in parts.items():
        state = copy.deepcopy(part.state_dict())
        for leaf in leaves(state):
            if at(state, leaf) is None and "attributes" in leaf:
                continue  # what an environment has not (a window), a snapshot need not have
            count += 1
            try:
                load(part, name, without(state, leaf))
            except RLTrainingError:
                load(part, name, same_leaves(state))
            else:
                silent.append((name, *leaf))
    tried("leaf of a state taken away", algo, count, len(silent))
    assert silent == []
    assert count > 20


@pytest.mark.expensive
def test_every_leaf_is_taken_over_or_refused(
    run: tuple[str, dict[str, Any], Path], tried: Tried
) -> None:
    algo, parts, _ = run
    count, ignored = 0, []
    for name, part in parts.items():
        state = copy.deepcopy(part.state_dict())
        for leaf in leaves(state):
            if is_empty(at(state, leaf)):
                continue
            count += 1
            other = with_change(state, leaf)
            try:
                load(part, name, other)
            except RLTrainingError:
                pass  # a changed digest, version or count is found out, which is as good
            else:
                if not compare_states(at(part.state_dict(), leaf), at(state, leaf)):
                    ignored.append((name, *leaf))
            load(part, name, same_leaves(state))
    tried("leaf of a state changed", algo, count, len(ignored))
    assert ignored == []


@pytest.mark.parametrize(
    ("env_id", "module"),
    [("Hopper-v5", "mujoco"), ("FrozenLake-v1", None), ("ALE/Breakout-v5", "ale_py")],
)
def test_no_leaf_of_an_environment_can_be_missing(
    env_id: str, module: str | None, tried: Tried
) -> None:
    if module is not None:
        pytest.importorskip(module)
    envs = SeedVectorEnv.make(env_id, {})
    envs.reset()
    action = np.zeros((1, 1, *envs.spec.action_shape), envs.spec.action_dtype)
    envs.step(action)
    state = envs.snapshot()
    # What is inside the value of an attribute is that value's own affair.
    depth = {"attributes": 2, "wrappers": 3}
    names = {
        leaf[: min((leaf.index(key) + n for key, n in depth.items() if key in leaf), default=99)]
        for leaf in leaves(state)
    }
    silent = []
    for leaf in names:
        try:
            with usable("environment", "test"):
                envs.restore(without(state, leaf))
        except RLTrainingError:
            continue
        if at(state, leaf) is not None:
            silent.append(leaf)
    envs.close()
    tried("leaf of an environment taken away", env_id, len(names), len(silent))
    assert silent == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_changed_leaf_changes_the_end_of_the_run(
    run: tuple[str, dict[str, Any], Path], tried: Tried, tmp_path: Path
) -> None:
    """The comparison that proves an exact resume would see each of them."""
    algo, _, cut = run
    shutil.copytree(cut, tmp_path / "cut")
    resume_training(tmp_path / "cut")
    expected = final_state(tmp_path / "cut")
    states = open_checkpoint(cut).states
    paths = [leaf for leaf in leaves(states) if not is_empty(at(states, leaf))]
    chosen = random.Random(algo).sample(paths, min(SAMPLE, len(paths)))
    unseen = [leaf for leaf in chosen if ends_alike(cut, tmp_path, leaf, expected)]
    tried("changed leaf seen at the end", algo, len(chosen), len(unseen))
    assert unseen == []


def ends_alike(cut: Path, folder: Path, leaf: Leaf, expected: dict[str, Any]) -> bool:
    target = folder / "changed"
    shutil.copytree(cut, target)
    original = open_checkpoint

    def opened(path: Path, **options: Any) -> LoadedCheckpoint:
        loaded = original(path, **options)
        return dataclasses.replace(loaded, states=with_change(loaded.states, leaf))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workflows, "open_checkpoint", opened)
            resume_training(target)
        return compare_states(expected, final_state(target)) == []
    except RLTrainingError:
        return False
    finally:
        shutil.rmtree(target)
