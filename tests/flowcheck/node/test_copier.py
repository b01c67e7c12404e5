"""Copies of what other nodes have: which steps are taken, what stays, and what a source that fails does to others."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY, DISK, MEMORY, STORE
from flowcheck.checkpoint.directory import load_step
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect import copier as copying
from flowcheck.node.protect import worker as module
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import SLACK, Copier
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.versions.holdings import DiskShelf
from flowcheck.node.versions.journal.job_text import JobText

from ..hand_api import KEY, NODE_KEY, HandApi, HandVersion
from ..hand_node import until
from .test_copier_sources import given

Said = list[tuple[str, dict[str, Any]]]
ASKS = {"key": NODE_KEY, "keys": [NODE_KEY], "ca": ""}


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def make(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copier]]:
    """make(every=..., keep=...) -> a Copier into tmp_path / "copies", closed afterwards."""
    monkeypatch.setattr(copying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(copying, "LONGEST_PAUSE", 0.01)
    made: list[Copier] = []

    def one(**rules: Any) -> Copier:
        made.append(Copier(tmp_path / "copies", Rules(**{"seconds": 0.01, **rules}),
                           lambda event, **fields: said.append((event, fields))))
        return made[-1]

    yield one
    for copier in made:
        copier.close(60.0)


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(4)) as made:
        yield made


def node(api: HandApi, key: str = KEY) -> NodeClient:
    return NodeClient(api.address, key, seconds=60.0)


def steps(tmp_path: Path, shard: str | None = None) -> list[int]:
    """What a holder would offer."""
    with contextlib.closing(DiskShelf(tmp_path / "copies", tier=COPY)) as shelf:
        found = [one.offer for one in shelf.look()]
    assert all(one.tier == COPY and one.id.startswith("c") for one in found)
    return sorted(one.step for one in found if shard in (None, one.shard))


def test_multiples_are_taken_and_the_newest_stay(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, said: Said
) -> None:
    copier = make(every=2, keep=2)
    for newest, held in ((4, [4]), (5, [4]), (6, [4, 6]), (7, [4, 6]), (10, [6, 10]), (10, [6, 10])):
        api.versions[:] = [HandVersion(newest), HandVersion(newest - 1)]
        copier.look(node(api))
        assert steps(tmp_path) == held
    assert [fields["step"] for event, fields in said if event == "copied"] == [4, 6, 10]
    first = said[0][1]
    path = Path(first["path"])
    assert (first["source"], first["bytes"], path.name) == (api.name, 20, "step-000004")
    assert not path.exists() and load_step(path.with_name("step-000010")).parameters["w"].tolist() == [10.5, 2.0]


def test_a_clock_that_was_set_back_removes_nothing_that_is_newer(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path
) -> None:
    """Copies from before seem to be of tomorrow: what comes now is the newest nevertheless, and is taken once."""
    copier = make(keep=2)
    for newest in (4, 5):
        api.versions[:] = [HandVersion(newest)]
        copier.look(node(api))
    for path in (tmp_path / "copies").glob("*/*/*/step-*/manifest.json"):
        os.utime(path, ns=(path.stat().st_mtime_ns + 86_400 * 10**9,) * 2)
    for newest, held in ((6, [5, 6]), (6, [5, 6]), (7, [6, 7])):
        api.versions[:] = [HandVersion(newest)]
        copier.look(node(api))
        assert steps(tmp_path) == held
    assert sum("/manifest" in asked for asked, _ in api.asked) == 4


def test_what_is_frozen_stays(make: Callable[..., Copier], api: HandApi, tmp_path: Path) -> None:
    copier = make(keep=1)
    for newest, frozen, held in ((4, {}, [4]), (5, {("run", 0): 4}, [4, 5]), (6, {("run", 0): 4, ("x", 0): 5}, [4, 6]),
                                 (7, {}, [7])):
        api.versions[:] = [HandVersion(newest)]
        copier.freeze(frozen)
        copier.look(node(api))
        assert steps(tmp_path) == held


def test_an_older_copy_stays_until_the_newer_one_is_whole(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path
) -> None:
    copier = make(keep=1)
    copier.look(node(api))
    api.versions[:] = [newer := HandVersion(5)]
    path = f"/v1/versions/{newer.id}/optimizer.safetensors"
    api.quiet.add(path)
    source = NodeClient(api.address, KEY, seconds=60.0)
    failed: list[BaseException] = []

    def look() -> None:
        try:
            copier.look(source)
        except FlowcheckError as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    until(lambda: any(asked == path for asked, _ in api.asked))
    assert steps(tmp_path) == [4]  # while half of the newer one is there
    api.close()  # the source is gone
    thread.join(60.0)
    assert failed and steps(tmp_path) == [4] and not list((tmp_path / "copies").glob("*/*/*/.*"))


def test_groups_and_runs_do_not_push_each_other_out(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path
) -> None:
    copier = make(keep=2)
    for step in (4, 5):
        api.versions[:] = [HandVersion(step, shard="a"), HandVersion(step + 10, shard="b")]
        copier.look(node(api))
    assert steps(tmp_path, "a") == [4, 5] and steps(tmp_path, "b") == [14, 15]
    api.versions[:] = [HandVersion(1, shard="a", run_id="another run"), HandVersion(15, shard="b")]
    copier.look(node(api))  # a job that begins anew: of the group, the two that came last
    assert steps(tmp_path, "a") == [1, 5] and steps(tmp_path, "b") == [14, 15]
    api.versions[:] = [HandVersion(3, shard="b", epoch=1)]
    copier.look(node(api))  # one that went back
    assert steps(tmp_path, "b") == [3, 15]


def test_what_a_node_has_itself_is_copied(make: Callable[..., Copier], api: HandApi, tmp_path: Path) -> None:
    """Neither its copies, which holders would pass round, nor its store; memory before disk."""
    copier = make()
    api.versions[:] = [HandVersion(9, tier=COPY), HandVersion(8, tier=STORE), HandVersion(7, tier=DISK)]
    copier.look(node(api))
    assert steps(tmp_path) == [7]
    api.versions[:] = [HandVersion(8, tier=DISK), HandVersion(8, tier=MEMORY)]
    copier.look(node(api))
    assert steps(tmp_path) == [7, 8] and any(path.startswith("/v1/versions/m") for path, _ in api.asked)


def aged(age: float, *given: Any, **more: Any) -> HandVersion:
    """A version that was published so many seconds ago."""
    made = HandVersion(*given, **more)
    made.offer["age_seconds"] = age
    return made


def test_an_earlier_run_that_came_further_keeps_nothing_from_being_copied(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path
) -> None:
    """Of a job that began anew, or went back: on disk, and in memory until there is something better."""
    copier = make(every=2, keep=9)
    old = [HandVersion(900, tier=DISK, run_id="old", epoch=3), aged(60.0, 902, run_id="old", epoch=3)]
    api.versions[:] = [*old, aged(0.5, 1, run_id="new")]
    copier.look(node(api))
    assert steps(tmp_path) == [902]  # as long as nothing is wanted of the new one
    api.versions[:] = [*old, aged(1.0, 2, run_id="new"), aged(0.1, 3, run_id="new")]
    copier.look(node(api))
    assert steps(tmp_path) == [2, 902]
    api.versions[:] = [*old, HandVersion(4, tier=DISK, run_id="new"), aged(0.1, 7, run_id="new")]
    copier.look(node(api))
    assert steps(tmp_path) == [2, 4, 902]


def test_a_start_that_went_back_is_copied(make: Callable[..., Copier], api: HandApi, tmp_path: Path) -> None:
    copier = make()
    before = [HandVersion(110, tier=DISK), aged(60.0, 110, start="one")]
    api.versions[:] = before
    copier.look(node(api))
    api.versions[:] = [*before, aged(0.5, 60, start="two")]
    copier.look(node(api))
    assert steps(tmp_path) == [60, 110]


def test_the_same_step_of_another_line_is_another_version(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, said: Said
) -> None:
    """Of two starts of one epoch: the later one's is copied in place of what the first one has left, and once."""
    copier, (first, second) = make(), [f"{began:016x}-{began:016x}-0000 {'f' * 64}" for began in (1, 2)]
    api.versions[:] = [HandVersion(4, start=first, tier=DISK), HandVersion(7, start=first, tier=DISK)]
    copier.look(node(api))
    lives = HandVersion(4, {"w": [9.0], "b": [3.0]}, {}, start=second, tier=DISK)
    api.versions.insert(0, lives)
    for _ in "ab":
        copier.look(node(api))
    copied = [Path(fields["path"]) for event, fields in said if event == "copied"]
    assert [path.name for path in copied] == ["step-000007", "step-000004"]
    loaded = load_step(copied[1])
    assert loaded.parameters["w"].tolist() == [9.0] and loaded.manifest["start"] == second


