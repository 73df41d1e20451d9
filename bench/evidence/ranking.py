"""How well offline evaluation orders policies: its estimates against returns in the environment.

    python -m bench.evidence.ranking RUN ... --every 5000 --data FOLDER ... --minutes 30
    python -m bench.evidence.ranking --render

Policies are the checkpoints of training runs.  The truth of each are its returns over episodes that
begin in start states common to all policies; the estimates are those of `rl-training ope` with the
same settings for all.  Every figure is recorded when it is known, so the same command continues
where the last one was stopped.  `--render` writes the tables of docs/offline_evaluation.md and the
plots in it.

Shapes: C policies, R resamples, L environments side by side.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bench.evidence.rows import Row, read, write_rows
from bench.speed.table import format_number
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.scores import scores_in
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import DataError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.experiment.config import load_config
from rl_training.experiment.statistics import LEVEL, RESAMPLES, Interval
from rl_training.ope.estimate import evaluate_offline, load_source
from rl_training.reporting.charts import Cloud, Size, scatter_file
from rl_training.rng import derive_seed
from rl_training.runtime.workflows import LoadedAgent, load_agent

Floats = NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "studies" / "ranking.csv"
PAGE = ROOT / "docs" / "offline_evaluation.md"
COLUMNS = ("task", "method", "seed", "step", "data", "metric", "value")
"""Rows without data are the truth of a policy; rows without a seed are facts about data."""
KEY = COLUMNS[:-1]
EPISODES = 100
UPDATES, MEMBERS = 10_000, 5
START_SEED = 7_000_003
"""Of the start states; no run and no set was made from it."""
FEW = 5
"""Policies that one could still afford to try: regret@5."""
SIZE = Size(width=420, height=320)
SELECTORS = {
    "value": "estimated value",
    "value_low": "lower end of its interval",
    "soft_score": "soft score",
}
"""Metrics of an estimate by which policies can be ordered, as the table calls them."""
_PART = re.compile(r"(<!-- generated: ranking -->\n).*?(<!-- end generated -->)", re.DOTALL)


# Statistics


def ranks(values: ArrayLike) -> Floats:
    """Return the ranks of numbers along the last axis, 1 for the lowest; equals share their mean.

    Minus infinity is a number like any other here: the rank of what has no estimate.
    """
    samples = np.asarray(values, np.float64)
    below = (samples[..., None, :] < samples[..., :, None]).sum(-1)
    equal = (samples[..., None, :] == samples[..., :, None]).sum(-1)
    shared: Floats = below + (equal + 1) / 2
    return shared


def spearman(first: ArrayLike, second: ArrayLike) -> Floats:
    """Return Spearman's rank correlation along the last axis, `[..., C], [..., C]` to `[...]`.

    It is Pearson's correlation of the ranks; NaN where all of a sample are equal.
    """
    pair = [ranks(values) for values in (first, second)]
    here, there = (sample - sample.mean(-1, keepdims=True) for sample in pair)
    scale = np.sqrt((here**2).sum(-1) * (there**2).sum(-1))
    with np.errstate(invalid="ignore"):
        correlation: Floats = (here * there).sum(-1) / scale
    return correlation


def spearman_interval(
    first: ArrayLike, second: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the percentile bootstrap interval of the rank correlation over resampled policies."""
    pair = np.stack([np.asarray(values, np.float64) for values in (first, second)])
    count = pair.shape[-1]
    draws = np.random.default_rng(seed).integers(count, size=(resamples, count))  # [R, C]
    correlations = spearman(*pair[:, draws])
    known = correlations[np.isfinite(correlations)]  # a resample may have one policy alone
    if not len(known):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(known, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(low), float(high))


def regret(estimates: ArrayLike, truth: ArrayLike, count: int) -> float:
    """Return what is lost by trying only the `count` policies with the highest estimates.

    It is the return of the best of all policies minus that of the best that is tried, as a share of
    the distance between the best and the worst policy: 0 finds the best, 1 has the worst.  Among
    equal estimates chance decides, and the figure is the mean; all equal is a random choice.
    """
    values, returns = np.asarray(estimates, np.float64), np.asarray(truth, np.float64)
    count = min(count, len(values))
    last = np.sort(values)[-count]  # the lowest estimate that is tried
    sure = returns[values > last].max(initial=returns.min())
    drawn = np.sort(returns[values == last])
    places = count - int((values > last).sum())
    # The best that is drawn is the one of place i, when the others are of those below it.
    ways = [math.comb(place, places - 1) for place in range(len(drawn))]
    best = float(np.dot(ways, np.maximum(drawn, sure))) / math.comb(len(drawn), places)
    spread = float(returns.max() - returns.min())
    return (float(returns.max()) - best) / spread if spread else 0.0


