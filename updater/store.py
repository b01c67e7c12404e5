"""Memory of a replica: a file in tmpfs or hugetlbfs that outlives the process, or anonymous memory.

    0       magic, format, sizes, hash of the layout, CRC of all that       (written once, before the file has its name)
    128     one header per slot, each on a cache line of its own           (state, check, step: one 8-byte store)
    512     the newest step that was verified, in the same form             (0: none)
    576     the newest step that the trainers have said they made, likewise  (0: unsaid)
    640     when each slot's version was published, on a cache line each    (ns since 1970, written before its header)
    1024    remarks on the version of each slot, 768 bytes each             (length, text; written before its header)
    4096    the layout as JSON: run, epoch, entries, arrays of a slot      (so that a reader needs nothing else)
    ...     constants, once; then V slots of equal size, arrays on cache lines

A slot is complete from the one store of its header on and not before: `kill -9` between two stores leaves the version
before. A slot header whose check does not fit, a size, CRC or hash that does not fit: the file is refused.

Who may do what: one process writes (it holds a lock on the file). Others open read-only and pin a slot with a shared
lock on the slot's byte; the writer takes the exclusive lock of a slot before it builds in it, and lets go of it before
it says that the version is there. The kernel drops the locks of a process that dies, so no pin outlives its reader.
Locks are of the open file (F_OFD_SETLK), one per pin.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from updater.errors import NoRoom, ReplicaError
from updater.memory import anonymous

__all__ = ["BUILDING", "COMPLETE", "FREE", "MOST_REMARKS", "Array", "Store", "plan_arrays"]

MAGIC, FORMAT = b"FCREPLIC", 2
_HEADER = struct.Struct("<8sIIQQQQI4x32s")  # magic, format, slots, size, json bytes, first slot, stride, pad, hash
_CRC = struct.Struct("<I")
_CRC_AT = 120
_WORDS, _VERIFIED, _HEARD, _TIMES, _REMARKS, _LINE, _TEXT = 128, 512, 576, 640, 1024, 64, 4096
_REMARK = 768  # bytes of a slot, its length included
MOST_REMARKS = _REMARK - 2
FREE, BUILDING, COMPLETE = 0, 1, 2
_WRITER = 64  # byte of the writer's lock; a slot's is its index


@dataclass(frozen=True)
class Array:
    """One array: `role` p (parameter or fp32 master), m, v, x (states), low (bf16/fp16 copy), raw, fixed, steps,
    options (of the groups, in the step that made the version)."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def plan_arrays(wanted: list[tuple[str, str, str, tuple[int, ...]]]) -> tuple[list[Array], int]:
    """Arrays (name, role, dtype, shape) one behind the other, each on a cache line; and their size together."""
    out, offset = [], 0
    for name, role, dtype, shape in wanted:
        array = Array(name, role, dtype, shape, offset)
        out.append(array)
        offset += -(-array.nbytes // _LINE) * _LINE
    return out, offset


class Store:
    """The mapped memory. Make one with `create`, `attach` (to go on writing) or `read`."""

    def __init__(
        self, memory: mmap.mmap, fd: int, layout: dict[str, Any], constants: int, first: int, stride: int
    ) -> None:
        self.memory, self.fd, self.layout = memory, fd, layout
        self._locks = -1  # the writer's own opening of the file: mmap keeps a duplicate of fd, and with it its locks
        self._constants_at, self._first, self._stride = constants, first, stride
        self.slots = int(layout["slots"])
        self.constants = [_array(item) for item in layout["constants"]]
        self.arrays = [_array(item) for item in layout["arrays"]]
        self._headers = np.frombuffer(memory, np.uint64, count=8 * self.slots, offset=_WORDS)[::8]
        self._mark = np.frombuffer(memory, np.uint64, count=1, offset=_VERIFIED)
        self._heard = np.frombuffer(memory, np.uint64, count=1, offset=_HEARD)
        self._times = np.frombuffer(memory, np.uint64, count=8 * self.slots, offset=_TIMES)[::8]

    # -- making one --

    @classmethod
    def create(cls, layout: dict[str, Any], path: Path | None) -> Store:
        """Fresh memory for `layout` (keys slots, constants, arrays and whatever identifies the job).

        With a path the file has no name until `publish_file`. Raises ReplicaError.
        """
        text = json.dumps(layout, sort_keys=True).encode()
        constants = _after(len(text))
        first = constants + -(-extent(layout["constants"]) // _TEXT) * _TEXT
        stride = -(-extent(layout["arrays"]) // _TEXT) * _TEXT
        size = first + int(layout["slots"]) * stride
        if path is None:
            memory, fd = anonymous(size), -1
        else:
            memory, fd, size = _new_file(path, size)
        head = _HEADER.pack(
            MAGIC, FORMAT, int(layout["slots"]), size, len(text), first, stride, 0, hashlib.sha256(text).digest()
        )
        memory[: len(head)] = head
        memory[_CRC_AT : _CRC_AT + 4] = _CRC.pack(zlib.crc32(head))
        memory[_TEXT : _TEXT + len(text)] = text
        store = cls(memory, fd, layout, constants, first, stride)
        store._path = path
        for slot in range(store.slots):
            store.set_slot_header(slot, FREE, 0)
        return store

    _path: Path | None = None

    def publish_file(self) -> None:
        """Give a created file its name, now that it holds a complete version. Refuses to replace one."""
        if self._path is None:
            return
        folder = -1
        try:
            folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            # With a directory's descriptor Python asks for the link to be followed; without one it cannot be asked.
            os.link(f"/proc/self/fd/{self.fd}", self._path.name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            raise _there(self._path) from None
        except OSError as error:
            raise ReplicaError(f"{self._path}: cannot be created: {error.strerror}") from None
        finally:
            if folder >= 0:
                os.close(folder)

    @classmethod
    def attach(cls, path: Path, not_mine: Callable[[os.stat_result], str] | None = None) -> Store:
        """An existing file, to go on writing; only one process may. not_mine: as of `read`."""
        store = cls._open(path, write=True, not_mine=not_mine)
        store.lock_writer(path)
        return store

    @classmethod
    def read(cls, path: Path, not_mine: Callable[[os.stat_result], str] | None = None) -> Store:
        """An existing file, read-only. not_mine: why not, by whose it is; then a link is not followed. It is asked
        before anything is mapped: who shortens a file that is mapped ends this process (SIGBUS)."""
        return cls._open(path, write=False, not_mine=not_mine)

    @classmethod
    def _open(cls, path: Path, write: bool, not_mine: Callable[[os.stat_result], str] | None = None) -> Store:
        links = os.O_NOFOLLOW if not_mine is not None else 0
        try:
            fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | links)
        except OSError as error:
            raise ReplicaError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            if not_mine is not None and (why := not_mine(os.fstat(fd))):
                raise ReplicaError(f"{path}: {why}")
            memory, layout, constants, first, stride = cls._map(path, fd, write)
        except BaseException:
            os.close(fd)
            raise
        store = cls(memory, fd, layout, constants, first, stride)
        for slot in range(store.slots):
            if store.slot_header(slot) is None:
                store.close()
                raise ReplicaError(f"{path}: not a replica that can be used: the header of slot {slot} is damaged")
        return store

    @staticmethod
    def _map(path: Path, fd: int, write: bool) -> tuple[mmap.mmap, dict[str, Any], int, int, int]:
        def refuse(why: str) -> ReplicaError:
            return ReplicaError(f"{path}: not a replica that can be used: {why}")

        found = os.fstat(fd).st_size
        if found < 2 * _TEXT:
            raise refuse(f"{found} bytes are too few")
        try:
            memory = mmap.mmap(fd, found, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
        except (OSError, ValueError) as error:
            raise refuse(f"cannot be mapped: {error}") from None
        head = memory[: _HEADER.size]
        magic, version, slots, size, length, first, stride, _, digest = _HEADER.unpack(head)
        if magic != MAGIC:
            raise refuse("another kind of file")
        if version != FORMAT:
            raise refuse(f"format {version}, this is {FORMAT}")
        if _CRC.unpack(memory[_CRC_AT : _CRC_AT + 4])[0] != zlib.crc32(head):
            raise refuse("the header is damaged")
        if size != found or not 2 <= slots <= 4 or first + slots * stride > size or _TEXT + length > first:
            raise refuse(f"{found} bytes do not fit the header's {size}")
        text = memory[_TEXT : _TEXT + length]
        if hashlib.sha256(text).digest() != digest:
            raise refuse("the layout's hash does not fit")
        constants = _after(length)
        try:
            layout = json.loads(text)
            spans = [(extent(layout["constants"]), first - constants), (extent(layout["arrays"]), stride)]
            sound = layout["slots"] == slots and all(0 <= need <= room for need, room in spans)
            items = [*layout["constants"], *layout["arrays"]]
            sound = sound and min((item["offset"] for item in items), default=0) >= 0
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            sound = False
        if not sound:
            raise refuse("the layout is none of ours")
        return memory, layout, constants, first, stride

    def close(self) -> None:
        """Let go of the file and its locks; tensors over the memory stay valid. May be called twice."""
        held = self.fd, self._locks
        self.fd = self._locks = -1  # before anything is closed: another thread's number it may be by then
        for fd in held:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()

    # -- slot headers --

    def set_slot_header(self, slot: int, state: int, step: int) -> None:
        """One aligned 8-byte store; all data of the slot must have been fenced before."""
        self._headers[slot] = _packed(state, step)

    def slot_header(self, slot: int) -> tuple[int, int] | None:
        """(state, step), or None if it is not one that was written."""
        return _read(int(self._headers[slot]))

    def mark_verified(self, step: int) -> None:
        """This step was compared with the trainer's own state, and is equal."""
        self._mark[0] = _packed(COMPLETE, step)

    def set_remarks(self, slot: int, text: bytes) -> None:
        """What is to be said of the version in a slot that is being built; at most MOST_REMARKS bytes."""
        if len(text) > MOST_REMARKS:
            raise ValueError(f"{len(text)} bytes of remarks, at most {MOST_REMARKS}")
        at = _REMARKS + slot * _REMARK
        self.memory[at : at + 2 + len(text)] = len(text).to_bytes(2, "little") + text

    def remarks(self, slot: int) -> bytes:
        """Of a slot that is complete, and pinned: else they may be another version's."""
        at = _REMARKS + slot * _REMARK
        length = min(int.from_bytes(self.memory[at : at + 2], "little"), MOST_REMARKS)
        return self.memory[at + 2 : at + 2 + length]

    def mark_heard(self, step: int) -> None:
        """The trainers have made this step."""
        self._heard[0] = _packed(COMPLETE, step)

    @property
    def heard(self) -> int | None:
        """The newest step that the trainers are known to have made, None: nobody has said so."""
        found = _read(int(self._heard[0]))
        return found[1] if found is not None and found[0] == COMPLETE else None

    def set_time(self, slot: int, at: int) -> None:
        """When the version in a slot was published, in nanoseconds since 1970."""
        self._times[slot] = at

    def time(self, slot: int) -> int:
        """0: unsaid."""
        return int(self._times[slot])

    @property
    def verified(self) -> int | None:
        """The newest step that was marked so, None: none."""
        found = _read(int(self._mark[0]))
        return found[1] if found is not None and found[0] == COMPLETE else None

    def newest(self) -> int | None:
        """The complete slot with the highest step."""
        found = self.complete()
        return found[max(found)] if found else None

    def complete(self) -> dict[int, int]:
        """step -> slot of every complete version."""
        found = [(self.slot_header(i) or (FREE, 0), i) for i in range(self.slots)]
        return {step: i for (state, step), i in found if state == COMPLETE}

    # -- arrays --

    def tensors(self, slot: int | None) -> dict[tuple[str, str], torch.Tensor]:
        """(name, role) -> tensor over the memory of a slot, or of the constants (None)."""
        base = self._constants_at if slot is None else self._first + slot * self._stride
        return {(a.name, a.role): self._tensor(a, base) for a in (self.constants if slot is None else self.arrays)}

    def _tensor(self, array: Array, base: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, array.dtype)
        count = math.prod(array.shape)
        if not count:
            return torch.empty(array.shape, dtype=dtype, device="cpu")
        with warnings.catch_warnings():  # torch has no read-only tensors; writing to a reader's is a fault
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=base + array.offset).view(array.shape)

    # -- locks --

    def lock_slot(self, slot: int) -> bool:
        """Exclusive, for building. False while a reader in another process pins it."""
        return self._locks < 0 or lock(self._locks, slot, fcntl.F_WRLCK)

    def unlock_slot(self, slot: int) -> None:
        if self._locks >= 0:
            lock(self._locks, slot, fcntl.F_UNLCK)

    def pin(self, slot: int) -> int | None:
        """A descriptor that pins the slot until it is closed; None while the writer builds in it."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        if lock(fd, slot, fcntl.F_RDLCK):
            return fd
        os.close(fd)
        return None

    def lock_writer(self, path: Path | None) -> None:
        """Be the one process that writes, until `close`."""
        if self.fd < 0:
            return
        self._locks = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        if not lock(self._locks, _WRITER, fcntl.F_WRLCK):
            self.close()
            raise ReplicaError(f"{path}: another process is writing to this replica")


def lock(fd: int, byte: int, kind: int) -> bool:
    """A lock on one byte of an open file description, without waiting."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _packed(state: int, step: int) -> np.uint64:
    return np.uint64(step << 16 | _check(state, step) << 8 | state)


def _read(value: int) -> tuple[int, int] | None:
    state, step = value & 0xFF, value >> 16
    return (state, step) if state <= COMPLETE and value >> 8 & 0xFF == _check(state, step) else None


def _check(state: int, step: int) -> int:
    folded = state ^ 0xA5
    for byte in step.to_bytes(6, "little"):
        folded ^= byte
    return folded


def _after(length: int) -> int:
    """Where the page after so many bytes of JSON begins."""
    return -(-(_TEXT + length) // _TEXT) * _TEXT


def extent(arrays: list[dict[str, Any]]) -> int:
    """Bytes from the first array's begin to the end of the last one's last cache line."""
    return max((_array(item).offset + -(-_array(item).nbytes // _LINE) * _LINE for item in arrays), default=0)


def _array(item: Mapping[str, Any]) -> Array:
    return Array(item["name"], item["role"], item["dtype"], tuple(item["shape"]), int(item["offset"]))


def _there(path: Path) -> ReplicaError:
    return ReplicaError(f"{path}: already there; attach to it or remove it")


def _new_file(path: Path, size: int) -> tuple[mmap.mmap, int, int]:
    """A file of whole pages of its file system (2 MiB on hugetlbfs), all memory reserved now.

    It has no name yet: a process that dies before `publish_file` leaves nothing behind.
    """
    if path.exists():
        raise _there(path)
    try:
        page = os.statvfs(path.parent).f_bsize
        size = -(-size // page) * page
        fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReplicaError(f"{path}: cannot be created: {error.strerror}") from None
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size, mmap.MAP_SHARED), fd, size
    except OSError as error:
        os.close(fd)
        raise NoRoom(f"{path}: {size:,} bytes cannot be reserved: {error.strerror}") from None
