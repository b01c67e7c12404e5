"""`flowcheck rewind`: which steps can be had from nodes, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.rewind import MAKEABLE, Had, Steps, steps_of
from flowcheck.ask.sources import addresses
from flowcheck.control.protocol import token_bytes
from flowcheck.control.tls import client_context
from flowcheck.errors import EnvironmentProblem, size_text
from flowcheck.tables import Column, print_table, screen

__all__ = ["run"]


def run(nodes: str, token: str, run_id: str | None, ca: str, seconds: float, as_json: bool) -> int:
    """Exit status. run_id: only this one. Raises UserError; EnvironmentProblem: nobody answered."""
    key, tls = reader_key(token_bytes(token)), client_context(ca) if ca else None
    asked = [NodeClient(address, key, seconds, tls) for address in addresses(nodes)]
    found = steps_of(asked)
    if run_id is not None:
        found = Steps(tuple(one for one in found.steps if one.run_id == run_id),
                      tuple(one for one in found.holes if one.run_id == run_id), found.absent)
    if len(found.absent) >= len(asked) and not found.steps:
        raise EnvironmentProblem(f"nobody said what can be had: {'; '.join(found.absent)}", where=nodes,
                                 remedy="HOST:PORT of api.listen, and the nodes' token")
    if as_json:
        typer.echo(json.dumps({"schema": "flowcheck-rewind/1", **asdict(found)}, indent=1))
        return int(bool(found.absent))
    columns = [Column("run", folds=True), Column("epoch", number=True), Column("shard"), Column("steps", number=True),
               Column("kind"), Column("status"), Column("bytes of one", number=True), Column("seconds", number=True),
               Column("node", folds=True)]
    print_table(screen(), columns, [_row(one) for one in found.steps], "Steps that can be had")
    for hole in found.holes:
        typer.echo(f"hole: {hole.node} has no gradients of iterations {hole.first} to {hole.last} of run"
                   f" {hole.run_id!r}, epoch {hole.epoch}{f', shard {hole.shard!r}' if hole.shard else ''}")
    for why in found.absent:
        typer.echo(f"not answered: {why}", err=True)
    return int(bool(found.absent))


def _row(one: Had) -> list[str]:
    steps = str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
    seconds = f"{one.seconds:.1f}" if one.kind == MAKEABLE else "0"
    return [one.run_id, str(one.epoch), one.shard or "-", steps, one.kind, one.status or "-", size_text(one.nbytes),
            seconds, one.node]
