"""SimbaV2's update: networks on the sphere, the distribution of the target, the scale of rewards.

What it shares with SAC is tested in `test_sac_update.py`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from helpers.updates import ACT, OBS, B, make_batch
from rl_training.algorithms.losses import categorical_projection
from rl_training.algorithms.simba_v2 import SimbaV2
from rl_training.data.normalizer import BoundedReturnScale, DiscountedReturns
from rl_training.errors import ConfigError
from rl_training.models.hypersphere import HyperLinear, HypersphereNet, LerpBlock, SimbaV2Model
from rl_training.rng import Rng

BINS, RANGE = 7, 3.0
ATOMS = np.linspace(-RANGE, RANGE, BINS)
Array = NDArray[np.float64]


def make_learner(seeds: tuple[int, ...] = (0,), **keywords: Any) -> SimbaV2:
    model = SimbaV2Model(
        OBS,
        ACT,
        (8, 8),
        actor_hidden_sizes=(6,),
        num_critics=keywords.get("num_critics", 2),
        num_bins=BINS,
        value_range=RANGE,
        rng=Rng(seeds, "networks"),
    )
    options = {"num_bins": BINS, "value_range": RANGE} | keywords
    return SimbaV2(model=model, seeds=seeds, **options)


def actor_of(learner: SimbaV2) -> HypersphereNet:
    actor: Any = learner.model.actor
    assert isinstance(actor, HypersphereNet)
    return actor


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def unit(x: Array, axis: int = -1) -> Array:
    norm: Array = np.linalg.norm(x, axis=axis, keepdims=True)
    return x / norm


def columns(module: nn.Module) -> list[Tensor]:
    layers = [part for part in module.modules() if isinstance(part, HyperLinear)]
    return [torch.linalg.vector_norm(layer.weight, dim=-2) for layer in layers]


# The networks


def reference(net: HypersphereNet, x: Array, seed: int, member: tuple[int, ...]) -> Array:
    """The paper's network in plain matrix products, for one seed and member."""
    values = {name: array(p)[(seed, *member)] for name, p in net.named_parameters()}
    width, hidden = values["embed.weight"].shape[1], values["blocks.0.first.weight"].shape[1]
    x = unit(np.concatenate([x, np.full((len(x), 1), 3.0)], 1))
    # At the start stored factors are the starts themselves, which are sqrt(2 / width).
    h = unit((x @ values["embed.weight"]) * values["embed_scaler.factor"])
    blocks = len(net.blocks)
    for index in range(blocks):
        of = {k.split(".", 2)[2]: v for k, v in values.items() if k.startswith(f"blocks.{index}.")}
        inner = np.maximum((h @ of["first.weight"]) * of["scaler.factor"], 0) + 1e-8
        alpha = of["alpha.factor"] * math.sqrt(width) / (blocks + 1)
        h = unit((1 - alpha) * h + alpha * unit(inner @ of["second.weight"]))
    assert hidden == 4 * width
    heads = []
    for head in range(net.heads):
        inner = (h @ values["head.weight"][head]) * values["head_scaler.factor"][head]
        heads.append(inner @ values["output.weight"][head] + values["output_bias"][head])
    return np.concatenate(heads, 1)


@pytest.mark.parametrize("members", [(), (2,)])
def test_the_network_is_that_of_the_paper(members: tuple[int, ...]) -> None:
    rng = Rng((3, 4), "network")
    net = HypersphereNet(5, (8, 8), 3, rng, members=members, heads=2)
    with torch.no_grad():  # away from its start, so that every factor counts
        for parameter in net.parameters():
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    x = rng.normal(6, 5)
    out = array(net(x))
    for seed in range(2):
        for member in [(m,) for m in range(2)] if members else [()]:
            expected = reference(net, array(x[seed]), seed, member)
            np.testing.assert_allclose(out[(seed, *member)], expected, rtol=1e-4, atol=1e-5)


