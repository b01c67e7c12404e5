"""What the process that answers the API is given, when it is started anew, and how it is ended: pipes in place of it,
and a clock by hand. The listening socket is real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import reader_key
from flowcheck.control.proof import node_key
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.process import child
from flowcheck.node.process.child import AGAIN_SECONDS
from flowcheck.node.tokens import HTTP_ROLES

from .pipes import Pipes

PEER = "a token of nodes alone"
KEYS = {"a key": ["reader"], "another": ["operator"]}
READER = "a token of readers alone"


class Scene:
    """pipes: of the processes that were started. commands: of those, with all that was given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.pipes: list[Pipes] = []
        self.commands: list[Any] = []
        self.said: list[Any] = []
        self.made: list[Serving] = []
        (folder / "reader").write_text(READER)
        (folder / "peer").write_text(PEER)

    def popen(self, command: list[str], **given: Any) -> Pipes:
        self.commands.append((command, given))
        self.pipes.append(Pipes())
        return self.pipes[-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def config(self, **tables: Any) -> NodeConfig:
        return NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "tokens": {"reader": str(self.folder / "reader"), "peer": str(self.folder / "peer")},
            "api": {"listen": "127.0.0.1:0"},
            "replica": {"directory": "/replicas", "slots": 4}, "output": {"directory": "/out"}, **tables,
        })

    def begin(self, config: NodeConfig | None = None, keys: Any = KEYS, board: int = -1) -> Serving:
        self.made.append(Serving(config or self.config(), keys,
                                 lambda event, **fields: self.said.append((event, fields)), board))
        return self.made[-1]

    def settings(self, **tables: Any) -> dict[str, Any]:
        self.begin(self.config(**tables))
        [found] = self.pipes[-1].heard()
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        for one in self.pipes:
            one.status = 0
        for node in self.made:
            node.close()
        for one in self.pipes:
            one.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path)
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(
        Popen=made.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    yield made
    made.close()


# -- what it is given ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("board", [-1, 0, 17])
def test_how_it_is_started(scene: Scene, board: int) -> None:
    """A session of its own, because Ctrl-C is for the node; the socket, and the board where there is one."""
    node = scene.begin(board=board)
    [(command, given)] = scene.commands
    assert command == [sys.executable, "-P", "-m", "flowcheck.node.api.worker"]
    descriptor = node._socket.fileno()
    assert given == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True,
                     "pass_fds": [descriptor] if board < 0 else [descriptor, board]}
    [settings] = scene.pipes[0].heard()
    assert (settings["socket"], settings["board"]) == (descriptor, board)
    assert node.address == "{}:{}".format(*node._socket.getsockname())
    assert node._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def test_an_address_that_is_taken_is_named_with_its_setting(scene: Scene) -> None:
    taken = scene.begin().address
    with pytest.raises(EnvironmentProblem) as refused:
        scene.begin(scene.config(api={"listen": taken}))
    assert refused.value.where == taken and refused.value.remedy.endswith(" a free port in api.listen")
    assert len(scene.pipes) == 1


