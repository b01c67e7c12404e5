"""Properties of a synthesis: frames other tools accept, truth that adds up, faults that are all named."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Collectives, Job
from lab.synth import Synthesis, TransportOptions, example_job, generate
from lab.synth.contents import load_parameters, save_parameters
from lab.synth.families import FAMILIES, NEWEST, family_of
from lab.synth.generate import operation_of
from lab.synth.schedule import messages, tree_of
from lab.synth.values import generate_values

VERSIONS = [f"{family.name}.3" for family in FAMILIES]  # of the generator's own table


def frames(made: Synthesis) -> list[bytes]:
    return [frame for _, frame in made.packets]


def bth(frame: bytes) -> tuple[int, int, int]:
    """(opcode, QPN, PSN) of an untagged IPv4 frame."""
    qpn, psn = struct.unpack_from(">II", frame, 46)
    return frame[42], qpn & 0xFFFFFF, psn & 0xFFFFFF


def bucket_truth(made: Synthesis, iteration: int = 0, bucket: int = 0) -> dict[str, Any]:
    return made.truth["iterations"][iteration]["buckets"][bucket]


# -- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "vlan"), [
    ({"protocol": "ll"}, None),
    ({"protocol": "simple", "version": "2.19.4", "ipv6": True, "mtu": 1024, "qps": 4,
      "split_data_on_qps": True, "adaptive_routing": True, "dtype": "bfloat16"}, 7),
    ({"protocol": "simple", "version": "2.30.7", "mtu": 256, "qps": 2, "dtype": "bfloat16"}, None),
    ({"protocol": "ll128", "version": "2.22.3", "ipv6": True, "mtu": 2048}, 0x2005),
])
def test_icrc_agrees_with_scapy(options: dict[str, Any], vlan: int | None) -> None:
    from scapy.contrib.roce import BTH
    from scapy.layers.l2 import Ether

    job = example_job(ranks=3, count=[3001, 1999], **options)
    made = frames(generate(job, iterations=2, ports=[1], transport=TransportOptions(vlan=vlan)))
    for frame in made[:: max(1, len(made) // 60)]:
        packet = Ether(frame)
        packet[BTH].icrc = None
        assert bytes(packet)[-4:] == frame[-4:]


@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed")
@pytest.mark.parametrize("name", ["a.pcap", "a.pcapng"])
def test_tshark_finds_nothing_malformed(tmp_path: Path, name: str) -> None:
    job = example_job(ranks=3, protocol="simple", qps=2, split_data_on_qps=True, adaptive_routing=True)
    made = generate(job, iterations=2, transport=TransportOptions(retransmit=0.3))
    made.write(tmp_path / name)
    names = ("infiniband.bth.opcode", "_ws.malformed", "ip.checksum.status")
    fields = ["-T", "fields", *(part for name in names for part in ("-e", name))]
    checked = subprocess.run(
        ["tshark", "-o", "ip.check_checksum:TRUE", "-r", str(tmp_path / name), *fields], capture_output=True,
        text=True, check=True,
    )
    rows = [line.split("\t") for line in checked.stdout.splitlines()]
    assert [int(row[0]) for row in rows] == [frame[42] for frame in frames(made)]
    assert {tuple(row[1:]) for row in rows} == {("", "1")}


def test_seed_decides_every_byte() -> None:
    job = example_job(ranks=3, count=1001)
    rates = dict.fromkeys(("loss", "reorder", "duplicate", "corrupt"), 0.05)
    options: dict[str, Any] = {"iterations": 2, **rates}
    assert generate(job, seed=4, **options).packets == generate(job, seed=4, **options).packets
    assert generate(job, seed=4, **options).packets != generate(job, seed=5, **options).packets


# -- truth --------------------------------------------------------------------------------------------


def test_reduced_is_the_sum_in_ring_order() -> None:
    job = example_job(ranks=3, count=2000, startup=False, version="2.27.7")
    made = generate(job, seed=9)
    truth = bucket_truth(made)
    x = [generate_values("float32", truth["data_seed"], rank, 2000) for rank in range(3)]
    expected = np.empty(2000, "<f4")
    for chunk, (start, stop) in enumerate([(0, 668), (668, 1336), (1336, 2000)]):
        a, b, c = (x[(chunk + k) % 3][start:stop] for k in (1, 2, 0))
        expected[start:stop] = (a + b) + c
    assert np.array_equal(made.reduced[0, 0], expected)
    assert truth["sha256"] == hashlib.sha256(expected.tobytes()).hexdigest()


@pytest.mark.parametrize(("direction", "missing"), [("in", (0, 1000)), ("out", (1000, 2000)), ("both", None)])
def test_one_direction_misses_one_chunk(direction: str, missing: tuple[int, int] | None) -> None:
    """4 ranks, 4000 elements: inbound of rank 0 lacks chunk 0, outbound chunk 1 (nccl-wire.md 2.2)."""
    job = example_job(ranks=4, count=4000)
    truth = bucket_truth(generate(job, directions=direction))
    whole = np.ones(4000, bool)
    if missing:
        whole[slice(*missing)] = False
    carried = np.zeros(4000, bool)
    for start, stop in truth["carried"]:
        carried[start:stop] = True
    assert np.array_equal(carried, whole)
    assert truth["carried"] == truth["present"]


@settings(max_examples=40)
@given(
    ranks=st.integers(2, 8), channels=st.integers(1, 4), count=st.integers(1, 70_000),
    protocol=st.sampled_from(["ll", "ll128", "simple"]), version=st.sampled_from(VERSIONS),
    algorithm=st.sampled_from(["ring", "tree"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "int64"]),
)
def test_every_layout_is_whole(
    ranks: int, channels: int, count: int, protocol: str, version: str, algorithm: str, dtype: str,
) -> None:
    """All ranks' reduced messages cover each element; in a ring each element leaves n-1 times reduced."""
    job = example_job(
        ranks=ranks, channels=channels, count=count, protocol=protocol, version=version, algorithm=algorithm,
        dtype=dtype, startup=False,
    )
    plan = messages(operation_of(job, job.collectives.iteration_0[0]))
    times = np.zeros(count, int)
    for sent in plan.values():
        for message in sent:
            assert message.elements == 0 or 0 <= message.start <= count - message.elements
            if message.reduced:
                times[message.start:message.start + message.elements] += 1
    assert (times == ranks - 1).all()
    made = generate(job, ports=[0, 1] if algorithm == "tree" else [ranks - 1])
    truth = bucket_truth(made)
    assert truth["carried"] == truth["present"]
    if algorithm == "ring":
        assert truth["carried"] == [[0, count]]


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("ranks", range(2, 40))
def test_trees_are_trees(ranks: int, channel: int) -> None:
    tree = tree_of(ranks, channel, 2)
    assert tree.parent.count(-1) == 1
    for rank, up in enumerate(tree.parent):
        if up >= 0:
            assert rank in tree.children[up]
    assert sum(len(children) for children in tree.children) == ranks - 1
    assert max(len(children) for children in tree.children) <= 2


