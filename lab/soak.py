"""`flowcheck lab soak`: training at full load for long, with faults, and whether the node loses track or grows.

    with Fabric(config) as fabric, LabRun(fabric, out, api=True, node_settings=SETTINGS) as run:
        report = soak(run, job, Plan(minutes=30.0), say)
    report.good, report.lines()

The mirror loses packets all the time. A rank is killed every few minutes, at random, and the job goes on from the node.
In the middle the node itself is killed and started again. Everything that trainers did is held against what the node
has said and published: an iteration is *equal* (its version is, bit for bit), *not published* for a reason that was
said, *joining* (before the first version after a start of the job or of the node), or *away* (there was no node). What
is none of these is *unaccounted*, and what was repeated after a fault must be what it was before.

Memory and open files of the node's processes are sampled all the time. A trend is a regression over what they have
when a process has warmed up; it grows where its slope is above zero by more than twice its standard error. Each start
of a job and each recovery takes a little that is kept, 100 KiB at first and always less: it ends after a hundred. So
ranks are killed one after the other while the node's processes warm up.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowcheck.errors import EnvironmentProblem
from lab.jobs import Training
from lab.run import LabRun
from lab.trainer import INSTANTS

__all__ = ["SETTINGS", "Plan", "Report", "Sample", "Trend", "account", "soak", "trend"]

# Shadow mode as well: what recovery takes has earned it, also after the node was killed.
SHADOW = 3
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "replica": {"slots": 4}, "capture": {"ring_size": 1 << 15}, "api": {"shadow": SHADOW},
}
CHUNK = 10  # iterations between two looks at the clock
BEFORE = 2  # iterations between the last one that was asked for and the one in which a rank dies
AFTER = 2  # that the others would train on: they stand still in the first
MOST = 2000  # iterations in which a version must have been made
SAMPLE_SECONDS = 1.0
BLOCK = 10  # samples of which one is made: neighbours are not independent
WARM = 1 / 3  # of a process's life
WARMING = 60  # times as often ranks are killed meanwhile, as far as starting them again takes no longer
LEAST_BLOCKS = 5
PAGES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Plan:
    """minutes: of training. kill_seconds: between two ranks that are killed, once the node has warmed up. seed: of who
    dies, and when."""

    minutes: float = 30.0
    kill_seconds: float = 180.0
    seed: int = 1


# -- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Of a process: seconds of a clock, bytes of memory that are its own (not those of files, nor of replicas), open
    files."""

    at: float
    memory: int
    files: int


@dataclass(frozen=True)
class Trend:
    """slope: bytes in an hour. error: its standard error. files: how many were open in the first and the last third of
    what counts, the median: while a rank is away its connections are, too. samples: that count."""

    slope: float
    error: float
    files: tuple[int, int]
    samples: int

    @property
    def grows(self) -> bool:
        return self.slope - 2 * self.error > 0

    @property
    def flat(self) -> bool:
        return not self.grows and self.files[1] <= self.files[0]


