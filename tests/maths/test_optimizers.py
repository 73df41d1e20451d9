"""Optimizers that a user may choose: the library's numbers, seeds apart, masks, traces, runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.tiny import learner_digest, run_cli, tiny_config, write_tiny
from rl_training import SAC
from rl_training.algorithms.config import OptimizerSettings
from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.optim import SGD, Adam, Optimizer, RMSprop, make_optimizer
from rl_training.errors import ConfigError
from rl_training.experiment.registry import algorithm_names
from rl_training.rng import Rng
from rl_training.runtime.compile.trace import Source, trace_once
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.state import PerSeed
from rl_training.testing.contract import build, flat_state, make_batch, no_host_reads

SEEDS = (0, 1, 2)
SHAPES = ((5, 7), (1, 3), (4, 16), (1, 1))
CHOICES: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "adam": ({"type": "adam"}, torch.optim.Adam),
    "adam_l2": (
        {"type": "adam", "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.1},
        lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    ),
    "adamw": ({"type": "adamw"}, torch.optim.AdamW),
    "adamw_strong": (
        {"type": "adamw", "weight_decay": 0.5, "eps": 1e-5},
        lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.5, eps=1e-5),
    ),
    # The library adds epsilon to the root before it is made up for its short past, we after.
    "radam": (
        {"type": "radam", "eps": 1e-12},
        lambda p, lr: torch.optim.RAdam(p, lr=lr, eps=1e-12),
    ),
    "radam_l2": (
        {"type": "radam", "betas": [0.8, 0.95], "weight_decay": 0.1},
        lambda p, lr: torch.optim.RAdam(p, lr=lr, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "sgd": ({"type": "sgd"}, torch.optim.SGD),
    "sgd_momentum": (
        {"type": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
    ),
    "sgd_nesterov": (
        {"type": "sgd", "momentum": 0.8, "nesterov": True},
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8, nesterov=True),
    ),
    "rmsprop": ({"type": "rmsprop"}, torch.optim.RMSprop),
    "rmsprop_centred": (
        {"type": "rmsprop", "alpha": 0.9, "centered": True, "momentum": 0.7, "eps": 1e-3},
        lambda p, lr: torch.optim.RMSprop(
            p, lr=lr, alpha=0.9, centered=True, momentum=0.7, eps=1e-3
        ),
    ),
    "rmsprop_l2": (
        {"type": "rmsprop", "weight_decay": 0.2},
        lambda p, lr: torch.optim.RMSprop(p, lr=lr, weight_decay=0.2),
    ),
}


def tensors(seeds: tuple[int, ...], stream: str) -> list[Tensor]:
    rng = Rng(seeds, stream)
    return [rng.normal(*shape) for shape in SHAPES]


def parameters_of(seeds: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(tensor) for tensor in tensors(seeds, "parameters")]


def loss_of(parameters: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Fourth powers, so that gradients change; `[S]`."""
    parts = [(p - t).pow(4).flatten(1).sum(1) for p, t in zip(parameters, targets, strict=True)]
    return torch.stack(parts).sum(0)


