"""What passes over gradients found, of all groups of a node: figures for its metrics, rows for its files.

    telemetry = Telemetry(settings, say)
    telemetry.take(group, run, number, measured, say)    a pass has ended; run: folder of its files below the group's
    telemetry.document()                                 by group: docs/reference/metrics.md has the units
    telemetry.close()

A model has as many tensors as it likes, and metrics have a bound: tensors whose names have the same prefix are one
part of it, with the longest prefixes that give no more than `series` parts. So a part is called the same for as long as
the job runs. Figures of a part are those of its tensors as one vector. The file has each tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowcheck.node.status.telemetry_files import Files, Row, Settings
from flowcheck.rebuild.iteration.measuring import Measured
from updater.measure import Found

__all__ = ["Telemetry", "parts_of"]

MOST_GROUPS = 16  # that are kept, as of status/counters.py
LONGEST_NAME = 200  # characters of a part's: with 64 parts of 8 groups they fit the board (status/board.py)


def parts_of(names: Sequence[str], most: int) -> list[str]:
    """The part of each tensor; all "" where two find no room."""
    split = [name.split(".") for name in names]
    for depth in range(max(map(len, split), default=0), 0, -1):
        parts = [".".join(one[:depth]) for one in split]
        if len(set(parts)) <= most and max(map(len, parts)) <= LONGEST_NAME:
            return parts
    return [""] * len(names)


class Telemetry:
    """say: events of the node. Passes end on their groups' threads; any thread asks for the document."""

    def __init__(self, settings: Settings, say: Callable[..., None], clock: Callable[[], float] = time.time) -> None:
        self.settings, self._clock = settings, clock
        self._files = Files(settings, say) if settings.directory is not None else None
        self._lock = threading.Lock()
        self._groups: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, tuple[tuple[str, ...], list[str]]] = {}  # of each group: its tensors, and their parts

    def take(self, group: str, run: Path, number: int, measured: Measured, say: Callable[..., None]) -> None:
        """number: the trainer's of the iteration. say: events of the group."""
        figures = self._figures(group, measured, number)
        with self._lock:
            before = self._groups.pop(group, {"passes": 0, "seconds_total": 0.0, "first": None})
            figures["passes"] = before["passes"] + 1
            figures["seconds_total"] = before["seconds_total"] + measured.seconds
            first = _first(measured, number)
            figures["first"] = first or before["first"]
            self._groups[group] = figures
            while len(self._groups) > MOST_GROUPS:
                oldest = next(iter(self._groups))
                del self._groups[oldest]
                self._parts.pop(oldest, None)
        if first is not None and (before["first"] is None or before.get("finite")):
            say("not_finite", iteration=number, tensor=first["tensor"], element=first["element"], kind=first["kind"],
                nan=first["nan"], infinity=first["infinity"], tensors=first["tensors"])
        if self._files is not None:
            now = round(self._clock(), 3)
            found = zip(measured.names, measured.gradients, measured.weights, strict=True)
            self._files.put(group, run, len(measured.names), (_row(now, number, *one) for one in found))

    def _figures(self, group: str, measured: Measured, number: int) -> dict[str, Any]:
        names, parts = self._parts.get(group, ((), []))
        if names != measured.names:
            parts = parts_of(measured.names, self.settings.series)
            self._parts[group] = measured.names, parts
        by_part: dict[str, list[int]] = {"": list(range(len(parts)))}
        for i, part in enumerate(parts):
            if part:
                by_part.setdefault(part, []).append(i)
        gradients, weights = measured.gradients, measured.weights
        return {
            "iteration": number, "seconds": measured.seconds,
            "unmeasured": sum(not one.elements for one in gradients),
            "finite": not any(one.nans or one.infs for one in gradients),
            "parts": {part: _together([gradients[i] for i in of], [weights[i] for i in of])
                      for part, of in by_part.items()},
        }

    def document(self) -> dict[str, Any]:
        with self._lock:
            groups = dict(self._groups)
        rows = self._files.counts() if self._files is not None else {}
        return {group: figures | {"rows": rows.get(group, {"written": 0, "dropped": 0})}
                for group, figures in groups.items()}

    def close(self) -> None:
        """What is to be written still is, for some seconds."""
        if self._files is not None:
            self._files.close()


def _together(gradients: Sequence[Found], weights: Sequence[Found]) -> dict[str, Any]:
    """None: nothing was measured."""
    elements = sum(one.elements for one in gradients)
    return {
        "norm": math.sqrt(math.fsum(one.squares for one in gradients)) if elements else None,
        "largest": max((one.largest for one in gradients), default=0.0) if elements else None,
        "zeros": sum(one.zeros for one in gradients) / elements if elements else None,
        "nans": sum(one.nans for one in gradients), "infs": sum(one.infs for one in gradients),
        "ratio": _ratio(weights),
    }


def _ratio(weights: Sequence[Found]) -> float | None:
    """Norm of the change over the norm before; None: not measured, or no number."""
    changed, held = (math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan for sums in (
        [one.change for one in weights if one.elements], [one.squares for one in weights if one.elements]))
    return math.sqrt(changed / held) if held > 0 and math.isfinite(changed) else None


def _first(measured: Measured, number: int) -> dict[str, Any] | None:
    """The first tensor with a NaN, else with an infinity, and where in it."""
    for kind, where in (("nan", "first_nan"), ("infinity", "first_inf")):
        for name, one in zip(measured.names, measured.gradients, strict=True):
            if getattr(one, where) >= 0:
                return {
                    "iteration": number, "tensor": name, "element": getattr(one, where), "kind": kind,
                    "nan": sum(one.nans for one in measured.gradients),
                    "infinity": sum(one.infs for one in measured.gradients),
                    "tensors": sum(bool(one.nans or one.infs) for one in measured.gradients),
                }
    return None


def _row(now: float, number: int, name: str, gradient: Found, weight: Found) -> Row:
    """As of files.COLUMNS. What was not measured is empty."""
    ratio = _ratio([weight])
    if not gradient.elements:
        return (now, number, name, 0, *[""] * 7, "" if ratio is None else ratio)
    return (
        now, number, name, gradient.elements, math.sqrt(gradient.squares), gradient.largest,
        gradient.zeros / gradient.elements, gradient.nans, gradient.infs,
        *("" if at < 0 else at for at in (gradient.first_nan, gradient.first_inf)), "" if ratio is None else ratio,
    )
