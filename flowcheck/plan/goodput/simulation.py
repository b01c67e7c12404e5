"""A job under failures, event by event (simpy): what the closed forms are checked against, and what they cannot say.

Without bursts the simulation makes renewal.py's assumptions and nothing of its algebra: checkpoints are taken one by
one, failures interrupt, what is not yet usable is thrown away. With `Bursts` it leaves them: failures that take a whole
leaf or rack, failures that follow each other, copies that are only whole again at the next checkpoint. For those no
closed form is offered.

    run(system, cluster, failures=2000, seed=1).share      with .low and .high: 99.9 % of runs have the truth between

One run is one seed: the same inputs give the same figures.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flowcheck.checkpoint.coding.holders import across_domains
from flowcheck.errors import EnvironmentProblem, installing
from flowcheck.plan.answers.answer import need, need_at_most, need_positive, need_probability
from flowcheck.plan.goodput.cluster import Cluster
from flowcheck.plan.goodput.renewal import Rhythm
from flowcheck.plan.goodput.systems import Survives, System

if TYPE_CHECKING:
    import simpy

__all__ = ["BATCHES", "CONFIDENCE", "Bursts", "Estimate", "run", "t_quantile"]

BATCHES = 40  # of failures, for the confidence interval
CONFIDENCE = 0.999  # ten systems are looked at together: a false alarm in one of a hundred looks


@dataclass(frozen=True)
class Bursts:
    """Failures that come together.

    leaf, rack: share of the failures that take all servers of one leaf, or rack; checkpoint nodes are spread evenly
    over the leaves, and a leaf's nodes and mirrors die with it.
    follow: probability that a failure is followed by one more within `within` seconds (evenly), and so on; these come
    on top of failures_per_day.
    leaf_size, rack_size: servers. spread: groups of copies are formed across leaves, and not of neighbours.
    """

    leaf: float = 0.0
    rack: float = 0.0
    follow: float = 0.0
    within: float = 600.0
    leaf_size: int = 16
    rack_size: int = 4
    spread: bool = False

    def __post_init__(self) -> None:
        for name in ("leaf", "rack"):
            need_probability(getattr(self, name), f"--bursts {name}")
        need_probability(self.follow, "--bursts follow", below_one=True)
        need_probability(self.leaf + self.rack, "--bursts leaf and rack together")
        need_positive(self.within, "--follow-within", "seconds")
        need_at_most(self.within, 1e9, "--follow-within", "no job trains so long")
        for name in ("leaf_size", "rack_size"):
            need_at_most(getattr(self, name), 1_000_000, f"--{name.replace('_', '-')}", "no job has so many servers")
            need(getattr(self, name) >= 1, f"{getattr(self, name)} is not a number of servers",
                 f"--{name.replace('_', '-')}", "1 or more")

    @property
    def any(self) -> bool:
        return self.leaf + self.rack + self.follow > 0


@dataclass(frozen=True)
class Estimate:
    """Share of useful time; low, high: its confidence interval. lost: failures that took the tier's copies along."""

    share: float
    low: float
    high: float
    failures: int
    lost: int
    seconds: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def t_quantile(degrees: int, two_sided: float = CONFIDENCE) -> float:
    """Student's t, by its expansion around the normal (Abramowitz and Stegun 26.7.5); good to 1e-3 from 10 degrees."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + two_sided) / 2)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees ** (at + 1) for at, term in enumerate(terms))


@dataclass
class _Job:
    """One training job: what is done, what can be loaded, and from where.

    done counts checkpoint intervals of training that are in the state. pending: (when usable, number) of checkpoints
    on their way into memory, uploads: the same on their way to storage.
    """

    env: simpy.Environment
    rhythm: Rhythm
    dice: random.Random
    done: int = 0
    usable: int = 0
    stored: int = 0
    pending: deque[tuple[float, int]] = field(default_factory=deque)
    uploads: deque[tuple[float, int]] = field(default_factory=deque)
    restart: float = 0.0

    def train(self) -> Generator[simpy.Event, Any, Any]:
        import simpy

        while True:
            try:
                if self.restart:
                    yield self.env.timeout(self.restart)
                    self.restart = 0.0
                while True:
                    yield self.env.timeout(self.rhythm.length)
                    self.done += 1
                    if not self.rhythm.skipped or self.dice.random() >= self.rhythm.skipped:
                        self.pending.append((self.env.now + self.rhythm.lag, self.done))
                        if not self.rhythm.lag or len(self.pending) > 1:
                            self.settle()
            except simpy.Interrupt:
                pass  # fail() has said from where and how soon

    def settle(self) -> None:
        """What has become usable by now."""
        while self.pending and self.pending[0][0] <= self.env.now:
            when, number = self.pending.popleft()
            if number // self.rhythm.persist_every > max(self.usable, self.stored) // self.rhythm.persist_every:
                self.uploads.append((when + self.rhythm.persist_lag, number))
            self.usable = number
        while self.uploads and self.uploads[0][0] <= self.env.now:
            self.stored = self.uploads.popleft()[1]

    def fail(self, lost: bool) -> None:
        """Back to the newest usable checkpoint, or to storage if this tier's copies are lost."""
        self.settle()
        self.pending.clear()
        if lost:
            self.uploads.clear()
            self.usable = self.stored
        self.done = self.usable
        self.restart = self.rhythm.persist_restart if lost else self.rhythm.restart


