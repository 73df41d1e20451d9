"""Randomness that belongs to somebody.

Nothing in the package draws from a global generator.  Each part that needs randomness owns an
`Rng`, which holds a key per seed, so that a seed draws the same numbers alone or in a group, and a
counter; key and counter are part of the checkpoint.

Numbers are a function of key, counter and position: SplitMix64 (Steele et al., 2014) started at a
hash of key and counter.  So a state is one number, it means the same on every device, and drawing
is tensor arithmetic that can be compiled into the middle of an update.  On a CPU the same
arithmetic runs in NumPy, which starts small operations faster; words are bit-exact, normal and
exponential numbers agree up to rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.state import copy_tensor, require_same_keys

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
"""Step from one position to the next."""
_DRAW = 0xD1342543DE82EF95
"""Step from one draw to the next, before it is hashed."""
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOW32 = (1 << 32) - 1
_BLOCK = 64
"""Draws whose starting points are hashed at once on the host."""


def derive_seed(seed: int, *stream: str | int) -> int:
    """Return a 63-bit seed for a named stream of `seed`; streams are independent of each other."""
    text = "/".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Rng:
    """A counter and one key per seed; every draw has a leading seed axis `[S, ...]`."""

    def __init__(
        self, seeds: Sequence[int], stream: str, device: torch.device | str = "cpu"
    ) -> None:
        """Derive the keys.

        Args:
            seeds: One seed per member of the group.
            stream: Name of the owner, so that owners with one seed draw different numbers.
            device: Where the numbers are drawn.
        """
        self.device = torch.device(device)
        keys = [derive_seed(seed, stream) for seed in seeds]
        self.keys = torch.tensor(keys, device=self.device)  # [S]
        self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.as_tensors = self.device.type != "cpu"
        """Draw by tensor operations; set while an update is traced."""
        self._host_keys = np.array(keys, np.uint64)[:, None]
        self._host_counter = None if self.as_tensors else self.counter.numpy()
        self._starts: tuple[int, Words] = (-1, self._host_keys)
        self._offsets: dict[int, Words] = {}

    @property
    def num_seeds(self) -> int:
        """Number of seeds S."""
        return self.keys.shape[0]

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers `[S, *shape]` (Box & Muller, 1958)."""
        if self.as_tensors:
            words = self._tensor_words(shape)
            radius = (-2 * _tensor_unit(words).log()).sqrt()
            return radius * torch.cos((words & _LOW32).float() * (2 * math.pi / 2**32))
        host = self._words(shape)
        angle = (host & np.uint64(_LOW32)).view(np.int64).astype(np.float32)
        np.cos(np.multiply(angle, np.float32(2 * math.pi / 2**32), out=angle), out=angle)
        radius_host = np.log(_unit(host))
        radius_host *= -2
        return torch.from_numpy(np.multiply(np.sqrt(radius_host, out=radius_host), angle))

    def truncated_normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers cut at two deviations, `[S, *shape]`."""
        inside = math.erf(math.sqrt(2))  # the share of a normal distribution within two deviations
        drawn = torch.erfinv((self.uniform(*shape) * 2 - 1) * inside) * math.sqrt(2)
        return drawn.clamp(-2, 2)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers in [0, 1), `[S, *shape]`."""
        if self.as_tensors:
            return _shift(self._tensor_words(shape), 40).float() * 2**-24
        host = (self._words(shape) >> np.uint64(40)).view(np.int64).astype(np.float32)
        host *= np.float32(2**-24)
        return torch.from_numpy(host)

    def exponential(self, *shape: int) -> Tensor:
        """Draw exponential numbers of rate 1, `[S, *shape]`."""
        if self.as_tensors:
            return -_tensor_unit(self._tensor_words(shape)).log()
        host = np.log(_unit(self._words(shape)))
        return torch.from_numpy(np.negative(host, out=host))

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """Draw integers in [0, high), `[S, *shape]`, int64; `high` < 2^31 may be a 0-d tensor."""
        if self.as_tensors:
            return (_shift(self._tensor_words(shape), 32) * high) >> 32
        host = self._words(shape) >> np.uint64(32)
        host *= np.uint64(int(high))
        host >>= np.uint64(32)
        return torch.from_numpy(host.view(np.int64))

    def permutation(self, length: int, *members: int) -> Tensor:
        """Draw permutations of `length` numbers, `[S, *members, length]`."""
        if self.as_tensors:
            return self._tensor_words((*members, length)).argsort(-1)
        return torch.from_numpy(self._words((*members, length)).view(np.int64).argsort(-1))

    def foreign_seeds(self) -> list[int]:
        """Draw a seed for somebody else's generator per seed, on the host."""
        return [int(word) for word in self.integers(2**31 - 1, 1).flatten()]

    def foresee(self, first: int, draws: int, size: int) -> NDArray[np.uint32]:
        """Return what `integers` will make its numbers of, `[draws, S, size]`; nothing is drawn.

        A word w becomes the integer `w * high >> 32`.

        Args:
            first: Number of the first draw, counted from 0.
            draws: How many draws.
            size: Integers per draw and seed.
        """
        numbers = np.arange(first, first + draws, dtype=np.uint64)
        starts = _mix(self._host_keys + numbers * np.uint64(_DRAW)).T  # [draws, S]
        words = starts[..., None] ^ np.arange(size, dtype=np.uint64)
        words *= np.uint64(_GOLDEN)
        return (_mix(words) >> np.uint64(32)).astype(np.uint32)

    def seek(self, position: int) -> None:
        """Go to a numbered draw, so that what follows does not depend on what was drawn before."""
        self.counter.fill_(position)

    def _words(self, shape: tuple[int, ...]) -> Words:
        """64 random bits each, `[S, *shape]`, on the host."""
        count = math.prod(shape)
        offsets = self._offsets.get(count)
        if offsets is None:
            offsets = np.arange(count, dtype=np.uint64)
            if count <= 65_536:
                self._offsets[count] = offsets
        assert self._host_counter is not None
        block, place = divmod(int(self._host_counter), _BLOCK)
        if block != self._starts[0]:
            draws = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
            self._starts = block, _mix(self._host_keys + draws * np.uint64(_DRAW))  # [S, block]
        self._host_counter += 1
        words = self._starts[1][:, place : place + 1] ^ offsets
        words *= np.uint64(_GOLDEN)
        return _mix(words).reshape(-1, *shape)

    def _tensor_words(self, shape: tuple[int, ...]) -> Tensor:
        """The same words as int64 tensors."""
        start = _tensor_mix(self.keys + self.counter * _signed(_DRAW))
        position = torch.arange(math.prod(shape), device=self.device)
        self.counter += 1
        words = _tensor_mix((start.unsqueeze(1) ^ position) * _signed(_GOLDEN))
        return words.view(-1, *shape)

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys `[S]` and counter."""
        return {"keys": self.keys.clone(), "counter": self.counter.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore keys and counter, whatever device they were saved on."""
        require_same_keys(self.state_dict(), state, "Rng")
        copy_tensor(self.keys, state["keys"], "Rng.keys")
        copy_tensor(self.counter, state["counter"], "Rng.counter")
        self._host_keys = state["keys"].cpu().numpy().astype(np.uint64)[:, None]
        self._starts = -1, self._host_keys


