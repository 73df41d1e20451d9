"""`TrainConfig`: everything that describes a run, checked before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from rl_training.algorithms.config import AlgoConfig
from rl_training.data.datasets.scores import ReferenceScores, reference_scores
from rl_training.errors import ConfigError
from rl_training.experiment.grid import Member, check_grid, members_of
from rl_training.experiment.registry import get_algorithm_spec, import_plugin
from rl_training.experiment.yaml_loader import Document, load_yaml, parse_scalar
from rl_training.resources import preset_path
from rl_training.validation import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Seeds,
    Settings,
    Texts,
    Whole,
    hint_for,
    parse,
    suggest,
)

KeyPath = tuple[str, ...]
TRACKERS = ("wandb", "mlflow")
MAX_THREADS = 1024
"""More threads than any machine has; a larger number would bring it to a halt."""
MAX_NAME_BYTES = 200
"""Of a folder's name; file systems take 255, of which a run that is being made needs some."""
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS), Whole]
_DEVICE = r"^(auto|cpu|cuda(:[0-9]+)?)$"
_FOLDER_NAME = r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$"


class TrainConfig(Settings):
    """One training run."""

    algo: str
    """Name of the algorithm, as in `rl-training list`, or `module:SPEC` for one of your own."""
    env_id: str
    """Gymnasium id, or `module:Class` for an environment of your own."""
    seed: Seed = 0
    """Seed of everything random in the run."""
    seeds: Seeds | None = Field(
        default=None, json_schema_extra={"minItems": 1, "uniqueItems": True}
    )
    """Several seeds to train side by side in one process; null trains `seed` alone."""
    grid: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm with a list of numbers each; all combinations run side by side."""
    from_checkpoint: str | None = None
    """Run or checkpoint whose networks the run starts with; an offline method then goes online."""
    total_timesteps: PositiveInt = 100_000
    """Steps per seed: environment steps online, gradient steps offline."""
    output_dir: str = "runs"
    """Folder in which the run's own folder is made."""
    run_name: str | None = Field(default=None, json_schema_extra={"pattern": _FOLDER_NAME})
    """Name of the run's folder; null makes one from algorithm, environment, seed and time."""
    device: str = Field(default="auto", json_schema_extra={"pattern": _DEVICE})
    """`auto`, `cpu`, `cuda` or `cuda:<n>`."""
    threads: Threads = 0
    """CPU threads of PyTorch; 0 takes `OMP_NUM_THREADS` or what is fastest, and a resumed run keeps
    its number."""
    env_threads: Threads = 0
    """CPU threads of native environments, and processes of `async` ones; 0 takes as many cores as
    pay. Results do not depend on it."""
    accelerate: Literal["auto", "off", "compile", "graph"] = "auto"
    """How updates run: eagerly (`off`), compiled from the first on (`compile`), compiled and
    captured in CUDA graphs (`graph`), or, on long runs, compiled beside the first part of the run
    and then used (`auto`)."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Number format of matrix products; `tf32` needs a CUDA device, `bf16` pays where the processor
    has instructions for it."""
    num_envs: PositiveInt = 1
    """Environments stepped side by side, per seed."""
    vector_mode: Literal["auto", "native", "sync", "async", "ray"] = "auto"
    """How several environments run: all at once (`native`, for CartPole, Gymnasium's MuJoCo tasks
    and Atari games), one after another in this process (`sync`), one process each (`async`), or in
    actors of a Ray cluster (`ray`); `auto` takes `native` where it is bit-exact, else `sync`."""
    overlap: bool = False
    """Choose each action before the updates of the step before it, so that environments step
    while the accelerator updates: the acting policy is one round of updates behind. Only for
    methods that learn from a replay."""
    eval_episodes: NonNegativeInt = 5
    """Episodes per evaluation; 0 never evaluates."""
    eval_deterministic: bool = True
    """Evaluate the policy's best actions; false, the default of FQL, samples them if the policy
    is random."""
    log_interval: PositiveInt = 1_000
    """Steps between two lines of metrics."""
    checkpoint_interval: NonNegativeInt = 10_000
    """Steps between two checkpoints; 0 saves only at the end, on a signal, and at a new best."""
    checkpoint_minutes: PositiveFloat | None = None
    """Also save when this many minutes have passed since the last checkpoint; null does not."""
    keep_checkpoints: PositiveInt = 3
    """Newest checkpoints kept, beside the best one."""
    tensorboard: bool = True
    """Write TensorBoard files when the `tensorboard` extra is installed."""
    trackers: Texts = Field(
        default=(), json_schema_extra={"items": {"enum": list(TRACKERS)}, "uniqueItems": True}
    )
    """Services that also get the metrics, each with the extra of its name: `wandb`, `mlflow`."""
    tags: Texts = ()
    """Words to find the run again."""
    algo_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm; `rl-training describe <algo>` lists them."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """`max_episode_steps`, `render_mode`, `wrappers`, and keywords of the environment."""

    @field_validator("output_dir", "from_checkpoint", mode="before")
    @classmethod
    def _path_to_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("output_dir", "from_checkpoint")
    @classmethod
    def _can_be_a_path(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError(f"must be a path, which holds no null character, got {value!r}")
        return value

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or len(set(value)) != len(value)):
            raise ValueError(f"must be different numbers, at least one, got {list(value)}")
        return value

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not set(value) <= set(TRACKERS) or len(set(value)) != len(value):
            raise ValueError(f"must be different ones of {', '.join(TRACKERS)}, got {list(value)}")
        return value

    @field_validator("run_name")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_FOLDER_NAME, value):
            raise ValueError(
                f"must be the name of one folder, without / or first dot, got {value!r}"
            )
        if value is not None and len(value.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"must have at most {MAX_NAME_BYTES} bytes, got {len(value.encode())}")
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(_DEVICE, value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:<n>, got {value!r}")
        return value

    @field_validator("algo_kwargs")
    @classmethod
    def _functions_by_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        # A run names what it needs by text; a function of Python is remembered under its name.
        if not callable(value.get("encoder")):
            return value
        from rl_training.algorithms.own_encoders import name_encoder

        return value | {"encoder": name_encoder(value["encoder"])}

    @field_validator("env_kwargs")
    @classmethod
    def _wrappers_by_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        wrappers = value.get("wrappers")
        chain = wrappers.get("chain") if isinstance(wrappers, dict) else wrappers
        if not isinstance(chain, list | tuple):
            return value
        from rl_training.envs.options import named_chain

        named = named_chain(chain)
        return value | {
            "wrappers": wrappers | {"chain": named} if isinstance(wrappers, dict) else named
        }

    @model_validator(mode="before")
    @classmethod
    def _evaluated_as_its_method(cls, data: object) -> object:
        """Fill in how the method is evaluated; what is wrong with its name is said later."""
        if not isinstance(data, dict) or "eval_deterministic" in data:
            return data
        algo = data.get("algo")
        try:
            spec = get_algorithm_spec(algo if isinstance(algo, str) else "")
        except ConfigError:
            return data
        return data | {"eval_deterministic": spec.eval_deterministic}

    @model_validator(mode="after")
    def _algorithm_fits(self) -> TrainConfig:
        _ = self.algo_config  # parsing it is the check
        if self.grid:
            check_grid(type(self.algo_config), self.algo_kwargs, self.grid)
        return self

    @cached_property
    def algo_config(self) -> AlgoConfig:
        """The algorithm's typed settings, parsed from `algo_kwargs`; a grid varies them."""
        spec = get_algorithm_spec(self.algo)
        settings = dict(self.algo_kwargs)
        goes_online = self.from_checkpoint is not None and spec.continues_online
        if goes_online and settings.get("online") is None:
            settings["online"] = {}
        return parse(spec.config_class, settings, "algo_kwargs.", _hint_for_setting)

    @cached_property
    def scores(self) -> ReferenceScores | None:
        """What normalised scores are measured between: the task's, or what the data carries.

        A task with other rules than the usual ones has none.
        """
        if self.env_kwargs.keys() - {"render_mode", "wrappers"}:
            return None
        path = self.algo_kwargs.get("dataset_path")
        if isinstance(path, str):
            from rl_training.data.datasets.sources import file_scores

            # Returns of the very run that the data is from say more than those of another.
            own = file_scores(Path(path).expanduser())
            if own is not None:
                return own
        known = reference_scores(self.env_id)
        dataset_id = self.algo_kwargs.get("dataset_id")
        if known is not None or not isinstance(dataset_id, str):
            return known
        from rl_training.data.datasets.minari import carried_scores

        return reference_scores(dataset_id) or carried_scores(dataset_id)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The runs side by side: every point of the grid with every seed, or `seed` alone."""
        seeds = self.seeds if self.seeds is not None else (self.seed,)
        return members_of(seeds, self.grid) if self.grid else tuple(map(Member, seeds))

    @property
    def is_group(self) -> bool:
        """Whether members have folders of their own inside the run's."""
        return self.seeds is not None or bool(self.grid)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seed of each member; members at different points of a grid share theirs."""
        return tuple(member.seed for member in self.members)

    @property
    def varied(self) -> dict[str, tuple[float, ...]]:
        """The settings in which members differ, with the value of each member."""
        return {name: tuple(member.point[name] for member in self.members) for name in self.grid}

    def resolved(self) -> dict[str, Any]:
        """Return plain data with every default filled in."""
        data = self.model_dump(mode="json")
        data["algo_kwargs"] = self.algo_config.model_dump(mode="json")
        return data

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with some fields changed, checked like any other."""
        return TrainConfig(**(self.model_dump() | changes))

    def for_member(self, member: Member) -> TrainConfig:
        """Return the configuration that trains one member of the group alone."""
        settings = self.algo_kwargs | dict(member.point)
        return self.replace(seed=member.seed, seeds=None, grid={}, algo_kwargs=settings)

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML."""
        return yaml.safe_dump(self.resolved(), sort_keys=False)


def load_config(
    source: str | Path | None,
    overrides: Iterable[str] = (),
    changes: Mapping[str, Any] | None = None,
    *,
    may_import: bool = False,
) -> TrainConfig:
    """Read a configuration.

    Args:
        source: A YAML file, or the name of a packaged preset such as `sac/pendulum`; None begins
            with the defaults, and `changes` name `algo` and `env_id`.
        overrides: `key=value` texts; a dot reaches into a mapping, and a name that is not a field
            of `TrainConfig` is a setting of the method: `batch_size=512` means
            `algo_kwargs.batch_size=512`.
        changes: Top-level fields that replace what the file says.
        may_import: Import what `algo` or `encoder` name, because the file is the user's own.

    Raises:
        ConfigError: Naming file, line, key, value and what is allowed.
    """
    path = None if source is None else preset_path(source)
    document = Document({}) if path is None else load_yaml(path)
    data, overrides = document.data, tuple(overrides)
    origins = {key: f"{path}:{line}: " for key, line in document.lines.items()}
    nowhere = "" if path is None else f"{path}: "
    for text in overrides:  # which settings there are depends on the method
        if text.partition("=")[0] == "algo":
            _set_origin(origins, apply_override(data, text), f"--set {text}: ")
    if changes and "algo" in changes:
        data["algo"] = changes["algo"]
        _set_origin(origins, ("algo",), "")
    try:
        settings = _settings_of(data.get("algo"), may_import)
    except ConfigError as error:
        raise ConfigError(_locate(str(error), origins, nowhere)) from None
    for text in overrides:
        _set_origin(origins, apply_override(data, text, settings), f"--set {text}: ")
    for name, value in (changes or {}).items():
        data[name] = value
        _set_origin(origins, (name,), "")
    try:
        config = parse(TrainConfig, data, hint=partial(_hint_for_key, settings=settings))
        _import_encoder(config, may_import)
        _check_env_id(config.env_id)
    except ConfigError as error:
        raise ConfigError(_locate(str(error), origins, nowhere)) from None
    return config


def _import_encoder(config: TrainConfig, may_import: bool) -> None:
    """Import the encoder that the user's own file names, where it does."""
    if may_import and "encoder" in config.algo_kwargs:
        from rl_training.algorithms.own_encoders import import_encoder_of

        import_encoder_of(config.algo_config)


