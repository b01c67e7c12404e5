"""`flowcheck inspect`: what is in captures, with no job given.

    scan every file -> one file after the other through a DPDK port -> Observer -> interpret -> text or JSON

The packets take the same way as in replay. Files are read in the order given, so the parts of a rotated
capture count as one stream; captures of several ports may be mixed, a flow shows in which of them it was.
The JSON's keys are listed in docs/use/inspect.md and belong to SCHEMA.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from parser.observer import Observer
from rich.console import Console
from rich.markup import escape

from dataplane.capture import memory_needed
from dataplane.live import LiveConfig, LiveSource, start_eal
from dataplane.pcapfile import CaptureFileError, PcapInfo, scan
from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck.diagnose.reading import IDLE_SECONDS, observe
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.tables import Column, print_table, screen
from parser.findings import interpret, ranks_of

__all__ = ["SCHEMA", "document_of", "render", "run", "survey_captures", "survey_interface", "survey_live"]

SCHEMA = "flowcheck-inspect/1"
ROWS = 64  # a human reads no more; --json has all
ALONE = {  # by what is known of a flow's other direction
    "absent": "Flows with no partner in the capture", "unknown": "Flows whose partner is not known",
    None: "Flows that have no partner",
}


def run(captures: list[Path], as_json: bool, interface: str | None = None, seconds: float = 5.0) -> int:
    """Inspects the files, or an interface for some seconds, and prints to stdout. Returns the exit status, 0.

    Raises:
        UserError: no file, a file that is not a usable capture, or more files than can be distinguished.
        EnvironmentProblem: DPDK or this machine refused.
    """
    if interface and captures:
        raise UserError("captures and an interface were given", remedy="give captures or --interface, not both")
    found = survey_interface(interface, seconds) if interface else survey_captures(captures)
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        render(found, screen())
    return 0


def survey_captures(captures: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Everything found, as the dictionary that --json prints. Errors as run()."""
    if not captures:
        raise UserError("no capture was given", remedy="name one or more pcap or pcapng files")
    if len(captures) > 64:
        raise UserError(f"{len(captures)} captures, at most 64", remedy="join them: mergecap -a -w OUT IN...")
    try:
        infos = [scan(path) for path in captures]
        survey = _through_dpdk(infos)
    except CaptureFileError as exc:
        raise UserError(exc.what, where=f"{exc.path}, byte {exc.offset}", remedy=exc.remedy) from exc
    except DpdkError as exc:
        raise EnvironmentProblem(exc.what, remedy=exc.remedy) from exc
    return document_of(infos, survey.report())


def _through_dpdk(infos: list[PcapInfo]) -> Observer:
    survey = Observer()
    needed = max(memory_needed([info]).total_mb for info in infos)
    with Eal.start(memory_mb=needed) as eal:
        observe(eal, infos, survey)
    return survey


def survey_interface(interface: str, seconds: float) -> dict[str, Any]:
    """The same of what arrives at a kernel interface for some seconds. Nothing is transmitted there.

    Raises:
        EnvironmentProblem: no such interface, no privilege, or DPDK refused.
    """
    survey = Observer()
    try:
        config = LiveConfig(f"af_packet:{interface}")
        with start_eal(config) as eal, LiveSource(eal, config) as source:
            source.start()
            survey_live([source], survey, seconds)
            source.stop()
            for ring in source.ring_addresses:
                while survey.drain(ring):
                    pass
            if source.error is not None:
                raise source.error
    except DpdkError as exc:
        raise EnvironmentProblem(exc.said, where=interface, remedy=exc.remedy) from exc
    document = document_of([], survey.report())
    count, size = document["packets"]["total"], sum(flow["bytes"] for flow in document["flows"])
    document["captures"] = [
        {"path": interface, "format": "live", "packets": count, "bytes": size, "snap_length": 0,
         "cut_packets": document["packets"]["truncated"], "skipped": {}, "left_out_bytes": 0, "left_out_why": ""}
    ]
    return document


def survey_live(
    sources: Sequence[LiveSource], survey: Observer, seconds: float, look: Callable[[], None] = lambda: None
) -> None:
    """Give the observer what comes to sources that were started, for some seconds, or until none of them goes on. look:
    called again and again meanwhile."""
    rings = [ring for source in sources for ring in source.ring_addresses]
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(source.finished for source in sources):
        if not sum(survey.drain(ring) for ring in rings):
            time.sleep(IDLE_SECONDS)
        look()


