"""Plain data from files, and models made of it, with errors that name the file and the field."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from switch_configs.errors import DeviceError, PlanError

__all__ = ["read_document", "validated"]

FILE_LIMIT = 1 << 26


def read_document(path: str | os.PathLike[str]) -> Any:
    """Plain data of a YAML or JSON file. YAML needs the `switch` extra; JSON does not."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(f"cannot read it: {reason}", where=str(path), remedy="name an existing file") from None
    if len(raw) > FILE_LIMIT:
        raise PlanError(f"larger than {FILE_LIMIT >> 20} MiB", where=str(path), remedy="check the file name")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"not text: byte {error.start} is not UTF-8", where=str(path), remedy="name a YAML or JSON file"
        ) from None
    try:
        if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("{", "["):
            return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}", where=str(path), remedy="correct the file") from None
    try:
        import yaml
    except ImportError:
        raise DeviceError(
            "reading YAML needs PyYAML", where=str(path), remedy="pip install pyyaml, or write JSON"
        ) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())
        raise PlanError(f"not YAML: {line}", where=str(path), remedy="correct the file") from None


def validated(kind: type[Any], data: Any, where: str) -> Any:
    """`kind` made of plain data. Raises PlanError naming the first field that is wrong; a key that does not exist comes
    first, because one that is misspelt is missing, too."""
    if not isinstance(data, Mapping):
        held = "a list" if isinstance(data, list) else "one value"
        what = "is empty" if data is None else f"holds {held} and no keys"
        raise PlanError(f"the document {what}", where=where, remedy="docs/use/switch.md lists the keys")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        found.sort(key=lambda one: one["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in found[0]["loc"])
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanError(
            f"{field or 'the document'}: {_said(kind, found[0])}{more}", where=where,
            remedy="docs/use/switch.md lists fields",
        ) from None


def _said(kind: type[BaseModel], error: Mapping[str, Any]) -> str:
    """What is wrong with one field; of a key that does not exist, which one is meant."""
    if error["type"] == "missing":
        return "is missing"
    if error["type"] != "extra_forbidden":
        return str(error["msg"]).removeprefix("Value error, ")
    *path, key = error["loc"]
    here = _model_at(kind, path)
    close = difflib.get_close_matches(str(key), _keys(here), 1)
    if close:
        return f"is not a key: did you mean {close[0]}?"
    elsewhere = [name for name, model in _tables(kind, "") if key in _keys(model)]
    return f"is not a key here, but of {' and of '.join(elsewhere)}" if elsewhere else "is not a key"


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(kind: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model of the table at a path of keys and list positions."""
    for part in path:
        if isinstance(part, str):
            inner = next(field for name, field in kind.model_fields.items() if part in (name, field.alias))
            kind = next(_models(inner.annotation))
    return kind


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models inside a field's annotation: list[Leaf] has Leaf."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _tables(kind: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(path, model) of a model and of those inside it."""
    yield name or "the top level", kind
    for key, field in kind.model_fields.items():
        for model in _models(field.annotation):
            yield from _tables(model, f"{name}.{key}".lstrip("."))
