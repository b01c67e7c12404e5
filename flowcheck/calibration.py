"""How this machine places best: measured when a node starts, remembered, overridden by one setting.

Processors disagree about how payload should be fetched and stored (docs/performance.md), and about the next one
nobody knows. So whoever captures from a live port measures the ways of parser/include/place.h for some 50 ms on memory
like its own, each protocol for itself, and the best is used by every engine of the process. All ways give the same
bytes: a bad choice is slow and nothing else. No processor is known here by its name; its name only says when a
remembered choice is no longer about this machine.

    chosen = settle(mtu, huge)                     before engines run; says what is used from now on
    FLOWCHECK_PLACING=t0-whole@2048                everything this way, fetched 2048 payload bytes ahead
    FLOWCHECK_PLACING=ll=t0@4096,simple=none       these protocols so, the rest as without it
    FLOWCHECK_PLACING=default | measure            nothing measured, nor remembered | measured, whatever is remembered

What was measured is kept in the user's cache directory, a file for each path MTU and page kind. A file that cannot be
read, or is about something else, is measured anew; one that cannot be written is not. Neither is an error.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import parser.place as place
from parser.machine import choose_placing

from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem, UserError
from parser.wire import Protocol

__all__ = ["DEFAULT", "NAMES", "SETTING", "Choice", "Ground", "Way", "cache_file", "calibrate", "processor", "settle"]

SETTING = "FLOWCHECK_PLACING"
SCHEMA = "flowcheck-placing/1"
NAMES = {Protocol.LL: "ll", Protocol.LL128: "ll128", Protocol.SIMPLE: "simple"}
DISTANCES = (1024, 2048, 4096, 8192)
MOST_AHEAD = 1 << 20
MEMORY = 16 << 20  # each of the packets and of where they go: more pages than a processor has addresses at hand
SAMPLE = 256 << 10
ROUNDS = 9
WORTH = 0.95  # of the time of what is used without a measurement: less is noise
MAP_HUGETLB = 0x40000


@dataclass(frozen=True, slots=True)
class Way:
    """One of parser.place.ways(), and how many payload bytes ahead it fetches."""

    name: str
    ahead: int

    def __str__(self) -> str:
        return self.name if self.name.startswith("none") else f"{self.name}@{self.ahead}"


DEFAULT = Way("t0", 4096)
Ways = Mapping[Protocol, Way]


@dataclass(frozen=True)
class Choice:
    """What the engines of this process do. how: why it is that, for people."""

    ways: Ways
    how: str
    kernels: str = field(default_factory=place.in_use)

    @property
    def placing(self) -> str:
        return ", ".join(f"{NAMES[protocol]}={way}" for protocol, way in self.ways.items())

    def __str__(self) -> str:
        return f"{self.kernels}, {self.placing} ({self.how})"


def settle(
    mtu: int = 1024, huge: bool = False, *, measure: bool = True, recall: bool = True, remember: bool = True
) -> Choice:
    """Decide, and let every engine of this process do it: call before engines run.

    huge: packets lie in huge pages. measure: measure where nothing is remembered; else take the default then.
    recall: use what is remembered. remember: write what was measured. Raises UserError if the setting is no setting.
    """
    wanted = os.environ.get(SETTING, "").strip()
    mode = wanted if wanted in ("", "default", "measure") else ""
    set_ways = {} if wanted == mode else _parse(wanted)
    ways: Ways
    ways, how = dict.fromkeys(NAMES, DEFAULT), f"{SETTING}=default" if mode else "not measured"
    if len(set_ways) < len(NAMES) and mode != "default":
        path, key = cache_file(mtu, huge), _key(mtu, huge)
        known = _read(path, key) if recall and mode != "measure" else None
        if known is not None:
            ways, how = known, f"measured before: {path}"
        elif measure or mode == "measure":
            begin = time.perf_counter()
            with Ground(mtu, huge) as ground:
                ways, pages = calibrate(ground.seconds, mtu), "huge" if ground.huge else "normal"
            how = f"measured in {1e3 * (time.perf_counter() - begin):.0f} ms on {pages} pages"
            if remember and ground.huge == huge:
                _write(path, key, ways)
    if set_ways:
        how = SETTING if len(set_ways) == len(NAMES) else f"{SETTING}, the rest {how}"
    choice = Choice({**ways, **set_ways}, how)
    for protocol, way in choice.ways.items():
        choose_placing(protocol, way.name, way.ahead)
    return choice


# -- the setting -------------------------------------------------------------------------------------------


def _parse(text: str) -> dict[Protocol, Way]:
    found: dict[Protocol, Way] = {}
    by_name = {name: protocol for protocol, name in NAMES.items()}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, way = part.rpartition("=")
        if equals and name not in by_name:
            raise _refused(f"{name!r} is no protocol", f"{', '.join(by_name)}, as in ll=t0@4096")
        found.update(dict.fromkeys([by_name[name]] if equals else NAMES, _way(way)))
    return found


def _way(text: str) -> Way:
    name, at, ahead = text.partition("@")
    if name not in place.ways():
        raise _refused(f"{name!r} is no way of placing", f"default, measure or one of {', '.join(place.ways())}")
    if at and not (ahead.isascii() and ahead.isdigit() and 0 < int(ahead) <= MOST_AHEAD):
        raise _refused(f"{ahead!r} is no distance", f"payload bytes, 1 to {MOST_AHEAD}, as in t0@4096")
    return Way(name, int(ahead) if at else DEFAULT.ahead)


def _refused(what: str, remedy: str) -> UserError:
    return UserError(what, where=f"environment variable {SETTING}", remedy=remedy)


# -- what is remembered ------------------------------------------------------------------------------------


def processor() -> str:
    """Name, family, model and stepping, as the kernel tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    numbers = [fields[key] for key in ("cpu family", "model", "stepping") if key in fields]
    name = " ".join((fields.get("model name") or platform.machine()).split())
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def cache_file(mtu: int, huge: bool) -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "flowcheck" / f"placing-{mtu}-{'huge' if huge else 'normal'}.json"


