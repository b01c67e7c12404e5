"""Every line of an apply as the one where it breaks: refused, answer lost, flowcheck killed; and timers that run out.

The devices of devices.py answer directly here, without SSH, so that every step of every platform can be tried. After a
failure the whole device, ports included, must be what it was, even where what was there was a broken session.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from switch_configs.errors import DeviceError, PlanError
from switch_configs.manage import Difference, Manager
from switch_configs.schema import MirrorSession, Source
from switch_configs.transport import answer, typed

pytest.importorskip("paramiko", reason="netmiko (extra `switch`) is not installed")
from . import devices

PORT = {"comware": "HundredGigE1/0/{}", "nxos": "Ethernet1/{}", "cumulus": "swp{}", "junos": "et-0/0/{}"}
VENDORS = list(devices.DEVICES)
TIMED = ["eos", "junos", "cumulus"]


class Killed(BaseException):
    """flowcheck is gone: nothing cleans up."""


class Trouble:
    """At line `at` of the expected ones: refused, or the connection (or flowcheck) gone before or after it is done."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.expected: list[str] = []
        self.at = -1

    def due(self, line: str) -> bool:
        if not self.expected or line != self.expected[0]:
            return False
        self.expected.pop(0)
        self.at -= 1
        return self.at == -1


class Direct:
    """A transport that hands lines to the device."""

    def __init__(self, device: Any, vendor: str, trouble: Trouble | None = None) -> None:
        self.device, self.vendor, self.trouble = device, vendor, trouble
        device.mode = ""

    def run(self, line: str, *, check: bool = True) -> str:
        kind = self.trouble.kind if self.trouble is not None and self.trouble.due(line) else ""
        if kind == "refused":
            output = self.device.error + ("\nrc=2" if self.vendor in ("sonic", "sonic-configdb", "cumulus") else "")
            return answer(self.vendor, line, output, check=check, where="leaf1")
        if kind.endswith("before"):
            self._fail(kind, line)
        output = self.device.execute(typed(self.vendor, line))
        if kind:
            self._fail(kind, line)
        return answer(self.vendor, line, output, check=check, where="leaf1")

    def _fail(self, kind: str, line: str) -> None:
        self.device.mode = ""
        raise Killed if kind.startswith("killed") else DeviceError(f"no answer to: {line}", where="leaf1")

    def close(self) -> None:
        self.device.mode = ""


def manager(device: Any, vendor: str, direction: str = "both", trouble: Trouble | None = None) -> Manager:
    name = PORT.get(vendor, "Ethernet{}")
    session = MirrorSession.model_validate(
        {"leaf": "leaf1", "vendor": vendor, "direction": direction, "destination": name.format(48),
         "destination_gbps": 400, "sources": [Source(port=name.format(n), rank=n, speed_gbps=100) for n in (1, 2)]}
    )
    return Manager(session, lambda: Direct(device, vendor, trouble))


def snapshot(device: Any) -> Any:
    kept = ("running", "sessions", "ports", "groups", "ports_of", "applied", "committed", "file")
    state = {key: copy.deepcopy(getattr(device, key)) for key in kept if not callable(getattr(device, key, len))}
    for key, value in state.items():
        if isinstance(value, dict):
            state[key] = {k: sorted(v) if isinstance(v, list) else v for k, v in value.items() if v != []}
        elif isinstance(value, list):
            state[key] = sorted(value)
    return json.loads(json.dumps(state, default=sorted))


def fresh(vendor: str, before: str) -> Any:
    """A device whose destination port has settings of its own, with our session absent, whole or broken."""
    device = devices.DEVICES[vendor]()
    if vendor == "eos":
        device.running["interface Ethernet48"] = ["mtu 5000", "no lldp transmit"]
    elif vendor == "nxos":
        device.port("Ethernet1/48")["mtu"] = "mtu 5000"
    elif vendor == "comware":
        device.ports_of["HundredGigE1/0/48"] = ["undo lldp enable", "jumboframe enable 5000"]
    elif vendor == "junos":
        device.committed = ["set interfaces et-0/0/48 mtu 5000"]
    elif vendor == "cumulus":
        device.applied["mtu swp48"] = 5000
    if before == "whole":
        old = manager(device, vendor, "ingress")
        old.apply(old.difference())
    elif before == "broken":
        BREAK[vendor](device)
    device.lines.clear()
    return device


