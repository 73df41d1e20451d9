"""Runs that begin with the networks of another: what is taken, what fits, what is said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import Outcome, run_cli, tiny_config, write_tiny
from rl_training.algorithms.sources import PriorSettings, replay_settings
from rl_training.errors import ConfigError, SpecMismatch
from rl_training.experiment.checkpoint.codec import digest_state
from rl_training.experiment.checkpointing import list_checkpoints, open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.runs import create_run_folder
from rl_training.runtime.callbacks import Callback, TrainerState
from rl_training.runtime.checkpoints.verify import verify_resume
from rl_training.runtime.checkpoints.warm_start import take_over
from rl_training.runtime.train import train
from rl_training.runtime.workflows import resume_training
from rl_training.testing.contract import build, flat_state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an offline run of CQL, and a group of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_config("cql", folder, run_name="cql"))
    train(tiny_config("cql", folder, run_name="group", seeds=[3, 5]))
    return folder


def learner(path: Path) -> dict[str, Any]:
    return flat_state(open_checkpoint(path, components={"learner"}).states["learner"])


def networks(path: Path) -> dict[str, Any]:
    return {name: value for name, value in learner(path).items() if name.startswith("model.")}


def first_checkpoint(run: Path) -> Path:
    return list_checkpoints(run)[0].path


def assert_same_networks(left: Path, right: Path) -> None:
    ours, theirs = networks(left), networks(right)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


class Listener(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_message(self, state: TrainerState, text: str) -> None:
        self.heard.append(text)


def test_sac_goes_on_from_cql_with_networks_temperature_and_moments(
    runs: Path, tmp_path: Path
) -> None:
    listener = Listener()
    result = train(tiny_config("sac", tmp_path), from_checkpoint=runs / "cql", callbacks=[listener])
    ours, theirs = learner(first_checkpoint(result.run_dir)), learner(runs / "cql")
    taken = [name for name in theirs if not name.startswith(("rng", "num_updates", "obs_norm"))]
    assert {name.split(".")[0] for name in taken} >= {"model", "target_critic", "log_alpha"}
    assert any("optimizer" in name for name in taken)
    for name in taken:
        assert torch.equal(ours[name], theirs[name]), name
    assert [text for text in listener.heard if "taken over" in text] == [
        f"from {runs / 'cql'} (cql, step 64): actor, critic, target_critic, log_alpha, "
        "critic_optimizer, actor_optimizer, alpha_optimizer taken over"
    ]


def test_dqn_goes_on_from_discrete_cql(tmp_path: Path) -> None:
    before = train(tiny_config("discrete_cql", tmp_path, run_name="before"))
    after = train(tiny_config("dqn", tmp_path), from_checkpoint=before.run_dir)
    ours, theirs = learner(first_checkpoint(after.run_dir)), learner(before.run_dir)
    taken = [n for n in theirs if n.startswith(("q_network", "target_network", "optimizer"))]
    assert {name.split(".")[0] for name in taken} == {"q_network", "target_network", "optimizer"}
    for name in taken:
        assert torch.equal(ours[name], theirs[name]), name


def test_td3_goes_on_from_td3_bc_with_both_targets(tmp_path: Path) -> None:
    plain = {"normalize_observations": False}
    before = train(tiny_config("td3_bc", tmp_path, run_name="before", algo_kwargs=plain))
    after = train(tiny_config("td3", tmp_path), from_checkpoint=before.run_dir)
    ours, theirs = learner(first_checkpoint(after.run_dir)), learner(before.run_dir)
    parts = {"model", "target_actor", "target_critic", "critic_optimizer", "actor_optimizer"}
    taken = [name for name in theirs if name.split(".")[0] in parts]
    assert {name.split(".")[0] for name in taken} == parts
    for name in taken:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.matrix
@pytest.mark.parametrize("source", ["cql", "rlpd"])
def test_rlpd_goes_on_from_cql_and_from_itself(source: str, tmp_path: Path) -> None:
    networks = {"num_critics": 10, "use_layer_norm": True}
    before = train(tiny_config(source, tmp_path, run_name="before", algo_kwargs=networks))
    config = tiny_config("rlpd", tmp_path, algo_kwargs={"gradient_updates_per_step": 2})
    after = train(config, from_checkpoint=before.run_dir)
    assert_same_networks(first_checkpoint(after.run_dir), before.run_dir)


def test_such_a_run_resumes_to_the_bit_and_without_the_other(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "cql", tmp_path / "other")
    config = tiny_config("sac", tmp_path).replace(from_checkpoint=str(tmp_path / "other"))
    assert verify_resume(config, 40).identical
    cut = train(config, stop_at=40)
    shutil.rmtree(tmp_path / "other")
    assert resume_training(cut.run_dir).metrics["global_step"] == 64


def test_every_checkpoint_says_where_the_parameters_came_from(runs: Path, tmp_path: Path) -> None:
    cut = train(tiny_config("sac", tmp_path), from_checkpoint=runs / "cql", stop_at=40)
    resumed = resume_training(cut.run_dir)
    source = open_checkpoint(runs / "cql")
    for entry in list_checkpoints(resumed.run_dir):
        origin = open_checkpoint(entry.path).header["origin"]
        assert origin["path"] == str(source.path)
        assert (origin["algo"], origin["step"], origin["seed"]) == ("cql", 64, 0)
        assert origin["learner_sha256"] == digest_state(source.states["learner"])
        assert "actor" in origin["taken"]
    assert open_checkpoint(runs / "cql").header["origin"] is None


def test_one_checkpoint_serves_every_seed(runs: Path, tmp_path: Path) -> None:
    result = train(tiny_config("sac", tmp_path, seeds=[1, 2]), from_checkpoint=runs / "cql")
    for member in result.per_seed:
        assert_same_networks(first_checkpoint(member.run_dir), runs / "cql")
    ends = [networks(member.run_dir) for member in result.per_seed]
    assert any(not torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize(
    ("seeds", "expected"), [([5, 3], ["seed_5", "seed_3"]), ([1, 2], ["seed_3", "seed_5"])]
)
def test_a_group_gives_each_member_its_own(
    seeds: list[int], expected: list[str], runs: Path, tmp_path: Path
) -> None:
    result = train(tiny_config("sac", tmp_path, seeds=seeds), from_checkpoint=runs / "group")
    for member, name in zip(result.per_seed, expected, strict=True):
        assert_same_networks(first_checkpoint(member.run_dir), runs / "group" / name)


def test_a_run_stopped_before_its_first_checkpoint_begins_with_the_other_again(
    runs: Path, tmp_path: Path
) -> None:
    config = tiny_config("sac", tmp_path).replace(from_checkpoint=str(runs / "cql"))
    again = resume_training(create_run_folder(config))
    assert_same_networks(first_checkpoint(again.run_dir), runs / "cql")


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_note(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "cql", tmp_path / "other")
    older, newest = (entry.path for entry in list_checkpoints(tmp_path / "other"))
    (newest / "learner.safetensors").write_bytes(b"")
    listener = Listener()
    result = train(
        tiny_config("sac", tmp_path), from_checkpoint=tmp_path / "other", callbacks=[listener]
    )
    assert_same_networks(first_checkpoint(result.run_dir), older)
    assert any("damaged checkpoint passed over" in text for text in listener.heard)


def test_the_command_line_takes_it_too(runs: Path, tmp_path: Path) -> None:
    config = write_tiny(tmp_path, "cql")
    done = run_cli("train", "-c", config, "--from-checkpoint", runs / "cql", "-q")
    assert done.code == 0, done.err
    assert_same_networks(first_checkpoint(Path(done.values["run_dir"])), runs / "cql")
    shown = run_cli("train", "-c", config, "--from-checkpoint", "runs/x", "--dry-run").out
    assert "from_checkpoint: runs/x" in shown
    assert "offline_batch_ratio: 0.5" in shown


# What does not fit


def refused(source: Path, folder: Path, algo: str = "sac", **changes: Any) -> str:
    """The sentence with which a run is refused; it leaves nothing behind."""
    config = write_tiny(folder, algo, **changes)
    done: Outcome = run_cli("train", "-c", config, "--from-checkpoint", source)
    assert not (folder / "runs").exists()
    return done.sentence()


def test_other_hidden_sizes(runs: Path, tmp_path: Path) -> None:
    text = refused(runs / "cql", tmp_path, algo_kwargs={"hidden_sizes": [32]})
    assert "its actor does not fit: actor.layers.0.weight is (3, 16) there and (3, 32)" in text
    assert text.endswith("use its settings: algo_kwargs.hidden_sizes=[16]")


def test_another_number_of_critics_or_layer_norm(runs: Path, tmp_path: Path) -> None:
    text = refused(runs / "cql", tmp_path, algo_kwargs={"num_critics": 3, "use_layer_norm": True})
    assert "its critic does not fit" in text
    assert "algo_kwargs.num_critics=2, algo_kwargs.use_layer_norm=False" in text


def test_another_task(runs: Path, tmp_path: Path) -> None:
    text = refused(runs / "cql", tmp_path, env_id="MountainCarContinuous-v0")
    assert "trained on Pendulum-v1 with obs_shape (3,)" in text
    assert "MountainCarContinuous-v0 has (2,)" in text


def test_discrete_and_continuous_actions(runs: Path, tmp_path: Path) -> None:
    text = refused(runs / "cql", tmp_path, "dqn")
    assert "action_kind continuous, but CartPole-v1 has discrete" in text


def test_networks_of_another_kind(tmp_path: Path) -> None:
    iql = train(tiny_config("iql", tmp_path, run_name="iql"))
    text = refused(iql.run_dir, tmp_path)
    assert "its actor does not fit" in text
    assert "continue with iql, or with a method that has the same networks" in text


def test_no_network_in_common(tmp_path: Path) -> None:
    dqn = train(tiny_config("dqn", tmp_path, run_name="dqn"))
    text = refused(dqn.run_dir, tmp_path, "ppo")
    assert "it has no network in common with PPO" in text


def test_rewards_on_another_scale(tmp_path: Path) -> None:
    cql = train(tiny_config("cql", tmp_path, run_name="cql", algo_kwargs={"reward_scale": 0.1}))
    text = refused(cql.run_dir, tmp_path)
    assert (
        "its critics learned from rewards x 0.1, but this run would learn from rewards x 1" in text
    )
    assert "algo_kwargs.reward_scale=0.1" in text
    config = tiny_config("sac", tmp_path, algo_kwargs={"reward_scale": 0.1})
    assert train(config, from_checkpoint=cql.run_dir).metrics["global_step"] == 64


def test_rewards_normalised_by_the_data(tmp_path: Path) -> None:
    changes = {"algo_kwargs": {"normalize_rewards": True}}
    cql = train(tiny_config("cql", tmp_path, run_name="cql", **changes))
    scale = open_checkpoint(cql.run_dir).header["rewards"][0]
    assert scale != 1.0
    text = refused(cql.run_dir, tmp_path)
    assert f"algo_kwargs.reward_scale={scale:.6g}" in text
    own = train(tiny_config("cql", tmp_path, **changes), from_checkpoint=cql.run_dir)
    assert open_checkpoint(own.run_dir).header["rewards"][0] == scale


def test_standardised_observations(tmp_path: Path) -> None:
    changes = {"algo_kwargs": {"normalize_observations": True}}
    cql = train(tiny_config("cql", tmp_path, run_name="cql", **changes))
    text = refused(cql.run_dir, tmp_path)
    assert "its networks saw standardised observations" in text
    assert "(sac) would see observations as they are" in text


def test_a_group_of_another_size(runs: Path, tmp_path: Path) -> None:
    text = refused(runs / "group", tmp_path)
    assert "holds 2 members, but this run has 1" in text
    assert "give one of seed_3, seed_5 for all" in text


def test_no_checkpoint(runs: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refused(tmp_path / "empty", tmp_path)
    (tmp_path / "agent.safetensors").write_bytes(b"1")
    assert "give a file that save wrote" in refused(tmp_path / "agent.safetensors", tmp_path)


def test_a_damaged_checkpoint(runs: Path, tmp_path: Path) -> None:
    source = tmp_path / "step_64"
    shutil.copytree(list_checkpoints(runs / "cql")[-1].path, source)
    data = bytearray((source / "learner.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "learner.safetensors").write_bytes(data)
    assert "learner.safetensors is damaged" in refused(source, tmp_path)


# Part by part


def test_what_a_learner_lacks_starts_fresh_and_what_it_has_no_use_for_stays() -> None:
    td3_bc, _ = build("td3_bc", normalize_observations=False)
    iql, _ = build("iql")
    report = take_over(iql, [td3_bc.state_dict()])
    assert report.taken == ["actor", "critic", "target_critic", "critic_optimizer"]
    assert report.fresh == ["log_std", "value_net", "actor_optimizer", "value_optimizer"]
    assert report.left == ["target_actor"]
    assert str(report).endswith(
        "log_std, value_net, actor_optimizer, value_optimizer starting fresh; "
        "target_actor left behind"
    )


def test_a_fixed_temperature_is_the_settings_and_a_learned_one_the_checkpoints() -> None:
    cql, _ = build("cql", initial_alpha=0.3)
    fixed, _ = build("sac", alpha=0.7)
    report = take_over(fixed, [cql.state_dict()])
    assert "log_alpha" not in report.taken
    assert fixed.state_dict()["log_alpha"].exp().item() == pytest.approx(0.7)
    learned, _ = build("sac")
    take_over(learned, [cql.state_dict()])
    assert learned.state_dict()["log_alpha"].exp().item() == pytest.approx(0.3)


def test_nothing_is_changed_when_something_does_not_fit() -> None:
    sac, _ = build("sac")
    cql, _ = build("cql", seeds=(9,), num_critics=3)
    before = digest_state(sac.state_dict())
    with pytest.raises(SpecMismatch, match="its critic does not fit"):
        take_over(sac, [cql.state_dict()])
    assert digest_state(sac.state_dict()) == before


def test_online_settings_become_those_of_the_replay() -> None:
    online = {"buffer_capacity": 300, "offline_batch_ratio": 0.25, "train_frequency": 4}
    learner, _ = build("cql", online=online, reward_scale=0.5, n_step=3, dataset_seed=8)
    settings = replay_settings(learner.config)
    assert isinstance(settings, PriorSettings)
    assert {name: getattr(settings, name) for name in online} == online
    assert (settings.reward_scale, settings.n_step, settings.dataset_seed) == (0.5, 3, 8)
    assert settings.batch_size == 8


def test_a_replay_smaller_than_a_batch_is_refused() -> None:
    settings = {"online": {"buffer_capacity": 7}}
    with pytest.raises(ConfigError, match=r"online.buffer_capacity must be >= batch_size \(256\)"):
        TrainConfig(algo="cql", env_id="Pendulum-v1", algo_kwargs=settings)


def test_data_on_disk_does_not_go_online(runs: Path, tmp_path: Path) -> None:
    mapped = {"dataset_storage": "mapped", "dataset_kind": "npy", "dataset_path": str(tmp_path)}
    text = refused(runs / "cql", tmp_path, "cql", algo_kwargs=mapped)
    assert "dataset_storage mapped is for offline training" in text
    assert text.endswith("use device")
