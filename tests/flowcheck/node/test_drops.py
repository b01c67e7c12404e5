"""The node's own drops: said at once, by cause, with the setting to change."""

from __future__ import annotations

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.counterfile import COUNTERS
from dataplane.live import LiveConfig
from flowcheck.node.config.capture import Capture
from flowcheck.node.ports.captures import PlannedCapture
from flowcheck.node.ports.drops import OWN, Drops, describe

SETTINGS = Capture(device="ring", ring_size=4096, queues=2, path_mtu=1024)
CAPTURE = PlannedCapture("capture", SETTINGS, LiveConfig("ring", ring_size=4096, queues=2, path_mtu=1024), -1)


@pytest.mark.parametrize(("cause", "setting"), [
    ("ring_full", "capture.ring_size (now 4096"), ("kernel_ring_full", "capture.queues (now 2)"),
    ("nic_missed", "capture.cores"), ("no_mbuf", "capture.queues"), ("oversize", "capture.path_mtu (now 1024)"),
])
def test_each_cause_names_the_setting_to_change(cause: str, setting: str) -> None:
    assert cause in COUNTERS
    assert describe({cause: 12}, CAPTURE).startswith(f"{cause} 12: ") and setting in describe({cause: 12}, CAPTURE)


def test_causes_with_the_same_remedy_say_it_once() -> None:
    said = describe({"nic_missed": 1, "no_mbuf": 2}, CAPTURE)
    assert said.startswith("nic_missed 1, no_mbuf 2: the thread that empties the port") and said.count("queues") == 1
    assert set(OWN) <= set(COUNTERS)


def test_drops_are_said_at_once_and_then_now_and_then() -> None:
    said, drops, now = [], {}, [0.0]
    watch = Drops(CAPTURE, lambda: dict(drops), lambda event, **fields: said.append((event, fields)), lambda: now[0])
    watch.look()
    assert said == []
    drops["ring_full"] = 5
    watch.look()
    watch.look()
    ((event, fields),) = said
    assert (event, fields["port"], fields["drops"]) == ("dropped", "ring", {"ring_full": 5})
    assert fields["why"].startswith("the node itself has dropped packets: ring_full 5: raise capture.ring_size")
    drops |= {"ring_full": 9, "no_mbuf": 1}
    now[0] += 9.9
    watch.look()
    assert len(said) == 1
    now[0] += 0.1
    watch.look()
    assert said[1][1]["drops"] == {"ring_full": 4, "no_mbuf": 1}
    now[0] += 100
    watch.look()
    assert len(said) == 2
