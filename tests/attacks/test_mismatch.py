"""A manifest that does not match the traffic, captures that are not what they seem, weights that are not
the job's: a sentence that names file, place and remedy, a status that is not 0, and nothing that looks
like a checkpoint. Through the command line, as a person meets it."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowcheck.cli import main
from flowcheck.job.model import Collective
from lab.synth import example_job, generate
from lab.synth.contents import save_parameters

Edit = Callable[[dict], None]
pytestmark = pytest.mark.usefixtures("eal")


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ring.pcap with job.json (4 ranks, LL, 2 iterations), and init.safetensors."""
    pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")
    where = tmp_path_factory.mktemp("traffic")
    job = example_job(ranks=4, count=[700, 5000], protocol="ll", version="2.19.4")
    made = generate(job, iterations=2, ports=[1])
    made.write(where / "ring.pcap")
    save_parameters(job, made.parameters, where / "init.safetensors")
    (where / "job.json").write_text(job.to_json())
    return where


def replay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process: what `flowcheck replay` prints and returns, without importing torch anew."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["flowcheck", "replay", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def test_the_command_itself(traffic: Path, tmp_path: Path) -> None:
    """One run as a process of its own: status, streams, no traceback."""
    command = [sys.executable, "-P", "-m", "flowcheck", "replay", "nowhere.pcap", "--job", str(traffic / "job.json")]
    result = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280)
    refused(result, tmp_path, "nowhere.pcap")


def refused(result: subprocess.CompletedProcess[str], out: Path, *words: str) -> None:
    text = result.stdout + result.stderr
    assert result.returncode not in (0, 70), text
    assert "Traceback" not in text
    for word in words:
        assert word in " ".join(text.split()), text
    assert not list(out.glob("step-*")) and not list(out.glob(".step-*"))


def edited(traffic: Path, tmp_path: Path, edit: Edit) -> Path:
    job = json.loads((traffic / "job.json").read_text())
    edit(job)
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path / "job.json"


def _count(job: dict) -> None:
    job["collectives"]["iteration_0"][0]["count"] -= 8
    job["model"] = job["buckets"]["iteration_0"] = job["buckets"]["steady"] = []
    job["optimizer"] = None
    job["collectives"]["startup"][2]["tensors"] = []


def _ranks(job: dict) -> None:
    job["communicator"]["ranks"] = 3
    job["flows"] = [f for f in job["flows"] if f["src"] < 3 and f["dst"] < 3 and (f["src"] + 1) % 3 == f["dst"]]


def _protocol(job: dict) -> None:
    job["communicator"]["protocol"] = "simple"


def _mtu(job: dict) -> None:
    job["communicator"]["mtu"] = 1024


def _channels(job: dict) -> None:
    job["communicator"]["channels"] = 4


def _version(job: dict) -> None:
    job["communicator"]["nccl_version"] = "2.27.7"


def _startup(job: dict) -> None:
    del job["collectives"]["startup"][0]


@pytest.mark.parametrize("edit", [_count, _ranks, _protocol, _mtu, _channels, _version, _startup])
def test_wrong_manifest(traffic: Path, tmp_path: Path, edit: Edit) -> None:
    result = replay(traffic / "ring.pcap", "--job", edited(traffic, tmp_path, edit), "--out", tmp_path / "out")
    if edit is _channels and result.returncode == 0:
        pytest.skip("700 and 5000 elements use one channel either way: the manifest is right enough")
    refused(result, tmp_path / "out", "channel 0, rank")


def test_missing_flow(traffic: Path, tmp_path: Path) -> None:
    def edit(job: dict) -> None:
        job["flows"] = [flow for flow in job["flows"] if flow["dst"] != 1]

    result = replay(traffic / "ring.pcap", "--job", edited(traffic, tmp_path, edit), "--out", tmp_path / "out")
    refused(result, tmp_path / "out", "not_mirrored", "iterations are incomplete")


def test_no_flow_of_the_job(traffic: Path, tmp_path: Path) -> None:
    def edit(job: dict) -> None:
        for flow in job["flows"]:
            flow["qpns"] = [q ^ 0x800000 for q in flow["qpns"]]
            flow["cts_qpns"] = []

    result = replay(traffic / "ring.pcap", "--job", edited(traffic, tmp_path, edit), "--out", tmp_path / "out")
    refused(result, tmp_path / "out", "no gradient packet of this job", "ring.pcap", "flowcheck inspect")


def test_more_iterations_than_there_are(traffic: Path, tmp_path: Path) -> None:
    result = replay(traffic / "ring.pcap", "--job", traffic / "job.json", "--out", tmp_path, "--iterations", "3")
    assert result.returncode == 1
    assert "3 iterations were asked for and 2 are in the captures" in result.stdout


