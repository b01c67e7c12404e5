"""What somebody else puts beside a node's files in /dev/shm: not read as the node's, not followed, not waited for."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.coding.parity import DESCRIPTION, Protected
from flowcheck.checkpoint.directory import MANIFEST, Meta, write_step
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import Copier
from flowcheck.node.versions.divergences import Divergences, Notices
from flowcheck.node.versions.replica_files import ReplicaFiles
from flowcheck.node.versions.user_states import UserStates, rank_file, ranks_in, user_folder, users_in

from .group_scene import small_job

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
PLANTED = b"lr 666"


def as_nobody(work: Callable[[], object]) -> str:
    """In a child that is another user: the error's name, or ""."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            said = ""
        except BaseException as error:
            said = type(error).__name__
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours, "rb") as answer:
        return answer.read().decode()


@pytest.fixture
def shared(shm: Path) -> Path:
    """A directory as /dev/shm is: everybody may write, and nobody may remove what others wrote."""
    shm.chmod(0o1777)
    for parent in [one for one in shm.parents if one != Path("/") and one.stat().st_uid == os.geteuid()]:
        if not parent.stat().st_mode & stat.S_IXOTH:
            pytest.skip(f"{parent} cannot be entered by another user")
    return shm


def plant(folder: Path) -> None:
    folder.mkdir(parents=True)
    rank_file(folder, 0).write_bytes(PLANTED)
    rank_file(folder, 7).write_bytes(PLANTED)


@as_root
def test_a_name_that_is_given_out_has_its_folder(shared: Path) -> None:
    """So nobody can make it before the first state comes; and one who guessed the name gets another name used."""
    assert as_nobody(lambda: plant(user_folder(shared / "flowcheck-n-g-1.replica", 8))) == ""
    files = ReplicaFiles(shared, "n", "g")
    assert as_nobody(lambda: plant(user_folder(shared / "flowcheck-n-g-2.replica", 8))) == ""  # it is looked at by now
    replica = files.path()
    assert replica.name == "flowcheck-n-g-3.replica"
    own = replica.with_suffix(".user")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700 and own.stat().st_uid == os.geteuid()
    for work in (lambda: plant(user_folder(replica, 8)), lambda: own.rename(shared / "mine"), lambda: os.listdir(own)):
        assert as_nobody(work) in ("PermissionError", "FileExistsError")
    files.stands("run", 0, 8)
    assert (shared / "flowcheck-n-g-1.user").exists(), "what is another user's is left alone"


