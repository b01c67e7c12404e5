"""`flowcheck doctor`: can this machine capture, and which command fixes what is wrong.

Every check reads (/proc, /sys, ioctl), changes nothing, and gives findings: ok, warning (it runs, but slower or
with a risk that is named) or unusable. What depends on a device is checked for the devices named: --device
af_packet:eth1, af_xdp:eth1, or a PCI address. docs/use/doctor.md lists the checks.

Exit status: 0 all ok, 1 warnings, 2 unusable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console

from flowcheck.diagnose.doctor.devices import check_devices, check_drivers
from flowcheck.diagnose.doctor.host import (
    check_cores,
    check_dpdk,
    check_engines,
    check_huge_pages,
    check_placing,
    check_privileges,
    check_updating,
)
from flowcheck.diagnose.doctor.machine import Finding, Level, Machine, Wanted
from flowcheck.tables import screen

__all__ = ["Finding", "Machine", "Wanted", "examine", "run"]

SCHEMA = "flowcheck-doctor/1"
EXIT = {"ok": 0, "warning": 1, "unusable": 2}

CHECKS: tuple[Callable[[Machine, Wanted], Iterator[Finding]], ...] = (
    check_dpdk, check_drivers, check_privileges, check_huge_pages, check_cores, check_placing, check_updating,
    check_engines, check_devices,
)


def examine(wanted: Wanted, machine: Machine | None = None) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(machine or Machine(), wanted)]


def run(wanted: Wanted, as_json: bool, console: Console | None = None) -> int:
    """Prints the findings. Returns the exit status."""
    console = screen() if console is None else console
    found = examine(wanted)
    worst: Level = max((f.level for f in found), key=lambda level: EXIT[level], default="ok")
    if as_json:
        json.dump({"schema": SCHEMA, "verdict": worst, "findings": [asdict(f) for f in found]}, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return EXIT[worst]
    style = {"ok": "green", "warning": "yellow", "unusable": "bold red"}
    for finding in found:
        console.print(f"[{style[finding.level]}]{finding.level:8}[/] ", end="")
        console.print(f"{finding.check}: {finding.text}", markup=False, highlight=False, soft_wrap=True)
        if finding.remedy and finding.level != "ok":
            console.print(f"         remedy: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)
    verdict = {
        "ok": "this machine is ready",
        "warning": "usable, with the warnings above",
        "unusable": "not usable yet",
    }
    console.print(verdict[worst], highlight=False)
    return EXIT[worst]
