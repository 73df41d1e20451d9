"""The checkpoints whose networks a new run starts with (`from_checkpoint`), one per member."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_training.algorithms.base import AnyLearner
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, SpecMismatch
from rl_training.experiment.checkpoint.tree import digest_state
from rl_training.experiment.checkpointing import LoadedCheckpoint, open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.groups import group_folders, load_group
from rl_training.runtime.headers import checked
from rl_training.runtime.saving import rewards_of
from rl_training.runtime.takeover import TakenOver, take_over

LEARNER = {"learner"}
STRUCTURE = (
    *("hidden_sizes", "num_critics", "use_layer_norm", "dueling", "noisy"),
    *("num_quantiles", "embedding_dim", "head_hidden_sizes"),
    *("model_hidden_sizes", "num_ensembles", "model_learn_terminations"),
)
"""Settings that make the shapes of networks, to be named when those do not fit."""


class Origin:
    """Verified checkpoints of other runs, and what was taken out of them."""

    def __init__(self, config: TrainConfig, task: EnvSpec) -> None:
        """Read the learners that `config.from_checkpoint` names; nothing else of them is used.

        Raises:
            CheckpointError: When there is none that is whole, or not one for every member.
            SpecMismatch: When it was trained on a task of other shapes.
        """
        assert config.from_checkpoint is not None
        self.config, self.messages = config, list[str]()
        self.path = Path(config.from_checkpoint)
        self.loaded = self._open()
        for checkpoint in self.loaded:
            trained = _task_of(checkpoint)
            task.require_same_task(trained, "only a task of the same shapes can go on from it")
        self.report = TakenOver()

    def _open(self) -> list[LoadedCheckpoint]:
        """Return a checkpoint per member: the same for all, or those of a group as large."""
        if self.path.is_file():
            raise CheckpointError(
                f"from_checkpoint {self.path} is a file; give a run folder or one of its "
                "checkpoint folders"
            )
        members, folders = self.config.members, group_folders(self.path)
        if not folders:
            found = open_checkpoint(self.path, components=LEARNER, warn=self.messages.append)
            one = checked(found)
            return [one] * len(members)
        _, loaded = load_group(self.path, folders, self.messages.append, LEARNER)
        if len(loaded) != len(members):
            raise CheckpointError(
                f"from_checkpoint {self.path} holds {len(loaded)} members, but this run has "
                f"{len(members)}; train as many seeds, or give one of "
                f"{', '.join(folder.name for folder in folders)} for all"
            )
        by_seed = {checkpoint.header["seed"]: checkpoint for checkpoint in loaded}
        seeds = self.config.all_seeds
        if len(by_seed) == len(loaded) and by_seed.keys() == set(seeds):
            return [by_seed[seed] for seed in seeds]
        return loaded

    def take_over(self, learner: AnyLearner, parts: Mapping[str, Any]) -> list[str]:
        """Put the networks into `learner`; returns what there is to say about it.

        Args:
            learner: Of the new run.
            parts: All parts of the new run: its replay says what is done to rewards.

        Raises:
            SpecMismatch: When networks, observations or rewards do not fit; nothing is changed.
        """
        first, rewards = self.loaded[0], rewards_of(parts)
        for checkpoint in self.loaded:
            self._check_observations(checkpoint, learner)
            self._check_rewards(checkpoint, rewards)
        try:
            states = [checkpoint.states["learner"] for checkpoint in self.loaded]
            self.report = take_over(learner, states)
        except SpecMismatch as error:
            raise SpecMismatch(f"from_checkpoint {first.path}: {error}; {self._advice()}") from None
        algo = first.header["config"]["algo"]
        line = f"from {self.path} ({algo}, step {first.step:,}): {self.report}"
        return [line, *self.messages]

    def _advice(self) -> str:
        """Name the settings that differ, or say that the method does."""
        there, here = _settings(self.loaded[0]), self.config.resolved()["algo_kwargs"]
        unlike = [
            f"algo_kwargs.{name}={there[name]}"
            for name in STRUCTURE
            if name in there and name in here and there[name] != here[name]
        ]
        if unlike:
            return f"use its settings: {', '.join(unlike)}"
        algo = self.loaded[0].header["config"]["algo"]
        return f"go on with {algo}, or with a method that has the same networks"

    def _check_observations(self, checkpoint: LoadedCheckpoint, learner: AnyLearner) -> None:
        there = any(
            _settings(checkpoint).get(name) for name in ("normalize_observations", "normalize_obs")
        )
        if there != learner.normalizes:
            words = {True: "standardised observations", False: "observations as they are"}
            raise SpecMismatch(
                f"from_checkpoint {checkpoint.path}: its networks saw {words[there]}, but those of "
                f"this run ({self.config.algo}) would see {words[learner.normalizes]}; set "
                f"normalize_observations alike, or go on with {checkpoint.header['config']['algo']}"
            )

    def _check_rewards(self, checkpoint: LoadedCheckpoint, rewards: tuple[float, float]) -> None:
        given = _settings(checkpoint)
        known = (given.get("reward_scale", 1.0), given.get("reward_shift", 0.0))
        there = checkpoint.header.get("rewards", known)
        # The factor of normalize_rewards is found in the data, so it may be rounded otherwise.
        pairs = zip(there, rewards, strict=True)
        if not all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in pairs):
            raise SpecMismatch(
                f"from_checkpoint {checkpoint.path}: its critics learned from rewards "
                f"{_map_text(there)}, but this run would learn from rewards {_map_text(rewards)}; "
                f"give it algo_kwargs.reward_scale={there[0]:.6g} and "
                f"algo_kwargs.reward_shift={there[1]:.6g}"
            )

    def records(self) -> list[dict[str, Any]]:
        """Say for each member where its parameters came from, for its checkpoints."""
        digests = {id(c): digest_state(c.states["learner"]) for c in self.loaded}
        return [
            {
                "path": str(checkpoint.path),
                "algo": checkpoint.header["config"]["algo"],
                "env_id": checkpoint.header["config"]["env_id"],
                "seed": checkpoint.header["seed"],
                "step": checkpoint.step,
                "learner_sha256": digests[id(checkpoint)],
                "taken": self.report.taken,
                "fresh": self.report.fresh,
                "left": self.report.left,
            }
            for checkpoint in self.loaded
        ]


def _task_of(checkpoint: LoadedCheckpoint) -> EnvSpec:
    try:
        return EnvSpec.model_validate(checkpoint.header["env_spec"])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"from_checkpoint {checkpoint.path}: its description cannot be used ({error})"
        ) from None


def _map_text(rewards: Sequence[float]) -> str:
    return f"x {rewards[0]:g}" + (f" {rewards[1]:+g}" if rewards[1] else "")


def _settings(checkpoint: LoadedCheckpoint) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = checkpoint.header["config"]["algo_kwargs"]
    return settings
