"""The node's ports together: whose ring is which queue, and whose counters say what, by capture and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import place_cores, plan_captures
from flowcheck.node.ports.drops import OWN
from flowcheck.node.ports.port import Port
from tests.flowcheck.memory_ring import MemoryRing

CONTROL = {"listen": "localhost:1", "token_file": "t"}


class Opened:
    """A live source: rings in memory, counters that a test sets."""

    def __init__(self, queues: int) -> None:
        self._rings = [MemoryRing() for _ in range(queues)]
        self.ring_addresses = [ring.ring_address for ring in self._rings]
        self.error: Exception | None = None
        self.counts = {"received": 0, **dict.fromkeys(OWN, 0), "roce": 99}

    def counters(self) -> dict[str, int]:
        return self.counts

    def empty(self) -> list[int | None]:
        return [self.counts["received"] + queue for queue in range(len(self._rings))]


def _port(root: Path, *captures: dict[str, Any]) -> tuple[Port, list[Opened]]:
    planned = plan_captures(NodeConfig.model_validate({"control": CONTROL, "capture": list(captures)}), root)
    sources: list[Any] = [Opened(one.live.queues) for one in planned]
    return Port(planned, sources), sources


TWO = {"device": "ring", "queues": 2, "place_cores": [3, 5]}, {"device": "null", "path_mtu": 1024}


def test_queues_are_numbered_over_all_captures(tmp_path: Path) -> None:
    port, sources = _port(tmp_path, *TWO)
    assert port.name == "ring and null"
    assert [(queue.index, queue.capture) for queue in port.queues] == [(0, 0), (1, 0), (2, 1)]
    rings = [address for source in sources for address in source.ring_addresses]
    assert [queue.ring_address for queue in port.queues] == rings
    assert port.placers.count == 3 and port.placers.n_threads == 3
    assert port.stream_names(3) == ["ring queue 0", "ring queue 1", "null queue 0"]


def test_threads_have_the_cores_of_their_queues(tmp_path: Path) -> None:
    port, _ = _port(tmp_path, *TWO)
    assert port.placers.cores == (3, 5, None)
    planned = plan_captures(NodeConfig.model_validate({"control": CONTROL, "capture": list(TWO)}), tmp_path)
    assert place_cores(planned) == (3, 5, None) and place_cores(reversed(planned)) == (None, 3, 5)


def test_one_capture_has_no_names_of_its_own(tmp_path: Path) -> None:
    port, sources = _port(tmp_path, {"device": "ring", "queues": 2})
    assert port.name == "ring" and port.stream_names(2) == ["queue 0", "queue 1"]
    sources[0].counts |= {"received": 7, "ring_full": 3}
    assert port.arrived == 7 and port.drops == {"ring_full": 3} == port.drops_of(0)
    said = port.explain(port.drops)
    assert said.startswith("ring_full 3: raise capture.ring_size (now ")


def test_counts_are_of_all_captures_and_causes_of_each(tmp_path: Path) -> None:
    port, sources = _port(tmp_path, *TWO)
    assert port.arrived == 0 and port.drops == {} and port.explain({}) == ""
    sources[0].counts |= {"received": 7, "no_mbuf": 1}
    sources[1].counts |= {"received": 5, "ring_full": 2, "oversize": 4}
    assert port.arrived == 12
    assert port.drops_of(0) == {"no_mbuf": 1} and port.drops_of(1) == {"ring_full": 2, "oversize": 4}
    assert port.drops == {"ring no_mbuf": 1, "null ring_full": 2, "null oversize": 4}
    first, second = port.explain(port.drops).split("; null ")
    assert first.startswith("ring no_mbuf 1: ") and "capture[0]" in first
    assert second.startswith("ring_full 2, oversize 4: raise capture[1].ring_size") and "now 1024" in second
    assert port.explain({"null oversize": 4}).startswith("null oversize 4: capture[1].path_mtu")


def test_how_often_queues_were_empty_is_in_their_order(tmp_path: Path) -> None:
    port, (first, second) = _port(tmp_path, *TWO)
    first.counts["received"], second.counts["received"] = 10, 20
    assert port.empty() == [10, 11, 20]


def test_an_error_is_that_of_the_queues_capture(tmp_path: Path) -> None:
    port, sources = _port(tmp_path, *TWO)
    assert [queue.error for queue in port.queues] == [None] * 3
    sources[1].error = gone = OSError("the link is gone")
    assert [queue.error for queue in port.queues] == [None, None, gone] and port.error(1) is gone


def test_packets_of_nobody_are_summed_over_all_queues(tmp_path: Path) -> None:
    port, _ = _port(tmp_path, *TWO)
    found = [{"not_roce": (2, 120)}, {}, {"not_roce": (3, 200), "no_job": (1, 60)}]
    port.placers = type("Counted", (), {"strangers": lambda self, queue: found[queue]})()  # type: ignore[assignment]
    assert port.unclaimed == {"not_roce": 5, "no_job": 1}


def test_packets_of_jobs_are_those_of_the_captures_own_queues(tmp_path: Path) -> None:
    port, _ = _port(tmp_path, *TWO)
    assert [port.claimed(0), port.claimed(1)] == [0, 0]
    found = [3, 4, 50]
    port.placers = type("Counted", (), {"claimed": lambda self, queue: found[queue]})()  # type: ignore[assignment]
    assert [port.claimed(0), port.claimed(1)] == [7, 50]
