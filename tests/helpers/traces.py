"""What the run and its compiling process must agree on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rl_training.algorithms.base import AnyLearner
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.compile.cache import Request
from rl_training.runtime.compile.programs import count_of_phase, counted, example_arguments
from rl_training.runtime.compile.trace import Source, owned_tensors, trace


def request_of(
    config: TrainConfig, env: EnvSpec, replay: ReplayBuffer, programs: tuple[str, ...]
) -> Request:
    """What a run asks of its compiling process."""
    assert replay.data_shape is not None
    return Request(
        config=config.resolved(),
        env_spec=env.model_dump(mode="json"),
        device="cpu",
        threads=1,
        precision="fp32",
        programs=programs,
        data=asdict(replay.data_shape),
    )


def traced(learner: AnyLearner, source: Source, env: EnvSpec) -> tuple[Any, ...]:
    """Code of a program, and the layouts of all that goes in."""
    with counted(learner, count_of_phase(learner, source.name)):
        made = trace(source, example_arguments(source, learner, env, 1))
    owned = owned_tensors(source.owners)
    shapes = [(path, owned[path].shape, owned[path].stride()) for path in made.inputs]
    values = [n.meta["val"] for n in made.graph.graph.nodes if n.op == "placeholder"]
    layouts = [(v.shape, v.stride(), v.dtype) for v in values]
    return made.graph.code, shapes, layouts, made.arguments
