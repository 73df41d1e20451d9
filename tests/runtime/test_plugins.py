"""Methods outside the package: found by name or entry point, trained, resumed, and never imported
because a file says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny import ROOT, Outcome, learner_digest, run_cli
from helpers.warm import run_warm
from rl_training.errors import ConfigError
from rl_training.experiment import registry
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.registry import get_algorithm_spec, installed_plugins, plugin_sources
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train
from rl_training.testing.contract import small_config

FOLDER = ROOT / "examples" / "plugin"
NAME = "awac:SPEC"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's folder on the path; its module is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield NAME
    sys.modules.pop("awac", None)


@pytest.fixture
def imported(plugin: str) -> str:
    importlib.import_module("awac")
    return plugin


def write_config(folder: Path, algo: str = NAME) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"algo: {algo!r}\nenv_id: Pendulum-v1\ntotal_timesteps: 60\ncheckpoint_interval: 30\n"
        f"eval_episodes: 1\ntensorboard: false\noutput_dir: {folder / 'runs'}\nrun_name: run\n"
        "env_kwargs: {max_episode_steps: 20}\n"
        "algo_kwargs: {dataset_kind: random, dataset_size: 200, batch_size: 8, hidden_sizes: [8]}\n"
    )
    return path


def test_the_whole_way_on_the_command_line(plugin: str, tmp_path: Path) -> None:
    trained = run_cli("train", "--config", write_config(tmp_path), "--quiet")
    assert trained.code == 0, trained.err
    run = tmp_path / "runs" / "run"
    for words in (
        ("predict", "--checkpoint", run, "--obs", "[1, 0, 0]"),
        ("eval", "--checkpoint", run),
        ("resume", "--checkpoint", run, "--total-timesteps", 80, "--quiet"),
        ("export", "--checkpoint", run, "--output", tmp_path / "policy.pt"),
    ):
        sys.modules.pop("awac")
        assert "rl-training --plugin awac:SPEC" in run_cli(*words).sentence()
        assert "awac" not in sys.modules
        allowed = run_cli("--plugin", plugin, *words)
        assert allowed.code == 0, allowed.err
    assert open_checkpoint(run).step == 80


def test_a_process_says_what_it_imports_and_takes_plugins_from_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("RL_TRAINING_PLUGINS", NAME)
    outcome = run_warm("-m", "rl_training", "describe", "sac", cwd=tmp_path)
    assert outcome.code == 0
    assert "note: importing module awac, named by --plugin awac:SPEC" in outcome.err


def test_a_run_is_named_after_the_method(imported: str, tmp_path: Path) -> None:
    config = small_config(imported, tmp_path, run_name=None)
    report = verify_resume(config, 70)
    assert report.identical, report.lines()
    plain = config.replace(accelerate="off")
    assert train(plain).run_dir.name.startswith("awac_Pendulum-v1_seed0")


def test_a_checkpoint_never_imports_a_plugin(
    tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(load_config(write_config(tmp_path), may_import=True)).run_dir
    sys.modules.pop("awac")
    trap, mark = tmp_path / "trap", tmp_path / "imported"
    trap.mkdir()
    (trap / "awac.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(trap))
    for words in (
        ("predict", "--checkpoint", run, "--obs", "[1, 0, 0]"),
        ("eval", "--checkpoint", run),
        ("resume", "--checkpoint", run),
        ("record", "--checkpoint", run),
        ("data", "collect", tmp_path / "d.npz", "--checkpoint", run, "--steps", 5),
        ("ope", "--checkpoint", run, "--dataset", tmp_path / "none.npz"),
        ("report", tmp_path / "runs", "--output", tmp_path / "report.html"),
        ("leaderboard", tmp_path / "runs"),
    ):
        outcome = run_cli(*words)
        assert outcome.code in (0, 2), outcome.err
        assert "Traceback" not in outcome.err
        assert not mark.exists(), words


def test_in_python_a_plugin_is_used_by_importing_it(plugin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="import awac first"):
        TrainConfig(algo=plugin, env_id="Pendulum-v1")
    importlib.import_module("awac")
    from rl_training.api.algorithms import managed_class

    agent = managed_class(plugin)(small_config(plugin, tmp_path))
    agent.learn()
    assert agent.predict([1.0, 0.0, 0.0]).shape == (1,)
    saved = tmp_path / "agent.rlt"
    agent.save(saved)
    assert managed_class(plugin).load(saved).predict([1.0, 0.0, 0.0]).shape == (1,)


def test_an_installed_plugin_has_a_plain_name(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "awac_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: awac-plugin\nVersion: 1.0\n")
    points = f"awac = {plugin}\nsac = thief:SPEC\nbroken = no_such_module:SPEC\n"
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed_plugins.cache_clear()
    try:
        assert installed_plugins() == {"awac": plugin, "broken": "no_such_module:SPEC"}
        assert "awac" not in sys.modules, "listing imports nothing"
        assert get_algorithm_spec("awac").title == "Advantage-Weighted Actor-Critic"
        assert get_algorithm_spec("sac").learner.__name__ == "SAC", "the package's own names stay"
        with pytest.raises(
            ConfigError, match=r"entry point broken: module 'no_such_module' cannot be imported"
        ):
            get_algorithm_spec("broken")
        config = load_config(write_config(tmp_path, "awac"))
        assert config.algo_config.__class__.__name__ == "AWACConfig"
        assert run_cli("describe", "awac").code == 0
    finally:
        installed_plugins.cache_clear()


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ("no_such_module:SPEC", "module 'no_such_module' cannot be imported"),
        ("awac:Nothing", "'Nothing' in awac is not an AlgorithmSpec"),
        ("awac:AWAC", "'AWAC' in awac is not an AlgorithmSpec"),
        ("os:SPEC", "'SPEC' in os is not an AlgorithmSpec"),
        ("awac:", "'' in awac is not an AlgorithmSpec"),
        (":SPEC", "module '' cannot be imported"),
    ],
)
def test_names_that_are_no_plugins(plugin: str, algo: str, words: str, tmp_path: Path) -> None:
    sentence = run_cli("train", "--config", write_config(tmp_path, algo)).err.splitlines()[-1]
    assert sentence.startswith("error: ")
    assert words in sentence
    assert not (tmp_path / "runs").exists()


def test_a_program_is_compiled_again_when_the_plugin_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.runtime.compile.cache import Request

    (tmp_path / "own_method.py").write_text((FOLDER / "awac.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    # Where people work: here the file that `torch.classes` names would be, `_classes.py`.
    monkeypatch.chdir(tmp_path)
    importlib.import_module("own_method")
    try:
        config = small_config("own_method:SPEC", tmp_path).resolved()
        request = Request(config, {}, "cpu", 1, "fp32", ("update-0",))
        assert plugin_sources("own_method:SPEC") == [tmp_path / "own_method.py"]
        before = request.key
        assert request.key == before
        (tmp_path / "own_method.py").write_text((FOLDER / "awac.py").read_text() + "\n# changed\n")
        assert request.key != before
        assert plugin_sources("sac") == []
    finally:
        sys.modules.pop("own_method", None)


def test_a_plugin_that_hides_a_tensor_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "awac.py").read_text()
    lines = ("def setup(self):", "    super().setup()", "    self.past = [self.rng.uniform(3)]", "")
    hidden = "\n".join(f"    {line}".rstrip() for line in lines)
    own = text.replace("    def sample_action", f"{hidden}\n    def sample_action")
    (tmp_path / "hiding.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        done = run_cli("train", "--config", write_config(tmp_path, "hiding:SPEC"), "--quiet")
    finally:
        sys.modules.pop("hiding", None)
    assert done.code == 2
    assert "\nerror: AWAC.past is a list that holds tensors" in f"\n{done.err}"


@pytest.mark.matrix
def test_the_contract_suite_runs_on_a_plugin_and_can_fail(tmp_path: Path) -> None:
    good = run_suite(tmp_path, (FOLDER / "awac.py").read_text())
    assert good.code == 0, good.out
    assert " passed" in good.out
    bad = run_suite(tmp_path, (FOLDER / "awac.py").read_text().replace('"weight_mean": weight', ""))
    assert bad.code == 1
    assert "test_metrics_are_finite_and_exactly_the_declared_ones" in bad.out
    assert run_warm("-m", "rl_training.testing", "no_such:SPEC").code == 2
    assert run_warm("-m", "rl_training.testing").code == 2


def run_suite(folder: Path, text: str) -> Outcome:
    (folder / "tested_method.py").write_text(text)
    words = ["tested_method:SPEC", "-k", "metrics or round_trip or valid or every_adam"]
    return run_warm("-m", "rl_training.testing", *words, cwd=folder)


@pytest.mark.slow
def test_the_example_passes_the_whole_contract_suite() -> None:
    outcome = run_warm("-m", "rl_training.testing", NAME, cwd=FOLDER, timeout=1200)
    assert outcome.code == 0, outcome.out


def test_what_is_learned_does_not_depend_on_how_the_plugin_is_named(
    imported: str, tmp_path: Path
) -> None:
    sys.modules["other_name"] = sys.modules["awac"]
    try:
        runs = [train(small_config(algo, tmp_path)) for algo in (imported, "other_name:SPEC")]
        digests = {learner_digest(run.run_dir) for run in runs}
    finally:
        del sys.modules["other_name"]
    assert len(digests) == 1
