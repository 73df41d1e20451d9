"""Modules that a configuration or a checkpoint names, as `module:name`.

Importing runs a module's top level, and the name may come from a stranger's file.  This is the
only place that imports such a module, and it says so first.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from rl_training.errors import EnvError, RLTrainingError, described

logger = logging.getLogger(__name__)
_strangers: list[str] = []
"""What is in use just now and may not import anything, the newest last."""


@contextmanager
def only_imported_modules(stranger: str) -> Iterator[None]:
    """Refuse within to import a module by name; one that is imported already may be used.

    Args:
        stranger: What names modules and is not trusted, such as `hf://user/name`.
    """
    _strangers.append(stranger)
    try:
        yield
    finally:
        _strangers.pop()


def import_named(
    module_name: str, named_by: str, error: type[RLTrainingError] = EnvError
) -> ModuleType:
    """Import a module, after saying which one and why.

    Args:
        module_name: The module.
        named_by: What names it, for instance `environment my_tasks:Corridor`.
        error: What is raised when it cannot be imported.

    Raises:
        RLTrainingError: Of the kind `error`.
    """
    if module_name not in sys.modules and _strangers:
        raise error(
            f"{named_by}: module {module_name!r} is named by {_strangers[-1]} and was not "
            "imported, because importing runs its code; if you trust it, import it in Python "
            "before you use the agent there"
        )
    # Worker processes import what their parent has announced already.
    if module_name not in sys.modules and multiprocessing.parent_process() is None:
        logger.warning("note: importing module %s, named by %s", module_name, named_by)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as reason:
        raise error(
            f"{named_by}: module {module_name!r} cannot be imported "
            f"({described(reason)}); install it or put its folder on PYTHONPATH"
        ) from reason
