"""MOBILE: how far Bellman estimates differ, what that does to targets, and when it is MOPO."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.imagining import ACTION, OBS, make_learner
from rl_training.algorithms.mobile import MOBILE
from rl_training.algorithms.mopo import MOPO
from rl_training.data.batch import TransitionBatch
from rl_training.errors import SpecMismatch
from rl_training.models.layers import StackedLinear
from rl_training.rng import Rng
from rl_training.state import PerSeed
from rl_training.testing.contract import build, flat_state

ROWS, REAL = 8, 2
HALF: dict[str, Any] = {"synthetic_batch_ratio": 1 - REAL / ROWS}


def batch_of(seeds: tuple[int, ...] = (0,), rows: int = ROWS) -> TransitionBatch:
    rng = Rng(seeds, "test")
    return TransitionBatch(
        obs=rng.normal(rows, OBS),
        action=rng.uniform(rows, ACTION) * 2 - 1,
        reward=rng.normal(rows),
        next_obs=rng.normal(rows, OBS),
        discount=torch.full((len(seeds), rows), 0.9),
    )


def learner_of(**settings: Any) -> MOBILE:
    """A learner whose model has been fitted to data of other scales than 0 and 1."""
    learner = make_learner(MOBILE, **(HALF | settings))
    model, rng = learner.dynamics_model, Rng(learner.seeds, "statistics")
    for name in ("input_mean", "target_mean"):
        part = getattr(model, name)
        part.copy_(rng.normal(*part.shape[1:]))
    for name in ("input_scale", "target_scale"):
        part = getattr(model, name)
        part.copy_(rng.uniform(*part.shape[1:]) + 0.5)
    model.elites.copy_(torch.tensor([[2, 0, 1][: model.num_elites]]))
    return learner


def numbers(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


def predicted(learner: MOBILE, member: int, row: Any) -> tuple[Any, Any]:
    """Mean and deviation of the next observation, by the formulas of PETS, App. A.1."""
    model = learner.dynamics_model
    x = (row - numbers(model.input_mean)[0, 0, 0]) * numbers(model.input_scale)[0, 0, 0]
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, StackedLinear)
        x = x @ numbers(layer.weight)[0, member] + numbers(layer.bias)[0, member, 0]
        if index < len(model.layers) - 1:
            x = x / (1 + np.exp(-x))
    mean, logvar = x[:OBS], x[OBS + 1 : 2 * OBS + 1]
    high, low = (
        numbers(bound)[0, member, 0, :OBS] for bound in (model.max_logvar, model.min_logvar)
    )
    logvar = high - np.log1p(np.exp(high - logvar))
    logvar = low + np.log1p(np.exp(logvar - low))
    scale = numbers(model.target_scale)[0, 0, 0, :OBS]
    change = mean * scale + numbers(model.target_mean)[0, 0, 0, :OBS]
    return row[:OBS] + change, np.exp(0.5 * logvar) * scale


def least_q(learner: MOBILE, obs: Any, action: Tensor) -> float:
    row = torch.as_tensor(obs, dtype=torch.float32).view(1, 1, OBS)
    q = learner.model.q_values(row, action.view(1, 1, ACTION), learner.target_critic)
    return float(q.detach().min())


@pytest.mark.parametrize("normalize", [False, True])
def test_the_inconsistency_is_that_of_a_slow_numpy_version(normalize: bool) -> None:
    learner = learner_of(num_penalty_samples=3, normalize_observations=normalize)
    if normalize:
        learner.obs_norm.update(3 * torch.randn(1, 50, OBS) + 1)
    batch, elites = batch_of(), [2, 0]
    rng = copy.deepcopy(learner.rng)
    noise = rng.normal(3, len(elites), ROWS - REAL, OBS)
    found = learner.inconsistency(batch)
    expected = np.zeros(ROWS)
    drawn = np.zeros((3, len(elites), ROWS - REAL, OBS))
    for place in np.ndindex(3, len(elites), ROWS - REAL):
        _, elite, row = place
        given = torch.cat((batch.obs[0, REAL + row], batch.action[0, REAL + row]))
        mean, deviation = predicted(learner, elites[elite], numbers(given))
        drawn[place] = mean + deviation * numbers(noise)[0][place]
    states = learner.normalize(torch.as_tensor(drawn, dtype=torch.float32).view(1, -1, OBS))
    with learner.drawing_from(rng):
        actions = learner.sample_action(states)[0][0]
    values = [least_q(learner, s, a) for s, a in zip(states[0], actions, strict=True)]
    means = np.array(values).reshape(3, len(elites), -1).mean(0)
    expected[REAL:] = means.std(0, ddof=1)
    np.testing.assert_allclose(numbers(found)[0], expected, rtol=1e-4, atol=1e-6)
    assert (found[0, REAL:] > 0).all()


def test_the_target_is_lowered_by_the_weighted_inconsistency() -> None:
    learner, twin = (learner_of(penalty_coef=2.0) for _ in range(2))
    batch = batch_of()
    doubt = twin.inconsistency(batch)  # draws what the learner draws first
    target, _ = twin.td_target(batch)
    seen: list[Tensor] = []
    critic_loss = learner.critic_loss

    def kept(batch: TransitionBatch, target: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        seen.append(target)
        return critic_loss(batch, target)

    learner.critic_loss = kept  # type: ignore[method-assign]
    metrics = learner.update(batch).metrics
    torch.testing.assert_close(seen[0], target - 2.0 * doubt)
    assert torch.equal(metrics.tensors["bellman_inconsistency"], doubt)
    assert not doubt[:, :REAL].any()


def test_without_a_penalty_it_is_mopo_without_one_to_the_bit() -> None:
    plain: dict[str, Any] = {"penalty_coef": 0.0, "actor_learning_rate": None}
    ours = make_learner(MOBILE, backup="entropy", **plain)
    mopos = make_learner(MOPO, **plain)
    for seed in range(5):
        for learner in (ours, mopos):
            learner.update(batch_of((seed,)))
    first, second = (flat_state(learner.state_dict()) for learner in (ours, mopos))
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, name


def test_a_single_elite_is_never_in_doubt() -> None:
    learner = learner_of(num_elites=1)
    assert not learner.inconsistency(batch_of()).any()


def test_members_that_agree_have_no_doubt() -> None:
    learner = learner_of(num_elites=3)
    model = learner.dynamics_model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter[:, :1].expand_as(parameter))
        model.max_logvar.fill_(-40.0)
        model.min_logvar.fill_(-60.0)
    # Without noise of the policy either, every draw of every member is the same.
    learner.sample_action = lambda obs: (learner.model.policy(obs)[0].tanh(), obs[..., 0])  # type: ignore[method-assign]
    doubt = learner.inconsistency(batch_of())
    torch.testing.assert_close(doubt, torch.zeros_like(doubt), rtol=0, atol=1e-5)


def test_targets_are_not_below_the_bound() -> None:
    free, bound = learner_of(), learner_of(lowest_target=0.0)
    low, _ = free.td_target(batch_of())
    high, metrics = bound.td_target(batch_of())
    assert low.min() < 0
    assert torch.equal(high, low.clamp(min=0))
    assert torch.equal(metrics["target_q_mean"], high)


def test_a_deterministic_backup_has_no_entropy_term() -> None:
    deterministic, entropy = learner_of(), learner_of(backup="entropy")
    target, metrics = deterministic.td_target(batch_of())
    soft, soft_metrics = entropy.td_target(batch_of())
    assert not metrics["entropy_term"].any()
    torch.testing.assert_close(soft - target, 0.9 * soft_metrics["entropy_term"])


def test_members_of_a_group_may_have_weights_of_their_own() -> None:
    seeds = (0, 1)
    learner = make_learner(MOBILE, seeds, **HALF)
    learner.varied["penalty_coef"] = PerSeed((0.0, 3.0), "cpu")
    alone = make_learner(MOBILE, (1,), penalty_coef=3.0, **HALF)
    group, single = learner.update(batch_of(seeds)), alone.update(batch_of((1,)))
    assert group.metrics.tensors["bellman_inconsistency"][:, REAL:].gt(0).all()
    for name, value in single.metrics.tensors.items():
        torch.testing.assert_close(group.metrics.tensors[name][1], value[0], rtol=1e-4, atol=1e-5)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpecMismatch, match="mobile needs continuous actions, but CartPole-v1 has"):
        build("mobile", task="CartPole-v1")
