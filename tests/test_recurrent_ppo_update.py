"""Recurrent PPO's update: a rollout replayed step by step, cuts into sequences, bad settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.updates import parameters_of, same
from rl_training.algorithms.recurrent_ppo import (
    RecurrentPPO,
    Sequences,
    recurrent_ppo_networks,
)
from rl_training.data.batch import RolloutBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.memory import Memory
from rl_training.rng import Rng

OBS, ACTIONS, T, N, SIZE = 3, 4, 12, 3, 5
GAMMA, LAMBDA = 0.9, 0.8
TASK = EnvSpec(
    env_id="test",
    obs_shape=(OBS,),
    obs_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    action_dtype="int64",
    num_actions=ACTIONS,
)
both_memories = pytest.mark.parametrize("memory", ["gru", "lstm"])


def make_learner(seeds: tuple[int, ...] = (0,), **changes: Any) -> RecurrentPPO:
    settings: dict[str, Any] = {
        "hidden_sizes": (8,),
        "memory_size": SIZE,
        "num_steps": T,
        "sequence_length": 4,
        "minibatch_size": 12,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
    }
    config = RecurrentPPO.settings_class()(**settings | changes)
    networks = recurrent_ppo_networks(TASK, config, Rng(seeds, "networks"))  # type: ignore[arg-type]
    return RecurrentPPO(config=config, seeds=seeds, model=networks["model"])


def make_rollout(learner: RecurrentPPO, **changes: Tensor) -> RolloutBatch:
    rng = Rng(learner.seeds, "rollout")
    values = {
        "obs": rng.normal(T, N, OBS),
        "action": rng.integers(ACTIONS, T, N),
        "reward": rng.normal(T, N),
        "next_obs": rng.normal(T, N, OBS),
        "terminated": rng.uniform(T, N) < 0.15,
        "truncated": rng.uniform(T, N) < 0.15,
        "memory": rng.normal(N, learner.model.memory.state_size).tanh(),
    }
    return RolloutBatch(**(values | changes))


def replayed(learner: RecurrentPPO, rollout: RolloutBatch, env: int) -> dict[str, list[Tensor]]:
    """What an episode's own course gives for each step of one environment, one step at a time."""
    model, memory = learner.model, rollout.memory
    assert memory is not None
    now = memory[:, env]
    rows: dict[str, list[Tensor]] = {"value": [], "next_value": [], "log_prob": [], "before": []}
    for step in range(T):
        if step and bool((rollout.terminated | rollout.truncated)[0, step - 1, env]):
            now = torch.zeros_like(now)
        rows["before"].append(now)
        now = model.remember(rollout.obs[:, step, env, None], now[:, None])[:, 0]
        features = model.memory.output(now)[:, None]
        log_prob, _ = model.log_prob_entropy(features, rollout.action[:, step, env, None])
        after = model.remember(rollout.next_obs[:, step, env, None], now[:, None])
        rows["value"].append(model.value(features))
        rows["next_value"].append(model.value(model.memory.output(after)))
        rows["log_prob"].append(log_prob)
    return rows


def advantages(rollout: RolloutBatch, rows: dict[str, list[Tensor]], env: int) -> list[float]:
    """Generalised advantages by their recursion."""
    found, following = [0.0] * T, 0.0
    for step in reversed(range(T)):
        reward = rollout.reward[0, step, env].item()
        goes_on = not bool(rollout.terminated[0, step, env])
        error = reward + GAMMA * goes_on * rows["next_value"][step].item()
        error -= rows["value"][step].item()
        ended = bool((rollout.terminated | rollout.truncated)[0, step, env])
        found[step] = following = error + GAMMA * LAMBDA * (not ended) * following
    return found


