"""Settings of a node: node.toml, checked before anything is started (docs/use/node.md has every key)."""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flowcheck.control.address import credentials_in, host_and_port, why_not
from flowcheck.control.protocol import PEER_SECONDS, token_bytes
from flowcheck.control.tls import SYSTEM
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["Api", "Capture", "CommonStep", "Control", "Follow", "NodeConfig", "Output", "Protect", "ReplicaSettings",
           "Store", "Tls", "TokenFiles", "load", "position", "read_token", "read_tokens"]

MOST_BYTES = 1 << 20
LARGEST_RING = 1 << 24
MOST_STREAMS_OF_A_CODE = 32  # checkpoint/coding/galois.pyx
MOST_STREAMS = 64  # queues of all captures: streams that one state machine follows (parser/include/machine.h)
NOWHERE = "127.0.0.1:0"  # of a node that nobody speaks to
AUTO = ("auto",)
SLOWEST = 8  # MiB a second, of a pull: a source lets one go that is slower than half of that (holdings.py)
MOST_TOKENS = 2  # of a role
SKELETON = "dma_skeleton"  # each time it is named, another engine is meant


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _no_nul(cls, given: Any) -> Any:
        """No file's name and no address has one, and who is given one raises ValueError."""
        for text in given if isinstance(given, tuple) else (given,):
            if isinstance(text, str | Path) and "\0" in str(text):
                raise ValueError("has a NUL character in it")
        return given


def _index(i: int, captures: Sequence[object]) -> str:
    return f"[{i}]" if len(captures) > 1 else ""


def _wrong(key: str, what: str) -> PydanticCustomError:
    """What is wrong with a key that fits its own bounds, but not the keys beside it."""
    return PydanticCustomError("together", "{what}", {"key": key, "what": what})


def _listens(text: str) -> str:
    if host_and_port(text, 0, brackets=True) is None:
        raise ValueError(f"{text!r} {why_not(text, 0)}: HOST:PORT, an IPv6 address in brackets")
    return text


class Control(_Part):
    """listen: HOST:PORT on the control network, port 0 for any. token_file: the token of every role that has none of
    its own in [tokens]. connections: at once, of those that have proved a token. strangers: at once, that have not, and
    strangers_per_address. inbox_mb: MiB that the ranks of a group may have sent and the group has not handled.
    insecure: listen elsewhere than on the loopback, although nothing that is sent is encrypted."""

    listen: str
    token_file: Path | None = None
    insecure: bool = False
    connections: Annotated[int, Field(ge=1, le=65536)] = 256
    strangers: Annotated[int, Field(ge=8, le=65536)] = 1024
    strangers_per_address: Annotated[int, Field(ge=1, le=65536)] = 256
    inbox_mb: Annotated[int, Field(ge=64, le=1 << 24)] = 512

    _address = field_validator("listen")(_listens)

    @property
    def address(self) -> tuple[str, int]:
        return _host_and_port(self.listen)


def _host_and_port(listen: str) -> tuple[str, int]:
    found = host_and_port(listen, 0)
    assert found is not None  # _listens has looked at it
    return found


