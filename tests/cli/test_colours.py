"""What a terminal is sent can be read on white and on black: no yellow, cyan, green or blue."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers.tiny import clean_environment, tiny_config, write_tiny
from rl_training.cli.display import ProgressDisplay
from rl_training.runtime.train import train

READABLE = {"", "0", "1", "2", "22", "31", "35", "39", "49", "1;31", "1;35"}
"""Plain, bold, dim (the empty part of a bar), red, magenta, and ends of these."""
SGR = re.compile(r"\x1b\[([0-9;]*)m")


def coloured(folder: Path, *words: object) -> str:
    """What a command writes to a terminal of 80 columns and 16 colours."""
    colours = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "rl_training", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=clean_environment() | colours,
    )
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["data", "collect", "--help"]),
        *(["list"], ["list", "presets"], ["describe", "sac"]),
        *(["trian"], ["train", "--algo", "sac", "--env", "CartPole-v1"]),
    ],
    ids=" ".join,
)
def test_commands_use_readable_colours_alone(words: list[str], tmp_path: Path) -> None:
    text = coloured(tmp_path, *words)
    assert set(SGR.findall(text)) <= READABLE
    assert "\x1b[" in text, "nothing is coloured, so nothing was tested"


@pytest.mark.matrix
def test_a_whole_run_does(tmp_path: Path) -> None:
    config = write_tiny(tmp_path, "iql", algo_kwargs={"eval_interval": 32})
    text = coloured(tmp_path, "train", "-c", config)
    assert "warning:" in text
    assert "What next" in text
    assert set(SGR.findall(text)) <= READABLE


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_does(width: int, tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=width, color_system="standard", legacy_windows=False
    )
    train(tiny_config("sac", tmp_path), callbacks=[ProgressDisplay(console)])
    codes = set(SGR.findall(file.getvalue()))
    assert "35" in codes
    assert codes <= READABLE
    assert max(len(SGR.sub("", line)) for line in file.getvalue().splitlines()) < 3 * width


def test_the_check_can_fail() -> None:
    assert set(SGR.findall("\x1b[1;33mnote:\x1b[0m")) - READABLE == {"1;33"}
