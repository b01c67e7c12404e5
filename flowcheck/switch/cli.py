"""`flowcheck switch plan|diff|apply|show|verify|remove`: options in, exit status out.

Nothing is changed without --commit, and with it only after a question (or --yes). Exit status 1: a session is not
as planned, or verify found something to fix.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

import typer
from rich.console import Console

from flowcheck.durable import make_directory, write_atomic
from flowcheck.errors import EnvironmentProblem, UserError, missing_module
from flowcheck.interrupts import handled

__all__ = ["switch"]

_Given = ParamSpec("_Given")

switch = typer.Typer(no_args_is_help=True, help="Port mirroring on leaf switches: plan, apply, show, verify, remove.")

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan that `flowcheck switch plan` wrote.")]
LeafOption = Annotated[list[str] | None, typer.Option("--leaf", help="Only this switch; may be repeated.")]
UserOption = Annotated[str | None, typer.Option("--user", help="Login name. Passwords: docs/use/switch.md.")]
KnownOption = Annotated[Path | None, typer.Option("--known-hosts", help="Host keys. Default: ~/.ssh/known_hosts.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Private key file. Default: the SSH agent's keys.")]
CommitOption = Annotated[bool, typer.Option("--commit", help="Change the switch. Default: only say what would be.")]
YesOption = Annotated[bool, typer.Option("--yes", help="With --commit: do not ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object for machines.")]


def _mapped(function: Callable[_Given, None]) -> Callable[_Given, None]:
    """switch_configs stands alone and has errors of its own."""

    @wraps(function)
    def call(*arguments: _Given.args, **options: _Given.kwargs) -> None:
        try:
            from switch_configs.errors import DeviceError, PlanError
        except ImportError as error:
            raise missing_module(error, "flowcheck switch") from None
        try:
            function(*arguments, **options)
        except PlanError as error:
            raise UserError(error.what, where=error.where, remedy=error.remedy) from None
        except DeviceError as error:
            raise EnvironmentProblem(error.what, where=error.where, remedy=error.remedy) from None

    return call


@switch.command()
@_mapped
def plan(
    topology: Annotated[Path, typer.Argument(help="Topology, YAML or JSON (docs/use/switch.md).")],
    out: Annotated[Path, typer.Option("--out", help="The plan, JSON.")],
    text: Annotated[Path | None, typer.Option("--text", help="Directory for one command file per session.")] = None,
    lldp: Annotated[
        list[str] | None, typer.Option("--lldp", help="HOST=FILE: `lldpctl -f json` of that host fills in its ports.")
    ] = None,
    redundancy: Annotated[
        int | None,
        typer.Option("--redundancy", min=1, help="Complete with any N-1 mirrored GPUs lost. Default: 3 if possible."),
    ] = None,
    direction: Annotated[
        Literal["ingress", "egress", "both"] | None,
        typer.Option("--direction", help="Default: both if the monitor ports can carry it, otherwise one."),
    ] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="For a replay of all nodes' captures together; no node need be complete.")
    ] = False,
) -> None:
    """Choose which ports to mirror, with the reason of every choice; no switch is asked."""
    from switch_configs.documents import read_document
    from switch_configs.planning.lldp import fill, neighbours
    from switch_configs.planning.planner import make_plan
    from switch_configs.schema import Topology
    from switch_configs.vendors.render import text as rendered

    wanted = Topology.load(topology)
    if lldp or wanted.nics or wanted.node_nics:
        dumps = {}
        for entry in lldp or []:
            host, equals, file = entry.partition("=")
            if not equals:
                raise UserError(f"--lldp {entry}: no host is named", remedy="write --lldp HOST=FILE")
            dumps[host] = neighbours(read_document(Path(file)), file)
        wanted = fill(wanted, dumps)
    made = make_plan(wanted, redundancy=redundancy, direction=direction, joined=joined)
    _write(out, made.to_json())
    for choice in made.groups:
        typer.echo(f"group {choice.group}: ranks {', '.join(map(str, choice.ranks))}, {choice.direction}")
        for line in choice.why:
            typer.echo(f"  {line}")
    for session in made.sessions:
        typer.echo(f"{session.leaf} session {session.name}: {', '.join(session.ports)} to {session.destination}")
        for line in session.why:
            typer.echo(f"  {line}")
        if text is not None:
            _write(text / f"{session.leaf}-{session.name}.txt", rendered(session))
    for note in made.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"written: {out}")


@contextmanager
def _managers(
    file: Path, leaves: list[str] | None, user: str | None, known_hosts: Path | None, key: Path | None
) -> Iterator[list[Any]]:
    from flowcheck.switch.credentials import find
    from switch_configs.manage import Manager
    from switch_configs.planning.platform_rules import check_plan
    from switch_configs.schema import MirrorPlan, MirrorSession
    from switch_configs.transport import LocalTransport, SshTransport, Transport, is_local

    loaded = MirrorPlan.load(file)
    check_plan(loaded)
    unknown = set(leaves or []) - {session.leaf for session in loaded.sessions}
    if unknown:
        raise UserError(f"the plan has no leaf {sorted(unknown)[0]}", where=str(file),
                        remedy="name a leaf of the plan with --leaf")

    def opener(session: MirrorSession) -> Callable[[], Transport]:
        if is_local(session.vendor):
            return lambda: LocalTransport(session)
        return lambda: SshTransport(session, find(session.leaf, user, known_hosts, key))

    managers = [Manager(s, opener(s)) for s in loaded.sessions if not leaves or s.leaf in leaves]
    try:
        yield managers
    finally:
        for manager in managers:
            manager.close()


def _undo_file(plan_file: Path) -> Path:
    return plan_file.with_name(f"{plan_file.name}.undo")


def _port_lines(plan_file: Path) -> dict[str, list[str]]:
    """Per destination port the lines that give it its settings back, as apply wrote them down."""
    try:
        found = json.loads(_undo_file(plan_file).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(lines, list) and all(isinstance(line, str) and "\n" not in line for line in lines)
        for lines in found.values()
    ):
        raise UserError("is not what `switch apply` writes", where=str(_undo_file(plan_file)),
                        remedy="delete it: ports then keep MTU and LLDP as apply set them")
    return found


def _port(session: Any) -> str:
    """What _port_lines() calls the destination port of a session."""
    return f"{session.leaf} {session.destination}"


def _remember(plan_file: Path, session: Any, lines: tuple[str, ...]) -> None:
    """Written before anything is typed. What is known from an earlier apply stays: that was the port's own state."""
    known = _port_lines(plan_file)
    if lines and _port(session) not in known:
        _write(_undo_file(plan_file), json.dumps(known | {_port(session): lines}, indent=1))


