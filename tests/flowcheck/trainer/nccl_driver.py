"""NCCL's side of the profiler plugin (nccl_driver.c), built where there is a C compiler, and jobs as its calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowcheck.job.model import DTYPE_BYTES, Collective, Job

HERE = Path(__file__).parent
INCLUDE = HERE.parents[2] / "flowcheck" / "trainer" / "include"
MINORS = {23: 1, 24: 2, 25: 2, 26: 3, 27: 4, 28: 5, 29: 6, 30: 6}  # NCCL 2.x -> the newest interface that it knows
TYPES = {
    "int8": "ncclInt8", "uint8": "ncclUint8", "float16": "ncclFloat16", "bfloat16": "ncclBfloat16",
    "int32": "ncclInt32", "uint32": "ncclUint32", "int64": "ncclInt64", "uint64": "ncclUint64",
    "float32": "ncclFloat32", "float64": "ncclFloat64",
}


class JobCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("function", "type", "algorithm", "protocol")),
        ("count", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in (
            "root", "channels", "warps", "next", "previous", "steps", "chunk", "foreign"
        )),
    ]


def compile_c(source: Path, to: Path, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}", *options, str(source), "-o", str(to),
         "-lpthread", "-ldl"], check=True,
    )
    return to


def call(function: str = "AllReduce", count: int = 5, type: str = "ncclFloat32", **other: Any) -> JobCall:
    """As NCCL gives it to a plugin; what is left out is small and told apart."""
    said: dict[str, Any] = {
        "root": 0, "channels": 2, "warps": 16, "next": 1, "previous": 3, "steps": 6, "chunk": 131072, "foreign": 0,
        "algorithm": "RING", "protocol": "LL128", **other,
    }
    texts = {"function": function, "type": type, "algorithm": said.pop("algorithm"), "protocol": said.pop("protocol")}
    return JobCall(**{key: text.encode() for key, text in texts.items()}, count=count, **said)


class Driver:
    """NCCL 2.`minor` in this process, with the plugin at `path`."""

    def __init__(self, library: Path, path: str | Path, minor: int) -> None:
        self._c = ctypes.CDLL(str(library))
        self._c.driver_init.argtypes = (ctypes.c_uint64, ctypes.c_char_p, *[ctypes.c_int] * 3)
        self._path, self._minor = str(path).encode(), minor
        self._c.driver_load.argtypes = (ctypes.c_char_p, ctypes.c_int)
        self.interface = 0

    def init(self, ranks: int = 4, rank: int = 2, hash: int = 0xFEED, name: bytes = b"dp", nodes: int = 2) -> int:
        """ncclCommInitRank: the plugin is loaded with the first communicator."""
        self.interface = self._c.driver_load(self._path, self._minor)
        assert self.interface, "no interface was found"
        return int(self._c.driver_init(hash, name, nodes, ranks, rank))

    def call(self, communicator: int, said: JobCall) -> None:
        self._c.driver_call(communicator, ctypes.byref(said))

    def burst(self, first: int, threads: int, count: int, said: JobCall) -> None:
        self._c.driver_burst(first, threads, count, ctypes.byref(said))

    def finalize(self, communicator: int) -> None:
        """ncclCommDestroy: the plugin is unloaded with the last communicator."""
        self._c.driver_finalize(communicator)

    @property
    def mask(self) -> int:
        return int(self._c.driver_mask())

    @property
    def events(self) -> int:
        return ctypes.c_uint64.in_dll(self._c, "driver_events").value

    @property
    def kept(self) -> int:
        """Proxy operations for which the plugin gave a handle, so that NCCL goes on to tell their states."""
        return ctypes.c_uint64.in_dll(self._c, "driver_kept").value


def calls_of(job: Job, rank: int) -> tuple[list[JobCall], list[dict[str, Any]], list[int]]:
    """(what NCCL would say of each call of start-up, iteration 0 and three steady ones, the same in the manifest's
    form, how many calls have passed at each boundary of iterations).

    Steps and chunk differ from call to call; the peers are those of the rank's first ring.
    """
    listed = job.collectives
    iterations = [[*listed.startup, *(listed.iteration_0 or listed.steady)], [*listed.rebuild, *listed.steady],
                  listed.steady, listed.steady]
    ring = job.communicator.rings[0] if job.communicator.rings else list(range(job.communicator.ranks))
    at = ring.index(rank)
    native, said, boundaries = [], [], []
    for iteration in iterations:
        for one in iteration:
            native.append(_native(job, one, ring[(at + 1) % len(ring)], ring[at - 1], len(native)))
            said.append(_said(job, one))
        boundaries.append(len(native))
    return native, said, boundaries


def _choices(job: Job, one: Collective) -> tuple[str, str, int]:
    of = job.communicator
    return one.algorithm or of.algorithm, one.protocol or of.protocol, one.channels or of.channels


def _native(job: Job, one: Collective, after: int, before: int, number: int) -> JobCall:
    algorithm, protocol, channels = _choices(job, one)
    in_bytes = one.op in ("AllGather", "Broadcast")
    return call(
        one.op, one.count * (DTYPE_BYTES[one.dtype] if in_bytes else 1), TYPES["int8" if in_bytes else one.dtype],
        root=one.root, algorithm=algorithm.upper(), protocol=protocol.upper(), channels=channels, next=after,
        previous=before, steps=number + 1, chunk=1024 * number,
    )


def _said(job: Job, one: Collective) -> dict[str, Any]:
    algorithm, protocol, channels = _choices(job, one)
    in_bytes = one.op in ("AllGather", "Broadcast")
    return {
        "op": one.op, "count": one.count * (DTYPE_BYTES[one.dtype] if in_bytes else 1),
        "dtype": "int8" if in_bytes else one.dtype, "root": one.root, "algorithm": algorithm, "protocol": protocol,
        "channels": channels,
    }