def made(name: str, parameters: list[Tensor], rate: float | PerSeed, **options: Any) -> Optimizer:
    settings = OptimizerSettings.model_validate(CHOICES[name][0])
    return make_optimizer(settings, parameters, rate, eps=1e-8, **options)


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
@pytest.mark.parametrize("name", CHOICES)
def test_every_optimizer_equals_the_library_over_many_steps(
    name: str, max_grad_norm: float | None
) -> None:
    ours, targets = parameters_of((0,)), tensors((0,), "targets")
    theirs: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = made(name, ours, 0.003, max_grad_norm=max_grad_norm)
    library = CHOICES[name][1](theirs, lr=0.003)
    for _ in range(20):
        optimizer.minimize(loss_of(ours, targets))
        library.zero_grad()
        torch.autograd.backward(loss_of(theirs, targets).sum())
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(theirs, max_grad_norm)
        library.step()
        assert_same(ours, theirs)
    assert not any(torch.equal(p, t) for p, t in zip(ours, parameters_of((0,)), strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("name", CHOICES)
def test_stacked_seeds_with_rates_of_their_own_equal_separate_optimizers(
    name: str, max_grad_norm: float | None, masked: bool
) -> None:
    rates = (0.01, 0.003, 3e-4)
    stacked, targets = parameters_of(SEEDS), tensors(SEEDS, "targets")
    together = made(name, stacked, PerSeed(rates, "cpu"), max_grad_norm=max_grad_norm)
    singles = [parameters_of((seed,)) for seed in SEEDS]
    alone = [
        made(name, single, rate, max_grad_norm=max_grad_norm)
        for single, rate in zip(singles, rates, strict=True)
    ]
    for step in range(6):
        for optimizer in (together, *alone):  # a schedule multiplies all rates
            optimizer.rate.set(optimizer.base_learning_rate * (1 - step / 8))
        active = torch.tensor([True, step != 2, True]) if masked else None
        together.minimize(loss_of(stacked, targets), active)
        for index, optimizer in enumerate(alone):
            mask = None if active is None else active[index : index + 1]
            own = tensors((SEEDS[index],), "targets")
            optimizer.minimize(loss_of(singles[index], own), mask)
    for index, single in enumerate(singles):
        assert_same([p[index : index + 1] for p in stacked], single)


@pytest.mark.parametrize("name", CHOICES)
def test_a_mask_leaves_resting_seeds_and_their_moments_to_the_bit(name: str) -> None:
    stacked, targets = parameters_of(SEEDS), tensors(SEEDS, "targets")
    optimizer = made(name, stacked, 0.01)
    optimizer.minimize(loss_of(stacked, targets))
    before = copy.deepcopy((stacked, optimizer.state_dict()))
    optimizer.minimize(loss_of(stacked, targets), torch.tensor([True, False, True]))
    moments, old_moments = flat_state(optimizer.state_dict()), flat_state(before[1])
    pairs = [*zip(stacked, before[0], strict=True)]
    pairs += [(moments[key], old_moments[key]) for key in moments if moments[key].ndim]
    for now, old in pairs:
        assert torch.equal(now[1], old[1])
        assert not torch.equal(now[0], old[0])


@pytest.mark.parametrize("name", CHOICES)
def test_the_state_gives_a_bit_equal_next_step(name: str) -> None:
    first, targets = parameters_of(SEEDS), tensors(SEEDS, "targets")
    optimizer = made(name, first, 0.01, warmup=4)
    for _ in range(3):
        optimizer.minimize(loss_of(first, targets))
    second: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in first]
    restored = made(name, second, 0.01, warmup=4)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.minimize(loss_of(first, targets))
    restored.minimize(loss_of(second, targets))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("name", [*CHOICES, "laprop"])
def test_a_reset_optimizer_steps_as_a_new_one(name: str) -> None:
    first, targets = parameters_of(SEEDS), tensors(SEEDS, "targets")
    settings = OptimizerSettings.model_validate(CHOICES.get(name, ({"type": name}, None))[0])
    used = make_optimizer(settings, first, 0.01, eps=1e-8, warmup=4)
    for _ in range(3):
        used.minimize(loss_of(first, targets))
    used.reset()
    second: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in first]
    new = make_optimizer(settings, second, 0.01, eps=1e-8, warmup=4)
    for _ in range(2):
        used.minimize(loss_of(first, targets))
        new.minimize(loss_of(second, targets))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("name", CHOICES)
def test_a_warmup_lets_the_step_size_grow_from_nothing(name: str) -> None:
    slow, plain = parameters_of((0,)), parameters_of((0,))
    targets = tensors((0,), "targets")
    warmed, other = made(name, slow, 0.01, warmup=4), made(name, plain, 0.01)
    for step in range(1, 7):
        other.rate.set(0.01 * min(step / 4, 1))
        warmed.minimize(loss_of(slow, targets))
        other.minimize(loss_of(plain, targets))
    assert_same(slow, plain, 1e-6)


@pytest.mark.parametrize("name", CHOICES)
def test_the_traced_form_does_the_same(name: str) -> None:
    held, targets = [parameters_of(SEEDS) for _ in range(2)], tensors(SEEDS, "targets")
    traced, eager = (made(name, parameters, 0.01, max_grad_norm=1.0) for parameters in held)
    for optimizer, parameters in ((traced, held[0]), (eager, held[1])):
        optimizer.minimize(loss_of(parameters, targets))

    def step() -> dict[str, Tensor]:
        traced.minimize(loss_of(held[0], targets))
        return {}

    trace_once(Source("step", step, {"optimizer": traced}))  # runs it once, taken apart
    eager.minimize(loss_of(held[1], targets))
    assert_same(held[0], held[1], 1e-6)


