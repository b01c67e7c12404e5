"""The impairer in the cable: what arrives is exactly what its log says."""

from __future__ import annotations

from collections import Counter

import pytest

from flowcheck.errors import UserError
from lab.network.fabric import Fabric
from lab.network.impair import Event, Impairment

from ..conftest import Tap, psn_of, roce_frame

pytestmark = pytest.mark.root

COUNT = 2000


def pass_over(lab: Fabric, first: int = 0, count: int = COUNT) -> list[bytes]:
    """Frames with PSNs first.. from rank 0 to rank 1, as they arrive there."""
    with Tap(lab.config.namespace("r1"), "fab0") as there, Tap(lab.config.namespace("r0"), "fab0") as here:
        for psn in range(first, first + count):
            here.send(roce_frame(0, 1, psn, 300))
        return there.roce(count)


def by_kind(events: list[Event], what: str) -> list[int]:
    return [event.psn for event in events if event.what == what]


def test_loss_doubles_damage_and_the_log_agree(fabric) -> None:
    lab = fabric(ranks=2, mirrored=(), impairments=(Impairment("r0", drop=0.1, duplicate=0.1, corrupt=0.1),))
    frames = pass_over(lab)
    lab.impairer.stop()
    events = lab.impairer.events()
    assert {(event.port, event.way, event.src, event.dst, event.qpn) for event in events} == {
        ("r0", "to", "10.77.0.10", "10.77.0.11", 17)}
    lost, doubled = by_kind(events, "dropped"), by_kind(events, "doubled")
    assert 100 < len(lost) < 320 and 100 < len(doubled) < 320
    damage = {event.psn: event for event in events if event.what == "damaged"}
    wanted: Counter[bytes] = Counter()
    for psn in set(range(COUNT)) - set(lost):
        frame = bytearray(roce_frame(0, 1, psn, 300))
        if psn in damage:
            frame[damage[psn].at] ^= 1 << damage[psn].bit
        wanted[bytes(frame)] += 1 + doubled.count(psn)
    assert Counter(frames) == wanted and len(damage) > 100
    counters = next(one for one in lab.impairer.counters if one["way"] == "to" and one["port"] == "r0")
    assert (counters["received"], counters["dropped"], counters["lost"]) == (COUNT + 1, len(lost), 0)  # one ARP
    assert counters["sent"] == len(frames) + 1 and counters["damaged"] == len(damage)


def test_moved_packets_are_overtaken_by_as_many_as_said(fabric) -> None:
    lab = fabric(ranks=2, mirrored=(), impairments=(Impairment("r0", reorder=0.02, distance=5),))
    arrived = [psn_of(frame) for frame in pass_over(lab)]
    lab.impairer.stop()
    moved = by_kind(lab.impairer.events(), "moved")
    assert sorted(arrived) == list(range(COUNT)) and len(moved) > 10
    stayed = [psn for psn in arrived if psn not in set(moved)]
    assert stayed == sorted(stayed)
    for psn in moved:
        overtakers = [other for other in arrived[: arrived.index(psn)] if other > psn and other not in set(moved)]
        assert len(overtakers) == 5 or psn > COUNT - 20  # at the end nobody comes, and it leaves when the wire is idle


def test_the_same_seed_does_the_same(fabric) -> None:
    lab = fabric(ranks=2, mirrored=(), impairments=(Impairment("r0", drop=0.05, seed=7, trace=True),))
    first = {psn_of(frame) for frame in pass_over(lab)}
    lab.impairer.stop()
    events = lab.impairer.events()
    assert by_kind(events, "passed") == sorted(first)  # with trace all of them are there
    lab.down()
    lab.up()
    assert {psn_of(frame) for frame in pass_over(lab)} == first


def test_a_wire_that_is_cut_for_a_while(fabric) -> None:
    lab = fabric(ranks=2, mirrored=(), impairments=(Impairment("r1"),))
    arrived = []
    for first, down in ((0, False), (100, True), (200, False)):
        lab.impairer.set_down("r1", down)
        arrived += [psn_of(frame) for frame in pass_over(lab, first, 100)]
    lab.impairer.stop()
    assert arrived == [*range(100), *range(200, 300)]
    assert by_kind(lab.impairer.events(), "down") == list(range(100, 200))
    with pytest.raises(UserError, match="not impaired"):
        lab.impairer.set_down("r0", True)


def test_rates_are_probabilities() -> None:
    with pytest.raises(UserError, match="probability"):
        Impairment("r0", drop=1.5)
