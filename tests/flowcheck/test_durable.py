"""Files that survive a kill and a power cut: what is on the disk at which moment, and what every failure leaves."""
import contextlib
import ctypes
import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flowcheck import durable
from flowcheck.checkpoint.directory import Meta, load_parameters, load_step, write_parameters, write_step
from flowcheck.durable import (
    LEFT_SECONDS,
    adopt,
    came_last,
    check_writable,
    exchange,
    fsync_directory,
    make_directory,
    partial_name,
    remove_left,
    remove_tree,
    reporting,
    write_atomic,
    write_synced,
)
from flowcheck.errors import EnvironmentProblem


@pytest.fixture
def synced(monkeypatch):
    """Every fsync as (path, bytes of that file or None, which file has the watched name): the call is the real one."""
    real = os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = None if os.path.isdir(path) else os.fstat(descriptor).st_size
        seen.append((path, size, identity(seen.watched)))
        real(descriptor)

    class Seen(list):
        watched = None

    seen = Seen()
    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def identity(path):
    return os.stat(path).st_ino if path is not None and os.path.lexists(path) else None


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


# -- a power cut: the name is on the disk before the call returns ------------------------------------------


def by_write_atomic(folder):
    write_atomic(folder / "thing", b"new")
    return folder / "thing"


def by_adopt(folder):
    """From a directory of another parent, as a replay does with what waits aside."""
    (folder / "aside" / "source").mkdir(parents=True, exist_ok=True)
    adopt(folder / "aside" / "source", folder / "thing")
    return folder / "thing"


def by_write_step(folder):
    return write_step(folder, 1, {"w": torch.ones(1)}, {}, Meta())


def by_write_parameters(folder):
    return write_parameters(folder, 1, {"w": torch.ones(1)}, [], Meta())


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize(
    ("write", "name"),
    [(by_write_atomic, "thing"), (by_adopt, "thing"), (by_write_step, "step-000001"),
     (by_write_parameters, "parameters-000001")],
)
def test_the_directory_is_synced_after_the_rename(tmp_path, synced, write, name, replacing):
    """Of whatever renames: the parent is synced when the new thing already has the name, and nothing follows."""
    if replacing:
        write(tmp_path)
    before = identity(tmp_path / name)
    synced.clear()
    synced.watched = tmp_path / name
    path = write(tmp_path)
    after = identity(path)
    assert path == tmp_path / name and after != before and (before is None) == (not replacing)
    assert synced[-1] == (str(tmp_path), None, after)
    assert [moment for _, _, moment in synced[:-1]] == [before] * (len(synced) - 1)


@pytest.mark.parametrize("write", [by_write_step, by_write_parameters])
def test_every_directory_that_is_made_has_a_durable_name(tmp_path, synced, write):
    """A checkpoint in a directory whose own name is lost in a power cut is lost as well."""
    write(tmp_path / "runs" / "today")
    assert [path for path, _, _ in synced[:2]] == [str(tmp_path), str(tmp_path / "runs")]
    synced.clear()
    write(tmp_path / "runs" / "today")
    assert str(tmp_path) not in [path for path, _, _ in synced]


def test_make_directory_leaves_one_that_is_there_as_it_is(tmp_path, synced):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    make_directory(tmp_path / "there")
    assert synced == [] and (tmp_path / "there" / "file").exists()


@pytest.mark.parametrize("replacing", [False, True])
def test_the_bytes_of_an_atomic_file_are_synced_before_the_rename(tmp_path, synced, replacing):
    target = tmp_path / "report.json"
    if replacing:
        target.write_bytes(b"old")
    before, synced.watched = identity(target), target
    write_atomic(target, b"seven b")
    aside = str(tmp_path / f".report.json.partial-{os.getpid()}")
    assert synced == [(aside, 7, before), (str(tmp_path), None, identity(target))]
    assert target.read_bytes() == b"seven b"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_new_directory_for_checkpoints_is_made_durable_in_its_parent(tmp_path, synced):
    write_step(tmp_path / "out", 1, {}, {}, Meta())
    assert synced[0] == (str(tmp_path), None, None)


# -- adopt and exchange ------------------------------------------------------------------------------------


def folder(path, text):
    path.mkdir()
    (path / "text").write_text(text)
    return path


