"""The states of a chain of versions: which changes are legal, and what else is our bug."""

from __future__ import annotations

import itertools
import re

import pytest

from flowcheck.errors import InternalError
from flowcheck.rebuild.version import chain
from flowcheck.rebuild.version.chain import EDGES, Chain, VersionChain

AWAITING = {Chain.FOLLOWING, Chain.BUILDING, Chain.HOLDING, Chain.PATCHING}


def at(state: Chain) -> VersionChain:
    """A chain that has come there by legal changes, the fewest."""
    ways = [[Chain.NONE]]
    while ways[0][-1] is not state:
        way = ways.pop(0)
        ways += [[*way, one] for one in EDGES[way[-1]]]
    found = VersionChain()
    for one in ways[0][1:]:
        found.move(one, 3 if one in AWAITING else None)
    return found


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Chain, Chain)))
def test_only_what_is_drawn_may_happen(before: Chain, after: Chain) -> None:
    one, awaited = at(before), 4 if after in AWAITING else None
    was = one.next
    if after in EDGES[before]:
        one.move(after, awaited)
        assert (one.state, one.next) == (after, awaited)
    else:
        with pytest.raises(InternalError):
            one.move(after, awaited)
        assert (one.state, one.next) == (before, was), "and it is as it was"


@pytest.mark.parametrize("state", [one for one in Chain if one is not Chain.NONE])
def test_an_iteration_is_awaited_in_some_states_and_in_no_other(state: Chain) -> None:
    before = next(one for one in Chain if state in EDGES[one])
    one = at(before)
    with pytest.raises(InternalError):
        one.move(state, None if state in AWAITING else 4)
    assert one.state is before


def test_every_edge_is_drawn() -> None:
    drawn = set()
    for line in (chain.__doc__ or "").splitlines():
        if found := re.match(r"    ([A-Z_, ]+) -> ([A-Z_]+)", line):
            drawn |= {(Chain[name], Chain[found[2]]) for name in found[1].split(", ")}
    assert drawn == {(before, after) for before, edges in EDGES.items() for after in edges}