def trend(samples: Sequence[Sample]) -> Trend | None:
    """Of what follows the warm-up. None: that is too short to say anything."""
    if not samples:
        return None
    warm = samples[0].at + WARM * (samples[-1].at - samples[0].at)
    counted = [one for one in samples if one.at >= warm]
    blocks = [counted[i : i + BLOCK] for i in range(0, len(counted) - BLOCK + 1, BLOCK)]
    if len(blocks) < LEAST_BLOCKS:
        return None
    at = [statistics.fmean(one.at for one in block) / 3600 for block in blocks]
    memory = [statistics.fmean(one.memory for one in block) for block in blocks]
    mean, level = statistics.fmean(at), statistics.fmean(memory)
    spread = sum((x - mean) ** 2 for x in at)
    slope = sum((x - mean) * (y - level) for x, y in zip(at, memory, strict=True)) / spread
    rest = sum((y - level - slope * (x - mean)) ** 2 for x, y in zip(at, memory, strict=True))
    third = len(counted) // 3
    first, last = (sorted(one.files for one in part)[third // 2] for part in (counted[:third], counted[-third:]))
    return Trend(slope, (rest / (len(at) - 2) / spread) ** 0.5, (first, last), len(counted))


class Meter:
    """A thread that samples processes until it is closed. pids(): of the nodes that there are now."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids, self._over = pids, threading.Event()
        self.samples: dict[tuple[int, str], list[Sample]] = {}
        self._thread = threading.Thread(target=self._main, name="soak meter", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for pid in list(self._pids()):
                for one, role in [(pid, "node"), *_children(pid)]:
                    if sample := _sample(one):
                        self.samples.setdefault((one, role), []).append(sample)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _children(pid: int) -> list[tuple[int, str]]:
    """What the node has started, by the module that each runs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, task.read_text().split()):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                modules = [word.decode() for word in words if word.startswith(b"flowcheck.")]
                found += [(child, module.removesuffix(".worker").rpartition(".")[2]) for module in modules]
        except OSError:
            continue  # it has ended
    return found


def _sample(pid: int) -> Sample | None:
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        if not resident:
            return None  # it has ended, and nobody has asked for its status
        return Sample(time.monotonic(), (resident - shared) * PAGES, len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, ValueError):
        return None


# -- what became of iterations -------------------------------------------------------------------------------------


@dataclass
class Report:
    """verdicts: iterations by what became of them. why: reasons of those that were not published. odd: what is
    unaccounted or differs, in words. trends: by role and the order of starts."""

    seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    repeated: int = 0
    restarts: int = 0
    tensors: int = 0
    trends: dict[str, Trend | None] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Also that there was something to go wrong."""
        known = [one for one in self.trends.values() if one is not None]
        return (not self.odd and self.verdicts["equal"] > 0 and set(self.statuses) <= {0} and bool(self.kills)
                and self.restarts > 0 and bool(known) and all(one.flat for one in known))

    def lines(self) -> list[str]:
        total = sum(self.verdicts.values())
        out = [f"{total} iterations in {self.seconds / 60:.1f} minutes: "
               + ", ".join(f"{name} {count}" for name, count in self.verdicts.most_common())]
        out += [f"not published: {count} for {why}" for why, count in self.why.most_common()]
        out += [f"{self.tensors} tensors of published versions were compared by SHA-256",
                f"ranks killed: {'; '.join(self.kills) or 'none'}",
                f"{self.repeated} iterations were done again, and are what they were; the node was killed and started"
                f" {self.restarts} times"]
        for role, one in self.trends.items():
            out.append(f"{role}: too short to say anything of its memory" if one is None else
                       f"{role}: memory {one.slope / 2**20:+.2f} MiB an hour, standard error {one.error / 2**20:.2f};"
                       f" open files {one.files[0]} and {one.files[1]}; {one.samples} samples"
                       f"{'' if one.flat else ': GROWS'}")
        out += [f"ODD: {one}" for one in self.odd[:20]]
        return out


def account(
    report: Report, rows: Iterable[tuple[int, str, str, int]], away: Callable[[int], bool], said: Callable[[int], bool]
) -> None:
    """rows: (iteration, verdict, why, tensors) of the ledger, of one start of the job. away: was there no node, or one
    that had only just come back? said: has the node said that it has closed?"""
    for iteration, verdict, why, tensors in rows:
        report.tensors += tensors
        if verdict == "waiting" and why == "trainers":
            verdict = "cut"  # not all ranks have done it: the one that died has not
        elif verdict == "no state yet":
            verdict = "joining"
        elif away(iteration) and not said(iteration):
            verdict = "away"
        elif verdict == "not published" and why and said(iteration):
            report.why[why] += 1
        elif verdict != "equal":
            report.odd.append(f"iteration {iteration} is {verdict}: {why or 'the node has not said why'}")
            verdict = "differs" if verdict == "differs" else "unaccounted"
        report.verdicts[verdict] += 1


# -- the soak ------------------------------------------------------------------------------------------------------


class _Soak:
    def __init__(self, run: LabRun, job: Training, plan: Plan, say: Callable[[str], None]) -> None:
        self._run, self._job, self._plan, self._say = run, job, plan, say
        self._draw = random.Random(plan.seed)
        self.report = Report()
        self._away: list[tuple[int, int]] = []  # iterations [first, after the last) of this start of the job
        self._said: set[int] = set()  # iterations that nodes before the one of now have closed, of this start
        self._before: dict[int, list[Any]] = {}  # hashes of every rank, of the last iterations before the fault
        self._from = 0  # where the node's events about this start of the job begin

    def go(self) -> Report:
        run, plan = self._run, self._plan
        run.start_nodes(self._job)
        run.attach(self._job)
        self._until_offered()  # whoever is killed before that has nothing to go on from
        begin = started = time.monotonic()
        life, killed = 30 * plan.minutes, begin
        while (now := time.monotonic()) < begin + 2 * life:
            warm = now - started >= WARM * life
            if now - killed >= plan.kill_seconds / (1 if warm else WARMING):
                self._kill_a_rank()
                killed = time.monotonic()
            elif started == begin and now - begin >= life:
                self._kill_the_node()
                started = time.monotonic()
            else:
                run.train(CHUNK)
        run.end()
        run.wait_for_nodes(self._last)
        self._close()
        self.report.seconds = time.monotonic() - begin
        self.report.statuses = run.finish_nodes()
        return self.report

    @property
    def _last(self) -> int:
        return max(line["iteration"] for line in self._run.iterations)

    def _kill_a_rank(self) -> None:
        run, died = self._run, self._last + BEFORE
        rank, at = self._draw.randrange(self._job.ranks), self._draw.choice(INSTANTS)
        run.train_and_die(died + AFTER - self._last, rank=rank, iteration=died, at=at)
        run.wait_for_nodes(died - 1)
        self._close()
        self._before = {number: self._hashes(number) for number in range(died - 8, died + 1)}
        run.start_trainers_again()
        self._from = len(run.events)
        run.begin(self._job, attach=True, recover=True)
        steps = {one["step"] for one in run.recovered}
        if len(steps) != 1 or 0 in steps:
            self.report.odd.append(f"ranks went on from steps {sorted(steps)} after iteration {died}")
        step = min(steps)
        self._until_offered()
        self._repeated(died)
        self.report.kills.append(f"{rank} in {at} of {died}, on from {step}")
        self._say(f"rank {rank} was killed in the {at} of iteration {died}; the job went on from {step}")

    def _repeated(self, died: int) -> None:
        """What was done before the fault and is done again is the same."""
        for number, hashes in self._before.items():
            again = self._hashes(number)
            if number <= died and len(again) == len(hashes) == self._job.ranks:
                self.report.repeated += 1
                if again != hashes:
                    self.report.odd.append(f"iteration {number} is another one when it is done again")

    def _hashes(self, iteration: int) -> list[Any]:
        return [(one["tensors"], one["optimizer"]) for one in self._run.ledger.ranks(0, iteration)]

    def _kill_the_node(self) -> None:
        run = self._run
        closed = self._closed()
        run.kill_nodes()
        closed |= self._closed()  # what it had said before it was killed
        first = max(closed, default=-1) + 1
        run.train(CHUNK)
        run.start_nodes(self._job)
        self._said, self._from = self._said | closed, 0
        self._until_offered()
        begun = min(said["iteration"] for said in self._iterations() if said["published"])
        self._away.append((first, begun))
        self.report.restarts += 1
        self._say(f"the node was killed after iteration {first - 1}, and publishes again from {begun} on")

    def _iterations(self) -> list[dict[str, Any]]:
        """What the node has said of them since this start of the job, or its own."""
        return [said for _, said in self._run.events[self._from :] if said["event"] == "iteration"]

    def _closed(self) -> set[int]:
        return {said["iteration"] for said in self._iterations()}

    def _until_offered(self) -> None:
        """A version is made of what is trained now, and recovery may take it. Raises EnvironmentProblem: none is."""
        first: int | None = None  # numbers go on from those before a fault, and may not be there yet
        while not any(said["published"] and said["matches"] >= SHADOW for said in self._iterations()):
            if self._run.iterations:
                first = self._last if first is None else first
            if first is not None and self._last > first + MOST:
                raise EnvironmentProblem(
                    f"recovery was offered no version in {MOST} iterations", where="flowcheck lab soak",
                    remedy=f"see the logs in {self._run.out}",
                )
            self._run.train(CHUNK)

    def _close(self) -> None:
        """Of this start of the job all is known."""
        ledger, said = self._run.ledger, self._said | self._closed()
        numbers = sorted({line["iteration"] for line in self._run.iterations})
        rows = (ledger.row(0, number) for number in numbers)
        account(
            self.report, ((row.iteration, row.verdict, row.why, row.tensors) for row in rows),
            lambda number: any(first <= number < after for first, after in self._away), lambda number: number in said,
        )
        self._away, self._said = [], set()
        done = sum(self.report.verdicts.values())
        self._say(f"{done} iterations so far: {dict(self.report.verdicts)}")


def keep(samples: Mapping[tuple[int, str], Sequence[Sample]], path: Path) -> None:
    """A line for each, so that what grows can be looked at: pid, role, at, memory, files."""
    with path.open("w", encoding="utf-8") as file:
        for (pid, role), kept in samples.items():
            for one in kept:
                file.write(json.dumps({"pid": pid, "role": role, **asdict(one)}) + "\n")


def soak(run: LabRun, job: Training, plan: Plan, say: Callable[[str], None] = lambda text: None) -> Report:
    """Ends the job and the nodes. say: what happens. Raises EnvironmentProblem where the job does not come back. What
    was measured of memory is in the run's folder, memory.jsonl, then too."""
    meter = Meter(lambda: run.node_pids)
    try:
        report = _Soak(run, job, plan, say).go()
    finally:
        meter.close()
        keep(meter.samples, run.out / "memory.jsonl")
    starts: Counter[str] = Counter()
    for (_, role), samples in sorted(meter.samples.items(), key=lambda one: one[1][0].at):
        starts[role] += 1
        report.trends[f"{role}, start {starts[role]}"] = trend(samples)
    return report
