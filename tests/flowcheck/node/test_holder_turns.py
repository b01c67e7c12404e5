"""A holder without its processes: what it does at each turn, in which order it begins and ends, and what --check
prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import reader_key
from flowcheck.control.proof import node_key
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node import children
from flowcheck.node import holder as module
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.holder import Holder, check

TOKEN = "a token that only tests have"
KEY, PROVEN = reader_key(TOKEN.encode()), node_key(TOKEN.encode()).hex()


def config(folder: Path, *sources: str, listen: str = "127.0.0.1:4", **protect: Any) -> NodeConfig:
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    return NodeConfig.model_validate({
        "name": "h", "tokens": dict.fromkeys(("reader", "peer"), str(folder / "token")), "api": {"listen": listen},
        "protect": {"copies": sources, "directory": str(folder), **protect},
    })


class Scene:
    """did: what its parts were asked to do."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.did: list[Any] = []
        self.said: list[Any] = []
        self.config = config(folder, "127.0.0.1:5")
        self.fails: Exception | None = None
        patch.setattr(children, "Serving", self._serving)
        patch.setattr(children, "copying", self._copying)
        patch.setattr(module, "Notify", lambda: SimpleNamespace(alive=lambda: self.did.append("alive")))

    def part(self, name: str, **more: Any) -> Any:
        def does(what: str) -> Callable[..., None]:
            return lambda *given: self.did.append((name, what, *given))

        return SimpleNamespace(look=does("look"), renew=does("renew"), order=does("order"), close=does("close"), **more)

    def _serving(self, given: NodeConfig, keys: Any, say: Any, board: int) -> Any:
        assert given is self.config and board >= 0
        self.did.append(("serving", dict(keys)))
        self.serving_says = say
        return self.part("serving", address="127.0.0.1:77")

    def _copying(self, given: NodeConfig, key: str, address: str, say: Any) -> Any:
        assert given is self.config
        self.did.append(("copying", key, address))
        if self.fails is not None:
            raise self.fails
        self.copying_says = say
        return self.part("copying")

    def holder(self) -> Holder:
        return Holder(self.config, lambda event, **fields: self.said.append((event, fields)))

    def since(self) -> list[Any]:
        found, self.did[:] = list(self.did), []
        return found


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scene]:
    yield Scene(monkeypatch, tmp_path)


def test_it_begins_and_ends_in_order(scene: Scene) -> None:
    with scene.holder() as holder:
        (first, keys), second = scene.since()
        assert first == "serving" and KEY in keys and "reader" in keys[KEY]
        assert second == ("copying", PROVEN, "127.0.0.1:77") and holder.api == "127.0.0.1:77"
        scene.serving_says("problem", why="a")
        scene.copying_says("copied", name="", step=1, bytes=2)
        assert [event for event, _ in scene.said] == ["problem", "copied"]
    assert scene.since() == [("copying", "close"), ("serving", "close")]
    holder.close()
    assert scene.since() == [], "once"


def test_where_one_part_cannot_begin_the_others_end(scene: Scene) -> None:
    scene.fails = EnvironmentProblem("no room")
    with pytest.raises(EnvironmentProblem, match="no room"):
        scene.holder()
    assert scene.since()[-1] == ("serving", "close")


def test_what_is_done_again_and_again(scene: Scene, tmp_path: Path) -> None:
    with scene.holder() as holder:
        scene.since()
        looked: list[Any] = []
        look = holder._board_writer.look
        holder._board_writer.look = lambda: looked.append(1) or look()  # type: ignore[method-assign,func-returns-value]
        for _ in range(2):
            holder.turn()
        assert scene.since() == [("serving", "look"), ("copying", "look"), "alive"] * 2 and looked == [1, 1]
        (tmp_path / "token").write_text("another token of readers")
        holder.reload()
        holder.turn()
        assert holder._reload is False
        other, proven = reader_key(b"another token of readers"), node_key(b"another token of readers").hex()
        first, second, (who, what, keys), told, alive = scene.since()
        assert (first, second, alive) == (("serving", "look"), ("copying", "look"), "alive")
        assert (who, what) == ("serving", "renew") and other in keys and KEY not in keys
        (*told, order) = told
        assert told == ["copying", "order"] and order.key == proven
        holder.turn()
        assert [one for one in scene.since() if one[:2] == ("copying", "order")] == [], "once"


