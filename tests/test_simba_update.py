"""SimBa's networks, its settings, and that the rest is SAC.

What it shares with SAC is tested in `test_sac_update.py`, the decay of weights with the optimizers.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.updates import ACT, OBS, make_batch, parameters_of, same
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.simba import SimBa, SimBaConfig
from rl_training.errors import ConfigError
from rl_training.models.residual import PreNormBlock, ResidualNet, SimBaModel
from rl_training.rng import Rng

Array = NDArray[np.float64]


def make_model(seeds: tuple[int, ...] = (0,)) -> SimBaModel:
    return SimBaModel(
        OBS, ACT, (8, 8), actor_hidden_sizes=(6,), num_critics=3, rng=Rng(seeds, "networks")
    )


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


# The networks


def normalised(x: Array, scale: Array, shift: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    result: Array = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5) * scale + shift
    return result


def reference(net: ResidualNet, x: Array, place: tuple[int, ...]) -> Array:
    """The paper's network in plain matrix products, for one seed and member."""
    values = {name: array(p)[place] for name, p in net.named_parameters()}

    def affine(name: str, x: Array) -> Array:
        result: Array = x @ values[f"{name}.weight"] + values[f"{name}.bias"]
        return result

    h = affine("embed", x)
    for index in range(len(net.blocks)):
        name = f"blocks.{index}"
        branch = normalised(h, values[f"{name}.norm.scale"], values[f"{name}.norm.shift"])
        hidden = np.maximum(affine(f"{name}.first", branch), 0.0)
        assert hidden.shape[-1] == 4 * h.shape[-1]
        h = h + affine(f"{name}.second", hidden)
    return affine("head", normalised(h, values["norm.scale"], values["norm.shift"]))


@pytest.mark.parametrize("members", [(), (2,)])
def test_the_network_is_that_of_the_paper(members: tuple[int, ...]) -> None:
    rng = Rng((3, 4), "network")
    net = ResidualNet(5, (8, 8), 3, rng, members)
    with torch.no_grad():  # away from its start, where scales are 1 and shifts 0
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = rng.normal(6, 5)
    out = array(net(x))
    for place in np.ndindex(2, *members):
        np.testing.assert_allclose(
            out[place], reference(net, array(x[place[0]]), place), rtol=1e-4, atol=1e-5
        )


def test_a_block_whose_branch_is_empty_changes_nothing() -> None:
    rng = Rng((0,), "block")
    block = PreNormBlock(8, rng, ())
    with torch.no_grad():
        block.second.weight.zero_()
    x = rng.normal(4, 8)
    assert torch.equal(block(x), x)


def test_weights_start_as_in_the_authors_code() -> None:
    net = ResidualNet(64, (64,), 5, Rng((0,), "start"))
    block: Any = net.blocks[0]
    for layer, inputs in ((block.first, 64), (block.second, 256)):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / inputs), rel=0.03)
        assert layer.weight.abs().max() < 2.4 * math.sqrt(2 / inputs), "cut"
        assert not layer.bias.any()
    for layer in (net.embed, net.head):
        weight = layer.weight[0]
        gram = weight.T @ weight
        torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-5, rtol=0)


def test_members_that_are_chosen_are_those_of_all() -> None:
    model, batch = make_model((0, 1)), make_batch((0, 1))
    every = model.q_values(batch.obs, batch.action)
    assert every.shape == (2, 3, 8)
    chosen = torch.tensor([[2, 0], [1, 2]])
    some = model.q_values(batch.obs, batch.action, members=chosen)
    assert torch.equal(some, torch.stack([every[0, [2, 0]], every[1, [1, 2]]]))


def test_the_deviation_is_never_cut() -> None:
    model = make_model()
    model.actor.head.bias.data[..., ACT:] = torch.tensor([50.0, -50.0])
    _, log_std = model.policy(make_batch().obs)
    torch.testing.assert_close(log_std[0, 0], torch.tensor([2.0, -10.0]))
    model.actor.head.bias.data[..., ACT:] = 0.0
    model.actor.head.weight.data.zero_()
    _, log_std = model.policy(make_batch().obs)
    torch.testing.assert_close(log_std, torch.full_like(log_std, -4.0))


# The update


def test_an_update_is_sacs_of_these_networks_and_settings() -> None:
    model = make_model((0, 1))
    settings = SimBaConfig(num_critics=3).model_dump(include=set(type(SimBaConfig()).model_fields))
    ours = SimBa(model=copy.deepcopy(model), seeds=(0, 1), num_critics=3)
    theirs = SAC(
        model=copy.deepcopy(model),
        seeds=(0, 1),
        target_entropy=-ACT / 2,
        **{name: settings[name] for name in ("learning_rate", "initial_alpha", "optimizer")},
        num_critics=3,
    )
    for count in range(3):
        batch = make_batch((0, 1), key=f"batch {count}")
        ours.update(batch)
        theirs.update(batch)
    assert same(parameters_of(ours.model), parameters_of(theirs.model))
    assert torch.equal(ours.log_alpha, theirs.log_alpha)
    assert not same(parameters_of(ours.model), parameters_of(model))


def test_weights_of_networks_decay_and_the_temperature_does_not() -> None:
    plain, decaying = (
        SimBa(model=make_model(), num_critics=3, learning_rate=1e-2, optimizer=optimizer)
        for optimizer in ("adam", {"type": "adamw", "weight_decay": 0.5})
    )
    batch = make_batch()
    before = parameters_of(plain.model.critic)
    for learner in (plain, decaying):
        learner.update(batch)
    # AdamW is Adam's step after every weight has lost rate * decay of itself.
    for start, one, other in zip(
        before, plain.model.critic.parameters(), decaying.model.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(one - 1e-2 * 0.5 * start, other, atol=1e-6, rtol=1e-5)
    assert torch.equal(plain.log_alpha, decaying.log_alpha)


def test_the_defaults_are_those_of_the_authors() -> None:
    learner = SimBa(model=make_model(), num_critics=3)
    assert learner.target_entropy == -ACT / 2
    assert learner.config.optimizer.type == "adamw"
    assert learner.config.optimizer.weight_decay == 0.01
    assert learner.log_alpha.exp().item() == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"hidden_sizes": [64, 32]}, r"hidden_sizes must hold the same width for every block"),
        ({"activation": "tanh"}, r"activation must be 'relu', got 'tanh'"),
        ({"use_layer_norm": True}, r"use_layer_norm: must be false: blocks are normalised already"),
        ({"encoder": "mine:net"}, r"encoder must be null, got 'mine:net'"),
        ({"weight_init": "uniform"}, r"weight_init must be 'orthogonal', got 'uniform'"),
    ],
)
def test_what_the_blocks_are_made_of_is_the_method(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimBa(model=make_model(), **keywords)
