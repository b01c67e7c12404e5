"""What each node has of a group once the sessions are known: is it complete by itself, and what loss does it survive?

Worked out from the sessions alone, whatever chose them. A host counts for a node when the copies of all its NICs end
there: which of them a ring or tree uses is NCCL's affair. So a lost mirrored port takes its host out, and a lost
monitor port what of every host goes through it: all, or one direction. A monitor port stands for its cable and the
node's port, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from switch_configs.planning.coverage import Views
from switch_configs.planning.hosts import Members, Unit
from switch_configs.schema import Direction, GroupChoice, MirrorSession, NodeShare, Topology, ways_of

__all__ = ["describe", "shares_of"]

NAMED = 6  # ports in a line for people; the plan has them all
Copies = dict[tuple[str, str], list[MirrorSession]]  # (leaf, mirrored port) -> sessions that copy it


def shares_of(
    members: Members, units: Sequence[Unit], sessions: Sequence[MirrorSession], topology: Topology, *, joined: bool
) -> list[NodeShare]:
    """Every node that gets anything of the group alone, those that survive most first; then nodes that count together:
    peers of which two or more get something, or all nodes if their captures are joined."""
    copies: Copies = {}
    for session in sessions:
        for port in session.ports:
            copies.setdefault((session.leaf, port), []).append(session)
    used = {leaf_nic for unit in units for leaf_nic in ((leaf.name, nic.port) for leaf, nic in unit.nics)}
    nodes = list(dict.fromkeys(session.node for end, some in copies.items() if end in used for session in some))
    alone = [_share([node], members, units, copies) for node in nodes]
    alone.sort(key=lambda share: -share.survives)
    sets = [nodes] if joined else [[node for node in peers if node in nodes] for peers in topology.peers]
    return alone + [_share(some, members, units, copies) for some in sets if len(some) > 1]


def _share(nodes: list[str], members: Members, units: Sequence[Unit], copies: Copies) -> NodeShare:
    ends: list[str] = []  # monitor ports
    mirrored: dict[str, str] = {}  # mirrored port that has a copy there -> its host
    for unit in units:
        for leaf, nic in unit.nics:
            for session in copies[leaf.name, nic.port]:
                if session.node in nodes:
                    end = f"{session.leaf} {session.destination}"
                    ends += [end] if end not in ends else []
                    mirrored[f"{leaf.name} {nic.port}"] = unit.host
    whole = [unit for unit in units if _view(unit, nodes, copies) == members.way]
    lacks = members.lacking(whole) if whole else "it has no host's ports all: which of them carry what is NCCL's affair"
    spared: list[str] = []
    needed: list[str] = []
    for port in [*mirrored, *ends]:
        left = [unit for unit in whole if unit.host != mirrored.get(port)]
        seen = {unit.host: _view(unit, nodes, copies, without=port) for unit in left}
        views: Views = {host: view for host, view in seen.items() if view is not None}
        (needed if lacks or members.coverage.missing(views) else spared).append(port)
    return NodeShare(
        nodes=nodes, ports=ends, ranks=[rank for unit in whole for rank in unit.ranks], complete=not lacks,
        survives=members.tolerance(whole), spared=[] if lacks else spared, needed=[] if lacks else needed,
        lacks=lacks[:300],
    )


def _view(unit: Unit, nodes: Sequence[str], copies: Copies, without: str = "") -> Direction | None:
    """What of a host these nodes see for certain: the directions in which all its NICs are copied to them. without: a
    monitor port that is lost."""
    seen = [
        {
            way for session in copies[leaf.name, nic.port] if session.node in nodes
            and f"{session.leaf} {session.destination}" != without for way in session.ways
        }
        for leaf, nic in unit.nics
    ]
    certain = set.intersection(*seen) if seen else set()
    if len(certain) == len(ways_of("both")):
        return "both"
    return next(iter(certain), None)


def describe(choice: GroupChoice, *, joined: bool) -> list[str]:
    """The shares of a group as lines for people, each shorter than 300 characters."""
    lines = []
    for share in choice.shares:
        who = _who(share, joined=joined)
        if not share.complete:
            lines.append(f"{who} is not complete: {share.lacks}" if len(share.nodes) == 1 else
                         f"{who} are not complete: {share.lacks}")
            continue
        where = f"{who} ({_few(share.ports)})"
        mirrored = f"with any {share.survives} of {len(share.ranks)} mirrored GPUs lost"
        if len(share.nodes) == 1:
            lines.append(f"{where} is complete by itself, {mirrored}")
        elif joined:
            lines.append(f"{where} are complete in a replay of all their captures, {mirrored}")
        elif choice.complete:
            lines.append(f"{where} are complete, {mirrored}; that depends on the peers")
        else:
            lines.append(f"{where} are complete, {mirrored}; that depends on the peers: none is complete by itself")
        if len(share.nodes) == 1 and len(share.ports) > 1:
            lines.append(f"  it has to capture on all of these {len(share.ports)} ports")
        lines += _losses(share)
    return [line[:300] for line in lines]


def _who(share: NodeShare, *, joined: bool) -> str:
    if len(share.nodes) == 1:
        return f"node {share.nodes[0]}"
    return f"{'all nodes' if joined else 'peers'} {_few(share.nodes)} together"


def _losses(share: NodeShare) -> list[str]:
    """Which loss of one port the share survives, in words: mirrored ports, then monitor ports."""
    lines = []
    kinds = {False: "mirrored port", True: "monitor port (or its cable, or the node's port behind it)"}
    for monitor, kind in kinds.items():
        spared = [port for port in share.spared if (port in share.ports) is monitor]
        needed = [port for port in share.needed if (port in share.ports) is monitor]
        if spared:
            lines.append(f"  survives the loss of {'one' if needed else 'any one'} {kind}: {_few(spared)}")
        if needed:
            lines.append(f"  does not survive the loss of a {kind}: {_few(needed)}")
    return lines


def _few(names: Iterable[str]) -> str:
    some = list(names)
    return ", ".join(some[:NAMED]) + (f" and {len(some) - NAMED} more" if len(some) > NAMED else "")
