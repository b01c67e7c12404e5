"""Target: the state machine over edited packet sequences (sequence.pyx), against the truth.

What must hold, beyond no crash and no sanitizer report:
  - the outcomes add up to the packets consumed, and nothing stays aside after finish();
  - untainted: every covered cell of every iteration and of the parameters holds the truth, nothing outside the
    buckets is covered, and no flow is given up (a packet that no receiver would take must not end one).
"""

from __future__ import annotations

from parser.machine import Engine

from targets import sequence
from targets.truth import check, close

__all__ = ["one"]

MOST_CLOSED = 200


def one(data: bytes) -> None:
    decoded = sequence.decode(data)
    if decoded is None:
        return
    job, unchecked, program = decoded
    engine = Engine((job.unchecked if unchecked else job.plan).engine)
    truth = None if program.tainted else job.truth
    consumed, closed = [0] * engine.config.streams, 0
    for stream, ring, count, mark in program.runs():
        if mark == "retire":
            close(engine, truth)
        elif mark == "recover":
            engine.consider_recovery()
        else:
            done = 0
            while done < count:
                n, blocked = engine.run(stream, ring, count - done)
                done += n
                assert blocked == (done < count), f"{done} of {count} packets consumed, blocked {blocked}"
                if blocked:
                    close(engine, truth)
                    closed += 1
                    if closed == MOST_CLOSED and truth is None:
                        return  # a forged PSN skips thousands of iterations, each closed by itself
            assert engine.drained(ring)
            engine.past(stream)
            consumed[stream] += count
    engine.finish()
    check(engine, truth, None)
    for iteration in range(engine.oldest, engine.begun + 1):
        check(engine, truth, iteration)
    for stream, count in enumerate(consumed):
        outcomes = engine.outcomes(stream)
        assert sum(packets for packets, _ in outcomes.values()) == count, outcomes
        assert outcomes["aside"] == (0, 0), outcomes
        engine.flow_counters(stream)
    found = engine.disagreements()
    assert truth is None or not found, f"flows given up although every packet was genuine or damaged: {found[:3]}"
    engine.losses()
