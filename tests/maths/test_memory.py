"""The recurrent layer: equal to PyTorch's own, seed by seed; the past ends where episodes begin."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from rl_training.models.memory import GATES, Memory, MemoryName
from rl_training.rng import Rng

SEEDS, BATCH, STEPS, INPUTS, SIZE = 3, 5, 7, 4, 6
every_kind = pytest.mark.parametrize("kind", get_args(MemoryName))


def built(kind: MemoryName) -> tuple[Memory, Tensor, Tensor, Tensor]:
    """A layer, inputs, a memory to begin with, and flags of first observations."""
    memory = Memory(INPUTS, SIZE, Rng((1, 2, 3), "memory"), kind)
    with torch.no_grad():
        memory.from_input.bias.add_(0.3 * torch.randn(memory.from_input.bias.shape))
    x = torch.randn(SEEDS, BATCH, STEPS, INPUTS)
    start = torch.randn(SEEDS, BATCH, memory.state_size).tanh()
    return memory, x, start, torch.rand(SEEDS, BATCH, STEPS) < 0.3


def pytorch_layer(memory: Memory, seed: int) -> nn.GRU | nn.LSTM:
    """PyTorch's layer with the weights of one seed."""
    layer = (nn.GRU if memory.kind == "gru" else nn.LSTM)(INPUTS, SIZE, batch_first=True)
    parts = {
        "weight_ih_l0": memory.from_input.weight[seed].T,
        "weight_hh_l0": memory.recurrent[seed].T,
        "bias_ih_l0": memory.from_input.bias[seed, 0],
        "bias_hh_l0": torch.zeros(GATES[memory.kind] * SIZE),
    }
    layer.load_state_dict(parts)
    return layer


@every_kind
def test_a_sequence_is_what_pytorchs_layer_makes_of_it(kind: MemoryName) -> None:
    memory, x, start, _ = built(kind)
    never = torch.zeros(SEEDS, BATCH, STEPS, dtype=torch.bool)
    after = memory.follow(x, start, never)
    for seed in range(SEEDS):
        layer = pytorch_layer(memory, seed)
        state = [part.unsqueeze(0).contiguous() for part in torch.split(start[seed], SIZE, -1)]
        out, _ = layer(x[seed], state[0] if kind == "gru" else tuple(state))
        torch.testing.assert_close(memory.output(after)[seed], out, rtol=1e-5, atol=1e-6)


@every_kind
def test_gradients_are_those_of_single_steps(kind: MemoryName) -> None:
    memory, x, start, is_first = built(kind)
    parameters = list(memory.parameters())
    x.requires_grad_()
    start.requires_grad_()
    target = torch.randn(SEEDS, BATCH, STEPS, memory.state_size)
    states, now = [], start
    for step in range(STEPS):
        now = memory.step(x[:, :, step], now * ~is_first[:, :, step, None])
        states.append(now)
    by_steps = torch.stack(states, 2)
    after = memory.follow(x, start, is_first)
    torch.testing.assert_close(after, by_steps, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad((by_steps * target).sum(), [*parameters, x, start])
    found = torch.autograd.grad((after * target).sum(), [*parameters, x, start])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@every_kind
def test_nothing_before_the_start_of_an_episode_counts(kind: MemoryName) -> None:
    memory, x, start, _ = built(kind)
    is_first = torch.zeros(SEEDS, BATCH, STEPS, dtype=torch.bool)
    is_first[:, :, 3] = True
    changed = x.clone()
    changed[:, :, :3] += 1.0
    one = memory.follow(x, start, is_first)
    other = memory.follow(changed, 2 * start, is_first)
    assert torch.equal(one[:, :, 3:], other[:, :, 3:])
    assert not torch.isclose(one[:, :, 2], other[:, :, 2]).all()
    fresh = memory.initial(BATCH, x.device)
    torch.testing.assert_close(one[:, :, 3], memory.step(x[:, :, 3], fresh))


@every_kind
def test_seeds_have_layers_of_their_own(kind: MemoryName) -> None:
    memory, x, start, is_first = built(kind)
    alone = Memory(INPUTS, SIZE, Rng((2,), "memory"), kind)
    with torch.no_grad():
        alone.from_input.bias.copy_(memory.from_input.bias[1:2])
    whole = memory.follow(x, start, is_first)[1:2]
    torch.testing.assert_close(
        alone.follow(x[1:2], start[1:2], is_first[1:2]), whole, rtol=1e-5, atol=1e-6
    )
    assert memory.recurrent.shape == (SEEDS, SIZE, GATES[kind] * SIZE)
