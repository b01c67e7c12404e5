"""Sources that are followed: by threads of their own, as settings and a registry say, until they are named no more."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect import copier as copying
from flowcheck.node.protect import registry_loop as sitting
from flowcheck.node.protect import worker as module
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import Copier
from flowcheck.node.protect.parity_rounds import Streams
from flowcheck.node.protect.parity_shelf import Placed
from flowcheck.node.protect.placement import Member

from ..hand_api import NODE_KEY, HandApi, HandVersion
from ..hand_node import until
from .registry_scene import etcd_server, signed
from .test_copier import Said, node, steps
from .test_copier_sources import given
from .test_sitting_turns import sits

ASKS = {"key": NODE_KEY, "keys": [NODE_KEY], "ca": ""}


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def make(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copier]]:
    """make(keep=...) -> a Copier into tmp_path / "copies", closed afterwards."""
    monkeypatch.setattr(copying, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(copying, "LONGEST_PAUSE", 0.01)
    with contextlib.ExitStack() as stack:

        def one(**rules: Any) -> Copier:
            made = Copier(tmp_path / "copies", Rules(**{"seconds": 0.01, **rules}),
                          lambda event, **fields: said.append((event, fields)))
            stack.callback(made.close, 60.0)
            return made

        yield one


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(4)) as made:
        yield made


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
    sources = module._Sources(make(), given(sources=[], own="127.0.0.1:9", **ASKS))

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
        source = signed(server.endpoints, "c")
        member = Member(Site("source"), api.name)
        source.renew({"members/source": member.text()})
        registry = sits(endpoints=server.endpoints, ca="", replicas=2, grace=0.2, standby=False, code=None,
                        site={"name": "holder", "leaf": "l"}, directory=str(tmp_path),
                        kept=str(copies / "placement.json"))

        def begin() -> threading.Event:
            copier = Copier(copies, Rules(seconds=0.01), say)
            stack.callback(copier.close, 60.0)
            sources = module._Sources(copier, given(sources=[], own="127.0.0.1:9", **ASKS))
            ending = threading.Event()
            thread = threading.Thread(target=sitting.sit, args=(
                registry, copier.held, list, sources.placed, sources.node, sources.keys,
                say, ending))
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
        sessions = {name: signed(server.endpoints, "c") for name in nodes}

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

        registry = sits(endpoints=server.endpoints, ca="", replicas=1, grace=0.2, standby=False, code=[2, 1],
                        site={"name": "holder", "leaf": "l"}, directory=str(tmp_path),
                        kept=str(copies / "placement.json"))

        def begin() -> Callable[[], None]:
            rules = Rules(seconds=0.01)
            copier = Copier(copies, rules, say)
            stack.callback(copier.close, 60.0)
            sources = module._Sources(copier, given(sources=[], own="127.0.0.1:9", **ASKS))
            ending = threading.Event()
            threads = [threading.Thread(target=sitting.sit, args=(
                registry, copier.held, Streams(parity).held, sources.placed, sources.node,
                sources.keys, say, ending)), threading.Thread(target=module._go_round, args=(
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
