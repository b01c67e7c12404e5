"""The follower: in which order things happen, what is current when they are said, and that nothing waits for ever.

Engine and replica are made up (tests/flowcheck/fake_engine.py, followed.py). What becomes of real versions is in
tests/flowcheck/node/test_live_session.py and tests/flowcheck/offline/test_session.py, which drive the same follower.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowcheck.rebuild.version.follower
from flowcheck.errors import UserError
from flowcheck.rebuild.iteration import verdict
from flowcheck.rebuild.version.events import Closed, Lost, Read, Skipped
from flowcheck.rebuild.version.policy import Policy
from lab.synth import example_job, sharded_job

from ..fake_engine import FakeSource, Packet, whole
from .followed import PARTLY, FakeReplica, Followed, port

# -- the order of events --------------------------------------------------------------------------------


def test_each_event_is_said_while_its_version_is_current(live) -> None:
    """Three iterations close in one poll. Whoever handles the first finds its version, and its arena."""
    at = live(port(2, 3, 4), arenas=4)
    replica, found = at.start(2), []
    at.record(2, 3, 4)
    at.when = lambda event: found.append((event.iteration, replica.step, at.engine.oldest))
    assert at.look() == ["closed 2", "closed 3", "closed 4"]
    assert found == [(2, 3, 2), (3, 4, 3), (4, 5, 4)] and at.engine.oldest == 5


def test_what_was_not_published_is_said_before_the_chain_is_lost(live) -> None:
    at = live(FakeSource([*whole(2), Packet(3, past=4, cells=PARTLY), *whole(4, 5)], open=True), first=7)
    at.start(2)
    at.record(2, 3, 4, 5)
    assert at.look() == ["closed 2"]
    assert at.look() == ["not 3", "lost", "not 4"] and at.look() == ["not 5"]
    (lost,) = (event for event in at.events if isinstance(event, Lost))
    assert lost.why.startswith("iteration 10 is not published: covered: bucket 0: 8 of 24 elements")


@pytest.mark.parametrize("how", ["differs", "cannot be applied"])
def test_a_version_that_is_wrong_is_lost_before_its_iteration_is_told(live, how: str) -> None:
    at = live(port(2))
    replica = at.start(2)
    replica.differs, replica.broken = "layer0.weight", {2} if how != "differs" else set()
    at.record(2, checksums={"layer0.weight": "0" * 16})
    assert at.look() + at.look() == ["lost", "not 2"]
    assert (at.chain.replica is None) == (how == "differs") and replica.step == 2
    assert ("discard" in replica.calls) == ("close" in replica.calls) == (how == "differs")


def test_only_a_version_that_was_compared_is_marked_verified(live) -> None:
    at = live(port(2, 3, 4), arenas=4)
    replica = at.start(2)
    at.record(2, 4)
    at.record(3, checksums={"layer0.weight": "0" * 16})
    assert at.look() + at.look() == ["closed 2", "closed 3", "closed 4"]
    assert replica.marks == [False, True, False]
    assert replica.said == ["unverified", "verified", "follows 4"]  # to those who read it in shared memory
    assert replica.matches == [0, 1, 1] and at.chain.matches == 1


def test_captures_alone_verify_nothing(offline) -> None:
    at = offline(FakeSource(whole(0, 1)))
    at.take(at.follower.run())
    assert at.said == ["closed 0", "closed 1"]
    assert at.replica.said == ["unverified", "unverified"] and at.replica.marks == [False, False]
    assert at.replica.matches == [0, 0] and at.chain.matches == 0


def test_what_is_missing_at_the_end_is_final_because_it_ends(live) -> None:
    """A port that is closed is open until then: its scheduler knows of no end."""
    at = live(FakeSource([*whole(2), Packet(3, cells=PARTLY)], open=True), arenas=4)
    at.start(2)
    at.record(2, 3)
    assert at.look() == ["closed 2"]
    at.take(at.follower.finish())
    assert at.said == ["closed 2", "not 3", "lost"]
    assert [event.final for event in at.events if isinstance(event, Closed)] == ["", "ended"]


def test_what_nothing_has_shown_goes_with_the_version(live, monkeypatch: pytest.MonkeyPatch) -> None:
    at = live(port(2, 3), arenas=4)
    replica = at.start(2)
    at.record(2, 3)
    monkeypatch.setattr(verdict, "_unproven", lambda evidence: iter(["a mark"]))
    assert at.look() + at.look() == ["closed 2", "closed 3"]
    assert replica.unproven == [("a mark",), ("a mark",)]


def test_a_version_that_is_not_the_trainers_fails_by_its_checksum(live) -> None:
    at = live(port(2))
    at.start(2).differs = "layer0.weight"
    at.record(2, checksums={"layer0.weight": "0" * 16})
    assert at.look() + at.look() == ["lost", "not 2"]
    closed = at.events[-1]
    assert isinstance(closed, Closed)
    assert [clause for clause, _ in closed.why] == ["checksum"] and closed.status == "diverged"


def test_an_outage_is_said_before_the_chain_is_lost(live) -> None:
    at = live(port(2, 3000))
    at.start(2)
    at.record(2)
    assert at.look() == ["closed 2"] and at.look() == []  # a record of 3 may come
    at.now += 60
    assert at.look() == ["waiting 3", "skipped 3-2997", "lost", "not 2998"]
    assert at.look() == [] and at.chain.next is None


def test_an_outage_that_ends_before_the_state_loses_nothing(live) -> None:
    at = live(port(2))
    at.look()
    at.start(2900)
    at.engine.sources[0].packets += whole(3000)
    assert at.look()[:2] == ["skipped 3-2997", "lost"]  # but this one does not
    at = live(port(2))
    at.look()
    at.start(2999)
    at.engine.sources[0].packets += whole(3000)
    assert at.look()[0] == "skipped 3-2997" and "lost" not in at.said and at.chain.next == 2999


def test_who_stops_listening_in_the_middle_has_lost_no_arena(offline) -> None:
    """A replay that has all the iterations that were asked for."""
    at = offline(port(0, 1, 2), arenas=4)
    for event in at.follower.run():
        if isinstance(event, Closed):
            break
    assert at.engine.retired == [1] and at.engine.finished == 0


def test_a_run_says_how_far_it_has_read(offline) -> None:
    at = offline(FakeSource([Packet(0)] * 3000, late=2))
    at.take(at.follower.run())
    assert [event.packets for event in at.events if isinstance(event, Read)] == [0, 0, 2048, 3000]
    assert isinstance(at.events[-1], Closed) and at.engine.finished == 1


def test_it_rests_only_while_nothing_happens(live, monkeypatch) -> None:
    """Four looks: packets come, nothing, an iteration closes, the port ends."""
    one, naps = port(0), []
    at = live(one)
    at.follower.trainers.announce(0)

    def sleep(seconds: float) -> None:
        naps.append((sum(isinstance(event, Read) for event in at.events), seconds))
        at.follower.trainers.withdraw()

    at.when = lambda event: one.end() if isinstance(event, Closed) else None
    monkeypatch.setattr(flowcheck.rebuild.version.follower.time, "sleep", sleep)
    at.take(at.follower.run())
    assert naps == [(2, 0.0005)] and at.said == ["not 0"]


class Threads:
    """Placing threads of all jobs, which have taken nothing, and a job's seat there. said: what was asked of them."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.said = list[str]()

    def attach(self, engine: Any) -> Threads:
        self.engine = engine
        self.said.append("attach")
        return self

    def leave(self) -> None:
        self.said.append("leave")

    def look(self, stream: int) -> tuple[int, bool]:
        return 0, False

    def ring(self, stream: int) -> tuple[int, int, int]:
        return 0, 0, 1

    def drained(self, stream: int) -> bool:
        return False