# Measuring


class Policy(NamedTuple):
    """A checkpoint, as the records name it."""

    task: str
    method: str
    seed: str
    step: str


def merge(path: Path, rows: Sequence[Row]) -> None:
    """Put records into the file, in place of older ones of the same figure."""
    known = {tuple(row[name] for name in KEY): row for row in (*read(path), *rows)}
    write_rows(path, COLUMNS, list(known.values()))


def policies_of(run: Path, every: int) -> Iterator[tuple[Policy, Path]]:
    """Return the checkpoints of a run at multiples of some steps.

    Raises:
        DataError: When there are none.
    """
    config = load_config(run / "config.yaml")
    entries = [entry for entry in list_checkpoints(run) if entry.step % every == 0]
    if not entries:
        raise DataError(f"{run} has no checkpoint at a multiple of {every:,} steps; see --every")
    for entry in entries:
        yield (
            Policy(config.env_id, config.algo, str(config.seed), str(entry.step)),
            entry.path,
        )


def play(agent: LoadedAgent, episodes: int, gamma: float) -> tuple[Floats, Floats]:
    """Return returns and discounted returns of the policy's best actions, `[episodes]` each.

    The start states depend on nothing but their number.
    """
    task = agent.config.env_id
    envs = SeedVectorEnv.make(task, {}, episodes, (START_SEED,))
    try:
        obs = envs.reset([derive_seed(START_SEED, "ranking")])
        total, discounted = np.zeros((2, episodes))
        running, weight = np.ones(episodes, dtype=bool), 1.0
        while running.any():
            with torch.inference_mode():
                action = agent.learner.act(torch.from_numpy(obs)).cpu().numpy()
            step = envs.step(action)
            reward = np.where(running, step.task_reward[0], 0.0)
            total += reward
            discounted += weight * reward
            running &= ~(step.terminated[0] | step.truncated[0])
            obs, weight = step.obs, weight * gamma
    finally:
        envs.close()
    return total, discounted


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured, and where it is written."""

    out: Path
    gamma: float
    episodes: int
    updates: int
    members: int

    def known(self, policy: Policy, data: str) -> bool:
        """Tell whether a policy's truth, or its estimate from data, is recorded."""
        wanted = {"episodes": self.episodes, "gamma": self.gamma}
        if data:
            wanted = {"updates": self.updates, "members": self.members, "gamma": self.gamma}
        own = {
            row["metric"]: row["value"]
            for row in read(self.out)
            if Policy(*(row[name] for name in Policy._fields)) == policy and row["data"] == data
        }
        return all(own.get(name) == f"{value:g}" for name, value in wanted.items())

    def record(self, policy: Policy, data: str, figures: dict[str, float | None]) -> None:
        """Add figures of a policy; what is None is left out."""
        base = policy._asdict() | {"data": data}
        merge(
            self.out,
            [
                base | {"metric": name, "value": f"{value:.10g}"}
                for name, value in figures.items()
                if value is not None
            ],
        )

    def measure_truth(self, policy: Policy, path: Path) -> None:
        """Play episodes with a policy."""
        returns, discounted = play(load_agent(path, device="cpu"), self.episodes, self.gamma)
        root = np.sqrt(self.episodes)
        self.record(
            policy,
            "",
            {
                "return": float(returns.mean()),
                "return_error": float(returns.std(ddof=1) / root),
                "discounted": float(discounted.mean()),
                "discounted_error": float(discounted.std(ddof=1) / root),
                "episodes": self.episodes,
                "gamma": self.gamma,
            },
        )

    def measure_estimate(self, policy: Policy, path: Path, name: str, data: OfflineDataset) -> None:
        """Estimate a policy from data."""
        start = time.process_time()
        estimate = evaluate_offline(
            load_agent(path, device="cpu"),
            data,
            gamma=self.gamma,
            updates=self.updates,
            members=self.members,
        )
        figures = ("value", "value_low", "value_high", "soft_score", "drift")
        self.record(
            policy,
            name,
            {figure: getattr(estimate, figure) for figure in figures}
            | {
                "cpu_seconds": round(time.process_time() - start, 1),
                "updates": estimate.updates,
                "members": estimate.members,
                "gamma": self.gamma,
            },
        )

    def record_data(self, task: str, name: str, data: OfflineDataset) -> None:
        """Write down what a set is."""
        facts: dict[str, Any] = dict(data.provenance)
        scores = scores_in(facts)
        self.record(
            Policy(task, "", "", ""),
            name,
            {
                "rows": len(data),
                "episodes": data.num_episodes,
                "behaviour_return": float(data.episode_returns().mean()),
                "behaviour_score": facts.get("behaviour_score"),
                "behaviour_step": facts.get("medium_step", facts.get("expert_step")),
                "random_return": None if scores is None else scores.random,
                "expert_return": None if scores is None else scores.expert,
            },
        )