def other_user(base: Path) -> None:
    for path in (base, *base.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def others_may_write(base: Path) -> None:
    base.chmod(0o770)


def others_may_write_inside(base: Path) -> None:
    (base / "step-000008").chmod(0o703)


def folder_is_a_link(base: Path) -> None:
    base.rename(base.parent / "elsewhere")
    base.symlink_to(base.parent / "elsewhere")


def step_is_a_link(base: Path) -> None:
    (base / "step-000008").rename(base / "elsewhere")
    (base / "step-000008").symlink_to("elsewhere")


def folder_is_a_file(base: Path) -> None:
    base.rename(base.parent / "elsewhere")
    base.write_text("x")


PLACES = [others_may_write, others_may_write_inside, folder_is_a_link, step_is_a_link, folder_is_a_file,
          pytest.param(other_user, marks=as_root)]


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_need_not_be_ours_is_neither_read_nor_written(tmp_path: Path, place: Any) -> None:
    replica, said = tmp_path / "flowcheck-n-g-1.replica", list[tuple[str, dict[str, Any]]]()
    folder = user_folder(replica, 8)
    plant(folder)
    place(replica.with_suffix(".user"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert ranks_in(folder) == [] and users_in(folder) == {}
    states = UserStates(lambda event, **fields: said.append((event, fields)))
    states.put(replica, 8, 0, b"the trainer's")
    states.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [event for event, _ in said] == ["problem"] and "cannot be kept" in said[0][1]["why"]


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "other user", "writable"])
def test_a_file_that_need_not_be_ours_is_not_given(tmp_path: Path, kind: str) -> None:
    folder, secret = user_folder(tmp_path / "flowcheck-n-g-1.replica", 8), tmp_path / "secret"
    folder.mkdir(parents=True)
    secret.write_bytes(b"of root alone")
    secret.chmod(0o600)
    path = rank_file(folder, 0)
    match kind:
        case "link":
            path.symlink_to(secret)
        case "hard link":
            path.hardlink_to(secret)
        case "pipe":
            os.mkfifo(path)
        case "writable":
            path.write_bytes(PLANTED)
            path.chmod(0o622)
        case _:
            if os.geteuid():
                pytest.skip("only root can give files away")
            path.write_bytes(PLANTED)
            os.chown(path, NOBODY, NOBODY)
    assert users_in(folder) == {}
    states = UserStates(print)
    states.put(tmp_path / "flowcheck-n-g-1.replica", 8, 0, b"the trainer's")
    states.close()
    assert users_in(folder) == {0: b"the trainer's"} and secret.read_bytes() == b"of root alone"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_a_link_under_the_name_aside_is_not_followed(tmp_path: Path) -> None:
    folder, victim = user_folder(tmp_path / "flowcheck-n-g-1.replica", 8), tmp_path / "victim"
    folder.mkdir(parents=True)
    victim.write_text("precious")
    (folder / ".rank-00000.partial").symlink_to(victim)
    states = UserStates(print)
    states.put(tmp_path / "flowcheck-n-g-1.replica", 8, 0, b"the trainer's")
    states.close()
    assert victim.read_text() == "precious" and users_in(folder) == {0: b"the trainer's"}


def as_user(user: int, work: Callable[[], object]) -> None:
    """In a child; it raises here what is raised there."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@as_root
@pytest.mark.parametrize("kind", ["file", "directory", "pipe", "link"])
def test_nobody_keeps_a_node_from_saying_what_has_diverged(shared: Path, kind: str) -> None:
    """Another user has put something of that name there before. Readers hear it all the same, also of a process that
    comes later, and one that follows another start."""
    path = shared / "flowcheck-n-dp0.diverged"
    make: dict[str, Callable[[], object]] = {
        "file": path.touch, "directory": lambda: (path / "x").mkdir(parents=True), "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/dev/zero")}
    as_user(NOBODY, make[kind])

    def diverges() -> None:
        said: list[str] = []
        found = Divergences(shared, "n", "dp0", lambda event, **fields: said.append(event))
        found.begins(("run", 0, 2), job_of("run"), 0, "a")
        found.verified(4)
        found.diverged(9, "why")
        assert said == ["diverged"] and Notices(shared, "n").cover("run", 0, "dp0", 7, "follows 4")
        later = Divergences(shared, "n", "dp0", lambda event, **fields: said.append(event))
        later.begins(("run", 0, 2), job_of("run"), 6, "b")
        notices = Notices(shared, "n")
        assert notices.cover("run", 0, "dp0", 5, "follows 4") and not notices.cover("run", 0, "dp0", 7, "follows 4")

    as_user(NOBODY - 1, diverges)
    assert os.path.lexists(path) and path.lstat().st_uid == NOBODY


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


MANIFESTS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo, "a directory": Path.mkdir, "a device": lambda path: path.symlink_to("/dev/zero"),
    "many bytes": sparse,
    "deep": lambda path: path.write_text("[" * 9999),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_none_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """Among copies, and of parity: what is whole there is known all the same, in a moment."""
    meta = Meta("run", 0, "verified", (), {"name": "adam", "groups": []}, "torch-cpu")
    whole = write_step(tmp_path / "source" / "run" / "epoch-0", 7, {"w": torch.arange(4.0)}, {}, meta)
    for folder, name in ((whole.with_name("step-000099"), MANIFEST), (tmp_path / "parity", DESCRIPTION)):
        folder.mkdir()
        MANIFESTS[kind](folder / name)
    said: list[object] = []

    def look() -> None:
        said.append(Copier(tmp_path, Rules(), lambda *_, **__: None).held())
        with contextlib.suppress(UserError):
            Protected.read(tmp_path / "parity")
        said.append("over")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60.0)
    assert said == [[{"source": "source", "run_id": "run", "epoch": 0, "steps": [7]}], "over"]


def job_of(run_id: str) -> Job:
    job = small_job()
    job.run_id = run_id
    return job
