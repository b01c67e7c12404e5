"""What ranks say to each other about versions, and what each works out of what all have said.

    found_here(found, own)              what this rank can have, before a version is chosen
    check_same(said, wants)             all want one thing, of one run
    reasons_of(said, key)               of each rank why the chosen version is not taken
    lacking(said, own, state, why)      what this rank goes on without

`said` has a statement of each rank, in the order of ranks: dicts as JSON has them. Torch is not needed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowcheck.ask.sources import Found, Key
from flowcheck.control.version import Version
from flowcheck.errors import FlowcheckError, UserError

__all__ = ["check_no_errors", "check_same", "digest_of", "error_text", "found_here", "key_of", "lacking", "reasons_of"]

ALIKE = ("scheduler", "scaler", "groups")  # of what ranks give: what all of them take, or none


def found_here(found: Found | Exception, own: int | None) -> dict[str, Any]:
    """What this rank can have."""
    if isinstance(found, Exception):
        return {"wrong": error_text(found)}
    return {
        "run_id": found.run_id, "newest": found.newest,
        "versions": [[*key, status] for key, status in found.versions.items()],
        "user": sorted(found.with_user(own)) if own is not None else [], "absent": list(found.absent),
        "withheld": list(found.withheld), "lacks": found.lacks, "other": found.other, "remedies": list(found.remedies),
    }


def key_of(said: Sequence[Any]) -> Key:
    """As JSON has it."""
    epoch, step, *line = said
    return (epoch, step, line[0]) if line else (epoch, step)


def check_same(said: Sequence[Mapping[str, Any]], wants: Mapping[str, Any]) -> None:
    """All ranks want one thing, and of one run: what each works out of what all say is then the same."""
    for rank, one in enumerate(said):
        for name, value in one.get("wants", {}).items():
            if value != wants[name]:
                raise UserError(f"rank {rank} says {value!r} and this one {wants[name]!r}", where=name,
                                remedy="the same arguments on every rank")
    check_no_errors(said)
    runs = sorted({one["run_id"] for one in said if one["versions"]})
    if len(runs) > 1:
        raise UserError(f"ranks see different runs: {', '.join(map(repr, runs))}", where="run_id", remedy="say run_id=")


def check_no_errors(said: Sequence[Mapping[str, Any]]) -> None:
    """Nobody waits for a rank that has given up."""
    for rank, one in enumerate(said):
        if one.get("wrong"):
            raise UserError(f"rank {rank} gave up: {one['wrong']}", where="recover", remedy="see what that rank says")


def error_text(error: Exception | None) -> str:
    if error is None:
        return ""
    return error.what if isinstance(error, FlowcheckError) else f"{type(error).__name__}: {error}"


def digest_of(version: Version) -> str:
    """What the version is: the same wherever it lies."""
    files = {file: {name: [digest.sha256, digest.spec.dtype, digest.spec.shape] for name, digest in tensors.items()}
             for file, tensors in version.files.items()}
    text = json.dumps([files, version.optimizer, version.rounding], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def reasons_of(said: Sequence[Mapping[str, Any]], key: Key) -> list[str]:
    """Of each rank why the version is not taken, "": it is good there."""
    reasons: list[str] = [one["why"] for one in said]
    of: dict[str, set[str]] = {}
    for one in said:
        of.setdefault(one["shard"], set()).add(one["digest"])
    if any(reasons) or all(len(digests) == 1 for digests in of.values()):
        return reasons
    return [f"step {key[1]} of epoch {key[0]}: ranks of shard {one['shard']!r} were given different versions of it"
            if len(of[one["shard"]]) > 1 else "" for one in said]


def lacking(
    said: Sequence[Mapping[str, Any]], own: int | None, state: Mapping[str, Any], why_no_state: str
) -> dict[str, str]:
    """What this rank goes on without, and why; "" stands for all of it. Schedules and scales of some ranks alone would
    part the others from them. state: this rank's own, {}: none, and perhaps why."""
    if not state:
        return {"": why_no_state or (
            f"the version has no state of rank {own}" if own is not None else "no rank was asked for")}
    out = {str(path): str(why) for path, why in state.get("missing", {}).items()}
    for part in ALIKE:
        without = [rank for rank, one in enumerate(said) if one["own"] is not None and (
            not one["has"] or part in one["missing"])]
        if part not in out and without:
            ranks = f"rank {without[0]}" if len(without) == 1 else f"{len(without)} ranks, rank {without[0]} the first,"
            out[part] = f"{ranks} has none of its own in this version, and all are to go on alike"
    return out
