"""What a release holds: the package and nothing beside it, under one version everywhere."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from helpers.tiny import ROOT
from rl_training import __version__
from rl_training.experiment.registry import algorithm_names
from rl_training.resources import preset_names

DECOYS = (
    *("tests/test_a.py", "tests/helpers/b.py", "docs/index.md", "zoo/sac-pendulum/card.json"),
    *("bench/speed/a.py", "examples/a.py", "scripts/a.py", "runs/a/metrics.jsonl"),
)
"""Files of a checkout that no release may hold."""


def build_dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_dist", ROOT / "scripts/build_dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a release is built from, with files that do not belong into one."""
    folder = tmp_path_factory.mktemp("release") / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder)
    for name in DECOYS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    pytest.importorskip("setuptools", "77")
    sdist, wheel = build_dist().build(source, tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.fixture(scope="module")
def names(built: tuple[Path, Path]) -> set[str]:
    with zipfile.ZipFile(built[1]) as archive:
        return set(archive.namelist())


def test_sdist_and_wheel_are_what_a_release_should_be(
    source: Path, built: tuple[Path, Path]
) -> None:
    sdist, wheel = built
    assert wheel.name == f"rl_training-{__version__}-py3-none-any.whl"
    assert sdist.name == f"rl_training-{__version__}.tar.gz"
    assert build_dist().faults(source, sdist, wheel) == []


def test_the_wheel_holds_presets_gates_types_and_the_report_but_no_other_folder(
    names: set[str],
) -> None:
    assets = "rl_training/assets"
    wanted = {f"{assets}/configs/{preset}.yaml" for preset in preset_names()}
    wanted |= {f"{assets}/{name}" for name in ("resolved.json", "measured.yaml")}
    report = ("page.html.jinja", "page.css", "page.js", "chart.css")
    wanted |= {f"{assets}/report/{name}" for name in report}
    wanted |= {f"rl_training/{name}" for name in ("py.typed", "__init__.pyi", "__main__.py")}
    wanted |= {f"rl_training/api/{name}.pyi" for name in ("__init__", "algorithms")}
    wanted |= {"rl_training/testing/__main__.py"}
    assert wanted <= names
    assert sum(name.endswith(".gate.yaml") for name in names) > 20
    tops = {name.split("/")[0] for name in names}
    assert tops == {"rl_training", f"rl_training-{__version__}.dist-info"}
    assert not [name for name in names if name.endswith((".pyc", ".safetensors", ".npz"))]


def test_its_metadata_say_what_pyproject_does(built: tuple[Path, Path]) -> None:
    folder = f"rl_training-{__version__}.dist-info"
    with zipfile.ZipFile(built[1]) as archive:
        metadata = message_from_string(archive.read(f"{folder}/METADATA").decode())
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (metadata["Name"], metadata["Version"]) == ("rl-training", __version__)
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    extras = re.search(
        r"\[project\.optional-dependencies\]\n(.*?)\n\n",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL,
    )
    assert extras is not None
    declared = re.findall(r"^(\w+) = \[", extras[1], re.MULTILINE)
    assert set(metadata.get_all("Provides-Extra", [])) == set(declared)
    assert points["console_scripts"]["rl-training"] == "rl_training.cli:main"


def test_the_wheel_alone_is_a_working_package(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import rl_training, sys; from rl_training.cli import main\n"
        "print(rl_training.__file__)\n"
        "sys.argv = ['rl-training', 'list']; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert all(f" {name} " in f" {done.stdout} ".replace("\n", " ") for name in algorithm_names())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("preset", "the wheel lacks rl_training/assets/configs/sac/new.yaml"),
        ("changelog", "CHANGELOG.md has no heading"),
        ("citation", "CITATION.cff does not say `version:"),
        ("stray", "the wheel should not hold rl_training/stray.py"),
    ],
)
def test_the_check_of_a_release_can_fail(
    change: str, said: str, source: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    wrong = tmp_path / "source"
    sdist, wheel = built
    if change == "preset":
        (wrong / "src/rl_training/assets/configs/sac/new.yaml").write_text("algo: sac\n")
    elif change == "stray":
        wheel = Path(shutil.copy(wheel, tmp_path))
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("rl_training/stray.py", "")
    else:
        page = wrong / {"changelog": "CHANGELOG.md", "citation": "CITATION.cff"}[change]
        page.write_text(page.read_text().replace(__version__, "9.9.9"))
    (fault,) = build_dist().faults(wrong, sdist, wheel)
    assert fault.startswith(said)


def test_the_citation_is_one() -> None:
    """The fields that version 1.2.0 of the format demands, with values that it allows."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": "The rl_training authors"}]
    assert citation["type"] == "software"
    assert str(citation["version"]) == __version__
    assert citation["license"] == "MIT"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])


def test_a_commit_is_built_without_what_is_not_committed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "kept.txt").write_text("kept")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(repository)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (repository / "loose.txt").write_text("loose")
    build_dist().export("HEAD", tmp_path / "out", repository)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept.txt"]
