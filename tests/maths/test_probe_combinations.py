"""Known values of probe environments where bootstrapping meets masks, parts, memories and goals.

Each task comes twice: cut by a time limit, which must not change what a state is worth, and with a
termination in the same place, which must.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.probes import Clock, TwoRooms
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.pqn import PQN
from rl_training.algorithms.recurrent_dqn import RecurrentDQN
from rl_training.algorithms.recurrent_ppo import RecurrentPPO
from rl_training.algorithms.recurrent_sac import RecurrentSAC
from rl_training.algorithms.sac import SAC
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.runtime.workflows import LoadedAgent, load_agent

pytestmark = pytest.mark.matrix  # CI runs these too, by `make check-portable`

GAMMA, HOURS = 0.9, Clock.HOURS
FOREVER = [1 / (1 - GAMMA)] * HOURS
TERMINATING = [3.439, 2.71, 1.9, 1.0]
REPLAYED: dict[str, Any] = {
    "batch_size": 32,
    "buffer_capacity": 1000,
    "learning_starts": 100,
    "learning_rate": 0.01,
}
TARGETS = {"target_update_interval": 10, "exploration_fraction": 1.0}
SOFT = {"alpha": 0.002, "tau": 0.2, "hidden_sizes": [32]}
ROLLOUTS = {"num_steps": 32, "minibatch_size": 64, "learning_rate": 0.01}
SEQUENCES = {
    "batch_size": 8,
    "batch_length": 10,
    "burn_in": 1,
    "memory": "gru",
    "memory_size": 16,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dqn": REPLAYED | TARGETS,
    "sac": REPLAYED | SOFT,
    "ppo": ROLLOUTS | {"initial_log_std": -1.0},
    "pqn": ROLLOUTS | {"exploration_fraction": 1.0, "update_epochs": 12},
    "recurrent_dqn": REPLAYED | TARGETS | SEQUENCES,
    "recurrent_sac": REPLAYED | SOFT | SEQUENCES,
    "recurrent_ppo": ROLLOUTS | {"memory": "gru", "memory_size": 16, "sequence_length": 8},
}
STEPS = {"ppo": 5120, "pqn": 5120, "recurrent_ppo": 6400, "dqn": 900}
CONTINUOUS = ("sac", "recurrent_sac")


class MaskedClock(gym.ObservationWrapper[dict[str, Any], Any, Any]):
    """A clock of several parts; at even hours one action is allowed, at odd ones the other."""

    def __init__(self, continuous: bool = False, terminates: bool = False) -> None:
        super().__init__(Clock(continuous, terminates))
        parts = {"hour": self.env.observation_space, "flag": spaces.MultiBinary(1)}
        if not continuous:
            parts["action_mask"] = spaces.MultiBinary(2)
        self.observation_space = spaces.Dict(parts)

    def _odd(self) -> int:
        clock = self.env.unwrapped
        assert isinstance(clock, Clock)
        return int(clock.state) % 2

    def observation(self, observation: Any) -> dict[str, Any]:
        mask = np.eye(2, dtype=np.int8)[self._odd()]
        parts = {"hour": observation, "flag": mask[1:], "action_mask": mask}
        assert isinstance(self.observation_space, spaces.Dict)
        return {name: parts[name] for name in self.observation_space}

    def step(self, action: Any) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            assert action == self._odd(), "the other action is not allowed"
        return super().step(action)


class Cut(gym.Wrapper[Any, Any, Any, Any]):
    """Cuts episodes off at random: a memory then learns what comes after every step it reaches."""

    def __init__(self, env: gym.Env[Any, Any], terminates: bool) -> None:
        super().__init__(env)
        self._chance = 0.0 if terminates else 0.3

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self.np_random.random() < self._chance, info


class BlindClock(Cut):
    """A clock that shows nothing: only who remembers the episode knows the hour."""

    def __init__(self, continuous: bool = False, terminates: bool = False) -> None:
        clock = Clock(continuous, terminates)
        seen = spaces.Box(0.0, 1.0, (1,), np.float32)
        blind = gym.wrappers.TransformObservation(clock, lambda obs: np.ones(1, np.float32), seen)
        super().__init__(blind, terminates)


class CutMaskedClock(Cut):
    """A clock of several parts with masks, cut off at random."""

    def __init__(self, continuous: bool = False, terminates: bool = False) -> None:
        super().__init__(MaskedClock(continuous, terminates), terminates)


class CutRooms(Cut):
    """Two rooms, cut off at random."""

    def __init__(self, continuous: bool = False) -> None:
        super().__init__(TwoRooms(continuous), terminates=False)


class AlarmClock(gym.ObservationWrapper[dict[str, Any], Any, Any]):
    """A clock that pays at one hour of the day: the goal, which is drawn for each episode."""

    def __init__(self, continuous: bool = False, terminates: bool = False) -> None:
        super().__init__(Clock(continuous, terminates))
        hour = self.env.observation_space
        self.observation_space = spaces.Dict({"achieved_goal": hour, "desired_goal": hour})
        self.goal = np.zeros(HOURS, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        self.goal = np.eye(HOURS, dtype=np.float32)[self.np_random.integers(HOURS)]
        return self.observation(obs), info

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"achieved_goal": observation, "desired_goal": self.goal}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return (achieved * desired).sum(-1)

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        reward = float(self.compute_reward(obs["achieved_goal"], obs["desired_goal"], info))
        return obs, reward, terminated, truncated, info


def trained(
    algo: str, task: type[gym.Env[Any, Any]], folder: Path, steps: int | None = None, **changes: Any
) -> LoadedAgent:
    """The agent after a run; `limit` and `terminates` are those of the task."""
    env_kwargs = {"continuous": algo in CONTINUOUS}
    if (limit := changes.pop("limit", None)) is not None:
        env_kwargs["max_episode_steps"] = limit
    if changes.pop("terminates", False):
        env_kwargs["terminates"] = True
    module = "helpers.probes" if task in (Clock, TwoRooms) else __name__
    settings = {"hidden_sizes": [16], "lr_schedule": {"type": "linear"}, "eval_interval": 0}
    config = TrainConfig(
        algo=algo,
        env_id=f"{module}:{task.__name__}",
        env_kwargs=env_kwargs,
        seed=0,
        total_timesteps=steps or STEPS.get(algo, 1000),
        num_envs=4 if algo.endswith(("ppo", "pqn")) else 1,
        output_dir=str(folder),
        device="cpu",
        eval_episodes=0,
        checkpoint_interval=0,
        tensorboard=False,
        accelerate="off",
        threads=1,
        algo_kwargs={"gamma": GAMMA, **settings, **SETTINGS[algo], **changes},
    )
    return load_agent(train(config).checkpoint_path, device="cpu")


@torch.no_grad()
def values_of(learner: AnyLearner, course: Tensor) -> list[float]:
    """Values of observations `[T, W]` in the task's units; to a memory they are one episode."""
    obs = course.unsqueeze(0)
    if isinstance(learner, RecurrentDQN | RecurrentPPO):
        state = learner.initial_acting_state(1)
        shown = [learner.shown(state, step.view(1, 1, -1)).clone() for step in course]
        obs = torch.cat(shown, 1)
    elif isinstance(learner, RecurrentSAC):
        obs = _remembered(learner, obs)
    else:
        obs = learner.normalize(obs)
    if isinstance(learner, SAC):
        value = learner.model.q_values(obs, learner.choose(obs)).amin(1)
    elif isinstance(learner, PPO):
        if isinstance(learner, RecurrentPPO):
            features = obs[..., : learner.model.head_inputs]
        else:
            features = learner.model.embed(obs)
        value = learner.model.value(features)
    else:
        assert isinstance(learner, DQN | PQN)
        q = learner.q_values(obs) if isinstance(learner, DQN) else learner.q_network(obs)
        allowed = learner.allowed(obs)
        value = (q if allowed is None else q.masked_fill(~allowed, -torch.inf)).amax(-1)
    scale = learner.return_norm.variance.sqrt().item() if learner.scales_rewards else 1.0
    return [float(v) * scale for v in value[0]]


