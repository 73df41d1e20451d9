"""Dreamer's learner: imagination in a toy world, returns, what each loss teaches, pace, acting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_training.algorithms.base import replay_step
from rl_training.algorithms.dreamer import Dreamer
from rl_training.algorithms.dreamer.config import DreamerConfig
from rl_training.algorithms.dreamer.learner import Dream, DreamerState, imagine
from rl_training.algorithms.optim import Adam, clip_adaptively
from rl_training.algorithms.sources import SequenceReplay, replay_settings
from rl_training.data.batch import SequenceBatch
from rl_training.data.replay.sequences import RecurrentReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.rssm import RSSMState
from rl_training.rng import Rng
from rl_training.runtime.compile.runner import Accelerator
from rl_training.runtime.loops import updates_due
from rl_training.runtime.replay import make_replay
from rl_training.testing.contract import (
    build,
    flat_state,
    make_batch,
    no_host_reads,
    small_config,
)

S, B, T, H = 1, 2, 3, 4


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_imagination_is_policy_and_model_in_turn(task: str) -> None:
    found = learner(task)
    model, actor = found.world_model, found.actor
    start = RSSMState(
        torch.randn(S, B, T, model.rssm.deter_size), torch.randn(S, B, T, model.rssm.latent.size)
    )
    terminated = torch.zeros(S, B, T, dtype=torch.bool)
    terminated[0, 1, 2] = True
    dream = imagine(model, actor, start, terminated, horizon=H, rng=Rng((0,), "test"))
    rng = Rng((0,), "test")
    acting = actor.draw_noise(rng, H, B * T)
    latent = model.rssm.latent.draw_noise(rng, H, B * T)
    state = RSSMState(start.deter.flatten(1, 2), start.latent.flatten(1, 2))
    with torch.no_grad():
        for step in range(H + 1):
            torch.testing.assert_close(dream.features[:, step], state.features)
            torch.testing.assert_close(dream.reward[:, step], model.reward(state.features))
            if step > 0:
                expected = model.continuation(state.features)
                torch.testing.assert_close(dream.continues[:, step], expected)
            if step < H:
                action = actor.sample(state.features, acting[:, step])
                torch.testing.assert_close(dream.action[:, step], action)
                state = model.rssm.imagine_step(state, actor.executed(action), latent[:, step])
    # Whether the first state is terminal is known, not predicted.
    assert dream.continues[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def learner(task: str = "CartPole-v1", **settings: Any) -> Dreamer:
    made, _ = build("dreamer", task=task, **settings)
    assert isinstance(made, Dreamer)
    return made


def dream_of(found: Dreamer, reward: Tensor, continues: Tensor, action: Tensor) -> Dream:
    """Imagined steps `[N, H + 1]` with random features, the same for equal rows."""
    rows, states = reward.shape
    features = torch.randn(states, 1, found.world_model.feature_dim).expand(S, -1, rows, -1)
    action = action.transpose(0, 1).expand(S, -1, -1, -1)
    return Dream(features, action, reward.T[None], continues.T[None])


def one_hot(numbers: list[int]) -> Tensor:
    return torch.eye(2)[torch.tensor(numbers)]


def test_the_policy_learns_to_prefer_what_is_rewarded_in_imagination() -> None:
    found = learner(actor_learning_rate=1e-2)
    reward = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    dream = dream_of(found, reward, torch.ones(2, 2), one_hot([1, 0]).view(2, 1, 2))
    first = dream.features[:, 0, :1]

    def preference() -> float:
        return float(found.actor.log_prob_entropy(first, one_hot([1])[None])[0].detach().exp())

    assert preference() == pytest.approx(0.5, abs=0.05)
    for _ in range(60):
        policy, critic, _, _ = found.behaviour_losses(dream)
        found.actor_optimizer.minimize(policy + 0 * critic)
    assert preference() > 0.95


@pytest.mark.matrix
def test_the_value_learns_the_discounted_imagined_return() -> None:
    found = learner(
        critic_learning_rate=1e-2,
        gamma=0.5,
        discounted_continuation=False,
        return_lambda=1.0,
        target_critic_scale=0.0,
    )
    reward = torch.tensor([[9.0, 1.0, 4.0]])
    continues = torch.tensor([[1.0, 1.0, 0.0]])
    dream = dream_of(found, reward, continues, one_hot([1, 0]).view(1, 2, 2))
    for _ in range(300):
        _, critic, returns, _ = found.behaviour_losses(dream)
        found.critic_optimizer.minimize(critic)
    assert float(returns) == pytest.approx(1.0 + 0.5 * 4.0)
    value = found.critic.value(dream.features[:, :2, 0]).detach()
    torch.testing.assert_close(value, torch.tensor([[3.0, 4.0]]), atol=0.2, rtol=0.0)


def test_nothing_is_learned_after_a_terminal_state() -> None:
    found = learner()
    reward = torch.ones(1, 3)
    action = one_hot([1, 0]).view(1, 2, 2)
    over = dream_of(found, reward, torch.tensor([[0.0, 1.0, 1.0]]), action)
    policy, critic, _, _ = found.behaviour_losses(over)
    assert float(policy.detach()) == float(critic.detach()) == 0.0
    ends = dream_of(found, reward, torch.tensor([[1.0, 0.0, 1.0]]), action)
    _, _, returns, _ = found.behaviour_losses(ends)
    assert float(returns) == 1.0


def test_returns_of_the_replay_use_real_rewards_up_to_the_end_of_an_episode() -> None:
    found = learner(gamma=0.5, return_lambda=0.8)
    # States 0, 1 and 2 belong to an episode that terminates in 2; 3 and 4 to the next one.
    batch = SequenceBatch(
        obs=torch.zeros(1, 1, 5, 4),
        action=torch.zeros(1, 1, 5, dtype=torch.int64),
        reward=torch.tensor([[[7.0, 1.0, 2.0, 7.0, 3.0]]]),
        is_first=torch.tensor([[[True, False, False, True, False]]]),
        terminated=torch.tensor([[[False, False, True, False, False]]]),
    )
    boot = torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])
    features = torch.zeros(1, 1, 5, found.world_model.feature_dim)
    _, mean = found.replay_value_loss(batch, features, boot)
    of_1 = 2.0
    of_0 = 1.0 + 0.5 * (0.2 * 20.0 + 0.8 * of_1)
    of_3 = 3.0 + 0.5 * 50.0
    assert float(mean) == pytest.approx((of_0 + of_1 + of_3) / 3)


def test_the_value_on_the_replay_teaches_the_states_and_the_imagined_one_does_not() -> None:
    found = learner()
    batch = found.as_batch(make_batch("dreamer", build("dreamer")[1], (0,)))  # type: ignore[arg-type]  # sequences
    for _ in range(2):  # an output of zeros teaches nothing to what is before it
        found.update(batch)
    features = torch.randn(1, 8, 6, found.world_model.feature_dim, requires_grad=True)
    loss, _ = found.replay_value_loss(batch, features, torch.randn(1, 48))
    (gradient,) = torch.autograd.grad(loss.sum(), features)
    assert float(gradient.abs().max()) > 0
    before = flat_state(found.state_dict())
    silent = learner(replay_value_scale=0.0)
    silent.load_state_dict(found.state_dict())
    found.update(batch)
    silent.update(batch)
    moved, still = (flat_state(each.state_dict()) for each in (found, silent))
    name = "world_model.rssm.gates.weight"
    assert not torch.equal(moved[name], still[name])
    assert not torch.equal(still[name], before[name])


@pytest.mark.matrix
def test_the_world_model_learns_a_sequence_that_repeats() -> None:
    found = learner(world_model_learning_rate=3e-3, representation_scale=0.1)
    steps = torch.arange(6)
    obs = torch.stack((steps % 2, steps % 3, steps * 0, steps * 0 + 1), -1).float()
    batch = SequenceBatch(
        obs=obs.expand(1, 8, -1, -1),
        action=torch.zeros(1, 8, 6, dtype=torch.int64),
        reward=(steps % 3).float().expand(1, 8, -1),
        is_first=(steps == 0).expand(1, 8, -1),
        terminated=(steps == 5).expand(1, 8, -1),
    )
    first = dict(found.update(batch).metrics)
    for _ in range(250):
        last = dict(found.update(batch).metrics)
    assert last["obs_loss"] < 0.1 * first["obs_loss"]
    assert last["reward_loss"] < 0.3 * first["reward_loss"]
    assert last["continue_loss"] < 0.2


def test_the_belief_depends_on_the_past_until_an_episode_begins() -> None:
    found = learner()
    state = found.initial_acting_state(2)
    obs, other = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    with torch.inference_mode():
        for _ in range(2):  # the first moves the latent alone: all that it came from is 0
            found.act_from(state, obs)
        assert state.deter.abs().sum() > 0
        assert state.action.sum(-1).tolist() == [[1.0, 1.0]]
        state.begin_episodes(torch.tensor([[True, False]]))
        assert state.deter[0, 0].abs().sum() == 0
        assert state.deter[0, 1].abs().sum() > 0
        fresh = found.initial_acting_state(2)
        for _ in range(2):
            found.act_from(fresh, obs)  # the same draws as before
        fresh.begin_episodes(torch.tensor([[True, True]]))
        for each in (state, fresh):
            found.act_from(each, other)
    torch.testing.assert_close(state.deter[0, 0], fresh.deter[0, 0])
    assert not torch.allclose(state.deter[0, 1], fresh.deter[0, 1])


def test_acting_follows_the_same_beliefs_as_learning() -> None:
    found = learner()
    state = found.initial_acting_state(3)
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(1, 3, 5, 4, generator=generator)
    actions = []
    rng = Rng(found.seeds, "acting")
    noises = []
    with torch.inference_mode():
        for step in range(5):
            actions.append(state.action.clone())
            found.act_from(state, seen[:, :, step])
            noises.append(found.world_model.rssm.latent.draw_noise(rng, 3))
        first = torch.zeros(1, 3, 5)
        first[..., 0] = 1
        embedding = found.world_model.encoder(seen.flatten(1, 2)).view(1, 3, 5, -1)
        whole = found.world_model.rssm.observe(
            embedding, torch.stack(actions, 2), first, torch.stack(noises, 2)
        )
    torch.testing.assert_close(whole.state.deter[:, :, -1], state.deter)
    torch.testing.assert_close(whole.state.latent[:, :, -1], state.latent)


def test_the_acting_state_is_saved_with_its_randomness() -> None:
    found = learner("Pendulum-v1")
    ours, theirs = found.initial_acting_state(2), found.initial_acting_state(2)
    obs = torch.randn(1, 2, 3)
    with torch.inference_mode():
        for _ in range(3):
            found.act_from(ours, obs, explore=True)
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(
            found.act_from(ours, obs, explore=True), found.act_from(theirs, obs, explore=True)
        )
    assert isinstance(ours, DreamerState)
    assert set(ours.state_dict()) == {"rng", "deter", "latent", "action"}


@pytest.mark.parametrize("ratio", [32, 100, 512])
def test_the_train_ratio_counts_replayed_steps_whatever_the_number_of_environments(
    ratio: int,
) -> None:
    config = SequenceReplay(batch_size=16, batch_length=64, train_ratio=ratio, learning_starts=100)
    for stride in (1, 3, 8):
        done = 0
        for step in range(0, 10_000, stride):
            done += updates_due(config.pacing, config.learning_starts, step, step + stride)
        owed = (10_000 - 100) * ratio / 1024
        assert abs(done - owed) <= 1 + stride * ratio / 1024
    assert updates_due(SequenceReplay(train_frequency=4).pacing, 1_000, 1_000, 1_008) == 2


def test_the_entropy_follows_its_schedule() -> None:
    schedule = {"type": "linear", "start": 1.0, "end": 0.0}
    found = learner(entropy_coef=0.5, entropy_coef_schedule=schedule)
    dream = dream_of(found, torch.zeros(1, 2), torch.ones(1, 2), one_hot([1]).view(1, 1, 2))
    losses = []
    for progress in (0.0, 0.5, 1.0):
        found.set_progress(progress)
        losses.append(float(found.behaviour_losses(dream)[0].detach()))
    assert losses[0] == pytest.approx(2 * losses[1])
    assert losses[0] < 0
    assert losses[2] == pytest.approx(0.0, abs=1e-6)


def test_adaptive_clipping_bounds_a_step_by_the_tensor_and_each_seed_by_itself() -> None:
    parameters = [torch.stack((torch.full((4,), 1.0), torch.full((4,), 10.0)))]
    gradients = [torch.full((2, 4), 3.0)]
    clip_adaptively(gradients, parameters, 0.5)
    torch.testing.assert_close(gradients[0][0], torch.full((4,), 0.5))
    torch.testing.assert_close(gradients[0][1], torch.full((4,), 3.0))


def test_a_warm_up_grows_the_step_size_from_0() -> None:
    weight = torch.zeros(1, 1, requires_grad=True)
    optimizer = Adam([weight], 0.1, warmup=4)
    places = []
    for _ in range(6):
        optimizer.minimize((weight * 1.0).sum(1))
        places.append(-float(weight.detach()))
    sizes = torch.tensor([0.0, *places]).diff()
    torch.testing.assert_close(
        sizes, torch.tensor([0.025, 0.05, 0.075, 0.1, 0.1, 0.1]), atol=1e-6, rtol=0.0
    )


def test_auto_leaves_updates_on_a_cpu_eager_and_compile_does_not() -> None:
    found, env = build("dreamer")
    heard: list[str] = []
    for mode, expected in (("auto", math.inf), ("compile", 0)):
        config = small_config("dreamer", "runs", accelerate=mode)
        accelerator = Accelerator(config, env, found, heard.append)
        assert accelerator.first_update(10**9, 1, 10**6) == expected


def test_settings_that_do_not_fit_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"buffer_capacity must be >= batch_length \(64\)"):
        SequenceReplay(buffer_capacity=50, batch_size=4)
    with pytest.raises(ConfigError, match="num_bins must be an odd number, got 10"):
        DreamerConfig(num_bins=10)
    with pytest.raises(ConfigError, match="latents must be one of 'categorical' or 'gaussian'"):
        DreamerConfig(latents="normal")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigError, match="imagination_horizon must be >= 1"):
        DreamerConfig(imagination_horizon=0)


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Refuses every operation that touches a tensor of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), func
        return made


@pytest.mark.parametrize("size", ["tiny", "12m"])
def test_drawing_learning_and_acting_touch_no_tensor_of_the_host(size: str) -> None:
    # The device without memory stands for an accelerator: what is read back from it raises.
    env = EnvSpec(
        env_id="images",
        obs_shape=(3, 64, 64),
        obs_dtype="uint8",
        action_kind="discrete",
        action_shape=(),
        action_dtype="int64",
        num_actions=6,
    )
    spec = get_algorithm_spec("dreamer")
    small: dict[str, Any] = {
        "size": size,
        "buffer_capacity": 2_000,
        "batch_size": 2,
        "batch_length": 8,
    }
    config = spec.config_class(**small)
    made = spec.build(env, config, (0, 1), device="meta")
    settings = replay_settings(config)
    assert settings is not None
    replay = make_replay(settings, env, 1, made)
    assert isinstance(replay, RecurrentReplayBuffer)
    assert replay.belief_size
    assert replay.newest_first
    replay.inserted.value = 1_000
    acting = made.initial_acting_state(1)
    obs = torch.zeros(2, 1, *env.obs_shape, dtype=torch.uint8, device="meta")
    with no_host_reads(), _OneDevice():  # type: ignore[no-untyped-call]
        metrics = replay_step(made, replay, settings.rows_per_update).metrics
        for explore in (True, False):
            assert made.act_from(acting, obs, explore=explore).shape == (2, 1)
    assert set(metrics) == set(spec.metrics)
    with _OneDevice(), pytest.raises(AssertionError):  # type: ignore[no-untyped-call]
        torch.ones(2) + 1
