"""What is said of replica files that go, and of those that take the room of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.node.versions.replica_files import LeftoverReplica
from flowcheck.node.versions.standing import Standing
from flowcheck.rebuild.version.replica import NoRoomForReplica

from .group_scene import small_job

OLD = LeftoverReplica(Path("/dev/shm/a-1.replica"), "yesterday", 7, 0, None)
OLDER = LeftoverReplica(Path("/dev/shm/a-0.replica"), "last week", 9, 2, 8)


class Files:
    """gone: what goes when a file stands, or a run is settled. kept: what is there. others: of other groups."""

    def __init__(self, gone: list[LeftoverReplica], kept: list[LeftoverReplica]) -> None:
        self.gone, self.kept, self.others = gone, kept, list[Path]()
        self.asked: list[tuple[Any, ...]] = []

    def path(self) -> Path:
        return Path("/dev/shm/a-2.replica")

    def stands(self, *what: Any) -> list[LeftoverReplica]:
        self.asked.append(what)
        return self.gone

    def settle(self) -> list[LeftoverReplica]:
        return self.gone

    def found(self) -> list[LeftoverReplica]:
        return self.kept

    def of_others(self) -> list[Path]:
        return self.others

    def left(self, start: str) -> LeftoverReplica | None:
        return {"the same start": OLD}.get(start)

    def resume(self, path: Path) -> None:
        self.asked.append((path,))


class Scene:
    def __init__(self, gone: tuple[LeftoverReplica, ...] = (), kept: tuple[LeftoverReplica, ...] = ()) -> None:
        self.files, self.said = Files(list(gone), list(kept)), list[tuple[str, dict[str, Any]]]()
        self.standing = Standing(self.files, lambda event, **fields: self.said.append((event, fields)))  # type: ignore[arg-type]
        self.job = small_job()


def removed(kept: LeftoverReplica, why: str) -> tuple[str, dict[str, Any]]:
    return "removed", {"run_id": kept.run_id, "step": kept.step, "path": str(kept.path), "why": why}


def test_the_first_version_makes_a_file_stand_and_later_ones_do_not() -> None:
    at = Scene(gone=(OLD,))
    at.standing.first(at.job, 3)
    assert at.files.asked == [], "no file was named"
    assert at.standing.new() == Path("/dev/shm/a-2.replica")
    at.standing.first(at.job, 3)
    at.standing.first(at.job, 4)
    assert at.files.asked == [(at.job.run_id, at.job.epoch, 3)]
    assert at.said == [removed(OLD, "it was never verified, and a better or newer one is kept")]


def test_a_file_that_has_a_version_already_stands_at_once() -> None:
    at = Scene()
    at.standing.new()
    at.standing.has(at.job, 5)
    at.standing.first(at.job, 6)
    assert at.files.asked == [(at.job.run_id, at.job.epoch, 5)] and at.said == []


def test_a_run_that_is_settled_says_which_files_go() -> None:
    at = Scene(gone=(OLD, OLDER))
    at.standing.settle(at.job)
    why = f"run {at.job.run_id} has a verified version of its own"
    assert at.said == [removed(OLD, why), removed(OLDER, why)]


@pytest.mark.parametrize(("kept", "remedy"), [
    ((), "a larger /dev/shm"),
    ((OLD, OLDER), "more room on tmpfs, or fewer slots; kept there until this run is verified: /dev/shm/a-1.replica"
                   " (run yesterday, step 7), /dev/shm/a-0.replica (run last week, step 9)"),
])
def test_what_takes_the_room_is_named(kept: tuple[LeftoverReplica, ...], remedy: str) -> None:
    error = NoRoomForReplica("1 GB cannot be reserved", where="replica.directory", remedy="a larger /dev/shm")
    found = Scene(kept=kept).standing.no_room(error)
    assert (found.what, found.where, found.remedy) == (error.what, error.where, remedy)


@pytest.mark.parametrize("kept", [(), (OLD,)])
def test_what_groups_of_other_jobs_left_is_named(kept: tuple[LeftoverReplica, ...]) -> None:
    at = Scene(kept=kept)
    at.files.others = [Path("/dev/shm/b-1.replica"), Path("/dev/shm/c-4.replica")]
    found = at.standing.no_room(NoRoomForReplica("1 GB cannot be reserved", remedy="a larger /dev/shm"))
    assert found.remedy.startswith("more room on tmpfs, or fewer slots; ") and bool(kept) == ("a-1" in found.remedy)
    assert found.remedy.endswith("of other groups of this node, to remove by hand where their job is over:"
                                 " /dev/shm/b-1.replica, /dev/shm/c-4.replica")


def test_another_error_is_left_as_it_is() -> None:
    error = UserError("the optimizer is not known", where="job manifest", remedy="another")
    assert Scene(kept=(OLD,)).standing.no_room(error) is error


def test_a_file_that_is_taken_up_stands_at_once_and_is_said() -> None:
    """Its predecessors go, and its versions are not the first of a new one."""
    at = Scene(gone=(OLDER,))
    assert at.standing.left("the same start") is OLD and at.standing.left("another") is None
    at.standing.new()
    at.standing.resumed(OLD.path, at.job, 7)
    at.standing.first(at.job, 8)
    assert at.files.asked == [(OLD.path,), (at.job.run_id, at.job.epoch, 7)]
    assert at.said == [
        removed(OLDER, "it was never verified, and a better or newer one is kept"),
        ("resumed", {"run_id": at.job.run_id, "epoch": at.job.epoch, "step": 7, "path": str(OLD.path)})]
