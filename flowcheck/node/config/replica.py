"""[replica] and [common]: a job's versions in memory, and which step all groups have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from flowcheck.control.protocol import PEER_SECONDS
from flowcheck.node.config.table import Table, host_and_port_of, other_nodes

__all__ = ["CommonStep", "ReplicaSettings"]


class ReplicaSettings(Table):
    """A job's versions and gradients in memory, and what becomes of gradients that were lost.

    - directory: of the replica files, on tmpfs or hugetlbfs.
    - slots: versions.
    - threads: workers of the updater.
    - keep: leave the files there at an orderly end.
    - arenas: iterations of gradients alive at once.
    - patience_packets: how many of a connection follow one that is missing before no repeat of it is expected; 0: those
      of a step of the ring.
    - memory_mb: MiB, most that one job may take, versions and gradients together.
    - resync_mb: MiB per iteration, at most, of the state of single elements that trainers are asked for where gradients
      were lost, and at the beginning.
    - resync: "state" asks for all of it at once, while training waits; this release reads it, the next one does not
      (renewal.py).

    peers and peer_versions are switches over [nodes] in the file (nodes.py), and addresses here:

    - peers: HOST:PORT of the `control.listen` of nodes that mirror the same groups, and are asked before trainers are.
    - peer_iterations: that have closed and that they may read, each with an arena of its own.
    - peer_seconds: how long an iteration waits for them.
    - journal: holders may read these iterations as peers do (protect.journal of theirs).
    - peer_versions: HOST:PORT of the `api.listen` of such nodes: where all is stale, a version of theirs is taken.
    """

    directory: Path = Path("/dev/shm")
    slots: Annotated[int, Field(ge=2, le=4)] = 3
    threads: Annotated[int, Field(ge=0, le=256)] = 1
    keep: bool = True
    arenas: Annotated[int, Field(ge=2, le=64)] = 4
    patience_packets: Annotated[int, Field(ge=0)] = 0
    memory_mb: Annotated[int, Field(ge=1)] = 65536
    resync: Literal["ranges", "state"] = "ranges"
    resync_mb: Annotated[int, Field(ge=1, le=32)] = 32  # of which a trainer may count twice as much: PATCH_BYTES
    peers: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    peer_iterations: Annotated[int, Field(ge=1, le=64)] = 2
    peer_seconds: Annotated[float, Field(gt=0, le=PEER_SECONDS)] = 1.0
    journal: bool = False
    peer_versions: Annotated[tuple[str, ...], Field(max_length=16)] = ()

    _addresses = field_validator("peers", "peer_versions")(other_nodes)

    @property
    def peer_addresses(self) -> list[tuple[str, int]]:
        return [host_and_port_of(text) for text in self.peers]

    @property
    def version_addresses(self) -> list[tuple[str, int]]:
        return [host_and_port_of(text) for text in self.peer_versions]

    @property
    def regions(self) -> int:
        """Iterations of gradients that memory is taken for: those that are alive, and those that peers may read."""
        return self.arenas + (self.peer_iterations if self.shows else 0)

    @property
    def shows(self) -> bool:
        """May others read what this node has of iterations?"""
        return bool(self.peers) or self.journal


class CommonStep(Table):
    """nodes: HOST:PORT of the control ports of nodes that follow other groups of the same jobs; in the file a switch
    over [nodes]. seconds: how long a
    version is kept for a group that does not come on."""

    nodes: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0

    _addresses = field_validator("nodes")(other_nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [host_and_port_of(text) for text in self.nodes]
