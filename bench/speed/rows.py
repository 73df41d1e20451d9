"""The rows of the benchmark: what is measured, in which unit, and the bar it is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bench.speed.pace import Accelerate, Precision, VectorMode

Group = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Bar:
    """What a figure must reach: a ratio to the fastest peer, or a figure of its own."""

    kind: Literal["ratio", "at least", "at most"]
    value: float

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{self.value:g}x"
        return f"{'>=' if self.kind == 'at least' else '<='} {self.value:,g}"

    def is_met(self, figure: float, ratio: float | None) -> bool | None:
        """Tell whether it is met; None when there is no peer to compare with."""
        if self.kind == "ratio":
            return None if ratio is None else ratio >= self.value
        return figure >= self.value if self.kind == "at least" else figure <= self.value


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row."""

    name: str
    what: str
    """One sentence for people."""
    unit: str = ""
    """Unit of the figures; empty where one row has several."""
    bar: Bar | None = None
    bars: Mapping[str, Bar] = field(default_factory=dict)
    """Bars of a row that has several figures, by what each figure is called."""
    group: Group = "cpu"
    measure: str = "compare"
    """Module of this package whose `measure(row, options)` yields the figures."""
    work: str = ""
    """Function, in the modules of all sides, that does the work."""
    chunk: int = 0
    """How much of it is timed at once, in steps."""
    ours: tuple[Accelerate, ...] = ("off", "compile")
    """Values of `accelerate` that we run with; the last one is what the bar is about."""
    precision: Precision = "fp32"
    """Precision of our side."""
    vector_mode: VectorMode = "auto"
    """How our side steps environments; `sync` is Gymnasium's own class, as peers step it."""
    peers: tuple[str, ...] = ()
    algos: tuple[str, ...] = ()
    """Algorithms of an accelerator row; empty leaves them to the command line."""


SAC_PEERS = ("sb3", "d3rlpy", "axiomrl")


def _with_bf16(row: Row, bar: float = 2.0) -> tuple[Row, Row]:
    """The row, and the same with bf16 products on our side."""
    bf16 = replace(
        row,
        name=f"{row.name}-bf16",
        what=f"{row.name} with bf16 products on our side; the peer stays in fp32",
        bar=Bar("ratio", bar),
        precision="bf16",
    )
    return row, bf16


def _with_sync(row: Row) -> tuple[Row, Row]:
    """The row, and the same with Gymnasium's own environment on both sides."""
    sync = replace(
        row,
        name=f"{row.name}-sync",
        what=f"{row.name} with Gymnasium's own classes on our side too (`vector_mode: sync`)",
        vector_mode="sync",
    )
    return row, sync


def _offline_rows(algo: str, what: str, chunk: int, fp32: float) -> tuple[Row, Row]:
    """The update of an offline method, in fp32 and with bf16 products on our side."""
    row = Row(
        name=algo,
        what=what,
        unit="gradient steps/s",
        bar=Bar("ratio", fp32),
        work=algo,
        chunk=chunk,
        peers=("d3rlpy",),
    )
    return _with_bf16(row)


def _quantile_rows(algo: str, quantiles: int) -> tuple[Row, ...]:
    """The update of a learner of drawn or proposed fractions, from vectors and from images."""
    row = Row(
        name=algo,
        what=f"{algo.upper()} update alone, sampling included: 64x64, batch 64, 64 cosines, "
        f"{quantiles} quantiles",
        unit="gradient steps/s",
        bar=Bar("ratio", 2.0),
        work=algo,
        chunk=400,
        peers=("tianshou", "axiomrl"),
    )
    images = replace(
        row,
        name=f"{algo}-cnn",
        what=f"{algo.upper()} update on 84x84x4 images: Nature's network, batch 32, 6 actions",
        bar=Bar("ratio", 1.5),
        work=f"{algo}_cnn",
        chunk=20,
    )
    return row, *_with_bf16(images, 1.5)


