"""Builds the fuzz targets below build/fuzz: extensions and programs with coverage, ASan and UBSan.

    python fuzz/build.py          needs clang 14 or newer with its runtime (Debian: clang-14 libclang-rt-14-dev)

    build/fuzz/site/...           the packages as they are imported, symbolic links but for the compiled modules
    build/fuzz/fuzz_host          libFuzzer with Python inside (host.c), for the targets in targets/
    build/fuzz/fuzz_decoder       libFuzzer on the C decoder (decoder.c)

Limits of tables are made small (SMALL), so that an input of a few hundred packets reaches and overflows them.
A file is compiled again when the text of anything that can reach it has changed (by hash, not by time: another
build may run beside this one). Two compilers at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "fuzz"
SITE = OUT / "site"
PACKAGES = ("parser", "dataplane", "flowcheck")
#: parser's modules that meet foreign bytes; of the others the ordinary extensions are taken (`make build`).
CYTHON_MODULES = ("arenas", "machine", "observer")
#: Pure Python that is compiled too: libFuzzer sees the branches of compiled code only.
PYTHON_MODULES = (
    "dataplane/capturefile.py", "dataplane/pcapfile.py", "dataplane/pcapng.py", "flowcheck/learning/bootstrap.py",
    "flowcheck/control/protocol.py", "flowcheck/control/link.py", "flowcheck/control/messages.py",
    "flowcheck/control/message_fields.py",
)
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMMON = ["-g1", "-O1", "-fno-omit-frame-pointer", "-DFC_DEBUG=1", "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION", "-w"]
# Of what Cython makes. Its own headers add 0 to null pointers. Optimising it takes five times as long as all the rest,
# for a fifth to a third more inputs a second.
GENERATED = ["-fno-sanitize=pointer-overflow", "-O0"]
# clang does not know GCC's pragma for a file's instruction set.
TARGET_PRAGMA = re.compile(r'^#pragma GCC target\("([\w.,]+)"\)', re.MULTILINE)
#: Limits by file: nothing else in the sources is changed.
SMALL = {
    "observer.pxd": {
        "FLOWS_MAX": 8, "COUNTED_MAX": 8, "STARTS_MAX": 256, "STARTS_PER_FLOW": 64, "PIECES_MAX": 64,
        "TCP_FLOW_BYTES": 4096, "POOL_MAX": 1 << 16,
    },
}
SMALL_C = [
    "-DFC_WINDOW=16", "-DFC_SEEN_WORDS=8", "-DFC_SIDE_PACKETS=32", "-DFC_LOG_ENTRIES=16", "-DFC_LOSS_ENTRIES=64",
    "-DFC_LATE_ENTRIES=64", "-DFC_TALLY_SLOTS=4", "-DFC_REGIONS=8", "-DFC_HOLES_MAX=16",
]


class BuildError(RuntimeError):
    """What is missing or did not compile, and the remedy."""


@dataclass
class Module:
    """A Cython module: dotted name, source, C files and libraries linked into it."""

    name: str
    source: Path
    c: list[Path] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)


def compiler() -> str:
    """Path of a clang that has libFuzzer. Raises BuildError."""
    for name in ("clang", *(f"clang-{n}" for n in range(22, 13, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        asked = [path, "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        resource = subprocess.run([path, "-print-resource-dir"], capture_output=True, text=True, check=True)
        if Path(found).is_file() or any(Path(resource.stdout.strip()).rglob("libclang_rt.fuzzer*.a")):
            return path
    raise BuildError("no clang with libFuzzer here\n  remedy: apt-get install clang-14 libclang-rt-14-dev")


def modules() -> list[Module]:
    c = sorted((ROOT / "parser" / "src").glob("*.c"))
    found = [Module(f"parser.{n}", OUT / "src" / "parser" / f"{n}.pyx", c, ["isal"]) for n in CYTHON_MODULES]
    for name in PYTHON_MODULES:
        if (ROOT / name).exists():
            found.append(Module(name.removesuffix(".py").replace("/", "."), ROOT / name))
    for p in sorted((ROOT / "fuzz" / "targets").glob("*.pyx")):
        found.append(Module(f"targets.{p.stem}", p, [*c] if p.stem == "sequence" else [], ["isal", "pcap"]))
    return found


def build() -> None:
    """Bring everything up to date. Raises BuildError."""
    import numpy

    clang = compiler()
    _sources()
    lay_out()
    include = [f"-I{ROOT / d}" for d in ("parser/include", "dataplane/include")]
    include += [f"-I{numpy.get_include()}", f"-I{sysconfig.get_path('include')}"]
    shared = _digest([*ROOT.glob("*/include/*.h"), *OUT.glob("src/parser/*.px[di]"), Path(__file__)])
    c = sorted((ROOT / "parser" / "src").glob("*.c"))
    for source in c:
        _object(clang, source, include)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(_extension, clang, module, include, shared) for module in modules()]:
            done.result()
    _program(clang, "fuzz_decoder", [ROOT / "fuzz" / "decoder.c", *c], include, ["-lisal"], shared)
    version = sysconfig.get_config_var("LDVERSION")
    python = ["-rdynamic", f"-L{sysconfig.get_config_var('LIBDIR')}", f"-lpython{version}"]
    _program(clang, "fuzz_host", [ROOT / "fuzz" / "host.c"], include, python, shared)


def _extension(clang: str, module: Module, include: list[str], shared: str) -> None:
    target, digest = SITE / (module.name.replace(".", "/") + ".so"), shared + _digest([module.source, *module.c])
    if not _stale(target, digest):
        return
    generated = OUT / "c" / f"{module.name}.c"
    _cythonize(module, generated)
    objects = [_object(clang, source, include) for source in [generated, *module.c]]
    libraries = [f"-l{name}" for name in module.libraries]
    _run([clang, "-shared", *SANITIZE, *map(str, objects), *libraries, "-o", str(target)])
    _done(target, digest)


def _sources() -> None:
    """Copies of parser's Cython files with the limits of SMALL."""
    folder = OUT / "src" / "parser"
    folder.mkdir(parents=True, exist_ok=True)
    found = (ROOT / "parser").iterdir()
    sources = [p for p in found if p.suffix in (".pyx", ".pxd", ".pxi") or p.name == "__init__.py"]
    for path in folder.iterdir():
        if path.name not in {source.name for source in sources}:
            path.unlink()
    for source in sources:
        text = source.read_text()
        for name, value in SMALL.get(source.name, {}).items():
            text, count = re.subn(rf"^(    {name} = )[^#\n]*?( *)(#|$)", rf"\g<1>{value} \3", text, flags=re.MULTILINE)
            if count != 1:
                raise BuildError(f"{source}: no limit {name} to be made small\n  remedy: correct SMALL in {__file__}")
        copy = folder / source.name
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


