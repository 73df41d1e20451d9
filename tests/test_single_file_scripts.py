"""The teaching scripts: their updates are the package's, to rounding, and they stay short."""

from __future__ import annotations

import ast
import math
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from bench.evidence.gates import QUICK_SEEDS, SEEDS
from bench.evidence.single_file import (
    PAGE,
    PRESETS,
    RECORDS,
    gate_of,
    measured,
    merge,
    rendered,
    returns_table,
    script_module,
)
from examples.single_file import dqn, ppo, sac
from torch import Tensor, nn

from helpers.tiny import ROOT
from helpers.updates import make_batch
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.sac import SAC
from rl_training.data.batch import RolloutBatch, TransitionBatch
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.experiment.config import load_config
from rl_training.models.actor_with_critics import MLPSACModel
from rl_training.models.mlp_actor_critic import MLPActorCriticModel
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.rng import Rng

FOLDER = ROOT / "examples/single_file"
OBS, ACT, WIDTH, T, N = 3, 2, 16, 6, 4
ALLOWED = {"__future__", "argparse", "copy", "dataclasses", "math", "random", "typing"}
ALLOWED |= {"gymnasium", "numpy", "torch"}
every_script = pytest.mark.parametrize("script", PRESETS)


@every_script
def test_a_script_is_short_and_needs_nothing_but_torch_and_gymnasium(script: str) -> None:
    text = (FOLDER / f"{script}.py").read_text()
    assert 150 <= len(text.splitlines()) <= 300
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    assert imported <= ALLOWED


def test_the_page_has_the_scripts_lines_and_what_the_records_render_to() -> None:
    text = PAGE.read_text()
    for script in PRESETS:
        lines = len((FOLDER / f"{script}.py").read_text().splitlines())
        row = next(line for line in text.splitlines() if line.startswith(f"| [`{script}.py`]"))
        assert row.endswith(f" | {lines} | `{PRESETS[script]}` |")
    stale = "run: python -m bench.evidence.single_file render"
    assert text == rendered(text, RECORDS), stale
    for script in PRESETS:
        seeds = [seed for seed, _ in measured(RECORDS, script)]
        assert len(seeds) >= len(QUICK_SEEDS)
        assert seeds == list(SEEDS[: len(seeds)]), "the gates' seeds, none left out"


def test_a_table_says_when_a_bar_is_missed(tmp_path: Path) -> None:
    records = tmp_path / "records.csv"
    bar = gate_of("sac").bar
    for seed in SEEDS:
        value = bar - 1 if seed == SEEDS[0] else bar + 50
        row = {"script": "sac", "figure": "return", "side": "script", "run": str(seed)}
        merge(records, row | {"value": str(value), "wall_seconds": "1", "cpu_seconds": "1"})
    sac_row, ppo_row = returns_table(records).splitlines()[2:4]
    assert f"reaches {gate_of('sac').iqm_bar:g} | {bar - 1:.1f}, **misses** {bar:g} |" in sac_row
    assert "| 1000..1009 |" in sac_row
    assert "| none yet |" in ppo_row


@every_script
def test_a_script_has_the_settings_of_the_preset(script: str) -> None:
    config = load_config(PRESETS[script])
    resolved = config.resolved()["algo_kwargs"]
    ours = vars(script_module(script).Settings())
    names = {"epochs": "update_epochs", "clip": "clip_coef", "capacity": "buffer_capacity"}
    names |= {"random_steps": "learning_starts", "value_weight": "vf_coef"}
    names |= {"entropy_weight": "ent_coef"}
    run = {"env": config.env_id, "steps": config.total_timesteps, "seed": config.seed}
    run |= {"num_envs": config.num_envs, "eval_episodes": config.eval_episodes}
    assert ours.pop("width") in (resolved["hidden_sizes"][0], resolved["hidden_sizes"][1])
    assert len(set(resolved["hidden_sizes"])) == 1
    if script == "dqn":
        last = resolved["learning_rate"] * resolved["lr_schedule"]["end"]
        assert ours.pop("final_learning_rate") == pytest.approx(last)
    for name, value in ours.items():
        assert value == run.get(name, resolved.get(names.get(name, name))), name


