"""What the tests of one update share: a small batch, networks with known answers, comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.algorithms.td3 import TD3
from rl_training.data.batch import TransitionBatch
from rl_training.models.layers import StackedLinear, StackedMLP
from rl_training.rng import Rng

OBS, ACT, B = 3, 2, 8


def make_batch(
    seeds: tuple[int, ...] = (0,), key: str = "batch", **changes: Tensor
) -> TransitionBatch:
    """Random transitions of continuous actions, none of which ends an episode."""
    rng = Rng(seeds, key)
    values = {
        "obs": rng.normal(B, OBS),
        "action": rng.uniform(B, ACT) * 2 - 1,
        "reward": rng.normal(B),
        "next_obs": rng.normal(B, OBS),
        "discount": torch.full((len(seeds), B), 0.9),
    }
    return TransitionBatch(**(values | changes))


def last_layer(network: nn.Module) -> StackedLinear:
    """The output layer of a network."""
    assert isinstance(network, StackedMLP)
    layer = network.layers[-1]
    assert isinstance(layer, StackedLinear)
    return layer


def make_constant(network: nn.Module, values: list[float]) -> None:
    """Let member i of a critic, or output i of an actor, always answer values[i]."""
    layer = last_layer(network)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor(values).view_as(layer.bias[0]).expand_as(layer.bias))


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Copies of a module's parameters."""
    return [p.detach().clone() for p in module.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether two lists of tensors are bit-equal."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def actor_gradient(learner: TD3, batch: TransitionBatch) -> Tensor:
    """The gradient of the actor's loss, as one vector."""
    loss, _ = learner.actor_loss(batch)
    gradients = torch.autograd.grad(loss.sum(), list(learner.model.actor.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])
