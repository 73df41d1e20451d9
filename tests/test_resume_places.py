"""Where a run goes on: in its own folder and in no other, held from before anything is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tiny import STEPS, learner_digest, run_cli, tiny_config
from rl_training.cli.showing import _film_path
from rl_training.envs import probe
from rl_training.errors import CheckpointError, RLTrainingError
from rl_training.experiment import runs as runs_module
from rl_training.experiment.checkpoint_manifest import MANIFEST_NAME, seal, unseal
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.experiment.logging import read_metrics
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training

CUT = 48
BOTH = [3, 1]


class Notes(Callback):
    """Keeps what a person should know."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.texts.append(text)


def cut_run(folder: Path, **changes: Any) -> Path:
    """Two thirds of a run, with checkpoints at 16, 32 and 48."""
    config = tiny_config("dqn", folder, checkpoint_interval=16, accelerate="off", **changes)
    return train(config, stop_at=CUT).run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two runs of one configuration, one of another, a group, and whole runs."""
    folder = tmp_path_factory.mktemp("runs")
    cut_run(folder, run_name="a")
    cut_run(folder, run_name="b")
    cut_run(folder, run_name="other", seed=7)
    cut_run(folder, run_name="group", seeds=BOTH)
    for name, seeds in {"whole": None, "whole_group": BOTH}.items():
        train(tiny_config("dqn", folder, accelerate="off", run_name=name, seeds=seeds))
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the runs, to be spoilt, in the working folder."""
    folder = Path(shutil.copytree(runs, tmp_path / "place", symlinks=True))
    monkeypatch.chdir(folder)
    return folder


def checkpoint(run: Path, step: int = CUT) -> Path:
    return run / "checkpoints" / f"step_{step}"


def content(folder: Path) -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links, names of folders."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }


def without_identity(run: Path) -> None:
    """Make a run, and its checkpoints, what they were before runs had an identity."""
    for path in run.rglob("run.json"):
        described = json.loads(path.read_text())
        del described["id"]
        path.write_text(json.dumps(described))
    for path in run.rglob(MANIFEST_NAME):
        fields = unseal(path.read_bytes(), str(path))
        change_header(fields["header"], "run_id")
        path.write_bytes(seal(fields, str(path)))


def change_header(header: Any, name: str) -> None:
    """Remove a key of the stored header, however the codec writes mappings."""
    text = json.dumps(header)
    assert f'"{name}"' in text
    mappings = [header]
    while mappings:
        node = mappings.pop()
        if isinstance(node, dict):
            node.pop(name, None)
            mappings += node.values()
        elif isinstance(node, list):
            node[:] = [each for each in node if not (isinstance(each, list) and each[:1] == [name])]
            mappings += node


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def replaced(source: Path, target: Path) -> Path:
    shutil.rmtree(target)
    return copied(source, target)


