"""An ensemble of Gaussian dynamics networks, shared by MOPO, MBPO and PETS.

All members of all seeds run in one batched product per layer.  Each member is the network of PETS
(Chua et al., 2018, App. A.1 of arXiv:1805.12114): swish layers, Gaussian heads for the change of
the observation and the reward, learned soft bounds of the log-variance, inputs standardised.
Shapes: S seeds, M members, B batch, I = obs_dim + action_dim, O = obs_dim + 1.

Deviations: every member has bounds of its own, where the authors' code shares them, so that a
member's best snapshot is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError, SpecMismatch
from rl_training.models.dynamics import (
    Assignment,
    Members,
    mean_disagreement,
    resized,
    sample_gaussian,
)
from rl_training.models.layers import StackedLinear
from rl_training.rng import Rng

WEIGHT_DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
"""Per layer, of four hidden ones and the output, as in the authors' code of PETS and MBPO."""
MAX_LOGVAR, MIN_LOGVAR = 0.5, -10.0


def truncated_normal_init(rng: Rng, members: tuple[int, ...], outputs: int, inputs: int) -> Tensor:
    """Draw weights `[S, *members, I, O]` from N(0, 1 / 4I), cut at two deviations."""
    return rng.truncated_normal(*members, inputs, outputs) / (2 * math.sqrt(inputs))


