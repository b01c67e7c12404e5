"""A mirror that loses copies, and a node that says what it misses: how often an iteration stays incomplete, counted.

    found = count_incomplete(FabricConfig(name, ranks=4, mirrored=((0, 2),), ...), 0.02, 150, folder)    -> Counted

Each copy on the way to the node is lost by the impairer with this probability, from a seed, and every other one is in
its log. So it is known of each reduced packet how many copies of it were made, and how many got through: by NCCL's
schedule as `synth` has it and the log alone, with nothing of the parser. Beside it stands what the node itself misses.
Root, as the lab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import Collective, Collectives, Communicator, Job
from lab.jobs import Training
from lab.network.fabric import Fabric
from lab.network.impair import Event, Impairment
from lab.run import LabRun
from lab.shape import FabricConfig
from lab.synth.generate import operation_of
from lab.synth.schedule import message_bytes, messages

__all__ = ["MTU", "Copies", "Counted", "copies_of", "count_incomplete"]

MTU = 1024
ARENAS = 4  # of a node, as it comes: by then an iteration has closed
WRITES = range(6, 12)  # opcodes of RC RDMA WRITE
SOFTROCE = {"protocol": "LL", "mtu": MTU, "family": "2.27", "seed": 1}
Connection = tuple[int, int, int]


class Copies(NamedTuple):
    """Of a reduced packet: copies that were made of it, and those of them that got through."""

    made: int
    passed: int


@dataclass(frozen=True)
class Counted:
    """judged: iterations that the node said something of. incomplete: those of which it missed something. unseen: those
    of which some reduced packet came in no copy, by the log. copies: of an iteration, number of copies -> reduced
    packets that are copied so often. rings: orders of the ranks, by channel. calls: elements of an iteration's
    AllReduces, by NCCL of `version`. sent, lost: copies of data, by the log."""

    judged: frozenset[int]
    incomplete: frozenset[int]
    unseen: frozenset[int]
    copies: Mapping[int, int]
    rings: Sequence[Sequence[int]]
    calls: Sequence[int]
    version: str
    sent: int
    lost: int

    @property
    def packets(self) -> int:
        """Distinct reduced packets of an iteration."""
        return sum(self.copies.values())


def count_incomplete(config: FabricConfig, drop: float, iterations: int, out: Path, seed: int = 1) -> Counted:
    """Train so many iterations with one node, and count. Raises EnvironmentProblem where packets were lost
    elsewhere as well: in the node's rings, or before the cable."""
    wire = Impairment("mirror0", way="from", drop=drop, seed=seed, trace=True)
    job = Training(model="mlp", ranks=config.ranks, softroce=SOFTROCE)
    with Fabric(replace(config, impairments=(wire,))) as fabric, LabRun(fabric, out) as run:
        run.start_nodes(job)
        first = run.attach(job)
        for _ in range(iterations):  # one by one: no losses but the impairer's
            run.train(1)
            run.wait_for_nodes(run.iterations[-1]["iteration"] - ARENAS)
        run.end()
        run.wait_for_nodes(run.trained - 1)
        run.finish_nodes()
        capture = next(said["text"] for _, said in run.events if said["event"] == "capture")
        fabric.impairer.stop()
        log = [event for event in fabric.impairer.events() if event.port == "mirror0" and event.opcode in WRITES]
        ranks, lines = run.communicators, run.iterations
        said = [one for _, one in run.events if one["event"] == "iteration" and one["iteration"] >= first]
    if "+ 0 kernel ring full" not in capture or "+ 0 ring full" not in capture:
        raise EnvironmentProblem(f"the node itself has lost packets: {capture}", where="flowcheck lab",
                                 remedy="less beside it on this machine")
    calls = ranks[0]["calls"]
    communicator = Communicator(**ranks[0]["communicator"])
    by_call = copies_of(communicator, calls, _queue_pairs(ranks), log)
    ends = {line["iteration"]: line["calls"] for line in lines}
    spans = {i: range(ends[i - 1], end) for i, end in ends.items() if i - 1 in ends}
    judged = [i for i in sorted(one["iteration"] for one in said) if i in spans]
    packets = {i: [each for call in spans[i] for each in by_call[call]] for i in judged}
    shapes = {tuple(sorted(Counter(each.made for each in packets[i]).items())) for i in judged}
    elements = {tuple(calls[call]["count"] for call in spans[i]) for i in judged}
    if len(shapes) != 1 or len(elements) != 1:
        raise EnvironmentProblem("iterations have different copies: the mirror has lost some before the cable",
                                 where="flowcheck lab", remedy="less beside it on this machine")
    return Counted(
        judged=frozenset(judged),
        incomplete=frozenset(one["iteration"] for one in said if one["missing"]) & set(judged),
        unseen=frozenset(i for i in judged if not all(each.passed for each in packets[i])),
        copies=dict(*shapes), rings=[communicator.ring(channel) for channel in range(communicator.channels)],
        calls=next(iter(elements)), version=communicator.nccl_version, sent=len(log),
        lost=sum(event.what == "dropped" for event in log),
    )


def copies_of(
    communicator: Communicator, calls: Sequence[Mapping[str, Any]], queue_pairs: Mapping[Connection, int],
    log: Sequence[Event],
) -> list[list[Copies]]:
    """Of each call, its reduced packets. calls: all of the communicator's life; log: of data packets alone."""
    job = Job(communicator, [], Collectives())
    made = Counter((event.qpn, event.psn) for event in log)
    passed = Counter((event.qpn, event.psn) for event in log if event.what == "passed")
    psns = dict.fromkeys(queue_pairs, 0)
    found = []
    for call in calls:
        op = operation_of(job, Collective(**call))
        copies: dict[tuple[int, int, int], Copies] = {}
        for connection, sent in messages(op).items():
            for message in sent:
                for number in range(max(1, -(-message_bytes(op, message, 0) // MTU))):
                    key = queue_pairs[connection], psns[connection]
                    psns[connection] += 1
                    if message.reduced and call["op"] == "AllReduce":
                        where = connection[0], message.start, number
                        more = copies.get(where, Copies(0, 0))
                        copies[where] = Copies(more.made + made[key], more.passed + passed[key])
        found.append([*copies.values()])
    return found


def _queue_pairs(ranks: Sequence[Mapping[str, Any]]) -> dict[Connection, int]:
    return {(flow["channel"], flow["src"], flow["dst"]): flow["qpns"][0] for rank in ranks for flow in rank["flows"]}
