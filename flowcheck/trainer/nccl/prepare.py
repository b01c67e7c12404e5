"""What NCCL and torch have to be set to before the first communicator, so that `attach` knows what they do.

    prepared = flowcheck.prepare()              before init_process_group, in every rank
    python -m flowcheck.run script.py ...       the same around a whole script (flowcheck/run.py)

Set in this process's environment, and only where it is unset:

    NCCL_PROFILER_PLUGIN        FlowCheck's profiler plugin: NCCL's calls and choices
    NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET,ENV,GRAPH, NCCL_DEBUG_FILE=a file of this process's own
                                all three or none: what the user has NCCL print goes where it went
    TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE
                                torch's flight recorder, by its new and its old name

What the user has set stays, in the environment or in NCCL's files. Where that leaves out something that FlowCheck
needs, `Prepared` and the logger "flowcheck" say what and why. Nothing raises or asks another machine, and nothing but
the compiler is waited for, where the plugin is first used (plugin.py).
FLOWCHECK_PREPARED names what a parent process has set, so that a child's own `prepare` takes it for its own. The
standard library only.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field

from flowcheck.errors import FlowcheckError
from flowcheck.trainer.nccl.flight_recorder import BUFFER_VARIABLES
from flowcheck.trainer.nccl.profiler import Plugin
from flowcheck.trainer.nccl.profiler_calls import History

__all__ = ["Prepared", "prepare", "prepared"]

_log = logging.getLogger("flowcheck")
PLUGIN, MARK = "NCCL_PROFILER_PLUGIN", "FLOWCHECK_PREPARED"
LEVEL, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
WANTED = ("INIT", "NET", "ENV", "GRAPH")
SYSTEM_FILE = "/etc/nccl.conf"
FILE_MAX = 1 << 16
ENTRIES = "4000"  # of the flight recorder: all calls from the start until the job is known


@dataclass(frozen=True)
class Prepared:
    """What `prepare` has done in this process.

    set: variables that it set, with their values. kept: those that were set already, and stay. problems: what is
        missing for it, one sentence each. log: the path of NCCL's log of this process, "" if none can be read.
    history: NCCL's calls as the plugin sees them; None without the plugin.
    """

    set: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    log: str = ""
    history: History | None = None

    def __str__(self) -> str:
        lines = [f"{name}={value}" for name, value in self.set.items()]
        lines += [f"{name}={value} (yours, kept)" for name, value in self.kept.items()]
        return "\n".join([*lines, *self.problems])


_done: tuple[int, Prepared] | None = None  # (pid, what this process has)


def prepared() -> Prepared | None:
    """What `prepare` has done in this process; None if it has not been called here."""
    return _done[1] if _done is not None and _done[0] == os.getpid() else None


def prepare() -> Prepared:
    """Set what is needed, before the first communicator; the second call changes nothing. Never raises."""
    global _done
    before = prepared()
    if before is not None:
        return before
    try:
        made = _Preparation().run()
    except Exception as error:  # whatever it is, training goes on without us
        _log.warning("flowcheck: not prepared: %s", error, exc_info=error)
        made = Prepared(problems=(f"not prepared: {type(error).__name__}: {error}",))
    _done = (os.getpid(), made)
    for name, value in made.set.items():
        _log.info("flowcheck: set %s=%s", name, value)
    for problem in made.problems:
        _log.warning("flowcheck: %s", problem)
    return made


class _Preparation:
    def __init__(self) -> None:
        self._ours = set(os.environ.get(MARK, "").split(","))  # a parent's prepare has set these
        self._configured = _configured()
        self._set: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._problems: list[str] = []

    def run(self) -> Prepared:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self._problems.append(
                "prepare() came after init_process_group: NCCL may have read its environment already"
            )
        history = self._plugin()
        log = self._debug()
        self._recorder()
        os.environ[MARK] = ",".join(sorted({*self._set, *self._ours} - {""}))
        return Prepared(self._set, self._kept, tuple(self._problems), log, history)

    def _theirs(self, name: str) -> str | None:
        """The value that the user has set, None if it is unset, empty or ours. NCCL takes from its files what the
        environment does not have."""
        value = os.environ.get(name, "")
        if value:
            return value if name not in self._ours else None
        return self._configured.get(name)

    def _put(self, name: str, value: str) -> None:
        os.environ[name] = self._set[name] = value

    def _keep(self, name: str, value: str, problem: str = "") -> None:
        self._kept[name] = value
        if problem:
            self._problems.append(f"{name}={value} stays: {problem}")

    def _plugin(self) -> History | None:
        theirs = self._theirs(PLUGIN)
        try:
            plugin = Plugin()
        except FlowcheckError as error:
            self._problems.append(f"NCCL's calls are not seen: {error.message()}")
            return None
        if theirs is not None and os.path.realpath(theirs) != os.path.realpath(plugin.path):
            self._keep(PLUGIN, theirs, "NCCL loads one profiler plugin, so its calls are not seen; attach needs"
                                       " collectives=")
            return None
        if theirs is None:
            self._put(PLUGIN, plugin.path)
        else:
            self._keep(PLUGIN, theirs)
        return History(plugin)

    def _debug(self) -> str:
        """The path of NCCL's log of this process, or ""."""
        theirs = {name: value for name in (LEVEL, SUBSYSTEMS, FILE) if (value := self._theirs(name)) is not None}
        level = theirs.get(LEVEL, "")
        inherited = os.environ.get(FILE, "") if FILE in self._ours else ""
        if not theirs and os.path.isdir(os.path.dirname(_expanded(inherited))):
            return _expanded(inherited)  # a parent's directory, which goes with the parent
        if not theirs:
            directory = tempfile.mkdtemp(prefix="flowcheck-nccl-")
            atexit.register(_remove, directory, os.getpid())
            self._put(LEVEL, "INFO")
            self._put(SUBSYSTEMS, ",".join(WANTED))
            self._put(FILE, directory.replace("%", "%%") + "/%p.log")
            return os.path.join(directory, f"{os.getpid()}.log")
        for name, value in theirs.items():
            self._keep(name, value)
        if level.upper() not in ("INFO", "TRACE"):
            self._problems.append(
                f"{LEVEL}={level or '(unset)'} beside {', '.join(theirs)} stays: NCCL's log is not read; leave out"
                f" {LEVEL}, {SUBSYSTEMS} and {FILE}, or {LEVEL}=INFO"
            )
            return ""
        missing = _missing(theirs.get(SUBSYSTEMS, ""))
        if missing:
            self._problems.append(
                f"{SUBSYSTEMS}={theirs.get(SUBSYSTEMS, '(unset)')} stays: {', '.join(missing)} of NCCL's log"
                f" {'is' if len(missing) == 1 else 'are'} missing; {SUBSYSTEMS}={','.join(WANTED)}"
            )
        path = _expanded(theirs.get(FILE, ""))
        if not path:
            self._problems.append(
                f"{FILE}={theirs.get(FILE, '(unset)')} stays: it is no file of this process alone, so NCCL's log is"
                f" not read; {FILE}=/tmp/nccl.%p.log"
            )
        return path

    def _recorder(self) -> None:
        theirs = {name: value for name in BUFFER_VARIABLES if (value := self._theirs(name)) is not None}
        for name, value in theirs.items():
            self._keep(name, value, "torch records no calls, to hold against NCCL's" if value == "0" else "")
        if not theirs:
            for name in BUFFER_VARIABLES:
                self._put(name, ENTRIES)


