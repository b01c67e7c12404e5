"""Which place gets the copies of which hosts of each group: all of a group's at one node where the ports allow it.

What is sought: for every group a node (or peers, where none is complete alone) and hosts whose ports all end there, so
that the group survives `target` lost GPUs. Rates, sessions and ASICs bound what ends at a port. What an arrangement
costs is the losses that it does not survive though they were wanted, then the groups that need peers. Three steps, all
of them deterministic; the next is only taken if the one before left a group worse than it could be with empty ports:

1. Greedy. Groups with few places first, then large ones. Each takes the place where it costs least, then that which
   begins the fewest nodes and ports. G groups, P places of each, H hosts: G x P x min(H, CANDIDATES) x (hosts taken).
2. Moves. A group that is worse off takes a place again with one of the groups out of the way that copy to the same
   leaves there, or with all of them; kept if the sum of costs falls. At most MOVES, each as dear as two greedy choices.
3. Exact. Groups that share no leaf do not touch each other. Where at most EXACT_GROUPS do, every choice of place, hosts
   and ports is tried, cheapest first, without those that cannot beat the best so far (branch and bound). At most
   STEPS per set of such groups and ALL_STEPS in all; `proven` says whether it came to an end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from switch_configs.planning.hosts import Members, Place, Unit
from switch_configs.planning.monitor_ports import Deal, MonitorPorts
from switch_configs.schema import Leaf, NicPort

__all__ = ["Arrangement", "Holding", "Wish", "assign"]

MOVES = 2000
EXACT_GROUPS, EXACT_NICS = 24, 200
STEPS, ALL_STEPS = 20_000, 60_000

INCOMPLETE = 1 << 40  # cost of a group that is complete nowhere
LOSS = 1 << 20  # cost of a lost GPU more that is not survived; 1: it needs peers


@dataclass
class Wish:
    """What one group wants. usable: hosts that some node can have. target: GPUs that may be lost. all_of: every usable
    host is to be mirrored, because a person named them. places: each with the usable hosts that it reaches."""

    members: Members
    usable: list[Unit]
    target: int
    all_of: bool
    places: list[tuple[Place, list[Unit]]]

    def __post_init__(self) -> None:
        for place, units in self.places:
            assert self.members.tolerance(units) >= 0, place.nodes

    def cost(self, place: Place, units: Sequence[Unit]) -> int:
        return max(0, self.target - self.members.tolerance(units)) * LOSS + place.together

    @property
    def bound(self) -> int:
        """What it costs at least, with empty ports."""
        return min((self.cost(place, units) for place, units in self.places), default=INCOMPLETE)

    @property
    def load(self) -> float:
        return max((unit.load for unit in self.usable), default=0.0)


@dataclass
class Holding:
    """What one group has: hosts whose copies all end at the place, others elsewhere, and every port dealt for them."""

    place: Place
    units: list[Unit]
    cost: int
    deals: dict[int, list[Deal]]  # by Unit.index
    others: list[Unit] = field(default_factory=list)


@dataclass
class Arrangement:
    """Per group what it has, None: complete nowhere. proven: no arrangement costs less. steps: of the exact search."""

    holdings: list[Holding | None]
    proven: bool
    steps: int


class _Spent(Exception):
    """The exact search has used its steps up."""


def assign(wishes: Sequence[Wish], ports: MonitorPorts, everywhere: Place, *, greedy: bool = False) -> Arrangement:
    """Deal ports to every group, as the module's text says. everywhere: all nodes, for hosts that are mirrored though
    their group's place has no room for them. greedy: the first step alone."""
    return _Search(wishes, ports, everywhere).run(greedy=greedy)


