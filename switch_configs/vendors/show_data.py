"""Parsers of tables, databases and JSON: SONiC, NVUE, Open vSwitch, tc. Called through show.read only.

Which outputs these formats were checked against:
    SONiC     show mirror_session: sonic-buildimage issue 7988 (SPAN) and sonic-utilities pull 662 (ERSPAN), both real;
              columns for sample rate and truncation: not confirmed. sonic-db-cli prints a Python dictionary
    NVUE      nv show system port-mirror session -o json: NVUE reference, Port Mirror, Show Commands; `enable` as
              the user guide's older releases print it. A span session's JSON is quoted nowhere: taken to be the
              erspan one's with a port in place of the address
    Open vSwitch, tc: the programs themselves, in the tests
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from switch_configs.schema import MirrorSession, SessionState
from switch_configs.vendors.render import OWNER, TC_ADDED, cookie, tc_prio
from switch_configs.vendors.show_cli import sources_of

__all__ = ["cumulus", "cumulus_pending", "ovs", "sonic", "tc"]

# -- SONiC ------------------------------------------------------------------------------------------------


def sonic(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    table, config_db, state_db = outputs
    config, state = _mapping(config_db), _mapping(state_db)
    out: list[SessionState] = []
    for row in _tables(table):
        kind = "erspan" if "Monitor Port" in row else "span"
        status = row.get("Status", "")
        mine = row["Name"] == session.name
        if mine and state:
            status = state.get("status", status)
        cut = ""
        fields = {**row, **(config if mine else {})}
        for key, word in (("Truncate Size", "truncate size"), ("truncate_size", "truncate size"),
                          ("Sample Rate", "sample rate"), ("sample_rate", "sample rate"),
                          ("Policer", "policer"), ("policer", "policer")):
            if fields.get(key, "") not in ("", "0"):
                cut = f"{word} {fields[key]}"
        ports = [port for port in row.get("SRC Port", "").split(",") if port]
        reason = ""
        if status != "active":
            reason = f"status {status or 'not in STATE_DB'}: usually the ASIC has no mirror session left (syslog says)"
        out.append(
            SessionState(
                name=row["Name"], exists=True, active=not reason, ours=mine and kind == "span",
                sources=sources_of((port, row.get("Direction") or "both") for port in ports),
                destination=row.get("DST Port") or row.get("DST IP") or None, truncation=cut, reason=reason,
                config=[json.dumps(config)] if mine and config else [],
            )
        )
    if config and all(state.name != session.name for state in out):
        raise ValueError("CONFIG_DB has the session and show mirror_session does not")
    return out


def _mapping(text: str) -> dict[str, str]:
    """What sonic-db-cli HGETALL prints: a Python dictionary, empty for nothing."""
    text = text.strip()
    found = ast.literal_eval(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError(f"no dictionary: {text[:60]!r}")
    return {str(key).rstrip("@"): str(value) for key, value in found.items()}


def _tables(text: str) -> list[dict[str, str]]:
    """Rows of tables with a line of dashes that says where the columns are. Cells may be empty."""
    lines = text.splitlines()
    rows = []
    seen = False
    for at, line in enumerate(lines):
        if not re.fullmatch(r"-+(\s+-+)*\s*", line) or at == 0:
            continue
        seen = True
        spans = [(m.start(), m.end()) for m in re.finditer(r"-+", line)]
        # a cell may be one wider than its dashes are; it ends where the next begins
        edges = [(start, spans[i + 1][0] if i + 1 < len(spans) else None) for i, (start, _) in enumerate(spans)]
        heads = [lines[at - 1][a:b].strip() for a, b in edges]
        for row in lines[at + 1 :]:
            if not row.strip() or row.endswith("Sessions"):
                break
            rows.append({head: row[a:b].strip() for head, (a, b) in zip(heads, edges, strict=True)})
    if not seen:
        raise ValueError(f"no table: {text.strip()[:60]!r}")
    return rows


# -- NVUE -------------------------------------------------------------------------------------------------


def cumulus(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    """The two sessions that stand for "both" are one state under the first number."""
    text, link_text, pending = outputs[:3]
    sessions: dict[str, Any] = json.loads(text or "{}")
    link = json.loads(link_text or "{}")
    up = link.get("oper-status", link.get("state", {"up": {}}))
    is_up = up == "up" or (isinstance(up, dict) and "up" in up)
    numbers = [str(session.number + i) for i in range(len(session.ways))]
    # a session whose direction changed has left its second number behind
    second = str(session.number + 1)
    if second not in numbers and _span(sessions.get(second, {}))[1] == session.destination:
        numbers.append(second)
    ours = [n for n in numbers if n in sessions]
    if not isinstance(sessions, dict):
        raise ValueError("no object of sessions")
    out = [_nvue_state([number], sessions, "") for number in sessions if number not in ours]
    if ours:
        reason = "" if is_up else f"the link of {session.destination} is down"
        if "port-mirror" in pending:
            reason = "changes are pending: nv config apply was not run"
        missing = [number for number in numbers[: len(session.ways)] if number not in sessions]
        if missing:
            reason = f"session {missing[0]} is missing: there is no `both`, each direction is a session"
        state = _nvue_state(ours, sessions, reason)
        state.name, state.key = numbers[0], ",".join(ours)
        # No room for a mark. Ours copies to our port, or an apply left it without one; never a tunnel's.
        bare = state.destination is None and {source.port for source in state.sources} <= set(session.ports)
        state.ours = all(not sessions[n].get("erspan") or "span" in sessions[n] for n in ours) and (
            state.destination == session.destination or bare
        )
        out.append(state)
    return out


def cumulus_pending(outputs: Sequence[str]) -> str:
    """What runs down in `nv config apply --confirm-status`, or "". Its wording is documented as "the amount of time
    left" and quoted nowhere: FORMAT NOT CONFIRMED, any time of day or duration counts."""
    left = re.search(r"\d+:\d\d|\d+\s*(?:s|sec|seconds?|m|min|minutes?|h|hours?)\b", outputs[3])
    return f"nv config apply --confirm, {left[0]} left" if left else ""


