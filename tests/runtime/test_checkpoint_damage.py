"""Damage and forgery: found before anything is used, with the file named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import Ring, save
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpointing import (
    load_checkpoint,
    load_single_file,
    open_checkpoint,
    prune_checkpoints,
    read_manifest,
    resolve_checkpoint,
    save_single_file,
    verify_checkpoint,
)

KINDS = ("manifest.json", "learner.safetensors", "segments/replay-000000000001.safetensors")


def checkpoint(run: Path) -> Path:
    ring = Ring()
    ring.add(20)
    return save(run, 5, ring)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as someone would who knows how its digest is made."""
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["manifest_sha256"]
    change(fields)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_bytes(json.dumps(fields, indent=1).encode() + b"\n")


# -- accidents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_found_and_its_file_named(tmp_path: Path, kind: str) -> None:
    path = checkpoint(tmp_path)
    original = (path / kind).read_bytes()
    positions = range(len(original) * 8)
    for position in random.Random(0).sample(positions, min(1500, len(positions))):
        data = bytearray(original)
        data[position // 8] ^= 1 << position % 8
        (path / kind).write_bytes(data)
        with pytest.raises(CheckpointError, match=kind):
            load_checkpoint(path)
    (path / kind).write_bytes(original)
    load_checkpoint(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_found_and_its_file_named(tmp_path: Path, kind: str) -> None:
    path = checkpoint(tmp_path)
    original = (path / kind).read_bytes()
    for length in [*range(0, len(original), 1 + len(original) // 50), len(original) - 1]:
        (path / kind).write_bytes(original[:length])
        with pytest.raises(CheckpointError, match=kind):
            verify_checkpoint(path)
    (path / kind).write_bytes(original + b"\n")
    with pytest.raises(CheckpointError, match=kind):
        verify_checkpoint(path)


def test_every_flip_and_truncation_of_a_single_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "agent.rlt"
    states = {"a": {"x": torch.arange(5.0), "é": torch.ones(2, dtype=torch.bool)}, "b": {"n": 3}}
    save_single_file(path, header={"name": "café"}, states=states)
    original = path.read_bytes()
    for position in range(len(original) * 8):
        data = bytearray(original)
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"agent\.rlt"):
            load_single_file(path)
    for length in range(0, len(original), 11):
        path.write_bytes(original[:length])
        with pytest.raises(CheckpointError, match=r"agent\.rlt"):
            load_single_file(path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_file_is_named(tmp_path: Path, kind: str) -> None:
    path = checkpoint(tmp_path)
    (path / kind).unlink()
    with pytest.raises(CheckpointError, match=f"{kind} is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["extra.txt", "segments/replay-9.safetensors", "folder/"])
def test_extra_file_or_folder_is_named(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path)
    if name.endswith("/"):
        (path / name).mkdir()
    else:
        (path / name).write_text("x")
    with pytest.raises(CheckpointError, match=name.rstrip("/")):
        verify_checkpoint(path)


def test_newest_good_checkpoint_is_chosen_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[3] / "manifest.json").unlink()
    data = bytearray((paths[2] / "learner.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[2] / "learner.safetensors").write_bytes(data)
    told: list[str] = []
    assert resolve_checkpoint(tmp_path, warn=told.append) == paths[1]
    assert ["step_4" in told[0], "step_3: learner.safetensors" in told[1]] == [True, True]
    assert open_checkpoint(tmp_path, warn=told.append).step == 2
    with pytest.raises(CheckpointError, match="step_3: learner"):
        resolve_checkpoint(tmp_path, step=3)
    for path in paths[:2]:
        (path / "learner.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tried 4.*step_4.*step_3.*step_2.*step_1"):
        open_checkpoint(tmp_path)


def test_prune_never_removes_the_only_good_checkpoint(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "learner.safetensors").write_bytes(b"short")
    (paths[1] / "manifest.json").write_bytes(b"{}")
    assert prune_checkpoints(tmp_path, 1) == []
    save(tmp_path, 4)
    assert prune_checkpoints(tmp_path, 1) == [3, 2, 1]
    assert resolve_checkpoint(tmp_path).name == "step_4"


# -- forgery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "segments/../../x.safetensors", "a\\b.safetensors",
     "C:x.safetensors", "learner.pkl", "x\u0000.safetensors", "segments/a/b.safetensors"],
)  # fmt: skip
def test_path_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path)

    def add(fields: dict[str, Any]) -> None:
        fields["files"][name] = {"size": 1, "sha256": "0" * 64}

    forge(path, add)
    with pytest.raises(CheckpointError, match="unusable path"):
        read_manifest(path)


@pytest.mark.parametrize("kind", [*KINDS, "segments"])
def test_symbolic_link_is_refused_even_if_its_content_is_right(tmp_path: Path, kind: str) -> None:
    path = checkpoint(tmp_path)
    outside = tmp_path / "outside"
    (path / kind).rename(outside)
    (path / kind).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{kind} is a link"):
        load_checkpoint(path)


def test_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (path / "learner.safetensors").unlink()
    os.mkfifo(path / "learner.safetensors")
    with pytest.raises(CheckpointError, match=r"learner\.safetensors is a link, folder or device"):
        load_checkpoint(path)


def set_field(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: Any) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_field("step", value="5"),
        set_field("step", value=True),
        set_field("files", value=[]),
        set_field("files", "learner.safetensors", value={"size": -1, "sha256": "0" * 64}),
        set_field("files", "learner.safetensors", value={"size": 1, "sha256": "x"}),
        set_field("files", "learner.safetensors", value={"size": 1}),
        set_field("states", "../x", value={}),
        set_field("states", "learner", value={"$tensor": "/absent"}),
        set_field("states", "learner", value={"$pickle": "gASV"}),
        set_field("states", "learner", value={"w": {"$array": "/w", "dtype": "O"}, "n": 1}),
        set_field("header", value={"$tensor": "/w"}),
        set_field("segments", 0, "oldest", value=30),
        set_field("segments", 0, "total", value=21),
        set_field("segments", 0, "files", 1, "start", value=9),
        set_field("segments", 0, "files", 1, "path", value="learner.safetensors"),
        set_field("segments", 0, "files", 1, "probes", value={}),
        set_field("segments", 0, "files", value=7),
        set_field("unknown", value=1),
        set_field("schema_version", value=0),
    ],
)
def test_forged_manifest_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = checkpoint(tmp_path)
    forge(path, change)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_forged_rows_are_refused_when_restored(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    name = "segments/replay-000000000001.safetensors"
    other = save_single_file(tmp_path / "x", header={}, states={"obs": torch.ones(2)}).read_bytes()
    (path / name).write_bytes(other)
    record = {"size": len(other), "sha256": hashlib.sha256(other).hexdigest()}
    forge(path, set_field("files", name, value=record))
    with pytest.raises(CheckpointError, match=f"{name} does not hold 8 rows"):
        load_checkpoint(path).restore_segments("replay", Ring(seeds=1))


def test_newer_schema_says_to_upgrade(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    forge(path, set_field("schema_version", value=2))
    with pytest.raises(CheckpointError, match="upgrade rl-training"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 500_000,
        b'{"schema_version": 1, "a": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"schema_version": ' + b"9" * 500_000 + b"}",
        b'{"schema_version": 1, "a": NaN}',
        b'{"schema_version": 1, "a": 1e999}',
        b'{"schema_version": 1, "a": "\xff"}',
        b"[" + b"{}," * 1_100_000 + b"{}]",
        b" " * (64 * 2**20 + 1),
        b"null",
        b"",
        b"\x80\x04\x95",
    ],
    ids=[
        "deep",
        "nested",
        "digits",
        "nan",
        "inf",
        "utf8",
        "values",
        "size",
        "null",
        "empty",
        "pkl",
    ],
)
def test_hostile_manifest_is_refused_cheaply(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 300 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}},
        {"__metadata__": {"rl_training": "{}"}},
        {"__metadata__": {"rl_training": 5}},
        [],
    ],
)
def test_hostile_single_file_is_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    for length in (len(text), 2**63, 2**31):
        (tmp_path / "x").write_bytes(struct.pack("<Q", length) + text + b"\0" * 8)
        with pytest.raises(CheckpointError, match="/x"):
            load_single_file(tmp_path / "x")