def _remembered(learner: RecurrentSAC, obs: Tensor) -> Tensor:
    """What actor, critics and target critics remember along an episode, `[1, T, 3 H]`."""
    along = learner.normalize(obs).unsqueeze(1)
    first = torch.zeros(1, 1, obs.shape[1], dtype=torch.bool)
    parts = []
    for network in (learner.model.actor, learner.model.critic, learner.target_critic):
        start = network.memory.initial(1, learner.device)
        parts.append(network.memory.output(network.follow(along, start, first))[:, 0])
    return torch.cat(parts, -1)


def near(expected: list[float], tolerance: float) -> Any:
    return pytest.approx(expected, abs=tolerance)


def rows_of(agent: LoadedAgent, task: gym.Env[Any, Any]) -> Tensor:
    """What a task shows at each hour, as rows."""
    obs, _ = task.reset(seed=0)
    shown = [obs]
    for hour in range(HOURS - 1):
        action: Any = hour % 2 if isinstance(task.action_space, spaces.Discrete) else [0.0]
        shown.append(task.step(action)[0])
    parts = agent.env_spec.observation
    rows = shown if parts is None else [parts.pack(obs) for obs in shown]
    return torch.from_numpy(np.stack(rows))


BOTH: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
MANY: dict[str, Any] = {"n_step": 3}
TWINS = [
    *(("dqn", MaskedClock, more) for more in ({}, MANY, MANY | {"prioritized": True}, MANY | BOTH)),
    *(("sac", MaskedClock, more) for more in (MANY, MANY | BOTH)),
    *((algo, MaskedClock, more) for algo in ("ppo", "pqn") for more in ({}, BOTH)),
    *(("recurrent_dqn", BlindClock, more) for more in ({}, MANY, MANY | BOTH)),
    ("recurrent_sac", BlindClock, MANY),
    *(("recurrent_ppo", BlindClock, more) for more in ({}, BOTH)),
    ("recurrent_dqn", CutMaskedClock, MANY),
    ("recurrent_ppo", CutMaskedClock, {}),
]


