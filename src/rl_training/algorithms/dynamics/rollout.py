"""Roll-outs of a policy inside the dynamics ensemble.

Trajectory sampling of PETS (Chua et al., 2018, Sec. 5.1 of arXiv:1805.12114): TS1 draws a new elite
for each row at each step, TSinf keeps one per row.  Where no penalty is asked for, only the elite
of a row runs, a fraction 1 / elites of the work; a penalty runs all members once.
Shapes: S seeds, B starts, H steps, D observation, A action, M members, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from rl_training.errors import ConfigError
from rl_training.models.dynamics import (
    Assignment,
    Members,
    Prediction,
    max_aleatoric,
    max_mean_deviation,
    mean_disagreement,
    sample_gaussian,
    take_rows,
)
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.rng import Rng

Policy = Callable[[Tensor], Tensor]
"""Observations `[S, B, D]` to actions `[S, B, A]` in learner units."""
TransitionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of `obs [S, B, D], action [S, B, A], next_obs [S, B, D]` in learner units; gives `[S, B]`."""
Sampling = Literal["ts1", "tsinf"]
Penalty = Literal["aleatoric", "mean_deviation", "disagreement", "none"]


def uncertainty(kind: Penalty, predicted: Prediction, obs_dim: int) -> Tensor:
    """Return how little is known `[S, B]`, from the predictions of all members `[S, M, B, O]`."""
    if kind == "aleatoric":
        return max_aleatoric(predicted.logvar)
    if kind == "mean_deviation":
        return max_mean_deviation(predicted.mean[..., :obs_dim])
    return mean_disagreement(predicted.mean)


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """Imagined transitions `[S, K, ...]`; of a roll-out K = H B, step after step."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    """Without any penalty."""
    next_obs: Tensor
    terminated: Tensor
    """The episode ends here, `bool`; the end of a roll-out is none."""
    valid: Tensor
    """The row counts, `bool`: false after an imagined end, and where a number is not finite."""
    penalty: Tensor
    member: Tensor
    """Which member made the row, `int64`."""

    def valid_first(self) -> tuple[Imagined, Tensor]:
        """Sort the rows that count to the front, in order; also returns how many, `[S]`."""
        order = (~self.valid).to(torch.int8).argsort(dim=1, stable=True)
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: take_rows(part, order) if part.ndim == 3 else part.gather(1, order)
            for name, part in parts.items()
        }
        return Imagined(**moved), self.valid.sum(1)


class ModelEnv:
    """The ensemble as an environment for many rows at once."""

    def __init__(
        self,
        model: MLPMOPOEnsembleModel,
        rng: Rng,
        *,
        sampling: Sampling = "ts1",
        penalty: Penalty = "none",
        termination: TransitionFunction | None = None,
        reward: TransitionFunction | None = None,
    ) -> None:
        """Take the parts together.

        Args:
            model: The ensemble; its weights are read anew by every roll-out.
            rng: Source of the randomness, usually the learner's.
            sampling: A new elite each step, or one per row for the whole roll-out.
            penalty: See `uncertainty`; `none` is 0.
            termination: When episodes end; None is the model's own head, or never without one.
            reward: A known reward in place of the learned one.

        Raises:
            ConfigError: When the reward is neither known nor learned.
        """
        if reward is None and not model.learn_reward:
            raise ConfigError(
                "the dynamics ensemble does not learn the reward (model_learn_reward is false), "
                "and none is known; set reward_function, or let it learn the reward"
            )
        self.model, self.rng, self.sampling, self.penalty = model, rng, sampling, penalty
        self.termination, self.reward = termination, reward

    def members(self) -> Members:
        """Take the weights that `step` needs: all members for a penalty, else the elites."""
        return self.model.elite_members() if self.penalty == "none" else self.model.members()

    def assign(self, rows: int) -> Assignment:
        """Draw an elite for each row."""
        return Assignment.draw(self.rng, rows, self.model.num_elites)

    @torch.no_grad()
    def step(
        self, obs: Tensor, action: Tensor, assignment: Assignment, members: Members
    ) -> Imagined:
        """Draw one transition of every row `[S, B, ...]`."""
        x = torch.cat((obs, action), -1)
        elite = self.model.elites.gather(1, assignment.slot)  # [S, B]
        predicted, penalty = self._predict(x, elite, assignment, members)
        drawn = sample_gaussian(predicted, self.rng)
        next_obs = self.model.next_obs(obs, drawn)
        # Without a known reward the model has one.
        known = self.reward
        reward = drawn[..., -1] if known is None else known(obs, action, next_obs)
        finite = torch.isfinite(next_obs).all(-1) & torch.isfinite(reward)
        return Imagined(
            obs=obs,
            action=action,
            reward=reward,
            next_obs=next_obs,
            terminated=self._ends(obs, action, next_obs, predicted),
            valid=finite,
            penalty=penalty,
            member=elite,
        )

    def _predict(
        self, x: Tensor, elite: Tensor, assignment: Assignment, members: Members
    ) -> tuple[Prediction, Tensor]:
        if self.penalty == "none":
            return assignment(members, x), x.new_zeros(x.shape[:2])
        everyone = members(x.unsqueeze(1))
        whom = Assignment(assignment.order, assignment.place, elite, members.count)
        return whom.pick(everyone), uncertainty(self.penalty, everyone, self.model.obs_dim)

    def _ends(self, obs: Tensor, action: Tensor, next_obs: Tensor, predicted: Prediction) -> Tensor:
        if self.termination is not None:
            return self.termination(obs, action, next_obs)
        if predicted.terminal is not None:
            return predicted.terminal > 0
        return torch.zeros(obs.shape[:2], dtype=torch.bool, device=obs.device)

    @torch.no_grad()
    def rollout(self, obs: Tensor, policy: Policy, horizon: int) -> Imagined:
        """Follow `policy` from `obs` `[S, B, D]` for `horizon` steps; nothing is read back.

        A row that ended keeps its place, standing still and not `valid`, so that shapes are fixed.
        """
        members, assignment = self.members(), self.assign(obs.shape[1])
        alive = torch.ones(obs.shape[:2], dtype=torch.bool, device=obs.device)
        steps: list[Imagined] = []
        for index in range(horizon):
            if index and self.sampling == "ts1":
                assignment = self.assign(obs.shape[1])
            made = self.step(obs, policy(obs), assignment, members)
            alive = alive & made.valid
            parts = {field.name: getattr(made, field.name) for field in fields(made)}
            steps.append(Imagined(**parts | {"valid": alive}))
            alive = alive & ~made.terminated
            obs = torch.where(alive.unsqueeze(-1), made.next_obs, obs)
        return Imagined(
            **{
                field.name: torch.cat([getattr(step, field.name) for step in steps], 1)
                for field in fields(Imagined)
            }
        )
