"""Parsers fed with outputs in the vendors' format: whole, broken, foreign, truncated, and no output at all."""

# ruff: noqa: E501  (tables are as wide as switches print them)
from __future__ import annotations

import json
from typing import Any

import pytest

from switch_configs.errors import DeviceError, PlanError
from switch_configs.schema import MirrorSession, SessionState, Source
from switch_configs.vendors.render import render
from switch_configs.vendors.show import Found, read


def found(vendor: str, *outputs: str, direction: str = "both", **changes: Any) -> Found:
    port = {"comware": "HundredGigE1/0/{}", "nxos": "Ethernet1/{}", "cumulus": "swp{}", "junos": "et-0/0/{}"}
    name = port.get(vendor, "Ethernet{}")
    session = MirrorSession.model_validate(
        {"leaf": "leaf1", "vendor": vendor, "direction": direction, "destination": name.format(48),
         "destination_gbps": 400, "bridge": "br0",
         "sources": [Source(port=name.format(n), rank=n, speed_gbps=100) for n in (1, 2)], **changes}
    )
    lines = render(session).show
    return read(session, lines, [*outputs, *[""] * (len(lines) - len(outputs))])


def ways(state: SessionState) -> dict[str, str]:
    return {source.port: source.direction for source in state.sources}


# -- EOS --------------------------------------------------------------------------------------------------

EOS_SHOW = """
Session flowcheck
------------------------

Source Ports:

  Rx:          Et1
  Both:        Et2

Destination Ports:

    Et48 :  {state}

Session ids
------------------------

Source Ports:

  Both:        Et9

Destination Ports:

    Et40 :  active
"""
EOS_RUN = """monitor session flowcheck source Ethernet1 rx
monitor session flowcheck source Ethernet2
monitor session flowcheck destination Ethernet48
monitor session ids source Ethernet9-10
monitor session ids destination Ethernet40
"""


def test_eos() -> None:
    f = found("eos", EOS_SHOW.format(state="active"), EOS_RUN)
    assert f.mine.active and ways(f.mine) == {"Ethernet1": "ingress", "Ethernet2": "both"}
    assert f.mine.destination == "Ethernet48" and f.mine.truncation == ""
    assert [(o.name, ways(o), o.ours) for o in f.others] == [("ids", {"Ethernet9": "both", "Ethernet10": "both"}, False)]


@pytest.mark.parametrize("line", ["truncate size 128", "header remove size 20", "sample 4", "rate-limit per-ingress-chip 1 mbps"])
def test_eos_cuts_are_named(line: str) -> None:
    f = found("eos", EOS_SHOW.format(state="active"), EOS_RUN + f"monitor session flowcheck {line}\n")
    assert f.mine.truncation == line


def test_eos_exists_but_is_not_active() -> None:
    f = found("eos", EOS_SHOW.format(state="inactive"), EOS_RUN)
    assert f.mine.exists and not f.mine.active and "Et48 inactive" in f.mine.reason and "link" in f.mine.reason
    f = found("eos", "Session flowcheck\n-----\n\nSource Ports:\n\n  Both: Et1\n", "monitor session flowcheck source Ethernet1\n")
    assert "no destination is set" in f.mine.reason


# -- NX-OS ------------------------------------------------------------------------------------------------

NXOS_SHOW = """   session 1
---------------
description       : flowcheck
type              : local
state             : {state}
acl-name          : acl-name not specified
source intf       :
    rx            : Eth1/1        Eth1/2
    tx            : Eth1/1        Eth1/2
    both          : Eth1/1        Eth1/2
source VLANs      :
    rx            :
    tx            :
    both          :
filter VLANs      : filter not specified
destination ports : Eth1/48

Legend: f = forwarding enabled, l = learning enabled
"""
NXOS_RUN = """!Command: show running-config monitor
version 9.3(9) Bios:version 05.45
monitor session 1
  description {name}
  source interface Ethernet1/1-2 both
  destination interface Ethernet1/48
  no shut
"""


def test_nxos() -> None:
    f = found("nxos", NXOS_SHOW.format(state="up"), NXOS_RUN.format(name="flowcheck"))
    assert f.mine.active and f.mine.ours and ways(f.mine) == {"Ethernet1/1": "both", "Ethernet1/2": "both"}


