"""Checkpointing systems as rhythms: how often, at what cost, how far back, and what takes the copies away.

    for system in systems(cluster): effective_share(system.rhythm, cluster.rate)
    recovers = system.survives(range(cluster.servers)); recovers(frozenset({3, 17}))

Each system's numbers come from its paper's own description (docstrings), so that all of them stand in the one closed
form of renewal.py and in the one simulation. Systems that keep copies in memory also write to storage every
`persist_hours`, and go back to that when a failure takes all holders of something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowcheck.checkpoint.coding.holders import Placement, place, ring
from flowcheck.plan.answers.answer import need
from flowcheck.plan.goodput.cluster import DAY, Cluster, named
from flowcheck.plan.goodput.renewal import Rhythm, best_interval
from flowcheck.plan.holders.placement import beyond_most, survival

__all__ = ["System", "by_name", "grouped_survivor", "systems"]

#: One strategy of Gemini's: the first where replicas divide the servers, else the second.
GEMINI = ("gemini-group", "gemini-mixed")

Survives = Callable[[frozenset[int]], bool]
Arrange = Callable[[Sequence[int]], Survives]


@dataclass(frozen=True)
class System:
    """One system on one cluster.

    rhythm: its closed form. why: in words, what decides its interval.
    survives: from the servers (numbered from 0) in the order in which they form groups, a function of the servers that
    are lost: can it recover from its own copies?
    group: neighbours in that order that form one group, 1: there are no groups.
    nodes: machines besides the trainers' servers. base_lost: the part of rhythm.lost that no loss of servers explains
    (checkpoint nodes that are away).
    """

    name: str
    rhythm: Rhythm
    why: str
    survives: Arrange
    group: int = 1
    nodes: int = 0
    base_lost: float = 0.0


def _iterations(seconds: float, cluster: Cluster) -> float:
    """The next whole number of iterations, in seconds: a checkpoint is taken between two of them."""
    return max(1, math.ceil(seconds / cluster.job.iteration - 1e-9)) * cluster.job.iteration


def _nearest(seconds: float, cluster: Cluster) -> float:
    return max(1, round(seconds / cluster.job.iteration)) * cluster.job.iteration


def _always(order: Sequence[int]) -> Survives:
    return lambda lost: True


def _only_without_loss(order: Sequence[int]) -> Survives:
    return lambda lost: not lost


def grouped_survivor(group: int, most: int) -> Arrange:
    """No group of `group` neighbours in the order may lose more than `most`; a rest that fills no group is harmless."""

    def arrange(order: Sequence[int]) -> Survives:
        of = {server: at // group for at, server in enumerate(order) if at < len(order) // group * group}

        def survives(lost: frozenset[int]) -> bool:
            counts: dict[int, int] = {}
            for server in lost:
                if server in of:
                    counts[of[server]] = counts.get(of[server], 0) + 1
            return all(count <= most for count in counts.values())

        return survives

    return arrange


def _placed(placement: Placement) -> Arrange:
    def arrange(order: Sequence[int]) -> Survives:
        position = {server: at for at, server in enumerate(order)}
        return lambda lost: placement.survives([position[server] for server in lost])

    return arrange


def _memory(
    cluster: Cluster, work: float, survived: float, *, lag: float, load: float, stall: float = 0.0,
    slowdown: float = 0.0, restart: float | None = None, base_lost: float = 0.0, skipped: float = 0.0,
) -> Rhythm:
    """A rhythm in memory with storage behind it. survived: probability for `simultaneous` servers lost at once."""
    from_storage = cluster.state / cluster.speeds.storage
    lost = 1 - (1 - cluster.failures.hardware * (1 - survived)) * (1 - base_lost)
    return Rhythm(
        work, stall, slowdown, lag, skipped, cluster.restart + load if restart is None else restart, lost,
        max(1, round(cluster.memory.persist_hours * 3600 / work)), from_storage, cluster.restart + from_storage,
    )


# -- one function per system -------------------------------------------------------------------------------------------


def _given_or(interval: float | None, best: float, least: float, name: str, cluster: Cluster) -> float:
    """The interval asked for, in whole iterations, or the best one; neither below the checkpoint's own time."""
    if interval is None:
        return max(_nearest(best, cluster), _iterations(least, cluster))
    need(interval >= least, f"{interval:g} s is below the {least:g} s that a checkpoint of {name} takes by itself",
         "--interval", f"{math.ceil(least)} or more, or none: the best interval is then computed")
    return _iterations(interval, cluster)


