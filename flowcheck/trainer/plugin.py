"""Where NCCL's profiler plugin is: built with the installation, or compiled when it is first used.

    plugin_path() -> Path

An installation from sources has compiled it. A wheel of the trainers' side has its source, 600 lines of C that need
libc and nothing else, and the first process that asks for the plugin compiles it, within a second: into
`$XDG_CACHE_HOME/flowcheck` (`~/.cache/flowcheck`), or where that cannot be written into a folder of this user's in the
temporary directory. The file's name has a digest of the source, so that installations do not get each other's; several
processes that compile at once put the same file there. The standard library only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowcheck.errors import EnvironmentProblem

__all__ = ["plugin_path"]

_log = logging.getLogger("flowcheck")
BUILT = Path(__file__).with_name("nccl_profiler.plugin.so")
SOURCE = Path(__file__).parent / "src" / "nccl_profiler.c"
INCLUDE = Path(__file__).parent / "include"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 60  # for a compiler that hangs


def plugin_path() -> Path:
    """Raises EnvironmentProblem if there is none, and none can be made."""
    if BUILT.is_file():
        return BUILT
    try:
        sources = [SOURCE, *sorted(INCLUDE.glob("*.h"))]
        digest = hashlib.sha256(repr((FLAGS, platform.machine())).encode())
        for source in sources:
            digest.update(source.read_bytes())
    except OSError as error:
        raise _problem(f"was not built with this installation, and its source is not there: {error.strerror}", BUILT,
                       "install again") from None
    name = f"nccl_profiler-{digest.hexdigest()[:16]}.plugin.so"
    reasons = []
    for folder in _folders():
        try:
            _make_own(folder)
            path = folder / name
            if not path.is_file():
                _compile(path)
            return path
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    raise _problem(f"cannot be put anywhere: {'; '.join(reasons)}", SOURCE,
                   "XDG_CACHE_HOME: a folder that only this user can write")


def _problem(what: str, where: Path, remedy: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"NCCL's profiler plugin {what}", where=str(where),
                              remedy=f"{remedy}; or give attach() topology= and collectives=")


def _folders() -> Iterator[Path]:
    own = [os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")]
    for cache in [path for path in own if os.path.isabs(path)][:1]:  # a user may have no home
        yield Path(cache) / "flowcheck"
    yield Path(tempfile.gettempdir()) / f"flowcheck-{os.geteuid()}"


def _make_own(folder: Path) -> None:
    """What lies here is loaded into the training process: nobody else may have put it there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("is not a folder that only this user can write")


def _compile(path: Path) -> None:
    named = os.environ.get("CC", "").split() or next(([one] for one in COMPILERS if shutil.which(one)), [])
    if not named or shutil.which(named[0]) is None:
        raise _problem(
            "is compiled when it is first used, and there is no C compiler"
            f" ({' '.join(named) + ', which CC says' if named else ', '.join(COMPILERS)})", SOURCE,
            f"install gcc, or copy {path.name} to {path.parent} from a machine that has one",
        )
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*named, *FLAGS, f"-I{INCLUDE}", str(SOURCE), "-o", scratch], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=SECONDS,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise _problem(f"did not compile with {' '.join(named)}: {lines[0] if lines else done.returncode}", SOURCE,
                           "another compiler in CC, and libc's headers (libc6-dev)")
        os.chmod(scratch, 0o755)
        os.replace(scratch, path)
    except subprocess.TimeoutExpired:
        raise _problem(f"did not compile with {' '.join(named)} within {SECONDS} s", SOURCE,
                       "another compiler in CC") from None
    finally:
        if os.path.exists(scratch):
            os.unlink(scratch)
    _log.info("flowcheck: compiled NCCL's profiler plugin: %s", path)
