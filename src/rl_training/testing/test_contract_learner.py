"""The contract of learners, for every registered algorithm: a new one is covered by existing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.optim import Adam
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.experiment.checkpoint.codec import compare_states
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.recorder import FOLD_AFTER, MetricRecorder
from rl_training.state import Stateful
from rl_training.testing.contract import (
    TASK,
    above_rounding,
    assert_member_equals,
    build,
    flat_state,
    make_batch,
    names_under_test,
    nearest_allowed,
    no_host_reads,
    parts_tasks,
    pixel_task,
    random_obs,
    takes_pixels,
)

CASES = [
    *((n, TASK[kind]) for n in names_under_test() for kind in get_algorithm_spec(n).action_kinds),
    *((n, pixel_task(n)) for n in names_under_test() if takes_pixels(n)),
    *((n, task) for n in names_under_test() for task in parts_tasks(n)),
]
every_case = pytest.mark.parametrize(("algo", "task"), CASES)


@every_case
def test_update_moves_every_trainable_tensor(algo: str, task: str) -> None:
    learner, env = build(algo, task=task)
    names = [
        f"{network}.{name}"
        for network in learner.network_names
        for name, _ in getattr(learner, network).named_parameters()
    ]
    before = flat_state(learner.state_dict())
    for key in range(3):
        batch = make_batch(algo, env, (0,), key)
        learner.update(batch)
        imagination = imagination_of(learner)
        if imagination is not None and isinstance(batch, TransitionBatch):
            imagination.update(batch)
    after = flat_state(learner.state_dict())
    assert names
    for name in names:
        assert not torch.equal(before[name], after[name]), f"{name} did not move"


@every_case
def test_target_networks_take_no_gradient(algo: str, task: str) -> None:
    learner, _ = build(algo, task=task)
    targets = [
        m for n, m in vars(learner).items() if isinstance(m, torch.nn.Module) and "target" in n
    ]
    optimized = {id(p) for optimizer in learner.optimizers() for p in optimizer.parameters}
    for module in targets:
        for parameter in module.parameters():
            assert not parameter.requires_grad
            assert id(parameter) not in optimized


@every_case
def test_metrics_are_finite_and_exactly_the_declared_ones(algo: str, task: str) -> None:
    learner, env = build(algo, task=task)
    result = learner.update(make_batch(algo, env, (0,)))
    assert set(result.metrics) == set(get_algorithm_spec(algo).metrics)
    for name, value in result.metrics.items():
        assert isinstance(value, float)
        assert torch.isfinite(torch.tensor(value)), name
        assert result.metrics.tensors[name].shape[0] == 1, name
        assert not result.metrics.tensors[name].requires_grad, name
    assert result.num_gradient_steps >= 1


@pytest.mark.parametrize("algo", names_under_test())
def test_log_lines_may_follow_any_number_of_updates(algo: str) -> None:
    """Windows that end where the recorder has just folded, or that hold nothing, too.

    Each window is recorded update by update, as rows of a compiled block, and both ways with a
    checkpoint in the middle and at the end.
    """
    seeds = (3, 7)
    learner, env = build(algo, seeds=seeds)
    result = learner.update(make_batch(algo, env, seeds))
    names = list(get_algorithm_spec(algo).metrics)
    tensors = [result.metrics.tensors[n].double().reshape(len(seeds), -1).mean(1) for n in names]
    row = torch.stack(tensors, -1)  # [S, M]
    expected = [dict(zip(names, means, strict=True)) for means in row.tolist()]
    recorders = [MetricRecorder(names, len(seeds), learner.device) for _ in range(3)]
    windows = (1, FOLD_AFTER - 1, FOLD_AFTER, 0, 2 * FOLD_AFTER, FOLD_AFTER + 1, FOLD_AFTER)
    for window in windows:
        for _ in range(window):
            recorders[0].record(result)
        recorders[1].record_rows(row.expand(window, -1, -1))
        for part in (window // 2, window - window // 2):
            recorders[2].record_rows(row.expand(part, -1, -1))
            restored = MetricRecorder(names, len(seeds), learner.device)
            restored.load_state_dict(recorders[2].state_dict())
            recorders[2] = restored
        for recorder in recorders:
            for means, known in zip(recorder.flush(), expected, strict=True):
                assert means == pytest.approx(known if window else {}, rel=1e-9, abs=1e-12), window
    assert recorders[1].total_gradient_steps.value == sum(windows)
    assert all(recorder.first_bad() == [{}, {}] for recorder in recorders)


@every_case
def test_update_reads_nothing_on_the_host(algo: str, task: str) -> None:
    learner, env = build(algo, task=task)
    batch = make_batch(algo, env, (0,))
    learner.update(batch)
    with no_host_reads():
        learner.update(batch)


def test_the_host_read_guard_can_fail() -> None:
    for read in (lambda t: t.item(), bool, float, lambda t: t.tolist(), lambda t: t.numpy()):
        with no_host_reads(), pytest.raises(AssertionError, match="read on the host"):
            read(torch.ones(1))


@every_case
def test_state_round_trip_gives_a_bit_equal_next_update(algo: str, task: str) -> None:
    learner, env = build(algo, task=task)
    for key in range(4):
        learner.update(make_batch(algo, env, (0,), key))
    other, _ = build(algo, seeds=(99,), task=task)
    other.load_state_dict(learner.state_dict())
    for key in range(4, 7):
        batch = make_batch(algo, env, (0,), key)
        first, second = learner.update(batch), other.update(batch)
        assert dict(first.metrics) == dict(second.metrics)
    assert compare_states(learner.state_dict(), other.state_dict()) == []


@pytest.mark.expensive
@every_case
def test_three_stacked_seeds_equal_three_single_learners(algo: str, task: str) -> None:
    seeds = (3, 7, 11)
    settings = above_rounding(algo)
    group, env = build(algo, seeds=seeds, task=task, **settings)
    singles = [build(algo, seeds=(seed,), task=task, **settings)[0] for seed in seeds]
    for key in range(5):
        group.update(make_batch(algo, env, seeds, key))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch(algo, env, (seed,), key))
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)


@every_case
def test_seeds_of_a_group_differ(algo: str, task: str) -> None:
    group, _ = build(algo, seeds=(0, 1), task=task)
    weights = getattr(group, group.network_names[0]).parameters()
    assert any(not torch.equal(weight[0], weight[1]) for weight in weights)


@every_case
def test_act_is_valid_and_deterministic_when_asked(algo: str, task: str) -> None:
    learner, env = build(algo, seeds=(0, 1), task=task)
    obs = random_obs(env, (2, 5), torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for explore in (False, True):
            action = learner.act(obs, explore=explore)
            assert action.shape[:2] == (2, 5)
            scaled = env.scale_action(action.numpy().reshape(10, *action.shape[2:]))
            if env.actions_are_counted:
                index = env.unscale_action(scaled)
                assert ((index >= 0) & (index < (env.action_sizes or env.action_dim))).all()
                assert torch.equal(nearest_allowed(env, obs, action), action)
            else:
                assert (scaled >= env.action_low).all()
                assert (scaled <= env.action_high).all()
        first, second = learner.act(obs), learner.act(obs)
    assert torch.equal(first, second)


@every_case
def test_acting_deterministically_leaves_the_state_alone(algo: str, task: str) -> None:
    learner, env = build(algo, task=task)
    before = flat_state(learner.state_dict())
    with torch.inference_mode():
        learner.act(random_obs(env, (1, 3), torch.Generator()), explore=False)
    assert compare_states(before, flat_state(learner.state_dict())) == []


@pytest.mark.parametrize("algo", names_under_test())
def test_update_takes_a_plain_mapping(algo: str) -> None:
    learner, env = build(algo, gamma=0.99)  # by which the rows of `make_batch` are discounted
    twin, _ = build(algo, gamma=0.99)
    batch = make_batch(algo, env, (0,))
    values = {name: tensor[0] for name, tensor in vars(batch).items() if tensor is not None}
    mapping = {
        "obs": values["obs"],
        "actions": values["action"],
        "rewards": values["reward"],
    }
    if "next_obs" in values:
        mapping["next_obs"] = values["next_obs"]
    if "next_action" in values:
        mapping["next_actions"] = values["next_action"]
        mapping["next_action_mask"] = values["next_action_mask"]
    if "is_first" in values:
        mapping |= {"dones": values["terminated"], "is_first": values["is_first"]}
    elif "discount" in values:
        mapping["dones"] = (values["discount"] == 0).float()
    else:
        mapping |= {"dones": values["terminated"], "truncations": values["truncated"]}
    expected = learner.update(batch)
    assert dict(twin.update(mapping, global_step=1).metrics) == pytest.approx(
        dict(expected.metrics)
    )


OTHER_EPSILONS = {
    ("gail", "discriminator_optimizer"): "discriminator_adam_epsilon",
}
"""Optimizers whose epsilon has a setting of its own."""
DEFAULT_EPSILONS = {
    ("ppo", "optimizer"): 1e-5,
    ("recurrent_ppo", "optimizer"): 1e-5,
    ("gail", "optimizer"): 1e-5,
}
"""Those that are not Adam's usual 1e-8."""


@pytest.mark.parametrize("algo", names_under_test())
def test_every_adam_has_the_epsilon_of_its_setting(algo: str) -> None:
    def epsilons(**settings: Any) -> dict[str, float]:
        learner = build(algo, **settings)[0]
        owners = [learner, *(part for part in vars(learner).values() if isinstance(part, Stateful))]
        return {
            name: value.eps
            for owner in owners
            for name, value in vars(owner).items()
            if isinstance(value, Adam)
        }

    usual = epsilons()
    assert usual == {name: DEFAULT_EPSILONS.get((algo, name), 1e-8) for name in usual}
    names = {name: OTHER_EPSILONS.get((algo, name), "adam_epsilon") for name in usual}
    settings = {
        setting: 0.1 * place for place, setting in enumerate(sorted(set(names.values())), 1)
    }
    assert epsilons(**settings) == {name: settings[setting] for name, setting in names.items()}
    with pytest.raises(ConfigError, match="adam_epsilon must be > 0"):
        build(algo, adam_epsilon=0.0)
