"""Payloads, sums and plans against synth, which was written apart from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lab.softroce import _engine
from lab.softroce.communicator import Calls
from lab.softroce.primitives import DTYPES, PROTOCOLS, STORE, USE_INPUT, Planner, edges
from lab.softroce.settings import Settings
from lab.synth.chunk_layout import Operation
from lab.synth.encode import encode, positions
from lab.synth.schedule import Message, messages
from lab.synth.values import add, generate_values
from tests.nccl_versions import since


@given(st.sampled_from(sorted(PROTOCOLS)), st.integers(0, 9000), st.integers(0, 1 << 20), st.integers(0, 99))
def test_payload(protocol: str, count: int, step: int, seed: int) -> None:
    data = generate_values("uint8", seed, 0, count).view(np.uint8)
    made = _engine.encode(PROTOCOLS[protocol], data, step)
    assert made == encode(protocol, data, step, len(made)).tobytes()
    assert _engine.decode(PROTOCOLS[protocol], made, count, step) == data.tobytes()
    assert np.array_equal(np.frombuffer(made, np.uint8)[positions(protocol, count)], data)
    if count and protocol != "simple":
        with pytest.raises(ValueError, match="not that of the step"):
            _engine.decode(PROTOCOLS[protocol], made, count, step + 1)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_sums(dtype: str) -> None:
    a, b = (generate_values(dtype, 3, rank, 10_007) for rank in (0, 1))
    assert _engine.add(DTYPES[dtype], a.view(np.uint8), b.view(np.uint8)) == add(dtype, a, b).tobytes()


def test_bfloat16_sums_round_as_they_should_and_keep_what_is_no_number() -> None:
    one, tiny, nan, infinite = (0x3F80, 0x3B80, 0x7FC1, 0x7F80)  # 1, 2**-8, NaN, infinity
    a = np.array([one, one + 1, nan, infinite, infinite, 0x7F7F], "<u2")
    b = np.array([tiny, tiny, one, one, infinite ^ 0x8000, 0x7F7F], "<u2")
    got = np.frombuffer(_engine.add(DTYPES["bfloat16"], a.view(np.uint8), b.view(np.uint8)), "<u2")
    assert got[0] == one and got[1] == one + 2  # halves go to the even neighbour
    assert got[2] & 0x7FFF > 0x7F80 and got[4] & 0x7FFF > 0x7F80  # no numbers
    assert got[3] == infinite and got[5] == infinite


KINDS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")


@hypothesis_settings(max_examples=150)
@given(
    st.sampled_from(KINDS), st.integers(2, 7), st.integers(1, 4), st.sampled_from(["LL", "LL128", "SIMPLE"]),
    st.sampled_from(["ring", "tree"]), st.sampled_from(since(19)),
    st.integers(1, 2_000_000), st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(0, 6), st.randoms(),
)
def test_plans_send_what_the_schedule_says(
    kind: str, ranks: int, channels: int, protocol: str, algorithm: str, family: str, count: int, dtype: str, root: int,
    random: Any,
) -> None:
    """Of every rank and connection: messages in order, with their bytes, and whether they are the final values."""
    rings = [random.sample(range(ranks), ranks) for _ in range(channels)]
    settings = Settings("i", "10.0.0.1", family, protocol, algorithm, channels, rings=rings)
    size = np.dtype({"bfloat16": "<u2"}.get(dtype, dtype)).itemsize
    as_bytes = kind in ("AllGather", "Broadcast")
    op = Operation(
        kind, algorithm if kind == "AllReduce" else "ring", protocol.lower(), count * size if as_bytes else count,
        1 if as_bytes else size, root % ranks, ranks, channels,
        tuple(settings.ring(channel, ranks) for channel in range(channels)), settings.threads, settings.buffers,
        settings.wire_family,
    )
    everything = [edge for graph in edges(settings, ranks).values() for edge in graph]
    assert len(set(everything)) == len(everything)
    expected = messages(op)
    received: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(ranks):
        into = {(c, src): i for i, (c, src, dst) in enumerate(everything) if dst == rank}
        out = {(c, dst): i for i, (c, src, dst) in enumerate(everything) if src == rank}
        rows, _, parts = Planner(settings, rank, ranks, into, out, list(range(channels))).arrays(op)
        runs = [(part["start"][s], part["count"][s]) for part in parts for s in range(2)]
        assert sorted(row for start, n in runs for row in range(start, start + n)) == list(range(len(rows)))
        for number, connection in enumerate(everything):
            sent = [row for row in rows if number in row["send"]]
            if connection[1] == rank:
                _compare(op, sent, expected.get(connection, []))
            if connection[2] == rank:
                received[connection] = [int(row["bytes"]) for row in rows if number in row["receive"]]
    for connection in everything:
        sizes = [message.elements * op.size for message in expected.get(connection, [])]
        assert received[connection] == sizes, f"what {connection} receives"


def _compare(op: Operation, sent: list[Any], expected: list[Message]) -> None:
    assert [int(row["bytes"]) for row in sent] == [message.elements * op.size for message in expected]
    for row, message in zip(sent, expected, strict=True):
        final = bool(row["flags"] & STORE)
        assert final == message.reduced
        where = row["output"] if final else row["input"]
        if message.elements:
            assert where == message.start * op.size
        assert final or row["flags"] & USE_INPUT  # a partial sum has this rank's own part in it


@given(st.integers(0, 40), st.integers(0, 45))
def test_calls_are_kept_from_the_beginning_and_from_the_end(count: int, since: int) -> None:
    """All of them up to twice what is kept; after that both ends, each in order and without a hole."""
    kept, all_calls = Calls(10), [{"op": "AllReduce", "count": number} for number in range(count)]
    for call in all_calls:
        kept.add(call)
    found = kept.since(since)
    if count <= 20:
        assert found == all_calls[since:]
    else:
        assert found == all_calls[:10][since:] + all_calls[max(since, count - 10) :]
