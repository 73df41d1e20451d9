"""What `train` and `resume` print around a run: warnings before it, figures and advice after it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rl_training.cli.styles import NOTE
from rl_training.runtime.callbacks import Callback, TrainerState

if TYPE_CHECKING:
    from rl_training.runtime.results import TrainResult

out = Console(soft_wrap=True, emoji=False)
err = Console(stderr=True, emoji=False)


class MadeUpWarning(Callback):
    """Says before a run that its data is made up, and how to get real data.

    Told when the run begins, not earlier: a mistake stays one sentence.
    """

    def on_start(self, state: TrainerState) -> None:
        """Look at the run's own configuration."""
        from rl_training.experiment.config import load_config
        from rl_training.experiment.made_up import made_up_data

        found = made_up_data(load_config(state.run_dir / "config.yaml"))
        if found is None:
            return
        _warn(f"{found.summary}. For real data:")
        for command in found.commands:
            err.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def _warn(text: str) -> None:
    sentence = Text.assemble(("warning:", NOTE), " ", text)
    # A terminal breaks lines between words, a file keeps the sentence in one.
    err.print(sentence, soft_wrap=not err.is_terminal)


def print_outcome(result: TrainResult, start: Path) -> None:
    """Print where everything is, seen from `start`; `name=value` lines first, for scripts."""
    from rl_training.cli.display import print_group, print_result
    from rl_training.cli.plots import draw_plots
    from rl_training.experiment.config import load_config
    from rl_training.experiment.made_up import made_up_data
    from rl_training.experiment.summary import SUCCESS, SUMMARY_FILE, read_summary

    def near(path: Path) -> Path:
        return path.relative_to(start) if path.is_relative_to(start) else path

    print_result(out, near(result.run_dir), near(result.checkpoint_path), result.metrics)
    summary = read_summary(result.run_dir) if result.per_seed else None
    lines = [] if result.stop_reason is None else [f"stop_reason={result.stop_reason}"]
    for member in result.per_seed:
        mean: Any = member.metrics.get("eval_return_mean")
        success = member.metrics.get(SUCCESS)
        more = "" if success is None else f" {SUCCESS}={success:.4f}"
        lines.append(f"seed_run={near(member.run_dir)} eval_return_mean={mean}{more}")
    if summary is not None:
        lines.append(f"summary={near(result.run_dir / SUMMARY_FILE)}")
    curves = {} if summary is None else summary.curves()
    drawn = draw_plots(result.run_dir, [member.run_dir for member in result.per_seed], curves)
    lines.append(f"plots={near(drawn) if isinstance(drawn, Path) else f'none ({drawn})'}")
    for line in lines:
        out.print(line, markup=False, highlight=False)
    if summary is not None:
        print_group(out, summary)
    made_up = made_up_data(load_config(result.run_dir / "config.yaml"))
    if made_up is not None:
        out.print(f"data=made up ({made_up.setting})", markup=False, highlight=False)
        _warn(
            f"{made_up.summary}. For real data: {made_up.commands[0]}, then {made_up.commands[1]}"
        )
    if out.is_terminal:
        one = near((result.per_seed or (result,))[0].run_dir)
        print_next(one, near(result.run_dir))


def print_next(run: Path, run_dir: Path) -> None:
    """Print what a person may want to type next; only what is installed is named."""
    command = _command()
    lines = [
        f"{command} eval {run} --episodes 20",
        f"{command} resume {run_dir} --total-timesteps <more>",
    ]
    for modules, line in (
        (("imageio", "imageio_ffmpeg", "pygame"), f"{command} record {run}"),
        (("jinja2",), f"{command} report {run_dir} -o report.html"),
        (("huggingface_hub",), f"{command} push {run} --repo <user>/<name>"),
    ):
        if _has(*modules):
            lines.append(line)
    if _has("tensorboard") and any(run_dir.rglob("tensorboard")):
        lines.append(f"{command.replace('rl-training', 'tensorboard')} --logdir {run_dir}")
    err.print("\nWhat next:", style="bold")
    for line in lines:
        err.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _command() -> str:
    """Return what to type for this program here: its name, or its path when not on the PATH."""
    called = Path(sys.argv[0])
    if shutil.which("rl-training") or called.name != "rl-training":
        return "rl-training"
    return os.path.relpath(called)
