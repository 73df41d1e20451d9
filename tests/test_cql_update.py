"""CQL against closed forms and limits: what peers got wrong is what is tested here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.datasets import toy_data
from helpers.watching import rows_asked
from rl_training.algorithms.cql import CQL, SPEC, cql_loss
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.sources import replay_settings
from rl_training.data.batch import TransitionBatch
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.actor_with_critics import tanh_gaussian_log_prob, tanh_gaussian_sample
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.rng import Rng
from rl_training.runtime.replay import load_buffer, make_replay

OBS, ACT, B = 3, 2, 16


def make_model(seeds: tuple[int, ...] = (0,)) -> MLPSACModel:
    return MLPSACModel(OBS, ACT, (16,), rng=Rng(seeds, "networks"))


def make_learner(seeds: tuple[int, ...] = (0,), **settings: Any) -> CQL:
    return CQL(model=make_model(seeds), seeds=seeds, **settings)


def make_batch(seeds: tuple[int, ...] = (0,), terminated: bool = False) -> TransitionBatch:
    rng = Rng(seeds, "batch")
    return TransitionBatch(
        obs=rng.normal(B, OBS),
        action=rng.uniform(B, ACT) * 1.8 - 0.9,
        reward=rng.normal(B),
        next_obs=rng.normal(B, OBS),
        discount=torch.full((len(seeds), B), 0.0 if terminated else 0.99),
    )


def penalty_of(learner: CQL, batch: TransitionBatch) -> Tensor:
    return learner.penalty(batch, learner.model.q_values(batch.obs, batch.action))


class LinearQ(nn.Module):
    """Critics with Q(s, a) = slope . a, the same for both members."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        q = (x[..., OBS:] * self.slope).sum(-1)
        return q.unsqueeze(1).expand(-1, 2, -1).unsqueeze(-1)


def test_the_log_sum_exp_of_a_linear_q_is_its_integral_over_the_box() -> None:
    slope = torch.tensor([1.5, -0.7])
    learner = make_learner(num_cql_samples=4000)
    learner.model.critic = LinearQ(slope)  # type: ignore[assignment]
    batch = make_batch()
    # The integral of exp(k a) over [-1, 1] is 2 sinh(k) / k; the terms are summed, not averaged.
    exact = sum(math.log(2 * math.sinh(k) / k) for k in slope.tolist()) + math.log(3 * 4000)
    data = (batch.action * slope).sum(-1).mean(-1)
    penalty = penalty_of(learner, batch)
    torch.testing.assert_close(
        penalty, (exact - data).unsqueeze(1).expand(-1, 2), rtol=0, atol=0.02
    )


def test_every_state_has_three_groups_of_proposals_and_all_are_reduced() -> None:
    learner = make_learner(num_cql_samples=10)
    seen: list[torch.Size] = []
    original = learner.q_of_several

    def watched(
        obs: Tensor,
        actions: Tensor,
        critic: nn.Module | None = None,
        members: Tensor | None = None,
    ) -> Tensor:
        q = original(obs, actions, critic, members)
        seen.append(q.shape)
        return q

    learner.q_of_several = watched  # type: ignore[method-assign]
    assert penalty_of(learner, make_batch()).shape == (1, 2)
    assert seen == [torch.Size([1, 2, B, 30])]


def test_the_log_sum_exp_runs_over_the_actions_of_one_state() -> None:
    learner = make_learner(num_cql_samples=5)
    batch = make_batch()
    with torch.no_grad():
        counter = learner.rng.counter.clone()
        actions, log_density = learner.proposals(batch)
        learner.rng.counter.copy_(counter)
        penalty = penalty_of(learner, batch)
    by_hand = torch.zeros(2)
    for member in range(2):
        for state in range(B):
            terms = []
            for index in range(15):
                q = learner.model.q_values(
                    batch.obs[:, state : state + 1], actions[:, state, index : index + 1]
                )[0, member, 0]
                terms.append(q - log_density[0, state, index])
            data = learner.model.q_values(batch.obs, batch.action)[0, member, state]
            by_hand[member] += (torch.logsumexp(torch.stack(terms), 0) - data).detach() / B
    torch.testing.assert_close(penalty[0], by_hand, rtol=1e-4, atol=1e-4)


def test_uniform_proposals_cover_the_action_box() -> None:
    learner = make_learner(num_cql_samples=400)
    actions, log_density = learner.proposals(make_batch())
    uniform = actions[:, :, :400].flatten(0, 2)
    assert uniform.min() < -0.98
    assert uniform.max() > 0.98
    counts = torch.histc(uniform, 10, -1.0, 1.0) / uniform.numel()
    assert (counts - 0.1).abs().max() < 0.01
    exact = torch.full((1, B, 400), -ACT * math.log(2))
    torch.testing.assert_close(log_density[..., :400], exact)


