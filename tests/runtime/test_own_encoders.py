"""Encoders that the user writes for one network: stacked, trained, resumed, and trusted or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.tiny import clean_environment, learner_digest, run_cli, write_tiny
from helpers.warm import run_warm
from rl_training import DQN, PPO, SAC, SimbaV2
from rl_training.algorithms.own_encoders import EncoderNotGivenError
from rl_training.errors import ConfigError, RLTrainingError, SpecMismatch
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.models.own_encoder import StackedEncoder
from rl_training.rng import Rng, ShapeRng
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train
from rl_training.testing.contract import (
    PIXEL_TASK,
    assert_member_equals,
    build,
    flat_state,
    make_batch,
    no_host_reads,
    small_config,
)

SEEDS = (3, 5)
METHODS = [
    name
    for name in algorithm_names()
    if (field := get_algorithm_spec(name).config_class.model_fields.get("encoder"))
    and field.annotation is not type(None)
]
STEERED = "helpers.envs:SteeredImageEnv"


def make(shape: tuple[int, ...]) -> nn.Module:
    """A small encoder of vectors or images."""
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(shape[0], 6), nn.LayerNorm(6), nn.GELU())
    return nn.Sequential(nn.Conv2d(shape[0], 3, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


class Tied(nn.Module):
    """One layer used twice, and a table that does not change."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = self.first
        self.register_buffer("table", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x))) + self.table


def stacked(
    function: Callable[..., nn.Module], shape: tuple[int, ...], seeds: tuple[int, ...]
) -> Any:
    dtype = "uint8" if len(shape) == 3 else "float32"
    return StackedEncoder(function, shape, dtype, Rng(seeds, "networks"), "mine")


@pytest.mark.parametrize("function", [make, lambda shape: Tied(shape[0])])
def test_a_stack_is_the_users_module_with_each_seeds_own_weights(
    function: Callable[..., nn.Module],
) -> None:
    group = stacked(function, (4,), SEEDS)
    x = Rng(SEEDS, "x").normal(7, 4)
    for index, seed in enumerate(SEEDS):
        alone = stacked(function, (4,), (seed,))
        one = function((4,))
        one.load_state_dict({k: v[0] for k, v in alone.network.state_dict().items()})
        torch.testing.assert_close(group(x)[index], one(x[index]))
        assert torch.equal(group(x)[index], alone(x[index : index + 1])[0])
    assert not torch.equal(*group.state_dict()[next(iter(group.state_dict()))])


def test_a_layer_used_twice_stays_one_and_takes_both_gradients() -> None:
    group = stacked(lambda shape: Tied(shape[0]), (4,), SEEDS)
    assert len(list(group.parameters())) == 2
    x = Rng(SEEDS, "x").normal(7, 4)
    group(x).sum().backward()
    one = Tied(4)
    one.load_state_dict({k: v[1] for k, v in group.network.state_dict().items()})
    torch.autograd.backward(one(x[1]).sum())
    assert one.first.weight.grad is not None
    torch.testing.assert_close(group.network.first.weight.grad[1], one.first.weight.grad)


def test_images_are_shown_as_numbers_from_0_to_1_and_lazy_layers_get_their_width() -> None:
    group = stacked(lambda shape: nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), (1, 2, 2), (0,))
    assert group.network[1].weight.shape == (1, 2, 4)
    image = torch.full((1, 1, 1, 2, 2), 255, dtype=torch.uint8)
    expected = group.network[1].weight[0].sum(1) + group.network[1].bias[0]
    torch.testing.assert_close(group(image)[0, 0], expected)


