"""Tianshou: its algorithms on its replay buffer, which keeps frames once and stacks them.

Its IQN chooses the next action by as many fractions as it learns; its FQF reads the target at the
fractions of the next state, where ours takes those of the current one.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np

from bench.speed.pace import Pace
from bench.speed.sizes import DQN, QUANTILES


def _module(name: str) -> Any:
    # Looked up by name: inside this folder the package has the name of this module.
    return importlib.import_module(f"tianshou.{name}")


def iqn(pace: Pace) -> None:
    _update(pace, _iqn(images=False), QUANTILES.drawn, images=False)


def iqn_cnn(pace: Pace) -> None:
    _update(pace, _iqn(images=True), QUANTILES.drawn, images=True)


def fqf(pace: Pace) -> None:
    _update(pace, _fqf(images=False), QUANTILES.proposed, images=False)


def fqf_cnn(pace: Pace) -> None:
    _update(pace, _fqf(images=True), QUANTILES.proposed, images=True)


def _update(pace: Pace, learner: Any, quantiles: int, *, images: bool) -> None:
    batch = QUANTILES.image_batch if images else QUANTILES.batch
    buffer = _images() if images else _vectors()
    proposal = getattr(learner.policy, "fraction_model", None)
    fractions = [] if proposal is None else list(proposal.parameters())
    sizes = {
        "parameters": sum(p.numel() for p in learner.policy.parameters()),
        "parameters of fractions": sum(p.numel() for p in fractions),
        "quantiles": quantiles,
        "rows": len(buffer),
        "batch": batch,
    }
    pace.tell(version=importlib.import_module("tianshou").__version__, sizes=sizes)
    with _module("utils.torch_utils").policy_within_training_step(learner.policy):
        while pace.begin():
            for _ in range(pace.settings.chunk):
                learner.update(buffer, batch)
            pace.end(pace.settings.chunk)


def _network(kind: str, *, images: bool) -> Any:
    """Build a network over the features of vectors or images."""
    size = QUANTILES
    if images:
        atari = _module("env.atari.atari_network")
        actions = size.image_actions
        convolutions = atari.DQNet(
            c=size.stack,
            h=size.image,
            w=size.image,
            action_shape=actions,
            features_only=True,
            output_dim_added_layer=size.image_features,
        )
        features = atari.ScaledObsInputActionReprNet(convolutions)
    else:
        actions = size.actions
        net = _module("utils.net.common").Net
        features = net(state_shape=(size.obs,), hidden_sizes=size.hidden)
    return getattr(_module("utils.net.discrete"), kind)(
        preprocess_net=features, action_shape=actions, num_cosines=size.cosines
    )


def _actions(*, images: bool) -> Any:
    return gymnasium.spaces.Discrete(QUANTILES.image_actions if images else QUANTILES.actions)


def _iqn(*, images: bool) -> Any:
    algorithm = _module("algorithm.modelfree.iqn")
    policy = algorithm.IQNPolicy(
        model=_network("ImplicitQuantileNetwork", images=images),
        action_space=_actions(images=images),
        sample_size=QUANTILES.choosing,
        online_sample_size=QUANTILES.drawn,
        target_sample_size=QUANTILES.drawn,
    )
    return algorithm.IQN(
        policy=policy,
        optim=_module("algorithm.optim").AdamOptimizerFactory(lr=1e-3),
        num_quantiles=QUANTILES.drawn,
        target_update_freq=DQN.target_interval,
    )


def _fqf(*, images: bool) -> Any:
    algorithm = _module("algorithm.modelfree.fqf")
    optim = _module("algorithm.optim")
    network = _network("FullQuantileFunction", images=images)
    proposal = _module("utils.net.discrete").FractionProposalNetwork(
        QUANTILES.proposed, network.input_dim
    )
    policy = algorithm.FQFPolicy(
        model=network, fraction_model=proposal, action_space=_actions(images=images)
    )
    return algorithm.FQF(
        policy=policy,
        optim=optim.AdamOptimizerFactory(lr=1e-3),
        fraction_optim=optim.RMSpropOptimizerFactory(lr=2.5e-9),
        num_fractions=QUANTILES.proposed,
        ent_coef=1e-3,
        target_update_freq=DQN.target_interval,
    )


def _vectors() -> Any:
    rng = np.random.default_rng(0)
    count = QUANTILES.buffer
    never = np.zeros(count, np.bool_)
    return _module("data").ReplayBuffer.from_data(
        obs=0.3 * rng.standard_normal((count, QUANTILES.obs), np.float32),
        act=rng.integers(0, QUANTILES.actions, count),
        rew=0.3 * rng.standard_normal(count, np.float32),
        terminated=never,
        truncated=never,
        done=never,
        obs_next=0.3 * rng.standard_normal((count, QUANTILES.obs), np.float32),
    )


def _images() -> Any:
    """Fill the buffer of its Atari examples, which are given stacks and keep the newest frame."""
    data = _module("data")
    buffer = data.ReplayBuffer(
        QUANTILES.image_buffer,
        stack_num=QUANTILES.stack,
        ignore_obs_next=True,
        save_only_last_obs=True,
    )
    rng = np.random.default_rng(0)
    shape = (QUANTILES.stack, QUANTILES.image, QUANTILES.image)
    for _ in range(QUANTILES.image_buffer):
        row = data.Batch(
            obs=rng.integers(0, 256, shape, np.uint8),
            act=rng.integers(0, QUANTILES.image_actions),
            rew=rng.standard_normal(),
            terminated=False,
            truncated=False,
            info={},
        )
        buffer.add(row)
    return buffer
