"""A step made again on the node: a base, and then the follower's own update for each iteration after it.

    path = remake(folder, base, step, threads, say)      a checkpoint; raises FlowcheckError: it cannot be made
    path = made_of(job, base, following, out, ...)      the same of a base and entries that lie elsewhere

Each entry's sums are checked as it is read. Where its record brings checksums of the trainer the version is compared
with them: one that differs is not offered, nor is any after it. A step is `verified` if its own checksums matched,
`follows N` if those of step N did or the base says so. What ranks gave of themselves is not in a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flowcheck.checkpoint.directory import MANIFEST, load_step, read_step_manifest, step_path
from flowcheck.control.version import Version
from flowcheck.durable import adopt, remove_tree
from flowcheck.errors import FlowcheckError
from flowcheck.job.clock import Clock
from flowcheck.job.version_status import FOLLOWS, VERIFIED, VersionStatus
from flowcheck.journal.reader import Followed, RingReader
from flowcheck.node.versions.journal.entries import KeptEntry, line_of, read
from flowcheck.node.versions.journal.folders import Folder, Place
from flowcheck.node.versions.journal.job_text import JobText, planned
from flowcheck.rebuild.version.again import again
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from updater.errors import UpdaterError

__all__ = ["WORK", "made_of", "remake"]

WORK = "work"
Following = Callable[[Sequence[int]], Iterable[Followed]]


def remake(
    folder: Folder, base: Place, step: int, threads: int, say: Callable[[int], None] = lambda made: None
) -> Path:
    """say: how many steps are made. Memory: two states; and two entries, where the
    journal is on a disk."""
    try:
        job = JobText.of(folder.job.read_text())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FlowcheckError(f"cannot be read: {error}", where=str(folder.job)) from None
    reader, out = RingReader(folder.ring), folder.made_of(base.line)
    for above in (out.parent, out):
        above.mkdir(0o700, exist_ok=True)
    return made_of(job, base, reader.following, out, folder.path / WORK, step, threads, say, str(folder.path))


def made_of(
    job: JobText, base: Place, following: Following, out: Path, work: Path, step: int, threads: int,
    say: Callable[[int], None], where: str,
) -> Path:
    """following: head and spans of iterations, as of RingReader.following. out: the directory that it is to lie in.
    work: one on the same disk, for what is half."""
    loaded, plan = load_step(base.path), planned(job)
    begun = Version.of(read_step_manifest(base.path), str(base.path / MANIFEST))
    plan.job.run_id, plan.job.epoch = begun.run_id, begun.epoch
    replica = JobReplica(plan, None, ReplicaOptions(slots=2, threads=threads, buffers=True, start=begun.start))
    if replica.absent:
        raise FlowcheckError(replica.absent, where=where)
    remove_tree(work)
    try:
        replica.start(loaded.parameters, loaded.optimizer_state, loaded.step)
        del loaded
        made, clock, numbers = _Made(replica, begun), Clock(job.first), range(begun.step, step)
        for number, one in zip(numbers, following(numbers), strict=True):
            entry = read(one.head, one.spans)
            if (line_of(one.head, job.plan), entry.number) != (base.line, number):
                raise FlowcheckError(f"iteration {number} is of another line of versions", where=where)
            again(replica, plan, clock.iteration(number), entry.made.record, entry.made.buckets, number, where)
            one.check()
            made.take(entry, number + 1, where)
            say(number + 1 - begun.step)
        with replica.pinned() as version:
            written = replica.write(work, made.unproven, version, str(made.status), begun.shard, matches=made.matches,
                                    vouch=lambda run_id, epoch: begun.attached)
        path = step_path(out, step)
        adopt(written, path)
    except UpdaterError as error:
        raise FlowcheckError(f"step {step} cannot be made: {error}", where=where) from None
    finally:
        replica.close()
        remove_tree(work)
    return path


class _Made:
    """The newest version of a replica that makes steps again. begun: the base."""

    def __init__(self, replica: JobReplica, begun: Version) -> None:
        self._replica = replica
        self._marks = dict.fromkeys(begun.unproven)
        self.matches = begun.matches
        self.status = VersionStatus.of(begun.status, begun.step)
        self._verified = begun.step if self.status.verified else self.status.step

    def take(self, entry: KeptEntry, step: int, where: str) -> None:
        """It is written: compare it with what the trainer said of it, and publish it. Raises FlowcheckError: it
        differs."""
        sums, matched = entry.made.record.sums(), False
        if sums:
            comparison = self._replica.compare(sums)
            if differs := comparison.differing(-1):
                self._replica.discard()
                raise FlowcheckError(f"step {step} differs from the trainer's: tensor {differs!r}", where=where)
            matched = comparison.whole
        self.matches = max(self.matches, entry.matches) + matched
        self._verified = step if matched else self._verified
        self.status = VersionStatus(VERIFIED) if matched else VersionStatus() if self._verified is None else (
            VersionStatus(FOLLOWS, self._verified))
        self._note(entry.unproven)
        self._replica.publish(matched, str(self.status), self.unproven, self.matches)

    def _note(self, marks: Iterable[str]) -> None:
        self._marks |= dict.fromkeys(marks)

    @property
    def unproven(self) -> list[str]:
        return list(self._marks)
