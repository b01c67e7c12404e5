"""Asking a node for versions: the client's side of its HTTP API, and the key that opens it.

    node = Node(("10.0.0.2", 7071), reader_key(token))
    offers = node.offers()                           what it has: memory, copies, disk, parity, store, newest first
    node.silent                                      of these, what did not say in time what it has
    node.withheld                                    why it does not offer others that it has
    node.diverged                                    of which versions it has found that they may be wrong
    version = node.version(offers[0])                the manifest; a version in memory stays as it is from here on
    tensors = node.tensors(offers[0], version, MODEL, into={})
    for piece in node.pieces(offers[0], version, MODEL): ...      the same as bytes, a few MiB at a time
    state = node.user(offers[0], rank=3)             what that rank gave of itself

A node hashes a version in memory when its manifest is first asked for, and says how far it is: it is asked again as
long as that grows, and fast enough. Nothing that a node sends is believed: sizes are checked before memory is taken,
every wait has a deadline, and every tensor is hashed while the next ones arrive and held against the manifest, whose
own hash is checked first. A connection that breaks is made anew and goes on where it was. AskError says which node,
what of it, and why. Torch and the standard library (http.client). A Node belongs to one thread; several may be used at
once.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowcheck.control.divergence import Divergence
from flowcheck.control.link import MAGIC
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.pace import Pace
from flowcheck.control.proof import PROOF, Proven, answered, authorization, nonce_in, place_of
from flowcheck.control.receiving import RATE, SECONDS, AskError, Hashing, Received, Stream
from flowcheck.control.start import Key, line_of
from flowcheck.control.tensors import CHUNK, HEADER_LIMIT, memory, places
from flowcheck.control.user_state import USER_BYTES, UserState
from flowcheck.control.version import Digest, Version
from flowcheck.errors import UserError
from flowcheck.job.version_status import UNVERIFIED, VersionStatus

__all__ = [
    "COPY", "DISK", "MEMORY", "OWN", "PARITY", "SECONDS", "STORE", "TIERS", "AskError", "BusyError", "FullError",
    "GoneError", "Node", "Offer", "order_of", "reader_key", "spans", "split",
]

MEMORY, COPY, DISK, PARITY, STORE = "memory", "copy", "disk", "parity", "store"
# Of a node, the nearest first. A copy is of another node's version, in memory; from parity a version is made when it is
# asked for.
TIERS = (MEMORY, COPY, DISK, PARITY, STORE)
OWN = "own"  # `statuses` of /v1/versions: what is said of a version is of that version alone
MOST_TEXT = 256 << 20  # a manifest has some 150 bytes per tensor
MOST_AGE = 1e12
MOST_EPOCHS = 1 << 31
MOST_NBYTES = 1 << 50  # of a version
MOST_FAILED = 3  # versions of a tier that proved bad, until it is asked no more
MOST_WHY = 400  # characters
MOST_HEAD = 1 << 20  # bytes of an answer until its body
TOKEN = "the token that these nodes have: token= or FLOWCHECK_TOKEN_FILE, --token-file of a command"
ADDRESS = "HOST:PORT of a node's api.listen"
AGAIN_SECONDS = 0.25  # between two questions for a manifest whose tensors are being hashed
HASH_SECONDS = 1800.0  # that hashing may take, whatever a node says of it


def reader_key(token: bytes) -> str:
    """What a reader shows a node: derived from the token, so that the token itself, which lets trainers speak, never
    travels."""
    return hmac.new(token, b"flowcheck reader 1", hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Offer:
    """A version that a node says it has. id: its name in requests. tier: one of TIERS. nbytes: of all tensors. user:
    whose own states it has: first and last rank of each row of them. age_steps: that the trainers are known to have
    made since. age_seconds: since it was published. None: the node does not know. matches: checksums of the trainer
    that had matched when it was published, as far as the node says it. start: of which start of the job's trainers it
    is (flowcheck/control/start.py), "": the node does not say it. attached: a node vouches that trainers have attached
    with that run and epoch."""

    id: str
    tier: str
    run_id: str
    epoch: int
    step: int
    shard: str
    status: str
    nbytes: int
    user: tuple[tuple[int, int], ...] = ()
    age_steps: int | None = None
    age_seconds: float | None = None
    matches: int = 0
    start: str = ""
    attached: bool = False

    @property
    def key(self) -> Key:
        """What orders the versions of a run."""
        line = line_of(self.start)
        return (self.epoch, self.step, line) if line else (self.epoch, self.step)

    @property
    def with_user(self) -> list[int]:
        """Ranks whose own states it has."""
        return [rank for first, last in self.user for rank in range(first, last + 1)]

    def has_user(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.user)

    @classmethod
    def of(cls, said: Any, where: str) -> Offer:
        """Raises AskError."""
        kinds = {"id": str, "tier": str, "run_id": str, "epoch": int, "step": int, "shard": str, "status": str,
                 "nbytes": int}
        values: dict[str, Any] = {name: said.get(name) if isinstance(said, dict) else None for name in kinds}
        sound = all(type(values[name]) is kind for name, kind in kinds.items())
        if not sound or min(values["epoch"], values["step"], values["nbytes"]) < 0 or (
                values["epoch"] >= MOST_EPOCHS or values["nbytes"] > MOST_NBYTES):
            raise AskError("lists a version that is not described", where=where)
        if values["tier"] not in TIERS or not (values["id"].isascii() and values["id"].isalnum()):
            raise AskError("lists a version of an unknown tier, or without a name", where=where)
        values["status"] = str(VersionStatus.of(values["status"], values["step"]))
        return cls(**values, user=_spans(said.get("user", []), where), age_steps=_age(said.get("age_steps")),
                   age_seconds=_age(said.get("age_seconds")), matches=int(_age(said.get("matches")) or 0),
                   start=start if isinstance(start := said.get("start"), str) else "",
                   attached=said.get("attached") is True)


def _age(said: Any) -> Any:
    """Nothing is decided by it, so what is no age is as if it were unsaid."""
    return said if type(said) in (int, float) and 0 <= said < MOST_AGE else None


def order_of(version: Version, file: str) -> list[str]:
    """The order in which a safetensors file of ours has its tensors: the widest elements first."""
    tensors = version.files[file]
    return sorted(tensors, key=lambda name: -getattr(torch, tensors[name].spec.dtype).itemsize)


def spans(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranks in ascending order as first and last of each row of them."""
    out: list[tuple[int, int]] = []
    for rank in ranks:
        if out and out[-1][1] == rank - 1:
            out[-1] = out[-1][0], rank
        else:
            out.append((rank, rank))
    return tuple(out)


