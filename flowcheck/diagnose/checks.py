"""Questions that a survey of packets answers, whoever asks them: `switch verify` of a plan, `rehearse` of a node.

    for check in arrival(found): ...        found: a document of inspect.py
    missing, total = gaps(found["flows"])
    for flow in alone(found): ...           flows of which the other direction is not there

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Check", "alone", "arrival", "gaps", "sound"]

Flow = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """name of the question; good; what was found; remedy: what to do if not good."""

    name: str
    good: bool
    found: str
    remedy: str = ""


def arrival(found: Mapping[str, Any]) -> Iterator[Check]:
    """Does RoCEv2 come, whole, in a form that is read, and unchanged?"""
    packets = found["packets"]
    yield Check(
        "packets", packets["roce"] > 0, f"{packets['roce']} RoCEv2 packets of {packets['total']}",
        "no RoCEv2 arrives: is the session active (`flowcheck switch show`), and is the job running?",
    )
    cut = packets["truncated"]
    yield Check(
        "whole frames", cut == 0, f"{cut} packets shorter than their IP length",
        "copies are cut: remove truncation on the switch (`flowcheck switch show` names it), or raise the snap length",
    )
    wrapped = sum(found["encapsulated"].values())
    yield Check(
        "no unknown wrapping", wrapped == 0, f"{wrapped} packets in an encapsulation that is not unpacked",
        "use a local (SPAN) session, or ERSPAN I to III",
    )
    wrong, right = found["icrc"]["wrong"], found["icrc"]["ok"]
    yield Check(
        "checksums", wrong * 100 <= right, f"{right} right, {wrong} wrong ICRC",
        "copies are changed on the way: switch off header removal, slicing, and tunnels that rewrite more than VLAN "
        "and TTL",
    )


def sound(found: Mapping[str, Any]) -> list[Flow]:
    """Flows of which a packet was whole and unchanged."""
    return [flow for flow in found["flows"] if flow["icrc"]["ok"]]


def alone(found: Mapping[str, Any]) -> list[Flow]:
    """Those of a connection of which the other direction was not there, as far as that is known."""
    paired = {c["data_flow"] for c in found["connections"]} | {c["back_flow"] for c in found["connections"]}
    return [
        flow for flow in sound(found)
        if flow["id"] not in paired and (flow["requests"] or flow["answers"]) and flow["partner"] != "unknown"
    ]


def gaps(flows: Iterable[Flow]) -> tuple[int, int]:
    """Request packets that are missing between others, and those with the others."""
    requests = [flow["requests"] for flow in flows if flow["requests"]]
    missing = sum(one["missing"] for one in requests)
    return missing, missing + sum(one["packets"] for one in requests)
