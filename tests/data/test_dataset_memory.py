"""A dataset larger than what a process may hold: training and looking at it, under a limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np, psutil, torch
torch.set_num_threads(1)
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.train import train
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.check import check_dataset
from rl_training.data.datasets.summary import summarize
folder, what = Path(sys.argv[1]), sys.argv[2]
limit = psutil.Process().memory_info().data + (200 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if what in ("mapped", "device"):
    train(TrainConfig(
        algo="iql", env_id="Pendulum-v1", total_timesteps=40, eval_episodes=0, tensorboard=False,
        output_dir=str(folder), device="cpu", algo_kwargs={
            "dataset_kind": "npy", "dataset_path": str(folder / "data"), "dataset_storage": what,
            "hidden_sizes": [16], "reward_scale": 0.1, "normalize_observations": True,
        },
    ))
    print("trained")
else:
    dataset = load_transition_dataset("npy", path=folder / "data", allow_nan=True)
    print(summarize(dataset), check_dataset(dataset))
"""


def huge_folder(folder: Path, rows: int) -> Path:
    """Columns of zeros that take no room on disk: files with holes."""
    folder.mkdir()
    shapes = {"observations": (3,), "next_observations": (3,), "actions": (1,), "rewards": ()}
    for name, shape in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (rows, *shape))
    for name in ("terminations", "truncations"):
        flags = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.bool_, (rows,))
        if name == "truncations":
            flags[199::200] = True
    return folder


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize("what", ["mapped", "device", "inspect and check"])
def test_a_dataset_of_600_megabytes_needs_less_than_200(what: str, tmp_path: Path) -> None:
    folder = huge_folder(tmp_path / "data", 18_000_000)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 600e6
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    if what == "device":
        assert done.returncode != 0, "the limit does not hold"
        assert "MemoryError" in said or "allocate" in said, said[-500:]
    else:
        assert done.returncode == 0, said[-800:]
