"""What softroce puts on the network, in others' eyes: tshark, scapy, and the project's parser, learner and replay."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from capture import Capture, job_of
from gang import Gang
from reference import train_alone
from safetensors.torch import load_file
from scapy.contrib.roce import BTH
from scapy.layers.l2 import Ether

from flowcheck.learning.bootstrap import Stream, parse_bootstrap, reassemble
from lab.softroce.settings import Settings
from lab.synth.writer import write_capture

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"protocol": "LL", "family": "2.19.4"}),
    (3, {"protocol": "SIMPLE", "family": "2.27.7", "channels": 2, "qps_per_connection": 2, "split_data_on_qps": True}),
    (4, {"protocol": "LL128", "family": "2.27.7", "channels": 2, "mtu": 1024}),
    (4, {"protocol": "LL128", "family": "2.21.5", "algorithm": "tree", "channels": 2}),
    (3, {"protocol": "SIMPLE", "family": "2.30.7", "adaptive_routing": True, "rings": [[0, 2, 1]]}),
    (4, {"protocol": "LL", "family": "2.24.3", "algorithm": "tree"}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{'-'.join(map(str, list(c[1].values())[:2]))}")
def seen(
    request: pytest.FixtureRequest, gang: Gang, tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, dict[str, Any], Path, list[Any], list[bytes]]:
    """A training with rank 1 captured: ranks, settings, folder (with seen.pcap), what the ranks saved, RoCE frames."""
    ranks, settings = request.param
    out = tmp_path_factory.mktemp("wire")
    with Capture(gang.fabric.config.namespace("r1")) as capture:
        results = gang.train(ranks, settings, {}, out)
    write_capture(out / "seen.pcap", capture.frames)
    roce = [frame for _, frame in capture.frames if frame[12:14] == b"\x08\0" and frame[23] == 17]
    assert roce and all(frame[36:38] == b"\x12\xb7" for frame in roce)
    return ranks, settings, out, results, roce


def test_tshark_finds_nothing_malformed(seen: Any) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    _, _, out, _, roce = seen

    def frames(condition: str) -> list[str]:
        # Payload whose first four bytes look like an EtherType is taken for Ethernet over InfiniBand: not looked at.
        command = ["tshark", "-n", "--disable-heuristic", "eth_over_ib", "-r", str(out / "seen.pcap")]
        command += ["-Y", condition, "-T", "fields", "-e", "frame.number"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert frames("udp && (_ws.malformed || _ws.expert.severity == error || ip.checksum.status == 0)") == []
    known = " || ".join(f"infiniband.bth.opcode == {opcode}" for opcode in (6, 7, 8, 9, 10, 11, 17))
    assert len(frames(f"infiniband.invariant.crc && ip.flags.df == 1 && ip.id == 0 && ({known})")) == len(roce)
    assert frames("icmp") == []


def test_scapy_agrees_with_every_icrc(seen: Any) -> None:
    *_, roce = seen
    for frame in roce:
        layer = Ether(frame)[BTH]
        assert layer.compute_icrc(frame[42:]) == frame[-4:]


def test_bootstrap_is_read_as_nccls(seen: Any) -> None:
    """The learner's reader of NCCL's bootstrap finds the flows that `describe` gives."""
    ranks, settings, out, _, _ = seen
    frames = [bytes(frame) for _, frame in _tcp(out)]
    segments: dict[Any, list[tuple[int, int, bytes]]] = {}
    for frame in frames:
        ip, tcp = frame[14:34], frame[34 : 14 + int.from_bytes(frame[16:18], "big")]
        ends = tuple(
            (".".join(map(str, ip[at : at + 4])), int.from_bytes(tcp[port : port + 2], "big"))
            for at, port in ((12, 0), (16, 2))
        )
        data = tcp[(tcp[12] >> 4) * 4 :]
        segments.setdefault(ends, []).append((int.from_bytes(tcp[4:8], "big"), tcp[13], data))
    streams = [Stream(src, dst, *reassemble(some)) for (src, dst), some in segments.items()]
    found = parse_bootstrap(streams)
    # Which communicator has how many ranks is said to the root only, and rank 1 sees its own message to it.
    assert list(found.ranks.values()) == [ranks]
    said = json.loads((out / "describe-1.json").read_text())
    wanted = {(f["src"], f["dst"], *f["qpns"], *f["cts_qpns"]): f["channel"] for f in said["flows"]}
    got = {(f.src, f.dst, *f.qpns, *f.cts_qpns): f for f in found.connections}
    assert got.keys() == wanted.keys()
    assert {f.graph for f in found.connections} <= {"ring", settings.get("algorithm", "ring")}
    # Of a tree the learner knows the place among the connect infos, which need not begin with channel 0.
    assert all(f.channel == wanted[key] for key, f in got.items() if f.graph == "ring")


def _tcp(out: Path) -> list[tuple[int, bytes]]:
    from scapy.utils import RawPcapReader

    with RawPcapReader(str(out / "seen.pcap")) as reader:
        return [(0, frame) for frame, _ in reader if frame[12:14] == b"\x08\0" and frame[23] == 6]


def test_inspect_sees_the_flows_and_no_damage(seen: Any) -> None:
    """`flowcheck inspect`: every packet valid, every QP that `describe` names."""
    _, settings, out, _, roce = seen
    command = [sys.executable, "-P", "-c", "from flowcheck.cli import main; main()", "inspect", "--json"]
    done = subprocess.run([*command, str(out / "seen.pcap")], check=True, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert found["packets"]["roce"] == len(roce) and found["packets"]["malformed"] == 0
    assert found["icrc"] == {"ok": len(roce), "wrong": 0}
    said = json.loads((out / "describe-1.json").read_text())
    wanted = {(f["src_addr"], f["dst_addr"], qpn) for f in said["flows"] for qpn in f["qpns"]}
    used = {(c["source"], c["destination"], c["data_qp"]) for c in found["connections"] if c["is"] == "NCCL"}
    assert used and used <= wanted
    # A tree's ring carries only DDP's few words, on some channels; QPs of one connection are listed together.
    if settings.get("algorithm", "ring") == "ring" and "qps_per_connection" not in settings:
        assert used == wanted


def test_replay_rebuilds_what_the_trainers_have(seen: Any, replayed: Any) -> None:
    """The parser, which shares no code with softroce, gives the trainers' gradients, and the updater their weights."""
    ranks, settings, out, results, _ = seen
    options: dict[str, Any] = {}
    _, layouts = train_alone(Settings(interface="", address="", **settings), ranks, options)
    job = job_of(out, ranks, train.model_of(options), layouts, 0.05, 0.9)
    (out / "job.json").write_text(job.to_json())
    report, failure, folder = replayed(out / "seen.pcap", out / "job.json")
    assert failure == ""
    assert report["totals"]["iterations_complete"] == train.ITERATIONS
    for iteration, saved in enumerate(results[0]["iterations"]):
        for bucket, names in zip(
            report["iterations"][iteration]["buckets"], layouts[min(iteration, 1)], strict=True,
        ):
            flat = torch.cat([saved["gradients"][name].reshape(-1) for name in names]).numpy().tobytes()
            assert bucket["sha256"] == hashlib.sha256(flat).hexdigest(), f"iteration {iteration}"
    last = load_file(folder / f"step-{train.ITERATIONS:06d}" / "model.safetensors")
    for name, value in results[0]["iterations"][-1]["parameters"].items():
        assert torch.equal(last[name], value), name
