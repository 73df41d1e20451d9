"""The compiling process: `python -m rl_training.runtime.compile.worker FOLDER`.

Builds the learner of the request in the folder, traces its programs and writes them there.  Rows of
replay and datasets are zeros that take no memory: a program depends on their shapes alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from rl_training.algorithms.base import AnyLearner, OnPolicyLearner
from rl_training.algorithms.dynamics.imagination import imagination_of
from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.own_encoders import import_encoder_of
from rl_training.algorithms.sources import OfflineSettings, replay_settings
from rl_training.algorithms.spec import Loop
from rl_training.data.datasets.blank import BlankRows, DatasetShape
from rl_training.data.replay.storage import ReplayBuffer
from rl_training.envs.spec import EnvSpec
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.registry import get_algorithm_spec, import_plugin
from rl_training.models.layers import set_precision
from rl_training.runtime.compile.cache import Request, load_library, write_library
from rl_training.runtime.compile.programs import (
    count_of_phase,
    counted,
    example_arguments,
    replay_sources,
    rollout_sources,
)
from rl_training.runtime.compile.trace import CompileError, Source, trace
from rl_training.runtime.phases.imagination import synthetic_buffer
from rl_training.runtime.replay import dataset_buffer, load_buffer, make_replay


def build(request: Request) -> tuple[AnyLearner, EnvSpec, TrainConfig, dict[str, Source]]:
    """Build the learner of a request and what is to be compiled of it."""
    import_plugin(request.config["algo"])
    config = TrainConfig(**request.config)
    import_encoder_of(config.algo_config)
    env = EnvSpec.model_validate(request.env_spec)
    spec = get_algorithm_spec(config.algo)
    learner = spec.build(
        env,
        config.algo_config,
        config.all_seeds,
        request.device,
        config.varied,
        config.env_kwargs,
        may_import=True,
    )
    set_precision(learner, request.precision)
    settings = replay_settings(config.algo_config)
    if spec.loop is Loop.ON_POLICY:
        assert isinstance(learner, OnPolicyLearner)
        if isinstance(learner, GAIL):
            learner.attach(load_buffer(learner, env)[0])
        return learner, env, config, rollout_sources(learner, config.num_envs)
    data = None if request.data is None else DatasetShape.from_record(request.data)
    rows = None if data is None else BlankRows(data)
    if settings is None:
        assert rows is not None
        steps = learner.part(OfflineSettings).n_step
        buffer = dataset_buffer(rows, learner, n_step=steps, mapped=rows.shape.mapped)
        batches = with_imagined(learner, buffer)
        return learner, env, config, replay_sources(learner, batches, list(spec.metrics))
    kwargs = config.env_kwargs
    replay = make_replay(
        settings, env, config.num_envs, learner, rows, env_kwargs=kwargs, try_task=False
    )
    replay.set_inserted(replay.capacity)  # rows of zeros, to trace with
    batches = with_imagined(learner, replay)
    return learner, env, config, replay_sources(learner, batches, list(spec.metrics))


def with_imagined(learner: AnyLearner, real: ReplayBuffer) -> ReplayBuffer:
    """Return what batches are drawn from: the real rows, or a full buffer that mixes them."""
    imagination = imagination_of(learner)
    if imagination is None:
        return real
    buffer = synthetic_buffer(imagination, real)
    buffer.set_inserted(buffer.capacity)
    return buffer


def compile_programs(folder: Path) -> None:
    """Compile what the request in `folder` asks for."""
    data = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    request = Request(**data | {"programs": tuple(data["programs"])})
    torch.set_num_threads(request.threads)
    learner, env, config, sources = build(request)
    for name in request.programs:
        source = sources[name]
        arguments = example_arguments(source, learner, env, config.num_envs)
        with counted(learner, count_of_phase(learner, name)):
            made = trace(source, arguments)
        write_library(made, source, folder / name)
        # A library that crashes does so here, not in the run.
        load_library(source, folder / name)(*arguments)


if __name__ == "__main__":
    try:
        compile_programs(Path(sys.argv[1]))
    except CompileError as error:
        sys.exit(str(error))  # its last line is what the run says