def _junos_broken(device: Any) -> None:
    head = "set forwarding-options analyzer flowcheck input"
    device.committed += [f"{head} ingress interface et-0/0/1.0", f"{head} egress interface et-0/0/2.0"]


BREAK = {
    "eos": lambda d: d.running.update(flowcheck=["source Ethernet1 rx", "source Ethernet2 tx", "truncate size 128"]),
    "nxos": lambda d: d.sessions.update({"1": ["description flowcheck", "source interface Ethernet1/1 rx",
                                               "source interface Ethernet1/2 tx", "mtu 320", "shut"]}),
    "comware": lambda d: d.groups.update({"1": {"sources": [("HundredGigE1/0/1", "Inbound"),
                                                            ("HundredGigE1/0/2", "Both")],
                                                "to": None, "sampler": "samp"}}),
    "junos": _junos_broken,
    "sonic": lambda d: d.sessions.update(flowcheck={"type": "SPAN", "dst_port": "Ethernet47", "src_port": "Ethernet1",
                                                    "direction": "TX", "policer": "slow it's"}),
    "cumulus": lambda d: d.applied.update({"1": {"span": {"direction": "ingress", "source-port": {"swp1": {}},
                                                          "destination": {"swp48": {}}, "truncate": {"size": 40}}}}),
}
BREAK["sonic-configdb"] = BREAK["sonic"]


def lines_of(m: Manager, difference: Difference) -> list[str]:
    return [*difference.commands, *m._render().confirm]


def steps(vendor: str, before: str) -> int:
    m = manager(fresh(vendor, before), vendor)
    return len(lines_of(m, m.difference()))


def run_into(trouble: Trouble, m: Manager, number: int, error: type[BaseException]) -> tuple[Difference, str, str]:
    difference = m.difference()
    trouble.expected, trouble.at = lines_of(m, difference), number
    line = trouble.expected[number]
    with pytest.raises(error) as caught:
        m.apply(difference)
    return difference, line, str(caught.value)


