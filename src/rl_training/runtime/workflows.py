"""What one does with a checkpoint: evaluate it, predict with it, take the run up again.

A checkpoint is enough: neither the original YAML nor, for prediction, the environment is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import ActingState, AnyLearner
from rl_training.data.datasets.scores import reference_scores
from rl_training.envs.factory import probe_env
from rl_training.envs.named_modules import only_imported_modules
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, DataError, exit_is_error
from rl_training.experiment.checkpoint.codec import stack_seeds
from rl_training.experiment.checkpointing import (
    load_single_file,
    open_checkpoint,
    read_manifest,
    resolve_checkpoint,
)
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.hub import fetched, hub_name
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.runs import is_hub_name, run_lock
from rl_training.observations import ObservationLike
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpoints.resume import (
    Warn,
    find_start,
    group_folders,
    home_of,
    load_group,
)
from rl_training.runtime.checkpoints.saver import ACTING_ONLY, check_header, checked, usable
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.results import EvalResult, TrainResult
from rl_training.runtime.train import (
    continue_elsewhere,
    continue_run,
    require_fits,
    require_same_shapes,
)
from rl_training.transfer import choose_device
from rl_training.validation import parse


@dataclass(frozen=True)
class LoadedAgent:
    """A learner ready to act, and what it was trained as."""

    learner: AnyLearner
    config: TrainConfig
    env_spec: EnvSpec
    step: int
    stranger: str | None = None
    """Where on the hub it is from; what such an agent names is never imported."""
    acting_only: bool = False
    """Whether its critics and optimizers are as they are built: the file had none."""

    def import_task(self) -> None:
        """Import the modules that the task's functions are in; for those who run the task itself.

        Loading imports nothing that a file names, so that a stranger's policy can be used.

        Raises:
            EnvError: When an agent of the hub names a module that is not imported yet.
        """
        env_kwargs = self.config.env_kwargs
        if self.stranger is None:
            self.learner.see_task(self.env_spec, env_kwargs, may_import=True)
            return
        self.learner.see_task(self.env_spec, env_kwargs, may_import=False)
        with only_imported_modules(self.stranger):
            probe_env(self.config.env_id, env_kwargs)  # whatever it names is there from now on

    def predict(
        self,
        obs: ObservationLike,
        state: ActingState | None = None,
        *,
        deterministic: bool = True,
    ) -> NDArray[Any]:
        """Choose an action for an observation, or for each of a batch, in the task's units.

        Args:
            obs: One observation as the task gives it, or several; those of several parts as
                dictionaries or tuples, whose leaves have one more axis for several.
            state: What the learner remembers of the episodes in progress, one for each
                observation; it is moved on in place.  None acts as at the start of episodes.
            deterministic: Take the policy's best action, or sample.

        Raises:
            DataError: When the observation has another shape than the task's.
        """
        batch, single = self._batch_of(obs)
        with torch.inference_mode():
            obs_tensor = torch.from_numpy(np.ascontiguousarray(batch)).to(self.learner.device)
            action = self._chosen(obs_tensor.unsqueeze(0), state, deterministic)
        actions: NDArray[Any] = self.env_spec.scale_action(action[0].cpu().numpy())
        return actions[0] if single else actions

    def _batch_of(self, obs: Any) -> tuple[NDArray[Any], bool]:
        """Return observations as a batch, and whether a single one was given."""
        spec = self.env_spec
        if spec.observation is not None:
            return spec.observation.pack_given(obs)
        shape = tuple(spec.obs_shape)
        try:
            given = np.asarray(obs)
            if given.dtype.kind not in "biuf":
                raise TypeError(given.dtype)
            with np.errstate(over="ignore"):  # infinity is refused below
                array = given.astype(spec.learner_dtype)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"the observation must be numbers of shape {shape}, got {str(obs)[:80]!r}"
            ) from None
        single = array.shape == shape
        batch = array[None] if single else array
        if batch.ndim != len(shape) + 1 or batch.shape[1:] != shape:
            raise DataError(
                f"the observation has shape {array.shape}; {spec.env_id} needs {shape}, "
                f"or {('batch', *shape)} for several at once"
            )
        if not np.isfinite(batch).all():
            raise DataError("the observation holds NaN or infinity")
        return batch, single

    def _chosen(self, obs: Tensor, state: ActingState | None, deterministic: bool) -> Tensor:
        learner = self.learner
        if state is None:
            return learner.act(obs) if deterministic else learner.draw_action(obs)
        count = next((t.shape[1] for t in vars(state).values() if isinstance(t, Tensor)), None)
        if count not in (None, obs.shape[1]):
            raise DataError(
                f"the state is that of {count} environments, but there are {obs.shape[1]} "
                "observations; make one with initial_state(num_envs)"
            )
        return learner.act_from(state, obs) if deterministic else learner.sample_from(state, obs)


def load_agent(
    path: str | Path, *, device: str = "auto", best: bool = False, warn: Warn | None = None
) -> LoadedAgent:
    """Load a learner from a checkpoint folder, a run folder (its newest good one) or a saved file.

    Args:
        path: Where it is; `hf://user/name` is on the Hugging Face Hub.
        device: Where it acts.
        best: Take the checkpoint with the best evaluation of the run instead of the newest.
        warn: Called with a sentence about each damaged checkpoint passed over.

    Raises:
        CheckpointError: When there is none, or none that is whole.
    """
    if is_hub_name(path):
        name = str(hub_name(path))
        single = load_single_file(fetched(path))
        agent = agent_from(single.header, single.states["learner"], device)
        return replace(agent, stranger=name)
    path = Path(path)
    if path.is_file():
        single = load_single_file(path)
        return agent_from(single.header, single.states["learner"], device)
    step = _best_step(path, warn) if best else None
    loaded = checked(open_checkpoint(_one_seed(path), step=step, components={"learner"}, warn=warn))
    return agent_from(loaded.header | {"step": loaded.step}, loaded.states["learner"], device)


def agent_from(header: dict[str, Any], state: Any, device: str) -> LoadedAgent:
    """Build the learner that a checkpoint describes and put its state into it.

    Raises:
        CheckpointError: When the description cannot be used, or does not fit the state.
    """
    try:
        config = parse(TrainConfig, header["config"])
        env_spec = parse(EnvSpec, header["env_spec"])
        step, seed = int(header["step"]), int(header["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's description cannot be used: {error}") from None
    spec, on = get_algorithm_spec(config.algo), choose_device(device)
    acting_only = header.get(ACTING_ONLY) is True
    if acting_only:
        # Most of the learner is not in the file, so that its size says nothing of the memory.
        require_fits(spec, require_same_shapes(spec, env_spec, config.algo_config, {}), 1, on)
    else:
        require_same_shapes(spec, env_spec, config.algo_config, {"the checkpoint": state})
    learner = spec.build(env_spec, config.algo_config, (seed,), on, env_kwargs=config.env_kwargs)
    with usable("learner", "the checkpoint"):
        whole = _completed(state, learner.state_dict()) if acting_only else state
        learner.load_state_dict(whole)
    return LoadedAgent(learner, config, env_spec, step, acting_only=acting_only)


def _completed(state: Any, whole: Any) -> Any:
    """Return a state with what it lacks from a whole one, and numbers of 16 bits widened."""
    if isinstance(state, dict) and isinstance(whole, dict):
        inner = {key: _completed(value, whole.get(key)) for key, value in state.items()}
        return {**whole, **inner}
    both = isinstance(state, Tensor) and isinstance(whole, Tensor)
    if both and (state.dtype, whole.dtype) == (torch.float16, torch.float32):
        return state.float()
    return state


def evaluate_checkpoint(
    path: str | Path,
    num_episodes: int | None = None,
    *,
    seed: int | None = None,
    device: str = "auto",
    best: bool = False,
    deterministic: bool | None = None,
    warn: Warn | None = None,
) -> EvalResult:
    """Run whole episodes with a checkpoint's policy.

    Args:
        path: Checkpoint folder, run folder or saved file.
        num_episodes: How many; None takes the run's `eval_episodes`.
        seed: Seed of the episodes; None takes one that training never used.
        device: Where the learner acts.
        best: Take the run's best checkpoint instead of the newest.
        deterministic: Take the policy's best actions, or sample; None does as the run's
            `eval_deterministic` says.
        warn: Called about damaged checkpoints passed over.
    """
    agent = load_agent(path, device=device, best=best, warn=warn)
    return evaluate_agent(agent, num_episodes, seed=seed, deterministic=deterministic)


@exit_is_error("evaluation")
def evaluate_agent(
    agent: LoadedAgent,
    num_episodes: int | None = None,
    *,
    seed: int | None = None,
    deterministic: bool | None = None,
    env_id: str | None = None,
) -> EvalResult:
    """Run whole episodes with an agent's policy, see `evaluate_checkpoint`.

    `env_id` names another task with the same spaces, made without the run's `env_kwargs`.
    """
    count = num_episodes if num_episodes is not None else max(agent.config.eval_episodes, 1)
    return _play(agent, 1, count, seed, deterministic, env_id)[0]


@exit_is_error("evaluation")
def evaluate_group(
    path: str | Path,
    num_episodes: int | None = None,
    *,
    seed: int | None = None,
    device: str = "auto",
    deterministic: bool | None = None,
    warn: Warn | None = None,
) -> dict[str, EvalResult]:
    """Run the same episodes with every member of a group, all stepped together.

    Each member meets the same start states, so that returns differ by what was learned, not by
    luck.  They are those that `evaluate_checkpoint` gives the member with the same `seed`.

    Args:
        path: Folder of the group; the newest step that every member has whole is taken.
        num_episodes: How many for each; None takes the run's `eval_episodes`.
        seed: Seed of the episodes; None takes one that training never used.
        device: Where the learners act.
        deterministic: As in `evaluate_checkpoint`.
        warn: Called about damaged checkpoints passed over.

    Returns:
        What each member got, by the name of its folder.

    Raises:
        CheckpointError: When the folder is not that of a group, or no step is common to all.
    """
    agent = _load_group_agent(Path(path), device, warn)
    members = agent.config.members
    count = num_episodes if num_episodes is not None else max(agent.config.eval_episodes, 1)
    results = _play(agent, len(members), count, seed, deterministic)
    return {member.folder: result for member, result in zip(members, results, strict=True)}


def _load_group_agent(path: Path, device: str, warn: Warn | None) -> LoadedAgent:
    """Load all members of a group as one learner."""
    folders = group_folders(path)
    if not folders:
        raise CheckpointError(f"{path} is not the folder of a group: it holds no seed_<n> folders")
    config, loaded = load_group(path, folders, warn, {"learner"})
    states = {str(checkpoint.path): checkpoint.states["learner"] for checkpoint in loaded}
    spec, env_spec = get_algorithm_spec(config.algo), parse(EnvSpec, loaded[0].header["env_spec"])
    require_same_shapes(spec, env_spec, config.algo_config, states)
    learner = spec.build(
        env_spec,
        config.algo_config,
        config.all_seeds,
        choose_device(device),
        config.varied,
        env_kwargs=config.env_kwargs,
    )
    with usable("learner", str(path)):
        learner.load_state_dict(stack_seeds(list(states.values())))
    return LoadedAgent(learner, config, env_spec, loaded[0].step)


def _play(
    agent: LoadedAgent,
    num_members: int,
    count: int,
    seed: int | None,
    deterministic: bool | None,
    env_id: str | None = None,
) -> list[EvalResult]:
    """Run the same `count` episodes with each member of an agent's learner."""
    if count < 1:
        raise DataError(f"num_episodes must be >= 1, got {count}")
    # Training evaluates with (seed, step); another stream keeps these episodes unseen.
    base = agent.config.all_seeds[0] + 1_000_003 if seed is None else seed
    agent.import_task()
    env_kwargs = agent.config.env_kwargs
    if env_id is not None and env_id != agent.config.env_id:
        env_kwargs = {}
        probe_env(env_id).require_same_task(agent.env_spec, "evaluate on a task of the same spaces")
    evaluator = Evaluator(
        agent.config.env_id if env_id is None else env_id,
        env_kwargs,
        (base,) * num_members,
        deterministic=agent.config.eval_deterministic if deterministic is None else deterministic,
        mode=agent.config.vector_mode,
        threads=agent.config.env_threads,
    )
    try:
        returns = evaluator.evaluate(agent.learner, count, agent.step)
        successes: Sequence[Sequence[float] | None] = evaluator.successes or [None] * len(returns)
    finally:
        evaluator.close()
    same = env_id is None or env_id == agent.config.env_id
    scores = agent.config.scores if same else reference_scores(str(env_id))
    return [
        EvalResult(tuple(episodes), agent.step, scores, None if reached is None else tuple(reached))
        for episodes, reached in zip(returns, successes, strict=True)
    ]


