"""What a rehearsal makes of what it saw: hosts of a port, directions, groups, and what is said of each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from flowcheck.node.rehearse.jobs import Followed
from flowcheck.node.rehearse.report import Host, _completeness, _group, _of_group, _of_port, _seen, hosts_of, one_sided
from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.events import Closed, GivenUp, Timed
from lab.synth import example_job


def flow(src: str, dst: str, **more: Any) -> dict[str, Any]:
    return {"src": src, "dst": dst, "dest_qp": 7, "id": 0, "icrc": {"ok": 1, "wrong": 0}, "requests": None,
            "answers": {"acks": 1}, "kind": "NCCL data", "partner": "absent"} | more


def ring(*ranks: str) -> list[dict[str, Any]]:
    """Data and what comes back for it, of a ring."""
    pairs = list(itertools.pairwise([*ranks, ranks[0]]))
    return [flow(*pair) for pair in pairs] + [flow(dst, src) for src, dst in pairs]


def of(host: str, ways: str = "both") -> list[dict[str, Any]]:
    """What the port of one host of a ring a-b-c-d brings."""
    return [one for one in ring(*"abcd")
            if (one["src"] == host and ways != "in") or (one["dst"] == host and ways != "out")]


@pytest.mark.parametrize(("flows", "hosts"), [
    ([], []),
    (of("b"), [Host("b", 2, 2)]),
    (of("c", "out"), [Host("c", 2, 0)]),
    (of("c", "in"), [Host("c", 0, 2)]),
    (of("b") + of("d", "in"), [Host("b", 2, 2), Host("d", 0, 2)]),
    (ring("a", "b"), [Host("a", 2, 2)]),
    ([flow("a", "b")], [Host("a", 1, 0)]),
    ([flow("x", "x")], [Host("x", 1, 1)]),
])
def test_a_port_is_told_by_its_hosts(flows: list[dict[str, Any]], hosts: list[Host]) -> None:
    assert hosts_of(flows) == hosts


def test_hosts_are_bounded() -> None:
    assert len(hosts_of([flow(f"s{i}", f"d{i}") for i in range(500)])) == 64


def lacking(*ports: list[dict[str, Any]]) -> list[list[str]]:
    return [[host.address for host in hosts] for hosts in one_sided([hosts_of(flows) for flows in ports])]


def test_a_direction_that_no_port_brings_is_missing() -> None:
    assert lacking(of("a"), of("c")) == [[], []]
    assert lacking(of("a"), of("c", "out")) == [[], ["c"]]
    assert lacking(of("a", "in"), of("c", "out")) == [["a"], ["c"]]


def test_two_fibres_of_a_splitter_are_whole_together() -> None:
    assert lacking(of("a", "in"), of("a", "out")) == [[], []]
    assert lacking(of("a", "out"), of("a", "out")) == [["a"], ["a"]]


def test_a_whole_port_of_its_peer_does_not_hide_a_half_that_is_unplugged() -> None:
    """Two ranks: every packet of one is one of the other."""
    assert lacking(ring("a", "b"), [one for one in ring("a", "b") if one["src"] == "b"]) == [[], ["a"]]


def port(**more: Any) -> dict[str, Any]:
    whole = {"address": "a", "sent": 2, "received": 2}
    return {"device": "d", "packets": 9, "flows": 4, "hosts": [whole], "one_sided": [], "most_gbps": 0.5} | more


def test_what_is_said_of_a_port() -> None:
    assert _of_port(port()).good and _of_port(port()).found.endswith("whole: a")
    for odd, found, remedy in (
        (port(packets=0, flows=0, hosts=[]), "no packet", "d brings nothing"),
        (port(flows=0, hosts=[]), "no RoCEv2 of a connection", "not of the job"),
        (port(one_sided=[{"address": "b", "sent": 0, "received": 3}]), "nothing that is sent by b comes", "d: nothing"),
        (port(one_sided=[{"address": "b", "sent": 3, "received": 0}]), "nothing that is sent to b comes", "d: nothing"),
    ):
        said = _of_port(odd)
        assert not said.good and found in said.found and remedy in said.remedy


def test_hosts_that_nccl_joins() -> None:
    def connection(source: str, destination: str, **more: Any) -> dict[str, Any]:
        return {"source": source, "destination": destination, "is": "NCCL", "data_flow": 90, "back_flow": 91,
                "sender_tag": None} | more

    found = {
        "connections": [connection("a", "b", sender_tag=0), connection("b", "c", sender_tag=1), connection("x", "y"),
                        connection("s", "t", **{"is": "other RDMA"})],
        "flows": [flow("c", "a", id=1), flow("p", "q", id=2), flow("m", "n", id=3, kind="reads")],
    }
    assert sorted(_seen(found), key=lambda one: one["addresses"]) == [
        {"addresses": ["a", "b", "c"], "ranks": [0, 1], "connections": 2, "one_sided": 1},
        {"addresses": ["p", "q"], "ranks": [], "connections": 0, "one_sided": 1},
        {"addresses": ["x", "y"], "ranks": [], "connections": 1, "one_sided": 0},
    ]


# -- a job ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def followed() -> Followed:
    return Followed(plan_job(example_job(ranks=3, count=[64])))


def closed(iteration: int, clause: str = "", missing: dict[str, int] | None = None) -> Closed:
    why = [("previous", "no version")] + ([(clause, f"{clause} of {iteration}")] if clause else [])
    return Closed(iteration, False, "waiting", 1, 1, missing or {}, 0, 0, 0, why)


def test_the_iteration_that_was_joined_does_not_count(followed: Followed) -> None:
    """Nor does a clause that only trainers could fulfil."""
    for one in (closed(5, "covered", {"lost": 9}), closed(6), closed(7, "covered", {"lost": 2}), closed(8)):
        followed.take(one)
    assert followed.complete == [True, False, True] and followed.missing == {"lost": 2}
    assert followed.why == {"covered of 7": 1}


def test_times(followed: Followed) -> None:
    followed.take(closed(5))
    followed.take(Timed(Times(5, first=0, covered=1, next=100), (3, 8), (1, 4)))
    followed.take(Timed(Times(6, first=100, covered=140, next=200), (2, 16), (2, 4)))
    followed.take(Timed(Times(7, first=200, next=310), (1, 1), (1, 4)))
    followed.take(GivenUp(8, (7, 8), False))
    assert followed.periods == [100, 110] and followed.left == [60] and followed.given_up == 1
    assert followed.arenas == (2, 4)


def there(job: Any, *ways: str) -> dict[str, Any]:
    """A survey in which each connection of a job is seen in that way."""
    flows: list[dict[str, Any]] = []
    for one, way in zip(job.flows, ways, strict=True):
        if way in ("both", "data"):
            flows.append(flow(one.src_addr, one.dst_addr, dest_qp=one.qpns[0]))
        if way in ("both", "back"):
            flows.append(flow(one.dst_addr, one.src_addr, dest_qp=one.cts_qpns[0]))
    return {"flows": flows}


def test_connections_by_direction(followed: Followed) -> None:
    job = followed.plan.job
    group = _group(followed, there(job, "both", "data", "none"))
    assert {way: len(names) for way, names in group["connections"].items()} == {
        "both": 1, "data": 1, "back": 0, "none": 1}
    assert group["addresses"] == {"unseen": [], "only_sent": [], "only_received": [job.flows[1].dst_addr]}
    followed.seen = [2]
    assert len(_group(followed, there(job, "both", "back", "none"))["connections"]["data"]) == 1
    mapped = there(job, "both", "both", "both")
    for one in job.flows:
        one.src_addr, one.dst_addr = f"::ffff:{one.src_addr}", f"::ffff:{one.dst_addr}"
    assert len(_group(followed, mapped)["connections"]["both"]) == 3


def checks(followed: Followed, *ways: str) -> dict[str, bool]:
    found = _group(followed, there(followed.plan.job, *ways))
    return {check.name.partition(": ")[2]: check.good for check in _of_group(found)}


def test_a_connection_that_is_not_mirrored_matters_where_iterations_are_not_complete(followed: Followed) -> None:
    for iteration in range(10):
        followed.take(closed(iteration))
    assert checks(followed, "both", "none", "none") == {"connections": True, "complete": True, "keeps up": True}
    bad = Followed(followed.plan)
    for iteration in range(10):
        bad.take(closed(iteration, "covered", {"not_mirrored": 3}))
    assert checks(bad, "both", "none", "none") == {"connections": False, "complete": False, "keeps up": True}
    found = _group(bad, there(bad.plan.job, "both", "none", "none"))
    assert _completeness(found) == "0 of 9 iterations; missing elements: not_mirrored 27; covered of 1"


@pytest.mark.parametrize(("incomplete", "good"), [(0, True), (1, True), (2, False)])
def test_one_in_twenty_may_lack_something(followed: Followed, incomplete: int, good: bool) -> None:
    followed.take(closed(0))
    for iteration in range(1, 21):
        followed.take(closed(iteration, "covered" if 5 < iteration <= 5 + incomplete else "", {}))
    assert checks(followed, "both", "both", "both")["complete"] is good


def test_what_came_before_every_connection_had_found_its_place(followed: Followed) -> None:
    for iteration, clause in enumerate(["covered", "anchored", "covered", "", ""]):
        followed.take(closed(iteration, clause))
    found = _group(followed, there(followed.plan.job, "both", "both", "both"))
    assert (found["iterations"], found["before_the_first"], found["complete"]) == (2, 2, 2)
    assert _completeness(found).startswith("2 of 2 iterations, after 2 until every connection had found its place")


def test_nothing_of_the_job(followed: Followed) -> None:
    said = checks(followed, "none", "none", "none")
    assert said == {"connections": False, "complete": False, "keeps up": True}


def test_late_and_full(followed: Followed) -> None:
    for iteration in range(3):
        followed.take(closed(iteration))
        followed.take(Timed(Times(iteration, first=0, covered=200, next=100), (9, 16), (4, 4)))
    assert checks(followed, "both", "both", "both") == {
        "connections": True, "complete": True, "time": False, "keeps up": False}
