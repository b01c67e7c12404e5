"""EvidenceCollector: each thing an engine can say becomes the one clause or mark it belongs to, and nothing else."""

import dataclasses

import numpy as np
import pytest

from flowcheck.rebuild.iteration.collector import EvidenceCollector
from flowcheck.rebuild.iteration.given import Given
from flowcheck.rebuild.iteration.verdict import BucketEvidence, Clause, Evidence, StreamEvidence
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job, sharded_job
from parser.nccl import of

from ..fake_engine import FakeEngine

STREAMS = (StreamEvidence("a", "past"), StreamEvidence("b", "ended"))
FORWARD, BACK = "channel 0, rank 0 -> 1 (QP 0x11)", "channel 0, rank 1 -> 0 (QP 0x12)"
DATA, CONTROL, DATA_BACK = 0, 1, 2  # flows: data and control of the first connection, data of the second


def made(check_icrc: bool = True, step_values: tuple[str, ...] = (), **job: object) -> tuple[JobPlan, FakeEngine]:
    """Two captures of two ranks. Steady buckets: 24 elements in cells 0..11, 9 in cells 16..20; every cell is there."""
    described = example_job(**{"ranks": 2, "count": [24, 9], **job})
    described.step_values = list(step_values)
    for number, flow in enumerate(described.flows):
        flow.qpns = [0x11 + number]
    plan = plan_job(described, streams=2, check_icrc=check_icrc)
    engine = FakeEngine(plan.engine)
    for iteration in range(6):
        engine.cells(iteration)[:] = True
    return plan, engine


def look(plan: JobPlan, engine: FakeEngine, iteration: int = 3, *, streams=STREAMS, record=False, follows=True):
    return EvidenceCollector(plan, engine).collect(
        iteration, streams, record=record, follows=follows, final="arena_needed"
    )


def test_an_engine_without_complaints_is_evidence_of_a_publishable_iteration() -> None:
    plan, engine = made()
    judged = look(plan, engine)
    assert judged.evidence == Evidence(
        iteration=3, buckets=(BucketEvidence(0, 24, 24, {}, "bucket"), BucketEvidence(1, 9, 9, {}, "bucket")),
        unanchored=(), disagreements=(), recovered=(), icrc_checked=True, streams=STREAMS,
        final="", differences=(), copies_disagreed=0, copies_first="",
        step_record_declared=False, step_record_present=False, checksum=None,
        refused="", another_run="", times=(), previous_published=True, stale=None, from_peers="",
    )
    assert judged.verdict.publishable and judged.verdict.unproven == () and judged.verdict.iteration == 3
    assert [b.place.index for b in judged.buckets] == [0, 1] and judged.groups == []


def test_the_bytes_of_the_buckets_come_along() -> None:
    plan, engine = made()
    engine.region(3)[:] = np.arange(192, dtype=np.uint8)
    assert [bytes(b.data) for b in look(plan, engine).buckets] == [bytes(range(96)), bytes(range(128, 164))]


# -- what fails a clause --------------------------------------------------------------------------------


def never_anchored(engine: FakeEngine) -> None:
    engine.flow(DATA_BACK)["anchored"] = False


def never_anchored_in_the_second_capture(engine: FakeEngine) -> None:
    engine.flow(DATA, stream=1)["anchored"] = False


def two_never_anchored(engine: FakeEngine) -> None:
    engine.flow(DATA)["anchored"] = engine.flow(DATA_BACK)["anchored"] = False


def disagreement(engine: FakeEngine) -> None:
    engine.disagree(3, flow=DATA_BACK)


def two_disagreements(engine: FakeEngine) -> None:
    engine.disagree(3, message=1)
    engine.disagree(2, message=2)
    engine.disagree(3, message=3)


def copies_differ(engine: FakeEngine) -> None:
    engine.copied[3] = (3, 64, 4096)


def one_copy_differs_at_the_beginning(engine: FakeEngine) -> None:
    engine.copied[3] = (1, 0, 8)


def log_is_full(engine: FakeEngine) -> None:
    engine.unlogged = range(3, 4)


