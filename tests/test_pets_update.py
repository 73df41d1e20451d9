"""PETS: particles, plans through known models, acting state, and the model's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.settings import settings_of
from rl_training.algorithms.pets import PETS, pets_loss
from rl_training.algorithms.pets.config import PETSConfig
from rl_training.algorithms.pets.planning import WORST_RETURN, TrajectorySampler, predictor
from rl_training.data.batch import TransitionBatch
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError, DataError, SpecMismatch
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent
from rl_training.testing.contract import build, flat_state, small_config
from rl_training.validation import parse

NO_NOISE = -60.0
"""Log-variance of nothing."""


class Linear(nn.Module):
    """s' = s + a + drift of the member, r = -(s^2 + cost a^2); noise-free unless told."""

    obs_dim = action_dim = 1

    def __init__(
        self, drifts: tuple[float, ...] = (0.0,), cost: float = 0.0, logvar: float = NO_NOISE
    ) -> None:
        super().__init__()
        self.num_ensembles, self.cost, self.logvar = len(drifts), cost, logvar
        self.register_buffer("drifts", torch.tensor(drifts).view(-1, 1, 1))
        self.drifts: Tensor

    def predict_distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        change = (actions + self.drifts).expand(self.num_ensembles, -1, -1)
        reward = -(obs.square() + self.cost * actions.square())
        mean = torch.cat((change, reward.expand_as(change)), -1)
        return mean, torch.full_like(mean, self.logvar)


def sampler(model: nn.Module, **changes: Any) -> TrajectorySampler:
    return TrajectorySampler(model=model, **{"particles": 4} | changes)  # type: ignore[arg-type]


def returns(one: TrajectorySampler, obs: float, actions: list[float]) -> float:
    plans = torch.tensor(actions).view(1, 1, 1, -1, 1)
    rate = one.objective(torch.full((1, 1, 1), obs), Rng((0,), "test"))
    return float(rate(plans))


def test_a_plan_is_worth_the_sum_of_its_rewards() -> None:
    # States 1, 3, 2.5 before the three actions.
    assert returns(sampler(Linear()), 1.0, [2.0, -0.5, 0.1]) == pytest.approx(-(1 + 9 + 6.25))
    discounted = -(1 + 0.5 * 9 + 0.25 * 6.25)
    assert returns(sampler(Linear(), gamma=0.5), 1.0, [2.0, -0.5, 0.1]) == pytest.approx(discounted)


