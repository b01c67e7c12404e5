"""`flowcheck bench`: it runs and its rows are well formed. What the figures are is no test's business."""

import json
import subprocess
import sys
import zlib

import numpy as np
import pytest
from lab.bench.limits import MinimalParser, copy, crc_hot, traffic
from parser.machine import Engine, icrc_kernels

from lab.bench import parse
from lab.bench.workload import aligned, make
from parser.chunk_layout import Protocol
from updater.rounding_modes import ROUNDING_MODES

FIELDS = {"name", "value", "unit", "limit", "ratio", "target", "p10", "p90", "rounds"}
SETTING = {"processor", "pages", "kernels", "choices"}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "flowcheck", "bench", *arguments], capture_output=True, text=True, timeout=280
    )


def well_formed(row: dict[str, object]) -> bool:
    numbers = [row[key] for key in ("value", "limit", "ratio", "p10", "p90")]
    added = ".icrc" in str(row["name"]) or str(row["name"]).startswith("hook.")  # a difference of two times
    assert all(isinstance(n, float) and (n > 0 or added) for n in numbers), row
    assert row["target"] is None or isinstance(row["target"], float)
    assert row["p10"] <= row["ratio"] <= row["p90"]  # type: ignore[operator]
    assert all(row[key] for key in SETTING), row
    return set(row) == FIELDS | SETTING


def test_rows_of_the_command() -> None:
    done = bench("parse", "place", "--json", "--rounds", "2", "--megabytes", "16")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) and row["rounds"] == 2 for row in rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert {f"parse.{flows}flows.{model}" for flows in (1, 16, 256) for model in ("small", "huge")} <= set(names)
    for protocol in ("ll", "ll128", "simple"):
        for mtu in (1024, 4096):
            twice = [".again", ".4flows", ".4flows.again"]
            kinds = ["", ".kernel", ".roof", ".icrc", *twice, *(f".icrc.{name}" for name in icrc_kernels()[1:])]
            assert {f"place.{protocol}.{mtu}{kind}" for kind in kinds} <= set(names)
    targets = {row["name"]: row["target"] for row in rows}
    assert [targets[f"place.{kind}"] for kind in ("ll.1024", "ll.4096", "ll128.1024.kernel", "simple.1024.kernel")] == [
        0.82, 0.90, 0.92, 0.95,
    ]
    assert targets["place.ll.1024.icrc"] == 1.2 and targets["place.ll.1024.roof"] is None


def test_rows_of_adam() -> None:
    done = bench("adam", "--json", "--rounds", "2", "--megabytes", "4")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) for row in rows)
    modes = [f"{name}{width}" for name in ROUNDING_MODES for width in ("", ".bf16")]
    kinds = {*modes, *(f"{mode}.torch-single" for mode in modes), "in-place", "torch-foreach", "torch-fused"}
    wanted = {f"adam.{shape}.{threads}t.{kind}" for shape in ("flat", "200") for threads in (1, 2) for kind in kinds}
    assert {row["name"] for row in rows} == wanted | {"adam.200.1t.torch-cuda-foreach.shared"}
    targets = {row["name"]: row["target"] for row in rows if row["target"] is not None}
    assert targets["adam.flat.1t.torch-cpu"] == 0.95 and targets["adam.200.1t.torch-cuda-fused.bf16"] == 0.93
    assert targets["adam.200.2t.torch-cpu-fused.bf16.torch-single"] == 1.0 and "adam.flat.2t.torch-cpu" not in targets


def test_rows_of_checksums() -> None:
    done = bench("checksum", "--json", "--rounds", "2", "--megabytes", "4")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) for row in rows)
    assert [row["name"] for row in rows] == [
        f"checksum.{one}" for w in ("fp32", "bf16") for one in (f"{w}.1t", f"{w}.2t", f"trainer.{w}")
    ]
    assert {row["target"] for row in rows} == {0.5, 0.6}


def test_rows_of_telemetry() -> None:
    done = bench("telemetry", "--json", "--rounds", "1", "--megabytes", "4")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) for row in rows)
    assert [row["name"] for row in rows] == [
        f"telemetry.{kind}.{width}.{threads}t" for width in ("fp32", "bf16", "fp16") for threads in (1, 2)
        for kind in ("gradients", "weights", "checksum")
    ]


def test_an_unknown_name_is_refused() -> None:
    done = bench("speed")
    assert done.returncode == 2 and "parse" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("mtu", [1024, 4096])
