"""Unmodified DistributedDataParallel on softroce: gradients and parameters of every iteration, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang
from reference import train_alone

from lab.softroce.settings import Settings

pytestmark = pytest.mark.root

EVERY = [
    (protocol, algorithm, ranks, channels)
    for protocol in ("LL", "LL128", "SIMPLE")
    for algorithm, ranks in (("ring", 2), ("ring", 3), ("ring", 4), ("tree", 4))
    for channels in (1, 2)
]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check(gang: Gang, ranks: int, out: Path, settings: dict[str, Any], options: dict[str, Any]) -> None:
    results = gang.train(ranks, settings, options, out)
    expected, _ = train_alone(Settings(interface="", address="", **settings), ranks, options)
    for rank, result in enumerate(results):
        assert len(result["iterations"]) == len(expected)
        for iteration, (got, want) in enumerate(zip(result["iterations"], expected, strict=True)):
            for what in ("gradients", "parameters"):
                assert same(got[what], want[what]), f"{what} of rank {rank} in iteration {iteration}"


@pytest.mark.parametrize(("protocol", "algorithm", "ranks", "channels"), EVERY)
def test_training_equals_one_process(
    gang: Gang, protocol: str, algorithm: str, ranks: int, channels: int, tmp_path: Path,
) -> None:
    check(gang, ranks, tmp_path, {"protocol": protocol, "algorithm": algorithm, "channels": channels}, {})


def test_accumulation_without_sync(gang: Gang, tmp_path: Path) -> None:
    check(gang, 2, tmp_path, {"protocol": "LL"}, {"accumulate": 3})


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "2.27.7", "protocol": "SIMPLE", "channels": 2, "qps_per_connection": 2, "split_data_on_qps": True},
        {"family": "2.21", "protocol": "LL128", "adaptive_routing": True, "mtu": 1024, "qps_per_connection": 2},
        {"family": "2.30.7", "protocol": "LL", "rings": [[0, 2, 1], [0, 1, 2]], "channels": 2},
    ],
    ids=lambda s: s["family"],
)
def test_other_versions_queue_pairs_and_rings(gang: Gang, settings: dict[str, Any], tmp_path: Path) -> None:
    check(gang, 3, tmp_path, settings, {})


@pytest.mark.parametrize("options", [{"norm": True}, {"unused": True}], ids=["buffers", "unused parameters"])
def test_buffers_and_unused_parameters(gang: Gang, options: dict[str, Any], tmp_path: Path) -> None:
    results = gang.train(3, {"protocol": "LL", "channels": 2}, options, tmp_path)
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
