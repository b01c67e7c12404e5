"""Calls of one communicator: found by name, compared, and what repeats; one signal at a time, with records by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from flowcheck.errors import UserError
from flowcheck.trainer.nccl import profiler_calls
from flowcheck.trainer.nccl.profiler import (
    LOST,
    Call,
    Communicator,
    Counts,
    Finalized,
    Plugin,
    ProxyOperation,
    Record,
)
from flowcheck.trainer.nccl.profiler_calls import History, as_collective, compare, with_choices

REDUCE = Call(2, 1, 6, 0xA, 1, "AllReduce", 500, "ncclFloat32", 0, "RING", "LL128", 4, 16, 0, None, True)
SAID = {"op": "AllReduce", "count": 500, "dtype": "float32", "root": 0}
CHOSEN = {"algorithm": "ring", "protocol": "ll128", "channels": 4}


class FakePlugin:
    """What `plugin.read` will give next."""

    def __init__(self) -> None:
        self.next: list[Record] = []
        self.dropped = 0
        self.recording = True

    def read(self) -> list[Record]:
        given, self.next = self.next, []
        return given

    def counts(self) -> Counts:
        return Counts(0, 0, self.dropped, 0, 0, 1, True)

    def record(self, events: bool) -> None:
        self.recording = events


def history(*records: Record) -> tuple[History, FakePlugin]:
    plugin = FakePlugin()
    plugin.next = list(records)
    return History(cast(Plugin, plugin)), plugin


def made(number: int = 1, **other: Any) -> Communicator:
    return replace(Communicator(1, number, 6, 0xA, 1, 4, 2, "dp"), **other)


# -- a call in the manifest's form --


def test_a_call_in_the_manifests_form() -> None:
    assert as_collective(REDUCE) == {**SAID, **CHOSEN}
    tree = replace(REDUCE, algorithm="TREE", protocol="SIMPLE", type="ncclBfloat16", channels=1, root=3)
    assert as_collective(tree) == {
        "op": "AllReduce", "count": 500, "dtype": "bfloat16", "root": 0, "algorithm": "tree", "protocol": "simple",
        "channels": 1,
    }
    sent = as_collective(replace(REDUCE, function="Broadcast", type="ncclInt8", root=3, protocol="LL"))
    assert (sent["op"], sent["dtype"], sent["root"], sent["protocol"]) == ("Broadcast", "int8", 3, "ll")
    assert as_collective(replace(REDUCE, function="ReduceScatter", root=2))["root"] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"function": "Reduce", "root": 2}, "is Reduce of 500 float32 from 2 by RING, LL128, 4 channels"),
        ({"function": "Send", "root": 2, "collective": False}, "is Send of 500 float32 with rank 2, which"),
        ({"collective": False}, "is AllReduce of 500 float32 with rank 0, which"),
        ({"type": "ncclFloat8e4m3"}, "reduces ncclFloat8e4m3"),
        ({"algorithm": "NVLS"}, "goes by NVLS and LL128, which is not followed"),
        ({"algorithm": "PAT"}, "goes by PAT"), ({"protocol": "Unknown"}, "goes by RING and Unknown"),
        ({"channels": 0}, "goes by no channel"),
    ],
)
def test_what_no_manifest_can_have_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        as_collective(replace(REDUCE, **changed))
    assert said in refused.value.what and refused.value.where == "NCCL's call 2" and refused.value.remedy


# -- compared --


def test_calls_that_agree() -> None:
    compare([SAID], [REDUCE])
    compare([{**SAID, **CHOSEN}], [REDUCE])
    compare([{"op": "AllReduce", "count": 500}], [REDUCE])  # float32 and root 0 are the manifest's defaults
    compare([{**SAID, "root": 2}], [REDUCE])  # an AllReduce has none
    compare([{**SAID, "algorithm": None, "protocol": None, "channels": None}], [REDUCE])
    in_bytes = replace(REDUCE, function="AllGather", count=2000, type="ncclInt8")
    compare([{"op": "AllGather", "count": 500}], [in_bytes])
    compare([{"op": "AllGather", "count": 1000, "dtype": "bfloat16"}], [in_bytes])
    compare([], [])


@pytest.mark.parametrize(
    ("changed", "odd"),
    [
        ({"op": "ReduceScatter"}, "op"), ({"count": 501}, "count"), ({"dtype": "int32"}, "dtype"),
        ({"algorithm": "tree"}, "algorithm"), ({"protocol": "ll"}, "protocol"), ({"channels": 2}, "channels"),
        ({"count": 1, "channels": 5}, "count, channels"), ({"dtype": "int8", "count": 2000}, "count, dtype"),
    ],
)
def test_a_contradiction_is_refused_by_name(changed: dict[str, Any], odd: str) -> None:
    with pytest.raises(UserError) as refused:
        compare([SAID, {**SAID, **changed}], [REDUCE, REDUCE], where="here")
    assert refused.value.what.startswith("NCCL's call 1 is AllReduce of 500 float32 by RING, LL128, 4 channels")
    assert refused.value.what.endswith(f": {odd}") and refused.value.where == "here" and refused.value.remedy


def test_a_broadcast_differs_in_root_and_bytes() -> None:
    sent = replace(REDUCE, function="Broadcast", count=2000, type="ncclInt8", root=1)
    compare([{"op": "Broadcast", "count": 500, "root": 1}], [sent])
    for said, odd in (({"count": 500, "root": 0}, "root"), ({"count": 499, "root": 1}, "count, dtype")):
        with pytest.raises(UserError, match=rf": {odd}\n"):
            compare([{"op": "Broadcast", **said}], [sent])


@pytest.mark.parametrize(("own", "seen"), [(1, 2), (2, 1), (0, 1)])
def test_another_number_of_calls(own: int, seen: int) -> None:
    with pytest.raises(UserError, match=f"NCCL made {seen} calls, and not {own}"):
        compare([SAID] * own, [REDUCE] * seen)


def test_choices_are_added_to_what_is_said() -> None:
    other = replace(REDUCE, algorithm="TREE", protocol="LL", channels=2)
    chosen = with_choices([{**SAID, "carries": "gradient"}, {**SAID, "channels": None}], [REDUCE, other])
    assert chosen == [
        {**SAID, "carries": "gradient", **CHOSEN},
        {**SAID, "algorithm": "tree", "protocol": "ll", "channels": 2},
    ]
    with pytest.raises(UserError, match="count"):
        with_choices([{**SAID, "count": 1}], [REDUCE])


# -- whose they are --


def test_the_one_communicator() -> None:
    held, _ = history(made(), made(2, hash=0xB, ranks=8), made(3, hash=0xC, rank=2), made(4, hash=0xD, name="tp"))
    assert held.communicator(ranks=8, rank=1).of.number == 2
    assert held.communicator(ranks=4, rank=2).of.number == 3
    assert held.communicator(ranks=4, rank=1, hash=0xA).of.number == 1
    assert held.communicator(ranks=4, rank=1, name="tp").of.number == 4
    assert [one.of.number for one in held.communicators()] == [1, 2, 3, 4]
    held, _ = history(made(interface=4), made(2, interface=4, rank=2), call(3, hash=9))  # as 5 and 6
    assert held.communicator(ranks=4, rank=1, hash=0xA).of.number == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ranks": 4, "rank": 1}, "2 communicators could be rank 1 of 4; there are: 0xa rank 1 of 4 (dp); 0xd rank 1"),
        ({"ranks": 4, "rank": 3}, "no communicator could be rank 3 of 4; there are: 0xa rank 1 of 4 (dp); 0xb"),
        ({"ranks": 5, "rank": 1}, "no communicator could be rank 1 of 5"),
        ({"ranks": 4, "rank": 1, "hash": 0xF}, "no communicator could be rank 1 of 4, hash 0xf;"),
        ({"ranks": 4, "rank": 1, "name": "x"}, "no communicator could be rank 1 of 4, name 'x';"),
    ],
)
def test_none_or_several_are_refused_by_name(asked: dict[str, Any], said: str) -> None:
    held, _ = history(made(), made(2, hash=0xB, ranks=8, name=""), made(4, hash=0xD, name="tp"))
    with pytest.raises(UserError) as refused:
        held.communicator(**asked)
    assert refused.value.what.startswith(said) and refused.value.remedy


def test_no_communicator_at_all() -> None:
    held, _ = history()
    with pytest.raises(UserError, match="there are: none at all"):
        held.communicator(ranks=2, rank=0)


def test_one_that_is_gone_is_not_found() -> None:
    held, plugin = history(made(), made(2))
    assert len(held.communicators()) == 2
    plugin.next = [Finalized(3, 1)]
    assert held.communicator(ranks=4, rank=1).of.number == 2


def test_interfaces_that_say_it_with_the_calls_only() -> None:
    """1 to 3: one with calls is known by them; one without could be any, but has no name."""
    quiet = made(1, interface=3, hash=0, rank=-1, ranks=-1, nodes=-1, name="")
    first, second = (replace(REDUCE, interface=3, number=n, hash=n, rank=n, serial=n + 10) for n in (2, 3))
    held, _ = history(quiet, replace(quiet, number=2), replace(quiet, number=3), first, second)
    assert held.communicator(ranks=9, rank=0).of.number == 1
    with pytest.raises(UserError, match=r"2 communicators .* there are: 0x0 rank -1; 0x2 rank 2"):
        held.communicator(ranks=9, rank=2)
    with pytest.raises(UserError, match="no communicator could be rank 2 of 9, name 'dp'"):
        held.communicator(ranks=9, rank=2, name="dp")
    held, _ = history(replace(quiet, number=2), replace(quiet, number=3), first, second)
    assert held.communicator(ranks=9, rank=2).of.number == 2
    assert held.communicator(ranks=9, rank=3, hash=3).of.number == 3
    with pytest.raises(UserError):
        held.communicator(ranks=9, rank=3, hash=2)
    held, _ = history(quiet, replace(quiet, number=2), first)
    assert held.communicator(ranks=9, rank=2, hash=2).of.number == 2  # the other's is not known


# -- in order --


def call(serial: int, **other: Any) -> Call:
    return replace(REDUCE, serial=serial, sequence=serial, **other)


def test_calls_by_number() -> None:
    held, plugin = history(made(), made(2, rank=2), call(3, count=1), call(4, number=2, count=2), call(5, count=3))
    ours = held.communicator(ranks=4, rank=1)
    assert [one.count for one in ours.calls()] == [1, 3]
    plugin.next = [call(6, count=4), call(7, number=99, count=5)]  # 99: of one that was there before this history
    assert [one.count for one in ours.calls(1)] == [3, 4]
    assert [one["count"] for one in ours.collectives(0)] == [1, 3, 4]
    assert [one["count"] for one in ours.collectives(2)] == [4] and [one.count for one in ours.kept] == [4]
    assert ours.collectives(3) == [] and ours.collectives(3) == []
    plugin.next = [call(8, count=6)]
    assert [one["count"] for one in ours.collectives(3)] == [6]
    with pytest.raises(UserError, match="calls before number 3 are no longer kept"):
        ours.calls(2)


def test_calls_nobody_takes_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_calls, "KEPT", 4)
    held, plugin = history(made(), *(call(serial, count=serial) for serial in range(2, 6)))
    ours = held.communicator(ranks=4, rank=1)
    assert [one.count for one in ours.calls()] == [2, 3, 4, 5]
    plugin.next = [call(6, count=6), ProxyOperation(7, 1, 6, 1, 2, 0, 1, 1, 1, True, 1)]  # of a call that is gone
    with pytest.raises(UserError, match="before number 2 are no longer kept"):
        ours.calls(1)
    assert [one.count for one in ours.calls(2)] == [4, 5, 6]
    with pytest.raises(UserError, match="no longer kept"):
        ours.iteration()  # it would be half of one


def test_operations_of_a_call_by_channel() -> None:
    def operation(serial: int, of: int, channel: int, sends: bool, number: int = 1) -> ProxyOperation:
        return ProxyOperation(serial, number, 6, 1, of, channel, 1, 6, 4096, sends, 1)

    held, plugin = history(
        made(), call(2), call(3), operation(4, 2, 1, True), operation(5, 3, 0, False), operation(6, 2, 0, True),
        operation(7, 2, 0, False), operation(8, LOST, 0, True), operation(9, 0, 0, True),
    )
    ours = held.communicator(ranks=4, rank=1)
    first, second = ours.calls()
    assert [one.serial for one in ours.operations(first)] == [7, 6, 4]
    plugin.next = [operation(10, 3, 0, True)]  # the proxy's come when it gets there
    assert [one.serial for one in ours.operations(second)] == [5, 10]
    ours.collectives(2)
    assert ours.operations(first) == []


def test_what_repeats_each_iteration() -> None:
    held, plugin = history(made(), call(2, count=1))
    ours = held.communicator(ranks=4, rank=1)
    assert ours.steady() is None
    serial = 3
    for counts, steady in (
        ([2, 3], False), ([2, 3], False), ([2, 3], True), ([2, 4], False), ([2, 4], True), ([2], False), ([], False),
        ([], False),
    ):
        for count in counts:
            plugin.next.append(call(serial, count=count))
            serial += 1
        found = ours.iteration()
        assert [one["count"] for one in found] == ([1, *counts] if serial == 5 else counts)
        assert ours.steady() == (found if steady else None)
        ours.collectives(serial - 2)  # attach takes them at the same boundaries


def test_another_choice_is_another_iteration() -> None:
    """The same calls by another protocol are not the same on the wire."""
    held, plugin = history(made(), call(2))
    ours = held.communicator(ranks=4, rank=1)
    ours.iteration()
    plugin.next = [call(3, protocol="LL")]
    ours.iteration()
    assert ours.steady() is None


def test_a_call_that_no_manifest_can_have_stays_refused() -> None:
    held, plugin = history(made(), call(2, collective=False, function="Send"))
    ours = held.communicator(ranks=4, rank=1)
    for _ in range(2):
        with pytest.raises(UserError, match="Send"):
            ours.iteration()
    plugin.next = [call(3)]
    with pytest.raises(UserError, match="Send"):
        ours.collectives(0)
    assert [one["count"] for one in ours.collectives(1)] == [500]


def test_a_drop_ends_the_history() -> None:
    held, plugin = history(made(), call(2))
    ours = held.communicator(ranks=4, rank=1)
    plugin.dropped = 3
    for look in (ours.calls, ours.iteration, held.communicators, lambda: ours.operations(REDUCE)):
        with pytest.raises(UserError, match="3 events were dropped"):
            look()


def test_quiet() -> None:
    held, plugin = history()
    held.quiet()
    assert not plugin.recording
