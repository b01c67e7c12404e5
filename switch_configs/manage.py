"""Apply, show and remove one session on one switch, and nothing else on it.

    Manager(session, connect).difference() -> what would be typed and why     changes nothing
    Manager.apply(difference)   -> typed, read back, confirmed, read again; undone if the copy cannot flow
    Manager.remove()            -> only what carries our mark

Idempotent: the same session, active, is left alone. A session that differs is replaced. Before anything is typed,
a name, number, source or destination that somebody else uses is refused (SONiC's rules for every vendor), and so is
somebody else's change that waits for its confirmation, because ours would confirm it.
After a failure or Ctrl-C in the middle the state before is restored: the candidate is thrown away, or what was typed is
removed and the session that was there is typed again as the switch had printed it, even if it was broken
(vendors/rollback.py). Where the platform has a timed undo it runs until the session was read back; if flowcheck dies
meanwhile, the switch undoes the change by itself, or the next apply finds the timer and confirms.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from switch_configs.errors import DeviceError, PlanError
from switch_configs.planning.platform_rules import clashing
from switch_configs.schema import MirrorSession, SessionState, SourceState, ways_of
from switch_configs.transport import Transport, is_local
from switch_configs.vendors import monitor_port
from switch_configs.vendors.render import Rendering, render, tc_prio, timed_undo
from switch_configs.vendors.rollback import put_back, take_away_tc
from switch_configs.vendors.show import Found, read

__all__ = ["Difference", "Manager"]

SETTLE_SECONDS = 5.0  # SONiC and NVUE program the hardware after the command has returned
POLL_SECONDS = 0.25


# Old and new are swapped in one commit or transaction: nothing is removed first.
SWAPPED = ("eos", "junos", "cumulus", "ovs")


@dataclass(frozen=True)
class Difference:
    """lines: - as it is, + as it will be, empty if nothing changes. commands: what apply will type.

    port_before: what makes the destination port what it was before, for remove; empty if apply leaves it alone.
    confirms: the session is as planned and only the confirmation of an interrupted apply is missing.
    """

    lines: tuple[str, ...]
    commands: tuple[str, ...]
    found: Found
    port_before: tuple[str, ...] = ()
    confirms: bool = False


class Manager:
    """connect opens a Transport; it is called again if the connection is lost in the middle."""

    def __init__(self, session: MirrorSession, connect: Callable[[], Transport]) -> None:
        self.session = session
        self._connect = connect
        self._open: Transport | None = None
        self._nonce = secrets.token_hex(3)
        self._ready: frozenset[str] = frozenset()  # tc: ports that have a clsact qdisc already,
        self._added: frozenset[str] = frozenset()  # and those of them that have it from us

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
        self._refuse_half_done(found)
        mine = found.mine
        if mine.same_as(self.session) and mine.active:
            if found.timer:  # an apply was interrupted after its commit: what is missing is the confirmation
                confirm = render(self.session, nonce=found.timer.removeprefix(self.session.name).lstrip("-")).confirm
                return Difference(("+ confirmation of an interrupted apply",), confirm, found, confirms=True)
            return Difference((), (), found)
        if found.timer:
            raise PlanError(f"the timed undo of an interrupted apply is running ({found.timer})",
                            where=self.session.leaf, remedy="wait for it, or apply the plan that was interrupted: that "
                            "confirms it")
        if self.session.vendor == "tc":
            self._ready, self._added = self._clsact_ports(), frozenset(mine.added)
        removal = self._take_away(mine) if mine.exists and self.session.vendor not in SWAPPED else ()
        self._ready -= {shlex.split(line)[4] for line in removal if line.startswith("tc qdisc del")}
        commands = [*removal, *self._render(replace=mine.exists, key=mine.key).apply]
        lines = [f"- {line}" for line in _describe(mine)] + [f"+ {line}" for line in _wanted(self.session)]
        return Difference(tuple(_without_equals(lines)), tuple(commands), found, self._port_before())

    def apply(self, difference: Difference, *, save: bool = False) -> SessionState:
        """Type the commands, read the session back, confirm. Raises DeviceError after having undone it."""
        if not difference.commands:
            return difference.found.mine
        try:
            self._type_checked(difference.commands)
            state = self._settled()
        except DeviceError as error:
            self._undo(difference, "abort", error)
        except KeyboardInterrupt:  # what was typed must not stay because somebody has lost patience
            with contextlib.suppress(DeviceError):  # which says that it was taken back, or what became of it
                self._undo(difference, "abort", DeviceError("interrupted", where=self.session.leaf))
            raise
        self._require(state, difference, "applied, but not active")
        confirm = () if difference.confirms else self._render().confirm
        try:
            for line in confirm:
                self._run(line)
            # A timer that ran out meanwhile has undone everything, and some platforms confirm nothing without a word.
            state = self._settled() if confirm else state
        except DeviceError as error:
            state = self._confirm_again(difference, error)
        self._require(state, difference, "confirmed too late: the timed undo was faster")
        self._drop_qdiscs(name for name in difference.found.mine.added if name not in self.session.ports)
        for line in self._render().save if save else ():
            self._run(line)
        return state

    def remove(self, port_before: Sequence[str] = ()) -> bool:
        """False if there was nothing. port_before: of the Difference that apply was given; the destination port is
        left as it is without it. Raises PlanError if the session there is not ours."""
        found = self.show()
        if not found.mine.exists:
            return False
        if not found.mine.ours:
            raise PlanError(f"session {found.mine.name} is not ours: {_say(found.mine)}", where=self.session.leaf,
                            remedy="remove it by hand, if it may go")
        if self.session.vendor == "tc" and any(other.name == self.session.name for other in found.others):
            raise PlanError("somebody else's filter shares our preference, and tc would remove both",
                            where=self.session.leaf, remedy="remove the other filter first")
        self._refuse_half_done(found)
        for line in self._take_away(found.mine):
            self._run(line, check=self.session.vendor != "tc")
        left = self.show().mine
        if left.exists and left.ours:
            raise DeviceError(f"still there: {_say(left)}", where=self.session.leaf, remedy="run remove again")
        self._drop_qdiscs(found.mine.added)
        for line in port_before:
            self._run(line)
        return True

    # -- inside -------------------------------------------------------------------------------------------

    def _run(self, line: str, check: bool = True) -> str:
        if self._open is None:
            self._open = self._connect()
        return self._open.run(line, check=check)

    def _render(self, *, replace: bool = False, key: str = "") -> Rendering:
        return render(self.session, replace=replace, key=key, nonce=self._nonce, ready=self._ready,
                      added=self._added)

    def _port_before(self) -> tuple[str, ...]:
        asked = monitor_port.show_line(self.session)
        try:
            return monitor_port.restore(self.session, self._run(asked)) if asked else ()
        except (DeviceError, ValueError):  # a switch that shows it otherwise: then its port stays as apply makes it
            return ()

    def _take_away(self, mine: SessionState) -> tuple[str, ...]:
        if self.session.vendor == "tc":
            # with a qdisc that is ours alone its filters go in one step: they carry the mark that it is ours
            alone = [name for name in mine.added if self._prefs(name) == {tc_prio(self.session)}]
            return take_away_tc(self.session, mine, alone)
        return render(self.session, key=mine.key).remove

    def _drop_qdiscs(self, ports: Iterable[str]) -> None:
        """clsact qdiscs that we added, unless filters of others have come to them."""
        for name in ports:
            if self._prefs(name) == set():
                self._run(f"tc qdisc del dev {shlex.quote(name)} clsact", False)

    def _prefs(self, name: str) -> set[int]:
        """Preferences of all filters on a port, in both directions."""
        asked = [f"tc -j filter show dev {shlex.quote(name)} {way}" for way in ("ingress", "egress")]
        listings = [self._run(line, False) for line in asked]
        try:
            return {entry["pref"] for text in listings for entry in json.loads(text or "[]")}
        except (ValueError, KeyError, TypeError):
            raise DeviceError(f"tc -j filter show dev {name} prints no JSON", where=self.session.leaf) from None

    def _require(self, state: SessionState, difference: Difference, what: str) -> None:
        if not (state.active and state.same_as(self.session)):
            why = state.reason or ("it differs from what was typed" if state.exists else "it is not there")
            self._undo(difference, "rollback", DeviceError(f"{what}: {why}", where=self.session.leaf))

    def _confirm_again(self, difference: Difference, error: DeviceError) -> SessionState:
        """The confirmation was refused, or its answer was lost: the switch says over a new connection which it was."""
        self.close()
        try:
            found = self.show()
            if found.timer and found.mine.same_as(self.session):
                for line in self._render().confirm:
                    self._run(line)
                found = self.show()
        except DeviceError:
            self._undo(difference, "rollback", error)
        if found.timer or not found.mine.same_as(self.session):
            self._undo(difference, "rollback", error)
        return found.mine

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
                self._run(line, check=" del " not in line)
            except DeviceError as error:
                if "classifier not found" not in error.what or self.session.classifier == "u32":
                    raise
                # Kernels without matchall are common and only trying tells; u32 that matches all does the same.
                self.session = self.session.model_copy(update={"classifier": "u32"})
                # nothing of this session took yet, and from here on every port has its qdisc
                left = [qdisc for qdisc in commands[commands.index(line) :] if qdisc.startswith("tc qdisc add")]
                again = [again for again in self._render().apply if not again.startswith("tc qdisc")]
                self._type_checked([*left, *again])
                return

    def _qdiscs(self) -> list[tuple[str, str]]:
        table = self._run("tc -j qdisc show")
        try:
            return [(entry["dev"], entry["kind"]) for entry in json.loads(table)]
        except (ValueError, KeyError, TypeError):
            raise DeviceError("tc -j qdisc show prints no JSON", where=self.session.leaf) from None

    def _other_tc_listings(self) -> list[str]:
        devices = [shlex.quote(dev) for dev, kind in self._qdiscs() if kind == "clsact"]
        return [f"tc -s -j filter show dev {dev} {way}" for dev in devices for way in ("ingress", "egress")]

    def _clsact_ports(self) -> frozenset[str]:
        """Ports where no qdisc has to be added. An `ingress` qdisc holds ingress filters too, but no egress ones."""
        kinds = {dev: kind for dev, kind in self._qdiscs() if kind in ("clsact", "ingress")}
        for name in self.session.ports:
            if kinds.get(name) == "ingress" and "egress" in self.session.ways:
                raise PlanError(f"{name} has somebody's ingress qdisc, which has no place for egress filters",
                                where=self.session.leaf, remedy="replace it by clsact, or plan --direction ingress"
                                )
        return frozenset(kinds)

    def _refuse_half_done(self, found: Found) -> None:
        """Changes on the way that are not ours: what we commit or confirm would carry them along."""
        where = self.session.leaf
        ours = found.timer.removeprefix("flowcheck ").split("-")[0] == self.session.name.split("-")[0]
        if self.session.vendor == "cumulus":  # does not say whose it is
            ours = found.mine.same_as(self.session)
        if found.timer and not ours:
            raise PlanError(f"a change waits for its confirmation: {found.timer}; ours would confirm it", where=where,
                            remedy="confirm it or let it run out first")
        if found.unapplied:
            first = found.unapplied.splitlines()[0]
            raise PlanError(f"changes are pending that nobody applied ({first} ...), and ours would apply them",
                            where=where, remedy="look with `nv config diff`; apply them, or `nv config detach`"
                            )

    def _refuse_clash(self, found: Found) -> None:
        where, mine = self.session.leaf, found.mine
        if mine.exists and not mine.ours:
            raise PlanError(f"session {mine.name} is somebody else's: {_say(mine)}", where=where,
                            remedy="choose another session name or number")
        for other in found.others:
            if other.name == mine.name:
                raise PlanError(f"the name {other.name} is also used by somebody else: {_say(other)}", where=where,
                                remedy="choose another session name, or remove the other one")
            if other.destination == self.session.destination:
                raise PlanError(f"destination {other.destination} is used by session {other.name}", where=where,
                                remedy="choose another monitor port")
            shared = [source.port for source in other.sources if self._clashes(source)]
            if shared and not is_local(self.session.vendor):
                raise PlanError(f"source {sorted(shared)[0]} is already mirrored by session {other.name}",
                                where=where, remedy="remove the other session, or choose another GPU")
            if self.session.destination in {source.port for source in other.sources}:
                raise PlanError(f"destination {self.session.destination} is a source of session {other.name}",
                                where=where, remedy="choose another monitor port")

    def _clashes(self, source: SourceState) -> bool:
        """Would the platform refuse, or lose, our copy of what somebody's session copies?"""
        return source.port in self.session.ports and clashing(
            self.session.vendor, self.session.split_directions, self.session.ways, ways_of(source.direction)
        )

    def _undo(self, difference: Difference, section: str, error: DeviceError) -> NoReturn:
        """Raises the error, with what became of the switch."""
        before = difference.found.mine
        try:
            try:
                self._leave(section, before)
                now = self.show().mine
            except DeviceError:  # the connection may be what failed: once more over a new one
                self.close()
                self._leave("rollback", before)
                now = self.show().mine
            if not _alike(now, before):
                if now.exists and now.ours:
                    self._type(self._take_away(now))
                self._type(put_back(self.session, before))
                now = self.show().mine
            if self.session.vendor == "tc":
                self._drop_qdiscs(p for p in self.session.ports if p not in self._ready and p not in before.added)
            if self.session.vendor in ("nxos", "comware"):
                self._type(difference.port_before)
            fate = "the change was taken back" if _alike(now, before) else f"NOT taken back: it now has {_say(now)}"
        except DeviceError as second:
            timer = timed_undo(self.session.vendor)
            fate = f"could not be taken back ({second.what})"
            fate += f"; {timer} undoes it within {self.session.undo_minutes} min" if timer else ""
        raise DeviceError(
            f"{error.what}; {fate}", where=error.where, remedy=error.remedy or "fix the cause and apply again"
        ) from None

    def _leave(self, section: str, before: SessionState) -> None:
        """Out of the configuration mode, without what was not committed; and what was committed rolled back, but only
        if it still is: a timed undo that ran out already would itself be undone by Junos' `rollback 1`."""
        rendered = self._render(key=before.key)
        vendor = self.session.vendor
        if vendor not in ("eos", "junos", "cumulus"):  # what was typed is taken away by what show finds
            self._type(rendered.abort[: len(rendered.abort) - len(rendered.remove)])
            return
        if section == "abort" or vendor == "cumulus":
            self._type(rendered.abort)
        # EOS: a session of ours that stays open would block one of the few places
        if vendor == "eos" or not _alike(self.show().mine, before):
            self._type(rendered.rollback)

    def _type(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._run(line, check=False)


def _alike(one: SessionState, two: SessionState) -> bool:
    """The same configuration: counters, reasons and handles may differ."""
    if not one.exists or not two.exists:
        return one.exists == two.exists
    return (one.sources, one.destination, one.truncation) == (two.sources, two.destination, two.truncation)


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