def lay_out() -> None:
    """site/: links to the packages' files, without what is compiled there."""
    compiled = {module.name for module in modules()}
    wanted = set()
    for package, source in [*((p, ROOT / p) for p in PACKAGES), ("targets", ROOT / "fuzz" / "targets")]:
        for path in source.rglob("*"):
            link = SITE / package / path.relative_to(source)
            name = ".".join((package, *path.relative_to(source).with_name(path.name.partition(".")[0]).parts))
            if path.is_dir() or "__pycache__" in path.parts or name in compiled:
                continue
            wanted.add(link)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink() or link.readlink() != path:
                link.unlink(missing_ok=True)
                link.symlink_to(path)
    for link in SITE.rglob("*"):
        if link.is_symlink() and link not in wanted:
            link.unlink()


def _cythonize(module: Module, generated: Path) -> None:
    """In a process of its own: Cython's compiler has global state, and two extensions are made at a time."""
    generated.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cython", "-3", "--module-name", module.name, "-o", str(generated)]
    if module.source.suffix == ".pyx":  # as in setup.py
        for name, value in (("wraparound", 0), ("cdivision", 1), ("initializedcheck", 0), ("boundscheck", 0)):
            command += ["-X", f"{name}={bool(value)}"]
    _run([*command, "-I", str(OUT / "src"), "-I", str(ROOT / "fuzz"), str(module.source)])


def _object(clang: str, source: Path, include: list[str]) -> Path:
    pragma = TARGET_PRAGMA.search(source.read_text())
    extra = [f"-m{name}" for name in pragma[1].split(",")] if pragma else []
    if source.parent == OUT / "c":
        extra = GENERATED
    flags = ["-c", "-fPIC", "-fsanitize=fuzzer-no-link", *SANITIZE, *COMMON, *SMALL_C, *extra]
    command = [clang, *flags, *include, str(source)]
    headers = [p for i in include[:2] for p in Path(i[2:]).glob("*.h")]
    target = OUT / "o" / f"{source.stem}.o"
    digest = _digest([source, *headers]) + repr(command)
    if _stale(target, digest):
        target.parent.mkdir(parents=True, exist_ok=True)
        _run([*command, "-o", str(target)])
        _done(target, digest)
    return target


def _program(clang: str, name: str, c: list[Path], include: list[str], link: list[str], shared: str) -> None:
    target, digest = OUT / name, shared + _digest(c)
    if not _stale(target, digest):
        return
    objects = [str(_object(clang, source, include)) for source in c]
    _run([clang, "-fsanitize=fuzzer", *SANITIZE, *objects, *link, "-o", str(target)])
    _done(target, digest)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def _digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(str(path).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _stale(target: Path, digest: str) -> bool:
    note = target.with_name(target.name + ".digest")
    return not target.exists() or not note.exists() or note.read_text() != digest


def _done(target: Path, digest: str) -> None:
    target.with_name(target.name + ".digest").write_text(digest)


def environment(target: str) -> dict[str, str]:
    """Variables for a run of fuzz_host."""
    return {
        **os.environ,
        "FUZZ_TARGET": target,
        "FUZZ_PATH": f"{SITE}:{ROOT}",
        "FUZZ_PYTHON": sys.executable,
        # Python keeps what it has interned; numpy has its own allocator for small arrays.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_abort=1:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"fuzz/build.py: {error}")
