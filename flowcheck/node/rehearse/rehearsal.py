"""`flowcheck rehearse`: what a node's captures bring of a running job, before a node is started and trusted.

    load node.toml -> open its captures, as the node does
      -> observe every packet (parser.observer)                          what comes, and what does not
      -> with jobs: follow them on the node's own placing threads        which iterations would be complete, how soon
      -> questions and their answers (report.py) -> text or JSON

Without jobs all of the time is for the first look; with them each has a half, because a ring has one reader. The job's
packets take the way that they take in a node: plan, engine, arenas, evidence, verdict (groups/session.py). It has no
replica, and nobody is asked for anything: no control port, no trainer, no file is opened but the settings and the jobs,
and nothing is written, sent or remembered.

The observer looks at one packet after the other, on one thread, so it is slower than the node: what its rings drop
meanwhile is said, and not taken for a loss of the mirror.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from parser.observer import Observer

from dataplane.live import LiveSource, start_eal
from flowcheck.diagnose.inspect import document_of, survey_live
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Job
from flowcheck.node.check.budget import Budget, ask, budget
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.checks import check_memory
from flowcheck.node.ports.captures import naming, plan_captures
from flowcheck.node.ports.counts import grown
from flowcheck.node.ports.open_captures import dpdk_errors
from flowcheck.node.rehearse.jobs import Followed, follow
from flowcheck.node.rehearse.report import render, report
from flowcheck.rebuild.calibration import settle
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.tables import screen

__all__ = ["Rates", "rehearse", "run"]

SAMPLE_SECONDS = 0.1


def run(config: Path, jobs: Sequence[Path], seconds: float, as_json: bool) -> int:
    """Rehearse, and print to stdout. 0: every answer is good; 1: something is to be changed.

    Raises:
        UserError: settings or a job that cannot be used.
        EnvironmentProblem: DPDK or this machine refused.
    """
    settings = load(config, lambda text: print(f"flowcheck: note: {text}", file=sys.stderr))
    wanted = [load_job(path) for path in jobs]

    def ready() -> None:
        devices = ", ".join(one.device for one in settings.capture)
        print(f"flowcheck: looking at {devices} for {seconds:g} s", file=sys.stderr, flush=True)

    with dpdk_errors():
        found = rehearse(settings, wanted, seconds, ready)
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        render(found, screen())
    return int(not found["good"])


def rehearse(
    config: NodeConfig, jobs: Sequence[Job], seconds: float, ready: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The report, as --json prints it. ready: called when the captures are open. Raises UserError, EnvironmentProblem,
    DpdkError."""
    if not config.capture:
        raise UserError("has no [capture]: a node that only keeps copies has no mirror", where="node.toml",
                        remedy="the settings of a node that follows a job")
    began = time.time()
    planned = plan_captures(config)
    made = budget(config, planned, ask(config, planned))
    _fits(made)
    queues = sum(one.live.queues for one in planned)
    followed = [Followed(_plan(config, job, queues)) for job in jobs]
    with ExitStack() as undo:
        eal = undo.enter_context(start_eal(*(one.live for one in planned), huge=config.huge))
        settle(max(one.live.path_mtu or 1024 for one in planned), eal.huge, measure=False, remember=False)
        sources: list[LiveSource] = []
        for one in planned:
            with naming(one):
                sources.append(undo.enter_context(LiveSource(eal, one.live)))
        for one, source in zip(planned, sources, strict=True):
            with naming(one):
                source.start()
        ready()
        looks = seconds / 2 if followed else seconds
        rates, survey = [Rates(source) for source in sources], Observer()

        def look() -> None:
            for one, source, rate in zip(planned, sources, rates, strict=True):
                rate.look()
                if source.error is not None:
                    with naming(one):
                        raise source.error

        survey_live(sources, survey, looks, look)
        looked = [dict(source.counters()) for source in sources]
        observed = survey.report()
        if followed:
            follow(config, planned, sources, followed, seconds - looks, look)
        ended = [grown(before, source.counters()) for before, source in zip(looked, sources, strict=True)]
    return report(
        config, planned, made, began=began, seconds=(looks, seconds - looks), found=document_of([], observed),
        streams=observed["per_capture"], rates=[rate.most for rate in rates], looked=looked, ended=ended,
        followed=followed,
    )


def _fits(made: Budget) -> None:
    """What would keep the captures from being opened, by name. The rest is part of the report."""
    fatal = [problem for problem in made.problems if isinstance(problem, EnvironmentProblem)]
    if fatal:
        raise fatal[0]


def _plan(config: NodeConfig, job: Job, queues: int) -> JobPlan:
    """As a group plans it. Raises UserError, also for a job that the node would refuse for its memory."""
    plan = plan_job(
        job, streams=queues, threads=queues, arenas=config.replica.regions, patience=config.replica.patience_packets,
    )
    if not job.flows:
        raise UserError("the manifest names no connections, so no packet can be told to be the job's",
                        where="job manifest: flows", remedy="`flowcheck learn` on a capture that begins with the job")
    if job.optimizer is not None:
        check_memory(plan, config.replica)
    return plan


class Rates:
    """The fastest tenth of a second of a capture. most: packets and bytes in a second, there."""

    def __init__(self, source: LiveSource, now: Callable[[], float] = time.monotonic) -> None:
        self._source, self._now = source, now
        self._at, self._before = now(), self._counts()
        self.most = (0.0, 0.0)

    def _counts(self) -> tuple[int, int]:
        counters = self._source.counters()
        return counters["received"], counters.get("bytes", 0)

    def look(self) -> None:
        now = self._now()
        if (passed := now - self._at) < SAMPLE_SECONDS:
            return
        counts = self._counts()
        packets, size = ((new - old) / passed for new, old in zip(counts, self._before, strict=True))
        if packets > self.most[0]:
            self.most = packets, size
        self._at, self._before = now, counts
