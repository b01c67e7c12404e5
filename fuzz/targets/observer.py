"""Target: what looks at unknown traffic, over the sequences of sequence.pyx: an Observer of counts with what is
concluded from it (flag 64 clear), or one of messages, which learning reads from (flag 64 set; flag 128: with requests).

The books must add up, bounded tables stay bounded, and the interpretation accepts whatever was observed.
"""

from __future__ import annotations

from parser.observer import Observer

from parser.findings import interpret
from targets import sequence
from targets.jobs import FuzzJob

__all__ = ["one"]


def one(data: bytes) -> None:
    decoded = sequence.decode(data)
    if decoded is None:
        return
    job, _unchecked, program = decoded
    if data[1] & 64:
        _messages(job, program, bool(data[1] & 128))
    else:
        _counts(program)


def _counts(program: sequence.Program) -> None:
    observer, seen = Observer(), 0
    for _stream, ring, count, mark in program.runs():
        if mark is None:
            seen += count
            while not Observer.drained(ring):
                observer.drain(ring)
    report = observer.report()
    packets = dict(report["packets"])
    assert packets.pop("total") == seen == sum(packets.values()), report["packets"]
    interpret(report)


def _messages(job: FuzzJob, program: sequence.Program, requests: bool) -> None:
    flows = [flow for flow in job.plan.engine.flows if flow.data]
    wanted = [(f.src_addr, f.dst_addr, f.qpn, 3 * i, 3 * i + 9) for i, f in enumerate(flows)] if requests else []
    observer, seen = Observer(messages=True, requests=wanted), 0
    for _stream, ring, count, mark in program.runs():
        if mark is None:
            seen += count
            while not Observer.drained(ring):
                observer.drain(ring)
    assert observer.counters()["packets"] == seen
    listed = observer.flow_list()
    assert all(0 <= flow < len(listed) for flow, *_ in [*observer.tcp_segments(), *observer.payloads()])
    starts = observer.start_records()
    assert not len(starts) or int(starts["flow"].max()) < len(listed)
