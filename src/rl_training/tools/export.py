"""A policy as a file that other programs run: ONNX, or PyTorch's own exported program.

What is exported is the deterministic policy from raw observations to actions in the task's units,
normalisers and scaling inside, with the batch as free dimension.  A method that remembers something
(a plan, a belief) becomes a program that takes its state and gives the next one.  Nothing leaves
here without having been compared with the original on random observations.
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
from rl_training.models.rows import join
from rl_training.output_files import written_beside
from rl_training.rng import Rng
from rl_training.runtime.workflows import LoadedAgent

Format = Literal["onnx", "torch"]
FORMATS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED_BATCHES = (1, 7, 256)
TOLERANCE = 1e-4
"""Largest difference from the original, as a share of the range of actions."""
FACTS = "rl_training"
"""Key of the description inside an exported file."""

CHECKED_STEPS = 5
"""Steps of an episode on which a program with a state is compared."""
DRAWS = "draws"
"""Entry of a state that counts the random draws so far."""

Arrays = dict[str, NDArray[Any]]
Observation = Tensor | dict[str, Tensor]
"""A batch as the task gives it; parts by name where there are several."""
Run = Callable[[NDArray[Any] | Arrays, Arrays], tuple[NDArray[Any], Arrays]]
"""An observation and a state to an action and the next state; a function has an empty one."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file, and how far it is from what it was made of."""

    path: Path
    format: str
    largest_difference: float
    checked: int
    """Observations that were compared."""


class _Exportable(nn.Module):
    """What acts, as a module without the axis of seeds, on a copy of the learner."""

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

    def rows(self, obs: Observation) -> Tensor:
        """Return observations as the learner takes them, `[1, B, ...]`."""
        parts = self._agent.env_spec.observation
        if isinstance(obs, Tensor):
            return obs.unsqueeze(0)
        assert parts is not None
        return join(parts, obs).unsqueeze(0)

    def in_units(self, action: Tensor) -> Tensor:
        """Return a learner's actions `[B, ...]` in the units of the task."""
        spec = self._agent.env_spec
        if spec.action_kind == "discrete":
            return action + spec.action_start
        dtype = getattr(torch, spec.action_dtype)
        if spec.actions_are_counted:
            action = action + torch.tensor(spec.action_starts)
            return action.to(dtype).reshape(-1, *spec.action_shape)
        action = action.reshape(-1, *spec.action_shape)
        if not self.bounded:
            return action.to(dtype)
        # In double precision and in two sides, as `ActionMap` does: the bounds come out exactly.
        weight = (action.double() + 1.0) * 0.5
        scaled = (1.0 - weight) * self.low + weight * self.high
        return torch.minimum(torch.maximum(scaled, self.low), self.high).to(dtype)


class Policy(_Exportable):
    """Raw observations `[B, ...]` to actions in the task's units `[B, ...]`.

    Observations of several parts are a mapping of the parts by name, each as the task gives it.
    """

    def forward(self, obs: Observation) -> Tensor:
        """Choose actions."""
        return self.in_units(self._agent.learner.act(self.rows(obs)).squeeze(0))


