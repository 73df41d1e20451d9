"""FastTD3's update: the target's distribution, clipped double Q on it, and noise of many sizes.

What it shares with TD3 is tested in `test_td3_update.py`.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.settings import settings_of
from helpers.updates import ACT, OBS, B, last_layer, make_batch, make_constant, parameters_of, same
from rl_training.algorithms.base import ActingState
from rl_training.algorithms.categorical import least_expecting
from rl_training.algorithms.fast_td3 import ExplorationNoise, FastTD3
from rl_training.algorithms.td3 import TD3
from rl_training.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.models.categorical_critics import MLPFastTD3Model
from rl_training.rng import Rng
from rl_training.runtime.train import train

K, LOW, HIGH = 7, -2.0, 4.0
ATOMS = np.linspace(LOW, HIGH, K)
Array = NDArray[np.float64]


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> FastTD3:
    settings = {"num_atoms": K, "v_min": LOW, "v_max": HIGH, "num_critics": 2} | keywords
    atoms = {name: settings[name] for name in ("num_atoms", "v_min", "v_max", "num_critics")}
    model = MLPFastTD3Model(OBS, ACT, (16,), rng=Rng(seeds, "networks"), **atoms)
    return FastTD3(model=model, seeds=seeds, **settings)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def opinionated(learner: FastTD3) -> FastTD3:
    """Let target critics tell distributions that differ much between rows and critics."""
    with torch.no_grad():
        last_layer(learner.target_critic).weight.mul_(40)
    return learner


def projected(moved: Array, probability: Array) -> Array:
    """One distribution on the atoms, atom by atom, as the authors' code shares it out."""
    out = np.zeros(K)
    for place, p in zip(np.clip(moved, LOW, HIGH), probability, strict=True):
        b = (place - LOW) / (ATOMS[1] - ATOMS[0])
        low, high = int(np.floor(b)), int(np.ceil(b))
        if low == high:
            low, high = (low - 1, high) if low > 0 else (low, high + 1)
        out[low] += p * (high - b)
        out[high] += p * (b - low)
    return out


# The target and the critics' loss


