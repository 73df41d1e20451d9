"""The guides on learning do what they say: every block runs, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.guides import guide_blocks, run_guide

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES: dict[str, dict[str, str]] = {
    "quickstart.md": {"20000": "300", "interval=2000": "interval=150"},
    "guides/own_environment.md": {
        "total_timesteps: 8000": "total_timesteps: 700",
        "eval_interval: 2000": "eval_interval: 0",
        "--total-timesteps 9000": "--total-timesteps 800",
        "--total-timesteps 1500 --at 1100": "--total-timesteps 600 --at 550",
        "--total-timesteps 1000": "--total-timesteps 600",
        "(1_000, progress": "(550, progress",
    },
    "guides/custom_networks.md": {
        "--total-timesteps 600": "--total-timesteps 100",
        "--total-timesteps 800": "--total-timesteps 100",
        "--total-timesteps 1000": "--total-timesteps 120",
    },
    "guides/offline_from_your_data.md": {
        "--total-timesteps 4000": "--total-timesteps 60",
        "--total-timesteps 3000": "--total-timesteps 60",
        "--updates 2000 --members 5": "--updates 40 --members 2",
        "--episodes 20": "--episodes 1",
        "columns, 500": "columns, 60",
    },
    "offline_to_online.md": {
        "--total-timesteps 4000": "--total-timesteps 60",
        "--total-timesteps 1500": "--total-timesteps 220",
        "--total-timesteps 1000": "--total-timesteps 60",
        "total_timesteps=500": "total_timesteps=60",
    },
    "guides/imitation.md": {
        "--total-timesteps 30000": "--total-timesteps 2048",
        "--total-timesteps 2000": "--total-timesteps 60",
        "-s run_name=gail": "-s run_name=gail --total-timesteps 2048",
        "--seeds 0,1,2 -s expert_dataset_path=expert.npz": "--seeds 0 -s total_timesteps=2048 "
        "-s expert_dataset_path=expert.npz || true",  # so short, either may come out
    },
    "guides/model_based.md": {"--total-timesteps 300": "--total-timesteps 210"},
    "guides/atari.md": {},
    "guides/images_and_dictionaries.md": {
        "-s run_name=catch": "-s run_name=catch --total-timesteps 300",
        "total_timesteps: 20000": "total_timesteps: 1024",
        "learn(2_000": "learn(512",
        "--episodes 20": "--episodes 1",
        "--episodes 50": "--episodes 2",
    },
    "guides/many_seeds.md": {
        "--total-timesteps 30000": "--total-timesteps 2048",
        "--total-timesteps 40000": "--total-timesteps 3072",
        "--total-timesteps 20000": "--total-timesteps 2048",
        "eval_interval=5000": "eval_interval=1024",
        "total_timesteps=4000": "total_timesteps=1024",
        "total_timesteps=4_000": "total_timesteps=1_024",
        "--episodes 20": "--episodes 2",
    },
}
"""Each guide with what is shortened of it."""
FILE = """Save this as `numbers_of_mine.py`:

```python
NUMBER = 3
```
"""
USE = "```python\nfrom numbers_of_mine import NUMBER\n\nprint('sum', NUMBER + 1_000)\n```\n"
MISTAKE = "```bash\nrl-training describe sax\n```\n\n"


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_does_what_it_says(guide: str, empty: Path) -> None:
    if "atari" in guide:
        pytest.importorskip("ale_py")
    for module in ("imageio", "h5py", "onnxruntime"):
        pytest.importorskip(module)
    printed = run_guide(DOCS / guide, empty, GUIDES[guide])
    assert "Traceback" not in printed
    if guide == "quickstart.md":
        assert "data:video/mp4" in (empty / "report.html").read_text()


@pytest.mark.parametrize("guide", GUIDES)
def test_what_is_shortened_is_in_the_guide(guide: str) -> None:
    code = "".join(block.code for block in guide_blocks(DOCS / guide))
    assert [text for text in GUIDES[guide] if text not in code] == []


def test_every_guide_on_learning_is_run() -> None:
    linked = set(re.findall(r"\]\((guides/\w+\.md)\)", (DOCS / "quickstart.md").read_text()))
    assert linked <= set(GUIDES)


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


def test_an_error_after_prose_belongs_to_no_block(tmp_path: Path, empty: Path) -> None:
    page = write(tmp_path, FILE, USE, "Elsewhere it says:\n", "```text\nerror: no\n```\n")
    assert run_guide(page, empty) == "sum 1003\n"


def test_a_block_that_bash_alone_understands_is_given_to_bash(tmp_path: Path, empty: Path) -> None:
    page = write(tmp_path, "```bash\nfor i in 1 2; do echo line $i; done | tail -n 1 > x\n```\n")
    run_guide(page, empty)
    assert (empty / "x").read_text() == "line 2\n"
