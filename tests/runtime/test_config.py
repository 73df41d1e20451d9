"""Configurations: every mistake is one sentence that says where, which key, which value."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.config_values import POOL, ROOM_FOR
from helpers.schemas import accepts, allowed_kinds, resolve
from rl_training import TrainConfig
from rl_training.algorithms.config import EarlyStopping, LRSchedule
from rl_training.errors import ConfigError
from rl_training.experiment.config import config_schema, load_config
from rl_training.experiment.registry import algorithm_names, get_algorithm_spec
from rl_training.resources import preset_names

BASE = "algo: sac\nenv_id: Pendulum-v1\n"


def refusal(tmp_path: Path, text: str, **options: Any) -> str:
    """The message with which a file is refused, from which its folder is left out."""
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "total_timestep: 3",
            "run.yaml:3: total_timestep is not a field of TrainConfig "
            "(did you mean total_timesteps?)",
        ),
        (
            "algo_kwargs:\n  gamma: 0.9\n  batch_siez: 8",
            "run.yaml:5: algo_kwargs.batch_siez is not a field of SACConfig "
            "(did you mean batch_size?)",
        ),
        (
            "algo_kwargs:\n  lr_schedule:\n    typ: linear",
            "run.yaml:5: algo_kwargs.lr_schedule.typ is not a field of LRSchedule "
            "(did you mean type?)",
        ),
        ("total_timesteps: soon", "run.yaml:3: total_timesteps must be an integer, got 'soon'"),
        ("total_timesteps: 1.5", "run.yaml:3: total_timesteps must be an integer, got 1.5"),
        ("total_timesteps: 0", "run.yaml:3: total_timesteps must be >= 1, got 0"),
        ("total_timesteps: null", "run.yaml:3: total_timesteps must be an integer, got null"),
        ("total_timesteps:", "run.yaml:3: total_timesteps must be an integer, got null"),
        ("seed: true", "run.yaml:3: seed must be an integer, got True"),
        ("seed: 00143", "run.yaml:3: seed must be an integer, got '00143'"),
        ("seed: 1\nseed: 2", "run.yaml:4: seed is given twice; keep one"),
        ("tensorboard: yes", "run.yaml:3: tensorboard must be true or false, got 'yes'"),
        ("tags: [a, 3]", "run.yaml:3: tags[1] must be text, got 3"),
        (
            "vector_mode: asinc",
            "run.yaml:3: vector_mode must be one of 'auto', 'native', 'sync', 'async' or 'ray', "
            "got 'asinc'",
        ),
        (
            "seeds: [1, 1]",
            "run.yaml:3: seeds: must be different numbers, at least one, got [1, 1]",
        ),
        ("seeds: []", "run.yaml:3: seeds: must be different numbers, at least one, got []"),
        (
            "run_name: ../elsewhere",
            "run.yaml:3: run_name: must be the name of one folder, without / or first dot, "
            "got '../elsewhere'",
        ),
        ("device: tpu", "run.yaml:3: device: must be auto, cpu, cuda or cuda:<n>, got 'tpu'"),
        ("algo_kwargs: 3", "run.yaml:3: algo_kwargs must be a mapping, got 3"),
        (
            "algo_kwargs:\n  alpha: atuo",
            "run.yaml:4: algo_kwargs.alpha must be a number or 'auto', got 'atuo'",
        ),
        (
            "algo_kwargs:\n  gamma: .nan",
            "run.yaml:4: algo_kwargs.gamma must be a finite number, got nan",
        ),
        (
            "algo_kwargs:\n  hidden_sizes: [16, 0]",
            "run.yaml:4: algo_kwargs.hidden_sizes[1] must be >= 1, got 0",
        ),
        (
            "algo_kwargs:\n  early_stopping: {patience: 0}",
            "run.yaml:4: algo_kwargs.early_stopping.patience must be >= 1, got 0",
        ),
        (
            "algo_kwargs:\n  lr_schedule: {type: step}",
            "run.yaml:4: algo_kwargs.lr_schedule: a step schedule needs milestones, "
            "such as [0.5, 0.75]",
        ),
        (
            "algo_kwargs:\n  gamma: 2\n  tau: -1",
            "run.yaml:4: algo_kwargs.gamma must be <= 1, got 2; "
            "algo_kwargs.tau must be >= 0, got -1",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_file_line_key_and_value(
    lines: str, message: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, f"{BASE}{lines}\n") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algo: sacc\nenv_id: Pendulum-v1",
            "run.yaml:1: algo 'sacc' is not an algorithm (did you mean sac?)",
        ),
        ("env_id: Pendulum-v1", "run.yaml: algo is required: give it a value"),
        ("algo: sac", "run.yaml: env_id is required: give it a value"),
    ],
)
def test_algorithm_and_environment_must_be_given(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text) == message


def test_an_unknown_environment_is_named_with_the_nearest_match(tmp_path: Path) -> None:
    message = refusal(tmp_path, "algo: sac\nenv_id: pendulm-v1\n")
    start = "run.yaml:2: env_id 'pendulm-v1' is not a registered environment"
    assert message.startswith(f"{start} (did you mean Pendulum-v1?)")
    # Without a near one, hundreds of names would be no help.
    assert len(refusal(tmp_path, "algo: sac\nenv_id: zzzzzzzzzzzz\n")) < 200


def test_an_unknown_preset_is_named_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"sac/pendulm is neither .* \(did you mean sac/pendulum"):
        load_config("sac/pendulm")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed is not of the form key=value, such as seed=1"),
        ("=3", "--set =3 is not of the form key=value, such as seed=1"),
        ("algo_kwargs.=3", "--set algo_kwargs.=3 is not of the form key=value, such as seed=1"),
        ("seed=abc", "--set seed=abc: seed must be an integer, got 'abc'"),
        ("seed=", "--set seed=: seed must be an integer, got null"),
        (
            "sede=3",
            "--set sede=3: sede is not a field of SACConfig or TrainConfig (did you mean seed?)",
        ),
        (
            "algo_kwarg.tau=1",
            "--set algo_kwarg.tau=1: algo_kwarg is not a field of SACConfig or TrainConfig "
            "(did you mean algo_kwargs?)",
        ),
        ("seed.x=3", "--set seed.x=3: seed is not a mapping, so it has no x"),
        (
            "algo_kwargs.tau=7",
            "--set algo_kwargs.tau=7: algo_kwargs.tau must be <= 1, got 7",
        ),
        (
            "algo_kwargs={tau: 7}",
            "--set algo_kwargs={tau: 7}: algo_kwargs.tau must be <= 1, got 7",
        ),
        (
            "seed=!!python/object:os.system ls",
            "--set seed=!!python/object:os.system ls: tag "
            "tag:yaml.org,2002:python/object:os.system is not allowed; give plain data",
        ),
    ],
)
def test_a_bad_override_is_blamed_and_not_the_file(
    override: str, message: str, tmp_path: Path
) -> None:
    text = f"{BASE}seed: 1\nalgo_kwargs: {{tau: 0.5}}\n"
    assert refusal(tmp_path, text, overrides=[override]) == message


def test_a_bad_option_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{BASE}seed: 1\n", changes={"seed": -1})
    assert message == "seed must be >= 0, got -1"


def test_overrides_reach_into_mappings_and_later_ones_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{BASE}algo_kwargs:\n  tau: 0.5\n  early_stopping: null\n")
    overrides = [
        "algo_kwargs.lr_schedule.type=linear",
        "algo_kwargs.early_stopping.target=-200",
        "env_kwargs.wrappers.reward_scale=0.1",
        "tags=[a, b]",
        "seed=1",
        "seed=2",
    ]
    config = load_config(path, overrides, {"num_envs": 3})
    assert config.algo_config.lr_schedule.type == "linear"
    assert config.algo_config.early_stopping == EarlyStopping(target=-200)
    assert config.algo_kwargs["tau"] == 0.5
    assert config.env_kwargs == {"wrappers": {"reward_scale": 0.1}}
    assert (config.tags, config.seed, config.num_envs) == (("a", "b"), 2, 3)


def test_exponents_are_numbers_and_switch_words_are_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{BASE}tags: [yes, on]\nalgo_kwargs: {{learning_rate: 3e-4}}\n")
    config = load_config(path)
    assert config.tags == ("yes", "on")
    assert config.algo_kwargs["learning_rate"] == 3e-4


def test_python_callers_get_the_same_sentences() -> None:
    with pytest.raises(ConfigError, match=r"^seed must be >= 0, got -1$"):
        TrainConfig(algo="sac", env_id="Pendulum-v1", seed=-1)
    with pytest.raises(ConfigError, match=r"^algo_kwargs\.tau must be <= 1, got 2$"):
        TrainConfig(algo="sac", env_id="Pendulum-v1", algo_kwargs={"tau": 2})
    with pytest.raises(ConfigError, match="replay_size"):
        TrainConfig(algo="sac", env_id="Pendulum-v1").replace(algo_kwargs={"replay_size": 1})


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = TrainConfig(algo="sac", env_id="Pendulum-v1")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    assert config.replace(seed=3).seed == 3
    assert config.seed == 0


@pytest.mark.parametrize("preset", preset_names())
def test_the_resolved_configuration_reads_back_as_itself(preset: str, tmp_path: Path) -> None:
    config = load_config(preset)
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    again = load_config(path)
    assert again.resolved() == config.resolved()
    fields = get_algorithm_spec(config.algo).config_class.model_fields
    assert again.algo_kwargs.keys() == fields.keys()


def test_a_path_may_be_given_as_output_dir(tmp_path: Path) -> None:
    values: dict[str, Any] = {"algo": "sac", "env_id": "Pendulum-v1", "output_dir": tmp_path}
    assert TrainConfig(**values).output_dir == str(tmp_path)


# The schema and the runtime over every field of every class


def every_field() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(algorithm, path of a field), over the run, the algorithm and the settings inside it."""
    for name in TrainConfig.model_fields:
        yield "sac", (name,)
    for nested, model in (("lr_schedule", LRSchedule), ("early_stopping", EarlyStopping)):
        for name in model.model_fields:
            yield "sac", ("algo_kwargs", nested, name)
    for algo in algorithm_names():
        for name in get_algorithm_spec(algo).config_class.model_fields:
            yield algo, ("algo_kwargs", name)