@dataclass
class _Failures:
    """Who is hit when. survives: the system's own rule; whole_at: when copies lost before are whole again."""

    cluster: Cluster
    bursts: Bursts
    dice: random.Random
    survives: Survives
    base_lost: float
    nodes: int
    missing: set[int] = field(default_factory=set)
    whole_at: float = 0.0

    def gap(self, rate: float) -> float:
        if self.bursts.follow and self.dice.random() < self.bursts.follow:
            return self.dice.uniform(0, self.bursts.within)
        return self.dice.expovariate(rate)

    def hit(self) -> tuple[set[int], bool]:
        """(servers lost, a checkpoint node is lost with them)."""
        servers = self.cluster.servers
        roll = self.dice.random()
        if roll < self.bursts.leaf:
            leaves = -(-servers // self.bursts.leaf_size)
            leaf = self.dice.randrange(leaves)
            begin = leaf * self.bursts.leaf_size
            nodes_here = self.nodes // leaves + (leaf < self.nodes % leaves)
            return set(range(begin, min(servers, begin + self.bursts.leaf_size))), nodes_here > 0
        if roll < self.bursts.leaf + self.bursts.rack:
            begin = self.dice.randrange(-(-servers // self.bursts.rack_size)) * self.bursts.rack_size
            return set(range(begin, min(servers, begin + self.bursts.rack_size))), False
        if self.dice.random() < self.cluster.failures.hardware:
            return set(self.dice.sample(range(servers), self.cluster.failures.simultaneous)), False
        return set(), False

    def strike(self, now: float, whole_after: float) -> bool:
        """One failure at `now`. Are the tier's copies lost? whole_after: until lost copies are whole again."""
        hit, node = self.hit()
        if self.bursts.any:
            if now >= self.whole_at:
                self.missing.clear()
            self.missing |= hit
            if hit:
                self.whole_at = now + whole_after
            lost = node or not self.survives(frozenset(self.missing))
        else:
            lost = not self.survives(frozenset(hit))
        if lost:
            self.missing.clear()
        return lost or (self.base_lost > 0 and self.dice.random() < self.base_lost)


def _environment() -> simpy.Environment:
    try:
        import simpy
    except ImportError as error:
        raise EnvironmentProblem(
            f"{error.name} is not installed, and jobs are simulated with it", where="simulation",
            remedy=f"{installing(error)}; the closed forms of `goodput` do without",
        ) from None
    return simpy.Environment()


def run(system: System, cluster: Cluster, failures: int, seed: int, bursts: Bursts | None = None) -> Estimate:
    """Simulates until so many failures have come. Raises EnvironmentProblem without simpy, UserError for few failures.

    bursts: None for the closed forms' own assumptions.
    """
    bursts = bursts or Bursts()
    servers = cluster.servers
    order = list(range(servers))
    if bursts.spread:
        leaves = [f"{server // bursts.leaf_size:06}" for server in range(servers)]
        order = across_domains(leaves, system.group)
    dice = random.Random(seed)
    strikes = _Failures(cluster, bursts, dice, system.survives(order), system.base_lost, system.nodes)
    whole = system.rhythm.restart + system.rhythm.length + system.rhythm.lag
    return _simulate(system.rhythm, cluster.rate, failures, dice, lambda now: strikes.strike(now, whole), strikes.gap)


def _simulate(rhythm: Rhythm, rate: float, failures: int, dice: random.Random, strike: Any, gap: Any) -> Estimate:
    need(failures >= 2 * BATCHES, f"{failures} failures are too few for a confidence interval", "--failures",
         f"at least {2 * BATCHES}")
    env = _environment()
    job = _Job(env, rhythm, dice)
    training = env.process(job.train())
    per_batch, marks, lost = failures // BATCHES, [(0.0, 0)], 0

    def fail() -> Generator[simpy.Event, Any, Any]:
        nonlocal lost
        for number in range(1, per_batch * BATCHES + 1):
            yield env.timeout(gap(rate))
            taken = bool(strike(env.now))
            lost += taken
            job.fail(taken)
            training.interrupt()
            if number % per_batch == 0:
                marks.append((env.now, job.done))

    env.run(env.process(fail()))
    share = rhythm.work * marks[-1][1] / marks[-1][0]
    # A ratio of sums: its error is that of (useful - share * elapsed), batch by batch.
    apart = [rhythm.work * (b[1] - a[1]) - share * (b[0] - a[0]) for a, b in pairwise(marks)]
    spread = math.sqrt(math.fsum(one * one for one in apart) / (BATCHES - 1) / BATCHES)
    half = t_quantile(BATCHES - 1) * spread / (marks[-1][0] / BATCHES)
    return Estimate(share, share - half, share + half, per_batch * BATCHES, lost, marks[-1][0])
