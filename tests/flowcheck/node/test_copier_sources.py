"""Whom a process that keeps copies copies from, with which key, and where its journals come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.node.protect import worker as module
from flowcheck.node.protect.border import CopierSettings, OtherTokens
from flowcheck.node.protect.placement import Part
from flowcheck.node.protect.worker import _Sources


class Followed:
    """A copier that notes whom it is to follow."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.froze: list[Any] = []
        self.rooms: list[Any] = []
        self.nodes: list[NodeClient] = []

    def follow(self, nodes: list[NodeClient]) -> None:
        self.names.append([node.name for node in nodes])
        self.nodes = nodes

    def freeze(self, steps: Any) -> None:
        self.froze.append(steps)

    def check_room(self, nbytes: int, what: str) -> None:
        self.rooms.append((nbytes, what))


def given(**more: Any) -> CopierSettings:
    """Settings of a process that copies from h:1, as they come over its stdin."""
    return CopierSettings.model_validate_json(json.dumps({
        "cores": [], "sources": [["h", 1]], "key": "k", "keys": ["k"], "ca": "", "own": "", "rate": 0, "parity": None,
        "directory": "/copies", "token": "a token", "journal": [], "registry": None,
        "rules": {"every": 1, "keep": 2, "most": 5, "seconds": 0.25}, **more}))


def test_settings_come_first_and_then_what_the_registry_says_each_once() -> None:
    copier = Followed()
    sources = _Sources(copier, given())  # type: ignore[arg-type]
    part = Part((2, 1), 2, ("a:1", "b:2"))
    sources.placed([("i", 2), ("h", 1)], {("run", 0): 4}, part)
    sources.placed([("i", 2), ("h", 1)], {}, None)
    sources.placed([], {}, None)
    assert copier.names == [["h:1"], ["h:1", "i:2"], ["h:1"]], "and not again where nothing has changed"
    assert copier.froze == [{("run", 0): 4}, {}, {}] and sources.part is None


def test_what_could_not_be_followed_is_followed_when_it_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Followed()
    sources = _Sources(copier, given())  # type: ignore[arg-type]

    def fail(nodes: list[NodeClient]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(copier, "follow", fail)
        sources.placed([("i", 2)], {}, None)
    sources.renew(OtherTokens(key="newer"))
    assert copier.names == [["h:1"]] * 2
    sources.placed([("i", 2)], {}, None)
    assert copier.names[2:] == [["h:1", "i:2"]]


def test_what_is_told_is_shown_from_now_on() -> None:
    copier = Followed()
    sources = _Sources(copier, given())  # type: ignore[arg-type]
    assert copier.nodes[0].connection.key == "k"
    sources.renew(OtherTokens(key="other", token="another token"))
    assert copier.nodes[0].connection.key == "other" and copier.names == [["h:1"]] * 2
    assert sources.node(("i", 9)).connection.key == "other" and sources.node(("i", 9)).connection.tls is None


def test_nodes_are_asked_with_tls_where_there_is_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "client_context", lambda ca: f"context of {ca}")
    sources = _Sources(Followed(), given(ca="our.pem"))  # type: ignore[arg-type]
    assert sources.node(("i", 9)).connection.tls == "context of our.pem"


def journaling(monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Any, Followed, _Sources]:
    begun: list[Any] = []
    monkeypatch.setattr(module, "Journaling", lambda *some: begun.append(some) or "journaling")
    monkeypatch.setattr(module, "ParityBase", lambda *some: ("parity", *some))
    copier = Followed()
    sources = _Sources(copier, given(**more))  # type: ignore[arg-type]
    assert sources.journal(("h", 1), ("h", 9), "say") == "journaling"  # type: ignore[arg-type,comparison-overlap]
    return begun[0], begun[0][-1], copier, sources


def test_a_journal_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, parity, copier, sources = journaling(monkeypatch)
    directory, name, node, control, token, tls, room, say, seconds, _ = begun
    assert (directory, name, control) == (Path("/copies"), "h:1", ("h", 9))
    assert (tls, say, seconds, parity) == (None, "say", 0.25, None)
    assert node().name == "h:1" and token() == b"a token"
    sources.renew(OtherTokens(token="another", key="newer"))
    assert token() == b"another" and node().connection.key == "newer"
    room(7)
    assert copier.rooms == [(7, "an iteration")]


MEMBER = {"code": [2, 1], "number": 2, "members": [["h", 1], ["i", 2], ["me", 3]], "data": ["h:1", "i:2"],
          "directory": "/parity"}


def test_a_journal_comes_over_tls_where_there_is_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "client_context", lambda ca: f"context of {ca}")
    begun, *_ = journaling(monkeypatch, ca="our.pem")
    assert begun[5] == "context of our.pem"


def test_a_journal_of_a_member_whose_copy_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (name, directory, node, room), copier, _ = journaling(monkeypatch, sources=[["x", 1]], parity=MEMBER)
    assert (name, directory, node().name) == ("parity", Path("/parity"), "me:3")
    room(8)
    assert copier.rooms == [(8, "what parity gives")]


@pytest.mark.parametrize("more", [
    {"parity": MEMBER}, {"sources": [["x", 1]], "parity": {**MEMBER, "members": []}}, {"sources": [["x", 1]]},
])
def test_where_a_copy_is_kept_it_begins_with_that(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    assert journaling(monkeypatch, **more)[1] is None
