"""All settings of a node together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flowcheck.control.address import text_of
from flowcheck.node.config.capture import AUTO, MOST_STREAMS, SKELETON, Capture, Follow
from flowcheck.node.config.control import Api, Control, Tls, TokenFiles
from flowcheck.node.config.feed import Feed
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.config.nodes import Nodes, advertised, resolved
from flowcheck.node.config.protect import Protect
from flowcheck.node.config.replica import CommonStep, ReplicaSettings
from flowcheck.node.config.store import Output, Store
from flowcheck.node.config.table import ANYWHERE, NOWHERE, Table, host_and_port_of, is_loopback, known, numbered, wrong
from flowcheck.node.config.telemetry import Telemetry
from flowcheck.node.config.tokens import read_token, token_of

__all__ = ["NodeConfig"]


class NodeConfig(Table):
    """nodes: the machines that it works with.

    capture: mirror ports; in the file a table, or a list of tables; none: a node of [feed], or a holder of copies,
    without DPDK. groups:
    jobs at once. follow: jobs besides, of which no trainer attaches. record_seconds: how long a complete iteration
    waits for its step record."""

    control: Control
    capture: tuple[Capture, ...]
    follow: Annotated[tuple[Follow, ...], Field(max_length=8)] = ()
    feed: Feed | None = None
    protect: Protect | None = None
    replica: ReplicaSettings = ReplicaSettings()
    output: Output = Output()
    journal: JournalSettings | None = None
    common: CommonStep = CommonStep()
    nodes: Nodes = Nodes()
    api: Api | None = None
    store: Store | None = None
    telemetry: Telemetry | None = None
    tls: Tls | None = None
    tokens: TokenFiles = TokenFiles()
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,32}$")] = "node"
    groups: Annotated[int, Field(ge=1, le=8)] = 1
    record_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0

    @property
    def jobs(self) -> int:
        """At once, at most: those that trainers attach, and those that are followed without."""
        return self.groups + len(self.follow)

    @model_validator(mode="before")
    @classmethod
    def _written(cls, data: Any) -> Any:
        """Switches over [nodes] become addresses. A holder of copies has neither captures nor trainers."""
        if not isinstance(data, Mapping):
            return data
        if "feed" in data and "capture" not in data:
            data = {**data, "capture": ()}
        elif "protect" in data and "capture" not in data:
            data = {"control": Control(listen=NOWHERE), **data, "capture": ()}
        return resolved(data)

    @field_validator("capture", mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        if given == []:
            raise PydanticCustomError("empty", "is empty: a node has a mirror port. A holder of copies has no such key,"
                                      " and [protect] says whose versions it holds")
        return [given] if isinstance(given, Mapping | Capture) else given

    @field_validator("capture")
    @classmethod
    def _together(cls, captures: tuple[Capture, ...]) -> tuple[Capture, ...]:
        """What may be there once, and what all captures share."""
        taken: dict[tuple[str, str], str] = {}
        for i, capture in enumerate(captures):
            driver, _, interface = capture.device.partition(":")
            given = [("device", interface if driver in ("af_packet", "af_xdp") else capture.device.lower())]
            given += [(key, str(core)) for key in ("cores", "place_cores") for core in getattr(capture, key)]
            given += [("engines", name) for name in capture.engines if name not in (*AUTO, SKELETON)]
            for key, name in given:
                kind = key.removeprefix("place_")  # a thread that receives leaves nothing of its core to another
                if (kind, name) in taken:
                    raise wrong(f"{numbered(i, captures)}.{key}", f"{name} is given twice: {taken[kind, name]} has it")
                taken[kind, name] = f"capture{numbered(i, captures)}.{key}"
        huge = {capture.huge for capture in captures} - {None}
        if len(huge) > 1:
            raise wrong(".huge", "true in one and false in another: all captures of a node have the same memory")
        if (queues := sum(capture.queues for capture in captures)) > MOST_STREAMS:
            raise wrong(".queues", f"{queues} in all captures together: a node reads at most {MOST_STREAMS}")
        return captures

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.api is not None and self.replica.slots < 3:
            raise wrong("replica.slots", f"{self.replica.slots} leave none to update while a version is read: 3 at"
                         " least with an [api]; with 4 updates go on, too, while elements are stale")
        if self.store is not None and self.replica.slots < (least := 3 if self.api is None else 4):
            raise wrong("replica.slots", f"{self.replica.slots} leave none to update while a version is written to the"
                         f" store{' and another is read' if self.api else ''}: {least} at least with"
                         f" {'[api] and ' if self.api else 'a '}[store]")
        if self.journal is not None and self.replica.slots < (least := 3 if self.api is None else 4):
            raise wrong("replica.slots", f"{self.replica.slots} leave none to update while a base of the journal is"
                        f" written{' and another version is read' if self.api else ''}: {least} at least with"
                        f" {'[api] and ' if self.api else 'a '}[journal]")
        return self

    @model_validator(mode="after")
    def _held(self) -> Self:
        if self.capture:
            return self
        if self.follows:
            if self.follow:
                raise wrong("follow", "is for a node with a mirror port, and this one has no [capture]")
            return self
        if self.api is None:
            raise wrong("api", "is missing: without it nobody could have the copies that this node holds")
        following = ("replica", "common", "store", "telemetry", "follow", "journal")
        given: list[str] = [key for key in following if key in self.model_fields_set]
        if self.control.listen != NOWHERE:
            given.insert(0, "control")
        if given:
            raise wrong(given[0], "is for a node that follows jobs, and this one has no [capture]")
        return self

    @model_validator(mode="after")
    def _found(self) -> Self:
        """Where others reach this node."""
        if self.protect is None:
            if self.nodes.registry:
                raise wrong("protect", "is missing: copies and parity are what nodes.registry is for")
            return self
        self.protect.check(bool(self.nodes.registry))
        if not self.nodes.registry or self.nodes.advertise is not None:
            return self
        if self.api is None:
            raise wrong("api", "is missing: other nodes could not copy from this one")
        if self.api.address[0] in ANYWHERE:
            raise wrong("nodes.advertise", f"is missing: {self.api.listen} is no address that others can reach")
        return self

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.protect is None or self.protect.code is None or self.protect.placed:
            return self
        if self.member is None:
            own = self.advertise or (self.api.listen if self.api is not None else "no [api]")
            raise wrong("protect.group", f"this node is none of them: it has {own}")
        if self.member < self.protect.code[0] and not self.follows:
            raise wrong("protect.group", "this node follows no job, and has a place among those with data")
        if self.member < self.protect.code[0] and (alone := self.protect.journal.keys() - set(self.protect.copies)):
            raise wrong("protect.journal", f"{min(alone)} is none of protect.copies, and this node keeps no parity")
        return self

    @model_validator(mode="after")
    def _near(self) -> Self:
        for table, part in (("control", self.control), ("api", self.api)):
            if part is None or part.insecure or self.tls is not None or is_loopback(part.address[0]):
                continue
            raise wrong(f"{table}.listen", f"{part.address[0]} is not the loopback, and nothing that is sent there is"
                         " encrypted: give [tls], or set insecure = true there if that network may be trusted")
        return self

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.follows and "trainer" not in self.token_files:
            raise wrong("control.token_file", "is missing: without a token of trainers there is nobody to follow")
        if self.protect is not None and "peer" not in self.token_files:
            raise wrong("tokens.peer", "is missing: nodes that keep copies prove to each other that they know one, and"
                         " sign with it what they say in a registry")
        journal = tuple(self.protect.journal) if self.protect is not None else ()
        asked = (("replica.peers", self.replica.peers, "peer"), ("common.nodes", self.common.nodes, "peer"),
                 ("protect.journal", journal, "peer"), ("replica.peer_versions", self.replica.peer_versions, "peer"))
        for key, nodes, role in asked:
            if nodes and role not in self.token_files:
                raise wrong(f"tokens.{role}", f"is missing, and {key} names nodes that ask for one")
        return self

    @model_validator(mode="after")
    def _unattended(self) -> Self:
        if self.follow and not self.output.every:
            raise wrong("output.every", "is 0, and parameters that a job gathers are nowhere but on the disk: 1 writes"
                         " those of each step")
        names = [one.group for one in self.follow]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise wrong(f"follow[{i}].group", f"{name} is given twice: each job has a folder of its own")
        return self

    @model_validator(mode="after")
    def _kept(self) -> Self:
        if self.store is not None and self.store.deltas and self.journal is None:
            raise wrong("store.deltas", "is true, and there is no [journal]: its gradients are what goes there")
        if self.common.nodes and self.replica.slots < 3:
            raise wrong("replica.slots", f"{self.replica.slots} leave none to keep a version in for the nodes of"
                         " common.nodes: 3 at least, better 4")
        return self

    @property
    def follows(self) -> bool:
        """Do trainers come here? Others hold copies."""
        return bool(self.capture) or self.feed is not None

    @property
    def directories(self) -> list[Path]:
        """Of files that are called after this node's name."""
        return sorted({self.replica.directory, *([self.journal.directory] if self.journal is not None else ())})

    @property
    def journals(self) -> Path | None:
        """Where the journals of this node's groups lie, if it keeps any."""
        return self.journal.directory / f"flowcheck-{self.name}.journal" if self.journal is not None else None

    @property
    def made(self) -> Path:
        """Where steps lie that are made of what is in the store."""
        root = self.journal.directory if self.journal is not None else self.output.directory
        return root / f"flowcheck-{self.name}.made"

    @property
    def shadow(self) -> int:
        """api.shadow; 0 without an [api], which offers nothing."""
        return self.api.shadow if self.api is not None else 0

    @property
    def huge(self) -> bool | None:
        return next((capture.huge for capture in self.capture if capture.huge is not None), None)

    @property
    def pinned(self) -> set[int]:
        """Cores that a capture has for itself."""
        return {core for one in self.capture for core in (*one.cores, *one.place_cores)}

    @property
    def copies(self) -> Path | None:
        """Where copies of other nodes' versions lie, if any are kept."""
        if self.protect is None:
            return None
        return (self.protect.directory or self.replica.directory) / f"flowcheck-{self.name}.copies"

    @property
    def parity(self) -> Path | None:
        """Where parity lies, if this node keeps any."""
        if self.protect is None or self.protect.code is None:
            return None
        return (self.protect.directory or self.replica.directory) / f"flowcheck-{self.name}.parity"

    @property
    def placement(self) -> Path | None:
        """The file with the last decision of the registry's root, if copies are kept."""
        return self.copies / "placement.json" if self.copies is not None else None

    @property
    def advertise(self) -> str | None:
        """HOST:PORT of its API as other nodes reach it; None: it does not say."""
        if self.nodes.advertise is None:
            return None
        return text_of(*advertised(self.nodes.advertise, self.api.address if self.api is not None else None))

    @property
    def member(self) -> int | None:
        """This node's place in protect.group."""
        if self.protect is None or self.api is None:
            return None
        own = known(self.api.address if self.advertise is None else host_and_port_of(self.advertise))
        members = [known(one) for one in self.protect.members]
        return members.index(own) if own in members else None

    def table(self, index: int) -> str:
        """What errors and events call a capture's table in the settings."""
        return f"capture{numbered(index, self.capture)}"

    @property
    def token_files(self) -> dict[str, Path]:
        """By role; a role that is not in it is let in by nothing."""
        own = {role: getattr(self.tokens, role) or self.control.token_file for role in TokenFiles.model_fields}
        return {role: path for role, path in own.items() if path is not None}

    def token(self, role: str = "trainer") -> bytes:
        """The first of a role's tokens, as its file is now. Raises UserError or EnvironmentProblem."""
        path = self.token_files[role]
        return token_of(read_token(path), path)
