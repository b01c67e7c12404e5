"""Counters that other processes read, and pydpdk used by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.capture import PcapSource
from dataplane.counterfile import COUNTERS, CounterFile
from dataplane.counters import HEADER, read_counters, sweep
from dataplane.pydpdk import DmaDevice, DpdkError, Mbuf, Mempool, Port, Ring
from dataplane.pydpdk.ffi import ffi
from dataplane.reader import RingReader

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_capture_is_visible(eal, captures, tmp_path):
    path = tmp_path / "visible file.pcap"
    path.write_bytes(captures.pcap(captures.records(70)))
    with PcapSource(eal, path) as source:
        source.start()
        assert sum(1 for _ in RingReader(source.ring_address)) == 70
        out = subprocess.run(
            [sys.executable, "-m", "dataplane.counters"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        (mine,) = [s for s in json.loads(out.stdout) if s["pid"] == os.getpid()]
        assert mine["label"] == "visible_file.pcap" and mine["queues"][0]["received"] == 70
        assert tuple(mine["queues"][0]) == COUNTERS
        assert source.counter_file.stat().st_mode & 0o777 == 0o644
    assert not source.counter_file.exists()


def test_nothing_but_live_captures_is_shown(eal, tmp_path):
    with CounterFile(eal, "here", 2, folder=tmp_path) as file:
        (tmp_path / "flowcheck-1-foreign").write_bytes(b"something else")
        (tmp_path / "flowcheck-2-cut").write_bytes(file.path.read_bytes()[: HEADER - 1])
        (tmp_path / "flowcheck-3-link").symlink_to("/etc/hostname")
        os.mkfifo(tmp_path / "flowcheck-4-fifo")
        (tmp_path / "flowcheck-5-folder").mkdir()
        file.row(1).received = 7
        (shown,) = read_counters(tmp_path)
        assert shown.label == "here" and [queue["received"] for queue in shown.queues] == [0, 7]
    assert file.read(1)["received"] == 7 and read_counters(tmp_path) == []


def test_a_folder_that_cannot_be_written(eal, tmp_path):
    with CounterFile(eal, "private", 1, folder=tmp_path / "absent") as file:
        assert file.path is None
        file.row(0).received = 1
        assert file.read(0)["received"] == 1


def test_a_killed_process_leaves_nothing_for_long(tmp_path):
    code = (
        "from pathlib import Path; from dataplane.pydpdk import Eal; from dataplane.counterfile import CounterFile\n"
        f"CounterFile(Eal.start(memory_mb=64, huge=False), 'dead', 1, folder=Path({str(tmp_path)!r}))\n"
        "print('ready', flush=True); import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert [s.label for s in read_counters(tmp_path)] == ["dead"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert read_counters(tmp_path) == [] and len(os.listdir(tmp_path)) == 1
    (tmp_path / f".flowcheck-{process.pid}-0-dead").touch()  # had it been killed a moment earlier
    living = {f".flowcheck-{os.getpid()}-0-here", ".flowcheck-bench-x", ".flowcheck-x"}
    for name in living:
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == living


# -- pydpdk by hand ----------------------------------------------------------------------------------------


def test_buffers_rings_and_a_port(eal):
    pool = Mempool(eal, "by_hand", 63, 256)
    with Mbuf(pool, b"hello") as mbuf:
        assert (mbuf.data, len(mbuf), mbuf.segments, pool.in_use) == (b"hello", 5, 1, 1)
    assert pool.in_use == 0
    with pytest.raises(DpdkError, match="257 bytes into one buffer"):
        Mbuf(pool, bytes(257))
    assert pool.in_use == 0
    with Ring(eal, "by_hand", 8, single=True) as ring:
        packets = [Mbuf(pool, bytes([i])) for i in range(9)]
        assert ring.capacity == 7 and ring.put(packets) == 7 and len(ring) == 7
        assert [mbuf.closed for mbuf in packets] == [True] * 7 + [False] * 2
        taken = ring.take(pool)
        assert [mbuf.data for mbuf in taken] == [bytes([i]) for i in range(7)]
    with pytest.raises(DpdkError, match="ring odd of 9 places"):
        Ring(eal, "odd", 9)
    with pytest.raises(DpdkError, match="ring nowhere"):
        Ring.of(eal, "nowhere")
    port = Port(eal, "net_ring_by_hand")
    port.configure()
    port.rx_queue(0, pool)
    port.start()
    assert port.facts.driver == "net_ring"
    assert Ring.of(eal, "ETH_RXTX0_net_ring_by_hand").put(taken) == 7
    received = port.receive(pool)
    assert [mbuf.data for mbuf in received] == [bytes([i]) for i in range(7)]
    pool.close()  # and everything that came from it
    assert port.closed and all(mbuf.closed for mbuf in [*received, *packets])


def test_an_empty_pool(eal):
    with Mempool(eal, "small", 7, 64, cache=0) as pool:
        kept = [Mbuf(pool) for _ in range(7)]
        with pytest.raises(DpdkError, match="a buffer of Mempool"):
            Mbuf(pool)
        assert kept


def test_an_engine(eal):
    with DmaDevice(eal, "dma_skeleton_hand", depth=32) as engine:
        assert engine.facts.any_address and engine.capacity > 0
        source, target = ffi.new("char[]", b"moved"), ffi.new("char[]", 6)
        engine.copy(source, target, 6)
        engine.submit()
        done = 0
        while not done:
            done = engine.completed()
        assert done == 1 and ffi.string(target) == b"moved"
    engine.close()
    with pytest.raises(DpdkError, match=r"(?s)DMA engine dma_nosuch.*needs: "):
        DmaDevice(eal, "dma_nosuch")
    with pytest.raises(ValueError, match="closed"):
        engine.submit()


def test_the_example():
    out = subprocess.run(
        [sys.executable, "-P", "examples/pydpdk_loopback.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert out.returncode == 0, out.stderr
    assert "3 of 3 packets came back" in out.stdout
