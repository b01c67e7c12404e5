"""Monitor ports that are too few or too slow: what does not fit, and what would.

    what_lacks(topology, way, leaf, nics)     why these ports of a leaf cannot be copied, in words
    cheapest(topology, wanted, fits)          changes with which a plan can be made, those that cost nothing first

A change is named only if the planner makes a plan with it, so that a remedy can be followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from switch_configs.planning.hosts import Place
from switch_configs.planning.monitor_ports import MonitorPorts, gbps
from switch_configs.planning.platform_rules import no_room, splits
from switch_configs.schema import Direction, Leaf, MonitorPort, NicPort, Topology

__all__ = ["Wanted", "cheapest", "what_lacks"]

SPEEDS = (100, 200, 400, 800, 1600)
MORE = (1, 2, 3, 4, 6, 8, 12, 16)  # monitor ports of a leaf
NICS = 256  # of fabrics that are planned again for each change; larger ones take seconds each time
NAMED = 3  # changes in a message


@dataclass(frozen=True)
class Wanted:
    """What a plan is asked for. redundancy, direction: None leaves the choice to the planner."""

    redundancy: int | None
    direction: Direction | None


Fits = Callable[[Topology, Wanted], bool]


def what_lacks(topology: Topology, way: Direction, leaf: Leaf, nics: Sequence[NicPort]) -> str:
    """Sums first; then the one port that fits nowhere; then how many fit together, with all monitor ports empty."""
    total, have = gbps(list(nics), way), sum(port.speed_gbps for port in leaf.monitor_ports)
    sums = (f"{leaf.name}: {len(nics)} sources need {total:g} Gb/s, {len(leaf.monitor_ports)} monitor ports carry "
            f"{have:g}")
    if total > have:
        return sums
    place = Place([port.node for port in leaf.monitor_ports], topology, together=True)
    ports = MonitorPorts(topology, way)
    dealt: Counter[Direction] = Counter()
    used: set[str] = set()
    fitted = 0
    for nic in sorted(nics, key=lambda one: -one.load_gbps):
        if not MonitorPorts(topology, way).fitting(place, leaf, [nic]):
            return _alone(leaf, way, nic, place.ports(leaf, nic))
        ends = ports.fitting(place, leaf, [nic])
        if ends:
            ports.deal(leaf, nic, ends[0])
            fitted += 1
            dealt.update(kind for kind, port in ends[0] if port.port not in used)
            used |= {port.port for _, port in ends[0]}
    if fitted == len(nics):
        return f"{sums}, which is enough, but not at one node beside what other groups have there"
    for kind in (*dealt, way):
        why, _ = no_room(leaf.vendor, dealt + Counter([kind]), leaf.session_number)
        if why:
            return f"{sums}, but {fitted} of them take all sessions: {why}"
    return f"{sums}, but only {fitted} of them fit: what is copied of a source goes to one port whole"


def _alone(leaf: Leaf, way: Direction, nic: NicPort, ports: Sequence[MonitorPort]) -> str:
    """A mirrored port that does not fit even if nothing else is mirrored."""
    need, widest = gbps([nic], way), max((port.speed_gbps for port in ports), default=0)
    if way != "both" or nic.load_gbps > widest:
        return (f"{leaf.name}: {way} of {nic.port} needs {need:g} Gb/s"
                + (f", {nic.load_gbps:g} in each direction" if way == "both" else "")
                + f"; no monitor port carries more than {widest:g}")
    why = (
        f"and nobody says that {leaf.vendor} can copy each direction of a port to a monitor port of its own"
        if not splits(leaf.vendor, leaf.split_directions) else
        "and each direction needs a monitor port of its own, with a session of its own"
    )
    return (f"{leaf.name}: both directions of {nic.port} need {need:g} Gb/s; no monitor port carries more than "
            f"{widest:g}, {why}")


def cheapest(topology: Topology, wanted: Wanted, fits: Fits, default: int) -> list[str]:
    """Changes that make a plan possible, in words. default: the redundancy where none is wanted."""
    if sum(len(leaf.ports) for leaf in topology.leaves) > NICS:
        return []
    found: list[str] = []
    for change in (_one_direction, _fewer_gpus, _consent, _more_ports, _faster_ports):
        if len(found) < NAMED:
            found += [text for text, made, asked in change(topology, wanted, default) if fits(made, asked)][:1]
    return found


Change = Iterator[tuple[str, Topology, Wanted]]  # lazily: the first that fits ends it


def _one_direction(topology: Topology, wanted: Wanted, default: int) -> Change:
    if wanted.direction != "both":
        return
    for way in ("egress", "ingress"):
        yield (
            f"--direction {way} (no clear-to-sends: a running job can then be joined in LL and LL128, not in SIMPLE)",
            topology, Wanted(wanted.redundancy, way),
        )


def _fewer_gpus(topology: Topology, wanted: Wanted, default: int) -> Change:
    for fewer in range((wanted.redundancy or default) - 1, 0, -1):
        yield f"--redundancy {fewer}, with fewer GPUs mirrored", topology, Wanted(fewer, wanted.direction)


def _consent(topology: Topology, wanted: Wanted, default: int) -> Change:
    asked = [leaf for leaf in topology.leaves if not splits(leaf.vendor, leaf.split_directions)]
    if asked:
        leaves = [leaf.model_copy(update={"split_directions": True}) for leaf in topology.leaves]
        yield (f"split_directions: true of {_names(asked)}, where each direction may then have a monitor port of its "
               f"own (untried on {', '.join(sorted({leaf.vendor for leaf in asked}))})",
               topology.model_copy(update={"leaves": leaves}), wanted)


def _more_ports(topology: Topology, wanted: Wanted, default: int) -> Change:
    some = [leaf for leaf in topology.leaves if leaf.monitor_ports]
    for more in MORE:
        for one in ([leaf] for leaf in some) if len(some) > 1 else ():
            yield _with_more(topology, wanted, one, more)
        yield _with_more(topology, wanted, some, more)


def _with_more(topology: Topology, wanted: Wanted, some: list[Leaf], more: int) -> tuple[str, Topology, Wanted]:
    """As many more monitor ports as fast as the leaf's fastest, to that one's node."""
    leaves = []
    for leaf in topology.leaves:
        if leaf in some:
            like = max(leaf.monitor_ports, key=lambda port: port.speed_gbps)
            new = [like.model_copy(update={"port": f"{like.port}-new{number}"}) for number in range(more)]
            leaf = leaf.model_copy(update={"monitor_ports": [*leaf.monitor_ports, *new]})
        leaves.append(leaf)
    speeds = sorted({max(port.speed_gbps for port in leaf.monitor_ports) for leaf in some})
    text = f"{more} more monitor port{'s' if more > 1 else ''} of {' or '.join(f'{s:g}' for s in speeds)} Gb/s on "
    return text + _names(some), topology.model_copy(update={"leaves": leaves}), wanted


def _faster_ports(topology: Topology, wanted: Wanted, default: int) -> Change:
    now = max((port.speed_gbps for leaf in topology.leaves for port in leaf.monitor_ports), default=0)
    for speed in (speed for speed in SPEEDS if speed > now):
        leaves = [
            leaf.model_copy(update={"monitor_ports": [
                port.model_copy(update={"speed_gbps": float(speed)}) for port in leaf.monitor_ports
            ]})
            for leaf in topology.leaves
        ]
        yield f"monitor ports of {speed} Gb/s", topology.model_copy(update={"leaves": leaves}), wanted


def _names(leaves: Sequence[Leaf]) -> str:
    names = [leaf.name for leaf in leaves]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
