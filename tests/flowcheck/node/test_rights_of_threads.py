"""What a thread may do, as the kernel says: capabilities belong to threads, so each test gives up those of a thread of
its own. A whole node, and processes of other users, are tried in test_rights.py.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flowcheck.node.ports import rights
from flowcheck.node.ports.rights import Rights, set_aside

from .conftest import LONGEST

# linux/capability.h
DAC_OVERRIDE, NET_ADMIN, NET_RAW, IPC_LOCK, SYS_ADMIN, BPF = 1, 12, 13, 14, 21, 39
AF_PACKET, AF_XDP = (NET_ADMIN, NET_RAW, IPC_LOCK), (NET_ADMIN, NET_RAW, IPC_LOCK, SYS_ADMIN, BPF)
EVERY = (DAC_OVERRIDE, *AF_XDP)
_Made = TypeVar("_Made")


def bits(those: Iterable[int]) -> int:
    return sum(1 << one for one in those)


def status() -> dict[str, int]:
    """Of this thread: CapInh, CapPrm, CapEff, CapBnd, CapAmb, NoNewPrivs."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    found = dict(line.split(":", 1) for line in text.splitlines())
    return {name: int(value, 16) for name, value in found.items() if name.startswith("Cap") or name == "NoNewPrivs"}


def permitted() -> int:
    return status()["CapPrm"]


def in_a_thread(function: Callable[[], _Made]) -> _Made:
    """What it has given up is gone with it. Raises what it raises."""
    made: list[_Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONGEST)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
    return made[0]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Nothing was set aside. The limits that are set, which the process would keep."""
    if permitted() & bits(EVERY) != bits(EVERY):
        pytest.skip("this user has no capabilities that could be set aside")
    asked: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: asked.append(given))
    monkeypatch.setattr(rights._Holder, "only", None)
    monkeypatch.setattr(rights._Holder, "always", frozenset())
    monkeypatch.setattr(sys, "argv", ["flowcheck-node"])
    before = permitted()
    yield asked
    if rights._Holder.only is not None:
        rights._Holder.only.end()
    assert permitted() == before


# -- a thread ----------------------------------------------------------------------------------------------------------


def test_what_is_held_is_what_the_kernel_says(limits: list[Any]) -> None:
    def held() -> list[tuple[int, int]]:
        found = [(rights._held(), permitted())]
        for those in ([NET_RAW, BPF], [BPF], []):
            rights._limit(those)
            found.append((rights._held(), permitted()))
        return found

    assert in_a_thread(held) == [(permitted(),) * 2, (bits([NET_RAW, BPF]),) * 2, (bits([BPF]),) * 2, (0, 0)]


def test_a_thread_keeps_these_and_cannot_get_others_by_starting_a_program(limits: list[Any]) -> None:
    def kept() -> list[dict[str, int]]:
        found = []
        for those in (AF_XDP, (NET_RAW, DAC_OVERRIDE)):  # what is gone does not come back
            rights._limit(those)
            found.append(status())
        return found

    nothing = {"CapInh": 0, "CapBnd": 0, "CapAmb": 0, "NoNewPrivs": 1}
    assert in_a_thread(kept) == [
        nothing | {"CapPrm": bits(AF_XDP), "CapEff": bits(AF_XDP)},
        nothing | {"CapPrm": bits([NET_RAW]), "CapEff": bits([NET_RAW])},
    ]


def test_what_every_thread_keeps_its_programs_may_have(limits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights._Holder, "always", frozenset({DAC_OVERRIDE}))

    def kept() -> dict[str, int]:
        rights._limit([DAC_OVERRIDE])
        return status()

    assert in_a_thread(kept) == {
        "CapInh": 0, "CapPrm": 2, "CapEff": 2, "CapBnd": 2, "CapAmb": 0, "NoNewPrivs": 1,
    }


def test_ambient_ones_go_too(limits: list[Any]) -> None:
    """A unit of systemd gives them: a program that is started would have them."""
    def raised_then_kept() -> tuple[int, int]:
        libc = ctypes.CDLL(None, use_errno=True)
        data = (rights._Data * 2)()
        header = rights._Header(0x20080522, 0)
        libc.capget(ctypes.byref(header), data)
        data[0].inheritable = bits([NET_RAW])
        assert libc.capset(ctypes.byref(header), data) == 0
        assert libc.prctl(47, 2, NET_RAW, 0, 0) == 0  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE
        raised = status()["CapAmb"]
        rights._limit([NET_RAW])
        return raised, status()["CapAmb"] | status()["CapInh"]

    assert in_a_thread(raised_then_kept) == (bits([NET_RAW]), 0)


@pytest.mark.parametrize("name", ["capget", "capset"])
def test_a_kernel_that_refuses_is_named(limits: list[Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Refusing:
        def __getattr__(self, asked: str) -> Any:
            if asked != name:
                return getattr(libc, asked)

            def refuse(*_: object) -> int:
                ctypes.set_errno(1)
                return -1

            return refuse

    libc = rights._libc
    monkeypatch.setattr(rights, "_libc", Refusing())
    with pytest.raises(PermissionError) as refused:
        in_a_thread(lambda: rights._limit([NET_RAW]))
    assert refused.value.strerror == f"{name}: Operation not permitted"


def test_without_no_new_privs_nothing_goes_on(limits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that it starts could get all of them back."""
    class Old:
        def __getattr__(self, asked: str) -> Any:
            return getattr(libc, asked)

        def prctl(self, option: int, *more: int) -> int:
            if option == 38:  # PR_SET_NO_NEW_PRIVS
                ctypes.set_errno(22)
                return -1
            return int(libc.prctl(option, *more))

    libc = rights._libc
    monkeypatch.setattr(rights, "_libc", Old())
    with pytest.raises(OSError) as refused:
        in_a_thread(lambda: rights._limit([NET_RAW]))
    assert (refused.value.errno, refused.value.strerror) == (22, "no_new_privs: Invalid argument")


