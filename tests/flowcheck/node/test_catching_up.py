"""A session of which everything is stale, and peers whose APIs are made by hand (holes_scene.py: a version is 0.5 less
than the one before it, the one after iteration 1 is 1.0)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import Job, ModelEntry
from flowcheck.node.groups.members import RankSession
from flowcheck.node.peers import catch_up as catching_up
from flowcheck.node.peers.catch_up import CatchUp
from flowcheck.rebuild.version.events import Begun, CaughtUp, Held, NotCaughtUp
from updater.reader import Reader

from ..hand_api import KEY, HandApi, HandVersion, seal
from .holes_scene import Scene
from .live_scene import alike, small_job
from .test_live_begin import BUFFER, CONSTANT, EVERYTHING, MEAN, after, job_with
from .test_live_resumed import START, killed_after

LONGEST = 60.0
ANSWER_SECONDS = 2.0  # that a peer has, on a busy machine, too
FILE = "model.safetensors"


AS_HERE: dict[str, Any] = {
    "start": START, "options": {"lr": 0.5}, "rounding": "torch-cuda-foreach", "state": {}}


def version(step: int, value: float | None = None, job: Job | None = None, **given: Any) -> HandVersion:
    """Of a peer that follows the job: what a trainer has after `step` steps, or any value."""
    entries = (job or small_job()).model
    held = after(step - 1) if value is None else value
    model = {entry.name: [held] * entry.elements for entry in entries}
    return HandVersion(step, model, **{**AS_HERE, "shapes": shapes(entries), **given})


def shapes(entries: Iterable[ModelEntry]) -> dict[str, list[int]]:
    """Of entries, and of what the optimizer keeps of each."""
    found = {entry.name: list(entry.shape) for entry in entries}
    return found | {f"state.{name}.momentum_buffer": shape for name, shape in found.items()}


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi() as made:
        yield made


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, api: HandApi) -> Iterator[Callable[..., Scene]]:
    """Sessions of one start of a job, of which those with `peers` catch up. The wire begins with iteration 6."""
    made: list[Scene] = []

    def make(peers: bool = False, **options: Any) -> Scene:
        if peers:
            catching = CatchUp(lambda: [NodeClient(api.address, KEY, ANSWER_SECONDS)], "", START)
            options = {"catching": catching, "wire": range(6, 16), **options}
        made.append(Scene(monkeypatch, **{"empty": True, "folder": tmp_path, "job_start": START, **options}))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def until(at: Scene, happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST
    while not happened():
        assert time.monotonic() < deadline, (at.said, at.closed[-1:])
        at.poll()
        time.sleep(0.002)


def said(at: Scene, kind: type) -> list[Any]:
    return [event for event in at.said if isinstance(event, kind)]


def came_back(scene: Callable[..., Scene], **options: Any) -> Scene:
    """Versions 4 and 5 are there, iteration 5 was missed, and 6 was lost with it."""
    at = scene(peers=True, left=killed_after(scene, 4), **options)
    for rank in (0, 1):
        at.record(6, rank)
    at.poll()
    held = said(at, Held)
    assert [one.all for one in held] == [True] and at.session.serves == 4
    return at


def by_ranges(at: Scene) -> None:
    """Nothing of a peer is in what follows."""
    begun, waits = len(said(at, Begun)), at.session.next
    assert waits is None and at.session.serves == 4 and at.values() == alike(after(4))
    for rank in (0, 1):
        at.record(9, rank)
    until(at, lambda: len(said(at, Begun)) > begun)
    assert said(at, Begun)[-1].elements == EVERYTHING and at.ask() == EVERYTHING
    last = at.session.next
    assert last is not None
    at.answer(last + 1, after(last + 1))
    at.traffic(last, last + 1)
    at.go(last)
    at.go(last + 1)
    assert at.last[:2] == (last + 1, True) and at.values() == alike(after(last + 1)) and not at.closed[-1].unproven


def test_a_peers_version_is_taken_and_nothing_is_asked_of_trainers(
    scene: Callable[..., Scene], api: HandApi, tmp_path: Path
) -> None:
    api.versions = [version(6), version(7), version(5, run_id="other", start="1" * 64)]
    at = came_back(scene)
    until(at, lambda: said(at, CaughtUp))
    [caught] = said(at, CaughtUp)
    assert (caught.iteration, caught.step, caught.source, caught.nbytes) == (7, 7, api.name, 4 * EVERYTHING)
    assert at.values() == alike(after(6)) and at.session.serves == 6, "it is served"
    mark = f"the version of step 7 came from {api.name}, and no checksum of the trainer has matched since"
    reader = Reader(tmp_path / "left.replica")
    with reader.pinned(7) as held:
        assert (held.status, held.unproven[-1], held.matches) == ("unverified", mark, 0)
        assert held.optimizer["groups"][0]["options"]["lr"] == 0.5
    reader.close()
    assert at.closed[-1].iteration == 6, "what it waits for is here, and stays open for its record"
    at.go(7)
    assert at.last == (7, True, 0, 0) and at.values() == alike(after(7)) and at.closed[-1].unproven == [mark]
    at.go(8, checksums=at.sums(after(8)))
    assert at.last == (8, True, 0, 0) and at.closed[-1].status == "verified" and at.closed[-1].unproven == []
    assert at.partial.asked == 0 and at.lost == [] and at.files == 0 and not said(at, NotCaughtUp)


def test_while_it_is_looked_for_trainers_are_not_asked(scene: Callable[..., Scene], api: HandApi) -> None:
    api.versions = [version(7)]
    api.quiet.add("/v1/versions")
    sent: list[Any] = []
    at = came_back(scene, members={0: RankSession(0, sent.append, sent.append)})
    at.poll()
    assert sent == [] and at.session._catching is not None and at.session._catching.busy
    until(at, lambda: said(at, NotCaughtUp))
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: f"no answer within {ANSWER_SECONDS:g} s"})]
    until(at, lambda: sent)
    assert at.session.next is not None and at.values() == alike(after(4))


def test_state_of_the_optimizer_comes_with_it(scene: Callable[..., Scene], api: HandApi) -> None:
    job = small_job(options={"lr": 0.5, "momentum": 0.5})
    state = {f"state.{entry.name}.momentum_buffer": [2.0] * entry.elements for entry in job.model}
    api.versions = [version(9, 3.0, job, state=state, options={"lr": 0.25, "momentum": 0.5})]
    at = scene(peers=True, job=job, wire=range(8, 16))
    for rank in (0, 1):
        at.record(8, rank)
    until(at, lambda: said(at, CaughtUp))
    assert isinstance(at.said[0], Begun) and at.files == 1 and said(at, CaughtUp)[0].nbytes == 8 * EVERYTHING
    for rank in (0, 1):
        at.record(9, rank)
    until(at, lambda: at.session.serves == 9)
    assert at.values() == alike(2.0), "half of 2 and a gradient of 1, times 0.5"


def test_a_tensor_in_many_pieces_lies_where_it_lay(
    scene: Callable[..., Scene], api: HandApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowcheck.ask.client.CHUNK", 12)
    job = small_job(options={"lr": 0.5, "momentum": 0.5})
    state = {f"state.{entry.name}.momentum_buffer": [float(i) for i in range(entry.elements)] for entry in job.model}
    api.versions = [version(9, 3.0, job, state=state, options={"lr": 0.5, "momentum": 0.5})]
    at = scene(peers=True, job=job, wire=range(8, 16))
    for rank in (0, 1):
        at.record(8, rank)
    until(at, lambda: said(at, CaughtUp))
    for rank in (0, 1):
        at.record(9, rank)
    until(at, lambda: at.session.serves == 9)
    assert at.values() == {
        entry.name: {3.0 - 0.5 * (0.5 * i + 1.0) for i in range(entry.elements)} for entry in job.model}


def test_constants_and_buffers_of_a_replica_that_has_none(
    scene: Callable[..., Scene], api: HandApi, tmp_path: Path
) -> None:
    """HandVersion knows floats alone, so a constant is one here."""
    constant = type(CONSTANT)("fixed", [5], "float32", kind="constant")
    job = job_with(BUFFER, constant, buffers=False)
    optimized = [entry.name for entry in job.model[:-2]]

    def held(step: int, fixed: float) -> HandVersion:
        model = {entry.name: [after(step - 1)] * entry.elements for entry in job.model} | {"fixed": [fixed] * 5}
        made = HandVersion(step, model, **AS_HERE, shapes=shapes(job.model))
        made.document = seal({**made.document, "optimizer": {
            "name": "sgd", "groups": [{"params": optimized, "options": {"lr": 0.5}}]}})
        return made

    api.versions = [held(9, 7.0)]
    at = scene(peers=True, job=job, wire=range(8, 16))
    at.record(8, 0, buffers=MEAN)
    until(at, lambda: said(at, CaughtUp))
    [path] = tmp_path.glob("*.replica")
    with Reader(path).pinned() as there:
        assert there.step == 9 and there.parameters["fixed"].tolist() == [7.0] * 5
        assert there.parameters["mean"].tolist() == [after(8)] * 3
    at.session.close()
    api.versions = [held(13, 8.0)]
    at = scene(peers=True, job=job, wire=range(12, 20), left=path)
    at.record(12, 0, buffers=MEAN)
    until(at, lambda: said(at, NotCaughtUp))
    assert said(at, NotCaughtUp)[0].failed == {api.name: "its 'fixed' is not what it is here"}
    with Reader(path).pinned() as there:
        assert there.step == 9 and there.parameters["fixed"].tolist() == [7.0] * 5


def flipped(made: HandVersion) -> None:
    made.files[FILE] = made.files[FILE][:-1] + bytes([made.files[FILE][-1] ^ 1])


def resealed(**fields: Any) -> Callable[[HandVersion], None]:
    def change(made: HandVersion) -> None:
        made.document = seal({**made.document, **fields})

    return change


def other_optimizer(**fields: Any) -> Callable[[HandVersion], None]:
    return lambda made: resealed(optimizer={**made.document["optimizer"], **fields})(made)


def longer(made: HandVersion) -> None:
    job = small_job(count=[40, 21])
    other = version(7, job=job)
    made.document, made.files = other.document, other.files


def lacking(made: HandVersion) -> None:
    names = [entry.name for entry in small_job().model]
    other = HandVersion(7, {name: [1.0] for name in names[1:]}, **AS_HERE)
    made.document, made.files = other.document, other.files


@pytest.mark.parametrize(("change", "why"), [
    (flipped, "has other bytes than its manifest says (SHA-256 differs)"),
    (resealed(rounding="torch-cpu"), "is computed as 'torch-cpu', and here it is 'torch-cuda-foreach'"),
    (resealed(run_id="another"), "offered run_id 'run' and sent 'another'"),
    (resealed(step=8), "offered step 7 and sent 8"),
    (lambda made: made.document.update(step=8), "its own hash does not match"),
    (longer, "is not what it is here, or is in one of the two alone"),
    (lacking, "is not what it is here, or is in one of the two alone"),
    (other_optimizer(name="adam"), "another optimizer"),
    (other_optimizer(groups=[]), "another optimizer"),
    (other_optimizer(groups=7), "has groups that are none"),
    (other_optimizer(groups=[{"params": ["x"], "options": {}}]), "another optimizer"),
    (other_optimizer(groups=[{"params": [entry.name for entry in small_job().model], "options": {"x": 1}}]), "'x'"),
    (other_optimizer(groups=[{"params": [entry.name for entry in small_job().model], "options": {"momentum": 0.9}}]),
     "cannot be switched"),
])
def test_a_peer_that_lies_is_found_out_before_anything_is_published(
    scene: Callable[..., Scene], api: HandApi, change: Callable[[HandVersion], None], why: str
) -> None:
    api.versions = [version(7, 99.0)]
    change(api.versions[0])
    at = came_back(scene)
    until(at, lambda: said(at, NotCaughtUp))
    [failed] = said(at, NotCaughtUp)
    assert list(failed.failed) == [api.name] and why in failed.failed[api.name] and not said(at, CaughtUp)
    by_ranges(at)


@pytest.mark.parametrize("given", [{"start": "1" * 64}, {"start": ""}, {"tier": "disk"}, {"shard": "other"}])
def test_versions_of_something_else_are_not_taken(
    scene: Callable[..., Scene], api: HandApi, given: dict[str, Any]
) -> None:
    """Another start of the job of the same name may have trained on with other numbers."""
    api.versions = [version(7, 99.0, **given)]
    api.withheld = [{"why": "step 8 is withheld"}]
    at = came_back(scene)
    until(at, lambda: said(at, NotCaughtUp))
    why = "has no version of this start of the job: step 8 is withheld"
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: why})]
    assert at.session.next == 7 and at.partial.elements == EVERYTHING, "which goes on as it was"


def test_a_peer_that_is_behind_is_asked_again_for_a_moment(
    scene: Callable[..., Scene], api: HandApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.versions = [version(6)]
    at = came_back(scene)
    until(at, lambda: api.asked_for("/v1/versions") > 2)
    api.versions = [version(7)]
    until(at, lambda: said(at, CaughtUp))
    monkeypatch.setattr(catching_up, "ASK_SECONDS", 0.0)
    api.versions = [version(6), version(99)]
    at = scene(peers=True, wire=range(6, 16))
    at.record(6)
    until(at, lambda: said(at, NotCaughtUp))
    [failed] = said(at, NotCaughtUp)
    assert failed.failed[api.name].startswith("has step 99, and steps 7 to "), "nothing can have made that by now"


@pytest.mark.parametrize("file", [FILE, "manifest.json"])
@pytest.mark.parametrize("begins", [False, True])
def test_a_peer_that_hangs_in_the_middle(
    scene: Callable[..., Scene], api: HandApi, file: str, begins: bool
) -> None:
    api.versions = [version(7, 99.0)]
    path = f"/v1/versions/{api.versions[0].id}/{file}"
    if begins:
        api.stalls[path] = 40  # of each answer
    else:
        api.quiet.add(path)
    at = came_back(scene)
    until(at, lambda: said(at, NotCaughtUp))
    assert f"no answer within {ANSWER_SECONDS:g} s" in said(at, NotCaughtUp)[0].failed[api.name]
    by_ranges(at)


def test_a_peer_that_dies_half_way(scene: Callable[..., Scene], api: HandApi) -> None:
    api.versions = [version(7, 99.0)]
    size = len(api.versions[0].files[FILE])
    api.cut[f"/v1/versions/{api.versions[0].id}/{FILE}"] = [size - 100, 3, 3]
    at = came_back(scene)
    until(at, lambda: said(at, NotCaughtUp))
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: "connection lost: closed before its end"})]
    by_ranges(at)


def test_rings_that_fill_end_it_at_once(scene: Callable[..., Scene], api: HandApi) -> None:
    """The peer still hangs: nothing of it is written afterwards, and nobody waits for that."""
    api.versions = [version(7, 99.0)]
    api.quiet.add(f"/v1/versions/{api.versions[0].id}/{FILE}")
    at = came_back(scene)
    until(at, lambda: at.joining.expecting)
    at.engine.given_up = range(9, 12)
    at.poll()
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: "rings were full before it was here"})]
    at.engine.given_up = range(0)
    by_ranges(at)


def test_who_leaves_ends_it(scene: Callable[..., Scene], api: HandApi) -> None:
    api.versions = [version(7, 99.0)]
    api.quiet.add(f"/v1/versions/{api.versions[0].id}/{FILE}")
    at = came_back(scene)
    until(at, lambda: at.joining.expecting)
    at.session.withdraw()
    at.poll()
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: "the job has ended meanwhile"})]


def test_a_trainers_state_comes_in_place_of_a_peers_version(scene: Callable[..., Scene], api: HandApi) -> None:
    """Nobody asked for it, and what it goes on from is another replica: what the peer still sends goes nowhere."""
    api.versions = [version(7, 99.0)]
    api.quiet.add(f"/v1/versions/{api.versions[0].id}/{FILE}")
    at = came_back(scene)
    until(at, lambda: at.joining.expecting)
    at.state(8, after(7))
    api.quiet.clear()
    for t in (8, 9):
        at.go(t)
    assert at.last[:2] == (9, True) and at.values() == alike(after(9))
    assert said(at, CaughtUp) == said(at, NotCaughtUp) == [] and at.session.serves == 9


def test_a_search_that_is_ended_while_it_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the peer says then is of no use to anybody: its thread must not wait for an answer to it."""
    asked, ended = threading.Event(), threading.Event()
    found = SimpleNamespace(tier="memory", shard="", start="one start", step=3)

    def offers_of(nodes: list[Any]) -> list[list[Any]]:
        asked.set()
        assert ended.wait(240)
        return [[found]]

    monkeypatch.setattr(catching_up, "offers_of", offers_of)
    with closing(NodeClient(("127.0.0.1", 1), "key")) as node:
        search = catching_up._Search([node], "", "one start", (0, 9), {})
    assert asked.wait(240)
    search.end()
    ended.set()
    end = time.monotonic() + 240
    while not search.over:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert search.version is None