def document_of(infos: Sequence[PcapInfo], observed: dict[str, Any]) -> dict[str, Any]:
    """What was observed, interpreted. infos: of the files that it was in."""
    flows = observed["flows"]
    document = {
        "schema": SCHEMA,
        "captures": [
            {
                "path": info.path, "format": info.format, "packets": info.packet_count,
                "bytes": info.captured_bytes, "snap_length": info.snaplen,
                "cut_packets": info.truncated_packets, "skipped": info.skipped, "left_out_bytes": info.left_out,
                "left_out_why": info.left_out_why,
            }
            for info in infos
        ],
        "packets": observed["packets"],
        "first_ns": observed["first_ns"], "last_ns": observed["last_ns"],
        "icrc": {
            "ok": sum(flow["icrc"]["ok"] for flow in flows),
            "wrong": sum(flow["icrc"]["wrong"] for flow in flows),
        },
        "noise": observed["noise"],
        "unknown": observed["unknown"],
        "encapsulated": observed["encapsulated"],
        "bootstrap_handshakes": observed["bootstrap_handshakes"],
        "unlisted_flow_packets": observed["unlisted_flow_packets"],
    }
    found = interpret(observed)
    said = [{"level": "warning", "text": text, "flow": None} for info in infos for text in info.notes]
    return {**document, "connections": found["connections"], "flows": found["flows"], "notes": said + found["notes"]}


# -- for people -------------------------------------------------------------------------------------------


def render(found: dict[str, Any], console: Console) -> None:
    """The document as text: connections, then other flows, noise, drops, notes."""
    flows, connections = found["flows"], found["connections"]
    names = _endpoints(connections, flows)
    _print_captures(console, found)
    if names:
        _print_endpoints(console, names, flows, ranks_of(connections))
    if connections:
        _print_connections(console, connections, flows, names)
    for partner, title in ALONE.items():
        alone = [flow for flow in flows if flow["partner"] == partner]
        if alone:
            _print_alone(console, alone, names, title)
    _print_noise(console, found)
    _print_notes(console, found["notes"], flows, names)


def _endpoints(connections: list[dict[str, Any]], flows: list[dict[str, Any]]) -> dict[str, str]:
    """Short names for addresses (two IPv6 addresses fill half a line), those with connections first."""
    seen: dict[str, None] = {}
    for c in connections:
        seen.update({c["source"]: None, c["destination"]: None})
    for flow in flows:
        seen.update({flow["src"]: None, flow["dst"]: None})
    return {address: _letters(number) for number, address in enumerate(seen)}


def _letters(number: int) -> str:
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def _print_captures(console: Console, found: dict[str, Any]) -> None:
    for capture in found["captures"]:
        console.print(f"{escape(capture['path'])}: {capture['packets']} packets, {capture['bytes']} bytes")
    packets, icrc = found["packets"], found["icrc"]
    line = f"RoCEv2 {packets['roce']}, other traffic {packets['not_roce']}"
    if icrc["ok"] or icrc["wrong"]:
        line += f"; ICRC right {icrc['ok']}, wrong {icrc['wrong']}"
    if found["last_ns"]:
        line += f"; {(found['last_ns'] - found['first_ns']) / 1e9:.3f} s"
    console.print(line)


def _print_endpoints(
    console: Console, names: dict[str, str], flows: list[dict[str, Any]], ranks: dict[str, list[int]]
) -> None:
    columns = [Column(""), Column("address"), Column("rank (CTS tag)", folds=True), Column("sent", number=True),
               Column("received", number=True)]
    rows = []
    for address, name in list(names.items())[:ROWS]:
        sent = sum(flow["packets"] for flow in flows if flow["src"] == address)
        received = sum(flow["packets"] for flow in flows if flow["dst"] == address)
        rank = ", ".join(map(str, ranks.get(address, []))) or "unknown"
        rows.append((name, address, rank, str(sent), str(received)))
    print_table(console, columns, rows, "Addresses")
    _print_rest(console, len(names))


def _print_rest(console: Console, rows: int) -> None:
    if rows > ROWS:
        console.print(f"... and {rows - ROWS} more; --json lists all")


def _print_connections(
    console: Console, connections: list[dict[str, Any]], flows: list[dict[str, Any]], names: dict[str, str]
) -> None:
    columns = [
        Column("", number=True), Column("way"), Column("QP to/back"), Column("carries", folds=True),
        Column("messages", folds=True),
        *(Column(name, number=True) for name in ("MTU", "packets", "back", "missing", "again", "NAK")),
    ]
    rows = []
    for number, c in enumerate(connections[:ROWS], 1):
        data, back = flows[c["data_flow"]], flows[c["back_flow"]]
        rows.append((
            str(number), f"{names[c['source']]}>{names[c['destination']]}",
            f"{c['data_qp']:#x}/{c['back_qp']:#x}", _carries(c, data), _messages(data),
            str(data["mtu"] or back["mtu"] or "?"), str(data["packets"]), str(back["packets"]),
            *_sequence(data, back), str(_naks(back) + _naks(data)),
        ))
    print_table(console, columns, rows, "Connections (both directions captured)")
    _print_rest(console, len(connections))
    _print_reasons(console, connections[:ROWS], flows)


