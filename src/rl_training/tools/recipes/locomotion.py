"""Locomotion data by D4RL's recipe (Fu et al., 2020, arXiv:2004.07219), from a run of SAC.

- random: uniformly random actions.
- expert: actions sampled from the policy of the last checkpoint.
- medium: the same from a policy stopped early.  D4RL stops at about a third of the expert's
  performance, not at a third of the training: after a third of its steps, SAC may be near its end.
  So the checkpoint is taken whose evaluation is nearest a third of the way from the random return
  to that of the last checkpoint.
- medium-replay: everything the run had seen up to that checkpoint.
- medium-expert: medium and expert, half of the rows each.

Every set carries the mean returns of the random and of the last policy, between which normalised
scores are measured: 0 and 100 mean the same for all sets of a run.

Shapes: N rows, L environments side by side, T steps of each.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_training._version import __version__
from rl_training.data.datasets.dataset import OfflineDataset
from rl_training.data.datasets.scores import ReferenceScores
from rl_training.data.datasets.sources import load_transition_dataset
from rl_training.data.datasets.writers import save_dataset
from rl_training.envs.seeds import SeedVectorEnv
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, DataError
from rl_training.experiment.checkpointing import list_checkpoints, load_checkpoint
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.summary import evaluations
from rl_training.resources import preset_names
from rl_training.rng import Rng, derive_seed
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.train import train
from rl_training.runtime.workflows import (
    LoadedAgent,
    evaluate_agent,
    load_agent,
    resume_training,
)
from rl_training.tools.recipes.shards import Progress
from rl_training.validation import suggest

Array = NDArray[Any]
Act = Callable[[Array], Array]
"""From observations [1, L, ...] to actions [1, L, A] in learner units."""
FAMILY = "locomotion"
FOLDER = Path("datasets") / FAMILY
TASKS = {
    "halfcheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "walker2d": "Walker2d-v5",
    "ant": "Ant-v5",
}
LEVELS = ("random", "medium", "medium-replay", "medium-expert", "expert")
ROWS = 1_000_000
"""D4RL's number, of each half of medium-expert too; a replay has its own."""
MEDIUM = 1 / 3
"""Place of the medium policy between random and expert."""
MEDIUM_RANGE = (0.2, 0.5)
"""Places that still count as medium."""
LANES = 32
"""Environments side by side; the rows depend on it, so it is not a setting."""
REFERENCE_EPISODES = 100
_REPLAY = "replay"
_SPARE = 2
"""Steps in place of rows that are left out."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    name: str
    """`hopper-medium`."""
    run: Path | None = None
    """Finished run of SAC on the task; None trains one, or resumes the one that was begun."""
    out: Path | None = None
    """Folder of the set; None takes `datasets/locomotion/NAME`."""
    rows: int | None = None
    """Rows; None takes D4RL's number."""
    fraction: float | None = None
    """Share of D4RL's number."""
    seed: int = 0
    """Of the rows that are gathered, and of a run that is trained."""
    train_steps: int | None = None
    """Steps of a run that is trained; None takes the preset's."""
    force: bool = False
    """Replace what is there."""


@dataclass(frozen=True)
class Policies:
    """The run that a set is made from."""

    folder: Path
    config: TrainConfig
    last: Path
    """Its newest checkpoint."""


