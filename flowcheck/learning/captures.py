"""Captures through DPDK for learning: traced once for starts and TCP, again for the payloads that are wanted."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from parser.observer import Observer

from dataplane.capture import memory_needed
from dataplane.pcapfile import scan
from dataplane.pydpdk.eal import Eal
from flowcheck.diagnose.reading import capture_errors, observe
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.learning.assignment import Assignment, assign
from flowcheck.learning.bootstrap import Stream, parse_bootstrap, reassemble
from flowcheck.learning.connections import connections
from flowcheck.learning.hints import Hints
from flowcheck.learning.job import Learnt, Observations, Progress, learn_from
from flowcheck.learning.logs import LogFacts, merge, parse_log
from flowcheck.learning.messages import Flow

__all__ = ["assign_channels", "learn", "observations_of", "read_logs", "streams_of"]

PayloadRequest = tuple[bytes, bytes, int, int, int]  # source, destination, destination QP, first PSN, end PSN

LOG_LIMIT = 1 << 30
PACKETS_MAX = 1 << 18  # of one announcement: 64 MiB at the smallest path MTU


def learn(
    captures: Sequence[str | os.PathLike[str]], hints: Hints, logs: Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
) -> Learnt:
    """Learn the job of these captures. progress: called with (hypotheses tried, of how many) now and then.

    Raises:
        UserError: a capture or log cannot be read, the job is not supported, or it is ambiguous.
        EnvironmentProblem: DPDK or this machine refused.
    """
    if not captures:
        raise UserError("no capture was given", remedy="name one or more pcap or pcapng files")
    log = read_logs(logs)
    with capture_errors():
        infos = [scan(path) for path in captures]
        with Eal.start(memory_mb=memory_needed(infos).total_mb) as eal:

            def trace(wanted: Sequence[PayloadRequest] = ()) -> Observer:
                seen = Observer(messages=True, requests=wanted)
                observe(eal, infos, seen)
                return seen

            learnt = learn_from(observations_of(trace, log), hints, progress)
    learnt.missing += [note for info in infos for note in info.notes]
    return learnt


def assign_channels(captures: Sequence[str | os.PathLike[str]], job: Job) -> Assignment:
    """Find in these captures which of the job's connections is which channel; the channels that it has are not looked
    at. Raises as `learn`, and UserError where not exactly one assignment is left."""
    if not captures:
        raise UserError("no capture was given", remedy="name one or more pcap or pcapng files")
    with capture_errors():
        infos = [scan(path) for path in captures]
        with Eal.start(memory_mb=memory_needed(infos).total_mb) as eal:
            seen = Observer(messages=True)
            observe(eal, infos, seen)
            return assign(job, job.flows, connections(seen.flow_list(), seen.start_records()))


def observations_of(trace: Callable[..., Observer], log: LogFacts) -> Observations:
    """What packets show. trace(wanted=()): passes over all captures."""
    seen = trace()
    flows = seen.flow_list()
    known: dict[PayloadRequest, bytes | None] = {}

    def read(wanted: list[tuple[Flow, int, int]]) -> list[bytes | None]:
        requests: list[PayloadRequest] = [
            (ipaddress.ip_address(f.src).packed, ipaddress.ip_address(f.dst).packed, f.qpn, low, high)
            for f, low, high in wanted
        ]
        new = [request for request in dict.fromkeys(requests) if request not in known]
        if new:  # every hypothesis asks for the same few messages: read the captures once for them
            again = trace(new)
            ends = [(f["src"], f["dst"], f["id"]) for f in again.flow_list()]
            payloads: dict[tuple[bytes, bytes, int, int], bytes] = {}
            for flow, psn, payload in again.payloads():
                payloads.setdefault((*ends[flow], psn), payload)
            for src, dst, qpn, low, high in new:
                places = [(src, dst, qpn, psn) for psn in range(low, min(high, low + PACKETS_MAX))]
                whole = high - low <= PACKETS_MAX and all(place in payloads for place in places)
                known[src, dst, qpn, low, high] = b"".join(payloads[place] for place in places) if whole else None
        return [known[request] for request in requests]

    return Observations(
        connections(flows, seen.start_records()), parse_bootstrap(streams_of(seen)), log, read,
        seen.counters()["encrypted"], sum(f["packets"] for f in flows), _unread(seen),
    )


def _unread(seen: Observer) -> dict[str, int]:
    """Packets with RoCEv2 inside, or perhaps, that the trace could not look at, by cause."""
    counted = seen.counters()
    causes = {"truncated": counted["cut_roce"], "icrc": counted["wrong_icrc"]}
    causes |= {f"encapsulated: {what}": packets for what, packets in counted["encapsulated"].items()}
    return {cause: packets for cause, packets in causes.items() if packets}


def streams_of(trace: Observer) -> list[Stream]:
    """Every TCP direction of a trace, reassembled."""
    flows = trace.flow_list()
    segments: dict[int, list[tuple[int, int, bytes]]] = {}
    for flow, *segment in trace.tcp_segments():
        segments.setdefault(flow, []).append(tuple(segment))
    out = []
    for f, kept in ((flows[flow], kept) for flow, kept in segments.items()):
        source, destination = (str(ipaddress.ip_address(f[side])) for side in ("src", "dst"))
        out.append(Stream((source, f["id"] >> 16), (destination, f["id"] & 0xFFFF), *reassemble(kept)))
    return out


def read_logs(paths: Sequence[str | os.PathLike[str]]) -> LogFacts:
    """All logs as one. Raises UserError, also for a file that is not a log of NCCL's."""
    parts = []
    for path in map(Path, paths):
        try:
            with path.open("rb") as stream:
                raw = stream.read(LOG_LIMIT + 1)
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read the log: {getattr(error, 'strerror', None) or error}", where=str(path),
                remedy="give an existing, readable text file with --nccl-log",
            ) from None
        if len(raw) > LOG_LIMIT:
            raise UserError(
                f"larger than {LOG_LIMIT >> 20} MiB", where=str(path), remedy="give the log's lines with 'NCCL' only"
            )
        text = raw.decode("utf-8", "replace")
        if "NCCL" not in text:
            raise UserError(
                "no line of NCCL's is in it", where=str(path),
                remedy="run the job with NCCL_DEBUG=INFO and give its output",
            )
        parts.append(parse_log(text))
    return merge(parts)
