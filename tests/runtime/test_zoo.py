"""The zoo: what a policy's file holds, what its card promises, and what verify says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_training.tools.zoo as zoo_tools
from helpers.tiny import ROOT, run_cli, tiny_config
from rl_training.algorithms.base import AnyLearner
from rl_training.api.agent import Agent
from rl_training.envs.factory import probe_env
from rl_training.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.experiment.checkpointing import load_single_file, save_single_file
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.zoo import (
    CARD_FILE,
    POLICY_FILE,
    Card,
    entry_name,
    figure,
    find_zoo,
    interval,
    read_card,
    read_zoo,
    readme_table,
    versions_differ,
    write_card,
)
from rl_training.rng import Rng
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent, _completed, load_agent
from rl_training.tools.zoo import acting_state, add_entry, verify

ZOO = ROOT / "zoo"
QUICK = ("dqn-catch", "ppo-cartpole", "sac-pendulum")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that was cut, and a group."""
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_config("sac", folder, algo_kwargs={"eval_interval": 32}))
    train(tiny_config("sac", folder, run_name="group", seeds=[3, 4]))
    return folder


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    add_entry(runs / "run", folder, episodes=4)
    return folder


@pytest.fixture
def zoo(made: Path, tmp_path: Path) -> Path:
    """A zoo of one policy that a test may spoil."""
    shutil.copytree(made, tmp_path / "zoo")
    return tmp_path / "zoo"


def changed(zoo: Path, **changes: Any) -> Card:
    """Change the evaluation on the card."""
    card = read_card(zoo / "sac-pendulum")
    assert card.evaluation is not None
    new = card.model_copy(update={"evaluation": card.evaluation.model_copy(update=changes)})
    write_card(zoo / card.name, new)
    return new


# The file


def test_what_acting_reads_is_enough_to_act(algo: str, tmp_path: Path) -> None:
    config = tiny_config(algo, tmp_path)
    spec, env = get_algorithm_spec(algo), probe_env(config.env_id, config.env_kwargs)
    cpu, kwargs = torch.device("cpu"), config.env_kwargs
    first, second = (
        spec.build(env, config.algo_config, (seed,), cpu, env_kwargs=kwargs) for seed in (1, 2)
    )
    kept = acting_state(LoadedAgent(first, config, env, 0))
    second.load_state_dict(_completed(kept, second.state_dict()))
    obs = torch.randn(1, 5, *env.obs_shape)
    assert torch.equal(*(drawn(learner, obs) for learner in (first, second)))


def drawn(learner: AnyLearner, obs: torch.Tensor) -> torch.Tensor:
    """Best actions at the start of episodes, with numbers of no learner's own."""
    rng, state = Rng((7,), "test"), learner.initial_acting_state(obs.shape[1])
    if state is not None:
        state.draw_from(rng)
    with torch.no_grad(), learner.drawing_from(rng):
        return learner.act_from(state, obs)


def test_a_policy_has_its_actor_and_nothing_to_train_with(runs: Path, made: Path) -> None:
    path = made / "sac-pendulum" / POLICY_FILE
    whole, policy = load_agent(runs / "run", device="cpu"), load_agent(path, device="cpu")
    obs = np.random.default_rng(0).normal(size=(9, 3))
    assert np.array_equal(whole.predict(obs), policy.predict(obs))
    assert (policy.step, policy.config.seed) == (64, 0)
    stored = {name for name in acting_state(whole)["model"] if "critic" in name}
    assert not stored
    with pytest.raises(CheckpointError, match="holds what acting needs alone, so no training"):
        train(tiny_config("sac", made / "runs", from_checkpoint=str(path)))
    with pytest.raises(ConfigError, match="holds what acting needs alone; copy that"):
        Agent.load(path).save(made / "copy.safetensors")


def test_a_policy_that_describes_more_than_fits_is_refused(made: Path, tmp_path: Path) -> None:
    saved = load_single_file(made / "sac-pendulum" / POLICY_FILE)
    header = json.loads(json.dumps(saved.header))
    header["config"]["algo_kwargs"]["hidden_sizes"] = [300_000, 300_000]
    save_single_file(tmp_path / "huge.safetensors", header=header, states=saved.states)
    with pytest.raises(RLTrainingError, match="use smaller networks"):
        load_agent(tmp_path / "huge.safetensors", device="cpu")


