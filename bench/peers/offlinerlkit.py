"""OfflineRL-Kit, whose sources are a folder: `--peer-path offlinerlkit=FOLDER`.

Its roll-out evaluates every member and keeps one prediction; random actions stand for the policy's,
as on the other sides.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.speed.noise import noise_columns
from bench.speed.pace import Pace
from bench.speed.sizes import ENSEMBLE, SAC

DECAYS = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
"""Its own weight decays, layer by layer."""


def _dynamics() -> Any:
    # A module that nothing here uses asks for the old gym.
    for name in ("gym", "gym.envs", "gym.envs.mujoco"):
        sys.modules.setdefault(name, ModuleType(name))
    stand_in: Any = sys.modules["gym.envs.mujoco"]
    stand_in.mujoco_env = SimpleNamespace(MujocoEnv=object)
    modules = importlib.import_module("offlinerlkit.modules.dynamics_module")
    dynamics = importlib.import_module("offlinerlkit.dynamics.ensemble_dynamics")
    scaling = importlib.import_module("offlinerlkit.utils.scaler")
    model = modules.EnsembleDynamicsModel(
        SAC.obs,
        SAC.action,
        ENSEMBLE.hidden,
        ENSEMBLE.members,
        ENSEMBLE.elites,
        weight_decays=DECAYS,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = scaling.StandardScaler(np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32))
    return dynamics.EnsembleDynamics(
        model, optimizer, scaler, lambda obs, *_: np.zeros((len(obs), 1), bool)
    )


def _tell(pace: Pace, model: Any, batch: int) -> None:
    layers = [*model.backbones, model.output_layer]
    parameters = sum(layer.weight.numel() + layer.bias.numel() for layer in layers)
    sizes = {"parameters of layers": parameters, "members": model.num_ensemble, "batch": batch}
    pace.tell(sizes=sizes)


def ensemble(pace: Pace) -> None:
    """Take gradient steps through its own epoch."""
    dynamics = _dynamics()
    noise = noise_columns()
    columns = {
        "observations": noise["observations"],
        "actions": noise["actions"],
        "next_observations": np.roll(noise["observations"], -1, 0),
        "rewards": noise["rewards"].reshape(-1, 1),
    }
    inputs, targets = dynamics.format_samples_for_training(columns)
    dynamics.scaler.fit(inputs)
    inputs = dynamics.scaler.transform(inputs)
    rng = np.random.default_rng(0)
    _tell(pace, dynamics.model, ENSEMBLE.batch)
    while pace.begin():
        rows = pace.settings.chunk * ENSEMBLE.batch
        drawn = rng.integers(len(inputs), size=(ENSEMBLE.members, rows))
        dynamics.learn(inputs[drawn], targets[drawn], ENSEMBLE.batch)
        pace.end(pace.settings.chunk)


def ensemble_rollout(pace: Pace) -> None:
    """Roll random actions out."""
    dynamics = _dynamics()
    rng = np.random.default_rng(0)
    start = 0.3 * rng.standard_normal((ENSEMBLE.starts, SAC.obs), np.float32)
    _tell(pace, dynamics.model, ENSEMBLE.starts)
    while pace.begin():
        done = 0
        while done < pace.settings.chunk:
            obs = start
            for _ in range(ENSEMBLE.horizon):
                action = rng.uniform(-1, 1, (len(obs), SAC.action)).astype(np.float32)
                obs, _, _, _ = dynamics.step(obs, action)
            done += ENSEMBLE.starts * ENSEMBLE.horizon
        pace.end(done)