def a_cell_is_missing(engine: FakeEngine) -> None:
    engine.cells(3)[20] = False


def one_message_too_many(engine: FakeEngine) -> None:
    engine.disagree(1, "extra message", flow=DATA)


def tags_of_other_ranks(engine: FakeEngine) -> None:
    engine.tags = {0: 1, 1: 0}


def clear_to_send_of_an_old_version(engine: FakeEngine) -> None:
    engine.forms[of("2.19.4").cts] = 1


LENGTHS = "a packet of 1024 payload bytes was due and 512 came"
FAILS = [
    (never_anchored, Clause.ANCHORED, f"{BACK}: no witness confirms the packet count"),
    (never_anchored_in_the_second_capture, Clause.ANCHORED, f"{FORWARD}: no witness confirms the packet count"),
    (two_never_anchored, Clause.ANCHORED,
     f"{FORWARD}: no witness confirms the packet count; {BACK}: no witness confirms the packet count"),
    (disagreement, Clause.ANCHORED, f"{BACK}, iteration 3, message 5, PSN 77: {LENGTHS}"),
    (two_disagreements, Clause.ANCHORED,
     f"{FORWARD}, iteration 3, message 1, PSN 77: {LENGTHS}; {FORWARD}, iteration 3, message 3, PSN 77: {LENGTHS}"),
    (log_is_full, Clause.ANCHORED, "more disagreements than the log holds"),
    (copies_differ, Clause.COPIES_AGREE,
     "24 bytes of later copies differ, first at byte 64 of the iteration's region"),
    (one_copy_differs_at_the_beginning, Clause.COPIES_AGREE,
     "8 bytes of later copies differ, first at byte 0 of the iteration's region"),
    (a_cell_is_missing, Clause.COVERED, "bucket 1: 8 of 9 elements, missing by cause: lost 1"),
    (one_message_too_many, Clause.SUPPORTED,
     f"one message too many per operation on {FORWARD}: a modified NCCL (2n-1 sends per loop instead of 2n-2), or"
     " calls that the manifest does not list"),
    (tags_of_other_ranks, Clause.SUPPORTED,
     f"the receiver of {FORWARD} calls its sender rank 1, the manifest says 0: correct the ranks of the flows, or,"
     " for a communicator split from a larger one, list its members there in communicator.parent_ranks"),
    (clear_to_send_of_an_old_version, Clause.SUPPORTED,
     "clear-to-send writes of 32 bytes, as of NCCL 2.12-2.19; the manifest says 2.27.7: correct nccl_version"),
]


@pytest.mark.parametrize(("say", "clause", "reason"), FAILS, ids=[say.__name__ for say, _, _ in FAILS])
def test_one_complaint_fails_one_clause(say, clause, reason) -> None:
    plan, engine = made()
    say(engine)
    judged = look(plan, engine)
    assert judged.verdict.failing == ((clause, reason),)
    assert judged.verdict.unproven == ()


def test_the_callers_words_fail_their_clauses() -> None:
    plan, engine = made()
    behind = (StreamEvidence("port 0", "behind"),)
    assert look(plan, engine, streams=behind).verdict.failing == ((Clause.STREAMS_PAST, "port 0 is behind"),)
    assert [clause for clause, _ in look(plan, engine, follows=False).verdict.failing] == [Clause.PREVIOUS]


@pytest.mark.parametrize(("declared", "record", "fails"), [
    (("lr",), False, [Clause.STEP_RECORD]), (("lr",), True, []), ((), False, []), ((), True, []),
])
def test_a_step_record_is_needed_where_the_manifest_declares_values(declared, record, fails) -> None:
    judged = look(*made(step_values=declared), record=record)
    assert [clause for clause, _ in judged.verdict.failing] == fails
    assert judged.evidence.step_record_declared is bool(declared)
    assert judged.evidence.step_record_present is record


@pytest.mark.parametrize(("iteration", "fails"), [(2, []), (3, [Clause.ANCHORED]), (4, [])])
def test_a_full_log_is_held_against_the_iterations_it_left_out(iteration: int, fails: list[Clause]) -> None:
    plan, engine = made()
    engine.unlogged = range(3, 4)
    assert [clause for clause, _ in look(plan, engine, iteration).verdict.failing] == fails


