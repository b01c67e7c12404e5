"""The `flowcheck` command: options in, one exit status out. No logic lives here.

Exit status: 0 done and complete (what that rests on besides the wire is marked `unproven` in the report); 1 done, but
something asked for is incomplete; 2 the request is wrong, or names a file that cannot be read; 3 the environment said
no; 70 a bug of ours; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import flowcheck
from flowcheck import __version__
from flowcheck.errors import EnvironmentProblem, FlowcheckError, InternalError, UserError, of_the_line, of_the_machine
from flowcheck.interrupts import Heard, unread
from flowcheck.learning.cli import (
    AlgorithmOption,
    BucketsOption,
    DtypeOption,
    LogOption,
    OptimizerOption,
    RankOption,
    VersionOption,
    hints_of,
    learn,
)
from flowcheck.plan.cli import plan
from flowcheck.switch.cli import switch

__all__ = ["app", "main"]

app = typer.Typer(
    name="flowcheck",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Checkpoints rebuilt from mirrored RoCEv2 allreduce traffic.",
)

ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
GONE = {  # with 0.1.0; the next release knows their names no more
    "protect": "[protect] of node.toml: nodes keep parity while they train (docs/use/protect.md#parity-by-nodes)",
    "restore-shard": "flowcheck.fetch, which takes a lost shard from nodes with [protect] (docs/use/recover.md)",
    "verify": "the tests of the sources, python -m pytest tests/flowcheck/plan",
}
INTERRUPTED = 130  # 128 and SIGINT
Captures = Annotated[list[Path], typer.Argument(help="pcap or pcapng files, one per mirrored port or direction")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flowcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def replay(
    captures: Captures,
    out: Annotated[Path, typer.Option("--out", help="Directory for step-NNNNNN/ and report.json.")],
    job: Annotated[
        Path | None,
        typer.Option("--job", help="Job manifest (docs/reference/manifest.md). Default: learnt from the captures."),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            "--init",
            help="Initial weights: FILE.safetensors or a step directory. Default: the broadcast in the capture.",
        ),
    ] = None,
    every: Annotated[int, typer.Option("--every", min=0, help="Write every K-th complete step; 0: only the last.")] = 0,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations", min=1, help="Demand exactly the first N iterations. Default: all that begin in the capture."
        ),
    ] = None,
    arenas: Annotated[int, typer.Option("--arenas", min=2, max=64, help="Iterations kept in memory at once.")] = 4,
    icrc: Annotated[
        bool, typer.Option("--icrc/--no-icrc", help="Check the ICRC of what is placed; off marks the result unproven.")
    ] = True,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Keep gradients-NNNNNN.safetensors of each iteration in --out.")
    ] = False,
    optimizer: OptimizerOption = None,
    dtype: DtypeOption = "",
    buckets: BucketsOption = "",
    rank: RankOption = None,
    nccl_version: VersionOption = "",
    algorithm: AlgorithmOption = "",
    nccl_log: LogOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead (docs/reference/report.md).")
    ] = False,
) -> None:
    """Replay captures into checkpoints: every gradient placed is proven, every missing byte is counted."""
    from flowcheck.offline.replay import ReplayOptions, run

    hints = hints_of(optimizer, dtype, buckets, rank, nccl_version, algorithm)
    options = ReplayOptions(
        captures, job, out, init, every, iterations, arenas, icrc, hints, nccl_log or [], gradients
    )
    raise typer.Exit(run(options, as_json=as_json))


@app.command()
def inspect(
    captures: Annotated[list[Path] | None, typer.Argument(help="pcap or pcapng files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for machines (docs/use/inspect.md).")] = False,
    interface: Annotated[str | None, typer.Option("--interface", help="Look at a live interface instead.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="With --interface: how long.")] = 5.0,
) -> None:
    """Say what is in captures, or arrives at an interface, without a job: connections, protocol, gaps, ICRC, noise."""
    from flowcheck.diagnose.inspect import run

    raise typer.Exit(run(captures or [], as_json, interface, seconds))


@app.command()
def rehearse(
    config: Annotated[Path, typer.Option("--config", help="Settings of the node: node.toml (docs/use/settings.md).")],
    job: Annotated[
        list[Path] | None,
        typer.Option("--job", help="Manifest of a running job: would its iterations be complete? Several are groups."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, max=3600, help="For so long.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for machines (docs/use/rehearse.md).")] = False,
) -> None:
    """What a node's mirror ports bring of a running job, before the node is started; exit 1: something is to change."""
    from flowcheck.node.rehearse.rehearsal import run

    raise typer.Exit(run(config, job or [], seconds, as_json))


@app.command()
def doctor(
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="What is to capture: af_packet:IFACE, af_xdp:IFACE, PCI address."),
    ] = None,
    path_mtu: Annotated[int, typer.Option("--path-mtu", min=256, max=4096, help="RoCE path MTU.")] = 1024,
    memory: Annotated[int, typer.Option("--memory", min=64, help="MB of packet buffers and rings.")] = 512,
    core: Annotated[list[int] | None, typer.Option("--core", min=0, help="Core of an rx thread.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for machines (docs/use/doctor.md).")] = False,
) -> None:
    """Can this machine capture? Says what is wrong and which command fixes it; exit 0 ok, 1 warnings, 2 unusable."""
    from flowcheck.diagnose.doctor import Wanted, run

    raise typer.Exit(run(Wanted(tuple(device or ()), path_mtu, memory, tuple(core or ())), as_json))


@contextlib.contextmanager
def _options() -> Iterator[None]:
    """What Python calls run_id= is --run-id here."""
    try:
        yield
    except UserError as error:
        raise UserError(
            error.what, where=_OPTION.sub(_as_option, error.where), remedy=_ARGUMENT.sub(_as_option, error.remedy),
        ) from None


