"""DQN's update: double and plain targets, the dueling identity, the target's clock, epsilon."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.updates import parameters_of, same
from rl_training.algorithms.dqn import DQN, SPEC, dqn_loss
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.models.layers import StackedLinear
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.rng import Rng

OBS, ACT, B = 2, 3, 8


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> DQN:
    dueling = keywords.get("dueling", False)
    network = MLPQNetwork(OBS, ACT, (16,), dueling=dueling, rng=Rng(seeds, "networks"))
    return DQN(q_network=network, seeds=seeds, **keywords)


def make_batch(seeds: tuple[int, ...] = (0,), **changes: Tensor) -> TransitionBatch:
    rng = Rng(seeds, "batch")
    values = {
        "obs": rng.normal(B, OBS),
        "action": rng.integers(ACT, B),
        "reward": rng.normal(B),
        "next_obs": rng.normal(B, OBS),
        "discount": torch.full((len(seeds), B), 0.9),
    }
    return TransitionBatch(**(values | changes))


def set_q(network: nn.Module, values: list[float]) -> None:
    """Let a plain Q-network answer the same values in every state."""
    head = head_of(network)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor(values).expand_as(head.bias))


def head_of(network: nn.Module) -> StackedLinear:
    assert isinstance(network, MLPQNetwork)
    head = network.layers.layers[-1]
    assert isinstance(head, StackedLinear)
    return head


@pytest.mark.parametrize(("double", "next_value"), [(True, 3.0), (False, 10.0)])
def test_double_rates_the_online_choice_and_plain_takes_the_largest(
    double: bool, next_value: float
) -> None:
    learner = make_learner(double=double)
    set_q(learner.q_network, [1.0, 2.0, 0.0])
    set_q(learner.target_network, [10.0, 3.0, 5.0])
    batch = make_batch()
    assert learner.next_value(batch.next_obs).tolist() == [[next_value] * B]
    metrics = dqn_loss(learner, batch)
    expected = batch.reward.mean() + 0.9 * next_value
    assert metrics["target_mean"].mean().item() == pytest.approx(expected.item(), rel=1e-5)


def test_loss_and_priorities_by_hand() -> None:
    learner = make_learner()
    set_q(learner.q_network, [1.0, 2.0, 0.0])
    set_q(learner.target_network, [10.0, 3.0, 5.0])
    action = torch.tensor([[0, 1, 2, 0]])
    discount = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    reward = torch.tensor([[0.0, 0.0, 0.25, 4.0]])
    obs = torch.zeros(1, 4, OBS)
    weight = torch.tensor([[1.0, 1.0, 0.5, 0.5]])
    batch = TransitionBatch(
        obs=obs, action=action, reward=reward, next_obs=obs, discount=discount, weight=weight
    )
    loss, metrics, priority = learner.td_loss(batch)
    # Targets 1.5, 1.5, 0.25, 4; errors -0.5, 0.5, -0.25, -3; Huber 0.125, 0.125, 0.03125, 2.5.
    assert priority.tolist() == [[0.5, 0.5, 0.25, 3.0]]
    assert loss.item() == pytest.approx((0.125 + 0.125 + 0.5 * 0.03125 + 0.5 * 2.5) / 4)
    assert metrics["q_value_mean"].mean().item() == pytest.approx(1.0)
    assert metrics["td_error_mean"].mean().item() == pytest.approx(4.25 / 4)


def test_terminated_rows_do_not_bootstrap_and_truncated_ones_do() -> None:
    learner = make_learner(gamma=0.9, double=False)
    set_q(learner.target_network, [10.0, 10.0, 10.0])
    set_q(learner.q_network, [0.0, 0.0, 0.0])
    batch = make_batch()
    mapping = {
        "obs": batch.obs[0],
        "actions": batch.action[0],
        "rewards": torch.ones(B),
        "next_obs": batch.next_obs[0],
        "dones": torch.tensor([1.0] * 4 + [0.0] * 4),
    }
    priority = learner.td_loss(learner.as_batch(mapping))[2]
    torch.testing.assert_close(priority, torch.tensor([[1.0] * 4 + [10.0] * 4]))


def test_no_gradient_flows_through_the_target() -> None:
    learner = make_learner(tau=0.0)
    before = parameters_of(learner.target_network)
    learner.update(make_batch())
    assert same(parameters_of(learner.target_network), before)
    assert not same(parameters_of(learner.q_network), before)
    # Under the online network alone, a loss of zero discount must have the same gradient.
    batch = make_batch(discount=torch.zeros(1, B))
    loss = learner.td_loss(batch)[0]
    q = learner.q_values(batch.obs).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    plain = nn.functional.huber_loss(q, batch.reward)
    parameters = list(learner.q_network.parameters())
    ours, theirs = (torch.autograd.grad(x.sum(), parameters) for x in (loss, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_dueling_mean_over_actions_is_the_value_stream() -> None:
    network = MLPQNetwork(OBS, ACT, (16,), dueling=True, rng=Rng((0, 1), "w"))
    obs = Rng((0, 1), "obs").normal(B, OBS)
    value = network.layers(obs)[..., -1]
    torch.testing.assert_close(network(obs).mean(-1), value)


def test_a_constant_on_the_advantage_stream_changes_nothing() -> None:
    network = MLPQNetwork(OBS, ACT, (16,), dueling=True, rng=Rng((0,), "w"))
    obs = Rng((0,), "obs").normal(B, OBS)
    before = network(obs)
    with torch.no_grad():
        head_of(network).bias[..., :-1] += 5.0
    torch.testing.assert_close(network(obs), before, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        head_of(network).bias[..., -1:] += 5.0
    torch.testing.assert_close(network(obs), before + 5.0, atol=1e-5, rtol=1e-5)


def test_target_network_moves_exactly_every_interval() -> None:
    learner = make_learner(target_update_interval=3)
    target, moved = parameters_of(learner.target_network), []
    for update in range(1, 10):
        learner.update(make_batch())
        now = parameters_of(learner.target_network)
        if not same(now, target):
            moved.append(update)
            assert same(now, parameters_of(learner.q_network)), "tau 1 copies"
        target = now
    assert moved == [3, 6, 9]


def test_target_network_moves_by_tau_when_due() -> None:
    learner = make_learner(target_update_interval=1, tau=0.25)
    old = parameters_of(learner.target_network)
    learner.update(make_batch())
    source = parameters_of(learner.q_network)
    for before, after, online in zip(
        old, parameters_of(learner.target_network), source, strict=True
    ):
        torch.testing.assert_close(after, 0.75 * before + 0.25 * online)


@pytest.mark.parametrize(
    ("progress", "epsilon"), [(0.0, 0.8), (0.1, 0.5), (0.15, 0.35), (0.2, 0.2), (1.0, 0.2)]
)
def test_epsilon_falls_in_a_straight_line_and_stays(progress: float, epsilon: float) -> None:
    learner = make_learner(epsilon_start=0.8, epsilon_end=0.2, exploration_fraction=0.2)
    learner.set_progress(progress)
    assert learner.epsilon() == pytest.approx(epsilon)
    assert learner.schedule_values()["epsilon"] == pytest.approx(epsilon)


def test_epsilon_without_a_ramp_is_at_its_end() -> None:
    assert make_learner(exploration_fraction=0.0, epsilon_end=0.05).epsilon() == pytest.approx(0.05)


def counts_of(learner: DQN, draws: int = 9000) -> Tensor:
    action = learner.act(torch.zeros(1, draws, OBS), explore=True)
    return torch.bincount(action[0], minlength=ACT)


def test_epsilon_one_acts_uniformly() -> None:
    learner = make_learner(epsilon_start=1.0)
    set_q(learner.q_network, [0.0, 9.0, 0.0])
    chi_square = ((counts_of(learner) - 3000.0).square() / 3000).sum().item()
    assert chi_square < 13.82, "the 99.9 % point with 2 degrees of freedom"


def test_epsilon_zero_acts_greedily() -> None:
    learner = make_learner(epsilon_start=0.0, epsilon_end=0.0)
    set_q(learner.q_network, [0.0, 9.0, 0.0])
    assert counts_of(learner).tolist() == [0, 9000, 0]


def test_epsilon_between_mixes_in_its_share() -> None:
    learner = make_learner(epsilon_start=0.3)
    set_q(learner.q_network, [0.0, 9.0, 0.0])
    # A random action is the best one a third of the time: 1 - 0.3 * 2 / 3.
    assert counts_of(learner)[1].item() / 9000 == pytest.approx(0.8, abs=0.02)


def test_without_exploring_the_best_action_is_taken_per_state() -> None:
    learner, obs = make_learner(), make_batch().obs
    assert torch.equal(learner.act(obs), learner.q_values(obs).argmax(-1))


@pytest.mark.parametrize("dueling", [False, True])
def test_stacked_seeds_equal_single_ones(dueling: bool) -> None:
    seeds = (3, 1, 2)
    group = make_learner(seeds, dueling=dueling, target_update_interval=2)
    singles = [make_learner((s,), dueling=dueling, target_update_interval=2) for s in seeds]
    for _ in range(5):
        group.update(make_batch(seeds))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch((seed,)))
    for index, single in enumerate(singles):
        for ours, theirs in zip(
            parameters_of(group.q_network), parameters_of(single.q_network), strict=True
        ):
            torch.testing.assert_close(ours[index], theirs[0], rtol=1e-4, atol=1e-6)


def test_state_round_trip_gives_a_bit_equal_next_update() -> None:
    first = make_learner((0,), target_update_interval=3)
    other = make_learner((5,), target_update_interval=3)
    for _ in range(2):
        first.update(make_batch())
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, other):
        learner.update(make_batch())  # the third update moves the target in both
    assert same(parameters_of(first.q_network), parameters_of(other.q_network))
    assert same(parameters_of(first.target_network), parameters_of(other.target_network))
    assert same(parameters_of(first.target_network), parameters_of(first.q_network))


def test_metrics_are_those_declared() -> None:
    result = make_learner().update(make_batch())
    assert set(result.metrics) == set(SPEC.metrics)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.priority is not None
    assert result.priority.shape == (1, B)


def test_no_hidden_layer_gives_a_linear_network_or_a_config_error() -> None:
    env = EnvSpec(
        env_id="x",
        obs_shape=(OBS,),
        obs_dtype="float32",
        action_kind="discrete",
        action_shape=(),
        num_actions=ACT,
        action_dtype="int64",
    )
    try:
        learner = SPEC.build(env, SPEC.config_class.model_validate({"hidden_sizes": []}), (0,))
    except ConfigError:
        return
    assert learner.act(torch.zeros(1, B, OBS)).shape == (1, B)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"epsilon_start": 1.2}, r"epsilon_start must be <= 1, got 1\.2"),
        ({"target_update_interval": 0}, r"target_update_interval must be >= 1, got 0"),
        ({"n_step": 0}, r"n_step must be >= 1, got 0"),
        ({"duelling": True}, r"duelling is not a field of DQNConfig \(did you mean dueling\?\)"),
    ],
)
def test_a_wrong_keyword_names_field_rule_and_value(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)


def test_the_network_is_named_when_it_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"DQN\(q_network=\.\.\.\) must be a torch module"):
        DQN(model=MLPQNetwork(OBS, ACT, (16,)))
