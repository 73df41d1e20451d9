"""An encoder that the user wrote for one network, with the seed axis added around it.

The user's function makes a plain module `[B, ...] -> [B, E]`.  It is called once per seed, with
PyTorch's generator seeded by ours; parameters are stacked to `[S, ...]`, so that optimizers,
targets and checkpoints see what they see of any network, and a forward pass goes through the seeds
one after the other.  Shapes: S seeds, B batch, E embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rl_training.errors import SpecMismatch, described
from rl_training.models.layers import StackedMLP
from rl_training.models.rows import split
from rl_training.observations import ObservationSpec
from rl_training.rng import Rng
from rl_training.state import transient

Shape: TypeAlias = tuple[int, ...] | dict[str, tuple[int, ...]]
"""Shape of an observation; by name where it has several parts."""
EncoderFunction = Callable[[Any], nn.Module]
"""Makes the encoder of one network from the `Shape` of an observation."""
_TRIED = 3
"""Observations of a trial; no other size that occurs, so that a wrong axis shows."""


class StackedEncoder(nn.Module):
    """S modules of one kind: parameters `[S, ...]` under the names that the user's module has."""

    def __init__(
        self,
        make: EncoderFunction,
        obs_shape: Sequence[int],
        obs_dtype: str,
        rng: Rng,
        name: str,
        parts: ObservationSpec | None = None,
    ) -> None:
        """Make one module per seed and stack them.

        Args:
            make: The user's function.
            obs_shape: Shape of an observation.
            obs_dtype: Its type; uint8 images are shown as numbers in [0, 1].
            rng: Source of the initial weights; its number of seeds is S.
            name: How a message calls the function.
            parts: What a row holds, where observations are of several parts: the function takes
                the shapes of the parts by name, its module their values by name.

        Raises:
            SpecMismatch: When the function fails, or its module is none that can be trained here.
        """
        super().__init__()
        self.scale, self.parts = 1 / 255 if obs_dtype == "uint8" else None, parts
        shape, on_meta = _shown_shape(obs_shape, parts), rng.device.type == "meta"
        modules = []
        for seed in rng.foreign_seeds():
            with _own_generator(seed):
                module, width = (
                    _outlined(make, shape, name) if on_meta else _made(make, shape, name)
                )
            modules.append(module.to(rng.device))
        self.obs_dim = math.prod(obs_shape) if parts is None else parts.num_floats
        self.embedding_dim = width
        self.network = modules[0]
        for kind in ("_parameters", "_buffers"):
            _stack_into(modules, kind)

    def forward(self, obs: Tensor) -> Tensor:
        """Embed observations `[S, B, ...]`, giving `[S, B, E]`."""
        held = _places(self.network)
        embedded = []
        for seed, shown in enumerate(self._by_seed(obs)):
            own = {name: tensor[seed] for name, tensor in held.items()}
            # Ties are among the places; tied once more, PyTorch would not put them back.
            embedded.append(functional_call(self.network, own, (shown,), tie_weights=False))
        return torch.stack(embedded).float()

    def _by_seed(self, obs: Tensor) -> list[Tensor] | list[dict[str, Tensor]]:
        """Return what the module of each seed is shown."""
        if self.parts is None:
            x = obs.to(torch.float32)
            return list((x if self.scale is None else x * self.scale).unbind(0))
        values = split(self.parts, obs)
        shown = {}
        for leaf in self.parts.leaves:
            scale = 1 / 255 if leaf.kind == "image" and leaf.dtype == "uint8" else 1.0
            if leaf.kind != "mask":
                shown[leaf.name] = values[leaf.name].to(torch.float32) * scale
        return [{name: value[seed] for name, value in shown.items()} for seed in range(len(obs))]


class EncodedMLP(nn.Module):
    """An encoder, and layers that read its features together with other inputs."""

    def __init__(self, encoder: nn.Module, layers: StackedMLP) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, layers

    def forward(
        self, obs: Tensor, *beside: Tensor, members: Tensor | slice | None = None
    ) -> Tensor:
        """Map observations `[S, B, ...]` and vectors `[S, B, I]` to `[S, *members, B, O]`."""
        features: Tensor = self.encoder(obs)
        return self.layers.forward(torch.cat((features, *beside), -1), members)


class LentEncoder(nn.Module):
    """The features of another network's encoder, which is trained there and not from here.

    Its parameters are those of that network alone.  A copy of what reads them reads the same
    encoder, unless that is copied along.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self._lender = transient(encoder)  # a part of the lender, saved there
        self.obs_dim, self.embedding_dim = encoder.obs_dim, encoder.embedding_dim

    def forward(self, obs: Tensor) -> Tensor:
        """Embed observations `[S, B, ...]`, giving `[S, B, E]`, without a gradient."""
        with torch.no_grad():
            features: Tensor = self._lender.value(obs)
        return features

    def __deepcopy__(self, memo: dict[int, Any]) -> LentEncoder:
        """Read the copy of the encoder where there is one."""
        return LentEncoder(memo.get(id(self._lender.value), self._lender.value))


class EncodedFeatures(nn.Module):
    """An encoder and the hidden layers after it, as one encoder."""

    def __init__(self, encoder: Any, layers: nn.Module, embedding_dim: int) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, layers
        self.obs_dim, self.embedding_dim = encoder.obs_dim, embedding_dim

    def forward(self, obs: Tensor) -> Tensor:
        """Embed observations `[S, B, ...]`, giving `[S, B, E]`."""
        embedding: Tensor = self.layers(self.encoder(obs))
        return embedding


@contextmanager
def _own_generator(seed: int) -> Iterator[None]:
    """Let the initial weights of PyTorch's layers depend on the seed, and nothing on their draw."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _called(shape: Shape) -> str:
    """Describe what a module is given."""
    if isinstance(shape, tuple):
        return f"[batch, {', '.join(map(str, shape))}] float32"
    parts = ", ".join(f"{name} {['batch', *part]}" for name, part in shape.items())
    return f"a dict of float32 tensors ({parts})"


