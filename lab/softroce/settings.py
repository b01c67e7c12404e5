"""What a rank's softroce is told: one JSON object in the environment variable FLOWCHECK_SOFTROCE.

    {"interface": "fab0", "address": "10.77.0.10", "family": "2.19", "protocol": "LL", "channels": 2}

All ranks of a job have the same settings but interface and address; ranks compare them when they meet. Any thread.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from dataclasses import dataclass, field
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.form import Place, build, parse
from flowcheck.job.model import BUFFER_BYTES, MAX_THREADS
from lab.synth.families import Family, family_of

__all__ = ["VARIABLE", "Settings"]

VARIABLE = "FLOWCHECK_SOFTROCE"
_MAX_QPS = 8
P2P_SLOT = 131072


@dataclass(frozen=True)
class Settings:
    """interface, address: where this rank is on the fabric (IPv4).

    family: NCCL version whose layout and messages to use, from 2.19. protocol: LL, LL128 or SIMPLE, of all collectives.
    algorithm: of AllReduce, ring or tree; everything else goes round the ring. channels: connected channels.
    mtu: RDMA path MTU; the interface's must be 60 bytes larger. qps_per_connection: 1 to 8; split_data_on_qps,
    adaptive_routing, ar_threshold, buffer_bytes, max_threads, rings: as in the manifest's communicator.
    seed: of QP numbers, keys and the like; 0: unpredictable. traffic_class: IPv4 DSCP and ECN byte.
    tell_channels: whether attachments hear which connection is which channel, as from no source of NCCL's.
    window: packets a QP sends ahead of the acknowledgement. retransmit_ms: the RC timeout; it doubles with each
    repetition. peer_timeout_s: an operation in which nothing has moved for so long fails.
    """

    interface: str
    address: str
    family: str = "2.19"
    protocol: str = "LL"
    algorithm: str = "ring"
    channels: int = 1
    mtu: int = 4096
    qps_per_connection: int = 1
    split_data_on_qps: bool = False
    adaptive_routing: bool = False
    ar_threshold: int = 8192
    buffer_bytes: dict[str, int] = field(default_factory=dict)
    max_threads: dict[str, int] = field(default_factory=dict)
    rings: list[list[int]] = field(default_factory=list)
    seed: int = 0
    traffic_class: int = 2
    window: int = 128
    retransmit_ms: int = 40
    peer_timeout_s: int = 60
    tell_channels: bool = True

    @classmethod
    def from_environment(cls) -> Settings:
        """Raises UserError if the variable is missing or says something impossible."""
        text = os.environ.get(VARIABLE)
        if text is None:
            raise UserError(
                "softroce does not know its interface and address", where=f"environment variable {VARIABLE}",
                remedy='set it to JSON such as {"interface": "fab0", "address": "10.77.0.10"}',
            )
        return cls.from_dict(parse(text, VARIABLE))

    @classmethod
    def from_dict(cls, data: Any) -> Settings:
        place = Place(VARIABLE)
        settings: Settings = build(cls, data, place)
        settings._check(place)
        return settings

    def _check(self, place: Place) -> None:
        try:
            ipaddress.IPv4Address(self.address)
        except ValueError:
            (place / "address").fail(f"{self.address!r} is not an IPv4 address")
        family = family_of(self.family)
        if family.first < (2, 19):
            (place / "family").fail(f"{self.family} is before 2.19, whose handshake is the first that is known")
        for name, choices in (("protocol", ("LL", "LL128", "SIMPLE")), ("algorithm", ("ring", "tree"))):
            if getattr(self, name) not in choices:
                (place / name).fail(f"{getattr(self, name)!r} is none of {', '.join(choices)}")
        if self.mtu not in (1024, 2048, 4096):
            (place / "mtu").fail(f"{self.mtu} is none of 1024, 2048, 4096")
        for name, low, high in (
            ("channels", 1, 32), ("qps_per_connection", 1, _MAX_QPS), ("ar_threshold", 0, 1 << 30),
            ("traffic_class", 0, 255), ("window", 4, 4096), ("retransmit_ms", 1, 10000), ("peer_timeout_s", 1, 86400),
            ("seed", 0, (1 << 32) - 1),
        ):
            if not low <= getattr(self, name) <= high:
                (place / name).fail(f"{getattr(self, name)} is not between {low} and {high}")
        for name, known, least in (("buffer_bytes", BUFFER_BYTES, 16384), ("max_threads", MAX_THREADS, 96)):
            for key, value in getattr(self, name).items():
                if key not in known or not least <= value <= 1 << 26:
                    (place / name / key).fail(f"not one of {', '.join(known)} with a value from {least}")
        for key, value in self.buffer_bytes.items():
            # A step's slot is an eighth; LL128 needs whole slices of 2048 wire bytes.
            grain = 8 * (2048 if key == "ll128" else 512)
            if value % grain:
                (place / "buffer_bytes" / key).fail(f"{value} is not a multiple of {grain}")

    @property
    def wire_family(self) -> Family:
        return family_of(self.family)

    @property
    def buffers(self) -> dict[str, int]:
        return {**BUFFER_BYTES, **self.buffer_bytes}

    @property
    def threads(self) -> dict[str, int]:
        return {**MAX_THREADS, **self.max_threads}

    @property
    def slots(self) -> list[int]:
        """Bytes of a step's slot for LL, LL128, SIMPLE and point-to-point."""
        return [*(self.buffers[name] // 8 for name in ("ll", "ll128", "simple")), P2P_SLOT]

    def ring(self, channel: int, ranks: int) -> tuple[int, ...]:
        """Ranks of a channel in ring order, rank 0 first. Raises UserError if `rings` does not hold these ranks."""
        if not self.rings:
            return tuple(range(ranks))
        if len(self.rings) not in (1, self.channels):
            (Place(VARIABLE) / "rings").fail(f"{len(self.rings)} rings for {self.channels} channels")
        order = self.rings[channel if len(self.rings) > 1 else 0]
        if sorted(order) != list(range(ranks)):
            (Place(VARIABLE) / "rings").fail(f"{order} does not name each of {ranks} ranks once")
        zero = order.index(0)
        return tuple(order[zero:] + order[:zero])

    def shared(self) -> dict[str, Any]:
        """What all ranks must agree in."""
        own = ("interface", "address", "seed", "retransmit_ms", "peer_timeout_s", "window", "traffic_class")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
