"""JSON text <-> dataclasses, strictly, and the schema of the same dataclasses. Knows nothing of jobs.

    parse(text) -> plain data        refuses what json.loads lets through: NaN, duplicate keys, huge numbers
    build(kind, data, place)         plain data -> dataclass, list, dict, union or scalar
    schema(kind)                     JSON schema (draft 2020-12)

Every refusal is a UserError whose `where` is "file: field.path[index]". Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flowcheck.errors import UserError

__all__ = ["Place", "build", "parse", "schema", "shown"]

# Beyond this an integer is a typing error, and Python's own conversion limits come into play.
INTEGER_LIMIT = 1 << 63


def shown(value: Any) -> str:
    """A value as it may stand in a message: JSON words, short, printable, whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < INTEGER_LIMIT else "a number of more than 63 bits"
    if isinstance(value, str):
        # ascii: lone surrogates and terminal escapes must not reach a terminal.
        text = ascii(value) if not value.isprintable() else repr(value)
        return text if len(text) <= 80 else f"{text[:60]}... ({len(value)} characters)"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Place:
    """A field of a file, for messages: Place("job.json") / "flows" / 3 is "job.json: flows[3]"."""

    file: str
    path: str = ""

    def __truediv__(self, step: str | int) -> Place:
        if isinstance(step, int):
            return Place(self.file, f"{self.path}[{step}]")
        step = step if step.isprintable() and len(step) <= 80 else shown(step)
        return Place(self.file, f"{self.path}.{step}" if self.path else step)

    def __str__(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def fail(self, what: str, remedy: str = "") -> typing.NoReturn:
        remedy = remedy or "correct this field; docs/reference/manifest.md describes each one"
        raise UserError(what, where=str(self), remedy=remedy)

    def one_of(self, value: str, allowed: Iterable[str]) -> None:
        if value not in allowed:
            self.fail(f"{shown(value)} is not one of {', '.join(a for a in allowed if a)}")

    def between(self, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            self.fail(f"{value} is not between {low} and {high}")


# -- text to plain data ------------------------------------------------------------------------------------


def parse(text: str, file: str) -> Any:
    """Strict JSON. Raises UserError with line and column where Python's parser knows them."""
    remedy = "docs/reference/manifest.md shows the form; write a half-written file again"

    def constant(name: str) -> typing.NoReturn:
        raise UserError(f"{name} is not JSON", where=file, remedy=remedy)

    def integer(digits: str) -> int:
        # int() itself refuses more than some thousand digits, with an error of its own kind.
        if len(digits) > 20 or not -INTEGER_LIMIT < int(digits) < INTEGER_LIMIT:
            raise UserError("a whole number of more than 63 bits", where=file, remedy=remedy)
        return int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise UserError(f"{shown(digits)} is too large for a number", where=file, remedy=remedy)
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise UserError(f"the key {shown(twice)} appears twice in one object", where=file, remedy=remedy)
        return found

    try:
        return json.loads(
            text, parse_constant=constant, parse_int=integer, parse_float=number, object_pairs_hook=unique
        )
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error}"
    except RecursionError:
        problem = "nested too deeply to be a manifest"
    raise UserError(problem, where=file, remedy=remedy)


# -- plain data to dataclasses -----------------------------------------------------------------------------


def build(kind: Any, data: Any, place: Place) -> Any:
    """`data` as a `kind`: a dataclass, list[x], dict[str, x], x | None, int, float, bool, str or Any."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in typing.get_args(kind):
            return None
        (inner,) = [a for a in typing.get_args(kind) if a is not type(None)]
        return build(inner, data, place)
    if origin is list:
        if not isinstance(data, list):
            place.fail(f"expected a list, found {shown(data)}")
        (inner,) = typing.get_args(kind)
        return data if inner is Any else [build(inner, item, place / i) for i, item in enumerate(data)]
    if origin is dict:
        if not isinstance(data, dict):
            place.fail(f"expected an object, found {shown(data)}")
        _, inner = typing.get_args(kind)
        return {build(str, k, place): build(inner, v, place / str(k)) for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, place)
    return _build_scalar(kind, data, place)


def _build_dataclass(kind: Any, data: Any, place: Place) -> Any:
    if not isinstance(data, dict):
        place.fail(f"expected an object, found {shown(data)}")
    hints, fields = _fields(kind)
    for key in data:
        if key not in fields:
            place.fail(f"unknown field {shown(key)}; known: {', '.join(fields)}")
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = build(hints[name], data[name], place / name)
        elif _required(spec):
            place.fail(f"required field {name!r} is missing")
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """Types and fields of a dataclass, by name: to find them takes longer than all else that a short message does."""
    return typing.get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}


def _build_scalar(kind: Any, data: Any, place: Place) -> Any:
    if kind is Any:
        return data
    if kind is bool:
        if not isinstance(data, bool):
            place.fail(f"expected true or false, found {shown(data)}")
    elif kind is int:
        if isinstance(data, bool) or not isinstance(data, int):
            place.fail(f"expected a whole number, found {shown(data)}")
        if abs(data) >= INTEGER_LIMIT:
            place.fail(f"{shown(data)} is out of range")
    elif kind is float:
        if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data):
            place.fail(f"expected a number, found {shown(data)}")
        return float(data)
    elif not isinstance(data, str):
        place.fail(f"expected a string, found {shown(data)}")
    elif not data.isprintable():
        place.fail(f"{shown(data)} has unprintable characters")
    return data


def _required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


# -- schema ------------------------------------------------------------------------------------------------


def schema(root: Any, title: str) -> dict[str, Any]:
    """JSON schema of a dataclass. A field's metadata {"choices": (...)} becomes an enum."""
    definitions: dict[str, Any] = {}

    def of(kind: Any) -> dict[str, Any]:
        origin = typing.get_origin(kind)
        if origin in (types.UnionType, typing.Union):
            return {"anyOf": [of(a) for a in typing.get_args(kind)]}
        if origin is list:
            return {"type": "array", "items": of(typing.get_args(kind)[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": of(typing.get_args(kind)[1])}
        if dataclasses.is_dataclass(kind):
            name = getattr(kind, "__name__", str(kind))
            if name not in definitions:
                definitions[name] = {}
                hints = typing.get_type_hints(kind)
                fields = dataclasses.fields(kind)
                definitions[name] = {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {f.name: member(of(hints[f.name]), f) for f in fields},
                    "required": [f.name for f in fields if _required(f)],
                }
            return {"$ref": f"#/$defs/{name}"}
        if kind is Any:
            return {}
        return {"type": {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}[kind]}

    def member(form: dict[str, Any], spec: dataclasses.Field[Any]) -> dict[str, Any]:
        out = dict(form)
        if "choices" in spec.metadata:
            out = {"enum": [*spec.metadata["choices"], *([None] if "anyOf" in form else [])]}
        if not _required(spec):
            made = spec.default
            if spec.default_factory is not dataclasses.MISSING:
                made = spec.default_factory()
            out["default"] = dataclasses.asdict(made) if dataclasses.is_dataclass(made) else made  # type: ignore[arg-type]
        return out

    top = of(root)
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, **top, "$defs": definitions}
