"""From what ranks have said to a plan of their job: its connections, its name and epoch here, and what it takes.

    planning = Planning(name, config, port, ranks, versions, common, unfollowed, say)
    body = planning.body(said)                the manifest with all connections; None: what is missing was asked for
    planned = planning.plan(said, body)       what the job is followed by; its ranks hear its epoch
    planning.seek()                           again and again: is it known now which connection is which channel?
    planning.is_outnumbered(epoch)            another node has this start under a newer epoch

The group's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcheck.control.protocol import Epoch, Wanted
from flowcheck.control.start import Start
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import FEED, Job
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.assigning import WHY, Assigning, withheld
from flowcheck.node.groups.checks import check_job, check_memory, union
from flowcheck.node.groups.membership import Membership, Said
from flowcheck.node.groups.unfollowed import Unfollowed
from flowcheck.node.peers.common_step import Common
from flowcheck.node.ports.silence import Arrivals
from flowcheck.node.versions.group_versions import GroupVersions
from flowcheck.node.versions.journal.log_shelf import logs_here
from flowcheck.node.versions.runs import start_of
from flowcheck.node.versions.starts import Coming, Seen, versions_here
from flowcheck.rebuild.plan import JobPlan, plan_job

__all__ = ["Planned", "Planning"]


@dataclass(frozen=True)
class Planned:
    """start: of its trainers, as of runs.start_of. left: the replica that an earlier process left of that start.
    verified: step that was verified last in it, None: none was."""

    plan: JobPlan
    start: str
    left: Path | None
    verified: int | None


class Planning:
    """name: of the group. ranks: the ones it asks and answers. say: events of the group."""

    def __init__(
        self, name: str, config: NodeConfig, port: Arrivals, ranks: Membership, versions: GroupVersions, common: Common,
        unfollowed: Unfollowed, say: Callable[..., None],
    ) -> None:
        self._name, self._config, self._queues = name, config, len(port.queues)
        self._ranks, self._versions, self._common = ranks, versions, common
        self._unfollowed, self._say = unfollowed, say
        rings, spare = [queue.ring_address for queue in port.queues], os.sched_getaffinity(0) - config.pinned
        self._assigning = Assigning(rings, spare, say)
        self._coming: Coming | None = None  # the start that was planned last

    def body(self, said: Said, ask: Callable[[Wanted], None]) -> dict[str, Any] | None:
        """ask: for what is missing. Raises UserError: which connection is which channel cannot be found out."""
        body = dict(said.manifest.job)
        if body.get("source") == FEED:
            return body
        if not body.get("flows"):
            flows = self._ranks.flows()
            missing = [rank for rank in range(said.run[2]) if rank not in flows]
            if missing:
                ask(Wanted(["flows"], self._unfollowed.missing(missing)))
                return None
            body["flows"] = union(list(flows.values()))
        if withheld(body["flows"]):
            found = self._assigning.of(body, body["flows"])
            if found is None:
                ask(Wanted(["flows"], WHY))
                return None
            body |= {"flows": found["flows"], "unproven": [*body.get("unproven", ()), found["unproven"]]}
        return body

    def plan(self, said: Said, body: Mapping[str, Any]) -> Planned:
        """Raises FlowcheckError: the job cannot be followed here."""
        first = said.manifest.first
        job = job_from_dict(body, where="manifest")
        check_job(job, said.run, self._config.journal is not None, self._queues > 0)
        start = start_of(body, said.run, first, said.instance)
        left = self._versions.standing.left(start)
        job.run_id = job.run_id or (left.run_id if left is not None else said.own_id)
        job.epoch = self._numbered(job, start, said)
        replica = self._config.replica
        plan = plan_job(job, streams=self._queues, threads=self._queues, arenas=replica.regions,
                        patience=replica.patience_packets)
        check_memory(plan, replica, self._config.journal is not None)
        return Planned(plan, start, *((left.path, left.verified) if left is not None else (None, None)))

    def _numbered(self, job: Job, start: str, said: Said) -> int:
        """The epoch of this start here; trainers hear it, where it is another than they say."""
        theirs, ranks = Start.of(said.instance), self._ranks
        line = theirs.line if theirs is not None else said.instance or f"{self._name} {ranks.start}"
        begins = theirs.first if theirs is not None else said.manifest.first
        coming = self._coming = Coming(job.run_id, job.epoch, begins, line, start)
        epoch = self._common.number(coming, self._here(job.run_id))
        before = ranks.epoch.epoch if ranks.epoch is not None else job.epoch
        if epoch != before:
            why = (f"another start of run {job.run_id!r} has made versions, of step {begins} or later of"
                   f" epoch {job.epoch}, or of a newer one: this start is epoch {epoch} here")
            self._say("numbered", run_id=job.run_id, epoch=epoch, said=job.epoch, first=begins, why=why)
            ranks.tell(Epoch(epoch, why))
        return epoch

    def _here(self, run_id: str) -> list[Seen]:
        """Versions of a run, and steps that can be made of its logs."""
        seen = versions_here(self._config, run_id)
        return [*seen, *logs_here(self._config.journals, run_id)] if self._config.journals is not None else seen

    def is_outnumbered(self, epoch: int) -> bool:
        """epoch: under which the start that was planned last is followed here."""
        coming = self._coming
        return coming is not None and self._common.starts.epoch(coming.run_id, coming.line) > epoch

    def seek(self) -> bool:
        """True once there is an answer. Raises EnvironmentProblem: it cannot be found out here."""
        if not self._ranks.members:
            self._assigning.rest()
            return False
        return self._assigning.look()

    def forget(self) -> None:
        """The job was started again."""
        self._assigning.forget()

    def close(self) -> None:
        self._assigning.rest()