def test_a_group_that_fails_leaves_the_others(make: Callable[..., Copier], api: HandApi, tmp_path: Path) -> None:
    api.versions[:] = [HandVersion(4, shard="a"), HandVersion(4, shard="b")]
    bad = api.versions[0]
    bad.files["model.safetensors"] = bad.files["model.safetensors"][:-1] + b"\xff"
    copier = make()
    with pytest.raises(FlowcheckError, match="SHA-256 differs"):
        copier.look(node(api))
    assert steps(tmp_path, "a") == [] and steps(tmp_path, "b") == [4]


def test_memory_is_bounded(make: Callable[..., Copier], api: HandApi, tmp_path: Path, said: Said) -> None:
    api.versions[:] = [HandVersion(4, {"w": [1.0] * 50_000}, {})]
    copier = make(most=300_000, keep=2)
    copier.look(node(api))
    api.versions[:] = [HandVersion(5, {"w": [1.0] * 50_000}, {})]
    with pytest.raises(FlowcheckError, match=r"195\.5 KiB of 293\.0 KiB are taken") as refused:
        copier.look(node(api))
    assert refused.value.where == "protect.memory_mb" and steps(tmp_path) == [4]
    api.versions[:] = [HandVersion(6)]
    copier.look(node(api))
    assert steps(tmp_path) == [4, 6]


