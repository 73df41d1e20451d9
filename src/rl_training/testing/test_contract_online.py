"""The contract of continuing online, for every offline algorithm that may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.data.rewards import scale_rewards
from rl_training.experiment.checkpointing import list_checkpoints, load_checkpoint, open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.rng import Rng
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.results import TrainResult, summarize_returns
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.testing.contract import build, flat_state, names_under_test, small_config

ONLINE = {"buffer_capacity": 200, "learning_starts": 20}
OF_ITS_OWN = ("rng", "num_updates", "last")
every_one = pytest.mark.parametrize(
    "algo", [name for name in names_under_test() if get_algorithm_spec(name).continues_online]
)
_SOURCES: dict[str, TrainResult] = {}


@pytest.fixture
def offline(algo: str, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A short offline run of each algorithm on standardised observations and scaled rewards."""
    if algo not in _SOURCES:
        folder = tmp_path_factory.mktemp(f"offline_{algo}")
        _SOURCES[algo] = train(small_config(algo, folder, total_timesteps=64, algo_kwargs=SETTINGS))
    return _SOURCES[algo]


SETTINGS: dict[str, Any] = {
    "normalize_observations": True,
    "reward_scale": 0.1,
    "reward_shift": 2.0,
}


def online_config(
    algo: str, folder: Path, source: TrainResult, online: dict[str, Any] | None = None, **more: Any
) -> TrainConfig:
    kwargs = SETTINGS | {"online": ONLINE | (online or {})} | more.pop("algo_kwargs", {})
    changes = {"from_checkpoint": str(source.run_dir), "total_timesteps": 80, **more}
    return small_config(algo, folder, algo_kwargs=kwargs, **changes)


def learner_state(path: Path) -> dict[str, Any]:
    state = flat_state(open_checkpoint(path, components={"learner"}).states["learner"])
    return {name: value for name, value in state.items() if not name.startswith(OF_ITS_OWN)}


def replay_rows(path: Path) -> dict[str, torch.Tensor]:
    pieces = [rows for _, rows in load_checkpoint(path).read_segments("replay")]
    return {name: torch.cat([piece[name] for piece in pieces], 1)[0] for name in pieces[0]}


@every_one
def test_everything_but_counters_and_randomness_is_taken_over(
    algo: str, offline: TrainResult, tmp_path: Path
) -> None:
    result = train(online_config(algo, tmp_path, offline, keep_checkpoints=9))
    first = list_checkpoints(result.run_dir)[0]
    assert first.step == 0
    before, after = learner_state(offline.checkpoint_path), learner_state(first.path)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert open_checkpoint(first.path).states["learner"]["num_updates"] == {"value": 0}
    end = learner_state(result.checkpoint_path)
    for name, value in end.items():
        assert torch.equal(value, before[name]) == name.startswith("obs_norm"), name


@every_one
def test_the_first_evaluation_is_that_of_the_checkpoint(
    algo: str, offline: TrainResult, tmp_path: Path
) -> None:
    result = train(online_config(algo, tmp_path, offline))
    log = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    first = next(row for row in map(json.loads, log) if row["kind"] != "note")
    assert first["step"] == 0
    config = small_config(algo, tmp_path)
    evaluator = Evaluator(
        config.env_id, config.env_kwargs, (0,), deterministic=config.eval_deterministic
    )
    returns = evaluator.evaluate(load_agent(offline.run_dir).learner, 2, 0)[0]
    evaluator.close()
    expected = summarize_returns(returns)
    assert {name: first[name] for name in expected} == expected


@pytest.mark.expensive
@every_one
@pytest.mark.parametrize(
    "variant", [{}, {"seeds": [4, 9]}, {"online": {"offline_batch_ratio": 0.0}, "num_envs": 2}]
)
def test_a_run_from_a_checkpoint_resumes_to_the_bit(
    algo: str, variant: dict[str, Any], offline: TrainResult, tmp_path: Path
) -> None:
    report = verify_resume(online_config(algo, tmp_path, offline, **variant), 50)
    assert report.identical, report.lines()


def pendulum_rewards(obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    cos, sin, speed = obs.double().unbind(-1)
    torque = 2 * action.double()[:, 0]
    return -(torch.atan2(sin, cos).square() + 0.1 * speed.square() + 0.001 * torque.square())


def cartpole_rewards(obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(obs))


TASK_REWARDS = {"continuous": pendulum_rewards, "discrete": cartpole_rewards}


@every_one
def test_new_rewards_are_scaled_as_those_of_the_data_and_returns_are_not(
    algo: str, offline: TrainResult, tmp_path: Path
) -> None:
    rows = replay_rows(train(online_config(algo, tmp_path, offline)).checkpoint_path)
    task = TASK_REWARDS[get_algorithm_spec(algo).action_kinds[0]](rows["obs"], rows["action"])
    expected = torch.from_numpy(scale_rewards(task.numpy(), 0.1, 2.0))
    assert len(expected) == 80
    torch.testing.assert_close(rows["reward"], expected, rtol=1e-3, atol=1e-3)


@every_one
def test_the_policy_acts_from_the_first_step(
    algo: str, offline: TrainResult, tmp_path: Path
) -> None:
    never = {"learning_starts": 1000}
    rows = replay_rows(
        train(online_config(algo, tmp_path, offline, never, total_timesteps=20)).checkpoint_path
    )
    learner = load_agent(offline.run_dir).learner
    learner.rng = Rng((0,), "learner", "cpu")
    with torch.inference_mode():
        for obs, action in zip(rows["obs"], rows["action"], strict=True):
            torch.testing.assert_close(learner.act(obs[None, None], explore=True)[0, 0], action)


@every_one
def test_acting_explores_when_asked(algo: str) -> None:
    learner, env = build(algo)
    obs = torch.zeros(1, 500, env.obs_dim)
    with torch.inference_mode():
        first, second = (learner.act(obs, explore=True) for _ in range(2))
    assert not torch.equal(first, second)
    assert first.float().std() > 0.01


@every_one
def test_without_a_checkpoint_it_stays_offline_unless_asked(algo: str, tmp_path: Path) -> None:
    plain = small_config(algo, tmp_path)
    assert get_algorithm_spec(algo).loop_of(plain.algo_config).value == "offline"
    asked = small_config(algo, tmp_path, algo_kwargs={"online": {}})
    assert get_algorithm_spec(algo).loop_of(asked.algo_config).value == "off_policy"
    sent = plain.replace(from_checkpoint="runs/x")
    assert get_algorithm_spec(algo).loop_of(sent.algo_config).value == "off_policy"
    assert sent.resolved()["algo_kwargs"]["online"]["offline_batch_ratio"] == 0.5
