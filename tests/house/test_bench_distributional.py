"""The rows about return distributions: sizes, settings and made-up rows of our side."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from bench.speed import ours
from bench.speed.distributional import prepare_quantiles, quantile_config, quantile_task, sizes_of
from bench.speed.pace import Pace, WorkSettings
from bench.speed.rows import ROWS, Bar
from bench.speed.sizes import QUANTILES
from bench.speed.updates import build_learner, full_replay

EAGER = WorkSettings(chunk=1)
ALGOS = ("iqn", "fqf")


def linear(*sizes: int) -> int:
    """Parameters of a chain of layers."""
    return sum((before + 1) * after for before, after in pairwise(sizes))


def convolutions() -> int:
    """Parameters of the convolutions of Nature's network."""
    sizes = ((4, 32, 8), (32, 64, 4), (64, 64, 3))
    return sum((inputs * kernel**2 + 1) * outputs for inputs, outputs, kernel in sizes)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_our_side_has_the_sizes_of_the_comparison(algo: str, images: bool) -> None:
    encoder = convolutions() + linear(3136, 512) if images else linear(4, 64, 64)
    width, actions = (512, 6) if images else (64, 2)
    fractions = linear(width, 32) if algo == "fqf" else 0
    updates = prepare_quantiles(algo, EAGER, images=images)
    assert sizes_of(updates) == {
        "parameters": encoder + linear(64, width) + linear(width, actions) + fractions,
        "parameters of fractions": fractions,
        "quantiles": {"iqn": 8, "fqf": 32}[algo],
        "rows": 5_000 if images else 50_000,
        "batch": 32 if images else 64,
    }
    updates.close()


@pytest.mark.parametrize("algo", ALGOS)
def test_methods_are_held_to_the_peers_settings(algo: str) -> None:
    config: Any = quantile_config(algo, EAGER, images=False).algo_config
    assert (config.double, config.dueling, config.noisy) == (True, False, False)
    assert (config.n_step, config.prioritized, config.max_grad_norm) == (1, False, None)
    if algo == "iqn":
        assert (config.num_target_quantiles, config.num_action_quantiles) == (8, 32)


def test_bars_are_those_of_vectors_and_of_images() -> None:
    for algo in ALGOS:
        assert ROWS[algo].bar == Bar("ratio", 2.0)
        assert ROWS[f"{algo}-cnn"].bar == Bar("ratio", 1.5)
    assert ROWS["qr_dqn"].bar == Bar("ratio", 3.0)


def test_made_up_images_are_stacks_of_different_frames_and_actions_are_those_of_the_task() -> None:
    config = quantile_config("iqn", EAGER, images=True)
    task = quantile_task(images=True)
    replay = full_replay(config, task, build_learner(config, task, torch.device("cpu")))
    batch = replay.sample(64)
    assert batch.obs.shape == (1, 64, QUANTILES.stack, QUANTILES.image, QUANTILES.image)
    assert batch.obs.dtype == torch.uint8
    assert batch.obs.float().std(2).mean() > 50, "the frames of a stack are the same"
    torch.testing.assert_close(batch.obs[:, :, 1:], batch.next_obs[:, :, :-1])
    assert set(batch.action.flatten().tolist()) == {0, 1}
    assert batch.discount.min() > 0, "an episode ends"


def test_updates_are_done_at_the_pace() -> None:
    answers = io.StringIO()
    ours.iqn(Pace(WorkSettings(chunk=2), io.StringIO("go\n" * 2), answers))
    ready, *figures = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert ready["ready"]["sizes"]["batch"] == QUANTILES.batch
    assert len(figures) == 2
    assert all(one["figure"] > 0 for one in figures)
