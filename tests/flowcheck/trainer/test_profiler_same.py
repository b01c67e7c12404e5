"""Could two lists be the same calls; and how a communicator is named in what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.trainer.nccl.agreement import could_be
from flowcheck.trainer.nccl.flight_recorder import parse_flights
from flowcheck.trainer.nccl.profiler_calls import compare, same_as

from .test_flight_recorder import entry, of
from .test_profiler_calls import REDUCE, SAID, history, made

GATHER = replace(REDUCE, serial=3, function="AllGather", count=2000, type="ncclInt8")
BYTES = {"op": "AllGather", "count": 500}


@pytest.mark.parametrize(("own", "same"), [
    ([SAID, BYTES], True), ([SAID, {"op": "AllGather", "count": 2000, "dtype": "int8"}], True),
    ([SAID, {"op": "AllGather", "count": 501}], False), ([SAID, {**BYTES, "op": "AllReduce"}], False),
    ([SAID, {**BYTES, "dtype": "float64"}], False), ([SAID, None], True), ([None, None], True),
    ([{**SAID, "count": 250, "dtype": "float64"}, BYTES], True),  # as many bytes
    ([{**SAID, "root": 3, "algorithm": "tree"}, BYTES], True), ([BYTES, SAID], False),
    ([SAID], False), ([SAID, BYTES, BYTES], False), ([], False),
])
def test_calls_that_could_be_the_same(own: list[dict[str, Any] | None], same: bool) -> None:
    assert same_as(own, [REDUCE, GATHER]) is same


def test_of_a_type_that_no_manifest_has_the_function_decides() -> None:
    odd = replace(REDUCE, type="ncclFloat8e4m3")
    assert same_as([SAID], [odd]) and same_as([{**SAID, "count": 1}], [odd])
    assert not same_as([{**SAID, "op": "ReduceScatter"}], [odd]) and same_as([], [])


@pytest.mark.parametrize(("size", "same"), [(500, True), (499, False)])
def test_flights_that_could_be_a_communicators(size: int, same: bool) -> None:
    flights = parse_flights(of(entry(0, input_sizes=[[size]], output_sizes=[[size]]))).group("0")
    assert could_be(flights, [REDUCE]) is same and could_be([], []) and not could_be(flights, [])


def test_where_calls_contradict_is_said() -> None:
    with pytest.raises(UserError) as caught:
        compare([SAID], [])
    assert caught.value.where == "NCCL's profiler events"
    assert caught.value.what == "NCCL made 0 calls, and not 1"
    with pytest.raises(UserError, match="root"):  # a Broadcast that says no root has root 0
        compare([{"op": "Broadcast", "count": 500}], [replace(REDUCE, function="Broadcast", root=1)])
    compare([{"op": "Broadcast", "count": 500}], [replace(REDUCE, function="Broadcast", root=0)])


@pytest.mark.parametrize(("changed", "words"), [
    ({}, "0xa rank 1 of 4 (dp)"), ({"name": ""}, "0xa rank 1 of 4"), ({"ranks": -1}, "0xa rank 1 (dp)"),
    ({"ranks": 0}, "0xa rank 1 of 0 (dp)"),
])
def test_a_communicator_in_words(changed: dict[str, Any], words: str) -> None:
    found, _ = history(made(**changed))
    (calls,) = found.communicators()
    assert str(calls) == words


def test_events_end_where_nobody_needs_them() -> None:
    found, plugin = history()
    found.quiet()
    assert plugin.recording is False
