"""How trainers and a checkpoint node speak, and who may: the opening of a connection.

What they say: messages.py; in which frames: link.py. Both are to be had from here.

    opening    node: Challenge    trainer or peer: Hello (proof over both nonces)    node: Welcome (proof) or Refused
    then       trainer: Flows, Manifest, State, Patch, User, UserHead, Record, Members, Notice, Bye; Base of
               a log; Fed, Unfed of a job that sends its gradients
               node: Wanted, Ranges, Joined, Progress, Epoch, Notice, Refused
    or         peer: Holes, Journal, Steps    node: Bytes, Entry, Steps, Refused

Both sides prove that they know the token (HMAC-SHA256 over both nonces and who is speaking); the token itself never
travels. With a Secure (tls.py) all of it goes through TLS; without, nothing is encrypted. Every length is checked
before memory is taken, every wait has a deadline, and a frame that is not exactly one of the messages ends the
connection with RecordsError. docs/use/node.md describes every field; this schema is that of the later HTTP API too.
Standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from flowcheck.control.link import (
    HEAD_BYTES,
    Limits,
    Link,
    MisfitError,
    RecordsError,
    frame,
    lengths,
    message_of,
    tls_reason,
)
from flowcheck.control.messages import (
    MESSAGES,
    MOST_RANGES,
    MOST_RANKS,
    PATCH_BYTES,
    PEER_BYTES,
    PEER_SECONDS,
    PROTOCOL,
    RANGES_TEXT,
    RESYNC,
    ROLES,
    Base,
    BaseWanted,
    Bye,
    Bytes,
    Challenge,
    Entry,
    Epoch,
    Fed,
    Flows,
    Hello,
    Holes,
    Joined,
    Journal,
    Manifest,
    Members,
    Notice,
    Patch,
    Progress,
    Range,
    Ranges,
    Record,
    Refused,
    Share,
    Span,
    State,
    Steps,
    Unfed,
    User,
    UserHead,
    Wanted,
    Welcome,
)
from flowcheck.errors import UserError

__all__ = [
    "MESSAGES", "MOST_RANGES", "MOST_RANKS", "PATCH_BYTES", "PEER_BYTES", "PEER_SECONDS", "PROTOCOL", "RANGES_TEXT",
    "RESYNC", "ROLES", "Base", "BaseWanted", "Bye", "Bytes", "Challenge", "Entry", "Epoch", "Fed", "Flows", "Hello",
    "Holes", "Joined", "Journal", "Known", "Limits", "Link", "Manifest", "Members", "MisfitError", "Notice", "Opening",
    "Patch", "Progress", "Range", "Ranges", "Record", "RecordsError", "Refused", "Share", "Span", "State", "Steps",
    "Unfed", "User", "UserHead", "Wanted", "Welcome", "accept", "frame", "greet", "tls_reason", "token_bytes",
]

TOKEN_BYTES = (16, 4096)
Known = bytes | Callable[[str], Sequence[bytes]]  # the token of all, or those that are accepted of a role


def token_bytes(text: str) -> bytes:
    """The shared secret from an option or a file. Raises UserError if it is too short to be one."""
    token = text.strip().encode()
    if not TOKEN_BYTES[0] <= len(token) <= TOKEN_BYTES[1]:
        raise UserError(
            f"a token of {len(token)} characters; {TOKEN_BYTES[0]} to {TOKEN_BYTES[1]} are usable", where="token",
            remedy="the nodes' token, all of it; or a new one for nodes and trainers: "
                   "python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token


def _proof(token: bytes, side: str, challenge: str, hello: Hello) -> str:
    said = [side, challenge, hello.nonce, hello.run_id, hello.epoch, hello.rank, hello.ranks, hello.group,
            hello.instance]
    return hmac.new(token, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def greet(
    link: Link, token: bytes, *, run_id: str, epoch: int, rank: int, ranks: int, group: str, instance: str = "",
    role: str = ROLES[0],
) -> Welcome:
    """The opening of a trainer or a peer. Raises RecordsError: refused, or the node does not know the token."""
    link.begin()
    challenge = _expect(link, Challenge)
    hello = Hello(run_id, epoch, rank, ranks, group, secrets.token_hex(32), "", instance=instance, role=role)
    hello.proof = _proof(token, role, challenge.nonce, hello)
    link.send(hello)
    answer: Welcome = _expect(link, Welcome)
    if not hmac.compare_digest(answer.proof.encode(), _proof(token, "node", challenge.nonce, hello).encode()):
        raise RecordsError("the node does not know the token", where=link.peer)
    return answer


def accept(link: Link, token: Known, resync: str = RESYNC[0]) -> Hello:
    """The node's opening: who speaks. token: any of those of the role that he says is enough. resync: of Welcome. The
    caller still has to refuse a peer that it does not know. Raises RecordsError; MisfitError of one who knows the
    token."""
    link.begin()
    challenge = Challenge(secrets.token_hex(32))
    link.send(challenge, seconds=link.limits().seconds)
    hello: Hello = _expect(link, Hello)
    link.send(Welcome(_answer(hello, challenge, token, link.peer), resync))
    return hello


def _answer(hello: Hello, challenge: Challenge, token: Known, where: str) -> str:
    """The node's own proof for who has shown his. Raises RecordsError, MisfitError."""
    if hello.role not in ROLES:
        raise RecordsError(f"{hello.role[:40]!r} is not one of {', '.join(ROLES)}", where=where)
    tokens = token(hello.role) if callable(token) else (token,)
    shown = hello.proof.encode()
    proofs = {one: _proof(one, hello.role, challenge.nonce, hello).encode() for one in tokens}
    known = [one for one, due in proofs.items() if hmac.compare_digest(shown, due)]
    if not known:
        raise RecordsError("the token is wrong", where=where, remedy="token= or FLOWCHECK_TOKEN_FILE: this node's")
    if not 0 <= hello.rank < hello.ranks <= MOST_RANKS:
        raise MisfitError(f"rank {hello.rank} of {hello.ranks}", where=where)
    return _proof(known[0], "node", challenge.nonce, hello)


