"""Encoders of images: shapes, the seed axis, pixels as numbers, and which fits which size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.settings import settings_of
from rl_training.algorithms.dqn import DQN, dqn_networks
from rl_training.algorithms.ppo import PPO, ppo_networks
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, SpecMismatch
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.encoders import (
    EncoderName,
    EncoderOptions,
    MLPEncoder,
    NatureTrunk,
    PixelEncoder,
    check_image,
    make_encoder,
)
from rl_training.models.layers import StackedConv2d, StackedLinear, noisy_layers, set_precision
from rl_training.rng import Rng

SEEDS = (3, 7, 11)
KINDS: list[tuple[EncoderName, int]] = [("nature", 36), ("impala", 20), ("small", 10)]


def image_task(shape: tuple[int, ...] = (3, 10, 10)) -> EnvSpec:
    return EnvSpec(
        env_id="Test-v0",
        obs_shape=shape,
        obs_dtype="uint8",
        action_kind="discrete",
        action_shape=(),
        num_actions=4,
        action_dtype="int64",
    )


def pixels(seeds: int, batch: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (seeds, batch, *shape), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("kind", "size"), KINDS)
@pytest.mark.parametrize("noisy", [False, True])
def test_stacked_seeds_equal_encoders_one_by_one(kind: EncoderName, size: int, noisy: bool) -> None:
    shape = (2, size, size)
    images = pixels(3, 5, *shape)
    group = PixelEncoder(shape, (8,), Rng(SEEDS, "test"), kind=kind, noisy=noisy)
    together = group(images)
    assert together.shape == (3, 5, 8)
    for index, seed in enumerate(SEEDS):
        single = PixelEncoder(shape, (8,), Rng((seed,), "test"), kind=kind, noisy=noisy)
        alone = single(images[index : index + 1])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_grouped_and_separate_convolutions_are_the_same(stride: int, padding: int) -> None:
    layer = StackedConv2d(2, 5, 3, Rng(SEEDS, "test"), stride=stride, padding=padding)
    x = torch.randn(3, 4, 2, 9, 9, generator=torch.Generator().manual_seed(1))
    joined = functional.conv2d(
        x.transpose(0, 1).reshape(4, 6, 9, 9),
        layer.weight.flatten(0, 1),
        layer.bias.flatten(),
        stride,
        padding,
        groups=3,
    )
    separate = layer(x)
    expected = joined.view(4, 3, 5, *joined.shape[-2:]).transpose(0, 1)
    torch.testing.assert_close(separate, expected)


def test_weights_lie_in_memory_as_gradients_do() -> None:
    for kind, size in KINDS:
        encoder = PixelEncoder(
            (2, size, size), (8,), Rng(SEEDS, "test"), kind=kind, orthogonal_init=True
        )
        assert all(parameter.is_contiguous() for parameter in encoder.parameters())


def test_nature_is_the_network_of_the_paper() -> None:
    encoder = PixelEncoder((4, 84, 84), (512,), Rng((0,), "test"), kind="nature")
    twin = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip
    ours = [layer for layer in encoder.modules() if isinstance(layer, StackedConv2d)]
    with torch.no_grad():
        for layer, theirs in zip(ours, [twin[0], twin[2], twin[4]], strict=True):
            assert isinstance(theirs, nn.Conv2d)
            theirs.weight.copy_(layer.weight[0])
            theirs.bias.copy_(layer.bias[0])  # type: ignore[union-attr]
        twin[7].weight.copy_(encoder.layers[0].weight[0].T)  # type: ignore[operator, index]
        twin[7].bias.copy_(encoder.layers[0].bias[0, 0])  # type: ignore[operator, index]
    images = pixels(1, 2, 4, 84, 84)
    torch.testing.assert_close(encoder(images)[0], twin(images[0].float() / 255))


def test_impala_halves_three_times_and_counts_its_parameters() -> None:
    encoder = PixelEncoder((4, 84, 84), (), Rng((0,), "test"), kind="impala")
    assert encoder.embedding_dim == 32 * 11 * 11
    convolutions = [(4, 16), (16, 32), (32, 32)] + 4 * [(16, 16)] + 8 * [(32, 32)]
    expected = sum(9 * inputs * outputs + outputs for inputs, outputs in convolutions)
    assert sum(p.numel() for p in encoder.parameters()) == expected


def test_white_pixels_are_ones_and_floats_are_taken_as_they_are() -> None:
    options = EncoderOptions(hidden_sizes=(), pixel_sizes=(6,))
    of_bytes = make_encoder((1, 10, 10), "uint8", options, Rng((0,), "test"))
    of_floats = make_encoder((1, 10, 10), "float32", options, Rng((0,), "test"))
    white = torch.full((1, 1, 1, 10, 10), 255, dtype=torch.uint8)
    torch.testing.assert_close(of_bytes(white), of_floats(torch.ones(1, 1, 1, 10, 10)))


def test_vectors_get_hidden_layers() -> None:
    options = EncoderOptions(hidden_sizes=(7,), pixel_sizes=(6,))
    encoder = make_encoder((3,), "float32", options, Rng((0,), "test"))
    assert isinstance(encoder, MLPEncoder)
    assert encoder.embedding_dim == 7


def test_auto_goes_by_the_size_of_the_image() -> None:
    assert check_image((4, 84, 84), "auto") == "nature"
    assert check_image((4, 10, 10), "auto") == "small"
    assert check_image((4, 10, 10), "impala") == "impala"


def test_an_image_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecMismatch, match="smaller than the 36 pixels"):
        check_image((4, 35, 84), "nature")
    with pytest.raises(SpecMismatch, match="channel_first"):
        check_image((84, 84, 4), "auto")


def test_the_smallest_image_for_nature_is_the_smallest() -> None:
    PixelEncoder((1, 36, 36), (), Rng((0,), "test"), kind="nature")
    one_less = NatureTrunk(1, Rng((0,), "test"), None)
    with pytest.raises(RuntimeError, match="ernel size"):
        one_less(torch.zeros(1, 1, 1, 35, 35))


def test_noise_is_in_the_layers_after_the_convolutions() -> None:
    config = settings_of(DQN, noisy=True, features_dim=6, head_hidden_sizes=(5,))
    network = dqn_networks(image_task(), config, Rng((0,), "test"))["q_network"]
    assert len(noisy_layers(network)) == 3


def test_without_features_a_head_reads_the_convolutions() -> None:
    config = settings_of(DQN, features_dim=None)
    network = dqn_networks(image_task(), config, Rng((0,), "test"))["q_network"]
    assert network.encoder.embedding_dim == 16 * 10 * 10  # type: ignore[union-attr]


def test_policy_and_value_share_the_features_of_an_image() -> None:
    config = settings_of(PPO, features_dim=6, head_hidden_sizes=(5,))
    model = ppo_networks(image_task(), config, Rng((0,), "test"))["model"]
    features = model.embed(pixels(1, 2, 3, 10, 10))  # type: ignore[operator]
    assert features.shape == (1, 2, 6)
    assert model.value(features).shape == (1, 2)  # type: ignore[operator]


def test_images_are_not_standardised() -> None:
    settings = settings_of(PPO, normalize_obs=True)
    with pytest.raises(ConfigError, match="normalize_obs is true"):
        get_algorithm_spec("ppo").check_env(image_task(), settings)


def test_bf16_convolutions_give_single_precision() -> None:
    class Holder:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.network = PixelEncoder((1, 10, 10), (6,), Rng((0,), "test"))

    holder = Holder()
    images = pixels(1, 2, 1, 10, 10)
    exact = holder.network(images)
    set_precision(holder, "bf16")
    rough = holder.network(images)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", ["nature", "small", "impala"])
def test_layer_norm_is_over_the_channels_of_each_pixel(kind: EncoderName) -> None:
    size = 36 if kind == "nature" else 10
    encoder = PixelEncoder((2, size, size), (8,), Rng((0,), "test"), kind=kind, layer_norm=True)
    convolutions = [part for part in encoder.modules() if isinstance(part, StackedConv2d)]
    for convolution in convolutions:
        norm, inputs = convolution.norm, convolution.weight.shape[2]
        assert norm is not None
        with torch.no_grad():
            norm.scale.copy_(torch.linspace(0.5, 2, norm.size).view_as(norm.scale))
            norm.shift.copy_(torch.linspace(-1, 1, norm.size).view_as(norm.shift))
        x = torch.randn(1, 3, inputs, 9, 9, generator=torch.Generator().manual_seed(0))
        plain = convolution._convolved(x)[0].permute(0, 2, 3, 1)
        scale, shift = norm.scale.flatten(), norm.shift.flatten()
        expected = functional.layer_norm(plain, (norm.size,), scale, shift).permute(0, 3, 1, 2)
        torch.testing.assert_close(convolution(x)[0], expected, rtol=1e-4, atol=1e-5)
    assert len(encoder.norms) == 1


def test_layer_norm_forgets_the_scale_of_a_layer_before_it() -> None:
    encoder = PixelEncoder((2, 36, 36), (8,), Rng((0,), "test"), layer_norm=True)
    images = pixels(1, 4, 2, 36, 36)
    before = encoder(images)
    with torch.no_grad():
        for part in encoder.modules():
            if isinstance(part, StackedConv2d | StackedLinear):
                part.weight.mul_(3)
                part.bias.mul_(3)
    torch.testing.assert_close(encoder(images), before, rtol=1e-2, atol=1e-3)
