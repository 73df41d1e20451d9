"""Which method takes which spaces: what `AlgorithmSpec.spaces` claims works, all else is refused.

The suite of the package goes through tasks with all kinds of parts at once; here each kind of
observation and of action stands alone, for every method, and what is not claimed is tried too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.envs import SpacesEnv
from helpers.tiny import run_cli
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.gail import GAIL
from rl_training.envs.observing import with_rows
from rl_training.envs.spec import EnvSpec
from rl_training.errors import SpecMismatch
from rl_training.experiment.checkpoint.codec import MAX_TENSORS
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.replay import load_buffer
from rl_training.testing import contract
from rl_training.testing.contract import make_batch, nearest_allowed, random_obs, small_settings

Space = spaces.Space[Any]
NUMBERS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
PICTURE = spaces.Box(0, 255, (2, 10, 10), np.uint8)
OBSERVATIONS: dict[str, tuple[Space, tuple[str, ...]]] = {
    "Box": (NUMBERS, ("vector",)),
    "Dict of vectors": (
        spaces.Dict(a=NUMBERS, b=spaces.Box(0, 9, (2, 2), np.float64)),
        ("vector", "parts"),
    ),
    "Tuple": (spaces.Tuple((NUMBERS, spaces.Discrete(3))), ("vector", "parts")),
    "Discrete": (spaces.Discrete(5, start=2), ("vector", "parts")),
    "Discrete of many values": (spaces.Discrete(600), ("many values",)),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), ("vector", "parts")),
    "MultiBinary": (spaces.MultiBinary(4), ("vector", "parts")),
    "image": (PICTURE, ("image",)),
    "Dict with an image": (spaces.Dict(camera=PICTURE, x=NUMBERS), ("image among parts",)),
    "image with channels last": (
        spaces.Dict(camera=spaces.Box(0, 255, (10, 10, 2), np.uint8)),
        ("image among parts",),
    ),
}
"""Spaces of observations, and what a method must claim to take them."""
ACTIONS: dict[str, tuple[Space, tuple[str, ...]]] = {
    "Discrete": (spaces.Discrete(3, start=-1), ("Discrete",)),
    "Box": (spaces.Box(-2.0, 1.0, (2,)), ("Box",)),
    "Box of two axes": (spaces.Box(-1.0, 3.0, (2, 3), np.float64), ("Box",)),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 2], start=[1, 0]), ("MultiDiscrete",)),
    "MultiDiscrete of two axes": (
        spaces.MultiDiscrete(np.array([[2, 3], [2, 2]])),
        ("MultiDiscrete",),
    ),
    "MultiBinary": (spaces.MultiBinary(3), ("MultiDiscrete",)),
    "masked Discrete": (spaces.Discrete(3, start=-1), ("Discrete", "mask")),
    "masked MultiDiscrete": (spaces.MultiDiscrete([3, 2], start=[1, 0]), ("MultiDiscrete", "mask")),
}


class WithMask(SpacesEnv):
    """Any spaces, with masks."""

    def action_masks(self) -> Any:
        raise AssertionError("nobody plays it")


@cache
def task_of(observation: str, action: str) -> EnvSpec:
    """A task of these spaces, by what says so."""
    kind = WithMask if action.startswith("masked") else SpacesEnv
    env = kind(OBSERVATIONS[observation][0], ACTIONS[action][0])
    return EnvSpec.from_env(with_rows(env, "mine"), "mine")


def is_claimed(algo: str, observation: str, action: str) -> bool:
    claims = get_algorithm_spec(algo).spaces
    needed = [*OBSERVATIONS[observation][1], *ACTIONS[action][1]]
    if action.startswith("masked") and observation == "image":
        needed = [*ACTIONS[action][1], "image among parts"]  # beside its mask it is a part
    return all(claims[name] for name in needed)


def settings_of(algo: str) -> Any:
    spec = get_algorithm_spec(algo)
    return spec.config_class(**small_settings(spec))


def pairs(*, of_actions: bool) -> Iterator[tuple[str, str, str]]:
    """Every observation with the method's first kind of action, or every action with a vector."""
    for algo in algorithm_names():
        if of_actions:
            yield from ((algo, "Box", action) for action in ACTIONS)
        else:
            claims = get_algorithm_spec(algo).spaces
            first = next(kind for kind in ("Discrete", "Box") if claims[kind])
            yield from ((algo, observation, first) for observation in OBSERVATIONS)


ALONE = [*pairs(of_actions=False), *pairs(of_actions=True)]
TOGETHER = [
    (algo, observation, action)
    for algo in algorithm_names()
    for observation in OBSERVATIONS
    for action in ACTIONS
]


def check_refusal(algo: str, observation: str, action: str, settings: Any) -> None:
    """What is not claimed is refused in one sentence, which says what is wrong and allowed."""
    spec, task = get_algorithm_spec(algo), task_of(observation, action)
    with pytest.raises(SpecMismatch) as told:
        spec.check_env(task, settings)
    sentence = str(told.value)
    assert "\n" not in sentence
    assert sentence.startswith(f"{algo} ")
    assert "mine" in sentence, "the task"
    if task.action_kind not in spec.action_kinds:
        assert task.action_kind in sentence, "what it has"
        assert " or ".join(spec.action_kinds) in sentence, "what is allowed"
    elif task.observation is not None:
        unfit = [leaf for leaf in task.observation.leaves if leaf.kind not in spec.leaf_kinds]
        assert unfit
        assert all(leaf.name in sentence for leaf in unfit), "which parts"
        assert "it takes numbers" in sentence
    else:
        assert f"shape {task.obs_shape}" in sentence
        assert f"with {spec.obs_ndims[0]} ax" in sentence


