"""Which members make a group with parity: what a root decides of it. Pure.

    parity = grouped((2, 2), members, {name: have.own}, before)       UserError: there can be none, and why

Data is where the shards are: each shard lies whole at the node that follows it, so that node holds it (ECCheck gives a
data group to the node that overlaps it most, checkpoint/coding/shape.py:data_nodes; here that is all of it). Streams of
parity are kept by who else there is, as `flowcheck plan holders` says it (checkpoint/coding/holders.py): where the
group has the fewest, members without a mirror port first. Who has a place keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flowcheck.checkpoint.coding.holders import crowded, joining
from flowcheck.errors import UserError
from flowcheck.node.protect.placement import Member, Parity, Shard

__all__ = ["grouped"]

WHERE = "protect.parity"


def grouped(
    code: tuple[int, int], members: Mapping[str, Member], owns: Mapping[str, Collection[Shard]],
    before: Parity | None = None,
) -> Parity | None:
    """code: streams of data and of parity. members: that are there, and have a place. owns: of each, which shards its
    node has versions of. before: what holds now; a member of it that is gone stays in it where nobody takes its place.
    None: no group can be, and no job is followed yet. Raises UserError: with what is followed, or with who is there,
    there can be none."""
    given, before = before, before if before is not None and before.code == code else None
    data = _data(code[0], members, owns, before)
    if data is None:
        return given
    taken = [name if name in members and name not in data else "" for name in (
        before.holders if before is not None else [""] * code[1])]
    spare = sorted((name for name, one in members.items() if one.parity and name not in (*data, *taken)),
                   key=lambda name: (members[name].follows, name))
    if before is None and len(spare) < code[1]:
        raise UserError(f"{len(spare)} members beside the {code[0]} that follow its shards may keep parity, and"
                        f" {code[1]} have to", where=WHERE, remedy="more members with protect.parity")
    names = sorted({*spare, *(name for name in (*data, *taken) if name in members)})
    sites, at = [members[name].site for name in names], {name: number for number, name in enumerate(names)}
    there = [at[name] for name in (*data, *taken) if name in at]
    come = [names[one] for one in joining(sites, there, [at[name] for name in spare], taken.count(""))]
    if before is None and (domain := crowded([*there, *(at[name] for name in come)], sites, code[1])):
        raise UserError(f"{domain} would be lost with more than {code[1]} members of the group", where=WHERE,
                        remedy="members elsewhere, or no nodes.leaf and nodes.host where that may happen")
    left = iter(come)
    was = before.holders if before is not None else taken
    return Parity(data, tuple(name or next(left, old) for name, old in zip(taken, was, strict=True)))


def _data(
    count: int, members: Mapping[str, Member], owns: Mapping[str, Collection[Shard]], before: Parity | None
) -> tuple[str, ...] | None:
    """Who has each of the shards, in the order of their names; of two that mirror the same one who had it before."""
    followed = {name: owns.get(name, ()) for name in members}
    if len(runs := sorted({run_id for shards in followed.values() for run_id, _, _ in shards})) > 1:
        raise UserError(f"several jobs are followed: {', '.join(map(repr, runs))}", where=WHERE,
                        remedy="a nodes.cluster of its own for each job")
    of: dict[str, list[str]] = {}
    for name, shards in followed.items():
        mine = sorted({shard for _, _, shard in shards})
        if len(mine) > 1:
            raise UserError(f"{name} follows {', '.join(map(repr, mine))}, which would be lost together", where=WHERE,
                            remedy="a node for each shard")
        if mine and not members[name].parity:
            raise UserError(f"{name} follows {mine[0]!r}, and has no protect.parity", where=WHERE,
                            remedy="the same protect.parity in all members")
        for shard in mine:
            of.setdefault(shard, []).append(name)
    if len(of) > count or (of and before is None and len(of) < count):
        raise UserError(f"{len(of)} shards ({', '.join(map(repr, sorted(of)))}) for {count} streams of data",
                        where=WHERE, remedy="as many as the job has shards, each of a node of its own")
    if len(of) < count:
        return before.data if before is not None else None
    had = before.data if before is not None else ()
    return tuple(min(names, key=lambda name: (name not in had, name)) for _, names in sorted(of.items()))
