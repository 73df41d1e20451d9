"""What every method of the package has beside its file: presets, a trainer, an example, a page."""

from __future__ import annotations

import pytest

from helpers.tiny import ROOT
from rl_training.experiment.config import load_config
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.resources import preset_names


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("preset", preset_names())
def test_preset_builds_its_learner(preset: str) -> None:
    config = load_config(preset)
    assert preset.split("/")[0] == config.algo
    if config.env_id.startswith("ALE/"):
        pytest.importorskip("ale_py")
    elif "-v5" in config.env_id:
        pytest.importorskip("mujoco")
    elif "-singletask-" in config.env_id:
        pytest.importorskip("ogbench")
    from rl_training.envs.factory import probe_env

    env = probe_env(config.env_id, config.env_kwargs)
    learner = get_algorithm_spec(config.algo).build(env, config.algo_config, (0,))
    assert learner.config == config.algo_config


WITH_SCRIPTS = (
    *("sac", "ppo", "dqn", "qr_dqn", "iqn", "fqf", "iql", "td3", "td3_bc", "bc", "cql"),
    *("discrete_cql", "rlpd", "mopo", "mbpo", "pets", "gail", "dreamer"),
)
"""Methods whose `runtime.<name>_trainer` and example are public; a new one does without."""


def test_a_preset_a_page_and_a_test_of_the_maths_exist(algo: str) -> None:
    assert (ROOT / "docs/algorithms" / f"{algo}.md").is_file()
    assert any(name.startswith(f"{algo}/") for name in preset_names())
    assert (ROOT / "tests" / f"test_{algo}_update.py").is_file()


@pytest.mark.parametrize("algo", WITH_SCRIPTS)
def test_trainer_shim_example_and_their_tests_exist(algo: str) -> None:
    shim = ROOT / "src/rl_training/runtime" / f"{algo}_trainer.py"
    assert len(shim.read_text().splitlines()) <= 8
    module = __import__(f"rl_training.runtime.{algo}_trainer", fromlist=["x"])
    assert callable(getattr(module, f"train_{algo}"))
    assert list((ROOT / "examples").glob(f"{algo}_*_reference.py"))
    for kind in ("trainer_smoke", "reference_script"):
        assert (ROOT / "tests" / f"test_{algo}_{kind}.py").is_file()
