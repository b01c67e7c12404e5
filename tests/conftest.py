"""Fixtures that every folder shares. Capabilities decide what is skipped, and the skip says why."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from rich.console import Console

from dataplane import counters
from flowcheck.interrupts import deferred, handled

ROOT = Path(__file__).resolve().parents[1]
CAPTURES = ROOT.parent / "shared" / "captures"
JOBS = ROOT / "tests" / "data" / "jobs"

# No test is a timed test: an example may take as long as a busy machine lets it. The first failing example is shown as
# it was found: making it smaller takes minutes and gigabytes where an example is a whole training, which looks like a
# hang. To have it done: pytest --hypothesis-profile=shrink.
Phase = hypothesis.Phase
hypothesis.settings.register_profile("shrink", deadline=None)
hypothesis.settings.register_profile(
    "untimed", deadline=None, report_multiple_bugs=False, phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
hypothesis.settings.load_profile("untimed")

# No node and no replica of a test measures this machine, or leaves what it measured with the user.
os.environ["FLOWCHECK_PLACING"] = os.environ["FLOWCHECK_UPDATING"] = "default"


# `make test` gives each core a worker of pytest-xdist, and a worker takes whole files. What uses the machine itself
# (namespaces, ports, huge pages, lists of processes) stays on one worker, one test after another: labs, nodes that are
# fed, and so on. xdist begins with what has the most tests: alone, the few that build fuzzers would begin last, and
# everybody would wait for them.
TOGETHER = {
    "tests/attacks": "attacks",
    "tests/lab/test_": "labs", "tests/lab/softroce": "labs",
    "tests/lab/gpu": "labs", "tests/project/test_demo.py": "labs",
    "tests/flowcheck/test_interrupt.py": "labs",
    "tests/dataplane": "ports", "tests/switch_configs": "switches",
}
FED = re.compile(r"\b(start_node|lan)\b")  # tests of a node that gets packets name one of these fixtures

# A test that other processes of a busy machine can disturb is tried twice, and its first failure is shown: decision
# 0039. What is computed is computed once.
DISTURBED = re.compile(r"\b(subprocess|multiprocessing|socket|threading|start_node|lan|serving|fork)\b")
MOST_AGAIN = 3  # tests of a run that may need it: more are no accident, and the run fails


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    disturbed: dict[Path, bool] = {}
    for item in items:
        path = item.path
        if path not in disturbed:
            name = str(path.relative_to(ROOT))
            disturbed[path] = any(map(name.startswith, TOGETHER)) or bool(DISTURBED.search(path.read_text()))
        if disturbed[path]:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried twice: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to whichever worker is free. (loadgroup of xdist 3.8 does nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            if path.startswith("tests/flowcheck/node/") and FED.search((ROOT / path).read_text()):
                return "nodes"
            return next((group for start, group in TOGETHER.items() if path.startswith(start)), path)

    return ByFile(config, log)


# pytest drops the finalizers that are left when one of them is interrupted, and what they would have removed stays.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    with deferred():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    shown = session.config.pluginmanager.get_plugin("terminalreporter")
    if shown is not None and len(shown.stats.get("rerun", [])) > MOST_AGAIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    with deferred():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def terminated() -> Iterator[None]:
    """SIGTERM ends a test run as Ctrl-C does: every fixture takes down what it has made, and the counters of nodes that
    were killed are removed last. A shell's background job ignores Ctrl-C, and so would whatever it starts: here, and in
    all processes that tests start, it is heard."""
    with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
        yield
        counters.sweep()


@pytest.fixture(autouse=True)
def threads_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a thread behind fails: a later test's fork would copy a lock that the thread holds, and the
    child would wait for it without end. What a thread was told to do last may take a moment."""
    before = set(threading.enumerate())
    yield
    if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:
        return  # fixtures of a longer life end what this test has begun, and they come after this one
    end = time.monotonic() + 30
    while left := [one for one in threading.enumerate() if one not in before and _is_ours(one)]:
        assert time.monotonic() < end, f"threads that have not ended: {left}"
        left[0].join(0.1)


def _is_ours(thread: threading.Thread) -> bool:
    """A foreign thread that has once called Python stays on the list for ever (torch's backward pass)."""
    return not isinstance(thread, threading._DummyThread)


@pytest.fixture(scope="session")
def capture() -> Callable[[str], Path]:
    """Path of a shared capture such as "soft-roce/02_nccl_ring2.pcap"; skips if the captures are not here."""

    def find(name: str) -> Path:
        path = CAPTURES / name
        if not path.exists():
            pytest.skip(f"shared capture {name} is not beside this checkout")
        return path

    return find


@pytest.fixture(scope="session")
def eal() -> Iterator[None]:
    """DPDK, started once for this process with enough for every replay of the tests."""
    pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")
    from dataplane.pydpdk.eal import Eal

    with Eal.start(memory_mb=256, huge=False):
        yield


@pytest.fixture
def replayed(eal: None, tmp_path: Path):  # type: ignore[no-untyped-def]
    """replayed(captures, job, **options) -> (report as a dict, why it failed or "", output directory)."""
    from flowcheck.offline.replay import ReplayOptions, replay

    def go(captures: Path | list[Path], job: Path | str, **options: object):  # type: ignore[no-untyped-def]
        files = captures if isinstance(captures, list) else [captures]
        path = JOBS / f"{job}.json" if isinstance(job, str) else job
        out = tmp_path / "out"
        report, failure = replay(ReplayOptions(files, path, out, **options), Console(quiet=True))  # type: ignore[arg-type]
        return report.to_dict(), failure, out

    return go
