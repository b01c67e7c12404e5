"""What `prepare` sets, keeps and says; what a child process makes of it; where its files go."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer.nccl import prepare as module
from flowcheck.trainer.nccl.prepare import Prepared, prepared
from flowcheck.trainer.plugin import plugin_path

ROOT = Path(__file__).resolve().parents[3]
DEBUG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
VARIABLES = ("NCCL_PROFILER_PLUGIN", *DEBUG, *RECORDER, "FLOWCHECK_PREPARED", "NCCL_CONF_FILE")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Prepared]]:
    """fresh(**variables): prepare() as in a new process, with these alone set; its log directory below tmp_path."""
    monkeypatch.setattr(module, "_done", None)
    monkeypatch.setattr(module, "SYSTEM_FILE", str(tmp_path / "nccl.conf"))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)

    def run(**variables: str) -> Prepared:
        os.environ.update(variables)
        return flowcheck.prepare()

    yield run
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(before)


def test_where_nothing_is_set(fresh: Callable[..., Prepared]) -> None:
    done = fresh()
    assert done.problems == () and done.kept == {} and done.history is not None
    assert set(done.set) == {"NCCL_PROFILER_PLUGIN", *DEBUG, *RECORDER}
    assert {name: os.environ[name] for name in done.set} == done.set
    assert done.set["NCCL_PROFILER_PLUGIN"] == str(plugin_path())
    assert (done.set["NCCL_DEBUG"], done.set["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET,ENV,GRAPH")
    directory, _, name = done.set["NCCL_DEBUG_FILE"].rpartition("/")
    assert name == "%p.log" and done.log == f"{directory}/{os.getpid()}.log"
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert "NCCL_DEBUG=INFO" in str(done).splitlines()


def test_the_second_call_changes_nothing(fresh: Callable[..., Prepared]) -> None:
    assert prepared() is None
    first = fresh()
    assert flowcheck.prepare() is first is prepared()


def test_what_is_said(fresh: Callable[..., Prepared], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowcheck"):
        fresh(NCCL_DEBUG="WARN")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", f"flowcheck: set NCCL_PROFILER_PLUGIN={plugin_path()}") in said
    assert [text for level, text in said if level == "WARNING" and "NCCL_DEBUG=WARN" in text]


@pytest.mark.parametrize("given", [
    {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "VERSION"}, {"NCCL_DEBUG_SUBSYS": "COLL"}, {"NCCL_DEBUG_FILE": "/tmp/x.%p"},
    {"NCCL_DEBUG": "nonsense", "NCCL_DEBUG_FILE": "/tmp/x.%p"},
])
def test_what_the_user_has_nccl_print_goes_where_it_went(fresh: Callable[..., Prepared], given: dict[str, str]) -> None:
    done = fresh(**given)
    assert {name: os.environ.get(name) for name in DEBUG} == {name: given.get(name) for name in DEBUG}
    assert done.kept == given and not set(done.set) & set(DEBUG) and done.log == ""
    (problem,) = done.problems
    assert "NCCL's log is not read" in problem and next(iter(given)) in problem


@pytest.mark.parametrize(("given", "words"), [
    ({"NCCL_DEBUG": "INFO"}, ("NET, GRAPH of NCCL's log are missing", "is no file of this process alone")),
    ({"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/tmp/all.log"},
     ("is no file of this process alone",)),
    ({"NCCL_DEBUG": "Info", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/tmp/all.%%p.log"},
     ("is no file of this process alone",)),
    ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^NET,COLL", "NCCL_DEBUG_FILE": "/tmp/x.%p"},
     ("NET of NCCL's log is missing",)),
    ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "init,net,env,graph", "NCCL_DEBUG_FILE": "/tmp/x.%h.%p.%%"}, ()),
    ({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/tmp/x.%h.%p.%%"}, ()),
])
def test_a_log_of_the_users_own(fresh: Callable[..., Prepared], given: dict[str, str], words: tuple[str, ...]) -> None:
    done = fresh(**given)
    assert done.kept == given and len(done.problems) == len(words)
    for word, problem in zip(words, done.problems, strict=True):
        assert word in problem
    host = os.uname().nodename.partition(".")[0]
    own = {"/tmp/x.%h.%p.%%": f"/tmp/x.{host}.{os.getpid()}.%", "/tmp/x.%p": f"/tmp/x.{os.getpid()}"}
    assert done.log == own.get(given.get("NCCL_DEBUG_FILE", ""), "")


def test_another_profiler_plugin(fresh: Callable[..., Prepared]) -> None:
    done = fresh(NCCL_PROFILER_PLUGIN="inspector")
    assert os.environ["NCCL_PROFILER_PLUGIN"] == "inspector" and done.history is None
    assert "NCCL_PROFILER_PLUGIN=inspector stays: NCCL loads one profiler plugin" in done.problems[0]


def test_the_plugin_set_by_hand(fresh: Callable[..., Prepared]) -> None:
    done = fresh(NCCL_PROFILER_PLUGIN=str(plugin_path()))
    assert done.history is not None and done.problems == () and "NCCL_PROFILER_PLUGIN" in done.kept


def test_no_plugin(fresh: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise EnvironmentProblem("was not built")

    monkeypatch.setattr(module, "Plugin", absent)
    done = fresh()
    assert done.history is None and "NCCL_PROFILER_PLUGIN" not in done.set and "was not built" in done.problems[0]


@pytest.mark.parametrize(("name", "value", "problems"), [(RECORDER[0], "64", 0), (RECORDER[1], "0", 1)])
def test_a_recorder_of_the_users_own(
    fresh: Callable[..., Prepared], name: str, value: str, problems: int
) -> None:
    done = fresh(**{name: value})
    assert done.kept == {name: value} and len(done.problems) == problems
    assert [one for one in RECORDER if one in os.environ] == [name]


def test_nccls_own_files_count_as_the_users(fresh: Callable[..., Prepared], tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# mine\nNCCL_DEBUG=WARN\n#NCCL_PROFILER_PLUGIN=x\nnonsense\n")
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=INFO\nNCCL_PROFILER_PLUGIN=inspector\n")
    done = fresh()
    assert done.kept == {"NCCL_DEBUG": "WARN", "NCCL_PROFILER_PLUGIN": "inspector"} and done.history is None
    assert "NCCL_DEBUG" not in os.environ


def test_a_file_that_nccl_is_told_of(fresh: Callable[..., Prepared], tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    (tmp_path / "other.conf").write_text("TORCH_FR_BUFFER_SIZE=1\n")
    assert "NCCL_DEBUG" in fresh(NCCL_CONF_FILE=str(tmp_path / "other.conf")).set


def test_a_directory_with_a_percent_sign(fresh: Callable[..., Prepared], tmp_path: Path) -> None:
    odd = tmp_path / "100%h"
    odd.mkdir()
    module.tempfile.tempdir = str(odd)  # the fixture puts it back
    done = fresh()
    assert done.log.startswith(f"{odd}/") and module._expanded(done.set["NCCL_DEBUG_FILE"]) == done.log


def test_a_parents_directory_that_is_gone(fresh: Callable[..., Prepared]) -> None:
    done = fresh(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,ENV,GRAPH", NCCL_DEBUG_FILE="/nonexistent/%p.log",
                 FLOWCHECK_PREPARED="NCCL_DEBUG,NCCL_DEBUG_FILE,NCCL_DEBUG_SUBSYS")
    assert os.path.isdir(os.path.dirname(done.log)) and done.problems == ()


def test_after_init_process_group(fresh: Callable[..., Prepared], wrapped: Any) -> None:
    import torch

    wrapped(torch.nn.Linear(1, 1))
    assert "came after init_process_group" in fresh().problems[0]


def test_whatever_goes_wrong_training_goes_on(
    fresh: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(module.tempfile, "mkdtemp", broken)
    done = fresh()
    assert done.problems == ("not prepared: OSError: no space left",) and done.history is None


CHILD = """
import multiprocessing, os, sys
import flowcheck

def child(out):
    done = flowcheck.prepare()
    out.put((done.problems, done.kept, done.log, os.getpid()))

if __name__ == "__main__":
    done = flowcheck.prepare()
    assert done.log.endswith(f"/{os.getpid()}.log")
    for way in sys.argv[1:]:
        context = multiprocessing.get_context(way)
        out = context.Queue()
        one = context.Process(target=child, args=(out,))
        one.start()
        problems, kept, log, pid = out.get(timeout=60)
        one.join()
        assert problems == () and kept == {}, (problems, kept)
        assert log == os.path.join(os.path.dirname(done.log), f"{pid}.log") and pid != os.getpid()
    directory = os.path.dirname(done.log)
    assert os.path.isdir(directory)
    print(directory)
"""


def test_children_have_logs_of_their_own_and_nothing_is_left(tmp_path: Path) -> None:
    """Forked and spawned; the parent's directory goes with the parent."""
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, str(script), "fork", "spawn"], capture_output=True, text=True, timeout=120,
                          env=clean | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists() and list(tmp_path.glob("flowcheck-nccl-*")) == []