class _Search:
    def __init__(self, wishes: Sequence[Wish], ports: MonitorPorts, everywhere: Place) -> None:
        self.wishes, self.ports, self.everywhere = wishes, ports, everywhere
        self.held: list[Holding | None] = [None] * len(wishes)
        self.bounds = [wish.bound for wish in wishes]
        self.moves = self.steps = 0
        self.spent = 0  # of self.steps, before the set of groups that is searched now

    def run(self, *, greedy: bool) -> Arrangement:
        for one in sorted(range(len(self.wishes)), key=self._order):
            self.held[one] = self._best(one)
        if greedy:
            return Arrangement(self.held, proven=not self._worse(range(len(self.wishes))), steps=0)
        if self._worse(range(len(self.wishes))):
            self._move()
        proven = True
        for some in self._sets():
            if self._worse(some):
                proven &= self._exact(sorted(some, key=self._order))
        return Arrangement(self.held, proven, self.steps)

    def _order(self, one: int) -> tuple[int, float, int]:
        wish = self.wishes[one]
        return len(wish.places), -wish.load, one

    def _cost(self, one: int) -> int:
        holding = self.held[one]
        return INCOMPLETE if holding is None else holding.cost

    def _worse(self, some: Sequence[int]) -> list[int]:
        """Groups that cost more than they would with empty ports."""
        return [one for one in some if self._cost(one) > self.bounds[one]]

    # -- greedy ---------------------------------------------------------------------------------------

    def _best(self, one: int) -> Holding | None:
        """Deal a group's hosts to the place that suits best. None: it is complete at none, and nothing is dealt."""
        wish = self.wishes[one]
        best: Holding | None = None
        least: tuple[int, int, int] | None = None
        nodes, sessions = self.ports.nodes_in_use, self.ports.sessions
        for place, units in wish.places:
            if best is not None and wish.cost(place, units) > best.cost:
                continue
            holding = self._fit(wish, place, units)
            if holding is None:
                continue
            key = holding.cost, self.ports.nodes_in_use - nodes, self.ports.sessions - sessions
            self._release(holding)
            if least is None or key < least:
                best, least = holding, key
            if least == (self.bounds[one], 0, 0):
                break
        if best is not None:
            self._deal_again(best)
        return best

    def _fit(self, wish: Wish, place: Place, units: list[Unit]) -> Holding | None:
        """Hosts of `units` at this place, one after another while ports have room, until the group survives its
        target; None, and nothing is dealt, if that is not complete."""
        chosen: list[Unit] = []
        deals: dict[int, list[Deal]] = {}
        left = sorted(units, key=lambda unit: -unit.load) if wish.all_of else list(units)
        while left and (wish.all_of or wish.members.tolerance(chosen) < wish.target):
            unit = left[0] if wish.all_of else wish.members.next_unit(chosen, left)
            left.remove(unit)
            dealt = self.ports.put(unit, place)
            if dealt is not None:
                chosen.append(unit)
                deals[unit.index] = dealt
        if not wish.all_of:
            kept = wish.members.trimmed(chosen, wish.target)
            for unit in chosen:
                if unit not in kept:
                    for deal in deals.pop(unit.index):
                        self.ports.take_back(deal)
            chosen = kept
        holding = Holding(place, sorted(chosen, key=lambda u: u.index) if wish.all_of else chosen,
                          wish.cost(place, chosen), deals)
        complete = wish.members.tolerance(chosen) >= 0
        if complete and wish.all_of:
            for unit in wish.usable:
                if unit.index not in deals:
                    dealt = self.ports.put(unit, self.everywhere)
                    complete &= dealt is not None
                    deals[unit.index] = dealt or []
                    holding.others.append(unit)
        if not complete:
            self._release(holding)
            return None
        return holding

    def _release(self, holding: Holding) -> None:
        for deals in holding.deals.values():
            for deal in deals:
                self.ports.take_back(deal)

    def _deal_again(self, holding: Holding) -> None:
        for deals in holding.deals.values():
            for deal in deals:
                self.ports.deal(*deal)

    # -- moves ----------------------------------------------------------------------------------------

    def _move(self) -> None:
        better = True
        while better and self.moves < MOVES:
            better = False
            for one in self._worse(range(len(self.wishes))):
                better |= self._make_room(one)

    def _make_room(self, one: int) -> bool:
        wish = self.wishes[one]
        for place, units in wish.places:
            if wish.cost(place, units) >= self._cost(one):
                continue
            leaves = {leaf for unit in units for leaf in unit.leaves}
            rivals = [
                other for other, holding in enumerate(self.held)
                if other != one and holding is not None and any(
                    leaf.name in leaves and port.node in place.nodes
                    for deals in holding.deals.values() for leaf, _, ends in deals for _, port in ends
                )
            ]
            for out in [[rival] for rival in rivals] + ([rivals] if len(rivals) > 1 else []):
                self.moves += 1
                if self.moves > MOVES:
                    return False
                if self._try_move(one, place, units, out):
                    return True
        return False

    def _try_move(self, one: int, place: Place, units: list[Unit], out: list[int]) -> bool:
        touched = [one, *out]
        before = {index: self.held[index] for index in touched}
        cost = sum(self._cost(index) for index in touched)
        self._clear(touched)
        self.held[one] = self._fit(self.wishes[one], place, units)
        for index in sorted(out, key=self._order):
            self.held[index] = self._best(index)
        if sum(self._cost(index) for index in touched) < cost:
            return True
        self._clear(touched)
        self._restore(before)
        return False

    def _clear(self, some: Sequence[int]) -> None:
        for one in some:
            holding = self.held[one]
            if holding is not None:
                self._release(holding)
            self.held[one] = None

    def _restore(self, holdings: dict[int, Holding | None]) -> None:
        for one, holding in holdings.items():
            self.held[one] = holding
            if holding is not None:
                self._deal_again(holding)

    # -- exact ----------------------------------------------------------------------------------------

    def _sets(self) -> list[list[int]]:
        """Groups that can touch each other: those whose hosts are on common leaves, directly or through others."""
        sets: list[tuple[set[str], list[int]]] = []
        for one, wish in enumerate(self.wishes):
            leaves = {leaf for unit in wish.usable for leaf in unit.leaves}
            touching = [some for some in sets if some[0] & leaves]
            sets = [some for some in sets if not some[0] & leaves]
            sets.append((leaves.union(*(some[0] for some in touching)),
                         sorted([one, *(index for some in touching for index in some[1])])))
        return [some for _, some in sets]

    def _exact(self, order: list[int]) -> bool:
        """Search every arrangement of these groups; whether the search came to its end. The best found is held."""
        nics = sum(len(unit.nics) for one in order for unit in self.wishes[one].usable)
        if len(order) > EXACT_GROUPS or nics > EXACT_NICS:
            return False
        best = {one: self.held[one] for one in order}
        least = sum(self._cost(one) for one in order)
        rest = [sum(self.bounds[one] for one in order[at:]) for at in range(len(order) + 1)]
        found: dict[int, Holding | None] = {}
        self.spent = self.steps
        self._clear(order)

        def descend(at: int, cost: int) -> None:
            nonlocal best, least
            if at == len(order):
                best, least = dict(found), cost
                return
            wish = self.wishes[order[at]]
            for place, units, others in self._choices(wish):
                holding = Holding(place, units, wish.cost(place, units), {}, others)
                if cost + holding.cost + rest[at + 1] < least:
                    wanted = [(unit, place) for unit in units] + [(unit, self.everywhere) for unit in others]
                    cables = [(unit.index, cable, where) for unit, where in wanted for cable in unit.nics]
                    self._deal_all(cables, (), partial(take, at, cost, holding))

        def take(at: int, cost: int, holding: Holding, deals: dict[int, list[Deal]]) -> None:
            if cost + holding.cost + rest[at + 1] < least:
                found[order[at]] = replace(holding, deals=deals)
                descend(at + 1, cost + holding.cost)

        try:
            descend(0, 0)
            return True
        except _Spent:
            return False
        finally:
            self._restore(best)

    def _step(self) -> None:
        self.steps += 1
        if self.steps - self.spent > STEPS or self.steps > ALL_STEPS:
            raise _Spent

    def _choices(self, wish: Wish) -> Iterator[tuple[Place, list[Unit], list[Unit]]]:
        """(place, hosts whose copies end there, hosts mirrored elsewhere), those that survive most first. Of hosts not
        named by a person no more than needed: none can be left out."""
        for target in range(wish.target, -1, -1):
            for place, units in wish.places:
                if wish.members.tolerance(units) < target:
                    continue
                sizes = range(len(units), 0, -1) if wish.all_of else range(1, len(units) + 1)
                for some in itertools.chain.from_iterable(itertools.combinations(units, size) for size in sizes):
                    self._step()
                    chosen = list(some)
                    if wish.all_of:
                        if min(wish.members.tolerance(chosen), wish.target) == target:
                            yield place, chosen, [unit for unit in wish.usable if unit not in chosen]
                    elif wish.members.tolerance(chosen) >= target and not any(
                        wish.members.tolerance([unit for unit in chosen if unit is not left]) >= target
                        for left in chosen
                    ):
                        yield place, chosen, []

    def _deal_all(
        self, cables: list[tuple[int, tuple[Leaf, NicPort], Place]], dealt: tuple[tuple[int, Deal], ...],
        then: Callable[[dict[int, list[Deal]]], None],
    ) -> None:
        """Call `then` in every way to deal these ports, with what is dealt by Unit.index; all is taken back."""
        self._step()
        if len(dealt) == len(cables):
            deals: dict[int, list[Deal]] = {}
            for index, deal in dealt:
                deals.setdefault(index, []).append(deal)
            then(deals)
            return
        index, (leaf, nic), place = cables[len(dealt)]
        there = self.ports.ends(leaf.name, nic.port)
        if not there:
            options = self.ports.fitting(place, leaf, [nic])
        else:
            options = [there] if all(port.node in place.nodes for _, port in there) else []
        for ends in options:
            deal = self.ports.deal(leaf, nic, ends)
            try:
                self._deal_all(cables, (*dealt, (index, deal)), then)
            finally:
                self.ports.take_back(deal)