SECTIONS: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
"""The fields of the run, of the settings inside it, and of each algorithm: a test goes through one
section, as thousands of tests would take longer to hand out than to run."""
for algorithm, place in every_field():
    section = "run" if len(place) == 1 else algorithm if len(place) == 2 else place[1]
    SECTIONS.setdefault(section, []).append((algorithm, place))


@contextmanager
def about(algo: str, path: tuple[str, ...]) -> Iterator[None]:
    """Name the field in the message of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{algo}: {'.'.join(path)}: {error}") from error


CANDIDATES: dict[str, object] = {
    "string": "text",
    "integer": 7,
    "array": [],
    "boolean": True,
    "object": {"no_such_key": 1},
}


def nest(algo: str, path: tuple[str, ...], value: object) -> dict[str, Any]:
    """A mapping with one value at a path."""
    known = get_algorithm_spec(algo).config_class.model_fields
    fields = {name for name, field in known.items() if field.annotation is not type(None)}
    for key in reversed(path):
        room = {} if value is None else ROOM_FOR.get(key, {})
        value = {**{name: given for name, given in room.items() if name in fields}, key: value}
    assert isinstance(value, dict)
    return value


def try_value(algo: str, path: tuple[str, ...], value: object) -> str | None:
    """The message with which the runtime refuses a value, or None."""
    try:
        TrainConfig(**({"algo": algo, "env_id": "CartPole-v1"} | nest(algo, path, value)))
    except ConfigError as error:
        return str(error)
    return None


schema_of = functools.cache(config_schema)


def field_schema(algo: str, path: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of one field, and the whole it refers into."""
    root = schema_of(algo)
    found: Any = root
    for key in path:
        while "$ref" in found or "anyOf" in found:
            branches = found.get("anyOf", [found])
            found = resolve(next(branch for branch in branches if "$ref" in branch), root)
        found = found["properties"][key]
    return found, root


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_refuses_a_wrong_type_by_name(section: str) -> None:
    for algo, path in SECTIONS[section]:
        with about(algo, path):
            refuses_wrong_types(algo, path)


