"""Names and numbers of settings as people write them: bare, of other libraries, `1e5`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from helpers.tiny import run_cli, write_tiny
from rl_training.errors import ConfigError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.foreign_names import TABLE, ForeignName, foreign_hint


def fields_of(algo: str) -> set[str]:
    """The names of a method's settings."""
    return set(get_algorithm_spec(algo).config_class.model_fields)


# Bare names


def test_a_bare_name_is_a_setting_of_the_method_or_a_key_of_the_run() -> None:
    texts = ["learning_rate=1e-3", "num_envs=8", "lr_schedule.type=cosine", "hidden_sizes=[8]"]
    config = load_config("ppo/cartpole", texts)
    assert config.algo_kwargs["learning_rate"] == 1e-3
    assert config.algo_kwargs["lr_schedule"]["type"] == "cosine"
    assert config.algo_kwargs["hidden_sizes"] == [8]
    assert config.num_envs == 8


def test_bare_names_are_those_of_the_method_that_an_override_chooses() -> None:
    overrides = ["double=false", "algo=dqn", "algo_kwargs={}"]
    with pytest.raises(ConfigError, match="double is not a field of PPOConfig or TrainConfig"):
        load_config("ppo/cartpole", overrides[:1])
    assert load_config("ppo/cartpole", overrides[::-1]).algo_kwargs == {"double": False}


def test_no_name_means_both_a_key_of_the_run_and_a_setting() -> None:
    for name in algorithm_names():
        assert not fields_of(name) & set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lerning_rate=1", "is not a field of PPOConfig or TrainConfig (did you mean learning_ra"),
        ("num_env=1", "is not a field of PPOConfig or TrainConfig (did you mean num_envs?)"),
        ("clip_range=1", "Config; Stable-Baselines3's clip_range is clip_coef here"),
        ("num-minibatches=1", "; CleanRL's num_minibatches is minibatch_size here (a size, not"),
        ("use_sde=1", "; Stable-Baselines3's use_sde has no counterpart here: noise does not"),
        ("algo_kwargs.clip_range=1", "PPOConfig; Stable-Baselines3's clip_range is clip_coef here"),
        ("algo_kwargs.n_envs=1", "; Stable-Baselines3's n_envs is num_envs here, a key of the run"),
        ("algo_kwargs.seed=1", "is not a field of PPOConfig but of TrainConfig; give seed at the"),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_likely_one(override: str, expected: str) -> None:
    sentence = run_cli("config", "show", "ppo/cartpole", "-s", override).sentence()
    assert sentence.startswith(f"--set {override}: ")
    assert expected in sentence


def test_a_setting_at_the_top_level_of_a_file_is_sent_to_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\nclip_coef: 0.3\n")
    expected = f"{path}:3: clip_coef is not a field of TrainConfig but of PPOConfig; put it under "
    assert run_cli("train", "-c", path).sentence() == f"{expected}algo_kwargs"


# Names of other libraries


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.library}-{row.name}")
def test_every_name_is_answered_with_a_setting_that_exists(row: ForeignName) -> None:
    known = set().union(*(fields_of(name) for name in algorithm_names()))
    assert set(row.ours) <= known
    assert row.run_key is None or row.run_key in TrainConfig.model_fields
    assert row.ours or row.run_key or row.note
    # A name that all methods with our setting know themselves would never be looked up.
    if row.ours:
        assert any(
            fields_of(name) & set(row.ours) and row.name not in fields_of(name)
            for name in algorithm_names()
        )


