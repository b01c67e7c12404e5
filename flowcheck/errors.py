"""The three roots of everything that can go wrong, and how the command line shows them.

    FlowcheckError
    |- EnvironmentProblem   the machine said no: no huge pages, unreadable file, DPDK refused   exit 3
    |- UserError            what was asked for is wrong: manifest, options, capture             exit 2
    `- InternalError        we have a bug                                                       exit 70

Every message says what, where and what to do. Standard library only: trainers import this module.
"""

from __future__ import annotations

__all__ = ["EnvironmentProblem", "FlowcheckError", "InternalError", "UserError", "missing_module"]

OURS = ("dataplane", "flowcheck", "parser", "switch_configs", "updater")


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


def missing_module(error: ModuleNotFoundError, wanted: str) -> EnvironmentProblem:
    """What to say where `wanted` cannot be imported: an installation has the trainers' side alone, or has no compiled
    extensions, or lacks a package that only some parts need."""
    absent = (error.name or "?").partition(".")[0]
    if absent in OURS:
        return EnvironmentProblem(
            f"is not in this installation, which has no {error.name}: a wheel is the trainers' side alone",
            where=wanted, remedy="the whole, from its sources: make build (docs/use/install.md)",
        )
    return EnvironmentProblem(f"needs the package {absent}", where=wanted, remedy=f"pip install {absent}")
