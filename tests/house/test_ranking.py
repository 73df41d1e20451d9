"""How well offline evaluation orders policies: statistics, records that can be continued, page."""

from __future__ import annotations

import math
import statistics
import xml.etree.ElementTree as ET
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from bench.evidence import ranking
from bench.evidence.ranking import (
    PAGE,
    RECORDS,
    Known,
    Policy,
    Study,
    main,
    merge,
    play,
    plot,
    ranks,
    regret,
    render,
    rendered,
    section,
    spearman,
    spearman_interval,
)
from bench.evidence.rows import Row, read

from helpers.tiny import tiny_config
from rl_training.errors import DataError
from rl_training.experiment.checkpointing import list_checkpoints
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_agent, load_agent

MARKERS = "# Page\n\n<!-- generated: ranking -->\nold\n<!-- end generated -->\n\nBy hand.\n"


# Statistics


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert ranks([30.0, 10.0, 20.0]).tolist() == [3, 1, 2]
    assert ranks([1.0, 2.0, 2.0, 5.0]).tolist() == [1, 2.5, 2.5, 4]
    assert ranks([7.0, 7.0, 7.0]).tolist() == [2, 2, 2]
    assert ranks([-math.inf, 3.0, -math.inf]).tolist() == [1.5, 3, 1.5]


def test_rank_correlation_of_small_cases_worked_out_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Differences of ranks 1, 1, 0: 1 - 6 * 2 / (3 * 8).
    assert spearman([1, 2, 3], [2, 1, 3]) == pytest.approx(0.5)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_without_ties_it_is_the_formula_of_squared_differences_of_ranks() -> None:
    for order in permutations(range(5)):
        squared = sum((place - rank) ** 2 for place, rank in enumerate(order))
        expected = 1 - 6 * squared / (5 * 24)
        assert spearman(np.arange(5.0), np.array(order) ** 3.0) == pytest.approx(expected)


def slow_ranks(values: list[float]) -> list[float]:
    """The mean of the places that a value has in any sorted order."""
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered, start=1):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]


def test_rank_correlation_agrees_with_a_correlation_of_slow_ranks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = rng.integers(6, size=(2, 12)).astype(float)
        table = [slow_ranks(values.tolist()) for values in (first, second)]
        assert spearman(first, second) == pytest.approx(statistics.correlation(*table))
    stacked = rng.normal(size=(2, 3, 7))
    each = [float(spearman(a, b)) for a, b in zip(*stacked, strict=True)]
    assert spearman(*stacked).tolist() == pytest.approx(each)


def test_the_interval_is_that_of_resampled_policies() -> None:
    rng = np.random.default_rng(1)
    first = rng.normal(size=30)
    second = first + rng.normal(size=30)
    low, high = spearman_interval(first, second, resamples=500, seed=3)
    draws = np.random.default_rng(3).integers(30, size=(500, 30))
    slow = []
    for draw in draws:
        table = [slow_ranks(values[draw].tolist()) for values in (first, second)]
        slow.append(statistics.correlation(*table))
    assert (low, high) == pytest.approx(tuple(np.quantile(slow, (0.025, 0.975))))
    assert low < spearman(first, second) < high


def test_an_interval_that_covers_too_little_or_too_much_would_show() -> None:
    """Of normal pairs the rank correlation is 6 / pi asin(r / 2)."""
    rng, inside, r = np.random.default_rng(0), 0, 0.6
    truth = 6 / math.pi * math.asin(r / 2)
    for trial in range(100):
        first, noise = rng.normal(size=(2, 40))
        second = r * first + math.sqrt(1 - r * r) * noise
        low, high = spearman_interval(first, second, resamples=300, seed=trial)
        inside += low <= truth <= high
    assert 86 <= inside <= 100


def test_an_interval_without_an_order_is_unknown() -> None:
    assert all(math.isnan(end) for end in spearman_interval([1, 1], [1, 2], resamples=5))


def test_regret_is_what_the_best_of_those_that_are_tried_lacks() -> None:
    truth = [0.0, 10.0, 6.0, 8.0]
    assert regret([1, 4, 3, 2], truth, 1) == 0
    assert regret([1, 2, 4, 3], truth, 1) == pytest.approx(0.4)
    assert regret([1, 2, 4, 3], truth, 2) == pytest.approx(0.2)
    assert regret([1, 2, 4, 3], truth, 3) == 0
    assert regret([4, 1, 2, 3], truth, 1) == 1
    assert regret([1, 2], [5, 5], 1) == 0


