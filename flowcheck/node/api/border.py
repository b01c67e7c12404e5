"""What the process that answers the API is given."""

from __future__ import annotations

from pathlib import Path

from flowcheck.node.config.store import Store
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.process.child import Program
from flowcheck.node.process.lines import Line, Order, Settings

__all__ = ["PROGRAM", "ApiSettings", "OtherKeys", "Parity"]

Keys = dict[str, tuple[str, ...]]


class Parity(Line):
    """directory: where it lies. others: who has the other streams; None: those that the file `placement` names. most:
    bytes. ca: of nodes' certificates, "": none."""

    directory: Path
    others: tuple[tuple[str, int], ...] | None
    most: int
    ca: str
    placement: Path


class ApiSettings(Settings):
    """keys: by key, the roles that show it. tls: certificate and its key. node: its name. replicas, checkpoints,
    copies, journals: where versions lie; None: there are none. made: where those do that are made of the store.
    reserved: slots that others read. follows: jobs. shadow: checksums that must have matched. shown: the key that it
    proves to others. names: that others may call it. limits: of connections. socket, board: descriptors; board -1:
    without one."""

    keys: Keys
    tls: tuple[Path, Path] | None
    node: str
    replicas: Path
    checkpoints: Path
    reserved: int
    follows: bool
    shadow: int
    copies: Path | None
    journals: Path | None
    made: Path
    store: Store | None
    parity: Parity | None
    shown: str
    names: tuple[str, ...]
    limits: Limits
    socket: int
    board: int


class OtherKeys(Order):
    """The certificate is read again, too."""

    keys: Keys
    shown: str


PROGRAM = Program("flowcheck.node.api.worker", "api", "answers api.listen", {}, needed=True)