@pytest.mark.parametrize(
    ("algo", "theirs", "ours"),
    [
        ("ppo", "n_steps", "num_steps"),
        ("ppo", "n_epochs", "update_epochs"),
        ("ppo", "batch_size", "minibatch_size"),
        ("dqn", "n_steps", "n_step"),
        ("dqn", "exploration_initial_eps", "epsilon_start"),
        ("dqn", "exploration_final_eps", "epsilon_end"),
        ("dqn", "end_e", "epsilon_end"),
        ("dqn", "target_network_frequency", "target_update_interval"),
        ("qr_dqn", "n_quantiles", "num_quantiles"),
        ("iqn", "n_greedy_quantiles", "num_action_quantiles"),
        ("fqf", "ent_coef", "entropy_coef"),
        ("sac", "buffer_size", "buffer_capacity"),
        ("sac", "train_freq", "train_frequency"),
        ("sac", "gradient_steps", "gradient_updates_per_step"),
        ("sac", "ent_coef", "alpha"),
        ("sac", "polyak", "tau"),
        ("sac", "net_arch", "hidden_sizes"),
        ("td3", "action_noise", "exploration_noise"),
        ("td3", "policy_frequency", "policy_delay"),
        ("td3_bc", "alpha", "bc_alpha"),
        ("cql", "conservative_weight", "cql_alpha"),
        ("cql", "n_critics", "num_critics"),
        ("cql", "n_action_samples", "num_cql_samples"),
        ("discrete_cql", "alpha", "cql_alpha"),
        ("iql", "weight_temp", "beta"),
        ("iql", "max_weight", "max_advantage_weight"),
        ("bc", "actor_learning_rate", "learning_rate"),
        ("bc", "dataset", "dataset_path"),
        ("gail", "demonstrations", "expert_dataset_path"),
        ("gail", "n_disc_updates_per_round", "discriminator_updates"),
        ("mopo", "lam", "penalty_coef"),
        ("mbpo", "real_ratio", "synthetic_batch_ratio"),
        ("mbpo", "lr", "policy_learning_rate"),
        ("pets", "population_size", "planning_candidates"),
        ("pets", "gradient_steps", "model_updates_per_step"),
        ("dreamer", "horizon", "imagination_horizon"),
        ("rlpd", "q_lr", "learning_rate"),
    ],
)
def test_a_name_is_translated_for_the_method_at_hand(algo: str, theirs: str, ours: str) -> None:
    hint = foreign_hint(theirs, fields_of(algo))
    assert hint is not None
    assert f"'s {theirs} is {ours} here" in hint


# Whole numbers


@pytest.mark.parametrize("text", ["48", "4.8e1", "48.0", "4_8", "480e-1"])
def test_a_whole_number_may_be_written_in_any_way(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"algo: sac\nenv_id: Pendulum-v1\ntotal_timesteps: {text}\n")
    assert load_config(path).total_timesteps == 48
    config = load_config("sac/pendulum", [f"batch_size={text}", f"hidden_sizes=[{text}]"])
    assert config.resolved()["algo_kwargs"]["batch_size"] == 48
    assert config.resolved()["algo_kwargs"]["hidden_sizes"] == [48]
    done = run_cli("train", "-c", write_tiny(tmp_path), "--total-timesteps", text, "--dry-run")
    assert yaml.safe_load(done.out)["total_timesteps"] == 48


def test_a_number_that_is_not_whole_stays_a_mistake(tmp_path: Path) -> None:
    for text in ("1.5e0", "1e-3", "1e5.0"):
        words = ("config", "show", "sac/pendulum", "-s", f"batch_size={text}")
        assert "algo_kwargs.batch_size must be an integer, got" in run_cli(*words).sentence()
        tiny = write_tiny(tmp_path)
        sentence = run_cli("train", "-c", tiny, "--total-timesteps", text).sentence()
        assert "--total-timesteps" in sentence
        assert f"must be a whole number such as 100000 or 1e5, got '{text}'" in sentence


def test_a_huge_number_is_refused_without_being_counted_out() -> None:
    sentence = run_cli("config", "show", "sac/pendulum", "-s", "batch_size=1e300").sentence()
    assert sentence.endswith("algo_kwargs.batch_size must be an integer, got 1e+300")
