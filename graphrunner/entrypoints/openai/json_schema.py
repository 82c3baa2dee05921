"""A JSON schema's own shape, checked at the door, so that a wrong one is a 400 and not a failed request.

Whether the engine's grammar compiler supports every keyword is its business; it may still refuse a schema.
"""

from __future__ import annotations

import re

from graphrunner.entrypoints.openai.errors import ApiError, bad_request

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_NODES = 5000
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_schema(schema: object, param: str) -> None:
    """Raises ApiError that names `param` and the place inside the schema."""
    pending: list[tuple[object, str]] = [(schema, "")]
    num_nodes = 0
    while pending:
        node, place = pending.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise bad_request(param, f"the schema has more than {MAX_NODES} parts", "invalid_json_schema")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _wrong(param, place, "must be an object")
        _check_node(node, param, place)
        for key in _MAPS:
            pending += [(child, f"{place}/{key}/{name}") for name, child in node.get(key, {}).items()]
        for key in _LISTS:
            pending += [(child, f"{place}/{key}/{index}") for index, child in enumerate(node.get(key, ()))]
        pending += [(node[key], f"{place}/{key}") for key in _SINGLES if key in node]


def _check_node(node: dict[str, object], param: str, place: str) -> None:
    kinds = node.get("type", ())
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if not isinstance(kind, str) or kind not in TYPES:
            raise _wrong(param, f"{place}/type", f"must be one of {', '.join(sorted(TYPES))}")
    for key in _MAPS:
        if not isinstance(node.get(key, {}), dict):
            raise _wrong(param, f"{place}/{key}", "must be an object")
    for key in (*_LISTS, "enum"):
        if key in node and (not isinstance(node[key], list) or not node[key]):
            raise _wrong(param, f"{place}/{key}", "must be a list that is not empty")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(param, f"{place}/required", "must be a list of names")
    for key in _COUNTS:
        value = node.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _wrong(param, f"{place}/{key}", "must be a whole number from 0")
    for key in _NUMBERS:
        if isinstance(node.get(key, 0), bool) or not isinstance(node.get(key, 0), (int, float)):
            raise _wrong(param, f"{place}/{key}", "must be a number")
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _wrong(param, f"{place}/$ref", "must point into the schema itself")
    _check_pattern(node, param, place)


def _check_pattern(node: dict[str, object], param: str, place: str) -> None:
    pattern = node.get("pattern", "")
    try:
        re.compile(pattern if isinstance(pattern, str) else "(")
    except (re.error, RecursionError, OverflowError):
        raise _wrong(param, f"{place}/pattern", "must be a regular expression") from None


def _wrong(param: str, place: str, problem: str) -> ApiError:
    return bad_request(param, f"at {place[:200] or 'its top'}: {problem}", "invalid_json_schema")
