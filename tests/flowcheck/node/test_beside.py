"""A process beside the node's own: what becomes of what it says, when it is started anew, how it is ended. Small
programs of their own, or pipes and a clock by hand."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.node.process import child as beside
from flowcheck.node.process.child import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_LINE,
    NICE,
    ChildProcess,
    Lines,
    Program,
    begun,
    orders,
    start,
)
from flowcheck.node.process.lines import Event, Order, Settings, table

from ..hand_node import LONGEST, until
from .pipes import Pipes

ECHO = """
import json, sys
said = json.loads(sys.stdin.readline())
print(json.dumps({"event": "began", "said": said, "safe": sys.flags.safe_path}), flush=True)
for line in sys.stdin:
    print(json.dumps({"event": "order", "line": json.loads(line)}), flush=True)
print(json.dumps({"event": "ends"}))
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{\"event\": \"ends\"}'"\
       ", flush=True)\nwhile True: time.sleep(60)\n"


class Given(Settings):
    a: int
    b: int = 0


class Other(Order):
    a: int = 0
    b: int = 0


class Began(Event):
    kind = "began"
    said: dict[str, Any]
    safe: bool


class Ordered(Event):
    kind = "order"
    line: dict[str, Any]


class Ends(Event):
    kind = "ends"


class One(Event):
    kind, well = "one", True
    name: str
    more: int | None = None
    text: str = ""


GIVEN = Given(cores=(), a=1)
EVENTS = table(Began, Ordered, Ends, One)


class Mine(ChildProcess):
    """told: of each event what it said."""

    def __init__(self, module: str = "m", settings: Settings = GIVEN, needed: bool = False) -> None:
        self.told: list[Any] = []
        self.said: list[str] = []
        self.solved: list[str] = []
        super().__init__(Program(module, "mine", "does it", EVENTS, needed), settings, self._hears)

    def _hears(self, event: str, **fields: Any) -> None:
        if event == "problem":
            self.said.append(fields["why"])
        elif event == "solved":
            self.solved.append(fields["about"])
        else:
            self.told.append((event, fields))

    def until(self, happened: Callable[[], Any]) -> None:
        until(lambda: self.look() or happened())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """program(text) -> the name of a module that is that."""
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def made(text: str) -> str:
        (tmp_path / "beside_a_test.py").write_text(text)
        return "beside_a_test"

    return made


# -- with a process ------------------------------------------------------------------------------------------------


def test_it_has_its_settings_hears_orders_and_ends_with_its_stdin(
    program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "END_SECONDS", LONGEST)  # it ends by itself, however slow the machine is
    at = Mine(program(ECHO))
    with contextlib.closing(at):
        at.until(lambda: at.told)
        assert at.told == [("began", {"said": {"a": 1, "b": 0, "cores": []}, "safe": True})]
        at.order(Other(b=2))
        at.until(lambda: len(at.told) > 1)
        process = at.process
        assert process is not None and os.getsid(process.pid) == process.pid  # Ctrl-C is for the node
    assert at.told[1:] == [("order", {"line": {"b": 2}}), ("ends", {})], "its last words are heard"
    assert process.returncode == 0 and at.said == [] and process.stdin.closed and process.stdout.closed
    at.close()
    at.look()
    assert at.said == [] and at.process is None


def test_one_that_hangs_is_killed(program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "END_SECONDS", 0.05)
    at = Mine(program(DEAF))
    at.until(lambda: at.told)
    process = at.process
    at.close()
    assert process is not None and process.returncode == -signal.SIGKILL and at._left == []


def test_one_that_died_is_started_anew_with_all_orders(
    program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "FIRST_PAUSE", 0.0)
    with contextlib.closing(Mine(program(ECHO))) as at:
        at.until(lambda: at.told)
        at.order(Other(b=2))
        assert at.process is not None
        at.process.kill()
        at.until(lambda: len(at.said) and at.told[-1][0] == "began" and len(at.told) > 1)
        assert at.told[-1][1]["said"] == {"a": 1, "b": 2, "cores": []}
        assert at.said == ["the process that does it ended with status -9; it is started anew in 0 s"]
        assert len(at.solved) == 1, "as soon as the new one has said something"


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_started(program: Callable[[str], str], blocking: bool) -> None:
    process = start(program(ECHO), GIVEN, blocking=blocking)
    assert os.get_blocking(process.stdout.fileno()) is blocking  # type: ignore[union-attr]
    if blocking:
        out, _ = process.communicate(timeout=240)
        assert json.loads(out.splitlines()[0])["said"] == {"a": 1, "b": 0, "cores": []} and process.returncode == 0
    else:
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(240) == 0
        process.stdout.close()  # type: ignore[union-attr]


def test_nobody_waits_for_one_that_reads_nothing(program: Callable[[str], str]) -> None:
    """It has ended before its settings came, and before an order."""
    process = start(program("raise SystemExit(3)"), GIVEN)
    assert process.wait(240) == 3
    beside.write_line(process, Other(b=2))
    beside.let_go(process)


# -- with pipes and a clock ----------------------------------------------------------------------------------------


class Scene:
    """pipes: of the processes that were started, the last one last. fails: why none can be."""

    def __init__(self) -> None:
        self.now, self.fails = 1000.0, None  # type: ignore[var-annotated]
        self.pipes: list[Pipes] = []
        self.given: list[Any] = []

    def start(self, module: str, settings: Settings, files: Any) -> Pipes:
        self.given.append((module, settings))
        if self.fails is not None:
            raise self.fails
        self.pipes.append(Pipes())
        return self.pipes[-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene()
    monkeypatch.setattr(beside, "start", made.start)
    monkeypatch.setattr(beside, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    yield made
    for pipes in made.pipes:
        pipes.close()


def test_each_line_is_told_and_nothing_else(scene: Scene) -> None:
    at = Mine()
    pipes = scene.pipes[0]
    at.look()
    assert at.told == []
    for odd in (b"of a library", b"7", b"[]", b"\xff", b"", b'{"event": "a"}', b'{"event": "one"}', b'{"name": "a"}',
                b"null", b'{"event": ["one"], "name": "a"}'):
        pipes.writes(odd + b"\n")
    pipes.says("one", name="x", more=1, other="of another release")
    pipes.says("ends")
    at.look()
    assert at.told == [("one", {"name": "x", "more": 1, "text": ""}), ("ends", {})] and at.said == []


def test_a_line_that_comes_in_pieces_is_one(scene: Scene) -> None:
    at = Mine()
    data = json.dumps({"event": "one", "name": "x", "text": "y" * (2 * MOST_LINE)}).encode() + b"\n"
    for first in range(0, len(data), 50_000):
        assert at.told == []
        scene.pipes[0].writes(data[first : first + 50_000])
        at.look()
    scene.pipes[0].writes(b'{"event": "one", ')
    at.look()
    scene.pipes[0].writes(b'"name": "z"}\n')
    at.look()
    assert [(said["name"], len(said["text"])) for _, said in at.told] == [("x", 2 * MOST_LINE), ("z", 0)]


def test_all_that_has_come_is_read_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "MOST_LINE", 10)
    at = Mine()
    for number in range(5):
        scene.pipes[0].says("one", name=str(number))
    at.look()
    assert [said["name"] for _, said in at.told] == list("01234")


def test_one_that_ended_is_heard_to_the_end_and_started_anew_after_a_pause(scene: Scene) -> None:
    at = Mine("the.module")
    pipes = scene.pipes[0]
    pipes.says("ends")
    pipes.writes(b"half of a li")
    pipes.ends(75)
    scene.now += 500.0
    at.look()
    assert at.told == [("ends", {})] and at.process is None and pipes.stdin.closed and pipes.stdout.closed
    assert at.said == [f"the process that does it ended with status 75; it is started anew in {FIRST_PAUSE:g} s"]
    scene.now += FIRST_PAUSE - 0.1
    at.look()
    assert len(scene.pipes) == 1
    scene.now += 0.1
    at.look()
    assert len(scene.pipes) == 2 and scene.given == [("the.module", GIVEN)] * 2
    scene.pipes[1].says("ends")
    at.look()
    assert at.solved == ["mine"]
    assert at.told[1:] == [("ends", {})], "half of a line of the other one is not in front of it"


def test_one_that_ends_again_and_again_is_started_less_and_less_often(scene: Scene) -> None:
    at = Mine()
    pauses = []
    for _ in range(9):
        scene.pipes[-1].ends(1)
        at.look()
        began, count = scene.now, len(scene.pipes)
        while len(scene.pipes) == count:
            scene.now += 1.0
            at.look()
        pauses.append(scene.now - began)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0] and pauses[-1] == LONGEST_PAUSE
    assert at.said[1] == "the process that does it ended with status 1; it is started anew in 10 s"
    scene.pipes[-1].says("one", name="it did what it is there for")
    scene.pipes[-1].ends(1)
    at.look()
    assert at.said[-1].endswith("anew in 5 s")


def test_one_that_cannot_be_started_is_said_once_and_tried_again(scene: Scene) -> None:
    scene.fails = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    at = Mine()
    why = "the process that does it cannot be started: {}; it is tried again and again"
    assert at.said == [why.format("Resource temporarily unavailable")] and at.process is None
    at.order(Other(b=2))
    tried = []
    for _ in range(100):
        scene.now += 1.0
        count = len(scene.given)
        at.look()
        if len(scene.given) > count:
            tried.append(scene.now - 1000.0)
    assert tried == [5.0, 15.0, 35.0, 75.0] and len(at.said) == 1
    scene.fails = None
    scene.now += LONGEST_PAUSE
    at.look()
    assert scene.given[-1] == ("m", Given(cores=(), a=1, b=2)) and len(scene.pipes) == 1
    scene.pipes[0].ends(1)
    at.look()
    scene.fails = OSError("of a kind without words")
    scene.now += LONGEST_PAUSE
    at.look()
    assert at.said[2:] == [why.format("of a kind without words")]


def test_an_order_is_told_and_kept(scene: Scene) -> None:
    at = Mine()
    at.order(Other(b=2, a=3))
    assert scene.pipes[0].heard() == [{"b": 2, "a": 3}]
    scene.pipes[0].breaks()
    at.order(Other(b=4))
    scene.pipes[0].ends(1)
    at.look()
    scene.now += FIRST_PAUSE
    at.look()
    assert scene.given[-1] == ("m", Given(cores=(), a=3, b=4)) and len(at.said) == 1


def test_one_that_somebody_waits_for_is_started_at_once_unless_it_has_just_begun(scene: Scene) -> None:
    at = Mine(needed=True)
    scene.now += beside.AGAIN_SECONDS - 1.0
    scene.pipes[0].ends(1)
    at.look()
    assert len(scene.pipes) == 1, "it might end again and again"
    scene.now += 1.0
    at.look()
    assert len(scene.pipes) == 2
    scene.now += beside.AGAIN_SECONDS
    scene.pipes[1].ends(1)
    at.look()
    assert len(scene.pipes) == 3
    assert at.said == ["the process that does it ended with status 1; it is started anew"] * 2


def test_what_it_counts_is_of_its_newest_sign_of_life(scene: Scene) -> None:
    at = Mine()
    for known in (3, 4):
        scene.pipes[0].says("alive", name="", known=known, strangers=0)
    at.look()
    assert at.counts == {"known": 4, "strangers": 0} and at.told == []
    scene.pipes[0].ends(1)
    at.look()
    assert at.counts == {}


def test_what_is_nearly_done_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Mine()
    pipes, slept = scene.pipes[0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        scene.now += seconds
        if len(slept) == 2:
            pipes.says("one", name="x")
        if len(slept) == 3:
            pipes.says("ends")
            pipes.ends()

    monkeypatch.setattr(beside.time, "sleep", sleep)
    at.close()
    assert slept == [0.02] * 3 and [event for event, _ in at.told] == ["one", "ends"] and not pipes.killed
    assert pipes.stdin.closed and pipes.stdout.closed


def test_what_hangs_is_waited_for_so_long_and_killed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Mine()
    began = scene.now
    at.close()
    assert scene.pipes[0].waits == [1.0], "and then not for long"
    assert scene.pipes[0].killed == 1 and beside.END_SECONDS <= scene.now - began < beside.END_SECONDS + 0.1
    assert at._left == [] and scene.pipes[0].stdout.closed
    monkeypatch.setattr(beside, "END_SECONDS", 0.0)
    began, at = scene.now, Mine()
    at.close()
    assert scene.now == began and scene.pipes[1].killed == 1, "no longer than that"


def test_what_the_kernel_holds_is_left_and_looked_after(scene: Scene) -> None:
    """A disk that hangs holds it: the node ends without it, and nobody leaves a zombie."""
    at = Mine()
    pipes = scene.pipes[0]
    pipes.hangs = True
    at.close()
    at.close()
    assert pipes.killed == 1 and at._left == [pipes]
    scene.now -= 1000.0
    at.look()
    assert at._left == [pipes]
    pipes.status = -9
    at.look()
    assert at._left == []


def test_one_that_has_gone_already_is_let_go(scene: Scene) -> None:
    at = Mine()
    pipes = scene.pipes[0]
    pipes.stdin.write(b"x")  # which cannot be written any more
    pipes.breaks()
    pipes.ends(1)
    at.close()
    assert not pipes.killed and pipes.stdin.closed and pipes.stdout.closed and at.said == []


# -- in the process itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "settings", "did"), [
    (b"", None, ["little"]),
    (b'{"cores": [1, 2], "a": 3}\n{"b": 4}\n', Given(cores=(1, 2), a=3), ["little", ("nice", NICE), (0, (1, 2))]),
    (b'{"cores": [], "a": 1}\n', GIVEN, ["little", ("nice", NICE)]),
])
def test_a_process_begins(
    monkeypatch: pytest.MonkeyPatch, line: bytes, settings: Given | None, did: list[Any]
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line)))
    monkeypatch.setattr(beside, "keep_little", lambda: done.append("little"))
    monkeypatch.setattr(beside.os, "nice", lambda number: done.append(("nice", number)))
    monkeypatch.setattr(beside.os, "sched_setaffinity", lambda *given: done.append(given))
    assert begun(Given) == settings and done == did
    assert list(orders(Other)) == ([Other(b=4)] if b"4" in line else [])


