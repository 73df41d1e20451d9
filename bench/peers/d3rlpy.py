"""The d3rlpy package; it draws a batch row by row, and that is counted.

Its CQL evaluates the target at the mean action, where ours draws one; its multiplier is held at 1.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.speed.noise import noise_columns
from bench.speed.pace import Pace
from bench.speed.sizes import OFFLINE, SAC


def sac(pace: Pace) -> None:
    _update(pace, "SACConfig")


def cql(pace: Pace) -> None:
    _update(
        pace,
        "CQLConfig",
        n_critics=OFFLINE.num_critics,
        n_action_samples=OFFLINE.cql_samples,
        conservative_weight=OFFLINE.cql_weight,
        alpha_learning_rate=0.0,  # no learned multiplier on top of the weight
    )


def iql(pace: Pace) -> None:
    encoder = _d3rlpy().models.VectorEncoderFactory(SAC.hidden)
    _update(pace, "IQLConfig", n_critics=OFFLINE.num_critics, value_encoder_factory=encoder)


def td3_bc(pace: Pace) -> None:
    _update(
        pace,
        "TD3PlusBCConfig",
        n_critics=OFFLINE.num_critics,
        update_actor_interval=OFFLINE.policy_delay,
    )


def _d3rlpy() -> Any:
    return importlib.import_module("d3rlpy")


def _update(pace: Pace, config: str, **settings: Any) -> None:
    d3rlpy = _d3rlpy()
    data = d3rlpy.dataset.MDPDataset(**noise_columns())
    encoder = d3rlpy.models.VectorEncoderFactory(SAC.hidden)
    learner = getattr(d3rlpy.algos, config)(
        batch_size=SAC.batch,
        actor_encoder_factory=encoder,
        critic_encoder_factory=encoder,
        **settings,
    ).create(device="cpu:0")
    learner.build_with_dataset(data)
    pace.tell(version=d3rlpy.__version__, sizes=_sizes(learner, data))
    while pace.begin():
        for _ in range(pace.settings.chunk):
            learner.update(data.sample_transition_batch(learner.batch_size))
        pace.end(pace.settings.chunk)


def _sizes(learner: Any, data: Any) -> dict[str, int]:
    modules = learner.impl.modules
    parts = {"actor": modules.policy, "critics": modules.q_funcs}
    if hasattr(modules, "value_func"):
        parts["value"] = modules.value_func
    found = {
        f"parameters of {name}": sum(p.numel() for p in part.parameters())
        for name, part in parts.items()
    }
    return found | {"rows": data.transition_count, "batch": learner.batch_size}
