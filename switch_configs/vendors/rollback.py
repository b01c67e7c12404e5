"""Put a session of ours back as it was found, broken or not: pure function SessionState -> lines.

EOS, Junos and NVUE need none of it: their candidate or timed undo brings back the whole configuration. Elsewhere what
the switch printed is typed again, so that a failed apply leaves even a session that was cut, half made or inactive.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection

from switch_configs.schema import MirrorSession, SessionState
from switch_configs.vendors.render import comware_lists, cookie, tc_prio

__all__ = ["put_back", "take_away_tc"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}")  # as in the model: what a switch says is typed again below
COMWARE_WAYS = {"ingress": "inbound", "egress": "outbound", "both": "both"}


def put_back(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    """Lines that make `state` again on a switch where our session is gone; empty where nothing can."""
    names = [source.port for source in state.sources] + ([state.destination] if state.destination else [])
    if not state.exists or not all(NAME.fullmatch(name) for name in names):
        return ()
    makers = {"nxos": _nxos, "comware": _comware, "sonic": _sonic, "sonic-configdb": _sonic, "ovs": _ovs, "tc": _tc}
    return makers[session.vendor](session, state) if session.vendor in makers else ()


def _nxos(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    return ("configure terminal", f"monitor session {session.number} type local", *state.config, "end")


def _comware(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    group = f"mirroring-group {session.number}"
    sampler = f" {state.key}" if re.fullmatch(r"sampler [\w.-]+", state.key) else ""
    lines = [f"{group} local{sampler}"]
    for way, word in COMWARE_WAYS.items():
        ports = [source.port for source in state.sources if source.direction == way]
        lines += [f"{group} mirroring-port {some} {word}" for some in comware_lists(ports)]
    if state.destination:
        lines.append(f"{group} monitor-port {state.destination}")
    return ("system-view", *lines, "return")


def _sonic(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    if not state.config:
        return ()
    entry = shlex.quote(json.dumps({"MIRROR_SESSION": {session.name: json.loads(state.config[0])}}))
    file = f"~/flowcheck-{session.name}.json"
    return (f"echo {entry} > {file}", f"sudo config load -y {file}", f"rm -f {file}")


def _ovs(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    words = ["ovs-vsctl"]
    for number, source in enumerate(state.sources):
        words += ["--", f"--id=@p{number}", "get", "port", shlex.quote(source.port)]
    if state.destination:
        words += ["--", "--id=@out", "get", "port", shlex.quote(state.destination)]
    words += ["--", "--id=@m", "create", "mirror", f"name={session.name}"]
    for way, column in (("ingress", "select-src-port"), ("egress", "select-dst-port")):
        some = [f"@p{n}" for n, source in enumerate(state.sources) if source.direction in (way, "both")]
        words += [f"{column}={','.join(some)}"] if some else []
    words += ["output-port=@out"] if state.destination else []
    words += [line for line in state.config if re.fullmatch(r"snaplen=\d+", line)]
    words += ["external_ids:owner=flowcheck", "--", "add", "bridge", str(session.bridge), "mirrors", "@m"]
    return (" ".join(words), "ovs-appctl revalidator/purge")


def _filters(state: SessionState) -> list[tuple[str, str]]:
    return [
        (source.port, way)
        for source in state.sources
        for way in ("ingress", "egress")
        if source.direction in (way, "both")
    ]


def _tc(session: MirrorSession, state: SessionState) -> tuple[str, ...]:
    if state.destination is None:  # its device is deleted: no filter can name it again
        return ()
    match = "matchall" if state.key == "matchall" else "u32 match u32 0 0"
    return tuple(f"tc qdisc add dev {shlex.quote(port)} clsact" for port in state.added) + tuple(
        f"tc filter add dev {shlex.quote(port)} {way} protocol all prio {tc_prio(session)} {match} "
        f"action mirred egress mirror dev {state.destination} cookie {cookie(session, way, port in state.added)}"  # type: ignore[arg-type]
        for port, way in _filters(state)
    )


def take_away_tc(session: MirrorSession, state: SessionState, alone: Collection[str] = ()) -> tuple[str, ...]:
    """Exactly the filters that are there, whichever ports and directions they are on; on ports of `alone` with the
    qdisc, on which nothing else is."""
    return tuple(f"tc qdisc del dev {shlex.quote(port)} clsact" for port in alone) + tuple(
        f"tc filter del dev {shlex.quote(port)} {way} prio {tc_prio(session)}"
        for port, way in _filters(state)
        if port not in alone
    )
