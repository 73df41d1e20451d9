"""The functions that Dreamer is made of: closed forms, limits, and a loop to compare with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rl_training.algorithms.dreamer.losses import (
    PercentileRange,
    actor_loss,
    continue_loss,
    kl_terms,
    lambda_return,
    path_weights,
    quantile,
)
from rl_training.models.dreamer import TwoHot, symexp, symlog
from rl_training.models.rssm import CategoricalLatent, GaussianLatent, mixed_log_probs
from rl_training.rng import Rng

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_symexp_undoes_symlog() -> None:
    x = torch.tensor([0.0, 1e-3, 0.5, 1.0, 40.0, 1e4, 1e6])
    both = torch.cat((x, -x))
    torch.testing.assert_close(symexp(symlog(both)), both, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(symlog(symexp(both[:5])), both[:5])


def test_symlog_is_odd_the_identity_near_0_and_a_logarithm_far_away() -> None:
    assert float(symlog(torch.tensor(1e-4))) == pytest.approx(1e-4, rel=1e-3)
    assert float(symlog(torch.tensor(math.e - 1))) == pytest.approx(1.0)
    assert float(symlog(torch.tensor(-1e6))) == pytest.approx(-math.log(1e6 + 1))


def test_a_two_hot_target_has_the_mean_of_what_it_encodes() -> None:
    two_hot = TwoHot(255)
    x = torch.cat((torch.tensor([0.0, 0.3, -1.0, 17.0, 1234.5, -3e5]), 50 * normal(100)))
    below, upper = two_hot.weights(x)
    assert ((upper >= 0) & (upper <= 1)).all()
    mean = two_hot.bins[below] * (1 - upper) + two_hot.bins[below + 1] * upper
    torch.testing.assert_close(mean, x, rtol=1e-5, atol=1e-5)


def test_a_fitted_two_hot_distribution_predicts_the_mean_of_its_targets() -> None:
    two_hot = TwoHot(21, largest=3.0)
    targets = torch.tensor([-4.0, 0.5, 2.0, 7.0])
    weights = torch.zeros(21)
    for target in targets:
        below, upper = two_hot.weights(target)
        weights[below] += (1 - upper) / 4
        weights[below + 1] += upper / 4
    fitted = weights.clamp(min=1e-30).log()
    assert float(two_hot.mean(fitted)) == pytest.approx(float(targets.mean()), rel=1e-4)
    # No other distribution has a smaller loss: the gradient vanishes there.
    logits = fitted.clone().requires_grad_()
    loss = two_hot.loss(logits.expand(4, -1), targets).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-6


def test_a_two_hot_loss_is_the_cross_entropy_of_its_weights() -> None:
    two_hot = TwoHot(15, largest=5.0)
    logits, target = normal(6, 15), 10 * normal(6, seed=1)
    below, upper = two_hot.weights(target)
    dense = torch.zeros(6, 15).scatter_(1, below[:, None], (1 - upper)[:, None])
    dense.scatter_add_(1, below[:, None] + 1, upper[:, None])
    expected = functional.cross_entropy(logits, dense, reduction="none")
    torch.testing.assert_close(two_hot.loss(logits, target), expected)


def test_a_distribution_to_begin_with_is_0_and_stays_near_it_under_rounding() -> None:
    two_hot = TwoHot(255)
    start = two_hot.start_logits()
    assert float(two_hot.mean(start)) == 0.0
    shaken = start * (1 + 1e-6 * normal(100, 255))
    assert float(two_hot.mean(shaken).abs().max()) < 1e-3
    assert float(two_hot.mean(1e-6 * normal(100, 255)).abs().max()) > 1.0


def test_equal_logits_mean_exactly_nothing_and_targets_beyond_the_bins_are_clamped() -> None:
    two_hot = TwoHot(255)
    assert float(two_hot.mean(torch.zeros(255))) == 0.0
    below, upper = two_hot.weights(torch.tensor([1e12, -1e12]))
    assert below.tolist() == [253, 0]
    assert upper.tolist() == [1.0, 0.0]


def loop_return(
    reward: list[float], discount: list[float], value: list[float], lam: float
) -> list[float]:
    """The recursive definition, in plain numbers."""
    after = value[-1]
    found = []
    for t in range(len(value) - 2, -1, -1):
        mixed = (1 - lam) * value[t + 1] + lam * after
        after = reward[t + 1] + discount[t + 1] * mixed
        found.append(after)
    return found[::-1]


@pytest.mark.parametrize("lam", [0.0, 0.6, 0.95, 1.0])
def test_lambda_returns_equal_a_loop(lam: float) -> None:
    reward, value = normal(9), normal(9, seed=1)
    discount = torch.rand(9, generator=torch.Generator().manual_seed(2))
    ours = lambda_return(reward, discount, value, lam)
    expected = loop_return(reward.tolist(), discount.tolist(), value.tolist(), lam)
    torch.testing.assert_close(ours, torch.tensor(expected))


def test_lambda_0_is_one_step_and_lambda_1_sums_up_to_the_last_value() -> None:
    reward, value = normal(2, 3, 6), normal(2, 3, 6, seed=1)
    discount = torch.full_like(reward, 0.9)
    one_step = reward[..., 1:] + 0.9 * value[..., 1:]
    torch.testing.assert_close(lambda_return(reward, discount, value, 0.0), one_step)
    powers = 0.9 ** torch.arange(5)
    whole = (powers * reward[..., 1:]).sum(-1) + 0.9**5 * value[..., -1]
    torch.testing.assert_close(lambda_return(reward, discount, value, 1.0)[..., 0], whole)


def test_a_return_stops_at_a_terminal_state_and_bootstraps_where_a_trace_is_cut() -> None:
    reward = torch.tensor([0.0, 1.0, 2.0, 4.0])
    value = torch.tensor([9.0, 10.0, 20.0, 40.0])
    ended = torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert lambda_return(reward, ended, value, 1.0).tolist() == [3.0, 2.0, 44.0]
    cut = torch.tensor([1.0, 1.0, 0.0, 1.0])
    found = lambda_return(reward, torch.ones(4), value, cut)
    assert found.tolist() == [23.0, 22.0, 44.0]


def test_states_count_by_the_chance_to_get_there() -> None:
    found = path_weights(torch.tensor([1.0, 0.5, 0.0, 1.0]), 0.9)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.45, 0.0, 0.0]))
    assert path_weights(torch.tensor([0.0, 1.0, 1.0]), 0.9).tolist() == [0.0, 0.0, 0.0]


def test_the_divergence_of_categoricals_is_the_sum_over_groups() -> None:
    latent = CategoricalLatent(3, 5, mix=0.01)
    q, p = normal(4, 15), normal(4, 15, seed=1)
    expected = torch.zeros(4)
    for group in range(3):
        part = slice(5 * group, 5 * group + 5)
        ours = 0.99 * q[:, part].softmax(-1) + 0.002
        theirs = 0.99 * p[:, part].softmax(-1) + 0.002
        expected += (ours * (ours / theirs).log()).sum(-1)
    torch.testing.assert_close(latent.kl(q, p), expected)
    torch.testing.assert_close(latent.kl(q, q), torch.zeros(4), atol=1e-6, rtol=0)


def test_the_divergence_of_gaussians_is_that_of_torch() -> None:
    latent = GaussianLatent(3)
    q, p = normal(4, 6), normal(4, 6, seed=1)
    ours, theirs = (torch.distributions.Normal(*latent.moments(raw)) for raw in (q, p))
    expected = torch.distributions.kl_divergence(ours, theirs).sum(-1)
    torch.testing.assert_close(latent.kl(q, p), expected)


def test_a_share_of_the_uniform_distribution_bounds_every_probability() -> None:
    logits = torch.tensor([100.0, 0.0, -100.0, 0.0])
    probs = mixed_log_probs(logits, 0.01).exp()
    torch.testing.assert_close(probs, torch.tensor([0.9925, 0.0025, 0.0025, 0.0025]))
    torch.testing.assert_close(mixed_log_probs(logits, 0.0), logits.log_softmax(-1))


def test_a_categorical_sample_is_one_hot_with_the_gradient_of_its_probabilities() -> None:
    latent, rng = CategoricalLatent(2, 4, mix=0.0), Rng((0,), "test")
    raw = normal(1, 6, 8).requires_grad_()
    sample = latent.sample(raw, latent.draw_noise(rng, 6))
    groups = sample.view(1, 6, 2, 4)
    assert (groups.sum(-1) - 1).abs().max() < 1e-6
    assert (groups.detach().round().abs() - groups.detach().abs()).abs().max() < 1e-6
    slope = normal(8, seed=2)
    (found,) = torch.autograd.grad((sample * slope).sum(), raw)
    again = raw.detach().clone().requires_grad_()
    probs = again.view(1, 6, 2, 4).softmax(-1).flatten(-2)
    (expected,) = torch.autograd.grad((probs * slope).sum(), again)
    torch.testing.assert_close(found, expected)


def test_categorical_samples_have_the_frequencies_of_the_mixed_distribution() -> None:
    latent, rng = CategoricalLatent(1, 3, mix=0.1), Rng((3,), "test")
    raw = torch.tensor([2.0, 0.0, -30.0]).expand(1, 20_000, 3)
    shares = latent.sample(raw, latent.draw_noise(rng, 20_000)).mean(1)[0]
    expected = 0.9 * raw[0, 0].softmax(-1) + 0.1 / 3
    assert (shares - expected).abs().max() < 0.015


def test_a_gaussian_sample_passes_the_gradient_to_mean_and_deviation() -> None:
    latent, noise = GaussianLatent(2), torch.tensor([[1.5, -2.0]])
    raw = torch.zeros(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(latent.sample(raw, noise).sum(), raw)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 1.0, 0.75, -1.0]]))


def test_below_the_free_nats_a_divergence_costs_a_constant_and_teaches_nothing() -> None:
    latent = CategoricalLatent(1, 2, mix=0.0)
    near, far = torch.tensor([[0.1, 0.0]]), torch.tensor([[8.0, -8.0]])
    for other, taught in ((near, False), (far, True)):
        q, p = other.clone().requires_grad_(), torch.tensor([[0.0, 0.2]]).requires_grad_()
        dynamics, representation = kl_terms(latent.kl, q, p, 0.5)
        assert bool(dynamics.detach() > 0.5) == taught
        assert torch.equal(dynamics, representation)
        (of_prior,) = torch.autograd.grad(dynamics.sum(), p)
        (of_posterior,) = torch.autograd.grad(representation.sum(), q)
        assert bool(of_prior.abs().sum() > 0) == taught
        assert bool(of_posterior.abs().sum() > 0) == taught


def test_each_half_of_the_divergence_teaches_one_side_alone() -> None:
    latent = CategoricalLatent(1, 2, mix=0.0)
    q, p = torch.tensor([[8.0, -8.0]]).requires_grad_(), torch.zeros(1, 2, requires_grad=True)
    dynamics, representation = kl_terms(latent.kl, q, p, 0.0)
    for loss, taught in ((dynamics, [False, True]), (representation, [True, False])):
        found = torch.autograd.grad(loss.sum(), (q, p), allow_unused=True)
        assert [gradient is not None for gradient in found] == taught


def test_the_continue_loss_is_least_at_the_share_of_states_that_go_on() -> None:
    terminated = torch.tensor([True, False, False, False])
    logits = torch.full((4,), math.log(3.0), requires_grad=True)
    (gradient,) = torch.autograd.grad(continue_loss(logits, terminated).sum(), logits)
    assert float(gradient.sum().abs()) < 1e-6
    assert float(gradient[0]) > 0 > float(gradient[1])


def test_quantiles_are_those_of_torch() -> None:
    x = normal(3, 101)
    for share in (0.0, 0.05, 0.5, 0.951, 1.0):
        expected = torch.quantile(x, share, dim=1)
        torch.testing.assert_close(quantile(x.sort(-1).values, share), expected)


def test_the_range_of_returns_follows_its_percentiles_and_never_shrinks_below_1() -> None:
    spread = PercentileRange(2, CPU, rate=0.5)
    assert spread.scale().tolist() == [1.0, 1.0]
    returns = torch.stack((torch.linspace(-100, 100, 201), torch.linspace(0, 0.1, 201)))
    for _ in range(30):
        spread.update(returns)
    torch.testing.assert_close(spread.bounds[0], torch.tensor([-90.0, 90.0]))
    torch.testing.assert_close(spread.scale(), torch.tensor([180.0, 1.0]))
    before = spread.bounds.clone()
    spread.update(3 * returns)
    torch.testing.assert_close(spread.bounds, 0.5 * before + 1.5 * before)


def test_outliers_do_not_move_the_range() -> None:
    calm, wild = (PercentileRange(1, CPU, rate=1.0) for _ in range(2))
    returns = torch.linspace(-10, 10, 201).unsqueeze(0)
    calm.update(returns)
    returns[0, -1] = 1e9
    wild.update(returns)
    assert torch.equal(calm.bounds, wild.bounds)


def test_the_actor_goes_up_the_advantage_and_up_the_entropy() -> None:
    log_prob = torch.zeros(3, requires_grad=True)
    entropy = torch.zeros(3, requires_grad=True)
    advantage = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
    loss = actor_loss(log_prob, entropy, advantage, 0.1).sum()
    found = torch.autograd.grad(loss, (log_prob, entropy, advantage), allow_unused=True)
    torch.testing.assert_close(found[0], torch.tensor([-2.0, 0.0, 1.0]))
    torch.testing.assert_close(found[1], torch.full((3,), -0.1))
    assert found[2] is None
