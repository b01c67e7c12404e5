"""From the settings' captures to the dataplane's: rings, engines, streams. The machine is a tree of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.capture import LARGEST_RING
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import PlannedCapture, naming, plan_captures, ring_memory

NIC, FAR = "0000:81:00.0", "0000:01:00.0"
CONTROL = {"listen": "localhost:1", "token_file": "t"}


def plan(root: Path, *captures: dict[str, Any]) -> list[PlannedCapture]:
    return plan_captures(NodeConfig.model_validate({"control": CONTROL, "capture": list(captures)}), root)


def pci(root: Path, address: str, node: int, device: str = "0x1017", vendor: str = "0x15b3", driver: str = "") -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, text in (("numa_node", str(node)), ("device", device), ("vendor", vendor)):
        (folder / name).write_text(text)
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(root / "drivers" / driver)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two NICs and four I/OAT engines on two NUMA nodes; one engine is not bound."""
    pci(tmp_path, NIC, 1)
    pci(tmp_path, FAR, 0)
    for name, node, driver in (("80:01.0", 1, "vfio-pci"), ("80:01.1", 1, "vfio-pci"), ("00:01.0", 0, "vfio-pci"),
                               ("80:01.2", 1, "ioatdma")):
        pci(tmp_path, f"0000:{name}", node, "0x0b00", "0x8086", driver)
    return tmp_path


def test_streams_are_numbered_over_all_captures(tmp_path: Path) -> None:
    planned = plan(tmp_path, {"device": "ring", "queues": 3, "cores": [4, 2, 0]}, {"device": "null", "path_mtu": 1024})
    assert [one.live.streams for one in planned] == [(0, 1, 2), (3,)]
    assert [one.table for one in planned] == ["capture[0]", "capture[1]"]
    assert planned[0].live.cores == (4, 2, 0) and planned[1].live.path_mtu == 1024
    assert [one.live.entries for one in planned] == [16384, 16384]
    three = plan(tmp_path, *({"device": device, "queues": queues} for device, queues in
                             (("ring", 3), ("null", 2), ("0000:81:00.0", 2))))
    assert [one.live.streams for one in three] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [one.device for one in three] == ["ring", "null", "0000:81:00.0"]


def test_the_ring_as_the_settings_say_it(tmp_path: Path) -> None:
    size = {"device": "ring", "path_mtu": 4096}
    assert plan(tmp_path, size | {"ring_size": 64})[0].live.entries == 64
    assert plan(tmp_path, size | {"iteration_bytes": 100 << 20})[0].live.entries == 32768  # 27,201 packets


@pytest.mark.parametrize("dump", ["copy", "hold", "dma"])
@pytest.mark.parametrize("ring_mb", [9, 100, 1025])
def test_the_largest_ring_that_has_room(tmp_path: Path, dump: str, ring_mb: int) -> None:
    """A slot of path MTU 4096 has 4352 bytes and an entry 24; with hold a packet buffer and its share of a page, and
    some MiB for the port's descriptors."""
    engines = {"engines": ["dma_skeleton"]} if dump == "dma" else {}
    capture = {"device": "ring", "path_mtu": 4096, "dump": dump, "ring_mb": ring_mb} | engines
    live = plan(tmp_path, capture)[0].live
    twice = plan(tmp_path, {**capture, "ring_size": 2 * live.entries, "ring_mb": None})[0].live
    assert ring_memory(live) <= ring_mb << 20 < ring_memory(twice)
    assert 4376 * live.entries < ring_mb << 20 < 2 * 5200 * live.entries + (8 << 20)


