"""Bases of a log: what trainers send of parameters and optimizer state, a piece of each parameter, over many steps.

    FOLDER/base-000003/piece-00000     as the trainer has encoded it (flowcheck/trainer/log/codec.py)
    FOLDER/base-000003/base.json       which pieces, of which steps, with their sums; written last: the base is whole

    bases = Bases(folder, most)
    bases.take(message, data)          the group's thread; never waits
    bases.first, bases.under_way       step from which on the newest whole base needs entries; is one being sent?
    bases.drop()                       the one that is being sent is of no use
    bases.settled, bases.later(work)   the step of the newest base that this process has written; on the writing thread
    bases.failure()                    why one was given up since this was asked last, "": none was
    whole_bases(folder), piece_path(...), base_path(...): for whoever serves them, in any process

Parts are written by a thread of its own. What it has not written is bounded: beyond that the base is given up, and
asked for again later. The newest two that are whole are kept.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from flowcheck.control.protocol import Base
from flowcheck.control.version import is_sealed, seal
from flowcheck.durable import make_directory, private, remove_tree, write_atomic
from flowcheck.errors import FlowcheckError, UserError, said_of

__all__ = ["Bases", "Piece", "WholeBase", "base_path", "piece_path", "whole_bases"]

KEPT = 2
WAITING = 256 << 20  # bytes that are not written yet
SCHEMA, FILE, NAME, PIECE = "flowcheck/base/1", "base.json", "base-", "piece-"


@dataclass(frozen=True)
class Piece:
    """Of one parameter. step: that it is of: entries from iteration `step` on are applied to it. sum: of its bytes, as
    the trainer says it: 16 hexadecimal digits (flowcheck/control/checksum.py)."""

    step: int
    nbytes: int
    sum: str


@dataclass(frozen=True)
class WholeBase:
    number: int
    pieces: tuple[Piece, ...]

    @property
    def first(self) -> int:
        """The first iteration of which it needs an entry."""
        return min(piece.step for piece in self.pieces)

    @property
    def step(self) -> int:
        """The oldest step that can be made with it."""
        return max(piece.step for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Bases:
    """folder: of one log. The group's thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failures: SimpleQueue[str] = SimpleQueue()
        found = whole_bases(folder)
        self._number = max((base.number for base in found), default=0)
        self._newest = found[-1] if found else None
        self._pieces: list[Piece] = []  # of the base that is being sent, those that are all here
        self._due: tuple[int, int] | None = None  # piece and place of the part that comes next; None: no base is sent
        self._waiting, self._lock = 0, threading.Lock()
        self.settled: int | None = None
        self._thread = ThreadPoolExecutor(1, "flowcheck bases")

    @property
    def first(self) -> int | None:
        """None: a whole base is not there yet."""
        newest = self._newest
        return newest.first if newest is not None else None

    @property
    def under_way(self) -> bool:
        return self._due is not None

    @property
    def begun(self) -> int | None:
        """The oldest step of what has come of the base that is being sent."""
        return min((piece.step for piece in self._pieces), default=None)

    def drop(self) -> None:
        self._pieces, self._due = [], None

    def failure(self) -> str:
        why = ""
        with suppress(Empty):
            while True:
                why = self._failures.get_nowait()
        if why:
            self._newest = None
            self.drop()
        return why

    def take(self, message: Base, data: bytes) -> WholeBase | None:
        """A part of a piece. The base, when it is all here. Raises UserError: it is not the part that is due."""
        here, end = (message.number, message.first), message.first + len(data)
        if here == (0, 0):
            self._pieces, self._due = [], here
            self._number += 1
        if self._due is None:
            return None  # of one that was given up
        if here != self._due or end > message.total or not data:
            raise UserError(f"byte {message.first} of piece {message.number} of a base, where byte {self._due[1]} of"
                            f" piece {self._due[0]} was due", where="base")
        with self._lock:
            self._waiting += len(data)
            waiting = self._waiting
        if waiting > WAITING:
            self._wrote(len(data))
            self._failures.put("the file system takes it too slowly")
            return None
        self._due, whole = (message.number, end), None
        if end == message.total:
            self._pieces.append(Piece(message.iteration, message.total, message.sum))
            self._due = message.number + 1, 0
            if message.number + 1 == message.of:
                whole = self._newest = WholeBase(self._number, tuple(self._pieces))
                self.drop()
        self._thread.submit(self._write, self._number, message, data, whole)
        return whole

    def _write(self, number: int, message: Base, data: bytes, whole: WholeBase | None) -> None:
        folder = self._folder / f"{NAME}{number:06d}"
        try:
            if (message.number, message.first) == (0, 0):
                remove_tree(folder)
                make_directory(folder)
            last = message.first + len(data) == message.total
            _append(piece_path(self._folder, number, message.number), message.first, data, last)
            if whole is not None:
                self._end(folder, whole)
                self.settled = whole.step
        except (FlowcheckError, OSError) as error:
            self._failures.put(said_of(error))
        finally:
            self._wrote(len(data))

    def _end(self, folder: Path, base: WholeBase) -> None:
        sizes = [path.stat().st_size for path in sorted(folder.glob(f"{PIECE}*"))]
        if sizes != [piece.nbytes for piece in base.pieces]:
            raise FlowcheckError("not all of its pieces are there", where=str(folder))
        said = seal({"schema": SCHEMA, "number": base.number,
                     "pieces": [[piece.step, piece.nbytes, piece.sum] for piece in base.pieces]})
        write_atomic(folder / FILE, json.dumps(said).encode())
        for old in sorted(self._folder.glob(f"{NAME}*"))[:-KEPT]:
            remove_tree(old)

    def later(self, work: Callable[[], None]) -> None:
        """work: on the thread that writes; raises nothing."""
        self._thread.submit(work)

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self._waiting -= nbytes

    def close(self) -> None:
        """What has come is written."""
        self._thread.shutdown()


def _append(path: Path, first: int, data: bytes, last: bool) -> None:
    """Bytes of a file from `first` on, where it ends by now. last: they are on the disk on return."""
    descriptor = private(path, os.O_WRONLY | os.O_CREAT | (0 if first else os.O_EXCL))
    try:
        if os.fstat(descriptor).st_size == first:  # else a part of it could not be written
            left = memoryview(data)
            while left:
                left = left[os.pwrite(descriptor, left, first + len(data) - len(left)) :]
        if last:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_bases(folder: Path) -> list[WholeBase]:
    """Oldest first. What is damaged, or not all there, is left out."""
    found = [base for path in folder.glob(f"{NAME}*/{FILE}") if (base := _read(path)) is not None]
    return sorted(found, key=lambda base: base.number)


def _read(path: Path) -> WholeBase | None:
    try:
        said: Any = json.loads(path.read_text())
        if said["schema"] != SCHEMA or not is_sealed(said):
            return None
        base = WholeBase(said["number"], tuple(Piece(*one) for one in said["pieces"]))
        return base if base.pieces else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def base_path(folder: Path, base: int) -> Path:
    """There as long as the base is."""
    return folder / f"{NAME}{base:06d}" / FILE


def piece_path(folder: Path, base: int, piece: int) -> Path:
    """A piece as the trainer sent it; whoever reads it holds it against its sum."""
    return folder / f"{NAME}{base:06d}" / f"{PIECE}{piece:05d}"
