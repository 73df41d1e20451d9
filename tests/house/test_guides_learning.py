"""The guides on learning do what they say: every block runs, in order, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.guides import guide_blocks, run_guide

FILE = """Save this as `numbers_of_mine.py`:

```python
NUMBER = 3
```
"""
USE = "```python\nfrom numbers_of_mine import NUMBER\n\nprint('sum', NUMBER + 1_000)\n```\n"
MISTAKE = "```bash\nrl-training describe sax\n```\n\n"


def write(folder: Path, *parts: str) -> Path:
    page = folder / "guide.md"
    page.write_text("\n".join(parts))
    return page


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_files_are_written_and_code_runs_in_one_namespace(tmp_path: Path, empty: Path) -> None:
    page = write(tmp_path, FILE, USE, "```python\nprint(NUMBER)\n```\n")
    assert run_guide(page, empty, {"1_000": "1"}) == "sum 4\n3\n"
    assert (empty / "numbers_of_mine.py").is_file()


def test_a_replacement_that_is_not_on_the_page_is_a_failure(tmp_path: Path, empty: Path) -> None:
    with pytest.raises(AssertionError, match="2_000"):
        run_guide(write(tmp_path, FILE, USE), empty, {"2_000": "1"})


@pytest.mark.parametrize(
    "shown",
    ["error: unknown thing", "error: describe sax: unknown", "ValueError: unknown"],
)
def test_an_error_that_is_not_what_the_guide_shows_is_a_failure(
    tmp_path: Path, empty: Path, shown: str
) -> None:
    with pytest.raises(AssertionError, match="fails with"):
        run_guide(write(tmp_path, MISTAKE, f"```text\n{shown}\n```\n"), empty)


def test_a_command_that_fails_without_saying_so_is_a_failure(tmp_path: Path, empty: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 2"):
        run_guide(write(tmp_path, MISTAKE), empty)


def test_the_error_that_a_guide_shows_may_leave_words_out(tmp_path: Path, empty: Path) -> None:
    page = write(tmp_path, MISTAKE, "```text\nerror: ...sax...\n```\n")
    assert "sax" in run_guide(page, empty)
    assert [block.error is None for block in guide_blocks(page)] == [False, True]


def test_a_block_that_bash_alone_understands_is_given_to_bash(tmp_path: Path, empty: Path) -> None:
    page = write(tmp_path, "```bash\nfor i in 1 2; do echo line $i; done | tail -n 1 > x\n```\n")
    run_guide(page, empty)
    assert (empty / "x").read_text() == "line 2\n"
