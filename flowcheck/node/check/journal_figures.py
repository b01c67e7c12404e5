"""What a journal would take, and how far back it would reach: a part of `flowcheck-node --check`.

    figures = journal_figures(settings, groups, job, seconds)      job: its plan; None: an example stands for it
    store_figures(store, figures)                                  what goes from it to the store, if gradients do

A journal writes the gradients of every iteration once. Where no job is known an iteration of EXAMPLE_BYTES and a model
of as many parameters stand for it; what is printed says so.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.job.model import LOG
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.config.store import Store
from flowcheck.node.groups.checks import STAGED
from flowcheck.node.versions.journal.room import room_of, sizes_of, too_little, wants
from flowcheck.rebuild.plan import JobPlan
from updater.ring import file_system

__all__ = ["EXAMPLE_BYTES", "JournalFigures", "StoreFigures", "journal_figures", "problem_of", "store_figures"]

EXAMPLE_BYTES = 1 << 30  # of gradients of an iteration
STATE = 3  # times the gradients in fp32: parameters and two moments
DAY = 86400


@dataclass(frozen=True)
class JournalFigures:
    """directory: of the journals. example: no job was given. entry, state: bytes of an iteration, and of a base.
    seconds: of a step. entries: iterations that fit. back: steps back that can be had at all times. rate: bytes per
    second that the disk must take; with_bases: with a base every `back` steps. day: bytes written per day, those of
    bases among them. staged: bytes of memory of iterations that are on their way, of all groups. room: bytes of all
    groups, free: there. memory: the directory is in memory."""

    directory: str
    example: bool
    entry: int
    state: int
    seconds: float
    entries: int
    back: int
    rate: float
    with_bases: float
    day: float
    staged: int
    room: int
    free: int
    memory: bool


@dataclass(frozen=True)
class StoreFigures:
    """Of one group, bytes per second and per day. every: steps from a base to the next. deltas: gradients, and a base
    each time it is due. whole: without gradients, a version whenever one is due. each: every step as a whole version.
    All of it is read back, too."""

    every: int
    deltas: float
    deltas_day: float
    whole: float
    whole_day: float
    each: float
    each_day: float


def store_figures(store: Store, made: JournalFigures) -> StoreFigures:
    """store: with `deltas`."""
    due = store.every or max(1, round(store.minutes * 60 / made.seconds))
    every = -(-due // max(made.back, 1)) * max(made.back, 1)  # bases are the journal's
    rates = [made.entry / made.seconds + made.state / (every * made.seconds), made.state / (due * made.seconds),
             made.state / made.seconds]
    return StoreFigures(every, *(figure for rate in rates for figure in (rate, rate * DAY)))


def journal_figures(
    settings: JournalSettings, groups: int, job: JobPlan | None, seconds: float
) -> JournalFigures:
    """seconds: of a step. Raises EnvironmentProblem: the directory cannot be asked; UserError: a job that has none."""
    if job is None:
        entry, state = EXAMPLE_BYTES, STATE * EXAMPLE_BYTES
    elif job.job.optimizer is None and job.job.kind != LOG:
        raise UserError("the manifest names no optimizer: there are no steps to go back to", where="job",
                        remedy='kind: "log" of a job whose optimizer has no kernel')
    else:
        entry, state = sizes_of(job)
    room = room_of(settings, entry, state)
    place = settings.directory
    try:
        free, descriptor = shutil.disk_usage(place).free, os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentProblem(f"cannot be asked for its room: {error.strerror}", where=f"journal.directory {place}",
                                 remedy="a directory that the node may write to") from None
    try:
        memory = bool(file_system(descriptor))
    finally:
        os.close(descriptor)
    rate = entry / seconds
    with_bases = rate + state / (room.every * seconds)
    return JournalFigures(str(settings.directory), job is None, entry, state, seconds, room.entries, room.back, rate,
                          with_bases, with_bases * DAY, STAGED * entry * groups, groups * settings.megabytes << 20,
                          free, memory)


def problem_of(settings: JournalSettings, made: JournalFigures) -> FlowcheckError | None:
    """What cannot hold."""
    if not made.example and (why := too_little(settings, made.entry, made.state)):
        least = wants(settings, made.entry, made.state)
        return UserError(why, where="journal.megabytes",
                         remedy=f"{least} or more{', or less as journal.keep' if settings.keep else ''}")
    if made.free < made.room:
        return EnvironmentProblem(
            f"{made.free >> 20:,} MiB are free in {made.directory}, and journals may take {made.room >> 20:,}",
            where="journal.megabytes", remedy="another journal.directory, or less as journal.megabytes")
    return None
