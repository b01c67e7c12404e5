"""On what a way of placing is measured: cold packets in memory like a node's. What is asked and remembered of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parser.machine import choose_placing

from flowcheck.errors import UserError
from flowcheck.rebuild import calibration
from flowcheck.rebuild.calibration import (
    DEFAULT,
    MEMORY,
    MOST_AHEAD,
    NAMES,
    SAMPLE,
    SETTING,
    Ground,
    Way,
    question,
    settle,
)
from parser import place
from parser.chunk_layout import Protocol
from updater import choosing, tuning

HEADERS = 54


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own; afterwards everything is placed as before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for setting in (SETTING, tuning.SETTING):
        monkeypatch.delenv(setting, raising=False)
    yield tmp_path
    for protocol in Protocol:
        choose_placing(protocol, DEFAULT.name, DEFAULT.ahead)


class Listened:
    """What the kernels were asked for, which they do. flushed: (addresses, bytes each). swept: arguments of sweep."""

    def __init__(self) -> None:
        self.flushed: list[tuple[Any, int]] = []
        self.swept: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(place, name)

    def flush(self, addresses: Any, size: int) -> None:
        self.flushed.append((np.array(addresses), size))
        place.flush(addresses, size)

    def sweep(self, *given: Any) -> None:
        self.swept.append(given)
        place.sweep(*given)


@pytest.fixture
def listened(monkeypatch: pytest.MonkeyPatch) -> Listened:
    found = Listened()
    monkeypatch.setattr(calibration, "place", found)
    return found


@pytest.fixture(params=[512, 1024, 1500, 4096, 5000])
def ground(request: Any) -> Iterator[Ground]:
    with Ground(request.param, False) as made:
        assert made.mtu == {512: 1024, 1500: 1024, 5000: 4096}.get(request.param, request.param)
        yield made


def test_packets_lie_in_slots_of_whole_cache_lines_and_in_memory(ground: Ground) -> None:
    """Nothing of one lies in the slot of the next; and behind the last there is room for what is fetched ahead."""
    memory = np.frombuffer(ground._memory, np.uint8)
    first = memory.ctypes.data
    payloads = ground._payloads.astype(np.int64)
    assert ((payloads - HEADERS) % 64 == 0).all() and payloads[0] == first + HEADERS
    assert (np.diff(payloads) >= ground.mtu + HEADERS).all()
    assert payloads[-1] + ground.mtu <= first + MEMORY < payloads[-1] + 4 * (ground.mtu + 128), "all of it is used"
    assert not memory.any()
    del memory


@pytest.mark.parametrize("protocol", list(Protocol))
def test_places_lie_apart_in_memory_and_in_no_order(ground: Ground, listened: Listened, protocol: Protocol) -> None:
    """A packet of LL has half as many bytes of data, one of LL128 fifteen sixteenths."""
    piece = {Protocol.LL: ground.mtu // 2, Protocol.LL128: ground.mtu * 15 // 16, Protocol.SIMPLE: ground.mtu}[protocol]
    for _ in range(3):
        ground.seconds(protocol, False, Way("t0", 4096))
    low = ground._target.ctypes.data
    for kernel, number, name, to, payloads, flags, mtu, _ in listened.swept:
        places = np.sort(np.array(to).astype(np.int64))
        assert (kernel, number, name, mtu) == (place.in_use(), int(protocol), "t0", ground.mtu)
        assert len(to) == len(payloads) == len(flags) == SAMPLE // ground.mtu
        assert places[0] >= low and places[-1] + piece <= low + ground._target.size
        assert ((places - (low + -low % 64)) % piece == 0).all() and (np.diff(places) >= piece).all()
        assert (np.diff(np.array(to).astype(np.int64)) < 0).any()


def test_each_sample_takes_packets_that_no_sample_before_it_took(ground: Ground, listened: Listened) -> None:
    """Until there are no others: then it begins anew."""
    samples = len(ground._payloads) // (SAMPLE // ground.mtu)
    for _ in range(samples):
        ground.seconds(Protocol.SIMPLE, False, Way("none", 1))
    taken = np.concatenate([np.array(swept[4]) for swept in listened.swept])
    assert samples > 10 and len(set(taken.tolist())) == len(taken) == samples * (SAMPLE // ground.mtu)
    ground.seconds(Protocol.SIMPLE, False, Way("none", 1))
    assert (np.array(listened.swept[-1][4]) == np.array(listened.swept[0][4])).all()


@pytest.mark.parametrize("written", [False, True])
def test_a_sample_is_cold_when_it_begins(listened: Listened, written: bool) -> None:
    """And until all of it is in memory where that is what is asked."""
    with Ground(1024, False) as ground:
        assert ground.seconds(Protocol.LL128, written, Way("t0", 4096)) > 0
    ((_, _, _, to, payloads, *_),) = listened.swept
    assert [size for _, size in listened.flushed] == [1024, 960, 960][: 3 if written else 2]
    asked = [payloads, to, to]
    assert all((found == np.array(one)).all() for (found, _), one in zip(listened.flushed, asked, strict=False))


@pytest.mark.parametrize(("ahead", "packets"), [(1, 1), (4095, 1), (4096, 1), (8192, 2), (1 << 20, 256)])
def test_what_is_fetched_ahead_is_whole_packets_and_one_at_least(listened: Listened, ahead: int, packets: int) -> None:
    with Ground(4096, False) as ground:
        ground.seconds(Protocol.SIMPLE, False, Way("t0", ahead))
    assert listened.swept[0][-1] == packets


PLAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.mark.parametrize(("huge", "free", "flags"), [
    (False, True, [PLAIN]), (True, True, [PLAIN | 0x40000]), (True, False, [PLAIN | 0x40000, PLAIN]),
])
def test_huge_pages_where_they_are_wanted_and_free(monkeypatch, huge: bool, free: bool, flags: list[int]) -> None:
    asked: list[int] = []
    make = mmap.mmap

    def mapped(file: int, size: int, how: int) -> mmap.mmap:
        asked.append(how)
        assert (file, size) == (-1, 4096)
        if how & calibration.MAP_HUGETLB and not free:
            raise OSError(12, "Cannot allocate memory")
        return make(file, size, PLAIN)

    monkeypatch.setattr(calibration.mmap, "mmap", mapped)
    memory, got = calibration._pages(4096, huge)
    memory.close()
    assert asked == flags and got is (huge and free)


# -- what is asked, and where the answer is kept -----------------------------------------------------------------


@pytest.mark.parametrize(("mtu", "huge", "pages"), [(1024, False, "normal"), (4096, True, "huge")])
def test_a_question_is_of_pages_mtu_and_kernels(mtu: int, huge: bool, pages: str) -> None:
    asked = question(mtu, huge)
    assert asked.name == f"placing-{mtu}-{pages}" and asked.parts == ("ll", "ll128", "simple")
    assert choosing.key(asked).items() >= {
        "version": place.version(), "pages": pages, "mtu": mtu, "kernels": place.in_use()}.items()


@pytest.mark.parametrize("huge", [False, True])
def test_where_it_was_measured_is_said(monkeypatch, cache: Path, huge: bool) -> None:
    pages = calibration._pages
    monkeypatch.setattr(calibration, "_pages", lambda size, wanted: (pages(size, False)[0], wanted))
    monkeypatch.setattr(calibration, "calibrate", lambda seconds, mtu: dict.fromkeys(NAMES, Way("nta", mtu)))
    name = "huge" if huge else "normal"
    choice = settle(huge=huge)
    assert choice.how.endswith(f"on {name} pages") and choice.ways == dict.fromkeys(NAMES.values(), Way("nta", 1024))
    assert [path.name for path in (cache / "flowcheck").iterdir()] == [f"placing-1024-{name}.json"]


def test_nothing_is_remembered_that_must_not_be(monkeypatch, cache: Path) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda seconds, mtu: dict.fromkeys(NAMES, Way("nta", mtu)))
    assert "measured in" in settle(remember=False).how and not list(cache.iterdir())


def test_a_look_at_updates_says_what_is_remembered_and_changes_nothing(monkeypatch, cache: Path) -> None:
    path = choosing.cache_file(tuning.question())
    path.parent.mkdir(parents=True)
    choosing._write(tuning.question(), {tuning.PART: tuning.CHOICES[-1]})
    before = path.read_text()
    assert calibration.look_at_updates(False).how == f"measured before: {path}"
    assert calibration.look_at_updates(False).ways == {tuning.PART: tuning.CHOICES[-1]}
    assert calibration.look_at_updates(False, recall=False).how == "not measured"
    monkeypatch.setattr(tuning, "_measure", lambda: choosing.Measured({tuning.PART: tuning.CHOICES[0]}, "here"))
    assert "measured in" in calibration.look_at_updates(True, recall=False).how
    assert path.read_text() == before
    path.unlink()
    assert "measured in" in calibration.look_at_updates(True).how and not path.exists()


@pytest.mark.parametrize(("text", "ahead"), [("1", 1), (str(MOST_AHEAD), MOST_AHEAD), ("0000001", 1)])
def test_a_distance_at_its_bounds(text: str, ahead: int) -> None:
    assert calibration._parse(f"t0@{text}") == Way("t0", ahead)


@pytest.mark.parametrize("text", ["0", str(MOST_AHEAD + 1), "00000001", "\u0661", "1 ", "+1"])
def test_a_distance_beyond_them(text: str) -> None:
    with pytest.raises(UserError, match=SETTING), calibration._settings():
        calibration._parse(f"t0@{text}")
