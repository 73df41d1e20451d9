"""The ensemble's network and its mathematics; S seeds, M members, B rows, O outputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rl_training.algorithms.dynamics.fit import (
    DynamicsConfig,
    batch_rows,
    dynamics_network,
    fit_statistics,
    model_rows,
    mopo_model_loss,
)
from rl_training.algorithms.dynamics.imagination import ModelEnv
from rl_training.data.batch import TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, ConfigError, SpecMismatch
from rl_training.models import MLPMOPOEnsembleModel
from rl_training.models.layers import StackedLinear
from rl_training.models.mlp_mopo import (
    Assignment,
    balanced_nll,
    gaussian_nll,
    max_aleatoric,
    mean_disagreement,
    resized,
    soft_bounds,
    truncated_normal_init,
)
from rl_training.rng import Rng


def make(
    seeds: int = 1, members: int = 4, *, terminations: bool = False, elites: int | None = None
) -> MLPMOPOEnsembleModel:
    rng = Rng(range(seeds), "model")
    model = MLPMOPOEnsembleModel(
        3, 2, (16, 16), members, learn_terminations=terminations, num_elites=elites, rng=rng
    )
    with torch.no_grad():  # biases and statistics that are not all alike
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator(1)))
        model.input_mean.copy_(torch.randn(model.input_mean.shape, generator=generator(2)))
        model.input_scale.copy_(torch.rand(model.input_scale.shape, generator=generator(3)) + 0.5)
        model.target_mean.copy_(torch.randn(model.target_mean.shape, generator=generator(4)))
        model.target_scale.copy_(torch.rand(model.target_scale.shape, generator=generator(5)) + 0.5)
    return model


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(
    model: MLPMOPOEnsembleModel, seed: int, member: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One member as a plain network."""
    x = (x - model.input_mean[seed, 0, 0]) * model.input_scale[seed, 0, 0]
    for number, layer in enumerate(model.layers):
        weight, bias = layer.weight[seed, member], layer.bias[seed, member, 0]  # type: ignore[index]
        x = functional.linear(x, weight.T, bias)
        x = x * torch.sigmoid(x) if number < len(model.layers) - 1 else x
    low, high = model.min_logvar[seed, member, 0], model.max_logvar[seed, member, 0]
    center, deviation = model.target_mean[seed, 0, 0], model.target_scale[seed, 0, 0]
    variance = soft_bounds(x[:, 4:8], low, high).exp() * deviation.square()
    return x[:, :4] * deviation + center, variance.log()


def test_the_ensemble_equals_its_members_run_one_by_one() -> None:
    model = make(seeds=2)
    obs, action = torch.randn(2, 9, 3), torch.randn(2, 9, 2)
    means, logvars = model.predict_distribution(obs, action)
    assert means.shape == logvars.shape == (2, 4, 9, 4)
    for seed in range(2):
        for member in range(4):
            x = torch.cat((obs[seed], action[seed]), -1)
            mean, logvar = by_hand(model, seed, member, x)
            torch.testing.assert_close(means[seed, member], mean)
            torch.testing.assert_close(logvars[seed, member], logvar)


def test_many_rows_are_cut_into_pieces_without_changing_them() -> None:
    model = make()
    obs, action = torch.randn(1300, 3), torch.randn(1300, 2)
    whole, _ = model.predict_distribution(obs, action)  # gradients on: in one piece
    with torch.no_grad():
        cut, _ = model.predict_distribution(obs, action)
    torch.testing.assert_close(cut, whole.detach())


def test_a_seed_axis_may_be_left_out_for_one_seed() -> None:
    model = make()
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    means, logvars = model.predict_distribution(obs, action)
    assert means.shape == logvars.shape == (4, 5, 4)
    drawn = model.sample_transition(obs, action)
    shapes = {name: tuple(value.shape) for name, value in drawn.items()}
    assert shapes == {"next_obs": (5, 3), "rewards": (5,), "disagreement": (5,)}
    torch.testing.assert_close(drawn["disagreement"], mean_disagreement(means[None])[0].detach())


