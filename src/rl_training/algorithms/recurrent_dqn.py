"""Recurrent DQN: Q-values of what a recurrent layer remembers (DRQN, R2D2).

Hausknecht and Stone (2015, arXiv:1507.06527) put the layer into DQN; replayed sequences with a
burn-in and stored memories are those of Kapturowski et al. (2019, R2D2).  The loss, the target
network, double and dueling are DQN's.

Deviations: of R2D2, uniform draws instead of priorities, targets without its rescaling of values,
    one actor with a falling epsilon, which is the only exploration, gradients through the burn-in;
    a stored memory is the one that the learner had when it last learned from the step, not the
    actor's; the layer reads observations alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from rl_training.algorithms.base import StepOutput
from rl_training.algorithms.config import part_of
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.dqn import SPEC as DQN_SPEC
from rl_training.algorithms.pixel_config import PixelConfig, shared_encoder
from rl_training.algorithms.unrolled import MemoryReplay, MemorySettings, learn_unrolled
from rl_training.algorithms.value_based import EpsilonGreedy, ValueBasedConfig
from rl_training.data.batch import SequenceBatch, TransitionBatch
from rl_training.envs.spec import EnvSpec
from rl_training.models.recurrent_mlp import RecurrentQNetwork
from rl_training.rng import Rng
from rl_training.validation import Settings


class RecurrentDQN(DQN):
    """DQN on sequences, by a network that remembers.

    A row is what the network and its target remember, side by side, and the mask of actions.
    """

    parts: ClassVar[tuple[type[Settings], ...]] = (
        MemorySettings,
        EpsilonGreedy,
        PixelConfig,
        MemoryReplay,
    )
    batch_class = SequenceBatch
    q_network: RecurrentQNetwork
    target_network: RecurrentQNetwork

    @property
    def memory_network(self) -> RecurrentQNetwork:
        """The network itself."""
        return self.q_network

    @property
    def belief_size(self) -> int:
        """Entries of its memory."""
        return self.q_network.memory.state_size

    @property
    def serial_steps(self) -> int:
        """Those of a sequence."""
        return self.part(MemoryReplay).batch_length

    def learn(self, batch: TransitionBatch | SequenceBatch) -> StepOutput:
        """Do DQN's update on the steps of sequences."""
        return learn_unrolled(self, batch, (self.q_network,), self.target_network)

    def q_values(self, obs: Tensor, network: nn.Module | None = None) -> Tensor:
        """Return Q of every action `[S, B, A]` for rows of what is remembered."""
        network, size = network or self.q_network, self.q_network.memory.output_dim
        first = size if network is self.target_network else 0
        q: Tensor = network(obs[..., first : first + size])
        return q


def recurrent_dqn_networks(
    env: EnvSpec, config: ValueBasedConfig, rng: Rng
) -> dict[str, nn.Module]:
    """Build the network for a task."""
    memory = part_of(config, MemorySettings)
    network = RecurrentQNetwork(
        shared_encoder(env, config, rng, config.activation),
        env.obs_dim,
        env.action_dim,
        config.hidden_sizes,
        rng,
        memory=memory.memory,
        memory_size=memory.memory_size,
        dueling=config.dueling,
        activation=config.activation,
    )
    return {"q_network": network}


SPEC = replace(
    DQN_SPEC,
    name="recurrent_dqn",
    title="Recurrent DQN",
    paper="arXiv:1507.06527",
    summary="value-based; DQN with an LSTM or GRU on replayed sequences; discrete actions",
    learner=RecurrentDQN,
    networks=recurrent_dqn_networks,
)