def _storage(cluster: Cluster, interval: float | None) -> System:
    """Training stops while all state goes to shared storage. Young (1974), Daly (2006)."""
    stall = cluster.state / cluster.speeds.storage
    work = _given_or(interval, best_interval(stall, cluster.rate), stall, "storage", cluster)
    return System("storage", Rhythm(work, stall, restart=cluster.restart + stall),
                  "best interval for the stall", _always)


def _disk(cluster: Cluster, interval: float | None) -> System:
    """Training stops while each server writes its part to its own disks; a lost server takes its part with it."""
    stall = cluster.state / cluster.servers / cluster.speeds.disk
    work = _given_or(interval, best_interval(stall, cluster.rate), stall, "disk", cluster)
    return System("disk", _memory(cluster, work, 0.0, lag=0.0, load=stall, stall=stall),
                  "best interval for the stall", _only_without_loss)


def _checkfreq(cluster: Cluster, interval: float | None) -> System:
    """Two phases: training stops while devices copy into host memory, then storage is written during training.

    CheckFreq (FAST'21). One checkpoint is on its way at a time, so the interval is at least what storage takes.
    """
    stall = cluster.state / cluster.job.gpus / cluster.speeds.device
    persist = cluster.state / cluster.speeds.storage
    work = _given_or(interval, best_interval(stall, cluster.rate), persist, "checkfreq", cluster)
    return System("checkfreq", Rhythm(work, stall, lag=persist, restart=cluster.restart + persist),
                  "storage's own time" if work > _nearest(best_interval(stall, cluster.rate), cluster)
                  else "best interval for the stall", _always)


def _gemini(cluster: Cluster, strategy: str) -> System:
    """Copies to m - 1 other servers in the idle spans of the network: 1/f >= max(t_ckpt, T_iter) (Gemini, eq. 2)."""
    servers, replicas = cluster.servers, cluster.memory.replicas
    made = ring(servers, replicas) if strategy == "ring" else place(servers, replicas)
    part = cluster.state / servers
    transfer = (replicas - 1) * part / cluster.speeds.spare
    return System(
        f"gemini-{made.strategy}",
        _memory(cluster, _iterations(transfer, cluster), survival(made, cluster.failures.simultaneous),
                lag=transfer, load=part / cluster.speeds.spare),
        "the time of the copies" if transfer > cluster.job.iteration else "every iteration", _placed(made), replicas,
    )


def _eccheck(cluster: Cluster) -> System:
    """k data and m parity servers per group; devices copy first, blocking, then m s W bytes cross. ECCheck."""
    group, most = cluster.memory.code_data + cluster.memory.code_parity, cluster.memory.code_parity
    stall = cluster.state / cluster.job.gpus / cluster.speeds.device
    part = cluster.state / cluster.servers
    transfer = most * part / cluster.speeds.spare
    work = max(_nearest(best_interval(stall, cluster.rate), cluster), _iterations(transfer, cluster))
    survived = beyond_most(cluster.servers, group, most, cluster.failures.simultaneous)
    rhythm = _memory(cluster, work, survived, lag=transfer, load=part / cluster.speeds.spare, stall=stall)
    return System("eccheck", rhythm, "best interval for the stall", grouped_survivor(group, most), group)