def test_pytorchs_own_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = stacked(make, (4,), (0,))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    second = stacked(make, (4,), (0,))
    assert all(
        torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_a_module_that_needs_numbers_to_be_made_is_outlined_with_them() -> None:
    def measured(shape: tuple[int, ...]) -> nn.Module:
        sample = torch.from_numpy(np.ones((1, *shape), np.float32))
        inner = nn.Sequential(nn.Linear(shape[0], 7), nn.ReLU())
        return nn.Sequential(inner, nn.Linear(int(inner(sample).shape[1]), 3))

    outline = StackedEncoder(measured, (4,), "float32", ShapeRng(1, 100), "mine")
    assert outline.embedding_dim == 3
    assert {p.device.type for p in outline.parameters()} == {"meta"}


class Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda shape: nn.Sequential(nn.Linear(4, 2), nn.Dropout()), "draws random numbers"),
        (lambda shape: nn.BatchNorm1d(4), "changes its buffer .*; use LayerNorm"),
        (lambda shape: Counting(), "changes its buffer seen"),
        (lambda shape: 3, r"must return a torch\.nn\.Module, got int"),
        (lambda shape: nn.Linear(5, 2), r"failed on 3 observations of shape \(4,\)"),
        (lambda shape: nn.Unflatten(1, (2, 2)), r"features \[batch, n\], got \[3, 2, 2\]"),
        (lambda shape: nn.Linear(4, 2).double(), "failed on 3 observations"),
        (lambda: nn.Linear(4, 2), r"mine failed for observations of shape \(4,\)"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(SpecMismatch, match=message):
        stacked(function, (4,), (0,))


@pytest.mark.parametrize("algo", METHODS)
def test_an_update_moves_every_encoder_and_reads_nothing_back(algo: str) -> None:
    learner, env = build(algo, encoder=make)
    # Normalised layers of relu may be dead for a few rows; weights of the first layer are not.
    before = {k: v for k, v in flat_state(learner.state_dict()).items() if "encoder.network" in k}
    assert before
    with no_host_reads():
        for key in range(4):
            learner.update(make_batch(algo, env, (0,), key))
    after = flat_state(learner.state_dict())
    moved = {key for key, value in before.items() if not torch.equal(value, after[key])}
    targets = {key for key in before if key.startswith("target_")}
    assert moved >= before.keys() - targets


@pytest.mark.expensive
@pytest.mark.parametrize("algo", METHODS)
def test_stacked_seeds_equal_single_ones(algo: str) -> None:
    group, env = build(algo, SEEDS, encoder=make)
    for key in range(2):
        group.update(make_batch(algo, env, SEEDS, key))
    for index, seed in enumerate(SEEDS):
        single, _ = build(algo, (seed,), encoder=make)
        for key in range(2):
            single.update(make_batch(algo, env, (seed,), key))
        assert_member_equals(group, index, single)


@pytest.mark.parametrize(
    ("algo", "task"),
    [
        ("sac", None),
        pytest.param("td3", None, marks=pytest.mark.matrix),
        pytest.param("ppo", None, marks=pytest.mark.matrix),
        pytest.param("dqn", None, marks=pytest.mark.matrix),
        pytest.param("sac", STEERED, marks=pytest.mark.matrix),
        pytest.param("td3", STEERED, marks=pytest.mark.matrix),
        ("ppo", PIXEL_TASK),
        pytest.param("dqn", PIXEL_TASK, marks=pytest.mark.matrix),
    ],
)
def test_a_run_is_cut_and_goes_on_to_the_bit(algo: str, task: str | None, tmp_path: Path) -> None:
    config = small_config(algo, tmp_path, task=task, algo_kwargs={"encoder": make})
    report = verify_resume(config, 100)
    assert report.identical, report


def test_an_agent_acts_saves_and_loads(tmp_path: Path) -> None:
    agent = SAC(STEERED, encoder=make, learning_starts=10, batch_size=8, output_dir=str(tmp_path))
    agent.learn(40, progress=False)
    image = np.zeros((1, 8, 8), np.uint8)
    action = agent.predict(image)
    assert action.shape == (1,)
    saved = agent.save(tmp_path / "agent.safetensors")
    assert np.array_equal(SAC.load(saved, encoder=make).predict(image), action)
    chosen = agent.policy(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))[0]
    assert np.allclose(chosen.detach().numpy(), action)
    assert agent.evaluate(episodes=1).metrics["eval_episodes"] == 1


def test_images_are_refused_with_the_way_out_where_no_network_reads_them() -> None:
    with pytest.raises(SpecMismatch, match=r"takes observations with 1 axis.*; flatten them"):
        SimbaV2(STEERED, normalize_observations=False).predict(np.zeros((1, 8, 8), np.uint8))


