"""Queue pairs from the kernel: iproute2's two forms, the tool as it is installed, GID tables, and texts that cannot be.

The texts are re-created from iproute2's rdma/res-qp.c, rdma/res.c and rdma/utils.c (6.1 and 7.1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.nccl import rdma
from flowcheck.trainer.nccl.rdma import Gid, KernelQueuePair, addresses, parse_rdma, queue_pairs

ENTRIES: list[dict[str, Any]] = [
    {"ifindex": 0, "ifname": "mlx5_0", "port": 1, "lqpn": 1, "type": "GSI", "state": "RTS", "sq-psn": 0,
     "comm": "ib_core"},
    {"ifindex": 0, "ifname": "mlx5_0", "port": 1, "lqpn": 1289, "rqpn": 1290, "type": "RC", "state": "RTS",
     "rq-psn": 0, "sq-psn": 77, "path-mig-state": "MIGRATED", "pdn": 4, "pid": 4711, "comm": "python3"},
    {"ifindex": 0, "ifname": "mlx5_0", "port": 1, "lqpn": 1291, "rqpn": 1300, "type": "RC", "state": "RTS",
     "rq-psn": 0, "sq-psn": 0, "path-mig-state": "MIGRATED", "pid": 4712, "comm": "python3"},
    {"ifindex": 0, "ifname": "mlx5_0", "port": 1, "lqpn": 1292, "rqpn": 0, "type": "RC", "state": "INIT",
     "sq-psn": 0, "pid": 4711, "comm": "python3"},
    {"ifindex": 1, "ifname": "mlx5_1", "port": 1, "lqpn": 1289, "rqpn": 99, "type": "RC", "state": "ERR",
     "rq-psn": 0, "sq-psn": 0, "pid": 4711, "comm": "python3"},
]
WORDS = """\
link mlx5_0/1 lqpn 1 type GSI state RTS sq-psn 0 comm ib_core
link mlx5_0/1 lqpn 1289 rqpn 1290 type RC state RTS rq-psn 0 sq-psn 77 path-mig-state MIGRATED pdn 4 pid 4711 comm py 3
link mlx5_0/1 lqpn 1291 rqpn 1300 type RC state RTS rq-psn 0 sq-psn 0 path-mig-state MIGRATED pid 4712 comm python3

