"""Guides about running, speed, methods and other libraries: every block does what the page says.

The long form, `matrix`, runs whole pages. Here some pages are run without what trains.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.guides import guide_blocks, run_guide

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs/guides"


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a shell runs have one thread, and find the benchmark of this clone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), inherited))))


def only(page: Path, folder: Path, *kept: str) -> Path:
    """Copy a page with those of its bash blocks that hold one of some texts."""
    text = page.read_text(encoding="utf-8")
    assert not (missing := [part for part in kept if part not in text]), (page.name, missing)

    def block(match: re.Match[str]) -> str:
        return match[0] if any(part in match[0] for part in kept) else ""

    copy = folder / page.name
    copy.write_text(re.sub(r"^```bash\n.*?^```\n", block, text, flags=re.DOTALL | re.MULTILINE))
    return copy


def shown(page: Path) -> list[str]:
    """Return what a page shows as output."""
    return [block.code for block in guide_blocks(page) if block.language == "text"]


# Reading the report


def test_figures_of_the_report_are_computed_as_the_page_says(tmp_path: Path) -> None:
    printed = run_guide(only(GUIDES / "reading_the_report.md", tmp_path), tmp_path)
    table, *figures, error = shown(GUIDES / "reading_the_report.md")
    assert "".join(figures) == printed
    assert "486.5 [335.7, 500.0]" in table
    assert error.startswith("error: ")


@pytest.mark.matrix
def test_reading_the_report(tmp_path: Path) -> None:
    fewer = {"--total-timesteps 20000": "--total-timesteps 1200"}
    fewer["eval_interval=2000"] = "eval_interval=600"
    printed = run_guide(GUIDES / "reading_the_report.md", tmp_path, fewer)
    assert "CartPole-v1, by final return" in printed
    assert "Probability of improvement" in (tmp_path / "report.html").read_text()


# Resume and preemption


@pytest.mark.matrix
def test_a_run_that_is_stopped_and_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    """The shell loop of the page, with a real SIGTERM and a real SIGKILL."""
    fewer = {
        "--total-timesteps 4000": "--total-timesteps 1600 -s eval_interval=400",
        "step=1000": "step=400",
        "step=2000": "step=800",
        "step_4000": "step_1600",
        "--total-timesteps 800 --at 650": "--total-timesteps 560 --at 530",
    }
    printed = run_guide(GUIDES / "preemption.md", tmp_path, fewer)
    log = (tmp_path / "loop.log").read_text()
    assert "interrupted: SIGTERM received: saved step" in log
    assert "exit code 75, starting again\n" in log
    assert "exit code 137, starting again\n" in log
    assert "bit-exact\n" in printed
    assert "note: the run is complete at step 1600" in printed


SRUN = """#!/bin/sh
echo "srun $*" >> asked.txt
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> asked.txt
"""


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (2, False), (0, False)])
def test_the_batch_script_asks_to_be_requeued_only_when_it_was_interrupted(
    code: int, requeued: bool, tmp_path: Path
) -> None:
    blocks = guide_blocks(GUIDES / "preemption.md")
    (script,) = (block.code for block in blocks if block.file == "train.sbatch")
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "run.sh").write_text(f"exit {code}\n")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "train.sbatch"], cwd=tmp_path, env=settings, check=False)
    assert done.returncode == code
    asked = ["srun bash run.sh", *["scontrol requeue 7"] * requeued]
    assert (tmp_path / "asked.txt").read_text().splitlines() == asked


# Speed and compiled updates


@pytest.mark.matrix
def test_settings_that_need_a_device_say_so(tmp_path: Path) -> None:
    kept = ("accelerate=graph", "precision=tf32", "overlap=true")
    printed = run_guide(only(GUIDES / "gpu_speed.md", tmp_path, *kept), tmp_path)
    assert printed.count("error: ") == 3


@pytest.mark.matrix
def test_gpu_speed(tmp_path: Path) -> None:
    fewer = {"--total-timesteps 3000": "--total-timesteps 1000", "--steps 3000": "--steps 1500"}
    fewer |= {"--total-timesteps 1500": "--total-timesteps 600", "interval=500": "interval=250"}
    printed = run_guide(GUIDES / "gpu_speed.md", tmp_path, fewer)
    assert '"time/steps_per_second": ' in printed
    assert "loop-sac" in printed


@pytest.mark.matrix
def test_an_update_is_traced_as_the_page_says(tmp_path: Path) -> None:
    page = GUIDES / "compiled_updates.md"
    printed = run_guide(only(page, tmp_path), tmp_path)
    sources, operations, *_ = shown(page)
    assert sources in printed
    # Their numbers may differ between versions of PyTorch.
    assert re.search(r"^\d+ operations on \d+ tensors$", printed, re.MULTILINE)
    assert re.search(r"^\d+ operations on \d+ tensors$", operations, re.MULTILINE)


@pytest.mark.matrix
def test_how_the_compiled_update_works(tmp_path: Path) -> None:
    page = GUIDES / "compiled_updates.md"
    printed = run_guide(page, tmp_path)
    assert printed.count("note: waiting for the compiler") == 4, "all but the second of two alike"
    for note in shown(page):
        if note.startswith("note: running without"):
            assert " ".join(note.split()) in " ".join(printed.split())
    assert printed.count("note: running without compiled updates") == 2


# A cluster


@pytest.fixture
def ray_is_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    inherited = os.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), inherited)))
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("ray_is_here")
def test_a_sweep_on_a_cluster_survives_the_loss_of_a_machine(tmp_path: Path) -> None:
    printed = run_guide(GUIDES / "ray_cluster.md", tmp_path)
    assert "exit code 0\n" in printed
    assert "bit-exact\n" in printed


# Methods of one's own


@pytest.mark.matrix
def test_the_maths_of_the_method_of_the_guide_is_tested(tmp_path: Path) -> None:
    page = only(GUIDES / "adding_a_method.md", tmp_path, "-m pytest")
    assert "3 passed" in run_guide(page, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_a_method_of_ones_own_keeps_the_contract(tmp_path: Path) -> None:
    printed = run_guide(GUIDES / "adding_a_method.md", tmp_path)
    assert "identical" in printed
    assert " passed" in printed


# Deployment


@pytest.mark.matrix
def test_deployment(tmp_path: Path) -> None:
    for module in ("onnx", "onnxscript", "onnxruntime", "huggingface_hub"):
        pytest.importorskip(module, reason="the extras export and hub are not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    page = ROOT / "docs/deployment.md"
    printed = run_guide(page, tmp_path, {"8765": port})
    assert "400 observations have shape (2,), not [4]" in printed
    doors = next(block for block in shown(page) if "obs/worth" in block)
    for line in doors.splitlines()[2:]:
        assert line in printed, "what a mask forbids is never chosen, trained or not"
    assert (tmp_path / "for_the_hub" / "policy.safetensors").is_file()
    answers = [line for line in printed.splitlines() if line in ("0", "1")]
    assert len(answers) >= 3, "of predict: one observation, a file, a line of stdin"


# From elsewhere


@pytest.mark.parametrize("name", ["from_sb3.md", "from_d3rlpy.md"])
def test_a_name_of_another_library_is_answered_as_the_page_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = guide_blocks(ROOT / "docs" / name)
    answer = next(
        b.code for b in blocks if b.language == "text" and " is not a setting of" in b.code
    )
    (code,) = (b.code for b in blocks if "except ConfigError" in b.code)
    exec(f"from rl_training import CQL, PPO\n{code}", {})
    assert capsys.readouterr().out == answer


@pytest.mark.matrix
def test_coming_from_cleanrl(tmp_path: Path) -> None:
    fewer = {
        "--total-timesteps 500000": "--total-timesteps 1024",
        "learning_starts=10000": "learning_starts=200",
        "learning_starts=5000": "learning_starts=200",
        "--env Pendulum-v1 --total-timesteps 20000": "--env Pendulum-v1 --total-timesteps 600",
        "--seeds 1..5 --total-timesteps 20000": "--seeds 1..2 --total-timesteps 2048",
        "eval_interval=5000": "eval_interval=1024",
        "--total-timesteps 5000": "--total-timesteps 1500",
        "eval_interval=2500": "eval_interval=750",
    }
    printed = run_guide(ROOT / "docs/from_cleanrl.md", tmp_path, fewer)
    assert " passed" in printed
