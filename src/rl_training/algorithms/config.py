"""Settings that every algorithm has, and how those of one are put together from parts.

A learner's own settings are one class, `config_class`; what its loop, its networks or its model
need are others, its `parts`.  `algo_kwargs` is one flat mapping of all their fields.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import new_class
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from rl_training.validation import (
    Discount,
    Fractions,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Settings,
    StrictModel,
    list_to_tuple,
)


class LRSchedule(StrictModel):
    """Learning-rate schedule: a factor on the base rate as a function of the run's progress."""

    type: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Shape of the schedule."""
    start: NonNegativeFloat = 1.0
    """Factor at the beginning."""
    end: NonNegativeFloat = 0.0
    """Factor at the planned end (linear and cosine)."""
    milestones: Fractions = ()
    """Shares of the run at which a step schedule multiplies the factor by `gamma`."""
    gamma: NonNegativeFloat = 0.1
    """Factor of one step of a step schedule."""

    @model_validator(mode="after")
    def _step_needs_milestones(self) -> LRSchedule:
        if self.type == "step" and not self.milestones:
            raise ValueError("a step schedule needs milestones, such as [0.5, 0.75]")
        return self


OptimizerName: TypeAlias = Literal["adam", "adamw", "radam", "sgd", "rmsprop", "laprop"]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of a moment that one step leaves of it."""
_DEFAULTS: dict[OptimizerName, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01},
    "radam": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "rmsprop": {"alpha": 0.99, "momentum": 0.0, "centered": False, "weight_decay": 0.0},
    "laprop": {"betas": (0.9, 0.999), "weight_decay": 0.0},
}
"""The numbers of each optimizer; beside them all but `sgd` have `eps`, the method's own."""


class OptimizerSettings(StrictModel):
    """Which optimizer moves the networks, with PyTorch's names and defaults for its numbers."""

    type: OptimizerName = "adam"
    """Adam, AdamW, RAdam, gradient descent, RMSprop, or LaProp."""
    betas: (
        Annotated[
            tuple[Decay, Decay],
            BeforeValidator(list_to_tuple, json_schema_input_type=list[Decay]),
        ]
        | None
    ) = None
    """Decay of the two moments (`adam`, `adamw`, `radam`, `laprop`); null is [0.9, 0.999]."""
    eps: PositiveFloat | None = None
    """Added to the divisor (all but `sgd`); null is the method's `adam_epsilon`."""
    weight_decay: NonNegativeFloat | None = None
    """L2 penalty, which `adamw` and `laprop` take off parameters and not by gradients; null is 0,
    or 0.01 for `adamw`."""
    momentum: Decay | None = None
    """Share of the last step in the next (`sgd`, `rmsprop`); null is 0."""
    nesterov: bool | None = None
    """Look ahead by the momentum (`sgd`); null does not."""
    alpha: Decay | None = None
    """Decay of the mean square (`rmsprop`); null is 0.99."""
    centered: bool | None = None
    """Divide by the deviation in place of the root mean square (`rmsprop`); null does not."""

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the chosen optimizer; `eps` only where it is given."""
        chosen = _DEFAULTS[self.type] | ({} if self.eps is None else {"eps": self.eps})
        given = {name: getattr(self, name) for name in chosen}
        return {name: chosen[name] if v is None else v for name, v in given.items()}

    @model_validator(mode="after")
    def _numbers_belong_to_it(self) -> OptimizerSettings:
        for name in OptimizerSettings.model_fields.keys() - {"type"}:
            if getattr(self, name) is None or name in _DEFAULTS[self.type]:
                continue
            owners = [kind for kind, numbers in _DEFAULTS.items() if name in numbers]
            owners = [kind for kind in _DEFAULTS if kind != "sgd"] if name == "eps" else owners
            if self.type not in owners:
                raise ValueError(
                    f"{name} is a number of {' and '.join(owners)}, but type is {self.type}; "
                    f"leave it out, or choose {owners[0]}"
                )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0, such as 0.9")
        return self


OptimizerChoice = Annotated[
    OptimizerSettings,
    BeforeValidator(
        lambda value: {"type": value} if isinstance(value, str) else value,
        json_schema_input_type=OptimizerSettings | OptimizerName,
    ),
]
"""Settings of an optimizer, or its name alone."""


class EarlyStopping(StrictModel):
    """When to stop before `total_timesteps`: looked at after each evaluation."""

    metric: Literal["eval_return_mean", "eval_return_min", "eval_return_median"] = (
        "eval_return_mean"
    )
    """What is compared, over the episodes of one evaluation (the mean over seeds in a group)."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value is better."""
    target: Number | None = None
    """Stop once the metric is at least this good for `patience` evaluations in a row."""
    patience: PositiveInt = 1
    """Evaluations in a row at `target`, or, without a target, without a gain of `min_delta`."""
    min_delta: NonNegativeFloat = 0.0
    """Least gain over the best so far that counts as one (without a target)."""
    min_steps: NonNegativeInt = 0
    """Never stop before this many steps."""


