"""How often a trainer is asked for its state: at once the first time, bounded after that, later if the node is slow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.node.groups.state_requests import MOST, OWN, SHARE, SOON, Beginnings, Uploads


class Clock:
    """Time and the node's own drops, as a test sets them."""

    def __init__(self) -> None:
        self.now, self.drops = 1000.0, 0
        self.uploads = Uploads(lambda: self.drops, lambda: self.now)

    def state(self, seconds: float = 0.0) -> None:
        self.uploads.announced()
        self.now += seconds
        self.uploads.taken()

    def until_due(self, most: float = 2 * MOST) -> float:
        begin = self.now
        while not self.uploads.due():
            self.now += 0.25
            assert self.now - begin <= most
        return self.now - begin


def test_before_there_was_a_state_nothing_waits() -> None:
    at = Clock()
    assert at.uploads.lost() == at.uploads.lost() == 0.0 and at.uploads.due()


def test_pauses_double_while_the_node_drops_packets_and_begin_anew_after_a_long_chain() -> None:
    at = Clock()
    found = []
    for _ in range(8):
        at.state()
        at.drops += 1
        found.append(at.uploads.lost())
        assert at.until_due() == found[-1]
    assert found == [10, 20, 40, 80, 160, 300, 300, 300]
    at.state()
    at.now += 8 * 300 + 1
    at.drops += 1
    assert at.uploads.lost() == 10.0


def test_what_a_mirror_loses_is_made_good_as_long_as_that_costs_little() -> None:
    at = Clock()
    at.state()
    assert at.uploads.lost() == 0.0 and at.uploads.due()
    for _ in range(20):
        at.state(seconds=0.25)
        at.now += 1
        assert at.uploads.lost() == SHARE * 0.25 - 1
        assert at.until_due() == 4


def test_a_large_state_is_asked_for_less_often() -> None:
    at = Clock()
    at.state(seconds=3.0)
    at.now += 10
    assert at.uploads.lost() == SHARE * 3.0 - 10
    assert at.until_due() == 50


def test_a_node_that_drops_packets_waits_until_it_has_stopped() -> None:
    at = Clock()
    at.state()
    at.drops = 7
    assert at.uploads.lost() == 10
    at.now += 9.75
    assert not at.uploads.due()
    for _ in range(100):  # a question now would be answered in vain
        at.now, at.drops = at.now + 1, at.drops + 1
        assert not at.uploads.due()
    at.now += 4.75
    assert not at.uploads.due()
    at.now += 0.25
    assert at.uploads.due()
    at.state()
    at.drops += 1
    assert at.uploads.lost() == 20
    at.now += 20
    at.state()
    assert at.uploads.lost() == 0  # not the node's fault this time


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 4), st.booleans()), min_size=40, max_size=40))
def test_uploads_take_a_bounded_part_of_the_time(chains: list[tuple[float, float, bool]]) -> None:
    """lasted, seconds of the upload, did the node drop packets: whatever happens, from the second upload on."""
    at = Clock()
    begin = at.now
    for lasted, cost, dropped in chains:
        at.state(cost)
        begin = max(begin, at.now)
        at.now += lasted
        at.drops += dropped
        at.uploads.lost()
        at.until_due()
        assert at.now - begin >= SHARE * cost - 1e-6
        begin = at.now


def test_a_storm_of_drops_asks_a_handful_of_times() -> None:
    """A node that is too slow: each chain ends a tenth of a second after its state, for ten minutes."""
    at = Clock()
    asked, end = 0, at.now + 600
    while at.now < end:
        at.state(0.01)
        at.now += 0.1
        at.drops += 3
        at.uploads.lost()
        at.until_due()
        asked += 1
    assert asked <= 6


# -- by ranges -----------------------------------------------------------------------------------------------------


class Begun:
    def __init__(self) -> None:
        self.now = 1000.0
        self.pace = Beginnings(lambda: self.now)

    def ends(self, after: float) -> float:
        """Versions were begun, lasted so long, and ended; how long until they are begun again."""
        self.pace.begun()
        self.now += after
        pause = self.pace.lost()
        assert self.pace.due() == (pause == 0)
        if pause:
            self.now += pause - 0.001
            assert not self.pace.due()
            self.now += 0.001
            assert self.pace.due()
        return pause


def test_what_lasted_is_begun_again_at_once() -> None:
    at = Begun()
    assert [at.ends(SOON * OWN + 1) for _ in range(4)] == [0.0] * 4


def test_what_ends_soon_again_and_again_is_begun_ever_more_rarely() -> None:
    at = Begun()
    assert [at.ends(1.0) for _ in range(8)] == [0.0, OWN, 2 * OWN, 4 * OWN, 8 * OWN, 16 * OWN, MOST, MOST]
    assert at.ends(SOON * MOST + 1) == 0.0 and at.ends(1.0) == OWN


def test_soon_is_a_matter_of_the_pause_before() -> None:
    at = Begun()
    assert [at.ends(1.0), at.ends(1.0), at.ends(1.0)] == [0.0, OWN, 2 * OWN]
    assert at.ends(SOON * 4 * OWN) == 4 * OWN and at.ends(SOON * 8 * OWN + 1) == 0.0


def test_the_first_end_is_free() -> None:
    assert Begun().ends(0.0) == 0.0
