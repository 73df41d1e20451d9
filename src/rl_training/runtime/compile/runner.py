"""How updates run: eagerly, compiled as a whole, or captured in CUDA graphs.

The only place that knows.  A loop asks a runner to act and to update; the runner begins eagerly
and, from an update on that depends on nothing but the settings, uses compiled programs instead.
Because that update is fixed, a run cut and resumed, or run twice, makes the change at the same
point and ends in the same bits.  Before its first use a program is compared with the eager function
on the same inputs; when they differ the run says so and stays eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.algorithms.base import (
    ActingState,
    AnyLearner,
    Metrics,
    OnPolicyLearner,
    Remembered,
    UpdateResult,
    replay_step,
)
from rl_training.algorithms.dynamics.fit import DynamicsTrainer
from rl_training.algorithms.dynamics.imagination import Imagination
from rl_training.algorithms.optim import Optimizer
from rl_training.algorithms.sources import replay_settings, rows_per_update, steps_per_update
from rl_training.data.datasets.blank import DatasetShape
from rl_training.data.replay.storage import ReplayBuffer, StepArrays
from rl_training.envs.spec import EnvSpec
from rl_training.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.models.layers import fused_networks
from rl_training.runtime.compile.cache import (
    CompileError,
    CompileJob,
    Program,
    Request,
    as_traced,
    compile_here,
    has_bf16,
)
from rl_training.runtime.compile.cuda_graph import (
    CapturedCall,
    CapturedPass,
    CapturedPolicy,
    CapturedUpdates,
)
from rl_training.runtime.compile.equivalence import Undo, compare, effect_of_rounding
from rl_training.runtime.compile.programs import (
    ACTING_PART,
    MASKED_MODEL_STEP,
    MODEL_STEP,
    MODEL_STEPS,
    count_of_phase,
    counted,
    example_arguments,
    model_batch_shape,
    model_sources,
    replay_sources,
    rollout_sources,
    sampling,
    update_name,
)
from rl_training.runtime.compile.trace import (
    Source,
    trace,
)
from rl_training.runtime.recorder import MetricRecorder
from rl_training.state import Counter, require_same_keys
from rl_training.transfer import HostCopy

EAGER_SECONDS = 30.0
"""How long, by estimate, an `auto` run on a CPU stays eager, while its programs are compiled in
another process. On an accelerator that process would need it too, and eager updates are so slow
that to compile first is the shorter way."""
WORTH_SECONDS = 120.0
"""How long, by estimate, an `auto` run must take to be compiled at all."""
TOLERANCE = {"fp32": 0.02, "tf32": 0.05, "bf16": 0.15}
"""Largest difference of a change made by a program, relative to the change itself."""
ROUNDING = {"fp32": 2.0**-22, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative error of a product's factors."""


LARGE = 4_000
"""Operations above which a CUDA graph is captured of the trace itself: to compile so many takes
many minutes, and most of what it gains is gained by the capture already."""

UNDECIDED, COMPILED, EAGER = 0, 1, 2


