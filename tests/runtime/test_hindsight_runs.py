"""Runs with hindsight: every method that can, resumed, side by side, compiled, and refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import ROOT, learner_digest, run_cli, tiny_config, write_tiny
from rl_training.algorithms.base import replay_step
from rl_training.algorithms.sources import TransitionReplay, rows_per_update
from rl_training.data.replay.hindsight import Hindsight
from rl_training.envs.factory import probe_env
from rl_training.envs.goal_rewards import TaskPayer, goal_rewards
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.models.rows import split
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.collector import Collector
from rl_training.runtime.compile.cache import as_traced
from rl_training.runtime.compile.equivalence import Undo, compare
from rl_training.runtime.compile.programs import replay_sources
from rl_training.runtime.compile.trace import trace
from rl_training.runtime.replay import make_replay
from rl_training.runtime.train import train
from rl_training.testing.contract import flat_state

METHODS = [
    name
    for name in algorithm_names()
    for settings in [get_algorithm_spec(name).config_class]
    if issubclass(settings, TransitionReplay) and "dataset_path" not in settings.model_fields
]
ABLE = [name for name in METHODS if name != "mbpo"]
FLIP, REACH = "rl_training/BitFlip-v0", "rl_training/PointReach-v0"


def config_of(algo: str, folder: Path, *, asked: bool = False, **settings: Any) -> TrainConfig:
    """A short run on bits or on a table; `asked` is with a task whose rule is not known."""
    discrete = "discrete" in get_algorithm_spec(algo).action_kinds
    known = (FLIP, {"bits": 4}) if discrete else (REACH, {"threshold": 0.5, "max_episode_steps": 9})
    own = ("helpers.envs:AskedFlip", {"bits": 4}) if discrete else ("helpers.envs:AskedReach", {})
    env_id, env_kwargs = own if asked else known
    kwargs = {"hindsight": "future"} | settings
    return tiny_config(algo, folder, env_id=env_id, env_kwargs=env_kwargs, algo_kwargs=kwargs)


def test_all_methods_that_keep_transitions_are_known_here() -> None:
    assert {"sac", "td3", "redq", "droq", "crossq", "tqc", "simba_v2"} <= set(ABLE)
    assert {"discrete_sac", "dqn", "c51", "qr_dqn", "iqn", "fqf"} <= set(ABLE)


@pytest.mark.expensive(only=("dqn", "sac"))
@pytest.mark.parametrize("algo", ABLE)
def test_every_such_method_learns_with_it_and_resumes_to_the_same_bits(
    algo: str, tmp_path: Path
) -> None:
    assert verify_resume(config_of(algo, tmp_path), 39).identical  # in the middle of an episode


@pytest.mark.parametrize("algo", [pytest.param("dqn", marks=pytest.mark.matrix), "sac"])
def test_a_task_that_is_asked_resumes_to_the_same_bits(algo: str, tmp_path: Path) -> None:
    ways: dict[str, Any] = {"hindsight": "episode", "n_step": 3, "prioritized": True}
    assert verify_resume(config_of(algo, tmp_path, asked=True, **ways), 39).identical


def test_asking_the_task_gives_the_run_that_its_rule_gives(tmp_path: Path) -> None:
    digests = [
        learner_digest(train(config_of("dqn", tmp_path / str(asked), asked=asked)).checkpoint_path)
        for asked in (False, True)
    ]
    assert digests[0] == digests[1]
    plain = train(config_of("dqn", tmp_path / "plain", hindsight=None))
    assert learner_digest(plain.checkpoint_path) != digests[0]


@pytest.mark.parametrize("asked", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_three_seeds_side_by_side_are_three_runs(asked: bool, tmp_path: Path) -> None:
    """Up to rounding: a stacked product adds up in another order."""
    config = config_of("dqn", tmp_path, asked=asked, n_step=2)
    group = train(config.replace(seeds=(3, 4, 5), run_name="group"))
    for seed, member in zip((3, 4, 5), group.per_seed, strict=True):
        single = train(config.replace(seed=seed, run_name=f"single-{seed}"))
        ours, theirs = (open_checkpoint(run.checkpoint_path) for run in (member, single))
        for name in ("places", "rng"):
            left, right = (flat_state(c.states["replay"][name]) for c in (ours, theirs))
            assert all(
                torch.equal(torch.as_tensor(left[k]), torch.as_tensor(right[k])) for k in right
            )
        left, right = (flat_state(c.states["learner"]) for c in (ours, theirs))
        for key, value in right.items():
            torch.testing.assert_close(torch.as_tensor(left[key]), torch.as_tensor(value))


def filled(config: TrainConfig) -> tuple[Any, Hindsight]:
    """A learner with a replay of two seeds, which holds a short run."""
    spec = get_algorithm_spec(config.algo)
    env = probe_env(config.env_id, config.env_kwargs)
    learner = spec.build(env, config.algo_config, (0, 1))
    settings = learner.part(TransitionReplay)
    replay = make_replay(settings, env, 2, learner, env_kwargs=config.env_kwargs)
    assert isinstance(replay, Hindsight)
    envs = SeedVectorEnv.make(config.env_id, config.env_kwargs, 2, (0, 1))
    collector = Collector(envs, learner.device)
    collector.start()
    for _ in range(40):
        replay.add_step(collector.step(learner.random_action(2).numpy()).transition)
    envs.close()
    return learner, replay


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("algo", ["dqn", pytest.param("sac", marks=pytest.mark.matrix)])
def test_a_traced_update_is_the_eager_one(algo: str, asked: bool, tmp_path: Path) -> None:
    ways = {"hindsight": "future", "n_step": 2, "prioritized": True}
    learner, replay = filled(config_of(algo, tmp_path, asked=asked, **ways))
    metrics = list(get_algorithm_spec(algo).metrics)
    name, source = next(
        (n, s) for n, s in replay_sources(learner, replay, metrics).items() if n != "act"
    )
    assert name.startswith("update-")
    assert (source.feed is None) != asked
    arguments: tuple[Any, ...] = ()
    if source.feed is not None:
        assert source.examples is not None
        before = flat_state({"rng": replay.rng.state_dict()})
        undo = Undo(source)
        made = trace(source, source.examples())
        undo()
        after = flat_state({"rng": replay.rng.state_dict()})
        assert all(torch.equal(before[key], after[key]) for key in before), "no draw for examples"
        arguments = source.feed()
    else:
        undo = Undo(source)
        made = trace(source)
        undo()
    assert not [n.target for n in made.graph.graph.nodes if n.op == "get_attr"], "no constants"
    gap = compare(source, as_traced(made, source), arguments)
    assert gap is not None
    assert gap.size < 1e-3, gap


def test_an_update_sends_priorities_back_whoever_draws(tmp_path: Path) -> None:
    ways = {"prioritized": True, "hindsight": "final"}
    states = []
    for asked in (False, True):
        learner, replay = filled(config_of("dqn", tmp_path, asked=asked, **ways))
        before = replay.state_dict()["powers"].clone()
        step = partial(replay_step, learner, replay, rows_per_update(learner))
        if asked:
            source = replay_sources(learner, replay, list(get_algorithm_spec("dqn").metrics))
            update = next(s for n, s in source.items() if n.startswith("update-"))
            assert update.feed is not None
            update.function(*update.feed())
        else:
            step()
        states.append(replay.state_dict()["powers"])
        assert not torch.equal(states[-1], before)
    assert torch.equal(states[0], states[1])


@pytest.mark.matrix
@pytest.mark.parametrize("asked", [False, True])
def test_a_compiled_run_learns_what_an_eager_one_does(asked: bool, tmp_path: Path) -> None:
    results = []
    for way in ("off", "compile"):
        config = config_of("dqn", tmp_path / way, asked=asked, prioritized=True)
        results.append(train(config.replace(accelerate=way, total_timesteps=200)))
    left, right = (open_checkpoint(run.checkpoint_path).states for run in results)
    assert right["accelerator"]["decision"]["value"] == 1, "it was compiled"
    ours, theirs = (flat_state(states["learner"]) for states in (left, right))
    for key, value in ours.items():
        torch.testing.assert_close(
            torch.as_tensor(value), torch.as_tensor(theirs[key]), rtol=1e-2, atol=1e-3
        )


@pytest.mark.parametrize(
    ("algo", "settings", "sentence"),
    [
        ("dqn", {"hindsight": "futur"}, "algo_kwargs.hindsight must be one of"),
        ("dqn", {"hindsight": "future", "hindsight_goals": 0}, "algo_kwargs.hindsight_goals must"),
        ("dqn", {"hindsight": "future"}, "hindsight needs observations with the parts"),
        ("sac", {"hindsight": "final"}, "hindsight needs observations with the parts"),
        ("rlpd", {"hindsight": "future"}, "not of prior data"),
        ("mbpo", {"hindsight": "future"}, "learns from imagined transitions"),
        ("ppo", {"hindsight": "future"}, "algo_kwargs.hindsight is not a field of"),
        ("dreamer", {"hindsight": "future"}, "algo_kwargs.hindsight is not a field of"),
        ("cql", {"hindsight": "future"}, "algo_kwargs.hindsight is not a field of"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    algo: str, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, algo)
    words = [f"algo_kwargs.{key}={value}" for key, value in settings.items()]
    given = [word for pair in zip(["--set"] * len(words), words, strict=True) for word in pair]
    said = run_cli("train", "--config", path, *given).sentence()
    assert sentence in said, said
    assert not (tmp_path / "runs" / "run").exists(), "nothing is left behind"


def test_the_task_of_the_page_is_asked_in_batches_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "goals.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "dials.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    env_id = "dials:Dial"
    payer = goal_rewards(probe_env(env_id), {}).payer
    assert isinstance(payer, TaskPayer)
    assert payer.ends is not None
    assert payer.reward is not None
    assert payer.ends._takes_batches
    assert payer.reward._takes_batches
    settings = {"hindsight": "future"}
    config = tiny_config("dqn", tmp_path / "runs", env_id=env_id, algo_kwargs=settings)
    assert verify_resume(config, 39).identical


def test_images_beside_goals_keep_them_in_bytes(tmp_path: Path) -> None:
    env_id = "helpers.envs:SeenGoals"
    config = tiny_config(
        "dqn",
        tmp_path,
        env_id=env_id,
        env_kwargs={"length": 5},
        algo_kwargs={"hindsight": "episode", "features_dim": 8},
    )
    replay = filled(config)[1]
    parts = probe_env(env_id).observation
    assert parts is not None
    batch = replay.sample(50)
    assert batch.obs.dtype == torch.uint8
    goals = split(parts, batch.obs)
    told = {tuple(goal) for goal in goals["desired_goal"].flatten(0, 1).tolist()}
    other = tuple(torch.tensor([1e6, 1 / 3]).tolist())
    assert told == {(0.25, -2.0), other}, "its own goal, or the one that is always achieved"
    assert (goals["achieved_goal"] == torch.tensor([0.25, -2.0])).all()
    assert (goals["observation"] == 7).all()
    assert verify_resume(config, 39).identical