@pytest.mark.parametrize(
    ("algo", "reason"),
    [
        ("pets", "encoder is not a setting of this method: its model predicts the observation"),
        ("dreamer", "encoder is not a setting of this method: its world model learns its own"),
    ],
)
def test_methods_that_cannot_have_one_say_why(algo: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        small_config(algo, tmp_path, algo_kwargs={"encoder": make})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("natur", "must be one of 'auto', 'nature', 'impala' or 'small' or module:function"),
        ("no_such_module:make", "module 'no_such_module' cannot be imported"),
        ("os:no_such_name", "encoder os:no_such_name is missing; name a function"),
        ("sys:path", "encoder sys:path is a list; name a function"),
    ],
)
def test_a_mistake_is_one_sentence(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DQN("CartPole-v1", encoder=value)


# Trust

LOADED = "loaded.txt"
MODULE = """
from pathlib import Path

from torch import nn

Path({mark!r}).write_text("imported")


def make(shape):
    return nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh())
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's that says when it is imported."""
    text = MODULE.format(mark=str(tmp_path / LOADED))
    (tmp_path / "own_networks.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "own_networks:make"
    sys.modules.pop("own_networks", None)


@pytest.mark.matrix
def test_a_file_and_the_command_line_import_what_the_user_names(
    own_module: str, tmp_path: Path
) -> None:
    by_file = write_tiny(tmp_path, algo_kwargs={"encoder": own_module})
    one = run_cli("train", "--config", by_file, "--output-dir", tmp_path / "one", "--quiet")
    assert one.code == 0, one.err
    plain = write_tiny(tmp_path, name="plain.yaml")
    options = ("-s", f"encoder={own_module}", "--output-dir", tmp_path / "two", "--quiet")
    two = run_cli("train", "--config", plain, *options)
    assert two.code == 0, two.err
    runs = [Path(outcome.values["run_dir"]) for outcome in (one, two)]
    assert len({learner_digest(run) for run in runs}) == 1


@pytest.mark.matrix
def test_a_checkpoint_never_imports_one(own_module: str, tmp_path: Path) -> None:
    file = write_tiny(tmp_path, algo_kwargs={"encoder": own_module})
    trained = run_warm("-m", "rl_training", "train", "--config", file, "--quiet")
    assert trained.code == 0, trained.err
    run = trained.values["run_dir"]
    for words in (("eval", run), ("predict", run, "--obs", "[1, 0, 0]"), ("resume", run)):
        (tmp_path / LOADED).unlink(missing_ok=True)
        refused = run_warm("-m", "rl_training", *words)
        assert refused.code == 2
        assert f"rl-training --plugin {own_module}" in refused.err
        assert not (tmp_path / LOADED).exists()
        assert "Traceback" not in refused.err
    trusted = run_warm("-m", "rl_training", "--plugin", own_module, "eval", run)
    assert trusted.code == 0, trusted.err
    assert clean_environment()["PYTHONPATH"]


def test_a_name_in_a_configuration_of_python_is_not_followed(tmp_path: Path) -> None:
    config = TrainConfig(algo="sac", env_id="Pendulum-v1", algo_kwargs={"encoder": "os:system"})
    with pytest.raises(EncoderNotGivenError, match="a file may not load one"):
        train(config.replace(output_dir=str(tmp_path)))


@pytest.mark.matrix
def test_a_function_that_this_process_was_not_given_is_asked_for(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_steps=16, output_dir=str(tmp_path), encoder=lambda s: make(s))
    agent.learn(16, progress=False)
    script = (
        f"from rl_training import PPO\nPPO.load({str(agent.save(tmp_path / 'a.safetensors'))!r})"
    )
    refused = run_warm("-c", script)
    assert "give it again in Python: load(path, encoder=...)" in refused.err
    with pytest.raises(RLTrainingError, match="must be the function"):
        PPO.load(tmp_path / "a.safetensors", encoder="make")  # type: ignore[arg-type]