def test_a_copy_has_room_for_its_heads_as_well(make: Callable[..., Copier], api: HandApi, tmp_path: Path) -> None:
    [offer] = node(api).offers()
    most = offer.nbytes + SLACK
    with pytest.raises(FlowcheckError, match=f"step 4 of {offer.shard!r} has 64.0 KiB"):
        make(most=most - 1).look(node(api))
    assert steps(tmp_path) == []
    make(most=most).look(node(api))
    assert steps(tmp_path) == [4]


def test_half_of_a_copy_that_a_killed_process_left_goes(make: Callable[..., Copier], api: HandApi, tmp_path: Path,
                                                         ) -> None:
    make().look(node(api))
    (whole,) = (tmp_path / "copies").glob("*/*/epoch-0/step-*")
    half = whole.with_name(".step-000009.partial-1")
    half.mkdir()
    os.link(whole / "model.safetensors", half / "model.safetensors")
    journal = Journal(whole.parent / FOLDER)
    journal.begin(JobText({}, ("run", 0, 1), 0, "a" * 64))
    journal.add(4, {}, [], {})
    entry = journal.folder / ".entry-000000000005.partial-1"
    entry.write_bytes(b"half")
    copier = make()
    assert not half.exists() and not entry.exists() and steps(tmp_path) == [4] and journal.entries == [4]
    copier.look(node(api))
    assert api.asked_for("/manifest.json") == 1  # what is there is not taken again


@pytest.mark.parametrize("own", ["", "127.0.0.1:9", "[::1]:9"])
def test_what_comes_from_here_is_not_paced(make: Callable[..., Copier], own: str) -> None:
    """A node without an API has no address, and everything that it reads is from others."""
    sources = module._Sources(make(), given(sources=[], own=own, rate=8 << 20, **ASKS))
    asked = [("127.0.0.1", 9), ("127.0.0.1", 8), ("::1", 9)]
    nodes = {node.name: node.again().connection.pace for node in sources.nodes(asked)}
    assert {name for name, pace in nodes.items() if pace is None} == {own} - {""}
    assert len({id(pace) for pace in nodes.values() if pace is not None}) == 1, "they do not share one"
    sources = module._Sources(make(), given(sources=[], own=own, **ASKS))
    assert sources.node(("127.0.0.1", 8)).connection.pace is None, "as fast as they come"
