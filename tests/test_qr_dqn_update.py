"""QR-DQN's update: the median, DQN as a limit, known distributions, terminal rows, priorities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.quantiles import STATES, learner_of, trained_on_two_points, transitions, values_of
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.losses import midpoints
from rl_training.algorithms.qr_dqn import QRDQN, qr_dqn_loss
from rl_training.algorithms.quantile import of_action
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models import MLPQNetwork, MLPQRDQNNetwork
from rl_training.models.quantile_networks import QuantileNetwork
from rl_training.rng import Rng
from rl_training.testing.contract import build


def small(**settings: Any) -> QRDQN:
    learner, _ = build("qr_dqn", **settings)
    assert isinstance(learner, QRDQN)
    return learner


def test_fractions_are_the_middles_of_equal_intervals() -> None:
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_one_quantile_learns_the_median() -> None:
    learner: QRDQN = learner_of(
        "qr_dqn", num_quantiles=1, kappa=0.0, learning_rate=0.02, lr_schedule={"type": "linear"}
    )
    rewards = torch.tensor([[-1.0, 0.0, 0.5, 3.0, 90.0]])
    batch = TransitionBatch(
        obs=torch.zeros(1, 5, 1),
        action=torch.zeros(1, 5, dtype=torch.int64),
        reward=rewards,
        next_obs=torch.zeros(1, 5, 1),
        discount=torch.zeros(1, 5),
    )
    for update in range(300):
        learner.set_progress(update / 300)
        learner.update(batch)
    assert learner.q_values(torch.zeros(1, 1, 1)).item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_with_one_quantile_the_loss_is_half_of_dqns(double: bool, dueling: bool) -> None:
    ours = small(num_quantiles=1, double=double, dueling=dueling)
    network = MLPQNetwork(4, 2, (16, 16), dueling=dueling)
    pairs = zip(network.parameters(), ours.q_network.parameters(), strict=True)
    with torch.no_grad():
        for theirs, own in pairs:
            theirs.copy_(own)
    dqn = DQN(q_network=network, double=double)
    batch = transitions("qr_dqn")
    loss, metrics, _ = ours.td_loss(batch)
    expected, expected_metrics, _ = dqn.td_loss(batch)
    torch.testing.assert_close(loss, expected / 2)
    for name in ("q_value_mean", "target_mean", "td_error_mean"):
        torch.testing.assert_close(metrics[name], expected_metrics[name])


def test_the_quantiles_of_a_two_point_return_are_learned() -> None:
    learner = trained_on_two_points("qr_dqn", num_quantiles=4)
    assert isinstance(learner, QRDQN)
    first, later = learner.q_network(STATES)[0, :, 0].detach()
    assert later.tolist() == pytest.approx([0.0, 2.0, 2.0, 2.0], abs=0.1)
    assert first.tolist() == pytest.approx([1.0, 2.0, 2.0, 2.0], abs=0.1)
    assert values_of(learner).tolist() == pytest.approx([1.75, 1.5], abs=0.06)


def test_the_target_of_a_terminal_row_is_its_reward_alone() -> None:
    learner = small(num_quantiles=5)
    batch = transitions("qr_dqn")
    ended = TransitionBatch(**vars(batch) | {"discount": torch.zeros_like(batch.discount)})
    metrics = qr_dqn_loss(learner, ended)
    torch.testing.assert_close(metrics["target_mean"], batch.reward)
    cut = TransitionBatch(**vars(batch) | {"discount": torch.ones_like(batch.discount)})
    shifted = batch.reward + learner.next_quantiles(batch.next_obs).mean(-1)
    torch.testing.assert_close(qr_dqn_loss(learner, cut)["target_mean"], shifted)


@pytest.mark.parametrize(("double", "chosen"), [(True, 1), (False, 0)])
def test_double_rates_the_online_choice(double: bool, chosen: int) -> None:
    learner = small(num_quantiles=3, double=double)
    online, target = learner.q_network, learner.target_network
    assert isinstance(target, QuantileNetwork)
    values = {online: [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], target: [5.0, 6.0, 7.0, 1.0, 2.0, 3.0]}
    for network, bias in values.items():
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.bias.copy_(torch.tensor(bias))
    expected = [5.0, 6.0, 7.0] if chosen == 0 else [1.0, 2.0, 3.0]
    assert learner.next_quantiles(torch.zeros(1, 1, 4))[0, 0].tolist() == expected


def test_priorities_are_the_losses_of_the_samples_and_weights_scale_them() -> None:
    learner = small(num_quantiles=5)
    batch = transitions("qr_dqn")
    loss, _, priority = learner.td_loss(batch)
    torch.testing.assert_close(priority.mean(-1), loss)
    weight = torch.linspace(0.1, 1.0, priority.shape[1]).unsqueeze(0)
    weighted = learner.td_loss(TransitionBatch(**vars(batch) | {"weight": weight}))[0]
    torch.testing.assert_close(weighted, (priority * weight).mean(-1))


def test_dueling_quantiles_average_to_the_value_stream() -> None:
    network = MLPQRDQNNetwork(2, 3, 5, (16,), dueling=True, rng=Rng((0, 1), "w"))
    obs = Rng((0, 1), "obs").normal(7, 2)
    flat = network.head(network.encoder(obs)).view(2, 7, 4, 5)
    assert network(obs).shape == (2, 7, 3, 5)
    torch.testing.assert_close(network(obs).mean(2), flat[:, :, 3])


def test_quantiles_are_picked_by_action() -> None:
    quantiles = torch.arange(12.0).view(1, 2, 3, 2)
    assert of_action(quantiles, torch.tensor([[2, 0]])).tolist() == [[[4.0, 5.0], [6.0, 7.0]]]


def test_another_encoder_can_stand_before_the_head() -> None:
    class Pixels(nn.Module):
        obs_dim = embedding_dim = 9

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return obs.flatten(2)

    network = QuantileNetwork(Pixels(), 2, 5, rng=Rng((0, 1), "w"))
    learner = QRDQN(q_network=network, num_quantiles=5, seeds=(0, 1))
    assert learner.act(torch.zeros(2, 4, 3, 3)).shape == (2, 4)


def test_a_network_with_another_number_of_quantiles_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_quantiles is 8, but q_network has 5"):
        QRDQN(q_network=MLPQRDQNNetwork(2, 2, 5), num_quantiles=8)
    with pytest.raises(ConfigError, match=r"kappa must be >= 0, got -1"):
        QRDQN(q_network=MLPQRDQNNetwork(2, 2, 5), num_quantiles=5, kappa=-1.0)
