import dataclasses
import itertools

import pytest

from flowcheck.rebuild.iteration.verdict import BucketEvidence, Clause, Evidence, StreamEvidence, judge

GOOD = Evidence(
    iteration=3,
    buckets=(BucketEvidence(0, 5000, 5000, {}), BucketEvidence(1, 0, 0, {})),
    unanchored=(),
    disagreements=(),
    recovered=(),
    icrc_checked=True,
    streams=(StreamEvidence("a", "past"), StreamEvidence("b", "ended"), StreamEvidence("c", "lost")),
    final="",
    differences=(),
    copies_disagreed=0,
    copies_first="",
    step_record_declared=True,
    step_record_present=True,
    checksum="match",
    refused="",
    another_run="",
    times=(),
    previous_published=True,
    stale=None,
    from_peers="",
)

# The clauses that say whether the gradients are the trainer's; the other three are about this update alone.
GRADIENTS = {
    Clause.COVERED, Clause.ANCHORED, Clause.STREAMS_PAST, Clause.COPIES_AGREE, Clause.SUPPORTED, Clause.ONE_RUN,
}

# One change each that fails one clause and no other, and the reason that is given.
FAILS = [
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 6, {"lost": 3, "icrc": 1, "unanchored": 0}),)},
     "bucket 0: 6 of 10 elements, missing by cause: lost 3, icrc 1"),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 9, {}),)},
     "bucket 0: 9 of 10 elements (the counts do not add up)"),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 10, {"lost": 1}),)},
     "bucket 0: 10 of 10 elements, missing by cause: lost 1 (the counts do not add up)"),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 11, {}),)},
     "bucket 0: 11 of 10 elements (the counts do not add up)"),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 11, {"lost": -1}),)},
     "bucket 0: 11 of 10 elements, missing by cause: lost -1"),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 9, 9, {}), BucketEvidence(1, 10, 0, {"not_mirrored": 10}))},
     "bucket 1: 0 of 10 elements, missing by cause: not_mirrored 10"),
    (Clause.COVERED, {"buckets": (BucketEvidence(2, 10, 9, {"lost": 1}, "parameter group"),)},
     "parameter group 2: 9 of 10 elements, missing by cause: lost 1"),
    (Clause.COVERED, {"buckets": ()}, "no gradient bucket and no parameter group was seen"),
    (Clause.ANCHORED, {"disagreements": ("flow a: PSN: slot 3, RETH: slot 4",)}, "flow a: PSN: slot 3, RETH: slot 4"),
    (Clause.ANCHORED, {"unanchored": ("flow a",)}, "flow a: no witness confirms the packet count"),
    (Clause.ANCHORED, {"disagreements": ("a", "b"), "unanchored": ("c",)},
     "a; b; c: no witness confirms the packet count"),
    (Clause.ANCHORED, {"disagreements": ("a", "b", "c", "d", "e")}, "a; b; c; and 2 more"),
    (Clause.STREAMS_PAST, {"streams": (StreamEvidence("a", "past"), StreamEvidence("b", "behind"))}, "b is behind"),
    (Clause.STREAMS_PAST, {"streams": (StreamEvidence("a", "elsewhere"),)}, "a is elsewhere"),
    (Clause.STREAMS_PAST, {"streams": ()}, "no stream was seen"),
    (Clause.COPIES_AGREE, {"copies_disagreed": 1, "copies_first": "byte 64"},
     "1 bytes of later copies differ, first at byte 64"),
    (Clause.SUPPORTED, {"refused": "one message too many per channel"}, "one message too many per channel"),
    (Clause.ONE_RUN, {"another_run": "a and b are hours apart"}, "a and b are hours apart"),
    (Clause.STEP_RECORD, {"step_record_present": False},
     "the manifest declares per-step values and their record is not here"),
    (Clause.CHECKSUM, {"checksum": "mismatch"},
     "the trainer's checksum or sample of its state differs from the replica's"),
    (Clause.CHECKSUM, {"checksum": "later"},
     "the trainer's checksum or sample of its state differs from the replica's"),
    (Clause.PREVIOUS, {"previous_published": False},
     "the iteration before was not published; there is nothing to build on"),
]


def test_what_peers_gave_is_unproven_until_a_checksum_has_matched() -> None:
    mark = "3 cells came from a peer"
    given = dataclasses.replace(GOOD, from_peers=mark, checksum=None)
    assert judge(given).unproven == (mark,) and judge(given).publishable
    assert judge(dataclasses.replace(given, checksum="mismatch")).unproven == (mark,)
    assert judge(dataclasses.replace(given, checksum="match")).unproven == ()
    every = dataclasses.replace(given, icrc_checked=False, recovered=("flow 1",))
    assert judge(every).unproven == ("icrc off", "flow 1", mark)


