"""Captures from Python: `flowcheck.replay`, `flowcheck.inspect` and `flowcheck.learn`.

Each call runs in a process of its own (child.py says why), which takes a second or two to start, and blocks until it
is done. So calls can be repeated, from a script, a notebook or several threads, and DPDK never starts in the caller's
process. Nothing is printed; what a call brings is returned.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from flowcheck.offline.child import run_task
from flowcheck.offline.result import Inspection, Result, result_of

__all__ = ["inspect", "learn", "replay"]

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def inspect(captures: Files) -> Inspection:
    """Say what is in captures, with no job given: which host talks to which, by which protocol, what is missing.

    captures: one pcap or pcapng file, or several: parts of one capture, or of several ports.

    Raises UserError: a file that cannot be read or is not a capture; EnvironmentProblem: DPDK or the machine refused.
    """
    return Inspection(run_task("inspect", {"captures": _paths(captures)})["document"])


def learn(
    captures: Files, *, optimizer: str | None = None, dtype: str = "", buckets: Sequence[int] = (),
    ranks: Mapping[str, int] | None = None, nccl_version: str = "", algorithm: str = "", nccl_logs: Files = (),
) -> Job:
    """Learn a job's manifest from captures of it that begin with its start.

    captures: pcap or pcapng files.
    optimizer: what no traffic says, such as "sgd:lr=0.001" or "adam:lr=0.001,eps=1e-8".
    dtype, buckets: element type of the gradients, and elements of each AllReduce of an iteration.
    ranks: {address: rank}.
    nccl_version, algorithm: such as "2.27.7"; "ring" or "tree".
    nccl_logs: output of the job with NCCL_DEBUG=INFO.

    Raises UserError where nothing or more than one thing explains the traffic, naming the argument that decides; and
    EnvironmentProblem. docs/use/learn.md says what is learnt from what.
    """
    hints = _hints(optimizer, dtype, buckets, ranks, nccl_version, algorithm, nccl_logs)
    return job_from_dict(run_task("learn", {"captures": _paths(captures), "hints": hints})["job"])


def replay(
    captures: Files, job: str | os.PathLike[str] | Job | None = None, out: str | os.PathLike[str] | None = None, *,
    init: str | os.PathLike[str] | None = None, every: int = 0, iterations: int | None = None,
    gradients: bool = False, arenas: int = 4, icrc: bool = True,
    optimizer: str | None = None, dtype: str = "", buckets: Sequence[int] = (), ranks: Mapping[str, int] | None = None,
    nccl_version: str = "", algorithm: str = "", nccl_logs: Files = (),
) -> Result:
    """Replay captures into gradients and checkpoints: what `flowcheck replay` does.

    captures: pcap or pcapng files, one per mirrored port or direction.
    job: a manifest, or its file; None: learnt from the captures, with `optimizer` and what follows it as in `learn`.
    out: directory for step-NNNNNN/ and report.json; None: a temporary one that goes with the result.
    init: initial weights, FILE.safetensors or a step directory; None: the broadcast in the capture.
    every: write each K-th complete step; 0: only the last.
    iterations: demand exactly the first N; None: all that begin in the captures.
    gradients: keep each iteration's gradients, for `Result.gradients`; as large as the model, once per iteration.
    arenas: iterations kept in memory at once, 2 to 64.
    icrc: check the ICRC of what is placed; False marks the result unproven.

    An incomplete replay is a result: `ok` is False and `failure` says why. Raises UserError where job or captures are
    at fault, EnvironmentProblem where the machine is; then nothing was written.
    """
    _check("every", every, 0)
    _check("arenas", arenas, 2, 64)
    if iterations is not None:
        _check("iterations", iterations, 1)
    where = os.fspath(out) if out is not None else tempfile.mkdtemp(prefix="flowcheck-replay-")
    remove = partial(shutil.rmtree, where, ignore_errors=True)
    try:
        answer = run_task("replay", {
            "captures": _paths(captures), "job": job.to_dict() if isinstance(job, Job) else _path(job), "out": where,
            "init": _path(init), "every": every, "iterations": iterations, "gradients": bool(gradients),
            "arenas": arenas, "icrc": bool(icrc),
            "hints": _hints(optimizer, dtype, buckets, ranks, nccl_version, algorithm, nccl_logs),
        })
        result = result_of(answer["report"], answer["failure"], Path(where), bool(gradients))
    except BaseException:
        if out is None:
            remove()
        raise
    if out is None:
        weakref.finalize(result, remove)
    return result


def _check(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UserError(f"{value!r} is not a whole number, {allowed}", where=name, remedy="help(flowcheck.replay)")


def _hints(
    optimizer: str | None, dtype: str, buckets: Sequence[int], ranks: Mapping[str, int] | None, nccl_version: str,
    algorithm: str, logs: Files,
) -> dict[str, Any]:
    return {
        "optimizer": optimizer, "dtype": dtype, "buckets": list(buckets), "ranks": dict(ranks or {}),
        "nccl_version": nccl_version, "algorithm": algorithm, "logs": _paths(logs),
    }


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _paths(paths: Files) -> list[str]:
    names = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
    if "-" in names:
        raise UserError(
            "standard input cannot be read here: captures are read by a process of their own",
            where="-", remedy="give the path of a file or of a named pipe",
        )
    return names
