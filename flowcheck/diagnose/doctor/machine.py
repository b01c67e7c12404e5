"""What the checks of `flowcheck doctor` look at, and what they give."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["PCI_ADDRESS", "Finding", "Level", "Machine", "Wanted", "cpu_list"]

Level = Literal["ok", "warning", "unusable"]
PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence in plain words. remedy: a command where there is one, otherwise what to do; "" if all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the node is to do here. memory_mb: packet buffers and rings; cores: of rx threads."""

    devices: tuple[str, ...] = ()
    path_mtu: int = 1024
    memory_mb: int = 512
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Where to look. Tests give a tree of their own as root."""

    root: Path = field(default=Path("/"))

    def text(self, path: str) -> str:
        """Content of a file, "" if it does not exist."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str, default: int = -1) -> int:
        try:
            return int(self.text(path), 0)
        except ValueError:
            return default

    def folder(self, path: str) -> list[Path]:
        return sorted((self.root / path).glob("*"))

    def meminfo(self, key: str) -> int:
        """Kilobytes, or pages for HugePages_*."""
        found = re.search(rf"^{key}:\s+(\d+)", self.text("proc/meminfo"), re.MULTILINE)
        return int(found[1]) if found else 0

    def capability(self, bit: int) -> bool:
        found = re.search(r"^CapEff:\s+([0-9a-f]+)", self.text("proc/self/status"), re.MULTILINE)
        return bool(found and int(found[1], 16) >> bit & 1)


def cpu_list(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
