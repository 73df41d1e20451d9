"""What a user may choose of the networks: the activation, and widths of actor and critics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from rl_training import PPO, SAC
from rl_training.algorithms.base import AnyLearner
from rl_training.errors import ConfigError
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.models.layers import ACTIVATIONS, ActivationName, StackedLinear, StackedMLP
from rl_training.rng import Rng
from rl_training.runtime.train import train
from rl_training.testing.contract import PIXEL_TASK, build

NAMES: tuple[ActivationName, ...] = get_args(ActivationName)


def takes(algo: str, name: str, value: Any) -> bool:
    """Whether a method has a setting and lets it have this value."""
    settings = get_algorithm_spec(algo).config_class
    try:
        return name in settings.model_fields and bool(settings(**{name: value}))
    except ConfigError:
        return False


WITH_ACTIVATION = [name for name in algorithm_names() if takes(name, "activation", "mish")]
WITH_WIDTHS = [
    name
    for name in algorithm_names()
    if takes(name, "actor_hidden_sizes", [4]) and takes(name, "critic_hidden_sizes", [7, 6])
]
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "mish": lambda x: x * torch.tanh(functional.softplus(x)),
}


def layers_of(network: StackedMLP) -> list[StackedLinear]:
    return [layer for layer in network.layers if isinstance(layer, StackedLinear)]


def plain(network: StackedMLP, x: Tensor, name: str, seed: int, member: int) -> Tensor:
    """The layers of one network of a stack, one product after another."""
    *hidden, last = layers_of(network)
    for layer in hidden:
        x = REFERENCE[name](x @ layer.weight[seed, member] + layer.bias[seed, member])
    return x @ last.weight[seed, member] + last.bias[seed, member]


def test_every_name_has_a_function_and_the_other_way_round() -> None:
    assert set(NAMES) == set(ACTIVATIONS) == set(REFERENCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@pytest.mark.parametrize("rows", [5, 700])
@pytest.mark.parametrize("fused", [None, "fp32"])
def test_a_stack_has_the_activation_that_it_was_given(
    name: ActivationName, seeds: tuple[int, ...], rows: int, fused: Any
) -> None:
    """One seed and several, small and large batches, and where kernels of relu are asked for."""
    network = StackedMLP((3, 16, 16, 2), Rng(seeds, "net"), members=(2,), activation=name)
    network.fused = fused
    x = Rng(seeds, "x").normal(rows, 3)
    found = network(x)
    for seed in range(len(seeds)):
        for member in range(2):
            wanted = plain(network, x[seed], name, seed, member)
            torch.testing.assert_close(found[seed, member], wanted, rtol=1e-4, atol=1e-5)
    first = layers_of(network)[0].weight
    (gradient,) = torch.autograd.grad(found.sum(), first)
    pairs = [(seed, member) for seed in range(len(seeds)) for member in range(2)]
    outputs = [plain(network, x[seed], name, seed, member).sum() for seed, member in pairs]
    (reference,) = torch.autograd.grad(torch.stack(outputs).sum(), first)
    torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-3)


def stacks_of(learner: AnyLearner) -> dict[str, StackedMLP]:
    """The stacks that act and tell values, by name: no model of the task, no discriminator."""
    names = set(learner.network_names) - {"dynamics_model", "discriminator"}
    return {
        f"{name}.{path}": module
        for name in names
        for path, module in getattr(learner, name).named_modules()
        if isinstance(module, StackedMLP) and len(module.layers) > 1
    }


def is_policy(name: str) -> bool:
    return name.removesuffix(".layers").endswith(("actor", "flow"))


@pytest.mark.parametrize("algo", WITH_ACTIVATION)
def test_the_setting_reaches_every_network_of_a_method(algo: str) -> None:
    learner, _ = build(algo, activation="mish")
    stacks = stacks_of(learner)
    assert stacks
    assert all(stack.activation is ACTIVATIONS["mish"] for stack in stacks.values())


@pytest.mark.parametrize("algo", WITH_WIDTHS)
def test_actor_and_critics_have_widths_of_their_own(algo: str) -> None:
    learner, _ = build(algo, actor_hidden_sizes=[5], critic_hidden_sizes=[7, 6])
    for name, stack in stacks_of(learner).items():
        widths = [layer.bias.shape[-1] for layer in layers_of(stack)][:-1]
        assert widths == ([5] if is_policy(name) else [7, 6]), name


@pytest.mark.parametrize("algo", WITH_WIDTHS)
def test_without_them_both_have_the_common_ones(algo: str) -> None:
    learner, _ = build(algo, hidden_sizes=[9], actor_hidden_sizes=[4], critic_hidden_sizes=None)
    for name, stack in stacks_of(learner).items():
        widths = [layer.bias.shape[-1] for layer in layers_of(stack)][:-1]
        assert widths == ([4] if is_policy(name) else [9]), name


def test_ppo_has_them_after_the_features_of_images_too() -> None:
    settings: dict[str, Any] = {
        "actor_hidden_sizes": [5],
        "head_hidden_sizes": [7],
        "activation": "elu",
    }
    learner, _ = build("ppo", task=PIXEL_TASK, **settings)
    model: Any = learner.model  # type: ignore[attr-defined]
    assert model.actor.layers[0].bias.shape[-1] == 5
    assert model.critic.layers[0].bias.shape[-1] == 7
    assert model.actor.activation is model.encoder.activation is ACTIVATIONS["elu"]


def test_the_defaults_are_those_of_each_method() -> None:
    relu, tanh = ACTIVATIONS["relu"], ACTIVATIONS["tanh"]
    for algo, wanted in {"sac": relu, "dqn": relu, "ppo": tanh, "bc": tanh}.items():
        found = {stack.activation for stack in stacks_of(build(algo)[0]).values()}
        assert found == {wanted}, algo


@pytest.mark.matrix
def test_all_doors_lead_to_the_same_run(tmp_path: Path) -> None:
    """A file, `-s` and keywords of Python."""
    settings: dict[str, Any] = {
        "activation": "silu",
        "actor_hidden_sizes": [6],
        "critic_hidden_sizes": [7],
    }
    by_file = train(tiny_config("sac", tmp_path / "file", algo_kwargs=settings)).run_dir
    file = write_tiny(tmp_path)
    texts = [f"{name}={value}" for name, value in settings.items()]
    options = [word for text in texts for word in ("-s", text)]
    outcome = run_cli("train", "--config", file, "--output-dir", tmp_path / "cli", *options)
    assert outcome.code == 0, outcome.err
    agent = SAC(tiny_config("sac", tmp_path / "python"), **settings)
    by_python = agent.learn(progress=False).run_dir
    digests = {learner_digest(Path(run)) for run in (by_file, outcome.values["run_dir"], by_python)}
    assert len(digests) == 1
    assert isinstance(agent.policy, nn.Module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "swish"}, "activation must be one of 'relu', 'tanh'"),
        ({"actor_hidden_sizes": [0]}, r"actor_hidden_sizes\[0\] must be >= 1, got 0"),
        ({"critic_hidden_sizes": "wide"}, "critic_hidden_sizes must be a list"),
    ],
)
def test_a_mistake_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO("CartPole-v1", **settings)
