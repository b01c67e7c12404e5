"""`flowcheck doctor`: findings on trees that look like machines with something wrong, and on this machine."""

from __future__ import annotations

import array
import fcntl
import json
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.engines import EngineDevice, choose, find_engines
from dataplane.pydpdk import ffi as ffi_module
from flowcheck.diagnose.doctor import Machine, Wanted, devices, examine
from flowcheck.diagnose.doctor.machine import cpu_list

NIC = "0000:81:00.0"
CHECKED = ("dpdk", "privileges", "huge pages", "cores", "dma engines", "devices")


@pytest.fixture
def tree(tmp_path):
    """write(path, text) builds a machine under tmp_path; link(path, target name) a driver binding."""

    class Tree:
        root = tmp_path

        def write(self, path, text):
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

        def link(self, path, driver):
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).symlink_to(tmp_path / "drivers" / driver)

        def find(self, *devices, **options):
            return examine(Wanted(devices, **options), Machine(tmp_path))

    made = Tree()
    made.write("proc/meminfo", "MemAvailable:  64000000 kB\nHugePages_Total:    0")
    made.write("proc/mounts", "hugetlbfs /dev/hugepages hugetlbfs rw 0 0")
    made.write("proc/self/status", "CapEff:\t000001ffffffffff")
    made.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1024")
    made.write("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "0")
    made.write("sys/devices/system/cpu/online", "0-15")
    made.write("sys/devices/system/cpu/isolated", "2-7")
    made.write("sys/devices/system/node/node0/cpulist", "0-7")
    made.write("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "1024")
    made.write("sys/kernel/iommu_groups/1/type", "DMA")
    made.write("dev/vfio/vfio", "")
    made.write("sys/fs/bpf/.keep", "")
    for name in ("mlx5", "af_packet", "af_xdp"):
        made.write(f"usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_net_{name}.so.23", "")
    made.write("sys/class/infiniband/mlx5_0/node_type", "1: CA")
    made.write(f"sys/bus/pci/devices/{NIC}/vendor", "0x15b3")
    made.write(f"sys/bus/pci/devices/{NIC}/numa_node", "0")
    made.link(f"sys/bus/pci/devices/{NIC}/driver", "mlx5_core")
    return made


def wrong(findings):
    return [f for f in findings if f.level != "ok"]


def test_a_good_machine(tree):
    findings = tree.find(NIC, cores=(2, 3))
    assert wrong(findings) == []
    assert set(CHECKED[:-1]) <= {f.check for f in findings}


@pytest.mark.parametrize(
    ("path", "text", "level", "said", "mend"),
    [
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3", "unusable", "6 MB free, 512 MB wanted",
         "echo 253 > /proc/sys/vm/nr_hugepages"),
        ("proc/self/status", "CapEff:\t0000000000000000", "unusable", "lacks CAP_NET_RAW", "as root"),
        ("sys/devices/system/cpu/isolated", "", "warning", "rx cores [2, 3] also run other", "isolcpus=2,3"),
        ("sys/devices/system/cpu/online", "0-2", "unusable", "cores [3] cannot be used", "other cores"),
        ("sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "powersave", "warning", "governor powersave",
         "echo performance"),
        ("sys/devices/system/node/node0/cpulist", "0-2", "warning", "cores [3] are on another NUMA node",
         "cores of 0-2"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "100", "warning",
         "200 MB of 2 MB pages free on its NUMA node 0, 512 MB wanted",
         "echo 256 > /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"),
    ],
)
def test_one_thing_wrong(tree, path, text, level, said, mend):
    tree.write(path, text)
    (finding,) = wrong(tree.find(NIC, cores=(2, 3)))
    assert finding.level == level and said in finding.text and mend in finding.remedy


@pytest.mark.parametrize(
    ("vendor", "driver", "said", "mend"),
    [
        ("0x15b3", "vfio-pci", "ConnectX bound to vfio-pci", "-b mlx5_core"),
        ("0x8086", "ice", "bound to ice: DPDK cannot", "modprobe vfio-pci; dpdk-devbind.py -b vfio-pci 0000:81:00.0"),
        ("0x8086", None, "bound to no driver", "dpdk-devbind.py"),
    ],
)
def test_driver_binding(tree, vendor, driver, said, mend):
    link = tree.root / f"sys/bus/pci/devices/{NIC}/driver"
    link.unlink()
    if driver:
        tree.link(f"sys/bus/pci/devices/{NIC}/driver", driver)
    tree.write(f"sys/bus/pci/devices/{NIC}/vendor", vendor)
    (finding,) = wrong(tree.find(NIC))
    assert finding.level == "unusable" and said in finding.text and mend in finding.remedy


@pytest.mark.parametrize(
    ("path", "said", "mend"),
    [
        ("sys/class/infiniband/mlx5_0/node_type", "RDMA device is missing", "modprobe mlx5_ib"),
        ("usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_net_mlx5.so.23", "driver net_mlx5 is not installed",
         "apt-get install 'librte-net-mlx5*'"),
    ],
)
def test_one_thing_missing(tree, path, said, mend):
    (tree.root / path).unlink()
    if "infiniband" in path:
        (tree.root / path).parent.rmdir()
    (finding,) = wrong(tree.find(NIC))
    assert finding.level == "unusable" and said in finding.text and mend in finding.remedy


def test_vfio(tree):
    link = tree.root / f"sys/bus/pci/devices/{NIC}/driver"
    link.unlink()
    tree.link(f"sys/bus/pci/devices/{NIC}/driver", "vfio-pci")
    tree.write(f"sys/bus/pci/devices/{NIC}/vendor", "0x8086")
    assert wrong(tree.find(NIC)) == []
    shutil.rmtree(tree.root / "sys/kernel/iommu_groups")
    shutil.rmtree(tree.root / "dev/vfio")
    found = wrong(tree.find(NIC))
    assert {f.level for f in found} == {"unusable"}
    assert "no /dev/vfio" in found[0].text and "modprobe vfio-pci" in found[0].remedy
    assert "no IOMMU" in found[1].text and "intel_iommu=on or amd_iommu=on" in found[1].remedy


def test_replay_needs_little(tree):
    """Without a device nothing but memory and DPDK matters: few huge pages are a warning, no privilege is needed."""
    tree.write("proc/self/status", "CapEff:\t0000000000000000")
    tree.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1")
    (finding,) = wrong(tree.find())
    assert finding.level == "warning" and "ordinary memory is used, too slow for line rate" in finding.text


@pytest.mark.parametrize(
    ("devices", "lacking"),
    [
        ([NIC], "CAP_NET_RAW, CAP_IPC_LOCK, CAP_NET_ADMIN"),
        (["af_packet:lo"], "CAP_NET_RAW"),
        (["af_xdp:lo"], "CAP_NET_RAW, CAP_NET_ADMIN, CAP_SYS_ADMIN"),
    ],
)
def test_privileges(tree, devices, lacking):
    tree.write("proc/self/status", "CapEff:\t0000000000000000")
    (finding,) = [f for f in tree.find(*devices) if f.check == "privileges"]
    assert finding.level == "unusable" and finding.text == f"this user lacks {lacking}"


def test_memory_mount_and_few_cores(tree):
    tree.write("proc/mounts", "proc /proc proc rw 0 0")
    tree.write("sys/devices/system/cpu/online", "0-1")
    found = tree.find(memory_mb=100_000)
    texts = {f.check: f for f in found}
    assert "no hugetlbfs is mounted; not needed" in texts["huge page mount"].text
    assert texts["memory"].level == "unusable" and "62500 MB available, 100000 MB wanted" in texts["memory"].text
    assert wrong(tree.find()) == []
    few = {f.check: f for f in tree.find(cores=(1,))}["cores"]
    assert few.level == "warning" and "2 cores: an rx thread" in few.text


@pytest.mark.parametrize(
    ("version", "level"),
    [("DPDK 22.11.11", "ok"), ("DPDK 24.11.2", "ok"), ("DPDK 21.11.0", "warning"), ("DPDK 25.03.0", "warning")],
)
def test_version(tree, monkeypatch, version, level):
    class Lib:
        rte_version = staticmethod(lambda: ffi_module.ffi.new("char[]", version.encode()))

    monkeypatch.setattr(ffi_module, "lib", Lib)
    (finding,) = [f for f in tree.find() if f.check == "dpdk"]
    assert finding.level == level and version in finding.text
    monkeypatch.setitem(sys.modules, "dataplane.pydpdk.ffi", None)
    (finding,) = [f for f in tree.find() if f.check == "dpdk"]
    assert finding.level == "unusable" and "libdpdk-dev" in finding.remedy


def test_offloads(tree, veth, monkeypatch):
    pair = veth(1500)
    values = {devices.ETHTOOL_GGRO: 0, devices.ETHTOOL_GFLAGS: 0}
    monkeypatch.setattr(devices, "_ethtool", lambda interface, command: values[command])
    assert wrong(tree.find(f"af_packet:{pair.near}")) == []
    values[devices.ETHTOOL_GGRO], values[devices.ETHTOOL_GFLAGS] = 1, devices.FLAG_LRO
    assert [f.remedy for f in wrong(tree.find(f"af_packet:{pair.near}"))] == [
        f"ethtool -K {pair.near} gro off", f"ethtool -K {pair.near} lro off",
    ]
    values[devices.ETHTOOL_GGRO] = values[devices.ETHTOOL_GFLAGS] = 0
    shutil.rmtree(tree.root / "sys/fs/bpf")
    (bpf,) = wrong(tree.find(f"af_xdp:{pair.near}"))
    assert bpf.level == "warning" and bpf.remedy == "mount -t bpf bpf /sys/fs/bpf"


def test_gro_is_asked_of_the_kernel(tree, veth):
    pair = veth(1500)
    for state in (1, 0):
        doctor_set_gro(pair.near, state)
        assert ("gro is on" in "".join(f.text for f in tree.find(f"af_packet:{pair.near}"))) is bool(state)


def doctor_set_gro(interface, on):
    """ETHTOOL_SGRO, as `ethtool -K` does."""
    value = array.array("B", struct.pack("II", 0x2C, on))
    request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, devices.SIOCETHTOOL, request)


