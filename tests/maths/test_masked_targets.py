"""Masks in what is learned: targets against hand and loop, and a task in which the best is a trap.

Three actions; the networks say that the second is best by far, and masks forbid it in places.
Shapes: S seeds, B batch, A actions, N quantiles.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from helpers.envs import MaskedEnv
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.bc import BC
from rl_training.algorithms.c51 import C51
from rl_training.algorithms.discrete_iql import DiscreteIQL
from rl_training.algorithms.discrete_sac import DiscreteSAC
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.pqn import PQN
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.envs.observing import with_rows
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.quantile_networks import ImplicitQuantileNetwork
from rl_training.testing.contract import small_settings

A, TRAP = 3, 1
MASKS = torch.tensor([[1.0, 1, 1], [1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 0]])  # [B, A]
ONLINE = torch.tensor([1.0, 9.0, 3.0])
"""Q of every action by the network that moves; without masks it takes the trap everywhere."""
TARGET = torch.tensor([5.0, 100.0, 4.0])
"""Q by the target network, which would choose otherwise between the first and the last."""
REWARD, DISCOUNT = 0.5, 0.5


def task() -> EnvSpec:
    return EnvSpec.from_env(with_rows(MaskedEnv(), "mine"), "mine")


def build(algo: str, **settings: Any) -> AnyLearner:
    spec = get_algorithm_spec(algo)
    return spec.build(task(), spec.config_class(**small_settings(spec, **settings)), (0,))


def rows(masks: Tensor) -> Tensor:
    """Observations `[1, B, 2 + A]`."""
    return torch.cat((torch.randn(len(masks), 2), masks), -1)[None]


def transitions(action: int = 0, masks: Tensor | None = None) -> TransitionBatch:
    """One for each mask after it; `masks` are those before it, which allow all by default."""
    count = len(MASKS)
    return TransitionBatch(
        obs=rows(torch.ones_like(MASKS) if masks is None else masks),
        action=torch.full((1, count), action),
        reward=torch.full((1, count), REWARD),
        next_obs=rows(MASKS),
        discount=torch.full((1, count), DISCOUNT),
    )


def best_of(values: Tensor, mask: Tensor) -> int:
    """The allowed action of the largest value, by a loop."""
    best = -1
    for action in range(A):
        if mask[action] and (best < 0 or values[action] > values[best]):
            best = action
    return best


def expected(double: bool, values: Tensor = TARGET) -> list[float]:
    """Targets of each row of the batch."""
    chooser = ONLINE if double else values
    return [REWARD + DISCOUNT * float(values[best_of(chooser, mask)]) for mask in MASKS]


def test_the_oracle_by_hand() -> None:
    # Allowed: all, first and last, last, first, the trap. Online prefers the last to the first.
    assert expected(double=True) == [50.5, 2.5, 2.5, 3.0, 50.5]
    assert expected(double=False) == [50.5, 3.0, 2.5, 3.0, 50.5]
    unmasked = REWARD + DISCOUNT * float(TARGET[TRAP])
    assert unmasked == 50.5, "what every row would have without masks"


class Table(nn.Module):
    """The same outputs for every observation, `[S, B, *values]`."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, obs: Tensor) -> Tensor:
        return self.values.expand(*obs.shape[:2], *self.values.shape)


class QuantileTable(ImplicitQuantileNetwork):
    """Quantiles that are the same at every fraction."""

    def __init__(self, values: Tensor, width: int) -> None:
        nn.Module.__init__(self)
        self.values, self.width = values, width

    def embed(self, obs: Tensor) -> Tensor:
        return torch.zeros(*obs.shape[:2], self.width)

    def quantiles(self, embedding: Tensor, tau: Tensor) -> Tensor:
        shape = (*embedding.shape[:2], A, tau.shape[-1])
        return self.values.unsqueeze(-1).expand(shape).clone().requires_grad_()

    def mean(self, embedding: Tensor, tau: Tensor, widths: Tensor | None = None) -> Tensor:
        return self.values.expand(*embedding.shape[:2], A)

    def forward(self, obs: Tensor, tau: Tensor) -> Tensor:
        return self.quantiles(self.embed(obs), tau)


def targets(learner: Any, batch: TransitionBatch) -> list[float]:
    """The regression target of each row, by the loss itself."""
    learner._noisy = {id(network): [] for network in networks_of(learner)}
    found: Tensor = learner.td_loss(batch)[1]["target_mean"]
    result: list[float] = found[0].tolist()
    return result


def networks_of(learner: Any) -> list[nn.Module]:
    return [learner.q_network, learner.value_network, learner.target_network]