# -- set aside ---------------------------------------------------------------------------------------------------------


def holder() -> rights._Holder:
    assert rights._Holder.only is not None
    return rights._Holder.only


def test_one_thread_holds_what_ports_need_and_this_one_nothing(limits: list[Any]) -> None:
    def kept() -> tuple[int, int, int]:
        set_aside()
        later = in_a_thread(permitted)
        return permitted(), later, holder().call(permitted)

    assert in_a_thread(kept) == (0, 0, bits(AF_XDP))
    assert limits == [(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))]
    assert holder().name == "flowcheck rights" and holder().daemon and rights._Holder.always == frozenset()


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_limit_that_cannot_be_raised_is_left(
    limits: list[Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(resource, "setrlimit", refuse)
    in_a_thread(set_aside)
    assert holder().call(permitted) == bits(AF_XDP)


def test_who_has_none_sets_none_aside(limits: list[Any]) -> None:
    def nothing() -> int:
        rights._limit([])
        set_aside()
        return status()["NoNewPrivs"]

    assert in_a_thread(nothing) == 1 and rights._Holder.only is None


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A file in somebody's home, which is closed to others."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "node.toml").touch(mode=0o600)
    for path in (home / "node.toml", home):
        os.chown(path, 65534, 65534)
    return home / "node.toml"


@pytest.mark.parametrize(("words", "out_of_reach"), [
    ([], False), (["{open}"], False), (["{closed}"], True), (["{open}", "{closed}"], True),
    (["{closed}", "{open}"], True), (["--config={closed}"], True), (["--config={open}"], False),
    (["--config=", "", "no such file", "{closed}.not"], False), (["--config={equals}"], True), (["{equals}"], True),
])
def test_what_could_not_be_read_on(
    limits: list[Any], closed: Path, tmp_path: Path, words: list[str], out_of_reach: bool
) -> None:
    equals = closed.with_name("a=b.toml")
    equals.touch(mode=0o600)
    given = [one.format(open=tmp_path, closed=closed, equals=equals) for one in words]
    assert rights._out_of_reach(given) is out_of_reach
    assert permitted() & bits(EVERY) == bits(EVERY)  # another thread looked


@pytest.mark.parametrize("where", ["an argument", "a module's folder", "this module", "Python", "here"])
def test_where_the_program_or_its_settings_are_anothers_reading_stays(
    limits: list[Any], closed: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    match where:
        case "an argument":
            monkeypatch.setattr(sys, "argv", ["flowcheck-node", f"--config={closed}"])
        case "a module's folder":
            monkeypatch.setattr(sys, "path", [*sys.path, str(closed.parent)])
        case "this module":
            monkeypatch.setattr(rights, "__file__", str(closed))
        case "Python":
            monkeypatch.setattr(sys, "executable", str(closed))
        case "here":
            monkeypatch.setattr(os, "curdir", str(closed.parent))

    def kept() -> tuple[int, int]:
        set_aside()
        return permitted(), holder().call(permitted)

    assert in_a_thread(kept) == (1 << DAC_OVERRIDE, bits(EVERY))

    def after() -> list[int]:
        mine = Rights(["af_packet"])
        found = [mine.call(permitted)]
        mine.give_back()
        return [*found, mine.call(permitted)]

    held = holder()
    assert in_a_thread(after)[0] == bits([DAC_OVERRIDE, *AF_PACKET]) and not held.is_alive()


def test_the_name_of_the_program_is_not_one_of_its_settings(
    limits: list[Any], closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(closed), "--config", "none"])
    in_a_thread(set_aside)
    assert rights._Holder.always == frozenset()


# -- of drivers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drivers", "needed", "kept"), [
    (["af_packet"], AF_PACKET, ()),
    (["af_xdp"], AF_XDP, (NET_ADMIN, SYS_ADMIN, BPF)),
    (["pci"], AF_PACKET, AF_PACKET),
    (["af_packet", "af_xdp"], AF_XDP, (NET_ADMIN, SYS_ADMIN, BPF)),
    (["af_xdp", "pci"], AF_XDP, AF_XDP),
    (["ring"], (), ()),
    ([], (), ()),
])
def test_what_drivers_need_and_keep(
    limits: list[Any], drivers: list[str], needed: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    in_a_thread(set_aside)
    held = holder()
    mine = Rights(iter(drivers))
    assert mine.opens_with_dpdk == ("pci" in drivers)
    assert mine.call(permitted) == bits(needed) and mine.call(threading.current_thread) is held
    for _ in range(2):
        mine.give_back()
        if kept:
            assert rights._Holder.only is held and mine.call(permitted) == bits(kept)
        else:
            assert rights._Holder.only is None and not held.is_alive()


def test_where_nothing_was_set_aside_it_is_called_here(limits: list[Any]) -> None:
    mine = Rights(["af_packet"])
    mine.give_back()
    assert mine.call(threading.current_thread) is threading.current_thread()
    assert mine.call(lambda *given, **named: (given, named), 1, 2, three=3) == ((1, 2), {"three": 3})


def test_what_is_called_there_is_given_what_is_given_and_raises_here(limits: list[Any]) -> None:
    in_a_thread(set_aside)
    mine = Rights(["af_packet"])
    assert mine.call(lambda *given, **named: (given, named), 1, 2, three=3) == ((1, 2), {"three": 3})
    with pytest.raises(SystemExit):
        mine.call(sys.exit, 3)
    with pytest.raises(FileNotFoundError):
        mine.call(os.stat, "/no such file")
    assert mine.call(permitted) == bits(AF_PACKET)


class Opened:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_nothing_that_was_opened_lives_on_in_the_thread(limits: list[Any]) -> None:
    in_a_thread(set_aside)
    opened = Rights(["af_packet"]).call(Opened)
    one = weakref.ref(opened)
    del opened
    gc.collect()
    assert one() is None


@pytest.mark.parametrize("made", [Opened(), "what cannot be closed"])
def test_what_was_opened_while_it_was_interrupted_is_closed(
    limits: list[Any], monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    in_a_thread(set_aside)
    go = threading.Event()

    def interrupt(*_: object) -> None:
        go.set()
        raise KeyboardInterrupt

    def opens() -> Any:
        assert go.wait(LONGEST)
        return made

    mine = Rights(["af_packet"])
    with monkeypatch.context() as patch:
        patch.setattr(rights, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mine.call(opens)
    assert getattr(made, "closed", True)


def test_it_looks_for_signals_until_it_is_done(limits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before a thread begins to wait does not wake it."""
    in_a_thread(set_aside)
    go, looks = threading.Event(), list[float]()
    wait = concurrent.futures.wait

    def look(futures: list[Any], seconds: float) -> Any:
        looks.append(seconds)
        if len(looks) == 3:
            go.set()
            return wait(futures, LONGEST)
        return wait(futures, 0)

    monkeypatch.setattr(rights, "wait", look)
    assert Rights([]).call(go.wait, LONGEST) is True
    assert looks[-3:] == [rights.LOOK_SECONDS] * 3