def test_memory_without_room_for_any_ring(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 MiB hold no ring of 64 packets, which takes") as refused:
        plan(tmp_path, {"device": "null"}, {"device": "ring", "path_mtu": 4096, "dump": "hold", "ring_mb": 1})
    least = int(refused.value.remedy.removesuffix(" or more"))
    assert refused.value.where == "capture[1].ring_mb" and refused.value.what.endswith(f", which takes {least}")
    assert least > 1 and plan(tmp_path, {"device": "ring", "path_mtu": 4096, "dump": "hold", "ring_mb": least})
    with pytest.raises(UserError, match=f"{least - 1} MiB hold no ring"):
        plan(tmp_path, {"device": "ring", "path_mtu": 4096, "dump": "hold", "ring_mb": least - 1})


def test_memory_beyond_the_largest_ring(tmp_path: Path) -> None:
    (one,) = plan(tmp_path, {"device": "ring", "path_mtu": 256, "ring_mb": 1 << 24})
    assert one.live.entries == LARGEST_RING


def test_engines_are_those_of_the_devices_numa_node_and_nobody_elses(machine: Path) -> None:
    dma = {"dump": "dma", "engines": "auto"}
    planned = plan(machine, {"device": NIC} | dma, {"device": FAR} | dma)
    assert [(one.node, one.live.engines) for one in planned] == [(1, ("0000:80:01.0",)), (0, ("0000:00:01.0",))]
    anywhere = plan(machine, {"device": "ring"} | dma, {"device": "null"} | dma)
    assert [one.live.engines for one in anywhere] == [("0000:00:01.0",), ("0000:80:01.0",)], "what was given is taken"
    both = plan(machine, {"device": NIC, "queues": 2} | dma)
    assert both[0].live.engines == ("0000:80:01.0", "0000:80:01.1")
    named = {"device": "ring", "dump": "dma", "engines": ["0000:80:01.0"]}
    assert plan(machine, {"device": NIC} | dma, named)[0].live.engines == ("0000:80:01.1",)


def test_engines_that_are_not_there(machine: Path) -> None:
    cases: list[tuple[str, Any, int, str]] = [
        (NIC, "auto", 3, "3 DMA engines wanted on NUMA node 1, 2 usable"),
        ("ring", ["0000:80:01.7"], 1, "this machine has no DMA engine 0000:80:01.7"),
        ("ring", ["wq0.0"], 1, "this machine has no DMA engine wq0.0"),
        ("ring", ["0000:80:01.2"], 1, "DMA engine 0000:80:01.2 cannot be used"),
    ]
    for device, engines, queues, what in cases:
        with pytest.raises(EnvironmentProblem) as refused:
            plan(machine, {"device": device, "dump": "dma", "engines": engines, "queues": queues})
        assert refused.value.where == "capture.engines" and what in refused.value.what and refused.value.remedy
    assert "dpdk-devbind.py" in refused.value.remedy  # what the one that is there lacks
    for root, here in ((machine, "0000:00:01.0, 0000:80:01.0, 0000:80:01.1, 0000:80:01.2"),
                       (machine / "none such", "none here")):
        with pytest.raises(EnvironmentProblem) as refused:
            plan(root, {"device": "ring", "dump": "dma", "engines": ["wq0.0"]})
        assert refused.value.remedy == f"one of: {here}; or dma_skeleton, which is for tests"


def test_two_engines_of_the_same_name_are_two_where_they_are_made_for_it(tmp_path: Path) -> None:
    (one,) = plan(tmp_path, {"device": "ring", "dump": "dma", "engines": ["dma_skeleton", "dma_skeleton"]})
    assert one.live.engines == ("dma_skeleton", "dma_skeleton")


def test_an_interface_that_is_not_there_names_the_table(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="interface flowcheck9") as refused:
        plan(tmp_path, {"device": "ring"}, {"device": "af_packet:flowcheck9"})
    assert refused.value.where == "capture[1]" and refused.value.remedy


def test_a_device_that_is_not_one_names_the_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a capture device") as refused:
        plan(tmp_path, {"device": "ring"}, {"device": "eth1"})
    assert refused.value.where == "capture[1]"


def test_what_dpdk_refuses_has_the_devices_name_once(tmp_path: Path) -> None:
    (one,) = plan(tmp_path, {"device": "ring"})
    for what in ("no thread can be bound to core 7", "ring: no thread can be bound to core 7"):
        with pytest.raises(DpdkError) as refused, naming(one):
            raise DpdkError(22, what, "another core")
        assert refused.value.what == "ring: no thread can be bound to core 7"
        assert (refused.value.errno, refused.value.remedy) == (22, "another core")
    with pytest.raises(DpdkError) as refused, naming(one):
        raise DpdkError(0, "odd", "")
    assert (refused.value.errno, refused.value.what) == (0, "ring: odd")