def test_it_has_the_cores_of_this_process(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of another one, though these may be more; without those that a capture is pinned to."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 1, 2} if process == 0 else {1, 2, 3, 4})
    assert scene.settings(capture={"device": "x", "cores": [2]})["cores"] == [1, 3]


def test_a_node_with_nothing_but_an_api(scene: Scene) -> None:
    found = scene.settings()
    del found["socket"], found["board"]
    assert found == {
        "keys": KEYS, "tls": None, "node": "n", "replicas": "/replicas", "checkpoints": "/out", "reserved": 0,
        "cores": sorted(os.sched_getaffinity(0)), "follows": True, "shadow": 0, "copies": None, "store": None,
        "journals": None, "made": "/out/flowcheck-n.made", "parity": None, "shown": "", "names": [],
        "limits": {"connections": 256, "strangers": 1024, "per_address": 256},
    }


def test_a_node_with_all_of_it(scene: Scene, tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    pinned = usable[:1] if len(usable) > 1 else []
    found = scene.settings(
        capture={"device": "x", "cores": pinned}, store={"url": "/somewhere", "every": 2, "options": {"a": "b"}},
        tls={"cert": "cert.pem", "key": "key.pem", "ca": "our.pem"}, api={"listen": "127.0.0.1:0", "shadow": 3},
        protect={"copies": ["h:5"], "directory": str(tmp_path)},
    )
    assert (found["reserved"], found["shadow"], found["tls"]) == (1, 3, ["cert.pem", "key.pem"])
    store = found["store"]
    assert (store["url"], store["options"], store["seconds"]) == ("/somewhere", {"a": "b"}, 60.0)
    assert found["copies"] == str(tmp_path / "flowcheck-n.copies")
    assert found["cores"] == [core for core in usable if core not in pinned]
    assert (found["parity"], found["shown"]) == (None, "")


def test_a_token_of_all_roles_is_the_key_of_each(scene: Scene) -> None:
    scene.begin(keys=b"a token that only tests have")
    [found] = scene.pipes[0].heard()
    token = b"a token that only tests have"
    assert found["keys"].keys() == {reader_key(token), node_key(token).hex()}
    assert sorted(found["keys"][reader_key(token)]) == sorted(HTTP_ROLES)


def holder(scene: Scene, tmp_path: Path, listen: str = "127.0.0.1:0", **more: Any) -> Any:
    protect = {"directory": str(tmp_path), "memory_mb": 5, "parity": "2+1", **more}
    return scene.config(api={"listen": listen}, protect=protect)


def test_a_holder_of_parity_knows_whom_to_ask(scene: Scene, tmp_path: Path) -> None:
    own = "127.0.0.1:9"
    given = holder(scene, tmp_path, group=["h:1", "[::1]:2", own], advertise=own)
    scene.begin(given)
    [found] = scene.pipes[-1].heard()
    assert found["parity"] == {
        "directory": str(tmp_path / "flowcheck-n.parity"), "others": [["h", 1], ["::1", 2]], "most": 5 << 20, "ca": "",
        "placement": str(tmp_path / "flowcheck-n.copies" / "placement.json"),
    }
    assert found["shown"] == node_key(PEER.encode()).hex()


@pytest.mark.parametrize(("group", "keeps"), [
    (["me:9", "h:2", "h:3"], False), (["h:1", "me:9", "h:3"], False), (["h:1", "h:2", "me:9"], True),
])
def test_who_has_data_keeps_no_parity(scene: Scene, tmp_path: Path, group: list[str], keeps: bool) -> None:
    given = holder(scene, tmp_path, group=group, advertise="me:9")
    scene.begin(given)
    [found] = scene.pipes[-1].heard()
    assert (found["parity"] is not None) == keeps and bool(found["shown"]) == keeps


def test_whom_a_placement_says_is_asked(scene: Scene, tmp_path: Path) -> None:
    tls = {"cert": "cert.pem", "key": "key.pem", "ca": "our.pem"}
    scene.begin(holder(scene, tmp_path, registry=["http://e:1"], advertise="me:9").model_copy(
        update={"tls": scene.config(tls=tls).tls}))
    [found] = scene.pipes[-1].heard()
    assert found["parity"]["others"] is None and found["parity"]["ca"] == "our.pem"
    assert found["shown"] == node_key(PEER.encode()).hex()


def test_a_key_that_cannot_be_read_is_said_before_anything_listens(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "peer").unlink()
    with pytest.raises(UserError):
        scene.begin(holder(scene, tmp_path, registry=["http://e:1"], advertise="me:9"))
    assert scene.commands == []


# -- what it is told -----------------------------------------------------------------------------------------------


def test_other_keys_are_told_and_kept(scene: Scene, tmp_path: Path) -> None:
    node = scene.begin(holder(scene, tmp_path, registry=["http://e:1"], advertise="me:9"))
    first, = scene.pipes[0].heard()
    (tmp_path / "peer").write_text("another token of nodes")
    node.renew({"new": ["reader"]})
    said = {"keys": {"new": ["reader"]}, "shown": node_key(b"another token of nodes").hex()}
    assert scene.pipes[0].heard() == [said]
    scene.pipes[0].ends(1)
    scene.now += AGAIN_SECONDS
    node.look()
    assert scene.pipes[1].heard() == [first | said]


# -- when it has ended ---------------------------------------------------------------------------------------------


def test_one_that_ended_is_started_anew_but_not_at_once(scene: Scene) -> None:
    node = scene.begin()
    for number in range(2):
        scene.now += AGAIN_SECONDS - 0.1
        scene.pipes[number].ends(75)
        node.look()
        assert len(scene.commands) == number + 1
        scene.now += 0.1
        node.look()
        assert len(scene.commands) == number + 2 and scene.pipes[number].stdin.closed
    assert scene.said == [("problem", {"process": "api", "cause": "ended", "why": "the process that answers api.listen"
                                       " ended with status 75; it is started anew"})] * 2
    assert scene.commands[0] == scene.commands[2], "over the same socket"


def test_it_ends_with_its_stdin(scene: Scene) -> None:
    node = scene.begin()
    scene.pipes[0].status = 0
    node.close()
    assert scene.pipes[0].stdin.closed and scene.pipes[0].waits == [] and not scene.pipes[0].killed
    assert node._socket.fileno() == -1
    node.close()
