"""What an engine knows about an iteration, put before the verdict: one way, for replays and for the live node.

    collector = EvidenceCollector(plan, engine)
    judged = collector.collect(iteration, streams, record=..., follows=..., final=...)     when the iteration closes
    judged = judged.with_checksum("mismatch")       if the trainer's checksum was compared later
    judged = judged.with_stale(0)                   if its version was built from holes, and patched

Reads the engine between runs, on the thread that runs it; decides nothing itself (verdict.py does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from parser.machine import Engine

from flowcheck.rebuild.iteration.capture_times import CaptureTimes, Found
from flowcheck.rebuild.iteration.evidence import BucketCoverage, Carried, bucket_coverage, packets_by_outcome
from flowcheck.rebuild.iteration.given import NOTHING, Hearsay
from flowcheck.rebuild.iteration.holes import Finality
from flowcheck.rebuild.iteration.intervals import intervals, total, without
from flowcheck.rebuild.iteration.merger import filled
from flowcheck.rebuild.iteration.rank_confirmation import contradiction, other_version
from flowcheck.rebuild.iteration.verdict import BucketEvidence, Evidence, StreamEvidence, Verdict, judge
from flowcheck.rebuild.iteration.wording import describe_difference, describe_disagreement, flow_name, refusal
from flowcheck.rebuild.plan import JobPlan
from parser.engine_config import Target

__all__ = ["EvidenceCollector", "Judged"]

NAMED = 3  # copies that differ, by connection and PSN: each costs a walk over an iteration's messages


@dataclass(frozen=True)
class Judged:
    """One iteration as it closed. buckets: of gradients; groups: of gathered parameters. filled: cells by the source
    that filled them (merger.py). counts: of packets since the one before closed: packets, placed, gaps, duplicates."""

    evidence: Evidence
    verdict: Verdict
    buckets: list[BucketCoverage]
    groups: list[BucketCoverage]
    filled: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def with_checksum(self, found: Literal["match", "mismatch"]) -> Judged:
        evidence = replace(self.evidence, checksum=found)
        return replace(self, evidence=evidence, verdict=judge(evidence))

    def with_stale(self, elements: int) -> Judged:
        """elements: of its version that wait for the trainer's state; 0: all that had to was patched."""
        evidence = replace(self.evidence, stale=elements)
        return replace(self, evidence=evidence, verdict=judge(evidence))


