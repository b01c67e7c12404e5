"""What every table of node.toml is: no other keys than these, no NUL."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from flowcheck.control.address import host_and_port, why_not

__all__ = [
    "ANYWHERE", "MOST_BYTES", "NOWHERE", "SLOWEST", "Table", "host_and_port_of", "host_of", "is_ip", "is_loopback",
    "known", "listens", "numbered", "other_nodes", "wrong",
]

MOST_BYTES = 1 << 20
ANYWHERE = ("0.0.0.0", "::")  # where a node may listen, and nobody is reached
NOWHERE = "127.0.0.1:0"  # of a node that nobody speaks to
SLOWEST = 8  # MiB a second, of a pull: a source lets one go that is slower than half of that (versions/holdings.py)


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _no_nul(cls, given: Any) -> Any:
        """No file's name and no address has one, and who is given one raises ValueError."""
        for text in given if isinstance(given, tuple) else (given,):
            if isinstance(text, str | Path) and "\0" in str(text):
                raise ValueError("has a NUL character in it")
        return given


def numbered(i: int, captures: Sequence[object]) -> str:
    return f"[{i}]" if len(captures) > 1 else ""


def wrong(key: str, what: str) -> PydanticCustomError:
    """What is wrong with a key that fits its own bounds, but not the other keys."""
    return PydanticCustomError("together", "{what}", {"key": key, "what": what})


def listens(text: str) -> str:
    if host_and_port(text, 0, brackets=True) is None:
        raise ValueError(f"{text!r} {why_not(text, 0)}: HOST:PORT, an IPv6 address in brackets")
    return text


def host_and_port_of(listen: str) -> tuple[str, int]:
    found = host_and_port(listen, 0)
    assert found is not None  # listens has looked at it
    return found


def host_of(text: str) -> str:
    """A host without brackets. Raises ValueError: no machine could be reached at it."""
    bare = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if known((bare, 0))[0] in ANYWHERE:
        raise ValueError(f"{text!r} is not a host that can be reached: it stands for all addresses of a machine")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(bare).version == 6 or bare == text:
            return bare
    if host_and_port(text) is not None:
        raise ValueError(f"{text!r} is not a host: it has a port")
    if bare != text or host_and_port(f"{text}:1") is None or ":" in text or re.fullmatch(r"[0-9.]+", text):
        raise ValueError(f"{text!r} is not a host")
    return text


def known(at: tuple[str, int]) -> tuple[str, int]:
    """The same for all ways to write an address: fd00:0::2 and fd00::2, CK1 and ck1."""
    try:
        ip = ipaddress.ip_address(at[0])
    except ValueError:
        return at[0].lower().removesuffix("."), at[1]
    return str(getattr(ip, "ipv4_mapped", None) or ip), at[1]


def other_nodes(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if host_and_port_of(listens(text))[1] == 0:
            raise ValueError(f"{text}: nobody listens at port 0")
        host_of(host_and_port_of(text)[0])
        if [known(host_and_port_of(other)) for other in texts].count(known(host_and_port_of(text))) > 1:
            raise ValueError(f"{text} is given twice")
    return texts


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