def with_tables(learner: Any, online: nn.Module, target: nn.Module) -> Any:
    learner.q_network, learner.target_network = online, target
    return learner


doubles = pytest.mark.parametrize("double", [True, False])


@doubles
@pytest.mark.parametrize("algo", ["dqn", "discrete_cql", "recurrent_dqn"])
def test_targets_of_q_are_those_of_allowed_actions(algo: str, double: bool) -> None:
    learner: Any = build(algo, double=double)
    target = learner.target_network

    def q_values(obs: Tensor, network: nn.Module | None = None) -> Tensor:
        return (TARGET if network is target else ONLINE).expand(*obs.shape[:2], A)

    learner.q_values = q_values
    assert targets(learner, transitions()) == pytest.approx(expected(double))
    learner.masks_actions = False
    assert set(targets(learner, transitions())) == {50.5}


@doubles
def test_targets_of_quantiles_are_those_of_allowed_actions(double: bool) -> None:
    learner = build("qr_dqn", double=double, num_quantiles=4)
    assert isinstance(learner, QRDQN)
    spread = torch.tensor([-1.0, -0.5, 0.5, 1.0])  # of mean 0
    tables = [Table(values.unsqueeze(-1) + spread) for values in (ONLINE, TARGET)]
    with_tables(learner, *tables)
    assert targets(learner, transitions()) == pytest.approx(expected(double))
    learner.masks_actions = False
    assert set(targets(learner, transitions())) == {50.5}


@doubles
def test_targets_of_atoms_are_those_of_allowed_actions(double: bool) -> None:
    learner = build("c51", double=double, num_atoms=101, v_min=0.0, v_max=100.0)
    assert isinstance(learner, C51)

    def logits(values: Tensor) -> Tensor:
        certain = torch.full((A, 101), -1e4)
        return certain.scatter(1, values.long().unsqueeze(1), 1e4)

    with_tables(learner, Table(logits(ONLINE)), Table(logits(TARGET)))
    assert targets(learner, transitions()) == pytest.approx(expected(double))
    learner.masks_actions = False
    assert set(targets(learner, transitions())) == {50.5}


@doubles
@pytest.mark.parametrize("algo", ["iqn", "fqf"])
def test_targets_of_drawn_and_learned_fractions_are_those_of_allowed_actions(
    algo: str, double: bool
) -> None:
    learner: Any = build(algo, double=double)
    width = learner.value_network.encoder.embedding_dim
    online, target = (QuantileTable(values, width) for values in (ONLINE, TARGET))
    if algo == "fqf":
        learner.q_network.quantile_network, learner.target_network = online, target
    else:
        with_tables(learner, online, target)
    assert targets(learner, transitions()) == pytest.approx(expected(double))
    learner.masks_actions = False
    assert set(targets(learner, transitions())) == {50.5}


def test_lambda_returns_of_rollouts_are_those_of_allowed_actions() -> None:
    learner = build("pqn", q_lambda=0.0, gamma=DISCOUNT)
    assert isinstance(learner, PQN)
    learner.q_network = Table(TARGET)  # type: ignore[assignment]
    steps = transitions()
    no = torch.zeros(1, 1, len(MASKS), dtype=torch.bool)
    rollout = RolloutBatch(
        obs=steps.obs.unsqueeze(1),
        action=steps.action.unsqueeze(1),
        reward=steps.reward.unsqueeze(1),
        next_obs=steps.next_obs.unsqueeze(1),
        terminated=no,
        truncated=no,
    )
    assert learner.prepare(rollout).target[0].tolist() == pytest.approx(expected(double=False))


def test_the_penalty_of_discrete_cql_sums_over_allowed_actions() -> None:
    learner: Any = build("discrete_cql", cql_alpha=1.0)
    learner.q_values = lambda obs, network=None: ONLINE.expand(*obs.shape[:2], A)
    masks = torch.tensor([[1.0, 1, 1], [1, 0, 1], [0, 0, 1], [0, 1, 1], [1, 0, 1]])
    batch = transitions(2, masks)
    gap = learner.td_loss(batch)[1]["cql_penalty"][0].tolist()
    # log sum exp of the allowed among 1, 9, 3, minus 3.
    whole, both = math.log(math.e + math.exp(9) + math.exp(3)), math.log(math.e + math.exp(3))
    trap = math.log(math.exp(9) + math.exp(3))
    assert gap == pytest.approx([whole - 3, both - 3, 0.0, trap - 3, both - 3], abs=1e-5)


