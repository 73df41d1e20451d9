"""The package as it is installed: presets, assets, and a start-up that stays light."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_training
from helpers.tiny import ROOT, run_python
from rl_training.errors import ConfigError
from rl_training.experiment.config import load_config
from rl_training.resources import ASSETS, find_packaged_asset, preset_names, preset_path

HEAVY = ("torch", "gymnasium", "numpy", "pydantic")


def test_presets_are_kept_once_and_configs_is_a_link_to_them() -> None:
    assert (ROOT / "configs").is_symlink()
    assert (ROOT / "configs").resolve() == ASSETS / "configs"


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_parses_and_stands_under_its_algorithm(preset: str) -> None:
    config = load_config(preset)
    assert config.algo == preset.split("/")[0]
    assert load_config(ROOT / "configs" / f"{preset}.yaml") == config


def test_the_presets_that_were_promised_are_there() -> None:
    promised = {"sac/pendulum", "sac/halfcheetah", "sac/hopper", "dqn/cartpole"}
    promised |= {"ppo/cartpole", "ppo/pendulum", "ppo/hopper"}
    assert promised <= set(preset_names())


@pytest.mark.parametrize(
    "name", ["sac/pendulum", "configs/sac/pendulum", "configs/sac/pendulum.yaml"]
)
def test_presets_and_assets_are_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert preset_path(name) == find_packaged_asset("configs/sac/pendulum.yaml")


def test_a_file_of_the_user_goes_before_a_preset_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sac").mkdir()
    (tmp_path / "sac" / "pendulum").write_text("algo: ppo\nenv_id: CartPole-v1\n")
    assert load_config("sac/pendulum").algo == "ppo"


@pytest.mark.parametrize(
    "name",
    [
        "../errors.py",
        "configs/../../errors.py",
        "/etc/hostname",
        str(ROOT / "pyproject.toml"),
        "configs",
        "",
    ],
)
def test_only_packaged_files_are_handed_out(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a packaged file"):
        find_packaged_asset(name)


def test_a_misspelt_asset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean configs/sac/pendulum\.yaml\?"):
        find_packaged_asset("configs/sac/pendulm.yaml")


def test_importing_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"import rl_training, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = run_python("-c", code, cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, "[]"), done.err


@pytest.mark.matrix
@pytest.mark.parametrize("module", ["rl_training", "rl_training.api", "rl_training.api.algorithms"])
def test_a_fresh_process_gets_a_managed_class_by_its_first_import(
    module: str, tmp_path: Path
) -> None:
    done = run_python("-c", f"from {module} import SAC; print(SAC.algo)", cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, "sac"), done.err


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    done = run_python("-X", "importtime", "-m", "rl_training", "--help", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "Usage" in done.out
    imported = {line.split("|")[-1].strip() for line in done.err.splitlines() if "|" in line}
    assert "rl_training.cli.commands" in imported
    assert not imported & set(HEAVY)


def test_the_module_and_the_version_agree(tmp_path: Path) -> None:
    done = run_python("-m", "rl_training", "--version", cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, rl_training.__version__)


def test_type_information_is_shipped() -> None:
    assert (Path(rl_training.__file__).parent / "py.typed").is_file()