@both_memories
@torch.no_grad()
def test_a_prepared_rollout_is_what_single_steps_give(memory: str) -> None:
    learner = make_learner(memory=memory)
    rollout = make_rollout(learner)
    assert (rollout.terminated | rollout.truncated).any()
    data = learner.prepare(rollout)
    assert data.obs.shape == (1, N * 3, 4, OBS)
    for env in range(N):
        rows = replayed(learner, rollout, env)
        mine = slice(3 * env, 3 * env + 3)  # three sequences of four steps each
        for name in ("value", "log_prob"):
            wanted = torch.cat(rows[name], 1).view(1, 3, 4)
            torch.testing.assert_close(getattr(data, name)[:, mine], wanted)
        wanted = torch.tensor(advantages(rollout, rows, env)).view(1, 3, 4)
        torch.testing.assert_close(data.advantage[:, mine], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(data.target[:, mine], (data.advantage + data.value)[:, mine])
        starts = torch.stack(rows["before"][::4], 1)
        # A sequence that begins with an episode forgets by its flag what the one before left.
        kept = data.memory[:, mine] * ~data.is_first[:, mine, 0, None]
        torch.testing.assert_close(kept, starts)
        assert torch.equal(data.obs[:, mine].flatten(1, 2), rollout.obs[:, :, env])


@both_memories
@pytest.mark.parametrize("length", [1, 4, 12])
def test_at_the_rollouts_own_parameters_the_ratio_is_one(memory: str, length: int) -> None:
    # Only if each sequence begins with the memory that acting had there.
    learner = make_learner(memory=memory, sequence_length=length, normalize_advantage=False)
    data = learner.prepare(make_rollout(learner))
    metrics = learner.loss(data)[1]
    assert metrics["approx_kl"].item() == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"].item() == 0.0
    assert metrics["policy_loss"].item() == pytest.approx(-data.advantage.mean().item(), rel=1e-4)


@both_memories
@torch.no_grad()
def test_acting_remembers_what_learning_does(memory: str) -> None:
    learner = make_learner(memory=memory)
    rollout = make_rollout(learner)
    state = learner.initial_acting_state(N)
    assert state is not None
    ended = rollout.terminated | rollout.truncated
    noise = learner.draw_noise(T, N)
    memories = []
    for step in range(T):
        if step:
            state.begin_episodes(ended[:, step - 1])
        learner.sample_on(state, rollout.obs[:, step], noise[:, step])
        memories.append(state.memory.clone())
    data = learner.prepare(replace(rollout, memory=None))
    along = torch.stack(memories, 2)  # [S, n, T, M]
    starts = torch.cat((torch.zeros_like(along[:, :, :1]), along[:, :, 3:-1:4]), 2)
    torch.testing.assert_close(data.memory, starts.flatten(1, 2))


def test_gradients_stop_where_an_episode_or_a_sequence_begins() -> None:
    learner = make_learner()
    never = torch.zeros(1, T, N, dtype=torch.bool)
    cut = never.clone()
    cut[:, 5] = True  # the second sequence, steps 4 to 7, has a new episode at step 6
    data = learner.prepare(make_rollout(learner, terminated=cut, truncated=never))
    obs = data.obs.clone().requires_grad_()
    after = learner.model.follow(obs, data.memory, data.is_first)
    last_steps = learner.model.memory.output(after)[:, 1, 2:].sum()
    (gradient,) = torch.autograd.grad(last_steps, obs)
    reached = gradient.abs().sum(-1)[0] > 0  # [C, L]
    assert reached[1].tolist() == [False, False, True, True]
    assert not reached[0].any()
    assert not reached[2].any()


def test_one_step_without_a_past_is_feed_forward_ppo() -> None:
    # Where each step begins an episode, the layer is one more layer of the network.
    learner = make_learner(sequence_length=1, normalize_advantage=False)
    every = torch.ones(1, T, N, dtype=torch.bool)
    rollout = make_rollout(learner, terminated=every, truncated=~every)
    assert rollout.memory is not None
    data = learner.prepare(replace(rollout, memory=torch.zeros_like(rollout.memory)))
    layer = learner.model.memory
    assert isinstance(layer, Memory)
    rows = data.steps()
    features = layer.output(layer.step(rows.obs, layer.initial(T * N, rows.obs.device)))
    ours = torch.autograd.grad(learner.loss(data)[0].sum(), list(learner.model.parameters()))
    plain = torch.autograd.grad(
        learner.objective(features, rows)[0].sum(), list(learner.model.parameters())
    )
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_minibatches_are_whole_sequences() -> None:
    learner = make_learner(update_epochs=2)
    seen: list[tuple[int, ...]] = []
    step = learner.minibatch_step

    def noted(batch: Any, active: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        assert isinstance(batch, Sequences)
        seen.append(tuple(batch.value.shape))
        return step(batch, active)

    learner.minibatch_step = noted  # type: ignore[method-assign]
    before = parameters_of(learner.model)
    output = learner.step(make_rollout(learner))
    # 36 steps are 9 sequences; 12 steps are 3 of them.
    assert seen == [(1, 3, 4)] * 6
    assert output.num_gradient_steps == 6
    assert not same(before, parameters_of(learner.model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 5}, r"sequence_length must divide num_steps \(12\), got 5"),
        (
            {"sequence_length": None, "minibatch_size": 8},
            r"minibatch_size must be >= the steps of a sequence \(12\), got 8",
        ),
        ({"memory": "rnn"}, "memory"),
        ({"memory_size": 0}, "memory_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    learner = make_learner()
    settings = {"num_steps": T, "sequence_length": 4, "minibatch_size": 12}
    with pytest.raises(ConfigError, match=message):
        RecurrentPPO(model=learner.model, **settings | changes)
