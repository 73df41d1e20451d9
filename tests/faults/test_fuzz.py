"""Files changed at random (R13): read as they are or refused in one sentence, nothing else."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.datasets import tiny_columns, write_columns
from helpers.faults import leaves, setting
from helpers.hostile_hdf5 import make, whole
from rl_training.data.datasets.sources import load_transition_dataset
from rl_training.errors import RLTrainingError
from rl_training.experiment.checkpoint.manifest import seal, unseal
from rl_training.experiment.yaml_loader import parse_yaml
from rl_training.runtime.train import train
from rl_training.runtime.workflows import load_agent, resume_training
from rl_training.testing.contract import small_config

EXAMPLES = setting("EXAMPLES", 2000)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["$tensor", "/learner", "../x", "cpu", "exact", "dqn", "PPO", "0x1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
fast = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one checkpoint."""
    config = small_config(
        "dqn", tmp_path_factory.mktemp("fuzz"), run_name="run", total_timesteps=24, eval_episodes=0
    )
    return train(config).run_dir


def changed(fields: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Put something else in the place of a leaf, or of what holds it."""
    fields = copy.deepcopy(fields)
    leaf = data.draw(st.sampled_from(leaves(fields)))
    path = leaf[: data.draw(st.integers(1, len(leaf)))]
    holder: Any = fields
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[path[-1]] = data.draw(JSON)
    else:
        del holder[path[-1]]
    return fields


def forged(run: Path, data: st.DataObject) -> Path:
    target = run.parent / "forged"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target)
    path = next((target / "checkpoints").iterdir())
    fields = unseal((path / "manifest.json").read_bytes(), "fuzz")
    for _ in range(data.draw(st.integers(1, 2))):
        fields = changed(fields, data)
    (path / "manifest.json").write_bytes(seal(fields, "fuzz"))
    return path


def resume(path: Path) -> None:
    """Restore everything, and train no further: a forged end may lie far away."""
    resume_training(path, total_timesteps=24)


def only_sentences(use: Any, *arguments: Any) -> None:
    said = ""
    try:
        use(*arguments)
    except RLTrainingError as error:
        said = str(error)
    assert "\n" not in said


@fast
@given(st.data())
def test_a_forged_manifest_is_used_or_refused(run: Path, data: st.DataObject) -> None:
    only_sentences(load_agent, forged(run, data))


@fast
@given(st.data())
def test_a_run_with_a_forged_manifest_is_resumed_or_refused(run: Path, data: st.DataObject) -> None:
    only_sentences(resume, forged(run, data))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@long
@given(st.data())
def test_many_forged_manifests_are_used_or_refused(run: Path, data: st.DataObject) -> None:
    path = forged(run, data)
    only_sentences(load_agent, path)
    only_sentences(resume, path)


@fast
@given(
    st.text(st.characters(codec="utf-8"), max_size=200)
    | st.text("{}[]:-&*!#|>'\" \nab1.", max_size=60)
)
def test_any_text_is_a_configuration_or_refused(text: str) -> None:
    only_sentences(parse_yaml, text, "fuzz.yaml")


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
@fast
@given(st.data())
def test_a_damaged_dataset_is_read_or_refused(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{kind}"
    folder.mkdir(exist_ok=True)
    good = folder / f"good.{kind}"
    if not good.exists():
        if kind == "npz":
            write_columns(good, tiny_columns())
        else:
            make(folder, "good", whole)
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path = folder / f"bad.{kind}"
    path.write_bytes(content)
    only_sentences(lambda: load_transition_dataset(kind, path=path))
