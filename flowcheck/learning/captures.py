"""Captures through DPDK for learning: traced once for starts and TCP, again for the payloads that are wanted."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from parser.observer import Observer

from dataplane.capture import memory_needed
from dataplane.pcapfile import scan
from dataplane.pydpdk.eal import Eal
from flowcheck.diagnose.reading import capture_errors, observe
from flowcheck.errors import UserError
from flowcheck.learning.bootstrap import Stream, parse_bootstrap, reassemble
from flowcheck.learning.connections import connections
from flowcheck.learning.hints import Hints
from flowcheck.learning.job import Facts, Learnt, Progress, learn_from
from flowcheck.learning.logs import LogFacts, merge, parse_log
from flowcheck.learning.traffic import Queue

__all__ = ["facts_of", "learn", "read_logs", "streams_of"]

_Wish = tuple[bytes, bytes, int, int, int]  # source, destination, destination QP, first PSN, end PSN

LOG_LIMIT = 1 << 30
PIECE_LIMIT = 64 << 20  # of one announcement


def learn(
    captures: Sequence[str | os.PathLike[str]], hints: Hints, logs: Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
) -> Learnt:
    """Learn the job of these captures. progress: told (hypotheses tried, of how many) now and then.

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

            def trace(wanted: Sequence[_Wish] = ()) -> Observer:
                seen = Observer(messages=True, requests=wanted)
                observe(eal, infos, seen)
                return seen

            return learn_from(facts_of(trace, log), hints, progress)


def facts_of(trace, log: LogFacts) -> Facts:  # type: ignore[no-untyped-def]
    """Facts of packets. trace(wanted=()) -> Observer: passes over all captures."""
    seen = trace()
    flows = seen.flow_list()

    known: dict[_Wish, bytes | None] = {}

    def read(wanted: list[tuple[Queue, int, int]]) -> list[bytes | None]:
        wishes: list[_Wish] = [
            (ipaddress.ip_address(q.src).packed, ipaddress.ip_address(q.dst).packed, q.qpn, low, high)
            for q, low, high in wanted
        ]
        new = [wish for wish in dict.fromkeys(wishes) if wish not in known]
        if new:  # every hypothesis asks for the same few messages: read the captures once for them
            known.update(zip(new, fetch(new), strict=True))
        return [known[wish] for wish in wishes]

    def fetch(wishes: list[_Wish]) -> list[bytes | None]:
        again = trace(wishes)
        names = again.flow_list()
        pieces: dict[tuple[bytes, bytes, int], dict[int, bytes]] = {}
        for flow, psn, payload in again.payloads():
            f = names[flow]
            pieces.setdefault((f["src"], f["dst"], f["id"]), {}).setdefault(psn, payload)
        out: list[bytes | None] = []
        for src, dst, qpn, low, high in wishes:
            have = pieces.get((src, dst, qpn), {})
            whole = high - low <= PIECE_LIMIT // 256 and all(psn in have for psn in range(low, high))
            out.append(b"".join(have[psn] for psn in range(low, high)) if whole else None)
        return out

    return Facts(
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
    for flow, seq, flags, payload in trace.tcp_segments():
        segments.setdefault(flow, []).append((seq, flags, payload))
    out = []
    for flow, kept in segments.items():
        f = flows[flow]
        data, begun = reassemble(kept)
        source, destination = (str(ipaddress.ip_address(f[side])) for side in ("src", "dst"))
        out.append(Stream((source, f["id"] >> 16), (destination, f["id"] & 0xFFFF), data, begun))
    return out


def read_logs(paths: Sequence[str | os.PathLike[str]]) -> LogFacts:
    """All logs as one. Raises UserError, also for a file that is no log of NCCL's."""
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
