"""Adam and RMSprop: the library's numbers, seeds that stay apart, clipping, masks, schedules."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_training.algorithms.base import frozen_copy, polyak_update
from rl_training.algorithms.config import LRSchedule
from rl_training.algorithms.optim import (
    Adam,
    LaProp,
    RMSprop,
    clip_per_seed,
    learning_rate_factor,
    linear,
)
from rl_training.errors import CheckpointError
from rl_training.rng import Rng
from rl_training.runtime.compile.trace import Source, trace_once
from rl_training.state import PerSeed

SHAPES = ((5, 7), (1, 3), (4, 16), (1, 1))
SEEDS = (0, 1, 2)


def make_tensors(seeds: tuple[int, ...], stream: str) -> list[Tensor]:
    rng = Rng(seeds, stream)
    return [rng.normal(*shape) for shape in SHAPES]


def quadratic(parameters: Sequence[Tensor], targets: list[Tensor]) -> Tensor:
    """Sum of squares per seed, `[S]`."""
    parts = [(p - t).square().flatten(1).sum(1) for p, t in zip(parameters, targets, strict=True)]
    return torch.stack(parts).sum(0)


def parameters_of(seeds: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(tensor) for tensor in make_tensors(seeds, "parameters")]


def test_adam_equals_the_library_over_many_steps() -> None:
    ours, targets = parameters_of((0,)), make_tensors((0,), "targets")
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    adam = Adam(ours, 0.01, betas=(0.8, 0.99), eps=1e-5)
    library = torch.optim.Adam(theirs, lr=0.01, betas=(0.8, 0.99), eps=1e-5)
    for _ in range(20):
        adam.minimize(quadratic(ours, targets))
        library.zero_grad()
        quadratic(theirs, targets).sum().backward()  # type: ignore[no-untyped-call]
        library.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_adam_equals_the_library_when_gradients_do_not_lie_in_memory_as_parameters_do() -> None:
    start, cost = make_tensors((0,), "parameters")[0], make_tensors((0,), "targets")[0]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())

    def loss(parameter: Tensor) -> Tensor:
        # The gradient of a transposed copy is the transpose of what comes back: not contiguous.
        turned = parameter.mT.contiguous()
        return ((turned - cost.mT.contiguous()) ** 2 * cost.mT.contiguous().abs()).sum((1, 2))

    (gradient,) = torch.autograd.grad(loss(ours).sum(), ours)
    assert not gradient.is_contiguous(), "otherwise this test tests nothing"
    adam, library = Adam([ours], 0.05), torch.optim.Adam([theirs], lr=0.05)
    for _ in range(10):
        adam.minimize(loss(ours))
        library.zero_grad()
        loss(theirs).sum().backward()  # type: ignore[no-untyped-call]
        library.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_first_step_has_the_size_of_the_learning_rate() -> None:
    parameter = nn.Parameter(torch.tensor([[3.0, -2.0, 0.5]]))
    Adam([parameter], 0.1).minimize((parameter * torch.tensor([5.0, -1e-3, 0.0])).sum(1))
    torch.testing.assert_close(parameter.detach(), torch.tensor([[2.9, -1.9, 0.5]]))


@pytest.mark.parametrize(("max_grad_norm", "tolerance"), [(None, 1e-7), (0.5, 1e-6)])
def test_stacked_seeds_equal_single_ones(max_grad_norm: float | None, tolerance: float) -> None:
    # Vector and scalar instructions round differently; a clipped norm is summed in another order.
    stacked, targets = parameters_of(SEEDS), make_tensors(SEEDS, "targets")
    adam = Adam(stacked, 0.01, max_grad_norm=max_grad_norm)
    singles = [parameters_of((seed,)) for seed in SEEDS]
    single_targets = [make_tensors((seed,), "targets") for seed in SEEDS]
    single_adams = [Adam(p, 0.01, max_grad_norm=max_grad_norm) for p in singles]
    for _ in range(5):
        adam.minimize(quadratic(stacked, targets))
        for p, t, single_adam in zip(singles, single_targets, single_adams, strict=True):
            single_adam.minimize(quadratic(p, t))
    for index, single in enumerate(singles):
        for ours, alone in zip(stacked, single, strict=True):
            torch.testing.assert_close(ours[index], alone[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_rates_per_seed_equal_separate_adams(max_grad_norm: float | None, masked: bool) -> None:
    rates = (0.1, 0.01, 3e-4)
    stacked, targets = parameters_of(SEEDS), make_tensors(SEEDS, "targets")
    adam = Adam(stacked, PerSeed(rates, "cpu"), max_grad_norm=max_grad_norm)
    singles = [parameters_of((seed,)) for seed in SEEDS]
    single_targets = [make_tensors((seed,), "targets") for seed in SEEDS]
    alone = [
        Adam(p, rate, max_grad_norm=max_grad_norm) for p, rate in zip(singles, rates, strict=True)
    ]
    for step in range(6):
        for optimizer in (adam, *alone):  # a schedule multiplies all rates
            optimizer.rate.set(optimizer.base_learning_rate * (1 - step / 8))
        active = torch.tensor([True, step != 2, True]) if masked else None
        adam.minimize(quadratic(stacked, targets), active)
        for index, single_adam in enumerate(alone):
            mask = None if active is None else active[index : index + 1]
            single_adam.minimize(quadratic(singles[index], single_targets[index]), mask)
    for index, single in enumerate(singles):
        assert adam.rate_of(index) == pytest.approx(alone[index].rate_of()) == rates[index] * 3 / 8
        for ours, theirs in zip(stacked, single, strict=True):
            torch.testing.assert_close(ours[index], theirs[0], rtol=1e-5, atol=1e-6)


def test_rates_per_seed_are_no_part_of_the_state() -> None:
    varied, plain = parameters_of(SEEDS), parameters_of(SEEDS)
    adam = Adam(varied, PerSeed((0.1, 0.2, 0.3), "cpu"))
    assert adam.state_dict().keys() == Adam(plain, 0.1).state_dict().keys()


def test_clipping_equals_the_library_for_each_seed() -> None:
    gradients = make_tensors(SEEDS, "gradients")
    for gradient in gradients:
        gradient[1] *= 0.001  # this seed is below the limit and must stay as it is
    expected = []
    for seed in range(3):
        parameters = [nn.Parameter(torch.zeros_like(g[seed])) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[seed].clone()
        norm = nn.utils.clip_grad_norm_(parameters, 0.7)
        expected.append((norm, [p.grad for p in parameters]))
    norms = clip_per_seed(gradients, 0.7)
    for seed, (norm, clipped) in enumerate(expected):
        torch.testing.assert_close(norms[seed], norm)
        for ours, theirs in zip(gradients, clipped, strict=True):
            torch.testing.assert_close(ours[seed], theirs)


def test_clipping_one_seed_alone_by_hand() -> None:
    gradients = [torch.tensor([[3.0]]), torch.tensor([[0.0, 4.0]])]
    assert clip_per_seed(gradients, 1.0).tolist() == [5.0]
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6]]))
    torch.testing.assert_close(gradients[1], torch.tensor([[0.0, 0.8]]))


def test_a_mask_leaves_inactive_seeds_and_their_moments_untouched() -> None:
    masked, targets = parameters_of(SEEDS), make_tensors(SEEDS, "targets")
    free: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in masked]
    adam, reference = Adam(masked, 0.01), Adam(free, 0.01)
    for optimizer, parameters in ((adam, masked), (reference, free)):
        optimizer.minimize(quadratic(parameters, targets))
    before = copy.deepcopy((masked, adam.first.tensors, adam.second.tensors))
    adam.minimize(quadratic(masked, targets), torch.tensor([True, False, True]))
    reference.minimize(quadratic(free, targets))
    now = (masked, adam.first.tensors, adam.second.tensors)
    all_free = (free, reference.first.tensors, reference.second.tensors)
    for old_group, group, free_group in zip(before, now, all_free, strict=True):
        for old, new, moved in zip(old_group, group, free_group, strict=True):
            assert torch.equal(new[1], old[1])
            assert torch.equal(new[[0, 2]], moved[[0, 2]])
            assert not torch.equal(moved[1], old[1])


def test_state_round_trip_gives_a_bit_equal_next_step() -> None:
    first, targets = parameters_of(SEEDS), make_tensors(SEEDS, "targets")
    adam = Adam(first, 0.01)
    for _ in range(3):
        adam.minimize(quadratic(first, targets))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    restored = Adam(second, 0.01)
    restored.load_state_dict(copy.deepcopy(adam.state_dict()))
    adam.minimize(quadratic(first, targets))
    restored.minimize(quadratic(second, targets))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_state_of_other_shapes_is_refused() -> None:
    state = Adam(parameters_of((0,)), 0.01).state_dict()
    with pytest.raises(CheckpointError, match=r"\(1, 5, 7\).*\(2, 5, 7\)"):
        Adam(parameters_of((0, 1)), 0.01).load_state_dict(state)


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 8.0), (0.005, 4.02), (0.0, 4.0)])
def test_polyak_moves_the_share_tau(tau: float, expected: float) -> None:
    source = nn.Linear(1, 1)
    target = frozen_copy(source)
    for module, value in ((source, 8.0), (target, 4.0)):
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
    polyak_update(list(target.parameters()), list(source.parameters()), tau)
    for parameter in target.parameters():
        assert parameter.item() == pytest.approx(expected, rel=1e-6)
    assert all(p.item() == 8.0 for p in source.parameters())
    assert not any(p.requires_grad for p in target.parameters())


def test_polyak_moves_each_seed_by_its_own_share() -> None:
    target, source = [torch.full((3, 2, 2), 4.0)], [torch.full((3, 2, 2), 8.0)]
    polyak_update(target, source, torch.tensor([1.0, 0.25, 0.0]))
    assert target[0][:, 0, 0].tolist() == [8.0, 5.0, 4.0]
    assert target[0][:, 1, 1].tolist() == [8.0, 5.0, 4.0]


def test_polyak_with_tau_one_copies_to_the_bit() -> None:
    source, target = nn.Linear(7, 5), nn.Linear(7, 5).requires_grad_(False)
    polyak_update(list(target.parameters()), list(source.parameters()), 1.0)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


@pytest.mark.parametrize(
    ("progress", "expected"), [(-1.0, 1.0), (0.0, 1.0), (0.25, 0.8), (1.0, 0.2), (7.0, 0.2)]
)
def test_linear_schedule_stays_at_its_ends(progress: float, expected: float) -> None:
    assert linear(1.0, 0.2, progress) == pytest.approx(expected)


def test_learning_rate_schedules_by_hand() -> None:
    cosine = LRSchedule(type="cosine", start=1.0, end=0.2)
    step = LRSchedule(type="step", start=2.0, milestones=(0.5, 0.75), gamma=0.1)
    at = (0.0, 0.5, 0.75, 1.0)
    assert [learning_rate_factor(LRSchedule(), p) for p in at] == [1.0] * 4
    decay = LRSchedule(type="linear")
    assert [learning_rate_factor(decay, p) for p in at] == pytest.approx([1.0, 0.5, 0.25, 0.0])
    # 0.2 + 0.8 (1 + cos(3 pi / 4)) / 2
    assert [learning_rate_factor(cosine, p) for p in at] == pytest.approx(
        [1.0, 0.6, 0.3171573, 0.2]
    )
    assert [learning_rate_factor(step, p) for p in at] == pytest.approx([2.0, 0.2, 0.02, 0.02])


def test_decay_per_parameter_is_that_of_pytorch() -> None:
    for rate in (0.1, PerSeed((0.1,), "cpu")):
        ours = [torch.randn(1, 4, 3).requires_grad_() for _ in range(3)]
        theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
        optimizer = Adam(ours, rate, weight_decay={ours[0]: 0.3, ours[2]: 0.1})
        decays = (0.3, 0.0, 0.1)
        groups = [{"params": [p], "weight_decay": d} for p, d in zip(theirs, decays, strict=True)]
        reference = torch.optim.Adam(groups, lr=0.1)
        for _ in range(5):
            optimizer.minimize(torch.stack([p.square().sum((1, 2)) for p in ours]).sum(0))
            reference.zero_grad()
            loss = torch.stack([p.square().sum() for p in theirs]).sum()
            torch.autograd.backward(loss)
            reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def test_a_seed_that_rested_goes_on_as_if_alone_when_it_counts_for_itself() -> None:
    start = torch.randn(2, 5)
    group = [start.clone().requires_grad_()]
    optimizer = Adam(group, 0.1, count_per_seed=True)
    alone = [start[1:].clone().requires_grad_()]
    single = Adam(alone, 0.1, count_per_seed=True)
    for active in (True, False, False, True):
        mask = torch.tensor([True, active])
        optimizer.minimize(group[0].pow(4).sum(1), mask)
        if active:
            single.minimize(alone[0].pow(4).sum(1))
    torch.testing.assert_close(group[0][1:], alone[0])
    assert optimizer.step_count.tolist() == [4, 2]


@pytest.mark.parametrize("own_count", [False, True])
def test_the_traced_form_decays_and_counts_like_the_kernel(own_count: bool) -> None:
    start = torch.randn(2, 4, 3)
    held = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = [Adam([p], 0.1, weight_decay={p: 0.5}, count_per_seed=own_count) for p in held]
    for optimizer in optimizers:
        optimizer.minimize(optimizer.parameters[0].pow(3).sum((1, 2)), torch.tensor([True, False]))

    def step() -> dict[str, Tensor]:
        optimizers[0].minimize(held[0].pow(3).sum((1, 2)))
        return {}

    trace_once(Source("step", step, {"optimizer": optimizers[0]}))  # runs it once, taken apart
    optimizers[1].minimize(held[1].pow(3).sum((1, 2)))
    torch.testing.assert_close(held[0], held[1])


def test_rmsprop_equals_the_library_over_many_steps() -> None:
    ours, targets = parameters_of((0,)), make_tensors((0,), "targets")
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    rmsprop = RMSprop(ours, 0.01, alpha=0.95, eps=1e-5)
    library = torch.optim.RMSprop(theirs, lr=0.01, alpha=0.95, eps=1e-5)
    for _ in range(20):
        rmsprop.minimize(quadratic(ours, targets))
        library.zero_grad()
        quadratic(theirs, targets).sum().backward()  # type: ignore[no-untyped-call]
        library.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_rmsprop_moves_each_seed_by_its_own_rate_and_the_schedule() -> None:
    group, targets = parameters_of(SEEDS), make_tensors(SEEDS, "targets")
    rates = (0.01, 0.02, 0.04)
    together = RMSprop(group, PerSeed(rates, "cpu"))
    together.rate.set(0.5)
    for _ in range(3):
        together.minimize(quadratic(group, targets))
    for index, (seed, rate) in enumerate(zip(SEEDS, rates, strict=True)):
        alone, target = parameters_of((seed,)), make_tensors((seed,), "targets")
        single = RMSprop(alone, rate / 2)
        for _ in range(3):
            single.minimize(quadratic(alone, target))
        for p, q in zip(group, alone, strict=True):
            torch.testing.assert_close(p[index], q[0], rtol=1e-5, atol=1e-6)
        assert together.rate_of(index) == pytest.approx(single.rate_of())


def test_laprop_is_the_authors_recursion_with_clipping_by_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2, 2)]
    start = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    start[1] *= 1e-4  # clipped, and near the least norm that counts
    parameters = [each.clone().requires_grad_() for each in start]
    optimizer = LaProp(parameters, 0.1, eps=1e-3, adaptive_clip=0.3, warmup=3)
    expected = [each.numpy().copy() for each in start]
    squares, momenta = ([np.zeros_like(each) for each in expected] for _ in range(2))
    for step in range(1, 6):
        gradients = [torch.randn(2, *shape, generator=generator).double() for shape in shapes]
        for index, gradient in enumerate(gradients):
            for seed in range(2):  # each seed by itself
                g, p = gradient[seed].numpy().copy(), expected[index][seed]
                upper = 0.3 * max(float(np.linalg.norm(p)), 1e-3)
                g *= 1 / max(1.0, float(np.linalg.norm(g)) / upper)
                v, m = squares[index][seed], momenta[index][seed]
                v[...] = 0.999 * v + 0.001 * g * g
                m[...] = 0.9 * m + 0.1 * g / (np.sqrt(v / (1 - 0.999**step)) + 1e-3)
                p -= 0.1 * min(step / 3, 1) * m / (1 - 0.9**step)
        optimizer.apply([each.clone() for each in gradients])
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(
            parameter.detach(), torch.from_numpy(wanted), rtol=1e-6, atol=1e-9
        )


def test_several_laprops_of_one_step_size_are_one() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, 4, generator=generator) for _ in range(3)]
    together = [each.clone().requires_grad_() for each in values]
    apart = [each.clone().requires_grad_() for each in values]
    one = LaProp(together, 0.1, adaptive_clip=0.3)
    several = [LaProp([each], 0.1, adaptive_clip=0.3) for each in apart]
    for _ in range(3):
        gradients = [torch.randn(1, 4, generator=generator) for _ in values]
        one.apply([each.clone() for each in gradients])
        for optimizer, gradient in zip(several, gradients, strict=True):
            optimizer.apply([gradient.clone()])
    torch.testing.assert_close(together, apart, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("options", [{}, {"weight_decay": True}])
def test_laprop_moves_each_seed_by_its_own_step_size(options: dict[str, bool]) -> None:
    start = torch.full((2, 3), 2.0)
    parameter = start.clone().requires_grad_()
    decay = {parameter: 0.5} if options else None
    optimizer = LaProp([parameter], PerSeed((0.1, 0.2), torch.device("cpu")), weight_decay=decay)
    optimizer.apply([torch.ones(2, 3)])
    # The first normalised gradient is 1, whatever the gradient.
    step = 1.0 + (0.5 * 2.0 if options else 0.0)
    wanted = start - step * torch.tensor([[0.1], [0.2]])
    torch.testing.assert_close(parameter.detach(), wanted)