_OPTION, _ARGUMENT = re.compile("^(run_id|shard|format)$"), re.compile(r"\b(run_id|shard|whole)=(True)?")


def _as_option(found: re.Match[str]) -> str:
    return f"--{found[1].replace('_', '-')}"


def _token(file: Path) -> str:
    from flowcheck.node.config.tokens import read_token

    return read_token(file)


@app.command()
def fetch(
    nodes: Annotated[str, typer.Argument(help="HOST:PORT of a node's api.listen; several with commas.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for what is written.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="Its first line is the nodes' token.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors: a step directory; torch: torch.save; dcp: torch's own DCP; hf: transformers' form.",
        ),
    ] = "safetensors",
    run_id: Annotated[str | None, typer.Option("--run-id", help="Which run. Default: the only one.")] = None,
    shard: Annotated[str | None, typer.Option("--shard", help="Which group of ranks. Default: the only one.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="This step. Default: the newest.")] = None,
    ca: Annotated[
        str, typer.Option("--ca", envvar="FLOWCHECK_CA", help='Ask over TLS: a PEM file of authorities, or "system".')
    ] = "",
    whole: Annotated[
        bool, typer.Option("--whole", help="Of dcp and hf: the shard has a name, and is the whole model all the same.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for machines (docs/use/recover.md).")] = False,
) -> None:
    """Take a version from checkpoint nodes into files, every hash checked."""
    token = _token(token_file)
    with _options():
        taken = flowcheck.fetch(
            nodes, out, token=token, format=format, run_id=run_id, shard=shard, step=step, ca=ca, whole=whole,
        )
    if as_json:
        typer.echo(json.dumps({"schema": "flowcheck-fetch/1", **asdict(taken), "path": str(taken.path)}, indent=1))
        return
    for why in taken.passed:
        typer.echo(f"not taken: {why}", err=True)
    typer.echo(repr(taken))


@app.command()
def rewind(
    nodes: Annotated[str, typer.Argument(help="HOST:PORT of a node's api.listen; several with commas.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="Its first line is the nodes' token.")],
    run_id: Annotated[str | None, typer.Option("--run-id", help="Only this run. Default: all.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="A node may be silent so long.")] = 30,
    ca: Annotated[
        str, typer.Option("--ca", envvar="FLOWCHECK_CA", help='Ask over TLS: a PEM file of authorities, or "system".')
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for machines (docs/use/rewind.md).")] = False,
) -> None:
    """Say which steps checkpoint nodes have, or can make again of their journals; fetch --step takes any of them."""
    from flowcheck.node.versions.journal.rewind import run

    raise typer.Exit(run(nodes, _token(token_file), run_id, ca, seconds, as_json))


def _add_instruments() -> None:
    """The lab's commands; where the package is not installed, commands of those names that say how to get it."""
    try:
        from lab.bench.cli import bench
        from lab.cli import lab
        from lab.synth.cli import synth, synth_job
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lab":
            raise
        for name in ("synth", "bench", "synth-job", "lab"):
            app.command(name, context_settings=ANYTHING, help="Not installed: needs the package `lab`.")(_no_lab)
        return
    app.command()(synth)
    app.command()(bench)
    app.command("synth-job")(synth_job)
    app.add_typer(lab, name="lab")


def _no_lab(context: typer.Context) -> None:
    raise EnvironmentProblem(
        "needs the package `lab`, which is not in this installation", where=f"flowcheck {context.info_name}",
        remedy="FLOWCHECK_BUILD=lab pip install PATH-TO-THE-SOURCES, or make build there (docs/use/install.md)",
    )


def _gone(context: typer.Context) -> None:
    raise UserError("is no command any more", where=context.command_path, remedy=GONE[context.info_name or ""])


app.command()(learn)
app.add_typer(switch, name="switch")
app.add_typer(plan, name="plan")
_add_instruments()
for within, gone in ((app, "protect"), (app, "restore-shard"), (plan, "verify")):
    within.command(gone, context_settings={**ANYTHING, "help_option_names": ["--help", "-h"]}, hidden=True,
                   help=f"No command any more: {GONE[gone]}.")(_gone)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show must not end the run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with unread():
        sys.exit(_status())


def _status() -> int:
    heard = Heard()
    try:
        status = int(app(standalone_mode=False, prog_name="flowcheck") or 0)
    except FlowcheckError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = str(error.filename) if error.filename else "the output"
        return _fail(
            EnvironmentProblem(
                error.strerror or str(error), where=where, remedy="check the path, its permissions and the free space"
            )
        )
    except Exception as error:
        if (wrong := of_the_line(error, "flowcheck")) is not None:
            return _fail(wrong)
        if (machine := of_the_machine(error)) is not None:
            return _fail(machine)
        if heard.interrupted:  # libraries swallow it while they are loaded, and are then not whole
            return _interrupted()
        if os.environ.get("FLOWCHECK_DEBUG"):
            traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        return _fail(
            InternalError(
                f"{type(error).__name__}: {error}",
                where=f"{Path(last.filename).name}:{last.lineno}",
                remedy="this is a bug in flowcheck; run again with FLOWCHECK_DEBUG=1 and report what it prints",
            )
        )
    return _interrupted() if status == INTERRUPTED else status  # which typer makes of it


def _interrupted() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more, while the interpreter ends, would show a traceback
    print("flowcheck: interrupted before it was done", file=sys.stderr)
    return INTERRUPTED


def _fail(error: FlowcheckError) -> int:
    if error.what:
        print(f"flowcheck: error: {error.message()}", file=sys.stderr)
    return error.exit_code
