"""What `flowcheck plan capacity` says of a node's stages, beside what they take here.

    .venv/bin/python -P benchmarks/capacity_prediction.py [--rounds 15] [--bench FILE.json]

The job is that of `flowcheck bench pipeline`: 67 million fp32 parameters, Adam, buckets of 32 MB, SIMPLE packets of
1 KB of which every one is placed, every ICRC checked, through the live node's own follower. In the same rounds this
machine's speeds are taken by the contenders of `flowcheck bench parse place adam`, the last of them in shared memory,
where a replica lies: in small pages an update takes longer. They go through stage_speeds.py into
capacity.py, which is asked for this very traffic. Nothing that was measured of the stages goes in but the speed of the
port, which is that of the thread in C that stands for one.

    place        one thread, all packets of an iteration waiting
    update       evidence, verdict and one worker, all of it placed
    in turn      receiving, placing and updating, one after another
    to version   from an iteration's first packet to its version, the stages overlapped on the processors that there
                 are: four threads, as sharing.py has them; and no more bytes than two threads copy
    port         placing at a port of a ring of four as `synth` writes it, in memory: half of the packets carry partial
                 sums, clear-to-sends and acknowledgements are among them, and a third of the gradient comes twice. Four
                 flows: their speeds are of the rows of four

Predicted and measured are medians over the rounds, the ratio is predicted by measured in each round. --bench keeps the
speeds as `flowcheck bench --json` prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from lab.bench.limits import PacketRing
from parser.machine import Engine, choose_icrc, icrc_kernels

from flowcheck.plan.capacity.capacity import Capacity, Job, Node, capacity
from flowcheck.plan.capacity.stage_speeds import COPY, Speeds, measured
from flowcheck.rebuild.calibration import look_at_updates, settle
from flowcheck.rebuild.plan import plan_job
from lab.bench import adam, limits, parse, place
from lab.bench.feed import MTU, Window, flows_for
from lab.bench.pipeline import LAPS, STAGES, Pipeline
from lab.bench.rows import Row, alternate, on_threads, quantile
from lab.bench.workload import aligned, make
from lab.synth import example_job, generate
from parser.chunk_layout import Protocol
from updater import kernels
from updater.tuning import PART

RING_BYTES = 256 << 20
PARAMETERS, TENSORS = 40_000_000, 200  # of the adam row
PORT_RANKS, PORT_ELEMENTS = 4, 8 << 20
PORT_SLOT = 1152
PIPELINE_ELEMENTS = 67_108_864
ADAM_ROW = "adam.200.1t.torch-cuda-foreach"


# -- this machine's speeds -----------------------------------------------------------------------------------


class Machine:
    """The contenders of `bench parse place adam` that capacity wants, and the rows that they make."""

    def __init__(self) -> None:
        ways = settle(MTU, recall=False, remember=False).ways
        self._partial = make(Protocol.LL, 1024, 16, RING_BYTES, final=False, model_bytes=parse.MODELS["huge"])
        self._placed, self._few = (
            make(Protocol.SIMPLE, MTU, flows, RING_BYTES, icrc=True) for flows in (place.FLOWS, place.FEW)
        )
        self._arena = adam.Arena(PARAMETERS, shared=True)
        tuning = look_at_updates(measure=True, recall=False).ways[PART]
        self._pool = kernels.Pool(1, "", *tuning)
        self._source, self._target = aligned(RING_BYTES), aligned(RING_BYTES)
        print(f"placing {ways['simple']}, updating {tuning}", flush=True)

    def contenders(self) -> dict[str, Callable[[], float]]:
        def copy(first: int, end: int) -> None:
            limits.copy(self._target.ctypes.data + first, self._source.ctypes.data + first, end - first)

        return {
            "parse": parse.engine(self._partial), "engine": place.engine(self._placed, None),
            "again": place.engine(self._placed, None, again=True),
            "few": place.engine(self._few, None), "few again": place.engine(self._few, None, again=True),
            "icrc": place.engine(self._placed, icrc_kernels()[0]),
            "adam": adam.step(self._arena, self._pool, "torch-cuda-foreach", self._arena.g, TENSORS),
            "copy": on_threads(copy, RING_BYTES, 2, 256),
        }

    def speeds(self, seconds: Mapping[str, float], receive_mpps: float) -> list[Row]:
        """The rows of one round. receive_mpps: of what stands for a port."""
        packets = self._placed.packets
        moved, of_few = (each.wire_bytes + each.expected.size for each in (self._placed, self._few))
        values = {
            "parse.16flows.huge": ("ns/packet", 1e9 * seconds["parse"]),
            f"place.simple.{MTU}": ("GB/s", 1e-9 * moved / seconds["engine"]),
            f"place.simple.{MTU}.again": ("GB/s", 1e-9 * moved / seconds["again"]),
            f"place.simple.{MTU}.4flows": ("GB/s", 1e-9 * of_few / seconds["few"]),
            f"place.simple.{MTU}.4flows.again": ("GB/s", 1e-9 * of_few / seconds["few again"]),
            f"place.simple.{MTU}.icrc": ("ns/packet", 1e9 * (seconds["icrc"] - seconds["engine"]) / packets),
            f"ingest.{MTU}.copy": ("Mpkt/s", receive_mpps),
            ADAM_ROW: ("GB/s", 28e-9 * PARAMETERS / seconds["adam"]),
        }
        rows = [Row.of(name, unit, [max(value, 1e-3)], [1.0], None) for name, (unit, value) in values.items()]
        copying = 1e12 * seconds["copy"] / RING_BYTES  # ms per GB that is read and written
        return [*rows, Row.of(COPY, "ms/GB", [1e12 * seconds["place"] / (4 * PIPELINE_ELEMENTS)], [copying], None)]


def speeds_of(rows: Sequence[Row], file: Path, flows: int) -> Speeds:
    """As capacity reads them from `--bench`."""
    file.write_text(json.dumps([row.as_dict() for row in rows]))
    return measured(file, "simple", MTU, flows)


# -- a port as synth writes it -------------------------------------------------------------------------------


class Port:
    """All packets of one iteration at a mirrored port of a ring, in memory."""

    def __init__(self) -> None:
        job = example_job(
            ranks=PORT_RANKS, channels=2, count=PORT_ELEMENTS, protocol="simple", mtu=MTU, startup=False, rebuild=False
        )
        made = generate(job, iterations=1, ports=(0,))
        found = [frame for _, frame in made.ports[0]]
        self._frames = aligned(len(found) * PORT_SLOT).reshape(-1, PORT_SLOT)
        for at, frame in enumerate(found):
            self._frames[at, : len(frame)] = np.frombuffer(frame, np.uint8)
        lengths = np.array([len(frame) for frame in found], np.uint32)
        addresses = self._frames.ctypes.data + np.arange(len(found), dtype=np.uint64) * np.uint64(PORT_SLOT)
        self._ring = PacketRing(addresses, lengths)
        self._config = plan_job(job).engine
        self.packets = len(found)

    def measure(self) -> float:
        """A contender: a new engine, whose arena is touched before the clock starts."""
        choose_icrc(icrc_kernels()[0])
        machine = Engine(self._config)
        machine.region(0)[:] = 0
        self._ring.rewind()
        left, begin = self.packets, time.perf_counter()
        while left:
            done, blocked = machine.run(0, self._ring.address, left)
            left -= done
            assert done and not blocked
        seconds = time.perf_counter() - begin
        assert machine.cells(0).all(), "not all of the gradient was placed"
        return seconds


# -- predicted -----------------------------------------------------------------------------------------------


def asked(elements: int, bucket_bytes: float, **changes: object) -> Job:
    """A job of Adam in float32 and SIMPLE; its port is set afterwards."""
    fields: dict[str, object] = {
        "tensor": 1, "pipeline": 1, "data": 2, "shard": 1, "dtype": "float32", "optimizer": "adam",
        "protocol": "simple", "algorithm": "tree", "channels": 1, "version": "2.27.7", "mtu": MTU, "port_gbps": 1e3,
        "iteration_s": 1e6,
    }
    return Job(float(elements), bucket_bytes=bucket_bytes, **fields | changes)  # type: ignore[arg-type]


def predicted(job: Job, node: Node, speeds: Speeds, receive_s: float) -> Capacity:
    """What capacity says if the port takes so long for an iteration."""
    frames = max(job.traffic("ingress")[0].all_frames, job.traffic("egress")[0].all_frames)
    return capacity(replace(job, port_gbps=frames * 8e-9 / receive_s), node, speeds)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--bench", type=Path)
    given = options.parse_args()
    machine, port, window = Machine(), Port(), Window(flows_for(RING_BYTES))
    pipeline = Pipeline(window, "adam")
    try:
        seconds = alternate({
            **machine.contenders(), "port": port.measure, "sequence": pipeline.sequence,
            "to version": lambda: pipeline.overlapped(1),
        }, given.rounds)
        seconds |= pipeline.alone(given.rounds)
    finally:
        pipeline.close()
    assert pipeline.gradient_bytes == 4 * PIPELINE_ELEMENTS
    job = asked(PIPELINE_ELEMENTS, window.gradient_bytes / 2)
    cores = len(os.sched_getaffinity(0))
    node = Node(mirrors=1, direction="ingress", groups=1, ports=1, monitor_gbps=1e6, cores=cores)
    ring = asked(PORT_ELEMENTS, 4.0 * PORT_ELEMENTS, data=PORT_RANKS, algorithm="ring", channels=2)
    both = Node(mirrors=1, direction="both", groups=1, ports=1, monitor_gbps=1e6)
    say_traffic("pipeline", job.traffic("ingress")[0].packets, LAPS * window.packets)
    traffic = ring.traffic("both")[0]
    say_traffic("port", traffic.packets + traffic.control, port.packets)
    rounds = [{name: samples[at] for name, samples in seconds.items()} for at in range(given.rounds)]
    rounds.append({name: min(samples) for name, samples in seconds.items()})
    pairs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = given.bench or Path(folder) / "bench.json"
        for took in rounds:
            rows = machine.speeds(took, 1e-6 * LAPS * window.packets / took["receive"])
            found = predicted(job, node, speeds_of(rows, file, place.FLOWS), took["receive"])
            at_port = predicted(ring, both, speeds_of(rows, file, place.FEW), took["receive"])
            for name, value in (
                ("place", found.place_s), ("update", found.update_s), ("in turn", found.serial_s),
                ("to version", found.pipelined_s), ("port", at_port.place_s),
            ):
                pairs.setdefault(name, []).append((value, took["sequence" if name == "in turn" else name]))
    print(f"{'ms':12}{'predicted':>12}{'measured':>12}{'ratio':>8}   p10..p90     of the least")
    for name, (*both_of, least) in pairs.items():
        ratios = sorted(one / other for one, other in both_of)
        one, other = (1e3 * statistics.median(column) for column in zip(*both_of, strict=True))
        print(f"{name:12}{one:12.1f}{other:12.1f}{statistics.median(ratios):8.2f}   "
              f"{quantile(ratios, 0.1):.2f}..{quantile(ratios, 0.9):.2f}{least[0] / least[1]:14.2f}")
    for name in (*STAGES, "copy", "adam", "engine", "again", "few", "few again", "icrc", "parse"):
        print(f"  {name}: {1e3 * statistics.median(seconds[name]):.5f} ms, at least {1e3 * min(seconds[name]):.5f}")


def say_traffic(name: str, planned: float, counted: int) -> None:
    print(f"{name}: {planned:,.0f} packets of an iteration planned, {counted:,} counted")


if __name__ == "__main__":
    main()
