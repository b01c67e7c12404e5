"""Copies of what other nodes have: which steps are taken, what stays, and what a source that fails does to others."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.checkpoint.directory import load_step
from flowcheck.control.ask import COPY, DISK, MEMORY, STORE, Node
from flowcheck.errors import FlowcheckError
from flowcheck.node import copier as module
from flowcheck.node import sitting
from flowcheck.node.copier import Copier, Rules
from flowcheck.node.decided import Member
from flowcheck.node.etcd import Etcd
from flowcheck.node.holdings import DiskShelf
from flowcheck.node.journal import FOLDER, JobText, Journal
from flowcheck.node.parity_shelf import Placed
from flowcheck.node.rounds import Streams

from ..hand_api import KEY, HandApi, HandVersion
from ..hand_node import until
from .registry_scene import etcd_server

Said = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def make(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copier]]:
    """make(every=..., keep=...) -> a Copier into tmp_path / "copies", closed afterwards."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.01)
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


def node(api: HandApi, key: str = KEY) -> Node:
    return Node(api.address, key, seconds=60.0)


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
    source = Node(api.address, KEY, seconds=60.0)
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
    with pytest.raises(FlowcheckError, match="MiB are taken") as refused:
        copier.look(node(api))
    assert refused.value.where == "protect.memory_mb" and steps(tmp_path) == [4]
    api.versions[:] = [HandVersion(6)]
    copier.look(node(api))
    assert steps(tmp_path) == [4, 6]


def test_a_source_is_followed_until_it_is_named_no_more(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, said: Said
) -> None:
    """And one that is gone is said once, however often it is asked."""
    copier = make(keep=9)
    copier.follow([node(api)])
    until(lambda: steps(tmp_path) == [4])
    api.versions[:] = [HandVersion(5)]
    until(lambda: steps(tmp_path) == [4, 5])
    with HandApi(HandVersion(7, shard="x")) as other:
        copier.follow([node(other)])
        until(lambda: steps(tmp_path, "x") == [7])
        api.versions[:] = [HandVersion(6)]
        asked = other.asked_for("/v1/versions")
        until(lambda: other.asked_for("/v1/versions") > asked + 3)
        assert steps(tmp_path, "") == [4, 5]  # what was copied of it stays
    until(lambda: any(event == "uncopied" and "refused" in fields["why"].lower() for event, fields in said))
    attempts = copier._sources[other.name]
    assert attempts[0].is_alive()
    gone = [fields for event, fields in said if event == "uncopied" and "refused" in fields["why"].lower()]
    assert len(gone) == 1 and gone[0]["source"] == other.name and steps(tmp_path, "x") == [7]


