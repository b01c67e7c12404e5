"""Where a shared library of ours is: built with the installation, or compiled when it is first used.

    Library("NCCL's profiler plugin", built, source, include, remedy).path() -> Path

An installation from sources has compiled it. A wheel of the trainers' side has its source, some hundred lines of C that
need libc and nothing else, and the first process that asks for the library compiles it, within seconds: into
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowcheck.errors import EnvironmentProblem

__all__ = ["FLAGS", "Library"]

_log = logging.getLogger("flowcheck")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 60  # for a compiler that hangs


@dataclass(frozen=True)
class Library:
    """One C file. called: in messages. built: where an installation from sources has put it; source, include: what it
    is compiled from elsewhere. instead: what else can be done, for a remedy. flags: of the compiler."""

    called: str
    built: Path
    source: Path
    include: Path
    instead: str
    flags: Sequence[str] = FLAGS

    def path(self) -> Path:
        """Raises EnvironmentProblem if it is missing and cannot be made."""
        if self.built.is_file():
            return self.built
        try:
            sources = [self.source, *sorted(self.include.glob("*.h"))]
            digest = hashlib.sha256(repr((tuple(self.flags), platform.machine())).encode())
            for source in sources:
                digest.update(source.read_bytes())
        except OSError as error:
            raise self._problem(
                f"was not built with this installation, and its source is not there: {error.strerror}", self.built,
                "install again") from None
        stem, _, suffix = self.built.name.partition(".")
        name = f"{stem}-{digest.hexdigest()[:16]}.{suffix}"
        reasons = []
        for folder in _folders():
            try:
                _make_own(folder)
                path = folder / name
                if not path.is_file():
                    self._compile(path)
                return path
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
        raise self._problem(f"cannot be put anywhere: {'; '.join(reasons)}", self.source,
                            "XDG_CACHE_HOME: a folder that only this user can write")

    def _problem(self, what: str, where: Path, remedy: str) -> EnvironmentProblem:
        return EnvironmentProblem(f"{self.called} {what}", where=str(where), remedy=f"{remedy}; or {self.instead}")

    def _compile(self, path: Path) -> None:
        named = os.environ.get("CC", "").split() or next(([one] for one in COMPILERS if shutil.which(one)), [])
        if not named or shutil.which(named[0]) is None:
            raise self._problem(
                "is compiled when it is first used, and there is no C compiler"
                f" ({' '.join(named) + ', which CC says' if named else ', '.join(COMPILERS)})", self.source,
                f"install gcc, or copy {path.name} to {path.parent} from a machine that has one",
            )
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, suffix=".so")
        os.close(descriptor)
        try:
            done = subprocess.run(
                [*named, *self.flags, f"-I{self.include}", str(self.source), "-o", scratch],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS,
            )
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise self._problem(
                    f"did not compile with {' '.join(named)}: {lines[0] if lines else done.returncode}", self.source,
                    "another compiler in CC, and libc's headers (libc6-dev)")
            os.chmod(scratch, 0o755)
            os.replace(scratch, path)
        except subprocess.TimeoutExpired:
            raise self._problem(f"did not compile with {' '.join(named)} within {SECONDS} s", self.source,
                                "another compiler in CC") from None
        finally:
            if os.path.exists(scratch):
                os.unlink(scratch)
        _log.info("flowcheck: compiled %s: %s", self.called, path)


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