@pytest.mark.parametrize("iteration", [2, 4])
def test_what_was_said_of_another_iteration_is_not_held_against_this_one(iteration: int) -> None:
    plan, engine = made()
    engine.disagree(3)
    engine.copied[3] = (1, 8, 8)
    engine.cells(3)[:] = False
    assert look(plan, engine, iteration).verdict.publishable
    assert not look(plan, engine, 3).verdict.complete


def test_copies_that_agree_fail_nothing() -> None:
    plan, engine = made()
    engine.copied[3] = (0, 64, 4096)
    judged = look(plan, engine)
    assert judged.verdict.publishable
    assert (judged.evidence.copies_disagreed, judged.evidence.copies_first) == (0, "")


def differing(engine: FakeEngine, cells: tuple[int, int], **one: int) -> None:
    """The copies of these cells of iteration 3 differ, as far as the engine's books go."""
    engine.cells(3)[slice(*cells)] = False
    engine.void[3] = [cells]
    engine.copied[3] = (cells[1] - cells[0], 8 * cells[0], 4096)
    entry = {"stream": 1, "flow": DATA, "psn": 70, "target": 1, "iteration": 3, "offset": 8 * cells[0], "bytes": 8}
    engine.differing.append({**entry, **one})


def test_what_copies_differ_in_is_missing_and_both_packets_are_named() -> None:
    plan, engine = made()
    differing(engine, (4, 6))
    engine.carried = [(DATA, 70), (DATA_BACK, 9)]
    judged = look(plan, engine)
    assert judged.verdict.failing == ((
        Clause.COVERED,
        "bucket 0: 20 of 24 elements, missing by cause: disagreed 4; "
        f"8 bytes at byte 32 of the iteration's region: PSN 70 of {FORWARD} in b differs from "
        f"PSN 70 of {FORWARD} in a or PSN 9 of {BACK} in a or PSN 9 of {BACK} in b",
    ),)
    assert judged.evidence.copies_disagreed == 0 and judged.buckets[0].placed == ((0, 8), (12, 24))


def test_a_retransmission_of_other_bytes_is_named() -> None:
    plan, engine = made()
    differing(engine, (4, 5))
    engine.carried = [(DATA, 70)]
    engine.flow(DATA)["packets"] = 0  # nothing of it is in the other capture
    (_, reason), = look(plan, engine).verdict.failing
    assert reason.endswith(f"PSN 70 of {FORWARD} in b differs from an earlier packet of the same PSN")


def test_differences_of_other_iterations_are_not_named_and_few_of_this_one_are() -> None:
    plan, engine = made()
    differing(engine, (4, 5), iteration=2, psn=99)
    for psn in range(71, 77):
        differing(engine, (4, 5), psn=psn)
    differences = look(plan, engine).evidence.differences
    assert len(differences) == 4 and "PSN 71" in differences[0] and differences[3] == "and 3 more"


def test_cells_that_differ_and_count_as_there_fail_the_iteration() -> None:
    """The engine's books are wrong: between the buckets lies nothing that could be missing."""
    plan, engine = made()
    differing(engine, (12, 13))
    verdict = look(plan, engine).verdict
    assert verdict.failing == (
        (Clause.COPIES_AGREE, "8 bytes of later copies differ, first at byte 96 of the iteration's region"),
    )


@pytest.mark.parametrize(("cells", "counted"), [((0, 1), 0), ((21, 24), 24), ((11, 17), 32), ((20, 23), 16)])
def test_books_are_looked_at_from_the_first_cell_to_the_last(cells: tuple[int, int], counted: int) -> None:
    """Buckets are cells 0 to 11 and 16 to 20; the region has 24."""
    plan, engine = made()
    differing(engine, cells)
    assert look(plan, engine).evidence.copies_disagreed == counted


