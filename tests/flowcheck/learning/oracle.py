"""Learning from synthesised traffic, and comparing what was learnt with the truth: shared by the tests beside it."""

import pytest
from parser.lane import messages
from parser.observer import Observer

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.learning.captures import observations_of
from flowcheck.learning.hints import Hints
from flowcheck.learning.job import Learnt, Progress, learn_from
from flowcheck.learning.logs import LogFacts
from flowcheck.rebuild.plan import plan_job
from lab.synth import Synthesis

NO_HINTS = Hints()


def learnt(
    made: Synthesis, hints: Hints = NO_HINTS, log: LogFacts | None = None, progress: Progress | None = None
) -> Learnt:
    packets = made.packets

    def trace(wanted: tuple = ()) -> Observer:
        seen = Observer(messages=True, requests=wanted)
        for timestamp, frame in packets:
            seen.add(frame, timestamp)
        return seen

    return learn_from(observations_of(trace, log or LogFacts()), hints, progress)


def placement(job: Job, iterations: int) -> dict:
    """Per captured connection (its QPs in order, how many a message uses) what every message of every call is: whatever
    the job calls its ranks and version."""
    plan = plan_job(job)
    out = {}
    for flow, edge in zip(job.flows, plan.engine.edges, strict=True):
        phases = 1 if iterations == 1 else 3
        ends = tuple((*flow.addresses(i), qpn) for i, qpn in enumerate(flow.qpns))
        out[ends, edge.used] = [
            (call.phase, call.target, call.base, list(messages(call.lane)))
            for call in edge.calls if call.phase <= phases and call.lane is not None
        ]
    return out


def slices(job: Job, iteration: int) -> list:
    order = {entry.name: i for i, entry in enumerate(job.model)}
    return [[(order[s.name], s.offset, s.length, s.start) for s in b.slices] for b in job.bucket_layout(iteration)]


def same(found: Job, true: Job, iterations: int) -> None:
    mine, theirs = placement(found, iterations), placement(true, iterations)
    assert mine and mine == {key: theirs[key] for key in mine}
    for iteration in range(min(iterations, 2)):
        assert slices(found, iteration) == slices(true, iteration)
    assert [e.shape for e in found.model] == [e.shape for e in true.model]
    assert found.communicator.protocol == true.communicator.protocol


def doubts(found: Learnt) -> set[str]:
    """What the doubts are about."""
    return {text.split(":")[0] for text in found.doubts}


def unless_refused(made: Synthesis, hints: Hints) -> Learnt | None:
    """None: refused, with a remedy."""
    try:
        return learnt(made, hints)
    except UserError as error:
        assert error.remedy
        return None


def refusal(made: Synthesis, hints: Hints = NO_HINTS, log: LogFacts | None = None) -> str:
    with pytest.raises(UserError) as error:
        learnt(made, hints, log)
    assert error.value.remedy
    return str(error.value)