def refuses_wrong_types(algo: str, path: tuple[str, ...]) -> None:
    schema, root = field_schema(algo, path)
    kinds = allowed_kinds(schema, root)
    kinds |= {"integer"} if "number" in kinds else set()
    wrong = [value for kind, value in CANDIDATES.items() if kind not in kinds]
    assert wrong
    if "null" not in kinds:
        wrong.append(None)
    for value in wrong:
        message = try_value(algo, path, value)
        assert message is not None, f"{value!r} was taken"
        assert message.startswith(".".join(path))
        assert ("null" if value is None else repr(value)) in message


@pytest.mark.parametrize("section", SECTIONS)
def test_every_bound_is_kept_at_and_beyond_it(section: str) -> None:
    for algo, path in SECTIONS[section]:
        with about(algo, path):
            keeps_bounds(algo, path)


def keeps_bounds(algo: str, path: tuple[str, ...]) -> None:
    schema, _ = field_schema(algo, path)
    for branch in schema.get("anyOf", [schema]):
        bounds = [("minimum", -1), ("maximum", 1)]
        bounds += [("exclusiveMinimum", 0), ("exclusiveMaximum", 0)]
        for keyword, beyond in [bound for bound in bounds if bound[0] in branch]:
            bound = branch[keyword]
            # Next to 1e30 a difference of 1 is none.
            value = bound + beyond * max(1, abs(bound) if isinstance(bound, float) else 0)
            message = try_value(algo, path, value)
            assert message is not None, f"{value!r} was taken"
            assert message.startswith(".".join(path))
            assert message.endswith(f"got {value!r}")
            if beyond:
                assert try_value(algo, path, branch[keyword]) is None


