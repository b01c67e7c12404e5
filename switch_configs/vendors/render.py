"""Pure functions MirrorSession -> text of the switch's own language: apply, confirm, show, remove, abort, rollback.

    apply       what makes the session; where the platform has one, the last line starts the timed undo
    confirm     ends the timed undo (empty: the platform has none)
    show        what show.read() reads
    remove      takes away this session and nothing else
    abort       after a failure in the middle of apply: drop the candidate, or what was already typed
    rollback    after apply is complete: as it was before
    save        keep it over a reboot; never part of apply

A line is exactly what is typed, one command each; comments and blank lines are for people and are not sent.
remove cannot know how the destination port was set before (MTU, LLDP, STP): apply reads that (monitor_port.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from switch_configs.schema import Direction, MirrorSession

__all__ = ["OWNER", "PAGES", "SECTIONS", "TC_ADDED", "Rendering", "cookie", "kept", "render", "tc_prio", "text",
           "timed_undo", "verified"]

SECTIONS = ("apply", "confirm", "show", "remove", "abort", "rollback", "save")
OWNER = "flowcheck"  # our mark where a platform has room for one
TC_ADDED = "ad"  # end of the mark on a port whose clsact qdisc was added with it, and goes with it
TC_PRIO = 7790

PAGES = {
    "comware": "H3C S12500X-AF Network Management and Monitoring Command Reference, Port mirroring commands "
    "(h3c.com/en/d_202207/1648819_294551_0.htm)",
    "eos": "Arista EOS, Introduction to Port Mirroring; Configure Session (arista.com/en/um-eos/eos-configure-session)",
    "nxos": "Cisco Nexus 9000 NX-OS System Management Configuration Guide, Configuring SPAN",
    "sonic": "sonic-utilities doc/Command-Reference.md, Mirroring; SONiC doc/port-mirroring/"
    "SONiC_Port_Mirroring_HLD.md",
    "sonic-configdb": "SONiC doc/port-mirroring/SONiC_Port_Mirroring_HLD.md; sonic-mirror-session.yang",
    "cumulus": "Cumulus Linux User Guide, SPAN and ERSPAN; NVUE Reference, Port Mirror",
    "junos": "Junos OS, Port Mirroring and Analyzers; Configuring Port Mirroring Local and Remote Analysis",
    "ovs": "Open vSwitch Documentation/faq/configuration.rst; ovs-vswitchd.conf.db(5), Mirror table",
    "tc": "tc-mirred(8), tc-matchall(8)",
}
VERIFIED = {
    "ovs": "run on Open vSwitch 3.1.0 (software, userspace datapath); not run on hardware",
    "tc": "run on Linux 6.18, iproute2 6.1 (software); not run on hardware",
}
NOT_VERIFIED = "written from the documentation; NOT verified on hardware"
WARNINGS = {
    "cumulus": "An oversubscribed destination can use up shared buffers of the switch and so slow down training.",
    "eos": "Committing replaces what others changed in running-config while the configure session was open.",
    "junos": "QFX: at most 2 analyzers mirror ingress and 2 egress. `configure exclusive` locks others out meanwhile.",
    "nxos": "Sessions are created shut: `no shut` is part of apply. mtu inside a session would cut copies.",
    "ovs": "Without revalidator/purge, flows that are already running are not mirrored, or go on being mirrored.",
    "tc": "Kernels without matchall need `u32 match u32 0 0` in its place; `qdisc add` only where there is none yet. "
    "After remove, `tc qdisc del dev PORT clsact` if no other filter is on it: flowcheck does that where it added it.",
    "comware": "Status must be Active; Incomplete means that a half is missing.",
    "sonic": "A session cannot be edited: remove it and add it. The truth is STATE_DB, not CONFIG_DB.",
    "sonic-configdb": "A session cannot be edited: remove it and add it. The truth is STATE_DB, not CONFIG_DB.",
}
#: What a reboot of the switch leaves of what was applied.
KEPT = {
    "comware": "only after `save force`", "eos": "only after `write memory`",
    "nxos": "only after `copy running-config startup-config`",
    "sonic": "only after `config save`, which saves everybody's other changes, too",
    "sonic-configdb": "only after `config save`, which saves everybody's other changes, too",
    "cumulus": "Cumulus Linux 5.9 and later save by themselves what is applied (auto-save), so `nv config save` is not "
    "needed there and leaving it out does not make the session go away; 5.8 and earlier only after `nv config save`",
    "junos": "yes, by the commit", "ovs": "yes, by its database", "tc": "no: it is gone",
}
TIMED_UNDO = {"eos": "commit timer", "junos": "commit confirmed", "cumulus": "nv config apply --confirm"}
COMMENT = {"eos": "!", "nxos": "!"}


@dataclass(frozen=True)
class Rendering:
    header: tuple[str, ...]
    apply: tuple[str, ...]
    confirm: tuple[str, ...]
    show: tuple[str, ...]
    remove: tuple[str, ...]
    abort: tuple[str, ...]
    rollback: tuple[str, ...]
    save: tuple[str, ...]


def render(
    session: MirrorSession, *, replace: bool = False, key: str = "", nonce: str = "", ready: Collection[str] = (),
    added: Collection[str] = (),
) -> Rendering:
    """Text of one session. replace: a session of ours is there, swapped in one transaction where the platform has one.

    key: a platform's own handle for it, where names are not unique (Open vSwitch: the uuid; NVUE: its numbers).
    nonce: makes the name of an EOS configure session its own, since a finished one cannot be opened again.
    ready: ports that have a clsact qdisc; added: those of them that have it from us (tc).
    """
    template = _environment().get_template(f"{session.vendor}.j2")
    known = {"replace": replace, "key": key, "nonce": nonce, "ready": frozenset(ready), "added": frozenset(added)}
    macros = template.make_module(known)

    def lines(section: str) -> tuple[str, ...]:
        return tuple(line for line in str(getattr(macros, section)(session)).splitlines() if line.strip())

    return Rendering(_header(session), *(lines(section) for section in SECTIONS))


def text(session: MirrorSession) -> str:
    """The whole as one file for people: header, then every section under its name."""
    mark = COMMENT.get(session.vendor, "#")
    out = [f"{mark} {line}".rstrip() for line in _header(session)]
    rendering = render(session)
    for section in SECTIONS:
        lines: tuple[str, ...] = getattr(rendering, section)
        out += ["", f"{mark} -- {section}", *(lines or [f"{mark} (nothing to do on this platform)"])]
    return "\n".join(out) + "\n"


def verified(vendor: str) -> str:
    return VERIFIED.get(vendor, NOT_VERIFIED)


def kept(vendor: str) -> str:
    """Whether what was applied is there after a reboot of the switch."""
    return KEPT[vendor]


def timed_undo(vendor: str) -> str:
    """The platform's command that undoes an unconfirmed change by itself, or ""."""
    return TIMED_UNDO.get(vendor, "")