@pytest.mark.parametrize("name", ["eth0:1", "a" * 40, "../../x", "\udcff", "a b"])
def test_names_that_are_no_interface(tree, name):
    (finding,) = wrong(tree.find(f"af_packet:{name}"))
    assert finding.level == "unusable" and "does not exist" in finding.text


def test_devices_that_are_none(tree):
    (absent,) = wrong(tree.find("0000:01:02.3"))
    assert absent.level == "unusable" and "no such PCI device" in absent.text
    (nonsense,) = wrong(tree.find("eth0"))
    assert nonsense.level == "unusable" and "--device" in nonsense.remedy
    (gone,) = wrong(tree.find("af_packet:flowcheck9"))
    assert "interface flowcheck9 does not exist" in gone.text and "lo" in gone.remedy


def test_an_interface(tree, veth):
    pair = veth(1500)
    assert (
        wrong(tree.find(f"af_packet:{pair.near}")) == []
        or wrong(tree.find(f"af_packet:{pair.near}"))[0].text[:3] == "gro"
    )
    large = [f for f in tree.find(f"af_packet:{pair.near}", path_mtu=4096) if f.level == "unusable"]
    assert "path MTU 4096 need 4176" in large[0].text and large[0].remedy == f"ip link set {pair.near} mtu 9000"
    pair.ip("link", "set", pair.near, "mtu", "3000")
    (xdp,) = [f for f in tree.find(f"af_xdp:{pair.near}") if f.level == "unusable"]
    assert "above 1500" in xdp.text
    pair.ip("link", "set", pair.near, "down")
    assert any("down" in f.text and f"link set {pair.near} up" in f.remedy for f in tree.find(f"af_packet:{pair.near}"))


