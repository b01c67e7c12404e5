"""What this rank gave of itself with a version, as it goes on with it.

    state, why = own_state(found, own, as_many)         as it came; {}: none is taken, and perhaps why
    given = given_of(state, lacking, shard, own)        what is there of it, and what is not

`lacking`: what all ranks together work out of that (statements.py). Torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from flowcheck.control.user_state import UserState
from flowcheck.trainer.describe.extra import extra_of

__all__ = ["PARTS", "Given", "flags_of", "given_of", "own_state"]

PARTS = ("user", "scheduler", "scaler", "rng")
_NAMES = {"groups": "the groups' options"}


@dataclass(frozen=True)
class Given:
    """parts, missing: as of Recovered. extra: what modules gave besides tensors. groups: options of the optimizer's
    groups with which the iteration after the version began; (): as the version's last step had them. said: in words,
    what is missing."""

    parts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    said: tuple[str, ...] = ()


def own_state(found: UserState | None, own: int | None, as_many: bool) -> tuple[dict[str, Any], str]:
    """This rank's own state, or why it is not taken. as_many: of a job of as many ranks alone."""
    if found is None:
        return {}, ""
    if as_many and found.ranks != dist.get_world_size():
        return {}, (f"states of ranks are those of a job of {found.ranks} ranks, this one has {dist.get_world_size()}:"
                    " none is taken; rank= takes one")
    state = found.state
    names = ("rng", "user", "scheduler", "scaler", "extra")
    parts = [state.get(name, {}) for name in names] if isinstance(state, dict) else []
    lost = state.get("missing", {}) if parts else {}
    if not isinstance(lost, dict) or not all(isinstance(one, str) for pair in lost.items() for one in pair):
        lost = {}
    groups = state.get("groups", [] if "groups" in lost else None) if parts else None
    if not isinstance(groups, list) or not all(isinstance(part, dict) for part in [*parts, *groups]) or not all(
            isinstance(flag, bool) for group in groups for flag in flags_of(group)):
        return {}, f"the state of rank {own} is not one of this version of flowcheck"
    return state, ""


def flags_of(group: Mapping[str, Any]) -> list[Any]:
    """What a rank said of each parameter of a group: is it stepped?"""
    said = group.get("params")
    return said if isinstance(said, list) else []


def given_of(state: Mapping[str, Any], lacking: Mapping[str, str], shard: str, own: int | None) -> Given:
    """lacking: of what is not taken why, "" stands for all of it."""
    parts = {name: state[name] for name in PARTS if name in state and name not in lacking}
    extra = extra_of(state, shard) if "extra" not in lacking else {}
    whole = dict.fromkeys(PARTS, lacking[""]) if "" in lacking else lacking
    paths: dict[str, list[str]] = {}
    for path, why in lacking.items():
        paths.setdefault(why, []).append(_NAMES.get(path, path))
    said = tuple(f"{', '.join(filter(None, of))}: {why}" if any(of) else why for why, of in paths.items())
    return Given(parts, whole, extra, state.get("groups", []) if "groups" not in lacking else (),
                 said if own is not None else ())
