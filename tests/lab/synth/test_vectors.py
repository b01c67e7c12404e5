"""The generator against messages that NCCL's own kernels, proxy and planning code produced.

Every case of the shared vectors: for each operation of a sequence, each connection's messages must have
the same steps, sizes and bytes (bytes that carry no element masked to zero), and the result must be equal.
There is no list of exceptions.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.job.model import Communicator
from lab.synth.chunk_layout import Operation, steps_per_chunk
from lab.synth.encode import encode
from lab.synth.families import family_of
from lab.synth.schedule import message_bytes, messages
from lab.synth.values import Stages, generate_values
from tests.nccl_versions import VECTORS

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "captures" / "nccl-vectors"
pytestmark = pytest.mark.captures
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}


def operation(case: dict[str, Any], op: dict[str, Any]) -> Operation:
    n = case["nranks"]
    defaults = Communicator(n, case["version"])
    channels = case["channels_of_comm"]
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}[op["dtype"]]
    return Operation(
        op["func"], op["algorithm"].lower(), op["protocol"].lower(), op["count"], size, op["root"], n,
        channels, (tuple(range(n)),) * channels, defaults.max_threads, defaults.buffer_bytes,
        family_of(case["version"]),
    )


def check_case(case: dict[str, Any]) -> None:
    position: dict[tuple[int, int, int], int] = defaultdict(int)
    for described in case["ops"]:
        op = operation(case, described)
        dtype = DTYPES[described["dtype"]]
        inputs = [
            generate_values(dtype, described["data_seed"], rank, op.count, described["data_mode"])
            for rank in range(op.ranks)
        ]
        stages = Stages(op, dtype, inputs)
        assert hashlib.sha256(stages.result.tobytes()).hexdigest() == described["result_sha256"], case["case"]
        plan = messages(op)
        expected = {(c["channel"], c["rank"], c["peer"]): c["messages"] for c in described["connections"]}
        assert set(plan) == set(expected), case["case"]
        for connection, sent in plan.items():
            wanted = expected[connection]
            assert len(sent) == len(wanted), (case["case"], connection)
            step = -(-position[connection] // steps_per_chunk(op)) * steps_per_chunk(op)
            for message, vector in zip(sent, wanted, strict=True):
                length = message_bytes(op, message, step)
                assert [step, length] == vector[:2], (case["case"], connection)
                values = stages.tensor(message.source)[message.start:message.start + message.elements]
                wire = encode(op.protocol, values.view(np.uint8), step, length)
                masked = vector[4] if len(vector) == 5 else vector[2]
                assert hashlib.sha256(wire.tobytes()).hexdigest() == masked, (case["case"], connection, step)
                step += message.steps
            position[connection] = step


@pytest.mark.parametrize("version", VECTORS)
def test_every_case(version: str) -> None:
    path = FOLDER / f"{version}.jsonl"
    if not path.exists():
        pytest.skip(f"shared vectors not found: {path}")
    with path.open() as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) == VECTORS[version]
    for case in cases:
        check_case(case)