def test_large_weights_are_stored_in_16_bits_and_judged_so(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = add_entry(runs / "run", tmp_path / "whole", episodes=0)
    monkeypatch.setattr(zoo_tools, "HALF_ABOVE", 0)
    half = add_entry(runs / "run", tmp_path / "half", episodes=4)
    assert (whole.numbers, half.numbers) == ("float32", "float16")
    assert half.size < whole.size
    obs = np.random.default_rng(0).normal(size=(9, 3))
    actions = [
        load_agent(tmp_path / name / "sac-pendulum" / POLICY_FILE, device="cpu").predict(obs)
        for name in ("whole", "half")
    ]
    assert not np.array_equal(actions[0], actions[1])
    np.testing.assert_allclose(actions[0], actions[1], atol=0.02)
    assert verify(tmp_path / "half", half).state == "bit-exact"


# The card


def test_the_card_says_how_it_was_trained_and_what_it_got(made: Path, runs: Path) -> None:
    card = read_card(made / "sac-pendulum")
    assert (card.method, card.task, card.seed, card.steps) == ("sac", "Pendulum-v1", 0, 64)
    assert card.config["algo_kwargs"]["hidden_sizes"] == [16]
    assert str(runs) not in (made / "sac-pendulum" / CARD_FILE).read_text()
    assert [step for step, _ in card.curve] == [32, 64]
    assert card.evaluation is not None
    assert card.evaluation.mean == pytest.approx(np.mean(card.evaluation.returns))
    assert card.evaluation.low < card.evaluation.mean < card.evaluation.high
    assert f"| {figure(card.evaluation.mean)} |" in readme_table([card])
    assert card.sha256 in (made / "sac-pendulum" / "README.md").read_text()


def test_a_member_of_a_group_says_what_was_trained_beside_it(runs: Path, tmp_path: Path) -> None:
    card = add_entry(runs / "group" / "seed_4", tmp_path, name="pair", episodes=0)
    assert (card.name, card.seed, card.config["seeds"]) == ("pair", 4, [3, 4])
    assert "seeds:\n- 3\n- 4" in (tmp_path / "pair" / "config.yaml").read_text()


def test_the_interval_is_that_of_another_mean_of_as_many() -> None:
    low, high = interval([0.0, 2.0] * 50)
    assert (low, high) == pytest.approx((1 - 3.29 * 2**0.5 / 10, 1 + 3.29 * 2**0.5 / 10))
    assert interval([500.0] * 10) == (495.0, 505.0)
    assert interval([-10.0]) == (-10.1, -9.9)


def test_names_are_of_method_and_task() -> None:
    assert entry_name("sac", "HalfCheetah-v5") == "sac-halfcheetah"
    assert entry_name("dqn", "ALE/SpaceInvaders-v5") == "dqn-spaceinvaders"
    assert versions_differ({"a": "1", "b": "2"}, {"b": "3"}) == [
        "a 1 in place of none",
        "b 2 in place of 3",
    ]


# Verify


def test_the_same_machine_gives_every_return_again(zoo: Path) -> None:
    verdict = verify(zoo, read_card(zoo / "sac-pendulum"))
    assert (verdict.state, verdict.failed) == ("bit-exact", False)


def test_another_return_fails_here_and_may_be_inside_elsewhere(zoo: Path) -> None:
    card = read_card(zoo / "sac-pendulum")
    assert card.evaluation is not None
    returns = (card.evaluation.returns[0] + 1e-12, *card.evaluation.returns[1:])
    here = verify(zoo, changed(zoo, returns=returns))
    assert (here.state, "3 of 4 returns are the same, on the card's own" in here.reason) == (
        "failed",
        True,
    )
    elsewhere = verify(zoo, changed(zoo, returns=returns, processor="an abacus"))
    assert elsewhere.state == "inside"
    assert "in place of an abacus" in elsewhere.reason
    mean = card.evaluation.mean
    far = {"returns": returns, "processor": "an abacus", "low": mean + 1, "high": mean + 2}
    assert verify(zoo, changed(zoo, **far)).state == "failed"
    versions = card.evaluation.versions | {"torch": "0.1"}
    write_card(zoo / card.name, card)
    other = verify(zoo, changed(zoo, returns=returns, versions=versions))
    assert (other.state, "in place of 0.1" in other.reason) == ("inside", True)


def test_a_file_that_is_not_the_cards_fails(zoo: Path) -> None:
    path = zoo / "sac-pendulum" / POLICY_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    verdict = verify(zoo, read_card(zoo / "sac-pendulum"))
    assert (verdict.state, "its SHA-256 is another" in verdict.reason) == ("failed", True)
    path.unlink()
    assert "is missing" in verify(zoo, read_card(zoo / "sac-pendulum")).reason


def test_a_policy_of_a_lent_machine_is_evaluated_later(runs: Path, tmp_path: Path) -> None:
    draft = add_entry(runs / "run", tmp_path / "lent", episodes=0)
    assert "no evaluation" in verify(tmp_path / "lent", draft).reason
    card = add_entry(tmp_path / "lent" / "sac-pendulum", tmp_path / "zoo", episodes=3)
    assert card.sha256 == draft.sha256
    assert verify(tmp_path / "zoo", card).state == "bit-exact"


def test_only_finished_runs_and_free_names_are_taken(runs: Path, zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already; replace it with --replace"):
        add_entry(runs / "run", zoo, episodes=0)
    add_entry(runs / "run", zoo, episodes=0, replace=True)
    with pytest.raises(ConfigError, match="of a group, give seed_<n>"):
        add_entry(runs / "group", zoo)
    shutil.copytree(runs / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_64")
    with pytest.raises(ConfigError, match=r"is at step 32 of 64; .* so resume it first"):
        add_entry(tmp_path / "cut", zoo, name="cut")
    assert sorted(path.name for path in zoo.iterdir()) == ["sac-pendulum"], "nothing left behind"


# The command line


def test_the_commands_read_a_zoo(zoo: Path, runs: Path) -> None:
    assert "sac-pendulum  Pendulum-v1" in run_cli("zoo", "list", "--zoo", zoo).out
    listed = json.loads(run_cli("zoo", "list", "--json", "--zoo", zoo).out)
    assert [card["name"] for card in listed] == ["sac-pendulum"]
    values = run_cli("zoo", "eval", "sac-pendulum", "--episodes", "4", "--zoo", zoo).values
    assert values["return_mean"] == values["card_mean"]
    other = run_cli("zoo", "eval", "sac-pendulum", "--episodes", "4", "--seed", "3", "--zoo", zoo)
    assert other.values["return_mean"] != values["return_mean"]
    assert run_cli("zoo", "verify", "--zoo", zoo).out.splitlines()[-1] == "1 bit-exact"
    assert run_cli("zoo", "add", runs / "run", "--name", "two", "--episodes", "2", "--zoo", zoo)
    changed(zoo, episodes=2, returns=(1.0, 2.0))
    broken = run_cli("zoo", "verify", "--zoo", zoo)
    assert broken.code == 1
    assert broken.out.splitlines()[-1] == "1 bit-exact, 1 failed"


def test_mistakes_are_one_sentence(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run_cli("zoo", "eval", "sac-pendulm", "--zoo", zoo).sentence()
    assert "has no policy 'sac-pendulm' (did you mean sac-pendulum?)" in wrong
    assert "no such folder" in run_cli("zoo", "list", "--zoo", tmp_path / "no").sentence()
    (tmp_path / "empty").mkdir()
    assert "holds no policy" in run_cli("zoo", "list", "--zoo", tmp_path / "empty").sentence()
    (zoo / "sac-pendulum" / CARD_FILE).write_text("{}")
    assert "is not a card of this version" in run_cli("zoo", "verify", "--zoo", zoo).sentence()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl_training.experiment.zoo.__file__", str(tmp_path / "a/b/c/d/zoo.py"))
    shutil.rmtree(tmp_path / "zoo")
    assert "the zoo is part of the repository" in run_cli("zoo", "list").sentence()


# The repository's own


def test_three_policies_of_the_repository_do_what_their_cards_say() -> None:
    verdicts = [verify(ZOO, card) for card in read_zoo(ZOO, QUICK)]
    assert [v.reason for v in verdicts if v.state not in ("bit-exact", "inside")] == []
    assert len(verdicts) == len(QUICK)


def test_the_repositorys_zoo_follows_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cards = read_zoo(find_zoo(None))
    assert sum(path.stat().st_size for path in ZOO.rglob("*") if path.is_file()) < 30e6
    assert readme_table(cards) in (ZOO / "README.md").read_text(encoding="utf-8")
    for card in cards:
        assert card.seed == {"sac-halfcheetah": 720}.get(card.name, 2000)
        assert card.evaluation is not None
        assert card.evaluation.episodes == 100
        assert card.steps >= card.config["total_timesteps"]
        page = (ZOO / card.name / "README.md").read_text(encoding="utf-8")
        assert page == zoo_tools.readme_of(card)
