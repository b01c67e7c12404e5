"""What can go wrong here; the command maps both to its own exit codes."""

from __future__ import annotations

__all__ = ["DeviceError", "PlanError", "SwitchError", "printable"]


def printable(text: str) -> str:
    """Without the characters that move a cursor, colour a terminal or turn text round."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class SwitchError(Exception):
    """Base. `what` is one sentence, `where` the switch, file or field, `remedy` what to do."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = printable(what), printable(where), printable(remedy)
        super().__init__(f"{self.where}: {self.what}" if where else self.what)


class PlanError(SwitchError, ValueError):
    """What was asked for can never work or is refused: topology, plan, clash with somebody else's session."""


class DeviceError(SwitchError, OSError):
    """The switch said no, or did not answer."""
