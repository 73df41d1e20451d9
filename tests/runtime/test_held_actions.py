"""Random actions that are held for some steps: which one belongs to a step, and where they stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.loops import HeldActions
from rl_training.runtime.train import train
from rl_training.testing.contract import build, flat_state, small_config

ENVS = 2
OBS = np.zeros((1, ENVS, 3), np.float32)
"""What is seen is of no account where all actions are allowed."""


def test_an_action_is_held_for_so_many_steps_of_its_environment() -> None:
    learner, _ = build("sac", seeds=(3, 4))
    held = HeldActions(learner, ENVS, hold=3)
    actions = torch.stack([held.at(step * ENVS, OBS) for step in range(9)])  # [9, S, n, A]
    blocks = actions.view(3, 3, *actions.shape[1:])
    assert (blocks == blocks[:, :1]).all()
    drawn = blocks[:, 0].flatten().tolist()
    assert len(set(drawn)) == len(drawn), "each draw, seed and environment has its own"


def test_the_action_follows_from_the_step_alone_and_each_seed_has_its_own() -> None:
    group, _ = build("sac", seeds=(3, 4))
    single, _ = build("sac", seeds=(4,))
    before = flat_state(group.state_dict())
    walked = HeldActions(group, ENVS, hold=3)
    for step in range(0, 40, ENVS):
        last = walked.at(step, OBS)
    assert torch.equal(last, HeldActions(group, ENVS, hold=3).at(38, OBS))
    assert torch.equal(last[1:], HeldActions(single, ENVS, hold=3).at(38, OBS))
    after = flat_state(group.state_dict())
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)


def test_actions_that_are_not_held_are_the_learners_own() -> None:
    first, _ = build("sac")
    second, _ = build("sac")
    held = HeldActions(first, ENVS, hold=1)
    for step in range(3):
        assert torch.equal(held.at(step * ENVS, OBS), second.random_action(ENVS))


def test_a_run_holds_its_random_actions_and_goes_on_inside_one(tmp_path: Path) -> None:
    settings = {"random_action_hold": 7, "learning_starts": 60, "buffer_capacity": 1_000}
    config = small_config("sac", tmp_path, num_envs=ENVS, algo_kwargs=settings)
    loaded = open_checkpoint(train(config).checkpoint_path)
    pieces = [rows["action"] for _, rows in loaded.read_segments("replay")]
    actions = torch.cat(pieces, 1)[0].numpy().reshape(-1, ENVS)
    held = actions[:28].reshape(4, 7, ENVS)
    np.testing.assert_array_equal(held, np.broadcast_to(held[:, :1], held.shape))
    assert (actions[30:40] != actions[30]).any(), "the policy's own are not held"
    assert verify_resume(config.replace(output_dir=str(tmp_path / "cut")), 32).identical