@pytest.mark.parametrize(("state", "why"), [("down (Session admin shut)", "no shut"), ("down (No operational src/dst)", "src/dst")])
def test_nxos_down(state: str, why: str) -> None:
    f = found("nxos", NXOS_SHOW.format(state=state), NXOS_RUN.format(name="flowcheck"))
    assert f.mine.exists and not f.mine.active and why in f.mine.reason


def test_nxos_mtu_in_a_session_is_truncation_and_a_foreign_description_is_foreign() -> None:
    f = found("nxos", NXOS_SHOW.format(state="up"), NXOS_RUN.format(name="ids") + "  mtu 320\n")
    assert f.mine.truncation == "mtu 320" and f.mine.ours is False


# -- Comware ----------------------------------------------------------------------------------------------

COMWARE = """Mirroring group 1:
    Type: Local
    Status: {status}
    Mirroring port:
        HundredGigE1/0/1  Inbound
        HundredGigE1/0/2  Both
    Monitor port: {monitor}
Mirroring group 2:
    Type: Remote source
    Status: Active
    Mirroring port:
        HundredGigE1/0/9  Both
    Monitor egress port: HundredGigE1/0/30
    Remote probe VLAN: 1900
"""


def test_comware() -> None:
    f = found("comware", COMWARE.format(status="Active", monitor="HundredGigE1/0/48"), "")
    assert f.mine.active and f.mine.ours
    assert ways(f.mine) == {"HundredGigE1/0/1": "ingress", "HundredGigE1/0/2": "both"}
    assert [(o.name, o.active) for o in f.others] == [("2", False)]


def test_comware_incomplete_and_foreign() -> None:
    f = found("comware", COMWARE.format(status="Incomplete", monitor=""), "")
    assert f.mine.exists and not f.mine.active and "no monitor port" in f.mine.reason
    f = found("comware", COMWARE.format(status="Active", monitor="HundredGigE1/0/47"), "")
    assert f.mine.ours is False  # another destination: somebody else's group 1
    f = found("comware", COMWARE.format(status="Active", monitor="HundredGigE1/0/48"), " mirroring-group 1 sampler s1\n")
    assert "sampler" in f.mine.truncation


# H3C command reference, display mirroring-group (all kinds of groups in one listing), and a chassis in the field.
COMWARE_REFERENCE = """Mirroring group 1:
    Type: Local
    Status: Active
    Sampler: samp (failed)
    Mirroring port:
        HundredGigE1/0/1  Inbound
    Monitor port: HundredGigE1/0/48
Mirroring group 3:
    Type: Local
    Status: Active
    Mirroring port:
        HundredGigE1/0/8  Inbound
        HundredGigE1/0/9  Both
    Mirroring VLAN:
        1-3, 5-7, 100-120  Inbound
        10  Both
    Mirroring CPU:
        Slot 4  Inbound
    Monitor port: HundredGigE1/0/30
Mirroring group 6:
    Type: Remote source
    Status: Incomplete
    Mirroring port:
        HundredGigE1/0/4  Both
    Remote probe VLAN: 1900
Mirroring group 9:
    Type: Remote destination
    Status: Active
    Monitor port: HundredGigE1/0/6
    Remote probe VLAN: 1901
"""


def test_comware_reference_listing() -> None:
    f = found("comware", COMWARE_REFERENCE, "")
    assert f.mine.active and f.mine.truncation == "sampler samp"
    assert [(o.name, o.active, o.destination) for o in f.others] == [
        ("3", False, "HundredGigE1/0/30"), ("6", False, None), ("9", False, "HundredGigE1/0/6"),
    ]
    assert ways(f.others[0]) == {"HundredGigE1/0/8": "ingress", "HundredGigE1/0/9": "both"}  # no VLAN, no slot
    field = COMWARE.format(status="Active", monitor="HundredGigE1/0/48")
    field = field.replace("Monitor port", "Monitor-port").replace("Type: Local", "Type: local")
    assert found("comware", field, "").mine.destination == "HundredGigE1/0/48"


