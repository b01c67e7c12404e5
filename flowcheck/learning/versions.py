"""Which NCCL family speaks: what the wire limits it to, and whether what was said agrees.

    versions_of(layout, hints, log) -> (versions to try, one per family that is possible; why)

The form of the clear-to-send writes, the size of the QP handshake, the byte order of immediates and adaptive-routing
pairs each exclude versions (nccl-wire.md 5.2, 5.4, 6.1). A version from an option, a log or a manifest that one of
them excludes is refused: it would lay out every call otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowcheck.errors import UserError
from flowcheck.learning.hints import Hints
from flowcheck.learning.layout import Layout
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.walk import AR_THRESHOLD

__all__ = ["versions_of"]

# One version of each family whose layout differs, by what is known of the version.
VERSIONS = {
    "2.12-2.18": ("2.18.6",), "2.19": ("2.19.4",), "2.12-2.19": ("2.19.4",),
    "2.20-2.23": ("2.20.5", "2.22.3", "2.23.4"),
    "2.24-2.25": ("2.24.3",), "2.26-2.28": ("2.27.7",), "2.30": ("2.30.7",),
}


def versions_of(layout: Layout, hints: Hints, log: LogFacts) -> tuple[tuple[str, ...], str]:
    """Raises UserError where the connections, or what was said and the wire, contradict each other."""
    wires = layout.wires
    seen = {w.connection.layout for w in wires if w.connection.layout}
    order = {w.connection.imm_order for w in wires if w.connection.imm_order}
    if len(seen) > 1 or len(order) > 1:
        raise UserError(
            f"the connections of one ring speak different NCCL versions ({', '.join(sorted(seen | order))})",
            remedy="capture one job, or name its flows in a manifest",
        )
    said = list(_said(hints, log))
    for version, where in said:
        for other, elsewhere in said:
            if _minor(version) != _minor(other):
                raise UserError(
                    f"{where} says NCCL {version}, {elsewhere} says {other}", where=where,
                    remedy="give the log of this very job, and leave the version out",
                )
        against = next(_against(_minor(version), layout), "")
        if against:
            raise UserError(
                f"{where} says NCCL {version}, and the wire says otherwise: {against}", where=where,
                remedy="leave the version out, or give what belongs to this capture",
            )
    if said:
        return (said[0][0],), "NCCL's log names it" if said[0][1] == "--nccl-log" else f"given by {said[0][1]}"
    known, why = layout.handshake, "size of the QP handshake"
    if not known:
        known, why = (seen.pop() if seen else ""), "form of the clear-to-send writes"
    big = order == {"big"}
    if known in ("2.12-2.18", "2.12-2.19") and any(w.connection.pairs for w in wires):
        return ("2.12.12",), f"{why}, and adaptive-routing pairs, which 2.12-2.15 always sends"
    if known == "2.24-2.29":
        if big:
            return ("2.29.2",), f"{why}, big-endian immediates"
        return ("2.24.3", "2.27.7") if order else ("2.24.3", "2.27.7", "2.29.2"), why
    if known in VERSIONS:
        return VERSIONS[known], why
    if big:
        return ("2.29.2", "2.30.7"), "big-endian immediates"
    every = ("2.19.4", "2.20.5", "2.22.3", "2.23.4", "2.27.7")
    return every if order else (*every, "2.29.2", "2.30.7"), "no clear-to-send write was captured"


def _said(hints: Hints, log: LogFacts) -> Iterator[tuple[str, str]]:
    if hints.version:
        yield hints.version, "--nccl-version"
    if log.version:
        yield log.version, "--nccl-log"
    if hints.given is not None:
        yield hints.given.communicator.nccl_version, "--job"


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _against(minor: int, layout: Layout) -> Iterator[str]:
    """What on the wire rules the version out."""
    for w in layout.wires:
        c = w.connection
        for form, what in ((c.layout, "clear-to-send writes"), (layout.handshake, "QP handshakes")):
            first, _, last = form.partition("-")
            if form and not _minor(first) <= minor <= _minor(last or first):
                yield f"its {what} are of {form}"
        if c.imm_order and (c.imm_order == "big") != (minor >= 29):
            yield f"its immediates are {c.imm_order}-endian, as {'from 2.29 on' if c.imm_order == 'big' else 'to 2.28'}"
        large = [m for m in c.pieces() if m.size > AR_THRESHOLD and m.imm is not None]
        if minor <= 15 and large and not any(m.pair for m in large):
            yield "no message above 8192 bytes left as an adaptive-routing pair, as every one does in 2.12-2.15"