@pytest.mark.parametrize("change", [
    {"anchored": False, "packets": 0},  # nothing of it was captured
    {"anchored": False, "state": "LOST"},  # its disagreement is logged where it was
])
def test_flows_that_need_no_anchor(change: dict) -> None:
    plan, engine = made()
    engine.flow(DATA).update(change)
    assert look(plan, engine).verdict.publishable


def test_a_control_flow_needs_no_anchor_and_is_never_trusted_again() -> None:
    plan, engine = made()
    engine.flow(CONTROL).update(anchored=False, ignored=range(1, 2))
    verdict = look(plan, engine).verdict
    assert verdict.publishable and verdict.unproven == ()


def test_the_whole_traffic_is_refused_for_the_most_telling_reason() -> None:
    plan, engine = made()
    clear_to_send_of_an_old_version(engine)
    tags_of_other_ranks(engine)
    assert "calls its sender rank 1" in EvidenceCollector(plan, engine).refused([])
    one_message_too_many(engine)
    assert "one message too many" in EvidenceCollector(plan, engine).refused(engine.disagreements())
    assert [clause for clause, _ in look(plan, engine).verdict.failing] == [Clause.SUPPORTED]


@pytest.mark.parametrize("final", ["all_came", "acknowledged", "passed", "arena_needed", "ended"])
def test_the_verdict_says_why_nothing_more_comes(final: str) -> None:
    plan, engine = made()
    whole = EvidenceCollector(plan, engine).collect(3, STREAMS, record=False, follows=True, final=final)
    assert whole.verdict.final == ""
    a_cell_is_missing(engine)
    lacking = EvidenceCollector(plan, engine).collect(3, STREAMS, record=False, follows=True, final=final)
    assert lacking.verdict.final == lacking.verdict.to_dict()["final"] == final


# -- what is a mark -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checked", "marks"), [(True, ()), (False, ("icrc off",))])
def test_icrc_off_is_a_mark_and_no_failure(checked: bool, marks: tuple[str, ...]) -> None:
    judged = look(*made(check_icrc=checked))
    assert judged.evidence.icrc_checked is checked
    assert judged.verdict.publishable and judged.verdict.unproven == marks


@pytest.mark.parametrize(("ignored", "marks"), [
    (range(1, 2), (f"{BACK}: disagreed in iteration 1, trusted again from 2 on",)),
    (range(1, 3), (f"{BACK}: disagreed in iteration 1, trusted again from 3 on",)),  # the first that it applies to
    (range(1, 4), ()),  # not yet
    (range(1, 1 << 62), ()),  # never
    (range(0), ()),
])
def test_a_flow_that_is_trusted_again_is_a_mark(ignored: range, marks: tuple[str, ...]) -> None:
    plan, engine = made()
    engine.flow(DATA_BACK, stream=1)["ignored"] = ignored
    verdict = look(plan, engine, 3).verdict
    assert verdict.publishable and verdict.unproven == marks


# -- buckets and groups ---------------------------------------------------------------------------------


def test_iteration_0_has_buckets_of_its_own() -> None:
    plan, engine = made()
    assert look(plan, engine, 0).evidence.buckets == (BucketEvidence(0, 33, 33, {}, "bucket"),)


def test_gathered_parameters_are_groups_and_not_buckets() -> None:
    plan = plan_job(sharded_job(count=(25, 6), dtype="float32"), streams=1)
    engine = FakeEngine(plan.engine)
    engine.cells(1)[:] = True
    engine.cells(1)[18] = False  # in the second block of the second group
    judged = look(plan, engine, 1)
    assert judged.buckets == [] and [g.place.index for g in judged.groups] == [0, 1]
    assert [(b.what, b.index, b.elements, b.covered) for b in judged.evidence.buckets] == [
        ("parameter group", 0, 26, 26), ("parameter group", 1, 6, 4),
    ]
    assert [clause for clause, _ in judged.verdict.failing] == [Clause.COVERED]
    assert judged.verdict.failing[0][1].startswith("parameter group 1: 4 of 6 elements")


# -- afterwards -----------------------------------------------------------------------------------------


