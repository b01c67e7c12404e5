"""Damaged capture files through the real path: scan, DPDK's net_pcap, rx thread, ring, state machine.

    python fuzz/captures.py [--files N] [--seed S] [--keep FOLDER]

One process and one EAL for all of them. For every file either the scan refuses it, or DPDK must deliver exactly
what libpcap reads from it: every second file is compared byte for byte, the others run through an Engine of the
job the capture was made of, where outcomes must add up and everything placed must be the truth. A file that hangs
ends the run; descriptors, threads and memory are the same at the end as after the first files. A find is kept in
--keep (build/fuzz/finds).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "fuzz")]

import seeds  # noqa: E402
from parser.machine import Engine  # noqa: E402
from targets.jobs import FuzzJob, make_jobs  # noqa: E402
from targets.truth import check, close  # noqa: E402

from dataplane.capture import PcapSource  # noqa: E402
from dataplane.pcapfile import CaptureFileError  # noqa: E402
from dataplane.pydpdk.eal import Eal  # noqa: E402
from dataplane.reader import RingReader  # noqa: E402

__all__ = ["Libpcap", "Runner", "mutate"]

HANG_SECONDS = 20.0
LEAK_BYTES = 64 << 20
NUMBERS = (0, 1, 15, 16, 60, 65535, 65536, 0x7FFFFFFF, 0xFFFFFFFF)


class _Header(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("fraction", ctypes.c_long), ("caplen", ctypes.c_uint32),
                ("len", ctypes.c_uint32)]


class Libpcap:
    """The reference reader."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libpcap.so.0.8")
        self._lib.pcap_open_offline.restype = ctypes.c_void_p

    def frames(self, path: Path) -> list[bytes]:
        error = ctypes.create_string_buffer(256)
        handle = self._lib.pcap_open_offline(os.fsencode(path), error)
        if not handle:
            raise AssertionError(f"the scan accepts what libpcap refuses: {error.value.decode()}")
        header, data, out = ctypes.POINTER(_Header)(), ctypes.POINTER(ctypes.c_uint8)(), []
        while (rc := self._lib.pcap_next_ex(
            ctypes.c_void_p(handle), ctypes.byref(header), ctypes.byref(data)
        )) == 1:
            out.append(ctypes.string_at(data, header.contents.caplen))
        self._lib.pcap_close(ctypes.c_void_p(handle))
        assert rc == -2, f"libpcap stops at packet {len(out)} of a file the scan accepts"
        return out


# -- files -----------------------------------------------------------------------------------------


def as_pcap(frames: list[bytes]) -> bytes:
    head = struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
    return head + b"".join(struct.pack("<IIII", 1, i, len(f), len(f)) + f for i, f in enumerate(frames))


def as_pcapng(frames: list[bytes]) -> bytes:
    out = seeds.block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))
    out += seeds.block("<", 1, struct.pack("<HHI", 1, 0, 65535))
    for i, frame in enumerate(frames):
        out += seeds.block("<", 6, struct.pack("<IIIII", 0, 0, i, len(frame), len(frame)) + frame)
    return out


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to four random changes. Most hit a frame, where the scan cannot see them; some a record header."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, size = rng.randrange(len(out)), rng.choice((1, 2, 4, 16, 60, 300))
        kind = rng.choice((0, 0, 0, 1, 1, 3, 3, 3, 4, 5, 6, 7, 8))
        if kind <= 2:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            out[at : at + size] = rng.randbytes(len(out[at : at + size]))
        elif kind == 4:
            out[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice(NUMBERS))[: len(out[at : at + 4])]
        elif kind == 5:
            del out[at : at + size]
        elif kind == 6:
            out[at:at] = rng.randbytes(size)
        elif kind == 7 and rng.random() < 0.3:
            del out[max(at, 24) :]
        else:  # repeat or move a piece
            out[at:at] = out[(source := rng.randrange(len(out))) : source + size]
    return bytes(out)