class EvidenceCollector:
    def __init__(self, plan: JobPlan, engine: Engine) -> None:
        self._plan, self._engine, self._carried = plan, engine, Carried(plan)
        self.times: CaptureTimes | None = None  # of captures, which may be of several runs
        self._cells = -(-plan.engine.gradient_bytes // 8)
        self.given, self.hearsay = NOTHING, Hearsay()  # of the iteration that closes; what its version holds with it
        self._data = np.array([flow.data for flow in plan.engine.flows], bool)
        self._counts = Counter[str]()

    def collect(
        self, iteration: int, streams: tuple[StreamEvidence, ...], *, record: bool, follows: bool,
        final: Finality, flows: np.ndarray | None = None,
    ) -> Judged:
        """record: the step record of the iteration is here. follows: the version before it was published. final: why it
        gets nothing more (holes.py). flows: Engine.flows() as of now, if it is known."""
        plan, engine = self._plan, self._engine
        flows = engine.flows() if flows is None else flows
        found = bucket_coverage(plan, engine, iteration, flows, self._carried, self.given)
        buckets = [b for b in found if b.place.carries == "gradient"]
        groups = [b for b in found if b.place.carries == "parameters"]
        disagreements = engine.disagreements()
        sentences = [describe_disagreement(plan, d) for d in disagreements if d["iteration"] == iteration]
        if iteration in engine.unlogged:
            sentences.append("more disagreements than the log holds")
        differ, offset, _ = engine.copies(iteration)
        kept = self._counted_all_the_same(iteration, differ, found)
        times = self.times.look(iteration) if self.times is not None else Found("", ())
        evidence = Evidence(
            iteration=iteration,
            buckets=tuple(
                BucketEvidence(b.place.index, b.place.elements, b.covered, b.missing, what)
                for what, part in (("bucket", buckets), ("parameter group", groups))
                for b in part
            ),
            final="" if all(b.complete for b in found) else final,
            unanchored=tuple(self._unanchored(flows)),
            disagreements=tuple(sentences),
            recovered=tuple(self._recovered(flows, iteration)),
            icrc_checked=plan.engine.check_icrc,
            streams=streams,
            differences=(*(self._differences(iteration, streams, flows) if differ else ()), *self._peers_differ()),
            copies_disagreed=kept * 8,
            copies_first=f"byte {offset} of the iteration's region" if differ else "",
            step_record_declared=bool(plan.job.step_values),
            step_record_present=record,
            checksum=None,
            refused=self.refused(disagreements),
            another_run=times.refused,
            times=times.marks,
            previous_published=follows,
            stale=None,
            from_peers=str(self.hearsay),
        )
        came = filled(engine, iteration, self._cells, self.given)
        return Judged(evidence, judge(evidence), buckets, groups, came)

    def grown(self, flows: np.ndarray) -> dict[str, int]:
        """Packets that have come since this was asked last, those placed, PSNs that never came and that came again."""
        outcomes = packets_by_outcome(self._plan, self._engine)
        now = {
            "packets": sum(outcomes.values()), "placed": outcomes["placed"], "gaps": int(flows["gaps"].sum()),
            "duplicates": int(flows["duplicates"].sum()),
        }
        grown = {what: count - self._counts[what] for what, count in now.items()}
        self._counts = Counter(now)
        return grown

    def _counted_all_the_same(self, iteration: int, differ: int, found: list[BucketCoverage]) -> int:
        """Cells whose copies differ although they count as there, of `differ` that were found. None, unless the
        books of the engine are wrong."""
        if not differ:
            return 0
        void = self._engine.void_cells(iteration, 0, self._cells)
        of_buckets = intervals([(b.place.cells.start, b.place.cells.stop) for b in found])
        return total(without(void, of_buckets)) if len(void) else differ

    def _differences(
        self, iteration: int, streams: tuple[StreamEvidence, ...], flows: np.ndarray
    ) -> Iterator[str]:
        """A sentence for each of the first copies that differed, as far as the engine's log has them."""
        logged = [one for one in self._engine.differences()
                  if one["iteration"] == iteration and one["target"] == Target.GRADIENT]
        for number, one in enumerate(logged):
            if number == NAMED:
                yield f"and {len(logged) - NAMED} more"
                break
            others = [
                (streams[stream].name, flow, psn)
                for flow, psn in self._engine.carriers(iteration, one["offset"]) for stream in range(len(streams))
                if flows[stream, flow]["packets"] and (stream, flow) != (one["stream"], one["flow"])
            ]
            yield describe_difference(self._plan, streams[one["stream"]].name, one, others)

    def _peers_differ(self) -> Iterator[str]:
        for peer, why in self.given.refused.items():
            yield f"peer {peer}: {why}"

    def refused(self, disagreements: list[dict]) -> str:
        """Why the traffic as a whole is not what the manifest describes, or ""."""
        plan, engine = self._plan, self._engine
        return (
            refusal(plan, disagreements)
            or contradiction(plan, engine.cts_tags())
            or other_version(plan, engine.cts_forms(), disagreements)
        )

    def _recovered(self, flows: np.ndarray, iteration: int) -> Iterator[str]:
        """Calls that the manifest does not list and that fill whole iterations agree with the count as well as the
        manifest's own do: what comes after a disagreement is right only if no such call was its cause."""
        since, until = flows["ignored_from"], flows["ignored_until"]
        for stream, flow in np.argwhere(self._data & (since < until) & (until <= iteration)).tolist():
            name = flow_name(self._plan.job, self._plan.engine.flows[flow].edge)
            yield f"{name}: disagreed in iteration {since[stream, flow]}, trusted again from {until[stream, flow]} on"

    def _unanchored(self, flows: np.ndarray) -> Iterator[str]:
        unproven = self._data & (flows["packets"] > 0) & (flows["anchored"] == 0) & (flows["trusted"] > 0)
        for _, flow in np.argwhere(unproven).tolist():
            yield flow_name(self._plan.job, self._plan.engine.flows[flow].edge)
