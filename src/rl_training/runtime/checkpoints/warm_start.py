"""A new run that starts with the networks of others (`from_checkpoint`), one per member.

`Origin` opens their checkpoints and checks that they fit; `take_over` puts the networks of one
learner into another, part by part, and says what went where.  A part is a network, a learned number
such as the temperature, the statistics of observations, or an optimizer.  Counters and random
numbers are none: a run that starts from a checkpoint is a new run.

Shapes: S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rl_training.algorithms.base import AnyLearner
from rl_training.algorithms.optim import Optimizer
from rl_training.data.normalizer import RunningNorm
from rl_training.envs.spec import EnvSpec
from rl_training.errors import CheckpointError, SpecMismatch
from rl_training.experiment.checkpoint.codec import digest_state
from rl_training.experiment.checkpointing import LoadedCheckpoint, load_single_file, open_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.checkpoints.resume import group_folders, load_group
from rl_training.runtime.checkpoints.saver import ACTING_ONLY, checked, rewards_of
from rl_training.state import copy_tensor, tensors_in
from rl_training.validation import parse

LEARNER = {"learner"}
STRUCTURE = (
    *("hidden_sizes", "actor_hidden_sizes", "critic_hidden_sizes", "encoder", "num_critics"),
    *("use_layer_norm", "dueling", "noisy"),
    *("num_quantiles", "embedding_dim", "head_hidden_sizes"),
    *("model_hidden_sizes", "num_ensembles", "model_learn_terminations"),
)
"""Settings that make the shapes of networks, to be named when those do not fit."""
Keys = tuple[str, ...]
"""What leads to a tensor in a learner's state."""
NO_PARTS = ("rng", "last", "obs_norm")
"""Tensors that are never said to be left behind: statistics that count must fit, see `Origin`."""


class Trained(NamedTuple):
    """A learner that was trained elsewhere, verified."""

    path: Path
    step: int
    header: dict[str, Any]
    states: dict[str, Any]


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
            task.require_same_task(trained, "only a task of the same shapes can continue from it")
        self.report = TakenOver()

    def _open(self) -> list[Trained]:
        """Return a learner per member: the same for all, or those of a group as large."""
        if self.path.is_file():
            return [_from_file(self.path)] * len(self.config.members)
        return [Trained(c.path, c.step, c.header, c.states) for c in self._open_folders()]

    def _open_folders(self) -> list[LoadedCheckpoint]:
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
            self._check_scale(checkpoint, learner)
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
        return f"continue with {algo}, or with a method that has the same networks"

    def _check_observations(self, checkpoint: Trained, learner: AnyLearner) -> None:
        there = any(
            _settings(checkpoint).get(name) for name in ("normalize_observations", "normalize_obs")
        )
        if there != learner.normalizes:
            words = {True: "standardised observations", False: "observations as they are"}
            raise SpecMismatch(
                f"from_checkpoint {checkpoint.path}: its networks saw {words[there]}, but those of "
                f"this run ({self.config.algo}) would see {words[learner.normalizes]}; set "
                "algo_kwargs.normalize_observations to the same value, or continue with "
                f"{checkpoint.header['config']['algo']}"
            )

    def _check_scale(self, checkpoint: Trained, learner: AnyLearner) -> None:
        there = "return_norm" in checkpoint.states["learner"]
        if there != learner.scales_rewards:
            words = {True: "scaled by the running return", False: "as they are"}
            raise SpecMismatch(
                f"from_checkpoint {checkpoint.path}: its rewards were {words[there]}, but those "
                f"of this run would be {words[learner.scales_rewards]}; set "
                "algo_kwargs.normalize_rewards to the same value"
            )

    def _check_rewards(self, checkpoint: Trained, rewards: tuple[float, float]) -> None:
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


def _from_file(path: Path) -> Trained:
    """Read a file that `save` wrote.

    Raises:
        CheckpointError: When it describes no learner.
    """
    saved = load_single_file(path)
    if ACTING_ONLY in saved.header:
        raise CheckpointError(
            f"{path} holds what acting needs alone, so no training can begin with its networks; "
            "train again with the configuration beside it"
        )
    try:
        parse(TrainConfig, saved.header["config"])
        return Trained(path, int(saved.header["step"]), saved.header, saved.states)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe an agent ({error})") from None


def _task_of(checkpoint: Trained) -> EnvSpec:
    try:
        return EnvSpec.model_validate(checkpoint.header["env_spec"])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"from_checkpoint {checkpoint.path}: its description cannot be used ({error})"
        ) from None


def _map_text(rewards: Sequence[float]) -> str:
    return f"x {rewards[0]:g}" + (f" {rewards[1]:+g}" if rewards[1] else "")


def _settings(checkpoint: Trained) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = checkpoint.header["config"]["algo_kwargs"]
    return settings


