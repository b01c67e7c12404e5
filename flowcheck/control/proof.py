"""How nodes ask each other over HTTP: both prove that they know the nodes' token, and neither shows anything of use.

    key = node_key(token)                            derived from a token of the role `peer`
    NodeClient(address, Proven(key.hex()))           flowcheck/ask: this key is proven, not shown

    asker                                             node
      GET /v1/versions                          ->
                                                <-    401, WWW-Authenticate: FlowCheck-HMAC nonce="..."
      the same, Authorization: FlowCheck-HMAC
        nonce, mine, at, name, mac              ->
                                                <-    200, FlowCheck-Proof: ...

mac is over method, path, range, both nonces, and which node the asker means: the address that its connection ends at
(`at`), and what its settings call it (`name`). A node takes a nonce of its own, once, soon after it has given it, and
only if it is itself the one that is meant. So whoever answers at an address learns nothing that he could show to a
node, now or later. The answer's proof is over that mac, the status and the body's SHA-256: it is of this question, and
of somebody who knows the token. Files of tensors have none: what they are held against, hash by hash, stands in a
manifest that has one.

A bearer key (`reader_key`) stays what readers show. From the one the other cannot be worked out. Standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence

from flowcheck.control.address import text_of

__all__ = ["PROOF", "SCHEME", "Proven", "Questions", "answered", "asked", "authorization", "node_key", "nonce_in",
           "place_of", "voucher"]

SCHEME, PROOF = "FlowCheck-HMAC", "FlowCheck-Proof"
NONCE_SECONDS = 30.0  # that a nonce is good for
MOST_HEADER = 2048
_FIELD = re.compile(r'([a-z]{1,8})="([^"\\\x00-\x1f\x7f]{0,600})"', re.ASCII)
_NONCE = re.compile(r"[0-9a-f]{16,128}", re.ASCII)


class Proven(str):
    """A key, in hexadecimal, that is proven and never shown."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self)


def node_key(token: bytes) -> bytes:
    """What nodes that know a token prove to each other; 32 bytes."""
    return hmac.digest(token, b"flowcheck node 1", "sha256")


def voucher(key: bytes, run_id: str, epoch: int) -> str:
    """What a node says of a run and an epoch with which trainers have attached to it: 64 hexadecimal digits."""
    return _mac(key, "flowcheck attached 1", run_id, epoch)


def asked(key: bytes, method: str, path: str, span: str, nonce: str, mine: str, at: str, name: str) -> str:
    """The mac of a question. span: its Range, "": none."""
    return _mac(key, "flowcheck asks 1", method, path, span, nonce, mine, at, name)


def answered(key: bytes, mac: str, status: int, body: bytes | bytearray) -> str:
    """The proof of an answer to the question with that mac."""
    return _mac(key, "flowcheck answers 1", mac, status, hashlib.sha256(body).hexdigest())


def _mac(key: bytes, *said: str | int) -> str:
    return hmac.new(key, json.dumps(said).encode(), hashlib.sha256).hexdigest()  # one text for each of these


def place_of(address: Sequence[object] | None) -> str:
    """An end of a connection, the same on both sides of it: without a zone, and IPv4 as such. "": it is not one."""
    if not address or len(address) < 2:
        return ""
    try:
        host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return ""
    four = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return text_of(str(four or host), int(str(address[1])))


def nonce_in(header: str | None) -> str:
    """Of a WWW-Authenticate, "": it asks for no proof."""
    found = re.search(rf'{SCHEME} nonce="([0-9a-f]{{16,128}})"', (header or "")[:MOST_HEADER], re.ASCII)
    return found[1] if found else ""


def authorization(key: bytes, method: str, path: str, span: str, nonce: str, at: str, name: str) -> tuple[str, str]:
    """The header's value, and the mac in it."""
    mine = secrets.token_hex(16)
    mac = asked(key, method, path, span, nonce, mine, at, name)
    fields = {"nonce": nonce, "mine": mine, "at": at, "name": name, "mac": mac}
    return f"{SCHEME} " + ", ".join(f'{field}="{value}"' for field, value in fields.items()), mac


class Questions:
    """A node's side. names: what others may call it besides the addresses at which its connections end. One thread.

    A nonce says when it was given, so none is remembered until it was used by somebody who knows the token: whoever
    does not can fill no memory."""

    def __init__(self, names: Collection[str] = (), now: Callable[[], float] = time.monotonic) -> None:
        self._names, self._now = names, now
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def challenge(self) -> str:
        """The value of a WWW-Authenticate."""
        text = f"{int(self._now() * 1e3):016x}{secrets.token_hex(16)}"
        return f'{SCHEME} nonce="{text}{self._sign(text)}"'

    def check(
        self, shown: str, keys: Collection[bytes], method: str, path: str, span: str, place: str
    ) -> tuple[bytes, str] | str:
        """The key that was proven, and the mac of the question; text: why none was. place: where it was asked."""
        scheme, _, rest = shown[:MOST_HEADER].partition(" ")
        said = dict(_FIELD.findall(rest)) if scheme == SCHEME else {}
        nonce, mine, mac = (said.get(name, "") for name in ("nonce", "mine", "mac"))
        if not all(_NONCE.fullmatch(one) for one in (nonce, mine, mac)):
            return "the proof is not one of this release"
        at, name = said.get("at", ""), said.get("name", "")
        found = [key for key in keys if hmac.compare_digest(
            mac, asked(key, method, path, span, nonce, mine, at, name))]
        if not found:
            return "the nodes' token is another one here"
        if (not place or at != place) and name not in self._names:
            return (f"asked for {name} at {at}, and this is {place or 'no address'}: where addresses are translated on"
                    " the way, say nodes.advertise here")
        if not self._take(nonce):
            return "the proof is too old, or was shown before"
        return found[0], mac

    def _take(self, nonce: str) -> bool:
        text, signed = nonce[:-32], nonce[-32:]
        if len(nonce) != 80 or not hmac.compare_digest(signed, self._sign(text)):
            return False
        now, given = self._now(), int(text[:16], 16) / 1e3
        self._used = {one: at for one, at in self._used.items() if now - at <= NONCE_SECONDS}
        if now - given > NONCE_SECONDS or nonce in self._used:
            return False
        self._used[nonce] = given
        return True

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]