class StatefulPolicy(_Exportable):
    """Observations and a state to actions and the next state, each `[B, ...]`.

    A state is what the learner's acting state holds, zero at the start of an episode, and, where
    acting draws, the number of random draws so far, from which the program draws by itself.
    """

    keys: Tensor

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__(agent)
        start = self._agent.learner.initial_acting_state(1)
        assert start is not None
        self._start = start
        parts = vars(start).items()
        self._rng_name = next((name for name, value in parts if isinstance(value, Rng)), None)
        self._tensors = [name for name, value in parts if isinstance(value, Tensor)]
        self.names = self._tensors if self._rng_name is None else [DRAWS, *self._tensors]
        """Of the parts of a state."""
        if self._rng_name is not None:
            self.register_buffer("keys", getattr(start, self._rng_name).keys)

    @property
    def free_batch(self) -> bool:
        """Whether any number of environments can be acted in; parts compiled by shape need one."""
        return not self._agent.learner.acting_parts(1)

    def initial(self, batch: int) -> dict[str, Tensor]:
        """Return the state at the start of episodes."""
        state = self._agent.learner.initial_acting_state(batch)
        draws = {} if self._rng_name is None else {DRAWS: torch.zeros((), dtype=torch.int64)}
        return draws | {name: getattr(state, name).squeeze(0) for name in self._tensors}

    def forward(
        self, obs: Observation, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose actions and move the state on."""
        acting, draws = copy.copy(self._start), {}
        if self._rng_name is not None:
            rng: Rng = copy.copy(getattr(self._start, self._rng_name))
            rng.as_tensors, rng.keys, rng.counter = True, self.keys, state[DRAWS].clone()
            setattr(acting, self._rng_name, rng)
        for name in self._tensors:
            setattr(acting, name, state[name].unsqueeze(0).clone())
        action = self._agent.learner.act_from(acting, self.rows(obs)).squeeze(0)
        if self._rng_name is not None:
            draws = {DRAWS: rng.counter}
        after = {name: getattr(acting, name).squeeze(0) for name in self._tensors}
        return self.in_units(action), draws | after


def _bounds(spec: EnvSpec, name: str) -> Tensor:
    return torch.tensor(getattr(spec, name), dtype=torch.float64).view(spec.action_shape)


def exportable(agent: LoadedAgent) -> Policy | StatefulPolicy:
    """Return an agent as the module that is exported."""
    remembers = agent.learner.initial_acting_state(1) is not None
    return (StatefulPolicy(agent) if remembers else Policy(agent)).eval()


def export_agent(agent: LoadedAgent, target: Path, format: str = "onnx") -> Exported:
    """Write an agent's deterministic policy to a file and compare it with the original.

    Args:
        agent: On the CPU.
        target: The file.
        format: `onnx` or `torch`.

    Raises:
        ConfigError: For another format.
        SpecMismatch: When the format cannot hold what the method does.
        MissingExtraError: When a package of the extra `export` is missing.
        DataError: When the file cannot be written, or does not do what the original does.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format must be {' or '.join(FORMATS)}, got {format!r}")
    policy = exportable(agent)
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
    facts = {
        "rl_training": __version__,
        "algo": agent.config.algo,
        "env_id": spec.env_id,
        "step": agent.step,
        "seed": agent.config.seed,
        "obs_shape": list(spec.obs_shape),
        "obs_dtype": str(spec.learner_dtype),
        "obs_parts": _parts_of(spec),
        "action_kind": spec.action_kind,
        "action_shape": list(spec.action_shape),
        "num_actions": spec.num_actions,
        "action_sizes": list(spec.action_sizes),
        "action_low": spec.action_low,
        "action_high": spec.action_high,
    }
    policy = exportable(agent)
    if isinstance(policy, StatefulPolicy):
        facts["batch"] = None if policy.free_batch else 1
        facts["state"] = {
            name: {"shape": list(part.shape[1:]), "dtype": str(part.dtype).removeprefix("torch.")}
            for name, part in policy.initial(1).items()
        }
    return facts


def _parts_of(spec: EnvSpec) -> dict[str, Any] | None:
    """Describe the inputs of a program whose observations have several parts."""
    if spec.observation is None:
        return None
    return {
        leaf.name: {"shape": list(leaf.shape), "dtype": leaf.dtype}
        for leaf in spec.observation.leaves
    }


def require_function(agent: LoadedAgent) -> None:
    """Refuse a policy that is not a function of the observation alone.

    Raises:
        SpecMismatch: Saying why.
    """
    if agent.learner.initial_acting_state(1) is not None:
        raise SpecMismatch(
            f"{agent.config.algo} has no policy module: its action depends on what it remembers of "
            "the episode (a plan, a belief or a memory), not on the observation alone; use predict "
            "with initial_state(), or export it as a program with a state"
        )


def _examples(spec: EnvSpec, count: int, seed: int) -> NDArray[Any] | Arrays:
    """Draw observations as a program takes them."""
    if spec.observation is None:
        return spec.example_observations(count, seed)
    return spec.observation.examples(count, np.random.default_rng(seed))


def _predicted(agent: LoadedAgent, obs: NDArray[Any] | Arrays) -> NDArray[Any]:
    parts = agent.env_spec.observation
    return agent.predict(parts.nested(obs) if isinstance(obs, dict) and parts else obs)


def _tensors(obs: NDArray[Any] | Arrays) -> Observation:
    if isinstance(obs, dict):
        return {name: torch.from_numpy(part) for name, part in obs.items()}
    return torch.from_numpy(obs)


def _inputs(obs: NDArray[Any] | Arrays) -> Arrays:
    """Return the inputs of an ONNX program by name."""
    if isinstance(obs, dict):
        return {f"obs/{name}": part for name, part in obs.items()}
    return {"obs": obs}


def _write_torch(policy: Policy | StatefulPolicy, target: Path, agent: LoadedAgent) -> None:
    facts = json.dumps(describe(agent))
    with _third_party_warnings():
        # To memory first: PyTorch's own writer answers a disk that refuses with a RuntimeError.
        archive = io.BytesIO()
        torch.export.save(_program(policy, agent), archive, extra_files={FACTS: facts})
    target.write_bytes(archive.getbuffer())


def _program(policy: Policy | StatefulPolicy, agent: LoadedAgent) -> torch.export.ExportedProgram:
    """Export the policy with the weights that it uses: critics stay at home."""
    batch = torch.export.Dim("batch")
    count = 3
    leaves, first = agent.env_spec.observation, {0: batch}
    shapes: dict[str, Any] = {"obs": dict.fromkeys(leaves.names(), first) if leaves else first}
    arguments: tuple[Any, ...] = ()
    if isinstance(policy, StatefulPolicy):
        count = 3 if policy.free_batch else 1
        start = policy.initial(count)
        arguments = (start,)
        parts = {name: {0: batch} if part.ndim else {} for name, part in start.items()}
        shapes |= {"state": parts}
    given = (_tensors(_examples(agent.env_spec, count, 0)), *arguments)
    dynamic = None if count == 1 else shapes

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(policy, given, dynamic_shapes=dynamic)

    with torch.no_grad(), _third_party_warnings():
        program = export()
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
        return export()


def _read_torch(path: Path) -> Run:
    with _third_party_warnings():
        module = torch.export.load(path).module()

    def run(obs: NDArray[Any] | Arrays, state: Arrays) -> tuple[NDArray[Any], Arrays]:
        tensors = {name: torch.from_numpy(part) for name, part in state.items()}
        with torch.no_grad():
            given = _tensors(obs)
            action, after = module(given, tensors) if state else (module(given), {})
        return action.numpy(), {name: part.numpy() for name, part in after.items()}

    return run


def _write_onnx(policy: Policy | StatefulPolicy, target: Path, agent: LoadedAgent) -> None:
    _require("onnx", "onnxscript", "onnxruntime")
    import onnx

    names = policy.names if isinstance(policy, StatefulPolicy) else []
    inputs = _inputs(_examples(agent.env_spec, 1, 0))
    with _third_party_warnings():
        program = _program(policy, agent)
        table = torch.export.default_decompositions()
        table[torch.ops.aten.erfinv.default] = erfinv  # which ONNX does not have
        made = torch.onnx.export(
            program.run_decompositions(table) if names else program,
            input_names=[*inputs, *(f"state_{name}" for name in names)],
            output_names=["action", *(f"next_{name}" for name in names)],
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

    def run(obs: NDArray[Any] | Arrays, state: Arrays) -> tuple[NDArray[Any], Arrays]:
        given = _inputs(obs) | {f"state_{name}": part for name, part in state.items()}
        action, *after = session.run(["action", *(f"next_{name}" for name in state)], given)
        return action, dict(zip(state, after, strict=True))

    return run


CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def erfinv(x: Tensor) -> Tensor:
    """Inverse error function by polynomials, right to a rounding of float32 (Giles, 2012).

    "Approximating the erfinv function", GPU Computing Gems, with its single-precision table.
    """
    wide = x.double()
    w = -torch.log((1 - wide) * (1 + wide))
    centre = _polynomial(CENTRE, w - 2.5)
    tail = _polynomial(TAIL, w.clamp(min=5.0).sqrt() - 3.0)
    return (wide * torch.where(w < 5.0, centre, tail)).to(x.dtype)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's scheme, the highest power first."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


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
    """Return the largest difference from the original, and of how many observations.

    Of actions it is a share of their range; entries of a state count like actions of range 1.

    Raises:
        DataError: When it is above `TOLERANCE`.
    """
    original = exportable(agent)
    if isinstance(original, StatefulPolicy):
        batches = CHECKED_BATCHES[:2] if original.free_batch else (1,)
        found = [_compare_episode(original, agent.env_spec, count, run) for count in batches]
        largest, checked = max(found), sum(batches) * CHECKED_STEPS
    else:
        largest, checked = 0.0, sum(CHECKED_BATCHES)
        for index, count in enumerate(CHECKED_BATCHES):
            obs = _examples(agent.env_spec, count, index + 1)
            action, _ = run(obs, {})
            largest = max(largest, _difference(agent.env_spec, _predicted(agent, obs), action))
    if not largest <= TOLERANCE:
        raise DataError(
            f"the exported policy differs from the original by {largest:.2g} of the range of "
            f"actions, more than {TOLERANCE:g}; nothing was written"
        )
    return largest, checked


def _compare_episode(original: StatefulPolicy, spec: EnvSpec, count: int, run: Run) -> float:
    """Return the largest difference over a few steps, each from the original's own state."""
    largest, state = 0.0, original.initial(count)
    for step in range(CHECKED_STEPS):
        obs = _examples(spec, count, step + 1)
        action, after = run(obs, {name: part.numpy() for name, part in state.items()})
        with torch.no_grad():
            expected, state = original(_tensors(obs), state)
        largest = max(largest, _difference(spec, expected.numpy(), action))
        for name, part in state.items():
            apart = np.abs(after[name].astype(np.float64) - part.double().numpy())
            largest = max(largest, float(apart.max(initial=0.0)))
    return largest


def _difference(spec: EnvSpec, expected: NDArray[Any], found: NDArray[Any]) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise DataError(
            f"the exported policy gives {found.dtype}{list(found.shape)} where the original "
            f"gives {expected.dtype}{list(expected.shape)}"
        )
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return float((difference / _width(spec)).max())


def _width(spec: EnvSpec) -> NDArray[np.float64] | float:
    if spec.action_low is None or spec.action_high is None:
        return 1.0
    width = np.array(spec.action_high) - np.array(spec.action_low)
    return np.where(width > 0, width, 1.0).reshape(spec.action_shape)