def test_a_source_for_which_there_was_no_thread_gets_one_later(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = make()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            copier.follow([node(api)])
    copier.follow([node(api)])
    until(lambda: steps(tmp_path) == [4])


def test_whom_the_registry_says_is_followed_once_there_is_a_thread(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = module._Sources(make(), {"sources": [], "key": KEY, "ca": "", "own": "127.0.0.1:9", "rate": 0})

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            sources.placed([api.address], {}, None)
    sources.placed([api.address], {}, None)
    until(lambda: steps(tmp_path) == [4])


def test_another_key_is_shown_from_now_on(
    make: Callable[..., Copier], api: HandApi, tmp_path: Path, said: Said
) -> None:
    copier = make()
    copier.follow([node(api, "another key")])
    until(lambda: said)
    assert said == [("uncopied", {"name": "", "source": api.name, "why": "the token is wrong"})]
    copier.follow([node(api)])
    until(lambda: steps(tmp_path) == [4])


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
    sources = module._Sources(make(), {"sources": [], "key": KEY, "ca": "", "own": own, "rate": 8 << 20})
    nodes = {node.name: node.again().pace for node in sources.nodes([("127.0.0.1", 9), ("127.0.0.1", 8), ("::1", 9)])}
    assert {name for name, pace in nodes.items() if pace is None} == {own} - {""}
    assert len({id(pace) for pace in nodes.values() if pace is not None}) == 1, "they do not share one"


# -- with a registry -----------------------------------------------------------------------------------------------


def test_whose_copies_are_kept_is_the_registrys_to_say(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch,
                                                       ) -> None:
    """A real etcd. When it is killed, copies go on, and that is said once; begun again, the process knows whose."""
    monkeypatch.setattr(sitting, "TURN_SECONDS", 0.1)
    copies = tmp_path / "copies"

    def say(event: str, **fields: Any) -> None:
        said.append((event, fields))

    def held(step: int) -> bool:
        return step in steps(tmp_path)

    with etcd_server(tmp_path / "etcd") as server, HandApi(HandVersion(4)) as api, contextlib.ExitStack() as stack:
        source = Etcd(server.endpoints, "c", seconds=30.0)
        member = Member(Site("source"), api.name)
        source.renew({"members/source": member.text()})
        registry = {"endpoints": server.endpoints, "cluster": "c", "ca": "", "replicas": 2, "grace": 0.2,
                    "address": "127.0.0.1:9", "site": {"name": "holder", "leaf": "l"}, "follows": False,
                    "standby": False, "own": False, "replace": [], "replace_seconds": 1.0, "directory": str(tmp_path),
                    "code": None}

        def begin() -> threading.Event:
            copier = Copier(copies, Rules(seconds=0.01), say)
            stack.callback(copier.close, 60.0)
            sources = module._Sources(copier, {"sources": [], "key": KEY, "ca": "", "own": "127.0.0.1:9", "rate": 0})
            ending = threading.Event()
            thread = threading.Thread(target=sitting.sit, args=(
                registry, copies / "placement.json", copier.held, list, sources.placed, sources.node, say, ending))
            thread.start()
            stack.callback(thread.join, 60.0)
            stack.callback(ending.set)
            return ending

        first = begin()

        def copied() -> bool:
            source.renew({"members/source": member.text()})
            return held(4)

        until(copied)
        placed = next(fields for event, fields in said if event == "placed")
        assert (placed["epoch"], placed["copies"], placed["holders"]) == (1, ["source"], ["source"])
        until(lambda: "steps" in source.read()["have/holder"].value)
        assert source.read()["root"].value == "holder"
        server.kill()
        until(lambda: any(event == "unregistered" for event, _ in said))
        api.versions[:] = [HandVersion(5)]
        until(lambda: held(5))
        assert [event for event, _ in said].count("unregistered") == 1
        first.set()
        api.versions[:] = [HandVersion(6)]
        begin()  # a process that is started again while etcd is gone
        until(lambda: held(6))


def test_parity_is_the_registrys_to_place(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real etcd, two nodes that follow a stage each, and a holder, which is root. When etcd is killed, rounds go on,
    also in a process that is started again meanwhile. The API asks those that the decision names."""
    monkeypatch.setattr(sitting, "TURN_SECONDS", 0.1)
    copies, parity = tmp_path / "copies", tmp_path / "parity"
    copies.mkdir()

    def say(event: str, **fields: Any) -> None:
        said.append((event, fields))

    def protected(step: int) -> bool:
        return any(event == "protected" and fields["step"] == step for event, fields in said)

    with etcd_server(tmp_path / "etcd") as server, HandApi() as one, HandApi() as two, contextlib.ExitStack() as stack:
        nodes = dict(zip(("n0", "n1"), (one, two), strict=True))
        sessions = {name: Etcd(server.endpoints, "c", seconds=30.0) for name in nodes}

        def versions(step: int) -> None:
            for number, api in enumerate(nodes.values()):
                api.versions[:] = [HandVersion(step, shard=f"stage{number}")]

        def there() -> bool:
            """Their leases are renewed; never true."""
            for number, (name, session) in enumerate(sessions.items()):
                own = [{"run_id": "run", "epoch": 0, "shard": f"stage{number}"}]
                session.renew({f"members/{name}": Member(Site(name), nodes[name].name, parity=True).text(),
                               f"have/{name}": json.dumps({"epoch": 0, "copies": [], "own": own})})
            return False

        registry = {"endpoints": server.endpoints, "cluster": "c", "ca": "", "replicas": 1, "grace": 0.2,
                    "address": "127.0.0.1:9", "site": {"name": "holder", "leaf": "l"}, "follows": False,
                    "standby": False, "own": False, "replace": [], "replace_seconds": 1.0, "directory": str(tmp_path),
                    "code": [2, 1]}

        def begin() -> Callable[[], None]:
            rules = Rules(seconds=0.01)
            copier = Copier(copies, rules, say)
            stack.callback(copier.close, 60.0)
            sources = module._Sources(copier, {"sources": [], "key": KEY, "ca": "", "own": "127.0.0.1:9", "rate": 0})
            ending = threading.Event()
            threads = [threading.Thread(target=sitting.sit, args=(
                registry, copies / "placement.json", copier.held, Streams(parity).held, sources.placed, sources.node,
                say, ending)), threading.Thread(target=module._go_round, args=(
                    parity, rules, copier, sources, say, ending))]
            for thread in threads:
                thread.start()

            def end() -> None:
                ending.set()
                for thread in threads:
                    thread.join(60.0)

            stack.callback(end)
            return end

        versions(4)
        there()
        end = begin()
        until(lambda: there() or protected(4))
        placed = [fields for event, fields in said if event == "placed"][-1]
        assert placed["parity"] == {"data": ["n0", "n1"], "holders": ["holder"]} and placed["copies"] == []
        assert Placed(copies / "placement.json", "holder")() == [one.address, two.address]
        assert Placed(tmp_path / "nothing", "holder")() == []
        until(lambda: there() or '"stream": 2' in sessions["n0"].read()["have/holder"].value)
        server.kill()
        until(lambda: any(event == "unregistered" for event, _ in said))
        versions(5)
        until(lambda: protected(5))
        end()
        versions(6)
        begin()
        until(lambda: protected(6))
        assert [event for event, _ in said if event in ("unprotected", "problem")] == []
