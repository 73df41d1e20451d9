"""C51's update: the projection, DQN's mean as a limit, a known distribution, ends, priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from helpers.quantiles import STATES, learner_of, transitions, two_point_batch
from rl_training.algorithms.c51 import C51, SPEC, c51_loss
from rl_training.algorithms.losses import categorical_projection
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models import MLPQRDQNNetwork
from rl_training.testing.contract import build

ATOMS = torch.tensor([0.0, 1.0, 2.0, 3.0])


def small(**options: Any) -> C51:
    learner, _ = build("c51", **{"num_atoms": 11, "v_min": -2.0, "v_max": 2.0} | options)
    assert isinstance(learner, C51)
    return learner


def slow_projection(
    moved: NDArray[Any], probability: NDArray[Any], atoms: NDArray[Any]
) -> NDArray[Any]:
    """Algorithm 1 as it is written: atom after atom, to its lower and its upper neighbour."""
    result, width = np.zeros(len(atoms)), (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    for place, p in zip(moved, probability, strict=True):
        b = (np.clip(place, atoms[0], atoms[-1]) - atoms[0]) / width
        lower, upper = int(np.floor(b + 1e-12)), int(np.ceil(b - 1e-12))
        if lower == upper:
            result[lower] += p
            continue
        result[lower] += p * (upper - b)
        result[upper] += p * (b - lower)
    return result


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 9),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 5.0]),
)
def test_the_projection_is_that_of_algorithm_1(
    seed: int, count: int, discount: float, reward: float
) -> None:
    rng = np.random.default_rng(seed)
    atoms = np.linspace(-3.0, 2.0, count)
    probability = rng.dirichlet(np.ones(count))
    moved = reward * rng.normal() + discount * atoms
    tensors = (torch.from_numpy(x) for x in (moved, probability, atoms))
    projected = categorical_projection(*tensors).numpy()
    np.testing.assert_allclose(projected, slow_projection(moved, probability, atoms), atol=1e-9)
    assert projected.sum() == pytest.approx(1.0)
    if moved.min() >= -3.0 and moved.max() <= 2.0:
        assert projected @ atoms == pytest.approx(probability @ moved, abs=1e-9)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (2.0, [0.0, 0.0, 1.0, 0.0]),  # on an atom
        (1.5, [0.0, 0.5, 0.5, 0.0]),  # in the middle of two
        (0.25, [0.75, 0.25, 0.0, 0.0]),
        (-9.0, [1.0, 0.0, 0.0, 0.0]),  # below the support
        (3.5, [0.0, 0.0, 0.0, 1.0]),  # above it
    ],
)
def test_one_atom_is_shared_between_its_neighbours(place: float, expected: list[float]) -> None:
    one = categorical_projection(torch.tensor([place]), torch.ones(1), ATOMS)
    torch.testing.assert_close(one, torch.tensor(expected))


def test_atoms_that_stay_keep_their_probability() -> None:
    probability = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]])
    kept = categorical_projection(ATOMS.expand(2, -1), probability, ATOMS)
    torch.testing.assert_close(kept, probability)


def test_q_is_the_mean_of_the_distribution() -> None:
    learner = small(num_atoms=3)
    with torch.no_grad():
        learner.q_network.head.weight.zero_()
        shares = torch.tensor([0.5, 0.25, 0.25, 0.0625, 0.0625, 0.875])
        learner.q_network.head.bias.copy_(shares.log())
    q = learner.q_values(torch.zeros(1, 1, 4))[0, 0]
    torch.testing.assert_close(q, torch.tensor([-0.5, 1.625]))
    assert learner.act(torch.zeros(1, 1, 4)).item() == 1


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_the_loss_is_the_divergence_of_numpy(double: bool, dueling: bool) -> None:
    learner = small(double=double, dueling=dueling)
    with torch.no_grad():
        for parameter in learner.target_network.parameters():
            parameter.mul_(1.5)  # another network than the current one
    batch = transitions("c51")
    atoms = learner.atoms().double().numpy()

    def distribution(network: torch.nn.Module, obs: Tensor) -> NDArray[Any]:
        logits = network(obs)[0].detach().double().numpy()
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        shares: NDArray[Any] = weights / weights.sum(-1, keepdims=True)
        return shares

    after = distribution(learner.target_network, batch.next_obs)
    chooser = distribution(learner.q_network, batch.next_obs) if double else after
    now = distribution(learner.q_network, batch.obs)
    divergences = []
    for row in range(batch.reward.shape[1]):
        best = (chooser[row] @ atoms).argmax()
        moved = batch.reward[0, row].item() + batch.discount[0, row].item() * atoms
        target = slow_projection(moved, after[row, best], atoms)
        taken, held = now[row, batch.action[0, row]], target > 0
        divergences.append((target[held] * np.log(target[held] / taken[held])).sum())
    loss, _, priority = learner.td_loss(batch)
    np.testing.assert_allclose(priority[0].numpy(), divergences, rtol=1e-3, atol=1e-5)
    assert loss.item() == pytest.approx(np.mean(divergences), rel=1e-3)


def test_the_loss_is_zero_where_the_prediction_is_the_target() -> None:
    learner = small(num_atoms=5)
    with torch.no_grad():
        learner.q_network.head.weight.zero_()
        learner.q_network.head.bias.copy_(torch.tensor([-60.0, -60.0, -60.0, 0.0, -60.0] * 2))
    batch = transitions("c51")
    never = torch.zeros_like(batch.discount)
    batch = TransitionBatch(**vars(batch) | {"discount": never, "reward": never + 1.0})
    loss, _, priority = learner.td_loss(batch)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert (priority >= 0).all()


def test_a_two_point_return_is_learned() -> None:
    options: dict[str, Any] = {
        "num_atoms": 5,
        "v_min": 0.0,
        "v_max": 2.0,
        "target_update_interval": 20,
    }
    schedule: dict[str, Any] = {"learning_rate": 0.02, "lr_schedule": {"type": "linear"}}
    learner: C51 = learner_of("c51", **options, **schedule)
    batch = two_point_batch()
    for update in range(400):
        learner.set_progress(update / 400)
        learner.update(batch)
    first, later = learner.q_network(STATES)[0, :, 0].detach().softmax(-1)
    expected = torch.tensor([0.25, 0.0, 0.0, 0.0, 0.75])  # of 0, 0.5, 1, 1.5, 2
    torch.testing.assert_close(later, expected, atol=0.03, rtol=0.0)
    expected = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.75])
    torch.testing.assert_close(first, expected, atol=0.03, rtol=0.0)


def test_a_termination_has_no_future_and_a_time_limit_has_one() -> None:
    learner, batch = small(v_min=-9.0, v_max=9.0), transitions("c51")
    ended = TransitionBatch(**vars(batch) | {"discount": torch.zeros_like(batch.discount)})
    torch.testing.assert_close(c51_loss(learner, ended)["target_mean"], batch.reward)
    cut = TransitionBatch(**vars(batch) | {"discount": torch.full_like(batch.discount, 0.5)})
    best = learner.q_values(batch.next_obs).argmax(-1, keepdim=True)
    value = learner.q_values(batch.next_obs, learner.target_network).gather(-1, best).squeeze(-1)
    expected = batch.reward + 0.5 * value
    torch.testing.assert_close(c51_loss(learner, cut)["target_mean"], expected.detach())


def test_weights_scale_the_divergences() -> None:
    learner, batch = small(), transitions("c51")
    loss, _, priority = learner.td_loss(batch)
    torch.testing.assert_close(priority.mean(-1), loss)
    weight = torch.linspace(0.1, 1.0, priority.shape[1]).unsqueeze(0)
    weighted = learner.td_loss(TransitionBatch(**vars(batch) | {"weight": weight}))[0]
    torch.testing.assert_close(weighted, (priority * weight).mean(-1))


def test_rainbow_learns_with_everything_at_once() -> None:
    learner = small(dueling=True, noisy=True, double=True, n_step=3, prioritized=True)
    before = [p.detach().clone() for p in learner.q_network.parameters()]
    result = learner.update(transitions("c51"))
    assert set(result.metrics) == set(SPEC.metrics)
    assert result.priority is not None
    after = learner.q_network.parameters()
    assert not any(torch.equal(p, q) for p, q in zip(before, after, strict=True))


def test_a_support_that_is_no_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"v_min must be < v_max \(1\), got 1"):
        C51(q_network=MLPQRDQNNetwork(2, 2, 51), v_min=1.0, v_max=1.0)


def test_a_network_with_another_number_of_atoms_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_atoms is 51, but q_network has 5"):
        C51(q_network=MLPQRDQNNetwork(2, 2, 5))
