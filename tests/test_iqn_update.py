"""IQN's update: cosines, risk, DQN as a limit, known distributions, terminal rows, acting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.quantiles import STATES, learner_of, trained_on_two_points, transitions, values_of
from rl_training.algorithms.iqn import IQN, iqn_loss
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models import MLPIQNNetwork
from rl_training.models.encoders import MLPEncoder
from rl_training.models.quantile_networks import ImplicitQuantileNetwork, cosine_features
from rl_training.rng import Rng
from rl_training.testing.contract import build


def small(**settings: Any) -> IQN:
    learner, _ = build("iqn", num_quantiles=5, num_target_quantiles=7, **settings)
    assert isinstance(learner, IQN)
    return learner


def forget_fractions(network: torch.nn.Module) -> None:
    """Let the embedding of every fraction be 1, so that quantiles do not depend on it."""
    assert isinstance(network, ImplicitQuantileNetwork)
    with torch.no_grad():
        network.cosine_layer.weight.zero_()
        network.cosine_layer.bias.fill_(1.0)


def test_fractions_are_embedded_by_cosines() -> None:
    features = cosine_features(torch.tensor([[[0.0, 0.5, 1.0]]]), 4)[0, 0]
    expected = torch.tensor([[1.0, 1, 1, 1], [0, -1, 0, 1], [-1, 1, -1, 1]])
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)


def test_the_network_is_the_formula_of_the_paper() -> None:
    network = MLPIQNNetwork(3, 2, (8,), 6, rng=Rng((4,), "w"))
    obs, tau = Rng((4,), "x").normal(5, 3), Rng((4,), "t").uniform(5, 7)
    state = {name: value[0].double().numpy() for name, value in network.state_dict().items()}
    hidden = np.maximum(
        obs[0].double().numpy() @ state["encoder.layers.layers.0.weight"]
        + state["encoder.layers.layers.0.bias"],
        0,
    )
    angles = np.pi * np.arange(1, 7) * tau[0].double().numpy()[..., None]
    phi = np.cos(angles) @ state["cosine_layer.weight"] + state["cosine_layer.bias"]
    joint = hidden[:, None, :] * np.maximum(phi, 0)
    out = joint @ state["head.layers.0.weight"] + state["head.layers.0.bias"]
    result = network(obs, tau).detach()[0]
    assert result.shape == (5, 2, 7)
    np.testing.assert_allclose(result.numpy(), out.swapaxes(1, 2), atol=1e-5)


def test_fractions_shared_by_all_states_give_the_same_as_repeated_ones() -> None:
    network = MLPIQNNetwork(3, 2, (8,), 6, rng=Rng((4, 5), "w"))
    obs, tau = Rng((4, 5), "x").normal(5, 3), Rng((4, 5), "t").uniform(1, 7)
    torch.testing.assert_close(network(obs, tau), network(obs, tau.expand(-1, 5, -1)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_mean_over_fractions_is_that_of_the_quantiles(
    hidden: tuple[int, ...], dueling: bool, weighted: bool
) -> None:
    rng = Rng((4, 5), "w")
    network = ImplicitQuantileNetwork(
        MLPEncoder(3, (8,), rng), 2, 6, hidden, dueling=dueling, rng=rng
    )
    embedding, tau = network.embed(rng.normal(5, 3)), rng.uniform(5, 7)
    widths = rng.uniform(5, 7).softmax(-1) if weighted else torch.full((2, 5, 7), 1 / 7)
    expected = (network.quantiles(embedding, tau) * widths.unsqueeze(2)).sum(-1)
    found = network.mean(embedding, tau, widths if weighted else None)
    torch.testing.assert_close(found, expected)
    shared = network.mean(embedding, tau[:, :1])  # fractions of all states
    torch.testing.assert_close(shared, network.mean(embedding, tau[:, :1].expand(-1, 5, -1)))


def linear_quantiles(embedding: Tensor, tau: Tensor) -> Tensor:
    """Returns uniform on [0, 1] for one action, and always 0.4 for the other."""
    tau = tau.expand(-1, embedding.shape[1], -1)
    return torch.stack((tau, torch.full_like(tau, 0.4)), 2)


@pytest.mark.parametrize(("eta", "value", "action"), [(1.0, 0.5, 0), (0.5, 0.25, 1)])
def test_neutral_acting_takes_the_mean_and_cvar_the_mean_of_the_worst(
    eta: float, value: float, action: int
) -> None:
    # With a hidden layer the mean is that of the quantiles, which can be put in place.
    learner = small(cvar_eta=eta, head_hidden_sizes=(4,))
    learner.q_network.quantiles = linear_quantiles  # type: ignore[method-assign]
    obs = torch.zeros(1, 400, 4)
    torch.testing.assert_close(learner.q_values(obs)[0, 0], torch.tensor([value, 0.4]))
    assert (learner.act(obs) == action).all()
    drawn = learner.exploring_q_values(obs)[0, :, 0]
    deviation = eta / math.sqrt(12 * 400 * learner.config.num_action_quantiles)
    assert drawn.mean().item() == pytest.approx(value, abs=4 * deviation)
    assert drawn.std().item() > 0


def test_when_fractions_do_not_matter_the_loss_is_that_of_the_drawn_quantile() -> None:
    learner = small(double=False)
    for network in (learner.q_network, learner.target_network):
        forget_fractions(network)
    batch = transitions("iqn")
    before = learner.rng.counter.clone()
    loss, metrics, _ = learner.td_loss(batch)
    learner.rng.counter.copy_(before + 2)  # after the draws for the choice and for the target
    tau = learner.rng.uniform(8, 5)
    q = metrics["q_value_mean"]
    target = batch.reward + batch.discount * learner.q_values(
        batch.next_obs, learner.target_network
    ).amax(-1)
    error = target - q
    huber = torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5).unsqueeze(-1)
    expected = ((tau - (error < 0).float().unsqueeze(-1)).abs() * huber).sum(-1).mean(-1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["target_mean"], target)


@pytest.mark.matrix
def test_the_quantiles_of_a_two_point_return_are_learned() -> None:
    learner = trained_on_two_points("iqn", num_quantiles=16, num_target_quantiles=16)
    assert isinstance(learner, IQN)
    tau = torch.tensor([[[0.1, 0.5, 0.9]]])
    first, later = learner.q_network.quantiles(learner.q_network.embed(STATES), tau)[0, :, 0]
    assert later.tolist() == pytest.approx([0.0, 2.0, 2.0], abs=0.25)
    assert first.tolist() == pytest.approx([1.0, 2.0, 2.0], abs=0.25)
    assert values_of(learner).tolist() == pytest.approx([1.75, 1.5], abs=0.12)


def test_the_target_of_a_terminal_row_is_its_reward_alone() -> None:
    batch = transitions("iqn")
    ended = TransitionBatch(**vars(batch) | {"discount": torch.zeros_like(batch.discount)})
    torch.testing.assert_close(iqn_loss(small(), ended)["target_mean"], batch.reward)


def test_acting_greedily_draws_nothing_and_exploring_does() -> None:
    learner = small(epsilon_start=0.0, epsilon_end=0.0)
    before = learner.rng.counter.item()
    learner.act(torch.zeros(1, 3, 4))
    assert learner.rng.counter.item() == before
    learner.act(torch.zeros(1, 3, 4), explore=True)
    assert learner.rng.counter.item() > before


@pytest.mark.parametrize(("double", "expected"), [(True, 3), (False, 2)])
def test_a_state_is_encoded_once_per_network_in_an_update(double: bool, expected: int) -> None:
    learner = small(double=double)
    calls: list[torch.Tensor] = []
    for network in (learner.q_network, learner.target_network):
        assert isinstance(network, ImplicitQuantileNetwork)
        network.encoder.register_forward_pre_hook(lambda _, inputs: calls.extend(inputs))
    learner.update(transitions("iqn"))
    assert len(calls) == expected


def test_a_level_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cvar_eta must be > 0, got 0"):
        learner_of("iqn", cvar_eta=0.0)
