"""What is refused before a switch is touched. SONiC's validator is the model, applied to every vendor, because
what its CLI refuses other switches accept and then mirror nothing; vendor limits are added.

Sources: sonic-utilities config/main.py validate_mirror_session_config; the pages named in render.PAGES.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from switch_configs.errors import PlanError
from switch_configs.schema import Direction, Leaf, MirrorPlan, MirrorSession, MonitorPort, frame_bytes, ways_of

__all__ = [
    "SPLITS", "check_destination", "check_plan", "clashing", "most_source_characters", "no_room", "refusals",
    "session_numbers", "split_basis", "splits",
]

SESSION_LIMITS = {"nxos": 4, "junos": 4, "ovs": 32}
NUMBERS = {"comware": (1, 15), "nxos": (1, 32), "cumulus": (0, 7), "tc": (0, 255)}  # tc: a byte of our mark
JUNOS_ANALYZERS = 2  # that mirror one direction, on QFX
SONIC_CHARACTERS = 2048  # of the list of source ports
#: Where ingress of a port may be in one session and egress in another, and who says so. Of Cumulus, EOS and Comware
#: nobody does: the leaf's split_directions is consent to try.
SPLITS = {
    "nxos": "Configuring SPAN allows it without filters; not tried on a device",
    "junos": "its configuration model has it; what hardware does is not known",
    "sonic": "its CLI allows it since 202106; not tried on a device",
    "sonic-configdb": "SONiC keeps one session for each direction of a port; not tried on a device",
    "ovs": "run", "tc": "run",
}
CARD = re.compile(r"^([A-Za-z-]+)(\d+(?:/\d+)*)/\d+$")


def check_destination(leaf: Leaf, port: MonitorPort, path_mtu: int) -> None:
    """Raises PlanError if no switch could use this port as a destination for whole frames."""
    where = f"{leaf.name} port {port.port}"
    if port.port_channel:
        raise PlanError(f"a mirror destination cannot be a member of {port.port_channel}", where=where,
                        remedy="take the port out of it, or name another port")
    if re.match(r"(?i)^(po|port-?channel|bond|bagg|bridge-aggregation|ae)[-_]?\d", port.port):
        raise PlanError("a mirror destination cannot be a port-channel", where=where, remedy="name a physical port")
    if port.vlans:
        raise PlanError(f"a mirror destination cannot be in VLAN {port.vlans[0]}", where=where,
                        remedy="take the port out of its VLANs: it must carry nothing but copies")
    if port.routed:
        raise PlanError("a mirror destination cannot have an IP address", where=where,
                        remedy="remove the address: the port must carry nothing but copies")
    if leaf.vendor == "cumulus" and port.port == "eth0":
        raise PlanError("eth0 cannot be a mirror destination", where=where, remedy="name a switch port")
    needed = frame_bytes(path_mtu)
    if port.mtu < needed:
        raise PlanError(f"MTU {port.mtu} is below {needed}, the largest frame at path MTU {path_mtu}: copies would be "
                        "dropped without an error", where=where, remedy="set its MTU to 9216")


def split_basis(vendor: str) -> str:
    """Who says that two sessions may copy the two directions of a port on this platform."""
    return SPLITS.get(vendor, f"nobody says that {vendor} can: by consent (split_directions)")


def splits(vendor: str, consent: bool) -> bool:
    """May two sessions copy one port, one of them its ingress and the other its egress? consent: split_directions."""
    return consent or vendor in SPLITS


def clashing(vendor: str, consent: bool, one: Collection[str], other: Collection[str]) -> bool:
    """Do two sessions with a common source disturb each other? one, other: the directions of it that they copy."""
    return bool(set(one) & set(other)) or not splits(vendor, consent)


def no_room(vendor: str, ways: Mapping[Direction, int], number: int | None = None) -> tuple[str, str]:
    """(why a leaf cannot have sessions of these directions, remedy); empty if it can.

    ways: how many sessions of each direction. number: of the first session, where the others are to follow it.
    """
    count = sum(ways.values())
    limit = SESSION_LIMITS.get(vendor)
    if limit is not None and count > limit:
        return f"{count} sessions, {vendor} has {limit}", "use fewer destinations"
    if vendor == "nxos" and ways.get("both", 0) >= 3 and count > 3 and ways.get("ingress", 0) != count - 3:
        return "after three sessions in both directions the fourth is receive only", "use three destinations"
    if vendor == "junos":
        for way in ("ingress", "egress"):
            analyzers = sum(some for kind, some in ways.items() if way in ways_of(kind))
            if analyzers > JUNOS_ANALYZERS:
                return (f"{analyzers} analyzers mirror {way}, QFX has {JUNOS_ANALYZERS}",
                        "use two destinations, or one direction each")
    if number is not None and vendor in NUMBERS and count > 1:  # that of one is for _session() to say
        high = NUMBERS[vendor][1]
        last = number + sum(some * session_numbers(vendor, kind) for kind, some in ways.items()) - 1
        if last > high:
            return (f"{count} sessions from number {number} on need numbers up to {last}, {vendor} has {high}",
                    "set session_number of the leaf, or use fewer destinations")
    return "", ""


def session_numbers(vendor: str, way: Direction) -> int:
    """Session numbers that one of our sessions takes: Cumulus has no session in both directions, it takes two."""
    return 2 if vendor == "cumulus" and way == "both" else 1


def most_source_characters(vendor: str) -> int | None:
    """How long a session's list of source ports, separated by commas, may be; None: no limit is known."""
    return SONIC_CHARACTERS if vendor.startswith("sonic") else None


