"""A holder's connection to a source's control port: what it asks, what it keeps of the answers, and what it does not
believe. The source's side is a real shelf, or says what a test has it say."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import RANGES_TEXT, Bytes, Entry, Holes, Limits, Link, RecordsError, Refused, accept
from flowcheck.control.protocol import Journal as Question
from flowcheck.control.tensors import packed
from flowcheck.errors import FlowcheckError
from flowcheck.node.peers.shelf import Shelf
from flowcheck.node.protect import journal_loop as module
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.journal_loop import Lacking, Reading
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.rebuild.iteration.evidence import elements_of
from flowcheck.rebuild.plan import BucketPlace

from .journal_scene import Source, journal_job

TOKEN = b"a token that only tests have"
Answer = tuple[Any, bytes]


class Port:
    """A source's end of a connection. says: in place of what the shelf has, one after the other; None: that. heard:
    hello and questions."""

    def __init__(self, shelf: Shelf, token: bytes = TOKEN) -> None:
        mine, its = socket.socketpair()
        self.link, self._other, self._shelf, self._token = Link(mine), Link(its), shelf, token
        self.says: list[Answer | None] = []
        self.heard: list[Any] = []
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def _main(self) -> None:
        try:
            self.heard.append(accept(self._other, self._token))
            self._other.limits = lambda: Limits(RANGES_TEXT)
            while True:
                message, _ = self._other.receive(wait=60)
                self.heard.append(message)
                said = self.says.pop(0) if self.says else None
                answer, payload = said if said is not None else self._answer(message)
                self._other.send(answer, [payload] if payload else [], len(payload))
        except (RecordsError, TimeoutError):
            pass
        self._other.close()

    def _answer(self, message: Any) -> Answer:
        if isinstance(message, Question):
            entry, buffers = self._shelf.entry(message)
            return entry, b"".join(packed(buffers)) if buffers else b""
        answer, pieces = self._shelf.read(message)
        return answer, b"".join(pieces)

    def close(self) -> None:
        self.link.close()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Scene:
    def __init__(self, folder: Path, source: Source) -> None:
        self.source, self.run = source, folder / "lane" / "run" / "epoch-0"
        self.journal = Journal(self.run / "journal")
        self.rooms: list[int] = []
        self.ports: list[Port] = []

    @property
    def port(self) -> Port:
        return self.ports[-1]

    def read(self, *says: Answer | None, token: bytes = TOKEN, parity: Any = None) -> Reading:
        self.ports.append(Port(self.source.shelf, token))
        self.port.says[:] = says
        return Reading(self.port.link, TOKEN, "dp0", self.journal, self.rooms.append, parity)

    def joined(self, *says: Answer | None, **more: Any) -> Reading:
        """A job is known, and step 5 is here."""
        self.source.step()
        reading = self.read(**more)
        assert reading.entry(0).job
        self.port.says[:] = says
        return reading

    def close(self) -> None:
        for port in self.ports:
            port.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with contextlib.closing(Source(tmp_path)) as source, contextlib.closing(Scene(tmp_path, source)) as made:
        yield made


# -- the opening ---------------------------------------------------------------------------------------------------


def test_it_comes_as_a_peer_of_that_group(scene: Scene) -> None:
    with contextlib.closing(scene.read()):
        pass
    scene.port.close()
    [hello] = scene.port.heard
    assert (hello.group, hello.role, hello.run_id, hello.epoch, hello.rank, hello.ranks) == ("dp0", "peer", "", 0, 0, 1)


def closed(link: Link) -> bool:
    try:
        link.send(Refused("x"))
    except RecordsError:
        return True
    return False


def test_a_wrong_token_ends_it(scene: Scene) -> None:
    with pytest.raises(RecordsError):
        scene.read(token=b"another token of that length")
    assert closed(scene.port.link)


def test_a_journal_of_another_layout_ends_it(scene: Scene) -> None:
    scene.journal.begin(dataclasses.replace(scene.source.said, first=6))
    with pytest.raises(FlowcheckError, match="lays gradients out in another way"):
        scene.read()
    assert closed(scene.port.link)


# -- what a step was made with -------------------------------------------------------------------------------------


def test_the_job_comes_first_and_then_its_iterations(scene: Scene) -> None:
    reading, said = scene.joined(), scene.source.said
    assert scene.journal.job == said and Journal(scene.journal.folder).job == said
    found = reading.entry(5)
    assert (found.iteration, found.why, found.groups) == (5, "", list(scene.source.record.groups))
    asked = [(one.request, one.iteration, one.plan, one.seconds) for one in scene.port.heard[1:]]
    assert asked == [(1, 0, "", 1.0), (2, 5, said.plan, 1.0)]
    assert reading.keep(found) == scene.journal.nbytes
    assert scene.journal.made(5).record.buffers["mean"].tolist() == [5.0] * 3


def test_a_job_that_is_known_is_named_at_once(scene: Scene) -> None:
    scene.source.step()
    scene.journal.begin(scene.source.said)
    reading = scene.read()
    assert not reading.entry(5).job and reading.keep(reading.entry(5)) > 0
    assert scene.journal.entries == [5]


def test_another_job_is_begun_anew(scene: Scene, tmp_path: Path) -> None:
    reading = scene.joined()
    reading.keep(reading.entry(5))
    with contextlib.closing(Source(tmp_path, journal_job(count=(60, 40)), first=9)) as other:
        other.step()
        scene.port._shelf = other.shelf
        assert reading.entry(6).job == other.body
        assert scene.journal.job == other.said and scene.journal.entries == []
        assert reading.keep(reading.entry(9)) > 0
        places = other.plan.iteration_buckets(0)
        for place, bucket in zip(places, scene.journal.made(9).buckets, strict=True):
            assert torch.equal(bucket, elements_of(other.regions[9], place))


def entry(request: int = 2, iteration: int = 5, **more: Any) -> Entry:
    return Entry(request, iteration, **{"plan": "p", "newest": 9, **more})


@pytest.mark.parametrize(("answer", "why"), [
    (Bytes(2, 5, why="gone"), "a Bytes where an entry was due"), (Refused("no room"), "refused: no room"),
    (entry(request=1), "a Entry where an entry was due"), (entry(iteration=6), "a Entry where an entry was due"),
])
def test_what_is_no_answer_to_the_question_ends_it(scene: Scene, answer: Any, why: str) -> None:
    reading = scene.joined((answer, b""))
    with pytest.raises(RecordsError) as refused:
        reading.entry(5)
    assert refused.value.what == why and refused.value.where == scene.port.link.peer


def buffers(**named: Any) -> bytes:
    return b"".join(packed({f"buffer.{name}": torch.tensor(value) for name, value in named.items()}))


@pytest.mark.parametrize("payload", [
    buffers(other=[1.0, 2.0, 3.0]), buffers(mean=[1.0, 2.0]), buffers(mean=[1, 2, 3]), b"nonsense", bytes(2 << 20),
])
def test_buffers_of_another_model_end_it(scene: Scene, payload: bytes) -> None:
    reading = scene.joined((entry(), payload))
    with pytest.raises(FlowcheckError):
        reading.entry(5)


def test_heads_of_many_buffers_have_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADERS", 0)
    reading = scene.joined()
    assert reading.keep(reading.entry(5)) > 0


def test_buffers_of_a_job_that_is_not_known_end_it(scene: Scene) -> None:
    reading = scene.read((entry(request=1), buffers(mean=[1.0, 2.0, 3.0])))
    with pytest.raises(RecordsError, match="at most 0 are read here"):
        reading.entry(5)


def test_a_job_that_is_laid_out_in_another_way_is_not_begun(scene: Scene) -> None:
    reading = scene.read((entry(request=1, job=scene.source.body, run=["run", 0, 2], first=6), b""))
    with pytest.raises(FlowcheckError, match="lays gradients out in another way"):
        reading.entry(5)
    assert scene.journal.job is None


# -- its gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [64, 1000, 1 << 20])
def test_gradients_come_in_parts_and_lie_as_they_lay(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(module, "PEER_BYTES", at_once)
    reading = scene.joined()
    number = scene.source.step()
    found = reading.entry(number)
    before = len(scene.port.heard)
    nbytes = reading.keep(found)
    places = scene.source.plan.iteration_buckets(number - 5)
    asked = scene.port.heard[before:]
    assert scene.rooms == [sum(place.nbytes for place in places)] == [sum(
        length for one in asked for _, length in one.ranges)]
    assert all(isinstance(one, Holes) and one.iteration == number and one.plan == scene.source.said.plan and
               sum(length for _, length in one.ranges) <= at_once for one in asked)
    assert [one.request for one in asked] == list(range(3, 3 + len(asked))), "each has its number"
    made, record = scene.journal.made(number), scene.source.record
    assert scene.journal.entries == [number] and nbytes == scene.journal.nbytes
    for place, bucket in zip(places, made.buckets, strict=True):
        assert torch.equal(bucket, elements_of(scene.source.regions[number], place))
    assert (made.record.groups, made.record.clip, made.record.scale, made.record.skipped) == (
        list(record.groups), record.clip, record.scale, record.skipped)
    assert reading.entry(number).request == 3 + len(asked)


def test_gradients_of_two_bytes_and_none(tmp_path: Path) -> None:
    job = journal_job(dtype="bfloat16", masters="state")
    assert job.optimizer is not None
    job.optimizer.masters = ""
    with contextlib.closing(Source(tmp_path, job)) as source, contextlib.closing(Scene(tmp_path, source)) as scene:
        reading = scene.joined()
        reading.keep(reading.entry(5))
        for place, bucket in zip(source.plan.iteration_buckets(0), scene.journal.made(5).buckets, strict=True):
            assert bucket.dtype == torch.bfloat16 and torch.equal(bucket, elements_of(source.regions[5], place))


def test_a_bucket_of_nothing_is_not_asked_for(scene: Scene) -> None:
    reading = scene.joined()
    heard = len(scene.port.heard)
    [bucket] = reading._buckets(5, scene.source.said.plan, (BucketPlace(0, 0, 0, 0, "bfloat16"),))
    assert (bucket.shape, bucket.dtype, len(scene.port.heard)) == ((0,), torch.bfloat16, heard)


def test_without_room_nothing_is_asked_for(scene: Scene) -> None:
    reading = scene.joined()
    found = reading.entry(5)

    def room(nbytes: int) -> None:
        raise FlowcheckError("no room")

    reading._room = room
    heard = len(scene.port.heard)
    with pytest.raises(FlowcheckError, match="no room"):
        reading.keep(found)
    assert len(scene.port.heard) == heard and scene.journal.entries == []


def test_what_its_source_lacks_is_said_and_not_kept(scene: Scene) -> None:
    reading = scene.joined()
    number = scene.source.step(holes=[(2, 5)])
    with pytest.raises(Lacking) as lacks:
        reading.keep(reading.entry(number))
    assert lacks.value.what == "24 bytes came over no mirror of its source" and scene.journal.entries == []
    reading.keep(reading.entry(5))  # and it goes on


def test_why_it_has_nothing_any_more_is_said_as_it_says_it(scene: Scene) -> None:
    reading = scene.joined()
    found = reading.entry(5)
    scene.source.shelf.hide(5)
    with pytest.raises(Lacking, match="its arena has been given to a later iteration"):
        reading.keep(found)
    assert scene.journal.entries == []


def lie(change: Callable[[Bytes], Any]) -> Answer:
    data = bytes(range(16))
    answer = Bytes(3, 5, [(0, 16)], hashlib.sha256(data).hexdigest())
    return change(answer) or answer, data


@pytest.mark.parametrize(("answer", "why"), [
    ((Refused("no room"), b""), "refused: no room"), ((entry(3), b""), "a Entry where bytes were due"),
    (lie(lambda one: setattr(one, "request", 2)), "an answer to question 2, iteration 5, not to 3, 5"),
    (lie(lambda one: setattr(one, "iteration", 6)), "an answer to question 3, iteration 6, not to 3, 5"),
    (lie(lambda one: setattr(one, "digest", "0" * 64)), "its bytes do not have the sum that it says"),
    ((Bytes(3, 5, [(0, 8)]), bytes(1 << 20)), "a payload of 1048576 bytes, at most "),
])
def test_bytes_that_are_not_what_was_asked_for_end_it(scene: Scene, answer: Answer, why: str) -> None:
    reading = scene.joined()
    found = reading.entry(5)
    scene.port.says[:] = [answer]
    with pytest.raises(RecordsError) as refused:
        reading.keep(found)
    assert refused.value.what.startswith(why) and scene.journal.entries == []


# -- what goes -----------------------------------------------------------------------------------------------------


def test_what_the_newest_copy_has_goes(scene: Scene) -> None:
    reading = scene.joined()
    for base, kept in ((None, [5]), (None, [5, 6]), (6, [6, 7]), (8, [8])):
        number = scene.source.step() if kept != [5] else 5
        if base is not None:
            (scene.run / f"step-{base:06d}").mkdir()
        reading.keep(reading.entry(number))
        assert scene.journal.entries == kept


def test_with_parity_what_its_oldest_round_has_goes(scene: Scene) -> None:
    """Copies do not count: there are none but what was made of it."""
    oldest: list[int | None] = [None]
    tidied: list[Any] = []

    class Parity:
        def oldest(self, *run: Any) -> int | None:
            assert run == ("run", 0)
            return oldest[0]

        def tidy(self, *given: Any) -> None:
            tidied.append(given)

    reading = scene.joined(parity=Parity())
    (scene.run / "step-000009").mkdir()
    reading.keep(reading.entry(5))
    assert scene.journal.entries == [5] and tidied == []
    oldest[0] = 6
    reading.keep(reading.entry(scene.source.step()))
    assert scene.journal.entries == [6] and tidied == [(scene.run.parents[1], "run", 0)]


def test_a_job_of_no_buffers_gives_none(tmp_path: Path) -> None:
    job = journal_job()
    job.model = [one for one in job.model if one.kind != "buffer"]
    with contextlib.closing(Source(tmp_path, job)) as source, contextlib.closing(Scene(tmp_path, source)) as scene:
        scene.source.shelf.follow("")
        reading = scene.read()
        assert (reading.entry(0).plan, scene.journal.job) == ("", None), "nothing is followed there"
        assert JobText.of(source.said.text()) == source.said