class AlgoConfig(Settings):
    """Settings shared by every algorithm; each algorithm adds its own."""

    varying: ClassVar[frozenset[str]] = frozenset()
    """Settings of this class that may differ between the members of a group; see `may_vary`."""
    compiles_on_cpu: ClassVar[bool] = True
    """Whether `accelerate: auto` compiles updates on a CPU: not where programs are so long that the
    compiler takes more time than they save."""

    gamma: Discount = 0.99
    """Discount per environment step."""
    eval_interval: NonNegativeInt = 5_000
    """Steps between evaluations; 0 evaluates only at the end."""
    lr_schedule: LRSchedule = Field(default=LRSchedule())
    """Schedule of every learning rate."""
    optimizer: OptimizerChoice = Field(default=OptimizerSettings())
    """Optimizer of the networks: a name, or a mapping `{type: sgd, momentum: 0.9}`; a temperature
    and other single numbers always have Adam."""
    adam_epsilon: PositiveFloat = 1e-8
    """What Adam adds to the root of the mean squared gradient before it divides by it."""
    early_stopping: EarlyStopping | None = None
    """When to stop early; null never does."""

    @classmethod
    def may_vary(cls) -> list[str]:
        """Return the numbers that a `grid` may hold: what the classes up to here declare."""
        names = frozenset[str]().union(*(vars(base).get("varying", ()) for base in cls.__mro__))
        return [name for name in cls.model_fields if name in names]


class LearningRate(Settings):
    """The learning rate of learners that have one optimizer, or several of a kind."""

    varying: ClassVar[frozenset[str]] = frozenset({"learning_rate"})

    learning_rate: PositiveFloat = 3e-4
    """Learning rate of the critics, and of the actor unless it has its own."""


PartT = TypeVar("PartT", bound=Settings)


def part_of(config: Settings, kind: type[PartT]) -> PartT:
    """Return the settings of a method as one of the parts that they are put together from."""
    assert isinstance(config, kind)
    return config


@cache
def combined(own: type[Settings], parts: tuple[type[Settings], ...]) -> type[AlgoConfig]:
    """Return the settings of a method: its own fields before those of its parts.

    Where two have a field of the same name, the first one's default and meaning hold.
    """
    others = tuple(part for part in parts if not issubclass(own, part))
    if not others:
        assert issubclass(own, AlgoConfig)
        return own
    body: dict[str, Any] = {
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "__reduce__": _reduce(own, parts),
    }
    combination: type[AlgoConfig] = new_class(
        own.__name__, (own, *others), exec_body=lambda namespace: namespace.update(body)
    )
    assert issubclass(combination, AlgoConfig)
    return combination


def _reduce(own: type[Settings], parts: tuple[type[Settings], ...]) -> Callable[[Settings], Any]:
    """Let instances travel between processes, although no module has their class."""

    def reduce(self: Settings) -> tuple[Any, ...]:
        return _build, (own, parts, dict(self))

    return reduce


def _build(
    own: type[Settings], parts: tuple[type[Settings], ...], values: dict[str, Any]
) -> AlgoConfig:
    return combined(own, parts)(**values)
