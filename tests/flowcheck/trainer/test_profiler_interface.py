"""Where the members of NCCL's structures lie: as written down once, and as NCCL's own headers have them.

FLOWCHECK_NCCL names a git clone of NVIDIA/nccl with its tags; without it the second is skipped. Nothing of NCCL's is
stored here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parents[2] / "flowcheck" / "trainer" / "include"
TAGS = {
    "v2.23.4-1": (1,), "v2.24.3-1": (1, 2), "v2.25.1-1": (1, 2), "v2.26.2-1": (1, 2, 3), "v2.26.6-1": (1, 2, 3),
    "v2.27.3-1": (1, 2, 3, 4), "v2.27.7-1": (1, 2, 3, 4), "v2.28.3-1": (1, 2, 3, 4, 5), "v2.28.9-1": (1, 2, 3, 4, 5),
    "v2.29.2-1": (1, 2, 3, 4, 5, 6), "v2.29.7-1": (1, 2, 3, 4, 5, 6), "v2.30.3-1": (1, 2, 3, 4, 5, 6),
    "v2.30.7-1": (1, 2, 3, 4, 5, 6),
}
# Offset of each in the event, by interface (1 to 6), from the headers of NCCL 2.23.4 to 2.30.7.
EVENT = {
    "type": (0,) * 6, "parentObj": (8,) * 6, "rank": (16,) * 6,
    "coll.seqNumber": (40, 40, 40, 24, 24, 24), "coll.func": (48, 48, 48, 32, 32, 32),
    "coll.count": (72, 72, 72, 56, 56, 56), "coll.root": (80, 80, 80, 64, 64, 64),
    "coll.datatype": (84, 88, 88, 72, 72, 72), "p2p.func": (40, 40, 40, 24, 24, 24),
    "p2p.datatype": (56, 56, 56, 40, 40, 40), "p2p.count": (64, 64, 64, 48, 48, 48),
    "p2p.peer": (72, 72, 72, 56, 56, 56), "proxyOp.pid": (24,) * 6, "proxyOp.channelId": (28,) * 6,
    "proxyOp.peer": (32,) * 6, "proxyOp.nSteps": (36,) * 6, "proxyOp.chunkSize": (40,) * 6, "proxyOp.isSend": (44,) * 6,
}


def places(version: int, folder: Path, real: str = "") -> dict[str, tuple[int, int]]:
    """member -> (offset, size), of our declarations or of the header `real` in `folder`."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / f"places{version}{'real' if real else ''}"
    defined = [f"-DVERSION={version}", *([f'-DREAL="{real}"', f"-I{folder}"] if real else [])]
    subprocess.run([compiler, "-x", "c++", *defined, f"-I{INCLUDE}", str(HERE / "profiler_places.c"), "-o",
                    str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (int(offset), int(size)) for name, offset, size in (line.split() for line in lines)}


@pytest.mark.parametrize("version", range(1, 7))
def test_members_lie_where_nccl_has_them(version: int, tmp_path: Path) -> None:
    found = places(version, tmp_path)
    assert {name: found[name][0] for name in EVENT} == {name: at[version - 1] for name, at in EVENT.items()}
    assert found["type"][1] == (1 if version < 5 else 8)


def header(clone: str, tag: str, version: int, folder: Path) -> str:
    """The header of NCCL `tag` that has the interface, with what it includes cut down to what it needs."""

    def text(name: str) -> str | None:
        command = ["git", "-C", clone, "show", f"{tag}:src/include/{name}"]
        shown = subprocess.run(command, capture_output=True, text=True)
        return shown.stdout if shown.returncode == 0 else None

    whole = text("nccl_profiler.h")  # up to 2.25
    if whole is not None:
        (folder / "real.h").write_text(whole)
        return "real.h"
    states = "".join(f"typedef int ncclProfilerEventState_v{each}_t;\n" for each in range(1, 7))
    for each in range(1, version + 1):
        part = text(f"plugin/profiler/profiler_v{each}.h")
        assert part is not None
        (folder / f"profiler_v{each}.h").write_text(part)
    (folder / "real.h").write_text(f'{states}#include "profiler_v{version}.h"\n')
    return "real.h"


@pytest.mark.parametrize("tag", TAGS)
def test_nccls_own_headers_agree(tag: str, tmp_path: Path) -> None:
    clone = os.environ.get("FLOWCHECK_NCCL")
    if not clone:
        pytest.skip("FLOWCHECK_NCCL names no clone of NVIDIA/nccl")
    for version in TAGS[tag]:
        assert places(version, tmp_path, header(clone, tag, version, tmp_path)) == places(version, tmp_path)