def _spans(said: Any, where: str) -> tuple[tuple[int, int], ...]:
    """As a node says them; one that knows nothing of them says nothing."""
    sound = isinstance(said, list) and all(
        isinstance(one, list) and len(one) == 2 and all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in one)
        for one in said
    )
    flat = [rank for one in said for rank in one] if sound else []
    # Each rank once: with rows that overlap a short list would be of more ranks than there is memory for.
    if not sound or any(first > last for first, last in said) or any(
            last >= first for last, first in zip(flat[1::2], flat[2::2], strict=False)):
        raise AskError("lists a version with states of ranks that are none", where=where)
    return tuple((first, last) for first, last in said)


class Node:
    """address: host and port of a node's API. key: of `reader_key`, or one that is proven (proof.py). seconds: that
    it may be silent. tls: None: not encrypted. pace: at which files are read; None: as they come."""

    def __init__(
        self, address: tuple[str, int], key: str, seconds: float = SECONDS, tls: ssl.SSLContext | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._tls, self.pace = tls, pace
        self._address, self._key, self._seconds = address, key, seconds
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._paced: _Paced | None = None  # what that is read from
        self.plain: socket.socket | None = None  # what the answer that is open comes over; None: encrypted
        host, port = address
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._mac = ""  # of the question that was asked last
        self.received = 0  # bytes of tensors
        self.silent: list[str] = []  # tiers
        self.withheld: list[str] = []  # reasons
        self.diverged: list[Divergence] = []
        self.seconds = seconds
        self.answered = False  # ever, whatever it said
        self.misasked = ""  # it is there, and was asked wrongly: what to do about that
        self.failed: Counter[str] = Counter()  # by tier: how many versions proved bad, or could not be had
        self.busy = False  # it had no slot for a reader for as long as that is waited for
        self.gone: set[str] = set()  # versions that were refused as if they had made room
        self.epochs: dict[str, int] = {}  # the newest of each run of which it has anything, withheld or not
        self.attached: dict[str, int] = {}  # of these, the newest that a node vouches for

    def again(self, seconds: float | None = None) -> Node:
        """The same node, over a connection of its own. seconds: that it may be silent there."""
        return Node(self._address, self._key, self._seconds if seconds is None else seconds, self._tls, self.pace)

    def close(self) -> None:
        """Let the connection go; may be called twice."""
        if self._response is not None:
            self._response.close()  # it may have the connection's socket for its own
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = self.plain = None

    def offers(self) -> list[Offer]:
        """All that the node has now. Raises AskError."""
        said = self.json("/v1/versions")
        listed = said.get("versions") if isinstance(said, dict) else None
        if not isinstance(listed, list):
            raise AskError("does not list versions", where=self.name)
        absent = said.get("absent", [])
        self.silent = [tier for tier in TIERS if isinstance(absent, list) and tier in absent]
        withheld = said.get("withheld", [])
        whys = [one.get("why") for one in withheld if isinstance(one, dict)] if isinstance(withheld, list) else []
        self.withheld = [" ".join(why[:MOST_WHY].split()) for why in whys[:1] if isinstance(why, str)]
        self.diverged = Divergence.all_of(said.get("diverged"))
        self.epochs, self.attached = {}, {}
        for one in [*listed, *(withheld if isinstance(withheld, list) else [])]:
            run_id, epoch = (one.get("run_id"), one.get("epoch")) if isinstance(one, dict) else (None, None)
            if isinstance(run_id, str) and type(epoch) is int and epoch >= 0:
                if epoch >= MOST_EPOCHS:
                    raise AskError(f"lists an epoch that is none: {str(epoch)[:20]}", where=self.name)
                self.epochs[run_id] = max(epoch, self.epochs.get(run_id, 0))
                if one.get("attached") is True:
                    self.attached[run_id] = max(epoch, self.attached.get(run_id, 0))
        offers = [Offer.of(one, self.name) for one in listed]
        if said.get("statuses") == OWN:
            return offers
        # A release that says `verified` of every version once a checksum has matched.
        return [replace(one, status=UNVERIFIED) if VersionStatus.of(one.status).verified else one for one in offers]

    def version(self, offer: Offer, release: bool = False) -> Version:
        """The manifest of what was offered. release: nothing else of it is wanted. Raises AskError."""
        where = f"{self.name}, {offer.tier}"
        try:
            path = f"/v1/versions/{offer.id}/manifest.json{'?release' if release else ''}"
            version = Version.of(self._hashed(path, offer, where), where)
        except UserError as error:
            raise AskError(f"its manifest {error.what}", where=where) from None
        said = ("run_id", "epoch", "step", "shard", *(["start"] if version.start else []))
        for name in said:
            if getattr(version, name) != getattr(offer, name):
                raise AskError(f"offered {name} {getattr(offer, name)!r} and sent {getattr(version, name)!r}",
                               where=where)
        return version

    def _hashed(self, path: str, offer: Offer, where: str) -> Any:
        """A manifest, as soon as its tensors are hashed. Raises AskError."""
        progress = _Progress(self._seconds, offer.nbytes, where)
        while True:
            try:
                return self.json(path)
            except _Unhashed as error:
                progress.take(error.hashed)
            time.sleep(AGAIN_SECONDS)

    def tensors(
        self, offer: Offer, version: Version, file: str, into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One file's tensors in the manifest's order, every hash checked.

        into: tensors to receive into, of the right dtype and shape; for others memory is taken. Those on another device
        or not in row-major order are written once their hash agreed; the rest is written as it arrives, so after an
        AskError it holds anything.
        """
        try:
            return self._tensors(offer, version, file, into)
        finally:
            self.close()

    def _tensors(
        self, offer: Offer, version: Version, file: str, into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        stream, lie, where = self._opened(offer, version, file)
        digests, found = version.files[file], dict[str, torch.Tensor]()
        with Hashing(where) as hashing:
            for names in _together(lie):
                come = [_place(name, digests[name], into.get(name)) for name in names]
                stream.fill([memory(one.tensor) for one in come])
                hashing.add(come)
                found |= {one.name: one.tensor if one.into is None else one.into for one in come}
        return {name: found[name] for name in digests}

    def pieces(self, offer: Offer, version: Version, file: str) -> Iterator[memoryview]:
        """The bytes of one file's tensors, in the order of `order_of`, each tensor's hash checked when its last byte
        has come: what was yielded of it before may be wrong. A piece is good until the next. Raises AskError."""
        stream, lie, where = self._opened(offer, version, file)
        buffer = memoryview(bytearray(CHUNK))
        try:
            if list(lie) != order_of(version, file):
                raise AskError("has its tensors in another order than their widths", where=where)
            for name in lie:
                digest, left, sums = version.files[file][name], version.files[file][name].spec.nbytes, hashlib.sha256()
                while left:
                    piece = buffer[: min(left, len(buffer))]
                    stream.fill([piece])
                    sums.update(piece)
                    left -= len(piece)
                    yield piece
                if sums.hexdigest() != digest.sha256:
                    raise AskError(f"tensor {name!r} has other bytes than its manifest says (SHA-256 differs)",
                                   where=where)
        finally:
            self.close()

    def _opened(self, offer: Offer, version: Version, file: str) -> tuple[Stream, dict[str, tuple[int, int]], str]:
        """A file's bytes from its first tensor on, where each tensor lies in them, and words for where that is."""
        where = f"{self.name}, {offer.tier}: {file}"
        expected = {name: digest.spec for name, digest in version.files[file].items()}
        most = 8 + HEADER_LIMIT + sum(spec.nbytes for spec in expected.values())
        stream = Stream(self, f"/v1/versions/{offer.id}/{file}", where, most)
        head = stream.take(8)
        length = int.from_bytes(head, "little")
        if length > HEADER_LIMIT or 8 + length > stream.size:
            raise AskError(f"a safetensors header of {length} bytes in {stream.size}", where=where)
        try:
            lie = places(stream.take(length), expected, stream.size - 8 - length, where)
        except UserError as error:
            raise AskError(error.what, where=where) from None
        if missing := expected.keys() - lie.keys():
            raise AskError(f"lacks tensor {min(missing)!r}, which its manifest lists", where=where)
        return stream, lie, where

    def raw(self, path: str, size: int, where: str) -> Iterator[memoryview]:
        """The bytes of a file of which nothing but its size is known. A piece is good until the next. Raises AskError.
        """
        stream = Stream(self, path, where, size)
        if stream.size != size:
            raise AskError(f"has {stream.size} bytes, not {size}", where=where)
        buffer = memoryview(bytearray(CHUNK))
        try:
            for at in range(0, size, CHUNK):
                piece = buffer[: min(CHUNK, size - at)]
                stream.fill([piece])
                yield piece
        finally:
            self.close()

    def user(self, offer: Offer, rank: int) -> UserState:
        """What a rank gave of itself with that version, checked. Raises AskError."""
        where = f"{self.name}, {offer.tier}: state of rank {rank}"
        try:
            found = UserState.of(self._take(f"/v1/versions/{offer.id}/user/{rank}", USER_BYTES), where)
        except UserError as error:
            raise AskError(error.what, where=where) from None
        if (found.step, found.rank) != (offer.step, rank):
            raise AskError(f"is of step {found.step} and rank {found.rank}", where=where)
        return found

    # -- requests --

    def json(self, path: str) -> Any:
        """A whole answer. Raises AskError."""
        try:
            return json.loads(self._take(path, MOST_TEXT))
        except (ValueError, RecursionError):
            raise AskError("an answer that is not JSON", where=self.name) from None

    def _take(self, path: str, most: int) -> bytearray:
        """A whole answer, of at most so many bytes."""
        try:
            response = self.open(path, most=most)
            text = bytearray()
            while piece := response.read(CHUNK):
                text += piece
                if len(text) > most:
                    raise AskError("an answer that is too long", where=self.name)
            if response.length:  # http.client says nothing of it where a part at a time is read
                raise ConnectionResetError("closed before its end")
            self._check(response, text)
            return text
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from None
        finally:
            self.close()

    def open(self, path: str, first: int = 0, most: int = 0) -> http.client.HTTPResponse:
        """The answer to a request, from byte `first` on. most: bytes that it may have. Raises AskError for another
        status than is due; OSError and HTTPException."""
        self.close()
        connection = self._connection = self._connect()
        span = f"bytes={first}-" if first else ""
        headers = {"Accept-Encoding": "identity"} | ({"Range": span} if span else {})
        headers["Authorization"] = (self._prove(connection, path, span) if isinstance(self._key, Proven) else
                                    f"Bearer {self._key}")
        connection.request("GET", path, headers=headers)
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.plain = connection.sock if self._tls is None else None
        response = self._response = connection.getresponse()
        self.answered = True
        if response.status != (206 if first else 200):
            raise _refusal(response, self.name, isinstance(self._key, Proven))
        assert self._paced is not None
        self._paced.room += 2 * most  # chunks have heads, too
        return response

    def _prove(self, connection: http.client.HTTPConnection, path: str, span: str) -> str:
        """What to say instead of a key, once the node has asked for it (proof.py). Raises as `open`."""
        key = self._key
        assert isinstance(key, Proven)
        connection.request("GET", path, headers={"Accept-Encoding": "identity"} | ({"Range": span} if span else {}))
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the next request follows at once
        response = connection.getresponse()
        self.answered = True
        if response.status != 401:
            if response.status == 200:
                raise AskError("gives what it has to everybody: no node of this release does", where=self.name)
            raise _refusal(response, self.name)
        nonce = nonce_in(", ".join(response.headers.get_all("WWW-Authenticate") or ()))
        response.read(MOST_HEAD)
        if not nonce:
            raise AskError("asks for a key, and for no proof: it is of an earlier release", where=self.name)
        if connection.sock is None:  # it has ended the connection
            connection.connect()
        assert connection.sock is not None
        shown, self._mac = authorization(key.secret, "GET", path, span, nonce,
                                         place_of(connection.sock.getpeername()), self.name)
        return shown

    def _check(self, response: http.client.HTTPResponse, body: bytearray) -> None:
        """Is it the answer of somebody who knows the nodes' token? Raises AskError."""
        if not isinstance(self._key, Proven):
            return
        wanted = answered(self._key.secret, self._mac, response.status, body)
        if not hmac.compare_digest(wanted.encode(), (response.headers.get(PROOF) or "").encode()):
            raise AskError("does not prove that it knows the nodes' token (tokens.peer): it is not one of these nodes",
                           where=self.name)

    def _connect(self) -> http.client.HTTPConnection:
        connection: Any = (
            http.client.HTTPConnection(*self._address, timeout=self._seconds) if self._tls is None else
            http.client.HTTPSConnection(*self._address, timeout=self._seconds, context=self._tls))
        connection.response_class = self._answered
        taken: http.client.HTTPConnection = connection
        return taken

    def _answered(self, sock: socket.socket, **more: Any) -> http.client.HTTPResponse:
        self._paced = _Paced(sock, self._seconds)
        response: Any = http.client.HTTPResponse
        made: http.client.HTTPResponse = response(self._paced, **more)
        return made

    def lost(self, error: Exception) -> AskError:
        if isinstance(error, _TooLong):
            return AskError("an answer that is too long", where=self.name)
        if isinstance(error, _TooSlow):
            return AskError("an answer that is too slow", where=self.name)
        if isinstance(error, TimeoutError):
            return AskError(f"no answer within {self._seconds:g} s", where=self.name)
        if isinstance(error, ssl.SSLCertVerificationError):
            return AskError(f"the node's certificate is not trusted: {error.verify_message}", where=self.name,
                            remedy="ca=, --ca of a command: the authority that signed it")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
            control = str(error).startswith(MAGIC.decode())
            return AskError("this is a node's control port, for trainers: give the address of its api.listen"
                            if control else "what answers there speaks no HTTP", where=self.name, remedy=ADDRESS)
        return AskError(f"connection lost: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}",
                        where=self.name)


class _TooSlow(TimeoutError):
    pass


class _TooLong(OSError):
    pass


class _Paced(io.RawIOBase):
    """An answer as http.client reads it, head and body: who waits for it longer than twice `seconds`, and RATE for what
    has come, gets _TooSlow. Else one byte now and then would keep him for ever. And so would interim answers, chunks
    and trailers without end, which http.client reads as fast as they come: more than `room` is _TooLong."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._seconds = sock, seconds
        self._raw = sock.makefile("rb", buffering=0)
        self._left = 2 * seconds
        self.room = MOST_HEAD  # bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks a socket for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._left <= 0:
            raise _TooSlow
        if self.room <= 0:
            raise _TooLong
        self._sock.settimeout(min(self._seconds, self._left))
        began = time.monotonic()
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            if self._left < self._seconds:
                raise _TooSlow from None
            raise
        self._left += (count or 0) / RATE - (time.monotonic() - began)
        self.room -= count or 0
        return count

    def close(self) -> None:
        super().close()
        self._raw.close()


def _together(lie: Mapping[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Names of tensors that follow each other, CHUNK bytes of them or a larger one: received in one go, and hashed by
    one thread."""
    names: list[str] = []
    begin = 0
    for name, (first, end) in lie.items():
        if names and end - begin > CHUNK:
            yield names
            names = []
        begin = begin if names else first
        names.append(name)
    if names:
        yield names


def _place(name: str, digest: Digest, given: torch.Tensor | None) -> Received:
    """Where a tensor is received: where it is wanted, if its memory is as its bytes come."""
    if given is not None and given.device.type == "cpu" and given.is_contiguous() and not (
            given.is_neg() or given.is_conj()):  # views whose memory is not what they say
        return Received(name, given, digest.sha256, None)
    try:
        tensor = torch.empty(digest.spec.shape, dtype=getattr(torch, digest.spec.dtype), device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise AskError(f"no memory for tensor {name!r}, {list(digest.spec.shape)}: {str(error).splitlines()[0][:200]}"
                       ) from None
    return Received(name, tensor, digest.sha256, given)


def _refusal(response: http.client.HTTPResponse, where: str, proven: bool = False) -> AskError:
    """What a node says when it refuses. proven: it was shown a proof, and no key."""
    try:
        told = json.loads(response.read(4096))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        told = None
    said = told.get("why", "") if isinstance(told, dict) else ""
    said = " ".join(said.split()) if isinstance(said, str) else ""  # one line: more would pass for lines of ours
    if response.status == 401:
        return AskError(f"refuses the proof: {said}" if proven else "the token is wrong", where=where,
                        remedy="" if proven else TOKEN)
    why = f"refused: {said or f'status {response.status}'}"
    if response.status == 404:
        return GoneError(why, where=where)
    if response.status != 503:
        return AskError(why, where=where)
    if not isinstance(told, dict) or told.get("full") is True:  # of no one thing that was asked for
        return FullError("refused: it serves as many as it can at once", where=where)
    hashed = told.get("hashed")
    return _Unhashed(why, hashed, where) if type(hashed) is int else BusyError(why, where=where)


class GoneError(AskError):
    """It cannot be read. Most often it made room for a newer version since it was listed."""


class BusyError(AskError):
    """Others are being read, and there is no slot or memory for another. Not for long."""


class FullError(BusyError):
    """It has no connection for another. For as long as others need for what they read."""


class _Unhashed(AskError):
    """There is no manifest yet. hashed: bytes, as the node says it."""

    def __init__(self, what: str, hashed: int, where: str) -> None:
        super().__init__(what, where=where)
        self.hashed = hashed


class _Progress:
    """How far a node says that it is with hashing. Saying so costs it nothing, so what it is ahead of RATE buys no more
    time than it had to begin with, and there is an end to it in any case."""

    def __init__(self, seconds: float, nbytes: int, where: str) -> None:
        self._seconds, self._nbytes, self._where = seconds, nbytes, where
        self._hashed = 0
        self._began = self._grew = self._last = time.monotonic()
        self._left = 2 * seconds

    def take(self, hashed: int) -> None:
        """Raises AskError: it is not worth waiting for."""
        now = time.monotonic()
        grown = max(0, min(hashed, self._nbytes) - self._hashed)
        self._hashed += grown
        self._left = min(2 * self._seconds, self._left - (now - self._last) + grown / RATE)
        self._grew, self._last = now if grown else self._grew, now
        so_far = f"{self._hashed} of {self._nbytes} bytes so far"
        if now - self._grew > self._seconds:
            raise AskError(f"has hashed no more of it for {self._seconds:g} s: {so_far}", where=self._where)
        if self._left <= 0 or now - self._began > HASH_SECONDS:
            raise AskError(f"hashes it too slowly: {so_far}", where=self._where)


def split(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of the file OPTIMIZER as parameter -> key -> tensor."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.removeprefix("state.").rpartition(".")
        state.setdefault(parameter, {})[key] = tensor
    return state