def test_what_threads_place_is_no_reason_to_look_again_at_once(live) -> None:
    """A thread that always looks takes a processor from those that place."""

    class Placing(Threads):
        def look(self, stream: int) -> tuple[int, bool]:
            return 7, False

    at = live(port(2))
    at.look()
    at.arenas.place_in_threads(Placing())
    assert at.look() == [] and at.arenas.consumed >= 0
    assert not at.follower.moved
    at.arenas.stop()
    at.engine.sources[0].packets += port(2).packets
    at.look()
    assert at.follower.moved, "and here more may lie in the ring"


def test_threads_place_until_they_are_left(live) -> None:
    at, threads = live(port(2)), Threads()
    at.arenas.place_in_threads(threads)
    assert (threads.engine, threads.said) == (at.engine, ["attach"])
    assert at.look() == [] and at.engine.runs == [], "the ring is theirs"
    at.arenas.stop()
    at.arenas.stop()
    assert threads.said == ["attach", "leave"]
    assert at.look() == ["not 2"], "and here is read what they left"
    for end in (lambda: at.take(at.follower.finish()), at.follower.close):
        threads = Threads()
        at.arenas.place_in_threads(threads)
        end()
        end()
        assert threads.said == ["attach", "leave"]


# -- who may close --------------------------------------------------------------------------------------


def test_captures_wait_for_no_record(offline) -> None:
    """And where the manifest declares one, nothing can be published without it."""
    job = example_job(count=[24, 9], startup=False)
    job.step_values = ["lr"]
    at = offline(FakeSource(whole(0, 1)), job=job)
    at.take(at.follower.run())
    assert at.said == ["not 0", "lost", "not 1"]


def test_a_port_waits_for_the_record_of_what_is_built_alone(live) -> None:
    at = live(port(2, 3), arenas=4)
    at.start(3)
    assert at.look() == ["not 2"]
    assert at.look() == []
    at.now += 0.6
    assert at.look() == ["waiting 3"] and at.look() == []
    at.record(3)
    assert at.look() == ["closed 3"]


def test_a_wait_that_is_over_is_said_all_the_same(live) -> None:
    """Nobody looked for a long time."""
    at = live(port(2))
    at.start(2)
    assert at.look() == []
    at.now += 60
    assert at.look() == ["waiting 2", "not 2", "lost"]


