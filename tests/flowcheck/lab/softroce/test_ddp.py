"""Unmodified DistributedDataParallel on softroce: gradients and parameters of every iteration, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fabric import Fabric
from reference import train_alone

from flowcheck.lab.softroce.settings import Settings

PROGRAM = Path(__file__).parent / "train.py"

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces")]

EVERY = [
    (protocol, algorithm, ranks, channels)
    for protocol in ("LL", "LL128", "SIMPLE")
    for algorithm, ranks in (("ring", 2), ("ring", 3), ("ring", 4), ("tree", 4))
    for channels in (1, 2)
]
# Every two values of two columns meet at least once.
SOME = [
    ("LL", "ring", 2, 1), ("LL", "ring", 4, 2), ("LL", "tree", 4, 1), ("LL128", "ring", 3, 1), ("LL128", "tree", 4, 2),
    ("SIMPLE", "ring", 2, 2), ("SIMPLE", "ring", 3, 2), ("SIMPLE", "ring", 4, 1), ("LL128", "ring", 2, 2),
]  # fmt: skip


def train(ranks: int, out: Path, settings: dict[str, Any], options: dict[str, Any], timeout: float = 120) -> list[Any]:
    with Fabric(ranks) as fabric:
        fabric.run(PROGRAM, settings, str(out), json.dumps(options), timeout=timeout)
    return [torch.load(out / f"rank-{rank}.pt") for rank in range(ranks)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check(ranks: int, out: Path, settings: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    results = train(ranks, out, settings, options)
    expected = train_alone(Settings(interface="", address="", **settings), ranks, options)
    for rank, result in enumerate(results):
        assert len(result["iterations"]) == len(expected)
        for iteration, (got, want) in enumerate(zip(result["iterations"], expected, strict=True)):
            for what in ("gradients", "parameters"):
                assert same(got[what], want[what]), f"{what} of rank {rank} in iteration {iteration}"
    return results


def case(protocol: str, algorithm: str, ranks: int, channels: int, out: Path) -> None:
    check(ranks, out, {"protocol": protocol, "algorithm": algorithm, "channels": channels}, {})


@pytest.mark.parametrize(("protocol", "algorithm", "ranks", "channels"), SOME)
def test_training_equals_one_process(
    protocol: str, algorithm: str, ranks: int, channels: int, tmp_path: Path,
) -> None:
    case(protocol, algorithm, ranks, channels, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "algorithm", "ranks", "channels"), sorted(set(EVERY) - set(SOME)))
def test_training_equals_one_process_everywhere(
    protocol: str, algorithm: str, ranks: int, channels: int, tmp_path: Path,
) -> None:
    case(protocol, algorithm, ranks, channels, tmp_path)


def test_accumulation_without_sync(tmp_path: Path) -> None:
    check(2, tmp_path, {"protocol": "LL"}, {"accumulate": 3})


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "2.27.7", "protocol": "SIMPLE", "channels": 2, "qps_per_connection": 2, "split_data_on_qps": True},
        {"family": "2.21", "protocol": "LL128", "adaptive_routing": True, "mtu": 1024, "qps_per_connection": 2},
        {"family": "2.30.7", "protocol": "LL", "rings": [[0, 2, 1], [0, 1, 2]], "channels": 2},
    ],
    ids=lambda s: s["family"],
)
def test_other_versions_queue_pairs_and_rings(settings: dict[str, Any], tmp_path: Path) -> None:
    check(3, tmp_path, settings, {})


@pytest.mark.parametrize("options", [{"norm": True}, {"unused": True}], ids=["buffers", "unused parameters"])
def test_buffers_and_unused_parameters(options: dict[str, Any], tmp_path: Path) -> None:
    results = train(3, tmp_path, {"protocol": "LL", "channels": 2}, options)
    first, others = results[0], results[1:]
    for other in others:
        for a, b in zip(first["iterations"], other["iterations"], strict=True):
            assert same(a["gradients"], b["gradients"])
            assert same(a["parameters"], b["parameters"])
    before, after = first["iterations"][0]["parameters"], first["iterations"][-1]["parameters"]
    assert not torch.equal(before["last.weight"], after["last.weight"])
    if "unused" in options:
        assert torch.equal(before["spare.weight"], after["spare.weight"])
    else:
        assert float(first["buffers"]["norm.num_batches_tracked"]) == len(first["iterations"])
