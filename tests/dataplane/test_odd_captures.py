"""Captures that libpcap would not read to their end, through the port: what is whole and of Ethernet arrives."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.capture import PcapSource
from dataplane.pcapfile import CaptureFileError, scan
from dataplane.reader import RingReader


def arrived(eal: Any, path: Path | str, info: Any = None) -> tuple[list[bytes], PcapSource]:
    with PcapSource(eal, path, info=info) as source:
        source.start()
        found = [packet.data for packet in RingReader(source.ring_address)]
        assert source.error is None
        return found, source


def data_of(records: list[Any]) -> list[bytes]:
    return [record.data for record in records]


def test_cut_and_damaged_files(eal: Any, captures: Any, tmp_path: Path, file_format: Callable[..., bytes]) -> None:
    records = captures.records(30)
    whole = file_format(records)
    for number, data in enumerate((whole[:-60], whole[: len(whole) // 2], whole + b"\xff" * 40)):
        path = tmp_path / str(number)
        path.write_bytes(data)
        found, source = arrived(eal, path)
        assert found == data_of(records)[: len(found)] and 10 < len(found) <= 30
        assert 0 < source.info.left_out < 5000 or (whole[0] == 0x0A and number == 0)


def test_a_file_that_is_still_written(
    eal: Any, captures: Any, tmp_path: Path, file_format: Callable[..., bytes]
) -> None:
    """What the scan has seen is what comes, however the file goes on meanwhile."""
    records = captures.records(200)
    whole = file_format(records)
    for length in (len(whole) // 2, len(file_format(records[:100])) - 24 * (whole[0] == 0x0A)):
        path = tmp_path / str(length)
        path.write_bytes(whole[:length])
        info = scan(path)
        with path.open("ab") as more:
            more.write(whole[length:])
        found, _ = arrived(eal, path, info)
        assert found == data_of(records)[: info.packet_count] and 80 < len(found) < 120


def test_interfaces_of_several_kinds(eal: Any, captures: Any, tmp_path: Path) -> None:
    """As mergecap writes them: snap lengths that differ, other link types, with packets and idle."""
    for order in "<>":
        kinds = ((113, 96), (1, 262144), (1, 96), (228, 0), (1, 65535))
        data, kept = captures.section(order), []
        for link, snaplen in kinds:
            data += captures.interface(order, link=link, snaplen=snaplen)
        for i, record in enumerate(captures.records(50)):
            data += captures.packet(order, captures.Record(record.data, interface=i % 5))
            kept += [record.data] * (kinds[i % 5][0] == 1)
        simple = captures.records(1, sizes=(90,))[0].data
        data += captures.section(order) + captures.interface(order, snaplen=50)
        data += captures.block(order, 3, struct.pack(order + "I", 90) + simple[:50])
        data += captures.packet(order, captures.Record(simple))
        path = tmp_path / f"kinds{ord(order)}"
        path.write_bytes(data)
        found, source = arrived(eal, path)
        assert found == [*kept, simple[:50], simple]
        assert sorted(source.info.skipped.values()) == [10, 10] and source.info.left_out == 0


@pytest.mark.parametrize("kind", ["pcap", "pcapng"])
def test_frames_beyond_the_port_and_headers_that_lie(eal: Any, captures: Any, tmp_path: Path, kind: str) -> None:
    records = captures.records(9)
    for size, at in ((65536, 0), (80_034, 4), (262_144, 8), (524_280, 5)):
        mixed = [*records[:at], captures.Record(bytes(size)), *records[at:]]
        data = captures.pcap(mixed, snaplen=96) if kind == "pcap" else captures.pcapng(mixed)
        path = tmp_path / f"{size}"
        path.write_bytes(data)
        found, source = arrived(eal, path)
        assert found == data_of(records) and source.info.skipped == {"frame over 65535 bytes": 1}
        assert source.info.packet_count == 9


def test_a_large_block_that_is_no_packet(eal: Any, captures: Any, tmp_path: Path) -> None:
    records = captures.records(2)
    head = captures.section("<") + captures.interface("<")
    path = tmp_path / "large"
    path.write_bytes(head + captures.block("<", 0x0BAD, bytes(17 << 20)) + b"".join(
        captures.packet("<", record) for record in records))
    assert arrived(eal, path)[0] == data_of(records)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1), "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0), "plain": bytes,
}


@pytest.mark.parametrize("packer", PACKERS)
def test_packed_files_and_pipes(eal: Any, captures: Any, tmp_path: Path, packer: str) -> None:
    records = captures.records(300)
    packed = PACKERS[packer](captures.pcap(records))
    path = tmp_path / "packed"
    path.write_bytes(packed)
    assert arrived(eal, path, scan(path))[0] == data_of(records)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(packed,))
    writer.start()
    info = scan(fifo)  # and twice more: a scan is not the only reader
    writer.join()
    for _ in range(2):
        assert arrived(eal, fifo, info)[0] == data_of(records)


@pytest.mark.parametrize("packer", ["gzip", "bzip2", "xz"])
def test_packed_files_that_break_off(captures: Any, tmp_path: Path, packer: str) -> None:
    """As far as they can be unpacked; a second member, as `gzip >>` leaves it, is read."""
    records = captures.records(300, sizes=(1500,))
    packed = PACKERS[packer](captures.pcap(records))
    path = tmp_path / "cut"
    path.write_bytes(packed[: len(packed) // 2])
    info = scan(path)
    assert 50 < info.packet_count < 250 and info.left_out_why
    path.write_bytes(PACKERS[packer](captures.pcap(records[:2])) + PACKERS[packer](captures.pcap(records[2:4])[24:]))
    assert scan(path).packet_count == 4
    path.write_bytes(packed[:20] + bytes(60))
    with pytest.raises(CaptureFileError):
        scan(path)
