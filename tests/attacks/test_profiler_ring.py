"""The profiler plugin's reader under bytes that no NCCL writes: a torn ring, foreign files, numbers out of range.

The reader runs inside somebody's training job: what it cannot explain is refused with a name, and what came before is
not lost because of it.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.trainer.nccl.profiler import LOST, Call, Communicator, Finalized, Plugin, ProxyOperation, parse
from flowcheck.trainer.nccl.profiler_calls import as_collective
from tests.flowcheck.trainer.nccl_driver import HERE, compile_c

FORMAT = "<QQQQQIiiiiiBBBBi16s16s16s8s"
FIELDS = (
    "serial", "parent", "count", "sequence", "hash", "number", "rank", "other", "steps", "chunk", "process", "kind",
    "interface", "channels", "width", "reduction", "function", "type", "algorithm", "protocol",
)
CALL = dict(zip(FIELDS, (1, 0, 500, 7, 0xA, 1, 2, 0, 0, 0, 0, 2, 6, 4, 16, -1, b"AllReduce", b"ncclFloat32", b"RING",
                         b"LL128"), strict=True))
PROXY = {**CALL, "kind": 4, "steps": 6, "chunk": 4096, "process": 99, "width": 1, "other": 3}
MADE = {**CALL, "kind": 1, "other": 4, "steps": 2, "function": b"", "type": b"", "algorithm": b"", "protocol": b""}


def packed(record: dict[str, object]) -> bytes:
    return struct.pack(FORMAT, *(record[name] for name in FIELDS))


# -- numbers out of range --


def test_what_is_in_range_is_read() -> None:
    assert parse(packed(CALL), 1) == [
        Call(1, 1, 6, 0xA, 2, "AllReduce", 500, "ncclFloat32", 0, "RING", "LL128", 4, 16, 7, None, True)
    ]
    assert parse(packed({**CALL, "kind": 3, "reduction": 4}), 1) == [
        Call(1, 1, 6, 0xA, 2, "AllReduce", 500, "ncclFloat32", 0, "RING", "LL128", 4, 16, 7, 4, False)
    ]
    assert parse(packed(PROXY), 1) == [ProxyOperation(1, 1, 6, 2, 0, 4, 3, 6, 4096, True, 99)]
    assert parse(packed(MADE), 1) == [Communicator(1, 1, 6, 0xA, 2, 4, 2, "")]
    assert parse(packed({**MADE, "kind": 5, "interface": 0}), 1) == [Finalized(1, 1)]
    assert parse(packed(CALL) + packed({**PROXY, "serial": 2, "parent": 1, "width": 0}), 1)[1] == ProxyOperation(
        2, 1, 6, 2, 1, 4, 3, 6, 4096, False, 99)
    assert parse(b"", 5) == []


EDGES = [
    (CALL, {"channels": 64}), (CALL, {"count": 2**63 - 1}), (CALL, {"rank": 0}), (CALL, {"number": 2**32 - 2}),
    (CALL, {"interface": 1}), (CALL, {"function": b"x" * 16}), (CALL, {"protocol": b"y" * 8}), (CALL, {"count": 0}),
    (PROXY, {"channels": 63}), (PROXY, {"steps": 0, "chunk": 0}), (PROXY, {"parent": LOST}),
    (MADE, {"rank": 3}), (MADE, {"rank": 0, "steps": 4}), (MADE, {"function": b"a b\xff"}),
    (MADE, {"interface": 3, "rank": -1, "other": -1, "steps": -1}),
]


@pytest.mark.parametrize(("base", "changed"), EDGES)
def test_the_last_that_is_in_range(base: dict[str, object], changed: dict[str, object]) -> None:
    assert len(parse(packed({**base, **changed}), 1)) == 1


@pytest.mark.parametrize(
    ("base", "changed", "said"),
    [
        (CALL, {"serial": 2}, "has the number 2"), (CALL, {"serial": 0}, "has the number 0"),
        (CALL, {"number": 0}, "is of communicator 0"), (CALL, {"number": 2**32 - 1}, "is of communicator 4294967295"),
        (CALL, {"kind": 0}, "is of kind 0"), (CALL, {"kind": 6}, "is of kind 6"),
        (CALL, {"interface": 0}, "is of interface 0"), (CALL, {"interface": 7}, "is of interface 7"),
        (CALL, {"rank": -1}, "is of rank -1"), (CALL, {"count": 2**63}, "has 9223372036854775808 elements"),
        (CALL, {"other": -1}, "has the root or peer -1"), (CALL, {"channels": 65}, "has 65 channels"),
        (CALL, {"function": b""}, "has no function"), (CALL, {"function": b"All Reduce"}, "has the name"),
        (CALL, {"function": b"A\0B"}, "has the name"), (CALL, {"type": b"\xff"}, "has the name"),
        (CALL, {"algorithm": b"\x1b[2J"}, "has the name"), (CALL, {"protocol": b"\x7f"}, "has the name"),
        (PROXY, {"parent": 1}, "belongs to record 1, which"), (PROXY, {"parent": LOST - 1}, "belongs to record"),
        (PROXY, {"channels": 64}, "is of channel 64"), (PROXY, {"steps": -1}, "has -1 steps"),
        (PROXY, {"chunk": -1}, "steps of -1 bytes"), (PROXY, {"width": 2}, "has the direction 2"),
        (PROXY, {"rank": -2}, "is of rank -2"),
        (MADE, {"rank": 4}, "has rank 4 of 4"), (MADE, {"rank": -1}, "has rank -1 of 4"),
        (MADE, {"steps": 0}, "on 0 nodes"), (MADE, {"steps": 5}, "on 5 nodes"), (MADE, {"interface": 3}, "has rank 2"),
        (MADE, {"interface": 3, "rank": -1, "other": -1}, "on 2 nodes"),
    ],
)
def test_what_is_not_is_refused_by_name(base: dict[str, object], changed: dict[str, object], said: str) -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        parse(packed({**base, **changed}), 1)
    assert "record 1 " in refused.value.what and said in refused.value.what and refused.value.remedy


def test_the_record_that_is_wrong_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match="record 8 is of kind 9"):
        parse(packed({**CALL, "serial": 7}) + packed({**CALL, "serial": 8, "kind": 9}), 7)
    for cut in (1, 64, 127, 129):
        with pytest.raises(EnvironmentProblem, match="no whole records of 128"):
            parse((packed(CALL) * 2)[:cut], 1)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.integers(0, 127), st.integers(0, 255), max_size=6), st.sampled_from((CALL, PROXY, MADE)))
def test_any_bytes_are_read_or_refused(changes: dict[int, int], base: dict[str, object]) -> None:
    data = bytearray(packed(base))
    for at, byte in changes.items():
        data[at] = byte
    try:
        (record,) = parse(bytes(data), 1)
        if isinstance(record, Call):
            as_collective(record)
    except FlowcheckError as refused:
        assert refused.what and refused.remedy


# -- a torn ring --


@pytest.fixture
def torn(tmp_path: Path) -> tuple[ctypes.CDLL, Plugin]:
    path = compile_c(Path(__file__).with_name("profiler_ring.c"), tmp_path / "ring.so", "-fvisibility=hidden")
    library = ctypes.CDLL(str(path))
    context, mask = ctypes.c_void_p(), ctypes.c_int()
    init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p,
                            *[ctypes.c_int] * 3, ctypes.c_void_p)
    profiler = (ctypes.c_void_p * 6).in_dll(library, "ncclProfiler_v6")
    init(profiler[1])(ctypes.byref(context), 7, ctypes.byref(mask), b"x", 1, 2, 0, None)
    library.attack_drop.restype = ctypes.c_uint64
    library.attack_proxy_of.argtypes = (ctypes.c_uint64,)
    return library, Plugin(path)


def test_nothing_behind_a_torn_record_is_read(torn: tuple[ctypes.CDLL, Plugin]) -> None:
    library, plugin = torn
    library.attack_torn()
    assert [type(record) for record in plugin.read()] == [Communicator]
    assert plugin.read() == []
    counts = plugin.counts()
    assert (counts.written, counts.taken) == (2, 1)
    library.attack_publish_torn()
    (late,) = plugin.read()
    assert isinstance(late, Call) and late.serial == 2


def test_garbage_in_the_ring_is_refused_once(torn: tuple[ctypes.CDLL, Plugin]) -> None:
    library, plugin = torn
    plugin.read()
    library.attack_garbage(bytes(range(128)))
    with pytest.raises(EnvironmentProblem, match="record 2 "):
        plugin.read()
    assert plugin.read() == []


def test_an_operation_of_a_dropped_call_says_so(torn: tuple[ctypes.CDLL, Plugin]) -> None:
    library, plugin = torn
    assert library.attack_drop() == LOST
    plugin.read()
    assert plugin.counts().dropped == 2
    library.attack_proxy_of(LOST)
    (late,) = plugin.read()
    assert isinstance(late, ProxyOperation) and late.call == LOST


# -- a foreign file --


def test_files_that_are_no_plugin(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    (tmp_path / "empty.so").write_bytes(b"")
    other = compile_c(HERE / "nccl_driver.c", tmp_path / "driver.so")
    for path in (tmp_path / "text.so", tmp_path / "empty.so", tmp_path, other):
        with pytest.raises(EnvironmentProblem, match="is not FlowCheck's profiler plugin") as refused:
            Plugin(path)
        assert refused.value.where == str(path) and refused.value.remedy


def test_a_plugin_of_another_version(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("unsigned long flowcheck_profiler_layout(void) { return 0x46435052004e0000; }\n")
    with pytest.raises(EnvironmentProblem, match="of another version of FlowCheck"):
        Plugin(compile_c(source, tmp_path / "old.so"))
