"""Stacked layers: S x N networks in one product equal S x N networks of PyTorch."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from rl_training.models.fused_mlp import Precision
from rl_training.models.layers import (
    ACTIVATIONS,
    BLOCK_ROWS,
    StackedLayerNorm,
    StackedLinear,
    StackedMLP,
    orthogonal_init,
    tanh,
)
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng

SIZES = (3, 16, 8, 2)
SEEDS = (0, 7, 11)


def plain_chain(mlp: StackedMLP, at: tuple[int, ...]) -> nn.Sequential:
    """Build one member out of `torch.nn.Linear` with copied weights."""
    parts: list[nn.Module] = []
    for layer in mlp.layers:
        assert isinstance(layer, StackedLinear)
        weight, bias = layer.weight[at], layer.bias[at]
        linear = nn.Linear(*weight.shape)
        linear.load_state_dict({"weight": weight.T.detach(), "bias": bias[0].detach()})
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def weights_of(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()]


def test_stacked_seeds_equal_separate_networks() -> None:
    mlp = StackedMLP(SIZES, Rng(SEEDS, "w"))
    x = Rng(SEEDS, "x").normal(8, 3)
    out = mlp(x)
    assert out.shape == (3, 8, 2)
    for seed in range(3):
        torch.testing.assert_close(out[seed], plain_chain(mlp, (seed,))(x[seed]))


def test_stacked_members_equal_separate_networks() -> None:
    mlp = StackedMLP(SIZES, Rng(SEEDS, "w"), members=(2,))
    x = Rng(SEEDS, "x").normal(8, 3)
    out = mlp(x)
    assert out.shape == (3, 2, 8, 2)
    for seed, member in product(range(3), range(2)):
        expected = plain_chain(mlp, (seed, member))(x[seed])
        torch.testing.assert_close(out[seed, member], expected)


def test_stacked_members_have_the_gradients_of_separate_networks() -> None:
    mlp = StackedMLP((3, 16, 1), Rng(SEEDS, "w"), members=(2,))
    x = Rng(SEEDS, "x").normal(8, 3)
    stacked = torch.autograd.grad(mlp(x).square().mean((-2, -1)).sum(), list(mlp.parameters()))
    for seed, member in product(range(3), range(2)):
        chain = plain_chain(mlp, (seed, member))
        loss = chain(x[seed]).square().mean()
        single = torch.autograd.grad(loss, list(chain.parameters()))
        for ours, theirs in zip(stacked, single, strict=True):
            expected = theirs.T if theirs.ndim == 2 else theirs.unsqueeze(0)
            torch.testing.assert_close(ours[seed, member], expected)


def test_layer_norm_equals_the_library_with_scale_and_shift_per_member() -> None:
    norm = StackedLayerNorm(5, Rng(SEEDS, "w"), (2,))
    rng = Rng(SEEDS, "x")
    with torch.no_grad():
        norm.scale.copy_(rng.normal(2, 1, 5))
        norm.shift.copy_(rng.normal(2, 1, 5))
    x = rng.normal(2, 8, 5)
    out = norm(x)
    for at in product(range(3), range(2)):
        library = nn.LayerNorm(5)
        library.load_state_dict(
            {"weight": norm.scale[at][0].detach(), "bias": norm.shift[at][0].detach()}
        )
        torch.testing.assert_close(out[at], library(x[at]))


def test_layer_norm_stands_before_each_activation_but_not_after_the_last_layer() -> None:
    mlp = StackedMLP((3, 16, 2), Rng((0,), "w"), layer_norm=True)
    x = Rng((0,), "x").normal(8, 3)
    first, last = mlp.layers
    expected = last(torch.relu(nn.functional.layer_norm(first(x), (16,))))
    torch.testing.assert_close(mlp(x), expected)
    assert len(mlp.norms) == 1


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_is_applied_between_layers_only(name: str) -> None:
    mlp = StackedMLP((2, 4, 1), Rng((0,), "w"), activation=name)
    x = Rng((0,), "x").normal(8, 2)
    first, last = mlp.layers
    torch.testing.assert_close(mlp(x), last(getattr(nn.functional, name)(first(x))))


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 3), (3, 8), (5, 5)])
def test_orthogonal_weights_are_orthogonal_with_the_gain(inputs: int, outputs: int) -> None:
    weight = orthogonal_init(1.7)(Rng(SEEDS, "w"), (2,), outputs, inputs)
    assert weight.shape == (3, 2, inputs, outputs)
    narrow = weight.mT @ weight if inputs >= outputs else weight @ weight.mT
    eye = torch.eye(min(inputs, outputs)).expand_as(narrow)
    torch.testing.assert_close(narrow, 1.7**2 * eye, atol=1e-5, rtol=0)


def test_orthogonal_weights_have_no_preferred_sign() -> None:
    weight = orthogonal_init(1.0)(Rng((0,), "w"), (400,), 4, 4)
    # Without the sign of R's diagonal, the first entries of Q would nearly all be negative.
    share = (weight[0, :, 0, 0] > 0).float().mean().item()
    assert 0.4 < share < 0.6


def test_orthogonal_networks_give_the_last_layer_its_own_gain_and_zero_biases() -> None:
    mlp = StackedMLP((4, 16, 16, 2), Rng((0,), "w"), orthogonal=0.01)
    norms = []
    for layer in mlp.layers:
        assert isinstance(layer, StackedLinear)
        assert not layer.bias.any()
        norms.append(torch.linalg.matrix_norm(layer.weight[0].detach(), 2).item())
    assert norms == pytest.approx([math.sqrt(2), math.sqrt(2), 0.01], rel=1e-4)


def test_uniform_weights_fill_the_interval_of_the_library() -> None:
    layer = StackedLinear(25, 400, Rng((0,), "w"))
    for tensor in (layer.weight, layer.bias):
        assert tensor.abs().max().item() <= 1 / 5
        # A uniform variable on +-1/5 has standard deviation 1 / (5 sqrt 3).
        assert tensor.std().item() == pytest.approx(1 / (5 * math.sqrt(3)), rel=0.1)


@pytest.mark.parametrize("orthogonal", [None, 1.0])
def test_a_seed_starts_with_the_same_weights_alone_or_in_a_group(orthogonal: float | None) -> None:
    group = StackedMLP(SIZES, Rng(SEEDS, "w"), members=(2,), orthogonal=orthogonal)
    for index, seed in enumerate(SEEDS):
        alone = StackedMLP(SIZES, Rng((seed,), "w"), members=(2,), orthogonal=orthogonal)
        for ours, theirs in zip(weights_of(group), weights_of(alone), strict=True):
            assert torch.equal(ours[index], theirs[0])


def test_seeds_and_members_start_differently() -> None:
    weight = weights_of(StackedMLP(SIZES, Rng(SEEDS, "w"), members=(2,)))[0].flatten(0, 1)
    pairs = [(i, j) for i in range(6) for j in range(i)]
    assert not any(torch.equal(weight[i], weight[j]) for i, j in pairs)


def test_critics_see_observation_and_action_and_every_member_answers() -> None:
    model = MLPSACModel(3, 2, (16,), num_critics=4, rng=Rng(SEEDS, "w"))
    rng = Rng(SEEDS, "x")
    obs, action = rng.normal(8, 3), rng.normal(8, 2)
    q = model.q_values(obs, action)
    assert q.shape == (3, 4, 8)
    assert isinstance(model.critic, StackedMLP)
    expected = plain_chain(model.critic, (1, 2))(torch.cat((obs[1], action[1]), -1)).squeeze(-1)
    torch.testing.assert_close(q[1, 2], expected)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("fused", [None, "fp32"])
def test_some_members_answer_as_they_do_among_all(
    seeds: int, layer_norm: bool, fused: Precision | None
) -> None:
    rng = Rng(range(seeds), "w")
    net = StackedMLP((3, 8, 8, 2), rng, members=(5,), layer_norm=layer_norm)
    if layer_norm:  # scales and shifts start alike in all members
        for parameter in net.norms.parameters():
            parameter.data.copy_(rng.normal(*parameter.shape[1:]))
    net.fused = fused
    x = rng.normal(6, 3).requires_grad_()
    chosen = rng.permutation(5)[:, :2]
    rows = torch.arange(seeds).unsqueeze(1)
    whole = net(x)
    for members, expected in ((chosen, whole[rows, chosen]), (slice(1), whole[:, :1])):
        some = net(x, members)
        torch.testing.assert_close(some, expected)
        wanted = [x, *net.parameters()]
        pairs = [
            torch.autograd.grad(q.square().sum(), wanted, retain_graph=True)
            for q in (some, expected)
        ]
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dueling", [False, True])
def test_q_network_activates_its_body(dueling: bool) -> None:
    network = MLPQNetwork(3, 4, (16,), dueling=dueling, rng=Rng((0,), "w"))
    x = Rng((0,), "x").normal(8, 3)
    body, head = network.layers.layers
    out = expected = head(torch.relu(body(x)))
    if dueling:
        expected = out[..., 4:] + out[..., :4] - out[..., :4].mean(-1, keepdim=True)
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("rows", [3, 5000])
def test_tanh_and_its_gradient_equal_the_library(rows: int) -> None:
    x = torch.linspace(-12, 12, rows, dtype=torch.float64).requires_grad_()
    ours, theirs = tanh(x * 1), torch.tanh(x)
    torch.testing.assert_close(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    (expected,) = torch.autograd.grad(theirs.square().sum(), x)
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        torch.testing.assert_close(tanh(x * 1), theirs)


@pytest.mark.parametrize("members", [(), (2,)])
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_large_batch_in_blocks_equals_the_whole(members: tuple[int, ...], seeds: int) -> None:
    rng = Rng(range(seeds), "test")
    net = StackedMLP((3, 8, 5, 2), rng, members=members)
    x = rng.normal(2 * BLOCK_ROWS + 7, 3).requires_grad_()
    parameters = [x, *net.parameters()]
    in_blocks, whole = net(x), net._whole(x)
    torch.testing.assert_close(in_blocks, whole)
    blocks = torch.autograd.grad(in_blocks.square().mean(), parameters)
    torch.testing.assert_close(blocks, torch.autograd.grad(whole.square().mean(), parameters))


def test_glorot_weights_have_the_variance_of_both_sides_and_zero_biases() -> None:
    mlp = StackedMLP((40, 160, 10), Rng((0, 1), "w"), members=(2,), weights="glorot")
    for layer, (inputs, outputs) in zip(mlp.layers, [(40, 160), (160, 10)], strict=True):
        assert isinstance(layer, StackedLinear)
        bound = (6 / (inputs + outputs)) ** 0.5
        weight = layer.weight.detach()
        assert float(weight.abs().max()) <= bound
        assert float(weight.var()) == pytest.approx(2 / (inputs + outputs), rel=0.05)
        assert not layer.bias.any()


def test_a_network_of_named_orthogonal_weights_ends_with_gain_one() -> None:
    mlp = StackedMLP((6, 16, 16, 6), Rng((0,), "w"), weights="orthogonal")
    for layer, square in zip(mlp.layers, [2.0, 2.0, 1.0], strict=True):
        assert isinstance(layer, StackedLinear)
        weight = layer.weight[0]
        small = weight @ weight.mT if weight.shape[0] <= weight.shape[1] else weight.mT @ weight
        torch.testing.assert_close(small, square * torch.eye(len(small)), atol=1e-5, rtol=0)
        assert not layer.bias.any()