def make_locomotion(
    request: Request,
    on_progress: Callable[[Progress], None] | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[Path, OfflineDataset]:
    """Make a set, and return where it is and what it holds.

    Raises:
        DataError: When there is no such set, or the run cannot be used for it.
        TrainingInterrupted: When a signal stopped the training; the same command continues.
    """
    task, level = find_level(request.name)
    env_id = TASKS[task]
    out = (request.out or FOLDER / f"{task}-{level}").absolute()
    if out.exists() and not request.force:
        raise DataError(f"{out} exists already; choose another --out, or replace it with --force")
    run = _policies(request, task, out, callbacks)
    _require_fits(run, env_id)
    expert = load_agent(run.last, device="cpu")
    scores = _reference(env_id, expert)
    rows = _rows(request, level)
    dataset, facts = _gathered(level, run, expert, scores, rows, request.seed, on_progress)
    provenance = {
        "recipe": f"{FAMILY}/{task}-{level}",
        "seed": request.seed,
        "rows": len(dataset),
        "run": name_of(run.folder),
        "expert_step": expert.step,
        **facts,
        "scores": {"random": scores.random, "expert": scores.expert},
        "behaviour_return": _behaviour(dataset),
        "versions": _versions(),
    }
    provenance["behaviour_score"] = scores.score(provenance["behaviour_return"])
    made = replace(dataset, provenance=provenance)
    made = replace(made, provenance=provenance | {"digest": made.digest()})
    save_dataset(made, out, "npy", force=request.force)
    return out, load_transition_dataset("npy", path=out)


def find_level(name: str) -> tuple[str, str]:
    """Return task and level of a name such as `hopper-medium-replay`.

    Raises:
        DataError: When there is no such set, with the nearest name.
    """
    task, _, level = name.partition("-")
    if task not in TASKS or level not in LEVELS:
        names = [f"{task}-{level}" for task in TASKS for level in LEVELS]
        raise DataError(
            f"{FAMILY}/{name} cannot be made{suggest(name, names)}; tasks are {', '.join(TASKS)}, "
            f"each with {', '.join(LEVELS)}"
        )
    return task, level


def _rows(request: Request, level: str) -> int | None:
    """Return the number of rows to gather; None takes all of a replay."""
    if request.rows is not None and request.fraction is not None:
        raise DataError("give either --rows or --fraction, not both")
    if request.fraction is not None and not 0.0 < request.fraction <= 1.0:
        raise DataError(f"--fraction must be above 0 and at most 1, got {request.fraction:g}")
    if request.rows is not None and request.rows < 2:
        raise DataError(f"--rows must be >= 2, got {request.rows}")
    if level == "medium-replay":
        if request.rows is not None or request.fraction is not None:
            raise DataError(
                "medium-replay is everything that the run had seen, so it takes neither --rows nor "
                "--fraction"
            )
        return None
    whole = 2 * ROWS if level == "medium-expert" else ROWS
    if request.fraction is not None:
        return max(2, round(request.fraction * whole))
    return whole if request.rows is None else request.rows


# The run


def _policies(request: Request, task: str, out: Path, callbacks: tuple[Callback, ...]) -> Policies:
    """Return the run to take policies from; one that is not there is trained."""
    folder = request.run
    if folder is None:
        folder = _trained(request, task, out.parent / "runs", callbacks)
    entries = list_checkpoints(folder)
    if not entries:
        raise DataError(
            f"{folder} has no checkpoints; name the folder of a run of SAC (of several seeds: one "
            "of its seed folders)"
        )
    last = max(entries, key=lambda entry: entry.step)
    return Policies(folder, load_config(folder / "config.yaml"), last.path)


def _trained(request: Request, task: str, parent: Path, callbacks: tuple[Callback, ...]) -> Path:
    """Train a run, or resume one; every checkpoint is kept."""
    name = f"{task}-sac-seed{request.seed}"
    folder = parent / name
    if folder.exists():
        resume_training(folder, total_timesteps=request.train_steps, callbacks=callbacks)
        return folder
    preset = f"sac/{task}" if f"sac/{task}" in preset_names() else "sac/hopper"
    changes: dict[str, Any] = {
        "env_id": TASKS[task],
        "seed": request.seed,
        "output_dir": str(parent),
        "run_name": name,
        # Rows that two checkpoints share are on the disk once.
        "keep_checkpoints": 10_000,
    }
    if request.train_steps is not None:
        every = max(1, request.train_steps // 40)
        changes |= {"total_timesteps": request.train_steps, "checkpoint_interval": every}
        changes["algo_kwargs"] = {"eval_interval": every}
    return train(load_config(preset, changes=changes), callbacks=callbacks).run_dir


def name_of(folder: Path) -> str:
    """Return the name of a run; that of one seed of several has the name of its group before it."""
    whole = folder.absolute()
    group = whole.parent
    grouped = (group / "config.yaml").is_file()
    return f"{group.name}/{whole.name}" if grouped else whole.name


def _require_fits(run: Policies, env_id: str) -> None:
    config = run.config
    if config.algo != "sac" or config.env_id != env_id:
        raise DataError(
            f"{run.folder} is a run of {config.algo} on {config.env_id}; this set is made from one "
            f"of sac on {env_id}"
        )
    if config.env_kwargs:
        raise DataError(
            f"{run.folder} has env_kwargs {dict(config.env_kwargs)}, so its returns are not those "
            f"of {env_id}; train one without"
        )


def medium_step(run: Policies, scores: ReferenceScores) -> int:
    """Return the step of the medium policy.

    Raises:
        DataError: When no checkpoint that is left has about a third of the performance.
    """
    returns = evaluations(run.folder)
    steps = [e.step for e in list_checkpoints(run.folder) if e.step in returns]
    if not steps:
        raise DataError(
            f"{run.folder} has no checkpoint at a step at which it was evaluated; train with an "
            "eval_interval that is a multiple of checkpoint_interval"
        )
    places = {step: scores.score(returns[step]) / 100.0 for step in steps}
    step = min(places, key=lambda step: (abs(places[step] - MEDIUM), step))
    low, high = MEDIUM_RANGE
    if not low <= places[step] <= high:
        raise DataError(
            f"{run.folder}: a medium policy has about a third of the expert's performance, but of "
            f"the checkpoints that are left the nearest, at step {step}, has {places[step]:.0%}; "
            "train with a larger keep_checkpoints, or without --run"
        )
    return step


# Rows


def _gathered(
    level: str,
    run: Policies,
    expert: LoadedAgent,
    scores: ReferenceScores,
    rows: int | None,
    seed: int,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[OfflineDataset, dict[str, Any]]:
    """Return the rows of a level, and what its description says about them."""
    env_id = run.config.env_id
    if level == "random":
        assert rows is not None
        return gather(env_id, None, rows, seed, on_progress), {}
    if level == "expert":
        assert rows is not None
        return gather(env_id, expert, rows, seed, on_progress), {}
    step = medium_step(run, scores)
    facts = {"medium_step": step, "medium_score": scores.score(evaluations(run.folder)[step])}
    path = next(e.path for e in list_checkpoints(run.folder) if e.step == step)
    if level == "medium-replay":
        return replayed(path, expert.env_spec, run.config), facts
    assert rows is not None
    medium = load_agent(path, device="cpu")
    if level == "medium":
        return gather(env_id, medium, rows, seed, on_progress), facts
    # Other episodes than those of the two sets by themselves would be no better.
    halves = (rows // 2, rows - rows // 2)
    parts = [
        gather(env_id, agent, count, seed, on_progress)
        for agent, count in zip((medium, expert), halves, strict=True)
    ]
    joined: dict[str, Any] = {
        name: np.concatenate([column, getattr(parts[1], name)])
        for name, column in parts[0].columns()
    }
    source = f"{env_id}: {parts[0].source} and {parts[1].source}"
    return OfflineDataset(**joined, name=level, source=source, env_id=env_id), facts


def gather(
    env_id: str,
    agent: LoadedAgent | None,
    rows: int,
    seed: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> OfflineDataset:
    """Step environments side by side and keep every transition, one environment after the other.

    Args:
        env_id: The task.
        agent: Whose policy acts, sampling its actions; None acts uniformly at random.
        rows: How many; the last episode of each environment is cut and marked truncated.
        seed: Of environments and actions.
        on_progress: Called now and then.
    """
    lanes = min(LANES, rows)
    steps = math.ceil(rows / lanes) + _SPARE
    with ExitStack() as stack:
        envs = SeedVectorEnv.make(env_id, {}, lanes, (seed,))
        stack.callback(envs.close)
        spec = envs.spec
        act = _policy(agent, spec, seed)
        columns = _empty(spec, lanes, steps)
        obs = envs.reset()
        for number in range(steps):
            action = act(obs)
            step = envs.step(action)
            columns["observations"][:, number] = obs[0]
            columns["actions"][:, number] = spec.scale_action(action[0])
            columns["rewards"][:, number] = step.task_reward[0]
            columns["next_observations"][:, number] = step.final_obs[0]
            columns["terminations"][:, number] = step.terminated[0]
            columns["truncations"][:, number] = step.truncated[0]
            obs = step.obs
            if on_progress is not None and number % 1000 == 0:
                on_progress(Progress((number + 1) * lanes, steps * lanes, None))
    columns["truncations"][:, -1] |= ~columns["terminations"][:, -1]
    flat: dict[str, Any] = {
        name: values.reshape(-1, *values.shape[2:]) for name, values in columns.items()
    }
    kept = _kept_rows(flat["terminations"] | flat["truncations"], steps, rows)
    flat = {name: values[kept] for name, values in flat.items()}
    who = "random policy" if agent is None else f"sac at step {agent.step:,}"
    return OfflineDataset(
        **flat, name=env_id, source=f"{who} on {env_id}, seed {seed}", env_id=env_id
    )


def _kept_rows(ends: NDArray[np.bool_], steps: int, rows: int) -> NDArray[np.int64]:
    """Return the rows to keep: as many as asked for, but no episode cut after its first row.

    Args:
        ends: `[L * T]`, the last rows of episodes, environment after environment.
        steps: T.
        rows: How many; one more where the last episode would have a single row.
    """
    number = np.arange(len(ends))
    first = np.concatenate([[True], ends[:-1]])
    cut_at_once = first & (number % steps == steps - 1)
    kept: NDArray[np.int64] = number[~cut_at_once]
    return kept[: rows + 1] if first[kept[rows - 1]] else kept[:rows]


def _empty(spec: EnvSpec, lanes: int, steps: int) -> dict[str, Array]:
    """Return columns `[L, T, ...]`, which are time order when L and T become one axis."""
    shapes: Mapping[str, tuple[tuple[int, ...], Any]] = {
        "observations": (spec.obs_shape, np.float32),
        "actions": (spec.action_shape, np.float32),
        "rewards": ((), np.float32),
        "next_observations": (spec.obs_shape, np.float32),
        "terminations": ((), np.bool_),
        "truncations": ((), np.bool_),
    }
    return {name: np.empty((lanes, steps, *s), dtype) for name, (s, dtype) in shapes.items()}


def _policy(agent: LoadedAgent | None, spec: EnvSpec, seed: int) -> Act:
    if agent is None:
        rng = np.random.default_rng(derive_seed(seed, "gather"))
        return lambda obs: rng.uniform(-1.0, 1.0, (*obs.shape[:2], spec.action_dim)).astype(
            np.float32
        )
    spec.require_same_task(agent.env_spec, "gather from the run's own task")
    learner, draws = agent.learner, Rng((seed,), "gather", agent.learner.device)

    def act(obs: Array) -> Array:
        with torch.inference_mode(), learner.drawing_from(draws):
            chosen: Array = learner.sample_from(None, torch.from_numpy(obs)).cpu().numpy()
        return chosen

    return act


def replayed(checkpoint: Path, spec: EnvSpec, config: TrainConfig) -> OfflineDataset:
    """Return the rows of a checkpoint's replay, episode after episode.

    Raises:
        DataError: When the run learned from changed rewards, or has overwritten its first rows.
    """
    settings = config.algo_kwargs
    if settings.get("reward_scale", 1.0) != 1.0 or settings.get("reward_shift", 0.0) != 0.0:
        raise DataError(
            f"{checkpoint}: the run learned from scaled rewards, and its replay has no others; "
            "train one without reward_scale and reward_shift"
        )
    loaded = load_checkpoint(checkpoint, components={_REPLAY})
    kept = loaded.segment_range(_REPLAY)
    if kept is None:
        raise CheckpointError(f"{checkpoint} holds no replay, so no medium-replay can be made")
    if kept[0] != 0:
        raise DataError(
            f"{checkpoint}: its first {kept[0]:,} rows were overwritten, so this is not everything "
            "that the run had seen; train one with a larger buffer_capacity"
        )
    pieces = [rows for _, rows in loaded.read_segments(_REPLAY)]
    fields = {name: torch.cat([piece[name][0] for piece in pieces]).numpy() for name in pieces[0]}
    columns: dict[str, Any] = {
        "observations": fields["obs"],
        "actions": spec.scale_action(fields["action"]).astype(np.float32),
        "rewards": fields["reward"],
        "next_observations": fields["next_obs"],
        "terminations": fields["continues"] == 0.0,
        "truncations": fields["truncated"] != 0.0,
    }
    # Rows of a step are side by side; those of one environment have to follow each other.
    count, lanes = len(fields["reward"]), config.num_envs
    order = np.arange(count).reshape(-1, lanes).T.reshape(-1)
    columns = {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}
    stops = np.arange(1, lanes + 1) * (count // lanes) - 1
    columns["truncations"][stops] |= ~columns["terminations"][stops]
    source = f"replay of {config.algo} on {config.env_id} up to step {loaded.step:,}"
    return OfflineDataset(**columns, name="replay", source=source, env_id=config.env_id)


# Scores


def _reference(env_id: str, expert: LoadedAgent) -> ReferenceScores:
    """Return the mean returns of random actions and of the last policy's best actions."""
    rows = 4 * LANES * 1000  # every task ends an episode after 1,000 steps, if not before
    random = _whole_returns(gather(env_id, None, rows, seed=0))[:REFERENCE_EPISODES]
    best = evaluate_agent(expert, REFERENCE_EPISODES, seed=0, deterministic=True)
    scores = ReferenceScores(float(np.mean(random)), best.metrics["eval_return_mean"])
    if not scores.expert > scores.random:
        raise DataError(
            f"the last policy of the run gets {scores.expert:.1f} on {env_id}, no more than random "
            f"actions, {scores.random:.1f}; train it longer"
        )
    return scores


def _whole_returns(dataset: OfflineDataset) -> NDArray[np.float64]:
    """Return the returns of the episodes that were not cut by the end of the recording."""
    lengths = dataset.episode_lengths()
    last = dataset.episode_stops - 1
    whole = dataset.terminations[last] | (lengths == 1000)
    returns = dataset.episode_returns()
    return returns[whole] if whole.any() else returns


def _behaviour(dataset: OfflineDataset) -> float:
    """Return the mean return of the whole episodes."""
    return float(_whole_returns(dataset).mean())


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("mujoco", "gymnasium", "numpy")}
    return found | {"rl_training": __version__}
