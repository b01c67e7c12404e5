"""Files of tokens and of a certificate while a node runs: when they are looked at, what is read, what is said."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import reader_key
from flowcheck.control.proof import node_key
from flowcheck.node import tokens
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.tokens import LOOK_SECONDS, Access, keys_of, read_by_others

from ..certificates import issue

ROLES = ("trainer", "peer", "reader", "operator")
AGAIN = b"another token, as long as one must be"


class Scene:
    """said: events. now: seconds."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **more: Any) -> None:
        self.folder, self.now, self.said = folder, 500.0, list[tuple[str, dict[str, Any]]]()
        patch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: self.now))
        for role in ROLES:
            (folder / role).write_text(f"the token of every {role}\n")
        self.config = NodeConfig.model_validate({
            "control": {"listen": "127.0.0.1:0"}, "capture": {"device": "x"},
            "tokens": {role: str(folder / role) for role in ROLES}} | more)
        self.access = Access(self.config, lambda event, **fields: self.said.append((event, fields)))

    def replace(self, role: str, text: bytes) -> None:
        """Whole, as `mv` does: another file by that name."""
        (self.folder / "new").write_bytes(text)
        (self.folder / "new").rename(self.folder / role)

    def later(self, **how: bool) -> bool:
        self.now += LOOK_SECONDS
        return self.access.look(**how)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_files_are_looked_at_once_a_second_and_read_when_they_have_changed(scene: Scene) -> None:
    scene.replace("trainer", AGAIN)
    scene.now += 0.75
    assert not scene.access.look() and scene.access.of("trainer") == (b"the token of every trainer",)
    scene.now += 0.25
    assert scene.access.look() and scene.access.of("trainer") == (AGAIN,)
    assert scene.said == [("access", {"why": "a file has changed", "roles": sorted(ROLES), "tls": False})]
    scene.replace("trainer", b"the token of every trainer")
    scene.now += 0.75
    assert not scene.access.look(), "a second after the last look"
    scene.now += 0.25
    assert scene.access.look() and not scene.later() and len(scene.said) == 2


def test_all_is_read_anew_where_somebody_asks_for_it(scene: Scene) -> None:
    assert scene.access.look(at_once=True) and scene.said == [
        ("access", {"why": "asked to", "roles": sorted(ROLES), "tls": False})]
    scene.now += 0.75
    scene.replace("reader", AGAIN)
    assert not scene.access.look() and scene.access.look(at_once=True) and scene.access.of("reader") == (AGAIN,)


@pytest.mark.parametrize("how", ["longer", "older", "another file"])
def test_a_file_has_changed_where_its_size_its_time_or_its_number_has(scene: Scene, how: str) -> None:
    path = scene.folder / "reader"
    found = path.stat()
    if how == "longer":
        path.write_bytes(AGAIN)
        os.utime(path, ns=(found.st_mtime_ns, found.st_mtime_ns))
    else:
        if how == "another file":
            scene.replace("reader", b"the token of any   reader\n")
        else:
            path.write_bytes(b"the token of any   reader\n")
        assert path.stat().st_size == found.st_size
        changed = found.st_mtime_ns - (1000 if how == "older" else 0)
        os.utime(path, ns=(changed, changed))
    assert scene.later() and scene.access.of("reader") != (b"the token of every reader",)


def test_what_cannot_be_read_is_said_once_for_each_reason_and_read_when_it_can_be(scene: Scene) -> None:
    reader, aside = scene.folder / "reader", scene.folder / "aside"
    reader.rename(aside)
    for _ in range(3):
        assert not scene.later()
    scene.replace("reader", b"short")
    assert not scene.later() and not scene.later()
    whys = [fields["why"] for event, fields in scene.said if event == "problem"]
    assert len(whys) == len(scene.said) == 2
    assert whys[0] == f"{reader}: No such file or directory; what was read before stays in force"
    assert whys[1].startswith(f"{reader}: ") and scene.access.of("reader") == (b"the token of every reader",)
    aside.rename(reader)
    assert scene.later(), "it is the file that it was, and has been read without what else may have changed"
    assert not scene.later() and [event for event, _ in scene.said] == ["problem", "problem", "access"]
    reader.rename(aside)
    assert not scene.later(), "anew, after it was good"
    assert scene.said[-1] == ("problem", {"why": whys[0], "about": "access"})


def test_a_certificate_is_read_with_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = issue(tmp_path, "own"), issue(tmp_path, "other")
    at = Scene(tmp_path, monkeypatch, tls={"cert": str(own.cert), "key": str(own.key)})
    before = at.access.tls
    assert before is not None and not at.later()
    other.cert.rename(own.cert)
    at.replace("trainer", AGAIN)
    assert not at.later(), "its key is not there yet"
    assert at.access.tls is before and at.access.of("trainer") == (b"the token of every trainer",), "all or nothing"
    other.key.rename(own.key)
    assert at.later() and at.access.tls not in (None, before) and at.access.of("trainer") == (AGAIN,)
    assert at.said[-1] == ("access", {"why": "a file has changed", "roles": sorted(ROLES), "tls": True})


def test_who_may_ask_over_http() -> None:
    held = {"trainer": (b"one", b"two"), "peer": (b"peer",), "reader": (b"two",), "operator": (b"three",)}
    expected = {reader_key(b"one"): ["trainer"], reader_key(b"two"): ["trainer", "reader"],
                reader_key(b"three"): ["operator"], node_key(b"peer").hex(): ["peer"]}
    assert keys_of(held, False) == expected
    assert keys_of(held, True) == expected | {"three": ["operator"]}
    shared = keys_of({"trainer": (b"one",), "operator": (b"one",)}, False)
    assert shared == {reader_key(b"one"): ["trainer", "operator"]}
    assert keys_of({}, True) == {}


def test_an_operators_own_token_may_be_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Scene(tmp_path, monkeypatch)
    assert at.access.keys["the token of every operator"] == ["operator"] and len(at.access.keys) == 5
    (tmp_path / "one").write_bytes(AGAIN)
    control = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "one")}
    at = Scene(tmp_path, monkeypatch, tokens={}, control=control)
    assert at.access.keys == {reader_key(AGAIN): ["trainer", "reader", "operator"], node_key(AGAIN).hex(): ["peer"]}
    assert at.access.of("nobody") == ()


def test_files_that_others_may_read_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = issue(tmp_path, "own")
    at = Scene(tmp_path, monkeypatch, tls={"cert": str(own.cert), "key": str(own.key)})
    files = [tmp_path / role for role in ROLES] + [own.key]
    for mode, named in ((0o600, False), (0o640, True), (0o604, True), (0o711, False), (0o622, False)):
        for path in files:
            path.chmod(mode)
        assert set(read_by_others(at.config)) == (set(files) if named else set())
    for path in files:
        path.chmod(0o644)
    (tmp_path / "peer").unlink()
    assert own.key in read_by_others(at.config) and tmp_path / "peer" not in read_by_others(at.config)
    assert own.cert not in read_by_others(at.config), "it is no secret"
    one = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "reader")}
    shared = Scene(tmp_path, monkeypatch, tokens={"operator": str(tmp_path / "reader")}, control=one)
    (tmp_path / "reader").chmod(0o644)
    assert read_by_others(shared.config) == [tmp_path / "reader"]
