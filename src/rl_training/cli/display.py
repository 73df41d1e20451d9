"""What a person sees of a run: a live bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rl_training.cli.styles import BAR, EMPTY, NOTE, STRONG
from rl_training.data.datasets.scores import SCORE
from rl_training.experiment.grid import number_text, point_text
from rl_training.experiment.summary import SUCCESS, FinalReturn, GroupSummary, SeedSummary
from rl_training.runtime.callbacks import Callback, TrainerState

REFRESH_SECONDS = 0.1
NOTEBOOK_SECONDS = 0.5
NOTEBOOK_BAR = 24
"""Characters of the bar in a notebook."""
NOTEBOOK_LINES = 10
"""Newest evaluations and notes that stay below it."""
WIDE = 100
"""Columns of a terminal in which the bar has room for everything."""
MOST_SEEDS = 12
"""Seeds that the table of a group lists; of more, it lists only those at both ends."""
AT_EACH_END = 3
RECENT_SECONDS = 10.0
"""Time after which a speed counts a third in the estimate of the recent one."""
SHOWN = ("critic_loss", "actor_loss", "loss", "value_loss", "entropy", "alpha", "epsilon")


class Pace:
    """The recent speed of a run, and how long it will still take.

    Evaluations and saves are pauses: they are not part of the speed, and the remaining time holds
    as large a share of them as this process has spent so far, so that neither jumps when one ends.
    """

    def __init__(self, now: float, step: int) -> None:
        self._now, self._step = now, step
        self._steps = self._seconds = 0.0  # sums in which the past fades
        self._worked = self._paused = 0.0  # seconds of this process
        self._evaluated = False

    @property
    def speed(self) -> float:
        """Steps per second over about the last ten seconds of training; 0 if nothing is known."""
        return self._steps / self._seconds if self._seconds > 0.0 else 0.0

    def evaluated(self) -> None:
        """An evaluation was part of the time since the last step."""
        self._evaluated = True

    def saved(self, now: float) -> None:
        """The time since the last step was spent on a checkpoint."""
        self._paused += now - self._now
        self._now = now

    def step(self, now: float, step: int) -> None:
        """So many steps were done by now."""
        seconds, steps = now - self._now, step - self._step
        self._now, self._step = now, step
        if self._evaluated and self.speed > 0.0:
            worked = min(seconds, steps / self.speed)
            self._paused += seconds - worked
            seconds = worked
        self._evaluated = False
        self._worked += seconds
        fading = math.exp(-seconds / RECENT_SECONDS)
        self._steps = self._steps * fading + steps
        self._seconds = self._seconds * fading + seconds

    def remaining(self, total: int) -> float | None:
        """Seconds until step `total`; None while nothing is known."""
        if self.speed <= 0.0 or self._worked <= 0.0:
            return None
        return (total - self._step) / self.speed * (1.0 + self._paused / self._worked)


class ProgressDisplay(Callback):
    """Progress bar with recent speed, remaining time, latest returns and losses."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._last, self._started = -math.inf, 0.0
        self._pace = Pace(0.0, 0)

    def on_start(self, state: TrainerState) -> None:
        """Show what starts, and the bar."""
        self.console.print(_heading(state))
        wide = self.console.width >= WIDE
        elapsed = [TextColumn("{task.fields[elapsed]}")] if wide else []
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(24 if wide else 8, EMPTY, complete_style=BAR, finished_style=BAR),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[speed]}"),
            *elapsed,
            TextColumn("eta {task.fields[eta]}"),
            TextColumn("{task.fields[info]}"),
            console=self.console,
            transient=False,
            refresh_per_second=4,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            "step",
            total=state.total_timesteps,
            completed=state.start_step,
            speed="",
            elapsed=_duration(0),
            eta="-:--:--",
            info="",
        )
        self._started = self._clock()
        self._pace = Pace(self._started, state.start_step)

    def on_step(self, state: TrainerState) -> None:
        """Move the bar, at most ten times a second."""
        now = self._clock()
        self._pace.step(now, state.step)
        if self._progress is None or now - self._last < REFRESH_SECONDS:
            return
        self._last = now
        self._progress.update(
            self._task,
            completed=state.step,
            speed=f"{self._pace.speed:,.0f} steps/s",
            elapsed=_duration(now - self._started),
            eta=_duration(self._pace.remaining(state.total_timesteps)),
            info=_info(state),
        )

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:  # noqa: ARG002
        """Take a save for a pause."""
        self._pace.saved(self._clock())

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """Print a line that stays."""
        self._pace.evaluated()
        line = _evaluation_line(state, returns)
        losses = [f"{n} {state.metrics[n]:.3g}" for n in SHOWN if n in state.metrics][:3]
        for loss in losses:  # as many as there is room for
            if line.cell_len + 2 + len(loss) <= self.console.width:
                line.append(f"  {loss}")
        self.console.print(line)

    def on_message(self, state: TrainerState, text: str) -> None:  # noqa: ARG002
        """Print a warning."""
        self.console.print(Text.assemble(("note:", NOTE), f" {text}"))

    def on_end(self, state: TrainerState) -> None:
        """Leave the bar at its last state."""
        if self._progress is not None:
            self._last = -math.inf
            self.on_step(state)
            self._progress.stop()
            self._progress = None
            if state.stop_reason is not None:
                self.console.print(f"stopped early: {state.stop_reason}", highlight=False)


