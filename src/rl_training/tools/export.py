"""A policy as a file that other programs run: ONNX, or PyTorch's own exported program.

What is exported is the deterministic policy from raw observations to actions in the task's units,
normalisers and scaling inside, with the batch as free dimension.  Nothing leaves here without
having been compared with the original on random observations.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training._version import __version__
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError, DataError, MissingExtraError, SpecMismatch
from rl_training.output_files import written_beside
from rl_training.runtime.workflows import LoadedAgent

Format = Literal["onnx", "torch"]
FORMATS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED_BATCHES = (1, 7, 256)
TOLERANCE = 1e-4
"""Largest difference from the original, as a share of the range of actions."""
FACTS = "rl_training"
"""Key of the description inside an exported file."""

Run = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file, and how far it is from what it was made of."""

    path: Path
    format: str
    largest_difference: float
    checked: int
    """Observations that were compared."""


class Policy(nn.Module):
    """Raw observations `[B, ...]` to actions in the task's units `[B, ...]`."""

    low: Tensor
    high: Tensor

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__()
        # A copy, because what the policy does not use is taken out of it.
        self._agent = agent = replace(agent, learner=copy.deepcopy(agent.learner))
        spec = agent.env_spec
        # Known to the module, weights are parameters of the exported program, not constants.
        for name in agent.learner.network_names:
            self.add_module(name, getattr(agent.learner, name))
        self.bounded = spec.action_low is not None and spec.action_high is not None
        if self.bounded:
            self.register_buffer("low", _bounds(spec, "action_low"))
            self.register_buffer("high", _bounds(spec, "action_high"))

    def forward(self, obs: Tensor) -> Tensor:
        """Choose actions."""
        action = self._agent.learner.act(obs.unsqueeze(0), explore=False).squeeze(0)
        spec = self._agent.env_spec
        if spec.action_kind == "discrete":
            return action + spec.action_start
        dtype = getattr(torch, spec.action_dtype)
        action = action.reshape(-1, *spec.action_shape)
        if not self.bounded:
            return action.to(dtype)
        # In double precision and in two sides, as `ActionMap` does: the bounds come out exactly.
        weight = (action.double() + 1.0) * 0.5
        scaled = (1.0 - weight) * self.low + weight * self.high
        return torch.minimum(torch.maximum(scaled, self.low), self.high).to(dtype)


def _bounds(spec: EnvSpec, name: str) -> Tensor:
    return torch.tensor(getattr(spec, name), dtype=torch.float64).view(spec.action_shape)


