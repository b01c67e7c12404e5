"""Options of `flowcheck plan holders`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from flowcheck.plan.answers.answer import need
from flowcheck.plan.answers.output import JsonOption, publish

__all__ = ["holders"]


def holders(
    members: Annotated[Path, typer.Argument(help="TOML: [[holder]] with name, host, leaf, rack, follows.")],
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Copies of each state; the local one counts. Default: 2.")
    ] = None,
    code: Annotated[str, typer.Option("--code", metavar="K+M", help="Parity instead of copies: data and parity.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Who keeps whose copies or parity, over leaves, and with what probability everything survives."""
    from flowcheck.plan.holders.holders import answer, read_sites

    sites, follows = read_sites(members)
    if not code:
        raise typer.Exit(publish(answer(sites, 2 if replicas is None else replicas), as_json))
    named = re.fullmatch(r"([0-9]{1,4})\+([0-9]{1,4})", code)
    need(named is not None, f"{code!r} is not K+M", "--code", "as in 2+2")
    need(replicas is None, "parity takes the place of copies", "--replicas", "leave it out, or --code")
    assert named is not None
    raise typer.Exit(publish(answer(sites, code=(int(named[1]), int(named[2])), follows=follows), as_json))
