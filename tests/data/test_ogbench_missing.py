"""Without OGBench: one sentence that names the extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from helpers.tiny import run_cli
from rl_training.envs import ogbench


@pytest.fixture(autouse=True)
def not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    registry = {k: v for k, v in gymnasium.registry.items() if not ogbench.is_ogbench(k)}

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "ogbench" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(gymnasium, "registry", registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.chdir(tmp_path)


def test_data_make_names_the_extra() -> None:
    text = run_cli("data", "make", "ogbench/cube-single-play").sentence()
    assert 'pip install "rl-training[ogbench]"' in text


def test_training_names_the_extra() -> None:
    text = run_cli("train", "--algo", "bc", "--env", "cube-single-singletask-v0").sentence()
    assert 'needs OGBench; run: pip install "rl-training[ogbench]"' in text


def test_ids_that_are_not_ogbenchs_are_refused_as_before() -> None:
    assert not ogbench.is_ogbench("CubeSingle-v0")
    assert not ogbench.is_ogbench("cube")
    assert ogbench.is_ogbench("visual-scene-v0")
    assert ogbench.is_slow("puzzle-3x3-v0")
    assert not ogbench.is_slow("pointmaze-medium-v0")
    text = run_cli("train", "--algo", "bc", "--env", "cubist-v0").sentence()
    assert "is not a registered environment" in text
