"""Learning a job: observations and hints in, a manifest with the reasons for every part of it out.

    learn_from(observations, hints) -> Learnt      pure but for fetching payloads; captures.py does it with files

Every possible structure (search/hypotheses.py) is held against every observed message (search/walk.py) with both kinds
of program (search/ddp.py, search/programs.py). One explanation is a result, none or several are a refusal that names
them (search/candidates.py). What no capture can tell stays as a doubt (reasons.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Communicator, Flow, Gradients, Job
from flowcheck.learning.bootstrap import Bootstrap, BootstrapConnection
from flowcheck.learning.connections import Connection
from flowcheck.learning.hints import Hints, optimizer_of
from flowcheck.learning.logs import LogFacts
from flowcheck.learning.reasons import Item, doubts_of, items_of, missing_of
from flowcheck.learning.refusals import (
    check_connections,
    check_plan,
    refuse_modified,
    refuse_unread,
    refuse_unseen_ring,
    refuse_unsupported,
)
from flowcheck.learning.search.candidates import Candidate, Progress, Search, check_rings, only
from flowcheck.learning.search.ddp import announced
from flowcheck.learning.search.hypotheses import proposals, variants
from flowcheck.learning.search.programs import Stage
from flowcheck.learning.search.ranks import parents_of
from flowcheck.learning.search.walk import Budget, Hypothesis, Reader
from flowcheck.rebuild.plan import JobPlan, plan_job

__all__ = ["Item", "Learnt", "Observations", "Progress", "learn_from"]

BUDGET = 200_000  # calls held against the traffic: about a minute


@dataclass(frozen=True)
class Observations:
    """What was read of captures and logs. read: fetches payloads. encrypted: MACsec or ESP frames. packets: WRITEs
    that could be read. unread: packets that could not, by cause, as in a report's `drops`."""

    connections: list[Connection]
    bootstrap: Bootstrap
    log: LogFacts
    read: Reader
    encrypted: int = 0
    packets: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Learnt:
    """doubts: what was learnt and could still be otherwise, one sentence each. missing: what was not learnt."""

    job: Job
    items: list[Item]
    missing: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def marks(self) -> list[str]:
        """What a result rests on that was learnt, for its `unproven` list."""
        return ["the job: learnt from the traffic, no manifest confirms it (docs/use/learn.md)", *self.doubts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": [vars(item) for item in self.items], "missing": list(self.missing), "doubts": list(self.doubts),
        }


def learn_from(observations: Observations, hints: Hints, progress: Progress | None = None) -> Learnt:
    """Raises UserError: what cannot be supported, what cannot be explained, what has two explanations."""
    log = observations.log
    refuse_unsupported(observations.bootstrap, log)
    refuse_unread(
        len(observations.connections), observations.encrypted, observations.unread, observations.packets
    )
    groups = proposals(observations.connections, observations.bootstrap, log, hints)
    for group in groups:
        check_connections(group[0])
    search = Search(observations.read, hints, Budget(BUDGET), progress)
    chosen, split = _explanation(search, groups, list(variants(groups, log, hints)))
    refuse_unseen_ring(chosen.hypothesis, chosen.program.algorithms, bool(log.rings))
    check_rings(chosen, groups[chosen.hypothesis.group])
    search.check_communicators(chosen)
    _check_buckets(chosen, hints)
    job = _job(chosen, observations.bootstrap, hints)
    check_plan(_plan(job), chosen.hypothesis.connections)
    doubts = doubts_of(chosen, split)
    return Learnt(job, items_of(chosen, job, log, hints, doubts), missing_of(chosen, job), doubts)


def _explanation(
    search: Search, groups: Sequence[Sequence[Hypothesis]], hypotheses: Sequence[Hypothesis]
) -> tuple[Candidate, list[Candidate]]:
    """The one explanation, and those in which the tags are the numbers of a parent communicator."""
    found = search.candidates(announced, hypotheses)
    if not found:
        refuse_modified(h for group in groups for h in group)
        # AllReduce calls alone explain less than DDP's announcements, and are looked for only where there are none
        reached = search.failure.reached[0]
        if reached == Stage.NOTHING or (reached == Stage.GATHERED and search.hints.buckets):
            found = search.alone(hypotheses)
    if not found:
        raise search.unexplained(hypotheses[0].several)
    plain = [f for f in found if not f.hypothesis.split]
    chosen = only(plain or found)
    split = [f for f in found if f.hypothesis.split] if plain else []
    other = next((f for f in split if f.hypothesis.ranks != chosen.hypothesis.ranks), None)
    if other is not None:
        only([chosen, other])  # raises
    return chosen, split


