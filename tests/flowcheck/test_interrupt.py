"""Ctrl-C ends the commands, also while they are only being imported, and they say so; blocks that it waits for."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flowcheck.interrupts import deferred, handled


@pytest.mark.parametrize("module", ["flowcheck", "flowcheck.node"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"], capture_output=True, text=True, check=False, timeout=280,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("lines", [
    ["signal.raise_signal(signal.SIGINT)"],
    ["return 130  # what typer makes of it"],
    ["try:", "    signal.raise_signal(signal.SIGINT)", "except KeyboardInterrupt:", "    raise AttributeError('half')"],
], ids=["heard", "typer", "swallowed"])
def test_a_command_that_was_interrupted_says_so(lines: list[str]) -> None:
    """Also where a library that was being loaded has swallowed it: nothing that fails afterwards is a bug of ours."""
    body = "\n    ".join(lines)
    code = (
        "import signal, sys\nfrom flowcheck import cli\n"
        f"def app(standalone_mode, prog_name):\n    {body}\ncli.app = app\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stderr) == (130, "flowcheck: interrupted before it was done\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_is_heard_after_the_block(number: signal.Signals) -> None:
    done = []
    with handled(signal.default_int_handler, number):
        with pytest.raises(KeyboardInterrupt):
            with deferred():
                signal.raise_signal(number)
                done.append("the block")
            done.append("what follows")  # type: ignore[unreachable]
        assert done == ["the block"]
        with pytest.raises(KeyboardInterrupt):  # and as before from then on
            signal.raise_signal(number)


def test_a_second_interrupt_is_heard_at_once() -> None:
    done = []
    with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")
        assert done == ["first"]


def test_without_an_interrupt_everything_is_as_before() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with deferred():
        pass
    with pytest.raises(ZeroDivisionError), deferred():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_nobody_hears_is_left_alone() -> None:
    with handled(signal.SIG_IGN, signal.SIGHUP), deferred():  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)


def test_other_threads_are_never_interrupted() -> None:
    """They may use the block: signal handlers can only be set in the main thread."""
    done = []

    def work() -> None:
        with deferred():
            done.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["done"]