def test_features_and_columns_have_norm_one_before_and_after_updates() -> None:
    learner = make_learner((0, 1), learning_rate=0.1)
    for count in range(3):
        for norm in columns(learner.model):
            torch.testing.assert_close(norm, torch.ones_like(norm))
        batch = make_batch((0, 1), key=f"batch {count}")
        for obs in (batch.obs, 100 * batch.obs):
            features = actor_of(learner).features(obs)
            norms = torch.linalg.vector_norm(features, dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms))
        learner.update(batch)
    moved = columns(learner.target_critic)
    assert any(not torch.allclose(norm, torch.ones_like(norm)) for norm in moved), "as the authors'"


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_block_stays_or_goes_all_the_way(alpha: float) -> None:
    rng = Rng((0,), "block")
    block = LerpBlock(8, 2, rng, ())
    with torch.no_grad():
        block.alpha.factor.fill_(alpha * 3 / math.sqrt(8))  # what makes it `alpha` in the product
    x = nn.functional.normalize(rng.normal(4, 8), dim=-1)
    hidden = torch.relu(block.scaler(block.first(x))) + 1e-8
    goal = nn.functional.normalize(block.second(hidden), dim=-1)
    torch.testing.assert_close(block(x), goal if alpha else x)


def test_the_length_of_an_observation_is_not_lost() -> None:
    actor, obs = actor_of(make_learner()), make_batch().obs
    assert not torch.allclose(actor.features(obs), actor.features(2 * obs), atol=1e-3)


def test_the_policys_deviation_stays_in_its_range() -> None:
    learner, obs = make_learner(), make_batch().obs
    model, actor = learner.model, actor_of(learner)
    with torch.no_grad():
        actor.output_bias[:, 1] = 100.0
        assert torch.equal(model.policy(obs)[1], torch.full((1, B, ACT), 2.0))
        actor.output_bias[:, 1] = -100.0
        assert torch.equal(model.policy(obs)[1], torch.full((1, B, ACT), -10.0))


# The target and the critics' loss


def projected(moved: Array, probs: Array) -> Array:
    """One distribution on the atoms, atom by atom."""
    out, width = np.zeros(BINS), ATOMS[1] - ATOMS[0]
    for place, p in zip(np.clip(moved, -RANGE, RANGE), probs, strict=True):
        position = (place + RANGE) / width
        below = min(int(np.floor(position)), BINS - 2)
        out[below] += p * (below + 1 - position)
        out[below + 1] += p * (position - below)
    return out


