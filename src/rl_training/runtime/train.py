"""Training from a configuration, and taking a run up again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.config import AlgoConfig
from rl_training.algorithms.spec import AlgorithmSpec, Loop
from rl_training.envs.factory import probe_env
from rl_training.envs.given import is_object, stepped_itself
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.spec import EnvSpec
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    NonFiniteError,
    RLTrainingError,
    SpecMismatch,
    exit_is_error,
    last_own_frame,
)
from rl_training.experiment.checkpoint.codec import MAX_TENSORS
from rl_training.experiment.checkpointing import LoadedCheckpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.hub import fetched
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.runs import is_hub_name, new_run
from rl_training.experiment.trackers import require_tracker
from rl_training.models.layers import set_precision
from rl_training.runtime.callbacks import Callback, watch_signals
from rl_training.runtime.checkpoints.saver import usable
from rl_training.runtime.checkpoints.warm_start import Origin
from rl_training.runtime.compile.runner import Accelerator
from rl_training.runtime.health.diagnostics import note_failure, with_diagnostics
from rl_training.runtime.loops import ONLINE, run_offline
from rl_training.runtime.replay import require_free
from rl_training.runtime.results import TrainResult
from rl_training.runtime.session import Session
from rl_training.runtime.threads import choose_threads, thread_count
from rl_training.state import tensors_in
from rl_training.transfer import choose_device


class TrainFunction(Protocol):
    """Signature of every `train_<algo>`."""

    def __call__(
        self,
        config: TrainConfig,
        *,
        run_suffix: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainResult:
        """Train and return where the run is."""
        ...


def train(
    config: TrainConfig,
    *,
    from_checkpoint: str | Path | None = None,
    run_suffix: str | None = None,
    callbacks: Sequence[Callback] = (),
    stop_at: int | None = None,
) -> TrainResult:
    """Train from scratch, or with the networks of another run to begin with.

    Args:
        config: The run.
        from_checkpoint: Run or checkpoint to take networks from, in place of the configuration's;
            the folder of a group gives each member its own, `hf://user/name` is on the hub.
        run_suffix: Appended to the name of the run's folder.
        callbacks: Observers of the run.
        stop_at: Save and stop at this step without evaluating, as if the run had been killed there.

    Raises:
        RLTrainingError: For everything that is the user's to mend; nothing is left behind then.
        TrainingInterrupted: When a signal stopped the run; it is saved and can be resumed.
    """
    given = config.from_checkpoint if from_checkpoint is None else from_checkpoint
    if given is not None:  # absolute, so that the run can be resumed from anywhere
        place = fetched(given) if is_hub_name(given) else Path(given)
        config = config.replace(from_checkpoint=str(place.expanduser().resolve()))
    return _run(config, new_run(config, run_suffix), callbacks, stop_at=stop_at)


def continue_run(
    config: TrainConfig,
    run_dir: Path,
    loaded: Sequence[LoadedCheckpoint],
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Take a run up from its checkpoints, one per seed, in its own folder; the caller holds it."""
    return _run(config, nullcontext(run_dir), callbacks, loaded)


