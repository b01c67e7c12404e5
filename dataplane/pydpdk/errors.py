"""One translator from DPDK's return codes to errors that name the object and the remedy.

DPDK says no in three dialects: a negative errno, -1 with rte_errno set, and NULL with rte_errno set.
"""

from __future__ import annotations

import errno
from typing import Any

from dataplane.pydpdk.ffi import ffi, lib

__all__ = ["DpdkError", "NotEnoughMemory", "check", "check_pointer"]

REMEDIES = {
    errno.ENOMEM: "more memory: fewer or smaller rings, or more huge pages (/proc/sys/vm/nr_hugepages)",
    errno.EPERM: "the privilege to do this (run as root), or a device that needs none",
    errno.EACCES: "the privilege to do this (run as root), or permissions on the device or file",
    errno.ENODEV: "the right device name and driver; is the driver's package installed (dpdk, librte-*)?",
    errno.ENOENT: "a name that exists",
    errno.EEXIST: "another name, or close the object that has it",
    errno.EBUSY: "whoever else uses it to let go first",
    errno.ENOSPC: "fewer ports, threads or memory zones at the same time: DPDK's limit is compiled in",
}


class DpdkError(OSError):
    """DPDK or the machine refused. `what` is the object and the action, `said` the reason as well,
    `remedy` what to do about it."""

    def __init__(self, code: int, what: str, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy or REMEDIES.get(code, "")
        # DPDK has numbers of its own above the system's.
        reason = ffi.string(lib.rte_strerror(code)).decode() if code else ""
        text = f"{what}: {reason}" if reason else what
        self.said = text
        self.message = f"{text}\n  needs: {self.remedy}" if self.remedy else text
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return self.message


class NotEnoughMemory(DpdkError):
    """The sum that does not fit is in the message."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(errno.ENOMEM, what, remedy)


def check(rc: int, what: str, remedy: str = "") -> int:
    """rc if it is not negative.

    -1 is how DPDK says "see rte_errno" and also -EPERM; a set rte_errno decides.

    Raises:
        DpdkError: otherwise.
    """
    if rc >= 0:
        return rc
    code = -rc
    if rc == -1:
        code = lib.fc_rte_errno() or errno.EPERM
    raise DpdkError(code, what, remedy)


def check_pointer(pointer: Any, what: str, remedy: str = "") -> Any:
    """The pointer if it is not NULL.

    Raises:
        DpdkError: otherwise, with rte_errno.
    """
    if pointer == ffi.NULL:
        raise DpdkError(lib.fc_rte_errno(), what, remedy)
    return pointer