@pytest.mark.parametrize("differs", [None, "", "layer0.weight"])
def test_nothing_closes_while_a_comparison_is_under_way(live, differs: str | None) -> None:
    at = live(port(2, 3), arenas=4)
    replica = at.start(2)
    replica.differs = None
    at.record(2, checksums={"layer0.weight": "0" * 16})
    at.record(3)
    assert at.look() == [] and at.look() == [] and at.follower.moved and at.engine.oldest == 3
    replica.differs = differs
    assert at.look() == {None: [], "": ["closed 2", "closed 3"], "layer0.weight": ["lost", "not 2", "not 3"]}[differs]


def test_a_state_is_too_late_once_its_iteration_has_closed(live) -> None:
    at = live(port(2, 3), first=5)
    at.look()
    at.follower.check(4)
    with pytest.raises(UserError, match="the state before iteration 8 is here, and 8 has passed"):
        at.follower.check(3)


# -- the chain without trainers -------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "begins", "said"), [
    (0, 0, ["closed 0", "closed 1"]), (7, 0, ["closed 0", "closed 1"]), (None, 0, ["closed 0", "closed 1"]),
    (3, 3, ["closed 3", "closed 4"]), (4, 3, ["not 3", "closed 4"]), (2, 3, ["not 3", "lost", "not 4"]),
    (None, 3, ["closed 3", "closed 4"]),
])
def test_where_weights_belong(offline, weights: int | None, begins: int, said: list[str]) -> None:
    """Captures that begin with the communicator go on from any step; those that begin later need just theirs."""
    at = offline(FakeSource(whole(begins, begins + 1)), replica=FakeReplica(weights))
    at.engine.begins_here = begins == 0
    at.take(at.follower.run())
    assert at.said == said
    published = sum(one.startswith("closed") for one in said)
    assert at.replica.step == (weights or 0) + (published if weights is not None else 0)


@pytest.mark.parametrize("weights", [0, None])
@pytest.mark.parametrize("sharded", [False, True])
def test_only_gathered_parameters_need_no_iteration_before_them(offline, weights: int | None, sharded: bool) -> None:
    job = sharded_job(count=(24, 9)) if sharded else None
    packets = [*whole(0), Packet(1, past=2, cells=PARTLY), *whole(2, 3)]
    at = offline(FakeSource(packets), job=job, replica=FakeReplica(None if sharded else weights), arenas=4)
    at.take(at.follower.run())
    assert at.said == ["closed 0", "not 1", *(["closed 2", "closed 3"] if sharded else ["lost", "not 2", "not 3"])]


def test_gradients_that_begin_with_an_outage_are_no_chain(offline) -> None:
    """Their connections begin here, and the first packet that was captured is of iteration 3000."""
    at = offline(FakeSource(whole(3000)), replica=FakeReplica(None))
    at.take(at.follower.run())
    assert at.said == ["skipped 0-2997", "not 2998", "not 2999", "not 3000"], "and none that could be lost"


# -- nothing waits for ever -----------------------------------------------------------------------------


steps = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=12)


@given(
    st.lists(steps, min_size=1, max_size=3), st.integers(2, 4), st.sets(st.integers(0, 20)),
    st.one_of(st.none(), st.integers(0, 20)), st.one_of(st.none(), st.integers(0, 20)),
)
def test_every_iteration_closes_once_and_in_order(scripts, arenas, records, starts, announced) -> None:
    """Whatever is missing: packets, records, a state that was announced. Time passes, and nothing is waited for."""
    sources = []
    for script in scripts:
        packets, iteration = [], 0
        for step, past, everything in script:
            iteration += step
            packets.append(Packet(iteration, past=iteration + past, cells=(0, None) if everything else PARTLY))
        sources.append(FakeSource(packets, open=True))
    total = sum(len(source.packets) for source in sources)
    newest = max((packet.iteration for source in sources for packet in source.packets), default=-1)
    with pytest.MonkeyPatch.context() as patch:
        at = Followed(patch, Policy.live(record_seconds=5.0), *sources, arenas=arenas)
        at.engine.begins_here = True
        if starts is not None:
            at.start(starts)
        if announced is not None:
            at.follower.trainers.announce(announced)
        at.record(*sorted(records))
        for turn in range(200):
            at.take(at.follower.poll())
            at.now += 2
            if turn == 50:
                at.follower.trainers.withdraw()
            if turn == 100:
                for source in sources:
                    source.end()
        assert at.arenas.consumed == total
        at.take(at.follower.finish())
    closed = [event.iteration for event in at.events if isinstance(event, Closed)]
    said = [(event.first, event.last) for event in at.events if isinstance(event, Skipped)]
    unseen = {t for t in records if t > newest}  # trainers are through with them, and no packet came
    assert closed == list(range(newest + 1)) and len(at.follower.records) == 0
    assert said == ([(min(unseen), max(unseen))] if unseen else [])
    assert sum(isinstance(event, Lost) for event in at.events) <= 1
    assert all(said.count(one) == 1 for said in [at.said] for one in said if one.startswith("waiting"))