def _reft(cluster: Cluster) -> System:
    """Snapshots during computation, XOR within sharding groups without network; one loss per group. REFT (HAS, AEC)."""
    snapshot = cluster.state / cluster.job.gpus / cluster.speeds.device
    survived = beyond_most(cluster.servers, cluster.memory.reft_group, 1, cluster.failures.simultaneous)
    return System(
        "reft",
        _memory(cluster, _iterations(snapshot, cluster), survived, lag=snapshot, load=cluster.memory.reft_load,
                slowdown=cluster.memory.reft_slowdown),
        "every iteration" if snapshot <= cluster.job.iteration else "the time of the snapshot",
        grouped_survivor(cluster.memory.reft_group, 1), cluster.memory.reft_group,
    )


def _just_in_time(cluster: Cluster, transparent: bool) -> System:
    """Healthy ranks save when one fails; half a minibatch is repeated. Just-in-time (EuroSys'24), sections 3 and 4.

    Servers that hold the same shards form a group of `data_parallel`; if all of it are lost, storage is left. With more
    replicas than servers every server holds all shards.
    """
    group = min(cluster.job.data_parallel, cluster.servers)
    survived = beyond_most(cluster.servers, group, group - 1, cluster.failures.simultaneous)
    failures, jit = cluster.failures, cluster.jit
    if transparent:
        hard = failures.hardware
        restart = failures.detect + hard * (failures.replacement + jit.jit_hard) + (1 - hard) * jit.jit_transient
    else:
        restart = cluster.restart + jit.jit_user
    return System(
        "jit-transparent" if transparent else "jit-user",
        _memory(cluster, cluster.job.iteration, survived, lag=0.0, load=0.0, restart=restart,
                slowdown=cluster.jit.jit_steady),
        "when something fails", grouped_survivor(group, group - 1), group,
    )


def _flowcheck(cluster: Cluster) -> System:
    """A version per iteration on checkpoint nodes, from mirrored traffic; nothing is added to training.

    Lost with a failure that comes while a node is away (it fails and is attached again), and for the simulation with
    the node's leaf. A version skipped is an iteration that stays incomplete.
    """
    away = cluster.flowcheck.node_failures * cluster.flowcheck.node_repair / DAY
    need(away < 1, "checkpoint nodes fail faster than they are repaired", named("node_failures"),
         f"fewer failures, or a shorter {named('node_repair')}")
    load = cluster.state / (cluster.flowcheck.nodes * cluster.flowcheck.node_speed)
    return System(
        "flowcheck",
        _memory(cluster, cluster.job.iteration, 1.0, lag=cluster.flowcheck.version_lag, load=load, base_lost=away,
                skipped=cluster.flowcheck.incomplete),
        "every iteration", _always, nodes=cluster.flowcheck.nodes, base_lost=away,
    )


def systems(cluster: Cluster, interval: float | None = None) -> list[System]:
    """Every system on this cluster. interval: seconds, for the periodic ones; None: the best. Raises UserError."""
    need(cluster.failures.failures_per_day > 0, "no interval is the best one without failures", "--failures-per-day",
         "a number above 0")
    memory = [_gemini(cluster, "algorithm"), _gemini(cluster, "ring"), _eccheck(cluster), _reft(cluster)]
    return [
        _flowcheck(cluster), _storage(cluster, interval), _disk(cluster, interval), _checkfreq(cluster, interval),
        *memory, _just_in_time(cluster, False), _just_in_time(cluster, True),
    ]


def by_name(found: Sequence[System], names: Sequence[str]) -> list[System]:
    """Those of these names, in that order, or all. Raises UserError for a name that is not there."""
    known = {system.name: system for system in found}
    for name in names:
        other = next((one for one in GEMINI if name in GEMINI and one in known), "")
        why = (f"; {other} is what it is here, as its replicas {'do not ' * (name == GEMINI[0])}divide the servers"
               if other else "")
        need(name in known, f"{name} is not one of {', '.join(known)}{why}", "--system",
             f"{other}, or another number of {named('replicas')}" if other else "name one of them")
    return [known[name] for name in names] or list(found)
