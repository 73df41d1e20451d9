"""Dreamer's networks: resets, sequences against single steps, shapes of images, initial outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from rl_training.errors import SpecMismatch
from rl_training.models.dreamer import (
    BLOCK_IMAGES,
    SIZES,
    DreamerActor,
    DreamerCritic,
    LatentKind,
    PartsDecoder,
    PartsEncoder,
    SizeName,
    WorldModel,
    halvings,
)
from rl_training.models.layers import BLOCK_ROWS, StackedConvTranspose2d, scaled_init
from rl_training.models.rows import split
from rl_training.models.rssm import RSSMState, one_hot_argmax
from rl_training.rng import Rng
from rl_training.spaces import observation_spec

KINDS: tuple[LatentKind, ...] = ("categorical", "gaussian")
every_kind = pytest.mark.parametrize("kind", KINDS)
S, B, T, A, I = 2, 3, 5, 2, 4


def model(kind: LatentKind = "categorical", obs_shape: tuple[int, ...] = (I,)) -> WorldModel:
    return WorldModel(obs_shape, A, latents=kind, rng=Rng(range(S), "model"))


def sequence(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(S, B, T, I, generator=generator)
    action = one_hot_argmax(torch.randn(S, B, T, A, generator=generator))
    first = torch.zeros(S, B, T, dtype=torch.bool)
    first[:, :, 0] = True
    return obs, action, first


def test_a_large_batch_in_blocks_is_what_it_is_at_once() -> None:
    world = model(obs_shape=(1, 8, 8))
    images = torch.randint(256, (S, 2 * BLOCK_IMAGES + 3, 1, 8, 8), dtype=torch.uint8)
    rows = torch.randn(S, 2 * BLOCK_ROWS + 3, world.feature_dim, requires_grad=True)
    few = rows[:, : 2 * BLOCK_IMAGES + 3]
    given: list[tuple[Any, Tensor]] = [
        (world.encoder, images),
        (world.decoder, few),
        (world.reward_head, rows),
    ]
    for network, x in given:
        made, whole = network(x), network._whole(x)
        torch.testing.assert_close(made, whole)
        weight = torch.randn_like(made)
        parameters = list(network.parameters())
        blocks, once = (
            torch.autograd.grad((weight * out).sum(), parameters) for out in (made, whole)
        )
        torch.testing.assert_close(blocks, once, rtol=1e-4, atol=1e-3)


@every_kind
def test_the_posterior_ignores_what_was_before_a_reset(kind: LatentKind) -> None:
    world = model(kind)
    obs, action, first = sequence()
    first[:, 1, 3] = True
    other_obs, other_action, _ = sequence(1)
    mixed_obs = torch.cat((other_obs[:, :, :3], obs[:, :, 3:]), 2)
    mixed_action = torch.cat((other_action[:, :, :4], action[:, :, 4:]), 2)
    ours = world.observe(obs, action, first, Rng(range(S), "noise"))
    theirs = world.observe(mixed_obs, mixed_action, first, Rng(range(S), "noise"))
    same = [ours.state.deter, ours.posterior, ours.prior, ours.state.latent]
    other = [theirs.state.deter, theirs.posterior, theirs.prior, theirs.state.latent]
    for left, right in zip(same, other, strict=True):
        torch.testing.assert_close(left[:, 1, 3:], right[:, 1, 3:])
    # Without the reset the past is remembered.
    assert not torch.allclose(ours.state.deter[:, 0, 3:], theirs.state.deter[:, 0, 3:])


def test_no_gradient_crosses_a_reset() -> None:
    world = model()
    obs, action, first = sequence()
    first[:, :, 2] = True
    obs.requires_grad_()
    found = world.observe(obs, action, first, Rng(range(S), "noise"))
    (gradient,) = torch.autograd.grad(found.state.features[:, :, 2:].sum(), obs)
    assert float(gradient[:, :, :2].abs().max()) == 0.0
    assert float(gradient[:, :, 2:].abs().min()) > 0.0


@every_kind
def test_following_a_sequence_equals_single_steps(kind: LatentKind) -> None:
    world = model(kind)
    obs, action, first = sequence()
    rng = Rng(range(S), "noise")
    whole = world.observe(obs, action, first, rng)
    rng = Rng(range(S), "noise")
    noise = world.rssm.latent.draw_noise(rng, B, T)
    state = world.rssm.initial(S, B, torch.device("cpu"))
    for step in range(T):
        taken = action[:, :, step] * (step > 0)
        state = world.rssm.observe_step(
            state, taken, world.encoder(obs[:, :, step]), noise[:, :, step]
        )
        torch.testing.assert_close(state.deter, whole.state.deter[:, :, step])
        torch.testing.assert_close(state.latent, whole.state.latent[:, :, step])


@every_kind
def test_imagining_draws_from_the_prior_of_the_next_deterministic_state(kind: LatentKind) -> None:
    world = model(kind)
    obs, action, first = sequence()
    seen = world.observe(obs, action, first, Rng(range(S), "noise"))
    before = RSSMState(seen.state.deter[:, :, 2], seen.state.latent[:, :, 2])
    noise = world.rssm.latent.draw_noise(Rng(range(S), "other"), B)
    after = world.rssm.imagine_step(before, action[:, :, 3], noise)
    torch.testing.assert_close(after.deter, seen.state.deter[:, :, 3])
    expected = world.rssm.latent.sample(seen.prior[:, :, 3], noise)
    torch.testing.assert_close(after.latent, expected)


def test_the_recurrent_state_stays_bounded() -> None:
    world = model()
    state = world.rssm.initial(S, B, torch.device("cpu"))
    rng = Rng(range(S), "noise")
    for _ in range(200):
        noise = world.rssm.latent.draw_noise(rng, B)
        state = world.rssm.imagine_step(state, 100 * torch.ones(S, B, A), noise)
    assert bool((state.deter.detach().abs() <= 1.0).all())


def test_the_first_predictions_of_reward_and_value_are_exactly_0() -> None:
    world, features = model(), torch.randn(S, 7, model().feature_dim)
    critic = DreamerCritic(world.feature_dim, rng=Rng(range(S), "critic"))
    assert not world.reward(features).detach().any()
    assert not critic.value(features).detach().any()


@pytest.mark.parametrize("discrete", [True, False])
def test_log_densities_and_entropies_of_the_policy_are_those_of_torch(discrete: bool) -> None:
    actor = DreamerActor(6, A, discrete=discrete, rng=Rng(range(S), "actor"))
    features = 30 * torch.randn(S, 8, 6)
    action = actor.sample(features, actor.draw_noise(Rng(range(S), "noise"), 8))
    log_prob, entropy = actor.log_prob_entropy(features, action)
    raw = actor.layers(features)
    known: Any  # PyTorch's distributions have no types
    if discrete:
        known = torch.distributions.Categorical(0.99 * raw.softmax(-1) + 0.01 / A)
        expected, spread = known.log_prob(action.argmax(-1)), known.entropy()
    else:
        mean, std = raw.chunk(2, -1)
        known = torch.distributions.Normal(mean.tanh(), 0.1 + 0.9 * torch.sigmoid(std + 2))
        expected, spread = known.log_prob(action).sum(-1), known.entropy().sum(-1)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, spread)


@pytest.mark.parametrize("name", ["tiny", "1m"])
@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 10, 10), (1, 84, 84), (1, 17, 30)])
def test_images_of_any_size_come_back_in_their_size(shape: tuple[int, ...], name: SizeName) -> None:
    world = WorldModel(shape, A, SIZES[name], rng=Rng(range(S), "model"))
    obs = torch.randint(256, (S, 2, *shape), dtype=torch.uint8)
    prediction = world.decoder(torch.zeros(S, 2, world.feature_dim))
    assert prediction.shape == obs.shape
    loss = world.decoder.loss(prediction, obs)
    expected = (prediction - obs.float() / 255).square().sum((2, 3, 4))
    torch.testing.assert_close(loss, expected)


def test_an_image_of_64_pixels_is_halved_four_times() -> None:
    assert halvings(64, 64) == [(64, 64), (32, 32), (16, 16), (8, 8), (4, 4)]


def test_images_that_cannot_be_taken_are_refused_in_one_sentence() -> None:
    with pytest.raises(SpecMismatch, match="channels came last"):
        model(obs_shape=(64, 64, 3))
    with pytest.raises(SpecMismatch, match="smaller than the 8 pixels"):
        model(obs_shape=(3, 7, 64))


def test_stacked_transposed_convolutions_equal_single_ones() -> None:
    rng = Rng(range(S), "conv")
    layer = StackedConvTranspose2d(3, 2, 4, rng, stride=2, padding=1, init=scaled_init(1.0))
    x = torch.randn(S, 5, 3, 4, 6)
    out = layer(x, 9, 12)
    assert out.shape == (S, 5, 2, 9, 12)
    for seed in range(S):
        single = torch.nn.functional.conv_transpose2d(
            x[seed], layer.weight[seed], layer.bias[seed], 2, 1, (1, 0)
        )
        torch.testing.assert_close(out[seed], single)


def published_weights(deter: int, classes: int) -> int:
    """Weights of the authors' networks for 64 x 64 x 3 images and 6 actions, layer by layer.

    Written down from the list of layers in the authors' `rssm.py` and `configs.yaml`, with the
    size's rule `hidden = units = 16 classes`, `depth = classes`, 32 groups, 8 blocks.
    """
    width, depth, latent, blocks = 16 * classes, classes, 32 * classes, 8

    def linear(inputs: int, outputs: int, norm: bool = False) -> int:
        return inputs * outputs + outputs + (outputs if norm else 0)

    def in_blocks(inputs: int, outputs: int) -> int:
        return blocks * (inputs // blocks) * (outputs // blocks) + outputs

    def head(layers: int, outputs: int) -> int:
        widths = [deter + latent] + [width] * layers
        hidden = sum(linear(i, width, norm=True) for i in widths[:-1])
        return hidden + linear(width, outputs)

    channels = [2 * depth, 3 * depth, 4 * depth, 4 * depth]
    pixels = 4 * 4 * channels[-1]
    encoder = sum(linear(25 * i, o, norm=True) for i, o in pairwise([3, *channels]))
    core = linear(deter, width, norm=True) + linear(latent, width, norm=True)
    core += linear(6, width, norm=True)
    core += in_blocks(deter + blocks * 3 * width, deter) + deter + in_blocks(deter, 3 * deter)
    beliefs = linear(deter + pixels, width, norm=True) + linear(width, latent)
    beliefs += linear(deter, width, norm=True) + linear(width, width, norm=True)
    beliefs += linear(width, latent)
    decoder = in_blocks(deter, pixels) + linear(latent, 2 * width, norm=True)
    decoder += linear(2 * width, pixels) + channels[-1]
    back = [*channels[::-1], 3]
    decoder += sum(linear(25 * i, o, norm=o != 3) for i, o in pairwise(back))
    heads = head(1, 255) + head(1, 1) + head(3, 6) + head(3, 255)
    return encoder + core + beliefs + decoder + heads


@pytest.mark.parametrize(
    ("name", "deter", "classes"), [("1m", 512, 4), ("12m", 2048, 16), ("25m", 3072, 24)]
)
def test_sizes_have_the_weights_of_the_authors_networks(
    name: SizeName, deter: int, classes: int
) -> None:
    size = SIZES[name]
    world = WorldModel((3, 64, 64), 6, size)
    networks: list[torch.nn.Module] = [
        world,
        DreamerActor(world.feature_dim, 6, size, discrete=True),
        DreamerCritic(world.feature_dim, size),
    ]
    count = sum(p.numel() for network in networks for p in network.parameters())
    assert count == published_weights(deter, classes)


def test_sizes_grow_with_their_names() -> None:
    sizes = list(SIZES.values())
    for before, after in pairwise(sizes):
        assert before.deter < after.deter
        assert before.units <= after.units


def as_double(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
    return module


@every_kind
def test_gradients_of_a_sequence_are_those_of_a_loop_in_double_precision(kind: LatentKind) -> None:
    size = replace(SIZES["tiny"], deter=16, hidden=6, groups=3, gaussians=4, blocks=4)
    rssm = WorldModel((I,), A, size, latents=kind, rng=Rng(range(S), "model")).rssm
    as_double(rssm)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(S, B, T, *shape, generator=generator, dtype=torch.float64)

    embedding = draw(size.units).requires_grad_()
    action = draw(A).requires_grad_()
    noise = rssm.latent.draw_noise(Rng(range(S), "noise"), B, T).double()
    first = torch.zeros(S, B, T, dtype=torch.bool)
    first[:, 1, 3] = True
    start = RSSMState(draw(16)[:, :, 0], draw(rssm.latent.size)[:, :, 0])
    found = rssm.observe(embedding, action, first, noise, start)
    states, state = [], start
    for step in range(T):
        keep = 1 - first[:, :, step, None].double()
        before = RSSMState(state.deter * keep, state.latent * keep)
        state = rssm.observe_step(
            before, action[:, :, step] * keep, embedding[:, :, step], noise[:, :, step]
        )
        states.append(state)
    deter = torch.stack([each.deter for each in states], 2)
    latent = torch.stack([each.latent for each in states], 2)
    torch.testing.assert_close(found.state.deter, deter, atol=1e-12, rtol=0.0)
    torch.testing.assert_close(found.state.latent, latent, atol=1e-12, rtol=0.0)
    weights = draw(16), draw(rssm.latent.size)
    leaves = [embedding, action, *rssm.parameters()]
    gradients = [
        torch.autograd.grad(
            (weights[0] * h).sum() + (weights[1] * z).sum(), leaves, allow_unused=True
        )
        for h, z in ((found.state.deter, found.state.latent), (deter, latent))
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


PARTS = observation_spec(
    spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "speed": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "gear": spaces.Discrete(4, start=1),
            "room": spaces.Discrete(600),
        }
    ),
    "test",
)
TABULAR = 3 + 4 + 600


@pytest.mark.parametrize("size", ["tiny", "1m"])
def test_a_row_is_encoded_and_predicted_as_its_image_and_the_rest(size: SizeName) -> None:
    world = WorldModel((PARTS.width,), A, SIZES[size], parts=PARTS, rng=Rng(range(S), "model"))
    rows = torch.from_numpy(PARTS.example_rows(S * B, np.random.default_rng(0)))
    rows = rows.view(S, B, -1)
    encoder, decoder = world.encoder, world.decoder
    assert isinstance(encoder, PartsEncoder)
    assert isinstance(decoder, PartsDecoder)
    leaves = split(PARTS, rows)
    room = functional.one_hot(leaves["room"][..., 0].long(), 600).float()
    # In the order of the space, which sorts its keys.
    vector = torch.cat((leaves["gear"], room, leaves["speed"]), -1)
    assert encoder.vector is not None
    assert decoder.vector is not None
    wanted = torch.cat((encoder.images["0"](leaves["camera"]), encoder.vector(vector)), -1)
    assert torch.equal(encoder(rows), wanted)
    assert wanted.shape == (S, B, encoder.embedding_dim)
    features = torch.randn(S, B, world.feature_dim)
    image: Any = decoder.images["0"]
    prediction = decoder(features)
    assert prediction.shape == (S, B, 8 * 8 * 3 + TABULAR)
    apart = image.loss(image(features), leaves["camera"])
    apart = apart + decoder.vector.loss(decoder.vector(features), vector)
    torch.testing.assert_close(decoder.loss(prediction, rows), apart)
    shown = decoder.pictures(prediction)
    assert shown is not None
    assert torch.equal(shown, image(features))


def test_a_perfect_prediction_of_a_row_costs_nothing() -> None:
    world = WorldModel((PARTS.width,), A, parts=PARTS, rng=Rng(range(S), "model"))
    rows = torch.from_numpy(PARTS.example_rows(S * B * T, np.random.default_rng(1)))
    along = rows.view(S, B, T, -1)
    target = world.decoder.target(along)
    assert target.shape == (S, B, T, 8 * 8 * 3 + TABULAR)
    flat = along.flatten(1, 2)
    assert (world.decoder.loss(target.flatten(1, 2), flat) == 0).all()
