"""The network plugin's interface: where NCCL's own headers have each member, and which symbol each version looks up.

FLOWCHECK_NCCL names a git clone of NVIDIA/nccl with its tags; without it these are skipped. Nothing of NCCL's
is stored.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.gpu import plugin

HERE = Path(__file__).parent
TAGS = ("v2.26.2-1", "v2.26.6-1", "v2.27.3-1", "v2.27.7-1", "v2.28.3-1", "v2.28.9-1", "v2.29.2-1", "v2.29.7-1",
        "v2.30.3-1", "v2.30.7-1")


def places(folder: Path, *options: str) -> dict[str, tuple[int, int]]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / "places"
    subprocess.run([compiler, "-x", "c++", *options, str(HERE / "net_places.c"), "-o", str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (int(offset), int(size)) for name, offset, size in (line.split() for line in lines)}


def ours(folder: Path) -> dict[str, tuple[int, int]]:
    return places(folder, f"-I{plugin.HERE}/include")


def shown(tag: str, path: str) -> str:
    clone = os.environ.get("FLOWCHECK_NCCL")
    if not clone:
        pytest.skip("FLOWCHECK_NCCL names no clone of NVIDIA/nccl: NCCL's own sources were not compared")
    done = subprocess.run(["git", "-C", clone, "show", f"{tag}:{path}"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def test_members_lie_where_they_were_written_down(tmp_path: Path) -> None:
    found = ours(tmp_path)
    assert {name: found[name][0] for name in ("ptrSupport", "latency", "netDeviceType", "maxP2pBytes")} == {
        "ptrSupport": 24, "latency": 44, "netDeviceType": 56, "maxP2pBytes": 88,
    }
    assert [found[name][0] for name in ("init", "connect", "isend", "irecv", "test", "makeVDevice")] == [
        8, 40, 80, 88, 104, 152,
    ]


@pytest.mark.parametrize("tag", TAGS)
def test_nccls_own_header_agrees(tag: str, tmp_path: Path) -> None:
    header = shown(tag, "src/include/plugin/net/net_v10.h")
    assert header, "this release has no interface 10"
    (tmp_path / "net_v10.h").write_text(header)
    device = shown(tag, "src/include/net_device.h") or shown(tag, "src/include/nccl_device/net_device.h")
    (tmp_path / "net_device.h").write_text(device)
    others = "".join(shown(tag, f"src/include/plugin/{name}.h") for name in ("nccl_net", "net/net_v11", "net/net_v12"))
    limits = re.findall(r"#define NCCL_NET_MAX_DEVS_PER_NIC\w* .*", others)
    (tmp_path / "limits.h").write_text("\n".join(limits))
    assert places(tmp_path, "-DREAL", f"-I{tmp_path}") == ours(tmp_path)


@pytest.mark.parametrize("tag", TAGS)
def test_nccl_still_looks_the_symbol_up(tag: str) -> None:
    said = shown(tag, "src/plugin/net/net_v10.cc")
    assert '"ncclNetPlugin_v10"' in said
    loads = shown(tag, "src/plugin/net.cc")
    (versions,) = re.findall(r"ncclNetVersion\[\w+\] = \{([\d, ]+)\}", loads) or [""]
    assert not versions or "10" in versions.replace(" ", "").split(",")