def measure(study: Study, options: argparse.Namespace) -> None:
    """Measure what is not known yet, the truths first, until the time is up."""
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    policies = [each for run in options.runs for each in policies_of(run, options.every)]
    sets: dict[str, OfflineDataset] = {}
    spec = load_agent(policies[0][1], device="cpu").env_spec
    for folder in options.data:
        sets[folder.name] = load_source(str(folder), spec)
        study.record_data(policies[0][0].task, folder.name, sets[folder.name])
    work = [(policy, path, name) for name in ("", *sets) for policy, path in policies]
    missing = [each for each in work if not study.known(each[0], each[2])]
    print(f"{len(missing)} of {len(work)} figures are missing", flush=True)
    for place, (policy, path, name) in enumerate(missing):
        if time.monotonic() > until:
            print(f"{len(missing) - place} are left; the same command continues")
            return
        if name:
            study.measure_estimate(policy, path, name, sets[name])
        else:
            study.measure_truth(policy, path)
        what = f"estimate from {name}" if name else "truth"
        print(f"seed {policy.seed}, step {policy.step}: {what}", flush=True)


# What the page shows


@dataclass(frozen=True)
class Known:
    """All records, as tables."""

    truth: dict[Policy, dict[str, float]]
    estimates: dict[str, dict[Policy, dict[str, float]]]
    """By name of the data."""
    facts: dict[str, dict[str, float]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Known:
        """Sort records."""
        known = cls({}, {}, {})
        for row in rows:
            policy = Policy(*(row[name] for name in Policy._fields))
            if not policy.seed:
                table = known.facts.setdefault(row["data"], {})
            elif not row["data"]:
                table = known.truth.setdefault(policy, {})
            else:
                table = known.estimates.setdefault(row["data"], {}).setdefault(policy, {})
            table[row["metric"]] = float(row["value"])
        return known

    def policies(self, name: str) -> list[Policy]:
        """Return the policies with an estimate from some data, in the order of the truths."""
        return [policy for policy in self.truth if policy in self.estimates.get(name, {})]

    def truths(self, policies: Sequence[Policy], metric: str) -> Floats:
        """Return what policies are worth."""
        return np.array([self.truth[policy][metric] for policy in policies])

    def guesses(self, policies: Sequence[Policy], name: str, metric: str) -> Floats:
        """Return estimates; minus infinity where the fit diverged, so that it comes last."""
        own = self.estimates[name]
        return np.array([own[policy].get(metric, -np.inf) for policy in policies])


def section(known: Known, folder: str) -> str:
    """Return the generated part of the page.

    Args:
        known: The records.
        folder: Where the plots are, as the page links to them.
    """
    if not known.truth:
        return "Not measured yet."
    names = [name for name in known.facts if known.policies(name)]
    lines = [_policies_text(known), "", *_data_table(known, names)]
    lines += ["", *_order_table(known, names), "", *_error_table(known, names)]
    lines += ["", *_run_table(known, names), ""]
    lines += [f"![{_title(known, name)}]({folder}/ranking-{name}.svg)" for name in names]
    return "\n".join(lines)


def _policies_text(known: Known) -> str:
    policies = list(known.truth)
    returns, discounted = (known.truths(policies, name) for name in ("return", "discounted"))
    first = known.truth[policies[0]]
    steps = {run: [int(policy.step) for policy in own] for run, own in _runs(policies).items()}
    described = "; ".join(
        f"{method} on {task}, seed {seed}: {len(own)} from step {min(own):,} to {max(own):,}"
        for (task, method, seed), own in steps.items()
    )
    error = known.truths(policies, "return_error").mean()
    low, high = spearman_interval(discounted, returns)
    return (
        f"{len(policies)} policies, checkpoints of training runs ({described}). True returns are "
        f"means over {first['episodes']:g} episodes from common start states, actions "
        f"deterministic: {format_number(float(returns.min()))} to "
        f"{format_number(float(returns.max()))} (standard error {format_number(float(error))} on "
        f"average); discounted with gamma {first['gamma']:g}, "
        f"{format_number(float(discounted.min()))} to {format_number(float(discounted.max()))}. "
        "The true discounted value itself orders the policies by return with rank correlation "
        f"{spearman(discounted, returns):.2f} [{low:.2f}, {high:.2f}]."
        f"{_settings_text(known)}"
    )


def _runs(policies: Sequence[Policy]) -> dict[tuple[str, str, str], list[Policy]]:
    """Sort policies by task, method and seed."""
    runs: dict[tuple[str, str, str], list[Policy]] = {}
    for policy in policies:
        runs.setdefault(policy[:3], []).append(policy)
    return runs


def _settings_text(known: Known) -> str:
    """Say with which settings the estimates were made, if with the same for all."""
    tables = [table for own in known.estimates.values() for table in own.values()]
    used = {(table["updates"], table["members"]) for table in tables}
    if len(used) != 1:
        return ""
    updates, members = used.pop()
    return f" Estimates are those of {updates:,.0f} updates with {members:g} members."


def _data_table(known: Known, names: Sequence[str]) -> list[str]:
    lines = ["| data | rows | episodes | mean return of the recorded episodes | score |"]
    lines += [f"|{' --- |' * 5}"]
    for name in names:
        facts = known.facts[name]
        score = facts.get("behaviour_score")
        lines.append(
            f"| {name} | {facts['rows']:,.0f} | {facts['episodes']:,.0f} | "
            f"{format_number(facts['behaviour_return'])} | "
            f"{'' if score is None else f'{score:.0f}'} |"
        )
    return lines


def _order_table(known: Known, names: Sequence[str]) -> list[str]:
    lines = [
        "| data | policies | ordered by | rank correlation with the discounted return "
        f"[{LEVEL:.0%}] | with the return [{LEVEL:.0%}] | regret@1 | regret@{FEW} |",
        f"|{' --- |' * 7}",
    ]
    everyone = list(known.truth)
    steps = np.array([float(policy.step) for policy in everyone])
    returns = known.truths(everyone, "return")
    random = [f"{regret(np.zeros(len(everyone)), returns, count):.2f}" for count in (1, FEW)]
    lines.append(f"| none | {len(everyone)} | chance, on average | 0 | 0 | {' | '.join(random)} |")
    lines.append(_order_row(known, "none", everyone, "training step", steps))
    for name in names:
        own = known.policies(name)
        for metric, title in SELECTORS.items():
            values = known.guesses(own, name, metric)
            lines.append(_order_row(known, name, own, title, values))
    return lines


def _order_row(
    known: Known, name: str, policies: Sequence[Policy], title: str, values: Floats
) -> str:
    returns = known.truths(policies, "return")
    cells = [name, str(len(policies)), title, *_correlations(known, policies, values)]
    cells += [f"{regret(values, returns, count):.2f}" for count in (1, FEW)]
    return f"| {' | '.join(cells)} |"


def _correlations(known: Known, policies: Sequence[Policy], values: Floats) -> list[str]:
    """Return the rank correlations with the discounted return and with the return."""
    cells = []
    for metric in ("discounted", "return"):
        truth = known.truths(policies, metric)
        low, high = spearman_interval(values, truth)
        cells.append(f"{spearman(values, truth):.2f} [{low:.2f}, {high:.2f}]")
    return cells


def _error_table(known: Known, names: Sequence[str]) -> list[str]:
    lines = [
        "| data | mean absolute error | mean error | truth within the interval | diverged | "
        "CPU time per policy |",
        f"|{' --- |' * 6}",
    ]
    for name in names:
        policies = known.policies(name)
        table = known.estimates[name]
        seconds = np.mean([table[policy]["cpu_seconds"] for policy in policies])
        sound = [policy for policy in policies if "value" in table[policy]]
        lost = len(policies) - len(sound)
        if not sound:
            lines.append(f"| {name} | | | | {lost} of {len(policies)} | {seconds:.0f} s |")
            continue
        truth = known.truths(sound, "discounted")
        value, low, high = (
            known.guesses(sound, name, each) for each in ("value", "value_low", "value_high")
        )
        inside = int(((low <= truth) & (truth <= high)).sum())
        lines.append(
            f"| {name} | {format_number(float(np.abs(value - truth).mean()))} | "
            f"{format_number(float((value - truth).mean()))} | {inside} of {len(sound)} | "
            f"{lost} of {len(policies)} | {seconds:.0f} s |"
        )
    return lines


def _run_table(known: Known, names: Sequence[str]) -> list[str]:
    """Return what estimates are worth among the checkpoints of a single run."""
    lines = [
        "| data | checkpoints of | policies | rank correlation with the discounted return "
        f"[{LEVEL:.0%}] | with the return [{LEVEL:.0%}] | regret@1 | mean absolute error |",
        f"|{' --- |' * 7}",
    ]
    for name in names:
        for (_, method, seed), own in _runs(known.policies(name)).items():
            values = known.guesses(own, name, "value")
            error = np.abs(values - known.truths(own, "discounted"))
            error = error[np.isfinite(error)]
            cells = [name, f"{method}, seed {seed}", str(len(own))]
            cells += _correlations(known, own, values)
            cells.append(f"{regret(values, known.truths(own, 'return'), 1):.2f}")
            cells.append(format_number(float(error.mean())) if len(error) else "")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _title(known: Known, name: str) -> str:
    return (
        f"estimates from {name} over true discounted values, {len(known.policies(name))} policies"
    )


def plot(known: Known, name: str) -> str:
    """Return the estimates from some data over the truth as an SVG file, a colour for each run."""
    clouds: dict[str, list[tuple[float, float]]] = {}
    for policy in known.policies(name):
        value = known.estimates[name][policy].get("value")
        if value is not None:
            point = (known.truth[policy]["discounted"], value)
            clouds.setdefault(f"seed {policy.seed}", []).append(point)
    return scatter_file(
        [
            Cloud(label=label, number=number, points=tuple(points))
            for number, (label, points) in enumerate(clouds.items())
        ],
        SIZE,
        _title(known, name),
        across="true",
        up="estimate",
    )


def rendered(text: str, known: Known, folder: str = "studies") -> str:
    """Return the page with the generated part as the records have it.

    Raises:
        DataError: When the page has no place for it.
    """
    if not _PART.search(text):
        raise DataError(
            "the page has no place for the study; write <!-- generated: ranking --> and, below, "
            "<!-- end generated --> where it belongs"
        )
    return _PART.sub(lambda part: f"{part[1]}{section(known, folder)}\n{part[2]}", text)


def render(records: Path = RECORDS, page: Path = PAGE) -> None:
    """Write the plots beside the records, and the generated part of the page."""
    known = Known.of(read(records))
    for name in known.facts:
        if any("value" in known.estimates[name][policy] for policy in known.policies(name)):
            path = records.with_name(f"ranking-{name}.svg")
            path.write_text(plot(known, name), encoding="utf-8")
    page.write_text(rendered(page.read_text(encoding="utf-8"), known), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, render, or both."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence.ranking",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs, one seed each")
    add("--data", nargs="*", type=Path, default=[], metavar="FOLDER", help="recorded data")
    add("--every", type=int, default=1, help="take checkpoints at multiples of so many steps (1)")
    add("--episodes", type=int, default=EPISODES, help=f"for the truth ({EPISODES})")
    add("--gamma", type=float, default=0.99, help="discount of all values (0.99)")
    add("--updates", type=int, default=UPDATES, help=f"gradient steps per policy ({UPDATES})")
    add("--members", type=int, default=MEMBERS, help=f"resamples of the episodes ({MEMBERS})")
    add("--minutes", type=float, help="stop after so many")
    add("--out", type=Path, default=RECORDS, help="file of records")
    add("--render", action="store_true", help="write the page and the plots from the records")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.runs:
        study = Study(
            out=options.out,
            gamma=options.gamma,
            episodes=options.episodes,
            updates=options.updates,
            members=options.members,
        )
        measure(study, options)
    if options.render:
        render(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
