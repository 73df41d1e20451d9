"""Randomness that belongs to somebody.

Nothing in the package draws from a global generator.  Each part that needs randomness owns an
`Rng`, which holds one generator per seed, so that a seed draws the same numbers alone or in a
group, and which is part of the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(seed: int, *stream: str | int) -> int:
    """Return a 63-bit seed for a named stream of `seed`; streams are independent of each other."""
    text = "/".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Rng:
    """One generator per seed; every draw has a leading seed axis `[S, ...]`."""

    def __init__(
        self, seeds: Sequence[int], stream: str, device: torch.device | str = "cpu"
    ) -> None:
        """Create the generators.

        Args:
            seeds: One seed per member of the group.
            stream: Name of the owner, so that owners with one seed draw different numbers.
            device: Where the numbers are drawn.
        """
        self.device = torch.device(device)
        self.generators = [
            torch.Generator(self.device).manual_seed(derive_seed(seed, stream)) for seed in seeds
        ]

    @property
    def num_seeds(self) -> int:
        """Number of seeds S."""
        return len(self.generators)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers `[S, *shape]`."""
        return self._join(
            [torch.randn((1, *shape), generator=g, device=self.device) for g in self.generators]
        )

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers in [0, 1), `[S, *shape]`."""
        return self._join(
            [torch.rand((1, *shape), generator=g, device=self.device) for g in self.generators]
        )

    def exponential(self, *shape: int) -> Tensor:
        """Draw exponential numbers of rate 1, `[S, *shape]`."""
        empty = torch.empty((1, *shape), device=self.device)
        return self._join([empty.clone().exponential_(generator=g) for g in self.generators])

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers in [0, high), `[S, *shape]`, int64."""
        return self._join(
            [
                torch.randint(high, (1, *shape), generator=g, device=self.device)
                for g in self.generators
            ]
        )

    def permutation(self, length: int) -> Tensor:
        """Draw a permutation of `length` numbers per seed, `[S, length]`."""
        return self._join(
            [
                torch.randperm(length, generator=g, device=self.device).unsqueeze(0)
                for g in self.generators
            ]
        )

    @staticmethod
    def _join(draws: list[Tensor]) -> Tensor:
        return draws[0] if len(draws) == 1 else torch.cat(draws)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the generators' states `[S, bytes]`."""
        return {"state": torch.stack([g.get_state() for g in self.generators])}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the generators.

        States do not carry over from one kind of device to another: a generator of another kind
        is seeded from the saved state instead.
        """
        for generator, saved in zip(self.generators, state["state"], strict=True):
            if saved.numel() == generator.get_state().numel():
                generator.set_state(saved.cpu().clone())
            else:
                digest = hashlib.sha256(bytes(saved.cpu().tolist())).hexdigest()
                generator.manual_seed(derive_seed(0, digest))
