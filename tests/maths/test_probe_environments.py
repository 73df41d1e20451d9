"""Every algorithm finds the known value and the known best action of every probe environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.probes import Clock
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.sac import SAC
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent

pytestmark = pytest.mark.matrix  # CI runs these too, by `make check-portable`

GAMMA = 0.9
SEED = 0
ALGORITHMS = ("sac", "ppo", "dqn")
OFF_POLICY = {
    "batch_size": 32,
    "buffer_capacity": 1000,
    "learning_starts": 100,
    "learning_rate": 0.01,
}
SETTINGS: dict[str, dict[str, Any]] = {
    # A small fixed temperature: the soft value is the value to within alpha log 2 / (1 - gamma).
    "sac": OFF_POLICY | {"alpha": 0.002, "tau": 0.2, "hidden_sizes": [32]},
    "ppo": {"num_steps": 32, "minibatch_size": 64, "learning_rate": 0.01, "initial_log_std": -1.0},
    "dqn": OFF_POLICY | {"target_update_interval": 10, "exploration_fraction": 1.0},
}
STEPS = {"sac": 700, "ppo": 2560, "dqn": 700}
# A value of 10 is approached by a tenth of what is missing at a time.
LONG = {"sac": 1000, "ppo": 4480, "dqn": 900}
# Episodes of one step have no future, so the temperature leaves their action values alone: it may
# be large enough to keep the policy from settling before the critics know the reward's shape.
EXPLORE: dict[str, dict[str, Any]] = {
    "sac": {"alpha": 0.05, "batch_size": 64, "learning_starts": 200},
    "ppo": {},
}
ENVS = {"sac": 1, "ppo": 4, "dqn": 1}


def trained(
    algo: str,
    probe: str,
    folder: Path,
    settings: dict[str, Any] | None = None,
    steps: dict[str, int] | None = None,
    **env_kwargs: Any,
) -> AnyLearner:
    """Train on a probe and return the learner from the run's last checkpoint."""
    config = TrainConfig(
        algo=algo,
        env_id=f"helpers.probes:{probe}",
        env_kwargs={"continuous": algo == "sac", **env_kwargs},
        seed=SEED,
        total_timesteps=(steps or STEPS)[algo],
        num_envs=ENVS[algo],
        output_dir=str(folder),
        device="cpu",
        eval_episodes=0,
        checkpoint_interval=0,
        tensorboard=False,
        algo_kwargs={
            "gamma": GAMMA,
            "hidden_sizes": [16],
            "lr_schedule": {"type": "linear"},  # towards 0, so that values come to rest
            **SETTINGS[algo],
            **(settings or {}),
        },
    )
    return load_agent(train(config).checkpoint_path, device="cpu").learner


def as_tensor(obs: list[list[float]]) -> torch.Tensor:
    return torch.tensor([obs])


@torch.no_grad()
def values_of(learner: AnyLearner, obs: list[list[float]]) -> list[float]:
    """Return the value of the learner's own policy, by its own critic."""
    x = as_tensor(obs)
    if isinstance(learner, SAC):
        value = learner.model.q_values(x, learner.act(x)).amin(1)
    elif isinstance(learner, PPO):
        value = learner.model.value(x)
    else:
        assert isinstance(learner, DQN)
        value = learner.q_values(x).amax(-1)
    return [float(v) for v in value[0]]


@torch.no_grad()
def actions_of(learner: AnyLearner, obs: list[list[float]]) -> list[float]:
    return [float(a) for a in learner.act(as_tensor(obs)).flatten()]


def near(expected: list[float], tolerance: float = 0.1) -> Any:
    return pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_constant_reward_has_value_one(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ConstantReward", tmp_path)
    assert values_of(learner, [[0.0]]) == near([1.0])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_reward_that_is_the_observation_is_the_value(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ObservationReward", tmp_path)
    assert values_of(learner, [[-1.0], [1.0]]) == near([-1.0, 1.0])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_reward_one_step_later_is_discounted(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "DelayedReward", tmp_path)
    # A tolerance below 1 - gamma, so that a missing discount is seen.
    assert values_of(learner, [[0.0], [1.0]]) == near([GAMMA, 1.0], 0.05)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_best_of_two_actions_is_found(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ActionReward", tmp_path)
    assert actions_of(learner, [[0.0]]) == [1]
    assert values_of(learner, [[0.0]]) == near([1.0])


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_best_of_two_actions_is_found_for_each_observation(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ActionObservationReward", tmp_path)
    assert actions_of(learner, [[-1.0], [1.0]]) == [0, 1]
    assert values_of(learner, [[-1.0], [1.0]]) == near([1.0, 1.0])


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_best_continuous_action_is_found(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ActionReward", tmp_path, EXPLORE[algo], continuous=True)
    assert actions_of(learner, [[0.0]]) == near([0.5])
    assert values_of(learner, [[0.0]]) == near([1.0 - noise_cost(learner)])


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_best_continuous_action_is_found_for_each_observation(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "ActionObservationReward", tmp_path, EXPLORE[algo], continuous=True)
    assert actions_of(learner, [[-1.0], [1.0]]) == near([-0.5, 0.5])
    assert values_of(learner, [[-1.0], [1.0]]) == near([1.0 - noise_cost(learner)] * 2)


def noise_cost(learner: AnyLearner) -> float:
    """Return the mean squared noise that a state value, unlike an action value, pays for."""
    return float(learner.model.log_std.detach().exp().square()) if isinstance(learner, PPO) else 0.0


HOURS: list[list[float]] = np.eye(Clock.HOURS).tolist()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_time_limit_does_not_shorten_the_future(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "Clock", tmp_path, steps=LONG, max_episode_steps=Clock.HOURS)
    assert values_of(learner, HOURS) == near([1 / (1 - GAMMA)] * 4, 0.3)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_termination_does(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "Clock", tmp_path, terminates=True)
    assert values_of(learner, HOURS) == near([3.439, 2.71, 1.9, 1.0])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_cut_episode_bootstraps_from_the_state_it_reached(algo: str, tmp_path: Path) -> None:
    learner = trained(algo, "TwoRooms", tmp_path, steps=LONG, max_episode_steps=1)
    assert values_of(learner, [[0.0], [1.0]]) == near([9.0, 10.0], 0.3)