@pytest.mark.parametrize("algo", algorithm_names())
def test_every_pair_of_spaces_is_taken_or_refused_as_claimed(algo: str) -> None:
    spec, settings = get_algorithm_spec(algo), settings_of(algo)
    for observation in OBSERVATIONS:
        for action in ACTIONS:
            if is_claimed(algo, observation, action):
                spec.check_env(task_of(observation, action), settings)
            else:
                check_refusal(algo, observation, action, settings)


@pytest.mark.expensive
@pytest.mark.parametrize("algo", algorithm_names())
def test_networks_are_built_for_every_claimed_pair(algo: str) -> None:
    """Without memory: shapes alone."""
    spec, settings = get_algorithm_spec(algo), settings_of(algo)
    for observation in OBSERVATIONS:
        for action in ACTIONS:
            if is_claimed(algo, observation, action):
                learner = spec.outline(task_of(observation, action), settings, MAX_TENSORS)
                assert learner.masks_actions == action.startswith("masked")


def test_some_pairs_are_claimed_and_some_are_not() -> None:
    claimed = [pair for pair in TOGETHER if is_claimed(*pair)]
    for names in (algorithm_names(), OBSERVATIONS, ACTIONS):
        assert all(any(name in pair for pair in claimed) for name in names)
    assert 0.2 < len(claimed) / len(TOGETHER) < 0.6
    assert is_claimed("ppo", "Dict with an image", "masked MultiDiscrete")
    assert not is_claimed("dreamer", "Box", "masked Discrete")
    assert not is_claimed("cql", "image", "Box")


def built(algo: str, task: EnvSpec) -> AnyLearner:
    learner = get_algorithm_spec(algo).build(task, settings_of(algo), (0,))
    if isinstance(learner, GAIL):
        learner.attach(load_buffer(learner, task)[0])
    return learner


def check_learns(algo: str, observation: str, action: str) -> None:
    """It acts validly, whether it explores or not, and an update gives finite metrics."""
    task = task_of(observation, action)
    learner = built(algo, task)
    obs = random_obs(task, (1, 6), torch.Generator().manual_seed(0))
    box = ACTIONS[action][0]
    for explore in (False, True):
        with torch.inference_mode():
            chosen = learner.act(obs, explore=explore)
        for one in task.scale_action(chosen[0].numpy()):
            assert box.contains(one), (one, box)
        assert not task.mask_size or torch.equal(nearest_allowed(task, obs, chosen), chosen)
    result = learner.update(make_batch(algo, task, (0,)))
    assert all(math.isfinite(value) for value in result.metrics.values()), dict(result.metrics)


@pytest.mark.expensive(only=("ppo", "dqn", "td3_bc"))
@pytest.mark.parametrize(
    ("algo", "observation", "action"), [pair for pair in dict.fromkeys(ALONE) if is_claimed(*pair)]
)
def test_claimed_spaces_are_acted_and_learned_on(algo: str, observation: str, action: str) -> None:
    check_learns(algo, observation, action)


@pytest.mark.matrix
@pytest.mark.parametrize("algo", algorithm_names())
def test_all_claimed_pairs_are_acted_and_learned_on(algo: str) -> None:
    for observation in OBSERVATIONS:
        for action in ACTIONS:
            if is_claimed(algo, observation, action):
                check_learns(algo, observation, action)


OWN = SpacesEnv.__module__
WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("ppo", f"{OWN}:WordsEnv", {}, r"part 'words' of its observation space is Text\(1, 5"),
    (
        "dqn",
        f"{OWN}:MaskedEnv",
        {"mask": [1, 0]},
        r"a mask of 2 entries, but .* Discrete\(3\) needs 3",
    ),
    ("dqn", f"{OWN}:MaskedEnv", {"mask": [0, 0, 0]}, "action_mask allows no action"),
    (
        "dreamer",
        f"{OWN}:MaskedEnv",
        {},
        "action_mask .a mask of actions.; .* set env_kwargs.wrappers.acti",
    ),
    (
        "sac",
        f"{contract.__name__}:Switches",
        {},
        r"sac needs continuous actions, but .* has multi_discrete ones; `rl-",
    ),
    (
        "sac",
        f"{OWN}:MaskedEnv",
        {},
        "sac needs continuous .* discrete_sac is the same method for them",
    ),
    (
        "dqn",
        f"{OWN}:SpacesEnv",
        {"wrappers": {"action_mask": "info"}},
        "an info with nothing gives no mask of actions .the key 'action_mask'.",
    ),
    (
        "dqn",
        f"{OWN}:MaskedEnv",
        {"wrappers": {"action_mask": "always"}},
        "env_kwargs.wrappers.action_mask .* 'auto', 'info' or 'off' .value 'always'.",
    ),
]


@pytest.mark.parametrize(("algo", "task", "kwargs", "message"), WRONG)
def test_wrong_spaces_and_masks_are_one_sentence_on_the_command_line(
    algo: str, task: str, kwargs: dict[str, Any], message: str, tmp_path: Any
) -> None:
    words = ("train", "--algo", algo, "--env", task, "--total-timesteps", 50)
    given = ("--set", f"env_kwargs={kwargs}", "--set", f"output_dir={tmp_path}", "--quiet")
    sentence = run_cli(*words, *given).sentence()
    assert task in sentence
    assert re.search(message, sentence), sentence
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