@pytest.mark.parametrize(
    ("algo", "key", "value", "rule"),
    [
        ("sac", "num_envs", 0, ">= 1"),
        ("sac", "log_interval", 0, ">= 1"),
        ("sac", "keep_checkpoints", 0, ">= 1"),
        ("sac", "checkpoint_interval", -1, ">= 0"),
        ("sac", "checkpoint_minutes", 0, "> 0"),
        ("sac", "algo_kwargs.learning_rate", 0, "> 0"),
        ("sac", "algo_kwargs.alpha", 0, "> 0 or 'auto'"),
        ("sac", "algo_kwargs.gamma", 1.01, "<= 1"),
        ("sac", "algo_kwargs.num_critics", 0, ">= 1"),
        ("ppo", "algo_kwargs.clip_coef", 0, "> 0"),
        ("ppo", "algo_kwargs.gae_lambda", 1.5, "<= 1"),
        ("ppo", "algo_kwargs.ent_coef", -0.1, ">= 0"),
        ("dqn", "algo_kwargs.epsilon_start", 2, "<= 1"),
        ("dqn", "algo_kwargs.n_step", 0, ">= 1"),
        ("dqn", "algo_kwargs.target_update_interval", 0, ">= 1"),
    ],
)
def test_the_bounds_are_those_that_make_sense(
    algo: str, key: str, value: object, rule: str
) -> None:
    assert try_value(algo, tuple(key.split(".")), value) == f"{key} must be {rule}, got {value}"


@pytest.mark.parametrize("section", SECTIONS)
def test_schema_and_runtime_agree_on_every_field(section: str) -> None:
    for algo, path in SECTIONS[section]:
        if path == ("algo",):
            continue  # the schema is of one algorithm, the runtime takes any
        schema, root = field_schema(algo, path)
        for value in POOL:
            message = try_value(algo, path, value)
            agree = accepts(schema, value, root) == (message is None)
            assert agree, f"{algo}: {'.'.join(path)}: {value!r}: {message}"


@pytest.mark.parametrize("preset", preset_names())
def test_the_schema_takes_every_preset_and_its_resolved_form(preset: str) -> None:
    config = load_config(preset)
    schema = config_schema(config.algo)
    written = yaml.safe_load((Path(__file__).parents[2] / f"configs/{preset}.yaml").read_text())
    assert accepts(schema, written, schema)
    assert accepts(schema, config.resolved(), schema)
    assert not accepts(schema, {**written, "total_timestep": 1}, schema)
    assert not accepts(schema, {**written, "algo_kwargs": {"no_such_key": 1}}, schema)
    assert not accepts(schema, {"algo": config.algo}, schema)


def test_the_schema_helps_an_editor(algo: str) -> None:
    schema = config_schema(algo)
    settings = resolve(schema["properties"]["algo_kwargs"], schema)
    assert schema["additionalProperties"] is False
    assert settings["additionalProperties"] is False
    for name, field in {**schema["properties"], **settings["properties"]}.items():
        assert field["description"], f"{name} has no help text"