def _settings_of(algo: object, may_import: bool) -> type[AlgoConfig] | None:
    """Return the settings of a method; None of something that is not a name."""
    if not isinstance(algo, str):
        return None
    if may_import:
        import_plugin(algo)
    return get_algorithm_spec(algo).config_class


def _hint_for_setting(key: str, allowed: Collection[str]) -> str:
    """Say what an unknown setting of the method may mean, a key of the run among it."""
    if key in TrainConfig.model_fields:
        return f" but of TrainConfig; give {key} at the top level"
    if key == "online" and "dataset_kind" in allowed and "buffer_capacity" not in allowed:
        return ": this method learns from recorded data alone and cannot continue online"
    return hint_for(key, allowed)


def _hint_for_key(key: str, allowed: Collection[str], settings: type[AlgoConfig] | None) -> str:
    """Say what an unknown key at the top level may mean, a setting of the method among it."""
    if settings is not None and key in settings.model_fields:
        return f" but of {settings.__name__}; put it under algo_kwargs"
    return hint_for(key, allowed)


def _set_origin(origins: dict[KeyPath, str], key: KeyPath, origin: str) -> None:
    """Note where a value comes from now, in place of the line of the file."""
    for old in [path for path in origins if path[: len(key)] == key]:
        del origins[old]
    origins[key] = origin


