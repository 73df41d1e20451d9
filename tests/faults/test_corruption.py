"""Damage to any file of a checkpoint: found, named, and passed over for the one before (R8)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.faults import Tried
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpointing import (
    list_checkpoints,
    resolve_checkpoint,
    verify_checkpoint,
)
from rl_training.experiment.registry import algorithm_names
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent, resume_training
from rl_training.testing.contract import small_config

FLIPS, CUTS = 200, 50


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def damages(path: Path, chance: random.Random) -> Iterator[tuple[Path, bytes]]:
    """Files and what becomes of them: flipped bits and truncations, over all files alike."""
    files = files_of(path)
    for number in range(FLIPS):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        yield file, bytes(data)
    for number in range(CUTS):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        yield file, bytes(data[: chance.randrange(len(data))])


def is_passed_over(run: Path, newest: Path, older: Path, file: Path) -> bool:
    """Whether the damage is found, its file named, and the checkpoint before it taken."""
    told: list[str] = []
    found = resolve_checkpoint(run, warn=told.append)
    return found == older and len(told) == 1 and file.name in told[0] and newest.name in told[0]


def missed(run: Path, chance: random.Random) -> tuple[int, list[str]]:
    (_, older), (_, newest) = list_checkpoints(run)[-2:]
    count, unnoticed = 0, []
    for file, damaged in damages(newest, chance):
        original = file.read_bytes()
        file.unlink()  # a segment may be shared with the checkpoint before, which stays whole
        file.write_bytes(damaged)
        count += 1
        if not is_passed_over(run, newest, older, file):
            unnoticed.append(file.name)
        file.write_bytes(original)
    verify_checkpoint(newest)
    return count, unnoticed


def check(algo: str, folder: Path, tried: Tried) -> None:
    run = train(small_config(algo, folder, total_timesteps=100, eval_episodes=0)).run_dir
    count, unnoticed = missed(run, random.Random(algo))
    tried("flipped bits and truncations", algo, count, len(unnoticed))
    assert unnoticed == []
    assert count == FLIPS + CUTS


def test_all_of_250_damages_are_found_named_and_passed_over(tried: Tried, tmp_path: Path) -> None:
    check("dqn", tmp_path, tried)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algo", [name for name in algorithm_names() if name != "dqn"])
def test_all_of_250_damages_of_every_method_are_found(
    algo: str, tried: Tried, tmp_path: Path
) -> None:
    check(algo, tmp_path, tried)


def test_nothing_is_used_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = train(small_config("dqn", tmp_path, total_timesteps=100, eval_episodes=0)).run_dir
    (before, _), (_, newest) = list_checkpoints(run)[-2:]
    for file in files_of(newest):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.unlink()
        file.write_bytes(data)
    told: list[str] = []
    assert load_agent(run, warn=told.append).step == before
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_agent(newest)
    resumed = resume_training(run, warn=told.append)
    assert resumed.metrics["global_step"] == 100
    assert [newest.name in text for text in told] == [True, True]
    verify_checkpoint(resumed.checkpoint_path)
