"""Agents on the Hugging Face Hub: `hf://user/name`, one repository each.

Only `POLICY_FILE` is ever fetched, a file of safetensors that this package verifies; there is no
pickle, and nothing that the file names is imported.  The extra `hub` brings the library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rl_training._version import __version__
from rl_training.errors import CheckpointError, ConfigError, MissingExtraError
from rl_training.experiment.runs import is_hub_name

POLICY_FILE = "policy.safetensors"
PREFIX = "hf://"
# A path loses one of two slashes, so that both spellings come here.
_NAME = re.compile(r"^hf:/+(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>.+))?$")
_SLASHES = re.compile("^hf:/*")
_REPO = re.compile(r"^[\w.-]+/[\w.-]+$", re.ASCII)
_REASONS = {
    "GatedRepoError": "it is gated; ask for access on its page, then log in with `hf auth login`",
    "RepositoryNotFoundError": "it does not exist, or it is private: log in with `hf auth login`",
    "RevisionNotFoundError": "it has no such revision",
    "RemoteEntryNotFoundError": f"it has no {POLICY_FILE}, so it was not made by rl-training push",
    "LocalEntryNotFoundError": "the hub cannot be reached, and no copy is on this machine",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and no copy is on this machine",
    "LocalTokenNotFoundError": "not logged in; run `hf auth login`",
}
"""What the hub's errors mean, by the names of their classes."""


@dataclass(frozen=True)
class HubName:
    """A repository, and the revision of it that is meant."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def hub_name(path: str | Path) -> HubName:
    """Read `hf://user/name` or `hf://user/name@revision`.

    Raises:
        CheckpointError: When it is not of this form.
    """
    match = _NAME.match(str(path))
    if match is None:
        raise CheckpointError(
            f"{_SLASHES.sub(PREFIX, str(path))} is not the name of an agent on the hub; it has "
            "the form hf://user/name, or hf://user/name@revision"
        )
    return HubName(match["repo"], match["revision"])


def fetched(path: str | Path) -> Path:
    """Return where the policy's file of `hf://user/name` is on this machine, fetched if need be.

    Raises:
        CheckpointError: When the agent does not exist, or the hub cannot be reached.
        MissingExtraError: Without the extra `hub`.
    """
    name = hub_name(path)
    hub = require_hub(str(name))
    with _talking(hub, f"{name} cannot be loaded"):
        return Path(
            hub.hf_hub_download(
                name.repo,
                POLICY_FILE,
                revision=name.revision,
                library_name="rl-training",
                library_version=__version__,
            )
        )


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Put the files of a folder into a repository, which is made if missing; returns its address.

    Raises:
        ConfigError: When `repo` is not `user/name`.
        CheckpointError: When the hub refuses, or cannot be reached.
        MissingExtraError: Without the extra `hub`.
    """
    repo = repository(repo)
    hub = require_hub("push")
    with _talking(hub, f"{repo} cannot be pushed to"):
        api = hub.HfApi(library_name="rl-training", library_version=__version__)
        made = api.create_repo(repo, private=private, exist_ok=True)
        files = [
            hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path)
            for path in sorted(folder.iterdir())
        ]
        api.create_commit(repo, files, commit_message=message)  # all of them or none
    return str(made)


def repository(name: str) -> str:
    """Return `user/name` of a repository's name, whichever way it is written.

    Raises:
        ConfigError: When it is not of this form.
    """
    repo = hub_name(name).repo if is_hub_name(name) else name
    if not _REPO.match(repo):
        raise ConfigError(
            f"{name!r} is not the name of a repository; it has the form user/name, of letters, "
            "digits, dots, dashes and underscores"
        )
    return repo


def require_hub(what: str) -> ModuleType:
    """Return the hub's library.

    Raises:
        MissingExtraError: When it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        raise MissingExtraError(
            f'{what} needs huggingface-hub; pip install "rl-training[hub]"'
        ) from None
    return huggingface_hub


@contextmanager
def _talking(hub: ModuleType, what: str) -> Iterator[None]:
    """Make one sentence of whatever the hub's library raises, and keep its bars off the terminal.

    Args:
        hub: The library.
        what: What cannot be done if it raises; its errors have no base of their own.
    """
    had_bars = not hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    except Exception as error:
        known = (_REASONS[c.__name__] for c in type(error).__mro__ if c.__name__ in _REASONS)
        raise CheckpointError(f"{what}: {next(known, None) or _in_a_line(error)}") from error
    finally:
        if had_bars:
            hub.utils.enable_progress_bars()


def _in_a_line(error: BaseException) -> str:
    """Return what went wrong first, in the library's own words."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
