"""Rings of pointers between threads; packets travel through them as Mbufs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import check_pointer
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mbuf import Mbuf
from dataplane.pydpdk.mempool import ANY_SOCKET, Mempool
from dataplane.pydpdk.resource import Resource

__all__ = ["Ring"]


class Ring(Resource):
    """`size` places (a power of two, one of which stays empty).

    `Ring.of(eal, name)` finds one that somebody else made, for example the queue of a net_ring port; closing
    such a one leaves it alone.
    Thread rule: any number of producers and consumers, unless made with single=True: then one of each.

    Raises:
        DpdkError: no memory, the name is taken, or the size is not a power of two.
    """

    def __init__(self, eal: Eal, name: str, size: int, *, single: bool = False, socket: int = ANY_SOCKET) -> None:
        eal.require_open()
        self.name, self._own = name, True
        flags = lib.RING_F_SP_ENQ | lib.RING_F_SC_DEQ if single else 0
        self.pointer = check_pointer(
            lib.rte_ring_create(name.encode(), size, socket, flags), f"ring {name} of {size} places",
            "a power of two, and a name that is free",
        )
        super().__init__(eal)

    @classmethod
    def of(cls, eal: Eal, name: str) -> Self:
        """The ring of that name. DpdkError if it does not exist."""
        eal.require_open()
        self = cls.__new__(cls)
        self.name, self._own = name, False
        self.pointer = check_pointer(lib.rte_ring_lookup(name.encode()), f"ring {name}")
        Resource.__init__(self, eal)
        return self

    def put(self, mbufs: Sequence[Mbuf]) -> int:
        """Hands over as many as there is room for, in order; how many. Those belong to the ring now."""
        self.require_open()
        pointers = ffi.new("void *[]", [mbuf.pointer for mbuf in mbufs])
        count = int(lib.fc_ring_put(self.pointer, pointers, len(mbufs)))
        for mbuf in mbufs[:count]:
            mbuf.release()
        return count

    def take(self, pool: Mempool, most: int = 32) -> list[Mbuf]:
        """Up to `most` packets, which belong to `pool`, in order, without waiting."""
        self.require_open()
        pointers: Any = ffi.new("void *[]", most)
        count = lib.fc_ring_get(self.pointer, pointers, most)
        return [Mbuf(pool, pointer=ffi.cast("struct rte_mbuf *", pointers[i])) for i in range(count)]

    def __len__(self) -> int:
        self.require_open()
        return int(lib.rte_ring_count(self.pointer))

    @property
    def capacity(self) -> int:
        self.require_open()
        return int(lib.rte_ring_get_capacity(self.pointer))

    def _release(self) -> None:
        if self._own:
            lib.rte_ring_free(self.pointer)

    def __repr__(self) -> str:
        return f"Ring({self.name!r})"
