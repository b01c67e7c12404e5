"""The document of a rehearsal: each port's figures, each question's answer in words, and the text that people read.

Of two captures, "ring" with two queues and "null" with one; what a survey found is written here by hand.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from rich.console import Console

from flowcheck.node.check.budget import MachineFacts, budget
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import plan_captures
from flowcheck.node.rehearse.jobs import Followed
from flowcheck.node.rehearse.report import _completeness, _group, _names, _of_group, _of_ring, _to_do, render, report
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job

from .test_rehearsal_report import closed, flow, there

CAPTURES = ({"device": "ring", "queues": 2, "ring_size": 4096, "path_mtu": 1024, "huge": False},
            {"device": "null", "ring_size": 2048, "path_mtu": 0, "huge": False})
FACTS = MachineFacts(1 << 40, 0, {}, frozenset(range(8)), {"ring": 25_000}, {}, {}, {})
NONE: dict[str, int] = {}


def requests(packets: int, missing: int = 0) -> dict[str, int]:
    return {"packets": packets, "missing": missing}


class Scene:
    """What a node has found: two ranks' data and what comes back for it at "ring", one direction of another pair at
    "null". Everything may be changed before `document`."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.config = NodeConfig.model_validate({
            "name": "n", "control": {"listen": "localhost:1", "token_file": "t"}, "capture": list(CAPTURES),
            "replica": {"directory": str(root)}} | more)
        self.planned = plan_captures(self.config, root)
        self.budget = budget(self.config, self.planned, FACTS)
        mtu = {"mtu": 1024}
        self.found: dict[str, Any] = {
            "packets": {"roce": 990, "total": 1000, "truncated": 0}, "encapsulated": {},
            "icrc": {"ok": 990, "wrong": 0},
            "flows": [
                flow("a", "b", id=0, dest_qp=1, requests=requests(9000), answers=None, captures=[0], **mtu),
                flow("b", "a", id=1, dest_qp=2, captures=[1], **mtu),
                flow("c", "d", id=2, dest_qp=3, requests=requests(1000), answers=None, captures=[2], **mtu),
                flow("e", "f", id=3, requests=None, answers=None, captures=[0], mtu=0),
                flow("g", "h", id=4, icrc={"ok": 0, "wrong": 3}, captures=[0], **mtu),
            ],
            "connections": [{"source": "a", "destination": "b", "is": "NCCL", "data_flow": 0, "back_flow": 1,
                             "sender_tag": 4}],
        }
        self.streams = [500, 300, 200]
        self.rates = [(3000.4, 4_000_000.0), (0.0, 0.0)]
        self.looked: list[dict[str, int]] = [{"received": 800}, {"received": 200}]
        self.ended: list[dict[str, int]] = [{"received": 50}, {}]
        self.followed: list[Followed] = []

    def document(self) -> dict[str, Any]:
        return report(
            self.config, self.planned, self.budget, began=86_400.0 * 365 + 61, seconds=(2.5, 3.0), found=self.found,
            streams=self.streams, rates=self.rates, looked=self.looked, ended=self.ended, followed=self.followed)

    def check(self, name: str) -> tuple[bool, str, str]:
        (one,) = [check for check in self.document()["checks"] if check["name"] == name]
        return one["good"], one["found"], one["remedy"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_the_document_says_of_itself(scene: Scene) -> None:
    found = scene.document()
    assert (found["schema"], found["node"], found["began"]) == ("flowcheck-rehearsal/1", "n", "1971-01-01T00:01:01Z")
    assert found["seconds"] == {"looked": 2.5, "followed": 3.0} and found["packets"] == scene.found["packets"]
    assert found["groups"] == [] and found["good"] is False
    assert found["remedy"] == next(check["remedy"] for check in found["checks"] if not check["good"])
    assert found["version"].count(".") >= 1
    assert [check["name"] for check in found["checks"]] == [
        "memory", "port ring", "port null", "packets", "whole frames", "no unknown wrapping", "checksums", "path MTU",
        "both directions", "no gaps", "ring of ring", "ring of null"]


def test_what_all_is_well_with_has_no_remedy(scene: Scene) -> None:
    scene.found["flows"][2]["captures"] = [0]
    scene.found["connections"].append({"source": "c", "destination": "d", "is": "NCCL", "data_flow": 2, "back_flow": 5,
                                       "sender_tag": None})
    scene.found["flows"] += [flow("d", "c", id=5, captures=[1], mtu=1024),
                             flow("a", "x", id=6, requests=requests(1), captures=[2], mtu=1024),
                             flow("x", "a", id=7, captures=[2], mtu=1024)]
    scene.found["connections"].append({"source": "a", "destination": "x", "is": "NCCL", "data_flow": 6, "back_flow": 7,
                                       "sender_tag": None})
    found = scene.document()
    assert [check for check in found["checks"] if not check["good"]] == [] and found["good"] is True
    assert found["remedy"] == ""


def test_each_port_has_its_own_figures(scene: Scene) -> None:
    scene.looked[0] |= {"ring_full": 3, "oversize": 1, "roce": 7}
    scene.ended[1] |= {"received": 4, "nic_missed": 2}
    ring, null = scene.document()["ports"]
    pauses = [figures.pause_ms for figures in scene.budget.captures]
    assert ring == {
        "device": "ring", "packets": 800, "flows": 2, "received": 850,
        "hosts": [{"address": "a", "sent": 1, "received": 1}], "one_sided": [], "most_packets_per_second": 3000,
        "most_gbps": 0.032, "dropped": {"looked": {"ring_full": 3, "oversize": 1}, "followed": {}},
        "ring": {"packets": 4096, "link_mbps": 25_000, "bears_ms": 1365.2,
                 "bears_at_link_speed_ms": round(pauses[0], 1)},
    }
    assert null == {
        "device": "null", "packets": 200, "flows": 1, "received": 204,
        "hosts": [{"address": "c", "sent": 1, "received": 0}],
        "one_sided": [{"address": "c", "sent": 1, "received": 0}], "most_packets_per_second": 0, "most_gbps": 0.0,
        "dropped": {"looked": {}, "followed": {"nic_missed": 2}},
        "ring": {"packets": 2048, "link_mbps": None, "bears_ms": None, "bears_at_link_speed_ms": round(pauses[1], 1)},
    }


def test_what_two_fibres_bring_together_lacks_nothing(scene: Scene) -> None:
    scene.found["flows"][1]["captures"] = [2]  # of a: what it sends at one port, what it gets at the other
    scene.found["flows"].pop(2)
    assert [one["one_sided"] for one in scene.document()["ports"]] == [[], []]


# -- questions -------------------------------------------------------------------------------------------------------


def test_memory_that_is_not_there_is_the_first_answer(tmp_path: Path) -> None:
    at = Scene(tmp_path, replica={"directory": str(tmp_path), "memory_mb": 1})
    assert at.check("memory") == (True, "what the settings ask for is there (`flowcheck-node --check`)", "")
    at.budget = budget(at.config, at.planned, MachineFacts(1 << 20, 0, {}, frozenset(range(8)), {}, {}, {}, {}))
    good, said, remedy = at.check("memory")
    assert not good and said == remedy and said.startswith(at.budget.problems[0].message().replace("\n", " ")[:40])
    assert "\n" not in said and at.document()["remedy"] == remedy


@pytest.mark.parametrize(("mtus", "good", "said"), [
    ((1024, 1024), True, "1024"), ((0, 0), True, "not shown"), ((4096, 1024), False, "4096"),
    ((1024, 1025), False, "1025"),
])
def test_a_path_mtu_that_is_smaller_than_the_jobs(scene: Scene, mtus: tuple[int, int], good: bool, said: str) -> None:
    """0 takes whole frames."""
    for one in scene.found["flows"]:
        one["mtu"] = 0
    scene.found["flows"][0]["mtu"], scene.found["flows"][1]["mtu"] = mtus
    assert scene.check("path MTU")[:2] == (good, said)
    if not good:
        assert scene.check("path MTU")[2] == f"capture[0].path_mtu = {said}: what is larger is dropped"


def test_directions_that_are_alone_are_counted(scene: Scene) -> None:
    good, said, remedy = scene.check("both directions")
    assert (good, said) == (False, "1 connections in both directions, 1 flows in one") and "not copied" in remedy
    scene.found["flows"].pop(2)
    assert scene.check("both directions")[:2] == (True, "1 connections in both directions, 0 flows in one")


@pytest.mark.parametrize(("missing", "dropped", "good"), [(0, 0, True), (1, 0, True), (2, 0, False), (2, 1, True),
                                                         (5, 3, False)])
def test_copies_that_are_lost(scene: Scene, missing: int, dropped: int, good: bool) -> None:
    """One in ten thousand may be, and what was dropped here is not the mirror's."""
    scene.found["flows"][0]["requests"] = requests(9000 - missing, missing)
    scene.looked[1] |= {"ring_full": dropped}
    own = f"; {dropped} packets were dropped here, by looking at each of them" if dropped else ""
    assert scene.check("no gaps")[:2] == (good, f"{missing} of 10000 request packets missing{own}")


def test_what_is_said_of_a_ring(scene: Scene) -> None:
    pauses = [f"{figures.pause_ms:.1f}".removesuffix(".0") for figures in scene.budget.captures]
    assert scene.check("ring of ring") == (
        True, f"4096 packets, which bear a pause of 1365.2 ms at 3000 packets/s, {pauses[0]} ms at 25 Gb/s", "")
    assert scene.check("ring of null") == (True, f"2048 packets, {pauses[1]} ms at 100 Gb/s", "")
    scene.ended[0] |= {"ring_full": 2, "no_mbuf": 1}
    good, said, remedy = scene.check("ring of ring")
    assert not good and said.startswith("4096 packets, which bear a pause of ")
    assert said.endswith(" at 25 Gb/s; dropped while the job was followed: ring_full 2, no_mbuf 1")
    assert remedy.startswith("ring_full 2, no_mbuf 1: raise capture[0].ring_size (now 4096")
    assert _of_ring(scene.document()["ports"][1], scene.planned[1]).good, "of its own ring alone"


def test_ports_that_bring_nothing_and_nothing_of_a_job(scene: Scene) -> None:
    where = ("look at its cable, at the switch's port, and at the mirror session that ends there"
             " (`flowcheck switch show`)")
    assert scene.check("port ring") == (
        True, "800 packets, 0.032 Gb/s in the fastest tenth of a second; whole: a", "")
    assert scene.check("port null") == (
        False, "200 packets, 0 Gb/s in the fastest tenth of a second; nothing that is sent to c comes",
        "null: nothing that is sent to c comes: that direction of its port is not mirrored, or that half of the mirror"
        f" is unplugged; {where}")
    scene.found["flows"] = []
    assert scene.check("port null") == (
        False, "200 packets, and no RoCEv2 of a connection among them",
        f"what comes to null is not of the job: {where}, and does the job run?")
    scene.streams[2] = 0
    assert scene.check("port null") == (False, "no packet", f"null brings nothing: {where}")


def test_of_many_some_are_named() -> None:
    assert _names([]) == "" and _names(["a", "b"]) == "a, b"
    assert _names("abcdefgh") == "a, b, c, d, e, f, g, h" and _names("abcdefghij").endswith("g, h and 2 more")


# -- a job -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def followed() -> Followed:
    job = example_job(ranks=3, count=[64])
    job.run_id = "r"
    return Followed(plan_job(job))


def answers(group: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {check.name: (check.good, check.found) for check in _of_group(group)}


def test_a_job_in_figures(scene: Scene, followed: Followed) -> None:
    job = followed.plan.job
    scene.found["flows"] = there(job, "both", "data", "back")["flows"]
    for one in scene.found["flows"]:
        one |= {"mtu": 0, "captures": [0]}
    for number in range(12):
        followed.take(closed(number, "covered" if number in (1, 4) else "", {"lost": 2} if number == 4 else None))
    followed.periods, followed.left = [3_000_000, 5_000_500, 4_000_000], [2_000_000, -1_000_000, 900_000]
    followed.ring, followed.arenas, followed.placed, followed.given_up = (1, 3), (2, 4), [0, 1], 1
    scene.followed = [followed]
    document = scene.document()
    (group,) = document["groups"]
    assert {key: group[key] for key in group if key not in ("connections", "addresses")} == {
        "run_id": "r", "ranks": 3, "placed": 2, "iterations": 10, "before_the_first": 1, "complete": 9,
        "missing": {"lost": 2}, "why": {"covered of 1": 1, "covered of 4": 1}, "given_up": 1, "period_ms": 4.0,
        "left_ms": {"median": 0.9, "least": -1.0}, "fullest_ring": 0.3333, "arenas": [2, 4],
    }
    assert {way: len(names) for way, names in group["connections"].items()} == {
        "both": 1, "data": 1, "back": 1, "none": 0}
    said = {check["name"]: (check["good"], check["found"]) for check in document["checks"][-4:]}
    assert list(said) == ["job 'r': connections", "job 'r': complete", "job 'r': time", "job 'r': keeps up"]
    assert said["job 'r': time"] == (
        True, "an iteration takes 4 ms; from its last element to the next one's first packet there are 0.9 ms, -1 at"
              " least, for its record and its update; fullest ring 33.3 %, arenas 2 of 4")
    assert said["job 'r': keeps up"] == (False, "iterations given up 1 times, fullest ring 33.3 %")


def test_a_job_of_which_nothing_was_seen(followed: Followed) -> None:
    group = _group(followed, {"flows": []})
    assert (group["period_ms"], group["left_ms"], group["iterations"], group["complete"]) == (None, None, 0, 0)
    addresses = sorted({one.src_addr for one in followed.plan.job.flows})
    assert group["addresses"] == {"unseen": addresses, "only_sent": [], "only_received": []}
    assert answers(group) == {
        "job 'r': connections": (
            False, f"0 of 3 in both directions, 3 not at all; neither sent by nor sent to {', '.join(addresses)}"),
        "job 'r': complete": (False, "no iteration has closed: none was long enough in sight, or nothing of it came"),
        "job 'r': keeps up": (True, "iterations given up 0 times, fullest ring 0.0 %"),
    }
    assert _to_do(group).startswith("does the job run, and is --job the manifest of this very start of it?")
    assert {check.name: check.remedy for check in _of_group(group)}["job 'r': complete"] == _to_do(group)


def test_connections_of_which_a_direction_lacks(followed: Followed) -> None:
    """The ring is a, b, c: of a -> b only the data is seen, of b -> c only what comes back."""
    a, b, c = (one.src_addr for one in followed.plan.job.flows)
    said = answers(_group(followed, there(followed.plan.job, "data", "back", "none")))["job 'r': connections"][1]
    assert said == ("0 of 3 in both directions, 1 without what comes back, 1 without their data, 1 not at all; nothing"
                    f" sent to {a}, {c}; nothing sent by {b}".replace(f"{a}, {c}", _both(a, c)))


def _both(*addresses: str) -> str:
    return ", ".join(sorted(addresses))


def test_a_job_that_says_nothing_of_what_comes_back_has_its_connections_whole(followed: Followed) -> None:
    for one in followed.plan.job.flows:
        one.cts_qpns = []
    group = _group(followed, {"flows": [flow(one.src_addr, one.dst_addr, dest_qp=one.qpns[0])
                                        for one in followed.plan.job.flows]})
    assert {way: len(names) for way, names in group["connections"].items()} == {
        "both": 3, "data": 0, "back": 0, "none": 0}


@pytest.mark.parametrize(("ring", "given_up", "good"), [((1, 2), 0, False), ((49, 100), 0, True), ((0, 1), 1, False)])
def test_a_node_that_does_not_keep_up(followed: Followed, ring: tuple[int, int], given_up: int, good: bool) -> None:
    followed.ring, followed.given_up = ring, given_up
    assert answers(_group(followed, {"flows": []}))["job 'r': keeps up"][0] is good


@pytest.mark.parametrize(("median", "good"), [(1, True), (0, False), (-1, False)])
def test_time_for_an_update(followed: Followed, median: int, good: bool) -> None:
    followed.periods, followed.left = [5_000_000], [1_000_000 * median]
    assert answers(_group(followed, {"flows": []}))["job 'r': time"][0] is good


def test_what_is_missing_is_said_by_cause_and_the_worst_has_its_remedy() -> None:
    group: dict[str, Any] = {"iterations": 9, "complete": 4, "before_the_first": 0, "missing": {}, "why": {}}
    assert _completeness(group) == "4 of 9 iterations"
    assert _to_do(group) == "docs/use/replay.md says what to do for each cause"
    for missing, begins in (
        ({"not_mirrored": 9, "lost": 1}, "a connection that carries these elements is not mirrored"),
        ({"not_mirrored": 1, "lost": 9}, "copies are lost between the switch's port and this one"),
        ({"unanchored": 3}, "mirror both directions of each port"), ({"overload": 3}, "the node has no room"),
        ({"something": 3}, "docs/use/replay.md"), ({"truncated": 3}, "the packets are cut"),
    ):
        assert _to_do(group | {"missing": missing}).startswith(begins)
    said = _completeness(group | {"missing": {"lost": 2, "cut": 1}, "why": {"first": 2, "second": 1}})
    assert said == "4 of 9 iterations; missing elements: cut 1, lost 2; first"


# -- text --------------------------------------------------------------------------------------------------------------


def text(document: dict[str, Any], width: int = 160) -> list[str]:
    out = io.StringIO()
    render(document, Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_text_that_people_read(scene: Scene) -> None:
    document = scene.document() | {"version": "9.9"}
    lines = text(document)
    assert lines[0] == ("rehearsal of node n with flowcheck 9.9, 1971-01-01T00:01:01Z: looked for 2.5 s, followed for"
                        " 3 s")
    assert lines[1] == "Mirror ports"
    assert cells(lines[2]) == ["port", "packets", "most packets/s", "most Gb/s", "ring bears ms", "hosts"]
    assert [cells(line) for line in lines if line.startswith(("ring ", "null "))] == [
        ["ring", "800", "3,000", "0.032", "1365.2", "a"], ["null", "200", "0", "0", "-", "c"]]
    (head,) = [at for at, line in enumerate(lines) if line.startswith("hosts that NCCL joins")]
    assert cells(lines[head]) == ["hosts that NCCL joins", "ranks (CTS tag)", "connections", "one direction alone"]
    assert [cells(line) for line in lines[head + 2 : head + 4]] == [
        ["a, b", "4", "1", "0"], ["c, d", "unknown", "0", "1"]]
    assert sum(line.startswith("No --job was given") for line in lines) == 1
    for check in document["checks"]:
        assert f"{'ok ' if check['good'] else 'BAD'} {check['name']}: {check['found']}" in " ".join(lines)
    bad = [check["remedy"] for check in document["checks"] if not check["good"]]
    at = lines.index("To change, in this order:")
    assert " ".join(lines[at + 1 :]) == " ".join(f"{number}. {one}" for number, one in enumerate(bad, 1))


def test_numbers_stand_below_each_other_and_long_lists_take_several_lines(scene: Scene) -> None:
    document = scene.document()
    document["ports"][0]["hosts"] = [{"address": f"10.0.0.{number}"} for number in range(8)]
    document["ports"][0]["device"] = "af_packet:a_port and_another"
    document["seen"] = [{"addresses": [f"10.0.0.{number}" for number in range(8)], "ranks": list(range(90)),
                         "connections": 1234567, "one_sided": 7}] * 2
    ring, null = (line for line in text(document, 160) if "and_another" in line or line.startswith("null "))
    ends = [ring.index(number) + len(number) for number in ("800", "3,000", "0.032", "1365.2")]
    assert [null[:end].split()[-1] for end in ends] == ["200", "0", "0", "-"] and all(null[end] == " " for end in ends)
    lines = text(document, 80)
    assert any("10.0.0.6, 10.0.0.7" in line for line in lines) and any(line.strip() == "88, 89" for line in lines)
    first, second = (line for line in lines if "1234567" in line)
    assert first == second and first.endswith("1234567                    7")


def test_the_text_of_what_is_well_and_of_what_has_two_names(scene: Scene, followed: Followed) -> None:
    scene.followed, scene.found["flows"], scene.found["connections"] = [followed], [], []
    document = scene.document()
    document["seconds"]["followed"] = 0
    for check in document["checks"]:
        check["good"] = True
    assert document["seen"] == []
    lines = text(document)
    assert lines[0].endswith("looked for 2.5 s") and lines[-1] == "Nothing to change: a node would follow what comes."
    assert cells(next(line for line in lines if line.startswith("ring ")))[-1] == "none"
    assert not any("hosts that NCCL joins" in line or line.startswith("No --job") for line in lines)
    for check in document["checks"][:2]:
        check["good"], check["remedy"] = False, "do [this]"
    assert text(document)[-2:] == ["To change, in this order:", "1. do [this]"], "what two ask for is said once"
