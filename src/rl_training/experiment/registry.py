"""Which algorithms there are, and where their `SPEC` is: in the package, or in a plug-in.

A method of the package is `algorithms/<name>.py`, or `algorithms/<name>/learner.py` where it has a
room, so listing the names imports nothing; `get_algorithm_spec` imports one module.

A plug-in is a module with a `SPEC` of its own.  An installed one is found by its entry point in the
group `rl_training.algorithms` and has a plain name; any other is named `module:SPEC`.  Importing
runs code, so such a module is imported only where the user has named it (`import_plugin`).  A name
that a checkpoint brings along finds a plug-in only if it was imported already.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError
from rl_training.validation import suggest

if TYPE_CHECKING:
    from rl_training.algorithms.spec import AlgorithmSpec

ENTRY_POINTS = "rl_training.algorithms"
SETTINGS = {
    "calql": "use algo cql with algo_kwargs.calibrated true",
    "a2c": "use algo ppo with the settings of the preset ppo/a2c_cartpole",
    "rainbow": "use algo c51 with the settings of the preset c51/rainbow_pong_atari",
}
"""Methods that others have by name and this package as a setting, without - and _."""
_FOLDER = Path(__file__).resolve().parent.parent / "algorithms"


@cache
def algorithm_names() -> tuple[str, ...]:
    """Return the names of the package's algorithms, sorted, without importing them."""
    return tuple(sorted(_sources()))


@cache
def _sources() -> dict[str, Path]:
    """Map each algorithm of the package to the file that declares it."""
    files = {path.stem: path for path in _FOLDER.glob("*.py")}
    rooms = {path.parent.name: path for path in _FOLDER.glob("*/learner.py")}
    return {name: path for name, path in (files | rooms).items() if _declares_spec(path)}


def _declares_spec(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if "\nSPEC = " not in text:
        return False
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "SPEC" for target in node.targets)
        for node in ast.parse(text).body
    )


@cache
def installed_plugins() -> dict[str, str]:
    """Map the names of installed plug-ins to their `module:SPEC`, without importing them.

    A method of the package keeps its name whatever is installed beside it.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in points if point.name not in algorithm_names()}


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the declaration of an algorithm, by its name or as `module:SPEC`.

    Raises:
        ConfigError: For an unknown name, with the nearest match; for a plug-in that nobody has
            imported, or that declares no `SPEC`.
    """
    if name in algorithm_names():
        spec: AlgorithmSpec = importlib.import_module(f"rl_training.algorithms.{name}").SPEC
        return spec
    if name in installed_plugins():
        target = installed_plugins()[name]
        return _spec_in(_import(target, f"the entry point {name}"), target)
    if ":" in name:
        module = sys.modules.get(name.partition(":")[0])
        if module is None:
            raise ConfigError(
                f"algo {name!r} is a plug-in that is not loaded, and a file may not load one; if "
                f"you trust it, run `rl-training --plugin {name} ...`, or import "
                f"{name.partition(':')[0]} first in Python"
            )
        return _spec_in(module, name)
    setting = SETTINGS.get(name.lower().replace("-", "").replace("_", ""))
    if setting is not None:
        raise ConfigError(f"algo {name!r} is a setting here: {setting}")
    known = (*algorithm_names(), *installed_plugins())
    raise ConfigError(f"algo {name!r} is not an algorithm{suggest(name, known)}")


@dataclass(frozen=True)
class AlgorithmSummary:
    """What a list says about an algorithm."""

    name: str
    title: str
    paper: str
    summary: str
    action_kinds: tuple[str, ...]


def algorithm_summaries() -> list[AlgorithmSummary]:
    """Return what declarations say in words, without importing the package's own; plug-ins last."""
    own = [_read_summary(name) for name in algorithm_names()]
    specs = [get_algorithm_spec(name) for name in installed_plugins()]
    fields = AlgorithmSummary.__dataclass_fields__
    return own + [AlgorithmSummary(**{key: getattr(s, key) for key in fields}) for s in specs]


@cache
def _read_summary(name: str) -> AlgorithmSummary:
    """Read the words of `SPEC` from its file, where they are literals."""
    return AlgorithmSummary(**_declared_words(name))


def _declared_words(name: str) -> dict[str, Any]:
    """Read the literal words of a `SPEC`, those of the one that it replaces parts of among them."""
    tree = ast.parse(_sources()[name].read_text(encoding="utf-8"))
    calls = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "SPEC" for target in node.targets)
    )
    call = next(call for call in calls if isinstance(call, ast.Call))
    words = _declared_words(_module_of(tree, call.args[0])) if call.args else {}
    wanted = AlgorithmSummary.__dataclass_fields__
    own = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in wanted}
    return words | own


def _module_of(tree: ast.Module, name: ast.expr) -> str:
    """Return the method whose `SPEC` a file imports under a name."""
    assert isinstance(name, ast.Name)
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return next(
        (node.module or "").rpartition(".")[2]
        for node in imports
        if any((alias.asname or alias.name) == name.id for alias in node.names)
    )


def import_plugin(name: str) -> None:
    """Import the method that a user names as `module:SPEC`; plain names need nothing.

    Raises:
        ConfigError: When the module does not exist, or declares no such `SPEC`.
    """
    if ":" in name and name not in algorithm_names():
        _spec_in(_import(name, f"algo {name}"), name)


def import_trusted(name: str) -> None:
    """Import what the user trusts by `--plugin`: a method `module:SPEC`, or an encoder's function.

    Raises:
        ConfigError: When the module does not exist, or holds neither under that name.
    """
    from rl_training.algorithms.own_encoders import import_encoder

    module = _import(name, f"--plugin {name}")
    if callable(vars(module).get(name.partition(":")[2])):
        import_encoder(name)
    else:
        _spec_in(module, name)


def plugin_sources(name: str) -> list[Path]:
    """Return the files a plug-in was loaded from, beside its own those of its folder it imports."""
    if name in algorithm_names():
        return []
    target = installed_plugins().get(name, name)
    main = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    if main is None:
        return []
    folder = Path(main).resolve().parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(file).resolve() for file in loaded if file}
    # A module may name a file that is not there: that of `torch.classes` is `_classes.py`.
    return sorted(
        file for file in files if folder in file.parents and file.suffix == ".py" and file.is_file()
    )


def _import(target: str, named_by: str) -> ModuleType:
    from rl_training.envs.named_modules import import_named

    return import_named(target.partition(":")[0], named_by, ConfigError)


def _spec_in(module: ModuleType, target: str) -> AlgorithmSpec:
    """Look a declaration up among what the module holds already; nothing is called for it."""
    from rl_training.algorithms.spec import AlgorithmSpec

    spec = vars(module).get(target.partition(":")[2])
    if not isinstance(spec, AlgorithmSpec):
        raise ConfigError(
            f"algo {target!r}: {target.partition(':')[2]!r} in {module.__name__} is not an "
            "AlgorithmSpec; a plug-in declares SPEC = AlgorithmSpec(...)"
        )
    return spec


def class_names() -> dict[str, str]:
    """Map the public class name of each algorithm (`SAC`) to its registry name (`sac`)."""
    return {_class_name(name): name for name in algorithm_names()}


@cache
def _class_name(name: str) -> str:
    """Read the learner's class name from the file: the class that `SPEC` names as its learner."""
    path = _sources()[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "learner":
            return ast.unparse(node.value)
    raise ConfigError(f"{path.name} of {name} declares a SPEC without a learner")
