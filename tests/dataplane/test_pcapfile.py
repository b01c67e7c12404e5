"""The scan of record headers: every kind of file, every kind of damage."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.pcapfile import CaptureFileError, scan


@pytest.fixture
def scan_bytes(tmp_path):
    def run(data):
        path = tmp_path / "capture"
        path.write_bytes(data)
        return scan(path)

    return run


def refused(scan_bytes, data, *words, offset=None):
    with pytest.raises(CaptureFileError) as caught:
        scan_bytes(data)
    text = str(caught.value)
    for word in (*words, caught.value.path, "remedy: "):
        assert word in text
    assert caught.value.what and caught.value.remedy
    if offset is not None:
        assert caught.value.offset == offset, text


def test_counts(captures, file_format, scan_bytes):
    records = captures.records(200)
    records[3] = captures.Record(records[3].data[:50], length=len(records[3].data))
    info = scan_bytes(file_format(records))
    assert info.packet_count == 200
    assert info.max_captured == max(len(r.data) for r in records)
    assert info.captured_bytes == sum(len(r.data) for r in records)
    assert info.truncated_packets == 1
    assert info.linktype == 1


def test_properties(captures, scan_bytes):
    records = captures.records(3)
    found = {name: scan_bytes(make(records)) for name, make in captures.formats.items()}
    assert {name for name, info in found.items() if info.nanosecond} == {
        name for name in found if "nanoseconds" in name
    }
    assert all(info.format == name.split("-")[0] for name, info in found.items())
    assert found["pcap-no-snaplen"].snaplen == 0
    assert found["pcap"].snaplen == found["pcapng"].snaplen == 65535


def test_records_cross_pieces(captures, scan_bytes, monkeypatch):
    """Wherever the file is cut into pieces, the walk is the same."""
    records = captures.records(60)
    for make in captures.formats.values():
        data = make(records)
        for piece in (64, 65, 127, 1000, 4096):
            monkeypatch.setattr("dataplane.capturefile.PIECE", piece)
            assert scan_bytes(data).packet_count == 60


def test_a_snap_length_that_lies_is_found_out_alike_in_pieces(scan_bytes, monkeypatch):
    """Its second long record is followed by none; where that lies in another piece it is read all the same."""
    header = struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 2, 1)
    data = header + b"".join(struct.pack("<IIII", 1, 0, size, size) + bytes([size]) * size for size in (60, 63, 64))
    data = data[:-64 - 16] + b"\xff" * 80
    found = []
    for piece in (1 << 20, *range(64, 200, 7)):
        monkeypatch.setattr("dataplane.capturefile.PIECE", piece)
        info = scan_bytes(data)
        found.append((info.packet_count, info.left_out, info.left_out_why, info.parts))
    assert len(set(found)) == 1 and found[0][0] == 2


def test_cut_at_every_byte(captures, file_format, tmp_path):
    """Read as far as it is whole: the packets of which every byte is there, and the rest is said in bytes."""
    records = captures.records(4, sizes=(60, 61, 75))
    data = file_format(records)
    ends = [data.index(record.data) + len(record.data) for record in records]
    path, complete = tmp_path / "cut", 0
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end + (-end % 4 + 4 if data[0] == 0x0A else 0) <= length for end in ends)
        if not whole:
            with pytest.raises(CaptureFileError) as caught:
                scan(path)
            assert 0 <= caught.value.offset <= length
            continue
        info = scan(path)
        assert info.packet_count == whole and info.captured_bytes == sum(len(r.data) for r in records[:whole])
        assert info.max_captured == max(len(r.data) for r in records[:whole])
        assert (info.left_out > 0) == bool(info.left_out_why) and info.left_out < 120, length
        complete += not info.left_out
    assert 4 <= complete < 20


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["pcap", "pcap-nanoseconds-big-endian", "pcapng", "pcapng-two-sections"]),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_flipped_bytes_never_crash(captures, tmp_path, name, edits):
    data = bytearray(captures.formats[name](captures.records(6, sizes=(60, 90))))
    for place, value in edits:
        data[place % len(data)] = value
    path = tmp_path / "flipped"
    path.write_bytes(data)
    try:
        info = scan(path)
    except CaptureFileError as exc:
        assert 0 <= exc.offset <= len(data)
    else:
        assert 1 <= info.packet_count <= 6 and info.max_captured <= len(data)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), start=st.sampled_from(["", "pcap", "pcapng"]))
def test_noise_never_crashes(captures, tmp_path, data, start):
    head = {"": b"", "pcap": captures.pcap([]), "pcapng": captures.pcapng([], noise=False)}[start]
    path = tmp_path / "noise"
    path.write_bytes(head + data)
    try:
        scan(path)
    except CaptureFileError as exc:
        assert 0 <= exc.offset <= len(head + data)


def test_empty_and_packetless(captures, scan_bytes):
    refused(scan_bytes, b"", "empty", offset=0)
    refused(scan_bytes, captures.pcap([]), "no packets", offset=24)
    refused(scan_bytes, captures.pcapng([]), "no packets")


def test_frames_that_a_host_put_together_are_not_blamed_on_the_interface(captures, scan_bytes):
    for make in (captures.pcap, captures.pcapng):
        refused(scan_bytes, make([captures.Record(bytes(80_000))]), "no packets", "65535", "ethtool")
    other = captures.section("<") + captures.interface("<") + captures.interface("<", link=113)
    for record in (captures.Record(bytes(80_000)), captures.Record(bytes(60), interface=1)):
        other += captures.packet("<", record)
    refused(scan_bytes, other, "no packets", "65535", "SLL", "-i eth0")


def test_foreign_files(scan_bytes):
    refused(scan_bytes, b"\x7fELF" + bytes(100), "unknown file type", "7f 45 4c 46", offset=0)
    refused(scan_bytes, b"\x28\xb5\x2f\xfd" + bytes(100), "zstd", "zstd -dc", offset=0)
    refused(scan_bytes, b"\x34\xcd\xb2\xa1" + bytes(100), "Kuznetzov", offset=0)
    refused(scan_bytes, b"abc", "3 bytes", offset=0)


@pytest.mark.parametrize(
    ("link", "name"),
    [(113, "SLL"), (101, "raw IP"), (127, "RADIOTAP"), (276, "SLL2"), (247, "InfiniBand"), (4711, "4711")],
)
def test_other_link_types(captures, scan_bytes, link, name):
    records = captures.records(2)
    refused(scan_bytes, captures.pcap(records, link=link), name, "not Ethernet", offset=20)
    both = captures.section("<") + captures.interface("<") + captures.interface("<", link=link)
    first, other = records[0], captures.Record(records[1].data, interface=1)
    refused(scan_bytes, both + captures.packet("<", other), name, "not Ethernet", "no packets")
    for idle in (both, captures.section("<") + captures.interface("<", link=link) + captures.interface("<")):
        first = captures.Record(first.data, interface=int(idle is not both))
        info = scan_bytes(idle + captures.packet("<", first))
        assert info.packet_count == 1 and not info.skipped
    info = scan_bytes(both + captures.packet("<", records[0]) + captures.packet("<", other) * 3)
    assert info.packet_count == 1 and list(info.skipped.values()) == [3] and name in next(iter(info.skipped))


def test_frame_check_sequence_bits_are_not_a_link_type(captures, scan_bytes):
    assert scan_bytes(captures.pcap(captures.records(2), link=0x54000001)).packet_count == 2


def test_bad_pcap_records(captures, scan_bytes):
    """What cannot be a header ends the reading there; what may be one is read."""
    good = captures.pcap(captures.records(3, sizes=(60,)))
    at = 24 + 76

    def with_header(*fields):
        return scan_bytes(good[:at] + struct.pack("<IIII", *fields) + good[at + 16 :])

    for fields in ((0, 0, 0xFFFFFFFF, 0xFFFFFFFF), (0, 0, 200, 200)):
        info = with_header(*fields)
        assert (info.packet_count, info.left_out) == (1, 2 * 76) and info.left_out_why
    for fields in ((0, 0, 60, 59), (0, 1_000_000, 60, 60)):  # more than there was, more than a second has
        info = with_header(*fields)
        assert (info.packet_count, info.left_out, info.parts) == (3, 0, ())
    assert scan_bytes(good[: at + 9]).left_out == 9
    refused(scan_bytes, good[:24] + b"\xff" * 16 + good[40:], "bad record header", offset=24)
    refused(scan_bytes, good[:30], "record header", offset=24)
    refused(scan_bytes, good[:4] + struct.pack("<HH", 2, 3) + good[8:], "version 2.3", offset=4)


def test_bad_pcapng_blocks(captures, scan_bytes):
    """A block that lies about its length ends the reading; a packet that lies is skipped by what it is."""
    record = captures.records(1, sizes=(60,))[0]
    head = captures.section("<") + captures.interface("<")
    packet = captures.packet("<", record)
    good = head + packet
    assert scan_bytes(good).packet_count == 1

    for tail, *words in (
        (packet[:-4] + struct.pack("<I", 96), "lengths disagree", "92", "96"),
        (packet[:-8], "ends inside a block", "8 of 92"),
        (packet[:7], "inside a block header"),
        (struct.pack("<II", 6, 13) + packet[8:], "block length"),
        (struct.pack("<II", 6, 1 << 25) + packet[8:], "ends inside a block"),
        (captures.section(">") + packet, "both byte orders"),
        (captures.block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 3, 0, -1)), "version 3.0"),
    ):
        refused(scan_bytes, head + tail, *words) if b"\x1a\x2b" not in tail else None
        info = scan_bytes(good + tail)
        assert (info.packet_count, info.left_out) == (1, len(tail))
        assert all(word in info.left_out_why for word in words)
    lies = captures.block("<", 6, struct.pack("<IIIII", 0, 0, 0, 64, 64) + record.data)
    stranger = captures.packet("<", captures.Record(record.data, interface=7))
    for odd in (lies, stranger, captures.section("<") + packet, captures.block("<", 6, bytes(8))):
        info = scan_bytes(good + odd)
        assert (info.packet_count, info.left_out, sum(info.skipped.values())) == (1, 0, 1)
        refused(scan_bytes, head + odd, "no packets")
    refused(
        scan_bytes, captures.section("<") + captures.interface("<", resolution=99), "resolution", offset=28
    )
    option = struct.pack("<HHI", 1, 0, 65535) + struct.pack("<HH", 9, 40)
    refused(scan_bytes, captures.section("<") + captures.block("<", 1, option), "beyond the block", offset=28)
    wrong = captures.block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x11223344, 1, 0, -1))
    refused(scan_bytes, wrong, "byte-order magic", offset=8)
    wrong = captures.block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 3, 0, -1))
    refused(scan_bytes, wrong, "version 3.0", offset=0)


def test_simple_and_old_packet_blocks(captures, scan_bytes):
    data = captures.frame(60, __import__("random").Random(1))
    head = captures.section("<") + captures.interface("<", snaplen=50)
    simple = captures.block("<", 3, struct.pack("<I", 60) + data[:50])
    old = captures.block("<", 2, struct.pack("<HHIIII", 0, 0, 0, 0, 40, 60) + data[:40])
    info = scan_bytes(head + simple + old)
    assert (info.packet_count, info.max_captured, info.truncated_packets) == (2, 50, 2)


def test_what_is_not_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane.spool.WRITER_SECONDS", 0.01)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "absent", "/dev/null", "a\0b"):
        with pytest.raises(CaptureFileError):
            scan(path)


def test_file_that_shrinks(captures, tmp_path, monkeypatch):
    path = tmp_path / "shrinking"
    path.write_bytes(captures.pcap(captures.records(100, sizes=(1000,))))
    monkeypatch.setattr("dataplane.capturefile.PIECE", 4096)
    real, calls = os.pread, []

    def pread(fd, length, offset):
        calls.append(offset)
        if len(calls) == 4:
            os.truncate(path, 5000)
        return real(fd, length, offset)

    monkeypatch.setattr("os.pread", pread)
    with pytest.raises(CaptureFileError, match="shorter while it was read"):
        scan(path)


@pytest.mark.captures
def test_agrees_with_capinfos(shared_captures):
    if shutil.which("capinfos") is None:
        pytest.skip("capinfos (tshark's package) is not installed")
    for path in shared_captures:
        done = subprocess.run(["capinfos", "-TMcdr", path], check=False, capture_output=True, text=True)
        assert done.returncode == 0 or "cut short" in done.stderr
        count, octets = done.stdout.strip().split("\t")[1:3]
        info, over = scan(path), 80_034 if "superframe" in path.name else 0
        assert info.packet_count + sum(info.skipped.values()) == int(count), path
        assert info.captured_bytes + over == int(octets), path