def test_policy_proposals_carry_the_density_they_were_drawn_by() -> None:
    learner = make_learner(num_cql_samples=3)
    batch = make_batch()
    actions, log_density = learner.proposals(batch)
    for group, obs in ((slice(3, 6), batch.obs), (slice(6, 9), batch.next_obs)):
        mean, log_std = learner.model.policy(obs)
        expected = tanh_gaussian_log_prob(
            mean.unsqueeze(2), log_std.unsqueeze(2), actions[:, :, group]
        )
        torch.testing.assert_close(log_density[:, :, group], expected, rtol=1e-3, atol=1e-3)


def test_the_density_of_a_given_action_is_that_of_the_sample() -> None:
    rng = Rng((0,), "x")
    mean, log_std, noise = rng.normal(9, ACT), rng.uniform(9, ACT) - 1, rng.normal(9, ACT)
    action, log_prob = tanh_gaussian_sample(mean, log_std, noise)
    given = tanh_gaussian_log_prob(mean, log_std, action)
    torch.testing.assert_close(given, log_prob, rtol=1e-3, atol=1e-3)


def test_without_the_penalty_an_update_is_that_of_sac() -> None:
    settings: dict[str, Any] = {"learning_rate": 3e-4, "actor_learning_rate": None}
    ours = make_learner(cql_alpha=1e-12, backup="entropy", **settings)
    theirs = SAC(model=make_model(), **settings)
    batch = make_batch()
    with torch.no_grad():
        first = ours.td_target(batch)[0]
        torch.testing.assert_close(first, theirs.td_target(batch)[0])
    torch.testing.assert_close(
        ours.critic_loss(batch, first)[0], SAC.critic_loss(theirs, batch, first)[0]
    )
    ours.rng.load_state_dict(theirs.rng.state_dict())  # the penalty drew numbers
    torch.testing.assert_close(ours.actor_loss(batch)[0], theirs.actor_loss(batch)[0])


@pytest.mark.matrix
def test_the_penalty_lowers_q_off_the_data_against_q_at_the_data() -> None:
    gaps = []
    for weight in (1e-6, 10.0):
        learner = make_learner(cql_alpha=weight, learning_rate=1e-2)
        for _ in range(150):
            learner.update(make_batch())
        with torch.no_grad():
            gaps.append(penalty_of(learner, make_batch()).mean().item())
    assert gaps[1] < gaps[0] - 1.0


def test_the_learned_multiplier_grows_while_the_gap_is_too_large_and_falls_below() -> None:
    batch = make_batch()
    large = make_learner(cql_target_gap=0.01, cql_alpha=1.0)
    large.update(batch)
    assert large.log_multiplier.item() > 0
    small = make_learner(cql_target_gap=1000.0, cql_alpha=1.0)
    small.update(batch)
    assert small.log_multiplier.item() < 0


