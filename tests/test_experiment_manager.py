"""The experiment manager and the `train_<algo>` functions: a configuration in, a result out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import yaml

from helpers.tiny import ROOT, STEPS, tiny_config
from rl_training import TrainConfig
from rl_training.errors import ConfigError
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.results import TrainResult

NEEDED = {"global_step", "eval_return_mean", "eval_return_std", "eval_episodes"}


class Starts(Callback):
    """Counts starts."""

    def __init__(self) -> None:
        self.seen: list[TrainerState] = []

    def on_start(self, state: TrainerState) -> None:
        self.seen.append(state)


@pytest.mark.expensive
def test_the_manager_trains_every_registered_algorithm(config: TrainConfig) -> None:
    starts = Starts()
    trainer = ExperimentManager().setup(config, callbacks=[starts])
    assert not Path(config.output_dir, "run").exists(), "setting up writes nothing"
    result = trainer.train()
    assert isinstance(result, TrainResult)
    assert result.metrics.keys() >= NEEDED
    assert result.metrics["global_step"] == STEPS
    assert result.run_dir == Path(config.output_dir, "run")
    assert result.checkpoint_path == result.run_dir / "checkpoints" / f"step_{STEPS}"
    assert (result.checkpoint_path / "manifest.json").is_file()
    assert [state.algo for state in starts.seen] == [config.algo]


def test_a_run_folder_says_what_it_was(sac_config: TrainConfig) -> None:
    result = ExperimentManager().setup(sac_config).train()
    stored = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert stored == sac_config.resolved()
    assert TrainConfig(**stored).resolved() == stored
    described = json.loads((result.run_dir / "run.json").read_text())
    assert described["packages"]["torch"]
    assert {"rl_training", "created", "python", "platform", "command", "git"} <= described.keys()
    rows = read_metrics(result.run_dir, "train")
    assert [row["step"] for row in rows] == [16, 32, 48, 64]
    declared = get_algorithm_spec("sac").metrics.keys()
    assert rows[-1].keys() >= declared


TRAINERS = [
    path.stem.removesuffix("_trainer")
    for path in sorted((ROOT / "src/rl_training/runtime").glob("*_trainer.py"))
]
"""Methods with a public `runtime.<name>_trainer`; `test_contract_package.py` says which must."""


@pytest.mark.parametrize("algo", TRAINERS)
def test_train_functions_take_only_configurations_of_their_own_algorithm(
    tmp_path: Path, algo: str
) -> None:
    module = importlib.import_module(f"rl_training.runtime.{algo}_trainer")
    train = getattr(module, f"train_{algo}")
    other = next(name for name in algorithm_names() if name != algo)
    with pytest.raises(ConfigError, match=f"train_{algo} was given a configuration of algo"):
        train(tiny_config(other, tmp_path))
    assert not list(tmp_path.iterdir())
    result = train(tiny_config(algo, tmp_path, total_timesteps=16), run_suffix="more")
    assert result.run_dir == tmp_path / "run_more"
    assert result.metrics["global_step"] == 16


def test_a_taken_name_is_refused_and_the_run_there_left_alone(sac_config: TrainConfig) -> None:
    trainer = ExperimentManager().setup(sac_config)
    first = trainer.train()
    before = (first.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"run_name 'run' is taken: .* choose another"):
        trainer.train()
    assert (first.run_dir / "metrics.jsonl").read_bytes() == before


def test_automatic_names_never_meet(tmp_path: Path) -> None:
    config = tiny_config("sac", tmp_path, run_name=None, total_timesteps=16, eval_episodes=0)
    folders = {ExperimentManager().setup(config).train().run_dir for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.name.startswith("sac_Pendulum-v1_seed0_") for folder in folders)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_id": "CartPole-v1"}, "sac needs continuous actions, but CartPole-v1 has discrete"),
        ({"env_id": "NoSuchThing-v1"}, "NoSuchThing-v1"),
        ({"env_kwargs": {"no_such_argument": 1}}, "no_such_argument"),
        ({"device": "cuda:99"}, "'cuda:99' is not there"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    config = tiny_config("sac", tmp_path).replace(**changes)
    with pytest.raises(ValueError, match=words):
        ExperimentManager().setup(config).train()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = tiny_config("sac", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"output_dir '.*file': no folder can be made there"):
        ExperimentManager().setup(config).train()
