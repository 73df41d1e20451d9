"""A check of values against the part of JSON schema that our schemas use, written on its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_HANDLED = {
    *("$ref", "anyOf", "type", "const", "enum", "pattern", "items", "uniqueItems"),
    *("minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "not"),
    *("properties", "required", "additionalProperties"),
}
_ANNOTATIONS = {"title", "description", "default", "$defs"}


def accepts(schema: Schema, value: object, root: Schema) -> bool:
    """Whether `value` fits `schema`; a keyword that is not known here is an error."""
    unknown = schema.keys() - _HANDLED - _ANNOTATIONS
    assert not unknown, f"teach this check the keywords {unknown}"
    checks = (_fits_reference, _fits_kind, _fits_choice, _fits_bounds, _fits_list, _fits_mapping)
    return all(check(schema, value, root) for check in checks)


def allowed_kinds(schema: Schema, root: Schema) -> set[str]:
    """Names of the JSON types a schema allows."""
    if "$ref" in schema:
        return allowed_kinds(resolve(schema, root), root)
    if "anyOf" in schema:
        return set().union(*(allowed_kinds(branch, root) for branch in schema["anyOf"]))
    return {schema["type"]}


def resolve(schema: Schema, root: Schema) -> Schema:
    """Follow a reference into `$defs`."""
    found: Schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return found


def _fits_reference(schema: Schema, value: object, root: Schema) -> bool:
    if "$ref" in schema and not accepts(resolve(schema, root), value, root):
        return False
    return "anyOf" not in schema or any(accepts(branch, value, root) for branch in schema["anyOf"])


def _fits_kind(schema: Schema, value: object, root: Schema) -> bool:
    if "type" not in schema:
        return True
    # In Python a bool is an int; in JSON it is not.
    if isinstance(value, bool):
        return bool(schema["type"] == "boolean")
    return isinstance(value, _KINDS[schema["type"]])


def _fits_choice(schema: Schema, value: object, root: Schema) -> bool:
    if "const" in schema and value != schema["const"]:
        return False
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return False
    return "enum" not in schema or value in schema["enum"]


def _fits_bounds(schema: Schema, value: object, root: Schema) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
        and ("not" not in schema or not accepts(schema["not"], value, root))
    )


def _fits_list(schema: Schema, value: object, root: Schema) -> bool:
    if not isinstance(value, list):
        return True
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    if schema.get("uniqueItems") and len({repr(item) for item in value}) != len(value):
        return False
    return all(accepts(schema.get("items", {}), item, root) for item in value)


def _fits_mapping(schema: Schema, value: object, root: Schema) -> bool:
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if any(key not in value for key in schema.get("required", ())):
        return False
    if schema.get("additionalProperties") is False and value.keys() - properties.keys():
        return False
    return all(accepts(properties.get(key, {}), item, root) for key, item in value.items())
