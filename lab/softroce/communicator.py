"""One NCCL communicator on the fabric: connections, plans, operations in issue order, and its end.

    Communicator(settings, store, rank, size, timeout_s)
        .start(kind, count, dtype, root, source, target, work)     addresses of memory that `work` keeps alive
        .send(peer, ...), .receive(peer, ...)
        .describe()                                                manifest's communicator and this rank's flows
        .calls(since)                                              collectives so far, in the manifest's form
        .close()

`start` may be called from any thread; the order of the calls is the order on the wire, and all ranks must call
alike. Point-to-point connections are made with a pair's first message. The completion thread completes works.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from datetime import timedelta
from itertools import islice
from typing import Any

from lab.softroce.bootstrap import Bootstrap
from lab.softroce.connect import Connection, Connector
from lab.softroce.nic import Nic
from lab.softroce.primitives import Planner, edges
from lab.softroce.settings import Settings
from lab.softroce.work import SoftRoceWork

__all__ = ["Calls", "Communicator"]

MOST_CALLS = 65537  # kept from the beginning, and from the end: one more than an attachment takes
_LINGER_S = 5.0


class Calls:
    """What was asked for, in order: the first `most` and the last `most`. One thread at a time."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._first: list[dict[str, Any]] = []
        self._last: deque[dict[str, Any]] = deque(maxlen=most)

    def add(self, call: dict[str, Any]) -> None:
        (self._first if self._count < self._most else self._last).append(call)
        self._count += 1

    def since(self, number: int) -> list[dict[str, Any]]:
        """Those that are kept, without the first `number` of all; what it costs goes with how many they are."""
        last = min(max(self._count - number, 0), len(self._last))
        return self._first[number:] + list(islice(reversed(self._last), last))[::-1]


