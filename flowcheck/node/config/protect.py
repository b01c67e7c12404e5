"""[protect]: copies and parity of other nodes' versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from flowcheck.node.config.table import SLOWEST, Table, host_and_port_of, other_nodes, wrong

__all__ = ["MOST_STREAMS_OF_A_CODE", "Protect"]

MOST_STREAMS_OF_A_CODE = 32  # checkpoint/coding/galois.pyx


class Protect(Table):
    """What this node keeps of others.

    copies, group and journal are switches over [nodes] in the file (nodes.py), and addresses here:

    - copies: HOST:PORT of the `api.listen` of nodes whose versions this one keeps copies of.
    - parity: "K+M": of K nodes, each of which follows a shard, any M of the group may be lost.
    - group: HOST:PORT of their `api.listen`, the K nodes and then M holders of parity; this node is one of them. None:
      the registry says it.
    - journal: HOST:PORT of `api.listen` = HOST:PORT of `control.listen` of some of these nodes: what their gradients
      were since the copy is kept, too; at a holder of parity also of nodes with data, since the last rounds.

    How copies and parity are kept:

    - every: of each K-th step.
    - keep: whole copies of a group; one more while the next comes.
    - directory: for them, on tmpfs; None: that of the replicas.
    - memory_mb: MiB, most that all copies may take.
    - seconds: between two looks at a node.
    - mb_per_second: MiB that are read from other nodes at most, for copies and parity together; None: as fast as they
      come.

    Where nodes find each other (nodes.registry), their root says whose copies a node keeps, besides `copies`, and who
    makes a group with parity:

    - replicas: of each node's state, its own counts; None: 2, and where there is parity, 1.
    - grace: seconds that who is there must differ before the root changes anything.
    - standby: it has no place until it takes that of one that is lost.
    - own: copies of this node's own versions are kept here, too.
    - replace: a command that is to bring a replacement, its program first.
    - replace_seconds: how long that is waited for.
    """

    copies: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    every: Annotated[int, Field(ge=1, le=1 << 30)] = 1
    keep: Annotated[int, Field(ge=1, le=16)] = 2
    directory: Path | None = None
    memory_mb: Annotated[int, Field(ge=1)] = 65536
    seconds: Annotated[float, Field(ge=0.05, le=3600)] = 0.5
    mb_per_second: Annotated[int, Field(ge=SLOWEST, le=1 << 20)] | None = None
    parity: Annotated[str, Field(pattern=r"^[0-9]{1,2}\+[0-9]{1,2}$")] | None = None
    group: Annotated[tuple[str, ...], Field(max_length=32)] = ()
    journal: dict[str, str] = {}
    replicas: Annotated[int, Field(ge=2, le=16)] | None = None
    grace: Annotated[float, Field(ge=1, le=86400)] = 10.0
    standby: bool = False
    own: bool = False
    replace: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=64)] = ()
    replace_seconds: Annotated[float, Field(ge=1, le=86400)] = 900.0

    _addresses = field_validator("copies", "group")(other_nodes)

    @field_validator("journal")
    @classmethod
    def _controls(cls, given: dict[str, str]) -> dict[str, str]:
        other_nodes(tuple(given.values()))
        return given

    def check(self, registry: bool) -> None:
        """registry: nodes find each other in one. Raises PydanticCustomError: keys that do not fit each other."""
        if self.code is None:
            if self.group:
                raise wrong("protect.parity", "is missing: how many of the group hold data, and how many parity")
            if not self.copies and not registry:
                raise wrong("protect.copies", "names nobody: nodes whose versions are copied, or a registry that says"
                            " whose")
        elif not (self.code[0] >= 2 and self.code[1] >= 1 and sum(self.code) <= MOST_STREAMS_OF_A_CODE):
            raise wrong("protect.parity", f"{self.parity}: two nodes with data at least, one holder of parity, and"
                        f" {MOST_STREAMS_OF_A_CODE} in all at most")
        elif self.group and len(self.group) != sum(self.code):
            raise wrong("protect.group", f"names {len(self.group)} nodes, and {self.parity} are {sum(self.code)}")
        elif not self.group and not registry:
            raise wrong("protect.group", f"is missing: the {sum(self.code)} nodes of {self.parity}, or a registry that"
                        " says who they are")
        if strange := self.journal.keys() - {*self.copies, *self.group[: self.code[0] if self.code is not None else 0]}:
            raise wrong("protect.journal", f"{min(strange)} is none of protect.copies, and no node with data of"
                        " protect.group: a journal needs a copy or parity to begin with")
        together = max(len(self.copies), self.code[0] if self.code is not None else 1)
        if self.mb_per_second is not None and self.mb_per_second < SLOWEST * together:
            raise wrong("protect.mb_per_second", f"{self.mb_per_second} for {together} versions that may be pulled at"
                        f" once: {SLOWEST} for each at least, or their nodes end it")
        for key in ("standby", "own", "replace", "replicas", "grace", "replace_seconds"):
            if key in self.model_fields_set and getattr(self, key) and not registry:
                raise wrong(f"protect.{key}", "is for nodes that find each other: nodes.registry is missing")
        if self.replace and not self.replace[0]:
            raise wrong("protect.replace", "names no program")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [host_and_port_of(text) for text in self.copies]

    @property
    def members(self) -> list[tuple[str, int]]:
        return [host_and_port_of(text) for text in self.group]

    @property
    def code(self) -> tuple[int, int] | None:
        """How many hold data, and how many parity."""
        if self.parity is None:
            return None
        data, _, parity = self.parity.partition("+")
        return int(data), int(parity)

    @property
    def placed(self) -> bool:
        """Does the registry say who makes a group with parity?"""
        return self.code is not None and not self.group

    @property
    def states(self) -> int:
        """Of each node that the registry places, its own counts."""
        return self.replicas if self.replicas is not None else 1 if self.placed else 2

    @property
    def journals(self) -> list[tuple[tuple[str, int], tuple[str, int]]]:
        """API and control port of each node whose journal is kept."""
        return [(host_and_port_of(one), host_and_port_of(other)) for one, other in self.journal.items()]