# Updates


def copy_weights(script: nn.Module, stacked: nn.Module, member: int | None = None) -> None:
    """Give a plain perceptron the weights of one seed (and critic) of a stacked one."""
    linear = [layer for layer in script.modules() if isinstance(layer, nn.Linear)]
    for layer, (weight, bias) in zip(linear, layers_of(stacked, member), strict=True):
        with torch.no_grad():
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias.squeeze(0))


def assert_same_weights(script: nn.Module, stacked: nn.Module, member: int | None = None) -> None:
    linear = [layer for layer in script.modules() if isinstance(layer, nn.Linear)]
    for layer, (weight, bias) in zip(linear, layers_of(stacked, member), strict=True):
        torch.testing.assert_close(layer.weight, weight.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.bias, bias.squeeze(0), rtol=1e-4, atol=1e-5)


def layers_of(stacked: nn.Module, member: int | None) -> list[tuple[Tensor, Tensor]]:
    parameters = [p.detach()[0] for p in stacked.parameters()]
    if member is not None:
        parameters = [p[member] for p in parameters]
    return list(zip(parameters[::2], parameters[1::2], strict=True))


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Rng:
    """Lets the scripts draw what a learner of seed 0 draws."""
    rng = Rng((0,), "learner")
    monkeypatch.setattr(torch, "randn_like", lambda like: rng.normal(*like.shape)[0])
    monkeypatch.setattr(torch, "randperm", lambda length: rng.permutation(length)[0])
    return rng


def test_sac_updates_as_the_package_does(draws: Rng) -> None:
    settings = sac.Settings(width=WIDTH, learning_rate=0.01, tau=0.1)
    model = MLPSACModel(OBS, ACT, (WIDTH, WIDTH), rng=Rng((0,), "networks"))
    learner = SAC(model=model, learning_rate=0.01, tau=0.1)
    script = sac.SAC(OBS, ACT, settings)
    copy_weights(script.actor, model.actor)
    for member, critic in enumerate((script.critics.first, script.critics.second)):
        copy_weights(critic, model.critic, member)
    script.targets.load_state_dict(script.critics.state_dict())
    terminated = torch.tensor([[1.0, 0.0] * 4])
    for update in range(4):
        batch = make_batch(key=f"batch{update}", discount=0.99 * (1 - terminated))
        learner.update(batch)
        rows = (batch.obs, batch.action, batch.reward, batch.next_obs, terminated)
        script.update(sac.Batch(*(row[0] for row in rows)))
    assert_same_weights(script.actor, model.actor)
    pairs = [(script.critics, model.critic), (script.targets, learner.target_critic)]
    for ours, theirs in pairs:
        assert_same_weights(ours.first, theirs, 0)
        assert_same_weights(ours.second, theirs, 1)
    assert script.log_alpha.item() == pytest.approx(learner.log_alpha.item(), rel=1e-4)
    assert script.log_alpha.item() != 0


def test_sacs_losses_are_the_packages(draws: Rng) -> None:
    model = MLPSACModel(OBS, ACT, (WIDTH, WIDTH), rng=Rng((0,), "networks"))
    learner, script = SAC(model=model), sac.SAC(OBS, ACT, sac.Settings(width=WIDTH))
    copy_weights(script.actor, model.actor)
    for member, critic in enumerate((script.critics.first, script.critics.second)):
        copy_weights(critic, model.critic, member)
    script.targets.load_state_dict(script.critics.state_dict())
    batch = make_batch(discount=torch.full((1, 8), 0.99))
    rows = sac.Batch(
        batch.obs[0], batch.action[0], batch.reward[0], batch.next_obs[0], torch.zeros(8)
    )
    assert script.critic_loss(rows).item() == pytest.approx(
        learner.regress(batch)[0].item(), rel=1e-5
    )
    loss, metrics = learner.actor_loss(batch)
    ours, entropy = script.actor_loss(rows)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    assert entropy.item() == pytest.approx(metrics["entropy"].item(), rel=1e-5)