class MLPMOPOEnsembleModel(nn.Module):
    """Members `(obs, action) -> N(change of obs and reward)`, for S seeds."""

    input_mean: Tensor
    input_scale: Tensor
    elites: Tensor

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (200, 200, 200, 200),
        num_ensembles: int = 7,
        *,
        num_elites: int | None = None,
        learn_logvar_bounds: bool = True,
        learn_terminations: bool = False,
        weight_decay: Sequence[float] = WEIGHT_DECAY,
        rng: Rng | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_dim: Length of an observation.
            action_dim: Length of an action, in learner units.
            hidden_sizes: Widths of the hidden layers.
            num_ensembles: Members M.
            num_elites: Members that roll-outs draw from, those of least hold-out error once
                fitted; None is 5, or all of fewer.
            learn_logvar_bounds: Learn the bounds of the log-variance; otherwise they stay.
            learn_terminations: Add a head for the end of the episode.
            weight_decay: Per layer; stretched to the number of layers where that differs.
            rng: Source of the initial weights; its number of seeds is S.

        Raises:
            ConfigError: For sizes that make no ensemble.
        """
        super().__init__()
        rng = rng or Rng((0,), "model")
        _check_sizes(obs_dim, action_dim, num_ensembles, num_elites)
        self.obs_dim, self.action_dim, self.num_ensembles = obs_dim, action_dim, num_ensembles
        self.num_elites = min(5, num_ensembles) if num_elites is None else num_elites
        self.num_seeds = rng.num_seeds
        outputs = obs_dim + 1
        sizes = (obs_dim + action_dim, *hidden_sizes, 2 * outputs + learn_terminations)
        self.layers = nn.ModuleList(
            StackedLinear(i, o, rng, (num_ensembles,), truncated_normal_init)
            for i, o in pairwise(sizes)
        )
        self.weight_decay = resized(weight_decay, len(self.layers))
        self.learn_terminations, self.learn_logvar_bounds = learn_terminations, learn_logvar_bounds
        lead = (self.num_seeds, num_ensembles, 1, outputs)
        for name, value in (("max_logvar", MAX_LOGVAR), ("min_logvar", MIN_LOGVAR)):
            bound = torch.full(lead, value, device=rng.device)
            self.register_parameter(name, nn.Parameter(bound, requires_grad=learn_logvar_bounds))
        self.max_logvar: nn.Parameter
        self.min_logvar: nn.Parameter
        seen = (self.num_seeds, 1, 1, sizes[0])
        self.register_buffer("input_mean", torch.zeros(seen, device=rng.device))
        self.register_buffer("input_scale", torch.ones(seen, device=rng.device))
        every = torch.arange(self.num_elites, device=rng.device)
        self.register_buffer("elites", every.expand(self.num_seeds, -1).clone())
        self.sampling_rng = Rng(range(self.num_seeds), "dynamics sampling", rng.device)
        """Randomness of `sample_transition` when the caller gives none; not in checkpoints."""

    def members(self, index: Tensor | None = None) -> Members:
        """Return all members, or those of `index` `[S, E]`, ready to run.

        With an index the weights are copied, so take them once per roll-out, not once per step.
        """
        layers = [layer for layer in self.layers if isinstance(layer, StackedLinear)]
        operands = [layer.operands() for layer in layers]
        # Inputs and predictions of three digits would be the model's error; the layers between
        # do nine tenths of the work.
        for end in (0, -1):
            operands[end] = layers[end].weight, layers[end].bias
        weights = [_chosen(weight, index).flatten(0, 1) for weight, _ in operands]
        biases = [_chosen(bias, index).flatten(0, 1) for _, bias in operands]
        return Members(
            tuple(weights),
            tuple(biases),
            _chosen(self.max_logvar, index),
            _chosen(self.min_logvar, index),
            self.input_mean,
            self.input_scale,
        )

    def elite_members(self) -> Members:
        """Return the elites, ready to run."""
        return self.members(self.elites)

    def decays(self) -> dict[Tensor, float]:
        """Return the weight decay of each weight matrix; biases and bounds have none."""
        layers = [layer for layer in self.layers if isinstance(layer, StackedLinear)]
        return {layer.weight: d for layer, d in zip(layers, self.weight_decay, strict=True)}

    def predict_distribution(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log-variances of change of observation and reward, by every member.

        Args:
            obs: `[B, obs_dim]` for one seed, or `[S, B, obs_dim]`.
            actions: `[B, action_dim]` or `[S, B, action_dim]`, in learner units.

        Returns:
            Two tensors `[M, B, obs_dim + 1]`, or `[S, M, B, obs_dim + 1]`.

        Raises:
            SpecMismatch: For other shapes.
        """
        x, alone = self._inputs(obs, actions)
        mean, logvar, _ = self.members()(x.unsqueeze(1))
        return (mean[0], logvar[0]) if alone else (mean, logvar)

    @torch.no_grad()
    def sample_transition(
        self, obs: Tensor, actions: Tensor, *, rng: Rng | None = None
    ) -> dict[str, Tensor]:
        """Draw what may come next, each row from a random elite.

        Args:
            obs: `[B, obs_dim]` for one seed, or `[S, B, obs_dim]`.
            actions: `[B, action_dim]` or `[S, B, action_dim]`, in learner units.
            rng: Whose randomness to use; learners give theirs.

        Returns:
            `next_obs [.., B, obs_dim]`, `rewards [.., B]` and `disagreement [.., B]`, the deviation
            of the members' means averaged over outputs.
        """
        x, alone = self._inputs(obs, actions)
        rng = rng or self.sampling_rng
        everyone = self.members()(x.unsqueeze(1))
        slots = Assignment.draw(rng, x.shape[1], self.num_elites).slot
        whom = Assignment(slots, slots, self.elites.gather(1, slots), self.num_ensembles)
        drawn = sample_gaussian(whom.pick(everyone), rng)
        result = {
            "next_obs": x[..., : self.obs_dim] + drawn[..., :-1],
            "rewards": drawn[..., -1],
            "disagreement": mean_disagreement(everyone.mean),
        }
        return {name: value[0] for name, value in result.items()} if alone else result

    def _inputs(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, bool]:
        """Return `[S, B, I]`, and whether the seed axis was left out."""
        alone = obs.ndim == 2 and self.num_seeds == 1
        lead = obs.shape[:-1] if not alone else (1, obs.shape[0])
        fits = len(lead) == 2 and lead[0] == self.num_seeds and obs.shape[-1] == self.obs_dim
        if not fits or actions.shape != (*obs.shape[:-1], self.action_dim):
            raise SpecMismatch(
                f"the dynamics ensemble takes obs [{self.num_seeds}, B, {self.obs_dim}] and "
                f"actions [{self.num_seeds}, B, {self.action_dim}] (the first axis may be left out "
                f"for one seed), got {tuple(obs.shape)} and {tuple(actions.shape)}"
            )
        return torch.cat((obs, actions), -1).view(*lead, -1), alone


def _chosen(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Members `index` `[S, E]` of `[S, M, ...]`."""
    if index is None:
        return tensor
    seeds = torch.arange(tensor.shape[0], device=tensor.device).unsqueeze(1)
    return tensor[seeds, index]


def _check_sizes(obs_dim: int, action_dim: int, members: int, elites: int | None) -> None:
    if min(obs_dim, action_dim, members) < 1:
        raise ConfigError(
            "obs_dim, action_dim and num_ensembles of the dynamics ensemble must be >= 1, got "
            f"{obs_dim}, {action_dim} and {members}"
        )
    if elites is not None and not 1 <= elites <= members:
        raise ConfigError(
            f"num_elites must be between 1 and num_ensembles = {members}, got {elites}"
        )
