"""Recurrent DQN's update: sequences step by step, burn-in, n-step sums, stored memories."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.losses import huber
from rl_training.algorithms.recurrent_dqn import RecurrentDQN, recurrent_dqn_networks
from rl_training.algorithms.unrolled import summed
from rl_training.data.batch import SequenceBatch
from rl_training.data.replay.sequences import RecurrentReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.rng import Rng

OBS, ACTIONS, B, T, SIZE, GAMMA = 3, 4, 5, 9, 6, 0.9
TASK = EnvSpec(
    env_id="test",
    obs_shape=(OBS,),
    obs_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    action_dtype="int64",
    num_actions=ACTIONS,
)


def make_learner(seeds: tuple[int, ...] = (0,), **changes: Any) -> RecurrentDQN:
    settings: dict[str, Any] = {
        "hidden_sizes": (8,),
        "memory_size": SIZE,
        "batch_length": T,
        "burn_in": 2,
        "gamma": GAMMA,
    }
    config = RecurrentDQN.settings_class()(**settings | changes)
    networks = recurrent_dqn_networks(TASK, config, Rng(seeds, "networks"))  # type: ignore[arg-type]
    learner = RecurrentDQN(config=config, seeds=seeds, q_network=networks["q_network"])
    with torch.no_grad():  # a target that is not the network
        generator = torch.Generator().manual_seed(0)
        for parameter in learner.target_network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return learner


def make_sequences(learner: RecurrentDQN, **changes: Tensor) -> SequenceBatch:
    rng = Rng(learner.seeds, "sequences")
    is_first = rng.uniform(B, T) < 0.2
    is_first[:, 0] = True
    values = {
        "obs": rng.normal(B, T, OBS),
        "action": rng.integers(ACTIONS, B, T),
        "reward": rng.normal(B, T),
        "is_first": is_first,
        "terminated": rng.uniform(B, T) < 0.2,
        "start": rng.normal(B, learner.belief_size).tanh(),
    }
    return SequenceBatch(**(values | changes))


def q_along(learner: RecurrentDQN, network: Any, batch: SequenceBatch, row: int) -> list[Tensor]:
    """Q of every action at each step of one sequence, one step at a time."""
    assert batch.start is not None
    memory, found = batch.start[:, row, None], []
    for step in range(T):
        if bool(batch.is_first[0, row, step]):
            memory = torch.zeros_like(memory)
        memory = network.remember(batch.obs[:, row, step, None], memory)
        found.append(network(network.memory.output(memory))[0, 0])
    return found


@torch.no_grad()
def slow_loss(learner: RecurrentDQN, batch: SequenceBatch, n_step: int, burn_in: int) -> float:
    """DQN's loss by going through every sequence by hand."""
    losses = []
    for row in range(B):
        online = q_along(learner, learner.q_network, batch, row)
        slower = q_along(learner, learner.target_network, batch, row)
        for step in range(burn_in, T - 1):
            if bool(batch.is_first[0, row, step + 1]):
                continue
            total, weight, now = 0.0, 1.0, step
            for _ in range(n_step):
                if now + 1 >= T or bool(batch.is_first[0, row, now + 1]):
                    break
                now += 1
                total += weight * batch.reward[0, row, now].item()
                weight *= 0.0 if bool(batch.terminated[0, row, now]) else GAMMA
            best = int(online[now].argmax())
            target = torch.tensor(total + weight * slower[now][best].item())
            action = int(batch.action[0, row, step + 1])
            losses.append(huber(online[step][action], target).item())
    return float(np.mean(losses))


@pytest.mark.parametrize("memory", ["gru", "lstm"])
@pytest.mark.parametrize(("n_step", "burn_in"), [(1, 0), (1, 3), (3, 2)])
def test_the_loss_is_dqns_along_each_sequence(memory: str, n_step: int, burn_in: int) -> None:
    learner = make_learner(memory=memory, n_step=n_step, burn_in=burn_in)
    batch = make_sequences(learner)
    wanted = slow_loss(learner, batch, n_step, burn_in)
    assert learner.learn(batch).metrics["loss"].item() == pytest.approx(wanted, rel=1e-4)