@dataclass(frozen=True)
class TakenOver:
    """Names of the parts."""

    taken: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    """Parts of the new learner that the other one has not, or not of that shape (optimizers)."""
    left: list[str] = field(default_factory=list)
    """Parts of the other learner that the new one has no use for."""

    def __str__(self) -> str:
        lines = [f"{', '.join(self.taken)} taken over"]
        lines += [f"{', '.join(self.fresh)} starting fresh"] if self.fresh else []
        lines += [f"{', '.join(self.left)} left behind"] if self.left else []
        return "; ".join(lines)


def take_over(learner: AnyLearner, states: Sequence[Mapping[str, Any]]) -> TakenOver:
    """Copy what a learner has in common with the states of others, one per seed.

    Nothing is changed unless everything fits.

    Raises:
        SpecMismatch: When a network of the same name has another shape, or none is in common.
    """
    ours, theirs = _parts(learner), [tensors_in(state) for state in states]
    known = {_part_of(path) for path in theirs[0]}
    report = TakenOver()
    moved: set[int] = set()
    for name, tensors in ours.items():
        if name in known and _fits(name, tensors, theirs):
            report.taken.append(name)
            moved |= {id(tensor) for tensor in tensors.values()}
        else:
            report.fresh.append(name)
    for name, optimizer in _optimizers(learner).items():
        fits = {id(p) for p in optimizer.parameters} <= moved
        fits = fits and _same_shapes(tensors_in({name: optimizer.state_dict()}), theirs)
        (report.taken if fits else report.fresh).append(name)
    _require_networks(learner, report)
    _copy(learner, report.taken, theirs)
    others = known - ours.keys() - _optimizers(learner).keys() - set(NO_PARTS)
    report.left.extend(sorted(others))
    return report


def _parts(learner: AnyLearner) -> dict[str, dict[Keys, Tensor]]:
    """Return the tensors of networks, learned numbers and statistics, by the name of the part."""
    found: dict[str, dict[Keys, Tensor]] = {}
    for name, value in vars(learner).items():
        if isinstance(value, nn.Module):
            # Past `named_parameters`, whose tensors are those that optimizers hold.
            tensors = dict(value.named_parameters()) | dict(value.named_buffers())
            for key, tensor in tensors.items():
                found.setdefault(_part_of((name, key)), {})[name, key] = tensor
        elif isinstance(value, nn.Parameter):
            found[name] = {(name,): value}
        elif isinstance(value, RunningNorm) and (learner.normalizes or name == "return_norm"):
            found[name] = tensors_in({name: value.state_dict()})
    return found


def _part_of(path: Keys) -> str:
    """Name the part a tensor belongs to: networks of a model by themselves, others as a whole."""
    return path[1].split(".")[0] if path[0] == "model" else path[0]


def _optimizers(learner: AnyLearner) -> dict[str, Optimizer]:
    return {name: value for name, value in vars(learner).items() if isinstance(value, Optimizer)}


def _same_shapes(tensors: Mapping[Keys, Tensor], theirs: Sequence[Mapping[Keys, Tensor]]) -> bool:
    """Whether the others have these tensors, of one seed each."""
    return all(
        path in other and other[path].shape[1:] == tensor.shape[1:]
        for path, tensor in tensors.items()
        for other in theirs
    )


def _fits(
    name: str, tensors: Mapping[Keys, Tensor], theirs: Sequence[Mapping[Keys, Tensor]]
) -> bool:
    """Whether a part can be taken; a network of the same name must fit."""
    there = {path: tensor for path, tensor in theirs[0].items() if _part_of(path) == name}
    if there.keys() == tensors.keys() and _same_shapes(tensors, theirs):
        return True
    for path in {**tensors, **there}:
        left, right = _shape_text(there.get(path)), _shape_text(tensors.get(path))
        if left != right:
            raise SpecMismatch(
                f"its {name} does not fit: {path[-1]} is {left} there and {right} here"
            )
    return False


def _shape_text(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape[1:]))


def _require_networks(learner: AnyLearner, report: TakenOver) -> None:
    networks = {
        _part_of((name, key)) for name in learner.network_names for key in _keys(learner, name)
    }
    if not networks & set(report.taken):
        raise SpecMismatch(
            f"it has no network in common with {type(learner).__name__}, which has "
            f"{', '.join(sorted(networks))}"
        )


def _keys(learner: AnyLearner, network: str) -> list[str]:
    return list(getattr(learner, network).state_dict())


def _copy(
    learner: AnyLearner, taken: Sequence[str], theirs: Sequence[Mapping[Keys, Tensor]]
) -> None:
    """Copy in place the tensors of the parts named."""
    for path, target in tensors_in(learner.state_dict()).items():
        if _part_of(path) in taken:
            sources = [other[path] for other in theirs]
            stacked = torch.cat(sources) if target.ndim else sources[0]
            copy_tensor(target, stacked, ".".join(path))