class Out(io.StringIO):
    flushed = 0

    def flush(self) -> None:
        self.flushed = len(self.getvalue())


def test_what_it_says_is_a_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    out, say = Out(), Lines(EVENTS)
    monkeypatch.setattr(sys, "stdout", out)
    say("one", name="x", more=3)
    assert json.loads(out.getvalue()) == {"event": "one", "name": "x", "more": 3, "text": ""}
    assert out.getvalue().endswith("}\n") and out.flushed == len(out.getvalue())
    say("ends")
    assert out.getvalue().count("\n") == 2


@pytest.mark.parametrize(("event", "fields"), [("another", {}), ("one", {}), ("one", {"name": 3})])
def test_what_its_node_could_not_read_is_not_said(
    monkeypatch: pytest.MonkeyPatch, event: str, fields: dict[str, Any]
) -> None:
    out = Out()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises((KeyError, ValueError)):
        Lines(EVENTS)(event, **fields)
    assert out.getvalue() == ""


def test_without_a_node_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    ended: list[int] = []
    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(beside.os, "_exit", ended.append)
    Lines(EVENTS)("ends")
    assert ended == [0]


def test_the_words_of_a_real_process(program: Callable[[str], str]) -> None:
    """The two together: settings in, a line out, and no more when the node has gone."""
    text = ("from flowcheck.node.process.child import Lines\nfrom flowcheck.node.process.lines import Problem, table\n"
            "say = Lines(table(Problem))\nwhile True: say('problem', why='w')\n")
    process = subprocess.Popen([sys.executable, "-P", "-m", program(text)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "problem", "name": "", "why": "w"}
    process.stdout.close()
    assert process.wait(240) == 0
