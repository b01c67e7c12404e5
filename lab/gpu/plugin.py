"""The network plugin for NCCL: compiled where it runs, and what it is told and says.

    library = build(folder)
    environment(library, rank=0, nccl="2.27.7", port="interface:cable0", flows=path, protocol="LL")
    read_flows(path)        the connections that have carried something, in the manifest's form

Standard library only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from flowcheck.errors import EnvironmentProblem

__all__ = ["PROTOCOLS", "build", "environment", "read_flows"]

HERE = Path(__file__).parent
FRAMES = HERE.parent / "softroce"
PROTOCOLS = {"LL": "ll", "LL128": "ll128", "SIMPLE": "simple"}  # as the manifest has them


def build(folder: Path) -> Path:
    """The plugin in `folder`. Raises EnvironmentProblem."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise EnvironmentProblem("there is no C compiler", where="NCCL's network",
                                 remedy="apt-get install build-essential")
    library = folder / "libnccl-net-flowcheck.so"
    words = [compiler, "-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{HERE}/include",
             f"-I{FRAMES}/include", str(HERE / "src/net_plugin.c"), str(FRAMES / "src/wire.c"), "-o", str(library),
             "-lisal", "-lpthread"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem(f"the plugin does not compile: {done.stderr.strip()[-400:]}", where="NCCL's network",
                                 remedy="apt-get install build-essential libisal-dev")
    return library


def environment(
    library: Path, *, rank: int, nccl: str, port: str | None, flows: Path, protocol: str
) -> dict[str, str]:
    """What a rank's process needs so that all of its data goes through the plugin, on one ring.

    A host's name for each rank (NCCL_HOSTID): NCCL takes two ranks on one GPU of one host for a mistake, and uses
    shared memory between ranks of one host. One channel and one algorithm, so that one connection a direction
    carries all.
    """
    simple = "Simple" if protocol == "SIMPLE" else protocol
    told = {"FLOWCHECK_NET_PORT": port} if port is not None else {}
    return told | {
        "FLOWCHECK_NET_RANK": str(rank), "FLOWCHECK_NET_NCCL": nccl, "FLOWCHECK_NET_FLOWS": str(flows),
        "NCCL_NET_PLUGIN": str(library), "NCCL_NET": "flowcheck", "NCCL_NET_PLUGIN_REF_COUNT": "1",
        "NCCL_HOSTID": f"flowcheck-rank-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring",
        "NCCL_PROTO": simple, "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1",
    }


def read_flows(path: Path) -> list[dict[str, Any]]:
    """All of channel 0, which is the only one."""
    return [json.loads(line) | {"channel": 0} for line in path.read_text().splitlines()] if path.exists() else []
