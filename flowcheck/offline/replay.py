"""`flowcheck replay`: captures in, checkpoints and a report out. Offline is a runtime, not a mock.

    scan files -> EAL -> one PcapSource per file -> rings -> Engine -> verdict -> Replica -> step-NNNNNN/

The order in `run` is the way of a gradient (design section 2). The main thread drives the engine, each
file has an rx thread. One replay per process, because DPDK's EAL can be started only once: `flowcheck.replay`
(calls.py) starts a process for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from dataplane.pcapfile import PcapInfo, scan
from flowcheck.checkpoint.directory import MANIFEST_BYTES
from flowcheck.checkpoint.paths import read_small
from flowcheck.diagnose.reading import capture_errors
from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Job
from flowcheck.learning.captures import learn
from flowcheck.learning.cli import watching
from flowcheck.learning.hints import Hints
from flowcheck.learning.job import Learnt
from flowcheck.offline.offer import Offer
from flowcheck.offline.report import Report
from flowcheck.offline.session import ReplayOptions, ReplaySession
from flowcheck.offline.summary import print_summary
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.replica import JobReplica
from flowcheck.tables import screen

__all__ = ["ReplayOptions", "replay", "run"]

MOST_CAPTURES = 32  # ports that DPDK is compiled for


def run(options: ReplayOptions, console: Console | None = None, as_json: bool = False) -> int:
    """Replay and print the summary, or with as_json the report alone. Exit status 0 only if every iteration asked for
    is complete."""
    if as_json:
        report, _ = replay(options, Console(stderr=True))
        json.dump(report.to_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0 if report.ok else 1
    console = screen() if console is None else console
    report, failure = replay(options, console)
    print_summary(report, console)
    console.print(f"report: {options.out / 'report.json'}", highlight=False, markup=False, soft_wrap=True)
    if failure:
        console.print(f"NOT DONE: {failure}", highlight=False, markup=False, soft_wrap=True)
    return 0 if report.ok else 1


def replay(options: ReplayOptions, console: Console) -> tuple[Report, str]:
    """The replay itself: (report, why it did not do all that was asked, or "").

    Raises UserError and EnvironmentProblem; then no checkpoint and no report was written.
    """
    job, learnt = _job(options)
    infos = _scan(options.captures)
    _claim(options.out, job)
    plan = plan_job(job, streams=len(infos), arenas=options.arenas, check_icrc=options.icrc)
    session = ReplaySession(plan, JobReplica(plan, options.init), options, infos)
    if learnt:
        session.report.learnt = learnt.to_dict()
        said = [item.confidence for item in learnt.items if item.what == "flows"]  # only a bootstrap names them
        session.learnt_labels = bool(said) and set(said) == {"certain"}
        session.marks += learnt.marks
    with capture_errors():
        session.drive(console)
    return session.finish()


def _job(options: ReplayOptions) -> tuple[Job, Learnt | None]:
    """The manifest given, or the one that the captures tell."""
    if options.job is None:
        with watching() as progress:
            learnt = learn(options.captures, options.hints, options.logs, progress)
        return learnt.job, learnt
    if options.hints != Hints() or options.logs:
        raise UserError(
            "a manifest is given, so nothing is learnt: --optimizer, --dtype, --buckets, --rank, --nccl-version,"
            " --algorithm and --nccl-log have no meaning",
            where=options.job_name,
            remedy="put them into the manifest, or leave --job out",
        )
    return options.job if isinstance(options.job, Job) else load_job(options.job), None


def _claim(out: Path, job: Job) -> None:
    """Refuse a directory that holds another run's checkpoints. What an earlier replay offers there stays until this
    one has something to offer instead."""
    for manifest in sorted(out.glob("*-[0-9]*/manifest.json")):
        try:
            held = json.loads(read_small(manifest, MANIFEST_BYTES))
            run = str(held["run_id"]), int(held["epoch"])
        except (UserError, ValueError, KeyError, TypeError, RecursionError):
            continue  # not ours: write_step refuses to touch it
        if run != (job.run_id, job.epoch):
            raise UserError(
                f"holds {manifest.parent.name} of run {run[0]!r}, epoch {run[1]}; this is run {job.run_id!r}",
                where=str(out),
                remedy="give every run a directory of its own with --out",
            )
    Offer(out).clear()


def _scan(paths: list[Path]) -> list[PcapInfo]:
    if len(paths) > MOST_CAPTURES:
        raise UserError(
            f"{len(paths)} captures, at most {MOST_CAPTURES} at once", where="captures", remedy="mergecap -w OUT IN...",
        )
    with capture_errors():
        return [scan(path) for path in paths]
