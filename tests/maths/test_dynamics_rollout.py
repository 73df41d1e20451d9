"""Roll-outs in the ensemble, and what is measured about them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.dynamics.fit import model_rows
from rl_training.algorithms.dynamics.imagination import ModelEnv, Penalty, Sampling
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.models import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.runtime.health.dynamics import (
    calibration,
    exploitation,
    imagined_terminals,
    open_loop_error,
    penalty_correlation,
    real_sequences,
)
from rl_training.testing.contract import no_host_reads

STEPS = torch.tensor([1.0, 10.0, 100.0, 1000.0])
"""What each hand-made member adds to the observation; its reward is half of it."""


def hand_made(
    seeds: int = 1, elites: tuple[int, ...] = (0, 1, 2, 3), sigma: float = 1e-6
) -> MLPMOPOEnsembleModel:
    """Members that ignore their input: one observation, one action."""
    rng = Rng(range(seeds), "model")
    model = MLPMOPOEnsembleModel(1, 1, (4,), 4, num_elites=len(elites), rng=rng)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
        last = model.layers[1].bias
        assert isinstance(last, Tensor)
        last[:, :, 0, 0], last[:, :, 0, 1] = STEPS, STEPS / 2
        last[..., 2:] = 2 * torch.tensor(sigma).log()
        model.max_logvar.fill_(30.0)
        model.min_logvar.fill_(-60.0)
        model.elites.copy_(torch.tensor(elites).expand(seeds, -1))
    return model


def standing(obs: Tensor) -> Tensor:
    return torch.zeros(*obs.shape[:-1], 1)


def env_of(model: MLPMOPOEnsembleModel, **options: object) -> ModelEnv:
    seeds = range(model.num_seeds)
    return ModelEnv(model, Rng(seeds, "rollout"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", ["ts1", "tsinf"])
@pytest.mark.parametrize("penalty", ["none", "aleatoric", "disagreement"])
def test_rows_are_what_their_member_says(sampling: Sampling, penalty: Penalty) -> None:
    env = env_of(hand_made(seeds=2, elites=(3, 1)), sampling=sampling, penalty=penalty)
    made = env.rollout(torch.zeros(2, 9, 1), standing, 3)
    assert made.obs.shape == made.next_obs.shape == (2, 27, 1)
    assert made.reward.shape == made.valid.shape == (2, 27)
    assert set(made.member.flatten().tolist()) == {1, 3}
    delta = (made.next_obs - made.obs)[..., 0]
    torch.testing.assert_close(delta, STEPS[made.member], atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(made.reward, STEPS[made.member] / 2, atol=1e-2, rtol=1e-4)
    chained = made.next_obs.view(2, 3, 9)[:, :-1]
    torch.testing.assert_close(chained, made.obs.view(2, 3, 9)[:, 1:])


def test_tsinf_keeps_its_member_and_ts1_does_not() -> None:
    fixed = env_of(hand_made(), sampling="tsinf").rollout(torch.zeros(1, 40, 1), standing, 6)
    members = fixed.member.view(6, 40)
    assert (members == members[0]).all()
    assert members[0].bincount().tolist() == [10, 10, 10, 10]
    fresh = env_of(hand_made(), sampling="ts1").rollout(torch.zeros(1, 40, 1), standing, 6)
    assert (fresh.member.view(6, 40) != fresh.member.view(6, 40)[0]).any(0).float().mean() > 0.9


def test_penalties_are_those_of_all_members_not_of_the_elites() -> None:
    model = hand_made(elites=(0,), sigma=2.0)
    made = env_of(model, penalty="aleatoric").rollout(torch.zeros(1, 3, 1), standing, 1)
    torch.testing.assert_close(made.penalty, torch.full((1, 3), 8**0.5))  # |(2, 2)|
    made = env_of(model, penalty="disagreement").rollout(torch.zeros(1, 3, 1), standing, 1)
    expected = 0.75 * STEPS.std(correction=0)  # mean of the deviations of delta and of half of it
    torch.testing.assert_close(made.penalty, expected.expand(1, 3))
    made = env_of(model).rollout(torch.zeros(1, 3, 1), standing, 1)
    assert (made.penalty == 0).all()


def test_samples_have_the_predicted_mean_and_deviation() -> None:
    made = env_of(hand_made(elites=(1,), sigma=3.0)).rollout(torch.zeros(1, 20000, 1), standing, 1)
    assert abs(made.next_obs.mean() - 10) < 0.1
    assert abs(made.next_obs.std() - 3) < 0.1
    assert abs(made.reward.mean() - 5) < 0.1


def test_imagined_ends_stop_a_rollout() -> None:
    def beyond(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        return next_obs[..., 0] > 2.5

    env = env_of(hand_made(elites=(0,)), termination=beyond)
    starts = torch.tensor([0.0, 1.0, 2.0, -9.0]).view(1, 4, 1)
    made = env.rollout(starts, standing, 4)
    valid, ended = made.valid.view(4, 4), made.terminated.view(4, 4) & made.valid.view(4, 4)
    assert valid.sum(0).tolist() == [3, 2, 1, 4]  # the row that ends is the last that counts
    assert ended.sum(0).tolist() == [1, 1, 1, 0]
    assert ended[2, 0]
    torch.testing.assert_close(imagined_terminals(made, 4), torch.tensor([0.75]))
    packed, count = made.valid_first()
    assert count.tolist() == [10]
    assert packed.valid[0, :10].all()
    assert not packed.valid[0, 10:].any()
    torch.testing.assert_close(packed.obs[0, :10], made.obs[0, made.valid[0]])


def test_the_end_of_a_rollout_is_no_end_of_an_episode() -> None:
    made = env_of(hand_made()).rollout(torch.zeros(1, 8, 1), standing, 3)
    assert not made.terminated.any()
    assert made.valid.all()


def test_a_learned_head_ends_episodes() -> None:
    model = MLPMOPOEnsembleModel(1, 1, (4,), 2, learn_terminations=True)
    for logit, ends in ((5.0, True), (-5.0, False)):
        with torch.no_grad():
            model.layers[1].bias[..., -1] = logit  # type: ignore[operator]
            model.layers[1].weight[..., -1] = 0.0  # type: ignore[operator]
        made = env_of(model).rollout(torch.zeros(1, 6, 1), standing, 2)
        assert (made.terminated & made.valid).any() == ends
        assert int(made.valid.sum()) == (6 if ends else 12)


def test_a_known_reward_takes_the_place_of_the_learned_one() -> None:
    env = env_of(hand_made(), reward=lambda obs, action, next_obs: 7 + 0 * obs[..., 0])
    assert (env.rollout(torch.zeros(1, 4, 1), standing, 2).reward == 7).all()


def test_numbers_that_are_not_finite_do_not_count_and_do_not_spread() -> None:
    model = hand_made(elites=(0,))
    with torch.no_grad():
        model.layers[1].bias[:, 0, 0, 0] = torch.inf  # type: ignore[operator]
    made = env_of(model).rollout(torch.zeros(1, 4, 1), standing, 3)
    assert not made.valid.any()
    assert made.obs.isfinite().all()


def test_rollouts_read_nothing_back() -> None:
    env = env_of(hand_made(seeds=2), penalty="aleatoric")
    env.rng.as_tensors = True  # as on an accelerator
    with no_host_reads():
        made = env.rollout(torch.zeros(2, 10, 1), standing, 3)
        made.valid_first()


@pytest.mark.parametrize("sampling", ["ts1", "tsinf"])
def test_a_group_of_seeds_rolls_out_as_each_would_alone(sampling: Sampling) -> None:
    model = MLPMOPOEnsembleModel(2, 1, (8,), 3, rng=Rng((0, 1), "model"))
    obs = torch.randn(2, 12, 2)
    group = ModelEnv(model, Rng((0, 1), "r"), sampling=sampling).rollout(obs, standing, 3)
    for seed in range(2):
        alone = MLPMOPOEnsembleModel(2, 1, (8,), 3, rng=Rng((seed,), "model"))
        env = ModelEnv(alone, Rng((seed,), "r"), sampling=sampling)
        made = env.rollout(obs[seed : seed + 1], standing, 3)
        assert torch.equal(made.member[0], group.member[seed])
        torch.testing.assert_close(made.next_obs[0], group.next_obs[seed])


def hand_rows(count: int, noise: float) -> Tensor:
    """Rows of a task that does what the first hand-made member says, with noise."""
    obs = torch.zeros(1, count, 1)
    wobble = noise * torch.randn(1, count, 2, generator=torch.Generator().manual_seed(0))
    return model_rows(obs, obs, 0.5 + wobble[..., 1], obs + 1 + wobble[..., :1], obs[..., 0])


def test_calibration_is_one_and_two_sigma_for_the_true_model() -> None:
    model = hand_made(sigma=0.5)
    with torch.no_grad():
        model.layers[1].bias[..., :2] = torch.tensor([1.0, 0.5])  # type: ignore[operator]
    found = calibration(model, hand_rows(4000, 0.5))
    assert abs(found["within_1_sigma"] - 0.683) < 0.02
    assert abs(found["within_2_sigma"] - 0.954) < 0.02
    assert found["calibration_error"] < 0.02
    sure = calibration(model, hand_rows(4000, 2.5))  # five times the noise it expects
    assert sure["within_1_sigma"] < 0.2
    assert sure["calibration_error"] > 0.4


def test_the_penalty_correlates_with_the_error_where_it_should() -> None:
    model = MLPMOPOEnsembleModel(1, 1, (4,), 2)
    with torch.no_grad():  # log-variance grows with the observation, means are zero
        for parameter in model.layers.parameters():
            parameter.zero_()
        model.layers[0].weight[:, :, 0, 0] = 1.0  # type: ignore[operator]
        model.layers[1].weight[:, :, 0, 2:] = 0.2  # type: ignore[operator]
        model.max_logvar.fill_(20.0)
    obs = torch.rand(1, 2000, 1) * 8
    scale = torch.randn(1, 2000) * obs[..., 0]
    grows = model_rows(obs, obs, scale, obs, obs[..., 0])
    assert penalty_correlation(model, grows) > 0.3
    shuffled = model_rows(obs, obs, scale[:, torch.randperm(2000)], obs, obs[..., 0])
    assert penalty_correlation(model, shuffled).abs() < 0.1


def test_the_open_loop_error_grows_as_the_models_bias_adds_up() -> None:
    model = hand_made(elites=(0,))  # adds 1, the task adds 0.75
    obs = (0.75 * torch.arange(5.0)).view(1, 1, 5, 1).expand(1, 7, 5, 1)
    error = open_loop_error(model, obs, torch.zeros(1, 7, 4, 1))
    torch.testing.assert_close(error, torch.tensor([[0.25, 0.5, 0.75, 1.0]]))


def test_the_alarm_is_above_zero_only_if_imagination_beats_the_data() -> None:
    made = env_of(hand_made(elites=(0,))).rollout(torch.zeros(1, 4, 1), standing, 2)  # reward 0.5
    real = torch.linspace(0, 1, 1001).unsqueeze(0)
    torch.testing.assert_close(
        exploitation(made, real), (0.5 - 0.95) / real.std(correction=0).view(1)
    )
    assert exploitation(made, real - 1) > 0


def test_real_sequences_lie_within_episodes() -> None:
    buffer = ReplayBuffer(40, (1,), (1,), num_envs=2, seeds=(0, 1))
    for step in range(30):  # wraps; episodes of 5 steps
        obs = torch.tensor([[[step], [100 + step]]] * 2).float().numpy()
        done = torch.full((2, 2), step % 5 == 4).numpy()
        off = torch.zeros(2, 2, dtype=torch.bool).numpy()
        after = obs + 1
        buffer.add(obs, obs * 10, obs[..., 0], after, off, done)
    seen, actions, inside = real_sequences(buffer, Rng((0, 1), "s"), 8, 3)
    assert seen.shape == (2, 8, 4, 1)
    assert actions.shape == (2, 8, 3, 1)
    assert inside.all()
    assert (seen.diff(dim=2) == 1).all()
    torch.testing.assert_close(actions, seen[:, :, :-1] * 10)
    assert ((seen[:, :, 0, 0] % 100) % 5 <= 2).all()
    assert seen[:, :, 0, 0].remainder(100).min() >= 10  # what was overwritten does not come back