def test_comware_half_made_group_is_ours_only_if_it_could_be() -> None:
    bare = "Mirroring group 1:\n    Type: {}\n    Status: Incomplete\n    Mirroring port:\n{}    Monitor port:\n"
    assert found("comware", bare.format("Local", ""), "").mine.ours  # an apply that died after its first line
    assert not found("comware", bare.format("Remote source", ""), "").mine.ours
    assert not found("comware", bare.format("Local", "        HundredGigE1/0/9  Both\n"), "").mine.ours
    tunnel = COMWARE.format(status="Active", monitor="HundredGigE1/0/48").replace(
        "Mirroring group 2", "        Encapsulation: Destination IP address 40.1.1.2\nMirroring group 2")
    assert "Encapsulation" in found("comware", tunnel, "").mine.reason


# A Nexus 9000 as the README of Cisco's zSPAN collector prints it
NXOS_ERSPAN = """   session 3
---------------
type              : erspan-source
version           : 3
state             : up
erspan-id         : 156
vrf-name          : default
acl-name          : acl-name not specified
mtu               : 1518
destination-ip    : 11.11.11.11
origin-ip         : 11.11.11.1 (global)
source intf       :
    rx            : Eth1/31
    tx            : Eth1/31
    both          : Eth1/31
filter VLANs      : filter not specified
egress-intf       : Eth1/29
"""


def test_nxos_foreign_erspan_session_beside_ours() -> None:
    run = NXOS_RUN.format(name="flowcheck") + (
        "monitor session 3 type erspan-source\n  erspan-id 156\n  vrf default\n  destination ip 11.11.11.11\n"
        "  source interface Ethernet1/31 both\n  mtu 1518\n  no shut\n"
    )
    f = found("nxos", NXOS_SHOW.format(state="up") + NXOS_ERSPAN, run)
    assert f.mine.active and f.mine.truncation == ""
    assert [(o.name, o.truncation, ways(o)) for o in f.others] == [("3", "mtu 1518", {"Ethernet1/31": "both"})]


@pytest.mark.parametrize(("state", "why"), [("down (Dst in wrong mode)", "switchport monitor"), ("down (No hardware resource)", "no session left"), ("down (No sources configured)", "no source"), ("down (No dest configured)", "no destination")])
def test_nxos_states_of_the_reference(state: str, why: str) -> None:
    assert why in found("nxos", NXOS_SHOW.format(state=state), NXOS_RUN.format(name="flowcheck")).mine.reason


def test_eos_without_a_state_is_not_taken_for_active() -> None:
    old = "Session flowcheck\n------\n\nSource Ports\n\n  Both:       Ethernet1\nDestination Port: Ethernet48\n"
    f = found("eos", old, EOS_RUN)
    assert not f.mine.active and "not known" in f.mine.reason


def test_timed_commits_that_wait() -> None:
    table = ("  Name     State                 User\n  -------- --------------------- ------\n"
             "  other-1  pendingCommitTimer    ops\n")
    assert found("eos", "No sessions created", "", table).timer == "other-1"
    assert found("eos", "No sessions created", "", "Session with pending commit timer: flowcheck-ab12\n").timer == (
        "flowcheck-ab12"
    )
    assert found("eos", "No sessions created", "", "").timer == ""
    # "rollback in" stays in the history for good; only "rollback pending" below entry 0 says that the timer runs
    past = "0   2026-05-06 06:38:48 UTC by ops via cli commit confirmed, rollback in 10mins\n    done\n1   2026-04-19 11:47:52 UTC by ops via cli\n"
    assert found("junos", "", "", past).timer == ""
    assert found("junos", "", "", past.replace("    done\n", "    flowcheck flowcheck\n    rollback pending\n")).timer == (
        "flowcheck flowcheck"
    )
    assert found("junos", "", "", past.replace("    done\n", "    rollback pending\n")).timer == "unnamed"


# sonic-net/sonic-buildimage issue 7988 and sonic-utilities pull request 662
SONIC_REAL = """ERSPAN Sessions
Name    Status    SRC IP    DST IP    GRE      DSCP    TTL  Queue    Policer    Monitor Port
------  --------  --------  --------  -----  ------  -----  -------  ---------  --------------
x       active    1.2.3.4   4.3.2.1               8     99                      Ethernet4

SPAN Sessions
Name    Status    DST Port     SRC Port         Direction    Queue    Policer
------  --------  -----------  ---------------  -----------  -------  ---------
ms1     active    Ethernet200  PortChannel0001  both
"""


