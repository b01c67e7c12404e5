"""`flowcheck-node --config node.toml`: until SIGTERM or Ctrl-C. With `--check` only what it would take.

What has a mirror port is a node (service.py), what has none holds copies (holder.py) and starts without DPDK. Exit 0
after an orderly end, else as in errors.py.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, Self

import typer

from flowcheck import __version__
from flowcheck.errors import FlowcheckError, InternalError, of_the_line, of_the_machine, said_of
from flowcheck.interrupts import unread
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.notify import Notify
from flowcheck.node.ports.rights import Rights
from flowcheck.node.status.event_log import Events

__all__ = ["main"]


class Service(Protocol):
    """What runs until a signal ends it. announce: say that it can be reached. last: what is done in the end."""

    last: str

    def announce(self, say: Callable[..., None]) -> None: ...

    def wait(self) -> None: ...

    def stop(self) -> None: ...

    def reload(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flowcheck-node {__version__}")
        raise typer.Exit


def run(
    config: Annotated[Path, typer.Option("--config", help="Settings: node.toml (docs/use/settings.md).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line for machines.")] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Print memory, cores and the pauses that rings bear; start nothing.")
    ] = False,
    job: Annotated[
        Path | None, typer.Option("--job", help="With --check: a job's manifest, for the figures of [journal].")
    ] = None,
    step_seconds: Annotated[
        float, typer.Option("--step-seconds", min=1e-3, max=86400, help="With --check: how long a step of it takes.")
    ] = 1.0,
    keep_hashes: Annotated[
        Path | None, typer.Option("--keep-hashes", help="Append the SHA-256 of every version's tensors here.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Follow training jobs on a mirror port: a checkpoint after every iteration, or a reason why not."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also a start that is cut short is taken down in order
    settings = load(config, lambda text: print(f"flowcheck-node: note: {text}", file=sys.stderr))
    if keep_hashes is not None:
        settings = settings.model_copy(
            update={"output": settings.output.model_copy(update={"keep_hashes": keep_hashes})}
        )
    try:
        _begin(settings, as_json, check_only, job, step_seconds)
    except KeyboardInterrupt:
        print("flowcheck-node: interrupted before it was listening; nothing is left behind", file=sys.stderr)
        raise typer.Exit(130) from None


def _begin(settings: NodeConfig, as_json: bool, check_only: bool, job: Path | None, step_seconds: float) -> None:
    if settings.feed is not None and not settings.capture:
        from flowcheck.node import service
        from flowcheck.node.check.fed import check_fed

        if check_only:
            check_fed(settings, as_json, job, step_seconds)
        else:
            _serve(nullcontext(), partial(service.Node, settings), settings, as_json)
        return
    if not settings.capture:
        from flowcheck.node import holder

        Rights(()).give_back()  # no port
        if check_only:
            holder.check(settings, as_json)
        else:
            _serve(nullcontext(), partial(holder.Holder, settings), settings, as_json)
        return
    from flowcheck.node import service  # not before it is known that there is a port: both need DPDK
    from flowcheck.node.check import check
    from flowcheck.node.ports.open_captures import dpdk_errors

    if check_only:
        with dpdk_errors():
            check.check(settings, as_json, job, step_seconds)
    else:
        _serve(dpdk_errors(), partial(service.Node, settings), settings, as_json)


def _serve(
    errors: AbstractContextManager[None], make: Callable[[Events], Service], settings: NodeConfig, as_json: bool
) -> None:
    with Events(as_json, settings.output.status_file) as say:
        threading.excepthook = partial(_thread_ended, say)
        with errors, make(say) as node:
            came: list[int] = []

            def stop(number: int, _: object) -> None:
                came.append(number)
                node.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            signal.signal(signal.SIGHUP, lambda *_: node.reload())
            node.announce(say)
            Notify().ready()
            node.wait()
            why = signal.Signals(came[0]).name if came else "asked to"
            Notify().stopping()
            say("stopping", why=f"{why}: {node.last}")
        say("stopped")


def _thread_ended(say: Events, ended: threading.ExceptHookArgs) -> None:
    """By what nobody expected there. Whoever waits for it finds out by himself; here it is said."""
    error, name = ended.exc_value, ended.thread.name if ended.thread is not None else "a thread"
    if error is None or isinstance(error, SystemExit):
        return
    known = error if isinstance(error, FlowcheckError) else of_the_machine(error)
    if known is None:
        threading.__excepthook__(ended)
    ours = "" if known is not None else ". This is a bug: report the lines on standard error"
    say("problem", why=f"{name} has ended: {said_of(error)}{ours}")


def main() -> None:
    """Entry point of the console script."""
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["--help", "-h"]})
    app.command()(run)
    with unread():
        sys.exit(_status(app))


def _status(app: typer.Typer) -> int:
    try:
        return int(app(standalone_mode=False, prog_name="flowcheck-node") or 0)
    except FlowcheckError as error:
        return _fail(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if (known := of_the_line(error, "flowcheck-node") or of_the_machine(error)) is not None:
            return _fail(known)
        traceback.print_exc()
        return _fail(InternalError(f"{type(error).__name__}: {error}", remedy="this is a bug: report the lines above"))


def _fail(error: FlowcheckError) -> int:
    print(f"flowcheck-node: error: {error.message()}", file=sys.stderr)
    return error.exit_code
