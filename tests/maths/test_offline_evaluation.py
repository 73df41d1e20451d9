"""Offline evaluation of checkpoints: every method, the guards, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.datasets import SWITCH, TOY, columns_of, toy_data, write_columns
from helpers.tiny import run_cli, tiny_config
from rl_training.api.algorithms import managed_class
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.random import random_dataset
from rl_training.data.datasets.writers import save_dataset
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError, DataError, SpecMismatch
from rl_training.experiment.config import TrainConfig
from rl_training.ope.estimate import evaluate_offline, policy_of, rank_offline
from rl_training.ope.fitted_q import Fit
from rl_training.ope.fqe import FQEConfig
from rl_training.ope.value import (
    OfflineValue,
    ranked,
    reward_range,
    summarize_fit,
    weight_beyond,
)
from rl_training.runtime.workflows import LoadedAgent, load_agent
from rl_training.testing.contract import build, small_config

SMALL: dict[str, Any] = {"updates": 10, "members": 2, "batch_size": 8, "hidden_sizes": (8,)}
WORDS = ("--updates", 10, "--members", 2, "--batch-size", 8, "--hidden-sizes", "8")


def saved(config: TrainConfig, path: Path) -> Path:
    """An untrained agent as a file."""
    return managed_class(config.algo)(config).save(path)


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    return saved(tiny_config("sac", tmp_path), tmp_path / "sac.safetensors")


@pytest.fixture
def pendulum() -> OfflineDataset:
    return random_dataset(probe_env("Pendulum-v1"), 300, 0)


@pytest.fixture
def data_file(tmp_path: Path, pendulum: OfflineDataset) -> Path:
    path = tmp_path / "pendulum.npz"
    save_dataset(pendulum, path, "npz")
    return path


def blank(**changes: Any) -> OfflineValue:
    """A result without figures."""
    values: dict[str, Any] = {
        "checkpoint": "a", "algo": "sac", "step": 1, "gamma": 0.5, "stochastic": False,
        "value": None, "value_low": None, "value_high": None, "member_values": None,
        "behaviour_value": 0.0, "behaviour_low": 0.0, "behaviour_high": 0.0,
        "weight_beyond": 0.0, "soft_score": None, "drift": None, "members": 2, "updates": 1,
        "episodes": 2, "transitions": 4,
    }  # fmt: skip
    return OfflineValue(**(values | changes))


def fit_of(*starts: float, late: float = 0.0, low: float = 0.0, high: float = 0.0) -> Fit:
    members = np.ones(len(starts))
    return Fit(
        start_values=np.array(starts),
        late_values=np.array(starts) - late,
        soft_scores=members,
        q_low=low * members,
        q_high=high * members,
    )


def test_every_method_is_evaluated_with_its_own_gamma_and_repeats_itself(
    config: TrainConfig, tmp_path: Path
) -> None:
    path = saved(config, tmp_path / "agent.safetensors")
    data = random_dataset(probe_env(config.env_id), 200, 0)
    if load_agent(path, device="cpu").learner.initial_acting_state(1) is not None:
        with pytest.raises(SpecMismatch, match="acts by what it remembers of the episode"):
            evaluate_offline(path, data, device="cpu", gamma=0.9, **SMALL)
        return
    own = config.algo_config.gamma
    given: dict[str, Any] = SMALL if own < 1 else SMALL | {"gamma": 0.9}  # 1 has no finite value
    first, again = (evaluate_offline(path, data, device="cpu", **given) for _ in range(2))
    assert first == again
    assert first.gamma == given.get("gamma", own)
    assert first.value is not None, first.warning
    assert first.value_low is not None
    assert first.value_high is not None
    assert first.value_low <= first.value <= first.value_high
    sampled = evaluate_offline(path, data, stochastic=True, device="cpu", **given)
    drawn = policy_of(load_agent(path, device="cpu"), stochastic=True, seed=0)(data.observations)
    samples = bool((drawn != drawn[:, :1]).any())
    assert (sampled.value != first.value) == samples, "another policy has another value"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Parts", "takes observations without images, but .*:Parts has camera"),
        ("Switches", "takes discrete or continuous actions, but .*:Switches has multi_discrete"),
    ],
)
def test_tasks_that_no_value_network_reads_are_refused(task: str, message: str) -> None:
    task_id = f"rl_training.testing.contract:{task}"
    learner, env = build("bc", task=task_id)
    agent = LoadedAgent(learner, small_config("bc", "nowhere", task=task_id), env, 0)
    with pytest.raises(SpecMismatch, match=f"offline evaluation {message}"):
        evaluate_offline(agent, random_dataset(env, 200, 0), gamma=0.9, **SMALL)


def test_policy_s_actions_are_those_of_predict_and_leave_no_trace(
    agent_file: Path, pendulum: OfflineDataset
) -> None:
    agent = load_agent(agent_file, device="cpu")
    rows = pendulum.observations[:20]
    counter = agent.learner.rng.counter.clone()
    actions = policy_of(agent, stochastic=True, seed=0)(rows)
    assert actions.shape == (20, 8, 1)
    assert (actions.std(1) > 0).all()
    assert agent.learner.rng.counter == counter
    best = policy_of(agent, stochastic=False, seed=0)(rows)
    assert best.shape == (20, 1, 1)
    assert agent.predict(rows) == pytest.approx(2 * best[:, 0].numpy(), abs=1e-5)


def test_unbounded_policies_are_clipped_to_the_box_as_the_environment_would(
    tmp_path: Path, pendulum: OfflineDataset
) -> None:
    config = tiny_config("ppo", tmp_path, env_id="Pendulum-v1")
    agent = load_agent(saved(config, tmp_path / "ppo.safetensors"), device="cpu")
    rows = pendulum.observations
    actions = policy_of(agent, stochastic=True, seed=0)(rows)
    assert actions.abs().max() == 1


def test_behaviour_value_is_the_mean_discounted_return_from_the_starts(
    agent_file: Path, pendulum: OfflineDataset
) -> None:
    result = evaluate_offline(agent_file, pendulum, gamma=0.9, device="cpu", **SMALL)
    pairs = zip(pendulum.episode_starts, pendulum.episode_stops, strict=True)
    returns = [
        sum(0.9**t * float(r) for t, r in enumerate(pendulum.rewards[start:stop]))
        for start, stop in pairs
    ]
    assert result.behaviour_value == pytest.approx(np.mean(returns), rel=1e-5)
    assert result.behaviour_low < result.behaviour_value < result.behaviour_high
    assert result.episodes == len(returns)


def test_weight_beyond_counts_truncated_episodes_alone() -> None:
    data = toy_data(200)
    cut = ~data.terminations[data.episode_stops - 1]
    assert 0 < cut.sum() < len(cut)
    expected = sum(0.9 ** float(n) for n in data.episode_lengths()[cut]) / len(cut)
    assert weight_beyond(data, 0.9) == pytest.approx(expected)


def test_rewards_allow_no_value_beyond_their_range_over_one_minus_gamma() -> None:
    data = toy_data(200)
    never = replace(data, terminations=np.zeros(200, bool), truncations=data.ends, parts=())
    positive = replace(never, rewards=np.linspace(1, 2, 200).astype(np.float32))
    assert reward_range(positive, 0.9) == pytest.approx((10, 20))
    ending = replace(positive, terminations=data.terminations)
    assert reward_range(ending, 0.9) == pytest.approx((0, 20)), "an end leaves nothing"


@pytest.mark.parametrize(
    "fit",
    [fit_of(1.0, 9.0), fit_of(1.0, np.nan), fit_of(1.0, 1.0, low=-9.0), fit_of(1.0, 1.0, high=9.0)],
    ids=["estimate", "nan", "low", "high"],
)
def test_values_that_rewards_do_not_allow_are_reported_and_not_shown(fit: Fit) -> None:
    data = replace(toy_data(200), rewards=np.linspace(-1, 1, 200).astype(np.float32))
    result = summarize_fit(blank(), fit, data)
    assert result.diverged
    assert result.member_values is None
    assert result.warning is not None
    assert "range [-2, 2] that the rewards allow" in result.warning
    sound = summarize_fit(blank(), fit_of(1.0, 1.5), data)
    assert (sound.value, sound.warning) == (1.25, None)


def test_an_estimate_that_still_moves_says_so() -> None:
    data = replace(toy_data(200), rewards=np.linspace(-1, 1, 200).astype(np.float32))
    result = summarize_fit(blank(), fit_of(1.0, 1.2, late=0.5), data)
    assert result.drift == pytest.approx(0.5)
    assert result.warning is not None
    assert "raise updates" in result.warning


def test_a_fit_that_blows_up_has_no_figures(agent_file: Path, pendulum: OfflineDataset) -> None:
    settings = SMALL | {"updates": 60, "learning_rate": 100.0, "tau": 1.0}
    result = evaluate_offline(agent_file, pendulum, device="cpu", **settings)
    assert result.diverged
    assert result.as_record()["value"] is None


def test_ranking_compares_member_by_member_and_puts_failures_last() -> None:
    low = blank(checkpoint="low", value=1.5, member_values=(1.0, 2.0))
    high = blank(checkpoint="high", value=2.0, member_values=(3.0, 1.0))
    order = ranked([blank(checkpoint="lost"), low, high])
    assert [value.checkpoint for value in order] == ["high", "low", "lost"]
    assert [value.probability_best for value in order] == [0.5, 0.5, None]


def test_checkpoints_are_ranked_on_the_same_resamples(
    tmp_path: Path, agent_file: Path, pendulum: OfflineDataset
) -> None:
    other = saved(tiny_config("sac", tmp_path, seed=5), tmp_path / "other.safetensors")
    order = rank_offline([agent_file, other, agent_file], pendulum, device="cpu", **SMALL)
    twins = [value for value in order if value.checkpoint == str(agent_file)]
    assert twins[0].member_values == twins[1].member_values
    alone = evaluate_offline(other, pendulum, device="cpu", **SMALL)
    assert alone.member_values in [value.member_values for value in order]


def test_checkpoints_of_different_gammas_are_not_ranked(
    tmp_path: Path, agent_file: Path, pendulum: OfflineDataset
) -> None:
    other = tiny_config("sac", tmp_path, algo_kwargs={"gamma": 0.9})
    files = [agent_file, saved(other, tmp_path / "other.safetensors")]
    with pytest.raises(ConfigError, match=r"gamma 0\.9 and .* with 0\.99.*--gamma"):
        rank_offline(files, pendulum, device="cpu", **SMALL)
    assert len(rank_offline(files, pendulum, gamma=0.95, device="cpu", **SMALL)) == 2


def test_a_checkpoint_of_gamma_one_asks_for_another(
    tmp_path: Path, pendulum: OfflineDataset
) -> None:
    config = tiny_config("sac", tmp_path, algo_kwargs={"gamma": 1.0})
    path = saved(config, tmp_path / "one.safetensors")
    with pytest.raises(ConfigError, match=r"trained with gamma 1, but .* below 1"):
        evaluate_offline(path, pendulum, device="cpu", **SMALL)


def test_an_agent_evaluates_itself(tmp_path: Path, data_file: Path) -> None:
    agent = managed_class("sac")(tiny_config("sac", tmp_path))
    result = agent.evaluate_offline(data_file, **SMALL)
    assert (result.algo, result.step, result.transitions) == ("sac", 0, 300)


def test_a_folder_of_mapped_columns_is_evaluated_like_a_file_and_without_a_warning(
    agent_file: Path, data_file: Path, pendulum: OfflineDataset, tmp_path: Path
) -> None:
    save_dataset(pendulum, tmp_path / "columns", "npy")
    mapped = evaluate_offline(agent_file, tmp_path / "columns", device="cpu", **SMALL)
    assert mapped == evaluate_offline(agent_file, data_file, device="cpu", **SMALL)


def test_data_without_starts_of_episodes_is_refused(
    agent_file: Path, pendulum: OfflineDataset
) -> None:
    columns = columns_of(pendulum)
    one = pendulum.slice(0, int(pendulum.episode_stops[0]))
    with pytest.raises(DataError, match=f"{len(one)} rows in one episode"):
        evaluate_offline(agent_file, one, device="cpu", **SMALL)
    order = np.random.default_rng(0).permutation(300)
    shuffled = OfflineDataset(**{name: column[order] for name, column in columns.items()})
    with pytest.raises(DataError, match="not in time order"):
        evaluate_offline(agent_file, shuffled, device="cpu", **SMALL)


def test_the_command_prints_a_ranked_table(
    tmp_path: Path, agent_file: Path, data_file: Path
) -> None:
    other = saved(tiny_config("sac", tmp_path, seed=5), tmp_path / "b.safetensors")
    options = ("--checkpoint", agent_file, "--checkpoint", other, "--dataset", data_file)
    done = run_cli("ope", *options, *WORDS, "--device", "cpu")
    assert done.code == 0, done.err
    for text in ("95% interval", "P(best)", "data (", "gamma 0.99", "time limits do not end it"):
        assert text.replace(" ", "") in "".join(done.out.split()), text


def test_the_command_prints_json(agent_file: Path, data_file: Path) -> None:
    options = ("--checkpoint", agent_file, "--dataset", data_file, "--gamma", "0.9", "--json")
    done = run_cli("ope", *options, *WORDS, "--seed", 3, "--stochastic", "--device", "cpu")
    (record,) = json.loads(done.out)["results"]
    direct = evaluate_offline(
        agent_file, data_file, gamma=0.9, seed=3, stochastic=True, device="cpu", **SMALL
    )
    assert record["value"] == direct.value
    assert record["member_values"] == list(direct.member_values or ())
    assert not record["diverged"]


def test_defaults_in_the_help_are_those_of_the_settings() -> None:
    shown = "".join(run_cli("ope", "--help").out.split())
    config = FQEConfig()
    steps = [FQEConfig(gamma=gamma).gradient_steps for gamma in (0.0, 0.9999)]
    assert f"[default:({steps[0]}to{steps[1]})]" in shown
    for value in (config.members, config.batch_size):
        assert f"[default:{value}]" in shown or f"[default:({value})]" in shown
    sizes = ",".join(map(str, config.hidden_sizes))
    assert f"[default:{sizes}]" in shown or f"[default:({sizes})]" in shown


def wrong(name: str, folder: Path) -> tuple[dict[str, object], str]:
    """Options of a mistake, and what the sentence must say."""
    other = write_columns(folder / "toy.npz", columns_of(toy_data(task=TOY)))
    switch = columns_of(toy_data(task=SWITCH))
    for key in ("observations", "next_observations"):
        switch[key] = switch[key][:, :3]
    discrete = write_columns(folder / "switch.npz", switch)
    cases: dict[str, tuple[dict[str, object], str]] = {
        "actions": ({"--dataset": other}, "actions have 2 entries, but Pendulum-v1 takes 1"),
        "kind": ({"--dataset": discrete}, "actions are whole numbers (discrete)"),
        "file": ({"--dataset": folder / "no.npz"}, "there is no such file"),
        "checkpoint": ({"--checkpoint": folder}, "checkpoint"),
        "gamma": ({"--gamma": "1.5"}, "gamma must be < 1, got 1.5"),
        "sizes": ({"--hidden-sizes": "a"}, "--hidden-sizes must look like 64,64, got 'a'"),
        "device": ({"--device": "tpu"}, "device must be auto, cpu, cuda"),
    }
    return cases[name]


@pytest.mark.parametrize(
    "name", ["actions", "kind", "file", "checkpoint", "gamma", "sizes", "device"]
)
def test_a_mistake_is_one_sentence(
    name: str, tmp_path: Path, agent_file: Path, data_file: Path
) -> None:
    folder = tmp_path / "wrong"
    folder.mkdir()
    changes, expected = wrong(name, folder)
    options: dict[str, object] = {"--checkpoint": agent_file, "--dataset": data_file} | changes
    words = [word for pair in options.items() for word in pair]
    assert expected in run_cli("ope", *words).sentence()