def test_a_random_choice_has_the_mean_regret_of_all_choices() -> None:
    truth = [3.0, 10.0, 6.0, 8.0, 6.0]
    for count in (1, 2, 5):
        every = [max(chosen) for chosen in combinations(truth, count)]
        mean = sum((10 - best) / 7 for best in every) / len(every)
        assert regret([2] * 5, truth, count) == pytest.approx(mean)


def test_among_equal_estimates_chance_decides() -> None:
    truth = [0.0, 10.0, 6.0, 8.0]
    # The third is tried for sure, with one of the first two.
    assert regret([1, 1, 2, 0], truth, 2) == pytest.approx((0.4 + 0.0) / 2)
    assert regret([1, 1, 2, 0], truth, 1) == pytest.approx(0.4)
    assert regret([1, 1, 1, 2], truth, 2) == pytest.approx((0.2 + 0.0 + 0.2) / 3)
    assert regret([-math.inf, -math.inf, 1, -math.inf], truth, 2) == pytest.approx(0.6 / 3)


# Measuring


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SAC on Pendulum with checkpoints at 16, 32 and 48 steps."""
    config = tiny_config(
        "sac",
        tmp_path_factory.mktemp("run"),
        env_id="Pendulum-v1",
        env_kwargs={},
        total_timesteps=48,
        checkpoint_interval=16,
        keep_checkpoints=100,
    )
    return train(config).run_dir


def test_the_truth_is_what_evaluation_gets_and_its_discounted_twin(run: Path) -> None:
    agent = load_agent(run, device="cpu")
    returns, discounted = play(agent, 64, 0.99)
    again, undiscounted = play(agent, 64, 1.0)
    assert returns.tolist() == again.tolist() == undiscounted.tolist()
    # Rewards of Pendulum are negative, and an episode has 200 of them.
    assert ((returns < discounted) & (discounted < returns * 0.99**200)).all()
    other = np.array(evaluate_agent(agent, 64, seed=1, deterministic=True).returns)
    error = math.hypot(returns.std(), other.std()) / 8
    assert abs(returns.mean() - other.mean()) < 4 * error


def small_set(folder: Path) -> Path:
    """Three episodes of 20 steps."""
    rng, rows = np.random.default_rng(0), 60
    states = rng.normal(size=(3, 21, 3)).astype(np.float32)
    columns = {
        "observations": states[:, :-1].reshape(rows, 3),
        "actions": rng.uniform(-2, 2, (rows, 1)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "next_observations": states[:, 1:].reshape(rows, 3),
        "terminations": np.arange(rows) % 20 == 19,
        "truncations": np.zeros(rows, np.bool_),
    }
    folder.mkdir()
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    return folder


def test_a_study_is_cut_and_continued_without_measuring_twice(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = small_set(tmp_path / "small"), tmp_path / "ranking.csv"
    command = [str(run), "--data", str(data), "--every", "16", "--episodes", "4", "--out", str(out)]
    command += ["--updates", "20", "--members", "2"]
    done: list[str] = []
    for name in ("measure_truth", "measure_estimate"):
        method = getattr(Study, name)

        def counted(self: Study, policy: Policy, *rest: object, _method: object = method) -> None:
            done.append(policy.step)
            assert callable(_method)
            _method(self, policy, *rest)

        monkeypatch.setattr(Study, name, counted)
    main([*command, "--minutes", "1e-9"])
    assert done == []
    main(command)
    assert done == ["16", "32", "48"] * 2
    whole = read(out)
    main(command)
    assert len(done) == 6
    assert read(out) == whole
    known = Known.of(whole)
    assert [policy.step for policy in known.truth] == ["16", "32", "48"]
    assert known.facts["small"]["rows"] == 60
    assert known.estimates["small"].keys() == known.truth.keys()
    main([*command, "--updates", "21"])
    assert len(done) == 9, "other settings are another estimate"


def test_a_run_without_fitting_checkpoints_is_refused(run: Path) -> None:
    assert len(list_checkpoints(run)) >= 3
    with pytest.raises(DataError, match="no checkpoint at a multiple of 1,000 steps"):
        list(ranking.policies_of(run, 1000))


# The page


def records(*, diverged: bool = False) -> list[Row]:
    """Four policies whose estimates swap the second and the third."""
    rows: list[Row] = []

    def add(seed: str, step: str, data: str, **figures: float) -> None:
        base = {"task": "Hopper-v5", "method": "sac", "seed": seed, "step": step, "data": data}
        rows.extend(base | {"metric": name, "value": str(x)} for name, x in figures.items())

    add("", "", "medium", rows=1000, episodes=10, behaviour_return=500, behaviour_score=31)
    truth = {10: 100.0, 20: 200.0, 30: 300.0, 40: 400.0}
    guess = {10: 12.0, 20: 28.0, 30: 24.0, 40: 50.0}
    for step, value in truth.items():
        add("0", str(step), "", **{"return": value}, return_error=1, episodes=100, gamma=0.99)
        add("0", str(step), "", discounted=value / 10, discounted_error=0.1)
        figures = {"value": guess[step], "value_low": guess[step] - 5}
        figures |= {"value_high": guess[step] + 5, "soft_score": float(-step)}
        if diverged and step == 40:
            figures = {}
        add("0", str(step), "medium", cpu_seconds=20, updates=5000, members=3, **figures)
    return rows


def test_the_tables_show_what_the_records_say() -> None:
    text = section(Known.of(records()), "studies")
    assert "4 policies" in text
    assert "sac on Hopper-v5, seed 0: 4 from step 10 to 40" in text
    assert "| medium | 1,000 | 10 | 500.0 | 31 |" in text
    assert "5,000 updates with 3 members" in text
    lines = {tuple(line.split(" | ")[:3]): line for line in text.splitlines()}
    value = lines["| medium", "4", "estimated value"]
    # Ranks 1, 3, 2, 4: 1 - 6 * 2 / (4 * 15).
    assert value.count("0.80 [") == 2
    assert value.endswith("| 0.00 | 0.00 |")
    assert lines["| medium", "4", "soft score"].endswith("| 1.00 | 0.00 |")
    assert "1.00 [" in lines["| none", "4", "training step"]
    # Errors 2, 8, -6 and 10.
    own = lines["| medium", "sac, seed 0", "4"]
    assert own.count("0.80 [") == 2
    assert own.endswith("| 0.00 | 6.5 |")
    assert "| medium | 6.5 | 3.5 | 1 of 4 | 0 of 4 | 20 s |" in text


def test_a_policy_whose_fit_diverged_comes_last() -> None:
    text = section(Known.of(records(diverged=True)), "studies")
    lines = {tuple(line.split(" | ")[:3]): line for line in text.splitlines()}
    # Ranks 2, 4, 3, 1 against 1, 2, 3, 4: 1 - 6 * 14 / 60.
    assert lines["| medium", "4", "estimated value"].count("-0.40 [") == 2
    assert "1 of 4 | 20 s |" in text


def test_a_page_gets_tables_and_plots_and_keeps_the_rest(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "studies" / "ranking.csv"
    out.parent.mkdir()
    page.write_text(MARKERS)
    merge(out, records())
    render(out, page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Page\n\n<!-- generated: ranking -->\n4 policies")
    assert text.endswith("<!-- end generated -->\n\nBy hand.\n")
    svg = (out.parent / "ranking-medium.svg").read_text()
    assert "](studies/ranking-medium.svg)" in text
    circles = [e for e in ET.fromstring(svg).iter() if e.tag.endswith("circle")]
    assert len(circles) == 4 + 1, "one for each policy and one for the legend"
    with pytest.raises(DataError, match="has no place"):
        rendered("# Page", Known.of([]))


def test_the_published_page_is_what_the_records_render_to() -> None:
    known = Known.of(read(RECORDS))
    text = PAGE.read_text(encoding="utf-8")
    assert text == rendered(text, known), "run: python -m bench.evidence.ranking --render"
    assert len(known.truth) >= 30
    for name in known.facts:
        assert known.policies(name) == list(known.truth), "no policy is left out"
        shown = RECORDS.with_name(f"ranking-{name}.svg").read_text(encoding="utf-8")
        assert shown == plot(known, name)