FOREIGN: dict[str, Callable[[Path], Path]] = {
    "in another run": lambda p: copied(checkpoint(p / "b"), p / "a/from_b/step_48"),
    "among another run's": lambda p: copied(checkpoint(p / "b"), p / "a/checkpoints/step_50"),
    "in the place of another run's": lambda p: replaced(checkpoint(p / "b"), checkpoint(p / "a")),
    "beside its own": lambda p: copied(checkpoint(p / "b"), p / "b/backup/step_48"),
    "in a folder of downloads": lambda p: copied(checkpoint(p / "b"), p / "Downloads/step_20"),
    "in a folder called checkpoints": lambda p: copied(
        checkpoint(p / "b"), p / "x/checkpoints/step_48"
    ),
    "under a name of its own": lambda p: copied(checkpoint(p / "b"), p / "x/my favourite"),
    "another member's": lambda p: copied(
        checkpoint(p / "group/seed_3"), p / "group/seed_1/checkpoints/step_50"
    ),
    "a member's in a run": lambda p: copied(
        checkpoint(p / "group/seed_3"), p / "a/checkpoints/step_50"
    ),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_a_copied_checkpoint_goes_on_in_a_new_folder(how: str, place: Path) -> None:
    path = FOREIGN[how](place)
    for unrelated in (path.parent, path.parent.parent):
        if not (unrelated / "metrics.jsonl").exists():
            (unrelated / "metrics.jsonl").write_text("precious\n")
    before, notes = content(place), Notes()
    result = resume_training(path, callbacks=[notes])
    assert result.run_dir.parent == Path("runs")
    new = result.run_dir.resolve()
    assert {k: v for k, v in content(place).items() if not k.startswith("runs")} == before
    assert str(result.run_dir) in notes.texts[0]
    assert "new run" in notes.texts[0]
    assert result.metrics["global_step"] == STEPS
    if "member" not in how:
        assert learner_digest(new) == learner_digest(place / "whole")
    assert [row["step"] for row in read_metrics(new, "train")] == [STEPS]
    # From here on it is a run like any other.
    longer = resume_training(result.run_dir, total_timesteps=STEPS + 16)
    assert longer.run_dir == result.run_dir
    assert len([row["step"] for row in read_metrics(new, "train")]) == 2


def test_copies_of_several_checkpoints_without_their_run_go_on_in_a_new_folder(
    place: Path,
) -> None:
    """A folder that holds checkpoints and nothing that says whose they are is nobody's run."""
    copied(place / "a/checkpoints", place / "bare/checkpoints")
    copied(place / "a/checkpoints", place / "flat")
    for name in ("seed_3", "seed_1"):
        copied(place / "group" / name / "checkpoints", place / "bare_group" / name / "checkpoints")
    before = content(place)
    for given in ("bare", "bare/checkpoints", "flat", "bare_group"):
        result = resume_training(Path(given))
        assert result.run_dir.parent == Path("runs"), given
        assert result.metrics["global_step"] == STEPS
    assert [member.run_dir.parent for member in result.per_seed] == [result.run_dir] * 2
    for member in ("seed_3", "seed_1"):
        whole = place / "whole_group" / member
        assert learner_digest(result.run_dir / member) == learner_digest(whole)
    assert {k: v for k, v in content(place).items() if not k.startswith("runs")} == before


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("folder", "given"),
    [
        ("a", "../a"),
        ("a", "../a/checkpoints"),
        ("a", "../a/checkpoints/step_48"),
        ("a/checkpoints/step_48", "."),
        ("a/checkpoints", "step_48"),
        ("a/checkpoints", "step_16/.."),
        ("a", "link"),
        ("group", "."),
        ("group/seed_1", "checkpoints/step_48"),
    ],
)
def test_a_checkpoint_in_its_run_goes_on_there_however_it_is_named(
    folder: str, given: str, old: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / folder.split("/checkpoints")[0]
    if old:
        without_identity(place / folder.split("/")[0])
    (place / "a" / "link").symlink_to(place / "a")
    monkeypatch.chdir(place / folder)
    result = resume_training(Path(given))
    assert result.run_dir.resolve() == run
    assert not (Path.cwd() / "runs").exists()
    for member in result.per_seed or (result,):
        steps = [row["step"] for row in read_metrics(member.run_dir, "train")]
        assert steps == [16, 32, 48, 64]
    whole = {"a": "whole", "group": "whole_group/seed_3", "seed_1": "whole_group/seed_1"}
    if run.name != "seed_1":  # a member alone equals the group up to rounding
        compared = run / "seed_3" if run.name == "group" else run
        assert learner_digest(compared) == learner_digest(place / whole[run.name])


def test_runs_without_identity_are_told_apart_by_their_configuration(place: Path) -> None:
    for name in ("a", "other"):
        without_identity(place / name)
    path = copied(checkpoint(place / "other"), place / "a/checkpoints/step_50")
    before = content(place / "a")
    assert resume_training(path).run_dir.parent == Path("runs")
    assert content(place / "a") == before
    # What has an identity is never of a run that has none, whatever it is configured as.
    shutil.rmtree(path)
    copied(checkpoint(place / "b"), path)
    assert resume_training(path).run_dir.parent == Path("runs")
    # A run that was made longer still agrees with its description, one without it does not.
    longer = resume_training(place / "a", total_timesteps=STEPS + 16)
    assert longer.run_dir == place / "a"
    assert resume_training(longer.checkpoint_path).run_dir == place / "a"
    os.remove(place / "a" / "config.yaml")
    assert resume_training(longer.checkpoint_path).run_dir.parent == Path("runs")


def test_checkpoints_of_others_in_a_run_are_passed_over(place: Path) -> None:
    copied(checkpoint(place / "b"), place / "a/checkpoints/step_60")
    copied(checkpoint(place / "group/seed_3"), place / "group/seed_1/checkpoints/step_60")
    copied(checkpoint(place / "group/seed_1"), place / "group/seed_3/checkpoints/step_60")
    for name, whole in {"a": "whole", "group/seed_1": None, "group": "whole_group"}.items():
        notes: list[str] = []
        result = resume_training(place / name, warn=notes.append)
        assert result.run_dir == place / name
        if whole == "whole":
            assert "another run passed over" in notes[0]
            assert learner_digest(result.checkpoint_path) == learner_digest(place / whole)
    for step in (32, 48, 64):
        if checkpoint(place / "a", step).exists():
            shutil.rmtree(checkpoint(place / "a", step))
    copied(checkpoint(place / "b"), checkpoint(place / "a"))
    with pytest.raises(CheckpointError, match=r"step_48 is a checkpoint of another run.*new run"):
        resume_training(place / "a")


def test_a_new_folder_keeps_its_promise_from_its_first_moment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint it does not start from the beginning."""
    path = copied(checkpoint(place / "b"), place / "x" / "step_48")
    from rl_training.runtime.saving import Saver

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", _die)
        with pytest.raises(KeyboardInterrupt):
            resume_training(path, output_dir=place / "new")
    (new,) = (place / "new").iterdir()
    with pytest.raises(CheckpointError, match=r"before its first checkpoint; .*x/step_48"):
        resume_training(new)
    # What cannot be used leaves nothing behind.
    fields = unseal((path / MANIFEST_NAME).read_bytes(), "")
    shutil.rmtree(place / "new")
    del fields["states"]["clock"]
    (path / MANIFEST_NAME).write_bytes(seal(fields, ""))
    with pytest.raises(RLTrainingError):
        resume_training(path, output_dir=place / "new")
    assert not list((place / "new").glob("*"))


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_run_can_be_continued_in_a_new_folder_on_purpose(place: Path) -> None:
    before = content(place / "a"), content(place / "group")
    for name in ("a", "group"):
        command = ["resume", "--checkpoint", name, "--output-dir", "branches", "-q"]
        done = run_cli(*command)
        assert done.code == 0, done.err
        assert done.values["run_dir"].startswith("branches/")
        assert "goes on in a new run" in done.err.replace("\n", " ")
        assert (Path(done.values["run_dir"]) / "config.yaml").is_file()
        told = yaml.safe_load((Path(done.values["run_dir"]) / "config.yaml").read_text())
        assert told["output_dir"] == "branches"
    assert (content(place / "a"), content(place / "group")) == before


def test_the_video_of_a_copy_is_not_put_into_another_run(place: Path) -> None:
    name = Path("videos/step_48.mp4")
    for own in (place / "a", place / "a/checkpoints", checkpoint(place / "a")):
        assert _film_path(own, CUT) == place / "a" / name
    for how in ("in another run", "in a folder of downloads"):
        assert _film_path(FOREIGN[how](place), CUT) == name


# Held first, then read


@pytest.mark.parametrize("given", ["a", "a/checkpoints", "a/checkpoints/step_48", "group"])
def test_a_run_is_held_before_it_is_read(
    given: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process trains between our look and our lock would be undone by us."""
    refused: list[str] = []

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        if not refused:
            with pytest.raises(RLTrainingError, match="is in use by another process") as error:
                resume_training(place / given)
            refused.append(str(error.value))
        return original(*arguments, **named)

    original = probe.probe_env
    monkeypatch.setattr("rl_training.runtime.train.probe_env", meanwhile)
    result = resume_training(place / given)
    assert refused
    assert result.metrics["global_step"] == STEPS
    assert not list(place.rglob("superseded-*"))


def test_a_run_that_ended_before_we_held_it_is_not_set_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process ends at the last moment before the lock is ours."""
    finished: list[TrainResult] = []
    original = runs_module.run_lock

    def lock_at_last(path: Path) -> Any:
        if not finished:
            with monkeypatch.context() as patch:
                patch.setattr("rl_training.runtime.workflows.run_lock", original)
                finished.append(resume_training(path, total_timesteps=STEPS + 16))
        return original(path)

    monkeypatch.setattr("rl_training.runtime.workflows.run_lock", lock_at_last)
    resume_training(place / "a")
    assert [row["step"] for row in read_metrics(place / "a", "train")][-1] == STEPS + 16
    assert [entry.step for entry in list_checkpoints(place / "a")][-1] == STEPS + 16
    assert not list(place.rglob("superseded-*"))


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
