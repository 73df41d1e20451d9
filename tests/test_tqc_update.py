"""TQC's update: the truncated mixture, its loss, and limiting cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, make_batch, make_constant
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.tqc import TQC, TQCConfig
from rl_training.errors import ConfigError
from rl_training.models.actor_with_critics import MLPTQCModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng

Array = NDArray[np.float64]


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> TQC:
    settings = {"num_critics": 3, "num_quantiles": 4, "quantiles_to_drop": 1} | keywords
    model = MLPTQCModel(
        OBS,
        ACT,
        (16,),
        num_critics=settings["num_critics"],
        num_quantiles=settings["num_quantiles"],
        rng=Rng(seeds, "networks"),
    )
    return TQC(model=model, seeds=seeds, **settings)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("dropped", [0, 1, 3])
@torch.no_grad()
def test_the_target_is_the_sorted_union_without_its_largest(dropped: int) -> None:
    seeds = (0, 4)
    learner, twin = (make_learner(seeds, quantiles_to_drop=dropped, alpha=0.3) for _ in range(2))
    batch = make_batch(seeds)
    target, metrics = learner.td_target(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    z = array(twin.model.quantiles(batch.next_obs, action, twin.target_critic))  # [S, N, B, M]
    kept = 3 * (4 - dropped)
    for seed in range(2):
        for row in range(B):
            least = sorted(z[seed, :, row].flatten())[:kept]
            soft = np.array(least) - 0.3 * float(log_prob[seed, row])
            expected = float(batch.reward[seed, row]) + 0.9 * soft
            np.testing.assert_allclose(array(target)[seed, row], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(array(metrics["target_q_mean"]), array(target).mean(-1), rtol=1e-5)


def test_with_nothing_dropped_it_is_plain_quantile_regression_over_the_union() -> None:
    learner = make_learner(quantiles_to_drop=0, kappa=0.0)
    batch = make_batch()
    target, _ = learner.td_target(batch)
    assert target.shape == (1, B, 12)
    loss, _, each = learner.critic_loss(batch, target)
    z = array(learner.model.quantiles(batch.obs, batch.action))[0]  # [N, B, M]
    total = []
    for row in range(B):
        for critic in range(3):
            for place in range(4):
                error = array(target)[0, row] - z[critic, row, place]
                tau = (2 * place + 1) / 8
                total.append(np.where(error < 0, (1 - tau) * -error, tau * error).mean())
    assert loss.item() == pytest.approx(np.mean(total), rel=1e-5)
    rows = np.array(total).reshape(B, -1).mean(1)
    np.testing.assert_allclose(array(each)[0], rows, rtol=1e-5)


def test_one_quantile_under_a_wide_huber_loss_is_sacs_error() -> None:
    """|1/2 - 1(u < 0)| u^2 / (2 kappa) is u^2 / (4 kappa)."""
    kappa = 1e3
    tqc = make_learner(num_critics=1, num_quantiles=1, quantiles_to_drop=0, kappa=kappa)
    model = MLPSACModel(OBS, ACT, (16,), num_critics=1, rng=Rng((0,), "networks"))
    sac = SAC(model=model, num_critics=1)
    batch = make_batch()
    ours, _ = tqc.td_target(batch)
    theirs, _ = sac.td_target(batch)
    torch.testing.assert_close(ours.squeeze(-1), theirs)
    loss = tqc.critic_loss(batch, ours)[0]
    torch.testing.assert_close(4 * kappa * loss, sac.critic_loss(batch, theirs)[0])
    torch.testing.assert_close(tqc.actor_loss(batch)[0], sac.actor_loss(batch)[0])


@torch.no_grad()
def test_the_more_is_dropped_the_lower_the_target() -> None:
    means = [
        float(
            make_learner(quantiles_to_drop=count).td_target(make_batch())[1]["target_q_mean"].mean()
        )
        for count in range(4)
    ]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]


def test_a_drawn_subset_of_critics_makes_the_mixture() -> None:
    learner = make_learner(num_target_critics=2)
    make_constant(learner.target_critic, [float(value) for value in range(12)])
    target, _ = learner.td_target(make_batch())
    assert target.shape == (1, B, 6)


def test_the_actor_climbs_the_mean_of_all_quantiles() -> None:
    learner = make_learner(alpha=0.5)
    make_constant(learner.model.critic, [float(value) for value in range(12)])
    batch = make_batch()
    log_prob = make_learner(alpha=0.5).sample_action(batch.obs)[1]
    torch.testing.assert_close(learner.actor_loss(batch)[0], 0.5 * log_prob.mean(1) - 5.5)


def test_importance_weights_count_per_row() -> None:
    learner = make_learner()
    plain = make_batch()
    target, _ = learner.td_target(plain)
    each = learner.critic_loss(plain, target)[2]
    weight = torch.linspace(0, 1, B).unsqueeze(0)
    loss = learner.critic_loss(make_batch(weight=weight), target)[0]
    torch.testing.assert_close(loss, (each * weight).mean(1))


def test_defaults_are_those_of_the_paper() -> None:
    config: Any = settings_of(TQC)
    assert (config.num_critics, config.num_quantiles, config.quantiles_to_drop) == (5, 25, 2)
    assert (config.critic_hidden_sizes, config.hidden_sizes) == ((512, 512, 512), (256, 256))
    assert (config.learning_rate, config.tau, config.batch_size) == (3e-4, 0.005, 256)
    assert (config.kappa, config.actor_q) == (1.0, "mean")


def test_something_must_be_left() -> None:
    with pytest.raises(
        ConfigError, match=r"quantiles_to_drop must be < num_quantiles \(25\), got 25"
    ):
        TQCConfig(quantiles_to_drop=25)
