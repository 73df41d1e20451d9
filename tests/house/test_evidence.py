"""The learning gates: their table, their records, and the page that is rendered from them.

Nothing here looks at how much is learned; `make learn` and `make evidence` do.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench.evidence.__main__ as evidence
import pytest
import yaml
from bench.evidence.__main__ import main
from bench.evidence.gates import DATA_VARIABLE, EPISODES, GATES, Gate, find_gates, quick_gates
from bench.evidence.page import plot, rendered, section
from bench.evidence.record import Record, measure, read_records, record_path, write_record

from helpers.tiny import ROOT, run_cli
from rl_training.errors import ConfigError, DataError
from rl_training.experiment.registry import algorithm_names
from rl_training.experiment.statistics import interquartile_mean

MOST_BYTES = 10_000
EVIDENCE = ROOT / "docs" / "evidence"
MARKERS = "# Results\n\n<!-- generated: evidence -->\n<!-- end generated -->\n\nBy hand.\n"
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
)


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return measure(TINY, tmp_path_factory.mktemp("runs"), circumstances=["threads=1"])


def changed(record: Record, **changes: Any) -> Record:
    return record.model_copy(update=changes)


# The table


def test_every_method_has_one_gate() -> None:
    assert sorted(gate.algo for gate in GATES) == sorted(algorithm_names())


def test_the_gates_of_make_learn_are_quick_and_four_need_no_data() -> None:
    free = [gate.preset for gate in quick_gates() if gate.data is None]
    assert free == ["dqn/cartpole", "ppo/cartpole", "sac/pendulum", "td3/pendulum"]


@every_gate
def test_a_gate_loads_with_its_budget_and_data(gate: Gate) -> None:
    config = gate.config(Path("folder"), gate.seeds)
    assert (config.algo, config.total_timesteps) == (gate.algo, gate.steps)
    assert config.all_seeds == gate.seeds == (0, 1, 2)
    assert gate.iqm_bar >= gate.bar > gate.random
    offline = {k: v for k, v in config.algo_kwargs.items() if k.endswith("dataset_path")}
    assert set(offline.values()) == ({f"folder/{gate.data}"} if gate.data else set())
    # Made-up data teaches nothing, so no gate may learn from it.
    assert "random" not in config.algo_config.model_dump().values()


@every_gate
def test_the_command_of_a_gate_is_its_run(gate: Gate) -> None:
    words = shlex.split(gate.commands(gate.seeds)[0])
    done = run_cli(*words[1:], "--dry-run")
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out) == gate.config(Path(), gate.seeds).resolved()


def test_gates_are_found_by_preset_or_method() -> None:
    assert [gate.preset for gate in find_gates(["dqn", "sac/pendulum"])] == [
        "dqn/cartpole",
        "sac/pendulum",
    ]
    assert find_gates([]) == GATES
    with pytest.raises(ConfigError, match=r"'sac/pendulm' is not .* mean sac/pendulum\?"):
        find_gates(["dqn", "sac/pendulm"])


# Records


def test_a_record_holds_curves_fresh_episodes_and_figures_over_seeds(tiny: Record) -> None:
    assert (tiny.steps, [seed.seed for seed in tiny.seeds]) == (64, [3, 1])
    for seed in tiny.seeds:
        assert seed.steps == (16, 32, 48, 64)
        assert len(seed.curve) == 4
        assert len(seed.returns) == EPISODES
        assert seed.mean == pytest.approx(statistics.fmean(seed.returns), abs=1e-3)
    means = [seed.mean for seed in tiny.seeds]
    assert tiny.final.iqm == pytest.approx(float(interquartile_mean(means)), abs=1e-3)
    assert [point.step for point in tiny.curve()] == [16, 32, 48, 64]
    assert (tiny.met, tiny.bar, tiny.random) == (True, 5.0, 22.2)
    assert (tiny.machine.threads, tiny.machine.device, tiny.data_digest) == (1, "cpu", None)
    assert tiny.seconds > 0
    assert 0 <= tiny.machine.others <= tiny.machine.cores


def test_the_commands_of_a_record_give_its_figures(
    tiny: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training, *evaluating = tiny.commands
    assert run_cli(*shlex.split(training)[1:]).code == 0
    for command, seed in zip(evaluating, tiny.seeds, strict=True):
        found = json.loads(run_cli(*shlex.split(command)[1:], "--json").out)
        assert found["returns"] == pytest.approx(seed.returns, abs=1e-3)


def test_one_seed_below_the_bar_is_enough_to_miss_it(tiny: Record, tmp_path: Path) -> None:
    means = sorted(seed.mean for seed in tiny.seeds)
    assert means[0] < means[1], "the seeds must differ for this"
    between = replace(TINY, bar=statistics.fmean(means))
    record = measure(between, tmp_path, circumstances=["threads=1"])
    assert sorted(seed.mean for seed in record.seeds) == means
    assert not record.met


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
    lines = section(Path("evidence"), {record.gate: record}).splitlines()
    assert len([line for line in lines if line.startswith("| [")]) == len(GATES)
    assert (
        "| [Deep Q-Network](algorithms/dqn.md) | `dqn/cartpole` | 64 | 3, 1 | 12.2, 140.0 "
        "| 76.1 [12.2, 140.0] | 5 | yes | 2 min |"
    ) in lines
    assert (
        "| [Soft Actor-Critic](algorithms/sac.md) | `sac/pendulum` | 10,000 | 0, 1, 2 "
        "| not measured |  | -200 |  |  |"
    ) in lines
    assert f"1 of {len(GATES)} gates are measured." in lines
    missed = section(Path("evidence"), {record.gate: changed(record, met=False)})
    assert "| 5 | **no** | 2 min |" in missed


def test_a_gate_shows_its_plot_machine_and_commands(tiny: Record) -> None:
    machine = tiny.machine.model_copy(
        update={"processor": "Abacus", "cores": 4, "others": 0.1, "date": "2026-01-02T03:04:05"}
    )
    text = section(Path("evidence"), {tiny.gate: changed(tiny, machine=machine)})
    assert "### `dqn/cartpole`" in text
    assert "](evidence/dqn-cartpole.svg)" in text
    assert "a random policy gets 22.2." in text
    assert "on Abacus, 4 cores; 1 thread, torch" in text
    assert "2026-01-02." in text
    assert "busy" not in text
    block = text.split("```bash\n")[1].split("```")[0].replace(" \\\n ", "")
    assert block.splitlines() == list(tiny.commands)
    assert max(map(len, text.split("```bash\n")[1].splitlines())) <= 100
    busy = machine.model_copy(update={"others": 3.04, "device": "H200"})
    text = section(Path("evidence"), {tiny.gate: changed(tiny, machine=busy)})
    assert "4 cores, H200;" in text
    assert "Other processes kept 3.0 cores busy, so the time is rough." in text


def test_data_is_named_with_its_digest(tiny: Record) -> None:
    gate = replace(TINY, data="rows.npz")
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
    assert kept == {f"{slug}{end}" for slug in slugs for end in (".json", ".svg")}


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
    assert record.trained == gate.trained(), f"run: python -m bench.evidence {gate.preset}"
    # A rollout that has begun is finished.
    assert gate.steps <= record.steps <= gate.steps * 1.02
    seeds = [seed.seed for seed in record.seeds]
    assert record.commands == gate.commands(seeds, record.circumstances)
    assert record.met == all(seed.mean >= gate.bar for seed in record.seeds)
    for seed in record.seeds:
        assert math.isclose(seed.mean, statistics.fmean(seed.returns), abs_tol=1e-3)


# The command


def test_a_gate_is_run_recorded_and_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "find_gates", lambda names: (TINY,))
    page, out = tmp_path / "results.md", tmp_path / "evidence"
    page.write_text(MARKERS)
    arguments = ["dqn", "--out", str(out), "--set", "threads=1"]
    assert main([*arguments, "--seeds", "4", "--runs", str(tmp_path / "runs")]) == 0
    assert "dqn/cartpole at 64 steps" in capsys.readouterr().out
    assert (tmp_path / "runs/dqn-cartpole/seed_4").is_dir()
    assert [seed.seed for seed in read_records(out)[TINY.preset].seeds] == [4]
    text = page.read_text()
    assert "| `dqn/cartpole` | 64 | 4 |" in text
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
    monkeypatch.setattr(evidence, "find_gates", lambda names: (replace(TINY, bar=501.0),))
    assert main(arguments) == 1
    assert "bar 501 MISSED" in capsys.readouterr().out


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
