"""Asking `flowcheck plan` as a person does: words in, exit status and output out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowcheck.cli import app

__all__ = ["asked", "answer_of", "refused"]


def asked(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    """(exit status, standard output) of `flowcheck plan LINE`."""
    status = app(["plan", *line.split()], standalone_mode=False)
    return int(status or 0), capsys.readouterr().out


def answer_of(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    """The JSON object, with results and inputs by name."""
    _, out = asked(capsys, f"{line} --json")
    found: dict[str, Any] = json.loads(out)
    for kind in ("inputs", "results"):
        found[kind] = {row["name"]: row["value"] for row in found[kind]}
    return found


def refused(line: str) -> Any:
    """The UserError that the command ends with."""
    from flowcheck.errors import UserError

    with pytest.raises(UserError) as caught:
        app(["plan", *line.split()], standalone_mode=False)
    return caught.value
