"""A journal of another node's steps: over real connections, until the source is gone, and what is made of it then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.checkpoint.directory import load_step, read_step_manifest
from flowcheck.control.protocol import Journal as Question
from flowcheck.errors import FlowcheckError
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.peers.shelf import Followed, _Shown
from flowcheck.node.protect import journal_loop as module
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import Copier
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.protect.journal_loop import Journaling
from flowcheck.rebuild.iteration.intervals import intervals

from ..hand_api import TOKEN, HandApi, HandVersion
from ..hand_node import until
from .journal_scene import Source, journal_job
from .test_peering import Door

Said = list[tuple[str, dict[str, Any]]]
Start = Callable[..., Journaling]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def source(tmp_path: Path, shm: Path) -> Iterator[Source]:
    with contextlib.closing(Source(tmp_path, path=shm / "flowcheck-s--1.replica")) as one:
        yield one


@pytest.fixture
def door(source: Source) -> Iterator[Door]:
    made = Door(source.shelf)
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path, said: Said, door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(address of the API, room) -> a journal of the source, which is closed afterwards."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(module, "GONE_SECONDS", 0.1)
    made: list[Journaling] = []

    def one(api: str, room: Callable[[int], None] = lambda nbytes: None) -> Journaling:
        host, _, port = api.rpartition(":")
        control = door.address.rpartition(":")
        made.append(Journaling(
            tmp_path / "copies", api, lambda: NodeClient((host, int(port)), reader_key(TOKEN.encode()), seconds=60.0),
            (control[0], int(control[2])), TOKEN.encode, None, room,
            lambda event, **fields: said.append((event, fields)), 0.01,
        ))
        made[-1].start()
        return made[-1]

    yield one
    for journaling in made:
        journaling.close(60.0)


def whys(said: Said) -> list[str]:
    return [fields["why"] for event, fields in said if event == "unjournaled"]


def folder_of(tmp_path: Path, api: str) -> Path:
    return module.lane_of(tmp_path / "copies", api, "") / "run" / "epoch-0"


def test_a_source_that_is_lost_comes_back_at_its_newest_step(
    source: Source, start: Start, shm: Path, tmp_path: Path, said: Said
) -> None:
    """A copy of an earlier step, and the journal since then."""
    config = NodeConfig.model_validate({
        "name": "s", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
        "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(shm)}, "output": {"directory": str(shm / "out")},
    })
    with contextlib.closing(Serving(config, TOKEN.encode(), lambda *_, **__: None)) as serving:
        api = serving.address
        host, _, port = api.rpartition(":")
        node = NodeClient((host, int(port)), reader_key(TOKEN.encode()), seconds=60.0)
        copier = Copier(tmp_path / "copies", Rules(), lambda *_, **__: None)
        for _ in range(2):
            source.step()
        copier.look(node)  # the base: step 7
        start(api)
        journal = Journal(folder_of(tmp_path, api) / "journal")
        until(lambda: journal.job is not None)
        for _ in range(4):
            number = source.step()
            until(lambda number=number: number in journal.entries)
        until(lambda: journal.steps and journal.steps[-1] == 11)
        assert journal.entries == [7, 8, 9, 10]  # what the copy has, is not kept twice
        wanted = source.version()
    (shm / "flowcheck-s--1.replica").unlink()
    until(lambda: any(event == "redone" for event, _ in said))
    (fields,) = [fields for event, fields in said if event == "redone"]
    made = Path(fields["path"])
    assert (fields["base"], fields["step"], fields["source"], fields["why"]) == (7, 11, api, "")
    manifest = read_step_manifest(made)
    assert {file: entry["tensors"] for file, entry in manifest["files"].items()} == \
        {file: entry["tensors"] for file, entry in wanted.document()["files"].items()}
    assert (manifest["status"], load_step(made).step) == ("verified", 11) and "a mark" in manifest["unproven"]
    assert [one["steps"] for one in copier.held()] == [[7, 11]]  # offered as any copy


def test_what_it_was_too_late_for_is_a_gap(
    source: Source, start: Start, tmp_path: Path, said: Said
) -> None:
    """And so is what its source has from others; what comes after it is kept: a newer copy may need it."""
    with HandApi(HandVersion(1)) as api:
        source.step()
        start(api.name)
        journal = Journal(folder_of(tmp_path, api.name) / "journal")
        until(lambda: journal.entries == [5])
        with source.shelf._changed:  # it cannot look meanwhile
            for _ in range(6):
                number = source.step(show=False)
                source.shelf._shown[number] = shown(source, number)
            for old in sorted(source.shelf._shown)[:-4]:
                del source.shelf._shown[old]
            source.shelf._newest = source.shelf._closed = number
            source.shelf._changed.notify_all()
        until(lambda: number in journal.entries)
        assert whys(said) == ["iteration 6: its arena has been given to a later iteration; steps after it need a"
                              " newer copy"]
        assert journal.entries == [5, 11]
        lacking = source.step(holes=[(2, 5)])
        until(lambda: len(whys(said)) == 2)
        assert whys(said)[1].startswith(f"iteration {lacking}: 24 bytes came over no mirror of its source")
        after = source.step()
        until(lambda: journal.entries == [5, 11, after])


def shown(source: Source, number: int) -> _Shown:
    region = source.regions[number]
    return _Shown(region, intervals([(0, len(region) // 8)]), lambda: True, source.record)


def test_memory_is_bounded_and_another_start_begins_anew(
    source: Source, start: Start, door: Door, tmp_path: Path, said: Said
) -> None:
    full = [True]

    def room(nbytes: int) -> None:
        if full[0]:
            raise FlowcheckError("an iteration has 0 MiB, and 1 of 1 MiB are taken", where="protect.memory_mb")

    with HandApi(HandVersion(1)) as api:
        source.step()
        start(api.name, room)
        until(lambda: whys(said))
        assert whys(said) == ["an iteration has 0 MiB, and 1 of 1 MiB are taken"]
        full[0] = False
        journal = Journal(folder_of(tmp_path, api.name) / "journal")
        until(lambda: journal.entries)
        with contextlib.closing(Source(tmp_path, journal_job(count=(60, 40)), first=9)) as other:
            other.step()
            door.shelf.follow(other.said.plan, Followed(other.body, other.said.run, 9))
            other.shelf = door.shelf
            other.step()
            until(lambda: Journal(journal.folder).job == other.said and Journal(journal.folder).entries == [10])


def test_a_token_that_is_wrong_is_said_once(source: Source, door: Door, tmp_path: Path, said: Said) -> None:
    with HandApi(HandVersion(1)) as api:
        source.step()
        host, port = door.address.rsplit(":", 1)
        journaling = Journaling(
            tmp_path / "copies", api.name, lambda: NodeClient(api.address, reader_key(TOKEN.encode()), seconds=60.0),
            (host, int(port)), lambda: b"another token of that length", None, lambda nbytes: None,
            lambda event, **fields: said.append((event, fields)), 0.01)
        journaling.start()
        try:
            until(lambda: whys(said) and len(api.asked) > 3)
            assert whys(said) == ["connection closed"]  # as by a node, which says why besides
        finally:
            journaling.close(60.0)


def test_a_group_for_which_there_was_no_thread_gets_one_later(
    source: Source, start: Start, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("flowcheck journal of") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with HandApi(HandVersion(1)) as api:
        number = source.step()
        start(api.name)
        until(lambda: Journal(folder_of(tmp_path, api.name) / FOLDER).entries == [number])
    assert len(refused) == 2 and "can't start new thread" in whys(said)[0]


def test_what_a_shelf_says_of_an_iteration(source: Source) -> None:
    shelf = source.shelf
    number = source.step()
    asked = Question(1, number, source.said.plan, 0.01)
    entry, buffers = shelf.entry(asked)
    assert (entry.why, entry.newest, entry.job, entry.plan) == ("", number, {}, source.said.plan)
    assert (entry.groups, entry.clip, entry.scale, entry.skipped) == (
        list(source.record.groups), source.record.clip, source.record.scale, source.record.skipped)
    assert buffers["buffer.mean"].tolist() == [float(number)] * 3
    entry, _ = shelf.entry(Question(2, number + 1, source.said.plan, 0.01))
    assert entry.why == "it has not closed here"
    shelf.show(number + 1, source.regions[number], shown(source, number).there, lambda: True)
    assert shelf.entry(Question(3, number + 1, source.said.plan, 0.01))[0].why == "it has not closed here"
    shelf.hide(number)
    assert "given to a later" in shelf.entry(asked)[0].why
    entry, _ = shelf.entry(Question(4, 0, "", 0.01))
    assert (entry.job, entry.first, entry.run) == (source.body, 5, ["run", 0, 2]) and entry.why
    shelf.follow("")
    entry, _ = shelf.entry(asked)
    assert (entry.plan, entry.job, entry.newest) == ("", {}, -1)