def shuffled(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Loss, repeats and disorder that leave the file whole."""
    begin = rng.randrange(len(frames))
    out = [f for f in frames[begin : begin + rng.randrange(1, 120)] if rng.random() > 0.05]
    for _ in range(rng.randrange(6)):
        i, j = rng.randrange(len(out) + 1), rng.randrange(len(frames))
        out.insert(i, frames[j])
    return out or [frames[0]]


# -- running ---------------------------------------------------------------------------------------


class Runner:
    """One EAL's worth of files. counts: what became of them."""

    def __init__(self, eal: Eal, folder: Path, seed: int) -> None:
        self._eal, self._path, self._rng = eal, folder / "capture", random.Random(seed)
        self._jobs, self._libpcap, self._small = make_jobs(), Libpcap(), seeds.captures()
        self.counts: Counter[str] = Counter()
        self.data = b""

    def one(self, number: int) -> None:
        """Make file `number` and run it. Raises AssertionError on a find, whose bytes are in `data`."""
        rng = self._rng
        job = rng.choice(self._jobs)
        if number % 8 == 7:
            self.data = mutate(rng, rng.choice(self._small))
        else:
            frames = shuffled(rng, [frame for _, frame in job.packets])
            self.data = rng.choice((as_pcap, as_pcapng))(frames)
            if number % 8:
                self.data = mutate(rng, self.data)
        self._path.write_bytes(self.data)
        try:
            source = PcapSource(self._eal, self._path, ring_size=rng.choice((64, 256)), stall_seconds=5)
        except CaptureFileError as error:
            assert 0 <= error.offset <= len(self.data) and error.what and error.remedy
            self.counts["refused"] += 1
            return
        with source:
            source.start()
            if number % 2:
                self._compare(source)
            else:
                self._place(source, job)
            assert source.error is None, f"accepted, and then: {source.error}"
            assert source.counters()["received"] == source.info.packet_count
        self.counts["delivered"] += 1
        self.counts["packets"] += source.info.packet_count

    def _compare(self, source: PcapSource) -> None:
        reader, found, deadline = RingReader(source.ring_address), [], time.monotonic() + HANG_SECONDS
        while not reader.drained:
            found += [packet.data for packet in reader.take()]
            assert time.monotonic() < deadline, "hangs"
        given = self._path
        if source.info.parts:
            given = self._path.with_suffix(".given")
            given.write_bytes(b"".join(
                part if isinstance(part, bytes) else self.data[part[0] : part[1]] for part in source.info.parts
            ))
        expected = self._libpcap.frames(given)[: source.info.packet_count]
        assert found == expected, f"{len(found)} packets delivered, {len(expected)} in the file, or bytes differ"

    def _place(self, source: PcapSource, job: FuzzJob) -> None:
        engine, done, deadline = Engine(job.plan.engine), 0, time.monotonic() + HANG_SECONDS
        while not engine.drained(source.ring_address):
            n, blocked = engine.run(0, source.ring_address, 64)
            done += n
            if blocked:
                close(engine, job.truth)
            assert time.monotonic() < deadline, "hangs"
        engine.finish()
        for iteration in (None, *range(engine.oldest, engine.begun + 1)):
            check(engine, job.truth, iteration)
        outcomes = engine.outcomes(0)
        assert sum(packets for packets, _ in outcomes.values()) == done == source.info.packet_count
        for name, (packets, _bytes) in outcomes.items():
            self.counts[f"packets {name}"] += packets


def held() -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "fuzz" / "finds")
    options = parser.parse_args()
    started = time.monotonic()
    with Eal.start(memory_mb=256, huge=False) as eal, tempfile.TemporaryDirectory() as folder:
        runner = Runner(eal, Path(folder), options.seed)
        before = held()
        for number in range(options.files):
            try:
                runner.one(number)
            except Exception:
                options.keep.mkdir(parents=True, exist_ok=True)
                kept = options.keep / f"capture-{options.seed}-{number}"
                kept.write_bytes(runner.data)
                print(f"FOUND with file {number} of seed {options.seed}: {kept}", flush=True)
                raise
            if number == min(500, options.files // 2):
                before = held()
        after = held()
    counts = runner.counts
    print(
        f"captures  {options.files} files in {time.monotonic() - started:.0f} s: {counts['refused']} refused by the "
        f"scan, {counts['delivered']} delivered with {counts['packets']} packets; descriptors {before[0]} -> "
        f"{after[0]}, threads {before[1]} -> {after[1]}, resident {before[2] >> 20} -> {after[2] >> 20} MB"
    )
    by_outcome = sorted((name[8:], n) for name, n in counts.items() if name.startswith("packets ") and n)
    print("          " + ", ".join(f"{n} {name}" for name, n in by_outcome))
    assert after[:2] == before[:2] and after[2] - before[2] < LEAK_BYTES, "something is not given back"
    return 0


if __name__ == "__main__":
    sys.exit(main())
