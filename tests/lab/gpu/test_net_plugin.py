"""The network plugin without a GPU: NCCL's host code re-created drives it, and the product reads what its port mirrors.

What each rank was given is drawn in C and summed in C, in the order of the ring. The parser has the capture and the
manifest. It has to find the same sums.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import flowcheck
from lab.gpu.plugin import PROTOCOLS, environment, read_flows

COUNTS = (100_003, 5, 300_000, 100_003)  # of one AllReduce each
QUICK = {(2, "LL", "2.30.7"), (3, "LL128", "2.28.9"), (4, "SIMPLE", "2.26.2"), (2, "SIMPLE", "2.29.2")}
Make = Callable[..., Path]


def ring(driver: Path, library: Path, out: Path, ranks: int, protocol: str, version: str, counts: Any) -> None:
    """All ranks to their end; each one's port is mirrored into a file."""
    running = []
    for rank in range(ranks):
        told = environment(library, rank=rank, nccl=version, port=f"pcap:{out}/port{rank}.pcap",
                           flows=out / f"flows{rank}.jsonl", protocol=protocol)
        words = [driver, library, version.split(".")[1], str(rank), str(ranks), out, protocol, *map(str, counts)]
        with (out / f"rank{rank}.log").open("wb") as log:
            running.append(subprocess.Popen(words, env={**os.environ, **told}, stderr=log))
    statuses = [one.wait(120) for one in running]
    assert not any(statuses), [(out / f"rank{rank}.log").read_text() for rank in range(ranks)]


def manifest(out: Path, ranks: int, protocol: str, version: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """A job whose steady iteration is all of these calls, a bucket each."""
    names, calls = [f"w{i}" for i in range(len(counts))], [{"op": "AllReduce", "count": count} for count in counts]
    return {
        "run_id": "ring", "flows": read_flows(out / "flows0.jsonl"),
        "communicator": {"ranks": ranks, "nccl_version": version, "protocol": PROTOCOLS[protocol]},
        "collectives": {"iteration_0": calls, "steady": calls},
        "buckets": {"steady": [{"slices": [{"name": name, "offset": 0, "length": count}]}
                               for name, count in zip(names, counts, strict=True)]},
        "model": [{"name": name, "shape": [count]} for name, count in zip(names, counts, strict=True)],
        "optimizer": {"name": "sgd", "rounding": "torch-cpu",
                      "groups": [{"params": names, "options": {"lr": 2.0**-6}}]},
    }


@pytest.mark.parametrize(("ranks", "protocol", "version"), [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product((2, 3, 4), PROTOCOLS, ("2.26.2", "2.28.9", "2.29.2", "2.30.7"))
])
def test_the_product_reads_what_isend_was_given(
    ranks: int, protocol: str, version: str, library: Path, compiled: Make, tmp_path: Path
) -> None:
    driver = compiled("net_driver")
    ring(driver, library, tmp_path, ranks, protocol, version, COUNTS * 2)  # two iterations
    job = tmp_path / "job.json"
    job.write_text(json.dumps(manifest(tmp_path, ranks, protocol, version, COUNTS)))
    start = {f"w{i}": torch.full((count,), 0.5) for i, count in enumerate(COUNTS)}
    save_file(start, tmp_path / "init.safetensors")
    result = flowcheck.replay(
        [tmp_path / "port0.pcap"], job=job, out=tmp_path / "replayed", init=tmp_path / "init.safetensors",
    )
    assert result.ok, result.report["failure"]
    assert result.report["unproven"] == [] and result.report["totals"]["iterations_complete"] == 2
    model = load_file(tmp_path / "replayed" / "step-000002" / "model.safetensors")
    for bucket, count in enumerate(COUNTS):
        weights = torch.full((count,), 0.5)
        for iteration in range(2):
            outputs = [np.fromfile(tmp_path / f"out-{rank}-{iteration * len(COUNTS) + bucket}", np.float32)
                       for rank in range(ranks)]
            assert all(np.array_equal(one.view(np.uint32), outputs[0].view(np.uint32)) for one in outputs)
            weights -= 2.0**-6 * torch.from_numpy(outputs[0])
        assert torch.equal(model[f"w{bucket}"], weights)


def test_every_rank_s_port_has_both_directions(library: Path, compiled: Make, tmp_path: Path) -> None:
    """Three ports together are the same job: copies agree, and nothing is on a connection that is not listed."""
    ring(compiled("net_driver"), library, tmp_path, 3, "LL", "2.27.7", COUNTS)
    told = manifest(tmp_path, 3, "LL", "2.27.7", COUNTS)
    told["flows"] = [flow for rank in range(3) for flow in read_flows(tmp_path / f"flows{rank}.jsonl")
                     if flow["src"] == rank]
    job = tmp_path / "job.json"
    job.write_text(json.dumps(told))
    result = flowcheck.replay([tmp_path / f"port{rank}.pcap" for rank in range(3)], job=job, out=tmp_path / "replayed")
    flows = {(one["src"], one["dst"]): one for one in result.report["flows"] if one["role"] == "gradients"}
    assert set(flows) == {(0, 1), (1, 2), (2, 0)}
    assert all(one["state"] == "ANCHORED" and one["missing"] == 0 for one in flows.values())
    assert result.report["iterations"][0]["verdict"]["complete"]
    # Clear-to-sends and acknowledgements, and second copies of what is there already: nothing else is left over.
    assert {cause for cause, n in result.report["drops"].items() if n} <= {"released", "control"}


@pytest.mark.parametrize(("changed", "said"), [
    ({"FLOWCHECK_NET_RANK": ""}, "have to be set"), ({"FLOWCHECK_NET_NCCL": "2.19.4"}, "have to be set"),
    ({"FLOWCHECK_NET_PORT": "/tmp/port"}, "Invalid argument"),
    ({"FLOWCHECK_NET_PORT": "interface:none"}, "No such device"),
    ({"FLOWCHECK_NET_FLOWS": "/nowhere/flows"}, "No such file"),
])
def test_what_cannot_be_is_said_to_nccl(
    changed: dict[str, str], said: str, library: Path, compiled: Make, tmp_path: Path
) -> None:
    told = environment(library, rank=0, nccl="2.27.7", port=None, flows=tmp_path / "flows", protocol="LL")
    words = [compiled("net_driver"), library, "27", "0", "2", tmp_path, "LL", "5"]
    done = subprocess.run(words, env={**os.environ, **told, **changed}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and said in done.stderr


def test_a_rank_that_dies_ends_the_others(library: Path, compiled: Make, tmp_path: Path) -> None:
    """As with a NIC whose peer is gone: an error that names the rank, and no wait."""
    running = []
    for rank in range(2):
        told = environment(library, rank=rank, nccl="2.27.7", port=None, flows=tmp_path / f"flows{rank}", protocol="LL")
        counts = ["1000", "1000"][: 2 - rank]  # rank 1 ends after the first
        words = [compiled("net_driver"), library, "27", str(rank), "2", tmp_path, "LL", *counts]
        running.append(subprocess.Popen(words, env={**os.environ, **told}, stderr=subprocess.PIPE, text=True))
    said = running[0].communicate(timeout=60)[1]
    running[1].communicate(timeout=60)
    assert running[0].returncode == 1 and "rank 1 has gone" in said