def test_what_lies_beyond_a_plan_counts_where_the_plan_has_not_ended() -> None:
    # States 1, 3, 2.5, 2.6: the value is that of the last.
    def value(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        assert torch.allclose(next_obs - obs, action)
        return 10 * next_obs[..., 0]

    one = sampler(Linear(), gamma=0.5, value=value)
    wanted = -(1 + 0.5 * 9 + 0.25 * 6.25) + 0.125 * 26
    assert returns(one, 1.0, [2.0, -0.5, 0.1]) == pytest.approx(wanted)
    ended = sampler(
        Linear(), gamma=0.5, value=value, termination=lambda _, __, after: after[..., 0] > 2.9
    )
    assert returns(ended, 1.0, [2.0, -0.5, 0.1]) == pytest.approx(-1)


def test_tsinf_keeps_a_particles_member_for_the_whole_plan() -> None:
    # Drifts +-1: kept, the states are 0, +-1, +-2; drawn anew, some return to 0.
    model = Linear((1.0, -1.0))
    assert returns(sampler(model, particles=64), 0.0, [0.0] * 3) == pytest.approx(-5.0)
    mixed = returns(sampler(model, particles=64, sampling="ts1"), 0.0, [0.0] * 3)
    assert mixed == pytest.approx(-3.0, abs=0.8)
    assert mixed != pytest.approx(-5.0)


def test_particles_spread_by_the_predicted_deviation() -> None:
    noisy = Linear((0.0, 0.0), logvar=float(np.log(0.25)))
    # E[s^2] grows by 0.25 a step: 0 + 0.25 + 0.5.
    value = returns(sampler(noisy, particles=20_000), 0.0, [0.0] * 3)
    assert value == pytest.approx(-0.75, abs=0.03)


def test_rewards_after_an_imagined_end_do_not_count() -> None:
    def ends(_: Tensor, __: Tensor, next_obs: Tensor) -> Tensor:
        return next_obs[..., 0] > 1.5

    one = sampler(Linear(), termination=ends)
    assert returns(one, 1.0, [0.1, 1.0, 5.0]) == pytest.approx(-(1 + 1.1**2))


def test_a_reward_that_is_no_number_makes_the_plan_the_worst() -> None:
    def broken(obs: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return torch.where(obs[..., 0] > 1.5, torch.nan, 0.0)

    one = sampler(Linear(), reward=broken)
    assert returns(one, 1.0, [0.1, 0.1]) == 0.0
    assert returns(one, 1.0, [1.0, 0.1]) == WORST_RETURN


def test_each_particle_is_predicted_by_its_own_member() -> None:
    model = MLPMOPOEnsembleModel(3, 2, (16, 16), 4, rng=Rng((3, 5), "m"))
    model.input_mean.normal_()
    model.input_scale.uniform_(0.5, 2.0)
    x = torch.randn(2, 4, 6, 5)
    with torch.no_grad():
        own = predictor(model, keep_reward=True)(x)
        bare = predictor(model, keep_reward=False)(x)
        mean, logvar = model.predict_distribution(
            x[..., :3].reshape(2, 24, 3), x[..., 3:].reshape(2, 24, 2)
        )
    for member in range(4):
        rows = slice(6 * member, 6 * member + 6)
        torch.testing.assert_close(own.mean[:, member], mean[:, member, rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            own.logvar[:, member], logvar[:, member, rows], rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(bare.mean, own.mean[..., :-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bare.logvar, own.logvar[..., :-1], rtol=1e-4, atol=1e-5)


def test_a_foreign_model_is_planned_through_like_the_ensemble() -> None:
    ensemble = MLPMOPOEnsembleModel(3, 2, (16,), 2)

    class Foreign(nn.Module):
        obs_dim, action_dim, num_ensembles = 3, 2, 2

        def predict_distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
            return ensemble.predict_distribution(obs, actions)

    plans, obs = torch.rand(1, 2, 5, 4, 2), torch.rand(1, 2, 3)
    with torch.no_grad():
        ours, theirs = (
            sampler(model, particles=6).objective(obs, Rng((0,), "t"))(plans)
            for model in (ensemble, Foreign())
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


PLAN: dict[str, Any] = {
    "horizon": 6,
    "num_candidates": 300,
    "num_iterations": 10,
    "num_topk": 20,
    "num_particles": 2,
    "deterministic": True,
}


def riccati_gain(cost: float, horizon: int) -> float:
    """First gain of the optimal regulator; the last action earns nothing but its own cost."""
    value = 0.0
    gain = 0.0
    for _ in range(horizon):
        gain = value / (cost + value)
        value = 1 + value - value**2 / (cost + value)
    return gain


def test_the_plan_through_a_linear_model_is_the_regulators() -> None:
    learner = PETS(dynamics_model=Linear((0.0, 0.0), cost=0.5), num_ensembles=2)
    obs = torch.tensor([[0.8], [-0.5]])
    action = learner.plan_action(obs, action_low=-2.0, action_high=2.0, **PLAN)
    torch.testing.assert_close(action, -riccati_gain(0.5, 6) * obs, atol=0.03, rtol=0)


def test_plan_action_respects_bounds_and_takes_every_shape() -> None:
    learner = PETS(dynamics_model=Linear(), num_ensembles=1, learning_rate=1e-3)
    low, high = torch.tensor([-0.25]), torch.tensor([0.5])
    one = learner.plan_action(torch.tensor([3.0]), action_low=low, action_high=high, **PLAN)
    assert one.shape == (1,)
    assert float(one) == pytest.approx(-0.25, abs=1e-2)
    assert float(one) >= -0.25
    many = learner.plan_action(torch.zeros(1, 4, 1), action_low=low, action_high=high, **PLAN)
    assert many.shape == (1, 4, 1)


def test_plan_action_repeats_itself_only_when_deterministic() -> None:
    learner = PETS(dynamics_model=Linear(), num_ensembles=1)
    few = PLAN | {"num_candidates": 10, "num_topk": 5, "num_iterations": 1}
    obs = torch.tensor([0.7])
    assert torch.equal(learner.plan_action(obs, **few), learner.plan_action(obs, **few))
    free = few | {"deterministic": False}
    assert not torch.equal(learner.plan_action(obs, **free), learner.plan_action(obs, **free))


def test_plan_action_refuses_what_does_not_fit() -> None:
    learner = PETS(dynamics_model=Linear((0.0, 0.0)), num_ensembles=2)
    obs = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match=r"planning_topk must be <= planning_candidates \(5\)"):
        learner.plan_action(obs, **PLAN | {"num_candidates": 5})
    with pytest.raises(ConfigError, match=r"multiple of num_ensembles \(2\).*got 3; use 4"):
        learner.plan_action(obs, **PLAN | {"num_particles": 3})
    with pytest.raises(ConfigError, match="num_iterations must be >= 1, got 0"):
        learner.plan_action(obs, **PLAN | {"num_iterations": 0})
    with pytest.raises(DataError, match=r"obs has shape \(1, 2\)"):
        learner.plan_action(torch.zeros(1, 2), **PLAN)
    with pytest.raises(DataError, match=r"action_low has shape \(3,\)"):
        learner.plan_action(obs, action_low=torch.zeros(3), **PLAN)
    with pytest.raises(DataError, match="must not be above"):
        learner.plan_action(obs, action_low=2.0, **PLAN)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"planning_particles must be a multiple of num_ens"):
        PETSConfig(planning_particles=7)
    with pytest.raises(ConfigError, match=r"planning_topk must be <= planning_candidates \(10\)"):
        PETSConfig(planning_candidates=10, planning_topk=11)
    with pytest.raises(ConfigError, match="are the same: give one"):
        parse(PETS.settings_class(), {"learning_rate": 0.1, "model_learning_rate": 0.1})
    short: Any = parse(PETS.settings_class(), {"learning_rate": 0.1})
    assert short.model_learning_rate == 0.1
    with pytest.raises(ConfigError, match=r"lacks predict_distribution, obs_dim"):
        PETS(dynamics_model=nn.Linear(1, 1))


def test_tasks_without_vectors_or_continuous_actions_are_refused() -> None:
    spec = get_algorithm_spec("pets")
    with pytest.raises(SpecMismatch, match="pets needs continuous actions"):
        spec.build(probe_env("CartPole-v1", {}), PETSConfig(), (0,))
    images = probe_env("Pendulum-v1", {}).model_copy(
        update={"obs_shape": (8, 8, 3), "obs_dtype": "uint8"}
    )
    with pytest.raises(SpecMismatch, match="1 axis"):
        spec.build(images, PETSConfig(), (0,))


def test_what_is_left_of_a_plan_starts_the_next_search_until_the_episode_ends() -> None:
    learner, _ = build("pets", (1, 2), planner="icem")
    state: Any = learner.initial_acting_state(3)
    obs = Rng((1, 2), "obs").normal(3, 3)
    assert not state.plan.any()
    learner.act_from(state, obs)
    left, kept = state.plan.clone(), state.kept.clone()
    assert left[:, :, :-1].all()
    assert not left[:, :, -1].any()
    ended = torch.tensor([[False, True, False], [False, False, True]])
    state.begin_episodes(ended)
    for now, before in ((state.plan, left), (state.kept, kept)):
        assert not now[ended].any()
        assert torch.equal(now[~ended], before[~ended])


def test_the_plan_moves_on_by_one_action() -> None:
    learner, _ = build("pets")
    state: Any = learner.initial_acting_state(1)
    plan = torch.arange(1.0, 5.0).view(1, 1, 4, 1)
    state.advance(plan, state.kept)
    assert state.plan.flatten().tolist() == [2.0, 3.0, 4.0, 0.0]


def test_a_warm_start_is_where_the_search_begins() -> None:
    learner, _ = build("pets", planning_momentum=0.999, planning_iterations=1)
    state: Any = learner.initial_acting_state(1)
    state.plan.copy_(torch.tensor([0.5, -0.25, 0.1, 0.0]).view(1, 1, 4, 1))
    assert float(learner.act_from(state, torch.zeros(1, 1, 3))) == pytest.approx(0.5, abs=0.01)


def test_the_planners_state_is_saved_and_evaluation_leaves_it_alone(tmp_path: Any) -> None:
    often = small_config("pets", tmp_path, total_timesteps=70, algo_kwargs={"eval_interval": 10})
    never = small_config("pets", tmp_path, total_timesteps=70, algo_kwargs={"eval_interval": 0})
    saved = [load_checkpoint(train(config).checkpoint_path).states for config in (often, never)]
    assert saved[0]["acting"]["plan"].any()
    assert torch.equal(saved[0]["acting"]["plan"], saved[1]["acting"]["plan"])
    assert saved[0]["acting"]["rng"]["counter"] == saved[1]["acting"]["rng"]["counter"]


def test_a_run_from_a_checkpoint_plans_at_once_with_the_model_and_a_plan_of_its_own(
    tmp_path: Path,
) -> None:
    first = train(small_config("pets", tmp_path, total_timesteps=64))
    assert load_checkpoint(first.checkpoint_path).states["acting"]["plan"].any()
    config = small_config(
        "pets", tmp_path, checkpoint_interval=5, keep_checkpoints=9, total_timesteps=15
    )
    second = train(config, from_checkpoint=first.run_dir)
    begun, moved = (
        load_checkpoint(second.run_dir / "checkpoints" / name).states
        for name in ("step_0", "step_5")
    )
    theirs = flat_state(load_checkpoint(first.checkpoint_path).states["learner"]["dynamics_model"])
    for name, value in flat_state(begun["learner"]["dynamics_model"]).items():
        assert torch.equal(value, theirs[name]), name
    assert not begun["acting"]["plan"].any()
    assert moved["acting"]["plan"].any(), "the first steps are planned, not random"


def test_a_loaded_agent_predicts_without_a_trace(tmp_path: Any) -> None:
    agent = load_agent(train(small_config("pets", tmp_path, total_timesteps=64)).checkpoint_path)
    obs = np.zeros((2, 3), np.float32)
    first = agent.predict(obs)
    agent.predict(obs + 1, deterministic=False)
    assert np.array_equal(agent.predict(obs), first)


def make_batch(size: int = 12) -> TransitionBatch:
    draw = Rng((0,), "batch")
    obs = draw.normal(size, 3)
    return TransitionBatch(
        obs=obs,
        action=draw.uniform(size, 1) * 2 - 1,
        reward=draw.normal(size),
        next_obs=obs + draw.normal(size, 3),
        discount=torch.ones(1, size),
    )


def test_the_loss_is_the_gaussian_likelihood_of_each_members_share() -> None:
    model = MLPMOPOEnsembleModel(3, 1, (8,), 3, learn_logvar_bounds=False)
    batch = make_batch(13)
    found = pets_loss(model, batch)
    expected = 0.0
    with torch.no_grad():
        for member in range(3):
            rows = slice(4 * member, 4 * member + 4)
            mean, logvar = model.predict_distribution(batch.obs[0], batch.action[0])
            change = batch.next_obs[0] - batch.obs[0]
            target = torch.cat((change, batch.reward[0].unsqueeze(-1)), -1)[rows]
            spread = logvar[member, rows].exp()
            nll = (mean[member, rows] - target).square() / spread + spread.log()
            expected += float(nll.mean())
    assert float(found["model_loss"].detach()) == pytest.approx(expected, rel=1e-4)


def test_a_foreign_model_learns_by_the_same_loss() -> None:
    class Biased(Linear):
        def __init__(self) -> None:
            super().__init__((0.0, 0.0), logvar=0.0)
            self.bias = nn.Parameter(torch.zeros(1))

        def predict_distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
            mean, logvar = super().predict_distribution(obs, actions)
            return mean + self.bias, logvar

    learner = PETS(dynamics_model=Biased(), learning_rate=0.05, num_ensembles=2)
    obs = torch.zeros(16, 1)
    batch = {"obs": obs, "actions": obs, "rewards": torch.ones(16), "next_obs": obs + 1}
    before = learner.update(batch | {"dones": torch.zeros(16)}).metrics
    assert before["model_loss"] == pytest.approx(2.0)
    for _ in range(200):
        after = learner.update(batch | {"dones": torch.zeros(16)}).metrics
    assert after["model_loss"] < 0.01
    with pytest.raises(ConfigError, match="Linear has no parameters to learn"):
        PETS(dynamics_model=Linear(), num_ensembles=1).update(batch | {"dones": torch.zeros(16)})


def test_a_round_begins_by_standardising_inputs_by_the_replay(tmp_path: Any) -> None:
    result = train(small_config("pets", tmp_path, seeds=[1, 2], total_timesteps=64))
    for member in result.per_seed:
        saved = load_checkpoint(member.checkpoint_path).states["learner"]["dynamics_model"]
        assert saved["input_mean"].any()
        assert (saved["input_scale"] > 0).all()
        assert (saved["input_scale"] != 1).all()


def test_known_rewards_are_used_unless_learned_ones_are_asked_for() -> None:
    learner: Any = build("pets")[0]
    reward, ends, value = learner._functions
    assert value is None
    assert reward is not None
    assert ends is not None
    learned: Any = build("pets", reward_function="learned")[0]
    assert learned._functions[0] is None
    healthy: Any = get_algorithm_spec("pets").build(
        probe_env("InvertedPendulum-v5", {}) if _has_mujoco() else probe_env("Pendulum-v1", {}),
        settings_of(PETS, model_learn_terminations=True),
        (0,),
    )
    assert healthy._functions[1] is None


def _has_mujoco() -> bool:
    try:
        import mujoco  # noqa: F401
    except ImportError:
        return False
    return True
