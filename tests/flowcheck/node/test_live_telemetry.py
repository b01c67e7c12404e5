"""Telemetry of the live node on real packets: a NaN that one rank's gradient has is named in metrics, file and log."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.control.protocol import Joined, Wanted
from flowcheck.job.manifest import job_from_dict
from lab.synth.values import generate_values

from .conftest import LONGEST
from .test_operating import Scraped, job

pytestmark = pytest.mark.root

MADE = job()
PLANTED = (4, 1, 17)  # iteration, bucket, element of the bucket


def gradients(iteration: int, bucket: int, rank: int) -> np.ndarray:
    """Of one rank; the second one's loss has become NaN, and with it one element."""
    count = sum(piece.length for piece in MADE.bucket_layout(iteration)[bucket].slices)
    values = generate_values("float32", 10 * iteration + bucket, rank, count)
    if (iteration, bucket, rank) == (*PLANTED[:2], 1):
        values[PLANTED[2]] = np.nan
    return values


def test_a_nan_of_one_rank_is_named(start_node, attach, truth, lan, tmp_path: Path) -> None:
    made, folder = MADE, tmp_path / "telemetry"
    node = start_node(f'[api]\nlisten = "127.0.0.1:0"\n[telemetry]\ndirectory = "{folder}"\nseries = 2')
    scraped, run = Scraped(node), truth(made)
    trainers: list[Any] = [attach(node, made, rank) for rank in range(2)]
    for trainer in trainers:
        trainer.flows()
    trainers[0].job = job_from_dict(trainers[0].job.to_dict() | {"flows": []})
    trainers[0].manifest()
    trainers[0].expect(Wanted, what=["state"])
    trainers[0].state(0, run.tensors(), run.state())
    trainers[0].expect(Joined, iteration=0)
    moved = {}
    for t in range(6):
        traffic = run.traffic(t, gradients=gradients)
        lan.send([frame for _, frame in traffic.packets])
        before = run.tensors()
        run.advance(traffic)
        moved[t] = {name: (after - before[name]).double().norm().item() / before[name].double().norm().item()
                    for name, after in run.tensors().items()}
        for trainer in trainers:
            trainer.record(t, groups=[{}])
        assert node.wait("iteration", iteration=t)["published"]
    piece = next(one for one in made.bucket_layout(PLANTED[0])[PLANTED[1]].slices
                 if one.offset <= PLANTED[2] < one.offset + one.length)
    element = piece.start + PLANTED[2] - piece.offset
    where, end = {"group": "", "tensor": piece.name, "kind": "nan"}, time.monotonic() + LONGEST
    while scraped("flowcheck_gradient_iteration", group="") != 5 and time.monotonic() < end:
        time.sleep(0.05)  # a node puts on its board what there is four times a second
    (said,) = node.said("not_finite")
    assert {key: said[key] for key in ("iteration", "tensor", "element", "kind", "nan", "infinity", "tensors")} == {
        "iteration": PLANTED[0], "tensor": piece.name, "element": element, "kind": "nan", "nan": 1, "infinity": 0,
        "tensors": 1}
    assert scraped("flowcheck_gradient_not_finite_first_element", **where) == element
    assert scraped("flowcheck_gradient_not_finite_iteration", **where) == PLANTED[0]
    assert node.end() == 0
    (path,) = folder.rglob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["iteration"] for row in rows] == [str(t) for t in range(6) for _ in made.model]
    assert [(row["iteration"], row["tensor"], row["first_nan"]) for row in rows if row["first_nan"]] == [
        (str(PLANTED[0]), piece.name, str(element))]
    for row in rows:
        if int(row["iteration"]) < PLANTED[0]:
            assert float(row["update_ratio"]) == pytest.approx(moved[int(row["iteration"])][row["tensor"]], rel=1e-9)
    assert [row["measured"] is not None for row in node.said("times")] == [False] + [True] * 5
