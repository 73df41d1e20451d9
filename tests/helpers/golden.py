"""Golden traces: the first updates of every algorithm, as rounded numbers in a file each.

Rounded numbers, not hashes: another processor or version of PyTorch rounds otherwise, and a hash
would not say by how much.  A trace is renewed by `scripts/update_golden.py`, in the same commit as
the change that alters learning and with a line in the changelog that says so; a refactor never
renews one.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from helpers.tiny import ROOT
from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.gail import GAIL
from rl_training.data.batch import TransitionBatch
from rl_training.envs.factory import probe_env
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.replay import load_buffer
from rl_training.testing.contract import TASK, build, make_batch, small_settings

FOLDER = ROOT / "tests" / "golden"
UPDATES, EVERY = 40, 8
RELATIVE, ABSOLUTE = 2e-3, 1e-4
"""How far another machine may be off after that many updates; a wrong constant is off by more."""


def rounded(value: float) -> float:
    """Six significant digits: more than any comparison uses, few enough to read."""
    return float(f"{value:.6g}")


def trace(
    algo: str, settings: dict[str, Any] | None = None, *, noise: float = 0.0
) -> dict[str, Any]:
    """Metrics after every few updates, and mean and size of each network's parameters at the end.

    Everything is drawn from fixed seeds: networks, batches, and the learner's own randomness.

    Args:
        algo: The algorithm.
        settings: Those of the stored trace; None takes what makes the algorithm small today.
        noise: Relative error put on the first parameters, as another machine would round them.
    """
    torch.set_num_threads(1)
    learner, env = _build(algo, settings)
    generator = torch.Generator().manual_seed(0)
    for optimizer in learner.optimizers():
        for parameter in optimizer.parameters if noise else ():
            error = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                parameter.mul_(1 + noise * error)
    metrics: dict[str, list[float]] = {}
    for number in range(1, UPDATES + 1):
        batch = make_batch(algo, env, (0,), number)
        result = learner.update(batch)
        imagination = imagination_of(learner)
        if imagination is not None and isinstance(batch, TransitionBatch):
            imagination.update(batch)
        if number % EVERY == 0:
            for name, value in sorted(result.metrics.items()):
                metrics.setdefault(name, []).append(rounded(value))
    return {
        "settings": small_settings(get_algorithm_spec(algo)) if settings is None else settings,
        "updates": UPDATES,
        "metrics": metrics,
        "parameters": _parameters(learner),
    }


def _build(algo: str, settings: dict[str, Any] | None) -> tuple[AnyLearner, EnvSpec]:
    if settings is None:
        return build(algo)
    spec = get_algorithm_spec(algo)
    env = probe_env(TASK[spec.action_kinds[0]], {})
    learner = spec.build(env, spec.config_class(**settings), (0,))
    if isinstance(learner, GAIL):
        learner.attach(load_buffer(learner, env)[0])
    return learner, env


def _parameters(learner: Any) -> dict[str, list[float]]:
    found = {}
    for name in learner.network_names:
        flat = torch.cat(
            [p.detach().double().flatten() for p in getattr(learner, name).parameters()]
        )
        found[name] = [rounded(float(flat.mean())), rounded(float(flat.square().mean().sqrt()))]
    return found


def stored(algo: str) -> dict[str, Any]:
    """The trace in the repository."""
    path = FOLDER / f"{algo}.json"
    assert path.is_file(), f"{path.name} is missing: python scripts/update_golden.py {algo}"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(algo: str) -> bool:
    """Write the trace of now where it differs from the stored one by more than rounding."""
    path = FOLDER / f"{algo}.json"
    settings = stored(algo)["settings"] if path.is_file() else None
    now = trace(algo, settings)
    if path.is_file() and not differences(stored(algo), now):
        return False
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(now, indent=1) + "\n")
    return True


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Where two traces differ by more than another machine would make them."""
    if left["updates"] != right["updates"]:
        return ["updates"]
    found = []
    for kind in ("metrics", "parameters"):
        a, b = left[kind], right[kind]
        found += [f"{kind}.{name}" for name in sorted(a.keys() ^ b.keys())]
        for name in sorted(a.keys() & b.keys()):
            pairs = zip(a[name], b[name], strict=True)
            if any(abs(x - y) > ABSOLUTE + RELATIVE * max(abs(x), abs(y)) for x, y in pairs):
                found.append(f"{kind}.{name}: {a[name]} became {b[name]}")
    return found
