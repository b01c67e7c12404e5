"""The wire model against what NCCL's own kernels, proxy and planning code handed to the network.

Every message of every rank in every case: order, step, size. No exception list.
"""

import json
from pathlib import Path

import pytest

from parser import lane, wire
from parser.chunk_layout import Protocol, Topology
from tests.nccl_versions import VECTORS

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "captures" / "nccl-vectors"
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}


def _check(case: dict) -> None:
    ranks, channels = case["nranks"], case["channels_of_comm"]
    topology = Topology(case["version"], ranks, channels, (tuple(range(ranks)),))
    steps: dict[tuple[int, int, int], int] = {}
    for op in case["ops"]:
        plan = wire.plan_call(
            topology,
            op["func"],
            Protocol[op["protocol"].upper()],
            op["count"],
            ELEMENT_BYTES[op["dtype"]],
            algorithm=op["algorithm"].lower(),
            root=op["root"],
        )
        wanted = {
            (c["channel"], c["rank"], c["peer"]): [(m[0], m[1]) for m in c["messages"]] for c in op["connections"]
        }
        edges = [(c, s, d) for c in range(channels) for s in range(ranks) for d in range(ranks) if s != d]
        for edge in edges:
            found = wire.edge_lane(plan, *edge)
            got = []
            if found is not None:
                step = -(-steps.get(edge, 0) // found.step_align) * found.step_align
                for message in lane.messages(found):
                    got.append((step, message[2]))
                    step += found.step_inc
                steps[edge] = step
                assert len(got) == found.messages
            assert got == wanted.get(edge, []), f"{case['case']}: edge {edge}"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the shared NCCL vectors are not here")
@pytest.mark.parametrize("version", sorted({*VECTORS, *(path.stem for path in FOLDER.glob("*.jsonl"))}))
def test_every_message_of_every_case(version: str) -> None:
    cases = 0
    with (FOLDER / f"{version}.jsonl").open() as lines:
        for line in lines:
            _check(json.loads(line))
            cases += 1
    assert cases == VECTORS.get(version), f"tests/nccl_versions.py says how many cases {version} has"
