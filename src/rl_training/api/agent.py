"""`Agent`: one object to train, evaluate, predict with, save and load.

It keeps the learner, so `predict` is a forward pass and never reads a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from rl_training.algorithms.base import ActingState
from rl_training.algorithms.own_encoders import give_encoder, import_encoder
from rl_training.algorithms.spec import Loop
from rl_training.api.data import DataLike, settings_for_data
from rl_training.cli.display import display_for
from rl_training.envs.factory import probe_env
from rl_training.envs.given import EnvLike, is_given, name_of
from rl_training.envs.options import WrapperLike, named_chain
from rl_training.envs.tasks.spaces_only import SPACES_ONLY
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.experiment.runs import is_hub_name
from rl_training.models.own_encoder import EncoderFunction
from rl_training.observations import ObservationLike
from rl_training.ope.estimate import Source, evaluate_offline
from rl_training.ope.value import OfflineValue
from rl_training.resources import preset_names
from rl_training.runtime.callbacks import Callback, Callbacks, as_callbacks
from rl_training.runtime.results import EvalResult, TrainingInterrupted, TrainResult
from rl_training.runtime.train import train
from rl_training.runtime.workflows import (
    LoadedAgent,
    evaluate_agent,
    load_agent,
    resume_training,
)
from rl_training.tools.export import Policy, require_function
from rl_training.tools.hub import EPISODES, Pushed, push_agent, save_policy
from rl_training.transfer import choose_device
from rl_training.validation import hint_for

Self = TypeVar("Self", bound="Agent")


def _console() -> Console:
    """Return where progress is shown: beside what a script prints, but in a notebook's own cell."""
    here = Console()
    return here if here.is_jupyter else Console(stderr=True)


def _shown_env(others: Sequence[object], env: object) -> str:
    """Write the environment that a person meant to give, where it has a short name."""
    meant = others[0] if others else env
    return repr(meant) if isinstance(meant, str) else "env"


