"""Find what is wrong with a dataset, and say what to do about it.

Each check is a function from a `Subject` to findings; `CHECKS` lists them.
Shapes: N rows, E episodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.blocks import (
    column_blocks,
    count_at_border,
    joined,
    range_of,
)
from rl_training.data.datasets.columns import rows_with_reset_for_successor
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.ends import find_links
from rl_training.data.datasets.rewards import off_scale, reward_scales
from rl_training.data.datasets.units import (
    TaskSpec,
    any_in_row,
    box_text,
    check_fits,
    rows_forbidden,
    rows_outside_box,
)
from rl_training.data.normalizer import CONSTANT
from rl_training.errors import DataError

Level = Literal["error", "warning", "note"]
Rows = NDArray[np.int64]
LISTED = 10
"""Row and episode numbers that a finding names."""
SHUFFLED = 3
"""Broken links closer together than this many rows are rows out of order, not ends of episodes."""
OTHER_UNIT = 5.0
"""Times the usual largest value that an entry has on average in an episode of another unit."""
MOST_OF_OTHER_UNIT = 0.25
"""Share of episodes; more of them are data of another kind, not a fault."""
SHORT = 2
"""Episodes of fewer steps are suspect where others are long."""
FEW_STEPS = 10
SATURATED = 0.5
"""Share of rows at the border of the actions from which it is worth a note."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found: what, where, how often, and what to do."""

    check: str
    level: Level
    """Errors and warnings need a person; notes are worth knowing."""
    message: str
    advice: str
    count: int
    """Rows or episodes concerned."""
    rows: tuple[int, ...] = ()
    """The first of them."""
    episodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subject:
    """What is being checked."""

    data: OfflineDataset
    task: TaskSpec | None

    def at_rows(
        self, check: str, level: Level, rows: Rows, message: str, advice: str
    ) -> Iterator[Finding]:
        """Give a finding about rows, if there are any."""
        if len(rows):
            episodes = np.unique(np.searchsorted(self.data.episode_stops, rows, side="right"))
            yield Finding(
                check=check,
                level=level,
                message=message,
                advice=advice,
                count=len(rows),
                rows=tuple(rows[:LISTED].tolist()),
                episodes=tuple(episodes[:LISTED].tolist()),
            )

    def at_episodes(
        self, check: str, level: Level, episodes: Rows, message: str, advice: str
    ) -> Iterator[Finding]:
        """Give a finding about episodes, if there are any."""
        if len(episodes):
            yield Finding(
                check=check,
                level=level,
                message=message,
                advice=advice,
                count=len(episodes),
                rows=tuple(self.data.episode_starts[episodes[:LISTED]].tolist()),
                episodes=tuple(episodes[:LISTED].tolist()),
            )