def continue_elsewhere(
    config: TrainConfig,
    path: Path,
    loaded: Sequence[LoadedCheckpoint],
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Continue from checkpoints, one per seed, in a new folder; `path` is where they were given."""
    folder = new_run(config, continues=path)
    return _run(config, folder, callbacks, loaded, continues=path)


@exit_is_error("training")
def _run(
    config: TrainConfig,
    folder: AbstractContextManager[Path],
    callbacks: Sequence[Callback],
    loaded: Sequence[LoadedCheckpoint] = (),
    *,
    continues: Path | None = None,
    stop_at: int | None = None,
) -> TrainResult:
    spec = get_algorithm_spec(config.algo)
    _require_one_of_a_kind(config)
    loop = spec.loop_of(config.algo_config)
    if config.overlap and loop is not Loop.OFF_POLICY:
        raise ConfigError(
            f"overlap is true, but {config.algo} does not learn from a replay while it acts; "
            "leave overlap out"
        )
    device = choose_device(config.device)
    for tracker in config.trackers:
        require_tracker(tracker)
    with ExitStack() as stack:
        # Orthogonal weights come from a decomposition that rounds by the number of threads, so
        # every learner is built on one, whatever the caller has and the run will get.
        stack.enter_context(thread_count(1))
        # The task is tried before a folder is made, so that a mistake leaves nothing behind.
        task = probe_env(config.env_id, config.env_kwargs)
        spec.check_env(task, config.algo_config)
        states = {str(member.path): member.states.get("learner") for member in loaded}
        outline = require_same_shapes(spec, task, config.algo_config, states)
        require_fits(spec, outline, len(config.members), device)
        starts_from_another = config.from_checkpoint is not None and not loaded
        origin = Origin(config, task) if starts_from_another else None
        learner = spec.build(
            task,
            config.algo_config,
            config.all_seeds,
            device,
            config.varied,
            config.env_kwargs,
            may_import=True,
        )
        set_precision(learner, config.precision)
        # Before the environments: processes that start would look like the load of others.
        saved = loaded[0].header["threads"] if loaded else None
        choice = choose_threads(config.threads, learner, saved)
        torch.set_num_threads(choice.threads)
        envs = None
        if loop in ONLINE:
            with stepped_itself():
                envs = SeedVectorEnv.make(
                    config.env_id,
                    config.env_kwargs,
                    config.num_envs,
                    config.all_seeds,
                    config.vector_mode,
                    spec=task,
                    threads=config.env_threads,
                )
            stack.callback(envs.close)
        # The caller, or a task's module that acts with a network, may have switched it off.
        stack.enter_context(torch.enable_grad())
        session = Session(
            config,
            spec,
            task,
            folder,
            callbacks=callbacks,
            signals=stack.enter_context(watch_signals()),
            resume_level=lambda: "exact" if envs is None else envs.resume_level,
            restore_from=loaded,
            continues=continues,
            origin=origin,
            stop_at=stop_at,
        )
        stack.callback(session.close)
        if choice.note is not None:
            session.say(choice.note)
        if envs is not None:
            session.vector_note = envs.note
        session.accelerator = Accelerator(config, task, learner, session.say)
        stack.callback(session.accelerator.close)
        with _described(session):
            if envs is None:
                return run_offline(session, learner)
            return ONLINE[loop](session, learner, envs)


@contextmanager
def _described(session: Session) -> Iterator[None]:
    """Write down how a run was found that numbers, its environment or the user's code ended."""
    try:
        yield
    except (NonFiniteError, EnvError) as error:
        if not session.has_begun:
            raise
        raise with_diagnostics(session, error) from error
    except Exception as error:
        own = not isinstance(error, RLTrainingError) and last_own_frame(error) is not None
        if own and session.has_begun:
            note_failure(session, error)
        raise


def _require_one_of_a_kind(config: TrainConfig) -> None:
    """Refuse to step an environment that was handed over as an object more than once at a time."""
    if is_object(config.env_id) and config.num_envs * len(config.members) > 1:
        raise ConfigError(
            f"{config.env_id} is one environment, but num_envs {config.num_envs} with "
            f"{len(config.members)} seeds needs more; give a function that makes it"
        )


# How large a learner is, known before any of it is allocated: settings may come from a stranger's
# checkpoint, or be a slip of the keyboard, and the machine must not be the one to find out.


def require_same_shapes(
    spec: AlgorithmSpec, env: EnvSpec, config: AlgoConfig, states: Mapping[str, Any]
) -> AnyLearner:
    """Return a learner of one seed without memory, once every given state fits it.

    Args:
        spec: The algorithm.
        env: The task.
        config: The settings.
        states: Learners' states of one seed each, by where they come from; there may be none.

    Raises:
        CheckpointError: Naming a tensor whose shape differs from what the settings describe.
        ConfigError: The settings ask for more than can be built.
    """
    # What building draws ends up in the state, as one tensor or as a few that are combined.
    most = min((2 * len(tensors_in(state)) + 64 for state in states.values()), default=MAX_TENSORS)
    try:
        outline = spec.outline(env, config, most)
    except (ConfigError, SpecMismatch) as error:
        if not states:
            raise
        raise CheckpointError(
            f"{next(iter(states))}: its settings do not describe what it holds ({error}); it was "
            "not written by this package, so use another checkpoint."
        ) from None
    for where, state in states.items():
        with usable("learner", where):
            outline.load_state_dict(state)
    return outline


def require_fits(
    spec: AlgorithmSpec, outline: AnyLearner, num_seeds: int, device: torch.device
) -> None:
    """Refuse a learner that cannot fit into memory.

    Raises:
        ConfigError: With the sizes.
    """
    needed = num_seeds * sum(tensor.nbytes for tensor in tensors_in(outline.state_dict()).values())
    what = f"the learner of {spec.name} with {num_seeds} member{'s' if num_seeds > 1 else ''}"
    require_free(needed, what, device, "use smaller networks or fewer members")


def trainer_for(algo: str) -> TrainFunction:
    """Return `train` bound to one algorithm."""

    def train_one(
        config: TrainConfig,
        *,
        run_suffix: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainResult:
        if config.algo != algo:
            raise ConfigError(f"train_{algo} was given a configuration of algo {config.algo!r}")
        return train(config, run_suffix=run_suffix, callbacks=callbacks)

    train_one.__name__ = train_one.__qualname__ = f"train_{algo}"
    train_one.__doc__ = f"Train {algo} from a configuration; see `rl_training.runtime.train.train`."
    return train_one
