"""Target: what looks at unknown traffic, over the sequences of sequence.pyx: Survey with what is concluded from it
(flag 64 clear), or Trace, which learning reads from (flag 64 set; flag 128: with wishes).

The books must add up, bounded tables stay bounded, and the interpretation accepts whatever was observed.
"""

from __future__ import annotations

from parser.survey import Survey
from parser.trace import Trace

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
        _trace(job, program, bool(data[1] & 128))
    else:
        _survey(program)


def _survey(program: sequence.Program) -> None:
    survey, seen = Survey(), 0
    for _stream, ring, count, mark in program.runs():
        if mark is None:
            seen += count
            while not Survey.drained(ring):
                survey.drain(ring)
    report = survey.report()
    packets = dict(report["packets"])
    assert packets.pop("total") == seen == sum(packets.values()), report["packets"]
    interpret(report)


def _trace(job: FuzzJob, program: sequence.Program, wishes: bool) -> None:
    flows = [flow for flow in job.plan.engine.flows if flow.data]
    wanted = [(f.src_addr, f.dst_addr, f.qpn, 3 * i, 3 * i + 9) for i, f in enumerate(flows)] if wishes else []
    trace, seen = Trace(wanted), 0
    for _stream, ring, count, mark in program.runs():
        if mark is None:
            seen += count
            while not Trace.drained(ring):
                trace.drain(ring)
    assert trace.counters()["packets"] == seen
    listed = trace.flow_list()
    assert all(0 <= flow < len(listed) for flow, *_ in [*trace.tcp_segments(), *trace.payloads()])
    starts = trace.start_records()
    assert not len(starts) or int(starts["flow"].max()) < len(listed)
