"""[nodes]: the machines that a node works with, in one list.

    resolved(data) -> data       what node.toml says, with switches over the list (`replica.peers = true`) as addresses
    SWITCHES                     the keys that are such switches, and which port of a machine each of them means

A machine in the list is a host, whose ports are this node's own, or a table with its ports: { control = "h:7070", api =
"h:7071" }; one that is left out is a port that this machine does not have. A switch is true (all machines of the list
that have that port, but this one), false, or a list of some of them.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flowcheck.control.address import host_and_port, odd_port, text_of
from flowcheck.node.config.table import (
    ANYWHERE,
    Table,
    host_and_port_of,
    host_of,
    is_ip,
    is_loopback,
    known,
    listens,
    wrong,
)

__all__ = ["PORTS", "MOVED", "SWITCHES", "Machine", "Nodes", "advertised", "meant_by", "own_ports", "resolved"]

Kind = Literal["control", "api"]
Address = tuple[str, int]
SWITCHES: dict[tuple[str, str], Kind] = {
    ("protect", "group"): "api", ("protect", "copies"): "api", ("replica", "peers"): "control",
    ("replica", "peer_versions"): "api", ("common", "nodes"): "control",
}
MOVED = (  # from [protect]
    "registry", "registry_ca", "registry_cert", "registry_key", "registry_user", "registry_password_file", "cluster",
    "advertise", "host", "leaf", "rack",
)
MOST_MACHINES = 256
PORTS = '{ control = "HOST:PORT", api = "HOST:PORT" }'


@dataclass(frozen=True)
class Machine:
    """One entry of the list.

    host: of one whose ports are this node's own; "" of a table. control, api: (host, port) of a table, None: it has no
    such port.
    """

    host: str = ""
    control: Address | None = None
    api: Address | None = None

    @classmethod
    def read(cls, entry: object) -> Machine:
        """Raises ValueError: it is neither a host nor a table of ports."""
        if isinstance(entry, Machine):
            return entry
        if isinstance(entry, str):
            try:
                return cls(host_of(entry))
            except ValueError as error:
                raise ValueError(f"{error}; an entry is a host, or {PORTS}") from None
        if isinstance(entry, Mapping) and (strange := sorted(entry.keys() - {"control", "api"})):
            close = difflib.get_close_matches(strange[0], ("control", "api"), 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"{strange[0]} is not a key of a machine: {hint}{PORTS}")
        if not isinstance(entry, Mapping) or not entry:
            raise ValueError(f"{entry!r} is not a host, nor {PORTS}")
        for text in entry.values():
            if not isinstance(text, str) or host_and_port(text, brackets=True) is None:
                raise ValueError(f"{text!r} is not HOST:PORT of a machine")
            host_of(host_and_port_of(text)[0])
        return cls(control=host_and_port(entry.get("control")), api=host_and_port(entry.get("api")))

    def with_ports(self, own: Mapping[Kind, Address | None]) -> Machine:
        """With its ports written out. own: those of this node."""
        if not self.host:
            return self

        def at(listens: Address | None) -> Address | None:
            return (self.host, listens[1]) if listens is not None and listens[1] else None

        return Machine(self.host, at(own["control"]), at(own["api"]))

    def answers_to(self, text: str) -> bool:
        """Does a list of some machines mean this one by that?"""
        place = host_and_port(text) if not is_ip(text) else None
        if place is not None and known(place) in map(known, self.ports):
            return True
        host = known((text.removeprefix("[").removesuffix("]"), 0))
        return host in {known((one, 0)) for one in (self.host, *(host for host, _ in self.ports)) if one}

    @property
    def ports(self) -> list[Address]:
        return [one for one in (self.control, self.api) if one is not None]


class Nodes(Table):
    """The machines that a node works with, and where it is itself.

    - addresses: machines, this one may be among them.
    - registry: endpoints of etcd, in which nodes of one `cluster` find each other; in the file a list, or one text with
      commas; etcd:// is http://, etcds:// is https://.
    - registry_ca: as tls.ca, of https:// endpoints.
    - registry_cert, registry_key: PEM files of a certificate that this node shows there.
    - registry_user, registry_password_file: a user of etcd, and a file whose first line is the password.
    - cluster: nodes with the same one keep each other's copies.
    - advertise: HOST or HOST:PORT of api.listen as other nodes reach it; None: api.listen.
    - host, leaf, rack: what this node may be lost with.
    """

    addresses: Annotated[tuple[Machine, ...], Field(max_length=MOST_MACHINES)] = ()
    registry: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    registry_ca: str = ""
    registry_cert: Path | None = None
    registry_key: Path | None = None
    registry_user: Annotated[str, Field(max_length=256)] = ""
    registry_password_file: Path | None = None
    cluster: Annotated[str, Field(min_length=1, max_length=64)] = "default"
    advertise: str | None = None
    host: Annotated[str, Field(max_length=64)] = ""
    leaf: Annotated[str, Field(max_length=64)] = ""
    rack: Annotated[str, Field(max_length=64)] = ""

    @field_validator("addresses", mode="before")
    @classmethod
    def _machines(cls, given: Any) -> Any:
        return tuple(map(Machine.read, given)) if isinstance(given, list | tuple) else given

    @field_validator("registry", mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        """As etcd's own tools take it: with commas, the scheme perhaps once; and etcd:// as other tools say it."""
        if not isinstance(given, str | list | tuple):
            return given
        made: list[Any] = []
        before = ""
        for one in [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else given:
            scheme, found, rest = one.partition("://") if isinstance(one, str) else ("", "", "")
            if found:
                before = {"etcd": "http", "etcds": "https"}.get(scheme.lower(), scheme)
                made.append(f"{before}://{rest}")
            else:
                made.append(f"{before}://{one}" if before and isinstance(given, str) else one)
        return tuple(made)

    @field_validator("registry")
    @classmethod
    def _endpoints(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if any("@" in one for one in given):  # said here, before anything can be printed
            raise ValueError("has a user or a password in an endpoint: give nodes.registry_user and"
                             " nodes.registry_password_file")
        for one in given:
            scheme, _, rest = one.partition("://")
            if scheme.lower() not in ("http", "https") or host_and_port(rest.removesuffix("/"), brackets=True) is None:
                raise ValueError(f"{one!r} {odd_port(rest) or 'is not an endpoint of etcd'}: http://HOST:PORT or"
                                 " https://HOST:PORT")
        return given

    @field_validator("advertise")
    @classmethod
    def _advertised(cls, text: str | None) -> str | None:
        if text is not None and host_and_port(text_of(text, 1)) is None:
            listens(text)
            if host_and_port(text) is None:
                raise ValueError(f"{text}: nobody listens at port 0")
        return text

    @model_validator(mode="after")
    def _login(self) -> Self:
        """Credentials are used, or refused here."""
        for one, other in (("registry_user", "registry_password_file"), ("registry_cert", "registry_key")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                there, missing = (one, other) if getattr(self, one) else (other, one)
                raise wrong(there, f"needs nodes.{missing}")
        given = [key for key in ("registry_user", "registry_cert") if getattr(self, key)]
        alone = [key for key in ("registry_ca", "cluster", "host", "leaf", "rack") if key in self.model_fields_set]
        if (given or alone) and not self.registry:
            raise wrong((given or alone)[0], "is for nodes that find each other in etcd: nodes.registry is missing")
        for one in self.registry:
            place = host_and_port(one.lower().removeprefix("http://").removesuffix("/"))
            near = place is not None and is_loopback(place[0])
            if one.lower().startswith("http:") and (self.registry_cert or (self.registry_user and not near)):
                raise wrong("registry", f"{one} is not encrypted, and {given[-1]} is given: https://")
        return self


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with addresses in place of switches, and keys of [protect] that are keys of [nodes] now there.

    data: of node.toml, not yet validated. What is wrong in [nodes] itself is left to it. Raises PydanticCustomError.
    """
    tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in data.items()}
    _move(tables)
    around = Around(tables)
    for (table, key), kind in SWITCHES.items():
        keys = tables.get(table)
        if not isinstance(keys, dict):
            continue
        given = keys.get(key)
        if (table, key) == ("protect", "group") and given is None and around.has_group(keys):
            given = True
        if (table, key) == ("replica", "peer_versions") and given is True and keys.get("peers") and around.machines:
            given = keys["peers"]  # whoever mirrors the same groups
        if isinstance(given, bool) or (around.machines and isinstance(given, list | tuple)):
            keys[key] = [text_of(*at) for at in around.chosen(f"{table}.{key}", given, kind)]
        for text in _texts(keys.get(key)) if key != "group" else ():
            if (at := host_and_port(text)) is not None and around.is_own(at):
                raise wrong(f"{table}.{key}", f"{text_of(*at)} is this node itself: name the others")
    if isinstance(protect := tables.get("protect"), dict):
        given = protect.get("journal")
        if isinstance(given, bool | list | tuple):
            protect["journal"] = around.journal(protect, given)
    return tables


def meant_by(config: object) -> dict[str, list[str]]:
    """By switch of settings that have been read, HOST:PORT of the machines that it means."""
    keys = (*SWITCHES, ("protect", "journal"))
    made = {(table, key): getattr(getattr(config, table), key, ()) for table, key in keys}
    return {".".join(key): list(addresses) for key, addresses in made.items() if addresses}


def own_ports(tables: Mapping[str, Any]) -> dict[Kind, Address | None]:
    """Where this node listens, as it says; None: it has no such port."""
    def of(kind: Kind) -> Address | None:
        table = tables.get(kind)
        return host_and_port(table.get("listen") if isinstance(table, Mapping) else getattr(table, "listen", None), 0)

    return {"control": of("control"), "api": of("api")}


def advertised(text: str, api: Address | None) -> Address:
    """Where others reach an API: of HOST or HOST:PORT. api: where it listens."""
    return host_and_port(text) or (text.removeprefix("[").removesuffix("]"), api[1] if api is not None else 0)


def _move(tables: dict[str, Any]) -> None:
    """Keys that were in [protect]. Raises PydanticCustomError: one is in both tables."""
    protect, nodes = tables.get("protect"), tables.get("nodes", {})
    if not isinstance(protect, dict) or not isinstance(nodes, dict):
        return
    for key in (key for key in MOVED if key in protect):
        if key in nodes:
            raise wrong(f"protect.{key}", f"stands beside nodes.{key}, its name in this release: remove this one")
        nodes[key] = protect.pop(key)
    if nodes:
        tables["nodes"] = nodes


class Around:
    """The machines of the list, their ports written out, and this node among them. machines: empty where an
    entry of the list is not a machine, which `Nodes` says. Raises PydanticCustomError: two entries are the same."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        nodes = tables.get("nodes")
        self._nodes: Mapping[str, Any] = nodes if isinstance(nodes, Mapping) else {}
        self._listens = own_ports(tables)
        self._own = {known(at) for at in self._listens.values() if at is not None and at[1]}
        text, control = self._nodes.get("advertise"), self._listens["control"]
        if isinstance(text, str):
            host, port = advertised(text, self._listens["api"])
            self._own |= {known((host, port)), known((host, control[1] if control is not None else port))}
        given = self._nodes.get("addresses")
        self.machines: list[Machine] = []
        with contextlib.suppress(ValueError):
            self.machines = [Machine.read(one).with_ports(self._listens) for one in given or ()] if isinstance(
                given, list | tuple) else []
        seen: set[Address] = set()
        for one in self.machines:
            mine = {known(at): text_of(*at) for at in one.ports}
            if one.host:
                mine[known((one.host, 0))] = one.host
            if twice := seen & mine.keys():
                raise wrong("nodes.addresses", f"{mine[min(twice)]} is given twice")
            seen |= mine.keys()

    def is_own(self, at: Address | None) -> bool:
        """Is that a port of this node, as far as it says where it is?"""
        return at is not None and known(at) in self._own

    def has_group(self, protect: Mapping[str, Any]) -> bool:
        """Is a group with parity all of the list? A registry would say who is in it."""
        return bool(self.machines) and "parity" in protect and not self._nodes.get("registry")

    def chosen(self, key: str, given: object, kind: Kind) -> list[Address]:
        """Of a switch. Raises PydanticCustomError: it means nobody, or one that is not in the list."""
        if isinstance(given, list | tuple):
            return [_port(key, self._named(key, text), kind) for text in given]
        if not given:
            return []
        if not self._nodes.get("addresses"):
            raise wrong(key, "is true, and nodes.addresses is missing: the machines that it is for")
        ports = list(dict.fromkeys(
            _port(key, one, kind) for one in self.machines if one.host or getattr(one, kind) is not None))
        if key == "protect.group":  # this node is one of them
            return ports
        others = [at for at in ports if not self.is_own(at)]
        if self.machines and not others:
            raise wrong(key, f"is true, and nodes.addresses names no other machine with a port of {kind}")
        self._check_own(key, kind)
        return others

    def _check_own(self, key: str, kind: Kind) -> None:
        """A node that does not know itself in the list would ask itself. Raises PydanticCustomError."""
        listens, advertise = self._listens[kind], self._nodes.get("advertise")
        if listens is not None and listens[0] in ANYWHERE and advertise is None:
            raise wrong("nodes.advertise", f"is missing: this node listens at {text_of(*listens)}, which does not say"
                        " which of nodes.addresses it is")
        if any(self.is_own(at) for one in self.machines for at in one.ports):
            return
        names = [at[0] for one in self.machines for at in one.ports if not is_ip(at[0])]
        if advertise is not None and self.machines:
            raise wrong("nodes.advertise", f"{advertise} is none of nodes.addresses, and {key} is true, for all of them"
                        " but this node: write it as it is there, or add this node to the list")
        if names:
            raise wrong("nodes.advertise", f"is missing: nodes.addresses has names ({names[0]}), and {key} is true, for"
                        " all of them but this node: say which one it is, or add this node to the list")

    def journal(self, protect: Mapping[str, Any], given: object) -> dict[str, str]:
        """By API, the control ports. Raises PydanticCustomError."""
        if given is True:
            copies, group = (_texts(protect.get(key)) for key in ("copies", "group"))
            data = int(number) if (number := str(protect.get("parity", "")).partition("+")[0]).isdecimal() else 0
            with_data = group[:data]
            if any(self.is_own(host_and_port(one)) for one in with_data):  # a journal of these is for holders of parity
                with_data = []
            given = dict.fromkeys((*copies, *with_data))
            if not given and not protect.get("copies") and isinstance(protect.get("group", []), list | tuple):
                raise wrong("protect.journal", "is true, and there is nobody whose journal this node could keep: it is"
                            " for nodes of protect.copies, and at a holder of parity for nodes with data of"
                            " protect.group")
        found = [self._named("protect.journal", text) for text in given or ()]  # type: ignore[attr-defined]
        return {text_of(*_port("protect.journal", one, "api")): text_of(*_port("protect.journal", one, "control"))
                for one in found}

    def _named(self, key: str, text: object) -> Machine:
        found = [one for one in self.machines if isinstance(text, str) and one.answers_to(text)]
        if len(found) != 1:
            raise wrong(key, f"{text} is {'several' if found else 'none'} of nodes.addresses")
        return found[0]


def _texts(given: object) -> list[str]:
    """Of a list; what else there is in it is said by who validates it."""
    return [one for one in given if isinstance(one, str)] if isinstance(given, list | tuple) else []


def _port(key: str, machine: Machine, kind: Kind) -> Address:
    at: Address | None = getattr(machine, kind)
    if at is None:
        name = machine.host or text_of(*(machine.control or machine.api or ("", 0)))
        raise wrong(key, f"nodes.addresses does not say the {kind} port of {name}, and " + (
            f"{kind}.listen of this node has none that could be the same: write {PORTS}" if machine.host
            else f"{kind} = is missing in its table"))
    return at
