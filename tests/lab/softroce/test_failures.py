"""Loss on the training link, a peer that goes away, ranks that disagree, and what a rank is told wrongly."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from reference import train_alone

from flowcheck.errors import UserError
from lab.network import netns
from lab.network.fabric import Fabric
from lab.network.impair import Impairment
from lab.softroce.settings import Settings
from lab.synth.packets import Endpoint
from lab.synth.packets import Path as Path_

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "LL", "channels": 2, "retransmit_ms": 15},
        {"protocol": "SIMPLE", "family": "2.27.7", "mtu": 1024, "retransmit_ms": 15},
        {"protocol": "LL128", "family": "2.27.7", "algorithm": "tree", "mtu": 1024, "retransmit_ms": 15},
    ],
    ids=lambda s: s["protocol"],
)
def test_loss_damage_and_reordering_change_nothing(
    fabric: Callable[..., Fabric], settings: dict[str, Any], tmp_path: Path,
) -> None:
    """2 % of rank 0's packets are lost each way, others doubled, damaged or overtaken: the training is the same."""
    bad = Impairment("r0", drop=0.02, duplicate=0.02, reorder=0.02, corrupt=0.02, seed=3)
    up = fabric(ranks=3, mirrored=(), impairments=(bad,))
    options = {"iterations": 12, "width": 128}
    results = Gang(up, 3, tmp_path).train(3, settings, options, tmp_path / "out")
    expected, _ = train_alone(Settings(interface="", address="", **settings), 3, options)
    for result in results:
        for got, want in zip(result["iterations"], expected, strict=True):
            for what in ("gradients", "parameters"):
                assert all(torch.equal(got[what][name], want[what][name]) for name in want[what])
    total = {key: sum(result["counters"][key] for result in results) for key in results[0]["counters"]}
    assert total["retransmitted"] > 0 and total["damaged"] > 0 and total["naks_sent"] > 0
    assert 0 < total["naks_received"] <= 2 * total["naks_sent"]  # one that the impairer doubles is received twice
    assert any(event.what == "dropped" for event in up.impairer.events())


def test_a_lost_peer_is_named(fabric: Callable[..., Fabric], tmp_path: Path) -> None:
    """Rank 1 leaves in iteration 2 without a word: the others fail within the time they were told, and say who."""
    gang = Gang(fabric(ranks=3, mirrored=()), 3, tmp_path)
    gang.begin(3, {"peer_timeout_s": 3}, {"stop_at": 2}, tmp_path / "out")
    for rank in (0, 2):
        answer = gang.said(rank)
        assert answer.startswith("failed: ") and "RuntimeError: softroce: " in answer, answer
    # Rank 0 may say rank 2, which waits, too; rank 2 has nobody but rank 1 to wait for.
    waited = re.search(r"rank 1 \(10\.77\.0\.11\).* for (\d+\.\d) s", answer)
    assert waited is not None and 2.9 <= float(waited[1]) < 60.0, answer  # 60 s is what it waits when nobody says


def test_foreign_frames_change_nothing(gang: Gang, tmp_path: Path) -> None:
    """Frames of a stranger, and some in rank 1's name: wrong CRC, wrong numbers, writes to anywhere."""
    out = tmp_path / "out"
    gang.begin(2, {"protocol": "LL"}, {"iterations": 40, "width": 128}, out)
    end = time.monotonic() + 120
    while not all((out / f"describe-{rank}.json").exists() for rank in range(2)):  # either may be the later one
        assert time.monotonic() < end
        time.sleep(0.01)
    flows = json.loads((out / "describe-0.json").read_text())["flows"]
    qpns = [flow["qpns" if flow["dst"] == 0 else "cts_qpns"][0] for flow in flows]
    rng = random.Random(4)
    everybody = Endpoint(b"\xff" * 6, "10.77.0.10")
    with netns.inside(gang.fabric.config.namespace("r2"), lambda: socket.socket(17, socket.SOCK_RAW)) as tap:
        tap.bind(("fab0", 0))
        for number in range(4000):
            name = rng.choice(["10.77.0.11", "10.77.0.12"])
            path = Path_(Endpoint(b"\x02\0\0\0\0\x09", name), everybody, rng.randrange(49152, 65536))
            opcode = rng.choice([6, 7, 8, 9, 10, 11, 17, 4, 12, 129, 255])
            extension = rng.randbytes({6: 16, 10: 16, 11: 20, 9: 4, 17: 4}.get(opcode, rng.randrange(0, 24)))
            psn = rng.randrange(1 << 22, 1 << 23)  # far from anything that will be used
            payload = rng.randbytes(rng.randrange(0, 4096))
            frame = path.frame(opcode, rng.choice([*qpns, 0, 1, 0xFFFFFF]), psn, extension, payload)
            if number % 5 == 0:
                frame = frame[: rng.randrange(14, len(frame) + 1)]
            if number % 5 == 1:
                frame = frame[:-1] + bytes([frame[-1] ^ 1])
            tap.send(frame)
    assert [gang.said(rank) for rank in range(2)] == ["done", "done"]
    results = [torch.load(out / f"rank-{rank}.pt") for rank in range(2)]
    for a, b in zip(results[0]["iterations"], results[1]["iterations"], strict=True):
        assert all(torch.equal(a["parameters"][name], b["parameters"][name]) for name in a["parameters"])
    counters = results[0]["counters"]
    assert counters["strangers"] > 0 and counters["damaged"] > 0 and counters["out_of_order"] > 0


def test_ranks_that_disagree_are_told_so(gang: Gang, tmp_path: Path) -> None:
    gang.begin(2, {"protocol": "LL"}, {}, tmp_path, {1: {"protocol": "LL128"}})
    answers = [gang.said(rank) for rank in range(2)]
    assert all("protocol is" in answer and "'LL'" in answer and "'LL128'" in answer for answer in answers), answers
    # The processes go on: the next group of the same ranks works.
    gang.train(2, {"protocol": "LL"}, {"iterations": 2}, tmp_path / "again")


def test_an_interface_that_is_not_there(gang: Gang, tmp_path: Path) -> None:
    gang.begin(2, {"interface": "fab7"}, {}, tmp_path)
    for rank in range(2):
        answer = gang.said(rank)
        assert "no interface 'fab7'" in answer and "remedy" in answer


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"protocol": "ll"}, "protocol"), ({"family": "2.18"}, "family"), ({"family": "3.0"}, "nccl_version"),
        ({"mtu": 1500}, "mtu"), ({"channels": 0}, "channels"), ({"address": "fe80::1"}, "address"),
        ({"qps_per_connection": 9}, "qps_per_connection"), ({"buffer_bytes": {"ll": 100001}}, "buffer_bytes.ll"),
        ({"buffer_bytes": {"lll": 65536}}, "buffer_bytes.lll"), ({"colour": "blue"}, "FLOWCHECK_SOFTROCE"),
        ({"channels": "2"}, "channels"), ({"retransmit_ms": 0}, "retransmit_ms"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"interface": "fab0", "address": "10.77.0.10", **change})
    monkeypatch.setenv("FLOWCHECK_SOFTROCE", text)
    with pytest.raises(UserError) as caught:
        Settings.from_environment()
    assert where in caught.value.where and caught.value.remedy


def test_rings_must_name_every_rank() -> None:
    settings = Settings.from_dict({"interface": "a", "address": "10.0.0.1", "rings": [[0, 2, 1]]})
    assert settings.ring(0, 3) == (0, 2, 1)
    with pytest.raises(UserError, match="does not name each of 4 ranks"):
        settings.ring(0, 4)