_ENSEMBLE = Row(
    name="ensemble",
    what="update of a dynamics ensemble: obs 17, act 6, 7 members of 4x200, 256 rows each",
    unit="gradient steps/s",
    bar=Bar("ratio", 2.0),
    work="ensemble",
    chunk=60,
    peers=("mbrl", "offlinerlkit"),
)
_ROLLOUT = Row(
    name="ensemble-rollout",
    what="roll-outs in it, 10,000 starts of 5 steps, random actions, a random elite each step",
    unit="transitions/s",
    bar=Bar("ratio", 2.0),
    work="ensemble_rollout",
    chunk=50_000,
    ours=("off",),
    peers=("mbrl", "offlinerlkit"),
)
_PETS_ACTION = Row(
    name="pets-action",
    what="one action of PETS: 5 members of 3x200, CEM 5 x 350, horizon 15, 20 particles, obs 4",
    unit="actions/s",
    bar=Bar("ratio", 2.0),
    work="pets_action",
    chunk=2,
    peers=("mbrl",),
)

_DREAMER = Row(
    name="dreamer",
    what="train step of Dreamer: 64x64x3, 16 sequences of 64, deter 200, depth 16, stoch 32x32",
    unit="gradient steps/s",
    bar=Bar("ratio", 2.0),
    work="dreamer",
    chunk=1,
    ours=("off",),
    peers=("dreamerv3_torch",),
)


def _loop(name: str, what: str, **bars: float) -> Row:
    """A whole run on the accelerator; bars by the number of seeds."""
    return Row(
        name=f"loop-{name}",
        what=what,
        unit="env steps/s",
        bars={seeds: Bar("at least", bar) for seeds, bar in bars.items()},
        group="gpu",
        measure="whole_runs",
    )


_LOOPS = (
    _loop("sac", "SAC on HalfCheetah-v5, the whole run, 1 and 32 seeds", one=4_500, many=40_000),
    _loop("sac-overlap", "the same with `overlap: true`", one=6_500, many=40_000),
    _loop("humanoid", "SAC on Humanoid-v5, the whole run, 16 seeds"),
    _loop("ppo-cheetah", "PPO on HalfCheetah-v5, 64 environments, 4 seeds", many=60_000),
    _loop("ppo-breakout", "PPO on Breakout, 64 environments, without evaluations", one=12_000),
    _loop("dqn-breakout", "DQN on Breakout, 8 environments, an update every 4 steps", one=5_000),
    _loop("dqn-overlap", "the same with `overlap: true`", one=5_000),
    _loop("dreamer", "Dreamer on Pong with the settings of Atari 100k", one=470),
    _loop("mbpo", "MBPO on Hopper-v5 with the settings of the paper, 5 seeds, the first fits"),
)

