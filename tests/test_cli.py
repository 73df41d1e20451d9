"""The command line: what it prints, its exit codes, and one sentence per mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tiny import STEPS, clean_environment, run_cli, run_python, write_tiny
from rl_training import __version__
from rl_training.cli import EXIT_INTERRUPTED
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.resources import preset_names

COMMANDS = ["train", "eval", "resume", "predict", "list", "describe", "config"]
COMMANDS.extend(["verify-resume", "doctor"])
OBS = "[1.0, 0.0, 0.0]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of SAC, `runs/run`; tests must not change it."""
    folder = tmp_path_factory.mktemp("cli")
    assert run_cli("train", "-c", write_tiny(folder), "-q").code == 0
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The configuration of a run that has not begun."""
    return write_tiny(tmp_path)


# Training


def test_train_prints_what_scripts_need(tiny: Path) -> None:
    done = run_cli("train", "--config", tiny)
    assert done.code == 0
    run = tiny.parent / "runs" / "run"
    lines = done.out.splitlines()
    assert lines[0] == f"run_dir={run}"
    assert lines[1] == f"checkpoint_path={run}/checkpoints/step_{STEPS}"
    assert done.values["global_step"] == str(STEPS)
    assert done.values["eval_episodes"] == "1"
    assert float(done.values["eval_return_mean"]) <= 0
    assert float(done.values["eval_return_std"]) == 0
    assert Path(done.values["plots"]).is_file()
    assert "\x1b" not in done.out + done.err


def test_options_and_overrides_go_before_the_file(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "--output-dir": tmp_path / "other",
        "--total-timesteps": 24,
        "--num-envs": 2,
        "--eval-episodes": 3,
        "--seed": 9,
        "--device": "cpu",
        "--set": "algo_kwargs.batch_size=4",
    }
    words = [word for pair in options.items() for word in pair]
    done = run_cli("train", "-c", tiny, *words, "--set", "run_name=named")
    assert done.code == 0, done.err
    assert done.values["run_dir"] == str(tmp_path / "other" / "named")
    assert (done.values["global_step"], done.values["eval_episodes"]) == ("24", "3")
    stored = yaml.safe_load((tmp_path / "other" / "named" / "config.yaml").read_text())
    assert (stored["num_envs"], stored["seed"]) == (2, 9)
    assert stored["algo_kwargs"]["batch_size"] == 4


def test_a_dry_run_shows_the_resolved_configuration_and_writes_nothing(tiny: Path) -> None:
    done = run_cli("train", "-c", tiny, "--seed", "7", "--dry-run")
    assert done.code == 0
    shown = yaml.safe_load(done.out)
    assert shown["seed"] == 7
    assert shown["algo_kwargs"].keys() == get_algorithm_spec("sac").config_class.model_fields.keys()
    assert not (tiny.parent / "runs").exists()


def test_brackets_in_a_path_are_printed_as_they_are(tiny: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[bold]:bug:"
    done = run_cli("train", "-c", tiny, "--output-dir", odd, "--total-timesteps", "16")
    assert done.values["run_dir"] == f"{odd}/run"


def test_the_reason_of_an_early_stop_is_printed(tmp_path: Path) -> None:
    kwargs = {"eval_interval": 16, "early_stopping": {"target": -1e9}}
    done = run_cli("train", "-c", write_tiny(tmp_path, algo_kwargs=kwargs))
    assert done.values["global_step"] == "16"
    assert "reached the target" in done.values["stop_reason"]
    assert done.err.splitlines()[0].startswith("step=16 eval_return_mean=-")


def test_a_group_of_seeds_is_trained_resumed_evaluated_and_predicted_with(tiny: Path) -> None:
    done = run_cli("train", "-c", tiny, "--seeds", "1,2", "--total-timesteps", "32")
    assert done.code == 0, done.err
    run = Path(done.values["run_dir"])
    assert {p.name for p in run.glob("seed_*")} == {"seed_1", "seed_2"}
    assert done.out.count("seed_run=") == 2
    more = run_cli("resume", "--checkpoint", run, "--total-timesteps", "48")
    assert (more.code, more.values["global_step"]) == (0, "48")
    member = run_cli("resume", "--checkpoint", run / "seed_2", "--total-timesteps", STEPS)
    assert (member.code, member.values["global_step"]) == (0, str(STEPS))
    assert member.values["run_dir"] == str(run / "seed_2")
    assert run_cli("eval", "--checkpoint", run / "seed_1").values["global_step"] == "48"
    assert (
        len(json.loads(run_cli("predict", "--checkpoint", run / "seed_1", "--obs", OBS).out)) == 1
    )
    together = run_cli("eval", "--checkpoint", run, "--episodes", "2", "--seed", "3")
    found = json.loads(run_cli("eval", run, "--episodes", "2", "--seed", "3", "--json").out)
    assert (together.values["global_step"], found["step"]) == ("48", 48)
    means = [found["members"][name]["eval_return_mean"] for name in ("seed_1", "seed_2")]
    assert together.out.splitlines()[0] == f"seed_1 eval_return_mean={means[0]:.4f}"
    assert together.values["eval_return_worst"] == f"{min(means):.4f}"
    assert found["eval_return_iqm"] == pytest.approx(sum(means) / 2)
    for command in (("eval", "--best"), ("predict", "--obs", OBS)):
        sentence = run_cli(*command, "--checkpoint", run).sentence()
        assert "holds several seeds; give one of them" in sentence
        assert str(run / "seed_1") in sentence


def test_one_seed_goes_before_the_seeds_of_a_file(tmp_path: Path) -> None:
    grouped = write_tiny(tmp_path, seeds=[1, 2])
    shown = yaml.safe_load(run_cli("train", "-c", grouped, "--seed", "5", "--dry-run").out)
    assert (shown["seed"], shown["seeds"]) == (5, None)
    assert yaml.safe_load(run_cli("train", "-c", grouped, "--dry-run").out)["seeds"] == [1, 2]
    both = run_cli("train", "-c", grouped, "--seed", "5", "--seeds", "1,2")
    assert both.sentence() == "give either --seed or --seeds, not both"


def test_seeds_may_be_a_range(tiny: Path) -> None:
    done = run_cli("train", "-c", tiny, "--seeds", "0..3", "--dry-run")
    assert yaml.safe_load(done.out)["seeds"] == [0, 1, 2, 3]


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "seed=abc"], "--set seed=abc: seed must be an integer, got 'abc'"),
        (["--set", "seed"], "--set seed is not of the form key=value, such as seed=1"),
        (["--total-timesteps", "0"], "total_timesteps must be >= 1, got 0"),
        (["--num-envs", "0"], "num_envs must be >= 1, got 0"),
        (["--eval-episodes", "-1"], "eval_episodes must be >= 0, got -1"),
        (["--device", "tpu"], "device: must be auto, cpu, cuda or cuda:<n>, got 'tpu'"),
        (["--seeds", "1,x"], "--seeds must look like 1,2,3 or 0..7 (rising), got '1,x'"),
        (["--seeds", "1,1"], "seeds: must be different numbers, at least one, got [1, 1]"),
        (["--seeds", "5..3"], "--seeds must look like 1,2,3 or 0..7 (rising), got"),
        (["--set", "algo_kwargs.no=1", "--dry-run"], "--set algo_kwargs.no=1: algo_kwargs.no is "),
        (["--set", "env_id=Pendulm-v1"], "--set env_id=Pendulm-v1: env_id 'Pendulm-v1' is not a"),
        (["--set", "env_id=CartPole-v1"], "sac needs continuous actions, but CartPole-v1 has"),
        (["--set", "env_kwargs.nothing=1"], "env_kwargs.nothing (value 1) is not an argument of"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_leaves_nothing_behind(
    words: list[str], expected: str, tiny: Path
) -> None:
    assert run_cli("train", "-c", tiny, *words).sentence().startswith(expected)
    assert not (tiny.parent / "runs").exists()


@pytest.mark.parametrize("command", ["train", "config", "verify-resume"])
def test_every_command_that_reads_a_file_names_file_and_line(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("algo: sac\nenv_id: Pendulum-v1\nsede: 3\n")
    words = {"train": ["-c"], "config": ["show"], "verify-resume": ["--at", "3", "-c"]}[command]
    expected = f"{path}:3: sede is not a field of TrainConfig (did you mean seed?)"
    assert run_cli(command, *words, path).sentence() == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "-c", "sac/pendulm"], "sac/pendulm is neither a file nor a preset (did you"),
        (["eval", "--checkpoint", "nowhere"], "there is no folder nowhere"),
        (["resume", "--checkpoint", "nowhere"], "there is no folder nowhere"),
        (["describe", "sacc"], "algo 'sacc' is not an algorithm (did you mean sac?)"),
        (["config", "schema", "sacc"], "algo 'sacc' is not an algorithm (did you mean sac?)"),
        (["config", "sho", "sac/pendulum"], "config sho: allowed are show and schema"),
        (["list", "things"], "list things: allowed are algos, presets and envs"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: list[str], expected: str) -> None:
    assert run_cli(*words).sentence().startswith(expected)


@pytest.mark.parametrize(
    "words", [["train"], ["trian"], ["train", "-c", "sac/pendulum", "--seed", "x"], ["--nothing"]]
)
def test_a_wrong_command_or_option_exits_with_two(words: list[str]) -> None:
    done = run_cli(*words)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_a_taken_name_and_an_unwritable_folder_are_named(folder: Path, tmp_path: Path) -> None:
    taken = run_cli("train", "-c", folder / "tiny.yaml").sentence()
    assert taken.startswith("run_name 'run' is taken: ")
    assert f"rl-training resume --checkpoint {folder / 'runs' / 'run'}" in taken
    (tmp_path / "file").write_text("in the way")
    done = run_cli("train", "-c", folder / "tiny.yaml", "--output-dir", tmp_path / "file")
    assert "no folder can be made there" in done.sentence()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algo: sac\nenv_id: Pendulum-v1\nseed: 1\nseed: 2\n", ":4: seed is given twice; keep one"),
        ("algo: sac\nenv_id: [Pendulum-v1\n", ":3: is not valid YAML ("),
        ("algo: sac\nenv_id: !!python/object:os.system ls\n", ":2: tag tag:yaml.org,2002:python"),
    ],
)
def test_a_process_reports_a_mistake_without_a_traceback(
    text: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    done = run_python("-m", "rl_training", "train", "--config", path, cwd=tmp_path)
    assert done.sentence().startswith(f"{path}{expected}")
    assert done.out == ""
    assert "\x1b" not in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


# Evaluating and predicting


def test_eval_prints_lines_or_one_object(folder: Path) -> None:
    run = folder / "runs" / "run"
    words = ("eval", "--checkpoint", run, "--episodes", "3", "--seed", "1")
    lines = run_cli(*words).values
    assert (lines["global_step"], float(lines["eval_episodes"])) == (str(STEPS), 3)
    data = json.loads(run_cli(*words, "--json").out)
    assert len(data["returns"]) == 3
    assert data["eval_return_mean"] == pytest.approx(float(lines["eval_return_mean"]), abs=1e-3)
    assert json.loads(run_cli(*words, "--json", "--best").out)["step"] == STEPS
    assert run_cli("eval", "--checkpoint", run, "--episodes", "0").sentence().startswith("num_epi")
    assert run_cli("eval", "--checkpoint", run, "--seed", "-1").code == 2
    assert "device must be" in run_cli("eval", "--checkpoint", run, "--device", "tpu").sentence()


def test_predict_prints_an_action(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder / "runs" / "run"
    words = ("predict", "--checkpoint", run, "--obs")
    action = json.loads(run_cli(*words, OBS).out)
    assert len(action) == 1
    assert -2 <= action[0] <= 2
    assert json.loads(run_cli(*words, f"[{OBS}, {OBS}]").out) == [action, action]
    assert -2 <= json.loads(run_cli(*words, OBS, "--stochastic").out)[0] <= 2
    monkeypatch.setattr(sys.stdin, "read", lambda: OBS, raising=False)
    assert json.loads(run_cli(*words, "-").out) == action


@pytest.mark.parametrize(
    ("obs", "expected"),
    [
        ("[1, 2", "--obs is not JSON (Expecting ',' delimiter at character 5)"),
        ("", "--obs is not JSON"),
        ("[1, 2]", "the observation has shape (2,); Pendulum-v1 needs (3,)"),
        ("3", "the observation has shape ()"),
        ("[NaN, 1, 1]", "the observation holds NaN or infinity"),
        ('["a", "b", "c"]', "the observation must be numbers"),
    ],
)
def test_an_observation_that_does_not_fit_is_one_sentence(
    obs: str, expected: str, folder: Path
) -> None:
    done = run_cli("predict", "--checkpoint", folder / "runs" / "run", "--obs", obs)
    assert done.sentence().startswith(expected)


def test_a_damaged_checkpoint_is_named_on_one_line(tiny: Path) -> None:
    run = Path(run_cli("train", "-c", tiny).values["run_dir"])
    (run / "checkpoints" / f"step_{STEPS}" / "manifest.json").write_text("{}")
    done = run_cli("eval", "--checkpoint", run)
    assert (done.code, done.values["global_step"]) == (0, "32")
    (note,) = done.err.splitlines()
    assert note.startswith("note: damaged checkpoint passed over: ")
    assert f"step_{STEPS}" in note


# Looking things up


@pytest.mark.matrix
def test_lists_and_descriptions_cover_every_algorithm_and_preset() -> None:
    algos = json.loads(run_cli("list", "--json").out)
    assert [row["name"] for row in algos] == list(algorithm_names())
    presets = json.loads(run_cli("list", "presets", "--json").out)
    assert [row["preset"] for row in presets] == preset_names()
    assert "Pendulum-v1" in run_cli("list", "envs").out
    for name in algorithm_names():
        assert name in run_cli("list").out
        spec, plain = get_algorithm_spec(name), run_cli("describe", name).out
        facts = json.loads(run_cli("describe", name, "--json").out)
        assert facts["paper"] == spec.paper
        assert [f["key"] for f in facts["settings"]] == list(spec.config_class.model_fields)
        assert [m["name"] for m in facts["metrics"]] == list(spec.metrics)
        assert all(key in plain for key in spec.config_class.model_fields)


def test_config_show_and_schema_can_be_read_back() -> None:
    shown = run_cli("config", "show", "sac/pendulum", "--set", "seed=4")
    assert yaml.safe_load(shown.out)["seed"] == 4
    schema = json.loads(run_cli("config", "schema", "ppo").out)
    assert schema["properties"]["algo"]["const"] == "ppo"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_every_option(command: str) -> None:
    for flag in ("--help", "-h"):
        done = run_cli(*command.split(), flag)
        assert done.code == 0
        assert "Usage" in done.out
    if not command:
        assert all(name in done.out for name in COMMANDS)


def test_version_is_printed() -> None:
    assert run_cli("--version").out.strip() == __version__


def test_verify_resume_says_identical(tiny: Path) -> None:
    done = run_cli("verify-resume", "--config", tiny, "--at", "30", "--total-timesteps", "48")
    assert done.code == 0, done.err
    assert done.out.startswith("identical: 48 steps at once, and 30 + resume + 18")
    assert len(done.values["sha256"]) == 64
    assert not (tiny.parent / "runs").exists()
    sentence = run_cli("verify-resume", "--config", tiny, "--at", STEPS).sentence()
    assert sentence == f"--at must be between 1 and {STEPS - 1}, got {STEPS}"


def test_doctor_reports_and_proves_that_the_package_works() -> None:
    done = run_cli("doctor", "--json")
    report = json.loads(done.out)
    assert (done.code, report["ok"], report["self_test"]["passed"]) == (0, True, True)
    assert report["rl_training"] == __version__
    assert {"torch", "numpy", "gymnasium"} <= report["packages"].keys()
    assert {"mujoco", "atari", "offline", "tune", "ray", "report"} <= report["extras"].keys()
    levels = report["resume_levels"]
    assert levels["classic control"] == levels["toy text"] == "exact"
    assert {levels.get(family, "exact") for family in ("MuJoCo", "Atari")} == {"exact"}
    assert levels.get("Box2D", "replay") == "replay"


# Signals and locks


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has written a checkpoint."""
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")


def test_a_terminated_run_is_saved_locked_until_then_and_resumable(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, total_timesteps=10**7, checkpoint_interval=100, log_interval=100)
    run = tmp_path / "runs" / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training", "train", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        wait_for(run / "checkpoints" / "step_100", process)
        locked = run_cli("resume", "--checkpoint", run).sentence()
        assert "is in use by another process" in locked
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == EXIT_INTERRUPTED, err
    assert err.startswith("interrupted: SIGTERM received: saved step ")
    assert f"rl-training resume --checkpoint {run}" in err
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    saved = int(err.split("saved step ")[1].split(" ")[0])
    assert saved > 100
    assert (run / "checkpoints" / f"step_{saved}").is_dir()
    done = run_cli("resume", "--checkpoint", run, "--total-timesteps", saved + 20)
    assert (done.code, done.values["global_step"]) == (0, str(saved + 20))
