"""DroQ's update: what is dropped, where and by whom, and its limits."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, make_batch, parameters_of, same
from rl_training.algorithms.droq import DroQ
from rl_training.algorithms.sac import SAC
from rl_training.errors import ConfigError
from rl_training.models.layers import StackedMLP
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng

Array = NDArray[np.float64]
WIDTH = 16


def make(kind: type[SAC], seeds: tuple[int, ...] = (0,), **keywords: Any) -> Any:
    norm = keywords.setdefault("use_layer_norm", True)
    critics = keywords.get("num_critics", 2)
    model = MLPSACModel(
        OBS,
        ACT,
        (WIDTH, WIDTH),
        num_critics=critics,
        use_layer_norm=norm,
        rng=Rng(seeds, "networks"),
    )
    return kind(model=model, seeds=seeds, **keywords)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def dropped_q(critic: StackedMLP, inputs: Array, masks: list[Array], member: int) -> Array:
    """Linear map, dropout, layer normalisation, relu, twice; then Q, in NumPy, of one seed."""
    x, layers, norms = inputs, list[Any](critic.layers), list[Any](critic.norms)
    for layer, norm, mask in zip(layers[:-1], norms, masks, strict=True):
        x = (x @ array(layer.weight)[0, member] + array(layer.bias)[0, member]) * mask[member]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = np.maximum(x * array(norm.scale)[0, member] + array(norm.shift)[0, member], 0)
    q: Array = (x @ array(layers[-1].weight)[0, member] + array(layers[-1].bias)[0, member])[:, 0]
    return q


def drawn_masks(rng: Rng, rate: float) -> list[Array]:
    return [array((rng.uniform(2, B, WIDTH) >= rate).float()[0]) / (1 - rate) for _ in range(2)]


def test_target_and_errors_are_those_of_numpy() -> None:
    learner, rate = make(DroQ, critic_dropout=0.3, alpha=0.2), 0.3
    batch, rng = make_batch(), copy.deepcopy(learner.rng)
    target, _ = learner.td_target(batch)
    masks = drawn_masks(rng, rate)
    learner.rng, own = rng, learner.rng
    action, log_prob = learner.sample_action(batch.next_obs)
    learner.rng = own
    inputs = np.concatenate((array(batch.next_obs)[0], array(action)[0]), -1)
    q = [dropped_q(learner.target_critic, inputs, masks, member) for member in range(2)]
    soft = np.minimum(*q) - 0.2 * array(log_prob)[0]
    expected = array(batch.reward)[0] + 0.9 * soft
    np.testing.assert_allclose(array(target)[0], expected, rtol=1e-4, atol=1e-5)

    rng = copy.deepcopy(learner.rng)
    loss, _, _ = learner.critic_loss(batch, target)
    masks = drawn_masks(rng, rate)
    inputs = np.concatenate((array(batch.obs)[0], array(batch.action)[0]), -1)
    q = [dropped_q(learner.model.critic, inputs, masks, member) for member in range(2)]
    total = sum(np.square(each - expected).mean() for each in q)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_every_critic_and_evaluation_drops_units_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make(DroQ, (0, 1), critic_dropout=0.5, gradient_updates_per_step=1)
    seen: list[Tensor] = []
    original = StackedMLP._masked

    def watched(network: StackedMLP, x: Tensor, masks: Any, members: Any) -> Tensor:
        seen.append(masks[0])
        return original(network, x, masks, members)

    monkeypatch.setattr(StackedMLP, "_masked", watched)
    learner.update(make_batch((0, 1)))
    assert [mask.shape for mask in seen] == [(2, 2, B, WIDTH)] * 3  # target, error, actor
    each = [mask[seed, member] for mask in seen for seed in range(2) for member in range(2)]
    assert not any(torch.equal(first, second) for first, second in combinations(each, 2))


def test_without_dropout_it_is_sac_with_layer_normalisation() -> None:
    settings: dict[str, Any] = {"gradient_updates_per_step": 1, "actor_q": "mean"}
    droq, sac = make(DroQ, critic_dropout=0.0, **settings), make(SAC, **settings)
    for key in range(4):
        batch = make_batch(key=str(key))
        assert dict(droq.update(batch).metrics) == dict(sac.update(batch).metrics)
    assert same(parameters_of(droq.model), parameters_of(sac.model))
    assert droq.rng.counter == sac.rng.counter


def test_acting_drops_nothing_and_an_update_leaves_no_mask() -> None:
    droq, sac = make(DroQ, critic_dropout=0.5), make(SAC)
    droq.update(make_batch())
    assert droq.model.critic.masks is droq.target_critic.masks is droq.model.actor.masks is None
    droq.model.load_state_dict(sac.model.state_dict())
    obs = make_batch().obs
    assert torch.equal(droq.act(obs), sac.act(obs))


def test_without_normalisation_units_are_dropped_as_well() -> None:
    learner = make(DroQ, critic_dropout=0.5, use_layer_norm=False)
    batch = make_batch()
    first, second = (learner.critic_loss(batch, batch.reward)[0] for _ in range(2))
    assert first != second


def test_some_of_the_target_critics_drop_their_own_units() -> None:
    learner = make(DroQ, num_critics=4, num_target_critics=2, critic_dropout=0.5)
    batch = make_batch()
    targets = [learner.td_target(batch)[0] for _ in range(2)]
    assert targets[0].shape == (1, B)
    assert not torch.equal(*targets)


def test_defaults_are_those_of_the_authors() -> None:
    config: Any = settings_of(DroQ)
    assert (config.num_critics, config.critic_dropout, config.use_layer_norm) == (2, 0.01, True)
    assert (config.gradient_updates_per_step, config.actor_q) == (20, "mean")
    assert (config.learning_starts, config.learning_rate, config.tau) == (5000, 3e-4, 0.005)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_of_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="critic_dropout must be"):
        make(DroQ, critic_dropout=rate)
