"""Many packets, no leak: buffers and ring entries are all accounted for at the end."""

from __future__ import annotations

import threading

import pytest

from dataplane.pydpdk import Mempool, Port
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.rx import RingMemory, RxConfig, RxThread

LOADED = 1000


@pytest.mark.parametrize("packets", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_no_leak(eal, captures, dump, tmp_path, packets):
    """One file for ever (net_pcap keeps it in buffers of the pool), a consumer that only releases."""
    path = tmp_path / "endless.pcap"
    path.write_bytes(captures.pcap(captures.records(LOADED, sizes=(60, 1082))))
    pool = Mempool(eal, "endless", 8191, 1152)
    port = Port(eal, "net_pcap_endless", f"rx_pcap={path},infinite_rx=1")
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    loaded = pool.in_use
    memory = RingMemory(eal, 4096, 1152)
    rx = RxThread(port, memory, RxConfig(wait_when_full=True, expected=packets, **dump()))
    ring = ffi.cast("fc_ring *", memory.ring_address)
    released = 0

    def consume():
        nonlocal released
        while not lib.fc_ring_drained(ring):
            released += lib.fc_reader_discard(ring, 4096)

    consumer = threading.Thread(target=consume)
    consumer.start()
    rx.start()
    consumer.join()
    counters = memory.counters()
    assert counters["received"] == counters["published"] == released >= packets
    assert counters["ring_full"] == counters["no_mbuf"] == counters["errors"] == 0
    assert (ring.mask + 1, lib.fc_ring_peek(ring, 1)) == (4096, 0)
    rx.close()
    assert pool.in_use == loaded
    port.close()
    assert pool.in_use == 0