@pytest.mark.parametrize("kind", ["refused", "lost before", "lost after"])
@pytest.mark.parametrize("before", ["absent", "whole", "broken"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_failure_at_any_line_leaves_the_switch_as_it_was(vendor: str, before: str, kind: str) -> None:
    for number in range(steps(vendor, before)):
        device = fresh(vendor, before)
        was = snapshot(device)
        trouble = Trouble(kind)
        m = manager(device, vendor, trouble=trouble)
        difference = m.difference()
        if number >= len(difference.commands):  # the confirmation is tried again, and then it holds
            trouble.expected, trouble.at = lines_of(m, difference), number
            assert m.apply(difference).same_as(m.session) and trouble.at < 0
            device.now += 3600
            assert m.show().mine.same_as(m.session)
            continue
        _, line, said = run_into(trouble, m, number, DeviceError)
        assert "the change was taken back" in said, line
        assert snapshot(device) == was, (number, line)
        assert device.mode == "" and getattr(device, "pending", None) is None and device.deadline is None


@pytest.mark.parametrize("when", ["killed before", "killed after"])
@pytest.mark.parametrize("before", ["absent", "whole", "broken"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_killed_at_any_line_the_next_apply_and_remove_find_their_way(vendor: str, before: str, when: str) -> None:
    for number in range(steps(vendor, before)):
        device = fresh(vendor, before)
        trouble = Trouble(when)
        difference, line, _ = run_into(trouble, manager(device, vendor, trouble=trouble), number, Killed)
        port_before = difference.port_before
        again = manager(device, vendor)  # another process
        try:
            difference = again.difference()
        except PlanError as refused:  # NVUE keeps what was typed and not applied; whose it is it does not say
            assert vendor == "cumulus" and "detach" in refused.remedy, line
            device.handle("nv config detach")
            difference = again.difference()
        again.apply(difference)
        found = again.show()
        assert found.mine.active and found.mine.same_as(again.session) and found.timer == "", line
        device.now += 3600
        assert again.show().mine.same_as(again.session), line  # confirmed: no timer takes it away later
        again.remove(port_before)
        assert not again.show().mine.exists
        if before == "absent":
            left, clean = snapshot(device), snapshot(fresh(vendor, "absent"))
            left.pop("file", None), clean.pop("file", None)  # killed between writing its input and removing it
            assert left == clean, line


@pytest.mark.parametrize("vendor", TIMED)
@pytest.mark.parametrize("before", ["absent", "whole", "broken"])
def test_the_timed_undo_runs_out_when_nobody_confirms(vendor: str, before: str) -> None:
    device = fresh(vendor, before)
    was = snapshot(device)
    trouble = Trouble("killed after")
    m = manager(device, vendor, trouble=trouble)
    commands = m.difference().commands
    at = next(n for n, line in enumerate(commands) if re.match(r"commit|nv config apply", line))
    run_into(trouble, m, at, Killed)
    device.now += 299
    assert manager(device, vendor).show().mine.same_as(m.session) and snapshot(device) != was
    device.now += 2
    assert manager(device, vendor).show().timer == "" and snapshot(device) == was


@pytest.mark.parametrize("vendor", TIMED)
def test_a_confirmation_that_comes_too_late_is_no_success(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading back took longer than the timer: what looked active is gone, and apply says so."""
    device = fresh(vendor, "whole")
    was = snapshot(device)
    m = manager(device, vendor)
    difference = m.difference()
    settled = m._settled

    def slow() -> Any:
        state = settled()
        device.now += 301
        return state

    monkeypatch.setattr(m, "_settled", slow)
    monkeypatch.setattr("switch_configs.manage.SETTLE_SECONDS", 0.3)
    with pytest.raises(DeviceError, match="the change was taken back"):
        m.apply(difference)
    assert snapshot(device) == was


@pytest.mark.parametrize("vendor", ["eos", "junos"])
def test_somebody_elses_timed_commit_is_not_confirmed_by_ours(vendor: str) -> None:
    device = fresh(vendor, "absent")
    if vendor == "eos":
        typed_by_ops = ("configure session trial", "interface Ethernet9", "mtu 9000", "commit timer 00:10:00")
    else:
        commit = 'commit confirmed 10 comment "trial"'
        typed_by_ops = ("configure exclusive", "set interfaces et-0/0/9 mtu 9000", commit, "exit configuration-mode")
    for line in typed_by_ops:
        device.execute(line)
    with pytest.raises(PlanError, match="waits for its confirmation: trial"):
        manager(device, vendor).difference()
    device.now += 601
    assert manager(device, vendor).difference().commands


@pytest.mark.parametrize("vendor", VENDORS)
def test_remove_gives_the_port_back(vendor: str) -> None:
    device = fresh(vendor, "absent")
    was = snapshot(device)
    m = manager(device, vendor)
    difference = m.difference()
    m.apply(difference)
    assert snapshot(device) != was
    m.remove(difference.port_before)
    assert snapshot(device) == was


def test_nvue_second_number_of_somebody_else_is_not_unset() -> None:
    device = fresh("cumulus", "absent")
    other = {"span": {"direction": "egress", "source-port": {"swp9": {}}, "destination": {"swp30": {}}}}
    device.applied["2"] = copy.deepcopy(other)
    m = manager(device, "cumulus", "ingress")
    m.apply(m.difference())
    device.applied["1"]["span"]["source-port"] = {"swp7": {}}
    m.apply(m.difference())
    m.remove()
    assert device.applied["2"] == other
