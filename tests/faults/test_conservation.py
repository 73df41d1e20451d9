"""What a learner is given is what happened (R17, R18), in runs of every online algorithm.

The environment's observation is (episode, step) and its reward the step, so that every number of a
stored transition is known: nothing is lost, doubled, or crosses a reset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.spec import Loop
from rl_training.data.batch import RolloutBatch
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime import loops
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

LENGTH, STEPS = 7, 72
ENDS = {
    "terminated": {"terminated": True, "truncated": False},
    "truncated": {"terminated": False, "truncated": True},
    "both": {"terminated": True, "truncated": True},
}
ONLINE = [a for a in algorithm_names() if get_algorithm_spec(a).loop is not Loop.OFFLINE]
ENV = {"discrete": "helpers.envs:CounterEnv", "continuous": "helpers.envs:DrivenCounterEnv"}
UNKNOWN_TASK = {"termination_function": "never"}
"""What a model-based method must be told about a task that nobody knows."""


def config_of(algo: str, folder: Path, num_envs: int, ends: dict[str, bool]) -> Any:
    spec = get_algorithm_spec(algo)
    fields = spec.config_class.model_fields
    told = {name: value for name, value in UNKNOWN_TASK.items() if name in fields}
    return small_config(
        algo,
        folder,
        task=ENV[spec.action_kinds[0]],
        env_kwargs={"length": LENGTH, **ends},
        num_envs=num_envs,
        total_timesteps=STEPS,
        eval_episodes=0,
        algo_kwargs=told,
    )


def rollouts_of(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the on-policy loop gathers, `[T, n, ...]` each."""
    found: list[dict[str, Any]] = []
    original = loops.gather_rollout

    def gather(*arguments: Any) -> RolloutBatch:
        batch = original(*arguments)
        names = ("obs", "next_obs", "reward", "terminated", "truncated")
        found.append({name: getattr(batch, name)[0].clone() for name in names})
        return batch

    monkeypatch.setattr(loops, "gather_rollout", gather)
    train(config)
    return found


def transitions(config: Any, monkeypatch: pytest.MonkeyPatch, num_envs: int) -> dict[str, Any]:
    """All transitions that a run stored or gathered, `[steps, n, ...]`."""
    if get_algorithm_spec(config.algo).loop is Loop.ON_POLICY:
        parts = rollouts_of(config, monkeypatch)
    else:
        loaded = open_checkpoint(train(config).run_dir)
        parts = [
            {name: value[0].reshape(-1, num_envs, *value.shape[2:]) for name, value in rows.items()}
            for _, rows in loaded.read_segments("replay")
        ]
    rows = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    if "next_obs" not in rows:  # sequences store what a step led to, beside its action
        rows["next_obs"] = rows.pop("obs")
    if "continues" in rows:
        rows["terminated"] = 1 - rows["continues"]
    return rows


PAIRS = [(algo, 1 if algo < "n" else 3, "both") for algo in ONLINE if algo not in ("dqn", "ppo")]
PAIRS += [(algo, n, ends) for algo in ("dqn", "ppo") for n in (1, 3) for ends in ENDS]


@pytest.mark.expensive
@pytest.mark.parametrize(("algo", "num_envs", "ends"), PAIRS)
def test_every_transition_is_one_that_happened(
    algo: str, num_envs: int, ends: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = transitions(config_of(algo, tmp_path, num_envs, ENDS[ends]), monkeypatch, num_envs)
    steps = len(rows["reward"])
    assert STEPS <= steps * num_envs < STEPS + 16 * num_envs
    clock = np.arange(steps)[:, None].repeat(num_envs, 1)  # [steps, n]
    at, episode = clock % LENGTH, 1 + clock // LENGTH
    if "obs" in rows:
        np.testing.assert_array_equal(rows["obs"][..., 1], at)
        np.testing.assert_array_equal(rows["obs"][..., 0], episode)
    np.testing.assert_array_equal(rows["next_obs"][..., 1], at + 1)
    np.testing.assert_array_equal(rows["next_obs"][..., 0], episode)
    if algo != "gail":  # its rewards are the discriminator's
        np.testing.assert_array_equal(rows["reward"], at + 1)
    last = at == LENGTH - 1
    np.testing.assert_array_equal(rows["terminated"].astype(bool), last & ENDS[ends]["terminated"])
    np.testing.assert_array_equal(rows["truncated"].astype(bool), last & ENDS[ends]["truncated"])