KINDS: dict[str, type[Optimizer]] = {"adamw": Adam, "sgd": SGD, "rmsprop": RMSprop}
SINGLE_NUMBERS = {"alpha_optimizer", "multiplier_optimizer"}
OWN = {"fraction_optimizer": RMSprop}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algo", algorithm_names())
def test_the_setting_reaches_every_network_and_no_single_number(algo: str, kind: str) -> None:
    learner, _ = build(algo, optimizer=kind)
    held = {n: value for n, value in vars(learner).items() if isinstance(value, Optimizer)}
    imagination = imagination_of(learner)
    if imagination is not None:
        held["model"] = imagination.trainer.optimizer
    assert set(held) - SINGLE_NUMBERS
    for name, optimizer in held.items():
        wanted = OWN.get(name, Adam if name in SINGLE_NUMBERS else KINDS[kind])
        assert type(optimizer) is wanted, name
        if isinstance(optimizer, Adam):
            assert optimizer.decoupled == (name not in SINGLE_NUMBERS)


@pytest.mark.expensive
@pytest.mark.parametrize("kind", ["sgd_momentum", "rmsprop_centred", "adamw"])
@pytest.mark.parametrize("algo", algorithm_names())
def test_an_update_reads_nothing_back_and_its_state_goes_on_to_the_bit(
    algo: str, kind: str
) -> None:
    learners = [build(algo, optimizer=CHOICES[kind][0])[0] for _ in range(2)]
    env = build(algo)[1]
    with no_host_reads():
        learners[0].update(make_batch(algo, env, (0,)))
    state = copy.deepcopy(learners[0].state_dict())
    learners[1].load_state_dict(state)
    for learner in learners:
        learner.update(make_batch(algo, env, (0,), key=1))
    first, second = (flat_state(learner.state_dict()) for learner in learners)
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, Tensor) else None
        assert same if same is not None else value == second[name], name


@pytest.mark.matrix
def test_a_run_goes_on_to_the_bit_and_all_doors_lead_to_it(tmp_path: Path) -> None:
    """Whole, cut in the middle, by `-s` and by keywords of Python."""
    settings: dict[str, Any] = {"optimizer": {"type": "rmsprop", "momentum": 0.5, "centered": True}}
    whole = train(tiny_config("sac", tmp_path / "whole", algo_kwargs=settings)).run_dir
    cut = tiny_config("sac", tmp_path / "cut", algo_kwargs=settings, total_timesteps=40)
    resumed = resume_training(train(cut).run_dir, total_timesteps=64).run_dir
    file = write_tiny(tmp_path)
    texts = [f"optimizer.{name}={value}" for name, value in settings["optimizer"].items()]
    options = [word for text in texts for word in ("-s", text)]
    outcome = run_cli("train", "--config", file, "--output-dir", tmp_path / "cli", *options)
    assert outcome.code == 0, outcome.err
    agent = SAC(tiny_config("sac", tmp_path / "python"), **settings)
    runs: list[Path | str] = [
        whole,
        resumed,
        outcome.values["run_dir"],
        agent.learn(progress=False).run_dir,
    ]
    assert len({learner_digest(Path(run)) for run in runs}) == 1


def test_a_name_alone_will_do(tmp_path: Path) -> None:
    config = tiny_config("dqn", tmp_path, algo_kwargs={"optimizer": "adamw"})
    assert config.algo_config.optimizer == OptimizerSettings(type="adamw")
    again = config.replace(algo_kwargs=config.resolved()["algo_kwargs"])
    assert again.algo_config == config.algo_config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "adamax",
            r"algo_kwargs\.optimizer\.type must be one of 'adam', 'adamw', 'radam', 'sgd',",
        ),
        (
            {"momentum": 0.9},
            r"optimizer: momentum is a number of sgd and rmsprop, but type is adam",
        ),
        (
            {"type": "sgd", "eps": 1e-3},
            "eps is a number of adam and adamw and radam and rmsprop and laprop, but type",
        ),
        ({"type": "sgd", "nesterov": True}, "nesterov needs momentum > 0"),
        ({"type": "adam", "betas": [0.9, 1.0]}, r"optimizer\.betas.*must be < 1"),
        ({"type": "sgd", "momentun": 0.9}, r"optimizer\.momentun .*did you mean momentum\?"),
        (3, "optimizer must be a mapping"),
    ],
)
def test_a_mistake_is_one_sentence(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config("sac", tmp_path, algo_kwargs={"optimizer": value})
