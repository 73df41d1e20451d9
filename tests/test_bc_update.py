"""Behaviour cloning: closed forms of regression, cross-entropy against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_training.algorithms.bc import BC, bc_loss
from rl_training.data.batch import TransitionBatch
from rl_training.errors import ConfigError
from rl_training.models import MLPPolicyModel
from rl_training.rng import Rng


def batch_of(obs: torch.Tensor, action: torch.Tensor) -> TransitionBatch:
    zeros = torch.zeros(obs.shape[:2])
    return TransitionBatch(obs=obs, action=action, reward=zeros, next_obs=obs, discount=zeros)


def test_cross_entropy_is_numpys() -> None:
    learner = BC(model=MLPPolicyModel(3, 4, (8,), discrete=True))
    with torch.no_grad():
        list(learner.model.actor.parameters())[-2].mul_(300)  # away from the uniform start
    obs = Rng((1,), "test").normal(6, 3)
    action = torch.tensor([[0, 1, 2, 3, 1, 0]])
    logits = learner.model.actor.forward(obs)[0].detach().double().numpy()
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chosen = log_probs[np.arange(6), action[0].numpy()]
    metrics = {name: x.detach() for name, x in bc_loss(learner, batch_of(obs, action)).items()}
    assert float(metrics["loss"]) == pytest.approx(-chosen.mean(), rel=1e-5)
    wrong = (logits.argmax(1) != action[0].numpy()).mean()
    assert float(metrics["action_error"].mean()) == pytest.approx(wrong)


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_a_linear_policy_finds_the_least_squares_solution(loss: str) -> None:
    model = MLPPolicyModel(2, 1, (), discrete=False)
    learner = BC(model=model, learning_rate=0.02, loss=loss, lr_schedule={"type": "linear"})
    obs = Rng((0,), "test").normal(64, 2)
    noise = 0.3 * Rng((0,), "noise").normal(64, 1)
    action = obs @ torch.tensor([[0.7], [-0.4]]) + 0.2 + noise
    for step in range(1500):
        learner.set_progress(step / 1500)
        learner.update(batch_of(obs, action))
    design = np.column_stack([obs[0].numpy(), np.ones(64)])
    solution, residual, *_ = np.linalg.lstsq(design, action[0].numpy(), rcond=None)
    weight, bias = model.actor.parameters()
    found = torch.cat([weight[0], bias[0]]).detach().numpy()
    np.testing.assert_allclose(found, solution, atol=2e-3)
    if loss == "nll":
        # The likelihood's deviation is that of the residuals.
        expected = 0.5 * np.log(residual[0] / 64)
        assert float(model.log_std.detach()) == pytest.approx(expected, abs=5e-3)
    else:
        assert float(model.log_std.detach()) == 0.0


def test_squared_error_needs_continuous_actions() -> None:
    with pytest.raises(ConfigError, match="loss is mse, but the actions are discrete; use nll"):
        BC(model=MLPPolicyModel(3, 4, discrete=True), loss="mse")


def test_rewards_of_the_data_change_nothing() -> None:
    obs, action = Rng((1,), "test").normal(8, 3), torch.zeros(1, 8, dtype=torch.int64)
    results = []
    for reward in (0.0, 1e6):
        learner = BC(model=MLPPolicyModel(3, 2, (8,), discrete=True))
        plain = batch_of(obs, action)
        learner.update(TransitionBatch(**{**vars(plain), "reward": torch.full((1, 8), reward)}))
        results.append(next(learner.model.actor.parameters()).detach().clone())
    assert torch.equal(*results)