def test_sonic_as_real_switches_print_it() -> None:
    f = found("sonic", SONIC_REAL, "{}", "{}")
    assert not f.mine.exists
    assert [(o.name, o.active, o.destination, ways(o)) for o in f.others] == [
        ("x", True, "4.3.2.1", {}), ("ms1", True, "Ethernet200", {"PortChannel0001": "both"}),
    ]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


def test_what_a_switch_prints_never_reaches_the_terminal_raw() -> None:
    f = found("nxos", NXOS_SHOW.format(state=f"down ({HOSTILE})"), NXOS_RUN.format(name="flowcheck").replace("1-2", f"9{HOSTILE}"))
    assert f.mine.model_dump_json().isprintable() and all(s.port.isprintable() for s in f.mine.sources)
    for error in (DeviceError(HOSTILE, where=HOSTILE, remedy=HOSTILE), PlanError(HOSTILE)):
        assert (str(error) + error.what + error.where + error.remedy).isprintable()


# -- SONiC ------------------------------------------------------------------------------------------------

SONIC = """ERSPAN Sessions
Name       Status    SRC IP    DST IP      GRE    DSCP    TTL    Queue    Policer    Monitor Port    SRC Port    Direction
---------  --------  --------  --------  -----  ------  -----  -------  ---------  --------------  ----------  -----------
everflow0  active    10.1.1.1  12.1.1.1      0      10     10

SPAN Sessions
Name       Status    DST Port    SRC Port             Direction    Queue    Policer
---------  --------  ----------  -------------------  -----------  -------  ---------
flowcheck  {status}    Ethernet48  Ethernet1,Ethernet2  both
session15  active    Ethernet2   Ethernet3            tx
"""
SONIC_DB = "{'type': 'SPAN', 'dst_port': 'Ethernet48', 'src_port': 'Ethernet1,Ethernet2', 'direction': 'BOTH'}"


def test_sonic() -> None:
    f = found("sonic", SONIC.format(status="active"), SONIC_DB, "{'status': 'active'}")
    assert f.mine.active and ways(f.mine) == {"Ethernet1": "both", "Ethernet2": "both"}
    assert f.mine.destination == "Ethernet48"
    assert [(o.name, o.destination, ways(o)) for o in f.others] == [
        ("everflow0", "12.1.1.1", {}), ("session15", "Ethernet2", {"Ethernet3": "egress"}),
    ]


def test_sonic_state_db_is_the_truth() -> None:
    f = found("sonic", SONIC.format(status="active"), SONIC_DB, "{'status': 'inactive'}")
    assert f.mine.exists and not f.mine.active and "inactive" in f.mine.reason
    f = found("sonic", SONIC.format(status="error "), SONIC_DB, "{}")
    assert not f.mine.active and "ASIC" in f.mine.reason
    cut = SONIC_DB[:-1] + ", 'policer': 'slow'}"
    assert found("sonic", SONIC.format(status="active"), cut, "{'status': 'active'}").mine.truncation == "policer slow"


# -- NVUE -------------------------------------------------------------------------------------------------


def nvue(way: str, to: str = "swp48", **more: Any) -> dict[str, Any]:
    return {"span": {"direction": way, "source-port": {"swp1": {}, "swp2": {}}, "destination": {to: {}}, **more}}


UP = json.dumps({"state": {"up": {}}})


def test_nvue_two_sessions_are_both() -> None:
    text = json.dumps({"1": nvue("ingress"), "2": nvue("egress"), "5": {"erspan": {
        "destination": {"dest-ip": {"10.10.10.234": {}}, "source-ip": {"10.10.10.1": {}}}, "direction": "egress",
        "source-port": {"swp9": {}}}}})
    f = found("cumulus", text, UP, "")
    assert f.mine.active and ways(f.mine) == {"swp1": "both", "swp2": "both"}
    assert [(o.name, o.destination) for o in f.others] == [("5", "10.10.10.234")]


