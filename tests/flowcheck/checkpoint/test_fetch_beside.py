"""What a fetch does beside the tensors: states of ranks, remains of fetches that were killed, what errors name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.checkpoint import fetch as module
from flowcheck.checkpoint.directory import load_step
from flowcheck.checkpoint.users import load_user
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem

from ..hand_api import TOKEN, HandApi, HandVersion
from .test_fetch import NAMES

STATES: list[dict[str, Any]] = [{"user": {"loader": rank}} for rank in range(3)]


@pytest.fixture
def api() -> Iterator[HandApi]:
    """A version with the states of ranks 0 and 2 of three."""
    with HandApi(HandVersion(7, shard="a", epoch=2)) as made:
        for rank in (0, 2):
            made.versions[0].give(rank, pack(STATES[rank], step=7, rank=rank, ranks=3))
        yield made


def test_the_form_that_has_room_for_them_has_the_states_of_ranks(api: HandApi, tmp_path: Path) -> None:
    path = flowcheck.fetch(api.name, tmp_path, token=TOKEN).path
    assert sorted(one.name for one in (path / "user").iterdir()) == [f"rank-0000{rank}.safetensors" for rank in (0, 2)]
    for rank in (0, 2):
        found = load_user(path, load_step(path).manifest, rank)
        assert (found.state, found.step, found.rank, found.ranks) == (STATES[rank], 7, rank, 3)


@pytest.mark.parametrize("format", ["torch", "dcp", "hf"])
def test_the_others_ask_for_none(api: HandApi, tmp_path: Path, format: str) -> None:
    """Nor is a person told that one process writes, as torch does."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        flowcheck.fetch(api.name, tmp_path, token=TOKEN, format=format, whole=True)
    assert not [path for path, _ in api.asked if "user" in path]
    assert not [one for one in told if "torch.distributed is disabled" in str(one.message)]


@pytest.mark.parametrize("format", NAMES)
def test_what_a_killed_fetch_has_left_is_removed(api: HandApi, tmp_path: Path, format: str) -> None:
    left = tmp_path / f".step-000003{Path(NAMES[format]).suffix}.partial-{os.getpid()}-01ab45ef"
    other = tmp_path / f".holiday.partial-{os.getpid()}-01ab45ef"
    for path in (left, other):
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    flowcheck.fetch(api.name, tmp_path, token=TOKEN, format=format, whole=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == [other.name, NAMES[format]]


@pytest.mark.parametrize(("format", "taken"), [("torch", Path.mkdir), ("dcp", Path.touch), ("hf", Path.mkdir)])
def test_an_error_names_what_was_asked_for_and_not_where_it_is_written_first(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, taken: Callable[[Path], None]
) -> None:
    aside = tmp_path / "aside"
    taken(aside)
    monkeypatch.setattr(module, "partial_name", lambda path, several: aside)
    with pytest.raises(EnvironmentProblem, match="cannot be written") as caught:
        flowcheck.fetch(api.name, tmp_path, token=TOKEN, format=format, whole=True)
    assert caught.value.where == str(tmp_path / NAMES[format])
