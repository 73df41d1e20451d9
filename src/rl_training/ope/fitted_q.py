"""Runs fitted Q evaluation: all members of the bootstrap in one batched computation.

Shapes: S members, N rows, E episodes, K actions per state, D entries of an observation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.normalizer import divisor
from rl_training.data.replay.bootstrap import EpisodeBootstrap
from rl_training.ope.fqe import FQE, FQEConfig, ValueUnits, level
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.threads import thread_count

Array = NDArray[Any]
Floats = NDArray[np.float64]
Policy = Callable[[Array], Tensor]
"""From observations `[n, D]` to K actions for each, `[n, K, A]` or `[n, K]` int64."""
OnProgress = Callable[[int, int], None]
"""Called with the updates done and their number."""
MOST_ROWS = 20_000
"""Rows over which Q is looked at in the end; they are spread evenly over the data."""
CHUNK_ROWS = 4_096
LATE = 0.9
"""Share of the updates after which the estimate is read once, to see whether it still moves."""
TOP_SHARE = 0.1
"""Episodes that count as successes in the soft score: those of the highest returns."""
REPORT_EVERY = 50
FEWEST_LEVELS, MOST_LEVELS = 4, 50
"""Times that the level of Q is solved for."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What each member found, in units of the rewards."""

    start_values: Floats
    """Mean Q(s_0, pi(s_0)) over the member's own episodes, `[S]`."""
    late_values: Floats
    """The same, nine tenths of the way through, `[S]`."""
    soft_scores: Floats
    """Mean Q(s, a) over the rows of the best episodes minus that over all rows, `[S]`."""
    q_low: Floats
    """5% quantile of Q(s', pi(s')) over the data, `[S]`."""
    q_high: Floats
    """95% quantile of the same, `[S]`."""


def member_seeds(config: FQEConfig) -> tuple[int, ...]:
    """Return the seed of each member."""
    return tuple(derive_seed(config.seed, "fqe", member) for member in range(config.members))


