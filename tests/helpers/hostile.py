"""Files that somebody means harm with, each for a command that would read it.

Every payload that could run code would leave the file `CANARY` beside it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from helpers.hostile_hdf5 import hdf5_files
from rl_training.experiment.checkpoint.manifest import seal, unseal
from rl_training.experiment.checkpoint.single import load_single_file, save_single_file

CANARY = "executed"
OBS = "[0.1, 0.2, 0.3, 0.4]"


@dataclass(frozen=True)
class Case:
    """A name, and the words of a command."""

    name: str
    words: tuple[str, ...]


class _Payload:
    """Unpickled, it makes the canary."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / CANARY)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def pickled(folder: Path) -> bytes:
    return pickle.dumps(_Payload(folder))


def torch_archive(folder: Path) -> bytes:
    """What `torch.save` would write of the payload."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(folder))
        archive.writestr("archive/version", "3\n")
    return target.getvalue()


def sb3_archive(folder: Path) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        data = {"policy_class": {":type:": "x", ":serialized:": pickled(folder).hex()}}
        archive.writestr("data", json.dumps(data))
        archive.writestr("policy.pth", torch_archive(folder))
    return target.getvalue()


def header_only(header: Any, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(8)


def entry(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


# Files made by save()


def single_files(folder: Path) -> dict[str, bytes]:
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    many = {f"t{i}": entry("U8", [0], 0) for i in range(110_000)}
    return {
        "pickle.safetensors": pickled(folder),
        "pickle.rlt": pickled(folder),
        "pickle.pkl": pickled(folder),
        "torch.pt": torch_archive(folder),
        "stable-baselines.zip": sb3_archive(folder),
        "header-2-to-63": header_only({}, 2**63),
        "header-2-to-31": header_only({}, 2**31),
        "shape-1e12": header_only({"a": entry("F32", [10**12], 4 * 10**12)}),
        "shape-overflow": header_only({"a": entry("F32", [2**62, 4], 0)}),
        "shape-negative": header_only({"a": entry("F64", [-1], 8)}),
        "deep-header": header_only(deep),
        "many-tensors": header_only(many),
        "metadata-of-others": header_only({"__metadata__": {"format": "pt"}}),
        "nan-manifest": header_only({"__metadata__": {"rl_training": '{"schema_version": NaN}'}}),
        "empty": b"",
        "one-byte": b"\x80",
    }


def huge_sparse_file(path: Path) -> None:
    """Sixteen gigabytes that take no space and would not fit into memory."""
    with path.open("wb") as file:
        file.write(header_only({"a": entry("F32", [2**32], 2**34)}))
        file.truncate(2**34)


# Checkpoint folders


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as someone would who knows how its digest is made."""
    fields = unseal((path / "manifest.json").read_bytes(), "forged")
    change(fields)
    (path / "manifest.json").write_bytes(seal(fields, "forged"))


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: Any) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        if value is ...:
            del fields[keys[-1]]
        else:
            fields[keys[-1]] = value

    return change


def replace_file(path: Path, name: str, data: bytes) -> None:
    """Put other bytes under the name of a state, with the right digest in the manifest."""
    (path / name).write_bytes(data)
    record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(path, put("files", name, value=record))


HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "algo-is-a-module": put("header", "config", "algo", value="os"),
    "algo-is-a-path": put("header", "config", "algo", value="../../evil"),
    "algo-is-a-list": put("header", "config", "algo", value=["dqn"]),
    "target-key": put("header", "config", "_target_", value="os.system"),
    "no-config": put("header", "config", value=...),
    "config-is-a-number": put("header", "config", value=7),
    "header-is-a-list": put("header", value=[]),
    "no-log-offset": put("header", "log_offset", value=...),
    "log-offset-is-text": put("header", "log_offset", value="x"),
    "log-offset-below-zero": put("header", "log_offset", value=-5),
    "a-billion-threads": put("header", "threads", value=10**9),
    "threads-are-text": put("header", "threads", value="many"),
    "no-device": put("header", "device", value=...),
    "env-spec-is-text": put("header", "env_spec", value="x"),
    "a-billion-environments": put("header", "config", "num_envs", value=10**9),
    "step-is-text": put("step", value="5"),
    "path-traversal": put("files", "../../x.safetensors", value={"size": 1, "sha256": "0" * 64}),
    "absolute-path": put("files", "/etc/passwd", value={"size": 1, "sha256": "0" * 64}),
    "pickle-in-state": put("states", "learner", value={"$pickle": "gASV"}),
    "object-array": put("states", "learner", value={"w": {"$array": "/w", "dtype": "O"}}),
    "state-is-a-number": put("states", "clock", value=3),
    "clock-without-step": put("states", "clock", "step", value=...),
    "clock-of-text": put("states", "clock", "step", value={"value": "later"}),
    "rows-1e15": put("segments", value=[]),
    "environment-is-a-number": put("states", "collector", "envs", value=5),
    "environment-of-others": put("states", "collector", "envs", value={"per_seed": [{}]}),
}


