"""DMA engines of this machine, as the kernel lists them. Reads sysfs only; nothing is opened.

    I/OAT   PCI device bound to vfio-pci; one channel each, so one queue each; errors reported from Ice Lake on
    DSA     PCI device bound to vfio-pci, or a work queue of the kernel's idxd driver that is enabled, dedicated,
            of type user and named dpdk_... (accel-config)

`choose` takes what lies on the NIC's NUMA node: a copy across sockets costs more than it saves. Intel only: AMD
hosts have no engine that rte_dma of 22.11 drives, so there `copy` is the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["EngineDevice", "choose", "find_engines"]

DSA = {0x0B25, 0x11FB, 0x1212}
IOAT = {0x2021, 0x0B00, *range(0x0E20, 0x0E30), *range(0x2F20, 0x2F30), *range(0x6F20, 0x6F30)}


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """name: as pydpdk.DmaDevice takes it. kind: "ioat", "dsa" or "dsa-wq". node: NUMA, -1 unknown. usable: why
    not, or ""."""

    name: str
    kind: str
    node: int
    usable: str


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return -1


def _pci(device: Path) -> EngineDevice | None:
    number = _number(device / "device")
    if _number(device / "vendor") != 0x8086 or number not in DSA | IOAT:
        return None
    driver = (device / "driver").resolve().name if (device / "driver").exists() else "no driver"
    usable = "" if driver == "vfio-pci" else f"bound to {driver}: dpdk-devbind.py -b vfio-pci {device.name}"
    if number in DSA and driver == "idxd":
        usable = "bound to idxd: use its work queues, or bind it to vfio-pci"
    return EngineDevice(device.name, "dsa" if number in DSA else "ioat", _number(device / "numa_node"), usable)


def _queue(queue: Path) -> EngineDevice:
    wants = {"state": "enabled", "mode": "dedicated", "type": "user"}
    wrong = [f"{key} is {_text(queue / key) or 'unknown'}" for key, want in wants.items() if _text(queue / key) != want]
    if not _text(queue / "name").startswith("dpdk_"):
        wrong.append("its name does not begin with dpdk_")
    node = _number(queue.resolve().parent / "numa_node")
    return EngineDevice(queue.name, "dsa-wq", node, "; ".join(wrong))


def find_engines(root: Path = Path("/")) -> list[EngineDevice]:
    """All of them, usable or not, by name."""
    pci = [_pci(device) for device in sorted((root / "sys/bus/pci/devices").glob("*"))]
    queues = [_queue(queue) for queue in sorted((root / "sys/bus/dsa/devices").glob("wq*"))]
    return [engine for engine in pci if engine is not None] + queues


def choose(engines: list[EngineDevice], count: int, node: int) -> tuple[str, ...]:
    """Names of `count` usable engines on NUMA node `node` (-1: any), for LiveConfig.engines.

    Raises:
        ValueError: there are fewer.
    """
    fit = [engine.name for engine in engines if not engine.usable and (node < 0 or engine.node in (node, -1))]
    if len(fit) < count:
        raise ValueError(
            f"{count} DMA engines wanted on NUMA node {node}, {len(fit)} usable ({', '.join(fit) or 'none'})"
        )
    return tuple(fit[:count])
