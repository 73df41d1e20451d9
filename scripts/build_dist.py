"""Builds the files of a release from a commit and checks what is in them.

`python scripts/build_dist.py` writes an sdist and a wheel of HEAD to dist/, and with `--commit`
those of another commit or tag.  What is not committed has no part in it.  The wheel is built from
the sdist, so both hold the same.  Nothing is downloaded: the setuptools that is installed builds.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rl_training"
_BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def export(commit: str, folder: Path, root: Path = ROOT) -> None:
    """Write the files of a commit into a folder."""
    archive = folder.parent / "commit.tar"
    command = ["git", "archive", "--format=tar", f"--output={archive}", commit]
    subprocess.run(command, cwd=root, check=True)
    _unpack(archive, folder)


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build an sdist from a folder of sources, and a wheel from the sdist."""
    out.mkdir(parents=True, exist_ok=True)
    sdist = _run_backend("build_sdist", source, out)
    with tempfile.TemporaryDirectory() as temporary:
        _unpack(sdist, Path(temporary))
        (unpacked,) = Path(temporary).iterdir()
        wheel = _run_backend("build_wheel", unpacked, out)
    return sdist, wheel


def _run_backend(hook: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-c", _BUILD, hook, str(out.resolve())]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{hook} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return out / done.stdout.splitlines()[-1]


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def faults(source: Path, sdist: Path, wheel: Path) -> list[str]:
    """Return what is wrong with the files of a release, a sentence each.

    Args:
        source: The folder that they were built from.
        sdist: The source distribution.
        wheel: The wheel.
    """
    version = version_of(source)
    sources = {
        path.relative_to(source / "src").as_posix()
        for path in (source / "src" / PACKAGE).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = f"{PACKAGE}-{version}.dist-info/"
    with tarfile.open(sdist) as tar:
        parts = {Path(member.name).parts[1:] for member in tar if member.isfile()}
    packed = {path for path in names if not path.startswith(metadata)}
    return [
        *(f"the wheel lacks {name}" for name in sorted(sources - packed)),
        *(f"the wheel should not hold {name}" for name in sorted(packed - sources)),
        *(
            f"the wheel lacks {metadata}{name}"
            for name in ("METADATA", "entry_points.txt")
            if metadata + name not in names
        ),
        *(
            f"the sdist should not hold the folder {name}"
            for name in sorted({part[0] for part in parts if len(part) > 1} - {"src"})
        ),
        *version_faults(source, version),
    ]


def version_of(source: Path) -> str:
    """Return the version that the sources have."""
    text = (source / "src" / PACKAGE / "_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return str(version)


def version_faults(source: Path, version: str) -> list[str]:
    """Return which pages do not know the version."""
    changelog = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (source / "CITATION.cff").read_text(encoding="utf-8")
    released = re.findall(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", changelog, re.M)
    if not released:
        return [f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`"]
    wanted = (f"version: {version}", f'date-released: "{released[0]}"')
    return [f"CITATION.cff does not say `{line}`" for line in wanted if line not in citation]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, and print what was written with its digest."""
    parser = argparse.ArgumentParser(description="Builds and checks the files of a release.")
    parser.add_argument("--commit", default="HEAD", help="commit or tag to build (HEAD)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to (dist)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        export(options.commit, source)
        sdist, wheel = build(source, options.out)
        found = faults(source, sdist, wheel)
    for fault in found:
        print(fault, file=sys.stderr)
    for path in (sdist, wheel):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
