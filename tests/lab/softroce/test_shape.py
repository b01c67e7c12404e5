"""The same job on softroce and on two ConnectX NICs: message by message the same, field by field.

The job behind the captures (5000 parameters, 2 ranks, ring, LL, path MTU 4096) is trained again; contents of gradients
differ (another GPU, other inputs), contents of the parameter broadcast do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from capture import Capture
from gang import Gang
from scapy.utils import RawPcapNgReader

JOB = Path(__file__).parents[2] / "data" / "jobs" / "iter_40000_p2p_iter10_2.json"
ITERATIONS = 20

pytestmark = [pytest.mark.root, pytest.mark.captures]


@dataclass
class Flow:
    """What one destination QP received, and what was acknowledged to it."""

    packets: list[dict[str, Any]] = field(default_factory=list)
    acks: list[tuple[int, int]] = field(default_factory=list)


def flows_of(frames: Iterable[bytes], qpns: set[int]) -> dict[int, Flow]:
    """Requests of these destination QPs in order, decoded by hand: opcode, psn, last, reth, imm, payload, headers."""
    found: dict[int, Flow] = {}
    for frame in frames:
        version = {b"\x86\xdd": 6, b"\x08\0": 4}.get(frame[12:14], 0)
        ip = frame[14:]
        if version == 0 or (ip[6] if version == 6 else ip[9]) != 17:
            continue
        udp = ip[40 if version == 6 else 20 :]
        bth = udp[8:]
        if udp[2:4] != b"\x12\xb7" or int.from_bytes(bth[5:8], "big") not in qpns:
            continue
        flow = found.setdefault(int.from_bytes(bth[5:8], "big"), Flow())
        opcode, psn = bth[0], int.from_bytes(bth[9:12], "big")
        rest = bth[12 : int.from_bytes(udp[4:6], "big") - 8 - 4]
        if opcode == 17:
            flow.acks.append((psn, int.from_bytes(rest[1:4], "big")))
            continue
        reth = imm = None
        if opcode in (6, 10, 11):
            reth, rest = rest[:16], rest[16:]
        if opcode in (9, 11):
            imm, rest = rest[:4], rest[4:]
        traffic_class = (ip[0] << 8 | ip[1]) >> 4 & 255 if version == 6 else ip[1]
        flow.packets.append({
            "opcode": opcode, "psn": psn, "reth": reth, "imm": imm, "payload": rest,
            "headers": (traffic_class, ip[7] if version == 6 else ip[8], udp[6:8], bth[1:4], udp[0] >> 6),
        })
    return found


def written(packets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests as messages: address, length, pieces (opcode, bytes, psn), immediate, payload."""
    messages: list[dict[str, Any]] = []
    for packet in packets:
        if packet["reth"] is not None:
            messages.append({
                "address": int.from_bytes(packet["reth"][:8], "big"), "imm": None, "pieces": [], "payload": b"",
                "length": int.from_bytes(packet["reth"][12:], "big"), "rkey": packet["reth"][8:12],
            })
        message = messages[-1]
        message["pieces"].append((packet["opcode"], len(packet["payload"]), packet["psn"]))
        message["payload"] += packet["payload"]
        message["imm"] = packet["imm"] or message["imm"]
    return messages


def data_shape(messages: list[dict[str, Any]]) -> list[Any]:
    """Everything of data messages that is not contents or a base address."""
    base = min(message["address"] for message in messages)
    return [
        (
            (message["address"] - base) / 65536, message["length"], message["imm"], message["pieces"],
            {message["payload"][at : at + 4] for at in range(4, len(message["payload"]), 8)},
        )
        for message in messages
    ]


def cts_shape(messages: list[dict[str, Any]]) -> list[Any]:
    """Everything of CTS writes that is not a base address or a key."""
    base = min(message["address"] for message in messages)
    slots = min(int.from_bytes(message["payload"][:8], "little") for message in messages)
    return [
        (
            message["address"] - base, message["length"], message["imm"], message["pieces"],
            (int.from_bytes(message["payload"][:8], "little") - slots) / 65536, message["payload"][8:12],
            message["payload"][16:],
        )
        for message in messages
    ]


