"""What goes wrong around a node, through the whole of it: the clock is set, the disk is full, a port is somebody
else's, huge pages are gone. docs/use/operating.md has the list, with the tests of what is not here."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.checkpoint.directory import load_step, tensor_sha256

from ..hand_node import until
from .conftest import LONGEST, TOKEN, NodeProcess
from .test_service import _iteration, _job, _join, _run

pytestmark = pytest.mark.root
DAY = 86_400

# -- the clock -------------------------------------------------------------------------------------------------------

# What libc says the time is, moved by as many seconds as stand in a file. The time since the machine's start is not.
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *moved;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CLOCK_MOVED");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, fd, 0);

    moved = at == MAP_FAILED ? NULL : at;
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, id, t);

    if (rc == 0 && moved && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        t->tv_sec += *moved;
    return rc;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    struct timespec now;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *t)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (t)
        *t = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """clock(seconds): from now on, for what is started from here, the time of day is so many seconds wrong."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    source, library, moved = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "moved"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    moved.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_MOVED", str(moved))

    def move(seconds: int) -> None:
        with moved.open("r+b") as file:
            file.write(struct.pack("<q", seconds))

    return move


@pytest.mark.slow
def test_a_clock_that_jumps(start_node, attach, truth, lan, clock: Callable[[int], None]) -> None:
    """Days forward and back, as NTP or a person does it. Nothing that is waited for is waited for by that clock."""
    job = _job()
    node, run = start_node('[api]\nlisten = "127.0.0.1:0"'), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    host, _, port = node.seen("listening")["api"].rpartition(":")
    shown = []
    for moved in (0, 400 * DAY, -2 * DAY, 7, 0):
        clock(moved)
        line = node.wait("iteration", iteration=_iteration(run, lan, trainer))
        assert line["published"]
        shown.append(line["time"] - time.time() - moved)
        asked = NodeClient((host, int(port)), reader_key(TOKEN), LONGEST)
        try:
            ages = [one.age_seconds for one in asked.offers()]
        finally:
            asked.close()
        assert ages and all(age is None or age >= 0 for age in ages), (moved, ages)
    assert all(abs(wrong) < LONGEST for wrong in shown), shown  # the clock did jump, as far as the node could see
    bad = {"lost", "problem", "connection", "left", "refused", "silent", "overload", "waiting"}
    assert not bad & {line["event"] for line in node.lines}, node.lines
    assert node.end() == 0


# -- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_and_has_room_again(lan, attach, truth, tmp_path: Path, small_disk: Path) -> None:
    """Versions go on in memory; a checkpoint appears as soon as it can, and none that is half."""
    node = NodeProcess(tmp_path, f"""
[control]
listen = "127.0.0.1:0"
token_file = "{tmp_path}/token"
[capture]
device = "af_packet:{lan.near}"
ring_size = 8192
huge = false
[replica]
directory = "{tmp_path}"
resync = "state"
[output]
directory = "{small_disk}"
every = 1
status_file = "{small_disk}/status.json"
""")
    try:
        job = _job()
        run = _run(truth, job, 2)
        trainer = attach(node, job)
        _join(trainer, run)
        assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
        until(lambda: node.said("written"))
        with (small_disk / "full").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        until(lambda: Path(node.said("written")[-1]["path"], "manifest.json").exists())
        whole = set(small_disk.rglob("manifest.json"))
        for _ in range(4):
            assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
        until(lambda: node.said("problem"))
        assert "No space left on device" in node.seen("problem")["why"]
        assert set(small_disk.rglob("manifest.json")) == whole
        (small_disk / "full").unlink()
        before = len(node.said("written"))
        deadline = time.monotonic() + LONGEST
        while len(node.said("written")) == before:
            assert time.monotonic() < deadline, node.lines[-5:]
            assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
        until(lambda: node.said("written")[-1]["step"] == run.step)
        last = load_step(node.said("written")[-1]["path"])
        assert {name: tensor_sha256(one) for name, one in last.parameters.items()} == {
            name: tensor_sha256(one) for name, one in run.tensors().items()
        }
        assert node.end() == 0
    finally:
        node.close()


# -- what others have ------------------------------------------------------------------------------------------------


def start(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "token").write_bytes(TOKEN)
    (folder / "node.toml").write_text(text)
    return subprocess.run(
        [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(folder / "node.toml")],
        capture_output=True, text=True, timeout=LONGEST,
    )


@pytest.mark.slow
@pytest.mark.parametrize("table", ["control", "api"])
def test_a_port_that_another_process_holds(lan, tmp_path: Path, table: str) -> None:
    """It is named, with the setting; a moment later, when it is free, the same command works."""
    other = "control" if table == "api" else "api"
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        text = f"""
[{other}]
listen = "127.0.0.1:0"
{f'token_file = "{tmp_path}/token"' if other == "control" else ""}
[{table}]
listen = "127.0.0.1:{port}"
{f'token_file = "{tmp_path}/token"' if table == "control" else ""}
[capture]
device = "af_packet:{lan.near}"
huge = false
[replica]
directory = "{tmp_path}"
"""
        done = start(tmp_path, text)
    assert done.returncode == 3, done.stderr
    assert f"127.0.0.1:{port}: cannot listen: Address already in use" in done.stderr
    assert f"{table}.listen" in done.stderr and "Traceback" not in done.stderr
    node = NodeProcess(tmp_path, text)
    try:
        assert str(port) in (node.seen("listening")["control"] + node.seen("listening")["api"])
        assert node.end() == 0
    finally:
        node.close()


@pytest.mark.slow
def test_huge_pages_that_are_gone(lan, tmp_path: Path) -> None:
    """Those that it wants are named, with the command that makes them. Without `huge` it takes ordinary memory."""
    from dataplane.pydpdk.eal import free_huge_pages

    free = sum(kb * pages for kb, pages in free_huge_pages().items()) << 10
    ring = 1 << 18  # entries of 9 KB each: more than any machine of these tests has in huge pages
    if free > ring * 9000:
        pytest.skip("this machine has more huge pages than can be asked for")
    done = start(tmp_path, f"""
[control]
listen = "127.0.0.1:0"
token_file = "{tmp_path}/token"
[capture]
device = "af_packet:{lan.near}"
ring_size = {ring}
huge = true
[replica]
directory = "{tmp_path}"
""")
    assert done.returncode == 3, done.stderr
    assert "huge pages" in done.stderr and "nr_hugepages" in done.stderr and "Traceback" not in done.stderr