@pytest.mark.parametrize(("obs", "action"), [((5, 3), (5, 2)), ((2, 5, 4), (2, 5, 2))])
def test_inputs_of_another_shape_are_refused(obs: tuple[int, ...], action: tuple[int, ...]) -> None:
    with pytest.raises(SpecMismatch, match=r"takes obs \[2, B, 3\].*got"):
        make(seeds=2).predict_distribution(torch.zeros(obs), torch.zeros(action))


def test_samples_follow_the_elites_alone() -> None:
    model = make(elites=2)
    with torch.no_grad():
        model.elites.copy_(torch.tensor([[3, 1]]))
        model.max_logvar.fill_(-30)
        model.min_logvar.fill_(-40)  # no noise: samples are means
    obs, action = torch.randn(64, 3), torch.randn(64, 2)
    means, _ = model.predict_distribution(obs, action)
    reward = model.sample_transition(obs, action)["rewards"]
    nearest = (means[..., -1] - reward).abs().argmin(0)
    assert set(nearest.tolist()) == {1, 3}
    torch.testing.assert_close(means[nearest, torch.arange(64), -1], reward, atol=1e-5, rtol=0)


def test_the_loss_is_twice_the_negative_log_likelihood_without_its_constant() -> None:
    mean, logvar, target = torch.randn(3, 50).double(), torch.randn(50).double(), torch.randn(50)
    normal = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    log_prob = normal.log_prob(target)  # type: ignore[no-untyped-call]
    expected = -2 * log_prob - math.log(2 * math.pi)
    torch.testing.assert_close(gaussian_nll(mean, logvar, target), expected)


def test_the_gradient_of_the_likelihood_vanishes_at_mean_and_variance_of_the_data() -> None:
    data = torch.randn(1000, generator=generator(0)).double() * 3 + 1
    mean = data.mean().requires_grad_()
    logvar = data.var(correction=0).log().requires_grad_()
    slopes = torch.autograd.grad(gaussian_nll(mean, logvar, data).mean(), (mean, logvar))
    assert abs(slopes[0]) < 1e-9
    assert abs(slopes[1]) < 1e-9


def test_log_variances_stay_within_their_bounds_and_are_free_between() -> None:
    raw = torch.linspace(-1000, 1000, 2001)
    low, high = torch.tensor(-10.0), torch.tensor(0.5)
    bounded = soft_bounds(raw, low, high)
    assert bounded.min() >= -10
    assert bounded.max() <= 0.5 + math.log1p(math.exp(-10.5)) + 1e-6
    assert (bounded.diff() >= -1e-6).all()
    torch.testing.assert_close(soft_bounds(torch.tensor(-5.0), low, high), torch.tensor(-5.0),
                               atol=0.02, rtol=0)  # fmt: skip


def test_loss_sums_members_and_pulls_the_bounds_together() -> None:
    model = make(seeds=2)
    rows = torch.randn(2, 1, 8, 3 + 2 + 3 + 2)
    metrics = mopo_model_loss(model, rows)
    means, logvars = model.predict_distribution(rows[:, 0, :, :3], rows[:, 0, :, 3:5])
    # In standardised units a density is larger by the deviation.
    units = 2 * model.target_scale.log()
    nll = (gaussian_nll(means, logvars, rows[..., 5:9]) - units).mean((2, 3)).sum(1)
    width = (model.max_logvar - model.min_logvar).sum((1, 2, 3))
    torch.testing.assert_close(metrics["mopo_model_loss"], nll + 0.01 * width)
    error = (means - rows[..., 5:9]).abs()
    torch.testing.assert_close(metrics["reward_mae"], error[..., -1].mean((1, 2)))
    torch.testing.assert_close(metrics["delta_obs_mae"], error[..., :-1].mean((1, 2, 3)))
    assert metrics["ensemble_disagreement"].shape == (2,)


