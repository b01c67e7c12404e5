"""`python -m flowcheck.run`: the script is the main program, with its own arguments, status and traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_prepare import ROOT, VARIABLES

SCRIPT = """
import os, sys, threading, multiprocessing
import neighbour                                   # beside the script
from flowcheck.trainer.nccl.prepare import prepared

class Held: ...

def late():
    threading.main_thread().join()
    print("late", Held.__name__)                   # after the script's last line its names are there

def child(queue):
    queue.put((os.environ["NCCL_DEBUG"], __name__))

if __name__ == "__main__":
    print(sys.argv, __file__, sys.modules["__main__"].Held is Held, prepared().problems)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    one = context.Process(target=child, args=(queue,))
    one.start()
    print(*queue.get(timeout=60))
    one.join()
    threading.Thread(target=late).start()
    if len(sys.argv) > 1 and sys.argv[1] == "exit":
        sys.exit(7)
    if len(sys.argv) > 1 and sys.argv[1] == "fail":
        raise RuntimeError("of the script")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    here = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "flowcheck.run", *arguments], capture_output=True, text=True,
                          timeout=120, cwd=folder, env=clean | here)


@pytest.mark.parametrize(("argument", "status"), [("--lr", 0), ("exit", 7), ("fail", 1)])
def test_a_script(folder: Path, argument: str, status: int) -> None:
    done = run(folder, "script.py", argument, "0.1")
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == [
        f"['script.py', '{argument}', '0.1'] script.py True ()", "INFO __mp_main__", "late Held",
    ]
    assert "flowcheck: NCCL_DEBUG=INFO" in done.stderr.splitlines()
    assert ('File "script.py", line ' in done.stderr and "RuntimeError: of the script" in done.stderr) == (
        argument == "fail"
    )


def test_a_module(folder: Path) -> None:
    done = run(folder, "-m", "package.train", "--lr", "0.1")
    assert (done.returncode, done.stdout) == (0, "__main__ package ['--lr', '0.1']\n"), done.stderr


@pytest.mark.parametrize(("arguments", "what"), [
    ((), "usage: "), (("-m",), "usage: "), (("--lr", "script.py"), "usage: "),
    (("nowhere.py",), "flowcheck: cannot run nowhere.py: No such file"),
    (("package",), "flowcheck: cannot run package: Is a directory"),
])
def test_what_cannot_be_run(folder: Path, arguments: tuple[str, ...], what: str) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 1 and what in done.stderr and "Traceback" not in done.stderr
