"""`flowcheck learn`, and the options that replay shares with it; mounted by flowcheck.cli.

Exit status 0: one explanation, written. 2: refused or ambiguous, nothing written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flowcheck.durable import write_atomic
from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Flow
from flowcheck.learning.hints import Hints, parse_optimizer, parse_ranks
from flowcheck.tables import Column, print_table, screen

__all__ = [
    "AlgorithmOption", "BucketsOption", "DtypeOption", "LogOption", "OptimizerOption", "RankOption", "VersionOption",
    "hints_of", "learn", "watching",
]

CHANNELS_FOUND = "channels of the connections: found in captures, by the sizes and places of their messages"

OptimizerOption = Annotated[
    str | None,
    typer.Option("--optimizer", help="Learning: the job's optimizer, such as sgd:lr=0.001 or adam:lr=0.001,eps=1e-8."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Learning: element type of the gradients.")]
BucketsOption = Annotated[
    str, typer.Option("--buckets", help="Learning: elements of each AllReduce of an iteration: 5000 or 700,300.")
]
RankOption = Annotated[
    list[str] | None, typer.Option("--rank", help="Learning: ADDRESS=RANK, once per address.", metavar="ADDRESS=RANK")
]
VersionOption = Annotated[str, typer.Option("--nccl-version", help="Learning: NCCL's version, such as 2.27.7.")]
AlgorithmOption = Annotated[str, typer.Option("--algorithm", help="Learning: ring or tree, for every AllReduce.")]
LogOption = Annotated[
    list[Path] | None, typer.Option("--nccl-log", help="Learning: output of the job with NCCL_DEBUG=INFO, repeatable.")
]


def hints_of(
    optimizer: str | None, dtype: str, buckets: str, ranks: list[str] | None, version: str, algorithm: str,
    given: Path | None = None,
) -> Hints:
    """The options as hints. Raises UserError naming the option."""
    try:
        counts = tuple(int(part) for part in buckets.split(",") if part.strip())
    except ValueError:
        raise UserError(
            f"{buckets!r} is not a list of whole numbers", where="--buckets", remedy="write 5000 or 700,300"
        ) from None
    return Hints(
        parse_optimizer(optimizer) if optimizer else None, dtype, counts, parse_ranks(ranks or []), version, algorithm,
        given=None if given is None else load_job(given),
    )


def learn(
    captures: Annotated[list[Path], typer.Argument(help="pcap or pcapng files, from the job's start")],
    out: Annotated[Path, typer.Option("--out", help="Job manifest to write (JSON).")],
    optimizer: OptimizerOption = None,
    dtype: DtypeOption = "",
    buckets: BucketsOption = "",
    rank: RankOption = None,
    nccl_version: VersionOption = "",
    algorithm: AlgorithmOption = "",
    nccl_log: LogOption = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="A manifest whose communicator and flows hold; its calls are learnt.")
    ] = None,
    channels: Annotated[
        Path | None,
        typer.Option("--channels", help="A manifest that holds but for its flows' channels: these alone are found."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for machines (docs/use/learn.md).")] = False,
) -> None:
    """Learn a job from its captures and write it as a manifest, with the reason for every part of it."""
    from flowcheck.learning.captures import learn as learn_captures
    from flowcheck.learning.job import Learnt

    if channels is not None:
        if any((optimizer, dtype, buckets, rank, nccl_version, algorithm, nccl_log, job)):
            raise UserError("its manifest says all else", where="--channels", remedy="leave the other options out")
        _find_channels(captures, channels, out, as_json)
        return
    hints = hints_of(optimizer, dtype, buckets, rank, nccl_version, algorithm, job)
    with watching() as progress:
        learnt: Learnt = learn_captures(captures, hints, nccl_log or [], progress)
    learnt.job.unproven = learnt.marks  # a file confirms no more than what was learnt
    write_atomic(out, learnt.job.to_json().encode())
    if as_json:
        document = {"schema": "flowcheck-learn/1", "manifest": str(out), **learnt.to_dict()}
        typer.echo(json.dumps(document, indent=1))
        return
    console = screen()
    columns = [Column(name, folds=True) for name in ("learnt", "value", "confidence", "because")]
    print_table(console, columns, [(item.what, item.value, item.confidence, item.reason) for item in learnt.items])
    for text in learnt.doubts:
        console.print(f"doubt: {escape(text)}", highlight=False)
    for text in learnt.missing:
        console.print(f"not known: {escape(text)}", highlight=False)
    console.print(f"manifest: {escape(str(out))}", soft_wrap=True)


def _find_channels(captures: list[Path], given: Path, out: Path, as_json: bool) -> None:
    """`learn --channels`: the manifest with the channels that the captures show."""
    from flowcheck.learning.captures import assign_channels

    job = load_job(given)
    found = assign_channels(captures, job)
    job.flows = found.flows
    job.unproven = [*job.unproven, CHANNELS_FOUND]
    write_atomic(out, job.to_json().encode())
    if as_json:
        document = {
            "schema": "flowcheck-learn-channels/1", "manifest": str(out),
            "channels": [
                {**_named(flow), "channel": flow.channel, "messages": seen}
                for flow, seen in zip(found.flows, found.seen, strict=True)
            ],
            "spare": [_named(flow) for flow in found.spare],
            "not_captured": [_named(flow) for flow in found.unseen],
        }
        typer.echo(json.dumps(document, indent=1))
        return
    console = screen()
    rows = [
        (str(flow.channel), *_cells(flow),
         f"{seen} messages fit, and no other assignment" if seen else "what the others leave; nothing of it was seen")
        for flow, seen in zip(found.flows, found.seen, strict=True)
    ]
    rows += [("none", *_cells(flow), "the job's calls send nothing on it") for flow in found.spare]
    rows += [
        ("not known", *_cells(flow), "nothing between these ranks was captured; left out") for flow in found.unseen
    ]
    columns = [Column(name, folds=True) for name in ("channel", "ranks", "queue pairs", "because")]
    print_table(console, columns, rows)
    console.print(f"manifest: {escape(str(out))}", soft_wrap=True)


def _named(flow: Flow) -> dict[str, Any]:
    return {"src": flow.src, "dst": flow.dst, "qpns": list(flow.qpns)}


def _cells(flow: Flow) -> tuple[str, str]:
    return f"{flow.src} -> {flow.dst}", ", ".join(f"{qpn:#x}" for qpn in flow.qpns)


@contextmanager
def watching() -> Iterator[Callable[[int, int], None] | None]:
    """A line on the terminal, (hypotheses tried, of how many), while a search runs; nothing where stderr is not one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("reading the captures") as status:
        yield lambda done, total: status.update(f"learning: {done} of {total} hypotheses tried")
