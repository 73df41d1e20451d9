"""RLPD's update: random subsets, the mean that the actor climbs, rounds, and limiting cases."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, make_batch, make_constant, parameters_of, same
from helpers.watching import rows_asked
from rl_training.algorithms.rlpd import RLPD, RLPDConfig, rlpd_loss
from rl_training.algorithms.sac import SAC, sac_loss
from rl_training.errors import ConfigError
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng

NARROW: dict[str, Any] = {
    "num_critics": 2,
    "num_target_critics": 2,
    "gradient_updates_per_step": 1,
    "use_layer_norm": False,
}
"""Settings under which targets are SAC's."""


def make_model(num_critics: int, seeds: tuple[int, ...]) -> MLPSACModel:
    return MLPSACModel(OBS, ACT, (16,), num_critics=num_critics, rng=Rng(seeds, "networks"))


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> RLPD:
    return RLPD(model=make_model(keywords.get("num_critics", 10), seeds), seeds=seeds, **keywords)


def make_sac(num_critics: int = 2, **keywords: Any) -> SAC:
    return SAC(model=make_model(num_critics, (0,)), num_critics=num_critics, **keywords)


# The target


@torch.no_grad()
def test_the_target_is_the_least_of_a_subset_by_brute_force() -> None:
    seeds = (0, 4)
    learner = make_learner(seeds, num_critics=5, num_target_critics=2)
    twin = make_learner(seeds, num_critics=5, num_target_critics=2)
    batch = make_batch(seeds)
    target, metrics = learner.td_target(batch)
    action, log_prob = twin.sample_action(batch.next_obs)
    q = twin.model.q_values(batch.next_obs, action, twin.target_critic)
    chosen = twin.rng.permutation(5)[:, :2].tolist()
    for seed, (first, second) in enumerate(chosen):
        assert first != second
        for row in range(B):
            least = min(float(q[seed, first, row]), float(q[seed, second, row]))
            soft = least - float(log_prob[seed, row])  # the temperature starts at 1
            expected = float(batch.reward[seed, row]) + 0.9 * soft
            assert float(target[seed, row]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(metrics["entropy_term"], -log_prob)


def least_of_drawn(learner: RLPD, q: Tensor) -> Tensor:
    """The next value that Q `[S, N, 1]` of the target critics gives, `[S, 1]`."""
    members = learner.target_members()
    assert members is not None
    return learner.next_value(q.gather(1, members.unsqueeze(-1)), torch.zeros(q.shape[0], 1))


def test_only_the_drawn_target_critics_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    for seeds in ((0,), (0, 1)):
        learner = make_learner(seeds, num_critics=5, num_target_critics=2)
        asked = rows_asked(monkeypatch, learner.target_critic)
        learner.td_target(make_batch(seeds))
        assert asked == [(B, 2)]


def test_every_pair_is_drawn_equally_often_and_seeds_draw_their_own() -> None:
    learner = make_learner((0, 1), num_critics=4, backup_entropy=False)
    q = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1).expand(2, -1, 1)
    rows = [least_of_drawn(learner, q).flatten().tolist() for _ in range(3000)]
    least = [min(pair) for pair in itertools.combinations((1.0, 2.0, 4.0, 8.0), 2)]
    for seed in (0, 1):
        found = Counter(row[seed] for row in rows)
        for value, count in Counter(least).items():
            assert found[value] / 3000 == pytest.approx(count / 6, abs=0.04)
    assert any(first != second for first, second in rows)


def test_a_subset_of_one_is_a_random_critic() -> None:
    learner = make_learner(num_critics=3, num_target_critics=1, backup_entropy=False)
    q = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    found = {float(least_of_drawn(learner, q)) for _ in range(60)}
    assert found == {1.0, 2.0, 4.0}


def test_without_the_entropy_backup_the_term_is_gone_to_the_bit() -> None:
    learner = make_learner(num_critics=2, backup_entropy=False, initial_alpha=50.0)
    make_constant(learner.target_critic, [5.0, 3.0])
    batch = make_batch()
    target, metrics = learner.td_target(batch)
    assert torch.equal(target, torch.addcmul(batch.reward, batch.discount, torch.tensor(3.0)))
    assert metrics["entropy_term"].abs().max() > 1.0


def test_the_whole_ensemble_as_subset_gives_the_target_of_sac() -> None:
    learner, sac = make_learner(**NARROW), make_sac()
    batch = make_batch()
    for key in ("one", "two"):
        batch = make_batch(key=key)
        assert torch.equal(learner.td_target(batch)[0], sac.td_target(batch)[0])


def test_one_critic_and_one_update_a_round_is_sac() -> None:
    # With one critic the mean that RLPD's actor climbs is the least that SAC's climbs.
    narrow: dict[str, Any] = NARROW | {
        "num_critics": 1,
        "num_target_critics": 1,
        "target_entropy": -2.0,
    }
    learner, sac = make_learner(**narrow), make_sac(1, target_entropy=-2.0)
    for key in range(6):
        batch = make_batch(key=str(key))
        ours, theirs = learner.update(batch).metrics, sac.update(batch).metrics
        assert dict(ours) == pytest.approx(dict(theirs))
    assert same(parameters_of(learner.model), parameters_of(sac.model))
    assert torch.equal(learner.log_alpha, sac.log_alpha)


