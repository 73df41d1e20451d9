"""Rewards that are scaled or clipped to learn from: returns stay those of the task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.envs import CounterEnv
from helpers.tiny import run_cli, tiny_config
from helpers.vector_env import VectorEnv
from rl_training.envs import SeedVectorEnv, evaluation_kwargs, make_env
from rl_training.envs.options import learning_reward, with_task_reward
from rl_training.errors import ConfigError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.collector import Collector
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.train import train
from rl_training.testing.contract import build

COUNTER = f"{CounterEnv.__module__}:CounterEnv"
OWN_RETURN = 1 + 2 + 3  # of CounterEnv with its default length
TRANSFORMS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "scale": ({"reward_scale": 0.5}, [0.5, 1.0, 1.5]),
    "clip": ({"clip_reward": True}, [1.0, 1.0, 1.0]),
    "both": ({"reward_scale": -0.5, "clip_reward": [-1.2, 0.0]}, [-0.5, -1.0, -1.2]),
}
every_transform = pytest.mark.parametrize(
    ("wrappers", "learned"), TRANSFORMS.values(), ids=[*TRANSFORMS]
)


@every_transform
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_has_the_reward_to_learn_from_and_that_of_the_task(
    wrappers: dict[str, Any], learned: list[float], mode: Any
) -> None:
    envs = SeedVectorEnv.make(COUNTER, {"wrappers": wrappers}, 2, [0], mode)
    collector = Collector(envs, torch.device("cpu"))
    collector.start()
    steps = [collector.step(np.zeros((1, 2), np.int64)).step for _ in range(3)]
    envs.close()
    np.testing.assert_allclose([step.reward[0, 1] for step in steps], learned, rtol=1e-6)
    assert [float(step.task_reward[0, 1]) for step in steps] == [1, 2, 3]
    assert collector.summary(0)["rollout/return_mean"] == OWN_RETURN
    single = VectorEnv(COUNTER, {"wrappers": wrappers})
    single.reset()
    step = single.step(np.zeros(1, np.int64))
    assert step.reward.dtype == step.task_reward.dtype == np.float32
    assert float(step.task_reward[0]) == 1
    # One environment alone, as `make_env` gives it, pays what is learned from.
    alone = make_env(COUNTER, {"wrappers": wrappers})
    alone.reset(seed=0)
    np.testing.assert_allclose([float(alone.step(0)[1]) for _ in range(3)], learned, rtol=1e-6)


def test_without_a_transform_there_is_one_reward() -> None:
    envs = SeedVectorEnv.make(COUNTER, {}, 2, [0])
    envs.reset()
    step = envs.step(np.zeros((1, 2), np.int64))
    assert step.task_reward is step.reward


@every_transform
def test_evaluation_is_paid_by_the_task(wrappers: dict[str, Any], learned: list[float]) -> None:
    learner, _ = build("dqn", task=COUNTER)
    evaluator = Evaluator(COUNTER, {"length": 3, "wrappers": wrappers}, (0,))
    assert evaluator.evaluate(learner, 2, 0) == [[OWN_RETURN, OWN_RETURN]]
    evaluator.close()
    assert learned != [1, 2, 3]


@pytest.mark.parametrize("algo", ["dqn", "ppo", "sac"])
def test_logs_and_evaluations_of_a_run_are_of_the_tasks_reward(algo: str, tmp_path: Path) -> None:
    task = COUNTER if algo == "dqn" else f"{CounterEnv.__module__}:DrivenCounterEnv"
    config = tiny_config(
        algo,
        tmp_path,
        env_id=task,
        env_kwargs={"wrappers": {"reward_scale": 0.5, "clip_reward": [0.0, 1.2]}},
    )
    result = train(config)
    assert result.metrics["eval_return_mean"] == OWN_RETURN
    lines = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    logged = [line["rollout/return_mean"] for line in lines if "rollout/return_mean" in line]
    assert set(logged) == {OWN_RETURN}
    said = run_cli("eval", "--checkpoint", result.run_dir, "--episodes", 1).values
    assert float(said["eval_return_mean"]) == OWN_RETURN
    if algo != "ppo":
        pieces = [
            rows for _, rows in load_checkpoint(result.checkpoint_path).read_segments("replay")
        ]
        rewards = np.unique(torch.cat([piece["reward"] for piece in pieces], 1).numpy())
        np.testing.assert_allclose(rewards, [0.5, 1.0, 1.2], rtol=1e-6)


def test_a_run_with_a_transform_resumes_bit_exactly(tmp_path: Path) -> None:
    kwargs = {"max_episode_steps": 20, "wrappers": {"reward_scale": 0.1}}
    report = verify_resume(
        tiny_config("sac", tmp_path, env_id="Pendulum-v1", env_kwargs=kwargs), 30
    )
    assert report.identical, report.lines()
    assert report.resume_level == "exact"


def test_atari_rewards_are_reduced_to_their_sign_where_they_are_learned_from() -> None:
    kwargs = {"mode": 0, "wrappers": {"atari": {"frame_skip": 2}, "reward_scale": 0.5}}
    transform = learning_reward("ALE/Breakout-v5", kwargs)
    assert transform is not None
    assert transform(np.array([-7.0, 0.0, 4.0], np.float32)).tolist() == [-0.5, 0.0, 0.5]
    inner = with_task_reward(kwargs)
    assert inner == {"mode": 0, "wrappers": {"atari": {"frame_skip": 2, "clip_reward": False}}}
    unclipped = {"wrappers": {"atari": {"clip_reward": False}}}
    assert learning_reward("ALE/Breakout-v5", unclipped) is None
    assert with_task_reward({"length": 3}) == {"length": 3}
    played = evaluation_kwargs(kwargs)["wrappers"]
    assert played == {"atari": {"frame_skip": 2, "clip_reward": False, "episodic_life": False}}
    assert kwargs["wrappers"] == {"atari": {"frame_skip": 2}, "reward_scale": 0.5}


@pytest.mark.parametrize("wrappers", [3, {"reward_scale": "much"}, {"reward_scal": 1.0}])
def test_wrong_transforms_are_refused_in_one_sentence(wrappers: object) -> None:
    with pytest.raises(ConfigError, match=r"env_kwargs\.wrappers"):
        SeedVectorEnv.make(COUNTER, {"wrappers": wrappers}, 2, [0])
