"""Runs whose checkpoints were moved to another disk or lost, and whose logs lost lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.stopped import CUT, Notes, checkpoint, content
from helpers.tiny import STEPS, learner_digest, run_cli
from rl_training.errors import CheckpointError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.runtime.workflows import resume_training

# Links, and runs that lost their checkpoints


def moved(run: Path, disk: Path) -> None:
    """Move each checkpoint to another disk and leave a link."""
    disk.mkdir(parents=True)
    for step in (16, 32, 48):
        shutil.move(checkpoint(run, step), disk / f"step_{step}")
        checkpoint(run, step).symlink_to(disk / f"step_{step}")


def moved_folder(run: Path, disk: Path) -> None:
    """Move the whole folder and leave a link."""
    disk.parent.mkdir(exist_ok=True)
    shutil.move(run / "checkpoints", disk)
    (run / "checkpoints").symlink_to(disk)


@pytest.mark.parametrize("move", [moved, moved_folder])
def test_a_run_whose_checkpoints_are_links_goes_on_from_them(
    move: Callable[[Path, Path], None], place: Path
) -> None:
    for run in (place / "a", place / "group/seed_3", place / "group/seed_1"):
        move(run, place / "disk" / run.name)
    before = content(place / "disk")
    assert list_checkpoints(place / "a")[-1].step == CUT
    for name, whole in {"a": "whole", "group": "whole_group/seed_3"}.items():
        result = resume_training(place / name)
        assert result.run_dir == place / name
        assert learner_digest((result.per_seed or (result,))[0].run_dir) == learner_digest(
            place / whole
        )
    if move is moved:  # pruning removes links, never what they point to
        assert content(place / "disk") == before
        assert [entry.step for entry in list_checkpoints(place / "a")] == [32, 48, 64]
    # Going back sets links aside as they are.
    resume_training(checkpoint(place / "a", 32))
    assert learner_digest(place / "a") == learner_digest(place / "whole")
    (aside,) = [path for path in place.rglob("superseded-*") if path.is_dir()]
    assert sorted(path.name for path in aside.iterdir()) == ["step_48", "step_64"]
    assert learner_digest(aside / "step_48")
    # A checkpoint that is a link is replaced by a folder, and its target stays.
    if move is moved:
        assert content(place / "disk") == before


def test_a_link_whose_target_is_gone_is_named_and_the_older_one_used(place: Path) -> None:
    moved(place / "a", place / "disk")
    shutil.move(place / "disk/step_48", place / "step_48")
    notes: list[str] = []
    result = resume_training(place / "a", warn=notes.append)
    assert "step_48 is a link to" in notes[0]
    assert learner_digest(result.run_dir) == learner_digest(place / "whole")


def lose_disk(run: Path) -> None:
    moved(run, run / "disk")
    shutil.rmtree(run / "disk")


def lose_disk_of_folder(run: Path) -> None:
    moved_folder(run, run.parent / "disk" / run.name)
    shutil.rmtree(run.parent / "disk")


def link_to_itself(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("checkpoints")


def move_away(run: Path) -> None:
    shutil.move(run / "checkpoints", run / "moved")


def delete_one_by_one(run: Path) -> None:
    for entry in list_checkpoints(run):
        shutil.rmtree(entry.path)


def put_file_there(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")


def put_files_there(run: Path) -> None:
    for entry in list_checkpoints(run):
        shutil.rmtree(entry.path)
        entry.path.write_text("")


LOSSES = (
    *(lose_disk, lose_disk_of_folder, link_to_itself, move_away),
    *(delete_one_by_one, put_file_there, put_files_there),
)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("old", [False, True])
def test_a_run_that_has_had_a_checkpoint_never_starts_over(
    loss: Callable[[Path], None], old: bool, place: Path
) -> None:
    for name in ("a", "group/seed_3", "group/seed_1"):
        if old:
            (place / name / ".saved").unlink(missing_ok=True)
        loss(place / name)
    before = content(place)
    for name in ("a", "group"):
        with pytest.raises(CheckpointError) as error:
            resume_training(place / name)
        assert str(place / name) in str(error.value)
        done = run_cli("resume", "--checkpoint", name, "-q")
        assert (done.code, "Traceback" in done.err) == (2, False)
    after = {name: value for name, value in content(place).items() if ".lock" not in name}
    assert after == {name: value for name, value in before.items() if ".lock" not in name}


# The log


LOGS: dict[str, tuple[Callable[[bytes], bytes | None], str, list[int]]] = {
    "whole": (lambda log: log, "", [16, 32, 48, 64]),
    "later lines": (lambda log: log + b'{"step": 60, "kind": "tr', "", [16, 32, 48, 64]),
    "half a line": (lambda log: log[:-20], "lost its last lines", [16, 32, 64]),
    "no last newline": (lambda log: log[:-1], "lost its last lines", [16, 32, 64]),
    "one line": (lambda log: log[: log.index(b"\n") + 1], "lost its last lines", [16, 64]),
    "half of the first": (lambda log: log[:9], "lost its last lines", [64]),
    "empty": (lambda log: b"", "lost its last lines", [64]),
    "one long other line": (lambda log: b"x" * 2 * len(log), "lost its last lines", [64]),
    "missing": (lambda log: None, "is missing", [64]),
}


@pytest.mark.parametrize("how", LOGS)
def test_a_log_that_lost_lines_is_mentioned_and_no_line_is_continued(how: str, place: Path) -> None:
    change, expected, steps = LOGS[how]
    for name in ("a", "group") if how == "half a line" else ("a",):
        run = place / name / "seed_1" if name == "group" else place / name
        log = change((run / "metrics.jsonl").read_bytes())
        (run / "metrics.jsonl").unlink()
        if log is not None:
            (run / "metrics.jsonl").write_bytes(log)
        notes = Notes()
        resume_training(place / name, callbacks=[notes])
        assert [note for note in notes.texts if "metrics.jsonl" in note] == [
            note for note in notes.texts if expected and expected in note
        ]
        assert bool(expected) == any(str(run / "metrics.jsonl") in note for note in notes.texts)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines if '"train"' in line] == steps
        assert all(json.loads(line) for line in lines)
        # The next checkpoint knows the length that the log has now.
        notes.texts.clear()
        resume_training(place / name, callbacks=[notes], total_timesteps=STEPS + 16)
        assert not [note for note in notes.texts if "metrics.jsonl" in note]