link mlx5_0/1 lqpn 1292 rqpn 0 type RC state INIT sq-psn 0 pid 4711 comm python3
link mlx5_1/1 lqpn 1289 rqpn 99 type RC state ERR rq-psn 0 sq-psn 0 pid 4711 comm python3
"""
FOUND = [
    KernelQueuePair("mlx5_0", 1, 1, 0, "GSI", "RTS", 0), KernelQueuePair("mlx5_0", 1, 1289, 1290, "RC", "RTS", 4711),
    KernelQueuePair("mlx5_0", 1, 1291, 1300, "RC", "RTS", 4712),
    KernelQueuePair("mlx5_0", 1, 1292, 0, "RC", "INIT", 4711),
    KernelQueuePair("mlx5_1", 1, 1289, 99, "RC", "ERR", 4711),
]


def test_both_forms() -> None:
    assert parse_rdma(json.dumps(ENTRIES)) == parse_rdma(WORDS.encode()) == FOUND
    assert [one.connected for one in FOUND] == [False, True, True, False, False]
    assert parse_rdma("[ ]\n") == parse_rdma("") == []


def printing(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


def test_of_one_process() -> None:
    assert queue_pairs(4711, printing(json.dumps(ENTRIES))) == [FOUND[1]]
    assert queue_pairs(1, printing(json.dumps(ENTRIES))) == []


def test_the_tool_that_is_installed() -> None:
    """Where there is RDMA it answers, otherwise it says why not. Either is an answer."""
    try:
        assert isinstance(queue_pairs(1), list)
    except EnvironmentProblem as error:
        assert error.where == "rdma -j resource show qp" and error.remedy


def test_a_tool_that_fails_or_is_not_there_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match="status 3"):
        queue_pairs(1, printing("", 3))
    with pytest.raises(EnvironmentProblem, match="cannot ask for queue pairs"):
        queue_pairs(1, ["/nonexistent/rdma"])
    monkeypatch.setattr(rdma, "SECONDS", 0.2)
    with pytest.raises(EnvironmentProblem, match="timed out"):
        queue_pairs(1, [sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize(("text", "what"), [
    ("[{", "is not JSON"), ("[1]", "entry 0 is not an object"), ("[" * 100000, "is not JSON"), ("\0", "a zero byte"),
    ("hello", "names no link"), ("link", "names no link"), ("link mlx5_0", "names no link"),
    ("link mlx5_0/1 lqpn 5", "entry 0 has type None"), ("link mlx5_0/1 lqpn five type RC state RTS", "has lqpn"),
    (WORDS + WORDS.replace("rqpn 1290", "rqpn 1291"), "queue pair 1289 of mlx5_0 once more"),
])
def test_texts_that_cannot_be(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        parse_rdma(text)
    assert refused.value.where == "rdma resource show qp"


@pytest.mark.parametrize(("key", "value"), [
    ("lqpn", None), ("lqpn", -1), ("lqpn", 1 << 24), ("lqpn", True), ("lqpn", 1.5), ("rqpn", "x"), ("rqpn", 1 << 24),
    ("pid", -1), ("pid", 1 << 31), ("port", []), ("ifname", None), ("ifname", "a b"), ("ifname", "../x"),
    ("type", 7), ("state", "READY"), ("state", None),
])
def test_fields_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"entry 1 has .*{key}"):
        parse_rdma(json.dumps([ENTRIES[0], {**ENTRIES[1], key: value}]))


def test_the_same_twice_is_once() -> None:
    assert parse_rdma(json.dumps([*ENTRIES, ENTRIES[1]])) == FOUND


def test_a_text_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "TEXT_MAX", 10)
    with pytest.raises(UserError, match="more than 10"):
        parse_rdma(WORDS)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=100), st.integers(0, len(WORDS)).map(lambda n: WORDS[:n]),
                 st.integers(0, 500).map(lambda n: json.dumps(ENTRIES)[:n]),
                 st.lists(st.sampled_from(WORDS.split()), max_size=20).map(lambda w: "link mlx5_0/1 " + " ".join(w))))
def test_any_text(text: str) -> None:
    try:
        assert all(0 <= one.number < 1 << 24 and 0 <= one.peer < 1 << 24 for one in parse_rdma(text))
    except UserError as error:
        assert error.where == "rdma resource show qp"


def table(root: Path, device: str, port: int, entries: dict[int, tuple[str, str]]) -> None:
    at = root / device / "ports" / str(port)
    (at / "gids").mkdir(parents=True)
    (at / "gid_attrs/types").mkdir(parents=True)
    for index, (address, kind) in entries.items():
        (at / "gids" / str(index)).write_text(f"{address}\n")
        if kind:
            (at / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")


def test_gid_tables(tmp_path: Path) -> None:
    table(tmp_path, "mlx5_0", 1, {
        0: ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "IB/RoCE v1"),
        1: ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "RoCE v2"),
        2: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
        3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
        4: ("0000:0000:0000:0000:0000:0000:0000:0000", ""), 5: ("nonsense", "RoCE v2"),
        6: ("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
    })
    table(tmp_path, "mlx5_1", 2, {0: ("0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2")})
    assert addresses(tmp_path) == [
        Gid("mlx5_0", 1, 1, "fe80::a00:27ff:fe00:1"), Gid("mlx5_0", 1, 3, "10.0.0.1"), Gid("mlx5_1", 2, 0, "10.0.1.2"),
    ]
    assert addresses(tmp_path / "none") == []
