"""Why a node is not connected, or makes no versions: the newest reason, each said once where a node repeats it.

    reasons.say(why)                something is wrong
    reasons.begin()                 a connection is there
    reasons.end(forget)             it is over
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Reasons"]

REASONS = 64  # remembered, so that a refusal that is repeated is said once


class Reasons:
    """why: the newest, "" while all is well. refused: the node has refused what came on this connection. log: a line
    for the user."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.why = "not connected yet"
        self.refused = False
        self.log = log
        self._refusing = False  # the connection before this one was refused
        self._said: set[str] = set()  # since the last connection that was not refused

    def say(self, why: str) -> None:
        if why == self.why:
            return
        self.why = why
        if not self._refusing or why not in self._said:
            self.log(why)
        if len(self._said) < REASONS:
            self._said.add(why)

    def begin(self) -> None:
        self.refused, self.why = False, ""

    def end(self, forget: bool) -> None:
        """forget: reasons of connections before this one are said again."""
        self._refusing = self.refused
        if forget:
            self._said.clear()