def _configured() -> dict[str, str]:
    """What NCCL's own files set (src/misc/param.cc): NCCL_CONF_FILE or ~/.nccl.conf, then /etc/nccl.conf."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found: dict[str, str] = {}
    for path in (own, SYSTEM_FILE):
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                text = stream.read(FILE_MAX)
        except OSError:
            continue
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                found.setdefault(name, value)
    return found


def _missing(subsystems: str) -> list[str]:
    """What NCCL_DEBUG_SUBSYS leaves out of what is needed (src/debug.cc); unset: INIT, BOOTSTRAP and ENV."""
    if not subsystems:
        return ["NET", "GRAPH"]
    names = {name.strip().upper() for name in subsystems.removeprefix("^").split(",")}
    there = names if not subsystems.startswith("^") else {*WANTED} - names
    if "ALL" in names:
        there = set() if subsystems.startswith("^") else {*WANTED}
    return [name for name in WANTED if name not in there]


def _expanded(file: str) -> str:
    """The name that NCCL makes of NCCL_DEBUG_FILE for this process, "" if several processes write there: %p is the
    pid, %h the host, %% one %."""
    out, per_process, rest = "", False, iter(file)
    for letter in rest:
        if letter != "%":
            out += letter
            continue
        what = next(rest, "")
        per_process |= what == "p"
        out += {"p": str(os.getpid()), "h": os.uname().nodename.partition(".")[0], "%": "%"}.get(what, f"%{what}")
    return out if per_process else ""


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:  # not in a child that was forked
        shutil.rmtree(directory, ignore_errors=True)