def _shown_shape(obs_shape: Sequence[int], parts: ObservationSpec | None) -> Shape:
    if parts is None:
        return tuple(obs_shape)
    return {leaf.name: leaf.row_shape for leaf in parts.leaves if leaf.kind != "mask"}


def _zeros(shape: Shape) -> Tensor | dict[str, Tensor]:
    """Return a few observations to try a module on."""
    if isinstance(shape, tuple):
        return torch.zeros(_TRIED, *shape)
    return {name: torch.zeros(_TRIED, *part) for name, part in shape.items()}


def _made(make: EncoderFunction, shape: Shape, name: str) -> tuple[nn.Module, int]:
    """Make a module that can be trained here; returns the width of its features too."""
    with torch.device("cpu"):
        module, width = _tried(make, shape, name)
        _require_function(module, shape, name)
    return module, width


def _outlined(make: EncoderFunction, shape: Shape, name: str) -> tuple[nn.Module, int]:
    """Make a module without memory, or, where it needs numbers to be made, with it."""
    try:
        with torch.device("meta"):
            return _tried(make, shape, name)
    except SpecMismatch:
        return _made(make, shape, name)


def _tried(make: EncoderFunction, shape: Shape, name: str) -> tuple[nn.Module, int]:
    """Make a module and show it a few observations; returns the width of its features too."""
    try:
        module: object = make(shape)
    except (Exception, SystemExit) as error:
        raise SpecMismatch(
            f"encoder {name} failed for observations of shape {shape} ({described(error)}); it "
            "takes that shape and returns a torch.nn.Module"
        ) from error
    if not isinstance(module, nn.Module):
        raise SpecMismatch(
            f"encoder {name} must return a torch.nn.Module, got {type(module).__name__}"
        )
    try:
        with torch.no_grad():
            features: object = module(_zeros(shape))
    except (Exception, SystemExit) as error:
        raise SpecMismatch(
            f"encoder {name} failed on {_TRIED} observations of shape {shape} "
            f"({described(error)}); its module takes {_called(shape)} "
            "and returns [batch, features]"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or features.shape[0] != _TRIED:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise SpecMismatch(
            f"encoder {name} must return features [batch, n], got {got} for a batch of {_TRIED}; "
            "end it with torch.nn.Flatten()"
        )
    wrong = [n for n, p in module.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise SpecMismatch(f"encoder {name}: parameter {wrong[0]} must be float32")
    return module, features.shape[1]


def _require_function(module: nn.Module, shape: Shape, name: str) -> None:
    """Refuse a module that draws random numbers or remembers what it was shown.

    An update is repeatable, and a seed trains in a group as it does alone; PyTorch's generator,
    which dropout draws from, and running statistics are in no checkpoint of ours.
    """
    before = {key: tensor.clone() for key, tensor in module.named_buffers()}
    drawn = torch.get_rng_state()
    with torch.no_grad():
        module(_zeros(shape))
    if not torch.equal(drawn, torch.get_rng_state()):
        raise SpecMismatch(
            f"encoder {name} draws random numbers when it is called, which no checkpoint could "
            "repeat; leave dropout and noise out"
        )
    changed = [key for key, old in before.items() if not _same(old, module.get_buffer(key))]
    if changed:
        raise SpecMismatch(
            f"encoder {name} changes its buffer {changed[0]} when it is called, which an update "
            "may not; use LayerNorm or GroupNorm in place of running statistics"
        )


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _places(network: nn.Module) -> dict[str, Tensor]:
    """Return every place of a module and its parts that holds a tensor, each part once."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, owner in network.named_modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    }


def _stack_into(modules: Sequence[nn.Module], kind: str) -> None:
    """Replace parameters or buffers of the first module by those of all, `[S, ...]`."""
    # With the tensor itself, so that it lives on: the number of one that is gone may come again.
    stacked: dict[int, tuple[Tensor, Tensor]] = {}
    for path, owner in modules[0].named_modules():
        owners: list[Mapping[str, Tensor | None]] = [
            getattr(module.get_submodule(path), kind) for module in modules
        ]
        for name, tensor in list(getattr(owner, kind).items()):
            if tensor is None:
                continue
            if id(tensor) not in stacked:  # one that is used in two places stays one
                parts = [held[name] for held in owners]
                whole = torch.stack([part.detach() for part in parts if part is not None])
                if kind == "_parameters":
                    whole = nn.Parameter(whole, tensor.requires_grad)
                stacked[id(tensor)] = tensor, whole
            getattr(owner, kind)[name] = stacked[id(tensor)][1]
