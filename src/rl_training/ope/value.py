"""What an offline evaluation found, and how several are ranked.

Shapes: S members, E episodes, C checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.experiment.statistics import LEVEL
from rl_training.ope.fitted_q import Fit

Floats = NDArray[np.float64]
SLACK = 0.1
"""How far beyond what the rewards allow Q may lie, as a share of the largest value they allow."""
MOVING = 0.5
"""Share of the interval's width by which a late estimate may still move without a warning."""


@dataclass(frozen=True, kw_only=True)
class OfflineValue:
    """The estimated discounted value of a policy at the starts of a dataset's episodes.

    Figures are None where the fit diverged.
    """

    checkpoint: str
    algo: str
    step: int
    gamma: float
    stochastic: bool
    value: float | None
    """Mean over the members."""
    value_low: float | None
    """Lower end of the 95% percentile interval over the members."""
    value_high: float | None
    member_values: tuple[float, ...] | None
    """One per resample of the episodes; checkpoints with one seed share the resamples."""
    behaviour_value: float
    """Mean discounted return of the recorded episodes, each cut where it ends."""
    behaviour_low: float
    """Lower end of its 95% interval over resampled episodes."""
    behaviour_high: float
    weight_beyond: float
    """Mean gamma^length over truncated episodes and 0 over terminated ones: the share of the
    discount that lies after the recordings, which `value` counts and `behaviour_value` does not."""
    soft_score: float | None
    """Mean Q(s, a) over the best tenth of the episodes minus that over all (arXiv:1906.01624)."""
    drift: float | None
    """How far the estimate moved in the last tenth of the updates."""
    members: int
    updates: int
    episodes: int
    transitions: int
    warning: str | None = None
    """Why not to trust the figures, where there is a reason."""
    probability_best: float | None = None
    """Share of the members in which this checkpoint has the highest value of those compared."""

    @property
    def diverged(self) -> bool:
        """Whether the estimate is missing."""
        return self.value is None

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"diverged": self.diverged}


def reward_range(data: OfflineDataset, gamma: float) -> tuple[float, float]:
    """Return the lowest and the highest discounted value that the data's rewards allow."""
    low, high = float(data.rewards.min()), float(data.rewards.max())
    if data.terminations.any():  # then a sum may stop, even at once
        low, high = min(low, 0.0), max(high, 0.0)
    return low / (1 - gamma), high / (1 - gamma)


def members_outside(fit: Fit, allowed: tuple[float, float]) -> int:
    """Count members whose Q is not finite or leaves the range by more than a slack."""
    slack = SLACK * max(abs(allowed[0]), abs(allowed[1]))
    lowest = np.minimum(fit.start_values, fit.q_low)
    highest = np.maximum(fit.start_values, fit.q_high)
    inside = (lowest >= allowed[0] - slack) & (highest <= allowed[1] + slack)  # false for NaN
    return int((~inside).sum())


def summarize_fit(value: OfflineValue, fit: Fit, data: OfflineDataset) -> OfflineValue:
    """Put the figures of a fit into `value`, or say why there are none."""
    allowed = reward_range(data, value.gamma)
    outside = members_outside(fit, allowed)
    if outside:
        text = (
            f"diverged: in {outside} of {value.members} members Q leaves the range "
            f"[{allowed[0]:.4g}, {allowed[1]:.4g}] that the rewards allow; the policy may act far "
            "from the data; try a lower gamma, a smaller learning rate or tau, or more data"
        )
        return replace(value, warning=text)
    low, high = percentile_ends(fit.start_values)
    drift = float((fit.start_values - fit.late_values).mean())
    warning = None
    if abs(drift) > MOVING * (high - low):
        warning = (
            f"still moving: the estimate changed by {drift:.4g} in the last tenth of the updates; "
            "raise updates"
        )
    return replace(
        value,
        value=float(fit.start_values.mean()),
        value_low=low,
        value_high=high,
        member_values=tuple(fit.start_values.tolist()),
        soft_score=float(fit.soft_scores.mean()),
        drift=drift,
        warning=warning,
    )


def percentile_ends(values: Floats) -> tuple[float, float]:
    """Return the ends of the 95% percentile interval of `[S]`."""
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def weight_beyond(data: OfflineDataset, gamma: float) -> float:
    """Return the mean discount that is left after an episode's recorded end."""
    cut = ~data.terminations[data.episode_stops - 1]
    return float((gamma ** data.episode_lengths() * cut).mean())


def ranked(found: Sequence[OfflineValue]) -> tuple[OfflineValue, ...]:
    """Sort by value, those that diverged last, and compare member by member."""
    sound = [value for value in found if value.member_values is not None]
    if len(sound) > 1:
        table = [value.member_values for value in sound if value.member_values is not None]
        winners = np.argmax(np.array(table), axis=0)  # [S]
        shares = [float((winners == place).mean()) for place in range(len(sound))]
        sound = [
            replace(value, probability_best=share)
            for value, share in zip(sound, shares, strict=True)
        ]
    sound.sort(key=lambda value: -(value.value or 0.0))
    return (*sound, *(value for value in found if value.member_values is None))
