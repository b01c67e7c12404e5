"""What the machine has too little of is no fault of ours: at each top level, in threads, processes and answers."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck import cli
from flowcheck.control.protocol import RecordsError, Refused
from flowcheck.errors import EnvironmentProblem, UserError, of_the_machine, said_of
from flowcheck.node import cli as node_cli
from flowcheck.node.api.routes import _Api
from flowcheck.offline import child

from ..hand_node import LONGEST
from .test_api import FakeShelf, get
from .test_control_server import Port

HUGE = 1 << 60


def raised(call: Any) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError)) as error:
        call()
    return error.value


SHORT = {
    "the interpreter's": lambda: raised(lambda: bytes(HUGE)), "numpy's": lambda: raised(lambda: np.empty(HUGE, "u1")),
    "torch's": lambda: raised(lambda: torch.empty(HUGE, dtype=torch.uint8)),
    "a GPU's": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "the kernel's": lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
    "threads": lambda: RuntimeError("can't start new thread"), "room": lambda: OSError(errno.ENOSPC, "No space left"),
    "files": lambda: OSError(errno.EMFILE, "Too many open files"),
}
OURS = (ZeroDivisionError("x"), RuntimeError("dictionary changed size"), OSError(errno.EINVAL, "x"), KeyError("x"))


@pytest.mark.parametrize("kind", SHORT)
def test_it_is_told_from_a_bug(kind: str) -> None:
    found = of_the_machine(SHORT[kind](), "here")
    assert isinstance(found, EnvironmentProblem) and found.exit_code == 3 and found.where == "here" and found.remedy
    assert said_of(SHORT[kind]()) == of_the_machine(SHORT[kind]()).message()  # type: ignore[union-attr]


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_a_bug_stays_one(error: Exception) -> None:
    assert of_the_machine(error) is None and said_of(error) == f"{type(error).__name__}: {error}"
    assert said_of(UserError("no", where="w")) == "w: no"


@pytest.mark.parametrize(("error", "status"), [(MemoryError(), 3), (ZeroDivisionError("x"), 70)])
@pytest.mark.parametrize("module", [cli, node_cli])
def test_what_the_commands_end_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any, error: Exception, status: int
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module.typer.Typer, "__call__", fails)
    with pytest.raises(SystemExit) as ended:
        module.main()
    printed = capsys.readouterr().err
    assert ended.value.code == status
    assert ("bug" in printed, "memory" in printed, "Traceback" in printed) == (
        (status == 70, status == 3, status == 70 and module is node_cli))


def test_a_thread_that_nobody_waits_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for error in (MemoryError(), ZeroDivisionError("x")):
        thread = threading.Thread(name="flowcheck x")
        node_cli._thread_ended(lambda event, why: said.append(why),  # type: ignore[arg-type]
                               threading.ExceptHookArgs((type(error), error, None, thread)))
    assert "flowcheck x has ended: there was not enough memory" in said[0] and "bug" not in said[0]
    assert "ZeroDivisionError: x. This is a bug" in said[1] and "MemoryError" not in capsys.readouterr().err


def test_a_process_beside_says_it_in_a_line() -> None:
    text = ("import sys\nfrom flowcheck.node.process.child import guarded\n"
            "sys.exit(guarded(lambda: len(bytes(1 << 60))))")
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 3 and "not enough memory" in done.stderr and "Traceback" not in done.stderr


def test_a_task_of_its_own_process_gives_it_to_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_end_with_caller", lambda: None)
    child.serve({"task": "replay", "given": {}, "answer": str(tmp_path / "a")},
                {"replay": lambda given: {"n": len(bytes(HUGE))}})
    said = json.loads((tmp_path / "a").read_bytes())["error"]
    assert said["root"] == "EnvironmentProblem" and said["where"] == "replay" and "memory" in said["what"]


def test_a_reader_is_asked_to_come_again() -> None:
    """A tier whose files need more memory than there is."""
    poor = FakeShelf()
    poor.broken = MemoryError()
    made = _Api({"memory": poor})
    with contextlib.closing(made):
        for path in ("/v1/versions", "/v1/status"):
            answer = get(made.app, path)
            assert answer.status == 503 and b"memory" in answer.body and answer.headers["retry-after"]


def test_a_rank_is_told_and_the_port_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Port()
    one.server.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(one.group, "join", lambda *_: bytes(HUGE))
            link = one.attach(rank=2)
            answer, _ = link.receive(wait=LONGEST)
            assert isinstance(answer, Refused) and "not enough memory" in answer.why
            with pytest.raises(RecordsError):
                link.receive(wait=LONGEST)
        event, fields = one.events.get(timeout=60)
        assert event == "problem" and "not enough memory" in fields["why"]
        one.attach(rank=2)
    finally:
        one.close()