@pytest.mark.parametrize("op", ["AllGather", "ReduceScatter", "Broadcast"])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
@pytest.mark.parametrize("version", VERSIONS)
def test_other_collectives_cover_their_tensor(op: str, protocol: str, version: str) -> None:
    example = example_job(ranks=3, channels=2, protocol=protocol, version=version)
    call = Collective(op, 30_001)
    job = Job(example.communicator, example.flows, Collectives(iteration_0=[call]))
    operation = operation_of(job, call)
    size = operation.count * (1 if op == "Broadcast" else 3)
    times = np.zeros(size, int)
    for sent in messages(operation).values():
        for message in sent:
            times[message.start:message.start + message.elements] += 1
    assert (times == 2).all()
    made = generate(job, ports=[0, 1, 2])
    assert made.packets and not made.reduced


# -- connections ---------------------------------------------------------------------------------------


def test_message_numbers_run_through_all_calls() -> None:
    """PSNs of every QP and direction are without gap from 0, CTS numbers from 1, ACK counts never fall."""
    job = example_job(ranks=2, count=[700, 300], protocol="simple", qps=2)
    made = frames(generate(job, iterations=3))
    requests: dict[int, list[int]] = {}
    counts: dict[int, list[int]] = {}
    announced: dict[int, list[int]] = {}
    for frame in made:
        opcode, qpn, psn = bth(frame)
        if opcode == 17:
            counts.setdefault(qpn, []).append(struct.unpack_from(">I", frame, 54)[0] & 0xFFFFFF)
        else:
            requests.setdefault(qpn, []).append(psn)
        if opcode == 10 and len(frame) == 42 + 12 + 16 + 64 + 4:
            announced.setdefault(qpn, []).append(struct.unpack_from("<Q", frame, 70 + 40)[0])
    for psns in requests.values():
        assert psns == list(range(len(psns)))
    for numbers in announced.values():
        assert numbers == list(range(1, len(numbers) + 1))
    assert all(seen == sorted(seen) for seen in counts.values())


def test_psn_wraps_at_24_bits() -> None:
    job = example_job(ranks=2, count=5000)
    made = generate(job, iterations=2, transport=TransportOptions(first_psn=0xFFFFF0))
    psns = [psn for opcode, _, psn in map(bth, frames(made)) if 6 <= opcode <= 11]
    assert min(psns) == 0 and max(psns) == 0xFFFFFF


@pytest.mark.parametrize(("protocol", "qps", "start"), [("ll", 1, 3), ("simple", 2, 77), ("ll128", 3, 130)])
def test_mid_stream_is_the_tail_of_the_whole(protocol: str, qps: int, start: int) -> None:
    """Counting over iterations leaves the same steps, PSNs and numbers as playing them."""
    job = example_job(ranks=2, count=[300, 50], protocol=protocol, qps=qps)
    whole = frames(generate(job, iterations=start + 2))
    tail = frames(generate(job, iterations=2, first_iteration=start))
    assert 0 < len(tail) < len(whole)
    assert whole[-len(tail):] == tail


