"""Numbers and names of the kernel's list at their bounds, and what it says of a queue pair that is there twice."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.nccl import rdma
from flowcheck.trainer.nccl.rdma import KernelQueuePair, parse_rdma, queue_pairs

ENTRY: dict[str, Any] = {"ifname": "mlx5_0", "port": 1, "lqpn": 1289, "rqpn": 1290, "type": "RC", "state": "RTS",
                         "pid": 4711}


def one(**changes: Any) -> KernelQueuePair:
    (found,) = parse_rdma(json.dumps([{**ENTRY, **changes}]))
    return found


@pytest.mark.parametrize(("given", "read"), [
    ({"lqpn": 0}, {"number": 0}), ({"lqpn": (1 << 24) - 1}, {"number": (1 << 24) - 1}), ({"lqpn": "7"}, {"number": 7}),
    ({"rqpn": 0}, {"peer": 0}), ({"rqpn": (1 << 24) - 1}, {"peer": (1 << 24) - 1}),
    ({"pid": (1 << 31) - 1}, {"process": (1 << 31) - 1}), ({"pid": "2147483647"}, {"process": (1 << 31) - 1}),
    ({"port": "-"}, {"port": 0}), ({"port": "0"}, {"port": 0}), ({"port": "255"}, {"port": 255}),
    ({"ifname": "a.b+c-1_" * 8}, {"device": "a.b+c-1_" * 8}), ({"state": "UNKNOWN"}, {"state": "UNKNOWN"}),
    *(({"state": state}, {"state": state}) for state in rdma.STATES), ({"type": "UD"}, {"kind": "UD"}),
])
def test_what_may_be(given: dict[str, Any], read: dict[str, Any]) -> None:
    whole = {"device": "mlx5_0", "port": 1, "number": 1289, "peer": 1290, "kind": "RC", "state": "RTS", "process": 4711}
    assert one(**given) == KernelQueuePair(**(whole | read))


@pytest.mark.parametrize("key", ["port", "rqpn", "pid"])
def test_what_is_not_said(key: str) -> None:
    (found,) = parse_rdma(json.dumps([{name: value for name, value in ENTRY.items() if name != key}]))
    assert {"port": found.port, "rqpn": found.peer, "pid": found.process}[key] == 0


@pytest.mark.parametrize("given", [
    {"lqpn": "-"}, {"lqpn": "0x1"}, {"pid": "00000000001"}, {"pid": "\u0661"}, {"port": 1 << 31}, {"port": -1},
    {"ifname": "a" * 65}, {"ifname": ""}, {"ifname": "mlx\u00e9"}, {"state": "rts"}, {"rqpn": None},
], ids=str)
def test_what_may_not(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="entry 0 has"):
        one(**given)


def test_a_connected_queue_pair_is_reliable_ready_and_has_a_peer() -> None:
    assert one(rqpn=1).connected and not one(rqpn=0).connected
    assert not one(type="UC").connected and not one(state="RTR").connected


def test_one_that_is_there_twice() -> None:
    """Of two devices, and numbers 0 and 1 of two ports, they are others."""
    def found(*changes: dict[str, Any]) -> list[tuple[str, int, int]]:
        return [(pair.device, pair.port, pair.number)
                for pair in parse_rdma(json.dumps([{**ENTRY, **change} for change in changes]))]

    assert found({}, {}) == [("mlx5_0", 1, 1289)]
    assert found({}, {"ifname": "mlx5_1", "rqpn": 5}) == [("mlx5_0", 1, 1289), ("mlx5_1", 1, 1289)]
    assert found({"type": "GSI", "lqpn": 1}, {"type": "GSI", "lqpn": 1, "port": 2}) == [("mlx5_0", 1, 1)]
    with pytest.raises(UserError, match="entry 1 has queue pair 1289 of mlx5_0 once more, and otherwise"):
        found({}, {"pid": 4712})


def test_words_end_where_a_driver_begins() -> None:
    line = "link mlx5_0/1 lqpn 5 rqpn 6 type RC state RTS pid 7 comm a program pid 9"
    assert parse_rdma(line) == parse_rdma("  \n" + line + "\n\n") == [
        KernelQueuePair("mlx5_0", 1, 5, 6, "RC", "RTS", 7)]
    with pytest.raises(UserError, match="line 2 is 'links mlx5_0/1', which names no link"):
        parse_rdma(f"{line}\n\nlinks mlx5_0/1")
    with pytest.raises(UserError, match="entry 0 has lqpn as ''"):
        parse_rdma("link mlx5_0/1 rqpn 6 type RC state RTS lqpn")


def test_a_text_of_just_the_most_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps([ENTRY])
    monkeypatch.setattr(rdma, "TEXT_MAX", len(text))
    assert len(parse_rdma(text)) == len(parse_rdma(text.encode())) == 1
    with pytest.raises(UserError, match=f"has {len(text) + 1} bytes, more than {len(text)}"):
        parse_rdma(text + " ")


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(UserError, match="entry 0 has type"):
        parse_rdma(b"link mlx5_0/1 lqpn 5 type \xff state RTS pid 7".replace(b" state RTS", b""))


def test_what_a_tool_that_fails_has_said() -> None:
    words = "error: " + "x" * 300
    command = [sys.executable, "-c", f"import sys; sys.stderr.write({words!r}); sys.exit(1)"]
    with pytest.raises(EnvironmentProblem) as caught:
        queue_pairs(1, command)
    assert caught.value.what == words[:200] and caught.value.where == " ".join(command)
