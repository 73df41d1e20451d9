"""When a model is fitted and when rollouts are made, in the off-policy and the offline loop.

Both happen at the beginning of a pass, at steps that the settings fix; what has been done is
counted in the checkpoint, so a run does not depend on where it was cut.  A fit may be cut between
two of its epochs.  Rollouts run eagerly: they are a few large products.
Shapes: S seeds, B starts, K imagined rows, M members.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.dynamics.fit import buffer_rows
from rl_training.algorithms.dynamics.imagination import (
    Imagination,
    Imagined,
    Rules,
    TransitionFunction,
    imagination_of,
    rows_that_count,
)
from rl_training.data.replay.dataset import DatasetBuffer
from rl_training.data.replay.mixed import SyntheticBuffer
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.envs.tasks.rewards import reward_for
from rl_training.envs.tasks.terminations import termination_for
from rl_training.errors import ConfigError
from rl_training.models.mlp_mopo import take_rows
from rl_training.runtime.compile.runner import ModelRunner, ReplayRunner
from rl_training.runtime.health.dynamics import fit_health, per_seed, rollout_health
from rl_training.runtime.phases.base import LoopPhase
from rl_training.runtime.replay import require_free
from rl_training.runtime.session import Session
from rl_training.state import Counter, Stateful, transient


class ImaginationPhase(LoopPhase, Stateful):
    """Keeps a learner's model and its imagined transitions up to date."""

    def __init__(self, session: Session, learner: AnyLearner, real: ReplayBuffer | None) -> None:
        """Allocate the imagined transitions.

        Args:
            session: The run.
            learner: Whose model and policy it is.
            real: Transitions to fit to and to start from.

        Raises:
            RLTrainingError: For rules of the task that are not known, too little data or memory.
        """
        imagination = imagination_of(learner)
        assert imagination is not None
        assert real is not None
        if isinstance(real, DatasetBuffer):  # a replay is filled later
            imagination.trainer.require_rows(len(real))
        # Parts of the checkpoint of their own, which are not saved once more within this one.
        self.session, self._learner, self._real = session, transient(learner), transient(real)
        self._imagination = transient(imagination)
        self.rules = rules_for(imagination, real, session.env_spec, session.config.env_kwargs)
        self._buffer = transient(synthetic_buffer(imagination, real))
        self.fits, self.refreshes = Counter(), Counter()
        self._model: ModelRunner | None = None

    @property
    def learner(self) -> AnyLearner:
        """Whose model it is."""
        return self._learner.value

    @property
    def imagination(self) -> Imagination:
        """The model, and what is imagined in it."""
        return self._imagination.value

    @property
    def buffer(self) -> SyntheticBuffer:
        """Imagined transitions, mixed with real ones when it is drawn from."""
        return self._buffer.value

    @property
    def real(self) -> ReplayBuffer:
        """Transitions that happened."""
        return self._real.value

    def parts(self) -> dict[str, Any]:
        """Return the counts of fits and refreshes, and what was imagined."""
        return {"imagination": self, "imagined": self.buffer}

    def batches(self, replay: ReplayBuffer) -> ReplayBuffer:  # noqa: ARG002 - it holds `replay`
        """Draw from imagined transitions mixed with real ones."""
        return self.buffer

    def stops(self) -> list[int]:
        """Return the next steps at which the model is fitted or rolled out."""
        config, step = self.imagination.config, self.session.step
        stops = (times.next_after(step) for times in (config.fit_times, config.refresh_times))
        return [time for time in stops if time is not None]

    def before_pass(self, runner: ReplayRunner) -> None:
        """Fit the model and imagine again, when that is due at this step."""
        config, step = self.imagination.config, self.session.step
        due = config.fit_times.due(step)
        if due > self.fits.value:
            self._fit(runner)
            self.fits.value = due
        due = config.refresh_times.due(step)
        if due > self.refreshes.value:
            self._refresh()
            self.refreshes.value = due

    def _fit(self, runner: ReplayRunner) -> None:
        if self._model is None:
            self._model = ModelRunner(self.learner, self.imagination, runner)
        rows = buffer_rows(self.real)
        fitted = self._model.fit(rows, self.session.pause)
        self.session.log_extra(
            "model", per_seed(fit_health(self.imagination, self.real, rows, fitted))
        )

    def _refresh(self) -> None:
        learner, imagination, step = self.learner, self.imagination, self.session.step
        config = imagination.config
        horizon = config.horizon(step)
        policy = partial(learner.act, explore=True)
        imagined = imagination.rollout(policy, learner.rng, self.starts(), horizon, self.rules)
        counted = rows_that_count(imagined)
        self.buffer.extend(fields_of(counted, imagination.worth(counted)), config.kept_at(step))
        health = rollout_health(imagination, self.real, imagined, horizon)
        self.session.log_extra("imagined", per_seed(health))

    def starts(self) -> Tensor:
        """Draw real states to start from, `[S, B, D]`."""
        learner, real = self.learner, self.real
        index = real.draw_rows(learner.rng, self.imagination.config.rollout_batch_size)
        return take_rows(real.rows["obs"].expand(learner.num_seeds, -1, -1), index)


