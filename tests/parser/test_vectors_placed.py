"""What NCCL's own kernels handed to the network, as RoCEv2 packets, placed back byte for byte: all cases.

The vectors hold SHA-256 and heads, not the bytes. The bytes come from lab.synth, which makes them from the
same data (tests/lab/synth/test_vectors.py proves them equal to the vectors' masked SHA-256, message by
message), at the steps that the vectors name. Undefined bytes are filled with noise. synth's transport makes
packets of them, with CTS writes and acknowledgements, and the reader must rebuild `result_sha256`: from all edges of
all ranks, and from both directions of one rank alone. Operations of a sequence share their connections.

A partial sum is never placed: the packets of messages that are not reduced are counted under "released", all of
them, and the region holds nothing but the result.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parser.machine import Engine

from flowcheck.job.model import Job
from flowcheck.rebuild.plan import plan_job
from lab.synth import TransportOptions, example_job
from lab.synth.chunk_layout import Operation
from lab.synth.connection import Connection
from lab.synth.encode import encode, positions
from lab.synth.families import family_of
from lab.synth.packets import Endpoint
from lab.synth.schedule import Message, message_bytes, messages
from lab.synth.values import Stages, generate_values
from parser import lane, wire
from parser.chunk_layout import Protocol, Topology
from parser.engine_config import CallSpec, EdgeSpec, EngineConfig, Phase, Target
from tests.nccl_versions import VECTORS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "shared" / "captures" / "nccl-vectors"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
NOISE = np.random.default_rng(634).integers(0, 256, 1 << 20, np.uint8)
CLEAN = ("late", "stale", "unanchored", "not_synced", "beyond", "disagreed", "aside", "repeated", "other_roce", "icrc")

Edge = tuple[int, int, int]  # channel, source, destination

pytestmark = pytest.mark.captures


@functools.cache
def job_of(version: str, ranks: int, channels: int, tree: bool, mtu: int) -> Job:
    """Addresses and queue pairs of the communicator."""
    algorithm = "tree" if tree else "ring"
    return example_job(
        ranks=ranks, channels=channels, count=1, version=version, algorithm=algorithm, startup=False, mtu=mtu
    )


class Place:
    """Where an operation's result lies in the region. Blocks of an AllGather begin on cells of their own."""

    def __init__(self, op: dict[str, Any], ranks: int, base: int) -> None:
        self.base, self.blocks = base, ranks if op["func"] == "AllGather" else 1
        self.block = op["count"] * ELEMENT_BYTES[op["dtype"]]
        self.stride = -(-self.block // 8) * 8
        self.end = base + self.blocks * self.stride

    def of(self, region: np.ndarray) -> np.ndarray:
        return region[self.base : self.end].reshape(self.blocks, self.stride)[:, : self.block].reshape(-1)


class Case:
    """One case: the reader's plan of it, and the packets that go by."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.name, self.ops, self.ranks = case["case"], case["ops"], case["nranks"]
        self.channels, version = case["channels_of_comm"], case["version"]
        tree = any(op["algorithm"] == "Tree" for op in self.ops)
        wired = sum(message[1] for op in self.ops for c in op["connections"] for message in c["messages"])
        job = job_of(version, self.ranks, self.channels, tree, 1024 if wired < 1 << 21 else 4096)
        self.job, self.family = job, family_of(version)
        self.places: list[Place] = []
        for op in self.ops:
            self.places.append(Place(op, self.ranks, -(-self.places[-1].end // 64) * 64 if self.places else 0))
        self.plans = [self._plan(op) for op in self.ops]
        self.config = self._config()
        hosts = {}
        for flow in job.flows:
            for rank, address in ((flow.src, flow.src_addr), (flow.dst, flow.dst_addr)):
                hosts[rank] = Endpoint(b"\x02\xfc" + rank.to_bytes(4, "big"), address)
        self.connections = {
            (f.channel, f.src, f.dst): Connection(f, job.communicator, self.family, hosts, TransportOptions(), 0)
            for f in job.flows
        }

    def _plan(self, op: dict[str, Any]) -> wire.CallPlan:
        topology = Topology(
            self.job.communicator.nccl_version, self.ranks, self.channels, (tuple(range(self.ranks)),)
        )
        return wire.plan_call(
            topology,
            op["func"],
            Protocol[op["protocol"].upper()],
            op["count"],
            ELEMENT_BYTES[op["dtype"]],
            algorithm=op["algorithm"].lower(),
            root=op["root"],
        )

    def lane(self, number: int, edge: Edge) -> wire.Lane | None:
        found = wire.edge_lane(self.plans[number], *edge)
        return found and replace(found, block=self.places[number].stride if found.block else 0)

    def _config(self) -> EngineConfig:
        """All operations as the calls of one iteration."""
        known = plan_job(self.job).engine
        edges = []
        for spec in known.edges:
            calls = [
                CallSpec(self.lane(i, (spec.channel, spec.src, spec.dst)), Phase.ITERATION_0, Target.GRADIENT, p.base)
                for i, p in enumerate(self.places)
            ]
            edges.append(EdgeSpec(spec.channel, spec.src, spec.dst, tuple(calls), imm_big_endian=spec.imm_big_endian))
        return replace(known, edges=tuple(edges), gradient_bytes=self.places[-1].end)

    def operation(self, op: dict[str, Any]) -> Operation:
        c = self.job.communicator
        return Operation(
            op["func"], op["algorithm"].lower(), op["protocol"].lower(), op["count"], ELEMENT_BYTES[op["dtype"]],
            op["root"], self.ranks, self.channels, (tuple(range(self.ranks)),) * self.channels, c.max_threads,
            c.buffer_bytes, self.family,
        )

    def play(self, number: int, engines: list[tuple[Engine, int | None]]) -> list[tuple[Edge, int]]:
        """Feed one operation to each engine: all of it, or what passes one rank's port. Per edge and reduced
        message: the packets that carry elements."""
        described, reduced = self.ops[number], []
        op = self.operation(described)
        dtype = DTYPES[described["dtype"]]
        seeds = [(described["data_seed"], rank, op.count, described["data_mode"]) for rank in range(op.ranks)]
        stages = Stages(op, dtype, [generate_values(dtype, *seed) for seed in seeds])
        assert hashlib.sha256(stages.result.tobytes()).hexdigest() == described["result_sha256"]
        vectors = {(c["channel"], c["rank"], c["peer"]): c["messages"] for c in described["connections"]}
        for edge, sent in messages(op).items():
            takers = [engine for engine, rank in engines if rank is None or rank in edge[1:]]
            found = self.lane(number, edge)
            assert found is not None
            for message, vector, modelled in zip(sent, vectors[edge], lane.messages(found), strict=True):
                assert modelled[3] == message.reduced and modelled[1] == message.elements
                self._send(op, edge, message, vector[0], stages, takers)
                if message.reduced:
                    data = message.elements * op.size
                    reduced.append((edge, carrying(op.protocol, data, self.config.mtu)))
        return reduced

    def _send(
        self, op: Operation, edge: Edge, message: Message, step: int, stages: Stages, takers: list[Engine]
    ) -> None:
        connection, slot = self.connections[edge], op.buffers[op.protocol] // 8
        connection.step = step
        length = message_bytes(op, message, step)
        part = stages.tensor(message.source)[message.start : message.start + message.elements]
        data = np.ascontiguousarray(part).view(np.uint8)
        wired = encode(op.protocol, data, step, length, NOISE).tobytes()
        announcing = connection.clear_to_send(0, op.protocol, step, slot * message.steps, (True, True))
        sending = connection.send(0, op.protocol, wired, length, 0, (True, True))
        for record in itertools.chain(announcing, sending):
            for engine in takers:
                assert engine.feed(0, record.frame)


def carrying(protocol: str, nbytes: int, mtu: int) -> int:
    """Packets of a message of `nbytes` that hold any of them (LL128 fills up to 2048 with lines that do not)."""
    whole = nbytes // 1920 * 1920 if protocol == "ll128" else 0  # slices repeat
    last = whole // 1920 * 2048 + positions(protocol, nbytes - whole)
    return len(set(range(-(-(whole // 1920 * 2048) // mtu))) | set((last // mtu).tolist()))


def check(case: Case, number: int) -> None:
    rank = number % case.ranks
    engines: list[tuple[Engine, int | None]] = [(Engine(case.config), None), (Engine(case.config), rank)]
    reduced = [packets for n in range(len(case.ops)) for packets in case.play(n, engines)]
    for engine, seen in engines:
        engine.finish()
        assert engine.disagreements() == [], case.name
        outcomes = engine.outcomes(0)
        assert all(outcomes[name][0] == 0 for name in CLEAN), (case.name, outcomes)
        assert all(f["anchored"] for f in engine.flow_counters(0) if f["payload_bytes"])
        kept = sum(packets for edge, packets in reduced if seen is None or seen in edge[1:])
        assert outcomes["placed"][0] + outcomes["compared"][0] == kept, (case.name, seen, outcomes)
        assert engine.copies(0)[0] == 0
        cells, region = engine.cells(0), engine.region(0)
        for op, place in zip(case.ops, case.places, strict=True):
            assert cells[place.base // 8 : place.end // 8].all(), (case.name, seen)
            assert hashlib.sha256(place.of(region).tobytes()).hexdigest() == op["result_sha256"], (case.name, seen)


@pytest.mark.parametrize("version", VECTORS)
def test_every_case_is_placed_back(version: str) -> None:
    path = FOLDER / f"{version}.jsonl"
    if not path.exists():
        pytest.skip(f"the shared NCCL vectors are not beside this checkout: {path.name}")
    with path.open() as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) == VECTORS[version]
    for number, case in enumerate(cases):
        check(Case(case), number)


@pytest.mark.parametrize("page", ["README.md", "docs/understand/wire.md"])
def test_pages_say_how_many_cases_there_are(page: str) -> None:
    assert f" {sum(VECTORS.values())} cases" in (ROOT / page).read_text()