class NotebookDisplay(Callback):
    """One display in a notebook's cell, rewritten in place: what starts, the bar, evaluations."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._pace = Pace(0.0, 0)
        self._lines: list[str] = []
        self._head = ""
        self._handle: Any = None

    def on_start(self, state: TrainerState) -> None:
        """Show what starts."""
        self._pace = Pace(self._clock(), state.start_step)
        self._head, self._lines, self._handle = _heading(state).plain, [], None
        self._show(state)

    def on_step(self, state: TrainerState) -> None:
        """Move the bar, at most twice a second: every change is a message to the browser."""
        now = self._clock()
        self._pace.step(now, state.step)
        if now - self._last >= NOTEBOOK_SECONDS:
            self._show(state)

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:  # noqa: ARG002
        """Take a save for a pause."""
        self._pace.saved(self._clock())

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """Add a line."""
        self._pace.evaluated()
        self._add(_evaluation_line(state, returns).plain)
        self._show(state)

    def on_message(self, state: TrainerState, text: str) -> None:
        """Add a warning."""
        self._add(f"note: {text}")
        self._show(state)

    def on_end(self, state: TrainerState) -> None:
        """Leave the display at its last state."""
        if state.stop_reason is not None:
            self._add(f"stopped early: {state.stop_reason}")
        self._pace.step(self._clock(), state.step)
        self._show(state)

    def _add(self, line: str) -> None:
        self._lines = [*self._lines, line][-NOTEBOOK_LINES:]

    def _show(self, state: TrainerState) -> None:
        from IPython.display import display

        self._last = self._clock()
        done = min(1.0, state.step / state.total_timesteps)
        filled = round(NOTEBOOK_BAR * done)
        parts = (
            f"{'█' * filled}{'░' * (NOTEBOOK_BAR - filled)} {done:4.0%}",
            f"{state.step:,}/{state.total_timesteps:,}",
            f"{self._pace.speed:,.0f} steps/s" if self._pace.speed else "",
            f"eta {_duration(self._pace.remaining(state.total_timesteps))}",
            _info(state),
        )
        text = "\n".join([self._head, "  ".join(filter(None, parts)), *self._lines])
        page = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
        shown = {"text/plain": text, "text/html": page}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class QuietDisplay(Callback):
    """Only what a person must know, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_message(self, state: TrainerState, text: str) -> None:  # noqa: ARG002
        """Print a warning."""
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:  # noqa: ARG002
        """Print one plain line."""
        mean = state.metrics["eval_return_mean"]
        score = f" {SCORE}={state.metrics[SCORE]:.2f}" if SCORE in state.metrics else ""
        success = f" {SUCCESS}={state.metrics[SUCCESS]:.4f}" if SUCCESS in state.metrics else ""
        text = f"step={state.step} eval_return_mean={mean:.2f}{score}{success}"
        self.console.print(text, highlight=False)


def display_for(console: Console, *, quiet: bool) -> Callback:
    """Return the display that suits where the output goes."""
    if console.is_jupyter and not quiet:
        return NotebookDisplay()
    if console.is_terminal and not quiet:
        return ProgressDisplay(console)
    return QuietDisplay(console)


def _heading(state: TrainerState) -> Text:
    """Say what starts."""
    different = dict.fromkeys(state.seeds)
    seeds = ", ".join(str(seed) for seed in different)
    if len(state.seeds) > len(different):
        seeds += f" at each of {len(state.seeds) // len(different)} points"
    verb = f"resuming at step {state.start_step:,}" if state.start_step else "training"
    return Text.assemble(
        (state.algo, STRONG),
        " on ",
        (state.env_id, STRONG),
        f", seed {seeds}: {verb}, {state.total_timesteps:,} steps; run folder ",
        str(state.run_dir),
    )


