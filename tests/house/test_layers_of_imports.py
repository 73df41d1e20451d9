"""The shape of the package: rooms, one direction of imports, no host reads in the maths."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.tiny import ROOT
from rl_training.algorithms.base import Learner
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.resources import preset_names
from rl_training.validation import Settings

PACKAGE = ROOT / "src" / "rl_training"
MODULES = sorted(PACKAGE.rglob("*.py"))
BOTTOM = (
    "errors",
    "validation",
    "foreign_names",
    "observations",
    "spaces",
    "rng",
    "transfer",
    "state",
    "resources",
    "output_files",
    "_version",
    "cluster",
)
LAYERS: dict[str, int] = {
    **dict.fromkeys(BOTTOM, 0),
    **dict.fromkeys(("models", "data", "envs"), 1),
    "algorithms": 2,
    "experiment": 3,
    "runtime": 4,
    **dict.fromkeys(("reporting", "sweeps", "ope", "tools"), 5),
    **dict.fromkeys(("experiment.manager", "api", "cli", "testing", "__init__", "__main__", ""), 6),
}
HOST_READS = re.compile(r"\.(item|cpu|numpy|tolist)\(")

PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNNING = {"torch.load", "eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}


def module_name(path: Path) -> str:
    """`runtime.train` for `src/rl_training/runtime/train.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def layer_of(name: str) -> int:
    """The layer of a module, by its own name or its package's."""
    return LAYERS[name] if name in LAYERS else LAYERS[name.split(".")[0]]


def imports_of(path: Path) -> set[str]:
    """Names inside the package that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                found.add(whole if _is_module(whole) else module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    inside = {name for name in found if name.split(".")[0] == "rl_training"}
    return {name.removeprefix("rl_training").removeprefix(".") for name in inside}


def _is_module(name: str) -> bool:
    path = ROOT / "src" / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_the_room_of_runs_stays_small() -> None:
    flat = {path.stem for path in (PACKAGE / "runtime").glob("*.py")} - {"__init__"}
    assert len({name for name in flat if not name.endswith("_trainer")}) <= 12


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_from_its_own_layer_or_below(path: Path) -> None:
    name = module_name(path)
    above = sorted(other for other in imports_of(path) if layer_of(other) > layer_of(name))
    assert not above, f"{name} imports from above: {above}"


def test_the_guard_sees_imports_inside_functions_and_of_submodules(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from rl_training.experiment import manager\n"
        "def f():\n    import rl_training.runtime.train\n"
        "    from rl_training import TrainConfig\n    import torch\n"
    )
    assert imports_of(file) == {"experiment.manager", "runtime.train", ""}
    assert layer_of("experiment.manager") > layer_of("runtime.train") > layer_of("experiment.runs")


def test_models_data_and_environments_do_not_know_each_other() -> None:
    packages = ("models", "data", "envs")
    for path in MODULES:
        own = module_name(path).split(".")[0]
        if own in packages:
            others = {name.split(".")[0] for name in imports_of(path)} & set(packages)
            assert others <= {own}, path


@pytest.mark.parametrize(
    "path",
    [p for folder in ("algorithms", "models") for p in sorted((PACKAGE / folder).rglob("*.py"))],
    ids=module_name,
)
def test_the_maths_never_reads_from_the_device(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    reads = [f"{number}: {line}" for number, line in enumerate(lines, 1) if HOST_READS.search(line)]
    assert not reads


def dangers_in(text: str) -> list[str]:
    """Imports and calls that could run what a file says."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in PICKLING]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module in PICKLING else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {ast.unparse(keyword) for keyword in node.keywords}
            if name in RUNNING or "allow_pickle=True" in keywords:
                found.append(name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert not dangers_in(path.read_text(encoding="utf-8"))


def test_the_guard_sees_what_it_forbids() -> None:
    text = "import pickle\nfrom dill import load\ntorch.load(p)\neval('1')\nmodel.eval()\n"
    text += "np.load(p, allow_pickle=True)\nnp.load(p, allow_pickle=False)\nyaml.load(t)\n"
    assert sorted(dangers_in(text)) == [
        "dill",
        "eval",
        "np.load",
        "pickle",
        "torch.load",
        "yaml.load",
    ]


def test_at_most_three_classes_stand_above_a_learner(algo: str) -> None:
    above = [c for c in get_algorithm_spec(algo).learner.__mro__[1:] if issubclass(c, Learner)]
    assert len(above) <= 3, [c.__name__ for c in above]


def test_at_most_three_classes_stand_above_each_part_of_a_methods_settings(algo: str) -> None:
    learner = get_algorithm_spec(algo).learner
    for part in (learner.config_class, *learner.parts):
        # `Settings` is the package's BaseModel: it has no field.
        above = [c for c in part.__mro__[1:] if issubclass(c, Settings) and c is not Settings]
        assert len(above) <= 3, (part.__name__, [c.__name__ for c in above])


def test_every_room_says_what_lives_there_and_what_does_not() -> None:
    rooms = sorted({path.parent for path in MODULES if path.parent != PACKAGE})
    for folder in rooms:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert text is not None, folder
        assert len(re.findall(r"[.!](?:\s|$)", text)) == 2, f"{folder.name}: two sentences"


def test_every_algorithm_is_declared_in_full(algo: str) -> None:
    spec = get_algorithm_spec(algo)
    assert spec.name == algo
    assert re.fullmatch(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\S+|PMLR:v\d+/\w+\.html", spec.paper)
    assert spec.title
    assert spec.summary
    assert spec.metrics
    assert all(spec.metrics.values()), "every metric says what it means"
    assert [name for name in preset_names() if name.split("/")[0] == algo]
    undocumented = [k for k, f in spec.config_class.model_fields.items() if not f.description]
    assert not undocumented


def test_every_algorithm_has_a_page(algo: str) -> None:
    assert (ROOT / "docs" / "algorithms" / f"{algo}.md").is_file()


def test_every_preset_belongs_to_an_algorithm() -> None:
    assert {name.split("/")[0] for name in preset_names()} <= set(algorithm_names())
