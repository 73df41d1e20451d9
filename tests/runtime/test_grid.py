"""Grids of settings over the seed axis: members, folders, resuming, summary, and wrong grids."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tiny import STEPS, learner_digest, run_cli, tiny_config, write_tiny
from rl_training import SAC
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.grid import Member, number_text
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.statistics import bootstrap_interval, interquartile_mean
from rl_training.experiment.summary import SUMMARY_FILE, read_summary, summarize_group
from rl_training.runtime.results import TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint, load_agent, resume_training

GRID = {"learning_rate": [1e-3, 3e-4], "alpha": [0.1]}
FOLDERS = [
    "seed_3-learning_rate_0.001-alpha_0.1",
    "seed_1-learning_rate_0.001-alpha_0.1",
    "seed_3-learning_rate_0.0003-alpha_0.1",
    "seed_1-learning_rate_0.0003-alpha_0.1",
]


def grid_config(folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"seeds": [3, 1], "grid": GRID, "checkpoint_interval": 16} | changes
    return tiny_config("sac", folder, algo_kwargs={"eval_interval": 16}, **values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Two points with two seeds each; tests must not change it."""
    return train(grid_config(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The same, cut at 48 of 64."""
    return train(grid_config(tmp_path_factory.mktemp("cut")), stop_at=48)


@pytest.fixture
def copy(cut: TrainResult, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut.run_dir, tmp_path / "group"))


# Members


def test_every_point_has_every_seed() -> None:
    grid = {"learning_rate": [1, 0.5], "alpha": [0.1, 0.2]}
    config = TrainConfig(algo="sac", env_id="Pendulum-v1", seeds=(4, 2), grid=grid)
    assert [(m.seed, *m.point.values()) for m in config.members] == [
        (seed, rate, alpha) for rate in (1.0, 0.5) for alpha in (0.1, 0.2) for seed in (4, 2)
    ]
    assert config.all_seeds == (4, 2) * 4
    assert config.varied["alpha"] == (0.1, 0.1, 0.2, 0.2) * 2


def test_a_group_of_seeds_is_the_grid_with_one_point() -> None:
    config = TrainConfig(algo="sac", env_id="Pendulum-v1", seeds=(4, 2))
    assert config.members == (Member(4), Member(2))
    assert (config.members[0].folder, config.members[0].label) == ("seed_4", "seed 4")
    assert config.varied == {}
    alone = TrainConfig(algo="sac", env_id="Pendulum-v1", seed=9)
    assert alone.members == (Member(9),)
    assert not alone.is_group


def test_a_member_has_a_plain_configuration_of_its_own(tmp_path: Path) -> None:
    config = grid_config(tmp_path)
    member = config.for_member(config.members[2])
    assert (member.seed, member.seeds, member.grid) == (3, None, {})
    assert member.algo_kwargs == config.algo_kwargs | {"learning_rate": 3e-4, "alpha": 0.1}
    assert config.members[2].label == "seed 3, learning_rate 0.0003, alpha 0.1"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "0.0003"), (1e-5, "1e-05"), (2.0, "2"), (-1.5, "-1.5"), (0.12345678, "0.12345678")],
)
def test_numbers_in_names_are_short_but_exact(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(text) == value


# Runs


def test_members_have_folders_configurations_and_logs_of_their_own(whole: TrainResult) -> None:
    assert [member.run_dir.name for member in whole.per_seed] == FOLDERS
    for member, seed, rate in zip(
        whole.per_seed, (3, 1, 3, 1), (1e-3, 1e-3, 3e-4, 3e-4), strict=True
    ):
        stored = yaml.safe_load((member.run_dir / "config.yaml").read_text())
        header = load_checkpoint(member.checkpoint_path).header
        for config in (stored, header["config"]):
            assert (config["seed"], config["seeds"], config["grid"]) == (seed, None, {})
            assert config["algo_kwargs"]["learning_rate"] == rate
            assert config["algo_kwargs"]["alpha"] == 0.1
        rows = read_metrics(member.run_dir, "train")
        assert [row["learning_rate"] for row in rows] == pytest.approx([rate] * 4)
        assert rows[-1]["alpha"] == pytest.approx(0.1)
    group = load_config(whole.run_dir / "config.yaml")
    assert (group.seeds, group.grid) == ((3, 1), GRID)


def test_members_of_one_seed_start_alike_and_part(whole: TrainResult) -> None:
    rows = [read_metrics(member.run_dir, "eval") for member in whole.per_seed]
    # The first evaluation is before the first update.
    assert rows[0][0]["eval_return_mean"] == pytest.approx(rows[2][0]["eval_return_mean"])
    assert rows[0][0]["eval_return_mean"] != pytest.approx(rows[1][0]["eval_return_mean"])
    assert rows[0][-1]["eval_return_mean"] != rows[2][-1]["eval_return_mean"]


def test_a_resumed_grid_is_the_uninterrupted_one(whole: TrainResult, copy: Path) -> None:
    resumed = resume_training(copy)
    assert [member.run_dir.name for member in resumed.per_seed] == FOLDERS
    for left, right in zip(whole.per_seed, resumed.per_seed, strict=True):
        assert learner_digest(left.checkpoint_path) == learner_digest(right.checkpoint_path)
        assert left.metrics == right.metrics
    assert read_summary(resumed.run_dir) == read_summary(whole.run_dir)


def test_one_member_is_loaded_evaluated_and_resumed_alone(copy: Path, whole: TrainResult) -> None:
    member = copy / FOLDERS[2]
    agent = SAC.load(member)
    assert agent.config.algo_kwargs["learning_rate"] == 3e-4
    assert evaluate_checkpoint(member, 1).step == 48
    with pytest.raises(CheckpointError, match=r"several seeds; give one of them: .*alpha_0\.1"):
        load_agent(copy)
    result = resume_training(member)
    assert (result.run_dir, result.per_seed) == (member, ())
    assert result.metrics["global_step"] == STEPS
    uninterrupted = whole.per_seed[2].metrics["eval_return_mean"]
    assert result.metrics["eval_return_mean"] == pytest.approx(uninterrupted, rel=1e-3)


def test_members_that_all_went_on_alone_come_together_again(copy: Path) -> None:
    for name in FOLDERS:
        resume_training(copy / name)
    os.remove(copy / "config.yaml")  # the checkpoints know the group too
    result = resume_training(copy, total_timesteps=80)
    assert [member.run_dir.name for member in result.per_seed] == FOLDERS
    assert result.metrics["global_step"] == 80


def test_a_seed_may_be_taken_away_but_not_a_point_of_it(copy: Path) -> None:
    shutil.copytree(copy / FOLDERS[0], copy / f"{FOLDERS[0]}-backup")  # no member
    shutil.rmtree(copy / FOLDERS[1])
    with pytest.raises(CheckpointError, match=f"lacks {FOLDERS[1]}: put it back"):
        resume_training(copy)
    shutil.rmtree(copy / FOLDERS[3])
    result = resume_training(copy)
    assert [member.run_dir.name for member in result.per_seed] == [FOLDERS[0], FOLDERS[2]]


def test_folders_nobody_described_are_not_guessed_at(copy: Path) -> None:
    os.remove(copy / "config.yaml")
    shutil.copytree(copy / FOLDERS[0], copy / "seed_9")
    with pytest.raises(CheckpointError, match=r"no readable config\.yaml, .* do not know seed_9"):
        resume_training(copy)


def test_a_group_written_before_there_were_grids_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.runtime.checkpoints.saver import Saver

    header = Saver._header

    def old_header(self: Saver, *arguments: Any) -> dict[str, Any]:
        new = header(self, *arguments)
        del new["config"]["grid"]
        return {**new, "group_seeds": new.pop("group")["seeds"]}

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_header", old_header)
        run = train(tiny_config("sac", tmp_path, seeds=[3, 1]), stop_at=32).run_dir
    described = run / "config.yaml"
    described.write_text(described.read_text().replace("grid: {}\n", ""))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    os.remove(other / "config.yaml")
    for folder in (run, other):
        result = resume_training(folder)
        assert [member.run_dir.name for member in result.per_seed] == ["seed_3", "seed_1"]
        assert result.metrics["global_step"] == STEPS


def test_one_seed_over_a_grid_needs_no_list_of_seeds(tmp_path: Path) -> None:
    config = grid_config(tmp_path, seeds=None, seed=5, total_timesteps=16, run_name=None)
    result = train(config)
    assert result.run_dir.name.startswith("sac_Pendulum-v1_seed5_grid_learning_rate_alpha_")
    assert [m.run_dir.name for m in result.per_seed] == [m.folder for m in config.members]


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    from rl_training.experiment.runs import create_run_folder

    run = create_run_folder(grid_config(tmp_path, total_timesteps=16))
    assert [member.run_dir.name for member in resume_training(run).per_seed] == FOLDERS


# The summary


def test_the_summary_has_a_figure_for_each_point(whole: TrainResult) -> None:
    data = json.loads((whole.run_dir / SUMMARY_FILE).read_text())
    finals = [member.metrics["eval_return_mean"] for member in whole.per_seed]
    assert data["num_seeds"] == 2
    assert [(seed["seed"], seed["point"]["learning_rate"]) for seed in data["seeds"]] == [
        (3, 1e-3),
        (1, 1e-3),
        (3, 3e-4),
        (1, 3e-4),
    ]
    assert [point["point"] for point in data["points"]] == [
        {"learning_rate": 1e-3, "alpha": 0.1},
        {"learning_rate": 3e-4, "alpha": 0.1},
    ]
    for point, returns in zip(data["points"], (finals[:2], finals[2:]), strict=True):
        final = point["final_return"]
        assert final["iqm"] == float(interquartile_mean(returns))
        interval = bootstrap_interval(returns, interquartile_mean)
        assert (final["iqm_low"], final["iqm_high"]) == interval
        assert [row["step"] for row in point["curve"]] == [16, 32, 48, 64]
    figures = [point["final_return"]["iqm"] for point in data["points"]]
    assert [point["best"] for point in data["points"]] == [f == max(figures) for f in figures]
    assert data["final_return"]["iqm"] == float(interquartile_mean(finals))


def summary_of(folder: Path, finals: dict[float, list[float]]) -> Any:
    """The summary of learning rates whose seeds 0, 1, ... reached these returns."""
    members, metrics = [], []
    for rate, returns in finals.items():
        for seed, value in enumerate(returns):
            member = Member(seed, {"learning_rate": rate})
            (folder / member.folder).mkdir()
            members.append(member)
            metrics.append({"eval_return_mean": value, "global_step": 5.0, "gradient_steps": 5.0})
    return summarize_group(members, [folder / member.folder for member in members], metrics)


def test_equal_points_are_all_best_and_one_without_figures_never(tmp_path: Path) -> None:
    nan = float("nan")
    summary = summary_of(tmp_path, {0.1: [5.0, 7.0], 0.2: [6.0, 6.0], 0.3: [nan, 9.0]})
    assert [point.best for point in summary.points] == [True, True, False]
    assert list(summary.curves()) == ["learning_rate 0.1", "learning_rate 0.2", "learning_rate 0.3"]


# The command line


def test_the_command_line_trains_a_grid_and_marks_the_best_point(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, algo_kwargs={"eval_interval": 16}, total_timesteps=32)
    words = ("--grid", "learning_rate=1e-3,3e-4", "--grid", "alpha=0.1", "--seeds", "3,1")
    done = run_cli("train", "-c", path, *words)
    assert done.code == 0, done.err
    assert done.out.count("seed_run=") == 4
    assert Path(done.values["plots"]).is_file()
    summary = read_summary(Path(done.values["run_dir"]))
    assert summary is not None
    lines = done.out.splitlines()[-7:]
    heads = ["seed", "learning_rate", "alpha", "final", "return", "best", "return", "at", "step"]
    assert lines[0].split() == heads
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["3", "0.001", "0.1"],
        ["1", "0.001", "0.1"],
        ["3", "0.0003", "0.1"],
        ["1", "0.0003", "0.1"],
    ]
    for line, point in zip(lines[5:], summary.points, strict=True):
        rate = f"{point.point['learning_rate']:g}"
        assert line.startswith(f"learning_rate {rate}, alpha 0.1 ")
        assert f"IQM {point.final_return.iqm:.1f} [95% " in line
        assert line.endswith("over 2 seeds  best" if point.best else "over 2 seeds")
    assert lines[5].index("IQM") == lines[6].index("IQM")


def test_a_grid_may_stand_in_the_file_and_be_overridden(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, grid={"tau": [0.1, 0.2]})
    shown = yaml.safe_load(run_cli("train", "-c", path, "--dry-run").out)
    assert shown["grid"] == {"tau": [0.1, 0.2]}
    more = ("--set", "grid.alpha=[0.1, 0.3]")
    shown = yaml.safe_load(run_cli("train", "-c", path, *more, "--dry-run").out)
    assert shown["grid"] == {"tau": [0.1, 0.2], "alpha": [0.1, 0.3]}
    shown = yaml.safe_load(run_cli("train", "-c", path, "--grid", "alpha=1", "--dry-run").out)
    assert shown["grid"] == {"alpha": [1.0]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["alpha"], "--grid must look like learning_rate=1e-4,3e-4, got 'alpha'"),
        (["alpha="], "--grid must look like learning_rate=1e-4,3e-4, got 'alpha='"),
        (["=1,2"], "--grid must look like learning_rate=1e-4,3e-4, got '=1,2'"),
        (["alpha=0.1,x"], "--grid must look like learning_rate=1e-4,3e-4, got 'alpha=0.1,x'"),
        (["tau=1", "tau=0.5"], "--grid tau is given twice; put all its values into one"),
        (["alpha=0.1,-2"], "grid.alpha must be > 0 or 'auto', got -2.0"),
        (["tau=0.1,7"], "grid.tau must be <= 1, got 7.0"),
        (["tau=nan"], "grid.tau must be a finite number, got nan"),
        (["tau=0.5,0.50"], "grid.tau: must be different numbers, got [0.5, 0.5]"),
        (
            ["batch_size=8,16"],
            "grid.batch_size cannot differ between members of a group; these can: learning_rate, "
            "actor_learning_rate, tau, alpha, initial_alpha, target_entropy. Train one group for "
            "each value of batch_size",
        ),
        (
            ["learning_rat=1"],
            "grid.learning_rat is not a field of SACConfig that can vary "
            "(did you mean learning_rate?)",
        ),
    ],
)
def test_a_wrong_grid_is_one_sentence_and_leaves_nothing_behind(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    options = [part for word in words for part in ("--grid", word)]
    assert run_cli("train", "-c", write_tiny(tmp_path), *options).sentence() == expected
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("[]", "grid.alpha must be a list of numbers, at least one, such as [0.1, 0.2], got []"),
        ("0.1", "grid.alpha must be a list of numbers, at least one, such as [0.1, 0.2], got 0.1"),
        ("", "grid.alpha must be a list of numbers, at least one, such as [0.1, 0.2], got null"),
        ("[0.1, auto]", "grid.alpha[1] must be a number, got 'auto'"),
        ("[true]", "grid.alpha[0] must be a number, got True"),
        ("[null]", "grid.alpha[0] must be a number, got null"),
    ],
)
def test_a_wrong_grid_in_a_file_is_named_with_its_line(
    values: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"algo: sac\nenv_id: Pendulum-v1\ngrid:\n  tau: [0.1]\n  alpha: {values}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}:5: {message}"