def _span(entry: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The half of a session that is set. Older releases print both, the other one with enable off."""
    halves = [entry[kind] for kind in ("span", "erspan") if entry.get(kind)]
    on = [half for half in halves if half.get("enable") not in ("off", "disabled")]
    body = (on or halves or [{}])[0]
    target = body.get("destination") or {}
    if "dest-ip" in target:
        return body, next(iter(target["dest-ip"]), None)
    return body, next(iter(target), None)


def _nvue_state(numbers: list[str], sessions: dict[str, Any], reason: str) -> SessionState:
    pairs: list[tuple[str, str]] = []
    destinations: list[str] = []
    cut = ""
    for number in numbers:
        body, target = _span(sessions[number])
        way = body.get("direction", "")
        if not way or not body.get("source-port"):
            reason = reason or f"session {number} has no {'direction' if not way else 'source-port'}"
        if body.get("enable") in ("off", "disabled"):
            reason = reason or f"session {number} is switched off"
        pairs += [(port, way) for port in body.get("source-port", {}) if way]
        destinations += [target] if target else []
        truncate = body.get("truncate") or {}
        if truncate.get("state", truncate.get("enable", "off")) in ("on", "enabled") or "size" in truncate:
            cut = f"truncate size {truncate.get('size', 'default')}"
    if not destinations:
        reason = reason or "no destination is set"
    elif len(set(destinations)) > 1:
        reason = reason or f"its sessions copy to different ports: {', '.join(destinations)}"
    return SessionState(
        name=numbers[0], exists=True, active=not reason, sources=sources_of(pairs),
        destination=destinations[0] if destinations else None, truncation=cut, reason=reason,
    )


# -- Open vSwitch -----------------------------------------------------------------------------------------


def ovs(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    bridges, mirrors, ports, interfaces, flows = outputs
    on_bridge = {uuid for row in _ovsdb(bridges) for uuid in _set(row["mirrors"])}
    names = {row["_uuid"]: row["name"] for row in _ovsdb(ports)}
    links = {row["name"]: row for row in _ovsdb(interfaces)}
    out = []
    for row in _ovsdb(mirrors):
        if row["_uuid"] not in on_bridge:
            continue
        out.append(_ovs_mirror(row, names, links, flows, session))
    mine = [state for state in out if state.name == session.name]
    if len(mine) > 1:
        for state in mine:
            state.reason = f"{len(mine)} mirrors have this name; Open vSwitch accepts that"
            state.active = False
    return out


def _ovs_mirror(
    row: dict[str, Any], names: dict[str, str], links: dict[str, dict[str, Any]], flows: str, session: MirrorSession
) -> SessionState:
    pairs = [(names.get(uuid, "?"), "ingress") for uuid in _set(row["select_src_port"])]
    pairs += [(names.get(uuid, "?"), "egress") for uuid in _set(row["select_dst_port"])]
    output = _set(row["output_port"])
    destination = names.get(output[0]) if output else None
    marks = dict(row["external_ids"][1])
    statistics = dict(row["statistics"][1])
    snap = _set(row["snaplen"])
    reason = _link_problem(destination, links, [port for port, _ in pairs])
    if row.get("select_all") is True:
        pairs += [("*", "both")]
    elif not reason and destination is not None:
        reason = _stale(flows, pairs, destination)
    return SessionState(
        name=row["name"], exists=True, active=not reason, ours=marks.get("owner") == OWNER, sources=sources_of(pairs),
        destination=destination, truncation=f"snaplen {snap[0]}" if snap else "", reason=reason,
        copies=statistics.get("tx_packets"), key=row["_uuid"], config=[f"snaplen={snap[0]}"] if snap else [],
    )


def _link_problem(destination: str | None, links: dict[str, dict[str, Any]], sources: Sequence[str]) -> str:
    if destination is None or destination not in links:
        return "its destination port is gone"
    target = links[destination]
    if _set(target["error"]):
        return f"destination {destination}: {_set(target['error'])[0]}"
    if target["link_state"] != "up":
        return f"destination {destination} is down: copies are lost, and its counters still count them as sent"
    room = _set(target["mtu"])
    largest = max((m for port in sources if port in links for m in _set(links[port]["mtu"])), default=0)
    if room and room[0] < largest:
        return f"destination {destination} has MTU {room[0]}, sources {largest}: larger copies are lost uncounted"
    return ""


def _stale(flows: str, pairs: Iterable[tuple[str, str]], destination: str) -> str:
    """Cached flows keep their actions when a mirror changes (3.0 to 3.3): compare them with the mirror."""
    wanted = list(pairs)
    for line in flows.splitlines():
        port = re.search(r"in_port\(([^)]+)\)", line)
        actions = line.rpartition("actions:")[2].split(",")
        if port is None or destination in actions:
            continue
        if any((way == "ingress" and name == port[1]) or (way == "egress" and name in actions) for name, way in wanted):
            return "flows that were running before it are not copied: ovs-appctl revalidator/purge"
    return ""


def _ovsdb(text: str) -> list[dict[str, Any]]:
    table = json.loads(text)
    rows = [dict(zip(table["headings"], row, strict=True)) for row in table["data"]]
    for row in rows:
        if "_uuid" in row:
            row["_uuid"] = row["_uuid"][1]
    return rows


def _set(value: Any) -> list[Any]:
    """OVSDB writes a set of one as the element itself, and references as ["uuid", x]."""
    members = value[1] if isinstance(value, list) and value and value[0] == "set" else [value]
    return [m[1] if isinstance(m, list) and m and m[0] == "uuid" else m for m in members if m not in ("", None)]


# -- tc ---------------------------------------------------------------------------------------------------


def tc(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    table = json.loads(outputs[0])
    if not isinstance(table, list):
        raise ValueError("ip prints no list of links")
    links = {link["ifname"]: link for link in table}
    if not all(isinstance(name, str) for name in links):
        raise ValueError("ip prints links without a name")
    mine = SessionState(name=session.name, exists=False, ours=True)
    pairs: list[tuple[str, str]] = []
    targets: list[str] = []
    copies = lost = 0
    others: dict[tuple[str, int], SessionState] = {}
    for line, listing in zip(lines[1:], outputs[1:], strict=True):
        port, way = shlex.split(line)[-2:]
        for entry in json.loads(listing or "[]"):
            for action in entry.get("options", {}).get("actions") or []:
                mark = action.get("cookie", "")
                if mark.startswith(cookie(session, "ingress" if way == "ingress" else "egress")):
                    pairs.append((port, way))
                    if mark.endswith(TC_ADDED) and port not in mine.added:
                        mine.added.append(port)
                    targets.append(action["to_dev"])
                    mine.key = entry["kind"]
                    copies += action["stats"]["packets"]
                    lost += action["stats"]["overlimits"]
                elif mark.startswith(OWNER.encode().hex()):
                    # another session of ours, or the other direction, which u32 lists here too. A qdisc is all of
                    # ours alike, whichever session came first: the last to go takes it along
                    if mark.endswith(TC_ADDED) and port not in mine.added:
                        mine.added.append(port)
                elif action["kind"] == "mirred" or entry["pref"] == tc_prio(session):
                    foreign = _foreign(port, way, entry["pref"], action, session)
                    others.setdefault((port, action.get("index", 0)), foreign)
    if pairs:
        mine.exists, mine.sources, mine.copies = True, sources_of(pairs), copies
        mine.lost = {"overlimits": lost}
        mine.destination = targets[0] if targets[0] != "*" else None
        mine.reason = _tc_problem(session, links, targets, pairs)
        mine.active = not mine.reason
    elif gone := [port for port in session.ports if port not in links]:
        mine.reason = f"source device {gone[0]} is not there"
    return [mine, *others.values()] if mine.exists or mine.added else [*others.values()]


def _foreign(port: str, way: str, pref: int, action: dict[str, Any], session: MirrorSession) -> SessionState:
    kind = f"{action['kind']} {action.get('mirred_action', '')}".strip()
    clash = pref == tc_prio(session) and port in session.ports
    # Our preference on our port is our place, and it is taken.
    return SessionState(
        name=session.name if clash else f"{port} {way} prio {pref} ({kind})", exists=True, active=True, ours=False,
        sources=sources_of([(port, way)]), destination=action.get("to_dev"),
        reason=f"somebody else's filter ({kind}) has preference {pref}" if clash else "",
    )


def _tc_problem(
    session: MirrorSession, links: dict[str, dict[str, Any]], targets: list[str], pairs: list[tuple[str, str]]
) -> str:
    if "*" in targets:
        return "its destination device was deleted (tc shows `device *`): no counter moves any more"
    if len(set(targets)) > 1:
        return f"its filters copy to different devices: {', '.join(sorted(set(targets)))}"
    wanted = len(session.ports) * len(session.ways)
    if missing := [f"{port} {way}" for port in session.ports for way in session.ways if (port, way) not in pairs]:
        return f"{len(missing)} of {wanted} filters are missing: {', '.join(missing)}"
    target = links.get(targets[0])
    if target is None:
        return f"destination {targets[0]} is not there"
    if target["operstate"] not in ("UP", "UNKNOWN") or "UP" not in target["flags"]:
        return f"destination {targets[0]} is down: copies are lost, counted as overlimits"
    largest = max(links[port]["mtu"] for port, _ in pairs if port in links)
    # a veth drops what its other end cannot take; seen only where that end is in the same namespace
    room = min(target["mtu"], links.get(target.get("link", ""), target)["mtu"])
    if room < largest:
        return f"destination {targets[0]} has MTU {room}, sources {largest}: larger copies are lost as overlimits"
    return ""