def test_a_perfect_iteration_is_complete_and_publishable():
    verdict = judge(GOOD)
    assert (verdict.complete, verdict.publishable, verdict.failing, verdict.unproven) == (True, True, (), ())
    assert verdict.iteration == 3
    assert verdict.to_dict() == {"complete": True, "publishable": True, "failing": [], "unproven": [], "final": ""}


@pytest.mark.parametrize(("clause", "change", "reason"), FAILS, ids=[clause.value for clause, _, _ in FAILS])
def test_each_clause_fails_alone(clause, change, reason):
    verdict = judge(dataclasses.replace(GOOD, **change))
    assert verdict.failing == ((clause, reason),)
    assert not verdict.publishable
    assert verdict.complete == (clause not in GRADIENTS)
    assert verdict.to_dict() == {
        "complete": clause not in GRADIENTS, "publishable": False,
        "failing": [{"clause": clause.value, "reason": reason}], "unproven": list(verdict.unproven), "final": "",
    }


HOLES = {"buckets": (BucketEvidence(0, 10, 7, {"lost": 3}),)}


def test_a_version_whose_holes_were_patched_is_published_and_its_gradients_are_not_complete():
    verdict = judge(dataclasses.replace(GOOD, stale=0, **HOLES))
    assert (verdict.publishable, verdict.complete, verdict.failing) == (True, False, ())
    verdict = judge(dataclasses.replace(GOOD, stale=0))
    assert (verdict.publishable, verdict.complete) == (True, True)
    for clause, change, reason in FAILS:
        verdict = judge(dataclasses.replace(GOOD, stale=0, **HOLES) if clause is Clause.COVERED else
                        dataclasses.replace(GOOD, stale=0, **{**HOLES, **change}))
        assert verdict.failing == (() if clause is Clause.COVERED else ((clause, reason),)), "a patch heals holes alone"


def test_a_version_that_waits_for_patches_is_not_published():
    waits = "8 elements of the version wait for the trainer's own state of them"
    verdict = judge(dataclasses.replace(GOOD, stale=8))
    assert (verdict.publishable, verdict.complete) == (False, True) and verdict.failing == ((Clause.COVERED, waits),)
    verdict = judge(dataclasses.replace(GOOD, stale=8, **HOLES))
    assert (verdict.publishable, verdict.complete) == (False, False)
    assert verdict.failing[0][1] == f"{waits}; bucket 0: 7 of 10 elements, missing by cause: lost 3"


def test_every_clause_has_such_a_test_and_a_stable_name():
    assert {clause for clause, _, _ in FAILS} == set(Clause)
    assert [clause.value for clause in Clause] == [
        "covered", "anchored", "streams_past", "copies_agree", "supported", "one_run", "step_record", "checksum",
        "previous",
    ]


def test_clauses_fail_independently():
    for (a, change_a, _), (b, change_b, _) in itertools.combinations(FAILS, 2):
        if a is not b:
            verdict = judge(dataclasses.replace(GOOD, **change_a, **change_b))
            assert {clause for clause, _ in verdict.failing} == {a, b}


def test_nothing_declared_needs_no_record_and_no_checksum():
    change = {"step_record_declared": False, "step_record_present": False, "checksum": None}
    assert judge(dataclasses.replace(GOOD, **change)).publishable


def test_icrc_that_was_not_checked_marks_the_result():
    verdict = judge(dataclasses.replace(GOOD, icrc_checked=False))
    assert verdict.publishable and verdict.unproven == ("icrc off",)


def test_the_sign_by_which_holes_are_for_good_goes_along():
    verdict = judge(dataclasses.replace(GOOD, final="arena_needed", **HOLES))
    assert verdict.final == verdict.to_dict()["final"] == "arena_needed"


def test_evidence_has_no_defaults():
    for field in dataclasses.fields(Evidence):
        assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def test_a_flow_trusted_again_is_a_mark():
    verdict = judge(dataclasses.replace(GOOD, recovered=("flow a: disagreed in iteration 1",), icrc_checked=False))
    assert verdict.publishable and verdict.unproven == ("icrc off", "flow a: disagreed in iteration 1")
    assert verdict.to_dict()["unproven"] == ["icrc off", "flow a: disagreed in iteration 1"]


def test_failing_clauses_come_in_the_order_of_the_table():
    everything = {name: value for _, change, _ in reversed(FAILS) for name, value in change.items()}
    verdict = judge(dataclasses.replace(GOOD, **everything))
    assert [clause.value for clause, _ in verdict.failing] == [
        "covered", "anchored", "streams_past", "copies_agree", "supported", "one_run", "step_record", "checksum",
        "previous",
    ]


@pytest.mark.parametrize(("count", "text"), [(3, "a; b; c"), (4, "a; b; c; and 1 more")])
def test_three_reasons_of_a_clause_are_spelt_out(count, text):
    verdict = judge(dataclasses.replace(GOOD, disagreements=tuple("abcd"[:count])))
    assert verdict.failing == ((Clause.ANCHORED, text),)
