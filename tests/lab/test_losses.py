"""Packets get lost, and the impairer's log says which: on the training link nothing is missing in the end; on the
mirror's link exactly those iterations are not published of which every copy of some reduced piece was lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.job.model import Collective, Collectives, Communicator, Job, dtype_size
from lab.jobs import Training
from lab.network.impair import Event, Impairment
from lab.run import LabRun
from lab.synth.encode import positions
from lab.synth.generate import operation_of
from lab.synth.schedule import message_bytes, messages

from .conftest import lab_of

pytestmark = pytest.mark.root
STATE = {"replica": {"resync": "state"}}  # what follows a whole state is what these tests are about
WRITES = range(6, 12)  # opcodes of RC RDMA WRITE
MTU = 1024
LONGEST = 200.0  # seconds; a node asks for no second state within ten
ARENAS = 4  # of a node, as it comes: an iteration with gaps closes when as many have begun behind it


def test_one_percent_lost_on_the_training_link(tmp_path: Path) -> None:
    train_lossy(tmp_path, iterations=15, drop=0.01)


@pytest.mark.slow
def test_two_hundred_iterations_with_everything_wrong_on_the_training_link(tmp_path: Path) -> None:
    train_lossy(tmp_path, iterations=200, drop=0.01, duplicate=0.002, reorder=0.002, corrupt=0.002)


def train_lossy(tmp_path: Path, iterations: int, **rates: float) -> None:
    wire = Impairment("r0", **rates)  # type: ignore[arg-type]
    with (
        lab_of(ranks=3, mirrored=((0, 1),), impairments=(wire,)) as fabric,
        LabRun(fabric, tmp_path, node_settings=STATE) as run,
    ):
        job = Training(model="mlp", ranks=3, softroce={"protocol": "LL128", "mtu": MTU, "seed": 1, "retransmit_ms": 5})
        run.start_nodes(job)
        first = run.attach(job)
        run.train(iterations)
        run.end()
        run.wait_for_nodes(first + iterations - 1)
        run.finish_nodes()
        summary = run.ledger.summary()
        fabric.impairer.stop()
        lost = [event for event in fabric.impairer.events() if event.what == "dropped" and event.opcode in WRITES]
        assert len(lost) > iterations / 5  # really lost, and really sent again
        assert summary.all_equal and summary.published >= iterations, summary


def test_a_mirror_that_is_down_for_two_iterations(tmp_path: Path) -> None:
    """Nothing of them is there: they are not published, and the node goes on from a state that it asks for."""
    with lab_of(ranks=2, mirrored=((0, 1),), impairments=(Impairment("mirror0"),)) as fabric:
        with LabRun(fabric, tmp_path, node_settings=STATE) as run:
            job = Training(model="mlp", ranks=2, softroce={"protocol": "LL", "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            run.train(3)
            cut = run.iterations[-1]["iteration"] + 1
            run.wait_for_nodes(cut - 1)
            states = len(states_taken(run))  # before anything is lost: the next one may be quick
            fabric.impairer.set_down("mirror0", True)
            run.train(2)
            fabric.impairer.set_down("mirror0", False)
            run.train(2)
            end = time.monotonic() + LONGEST
            while len(states_taken(run)) == states:
                assert time.monotonic() < end
                run.train(1)
                run._quietly(lambda: len(states_taken(run)) > states, 0.2)  # the node may get little of its core
            run.train(3)
            run.end()
            run.wait_for_nodes(run.iterations[-1]["iteration"])
            run.finish_nodes()
            verdicts = {i: run.ledger.row(0, i) for i in run.ledger.iterations(0) if i >= first}
        assert all(verdicts[i].verdict == "equal" for i in range(first, cut))
        assert all(verdicts[i].verdict == "not published" for i in (cut, cut + 1))
        assert verdicts[max(verdicts)].verdict == "equal"
        assert "differs" not in {row.verdict for row in verdicts.values()}


def states_taken(run: LabRun) -> list[dict[str, Any]]:
    return [said for _, said in run.events if said["event"] == "state"]


# Slow: a minute or more, because the node is waited for iteration by iteration.
@pytest.mark.slow
@pytest.mark.parametrize("direction, drop, iterations", [
    ("ingress", 0.05, 40), ("both", 0.001, 200), ("ingress", 0.02, 200),
])
def test_copies_are_lost(tmp_path: Path, direction: str, drop: float, iterations: int) -> None:
    wire = Impairment("mirror0", way="from", drop=drop, trace=True)
    with lab_of(ranks=4, mirrored=((0, 1, 2),), direction=direction, impairments=(wire,)) as fabric:
        with LabRun(fabric, tmp_path, node_settings=STATE) as run:
            job = Training(model="mlp", ranks=4, softroce={"protocol": "LL", "mtu": MTU, "seed": 1})
            run.start_nodes(job)
            first = run.attach(job)
            for _ in range(iterations):  # one by one: the only losses are to be those of the log, not a full ring's
                run.train(1)
                run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS)
            run.end()
            run.wait_for_nodes(first + iterations - 1)
            run.finish_nodes()
            capture = next(said["text"] for _, said in run.events if said["event"] == "capture")
            assert "+ 0 kernel ring full" in capture and "+ 0 ring full" in capture
            states = {said["iteration"] for said in states_taken(run)}
            said = {one["iteration"]: one for _, one in run.events if one["event"] == "iteration"}
            fabric.impairer.stop()
            holes, tails = implied(run.communicators, run.iterations, fabric.impairer.events())
            rows = {i: run.ledger.row(0, i) for i in run.ledger.iterations(0) if i >= first}
    judged = {i for i in said if i >= first}
    assert len(judged) >= iterations
    # what is missing is what the log implies, iteration by iteration, to the element
    assert {i: sum(said[i]["missing"].values()) for i in judged} == {i: holes[i] for i in judged}
    for i in judged:
        follows = i in states or (i - 1 in said and said[i - 1]["published"])
        assert said[i]["published"] == (follows and not holes[i] and i not in tails), (i, said[i], sorted(tails))
        assert rows[i].verdict == ("equal" if said[i]["published"] else "not published")
        # every clause that is named follows from the log, and of what is missing each is
        failed = set(said[i]["failed"])
        assert ("covered" in failed) == (holes[i] > 0)
        allowed = {"covered": True, "streams_past": i in tails, "previous": not follows}
        assert all(allowed.get(clause) for clause in failed), (i, failed)
    assert any(one["healed"] for one in said.values()) and sum(row.verdict == "equal" for row in rows.values()) > 3
    if drop > 0.04:
        assert any(holes[i] for i in judged)


def implied(
    ranks: list[dict[str, Any]], iterations: list[dict[str, Any]], log: list[Event]
) -> tuple[dict[int, int], set[int]]:
    """(iteration -> gradient elements whose reduced value was in no copy that passed, iterations that some connection
    was never seen to end, because its last packets of all were lost). Connections and calls as the ranks tell them,
    messages by synth's schedule, packets by the log: nothing of the parser."""
    flows = {(flow["channel"], flow["src"], flow["dst"]): flow["qpns"][0] for rank in ranks for flow in rank["flows"]}
    job = Job(Communicator(**ranks[0]["communicator"]), [], Collectives())
    copies = [event for event in log if event.port == "mirror0" and event.opcode in WRITES]
    seen = {(event.qpn, event.psn) for event in copies if event.what in ("passed", "doubled")}
    logged = seen | {(event.qpn, event.psn) for event in copies}
    psns = dict.fromkeys(flows, 0)
    left: list[int] = []  # by call
    ends: list[dict[Any, int]] = []  # by call: how many packets each connection has had
    for call in (Collective(**one) for one in ranks[0]["calls"]):
        op = operation_of(job, call)
        gradient = call.op == "AllReduce"
        covered = np.zeros(op.count * op.size, bool)
        for connection, sent in messages(op).items():
            for message in sent:
                wire = message_bytes(op, message, 0)
                packets = max(1, -(-wire // MTU))
                places = positions(op.protocol, message.elements * op.size) // MTU
                for number in range(packets):
                    if gradient and message.reduced and (flows[connection], psns[connection] + number) in seen:
                        start = message.start * op.size
                        covered[start : start + len(places)] |= places == number
                psns[connection] += packets
        whole = covered.reshape(-1, dtype_size(call.dtype)).all(1)
        left.append(int((~whole).sum()) if gradient else 0)
        ends.append(dict(psns))
    for connection, qpn in flows.items():  # the schedule is that of the wire: as many packets as were logged
        numbers = {psn for number, psn in logged if number == qpn}
        assert not numbers or numbers == set(range(psns[connection])), connection
    reached = {
        connection: max((psn for number, psn in seen if number == qpn), default=-1) for connection, qpn in flows.items()
    }
    holes, tails, begin = {}, set(), 0
    for line in iterations:
        if begin:
            holes[line["iteration"]] = sum(left[begin : line["calls"]])
            if any(-1 < last < ends[line["calls"] - 1][connection] - 1 for connection, last in reached.items()):
                tails.add(line["iteration"])
        begin = line["calls"]
    return holes, tails