def test_nvue_broken() -> None:
    assert "session 2 is missing" in found("cumulus", json.dumps({"1": nvue("ingress")}), UP, "").mine.reason
    whole = json.dumps({"1": nvue("ingress"), "2": nvue("egress")})
    assert "pending" in found("cumulus", whole, UP, "- set:\n    system:\n      port-mirror:").mine.reason
    assert "link of swp48 is down" in found("cumulus", whole, json.dumps({"state": {"down": {}}}), "").mine.reason
    off = json.dumps({"1": nvue("ingress", enable="off"), "2": nvue("egress")})
    assert "switched off" in found("cumulus", off, UP, "").mine.reason
    old = json.dumps({"1": nvue("ingress") | {"erspan": {"enable": "off"}}, "2": nvue("egress")})
    assert found("cumulus", old, UP, "").mine.active  # older releases print both halves
    assert found("cumulus", whole, UP, "No configuration changes").unapplied == ""
    cut = json.dumps({"1": nvue("ingress", truncate={"state": "enabled", "size": 40})})
    assert found("cumulus", cut, UP, "", direction="ingress").mine.truncation == "truncate size 40"
    assert found("cumulus", json.dumps({"1": nvue("ingress", "swp7")}), UP, "").mine.ours is False


# -- Junos ------------------------------------------------------------------------------------------------

JUNOS = """  Analyzer name                    : flowcheck
  Mirror rate                      : {rate}
  Maximum packet length            : {length}
  State                            : {state}
  Ingress monitored interfaces     : et-0/0/1.0
  Ingress monitored interfaces     : et-0/0/2.0
  Egress monitored interfaces      : et-0/0/1.0
  Output interface                 : et-0/0/48.0
"""
JUNOS_SET = """set forwarding-options analyzer flowcheck input ingress interface et-0/0/1.0
set forwarding-options analyzer flowcheck input ingress interface et-0/0/2.0
set forwarding-options analyzer flowcheck input egress interface et-0/0/1.0
set forwarding-options analyzer flowcheck output interface et-0/0/48.0
"""


def test_junos() -> None:
    f = found("junos", JUNOS.format(rate=1, length=0, state="up"), JUNOS_SET)
    assert f.mine.active and ways(f.mine) == {"et-0/0/1": "both", "et-0/0/2": "ingress"}
    assert f.mine.destination == "et-0/0/48" and not f.others


def test_junos_broken() -> None:
    assert "state down" in found("junos", JUNOS.format(rate=1, length=0, state="down"), JUNOS_SET).mine.reason
    assert found("junos", JUNOS.format(rate=10, length=0, state="up"), JUNOS_SET).mine.truncation == "mirror rate 1 of 10"
    assert found("junos", JUNOS.format(rate=1, length=128, state="up"), JUNOS_SET).mine.truncation.endswith("128")
    assert "QFX has 2" in found("junos", "", JUNOS_SET).mine.reason
    off = JUNOS_SET + "deactivate forwarding-options analyzer flowcheck\n"
    assert "deactivated" in found("junos", "", off).mine.reason


# -- all --------------------------------------------------------------------------------------------------

EMPTY = {
    "eos": ("No sessions created", ""), "nxos": ("Note: No sessions configured", "version 9.3(9)"), "comware": ("", ""),
    "sonic": (SONIC.partition("flowcheck")[0], "{}", "{}"), "cumulus": ("{}", UP, ""), "junos": ("", ""),
}


@pytest.mark.parametrize("vendor", EMPTY)
def test_nothing_there(vendor: str) -> None:
    assert found(vendor, *EMPTY[vendor]).mine.exists is False


@pytest.mark.parametrize(
    ("vendor", "outputs"),
    [
        ("eos", (EOS_SHOW.format(state="active"), "")), ("nxos", (NXOS_SHOW.format(state="up"), "")),
        ("comware", ("bash: display: command not found", "")), ("sonic", ("sudo: command not found", "{}", "{}")),
        ("sonic", (SONIC.format(status="active"), "no database", "{}")), ("cumulus", ("Error", UP, "")),
        ("cumulus", ("[1]", UP, "")), ("junos", (JUNOS.format(rate=1, length=0, state="up"), "")),
        ("ovs", ("{}", "", "", "", "")), ("ovs", ("not json",) * 5), ("tc", ("",) * 5), ("tc", ("{}",) * 5),
        ("tc", ('[{"ifname": 1}]',) * 5),
    ],
)
def test_text_that_is_not_understood_is_never_no_session(vendor: str, outputs: tuple[str, ...]) -> None:
    with pytest.raises(DeviceError, match="cannot be read"):
        found(vendor, *outputs)
