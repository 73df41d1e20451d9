"""Random shifts of images: what they are, by NumPy; where they stand in an update; who refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import SAC
from rl_training.algorithms.base import StepOutput
from rl_training.data.batch import TransitionBatch
from rl_training.data.random_shift import random_shift
from rl_training.envs.factory import probe_env
from rl_training.errors import ConfigError
from rl_training.models.rows import split
from rl_training.observations import ObservationSpec
from rl_training.rng import Rng
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.testing.contract import (
    above_rounding,
    assert_member_equals,
    build,
    image_task,
    make_batch,
    no_host_reads,
    parts_task,
    pixel_task,
    small_config,
)

PAD = 3
WAYS = [
    (name, task)
    for name in ("sac", "td3", "dqn", "discrete_sac")
    for task in (pixel_task(name), parts_task(name))
]
every_way = pytest.mark.parametrize(("algo", "task"), WAYS)


class TwoCameras(gym.Env[Any, Any]):
    """Two images of other sizes, one of them float32, among everything else."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "depth": spaces.Box(-1.0, 1.0, (1, 6, 9), np.float32),
                "index": spaces.Discrete(600),
                "state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
                "view": spaces.Box(0, 255, (7, 8, 3), np.uint8),
                "action_mask": spaces.MultiBinary(3),
            }
        )
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {
            "depth": self.np_random.uniform(-1, 1, (1, 6, 9)).astype(np.float32),
            "index": int(self.np_random.integers(600)),
            "state": self.np_random.normal(size=3).astype(np.float32),
            "view": self.np_random.integers(0, 256, (7, 8, 3)).astype(np.uint8),
            "action_mask": np.array([1, 0, 1], np.int8),
        }, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


def crops(image: np.ndarray[Any, Any], pad: int) -> dict[bytes, tuple[int, int]]:
    """Every crop of an image `[C, H, W]` that is padded by its border, by what it shows."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="edge")
    return {
        padded[:, row : row + height, column : column + width].tobytes(): (row, column)
        for row in range(2 * pad + 1)
        for column in range(2 * pad + 1)
    }


def images(*lead: int, key: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.randint(256, (*lead, 4, 10, 12), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_shift_is_a_crop_of_the_image_padded_by_its_border(dtype: torch.dtype) -> None:
    obs = images(2, 50).to(dtype)
    moved = random_shift(obs, PAD, Rng((0, 1), "test"))
    assert moved.shape == obs.shape
    assert moved.dtype == dtype
    places = set()
    for before, after in zip(obs.flatten(0, 1), moved.flatten(0, 1), strict=True):
        places.add(crops(before.numpy(), PAD)[after.numpy().tobytes()])
    assert len(places) > 30  # of 49, by 100 draws: samples have draws of their own


def test_places_are_drawn_uniformly() -> None:
    pad, draws = 1, 9_000
    image = images(1, 1)
    known = crops(image[0, 0].numpy(), pad)
    moved = random_shift(image.expand(1, draws, -1, -1, -1), pad, Rng((0,), "test"))
    counts = dict.fromkeys(known.values(), 0)
    for after in moved[0]:
        counts[known[after.numpy().tobytes()]] += 1
    assert len(counts) == 9
    expected = draws / 9
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 26.1  # one in a thousand, with 8 degrees of freedom


def test_seeds_draw_the_same_shifts_alone_and_in_a_group() -> None:
    obs = images(3, 20)
    together = random_shift(obs, PAD, Rng((5, 6, 7), "test"))
    for index, seed in enumerate((5, 6, 7)):
        alone = random_shift(obs[index : index + 1], PAD, Rng((seed,), "test"))
        assert torch.equal(together[index], alone[0])


@pytest.mark.parametrize("as_floats", [False, True])
def test_of_several_parts_each_image_is_shifted_by_itself_and_nothing_else_changes(
    as_floats: bool,
) -> None:
    parts = probe_env(f"{__name__}:TwoCameras", {}).observation
    assert isinstance(parts, ObservationSpec)
    assert {leaf.kind for leaf in parts.leaves} == {"image", "index", "numbers", "mask"}
    env = TwoCameras()
    shown = [env.reset(seed=seed)[0] for seed in range(40)]
    rows = torch.from_numpy(np.stack([parts.pack(obs) for obs in shown])).unsqueeze(0)  # [1, B, R]
    assert rows.dtype == torch.uint8
    if as_floats:
        values = split(parts, rows)
        flat = [values[leaf.name].flatten(2).float() for leaf in parts.order]
        rows = torch.cat(flat, -1)
    kept = rows.clone()
    before = split(parts, rows)
    after = split(parts, random_shift(rows, 2, Rng((0,), "test"), parts))
    assert torch.equal(rows, kept)
    for name in ("index", "state", "action_mask"):
        assert torch.equal(before[name], after[name])
    places: dict[str, list[tuple[int, int]]] = {"depth": [], "view": []}
    for name, drawn in places.items():
        for old, new in zip(before[name][0], after[name][0], strict=True):
            drawn.append(crops(old.numpy(), 2)[new.numpy().tobytes()])
        assert len(set(drawn)) > 10
    assert places["depth"] != places["view"]


def seen_by_step(
    pad: int, batch: TransitionBatch, monkeypatch: pytest.MonkeyPatch
) -> TransitionBatch:
    """What reaches a SAC's `step` of a batch."""
    learner, _ = build("sac", task=pixel_task("sac"), random_shift=pad)
    shown: list[TransitionBatch] = []

    def step(given: TransitionBatch) -> StepOutput:
        shown.append(given)
        return StepOutput({})

    monkeypatch.setattr(learner, "step", step)
    learner.learn(batch)
    return shown[0]