def fit_members(
    data: OfflineDataset,
    policy: Policy,
    action_dim: int,
    config: FQEConfig,
    *,
    seeds: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Fit:
    """Fit Q of a policy for every member, and read it at the starts of episodes.

    Args:
        data: Transitions in learner units.
        policy: The fixed policy.
        action_dim: Entries of an action, or number of discrete ones.
        config: With a gamma.
        seeds: Of the members; None takes those of `config.seed`.
        device: Where all is computed.
        on_progress: Called now and then.
    """
    members = seeds or member_seeds(config)
    with thread_count(1):  # more would show in the last bits
        return _Fitting(data, policy, action_dim, config, members, device).run(on_progress)


class _Fitting:
    def __init__(
        self,
        data: OfflineDataset,
        policy: Policy,
        action_dim: int,
        config: FQEConfig,
        seeds: tuple[int, ...],
        device: torch.device | str,
    ) -> None:
        assert config.gamma is not None
        self.config, self.gamma, self.seeds = config, config.gamma, seeds
        self.device = torch.device(device)
        self.units = ValueUnits.of(torch.from_numpy(data.returns_to_go(self.gamma)))
        shown = _standardized(data, self.units, self.gamma)
        self.buffer = EpisodeBootstrap(shown, seeds=seeds, gamma=self.gamma, device=self.device)
        self.next_action = policy(data.next_observations).to(self.device)  # [N, K, ...]
        self.starts = torch.from_numpy(data.episode_starts).to(self.device)
        self.start_action = policy(data.observations[data.episode_starts]).to(self.device)
        self.learner = FQE(
            data.observations.shape[1], action_dim, config, seeds=seeds, device=self.device
        )
        self.rows = np.unique(np.linspace(0, len(data) - 1, MOST_ROWS).astype(np.int64))
        returns = data.episode_returns()
        top = returns >= np.quantile(returns, 1 - TOP_SHARE)
        self.in_top = np.repeat(top, data.episode_lengths())[self.rows]
        lengths = torch.from_numpy(data.episode_lengths()).to(self.device)
        self.row_episode = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)

    def run(self, on_progress: OnProgress | None) -> Fit:
        updates = self.config.gradient_steps
        choice = Rng(self.seeds, "policy", self.device)
        late_step = int(LATE * updates)
        levelled = self.level_steps(updates) | {late_step}
        for done in range(updates):
            if done in levelled:
                self.set_level()
            if done == late_step:
                late = self.start_values()
            batch = self.buffer.sample(self.config.batch_size)
            self.learner.update(batch, self.drawn_action(batch.index, choice), done / updates)
            if on_progress is not None and (done + 1) % REPORT_EVERY == 0:
                on_progress(done + 1, updates)
        self.set_level()
        return self.result(late)

    def level_steps(self, updates: int) -> set[int]:
        """Return the updates before which the level of Q is solved for.

        Often, but reading all rows must cost less than learning; a large dataset is read rarely.
        """
        learned = updates * self.config.batch_size
        times = min(max(learned // (4 * len(self.row_episode)), FEWEST_LEVELS), MOST_LEVELS)
        return set(np.linspace(0, updates, times, endpoint=False).astype(int).tolist())

    def set_level(self) -> None:
        """Add to every Q what makes the mean Bellman residual of the member's rows vanish."""
        columns = {name: rows[0] for name, rows in self.buffer.rows.items()}
        gamma = self.gamma * columns["continues"].double()  # [N]
        counts = torch.zeros(len(self.seeds), len(self.starts), device=self.device)
        drawn = torch.ones_like(self.buffer.episodes, dtype=counts.dtype)
        counts.scatter_add_(1, self.buffer.episodes, drawn)  # [S, E]
        here = self.outputs(columns["obs"], columns["action"])
        ahead = self.policy_outputs(columns["next_obs"], self.next_action)
        residual = columns["reward"] + gamma * ahead - here  # [S, N]
        change = level(residual, gamma, counts[:, self.row_episode].double())
        self.learner.offset.add_(change.to(self.learner.offset.dtype))

    def drawn_action(self, index: Tensor | None, choice: Rng) -> Tensor:
        """Take one of the policy's actions at the successors of rows `[S, B]`."""
        assert index is not None
        count = self.next_action.shape[1]
        if count == 1:
            return self.next_action[index, 0]
        return self.next_action[index, choice.integers(count, index.shape[1])]

    def start_values(self) -> Floats:
        obs = self.buffer.rows["obs"][0][self.starts]  # [E, D]
        values = self.policy_values(obs, self.start_action)  # [S, E]
        return _host(values.gather(1, self.buffer.episodes).mean(1))

    def policy_values(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean of Q over K actions, `[S, n]`, for `[n, D]` and `[n, K, ...]`."""
        return self.units.value(self.policy_outputs(obs, action))

    def values(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return Q in units of the rewards, `[S, n]`, for rows that all members share."""
        return self.units.value(self.outputs(obs, action))

    def policy_outputs(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the mean output over K actions, `[S, n]`, for `[n, D]` and `[n, K, ...]`."""
        each = [self.outputs(obs, action[:, k]) for k in range(action.shape[1])]
        return torch.stack(each).mean(0)

    def outputs(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the learner's outputs, `[S, n]`, for rows that all members share."""
        members = len(self.seeds)
        pieces = [
            self.learner.estimate(
                part.expand(members, *part.shape), chosen.expand(members, *chosen.shape)
            )
            for part, chosen in zip(
                torch.split(obs, CHUNK_ROWS), torch.split(action, CHUNK_ROWS), strict=True
            )
        ]
        return torch.cat(pieces, 1).double()

    def result(self, late: Floats) -> Fit:
        rows = torch.from_numpy(self.rows).to(self.device)
        table = {name: column[0][rows] for name, column in self.buffer.rows.items()}
        ahead = self.policy_values(table["next_obs"], self.next_action[rows])
        low, high = np.quantile(_host(ahead), (0.05, 0.95), axis=1)
        taken = _host(self.values(table["obs"], table["action"]))  # [S, rows]
        return Fit(
            start_values=self.start_values(),
            late_values=late,
            soft_scores=taken[:, self.in_top].mean(1) - taken.mean(1),
            q_low=low,
            q_high=high,
        )


def _standardized(data: OfflineDataset, units: ValueUnits, gamma: float) -> OfflineDataset:
    """Return the data as the networks see it."""
    mean, deviation = data.observation_statistics()
    scale = divisor(torch.from_numpy(mean), torch.from_numpy(deviation)).numpy()
    # Exact rewards: in float32 the difference to the centre may lose the digits that matter.
    discount = torch.from_numpy(gamma * ~np.asarray(data.terminations))
    reward = units.reward(torch.from_numpy(np.array(data.rewards, np.float64)), discount)
    return replace(
        data,
        observations=(data.observations - mean) / scale,
        next_observations=(data.next_observations - mean) / scale,
        rewards=reward.float().numpy(),
    )


def _host(values: Tensor) -> Floats:
    array: Floats = values.double().cpu().numpy()
    return array
