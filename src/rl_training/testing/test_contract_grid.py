"""The contract of settings that vary within a group, for every registered algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.train import train
from rl_training.testing.contract import (
    TASK,
    above_rounding,
    assert_member_equals,
    build,
    flat_state,
    make_batch,
    names_under_test,
    no_host_reads,
    random_obs,
    rate_name,
    small_config,
    varying_values,
)

SEEDS = (7, 7, 3)
"""Two members that differ in nothing but a setting, and one of another seed."""
CASES = [
    pytest.param(algo, TASK[kind], name, id=f"{algo}-{kind}-{name}")
    for algo in names_under_test()
    for kind in get_algorithm_spec(algo).action_kinds
    for name in get_algorithm_spec(algo).config_class.may_vary()
]
every_case = pytest.mark.parametrize(("algo", "task", "name"), CASES)
every_algorithm = pytest.mark.parametrize("algo", names_under_test())


READ_BY_ROLLOUTS = ("penalty_coef",)
"""Settings that change what is imagined, which no update of a given batch shows."""


def groups_and_singles(
    algo: str, task: str, varied: Mapping[str, Sequence[float]], **settings: Any
) -> tuple[AnyLearner, list[AnyLearner], EnvSpec]:
    """A group with varied settings, and the learners its members would be alone."""
    settings = above_rounding(algo) | settings
    group, env = build(algo, SEEDS, task, varied, **settings)
    singles = []
    for index, seed in enumerate(SEEDS):
        point = {name: values[index] for name, values in varied.items()}
        singles.append(build(algo, (seed,), task, **settings | point)[0])
    return group, singles, env


def update_all(
    algo: str, env: EnvSpec, group: AnyLearner, singles: Sequence[AnyLearner], keys: range
) -> None:
    for key in keys:
        group.update(make_batch(algo, env, SEEDS, key))
        for seed, single in zip(SEEDS, singles, strict=True):
            single.update(make_batch(algo, env, (seed,), key))


def parameters_of(learner: AnyLearner, index: int) -> dict[str, torch.Tensor]:
    state = flat_state(learner.state_dict())
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return {k: v[index] for k, v in tensors.items() if v.ndim and v.numel()}


def explored(learner: AnyLearner, env: EnvSpec) -> torch.Tensor:
    """Actions that explore, at the same observations for every member."""
    obs = random_obs(env, (1, 5), torch.Generator().manual_seed(0))
    with torch.inference_mode():
        group = obs.expand(learner.num_seeds, *obs.shape[1:])
        return learner.act_from(learner.initial_acting_state(5), group, explore=True)


@pytest.mark.expensive(only=("sac",))
@every_case
def test_a_member_equals_the_single_learner_with_its_setting(
    algo: str, task: str, name: str
) -> None:
    varied = {name: varying_values(algo, name, len(SEEDS))}
    group, singles, env = groups_and_singles(algo, task, varied)
    update_all(algo, env, group, singles, range(5))
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)
    actions = explored(group, env)
    for index, single in enumerate(singles):
        if actions.is_floating_point():
            torch.testing.assert_close(actions[index], explored(single, env)[0], atol=1e-4, rtol=0)
    first, second = parameters_of(group, 0), parameters_of(group, 1)
    gap = max(float((first[k].double() - second[k].double()).abs().max()) for k in first)
    gap = max(gap, float((actions[0] - actions[1]).abs().max()))  # what only exploring reads
    assert gap > 1e-4 or name in READ_BY_ROLLOUTS, (
        f"{name} changes nothing that this test could see"
    )


@pytest.mark.expensive
@every_algorithm
def test_all_settings_vary_at_once_under_a_schedule(algo: str) -> None:
    names = [n for n in get_algorithm_spec(algo).config_class.may_vary() if n != "alpha"]
    varied = {name: varying_values(algo, name, len(SEEDS)) for name in names}
    task = TASK[get_algorithm_spec(algo).action_kinds[0]]
    schedule = {"lr_schedule": {"type": "linear"}}
    group, singles, env = groups_and_singles(algo, task, varied, **schedule)
    for part in range(3):
        for learner in (group, *singles):
            learner.set_progress(part / 4)
        update_all(algo, env, group, singles, range(2 * part, 2 * part + 2))
    for index, single in enumerate(singles):
        assert_member_equals(group, index, single)
        assert group.schedule_values(index) == pytest.approx(single.schedule_values(), rel=1e-6)


@every_case
def test_what_varies_is_not_saved_and_read_on_the_device_only(
    algo: str, task: str, name: str
) -> None:
    values = varying_values(algo, name, 2)
    group, env = build(algo, (1, 2), task, {name: values})
    settings: dict[str, Any] = {name: values[0]}
    plain, _ = build(algo, (1, 2), task, **settings)
    assert flat_state(group.state_dict()).keys() == flat_state(plain.state_dict()).keys()
    batch = make_batch(algo, env, (1, 2))
    group.update(batch)
    with no_host_reads():
        group.update(batch)


@every_algorithm
def test_a_learner_refuses_what_cannot_vary(algo: str) -> None:
    with pytest.raises(ConfigError, match=r"varied gamma = \[0.9\]: must be one of \w*rate"):
        build(algo, varied={"gamma": [0.9]})
    with pytest.raises(ConfigError, match="with 1 values, one per member"):
        build(algo, varied={rate_name(algo): [0.1, 0.2]})


@pytest.mark.expensive(only=("sac",))
@every_algorithm
def test_a_run_over_a_grid_resumes_to_the_bit(algo: str, tmp_path: Path) -> None:
    names = get_algorithm_spec(algo).config_class.may_vary()[:2]
    grid = {name: list(varying_values(algo, name, 2)) for name in names}
    report = verify_resume(small_config(algo, tmp_path, seed=4, grid=grid), 70)
    assert report.identical, report.lines()


@pytest.mark.expensive(only=("sac",))
@every_algorithm
def test_members_of_a_grid_equal_single_runs(algo: str, tmp_path: Path) -> None:
    rate = rate_name(algo)
    rates = varying_values(algo, rate, 2)
    config = small_config(
        algo,
        tmp_path,
        seeds=[1, 2],
        grid={rate: list(rates)},
        total_timesteps=96,
        algo_kwargs=above_rounding(algo),
    )
    group = train(config)
    for member, result in zip(config.members, group.per_seed, strict=True):
        single = train(config.for_member(member))
        assert result.run_dir.name == member.folder
        ours = flat_state(load_checkpoint(result.checkpoint_path).states["learner"])
        alone = flat_state(load_checkpoint(single.checkpoint_path).states["learner"])
        assert ours.keys() == alone.keys()
        for name, value in alone.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)
