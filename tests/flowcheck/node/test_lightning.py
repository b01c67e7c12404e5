"""examples/lightning_callback.py in a Lightning job of two processes: records of every optimizer step, with the factor
that gradients were clipped by. Lightning is of the extra `dev`, no requirement of ours."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control.protocol import Record

from .conftest import LONGEST
from .test_attachment import TOKEN, _keeps, port, wait_for

__all__ = ["port"]

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_callback_in_lightning(port: Any) -> None:
    pytest.importorskip("lightning", reason="Lightning (extra `dev`) is not installed")
    records: dict[int, list[Record]] = {0: [], 1: []}
    node = port(_keeps(records))
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = str(server.getsockname()[1])
    worker = Path(__file__).with_name("lightning_worker.py")
    ranks = [
        subprocess.Popen([sys.executable, "-P", str(worker), str(rank), store, node, TOKEN, str(ROOT / "examples")],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        out, error = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, error[-3000:]
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert [line["number"] for line in lines] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6], lines
        assert lines[-1]["state"] == "attached", lines
        wait_for(lambda rank=rank: len(records[rank]) == 3)
        assert [record.iteration for record in records[rank]] == [3, 4, 5]
        factors = {line["number"] - 1: line["factor"] for line in lines[1::2]}
        for record in records[rank]:
            assert record.clip is not None and record.clip < 1
            assert record.clip == pytest.approx(factors[record.iteration], rel=1e-6)
