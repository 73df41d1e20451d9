"""What a policy is worth, from recorded data alone: fitted Q evaluation with a bootstrap interval.

Estimated is the discounted value at the starts of the data's episodes,
E[sum_t gamma^t r_t | s_0, a_t = pi(s_t)], with no end but terminations: a time limit does not end
the sum.  `ope/fqe.py` has the mathematics.

Shapes: S members, N rows, E episodes, K actions per state, D entries of an observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.ends import with_links_marked
from rl_training.data.datasets.sources import kind_of_source, load_transition_dataset
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, DataError, SpecMismatch
from rl_training.experiment.statistics import bootstrap_interval
from rl_training.ope.fitted_q import OnProgress, Policy, fit_members
from rl_training.ope.fqe import FQEConfig
from rl_training.ope.value import OfflineValue, ranked, summarize_fit, weight_beyond
from rl_training.rng import Rng
from rl_training.runtime.checkpoints.resume import Warn
from rl_training.runtime.workflows import LoadedAgent, load_agent

Source: TypeAlias = OfflineDataset | str | Path
SAMPLES = 8
"""Actions drawn per state for a stochastic policy."""
CHUNK_ROWS = 1 << 16


def evaluate_offline(
    checkpoint: str | Path | LoadedAgent,
    dataset: Source,
    *,
    stochastic: bool = False,
    device: str = "auto",
    best: bool = False,
    on_progress: OnProgress | None = None,
    warn: Warn | None = None,
    **settings: Any,
) -> OfflineValue:
    """Estimate the discounted value of a checkpoint's policy from recorded data.

    Args:
        checkpoint: Checkpoint folder, run folder, saved file, or an agent that is loaded.
        dataset: Transitions of the same task: a dataset, a file, or a Minari id.
        stochastic: Evaluate the policy that samples instead of the one that takes its best action.
        device: Device of networks and data; a loaded agent has its own.
        best: Use the run's best checkpoint instead of the newest.
        on_progress: Called now and then with the updates done and their number.
        warn: Called with a sentence about anything worth knowing.
        **settings: Fields of `FQEConfig`.

    Raises:
        ConfigError: For a setting out of range, the checkpoint's gamma included.
        DataError: When the data cannot be read, does not fit, or has no usable episodes.
        CheckpointError: When no checkpoint is whole.
    """
    config = FQEConfig(**settings)
    if isinstance(checkpoint, LoadedAgent):
        agent, name = checkpoint, f"{checkpoint.config.algo} at step {checkpoint.step}"
    else:
        agent = load_agent(checkpoint, device=device, best=best, warn=warn)
        name = str(checkpoint)
    config = _with_gamma(config, agent, name)
    data = prepared(dataset, agent, warn)
    return _evaluate(name, agent, data, config, stochastic, on_progress)


def rank_offline(
    checkpoints: Sequence[str | Path],
    dataset: Source,
    *,
    stochastic: bool = False,
    device: str = "auto",
    best: bool = False,
    on_progress: OnProgress | None = None,
    warn: Warn | None = None,
    **settings: Any,
) -> tuple[OfflineValue, ...]:
    """Estimate several checkpoints on the same resamples of the data; the best comes first.

    Args:
        checkpoints: At least one, each as `evaluate_offline` takes it.
        dataset: As `evaluate_offline` takes it; read once.
        stochastic: As in `evaluate_offline`, like all that follow.
        device: Device of networks and data.
        best: Take the best checkpoint of each run.
        on_progress: Called with the updates done and their number, over all checkpoints.
        warn: Called with a sentence about anything worth knowing.
        **settings: Fields of `FQEConfig`.

    Raises:
        ConfigError: When the checkpoints have different gammas and none is given.
    """
    config = FQEConfig(**settings)
    agents = [load_agent(path, device=device, best=best, warn=warn) for path in checkpoints]
    if config.gamma is None:
        _same_gamma(agents, checkpoints)
    config = _with_gamma(config, agents[0], str(checkpoints[0]))
    # All before the first is evaluated, so that a mistake does not cost minutes.
    loaded = dataset
    if not isinstance(dataset, OfflineDataset):
        loaded = load_source(str(dataset), agents[0].env_spec)
    prepared_for = [prepared(loaded, agents[0], warn)]
    prepared_for += [prepared(loaded, agent) for agent in agents[1:]]
    found = []
    for place, (agent, data) in enumerate(zip(agents, prepared_for, strict=True)):
        shown = _shifted(on_progress, place, len(agents))
        found.append(_evaluate(str(checkpoints[place]), agent, data, config, stochastic, shown))
    return ranked(found)


def _shifted(on_progress: OnProgress | None, place: int, count: int) -> OnProgress | None:
    """Return a report on one of several evaluations as a report on all."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(place * total + done, count * total)


def prepared(dataset: Source, agent: LoadedAgent, warn: Warn | None = None) -> OfflineDataset:
    """Return data in learner units that an agent can be evaluated on, after checks.

    Raises:
        DataError: When it does not fit the agent's task, or its episodes cannot be told.
        SpecMismatch: When observations hold images, actions are several whole numbers, or they
            depend on more than the observation.
    """
    if agent.learner.initial_acting_state(1) is not None:
        raise SpecMismatch(
            f"offline evaluation takes policies of the observation alone, but {agent.config.algo} "
            "acts by what it remembers of the episode (a plan or a belief); evaluate this "
            "checkpoint with rl-training eval"
        )
    _require_vectors(agent.env_spec)
    if isinstance(dataset, OfflineDataset):
        data = with_links_marked(dataset)
    else:
        data = load_source(str(dataset), agent.env_spec)
    # Clipped as the environment would: the file holds what the policy wanted, not what was done.
    data = data.in_learner_units(agent.env_spec, clip=True)
    _check_episodes(data)
    if warn is not None:
        for note in data.notes:
            warn(f"{data.name}: {note}")
    return data


