"""Batches of a fixed dataset: which rows, how often, for whom, and across a resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.datasets import SWITCH, TOY, columns_of, rebuilt, tiny_columns, toy_data, write_columns
from rl_training.algorithms.td3_bc import TD3BC
from rl_training.data.datasets.dataset import OfflineDataset, concatenate
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mapped import MappedBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.models.actor_with_critics import MLPTD3Model
from rl_training.rng import Rng
from rl_training.runtime.compile.runner import Accelerator
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import small_config


def toy(size: int = 400, seed: int = 0, task: EnvSpec = TOY) -> OfflineDataset:
    return toy_data(size, seed, task).in_learner_units(task)


def five_rows() -> OfflineDataset:
    """Episodes of 3 steps (truncated) and of 2 (terminated)."""
    return rebuilt(tiny_columns(), learner_units=True)


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


@pytest.mark.parametrize("task", [TOY, SWITCH])
def test_rows_are_those_of_the_dataset(task: EnvSpec) -> None:
    data = toy(task=task)
    buffer = DatasetBuffer(data, gamma=0.9)
    assert len(buffer) == len(data)
    batch = buffer.gather(torch.arange(len(data)).unsqueeze(0))
    for found, expected in (
        (batch.obs, data.observations),
        (batch.action, data.actions),
        (batch.reward, data.rewards),
        (batch.next_obs, data.next_observations),
        (batch.discount, np.float32(0.9) * ~data.terminations),
    ):
        assert np.array_equal(found[0].numpy(), expected)
    assert batch.action.dtype == (torch.int64 if task is SWITCH else torch.float32)


def test_all_seeds_share_one_copy_of_the_rows() -> None:
    one, many = DatasetBuffer(toy()), DatasetBuffer(toy(), seeds=range(5))
    assert many.num_bytes == one.num_bytes
    assert many.sample(7).obs.shape == (5, 7, 3)


def test_every_row_is_drawn_and_none_more_often_than_chance_allows() -> None:
    buffer = DatasetBuffer(toy(40))
    draws = 40_000
    index = buffer.sample(draws).index
    assert index is not None
    counts = torch.bincount(index[0], minlength=40)
    deviation = math.sqrt(draws / 40 * (1 - 1 / 40))
    assert (counts - draws / 40).abs().max() < 5 * deviation


@pytest.mark.parametrize("weights", [(3.0, 1.0, 1.0), (1.0, 1.0, 8.0)])
def test_a_mix_draws_its_sources_by_weight_and_every_row_of_each(
    weights: tuple[float, ...],
) -> None:
    sizes = (60, 20, 10)
    parts = [toy(size, seed) for seed, size in enumerate(sizes)]
    buffer = DatasetBuffer(concatenate(parts, weights), seeds=(1, 2))
    draws = 20_000
    index = buffer.sample(draws).index
    assert index is not None
    for member in index:
        counts = torch.bincount(member, minlength=90)
        assert counts.shape == (90,)
        assert (counts > 0).all(), "a row cannot be reached"
        for part, weight in zip(torch.split(counts, list(sizes)), weights, strict=True):
            share = weight / sum(weights)
            deviation = math.sqrt(draws * share * (1 - share))
            assert abs(part.sum().item() - draws * share) < 5 * deviation
            each = draws * share / len(part)
            assert (part - each).abs().max() < 5 * math.sqrt(each)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_seed_draws_the_same_batches_alone_and_in_a_group(mixed: bool) -> None:
    data = concatenate([toy(), toy(seed=1)], (2.0, 1.0)) if mixed else toy()
    group = DatasetBuffer(data, seeds=(3, 8))
    for index, seed in enumerate((3, 8)):
        alone = DatasetBuffer(data, seeds=(seed,))
        other = DatasetBuffer(data, seeds=(3, 8))
        for _ in range(3):
            ours, theirs = other.sample(16), alone.sample(16)
            assert torch.equal(ours.obs[index], theirs.obs[0])
            assert torch.equal(ours.reward[index], theirs.reward[0])
    drawn = group.sample(16).index
    assert drawn is not None
    assert not torch.equal(drawn[0], drawn[1])


# Statistics


@pytest.mark.parametrize("weights", [(1.0, 3.0), (5.0, 1.0)])
def test_observations_are_standardised_as_batches_of_a_mix_show_them(
    weights: tuple[float, float],
) -> None:
    low, high = toy(300), toy(20, seed=1)
    high = replace(
        high, observations=high.observations + 4.0, next_observations=high.next_observations + 4.0
    )
    data = concatenate([low, high], weights)
    learner = TD3BC(model=MLPTD3Model(3, 2, (8,), rng=Rng((0, 1), "model")), seeds=(0, 1))
    buffer = DatasetBuffer(data, seeds=(0, 1))
    learner.see_data(buffer)
    share = np.array(weights) / sum(weights)
    means = np.stack([low.observations.mean(0), high.observations.mean(0)]).astype(np.float64)
    squares = np.stack([np.square(d.observations, dtype=np.float64).mean(0) for d in (low, high)])
    mean = share @ means
    variance = share @ squares - mean**2
    for seed in range(2):
        np.testing.assert_allclose(learner.obs_norm.mean[seed, 0], mean, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(learner.obs_norm.variance[seed, 0], variance, rtol=1e-3)
    of_dataset = data.observation_statistics()
    np.testing.assert_allclose(learner.obs_norm.mean[0, 0], of_dataset[0], rtol=1e-4, atol=1e-4)
    drawn = learner.normalize(buffer.sample(20_000).obs)
    assert drawn.mean((1,)).abs().max() < 0.05
    assert (drawn.var(1) - 1).abs().max() < 0.1


def test_the_weights_of_the_parts_add_up_to_all_rows() -> None:
    buffer = DatasetBuffer(concatenate([toy(30), toy(10)], (1.0, 3.0)))
    assert buffer.parts() == [(slice(0, 30), 10.0), (slice(30, 40), 30.0)]
    assert DatasetBuffer(toy(30)).parts() == [(slice(0, 30), 30.0)]


# Several steps


def test_n_step_sums_stop_at_the_ends_of_episodes() -> None:
    buffer = DatasetBuffer(five_rows(), gamma=0.5, n_step=3)
    batch = buffer.gather(rows(0, 1, 2, 3, 4))
    # Rewards 1 2 3 | 4 5: the first episode is cut, so it bootstraps, the second terminates.
    expected = [1 + 2 / 2 + 3 / 4, 2 + 3 / 2, 3.0, 4 + 5 / 2, 5.0]
    assert batch.reward.tolist() == [expected]
    assert batch.discount.tolist() == [[0.125, 0.25, 0.5, 0.0, 0.0]]
    assert batch.next_obs[0, :3, 0].tolist() == [3.0, 3.0, 3.0]


def test_n_step_sums_do_not_run_from_one_source_into_the_next() -> None:
    columns = tiny_columns() | {"terminations": np.zeros(5, bool), "truncations": np.zeros(5, bool)}
    endless = rebuilt(columns, learner_units=True)
    buffer = DatasetBuffer(concatenate([endless, endless], (1.0, 1.0)), gamma=0.5, n_step=3)
    batch = buffer.gather(rows(4, 9, 3))
    assert batch.reward.tolist() == [[5.0, 5.0, 6.5]]
    assert batch.discount.tolist() == [[0.5, 0.5, 0.25]]


def test_n_step_sums_equal_a_slow_count() -> None:
    data = toy(200)
    batch = DatasetBuffer(data, gamma=0.9, n_step=4).gather(torch.arange(200).unsqueeze(0))
    for row in range(200):
        total, power, last = 0.0, 1.0, row
        for last in range(row, min(row + 4, 200)):
            total += power * float(data.rewards[last])
            power *= 0.9
            if data.ends[last]:
                break
        power = 0.0 if data.terminations[last] else power
        assert batch.reward[0, row].item() == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert batch.discount[0, row].item() == pytest.approx(power, rel=1e-5)
        assert np.array_equal(batch.next_obs[0, row].numpy(), data.next_observations[last])


# Across a resume


def test_the_state_continues_the_draws_and_holds_no_rows() -> None:
    first, other = DatasetBuffer(toy()), DatasetBuffer(toy(), seeds=(5,))
    first.sample(9)
    state = first.state_dict()
    assert state.keys() == {"rng", "digest"}
    other.load_state_dict(state)
    assert torch.equal(first.sample(9).obs, other.sample(9).obs)


def test_another_dataset_is_refused() -> None:
    state = DatasetBuffer(toy()).state_dict()
    with pytest.raises(CheckpointError, match="is not the one this run was trained on"):
        DatasetBuffer(toy(seed=1)).load_state_dict(state)
    weighted = [DatasetBuffer(concatenate([toy(), toy()], (1.0, w))) for w in (1.0, 2.0)]
    with pytest.raises(CheckpointError, match="another digest"):
        weighted[0].load_state_dict(weighted[1].state_dict())


def offline_run(folder: Path, **changes: Any) -> Any:
    return small_config("td3_bc", folder, eval_episodes=1, **changes)


def test_a_run_is_not_resumed_on_a_file_that_has_changed(tmp_path: Path) -> None:
    task = load_checkpoint(train(offline_run(tmp_path, total_timesteps=1)).checkpoint_path)
    spec = EnvSpec.model_validate(task.header["env_spec"])
    file = tmp_path / "data.npz"

    def write(seed: int) -> None:
        write_columns(file, columns_of(toy_data(100, seed, spec)))

    write(0)
    settings = {"dataset_kind": "npz", "dataset_path": str(file)}
    cut = train(offline_run(tmp_path, algo_kwargs=settings), stop_at=45)
    write(1)
    with pytest.raises(CheckpointError, match="bring it back, or start a new run"):
        resume_training(cut.run_dir)
    write(0)
    assert resume_training(cut.run_dir).metrics["global_step"] == 160


def test_an_offline_checkpoint_holds_neither_rows_nor_a_collector(tmp_path: Path) -> None:
    saved = load_checkpoint(train(offline_run(tmp_path)).checkpoint_path)
    assert "collector" not in saved.states
    assert saved.states["replay"].keys() == {"rng", "digest"}
    assert not saved.manifest.segments


@pytest.mark.parametrize("cut", [None, 33, 45, 63])
def test_a_run_changes_over_to_programs_at_one_update_wherever_it_is_cut(
    cut: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_at: list[int] = []

    def programs(self: Accelerator, sources: object) -> dict[str, Any]:
        changed_at.append(self.learner.num_updates.value)
        return {}

    monkeypatch.setattr(Accelerator, "first_update", lambda *_: 50)
    monkeypatch.setattr(Accelerator, "prepare", lambda *_: None)
    monkeypatch.setattr(Accelerator, "programs", programs)
    config = offline_run(tmp_path, log_interval=1000, checkpoint_interval=0)
    config = config.replace(algo_kwargs=config.algo_kwargs | {"eval_interval": 0})
    result = train(config, stop_at=cut)
    if cut is not None:
        resume_training(result.run_dir)
    assert changed_at[0] == 50


# The action that the data took next


def test_the_next_action_is_that_of_the_row_after_and_masked_at_ends_of_episodes() -> None:
    buffer = DatasetBuffer(five_rows(), next_actions=True)
    batch = buffer.gather(rows(0, 1, 2, 3, 4))
    assert batch.next_action is not None
    assert batch.next_action_mask is not None
    # Row 2 is truncated and row 4 terminates: what follows there is of another episode, or nothing.
    assert batch.next_action_mask.tolist() == [[1.0, 1.0, 0.0, 1.0, 0.0]]
    known = batch.next_action_mask[0].bool()
    torch.testing.assert_close(batch.next_action[0, known, 0], torch.tensor([0.2, 0.3, 0.5]))


def test_the_next_action_of_several_steps_is_that_after_the_last() -> None:
    buffer = DatasetBuffer(five_rows(), n_step=2, next_actions=True)
    batch = buffer.gather(rows(0, 1, 2, 3, 4))
    assert batch.next_action is not None
    assert batch.next_action_mask is not None
    assert batch.next_action_mask.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
    assert batch.next_action[0, 0, 0] == pytest.approx(0.3)


def test_a_mix_has_no_next_action_where_its_parts_meet() -> None:
    mix = concatenate([five_rows(), five_rows()])
    batch = DatasetBuffer(mix, next_actions=True).gather(torch.arange(10).unsqueeze(0))
    assert batch.next_action_mask is not None
    assert batch.next_action_mask.tolist() == [[1.0, 1.0, 0.0, 1.0, 0.0] * 2]


@pytest.mark.parametrize("task", [TOY, SWITCH])
@pytest.mark.parametrize("n_step", [1, 3])
def test_next_actions_change_nothing_else_of_a_batch(task: EnvSpec, n_step: int) -> None:
    plain = DatasetBuffer(toy(task=task), seeds=(3, 4), n_step=n_step).sample(16)
    more = DatasetBuffer(toy(task=task), seeds=(3, 4), n_step=n_step, next_actions=True).sample(16)
    assert plain.next_action is None
    assert plain.next_action_mask is None
    for name, value in vars(plain).items():
        assert value is None or torch.equal(value, getattr(more, name)), name
    assert more.next_action is not None
    assert more.next_action.shape == more.action.shape
    assert more.next_action.dtype == more.action.dtype


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_on_disk_give_the_same_next_actions(n_step: int) -> None:
    options: dict[str, Any] = {"seeds": (3, 4), "n_step": n_step, "next_actions": True}
    here, there = DatasetBuffer(toy(), **options), MappedBuffer(toy(), **options)
    for _ in range(3):
        first, second = here.sample(16), there.sample(16)
        for name in ("action", "reward", "next_obs", "next_action", "next_action_mask"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
