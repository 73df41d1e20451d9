"""Strict, documented settings: one base class, and one sentence per mistake.

Defaults, bounds and help text live on the field and nowhere else.  Unknown keys, wrong types and
values out of range are errors; nothing is coerced silently, except that a list may stand for a
tuple and `1e5` for the integer it equals.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import ErrorDetails

from rl_training.errors import ConfigError
from rl_training.foreign_names import foreign_hint

Model = TypeVar("Model", bound=BaseModel)
Hint = Callable[[str, Collection[str]], str]
"""Given an unknown key and the fields there are, the end of a sentence that says what is meant."""
MOST_LISTED = 40
"""Names that one message may hold."""
MOST_SHOWN = 200
"""Characters of a wrong value that a message shows."""
MOST_MISTAKES = 20
"""Mistakes that one message describes."""


MOST_ENTRIES = 10_000
"""Entries of a list, each of which may be a mistake to be described."""


def never(reason: str) -> AfterValidator:
    """Refuse true where a method inherits a switch that it cannot turn on; says why.

    Such a field has `Field(json_schema_extra={"const": False})` beside it.
    """

    def check(asked: bool) -> bool:
        if asked:
            raise ValueError(f"must be false: {reason}")
        return asked

    return AfterValidator(check)


def list_to_tuple(value: object) -> object:
    """Return a list as the tuple that a frozen model keeps."""
    if isinstance(value, list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"must have at most {MOST_ENTRIES} entries, got {len(value)}")
    return tuple(value) if isinstance(value, list) else value


def whole_number(value: object) -> object:
    """Return a float that equals an integer, such as `1e5`, as that integer."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole and isinstance(value, float) else value


Whole = BeforeValidator(whole_number)
"""Added to the type of an integer: YAML reads `1e5` as a float, but people mean a count by it."""
LARGEST_INT = 10**12
"""No run has more steps and no memory more rows; products of a few such numbers can be counted."""
LARGEST_FLOAT = 1e30
"""Its like of numbers: float32, in which learners compute, ends at 3.4e38."""
MOST_LAYERS = 100
"""Layers of one network."""

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT), Whole]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT), Whole]
Seed = Annotated[int, Field(ge=0, lt=2**63), Whole]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS), Whole]
Number = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(ge=0, le=1)]
Sizes = Annotated[
    tuple[PositiveInt, ...],
    Field(max_length=MOST_LAYERS),
    BeforeValidator(
        list_to_tuple,
        json_schema_input_type=Annotated[list[PositiveInt], Field(max_length=MOST_LAYERS)],
    ),
]
Texts = Annotated[tuple[str, ...], BeforeValidator(list_to_tuple, json_schema_input_type=list[str])]
Integers = Annotated[
    tuple[NonNegativeInt, ...],
    BeforeValidator(list_to_tuple, json_schema_input_type=list[NonNegativeInt]),
]
Seeds = Annotated[
    tuple[Seed, ...], BeforeValidator(list_to_tuple, json_schema_input_type=list[Seed])
]
Fractions = Annotated[
    tuple[Fraction, ...], BeforeValidator(list_to_tuple, json_schema_input_type=list[Fraction])
]


class StrictModel(BaseModel):
    """Frozen settings that refuse unknown keys, wrong types, NaN and values out of range."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
        protected_namespaces=(),
    )


class Settings(StrictModel):
    """Settings a user writes; a mistake in them is a `ConfigError`, never a traceback."""

    error_prefix: ClassVar[str] = ""
    why_not: ClassVar[Mapping[str, str]] = {}
    """Settings of other methods that this one cannot have, each with the reason."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe_errors(type(self), error)) from None


def hint_for(key: str, allowed: Collection[str]) -> str:
    """Say what an unknown key may mean: another library's name for ours, or the nearest match."""
    return foreign_hint(key, allowed) or suggest(key, allowed)


