"""`python -m scripts.docs_site`: builds the site into `site/`; a warning is an error."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.docs_site.check import mistakes
from scripts.docs_site.stage import CONFIG, ROOT, stage


def build(stage_folder: Path, target: Path) -> int:
    """Stage the pages, run the generator, check the result; returns the exit code.

    Args:
        stage_folder: Where the pages are put together; emptied first.
        target: Where the site goes, in place of what is there.
    """
    try:
        stage(stage_folder)
    except ValueError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", CONFIG]
    done = subprocess.run(command, cwd=stage_folder, check=False)
    if done.returncode:
        print(f"docs: see above; the staged pages are in {stage_folder}", file=sys.stderr)
        return done.returncode
    wrong = mistakes(stage_folder / "site")
    for line in wrong:
        print(f"docs: {line}", file=sys.stderr)
    if wrong:
        return 1
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(stage_folder / "site", target)
    print(f"docs: {len(list(target.rglob('*.html')))} pages in {target}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site from the command line."""
    parser = argparse.ArgumentParser(description="Build the documentation as a site.")
    parser.add_argument("--target", type=Path, default=ROOT / "site", help="folder of the site")
    target = parser.parse_args(arguments).target
    return build(ROOT / "build" / "docs", target.resolve())


if __name__ == "__main__":
    raise SystemExit(main())
