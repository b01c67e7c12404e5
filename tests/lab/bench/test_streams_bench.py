"""Packets over several streams: who brings what, and in which order one stream is given the same."""

import numpy as np
import pytest

from lab.bench import streams
from lab.bench.streams import in_turn, shares


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_every_packet_comes_over_one_stream(count: int) -> None:
    parts = shares(64, 16, count)
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(64))
    of_flow = {(int(i) % 16, stream) for stream, part in enumerate(parts) for i in part}
    assert len(of_flow) == 16  # a flow has one stream
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts)


def test_in_turn_is_the_order_in_which_streams_are_polled() -> None:
    parts = [np.array(part, np.uint32) for part in ([0, 1, 2, 3, 4], [10, 11], [20, 21, 22])]
    assert in_turn(parts, 2).tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 22, 4]
    assert in_turn(parts[:1], 2).tolist() == [0, 1, 2, 3, 4]


def test_rows_of_streams() -> None:
    rows = streams.run(1, 1 << 20)
    assert [(row.name, row.target) for row in rows] == [
        ("streams.1", None), ("streams.2", None), ("streams.4", None), ("streams.8", 1.05), ("streams.16", None),
    ]
    assert all(row.unit == "ns/packet" and row.value > 0 and row.limit > 0 for row in rows)