def test_a_checksum_compared_later_makes_a_verdict_of_its_own() -> None:
    judged = look(*made())
    wrong = judged.with_checksum("mismatch")
    assert [clause for clause, _ in wrong.verdict.failing] == [Clause.CHECKSUM]
    assert wrong.verdict.complete and not wrong.verdict.publishable
    assert wrong.evidence == dataclasses.replace(judged.evidence, checksum="mismatch")
    assert (wrong.buckets, wrong.groups) == (judged.buckets, judged.groups)
    right = judged.with_checksum("match")
    assert right.verdict.publishable and right.evidence.checksum == "match"
    assert judged.verdict.publishable and judged.evidence.checksum is None


def test_counts_are_of_what_has_come_since_they_were_asked_last() -> None:
    plan, engine = made()
    collector = EvidenceCollector(plan, engine)
    assert collector.grown(engine.flows()) == {"packets": 0, "placed": 0, "gaps": 0, "duplicates": 0}
    engine.counts[0] |= {"placed": (5, 40), "late": (2, 16)}
    engine.counts[1]["placed"] = (3, 24)
    engine.unseen[1] = 4
    engine.flow(DATA)["duplicates"], engine.flow(DATA_BACK, stream=1)["duplicates"] = 6, 1
    assert collector.grown(engine.flows()) == {"packets": 10, "placed": 8, "gaps": 4, "duplicates": 7}
    engine.counts[1]["late"], engine.unseen[1] = (1, 8), 3  # a gap that was filled
    assert collector.grown(engine.flows()) == {"packets": 1, "placed": 0, "gaps": -1, "duplicates": 0}


def test_a_version_from_holes_waits_for_what_is_stale_and_is_good_without() -> None:
    plan, engine = made()
    engine.cells(3)[20] = False
    judged = look(plan, engine)
    waits, patched = judged.with_stale(1), judged.with_stale(0)
    assert [one.evidence for one in (waits, patched)] == [
        dataclasses.replace(judged.evidence, stale=stale) for stale in (1, 0)]
    (clause, reason), = waits.verdict.failing
    assert clause is Clause.COVERED
    assert reason.startswith("1 elements of the version wait for the trainer's own state of them")
    assert patched.verdict.publishable and patched.buckets is judged.buckets and patched.filled is judged.filled


def test_counters_that_were_read_are_what_is_judged() -> None:
    """They are of one moment for all that is said of an iteration."""
    plan, engine = made()
    flows = engine.flows()
    never_anchored(engine)
    found = EvidenceCollector(plan, engine).collect(
        3, STREAMS, record=False, follows=True, final="", flows=flows)
    assert found.verdict.publishable and look(plan, engine).evidence.unanchored == (BACK,)


    engine.cells(3)[5] = False
    engine.flow(DATA)["packets"] = engine.flow(DATA, stream=1)["packets"] = 0  # and of what is missing the cause
    found = EvidenceCollector(plan, engine).collect(
        3, STREAMS, record=False, follows=True, final="", flows=flows)
    assert found.buckets[0].missing == {"lost": 2} and look(plan, engine).buckets[0].missing == {"not_mirrored": 2}


def test_cells_are_counted_by_what_filled_them() -> None:
    """17 have come, 3 of them again after they were lost, and two peers gave some."""
    plan, engine = made()
    assert look(plan, engine).filled == {"stream": 17}
    engine.cells(3)[2:4] = False
    differing(engine, (22, 24))
    engine.repeated[3] = 3
    collector = EvidenceCollector(plan, engine)
    collector.given = Given(cells={"a": 2, "b": 1})
    judged = collector.collect(3, STREAMS, record=False, follows=True, final="ended")
    assert judged.filled == {"stream": 14, "retransmission": 3, "peer": 3}
    assert judged.with_checksum("match").filled == judged.with_stale(0).filled == judged.filled


def test_who_brought_a_byte_is_asked_of_its_iteration() -> None:
    plan, engine = made()
    differing(engine, (4, 5))
    asked: list[tuple[int, int]] = []
    engine.carriers = lambda iteration, offset: asked.append((iteration, offset)) or []
    look(plan, engine)
    assert asked == [(3, 32)]
