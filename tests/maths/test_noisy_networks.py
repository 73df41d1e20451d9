"""Noisy layers and exploration by them: the formula, fresh noise, means when greedy, resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.quantiles import transitions
from rl_training.algorithms.value_based import ValueBased
from rl_training.models.layers import StackedNoisyLinear, fresh_noise, noisy_layers
from rl_training.rng import Rng
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.testing.contract import assert_member_equals, build, flat_state, small_config

every_value_based = pytest.mark.parametrize("algo", ["dqn", "qr_dqn", "iqn", "fqf"])


def noisy(algo: str, seeds: tuple[int, ...] = (0,), **settings: Any) -> ValueBased:
    learner, _ = build(algo, seeds, noisy=True, **settings)
    assert isinstance(learner, ValueBased)
    return learner


def test_a_noisy_layer_is_the_formula_of_the_paper() -> None:
    layer = StackedNoisyLinear(3, 2, Rng((0, 1), "w"))
    start = torch.full((2, 3, 2), 0.5 / math.sqrt(3))
    torch.testing.assert_close(layer.weight_sigma.detach(), start)
    x = Rng((0, 1), "x").normal(4, 3)
    drawn = Rng((0, 1), "noise").normal(5)
    shaped = drawn.sign() * drawn.abs().sqrt()
    with fresh_noise([layer], Rng((0, 1), "noise")):
        noisy_out = layer(x)
    weight = layer.weight + layer.weight_sigma * shaped[:, :3, None] * shaped[:, None, 3:]
    bias = layer.bias + layer.bias_sigma * shaped[:, None, 3:]
    torch.testing.assert_close(noisy_out, x @ weight + bias)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)


def test_factorised_noise_has_the_moments_of_the_paper() -> None:
    # E f(e)^2 = E|e|, the mean of a half-normal variable.
    layer = StackedNoisyLinear(400, 400, Rng((0,), "w"))
    with fresh_noise([layer], Rng((0,), "noise")):
        weight, _ = layer.affine()
    noise = ((weight - layer.weight) / layer.weight_sigma).detach()
    assert noise.mean().item() == pytest.approx(0.0, abs=0.01)
    assert noise.square().mean().item() == pytest.approx(2 / math.pi, rel=0.15)


@every_value_based
def test_every_fully_connected_layer_of_the_values_is_noisy_and_all_noise_is_learned(
    algo: str,
) -> None:
    learner = noisy(algo)
    names = [n for n, _ in learner.value_network.named_parameters()]
    assert len([n for n in names if "sigma" in n]) == len(names) / 2
    before = {n: p.detach().clone() for n, p in learner.value_network.named_parameters()}
    for key in range(3):
        learner.update(transitions(algo, (0,), key))
    for name, parameter in learner.value_network.named_parameters():
        assert not torch.equal(parameter, before[name]), name


@every_value_based
def test_exploring_draws_noise_for_every_action_and_greedy_acting_uses_the_means(algo: str) -> None:
    learner = noisy(algo)
    with torch.no_grad():
        for layer in noisy_layers(learner.value_network):
            layer.weight_sigma.mul_(20)
    obs = Rng((0,), "obs").normal(20, 4)
    drawn = [learner.act(obs, explore=True) for _ in range(8)]
    assert any(not torch.equal(drawn[0], other) for other in drawn[1:])
    state = flat_state(learner.state_dict())
    assert torch.equal(learner.act(obs), learner.act(obs))
    assert torch.equal(learner.act(obs), learner.q_values(obs).argmax(-1))
    after = flat_state(learner.state_dict())
    assert all(torch.equal(after[n], v) for n, v in state.items() if isinstance(v, torch.Tensor))
    assert learner.epsilon() == 0.0


def test_uses_of_networks_in_an_update_have_noise_of_their_own() -> None:
    learner = noisy("dqn")
    seen: list[torch.Tensor] = []
    for network in (learner.q_network, learner.target_network):
        layer = noisy_layers(network)[0]
        forward = layer.forward

        def watched(
            x: torch.Tensor, *options: Any, layer: Any = layer, forward: Any = forward
        ) -> torch.Tensor:
            seen.append(layer.noise[0])
            out: torch.Tensor = forward(x, *options)
            return out

        layer.forward = watched  # type: ignore[method-assign,assignment]
    learner.update(transitions("dqn"))
    assert len(seen) == 3, "target, choice, prediction"
    assert all(not torch.equal(seen[i], seen[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@every_value_based
def test_stacked_noisy_seeds_equal_single_ones(algo: str) -> None:
    seeds = (3, 8)
    group = noisy(algo, seeds)
    singles = [noisy(algo, (seed,)) for seed in seeds]
    for key in range(3):
        group.update(transitions(algo, seeds, key))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(transitions(algo, (seed,), key))
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)


@pytest.mark.matrix
@every_value_based
def test_a_noisy_run_with_all_options_resumes_to_the_bit(algo: str, tmp_path: Path) -> None:
    options = {"noisy": True, "dueling": True, "n_step": 3, "prioritized": True}
    report = verify_resume(small_config(algo, tmp_path, algo_kwargs=options), 70)
    assert report.identical, report.lines()
