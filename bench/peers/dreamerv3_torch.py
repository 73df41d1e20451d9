"""dreamerv3-torch, whose sources are a folder and no package: `--peer-path dreamerv3_torch=FOLDER`.

Settings are those of its own file for Atari 100k with our sizes, without its compiler.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from bench.speed.pace import Pace
from bench.speed.sizes import DREAMER


def _number(value: Any) -> Any:
    """Read `3e-4`, which YAML 1.1 takes for text, as its own reader does."""
    if isinstance(value, dict):
        return {key: _number(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in change.items():
        inner = found.get(key)
        found[key] = _merged(inner, value) if isinstance(inner, dict) else value
    return found


def _config(folder: Path) -> SimpleNamespace:
    known = _number(yaml.safe_load((folder / "configs.yaml").read_text(encoding="utf-8")))
    depth = {"cnn_depth": DREAMER.depth}
    ours = {
        "device": "cpu",
        "compile": False,
        "num_actions": DREAMER.actions,
        "dyn_deter": DREAMER.deter,
        "dyn_hidden": DREAMER.hidden,
        "dyn_stoch": DREAMER.groups,
        "dyn_discrete": DREAMER.classes,
        "units": DREAMER.units,
        "imag_horizon": DREAMER.horizon,
        "encoder": depth,
        "decoder": depth,
    }
    return SimpleNamespace(**_merged(_merged(known["defaults"], known["atari100k"]), ours))


def _episode(rng: np.random.Generator) -> dict[str, Any]:
    steps = DREAMER.rows // DREAMER.episodes
    actions = np.eye(DREAMER.actions, dtype=np.float32)[rng.integers(0, DREAMER.actions, steps)]
    never = np.zeros(steps, bool)
    return {
        "image": rng.integers(0, 256, (steps, 64, 64, 3), dtype=np.uint8),
        "action": actions,
        "reward": rng.normal(size=steps).astype(np.float32),
        "is_first": np.arange(steps) == 0,
        "is_terminal": never,
        "discount": np.ones(steps, np.float32),
    }


def dreamer(pace: Pace) -> None:
    """Train world model, actor and critic on sequences of noise."""
    models = importlib.import_module("models")
    tools = importlib.import_module("tools")
    folder = Path(str(sys.modules["models"].__file__)).parent
    config = _config(folder)
    image = SimpleNamespace(shape=(64, 64, 3))
    space = SimpleNamespace(spaces={"image": image})
    world = models.WorldModel(space, None, 0, config)
    behaviour = models.ImagBehavior(config, world)
    rng = np.random.default_rng(0)
    episodes = {str(number): _episode(rng) for number in range(DREAMER.episodes)}
    drawn = tools.from_generator(tools.sample_episodes(episodes, DREAMER.length), DREAMER.batch)

    def reward(_feature: Any, state: Any, _action: Any) -> Any:
        return world.heads["reward"](world.dynamics.get_feat(state)).mode()

    pace.tell(sizes=DREAMER.told())
    while pace.begin():
        for _ in range(pace.settings.chunk):
            start, _, _ = world._train(next(drawn))
            behaviour._train(start, reward)
        pace.end(pace.settings.chunk)