def manifests(folder: Path) -> dict[str, bytes]:
    return {
        "pickle-manifest": pickled(folder),
        "deep-manifest": b"[" * 500_000,
        "nan-in-manifest": b'{"schema_version": 1, "a": NaN}',
        "infinite-manifest": b'{"schema_version": 1, "a": 1e999}',
        "long-integer": b'{"schema_version": ' + b"9" * 500_000 + b"}",
        "not-utf8": b'{"schema_version": 1, "a": "\xff"}',
    }


def state_files(folder: Path) -> dict[str, bytes]:
    return {
        "state-is-a-pickle": pickled(folder),
        "state-is-an-archive": torch_archive(folder),
        "state-header-bomb": header_only({}, 2**40),
        "state-of-other-tensors": header_only({"/other": entry("F64", [1], 8)}),
    }


def checkpoint_folders(folder: Path, good: Path) -> Iterator[tuple[str, Path]]:
    """Copies of a good checkpoint, each made bad in one way."""

    def copy(name: str) -> Path:
        target = folder / name / "checkpoints" / good.name
        shutil.copytree(good, target)
        return target

    for name, change in HEADERS.items():
        forge(path := copy(name), change)
        yield name, path
    for name, data in manifests(folder).items():
        (path := copy(name)).joinpath("manifest.json").write_bytes(data)
        yield name, path
    for name, data in state_files(folder).items():
        replace_file(path := copy(name), "learner.safetensors", data)
        yield name, path
    path = copy("link-to-a-device")
    (path / "learner.safetensors").unlink()
    (path / "learner.safetensors").symlink_to("/dev/zero")
    yield "link-to-a-device", path
    path = copy("manifest-is-a-link")
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/dev/zero")
    yield "manifest-is-a-link", path
    path = copy("pipe")
    (path / "learner.safetensors").unlink()
    os.mkfifo(path / "learner.safetensors")
    yield "pipe", path


# Configurations


def configurations(folder: Path) -> dict[str, bytes]:
    base = "algo: dqn\nenv_id: CartPole-v1\n"
    aliases = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    canary = str(folder / CANARY)
    texts = {
        "python-object": f"{base}seed: !!python/object/apply:os.mkdir ['{canary}']\n",
        "python-name": f"{base}seed: !!python/name:os.system ''\n",
        "python-module": f"{base}seed: !!python/module:antigravity ''\n",
        "alias-bomb": f"{base}a0: &a0 [x, x]\n{aliases}",
        "merge-bomb": f"{base}a: &a {{b: 1}}\nc: {{<<: *a}}\n",
        "deep-lists": base + "tags: " + "[" * 2000,
        "deep-maps": base + "".join(f"{' ' * i}k:\n" for i in range(900)),
        "four-megabytes": base + "tags: [" + "a, " * 1_300_000 + "a]\n",
        "target": f"{base}_target_: os.system\n",
        "function-as-environment": "algo: dqn\nenv_id: os:mkdir\n"
        f"env_kwargs: {{path: '{canary}'}}\n",
        "function-of-termination": "algo: mopo\nenv_id: Pendulum-v1\n"
        "algo_kwargs: {termination_function: 'os:getcwd'}\n",
        "nan-steps": f"{base}total_timesteps: .nan\n",
        "huge-integer": f"{base}total_timesteps: {'9' * 50_000}\n",
        "a-billion-environments": f"{base}num_envs: 1000000000\n",
        "huge-networks": f"{base}algo_kwargs: {{hidden_sizes: [1000000000, 1000000000]}}\n",
        "huge-replay": f"{base}algo_kwargs: {{buffer_capacity: 1000000000000000}}\n",
        "no-mapping": "- 1\n- 2\n",
    }
    made = {name: text.encode() for name, text in texts.items()}
    return made | {"pickle": pickled(folder), "nul-bytes": bytes(1000), "latin": b"algo: \xe9\n"}


# Datasets


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def array_header(shape: str, dtype: str = "<f4") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"


