"""From a copy and the journal after it to a newer step: the follower's own updates, done again.

    reach(base, journal)                 the newest step that they make and the source's hashes prove
    path = redo(base, journal, threads)  that step as a checkpoint directory next to the base, or FlowcheckError

The job is planned from its manifest as the source has planned it, and the same replica applies the same bytes with the
same values in the same order (rebuild/version/replica.py, updater/). Equal bits are not taken for granted: every
tensor is held against the hash that the source has given of that step, and what differs in one is not offered. What
ranks gave of themselves is not in a journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowcheck.checkpoint.directory import MANIFEST, Loaded, load_step, read_step_manifest, step_path
from flowcheck.control.version import Version
from flowcheck.durable import adopt, came_last, remove_tree
from flowcheck.errors import FlowcheckError
from flowcheck.job.clock import Clock
from flowcheck.node.protect.journal import Journal
from flowcheck.node.versions.journal.job_text import JobText, planned
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.again import again
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from updater.errors import UpdaterError

__all__ = ["Reach", "reach", "redo"]

WORK = "redo"  # folder beside the entries


@dataclass(frozen=True)
class Reach:
    """base: step of the copy. step: that can be made and proved, at least the base. gap: the first iteration that is
    not here."""

    base: int
    step: int
    gap: int


def reach(base: int, journal: Journal) -> Reach:
    """base: step of a copy."""
    here, clock = set(journal.entries), Clock()
    gap = clock.next(base)
    while gap in here:
        gap = clock.next(clock.after(gap))
    steps = [step for step in journal.steps if base < step <= gap]
    return Reach(base, steps[-1] if steps else base, gap)


def redo(base: Path, journal: Journal, threads: int) -> tuple[Path, Reach]:
    """The directory that was made, and of what. Raises FlowcheckError: nothing newer can be made, or it differs."""
    job = journal.job
    loaded = load_step(base)
    to = reach(loaded.step, journal)
    if job is None or to.step == to.base:
        raise FlowcheckError(f"step {loaded.step} is the newest that can be made", where=str(journal.folder))
    plan, wanted = planned(job), journal.version(to.step)
    plan.job.run_id, plan.job.epoch = wanted.run_id, wanted.epoch
    work = journal.folder / WORK
    remove_tree(work)
    replica = JobReplica(plan, None, ReplicaOptions(slots=2, threads=threads, buffers=True, start=wanted.start))
    if replica.absent:
        raise FlowcheckError(replica.absent, where=str(journal.folder))
    try:
        made = _made(replica, plan, loaded, journal, job, wanted, work)
        path = step_path(base.parent, to.step)
        adopt(made, path)
        came_last(path / MANIFEST, [(base / MANIFEST).stat().st_mtime_ns])
    except UpdaterError as error:
        raise FlowcheckError(f"step {to.step} cannot be made: {error}", where=str(journal.folder)) from None
    finally:
        replica.close()
        remove_tree(work)
    return path, to


def _made(
    replica: JobReplica, plan: JobPlan, loaded: Loaded, journal: Journal, job: JobText, wanted: Version, work: Path
) -> Path:
    clock = Clock(job.first)
    replica.start(loaded.parameters, loaded.optimizer_state, loaded.step)
    for number in range(loaded.step, wanted.step):
        entry, iteration = journal.made(number), clock.iteration(number)
        again(replica, plan, iteration, entry.record, entry.buckets, number, str(journal.folder))
        replica.publish()
    with replica.pinned() as version:
        path = replica.write(work, wanted.unproven, version, wanted.status, wanted.shard, matches=wanted.matches,
                             vouch=lambda run_id, epoch: wanted.attached)
    found = Version.of(read_step_manifest(path), str(path / MANIFEST))
    for file, tensors in wanted.files.items():
        for name in {**tensors, **found.files[file]}:
            if found.files[file].get(name) != tensors.get(name):
                raise FlowcheckError(f"step {wanted.step} differs from its source's: tensor {name!r}",
                                     where=str(journal.folder))
    if (found.optimizer, found.rounding) != (wanted.optimizer, wanted.rounding):
        raise FlowcheckError(f"step {wanted.step} differs from its source's: its optimizer", where=str(journal.folder))
    return path
