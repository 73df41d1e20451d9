"""The Python API as somebody uses it who knows other packages."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from helpers.tiny import tiny_config
from rl_training import (
    Callback,
    OfflineDataset,
    PruneTrial,
    SaveEvery,
    StopOnReturn,
    TrainerState,
)
from rl_training.api.algorithms import managed_class
from rl_training.envs.given import PREFIX, name_of
from rl_training.errors import CheckpointError, ConfigError, DataError, EnvError, SpecMismatch
from rl_training.experiment.checkpointing import open_checkpoint
from rl_training.runtime.results import TrainingInterrupted

SMALL: dict[str, Any] = {"hidden_sizes": (16,), "eval_episodes": 1, "eval_interval": 0}
DQN_SMALL: dict[str, Any] = SMALL | {"learning_starts": 16, "batch_size": 8}


class Corridor(gym.Env[Any, Any]):
    """Walk right to the end."""

    def __init__(self, length: int = 4) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.steps, self.closed = length, 0, False
        self.place = self.age = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin at the left."""
        super().reset(seed=seed, options=options)
        self.place = self.age = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Move by one."""
        self.steps, self.age = self.steps + 1, self.age + 1
        self.place = max(0, self.place + (1 if action else -1))
        there = self.place >= self.length
        return self._seen(), float(there), there, self.age >= 20, {}

    def _seen(self) -> Any:
        return np.array([min(1, self.place / self.length)], np.float32)

    def close(self) -> None:
        """Note it."""
        self.closed = True


class NoCopies(Corridor):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


def agent(algo: str, *given: Any, **settings: Any) -> Any:
    return managed_class(algo)(*given, **settings)


@pytest.fixture(autouse=True)
def _runs_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The constructor


def test_an_id_a_preset_and_a_configuration_are_told_apart(tmp_path: Path) -> None:
    assert agent("ppo", "CartPole-v1").config.env_id == "CartPole-v1"
    preset = agent("sac", "sac/pendulum", total_timesteps=123, batch_size=32)
    assert (preset.config.total_timesteps, preset.config.algo_config.batch_size) == (123, 32)
    assert preset.config.algo_kwargs["learning_rate"] == 1e-3, "what the preset says stays"
    config = tiny_config("sac", tmp_path)
    assert agent("sac", config).config == config
    assert agent("sac", config, seed=7).config.seed == 7
    on_other = agent("ppo", "ppo/cartpole", env="Acrobot-v1")
    assert on_other.config.env_id == "Acrobot-v1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1e-3}, "did you mean learning_rate"),
        ({"total_timestep": 10}, "did you mean total_timesteps"),
        ({"learning_rate": -1.0}, "learning_rate must be > 0"),
        ({"num_envs": 0}, "num_envs must be >= 1"),
        ({"env": 3}, "env must be an id"),
        ({"env": int}, "env must be an id"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent("sac", **({"env": "Pendulum-v1"} | settings))


def test_a_method_without_an_environment_says_what_to_give() -> None:
    with pytest.raises(
        ConfigError, match=r"SAC needs an environment, such as SAC\('Pendulum-v1'\)"
    ):
        agent("sac")
    with pytest.raises(ConfigError, match=r"such as DQN\('CartPole-v1'\)"):
        agent("dqn")
    with pytest.raises(ConfigError, match="of 'ppo'"):
        agent("sac", "ppo/cartpole")


# Environments in any form


def test_an_object_is_stepped_itself_and_left_open() -> None:
    env = Corridor()
    learned = agent("dqn", env, total_timesteps=40, **DQN_SMALL)
    assert learned.config.env_id.startswith(PREFIX)
    learned.learn(progress=False)
    assert env.steps == 40, "evaluation and the first look step copies"
    assert not env.closed
    learned.learn(20, progress=False)
    assert env.steps == 60


def test_an_object_is_one_environment() -> None:
    with pytest.raises(ConfigError, match="is one environment, but num_envs 2"):
        agent("dqn", Corridor(), num_envs=2, **DQN_SMALL).learn(40, progress=False)
    with pytest.raises(ConfigError, match="with 2 seeds needs more"):
        agent("dqn", Corridor(), **DQN_SMALL).learn(40, progress=False, seeds=[1, 2])


def test_an_object_that_cannot_be_copied_asks_for_a_function() -> None:
    with pytest.raises(EnvError, match=r"cannot be copied .* give a function that makes it"):
        agent("dqn", NoCopies(), **DQN_SMALL).learn(40, progress=False)


def test_a_function_is_vectorised_and_takes_env_kwargs() -> None:
    made: list[int] = []

    def corridor(length: int = 4) -> Corridor:
        made.append(length)
        return Corridor(length)

    settings = DQN_SMALL | {"env_kwargs": {"length": 3, "max_episode_steps": 9}}
    learned = agent("dqn", corridor, num_envs=3, total_timesteps=60, **settings)
    learned.learn(progress=False)
    assert set(made) == {3}
    assert learned._agent().env_spec.max_episode_steps == 9


def test_a_class_of_a_module_has_its_own_name_and_one_of_a_script_does_not() -> None:
    assert name_of(Corridor) == f"{__name__}:Corridor"

    class Local(Corridor):
        """Cannot be imported."""

    assert name_of(Local) == f"{PREFIX}Local"
    other = type("Local", (Corridor,), {"__module__": "__main__"})
    assert name_of(other) == f"{PREFIX}Local-2", "another class of that name"
    assert name_of(Local) == f"{PREFIX}Local"


def test_a_function_that_makes_something_else_is_refused() -> None:
    with pytest.raises(EnvError, match=r"gave int, not a gymnasium\.Env"):
        agent("dqn", lambda: 3, **DQN_SMALL).learn(40, progress=False)
    with pytest.raises(EnvError, match="ValueError: broken"):
        agent("dqn", _broken, **DQN_SMALL).learn(40, progress=False)


def _broken() -> Any:
    raise ValueError("broken")


def test_another_process_is_told_to_give_the_environment_again() -> None:
    learned = agent("dqn", lambda: Corridor(3), total_timesteps=40, **DQN_SMALL)
    result = learned.learn(progress=False)
    from rl_training.envs import given

    given._known.pop(learned.config.env_id)  # as in another process
    loaded = managed_class("dqn").load(result.run_dir)
    assert loaded.predict([0.0]).shape == ()
    with pytest.raises(EnvError, match="was handed over in Python, and this process does not have"):
        loaded.evaluate()
    loaded = managed_class("dqn").load(result.run_dir, env=lambda: Corridor(3))
    loaded.evaluate(episodes=1)
    assert loaded.learn(20, progress=False).metrics["global_step"] == 60
    with pytest.raises(ConfigError, match="was trained on"):
        managed_class("dqn").load(result.run_dir, env="CartPole-v1")


# Learning on


def test_a_run_goes_on_from_where_it_was_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    first = agent("ppo", "CartPole-v1", num_steps=16, minibatch_size=8, **SMALL)
    run = first.learn(32, progress=False).run_dir
    loaded = managed_class("ppo").load(run)
    result = loaded.learn(32)
    assert (result.run_dir, result.metrics["global_step"]) == (run, 64)
    assert f"continuing with {run} to step 64" in capsys.readouterr().err


def test_a_saved_file_begins_a_new_run_with_its_networks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = agent("dqn", "CartPole-v1", total_timesteps=40, **DQN_SMALL)
    first.learn(progress=False)
    loaded = managed_class("dqn").load(first.save("agent.safetensors"))
    before = copy.deepcopy(loaded.networks["q_network"].state_dict())
    seen: dict[str, Any] = {}

    class First(Callback):
        """Looks at the networks before they move."""

        def on_step(self, state: TrainerState) -> None:
            """Take the first ones."""
            assert state.learner is not None
            if not seen:
                seen.update(state.learner.networks()["q_network"].state_dict())

    result = loaded.learn(8, callbacks=First())
    assert result.run_dir != first.result.run_dir
    assert "a new run starts with the networks of agent.safetensors" in capsys.readouterr().err
    assert all(torch.equal(before[name], seen[name]) for name in before)


def test_resume_takes_up_an_interrupted_run() -> None:
    learned = agent("dqn", "CartPole-v1", total_timesteps=60, **DQN_SMALL)
    with pytest.raises(CheckpointError, match="has no run to resume"):
        learned.resume()
    learned.learn(progress=False, callbacks=lambda state: state.step < 30)
    assert learned.result.stop_reason == "<lambda> returned False"
    assert learned.resume(progress=False).metrics["global_step"] == 60


def test_a_run_that_a_signal_stopped_can_be_resumed_from_the_agent() -> None:
    learned = agent("dqn", "CartPole-v1", total_timesteps=60, **DQN_SMALL)

    def stop(state: TrainerState) -> None:
        if state.step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        learned.learn(progress=False, callbacks=stop)
    assert learned.resume(progress=False).metrics["global_step"] == 60


def test_what_is_logged_at_the_last_evaluation_is_written() -> None:
    class Last(Callback):
        """Logs at every evaluation."""

        def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
            """Write the best."""
            state.log({"best": max(returns[0])})

    learned = agent("dqn", "CartPole-v1", total_timesteps=40, **DQN_SMALL)
    run = learned.learn(progress=False, callbacks=Last()).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "best" in line] == [40]


def test_the_text_of_an_agent_says_method_task_steps_and_return() -> None:
    learned = agent("dqn", "CartPole-v1", total_timesteps=40, **DQN_SMALL)
    assert repr(learned) == "DQN(CartPole-v1)"
    learned.learn(progress=False)
    assert repr(learned).startswith("DQN(CartPole-v1, 40 steps, last return ")


# Using an agent


def test_evaluation_takes_another_environment_of_the_same_spaces() -> None:
    learned = agent("dqn", lambda: Corridor(2), total_timesteps=40, **DQN_SMALL)
    learned.learn(progress=False)
    limited = gym.wrappers.TimeLimit(Corridor(9), 5)
    assert learned.evaluate(episodes=2, env=limited).metrics["eval_return_max"] == 0.0
    with pytest.raises(SpecMismatch, match="obs_shape"):
        learned.evaluate(env="CartPole-v1")
    with pytest.raises(ConfigError, match="are the same; give one"):
        learned.evaluate(3, episodes=3)


def test_the_policy_is_a_module_that_does_what_predict_does() -> None:
    learned = agent("sac", "Pendulum-v1", **SMALL)
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    policy = learned.policy
    assert isinstance(policy, torch.nn.Module)
    with torch.no_grad():
        np.testing.assert_allclose(policy(torch.from_numpy(obs)).numpy(), learned.predict(obs))
    assert learned.networks["model"] is not policy


def test_a_plan_is_carried_on_when_the_state_is_given_back(tmp_path: Path) -> None:
    learned = agent("pets", tiny_config("pets", tmp_path))
    obs = [1.0, 0.0, 0.0]
    state = learned.initial_state()
    first = learned.predict(obs, state)
    np.testing.assert_array_equal(first, learned.predict(obs, learned.initial_state()))
    before = copy.deepcopy(state.state_dict())
    learned.predict(obs, state)
    after = state.state_dict()
    assert any(not torch.equal(before[n], after[n]) for n in before if torch.is_tensor(before[n]))
    with pytest.raises(DataError, match="the state is that of 1 environments, but there are 2"):
        learned.predict([obs, obs], state)
    with pytest.raises(SpecMismatch, match="depends on what it remembers"):
        _ = learned.policy


def test_methods_without_a_memory_have_no_state() -> None:
    assert agent("dqn", "CartPole-v1").initial_state() is None


# Callbacks


class Noted(Callback):
    """Asks for everything a callback may ask for, once."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    def on_step(self, state: TrainerState) -> None:
        """Ask at step 20."""
        if state.step == 20:
            state.request_evaluation()
            state.request_save()
            state.scale_learning_rate(0.5)
            state.log({"mine": 3})

    def on_evaluation(self, state: TrainerState, returns: Sequence[Sequence[float]]) -> None:
        """Note it."""
        self.evaluated.append(state.step)

    def on_checkpoint(self, state: TrainerState, paths: Sequence[Path]) -> None:
        """Note it."""
        self.saved.append(state.step)


