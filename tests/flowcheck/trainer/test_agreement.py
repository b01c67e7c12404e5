"""NCCL's log, the profiler plugin and torch's flight recorder of one communicator: what contradicts is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.trainer.nccl.agreement import flights_agree, log_agrees
from flowcheck.trainer.nccl.flight_recorder import parse_flights
from flowcheck.trainer.nccl.log import Log, parse_log
from flowcheck.trainer.nccl.profiler import Call, Communicator, ProxyOperation
from flowcheck.trainer.nccl.profiler_calls import Calls

from ..job.nccl_text import Shape, text
from .test_flight_recorder import entry, of
from .test_profiler_calls import history

SHAPE = Shape(hash=0xA)
MADE = Communicator(1, 1, 6, 0xA, 0, 4, 4, "")
CALL = Call(2, 1, 6, 0xA, 0, "AllReduce", 500, "ncclFloat32", 0, "RING", "LL128", 2, 16, 0, None, True)
SENT = ProxyOperation(3, 1, 6, 0, 2, 1, 2, 6, 614400, True, 0)


def log(shape: Shape = SHAPE, version: str = "2.29.7") -> Log:
    return parse_log(text(shape, version).splitlines(keepends=True), "rank0.log")


def calls(made: Communicator = MADE, *records: Call | ProxyOperation) -> Calls:
    known, _ = history(made, *(records or (CALL, SENT)))
    (ours,) = known.communicators()
    return ours


def check(said: Log, ours: Calls) -> None:
    log_agrees(said, said.communicator(ranks=4, rank=0), ours)


def test_what_agrees() -> None:
    check(log(), calls())
    check(log(), calls(MADE, CALL, replace(SENT, peer=3, sends=False), replace(SENT, serial=4, channel=0, peer=2)))


@pytest.mark.parametrize(("interface", "version"), [(1, "2.23.4"), (2, "2.25.1"), (3, "2.26.2")])
def test_interfaces_that_say_less(interface: int, version: str) -> None:
    made = replace(MADE, interface=interface, hash=0, rank=-1, ranks=-1, nodes=-1)
    check(log(version=version), calls(made, replace(CALL, interface=interface), replace(SENT, interface=interface)))
    with pytest.raises(UserError, match="the log says rank 0, and the plugin 1"):
        check(log(version=version), calls(made, replace(CALL, interface=interface, rank=1)))


@pytest.mark.parametrize(("made", "records", "what"), [
    (replace(MADE, rank=1), (), "the log says rank 0, and the plugin 1"),
    (replace(MADE, ranks=8), (), "the log says ranks 4, and the plugin 8"),
    (replace(MADE, nodes=2), (), "the log says nodes 4, and the plugin 2"),
    (replace(MADE, hash=0xB), (), "the log says commId 0xa, and the plugin 0xb"),
    (replace(MADE, interface=5), (), r"the log says NCCL 2\.29\.7, and the plugin was loaded by its interface 5"),
    (MADE, (replace(CALL, channels=3),), "the log says 2 channels, and call 2 went by 3"),
    (MADE, (replace(CALL, rank=3),), "the log says rank 0, and the plugin 3"),
    (MADE, (CALL, replace(SENT, peer=1, channel=0)), "no connection with rank 1 on channel 0, and call 2 used one"),
])
def test_what_contradicts(made: Communicator, records: tuple[Any, ...], what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        check(log(), calls(made, *records))
    assert refused.value.where == "rank0.log and the profiler plugin"


def test_a_tree_is_a_connection_too() -> None:
    check(log(), calls(MADE, CALL, replace(SENT, peer=1, channel=1)))  # rank 1 is up in tree 1


def test_what_a_log_does_not_have_does_not_contradict() -> None:
    whole = text(SHAPE, "2.29.7").splitlines(keepends=True)
    quiet = [one for one in whole if b"Ring " not in one and b"NCCL version" not in one]
    check(parse_log(quiet), calls(replace(MADE, interface=4), replace(CALL, interface=4), replace(SENT, peer=1)))


# -- the flight recorder --


def flights(*entries: dict[str, Any]) -> Any:
    return parse_flights(of(*entries)).group("0")


REDUCED = entry(0, input_sizes=[[20, 25]], output_sizes=[[20, 25]])
SENT_ROUND = entry(1, profiling_name="nccl:broadcast", input_sizes=[[10]], output_sizes=[[10]])
ROUND = replace(CALL, serial=4, function="Broadcast", count=40, type="ncclInt8", root=3)


def test_flights_that_agree() -> None:
    flights_agree(flights(REDUCED, SENT_ROUND), [CALL, ROUND])
    flights_agree([], [])


@pytest.mark.parametrize(("entries", "seen", "what"), [
    ((REDUCED,), [replace(CALL, count=501)], "call 0 is AllReduce of 501 float32"),
    ((REDUCED,), [replace(CALL, type="ncclBfloat16")], "dtype"),
    ((REDUCED,), [ROUND], "call 0 is Broadcast"),
    ((REDUCED, SENT_ROUND), [CALL, replace(ROUND, count=44)], "call 1 is Broadcast of 44 int8"),
    ((REDUCED, SENT_ROUND), [CALL], "NCCL made 1 calls, and not 2"),
    ((REDUCED,), [CALL, ROUND], "NCCL made 2 calls, and not 1"),
])
def test_flights_that_contradict(entries: Any, seen: list[Call], what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        flights_agree(flights(*entries), seen)
    assert refused.value.where == "torch's flight recorder and NCCL's profiler events"
