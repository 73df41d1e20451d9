"""The learning gates: their table, their records, and the page that is rendered from them.

Nothing here looks at how much is learned; `make learn` and `make evidence` do.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench.evidence.__main__ as evidence
import numpy as np
import pytest
import yaml
from bench.evidence.__main__ import main
from bench.evidence.gates import (
    DATA_VARIABLE,
    EPISODE_SEED,
    FRESH_SEEDS,
    GATES,
    QUICK_SEEDS,
    SEEDS,
    Gate,
    find_gates,
    quick_gates,
    seeds_text,
)
from bench.evidence.jobs import STOPPED, Ended, Work, run_all
from bench.evidence.page import (
    method_section,
    plot,
    render,
    rendered,
    rendered_method,
    section,
)
from bench.evidence.record import (
    EARLIER,
    Earlier,
    Record,
    earlier_seconds,
    longest_first,
    measure,
    read_earlier,
    read_records,
    record_path,
    write_record,
)
from bench.speed.table import format_number

from helpers.tiny import ROOT, run_cli
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.registry import algorithm_names
from rl_training.experiment.statistics import interquartile_mean
from rl_training.runtime.train import train

MOST_BYTES = 30_000
EVIDENCE = ROOT / "docs" / "evidence"
MARKERS = "# Results\n\n<!-- generated: evidence -->\n<!-- end generated -->\n\nBy hand.\n"
THREE = ("dqn/cartpole", "ppo/cartpole", "sac/pendulum")
every_gate = pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.preset)
SETTINGS = tuple(
    f"algo_kwargs.{text}"
    for text in ("hidden_sizes=[16]", "learning_starts=16", "batch_size=8", "eval_interval=16")
)
TINY = Gate(
    preset="dqn/cartpole",
    steps=64,
    iqm_bar=5.0,
    bar=5.0,
    random=22.2,
    cost="quick",
    chosen_on=(0,),
    settings=SETTINGS,
    seeds=(3, 1),
    episodes=34,
)


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return measure(TINY, tmp_path_factory.mktemp("runs"), circumstances=["threads=1"])


def with_tiny() -> list[Gate]:
    return [TINY if gate.preset == TINY.preset else gate for gate in GATES]


def changed(record: Record, **changes: Any) -> Record:
    return record.model_copy(update=changes)


# The table


def test_every_method_has_a_gate_and_may_have_several() -> None:
    assert {gate.algo for gate in GATES} == set(algorithm_names())
    assert len({gate.preset for gate in GATES}) == len(GATES)
    assert {"ppo/acrobot", "ppo/cartpole"} <= {gate.preset for gate in find_gates(["ppo"])}


def test_make_learn_shows_without_data_what_each_kind_of_online_method_learns() -> None:
    free = {gate.preset for gate in quick_gates() if gate.data is None}
    assert {"dqn/cartpole", "ppo/cartpole", "sac/pendulum", "td3/pendulum"} <= free


@every_gate
def test_a_gate_loads_with_its_budget_and_data(gate: Gate) -> None:
    config = gate.config(Path("folder"))
    assert (config.algo, config.total_timesteps) == (gate.algo, gate.steps)
    assert config.all_seeds == gate.seeds
    assert gate.iqm_bar >= gate.bar > gate.random
    offline = {k: v for k, v in config.algo_kwargs.items() if k.endswith("dataset_path")}
    assert set(offline.values()) == ({f"folder/{gate.data}"} if gate.data else set())
    # Made-up data teaches nothing, so no gate may learn from it.
    assert "random" not in config.algo_config.model_dump().values()


@every_gate
def test_the_reported_seeds_had_no_part_in_choosing_the_settings(gate: Gate) -> None:
    assert len(gate.seeds) >= 10
    assert gate.episodes >= 100
    assert gate.chosen_on, "say which seeds the settings were chosen on"
    assert not set(gate.chosen_on) & set(gate.seeds)
    assert EPISODE_SEED not in gate.seeds, "training evaluates on the episodes of its seeds"


@every_gate
def test_a_gate_takes_fresh_seeds_only_when_the_usual_ones_have_been_seen(gate: Gate) -> None:
    assert gate.seeds == (FRESH_SEEDS if set(SEEDS) <= set(gate.chosen_on) else SEEDS)


def test_make_learn_takes_three_of_the_reported_seeds() -> None:
    assert len(QUICK_SEEDS) == 3
    assert set(QUICK_SEEDS) < set(SEEDS)


def test_seeds_are_written_as_the_command_takes_them() -> None:
    assert seeds_text(SEEDS) == "1000..1009"
    assert (seeds_text([4]), seeds_text([3, 1]), seeds_text([1, 2])) == ("4", "3,1", "1..2")


@every_gate
def test_the_command_of_a_gate_is_its_run(gate: Gate) -> None:
    words = shlex.split(gate.commands()[0])
    done = run_cli(*words[1:], "--dry-run")
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out) == gate.config(Path()).resolved()


def test_gates_are_found_by_preset_or_method() -> None:
    found = [gate.preset for gate in find_gates(["td3", "sac/pendulum"])]
    assert found == ["sac/pendulum", "td3/pendulum"]
    assert find_gates([]) == GATES
    with pytest.raises(ConfigError, match=r"'sac/pendulm' is not .* mean sac/pendulum\?"):
        find_gates(["dqn", "sac/pendulm"])


# Records


def test_a_record_holds_curves_fresh_episodes_and_figures_over_seeds(tiny: Record) -> None:
    assert (tiny.steps, [seed.seed for seed in tiny.seeds]) == (64, [3, 1])
    for seed in tiny.seeds:
        assert seed.steps == (16, 32, 48, 64)
        assert len(seed.curve) == 4
        assert len(seed.returns) == TINY.episodes
        assert seed.mean == pytest.approx(statistics.fmean(seed.returns), abs=1e-3)
    means = [seed.mean for seed in tiny.seeds]
    assert tiny.final.iqm == pytest.approx(float(interquartile_mean(means)), abs=1e-3)
    assert [point.step for point in tiny.curve()] == [16, 32, 48, 64]
    assert tiny.final.min == min(means)
    assert (tiny.met, tiny.iqm_bar, tiny.bar, tiny.random) == (True, 5.0, 5.0, 22.2)
    assert (tiny.episodes, tiny.episode_seed) == (34, EPISODE_SEED)
    assert (tiny.machine.threads, tiny.machine.device, tiny.data_digest) == (1, "cpu", None)
    assert tiny.seconds > 0
    assert 0 <= tiny.machine.others <= tiny.machine.cores


def test_the_commands_of_a_record_give_its_figures(
    tiny: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training, evaluating = tiny.commands
    assert run_cli(*shlex.split(training)[1:]).code == 0
    found = json.loads(run_cli(*shlex.split(evaluating)[1:], "--json").out)
    for seed in tiny.seeds:
        returns = found["members"][f"seed_{seed.seed}"]["returns"]
        assert returns == pytest.approx(seed.returns, abs=1e-3)
    assert found["eval_return_iqm"] == pytest.approx(tiny.final.iqm, abs=1e-3)
    assert found["eval_return_worst"] == pytest.approx(tiny.final.min, abs=1e-3)


def test_all_seeds_begin_their_episodes_in_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []
    reset = SeedVectorEnv.reset

    def noted(envs: SeedVectorEnv, seeds: Any = None) -> Any:
        obs = reset(envs, seeds)
        starts.append((seeds, obs.copy()))
        return obs

    monkeypatch.setattr(SeedVectorEnv, "reset", noted)
    measure(TINY, tmp_path, circumstances=["threads=1"])
    (seeds, first), (others, second) = starts[-2:]  # 32 episodes of each seed, then the other two
    assert len(set(seeds)) == len(set(others)) == 1
    assert (first.shape[:2], second.shape[:2]) == ((2, 32), (2, 2))
    for obs in (first, second):
        assert (obs[0] == obs[1]).all()
    flat = np.concatenate([first[0], second[0]])
    assert len(np.unique(flat, axis=0)) == 34, "but every episode has its own"


@pytest.mark.parametrize(
    ("share", "iqm_bar", "met"),
    [(0.0, -1e9, True), (0.5, -1e9, False), (-1.0, 0.5, True), (-1.0, 1.0, False)],
    ids=["both met", "worst missed", "at the iqm", "iqm missed"],
)
def test_a_gate_has_a_bar_for_the_worst_seed_and_one_for_the_middle(
    tiny: Record, tmp_path: Path, share: float, iqm_bar: float, met: bool
) -> None:
    low, high = sorted(seed.mean for seed in tiny.seeds)
    assert low < high, "the seeds must differ for this"
    iqm = iqm_bar if iqm_bar < 0 else low + iqm_bar * (high - low)
    gate = replace(TINY, bar=low + share * (high - low), iqm_bar=iqm)
    record = measure(gate, tmp_path, circumstances=["threads=1"])
    assert sorted(seed.mean for seed in record.seeds) == [low, high]
    assert record.met == met


def test_a_record_of_another_budget_seeds_episodes_or_bar_is_not_of_the_gate(tiny: Record) -> None:
    assert tiny.is_of(TINY)
    others: list[dict[str, Any]] = [
        {"steps": 65},
        {"seeds": (3, 1, 2)},
        {"seeds": (1, 3)},
        {"episodes": 100},
        {"bar": 4.0},
        {"iqm_bar": 6.0},
        {"settings": (*SETTINGS, "algo_kwargs.batch_size=4")},
    ]
    for changes in others:
        assert not tiny.is_of(replace(TINY, **changes)), changes
    assert tiny.is_of(replace(TINY, chosen_on=(7,))), "what chose the settings changes no figure"


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path: Path) -> None:
    times = [2.0, 5.0, 1.0, 3.0, 7.5, 4.0]  # stopped after 5 and after 7.5 seconds
    lines = [
        {"kind": "train", "step": i, "time/elapsed_seconds": time} for i, time in enumerate(times)
    ]
    lines.insert(1, {"kind": "eval", "step": 0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert earlier_seconds(tmp_path) == 5.0 + 7.5 + 4.0
    assert earlier_seconds(tmp_path / "new") == 0


def test_a_run_that_was_stopped_is_taken_up_again(tiny: Record, tmp_path: Path) -> None:
    config = TINY.config(None, ["threads=1"]).replace(output_dir=str(tmp_path))
    train(config, stop_at=32)
    record = measure(TINY, tmp_path, circumstances=["threads=1"])
    assert [seed.returns for seed in record.seeds] == [seed.returns for seed in tiny.seeds]
    assert [seed.curve for seed in record.seeds] == [seed.curve for seed in tiny.seeds]
    again = measure(TINY, tmp_path, circumstances=["threads=1"])  # nothing is left to train
    assert again.seeds == record.seeds


def test_a_run_of_other_settings_in_the_folder_is_refused(tmp_path: Path) -> None:
    measure(TINY, tmp_path, circumstances=["threads=1"])
    wider = replace(TINY, settings=(*SETTINGS, "algo_kwargs.hidden_sizes=[24]"))
    with pytest.raises(ConfigError, match=r"dqn-cartpole holds a run with another algo_kwargs;"):
        measure(wider, tmp_path, circumstances=["threads=1"])


def test_a_record_is_a_small_file_that_reads_back(tiny: Record, tmp_path: Path) -> None:
    path = write_record(tmp_path, TINY, tiny)
    assert path.stat().st_size < MOST_BYTES
    assert '"steps": [16, 32, 48, 64]' in path.read_text()
    assert read_records(tmp_path) == {TINY.preset: tiny}


def test_a_damaged_record_is_named(tiny: Record, tmp_path: Path) -> None:
    path = write_record(tmp_path, TINY, tiny)
    path.write_text(path.read_text().replace('"met"', '"mett"'))
    with pytest.raises(DataError, match=r"dqn-cartpole\.json is not a record of this version"):
        read_records(tmp_path)


# Rendering


def test_the_table_lists_every_gate_measured_or_not(tiny: Record) -> None:
    seeds = tuple(
        seed.model_copy(update={"mean": mean})
        for seed, mean in zip(tiny.seeds, (12.25, 140.0), strict=True)
    )
    final = tiny.final.model_copy(update={"iqm": 76.125, "iqm_low": 12.25, "iqm_high": 140.0})
    record = changed(tiny, seeds=seeds, final=final, seconds=125.0)
    gates = with_tiny()
    lines = section(Path("evidence"), {record.gate: record}, gates).splitlines()
    assert len([line for line in lines if line.startswith("| [")]) == len(GATES)
    assert (
        "| [Deep Q-Network](algorithms/dqn.md) | `dqn/cartpole` | 64 | 0 | 1, 3 "
        f"| 76.1 [12.2, 140.0] | 5 | {format_number(final.min)} | 5 | yes | cpu | 2 min |"
    ) in lines
    assert (
        "| [Soft Actor-Critic](algorithms/sac.md) | `sac/pendulum` | 10,000 | 0 to 7 "
        "| 1000 to 1009 | not measured yet on ten seeds | -180 |  | -200 |  |  |  |"
    ) in lines
    assert f"1 of {len(GATES)} gates are measured on ten seeds; 1 are met." in lines
    missed = section(Path("evidence"), {record.gate: changed(record, met=False)}, gates)
    assert "| 5 | **no** | cpu | 2 min |" in missed


def test_a_record_that_is_not_of_the_gate_is_not_shown(tiny: Record) -> None:
    text = section(Path("evidence"), {tiny.gate: tiny})  # the gate has 50,000 steps and ten seeds
    assert "`dqn/cartpole` | 50,000 |" in text
    assert f"0 of {len(GATES)} gates are measured on ten seeds; 0 are met." in text
    assert "### `dqn/cartpole`" not in text


def test_figures_of_three_seeds_stay_until_there_are_ten(tiny: Record, tmp_path: Path) -> None:
    earlier = Earlier(
        trained=TINY.trained(),
        seeds=(0, 1, 2),
        returns=(12.25, 140.0, 500.0),
        steps=64,
        seconds=3.0,
        data_digest=None,
        date="2026-01-02T03:04:05",
    )
    (tmp_path / EARLIER).write_text(json.dumps({TINY.preset: earlier.model_dump()}))
    known = read_earlier(tmp_path, [TINY])
    assert known == {TINY.preset: earlier}
    note = "not measured yet on ten seeds (before: seeds 0 to 2, 20 episodes each: 12.2, 140.0, 500"
    assert note in section(Path("evidence"), {}, [TINY], known)
    assert "before" not in section(Path("evidence"), {tiny.gate: tiny}, [TINY], known)
    assert read_earlier(tmp_path, [replace(TINY, steps=48)]) == {}, "of other settings"
    assert read_earlier(tmp_path / "empty", [TINY]) == {}


def test_a_gate_shows_its_plot_machine_and_commands(tiny: Record) -> None:
    machine = tiny.machine.model_copy(
        update={"processor": "Abacus", "cores": 4, "others": 0.1, "date": "2026-01-02T03:04:05"}
    )
    text = section(Path("evidence"), {tiny.gate: changed(tiny, machine=machine)}, [TINY])
    assert "### `dqn/cartpole`" in text
    assert "](evidence/dqn-cartpole.svg)" in text
    assert "a random policy gets 22.2." in text
    means = ", ".join(format_number(seed.mean) for seed in tiny.seeds)
    assert f"Seeds 1, 3, 34 episodes each: {means}. 2 seeds side by side" in text
    assert "on Abacus, 4 cores; 1 thread, torch" in text
    assert "2026-01-02." in text
    assert "busy" not in text
    block = text.split("```bash\n")[1].split("```")[0].replace(" \\\n ", "")
    assert block.splitlines() == list(tiny.commands)
    assert max(map(len, text.split("```bash\n")[1].splitlines())) <= 100
    busy = machine.model_copy(update={"others": 3.04, "device": "H200"})
    text = section(Path("evidence"), {tiny.gate: changed(tiny, machine=busy)}, [TINY])
    assert "4 cores, H200;" in text
    assert "Other processes kept 3.0 cores busy, so the time is rough." in text


def test_data_is_named_with_its_digest(tiny: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = replace(TINY, data="rows.npz", data_key="expert_dataset")
    monkeypatch.setattr(Record, "is_of", lambda record, gate: True)
    record = changed(tiny, data_digest="0123456789ab")
    text = section(Path("e"), {record.gate: record}, [gate])
    assert "Learned from `rows.npz` (SHA-256 0123456789ab...)." in text


def test_a_plot_has_the_curve_its_band_every_seed_and_the_bar(tiny: Record) -> None:
    text = plot(tiny)
    assert len(text) < MOST_BYTES
    tree = ElementTree.fromstring(text)
    paths = [e.attrib for e in tree.iter("{http://www.w3.org/2000/svg}path")]
    kinds = [attributes["class"].split()[0] for attributes in paths]
    assert kinds == ["faint", "faint", "curve", "curve"]
    assert "stroke-dasharray" in paths[-1]
    start, end = paths[-1]["d"].removeprefix("M").split("L")
    assert start.split()[1] == end.split()[1], "the bar is level"
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polygon"))) == 1
    assert "prefers-color-scheme: dark" in text


def test_a_run_that_was_never_evaluated_still_has_a_plot(tiny: Record) -> None:
    bare = tuple(seed.model_copy(update={"steps": (), "curve": ()}) for seed in tiny.seeds)
    ElementTree.fromstring(plot(changed(tiny, seeds=bare)))


def test_a_page_without_a_place_says_what_to_write(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n")
    with pytest.raises(DataError, match=r"write <!-- generated: evidence -->"):
        rendered(page, tmp_path)


# What is committed


def test_the_page_of_results_is_what_the_records_render_to() -> None:
    page = ROOT / "docs" / "results.md"
    stale = "run: python -m bench.evidence --render"
    assert page.read_text() == rendered(page, EVIDENCE), stale
    records = read_records(EVIDENCE)
    for gate in GATES:
        if gate.preset in records:
            drawn = (EVIDENCE / f"{gate.slug}.svg").read_text()
            assert drawn == plot(records[gate.preset]), stale
    kept = {path.name for path in EVIDENCE.iterdir()}
    slugs = {gate.slug for gate in GATES if gate.preset in records}
    assert kept == {EARLIER} | {f"{slug}{end}" for slug in slugs for end in (".json", ".svg")}
    for method in algorithm_names():
        text = (ROOT / f"docs/algorithms/{method}.md").read_text()
        assert "<!-- generated: results -->" in text
        assert text == rendered_method(ROOT / f"docs/algorithms/{method}.md", EVIDENCE), stale


def test_the_page_of_a_method_shows_its_own_gates_measured_or_not(tiny: Record) -> None:
    other = replace(TINY, preset="dqn/catch")
    text = method_section(Path("../evidence"), "dqn", {tiny.gate: tiny}, [TINY, other])
    row, missing = (line for line in text.splitlines() if line.startswith("| `"))
    assert row.startswith("| `dqn/cartpole` | 64 |")
    assert "not measured yet" in missing
    assert "](../evidence/dqn-cartpole.svg)" in text
    assert "(../results.md#dqncartpole)" in text
    assert "dqn-catch.svg" not in text
    assert "No gate" in method_section(Path("../evidence"), "sac", {}, [TINY])


@pytest.mark.parametrize(
    "gate",
    [gate for gate in GATES if record_path(EVIDENCE, gate).is_file()],
    ids=lambda gate: gate.preset,
)
def test_a_committed_record_is_of_the_gate_as_it_stands(gate: Gate) -> None:
    assert record_path(EVIDENCE, gate).stat().st_size < MOST_BYTES
    record = read_records(EVIDENCE, [gate])[gate.preset]
    assert (record.bar, record.random, record.settings) == (
        gate.bar,
        gate.random,
        gate.overrides(gate.data),
    )
    assert record.is_of(gate), f"run: python -m bench.evidence {gate.preset}"
    # A rollout that has begun is finished.
    assert gate.steps <= record.steps <= gate.steps * 1.02
    assert record.commands == gate.commands(record.circumstances)
    means = [seed.mean for seed in record.seeds]
    assert record.final.iqm is not None
    assert record.final.iqm == pytest.approx(float(interquartile_mean(means)), abs=2e-3)
    assert record.final.min == min(means)
    assert record.met == (record.final.iqm >= gate.iqm_bar and min(means) >= gate.bar)
    for seed in record.seeds:
        assert math.isclose(seed.mean, statistics.fmean(seed.returns), abs_tol=1e-3)


# The command


def test_a_gate_is_run_recorded_and_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "find_gates", lambda names: (TINY,))
    monkeypatch.setattr(evidence, "render", lambda folder: render(folder, [TINY]))
    page, out = tmp_path / "results.md", tmp_path / "evidence"
    page.write_text(MARKERS)
    arguments = ["dqn", "--out", str(out), "--set", "threads=1"]
    assert main([*arguments, "--runs", str(tmp_path / "runs")]) == 0
    assert "dqn/cartpole at 64 steps, last checkpoint, 2 seeds, 34 epi" in capsys.readouterr().out
    assert (tmp_path / "runs/dqn-cartpole/seed_3").is_dir()
    text = page.read_text()
    assert "| `dqn/cartpole` | 64 | 0 |" in text
    assert text.endswith("<!-- end generated -->\n\nBy hand.\n")
    before = record_path(out, TINY).read_text()
    page.write_text(MARKERS)
    (out / "dqn-cartpole.svg").unlink()
    assert main([*arguments, "--missing"]) == main([*arguments, "--render"]) == 0
    assert record_path(out, TINY).read_text() == before
    assert (out / "dqn-cartpole.svg").is_file()
    assert page.read_text() == text
    wider = replace(TINY, settings=(*SETTINGS, "algo_kwargs.hidden_sizes=[24]"))
    for other in (wider, replace(TINY, steps=48)):  # what is known is of another gate
        monkeypatch.setattr(evidence, "find_gates", lambda names, gate=other: (gate,))
        assert main([*arguments, "--missing"]) == 0
        assert read_records(out)[TINY.preset].trained == other.trained()
    monkeypatch.setattr(evidence, "find_gates", lambda names: (replace(TINY, iqm_bar=501.0),))
    assert main(arguments) == 1
    assert "(bar 501), worst seed" in (told := capsys.readouterr().out)
    assert "; MISSED; " in told


def test_a_try_is_of_another_gate_and_needs_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "find_gates", lambda names: (TINY,))
    out = tmp_path / "out"
    tried = ["--seeds", "4", "--steps", "48", "--episodes", "2", "--out", str(out)]
    assert main(["dqn", *tried, "--set", "threads=1"]) == 0
    record = read_records(out)[TINY.preset]
    assert ([seed.seed for seed in record.seeds], record.steps, record.episodes) == ([4], 48, 2)
    assert not record.is_of(TINY)
    capsys.readouterr()
    for option, value in (("--seeds", "4"), ("--steps", "48"), ("--episodes", "2")):
        assert main(["dqn", option, value]) == 2
        assert f"{option} makes this a try, not the gate" in capsys.readouterr().err


# Side by side


def test_the_longest_gate_is_first_and_one_never_measured_before_it(
    tiny: Record, tmp_path: Path
) -> None:
    dqn, ppo, sac = find_gates(THREE)
    write_record(tmp_path, dqn, changed(tiny, seconds=5.0))
    write_record(tmp_path, ppo, changed(tiny, seconds=9.0))
    assert longest_first([dqn, ppo, sac], [tmp_path]) == [sac, ppo, dqn]
    write_record(tmp_path / "later", dqn, changed(tiny, seconds=10.0))
    assert longest_first([dqn, ppo], [tmp_path, tmp_path / "later"]) == [dqn, ppo]


def test_processes_side_by_side_go_on_after_a_failure(tmp_path: Path) -> None:
    codes = {"dqn": 2, "ppo": 1, "sac": 0}
    ended: list[Ended] = []
    works = [
        Work(
            name,
            ["sh", "-c", f"echo begins; echo {name} ends >&2; exit {code}"],
            tmp_path / "logs" / name,
        )
        for name, code in codes.items()
    ]
    assert run_all(works, 2, ended.append) == []
    assert {one.work.name: one.code for one in ended} == codes
    assert {one.last_line for one in ended} == {f"{name} ends" for name in codes}
    # Python exits with 1 when it breaks, so that is not a record of a missed bar.
    assert {one.work.name for one in ended if one.done} == {"sac"}
    assert sorted(one.outcome.partition(",")[0] for one in ended) == [
        "ended with 1",
        "ended with 2",
        "finished",
    ]


SAVES = "trap 'echo saved; exit 75' TERM; echo begun; while :; do sleep 0.05; done"


def test_a_signal_stops_what_runs_and_names_what_is_left(tmp_path: Path) -> None:
    ended: list[Ended] = []
    stops = f"while ! grep -q begun {tmp_path}/saves; do :; done; kill {os.getpid()}"
    orders = {"stops": stops, "saves": SAVES, "waits": "exit 0"}
    works = [Work(name, ["sh", "-c", order], tmp_path / name) for name, order in orders.items()]
    left = run_all(works, 2, ended.append)
    assert {one.work.name: one.outcome for one in left if one.work.name != "stops"} == {
        "saves": "saved, to be continued",
        "waits": "not begun",
    }
    assert (tmp_path / "saves").read_text() == "begun\nsaved\n"
    assert {one.work.name for one in (*ended, *left)} == set(orders)


def test_time_that_is_over_stops_what_runs(tmp_path: Path) -> None:
    looks: list[bool] = []
    log = tmp_path / "log"
    works = [Work("sleeps", ["sleep", "200"], log), Work("waits", ["true"], log)]
    left = run_all(works, 1, print, seconds=0.3, watch=lambda: looks.append(log.exists()))
    assert [one.code for one in left] == [-signal.SIGTERM, None]
    assert looks[-1]


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_gates_side_by_side_are_stopped_and_taken_up_again(tmp_path: Path) -> None:
    """By a signal to the parent alone, as `timeout` sends it."""
    out, runs = tmp_path / "out", tmp_path / "runs"
    words = [
        "dqn/cartpole",
        "ppo/cartpole",
        "--jobs",
        "2",
        "--out",
        str(out),
        "--runs",
        str(runs),
        "--missing",
    ]
    words += ["--seeds", "4,5", "--steps", "6000", "--episodes", "2"]
    command = [sys.executable, "-m", "bench.evidence", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        member = runs / "dqn-cartpole" / "seed_4" / "metrics.jsonl"
        while not (member.is_file() and member.stat().st_size):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.stdout is not None
        told = process.stdout.read()
    assert process.returncode == STOPPED, told
    assert "stopped; not measured: " in told
    assert "dqn/cartpole" in told
    assert (runs / "dqn-cartpole" / "seed_4" / "checkpoints").is_dir()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.count(", last checkpoint, 2 seeds, 2 episodes each: IQM") >= 1
    assert set(read_records(out)) == {"dqn/cartpole", "ppo/cartpole"}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "last checkpoint" not in again.stdout, "nothing is missing"


def test_a_gate_without_its_data_is_skipped_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["iql", "--out", out]) == main(["iql", "--data", str(tmp_path), "--out", out]) == 0
    told = capsys.readouterr().out
    assert "iql/pendulum is skipped: it learns from pendulum-mixed-reagent.npz" in told
    assert "no folder with data is named" in told
    assert f"{tmp_path} does not hold it" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ppo/cartpol"], "'ppo/cartpol' is not a learning gate"),
        (["iql", "--data", "nowhere"], "--data nowhere: there is no such folder"),
        (["ppo", "--seeds", "two"], "--seeds must look like"),
        (["ppo", "--seeds", "1,1"], "must be different numbers"),
        (["ppo", "--set", "total_timesteps=5"], "--set total_timesteps=5: a gate stays what it is"),
        (["ppo", "--set", "device=tpu"], "device: must be auto, cpu, cuda"),
        (["ppo", "--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["ppo", "--steps", "-3"], "--steps must be >= 1, got -3"),
    ],
)
def test_bad_input_is_one_sentence_and_code_two(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_environment_may_name_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, "nowhere")
    assert main(["iql"]) == 2
    assert f"{DATA_VARIABLE} nowhere: there is no such folder" in capsys.readouterr().err
