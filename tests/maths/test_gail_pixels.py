"""GAIL and BC on images: features and their gradient, one encoder pass, uint8 kept, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.bc import BC
from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.gail.losses import penalty_of_norm
from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.data.datasets.writers import save_dataset
from rl_training.data.replay.pairs import GeneratorReplay, Pairs
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models import MLPGAILDiscriminator, PixelEncoder
from rl_training.rng import Rng
from rl_training.testing.contract import PIXEL_TASK, build, flat_state, make_batch
from rl_training.tools.collect import CollectPlan, collect_dataset

SHAPE = (2, 10, 10)


def gail(seeds: tuple[int, ...] = (0,), **settings: Any) -> tuple[GAIL, EnvSpec]:
    learner, env = build("gail", seeds, PIXEL_TASK, **settings)
    assert isinstance(learner, GAIL)
    return learner, env


def rollout(env: EnvSpec, key: int = 0, seeds: tuple[int, ...] = (0,)) -> RolloutBatch:
    batch = make_batch("gail", env, seeds, key)
    assert isinstance(batch, RolloutBatch)
    return batch


def images(rows: int, seeds: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (seeds, rows, *SHAPE), generator=generator, dtype=torch.uint8)


# The discriminator


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_the_written_gradient_at_the_features_is_autograds(spectral_norm: bool) -> None:
    rng = Rng((0, 1), "test")
    discriminator = MLPGAILDiscriminator(
        200,
        3,
        (12, 8),
        discrete=True,
        encoder=PixelEncoder(SHAPE, (16,), rng),
        spectral_norm=spectral_norm,
        absorbing=True,
        rng=rng,
    )
    features = discriminator.embed(images(6, seeds=2)).detach().requires_grad_()
    action = torch.arange(6).remainder(3).expand(2, 6)
    rows = discriminator.inputs(features, action)
    logit = discriminator.forward(rows).sum()
    (by_features,) = torch.autograd.grad(logit, features, create_graph=True)
    found = discriminator.input_gradient(rows)
    assert found.shape == (2, 6, 16 + 3 + 1)
    torch.testing.assert_close(found[..., :16], by_features)
    assert by_features.abs().max() > 1e-3


def test_features_of_images_have_one_scale_however_bright_they_are() -> None:
    learner, _ = gail()
    features = learner.features(images(5)).detach()
    torch.testing.assert_close(features.mean(-1), torch.zeros(1, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.var(-1, correction=0), torch.ones(1, 5), atol=1e-2, rtol=0)


def test_logits_are_the_same_for_all_rows_at_once_and_one_by_one() -> None:
    learner, env = gail(seeds=(0, 1))
    pairs = Pairs.of_rollout(rollout(env, seeds=(0, 1))).slice(0, 7)
    together = learner.logits(pairs)
    alone = torch.cat([learner.logits(pairs.slice(row, row + 1)) for row in range(7)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert together.std() > 1e-4


@pytest.mark.parametrize("form", ["airl", "conditional"])
def test_a_reward_runs_the_encoder_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, env = gail(reward_form=form)
    calls: list[int] = []
    embed = learner.discriminator.embed

    def counted(obs: torch.Tensor) -> torch.Tensor:
        calls.append(obs.shape[1])
        return embed(obs)

    monkeypatch.setattr(learner.discriminator, "embed", counted)
    pairs = Pairs.of_rollout(rollout(env))
    learner.reward(pairs)
    assert calls == [pairs.num_rows]


def test_a_penalty_on_features_moves_the_layers_that_read_them_and_no_encoder() -> None:
    learner, env = gail(gradient_penalty=1.0)
    pairs = Pairs.of_rollout(rollout(env)).slice(0, 8)
    gradient = learner.discriminator.input_gradient(learner.inputs(pairs).detach())
    encoder = learner.discriminator.encoder
    assert isinstance(encoder, PixelEncoder)
    parameters = list(encoder.parameters())
    total = penalty_of_norm(gradient).sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    assert found == (None,) * len(parameters)
    (weight,) = torch.autograd.grad(total, [learner.discriminator._layers[0].weight])
    assert weight.abs().max() > 0
    # And so it is in a step: the encoder goes where it goes without a penalty.
    states = []
    for penalty in (0.0, 50.0):
        other, _ = gail(gradient_penalty=penalty)
        other.discriminator_step(
            pairs, pairs._replace(obs=255 - pairs.obs), torch.full((1, 8, 1), 0.5)
        )
        states.append(flat_state(other.state_dict()))
    moved = {name for name in states[0] if not np.array_equal(states[0][name], states[1][name])}
    assert any(name.startswith("discriminator.layers") for name in moved)
    assert not any(name.startswith("discriminator.encoder") for name in moved)


def test_policy_and_discriminator_share_no_weights() -> None:
    learner, _ = gail()
    ours = {parameter.data_ptr() for parameter in learner.model.parameters()}
    theirs = {parameter.data_ptr() for parameter in learner.discriminator.parameters()}
    assert not ours & theirs
    assert learner.model.encoder is not learner.discriminator.encoder


def test_the_named_widths_are_those_of_the_networks() -> None:
    learner, _ = gail(discriminator_features_dim=24, discriminator_head_hidden_sizes=[7, 5])
    shapes = [tuple(layer.weight.shape[1:]) for layer in learner.discriminator._layers]
    assert shapes == [(24 + 3, 7), (7, 5), (5, 1)]
    wide, _ = gail(discriminator_features_dim=None)
    assert wide.discriminator.input_dim == 16 * 100 + 3


def test_an_encoder_lets_the_logit_depend_on_the_image() -> None:
    # Bright images are the expert's, dark ones the policy's, with the same actions.
    learner, _ = gail(discriminator_learning_rate=0.01)
    obs, action = images(16), torch.zeros(1, 16, dtype=torch.int64)
    bright = Pairs(obs // 2 + 128, action, torch.zeros(1, 16))
    dark = Pairs(obs // 2 * (obs % 2), action, torch.zeros(1, 16))
    for _ in range(60):
        learner.discriminator_step(bright, dark, torch.zeros(1, 16, 1))
    assert float(learner.reward(bright).min()) > float(learner.reward(dark).max())


# What is kept


def test_pairs_and_the_replay_keep_images_as_bytes() -> None:
    learner, env = gail(discriminator_rollouts=3)
    assert learner.expert.obs.dtype == torch.uint8
    batch = rollout(env)
    learner.update(batch)
    kept = learner.generator_replay.state_dict()["obs"]
    assert kept.dtype == torch.uint8
    assert torch.equal(kept, batch.obs.flatten(1, 2))
    other = GeneratorReplay(2)
    other.load_state_dict(learner.generator_replay.state_dict())
    assert other.with_current(Pairs.of_rollout(batch)).obs.dtype == torch.uint8


def test_no_statistics_are_taken_of_images() -> None:
    learner, env = gail(normalize_discriminator_obs=True)
    learner.update(rollout(env))
    assert not learner.standardizes
    assert float(learner.discriminator_norm.count) == 0


# Policies


def test_a_warm_start_fits_the_encoder_too_and_leaves_the_value_alone() -> None:
    learner, _ = gail(bc_warmup_updates=60, expert_dataset_size=32)
    expert = learner.expert

    def likelihood() -> float:
        features = learner.model.embed(expert.obs)
        return float(learner.model.log_prob_entropy(features, expert.action)[0].detach().mean())

    before, first = flat_state(learner.state_dict()), likelihood()
    learner.clone_expert()
    assert likelihood() > first
    after = flat_state(learner.state_dict())
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    parts = {name.split(".")[1] for name in moved if name.startswith("model.")}
    assert parts == {"actor", "encoder"}


@pytest.mark.parametrize(
    ("algo", "key"), [("gail", "normalize_obs"), ("bc", "normalize_observations")]
)
def test_images_are_not_standardised(algo: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo_kwargs.{key} is true, but .* gives images"):
        build(algo, (0,), PIXEL_TASK, None, **{key: True})


def test_cloning_learns_what_the_picture_says() -> None:
    # The action is the channel that is lit, so the picture tells all.
    learner, env = build("bc", task=PIXEL_TASK, learning_rate=0.01)
    assert isinstance(learner, BC)
    action = torch.arange(32).remainder(2).unsqueeze(0)
    obs = torch.zeros(1, 32, *env.obs_shape, dtype=torch.uint8)
    obs[0, torch.arange(32), action[0], torch.arange(32) % 10] = 255
    shown = TransitionBatch(
        obs=obs, action=action, reward=torch.zeros(1, 32), next_obs=obs, discount=torch.ones(1, 32)
    )
    for _ in range(40):
        learner.update(shown)
    assert torch.equal(learner.act(obs), action)


@pytest.mark.parametrize("algo", ["gail", "bc"])
def test_recorded_images_come_back_as_bytes(algo: str, tmp_path: Path) -> None:
    recorded = collect_dataset(CollectPlan(env_id=PIXEL_TASK, steps=40))
    assert recorded.observations.dtype == np.uint8
    path = tmp_path / "catch.npz"
    save_dataset(recorded, path, "npz")
    if algo == "gail":
        learner, _ = gail(expert_dataset_kind="npz", expert_dataset_path=str(path))
        assert np.array_equal(learner.expert.obs[0].numpy(), recorded.observations)
        assert np.array_equal(learner.expert.action[0].numpy(), recorded.actions)
        return
    from rl_training.runtime.replay import load_buffer

    cloner, env = build(
        "bc", task=PIXEL_TASK, dataset_kind="npz", dataset_path=str(path), batch_size=8
    )
    batch = load_buffer(cloner, env)[0].sample(8)
    assert batch.obs.dtype == torch.uint8
    assert torch.isfinite(torch.tensor(cloner.update(batch).metrics["loss"]))
