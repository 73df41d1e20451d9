"""The d3rlpy package; it draws a batch row by row, and that is counted."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from bench.pace import Pace
from bench.sizes import SAC

EPISODE = 1_000


def sac(pace: Pace) -> None:
    d3rlpy: Any = importlib.import_module("d3rlpy")
    rng = np.random.default_rng(0)
    count = SAC.buffer
    ends = np.arange(count) % EPISODE == EPISODE - 1
    data = d3rlpy.dataset.MDPDataset(
        observations=0.3 * rng.standard_normal((count, SAC.obs), np.float32),
        actions=np.tanh(rng.standard_normal((count, SAC.action), np.float32)),
        rewards=0.3 * rng.standard_normal(count, np.float32),
        terminals=ends.astype(np.float32),
    )
    encoder = d3rlpy.models.VectorEncoderFactory(SAC.hidden)
    learner = d3rlpy.algos.SACConfig(
        batch_size=SAC.batch, actor_encoder_factory=encoder, critic_encoder_factory=encoder
    ).create(device="cpu:0")
    learner.build_with_dataset(data)
    pace.tell(version=d3rlpy.__version__)
    while pace.begin():
        for _ in range(pace.settings.chunk):
            learner.update(data.sample_transition_batch(SAC.batch))
        pace.end(pace.settings.chunk)
