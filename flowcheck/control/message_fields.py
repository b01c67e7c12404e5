"""What fields of messages may hold: their types, their limits, and the checks that both sides make. Standard library.
"""

from __future__ import annotations

import re
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.form import INTEGER_LIMIT, shown

MOST_RANKS = 65536
MOST_RANGES = 16384  # in one message
MOST_ITERATIONS = 1 << 46  # a word of a replica's file has room for more
RANGES_TEXT = 2 << 20  # bytes of JSON that a trainer reads at once
PATCH_BYTES = 64 << 20  # of state that a rank gives at one boundary
PEER_BYTES = 64 << 20  # of an arena that a peer is asked for at once
PEER_SECONDS = 10.0  # that a peer may wait for an answer
CELL = 8  # bytes of an arena that are there or not
MOST_SHARES = 64  # groups of which a node says what it has
MOST_STEPS = 16  # of each: a replica has 4 slots
NODE_ID = re.compile("[0-9a-f]{32}")
SUM = re.compile("[0-9a-f]{16}")
GROUP = re.compile(r"[A-Za-z0-9_.]{0,32}")  # no hyphen: in the names of replica files it ends the group's name

Share = tuple[str, int, str, list[int]]  # run id, epoch, group, steps of its complete versions
Span = tuple[int, int]  # first byte in an iteration's arena, bytes
Range = tuple[str, int, int]  # entry of the model, first element, elements; of the entry in row-major order


def check_count(value: int, where: str) -> None:
    if value < 0:
        raise UserError(f"{value} is less than 0", where=where)


def check_iteration(value: int, where: str) -> None:
    """Numbers of iterations are added to, and stand in 8 bytes of a replica's file."""
    check_count(value, where)
    if value >= MOST_ITERATIONS:
        raise UserError(f"{value}, at most {MOST_ITERATIONS - 1} are counted", where=where)


def checked_ranges(found: list[Any], where: str) -> list[Range]:
    """Thousands of them may come at once, into a process that trains: one flat loop, and no object per field."""
    if len(found) > MOST_RANGES:
        raise UserError(f"{len(found)} ranges, at most {MOST_RANGES} are taken at once", where=where)
    out: list[Range] = []
    for one in found:
        if not isinstance(one, list | tuple) or len(one) != 3:
            raise UserError(f"{shown(one)} is not [entry, start, length]", where=f"{where}[{len(out)}]")
        entry, start, length = one
        if type(entry) is not str or type(start) is not int or type(length) is not int:
            raise UserError("is not [text, whole number, whole number]", where=f"{where}[{len(out)}]")
        if not entry.isprintable() or start < 0 or length < 1 or start + length >= INTEGER_LIMIT:
            raise UserError(f"{length} elements from {start} on, of entry {shown(entry)}", where=f"{where}[{len(out)}]")
        out.append((entry, start, length))
    return out


def checked_share(one: Any, where: str) -> Share:
    if not isinstance(one, list | tuple) or len(one) != 4 or [type(part) for part in one] != [str, int, str, list]:
        raise UserError(f"{shown(one)} is not [run, epoch, group, steps]", where=where)
    run_id, epoch, group, steps = one
    if not GROUP.fullmatch(group):
        raise UserError(f"{shown(group)} is no name of a group", where=where)
    if not 0 <= epoch < INTEGER_LIMIT or len(steps) > MOST_STEPS or not all(type(step) is int for step in steps):
        raise UserError(f"epoch {epoch}, {len(steps)} steps: not what a group has", where=where)
    for step in steps:
        check_iteration(step, where)
    return run_id, epoch, group, steps


def checked_spans(found: list[Any], where: str) -> list[Span]:
    if len(found) > MOST_RANGES:
        raise UserError(f"{len(found)} ranges, at most {MOST_RANGES} are taken at once", where=where)
    out: list[Span] = []
    end = nbytes = 0
    for one in found:
        here = f"{where}[{len(out)}]"
        if not isinstance(one, list | tuple) or len(one) != 2 or not all(type(number) is int for number in one):
            raise UserError(f"{shown(one)} is not [first byte, bytes]", where=here)
        start, length = one
        if start < end or start % CELL or length < 1 or start + length >= INTEGER_LIMIT:
            raise UserError(f"{length} bytes from {start} on: overlaps, is empty, or begins within a cell", where=here)
        end, nbytes = start + length, nbytes + length
        out.append((start, length))
    if nbytes > PEER_BYTES:
        raise UserError(f"{nbytes} bytes, at most {PEER_BYTES} are given at once", where=where)
    return out
