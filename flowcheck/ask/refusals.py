"""What a node says when it refuses, as errors, and how long it is worth asking again."""

from __future__ import annotations

import http.client
import json
import time

from flowcheck.ask.receiving import RATE, AskError

__all__ = ["BusyError", "FullError", "GoneError", "HashingProgress", "UnhashedError", "refusal"]

TOKEN = "the token that these nodes have: token= or FLOWCHECK_TOKEN_FILE, --token-file of a command"
HASH_SECONDS = 1800.0  # that hashing may take, whatever a node says of it
MAKE_SECONDS = 300.0  # that a step may be made without a word of how far it is: a process begins, and reads its base


class GoneError(AskError):
    """It cannot be read. Most often it made room for a newer version since it was listed."""


class BusyError(AskError):
    """Others are being read, and slots or memory are taken. Not for long."""


class FullError(AskError):
    """It has no connection for another. For as long as others need for what they read."""


class UnhashedError(AskError):
    """Its manifest is not made yet. hashed: bytes, as the node says it. making: the version itself is being made."""

    def __init__(self, what: str, hashed: int, where: str, making: bool = False) -> None:
        super().__init__(what, where=where)
        self.hashed, self.making = hashed, making


def refusal(response: http.client.HTTPResponse, where: str, proven: bool = False) -> AskError:
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
    if type(hashed) is not int:
        return BusyError(why, where=where)
    return UnhashedError(why, hashed, where, told.get("making") is True)


class HashingProgress:
    """How far a node says that it is with hashing. Saying so costs it nothing, so what it is ahead of RATE buys no more
    time than it had to begin with, and there is an end to it in any case."""

    def __init__(self, seconds: float, nbytes: int, where: str) -> None:
        self._seconds, self._nbytes, self._where = seconds, nbytes, where
        self._hashed = 0
        self._began = self._grew = self._last = time.monotonic()
        self._left = 2 * seconds

    def take(self, hashed: int, making: bool = False) -> None:
        """making: the node makes the version, as fast as it can. Raises AskError: it is not worth waiting for."""
        now = time.monotonic()
        grown = max(0, min(hashed, self._nbytes) - self._hashed)
        self._hashed += grown
        self._left = min(2 * self._seconds, self._left - (now - self._last) + grown / RATE)
        self._grew, self._last = now if grown else self._grew, now
        so_far = f"{self._hashed} of {self._nbytes} bytes so far"
        if making:
            self._left = 2 * self._seconds
        if now - self._grew > (MAKE_SECONDS if making else self._seconds):
            raise AskError(f"has hashed no more of it for {self._seconds:g} s: {so_far}", where=self._where)
        if self._left <= 0 or now - self._began > HASH_SECONDS:
            raise AskError(f"hashes it too slowly: {so_far}", where=self._where)