def test_a_callback_may_evaluate_save_log_and_change_the_learning_rate() -> None:
    noted, rates = Noted(), list[float]()

    class Rates(Callback):
        """Notes logged learning rates."""

        def on_log(self, state: TrainerState, values: Mapping[str, float]) -> None:
            """Note it."""
            rates.append(values["learning_rate"])

    settings = DQN_SMALL | {"log_interval": 20, "learning_rate": 1e-3}
    learned = agent("dqn", "CartPole-v1", total_timesteps=60, **settings)
    result = learned.learn(progress=False, callbacks=[noted, Rates()])
    assert noted.evaluated == [20, 60]
    assert 20 in noted.saved
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4])
    lines = [json.loads(x) for x in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("mine") == 3] == [20]
    assert learned.learn(20, progress=False, callbacks=Rates()) is not None
    assert rates[-1] == pytest.approx(5e-4), "the factor is part of the checkpoint"


def test_a_checkpoint_of_before_callbacks_could_change_anything_is_taken_up() -> None:
    from rl_training.runtime.checkpoints.saver import restore_parts
    from rl_training.runtime.session import Adjustments

    learned = agent("dqn", "CartPole-v1", total_timesteps=40, **DQN_SMALL)
    loaded = open_checkpoint(learned.learn(progress=False).checkpoint_path)
    parts: dict[str, Any] = {"adjustments": Adjustments(), "learner": learned._agent().learner}
    restore_parts([replace(loaded, states={"learner": loaded.states["learner"]})], parts)
    assert float(parts["adjustments"].learning_rate_factor) == 1.0


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_factor_is_refused(factor: float) -> None:
    state = TrainerState("dqn", "CartPole-v1", (0,), Path(), 10)
    with pytest.raises(ConfigError, match="must be > 0 and finite"):
        state.scale_learning_rate(factor)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(Noted, r"give an instance, Noted\(\)"), (3, "must be"), ([3], "must be")],
)
def test_what_is_no_callback_is_one_sentence(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent("dqn", "CartPole-v1", **DQN_SMALL).learn(8, callbacks=wrong, progress=False)


def test_looking_at_the_learner_changes_nothing() -> None:
    def look(state: TrainerState) -> None:
        assert state.learner is not None
        for network in state.learner.networks().values():
            for parameter in network.parameters():
                parameter.data.fill_(7.0)
        state.learner.act(torch.zeros(1, 1, 4))

    digests = []
    for callbacks in (None, look):
        learned = agent("dqn", "CartPole-v1", total_timesteps=40, **DQN_SMALL)
        learned.learn(progress=False, callbacks=callbacks)
        digests.append(torch.cat([p.flatten() for p in learned.networks["q_network"].parameters()]))
    assert torch.equal(*digests)


def test_ready_made_callbacks_stop_save_and_prune() -> None:
    settings = DQN_SMALL | {"eval_interval": 10, "checkpoint_interval": 0}
    learned = agent("dqn", "CartPole-v1", total_timesteps=60, **settings)
    assert "reached 0" in learned.learn(progress=False, callbacks=StopOnReturn(0, 2)).stop_reason
    assert learned.result.metrics["global_step"] == 20

    class Trial:
        """As Optuna's."""

        def __init__(self) -> None:
            self.reported: list[tuple[float, int]] = []

        def report(self, value: float, step: int) -> None:
            """Note it."""
            self.reported.append((value, step))

        def should_prune(self) -> bool:
            """Prune at the third."""
            return len(self.reported) > 2

    pruned = agent("dqn", "CartPole-v1", total_timesteps=60, **settings)
    trial = Trial()
    assert pruned.learn(progress=False, callbacks=PruneTrial(trial)).stop_reason is not None
    assert [step for _, step in trial.reported] == [10, 20, 30]
    noted = Noted()
    saving = agent(
        "dqn", "CartPole-v1", total_timesteps=60, **DQN_SMALL | {"checkpoint_interval": 0}
    )
    saving.learn(progress=False, callbacks=[SaveEvery(25), noted])
    assert {25, 50} <= set(noted.saved)


# Offline


def columns(rows: int = 200) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(rows, 3)).astype(np.float32),
        "actions": rng.uniform(-2, 2, (rows, 1)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminations": np.zeros(rows, bool),
        "truncations": np.arange(rows) % 50 == 49,
    }


