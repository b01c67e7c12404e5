"""Frames of a rank's fabric interface, both directions, in order; and a manifest of the training they belong to."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import (
    Bucket,
    Buckets,
    BucketSlice,
    Collective,
    Collectives,
    Communicator,
    Flow,
    Job,
    ModelEntry,
    Optimizer,
    ParameterGroup,
)
from lab.network import netns

__all__ = ["Capture", "job_of"]


class Capture:
    """with Capture(namespace) as seen: ...; then seen.frames: [(ns, frame)]."""

    def __init__(self, namespace: str) -> None:
        def work() -> socket.socket:
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # nothing before it is bound
            opened.setsockopt(socket.SOL_SOCKET, 33, 128 << 20)  # SO_RCVBUFFORCE
            opened.bind(("fab0", 3))
            opened.settimeout(0.2)
            return opened

        self.frames: list[tuple[int, bytes]] = []
        self._socket = netns.inside(namespace, work)
        self._stop = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _read(self) -> None:
        while True:
            try:
                self.frames.append((time.time_ns(), self._socket.recv(65536)))
            except TimeoutError:
                if self._stop:
                    return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop = True
        self._thread.join()
        _, lost = memoryview(self._socket.getsockopt(263, 6, 8)).cast("I")  # PACKET_STATISTICS
        self._socket.close()
        assert kind or lost == 0, f"the capture lost {lost} frames"


def job_of(out: Path, ranks: int, model: nn.Module, layouts: list[list[list[str]]], lr: float, momentum: float) -> Job:
    """layouts: names in each bucket, in iteration 0 and afterwards."""
    said = [json.loads((out / f"describe-{rank}.json").read_text()) for rank in range(ranks)]
    flows = {json.dumps(flow, sort_keys=True): flow for one in said for flow in one["flows"]}
    assert all(one["communicator"] == said[0]["communicator"] for one in said)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    sizes = {name: p.numel() for name, p in model.named_parameters()}

    def packed(names: list[str]) -> Bucket:
        slices, offset = [], 0
        for name in names:
            slices.append(BucketSlice(name, offset, sizes[name]))
            offset += sizes[name]
        return Bucket(slices)

    def calls(layout: list[list[str]]) -> list[Collective]:
        return [Collective("AllReduce", sum(sizes[name] for name in names)) for names in layout]

    names = list(shapes)
    made = Job(
        communicator=Communicator(**said[0]["communicator"]), flows=[Flow(**flow) for flow in flows.values()],
        collectives=Collectives(
            startup=[
                Collective("AllGather", 1, "int64"),
                Collective("Broadcast", sum(2 * len(shape) for shape in shapes.values()), "int64"),
                Collective("Broadcast", sum(sizes.values()), carries="parameters", tensors=names),
            ],
            iteration_0=calls(layouts[0]),
            rebuild=[
                Collective("Broadcast", len(names) + 1, "int32"), Collective("Broadcast", len(layouts[1]), "int32"),
            ],
            steady=calls(layouts[1]),
        ),
        buckets=Buckets([packed(b) for b in layouts[0]], [packed(b) for b in layouts[1]]),
        model=[ModelEntry(name, shape) for name, shape in shapes.items()],
        optimizer=Optimizer("sgd", [ParameterGroup(names, {"lr": lr, "momentum": momentum})]),
    )
    return job_from_dict(made.to_dict(), where="the training")
