"""What a run says about the repository around it, and what a stranger's repository may do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.tiny import tiny_config
from rl_training.experiment.git_state import git_state
from rl_training.experiment.runs import create_run_folder, describe_system, read_description

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main/line")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "file.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_commit_and_cleanness_are_gits_own(repository: Path, tmp_path: Path) -> None:
    def expect(folder: Path, dirty: bool) -> None:
        assert git_state(folder) == {"commit": git(folder, "rev-parse", "HEAD"), "dirty": dirty}

    (inside := repository / "deep" / "er").mkdir(parents=True)
    expect(inside, False)
    (repository / "ignored").touch()
    (repository / ".git" / "info" / "exclude").write_text("excluded\n")
    (repository / "excluded").touch()
    expect(repository, False)
    git(repository, "pack-refs", "--all")
    git(repository, "gc", "-q")
    expect(repository, False)
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    expect(tmp_path / "tree", False)
    (tmp_path / "tree" / "file.txt").write_text("two\n")
    expect(tmp_path / "tree", True)
    expect(repository, False)
    git(repository, "checkout", "-q", "--detach")
    (repository / "new").touch()
    expect(repository, True)


def test_settings_of_a_strangers_repository_run_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "executed"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch '{canary}'\ncat\n")
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for folder in (hooks, repository / ".git" / "hooks"):
        for name in ("post-index-change", "fsmonitor-watchman", "post-checkout", "pre-commit"):
            shutil.copy(program, folder / name)
    (repository / ".gitattributes").write_text("* filter=f diff=f merge=f\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-qm", "attributes")
    for key in (
        *("core.fsmonitor", "filter.f.clean", "filter.f.smudge", "filter.f.process"),
        *("diff.external", "diff.f.command", "diff.f.textconv", "core.pager", "core.editor"),
        *("core.sshCommand", "core.gitProxy", "core.alternateRefsCommand", "core.askPass"),
        *("credential.helper", "gpg.program", "pager.status", "sequence.editor"),
    ):
        git(repository, "config", key, str(program))
    git(repository, "config", "core.hooksPath", str(hooks))
    git(repository, "config", "alias.status", f"!{program}")
    git(repository, "config", "status.submoduleSummary", "true")
    os.utime(repository / "file.txt", (1, 1))  # status must look into it, through its filter
    (repository / "file.txt").write_text("six\n")
    canary.unlink(missing_ok=True)
    monkeypatch.chdir(repository)
    assert describe_system()["git"]["dirty"] is True
    assert not canary.exists()
    git(repository, "status")  # the settings do run programs where they are obeyed
    assert canary.exists()


@pytest.mark.parametrize(
    "head", ["", "nothing", "ref: ../../secret", "ref: refs/heads/../../x", "ref: refs/heads/no"]
)
def test_a_broken_repository_is_not_reported(tmp_path: Path, head: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "secret").write_text("0" * 40)
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert git_state(tmp_path) is None
    (tmp_path / ".git" / "HEAD").unlink()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert git_state(tmp_path) is None
    shutil.rmtree(tmp_path / ".git")
    assert git_state(tmp_path) is None


def test_a_run_says_which_device_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"accelerator {device.type}")
    for asked, name in (("auto", "accelerator cuda"), ("cpu", "cpu")):
        folder = create_run_folder(tiny_config("sac", tmp_path, device=asked, run_name=asked))
        assert read_description(folder)["device"] == name
