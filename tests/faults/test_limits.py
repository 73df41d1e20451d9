"""Limits of the machine and of numbers: one sentence, and nothing left behind."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from helpers.tiny import run_cli, tiny_config, write_tiny
from rl_training.envs.backends import processes
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import CheckpointError, ConfigError, EnvError
from rl_training.experiment.checkpoint import files
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_any_line_of_the_log_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path, "dqn", log_interval=8, eval_episodes=1)
    append = files.append
    for whole in (0, 4):
        calls: list[int] = []

        def refuse(file: io.FileIO, data: bytes, *, whole: int = whole, calls: Any = calls) -> None:
            calls.append(len(data))
            if len(calls) > whole:
                raise FULL
            append(file, data)

        monkeypatch.setattr(files, "append", refuse)
        folder = tmp_path / f"after{whole}"
        said = run_cli("train", "--config", path, "--output-dir", folder).sentence()
        assert "metrics.jsonl failed (No space left on device); free space" in said
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [8 * (i + 1) for i in range(whole)]
        monkeypatch.setattr(files, "append", append)
    assert resume_training(folder / "run").run_dir == folder / "run"


class _Small(io.FileIO):
    """A disk with room for 10 more bytes."""

    room = 10

    def write(self, data: Any) -> int:
        if not self.room:
            raise FULL
        count = super().write(bytes(data)[: self.room])
        self.room -= count
        return count


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with _Small(path, "ab") as file:
        with pytest.raises(OSError, match="No space"):
            files.append(file, b"twenty bytes of text\n")
        assert file.tell() == 7
    assert path.read_bytes() == b"before\n"
    with io.FileIO("/dev/full", "ab") as full, pytest.raises(OSError, match="No space"):
        files.append(full, b"x")


def test_a_new_run_whose_log_cannot_be_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("rl_training.experiment.logging.io.FileIO", refuse)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl failed \(Too many open files\)"):
        train(tiny_config("dqn", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    run = train(tiny_config("dqn", tmp_path, eval_episodes=0)).run_dir
    (target := tmp_path / "precious").write_text("keep me\n")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(target)
    said = run_cli("resume", "--checkpoint", run, "--total-timesteps", 96).sentence()
    assert "is a link" in said
    assert target.read_text() == "keep me\n"


def test_errors_of_the_machine_from_anywhere_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rl_training.cli import commands

    def refuse() -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "some/file")

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back afterwards
    monkeypatch.setattr(commands, "root_command", refuse)
    said = run_cli("list").sentence()
    assert (
        said == "some/file: Read-only file system; choose an output folder that can be written to"
    )

    def fail() -> None:
        raise FULL

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_too_few_files_for_worker_processes_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in (1, 4, 9):
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(max(used) + 20) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], limits[1]))
        try:
            with pytest.raises(EnvError, match=r"cannot be started \(Too many open files\)"):
                SeedVectorEnv.make("CartPole-v1", {}, 8, (0,), "async")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert multiprocessing.active_children() == []
        assert len(os.listdir("/proc/self/fd")) <= len(used) + 2  # multiprocessing keeps a tracker


def numeric_fields(
    model: type[BaseModel], prefix: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], bool]]:
    """Paths of all fields that take numbers, those of settings inside settings included.

    Beside each: whether it takes fractions.
    """
    paths: list[tuple[tuple[str, ...], bool]] = []
    for name, field in model.model_fields.items():
        kinds = _kinds(field)
        nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        for inner in nested:
            paths += numeric_fields(inner, (*prefix, name))
        if {int, float} & set(kinds):
            paths.append(((*prefix, name), float in kinds))
    return paths


def _kinds(field: FieldInfo) -> set[Any]:
    kinds, waiting = set(), [field.annotation]
    while waiting:
        part: Any = waiting.pop()
        if get_origin(part) is None:
            kinds.add(part)
        elif get_origin(part) is not Literal:
            waiting += list(get_args(part))
    return kinds


def test_numbers_beyond_every_machine_are_refused_for_every_setting() -> None:
    fields = {("run", *field) for field in numeric_fields(TrainConfig)}
    for algo in algorithm_names():
        model = get_algorithm_spec(algo).config_class
        fields |= {(algo, ("algo_kwargs", *path), real) for path, real in numeric_fields(model)}
    assert len(fields) > 400
    taken = []
    for algo, path, is_real in sorted(fields):
        for number in (1e308, -1e308) if is_real else (2**63, -(2**63), 1e308):
            for value in (number, [number]):
                nested: Any = value
                for key in reversed(path):
                    nested = {key: nested}
                base = {"algo": "sac" if algo == "run" else algo, "env_id": "Pendulum-v1"}
                try:
                    TrainConfig(**(base | nested))
                except ConfigError as error:
                    text = str(error)
                    if "\n" not in text and len(text) < 1000 and path[-1] in text:
                        continue
                taken.append((algo, path, value))
    assert taken == []