def test_ll_flags_near_the_wrap_send_whole_slots() -> None:
    """Steps 0x7ffffff8.. send 64 KiB each (nccl-wire.md 4.1); two steps an iteration, from step 10 on."""
    job = example_job(ranks=2, count=100, mtu=4096, startup=False, rebuild=False)
    made = generate(job, iterations=6, first_iteration=0x7FFFFFF8 // 2 - 1)
    opcodes = [bth(frame)[0] for frame in frames(made)]
    assert opcodes.count(6) == opcodes.count(9) == 2 * 8
    assert opcodes.count(11) == 2 * 4


# -- faults ----------------------------------------------------------------------------------------------


def key(entry: dict[str, Any]) -> tuple[int, int, bool]:
    return entry["qpn"], entry["psn"], entry["kind"] in ("ack", "nak")


def keys(made: Synthesis) -> Counter[tuple[int, int, bool]]:
    return Counter((qpn, psn, opcode == 17) for opcode, qpn, psn in map(bth, frames(made)))


def test_every_fault_is_named() -> None:
    job = example_job(ranks=4, count=20_000, mtu=1024)
    clean = generate(job, iterations=2, seed=1)
    hurt = generate(job, iterations=2, seed=1, loss=0.05, reorder=0.03, duplicate=0.04, corrupt=0.02)
    truth = hurt.truth
    assert all(truth[name] for name in ("dropped", "moved", "duplicated", "corrupted"))
    wanted = keys(clean) - Counter(map(key, truth["dropped"])) + Counter(map(key, truth["duplicated"]))
    assert keys(hurt) == wanted
    originals = set(frames(clean))
    assert sum(frame not in originals for frame in frames(hurt)) >= len(truth["corrupted"])
    stamps = [stamp for stamp, _ in hurt.packets]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_present_is_what_the_surviving_packets_hold(protocol: str) -> None:
    """n = 2 has no second copy: what is missing is exactly the reduced packets that were dropped."""
    job = example_job(ranks=2, count=30_000, protocol=protocol, mtu=1024)
    made = generate(job, loss=0.05, seed=3)
    truth = bucket_truth(made)
    assert truth["carried"] == [[0, 30_000]]
    held = sum(stop - start for start, stop in truth["present"])
    assert 0 < held < 30_000
    assert generate(job, seed=3).truth["iterations"][0]["buckets"][0]["sha256"] == truth["sha256"]


def test_retransmitted_packets_are_repeats() -> None:
    job = example_job(ranks=2, count=30_000, mtu=1024)
    made = generate(job, iterations=2, transport=TransportOptions(retransmit=0.6))
    assert made.truth["retransmitted"]
    seen: dict[tuple[int, int], bytes] = {}
    repeats = 0
    for frame in frames(made):
        opcode, qpn, psn = bth(frame)
        if opcode != 17:
            repeats += (qpn, psn) in seen
            assert seen.setdefault((qpn, psn), frame) == frame
    assert repeats > 0
    clean = {bth(frame)[1:] for frame in frames(generate(job, iterations=2)) if frame[42] != 17}
    assert set(seen) == clean
    assert bucket_truth(made)["present"] == [[0, 30_000]]


# -- inputs -------------------------------------------------------------------------------------------


def test_parameters_through_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    job = example_job(ranks=2, count=[700, 300])
    given_ = {
        entry.name: np.arange(entry.elements, dtype="<f4").reshape(entry.shape) for entry in job.model
    }
    save_file(given_, tmp_path / "init.safetensors")
    flat = load_parameters(job, tmp_path / "init.safetensors")
    made = generate(job, parameters=flat)
    joined = b"".join(given_[entry.name].tobytes() for entry in job.model)
    (truth,) = made.truth["parameters"]
    assert truth["sha256"] == hashlib.sha256(joined).hexdigest() and truth["carried"] == [[0, 1000]]
    save_parameters(job, made.parameters, tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert all(np.array_equal(again[name], value) for name, value in given_.items())


@pytest.mark.parametrize("content", [
    b"", b"1234567", b"\xff" * 64, b"\2" + b"\0" * 7 + b"{}", b"\2" + b"\0" * 7 + b"[]",
])
def test_bad_parameters_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "init.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"init\.safetensors"):
        load_parameters(example_job(), path)
    with pytest.raises(UserError, match="cannot be read"):
        load_parameters(example_job(), tmp_path / "absent")


def test_refusals() -> None:
    with pytest.raises(UserError, match="no rank 5"):
        generate(example_job(), ports=[5])
    with pytest.raises(UserError, match="sideways"):
        generate(example_job(), directions="sideways")
    with pytest.raises(UserError, match="has no known wire format"):
        family_of(f"2.{NEWEST[1] + 1}.0")
    job = example_job(ranks=3)
    del job.flows[0]
    with pytest.raises(UserError, match="needs a connection"):
        generate(job)


def test_families_are_in_order() -> None:
    assert [family.first for family in FAMILIES] == sorted(family.first for family in FAMILIES)
    assert json.loads(json.dumps([family.name for family in FAMILIES]))[0] == "2.12"
    assert family_of(f"2.{NEWEST[1]}.1") is FAMILIES[-1]
