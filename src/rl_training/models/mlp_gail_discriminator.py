"""The discriminator of adversarial imitation: does a pair (s, a) come from the expert?

Its logit is that of "expert": D = sigmoid(logit).  Inputs are the observation, or what an encoder
makes of an image, the action (one-hot where discrete, each part by itself) and, where absorbing
states are learned about, an indicator of them.

Shapes: S seeds, B batch, E features, I inputs, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.models.layers import StackedLinear, tanh
from rl_training.models.mlp_q_network import Encoder
from rl_training.rng import Rng


class MLPGAILDiscriminator(nn.Module):
    """An MLP with tanh between its layers, for S seeds, on vectors or on an encoder's features."""

    action_limit: Tensor

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        discrete: bool,
        action_sizes: Sequence[int] = (),
        encoder: Encoder | None = None,
        spectral_norm: bool = False,
        absorbing: bool = False,
        action_limit: Sequence[float] | None = None,
        rng: Rng | None = None,
    ) -> None:
        """Build the network.

        Args:
            obs_dim: Entries of an observation.
            action_dim: Number of discrete actions, or length of a continuous one.
            hidden_sizes: Widths of the hidden layers; without any, what an observation and what
                an action are worth is only added.
            discrete: Whether actions are whole numbers.
            action_sizes: Numbers of values of the parts of a multi-discrete action.
            encoder: What makes features of observations; None lets the layers read them.
            spectral_norm: Divide each weight of the MLP by its largest singular value
                (arXiv:1802.05957).
            absorbing: Add an input that is 1 in the absorbing state and 0 elsewhere.
            action_limit: Largest size of each entry of a continuous action, to which actions are
                clipped as the environment does; None is 1, the end of the action box.
            rng: Source of the initial weights; its number of seeds is S.
        """
        super().__init__()
        rng = rng or Rng((0,), "discriminator")
        self.obs_dim, self.action_dim, self.discrete = obs_dim, action_dim, discrete
        self.action_sizes = tuple(action_sizes)
        self.absorbing, self.spectral_norm = absorbing, spectral_norm
        features = obs_dim if encoder is None else encoder.embedding_dim
        self.input_dim = features + action_dim + int(absorbing)
        sizes = (self.input_dim, *hidden_sizes, 1)
        layers = [StackedLinear(inputs, outputs, rng) for inputs, outputs in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        self._layers = tuple(layers)
        self.encoder = encoder
        limit = torch.tensor(action_limit or (1.0,), device=rng.device)
        self.register_buffer("action_limit", limit, persistent=False)
        # Estimates of each weight's first singular vectors, which a power iteration improves.
        for index, layer in enumerate(layers if spectral_norm else ()):
            inputs, outputs = layer.weight.shape[1:]
            self.register_buffer(f"left_{index}", _unit(rng.normal(1, inputs)))
            self.register_buffer(f"right_{index}", _unit(rng.normal(1, outputs)))
        for _ in range(8 if spectral_norm else 0):
            self.refresh()

    def embed(self, obs: Tensor) -> Tensor:
        """Return the features of observations, `[S, B, E]`; vectors are their own.

        Those of an encoder have mean 0 and variance 1 in each row: small beside the action they
        would be overlooked, and a free scale would let the encoder evade a gradient penalty.
        """
        if self.encoder is None:
            return obs.float()
        features: Tensor = self.encoder(obs)
        return functional.layer_norm(features, features.shape[-1:])

    def inputs(self, features: Tensor, action: Tensor) -> Tensor:
        """Join features `[S, B, E]` and actions `[S, B, ...]` to `[S, B, I]`.

        A Gaussian policy's actions are those that it drew, and a recording holds those that the
        environment was given: without clipping, the bounds of the box would tell them apart.
        """
        if self.discrete:
            sizes = self.action_sizes or (self.action_dim,)
            numbers = action.unbind(-1) if self.action_sizes else (action,)
            each = [one_hot(*part) for part in zip(numbers, sizes, strict=True)]
            action = torch.cat(each, -1).to(features.dtype)
        else:
            action = action.clamp(-self.action_limit, self.action_limit)
        parts = [features, action]
        if self.absorbing:
            parts.append(torch.zeros_like(features[..., :1]))
        return torch.cat(parts, -1)

    def absorbing_input(self) -> Tensor:
        """Return the input of the absorbing state, `[S, 1, I]`: zeros but for the indicator."""
        weight = self._layers[0].weight
        one = torch.ones(weight.shape[0], 1, 1, device=weight.device)
        # Not by assignment, whose number would be a constant that the compiler does not take.
        return torch.cat((one.new_zeros(one.shape[0], 1, self.input_dim - 1), one), -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[S, B]` of inputs `[S, B, I]`."""
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            dtype = layer.compute_dtype or x.dtype
            weight, bias = self._weight(index).to(dtype), layer.bias.to(dtype)
            x = torch.baddbmm(bias, x.to(dtype), weight)
            if index < last:
                x = tanh(x)
        return x.squeeze(-1).float()

    def input_gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of the logit by its input, `[S, B, I]`.

        Written out, so that a penalty on it needs no second pass of automatic differentiation,
        which the tracer of compiled updates could not follow.
        """
        weights = [self._weight(index) for index in range(len(self._layers))]
        slopes = []
        for layer, weight in zip(self._layers[:-1], weights, strict=False):
            x = torch.tanh(torch.baddbmm(layer.bias, x, weight))
            slopes.append(1 - x * x)  # [S, B, H]
        gradient = weights[-1].mT.expand(-1, x.shape[1], -1)
        for weight, slope in zip(reversed(weights[:-1]), reversed(slopes), strict=True):
            gradient = torch.bmm(gradient * slope, weight.mT)
        return gradient

    @torch.no_grad()
    def refresh(self) -> None:
        """Do one power iteration per layer; nothing without spectral normalisation."""
        for index, layer in enumerate(self._layers if self.spectral_norm else ()):
            left, right = self._singular(index)
            right.copy_(_unit(torch.bmm(left, layer.weight)))
            left.copy_(_unit(torch.bmm(right, layer.weight.mT)))

    def _weight(self, index: int) -> Tensor:
        weight: Tensor = self._layers[index].weight
        if not self.spectral_norm:
            return weight
        left, right = self._singular(index)
        largest = torch.bmm(torch.bmm(left, weight), right.mT)  # [S, 1, 1]
        normalised: Tensor = weight / largest
        return normalised

    def _singular(self, index: int) -> tuple[Tensor, Tensor]:
        """Left `[S, 1, I]` and right `[S, 1, O]` singular vector of a layer's weight."""
        return self.get_buffer(f"left_{index}"), self.get_buffer(f"right_{index}")


def one_hot(number: Tensor, size: int) -> Tensor:
    """Return `number == 0, 1, ... size - 1`, `[..., size]`.

    Not PyTorch's own, which reads the largest number on the host.
    """
    return number.unsqueeze(-1) == torch.arange(size, device=number.device)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)
    return unit