def _forget(plan_file: Path, session: Any) -> None:
    known = _port_lines(plan_file)
    if known.pop(_port(session), None) is None:
        return
    if known:
        _write(_undo_file(plan_file), json.dumps(known, indent=1))
    else:
        _undo_file(plan_file).unlink()


def _write(path: Path, text: str) -> None:
    """A reader sees the old file or the new one. Raises EnvironmentProblem naming `path`, not the file aside."""
    try:
        make_directory(path.parent)
        write_atomic(path, text.encode())
    except EnvironmentProblem as error:
        raise EnvironmentProblem(error.what, where=str(path), remedy=error.remedy) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot be written: {error.strerror or error}", where=str(path), remedy="name a path in another directory",
        ) from None


def _title(session: Any) -> str:
    return f"{session.leaf} session {session.name} ({session.vendor})"


def _print_difference(manager: Any, difference: Any) -> None:
    typer.echo(f"{_title(manager.session)}: {'changes' if difference.commands else 'as planned'}")
    for line in difference.lines:
        typer.echo(f"  {line}")


@switch.command()
@_mapped
def diff(
    plan_file: PlanArgument, leaf: LeafOption = None, user: UserOption = None, known_hosts: KnownOption = None,
    key: KeyOption = None,
) -> None:
    """Compare the switches with the plan; exit status 1 if they differ."""
    changed = False
    with (
        handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP),  # taken back as after Ctrl-C
        _managers(plan_file, leaf, user, known_hosts, key) as managers,
    ):
        for manager in managers:
            difference = manager.difference()
            _print_difference(manager, difference)
            changed |= bool(difference.commands)
    raise typer.Exit(int(changed))


@switch.command()
@_mapped
def apply(
    plan_file: PlanArgument, leaf: LeafOption = None, commit: CommitOption = False, yes: YesOption = False,
    save: Annotated[
        bool, typer.Option("--save", help="Also keep it over a reboot of the switch. Some do without (Cumulus 5.9).")
    ] = False,
    user: UserOption = None, known_hosts: KnownOption = None, key: KeyOption = None,
) -> None:
    """Show what would be typed; with --commit type it, read it back, and undo it if it does not take."""
    from switch_configs.vendors.render import kept, timed_undo, verified

    with (
        handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP),  # taken back as after Ctrl-C
        _managers(plan_file, leaf, user, known_hosts, key) as managers,
    ):
        for manager in managers:
            difference = manager.difference()
            _print_difference(manager, difference)
            if not difference.commands:
                continue
            typer.echo(f"  {verified(manager.session.vendor)}")
            timer = timed_undo(manager.session.vendor)
            typer.echo(f"  timed undo: {timer or 'none on this platform; a failure is undone by flowcheck'}")
            typer.echo(f"  kept over a reboot: {kept(manager.session.vendor)}")
            for line in difference.commands:
                typer.echo(f"    {line}")
            if not commit:
                typer.echo("  dry run: nothing was changed; --commit does it")
                continue
            if not yes and not typer.confirm("type these commands?"):
                raise typer.Exit(1)
            _remember(plan_file, manager.session, difference.port_before)
            state = manager.apply(difference, save=save)
            typer.echo(f"  active: {len(state.sources)} sources to {state.destination}")