class Accelerator:
    """Compiles the functions of a run when that is due, and remembers why not."""

    def __init__(
        self,
        config: TrainConfig,
        env: EnvSpec,
        learner: AnyLearner,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.env, self.learner, self._say = config, env, learner, say
        self.mode = choose_mode(config, learner.device)
        self._job: CompileJob | None = None
        self._failed = self.mode == "off"
        self._decision = Counter(UNDECIDED)

    @property
    def captures(self) -> bool:
        """Whether programs are captured in CUDA graphs."""
        return self.mode == "graph" or (self.mode == "auto" and self.learner.device.type == "cuda")

    def first_update(
        self, planned: int, gradient_steps: int, batch_size: int, acting: float = 0.0
    ) -> float:
        """Return the number of the update from which programs are used; infinity is never.

        Args:
            planned: Updates of the whole run.
            gradient_steps: Gradient steps per update.
            batch_size: Rows per gradient step and seed.
            acting: Seconds of acting per update, by estimate.
        """
        on_cpu = self.learner.device.type == "cpu"
        if self.config.precision == "bf16" and on_cpu and not has_bf16():
            self._say("precision bf16 is slow here: the processor has no instructions for it")
        if self._failed:
            return math.inf
        if self.mode != "auto":
            return 0
        if on_cpu and not self.learner.config.compiles_on_cpu:
            return math.inf
        seconds = acting + gradient_steps * estimate_seconds(self.learner, batch_size)
        if planned * seconds < WORTH_SECONDS:
            return math.inf
        return math.ceil(EAGER_SECONDS / seconds) if on_cpu else 0

    def prepare(self, sources: Sequence[Source], data: DatasetShape | None = None) -> None:
        """Begin to compile in another process, where that is possible.

        Args:
            sources: What to compile.
            data: The dataset that the learner learns from, if there is one.
        """
        if self._failed or self.learner.device.type != "cpu":
            return
        request = Request(
            config=self.config.resolved(),
            env_spec=self.env.model_dump(mode="json"),
            device=self.learner.device.type,
            threads=torch.get_num_threads(),
            precision=self.config.precision,
            programs=tuple(source.name for source in sources),
            data=None if data is None else asdict(data),
        )
        try:
            self._job = CompileJob(request)
        except (CompileError, OSError) as error:
            self._give_up(str(error))

    def programs(self, sources: Sequence[Source]) -> dict[str, Program]:
        """Return checked programs, or none at all; waits for them."""
        if self._failed:
            return {}
        try:
            # The loop may be acting, without gradients, when the time comes.
            with torch.inference_mode(False), torch.enable_grad():
                found = {source.name: self._program(source) for source in sources}
        except CompileError as error:
            self._give_up(str(error))
            return {}
        self._decision.value = COMPILED
        return found

    def _program(self, source: Source) -> Program:
        program = self._loaded(source) or self._compiled_here(source)
        with self._in_phase(source):
            arguments = self._arguments(source)
            difference = compare(source, program, arguments)
            allowed = TOLERANCE[precision := self.config.precision]
            if difference is not None and difference.size > allowed:
                # A draw that rounding decides may change much of an update, and is not a fault.
                allowed = max(allowed, effect_of_rounding(source, arguments, ROUNDING[precision]))
        too_far = difference is not None and difference.size > allowed
        # A resumed run continues as it was: the comparison was made when it changed over.
        if too_far and self._decision.value != COMPILED:
            raise CompileError(f"compiled {source.name} differs from eager, {difference}")
        return program

    def _loaded(self, source: Source) -> Program | None:
        """Return the program that the compiling process made; None when it could not."""
        if self._job is None:
            return None
        if not self._job.is_cached:
            self._say("waiting for the compiler; the next run with these settings need not")
        try:
            self._job.wait()
            return self._job.load(source)
        except CompileError as error:
            self._say(f"{error}; compiling in this process instead")
            self._job.close()
            self._job = None
            return None

    def _compiled_here(self, source: Source) -> Program:
        undo = Undo(source)
        fused = fused_networks(self.learner, self.config.precision)
        try:
            with self._in_phase(source), fused:
                made = trace(source, self._arguments(source))
        finally:
            undo()
        if self.captures and made.num_operations > LARGE:
            return as_traced(made, source)
        return compile_here(made, source, self.learner.num_seeds)

    def _in_phase(self, source: Source) -> AbstractContextManager[None]:
        return counted(self.learner, count_of_phase(self.learner, source.name))

    def _arguments(self, source: Source) -> tuple[Any, ...]:
        undo = Undo(source)
        arguments = example_arguments(source, self.learner, self.env, self.config.num_envs)
        undo()
        return arguments

    def _give_up(self, reason: str) -> None:
        self._failed = True
        self._decision.value = EAGER
        self._say(f"running without compiled updates: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Return whether the run has changed over, so that a resumed one does as it did."""
        return {"decision": self._decision.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follow the decision of the run that is resumed."""
        require_same_keys(self.state_dict(), state, "Accelerator")
        self._decision.load_state_dict(state["decision"])
        self._failed = self._failed or self._decision.value == EAGER

    def close(self) -> None:
        """Stop a compiling process; may be called twice."""
        if self._job is not None:
            self._job.close()


def choose_mode(config: TrainConfig, device: torch.device) -> str:
    """Return the mode, if the device can do it.

    Raises:
        ConfigError: For CUDA graphs or tf32 without a CUDA device.
    """
    if device.type != "cuda":
        if config.accelerate == "graph":
            raise ConfigError(
                "accelerate graph needs a CUDA device, but this run is on the CPU; use compile"
            )
        if config.precision == "tf32":
            raise ConfigError(
                "precision tf32 needs a CUDA device, but this run is on the CPU; use fp32 or bf16"
            )
    return config.accelerate


def estimate_seconds(learner: AnyLearner, batch_size: int) -> float:
    """Return about how long a gradient step takes eagerly; the same on every machine."""
    if learner.device.type == "cuda":
        # Launching takes the time, whatever the size: SAC 8 ms, Dreamer with sequences of 64 0.3 s.
        return 4e-3 * (1 + learner.serial_steps)
    return seconds_on_cpu(learner.optimizers(), batch_size)


def seconds_on_cpu(optimizers: Sequence[Optimizer], batch_size: int) -> float:
    """Return about how long a step of these optimizers takes eagerly."""
    parameters = sum(p.numel() for optimizer in optimizers for p in optimizer.parameters)
    return 4e-4 + 1.4e-10 * batch_size * parameters


def acting_seconds(learner: AnyLearner, num_envs: int) -> float:
    """Return about how long acting takes between two updates, where that counts."""
    config = replay_settings(learner.config)
    flops = learner.acting_flops(num_envs)
    if flops == 0.0 or config is None:
        return 0.0
    steps = config.train_frequency / (config.updates_per_round * num_envs)
    return steps * flops / (2e12 if learner.device.type == "cuda" else 4e10)


class ReplayRunner:
    """Acts and updates for the off-policy loop."""

    def __init__(
        self,
        accelerator: Accelerator,
        learner: AnyLearner,
        replay: ReplayBuffer,
        recorder: MetricRecorder,
        planned: int,
        acting: ActingState | None = None,
        stored_in: ReplayBuffer | None = None,
    ) -> None:
        """Decide when to change over, and begin to compile.

        Args:
            accelerator: Compiles.
            learner: Who acts and learns.
            replay: What batches are drawn from.
            recorder: Takes the metrics.
            planned: Updates of the whole run.
            acting: What the loop acts from.
            stored_in: Where the loop stores its steps, if nothing else is done with them.
        """
        self.accelerator, self.learner, self.replay = accelerator, learner, replay
        self.recorder, self.acting = recorder, acting
        self._on_cpu = learner.device.type == "cpu"
        self._is_whole = acting is None and stored_in is replay and replay.stores_by_graph
        """Whether storing, updates and acting are all that a pass does on the device."""
        self._pass: CapturedPass | None = None
        self._rows = rows_per_update(learner)
        self.first_update = accelerator.first_update(
            planned, 1, steps_per_update(learner), acting_seconds(learner, replay.num_envs)
        )
        """From which update on programs are used; infinity is never."""
        self._switch_at = self.first_update
        self._sources: dict[str, Source] = {}
        if self._switch_at < math.inf:
            self._sources = replay_sources(learner, replay, recorder.names, acting)
            accelerator.prepare(list(self._sources.values()), replay.data_shape)
        self._act: Callable[[Tensor], Tensor] | None = None
        self._policy: CapturedPolicy | None = None
        self._updates: dict[int, Callable[[int], int]] = {}

    def act(self, obs: NDArray[Any]) -> HostCopy:
        """Begin to choose exploring actions for observations `[S, n, ...]` of the host."""
        self._switch_when_due()
        if self._policy is not None:
            return self._policy(obs)
        given = torch.from_numpy(obs)
        if not self._on_cpu:
            given = given.to(self.learner.device)
        if self._act is not None:
            action = self._act(given)
        else:
            action = self.learner.act_from(self.acting, given, explore=True)
        return HostCopy(action) if self._on_cpu else HostCopy.of(action)

    def begin(self, due: int) -> None:
        """Begin the updates of a step that is still to be taken, where they can do without it."""
        if self._pass is not None:
            self._pass.begin(due)

    def update(self, count: int) -> None:
        """Do `count` updates."""
        if self._pass is not None:
            self._pass.forget_draws()
        while count:
            # Before each: rounds are as long as the loop likes, and a run may be cut inside one.
            self._switch_when_due()
            done = self._updates.get(self.learner.phase(), self._eager_update)(count)
            self.learner.num_updates.value += done
            count -= done

    def take_in(self, seen: StepArrays, obs: NDArray[Any], due: int) -> HostCopy | None:
        """Store a step, do `due` updates and begin to choose actions for `obs`, all in one.

        Returns:
            The actions; None, with nothing done, where these are to be done one by one.
        """
        if self._switch_at < math.inf:
            self._switch_when_due()
        if self._pass is None:
            return None
        phases = self._pass.phases(due)
        return None if phases is None else self._pass(seen, obs, phases)

    def _eager_update(self, _: int) -> int:
        output = replay_step(self.learner, self.replay, self._rows)
        self.recorder.record(UpdateResult(metrics=Metrics(output.metrics)))
        return 1

    def _switch_when_due(self) -> None:
        # A program is compared with eager on a batch, so there must be rows to draw one from.
        if self.learner.num_updates.value < self._switch_at or not len(self.replay):
            return
        self._switch_at = math.inf
        # Steps of a model change over by themselves, see `ModelRunner`.
        sources = [s for s in self._sources.values() if s.name not in MODEL_STEPS]
        programs = self.accelerator.programs(sources)
        if "act" in programs and self.accelerator.captures:
            self._policy = CapturedPolicy(programs["act"], self.learner.device)
        elif "act" in programs:
            self._act = programs["act"]
        parts = {
            name.removeprefix(ACTING_PART): self._called(program)
            for name, program in programs.items()
            if name.startswith(ACTING_PART)
        }
        self.learner.use_programs(parts, self.replay.num_envs)
        updates: dict[int, Program] = {}
        for name, program in programs.items():
            if name.startswith("update-"):
                phase = int(name.removeprefix("update-"))
                assert name == update_name(phase)
                feed = self._sources[name].feed
                self._updates[phase] = self._fast_update(phase, program, feed)
                updates |= {phase: program} if feed is None else {}
        if self._is_whole and self.accelerator.captures and "act" in programs:
            self._pass = CapturedPass(
                self.learner,
                self.replay,
                self.recorder,
                programs["act"],
                updates,
                acts_first=self.accelerator.config.overlap,
            )

    def _called(self, program: Program) -> Callable[..., Any]:
        return CapturedCall(program) if self.accelerator.captures else program

    def _fast_update(
        self, phase: int, program: Program, feed: Callable[[], tuple[Any, ...]] | None
    ) -> Callable[[int], int]:
        if self.accelerator.captures and feed is None:
            return CapturedUpdates(self.learner, self.recorder, program, phase)
        call = self._called(program)

        def once(_: int) -> int:
            rows = call() if feed is None else call(*feed())
            self.recorder.record_rows(rows.unsqueeze(0))
            return 1

        return once


class RolloutRunner:
    """Acts and updates for the on-policy loop."""

    def __init__(
        self,
        accelerator: Accelerator,
        learner: OnPolicyLearner,
        planned: int,
        num_envs: int,
        acting: Remembered | None = None,
    ) -> None:
        """Decide when to change over, and begin to compile.

        Args:
            accelerator: Compiles.
            learner: Who acts and learns.
            planned: Updates of the whole run.
            num_envs: Environments per seed.
            acting: What the loop acts from.
        """
        self.accelerator, self.learner, self.acting = accelerator, learner, acting
        self._on_cpu = learner.device.type == "cpu"
        self._sources = rollout_sources(learner, num_envs, acting)
        self._sample: Callable[[Tensor, Tensor], Tensor] = sampling(learner, acting)
        rows = learner.rollout_steps * num_envs // learner.row_steps
        steps, batch_size = learner.gradient_steps(rows)
        self._switch_at = accelerator.first_update(planned, steps, batch_size)
        if self._switch_at < math.inf:
            accelerator.prepare(list(self._sources.values()))
        self._policy: CapturedPolicy | None = None

    def sample(self, obs: NDArray[Any], noise: Tensor) -> tuple[HostCopy, Tensor]:
        """Begin to sample actions for observations `[S, n, ...]` of the host.

        Returns:
            The actions, and the observations on the device, which the next call may write over.
        """
        if self._policy is not None:
            return self._policy(obs, noise), self._policy.obs
        given = torch.from_numpy(obs)
        if self._on_cpu:
            return HostCopy(self._sample(given, noise)), given
        given = given.to(self.learner.device)
        return HostCopy.of(self._sample(given, noise)), given

    @property
    def acts_in_turns(self) -> bool:
        """Whether `sample_part` can be asked: acting is a graph of the device, without a memory."""
        return self._policy is not None and self.acting is None

    def sample_part(self, obs: NDArray[Any], part: slice, noise: Tensor) -> tuple[HostCopy, Tensor]:
        """Begin to sample actions of all environments after those of a part have seen `obs`.

        Args:
            obs: What the part sees, `[S, its n, ...]`.
            part: Its environments.
            noise: That of all environments.

        Returns:
            The actions and observations of all, see `sample`; only those of the part are of now.
        """
        assert self._policy is not None
        return self._policy(obs, noise, part=part), self._policy.obs

    def before_rollout(self) -> None:
        """Change over to programs when it is time."""
        if self.learner.num_updates.value < self._switch_at:
            return
        self._switch_at = math.inf
        for name, program in self.accelerator.programs(list(self._sources.values())).items():
            if name == "sample":
                if self.accelerator.captures:
                    self._policy = CapturedPolicy(program, self.learner.device)
                self._sample = program
            elif not self.accelerator.captures:
                setattr(self.learner, name, program)
            else:
                setattr(self.learner, name, CapturedCall(program))


class ModelRunner:
    """Fits a learner's model of the dynamics, with compiled gradient steps when that is due.

    A fit begins eagerly and changes over by a rule that depends on the settings, the number of rows
    and the counts in the checkpoint alone, so that one cut between two epochs continues in the same
    way.
    """

    def __init__(self, learner: AnyLearner, imagination: Imagination, runner: ReplayRunner) -> None:
        self.learner, self.imagination, self.runner = learner, imagination, runner
        self._programs: dict[str, Callable[..., Any]] | None = None

    def fit(self, rows: Tensor, pause: Callable[[], None]) -> dict[str, Tensor]:
        """Fit the model to the table `rows`; `pause` is called between epochs and may leave."""
        trainer = self.imagination.trainer

        def on_epoch(_: DynamicsTrainer) -> None:
            pause()
            self._choose(rows)

        self._choose(rows)
        try:
            return self.imagination.fit(rows, on_epoch)
        finally:
            trainer.run_step = trainer.step

    def _choose(self, rows: Tensor) -> None:
        trainer = self.imagination.trainer
        steps = trainer.epoch.value * trainer.epoch_steps(rows)
        trainer.run_step = self._step if self._is_due(steps) else trainer.step

    def _is_due(self, steps: int) -> bool:
        """Tell whether programs are to be used after so many steps of the fit in progress."""
        first = self.runner.first_update
        if first == math.inf:
            return False
        size = self.imagination.config.model_batch_size
        seconds = seconds_on_cpu([self.imagination.trainer.optimizer], size)
        return self.learner.num_updates.value >= first or steps * seconds >= EAGER_SECONDS

    def _step(self, rows: Tensor, active: Tensor | None = None) -> dict[str, Tensor]:
        if self._programs is None:
            accelerator = self.runner.accelerator
            found = accelerator.programs(list(model_sources(self.learner).values()))
            self._programs = {
                name: CapturedCall(program) if accelerator.captures else program
                for name, program in found.items()
            }
        name = MODEL_STEP if active is None else MASKED_MODEL_STEP
        if name not in self._programs or rows.shape != model_batch_shape(self.imagination):
            return self.imagination.trainer.step(rows, active)
        arguments = (rows,) if active is None else (rows, active)
        result: dict[str, Tensor] = self._programs[name](*arguments)
        return result