def test_fixed_bounds_are_no_parameters_to_learn_and_not_in_the_loss() -> None:
    model = MLPMOPOEnsembleModel(3, 2, (8,), 2, learn_logvar_bounds=False)
    rows = torch.randn(1, 1, 8, 10)
    loss = mopo_model_loss(model, rows)["mopo_model_loss"]
    means, logvars = model.predict_distribution(rows[0, :, :, :3][0], rows[0, :, :, 3:5][0])
    nll = gaussian_nll(means, logvars, rows[0, :, :, 5:9]).mean((1, 2)).sum()
    torch.testing.assert_close(loss[0], nll)
    assert not model.max_logvar.requires_grad


def test_a_learned_end_adds_its_cross_entropy() -> None:
    model = make(terminations=True)
    rows = torch.randn(1, 1, 8, 10)
    rows[..., -1] = (rows[..., -1] > 0).float()
    terminal = model.members()(rows[..., :5]).terminal
    assert terminal is not None
    with_ends = mopo_model_loss(model, rows)["mopo_model_loss"]
    ends = rows[..., -1].expand_as(terminal)
    entropy = -(ends * torch.sigmoid(terminal).log() + (1 - ends) * torch.sigmoid(-terminal).log())
    means, logvars, _ = model.members()(rows[..., :5])
    units = 2 * model.target_scale.log()
    rest = (gaussian_nll(means, logvars, rows[..., 5:9]) - units).mean((2, 3)).sum(1)
    rest = rest + 0.01 * (model.max_logvar - model.min_logvar).sum((1, 2, 3))
    torch.testing.assert_close(with_ends, rest + entropy.mean(2).sum(1))