def npz(**members: bytes) -> bytes:
    """An archive with whole columns, of which some are replaced."""
    good = {
        "observations": np.zeros((4, 3), np.float32),
        "actions": np.zeros((4, 1), np.float32),
        "rewards": np.zeros(4, np.float32),
        "terminations": np.zeros(4, np.bool_),
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in good.items():
            data = io.BytesIO()
            np.save(data, column)
            archive.writestr(f"{name}.npy", members.pop(name, data.getvalue()))
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def object_array(folder: Path) -> bytes:
    target = io.BytesIO()
    np.save(target, np.array([_Payload(folder)] * 4, dtype=object), allow_pickle=True)
    return target.getvalue()


def archives(folder: Path) -> dict[str, bytes]:
    nested = "(" * 3000 + ")" * 3000
    lying = bytearray(npz(terminations=npy(array_header("(1000000000,)", "|b1"))))
    at = lying.rindex(b"PK\x01\x02")
    lying[at + 24 : at + 28] = struct.pack("<I", 2**32 - 2)  # unpacked size of the last member
    return {
        "pickle.npz": pickled(folder),
        "objects.npz": npz(actions=object_array(folder)),
        "raw-pickle-member.npz": npz(actions=pickled(folder)),
        "shape-1e12.npz": npz(rewards=npy(array_header("(1000000000000,)"))),
        "shape-negative.npz": npz(rewards=npy(array_header("(-4,)"), bytes(16))),
        "shape-of-text.npz": npz(rewards=npy(array_header("'abcd'"))),
        "nested-header.npz": npz(rewards=npy(array_header(nested))),
        "code-in-header.npz": npz(rewards=npy("__import__('os').system('true')")),
        "subarrays.npz": npz(rewards=npy(array_header("(1000000000,)", "(1000000,)<f4"))),
        "zip-bomb.npz": npz(rewards=npy(array_header("(25000000,)"), bytes(100_000_000))),
        "lying-size.npz": bytes(lying),
        "meta-deep.npz": npz(meta=b"x"),
        "path-traversal.npz": npz(**{"../../evil.npy": b"x", "actions": b""}),
        "truncated.npz": npz()[:300],
        "torch.npz": torch_archive(folder),
    }


def column_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    def make(name: str) -> Path:
        target = folder / name
        with zipfile.ZipFile(io.BytesIO(npz())) as archive:
            archive.extractall(target)
        return target

    (path := make("npy-objects")).joinpath("actions.npy").write_bytes(object_array(folder))
    yield "npy-objects", path
    path = make("npy-shape")
    (path / "rewards.npy").write_bytes(npy(array_header("(1000000000000,)")))
    yield "npy-shape", path
    (path := make("npy-nested")).joinpath("rewards.npy").write_bytes(
        npy(array_header("(" * 3000 + ")" * 3000))
    )
    yield "npy-nested", path
    for name, data in {
        "meta-nested": b"[" * 100_000,
        "meta-latin": b'{"env": "\xe9"}',
        "meta-pickle": pickled(folder),
    }.items():
        (path := make(name)).joinpath("meta.json").write_bytes(data)
        (path / "rewards.npy").unlink()  # so that there is an error to be reported
        yield name, path


def special_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Datasets that are pipes or devices, by themselves or inside a folder of columns."""
    for name in ("pipe.npz", "pipe.hdf5"):
        os.mkfifo(folder / name)
        yield name, folder / name
    for name, device in (("zeros.npz", "/dev/zero"), ("random.hdf5", "/dev/urandom")):
        (folder / name).symlink_to(device)
        yield name, folder / name
    for name in ("column-is-a-pipe", "column-is-a-device"):
        with zipfile.ZipFile(io.BytesIO(npz())) as archive:
            archive.extractall(folder / name)
        (column := folder / name / "rewards.npy").unlink()
        os.mkfifo(column) if name.endswith("pipe") else column.symlink_to("/dev/zero")
        yield name, folder / name


def corpus(folder: Path, good: Path, agent: Path) -> list[Case]:
    """Write all of it below `folder`; `good` and `agent` are a whole checkpoint and saved file."""
    cases: list[Case] = []

    def add(name: str, *words: object) -> None:
        cases.append(Case(name, tuple(map(str, words))))

    for name, data in single_files(folder).items():
        (folder / name).write_bytes(data)
        add(name, "predict", "--checkpoint", folder / name, "--obs", OBS)
    huge_sparse_file(folder / "huge")
    add("huge", "predict", "--checkpoint", folder / "huge", "--obs", OBS)
    cut = folder / "cut-agent"
    cut.write_bytes(agent.read_bytes()[:-9])
    add("cut-agent", "predict", "--checkpoint", cut, "--obs", OBS)
    for name, header in _agent_headers(agent):
        path = save_single_file(folder / name, header=header, states=load_single_file(agent).states)
        add(name, "predict", "--checkpoint", path, "--obs", OBS)
    for name, path in checkpoint_folders(folder / "checkpoints", good):
        add(name, "resume", "--checkpoint", path)
    for name, data in configurations(folder).items():
        (folder / f"{name}.yaml").write_bytes(data)
        add(f"{name}.yaml", "train", "--config", folder / f"{name}.yaml", "--output-dir", folder)
    for name, data in archives(folder).items():
        (folder / name).write_bytes(data)
        add(name, "data", "inspect", folder / name)
    datasets = (hdf5_files(folder, pickled(folder)), column_folders(folder), special_files(folder))
    for name, path in chain(*datasets):
        add(name, "data", "inspect", path)
    return cases


def _agent_headers(agent: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    header = load_single_file(agent).header
    yield "agent-without-config", {k: v for k, v in header.items() if k != "config"}
    yield "agent-algo-os", header | {"config": header["config"] | {"algo": "os"}}
    yield "agent-step-is-text", header | {"step": "x"}
    yield "agent-spec-of-others", header | {"env_spec": {"obs_shape": [10**9]}}
    yield "agent-other-shape", header | {"env_spec": header["env_spec"] | {"obs_shape": [10**5]}}