def test_a_stored_memory_is_forgotten_where_a_sequence_begins_an_episode() -> None:
    learner = make_learner()
    batch = make_sequences(learner)
    assert batch.start is not None
    unknown = replace(batch, start=None)
    one, other = make_learner().learn(batch), make_learner().learn(unknown)
    assert torch.equal(one.metrics["loss"], other.metrics["loss"])
    first = batch.is_first.clone()
    first[:, :, 0] = False
    known = make_learner().learn(replace(batch, is_first=first))
    assert not torch.equal(known.metrics["loss"], one.metrics["loss"])


@pytest.mark.parametrize("n_step", [1, 2, 4, 50])
def test_sums_stop_at_ends_of_episodes_and_sequences(n_step: int) -> None:
    rng = np.random.default_rng(n_step)
    reward = rng.normal(size=(2, 3, T)).astype(np.float32)
    terminated, is_step = rng.random((2, 3, T)) < 0.2, rng.random((2, 3, T)) < 0.7
    discount = (GAMMA * ~terminated).astype(np.float32)
    found = summed(
        torch.from_numpy(reward), torch.from_numpy(discount), torch.from_numpy(is_step), n_step
    )
    total, product, ahead = (x.numpy() for x in found)
    for place in np.ndindex(2, 3, T):
        *lead, start = place
        wanted, weight, steps = 0.0, 1.0, 0
        while steps < n_step and start + steps < T and is_step[(*lead, start + steps)]:
            wanted += weight * reward[(*lead, start + steps)]
            weight *= discount[(*lead, start + steps)]
            steps += 1
        assert total[place] == pytest.approx(wanted, abs=1e-5)
        assert product[place] == pytest.approx(weight, abs=1e-6)
        assert ahead[place] == steps


def test_a_sequence_begins_with_what_was_remembered_after_the_row_before() -> None:
    learner = make_learner()
    buffer = RecurrentReplayBuffer(
        60, (OBS,), action_dtype=torch.int64, sequence_length=T, belief_size=learner.belief_size
    )
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(40, OBS)).astype(np.float32)
    no = np.zeros((1, 1), np.bool_)
    for now, after in itertools.pairwise(obs):
        action, reward = rng.integers(ACTIONS, size=(1, 1)), rng.normal(size=(1, 1))
        buffer.add(now[None, None], action, reward.astype(np.float32), after[None, None], no, no)
    batch = buffer.gather(torch.tensor([[0]]))
    assert batch.start is not None
    assert bool(batch.is_first[0, 0, 0])  # the start of the episode
    output = learner.learn(batch)
    assert output.beliefs is not None
    assert batch.index is not None
    buffer.keep_beliefs(batch.index, output.beliefs)
    later = buffer.gather(torch.tensor([[3]]))
    assert later.start is not None
    place = batch.index[0, 0].tolist().index(2)
    torch.testing.assert_close(later.start[0, 0], output.beliefs[0, 0, place], rtol=0, atol=1e-3)
    assert not bool(later.is_first[0, 0, 0])


def test_seeds_learn_as_they_would_alone() -> None:
    group, alone = make_learner((1, 2)), make_learner((2,))
    for mine, theirs in zip(
        (*alone.q_network.parameters(), *alone.target_network.parameters()),
        (*group.q_network.parameters(), *group.target_network.parameters()),
        strict=True,
    ):
        mine.data.copy_(theirs.data[1:2])
    batch = make_sequences(group)
    parts: dict[str, Any] = {k: None if v is None else v[1:2] for k, v in vars(batch).items()}
    part = SequenceBatch(**parts)
    both, single = group.learn(batch), alone.learn(part)
    torch.testing.assert_close(both.metrics["loss"][1:], single.metrics["loss"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"burn_in": 8}, r"batch_length must be >= burn_in \+ 2 \(10\), got 9"),
        ({"memory": "rnn"}, "memory"),
        ({"prioritized": True}, "prioritized is not a field"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecurrentDQN(q_network=make_learner().q_network, batch_length=T, **changes)