@pytest.fixture(scope="module")
def both(
    gang: Gang, capture: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[Any], dict[int, Flow]]]:
    """ "nic" and "soft": (flows of the manifest, what was seen)."""
    job = json.loads(JOB.read_text())
    with RawPcapNgReader(str(capture("nccl-hardware/iter_40000_p2p_iter10_2.pcapng"))) as reader:
        nic = [frame for frame, _ in reader]
    out = tmp_path_factory.mktemp("shape")
    options = {"linear": 5000, "iterations": ITERATIONS, "lr": 0.001, "momentum": 0, "cap_mb": 25}
    with Capture(gang.fabric.config.namespace("r0")) as seen:
        gang.train(2, {"family": "2.19.4", "protocol": "LL", "mtu": 4096}, options, out)
    soft = json.loads((out / "describe-0.json").read_text())["flows"]
    made = {}
    for name, flows, frames in (("nic", job["flows"], nic), ("soft", soft, [frame for _, frame in seen.frames])):
        qpns = {qpn for flow in flows for qpn in (*flow["qpns"], *flow["cts_qpns"])}
        made[name] = sorted(flows, key=lambda flow: flow["src"]), flows_of(frames, qpns)
    return made


@pytest.mark.parametrize("source", [0, 1])
def test_data(both: Any, source: int) -> None:
    nic, soft = (written(seen[flows[source]["qpns"][0]].packets) for flows, seen in (both["nic"], both["soft"]))
    assert len(soft) == len(nic) > 2 * ITERATIONS
    for number, (a, b) in enumerate(zip(data_shape(nic), data_shape(soft), strict=True)):
        assert a == b, f"message {number}"


@pytest.mark.parametrize("source", [0, 1])
def test_clear_to_send(both: Any, source: int) -> None:
    nic, soft = (written(seen[flows[source]["cts_qpns"][0]].packets) for flows, seen in (both["nic"], both["soft"]))
    for number, (a, b) in enumerate(zip(cts_shape(nic), cts_shape(soft), strict=True)):
        assert a == b, f"CTS {number}"
    # The address and key announced are those that the data then goes to.
    for flows, seen in (both["nic"], both["soft"]):
        data = written(seen[flows[source]["qpns"][0]].packets)
        announced = written(seen[flows[source]["cts_qpns"][0]].packets)
        for message, element in zip(data, announced, strict=True):
            assert message["address"] == int.from_bytes(element["payload"][:8], "little")
            assert message["rkey"] == element["payload"][12:16][::-1]


def test_parameters_are_the_same_bits(both: Any) -> None:
    """DDP's third message of rank 0 is the broadcast of the initial parameters."""
    nic, soft = (written(seen[flows[0]["qpns"][0]].packets)[2] for flows, seen in (both["nic"], both["soft"]))
    assert nic["length"] == 40000 and nic["payload"] == soft["payload"]


def test_headers(both: Any) -> None:
    """Traffic class, hop limit, no UDP checksum, MigReq, pads, partition, and the upper bits of the source port."""
    kinds = [
        {(p["opcode"], p["headers"]) for flow in seen.values() for p in flow.packets} for _, seen in both.values()
    ]
    assert kinds[0] == kinds[1]


def test_acknowledgements(both: Any) -> None:
    """Every message's last packet is acknowledged; an ACK for it carries the number of messages completed."""
    for flows, seen in both.values():
        for flow in flows:
            for qpn, back in ((flow["qpns"][0], flow["cts_qpns"][0]), (flow["cts_qpns"][0], flow["qpns"][0])):
                lasts = [message["pieces"][-1][2] for message in written(seen[qpn].packets)]
                counted = dict(seen[back].acks)
                assert {psn: counted[psn] for psn in lasts} == {psn: i + 1 for i, psn in enumerate(lasts)}