def export_agent(agent: LoadedAgent, target: Path, format: str = "onnx") -> Exported:
    """Write an agent's deterministic policy to a file and compare it with the original.

    Args:
        agent: On the CPU.
        target: The file.
        format: `onnx` or `torch`.

    Raises:
        ConfigError: For another format.
        SpecMismatch: When the policy is no function of the observation alone.
        MissingExtraError: When a package of the extra `export` is missing.
        DataError: When the file cannot be written, or does not do what the original does.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format must be {' or '.join(FORMATS)}, got {format!r}")
    require_function(agent)
    policy = Policy(agent).eval()
    write, read = (_write_onnx, _read_onnx) if format == "onnx" else (_write_torch, _read_torch)
    try:
        with written_beside(target, FORMATS[format]) as temporary:
            write(policy, temporary, agent)
            largest, checked = _compare(agent, read(temporary))
    except OSError as error:
        raise DataError(f"{target} cannot be written ({error.strerror or error})") from None
    return Exported(path=target, format=format, largest_difference=largest, checked=checked)


def describe(agent: LoadedAgent) -> dict[str, Any]:
    """Return what a program that runs the file should know, as plain data."""
    spec = agent.env_spec
    return {
        "rl_training": __version__,
        "algo": agent.config.algo,
        "env_id": spec.env_id,
        "step": agent.step,
        "seed": agent.config.seed,
        "obs_shape": list(spec.obs_shape),
        "obs_dtype": str(_obs_dtype(spec)),
        "action_kind": spec.action_kind,
        "action_shape": list(spec.action_shape),
        "num_actions": spec.num_actions,
        "action_low": spec.action_low,
        "action_high": spec.action_high,
    }


def require_function(agent: LoadedAgent) -> None:
    """Refuse a policy that is not a function of the observation alone.

    Raises:
        SpecMismatch: Saying why.
    """
    if agent.learner.initial_acting_state(1) is not None:
        raise SpecMismatch(
            f"{agent.config.algo} cannot be exported: its action depends on what it remembers of "
            "the episode (a plan or a belief), not on the observation alone; act with it in Python "
            "or film it by `rl-training record`"
        )


def _obs_dtype(spec: EnvSpec) -> np.dtype[Any]:
    return np.dtype(np.float32 if len(spec.obs_shape) == 1 else spec.obs_dtype)


def _example(spec: EnvSpec, count: int, seed: int) -> NDArray[Any]:
    """Draw observations: normal ones, or every value of an image."""
    generator = np.random.default_rng(seed)
    shape, dtype = (count, *spec.obs_shape), _obs_dtype(spec)
    if dtype.kind == "f":
        return (2 * generator.standard_normal(shape)).astype(dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (limits.min, limits.max) if limits is not None else (0, 1)
    return generator.integers(low, high, size=shape, endpoint=True).astype(dtype)


def _write_torch(policy: Policy, target: Path, agent: LoadedAgent) -> None:
    facts = json.dumps(describe(agent))
    with _third_party_warnings():
        # To memory first: PyTorch's own writer answers a disk that refuses with a RuntimeError.
        archive = io.BytesIO()
        torch.export.save(_program(policy, agent), archive, extra_files={FACTS: facts})
    target.write_bytes(archive.getbuffer())


def _program(policy: Policy, agent: LoadedAgent) -> torch.export.ExportedProgram:
    """Export the policy with the weights that it uses: critics stay at home."""
    example = torch.from_numpy(_example(agent.env_spec, 3, 0))
    shapes = {"obs": {0: torch.export.Dim("batch")}}
    with torch.no_grad(), _third_party_warnings():
        program = torch.export.export(policy, (example,), dynamic_shapes=shapes)
        signature = program.graph_signature
        weights = signature.inputs_to_parameters
        unused = [
            weights[node.name]
            for node in program.graph.nodes
            if node.op == "placeholder" and node.name in weights and not node.users
        ]
        if not unused:
            return program
        for name in unused:
            owner, _, last = name.rpartition(".")
            setattr(policy.get_submodule(owner), last, None)
        return torch.export.export(policy, (example,), dynamic_shapes=shapes)


def _read_torch(path: Path) -> Run:
    with _third_party_warnings():
        module = torch.export.load(path).module()

    def run(obs: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            action: NDArray[Any] = module(torch.from_numpy(obs)).numpy()
        return action

    return run


def _write_onnx(policy: Policy, target: Path, agent: LoadedAgent) -> None:
    _require("onnx", "onnxscript", "onnxruntime")
    import onnx

    with _third_party_warnings():
        made = torch.onnx.export(
            _program(policy, agent),
            input_names=["obs"],
            output_names=["action"],
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    model = made.model_proto
    entry = model.metadata_props.add()
    entry.key, entry.value = FACTS, json.dumps(describe(agent))
    onnx.save(model, str(target))


def _read_onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(obs: NDArray[Any]) -> NDArray[Any]:
        action: NDArray[Any] = session.run(["action"], {"obs": obs})[0]
        return action

    return run


def _require(*modules: str) -> None:
    try:
        for name in modules:
            importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f'export to onnx needs {error.name}; pip install "rl-training[export]"'
        ) from None


@contextmanager
def _third_party_warnings() -> Iterator[None]:
    """Keep the exporters' own notes from the user, who can do nothing about them."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _compare(agent: LoadedAgent, run: Run) -> tuple[float, int]:
    """Return the largest difference from the original, as a share of the range of actions.

    Raises:
        DataError: When it is above `TOLERANCE`.
    """
    largest = 0.0
    spec = agent.env_spec
    for index, count in enumerate(CHECKED_BATCHES):
        obs = _example(spec, count, index + 1)
        expected, found = agent.predict(obs), run(obs)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise DataError(
                f"the exported policy gives {found.dtype}{list(found.shape)} where the original "
                f"gives {expected.dtype}{list(expected.shape)}"
            )
        difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
        largest = max(largest, float((difference / _width(spec)).max()))
    if largest > TOLERANCE:
        raise DataError(
            f"the exported policy differs from the original by {largest:.2g} of the range of "
            f"actions, more than {TOLERANCE:g}; nothing was written"
        )
    return largest, sum(CHECKED_BATCHES)


def _width(spec: EnvSpec) -> NDArray[np.float64] | float:
    if spec.action_low is None or spec.action_high is None:
        return 1.0
    width = np.array(spec.action_high) - np.array(spec.action_low)
    return np.where(width > 0, width, 1.0).reshape(spec.action_shape)
