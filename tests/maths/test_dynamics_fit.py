"""Fitting the ensemble: split, bootstrap, snapshots, early stop, elites, seeds, resume."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_training.algorithms.dynamics.fit import (
    DynamicsConfig,
    DynamicsTrainer,
    buffer_rows,
    model_rows,
)
from rl_training.algorithms.optim import Adam
from rl_training.algorithms.sac import SACConfig
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.checkpoint.codec import slice_seed
from rl_training.models import MLPMOPOEnsembleModel
from rl_training.rng import Rng
from rl_training.runtime.compile.trace import Source, trace_once
from rl_training.testing.contract import no_host_reads

SIGMA = torch.tensor([0.3, 0.1])
"""Of the noise of the linear system below: one observation, the reward."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear_rows(count: int, seed: int = 0) -> torch.Tensor:
    """Delta = 0.5 a - 0.2 s + noise, reward = s + a + noise; `[1, N, W]`."""
    generator = torch.Generator().manual_seed(seed)
    obs, action = (torch.rand(1, count, 1, generator=generator) * 2 - 1 for _ in range(2))
    noise = torch.randn(1, count, 2, generator=generator) * SIGMA
    next_obs = obs + 0.5 * action - 0.2 * obs + noise[..., :1]
    reward = (obs + action)[..., 0] + noise[..., 1]
    return model_rows(obs, action, reward, next_obs, torch.zeros(1, count))


def make(
    seeds: tuple[int, ...] = (0,), members: int = 3, elites: int | None = None, **settings: Any
) -> DynamicsTrainer:
    model = MLPMOPOEnsembleModel(
        1, 1, (16, 16), members, num_elites=elites, rng=Rng(seeds, "model")
    )
    short = {"model_batch_size": 32, "model_patience": 2, "model_patience_updates": 1}
    given: dict[str, Any] = short | settings
    return DynamicsTrainer(model, DynamicsConfig(**given), seeds)


def weights(trainer: DynamicsTrainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


def test_mean_and_deviation_of_a_linear_gaussian_system_are_recovered() -> None:
    trainer = make(
        members=2,
        model_batch_size=128,
        model_max_epochs=12,
        model_patience=12,
        model_learning_rate=8e-3,
        model_min_improvement=0.0,
    )
    result = trainer.fit(linear_rows(4000))
    grid = torch.tensor([[-0.5, 0.5], [0.0, 0.0], [0.5, 0.5], [0.7, -0.7]])
    means, logvars = trainer.model.predict_distribution(grid[:, :1], grid[:, 1:])
    truth = torch.stack((0.5 * grid[:, 1] - 0.2 * grid[:, 0], grid.sum(1)), 1)
    assert (means - truth).abs().max() < 0.1
    assert ((0.5 * logvars).exp() / SIGMA - 1).abs().max() < 0.25
    # No model is better than the noise; errors are shares of the targets' variance.
    variance = torch.tensor([0.5**2 + 0.2**2, 2.0]) / 3 + SIGMA.square()
    floor = (SIGMA.square() / variance).mean()
    assert (result["holdout_error"] / floor - 1).abs().max() < 0.15


def test_inputs_are_standardised_by_the_rows_fitted_on() -> None:
    rows = linear_rows(500)
    rows[..., 0] = 5 + 3 * rows[..., 0]
    rows[..., 1] = 7  # constant
    trainer = make(model_max_epochs=1)
    held, kept = trainer._split(rows)
    trainer.fit(rows)
    fitted = rows[0, kept[0], :2]
    model = trainer.model
    torch.testing.assert_close(model.input_mean[0, 0, 0], fitted.mean(0))
    assert abs(model.input_scale[0, 0, 0, 0] * fitted[:, 0].std(correction=0) - 1) < 1e-4
    assert model.input_scale[0, 0, 0, 1] == 1
    assert sorted([*held[0].tolist(), *kept[0].tolist()]) == list(range(500))
    assert held.shape == (1, 100)


def test_the_hold_out_has_a_largest_size() -> None:
    held, kept = make(model_holdout_max=30)._split(linear_rows(500))
    assert held.shape == (1, 30)
    assert kept.shape == (1, 470)


def test_bootstrap_draws_with_replacement_once_and_shuffles_per_epoch() -> None:
    trainer = make()
    first = trainer._epoch_order(200)
    trainer.epoch.value = 1
    second = trainer._epoch_order(200)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sort(-1).values, second.sort(-1).values)
    unique = [len(set(row.tolist())) for row in first[0]]
    assert all(105 < count < 148 for count in unique)  # 1 - 1/e of 200 is 126
    assert not torch.equal(first[0, 0].sort().values, first[0, 1].sort().values)


