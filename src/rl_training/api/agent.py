"""`Agent`: one object to train, evaluate, predict with, save and load.

It keeps the learner, so `predict` is a forward pass and never reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from numpy.typing import ArrayLike, NDArray

from rl_training.envs.probe import probe_env
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import save_single_file
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.ope.estimate import Source, evaluate_offline
from rl_training.ope.value import OfflineValue
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.results import EvalResult, TrainResult
from rl_training.runtime.train import choose_device, train
from rl_training.runtime.workflows import LoadedAgent, evaluate_agent, load_agent

Self = TypeVar("Self", bound="Agent")


class Agent:
    """Base of the managed classes; each is bound to one algorithm."""

    algo: ClassVar[str] = ""

    def __init__(self, config: TrainConfig | str | Path) -> None:
        """Prepare an agent.

        Args:
            config: The run, or a YAML file or preset to read it from.

        Raises:
            ConfigError: When the configuration is of another algorithm.
        """
        self.config = (
            config if isinstance(config, TrainConfig) else load_config(config, may_import=True)
        )
        if self.config.algo != self.algo:
            raise ConfigError(
                f"{type(self).__name__} was given a configuration of {self.config.algo!r}"
            )
        self.result: TrainResult | None = None
        self._loaded: LoadedAgent | None = None

    def learn(
        self, *, callbacks: Sequence[Callback] = (), run_suffix: str | None = None
    ) -> TrainResult:
        """Train from scratch and keep the final learner (of the first member, in a group)."""
        self.result = train(self.config, callbacks=callbacks, run_suffix=run_suffix)
        self._loaded = load_agent(self.result.checkpoint_path, device=self.config.device)
        return self.result

    def evaluate(
        self,
        num_episodes: int | None = None,
        *,
        seed: int | None = None,
        deterministic: bool | None = None,
    ) -> EvalResult:
        """Run whole episodes with the policy.

        Args:
            num_episodes: How many; None takes the run's `eval_episodes`.
            seed: Seed of the episodes; None takes one that training never used.
            deterministic: Take the policy's best actions, or sample; None does as the run's
                `eval_deterministic` says.
        """
        return evaluate_agent(self._agent(), num_episodes, seed=seed, deterministic=deterministic)

    def evaluate_offline(self, dataset: Source, **options: Any) -> OfflineValue:
        """Estimate the policy's discounted value from recorded data, without an environment.

        Args:
            dataset: A dataset, a file or a Minari id, of the same task.
            **options: What `rl_training.ope.estimate.evaluate_offline` takes.
        """
        return evaluate_offline(self._agent(), dataset, **options)

    def predict(self, obs: ArrayLike, *, deterministic: bool = True) -> NDArray[Any]:
        """Choose an action for an observation, or for a batch of them."""
        return self._agent().predict(obs, deterministic=deterministic)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained file for evaluation and prediction."""
        agent = self._agent()
        header = {
            "config": agent.config.resolved(),
            "env_spec": agent.env_spec.model_dump(mode="json"),
            "seed": agent.config.seed,
            "step": agent.step,
        }
        target = Path(path)
        save_single_file(target, header=header, states={"learner": agent.learner.state_dict()})
        return target

    @classmethod
    def load(cls: type[Self], path: str | Path, *, device: str = "auto") -> Self:
        """Load a saved file, a checkpoint or the newest good checkpoint of a run.

        Raises:
            CheckpointError: When it cannot be read or is of another algorithm.
        """
        loaded = load_agent(path, device=device)
        if cls.algo and loaded.config.algo != cls.algo:
            raise CheckpointError(
                f"{path} holds a {loaded.config.algo} agent, not {cls.algo}; use its own class"
            )
        agent = cls.__new__(cls)
        agent.config, agent.result, agent._loaded = loaded.config, None, loaded
        return agent

    def _agent(self) -> LoadedAgent:
        if self._loaded is None:
            spec = get_algorithm_spec(self.algo)
            env_spec = probe_env(self.config.env_id, self.config.env_kwargs)
            config = self.config.for_member(self.config.members[0])
            learner = spec.build(
                env_spec,
                config.algo_config,
                (config.seed,),
                choose_device(config.device),
                env_kwargs=config.env_kwargs,
                may_import=True,
            )
            self._loaded = LoadedAgent(learner, config, env_spec, step=0)
        return self._loaded
