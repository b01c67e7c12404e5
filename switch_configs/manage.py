"""Apply, show and remove one session on one switch, and nothing else on it.

    Manager(session, connect).difference() -> what would be typed and why     changes nothing
    Manager.apply(difference)   -> typed, read back, confirmed; undone if the switch refuses or the copy cannot flow
    Manager.remove()            -> only what carries our mark

Idempotent: the same session, active, is left alone. A session that differs is replaced. Before anything is typed,
a name, number, source or destination that somebody else uses is refused (SONiC's rules for every vendor).
After a failure in the middle the state before is restored: candidate thrown away, or our session removed and the
one that was there put back. Where the platform has a timed undo it runs until the session was read back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from switch_configs.errors import DeviceError, PlanError
from switch_configs.model import MirrorSession, SessionState, Source
from switch_configs.render import render, timed_undo
from switch_configs.show import Found, read
from switch_configs.transport import Transport, is_local

__all__ = ["Difference", "Manager"]

SETTLE_SECONDS = 5.0  # SONiC and NVUE program the hardware after the command has returned
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Difference:
    """lines: - as it is, + as it will be, empty if nothing changes. commands: what apply will type."""

    lines: tuple[str, ...]
    commands: tuple[str, ...]
    found: Found


class Manager:
    """connect opens a Transport; it is called again if the connection is lost in the middle."""

    def __init__(self, session: MirrorSession, connect: Callable[[], Transport]) -> None:
        self.session = session
        self._connect = connect
        self._open: Transport | None = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def show(self) -> Found:
        lines = list(render(self.session).show)
        if self.session.vendor == "tc":  # filters of ours may sit on ports that an earlier plan had
            lines += [line for line in self._other_tc_listings() if line not in lines]
        # a source that is gone is an answer of tc, not a failure
        check = self.session.vendor != "tc"
        return read(self.session, lines, [self._run(line, check) for line in lines])

    def difference(self) -> Difference:
        """Raises PlanError if something on the switch is in the way."""
        found = self.show()
        self._refuse_clash(found)
        mine = found.mine
        if mine.same_as(self.session) and mine.active:
            return Difference((), (), found)
        candidate = self.session.vendor in ("eos", "junos")  # old and new are swapped in one commit
        commands = list(render(self.session, replace=mine.exists and candidate).apply)
        if mine.exists and not candidate:
            old = render(self._as_found(mine) or self.session, key=mine.key).remove
            commands = [*(line for line in old if line != "nv config apply -y"), *commands]
        lines = [f"- {line}" for line in _describe(mine)] + [f"+ {line}" for line in _wanted(self.session)]
        return Difference(tuple(_without_equals(lines)), tuple(commands), found)

    def apply(self, difference: Difference, *, save: bool = False) -> SessionState:
        """Type the commands, read the session back, confirm. Raises DeviceError after having undone it."""
        if not difference.commands:
            return difference.found.mine
        try:
            self._type_checked(difference.commands)
            state = self._settled()
        except DeviceError as error:
            self._undo(difference, "abort", error)
        if not (state.active and state.same_as(self.session)):
            what = state.reason or "it differs from what was typed"
            self._undo(difference, "rollback", DeviceError(f"applied, but not active: {what}", where=self.session.leaf))
        for line in (*render(self.session).confirm, *(render(self.session).save if save else ())):
            self._run(line)
        return state

    def remove(self) -> bool:
        """False if there was nothing. Raises PlanError if the session there is not ours."""
        found = self.show()
        if not found.mine.exists:
            return False
        if not found.mine.ours:
            raise PlanError(f"session {found.mine.name} is not ours: {_say(found.mine)}", where=self.session.leaf,
                            remedy="remove it by hand, if it may go")  # fmt: skip
        if self.session.vendor == "tc" and any(other.name == self.session.name for other in found.others):
            raise PlanError("somebody else's filter shares our preference, and tc would remove both",
                            where=self.session.leaf, remedy="remove the other filter first")  # fmt: skip
        actual = self._as_found(found.mine) or self.session
        for line in render(actual, key=found.mine.key).remove:
            self._run(line, check=self.session.vendor != "tc")
        left = self.show().mine
        if left.exists and left.ours:
            raise DeviceError(f"still there: {_say(left)}", where=self.session.leaf, remedy="run remove again")
        return True

    # -- inside -------------------------------------------------------------------------------------------

    def _run(self, line: str, check: bool = True) -> str:
        if self._open is None:
            self._open = self._connect()
        return self._open.run(line, check=check)

    def _settled(self) -> SessionState:
        end = time.monotonic() + (0 if is_local(self.session.vendor) else SETTLE_SECONDS)
        while True:
            state = self.show().mine
            if state.active or time.monotonic() >= end:
                return state
            time.sleep(POLL_SECONDS)

    def _type_checked(self, commands: Sequence[str]) -> None:
        for line in commands:
            try:
                self._run(line, check="filter del" not in line)
            except DeviceError as error:
                if "classifier not found" not in error.what or self.session.classifier == "u32":
                    raise
                # Kernels without matchall are common and only trying tells; u32 that matches all does the same.
                self.session = self.session.model_copy(update={"classifier": "u32"})
                self._type_checked([again for again in render(self.session).apply if "filter add" in again])
                return

    def _other_tc_listings(self) -> list[str]:
        table = self._run("tc -j qdisc show")
        try:
            devices = [entry["dev"] for entry in json.loads(table) if entry["kind"] == "clsact"]
        except (ValueError, KeyError, TypeError):
            raise DeviceError("tc -j qdisc show prints no JSON", where=self.session.leaf) from None
        return [f"tc -s -j filter show dev {dev} {way}" for dev in devices for way in ("ingress", "egress")]

    def _refuse_clash(self, found: Found) -> None:
        where, mine = self.session.leaf, found.mine
        if mine.exists and not mine.ours:
            raise PlanError(f"session {mine.name} is somebody else's: {_say(mine)}", where=where,
                            remedy="choose another session name or number")  # fmt: skip
        for other in found.others:
            if other.name == mine.name:
                raise PlanError(f"the name {other.name} is also used by somebody else: {_say(other)}", where=where,
                                remedy="choose another session name, or remove the other one")  # fmt: skip
            if other.destination == self.session.destination:
                raise PlanError(f"destination {other.destination} is used by session {other.name}", where=where,
                                remedy="choose another node port")  # fmt: skip
            shared = {source.port for source in other.sources} & set(self.session.ports)
            if shared and not is_local(self.session.vendor):
                raise PlanError(f"source {sorted(shared)[0]} is already mirrored by session {other.name}",
                                where=where, remedy="remove the other session, or choose another GPU")  # fmt: skip
            if self.session.destination in {source.port for source in other.sources}:
                raise PlanError(f"destination {self.session.destination} is a source of session {other.name}",
                                where=where, remedy="choose another node port")  # fmt: skip

    def _undo(self, difference: Difference, section: str, error: DeviceError) -> None:
        """Always raises: the error, with what became of the switch."""
        before = difference.found.mine
        try:
            try:
                self._type(getattr(render(self.session), section))
                now = self.show()
            except DeviceError:  # the connection may be what failed: once more over a new one
                self.close()
                self._type(render(self.session).rollback)
                now = self.show()
            if now.mine.exists and not before.exists and now.mine.ours:
                self._type(render(self.session, key=now.mine.key).remove)
                now = self.show()
            old = self._as_found(before) if before.exists else None
            mixed = len({source.direction for source in before.sources}) > 1
            if old is not None and not mixed and not now.mine.same_as(old):
                lines = render(old, replace=now.mine.exists)
                self._type((*lines.apply, *lines.confirm))
                now = self.show()
            good = now.mine.exists == before.exists and now.mine.sources == before.sources
            fate = "the change was taken back" if good else f"NOT taken back: it now has {_say(now.mine)}"
        except DeviceError as second:
            timer = timed_undo(self.session.vendor)
            fate = f"could not be taken back ({second.what})"
            fate += f"; {timer} undoes it within {self.session.undo_minutes} min" if timer else ""
        raise DeviceError(
            f"{error.what}; {fate}", where=error.where, remedy=error.remedy or "mend the cause and apply again"
        ) from None

    def _type(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._run(line, check=False)

    def _as_found(self, state: SessionState) -> MirrorSession | None:
        """The session as it was on the switch, or None where one direction for all does not describe it."""
        ways = {source.direction for source in state.sources}
        if len(ways) != 1 or (state.destination is None and self.session.vendor != "tc"):
            return None
        known = {source.port: source for source in self.session.sources}
        try:
            return MirrorSession.model_validate(
                self.session.model_dump()
                | {
                    "direction": ways.pop() if len(ways) == 1 else "both",
                    "destination": state.destination or self.session.destination,
                    "classifier": "u32" if state.key == "u32" else self.session.classifier,
                    "sources": [
                        known.get(s.port, Source(port=s.port, rank=0, speed_gbps=1)).model_dump() for s in state.sources
                    ],
                }
            )
        except ValueError:
            return None


def _describe(state: SessionState) -> list[str]:
    if not state.exists:
        return []
    lines = [f"source {s.port} {s.direction}" for s in state.sources] + [f"destination {state.destination}"]
    if state.truncation:
        lines.append(state.truncation)
    return lines if state.active else [*lines, f"not active: {state.reason}"]


def _wanted(session: MirrorSession) -> list[str]:
    return [f"source {port} {session.direction}" for port in session.ports] + [f"destination {session.destination}"]


def _without_equals(lines: list[str]) -> list[str]:
    texts = [line[2:] for line in lines]
    return [line for line in lines if texts.count(line[2:]) == 1]


def _say(state: SessionState) -> str:
    sources = ", ".join(f"{s.port} {s.direction}" for s in state.sources) or "no sources"
    return f"{sources} to {state.destination or 'nowhere'}" if state.exists else "nothing"
