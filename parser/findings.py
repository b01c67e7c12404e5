"""What a survey's observations mean: which flows are one connection, what each carries, what is wrong.

    Observer.report() -> interpret() -> {flows (with kind and protocol), connections, notes}

Rules only, no state, no input but the dictionary. A word is used when its evidence is in the capture, and
stands next to it (`because`); otherwise the answer is "unknown". NCCL is named only where its own marks are
seen: clear-to-send writes that announce the address of a later write, or LL/LL128 flags that count messages.
Sources: reference text on NCCL's wire format, sections 4 (payload), 5.3 to 5.8 (transport).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from parser.pairing import MANAGEMENT_QPS, Announced, port_partners

__all__ = ["interpret", "ranks_of"]

Flow = dict[str, Any]
P2P_SIZE = 131072


def interpret(survey: dict[str, Any]) -> dict[str, Any]:
    """Adds `id`, `kind`, `protocol`, `mtu` and `partner` to every flow; returns flows, connections and notes."""
    flows: list[Flow] = survey["flows"]
    for number, flow in enumerate(flows):
        flow["id"] = number
        flow["mtu"] = _mtu(flow)
    usable = [f for f in flows if f["dest_qp"] not in MANAGEMENT_QPS and (f["requests"] or f["answers"])]
    announced_by = _announcers(usable)
    announcing = {announcer for found in announced_by.values() for announcer in found}
    announcers = {data: flows[min(found)] for data, found in announced_by.items() if len(found) == 1}
    for flow in flows:
        flow["protocol"] = _protocol(flow, announcers.get(flow["id"])) if _writes(flow) else None
        flow["kind"] = _kind(flow, flow["id"] in announcing, flow["id"] in announced_by)
    connections = [
        _connection(flows[data], flows[back], how, announcers.get(data))
        for data, back, how in _pairs(flows, usable, announcers)
    ]
    connections.sort(key=lambda c: (c["source"], c["destination"], c["data_qp"]))
    _set_partners(survey, flows, connections)
    per_announcer = Counter(c["clear_to_send_flow"] for c in connections)
    for c in connections:
        c["qps"] = per_announcer[c["clear_to_send_flow"]] if c["clear_to_send_flow"] is not None else None
    return {"flows": flows, "connections": connections, "notes": list(_notes(survey, flows, connections))}


# -- one flow ---------------------------------------------------------------------------------------------


def _writes(flow: Flow) -> int:
    return int(flow["messages"]["writes"])


def _count(flow: Flow, *parts: str) -> int:
    return sum(n for name, n in flow["opcodes"].items() if any(part in name for part in parts))


def _mtu(flow: Flow) -> int | None:
    """Path MTU: the largest payload is one exactly, in a message of several packets; else unknown."""
    largest = flow["max_payload"]
    several = _count(flow, "_FIRST", "_MIDDLE") or flow["messages"]["cut_by_nic"]["writes"]
    return largest if several and largest in (256, 512, 1024, 2048, 4096) else None


def _kind(flow: Flow, announces: bool, announced: bool) -> str:
    if flow["icrc"]["ok"] == 0:
        names = set(flow["opcodes"])
        if all(name.startswith("0x") for name in names):
            return "vendor opcode"
        return "wrong ICRC only"
    if flow["dest_qp"] in MANAGEMENT_QPS and _count(flow, "UD_SEND"):
        return "management datagrams"
    if _count(flow, "UD_SEND"):
        return "datagrams"
    if flow["cts"] is not None and (announces or _numbered(flow["cts"])):
        return "NCCL clear-to-send"
    if announced or (flow["protocol"] and flow["protocol"]["name"] in ("LL", "LL128")):
        return "NCCL data"
    if flow["requests"] is None:
        if flow["answers"]:
            return "answers"
        return "congestion notifications" if "CNP" in flow["opcodes"] else "other"
    for part, name in (("WRITE", "writes"), ("SEND", "sends"), ("READ_REQ", "reads")):
        if _count(flow, part):
            return name
    return "atomics" if _count(flow, "CMP_SWAP", "FETCH_ADD") else "other"


def _numbered(cts: dict[str, Any]) -> bool:
    """One small write can look plausible by chance; a numbered series in one FIFO cannot."""
    steps = sum(count for distance, count in cts["fifo_steps"].items() if distance != "other")
    return len(cts["layouts"]) == 1 and steps > 0 and cts["number_jumps"] * 2 < cts["count"]


def _protocol(flow: Flow, announcer: Flow | None) -> dict[str, str]:
    """name: LL | LL128 | SIMPLE | mixed | unknown; certainty: sure | probable | none. The announcer is the
    flow whose clear-to-send writes named the buffers this one wrote to."""
    load, announced = flow["payload"], announcer is not None
    judged = load["ll_packets"] + load["ll128_packets"] + load["raw_packets"]
    steps = f"flags {load['first_flag']} to {load['last_flag']}"
    counts = load["flag_steps"] > 0 and load["flag_jumps"] <= load["flag_steps"]
    for key, name, what in (
        ("ll_packets", "LL", "16-byte lines with two equal flags"),
        ("ll128_packets", "LL128", "128-byte lines that end in one flag"),
    ):
        if load[key] and load[key] == judged and (announced or counts):
            certainty = "sure" if announced and counts else "probable"
            return _said(name, certainty, f"{load[key]} of {judged} packets are {what}, {steps}")
    flagged = load["ll_packets"] + load["ll128_packets"]
    if flagged and judged > flagged and announced:
        return _said(
            "mixed", "sure",
            f"of {judged} packets {load['ll_packets']} carry LL flags, {load['ll128_packets']} LL128 flags, "
            f"{load['raw_packets']} none",
        )
    if announcer is not None and load["raw_packets"]:
        sizes = announcer["cts"]["sizes"]
        if set(sizes) == {P2P_SIZE}:
            return _said("unknown", "none", f"no flags; probably point-to-point, because every clear-to-send "
                         f"announces {P2P_SIZE} bytes, its default chunk")
        named = ", ".join(str(size) for size in sorted(sizes))
        return _said("SIMPLE", "probable", f"no flags in {load['raw_packets']} packets, written where "
                     f"clear-to-send said (announced size {named})")
    if not judged:
        return _said("unknown", "none", "no payload that says anything")
    immediate = flow["messages"]["immediate"]
    sized = immediate["little_endian"] + immediate["big_endian"]
    if sized:
        return _said("unknown", "none", "no flags, immediates equal to the size as NCCL's are; the direction "
                     "with clear-to-send writes is not in the capture")
    return _said("unknown", "none", "no flags, no clear-to-send, no immediate that tells the size: "
                 "nothing here is NCCL's")


def _said(name: str, certainty: str, because: str) -> dict[str, str]:
    return {"name": name, "certainty": certainty, "because": because}


# -- two flows --------------------------------------------------------------------------------------------


def _announcers(usable: list[Flow]) -> dict[int, set[int]]:
    """Data flow -> the flows in the other direction with a clear-to-send for a buffer it wrote into. Several: whose it
    is, is not decided."""
    regions: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    for flow in usable:
        if flow["cts"] is not None:
            regions.setdefault((flow["dst"], flow["src"]), []).extend((flow["id"], *r) for r in flow["cts"]["regions"])
    announced = {ends: Announced(found) for ends, found in regions.items()}
    by = {f["id"]: announced[ends].by(f["regions"]) for f in usable if (ends := (f["src"], f["dst"])) in announced}
    return {data: found for data, found in by.items() if found}


def _pairs(flows: list[Flow], usable: list[Flow], announcers: dict[int, Flow]) -> list[tuple[int, int, str]]:
    """(requests or data, the other direction, how it was found), each flow at most once."""
    ports = {f["id"]: (f["src"], f["dst"], f["dest_qp"], *f["udp_sport"]) for f in usable if len(f["udp_sport"]) == 1}
    partners = port_partners(ports)
    found = [
        (*_oriented(flows[flow], flows[back]), "UDP source port") for flow, back in partners.items() if flow < back
    ]
    taken = {*partners}
    wanted = Counter(announcer["id"] for data, announcer in announcers.items() if data not in taken)
    for data, announcer in announcers.items():
        back = announcer["id"]
        if data not in taken and back not in taken and wanted[back] == 1:
            found.append((data, back, "clear-to-send address"))
            taken |= {data, back}
    return found


def _set_partners(survey: dict[str, Any], flows: list[Flow], connections: list[dict[str, Any]]) -> None:
    """`partner` of each flow: "captured"; "absent", if no flow that might be it is there; "unknown", if one might, or
    packets were not read; None of what has no other direction."""
    paired = {c["data_flow"] for c in connections} | {c["back_flow"] for c in connections}
    packets = survey["packets"]
    unread = survey["unlisted_flow_packets"] or any(
        packets[what] for what in ("truncated", "malformed", "fragment", "encapsulated")
    )
    free = {
        (flow["src"], flow["dst"]) for flow in flows
        if flow["id"] not in paired and (_has_partner(flow) or flow["kind"] == "wrong ICRC only")
    }
    for flow in flows:
        if flow["id"] in paired:
            flow["partner"] = "captured"
        elif not _has_partner(flow):
            flow["partner"] = None
        else:
            flow["partner"] = "unknown" if unread or (flow["dst"], flow["src"]) in free else "absent"


def _has_partner(flow: Flow) -> bool:
    return flow["dest_qp"] not in MANAGEMENT_QPS and flow["kind"] != "datagrams" and bool(
        flow["requests"] or flow["answers"]
    )


def _oriented(a: Flow, b: Flow) -> tuple[int, int]:
    """Data first: the direction that writes or sends more payload."""
    if a["cts"] is None and b["cts"] is not None:
        return a["id"], b["id"]
    if b["cts"] is None and a["cts"] is not None:
        return b["id"], a["id"]
    first = (a["requests"] is not None, a["payload_bytes"]) >= (b["requests"] is not None, b["payload_bytes"])
    return (a["id"], b["id"]) if first else (b["id"], a["id"])


def _connection(data: Flow, back: Flow, how: str, announcer: Flow | None) -> dict[str, Any]:
    if announcer is None and back["kind"] == "NCCL clear-to-send":
        announcer = back
    cts = announcer["cts"] if announcer is not None else None
    split = data["messages"]["immediate"]
    used = set(split["split_little_endian"]) | set(split["split_big_endian"])
    return {
        "data_flow": data["id"], "back_flow": back["id"], "paired_by": how,
        "source": data["src"], "destination": data["dst"],
        "data_qp": data["dest_qp"], "back_qp": back["dest_qp"],
        "is": "NCCL" if cts is not None or data["kind"] == "NCCL data" else "other RDMA",
        "clear_to_send_flow": announcer["id"] if announcer is not None else None,
        "nccl_versions": next(iter(cts["layouts"])) if cts else None,
        "sender_tag": next(iter(cts["tags"])) if cts and len(cts["tags"]) == 1 else None,
        "immediate_order": _order(data),
        "split_over_qps": used.pop() if len(used) == 1 else None,
        "acknowledged_unseen": _unseen(data, back),
    }


def _order(flow: Flow) -> str | None:
    immediate = flow["messages"]["immediate"]
    little = immediate["little_endian"] + sum(immediate["split_little_endian"].values())
    big = immediate["big_endian"] + sum(immediate["split_big_endian"].values())
    if little and not big:
        return "little-endian"
    if big and not little:
        return "big-endian"
    return "contradictory" if little and big else None


def _unseen(data: Flow, back: Flow) -> int:
    """Requests the receiver acknowledged beyond the last one captured: the mirror lost them, or the capture
    ended. READ responses answer PSNs that no request packet carries."""
    if data["requests"] is None or back["answers"] is None or _count(data, "READ_REQ"):
        return 0
    beyond = (back["answers"]["psn_high"] - data["requests"]["psn_last"]) & 0xFFFFFF
    return beyond if beyond < 0x800000 else 0


# -- what an operator should know -------------------------------------------------------------------------


def _notes(
    survey: dict[str, Any], flows: list[Flow], connections: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for level, text in _capture_notes(survey):
        yield {"level": level, "text": text, "flow": None}
    unseen = {c["data_flow"]: c["acknowledged_unseen"] for c in connections if c["acknowledged_unseen"]}
    for flow in flows:
        for level, text in _flow_notes(flow, unseen.get(flow["id"], 0)):
            yield {"level": level, "text": text, "flow": flow["id"]}
    bad = [flow for flow in flows if flow["kind"] == "wrong ICRC only"]
    if bad:
        count = sum(flow["packets"] for flow in bad)
        text = f"{len(bad)} flows consist of packets with a wrong ICRC alone, {count} in all"
        yield {"level": "warning", "text": text, "flow": None}
    if not any(f["kind"].startswith("NCCL") for f in flows):
        yield {"level": "info", "text": "no mark of NCCL was seen", "flow": None}


def _capture_notes(survey: dict[str, Any]) -> Iterator[tuple[str, str]]:
    packets = survey["packets"]
    if packets["truncated"]:
        longest = survey["cut"]["longest_captured"]
        yield (
            "warning",
            (
                f"{packets['truncated']} packets were cut by the capture (longest piece {longest} bytes): "
                "raise the snap length"
            ),
        )
    if packets["malformed"]:
        yield "warning", f"{packets['malformed']} packets have headers that contradict each other"
    if packets["fragment"]:
        yield (
            "warning",
            (
                f"{packets['fragment']} IP fragments may carry RoCEv2 and are never reassembled: "
                "raise the MTU of the mirrored interfaces"
            ),
        )
    if packets["encapsulated"]:
        named = ", ".join(f"{name} {count}" for name, count in survey["encapsulated"].items())
        yield (
            "warning",
            (
                f"{packets['encapsulated']} packets may carry RoCEv2 in an encapsulation that is not unpacked "
                f"({named}): mirror with SPAN or ERSPAN, or remove what is in front of them"
            ),
        )
    if survey["unlisted_flow_packets"]:
        yield "warning", f"{survey['unlisted_flow_packets']} packets of further flows are not listed"
    if survey["bootstrap_handshakes"]:
        yield (
            "info",
            (
                f"{survey['bootstrap_handshakes']} TCP segments begin with the magic of NCCL's queue pair "
                "handshake: the bootstrap is in the capture"
            ),
        )


def _flow_notes(flow: Flow, unseen: int) -> Iterator[tuple[str, str]]:
    wrong, requests = flow["icrc"]["wrong"], flow["requests"]
    if wrong and flow["icrc"]["ok"]:
        yield (
            "warning",
            f"{wrong} of {flow['packets']} packets have a wrong ICRC: damaged, or changed before the capture",
        )
    if requests and requests["missing"]:
        places = len(requests["missing_ranges"])
        yield "warning", f"{requests['missing']} packets missing in {places} place{'s' * (places != 1)}"
    if unseen:
        yield "warning", f"{unseen} packets behind the last one captured were acknowledged: lost, or cut off"
    if requests and requests["duplicates"] and len(flow["captures"]) > 1:
        where = f"{requests['duplicates']} packets seen again, in {len(flow['captures'])} captures"
        yield "info", f"{where}: mirrored at two ports, or retransmitted"
    if requests and flow["kind"].startswith("NCCL") and requests["psn_first"] != 0:
        yield "info", f"the first PSN is {requests['psn_first']}, NCCL starts at 0: the capture began later"
    if flow["partner"] == "unknown":
        yield "info", "which flow is its other direction is not known: neither UDP source ports nor addresses say it"
    if flow["kind"] == "NCCL data" and flow["partner"] == "absent":
        yield "warning", "the other direction (clear-to-send, ACK) was not captured"
    if flow["kind"] == "NCCL clear-to-send" and flow["partner"] == "absent":
        yield "warning", "the data these clear-to-send writes ask for was not captured"
    if len(flow["mirrors"]) > 1:
        yield "info", f"seen through {len(flow['mirrors'])} mirrors: {', '.join(flow['mirrors'])}"
    if flow["congestion_marked"]:
        yield "info", f"{flow['congestion_marked']} packets are marked: congestion experienced"
    if _order(flow) == "contradictory":
        yield "warning", "immediates fit both byte orders"


def ranks_of(connections: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Ranks that clear-to-send tags give to each address, ascending. NCCL puts the data sender's rank there,
    numbered within its communicator, so one address may have several; a tag that several addresses claim
    says nothing and is left out."""
    claims: dict[int, set[str]] = {}
    for c in connections:
        if c["sender_tag"] is not None:
            claims.setdefault(c["sender_tag"], set()).add(c["source"])
    ranks: dict[str, list[int]] = {}
    for tag in sorted(claims):
        if len(claims[tag]) == 1:
            ranks.setdefault(claims[tag].pop(), []).append(tag)
    return ranks