def check_plan(plan: MirrorPlan) -> None:
    """Raises PlanError naming the first thing that a switch would refuse, or accept and not do."""
    for where, what, remedy in refusals(plan):
        raise PlanError(what, where=where, remedy=remedy)


def refusals(plan: MirrorPlan) -> Iterator[tuple[str, str, str]]:
    """(where, what, remedy) of everything wrong with a plan, which may have been edited by hand."""
    by_leaf: dict[str, list[MirrorSession]] = {}
    for session in plan.sessions:
        by_leaf.setdefault(session.leaf, []).append(session)
        yield from _session(session, plan.path_mtu)
    for leaf, sessions in by_leaf.items():
        yield from _together(leaf, sessions)


def _session(s: MirrorSession, path_mtu: int) -> Iterator[tuple[str, str, str]]:
    where = f"{s.leaf} session {s.name}"
    if s.destination in s.ports:
        yield where, f"destination {s.destination} is also a source", "name another destination"
    for port, count in Counter(s.ports).items():
        if count > 1:
            yield where, f"source {port} is listed {count} times", "list it once"
    if s.mtu < frame_bytes(path_mtu):
        yield where, f"destination MTU {s.mtu} is below the largest frame, {frame_bytes(path_mtu)}", "set it to 9216"
    if s.load_gbps > s.destination_gbps:
        yield (
            where,
            f"sources add up to {s.load_gbps:g} Gb/s, the destination {s.destination} carries {s.destination_gbps:g}",
            "mirror fewer ports or one direction, or add a monitor port",
        )
    if s.vendor in NUMBERS:
        low, high = NUMBERS[s.vendor]
        last = s.number + session_numbers(s.vendor, s.direction) - 1
        if not low <= s.number <= last <= high:
            yield where, f"session number {s.number} needs {low} to {high}", "set session_number of the leaf"
    characters = most_source_characters(s.vendor)
    if characters is not None and len(",".join(s.ports)) > characters:
        yield where, f"the list of source ports is longer than SONiC's {characters} characters", "use two destinations"
    if s.vendor == "ovs" and s.bridge is None:
        yield where, "Open vSwitch needs the name of the bridge", "set bridge of the leaf"
    if s.vendor == "cumulus" and any(re.match(r"^bond", port) for port in s.ports) and "egress" in s.ways:
        yield where, "Cumulus cannot mirror the egress of a bond", "list the bond's members instead"
    if s.vendor == "comware":
        for port in (*s.ports, s.destination):
            if not CARD.match(port):
                yield where, f"{port} is not a Comware interface name", "write it as HundredGigE1/0/1"


def _together(leaf: str, sessions: Sequence[MirrorSession]) -> Iterator[tuple[str, str, str]]:
    vendor = sessions[0].vendor
    for session in sessions:
        if session.vendor != vendor:
            yield leaf, f"sessions for {vendor} and for {session.vendor} on one switch", "give the leaf one vendor"
    for what, names in (
        ("session name", [s.name for s in sessions]), ("destination", [s.destination for s in sessions])
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield leaf, f"{what} {name} is used by {count} sessions", "use it once"
    yield from _shared_sources(leaf, sessions)
    why, remedy = no_room(vendor, Counter(s.direction for s in sessions))
    if why:
        yield leaf, why, remedy
    numbers = [s.number + i for s in sessions for i in range(session_numbers(vendor, s.direction))]
    if vendor in NUMBERS and len(set(numbers)) != len(numbers):
        yield leaf, "two sessions need one session number", "give them numbers of their own"


def _shared_sources(leaf: str, sessions: Sequence[MirrorSession]) -> Iterator[tuple[str, str, str]]:
    uses: dict[str, list[MirrorSession]] = {}
    for session in sessions:
        for port in set(session.ports):
            uses.setdefault(port, []).append(session)
    for port, some in uses.items():
        ways = [way for session in some for way in session.ways]
        twice = [way for way, count in Counter(ways).items() if count > 1]
        if twice:
            yield (leaf, f"source port {port} is used by {len(some)} sessions, which both copy its {twice[0]}",
                   "use it once, or ingress in one session and egress in the other")
        elif len(some) > 1 and not all(splits(session.vendor, session.split_directions) for session in some):
            yield (
                leaf, f"source port {port} is used by {len(some)} sessions, one for each direction: nobody says that "
                f"{some[0].vendor} can",
                "use it once; or give the leaf split_directions: true, which is consent to try",
            )
