"""[capture] and [[follow]]: mirror ports, and jobs that no trainer attaches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flowcheck.node.config.table import Table, wrong

__all__ = ["AUTO", "Capture", "Follow", "LARGEST_RING", "MOST_STREAMS", "SKELETON"]

LARGEST_RING = 1 << 24
MOST_STREAMS = 64  # queues of all captures: streams that one state machine follows (parser/include/machine.h)
AUTO = ("auto",)
SKELETON = "dma_skeleton"  # each time it is named, another engine is meant


class Capture(Table):
    """One mirror port.

    - device: as dataplane/ports.py names them.
    - path_mtu: RoCE's, in bytes; 0: whole frames of the interface.
    - dump: how packets get into the rings (docs/understand/dataplane.md).
    - engines: for dump = "dma", each used by one queue: names, a multiple of queues, or "auto": one for each queue, on
      the device's NUMA node.
    - queues: each has a ring, a thread that receives and one that places.
    - cores, place_cores: of the threads that receive, of those that place; one for each queue, or none.
    - huge: packet memory in huge pages, for all captures of the node; None: if enough of them are free when the node
      starts.

    The ring of each queue, one of these, or 16,384 packets:

    - ring_size: packets, a power of two.
    - ring_mb: MiB of memory for it.
    - iteration_bytes: gradient bytes on the wire that an iteration brings to one queue, all of which it then holds.
    """

    device: str
    path_mtu: Literal[0, 256, 512, 1024, 2048, 4096] = 0
    dump: Literal["copy", "hold", "dma"] = "copy"
    engines: tuple[str, ...] = ()
    queues: Annotated[int, Field(ge=1, le=16)] = 1
    ring_size: Annotated[int, Field(ge=64, le=LARGEST_RING)] | None = None
    ring_mb: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    iteration_bytes: Annotated[int, Field(ge=1, le=1 << 48)] | None = None
    cores: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    place_cores: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    huge: bool | None = None

    @field_validator("engines", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if isinstance(given, str) and given != "auto":
            raise PydanticCustomError("engines", 'a list of names, or "auto"')
        return AUTO if given == "auto" else given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rings = [key for key in ("ring_size", "ring_mb", "iteration_bytes") if getattr(self, key) is not None]
        if len(rings) > 1:
            raise wrong(rings[1], f"{rings[0]} is given, too: one of them decides how large the rings are")
        if self.ring_size is not None and self.ring_size & (self.ring_size - 1):
            raise wrong("ring_size", f"{self.ring_size} is not a power of two")
        for key, cores in (("cores", self.cores), ("place_cores", self.place_cores)):
            if cores and len(cores) != self.queues:
                raise wrong(key, f"{len(cores)} cores for {self.queues} queues: one for each, or none")
        if (self.dump == "dma") != bool(self.engines):
            raise wrong("engines", 'dump = "dma" needs DMA engines: their names, or "auto"' if self.dump == "dma" else
                         f'DMA engines are for dump = "dma", this is {self.dump!r}')
        if self.engines != AUTO and len(self.engines) % self.queues:
            raise wrong("engines", f"{len(self.engines)} engines for {self.queues} queues: each needs as many")
        return self


class Follow(Table):
    """A job of which no trainer attaches: its gathered parameters are followed. manifest: its file. group: what its
    events and its folder are called. iteration: the trainer's number of the manifest's first iteration."""

    manifest: Path
    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,32}$")]
    iteration: Annotated[int, Field(ge=0, le=1 << 53)] = 0