def predict_from_checkpoint(
    path: str | Path, obs: ObservationLike, *, deterministic: bool = True, device: str = "auto"
) -> NDArray[Any]:
    """Load a checkpoint and choose an action; keep a `LoadedAgent` to do so more than once."""
    return load_agent(path, device=device).predict(obs, deterministic=deterministic)


def resume_training(
    path: str | Path,
    *,
    total_timesteps: int | None = None,
    output_dir: str | Path | None = None,
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    warn: Warn | None = None,
) -> TrainResult:
    """Resume a run and train to its end.

    A run continues in its own folder. A copy of a checkpoint, one outside the `checkpoints` folder
    of its run, continues in a new run and changes nothing else.

    Args:
        path: A checkpoint folder, a run folder (its newest good checkpoint is used), or the folder
            of a group (the newest step that all members have).
        total_timesteps: New end of the run; schedules keep their plan and stay at their end beyond
            it.
        output_dir: Continue in a new run, whose folder is made here; None does so for copies alone,
            in `runs`.
        threads: New number of CPU threads; None keeps that of the run, on which its last bits
            depend.
        callbacks: Observers.
        warn: Called about damaged checkpoints passed over.

    Raises:
        CheckpointError: When there is nothing to resume from.
        RLTrainingError: When another process is training in the run's folder.
    """
    if is_hub_name(path):
        raise CheckpointError(
            f"{hub_name(path)} holds the agent alone, without replay and environments, so training "
            "cannot be resumed from it; begin a new run with its networks: rl-training train "
            f"--from-checkpoint {hub_name(path)}, beside the method and the task"
        )
    path = Path(path)
    if path.exists():  # absolute: environments may change the working directory during the run
        path = path.absolute()
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; training is resumed from a run folder or one of its checkpoints "
            "(a file made by save() holds the agent alone, without replay and environments)"
        )
    home = home_of(path) if output_dir is None else None
    # Held before it is read: what another process trains in between would be undone here.
    with nullcontext() if home is None else run_lock(home):
        config, loaded = find_start(path, home, warn)
        given = {"total_timesteps": total_timesteps, "threads": threads}
        config = config.replace(
            **{name: value for name, value in given.items() if value is not None}
        )
        if home is not None:
            return continue_run(config, home, loaded, callbacks)
        # A stranger's checkpoint does not choose where we write.
        usual = TrainConfig.model_fields["output_dir"].default
        config = config.replace(output_dir=usual if output_dir is None else output_dir)
        return continue_elsewhere(config, path, loaded, callbacks)


def _one_seed(path: Path) -> Path:
    group = group_folders(path)
    if group:
        raise CheckpointError(
            f"{path} holds several seeds; give one of them: {', '.join(str(p) for p in group)}"
        )
    return path


def _best_step(path: Path, warn: Warn | None) -> int:
    newest = resolve_checkpoint(_one_seed(path), components={"learner"}, warn=warn)
    header = read_manifest(newest).header
    check_header(header, newest)
    step = int(header["best_step"])
    if step < 0:
        raise CheckpointError(f"{path} was never evaluated, so it has no best checkpoint")
    return step
