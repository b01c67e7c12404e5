"""One task in a process of its own: what needs DPDK, called from somebody's script or notebook.

    answer = run_task("replay", {...})        plain JSON values both ways; errors are raised here as there

DPDK's EAL starts once per process and never again, with the memory of its first use. A caller who replays, looks and
replays again would meet that limit, so every call has a child. The child imports from where the caller does, runs no
code of the caller's, and ends when the caller is gone. Any thread; tasks may run side by side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from flowcheck.errors import EnvironmentProblem, FlowcheckError, InternalError, UserError, of_the_machine

__all__ = ["run_task", "serve"]

Task = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_ROOTS: dict[str, type[FlowcheckError]] = {
    root.__name__: root for root in (UserError, EnvironmentProblem, InternalError)
}
_START = (
    "import json, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # Ctrl-C is the caller's: it lets go of us
    "order = json.loads(sys.stdin.buffer.readline())\n"
    "sys.path[:] = order['path']\n"
    "from flowcheck.offline.tasks import TASKS\n"
    "from flowcheck.offline.child import serve\n"
    "serve(order, TASKS)\n"
)
LINES = 20  # of what a child printed that go with an error


def run_task(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a task of flowcheck.offline.tasks on plain JSON values and return its answer.

    Raises what the task raises: UserError, EnvironmentProblem or InternalError. What the child printed meanwhile is
    a note of the error.
    """
    ours, theirs = os.pipe()
    with open(ours, "rb") as answers, tempfile.TemporaryFile() as printed:
        order = {"path": sys.path, "task": name, "given": given, "answer": theirs}
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", _START], stdin=subprocess.PIPE, stdout=printed,
                stderr=printed, pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        with child:  # leaving it closes the child's input, which ends it, and waits
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(order).encode() + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                pass  # it says why below
            text = answers.read()
        if text:
            answer: dict[str, Any] = json.loads(text)
            if "error" not in answer:
                return answer
            said = answer["error"]
            error = _ROOTS[said["root"]](said["what"], where=said["where"], remedy=said["remedy"])
        else:
            error = _ended(name, child.returncode)
        if lines := _last(printed):
            error.add_note(lines)
        raise error


def _ended(name: str, status: int) -> FlowcheckError:
    """The error of a child that ended without an answer."""
    if status == -signal.SIGKILL:
        return EnvironmentProblem(
            "the process of the task was killed", where=name, remedy="most likely memory ran out: give it more"
        )
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return InternalError(f"the process of the task ended with {how} and no answer", where=name)


def _last(printed: BinaryIO) -> str:
    printed.seek(0)
    return "\n".join(printed.read().decode(errors="replace").splitlines()[-LINES:])


def serve(order: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """The child's side: run the task, answer, end."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        answer = dict(tasks[order["task"]](order["given"]))
    except Exception as error:
        if isinstance(error, FlowcheckError):
            said = {"root": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy}
        elif (machine := of_the_machine(error)) is not None:
            said = {"root": "EnvironmentProblem", "what": machine.what, "where": order["task"],
                    "remedy": machine.remedy}
        elif isinstance(error, OSError):
            said = {
                "root": "EnvironmentProblem", "what": error.strerror or str(error),
                "where": str(error.filename or "the output"), "remedy": "check the path, permissions and free space",
            }
        else:
            raise  # a bug: the traceback is printed, and the caller sees that there is no answer
        answer = {"error": said}
    with open(order["answer"], "wb") as out:
        out.write(json.dumps(answer).encode())


def _end_with_caller() -> None:
    """The caller holds our input open while it waits for an answer."""
    while os.read(0, 4096):  # not through sys.stdin: its lock, held at the interpreter's end, would be fatal
        pass
    os._exit(1)
