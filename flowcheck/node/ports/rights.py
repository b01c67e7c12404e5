"""What a node may do beyond what its user may: capabilities of Linux, held by one thread until its ports are open.

    set_aside()                                  first of all in the process, before anything can start a thread
    rights = Rights(["af_packet"])               drivers of the ports that are to be opened
    rights.call(open_it, ...)                    on the thread that holds what these need
    rights.give_back()                           they are open: KEPT is left of it, and of most drivers nothing

Capabilities belong to a thread, and a thread begins with those of the thread that starts it. Libraries start threads as
soon as they are imported, DPDK does when it is initialised, and no thread can take anything away from another. So the
process's first act is to start a thread that keeps the capabilities, and to drop all of them in the main thread: what
is started later has none, and neither have the processes that it starts. From then on root is a user for which files
belong, and who may open what is another's no more. Where he starts a program that is another's, or takes settings of
his, in a home that nobody else may enter, CAP_DAC_OVERRIDE stays: without it not even the program could be read on.

Root by hand, ambient capabilities of a unit of systemd, and no capabilities at all: the same way, with what there is.
Standard library.
"""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

__all__ = ["KEPT", "NEEDED", "Rights", "set_aside"]

# linux/capability.h
DAC_OVERRIDE, NET_ADMIN, NET_RAW, IPC_LOCK, SYS_ADMIN, BPF = 1, 12, 13, 14, 21, 39
#: To open a port, by driver: af_packet a raw socket whose ring is locked in memory, and the interface's flags when it
#: is started. af_xdp a program on the interface beside it. A NIC by PCI address: as mlx5, raw queues and steering.
NEEDED: dict[str, frozenset[int]] = {
    "af_packet": frozenset({NET_ADMIN, NET_RAW, IPC_LOCK}),
    "af_xdp": frozenset({NET_ADMIN, NET_RAW, IPC_LOCK, SYS_ADMIN, BPF}),
    "pci": frozenset({NET_ADMIN, NET_RAW, IPC_LOCK}),
}
#: As long as the port is open. The program of af_xdp is taken off at the end. A NIC's driver makes its queues anew
#: after its link was down, and is started when the first group comes: before that its queues would fill and count
#: losses. A packet socket stays bound to an interface that goes down and comes up again: nothing.
KEPT: dict[str, frozenset[int]] = {"af_xdp": frozenset({NET_ADMIN, SYS_ADMIN, BPF}), "pci": NEEDED["pci"]}

_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 23, 24, 38
_libc = ctypes.CDLL(None, use_errno=True)
_Made = TypeVar("_Made")
_Given = ParamSpec("_Given")
LOOK_SECONDS = 0.1  # of the main thread, for signals, while another one opens a port


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


class Rights:
    """Of the ports of these drivers. What is not held (an ordinary user, a test) is asked of the system as it is: the
    refusal names what lacks."""

    def __init__(self, drivers: Iterable[str]) -> None:
        drivers = set(drivers)
        needed = _Holder.always.union(*(NEEDED.get(driver, ()) for driver in drivers))
        self._kept = frozenset[int]().union(*(KEPT.get(driver, ()) for driver in drivers))
        self.opens_with_dpdk = "pci" in drivers  # such devices are opened where DPDK is initialised
        self._holder = _Holder.only  # none where nothing was set aside: then this thread stays as it is
        if self._holder is not None:
            self._holder.call(_limit, needed)

    def call(self, function: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs) -> _Made:
        """On the thread that holds the rights; on this one where no thread does."""
        return self._holder.call(function, *given, **named) if self._holder is not None else function(*given, **named)

    def give_back(self) -> None:
        """All but what these drivers need as long as they run."""
        if self._holder is None:
            return
        self._holder.call(_limit, self._kept | _Holder.always)
        if not self._kept:
            self._holder.end()
            self._holder = _Holder.only = None


class _Holder(threading.Thread):
    only: _Holder | None = None
    always: frozenset[int] = frozenset()  # what every thread keeps

    def __init__(self) -> None:
        super().__init__(name="flowcheck rights", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (one := self._calls.get()) is not None:
            future, function = one
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del one, future, function  # nothing that was opened lives on in here

    def call(self, function: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs) -> _Made:
        future: Future[_Made] = Future()
        self._calls.put((future, lambda: function(*given, **named)))
        try:
            while not future.done():  # a signal that comes just before a thread begins to wait does not wake it
                wait([future], LOOK_SECONDS)
            return future.result()
        except KeyboardInterrupt:  # while it was waited for: what comes of it would be nobody's
            made = future.result()
            if hasattr(made, "close"):
                made.close()
            raise

    def end(self) -> None:
        self._calls.put(None)
        self.join()


def set_aside() -> None:
    """To be called once, by the main thread, while it is the only one."""
    try:  # what is locked in memory counts against a limit, which is the process's: then it takes no capability
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        pass
    if _held():
        if _out_of_reach([__file__, sys.executable, os.curdir, *sys.path, *sys.argv[1:]]):
            _Holder.always = frozenset({DAC_OVERRIDE})
        _Holder.only = _Holder()
        _Holder.only.start()
        _Holder.only.call(_limit, _Holder.always.union(*NEEDED.values()))
    _limit(_Holder.always)


def _out_of_reach(paths: Sequence[str]) -> bool:
    """Is there one among these that can be read now, and not without capabilities? Words that are no paths may be among
    them."""
    readable = [path for one in paths for path in (one, one.partition("=")[2]) if path and os.access(path, os.R_OK)]
    found: list[bool] = []

    def look() -> None:
        _limit(())
        found.append(not all(os.access(path, os.R_OK) for path in readable))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found == [True]


def _held() -> int:
    """Permitted capabilities of this thread, as bits."""
    data = (_Data * 2)()
    _check(_libc.capget(ctypes.byref(_Header(_VERSION_3, 0)), data), "capget")
    return int(data[0].permitted | data[1].permitted << 32)


def _limit(to: Iterable[int]) -> None:
    """Of this thread, and of what it starts from now on: these at most, and never more than it has. What a program that
    it starts could have at most is bounded at the first call: CAP_SETPCAP, which that takes, is gone after it."""
    bits = sum(1 << one for one in to)
    left = _held() & bits
    number = 0
    while (bounded := _libc.prctl(_PR_CAPBSET_READ, number)) >= 0:
        if bounded and number not in _Holder.always:
            _libc.prctl(_PR_CAPBSET_DROP, number)  # refused without CAP_SETPCAP; the next line holds anyway
        number += 1
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")  # no program that it starts gets any back
    data = (_Data * 2)()  # inheritable ones: none, and so no ambient ones either
    for i, half in enumerate(data):
        half.effective = half.permitted = left >> 32 * i & 0xFFFFFFFF
    _check(_libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), data), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