def test_a_version_that_is_whole_just_as_it_is_looked_for_is_taken() -> None:
    """The search's thread shows the version first, and then that it is over."""
    took: list[int] = []

    class Ending:
        """Ends between any two questions about it."""

        version: Any = None
        source, failed = "peer", {}

        @property
        def over(self) -> bool:
            self.version = SimpleNamespace(step=7, optimizer=None, nbytes=1)
            return True

    def go_on_with(step: int, *_: Any) -> int:
        took.append(step)
        return step

    catching = CatchUp(list, "", "one start")
    joining: Any = SimpleNamespace(go_on_with=go_on_with)
    [event] = catching._await(joining, Ending())  # type: ignore[arg-type]
    assert took == [7] and isinstance(event, CaughtUp) and event.step == 7


def test_peers_that_do_not_say_in_time_what_they_have_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search's thread waits for, the group's thread has a clock of its own."""
    hold = threading.Event()
    monkeypatch.setattr(catching_up, "offers_of", lambda nodes: hold.wait(240) and [[]])
    now = [100.0]
    catching = CatchUp(lambda: [NodeClient(("127.0.0.1", 1), "key")], "", "one start", lambda: now[0])
    went_on: list[int] = []
    joining: Any = SimpleNamespace(
        chain=SimpleNamespace(status="", next=7, builds=False), ranges=SimpleNamespace(given_up=False, emptied=1),
        useful=(5, 7), go_on_without=lambda: went_on.append(1) or iter(()),
    )
    try:
        assert list(catching.look(joining)) == [] and catching.busy
        now[0] += catching_up.ASK_SECONDS + 3 * catching_up.QUIET_SECONDS
        assert list(catching.look(joining)) == [] and catching.busy
        now[0] += 0.1
        [event] = catching.look(joining)
        assert isinstance(event, NotCaughtUp) and "did not say in time" in event.failed[""]
        assert went_on == [1] and not catching.busy
    finally:
        hold.set()


def test_a_version_that_does_not_come_in_its_time_is_given_up() -> None:
    now = [100.0]
    catching = CatchUp(list, "", "one start", lambda: now[0])
    catching._until = 109.0
    ended: list[int] = []
    search: Any = SimpleNamespace(over=False, source="peer", failed={}, end=lambda: ended.append(1))
    joining: Any = SimpleNamespace(expecting=True, gives_up=False, go_on_without=lambda: iter(()))
    assert list(catching._await(joining, search)) == []
    now[0] = 109.1
    [event] = catching._await(joining, search)
    assert isinstance(event, NotCaughtUp) and event.failed == {"peer": "too slow"} and ended == [1]


def test_closing_does_not_wait_for_a_peer(scene: Callable[..., Scene], api: HandApi) -> None:
    api.versions = [version(7, 99.0)]
    api.quiet.add(f"/v1/versions/{api.versions[0].id}/{FILE}")
    at = came_back(scene)
    until(at, lambda: at.joining.expecting)
    at.session.close()
    assert at.session._catching is not None and not at.session._catching.busy


def test_a_version_that_was_not_the_trainers_is_never_asked_for_again(
    scene: Callable[..., Scene], api: HandApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hashes are right, and its bytes are nobody's: the next checksum finds it."""
    monkeypatch.setattr(catching_up, "PAUSE", 0.0)
    monkeypatch.setattr(catching_up, "SHARE", 0)
    api.versions = [version(7, 99.0)]
    at = came_back(scene)
    until(at, lambda: said(at, CaughtUp))
    at.go(7)
    assert at.closed[-1].published and at.closed[-1].unproven
    at.go(8, checksums=at.sums(after(8)))
    assert at.withdrawn == [True] and at.session.replica is None
    api.versions = [version(10), version(11), version(12)]
    at.begin()
    for rank in (0, 1):
        at.record(9, rank)
    until(at, lambda: said(at, NotCaughtUp))
    assert said(at, NotCaughtUp) == [NotCaughtUp({api.name: "not asked: its version was not the trainer's"})]
    assert at.partial.elements == EVERYTHING


