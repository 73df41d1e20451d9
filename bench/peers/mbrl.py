"""mbrl-lib; its learned reward is drawn like the observation, where ours counts with its mean."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.speed.noise import noise_columns
from bench.speed.pace import Pace
from bench.speed.sizes import ENSEMBLE, PETS, SAC


def _module(name: str) -> Any:
    return importlib.import_module(f"mbrl.{name}")


def _model(obs: int, action: int, hidden: list[int], members: int) -> Any:
    models = _module("models")
    network = models.GaussianMLP(
        obs + action,
        obs + 1,
        "cpu",
        num_layers=len(hidden),
        ensemble_size=members,
        hid_size=hidden[0],
        learn_logvar_bounds=True,
        activation_fn_cfg={"_target_": "torch.nn.SiLU"},
    )
    return models.OneDTransitionRewardModel(network, normalize=True)


def _environment(model: Any, obs: int, action: int, propagation: str) -> Any:
    model.set_propagation_method(propagation)
    spaces = SimpleNamespace(
        observation_space=SimpleNamespace(shape=(obs,)),
        action_space=SimpleNamespace(shape=(action,)),
    )

    def never(_: Any, next_obs: Any) -> Any:
        return torch.zeros(len(next_obs), 1, dtype=torch.bool)

    return _module("models").ModelEnv(spaces, model, never, None)


def _tell(pace: Pace, model: Any, batch: int) -> None:
    network = model.model
    layers = [network.hidden_layers, network.mean_and_logvar]
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    sizes = {"parameters of layers": parameters, "members": len(network), "batch": batch}
    pace.tell(version=metadata.version("mbrl"), sizes=sizes)


def ensemble(pace: Pace) -> None:
    model = _model(SAC.obs, SAC.action, ENSEMBLE.hidden, ENSEMBLE.members)
    noise = noise_columns()
    ends = noise["terminals"] > 0
    rows = _module("types").TransitionBatch(
        noise["observations"],
        noise["actions"],
        np.roll(noise["observations"], -1, 0),
        noise["rewards"],
        ends,
        np.zeros_like(ends),
    )
    model.update_normalizer(rows)
    batches = _module("util.replay_buffer").BootstrapIterator(
        rows, ENSEMBLE.batch, ENSEMBLE.members, shuffle_each_epoch=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-5)
    model.train()
    _tell(pace, model, ENSEMBLE.batch)
    drawn = iter(batches)
    while pace.begin():
        done = 0
        while done < pace.settings.chunk:
            batch = next(drawn, None)
            if batch is None:
                drawn = iter(batches)
                continue
            model.update(batch, optimizer)
            done += 1
        pace.end(done)


def ensemble_rollout(pace: Pace) -> None:
    model = _model(SAC.obs, SAC.action, ENSEMBLE.hidden, ENSEMBLE.members)
    model.set_elite(list(range(ENSEMBLE.elites)))
    environment = _environment(model, SAC.obs, SAC.action, "random_model")
    start = 0.3 * np.random.default_rng(0).standard_normal((ENSEMBLE.starts, SAC.obs))
    _tell(pace, model, ENSEMBLE.starts)
    while pace.begin():
        done = 0
        while done < pace.settings.chunk:
            state = environment.reset(start, return_as_np=False)
            for _ in range(ENSEMBLE.horizon):
                action = torch.rand(ENSEMBLE.starts, SAC.action) * 2 - 1
                _, _, _, state = environment.step(action, state, sample=True)
            done += ENSEMBLE.starts * ENSEMBLE.horizon
        pace.end(done)


def pets_action(pace: Pace) -> None:
    model = _model(PETS.obs, PETS.action, PETS.hidden, PETS.members)
    environment = _environment(model, PETS.obs, PETS.action, "fixed_model")
    planning = _module("planning.trajectory_opt")
    bound = np.ones((PETS.horizon, PETS.action))
    search = planning.CEMOptimizer(
        num_iterations=PETS.iterations,
        elite_ratio=PETS.elites / PETS.candidates,
        population_size=PETS.candidates,
        lower_bound=(-bound).tolist(),
        upper_bound=bound.tolist(),
        alpha=0.1,
        device=torch.device("cpu"),
        return_mean_elites=True,
    )
    obs = np.zeros(PETS.obs, np.float32)
    plan = torch.zeros(PETS.horizon, PETS.action)

    def rate(plans: torch.Tensor) -> Any:
        return environment.evaluate_action_sequences(plans, obs, PETS.particles)

    _tell(pace, model, 32)
    search.optimize(rate, x0=plan)
    while pace.begin():
        for _ in range(pace.settings.chunk):
            plan = search.optimize(rate, x0=plan).roll(-1, dims=0)
            plan[-1] = 0.0
        pace.end(pace.settings.chunk)