def test_a_shuffle_shows_every_member_all_rows_in_its_own_order() -> None:
    order = make(model_bootstrap="shuffle")._epoch_order(50)
    torch.testing.assert_close(order.sort(-1).values, torch.arange(50).expand(1, 3, 50))
    assert not torch.equal(order[0, 0], order[0, 1])


def test_elites_are_the_members_of_least_hold_out_error() -> None:
    trainer = make(members=5, elites=2, model_max_epochs=2)
    rows = linear_rows(300)
    held, _ = trainer._split(rows)
    error = trainer.fit(rows)["holdout_error"]
    torch.testing.assert_close(error, trainer.holdout_errors(rows, held))  # restored
    assert set(trainer.model.elites[0].tolist()) == set(error[0].argsort()[:2].tolist())
    assert error[0, trainer.model.elites[0, 0]] == error.min()


def test_early_stop_goes_back_to_each_members_best() -> None:
    trainer = make(model_patience=2, model_min_gain=0.01)
    trainer.optimizer.rate.set(0.05)  # too large to stay at the best
    rows = linear_rows(120)
    held, kept = trainer._split(rows)
    trainer.fit_statistics(rows, kept)
    before = trainer.holdout_errors(rows, held)[0]
    seen = []
    note = trainer._note

    def spy(error: torch.Tensor, steps: int) -> None:
        assert steps == 3
        seen.append(error.clone())
        note(error, steps)

    trainer._note = spy  # type: ignore[method-assign]
    trainer.fit(rows)
    errors = torch.stack(seen)[:, 0]  # [epochs, M]
    assert len(seen) == int(trainer.epochs[0])
    best, mark, stale = before, before.mean(), 0
    for number, error in enumerate(errors):
        best = torch.minimum(best, error)
        gained = best.mean() < mark - max(0.01 * float(mark), 0.01)
        mark, stale = (best.mean(), 0) if gained else (mark, stale + 1)
        assert (stale == 2) == (number == len(errors) - 1)
    assert (errors[-1] > best).any()
    torch.testing.assert_close(trainer.holdout_errors(rows, held)[0], best)


def test_patience_counts_gradient_steps_where_epochs_are_short() -> None:
    trainer = make(model_patience=1, model_patience_updates=10, model_min_gain=100.0)
    trainer.fit(linear_rows(120))  # 96 rows are three steps an epoch
    assert trainer.epochs[0] == 4
    trainer = make(model_patience=5, model_patience_updates=10, model_min_gain=100.0)
    trainer.fit(linear_rows(120))
    assert trainer.epochs[0] == 5


def test_a_fit_never_returns_a_worse_model_than_it_began_with() -> None:
    trainer = make()
    rows = linear_rows(600)
    trainer.fit(rows)
    held, _ = trainer._split(rows)
    before, error = weights(trainer), trainer.holdout_errors(rows, held)
    trainer.optimizer.rate.set(10.0)
    trainer.fit(rows)
    torch.testing.assert_close(trainer.holdout_errors(rows, held), error)
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, before[name], msg=name)


def test_a_fit_begins_with_a_new_optimizer_state() -> None:
    rows = linear_rows(160)
    trainer = make(model_max_epochs=1)
    trainer.fit(rows)
    trainer.fit(rows)
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Adam)
    assert optimizer.step_count.tolist() == [4.0]  # 128 rows in batches of 32