@switch.command()
@_mapped
def show(
    plan_file: PlanArgument, leaf: LeafOption = None, as_json: JsonOption = False, user: UserOption = None,
    known_hosts: KnownOption = None, key: KeyOption = None,
) -> None:
    """Read the sessions back; exit status 1 if one is missing, inactive, cut or different."""
    good = True
    documents = []
    with _managers(plan_file, leaf, user, known_hosts, key) as managers:
        for manager in managers:
            found = manager.show()
            as_planned = found.mine.active and found.mine.same_as(manager.session)
            good &= as_planned
            documents.append(
                {
                    "leaf": manager.session.leaf, "as_planned": as_planned, "session": found.mine.model_dump(),
                    "others": [other.model_dump() for other in found.others],
                }
            )
            if not as_json:
                _print_state(manager.session, found, as_planned)
    if as_json:
        json.dump({"schema": "flowcheck-switch-show/1", "sessions": documents}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    raise typer.Exit(int(not good))


def _print_state(session: Any, found: Any, as_planned: bool) -> None:
    mine = found.mine
    word = "absent" if not mine.exists else "active" if mine.active else "exists but is NOT active"
    typer.echo(f"{_title(session)}: {word}{'' if as_planned or not mine.exists else ', differs from the plan'}")
    for source in mine.sources:
        typer.echo(f"  source {source.port} {source.direction}")
    if mine.exists:
        typer.echo(f"  destination {mine.destination or 'none'}")
    for label, value in (("why not", mine.reason), ("cut", mine.truncation)):
        if value:
            typer.echo(f"  {label}: {value}")
    for name, count in mine.lost.items():
        typer.echo(f"  {name}: {count}")
    for other in found.others:
        state = "" if other.active else f" (not active: {other.reason})"
        typer.echo(f"  somebody else's: {other.name} to {other.destination or 'nowhere'}{state}")


@switch.command()
@_mapped
def verify(
    plan_file: PlanArgument,
    captures: Annotated[
        list[Path] | None, typer.Argument(help="Captures taken at the mirror port, pcap or pcapng.")
    ] = None,
    interface: Annotated[str | None, typer.Option("--interface", help="Look at this interface of the node.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="For so long.")] = 5.0,
    port: Annotated[
        list[str] | None,
        typer.Option("--port", help="Leaf's port that the interface is cabled to (of a bond each), if it has several."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge what arrived at the mirror port: directions, truncation, gaps, duplicates, MTU, ranks."""
    from flowcheck.switch.delivery import at_ports, run
    from switch_configs.schema import MirrorPlan

    if bool(captures) == bool(interface):
        raise UserError("captures or --interface must be given, and not both", remedy="give one of them")
    console = Console(soft_wrap=True)
    plan = MirrorPlan.load(plan_file)
    if interface or port:  # captures may be of all monitor ports together
        plan = at_ports(plan, port or [])
    raise typer.Exit(run(captures or [], interface, seconds, plan, as_json, console))


@switch.command()
@_mapped
def remove(
    plan_file: PlanArgument, leaf: LeafOption = None, commit: CommitOption = False, yes: YesOption = False,
    user: UserOption = None, known_hosts: KnownOption = None, key: KeyOption = None,
) -> None:
    """Remove our sessions and nothing else; a dry run without --commit."""
    with _managers(plan_file, leaf, user, known_hosts, key) as managers:
        for manager in managers:
            mine = manager.show().mine
            if not mine.exists:
                typer.echo(f"{_title(manager.session)}: absent")
                continue
            typer.echo(f"{_title(manager.session)}: to remove{'' if mine.ours else ', but it is not ours'}")
            lines = _port_lines(plan_file).get(_port(manager.session), [])
            for line in lines:
                typer.echo(f"    {line}")
            if not commit:
                typer.echo("  dry run: nothing was changed; --commit does it")
                continue
            if not yes and not typer.confirm("remove it?"):
                raise typer.Exit(1)
            manager.remove(lines)
            _forget(plan_file, manager.session)
            typer.echo("  removed" + (", the port has its earlier settings back" if lines else ""))