def test_folded_members_predict_the_same() -> None:
    model = make(seeds=2, terminations=True)
    x = torch.randn(2, 1, 7, 5, generator=generator(6))
    plain, folded = model.members()(x), model.members().folded()(x)
    for ours, theirs in zip(plain, folded, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    short = model.members().folded(keep_reward=False)(x)
    torch.testing.assert_close(short.mean, plain.mean[..., :3], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(short.logvar, plain.logvar[..., :3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_balanced_loss_weighs_the_mean_and_leaves_the_variance(beta: float) -> None:
    draw = generator(7)
    mean, logvar, target = torch.randn(3, 20, generator=draw, dtype=torch.float64)
    mean.requires_grad_()
    logvar.requires_grad_()
    loss = balanced_nll(mean, logvar, target, beta)
    torch.testing.assert_close(loss, gaussian_nll(mean, logvar, target))
    of_mean, of_variance = torch.autograd.grad(loss.sum(), (mean, logvar))
    torch.testing.assert_close(of_mean, 2 * (mean - target) * logvar.exp() ** (beta - 1))
    torch.testing.assert_close(of_variance, 1 - (mean - target).square() / logvar.exp())


def test_angles_are_shown_as_sine_and_cosine_and_hidden_entries_not_at_all() -> None:
    model = MLPMOPOEnsembleModel(3, 2, (16,), 2, angles=(1,), hidden=(0,))
    rows = torch.randn(1, 50, 10, generator=generator(8))
    fit_statistics(model, rows)
    assert model.layers[0].weight.shape[2] == 3 + 2 + 2  # type: ignore[index]
    obs, action = rows[0, :, :3], rows[0, :, 3:5]
    expected = model.predict_distribution(obs, action)[0]
    turned = obs + torch.tensor([5.0, 2 * math.pi, 0.0])
    torch.testing.assert_close(
        model.predict_distribution(turned, action)[0], expected, atol=1e-5, rtol=1e-4
    )
    other = obs + torch.tensor([0.0, 0.0, 1.0])
    assert (model.predict_distribution(other, action)[0] - expected).abs().max() > 1e-3


def test_an_entry_without_delta_is_predicted_itself() -> None:
    model = MLPMOPOEnsembleModel(2, 1, (16,), 2, no_delta=(1,))
    obs, action = torch.randn(1, 9, 2), torch.randn(1, 9, 1)
    next_obs, reward = torch.randn(1, 9, 2), torch.randn(1, 9)
    rows = model_rows(obs, action, reward, next_obs, torch.zeros(1, 9))
    targets = model.targets(rows)
    wanted = torch.stack((next_obs[..., 0] - obs[..., 0], next_obs[..., 1], reward), -1)
    torch.testing.assert_close(targets, wanted)
    torch.testing.assert_close(model.next_obs(obs, targets), next_obs)


def test_without_a_reward_to_learn_there_is_no_head_for_it() -> None:
    model = MLPMOPOEnsembleModel(3, 2, (16,), 2, learn_reward=False)
    mean, _ = model.predict_distribution(torch.zeros(4, 3), torch.zeros(4, 2))
    assert mean.shape == (2, 4, 3)
    assert set(model.sample_transition(torch.zeros(4, 3), torch.zeros(4, 2))) == {
        "next_obs",
        "disagreement",
    }
    metrics = mopo_model_loss(model, torch.randn(1, 1, 8, 10))
    assert float(metrics["reward_mae"]) == 0
    with pytest.raises(ConfigError, match="does not learn the reward"):
        ModelEnv(model, Rng((0,), "env"))


def test_a_fitted_ensemble_is_saved_and_loaded_by_itself(tmp_path: Path) -> None:
    model = MLPMOPOEnsembleModel(
        3, 2, (16, 8), 3, num_elites=2, angles=(2,), no_delta=(1,), rng=Rng((3, 4), "model")
    )
    fit_statistics(model, torch.randn(2, 50, 10, generator=generator(9)))
    model.save(tmp_path / "model.safetensors")
    again = MLPMOPOEnsembleModel.load(tmp_path / "model.safetensors")
    obs, action = torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    for ours, theirs in zip(
        model.predict_distribution(obs, action),
        again.predict_distribution(obs, action),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert list(again.decays().values()) == list(model.decays().values())
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"other.safetensors cannot be read as a dynamics"):
        MLPMOPOEnsembleModel.load(tmp_path / "other.safetensors")
    own = MLPMOPOEnsembleModel(3, 2, (8,), 2, obs_process=torch.sin)
    with pytest.raises(ConfigError, match="a file holds no code"):
        own.save(tmp_path / "own.safetensors")


def test_entries_that_the_observation_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"angles .* 0 to 2, got 3"):
        MLPMOPOEnsembleModel(3, 2, (8,), 2, angles=(3,))
    with pytest.raises(ConfigError, match="not both"):
        MLPMOPOEnsembleModel(3, 2, (8,), 2, angles=(1,), obs_process=torch.sin)


def test_penalties_of_a_hand_made_ensemble() -> None:
    deviation = torch.tensor([[[3.0, 4.0]], [[1.0, 1.0]], [[0.0, 6.0]]])  # three members, one row
    logvar = 2 * deviation.log()[None]
    torch.testing.assert_close(max_aleatoric(logvar), torch.tensor([[6.0]]))
    mean = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])[None]
    torch.testing.assert_close(mean_disagreement(mean), torch.tensor([[0.5]]))  # (1 + 0) / 2


@pytest.mark.parametrize("rows", [1, 3, 10, 64, 65])
def test_an_assignment_runs_each_row_by_its_own_member(rows: int) -> None:
    model = make(seeds=2, terminations=True)
    assignment = Assignment.draw(Rng((0, 1), "rows"), rows, 4)
    x = torch.randn(2, rows, 5)
    members = model.members()
    shared = assignment(members, x)
    picked = assignment.pick(members(x.unsqueeze(1)))
    for a, b in zip(shared, picked, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b)
    counts = torch.stack([(assignment.slot == m).sum(1) for m in range(4)])
    assert counts.max() <= -(-rows // 4)


@pytest.mark.parametrize("rows", [1, 3, 6, 10])
def test_every_row_meets_every_member_equally_often(rows: int) -> None:
    rng = Rng((0,), "rows")
    slots = torch.stack([Assignment.draw(rng, rows, 5).slot[0] for _ in range(2000)])
    share = torch.stack([(slots == m).float().mean(0) for m in range(5)])
    assert (share - 0.2).abs().max() < 0.04


def test_initial_weights_are_a_truncated_normal() -> None:
    weight = truncated_normal_init(Rng((0,), "w"), (7,), 200, 50)
    scale = 1 / (2 * math.sqrt(50))
    assert weight.abs().max() <= 2 * scale * 1.0001
    # The deviation of a normal cut at two is 0.8796 of the uncut one.
    assert abs(weight.std() / scale - 0.8796) < 0.01
    assert abs(weight.mean() / scale) < 0.02


def test_decay_is_stretched_to_the_layers() -> None:
    five = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
    assert resized(five, 5) == five
    assert resized(five, 3) == (2.5e-5, 7.5e-5, 1e-4)
    assert resized((1.0,), 2) == (1.0, 1.0)
    model = MLPMOPOEnsembleModel(3, 2, (8, 8), 2)
    assert list(model.decays().values()) == [2.5e-5, 7.5e-5, 1e-4]


def test_a_truncated_row_is_no_terminal_one() -> None:
    keys = {"obs": torch.zeros(1, 2, 3), "action": torch.zeros(1, 2, 2)}
    batch = TransitionBatch(
        **keys,
        reward=torch.ones(1, 2),
        next_obs=torch.ones(1, 2, 3),
        discount=torch.tensor([[0.0, 0.99]]),  # terminated, truncated
    )
    assert batch_rows(batch)[0, :, -1].tolist() == [1.0, 0.0]
    rows = model_rows(keys["obs"], keys["action"], batch.reward, batch.next_obs, batch.reward)
    assert rows[0, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def spec(**changes: object) -> EnvSpec:
    base: dict[str, object] = {
        "env_id": "Task-v0",
        "obs_shape": (3,),
        "obs_dtype": "float32",
        "action_kind": "continuous",
        "action_shape": (2,),
        "action_dtype": "float32",
    }
    return EnvSpec.model_validate(base | changes)


def test_the_ensemble_is_built_for_a_task() -> None:
    config = DynamicsConfig(model_hidden_sizes=(8,), num_ensembles=3)
    model = dynamics_network(spec(), config, Rng((0, 1), "model"))
    assert (model.num_seeds, model.num_ensembles, model.num_elites) == (2, 3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs_shape": (64, 64, 3), "obs_dtype": "uint8"}, r"vectors.*\(64, 64, 3\) of uint8"),
        (
            {"action_kind": "discrete", "action_shape": (), "num_actions": 4},
            "continuous actions, got 4 discrete ones",
        ),
    ],
)
def test_images_and_discrete_actions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecMismatch, match=message):
        dynamics_network(spec(**changes), DynamicsConfig(), Rng((0,), "model"))


def test_sizes_that_make_no_ensemble_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_elites must be between 1 and num_ensembles = 3"):
        MLPMOPOEnsembleModel(3, 2, (8,), 3, num_elites=4)
    with pytest.raises(ConfigError, match="must be >= 1, got 3, 2 and 0"):
        MLPMOPOEnsembleModel(3, 2, (8,), 0)


def test_bf16_is_for_the_layers_between_the_first_and_the_last() -> None:
    model = make()
    exact, _ = model.predict_distribution(torch.randn(50, 3), torch.randn(50, 2))
    layers = [layer for layer in model.layers if isinstance(layer, StackedLinear)]
    for layer in layers:
        layer.compute_dtype = torch.bfloat16
    dtypes = [weight.dtype for weight in model.members().weights]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]
    rough, _ = model.predict_distribution(torch.randn(50, 3), torch.randn(50, 2))
    assert rough.dtype == exact.dtype == torch.float32
