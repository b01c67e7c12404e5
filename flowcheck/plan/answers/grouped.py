"""Options of a command in groups.

    @dataclass(frozen=True)
    class PaceOptions:
        gap_s: Annotated[float | None, typer.Option(help="...")] = None

    @grouped
    def capacity(pace: PaceOptions, as_json: JsonOption = False) -> None: ...

typer sees the fields where the group stands, in their order. An option is then written once, and goes on with its
group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints

__all__ = ["grouped"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The same command for typer: a parameter that is a dataclass of options becomes one parameter for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    flat: list[Parameter] = []
    for one in inspect.signature(command).parameters.values():
        if one.name in groups:
            kinds = get_type_hints(groups[one.name], include_extras=True)
            flat += [Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name])
                     for field in fields(groups[one.name])]
        else:
            flat.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # what inspect looks for first
    run.__annotations__ = {one.name: one.annotation for one in flat}
    return run
