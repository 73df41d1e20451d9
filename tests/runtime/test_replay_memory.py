"""What a replay is said to need before it is allocated is what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.algorithms.sources import replay_settings
from rl_training.envs.factory import probe_env
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime import replay as building
from rl_training.testing.contract import small_config


@pytest.mark.parametrize(
    ("algo", "settings"),
    [("dreamer", {"stored_latents": True}), ("dreamer", {"stored_latents": False}), ("sac", {})],
)
def test_the_memory_of_a_replay_is_known_before_it_is_allocated(
    algo: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(building, "require_free", lambda needed, *_: asked.append(needed))
    config = small_config(algo, Path(), algo_kwargs={"buffer_capacity": 5_000, **settings})
    env = probe_env(config.env_id, config.env_kwargs)
    learner = get_algorithm_spec(algo).build(env, config.algo_config, (0, 1))
    kept = replay_settings(learner.config)
    assert kept is not None
    buffer = building.make_replay(kept, env, 1, learner)
    tensors = [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(memory.values()) == pytest.approx(asked[0], rel=0.25)