class Communicator:
    """size >= 2. timeout: seconds for peers to appear, and for an operation to go on. Raises RuntimeError naming what
    failed if the ranks do not find each other or disagree in their settings."""

    def __init__(self, settings: Settings, store: Any, rank: int, size: int, timeout: float) -> None:
        self.settings, self.rank, self.size = settings, rank, size
        self._store, self._closed = store, False
        self._pairs: dict[tuple[int, bool], tuple[int, int]] = {}
        self._lock = threading.Lock()  # issue order
        self._calls = Calls(MOST_CALLS)
        self._nic = Nic.of(settings)
        self._boot: Bootstrap | None = None
        try:
            family, cts = settings.wire_family, settings.wire_family.cts_fields
            assert cts["addr"] == (0, 8), "sr_engine.h has the address of a CTS element at its beginning"
            self._number = self._nic.engine.communicator(
                mtu=settings.mtu, qps=settings.qps_per_connection, split_on_qps=settings.split_data_on_qps,
                adaptive_routing=settings.adaptive_routing, ar_threshold=settings.ar_threshold,
                big_endian_imm=family.big_endian_imm, slots=settings.slots,
                cts=(family.cts_bytes, *cts["size"], cts["rkey"][0], cts["nreqs"][0], cts["tag"][0], cts["idx"][0]),
                peer_timeout_ns=int(min(settings.peer_timeout_s, timeout) * 1e9),
            )
            self._meet(timeout)
        except OSError as error:
            self._give_up()
            raise RuntimeError(f"softroce: rank {rank} cannot connect to its peers: {error}") from None
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._boot is not None:
            self._boot.close()
        self._nic.release()

    def _meet(self, timeout: float) -> None:
        settings, rank, size = self.settings, self.rank, self.size
        own = {"mac": self._nic.mac.hex(), "address": self._nic.address.hex(), "settings": settings.shared()}
        self._store.set(f"softroce/rank/{rank}", json.dumps(own))
        everybody = [json.loads(self._store.get(f"softroce/rank/{peer}")) for peer in range(size)]
        self._store.set(f"softroce/read/{rank}", "")
        for peer, said in enumerate(everybody):
            for key, value in settings.shared().items():
                if said["settings"].get(key) != value:
                    theirs = said["settings"].get(key)
                    with contextlib.suppress(RuntimeError):  # the others are to see it, too, before the store goes
                        read = [f"softroce/read/{peer}" for peer in range(size)]
                        self._store.wait(read, timedelta(seconds=_LINGER_S))
                    raise RuntimeError(f"softroce: {key} is {value!r} at rank {rank} and {theirs!r} at rank {peer}")
        self._addresses = [bytes.fromhex(said["address"]) for said in everybody]
        patience = min(settings.peer_timeout_s, timeout)  # all of them are here: they have read each other's settings
        self._boot = Bootstrap(rank, size, self._store, settings.address, settings.wire_family, patience)
        macs = [bytes.fromhex(said["mac"]) for said in everybody]
        self._connector = Connector(self._nic, settings, self._number, self._boot, macs, self._addresses)
        self._connections: list[Connection] = []
        for graph, wanted in edges(settings, size).items():
            self._connections += self._connector.graph(graph, wanted)
        self._planner = Planner(
            settings, rank, size, {(c.channel, c.src): c.number for c in self._connections if c.dst == rank},
            {(c.channel, c.dst): c.number for c in self._connections if c.src == rank},
            [self._nic.engine.lane() for _ in range(settings.channels)],
        )

    # -- operations -------------------------------------------------------------------------------------------

    def start(self, kind: str, count: int, dtype: str, root: int, source: int, target: int, work: SoftRoceWork) -> None:
        """kind, count, dtype, root: primitives.Planner.plan. source, target: addresses; equal if in place."""
        with self._lock:
            self._check()
            plan = self._planner.plan(kind, count, dtype, root)
            if count:
                self._calls.add({"op": kind, "count": count, "dtype": dtype, "root": root})
            self._nic.submit(self._number, plan, source, target, work)

    def calls(self, since: int = 0) -> list[dict[str, Any]]:
        """Collectives so far without the first `since`. Of more than twice MOST_CALLS the middle is forgotten."""
        with self._lock:
            return self._calls.since(since)

    def send(self, peer: int, address: int, size: int, work: SoftRoceWork) -> None:
        self._point_to_point(peer, True, address, size, work)

    def receive(self, peer: int, address: int, size: int, work: SoftRoceWork) -> None:
        self._point_to_point(peer, False, address, size, work)

    def _point_to_point(self, peer: int, outbound: bool, address: int, size: int, work: SoftRoceWork) -> None:
        with self._lock:
            self._check()
            if (peer, outbound) not in self._pairs:
                try:
                    made = self._connector.pair(peer)
                except OSError as error:
                    raise RuntimeError(f"softroce: rank {peer} does not connect to rank {self.rank}: {error}") from None
                for connection in made:
                    self._pairs[peer, connection.src == self.rank] = connection.number, self._nic.engine.lane()
            number, lane = self._pairs[peer, outbound]
            plan = self._planner.point_to_point(number, lane, size, outbound=outbound)
            self._nic.submit(self._number, plan, address, address, work)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("softroce: the process group has been destroyed")

    def abort(self, why: str) -> None:
        """Fail what is under way and everything to come."""
        self._nic.engine.abort(self._number, why)

    def counters(self) -> dict[str, int]:
        """Packets of this NIC since it was made, by what happened to them; all communicators together."""
        return self._nic.engine.counters()

    # -- description --------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The sections `communicator` and `flows` of a job manifest; flows of this rank only."""
        s = self.settings
        address = [".".join(str(byte) for byte in raw) for raw in self._addresses]
        return {
            "communicator": {
                "ranks": self.size, "nccl_version": s.family, "protocol": s.protocol.lower(), "algorithm": s.algorithm,
                "channels": s.channels, "rings": [list(s.ring(channel, self.size)) for channel in range(s.channels)],
                "parent_ranks": [], "mtu": s.mtu, "adaptive_routing": s.adaptive_routing,
                "ar_threshold": s.ar_threshold, "qps_per_connection": s.qps_per_connection,
                "split_data_on_qps": s.split_data_on_qps, "devices": 1, "buffer_bytes": s.buffers,
                "max_threads": s.threads,
            },
            "flows": [
                {
                    "src": c.src, "dst": c.dst, "channel": c.channel, "src_addr": address[c.src],
                    "dst_addr": address[c.dst], "qpns": c.qpns, "cts_qpns": c.cts_qpns, "src_addrs": [],
                    "dst_addrs": [],
                }
                for c in self._connections
            ],
        }

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave when nobody needs an answer any more, or after some seconds. Twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._nic.engine.drain(self._number, int(_LINGER_S * 1e9)):
            # A peer whose ACK was lost repeats its packets until this rank, still there, answers.
            with contextlib.suppress(RuntimeError):  # the store may have gone with its server
                self._store.set(f"softroce/done/{self.rank}", "")
                keys = [f"softroce/done/{peer}" for peer in range(self.size)]
                self._store.wait(keys, timedelta(seconds=_LINGER_S))
        self.abort("the process group has been destroyed")
        self._give_up()
