"""What a mirror does to a stream, by seed: loses, reorders, duplicates and damages frames.

`apply` changes one port's records and says exactly what it did to which packet. Retransmission is not a fault of
the mirror: connection.Connection makes it. Pure function of its arguments; any thread.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from lab.synth.connection import Record

__all__ = ["Faults", "apply"]

_WINDOW = 8  # a late or repeated packet comes at most this many frames later


@dataclass(frozen=True)
class Faults:
    """Probabilities per mirrored frame. corrupt: a payload bit of a data packet flipped, ICRC then wrong."""

    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.loss or self.reorder or self.duplicate or self.corrupt)


Said = dict[str, list[dict[str, Any]]]


def apply(records: list[Record], faults: Faults, seed: str) -> tuple[list[Record], Said]:
    """(what the port's mirror delivers, what happened): lists "dropped", "moved", "duplicated", "corrupted".

    Timestamps stay with the position in the stream, as a capture device stamps on arrival.
    """
    rng = random.Random(seed)
    said: Said = {"dropped": [], "moved": [], "duplicated": [], "corrupted": []}
    keyed: list[tuple[float, Record]] = []
    for position, record in enumerate(records):
        chances = [rng.random() for _ in range(4)]
        shift = 1 + rng.randrange(_WINDOW)
        if chances[0] < faults.loss:
            said["dropped"].append(_name(record))
            continue
        place = float(position)
        if chances[3] < faults.corrupt and record.piece[2] > 0:
            damaged = bytearray(record.frame)
            damaged[-5 - rng.randrange(record.piece[2])] ^= 1 << rng.randrange(8)
            record = replace(record, frame=bytes(damaged), piece=(-1, 0, 0))
            said["corrupted"].append(_name(record))
        if chances[1] < faults.reorder:
            place += shift + 0.5
            said["moved"].append({**_name(record), "by": shift})
        keyed.append((place, record))
        if chances[2] < faults.duplicate:
            keyed.append((position + shift + 0.25, record))
            said["duplicated"].append({**_name(record), "by": shift})
    times = sorted([record.time for _, record in keyed])
    keyed.sort(key=lambda pair: pair[0])
    delivered = [replace(record, time=time) for time, (_, record) in zip(times, keyed, strict=True)]
    return delivered, said


def _name(record: Record) -> dict[str, Any]:
    return {"src": record.src, "dst": record.dst, "qpn": record.qpn, "psn": record.psn, "kind": record.kind}