def fields_of(imagined: Imagined, reward: Tensor) -> dict[str, Tensor]:
    """Return imagined transitions as rows of a buffer, with the given reward."""
    names = ("obs", "action", "next_obs", "terminated")
    return {name: getattr(imagined, name) for name in names} | {"reward": reward}


def synthetic_buffer(imagination: Imagination, real: ReplayBuffer) -> SyntheticBuffer:
    """Allocate imagined transitions beside the real ones.

    Raises:
        ConfigError: When they do not fit into memory, or the real ones are not in memory.
    """
    config, model, seeds = imagination.config, imagination.model, imagination.seeds
    if isinstance(real, DatasetBuffer) and real.is_mapped:
        raise ConfigError(
            "the dataset stays on disk (algo_kwargs.dataset_storage), but a model of the dynamics "
            "is fitted to rows in memory; set dataset_storage to device, or take less data"
        )
    width = 2 * model.obs_dim + model.action_dim + 3
    needed = 4 * width * config.synthetic_capacity * len(seeds)
    what = f"the buffer of {config.synthetic_capacity} imagined transitions"
    advice = "set algo_kwargs.synthetic_buffer_capacity, or fewer and shorter rollouts"
    require_free(needed, what, imagination.device, advice)
    return SyntheticBuffer(
        config.synthetic_capacity,
        (model.obs_dim,),
        (model.action_dim,),
        real=real,
        real_ratio=1 - config.synthetic_batch_ratio,
        seeds=seeds,
    )


def rules_for(
    imagination: Imagination, real: ReplayBuffer, env: EnvSpec, env_kwargs: dict[str, Any]
) -> Rules:
    """Return what is known of the task, as the settings name it.

    Raises:
        ConfigError: When nothing says where episodes end, or no reward is known.
        EnvError: For an own function that cannot be used.
    """
    config, device = imagination.config, imagination.device
    termination: TransitionFunction | None = None
    if not (config.model_learn_terminations and config.termination_function == "auto"):
        termination = termination_for(env, env_kwargs, config.termination_function, device)
        if termination is None:
            raise ConfigError(
                f"algo_kwargs.termination_function auto knows no rule for {env.env_id}; name your "
                "own as module:function, set model_learn_terminations to true, or never if its "
                "episodes end by their time limit alone"
            )
    if config.reward_function is None:
        if not config.model_learn_reward:
            raise ConfigError(
                "algo_kwargs.model_learn_reward is false, so the reward must be known; set "
                "reward_function to auto or module:function, or let the model learn the reward"
            )
        return Rules(termination)
    reward = reward_for(env, env_kwargs, config.reward_function, device)
    if reward is None:
        raise ConfigError(
            f"algo_kwargs.reward_function auto knows no reward for {env.env_id}; name your own as "
            "module:function, or leave it out: the model learns the reward"
        )
    scale, shift, known = real.reward_scale, real.reward_shift, reward

    def scaled(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        # As the real rows of every batch are.
        return torch.add(known(obs, action, next_obs) * scale, shift)

    return Rules(termination, scaled)
