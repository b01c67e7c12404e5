"""What is still on its way when somebody ends, a rank or the node: it is read, judged and said, and no file stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control.protocol import Bye, Flows, Manifest, Patch, Progress, Record
from flowcheck.errors import UserError
from flowcheck.node.groups import intake as of_group
from flowcheck.node.groups.session import wind_up
from flowcheck.rebuild.version.events import Skipped

from ..hand_node import until
from .control_scene import entering
from .group_scene import FakeSession, Scene, left_behind, scenes, small_job
from .live_scene import Live
from .test_control_server import Port


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with scenes(tmp_path) as make:
        yield make


def held_until(put: Callable[[Any], None], over: Callable[[], bool]) -> Callable[[Any], None]:
    """A group that is busy with the first message until then."""
    waited = threading.Event()

    def late(inbound: Any) -> None:
        if not waited.is_set():
            until(over)
            waited.set()
        put(inbound)

    return late


def test_what_ranks_have_sent_when_the_port_closes_reaches_their_group() -> None:
    port = Port()
    port.server.start()

    def closed() -> bool:
        return not any(one.name == "flowcheck control" for one in threading.enumerate())

    port.group.put = held_until(port.group.put, closed)  # type: ignore[method-assign]
    link, messages = port.attach(), [Flows([]), *(Record(t) for t in range(3)), Bye()]
    for message in messages:
        link.send(message)
    port.close()
    said = []
    while not port.group.said.empty():
        said.append(port.group.said.get())
    assert [one for one in said if not isinstance(one, tuple)] == messages


def test_a_rank_that_hears_nothing_any_more_has_said_what_it_said() -> None:
    """It has closed its side, and a version is told to it before its last records were read."""
    with entering() as enter:
        one, tried = enter(), threading.Event()
        one.group.put = held_until(one.group.put, tried.is_set)  # type: ignore[method-assign]
        messages = [Flows([]), Record(1), Record(2), Bye()]
        for message in messages:
            one.send(message)
        one.link.close()
        one.group.member.send(Progress(0, ""))
        until(lambda: not any(each.name == "flowcheck to host:1" for each in threading.enumerate()))
        tried.set()
        assert [one.group.next()[0] for _ in messages] == messages and one.end() is None


def test_rank_0_says_goodbye_before_another_one_has_answered(scene: Any) -> None:
    at = scene()
    first, other = at.follow(), at.join(1)
    at.session.owed = {1}
    at.give(first, Bye())
    assert at.events("end") == []
    at.post(other, Patch(1, 3, [["w", 0, 1]]))
    at.intake.ranks.leave(other.member)  # its connection ends before the group has come to its answer
    at.turn()
    asked = [call[0] for call in at.session.calls if call[0] not in ("poll", "withdraw")]
    assert asked == ["patch", "finish"] and len(at.events("end")) == 1


@pytest.mark.parametrize("how", ["late", "a new start", "the node ends"])
def test_nobody_is_waited_for_without_end(scene: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    at = scene()
    monkeypatch.setattr(of_group, "LAST_SECONDS", 0.0 if how == "late" else 3600.0)
    first, session = at.follow(instance="a"), at.session
    at.join(1, instance="b")
    session.owed = {1}
    at.give(first, Bye())
    if how == "a new start":
        at.intake.ranks.leave(first.member)
        at.join(0, instance="c")
        at.turn()
    elif how == "the node ends":
        at.group.start()
        at.group.stop()
    assert len(at.events("end")) == 1 and ("finish",) in session.calls


def test_iterations_that_records_alone_tell_of_are_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    live, said = Live(monkeypatch), list[Any]()
    live.state(0)
    live.step(0)
    for t in (1, 2):
        assert live.record(t) == ""
    assert live.session.begun == range(1, 3)
    wind_up(live.session, said.extend)
    assert [(one.first, one.last) for one in said if isinstance(one, Skipped)] == [(1, 2)]
    assert live.session.begun == range(0)
    said.clear()
    wind_up(live.session, said.extend)
    assert said == [], "once"


def test_what_waits_for_somebody_keeps_nothing_in_the_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state was announced and has not come: six iterations are there, for which four arenas are too few."""
    live = Live(monkeypatch)
    live.state(0)
    live.traffic(*range(6))
    for t in range(6):
        assert live.record(t) == ""
    live.session.announce(1)
    live.poll()
    assert live.ended == [(0, True, [])]
    wind_up(live.session, live.take)
    assert live.ended == [(t, True, []) for t in range(6)]


def test_a_start_that_takes_over_says_what_of_the_one_before_is_not_judged(scene: Any) -> None:
    at = scene(name="a")
    old = at.follow(first=100, instance="a")
    at.session.begun = range(3, 5)
    at.intake.ranks.leave(old.member)
    at.join(0, instance="b")
    at.turn()
    (said,) = at.events("unjudged")
    assert (said["first"], said["last"], bool(said["why"])) == (103, 104, True)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".replica", ".user"))


def job(run_id: str = "synth-0") -> Any:
    made = small_job()
    made.step_values, made.run_id = ["lr"], run_id
    return made


@pytest.mark.parametrize("keep", [True, False])
def test_what_the_attachments_of_a_process_made_stays_or_goes_together(scene: Any, tmp_path: Path, keep: bool) -> None:
    """One job ends, another one comes; neither was ever verified. What an earlier process left is nobody's to remove.
    """
    at, paths = scene(keep=keep, resync="ranges"), list[Path]()
    earlier = left_behind(tmp_path / "flowcheck-node--7.replica", "before", 12)
    at.intake.versions.files._number = 7
    for number in range(2):
        peer = at.follow(job(f"r{number}"), run=(f"r{number}", 0, 2))
        paths.append(left_behind(at.session.path, f"r{number}", 3))
        at.intake.versions.standing.has(at.session.plan.job, 3)
        at.intake.ranks.leave(peer.member)
    at.follow(job("r2"), run=("r2", 0, 2))  # it never has a version
    at.group.start()
    at.group.stop()
    assert [path.exists() for path in paths] == [keep, keep] and earlier.exists()
    assert [path.with_suffix(".replica").exists() for path in tmp_path.glob("*.user")] == [True, True] * keep


def test_a_job_that_is_refused_leaves_nothing(scene: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for its replica."""

    def begin(session: Any, path: Callable[[], Path], left: Any = None) -> list[Any]:
        path()
        raise UserError("cannot be reserved")

    monkeypatch.setattr(FakeSession, "begin", begin)
    at = scene(resync="ranges")
    peer = at.join(0)
    at.give(peer, Manifest(job().to_dict(), 0))
    assert len(peer.ended) == 1 and not list(tmp_path.glob("*.user"))
