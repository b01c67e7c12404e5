"""Who may ask a node's HTTP API, and for what: whoever shows a key, what that key's role may have.

    Guard(app, keys, names)          lets nobody in who shows none; who has shown none gets one answer a connection
    may(path)                        roles that a path is for

A browser cannot show a key by itself. It asks the user for name and password (HTTP Basic), and the key is the password.
Other nodes prove that they know theirs, and the answer proves it too.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Collection, Iterable, Mapping

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowcheck.checkpoint.coding.rebuilding import PIECES
from flowcheck.control.proof import PROOF, SCHEME, Questions, answered, place_of
from flowcheck.node.api.node_routes import PAGE, PATHS
from flowcheck.node.doors.http_door import Visitor
from flowcheck.node.tokens import HTTP_ROLES, PEER, peers_of

__all__ = ["OPEN", "REWIND", "VERSIONS", "Guard", "Keys", "current", "may"]

VERSIONS = "/v1/versions"
REWIND = "/v1/rewind"
Keys = Mapping[str, Collection[str]]
OPEN = "/healthz"  # the one path that needs no key
ALWAYS = (OPEN, "/metrics")  # answered however many readers there are
_CLOSE = {"Connection": "close"}  # who has shown no key gets one answer for one connection
_PASSWORD = 'Basic realm="FlowCheck node: any name, and a key as password", charset="UTF-8"'


def current(keys: str | Callable[[], Keys]) -> Callable[[], Keys]:
    one: Keys = {keys: HTTP_ROLES} if isinstance(keys, str) else {}
    return (lambda: one) if isinstance(keys, str) else keys


def may(path: str) -> Collection[str]:
    """Roles that a path is for. Whatever is not named here is the operator's: a new route is in nobody else's hands."""
    if path == VERSIONS or path.startswith(f"{VERSIONS}/"):
        return ("trainer", "reader", PEER)
    if path == PIECES or path.startswith(f"{PIECES}/"):
        return ("reader", PEER)
    if path in PATHS:
        return ("reader", "operator")
    return HTTP_ROLES if path in ("/v1/status", REWIND, "/openapi.json") else ("operator",)


class Guard:
    """Lets nobody in who does not show a key of a role that may, whatever he asks for."""

    def __init__(self, app: ASGIApp, keys: str | Callable[[], Keys], names: Collection[str] = ()) -> None:
        self._app, self._keys = app, current(keys)
        self._questions = Questions(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            why, roles = "the key is missing or wrong", self._roles(scope["headers"])
            if not roles and (proof := _proof(scope["headers"])):
                proven = self._proven(scope, proof)
                if isinstance(proven, str):
                    why = proven
                else:
                    roles, send = {PEER}, _signed(send, *proven)
            if not roles:
                asked = _PASSWORD if scope["path"] == PAGE else "Bearer"
                if peers_of(self._keys()):
                    asked = f"{asked}, {self._questions.challenge()}"
                refused = JSONResponse({"why": why}, 401, {"WWW-Authenticate": asked} | _CLOSE)
            elif roles.isdisjoint(allowed := may(scope["path"])):
                shown = [role for role in allowed if role != PEER]
                refused = JSONResponse({"why": f"this is for {' or '.join(shown)}, the key is of"
                                               f" {' and '.join(sorted(roles))}"}, 403)
            elif (visitor := Visitor.of(scope)) is not None and not visitor.known(scope["path"] in ALWAYS):
                refused = JSONResponse({"why": "as many readers as may be are being answered", "full": True}, 503,
                                       {"Retry-After": "1"} | _CLOSE)
            else:
                await self._app(scope, receive, send)
                return
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, _closing(send) if scope["type"] == "http" else send)

    def _proven(self, scope: Scope, shown: str) -> tuple[bytes, str] | str:
        """The key that was proven and the mac of the question; text: why none was."""
        keys = peers_of(self._keys())
        path, query = bytes(scope.get("raw_path") or scope["path"].encode()), bytes(scope["query_string"])
        target = (path + (b"?" + query if query else b"")).decode("latin-1")
        span = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"range"), "")
        return self._questions.check(shown, keys, scope["method"], target, span, place_of(scope.get("server")))

    def _roles(self, headers: Iterable[tuple[bytes, bytes]]) -> set[str]:
        given = [value for name, value in headers if name == b"authorization"]
        roles: set[str] = set()
        if len(given) == 1:
            shown = key_in(given[0])
            for key, names in self._keys().items():  # all of them, so that it takes as long whichever it is
                if hmac.compare_digest(shown, key.encode()):
                    roles.update(set(names) - {PEER})
        return roles


def key_in(shown: bytes) -> bytes:
    """The key that an Authorization header shows, b"": none."""
    how, _, given = shown.partition(b" ")
    if how == b"Bearer":
        return given
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if how == b"Basic" else b""
    except ValueError:
        return b""


def _proof(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """An Authorization header that proves a key, "": it proves none."""
    given = [value for name, value in headers if name == b"authorization"]
    return given[0].decode("latin-1") if len(given) == 1 and given[0].startswith(SCHEME.encode()) else ""


def _closing(send: Send) -> Send:
    """The same, of an answer that needs no key, whatever it is: the connection ends with it."""
    async def out(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return out


def _signed(send: Send, key: bytes, mac: str) -> Send:
    """The same, with the proof of an answer whose whole body is there when it begins. A file's bytes have hashes in a
    manifest, and go past this one (sending.py)."""
    held: Message | None = None

    async def out(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and all(name != b"etag" for name, _ in message["headers"]):
            held = message
            return
        if held is not None:
            start, held = held, None
            if not message.get("more_body"):
                proof = answered(key, mac, start["status"], message.get("body", b""))
                start["headers"] = [*start["headers"], (PROOF.lower().encode(), proof.encode())]
            await send(start)
        await send(message)

    return out