def _locate(message: str, origins: Mapping[KeyPath, str], default: str) -> str:
    """Put `file:line: ` or `--set ...: ` before a message, by the first key it names."""
    key = tuple(message.split(" ", 1)[0].rstrip(":").split("[")[0].split("."))
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return origins[key[:length]] + message
    return default + message


def _check_env_id(env_id: str) -> None:
    """Refuse a plain id that nobody registered; other forms are tried when the run starts."""
    import gymnasium

    from rl_training.envs.ogbench import is_ogbench

    elsewhere = ":" in env_id or env_id.startswith("ALE/") or is_ogbench(env_id)
    if not elsewhere and env_id not in gymnasium.registry:
        raise ConfigError(
            f"env_id {env_id!r} is not a registered environment"
            f"{suggest(env_id, gymnasium.registry)}; `rl-training list envs` shows all, and an own "
            "one is named as module:Class"
        )


def apply_override(
    data: dict[str, Any], text: str, settings: type[AlgoConfig] | None = None
) -> KeyPath:
    """Apply one `key=value` to nested plain data; returns the path of the key.

    Args:
        data: The configuration, which is changed.
        text: What the user wrote.
        settings: The method's settings, whose fields need no `algo_kwargs.` before them; a name
            that `TrainConfig` has too means `TrainConfig`'s.
    """
    key, separator, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise ConfigError(f"--set {text} is not of the form key=value, such as seed=1")
    if path[0] not in TrainConfig.model_fields:
        _require_field(text, path[0], settings)
        path = ("algo_kwargs", *path)
    *parents, last = path
    target = data
    for part in parents:
        if target.get(part) is None:
            target[part] = {}
        nested = target[part]
        if not isinstance(nested, dict):
            raise ConfigError(f"--set {text}: {part} is not a mapping, so it has no {last}")
        target = nested
    target[last] = parse_scalar(value, f"--set {text}")
    return path