@pytest.mark.parametrize("backup", ["deterministic", "entropy", "max"])
def test_every_backup_asks_a_drawn_target_critic_alone(
    backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(backup=backup, num_target_critics=1)
    asked = rows_asked(monkeypatch, learner.target_critic)
    target, _ = learner.td_target(make_batch())
    assert [members for _, members in asked] == [1]
    assert target.shape == (1, B)


def test_deterministic_backup_has_no_entropy_and_max_is_no_smaller() -> None:
    batch = make_batch()
    plain, soft = make_learner(), make_learner(backup="entropy")
    best = make_learner(backup="max", num_cql_samples=50)
    with torch.no_grad():
        target, metrics = plain.td_target(batch)
        soft_target, soft_metrics = soft.td_target(batch)
        best_target, _ = best.td_target(batch)
    assert metrics["entropy_term"].abs().max() == 0
    torch.testing.assert_close(target + 0.99 * soft_metrics["entropy_term"], soft_target)
    assert best_target.mean() > target.mean()


class OpposedQ(nn.Module):
    """Two critics, Q(s, a) = +a_1 and -a_1."""

    def forward(self, x: Tensor) -> Tensor:
        q = x[..., OBS]
        return torch.stack((q, -q), 1).unsqueeze(-1)


def test_the_max_backup_is_the_least_of_each_critics_best() -> None:
    learner = make_learner(backup="max", num_cql_samples=64)
    learner.target_critic = OpposedQ()
    batch = make_batch()
    # The minimum of the two is never positive; the best action of each is, with this many samples.
    assert (learner.best_of_several(batch.next_obs) > 0).all()


def test_the_temperature_moves_at_the_actors_rate() -> None:
    learner = make_learner(learning_rate=1e-3, actor_learning_rate=1e-4)
    assert learner.alpha_optimizer.rate_of() == pytest.approx(1e-4)
    assert learner.critic_optimizer.rate_of() == pytest.approx(1e-3)
    shared = make_learner(learning_rate=1e-3, actor_learning_rate=None)
    assert shared.alpha_optimizer.rate_of() == pytest.approx(1e-3)


def test_terminations_stop_the_bootstrap() -> None:
    batch = make_batch(terminated=True)
    for backup in ("deterministic", "entropy", "max"):
        with torch.no_grad():
            target, _ = make_learner(backup=backup).td_target(batch)
        torch.testing.assert_close(target, batch.reward)


def test_a_cloning_actor_raises_the_density_of_the_data() -> None:
    learner = make_learner(bc_warmup_updates=1000, actor_learning_rate=1e-2, alpha=1e-3)
    batch = make_batch()

    def density() -> float:
        with torch.no_grad():
            mean, log_std = learner.model.policy(batch.obs)
            return float(tanh_gaussian_log_prob(mean, log_std, batch.action).mean())

    before = density()
    for _ in range(50):
        learner.update(batch)
    assert density() > before + 0.3
    assert learner.phase() == 0
    learner.num_updates.value = 1000
    assert learner.phase() == 1


def test_the_q_of_the_data_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batch = make_learner(num_cql_samples=10), make_batch()
    asked = rows_asked(monkeypatch, learner.model.critic)
    learner.critic_loss(batch, torch.zeros(1, B))
    assert asked == [(B, 2), (30 * B, 2)], "the data, and the proposals"


def test_proposals_give_no_gradient_to_the_policy() -> None:
    learner = make_learner()
    loss = penalty_of(learner, make_batch()).sum()
    actor = list(learner.model.actor.parameters())
    found = torch.autograd.grad(loss, actor, allow_unused=True)
    assert all(gradient is None for gradient in found)


def test_stacked_seeds_equal_single_learners() -> None:
    seeds = (3, 8)
    group = make_learner(seeds, cql_target_gap=1.0)
    singles = [make_learner((seed,), cql_target_gap=1.0) for seed in seeds]
    for _ in range(3):
        group.update(make_batch(seeds))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch((seed,)))
    for index, single in enumerate(singles):
        for ours, alone in zip(group.model.parameters(), single.model.parameters(), strict=True):
            torch.testing.assert_close(ours[index], alone[0], rtol=1e-4, atol=1e-5)


def test_the_loss_helper_names_what_the_contract_asks_for_and_changes_nothing() -> None:
    learner = make_learner()
    before = [p.clone() for p in learner.model.parameters()]
    metrics = cql_loss(learner, make_batch())
    names = {"critic_loss", "actor_loss", "target_q_mean", "entropy_term", "cql_penalty"}
    assert names <= metrics.keys()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("cql_alpha", 0.0, "cql_alpha must be > 0"),
        ("num_cql_samples", 0, "num_cql_samples must be >= 1"),
    ],
)
def test_bad_settings_are_named(key: str, value: Any, sentence: str) -> None:
    settings: dict[str, Any] = {key: value}
    with pytest.raises(ConfigError, match=sentence):
        make_learner((0,), **settings)


def test_standardised_observations_are_used_everywhere() -> None:
    learner = make_learner(normalize_observations=True)
    learner.obs_norm.mean.fill_(2.0)
    learner.obs_norm.variance.fill_(4.0)
    plain = make_learner()
    batch = make_batch()
    moved = replace(batch, obs=batch.obs * 2 + 2, next_obs=batch.next_obs * 2 + 2)
    ours, theirs = cql_loss(learner, moved), cql_loss(plain, batch)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner.act(moved.obs), plain.act(batch.obs), rtol=1e-4, atol=1e-5)


def test_the_loss_helper_weighs_by_the_learned_multiplier_and_leaves_it_alone() -> None:
    learner = make_learner(cql_target_gap=2.0, cql_alpha=3.0)
    metrics = cql_loss(learner, make_batch())
    excess = 2 * (metrics["cql_penalty"] - 2.0)  # summed over two critics
    torch.testing.assert_close(metrics["critic_loss"], metrics["td_loss"] + 3.0 * excess)
    assert learner.log_multiplier.item() == pytest.approx(math.log(3.0))


# With calibrated, that is Cal-QL


def with_returns(batch: TransitionBatch, returns: float | Tensor) -> TransitionBatch:
    return replace(batch, return_to_go=torch.as_tensor(returns).expand_as(batch.reward).clone())


