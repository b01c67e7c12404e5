"""A node.toml is read and checked before anything is started."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.nodes import MOVED
from flowcheck.node.config.renewal import moved_from, renewal
from flowcheck.node.config.tokens import text_of

__all__ = ["load", "position"]

MISSPELT, MISSING = "extra_forbidden", "missing"  # as pydantic says it
NO_TABLE = "no_table"
SHAPES = {  # in words of the file, where pydantic's are Python's
    "tuple_type": "is not a list", "list_type": "is not a list",
    "too_long": "has too many entries: at most {max_length}",
    "dict_type": "is not a table", "model_type": "is not a table", "model_attributes_type": "is not a table",
    "string_type": "is not a text in quotes", "string_pattern_mismatch": "does not fit the pattern {pattern}",
}
ONE_TABLE = ("nodes", "protect", "replica", "common", "control", "api")


def load(path: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> NodeConfig:
    """note: is given what to write in place of keys that the next release does not read. Raises UserError (content) or
    EnvironmentProblem (unreadable)."""
    path = Path(path)
    try:
        text = text_of(path)
        data = tomllib.loads(text)
    except OSError as error:
        kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
        raise kind(
            f"cannot be read: {error.strerror}", where=str(path), remedy="give the node's settings with --config",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not TOML: {error}", where=str(path), remedy="docs/use/settings.md has the form") from None
    try:
        config = NodeConfig.model_validate(data)
    except ValidationError as error:
        found = [*_misspelt(data), *map(dict, error.errors(include_url=False))]
        found = [one for i, one in enumerate(found) if one["loc"] not in [other["loc"] for other in found[:i]]
                 or not one["loc"]]
        found.sort(key=lambda one: one["type"] not in (MISSPELT, NO_TABLE))
        meant = [_meant(one["loc"]) for one in found if one["type"] == MISSPELT]
        meant += [("capture",)] * (("protect",) in meant)  # a holder has none
        found = [one for one in found if one["type"] != MISSING or one["loc"] not in meant]
        captures = data.get("capture")
        several = isinstance(captures, list) and len(captures) > 1
        first, *others = ((moved_from(_key(one, several), data), _said(one)) for one in found)
        also = "".join(f"; {field}: {said}" for field, said in others[:4])
        at = position(text, first[0])
        place = f" (line {at[0]}, column {at[1]})" if at else ""
        raise UserError(
            first[1] + also + place, where=f"{path}: {first[0]}", remedy="docs/use/settings.md has every key",
        ) from None
    if text := renewal(data):
        note(f"{path}: {text}")
    return config


def _misspelt(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What pydantic says of keys that do not exist, also where switches over [nodes] cannot be resolved before it
    looks: the reason may be that [nodes] itself is misspelt."""
    for table, keys in data.items():
        if table not in NodeConfig.model_fields:
            yield {"type": MISSPELT, "loc": (table,), "msg": ""}
        elif table in ONE_TABLE and not isinstance(keys, Mapping):
            yield {"type": NO_TABLE, "loc": (table,), "msg": f"is one table: [{table}] and its keys below it"}
        elif table in ONE_TABLE:
            known = {*_keys(table), *(MOVED if table == "protect" else ())}
            yield from ({"type": MISSPELT, "loc": (table, key), "msg": ""} for key in keys if key not in known)


def position(text: str, key: str) -> tuple[int, int] | None:
    """Line and column, from 1, at which a key of valid TOML stands, or its table if it is not written out: `name`,
    `replica.slots`, `capture[1].cores`. None: neither is found where most people write it."""
    table, _, name = key.rpartition(".")
    table, number = re.sub(r"\[[0-9]+\]$", "", table), re.search(r"\[([0-9]+)\]$", table)
    wanted, seen, inside, begins = int(number[1]) if number else 0, -1, not table, None
    for line, written in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", written):
            seen += head[1] == table
            inside = head[1] == table and seen == wanted
            if inside or (not table and head[1] == name):
                begins = begins or (line, head.start(1) + 1)
        elif inside and (found := re.match(rf"\s*({re.escape(name)})\s*[=.]", written)):
            return line, found.start(1) + 1
    return begins


def _key(error: Mapping[str, Any], several: bool) -> str:
    """`replica.slots`; `capture.cores` or, of several, `capture[1].cores`; elements of a list: the list's."""
    beside = [error["ctx"]["key"]] if error["type"] == "together" else []
    table, *rest = error["loc"] or [""]
    if table not in ("capture", "follow"):
        return ".".join(map(str, [*error["loc"], *beside]))
    index = f"[{rest.pop(0)}]" if rest and isinstance(rest[0], int) else ""
    keys = [f".{part}" for part in rest[:1]]
    for key in beside:
        keys = [key if key[0] in ".[" else f".{key}"]
    return f"{table}{index if several or table == 'follow' else ''}{''.join(keys)}"


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong with one key; of one that does not exist, which one is meant."""
    if error["type"] in SHAPES:
        return SHAPES[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == MISSING and error["loc"] == ("capture",):
        return ("is missing: a node has a mirror port. A machine without one takes gradients that trainers send, with"
                " [feed]; or it holds copies of other nodes' versions, and [protect] says whose")
    if error["type"] == MISSING:
        return "is missing"
    return _near(error["loc"]) if error["type"] == MISSPELT else str(error["msg"]).removeprefix("Value error, ")


def _near(loc: Sequence[str | int]) -> str:
    """Of a key that does not exist: the one with the nearest name here, or else in another table."""
    *table, key = _names(loc)
    here = _meant(loc)
    if here is not None:
        moved = table == ["protect"] and here[-1] in MOVED
        return f"is not a key: did you mean {here[-1]}{' of [nodes]' if moved else ''}?"
    tables = {f"one of [{name}]": list(_keys(name)) for name in NodeConfig.model_fields}
    if table:
        tables["one above all tables"] = [name for name in NodeConfig.model_fields if not _keys(name)]
    if elsewhere := [where for where, keys in tables.items() if key in keys]:
        return f"is not a key here, it is {elsewhere[0]}"
    close = difflib.get_close_matches(key, {name for keys in tables.values() for name in keys}, 1, 0.75)
    where = [where for where, keys in tables.items() if close and close[0] in keys]
    return f"is not a key: did you mean {close[0]}, {where[0]}?" if close else "is not a key"


def _meant(loc: Sequence[str | int]) -> tuple[str | int, ...] | None:
    """The key of the same table whose name is nearest to one that does not exist; None: none is near."""
    *table, key = _names(loc)
    keys = [*(_keys(table[0]) if table else NodeConfig.model_fields), *(MOVED if table == ["protect"] else ())]
    close = difflib.get_close_matches(key, keys, 1)
    return (*loc[:-1], close[0]) if close else None


def _names(loc: Sequence[str | int]) -> list[str]:
    """Table and key, or the key alone, without the numbers of a list's elements."""
    return [part for part in loc if isinstance(part, str)]


def _keys(table: str) -> Iterable[str]:
    """Of a table of the file; none for a key that is not one."""
    kind: Any = NodeConfig.model_fields[table].annotation
    return getattr(next(iter(get_args(kind)), kind), "model_fields", ())