def _require_field(text: str, name: str, settings: type[AlgoConfig] | None) -> None:
    """Refuse an override of a name that neither the run nor the method has."""
    if settings is not None and name in settings.model_fields:
        return
    classes: list[type[Settings]] = [TrainConfig]
    if settings is not None:
        classes.insert(0, settings)
    allowed = [field for model in classes for field in model.model_fields]
    owners = " or ".join(model.__name__ for model in classes)
    hint = hint_for(name, allowed) or "; `rl-training describe METHOD` lists a method's settings"
    raise ConfigError(f"--set {text}: {name} is not a field of {owners}{hint}")


def config_schema(algo: str) -> dict[str, Any]:
    """Return the JSON schema of a run's YAML for one algorithm, for editors and checkers."""
    schema = TrainConfig.model_json_schema()
    algo_schema = get_algorithm_spec(algo).config_class.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    definitions.update(algo_schema.pop("$defs", {}))
    definitions[algo_schema["title"]] = algo_schema
    properties = schema["properties"]
    properties["algo_kwargs"] = {
        "$ref": f"#/$defs/{algo_schema['title']}",
        "description": properties["algo_kwargs"]["description"],
    }
    properties["grid"] = _grid_schema(algo_schema, algo, properties["grid"]["description"])
    properties["algo"]["const"] = algo
    schema["title"] = f"rl-training run of {algo}"
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    return plain


def _grid_schema(algo_schema: Mapping[str, Any], algo: str, description: str) -> dict[str, Any]:
    """Describe a list of numbers for each setting that may vary."""
    lists = {}
    for name in get_algorithm_spec(algo).config_class.may_vary():
        field = algo_schema["properties"][name]
        branches = field.get("anyOf", [field])
        number = next(branch for branch in branches if branch.get("type") == "number")
        bounds = {key: value for key, value in number.items() if key not in ("title", "default")}
        lists[name] = {"type": "array", "items": bounds, "minItems": 1, "uniqueItems": True}
        lists[name]["description"] = field["description"]
    return {
        "type": "object",
        "properties": lists,
        "additionalProperties": False,
        "description": description,
    }


def flat_settings(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names, as `--set` writes them."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