class Opening:
    """The same without a socket: bytes of a stranger in, one by one if he likes. challenge: what he is sent first.
    wants: how many bytes are taken next at most. welcome: what he is sent once `take` has returned his Hello."""

    def __init__(self, token: Known, resync: str, where: str) -> None:
        self._token, self._resync, self._where = token, resync, where
        self._nonce = Challenge(secrets.token_hex(32))
        self._length: int | None = None  # of the text
        self._data = bytearray()
        self.challenge, self.welcome = frame(self._nonce), b""

    @property
    def wants(self) -> int:
        return (HEAD_BYTES if self._length is None else self._length) - len(self._data)

    @property
    def lacks(self) -> str:
        """What has not come."""
        if self._length is None and not self._data:
            return "no answer"
        return f"too slow: {self.wants} bytes of a message still missing"

    def take(self, data: bytes) -> Hello | None:
        """data: at most `wants` bytes. Raises RecordsError, MisfitError."""
        self._data += data
        if self.wants:
            return None
        if self._length is None:
            self._length, size = lengths(bytes(self._data), Limits(), self._where)
            if size:
                raise RecordsError("a payload before anything else", where=self._where)
            self._data.clear()
            if self._length:
                return None
        message = message_of(bytes(self._data), self._where)
        _is_due(message, Hello, self._where)
        self.welcome = frame(Welcome(_answer(message, self._nonce, self._token, self._where), self._resync))
        hello: Hello = message
        return hello


def _expect(link: Link, kind: type) -> Any:
    try:
        message, size = link.receive(wait=link.limits().seconds)
    except TimeoutError:
        hint = ("; trainers come to control.listen, and not to api.listen; a node with [tls] needs ca= here, or"
                " FLOWCHECK_CA") if kind is Challenge and not link.secure else ""
        raise RecordsError(f"no answer{hint}", where=link.peer) from None
    _is_due(message, kind, link.peer, size)
    return message


def _is_due(message: Any, kind: type, where: str, size: int = 0) -> None:
    """Raises RecordsError."""
    if isinstance(message, Refused):
        raise RecordsError(f"refused: {message.why}", where=where)
    if not isinstance(message, kind) or size:
        raise RecordsError(f"a {type(message).__name__} where a {kind.__name__} was due", where=where)
    protocol = getattr(message, "protocol", PROTOCOL)
    if protocol != PROTOCOL:
        raise RecordsError(f"speaks {protocol[:40]!r}, this is {PROTOCOL}", where=where)
