"""PPO's update: the first loss, the clip, the KL stop and the bootstraps, by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributions

from helpers.updates import parameters_of, same
from rl_training.algorithms.optim import Adam
from rl_training.algorithms.ppo import PPO, SPEC, Minibatch, explained_variance, ppo_loss
from rl_training.data.batch import RolloutBatch
from rl_training.errors import ConfigError, DataError
from rl_training.models.layers import StackedLinear
from rl_training.models.mlp_actor_critic import MLPActorCriticModel
from rl_training.rng import Rng
from rl_training.runtime.compile.trace import Source, trace

OBS, ACT, T, N = 3, 2, 4, 2


def make_learner(seeds: tuple[int, ...] = (0,), *, discrete: bool = True, **keywords: Any) -> PPO:
    model = MLPActorCriticModel(OBS, ACT, (16,), discrete=discrete, rng=Rng(seeds, "networks"))
    return PPO(model=model, seeds=seeds, **({"minibatch_size": T * N} | keywords))


def make_rollout(
    seeds: tuple[int, ...] = (0,), *, discrete: bool = True, **changes: Tensor
) -> RolloutBatch:
    rng = Rng(seeds, "rollout")
    action = rng.integers(ACT, T, N) if discrete else rng.normal(T, N, ACT)
    values = {
        "obs": rng.normal(T, N, OBS),
        "action": action,
        "reward": rng.normal(T, N),
        "next_obs": rng.normal(T, N, OBS),
        "terminated": rng.uniform(T, N) < 0.2,
        "truncated": rng.uniform(T, N) < 0.2,
    }
    return RolloutBatch(**(values | changes))


def constant_value(learner: PPO, value: float) -> None:
    layer = learner.model.critic.layers[-1]
    assert isinstance(layer, StackedLinear)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(value)


def two_row_minibatch(learner: PPO, advantage: tuple[float, float], ratio: float) -> Minibatch:
    """Two rows whose probability has grown by `ratio` since the rollout; values as now."""
    obs, action = torch.zeros(1, 2, OBS), torch.tensor([[0, 1]])
    log_prob, _ = learner.model.log_prob_entropy(obs, action)
    value = learner.model.value(obs).detach()
    return Minibatch(
        obs,
        action,
        log_prob.detach() - math.log(ratio),
        value,
        torch.tensor([advantage]),
        value + 2.0,
    )


@pytest.mark.parametrize("discrete", [True, False])
def test_at_the_rollouts_own_parameters_the_ratio_is_one(discrete: bool) -> None:
    learner = make_learner(discrete=discrete, normalize_advantage=False)
    rollout = make_rollout(discrete=discrete)
    losses = ppo_loss(learner, rollout)
    assert losses["approx_kl"].item() == 0.0
    assert losses["clip_fraction"].item() == 0.0
    advantage = learner.prepare(rollout).advantage
    assert losses["policy_loss"].item() == pytest.approx(-advantage.mean().item(), rel=1e-6)


def test_policy_loss_of_standardised_advantages_is_zero_at_first() -> None:
    assert ppo_loss(make_learner(), make_rollout())["policy_loss"].item() == pytest.approx(
        0.0, abs=1e-6
    )


def test_first_policy_gradient_is_the_plain_one() -> None:
    learner = make_learner(normalize_advantage=False, vf_coef=0.0)
    data = learner.prepare(make_rollout())
    actor = list(learner.model.actor.parameters())
    clipped = torch.autograd.grad(learner.loss(data)[0].sum(), actor)
    log_prob, _ = learner.model.log_prob_entropy(data.obs, data.action)
    plain = torch.autograd.grad(-(log_prob * data.advantage).mean(), actor)
    for ours, theirs in zip(clipped, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_losses_of_a_moved_policy_by_hand() -> None:
    learner = make_learner(normalize_advantage=False, ent_coef=0.1, vf_coef=0.25)
    batch = two_row_minibatch(learner, (1.0, -3.0), ratio=1.5)
    loss, metrics = learner.loss(batch)
    # min(1.5, 1.2) and min(-4.5, -3.6); error 2 gives half of 4.
    assert metrics["policy_loss"].item() == pytest.approx((-1.2 + 4.5) / 2, rel=1e-5)
    assert metrics["value_loss"].item() == pytest.approx(2.0, rel=1e-5)
    assert metrics["approx_kl"].item() == pytest.approx(1.5 - 1 - math.log(1.5), rel=1e-4)
    assert metrics["clip_fraction"].item() == 1.0
    entropy = metrics["entropy"].item()
    assert entropy == pytest.approx(math.log(2), rel=1e-3)
    assert loss.item() == pytest.approx(1.65 + 0.25 * 2.0 - 0.1 * entropy, rel=1e-5)


def test_clip_value_limits_the_change_of_the_prediction() -> None:
    learner = make_learner(clip_value=0.5)
    batch = two_row_minibatch(learner, (1.0, -1.0), ratio=1.0)
    old = Minibatch(**(vars(batch) | {"value": batch.value - 3.0}))
    # Predicting v from v - 3 is held at v - 2.5, which misses the target v + 2 by 4.5.
    assert learner.loss(old)[1]["value_loss"].item() == pytest.approx(0.5 * 4.5**2, rel=1e-5)


@pytest.mark.parametrize(("progress", "clip"), [(0.0, 0.2), (0.5, 0.12), (1.0, 0.04)])
def test_the_clip_schedule_narrows_both_clips(progress: float, clip: float) -> None:
    learner = make_learner(
        clip_coef=0.2,
        clip_value=0.5,
        clip_schedule={"type": "linear", "start": 1.0, "end": 0.2},
        normalize_advantage=False,
    )
    learner.set_progress(progress)
    batch = two_row_minibatch(learner, (1.0, -3.0), ratio=1.5)
    metrics = learner.loss(Minibatch(**(vars(batch) | {"value": batch.value - 3.0})))[1]
    assert metrics["policy_loss"].item() == pytest.approx((-(1 + clip) + 4.5) / 2, rel=1e-5)
    # Predicting v from v - 3 is held at v - 3 + c, which misses the target v + 2 by 5 - c.
    error = 5 - 0.5 * clip / 0.2
    assert metrics["value_loss"].item() == pytest.approx(0.5 * error**2, rel=1e-5)
    assert learner.schedule_values()["clip_coef"] == pytest.approx(clip)
    inside = two_row_minibatch(learner, (1.0, -3.0), ratio=1.1)
    assert learner.loss(inside)[1]["clip_fraction"].item() == (1.0 if clip < 0.1 else 0.0)


def test_a_compiled_step_reads_the_clip_of_now() -> None:
    learner = make_learner(clip_schedule={"type": "linear"})
    batch = learner.prepare(make_rollout())
    source = Source("minibatch_step", learner.minibatch_step, {"learner": learner})
    arguments = (batch, torch.ones(1, dtype=torch.bool))
    assert "learner.clip_factor.tensor" in trace(source, arguments).inputs


def test_a_clip_that_differs_between_seeds_has_the_same_schedule() -> None:
    schedule = {"type": "linear", "end": 0.5}
    model = MLPActorCriticModel(OBS, ACT, (16,), discrete=True, rng=Rng((0, 1), "networks"))
    varied = {"clip_coef": (0.1, 0.4)}
    group = PPO(model=model, seeds=(0, 1), varied=varied, clip_schedule=schedule)
    group.set_progress(1.0)
    torch.testing.assert_close(
        group.scheduled(group.setting("clip_coef", ndim=2)), torch.tensor([[0.05], [0.2]])
    )
    assert [group.schedule_values(i)["clip_coef"] for i in (0, 1)] == pytest.approx([0.05, 0.2])


def test_a_constant_clip_is_not_logged() -> None:
    assert set(make_learner().schedule_values()) == {"learning_rate"}


def test_advantages_are_standardised_in_each_minibatch_and_seed() -> None:
    learner = make_learner()
    batch = two_row_minibatch(learner, (10.0, 4.0), ratio=1.1)
    # Mean 7, deviation sqrt(18): +-0.7071, and the ratio lies inside the clip.
    expected = -(1.1 * 0.70711 - 1.1 * 0.70711) / 2
    assert learner.loss(batch)[1]["policy_loss"].item() == pytest.approx(expected, abs=1e-6)
    scaled = Minibatch(**(vars(batch) | {"advantage": batch.advantage * 100 + 7}))
    assert torch.allclose(learner.loss(batch)[0], learner.loss(scaled)[0], atol=1e-6)


def test_a_minibatch_of_one_row_stays_finite() -> None:
    learner = make_learner(minibatch_size=1, update_epochs=1)
    learner.update(make_rollout())
    assert all(p.isfinite().all() for p in learner.model.parameters())


def test_a_rollout_of_one_row_stays_finite() -> None:
    learner = make_learner(minibatch_size=1, update_epochs=1)
    rollout = make_rollout()
    metrics = learner.update(
        RolloutBatch(**{k: v[:, :1, :1] for k, v in vars(rollout).items() if v is not None})
    )
    assert all(math.isfinite(value) for value in metrics.metrics.values())


def test_time_limits_bootstrap_and_terminations_do_not() -> None:
    learner = make_learner(gamma=0.9, gae_lambda=0.95)
    constant_value(learner, 10.0)
    never = torch.zeros(1, T, N, dtype=torch.bool)
    truncated, terminated = never.clone(), never.clone()
    truncated[0, 1, 0] = terminated[0, 1, 1] = True
    reward = torch.ones(1, T, N)
    data = learner.prepare(make_rollout(reward=reward, terminated=terminated, truncated=truncated))
    # A value of 10 is right for ever: the advantage is 0 except where the future is cut to nothing.
    expected = torch.zeros(T, N)
    expected[1, 1] = 1.0 - 10.0
    expected[0, 1] = 0.9 * 0.95 * -9.0
    torch.testing.assert_close(data.advantage.view(T, N), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(data.target.view(T, N), expected + 10.0, atol=1e-5, rtol=0)


def test_the_end_of_a_rollout_bootstraps_from_the_true_successor() -> None:
    learner = make_learner(gamma=0.9, gae_lambda=0.0)
    never = torch.zeros(1, T, N, dtype=torch.bool)
    rollout = make_rollout(terminated=never, truncated=never)
    data = learner.prepare(rollout)
    next_value = learner.model.value(rollout.next_obs.flatten(1, 2))
    torch.testing.assert_close(data.target, rollout.reward.flatten(1) + 0.9 * next_value)


def slow_advantages(learner: PPO, rollout: RolloutBatch, scale: float) -> list[list[float]]:
    """GAE `[T][n]` by loops, of normalised observations and scaled rewards; one seed."""
    norm, gamma, lam = learner.obs_norm, learner.config.gamma, learner.config.gae_lambda
    mean, deviation = norm.mean[0, 0], norm.variance[0, 0].sqrt()

    def value(obs: Tensor) -> float:
        standard = ((obs - mean) / deviation).clamp(-10, 10)
        return learner.model.value(standard.view(1, 1, OBS)).item()

    advantages = [[0.0] * N for _ in range(T)]
    for env in range(N):
        later = 0.0
        for t in reversed(range(T)):
            terminated = bool(rollout.terminated[0, t, env])
            ended = terminated or bool(rollout.truncated[0, t, env])
            reward = min(max(rollout.reward[0, t, env].item() / scale, -10.0), 10.0)
            after = 0.0 if terminated else gamma * value(rollout.next_obs[0, t, env])
            delta = reward + after - value(rollout.obs[0, t, env])
            later = delta + (0.0 if ended else gamma * lam * later)
            advantages[t][env] = later
    return advantages


def test_time_limits_bootstrap_from_the_normalised_last_observation_in_scaled_units() -> None:
    learner = make_learner(normalize_observations=True, normalize_rewards=True)
    rng = Rng((7,), "seen")
    learner.obs_norm.update(rng.normal(500, OBS) * 4 + 2)
    learner.return_norm.update(rng.normal(500).double() * 30)
    ends = torch.zeros(1, T, N, dtype=torch.bool)
    truncated, terminated = ends.clone(), ends.clone()
    truncated[0, 1, 0] = terminated[0, 2, 1] = True
    rollout = make_rollout(
        obs=rng.normal(T, N, OBS) * 4 + 2,
        next_obs=rng.normal(T, N, OBS) * 40,  # some of them are clipped
        reward=rng.normal(T, N) * 300,
        truncated=truncated,
        terminated=terminated,
    )
    scale = math.sqrt(learner.return_norm.variance.item() + 1e-8)
    assert (rollout.reward.abs() > 10 * scale).any(), "a reward is clipped too"
    wanted = torch.tensor(slow_advantages(learner, rollout, scale))
    torch.testing.assert_close(
        learner.prepare(rollout).advantage.view(T, N), wanted, rtol=1e-4, atol=1e-4
    )


def epochs_of(learner: PPO, rollout: RolloutBatch) -> list[tuple[Minibatch, Tensor]]:
    """Update with one minibatch per epoch; returns each, with what the critic says at its time."""
    seen: list[tuple[Minibatch, Tensor]] = []
    step = learner.minibatch_step

    def spy(batch: Minibatch, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        with torch.no_grad():
            seen.append((batch, learner.prepare(rollout).advantage.sort().values))
        return step(batch, active)

    setattr(learner, "minibatch_step", spy)  # noqa: B010 - mypy forbids assigning to a method
    learner.update(rollout)
    return seen


def test_recomputed_advantages_are_of_the_critic_at_the_start_of_the_epoch() -> None:
    kept, anew = (make_learner(update_epochs=3, recompute_advantages=on) for on in (False, True))
    before = kept.prepare(make_rollout())
    for index, (batch, now) in enumerate(epochs_of(anew, make_rollout())):
        torch.testing.assert_close(batch.advantage.sort().values, now)
        torch.testing.assert_close(batch.log_prob.sort().values, before.log_prob.sort().values)
        assert torch.allclose(now, before.advantage.sort().values) == (index == 0)
    for batch, _ in epochs_of(kept, make_rollout()):
        torch.testing.assert_close(batch.advantage.sort().values, before.advantage.sort().values)


def test_kl_stop_takes_no_step_after_the_threshold_is_passed() -> None:
    # At the first minibatch the divergence is 0; after a large step it is far above the limit.
    stopped = make_learner(update_epochs=5, target_kl=1e-7, learning_rate=0.05)
    once = make_learner(update_epochs=1, learning_rate=0.05)
    result = stopped.update(make_rollout())
    once.update(make_rollout())
    assert result.num_gradient_steps == 5
    assert same(parameters_of(stopped.model), parameters_of(once.model))
    optimizers = [learner.optimizer for learner in (stopped, once)]
    moments = [adam.first.tensors for adam in optimizers if isinstance(adam, Adam)]
    assert same(*moments)


def test_kl_stop_begins_anew_with_the_next_rollout() -> None:
    learner = make_learner(update_epochs=5, target_kl=1e-7, learning_rate=0.05)
    learner.update(make_rollout())
    before = parameters_of(learner.model)
    learner.update(make_rollout())
    assert not same(parameters_of(learner.model), before)


def test_kl_stop_holds_each_seed_by_itself() -> None:
    learner = make_learner((0, 1), target_kl=0.1)
    data = learner.prepare(make_rollout((0, 1)))
    shift = torch.tensor([[0.0], [-1.0]])  # the second seed's policy has moved by a factor e
    moved = Minibatch(**(vars(data) | {"log_prob": data.log_prob + shift}))
    before = parameters_of(learner.model)
    _, active = learner.minibatch_step(moved, torch.tensor([True, True]))
    after = parameters_of(learner.model)
    assert active.tolist() == [True, False]
    assert all(torch.equal(p[1], q[1]) for p, q in zip(before, after, strict=True))
    assert any(not torch.equal(p[0], q[0]) for p, q in zip(before, after, strict=True))
    _, active = learner.minibatch_step(data, active)
    assert active.tolist() == [True, False], "a seed that has stopped stays stopped"


def test_a_generous_kl_limit_changes_nothing() -> None:
    free, limited = make_learner(), make_learner(target_kl=1e9)
    free.update(make_rollout())
    limited.update(make_rollout())
    assert same(parameters_of(free.model), parameters_of(limited.model))


def test_every_row_is_used_once_per_epoch() -> None:
    learner = make_learner(minibatch_size=4, update_epochs=3)
    seen: list[Tensor] = []
    step = learner.minibatch_step

    def spy(batch: Minibatch, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        seen.append(batch.advantage)
        return step(batch, active)

    setattr(learner, "minibatch_step", spy)  # noqa: B010 - mypy forbids assigning to a method
    expected = learner.prepare(make_rollout()).advantage.sort().values
    assert learner.update(make_rollout()).num_gradient_steps == len(seen) == 6
    epochs = torch.cat(seen, 1).view(3, T * N)
    for epoch in epochs:
        torch.testing.assert_close(epoch.sort().values, expected[0])
    assert not torch.equal(epochs[0], epochs[1])


def test_a_last_short_minibatch_is_dropped_and_a_large_one_is_cut() -> None:
    short = make_learner(minibatch_size=5, update_epochs=2)
    assert short.update(make_rollout()).num_gradient_steps == 2
    large = make_learner(minibatch_size=1000, update_epochs=2)
    assert large.update(make_rollout()).num_gradient_steps == 2


def test_explained_variance_of_perfect_constant_and_opposite_predictions() -> None:
    target = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    value = torch.stack((target[0], torch.full((3,), 9.0), -target[2]))
    torch.testing.assert_close(explained_variance(value, target), torch.tensor([1.0, 0.0, -3.0]))


def test_gaussian_log_prob_of_the_rollout_equals_the_library() -> None:
    learner = make_learner(discrete=False)
    rollout = make_rollout(discrete=False)
    data = learner.prepare(rollout)
    mean = learner.model.mode(data.obs)
    library = distributions.Normal(mean, 1.0)
    expected = library.log_prob(rollout.action.flatten(1, 2))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(data.log_prob, expected.sum(-1))


@pytest.mark.parametrize("discrete", [True, False])
def test_stacked_seeds_equal_single_ones(discrete: bool) -> None:
    seeds = (3, 1)
    settings = {"minibatch_size": 4, "target_kl": 0.02, "learning_rate": 0.01}
    group = make_learner(seeds, discrete=discrete, normalize_obs=True, **settings)
    singles = [make_learner((s,), discrete=discrete, normalize_obs=True, **settings) for s in seeds]
    for _ in range(2):
        group.update(make_rollout(seeds, discrete=discrete))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_rollout((seed,), discrete=discrete))
    for index, single in enumerate(singles):
        for ours, theirs in zip(
            parameters_of(group.model), parameters_of(single.model), strict=True
        ):
            torch.testing.assert_close(ours[index], theirs[0], rtol=1e-4, atol=1e-5)


def test_state_round_trip_gives_a_bit_equal_next_update() -> None:
    first, other = make_learner((0,), normalize_obs=True), make_learner((5,), normalize_obs=True)
    first.update(make_rollout())
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert dict(first.update(make_rollout()).metrics) == dict(other.update(make_rollout()).metrics)
    assert same(parameters_of(first.model), parameters_of(other.model))


def test_observation_statistics_change_only_after_the_update() -> None:
    learner = make_learner(normalize_obs=True)
    rollout = make_rollout(obs=Rng((0,), "o").normal(T, N, OBS) * 5 + 3)
    before = learner.prepare(rollout)
    torch.testing.assert_close(before.obs, rollout.obs.flatten(1, 2).clamp(-10, 10))
    learner.update(rollout)
    torch.testing.assert_close(learner.obs_norm.mean[0, 0], rollout.obs[0].mean((0, 1)))


def test_update_takes_a_plain_mapping() -> None:
    first, second, rollout = make_learner(), make_learner(), make_rollout()
    names = {"obs": "obs", "actions": "action", "rewards": "reward", "next_obs": "next_obs"}
    names |= {"dones": "terminated", "truncations": "truncated"}
    mapping = {name: getattr(rollout, field)[0] for name, field in names.items()}
    assert dict(first.update(mapping).metrics) == dict(second.update(rollout).metrics)
    with pytest.raises(DataError, match=r"lacks \['dones'\]"):
        first.update({name: x for name, x in mapping.items() if name != "dones"})


def test_a_mapping_with_an_unknown_name_is_refused() -> None:
    rollout = make_rollout()
    names = {"obs": "obs", "actions": "action", "rewards": "reward", "next_obs": "next_obs"}
    names |= {"dones": "terminated", "truncated": "truncated"}  # the right name is truncations
    with pytest.raises(DataError, match="truncated"):
        make_learner().update({name: getattr(rollout, field)[0] for name, field in names.items()})


def test_metrics_are_those_declared() -> None:
    metrics = make_learner().update(make_rollout()).metrics
    assert set(metrics) == set(SPEC.metrics)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"clip_coef": 0.0}, r"clip_coef must be > 0, got 0"),
        ({"gae_lambda": 2}, r"gae_lambda must be <= 1, got 2"),
        ({"update_epochs": 0}, r"update_epochs must be >= 1, got 0"),
        ({"num_step": 8}, r"num_step is not a field of PPOConfig \(did you mean num_steps\?\)"),
    ],
)
def test_a_wrong_keyword_names_field_rule_and_value(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)
