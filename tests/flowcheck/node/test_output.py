"""What a node writes of its versions: their hashes, and checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowcheck.checkpoint import directory
from flowcheck.checkpoint.files import write_file
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import BucketSlice
from flowcheck.node.config.store import Output
from flowcheck.node.versions import output
from flowcheck.node.versions.output import Hashes, Writer, check_places
from updater.errors import NoFreeSlot
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_node import until

SECONDS = 120.0  # until a thread must have done something


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    monkeypatch.setattr(output, "time", type("Clock", (), {"time": staticmethod(lambda: 1700000000.12345)}))


# -- hashes --------------------------------------------------------------------------------------------------------


# -- places --------------------------------------------------------------------------------------------------


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder that nobody can make: its parent is a file."""
    (tmp_path / "file").write_text("a file")
    return tmp_path / "file" / "folder"


def test_only_what_is_written_is_tried(tmp_path: Path, unwritable: Path) -> None:
    check_places(Output(directory=unwritable, every=0))
    check_places(Output(directory=tmp_path / "out", every=1, keep_hashes=tmp_path / "h" / "hashes"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "h", "out"]
    assert list((tmp_path / "h").iterdir()) == [] == list((tmp_path / "out").iterdir()), "nothing is left there"


@pytest.mark.parametrize(("setting", "said"), [
    ({"every": 1}, "a directory that the node may write to as output.directory, and free space"),
    ({"keep_hashes": "hashes"}, "a directory that the node may write to in output.keep_hashes, and free space"),
    ({"status_file": "status"}, "a directory that the node may write to in output.status_file, and free space"),
])
def test_a_place_that_cannot_be_written_is_named_with_its_setting(
    unwritable: Path, setting: dict[str, Any], said: str
) -> None:
    paths = {key: unwritable / value if isinstance(value, str) else value for key, value in setting.items()}
    with pytest.raises(EnvironmentProblem) as refused:
        check_places(Output(directory=unwritable, **{"every": 0, **paths}))
    assert refused.value.remedy == said and str(unwritable) in refused.value.where


def test_a_status_file_is_replaced_and_hashes_are_appended(tmp_path: Path) -> None:
    """So the one must be a regular file, and the other may be a pipe. No folder can be either."""
    pipe, file, folder = (tmp_path / name for name in ("pipe", "file", "folder"))
    os.mkfifo(pipe)
    file.write_text("old")
    folder.mkdir()
    for path in (pipe, file, tmp_path / "absent"):
        check_places(Output(every=0, keep_hashes=path))
    for path in (file, tmp_path / "absent"):
        check_places(Output(every=0, status_file=path))
    for setting, path in (("keep_hashes", folder), ("status_file", folder), ("status_file", pipe)):
        with pytest.raises(EnvironmentProblem) as refused:
            check_places(Output(every=0, **{setting: path}))
        assert (refused.value.what, refused.value.where) == ("is no regular file", str(path))
        assert refused.value.remedy == f"the name of a file in output.{setting}"
    assert file.read_text() == "old"


def test_hashes_need_the_right_to_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose folder the node may write to: a status file is replaced, and needs none."""
    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(output.os, "access", lambda path, _: path != file)  # root may write to anything
    check_places(Output(every=0, status_file=file))
    with pytest.raises(EnvironmentProblem, match="cannot be written to") as refused:
        check_places(Output(every=0, keep_hashes=file))
    assert refused.value.remedy == "a file that the node may write to in output.keep_hashes"


class Version:
    step = 7
    parameters = {"w": torch.tensor([1.0, 2.0]), "b": torch.zeros(1)}
    optimizer_state = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.tensor([4.0])}, "b": {}}


class FakeReplica:
    """A replica with one version. hold: what `write` waits for. error: what it raises. late: seconds until pinned.
    refused: slots that updates have wanted in vain."""

    unproven = ["icrc off"]
    late = 0.0
    refused = 0

    def __init__(self, *, hold: threading.Event | None = None, error: Exception | None = None, step: int = 7) -> None:
        self.hold, self.error, self.step = hold, error, step
        self.pins, self.written = 0, []

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Version]:
        time.sleep(self.late)
        self.pins += 1
        yield Version()
        self.pins -= 1

    def write(self, out: Path, unproven: Any, version: Version, status: str, shard: str, users: Any, matches: int
              ) -> Path:
        assert self.pins == 1
        self.matches = matches
        self.shard = shard
        self.written.append((out, unproven, version.step, status))
        if self.hold is not None:
            assert self.hold.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.given = users()
        assert self.pins == 0  # all of it is read
        return out / "step-000007"


def advance(replica: Replica) -> None:
    slot = replica.build(replica.current.step + 1, Layout([[BucketSlice("w", 0, 4)]], {"w": (4,)}, [4]))
    slot.apply(0, torch.ones(4))
    replica.publish(slot)


def tried(replica: Replica) -> bool:
    try:
        advance(replica)
    except NoFreeSlot:
        return False
    return True


def sha256(*values: float) -> str:
    return hashlib.sha256(torch.tensor(values).numpy().tobytes()).hexdigest()


def test_a_checkpoint_is_given_what_ranks_gave(tmp_path) -> None:
    writer, replica = Writer(lambda event, **fields: None), FakeReplica()
    users = lambda: {3: b"of 3"}  # noqa: E731
    writer.write("a", replica, tmp_path, "", users=users, matches=6)  # type: ignore[arg-type]
    writer.close()
    assert replica.given == {3: b"of 3"} and replica.matches == 6


def test_hashes_of_every_version_are_appended(tmp_path) -> None:
    path = tmp_path / "new" / "deep" / "hashes.jsonl"
    for name in ("a", "b"):
        hashes = Hashes(path)
        hashes.add(6, name, FakeReplica())  # type: ignore[arg-type]
        assert path.read_text().count("\n") == 1 + (name == "b")  # at once, not at the end
        hashes.close()
    first, second = [json.loads(text) for text in path.read_text().splitlines()]
    assert first == {
        "iteration": 6, "name": "a", "tensors": {"w": sha256(1.0, 2.0), "b": sha256(0.0)},
        "optimizer": {"w.exp_avg": sha256(4.0)},
    }
    assert second == first | {"name": "b"}


def test_hashes_that_cannot_be_written_are_a_problem_of_the_machine(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as refused:
        Hashes(tmp_path / "file" / "hashes")
    assert str(tmp_path / "file") in refused.value.message()
    assert refused.value.remedy == "free space on that file system, or another file as output.keep_hashes"


def test_a_full_disk_under_the_hashes_is_a_problem_with_its_setting() -> None:
    hashes = Hashes(Path("/dev/full"))
    with pytest.raises(EnvironmentProblem, match="No space left") as refused:
        hashes.add(6, "a", FakeReplica())  # type: ignore[arg-type]
    assert "output.keep_hashes" in refused.value.remedy and "/dev/full" in refused.value.message()
    with contextlib.suppress(OSError):
        hashes.close()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_version_is_written_while_it_is_pinned(tmp_path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    writer = Writer(lambda event, **fields: said.append((event, fields)))
    for _ in range(2):
        replica = FakeReplica(step=8)  # it has gone on since
        writer.write("a", replica, tmp_path, "verified")  # type: ignore[arg-type]
        writer.close()
        assert replica.written == [(tmp_path, ["icrc off"], 7, "verified")] and replica.pins == 0
        assert replica.shard == "a"
    assert said == [("written", {"name": "a", "step": 7, "path": str(tmp_path / "step-000007")})] * 2
    writer.close()


def test_one_checkpoint_of_a_group_at_a_time(tmp_path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    now = [10.0]
    writer, hold = Writer(lambda event, **fields: said.append((event, fields)), 1, lambda: now[0]), threading.Event()
    slow, due = FakeReplica(hold=hold), FakeReplica(step=9)
    slow.late = 0.1  # whoever does not wait for the pin would be seen to go on without it
    try:
        writer.write("a", slow, tmp_path, "verified")  # type: ignore[arg-type]
        assert slow.pins == 1  # when the caller goes on the version is held
        writer.write("a", due, tmp_path, "verified")  # type: ignore[arg-type]
        why = "an older checkpoint is still being written"
        assert said == [("skipped", {"name": "a", "step": 9, "why": why})] and due.written == []
    finally:
        hold.set()
        writer.close()
    assert said[1][0] == "written" and slow.pins == 0
    writer.write("a", due, tmp_path, "verified")  # type: ignore[arg-type]
    writer.close()
    assert len(due.written) == 1


def test_groups_do_not_push_out_each_others_checkpoints(tmp_path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    writer, hold = Writer(lambda event, **fields: said.append((event, fields))), threading.Event()
    stages = {name: FakeReplica(hold=hold) for name in ("a", "b", "c")}
    try:
        for name, replica in stages.items():
            writer.write(name, replica, tmp_path / name, "verified")  # type: ignore[arg-type]
        assert said == [] and all(replica.pins == 1 for replica in stages.values())
    finally:
        hold.set()
        writer.close()
    assert sorted(fields["name"] for event, fields in said if event == "written") == ["a", "b", "c"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0.0, 9.0), min_size=2, max_size=3), st.sampled_from([1, 5]))
def test_stages_in_lockstep_share_steps_on_disk(tmp_path, seconds: list[float], every: int) -> None:
    """One version a second is due, a checkpoint of each stage takes its own time: the slowest one's steps are all's."""
    now, written = [0.0], [set[int]() for _ in seconds]
    writers = [Writer(lambda event, **fields: None, every, lambda: now[0]) for _ in seconds]
    ends = [0.0 for _ in seconds]
    for due in range(1, 129):
        now[0] = float(due)
        for stage, (writer, takes) in enumerate(zip(writers, seconds, strict=True)):
            lane = writer._lanes.setdefault(("", False), output._Lane())
            alive = now[0] < ends[stage]
            lane.thread = SimpleNamespace(is_alive=lambda alive=alive: alive, join=lambda _: None)  # type: ignore
            before, replica = lane.thread, FakeReplica(step=due * every)
            writer.write("", replica, tmp_path, "")  # type: ignore[arg-type]
            writer.close()
            if lane.thread is not before:
                ends[stage], lane.seconds = now[0] + takes, takes
                written[stage].add(due * every)
    late = [{step for step in steps if step > 64 * every} for steps in written]
    fewest = min(late, key=len)
    assert len(fewest) >= 4 and all(fewest <= steps for steps in late)


def test_what_is_left_out_is_said(tmp_path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    now = [0.0]
    writer = Writer(lambda event, **fields: said.append((event, fields)), 10, lambda: now[0])
    writer._lanes["a", False] = output._Lane(seconds=2.5, due=-1.0)
    writer.write("a", FakeReplica(step=70), tmp_path, "")  # type: ignore[arg-type]
    why = "a checkpoint takes 2.5 s, so each 40th step is written; raise output.every"
    assert said == [("skipped", {"name": "a", "step": 70, "why": why})]
    now[0] = 1.0
    writer.write("a", FakeReplica(step=80), tmp_path, "")  # type: ignore[arg-type]
    writer.close()
    assert said[-1][0] == "written"


def test_a_checkpoint_that_cannot_be_written_is_said(tmp_path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    writer = Writer(lambda event, **fields: said.append((event, fields)))
    writer.write("a", FakeReplica(error=UserError("no space", where="/out")), tmp_path, "")  # type: ignore[arg-type]
    writer.close()
    assert said == [("problem", {"name": "a", "step": 7, "why": "/out: no space"})]


@pytest.mark.parametrize("which", ["writer", "pin"])
def test_a_checkpoint_for_which_there_is_no_thread_is_said(
    tmp_path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The group's thread goes on, the slot is given back, and the next checkpoint is written."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == f"flowcheck {which} a":
            raise RuntimeError("can't start new thread")
        begin(thread)

    said: list[tuple[str, dict[str, Any]]] = []
    writer, replica = Writer(lambda event, **fields: said.append((event, fields))), FakeReplica()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        writer.write("a", replica, tmp_path, "")  # type: ignore[arg-type]
    why = f"step {replica.step} is not written: can't start new thread"
    assert said == [("problem", {"name": "a", "step": replica.step, "why": why})] and not replica.pins
    writer.write("a", replica, tmp_path, "")  # type: ignore[arg-type]
    writer.close()
    assert said[-1][0] == "written"


def test_a_version_that_cannot_be_pinned_holds_nobody_up(tmp_path) -> None:
    class Closed(FakeReplica):
        def pinned(self) -> Any:
            raise UserError("it is closed")

    said: list[tuple[str, dict[str, Any]]] = []
    writer = Writer(lambda event, **fields: said.append((event, fields)))
    writer.write("a", Closed(), tmp_path, "")  # type: ignore[arg-type]
    writer.close()
    assert said == [("problem", {"name": "a", "step": 7, "why": "it is closed"})]


def test_a_slot_that_updates_need_is_not_left_to_a_disk_that_hangs(tmp_path) -> None:
    """It is given back, and what the disk takes at last is no checkpoint. One that is nearly done keeps its slot."""
    said: list[tuple[str, dict[str, Any]]] = []
    now = [10.0]
    writer, hold = Writer(lambda event, **fields: said.append((event, fields)), 1, lambda: now[0]), threading.Event()
    replica = FakeReplica(hold=hold)
    try:
        writer.write("a", replica, tmp_path, "verified")  # type: ignore[arg-type]
        now[0] += 2 * output.WANTED_SECONDS
        time.sleep(4 * output.LOOK_SECONDS)
        assert replica.pins == 1  # nobody wants it
        while replica.pins:
            replica.refused += 1  # as an update does again and again
            time.sleep(output.LOOK_SECONDS)
            now[0] += output.WANTED_SECONDS / 4
    finally:
        hold.set()
        writer.close()
    (event, fields), = said
    assert (event, fields["name"], fields["step"]) == ("skipped", "a", 7) and "replica.slots = 4" in fields["why"]
    assert now[0] >= 10.0 + 3 * output.WANTED_SECONDS and replica.written
    now[0] += 100.0
    writer.write("a", replica, tmp_path, "verified")  # type: ignore[arg-type]
    writer.close()
    assert said[-1][0] == "written" and replica.pins == 0


def test_updates_that_get_a_slot_in_between_have_not_waited(tmp_path) -> None:
    """A slow disk, and now and then an update that tries twice: its checkpoint is written."""
    said: list[str] = []
    now = [10.0]
    writer, hold = Writer(lambda event, **_: said.append(event), 1, lambda: now[0]), threading.Event()
    replica = FakeReplica(hold=hold)
    try:
        writer.write("a", replica, tmp_path, "verified")  # type: ignore[arg-type]
        for _ in range(5):
            now[0] += 2 * output.WANTED_SECONDS
            replica.refused += 1
            time.sleep(4 * output.LOOK_SECONDS)
        assert replica.pins == 1 and said == []
    finally:
        hold.set()
        writer.close()
    assert said == ["written"]


def test_versions_go_on_over_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real replica with two slots, a real checkpoint whose file the disk does not take."""
    monkeypatch.setattr(output, "WANTED_SECONDS", 0.1)
    hold, asked = threading.Event(), threading.Event()

    def hang(path: Path, tensors: Any) -> dict[str, Any]:
        asked.set()
        assert hold.wait(SECONDS)
        return write_file(path, tensors)

    monkeypatch.setattr(directory, "write_file", hang)
    said: list[str] = []
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    with contextlib.closing(Replica({"w": torch.zeros(4)}, spec, slots=2)) as replica:

        class Job:
            """Of a JobReplica what a writer uses."""

            unproven: tuple[str, ...] = ()
            step = 0
            pinned = staticmethod(replica.pinned)
            refused = property(lambda _: replica.refused)

            @staticmethod
            def write(out: Path, unproven: Any, one: Any, status: str, shard: str, users: Any, matches: int) -> Path:
                return directory.write_step(out, one.step, one.parameters, one.optimizer_state, directory.Meta("run"),
                                            users)

        writer = Writer(lambda event, **_: said.append(event))
        try:
            writer.write("a", Job(), tmp_path, "verified")  # type: ignore[arg-type]
            assert asked.wait(SECONDS)
            advance(replica)
            until(lambda: tried(replica))  # the version after it needs the slot that is pinned
            assert replica.current.step == 2 and said == ["skipped"]
        finally:
            hold.set()
            writer.close()
    assert list(tmp_path.iterdir()) == [] and said == ["skipped"]


def test_a_node_ends_although_the_disk_hangs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "END_SECONDS", 0.1)
    said: list[tuple[str, dict[str, Any]]] = []
    writer, hold = Writer(lambda event, **fields: said.append((event, fields))), threading.Event()
    writer.write("a", FakeReplica(hold=hold), tmp_path, "verified")  # type: ignore[arg-type]
    writer.close()
    (event, fields), = said
    assert event == "problem" and fields["name"] == "a" and "the disk has not taken it" in fields["why"]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("flowcheck "))
    hold.set()
    writer.close()
    assert said[-1][0] == "written"


def test_a_writer_that_has_written_nothing_can_be_closed() -> None:
    Writer(lambda event, **fields: None).close()


def test_who_waits_for_a_checkpoint_is_told_once_it_is_there(tmp_path) -> None:
    told: list[str] = []
    writer = Writer(lambda event, **fields: told.append(event))
    for error in (UserError("no space"), None):
        writer.write("a", FakeReplica(error=error), tmp_path, "verified", lambda: told.append("done"))  # type: ignore[arg-type]
        writer.close()
    assert told == ["problem", "done", "written"]


def test_marks_of_a_verdict_are_written_with_those_of_the_replica(tmp_path: Path) -> None:
    replica = FakeReplica()
    writer = Writer(lambda *_, **__: None)
    writer.write("a", replica, tmp_path, "unverified", None, ["3 cells came from a peer"])  # type: ignore[arg-type]
    writer.close()
    assert replica.written == [(tmp_path, ["icrc off", "3 cells came from a peer"], 7, "unverified")]
    assert replica.unproven == ["icrc off"]