def test_what_it_tells_of_itself_has_no_captures(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = module.BoardWriter

    def board_writer(*some: Any, **more: Any) -> Any:
        given.append((some, more))
        return real(*some, **more)

    monkeypatch.setattr(module, "BoardWriter", board_writer)
    scene.config = scene.config.model_copy(update={"api": scene.config.api.model_copy(update={"shadow": 3})})  # type: ignore[union-attr]
    with scene.holder() as holder:
        assert given == [(("h", (), (), None, dict), {"shadow": 3, "doors": holder._doors})]


def test_it_waits_until_it_is_stopped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What told this process to end may have told those beside it, too: then nothing is started anew."""
    turns: list[int] = []
    slept: list[float] = []
    with scene.holder() as holder:
        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                holder.stop()

        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(holder, "turn", lambda: turns.append(1))
        holder.wait()
        assert slept == [0.1] * 3 and len(turns) == 2
        holder.wait()
        assert len(slept) == 3


def test_what_it_says_of_itself(scene: Scene, tmp_path: Path) -> None:
    scene.config = config(tmp_path, "127.0.0.1:5", every=4)
    with scene.holder() as holder:
        holder.announce(lambda event, **fields: scene.said.append((event, fields)))
    assert scene.said == [("holder_ready", {"api": "127.0.0.1:77", "copies": ["127.0.0.1:5"], "every": 4,
                                            "registry": [], "parity": None})]
    assert Holder.last == "what was copied stays"


def test_what_it_says_of_parity_and_a_registry(scene: Scene, tmp_path: Path) -> None:
    scene.config = config(tmp_path, parity="2+1", registry=["http://e:1"])
    with scene.holder() as holder:
        holder.announce(lambda event, **fields: scene.said.append((event, fields)))
    assert scene.said == [("holder_ready", {"api": "127.0.0.1:77", "copies": [], "every": 1, "registry": ["http://e:1"],
                                       "parity": "2+1"})]


def test_what_cannot_hold_is_said_before_anything_begins(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "token").unlink()
    with pytest.raises(UserError):
        scene.holder()
    assert scene.did == []


# -- --check -------------------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """free(bytes): so much is, where copies lie."""
    def made(nbytes: int) -> None:
        def usage(place: Path) -> Any:
            assert place.name == "flowcheck-h.copies" and place.is_dir()
            return SimpleNamespace(total=1 << 40, used=0, free=nbytes)

        monkeypatch.setattr(module, "shutil", SimpleNamespace(disk_usage=usage))

    return made


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_what_it_would_take(free: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free((2000 << 20) + (1 << 20) - 1)
    given = config(tmp_path, "127.0.0.1:5", "h:6", memory_mb=2000)
    place = tmp_path / "flowcheck-h.copies"
    check(given, as_json=True)
    [line] = printed(capsys)
    assert json.loads(line) == {"copies": ["127.0.0.1:5", "h:6"], "directory": str(place), "free_mb": 2000,
                                "memory_mb": 2000, "notes": [], "registry": [], "parity": None,
                                "switches": {"protect.copies": ["127.0.0.1:5", "h:6"]}}
    (tmp_path / "token").chmod(0o640)
    check(given, as_json=True)
    [note] = json.loads(printed(capsys)[0])["notes"]
    assert str(tmp_path / "token") in note
    (tmp_path / "token").chmod(0o600)
    check(given, as_json=False)
    assert printed(capsys) == [f"copies of the versions of 127.0.0.1:5, h:6, in {place}",
                               "at most 2,000 MiB; 2,000 MiB are free there"]


def test_too_little_room_is_said_after_all_of_it(
    free: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free(1500 << 20)
    with pytest.raises(EnvironmentProblem) as refused:
        check(config(tmp_path, "127.0.0.1:5", memory_mb=1501), as_json=False)
    assert all(said in refused.value.what for said in ("1,500 MiB", str(tmp_path), "1,501"))
    assert refused.value.where == "protect.memory_mb" and refused.value.remedy
    assert printed(capsys)[-1] == "at most 1,501 MiB; 1,500 MiB are free there"


TOLD = "copies of the versions of those that http://e:1 says, in {}.copies"


@pytest.mark.parametrize(("protect", "lines"), [
    ({"registry": ["http://e:1", "http://e:2"]}, [TOLD]),
    ({"parity": "2+1", "group": ["h:1", "h:2", "127.0.0.1:4"]},
     ["stream 2 of 2+1, parity of the versions of h:1, h:2, in {}.parity"]),
    ({"parity": "2+1", "registry": ["http://e:1"]}, [TOLD, "a stream of 2+1, if http://e:1 says so, in {}.parity"]),
])
def test_whom_it_would_protect(
    free: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], protect: dict[str, Any],
    lines: list[str],
) -> None:
    free(1 << 40)
    check(config(tmp_path, **protect), as_json=False)
    assert printed(capsys)[:-1] == [line.format(tmp_path / "flowcheck-h") for line in lines]


def test_an_address_that_is_not_this_machines_is_said(free: Callable[[int], None], tmp_path: Path) -> None:
    free(1 << 40)
    given = config(tmp_path, "127.0.0.1:5").model_copy(update={"api": SimpleNamespace(
        address=("192.0.2.1", 4), listen="192.0.2.1:4")})
    with pytest.raises(EnvironmentProblem, match="cannot listen") as refused:
        check(given, as_json=True)
    assert refused.value.where == "192.0.2.1:4" and "api.listen" in (refused.value.remedy or "")


def test_what_an_earlier_holder_left_is_room(
    free: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free(3 << 20)
    place = tmp_path / "flowcheck-h.copies"
    place.mkdir()
    (place / "file").write_bytes(bytes(2 << 20))
    check(config(tmp_path, "127.0.0.1:5", memory_mb=5), as_json=True)
    assert json.loads(printed(capsys)[0])["free_mb"] == 5


def test_what_is_removed_meanwhile_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(100))
    look = module.os.lstat

    def gone(path: Any, **more: Any) -> Any:
        if str(path).endswith("one"):
            raise FileNotFoundError
        return look(path, **more)

    monkeypatch.setattr(module.os, "lstat", gone)
    assert module._taken(tmp_path) == 100


def test_what_others_left_is_counted_whole(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(bytes(100))
    (tmp_path / "a" / "b" / "two").write_bytes(bytes(23))
    (tmp_path / "a" / "link").symlink_to("/dev/zero")
    assert module._taken(tmp_path) == 123 + len("/dev/zero") and module._taken(tmp_path / "nothing") == 0
