"""A recurrent layer for S seeds, by which a policy remembers what it saw earlier in an episode.

GRU (Cho et al., 2014, arXiv:1406.1078) or LSTM (Hochreiter and Schmidhuber, 1997,
doi:10.1162/neco.1997.9.8.1735, with the forget gate of Gers et al., 2000).  What it remembers is
one row `[S, B, M]`: the output h of a GRU, h and the cell c of an LSTM side by side.
Shapes: S seeds, B batch, T steps, I inputs, H outputs, M entries of a memory, G gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rl_training.models.layers import StackedLinear, orthogonal_init
from rl_training.models.scan import Tensors, scan
from rl_training.rng import Rng

MemoryName: TypeAlias = Literal["gru", "lstm"]
GATES = {"gru": 3, "lstm": 4}
FORGET_BIAS = 1.0
"""Of an LSTM's forget gate, so that it begins by remembering (Jozefowicz et al., 2015)."""


@dataclass(frozen=True)
class Remember:
    """A step: the state and (share of the input, keep) to the state; nothing else comes out.

    Where `keep` is 0 the past is forgotten.
    """

    kind: MemoryName

    def __call__(
        self, state: Tensors, inputs: Tensors, weights: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `rl_training.models.scan.Step`."""
        (share, keep), (weight,) = inputs, weights
        kept = tuple(part * keep for part in state)
        return (gru if self.kind == "gru" else lstm)(kept, share, weight), ()


def gru(state: Tensors, share: Tensor, weight: Tensor) -> Tensors:
    """Return h' = u h + (1 - u) tanh(x_c + r (W_c h)) with r, u = sigmoid(x + W h).

    Args:
        state: h, `[S, B, H]`.
        share: x of each gate, which the inputs and biases give, `[S, B, 3 H]`.
        weight: W of each gate, `[S, H, 3 H]`.
    """
    (h,) = state
    reset, update, candidate = share.chunk(3, -1)
    own_reset, own_update, own_candidate = product(h, weight).chunk(3, -1)
    change = torch.tanh(candidate + torch.sigmoid(reset + own_reset) * own_candidate)
    return (torch.lerp(change, h, torch.sigmoid(update + own_update)),)


def lstm(state: Tensors, share: Tensor, weight: Tensor) -> Tensors:
    """Return h' = o tanh(c') and c' = f c + i tanh(g), gates as for `gru` but all of h.

    Args:
        state: h and c, `[S, B, H]` each.
        share: x of each gate, `[S, B, 4 H]`.
        weight: W of each gate, `[S, H, 4 H]`.
    """
    h, c = state
    into, forget, change, out = (share + product(h, weight)).chunk(4, -1)
    cell = torch.sigmoid(forget) * c + torch.sigmoid(into) * torch.tanh(change)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def product(h: Tensor, weight: Tensor) -> Tensor:
    """Return `[S, B, H]` times `[S, H, O]` in the format of the weight, as that of the state."""
    return torch.bmm(h.to(weight.dtype), weight).to(h.dtype)


class Memory(nn.Module):
    """A recurrent layer with orthogonal weights."""

    def __init__(self, inputs: int, size: int, rng: Rng, kind: MemoryName = "lstm") -> None:
        """Build the layer.

        Args:
            inputs: I.
            size: H.
            rng: Source of the initial weights; its number of seeds is S.
            kind: `gru` or `lstm`.
        """
        super().__init__()
        self.kind: MemoryName = kind
        self.output_dim, self.num_seeds = size, rng.num_seeds
        self.state_size = size * self._parts
        init = orthogonal_init(1.0)
        self.from_input = StackedLinear(inputs, GATES[kind] * size, rng, init=init)
        # Without a bias: that of the inputs serves both products.
        self.recurrent = nn.Parameter(init(rng, (), GATES[kind] * size, size))
        if kind == "lstm":
            with torch.no_grad():
                self.from_input.bias[..., size : 2 * size] = FORGET_BIAS

    @property
    def _parts(self) -> int:
        return 1 if self.kind == "gru" else 2

    def initial(self, batch: int, device: torch.device) -> Tensor:
        """Return what is remembered at the start of an episode: zeros `[S, B, M]`."""
        return torch.zeros(self.num_seeds, batch, self.state_size, device=device)

    def output(self, memory: Tensor) -> Tensor:
        """Return what other layers read of a memory `[..., M]`: h, `[..., H]`."""
        return memory[..., : self.output_dim]

    def _weight(self) -> Tensor:
        weight, dtype = self.recurrent, self.from_input.compute_dtype
        return weight if dtype is None else weight.to(dtype)

    def step(self, x: Tensor, memory: Tensor) -> Tensor:
        """Take in one input `[S, B, I]`; returns the new memory `[S, B, M]`."""
        share = self.from_input(x).to(memory.dtype)
        keep = torch.ones_like(memory[..., :1])
        state = memory.chunk(self._parts, -1)
        return torch.cat(Remember(self.kind)(state, (share, keep), (self._weight(),))[0], -1)

    def follow(self, x: Tensor, memory: Tensor, is_first: Tensor) -> Tensor:
        """Take in a sequence.

        Args:
            x: Inputs `[S, B, T, I]`.
            memory: Before the first of them, `[S, B, M]`.
            is_first: Where an episode begins, and the past is forgotten, `[S, B, T]`.

        Returns:
            The memory after each input, `[S, B, T, M]`.
        """
        seeds, batch, steps, _ = x.shape
        share: Tensor = self.from_input(x.flatten(1, 2)).to(memory.dtype)
        keep = (~is_first).to(memory.dtype).unsqueeze(-1)
        inputs = (share.view(seeds, batch, steps, -1), keep)
        outputs = scan(
            Remember(self.kind),
            tuple(part.contiguous() for part in memory.chunk(self._parts, -1)),
            tuple(part.permute(2, 0, 1, 3) for part in inputs),
            (self._weight(),),
        )
        return torch.cat(outputs.states, -1).permute(1, 2, 0, 3)


class Recurrent:
    """What networks with a memory do: take in an observation, or sequences of them."""

    memory: Memory
    embed: Any  # observations `[S, B, ...]` to what the memory reads, `[S, B, I]`

    def remember(self, obs: Tensor, memory: Tensor) -> Tensor:
        """Take in one observation `[S, B, ...]`; returns the new memory `[S, B, M]`."""
        return self.memory.step(self.embed(obs), memory)

    def follow(self, obs: Tensor, memory: Tensor, is_first: Tensor) -> Tensor:
        """Take in sequences of observations.

        Args:
            obs: `[S, B, T, ...]`.
            memory: Before the first of them, `[S, B, M]`.
            is_first: Where an episode begins, `[S, B, T]`.

        Returns:
            The memory after each, `[S, B, T, M]`.
        """
        features = self.embed(obs.flatten(1, 2))
        return self.memory.follow(features.unflatten(1, obs.shape[1:3]), memory, is_first)