def _print_reasons(console: Console, shown: list[dict[str, Any]], flows: list[dict[str, Any]]) -> None:
    """Why a connection is called what it is called, once per reason."""
    reasons: dict[str, list[str]] = {}
    for number, c in enumerate(shown, 1):
        protocol = flows[c["data_flow"]]["protocol"]
        if c["is"] != "NCCL":
            continue
        if c["nccl_versions"]:
            text = f"NCCL {c['nccl_versions']} by the layout of its clear-to-send writes"
            reasons.setdefault(text, []).append(str(number))
        if protocol is not None:
            word = {"sure": "", "probable": "probably "}.get(protocol["certainty"], "protocol ")
            reasons.setdefault(f"{word}{protocol['name']}: {protocol['because']}", []).append(str(number))
    for text, numbers in reasons.items():
        who = "all" if len(numbers) == len(shown) else ", ".join(numbers)
        console.print(f"  {who}: {text}")
    ways = sorted({c["paired_by"] for c in shown})
    console.print(f"  directions paired by {' and '.join(ways)}")


def _carries(c: dict[str, Any], data: dict[str, Any]) -> str:
    if c["is"] != "NCCL":
        return str(data["kind"])
    protocol = data["protocol"]
    name = protocol["name"] if protocol is not None else "nothing yet"
    mark = "" if protocol is not None and protocol["certainty"] == "sure" else "?"
    pairs = " AR" if data["messages"]["adaptive_routing_pairs"] else ""
    qps = f" 1/{c['qps']} QPs" if c["qps"] and c["qps"] > 1 else ""
    return f"NCCL {'' if name == 'unknown' else name}{mark}{pairs}{qps}"


def _messages(flow: dict[str, Any]) -> str:
    messages = flow["messages"]
    sizes = sorted(messages["sizes"].items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count}x{size}" for size, count in sizes[:2])
    more = len(sizes) - 2 + messages["other_sizes"]
    if messages["sends"]:
        shown = f"{shown}, {messages['sends']} sends" if shown else f"{messages['sends']} sends"
    return f"{shown}, +{more}" if more > 0 else shown


def _sequence(*flows: dict[str, Any]) -> tuple[str, str]:
    """Requests missing, and requests seen again (repeated or late), over these flows."""
    sequences = [flow["requests"] for flow in flows if flow["requests"]]
    missing = sum(s["missing"] for s in sequences)
    again = sum(s["duplicates"] + s["late"] + s["before_first"] for s in sequences)
    return str(missing), str(again)


def _naks(flow: dict[str, Any]) -> int:
    answers = flow["answers"]
    return answers["rnr_naks"] + sum(answers["naks"].values()) if answers else 0


def _print_alone(console: Console, alone: list[dict[str, Any]], names: dict[str, str], title: str) -> None:
    columns = [
        Column("way"), Column("QP to"), Column("what", folds=True), Column("messages", folds=True),
        *(Column(name, number=True) for name in ("packets", "missing", "again", "ICRC wrong")),
    ]
    rows = []
    for flow in alone[:ROWS]:
        protocol = flow["protocol"]
        kind = flow["kind"]
        if kind == "NCCL data" and protocol is not None:
            kind += f" {protocol['name']}{'' if protocol['certainty'] == 'sure' else '?'}"
        rows.append((
            f"{names[flow['src']]}>{names[flow['dst']]}", f"{flow['dest_qp']:#x}", kind, _messages(flow),
            str(flow["packets"]), *_sequence(flow), str(flow["icrc"]["wrong"]),
        ))
    print_table(console, columns, rows, title)
    _print_rest(console, len(alone))


def _print_noise(console: Console, found: dict[str, Any]) -> None:
    if found["noise"]:
        parts = (f"{name.replace('_', ' ')} {count}" for name, count in found["noise"].items())
        console.print(f"[bold]Other traffic[/bold]: {', '.join(parts)}")
    if found["unknown"]:
        parts = (f"{name} {count}" for name, count in found["unknown"].items())
        console.print(f"[bold]By number[/bold]: {', '.join(parts)}")
    packets = found["packets"]
    drops = {name: packets[name] for name in ("truncated", "malformed", "fragment")}
    drops.update({f"encapsulated: {name}": count for name, count in found["encapsulated"].items()})
    drops["wrong ICRC"] = found["icrc"]["wrong"]
    text = ", ".join(f"{name} {count}" for name, count in drops.items())
    console.print(f"[bold]Never placed[/bold]: {text}")


def _print_notes(
    console: Console, notes: Iterable[dict[str, Any]], flows: list[dict[str, Any]], names: dict[str, str]
) -> None:
    lines = []
    for note in notes:
        where = ""
        if note["flow"] is not None:
            flow = flows[note["flow"]]
            where = f"{names[flow['src']]}>{names[flow['dst']]} QP {flow['dest_qp']:#x}: "
        style = "bold yellow" if note["level"] == "warning" else "bold"
        lines.append(f"[{style}]{note['level']}[/{style}]: {where}{note['text']}")
    for line in lines[:ROWS]:
        console.print(line)
    _print_rest(console, len(lines))