def _header(s: MirrorSession) -> tuple[str, ...]:
    undo = f"{timed_undo(s.vendor)}, {s.undo_minutes} min" if timed_undo(s.vendor) else "none on this platform"
    return (
        f"FlowCheck mirror session {s.name} (number {s.number}) on {s.leaf}, {s.vendor}",
        f"Copies {s.direction} of {len(s.sources)} ports to {s.destination} (node {s.node}):",
        *(f"  {source.port}: {source.why or f'rank {source.rank}'}" for source in s.sources),
        *(f"Why: {line}" for line in s.why),
        f"Bandwidth: {s.load_gbps:g} of {s.destination_gbps:g} Gb/s. Nothing truncates, samples or polices copies.",
        f"Follows: {PAGES[s.vendor]}",
        f"Verified: {verified(s.vendor)}",
        f"Timed undo: {undo}",
        f"Kept over a reboot: {kept(s.vendor)}",
        f"Note: {WARNINGS[s.vendor]}",
    )


# -- what templates need ----------------------------------------------------------------------------------


@cache
def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("switch_configs.vendors"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=False, keep_trailing_newline=True,
    )
    env.filters.update(
        comware_lists=comware_lists, config_db=_config_db, junos_port=_junos_port, junos_unit=_junos_unit,
        tc_prio=tc_prio, tc_cookie=cookie,
    )
    return env


def comware_lists(ports: list[str]) -> list[str]:
    """Interface lists of at most 8 entries; neighbours on one card become "A to B"."""
    entries: list[str] = []

    def split(port: str) -> tuple[str, int]:
        match = re.fullmatch(r"(.*/)(\d+)", port)
        return (match[1], int(match[2])) if match else (port, -1)

    places = [(index, port, *split(port)) for index, port in enumerate(ports)]
    for _, run in groupby(places, key=lambda p: (p[2], p[3] - p[0])):
        members = [port for _, port, _, _ in run]
        entries.append(members[0] if len(members) == 1 else f"{members[0]} to {members[-1]}")
    return [" ".join(entries[start : start + 8]) for start in range(0, len(entries), 8)]


def _config_db(s: MirrorSession) -> str:
    """CONFIG_DB's JSON, quoted for the shell."""
    direction = {"ingress": "RX", "egress": "TX", "both": "BOTH"}[s.direction]
    entry: dict[str, Any] = {
        "type": "SPAN", "dst_port": s.destination, "src_port": ",".join(s.ports), "direction": direction,
    }
    return shlex.quote(json.dumps({"MIRROR_SESSION": {s.name: entry}}))


def _junos_port(port: str) -> str:
    return port.partition(".")[0]


def _junos_unit(port: str) -> str:
    return port if "." in port else f"{port}.0"


def tc_prio(s: MirrorSession) -> int:
    """Preference of our filters on every source; one per session number."""
    return TC_PRIO + s.number


def cookie(s: MirrorSession, way: Direction, added: bool = False) -> str:
    """Mark on our tc actions: owner, session number, direction (u32 lists the filters of both directions under
    each), and at the end TC_ADDED if the port's qdisc was added with it."""
    mark = OWNER.encode().hex() + f"{s.number & 0xFF:02x}" + ("01" if way == "ingress" else "02")
    return mark + TC_ADDED if added else mark
