"""Numbers of any size as targets: symlog, and distributions over bins that grow exponentially.

`symlog(x) = sign(x) log(|x| + 1)` and its inverse (Robust predictions in arXiv:2301.04104).
A scalar is predicted as the mean of a categorical distribution over bins from `symexp(-20)` to
`symexp(20)`; its target puts weight on the two bins around it so that their mean is the target.
Shapes: K bins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def symlog(x: Tensor) -> Tensor:
    """Compress: the identity near 0, a logarithm far from it."""
    return x.sign() * torch.log1p(x.abs())


def symexp(x: Tensor) -> Tensor:
    """Undo `symlog`."""
    return x.sign() * torch.expm1(x.abs())


class TwoHot(nn.Module):
    """Categorical distributions over `num_bins` numbers that stand for their mean."""

    bins: Tensor

    def __init__(self, num_bins: int, largest: float = 20.0, device: torch.device | str = "cpu"):
        """Lay out the bins.

        Args:
            num_bins: K, odd, so that one bin is 0.
            largest: symlog of the largest bin.
            device: Where they lie.
        """
        super().__init__()
        assert num_bins % 2 == 1
        self.num_bins = num_bins
        positive = symexp(torch.linspace(0.0, largest, num_bins // 2 + 1, dtype=torch.float64))
        bins = torch.cat((-positive[1:].flip(0), positive)).float().to(device)
        # Not saved: a constant.
        self.register_buffer("bins", bins, persistent=False)

    def start_logits(self) -> Tensor:
        """Return logits `[K]` of a distribution to begin with: mean 0, far bins improbable.

        `-|symlog(bin)|` gives every bin the same share in the mean.  From equal logits a rounding
        error of the largest bin's probability is a thousandfold of a usual reward, until learning
        has made that bin improbable.
        """
        return -symlog(self.bins).abs()

    def mean(self, logits: Tensor) -> Tensor:
        """Return the mean `[...]` of distributions `[..., K]`.

        Bins of opposite sign are taken together: added up one after the other, uniform logits would
        give rounding errors of the largest bin in place of 0.
        """
        middle = self.num_bins // 2
        probs = torch.softmax(logits, -1)
        difference = probs[..., middle + 1 :] - probs[..., :middle].flip(-1)
        return (difference * self.bins[middle + 1 :]).sum(-1)

    def weights(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bin below each number `[...]`, int64, and the weight of the one above it."""
        target = target.clamp(self.bins[0], self.bins[-1])
        below = (torch.bucketize(target, self.bins, right=True) - 1).clamp(0, self.num_bins - 2)
        low, high = self.bins[below], self.bins[below + 1]
        return below, (target - low) / (high - low)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` between the two-hot target `[...]` and `[..., K]`."""
        below, upper = self.weights(target)
        log_probs = functional.log_softmax(logits, -1)
        places = torch.stack((below, below + 1), -1)
        low, high = log_probs.gather(-1, places).unbind(-1)
        return -torch.lerp(low, high, upper)
