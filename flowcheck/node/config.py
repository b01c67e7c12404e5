"""Settings of a node: node.toml, checked before anything is started (docs/use/node.md has every key)."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flowcheck.control.protocol import token_bytes
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["Capture", "Control", "NodeConfig", "Output", "ReplicaSettings", "load"]

MOST_BYTES = 1 << 20


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Control(_Part):
    """listen: HOST:PORT on the control network, port 0 for any. token_file: its first line is the shared secret.
    connections: at once, known or not."""

    listen: str
    token_file: Path
    connections: Annotated[int, Field(ge=1, le=65536)] = 256

    @field_validator("listen")
    @classmethod
    def _address(cls, text: str) -> str:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+):[0-9]{1,5}", text) or int(text.rpartition(":")[2]) > 65535:
            raise ValueError("HOST:PORT, an IPv6 address in brackets")
        return text

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class Capture(_Part):
    """device: as dataplane/ports.py names them. path_mtu: RoCE's, 0: whole frames of the interface. huge: packet memory
    in huge pages; left out: if enough of them are free when the node starts."""

    device: str
    path_mtu: int = 0
    queues: Annotated[int, Field(ge=1, le=16)] = 1
    ring_size: Annotated[int, Field(ge=64, le=1 << 24)] = 1 << 14
    cores: tuple[int, ...] = ()
    huge: bool | None = None


class ReplicaSettings(_Part):
    """directory: of the replica files, on tmpfs or hugetlbfs. keep: leave them there at an orderly end. arenas:
    iterations of gradients alive at once. memory_mb: most that one job may take, state and gradients together."""

    directory: Path = Path("/dev/shm")
    slots: Annotated[int, Field(ge=2, le=4)] = 3
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    keep: bool = True
    arenas: Annotated[int, Field(ge=2, le=64)] = 4
    memory_mb: Annotated[int, Field(ge=1)] = 65536


class Output(_Part):
    """every: write each K-th version to disk, 0 none. keep_hashes: SHA-256 of every version, as JSON lines."""

    directory: Path = Path("out")
    every: Annotated[int, Field(ge=0)] = 0
    keep_hashes: Path | None = None
    status_file: Path | None = None


class NodeConfig(_Part):
    """groups: jobs at once. record_seconds: how long a complete iteration waits for its step record."""

    control: Control
    capture: Capture
    replica: ReplicaSettings = ReplicaSettings()
    output: Output = Output()
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,32}$")] = "node"
    groups: Annotated[int, Field(ge=1, le=8)] = 1
    record_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0

    def token(self) -> bytes:
        path = self.control.token_file
        try:
            text = _text(path).splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError) as error:
            reason = getattr(error, "strerror", None) or "is empty or no text"
            kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
            raise kind(reason, where=str(path), remedy="a readable file with one line") from None
        return token_bytes(text)


def _text(path: Path) -> str:
    """Of a small file: a device or a capture given by mistake must not fill the memory."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(f"has more than {MOST_BYTES} bytes", where=str(path), remedy="name the right file")
    return data.decode()


def load(path: str | os.PathLike[str]) -> NodeConfig:
    """Raises UserError (content) or EnvironmentProblem (unreadable)."""
    path = Path(path)
    try:
        data = tomllib.loads(_text(path))
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
        first, *others = ((".".join(map(str, one["loc"])), _said(one)) for one in found)
        also = "".join(f"; {field}: {said}" for field, said in others[:4])
        raise UserError(first[1] + also, where=f"{path}: {first[0]}", remedy="docs/use/node.md has every key") from None


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong with one key; of one that does not exist, which one is meant."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *table, key = map(str, error["loc"])
    part: Any = NodeConfig.model_fields[table[0]].annotation if table else NodeConfig
    close = difflib.get_close_matches(key, part.model_fields, 1)
    elsewhere = [name for name, field in NodeConfig.model_fields.items()
                 if key in getattr(field.annotation, "model_fields", ())]
    if close and close[0] != key:
        return f"is not a key: did you mean {close[0]}?"
    return f"is not a key here, it is one of [{elsewhere[0]}]" if elsewhere else "is not a key"