class Agent:
    """Base of the managed classes; each is bound to one algorithm."""

    algo: ClassVar[str] = ""

    def __init__(
        self,
        source: TrainConfig | Path | EnvLike | None = None,
        *others: object,
        env: EnvLike | None = None,
        wrappers: Sequence[WrapperLike] | None = None,
        **settings: Any,
    ) -> None:
        """Prepare an agent.

        Args:
            source: A configuration, a preset such as `sac/pendulum`, a YAML file, or an
                environment: its id, an object, a class, or a function that makes one.
            *others: None; other libraries take a policy first and the environment here.
            env: The environment, beside a preset or file or in place of `source`.
            wrappers: What is put around the environment, the first innermost: classes or functions,
                names of Gymnasium's, `module:Class`, or mappings of a `name` and arguments.
            **settings: Settings of the run (`total_timesteps`, `num_envs`, `seed`, ...) and of the
                method (`learning_rate`, `hidden_sizes`, ...), by their names.

        Raises:
            ConfigError: For a setting that there is not, a value out of range, or a configuration
                of another method.
        """
        if others or (isinstance(source, str) and source.endswith("Policy")):
            raise ConfigError(
                f"{type(self).__name__} takes the environment first and no policy, such as "
                f"{type(self).__name__}({_shown_env(others, env)}); widths are hidden_sizes, "
                "settings are keywords"
            )
        if env is None and not self._is_config(source):
            env, source = source, None  # type: ignore[assignment]  # an environment by its place
        self.config = self._configured(source, env, settings)
        if wrappers is not None:
            wrapped = self.config.env_kwargs | {"wrappers": list(wrappers)}
            self.config = self.config.replace(env_kwargs=wrapped)
        self.result: TrainResult | None = None
        self._run: Path | None = None
        self._weights: str | Path | None = None
        self._loaded: LoadedAgent | None = None

    @classmethod
    def _is_config(cls, source: object) -> bool:
        """Whether what was given names a configuration rather than an environment."""
        if source is None or isinstance(source, (TrainConfig, Path)):
            return True
        if not isinstance(source, str):
            return False
        named = source in preset_names() or source.startswith(f"{cls.algo}/")
        return named or source.endswith((".yaml", ".yml"))

    @classmethod
    def _configured(
        cls, source: Any, env: EnvLike | None, settings: Mapping[str, Any]
    ) -> TrainConfig:
        run, own = cls._split(settings)
        if isinstance(own.get("encoder"), str) and ":" in own["encoder"]:
            import_encoder(own["encoder"])  # the user has named it here
        if env is not None:
            run["env_id"] = name_of(env)
        if source is None:
            if "env_id" not in run:
                spec = get_algorithm_spec(cls.algo)
                if spec.loop is not Loop.OFFLINE:
                    task = "CartPole-v1" if "discrete" in spec.action_kinds else "Pendulum-v1"
                    raise ConfigError(
                        f"{cls.__name__} needs an environment, such as {cls.__name__}('{task}'), a "
                        "preset or a configuration"
                    )
                run["env_id"] = SPACES_ONLY  # until `fit` is given data
            return TrainConfig(**{"algo": cls.algo} | run | {"algo_kwargs": own})
        config = source if isinstance(source, TrainConfig) else load_config(source, may_import=True)
        if config.algo != cls.algo:
            raise ConfigError(
                f"{cls.__name__} was given a configuration of {config.algo!r}; use that method's "
                "own class"
            )
        if run or own:
            run["algo_kwargs"] = config.algo_kwargs | own
            config = config.replace(**run)
        return config

    @classmethod
    def _split(cls, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tell settings of the run from those of the method."""
        fields = get_algorithm_spec(cls.algo).config_class
        run: dict[str, Any] = {}
        own: dict[str, Any] = dict(settings.get("algo_kwargs", {}))
        for name, value in settings.items():
            if name in TrainConfig.model_fields:
                run[name] = value
            elif name in fields.model_fields:
                own[name] = value
            else:
                known = [*TrainConfig.model_fields, *fields.model_fields]
                hint = hint_for(name, known) or f"; `rl-training describe {cls.algo}` lists them"
                raise ConfigError(
                    f"{cls.__name__}({name}=...): {name} is not a setting of a run or of "
                    f"{fields.__name__}{hint}"
                )
        run.pop("algo_kwargs", None)
        return run, own

    # Training

    def learn(
        self,
        total_timesteps: int | None = None,
        *,
        progress: bool = True,
        callbacks: Callbacks | None = None,
        seeds: Sequence[int] | None = None,
        run_suffix: str | None = None,
    ) -> TrainResult:
        """Train, and keep the final learner (of the first member, in a group).

        The first call starts a run; later calls continue it.  An agent that was loaded from a run
        continues that run; one that was loaded from a saved file starts a new run with its
        networks.  A message says which.

        Args:
            total_timesteps: Steps to train now; None is the configuration's number.
            progress: Show a bar with speed, remaining time and returns; False prints nothing.
            callbacks: Observers, see `rl_training.Callback`: one or several, objects or functions.
            seeds: Seeds to train side by side, instead of the configuration's.
            run_suffix: Start a new run, with this appended to the name of its folder.
        """
        console = _console()
        watching: list[Callback] = list(as_callbacks(callbacks))
        if progress:
            watching.insert(0, display_for(console, quiet=False))
        if self._run is not None and run_suffix is None:
            if seeds is not None:
                raise ConfigError("seeds cannot change during a run; make a new agent")
            return self._go_on(total_timesteps, watching, console if progress else None)
        changes: dict[str, Any] = {}
        if total_timesteps is not None:
            changes["total_timesteps"] = total_timesteps
        if seeds is not None:
            changes["seeds"] = list(seeds)
        config = self.config.replace(**changes) if changes else self.config
        if config.env_id == SPACES_ONLY and config.eval_episodes:
            config = config.replace(eval_episodes=0)
        if self._weights is not None and progress:
            text = f"a new run starts with the networks of {self._weights}"
            print(text, file=console.file)
        with self._remembering():
            result = train(
                config, from_checkpoint=self._weights, callbacks=watching, run_suffix=run_suffix
            )
        return self._keep(result)

    def fit(
        self, dataset: DataLike, total_timesteps: int | None = None, **options: Any
    ) -> TrainResult:
        """Train on recorded data.

        Args:
            dataset: An `OfflineDataset`, a Minari dataset or its id, a file or folder, or a mapping
                of arrays `observations, actions, rewards, terminations, truncations`.
            total_timesteps: Gradient steps; None is the configuration's number.
            **options: The arguments of `learn`.

        Raises:
            ConfigError: When the method does not learn from data.
        """
        settings, env_kwargs = settings_for_data(self.algo, dataset, Path(self.config.output_dir))
        if self._run is not None and not settings.items() <= self.config.algo_kwargs.items():
            raise ConfigError(
                f"{self!r} has learned from other data; call learn to continue with that, or make "
                "a new agent"
            )
        changes: dict[str, Any] = {"algo_kwargs": self.config.algo_kwargs | settings}
        if self.config.env_id == SPACES_ONLY:
            changes["env_kwargs"] = env_kwargs()
        self.config = self.config.replace(**changes)
        return self.learn(total_timesteps, **options)

    def resume(self, *, progress: bool = True, callbacks: Callbacks | None = None) -> TrainResult:
        """Resume an interrupted run, and train to its planned end.

        Raises:
            CheckpointError: When there is no run to resume.
        """
        if self._run is None:
            raise CheckpointError(
                f"{self!r} has no run to resume; call learn, or load a run's folder"
            )
        watching: list[Callback] = list(as_callbacks(callbacks))
        if progress:
            watching.insert(0, display_for(_console(), quiet=False))
        return self._keep(resume_training(self._run, callbacks=watching))

    def _go_on(
        self, steps: int | None, callbacks: Sequence[Callback], console: Console | None
    ) -> TrainResult:
        assert self._run is not None
        more = self.config.total_timesteps if steps is None else steps
        total = self._agent().step + more
        if console is not None:
            text = f"continuing with {self._run} to step {total:,}"
            print(text, file=console.file)
        return self._keep(resume_training(self._run, total_timesteps=total, callbacks=callbacks))

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Keep the folder of a run that is interrupted, so that `resume` can take it up."""
        try:
            yield
        except TrainingInterrupted as error:
            self._run, self._weights = error.run_dir, None
            raise

    def _keep(self, result: TrainResult) -> TrainResult:
        self.result, self._run, self._weights = result, result.run_dir, None
        self._loaded = load_agent(result.checkpoint_path, device=self.config.device)
        return result

    # Using what was learned

    def evaluate(
        self,
        num_episodes: int | None = None,
        *,
        episodes: int | None = None,
        env: EnvLike | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
    ) -> EvalResult:
        """Run whole episodes with the policy.

        Args:
            num_episodes: Number of episodes; None takes the run's `eval_episodes`.
            episodes: The same by a shorter name.
            env: Another environment with the same spaces; None is the run's own.
            seed: Seed of the episodes; None takes one that training did not use.
            deterministic: Take the policy's best actions, or sample; None follows the run's
                `eval_deterministic`.
        """
        if num_episodes is not None and episodes is not None:
            raise ConfigError("evaluate: num_episodes and episodes are the same; give one")
        count = episodes if num_episodes is None else num_episodes
        return evaluate_agent(
            self._agent(),
            count,
            seed=seed,
            deterministic=deterministic,
            env_id=None if env is None else name_of(env),
        )

    def evaluate_offline(self, dataset: Source, **options: Any) -> OfflineValue:
        """Estimate the policy's discounted value from recorded data, without an environment.

        Args:
            dataset: A dataset, a file or a Minari id, of the same task.
            **options: What `rl_training.ope.estimate.evaluate_offline` takes.
        """
        return evaluate_offline(self._agent(), dataset, **options)

    def predict(
        self, obs: ObservationLike, state: ActingState | None = None, deterministic: bool = True
    ) -> NDArray[Any]:
        """Choose an action for an observation, or for a batch of them.

        Args:
            obs: One observation as the task gives it, or a batch; dictionaries and tuples of a
                batch have leaves with one more axis.
            state: The state of a method with a memory or a plan, from `initial_state`; it is
                updated in place.  None acts as at the start of an episode.
            deterministic: Take the policy's best action, or sample.
        """
        return self._agent().predict(obs, state, deterministic=deterministic)

    def initial_state(self, num_envs: int = 1) -> ActingState | None:
        """Return the state to give to `predict` at the start of episodes; None without a memory."""
        return self._agent().learner.initial_acting_state(num_envs)

    @property
    def policy(self) -> nn.Module:
        """A copy of the policy as a module: observations `[B, ...]` to actions of the task.

        Raises:
            SpecMismatch: When the policy is not a function of the observation alone.
        """
        agent = self._agent()
        require_function(agent)
        return Policy(agent).eval()

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The learner's networks by name; parameters have an axis of seeds first."""
        learner = self._agent().learner
        return {name: getattr(learner, name) for name in learner.network_names}

    def save(self, path: str | Path) -> Path:
        """Write one self-contained file for evaluation and prediction."""
        target = Path(path)
        save_policy(self._agent(), target)
        return target

    def push_to_hub(
        self,
        repo: str,
        *,
        episodes: int = EPISODES,
        private: bool = False,
        message: str | None = None,
        folder: str | Path | None = None,
    ) -> Pushed:
        """Evaluate the agent and put it on the Hugging Face Hub, with a model card.

        Args:
            repo: `user/name`; the repository is made if missing.
            episodes: Episodes of the evaluation on the card; 0 leaves it out.
            private: Make the repository private.
            message: Commit message; None says method, task and step.
            folder: Write the files here and upload nothing.

        Raises:
            MissingExtraError: Without the extra `hub`.
            CheckpointError: When the hub refuses, or you are not logged in.
        """
        return push_agent(
            self._agent(),
            repo,
            run=self._run,
            episodes=episodes,
            private=private,
            message=message,
            folder=None if folder is None else Path(folder),
        )

    @classmethod
    def load(
        cls: type[Self],
        path: str | Path,
        *,
        env: EnvLike | None = None,
        encoder: EncoderFunction | None = None,
        wrappers: Sequence[WrapperLike] = (),
        device: str = "auto",
    ) -> Self:
        """Load a saved file, a checkpoint or the newest good checkpoint of a run.

        Args:
            path: Where it is; `hf://user/name` is on the Hugging Face Hub.
            env: The environment, where the run had one that was passed in Python.
            encoder: The function that makes the encoder, where the run has one of your own.
            wrappers: Wrappers of the environment that were passed in Python.
            device: Device to act on.

        Raises:
            CheckpointError: When it cannot be read or is of another algorithm.
        """
        if encoder is not None:
            give_encoder(encoder)
        named_chain(list(wrappers))
        loaded = load_agent(path, device=device)
        if cls.algo and loaded.config.algo != cls.algo:
            raise CheckpointError(
                f"{path} holds a {loaded.config.algo} agent, not {cls.algo}; use its own class"
            )
        if env is not None:
            known = loaded.config.env_id
            if name_of(env, known if is_given(known) else None) != known:
                raise ConfigError(
                    f"{path} was trained on {known}; give that environment, or evaluate on another "
                    "one with evaluate(env=...)"
                )
        agent = cls.__new__(cls)
        agent.config, agent.result, agent._loaded = loaded.config, None, loaded
        # A file and an agent of the hub have no run to continue with.
        alone = is_hub_name(path) or Path(path).is_file()
        agent._run, agent._weights = (None, path) if alone else (Path(path), None)
        return agent

    def __repr__(self) -> str:
        parts = [self.config.env_id]
        if self._loaded is not None:
            parts.append(f"{self._loaded.step:,} steps")
        if self.result is not None and self.result.metrics.get("eval_episodes"):
            parts.append(f"last return {self.result.metrics['eval_return_mean']:.4g}")
        if self._run is not None:
            parts.append(f"run {self._run}")
        return f"{type(self).__name__}({', '.join(parts)})"

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
