"""Keys of earlier releases, which this one reads and the next one does not: what to write in their place.

    renewal(data) -> text        of a node.toml that is valid, as it was written; "": it has none of them
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowcheck.control.address import host_and_port, text_of
from flowcheck.node.config.nodes import MOVED, PORTS, SWITCHES, Address, Kind, Machine, own_ports, resolved
from flowcheck.node.config.table import known

__all__ = ["moved_from", "renewal"]

JOURNAL = ("protect", "journal")
RESYNC = (
    "replica.resync goes, delete the line: a node asks for ranges wherever a job qualifies for them, and for a whole"
    " state where it does not or replica.slots is 2"
)


def renewal(data: Mapping[str, Any]) -> str:
    """Which keys are old, and for each table the lines that take their place."""
    lists = [key for key in (*SWITCHES, JOURNAL) if _is_old(data, key)]
    moved = [key for key in MOVED if key in data.get("protect", {})]
    said = [RESYNC] if "resync" in data.get("replica", {}) else []
    while lists or moved:
        made = _renewed(data, lists, moved)
        if made is None:  # nodes.addresses says otherwise: only who wrote both knows which of them is right
            key = JOURNAL if JOURNAL in lists else lists[-1]
            lists.remove(key)
            said.append(f"{'.'.join(key)}: the next release does not read this form, and nodes.addresses has other"
                        f" ports for a machine of it: write that machine there as {PORTS}, then a list of hosts here")
            continue
        old = ", ".join(map(".".join, [*lists, *(("protect", key) for key in moved)]))
        said.insert(0, f"{old}: the next release does not read this form. Remove these keys, and put these lines into"
                       " their tables, in place of any with the same key:\n" + "\n".join(_written(made)))
        break
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


def _renewed(
    data: Mapping[str, Any], lists: Sequence[tuple[str, str]], moved: Sequence[str],
) -> dict[str, dict[str, Any]] | None:
    """Tables with what takes the place of the old keys, and nothing that is there already; None: no lines say the same.
    """
    listed = data.get("nodes", {}).get("addresses") or []
    offers = [listed] if listed or not lists else []
    if JOURNAL in lists and listed:
        offers.append(list(_amended(data, listed)))
    elif lists and not listed:
        offers.append(list(_machines(data, {key: _meant(data, key) for key in lists})))
    for addresses in offers:
        nodes = {key: data["protect"][key] for key in moved}
        if addresses != listed:
            nodes["addresses"] = addresses
        made: dict[str, dict[str, Any]] = {"nodes": nodes}
        for table, key in lists:
            names = [_name(at[0], addresses) for at in _meant(data, (table, key))]
            for given in (True, names):
                tried = {**made, table: {**made.get(table, {}), key: given}}
                if _same(data, _replaced(data, tried, moved), [(table, key)]):
                    made = tried
                    break
            else:
                break
        else:
            if _same(data, _replaced(data, made, moved), [*SWITCHES, JOURNAL]):
                return {table: keys for table, keys in made.items() if keys}
    return None


def _replaced(data: Mapping[str, Any], made: Mapping[str, Mapping[str, Any]], moved: Sequence[str]) -> dict[str, Any]:
    """The file with the new lines."""
    new = {**data, **{table: {**data.get(table, {}), **keys} for table, keys in made.items()}}
    if "protect" in new:
        new["protect"] = {key: value for key, value in new["protect"].items() if key not in moved}
    return new


def _same(data: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[tuple[str, str]]) -> bool:
    try:
        before, after = resolved(data), resolved(new)
    except ValueError:
        return False
    return all(_meant(before, key) == _meant(after, key) for key in keys)


def _meant(data: Mapping[str, Any], key: tuple[str, str]) -> list[tuple[Address, ...]]:
    """The addresses of a list, each alone; of a journal those of an API and a control port, in no order."""
    given = data.get(key[0], {}).get(key[1]) or ()
    texts = sorted(given.items()) if isinstance(given, Mapping) else [(one,) for one in given]
    return [tuple(known(at) for text in one if (at := host_and_port(text)) is not None) for one in texts]


def _amended(data: Mapping[str, Any], listed: Iterable[Any]) -> Iterator[Any]:
    """nodes.addresses with both ports of each machine that an old journal names."""
    own = own_ports(data)
    pairs = {one[0]: one[1] for one in _meant(data, JOURNAL)}
    for entry in listed:
        machine = Machine.read(entry).with_ports(own)
        found = [api for api, control in pairs.items() if (machine.api is not None and known(machine.api) == api)
                 or (machine.api is None and machine.control is not None and known(machine.control) == control)]
        if not found:
            yield entry
        for api in found:
            control = pairs.pop(api)
            as_it_was = machine.control is not None and known(machine.control) == control
            yield entry if as_it_was and machine.api else _entry({"control": control, "api": api}, own)
    for api, control in pairs.items():
        yield _entry({"control": control, "api": api}, own)


def _machines(data: Mapping[str, Any], found: Mapping[tuple[str, str], list[tuple[Address, ...]]]) -> Iterator[Any]:
    """Entries of nodes.addresses: a host where its ports are this node's own, or a table."""
    pairs = {one[0]: one[1] for one in found.get(JOURNAL, ())}
    kinds: dict[Kind, list[Address]] = {"api": [], "control": []}
    for key, addresses in found.items():
        kind = SWITCHES.get(key, "api")
        kinds[kind] += [at for at, *_ in addresses if at not in kinds[kind]]
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
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}"  # control, api: bare keys
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")
