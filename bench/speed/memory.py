"""Memory: of a full replay, and the peak of a short run of every algorithm.

`python -m bench.speed.memory PRESET` is the short run; it prints its peak in bytes.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.speed.compare import ROOT
from bench.speed.figures import Figure
from bench.speed.options import BenchError, Options
from bench.speed.rows import Row
from bench.speed.sizes import FULL_REPLAY, SAC

MEGABYTE = 10**6
STEPS_AFTER_WARM_UP = 500


def peak_bytes() -> int:
    """Return the largest resident size of this process so far.

    `getrusage` alone would not do: Linux lets a process inherit the peak of the one it was forked
    from, so the system's own record of this program's memory is read where there is one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def replay_bytes() -> int:
    """Return the memory of a replay of 1M rows with the sizes of the SAC comparison."""
    from rl_training.data import ReplayBuffer

    return ReplayBuffer(FULL_REPLAY, (SAC.obs,), (SAC.action,)).num_bytes


def smallest_presets() -> dict[str, str]:
    """Map every algorithm to its preset with the fewest steps, one with a gate if it has any."""
    from bench.evidence.gates import GATES
    from rl_training.experiment.config import load_config
    from rl_training.experiment.registry import algorithm_names
    from rl_training.resources import preset_names

    gated, smallest = {gate.preset for gate in GATES}, {}

    def size(name: str) -> tuple[bool, int, str]:
        return name not in gated, load_config(name).total_timesteps, name

    for algo in algorithm_names():
        presets = [name for name in preset_names() if name.startswith(f"{algo}/")]
        if presets:
            smallest[algo] = min(presets, key=size)
    return smallest


def run_briefly(preset: str, threads: int) -> None:
    """Train a preset eagerly for a few updates, as a user would."""
    from rl_training.experiment.config import load_config
    from rl_training.runtime.train import train

    config = load_config(preset)
    settings = config.algo_config.model_dump()
    two_rollouts = 2 * settings.get("num_steps", 0) * config.num_envs
    steps = max(settings.get("learning_starts", 0) + STEPS_AFTER_WARM_UP, two_rollouts)
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "total_timesteps": min(steps, config.total_timesteps),
            "eval_episodes": 1,
            "accelerate": "off",
            "device": "cpu",
            "threads": threads,
            "output_dir": folder,
        }
        train(config.replace(**changes))


def _peak_of_run(preset: str, threads: int) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "bench.speed.memory", preset, str(threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(f"{preset} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return int(done.stdout.split()[-1])


def measure(row: Row, options: Options) -> Iterator[Figure]:
    """Measure the replay, then a run of each algorithm in a process of its own."""
    yield Figure(
        row=row.name,
        label=f"{row.name} replay 1M",
        unit="MB",
        samples={"ours": [replay_bytes() / MEGABYTE]},
        bar=row.bars["replay 1M"],
    )
    for algo, preset in smallest_presets().items():
        yield Figure(
            row=row.name,
            label=f"{row.name} {algo}",
            unit="MB, peak",
            samples={"ours": [_peak_of_run(preset, options.threads) / MEGABYTE]},
            extra={"preset": preset},
        )


if __name__ == "__main__":
    run_briefly(sys.argv[1], int(sys.argv[2]))
    print(peak_bytes())