def parse(
    model: type[Model], values: Mapping[str, Any], where: str = "", hint: Hint = hint_for
) -> Model:
    """Build `model` from a mapping.

    Args:
        model: The settings class.
        values: What the user wrote.
        where: What to put before the key in a message, such as `file.yaml: algo_kwargs.`.
        hint: What to say about an unknown key.

    Raises:
        ConfigError: Naming every wrong key, its value and what is allowed.
    """
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{where}{key!r} is not a key: keys are words.")
    instance = model.__new__(model)
    try:
        # Past `Settings.__init__`, so that the messages can say where the values are.
        model.__pydantic_validator__.validate_python(dict(values), self_instance=instance)
        return instance
    except ValidationError as error:
        raise ConfigError(describe_errors(model, error, where, hint)) from None


def describe_errors(
    model: type[BaseModel], error: ValidationError, where: str = "", hint: Hint = hint_for
) -> str:
    """Turn a validation error into one sentence per wrong key."""
    grouped: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_path_of(model, detail["loc"]), []).append(detail)
    shown = list(grouped.items())[:MOST_MISTAKES]
    more = f"; and {len(grouped) - len(shown)} more mistakes" if len(grouped) > len(shown) else ""
    sentences = (_sentence(model, path, details, where, hint) for path, details in shown)
    return "; ".join(sentences) + more


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return ` (did you mean x?)` for the nearest match, or what is allowed if that is short."""
    options = {option.lower(): option for option in sorted(allowed)}
    close = difflib.get_close_matches(word.lower(), options, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {options[close[0]]}?)"
    few = 0 < len(options) <= MOST_LISTED
    return f" (allowed: {', '.join(options.values())})" if few else ""


def _path_of(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Keep the parts of a location that are keys of the user, not names of union branches."""
    parts: list[str] = []
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif current is None or part in current.model_fields or not parts:
            if current is None and parts:
                break
            parts.append(f".{part}" if parts else part)
            current = _nested_model(current, part)
        elif part[:1].isalpha() and part.isidentifier() and current is not None:
            parts.append(f".{part}")
            current = None
    return "".join(parts)


def _nested_model(model: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    if model is None or name not in model.model_fields:
        return None
    annotation = model.model_fields[name].annotation
    candidates = get_args(annotation) if get_origin(annotation) is not None else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _sentence(
    model: type[BaseModel], path: str, details: list[ErrorDetails], where: str, hint: Hint
) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        owner, allowed = _owner_of(model, path)
        key = path.rsplit(".", 1)[-1]
        reason = getattr(model, "why_not", {}).get(path)
        if reason is not None:
            return f"{where}{path} is not a setting of this method: {reason}; leave it out"
        return f"{where}{path} is not a field of {owner}{hint(key, allowed)}"
    if first["type"] == "missing":
        return f"{where}{path} is required: give it a value"
    if first["type"] == "value_error":
        return f"{where}{path}{': ' if path else ''}{first['ctx']['error']}"
    rules = dict.fromkeys(_rule(detail) for detail in details)
    value = "null" if first["input"] is None else repr(first["input"])
    if len(value) > MOST_SHOWN:
        value = f"{value[:MOST_SHOWN]}..."
    return f"{where}{path} must be {' or '.join(rules)}, got {value}"


def _owner_of(model: type[BaseModel], path: str) -> tuple[str, list[str]]:
    owner = model
    for part in path.split(".")[:-1]:
        nested = _nested_model(owner, part.split("[")[0])
        owner = nested or owner
    return owner.__name__, list(owner.model_fields)


_SYMBOLS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "none_required": "null",
}


def _rule(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind in _SYMBOLS:
        symbol, key = _SYMBOLS[kind]
        bound = context[key]
        return f"{symbol} {bound}" if isinstance(bound, int) else f"{symbol} {bound:g}"
    if kind == "literal_error":
        expected: str = context["expected"]
        return f"one of {expected}" if " or " in expected else expected
    return _KINDS.get(kind, detail["msg"].removeprefix("Input should be ").lower())


def field_rule(annotation: object) -> str:
    """Say a field's type in words, for tables in `describe` and the docs."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return field_rule(get_args(annotation)[0])
    if origin is tuple:
        return f"list of {field_rule(get_args(annotation)[0])}"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(field_rule(part) for part in get_args(annotation))
    if str(origin) == "typing.Literal":
        return " / ".join(str(part) for part in get_args(annotation))
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))
