"""`rl-training data`: what it prints, what it writes, its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
from rich.console import Console

from helpers.datasets import columns_of, tiny_columns, toy_data, write_columns
from helpers.tiny import Outcome, run_cli, write_tiny
from rl_training.cli.data_views import histogram, number, print_summary
from rl_training.data import load_transition_dataset
from rl_training.data.datasets.summary import summarize
from rl_training.data.datasets.writers import save_dataset


def data(*arguments: object) -> Outcome:
    return run_cli("data", *arguments)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of SAC on Pendulum with episodes of 20 steps."""
    folder = tmp_path_factory.mktemp("run")
    done = run_cli("train", "-c", write_tiny(folder), "-q")
    assert done.code == 0, done.err
    return Path(done.values["run_dir"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_dataset(toy_data(), tmp_path / "toy.npz", "npz")
    return tmp_path / "toy.npz"


# inspect


def test_inspect_shows_statistics_and_a_histogram(file: Path) -> None:
    done = data("inspect", file)
    assert done.code == 0, done.err
    for text in ("transitions", "400 (", "Toy-v0", "returns of 12 episodes", "at its border"):
        assert text in done.out, text
    assert "█" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out


def test_inspect_as_json_holds_every_return(file: Path) -> None:
    record = json.loads(data("inspect", file, "--json").out)
    assert record["rows"] == 400
    assert np.allclose(record["episode_returns"], toy_data().episode_returns())
    assert record["digest"] == toy_data().digest()
    assert len(record["saturation"]) == 2


def test_inspect_shows_nan_as_null_instead_of_failing(tmp_path: Path) -> None:
    columns = tiny_columns() | {"rewards": np.array([1, 2, np.nan, 4, 5], np.float32)}
    path = write_columns(tmp_path / "nan.npz", columns)
    record = json.loads(data("inspect", path, "--json").out)
    assert record["episode_returns"] == [None, 9.0]
    assert data("inspect", path).code == 0


def test_inspect_makes_random_data_for_a_task() -> None:
    done = data("inspect", "--kind", "random", "--env", "CartPole-v1", "--size", 100)
    assert done.code == 0, done.err
    assert "discrete, 2 different" in done.out
    assert "made up at random" in done.out


def test_inspect_gives_the_score_of_known_tasks(tmp_path: Path) -> None:
    meta = np.array(json.dumps({"env": "Hopper-v5"}))
    path = write_columns(tmp_path / "a.npz", tiny_columns(), meta=meta)
    assert "D4RL score" in data("inspect", path).out


@pytest.mark.parametrize("width", [80, 120])
def test_a_summary_keeps_to_the_width_of_the_terminal(width: int) -> None:
    dataset = toy_data(2000)
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(console, summarize(dataset), dataset.episode_returns())
    lines = console.export_text().splitlines()
    assert 60 < max(map(len, lines)) <= min(width, 100)


def test_a_histogram_shows_every_count_and_the_largest_bar_is_full() -> None:
    values = np.array([0.0] * 1000 + [1.0] + [4.0] * 500)
    lines = histogram(values, 60, bins=4)
    assert [line.split()[-1] for line in lines] == ["1,000", "1", "0", "500"]
    bars = [line.count("█") for line in lines]
    assert bars[0] == pytest.approx(2 * bars[3], abs=1)
    assert "▏" in lines[1], "one of a thousand is still seen"
    assert "#" in histogram(values, 60, ascii_only=True)[0]
    assert histogram(np.ones(3), 60) == ["all are 1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (-0.05, "-0.05"),
        (12.0, "12"),
        (2e-7, "2e-07"),
        (3e9, "3e+09"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


# check


def test_check_of_clean_data_exits_with_zero(file: Path) -> None:
    done = data("check", file)
    assert done.code == 0
    assert done.out == "no faults in 400 transitions in 12 episodes\n"
    assert "--env Toy-v0 checks the action box" in done.err


def test_check_of_a_fault_says_what_to_do_and_exits_with_one(tmp_path: Path) -> None:
    columns = columns_of(toy_data())
    columns["next_observations"][7] += 1
    path = write_columns(tmp_path / "bad.npz", columns)
    done = data("check", path)
    assert done.code == 1
    assert "row 7; episode 0" in done.out
    assert "→" in done.out
    assert done.out.endswith("1 fault in 400 transitions in 12 episodes\n")
    record = json.loads(data("check", path, "--json").out)
    assert record["clean"] is False
    assert record["findings"][0]["rows"] == [7]


def test_check_with_the_task_knows_its_box(tmp_path: Path) -> None:
    assert data("collect", tmp_path / "a.npz", "--env", "Pendulum-v1", "--steps", 400).code == 0
    assert data("check", tmp_path / "a.npz", "--env", "Pendulum-v1").code == 0
    with np.load(tmp_path / "a.npz") as columns:
        wrong = dict(columns) | {"actions": columns["actions"] * 2}
    path = write_columns(tmp_path / "b.npz", wrong)
    done = data("check", path, "--env", "Pendulum-v1")
    assert done.code == 1
    assert "outside [-2, 2] of Pendulum-v1" in done.out


def test_notes_alone_are_no_faults(tmp_path: Path) -> None:
    columns = columns_of(toy_data())
    columns["actions"][:, 0] = 1.0
    done = data("check", write_columns(tmp_path / "a.npz", columns), "--json")
    assert done.code == 0
    assert [f["level"] for f in json.loads(done.out)["findings"]] == ["note"]


# collect


def test_collect_is_a_function_of_the_seed(run: Path, tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        done = data(
            *("collect", tmp_path / f"{name}.npz", "--checkpoint", run),
            *("--steps", 50, "--seed", seed, "--epsilon", 0.2),
        )
        assert done.code == 0, done.err
        digests.append(done.values["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_a_deterministic_policy_acts_as_predict_does(run: Path, tmp_path: Path) -> None:
    done = data(
        "collect", tmp_path / "a.npz", "--checkpoint", run, "--episodes", 2, "--deterministic"
    )
    assert (done.values["transitions"], done.values["episodes"]) == ("40", "2")
    dataset = load_transition_dataset("npz", path=tmp_path / "a.npz")
    # The run's own limit of 20 steps holds; the ends are truncations with true successors.
    assert np.flatnonzero(dataset.truncations).tolist() == [19, 39]
    assert not dataset.terminations.any()
    assert not np.array_equal(dataset.next_observations[19], dataset.observations[20])
    shown = run_cli("predict", "--checkpoint", run, "--obs", str(dataset.observations[3].tolist()))
    assert json.loads(shown.out) == pytest.approx(dataset.actions[3].tolist(), abs=1e-5)
    with np.load(tmp_path / "a.npz") as stored:
        source = json.loads(str(stored["meta"]))["source"]
    assert source == "sac at step 64, deterministic on Pendulum-v1, seed 0"


def test_random_actions_fill_the_box(tmp_path: Path) -> None:
    data("collect", tmp_path / "a.npz", "--env", "Pendulum-v1", "--steps", 300)
    actions = load_transition_dataset("npz", path=tmp_path / "a.npz").actions
    assert -2.0 <= actions.min() < -1.9
    assert 1.9 < actions.max() <= 2.0


def test_collected_steps_follow_the_physics(tmp_path: Path) -> None:
    done = data(
        *("collect", tmp_path / "a.npz", "--env", "Pendulum-v1", "--steps", 60),
        *("--max-episode-steps", 25),
    )
    assert done.values["episodes"] == "3"
    dataset = load_transition_dataset("npz", path=tmp_path / "a.npz")
    assert dataset.episode_lengths().tolist() == [25, 25, 10]
    cosine, sine, speed = dataset.observations.T.astype(np.float64)
    torque = dataset.actions[:, 0]
    faster = np.clip(speed + (15 * sine + 3 * torque) * 0.05, -8, 8)
    assert np.allclose(dataset.next_observations[:, 2], faster, atol=1e-4)
    angle = np.arctan2(sine, cosine)
    cost = angle**2 + 0.1 * speed**2 + 0.001 * torque**2
    assert np.allclose(dataset.rewards, -cost, atol=1e-4)


def test_collect_writes_what_minari_loads(run: Path) -> None:
    done = data("collect", "pendulum/sac-v0", "--checkpoint", run, "--steps", 50)
    assert done.code == 0, done.err
    assert done.values["dataset_kind"] == "minari"
    stored = minari.load_dataset("pendulum/sac-v0")
    assert stored.total_steps == 50
    assert stored.spec.env_spec.id == "Pendulum-v1"
    again = load_transition_dataset("minari", dataset_id="pendulum/sac-v0")
    assert again.digest() == done.values["digest"]
    assert data("inspect", "pendulum/sac-v0").code == 0


# convert


def test_conversion_through_every_format_changes_nothing(file: Path, tmp_path: Path) -> None:
    steps: list[tuple[object, object, list[str]]] = [
        (file, tmp_path / "b.hdf5", []),
        (tmp_path / "b.hdf5", tmp_path / "c", ["--to", "npy"]),
        (tmp_path / "c", "own/toy-v0", []),
        ("own/toy-v0", tmp_path / "d.npz", []),
    ]
    for source, target, options in steps:
        done = data("convert", source, target, *options)
        assert done.code == 0, done.err
        assert done.values["digest"] == toy_data().digest()
    assert not list(tmp_path.glob(".convert.*"))


# Mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["inspect", "nowhere.npz"], "nowhere.npz: there is no such file or folder"),
        (["inspect", "nowhere"], "nowhere: there is no such file or folder"),
        (["inspect", "own/none-v0"], "minari own/none-v0: it is not in the local folder"),
        (["inspect", "--kind", "npzz", "x"], "'npzz' is not known (did you mean npz?)"),
        (["inspect", "--kind", "random"], "a random dataset needs env_spec"),
        (["check"], "name a file, a folder or a Minari id"),
        (["check", "toy.npz", "--env", "Pendulm-v1"], "did you mean Pendulum-v1"),
        (["convert", "toy.npz", "toy.npz"], "toy.npz exists already"),
        (["convert", "toy.npz", "out.xyz"], "cannot be inferred from its name"),
        (["convert", "toy.npz", "out", "--to", "nyp"], "--to nyp is not a format"),
        (["collect", "a.npz"], "collect needs --checkpoint, or --env"),
        (["collect", "a.npz", "--env", "Pendulum-v1"], "either a number of steps or a number of"),
        (["collect", "a.npz", "--env", "Pendulum-v1", "--steps", "0"], "steps must be >= 1, got 0"),
        (["collect", "a.npz", "--checkpoint", "none", "--steps", "5"], "none"),
    ],
)
def test_a_mistake_is_one_sentence_with_exit_code_two(
    words: list[str], sentence: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert sentence in data(*words).sentence()


BAD: dict[str, dict[str, Any]] = {
    "key actions is missing": {"actions": None},
    "actions has 4 rows, but rewards has 5": {"actions": np.zeros((4, 1))},
    "actions holds Python objects": {"actions": np.array([{}] * 5)},
    "actions holds <U1, not numbers": {"actions": np.array(list("abcde"))},
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_broken_file_is_one_sentence_with_exit_code_two(sentence: str, tmp_path: Path) -> None:
    path = write_columns(tmp_path / "bad.npz", tiny_columns(), **BAD[sentence])
    for words in (["inspect", path], ["check", path], ["convert", path, tmp_path / "b.hdf5"]):
        assert data(*words).sentence().startswith(f"{path}: {sentence}")


def test_another_task_than_the_checkpoints_is_refused(run: Path, tmp_path: Path) -> None:
    done = data(
        *("collect", tmp_path / "a.npz", "--checkpoint", run),
        *("--env", "CartPole-v1", "--steps", 5),
    )
    expected = "trained on Pendulum-v1 with action_kind continuous, but CartPole-v1 has discrete"
    assert expected in done.sentence()
    assert not (tmp_path / "a.npz").exists()