@pytest.mark.parametrize("most", [1000, 30])
def test_a_row_held_out_was_never_fitted_on_before(most: int) -> None:
    trainer = make(model_holdout_max=most)
    fitted: set[int] = set()
    for count in (50, 120, 121, 400, 1000):
        held, kept = (part[0].tolist() for part in trainer._split(linear_rows(count)))
        assert len(held) == min(count // 5, most)
        assert sorted(held + kept) == list(range(count))
        assert not fitted & set(held)
        fitted |= set(kept)


def test_held_out_rows_are_spread_over_the_table() -> None:
    shares = torch.zeros(100)
    for seed in range(300):
        shares[make((seed,))._split(linear_rows(100))[0][0]] += 1 / 300
    # One of five rows each, by chance: six deviations of a mean of 300 draws.
    assert (shares - 0.2).abs().max() < 6 * (0.2 * 0.8 / 300) ** 0.5


def test_new_statistics_leave_the_means_as_they_were() -> None:
    trainer = make((0, 1))
    rows = torch.cat((linear_rows(200, seed=0), linear_rows(200, seed=1)))
    trainer.fit(rows)
    obs, action = rows[..., :1], rows[..., 1:2]
    mean, logvar = trainer.model.predict_distribution(obs, action)
    moved = rows.clone()
    moved[..., 0] = 7 * rows[..., 0] - 3
    moved[..., 2:4] = 0.2 * rows[..., 2:4] + 5  # smaller targets: bounds widen, nothing is cut
    trainer.fit_statistics(moved)
    after, spread = trainer.model.predict_distribution(obs, action)
    torch.testing.assert_close(after, mean, atol=1e-4, rtol=1e-4)
    # The lower bound stays where moving it would tighten it, so the least ones move a little.
    torch.testing.assert_close(spread, logvar, atol=0.05, rtol=0)
    torch.testing.assert_close(
        trainer.model.target_mean[:, 0, 0], moved[..., 2:4].mean(1), atol=1e-4, rtol=1e-4
    )


def test_a_member_that_diverges_is_kept_out() -> None:
    trainer = make(members=3, elites=2, model_max_epochs=1)
    with torch.no_grad():
        trainer.model.layers[0].weight[0, 1] = torch.nan  # type: ignore[operator]
    error = trainer.fit(linear_rows(100))["holdout_error"]
    assert set(trainer.model.elites[0].tolist()) == {0, 2}
    assert error.isfinite().all()


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_of_seeds_fits_as_each_would_alone(shared: bool) -> None:
    rows = [linear_rows(150, seed=0), linear_rows(150, seed=0 if shared else 1)]
    group = make((0, 1), model_patience=1)
    table = rows[0] if shared else torch.cat(rows)
    for _ in range(2):
        group.fit(table)
    assert group.epochs[0] != group.epochs[1], "choose data on which one seed stops first"
    for seed in range(2):
        alone = make((seed,), model_patience=1)
        for _ in range(2):
            alone.fit(rows[seed])
        assert alone.epochs[0] == group.epochs[seed]
        for name, tensor in weights(alone).items():
            torch.testing.assert_close(
                tensor[0], weights(group)[name][seed], atol=1e-4, rtol=1e-3, msg=name
            )
        single, stacked = alone.optimizer, group.optimizer
        assert isinstance(single, Adam)
        assert isinstance(stacked, Adam)
        torch.testing.assert_close(single.step_count[0], stacked.step_count[seed])


def test_a_fit_that_is_cut_between_epochs_goes_on_as_if_it_had_not_been() -> None:
    rows = linear_rows(200)
    whole = make(model_max_epochs=4, model_patience=4)
    whole.fit(rows)
    whole.fit(rows)
    cut, saved = make(model_max_epochs=4, model_patience=4), {}
    cut.fit(rows)

    def save(trainer: DynamicsTrainer) -> None:
        if trainer.epoch.value == 2:
            saved["state"] = copy.deepcopy((trainer.state_dict(), trainer.model.state_dict()))

    cut.fit(rows, save)
    resumed = make(model_max_epochs=4, model_patience=4)
    resumed.load_state_dict(saved["state"][0])
    resumed.model.load_state_dict(saved["state"][1])
    resumed.fit(rows)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    assert torch.equal(whole.best_error, resumed.best_error)


def test_the_state_is_cut_per_seed_and_finite() -> None:
    trainer = make((4, 5))
    state = slice_seed(trainer.state_dict(), 1)
    alone = make((5,))
    alone.load_state_dict(state)
    assert trainer.best_error.isfinite().all()
    assert "model" not in state, "the weights are the learner's to save"


def test_a_step_reads_nothing_back_and_can_be_traced() -> None:
    trainer = make((0, 1))
    rows = torch.cat((linear_rows(32), linear_rows(32))).unsqueeze(1).expand(-1, 3, -1, -1)
    for active in (None, torch.tensor([True, False])):
        with no_host_reads():
            trainer.step(rows, active)
    twin = copy.deepcopy(trainer)
    before = weights(twin)
    made = trace_once(Source("fit", trainer.step, {"trainer": trainer}), (rows.contiguous(), None))
    expected = twin.step(rows)
    assert made.output == dict.fromkeys(expected, "tensor")
    moved = weights(trainer)
    for name, tensor in weights(twin).items():  # tracing runs the step once, taken apart
        torch.testing.assert_close(moved[name], tensor, atol=1e-6, rtol=1e-4, msg=name)
    assert not torch.equal(before["layers.0.weight"], moved["layers.0.weight"])


def test_a_fixed_number_of_updates_learns_from_mappings() -> None:
    trainer = make(members=3)
    rows = linear_rows(96)[0]
    batch = {
        "obs": rows[:, :1],
        "actions": rows[:, 1:2],
        "next_obs": rows[:, :1] + rows[:, 2:3],
        "rewards": rows[:, 3],
        "dones": rows[:, 4],
    }
    first = trainer.update(batch).metrics
    assert set(first) == {
        "mopo_model_loss",
        "reward_mae",
        "delta_obs_mae",
        "ensemble_disagreement",
    }
    for _ in range(60):
        last = trainer.update(batch, per_member=True).metrics
    assert last["mopo_model_loss"] < first["mopo_model_loss"]
    assert last["reward_mae"] < first["reward_mae"]


def test_rows_dealt_out_reach_one_member_each() -> None:
    trainer = make(members=2)
    before = weights(trainer)["layers.0.weight"]
    rows = linear_rows(4)
    rows[0, 2:] = 0.0
    seen = []
    trainer.run_step = lambda dealt, _: seen.append(dealt) or {}  # type: ignore[func-returns-value]
    batch = {"obs": rows[0, :, :1], "actions": rows[0, :, 1:2], "dones": rows[0, :, 4]}
    batch |= {"next_obs": rows[0, :, :1] + rows[0, :, 2:3], "rewards": rows[0, :, 3]}
    trainer.update(batch, per_member=True)
    assert seen[0].shape == (1, 2, 2, 5)
    assert (seen[0][0, 1] == 0).all()
    assert torch.equal(before, weights(trainer)["layers.0.weight"])
    with pytest.raises(DataError, match="1 rows cannot be dealt out to 2 members"):
        trainer.update({name: value[:1] for name, value in batch.items()}, per_member=True)


def test_too_few_rows_for_the_hold_out_are_refused() -> None:
    with pytest.raises(DataError, match=r"4 transitions.*model_holdout_ratio = 0.2.*give 5 or"):
        make().fit(linear_rows(4))


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(DataError, match=r"\(1, 50, 4\).*\[1 or 1, N, 5\]"):
        make().fit(linear_rows(50)[..., :-1])


def test_seeds_must_be_as_many_as_the_models() -> None:
    with pytest.raises(ConfigError, match="built for 1 seeds, got 2"):
        DynamicsTrainer(make().model, DynamicsConfig(), (0, 1))


def test_a_buffers_rows_become_the_table_with_ends_that_are_terminations() -> None:
    buffer = ReplayBuffer(10, (1,), (1,), seeds=(0, 1))
    one = torch.ones(2, 1, 1).numpy()
    for terminated, truncated in ((False, False), (False, True), (True, False)):
        ends = [torch.full((2, 1), flag).numpy() for flag in (terminated, truncated)]
        buffer.add(one, one * 2, one[..., 0] * 3, one * 5, *ends)
    rows = buffer_rows(buffer)
    assert rows.shape == (2, 3, 5)
    assert rows[0].tolist() == [[1, 2, 4, 3, 0], [1, 2, 4, 3, 0], [1, 2, 4, 3, 1]]


def test_the_settings_stand_beside_those_of_an_algorithm() -> None:
    class Both(DynamicsConfig, SACConfig):
        """Settings of a model-based method."""

    config = Both(num_ensembles=3, num_critics=8)
    assert (config.num_ensembles, config.num_critics, config.model_batch_size) == (3, 8, 256)
    with pytest.raises(ConfigError, match="model_holdout_ratio must be < 1"):
        Both(model_holdout_ratio=1.0)
