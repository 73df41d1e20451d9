"""The managed classes: learn, evaluate, predict, save, load, for every registered algorithm."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from helpers.tiny import STEPS, tiny_config, write_tiny
from rl_training.algorithms.pets import PETS
from rl_training.api.agent import Agent
from rl_training.api.algorithms import managed_class
from rl_training.errors import CheckpointError, ConfigError, DataError
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.results import TrainResult


@dataclass(frozen=True)
class Trained:
    """An agent that has learned, and the file it was saved to; its run folder is gone."""

    agent: Agent
    result: TrainResult
    file: Path


@pytest.fixture(scope="module", params=algorithm_names())
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    agent = managed_class(request.param)(tiny_config(request.param, folder / "runs"))
    result = agent.learn()
    file = agent.save(folder / "saved" / "agent.safetensors")
    shutil.rmtree(folder / "runs")
    return Trained(agent, result, file)


def observations(agent: Agent, count: int) -> Any:
    size = gymnasium.make(agent.config.env_id).observation_space.shape
    assert size is not None
    return np.random.default_rng(0).normal(size=(count, *size)).astype(np.float32)


def plans(agent: Agent) -> bool:
    return issubclass(get_algorithm_spec(agent.config.algo).learner, PETS)


@pytest.mark.expensive
def test_learning_returns_where_the_run_is(trained: Trained) -> None:
    assert trained.result is trained.agent.result
    assert trained.result.metrics["global_step"] == STEPS
    assert trained.result.checkpoint_path.name == f"step_{STEPS}"


@pytest.mark.expensive
def test_evaluation_runs_the_episodes_asked_for_and_repeats(trained: Trained) -> None:
    first = trained.agent.evaluate(num_episodes=3, seed=5)
    again = trained.agent.evaluate(num_episodes=3, seed=5)
    assert len(first.returns) == 3
    assert first.metrics["eval_episodes"] == 3
    assert first == again
    assert first.step == STEPS
    assert len(trained.agent.evaluate().returns) == trained.agent.config.eval_episodes
    with pytest.raises(DataError, match="num_episodes must be >= 1, got 0"):
        trained.agent.evaluate(num_episodes=0)


def test_predictions_are_actions_of_the_task(trained: Trained) -> None:
    space = gymnasium.make(trained.agent.config.env_id).action_space
    batch = observations(trained.agent, 6) * 100
    for deterministic in (True, False):
        actions = trained.agent.predict(batch, deterministic=deterministic)
        assert len(actions) == 6
        assert all(space.contains(np.asarray(action, space.dtype)) for action in actions)
    one = trained.agent.predict(batch[0])
    assert np.shape(one) == space.shape
    if not plans(trained.agent):  # a plan's draws depend on how many are made at once
        np.testing.assert_allclose(one, trained.agent.predict(batch)[0], rtol=1e-5)
    np.testing.assert_array_equal(one, trained.agent.predict(batch[0].tolist()))


OPENED: list[str] = []
WATCHING = [False]


def watch_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHING[0] and event in ("open", "os.listdir", "os.scandir"):
        OPENED.append(f"{event} {arguments[0]}")


@pytest.fixture(scope="module")
def _watch() -> None:
    sys.addaudithook(watch_opening)  # cannot be taken off again, hence the switch


@pytest.mark.usefixtures("_watch")
def test_prediction_opens_no_file(trained: Trained) -> None:
    obs = observations(trained.agent, 1)[0]
    trained.agent.predict(obs)  # modules that are imported when first used
    OPENED.clear()
    WATCHING[0] = True
    try:
        trained.agent.predict(obs)
        seen = list(OPENED)
        trained.file.read_bytes()
    finally:
        WATCHING[0] = False
    assert seen == []
    assert len(OPENED) == 1, "the watch sees what is opened"


def test_a_saved_agent_is_the_same_agent_and_needs_no_environment(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was made")

    batch = observations(trained.agent, 5)
    expected = trained.agent.predict(batch)
    monkeypatch.setattr(gymnasium, "make", refuse)
    monkeypatch.chdir(trained.file.parent)
    loaded = type(trained.agent).load(trained.file.name)
    np.testing.assert_array_equal(loaded.predict(batch), expected)
    assert loaded.config.resolved() == trained.agent.config.resolved()


@pytest.mark.expensive
def test_a_saved_agent_evaluates_as_before_and_saves_again(
    trained: Trained, tmp_path: Path
) -> None:
    loaded = type(trained.agent).load(str(trained.file))
    assert loaded.evaluate(2, seed=1) == trained.agent.evaluate(2, seed=1)
    copy = type(trained.agent).load(loaded.save(tmp_path / "copy"))
    assert copy.evaluate(2, seed=1) == loaded.evaluate(2, seed=1)


def test_another_algorithms_file_is_refused(trained: Trained) -> None:
    own = trained.agent.algo
    other = managed_class(next(name for name in algorithm_names() if name != own))
    with pytest.raises(CheckpointError, match=f"holds a {own} agent, not {other.algo}"):
        other.load(trained.file)
    assert Agent.load(trained.file).config.algo == own


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "pickle", "missing"])
def test_a_damaged_file_is_refused_and_named(trained: Trained, damage: str, tmp_path: Path) -> None:
    data = bytearray(trained.file.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    spoilt = {
        "flip": bytes(data),
        "cut": bytes(data[:-10]),
        "empty": b"",
        "pickle": b"\x80\x04\x95cos\nsystem\n.",
    }
    path = tmp_path / "spoilt.safetensors"
    if damage in spoilt:
        path.write_bytes(spoilt[damage])
    with pytest.raises(CheckpointError, match=r"spoilt\.safetensors"):
        type(trained.agent).load(path)


@pytest.mark.parametrize(
    "obs", [np.zeros(7), np.zeros((2, 7)), np.zeros((2, 2, 3)), 3.0, [np.nan] * 3, []]
)
def test_observations_that_do_not_fit_are_refused(obs: Any, sac: Agent) -> None:
    with pytest.raises(DataError, match="observation"):
        sac.predict(obs)


@pytest.mark.parametrize("obs", ["abc", [1.0, [2.0], 3.0], {"a": 1}])
def test_what_is_no_array_of_numbers_is_refused(obs: Any, sac: Agent) -> None:
    try:
        sac.predict(obs)
    except DataError:
        return
    pytest.fail("it was taken")


@pytest.fixture(scope="module")
def sac(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    """An agent that has not learned."""
    return managed_class("sac")(tiny_config("sac", tmp_path_factory.mktemp("sac")))


def test_an_agent_acts_before_it_has_learned(sac: Agent) -> None:
    assert sac.result is None
    assert sac.predict([1.0, 0.0, 0.0]).shape == (1,)
    assert sac.evaluate(1).step == 0
    assert not Path(sac.config.output_dir, "run").exists()


def test_an_agent_is_made_from_a_file_or_a_preset(tmp_path: Path) -> None:
    from rl_training import SAC

    assert SAC("sac/pendulum").config.env_id == "Pendulum-v1"
    assert SAC(write_tiny(tmp_path)).config.total_timesteps == STEPS


def test_a_configuration_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="SAC was given a configuration of 'ppo'"):
        managed_class("sac")("ppo/cartpole")


def test_a_run_folder_and_a_checkpoint_can_be_loaded_too(tmp_path: Path) -> None:
    agent = managed_class("ppo")(tiny_config("ppo", tmp_path))
    result = agent.learn()
    obs = np.linspace(-1, 1, 4)
    for path in (result.run_dir, result.checkpoint_path):
        assert managed_class("ppo").load(path).predict(obs) == agent.predict(obs)


def test_several_seeds_give_the_agent_of_the_first(tmp_path: Path) -> None:
    agent = managed_class("sac")(tiny_config("sac", tmp_path, seeds=[4, 2], total_timesteps=32))
    result = agent.learn()
    assert [member.run_dir.name for member in result.per_seed] == ["seed_4", "seed_2"]
    obs = [1.0, 0.0, 0.0]
    first = managed_class("sac").load(result.per_seed[0].checkpoint_path)
    np.testing.assert_array_equal(agent.predict(obs), first.predict(obs))
    saved = managed_class("sac").load(agent.save(tmp_path / "agent"))
    assert saved.config.seed == 4


def test_learning_again_goes_on_and_a_suffix_begins_a_new_run(tmp_path: Path) -> None:
    agent = managed_class("sac")(tiny_config("sac", tmp_path, total_timesteps=16))
    first = agent.learn(progress=False)
    again = agent.learn(progress=False)
    assert (again.run_dir, again.metrics["global_step"]) == (first.run_dir, 32)
    other = agent.learn(progress=False, run_suffix="2")
    assert (other.run_dir.name, other.metrics["global_step"]) == ("run_2", 16)


def test_a_folder_in_the_way_of_save_is_an_error_of_ours(sac: Agent, tmp_path: Path) -> None:
    (tmp_path / "there" / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="there"):
        sac.save(tmp_path / "there")
