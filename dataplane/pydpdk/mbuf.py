"""One packet buffer, by hand: for tests and small tools. At speed buffers never come near Python."""

from __future__ import annotations

from typing import Any

from dataplane.pydpdk.errors import check, check_pointer
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mempool import Mempool
from dataplane.pydpdk.resource import Resource

__all__ = ["Mbuf"]


class Mbuf(Resource):
    """A buffer of `pool`, holding one frame: `Mbuf(pool, b"...")`. Closing gives it back.

    Ownership moves: what was put on a Ring or came from a Port belongs to whoever has it now, so `release`
    says "no longer mine" without giving the buffer back.

    Raises:
        DpdkError: the pool is empty, or the frame does not fit into one buffer.
    """

    def __init__(self, pool: Mempool, data: bytes = b"", *, pointer: Any = None) -> None:
        """pointer: an mbuf that already exists (from Ring.take, Port.receive), which this then owns."""
        pool.require_open()
        self.pointer = pointer
        if pointer is None:
            self.pointer = check_pointer(lib.fc_mbuf_alloc(pool.pointer), f"a buffer of {pool!r}")
            rc = lib.fc_mbuf_fill(self.pointer, data, len(data))
            if rc:
                lib.fc_mbuf_free(self.pointer)
                check(rc, f"{len(data)} bytes into one buffer of {pool!r}", f"frames of at most {pool.room} bytes")
        super().__init__(pool)

    @property
    def data(self) -> bytes:
        """The whole frame, also one that lies in several buffers."""
        self.require_open()
        out = ffi.new("uint8_t[]", len(self))
        lib.fc_mbuf_read(self.pointer, out)
        return bytes(ffi.buffer(out))

    @property
    def segments(self) -> int:
        """Buffers that the frame lies in."""
        self.require_open()
        return int(lib.fc_mbuf_segments(self.pointer))

    def __len__(self) -> int:
        self.require_open()
        return int(lib.fc_mbuf_length(self.pointer))

    def release(self) -> Any:
        """The pointer; this object is closed and the buffer is the caller's."""
        self.require_open()
        pointer, self.pointer = self.pointer, None
        self.close()
        return pointer

    def _release(self) -> None:
        if self.pointer is not None:
            lib.fc_mbuf_free(self.pointer)

    def __repr__(self) -> str:
        return f"Mbuf({'closed' if self.closed else len(self)})"
