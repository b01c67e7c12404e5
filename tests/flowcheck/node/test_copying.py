"""What the process that keeps copies is given, what becomes of what it says, and which places are refused: pipes in
place of the process."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.process.child import FIRST_PAUSE, ChildProcess
from flowcheck.node.protect.border import EVENTS, CopierSettings
from flowcheck.node.protect.supervisor import check_copies, copying, other_tokens

from .pipes import Pipes

READER, PEER = "a token of readers alone", "a token of peers alone"

OWN = "127.0.0.1:4"


def node_key(token: bytes) -> str:
    return hmac.new(token, b"flowcheck node 1", hashlib.sha256).hexdigest()


KEYS = [node_key(PEER.encode())]


class Scene:
    """given: settings of each process that was started. said: events."""

    def __init__(self, folder: Path) -> None:
        self.pipes, self.folder = Pipes(), folder
        self.given: list[Any] = []
        self.said: list[Any] = []
        (folder / "reader").write_text(READER)
        (folder / "peer").write_text(PEER)

    def start(self, module: str, settings: CopierSettings, files: Any) -> Pipes:
        assert module == "flowcheck.node.protect.worker"
        self.given.append(json.loads(settings.encoded()))
        return self.pipes

    def config(self, protect: dict[str, Any], **tables: Any) -> NodeConfig:
        return NodeConfig.model_validate({
            "name": "h", "tokens": {"reader": str(self.folder / "reader"), "peer": str(self.folder / "peer")},
            "api": {"listen": OWN}, "protect": {"directory": str(self.folder), **protect}, **tables,
        })

    def follower(self, protect: dict[str, Any], **tables: Any) -> NodeConfig:
        """A node with a mirror port, of which a core is pinned where there is more than one."""
        usable = sorted(os.sched_getaffinity(0))
        return self.config(protect, **{
            "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "replica": {"directory": "/replicas"},
            "capture": {"device": "x", "cores": usable[:1] if len(usable) > 1 else []}, **tables})

    def begin(self, config: NodeConfig) -> ChildProcess:
        return copying(config, "a key", "127.0.0.1:4", lambda event, **fields: self.said.append((event, fields)))

    def settings(self, config: NodeConfig) -> dict[str, Any]:
        self.begin(config)
        found: dict[str, Any] = self.given[-1]
        return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path)
    monkeypatch.setattr(child, "start", made.start)
    with contextlib.closing(made.pipes):
        yield made


# -- what it is given ----------------------------------------------------------------------------------------------


def test_a_holder_by_its_settings_alone(scene: Scene, tmp_path: Path) -> None:
    assert scene.settings(scene.config({"copies": ["127.0.0.1:5", "[::1]:6"]})) == {
        "directory": str(tmp_path / "flowcheck-h.copies"), "key": "a key", "keys": KEYS, "ca": "",
        "journal": [], "token": "",
        "sources": [["127.0.0.1", 5], ["::1", 6]], "own": OWN, "rate": 0, "cores": sorted(os.sched_getaffinity(0)),
        "rules": {"every": 1, "keep": 2, "most": 65536 << 20, "seconds": 0.5}, "registry": None, "parity": None,
    }


def test_a_node_that_follows_and_every_setting(scene: Scene, tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    found = scene.settings(scene.follower({
        "copies": ["h:5"], "every": 3, "keep": 4, "memory_mb": 7, "seconds": 0.25, "mb_per_second": 16,
        "journal": {"h:5": "h:9"}, "advertise": "me:8", "registry": ["http://e:1"], "registry_ca": "ca.pem",
        "cluster": "c", "replicas": 5, "grace": 2.5, "host": "a", "leaf": "b", "rack": "c", "standby": True,
        "own": True, "replace": ["run", "it"], "replace_seconds": 60.0,
    }, tls={"cert": "cert.pem", "key": "key.pem", "ca": "our.pem"}))
    assert found["cores"] == (usable[1:] if len(usable) > 1 else usable)
    assert found == {
        "directory": str(tmp_path / "flowcheck-h.copies"), "key": "a key", "keys": KEYS, "ca": "our.pem",
        "sources": [["h", 5]],
        "journal": [[["h", 5], ["h", 9]]], "token": PEER, "own": "me:8", "rate": 16 << 20, "cores": found["cores"],
        "rules": {"every": 3, "keep": 4, "most": 7 << 20, "seconds": 0.25}, "parity": None,
        "registry": {
            "endpoints": ["http://e:1"], "cluster": "c", "ca": "ca.pem", "cert": None,
            "user": "", "password": "", "replicas": 5, "grace": 2.5, "address": "me:8",
            "follows": True, "standby": True, "own": True, "code": None, "replace": ["run", "it"],
            "replace_seconds": 60.0, "kept": str(tmp_path / "flowcheck-h.copies" / "placement.json"),
            "directory": "/replicas", "site": {"name": "h", "host": "a", "leaf": "b", "rack": "c"},
        },
    }


def test_a_holder_whom_the_registry_tells(scene: Scene) -> None:
    found = scene.settings(scene.config({"registry": ["http://e:1"]}))
    registry = found["registry"]
    assert (registry["follows"], registry["address"], registry["replicas"], registry["code"]) == (False, OWN, 2, None)
    assert found["sources"] == []


def test_a_member_of_a_group_with_parity(scene: Scene, tmp_path: Path) -> None:
    group = ["h:1", "h:2", OWN]
    found = scene.settings(scene.config({"parity": "2+1", "group": group}))
    assert found["parity"] == {"code": [2, 1], "number": 2, "members": [["h", 1], ["h", 2], ["127.0.0.1", 4]],
                               "data": ["h:1", "h:2"], "directory": str(tmp_path / "flowcheck-h.parity")}
    found = scene.settings(scene.follower({"parity": "2+1", "group": [OWN, "h:2", "h:3"]}))
    assert found["parity"]["number"] == 0 and found["parity"]["data"] == [OWN, "h:2"]


def test_parity_that_the_registry_places(scene: Scene, tmp_path: Path) -> None:
    found = scene.settings(scene.config({"parity": "2+1", "registry": ["http://e:1"]}))
    assert found["parity"] == {"code": [2, 1], "number": None, "members": [], "data": [],
                               "directory": str(tmp_path / "flowcheck-h.parity")}
    assert found["registry"]["code"] == [2, 1] and found["registry"]["replicas"] == 1


def test_parity_of_a_group_is_not_the_registrys(scene: Scene) -> None:
    found = scene.settings(scene.config({"parity": "2+1", "group": ["h:1", "h:2", OWN], "registry": ["http://e:1"]}))
    assert found["registry"]["code"] is None and found["registry"]["replicas"] == 2


@pytest.mark.parametrize("journal", [False, True])
def test_other_tokens_are_told(scene: Scene, tmp_path: Path, journal: bool) -> None:
    more = {"journal": {"127.0.0.1:5": "127.0.0.1:6"}} if journal else {}
    given = scene.config({"copies": ["127.0.0.1:5"], **more})
    at = scene.begin(given)
    assert scene.given[0]["token"] == (PEER if journal else "")
    (tmp_path / "peer").write_text("another token of peers")
    at.order(other_tokens(given, "another key"))
    assert scene.pipes.heard() == [{
        "key": "another key", "keys": [node_key(b"another token of peers")],
        "token": "another token of peers" if journal else ""}]
    (tmp_path / "peer").unlink()
    at.order(other_tokens(given, "a third key"))
    assert scene.pipes.heard() == [{"key": "a third key"}], "what cannot be read just now stays"


# -- what it says --------------------------------------------------------------------------------------------------

COPY = {"name": "dp0", "source": "h:5", "step": 4, "bytes": 9, "seconds": 0.25, "path": "/p"}
SAID: dict[str, dict[str, Any]] = {
    "copied": COPY, "uncopied": {"name": "", "source": "h:5", "why": "w"},
    "protected": {"name": "", "epoch": 1, "step": 4, "shards": ["a", "b"], "stream": 2, "bytes": 9, "padded": 1,
                  "seconds": 0.25, "path": "/p"},
    "unprotected": {"name": "", "why": "w"},
    "redone": {"name": "dp0", "source": "h:5", "step": 4, "base": 2, "seconds": 0.25, "why": "w", "path": "/p"},
    "unjournaled": {"name": "dp0", "source": "h:5", "why": "w"},
    "registered": {"members": 3, "root": "h", "epoch": 1},
    "unregistered": {"why": "w", "epoch": 1, "copies": ["a"]}, "unsigned": {"keys": ["k"], "count": 1, "why": "w"},
    "placed": {"epoch": 1, "members": 3, "copies": ["a"], "holders": ["b"], "alone": [], "together": [["a", "b"]],
               "parity": {"data": ["a", "b"], "holders": ["c"]}},
    "recovering": {"epoch": 1, "lost": ["a"], "asked": ["b"], "steps": [{"run_id": "r", "step": 4}], "void": ["s"]},
    "replacing": {"lost": "a", "recovery": 2},
    "fallback": {"run_id": "r", "shards": ["s"], "step": None, "why": "w"}, "restored": {"epoch": 2, "since": 1},
    "removed": {"name": "dp0", "run_id": "r", "step": 4, "path": "/p", "why": "w"}, "problem": {"name": "", "why": "w"},
}
WELL = {"copied", "protected"}


def test_every_event_of_its_table_is_tried() -> None:
    assert SAID.keys() == EVENTS.keys()


@pytest.mark.parametrize("event", SAID)
def test_what_it_says_is_said_and_nothing_beside_it(scene: Scene, event: str) -> None:
    at = scene.begin(scene.config({"copies": ["127.0.0.1:5"]}))
    fields = SAID[event]
    scene.pipes.says(event, **fields, more="of another release")
    scene.pipes.says("another", name="")
    at._pause = 160.0
    scene.pipes.ends(1)
    at.look()
    (first, more), (_, problem) = scene.said
    assert (first, more) == (event, fields)
    assert problem["why"].endswith(f" it is started anew in {FIRST_PAUSE if event in WELL else 160:g} s")
    assert problem["why"].startswith("the process that keeps copies of other nodes' versions ended with status 1;")


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_place_is_made_and_is_this_users(scene: Scene, tmp_path: Path) -> None:
    assert check_copies(scene.config({"copies": ["127.0.0.1:5"]})) == tmp_path / "flowcheck-h.copies"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flowcheck-h.copies", "peer", "reader"]
    assert list((tmp_path / "flowcheck-h.copies").iterdir()) == []
    check_copies(scene.config({"parity": "2+1", "group": ["h:1", "h:2", OWN]}))
    assert (tmp_path / "flowcheck-h.parity").is_dir()


@pytest.mark.parametrize(("mode", "refused"), [(0o755, False), (0o775, False), (0o757, True), (0o702, True)])
def test_a_place_that_others_may_write_to_is_refused(
    scene: Scene, tmp_path: Path, mode: int, refused: bool
) -> None:
    given = scene.config({"copies": ["127.0.0.1:5"]})
    directory = check_copies(given)
    directory.chmod(mode)
    if not refused:
        assert check_copies(given) == directory
        return
    with pytest.raises(EnvironmentProblem, match="may be written to by others") as caught:
        check_copies(given)
    assert caught.value.where == str(directory) and caught.value.remedy


@pytest.mark.parametrize("name", ["flowcheck-h.copies", "flowcheck-h.parity"])
@pytest.mark.parametrize("how", ["link", "other user", "writable"])
def test_a_place_that_somebody_else_made_is_refused(scene: Scene, tmp_path: Path, name: str, how: str) -> None:
    """Where it lies everybody may put something by that name, also a link into a directory of this user's."""
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / name
    if how == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o757 if how == "writable" else 0o700)
    if how == "other user":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(place, 65534, 65534)
    with pytest.raises(EnvironmentProblem) as caught:
        check_copies(scene.config({"parity": "2+1", "group": ["h:1", "h:2", OWN]}))
    assert caught.value.where == str(place) and list((tmp_path / "elsewhere").iterdir()) == []


