"""`rl-training doctor`: what is installed, what works, and a short training run to prove it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_training._version import __version__

EXTRAS = {
    "tensorboard": ("tensorboard",),
    "report": ("matplotlib", "jinja2"),
    "video": ("imageio", "imageio_ffmpeg", "pygame"),
    "mujoco": ("mujoco", "imageio"),
    "box2d": ("Box2D",),
    "atari": ("ale_py",),
    "ogbench": ("ogbench", "dm_control"),
    "offline": ("minari", "h5py"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "tune": ("optuna",),
    "ray": ("ray",),
    "hub": ("huggingface_hub",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
FAMILIES = {
    "classic control": ("CartPole-v1", None),
    "toy text": ("FrozenLake-v1", None),
    "MuJoCo": ("InvertedPendulum-v5", "mujoco"),
    "Box2D": ("LunarLander-v3", "box2d"),
    "Atari": ("ALE/Breakout-v5", "atari"),
}
"""A task of each family of environments, and the extra it needs."""
CORE = ("torch", "numpy", "gymnasium", "safetensors", "pydantic", "typer", "rich")


def run_checks() -> dict[str, Any]:
    """Return the findings as plain data; `ok` is false when the package cannot be used."""
    report: dict[str, Any] = {
        "rl_training": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in CORE},
        "extras": {name: _installed(modules) for name, modules in EXTRAS.items()},
        "devices": _devices(),
        "memory_gib": _memory(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "acceleration": _acceleration(),
        "resume_levels": _resume_levels(),
        "self_test": _self_test(),
    }
    report["ok"] = report["self_test"]["passed"]
    return report


def _installed(modules: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _devices() -> list[str]:
    import torch

    devices = [f"cpu ({os.cpu_count()} processors, {torch.get_num_threads()} threads)"]
    count = torch.cuda.device_count()
    return devices + [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count)]


def _acceleration() -> dict[str, Any]:
    """Find what compiled updates need: a C++ compiler, bf16 instructions, a place to keep them."""
    from rl_training.errors import RLTrainingError
    from rl_training.runtime.compile.cache import cache_folder, has_bf16

    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    found = [path for name in compilers if name and (path := shutil.which(name))]
    try:
        cache = str(cache_folder())
    except (RLTrainingError, OSError) as error:
        cache = f"none ({error})"
    return {
        "compiler": found[0] if found else None,
        "bf16": has_bf16(),
        "bf16_factor": _bf16_factor(),
        "cache": cache,
    }


def _bf16_factor() -> float:
    """Measure how many times as fast products of matrices are in bfloat16 as in float32."""
    import torch

    seconds: dict[torch.dtype, float] = {}
    for _ in range(3):  # in turns; the quickest of each, since others use the machine too
        for dtype in (torch.float32, torch.bfloat16):
            left = torch.ones(256, 256, dtype=dtype)
            start = time.perf_counter()
            for _ in range(10):
                left @ left
            taken = time.perf_counter() - start
            seconds[dtype] = min(taken, seconds.get(dtype, taken))
    return round(seconds[torch.float32] / seconds[torch.bfloat16], 2)


def _resume_levels() -> dict[str, str]:
    """Find how exactly a task of each installed family continues after a resume."""
    from rl_training.envs.factory import make_env
    from rl_training.envs.snapshot import SnapshotWrapper

    levels: dict[str, str] = {}
    for family, (task, extra) in FAMILIES.items():
        if extra is None or _installed(EXTRAS[extra]):
            env = SnapshotWrapper(make_env(task), task)
            levels[family] = env.resume_level
            env.close()
    return levels


def _memory() -> dict[str, float]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total": round(memory.total / 2**30, 1), "free": round(memory.available / 2**30, 1)}


def _self_test() -> dict[str, Any]:
    """Train a few hundred steps, interrupt, resume, and compare bit-exactly."""
    from rl_training.errors import RLTrainingError
    from rl_training.experiment.config import TrainConfig
    from rl_training.runtime.checkpoints.verify import verify_resume

    start = time.monotonic()
    settings = {"hidden_sizes": [16, 16], "batch_size": 16, "learning_starts": 50}
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(
                algo="sac",
                env_id="Pendulum-v1",
                total_timesteps=300,
                eval_episodes=1,
                device="cpu",
                output_dir=folder,
                algo_kwargs={**settings, "buffer_capacity": 1000, "eval_interval": 0},
            )
            report = verify_resume(config, 150)
    except (RLTrainingError, OSError) as error:
        return {"passed": False, "detail": str(error), "seconds": _since(start)}
    detail = "trained, cut, resumed: " + ("bit-exact" if report.identical else "DIFFERS")
    return {"passed": report.identical, "detail": detail, "seconds": _since(start)}


def _since(start: float) -> float:
    return round(time.monotonic() - start, 1)


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the findings for a person."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "rl-training", f"{report['rl_training']} on Python {report['python']}, {report['platform']}"
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    table.add_row("packages", packages)
    table.add_row("devices", "; ".join(report["devices"]))
    memory = report["memory_gib"]
    table.add_row("memory", f"{memory['free']} of {memory['total']} GiB free")
    table.add_row("disk", f"{report['free_disk_gib']} GiB free here")
    have = [name for name, there in report["extras"].items() if there]
    lack = [name for name, there in report["extras"].items() if not there]
    table.add_row("extras", f"installed: {', '.join(have) or 'none'}")
    if lack:
        table.add_row("", f'missing: {", ".join(lack)} (pip install "rl-training\\[{lack[0]}]")')
    speed = report["acceleration"]
    compiler = speed["compiler"] or "no C++ compiler: updates run eagerly"
    table.add_row("compiling", f"{compiler}; programs in {speed['cache']}")
    bf16 = "has bf16 instructions" if speed["bf16"] else "has no bf16 instructions"
    factor = f"products in bf16 run at {speed['bf16_factor']}x the speed of fp32"
    advice = "" if speed["bf16_factor"] > 1 else "; leave `precision` at fp32"
    table.add_row("precision", f"processor {bf16}: {factor}{advice}")
    levels = ", ".join(f"{name} {level}" for name, level in report["resume_levels"].items())
    table.add_row("resume", f"environments continue: {levels}")
    test = report["self_test"]
    mark = "[bold]passed[/]" if test["passed"] else "[bold red]FAILED[/]"
    table.add_row("self-test", f"{mark} in {test['seconds']} s: {test['detail']}")
    console.print(table, highlight=False, soft_wrap=False)