@pytest.mark.parametrize("use_cdq", [True, False])
@torch.no_grad()
def test_the_target_is_that_of_numpy(use_cdq: bool) -> None:
    seeds = (0, 4)
    learner = opinionated(make_learner(seeds, use_cdq=use_cdq))
    ends = torch.tensor([0.9, 0.0] * (B // 2)).expand(2, B)  # every other row ends an episode
    batch = make_batch(seeds, discount=ends)
    twin = copy.deepcopy(learner)
    target, metrics = learner.td_target(batch)
    assert target.shape == (2, 1 if use_cdq else 2, B, K)
    action = twin.smoothed_action(batch.next_obs)
    logits = array(twin.target_critic(torch.cat((batch.next_obs, action), -1)))  # [S, N, B, K]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = set()
    for seed in range(2):
        for row in range(B):
            moved = float(batch.reward[seed, row]) + float(batch.discount[seed, row]) * ATOMS
            each = [projected(moved, probability[seed, critic, row]) for critic in range(2)]
            if use_cdq:
                means = [float(p @ ATOMS) for p in each]
                chosen.add(int(np.argmin(means)))
                each = [each[int(np.argmin(means))]]
            np.testing.assert_allclose(array(target)[seed, :, row], each, rtol=1e-4, atol=1e-6)
            mean = np.mean([p @ ATOMS for p in each])
            assert float(metrics["target_q_mean"][seed, row]) == pytest.approx(mean, abs=1e-5)
    assert chosen == ({0, 1} if use_cdq else set()), "each critic leads somewhere"


def test_the_least_is_told_by_what_is_left_after_clipping() -> None:
    """A hope beyond the last atom does not count: both critics below tell (HIGH + LOW) / 2 or less.

    Unclipped the first has the larger mean, clipped the lesser.
    """
    model = make_learner().model
    moved = torch.tensor([[[-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 100.0]]])
    probability = torch.zeros(1, 2, 1, K)
    probability[0, 0, 0, [0, 6]] = 0.5  # unclipped 49, clipped 1
    probability[0, 1, 0, 4] = 1.0  # 2
    assert torch.equal(least_expecting(probability, moved, model), probability[:, :1])


@torch.no_grad()
def test_certain_returns_on_the_atoms_move_whole_atoms() -> None:
    """With all probability on one atom, a whole reward and no discount: a shifted distribution."""
    learner = make_learner()
    certain = [-1e4] * (2 * K)
    certain[2] = certain[K + 3] = 0.0  # returns 0 and 1
    make_constant(learner.target_critic, certain)
    batch = make_batch(reward=torch.full((1, B), 2.0), discount=torch.ones(1, B))
    target, metrics = learner.td_target(batch)
    torch.testing.assert_close(target[0, 0], torch.eye(K)[4].expand(B, K))  # 0 + 2, the lesser
    assert float(metrics["beyond_atoms"].max()) == 0.0
    far = make_batch(reward=torch.full((1, B), 50.0))
    target, metrics = learner.td_target(far)
    torch.testing.assert_close(target[0, 0], torch.eye(K)[-1].expand(B, K))
    torch.testing.assert_close(metrics["beyond_atoms"], torch.ones(1, B))


@torch.no_grad()
def test_with_room_on_both_sides_the_targets_mean_is_that_of_td3() -> None:
    """The projection keeps means, so clipped double Q is TD3's; here with the same critics."""
    learner = make_learner(v_min=-100.0, v_max=100.0, num_atoms=201, policy_noise=0.2)
    opinionated(learner)
    batch, rng = make_batch(), copy.deepcopy(learner.rng)
    _, metrics = learner.td_target(batch)
    learner.rng = rng
    action = learner.smoothed_action(batch.next_obs)
    q = learner.model.q_values(batch.next_obs, action, learner.target_critic)  # [S, N, B]
    expected = batch.reward + batch.discount * q.amin(1)
    torch.testing.assert_close(metrics["target_q_mean"], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("use_cdq", [True, False])
def test_the_critics_loss_is_the_cross_entropy_summed_over_critics(use_cdq: bool) -> None:
    learner = make_learner(use_cdq=use_cdq)
    batch = make_batch(weight=torch.linspace(0.1, 2, B).view(1, B))
    assert batch.weight is not None
    target = torch.softmax(Rng((0,), "target").normal(1 if use_cdq else 2, B, K), -1)
    loss, _, error = learner.critic_loss(batch, target)
    log_probs = array(learner.model.value_log_probs(batch.obs, batch.action))[0]  # [N, B, K]
    each = -(array(target)[0] * log_probs).sum(-1)
    assert loss.item() == pytest.approx((each * array(batch.weight)).mean(1).sum(), rel=1e-5)
    gap = np.abs(np.exp(log_probs) @ ATOMS - array(target)[0] @ ATOMS).mean(0)
    np.testing.assert_allclose(array(error)[0], gap, rtol=1e-4, atol=1e-6)


def test_critics_that_are_their_target_have_no_gradient() -> None:
    learner, batch = make_learner(use_cdq=False), make_batch()
    target = learner.model.value_log_probs(batch.obs, batch.action).exp().detach()
    loss, _, error = learner.critic_loss(batch, target)
    gradients = torch.autograd.grad(loss.sum(), list(learner.model.critic.parameters()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-6
    torch.testing.assert_close(error, torch.zeros(1, B), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("use_cdq", "expected"), [(True, 1.0), (False, 2.0)])
def test_the_actor_climbs_the_least_critic_or_the_mean(use_cdq: bool, expected: float) -> None:
    learner = make_learner(use_cdq=use_cdq)
    certain = [-1e4] * (2 * K)
    certain[5] = certain[K + 3] = 0.0  # returns 3 and 1
    make_constant(learner.model.critic, certain)
    assert learner.actor_loss(make_batch())[0].item() == pytest.approx(-expected)


# Policy and targets


def test_critics_targets_move_in_every_update_and_the_policy_in_every_second() -> None:
    learner = make_learner(tau=0.5)
    assert not hasattr(learner, "target_actor")
    for count in range(4):
        actor, target = (parameters_of(m) for m in (learner.model.actor, learner.target_critic))
        learner.update(make_batch(key=f"{count}"))
        moved = parameters_of(learner.model.critic)
        assert same(actor, parameters_of(learner.model.actor)) == (count % 2 == 0)
        for old, new, now in zip(target, moved, learner.target_critic.parameters(), strict=True):
            torch.testing.assert_close(now.detach(), (old + new) / 2)


@torch.no_grad()
def test_targets_are_at_the_policys_own_action() -> None:
    learner, batch = make_learner(policy_noise=0.0), make_batch()
    torch.testing.assert_close(
        learner.smoothed_action(batch.next_obs), learner.model.policy(batch.next_obs)
    )


@torch.no_grad()
def test_the_first_actions_are_near_zero() -> None:
    learner = make_learner((0, 1))
    weight, bias = last_layer(learner.model.actor).affine()
    assert 0.005 < float(weight.std()) < 0.02
    assert not torch.equal(weight[0], weight[1])
    assert not bias.any()


# Exploring


def noise_of(learner: FastTD3, count: int) -> ExplorationNoise:
    state = learner.exploring_state(count)
    assert isinstance(state, ExplorationNoise)
    return state


@torch.no_grad()
def test_deviations_are_drawn_at_starts_of_episodes_and_kept_until_the_next() -> None:
    learner = make_learner((0, 1), exploration_noise_min=0.2, exploration_noise=0.5)
    state, obs = noise_of(learner, 300), torch.zeros(2, 300, OBS)
    learner.act_from(state, obs, explore=True)
    first = state.deviation.clone()
    assert first.min() >= 0.2
    assert first.max() <= 0.5
    assert first.mean().item() == pytest.approx(0.35, abs=0.01)
    assert len(set(first.flatten().tolist())) > 590
    learner.act_from(state, obs, explore=True)
    assert torch.equal(state.deviation, first)
    starts = torch.arange(600).view(2, 300) % 7 == 0
    state.begin_episodes(starts)
    learner.act_from(state, obs, explore=True)
    assert torch.equal(state.deviation != first, starts)


@torch.no_grad()
def test_the_noise_has_the_deviation_of_its_environment() -> None:
    learner = make_learner(exploration_noise_min=0.01, exploration_noise=0.2)
    state, obs = noise_of(learner, 50), torch.zeros(1, 50, OBS)
    center = learner.act(obs)
    steps = [learner.act_from(state, obs, explore=True) - center for _ in range(400)]
    measured = torch.stack(steps).std((0, -1))
    torch.testing.assert_close(measured, state.deviation, rtol=0.15, atol=0)


@torch.no_grad()
def test_one_deviation_is_td3s_noise() -> None:
    fast = make_learner(exploration_noise_min=0.1, exploration_noise=0.1)
    td3 = TD3(model=MLPTD3Model(OBS, ACT, (16,)), exploration_noise=0.1)
    td3.model.actor.load_state_dict(fast.model.actor.state_dict())
    obs, state = make_batch().obs, noise_of(fast, B)
    fast.draw_deviation(B)
    td3.rng.seek(2)  # each draws its noise second
    fast.rng.seek(1)
    torch.testing.assert_close(fast.act_from(state, obs, explore=True), td3.act(obs, explore=True))


@torch.no_grad()
def test_acting_without_exploring_draws_nothing_and_leaves_the_state_alone() -> None:
    learner = make_learner()
    state, obs = noise_of(learner, B), make_batch().obs
    assert learner.initial_acting_state(B) is None
    for action in (learner.act_from(state, obs), learner.act(obs), learner.sample_from(None, obs)):
        torch.testing.assert_close(action, learner.model.policy(obs))
    assert not state.deviation.any()
    assert int(learner.rng.counter) == 0
    learner.act(obs, explore=True)  # without a state every call draws its own
    assert int(learner.rng.counter) == 2


class Clock(gym.Env[Any, Any]):
    """Shows how long its episode has lasted; episodes end at random."""

    observation_space = gym.spaces.Box(0.0, 1e3, (1,), np.float32)
    action_space: Any = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self._time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        ended, cut = (bool(lot < 0.1) for lot in self.np_random.random(2))
        return np.full(1, self._time, np.float32), 0.0, ended, cut, {}


def test_a_run_draws_deviations_exactly_where_episodes_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    act_from = FastTD3.act_from

    def watched(
        self: FastTD3, state: ActingState | None, obs: Tensor, *, explore: bool = False
    ) -> Tensor:
        action = act_from(self, state, obs, explore=explore)
        if isinstance(state, ExplorationNoise):
            seen.append((obs[..., 0] == 0, state.deviation.clone()))
        return action

    monkeypatch.setattr(FastTD3, "act_from", watched)
    small = {"hidden_sizes": [8], "actor_hidden_sizes": None, "critic_hidden_sizes": None}
    config = TrainConfig(
        algo="fast_td3",
        env_id=f"{__name__}:Clock",
        seeds=(0, 1),
        num_envs=5,
        total_timesteps=400,
        eval_episodes=1,
        output_dir=str(tmp_path),
        algo_kwargs=small | {"batch_size": 8, "learning_starts": 50, "train_frequency": 50},
    )
    train(config)
    assert len(seen) == 80
    starts = 0
    for (_, before), (is_start, deviation) in pairwise(seen):
        assert torch.equal(deviation != before, is_start)
        starts += int(is_start.sum())
    assert starts > 50


# Settings


def test_defaults_are_those_of_the_authors_code() -> None:
    config: Any = settings_of(FastTD3)
    assert (config.actor_hidden_sizes, config.critic_hidden_sizes) == (
        (512, 256, 128),
        (1024, 512, 256),
    )
    assert (config.batch_size, config.gradient_updates_per_step) == (32_768, 2)
    assert (config.num_atoms, config.v_min, config.v_max) == (101, -250.0, 250.0)
    assert (config.exploration_noise_min, config.exploration_noise) == (0.001, 0.4)
    assert (config.policy_noise, config.noise_clip, config.policy_delay) == (0.001, 0.5, 2)
    assert (config.tau, config.gamma, config.learning_rate) == (0.1, 0.99, 3e-4)
    assert (config.optimizer.type, config.optimizer.weight_decay) == ("adamw", 0.1)
    assert (config.normalize_observations, config.use_cdq, config.random_steps) == (True, True, 0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"v_min": 5.0, "v_max": 5.0}, r"v_min must be < v_max \(5\), got 5"),
        (
            {"exploration_noise": 0.1, "exploration_noise_min": 0.2},
            r"exploration_noise_min must be <= exploration_noise \(0.1\), got 0.2",
        ),
    ],
)
def test_intervals_have_a_lower_and_an_upper_end(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)