def test_the_target_is_that_of_numpy() -> None:
    learner = make_learner(initial_alpha=0.3)
    with torch.no_grad():
        target_critic: Any = learner.target_critic
        target_critic.output.weight.mul_(20)
    batch = make_batch(discount=torch.tensor([[0.9, 0.0] * (B // 2)]))  # every other row ends
    rng = copy.deepcopy(learner.rng)
    target, metrics = learner.td_target(batch)
    learner.rng = rng
    action, log_prob = learner.sample_action(batch.next_obs)
    log_probs = learner.model.value_log_probs(batch.next_obs, action, learner.target_critic)
    probs, entropy = np.exp(array(log_probs[0])), -0.3 * array(log_prob[0])
    least = (probs @ ATOMS).argmin(0)  # [B]
    assert len(set(least)) == 2, "each critic leads somewhere"
    for row in range(B):
        reward, discount = float(batch.reward[0, row]), float(batch.discount[0, row])
        moved = reward + discount * (ATOMS + entropy[row])
        expected = projected(moved, probs[least[row], row])
        np.testing.assert_allclose(array(target[0, row]), expected, rtol=1e-4, atol=1e-6)
        assert array(metrics["target_q_mean"][0, row]) == pytest.approx(expected @ ATOMS, abs=1e-5)


def test_a_single_target_critic_may_be_drawn() -> None:
    learner, batch = make_learner(num_target_critics=1), make_batch()
    target_critic: Any = learner.target_critic
    with torch.no_grad():
        target_critic.output_bias.copy_(torch.linspace(-9, 9, 2 * BINS).view(1, 2, 1, 1, BINS))
        target_critic.output_bias[:, 1].copy_(-target_critic.output_bias[:, 1])
    targets = [learner.td_target(batch)[1]["target_q_mean"] for _ in range(20)]
    means = {round(target.mean().item(), 1) for target in targets}
    assert len(means) > 1, "now one, now the other"


def test_the_projection_keeps_the_mean_inside_and_ends_take_the_rest() -> None:
    atoms = torch.linspace(-RANGE, RANGE, BINS)
    probs = torch.softmax(Rng((0,), "p").normal(5, BINS)[0], -1)
    moved = 0.4 * atoms + 0.3
    out = categorical_projection(moved.expand(5, -1), probs, atoms)
    torch.testing.assert_close(out.sum(-1), torch.ones(5))
    torch.testing.assert_close((out * atoms).sum(-1), (probs * moved).sum(-1))
    far = categorical_projection(atoms.expand(5, -1) + 100, probs, atoms)
    torch.testing.assert_close(far[:, -1], torch.ones(5))


def test_the_critics_loss_is_the_cross_entropy_summed_over_critics() -> None:
    learner, batch = make_learner(), make_batch(weight=torch.linspace(0.1, 2, B).view(1, B))
    assert batch.weight is not None
    target = torch.softmax(Rng((0,), "target").normal(B, BINS), -1)
    loss, _, error = learner.critic_loss(batch, target)
    log_probs = array(learner.model.value_log_probs(batch.obs, batch.action))[0]  # [N, B, K]
    each = -(array(target)[0] * log_probs).sum(-1)
    assert loss.item() == pytest.approx((each * array(batch.weight)).mean(1).sum(), rel=1e-5)
    gap = np.abs(np.exp(log_probs) @ ATOMS - array(target)[0] @ ATOMS).mean(0)
    np.testing.assert_allclose(array(error)[0], gap, rtol=1e-4, atol=1e-6)


def test_a_critic_that_is_its_target_has_no_gradient() -> None:
    learner, batch = make_learner(num_critics=1), make_batch()
    target = learner.model.value_log_probs(batch.obs, batch.action)[:, 0].exp().detach()
    loss, _, error = learner.critic_loss(batch, target)
    gradients = torch.autograd.grad(loss.sum(), list(learner.model.critic.parameters()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-6
    torch.testing.assert_close(error, torch.zeros(1, B), atol=1e-6, rtol=0)


def test_the_target_entropy_is_half_of_sacs_unless_given() -> None:
    assert make_learner().target_entropy == -ACT / 2
    assert make_learner(target_entropy=-3.0).target_entropy == -3.0


def test_stacked_seeds_equal_single_ones() -> None:
    seeds = (3, 1)
    group, singles = make_learner(seeds), [make_learner((seed,)) for seed in seeds]
    for count in range(3):
        group.update(make_batch(seeds, key=f"{count}"))
        for seed, single in zip(seeds, singles, strict=True):
            single.update(make_batch((seed,), key=f"{count}"))
    for index, single in enumerate(singles):
        for ours, theirs in zip(group.model.parameters(), single.model.parameters(), strict=True):
            torch.testing.assert_close(ours[index], theirs[0], rtol=1e-3, atol=1e-5)


# The scale of rewards


def test_rewards_are_scaled_by_the_deviation_or_by_the_largest_return() -> None:
    """Against NumPy; a first part of small returns, then one that is large."""
    gamma, bound = 0.9, 5.0
    scale, returns = BoundedReturnScale(1, "cpu", bound), DiscountedReturns(1, 1, "cpu")
    rng = np.random.default_rng(0)
    rewards = np.concatenate([rng.normal(size=30), [80.0], rng.normal(size=220)])
    total, seen = 0.0, []
    for step, reward in enumerate(rewards):
        ended = step % 7 == 6
        returns.add(torch.tensor([[reward]]), torch.tensor([[ended]]), gamma, scale)
        total = gamma * total + reward
        seen.append(total)
        total = 0.0 if ended else total
        if step == 0:
            continue
        divisor = max(np.sqrt(np.var(seen) + 1e-8), np.abs(seen).max() / bound)
        given = torch.tensor([[2.0, -30.0]])
        np.testing.assert_allclose(array(scale(given))[0], array(given)[0] / divisor, rtol=1e-5)
    assert np.abs(seen).max() / bound > np.std(seen), "the bound held at the end"


# Settings


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"hidden_sizes": [64, 32]}, r"hidden_sizes must hold the same width for every block"),
        ({"activation": "tanh"}, r"activation must be 'relu', got 'tanh'"),
        ({"use_layer_norm": True}, r"use_layer_norm: must be false: features have norm 1 already"),
        ({"num_bins": 1}, r"num_bins must be >= 2, got 1"),
        ({"encoder": "mine:net"}, r"encoder must be null, got 'mine:net'"),
    ],
)
def test_what_the_blocks_are_made_of_is_the_method(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**keywords)
