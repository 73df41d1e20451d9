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

from helpers.stopped import CUT, Notes, checkpoint, content
from helpers.tiny import STEPS, learner_digest, run_cli
from rl_training.cli.showing import _video_path
from rl_training.envs import factory
from rl_training.errors import CheckpointError, RLTrainingError
from rl_training.experiment import runs as runs_module
from rl_training.experiment.checkpoint.manifest import MANIFEST_NAME, seal, unseal
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.experiment.logging import read_metrics
from rl_training.runtime.results import TrainResult
from rl_training.runtime.workflows import resume_training


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
    assert result.run_dir.parent == Path("runs").absolute()
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
        assert result.run_dir.parent == Path("runs").absolute(), given
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
    assert resume_training(path).run_dir.parent == Path("runs").absolute()
    assert content(place / "a") == before
    # What has an identity is never of a run that has none, whatever it is configured as.
    shutil.rmtree(path)
    copied(checkpoint(place / "b"), path)
    assert resume_training(path).run_dir.parent == Path("runs").absolute()
    # A run that was made longer still agrees with its description, one without it does not.
    longer = resume_training(place / "a", total_timesteps=STEPS + 16)
    assert longer.run_dir == place / "a"
    assert resume_training(longer.checkpoint_path).run_dir == place / "a"
    os.remove(place / "a" / "config.yaml")
    assert resume_training(longer.checkpoint_path).run_dir.parent == Path("runs").absolute()


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
    from rl_training.runtime.checkpoints.saver import Saver

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
        assert "continues in a new run" in done.err.replace("\n", " ")
        assert (Path(done.values["run_dir"]) / "config.yaml").is_file()
        told = yaml.safe_load((Path(done.values["run_dir"]) / "config.yaml").read_text())
        assert told["output_dir"] == "branches"
    assert (content(place / "a"), content(place / "group")) == before


def test_the_video_of_a_copy_is_not_put_into_another_run(place: Path) -> None:
    name = Path("videos/step_48.mp4")
    for own in (place / "a", place / "a/checkpoints", checkpoint(place / "a")):
        assert _video_path(own, CUT) == place / "a" / name
    for how in ("in another run", "in a folder of downloads"):
        assert _video_path(FOREIGN[how](place), CUT) == name


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

    original = factory.probe_env
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
