"""A log of a node's, read from the network: base and entries, from which a trainer's own optimizer redoes its steps.

    source = LogSource(node, offer)
    head = source.head()                        what there is; the node is asked for no more than that
    with source.opened() as log:                from the beginning, each time
        for data in log.pieces(): ...           what a base is made of, as a trainer has encoded it
        for entry in log.entries(step): ...     iterations before `step`, one by one

    the file    8 bytes: how long the JSON after them is | that JSON, a sealed head | the pieces | the entries
    an entry    8 bytes: how long the JSON after them is | that JSON: its head as the node has kept it, and a sum of
                each span | the spans: its buckets, in order

Nothing of it is believed: sizes are checked before memory is taken, and each piece and span is held against its sum
before it is handed on. Entries come one by one, so that no more than one takes memory. Torch and the standard library.
One thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import MOST_NBYTES, Offer
from flowcheck.ask.receiving import AskError, Stream
from flowcheck.control.checksum import sum_text
from flowcheck.control.tensors import of_text
from flowcheck.control.version import MODEL, OPTIMIZER, Version, is_sealed
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job

__all__ = ["FILE", "SCHEMA", "LogEntry", "LogHead", "LogSource", "OpenLog", "makes"]

FILE, SCHEMA = "log.bin", "flowcheck/log/1"
HEAD_BYTES = 1 << 28
MOST_PARTS = 1 << 20  # pieces, or entries
_FIELDS = {"run_id": str, "epoch": int, "shard": str, "first": int, "job": dict, "pieces": list, "entries": list}
_RECORD = {"groups": list, "skipped": bool, "checksums": dict}


def makes(job: Job, steps: Sequence[int], entries: range) -> range:
    """Steps that can be made. steps: of the pieces of a base. entries: iterations that are there, without a hole.
    Buffers are as the record before a step says, so a step that follows no entry lacks them."""
    if min(steps) < entries.start:
        return range(0)
    buffers = any(entry.kind == "buffer" for entry in job.model)
    return range(max(steps) + buffers, entries.stop + 1)


@dataclass(frozen=True)
class LogEntry:
    """Of an iteration, by the trainer's number. record: as a step record has it. buffers: after it. buckets: uint8."""

    iteration: int
    record: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    buckets: Sequence[bytearray]


@dataclass(frozen=True)
class LogHead:
    """job: its manifest. first: the trainer's number of the manifest's iteration 0. pieces: (step that it is of, bytes,
    sum). entries: bytes of each. begins: the iteration of the first."""

    run_id: str
    epoch: int
    shard: str
    job: Job
    first: int
    pieces: tuple[tuple[int, int, str], ...]
    entries: tuple[int, ...]
    begins: int

    @property
    def steps(self) -> range:
        """That can be made of it."""
        return makes(self.job, [step for step, _, _ in self.pieces],
                     range(self.begins, self.begins + len(self.entries)))

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.pieces) + sum(self.entries)

    @classmethod
    def of(cls, data: bytes, where: str) -> LogHead:
        """Raises AskError."""
        try:
            said = json.loads(data)
            if said["schema"] != SCHEMA or not is_sealed(said):
                raise ValueError("another schema, or changed since it was written")
            if any(type(said[name]) is not kind for name, kind in _FIELDS.items()):
                raise ValueError("a field is not what every log has")
            if max(len(said["pieces"]), len(said["entries"])) > MOST_PARTS or not said["pieces"]:
                raise ValueError("no pieces, or too many parts")
            pieces = tuple((step, nbytes, str(text)) for step, nbytes, text in said["pieces"])
            entries = tuple((number, nbytes) for number, nbytes in said["entries"])
            counts = [one for pair in (*(piece[:2] for piece in pieces), *entries) for one in pair]
            if any(type(one) is not int or not 0 <= one <= MOST_NBYTES for one in counts):
                raise ValueError("a number is none")
            if any(b[0] != a[0] + 1 for a, b in pairwise(entries)):
                raise ValueError("an entry is missing")
            job = job_from_dict(said["job"], where="job")
        except UserError as error:
            raise AskError(f"is of a job that is none: {error.what}", where=where) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise AskError(f"is no log: {error}", where=where) from None
        begins = entries[0][0] if entries else min(step for step, _, _ in pieces)
        return cls(said["run_id"], said["epoch"], said["shard"], job, said["first"], pieces,
                   tuple(nbytes for _, nbytes in entries), begins)