def test_adopt_gives_the_name_and_hands_back_what_had_it(tmp_path):
    first, second = folder(tmp_path / "first", "1"), folder(tmp_path / "second", "2")
    adopt(first, tmp_path / "thing")
    assert not first.exists() and (tmp_path / "thing" / "text").read_text() == "1"
    adopt(second, tmp_path / "thing")
    assert (second / "text").read_text() == "1" and (tmp_path / "thing" / "text").read_text() == "2"


def test_adopt_takes_a_name_that_another_one_took_a_moment_ago(tmp_path, monkeypatch):
    first, second = folder(tmp_path / "first", "1"), folder(tmp_path / "second", "2")
    seen = type(tmp_path).exists
    monkeypatch.setattr(type(tmp_path), "exists", lambda path: path.name != "thing" and seen(path))
    adopt(first, tmp_path / "thing")
    adopt(second, tmp_path / "thing")
    assert (second / "text").read_text() == "1" and (tmp_path / "thing" / "text").read_text() == "2"


def test_adopt_reports_what_it_cannot_rename(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot be written: No such file") as caught:
        adopt(tmp_path / "absent", tmp_path / "thing")
    assert caught.value.where == str(tmp_path / "absent")


def test_exchange_takes_relative_names(tmp_path, monkeypatch):
    """They are relative to the working directory, as everywhere."""
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "one", "1")
    folder(tmp_path / "other", "2")
    exchange(Path("one"), Path("other"))
    assert (tmp_path / "one" / "text").read_text() == "2" and (tmp_path / "other" / "text").read_text() == "1"


def test_exchange_of_names_that_do_not_exist_is_an_os_error_with_its_number(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        exchange(folder(tmp_path / "one", "1"), tmp_path / "absent")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "absent"))
    assert caught.value.strerror == "No such file or directory"


class FakeLibrary:
    """A file system that refuses to swap: the number is left in errno, as by the C library."""

    def __init__(self, number):
        self.number = number

    def renameat2(self, *_):
        ctypes.set_errno(self.number)
        return -1


@pytest.mark.parametrize(
    ("number", "cannot"),
    [(errno.EINVAL, True), (errno.ENOSYS, True), (errno.ENOTSUP, True), (errno.EPERM, False), (errno.ENOSPC, False)],
)
def test_a_file_system_that_cannot_swap_is_told_from_other_failures(tmp_path, monkeypatch, number, cannot):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: FakeLibrary(number))
    with pytest.raises(EnvironmentProblem if cannot else OSError) as caught:
        exchange(tmp_path / "one", tmp_path / "other")
    if cannot:
        assert str(caught.value) == (
            f"{tmp_path}/other: exists, and this file system cannot swap two directories in one step\n"
            "  remedy: move the old directory away, or use another one"
        )
    else:
        assert caught.value.errno == number


# -- write_atomic ------------------------------------------------------------------------------------------


def test_what_is_written_aside_has_a_hidden_name_in_the_same_directory(tmp_path):
    assert partial_name(tmp_path / "a.json") == tmp_path / f".a.json.partial-{os.getpid()}"
    one, other = (partial_name(tmp_path / "a.json", several=True) for _ in range(2))
    assert one != other and one.parent == tmp_path and one.name.startswith(f".a.json.partial-{os.getpid()}-")