def test_a_bound_below_everything_is_cql_bit_by_bit() -> None:
    plain, bounded = make_learner((0, 1)), make_learner((0, 1), calibrated=True)
    for _ in range(3):
        first = plain.update(make_batch((0, 1)))
        second = bounded.update(with_returns(make_batch((0, 1)), -1e30))
        for name, value in first.metrics.tensors.items():
            assert torch.equal(value, second.metrics.tensors[name]), name
    for one, other in zip(plain.model.parameters(), bounded.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_calibrated_penalty_by_loops() -> None:
    """Every term of every state by itself: uniform actions as they are, others no lower than G."""
    learner = make_learner(num_cql_samples=3, calibrated=True)
    batch = with_returns(make_batch(), Rng((7,), "returns").normal(B) * 0.3)
    assert batch.return_to_go is not None
    with torch.no_grad():
        counter = learner.rng.counter.clone()
        actions, log_density = learner.proposals(batch)
        learner.rng.counter.copy_(counter)
        penalty = penalty_of(learner, batch)
        data = learner.model.q_values(batch.obs, batch.action)
    expected, raised = [0.0, 0.0], 0
    for member in range(2):
        for state in range(B):
            total = 0.0
            for index in range(9):
                q = learner.model.q_values(
                    batch.obs[:, state : state + 1], actions[:, state, index : index + 1]
                )[0, member, 0].item()
                bound = batch.return_to_go[0, state].item()
                raised += index >= 3 and q < bound
                value = max(q, bound) if index >= 3 else q
                total += math.exp(value - log_density[0, state, index].item())
            expected[member] += (math.log(total) - data[0, member, state].item()) / B
    assert 0 < raised < 2 * 6 * B
    torch.testing.assert_close(penalty[0], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_above_every_value_only_uniform_actions_are_pushed_down() -> None:
    """At the bound no gradient flows, so none reaches Q of the policy's actions."""
    learner = make_learner(num_cql_samples=4, calibrated=True)
    q = torch.zeros(1, 2, B, 12, requires_grad=True)
    bounded = learner.bounded(q, with_returns(make_batch(), 5.0))
    assert (bounded[..., 4:] == 5).all()
    (gradient,) = torch.autograd.grad(bounded.sum(), q)
    assert (gradient[..., :4] == 1).all()
    assert (gradient[..., 4:] == 0).all()


def test_calibrated_critics_do_not_sink_below_the_returns_of_the_data() -> None:
    """The same updates with a large weight: CQL sinks far below, Cal-QL stays near the bound."""
    reached = []
    for calibrated in (False, True):
        learner = make_learner(cql_alpha=50.0, learning_rate=0.01, calibrated=calibrated)
        batch = with_returns(make_batch(terminated=True), 0.5)
        for _ in range(150):
            learner.update(batch)
        with torch.no_grad():
            actions, _ = learner.several_actions(batch.obs)
            reached.append(learner.q_of_several(batch.obs, actions).mean().item())
    assert reached[0] < -2.0
    assert reached[1] > reached[0] + 1.0


def test_a_calibrated_learner_refuses_a_batch_without_returns() -> None:
    with pytest.raises(DataError, match="no returns_to_go, which cql needs with calibrated"):
        make_learner(calibrated=True).update(make_batch())


def test_a_mapping_may_hold_returns() -> None:
    batch = with_returns(make_batch(), 0.5)
    names = {"obs": "obs", "actions": "action", "rewards": "reward", "next_obs": "next_obs"}
    names |= {"discounts": "discount", "returns_to_go": "return_to_go"}
    mapping = {key: getattr(batch, field)[0] for key, field in names.items()}
    one, two = make_learner(calibrated=True), make_learner(calibrated=True)
    assert dict(one.update(mapping).metrics) == dict(two.update(batch).metrics)


def test_shuffled_rows_have_no_returns(tmp_path: Path) -> None:
    env = probe_env("Pendulum-v1")
    data = toy_data(task=env)
    order = np.random.default_rng(0).permutation(len(data))
    path = tmp_path / "shuffled.npz"
    columns: dict[str, Any] = {name: column[order] for name, column in data.columns()}
    np.savez(path, **columns)
    refused = "return-to-go of each transition needs whole episodes"
    given: dict[str, Any] = {"calibrated": True, "dataset_path": str(path)}
    settings = SPEC.config_class(**given)
    learner = SPEC.build(env, settings, (0,))
    with pytest.raises(DataError, match=refused):
        load_buffer(learner, env)
    online = replay_settings(SPEC.config_class(**(given | {"online": {}})))
    assert online is not None
    with pytest.raises(DataError, match=refused):
        make_replay(online, env, 1, learner)


@pytest.mark.parametrize("name", ["cal_ql", "calql", "Cal-QL"])
def test_its_name_leads_to_the_setting(name: str) -> None:
    with pytest.raises(ConfigError, match="use algo cql with algo_kwargs"):
        get_algorithm_spec(name)
