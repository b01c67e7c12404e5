"""Keys of earlier releases, which this one reads and the next one does not: what to write in their place.

    renewal(data) -> text        of a node.toml that is valid, as it was written; "": it has none of them
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowcheck.control.address import host_and_port, text_of
from flowcheck.node.config.nodes import MOVED, SWITCHES, Address, Kind, own_ports, resolved

__all__ = ["moved_from", "renewal"]

JOURNAL = ("protect", "journal")
RESYNC = (
    "replica.resync goes: a node asks for ranges wherever a job qualifies for them, and for a whole state where it does"
    " not or replica.slots is 2"
)


def renewal(data: Mapping[str, Any]) -> str:
    """Which keys are old, and in lines that can be pasted what they are in this release's form."""
    lists = [key for key in (*SWITCHES, JOURNAL) if _is_old(data, key)]
    moved = [key for key in MOVED if key in data.get("protect", {})]
    old = [".".join(key) for key in lists] + [f"protect.{key}" for key in moved]
    said = [RESYNC] if "resync" in data.get("replica", {}) else []
    if old:
        text = "\n".join(_written(_renewed(data, lists, moved)))
        said.insert(0, f"{', '.join(old)}: the next release does not read this form. The same in the new one:\n{text}")
    return "\n".join(said)


def moved_from(key: str, data: Mapping[str, Any]) -> str:
    """Where a key stands in the file: one of [nodes] may still be written in [protect]."""
    table, _, name = key.partition(".")
    keys = data.get("protect")
    is_old = table == "nodes" and name in MOVED and isinstance(keys, Mapping) and name in keys
    return f"protect.{name}" if is_old else key


def _is_old(data: Mapping[str, Any], key: tuple[str, str]) -> bool:
    given = data.get(key[0], {}).get(key[1])
    listed = data.get("nodes", {}).get("addresses")
    return isinstance(given, dict) or (isinstance(given, list) and bool(given) and not listed)


def _renewed(data: Mapping[str, Any], lists: Iterable[tuple[str, str]], moved: Iterable[str]) -> dict[str, Any]:
    """Tables with what takes the place of the old keys."""
    protect, nodes = data.get("protect", {}), dict(data.get("nodes", {}))
    nodes |= {key: protect[key] for key in moved}
    found = {key: _addresses(data, key) for key in lists}
    if found and not nodes.get("addresses"):
        nodes["addresses"] = list(_machines(data, found))
    made: dict[str, Any] = {"nodes": nodes}
    for (table, key), wanted in found.items():
        for given in (True, [_name(at, nodes["addresses"]) for at in wanted]):
            rest = {**data.get(table, {}), **made.get(table, {}), key: given}
            if table == "protect":
                rest = {name: value for name, value in rest.items() if name not in moved}
            try:
                same = _addresses(resolved({**data, **made, table: rest}), (table, key)) == wanted
            except ValueError:
                same = False
            if same:
                break
        else:  # nodes.addresses says otherwise: as it was
            given = data[table][key]
        made.setdefault(table, {})[key] = given
    return {table: keys for table, keys in made.items() if keys}


def _addresses(data: Mapping[str, Any], key: tuple[str, str]) -> list[Address]:
    """Of an old list, and of what a switch has become; of a journal those of APIs."""
    return [at for text in data[key[0]][key[1]] if (at := host_and_port(text)) is not None]


def _machines(data: Mapping[str, Any], found: Mapping[tuple[str, str], list[Address]]) -> Iterator[Any]:
    """Entries of nodes.addresses: a host where its ports are this node's own, or a table."""
    pairs = {host_and_port(api): host_and_port(control) for api, control in data.get("protect", {}).get(
        "journal", {}).items()} if JOURNAL in found else {}
    kinds: dict[Kind, list[Address]] = {"api": [], "control": []}
    for key, addresses in found.items():
        kind = SWITCHES.get(key, "api")
        kinds[kind] += [at for at in addresses if at not in kinds[kind]]
    others = [at for at in kinds["control"] if at not in pairs.values()]
    own = own_ports(data)
    for api in kinds["api"]:
        control = pairs.get(api)
        same = [at for at in others if at[0] == api[0]]
        if control is None and len(same) == 1 and [at[0] for at in kinds["api"]].count(api[0]) == 1:
            control = same[0]
            others.remove(control)
        yield _entry({"control": control, "api": api}, own)
    for at in others:
        yield _entry({"control": at, "api": None}, own)


def _entry(ports: Mapping[Kind, Address | None], own: Mapping[Kind, Address | None]) -> Any:
    known = {kind: at for kind, at in ports.items() if at is not None}
    listens = {kind: at[1] if (at := own[kind]) is not None else None for kind in known}
    if len(known) == 2 and all(at[1] == listens[kind] for kind, at in known.items()):
        return next(iter(known.values()))[0]
    return {kind: text_of(*at) for kind, at in known.items()}


def _name(at: Address, machines: Iterable[Any]) -> str:
    return at[0] if at[0] in machines else text_of(*at)


def _written(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for table, keys in tables.items():
        yield f"[{table}]"
        yield from (f"{key} = {_value(value)}" for key, value in keys.items())


def _value(value: Any) -> str:
    """As TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")
