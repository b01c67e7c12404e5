"""Extensions only; metadata is in pyproject.toml.

Every .pyx in the folders of PACKAGES is one extension, with the C sources that PACKAGES names. The
dataplane extension is a cffi module in API mode, built where pkg-config finds libdpdk. NCCL's profiler plugin and the
trainers' checksums are plain shared objects, and their boundaries one that is loaded by its path; where they cannot
be built all else is.
FLOWCHECK_BUILD=parser.machine,dataplane limits a build to the named extensions (development); "none" builds
nothing. "trainer" builds no extension either, and leaves out what only nodes and captures use: `make wheel`, for
training environments. The lab is in place in a checkout and in no installation but one of its own, flowcheck-lab, which
"lab" builds. FLOWCHECK_DEBUG=1 compiles C assertions, bounds checks and line tracing (coverage of Cython)
in; Cython does not see that the mode has changed, so change it with `build_ext --force`, as the Makefile does.
"""
import atexit
import copy
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ONLY = {name for name in os.environ.get("FLOWCHECK_BUILD", "").split(",") if name}
DEBUG = os.environ.get("FLOWCHECK_DEBUG") == "1"
TRAINER = "trainer" in ONLY
LAB = {"lab"} == ONLY

WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter"]
OPTIMISE = ["-O1", "-g", "-DFC_DEBUG=1"] if DEBUG else ["-O3"]
MACROS: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if DEBUG:
    MACROS += [("CYTHON_TRACE_NOGIL", "1")]


def wanted(name: str) -> bool:
    return not ONLY or name in ONLY or (LAB and name.startswith("lab."))


def c_sources(package: str) -> list[str]:
    """C files that belong to every extension of a package (small; the linker drops what is unused)."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / package / "src").glob("*.c"))


# The kernels of updater/ are written to the rounding: no multiply-add that the source does not name.
EXACT = {"updater": ["-ffp-contract=off"]}

# Folder of .pyx files: libraries, folders of C sources and headers beside its own.
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "parser": (["isal"], []),
    "updater": ([], ["flowcheck/control"]),
    "flowcheck/checkpoint/coding": (["isal"], []),
    "lab/bench": (["isal"], ["parser"]),
    "lab/network": ([], []),
    "lab/softroce": (["isal"], []),
}


def cython_extensions() -> list[Extension]:
    import numpy

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


# Shared objects that nobody imports by name, and the names of their files: those are no modules'. Only the last one has
# Python in it.
LIBRARIES = {
    "flowcheck.trainer.nccl_profiler": ("nccl_profiler.plugin.so", "NCCL's profiler plugin was not built; without it"
                                        " attach() has to be told the calls of a job on NCCL"),
    "flowcheck.control.sums": ("sums.library.so", "trainers' checksums were not built; torch forms them, and slowly"),
    "flowcheck.trainer.boundary": (f"boundary.library{sysconfig.get_config_var('EXT_SUFFIX')}", "trainers' boundaries"
                                   " were not built; Python looks at them, and slowly"),
}


def libraries() -> list[Extension]:
    """One of each name's C file; it is compiled elsewhere by flowcheck/control/compiled.py in the same way."""
    return [Extension(
        name, [f"{folder}/src/{stem}.c"], include_dirs=[f"{folder}/include"],
        extra_compile_args=["-std=gnu11", *OPTIMISE, *WARNINGS, "-fvisibility=hidden"], optional=True,
        depends=[str(p) for p in (ROOT / folder / "include").glob("*.h")],
    ) for name in LIBRARIES if wanted(name)
        for folder, stem in [(name.rpartition(".")[0].replace(".", "/"), name.rpartition(".")[2])]]


class BuildApart(build_ext):
    """Object files of each extension in a folder of their own: `-j` links one extension while the C files that it
    shares with another are compiled again. Libraries have names that are no modules'."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not (self.inplace or self.editable_mode or LAB):
            self.extensions = [one for one in self.extensions if not one.name.startswith("lab.")]

    def build_extension(self, ext: Extension) -> None:
        mine = copy.copy(self)
        mine.build_temp = str(Path(self.build_temp) / ext.name)
        try:
            super(BuildApart, mine).build_extension(ext)
        except Exception:
            if ext.name in LIBRARIES:
                print(f"flowcheck: {LIBRARIES[ext.name][1]}")
            raise  # setuptools goes on, with a warning: it is optional

    def get_ext_filename(self, name: str) -> str:
        path = super().get_ext_filename(name)
        found = [file for library, (file, _) in LIBRARIES.items() if name.split(".")[-1] == library.split(".")[-1]]
        return str(Path(path).parent / found[0]) if found else path


def cffi_modules() -> list[str]:
    if not wanted("dataplane"):
        return []
    try:
        subprocess.run(["pkg-config", "--exists", "libdpdk"], check=True)
    except (OSError, subprocess.CalledProcessError):
        print("flowcheck: libdpdk not found by pkg-config, building without the dataplane")
        return []
    return ["dataplane/pydpdk/_build.py:ffi"]


def compiled() -> list[Extension]:
    from Cython.Build import cythonize

    return libraries() + cythonize(
        cython_extensions(),
        language_level=3,
        force="--force" in sys.argv,
        compiler_directives={
            "boundscheck": DEBUG, "wraparound": False, "cdivision": True, "initializedcheck": False,
            "linetrace": DEBUG,
        },
    )


# The trainers' side: rooms of flowcheck/, and modules beside them that only commands use.
ROOMS = (
    "ask", "checkpoint", "control", "job", "trainer", "trainer.connection", "trainer.describe", "trainer.nccl",
    "trainer.feed", "trainer.log", "trainer.recover",
)
COMMANDS = ("cli", "tables")


class Apart(Distribution):
    """A part of it, built in a folder of its own: setuptools takes into a wheel what it finds in build/, from whatever
    build that is."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        scratch = tempfile.mkdtemp(prefix="flowcheck-build-")
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        self.get_option_dict("build")["build_base"] = (__file__, scratch)
        self.get_option_dict("egg_info").setdefault("egg_base", (__file__, scratch))
        self.metadata.extras_require = {}


class TrainerSide(Apart):
    """Without packages, commands and extras that it would not be whole with."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        self.packages = ["flowcheck", *(f"flowcheck.{room}" for room in ROOMS)]
        # They are compiled where they are first used: flowcheck/control/compiled.py.
        self.package_data = {f"flowcheck.{room}": ["src/*.c", "include/*.h"] for room in ("control", "trainer")}
        self.entry_points = {"console_scripts": ["flowcheck = flowcheck.__main__:main"]}  # it says what is missing


class LabSide(Apart):
    """The lab alone, for an environment that has the rest."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        self.metadata.name = "flowcheck-lab"
        self.install_requires = self.metadata.install_requires = ["flowcheck[node]"]
        self.packages = find_packages(include=["lab*"], exclude=["*.include*", "*.src*"])
        self.package_data, self.entry_points = {}, {}


class TrainerModules(build_py):
    def find_package_modules(self, package: str, directory: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, directory)
        return [one for one in found if package != "flowcheck" or one[1] not in COMMANDS]


if TRAINER:
    setup(distclass=TrainerSide, cmdclass={"build_py": TrainerModules})
elif LAB:
    setup(distclass=LabSide, ext_modules=compiled(), cmdclass={"build_ext": BuildApart})
else:
    setup(ext_modules=compiled(), cffi_modules=cffi_modules(), cmdclass={"build_ext": BuildApart})
