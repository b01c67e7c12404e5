import dataclasses
import itertools

import pytest

from flowcheck.verdict import ABOUT_GRADIENTS, BucketEvidence, Clause, Evidence, StreamEvidence, judge

GOOD = Evidence(
    iteration=3,
    buckets=(BucketEvidence(0, 5000, 5000, {}), BucketEvidence(1, 0, 0, {})),
    unanchored=(),
    disagreements=(),
    recovered=(),
    icrc="all",
    icrc_wrong_placed=0,
    streams=(StreamEvidence("a", "past"), StreamEvidence("b", "ended"), StreamEvidence("c", "lost")),
    copies_disagreed=0,
    copies_first="",
    step_record_declared=True,
    step_record_present=True,
    checksum="match",
    refused="",
    previous_published=True,
)

# One change each that fails one clause and no other, with words its reason must hold.
FAILS = [
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 6, {"psn_gap": 3, "icrc": 1}),)},
     ["bucket 0: 6 of 10 elements", "psn_gap 3, icrc 1"]),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 9, {}),)}, ["9 of 10", "do not add up"]),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 10, {"psn_gap": 1}),)}, ["do not add up"]),
    (Clause.COVERED, {"buckets": (BucketEvidence(0, 10, 11, {}),)}, ["11 of 10"]),
    (Clause.COVERED, {"buckets": ()}, ["no gradient bucket"]),
    (Clause.ANCHORED, {"disagreements": ("flow a: PSN: slot 3, RETH: slot 4",)}, ["slot 3", "slot 4"]),
    (Clause.ANCHORED, {"unanchored": ("flow a", "b", "c", "d", "e")}, ["flow a", "2 more"]),
    (Clause.ICRC, {"icrc_wrong_placed": 2}, ["2 packets"]),
    (Clause.ICRC, {"icrc": "some"}, ["'some'"]),
    (Clause.STREAMS_PAST, {"streams": (StreamEvidence("rank1", "behind"),)}, ["rank1 is behind"]),
    (Clause.STREAMS_PAST, {"streams": ()}, ["no stream"]),
    (Clause.COPIES_AGREE, {"copies_disagreed": 8, "copies_first": "bucket 1 element 17"},
     ["8 bytes", "bucket 1 element 17"]),
    (Clause.SUPPORTED, {"refused": "one message too many per channel"}, ["one message too many"]),
    (Clause.STEP_RECORD, {"step_record_present": False}, ["record is not here"]),
    (Clause.CHECKSUM, {"checksum": "mismatch"}, ["checksum"]),
    (Clause.PREVIOUS, {"previous_published": False}, ["not published"]),
]


def test_a_perfect_iteration_is_complete_and_publishable():
    verdict = judge(GOOD)
    assert (verdict.complete, verdict.publishable, verdict.failing, verdict.unproven) == (True, True, (), ())
    assert verdict.iteration == 3
    assert verdict.to_dict() == {"complete": True, "publishable": True, "failing": [], "unproven": []}


@pytest.mark.parametrize(("clause", "change", "words"), FAILS, ids=lambda x: getattr(x, "value", None))
def test_each_clause_fails_alone(clause, change, words):
    verdict = judge(dataclasses.replace(GOOD, **change))
    assert [c for c, _ in verdict.failing] == [clause]
    assert not verdict.publishable
    assert verdict.complete == (clause not in ABOUT_GRADIENTS)
    for word in words:
        assert word in verdict.failing[0][1]
    entry = {"clause": clause.value, "reason": verdict.failing[0][1]}
    assert verdict.to_dict()["failing"] == [entry]


def test_every_clause_has_such_a_test_and_a_stable_name():
    assert {clause for clause, _, _ in FAILS} == set(Clause)
    assert [clause.value for clause in Clause] == [
        "covered", "anchored", "icrc", "streams_past", "copies_agree", "supported", "step_record", "checksum",
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


@pytest.mark.parametrize("mode", ["sampled", "off"])
def test_icrc_not_checked_on_every_packet_marks_the_result(mode):
    verdict = judge(dataclasses.replace(GOOD, icrc=mode))
    assert verdict.publishable and verdict.unproven == (f"icrc {mode}",)


def test_evidence_has_no_defaults():
    for field in dataclasses.fields(Evidence):
        assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def test_a_flow_trusted_again_is_a_mark():
    verdict = judge(dataclasses.replace(GOOD, recovered=("flow a: disagreed in iteration 1",), icrc="off"))
    assert verdict.publishable and verdict.unproven == ("icrc off", "flow a: disagreed in iteration 1")