def _require_vectors(task: EnvSpec) -> None:
    """Refuse what the networks that estimate values do not read.

    Raises:
        SpecMismatch: Naming the task and what it has.
    """
    instead = "evaluate this checkpoint with rl-training eval"
    if len(task.obs_shape) != 1:
        raise SpecMismatch(
            f"offline evaluation takes vector observations, but {task.env_id} has shape "
            f"{tuple(task.obs_shape)}; {instead}"
        )
    leaves = () if task.observation is None else task.observation.leaves
    images = [leaf.name for leaf in leaves if leaf.kind == "image"]
    if images:
        raise SpecMismatch(
            f"offline evaluation takes observations without images, but {task.env_id} has "
            f"{', '.join(images)}; {instead}"
        )
    if task.action_sizes:
        raise SpecMismatch(
            f"offline evaluation takes discrete or continuous actions, but {task.env_id} has "
            f"{task.action_kind} ones; {instead}"
        )


def load_source(source: str, task: EnvSpec) -> OfflineDataset:
    """Load data of a task, named by one word: a file, a folder of columns, or a Minari id."""
    kind = kind_of_source(source)
    minari = kind == "minari"
    return load_transition_dataset(
        kind,
        path=None if minari else source,
        dataset_id=source if minari else None,
        env_spec=task,
        # An id that was only guessed to be one is not asked for on the network.
        download=False,
    )


def _check_episodes(data: OfflineDataset) -> None:
    data.require_episodes("offline evaluation")
    if data.num_episodes < 2:
        raise DataError(
            f"{data.name}: it holds {len(data)} rows in one episode, but offline evaluation needs "
            "the starts of at least 2; mark the ends of episodes by terminations, truncations or "
            "episode_ids"
        )


def _with_gamma(config: FQEConfig, agent: LoadedAgent, name: str) -> FQEConfig:
    if config.gamma is not None:
        return config
    gamma = agent.config.algo_config.gamma
    if gamma >= 1:
        raise ConfigError(
            f"{name} was trained with gamma {gamma:g}, but offline evaluation needs one below 1; "
            "give gamma (--gamma 0.99)"
        )
    return FQEConfig(**dict(config) | {"gamma": gamma})


def _same_gamma(agents: Sequence[LoadedAgent], paths: Sequence[str | Path]) -> None:
    gammas = [agent.config.algo_config.gamma for agent in agents]
    for gamma, path in zip(gammas, paths, strict=True):
        if gamma != gammas[0]:
            raise ConfigError(
                f"{path} was trained with gamma {gamma:g} and {paths[0]} with {gammas[0]:g}: their "
                "values cannot be ranked; give one gamma for all (--gamma 0.99)"
            )


def _evaluate(
    name: str,
    agent: LoadedAgent,
    data: OfflineDataset,
    config: FQEConfig,
    stochastic: bool,
    on_progress: OnProgress | None,
) -> OfflineValue:
    assert config.gamma is not None
    fit = fit_members(
        data,
        policy_of(agent, stochastic=stochastic, seed=config.seed),
        agent.env_spec.action_dim,
        config,
        device=agent.learner.device,
        on_progress=on_progress,
    )
    recorded = data.returns_to_go(config.gamma)[data.episode_starts]
    low, high = bootstrap_interval(recorded, lambda sample: sample.mean(-1), seed=config.seed)
    value = OfflineValue(
        checkpoint=name,
        algo=agent.config.algo,
        step=agent.step,
        gamma=config.gamma,
        stochastic=stochastic,
        value=None,
        value_low=None,
        value_high=None,
        member_values=None,
        behaviour_value=float(recorded.mean(dtype=np.float64)),
        behaviour_low=low,
        behaviour_high=high,
        weight_beyond=weight_beyond(data, config.gamma),
        soft_score=None,
        drift=None,
        members=config.members,
        updates=config.gradient_steps,
        episodes=data.num_episodes,
        transitions=len(data),
    )
    return summarize_fit(value, fit, data)


def policy_of(agent: LoadedAgent, *, stochastic: bool, seed: int) -> Policy:
    """Return an agent's policy: one action per state, or several that are drawn from it.

    Actions are drawn once per state of the data and shared by all members.
    """
    learner = agent.learner
    bounded = agent.env_spec.action_kind == "continuous" and agent.env_spec.action_low is not None

    def actions(observations: NDArray[Any]) -> Tensor:
        # Copied, because PyTorch warns of arrays that it may not write to, such as mapped files.
        parts = [
            torch.from_numpy(np.array(observations[first : first + CHUNK_ROWS], np.float32))
            for first in range(0, len(observations), CHUNK_ROWS)
        ]
        act = learner.draw_action if stochastic else learner.act
        # An agent in use draws on as if nothing had happened.
        with torch.no_grad(), learner.drawing_from(Rng((seed,), "ope", learner.device)):
            drawn = [
                torch.cat([act(part.to(learner.device)[None])[0] for part in parts])
                for _ in range(SAMPLES if stochastic else 1)
            ]
        stacked = torch.stack(drawn, 1)  # [n, K, ...]
        # The environment would clip to its box, so a policy of unbounded actions is worth that.
        return stacked.clamp(-1, 1) if bounded else stacked

    return actions
