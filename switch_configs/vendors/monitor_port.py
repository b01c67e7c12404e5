"""The destination port's own settings: what apply changes besides the session, read before and put back after.

    show_line(session)              what to ask before apply ("" where apply leaves the port alone)
    restore(session, output)        lines that make the port what `output` says it was

Only the settings that apply touches are put back; anything else on the port is nobody's business here. Formats are
those of running configurations: one statement per line, absent means the platform's default.
"""

from __future__ import annotations

import json
import re

from switch_configs.schema import MirrorSession

__all__ = ["restore", "show_line"]

SHOW = {
    "eos": "show running-config interfaces {}",
    "nxos": "show running-config interface {} all",
    "comware": "display current-configuration interface {}",
    "junos": "show configuration interfaces {} | display set",
    "cumulus": "nv show interface {} link -o json",
}
# (the statement if it is there, what to type if it is not): order as the platform wants it typed
STATEMENTS = {
    "eos": [(r"mtu \d+", "no mtu"), (r"no lldp transmit", "lldp transmit"), (r"no lldp receive", "lldp receive")],
    "nxos": [
        (r"switchport monitor", "no switchport monitor"), (r"mtu \d+", "no mtu"),
        (r"(?:no )?switchport", ""), (r"(?:no )?shutdown", ""),
    ],
    "comware": [
        (r"(?:undo )?jumboframe enable(?: \d+)?", "jumboframe enable"), (r"undo stp enable", "stp enable"),
        (r"undo lldp enable", "lldp enable"),
    ],
}
AROUND = {
    "eos": (("configure", "interface {}"), ("end",)),
    "nxos": (("configure terminal", "interface {}"), ("end",)),
    "comware": (("system-view", "interface {}"), ("return",)),
}


def _name(session: MirrorSession) -> str:
    return session.destination.partition(".")[0] if session.vendor == "junos" else session.destination


def show_line(session: MirrorSession) -> str:
    return SHOW.get(session.vendor, "").format(_name(session))


def restore(session: MirrorSession, output: str) -> tuple[str, ...]:
    port = _name(session)
    if session.vendor == "cumulus":
        mtu = json.loads(output or "{}").get("mtu")
        if not isinstance(mtu, int) or mtu == session.mtu:
            return ()
        return (f"nv set interface {port} link mtu {mtu}", "nv config apply -y")
    if session.vendor == "junos":
        return _junos(port, output)
    if session.vendor not in STATEMENTS:
        return ()
    present = [line.strip() for line in output.splitlines()]
    before, after = AROUND[session.vendor]
    lines = []
    for pattern, otherwise in STATEMENTS[session.vendor]:
        found = [line for line in present if re.fullmatch(pattern, line)]
        lines += [found[-1] if found else otherwise]
    return (*(line.format(port) for line in before), *(line for line in lines if line), *after)


def _junos(port: str, output: str) -> tuple[str, ...]:
    mtu = re.search(rf"(?m)^\s*set interfaces {re.escape(port)} mtu (\d+)\s*$", output)
    lines = [f"set interfaces {port} mtu {mtu[1]}" if mtu else f"delete interfaces {port} mtu"]
    if f"set interfaces {port} unit 0 family ethernet-switching" not in output:
        # the unit too if it was not there: an empty one is not what was
        unit = "" if f"set interfaces {port} unit 0" in output else f"delete interfaces {port} unit 0"
        lines.append(unit or f"delete interfaces {port} unit 0 family ethernet-switching")
    return ("configure exclusive", *lines, "commit", "exit configuration-mode")
