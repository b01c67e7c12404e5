"""examples/transformers_callback.py in a Hugging Face job of two processes: records of every optimizer step, with the
factor that gradients were clipped by. transformers and accelerate are of the extra `dev`, no requirement of ours."""

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
def test_a_callback_in_hugging_faces_trainer(port: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers (extra `dev`) is not installed")
    pytest.importorskip("accelerate", reason="accelerate (extra `dev`) is not installed")
    records: dict[int, list[Record]] = {0: [], 1: []}
    node = port(_keeps(records))
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = str(server.getsockname()[1])
    worker = Path(__file__).with_name("transformers_worker.py")
    ranks = [
        subprocess.Popen([sys.executable, "-P", str(worker), str(rank), store, node, TOKEN, str(ROOT / "examples"),
                          str(tmp_path / str(rank))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        out, error = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, error[-3000:]
        begun, *lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
        assert begun == {"wrapped": "DistributedDataParallel", "own": True}
        assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6], lines
        assert lines[-1]["state"] == "attached", lines
        wait_for(lambda rank=rank: len(records[rank]) == 3)
        assert [record.iteration for record in records[rank]] == [3, 4, 5]
        for record in records[rank]:
            assert record.clip is not None and 0 < record.clip < 1
        assert [line["clipped"] for line in lines] == [pytest.approx(0.5, rel=1e-4)] * 6
