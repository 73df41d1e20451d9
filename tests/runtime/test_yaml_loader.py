"""Strict YAML: what values mean, and what is refused, with file and line."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from rl_training.errors import ConfigError
from rl_training.experiment.yaml_loader import load_yaml, parse_scalar, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("5.", 5.0),
        (".5", 0.5),
        ("-2", -2),
        ("0", 0),
        ("1_000", 1000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("00143", "00143"),
        ("0o17", "0o17"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'3'", "3"),
        ("[1, 2.5, a, null]", [1, 2.5, "a", None]),
        ("{a: 1, b: {c: 2}}", {"a": 1, "b": {"c": 2}}),
    ],
)
def test_a_value_means_what_it_looks_like(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}", "file").data["key"]
    assert found == value
    assert type(found) is type(value)
    assert parse_scalar(text) == value


def test_infinity_and_nan_are_read_as_numbers() -> None:
    data = parse_yaml("a: .inf\nb: -.inf\nc: .nan\nd: 1e999", "file").data
    assert (data["a"], data["b"], data["d"]) == (math.inf, -math.inf, math.inf)
    assert math.isnan(data["c"])


def test_every_key_knows_its_line() -> None:
    lines = parse_yaml("# comment\na: 1\nb:\n  c: 2\n  d: [3]\n", "file").lines
    assert lines == {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "d"): 5}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, "a is given twice"),
        ("a: {b: 1, b: 2}", 1, "a.b is given twice"),
        ("a: 1\nb: [1\nc: 2", 3, "not valid YAML"),
        ("a: 1\n\tb: 2", 2, "not valid YAML"),
        ("a: 1\nb: 2: 3", 2, "not valid YAML"),
        ("a: *nowhere", 1, "not valid YAML"),
        ("a: 1\n---\nb: 2", 2, "found another document"),
        ("? [a, b]\n: 1", 1, "a key must be a word"),
        ("a: 1\nb: !!python/object:os.system ls", 2, "python/object:os.system is not allowed"),
        ("a: !!python/object/apply:os.system [ls]", 1, "is not allowed"),
        ("a: !!python/object:os.system {b: ls}", 1, "is not allowed"),
        ("!!python/name:os.system a: 1", 1, "is not allowed"),
        ("a: !!set {b, c}", 1, "is not allowed"),
        ("a: !own 3", 1, "is not allowed"),
        ("a: !!binary aGk=", 1, "is not allowed"),
        ("a: !!int abc", 1, "'abc' is not an integer"),
        ("a: !!float abc", 1, "'abc' is not a number"),
        ("a: !!bool abc", 1, "'abc' is not true or false"),
        ("a: " + "9" * 5000, 1, "is not an integer"),
    ],
)
def test_what_is_refused_names_file_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "some.yaml")
    message = str(caught.value)
    assert message.startswith(f"some.yaml:{line}: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "- 1\n- 2", "3", "text", "# only a comment"])
def test_the_top_level_must_be_a_mapping(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^some\.yaml: must hold keys and values"):
        parse_yaml(text, "some.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 50 + "]" * 50,
        "a: " + "[" * 900 + "]" * 900,
        "a: &a [*a]",
        "a: &a {b: *a}",
    ],
)
def test_endless_nesting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_yaml(text, "some.yaml")


def test_aliases_of_aliases_cannot_fill_the_memory() -> None:
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    lines.insert(0, "a0: &a0 [x, x, x, x, x, x, x, x, x, x]")
    start = time.monotonic()
    with pytest.raises(ConfigError, match="holds more than"):
        parse_yaml("\n".join(lines), "some.yaml")
    assert time.monotonic() - start < 5


def test_a_character_that_cannot_stand_there_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="#x0000") as caught:
        parse_yaml("a: \0", "some.yaml")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothere\.yaml: cannot be read"):
        load_yaml(tmp_path / "nothere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8"):
        load_yaml(tmp_path / "latin.yaml")


def test_text_that_is_no_yaml_stays_text_on_the_command_line() -> None:
    assert parse_scalar("[1") == "[1"
    assert parse_scalar("a: b: c") == "a: b: c"


@pytest.mark.parametrize("text", ["!!python/object:os.system ls", "!!int abc", "[" * 900])
def test_what_the_command_line_refuses_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set seed: "):
        parse_scalar(text, "--set seed")