def test_observations_and_their_successors_are_shifted_independently_and_only_they(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    obs = images(1, 40)
    rest = {"action": torch.zeros(1, 40, 1), "reward": torch.randn(1, 40)}
    batch = TransitionBatch(obs=obs, next_obs=obs, discount=torch.ones(1, 40), **rest)
    shown = seen_by_step(PAD, batch, monkeypatch)
    places = [
        [
            crops(old.numpy(), PAD)[new.numpy().tobytes()]
            for old, new in zip(obs[0], moved[0], strict=True)
        ]
        for moved in (shown.obs, shown.next_obs)
    ]
    equal = sum(first == second for first, second in zip(*places, strict=True))
    assert equal < 8  # 40 / 49 on average
    for name in ("action", "reward", "discount"):
        assert torch.equal(getattr(shown, name), getattr(batch, name))


def test_without_a_shift_the_batch_is_as_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = images(1, 4)
    rest = {"action": torch.zeros(1, 4, 1), "reward": torch.zeros(1, 4)}
    batch = TransitionBatch(obs=obs, next_obs=obs, discount=torch.ones(1, 4), **rest)
    assert seen_by_step(0, batch, monkeypatch) is batch


@every_way
def test_a_shifting_update_reads_nothing_on_the_host_and_goes_on_from_its_state(
    algo: str, task: str
) -> None:
    learner, env = build(algo, task=task, random_shift=2)
    learner.update(make_batch(algo, env, (0,)))
    other, _ = build(algo, seeds=(9,), task=task, random_shift=2)
    other.load_state_dict(learner.state_dict())
    batch = make_batch(algo, env, (0,), 1)
    with no_host_reads():
        first = learner.update(batch)
    assert dict(first.metrics) == dict(other.update(batch).metrics)


@every_way
def test_stacked_seeds_that_shift_equal_single_learners(algo: str, task: str) -> None:
    seeds, settings = (3, 7), above_rounding(algo) | {"random_shift": 2}
    group, env = build(algo, seeds=seeds, task=task, **settings)
    singles = [build(algo, seeds=(seed,), task=task, **settings)[0] for seed in seeds]
    for key in range(3):
        group.update(make_batch(algo, env, seeds, key))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch(algo, env, (seed,), key))
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)


def test_a_run_that_shifts_stacked_frames_is_resumed_bit_exactly(tmp_path: Path) -> None:
    config = small_config(
        "sac",
        tmp_path,
        task=image_task("sac"),
        env_kwargs={"max_episode_steps": 7, "wrappers": {"pixels": {"frame_stack": 3}}},
        algo_kwargs={"random_shift": 2, "n_step": 3},
    )
    report = verify_resume(config, 70)
    assert report.identical, report.lines()


@pytest.mark.parametrize(
    ("task", "pad", "message"),
    [
        ("Pendulum-v1", 4, r"random_shift is 4, but Pendulum-v1 gives no images to shift; set it"),
        ("rl_training/PointReach-v0", 4, r"but rl_training/PointReach-v0 gives no images"),
        (pixel_task("sac"), 10, r"random_shift is 10, but .* images of 10 pixels; .* from 0 to 9"),
        (parts_task("sac"), 8, r"random_shift is 8, but .* images of 8 pixels; .* from 0 to 7"),
        (pixel_task("sac"), -1, r"random_shift must be >= 0, got -1"),
    ],
)
def test_a_shift_that_makes_no_sense_is_refused_in_one_sentence(
    task: str, pad: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SAC(task, random_shift=pad).predict(np.zeros(3, np.float32))
    assert "\n" not in str(caught.value)


def test_acting_is_not_shifted() -> None:
    plain, env = build("sac", task=pixel_task("sac"))
    shifting, _ = build("sac", task=pixel_task("sac"), random_shift=4)
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 5, *env.obs_shape)))
    obs = obs.to(torch.uint8)
    with torch.no_grad():
        assert torch.equal(plain.act(obs), shifting.act(obs))
