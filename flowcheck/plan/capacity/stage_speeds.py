"""How fast one core of a node is at each stage: measured by `flowcheck bench`, given, or this project's own figures.

    speeds = measured(Path("bench.json"), "ll", 4096, flows=8, pages="huge")      of what BENCH prints
    speeds = published("ll", 4096)                                                docs/understand/performance.md

flows: whose packets come to a placing thread in turns. The fewer there are, the better a processor foresees what comes
next; most of all where copies are compared. bench has rows of 16 flows, and of 4 for where there are no more.
pages: where versions lie. "shared" is /dev/shm, in pages of 4 KB; "huge" is hugetlbfs, or a kernel that is set to give
shared memory in large pages. An update takes longer in small ones.

Raises UserError naming the file and the row that is not there. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["BENCH", "COPY", "ROWS", "Pages", "Speeds", "measured", "published"]

Pages = Literal["shared", "huge"]

BENCH = "flowcheck bench parse place ingest adam pipeline --json"
TIMED = (1024, 4096)  # path MTUs that bench measures
#: Stage -> the row that says it, unit that the row has.
ROWS = {
    "parse": ("parse.16flows.huge", "ns/packet"),
    "place": ("place.{protocol}.{mtu}", "GB/s"),
    "again": ("place.{protocol}.{mtu}.again", "GB/s"),
    "icrc": ("place.{protocol}.{mtu}.icrc", "ns/packet"),
    "receive": ("ingest.{mtu}.copy", "Mpkt/s"),
    "update": ("adam.200.1t.torch-cuda-foreach", "GB/s"),
}
FEW = 4  # flows
MOST_BYTES = 1 << 24  # of a file of rows: a device that is named by mistake must not fill the memory
#: Rows that are taken for no more than FEW flows, and for versions in shared memory, if they are there.
OF_FEW = {"place": "place.{protocol}.{mtu}.4flows", "again": "place.{protocol}.{mtu}.4flows.again"}
OF_SHARED = {"update": "adam.200.1t.torch-cuda-foreach.shared"}
#: The limit of this row, in ms per GB of gradients, is two bytes for each at the speed of two threads that copy.
COPY = "pipeline.adam.place"
PAGE = "docs/understand/performance.md"
ZEN4, INGEST, AGAIN = f"{PAGE}, Zen 4", f"{PAGE}, ingest", f"{PAGE}, copies that come again"
PUBLISHED = {
    "parse.16flows.huge": (11.6, ZEN4),
    "place.ll.1024": (21.2, ZEN4), "place.ll128.1024": (22.4, ZEN4), "place.simple.1024": (26.8, ZEN4),
    "place.ll.4096": (24.7, ZEN4), "place.ll128.4096": (26.5, ZEN4), "place.simple.4096": (29.1, ZEN4),
    "place.ll.1024.icrc": (13.1, ZEN4), "place.ll128.1024.icrc": (13.1, ZEN4), "place.simple.1024.icrc": (13.9, ZEN4),
    "place.ll.4096.icrc": (48.0, ZEN4), "place.ll128.4096.icrc": (52.3, ZEN4), "place.simple.4096.icrc": (48.4, ZEN4),
    "place.ll.1024.again": (20.2, AGAIN), "place.ll128.1024.again": (17.8, AGAIN),
    "place.simple.1024.again": (25.4, AGAIN), "place.ll.4096.again": (21.5, AGAIN),
    "place.ll128.4096.again": (21.4, AGAIN), "place.simple.4096.again": (22.1, AGAIN),
    "ingest.1024.copy": (13.2, INGEST), "ingest.4096.copy": (4.2, INGEST),
    "adam.200.1t.torch-cuda-foreach": (40.9, ZEN4), "adam.200.1t.torch-cuda-foreach.shared": (31.5, ZEN4),
}


@dataclass(frozen=True)
class Speeds:
    """Of one core.

    receive_mpps: Mpkt/s from a port into the ring.
    parse_ns: of a packet that carries nothing to keep.
    place_gbs: GB/s, bytes read plus written, of packets with reduced data.
    again_gbs: the same of second copies, which are compared with what is there and not placed.
    icrc_ns: that checking such a packet's ICRC adds.
    update_gbs: GB/s, 28 bytes per parameter with Adam and float32 gradients.
    sources: of each, by the name of its row in ROWS, and "copy".
    copy_gbs: GB/s, read plus written, that all cores together reach; None: nobody measured it.
    kernel_ns: that the kernel takes for a packet on the same cores, where it drives the port (af_packet).
    """

    receive_mpps: float
    parse_ns: float
    place_gbs: float
    again_gbs: float
    icrc_ns: float
    update_gbs: float
    sources: Mapping[str, str]
    copy_gbs: float | None = None
    kernel_ns: float = 0.0


def published(protocol: str, mtu: int, pages: Pages = "shared") -> Speeds:
    """Figures of one machine of this project; another processor has others."""
    return _of({name: value for name, (value, _) in PUBLISHED.items()}, protocol, mtu,
               {name: where for name, (_, where) in PUBLISHED.items()}, PAGE, pages=pages)


def measured(file: Path, protocol: str, mtu: int, flows: int = 16, pages: Pages = "shared") -> Speeds:
    """From the rows that `flowcheck bench ... --json` printed."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
        rows = json.loads(text) if len(text) <= MOST_BYTES else None
    except OSError as error:
        named = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        raise (UserError if named else EnvironmentProblem)(
            f"cannot be read: {error.strerror or error}", where=str(file),
            remedy="name the file that `flowcheck bench --json` printed into" if named else "check its permissions",
        ) from None
    except (ValueError, RecursionError):  # no JSON, or a nest of brackets
        rows = None
    wrong = UserError(
        "is not what `flowcheck bench --json` prints", where=str(file),
        remedy=f"{BENCH} > bench.json",
    )
    if not isinstance(rows, list):
        raise wrong
    values: dict[str, float] = {}
    where: dict[str, str] = {}
    copy: float | None = None
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise wrong
        value = row.get("value")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise wrong
        values[row["name"]] = float(value)
        where[row["name"]] = f"{file.name}, {row.get('processor', 'a processor not named')}"
        limit = row.get("limit")
        if row["name"] == COPY and isinstance(limit, int | float) and 0 < limit < float("inf"):
            copy = 2000 / limit
    return _of(values, protocol, mtu, where, str(file), copy, flows, pages)


def _of(
    values: Mapping[str, float], protocol: str, mtu: int, where: Mapping[str, str], source: str,
    copy: float | None = None, flows: int = 16, pages: Pages = "shared",
) -> Speeds:
    near = max([size for size in TIMED if size <= mtu], default=TIMED[0])
    names = {stage: name.format(protocol=protocol, mtu=near) for stage, (name, _) in ROWS.items()}
    better = (OF_FEW if flows <= FEW else {}) | (OF_SHARED if pages == "shared" else {})
    for stage, name in better.items():
        if name.format(protocol=protocol, mtu=near) in values:
            names[stage] = name.format(protocol=protocol, mtu=near)
    lacking = [name for name in names.values() if name not in values]
    if lacking:
        raise UserError(
            f"has no row {lacking[0]}", where=source,
            remedy=f"{BENCH} > bench.json, or give the speeds one by one",
        )
    return Speeds(
        values[names["receive"]], values[names["parse"]], values[names["place"]], values[names["again"]],
        values[names["icrc"]], values[names["update"]],
        {stage: f"{where[name]}: {name}" for stage, name in names.items()}
        | ({} if copy is None else {"copy": f"{where[COPY]}: 2000 / limit of {COPY}"}), copy,
    )
