"""Captures as people have them: cut, oversized, stamped, mixed, in another order. What is whole counts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RING, JOB = ROOT / "pcaps" / "ring2-ll.pcap", ROOT / "pcaps" / "ring2-ll.job.json"
EQUAL = "be343bb6525c"  # what the README of shared/captures/field says of the model
FIELD = {  # packets, skipped, bytes left out
    "cut_tail.pcap": (171, 0, 41), "ng_cut.pcapng": (170, 0, 92), "ng_snaplens.pcapng": (172, 0, 0),
    "superframe_80k.pcap": (172, 1, 0), "arista_ts.pcap": (172, 0, 0), "snap_header_small.pcap": (172, 0, 0),
}


def records() -> tuple[bytes, list[bytes]]:
    raw, at, found = RING.read_bytes(), 24, []
    while at < len(raw):
        end = at + 16 + struct.unpack_from("<I", raw, at + 8)[0]
        found.append(raw[at:end])
        at = end
    return raw[:24], found


@pytest.mark.captures
@pytest.mark.parametrize("name", FIELD)
def test_what_the_readme_says(capture: Any, replayed: Any, name: str) -> None:
    report, failure, out = replayed(capture(f"field/{name}"), JOB)
    packets, skipped, left_out = FIELD[name]
    (found,) = report["captures"]
    assert (found["packets"], sum(found["skipped"].values()), found["left_out"]) == (packets, skipped, left_out)
    assert bool(found["left_out_why"]) == bool(left_out)
    assert any(name in note for note in report["notes"]) == bool(skipped or left_out)
    assert report["ok"] and failure == "" and report["totals"]["iterations_complete"] == 6
    assert hashlib.sha256((out / "step-000006" / "model.safetensors").read_bytes()).hexdigest().startswith(EQUAL)


def test_what_a_cut_takes_away_is_lost(replayed: Any, tmp_path: Path) -> None:
    """The verdict decides: iterations before the cut stand, the one that it meets lacks what was cut off."""
    head, all_of_it = records()
    path = tmp_path / "cut.pcap"
    path.write_bytes((head + b"".join(all_of_it[:110]))[:-700])
    report, failure, out = replayed(path, JOB)
    (found,) = report["captures"]
    assert found["packets"] == 109 and 0 < found["left_out"] < 5000
    complete = [one["verdict"]["complete"] for one in report["iterations"]]
    assert not report["ok"] and failure and complete == [True] * (len(complete) - 1) + [False] and len(complete) > 2
    (last,) = report["iterations"][-1]["buckets"]
    assert last["missing"] == {"lost": last["elements"] - last["placed_elements"]}
    assert sorted(path.name for path in out.glob("step-*")) == [f"step-{len(complete) - 1:06d}"]


def reverse(all_of_it: list[bytes]) -> list[bytes]:
    return all_of_it[::-1]


def one_way_first(all_of_it: list[bytes]) -> list[bytes]:
    """Every packet to one of the two hosts, then every packet to the other."""
    return sorted(all_of_it, key=lambda record: record[16:22])


@pytest.mark.parametrize("order", [reverse, one_way_first])
def test_what_comes_when_its_iteration_is_closed_is_late(
    replayed: Any, tmp_path: Path, order: Callable[[list[bytes]], list[bytes]]
) -> None:
    head, all_of_it = records()
    path = tmp_path / "order.pcap"
    path.write_bytes(head + b"".join(order(all_of_it)))
    report, failure, _ = replayed(path, JOB)
    causes: dict[str, int] = {}
    for one in report["iterations"]:
        (bucket,) = one["buckets"]
        assert sum(bucket["missing"].values()) == bucket["elements"] - bucket["placed_elements"]
        for clause in one["verdict"]["failing"]:
            if clause["clause"] == "covered":
                assert all(f"{cause} {count}" in clause["reason"] for cause, count in bucket["missing"].items())
        for cause, count in bucket["missing"].items():
            causes[cause] = causes.get(cause, 0) + count
    assert set(causes) <= {"late"} and (failure == "") == (not causes), "every packet is in the capture"
    assert causes or order is one_way_first
