"""What a node's process and its children may do, as the kernel says in /proc: while it starts, while it runs, and that
it needs no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ...links import wait_for_links
from .conftest import Lan
from .test_service import _iteration, _job, _join, _run

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def rights(pid: int) -> dict[str, dict[str, int]]:
    """Of every thread, by its number and name. One that has ended may be listed for a moment."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        lines = dict(line.split(":", 1) for line in text.splitlines())
        found[f"{task.name} {lines['Name'].strip()}"] = {
            **{name: int(lines[name], 16) for name in SETS}, "NoNewPrivs": int(lines["NoNewPrivs"]),
        }
    return found


def none_left(pid: int) -> int:
    """No thread has any, nor can get one by starting a program. How many threads there are."""
    all_threads = rights(pid)
    for name, held in all_threads.items():
        assert held == dict.fromkeys(SETS, 0) | {"NoNewPrivs": 1}, (name, held)
    return len(all_threads)


def promiscuity(lan: Lan) -> int:
    words = lan._ip("-d", "link", "show", lan.near).split()
    return int(words[words.index("promiscuity") + 1])


@pytest.mark.root
def test_a_node_has_no_rights_left_and_outlives_a_link_that_went_down(start_node, attach, truth, lan) -> None:
    """It is started by root, with all of them. Ports and the HTTP process are open before the first look."""
    node = start_node('[api]\nlisten = "127.0.0.1:0"')
    pid = node.process.pid
    [child] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    assert none_left(pid) > 3 and none_left(child)
    assert promiscuity(lan) == 1
    job = _job()
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
    threads = {name.partition(" ")[2] for name in rights(pid)}
    assert {"fc-rx", "fc-place"} <= {name[:8].rstrip("0123456789-") for name in threads}, threads
    none_left(pid)
    for end in (lan.near, lan.far):
        lan._ip("link", "set", end, "down")
    for end in (lan.far, lan.near):
        lan._ip("link", "set", end, "up")
    wait_for_links(lan._ip, lan.near, lan.far)
    for _ in range(2):
        assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
    none_left(pid)
    assert node.end() == 0 and promiscuity(lan) == 0


PROGRAM = """
import os, threading
from flowcheck.node.ports import rights
before = rights._held()
rights.set_aside()
assert rights._held() == 0
mine = rights.Rights([{driver!r}])
bits = lambda those: sum(1 << one for one in those) & before
assert mine.call(rights._held) == (bits(rights.NEEDED[{driver!r}]) if before else 0)
if before >> 8 & 1:  # CAP_SETPCAP: what no thread can get by starting a program is so from the first
    status = lambda: open(f"/proc/self/task/{{threading.get_native_id()}}/status").read()
    assert all("CapBnd:\t" + "0" * 16 in one for one in (status(), mine.call(status)))
ran = mine.call(threading.current_thread)
assert (ran is not threading.current_thread()) == bool(before)
try:
    mine.call(os.stat, "/no such file")
except FileNotFoundError:
    pass
else:
    raise AssertionError
mine.give_back()
kept = bits(rights.KEPT.get({driver!r}, ()))
assert mine.call(rights._held) == kept
assert ran.is_alive() == bool(kept) or not before
mine.give_back()
later = []
one = threading.Thread(target=lambda: later.append(rights._held()))
one.start(); one.join()
assert later == [0]
print(kept, rights.Rights(["ring"]).call(rights._held))
"""


def program(driver: str, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-P", "-c", PROGRAM.format(driver=driver)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("driver", ["af_packet", "af_xdp", "pci"])
def test_what_is_kept_for_a_driver(driver: str) -> None:
    """Of what this user has: for root the sets of the table, for anybody else nothing."""
    done = program(driver)
    assert done.returncode == 0, done.stderr
    kept = {"af_packet": 0, "af_xdp": 1 << 12 | 1 << 21 | 1 << 39, "pci": 1 << 12 | 1 << 13 | 1 << 14}[driver]
    if os.geteuid() == 0 and int(rights(os.getpid()).popitem()[1]["CapPrm"]) & kept == kept:
        assert done.stdout == f"{kept} 0\n"
    else:
        assert done.stdout.startswith("0 0") or os.geteuid() == 0


@pytest.mark.root
@pytest.mark.parametrize("form", ["--config", "--config="])
def test_what_belongs_to_somebody_else_is_read_on_where_the_settings_do(tmp_path: Path, form: str) -> None:
    """Root who starts a node out of a user's home, which is closed to others."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "node.toml").touch(mode=0o600)
    for path in (home / "node.toml", home):
        os.chown(path, 65534, 65534)
    text = "from flowcheck.node.ports import rights; rights.set_aside(); print(rights._held())"
    for path, kept in ((home / "node.toml", 1 << 1), (tmp_path, 0), (tmp_path / "none such", 0)):
        words = [form + str(path)] if form.endswith("=") else [form, str(path)]
        done = subprocess.run([sys.executable, "-P", "-c", text, *words], capture_output=True, text=True, timeout=240)
        assert done.stdout == f"{kept}\n", (path, done.stderr)


@pytest.mark.root
def test_an_ordinary_user_with_two_of_them_as_the_unit_gives_them() -> None:
    """Ambient, without the right to change the bounding set."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    both = "+net_raw,+net_admin"
    done = program("af_packet", "setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=" + both,
                   "--ambient-caps=" + both, "--bounding-set=-all," + both)
    if "Permission denied" in done.stderr or "No module" in done.stderr:
        pytest.skip("this checkout is not readable by others")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 0\n"


@pytest.mark.root
@pytest.mark.parametrize("to", ["the process", "the other thread"])
def test_a_start_that_is_interrupted_while_a_port_is_being_opened_leaves_nothing(to: str) -> None:
    """The main thread hears the signal; what the other one opens meanwhile is closed. One that came to the other thread
    does not wake it, nor does one that came to it just before it began to wait."""
    text = """
import signal, sys, threading
from flowcheck.node.ports import rights
def interrupt(number, frame):
    go.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, interrupt)
rights.set_aside()
go = threading.Event()
class Opened:
    def __init__(self):
        print("opening", flush=True)
        if "other" in sys.argv[1]:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        go.wait()
    def close(self): print("closed", flush=True)
try:
    rights.Rights(["af_packet"]).call(Opened)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", text, to], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "opening\n"
    if to == "the process":
        process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=240)[0] == "closed\ninterrupted\n"
