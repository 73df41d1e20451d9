"""COMBO: where its critics are pushed down and up, and when it is CQL or MOPO without a penalty."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.imagining import ACTION, OBS, imagine, make_learner
from rl_training.algorithms.combo import COMBO
from rl_training.algorithms.cql import CQL
from rl_training.algorithms.dynamics.imagination import Rules
from rl_training.algorithms.mopo import MOPO
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError, SpecMismatch
from rl_training.models import MLPSACModel
from rl_training.rng import Rng
from rl_training.state import PerSeed
from rl_training.testing.contract import build, flat_state

ROWS, REAL, SAMPLES = 8, 4, 3


def batch_of(seeds: tuple[int, ...] = (0,)) -> TransitionBatch:
    rng = Rng(seeds, "test")
    return TransitionBatch(
        obs=rng.normal(ROWS, OBS),
        action=rng.uniform(ROWS, ACTION) * 2 - 1,
        reward=rng.normal(ROWS),
        next_obs=rng.normal(ROWS, OBS),
        discount=torch.full((len(seeds), ROWS), 0.9),
    )


def learner_of(**settings: Any) -> COMBO:
    return make_learner(COMBO, num_cql_samples=SAMPLES, **settings)


def gap_of(learner: COMBO, batch: TransitionBatch) -> Tensor:
    return learner.penalty(batch, learner.model.q_values(batch.obs, batch.action)).detach()


def one_q(learner: COMBO, obs: Tensor, action: Tensor) -> Any:
    q = learner.model.q_values(obs.view(1, 1, OBS), action.view(1, 1, ACTION))
    return q.detach().double().numpy()[0, :, 0]


@pytest.mark.parametrize("states", ["mixed", "imagined"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_penalty_is_that_of_a_slow_numpy_version(states: str, temperature: float) -> None:
    learner = learner_of(penalty_states=states, cql_temperature=temperature)
    batch, rng = batch_of(), copy.deepcopy(learner.rng)
    rows = list(range(ROWS)) if states == "mixed" else list(range(REAL, ROWS))
    noise = [rng.normal(len(rows), SAMPLES, ACTION)[0].double().numpy() for _ in range(2)]
    uniform = rng.uniform(len(rows), SAMPLES, ACTION)[0] * 2 - 1
    pushed_down = np.zeros(2)
    for place, row in enumerate(rows):
        terms = []
        for sample in range(SAMPLES):
            q = one_q(learner, batch.obs[0, row], uniform[place, sample])
            terms.append(q + ACTION * math.log(2))
            for kind, seen in enumerate((batch.obs, batch.next_obs)):
                mean, log_std = (
                    x.detach().double().numpy()[0, row] for x in learner.model.policy(seen)
                )
                z = noise[kind][place, sample]
                action = np.tanh(mean + np.exp(log_std) * z)
                density = (
                    -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - action**2)
                )
                drawn = torch.as_tensor(action, dtype=torch.float32)
                terms.append(one_q(learner, batch.obs[0, row], drawn) - density.sum())
        pushed_down += temperature * np.log(np.exp(np.array(terms) / temperature).sum(0))
    pairs = zip(batch.obs[0, :REAL], batch.action[0, :REAL], strict=True)
    pushed_up = np.mean([one_q(learner, obs, action) for obs, action in pairs], 0)
    expected = pushed_down / len(rows) - pushed_up
    found = gap_of(learner, batch)[0].double().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_real_rows_alone_make_it_cql() -> None:
    common: dict[str, Any] = {"num_cql_samples": SAMPLES, "batch_size": ROWS}
    ours = learner_of(synthetic_batch_ratio=0.0, cql_weight=2.0)
    policy = MLPSACModel(OBS, ACTION, (16,), rng=Rng((0,), "networks"))
    cqls = CQL(model=policy, cql_alpha=2.0, **common)
    assert ours.config.actor_learning_rate == cqls.config.actor_learning_rate
    for seed in range(3):
        first, second = (learner.update(batch_of((seed,))).metrics for learner in (ours, cqls))
        for name, value in second.tensors.items():
            torch.testing.assert_close(first.tensors[name], value, rtol=1e-5, atol=1e-5)


def test_without_a_weight_it_is_mopo_without_a_penalty_to_the_bit() -> None:
    ours = make_learner(COMBO, cql_weight=0.0, backup="entropy", actor_learning_rate=None)
    mopos = make_learner(MOPO, penalty_coef=0.0, synthetic_batch_ratio=0.5)
    for seed in range(5):
        for learner in (ours, mopos):
            learner.update(batch_of((seed,)))
    first, second = (flat_state(learner.state_dict()) for learner in (ours, mopos))
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, name


def test_q_rises_at_real_actions_and_falls_elsewhere() -> None:
    learner = learner_of(cql_weight=50.0, tau=0.001)
    batch = batch_of()

    def real_minus_imagined() -> Tensor:
        q = learner.model.q_values(batch.obs, batch.action).detach()
        return q[..., :REAL].mean() - q[..., REAL:].mean()

    before, gap = real_minus_imagined(), gap_of(learner, batch)
    for _ in range(50):
        learner.update(batch)
    assert real_minus_imagined() > before
    assert (gap_of(learner, batch) < gap).all()


def test_the_loss_is_the_td_error_and_the_weighted_penalty() -> None:
    for weight in (0.5, 5.0):
        metrics = learner_of(cql_weight=weight).update(batch_of()).metrics
        expected = metrics["td_loss"] + weight * 2 * metrics["cql_penalty"]  # of two critics
        assert metrics["critic_loss"] == pytest.approx(expected, rel=1e-5)


def test_members_of_a_group_may_have_weights_of_their_own() -> None:
    seeds = (0, 1)
    group = make_learner(COMBO, seeds)
    group.varied["cql_weight"] = PerSeed((0.0, 3.0), "cpu")
    alone = make_learner(COMBO, (1,), cql_weight=3.0)
    both, one = (x.update(batch_of(s)) for x, s in ((group, seeds), (alone, (1,))))
    for name, value in one.metrics.tensors.items():
        torch.testing.assert_close(both.metrics.tensors[name][1], value[0], rtol=1e-4, atol=1e-5)


def test_rollouts_may_take_uniform_actions() -> None:
    obs = Rng((0,), "test").normal(400, OBS)
    learner = learner_of(rollout_policy="uniform")
    with torch.no_grad():
        for parameter in learner.model.actor.parameters():
            parameter.zero_()
    learner.model.log_std_range = (-20.0, -20.0)  # type: ignore[misc]
    actions = imagine(learner, obs, 2, Rules()).action
    assert actions.abs().max() <= 1
    assert actions.std() == pytest.approx(1 / math.sqrt(3), abs=0.05)
    assert imagine(learner_of(), obs, 2, Rules()).action.std() != actions.std()


def test_batches_without_the_rows_that_the_penalty_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves 0 of 8 rows of a batch real"):
        learner_of(synthetic_batch_ratio=1.0)
    with pytest.raises(ConfigError, match="leaves 8 of 8 rows of a batch real"):
        learner_of(synthetic_batch_ratio=0.0, penalty_states="imagined")


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpecMismatch, match="combo needs continuous actions, but CartPole-v1 has"):
        build("combo", task="CartPole-v1")