def test_a_node_does_not_copy_from_itself(scene: Scene) -> None:
    with pytest.raises(ValidationError, match=f"{OWN} is this node itself"):
        scene.config({"copies": ["127.0.0.1:5", OWN]})
    check_copies(scene.follower({"copies": [OWN], "advertise": "h:1"}, api=None))


@pytest.mark.parametrize(("protect", "name"), [
    ({"copies": ["127.0.0.1:5"]}, "flowcheck-h.copies"), ({"parity": "2+1", "group": ["h:1", "h:2", OWN]},
                                                          "flowcheck-h.parity"),
])
def test_a_place_that_cannot_be_made_is_said(
    scene: Scene, tmp_path: Path, protect: dict[str, Any], name: str
) -> None:
    (tmp_path / name).write_text("a file")
    with pytest.raises(EnvironmentProblem) as refused:
        check_copies(scene.config(protect))
    assert refused.value.where.startswith(str(tmp_path / name)) and "protect.directory" in (refused.value.remedy or "")


def test_a_certificate_that_is_none_is_said(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "our.pem").write_text("none")
    tls = {"cert": "cert.pem", "key": "key.pem", "ca": str(tmp_path / "our.pem")}
    with pytest.raises((UserError, EnvironmentProblem)) as refused:
        check_copies(scene.config({"copies": ["127.0.0.1:5"]}, tls=tls))
    assert str(tmp_path / "our.pem") in refused.value.message()