class FixedPolicy(nn.Module):
    """Logits that do not depend on the observation."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, obs: Tensor) -> Tensor:
        return self.logits.expand(*obs.shape[:2], A)


def policy_of(logits: Tensor, mask: Tensor) -> list[float]:
    """Probabilities under a mask, one by one."""
    weights = [math.exp(float(x)) if m else 0.0 for x, m in zip(logits, mask, strict=True)]
    return [weight / sum(weights) for weight in weights]


def test_the_expectation_of_discrete_sac_is_over_allowed_actions() -> None:
    learner = build("discrete_sac", initial_alpha=0.25)
    assert isinstance(learner, DiscreteSAC)
    logits = torch.tensor([0.0, 5.0, 1.0])
    learner.model.actor = FixedPolicy(logits)
    values = torch.stack((TARGET, TARGET + 7))  # two critics, the least of which counts
    learner.model.all_q_values = lambda obs, critic=None, members=None: values.view(  # type: ignore[method-assign]
        1, 2, 1, A
    ).expand(1, 2, obs.shape[1], A)
    alpha = float(learner.log_alpha.detach().exp())
    found = learner.td_target(transitions())[0][0].tolist()
    for mask, target in zip(MASKS, found, strict=True):
        prob = policy_of(logits, mask)
        soft = sum(
            p * (float(q) - alpha * math.log(p)) for p, q in zip(prob, TARGET, strict=True) if p
        )
        assert target == pytest.approx(REWARD + DISCOUNT * soft, rel=1e-5)
    learner.masks_actions = False
    blind = learner.td_target(transitions())[0][0]
    assert blind[1:4].min() > max(found[1:4]) + 30, "the trap counts where nobody can take it"


@pytest.mark.parametrize("knows_masks", [True, False])
def test_the_entropy_that_discrete_sac_aims_at_is_that_of_allowed_actions(
    knows_masks: bool,
) -> None:
    """A uniform policy has more than 0.9 of what masks leave, and less than 0.9 of log A."""
    learner = build("discrete_sac", target_entropy_share=0.9)
    assert isinstance(learner, DiscreteSAC)
    learner.model.actor = FixedPolicy(torch.zeros(A))
    batch = transitions(masks=MASKS)
    entropy = learner.soft_value(batch.obs, torch.zeros(1, len(MASKS), A))[1]
    logs = [math.log(int(mask.sum())) for mask in MASKS]
    assert entropy[0].tolist() == pytest.approx(logs, abs=1e-6)
    measured = {"entropy": entropy.mean(1)}
    if knows_masks:
        measured["largest_entropy"] = torch.tensor([np.mean(logs)])
    before = learner.log_alpha.detach().clone()
    learner.update_multipliers(measured)
    assert (learner.log_alpha < before) == knows_masks


@pytest.mark.parametrize("algo", ["ppo", "bc", "discrete_iql"])
def test_likelihood_is_that_of_allowed_actions(algo: str) -> None:
    learner: Any = build(algo)
    logits = torch.tensor([0.5, 4.0, -1.0])
    learner.model.actor = FixedPolicy(logits)
    obs = rows(MASKS)
    action = torch.tensor([[1, 2, 2, 0, 1]])
    allowed = learner.allowed(obs)
    if isinstance(learner, DiscreteIQL):
        batch = replace(transitions(), obs=obs, action=action)
        log_prob, entropy = learner.log_prob(batch), None
    else:
        assert isinstance(learner, BC | PPO)
        features = learner.model.embed(obs)
        log_prob, entropy = learner.model.log_prob_entropy(features, action, allowed)
    for row, mask in enumerate(MASKS):
        prob = policy_of(logits, mask)
        assert float(log_prob[0, row]) == pytest.approx(
            math.log(prob[int(action[0, row])]), abs=1e-5
        )
        if entropy is not None:
            by_hand = -sum(p * math.log(p) for p in prob if p)
            assert float(entropy[0, row]) == pytest.approx(by_hand, abs=1e-5)


def test_a_forbidden_action_gets_no_gradient() -> None:
    learner: Any = build("ppo")
    logits = torch.zeros(A, requires_grad=True)
    learner.model.actor = FixedPolicy(logits)
    obs = rows(torch.tensor([[1.0, 0, 1]]))
    log_prob, entropy = learner.model.log_prob_entropy(
        learner.model.embed(obs), torch.tensor([[2]]), learner.allowed(obs)
    )
    gradient = torch.autograd.grad((log_prob + entropy).sum(), logits)[0]
    assert gradient[TRAP] == 0
    assert gradient[2] == pytest.approx(0.5)


# A task with a trap, learned


NUM_STATES, GAMMA, TRAP_Q = 5, 0.9, 10.0
ALLOWED: NDArray[np.bool_] = np.array(
    [[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 1], [1, 0, 1]], np.bool_
)
"""The second action, where it is allowed, costs; elsewhere a network may believe anything of it."""


def outcome(state: int, action: int) -> tuple[float, int, bool]:
    """Reward, next state, and whether the episode ends."""
    if action == TRAP:
        return -1.0, 0, False
    if state == NUM_STATES - 1:
        return (1.0, 0, True) if action == 2 else (0.2, 0, True)
    return -0.05, min(state + (2 if action == 2 else 1), NUM_STATES - 1), False


def solved(ceiling: float | None = None) -> NDArray[np.float64]:
    """Q by value iteration; `ceiling` is Q of what is forbidden, None leaves it out."""
    q = np.zeros((NUM_STATES, A))
    for _ in range(500):
        known = np.where(ALLOWED, q, -np.inf if ceiling is None else ceiling)
        value = known.max(1)
        for state in range(NUM_STATES):
            for action in np.flatnonzero(ALLOWED[state]):
                reward, following, over = outcome(state, int(action))
                q[state, action] = reward + (0.0 if over else GAMMA * value[following])
    return q


def tabular_task() -> EnvSpec:
    env = MaskedEnv()
    env.observation_space = spaces.Discrete(NUM_STATES)
    return EnvSpec.from_env(with_rows(env, "mine"), "mine")


def every_transition(task: EnvSpec) -> tuple[TransitionBatch, Tensor]:
    """All that may be done, once each, and the states as rows `[1, S, W]`."""
    parts = task.observation
    assert parts is not None
    states = parts.pack({"observation": np.arange(NUM_STATES), "action_mask": ALLOWED}, 1)
    found = [
        (states[state], int(action), reward, states[following], 0.0 if over else GAMMA)
        for state in range(NUM_STATES)
        for action in np.flatnonzero(ALLOWED[state])
        for reward, following, over in [outcome(state, int(action))]
    ]
    obs, action, reward, next_obs, discount = zip(*found, strict=True)
    batch = TransitionBatch(
        obs=torch.from_numpy(np.stack(obs))[None],
        action=torch.tensor([action]),
        reward=torch.tensor([reward]),
        next_obs=torch.from_numpy(np.stack(next_obs))[None],
        discount=torch.tensor([discount]),
    )
    return batch, torch.from_numpy(states)[None]


def trained(*, masks: bool) -> NDArray[np.float64]:
    """Q of a table that begins with the belief that the trap is worth `TRAP_Q` everywhere."""
    task, spec = tabular_task(), get_algorithm_spec("dqn")
    tabular: dict[str, Any] = {"hidden_sizes": (), "target_update_interval": 1}
    tabular["max_grad_norm"] = None
    rate: dict[str, Any] = {"learning_rate": 0.05, "lr_schedule": {"type": "linear"}}
    settings = spec.config_class(**tabular, **rate, gamma=GAMMA)
    learner: Any = spec.build(task, settings, (0,))
    head = learner.q_network.head
    with torch.no_grad():
        for network in (learner.q_network, learner.target_network):
            network.head.weight.zero_()
            network.head.bias.zero_()
            network.head.weight[0, :, TRAP] = TRAP_Q
    assert head.weight.shape[1:] == (NUM_STATES, A)
    learner.masks_actions = masks
    batch, states = every_transition(task)
    updates = 800
    for update in range(updates):
        learner.set_progress(update / updates)
        learner.update(batch)
    with torch.no_grad():
        q: NDArray[np.float64] = learner.q_values(states)[0].double().numpy()
    return q


def test_dqn_learns_the_masked_solution_and_would_not_without_masks() -> None:
    oracle, trapped = solved(), solved(TRAP_Q)
    # From the first state three steps lead to the last, which pays 1.
    assert oracle[0, 2] == pytest.approx(-0.05 * (1 + GAMMA + GAMMA**2) + GAMMA**3)
    assert trapped[0, 2] == pytest.approx(-0.05 + GAMMA * TRAP_Q), "what the trap seems to give"
    seen = trained(masks=True)
    np.testing.assert_allclose(seen[ALLOWED], oracle[ALLOWED], atol=1e-4)
    greedy = np.where(ALLOWED, seen, -np.inf).argmax(1)
    reached = oracle[np.arange(NUM_STATES), greedy]
    np.testing.assert_allclose(reached, np.where(ALLOWED, oracle, -np.inf).max(1))
    blind = trained(masks=False)
    # What has no bias in common with the trap: an unmasked target believes in it.
    assert blind[0, 2] - oracle[0, 2] > 5
