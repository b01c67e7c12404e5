"""Extensions only; metadata is in pyproject.toml.

Every .pyx in the folders of PACKAGES is one extension, with the C sources that PACKAGES names. The
dataplane extension is a cffi module in API mode, built where pkg-config finds libdpdk. NCCL's profiler plugin is a
plain shared object that is not imported; where it cannot be built all else is.
FLOWCHECK_BUILD=parser.machine,dataplane limits a build to the named extensions (development); "none" builds
nothing. FLOWCHECK_DEBUG=1 compiles C assertions, bounds checks and line tracing (coverage of Cython) in; Cython
does not see that the mode has changed, so change it with `build_ext --force`, as the Makefile does.
"""
import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ONLY = {name for name in os.environ.get("FLOWCHECK_BUILD", "").split(",") if name}
DEBUG = os.environ.get("FLOWCHECK_DEBUG") == "1"

WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter"]
OPTIMISE = ["-O1", "-g", "-DFC_DEBUG=1"] if DEBUG else ["-O3"]
MACROS: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if DEBUG:
    MACROS += [("CYTHON_TRACE_NOGIL", "1")]


def wanted(name: str) -> bool:
    return not ONLY or name in ONLY


def c_sources(package: str) -> list[str]:
    """C files that belong to every extension of a package (small; the linker drops what is unused)."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / package / "src").glob("*.c"))


# The kernels of updater/ are written to the rounding: no multiply-add that the source does not name.
EXACT = {"updater": ["-ffp-contract=off"]}

# Folder of .pyx files: libraries, folders of C sources and headers beside its own.
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "parser": (["isal"], []),
    "updater": ([], []),
    "flowcheck/lab/bench": (["isal"], ["parser"]),
    "flowcheck/lab": ([], []),
    "flowcheck/lab/softroce": (["isal"], []),
}


def cython_extensions() -> list[Extension]:
    found = []
    for package, (libraries, others) in PACKAGES.items():
        folders = [package, *others]
        for source in sorted((ROOT / package).glob("*.pyx")):
            name = f"{package.replace('/', '.')}.{source.stem}"
            if not wanted(name):
                continue
            found.append(
                Extension(
                    name,
                    [str(source.relative_to(ROOT)), *(c for folder in folders for c in c_sources(folder))],
                    include_dirs=[
                        *(f"{folder}/include" for folder in folders), "dataplane/include", numpy.get_include(),
                    ],
                    libraries=libraries,
                    define_macros=MACROS,
                    extra_compile_args=[*OPTIMISE, *WARNINGS, *EXACT.get(package, [])],
                    depends=[str(p) for folder in folders for p in (ROOT / folder / "include").glob("*.h")]
                    + [f"dataplane/include/{name}.h" for name in ("lock", "packetref", "tunnel")],
                )
            )
    return found


PLUGIN = "flowcheck.trainer.nccl_profiler"


def nccl_plugin() -> list[Extension]:
    if not wanted(PLUGIN):
        return []
    folder = "flowcheck/trainer"
    return [Extension(
        PLUGIN, [f"{folder}/src/nccl_profiler.c"], include_dirs=[f"{folder}/include"],
        extra_compile_args=["-std=gnu11", *OPTIMISE, *WARNINGS, "-fvisibility=hidden"], optional=True,
        depends=[str(p) for p in (ROOT / folder / "include").glob("*.h")],
    )]


class BuildApart(build_ext):
    """Object files of each extension in a folder of their own: `-j` links one extension while the C files that it
    shares with another are compiled again. The plugin has no Python in it, and a name that is no module's."""

    def build_extension(self, ext: Extension) -> None:
        mine = copy.copy(self)
        mine.build_temp = str(Path(self.build_temp) / ext.name)
        try:
            super(BuildApart, mine).build_extension(ext)
        except Exception:
            if ext.name == PLUGIN:
                print("flowcheck: NCCL's profiler plugin was not built; without it attach() has to be told the calls of"
                      " a job on NCCL")
            raise  # setuptools goes on, with a warning: it is optional

    def get_ext_filename(self, name: str) -> str:
        path = super().get_ext_filename(name)
        if name.split(".")[-1] == PLUGIN.split(".")[-1]:
            return str(Path(path).parent / "nccl_profiler.plugin.so")
        return path


def cffi_modules() -> list[str]:
    if not wanted("dataplane"):
        return []
    try:
        subprocess.run(["pkg-config", "--exists", "libdpdk"], check=True)
    except (OSError, subprocess.CalledProcessError):
        print("flowcheck: libdpdk not found by pkg-config, building without the dataplane")
        return []
    return ["dataplane/pydpdk/_build.py:ffi"]


setup(
    ext_modules=nccl_plugin() + cythonize(
        cython_extensions(),
        language_level=3,
        force="--force" in sys.argv,
        compiler_directives={
            "boundscheck": DEBUG, "wraparound": False, "cdivision": True, "initializedcheck": False,
            "linetrace": DEBUG,
        },
    ),
    cffi_modules=cffi_modules(),
    cmdclass={"build_ext": BuildApart},
)