@pytest.mark.parametrize(("algo", "task", "more"), TWINS)
@pytest.mark.parametrize("terminates", [False, True], ids=["cut", "terminates"])
def test_a_time_limit_keeps_the_future_and_a_termination_ends_it(
    algo: str,
    task: type[MaskedClock | BlindClock | CutMaskedClock],
    more: dict[str, Any],
    terminates: bool,
    tmp_path: Path,
) -> None:
    limit = None if issubclass(task, Cut) else HOURS
    ends: dict[str, Any] = {"terminates": True} if terminates else {"limit": limit}
    agent = trained(algo, task, tmp_path, **more, **ends)
    day = task(algo in CONTINUOUS, True)  # nothing cuts it off
    values = values_of(agent.learner, rows_of(agent, day))
    assert values == (near(TERMINATING, 0.25) if terminates else near(FOREVER, 0.4))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        *((strategy, MANY) for strategy in ("future", "final", "episode")),
        *(("future", more) for more in ({}, MANY | BOTH, MANY | {"prioritized": True})),
    ],
)
@pytest.mark.parametrize("terminates", [False, True], ids=["cut", "terminates"])
def test_goals_that_were_achieved_are_worth_what_time_is_left_to_them(
    strategy: str, more: dict[str, Any], terminates: bool, tmp_path: Path
) -> None:
    """The clock reaches hour g after (g - h) steps, and, if it runs for ever, each day again."""
    ends: dict[str, Any] = {"terminates": True} if terminates else {"limit": HOURS}
    agent = trained(
        "dqn",
        AlarmClock,
        tmp_path,
        1500,
        hindsight=strategy,
        hidden_sizes=[32],
        **ends,
        **more,
    )
    hour = torch.eye(HOURS)
    now, goal = torch.meshgrid(torch.arange(HOURS), torch.arange(HOURS), indexing="ij")
    steps = (goal - now - 1) % HOURS
    worth = GAMMA**steps if terminates else GAMMA**steps / (1 - GAMMA**HOURS)
    if terminates:  # midnight, hour 0, is the end of the day; what is over does not come again
        worth = torch.where((goal > now) | (goal == 0), worth, 0.0)
    rows = torch.cat([hour[now.flatten()], hour[goal.flatten()]], -1)
    assert values_of(agent.learner, rows) == near(worth.flatten().tolist(), 0.25)


@pytest.mark.parametrize(
    ("algo", "more"),
    [
        ("recurrent_dqn", {}),
        ("recurrent_dqn", MANY | BOTH),
        ("recurrent_sac", {}),
        ("recurrent_ppo", BOTH),
        ("pqn", {}),
        *((algo, BOTH) for algo in ("dqn", "sac", "ppo", "pqn")),
    ],
)
def test_a_cut_episode_bootstraps_from_the_state_it_reached(
    algo: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Also behind a memory, and standardised: not from where the next episode begins."""
    remembers = algo.startswith("recurrent")
    task, limit = (CutRooms, None) if remembers else (TwoRooms, 1)
    learner = trained(algo, task, tmp_path, limit=limit, **more).learner
    for room, value in ((0.0, 9.0), (1.0, 10.0)):
        assert values_of(learner, torch.tensor([[room]])) == near([value], 0.45)
