"""Parsers of command lines that print for people: Comware, EOS, NX-OS, Junos. Called through show.read only.

Which outputs these formats were checked against (none on a device of ours):
    Comware   display mirroring-group all: H3C command reference, Port mirroring commands, and the verification
              steps of the S12500X-AF configuration guide; `Monitor-port:` as a real chassis printed it
    NX-OS     show monitor session: output of a Nexus 9000 in the README of Cisco's zSPAN collector (up) and the states
              in brackets of the OcNOS command reference, which prints the same table. show running-config monitor:
              format not confirmed
    Junos     show forwarding-options analyzer: output of a QFX in public notes, one field per line. show system
              commit: the line "rollback pending" below entry 0, as a vMX prints it
    EOS       show monitor session: FORMAT NOT CONFIRMED, no public page found that quotes one with its state. The
              configuration lines follow the templates of Arista's own AVD. Pending commit timer: the sentence of
              EOS 4.35 in `show configuration sessions detail`, the table's state before that (NAPALM reads both)
Where the state is not printed as expected a session counts as not active, so apply takes it back: wrong towards safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from switch_configs.schema import Direction, MirrorSession, SessionState, SourceState

__all__ = ["comware", "eos", "eos_pending", "junos", "junos_pending", "nxos", "sources_of"]

WAYS: dict[str, Direction] = {
    "rx": "ingress", "inbound": "ingress", "ingress": "ingress",
    "tx": "egress", "outbound": "egress", "egress": "egress", "both": "both",
}


def sources_of(pairs: Iterable[tuple[str, str]]) -> list[SourceState]:
    """(port, direction) pairs to one entry per port; ingress and egress of one port are "both"."""
    found: dict[str, Direction] = {}
    for port, way in pairs:
        direction = WAYS[way.lower()]
        found[port] = direction if found.get(port, direction) == direction else "both"
    return [SourceState(port=port, direction=direction) for port, direction in found.items()]


def _expand(text: str) -> list[str]:
    """"Ethernet1/1-2, Ethernet1/7" to single ports."""
    out = []
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"(.*?)(\d{1,6})-(\d{1,6})", part)
        if match and 0 < int(match[3]) - int(match[2]) < 4096:
            out += [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]
        else:
            out.append(part)
    return out


# -- Comware ----------------------------------------------------------------------------------------------


def comware(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    status, config = outputs[:2]
    _known(status, r"(?i)mirroring.group|^\s*$")
    cuts = {
        m[1]: m[0].strip()
        for m in re.finditer(r"(?im)^.*mirroring-group (\d+) .*(?:truncat|sampler|sampling).*$", config)
    }
    out = []
    for number, body in _blocks(status, r"(?m)^\s*Mirroring group (\d+)\s*[:\uff1a]"):
        state = _find(body, r"Status\s*:\s*(\S+)")
        kind = _find(body, r"Type\s*:\s*(.+?)\s*$").lower()
        monitor = re.search(r"Monitor[ -]port\s*:[ \t]*(\S+)", body)
        destination = monitor[1] if monitor and monitor[1] != "None" else None
        # VLANs and CPUs are sources too, in lists of their own
        listed = re.search(r"(?s)Mirroring port\s*:(.*?)(?=^\s*\w[\w -]*\s*:|\Z)", body, re.MULTILINE)
        pairs = re.findall(r"(?im)^\s*(\S+\d)\s+(Inbound|Outbound|Both)\s*$", listed[1] if listed else "")
        sampler = re.search(r"Sampler\s*:\s*(\S+)", body)
        reason = ""
        if state.lower() != "active":
            missing = "no monitor port" if not destination else "no mirroring port" if not pairs else ""
            reason = f"status {state}: the group has {missing or 'a port that is not up'}"
        elif kind != "local":
            reason = f"it is a {kind} group, not a local one"
        elif more := re.search(r"Mirroring (VLAN|CPU)\s*:|Encapsulation\s*:", body):
            reason = f"it also has a line {more[0].strip(' :')!r}: not made by this plan"
        # No room for a mark. Ours is a local group that copies to our port, or one that an apply left half made.
        half_made = destination is None and {port for port, _ in pairs} <= set(session.ports)
        ours = kind == "local" and (destination == session.destination or half_made)
        out.append(
            SessionState(
                name=number, exists=True, active=not reason, ours=ours, sources=sources_of(pairs),
                destination=destination, reason=reason, key=f"sampler {sampler[1]}" if sampler else "",
                truncation=f"sampler {sampler[1]}" if sampler else cuts.get(number, ""),
            )
        )
    return out


# -- Arista EOS -------------------------------------------------------------------------------------------


def eos(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    status, config = outputs[:2]
    active = {}
    for name, body in _blocks(status, r"(?m)^Session (\S+)\s*$"):
        ports = re.search(r"(?s)Destination Ports?:(.*)", body)
        states = re.findall(r"(\S+)\s+:\s+(.+?)\s*$", ports[1], re.MULTILINE) if ports else []
        active[name] = states
    silent = set(re.findall(r"(?ms)^Session (\S+)\s*$(?:(?!^Session ).)*?^Destination Ports?:[ \t]*\S+\s*$", status))
    names: dict[str, list[str]] = {}
    for name, line in re.findall(r"(?m)^\s*monitor session (\S+) (.+?)\s*$", config):
        names.setdefault(name, []).append(line)
    if not names and active:
        raise ValueError("sessions without configuration")
    out = []
    for name, lines in names.items():
        pairs, destination, cut = [], None, ""
        for line in lines:
            words = line.split()
            if words[0] == "source":
                way = words[-1] if words[-1] in WAYS else "both"  # no word means both
                pairs += [(port, way) for port in _expand(" ".join(w for w in words[1:] if w not in WAYS))]
            elif words[0] == "destination":
                destination = words[1]
            elif re.match(r"truncate|header remove|sample|rate-limit", line):
                cut = line
        good = any(state.split()[0].lower() == "active" for _, state in active.get(name, []) if state)
        reason = ""
        if not good:
            shown = ", ".join(f"{port} {state}" for port, state in active.get(name, []))
            half = "no destination is set" if destination is None else "no source is set" if not pairs else ""
            if name in silent and not half:
                half = "this EOS prints no state of the destination, so whether copies flow is not known"
            reason = half or f"destination {shown or 'not shown'}: usually its link is down or hardware has no room"
        out.append(
            SessionState(name=name, exists=True, active=good, ours=name == session.name, sources=sources_of(pairs),
                         destination=destination, truncation=cut, reason=reason)
        )
    return out


# -- Cisco NX-OS ------------------------------------------------------------------------------------------


# What may be typed again to put a session back: nothing but these lines of its own block.
NXOS_LINE = re.compile(
    r"(?:description|source interface|source vlan|destination interface|filter|mtu|sampling|rate-limit) [\w ,./:-]+|"
    r"(?:no )?shut"
)
NXOS_STATES = {
    "admin shut": "sessions are created shut: `no shut`",
    "wrong mode": "the destination lacks `switchport monitor`",
    "No sources": "no source is set",
    "No dest": "no destination is set",
    "No operational": "the destination's link is down, or every source's",
    "resource": "the forwarding engine has no session left: 4 of them, fewer if bidirectional",
}


def nxos(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    status, config = outputs[:2]
    states = {
        number: _find(body, r"(?m)^\s*state\s*:\s*(.+?)\s*$")
        for number, body in _blocks(status, r"(?m)^\s*session (\d+)\s*$")
    }
    out = []
    foreign = set(re.findall(r"(?m)^monitor session (\d+) type (?!local\b)", config))
    for number, body in _blocks(config, r"(?m)^monitor session (\d+)[^\n]*$"):
        pairs, destination, cut, description = [], None, "", ""
        for line in map(str.strip, body.splitlines()):
            words = line.split()
            if line.startswith("source interface "):
                way = words[-1] if words[-1] in WAYS else "both"
                pairs += [(port, way) for port in _expand(" ".join(w for w in words[2:] if w not in WAYS))]
            elif line.startswith("destination interface "):
                destination = words[2]
            elif line.startswith("description "):
                description = line.partition(" ")[2]
            elif re.match(r"mtu \d|sampling|rate-limit", line):
                cut = line
        state = states.get(number, "unknown")
        reason = ""
        if state != "up":
            known = [meaning for words, meaning in NXOS_STATES.items() if words in state]
            why = known[0] if known else "see the state in brackets"
            reason = f"state {state}: {why}"
        # an apply that died early has left its number without a description
        bare = not description and destination is None and {port for port, _ in pairs} <= set(session.ports)
        ours = number not in foreign and (description == session.name or bare)
        out.append(
            SessionState(name=number, exists=True, active=state == "up", ours=ours,
                         sources=sources_of(pairs), destination=destination, truncation=cut, reason=reason,
                         config=[line.strip() for line in body.splitlines() if NXOS_LINE.fullmatch(line.strip())])
        )
    if not out and states:
        raise ValueError("sessions without configuration")
    return out


# -- Junos ------------------------------------------------------------------------------------------------


def junos(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> list[SessionState]:
    status, config = outputs[:2]
    states = {}
    for name, body in _blocks(status, r"(?m)^\s*Analyzer name\s*:\s*(\S+)\s*$"):
        states[name] = (_find(body, r"State\s*:\s*(\S+)"), _rate(body))
    analyzers: dict[str, list[str]] = {}
    off = set()
    for verb, name, line in re.findall(
        r"(?m)^\s*(set|deactivate) forwarding-options analyzer (\S+) ?(.*?)\s*$", config
    ):
        analyzers.setdefault(name, [])
        if verb == "deactivate" and not line:
            off.add(name)
        elif verb == "set":
            analyzers[name].append(line)
    out = []
    for name, lines in analyzers.items():
        text = "\n".join(lines)
        pairs = [(port.removesuffix(".0"), way) for way, port in
                 re.findall(r"(?m)^input (ingress|egress) interface (\S+)$", text)]
        output = re.search(r"(?m)^output (?:interface|vlan|ip-address) (\S+)", text)
        state, cut = states.get(name, ("", ""))
        reason = ""
        if name in off:
            reason = "deactivated in the configuration"
        elif not state:
            reason = "configured, but no analyzer of that name runs: QFX has 2 for ingress and 2 for egress"
        elif state != "up":
            reason = f"state {state}: usually the output interface is down or not family ethernet-switching"
        out.append(
            SessionState(name=name, exists=True, active=not reason, ours=name == session.name,
                         sources=sources_of(pairs), destination=output[1].removesuffix(".0") if output else None,
                         truncation=cut, reason=reason)
        )
    for name in states.keys() - analyzers.keys():
        raise ValueError(f"analyzer {name} without configuration")
    return out


def _rate(body: str) -> str:
    rate = re.search(r"Mirror rate\s*:\s*(\d+)", body)
    length = re.search(r"Maximum packet length\s*:\s*(\d+)", body)
    if rate and int(rate[1]) > 1:
        return f"mirror rate 1 of {rate[1]}"
    return f"maximum packet length {length[1]}" if length and int(length[1]) else ""


# -- a commit that waits for its confirmation ---------------------------------------------------------------


def eos_pending(outputs: Sequence[str]) -> str:
    """Name of the configure session whose commit timer runs, or ""."""
    found = re.search(r"(?im)^\s*Session with pending commit timer\s*:\s*(\S+)", outputs[2])
    found = found or re.search(r"(?m)^\s*\*?\s*(\S+)\s+pendingCommitTimer\b", outputs[2])
    return found[1] if found and found[1].lower() != "none" else ""


def junos_pending(outputs: Sequence[str]) -> str:
    """Comment of the newest commit while it waits for confirmation ("unnamed" if it has none), or ""."""
    newest = re.search(r"(?ms)^\s*0\s+\d{4}-.*?(?=^\s*1\s+\d{4}-|\Z)", outputs[2])
    if newest is None or "rollback pending" not in newest[0]:
        return ""
    lines = [line.strip() for line in newest[0].splitlines()[1:]]
    return next((line for line in lines if line and line != "rollback pending"), "unnamed")


# -- shared -----------------------------------------------------------------------------------------------


def _blocks(text: str, heading: str) -> list[tuple[str, str]]:
    """(name, body) of every part that begins with a heading; the heading's group is the name."""
    found = list(re.finditer(heading, text))
    ends = [match.start() for match in found[1:]] + [len(text)] * bool(found)
    return [(match[1], text[match.end() : end]) for match, end in zip(found, ends, strict=True)]


def _find(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no line like {pattern!r}")
    return match[1]


def _known(text: str, pattern: str) -> None:
    if not re.search(pattern, text):
        raise ValueError(f"unexpected output {text.strip()[:60]!r}")
