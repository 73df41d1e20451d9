"""Sizes that all sides of a comparison share; peers read them too, so nothing else is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class PPOSizes:
    """PPO on CartPole."""

    num_envs: int = 8
    num_steps: int = 128
    minibatch: int = 256
    epochs: int = 4
    hidden: list[int] = field(default_factory=lambda: [64, 64])


@dataclass(frozen=True)
class DQNSizes:
    """DQN on CartPole."""

    batch: int = 64
    hidden: list[int] = field(default_factory=lambda: [64, 64])
    learning_starts: int = 100
    buffer: int = 50_000
    target_interval: int = 500
    epsilon: float = 0.05
    """Constant, because a random action costs some sides nothing and others as much as any."""


@dataclass(frozen=True)
class SACSizes:
    """SAC on a task of the size of HalfCheetah."""

    obs: int = 17
    action: int = 6
    batch: int = 256
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    buffer: int = 100_000


@dataclass(frozen=True)
class OfflineSizes:
    """CQL, IQL and TD3+BC on the task of SAC, with its networks, batch and number of rows."""

    num_critics: int = 2
    cql_samples: int = 10
    """Actions per state drawn uniformly, at s and at s': three times this many."""
    cql_weight: float = 5.0
    policy_delay: int = 2
    """Critic updates of TD3+BC per update of its policy."""


@dataclass(frozen=True)
class GAILSizes:
    """What GAIL on CartPole has beside PPO's sizes."""

    demonstrations: int = 5_000
    batch: int = 1_024
    """Expert pairs per discriminator update, and as many of the policy."""
    updates: int = 8
    hidden: list[int] = field(default_factory=lambda: [32, 32])


@dataclass(frozen=True)
class EnsembleSizes:
    """Updates of and roll-outs in a dynamics ensemble, on the task of SAC."""

    members: int = 7
    elites: int = 5
    hidden: list[int] = field(default_factory=lambda: [200, 200, 200, 200])
    batch: int = 256
    """Rows per member and gradient step."""
    starts: int = 10_000
    horizon: int = 5


@dataclass(frozen=True)
class PETSSizes:
    """One action of PETS on a task of the size of CartPole; the reward is learned."""

    obs: int = 4
    action: int = 1
    members: int = 5
    hidden: list[int] = field(default_factory=lambda: [200, 200, 200])
    candidates: int = 350
    elites: int = 35
    iterations: int = 5
    horizon: int = 15
    particles: int = 20


@dataclass(frozen=True)
class DreamerSizes:
    """Dreamer on images of 64 x 64 with three channels; other widths are the peer's."""

    batch: int = 16
    length: int = 64
    deter: int = 200
    depth: int = 16
    groups: int = 32
    classes: int = 32
    hidden: int = 512
    units: int = 512
    layers: int = 2
    horizon: int = 15
    actions: int = 6
    rows: int = 2_000
    episodes: int = 4

    def told(self) -> dict[str, int]:
        """Return what must be equal on both sides; norms and first states differ a little."""
        return asdict(self)


@dataclass(frozen=True)
class QuantileSizes:
    """Learners of return distributions, on a task of the size of CartPole or on Atari's images."""

    fixed: int = 50
    """Quantiles of QR-DQN, which has DQN's sizes elsewhere."""
    drawn: int = 8
    """Fractions of IQN, as many for the prediction as for the target."""
    choosing: int = 32
    """Fractions that IQN chooses an action by; peers take `drawn` of them in an update."""
    proposed: int = 32
    """Fractions of FQF."""
    cosines: int = 64
    obs: int = 4
    actions: int = 2
    batch: int = 64
    hidden: list[int] = field(default_factory=lambda: [64, 64])
    buffer: int = 50_000
    image: int = 84
    """Height and width; a frame is grey."""
    stack: int = 4
    image_actions: int = 6
    image_batch: int = 32
    image_features: int = 512
    """Width of the layer after the convolutions of Nature's network."""
    image_buffer: int = 5_000


PPO, DQN, SAC, OFFLINE = PPOSizes(), DQNSizes(), SACSizes(), OfflineSizes()
GAIL, ENSEMBLE, PETS, DREAMER = GAILSizes(), EnsembleSizes(), PETSSizes(), DreamerSizes()
QUANTILES = QuantileSizes()
FULL_REPLAY = 1_000_000
"""Rows of the replay in the rows `checkpoint` and `memory`."""
CHECKPOINT_INTERVAL = 10_000
"""Environment steps between two checkpoints."""