def test_a_dataset_of_arrays_takes_successors_from_the_rows_that_follow() -> None:
    given = columns()
    dataset = OfflineDataset(**given)
    assert len(dataset) == 196, "four truncated episodes lose their last row"
    np.testing.assert_array_equal(dataset.next_observations[0], given["observations"][1])
    assert dataset.truncations.sum() == 4
    assert "4 rows at truncations have none" in dataset.notes[0]
    ended = OfflineDataset(**given | {"terminations": given["truncations"]})
    assert len(ended) == 200, "the successor of a termination has no value"


@pytest.mark.parametrize("form", ["dataset", "arrays", "path"])
def test_fit_takes_data_in_any_form_and_the_run_keeps_it(form: str, tmp_path: Path) -> None:
    data: Any = OfflineDataset(**columns())
    if form == "arrays":
        data = columns()
    elif form == "path":
        np.savez(tmp_path / "data.npz", **columns())
        data = tmp_path / "data.npz"
    learned = agent("iql", env="Pendulum-v1", batch_size=16, **SMALL)
    result = learned.fit(data, 20, progress=False)
    assert result.metrics["global_step"] == 20
    assert (
        managed_class("iql").load(result.run_dir).learn(10, progress=False).metrics["global_step"]
        == 30
    )


def test_other_data_does_not_go_on_with_a_run_of_the_first() -> None:
    learned = agent("iql", env="Pendulum-v1", batch_size=16, **SMALL)
    learned.fit(columns(), 20, progress=False)
    assert learned.fit(columns(), 10, progress=False).metrics["global_step"] == 30
    with pytest.raises(ConfigError, match="has learned from other data"):
        learned.fit(columns(150), 10, progress=False)


def test_training_without_an_environment_refuses_to_play() -> None:
    learned = agent("iql", batch_size=16, hidden_sizes=(16,), eval_interval=0)
    result = learned.fit(columns(), 20, progress=False)
    assert result.metrics["eval_episodes"] == 0
    low, high = learned._agent().env_spec.action_low, learned._agent().env_spec.action_high
    assert -2 <= low[0] < -1.5 < 1.5 < high[0] <= 2, "the range of the data's actions"
    with pytest.raises(ConfigError, match="learned from data without an environment"):
        learned.evaluate()
    assert learned.evaluate(env="Pendulum-v1", episodes=1).metrics["eval_return_mean"] < 0


def test_fit_of_a_method_that_needs_an_environment_names_those_that_do_not() -> None:
    with pytest.raises(ConfigError, match=r"sac learns from an environment; .* iql"):
        agent("sac", "Pendulum-v1").fit(columns())
    with pytest.raises(DataError, match="fit takes an OfflineDataset"):
        agent("iql", "Pendulum-v1").fit(3)
    missing = columns()
    missing.pop("rewards")
    with pytest.raises(DataError, match="key rewards is missing"):
        agent("iql", "Pendulum-v1").fit(missing)
