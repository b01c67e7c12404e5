"""Build script of the DPDK binding: cffi in API mode, run by setup.py (cffi_modules).

Declarations are the plain headers in decl/, in the listed order. The C sources of the dataplane are
compiled into the same extension, so rx loop and binding share one libdpdk.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cffi import FFI

HERE = Path(os.path.abspath(__file__)).parent
ROOT = HERE.parent.parent
DECLARATIONS = ("eal.h", "mempool.h", "ring.h", "ethdev.h", "dmadev.h", "capture.h")
SOURCE = """
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_dev.h>
#include <rte_dmadev.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <rte_ring.h>
#include <rte_version.h>
#include "shim.h"
#include "block.h"
#include "reader.h"
#include "rx.h"
"""
DEBUG = os.environ.get("FLOWCHECK_DEBUG") == "1"


def pkg_config(*arguments: str) -> list[str]:
    run = subprocess.run(["pkg-config", *arguments, "libdpdk"], check=True, capture_output=True, text=True)
    return run.stdout.split()


def library_folders() -> list[str]:
    """Of a DPDK that is not the system's (PKG_CONFIG_PATH). distutils puts /usr/lib before extra_link_args, and
    headers of one version linked with the library of another build without a word."""
    return [flag.removeprefix("-L") for flag in pkg_config("--libs-only-L")]


def relative(*paths: Path) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


ffi = FFI()
for header in DECLARATIONS:
    ffi.cdef((HERE / "decl" / header).read_text())
ffi.set_source(
    "dataplane.pydpdk._dpdk",
    SOURCE,
    sources=relative(HERE / "shim.c", *(ROOT / "dataplane/src").glob("*.c")),
    depends=relative(
        HERE / "shim.h", *(HERE / "decl").glob("*.h"), *(ROOT / "dataplane/include").glob("*.h")
    ),
    include_dirs=["dataplane/include", "dataplane/pydpdk"],
    library_dirs=library_folders(),
    # pkg-config's own -march=corei7 undoes an earlier -march: an own one would have to follow it.
    extra_compile_args=[
        *pkg_config("--cflags"),
        *(["-O1", "-g", "-DFC_DEBUG=1"] if DEBUG else ["-O3"]),
        "-DALLOW_EXPERIMENTAL_API",  # 22.11 still calls all of dmadev that
        "-Wall",
        "-Wextra",
        "-Wno-unused-function",
        "-Wno-unused-parameter",
        "-pthread",
    ],
    extra_link_args=[*pkg_config("--libs"), "-pthread"],
)