def test_engines(tree):
    for number, (device, driver, node) in enumerate(
        [(0x0B25, "vfio-pci", 0), (0x0B00, "ioatdma", 0), (0x0B25, "vfio-pci", 1)]
    ):
        base = f"sys/bus/pci/devices/0000:6a:0{number}.0"
        tree.write(f"{base}/vendor", "0x8086")
        tree.write(f"{base}/device", hex(device))
        tree.write(f"{base}/numa_node", str(node))
        tree.link(f"{base}/driver", driver)
    for name, mode in (("wq0.0", "dedicated"), ("wq0.1", "shared")):
        for key, text in {"state": "enabled", "mode": mode, "type": "user", "name": "dpdk_app"}.items():
            tree.write(f"sys/bus/dsa/devices/{name}/{key}", text)
    engines = find_engines(tree.root)
    assert [(e.name, e.kind, e.node, bool(e.usable)) for e in engines] == [
        ("0000:6a:00.0", "dsa", 0, False), ("0000:6a:01.0", "ioat", 0, True), ("0000:6a:02.0", "dsa", 1, False),
        ("wq0.0", "dsa-wq", -1, False), ("wq0.1", "dsa-wq", -1, True),
    ]
    assert "ioatdma" in engines[1].usable and "mode is shared" in engines[4].usable
    assert choose(engines, 2, 0) == ("0000:6a:00.0", "wq0.0")
    with pytest.raises(ValueError, match="3 DMA engines wanted on NUMA node 0, 2 usable"):
        choose(engines, 3, 0)
    assert choose([EngineDevice("a", "ioat", 1, "")], 1, -1) == ("a",)
    assert any("on NUMA node 1, the NIC on 0" in f.text for f in tree.find(NIC))


def test_cpu_lists():
    assert cpu_list("0-3,8") == {0, 1, 2, 3, 8} and cpu_list("") == set()


def flowcheck(*words):
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-m", "flowcheck", *words], cwd=root, capture_output=True, text=True, timeout=280
    )


def test_the_command():
    done = flowcheck("doctor", "--json", "--device", "0000:00:99.0")
    found = json.loads(done.stdout)
    assert done.returncode == 2 and found["verdict"] == "unusable" and found["schema"] == "flowcheck-doctor/1"
    text = flowcheck("doctor", "--memory", "64")
    levels = {"ok": 0, "warning": 1, "unusable": 2}
    assert text.returncode == max(
        levels[line.split()[0]] for line in text.stdout.splitlines() if line.split()[0] in levels
    )
    assert "dpdk: DPDK" in text.stdout
