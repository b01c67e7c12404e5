"""Pools of packet buffers."""

from __future__ import annotations

from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import check_pointer
from dataplane.pydpdk.ffi import lib
from dataplane.pydpdk.resource import Resource

__all__ = ["ANY_SOCKET", "HEADROOM", "Mempool", "mempool_bytes"]

HEADROOM = 128  # RTE_PKTMBUF_HEADROOM of every distribution build
_MBUF = 128  # struct rte_mbuf: two cache lines by contract
_OBJECT = 128  # object header and padding between objects
_FIXED = 512 * 1024  # pool structure, its index ring, per-core caches (128 cores)
ANY_SOCKET = -1


def mempool_bytes(count: int, room: int, *, page: int = 4096) -> int:
    """Upper bound of the memory that a pool of `count` buffers of `room` bytes takes.

    page: of the memory it lies in, 2 << 20 for huge pages. A buffer never crosses into a page it does not fill,
    so without huge pages a buffer of 2,500 bytes takes one page and one of 4,700 bytes two.
    """
    each = _OBJECT + _MBUF + HEADROOM + -(-room // 64) * 64 + 16
    whole = page / (page // each) if each <= page else -(-each // page) * page
    return int(count * whole) + page + _FIXED


class Mempool(Resource):
    """`count` buffers with room for `room` packet bytes each. Larger frames take several.

    socket: NUMA node, ANY_SOCKET for none in particular.
    Thread rule: buffers may be taken and given back by any thread known to DPDK.

    Raises:
        DpdkError: no memory, or the name is taken.
    """

    def __init__(
        self, eal: Eal, name: str, count: int, room: int, *, cache: int = 128, socket: int = ANY_SOCKET
    ) -> None:
        if not 0 < room <= 0xFFFF - HEADROOM:
            raise ValueError(f"pool {name}: room {room} is not in 1..{0xFFFF - HEADROOM}")
        eal.require_open()
        self.name, self.count, self.room = name, count, room
        self.pointer = check_pointer(
            lib.rte_pktmbuf_pool_create(name.encode(), count, min(cache, count // 2), 0, room + HEADROOM, socket),
            f"packet pool {name}: {count} buffers of {room} bytes, {mempool_bytes(count, room) >> 20} MB",
        )
        super().__init__(eal)

    @property
    def available(self) -> int:
        self.require_open()
        return int(lib.rte_mempool_avail_count(self.pointer))

    @property
    def in_use(self) -> int:
        """Buffers out of the pool: 0 after its ports were closed, or something leaked."""
        self.require_open()
        return int(lib.rte_mempool_in_use_count(self.pointer))

    def _release(self) -> None:
        lib.rte_mempool_free(self.pointer)

    def __repr__(self) -> str:
        return f"Mempool({self.name!r}, count={self.count}, room={self.room})"
