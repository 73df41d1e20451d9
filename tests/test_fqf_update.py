"""FQF's update: fractions, their gradient, widths, the guard, known distributions, encodings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.quantiles import STATES, trained_on_two_points, transitions, values_of
from rl_training.algorithms.fqf import FQF, fqf_loss, fraction_gradient, fraction_loss
from rl_training.algorithms.losses import quantile_huber
from rl_training.algorithms.quantile import of_action
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models import MLPFQFNetwork
from rl_training.models.quantile_networks import Fractions, ImplicitQuantileNetwork
from rl_training.rng import Rng
from rl_training.testing.contract import build

Curve = Callable[[Tensor], Tensor]


def small(**settings: Any) -> FQF:
    learner, _ = build("fqf", **{"num_quantiles": 5} | settings)
    assert isinstance(learner, FQF)
    return learner


def test_the_network_returns_the_shapes_and_names_of_the_contract() -> None:
    network = MLPFQFNetwork(
        obs_dim=4, action_dim=3, num_quantiles=6, hidden_sizes=(16,), embedding_dim=8
    )
    for lead in ((7,), (1, 7)):
        out = network(torch.zeros(*lead, 4))
        assert out.quantile_hats.shape == (*lead, 3, 6)
        assert out.taus.shape == (*lead, 7)
        assert out.tau_hats.shape == (*lead, 6)
        assert out.quantiles_tau.shape == (*lead, 3, 5)


@pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("uniform_share", [0.0, 0.02])
def test_fractions_rise_from_zero_to_one(size: float, uniform_share: float) -> None:
    rng = Rng((0, 1), "w")
    network = MLPFQFNetwork(4, 2, 8, (16,), uniform_share=uniform_share, rng=rng)
    with torch.no_grad():
        network.fraction_layer.weight.copy_(size * rng.normal(16, 8))
    fractions = network.fractions(rng.normal(50, 16))
    taus = fractions.taus
    assert (taus[..., 0] == 0).all()
    assert (taus[..., -1] == 1).all()
    assert (fractions.widths >= 0.99 * uniform_share / 8 - 1e-9).all(), "no interval vanishes"
    torch.testing.assert_close(fractions.tau_hats, (taus[..., 1:] + taus[..., :-1]) / 2)
    assert (fractions.entropy <= math.log(8) + 1e-5).all()


def test_fractions_start_almost_equal_and_equal_widths_have_entropy_log_n() -> None:
    network = MLPFQFNetwork(4, 2, 8)
    fractions = network.fractions(Rng((0,), "x").normal(20, 64))
    torch.testing.assert_close(fractions.widths, torch.full((1, 20, 8), 0.125), atol=0.02, rtol=0)
    with torch.no_grad():
        network.fraction_layer.weight.zero_()
    entropy = network.fractions(torch.ones(1, 1, 64)).entropy
    assert entropy.item() == pytest.approx(math.log(8))


def wasserstein(taus: Tensor, curve: Curve, area: Curve) -> Tensor:
    """1-Wasserstein error of the staircase at `taus` for a monotone curve with integral `area`."""
    left, right = taus[:-1], taus[1:]
    middle = (left + right) / 2
    height = curve(middle)
    below = (middle - left) * height - (area(middle) - area(left))
    above = (area(right) - area(middle)) - (right - middle) * height
    return below.abs().sum() + above.abs().sum()


CURVES: dict[str, tuple[Curve, Curve, float]] = {
    "square": (torch.square, lambda w: w**3 / 3, 1.0),
    "exponential": (lambda w: torch.exp(3 * w), lambda w: torch.exp(3 * w) / 3, 1.0),
    "falling": (lambda w: -(w**3), lambda w: -(w**4) / 4, -1.0),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_fraction_gradient_is_the_derivative_of_the_wasserstein_error(name: str) -> None:
    curve, area, sign = CURVES[name]
    taus = torch.tensor([0.0, 0.11, 0.2, 0.55, 0.7, 1.0], dtype=torch.float64)
    hats = curve((taus[1:] + taus[:-1]) / 2)
    plain = fraction_gradient(curve(taus[1:-1]), hats)
    corrected = fraction_gradient(curve(taus[1:-1]), hats, correct_crossing=True)
    for index in range(1, 5):
        step = torch.zeros_like(taus)
        step[index] = 1e-6
        up, down = (wasserstein(taus + d, curve, area) for d in (step, -step))
        numerical = float((up - down) / 2e-6)
        assert corrected[index - 1].item() == pytest.approx(numerical, abs=1e-7)
        assert plain[index - 1].item() == pytest.approx(sign * numerical, abs=1e-7)


def test_following_the_gradient_finds_the_best_fractions() -> None:
    # Of all two-step staircases of w^2, the best splits where 2 t^2 = (t/2)^2 + ((1 + t)/2)^2.
    best = (1 + math.sqrt(7)) / 6
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        taus = torch.stack((torch.zeros_like(tau), tau, torch.ones_like(tau)))
        fixed = taus.detach()
        hats = ((fixed[1:] + fixed[:-1]) / 2).square()
        loss = fraction_loss(taus, fraction_gradient(fixed[1:-1].square(), hats))
        (slope,) = torch.autograd.grad(loss, tau)
        tau = (tau - 0.1 * slope).detach().requires_grad_()
    assert tau.item() == pytest.approx(best, abs=1e-6)


def test_each_loss_moves_its_own_part_and_only_the_proposal_moves_the_fractions() -> None:
    learner = small()
    loss, metrics, _ = learner.td_loss(transitions("fqf"))
    proposal = list(learner.q_network.fraction_layer.parameters())
    values = list(learner.value_network.parameters())
    own = metrics["fraction_loss"] + metrics["entropy_loss"]
    assert all(
        g is None for g in torch.autograd.grad(own, values, allow_unused=True, retain_graph=True)
    )
    assert all(g is None for g in torch.autograd.grad(loss, proposal, allow_unused=True))
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(own, proposal))


def test_the_fraction_loss_has_the_closed_form_gradient_and_no_other() -> None:
    taus = torch.tensor([[0.0, 0.2, 0.6, 1.0]], requires_grad=True)
    gradient = torch.tensor([[3.0, -2.0]], requires_grad=True)
    loss = fraction_loss(taus, gradient).sum()
    found, none = torch.autograd.grad(loss, (taus, gradient), allow_unused=True)
    assert found.tolist() == [[0.0, 3.0, -2.0, 0.0]]
    assert none is None


def test_q_weighs_quantiles_by_the_width_of_their_interval() -> None:
    # With a hidden layer the mean is that of the quantiles, which can be put in place.
    learner = small(num_quantiles=3, head_hidden_sizes=(4,))
    taus = torch.tensor([[[0.0, 0.5, 0.9, 1.0]]])
    hats = (taus[..., 1:] + taus[..., :-1]) / 2
    fixed = Fractions(taus, hats, torch.zeros(1, 1))
    learner.q_network.fractions = lambda embedding: fixed  # type: ignore[method-assign]
    known = torch.tensor([[[[1.0, 2.0, 10.0], [4.0, 4.0, 4.0]]]])
    learner.value_network.quantiles = lambda *_: known  # type: ignore[method-assign]
    q = learner.q_values(torch.zeros(1, 1, 4))
    assert q[0, 0].tolist() == pytest.approx([0.5 + 0.8 + 1.0, 4.0])


def test_entropy_holds_the_widths_apart() -> None:
    entropies = []
    for coefficient in (0.0, 100.0):
        learner = small(entropy_coef=coefficient, fraction_learning_rate=0.01, num_quantiles=4)
        with torch.no_grad():
            learner.q_network.fraction_layer.bias.copy_(torch.tensor([2.0, 0.0, 0.0, 0.0]))
        metrics = [learner.update(transitions("fqf")).metrics for _ in range(20)]
        start, end = (m["fraction_entropy"] for m in (metrics[0], metrics[-1]))
        entropies.append(end)
        assert metrics[-1]["entropy_loss"] == pytest.approx(-coefficient * end)
    assert entropies[1] > start + 0.1
    assert entropies[1] > entropies[0] + 0.05


def test_one_interval_is_the_median_of_an_implicit_network() -> None:
    learner = small(num_quantiles=1, double=False)
    batch = transitions("fqf")
    loss, metrics, _ = learner.td_loss(batch)
    half = torch.full((1, 8, 1), 0.5)
    q = learner.value_network(batch.obs, half).squeeze(-1)
    q = q.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    target = batch.reward + batch.discount * learner.target_network(batch.next_obs, half).squeeze(
        -1
    ).amax(-1)
    torch.testing.assert_close(loss, 0.5 * torch.nn.functional.huber_loss(q, target).view(1))
    assert metrics["fraction_loss"].item() == 0.0


@pytest.mark.matrix
def test_the_quantiles_of_a_two_point_return_are_learned() -> None:
    # The fractions rest: what the target network says at fractions it was never trained at is
    # anybody's guess, and with fractions that move the quantiles of a state differ by seed.
    learner = trained_on_two_points("fqf", num_quantiles=8, fraction_learning_rate=1e-6)
    assert isinstance(learner, FQF)
    hats = learner.q_network(STATES).quantile_hats[0, :, 0].detach()
    first, later = hats
    assert [later[0].item(), later[-1].item()] == pytest.approx([0.0, 2.0], abs=0.25)
    assert [first[0].item(), first[-1].item()] == pytest.approx([1.0, 2.0], abs=0.25)
    assert values_of(learner).tolist() == pytest.approx([1.75, 1.5], abs=0.15)


@pytest.mark.matrix
def test_fractions_leave_their_equal_start_towards_the_jump_of_the_return() -> None:
    learner = trained_on_two_points("fqf", num_quantiles=8, fraction_learning_rate=1e-3)
    assert isinstance(learner, FQF)
    fractions = learner.q_network.fractions(learner.value_network.embed(STATES))
    assert fractions.entropy.max().item() < math.log(8) - 0.01


def value_of_a_loop(*, weighted: bool) -> float:
    """Learn a state that pays 0, 1 or 2 and leads to itself, by two intervals of widths 4 to 1.

    The mean return is 1 / (1 - 0.9) = 10; the targets are read at the two quantiles themselves.
    """
    tau, widths = torch.tensor([0.4, 0.9]), torch.tensor([0.8, 0.2])
    reward = torch.tensor([[0.0], [1.0], [2.0]])
    quantiles = torch.full((2,), 9.0, requires_grad=True)
    for _ in range(600):
        target = reward + 0.9 * quantiles.detach()
        weight = widths if weighted else None
        loss = quantile_huber(quantiles.expand(3, 2), target, tau, 1.0, weight).mean()
        (slope,) = torch.autograd.grad(loss, quantiles)
        quantiles = (quantiles - slope).detach().requires_grad_()
    return float((quantiles.detach() * widths).sum())


def test_targets_weighted_by_width_keep_the_value_that_plain_ones_overestimate() -> None:
    assert value_of_a_loop(weighted=True) == pytest.approx(10.0, abs=0.05)
    assert value_of_a_loop(weighted=False) > 13.0


def test_the_loss_weighs_target_quantiles_by_the_widths_they_were_read_at() -> None:
    batch, learner = transitions("fqf"), small()
    with torch.no_grad():
        learner.q_network.fraction_layer.bias.copy_(torch.arange(5.0).view(1, 1, 5))
        fractions = learner.q_network.fractions(learner.value_network.embed(batch.obs))
        embedding = learner.value_network.embed(batch.obs)
        hats = of_action(
            learner.value_network.quantiles(embedding, fractions.tau_hats), batch.action
        )
        following = learner.next_quantiles(batch.next_obs, fractions.tau_hats)
        target = batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * following
        expected = quantile_huber(hats, target, fractions.tau_hats, 1.0, fractions.widths).mean(-1)
        torch.testing.assert_close(fqf_loss(learner, batch)["loss"], expected)
        plain = small(weighted_target=False)
        plain.load_state_dict(learner.state_dict())
        expected = quantile_huber(hats, target, fractions.tau_hats, 1.0).mean(-1)
        torch.testing.assert_close(fqf_loss(plain, batch)["loss"], expected)


def test_equal_widths_make_the_weighted_target_the_papers() -> None:
    batch, losses = transitions("fqf"), []
    for weighted_target in (True, False):
        learner = small(weighted_target=weighted_target)
        with torch.no_grad():
            learner.q_network.fraction_layer.weight.zero_()
            learner.q_network.fraction_layer.bias.zero_()
        losses.append(fqf_loss(learner, batch)["loss"])
    torch.testing.assert_close(*losses)


def test_the_target_of_a_terminal_row_is_its_reward_alone() -> None:
    batch = transitions("fqf")
    ended = TransitionBatch(**vars(batch) | {"discount": torch.zeros_like(batch.discount)})
    torch.testing.assert_close(fqf_loss(small(), ended)["target_mean"], batch.reward)


@pytest.mark.parametrize(("double", "expected"), [(True, 3), (False, 2)])
def test_a_state_is_encoded_once_per_network_in_an_update(double: bool, expected: int) -> None:
    learner = small(double=double)
    calls: list[torch.Tensor] = []
    for network in (learner.value_network, learner.target_network):
        assert isinstance(network, ImplicitQuantileNetwork)
        network.encoder.register_forward_pre_hook(lambda _, inputs: calls.extend(inputs))
    learner.update(transitions("fqf"))
    assert len(calls) == expected


def test_the_target_has_no_fractions_of_its_own() -> None:
    learner = small()
    assert not any("fraction" in name for name, _ in learner.target_network.named_parameters())


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_quantiles is 32, but q_network has 5"):
        FQF(q_network=MLPFQFNetwork(2, 2, 5))
    with pytest.raises(ConfigError, match=r"fraction_learning_rate must be > 0, got 0"):
        FQF(q_network=MLPFQFNetwork(2, 2, 5), num_quantiles=5, fraction_learning_rate=0.0)