def check_dataset(dataset: OfflineDataset, env_spec: TaskSpec | None = None) -> list[Finding]:
    """Look for every known fault.

    Args:
        dataset: With actions in the task's units; load it with `allow_nan` to have NaN listed, and
            without `mark_ends`, which would mend what is to be found.
        env_spec: The task, for its action box and time limit.

    Returns:
        The findings, errors first.
    """
    task = env_spec
    found: list[Finding] = []
    if task is not None:
        try:
            check_fits(dataset.observations, dataset.actions, task, dataset.name)
        except DataError as error:
            message, _, advice = str(error).removeprefix(f"{dataset.name}: ").partition("; ")
            fault = Finding(
                check="task", level="error", message=message, advice=advice, count=len(dataset)
            )
            found.append(fault)
            task = None
    subject = Subject(dataset, task)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities may be there
        found += [finding for check in CHECKS for finding in check(subject)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _not_finite(subject: Subject) -> Iterator[Finding]:
    for name, column in subject.data.columns():
        if column.dtype.kind != "f":
            continue
        bad = [
            block.start + np.flatnonzero(any_in_row(~np.isfinite(column[block])))
            for block in column_blocks(column)
        ]
        yield from subject.at_rows(
            "not_finite",
            "error",
            joined(bad),
            f"column {name} holds NaN or infinity",
            "remove these rows and mark the row before each as truncated",
        )


def _broken_chain(subject: Subject) -> Iterator[Finding]:
    links = find_links(dict(subject.data.columns()))
    broken = links.broken
    if links.shuffled:
        advice = (
            "the rows seem shuffled or thinned out: training takes each of these rows for an end, "
            "so that n-step returns are one-step returns; restore the order"
        )
    else:
        advice = (
            "an episode ends there or rows are lost: mark these rows as truncated, as training "
            "takes them (rl-training data convert writes it down)"
        )
        gaps = np.diff(broken, prepend=-SHUFFLED, append=len(subject.data) + SHUFFLED)
        # An end alone has whole links around it.
        together = np.minimum(gaps[:-1], gaps[1:]) < SHUFFLED
        yield from subject.at_rows(
            "shuffled_rows",
            "error",
            broken[together],
            "rows are out of order: next observations are not those of the following rows, at "
            "several rows close together",
            "bring these rows into time order, or remove them and mark the row before as truncated",
        )
        broken = broken[~together]
    yield from subject.at_rows(
        "broken_chain",
        "error",
        broken,
        "the next observation is not the observation of the following row",
        advice,
    )


def _successor_is_reset(subject: Subject) -> Iterator[Finding]:
    rows = rows_with_reset_for_successor(dict(subject.data.columns()))
    yield from subject.at_rows(
        "successor_is_reset",
        "warning",
        rows,
        "the next observation at a truncation is the first one of the next episode",
        "unless one recording was merely cut in pieces, remove these rows and mark the row before "
        "each as truncated: values would be learned across the reset",
    )


def _outside_box(subject: Subject) -> Iterator[Finding]:
    if subject.task is None:
        return
    actions, task = subject.data.actions, subject.task
    discrete = subject.data.is_discrete or bool(task.action_sizes)
    rows = rows_outside_box(actions, task)
    low, high = range_of(actions)
    message = f"actions lie outside the box of {task.env_id}"
    if len(rows):
        worst = f"from {np.nanmin(low):g} to {np.nanmax(high):g}"
        message = f"actions lie outside {box_text(task)} of {task.env_id}: they reach {worst}"
    advice = (
        "use the data of this task"
        if discrete
        else "set normalize_dataset_actions: true to clip them, if the environment did so too"
    )
    yield from subject.at_rows("outside_box", "error", rows, message, advice)
    if not discrete and task.action_low is not None and task.action_high is not None:
        reach = max(float(-np.nanmin(low)), float(np.nanmax(high)))
        widest = max(np.abs(task.action_low).max(), np.abs(task.action_high).max())
        if 0.99 <= reach <= 1.0 and widest > 1.5:
            yield Finding(
                check="unit_actions",
                level="warning",
                message=f"actions fill [-1, 1], but the box of {task.env_id} is {box_text(task)}",
                advice="they may have been scaled to [-1, 1] already: if so, scale them back",
                count=len(actions),
            )


def _forbidden(subject: Subject) -> Iterator[Finding]:
    data, task = subject.data, subject.task
    if task is None or len(rows_outside_box(data.actions, task)):
        return
    yield from subject.at_rows(
        "forbidden",
        "error",
        rows_forbidden(data.observations, data.actions, task),
        f"actions are not allowed by the mask of their observation in {task.env_id}",
        "remove these rows and mark the row before each as truncated",
    )


def _saturated(subject: Subject) -> Iterator[Finding]:
    data, task = subject.data, subject.task
    if data.is_discrete or (task is not None and task.action_sizes):
        return
    low, high = range_of(data.actions)
    at_border = count_at_border(data.actions, low, high)
    share = at_border / len(data)
    for entry in np.flatnonzero((share > SATURATED) | (low == high)).tolist():
        constant = low[entry] == high[entry]
        what = "never changes" if constant else f"is at its border in {share[entry]:.0%} of rows"
        yield Finding(
            check="saturated",
            level="note",
            message=f"action entry {entry} {what} ({low[entry]:g} to {high[entry]:g})",
            advice="a Gaussian policy cannot imitate the border of the box well; clipping by the "
            "recorder is a common cause",
            count=int(at_border[entry]),
        )


def _duplicates(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    first: dict[bytes, int] = {}
    repeated, originals = [], []
    bounds = zip(data.episode_starts.tolist(), data.episode_stops.tolist(), strict=True)
    for number, (start, stop) in enumerate(bounds):
        if stop - start < FEW_STEPS and not np.mod(data.observations[start:stop], 1).any():
            continue  # Short walks over a few states repeat by chance.
        content = hashlib.sha256()
        for column in (data.observations, data.actions, data.rewards):
            content.update(np.ascontiguousarray(column[start:stop]).data)
        original = first.setdefault(content.digest(), number)
        if original != number:
            repeated.append(number)
            originals.append(original)
    pairs = ", ".join(f"{a} = {b}" for a, b in zip(repeated[:3], originals[:3], strict=True))
    yield from subject.at_episodes(
        "duplicates",
        "warning",
        np.array(repeated, np.int64),
        f"episodes are copies of earlier ones ({pairs})",
        "remove the copies: they count twice in training, and leak into any validation split",
    )


def _reward_scale(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    scales = reward_scales(data)
    episodes = off_scale(scales)
    factors = scales[episodes]
    parts = {
        part.name
        for part in data.parts
        for row in data.episode_starts[episodes].tolist()
        if part.start <= row < part.stop
    }
    named = f" (all in {parts.pop()})" if len(parts) == 1 and len(data.parts) > 1 else ""
    typical = float(np.exp(np.median(np.log(factors)))) if len(episodes) else 1.0
    yield from subject.at_episodes(
        "reward_scale",
        "warning",
        episodes,
        f"rewards are about {typical:.3g} times those of the other episodes in the same "
        f"states{named}",
        "bring all rewards to one scale before mixing sources",
    )


def _constant_rewards(subject: Subject) -> Iterator[Finding]:
    if not subject.data.rewards.any():
        yield Finding(
            check="no_rewards",
            level="warning",
            message="all rewards are zero",
            advice="nothing but imitation can be learned from it",
            count=len(subject.data),
        )


def _timeouts_as_terminals(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    lengths = data.episode_lengths()
    last = data.episode_stops - 1
    over = data.terminations[last] & ~data.truncations[last]
    limit = subject.task.max_episode_steps if subject.task is not None else None
    suspects = np.flatnonzero(over & (lengths == (limit or lengths.max())))
    # A few may well have failed in the very last step.
    few = len(suspects) < max(3, 0.05 * len(lengths))
    # Without a known limit, a single episode is the longest by itself.
    all_of_them = len(suspects) == len(lengths) and (limit is not None or len(lengths) > 1)
    if (few and not all_of_them) or lengths.max() < 5:
        return
    where = f"the time limit of {subject.task.env_id}" if subject.task and limit else "the longest"
    yield from subject.at_episodes(
        "timeouts_as_terminals",
        "warning",
        suspects,
        f"episodes terminate at exactly {limit or lengths.max()} steps, {where}",
        "if this is a time limit, store these ends as truncations: as terminations they teach "
        "that the future is worth nothing there",
    )


def _missing_ends(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    limit = subject.task.max_episode_steps if subject.task is not None else None
    # A recorder may have had another limit than the task, and say so.
    own = data.provenance.get("episode_steps")
    limit = max(limit, own) if limit is not None and isinstance(own, int) else limit
    if limit is not None:
        yield from subject.at_episodes(
            "too_long",
            "warning",
            np.flatnonzero(data.episode_lengths() > limit),
            f"episodes are longer than the {limit} steps that the task allows",
            "ends of episodes are missing: mark them as truncated; training cuts at the limit "
            "only where neither truncations nor next observations tell of other ends",
        )
    both = np.flatnonzero(data.terminations & data.truncations)
    yield from subject.at_rows(
        "both_ends",
        "note",
        both,
        "rows are both terminated and truncated",
        "they are learned from as terminations",
    )


def _short_episodes(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    lengths = data.episode_lengths()
    if np.median(lengths) >= FEW_STEPS:
        short = np.flatnonzero(lengths < SHORT)
        first = data.episode_starts[short]
        before = np.maximum(first - 1, 0)
        # A recording that continues after a goal is in the next one at once.
        continues = ~any_in_row(data.next_observations[before] != data.observations[first])
        continues &= data.terminations[before] & (first > 0)
        yield from subject.at_episodes(
            "short_episodes",
            "warning",
            short[~continues],
            f"episodes have fewer than {SHORT} steps, where the median is {np.median(lengths):g}",
            "look whether an end is marked one row too early or too late",
        )


def _other_units(subject: Subject) -> Iterator[Finding]:
    data = subject.data
    long = np.flatnonzero(data.episode_lengths() >= FEW_STEPS)
    if data.observations.ndim != 2 or data.observations.dtype == np.uint8 or len(long) < FEW_STEPS:
        return
    mean, largest = _sizes_of_episodes(data, long)  # [E, D]
    usual = np.nanmedian(largest, axis=0)
    # Far above what is usual, but not where usual is next to nothing: that is an event, not a unit.
    off = (mean > OTHER_UNIT * usual) & (usual > 1e-3 * mean)
    for entry in np.flatnonzero(off.any(axis=0)).tolist():
        rows = np.flatnonzero(off[:, entry])
        if len(rows) > MOST_OF_OTHER_UNIT * len(long):
            continue
        factor = float(np.median(mean[rows, entry])) / float(np.nanmedian(mean[:, entry]))
        yield from subject.at_episodes(
            "other_units",
            "warning",
            long[rows],
            f"observation entry {entry} is about {factor:.3g} times as large as in the other "
            "episodes",
            "look whether these episodes were recorded in another unit (degrees for radians, "
            "millimetres for metres), and bring them to one",
        )


def _sizes_of_episodes(data: OfflineDataset, episodes: Rows) -> tuple[Any, Any]:
    """Return mean and largest absolute value of each entry in each of the episodes, `[E, D]`."""
    mean, largest = [], []
    for start, stop in zip(
        data.episode_starts[episodes], data.episode_stops[episodes], strict=True
    ):
        sizes = np.abs(data.observations[start:stop])
        mean.append(sizes.mean(axis=0))
        largest.append(sizes.max(axis=0))
    return np.array(mean, np.float64), np.array(largest, np.float64)


def _constant_observations(subject: Subject) -> Iterator[Finding]:
    rows = subject.data.observations
    if rows.dtype == np.uint8 or len(rows) < 2:
        return
    mean, deviation = subject.data.observation_statistics()
    constant = np.flatnonzero(deviation <= CONSTANT * np.maximum(np.abs(mean), 1.0))
    if len(constant):
        names = ", ".join(map(str, constant[:LISTED].tolist()))
        yield Finding(
            check="constant_observations",
            level="note",
            message=f"observation entries never change: {names}",
            advice="normalize_observations takes their mean off and does not scale them; where the "
            "task changes them, networks see what the data never showed",
            count=len(constant),
        )


CHECKS: Sequence[Callable[[Subject], Iterator[Finding]]] = (
    _not_finite,
    _broken_chain,
    _successor_is_reset,
    _outside_box,
    _forbidden,
    _saturated,
    _duplicates,
    _reward_scale,
    _constant_rewards,
    _timeouts_as_terminals,
    _missing_ends,
    _short_episodes,
    _other_units,
    _constant_observations,
)


def as_record(finding: Finding) -> dict[str, Any]:
    """Return a finding for JSON."""
    return {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
