"""Signs that a run diverges, read off the figures of its log.

They cost nothing during updates and change nothing: a run is told of each sign once, and continues.
Bounds are wide, so that runs that learn say nothing; what is not finite is an error instead,
see `diagnostics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

VALUES = ("q_mean", "q_value_mean", "target_q_mean", "target_mean", "value_mean")
"""Metrics that are values of states or actions."""
TRIVIAL = 1000.0
"""Values below this are not looked at: few tasks have returns so small that they would matter."""
SLACK = 10.0
"""How many times the largest return that the rewards allow a value may be; entropy adds to it."""
UNBOUNDED = 1e9
"""Values above this are a sign where the rewards or the discount set no bound."""
LARGEST_KL = 0.5
LEAST_ENTROPY = 1e-3


class Monitors:
    """Remembers what was said, so that it is said once."""

    def __init__(
        self, gamma: float, largest_reward: Callable[[], float | None], *, one_epoch: bool = False
    ) -> None:
        """Begin to watch.

        Args:
            gamma: Discount of the learner.
            largest_reward: Gives the largest |reward| learned from, None where that is not known;
                asked for only when values are large.
            one_epoch: A rollout is gone through once, so that its policy may be the current one.
        """
        self._gamma, self._largest_reward = gamma, largest_reward
        self._one_epoch = one_epoch
        self._said: set[str] = set()

    def look(self, rows: Sequence[Mapping[str, float]]) -> list[str]:
        """Return a sentence for each new sign in the rows of a log, one per seed."""
        signs: list[str] = []
        for row in rows:
            for kind, text in self.signs(row).items():
                if kind not in self._said:
                    self._said.add(kind)
                    signs.append(text)
        return signs

    def signs(self, row: Mapping[str, float]) -> dict[str, str]:
        """Return what a row shows, by kind of sign."""
        signs = self._values(row) | _policy(row)
        if self._one_epoch:
            signs.pop("dead", None)
        return signs

    def _values(self, row: Mapping[str, float]) -> dict[str, str]:
        largest = max(((abs(row[name]), name) for name in VALUES if name in row), default=(0.0, ""))
        if largest[0] <= TRIVIAL or largest[0] <= (bound := self._bound()):
            return {}
        return {
            "values": f"{largest[1]} is {row[largest[1]]:.3g}, beyond {bound:.3g}, {SLACK:g} times "
            "what the rewards allow: the values explode; lower learning_rate, update targets more "
            "slowly, or scale the rewards"
        }

    def _bound(self) -> float:
        reward = self._largest_reward() if self._gamma < 1 else None
        return UNBOUNDED if reward is None else SLACK * max(reward, 1.0) / (1 - self._gamma)


def _policy(row: Mapping[str, float]) -> dict[str, str]:
    """Signs of methods that learn from rollouts of their own policy, which report a KL."""
    if "approx_kl" not in row:
        return {}
    signs = {}
    if row["approx_kl"] > LARGEST_KL:
        signs["kl"] = (
            f"approx_kl is {row['approx_kl']:.3g}, above {LARGEST_KL}: the policy leaps at each "
            "rollout; set target_kl, or lower learning_rate or update_epochs"
        )
    if row["approx_kl"] == 0.0 and row.get("clip_fraction") == 0.0:
        signs["dead"] = (
            "approx_kl and clip_fraction are zero: the policy gets no gradient; look at the "
            "rewards and the scale of the observations"
        )
    if 0.0 <= row.get("entropy", math.inf) < LEAST_ENTROPY:
        signs["entropy"] = (
            f"entropy is {row['entropy']:.3g}: the policy has stopped exploring; raise ent_coef"
        )
    return signs


def largest_reward(replay: Any) -> float | None:
    """Return the largest |reward| in a replay whose rows are in memory."""
    rows = getattr(replay, "rows", None)
    if not isinstance(rows, Mapping) or not isinstance(rows.get("reward"), Tensor):
        return None
    reward: Tensor = rows["reward"]
    return float(reward.abs().max()) if reward.numel() else None
