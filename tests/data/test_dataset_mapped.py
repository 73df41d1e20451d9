"""Rows that stay on disk: the same batches and runs as in memory, in little memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.datasets import SWITCH, TOY, columns_of, rebuilt, toy_data, write_columns
from helpers.traces import request_of, traced
from rl_training.data import load_configured, load_transition_dataset
from rl_training.data.datasets import blocks as dataset_blocks
from rl_training.data.datasets.blank import BlankRows, DatasetShape
from rl_training.data.datasets.config import DatasetSettings, DatasetSource, open_configured
from rl_training.data.datasets.units import TaskSpec
from rl_training.data.datasets.view import DatasetView, view_of
from rl_training.data.datasets.writers import save_dataset
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mapped import MappedBuffer, packed_through
from rl_training.envs.factory import probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime import replay
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.compile import runner as accelerate
from rl_training.runtime.compile.cache import Program, Request
from rl_training.runtime.compile.equivalence import Undo, compare
from rl_training.runtime.compile.programs import (
    count_of_phase,
    counted,
    example_arguments,
    replay_sources,
)
from rl_training.runtime.compile.trace import owned_tensors, trace
from rl_training.runtime.compile.worker import build as build_request
from rl_training.runtime.train import train
from rl_training.testing.contract import build, small_config

PIXELS = SWITCH.model_copy(update={"obs_shape": (4, 4, 2), "obs_dtype": "uint8"})


def mapped_folder(folder: Path, size: int = 300, seed: int = 0, task: EnvSpec = TOY) -> Path:
    data = toy_data(size, seed, SWITCH if task is PIXELS else task)
    if task is PIXELS:
        rng = np.random.default_rng(seed)
        images = rng.integers(0, 256, (len(data), *PIXELS.obs_shape), np.uint8)
        data = rebuilt(columns_of(data), observations=images, next_observations=images[::-1])
    save_dataset(data, folder, "npy")
    return folder


def view(folder: Path, task: TaskSpec = TOY) -> DatasetView:
    return view_of([load_transition_dataset("npy", path=folder)], task)


def assert_same_draws(rows: DatasetView, draws: int = 4, **options: Any) -> None:
    ours, theirs = MappedBuffer(rows, **options), DatasetBuffer(rows.to_dataset(), **options)
    for draw in range(draws):
        size = 9 if draw == 2 else 16  # another size throws away what was read ahead
        found, expected = ours.sample(size), theirs.sample(size)
        for name, value in vars(expected).items():
            other = getattr(found, name)
            assert (value is None) == (other is None), name
            if value is not None:
                assert torch.equal(other, value), name
                assert other.dtype == value.dtype
                assert other.stride() == value.stride(), "kernels may round by layout"
    assert torch.equal(ours.rng.counter, theirs.rng.counter)
    assert ours.state_dict()["digest"] == theirs.state_dict()["digest"]


@pytest.mark.parametrize("task", [TOY, SWITCH, PIXELS], ids=["vectors", "discrete", "images"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_batches_are_those_of_rows_in_memory(task: EnvSpec, n_step: int, tmp_path: Path) -> None:
    rows = view(mapped_folder(tmp_path / "a", task=task), task)
    assert rows.is_mapped
    assert_same_draws(rows, n_step=n_step, seeds=(1, 2))


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_mix_may_have_mapped_and_loaded_sources(n_step: int, tmp_path: Path) -> None:
    folder = mapped_folder(tmp_path / "a")
    write_columns(tmp_path / "b.npz", columns_of(toy_data(80, 1)))
    settings = DatasetSettings(
        dataset_mix=(
            DatasetSource(kind="npy", path=str(folder), weight=1.0),
            DatasetSource(kind="npz", path=str(tmp_path / "b.npz"), weight=3.0),
        ),
        normalize_rewards=True,
        reward_scale=0.3,
        reward_shift=-1.0,
    )
    rows = open_configured(settings, TOY)
    assert rows.is_mapped
    assert rows.digest() == load_configured(settings, TOY).digest()
    assert_same_draws(rows, n_step=n_step)
    index = MappedBuffer(rows).sample(4000).index
    assert index is not None
    assert (index >= 300).float().mean().item() == pytest.approx(0.75, abs=0.03)


def test_nothing_is_calculated_before_rows_are_read(tmp_path: Path) -> None:
    settings = DatasetSettings(
        dataset_kind="npy",
        dataset_path=str(mapped_folder(tmp_path / "a")),
        reward_scale=2.0,
        normalize_dataset_actions=True,
    )
    rows = open_configured(settings, TOY)
    (data,) = rows.datasets
    assert all(dataset_blocks.is_mapped(column) for _, column in data.columns())
    picked = np.array([5, 299, 0])
    assert np.array_equal(rows.read("rewards", picked), 2 * data.rewards[picked])
    whole = load_configured(settings, TOY)
    assert np.array_equal(rows.read("actions", picked), whole.actions[picked])


def test_a_batch_read_ahead_is_of_no_account_in_the_state(tmp_path: Path) -> None:
    rows = view(mapped_folder(tmp_path / "a"))
    first, other = MappedBuffer(rows), MappedBuffer(rows, seeds=(5,))
    first.sample(8)
    state = first.state_dict()
    assert int(state["rng"]["counter"]) == 1
    other.sample(8)
    other.load_state_dict(state)
    assert torch.equal(first.sample(8).obs, other.sample(8).obs)
    first.example(8)
    assert torch.equal(first.sample(8).obs, other.sample(8).obs), "an example leaves no trace"


@pytest.mark.parametrize("task", [TOY, SWITCH, PIXELS], ids=["vectors", "discrete", "images"])
def test_a_batch_survives_being_packed_for_one_transfer(task: EnvSpec, tmp_path: Path) -> None:
    batch = MappedBuffer(view(mapped_folder(tmp_path / "a", task=task), task)).sample(7)
    transfers: list[torch.Tensor] = []

    def transfer(packed: torch.Tensor) -> torch.Tensor:
        transfers.append(packed)
        return packed.clone()

    moved = packed_through(batch, transfer)
    assert len(transfers) == 1
    for name, value in vars(batch).items():
        if value is not None:
            assert torch.equal(getattr(moved, name), value), name


# Runs


def offline(folder: Path, algo: str, storage: str, **changes: Any) -> TrainConfig:
    data = folder / "data"
    if not data.exists():
        spec = probe_env("Pendulum-v1", {})
        save_dataset(toy_data(300, 0, spec), data, "npy")
    settings = {
        "dataset_kind": "npy",
        "dataset_path": str(data),
        "dataset_storage": storage,
        "reward_scale": 0.1,
        **changes.pop("algo_kwargs", {}),
    }
    base: dict[str, Any] = {"eval_episodes": 1, "total_timesteps": 80, "run_name": storage}
    return small_config(algo, folder, algo_kwargs=settings, **(base | changes))


@pytest.mark.matrix
@pytest.mark.parametrize(("algo", "seeds"), [("iql", [3]), ("cql", [3, 5])])
def test_a_run_on_mapped_rows_ends_in_the_same_bits(
    algo: str, seeds: list[int], tmp_path: Path
) -> None:
    extra: dict[str, Any] = {"n_step": 2}
    if "normalize_observations" in get_algorithm_spec(algo).config_class.model_fields:
        extra["normalize_observations"] = True
    states = []
    for storage in ("device", "mapped"):
        result = train(offline(tmp_path, algo, storage, seeds=seeds, algo_kwargs=extra))
        runs = result.per_seed or (result,)
        states.append([dict(load_checkpoint(run.checkpoint_path).states) for run in runs])
    assert not compare_states(*({"all": state} for state in states))


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_a_mapped_run_resumes_to_the_bit(seeds: list[int], tmp_path: Path) -> None:
    report = verify_resume(offline(tmp_path, "iql", "mapped", seeds=seeds), 37)
    assert report.identical, report.lines()


def sources(folder: Path, storage: str) -> Any:
    config = offline(folder, "iql", storage)
    learner, env = build("iql", (3, 5), **config.algo_kwargs)
    buffer, notes = replay.load_buffer(learner, env)
    names = list(get_algorithm_spec("iql").metrics)
    return learner, env, notes, replay_sources(learner, buffer, names)


@pytest.mark.matrix
def test_an_update_of_mapped_rows_takes_the_batch_as_an_argument(tmp_path: Path) -> None:
    learner, env, notes, found = sources(tmp_path, "mapped")
    assert "stays on disk" in notes[-1]
    for name, source in found.items():
        with counted(learner, count_of_phase(learner, name)):
            arguments = example_arguments(source, learner, env, 1)
            undo = Undo(source)
            made = trace(source, arguments)
            undo()
            assert not any(path.startswith("replay") for path in made.inputs)
            owned = owned_tensors(source.owners)
            state = tuple(owned[path].detach() for path in made.inputs)

            def call(inputs: list[torch.Tensor], graph: Any = made.graph) -> Any:
                with torch.no_grad():
                    return graph(*inputs)

            program = Program(call, state, made.arguments, made.output)
            for _ in range(2):
                assert source.feed is not None
                gap = compare(source, program, source.feed())
                assert gap is not None
                assert gap.size < 1e-3, f"{name}: {gap}"


# Compiling


@pytest.mark.matrix
@pytest.mark.parametrize("storage", ["device", "mapped"])
def test_the_compiling_process_traces_the_same_program_without_the_dataset(
    storage: str, tmp_path: Path
) -> None:
    config = offline(tmp_path, "iql", storage, seeds=[3, 5], algo_kwargs={"n_step": 2})
    learner, env = build("iql", (3, 5), **config.algo_kwargs)
    buffer, _ = replay.load_buffer(learner, env)
    ours = replay_sources(learner, buffer, list(get_algorithm_spec("iql").metrics))
    (tmp_path / "data").rename(tmp_path / "gone")
    request = request_of(config, env, buffer, ("update-0",))
    other, _, _, theirs = build_request(request)
    for name, source in ours.items():
        assert traced(learner, source, env) == traced(other, theirs[name], env)


def test_a_program_is_not_shared_by_datasets_of_another_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    class Refusing:
        def __init__(self, request: Request) -> None:
            asked.append(request)
            raise OSError("not here")

    monkeypatch.setattr(accelerate, "CompileJob", Refusing)
    spec = probe_env("Pendulum-v1", {})
    file = tmp_path / "a.npz"
    keys: dict[str, list[str]] = {"npz": [], "npy": []}
    for size in (120, 90):
        write_columns(file, columns_of(toy_data(size, 0, spec)))
        save_dataset(toy_data(size, 0, spec), tmp_path / "a", "npy", force=True)
        for kind, path, storage in (("npz", file, "device"), ("npy", tmp_path / "a", "mapped")):
            data = {"dataset_kind": kind, "dataset_path": str(path), "dataset_storage": storage}
            train(
                small_config(
                    "iql",
                    tmp_path,
                    total_timesteps=2,
                    eval_episodes=0,
                    accelerate="compile",
                    algo_kwargs=data,
                )
            )
            keys[kind].append(asked[-1].key)
    assert keys["npz"][0] != keys["npz"][1]
    assert keys["npy"][0] == keys["npy"][1], "a batch that is handed in has no number of rows"


def test_a_stand_in_takes_no_memory() -> None:
    shape = DatasetShape(
        rows=20_000_000,
        parts=1,
        obs_shape=(100,),
        obs_dtype="float32",
        action_shape=(5,),
        action_dtype="float32",
        mapped=False,
    )
    # 16 GB of rows, of which none is written to.
    batch = DatasetBuffer(BlankRows(shape)).sample(64)
    assert batch.obs.shape == (1, 64, 100)
    assert not batch.obs.any()


# Where rows go


def test_auto_maps_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = view(mapped_folder(tmp_path / "a"))
    loaded = replace(rows, datasets=(toy_data(300),))
    needed = 300 * 4 * (2 * 3 + 2 + 3)
    device = torch.device("cpu")

    def decided(storage: Any, free: float, what: DatasetView = rows) -> bool:
        monkeypatch.setattr(replay, "_free_bytes", lambda _: int(free))
        return replay.stays_on_disk(storage, what, device)

    assert DatasetBuffer(rows.to_dataset()).num_bytes == needed
    assert not decided("auto", needed / 0.8 + 1)
    assert decided("auto", needed / 0.8 - 1)
    assert not decided("device", needed)
    assert decided("mapped", 10 * needed)
    with pytest.raises(ConfigError, match=r"set algo_kwargs\.dataset_storage to mapped"):
        decided("device", needed - 1)
    for storage in ("auto", "device"):
        assert not decided(storage, needed, loaded)
        with pytest.raises(ConfigError, match="rl-training data convert SOURCE FOLDER --to npy"):
            decided(storage, needed - 1, loaded)
    with pytest.raises(ConfigError, match=r"dataset_storage is mapped, but .* data convert"):
        decided("mapped", needed, loaded)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_a_file_larger_than_memory_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a"
    save_dataset(toy_data(300), file, kind)
    settings = DatasetSettings(dataset_kind=kind, dataset_path=str(file))  # type: ignore[arg-type]
    assert len(open_configured(settings, TOY, room=100_000)) == 300
    with pytest.raises(DataError, match=r"GiB unpacked, but .* rl-training data convert"):
        open_configured(settings, TOY, room=10_000)


def test_columns_that_must_be_converted_are_not_mapped(tmp_path: Path) -> None:
    folder = mapped_folder(tmp_path / "a")
    doubles = np.load(folder / "observations.npy").astype(np.float64)
    np.save(folder / "observations.npy", doubles)
    rows = view(folder)
    assert not rows.is_mapped
    with pytest.raises(ConfigError, match="as float32 or uint8"):
        replay.stays_on_disk("mapped", rows, torch.device("cpu"))


def test_a_huge_column_is_recognised_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = toy_data(3000)
    before = rebuilt(columns_of(whole)).digest()
    monkeypatch.setattr(dataset_blocks, "DIGEST_BYTES", 4000)
    monkeypatch.setattr(dataset_blocks, "DIGEST_PIECES", 10)
    monkeypatch.setattr(dataset_blocks, "DIGEST_PIECE_BYTES", 240)  # 20 rows of observations
    columns = columns_of(whole)
    sampled = rebuilt(columns).digest()
    assert sampled == rebuilt(columns).digest() != before

    def changed(row: int) -> bool:
        other = columns_of(whole)
        other["observations"][row] += 1
        return rebuilt(other).digest() != sampled

    assert changed(0)
    assert changed(2999)
    assert changed(2980 // 9)
    assert not changed(100), "between the pieces"
