"""An actor that reads the features of the critics' encoder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training import SAC
from rl_training.algorithms.base import frozen_copy
from rl_training.errors import ConfigError
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.testing.contract import (
    assert_member_equals,
    build,
    flat_state,
    make_batch,
    parts_task,
    pixel_task,
    random_obs,
    small_config,
)

WAYS = [
    ("sac", pixel_task("sac")),
    ("td3", parts_task("td3")),
    ("discrete_sac", pixel_task("discrete_sac")),
    ("iql", parts_task("iql")),
]


def shared(algo: str, task: str, seeds: tuple[int, ...] = (0,), **settings: Any) -> tuple[Any, Any]:
    """A small learner whose actor reads the critics' encoder, and its task."""
    return build(algo, seeds=seeds, task=task, **{"share_encoder": True} | settings)


every_way = pytest.mark.parametrize(("algo", "task"), WAYS)


@every_way
def test_the_actor_reads_the_critics_features_and_does_not_train_them(algo: str, task: str) -> None:
    learner, env = shared(algo, task)
    model, apart = learner.model, shared(algo, task, share_encoder=False)[0]
    encoder = dict(model.critic.encoder.named_parameters())
    assert not encoder.keys() & dict(model.actor.named_parameters()).keys()
    count = sum(tensor.numel() for tensor in encoder.values())
    sizes = [sum(t.numel() for t in m.parameters()) for m in (apart.model, model)]
    assert sizes[0] - sizes[1] == count > 0
    obs = random_obs(env, (1, 4), torch.Generator().manual_seed(0))
    features = model.critic.encoder(obs)
    assert torch.equal(model.actor(obs), model.actor.layers(features))
    reached = torch.autograd.grad(
        model.actor(obs).sum(), list(encoder.values()), allow_unused=True, materialize_grads=False
    )
    assert all(gradient is None for gradient in reached)


@every_way
def test_every_network_moves_and_a_seed_learns_in_a_group_as_alone(algo: str, task: str) -> None:
    seeds = (3, 7)
    group, env = shared(algo, task, seeds, adam_epsilon=1e-4)
    singles = [shared(algo, task, (seed,), adam_epsilon=1e-4)[0] for seed in seeds]
    before = flat_state(group.state_dict())
    for key in range(3):
        group.update(make_batch(algo, env, seeds, key))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch(algo, env, (seed,), key))
    after = flat_state(group.state_dict())
    for name, _ in group.model.named_parameters():
        assert not torch.equal(before[f"model.{name}"], after[f"model.{name}"]), name
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)


def test_a_copy_of_the_actor_reads_the_same_encoder_and_a_copy_of_all_reads_its_own() -> None:
    learner, env = shared("td3", pixel_task("td3"))
    model = learner.model
    obs = random_obs(env, (1, 4), torch.Generator().manual_seed(0))
    actor, whole = frozen_copy(model.actor), copy.deepcopy(model)
    before = model.actor(obs)
    with torch.no_grad():
        for parameter in model.critic.encoder.parameters():
            parameter.mul_(2.0)
    assert not torch.equal(model.actor(obs), before)
    assert torch.equal(actor(obs), model.actor(obs))
    assert torch.equal(whole.actor(obs), before)
    assert all(parameter.requires_grad for parameter in model.critic.encoder.parameters())


@pytest.mark.parametrize("algo", ["sac", pytest.param("td3", marks=pytest.mark.matrix)])
def test_a_run_is_resumed_bit_exactly_and_its_agent_is_saved_and_loaded(
    algo: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"share_encoder": True, "random_shift": 1}
    config = small_config(algo, tmp_path, task=pixel_task(algo), algo_kwargs=settings)
    report = verify_resume(config, 70)
    assert report.identical, report.lines()


def test_a_saved_agent_acts_as_before(tmp_path: Path) -> None:
    small: dict[str, Any] = {"learning_starts": 10, "batch_size": 8, "output_dir": str(tmp_path)}
    agent = SAC(pixel_task("sac"), share_encoder=True, **small)
    agent.learn(20, progress=False)
    image = np.random.default_rng(0).integers(0, 256, (2, 10, 10)).astype(np.uint8)
    action = agent.predict(image)
    saved = agent.save(tmp_path / "agent.safetensors")
    assert np.array_equal(SAC.load(saved).predict(image), action)
    chosen = agent.policy(torch.from_numpy(image)[None])[0]
    assert np.allclose(chosen.detach().numpy(), action)


def test_vectors_have_no_encoder_to_share() -> None:
    with pytest.raises(ConfigError, match=r"share_encoder is true, but Pendulum-v1 gives vectors"):
        SAC("Pendulum-v1", share_encoder=True).predict(np.zeros(3, np.float32))
