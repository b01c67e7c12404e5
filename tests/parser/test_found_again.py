"""A flow whose place is found anew after an outage: what was known of the old place says nothing of the new one."""

from __future__ import annotations

import math
from dataclasses import replace

from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import Synthesis, example_job, generate
from parser.engine_config import Phase, Target
from tests.flowcheck.altered import Packet, destination, messages, opcode, psn
from tests.flowcheck.memory_ring import MemoryRing
from tests.parser.odd_packets import kinds, writes

COUNT = 12_000
HISTORY = 16_384  # PSNs
START = 200_000
SILENCE = 10**9  # ns: more than half a lap of the PSN
ACK = 17


def place(protocol: str, iteration: int) -> tuple[Job, JobPlan, Synthesis]:
    job = example_job(count=COUNT, protocol=protocol, mtu=1024, startup=False, rebuild=False, seed=8)
    return job, plan_job(job), generate(job, iterations=2, first_iteration=iteration, seed=8)


def run(engine: Engine, part: list[Packet], turn: int) -> int:
    """A part of a capture, a silence after the one before it. Returns how many packets the engine took."""
    ring = MemoryRing(1 << len(part).bit_length())
    ring.put([(ns + turn * SILENCE - part[0][0], frame) for ns, frame in part])
    return engine.run(0, ring.ring_address, 1 << 20)[0]


def counted(engine: Engine, plan: JobPlan, qpn: int) -> dict:
    return engine.flow_counters(0)[[spec.qpn for spec in plan.engine.flows].index(qpn)]


def per_iteration(job: Job, made: Synthesis) -> int:
    return len(writes(made.packets, job.flows[0].qpns[0])) // 2


def test_packets_at_the_old_place_were_not_seen_at_the_new_one() -> None:
    """LL. Both places are alike modulo the history: each bit that the old packets left is one of the new ones."""
    job, plan, made = place("ll", START)
    each, qpn = per_iteration(job, made), job.flows[0].qpns[0]
    apart = HISTORY // math.gcd(HISTORY, each)
    later = place("ll", START + apart)[2]
    old, new = writes(made.packets, qpn), writes(later.packets, qpn)
    assert (psn(new[0][1]) - psn(old[0][1])) % HISTORY == 0
    engine = Engine(plan.engine)
    assert run(engine, old[:40] + old[41:], 1) == len(old) - 1
    engine.retire(apart)
    lost = [3, 7, 8]
    assert run(engine, [packet for at, packet in enumerate(new) if at not in lost], 2) == len(new) - len(lost)
    engine.finish()
    found = counted(engine, plan, qpn)
    assert (found["duplicates"], found["retransmissions"], found["out_of_order"]) == (0, 0, 0)
    assert found["missing"] == apart * each - len(old) + 1 + len(lost)
    assert found["first_psn"] == START * each, "where it was found first"
    assert engine.outcomes(0)["repeated"] == engine.outcomes(0)["unanchored"] == (0, 0) and kinds(engine) == []


def test_what_was_acknowledged_of_an_old_connection_says_nothing_of_a_new_one() -> None:
    """LL. The job was started anew, on the same queue pair, and is at an earlier place: nobody has acknowledged the
    packet that is missing there."""
    job, plan, made = place("ll", START)
    earlier = START - 2**23 // per_iteration(job, made) - 2
    qpn, back = job.flows[0].qpns[0], job.flows[0].cts_qpns[0]
    new = place("ll", earlier)[2].packets
    old = [packet for packet in made.packets
           if destination(packet[1]) == qpn or (destination(packet[1]) == back and opcode(packet[1]) == ACK)]
    after = writes(new, qpn)
    lost = len(after) // 2 - 1  # the last one of its first iteration
    engine = Engine(plan.engine)
    assert (run(engine, old, 1), run(engine, after[:lost] + after[lost + 1 : lost + 3], 2)) == (len(old), lost + 2)
    assert counted(engine, plan, qpn)["state"] == "ANCHORED" and engine.past(0) == earlier + 1
    assert engine.hope(0, earlier) == "may_come"


def test_what_waits_at_the_old_place_is_given_up() -> None:
    """SIMPLE. The first packet of a message was lost; two after it wait for a witness when the outage comes."""
    job, plan, made = place("simple", START)
    later = place("simple", START + 1)[2]
    qpn, back = job.flows[0].qpns[0], job.flows[0].cts_qpns[0]
    first, second = messages(made.packets, qpn)[:2]
    engine = Engine(plan.engine)
    run(engine, sorted(writes(made.packets, back) + [made.packets[at] for at in [*first, *second[1:3]]]), 1)
    assert engine.outcomes(0)["aside"][0] == 2
    run(engine, sorted(writes(later.packets, back) + writes(later.packets, qpn)), 2)
    outcomes = engine.outcomes(0)
    assert outcomes["aside"] == (0, 0) and outcomes["unanchored"] == (2, 2 * 1024) and kinds(engine) == []
    assert engine.begun == START + 2


def test_what_vouched_at_the_old_place_does_not_stand_before_the_new_one() -> None:
    """LL and SIMPLE by turns, and a job that begins again far earlier. A packet in the midst of a partial sum says
    where it is, and no header agrees. Then a SIMPLE message lacks its first packet, and its last vouches for them."""
    job = example_job(count=[COUNT, COUNT], mtu=1024, startup=False, rebuild=False, seed=8)
    job.collectives.steady[1].protocol = "simple"
    plan, qpn = plan_job(job), job.flows[0].qpns[0]
    old = writes(generate(job, iterations=1, first_iteration=START, seed=8).packets, qpn)
    earlier = START - 2**23 // len(old) - 2  # more than half a lap
    new = generate(job, iterations=1, first_iteration=earlier, seed=8).packets
    partial, _, _, final = messages(new, qpn)
    engine = Engine(plan.engine)
    assert run(engine, old, 1) == len(old)
    run(engine, [new[at] for at in [partial[2], *final[1:]]], 2)
    outcomes = engine.outcomes(0)
    assert outcomes["aside"] == outcomes["unanchored"] == (0, 0)
    assert outcomes["late"][0] == len(final) - 1, "of an iteration before the first: known, and counted as that"


def test_a_connection_whose_calls_have_ended_begins_anew() -> None:
    """LL. A connection that only a job's beginning uses. It has come to its end when the job is started anew on the
    same queue pair, more than half a lap of the PSN before: the messages after the first one are known as well."""
    job = example_job(count=50_000, mtu=256, startup=False, rebuild=False, seed=8)
    plan, qpn = plan_job(job), job.flows[0].qpns[0]
    first = writes(generate(job, iterations=1, first_iteration=1, seed=8).packets, qpn)
    turns = 2**23 // len(first) + 3
    last = writes(generate(job, iterations=1, first_iteration=turns - 1, seed=8).packets, qpn)
    engine = Engine(replace(plan.engine, edges=tuple(
        replace(edge, calls=turns * tuple(
            replace(call, phase=Phase.ITERATION_0, target=Target.NOTHING)
            for call in edge.calls if call.phase == Phase.STEADY
        ))
        for edge in plan.engine.edges
    )))
    assert run(engine, last, 1) == len(last) and engine.past(0) > 0, "nothing comes after them"
    assert run(engine, first, 2) == len(first)
    found, outcomes = counted(engine, plan, qpn), engine.outcomes(0)
    assert kinds(engine) == [] and found["state"] == "ANCHORED" and found["next_psn"] == 2 * len(first)
    assert (outcomes["released"][0], outcomes["beyond"]) == (len(last) + len(first), (0, 0))