_ALL = (
    Row(
        name="sac",
        what="SAC update alone, sampling included: obs 17, act 6, 256x256, batch 256",
        unit="gradient steps/s",
        bar=Bar("ratio", 1.5),
        work="sac",
        chunk=150,
        peers=SAC_PEERS,
    ),
    Row(
        name="sac-bf16",
        what="the same with bf16 products on our side; peers stay in fp32",
        unit="gradient steps/s",
        bar=Bar("ratio", 2.0),
        work="sac",
        chunk=150,
        precision="bf16",
        peers=SAC_PEERS,
    ),
    *_offline_rows("cql", "CQL update on a dataset, sizes of `sac`, 10 samples a group", 20, 1.2),
    *_offline_rows("iql", "IQL update on a dataset, sizes of `sac`", 150, 1.5),
    # An even number of updates, since every second one moves the policy.
    *_offline_rows("td3_bc", "TD3+BC update on a dataset, sizes of `sac`", 150, 1.5),
    *_with_bf16(_ENSEMBLE),
    *_with_bf16(_ROLLOUT),
    *_with_bf16(_PETS_ACTION),
    *_with_bf16(_DREAMER),
    *_with_sync(
        Row(
            name="dqn",
            what="DQN on CartPole-v1, the whole loop: 64x64, batch 64, one update a step",
            unit="env steps/s",
            bar=Bar("ratio", 3.0),
            work="dqn",
            chunk=3_000,
            peers=("sb3",),
        )
    ),
    *_with_sync(
        Row(
            name="qr_dqn",
            what="QR-DQN on CartPole-v1, the whole loop: sizes of `dqn`, 50 quantiles",
            unit="env steps/s",
            bar=Bar("ratio", 3.0),
            work="qr_dqn",
            chunk=2_000,
            peers=("sb3",),
        )
    ),
    *_quantile_rows("iqn", 8),
    *_quantile_rows("fqf", 32),
    *_with_sync(
        Row(
            name="ppo",
            what="PPO on CartPole-v1, the whole loop: 8 environments, 128 steps, 4 epochs of 256",
            unit="env steps/s",
            bar=Bar("ratio", 4.0),
            work="ppo",
            chunk=40_960,
            peers=("sb3",),
        )
    ),
    *_with_sync(
        Row(
            name="loop-ppo",
            what="PPO on HalfCheetah-v5, the whole loop: 8 environments and the sizes of `ppo`",
            unit="env steps/s",
            bar=Bar("ratio", 3.0),
            work="ppo_halfcheetah",
            chunk=8_192,
            peers=("sb3",),
        )
    ),
    *_with_sync(
        Row(
            name="gail",
            what="GAIL on CartPole-v1, the whole loop: PPO's sizes, 8 updates of the discriminator",
            unit="env steps/s",
            bar=Bar("ratio", 3.0),
            work="gail",
            chunk=20_480,
            peers=("imitation",),
        )
    ),
    Row(
        name="package",
        what="seconds of `import rl_training` and of `rl-training --help`",
        bars={"import": Bar("at most", 0.3), "--help": Bar("at most", 0.5)},
        measure="package",
    ),
    Row(
        name="checkpoint",
        what="share of a SAC run that a checkpoint every 10,000 steps costs, replay of 1M rows",
        unit="% of the time",
        bar=Bar("at most", 1.0),
        work="checkpoint",
        chunk=100,
        ours=("compile",),
    ),
    Row(
        name="memory",
        what="replay of 1M rows (obs 17, act 6), and peak of a short run of every algorithm",
        bars={"replay 1M": Bar("at most", 250)},
        measure="memory",
    ),
    Row(
        name="gpu-sac",
        what="SAC updates of 1, 32 and 128 seeds in fp32, tf32 and bf16, as CUDA graphs",
        bars={"sac 1 seed": Bar("at least", 6_000), "sac 128 seeds": Bar("at least", 95_000)},
        group="gpu",
        measure="gpu_updates",
        algos=("sac",),
    ),
    Row(
        name="gpu-update",
        what="the same of CQL, IQL and TD3+BC with 1 and 32 seeds, or of what --algo names",
        bars={
            "sac 1 seed": Bar("at least", 6_000),
            "sac 128 seeds": Bar("at least", 95_000),
            "cql 1 seed": Bar("at least", 2_000),
            "cql 32 seeds": Bar("at least", 13_000),
            "iql 1 seed": Bar("at least", 6_000),
            "td3_bc 1 seed": Bar("at least", 7_000),
        },
        group="gpu",
        measure="gpu_updates",
    ),
    Row(
        name="gpu-actors",
        what="the same of SAC beside its variants, each with its own networks, or of --algo",
        bars={"crossq 1 seed": Bar("ratio", 0.7), "crossq 32 seeds": Bar("ratio", 0.7)},
        group="gpu",
        measure="gpu_updates",
        algos=("sac", "redq", "droq", "crossq", "tqc", "simba_v2"),
    ),
    Row(
        name="gpu-pets",
        what="one action of PETS on the device, sizes of pets-action, in fp32, tf32 and bf16",
        unit="ms",
        bar=Bar("at most", 10.0),
        group="gpu",
        measure="gpu_planning",
    ),
    Row(
        name="gpu-dreamer",
        what="train step of Dreamer on the device, sizes of dreamer beside its eager form, and 12m",
        unit="gradient steps/s",
        bar=Bar("ratio", 5.0),
        group="gpu",
        measure="gpu_world_model",
    ),
    Row(
        name="gpu-seeds",
        what="SAC on Pendulum-v1 through `train()` with 1 and 32 seeds, and where the time goes",
        group="gpu",
        measure="whole_runs",
    ),
    *_LOOPS,
)
ALGOS = ("sac", "cql", "iql", "td3_bc", "redq", "droq", "crossq", "tqc", "simba_v2")
"""Algorithms that `gpu-update` can measure."""
ROWS: dict[str, Row] = {row.name: row for row in _ALL}


def names_of(group: str) -> list[str]:
    """Return the names of the rows of a group."""
    return [row.name for row in ROWS.values() if row.group == group]
