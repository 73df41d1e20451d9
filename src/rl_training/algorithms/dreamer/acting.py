"""What Dreamer remembers while it acts, and how its networks see actions.

Shapes: S seeds, n environments, D deterministic, Z stochastic, A action.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.base import ActingState, Learner
from rl_training.data.batch import SequenceBatch
from rl_training.models.dreamer import DreamerActor, WorldModel
from rl_training.models.rssm import RSSMState
from rl_training.rng import Rng


class DreamerState(ActingState):
    """Of each environment: the belief about where it is, and the last action."""

    def __init__(self, rng: Rng, num_envs: int, deter: int, latent: int, action: int) -> None:
        """Begin with nothing known.

        Args:
            rng: Source of latents and actions; a part of this state.
            num_envs: n.
            deter: D.
            latent: Z.
            action: A.
        """
        self.rng = rng
        lead = (rng.num_seeds, num_envs)
        self.deter = torch.zeros(*lead, deter, device=rng.device)
        self.latent = torch.zeros(*lead, latent, device=rng.device)
        self.action = torch.zeros(*lead, action, device=rng.device)

    @property
    def belief(self) -> RSSMState:
        """The state of the world model."""
        return RSSMState(self.deter, self.latent)

    def advance(self, belief: RSSMState, action: Tensor) -> None:
        """Take the belief and the action of this step."""
        self.deter.copy_(belief.deter)
        self.latent.copy_(belief.latent)
        self.action.copy_(action)


def encode_action(action: Tensor, actor: DreamerActor) -> Tensor:
    """Return actions as the networks see them, `[..., A]`: discrete ones as one-hot vectors."""
    if not actor.discrete:
        return action
    numbers = torch.arange(actor.action_dim, device=action.device)
    return (action.unsqueeze(-1) == numbers).to(torch.float32)


class ActsFromBelief(Learner[SequenceBatch]):
    """A learner that acts on what a world model believes, and learns from sequences."""

    network_names: ClassVar[tuple[str, ...]] = ("world_model", "actor", "critic")
    world_model: WorldModel
    actor: DreamerActor
    batch_class = SequenceBatch

    def initial_acting_state(self, num_envs: int) -> DreamerState:
        """Return what is known before an episode: nothing; and the randomness of acting."""
        rng = Rng(self.seeds, "acting", self.device)
        rssm = self.world_model.rssm
        return DreamerState(rng, num_envs, rssm.deter_size, rssm.latent.size, self.actor.action_dim)

    @torch.no_grad()
    def act_from(self, state: ActingState | None, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Take in `obs` `[S, n, ...]` and act on the belief that follows."""
        assert isinstance(state, DreamerState)
        actor, belief = self.actor, self._believe(state, obs)
        features = belief.features
        if explore:
            action = actor.sample(features, actor.draw_noise(state.rng, obs.shape[1]))
        else:
            action = actor.mode(features)
        action = actor.executed(action)
        state.advance(belief, action)
        return action.argmax(-1) if actor.discrete else action

    @torch.no_grad()
    def follow(self, state: ActingState | None, obs: Tensor, action: Tensor) -> None:
        """Take in `obs` `[S, n, ...]` and remember that `action` was taken there."""
        assert isinstance(state, DreamerState)
        state.advance(self._believe(state, obs), encode_action(action, self.actor))

    def _believe(self, state: DreamerState, obs: Tensor) -> RSSMState:
        """Return the belief after `obs` `[S, n, ...]`."""
        model = self.world_model
        noise = model.rssm.latent.draw_noise(state.rng, obs.shape[1])
        return model.rssm.observe_step(state.belief, state.action, model.encoder(obs), noise)

    def choose(self, obs: Tensor, *, explore: bool = False) -> Tensor:
        """Act on `obs` `[S, n, ...]` as at the start of an episode."""
        return self.act_from(self.initial_acting_state(obs.shape[1]), obs, explore=explore)

    def random_action(self, num_envs: int) -> Tensor:
        """Draw uniformly random actions."""
        if self.actor.discrete:
            return self.rng.integers(self.actor.action_dim, num_envs)
        return self.rng.uniform(num_envs, self.actor.action_dim) * 2 - 1