def test_what_an_earlier_process_with_our_number_left_is_overwritten(tmp_path):
    partial_name(tmp_path / "a").write_text("half of something")
    write_atomic(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_name_that_something_else_has_is_left_alone(tmp_path, make):
    make(tmp_path / "taken")
    before = identity(tmp_path / "taken")
    with pytest.raises(EnvironmentProblem) as caught:
        write_atomic(tmp_path / "taken", b"data")
    assert str(caught.value) == f"{tmp_path}/taken: exists and is no regular file\n  remedy: give another name"
    assert identity(tmp_path / "taken") == before and len(list(tmp_path.iterdir())) == 1


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 100 bytes: a real write that fails half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_leaves_the_old_content_and_nothing_aside(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    opened = open_descriptors()
    with pytest.raises(EnvironmentProblem) as caught, small_files():
        write_atomic(tmp_path / "a", bytes(101))
    assert str(caught.value) == (
        f"{tmp_path}/a: cannot be written: File too large\n"
        "  remedy: a path that can be written, or free space on that file system"
    )
    assert (tmp_path / "a").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]
    assert open_descriptors() == opened
    with small_files():
        write_atomic(tmp_path / "a", bytes(100))
    assert (tmp_path / "a").read_bytes() == bytes(100)


def test_an_interrupt_leaves_nothing_aside_and_goes_on(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", b"new")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(EnvironmentProblem, match="cannot be written: No such file or directory") as caught:
        write_atomic(tmp_path / "no" / "a", b"")
    assert caught.value.where == str(tmp_path / "no" / "a"), "and not the name aside, which nobody asked for"


def test_a_folder_that_is_a_file_is_reported(tmp_path):
    """Nothing can be removed there either, and the first error is the one that is told."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written: Not a directory"):
        write_atomic(tmp_path / "file" / "a", b"")


@pytest.mark.parametrize("write", [by_write_atomic, by_adopt])
def test_a_disk_that_fails_is_reported_with_the_name_that_was_asked_for(tmp_path, monkeypatch, write):
    """fsync tells no name."""
    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(EnvironmentProblem, match="cannot be written: Input/output error") as caught:
        write(tmp_path)
    assert caught.value.where == str(tmp_path / "thing")


# -- the parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "what", "where"),
    [
        (OSError(28, "No space left", "/the/file"), "cannot be written: No space left", "/the/file"),
        (OSError(28, "No space left"), "cannot be written: No space left", "/asked/for"),
        (OSError("something odd"), "cannot be written: something odd", "/asked/for"),
    ],
)
def test_reporting_names_the_file_and_the_reason(tmp_path, error, what, where):
    with pytest.raises(EnvironmentProblem) as caught:
        with reporting(Path("/asked/for")):
            raise error
    assert (caught.value.what, caught.value.where) == (what, where)
    assert caught.value.remedy == "a path that can be written, or free space on that file system"
    assert caught.value.__suppress_context__


def test_reporting_leaves_other_errors_alone():
    with pytest.raises(KeyError), reporting(Path("/asked/for")):
        raise KeyError("x")
    with reporting(Path("/asked/for")):
        pass


def test_write_synced_makes_a_new_file_of_all_pieces(tmp_path, synced):
    opened = open_descriptors()
    old = os.umask(0)
    try:
        write_synced(tmp_path / "a", [b"one", memoryview(b"two"), b"", b"three"])
    finally:
        os.umask(old)
    assert (tmp_path / "a").read_bytes() == b"onetwothree"
    assert os.stat(tmp_path / "a").st_mode & 0o777 == 0o600
    assert synced == [(str(tmp_path / "a"), 11, None)] and open_descriptors() == opened


def test_write_synced_goes_on_after_short_writes(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:2]))
    write_synced(tmp_path / "a", [b"abcde", b"fg"])
    assert (tmp_path / "a").read_bytes() == b"abcdefg"


@pytest.mark.parametrize("there", ["file", "link"])
def test_write_synced_writes_to_nothing_that_exists(tmp_path, there):
    """Also not through a link that somebody has put there."""
    (tmp_path / "other").write_text("mine")
    if there == "file":
        (tmp_path / "a").write_text("old")
    else:
        (tmp_path / "a").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_text() == ("old" if there == "file" else "mine")


def test_fsync_directory_takes_directories_alone_and_closes_them(tmp_path, synced):
    opened = open_descriptors()
    fsync_directory(tmp_path)
    assert synced == [(str(tmp_path), None, None)] and open_descriptors() == opened
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "file")


def test_remove_tree_removes_what_it_can_and_takes_what_is_not_there(tmp_path):
    (folder(tmp_path / "tree", "1") / "deeper").mkdir()
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert not list(tmp_path.iterdir())


def test_what_was_adopted_can_be_read(tmp_path):
    """The names that adopt and the checkpoint's own rename give hold whole checkpoints."""
    assert load_step(by_write_step(tmp_path)).step == 1
    assert load_parameters(by_write_parameters(tmp_path)).step == 1


# -- may be written to? --------------------------------------------------------------------------------------


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "a remedy")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    left = partial_name(tmp_path / "a" / "b" / "probe")
    left.write_text("of a process with this number that was killed")
    check_writable(tmp_path / "a" / "b", "a remedy")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_place_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as refused:
        check_writable(tmp_path / "file" / "folder", "a remedy")
    assert refused.value.remedy == "a remedy" and str(tmp_path / "file") in refused.value.where


def test_a_file_that_cannot_be_written_there_is_no_name_that_anybody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named, not the file beside which it was tried; and that goes again."""
    tried = []

    def full(path: Path, parts: list[bytes]) -> None:
        tried.append((path, parts))
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable, "write_synced", full)
    with pytest.raises(EnvironmentProblem, match="No space left") as refused:
        check_writable(tmp_path, "a remedy")
    assert refused.value.where == str(tmp_path) and refused.value.remedy == "a remedy"
    [(path, parts)] = tried
    assert path == partial_name(tmp_path / "probe") and path.parent == tmp_path and parts == [b"flowcheck"]
    assert list(tmp_path.iterdir()) == []


# -- what killed processes left --------------------------------------------------------------------------------------


@pytest.fixture
def another():
    """A process of this user that lives."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as one:
        yield one.pid


def gone() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as one:
        pass
    return one.pid


def aged(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at), follow_symlinks=False)


