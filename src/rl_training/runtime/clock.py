"""How far a run is."""

from __future__ import annotations

import torch

from rl_training.state import Counter, Stateful


class Clock(Stateful):
    """Steps done, steps planned, and the best evaluation of each member."""

    def __init__(self, planned: int, num_seeds: int, eval_episodes: int) -> None:
        self.step = Counter()
        self.planned = Counter(planned)
        self.evaluated_at = Counter(-1)
        self.best_return = torch.full((num_seeds,), -torch.inf, dtype=torch.float64)
        self.best_step = torch.full((num_seeds,), -1, dtype=torch.int64)
        shape = (num_seeds, eval_episodes)
        self.last_returns = torch.full(shape, torch.nan, dtype=torch.float64)