class ShapeRng(Rng):
    """Draws shapes without numbers, on the device `meta`, which has no memory.

    Everything a network draws when it is built has a shape; building one from this tells how large
    it is.
    """

    def __init__(self, num_seeds: int, most_draws: int) -> None:
        """Allow so many draws.

        Args:
            num_seeds: Seeds S.
            most_draws: How many draws there may be before `TooManyDrawsError`.
        """
        super().__init__(range(num_seeds), "shapes", "meta")
        self._left = most_draws

    def foreign_seeds(self) -> list[int]:
        """Return any seeds: what is drawn by them has a shape and no numbers."""
        return [0] * self.num_seeds

    def _tensor_words(self, shape: tuple[int, ...]) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise TooManyDrawsError
        return torch.empty((self.num_seeds, *shape), dtype=torch.int64, device=self.device)


class TooManyDrawsError(Exception):
    """More was drawn than a `ShapeRng` allows."""


def _mix(words: Words) -> Words:
    """The finaliser of SplitMix64, in place."""
    for shift, factor in _MIX:
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words


def _tensor_mix(words: Tensor) -> Tensor:
    for shift, factor in _MIX:
        words = (words ^ _shift(words, shift)) * _signed(factor)
    return words ^ _shift(words, 31)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; the tensor operation fills with the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unit(words: Words) -> NDArray[np.float32]:
    """Numbers in (0, 1] from the upper half of each word."""
    upper = (words >> np.uint64(32)).view(np.int64).astype(np.float32)
    upper += np.float32(1)
    upper *= np.float32(2**-32)
    return upper


def _tensor_unit(words: Tensor) -> Tensor:
    return (_shift(words, 32).float() + 1) * 2**-32