@pytest.mark.parametrize("damage", ["missing", "half", "empty", "pickle", "shape", "bits"])
def test_bad_init(traffic: Path, tmp_path: Path, damage: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "init.safetensors"
    good = (traffic / "init.safetensors").read_bytes()
    tensors = load_file(traffic / "init.safetensors")
    name = sorted(tensors)[0]
    if damage == "half":
        path.write_bytes(good[: len(good) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pickle":
        torch.save(tensors, path)
    elif damage == "shape":
        save_file({**tensors, name: tensors[name].reshape(-1)[1:]}, path)
    elif damage == "bits":
        tensors[name].view(torch.int32).reshape(-1)[0] ^= 1
        save_file(tensors, path)
    result = replay(traffic / "ring.pcap", "--job", traffic / "job.json", "--init", path, "--out", tmp_path / "out")
    refused(result, tmp_path / "out", "init.safetensors", "remedy")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"communicator": 3}', '{"flows": []}', "\x00\xff", "[" * 100_000])
def test_bad_job(traffic: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_bytes(text.encode("latin1"))
    refused(
        replay(traffic / "ring.pcap", "--job", tmp_path / "bad.json", "--out", tmp_path / "out"),
        tmp_path / "out",
        "bad.json",
    )


@pytest.mark.parametrize("cut", [0, 3, 24, 30, 40, 100])
def test_cut_capture(traffic: Path, tmp_path: Path, cut: int) -> None:
    (tmp_path / "cut.pcap").write_bytes((traffic / "ring.pcap").read_bytes()[:cut])
    refused(
        replay(tmp_path / "cut.pcap", "--job", traffic / "job.json", "--out", tmp_path / "out"),
        tmp_path / "out",
        "cut.pcap: at byte",
    )


def test_a_capture_that_lacks_the_end_of_an_acknowledgement_is_whole(traffic: Path, tmp_path: Path) -> None:
    made = []
    for name, cut in (("whole", None), ("cut", -1)):
        capture = tmp_path / f"{name}.pcap"
        capture.write_bytes((traffic / "ring.pcap").read_bytes()[:cut])
        result = replay(capture, "--job", traffic / "job.json", "--out", tmp_path / name)
        assert result.returncode == 0 and ("left out" in " ".join(result.stdout.split())) == (name == "cut")
        made.append([file.read_bytes() for file in sorted((tmp_path / name).glob("step-*/*.safetensors"))])
    assert made[0] and made[0] == made[1]


@pytest.mark.parametrize("length, words", [(128, "truncated"), (64, "raise the snap length")])
def test_snaplen_cuts_every_packet(traffic: Path, tmp_path: Path, length: int, words: str) -> None:
    """Headers alone: counted as truncated, never placed, and no checkpoint."""
    import struct

    data, out, at = (traffic / "ring.pcap").read_bytes(), bytearray(), 24
    magic = data[:4]
    order = "<" if magic in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    out += data[:16] + struct.pack(order + "I", length) + data[20:24]
    while at < len(data):
        seconds, fraction, captured, original = struct.unpack_from(order + "IIII", data, at)
        kept = min(captured, length)
        out += struct.pack(order + "IIII", seconds, fraction, kept, original) + data[at + 16 : at + 16 + kept]
        at += 16 + captured
    (tmp_path / "short.pcap").write_bytes(out)
    result = replay(tmp_path / "short.pcap", "--job", traffic / "job.json", "--out", tmp_path / "out")
    refused(result, tmp_path / "out", words)


def test_every_icrc_wrong(traffic: Path, tmp_path: Path) -> None:
    """A capture that did not keep the ICRC: nothing is placed, and what to do is said."""
    import struct

    data, at = bytearray((traffic / "ring.pcap").read_bytes()), 24
    while at < len(data):
        captured = struct.unpack_from("<I", data, at + 8)[0]
        at += 16 + captured
        data[at - 4 : at] = bytes(4)
    out = tmp_path / "out"
    (tmp_path / "zeroed.pcap").write_bytes(data)
    refused(replay(tmp_path / "zeroed.pcap", "--job", traffic / "job.json", "--out", out), out, "icrc", "--no-icrc")


def test_unlisted_calls_that_fill_iterations(tmp_path: Path) -> None:
    """Each iteration reduces one more tensor, of the bucket's size, and the manifest says nothing of it. Behind the
    first disagreement everything agrees again: whatever is called complete there carries a mark, and is not applied."""
    job = example_job(ranks=4, count=5000, protocol="ll", version="2.19.4")
    (tmp_path / "job.json").write_text(job.to_json())
    for calls in (job.collectives.iteration_0, job.collectives.steady):
        calls.append(Collective("AllReduce", 5000, carries="other"))
    generate(job, iterations=5).write(tmp_path / "more.pcap")
    out = tmp_path / "out"
    refused(replay(tmp_path / "more.pcap", "--job", tmp_path / "job.json", "--out", out), out, "trusted again")
    iterations = json.loads((out / "report.json").read_text())["iterations"]
    marked = [i["verdict"]["unproven"] for i in iterations if i["verdict"]["complete"] and i["iteration"]]
    assert marked and all("trusted again" in marks[0] for marks in marked)