def test_dqn_updates_as_the_package_does() -> None:
    settings = dqn.Settings(width=WIDTH, learning_rate=0.01, tau=0.1)
    network = MLPQNetwork(OBS, ACT, (WIDTH, WIDTH), rng=Rng((0,), "networks"))
    learner = DQN(q_network=network, learning_rate=0.01, tau=0.1, target_update_interval=1)
    script = dqn.DQN(OBS, ACT, settings)
    copy_weights(script.network, network)
    script.target.load_state_dict(script.network.state_dict())
    for update in range(4):
        rng = Rng((0,), f"batch{update}")
        batch = TransitionBatch(
            obs=rng.normal(8, OBS),
            action=rng.integers(ACT, 8),
            reward=3 * rng.normal(8),  # both sides of the Huber loss
            next_obs=rng.normal(8, OBS),
            discount=0.99 * (rng.uniform(8) < 0.8),
        )
        rows = dqn.Batch(
            batch.obs[0], batch.action[0], batch.reward[0], batch.next_obs[0], batch.discount[0]
        )
        loss = learner.td_loss(batch)[0]
        assert script.loss(rows).item() == pytest.approx(loss.item(), rel=1e-4)
        learner.update(batch)
        script.update(rows)
    assert_same_weights(script.network, network)
    assert_same_weights(script.target, learner.target_network)


def rollout(key: str) -> tuple[RolloutBatch, ppo.Rollout]:
    """The same random rollout for both, with episodes that terminate and others that are cut."""
    rng = Rng((0,), key)
    values: dict[str, Any] = {
        "obs": rng.normal(T, N, OBS),
        "action": rng.integers(ACT, T, N),
        "reward": rng.normal(T, N),
        "next_obs": rng.normal(T, N, OBS),
        "terminated": rng.uniform(T, N) < 0.2,
        "truncated": rng.uniform(T, N) < 0.2,
    }
    return RolloutBatch(**values), ppo.Rollout(**{name: x[0] for name, x in values.items()})


def make_ppo(**settings: Any) -> tuple[PPO, ppo.PPO]:
    model = MLPActorCriticModel(OBS, ACT, (WIDTH, WIDTH), discrete=True, rng=Rng((0,), "networks"))
    own = {"minibatch_size": 8, "update_epochs": 3, "learning_rate": 0.01}
    learner = PPO(model=model, **(own | settings))
    names = {"ent_coef": "entropy_weight"}
    given = {names.get(name, name): value for name, value in settings.items()}
    script = ppo.PPO(
        OBS,
        ACT,
        ppo.Settings(width=WIDTH, minibatch_size=8, epochs=3, learning_rate=0.01, **given),
    )
    copy_weights(script.model.actor, model.actor)
    copy_weights(script.model.critic, model.critic)
    return learner, script


@pytest.mark.parametrize("ent_coef", [0.0, 0.1])
def test_ppo_updates_as_the_package_does(ent_coef: float, draws: Rng) -> None:
    learner, script = make_ppo(ent_coef=ent_coef)
    for update in range(2):
        theirs, ours = rollout(f"rollout{update}")
        learner.update(theirs)
        script.update(ours)
    assert_same_weights(script.model.actor, learner.model.actor)
    assert_same_weights(script.model.critic, learner.model.critic)


def test_ppos_advantages_are_the_packages() -> None:
    learner, script = make_ppo()
    theirs, ours = rollout("rollout")
    assert ours.terminated.any()
    assert (ours.truncated & ~ours.terminated).any()
    prepared = learner.prepare(theirs)
    rows = script.prepare(ours)
    torch.testing.assert_close(rows.advantage, prepared.advantage[0])
    torch.testing.assert_close(rows.target, prepared.target[0])
    torch.testing.assert_close(rows.log_prob, prepared.log_prob[0])


