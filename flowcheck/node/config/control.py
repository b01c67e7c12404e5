"""[control], [api], [tls] and [tokens]: who speaks to a node, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from flowcheck.control.tls import SYSTEM
from flowcheck.node.config.table import Table, host_and_port_of, listens

__all__ = ["Api", "Control", "Tls", "TokenFiles"]


class Control(Table):
    """The port for trainers and other nodes.

    - listen: HOST:PORT on the control network, port 0 for any.
    - token_file: the token of every role that has none of its own in [tokens].
    - insecure: listen elsewhere than on the loopback, although nothing that is sent is encrypted.
    - connections: at once, of those that have proved a token.
    - strangers, strangers_per_address: at once, of those that have not; and of one address.
    - inbox_mb: MiB that the ranks of a group may have sent and the group has not handled.
    """

    listen: str
    token_file: Path | None = None
    insecure: bool = False
    connections: Annotated[int, Field(ge=1, le=65536)] = 256
    strangers: Annotated[int, Field(ge=8, le=65536)] = 1024
    strangers_per_address: Annotated[int, Field(ge=1, le=65536)] = 256
    inbox_mb: Annotated[int, Field(ge=64, le=1 << 24)] = 512

    _address = field_validator("listen")(listens)

    @property
    def address(self) -> tuple[str, int]:
        return host_and_port_of(self.listen)


class Api(Table):
    """The port for readers of versions.

    - listen: HOST:PORT, port 0 for any.
    - insecure: listen elsewhere than on the loopback, although nothing that is sent is encrypted.
    - connections: at once, of those that have shown a key.
    - strangers, strangers_per_address: at once, of those that have not; and of one address.
    - shadow: checksums of the trainer that must have matched before a version is offered for recovery; 0: also versions
      that nothing was compared with are.
    """

    listen: str
    insecure: bool = False
    connections: Annotated[int, Field(ge=1, le=65536)] = 256
    strangers: Annotated[int, Field(ge=8, le=65536)] = 1024
    strangers_per_address: Annotated[int, Field(ge=1, le=65536)] = 256
    shadow: Annotated[int, Field(ge=0, le=1_000_000)] = 0

    _address = field_validator("listen")(listens)

    @property
    def address(self) -> tuple[str, int]:
        return host_and_port_of(self.listen)


class Tls(Table):
    """Of the control port, of the API, and of connections to peers. cert, key: PEM files of this node. ca: what peers'
    certificates are held against: a PEM file, or "system"."""

    cert: Path
    key: Path
    ca: str = SYSTEM


class TokenFiles(Table):
    """A file for each role. The first line is the token that this node shows and accepts; a second one is accepted as
    well, while tokens are being replaced."""

    trainer: Path | None = None
    peer: Path | None = None
    reader: Path | None = None
    operator: Path | None = None
