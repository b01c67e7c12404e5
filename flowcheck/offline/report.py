"""The report: what was seen, what was placed, what is missing and why, as data. summary.py has the words.

Legal use: make one `Report`, call `add_iteration` once per iteration in order as it is judged (it hashes the bucket
bytes, so the arena may be reused afterwards), `add_traffic` at the end, fill the other fields whenever they are known,
then `write_report`. docs/reference/report.md describes every key of the JSON. One thread at a time.

Honesty rules: a bucket's hash is given only if every element was placed; otherwise each placed range has
its own. Iterations asked for and never seen are counted as incomplete. Nothing is rounded to "complete".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from parser.machine import Engine

from dataplane.pcapfile import PcapInfo
from flowcheck.durable import write_atomic
from flowcheck.errors import InternalError
from flowcheck.job.model import dtype_size
from flowcheck.rebuild.iteration.evidence import BucketCoverage, packets_by_outcome
from flowcheck.rebuild.iteration.verdict import Verdict
from flowcheck.rebuild.plan import JobPlan

__all__ = [
    "SCHEMA", "BroadcastReport", "BucketReport", "CaptureReport", "CheckpointReport", "FlowReport", "IterationReport",
    "PlacedRange", "Report", "broadcast_report", "bucket_report", "drops_of", "write_report",
]

SCHEMA = "flowcheck/report/1"


@dataclass(frozen=True)
class CaptureReport:
    """One file. skipped: frames that were not looked at, by what they are. left_out: bytes at its end that could not
    be read, left_out_why: the reason, "" if there are none."""

    path: str
    packets: int
    bytes: int
    format: str = ""
    skipped: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    left_out_why: str = ""


@dataclass(frozen=True)
class FlowReport:
    """One flow. role: gradients, control, parameters, other. src, dst (ranks), channel: None if unknown.

    packets: RoCE packets seen. missing: packets that its PSNs skip. duplicates: seen again with the same
    content at the same place. retransmissions: sent again after a loss. icrc_wrong: wrong invariant CRC.
    state: the flow's state at the end; detail: one sentence if something is odd.
    """

    role: str
    src: int | None
    dst: int | None
    channel: int | None
    src_addr: str
    dst_addr: str
    qpns: list[int]
    packets: int
    missing: int
    duplicates: int
    retransmissions: int
    icrc_wrong: int
    state: str = ""
    detail: str = ""


@dataclass(frozen=True)
class PlacedRange:
    """Elements [start, end) and the SHA-256 of their bytes."""

    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class BucketReport:
    index: int
    dtype: str
    elements: int
    placed_elements: int
    complete: bool
    sha256: str | None
    placed: list[PlacedRange]
    missing: dict[str, int]


@dataclass(frozen=True)
class BroadcastReport:
    """Parameters learnt from a broadcast. sha256 over all bytes, None unless complete."""

    names: list[str]
    bytes: int
    placed_bytes: int
    complete: bool
    sha256: str | None


@dataclass(frozen=True)
class IterationReport:
    """gathered: parameter groups of the iteration's AllGathers, in the form of buckets."""

    iteration: int
    buckets: list[BucketReport]
    verdict: Verdict
    gathered: list[BucketReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        buckets = [dataclasses.asdict(bucket) for bucket in self.buckets]
        gathered = [dataclasses.asdict(group) for group in self.gathered]
        verdict = self.verdict.to_dict()
        return {"iteration": self.iteration, "verdict": verdict, "buckets": buckets, "gathered": gathered}


@dataclass(frozen=True)
class CheckpointReport:
    """The last checkpoint written. status: unverified or verified. dtype: of a parameter checkpoint, else ""."""

    step: int
    path: str
    status: str
    dtype: str = ""


@dataclass
class Report:
    """Everything about one run. iterations_asked: how many the user asked for, None: as many as there are.

    drops: packets that carried nothing into the arena, by cause. stages: seconds by stage. seconds: wall
    clock of the whole run. learnt: docs/use/learn.md, None with a manifest. trust: marks for what
    rests on the manifest's word. failure: why not all that was asked is done. notes: sentences for the reader that fit
    nowhere else.
    """

    run_id: str = ""
    iterations_asked: int | None = None
    captures: list[CaptureReport] = field(default_factory=list)
    flows: list[FlowReport] = field(default_factory=list)
    broadcasts: list[BroadcastReport] = field(default_factory=list)
    iterations: list[IterationReport] = field(default_factory=list)
    drops: dict[str, int] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoint: CheckpointReport | None = None
    parameter_checkpoint: CheckpointReport | None = None
    learnt: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    trust: list[str] = field(default_factory=list)
    failure: str = ""

    def __post_init__(self) -> None:
        self._gradients, self._gathered = hashlib.sha256(), hashlib.sha256()

    def add_iteration(
        self, buckets: Sequence[BucketCoverage], verdict: Verdict, gathered: Sequence[BucketCoverage] = ()
    ) -> IterationReport:
        """Hash an iteration's buckets and append it. Raises InternalError if the verdict contradicts them."""
        reports = [bucket_report(bucket) for bucket in buckets]
        groups = [bucket_report(group) for group in gathered]
        if verdict.complete and not all(report.complete for report in reports + groups):
            raise InternalError(f"iteration {verdict.iteration} was judged complete with elements missing")
        if verdict.complete:
            for bucket in buckets:
                self._gradients.update(_bytes(bucket.data))
            for group in gathered:
                self._gathered.update(_bytes(group.data))
        self.iterations.append(IterationReport(verdict.iteration, reports, verdict, groups))
        return self.iterations[-1]

    def add_traffic(self, plan: JobPlan, engine: Engine, captures: Sequence[PcapInfo]) -> None:
        """What has become of all packets: by cause, and by flow and capture. Read off the engine."""
        self.drops = drops_of(plan, engine)
        self.captures = [
            CaptureReport(i.path, i.packet_count, i.size, i.format, i.skipped, i.left_out, i.left_out_why)
            for i in captures
        ]
        self.notes += [note for info in captures for note in info.notes]
        streams = [engine.flow_counters(stream) for stream in range(plan.engine.streams)]
        data = "gradients" if plan.job.gradient_calls(0) else "parameters"
        for i, spec in enumerate(plan.engine.flows):
            seen = [counters[i] for counters in streams if counters[i]["seen"]]
            flow = plan.job.flows[spec.edge]
            ends, addresses = (flow.src, flow.dst), flow.addresses(spec.qp)
            if not spec.data:
                ends, addresses = ends[::-1], addresses[::-1]
            for c in seen or [streams[0][i]]:  # one line per capture that carries it
                self.flows.append(FlowReport(
                    data if spec.data else "control", *ends, flow.channel, *addresses, [spec.qpn], c["packets"],
                    c["missing"], c["duplicates"], c["retransmissions"], c["icrc_wrong"],
                    c["state"] if spec.data else "", "" if c["seen"] else "no packet of it is in the captures",
                ))
        if plan.parameters:
            first, last = plan.parameters[0].offset, plan.parameters[-1]
            names, end = [place.name for place in plan.parameters], last.offset + last.nbytes
            gaps = engine.missing(None, first // 8, -(-end // 8))
            placed = end - first - sum(min(8 * int(stop), end) - 8 * int(start) for start, stop in gaps)
            self.broadcasts = [broadcast_report(names, engine.region(None)[first:end], placed)]

    @property
    def complete(self) -> list[IterationReport]:
        return [iteration for iteration in self.iterations if iteration.verdict.complete]

    def _any(self, what: str) -> bool:
        """Did any complete iteration bring such data?"""
        return any(getattr(iteration, what) for iteration in self.complete)

    @property
    def expected(self) -> int:
        return len(self.iterations) if self.iterations_asked is None else self.iterations_asked

    @property
    def ok(self) -> bool:
        """Every iteration asked for is complete, there is at least one, and nothing else failed."""
        return bool(self.complete) and len(self.complete) >= self.expected and not self.failure

    @property
    def unproven(self) -> list[str]:
        marks = {mark for iteration in self.iterations for mark in iteration.verdict.unproven}
        return sorted(marks | set(self.trust))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; docs/reference/report.md describes each key."""
        packets = sum(capture.packets for capture in self.captures)
        size = sum(capture.bytes for capture in self.captures)
        seconds = self.seconds or None
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "ok": self.ok,
            "failure": self.failure,
            "totals": {
                "iterations_asked": self.iterations_asked,
                "iterations_seen": len(self.iterations),
                "iterations_complete": len(self.complete),
                "iterations_published": sum(i.verdict.publishable for i in self.iterations),
                "elements": sum(b.elements for i in self.iterations for b in i.buckets),
                "placed_elements": sum(b.placed_elements for i in self.iterations for b in i.buckets),
                "gradients_sha256": self._gradients.hexdigest() if self._any("buckets") else None,
                "gathered_elements": sum(g.elements for i in self.iterations for g in i.gathered),
                "placed_gathered_elements": sum(g.placed_elements for i in self.iterations for g in i.gathered),
                "gathered_sha256": self._gathered.hexdigest() if self._any("gathered") else None,
                "packets": packets,
                "bytes": size,
            },
            "unproven": self.unproven,
            "checkpoint": _checkpoint(self.checkpoint),
            "parameter_checkpoint": _checkpoint(self.parameter_checkpoint, "dtype"),
            "captures": [dataclasses.asdict(capture) for capture in self.captures],
            "flows": [dataclasses.asdict(flow) for flow in self.flows],
            "parameters": [dataclasses.asdict(broadcast) for broadcast in self.broadcasts],
            "iterations": [iteration.to_dict() for iteration in self.iterations],
            "drops": dict(self.drops),
            "stages": dict(self.stages),
            "throughput": {
                "seconds": self.seconds,
                "packets_per_second": packets / seconds if seconds else None,
                "bits_per_second": 8 * size / seconds if seconds else None,
            },
            "learnt": self.learnt,
            "notes": list(self.notes),
        }


def _checkpoint(checkpoint: CheckpointReport | None, *more: str) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {key: getattr(checkpoint, key) for key in ("step", "path", "status", *more)}


def drops_of(plan: JobPlan, engine: Engine) -> dict[str, int]:
    """Packets that carried nothing into the arena, by cause."""
    found = packets_by_outcome(plan, engine)
    drops = {what: n for what, n in found.items() if n and what not in ("placed", "compared", "encapsulated")}
    return drops | {f"encapsulated: {what}": packets for what, packets in engine.encapsulated().items()}


def bucket_report(bucket: BucketCoverage) -> BucketReport:
    """Hashes of a bucket: of all of it if every element was placed, of each placed range always."""
    data, place = _bytes(bucket.data), bucket.place
    size, reach, placed = dtype_size(place.dtype), 0, []
    for start, end in bucket.placed:
        if not reach <= start < end <= place.elements:
            what = f"placed range [{start}, {end}) of {place.elements} elements"
            raise InternalError(f"bucket {place.index}: {what}")
        reach = end
        digest = hashlib.sha256(data[start * size : end * size])
        placed.append(PlacedRange(start, end, digest.hexdigest()))
    count = sum(part.end - part.start for part in placed)
    complete = count == place.elements
    return BucketReport(
        place.index, place.dtype, place.elements, count, complete,
        hashlib.sha256(data).hexdigest() if complete else None, placed, dict(bucket.missing),
    )


def broadcast_report(names: Sequence[str], data: np.ndarray, placed_bytes: int) -> BroadcastReport:
    """Parameters of one broadcast, their bytes in the order of names."""
    raw = _bytes(data)
    complete = placed_bytes == len(raw)
    digest = hashlib.sha256(raw).hexdigest() if complete else None
    return BroadcastReport(list(names), len(raw), placed_bytes, complete, digest)


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the JSON so that a reader sees the old file or the new one. Raises EnvironmentProblem."""
    path = Path(path)
    write_atomic(path, json.dumps(report.to_dict(), indent=1).encode() + b"\n")
    return path


def _bytes(data: np.ndarray) -> memoryview:
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")