def test_one_that_a_checksum_has_confirmed_is_not_to_blame_later(
    scene: Callable[..., Scene], api: HandApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catching_up, "PAUSE", 0.0)
    monkeypatch.setattr(catching_up, "SHARE", 0)
    api.versions = [version(7)]
    at = came_back(scene)
    until(at, lambda: said(at, CaughtUp))
    at.go(7, checksums=at.sums(after(7)))
    at.go(8, checksums=at.sums(3.0))
    assert at.withdrawn == [False], "the one that was confirmed stays"
    api.versions = [version(16), version(17)]
    at.begin()
    at.traffic(16, 17)
    for rank in (0, 1):
        at.record(16, rank)
    until(at, lambda: len(said(at, CaughtUp)) == 2)


def test_it_is_not_tried_again_soon(scene: Callable[..., Scene], api: HandApi) -> None:
    at = came_back(scene)
    until(at, lambda: said(at, NotCaughtUp))
    asked = len(api.asked)
    api.versions = [version(8), version(9)]
    at.go(7)
    at.take(at.follower.lose("all of it", last=8))
    at.poll()
    assert len(api.asked) == asked and not said(at, CaughtUp)


def test_one_that_failed_is_left_out_for_a_time(scene: Callable[..., Scene], api: HandApi) -> None:
    api.versions = [version(7, rounding="another")]
    catching = CatchUp(lambda: [NodeClient(api.address, KEY, ANSWER_SECONDS)], "", START, lambda: 50.0)
    at = came_back(scene, catching=catching)
    until(at, lambda: said(at, NotCaughtUp))
    [first] = said(at, NotCaughtUp)
    assert first.failed[api.name].startswith("is computed as 'another'")
    assert catching._left_out == {api.name: (first.failed[api.name], 50.0 + 300.0)}


def test_a_token_that_cannot_be_read_is_said(scene: Callable[..., Scene]) -> None:
    def nodes() -> list[NodeClient]:
        raise EnvironmentProblem("Permission denied", where="token")

    at = came_back(scene, catching=CatchUp(nodes, "", START))
    [failed] = said(at, NotCaughtUp)
    assert "Permission denied" in failed.failed[""] and at.session.next == 7
