"""The three roots of everything that can go wrong, and how the command line shows them.

    FlowcheckError
    |- EnvironmentProblem   the machine said no: no huge pages, unreadable file, DPDK refused   exit 3
    |- UserError            what was asked for is wrong: manifest, options, capture             exit 2
    `- InternalError        we have a bug                                                       exit 70

Every message says what, where and what to do. Standard library only: trainers import this module.
"""

from __future__ import annotations

import errno

__all__ = ["EnvironmentProblem", "FlowcheckError", "InternalError", "UserError", "installing", "missing_module",
           "of_the_line", "of_the_machine", "said_of", "size_text"]

SHORT = {  # errno, and what there was too little of
    errno.ENOMEM: "memory", errno.EMFILE: "room for more open files of this process",
    errno.ENFILE: "room for more open files of this machine",
    errno.ENOSPC: "room on a disk or a tmpfs", errno.EDQUOT: "room in a quota",
}
REMEDIES = {
    "memory": "more memory for this process (its cgroup, ulimit -v, other processes), or less to do: smaller jobs,"
    " fewer groups, slots or arenas",
    "room for more threads": "room for more threads of this user: ulimit -u, pids.max of its cgroup",
}
OURS = ("dataplane", "flowcheck", "lab", "parser", "switch_configs", "updater")
PACKAGES = {"yaml": "pyyaml", "prometheus_client": "prometheus-client"}  # of modules that are called otherwise


def _printable(text: str) -> str:
    """File names and foreign text may hold lone surrogates or terminal escapes; messages may not."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class FlowcheckError(Exception):
    """Base. `what` is one sentence, `where` names the file, object or field, `remedy` what to do."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = _printable(what), _printable(where), _printable(remedy)
        super().__init__(self.message())

    def message(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


class EnvironmentProblem(FlowcheckError):
    """The machine said no."""

    exit_code = 3


class UserError(FlowcheckError, ValueError):
    """What was asked for is wrong: a manifest, an argument, a file."""

    exit_code = 2


class InternalError(FlowcheckError):
    """We have a bug."""

    exit_code = 70


def of_the_machine(error: BaseException, where: str = "") -> EnvironmentProblem | None:
    """What to say of an error that no code of ours can be blamed for: the machine had too little of something. None: it
    is another one. torch and the interpreter have no classes for two of them, so their words tell those."""
    short = ""
    if isinstance(error, MemoryError):
        short = "memory"
    elif isinstance(error, OSError):
        short = SHORT.get(error.errno or 0, "")
    elif isinstance(error, RuntimeError):
        text = str(error)
        if "can't allocate memory" in text or "out of memory" in text.lower():
            short = "memory"
        elif "can't start new thread" in text:
            short = "room for more threads"
    if not short:
        return None
    said = str(error).strip().splitlines()
    return EnvironmentProblem(
        f"there was not enough {short}" + (f": {said[0][:200]}" if said else ""), where=where,
        remedy=REMEDIES.get(short, f"more {short}"),
    )


def said_of(error: BaseException) -> str:
    """One text for an event or a log."""
    known = error if isinstance(error, FlowcheckError) else of_the_machine(error)
    return known.message() if known is not None else f"{type(error).__name__}: {error}"


def missing_module(error: ImportError, wanted: str) -> EnvironmentProblem:
    """What to say where `wanted` cannot be imported: an installation has the trainers' side alone, or has no compiled
    extensions, or lacks a package that only some parts need."""
    absent = (error.name or "?").partition(".")[0]
    if absent in OURS:
        return EnvironmentProblem(
            f"is not in this installation, which has no {error.name}: a wheel is the trainers' side alone",
            where=wanted, remedy="the whole, from its sources: make build (docs/use/install.md)",
        )
    return EnvironmentProblem(f"needs the package {absent}", where=wanted, remedy=installing(error))


def installing(error: ImportError) -> str:
    """The command that installs what could not be imported. It names the package and no extra of flowcheck's: flowcheck
    is on no index, so an extra can be named only where its sources or its wheel are."""
    absent = (error.name or "?").partition(".")[0]
    return f"pip install {PACKAGES.get(absent, absent)}"


def of_the_line(error: Exception, command: str) -> UserError | None:
    """What to say of an error of typer's parser: the command line is wrong. None: it is another one. Its `what` is ""
    where the help was printed in its place. (typer's own classes are not imported here.)"""
    say = getattr(error, "format_message", None)
    if say is None:
        return None
    context = getattr(error, "ctx", None)
    path = str(context.command_path) if context is not None else command
    return UserError(str(say()), where=path.partition(" ")[2], remedy=f"{path} --help")


def size_text(nbytes: int, binary: bool = False) -> str:
    """A number of bytes in the largest unit of which there is one: "276.2 kB". binary: in units of 1024, as settings in
    MiB are: "40.0 KiB"."""
    step, units = (1024, ("KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("kB", "MB", "GB", "TB"))
    for power, unit in reversed([*enumerate(units, 1)]):
        scale = step**power
        if nbytes >= scale - scale // (20 * step):  # what would be rounded to a whole one of the smaller unit
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