class OpenLog:
    """Pieces first, then entries: each once, in order."""

    def __init__(self, stream: Stream, head: LogHead, where: str) -> None:
        self._stream, self.head, self._where = stream, head, where
        self._buckets: list[bytearray] = []  # of the last entry, whose memory the next one takes

    def pieces(self) -> Iterator[bytearray]:
        """Raises AskError."""
        for number, (_, nbytes, text) in enumerate(self.head.pieces):
            yield self._part(nbytes, text, f"piece {number} of its base")

    def entries(self, step: int) -> Iterator[LogEntry]:
        """Those of iterations before `step`, whose buckets hold until the next is asked for. Raises AskError."""
        for iteration, nbytes in enumerate(self.head.entries, self.head.begins):
            if iteration >= step:
                return
            yield self._entry(iteration, nbytes)

    def _entry(self, iteration: int, nbytes: int) -> LogEntry:
        what = f"iteration {iteration}"
        length = int.from_bytes(self._stream.take(8), "little")
        if length > min(HEAD_BYTES, nbytes - 8):
            raise AskError(f"{what} has a head of {length} bytes in {nbytes}", where=self._where)
        try:
            said = json.loads(self._stream.take(length))
            spans = [(size, str(text)) for size, text in said["spans"]]
            record = said["head"]["record"]
            if said["head"]["iteration"] != iteration or any(type(record[k]) is not t for k, t in _RECORD.items()):
                raise ValueError("another iteration's, or without a record")
            for name in ("clip", "scale"):
                if record[name] is not None and type(record[name]) not in (int, float):
                    raise ValueError(f"{name} is no number")
            if any(type(size) is not int or size < 0 for size, _ in spans):
                raise ValueError("a size is none")
            buffers = {str(name): of_text(*one) for name, one in said["head"]["buffers"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            raise AskError(f"the head of {what} is none: {error}", where=self._where) from None
        if sum(size for size, _ in spans) != nbytes - 8 - length:
            raise AskError(f"{what} has other sizes than its head says", where=self._where)
        before, self._buckets = self._buckets, []
        for number, (size, text) in enumerate(spans):
            kept = before[number] if number < len(before) and len(before[number]) == size else None
            self._buckets.append(self._part(size, text, f"bucket {number} of {what}", kept))
        return LogEntry(iteration, record, buffers, self._buckets)

    def _part(self, nbytes: int, text: str, what: str, kept: bytearray | None = None) -> bytearray:
        """kept: memory of as many bytes that nobody needs any more."""
        try:
            data = bytearray(nbytes) if kept is None else kept
        except MemoryError:
            raise AskError(f"no memory for {nbytes} bytes: {what}", where=self._where) from None
        self._stream.fill([memoryview(data)])
        if sum_text(data) != text:
            raise AskError(f"{what} has other bytes than its head says", where=self._where)
        return data


class LogSource:
    """node: used by this alone."""

    def __init__(self, node: NodeClient, offer: Offer) -> None:
        self.node, self.offer = node, offer
        self.where = f"{node.name}, {offer.tier}"

    @contextmanager
    def opened(self) -> Iterator[OpenLog]:
        """Raises AskError."""
        try:
            stream = Stream(self.node.connection, f"/v1/versions/{self.offer.id}/{FILE}", self.where, MOST_NBYTES)
            length = int.from_bytes(stream.take(8), "little")
            if length > min(HEAD_BYTES, stream.size - 8):
                raise AskError(f"a head of {length} bytes in {stream.size}", where=self.where)
            head = LogHead.of(stream.take(length), self.where)
            if (due := head.nbytes + 8 + length) != stream.size:
                raise AskError(f"has {stream.size} bytes, and its head says {due}", where=self.where)
            said = (head.run_id, head.epoch, head.shard)
            if said != (self.offer.run_id, self.offer.epoch, self.offer.shard):
                raise AskError(f"is of {said}, and another was offered", where=self.where)
            if self.offer.step not in head.steps:
                raise AskError(f"step {self.offer.step} cannot be made of it any more", where=self.where)
            yield OpenLog(stream, head, self.where)
        finally:
            self.node.close()

    def head(self) -> LogHead:
        """Raises AskError."""
        with self.opened() as log:
            return log.head

    def version(self) -> Version:
        """What is known of the step before it is redone."""
        one = self.offer
        return Version(one.run_id, one.epoch, one.step, one.shard, one.status, (), {}, "", {MODEL: {}, OPTIMIZER: {}},
                       0, one.start)