def _key(mtu: int, huge: bool) -> dict[str, object]:
    return {
        "schema": SCHEMA, "processor": processor(), "kernels": place.in_use(), "version": place.version(),
        "pages": "huge" if huge else "normal", "mtu": mtu,
    }  # fmt: skip


def _read(path: Path, key: dict[str, object]) -> dict[Protocol, Way] | None:
    """None: nothing that can be used."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(1 << 16))
        if {name: data[name] for name in key} != key:
            return None
        return {protocol: _way(data["ways"][name]) for protocol, name in NAMES.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _write(path: Path, key: dict[str, object], ways: Ways) -> None:
    text = json.dumps({**key, "ways": {NAMES[protocol]: str(way) for protocol, way in ways.items()}}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode() + b"\n")
    except (OSError, EnvironmentProblem):
        pass  # measured again at the next start


# -- measuring ---------------------------------------------------------------------------------------------


Seconds = Callable[[Protocol, Way, bool], float]


def calibrate(seconds: Seconds, mtu: int) -> dict[Protocol, Way]:
    """The best way of each protocol. seconds(protocol, way, written): a short sample; written: until the bytes are in
    memory, which is what a way that stores through the cache leaves for later."""
    fetches = [name for name in place.ways() if not name.endswith("-regular")]
    distances = sorted({max(mtu, distance) for distance in DISTANCES})
    near_and_far = [Way(name, ahead) for name in fetches for ahead in dict.fromkeys((distances[0], DEFAULT.ahead))]
    candidates = [DEFAULT, *(way for way in near_and_far if way.name != "none" or way.ahead == DEFAULT.ahead)]
    best: dict[Protocol, Way] = {}
    for protocol in NAMES:
        way = _best(candidates, protocol, seconds, False)
        if way.name != "none":
            way = _best([way, *(Way(way.name, distance) for distance in distances)], protocol, seconds, False)
        best[protocol] = _best([way, Way(f"{way.name}-regular", way.ahead)], protocol, seconds, True)
    return best


def _best(ways: list[Way], protocol: Protocol, seconds: Seconds, written: bool) -> Way:
    """The quickest, judged by each way's best sample: what disturbs one only adds to it. The first, unless another is
    clearly better, and was in most rounds. Samples alternate."""
    ways = list(dict.fromkeys(ways))
    taken = [[seconds(protocol, way, written) for way in ways] for _ in range(ROUNDS)]
    least = [min(column) for column in zip(*taken, strict=True)]
    won = [sum(row[i] < row[0] for row in taken) for i in range(len(ways))]
    good = [i for i in range(1, len(ways)) if least[i] < WORTH * least[0] and won[i] > 0.7 * ROUNDS]
    return ways[min(good, key=least.__getitem__, default=0)]


class Ground:
    """Packets in memory and places for them, cold at each sample. Packets: headers, a payload of zeros (so flags are 0
    and right), in slots of whole cache lines, as a node's buffers hold them.

    huge: use huge pages for the packets; `huge` says afterwards whether there were enough. Places lie in ordinary
    memory, as an engine's arenas do."""

    def __init__(self, mtu: int, huge: bool) -> None:
        self.mtu = max(1024, mtu // 1024 * 1024)  # LL128 comes in pieces of 1024
        self._memory, self.huge = _pages(MEMORY, huge)
        source = np.frombuffer(self._memory, np.uint8)
        source[:] = 0
        self._target = np.full(MEMORY + 64, 0, np.uint8)
        self._to = np.uint64(self._target.ctypes.data + -self._target.ctypes.data % 64)
        slot = self.mtu + 128
        self._packets = MEMORY // slot
        first = source.ctypes.data + 54  # behind Ethernet, IPv4, UDP and BTH; pages begin on a cache line
        self._payloads = first + np.arange(self._packets - 1, dtype=np.uint64) * np.uint64(slot)
        self._order = np.random.default_rng(1).permutation(self._packets - 1).astype(np.uint64)
        self._flags = np.zeros(SAMPLE // self.mtu, np.uint64)
        self._next = 0

    def seconds(self, protocol: Protocol, way: Way, written: bool) -> float:
        """One sample: another stretch of packets each time, none of it in any cache."""
        n = self._flags.size
        if self._next + n > self._payloads.size:
            self._next = 0
        half = self.mtu // 2
        piece = {Protocol.LL: half, Protocol.LL128: self.mtu // 1024 * 960, Protocol.SIMPLE: self.mtu}[protocol]
        payloads = self._payloads[self._next : self._next + n]
        to = self._to + self._order[self._next : self._next + n] * np.uint64(piece)
        self._next += n
        ahead = max(1, way.ahead // self.mtu)
        place.flush(payloads, self.mtu)
        place.flush(to, piece)
        begin = time.perf_counter()
        place.sweep(place.in_use(), int(protocol), way.name, to, payloads, self._flags, self.mtu, ahead)
        if written:
            place.flush(to, piece)
        return time.perf_counter() - begin

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()


def _pages(size: int, huge: bool) -> tuple[mmap.mmap, bool]:
    """Memory of its own, in huge pages if that is wanted and so many are free."""
    plain = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if huge:
        try:
            return mmap.mmap(-1, size, plain | MAP_HUGETLB), True
        except OSError:
            pass
    return mmap.mmap(-1, size, plain), False
