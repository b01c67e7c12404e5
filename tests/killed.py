"""Processes that are killed before their first, second, third, ... system call that changes a file. The process that
kills them forks and traces them: nothing of them is patched, and what libraries and threads of C do counts as well."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

# x86-64: write, open, pwrite64, writev, msync, sendfile, fsync, fdatasync, truncate, ftruncate, rename, mkdir, rmdir,
# creat, link, unlink, symlink, chmod, fchmod, openat, mkdirat, unlinkat, renameat, linkat, sync_file_range, utimensat,
# fallocate, pwritev, renameat2, copy_file_range, pwritev2, openat2
CHANGES = {1, 2, 18, 20, 26, 40, 74, 75, 76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 257, 258, 263, 264, 265, 277, 280,
           285, 296, 316, 326, 328, 437}
TRACEME, PEEKUSER, SYSCALL, SETOPTIONS = 0, 3, 24, 0x4200
SYSGOOD, TRACECLONE, EXITKILL = 1, 8, 0x100000
CLONED = signal.SIGTRAP | 3 << 8
ORIG_RAX = 15 * 8
EVERY_THREAD = 0x40000000  # __WALL

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


def killed_before(n: int, work: Callable[[], object]) -> bool:
    """Was it, before the n-th change of all its threads? Else it has ended."""
    pid = os.fork()
    if not pid:
        if libc.ptrace(TRACEME, 0, None, None):
            os._exit(99)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        os._exit(0)
    if os.WIFEXITED(os.waitpid(pid, 0)[1]):
        raise PermissionError(1, "Operation not permitted")
    libc.ptrace(SETOPTIONS, pid, None, SYSGOOD | TRACECLONE | EXITKILL)
    seen, entering = 0, {pid: True}
    libc.ptrace(SYSCALL, pid, None, 0)
    while True:
        thread, status = os.waitpid(-1, EVERY_THREAD)
        if not os.WIFSTOPPED(status):
            if thread != pid:
                continue
            assert status == 0, f"it ended with {status}"
            return False
        stopped, deliver = os.WSTOPSIG(status), 0
        if stopped == signal.SIGTRAP | 0x80:
            if entering[thread] and libc.ptrace(PEEKUSER, thread, ORIG_RAX, None) in CHANGES:
                seen += 1
                if seen == n:
                    os.kill(pid, signal.SIGKILL)
                    while os.waitpid(-1, EVERY_THREAD)[0] != pid:
                        pass
                    return True
            entering[thread] = not entering[thread]
        elif thread not in entering:  # a new one, which begins with SIGSTOP
            entering[thread] = True
        elif status >> 8 != CLONED:
            deliver = stopped
        libc.ptrace(SYSCALL, thread, None, deliver)
