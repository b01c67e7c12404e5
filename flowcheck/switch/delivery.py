"""Does the mirror deliver? Judge what a survey of the mirror port found against the plan.

    judge(document of flowcheck.diagnose.inspect, plan) -> Check per question, in the order in which to fix them
    judge(..., at_ports(plan, ["Ethernet9"]))              of what ends at that monitor port alone

Counters of the switch cannot answer this: several count lost copies as sent. Only the packets at the port can.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from flowcheck.diagnose.checks import Check, alone, arrival, gaps, sound
from flowcheck.diagnose.inspect import survey_captures, survey_interface
from flowcheck.errors import UserError
from parser.findings import ranks_of
from switch_configs.schema import MirrorPlan

__all__ = ["Check", "at_ports", "judge", "run"]

SCHEMA = "flowcheck-switch-verify/2"
# Retransmissions look like duplicates; a mirror that copies twice makes every packet one.
DUPLICATE_SHARE = 0.2


def run(
    captures: Sequence[Path], interface: str | None, seconds: float, plan: MirrorPlan, as_json: bool, console: Console
) -> int:
    """0 if every check is good, 1 if not. Errors as flowcheck.diagnose.inspect.survey_captures and survey_interface."""
    found = survey_interface(interface, seconds) if interface else survey_captures(captures)
    checks = list(judge(found, plan))
    bad = [check for check in checks if not check.good]
    if as_json:
        document = {"schema": SCHEMA, "good": not bad, "remedy": bad[0].remedy if bad else "",
                    "checks": [asdict(check) for check in checks]}
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return int(bool(bad))
    for check in checks:
        console.print(f"{'ok ' if check.good else 'BAD'} {check.name}: {check.found}", markup=False, highlight=False)
    console.print(f"remedy: {bad[0].remedy}" if bad else "the mirror delivers what the plan promises", markup=False)
    return int(bool(bad))


def at_ports(plan: MirrorPlan, ports: Sequence[str]) -> MirrorPlan:
    """The plan's sessions that end at these monitor ports: PORT, or LEAF:PORT where leaves name theirs alike. None
    named: the plan has one. Raises UserError: it has several, or no such one."""
    there = sorted({(session.leaf, session.destination) for session in plan.sessions})
    named, remedy = ", ".join(map(":".join, there)), "--port with the one that the interface is cabled to"
    if not ports and len(there) > 1:
        raise UserError(f"the plan has {len(there)} monitor ports: {named}", where="--port", remedy=remedy)
    chosen = set(there)
    if ports:
        chosen = set()
        for port in ports:
            found = [one for one in there if port in (one[1], ":".join(one))]
            if len(found) != 1:
                raise UserError(f"{port!r} is {'no' if not found else 'more than one'} monitor port of the plan, which"
                                f" has {named}", where="--port", remedy=remedy)
            chosen.update(found)
    sessions = [session for session in plan.sessions if (session.leaf, session.destination) in chosen]
    return plan.model_copy(update={"sessions": sessions})


def judge(found: dict[str, Any], plan: MirrorPlan) -> Iterator[Check]:
    flows = found["flows"]
    yield from arrival(found)
    yield from _directions(found, plan)
    mtus = sorted({flow["mtu"] for flow in flows if flow["mtu"]})
    yield Check(
        "path MTU", not mtus or mtus[-1] <= plan.path_mtu, f"{', '.join(map(str, mtus)) or 'not shown'}",
        f"the plan was made for path MTU {plan.path_mtu}: set path_mtu in the topology and plan again",
    )
    missing, total = gaps(flows)
    yield Check(
        "no gaps", missing == 0, f"{missing} of {total} request packets missing",
        "copies are lost: is the destination's MTU 9216, and is it as fast as all sources together?",
    )
    yield from _duplicates(flows, plan)


def _directions(found: dict[str, Any], plan: MirrorPlan) -> Iterator[Check]:
    flows = sound(found)
    sent, received = {flow["src"] for flow in flows}, {flow["dst"] for flow in flows}
    seen, lacking = [], []
    nameless = 0
    for session in plan.sessions:
        for source in session.sources:
            if source.address is None:
                nameless += 1
                continue
            ways = [way for way, side in (("ingress", sent), ("egress", received)) if source.address in side]
            without = [way for way in session.ways if way not in ways]
            if without:
                lacking.append(f"rank {source.rank} ({session.leaf} {source.port}): no {' and no '.join(without)}")
            else:
                seen.append(source.rank)
    if seen or lacking:
        yield Check(
            "ranks and directions", not lacking,
            f"complete: {', '.join(map(str, sorted(set(seen)))) or 'none'}"
            + (f"; {'; '.join(lacking)}" if lacking else ""),
            f"{lacking[0]}: `flowcheck switch show`, then apply again" if lacking else "",
        )
    if nameless:
        ranks = sorted({rank for several in ranks_of(found["connections"]).values() for rank in several})
        single = alone(found)
        copied = [(session.leaf, port, way) for session in plan.sessions for port in session.ports
                  for way in session.ways]
        both = len(copied) > len({(leaf, port) for leaf, port, _ in copied})
        yield Check(
            "both directions", not both or (bool(found["connections"]) and not single),
            f"{len(found['connections'])} connections in both directions, {len(single)} flows in one; "
            f"ranks by clear-to-send tag: {', '.join(map(str, ranks)) or 'none'}",
            "one direction is not copied: on Cumulus and tc each direction is a session or filter of its own",
        )


def _duplicates(flows: list[dict[str, Any]], plan: MirrorPlan) -> Iterator[Check]:
    """A flow between two ports that are both mirrored is copied by each; Open vSwitch copies once."""
    out = {s.address for m in plan.sessions for s in m.sources if "ingress" in m.ways and m.vendor != "ovs"}
    into = {s.address for m in plan.sessions for s in m.sources if "egress" in m.ways and m.vendor != "ovs"}
    known = None not in out | into
    surprise = 0
    twice = again = 0
    for flow in flows:
        if not flow["requests"] or not flow["requests"]["packets"]:
            continue
        share = flow["requests"]["duplicates"] / flow["requests"]["packets"]
        expected = flow["src"] in out and flow["dst"] in into
        twice += share > DUPLICATE_SHARE
        again += flow["requests"]["duplicates"]
        surprise += known and expected != (share > DUPLICATE_SHARE)
    yield Check(
        "duplicates", surprise == 0,
        f"{again} packets seen again; {twice} flows are copied twice" + ("" if known else " (plan without addresses)"),
        "packets are not copied as often as planned: does a second session mirror one of the ports?",
    )
