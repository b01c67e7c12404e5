"""HOST:PORT, as settings, arguments and other nodes say it: the one place where that is read. And what of a URL nobody
may see.

    host_and_port("10.0.0.2:7071") -> ("10.0.0.2", 7071)      host_and_port("[::1]:7071") -> ("::1", 7071)
    host_and_port("10.0.0.2") -> None                         None: it is not an address
    why_not("10.0.0.2:70711") -> "has port 70711, ..."        what is wrong with one that is not; odd_port: "" if that
                                                              is not its port
    credentials_in("ftp://me:secret@host/a") -> "a user or a password"         "": it has none
    without_credentials(text)                                 the same text, to be printed

A port is ASCII digits, 1 to 65535. A host is a name that can be looked up, an IPv4 address, or an IPv6 address in
brackets, or without. Standard library.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

__all__ = ["credentials_in", "host_and_port", "odd_port", "text_of", "why_not", "without_credentials"]

_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_SIX = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]{1,32})?", re.ASCII)
# A secret key may have slashes; a colon alone may stand before a port. Of http a user alone may be a token.
_LOGIN = re.compile(r"(?<=://)[^\s/?#@\[:]*:[^\s@]*@|(?<=http://|ttps://)[^\s/?#@]+@", re.IGNORECASE)
_QUERY = re.compile(r"(?<=://)([^\s?]*)\?[^\s'\"]*=[^\s'\"]*")
MOST_HOST = 253  # characters: longer ones no name server has
_NEVER = frozenset(" []/\\@?#,'\"`:")


def host_and_port(text: Any, least: int = 1, brackets: bool = False) -> tuple[str, int] | None:
    """Host without brackets, and port. least: 0 where any free port may be meant. brackets: an IPv6 address has to be
    in them. None: it is not an address."""
    host, found, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not found or not _PORT.fullmatch(port) or not least <= int(port) < 65536 or not 0 < len(host) <= MOST_HOST:
        return None
    if ":" in host:
        if brackets and host[0] != "[":
            return None
        host = host[1:-1] if host[0] == "[" and host[-1] == "]" else host
        return (host, int(port)) if _SIX.fullmatch(host) else None
    return (host, int(port)) if _is_name(host) else None


def why_not(text: Any, least: int = 1) -> str:
    """What an error says after the text, of which host_and_port has said None."""
    return odd_port(text, least) or "is not an address"


def odd_port(text: Any, least: int = 1) -> str:
    """That the port is a number and none of a port; "": it is not that."""
    port = text.rpartition(":")[2].rstrip("/") if isinstance(text, str) and ":" in text else ""
    if not (port.isascii() and port.isdigit()) or least <= int(port[:20]) < 65536:
        return ""
    return f"has port {port[:20]}, and ports are {least} to 65535"


def text_of(host: str, port: int) -> str:
    """The other way."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def credentials_in(url: str) -> str:
    """What of a URL is nobody's business, in words; "": nothing. A user without a password is one of http alone."""
    if _LOGIN.search(url):
        return "a user or a password"
    return "a query, in which signatures and tokens are" if _QUERY.search(url) else ""


def without_credentials(text: str) -> str:
    """A URL, or a text that has some, as it may be printed."""
    return _QUERY.sub(r"\1?***", _LOGIN.sub("***@", text))


def _is_name(host: str) -> bool:
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    same = unicodedata.normalize("NFKC", host) == host  # not the digits and dots of other widths
    return same and host.isprintable() and _NEVER.isdisjoint(host)