def left(directory: Path, name: str, *, folder: bool, seconds: float = LEFT_SECONDS + 60) -> Path:
    path = directory / name
    if folder:
        path.mkdir()
        (path / "in").write_text("half")
        aged(path / "in", seconds)
    else:
        path.write_text("half")
    aged(path, seconds)
    return path


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("form", [".step-1.partial-{}", ".step-1.partial-{}-0a1b2c3d", ".step-.partial-{}"])
def test_what_killed_processes_left_is_removed(tmp_path: Path, folder: bool, form: str) -> None:
    for pid in (gone(), os.getpid(), 1 << 70):
        left(tmp_path, form.format(pid), folder=folder)
    other = left(tmp_path, "step-1", folder=folder)
    remove_left(tmp_path, "step-")
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("folder", [False, True])
def test_what_somebody_may_still_write_or_is_not_ours_stays(tmp_path: Path, another: int, folder: bool) -> None:
    pid = gone()
    kept = {
        left(tmp_path, f".step-1.partial-{another}", folder=folder),
        left(tmp_path, f".step-2.partial-{another}-0a1b2c3d", folder=folder),
        left(tmp_path, f".step-3.partial-{pid}", folder=folder, seconds=LEFT_SECONDS - 60),
        left(tmp_path, f".other-1.partial-{pid}", folder=folder),
        left(tmp_path, f"step-4.partial-{pid}", folder=folder),
        left(tmp_path, ".step-5.partial-x", folder=folder), left(tmp_path, ".step-6.partial-", folder=folder),
        left(tmp_path, f".step-7.PARTIAL-{pid}", folder=folder), left(tmp_path, f".step-8.partial{pid}", folder=folder),
    }
    link = tmp_path / f".step-9.partial-{pid}"
    link.symlink_to(left(tmp_path, "whole", folder=folder))
    aged(link, LEFT_SECONDS + 60)
    remove_left(tmp_path, "step-")
    assert set(tmp_path.iterdir()) == kept | {link, tmp_path / "whole"}


def test_a_folder_in_which_a_file_was_written_a_moment_ago_stays(tmp_path: Path) -> None:
    one = left(tmp_path, f".step-1.partial-{gone()}", folder=True)
    aged(one / "in", 1)
    remove_left(tmp_path, "step-")
    assert one.exists()
    aged(one / "in", LEFT_SECONDS + 60)
    aged(one, 1)
    remove_left(tmp_path, "step-")
    assert one.exists()


def test_a_process_of_another_user_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kill(*call: int) -> None:
        asked.append(call)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(durable.os, "kill", kill)
    one = left(tmp_path, ".step-1.partial-4711", folder=False)
    remove_left(tmp_path, "step-")
    assert one.exists() and asked == [(4711, 0)]


def test_a_directory_that_is_not_there_has_nothing_left(tmp_path: Path) -> None:
    remove_left(tmp_path / "none", "step-")


@pytest.mark.parametrize(("others", "at"), [([], 5), ([4], 5), ([5], 6), ([9, 3], 10)])
def test_what_came_last_says_so(tmp_path: Path, others: list[int], at: int) -> None:
    path = tmp_path / "one"
    path.touch()
    os.utime(path, ns=(5, 5))
    came_last(path, iter(others))
    found = path.stat()
    assert (found.st_mtime_ns, found.st_atime_ns) == (at, at)
