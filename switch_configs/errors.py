"""What can go wrong here; the command maps both to its own exit codes."""

from __future__ import annotations

__all__ = ["DeviceError", "PlanError", "SwitchError"]


class SwitchError(Exception):
    """Base. `what` is one sentence, `where` the switch, file or field, `remedy` what to do."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(f"{where}: {what}" if where else what)


class PlanError(SwitchError, ValueError):
    """What was asked for can never work or is refused: topology, plan, clash with somebody else's session."""


class DeviceError(SwitchError, OSError):
    """The switch said no, or did not answer."""