@pytest.mark.parametrize("flows", [1, 3])
def test_traffic_becomes_what_was_sent(protocol: Protocol, mtu: int, flows: int) -> None:
    """All of it by the engine with the ICRC on, all of it known to the minimal parser."""
    traffic = make(protocol, mtu, flows, 4 << 20, icrc=True)
    engine = Engine(traffic.config)
    done, blocked = engine.run(0, traffic.ring.address, traffic.packets)
    assert (done, blocked) == (traffic.packets, False)
    assert engine.outcomes(0)["placed"][0] == traffic.packets
    assert engine.cells(0).all() and (engine.region(0) == traffic.expected).all()
    assert traffic.wire_bytes == traffic.packets * mtu
    traffic.ring.rewind()
    assert MinimalParser(traffic.flows).run(traffic.ring, traffic.packets, 16) == (traffic.packets, 0)


def test_the_minimal_parser_notices_loss_and_strangers() -> None:
    traffic = make(Protocol.LL, 1024, 4, 4 << 20, final=False)
    assert MinimalParser(traffic.flows[:3]).run(traffic.ring, traffic.packets, 0) == (traffic.packets * 3 // 4, 0)
    traffic.ring.rewind()
    traffic.frames[5, 12:14] = 0
    assert MinimalParser(traffic.flows).run(traffic.ring, traffic.packets, 0) == (traffic.packets - 1, 1)
    with pytest.raises(ValueError, match="0 in the ring"):
        MinimalParser(traffic.flows).run(traffic.ring, 1, 0)


def test_contenders_prove_their_work() -> None:
    """A wrong byte in the traffic is not a faster benchmark."""
    traffic = make(Protocol.LL, 1024, 1, 1 << 20, final=False)
    traffic.frames[70, 50:54] = 0xEE
    with pytest.raises(AssertionError):
        parse.engine(traffic)()
    with pytest.raises(AssertionError):
        parse.minimal(traffic)()


def test_copy_limit() -> None:
    source = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    target = aligned(source.size)
    copy(target.ctypes.data, source.ctypes.data, source.size)
    assert (target == source).all()
    with pytest.raises(ValueError, match="cache lines"):
        copy(target.ctypes.data + 8, source.ctypes.data, 256)


@pytest.mark.parametrize(("length", "stored"), [(1024, 512), (1024, 960), (4096, 4096)])
@pytest.mark.parametrize("ahead", [0, 3])
def test_the_roof_stores_every_line_of_its_places_and_no_other(length: int, stored: int, ahead: int) -> None:
    source = np.random.default_rng(0).integers(1, 256, 20 * length + 64, dtype=np.uint8)
    target = aligned(20 * 4096)
    to = target.ctypes.data + np.arange(0, 20, 2, dtype=np.uint64) * np.uint64(4096)
    payloads = source.ctypes.data + 54 + np.arange(10, dtype=np.uint64) * np.uint64(length)
    traffic(to, payloads, length, stored, ahead)
    lines = target.reshape(20, -1)
    assert not lines[1::2].any() and not lines[::2, stored:].any()
    assert lines[::2, :stored].reshape(10, -1, 64).any(axis=2).all()
    with pytest.raises(ValueError, match="whole cache lines"):
        traffic(to + np.uint64(8), payloads, length, stored, ahead)
    with pytest.raises(ValueError, match="not more than came"):
        traffic(to, payloads, 64, 128, ahead)


def test_the_hot_sum_is_zlibs() -> None:
    data = np.arange(200, dtype=np.uint8)
    assert crc_hot(data, 1) == zlib.crc32(data)
    assert crc_hot(data, 2) == zlib.crc32(data) ^ zlib.crc32(data, 1)


@pytest.mark.slow
def test_rows_of_the_hook() -> None:
    done = bench("hook", "--json", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) and row["rounds"] == 2 for row in rows)
    kinds = ("thread", "process", "longest", "checksums.thread", "checksums.process")
    assert [row["name"] for row in rows] == [f"hook.{size}.{kind}" for size in (48, 800) for kind in kinds]
    assert [row["limit"] for row in rows if row["target"]] == [0.1, 0.5, 0.3, 1.0]


@pytest.mark.slow
@pytest.mark.root
def test_rows_of_baselines() -> None:
    done = bench("baselines", "--json", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(well_formed(row) and row["rounds"] == 1 for row in rows)
    saved = {f"{how}.every-{every}" for how in ("torch-save", "async-dcp", "two-phase") for every in (1, 10)}
    assert {row["name"] for row in rows} == {f"baselines.{one}" for one in saved | {
        "mirror", "flowcheck", "flowcheck.hook"}}