@pytest.mark.parametrize("stored", [7, 40, 95])
def test_dqns_replay_makes_the_packages_n_step_transitions(stored: int) -> None:
    settings = dqn.Settings(capacity=40, n_step=5)
    script = dqn.Replay(settings, OBS)
    package = ReplayBuffer(40, (OBS,), action_dtype=torch.int64, n_step=5, gamma=settings.gamma)
    generator = np.random.default_rng(stored)
    for _ in range(stored):
        obs, next_obs = generator.normal(size=(2, OBS)).astype(np.float32)
        action, reward = int(generator.integers(ACT)), float(generator.normal())
        terminated, truncated = (bool(x) for x in generator.random(2) < 0.15)
        script.add(obs, action, reward, next_obs, terminated, truncated)
        row = (obs, action, np.float32(reward), next_obs, terminated, truncated)
        package.add(*(np.asarray(value)[None, None] for value in row))
    rows = torch.arange(min(stored, 40))
    ours, theirs = script.transitions(rows), package.gather(rows[None])
    for name in ("obs", "action", "reward", "next_obs", "discount"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name)[0])


# Running

SHORT: dict[str, dict[str, Any]] = {
    "sac": {"steps": 420, "random_steps": 300, "batch_size": 16, "width": 16},
    "ppo": {"steps": 512, "num_steps": 32, "num_envs": 4, "width": 16},
    "dqn": {"steps": 420, "random_steps": 200, "batch_size": 16, "width": 16},
}


def short_run(script: str, **changes: Any) -> Any:
    module = script_module(script)
    settings = {"eval_interval": 200, "eval_episodes": 1} | SHORT[script] | changes
    return module.train(module.Settings(**settings))


def weights_of(agent: Any) -> Tensor:
    networks = [part for part in vars(agent).values() if isinstance(part, nn.Module)]
    return torch.cat([p.detach().flatten() for net in networks for p in net.parameters()])


@every_script
def test_a_script_runs_learns_repeats_itself_and_says_how_it_goes(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = weights_of(short_run(script))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("step ") and " return " in line for line in lines)
    assert torch.equal(first, weights_of(short_run(script, eval_interval=0))), (
        "evaluation leaves no trace"
    )
    assert capsys.readouterr().out == ""
    assert not torch.equal(first, weights_of(short_run(script, seed=1)))
    assert torch.isfinite(first).all()


def test_sac_stores_a_time_limit_as_a_step_with_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sac.Replay, "add", lambda self, *row: stored.append(row))
    short_run("sac", steps=420, random_steps=420, eval_interval=0)
    assert [row[4] for row in stored] == [0.0] * 420, "Pendulum never terminates"
    follows = [bool(np.array_equal(a[3], b[0])) for a, b in pairwise(stored)]
    assert [step for step, same in enumerate(follows, 1) if not same] == [200, 400]


def test_ppos_runner_keeps_the_last_observation_of_an_episode() -> None:
    torch.manual_seed(0)
    runner = ppo.Runner(ppo.Settings(env="MountainCar-v0", num_envs=2))
    model = ppo.ActorCritic(2, 3, 16)
    played = runner.rollout(model, 210)  # the time limit is 200 steps
    assert not played.terminated.any()
    assert played.truncated.nonzero().tolist() == [[199, 0], [199, 1]]
    follows = (played.next_obs[:-1] == played.obs[1:]).all(-1)
    assert follows.logical_not().nonzero().tolist() == [[199, 0], [199, 1]]
    again = runner.rollout(model, 3)
    torch.testing.assert_close(again.obs[0], played.next_obs[-1])


@every_script
def test_a_script_takes_its_settings_from_the_command_line(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT[script].items()]
    monkeypatch.setattr(sys, "argv", [script, *words, "--eval-episodes=1", "--eval-interval=300"])
    runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    evaluation, line = capsys.readouterr().out.splitlines()
    assert evaluation.startswith("step ")
    name, _, figures = line.partition(": ")
    assert name == "100 episodes at the end"
    assert all(math.isfinite(float(number)) for number in figures.split(" +- "))


def test_the_scripts_are_for_one_kind_of_action_and_say_so() -> None:
    with pytest.raises(AssertionError, match="discrete actions"):
        ppo.train(ppo.Settings(env="Pendulum-v1"))
    with pytest.raises(AssertionError, match="continuous actions"):
        sac.make_env("CartPole-v1")
    assert isinstance(gym.make("CartPole-v1").action_space, gym.spaces.Discrete)