def _evaluation_line(state: TrainerState, returns: Sequence[Sequence[float]]) -> Text:
    """Say what an evaluation gave."""
    count = sum(len(episodes) for episodes in returns)
    mean, std = state.metrics["eval_return_mean"], state.metrics["eval_return_std"]
    line = Text.assemble(
        f"  step {state.step:>9,}  eval return ",
        (f"{mean:9.2f}", STRONG),
        f" ± {std:<8.2f} ({count} episodes)",
    )
    if SCORE in state.metrics:
        line.append(f"  score {state.metrics[SCORE]:.1f}")
    if SUCCESS in state.metrics:
        line.append(f"  success {state.metrics[SUCCESS]:.0%}")
    return line


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _info(state: TrainerState) -> str:
    metrics: Mapping[str, float] = state.metrics
    parts = []
    if "rollout/return_mean" in metrics:
        parts.append(f"return {metrics['rollout/return_mean']:.1f}")
    if "eval_return_mean" in metrics:
        parts.append(f"eval {metrics['eval_return_mean']:.1f}")
    return "  ".join(parts)


def print_result(
    console: Console, run_dir: Path, checkpoint: Path, metrics: Mapping[str, float]
) -> None:
    """Print `name=value` lines that shell scripts can read."""
    # A path may hold [brackets], which are not markup.
    for line in (f"run_dir={run_dir}", f"checkpoint_path={checkpoint}"):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    print_metrics(console, metrics)


def print_metrics(console: Console, metrics: Mapping[str, float]) -> None:
    """Print `name=value` lines; counts without a fraction."""
    for name, value in metrics.items():
        count = float(value).is_integer() and "return" not in name and name != SUCCESS
        console.print(f"{name}={value:.0f}" if count else f"{name}={value:.4f}", highlight=False)


def print_group(console: Console, summary: GroupSummary) -> None:
    """Print what each member of a group reached, and the interquartile mean over seeds.

    With a grid there is such a mean for each point, and the best one is marked.
    """
    finals = [summary.final_return, *(point.final_return for point in summary.points)]
    if all(final.iqm is None for final in finals):
        return  # never evaluated: there is nothing to compare
    digits = _digits(summary)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("seed", *summary.seeds[0].point, "final return", "best return", "at step"):
        table.add_column(column, justify="right", no_wrap=True)
    top, hidden, bottom = _shown_seeds(summary.seeds)
    for member in top:
        table.add_row(*_cells(member, digits))
    if hidden:
        table.add_row(*[""] * (1 + len(top[0].point)), f"{hidden} between")
    for member in bottom:
        table.add_row(*_cells(member, digits))
    console.print()
    console.print(table, highlight=False, soft_wrap=False)
    for line, strong in _iqm_lines(summary, digits):
        style = "bold" if strong else ""
        console.print(line, markup=False, highlight=False, style=style, soft_wrap=True)


def _iqm_lines(summary: GroupSummary, digits: int) -> list[tuple[str, bool]]:
    """Return the lines below the table, and whether each stands out."""
    over = f"over {summary.num_seeds} seeds"
    if not summary.points:
        return [(f"{_iqm(summary.final_return, summary.level, digits)} {over}", True)]
    names = [point_text(point.point) for point in summary.points]
    figures = [_iqm(point.final_return, summary.level, digits) for point in summary.points]
    widths = max(map(len, names)), max(map(len, figures))
    return [
        (
            f"{name:<{widths[0]}}  {figure:<{widths[1]}} {over}{'  best' if point.best else ''}",
            point.best,
        )
        for point, name, figure in zip(summary.points, names, figures, strict=True)
    ]


def _iqm(final: FinalReturn, level: float, digits: int) -> str:
    if final.iqm is None or final.iqm_low is None or final.iqm_high is None:
        return "IQM -"
    low, high = f"{final.iqm_low:.{digits}f}", f"{final.iqm_high:.{digits}f}"
    return f"IQM {final.iqm:.{digits}f} [{level:.0%} {low}, {high}]"


def _shown_seeds(
    seeds: Sequence[SeedSummary],
) -> tuple[Sequence[SeedSummary], int, Sequence[SeedSummary]]:
    """Return the seeds above a gap, the number in it, and those below; few seeds have no gap."""
    if len(seeds) <= MOST_SEEDS:
        return seeds, 0, ()
    ranked = sorted(seeds, key=lambda member: member.final_return or 0.0)
    hidden = len(seeds) - 2 * AT_EACH_END
    return ranked[:AT_EACH_END], hidden, ranked[-AT_EACH_END:]


def _cells(member: SeedSummary, digits: int) -> tuple[str, ...]:
    returns = (member.final_return, member.best_return)
    numbers = ("-" if value is None else f"{value:.{digits}f}" for value in returns)
    step = "-" if member.best_step is None else f"{member.best_step:,}"
    point = (number_text(value) for value in member.point.values())
    return (str(member.seed), *point, *numbers, step)


def _digits(summary: GroupSummary) -> int:
    """Return the decimals to print: returns of a few units, such as success rates, need more."""
    returns = [value for m in summary.seeds for value in (m.final_return, m.best_return)]
    return 1 if max(abs(value or 0.0) for value in returns) >= 10 else 3