def _plan(job: Job) -> JobPlan:
    try:
        return plan_job(job)
    except UserError as error:
        raise UserError(
            f"what was learnt cannot be followed: {error.what}", where=error.where, remedy=error.remedy
        ) from None


def _check_buckets(chosen: Candidate, hints: Hints) -> None:
    """--buckets with DDP's own announcement can only say the same."""
    calls = chosen.program.collectives
    announced_sizes = [tuple(c.count for c in part) for part in (calls.steady, calls.iteration_0) if part]
    if hints.buckets and chosen.program.model and hints.buckets not in announced_sizes:
        raise UserError(
            f"--buckets says {', '.join(map(str, hints.buckets))}, DDP announces "
            f"{', '.join(map(str, announced_sizes[0]))}", where="--buckets",
            remedy="leave it out: DDP announces its buckets on the wire",
        )


# -- the manifest ----------------------------------------------------------------------------------------


def _job(chosen: Candidate, bootstrap: Bootstrap, hints: Hints) -> Job:
    program, h = chosen.program, chosen.hypothesis
    protocol = _most([c.protocol for c in program.calls if c.protocol], "ll")
    algorithm = _most([c.algorithm for c in program.calls if c.algorithm], "ring")
    for call in program.calls:
        call.protocol = None if call.protocol in (None, protocol) else call.protocol
        call.algorithm = None if call.algorithm in (None, algorithm) else call.algorithm
    first = h.connections[0].connection
    rings = [list(r) for r in h.topology.rings]
    if all(r == rings[0] for r in rings):
        rings = [] if rings[0] == list(range(h.ranks)) else rings[:1]
    parents = hints.given.communicator.parent_ranks if hints.given else parents_of(h.ranks, h.connections)
    tried = h.variant
    communicator = Communicator(
        ranks=h.ranks, nccl_version=tried.version, protocol=protocol, algorithm=algorithm, channels=tried.channels,
        rings=rings, mtu=tried.mtu, adaptive_routing=any(on.connection.pairs for on in h.connections),
        qps_per_connection=len(first.flows) // first.devices, split_data_on_qps=first.used > first.devices,
        devices=first.devices, parent_ranks=list(parents),
        buffer_bytes={name: 8 * size for name, size in zip(("ll", "ll128", "simple"), tried.slot_bytes, strict=True)},
    )
    if hints.optimizer is not None and not program.model:
        raise UserError(
            "--optimizer given, but the parameters were not announced in the captures", where="--optimizer",
            remedy="capture from the job's start (DDP broadcasts shapes and parameters), or give a manifest with --job",
        )
    job = Job(
        communicator=communicator, flows=_flows(h, bootstrap), collectives=program.collectives,
        buckets=program.buckets, model=program.model, gradients=Gradients(program.dtype),
        optimizer=optimizer_of(hints, [entry.name for entry in program.model]), run_id="learnt",
    )
    return job_from_dict(job.to_dict(), where="the learnt job")


def _most(named: list[str], otherwise: str) -> str:
    return max(sorted(set(named)), key=named.count) if named else otherwise


def _flows(h: Hypothesis, bootstrap: Bootstrap) -> list[Flow]:
    """The manifest's connections: those that carry data, and those that a bootstrap names besides."""
    out: dict[tuple[int, int, int], Flow] = {}
    for on in h.connections:
        c, place = on.connection, (on.channel, on.src, on.dst)
        cts = h.qps[place][1] if place in h.qps else c.cts_qpns
        each = [[f.src for f in c.flows], [f.dst for f in c.flows]] if c.devices > 1 else []
        out[place] = Flow(on.src, on.dst, on.channel, c.src, c.dst, [f.qpn for f in c.flows], [*cts], *each)
    for f in bootstrap.connections:
        place = f.channel, f.src, f.dst
        if place not in out and _is_of(f, h):
            out[place] = Flow(f.src, f.dst, f.channel, f.sender.gid, f.receiver.gid, [*f.qpns], [*f.cts_qpns])
    return [out[place] for place in sorted(out)]


def _is_of(flow: BootstrapConnection, h: Hypothesis) -> bool:
    """Is this one of the communicator's ring connections, with addresses that a manifest can name?"""
    try:
        for side in (flow.sender, flow.receiver):
            ipaddress.ip_address(side.gid)
    except ValueError:
        return False
    named = h.qps.get((flow.channel, flow.src, flow.dst))
    return flow.graph == "ring" and named == (flow.qpns, flow.cts_qpns)
