"""`flowcheck inspect` as a person runs it: a process, files through DPDK's port, text or JSON out."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowcheck.diagnose.inspect import SCHEMA

pytest.importorskip("dataplane.pydpdk.ffi", reason="built without libdpdk", exc_type=ImportError)

ROOT = Path(__file__).parents[3]
CAPTURES = ROOT.parent / "shared" / "captures"
OWN = sorted((ROOT / "pcaps").glob("*.pcap*"))
COMMAND = [sys.executable, "-P", "-c", "from flowcheck.cli import main; main()", "inspect"]


def inspect(*arguments: str | Path, width: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=280, check=False,
        env={**os.environ, "COLUMNS": str(width)},
    )


def machine(*captures: Path) -> dict[str, Any]:
    done = inspect("--json", *captures)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def shared(name: str) -> Path:
    found = list(CAPTURES.glob(f"*/{name}*"))
    if not found:
        pytest.skip(f"shared capture {name} is not here ({CAPTURES})")
    return found[0]


def records(path: Path) -> list[tuple[bytes, bytes]]:
    """Record headers and bytes of a little-endian pcap file."""
    raw, at, found = path.read_bytes(), 24, []
    while at < len(raw):
        captured = struct.unpack_from("<I", raw, at + 8)[0]
        found.append((raw[at : at + 16], raw[at + 16 : at + 16 + captured]))
        at += 16 + captured
    return found


def write_pcap(path: Path, frames: list[tuple[bytes, bytes]], snaplen: int = 0) -> Path:
    body = b""
    for head, data in frames:
        seconds, fraction, _, original = struct.unpack("<IIII", head)
        kept = data[:snaplen] if snaplen else data
        body += struct.pack("<IIII", seconds, fraction, len(kept), original) + kept
    path.write_bytes(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, snaplen or 65535, 1) + body)
    return path


@pytest.mark.captures
def test_json_has_the_documented_keys() -> None:
    found = machine(shared("02_"))
    assert found["schema"] == SCHEMA
    text = (ROOT / "docs" / "use" / "inspect.md").read_text()
    connection, flow = found["connections"][0], found["flows"][0]
    for key in (*found, *connection, *flow, *flow["messages"], *flow["payload"], *flow["requests"]):
        assert f"`{key}`" in text, f"{key} is not documented"


@pytest.mark.captures
def test_both_directions_of_a_ring_in_text() -> None:
    done = inspect(shared("02_"))
    assert done.returncode == 0
    assert "NCCL SIMPLE?" in done.stdout
    assert "probably SIMPLE" in done.stdout
    assert "16x65536" in done.stdout
    assert "ICRC right 608, wrong 0" in done.stdout


@pytest.mark.captures
@pytest.mark.parametrize(
    "name", ["01_", "05_", "20_", "40_", "allreduce+p2p", "iter_40000", "iter_80000", "rdma32"]
)
def test_text_fits_80_columns_with_a_line_for_each_connection(name: str) -> None:
    """No row is broken in two and no word folded, whatever stands in it."""
    done = inspect(shared(name), width=80)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if str(CAPTURES)[:20] not in line]
    assert max(map(len, lines)) <= 80
    wide = inspect(shared(name), width=160)
    words = {word for line in wide.stdout.splitlines() for word in line.split() if "─" not in word and "/" not in word}
    assert words <= set(done.stdout.split()) | {""}


@pytest.mark.captures
@pytest.mark.parametrize(("name", "wrong"), [("01_", 0), ("30_", 0), ("40_", 896)])
def test_no_wrong_word_about_what_is_not_nccl(name: str, wrong: int) -> None:
    done = inspect(shared(name))
    # The one line that may name NCCL says that there is none of it.
    lines = [line for line in done.stdout.splitlines() if "NCCL" in line]
    assert lines == ["info: no mark of NCCL was seen"]
    assert f"wrong ICRC {wrong}" in done.stdout


@pytest.mark.captures
def test_loss_is_named_with_its_flow() -> None:
    done = inspect(shared("iter_80000"))
    assert "QP 0xc99: 15 packets missing in 1 place" in done.stdout
    assert "2 packets behind the last one captured were acknowledged" in done.stdout


@pytest.mark.captures
def test_several_files_are_one_survey(tmp_path: Path) -> None:
    """A capture cut in two gives what the whole gives, but for the file list."""
    whole = shared("20_")
    frames = records(whole)
    first = write_pcap(tmp_path / "part 1.pcap", frames[:2000])
    second = write_pcap(tmp_path / "part,2.pcap", frames[2000:])
    one, two = machine(whole), machine(first, second)
    assert [capture["packets"] for capture in two["captures"]] == [2000, 2349]
    for found in (one, two):
        for flow in found["flows"]:
            assert flow.pop("captures")
        del found["captures"], found["notes"]
    assert one == two


@pytest.mark.captures
def test_snap_length_is_a_cause_of_its_own(tmp_path: Path) -> None:
    """Payloads cut off: ACKs stay whole, every other packet is truncated and none of it is interpreted."""
    frames = records(shared("02_"))
    found = machine(write_pcap(tmp_path / "cut.pcap", frames, snaplen=96))
    assert found["captures"][0]["cut_packets"] == 608 - 64
    assert found["packets"]["truncated"] == 608 - 64
    assert found["packets"]["roce"] == 64
    assert all(flow["requests"] is None for flow in found["flows"])
    text = inspect(tmp_path / "cut.pcap").stdout
    assert "544 packets were cut by the capture (longest piece 96 bytes): raise the snap length" in text


@pytest.mark.captures
def test_one_direction_alone(tmp_path: Path) -> None:
    frames = [(head, data) for head, data in records(shared("02_")) if data[26:30] == b"\x0a\x4d\0\1"]
    done = inspect(write_pcap(tmp_path / "out.pcap", frames))
    assert "Connections" not in done.stdout
    assert "the data these clear-to-send writes ask for was not captured" in done.stdout


def test_long_queue_pair_numbers_fit() -> None:
    for width in (60, 80, 100, 160):
        done = inspect(ROOT / "pcaps" / "ring4-simple.pcapng", width=width)
        assert max(map(len, done.stdout.splitlines())) <= width


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_own_captures(path: Path) -> None:
    found = machine(path)
    assert found["packets"]["roce"] > 0
    assert {c["is"] for c in found["connections"]} == {"NCCL"}
    expected = {"SIMPLE"} if "-simple" in path.name else {"LL"}
    names = {found["flows"][c["data_flow"]]["protocol"]["name"] for c in found["connections"]}
    assert names == expected


def test_bad_input_ends_with_a_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pcap"
    empty.write_bytes(b"")
    text = tmp_path / "notes.txt"
    text.write_text("this is no capture, whatever its length may be\n" * 10)
    cut = write_pcap(tmp_path / "cut.pcap", [(struct.pack("<IIII", 0, 0, 60, 60), bytes(60))])
    cut.write_bytes(cut.read_bytes()[:-1])
    cooked = tmp_path / "cooked.pcap"
    cooked.write_bytes(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 113))
    for path in (empty, text, cut, cooked, tmp_path / "absent.pcap", tmp_path):
        done = inspect(path)
        assert done.returncode == 2, (path, done.stdout)
        assert path.name in done.stderr
        assert "remedy: " in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_nothing_but_noise(tmp_path: Path) -> None:
    arp = bytes(12) + b"\x08\x06" + bytes(46)
    found = machine(write_pcap(tmp_path / "arp.pcap", [(struct.pack("<IIII", 1, 0, 60, 60), arp)]))
    assert found["noise"] == {"arp": 1}
    assert found["flows"] == found["connections"] == []
    assert "no mark of NCCL" in inspect(tmp_path / "arp.pcap").stdout


def test_standard_input_packed_and_cut() -> None:
    """What `gzip -c port.pcap | head -c N` gives: read as far as it is whole, and said."""
    packed = gzip.compress(OWN[0].read_bytes())
    done = subprocess.run(
        [*COMMAND, "--json", "-"], input=packed[: len(packed) * 3 // 4], capture_output=True, cwd=ROOT, timeout=280,
        check=True,
    )
    found = json.loads(done.stdout)
    (capture,) = found["captures"]
    assert capture["path"] == "-" and capture["left_out_why"] and found["packets"]["roce"] == capture["packets"] > 0
    assert [note["level"] for note in found["notes"] if capture["left_out_why"] in note["text"]] == ["warning"]
