"""Agents pushed to a stand-in of the Hugging Face Hub, and loaded from it as a stranger's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from helpers.hub import TOKEN, StandIn, serving
from helpers.tiny import clean_environment, run_cli, tiny_config, write_tiny
from rl_training import SAC, TrainConfig
from rl_training.envs.named_modules import only_imported_modules
from rl_training.errors import CheckpointError, ConfigError, EnvError, MissingExtraError
from rl_training.experiment.checkpointing import load_single_file, save_single_file
from rl_training.experiment.hub import POLICY_FILE, hub_name
from rl_training.runtime.train import train
from rl_training.runtime.workflows import evaluate_checkpoint, load_agent
from rl_training.tools.hub import public_config

# The hub's library against its own HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
FILES = {POLICY_FILE, "config.yaml", "README.md", "learning_curve.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(
        "sac", tmp_path_factory.mktemp("hub"), algo_kwargs={"eval_interval": 32}, run_name="run"
    )
    return train(config).run_dir


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving() as standin:
        # The library reads its variables when it is imported, which may have happened before.
        monkeypatch.setattr(constants, "ENDPOINT", standin.address)
        template = standin.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield standin


def card_head(text: str) -> dict[str, Any]:
    """What the hub reads off the head of a card."""
    assert text.startswith("---\n")
    head: dict[str, Any] = yaml.safe_load(text[4:].partition("\n---\n")[0])
    return head


def test_an_agent_is_pushed_and_loaded_again(hub: StandIn, run: Path) -> None:
    done = run_cli("push", run, "--repo", "me/pendulum", "--episodes", 2)
    assert done.code == 0, done.err
    assert done.values["url"] == f"{hub.address}/me/pendulum"
    assert done.values["load"] == "hf://me/pendulum"
    assert set(hub.repos["me/pendulum"]) == FILES
    assert hub.messages == ["sac on Pendulum-v1, step 64"]
    loaded = SAC.load("hf://me/pendulum")
    obs = np.random.default_rng(0).normal(size=(5, 3))
    assert np.array_equal(loaded.predict(obs), load_agent(run).predict(obs))
    assert loaded.evaluate(2, seed=3).returns == evaluate_checkpoint(run, 2, seed=3).returns


@pytest.mark.matrix
def test_commands_take_the_name_of_an_agent_on_the_hub(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    SAC.load(run).push_to_hub("me/pendulum", episodes=0, private=True)
    assert hub.private["me/pendulum"]
    name = "hf://me/pendulum"
    evaluated = run_cli("eval", name, "--episodes", 2, "--seed", 5)
    assert evaluated.code == 0, evaluated.err
    assert evaluated.values == run_cli("eval", run, "--episodes", 2, "--seed", 5).values
    options = ["predict", "--obs", "[1, 0, 0]"]
    assert run_cli(*options, name).out == run_cli(*options, run).out
    video = tmp_path / "agent.gif"
    assert run_cli("record", name, "-o", video, "--max-steps", 3).code == 0
    assert video.is_file()
    exported = run_cli("export", name, "--format", "torch", "-o", tmp_path / "policy.pt2")
    assert exported.code == 0, exported.err
    assert "cannot be resumed from it; begin a new run" in run_cli("resume", name).sentence()


def test_a_new_run_begins_with_the_networks_of_an_agent_on_the_hub(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    SAC.load(run).push_to_hub("me/pendulum", episodes=0)
    agent = SAC.load("hf://me/pendulum")
    agent.config = agent.config.replace(output_dir=str(tmp_path), run_name="again")
    agent.learn(32, progress=False)
    assert (tmp_path / "again" / "config.yaml").is_file()
    text = (tmp_path / "again" / "config.yaml").read_text()
    assert "from_checkpoint: null" not in text


def test_the_command_line_begins_a_run_with_them_too(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    SAC.load(run).push_to_hub("me/pendulum", episodes=0)
    words = ("train", "-c", write_tiny(tmp_path), "--from-checkpoint", "hf://me/pendulum", "-q")
    done = run_cli(*words)
    assert done.code == 0, done.err
    assert "sac, step 64" in done.err


def test_the_card_says_what_was_measured_and_how_to_do_it_again(hub: StandIn, run: Path) -> None:
    pushed = SAC.load(run).push_to_hub("me/pendulum", episodes=3)
    assert pushed.result is not None
    card = hub.repos["me/pendulum"]["README.md"].decode()
    head = card_head(card)
    assert head["library_name"] == "rl-training"
    assert {"reinforcement-learning", "sac", "Pendulum-v1"} <= set(head["tags"])
    (metric,) = head["model-index"][0]["results"][0]["metrics"]
    mean = pushed.result.metrics["eval_return_mean"]
    assert metric["value"].startswith(f"{mean:.2f} +/- ")
    assert f"| mean return | {mean:.2f} |" in card
    assert "learning_curve.png" in card
    assert hub.repos["me/pendulum"]["learning_curve.png"].startswith(b"\x89PNG")
    assert 'SAC.load("hf://me/pendulum")' in card
    assert "rl-training train --config config.yaml" in card
    config = TrainConfig(**yaml.safe_load(hub.repos["me/pendulum"]["config.yaml"]))
    assert config == public_config(load_agent(run).config)


def test_without_matplotlib_the_curve_is_text(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    pushed = SAC.load(run).push_to_hub("me/pendulum", episodes=0, folder=tmp_path / "repo")
    assert set(pushed.files) == FILES - {"learning_curve.png"}
    assert pushed.url is None
    card = (tmp_path / "repo" / "README.md").read_text(encoding="utf-8")
    lines = card.partition("```text\n")[2].partition("```")[0].splitlines()
    assert lines[0].split() == ["step", "mean", "return"]
    assert [line.split()[0] for line in lines[1:]] == ["32", "64"]
    assert "was not evaluated" in card


def test_no_folder_of_this_machine_leaves_it(tmp_path: Path) -> None:
    settings = {"dataset_kind": "npz", "dataset_path": str(tmp_path / "mine.npz")}
    config = tiny_config("iql", tmp_path / "secret", algo_kwargs=settings)
    config = config.replace(from_checkpoint=str(tmp_path / "runs" / "first"))
    public = public_config(config)
    assert str(tmp_path) not in public.to_yaml()
    assert public.algo_kwargs["dataset_path"] == "mine.npz"
    assert public.from_checkpoint == "first"
    mix = [{"kind": "npz", "path": str(tmp_path / "mine.npz"), "weight": 1.0}]
    mixed = tiny_config("iql", tmp_path, algo_kwargs={"dataset_mix": mix})
    assert str(tmp_path) not in public_config(mixed).to_yaml()


def test_the_pushed_file_names_no_folder_of_this_machine(hub: StandIn, run: Path) -> None:
    SAC.load(run).push_to_hub("me/pendulum", episodes=0)
    for name, data in hub.repos["me/pendulum"].items():
        assert str(run.parent).encode() not in data, name


def forged(hub: StandIn, run: Path, tmp_path: Path, **changes: Any) -> None:
    """Put an agent on the hub whose file says something else about itself."""
    SAC.load(run).save(tmp_path / "mine.safetensors")
    mine = load_single_file(tmp_path / "mine.safetensors")
    header = mine.header | {"config": mine.header["config"] | changes}
    target = tmp_path / "forged.safetensors"
    save_single_file(target, header=header, states=mine.states)
    hub.repos["evil/agent"] = {POLICY_FILE: target.read_bytes()}


@pytest.mark.parametrize(
    "named",
    [
        {"env_id": "planted_module:Task", "env_kwargs": {}},
        {"env_id": "planted_module:Task-v0", "env_kwargs": {}},
        {"env_kwargs": {"wrappers": ["planted_module:Wrapper"]}},
    ],
    ids=["class", "registered", "wrapper"],
)
def test_nothing_that_a_stranger_names_is_imported(
    hub: StandIn,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: dict[str, Any],
) -> None:
    planted = tmp_path / "modules" / "planted_module.py"
    planted.parent.mkdir()
    planted.write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(str(planted.parent))
    forged(hub, run, tmp_path, **named)
    agent = SAC.load("hf://evil/agent")
    agent.predict(np.zeros(3))
    collect = ["data", "collect", tmp_path / "data.npz", "--steps", 5, "--checkpoint"]
    for command in (["eval"], ["record", "-o", tmp_path / "video.gif"], collect):
        said = run_cli(*command, "hf://evil/agent").sentence()
        assert "named by hf://evil/agent and was not imported" in said
    with pytest.raises(EnvError, match="was not imported, because importing runs its code"):
        agent.evaluate(1)
    assert not planted.with_name("ran").exists()
    assert "planted_module" not in sys.modules


def test_a_module_that_the_user_has_imported_may_be_used(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    name = "gymnasium.envs.classic_control.pendulum:PendulumEnv"
    __import__(name.partition(":")[0])
    kwargs = {"max_episode_steps": 5}
    forged(hub, run, tmp_path, env_id=name, env_kwargs=kwargs)
    assert len(SAC.load("hf://evil/agent").evaluate(1).returns) == 1


def test_the_guard_ends_with_its_block() -> None:
    from rl_training.envs.named_modules import import_named

    with only_imported_modules("hf://a/b"), pytest.raises(EnvError, match="hf://a/b"):
        import_named("this_is_not_there", "environment x")
    with pytest.raises(EnvError, match="cannot be imported"):
        import_named("this_is_not_there", "environment x")


def test_a_damaged_or_foreign_file_is_refused(hub: StandIn, run: Path, tmp_path: Path) -> None:
    forged(hub, run, tmp_path)
    data = bytearray(hub.repos["evil/agent"][POLICY_FILE])
    data[-1] ^= 1
    hub.repos["evil/damaged"] = {POLICY_FILE: bytes(data)}
    assert "is damaged" in run_cli("eval", "hf://evil/damaged").sentence()
    hub.repos["evil/pickle"] = {POLICY_FILE: b"\x80\x04}q\x00."}
    assert "not a single-file checkpoint" in run_cli("eval", "hf://evil/pickle").sentence()


def test_mistakes_are_one_sentence(
    hub: StandIn, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "it does not exist, or it is private" in run_cli("eval", "hf://me/missing").sentence()
    hub.repos["me/other"] = {"README.md": b""}
    assert "was not made by rl-training push" in run_cli("eval", "hf://me/other").sentence()
    assert "no such revision" in run_cli("eval", "hf://me/other@v9").sentence()
    assert "has the form hf://user/name" in run_cli("eval", "hf://me").sentence()
    assert "push needs a repository" in run_cli("push", run).sentence()
    wrong = run_cli("push", run, "--repo", "no user/name!").sentence()
    assert "is not the name of a repository" in wrong
    (tmp_path / "file").write_text("")
    options = ["--repo", "me/a", "--folder", tmp_path / "file" / "x", "--episodes", 0]
    assert "cannot be written" in run_cli("push", run, *options).sentence()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "cannot be pushed to" in run_cli("push", run, "-r", "me/a", "--episodes", 0).sentence()
    with pytest.raises(ConfigError, match="episodes must be >= 0"):
        SAC.load(run).push_to_hub("me/a", episodes=-1)


def test_a_hub_that_does_not_answer_is_one_sentence(
    hub: StandIn, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it tries several times
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert "hub cannot be reached" in run_cli("eval", "hf://me/pendulum").sentence()


def test_without_the_library_the_extra_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install .rl-training\[hub\]"):
        load_agent("hf://me/pendulum")
    assert "rl-training[hub]" in run_cli("push", run, "--repo", "me/a").sentence()


@pytest.mark.parametrize("text", ["hf://me/a", "hf:/me/a"])
def test_a_name_survives_being_a_path(text: str) -> None:
    assert str(hub_name(text)) == "hf://me/a"
    assert str(hub_name(Path(text))) == "hf://me/a"
    assert hub_name(f"{text}@v1").revision == "v1"
    with pytest.raises(CheckpointError, match="has the form"):
        hub_name("hf://me/a/b")


@pytest.mark.matrix
def test_the_variables_of_the_hubs_library_are_obeyed(run: Path, tmp_path: Path) -> None:
    """A process of its own with HF_ENDPOINT, as a person behind a mirror would have it."""
    pytest.importorskip("huggingface_hub")
    with serving() as standin:
        known = {"HF_ENDPOINT": standin.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        env = clean_environment() | known | {"HF_HOME": str(tmp_path / "home")}
        words = [sys.executable, "-m", "rl_training"]
        push = [*words, "push", str(run), "--repo", "me/a", "--episodes", "1", "--json"]
        for line in (push, [*words, "eval", "hf://me/a", "--episodes", "1", "--json"]):
            done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)
        assert set(standin.repos["me/a"]) == FILES
        assert os.listdir(tmp_path / "home")