# The actor


def test_the_actor_climbs_the_mean_of_all_critics_and_sac_the_least() -> None:
    learner, sac = make_learner(num_critics=3, alpha=0.5), make_sac(3, alpha=0.5)
    for each in (learner, sac):
        make_constant(each.model.critic, [1.0, 2.0, 6.0])
    batch = make_batch()
    log_prob = make_learner(num_critics=3, alpha=0.5).sample_action(batch.obs)[1]
    soft = 0.5 * log_prob.mean(1)
    torch.testing.assert_close(learner.actor_loss(batch)[0], soft - 3.0)
    torch.testing.assert_close(sac.actor_loss(batch)[0], soft - 1.0)
    torch.testing.assert_close(learner.actor_loss(batch)[1]["q_mean"], torch.full((1, B), 3.0))


def test_the_target_entropy_is_half_of_sacs_unless_given() -> None:
    assert make_learner().target_entropy == -ACT / 2
    assert make_sac().target_entropy == -ACT
    assert make_learner(target_entropy=-0.7).target_entropy == -0.7


@pytest.mark.parametrize("pretraining", [0, 5, 7])
def test_actor_and_temperature_move_in_the_last_update_of_a_round_only(pretraining: int) -> None:
    learner = make_learner(
        num_critics=2, gradient_updates_per_step=4, offline_pretrain_updates=pretraining
    )
    moved = []
    for count in range(pretraining + 9):
        actor, critic = parameters_of(learner.model.actor), parameters_of(learner.model.critic)
        target, alpha = parameters_of(learner.target_critic), learner.log_alpha.clone()
        learner.update(make_batch(key=str(count)))
        actor_moved = not same(actor, parameters_of(learner.model.actor))
        assert actor_moved == (not torch.equal(alpha, learner.log_alpha))
        assert not same(critic, parameters_of(learner.model.critic)), "critics always move"
        assert not same(target, parameters_of(learner.target_critic)), "targets always move"
        if actor_moved:
            moved.append(count)
    # Rounds of pretraining count from the first update, those after it from the first after it.
    expected = [*range(3, pretraining, 4), pretraining + 3, pretraining + 7]
    assert moved == expected


def test_phases_tell_rounds_and_pretraining_apart() -> None:
    learner = make_learner(num_critics=2, gradient_updates_per_step=2, offline_pretrain_updates=3)
    phases = []
    for _ in range(7):
        phases.append(learner.phase())
        learner.num_updates.value += 1
    assert phases == [3, 2, 3, 1, 0, 1, 0]


def test_metrics_of_the_actor_are_those_of_its_last_step() -> None:
    learner = make_learner(num_critics=2, gradient_updates_per_step=2)
    first, second, third = (learner.update(make_batch()).metrics for _ in range(3))
    for name in ("actor_loss", "q_mean", "entropy"):
        assert first[name] == 0.0
        assert second[name] != 0.0
        assert third[name] == second[name]
    assert first["alpha"] == 1.0, "the temperature is known before it moves"
    assert third["alpha"] == second["alpha"] != 1.0


# Settings


def test_defaults_are_those_of_the_paper() -> None:
    config: Any = settings_of(RLPD)
    assert (config.num_critics, config.num_target_critics, config.use_layer_norm) == (10, 2, True)
    assert (config.gradient_updates_per_step, config.learning_starts) == (20, 5000)
    assert (config.offline_batch_ratio, config.offline_pretrain_updates) == (0.5, 0)
    assert (config.alpha, config.initial_alpha, config.backup_entropy) == ("auto", 1.0, True)


def test_a_subset_larger_than_the_ensemble_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"num_target_critics must be <= num_critics \(3\), got 4"
    ):
        RLPDConfig(num_critics=3, num_target_critics=4)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_outside_0_to_1_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="offline_batch_ratio"):
        settings_of(RLPD, offline_batch_ratio=ratio)


def test_a_fixed_temperature_stays() -> None:
    learner = make_learner(**NARROW, alpha=0.3)
    learner.update(make_batch())
    torch.testing.assert_close(learner.log_alpha.exp(), torch.tensor([0.3]))


# The loss


def test_rlpd_loss_is_what_an_update_minimises_and_changes_nothing() -> None:
    learner = make_learner(num_critics=4, gradient_updates_per_step=1)
    twin = make_learner(num_critics=4, gradient_updates_per_step=1)
    batch, before = make_batch(), parameters_of(learner.model)
    losses = rlpd_loss(learner, batch)
    assert same(before, parameters_of(learner.model))
    metrics = twin.update(batch).metrics
    critic_loss = float(losses["critic_loss"].detach())
    assert critic_loss == pytest.approx(metrics["critic_loss"])
    assert losses.keys() >= {"actor_loss", "target_q_mean", "entropy_term", "entropy"}


def test_rlpd_loss_of_one_critic_is_sac_loss() -> None:
    narrow: dict[str, Any] = NARROW | {"num_critics": 1, "num_target_critics": 1}
    ours, theirs = (
        rlpd_loss(make_learner(**narrow), make_batch()),
        sac_loss(make_sac(1), make_batch()),
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
