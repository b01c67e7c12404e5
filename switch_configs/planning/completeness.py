"""What each node has of a group once the sessions are known: is it complete by itself, and what loss does it survive?

Worked out from the sessions alone, whatever chose them. A host counts for a node when the copies of all its NICs end
there: which of them a ring or tree uses is NCCL's affair. So a lost mirrored port takes its host out, and a lost
monitor port all hosts that have a copy going through it. A monitor port stands for its cable and the node's port, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from switch_configs.planning.hosts import Members, Unit
from switch_configs.schema import GroupChoice, MirrorSession, NodeShare, Topology

__all__ = ["describe", "shares_of"]

NAMED = 6  # ports in a line for people; the plan has them all


def shares_of(
    members: Members, units: Sequence[Unit], sessions: Sequence[MirrorSession], topology: Topology, *, joined: bool
) -> list[NodeShare]:
    """Every node that gets anything of the group alone, those that survive most first; then nodes that count together:
    peers of which two or more get something, or all nodes if their captures are joined."""
    ends = {(session.leaf, port): session for session in sessions for port in session.ports}
    used = {leaf_nic for unit in units for leaf_nic in ((leaf.name, nic.port) for leaf, nic in unit.nics)}
    nodes = list(dict.fromkeys(session.node for end, session in ends.items() if end in used))
    alone = [_share([node], members, units, ends) for node in nodes]
    alone.sort(key=lambda share: -share.survives)
    sets = [nodes] if joined else [[node for node in peers if node in nodes] for peers in topology.peers]
    return alone + [_share(some, members, units, ends) for some in sets if len(some) > 1]


def _share(
    nodes: list[str], members: Members, units: Sequence[Unit], ends: dict[tuple[str, str], MirrorSession]
) -> NodeShare:
    through: dict[str, set[str]] = {}  # mirrored or monitor port -> hosts whose copies need it
    monitor: list[str] = []
    whole = []
    for unit in units:
        sessions = {(leaf.name, nic.port): ends[leaf.name, nic.port] for leaf, nic in unit.nics}
        for (leaf, port), session in sessions.items():
            if session.node in nodes:
                end = f"{session.leaf} {session.destination}"
                monitor += [end] if end not in monitor else []
                for name in (f"{leaf} {port}", end):
                    through.setdefault(name, set()).add(unit.host)
        if all(session.node in nodes for session in sessions.values()):
            whole.append(unit)
    lacks = members.lacking(whole) if whole else "it has no host's ports all: which of them carry what is NCCL's affair"
    spared: list[str] = []
    needed: list[str] = []
    for port, hosts in through.items():
        left = [unit for unit in whole if unit.host not in hosts]
        (needed if lacks or members.lacking(left) else spared).append(port)
    return NodeShare(
        nodes=nodes, ports=monitor, ranks=[rank for unit in whole for rank in unit.ranks], complete=not lacks,
        survives=members.tolerance(whole), spared=[] if lacks else spared, needed=[] if lacks else needed,
        lacks=lacks[:300],
    )


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
