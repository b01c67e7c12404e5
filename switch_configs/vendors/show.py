"""Read a switch's own `show` output into SessionState: one model for nine platforms.

    read(session, lines, outputs) -> Found(mine, others)      outputs: what each of the lines printed

Every parser returns all mirror sessions of the switch; which one is ours is decided here, so that a name or number
that somebody else uses is seen. Configuration says which ports, the operational output says whether copies flow.
Text that a parser does not understand is an error (DeviceError), never "no session".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from switch_configs.errors import DeviceError, printable
from switch_configs.schema import MirrorSession, SessionState
from switch_configs.vendors import show_cli, show_data

__all__ = ["Found", "read"]


@dataclass
class Found:
    """mine: the planned session as it is (exists False if not there). others: everybody else's."""

    mine: SessionState
    others: list[SessionState] = field(default_factory=list)
    timer: str = ""  # name of a commit that the platform undoes by itself unless it is confirmed
    unapplied: str = ""  # what somebody typed and nobody applied yet (NVUE)


PARSERS: dict[str, Callable[[MirrorSession, Sequence[str], Sequence[str]], list[SessionState]]] = {
    "comware": show_cli.comware, "eos": show_cli.eos, "nxos": show_cli.nxos, "junos": show_cli.junos,
    "sonic": show_data.sonic, "sonic-configdb": show_data.sonic, "cumulus": show_data.cumulus,
    "ovs": show_data.ovs, "tc": show_data.tc,
}

PENDING = {"eos": show_cli.eos_pending, "junos": show_cli.junos_pending, "cumulus": show_data.cumulus_pending}


def read(session: MirrorSession, lines: Sequence[str], outputs: Sequence[str]) -> Found:
    """Raises DeviceError if an output is not what this platform prints."""
    try:
        states = PARSERS[session.vendor](session, lines, outputs)
        timer = PENDING[session.vendor](outputs) if session.vendor in PENDING else ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, SyntaxError) as error:
        raise DeviceError(
            f"its mirror sessions cannot be read: {type(error).__name__}: {error}"[:300], where=session.leaf,
            remedy=f"compare its show output with {session.vendor}'s documentation page",
        ) from None
    wanted = str(session.number) if session.vendor in ("comware", "nxos", "cumulus") else session.name
    pending = session.vendor == "cumulus" and re.search(r"(?ms)^\s*-?\s*(?:un)?set:.*", outputs[2])
    unapplied = pending[0].strip() if pending else ""
    named = [state for state in states if state.name == wanted]
    if not named:
        return Found(SessionState(name=wanted, exists=False), states, printable(timer), unapplied)
    marked = [state for state in named if state.ours]
    mine = (marked or named)[0]
    return Found(mine, [state for state in states if state is not mine], printable(timer), unapplied)
