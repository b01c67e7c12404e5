"""Rendered text of every vendor and direction is a golden file: what operators paste cannot change by accident.

After an intended change: FLOWCHECK_WRITE_GOLDEN=1 pytest tests/switch_configs/test_render.py, then read the diff.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from switch_configs.schema import VENDORS, MirrorSession, Source
from switch_configs.vendors.render import PAGES, comware_lists, render, text, verified

GOLDEN = Path(__file__).parent / "golden"
PORT = {
    "comware": "HundredGigE1/0/{}", "eos": "Ethernet{}", "nxos": "Ethernet1/{}", "sonic": "Ethernet{}",
    "sonic-configdb": "Ethernet{}", "cumulus": "swp{}", "junos": "et-0/0/{}", "ovs": "v{}", "tc": "v{}",
}


def session(vendor: str, direction: str, **changes: object) -> MirrorSession:
    port = PORT[vendor]
    fields: dict[str, object] = {
        "leaf": "leaf1", "vendor": vendor, "direction": direction, "destination": port.format(48),
        "destination_gbps": 400, "node": "ck0", "bridge": "br0", "load_gbps": 240,
        "sources": [
            Source(port=port.format(n), rank=n, speed_gbps=100, why=f"rank {n} (rail 0) of gpu{n}, for dp0")
            for n in (1, 2, 5)
        ],
        "why": ["3 sources add up to 240 Gb/s; the node port carries 400 Gb/s"],
    }
    return MirrorSession.model_validate({**fields, **changes})


@pytest.mark.parametrize("direction", ["ingress", "egress", "both"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_golden(vendor: str, direction: str) -> None:
    path = GOLDEN / f"{vendor}-{direction}.txt"
    found = text(session(vendor, direction))
    if os.environ.get("FLOWCHECK_WRITE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_every_golden_file_is_used() -> None:
    assert sorted(p.name for p in GOLDEN.iterdir()) == sorted(
        f"{vendor}-{direction}.txt" for vendor in VENDORS for direction in ("ingress", "egress", "both")
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_file_says_what_why_source_and_proof(vendor: str) -> None:
    header = "\n".join(render(session(vendor, "both")).header)
    assert "Copies both of 3 ports" in header and "rank 5 (rail 0) of gpu5, for dp0" in header
    assert "Why: 3 sources" in header and PAGES[vendor] in header and f"Verified: {verified(vendor)}" in header
    assert ("NOT verified" in header) == (vendor not in ("ovs", "tc"))


@pytest.mark.parametrize("vendor", VENDORS)
def test_nothing_truncates_samples_or_polices(vendor: str) -> None:
    lines = "\n".join((*render(session(vendor, "both")).apply,))
    assert not re.search(r"(?i)truncat|sampl|snaplen|polic|rate-limit|maximum-packet", lines)


@pytest.mark.parametrize("vendor", VENDORS)
def test_remove_names_its_own_session_only(vendor: str) -> None:
    for line in render(session(vendor, "both", name="mine", number=3)).remove:
        assert not re.search(r"\ball\b|clear bridge|qdisc del|^no monitor session$", line)
        if re.search(r"^(undo|no|delete|nv unset|sudo config mirror|ovs-vsctl|tc)", line):
            assert re.search(r"\b(mine|3|4|7793)\b", line), line


def test_a_file_says_whether_a_reboot_takes_the_session() -> None:
    """Cumulus Linux 5.9 and later save by themselves: without `nv config save` it is there after the next boot, too."""
    said = {v: line for v in VENDORS for line in render(session(v, "both")).header if line.startswith("Kept over")}
    assert set(said) == set(VENDORS) and "5.9 and later save by themselves" in said["cumulus"]
    assert {vendor for vendor in VENDORS if render(session(vendor, "both")).save} == {
        vendor for vendor, line in said.items() if " only after " in line
    }


def test_config_db_is_json_sonic_loads() -> None:
    line = render(session("sonic-configdb", "ingress")).apply[0]
    document = json.loads(shlex.split(line)[1])
    assert document == {
        "MIRROR_SESSION": {
            "flowcheck": {
                "type": "SPAN", "dst_port": "Ethernet48", "src_port": "Ethernet1,Ethernet2,Ethernet5",
                "direction": "RX",
            }
        }
    }


def test_comware_lists_join_neighbours_of_one_card_and_split_at_eight() -> None:
    ports = [f"HundredGigE1/0/{n}" for n in (1, 2, 3, 5)] + ["HundredGigE2/0/6"]
    assert comware_lists(ports) == ["HundredGigE1/0/1 to HundredGigE1/0/3 HundredGigE1/0/5 HundredGigE2/0/6"]
    apart = [f"HundredGigE1/0/{n}" for n in range(1, 20, 2)]
    assert [len(entry.split()) for entry in comware_lists(apart)] == [8, 2]


@pytest.mark.parametrize(
    "field", [{"destination": "e1; reboot"}, {"name": "a b"}, {"bridge": "$(x)"}, {"why": ["a\nno monitor session 2"]}]
)
def test_no_field_carries_a_second_command(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        session("eos", "both", **field)
