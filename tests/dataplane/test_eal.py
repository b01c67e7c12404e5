"""The EAL's ways to start. Each needs a process of its own: DPDK can be initialised once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from dataplane.ports import link_speed, numa_node, rx_queues
from dataplane.pydpdk import free_huge_pages
from dataplane.pydpdk.eal import eal_arguments

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}  # a DPDK of one's own
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
REPLAY = """
from dataplane.capture import PcapSource
from dataplane.pydpdk import DpdkError, Eal, NotEnoughMemory, free_huge_pages
from dataplane.reader import RingReader
import os, sys, threading

def replay(eal, path):
    with PcapSource(eal, path, ring_size=256) as source:
        source.start()
        count = sum(1 for _ in RingReader(source.ring_address))
        assert source.error is None, source.error
    return count

path = sys.argv[1]
"""


def run(body, path, **options):
    return subprocess.run(
        [sys.executable, "-c", REPLAY + textwrap.dedent(body), str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | LIBRARIES, **options,
    )


def succeeds(body, path, **options):
    done = run(body, path, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def capture(captures, tmp_path):
    path = tmp_path / "capture.pcap"
    path.write_bytes(captures.pcap(captures.records(500)))
    return path


def page_files():
    """Files DPDK could leave behind: pages on a hugetlbfs, its runtime files."""
    mounts = [
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " hugetlbfs " in line
    ]
    folders = [*map(Path, mounts), Path("/var/run/dpdk"), Path("/tmp/dpdk"), Path("/dev/shm")]
    return {
        file
        for folder in folders
        for pattern in ("**/rtemap_*", "**/fbarray_*", "**/config", "**/mp_socket*", "**/dpdk_telemetry*")
        for file in folder.glob(pattern)
    }


def test_without_huge_pages(capture):
    before = page_files()
    out = succeeds(
        """
        mask = os.sched_getaffinity(0)
        seen = []
        gate = threading.Event()
        thread = threading.Thread(target=lambda: (gate.wait(), seen.append(os.sched_getaffinity(0))))
        thread.start()
        with Eal.start(memory_mb=64, huge=False) as eal:
            gate.set()
            thread.join()
            later = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            later.start()
            later.join()
            assert seen == [mask, mask] and os.sched_getaffinity(0) == mask
            assert not eal.huge and "WITHOUT huge pages" in eal.describe()
            print(replay(eal, path))
        """,
        capture,
    )
    assert out == "500\n"
    assert page_files() == before


def test_keeps_a_narrowed_affinity(capture):
    out = succeeds(
        """
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        mask = os.sched_getaffinity(0)
        with Eal.start(memory_mb=64, huge=False) as eal:
            print(replay(eal, path), os.sched_getaffinity(0) == mask)
        """,
        capture,
    )
    assert out == "500 True\n"


@pytest.fixture
def public_capture(capture):
    """A copy that anybody can read; pytest keeps its own folders to the user."""
    with tempfile.TemporaryDirectory(prefix="flowcheck-") as folder:
        Path(folder).chmod(0o755)
        yield shutil.copy(capture, folder)


@pytest.mark.root
def test_without_privileges(public_capture):
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    try:
        subprocess.run([sys.executable, "-c", ""], user=65534, group=65534, extra_groups=[], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"another user cannot run this Python: {error}")
    out = succeeds(
        """
        assert os.geteuid() == 65534
        with Eal.start(memory_mb=64, huge=False) as eal:
            print(replay(eal, path))
        """,
        public_capture,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert out == "500\n"


@pytest.fixture
def huge_pages():
    """160 MB of huge pages, given back afterwards; for one test of this machine at a time, whoever runs them."""
    with Path(tempfile.gettempdir(), "flowcheck-huge-pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from some_huge_pages()


def some_huge_pages():
    if sum(kb * pages for kb, pages in free_huge_pages().items()) >= 160 * 1024:
        yield
        return
    before = NR_HUGEPAGES.read_text()
    try:
        NR_HUGEPAGES.write_text(str(int(before) + 80))
    except OSError as exc:
        pytest.skip(f"no huge pages free and none can be reserved: {exc.strerror}")
    try:
        if sum(kb * pages for kb, pages in free_huge_pages().items()) < 160 * 1024:
            pytest.skip("this machine has no 160 MB of contiguous memory for huge pages")
        yield
    finally:
        NR_HUGEPAGES.write_text(before)


@pytest.mark.root
def test_with_huge_pages(capture, huge_pages):
    before = page_files()
    out = succeeds(
        """
        mask = os.sched_getaffinity(0)
        with Eal.start(memory_mb=64, nodes={0: 64}) as eal:
            assert "--socket-mem 64" in " ".join(eal.arguments)
            assert eal.huge and "huge pages without page files" in eal.describe()
            assert os.sched_getaffinity(0) == mask
            for _ in range(3):
                print(replay(eal, path))
            try:
                PcapSource(eal, path, ring_size=1 << 20)
            except NotEnoughMemory as exc:
                assert "ring of 1048576 slots x 4224 bytes" in str(exc), exc
                print("short")
        """,
        capture,
    )
    assert out == "500\n500\n500\nshort\n"
    assert page_files() == before


def test_huge_pages_asked_for_and_absent(capture):
    out = succeeds(
        """
        try:
            Eal.start(memory_mb=100_000_000, huge=True)
        except NotEnoughMemory as exc:
            assert "100000000 MB asked for" in str(exc) and "nr_hugepages" in str(exc), exc
        try:
            Eal.start(memory_mb=100_000_000, huge=True, nodes={0: 100_000_000})
        except NotEnoughMemory as exc:
            assert "on NUMA node 0" in str(exc) and "node0/hugepages/hugepages-2048kB/nr_hugepages" in str(exc), exc
        with Eal.start(memory_mb=64, huge=False) as eal:  # a refusal before EAL costs nothing
            print(replay(eal, path))
        """,
        capture,
    )
    assert out == "500\n"


def test_second_start(capture):
    out = succeeds(
        """
        with Eal.start(memory_mb=64, huge=False) as eal:
            assert Eal.start(memory_mb=32) is eal
            print(replay(eal, path))
        with Eal.start(memory_mb=64) as again:
            assert again is eal
            print(replay(again, path))
            for wrong, text in (
                ({"memory_mb": 65}, "64 MB, 65 MB are needed"),
                ({"memory_mb": 1, "huge": True}, "already runs"),
            ):
                try:
                    Eal.start(**wrong)
                except DpdkError as exc:
                    assert text in str(exc), exc
                else:
                    raise AssertionError(wrong)
        pid = os.fork()
        if pid == 0:
            try:
                Eal.start(memory_mb=1)
            except DpdkError as exc:
                os._exit(0 if "forked" in str(exc) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        """,
        capture,
    )
    assert out == "500\n500\n"


def test_sources_left_open_at_exit(capture):
    """The process ends cleanly with the rx thread waiting for a consumer that never comes."""
    out = succeeds(
        """
        eal = Eal.start(memory_mb=64, huge=False)
        source = PcapSource(eal, path, ring_size=16)
        source.start()
        while not source.counters()["waits"]:
            pass
        print("end")
        """,
        capture,
    )
    assert out == "end\n"


def test_failed_start_says_why_and_is_final(capture):
    done = run(
        """
        for memory_mb, devices in ((1 << 22, ()), (64, ("nonsense",)), (64, ())):
            try:
                Eal.start(memory_mb=memory_mb, huge=False, devices=devices)
            except DpdkError as exc:
                print(str(exc).splitlines()[0])
        """,
        capture,
    )
    assert done.returncode == 0, done.stderr
    too_much, first, second = done.stdout.splitlines()
    assert "4194304 MB asked for" in too_much
    assert "starting DPDK (--no-huge" in first and "-a nonsense" in first
    assert "an earlier start in this process failed" in second


def test_too_few_addresses(capture):
    out = succeeds(
        """
        import resource
        mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (100 << 20), most[1]))
        for huge in (False, *([True] if sum(free_huge_pages().values()) > 32 else [])):
            try:
                Eal.start(memory_mb=64, huge=huge)
            except NotEnoughMemory as exc:
                assert "MB of addresses" in str(exc) and "ulimit -v" in str(exc), exc
            else:
                raise AssertionError(huge)
        resource.setrlimit(resource.RLIMIT_AS, most)
        with Eal.start(memory_mb=64, huge=False) as eal:
            print(replay(eal, path))
        """,
        capture,
    )
    assert out == "500\n"


def test_arguments():
    quiet = ["--no-pci", "--no-telemetry"]
    huge = eal_arguments({3, 0, 11}, 512, True)
    plain = eal_arguments({0}, 64, False)
    assert huge[:3] == ["--in-memory", "-m", "512"] and "0@(0,3,11)" in huge
    assert plain[:4] == ["--no-huge", "--no-shconf", "-m", "64"] and "--in-memory" not in plain
    assert eal_arguments({0}, 512, True, nodes={2: 512})[:3] == ["--in-memory", "--socket-mem", "0,0,512"]
    assert eal_arguments({0}, 700, True, nodes={3: 200, 1: 500})[:3] == ["--in-memory", "--socket-mem", "0,500,0,200"]
    assert eal_arguments({0}, 64, False, nodes={2: 64}) == eal_arguments({0}, 64, False)
    assert all(flag in arguments for flag in quiet for arguments in (huge, plain))


def test_free_huge_pages_of_a_tree(tmp_path):
    for name, free, reserved in (("2048kB", 10, 3), ("1048576kB", 0, 0)):
        folder = tmp_path / f"hugepages-{name}"
        folder.mkdir()
        (folder / "free_hugepages").write_text(f"{free}\n")
        (folder / "resv_hugepages").write_text(f"{reserved}\n")
    assert free_huge_pages(tmp_path) == {2048: 7}
    (tmp_path / "hugepages-2048kB/resv_hugepages").unlink()  # as in a NUMA node's folder
    assert free_huge_pages(tmp_path) == {2048: 10}
    assert free_huge_pages(tmp_path / "absent") == {}


def test_numa_node_of_a_device(tmp_path):
    file = tmp_path / "sys/bus/pci/devices/0000:81:00.0/numa_node"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    assert numa_node("0000:81:00.0", tmp_path) == 1 and numa_node("0000:81:00.1", tmp_path) == -1
    interface = tmp_path / "sys/class/net/eth2/device/numa_node"
    interface.parent.mkdir(parents=True)
    interface.write_text("0\n")
    for kind in ("af_packet", "af_xdp"):
        assert numa_node(f"{kind}:eth2", tmp_path) == 0 and numa_node(f"{kind}:veth0", tmp_path) == -1
    assert numa_node("ring", tmp_path) == -1


def test_link_speed_and_queues_of_a_device(tmp_path):
    for name, text in (("class/net/eth2/speed", "25000\n"), ("class/net/down0/speed", "-1\n"),
                       ("class/net/eth2/queues/rx-0/rps_cpus", ""), ("class/net/eth2/queues/rx-1/rps_cpus", ""),
                       ("class/net/eth2/queues/tx-0/xps_cpus", ""),
                       ("bus/pci/devices/0000:8a:00.0/net/eth3/speed", "100000\n")):
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text)
    assert link_speed("af_packet:eth2", tmp_path) == link_speed("af_xdp:eth2", tmp_path) == 25000
    assert link_speed("0000:8A:00.0", tmp_path) == 100000
    for silent in ("af_packet:down0", "af_packet:none", "0000:8a:00.1", "ring", "null"):
        assert link_speed(silent, tmp_path) == -1
    assert rx_queues("af_xdp:eth2", tmp_path) == 2
    assert {rx_queues(device, tmp_path) for device in ("af_packet:eth2", "af_xdp:none", "ring")} == {-1}
