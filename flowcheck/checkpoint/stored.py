"""What a store has of a run, and what of it may go. Pure.

    gone = expired(entries, Rules(keep=3), now, latest, lines)       versions
    unneeded(entries, rules, now, latest, lines)                     deltas (deltas.py), by line

With deltas a step can be had of a version that is older. Where a version stays for a step that is made of it, the
deltas up to there stay, too; where it is one of the newest, all up to the next version do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from flowcheck.checkpoint.deltas import DELTAS, LINE, Chain, Span, reach
from flowcheck.control.start import line_of
from flowcheck.control.version import Version
from flowcheck.job.version_status import VersionStatus

__all__ = ["Entry", "Line", "Lines", "Rules", "expired", "unneeded"]

MOST_SECONDS = 1e12  # since 1970
Line = tuple[int, str]  # epoch, and the line's name
Lines = Mapping[Line, Sequence[Span]]


@dataclass(frozen=True)
class Entry:
    """A version that has its manifest. folder: its name in the store. stored: seconds since 1970, when it was. line: of
    deltas that can be applied to it, None: none can."""

    folder: str
    version: Version
    document: Mapping[str, Any]
    text: bytes

    @property
    def order(self) -> tuple[int, str, int, float]:
        return self.version.epoch, line_of(self.version.start), self.version.step, self.stored

    @property
    def stored(self) -> float:
        said = self.document.get("stored", 0)
        return float(said) if isinstance(said, int | float) and 0 <= said < MOST_SECONDS else 0.0

    @property
    def line(self) -> Line | None:
        said, plan = self.document.get("line"), self.document.get("plan")
        sound = isinstance(said, str) and isinstance(plan, str) and LINE.fullmatch(said)
        return (self.version.epoch, said) if sound and isinstance(said, str) else None

    @property
    def deltas(self) -> str:
        """The folder of its line's."""
        return f"{self.folder.rpartition('/')[0]}/{DELTAS}/{self.document.get('line', '')}"

    @property
    def chain(self) -> Chain:
        one = self.version
        return Chain(one.run_id, one.epoch, one.shard, one.start, self.document["line"], self.document["plan"])


@dataclass(frozen=True)
class Rules:
    """A version stays if any of them holds. keep: it is one of so many newest. seconds: it is not older. every: the
    first step in each stretch of so many is it, or is made of it; or, where that step cannot be made, it is the first
    version in the stretch. Such ones stay for ever. None set: all stay."""

    keep: int = 0
    seconds: float = 0.0
    every: int = 0


def expired(entries: Iterable[Entry], rules: Rules, now: float, latest: str, lines: Lines | None = None) -> list[Entry]:
    """Which versions may go, oldest first. latest: the folder that the pointer names. lines: the deltas of each."""
    if not rules.keep and not rules.seconds:
        return []
    ordered = sorted(entries, key=lambda one: one.order)
    stays = _stays(ordered, rules, now, latest, lines or {})
    return [one for one in ordered if one.folder not in stays]


def unneeded(entries: Iterable[Entry], rules: Rules, now: float, latest: str, lines: Lines) -> dict[Line, list[Span]]:
    """Which deltas may go, the newest first."""
    if not rules.keep and not rules.seconds:
        return {}
    ordered = sorted(entries, key=lambda one: one.order)
    stays, needed = _stays(ordered, rules, now, latest, lines), dict[Line, list[tuple[int, float]]]()
    for one in ordered:
        if one.line is not None and one.folder in stays:
            step = one.version.step
            later = (other.version.step for other in ordered if other.line == one.line and other.version.step > step)
            needed.setdefault(one.line, []).append((step, min(stays[one.folder], min(later, default=inf))))
    return {line: [one for one in sorted(spans, reverse=True) if not any(
        one.first < end and one.last >= begin for begin, end in needed.get(line, ()))] for line, spans in lines.items()}


def _stays(
    ordered: Sequence[Entry], rules: Rules, now: float, latest: str, lines: Lines
) -> dict[str, float]:
    """By folder of what stays, up to which step its deltas do; infinity: up to the next version."""
    newest = ordered[-rules.keep :] if rules.keep else []
    recent = {latest} | {one.folder for one in newest} | {
        one.folder for one in ordered if rules.seconds and now - one.stored <= rules.seconds}
    stays = dict.fromkeys(recent, inf)
    if not rules.every:
        return stays
    stretches: set[tuple[int, int]] = set()
    for epoch, step, one in _made(ordered, rules.every, lines):
        stretches.add((epoch, step // rules.every))
        stays[one.folder] = max(stays.get(one.folder, 0), step)
    for one in ordered:
        stretch = one.version.epoch, one.version.step // rules.every
        if stretch not in stretches:
            stays[one.folder] = max(stays.get(one.folder, 0), one.version.step)
        stretches.add(stretch)
    return stays


def _made(ordered: Sequence[Entry], every: int, lines: Lines) -> list[tuple[int, int, Entry]]:
    """Epoch and step of each multiple that can be had, and the newest version that it is made of."""
    found: dict[tuple[int, int], Entry] = {}
    for one in ordered:  # of an older start first, and of one line the older version
        if one.line is None or VersionStatus.of(one.version.status).diverged:
            continue
        step = one.version.step
        last = reach(step, lines.get(one.line, ()))
        for multiple in range(-(-step // every) * every, last + 1, every):
            found[one.version.epoch, multiple] = one
    return [(*key, one) for key, one in found.items()]