def _other_nodes(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if _host_and_port(_listens(text))[1] == 0:
            raise ValueError(f"{text}: nobody listens at port 0")
        if [_host_and_port(other) for other in texts].count(_host_and_port(text)) > 1:
            raise ValueError(f"{text} is given twice")
    return texts


class Api(_Part):
    """listen: HOST:PORT for readers of versions, port 0 for any. insecure: listen elsewhere than on the loopback,
    although nothing that is sent is encrypted. shadow: checksums of the trainer that must have matched before a version
    is offered for recovery; 0: also versions that nothing was compared with are. connections: at once, of those that
    have shown a key. strangers: at once, that have not, and strangers_per_address."""

    listen: str
    insecure: bool = False
    connections: Annotated[int, Field(ge=1, le=65536)] = 256
    strangers: Annotated[int, Field(ge=8, le=65536)] = 1024
    strangers_per_address: Annotated[int, Field(ge=1, le=65536)] = 256
    shadow: Annotated[int, Field(ge=0, le=1_000_000)] = 0

    _address = field_validator("listen")(_listens)

    @property
    def address(self) -> tuple[str, int]:
        return _host_and_port(self.listen)


class Tls(_Part):
    """Of the control port, of the API, and of connections to peers. cert, key: PEM files of this node. ca: what peers'
    certificates are held against: a PEM file, or "system"."""

    cert: Path
    key: Path
    ca: str = SYSTEM


class TokenFiles(_Part):
    """A file for each role. The first line is the token that this node shows and accepts; a second one is accepted as
    well, while tokens are being replaced."""

    trainer: Path | None = None
    peer: Path | None = None
    reader: Path | None = None
    operator: Path | None = None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Capture(_Part):
    """One mirror port.

    device: as dataplane/ports.py names them. path_mtu: RoCE's, 0: whole frames of the interface. dump: how packets
    get into the rings (docs/understand/dataplane.md). engines: for dump = "dma", each used by one queue: names, a
    multiple of queues, or "auto": one for each queue, on the device's NUMA node. queues: each has a ring, a thread that
    receives and one that places. cores: of those that receive, place_cores: of those that place; one for each queue, or
    none. huge: packet memory in huge pages, for all captures of the node; left out: if
    enough of them are free when the node starts.

    The ring of each queue, one of: ring_size: packets, a power of two. ring_mb: MiB of memory for it. iteration_bytes:
    gradient bytes on the wire that an iteration brings to one queue, all of which it then holds. None of them: 16,384
    packets.
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
            raise _wrong(rings[1], f"{rings[0]} is given, too: one of them decides how large the rings are")
        if self.ring_size is not None and self.ring_size & (self.ring_size - 1):
            raise _wrong("ring_size", f"{self.ring_size} is not a power of two")
        for key, cores in (("cores", self.cores), ("place_cores", self.place_cores)):
            if cores and len(cores) != self.queues:
                raise _wrong(key, f"{len(cores)} cores for {self.queues} queues: one for each, or none")
        if (self.dump == "dma") != bool(self.engines):
            raise _wrong("engines", 'dump = "dma" needs DMA engines: their names, or "auto"' if self.dump == "dma" else
                         f'DMA engines are for dump = "dma", this is {self.dump!r}')
        if self.engines != AUTO and len(self.engines) % self.queues:
            raise _wrong("engines", f"{len(self.engines)} engines for {self.queues} queues: each needs as many")
        return self


class ReplicaSettings(_Part):
    """directory: of the replica files, on tmpfs or hugetlbfs. keep: leave them there at an orderly end. arenas:
    iterations of gradients alive at once. patience_packets: how many of a connection follow one that is missing before
    no repeat of it is expected; 0: those of a step of the ring. memory_mb: most that one job may take, versions and
    gradients together.
    resync: what trainers are asked for at the beginning, and where gradients were lost: the state of single elements,
    at most resync_mb MiB of it per iteration, or all of it at once, while training waits.
    peers: HOST:PORT of nodes that mirror the same groups, and are asked before. peer_iterations: that have closed and
    that they may read, each with an arena of its own. peer_seconds: how long an iteration waits for them.
    journal: holders may read these iterations as peers do (protect.journal of theirs).
    peer_versions: HOST:PORT of the `api.listen` of such nodes: where all is stale, a version of theirs is taken.
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

    _addresses = field_validator("peers", "peer_versions")(_other_nodes)

    @property
    def peer_addresses(self) -> list[tuple[str, int]]:
        return [_host_and_port(text) for text in self.peers]

    @property
    def version_addresses(self) -> list[tuple[str, int]]:
        return [_host_and_port(text) for text in self.peer_versions]

    @property
    def regions(self) -> int:
        """Iterations of gradients that memory is taken for: those that are alive, and those that peers may read."""
        return self.arenas + (self.peer_iterations if self.shows else 0)

    @property
    def shows(self) -> bool:
        """May others read what this node has of iterations?"""
        return bool(self.peers) or self.journal


class CommonStep(_Part):
    """nodes: HOST:PORT of the control ports of nodes that follow other groups of the same jobs. seconds: how long a
    version is kept for a group that does not come on."""

    nodes: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0

    _addresses = field_validator("nodes")(_other_nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [_host_and_port(text) for text in self.nodes]


class Output(_Part):
    """every: write each K-th version to disk, 0 none. keep_hashes: SHA-256 of every version, as JSON lines.
    readable_by: who may read what is written here, and into a store that is a directory."""

    directory: Path = Path("out")
    readable_by: Literal["owner", "group", "all"] = "owner"
    every: Annotated[int, Field(ge=0)] = 0
    keep_hashes: Path | None = None
    status_file: Path | None = None


class Follow(_Part):
    """A job of which no trainer attaches: its gathered parameters are followed. manifest: its file. group: what its
    events and its folder are called. iteration: the trainer's number of the manifest's first iteration."""

    manifest: Path
    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,32}$")]
    iteration: Annotated[int, Field(ge=0, le=1 << 53)] = 0


class Store(_Part):
    """url: of a directory or of anything that fsspec reaches; options: for its implementation. every: write each K-th
    version there; minutes: the newest whenever so many have passed. Versions stay in it if they are among the newest
    `keep`, not older than keep_hours, or the first in their stretch of keep_every steps; all, with neither keep nor
    keep_hours. seconds: without a byte, after which it counts as one that hangs."""

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    every: Annotated[int, Field(ge=0)] = 0
    minutes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    keep: Annotated[int, Field(ge=0)] = 0
    keep_hours: Annotated[float, Field(ge=0)] = 0.0
    keep_every: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    options: dict[str, Any] = {}

    @field_validator("url")
    @classmethod
    def _whole(cls, url: str) -> str:
        scheme, found, rest = url.partition("://")
        if (found and not (scheme and rest)) or "::" in url:
            raise ValueError("PROTOCOL://PLACE, or a directory; chains (::) are not taken")
        if secret := credentials_in(url):
            raise ValueError(f"has {secret} in it: give what its library takes in store.options, or where the library"
                             " looks for it")
        return url

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        """They travel to another process as JSON, which has no dates."""
        for name, value in options.items():
            try:
                text = json.dumps(value)
            except TypeError:
                raise ValueError(f"{name} has a date or a time in it: give it as text, in quotes") from None
            if secret := credentials_in(text):
                raise ValueError(f"{name} is a URL that has {secret} in it: give these as options of their own")
        return options

    @model_validator(mode="after")
    def _due(self) -> Self:
        if not self.every and not self.minutes:
            raise _wrong("every", "0, and minutes, too: one of them says when a version is written")
        if self.keep_every and not (self.keep or self.keep_hours):
            raise _wrong("keep_every", "all versions stay anyway: set keep or keep_hours, too")
        return self


class Protect(_Part):
    """copies: HOST:PORT of the `api.listen` of nodes whose versions this one keeps copies of. every: of each K-th step.
    keep: whole copies of a group; one more while the next comes. directory: for them, on tmpfs; left out: that of the
    replicas. memory_mb: most that all copies may take. seconds: between two looks at a node. mb_per_second: MiB that
    are read from other nodes at most, for copies and parity together; None: as fast as they come. journal: of some of
    these nodes, HOST:PORT of `control.listen`: what their gradients were since the copy is kept, too; at a holder of
    parity also of nodes with data, since the last rounds.

    parity: "K+M": of K nodes, each of which follows a shard, any M of the group may be lost. group: HOST:PORT of their
    `api.listen`, the K nodes and then M holders of parity; this node is one of them. Left out: the registry says it.

    registry: endpoints of etcd, in which nodes of one `cluster` find each other; their root then says whose copies a
    node keeps, beside `copies`, and who makes a group with parity. registry_ca: as tls.ca, of https:// endpoints.
    registry_cert, registry_key: PEM files of a certificate that this node shows there. registry_user: whom it logs in
    as, with the first line of registry_password_file.
    replicas: of each node's state, its own counts; None: 2, and where there is parity, 1. grace: seconds that who is
    there must differ before the root changes anything. advertise: HOST:PORT of api.listen as other nodes reach it.
    host, leaf, rack: what this node may be lost with. standby: it has no place until it takes that of one that is lost.
    own: copies of this node's own versions are kept here, too. replace: a command that is to bring a replacement, its
    program first; replace_seconds: how long that is waited for."""

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
    registry: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    registry_ca: str = ""
    registry_cert: Path | None = None
    registry_key: Path | None = None
    registry_user: Annotated[str, Field(max_length=256)] = ""
    registry_password_file: Path | None = None
    cluster: Annotated[str, Field(min_length=1, max_length=64)] = "default"
    replicas: Annotated[int, Field(ge=2, le=16)] | None = None
    grace: Annotated[float, Field(ge=1, le=86400)] = 10.0
    advertise: str | None = None
    host: Annotated[str, Field(max_length=64)] = ""
    leaf: Annotated[str, Field(max_length=64)] = ""
    rack: Annotated[str, Field(max_length=64)] = ""
    standby: bool = False
    own: bool = False
    replace: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=64)] = ()
    replace_seconds: Annotated[float, Field(ge=1, le=86400)] = 900.0

    _addresses = field_validator("copies", "group")(_other_nodes)

    @field_validator("registry")
    @classmethod
    def _endpoints(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if any("@" in one for one in given):  # said here, before anything can be printed
            raise ValueError("has a user or a password in an endpoint: give protect.registry_user and"
                             " protect.registry_password_file")
        return given

    @field_validator("advertise")
    @classmethod
    def _advertised(cls, text: str | None) -> str | None:
        return None if text is None else _other_nodes((text,))[0]

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.code is None:
            if self.group:
                raise _wrong("parity", "is missing: how many of the group hold data, and how many parity")
            if not self.copies and not self.registry:
                raise _wrong("copies", "names nobody: nodes whose versions are copied, or a registry that says whose")
        elif not (self.code[0] >= 2 and self.code[1] >= 1 and sum(self.code) <= MOST_STREAMS_OF_A_CODE):
            raise _wrong("parity", f"{self.parity}: two nodes with data at least, one holder of parity, and"
                         f" {MOST_STREAMS_OF_A_CODE} in all at most")
        elif self.group and len(self.group) != sum(self.code):
            raise _wrong("group", f"names {len(self.group)} nodes, and {self.parity} are {sum(self.code)}")
        elif not self.group and not self.registry:
            raise _wrong("group", f"is missing: the {sum(self.code)} nodes of {self.parity}, or a registry that says"
                         " who they are")
        if strange := self.journal.keys() - {*self.copies, *self.group[: self.code[0] if self.code is not None else 0]}:
            raise _wrong("journal", f"{min(strange)} is none of protect.copies, and no node with data of protect.group:"
                         " a journal needs a copy or parity to begin with")
        together = max(len(self.copies), self.code[0] if self.code is not None else 1)
        if self.mb_per_second is not None and self.mb_per_second < SLOWEST * together:
            raise _wrong("mb_per_second", f"{self.mb_per_second} for {together} versions that may be pulled at once:"
                         f" {SLOWEST} for each at least, or their nodes end it")
        _other_nodes(tuple(self.journal.values()))
        self._check_login()
        for key in ("standby", "own", "replace"):
            if getattr(self, key) and not self.registry:
                raise _wrong(key, "is for nodes that find each other: protect.registry is missing")
        if self.replace and not self.replace[0]:
            raise _wrong("replace", "names no program")
        return self

    def _check_login(self) -> None:
        """Credentials are used, or refused here. Raises PydanticCustomError."""
        if bool(self.registry_user) != (self.registry_password_file is not None):
            raise _wrong("registry_user", "needs protect.registry_password_file, and the other way round")
        if (self.registry_cert is None) != (self.registry_key is None):
            raise _wrong("registry_cert", "needs protect.registry_key, and the other way round")
        given = [key for key in ("registry_user", "registry_cert") if getattr(self, key)]
        if given and not self.registry:
            raise _wrong(given[0], "is for etcd: protect.registry is missing")
        for one in self.registry:
            place = host_and_port(one.lower().removeprefix("http://").removesuffix("/"))
            near = place is not None and _is_loopback(place[0])
            if one.lower().startswith("http:") and (self.registry_cert or (self.registry_user and not near)):
                raise _wrong("registry", f"{one} is not encrypted, and {given[-1]} is given: https://")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [_host_and_port(text) for text in self.copies]

    @property
    def members(self) -> list[tuple[str, int]]:
        return [_host_and_port(text) for text in self.group]

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
        return [(_host_and_port(one), _host_and_port(other)) for one, other in self.journal.items()]


class NodeConfig(_Part):
    """capture: mirror ports; in the file a table, or a list of tables; none: a holder of copies, without DPDK. groups:
    jobs at once. follow: jobs besides, of which no trainer attaches. record_seconds: how long a complete iteration
    waits for its step record."""

    control: Control
    capture: tuple[Capture, ...]
    follow: Annotated[tuple[Follow, ...], Field(max_length=8)] = ()
    protect: Protect | None = None
    replica: ReplicaSettings = ReplicaSettings()
    output: Output = Output()
    common: CommonStep = CommonStep()
    api: Api | None = None
    store: Store | None = None
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
    def _holder(cls, data: Any) -> Any:
        """A holder of copies has neither captures nor trainers."""
        if isinstance(data, Mapping) and "protect" in data and "capture" not in data:
            return {"control": Control(listen=NOWHERE), **data, "capture": ()}
        return data

    @field_validator("capture", mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        if given == []:
            raise PydanticCustomError("empty", "a node needs a mirror port at least")
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
                    raise _wrong(f"{_index(i, captures)}.{key}", f"{name} is given twice: {taken[kind, name]} has it")
                taken[kind, name] = f"capture{_index(i, captures)}.{key}"
        huge = {capture.huge for capture in captures} - {None}
        if len(huge) > 1:
            raise _wrong(".huge", "true in one and false in another: all captures of a node have the same memory")
        if (queues := sum(capture.queues for capture in captures)) > MOST_STREAMS:
            raise _wrong(".queues", f"{queues} in all captures together: a node reads at most {MOST_STREAMS}")
        return captures

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.api is not None and self.replica.slots < 3:
            raise _wrong("replica.slots", f"{self.replica.slots} leave none to update while a version is read: 3 at"
                         " least with an [api], and 4 with resync = \"ranges\"")
        if self.store is not None and self.replica.slots < (least := 3 if self.api is None else 4):
            raise _wrong("replica.slots", f"{self.replica.slots} leave none to update while a version is written to the"
                         f" store{' and another is read' if self.api else ''}: {least} at least with"
                         f" {'[api] and ' if self.api else 'a '}[store]")
        return self

    @model_validator(mode="after")
    def _held(self) -> Self:
        if self.capture:
            return self
        if self.api is None:
            raise _wrong("api", "is missing: without it nobody could have the copies that this node holds")
        given: list[str] = [key for key in ("replica", "common", "store", "follow") if key in self.model_fields_set]
        if self.control.listen != NOWHERE:
            given.insert(0, "control")
        if given:
            raise _wrong(given[0], "is for a node that follows jobs, and this one has no [capture]")
        return self

    @model_validator(mode="after")
    def _found(self) -> Self:
        """What others are told of where this node is."""
        if self.protect is None or not self.protect.registry or self.protect.advertise is not None:
            return self
        if self.api is None:
            raise _wrong("api", "is missing: other nodes could not copy from this one")
        if self.api.address[0] in ("0.0.0.0", "::"):
            raise _wrong("protect.advertise", f"is missing: {self.api.listen} is no address that others can reach")
        return self

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.protect is None or self.protect.code is None or self.protect.placed:
            return self
        if self.member is None:
            own = self.protect.advertise or (self.api.listen if self.api is not None else "no [api]")
            raise _wrong("protect.group", f"this node is none of them: it has {own}")
        if self.member < self.protect.code[0] and not self.capture:
            raise _wrong("protect.group", "this node follows no job, and has a place among those with data")
        if self.member < self.protect.code[0] and (alone := self.protect.journal.keys() - set(self.protect.copies)):
            raise _wrong("protect.journal", f"{min(alone)} is none of protect.copies, and this node keeps no parity")
        return self

    @model_validator(mode="after")
    def _near(self) -> Self:
        for table, part in (("control", self.control), ("api", self.api)):
            if part is None or part.insecure or self.tls is not None or _is_loopback(part.address[0]):
                continue
            raise _wrong(f"{table}.listen", f"{part.address[0]} is not the loopback, and nothing that is sent there is"
                         " encrypted: give [tls], or set insecure = true there if that network may be trusted")
        return self

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.capture and "trainer" not in self.token_files:
            raise _wrong("control.token_file", "is missing: without a token of trainers there is nobody to follow")
        if self.protect is not None and "peer" not in self.token_files:
            raise _wrong("tokens.peer", "is missing: nodes that keep copies prove to each other that they know one, and"
                         " sign with it what they say in a registry")
        journal = tuple(self.protect.journal) if self.protect is not None else ()
        asked = (("replica.peers", self.replica.peers, "peer"), ("common.nodes", self.common.nodes, "peer"),
                 ("protect.journal", journal, "peer"), ("replica.peer_versions", self.replica.peer_versions, "peer"))
        for key, nodes, role in asked:
            if nodes and role not in self.token_files:
                raise _wrong(f"tokens.{role}", f"is missing, and {key} names nodes that ask for one")
        return self

    @model_validator(mode="after")
    def _unattended(self) -> Self:
        if self.follow and not self.output.every:
            raise _wrong("output.every", "is 0, and parameters that a job gathers are nowhere but on the disk: 1 writes"
                         " those of each step")
        names = [one.group for one in self.follow]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise _wrong(f"follow[{i}].group", f"{name} is given twice: each job has a folder of its own")
        return self

    @model_validator(mode="after")
    def _others(self) -> Self:
        if self.control.address in self.replica.peer_addresses:
            raise _wrong("replica.peers", f"{self.control.listen} is this node itself, which has what it lacks from"
                         " others: name those")
        if self.api is not None and self.api.address in self.replica.version_addresses:
            raise _wrong("replica.peer_versions", f"{self.api.listen} is this node itself: name others")
        if self.control.address in self.common.addresses:
            raise _wrong("common.nodes", f"{self.control.listen} is this node itself: name the others")
        if self.common.nodes and self.replica.slots < 3:
            raise _wrong("replica.slots", f"{self.replica.slots} leave none to keep a version in for the nodes of"
                         " common.nodes: 3 at least, better 4")
        return self

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
    def member(self) -> int | None:
        """This node's place in protect.group."""
        if self.protect is None or self.api is None:
            return None
        own = self.api.address if self.protect.advertise is None else _host_and_port(self.protect.advertise)
        return self.protect.members.index(own) if own in self.protect.members else None

    def table(self, index: int) -> str:
        """What errors and events call a capture's table in the settings."""
        return f"capture{_index(index, self.capture)}"

    @property
    def token_files(self) -> dict[str, Path]:
        """By role; a role that is not in it is let in by nothing."""
        own = {role: getattr(self.tokens, role) or self.control.token_file for role in TokenFiles.model_fields}
        return {role: path for role, path in own.items() if path is not None}

    def token(self, role: str = "trainer") -> bytes:
        """The first of a role's tokens, as its file is now. Raises UserError or EnvironmentProblem."""
        path = self.token_files[role]
        return _token(read_token(path), path)


def read_token(path: str | os.PathLike[str]) -> str:
    """The first line of a file of tokens. Raises UserError or EnvironmentProblem."""
    return _lines(Path(path))[0]


def read_tokens(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
    """One token, or two while they are being replaced. Raises UserError or EnvironmentProblem."""
    path = Path(path)
    if path.exists() and not path.is_file():  # it is read again and again, by a thread that must not wait
        raise UserError("is no regular file", where=str(path), remedy="a file with a token in its first line")
    lines = _lines(path)
    if len(lines) > MOST_TOKENS:
        raise UserError(f"has {len(lines)} lines, each of which would be let in", where=str(path),
                        remedy="the token, and in a second line the one that it replaces, for as long as that takes")
    return tuple(_token(line, path) for line in lines)


def _token(line: str, path: Path) -> bytes:
    """Raises UserError naming the file: there may be one for each role."""
    try:
        return token_bytes(line)
    except UserError as error:
        raise UserError(error.what, where=str(path), remedy=error.remedy) from None


def _lines(path: Path) -> list[str]:
    """One at least."""
    try:
        lines = _text(path).rstrip("\r\n").splitlines()
        if not lines:
            raise IndexError
    except (OSError, UnicodeDecodeError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "is empty or no text"
        kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
        raise kind(reason, where=str(path), remedy="a readable file with a token in its first line") from None
    return lines


def _text(path: Path) -> str:
    """Of a small file: a device or a capture given by mistake must not fill the memory. A pipe into which nobody writes
    is empty, and not waited for; what a shell gives for `<(command)` is read."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(f"has more than {MOST_BYTES} bytes", where=str(path), remedy="name the right file")
    return data.decode()


def load(path: str | os.PathLike[str]) -> NodeConfig:
    """Raises UserError (content) or EnvironmentProblem (unreadable)."""
    path = Path(path)
    try:
        text = _text(path)
        data = tomllib.loads(text)
    except OSError as error:
        kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
        raise kind(
            f"cannot be read: {error.strerror}", where=str(path), remedy="give the node's settings with --config",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not TOML: {error}", where=str(path), remedy="docs/use/node.md shows the form") from None
    try:
        return NodeConfig.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        found.sort(key=lambda one: one["type"] != "extra_forbidden")  # a key that is misspelt is missing, too
        captures = data.get("capture")
        several = isinstance(captures, list) and len(captures) > 1
        first, *others = ((_key(one, several), _said(one)) for one in found)
        also = "".join(f"; {field}: {said}" for field, said in others[:4])
        at = position(text, first[0])
        place = f" (line {at[0]}, column {at[1]})" if at else ""
        raise UserError(first[1] + also + place, where=f"{path}: {first[0]}", remedy="docs/use/node.md has every key"
                        ) from None


def position(text: str, key: str) -> tuple[int, int] | None:
    """Line and column, from 1, at which a key of valid TOML stands, or its table if it is not written out: `name`,
    `replica.slots`, `capture[1].cores`. None: neither is found where most people write it."""
    table, _, name = key.rpartition(".")
    table, number = re.sub(r"\[[0-9]+\]$", "", table), re.search(r"\[([0-9]+)\]$", table)
    wanted, seen, inside, begins = int(number[1]) if number else 0, -1, not table, None
    for line, written in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", written):
            seen += head[1] == table
            inside = head[1] == table and seen == wanted
            if inside or (not table and head[1] == name):
                begins = begins or (line, head.start(1) + 1)
        elif inside and (found := re.match(rf"\s*({re.escape(name)})\s*[=.]", written)):
            return line, found.start(1) + 1
    return begins


def _key(error: Mapping[str, Any], several: bool) -> str:
    """`replica.slots`; `capture.cores` or, of several, `capture[1].cores`; elements of a list: the list's."""
    beside = [error["ctx"]["key"]] if error["type"] == "together" else []
    table, *rest = error["loc"] or [""]
    if table not in ("capture", "follow"):
        return ".".join(map(str, [*error["loc"], *beside]))
    index = f"[{rest.pop(0)}]" if rest and isinstance(rest[0], int) else ""
    keys = [f".{part}" for part in rest[:1]]
    for key in beside:
        keys = [key if key[0] in ".[" else f".{key}"]
    return f"{table}{index if several or table == 'follow' else ''}{''.join(keys)}"


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong with one key; of one that does not exist, which one is meant."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *table, key = (str(part) for part in error["loc"] if isinstance(part, str))
    keys = _keys(table[0]) if table else NodeConfig.model_fields
    close = difflib.get_close_matches(key, keys, 1)
    elsewhere = [name for name in NodeConfig.model_fields if key in _keys(name)]
    if close and close[0] != key:
        return f"is not a key: did you mean {close[0]}?"
    return f"is not a key here, it is one of [{elsewhere[0]}]" if elsewhere else "is not a key"


def _keys(table: str) -> Iterable[str]:
    """Of a table of the file; none for a key that is not one."""
    kind: Any = NodeConfig.model_fields[table].annotation
    return getattr(next(iter(get_args(kind)), kind), "model_fields", ())
