"""Tasks of several agents: refused in one sentence, and played by one learner as the docs show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from helpers.tiny import ROOT, run_cli, write_tiny
from rl_training import PPO
from rl_training.envs import make_env
from rl_training.errors import EnvError


class ParallelEnv:
    """The base class by its name; PettingZoo itself is no dependency."""


class Meeting(ParallelEnv):
    """Two agents on a line of five places, paid for meeting; one of them leaves early."""

    def __init__(self) -> None:
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []
        self.places = {"left": 0, "right": 4}
        self.steps = 0

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0.0, 4.0, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(3)

    def _seen(self) -> dict[str, Any]:
        places = np.array(list(self.places.values()), np.float32)
        return {agent: places.copy() for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        self.places = {"left": 0, "right": 4}
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        self.steps += 1
        for agent, action in actions.items():
            self.places[agent] = int(np.clip(self.places[agent] + action - 1, 0, 4))
        met = self.places["left"] == self.places["right"]
        seen, acted = self._seen(), list(self.agents)
        ended = {agent: met or (agent == "left" and self.steps >= 6) for agent in acted}
        cut = dict.fromkeys(acted, self.steps >= 10)
        self.agents = [agent for agent in acted if not (ended[agent] or cut[agent])]
        return seen, {agent: float(met) for agent in acted}, ended, cut, {a: {} for a in acted}


def parallel_env() -> Meeting:
    raise AssertionError("called")


SENTENCE = "has several agents .* make it a gymnasium.Env that one agent acts in"


@pytest.mark.parametrize("task", [Meeting(), Meeting, lambda: Meeting()])
def test_a_task_of_several_agents_is_refused_in_python(task: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=SENTENCE):
        PPO(task, output_dir=str(tmp_path)).predict(np.zeros(2))


@pytest.mark.parametrize("name", ["parallel_env", "Meeting"])
def test_a_task_of_several_agents_is_refused_by_name_and_not_called(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvError, match=SENTENCE):
        make_env(f"{__name__}:{name}")
    file = write_tiny(tmp_path, "ppo", env_id=f"{__name__}:{name}", env_kwargs={})
    sentence = run_cli("train", "--config", file, "--quiet").sentence()
    assert re.search(SENTENCE, sentence)


def joint() -> Callable[[Any], Any]:
    """The class that the docs show."""
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    section = page.split("## Several agents")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/environments.md", "exec"), names)
    made: Callable[[Any], Any] = names["Joint"]
    return made


def test_all_of_them_are_one_as_the_docs_show() -> None:
    make = joint()
    env = make(Meeting())
    obs, _ = env.reset(seed=0)
    assert set(obs) == {"left", "right"}
    for step in range(1, 11):
        obs, reward, terminated, truncated, _ = env.step([1, 1])
        assert (reward, terminated, truncated) == (0.0, False, step == 10)
        assert obs["left"].any() == (step <= 6), "who has left shows zeros"
    env.reset()
    assert env.step([2, 0])[1:4] == (0.0, False, False)
    assert env.step([2, 0])[1:4] == (2.0, True, False)


@pytest.mark.matrix
def test_one_learner_plays_all_of_them(tmp_path: Path) -> None:
    make = joint()
    settings: dict[str, Any] = {"num_steps": 32, "hidden_sizes": (16,), "minibatch_size": 64}
    settings |= {"num_envs": 4, "learning_rate": 0.01, "output_dir": str(tmp_path)}
    agent = PPO(lambda: make(Meeting()), **settings)
    agent.learn(4096, progress=False)
    assert agent.evaluate(episodes=4).metrics["eval_return_mean"] == 2.0
