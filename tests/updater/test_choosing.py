"""The one rule by which ways are chosen, with samples that a test makes up; what is remembered; the setting."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from updater import choosing, tuning
from updater.choosing import Choice, Measured, Question, SettingError, cache_file, key, processor, quickest, settle

SETTING = "FLOWCHECK_TESTED_WAY"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SETTING, raising=False)
    yield tmp_path


# -- the rule ------------------------------------------------------------------------------------------------


def test_the_first_way_stays_unless_another_is_clearly_quicker() -> None:
    for other, chosen in ((0.94, "b"), (0.96, "a"), (1.0, "a"), (2.0, "a")):
        assert quickest(["a", "b"], {"a": 1.0, "b": other}.__getitem__, 9) == chosen
    assert quickest(["a", "b", "c"], {"a": 1.0, "b": 0.9, "c": 0.8}.__getitem__, 9) == "c"
    assert quickest(["a"], {"a": 1.0}.__getitem__, 9) == "a"
    for unit in (1e-6, 50.0):
        assert quickest(["a", "b"], {"a": unit, "b": 0.9 * unit}.__getitem__, 9) == "b"


ROUNDS: dict[str, tuple[int, Callable[[int], tuple[float, float]], str]] = {  # how many, samples of a and b, which one
    "two lucky samples of a way that is a little slower": (9, lambda n: (1.0, 0.5 if n in (2, 5) else 1.1), "a"),
    "and of one that is quicker by a hundredth": (9, lambda n: (1.0, 0.5 if n in (2, 5) else 0.99), "a"),
    "the better one is disturbed twice, however much": (9, lambda n: (1.0, 90.0 if n in (0, 8) else 0.9), "b"),
    "the first is, which makes nobody better": (9, lambda n: (90.0 if n in (0, 8) else 1.0, 1.0), "a"),
    "the better quartile, and slower in four of nine": (9, lambda n: (1.0, 0.9 if n < 5 else 1.2), "a"),
    "seven of ten are not more than 70 %": (10, lambda n: (1.0, 0.5 if n < 7 else 2.0), "a"),
    "eight are": (10, lambda n: (1.0, 0.5 if n < 8 else 2.0), "b"),
    "95 % of a time are not less than 95 %": (9, lambda n: (1.0, choosing.WORTH), "a"),
    "nobody wins a tie": (9, lambda n: (1.0, 0.5 if n < 5 else 1.0), "a"),
}


@pytest.mark.parametrize("why", ROUNDS)
def test_what_some_rounds_decide(why: str) -> None:
    rounds, samples, chosen = ROUNDS[why]
    left = {"a": iter([samples(n)[0] for n in range(rounds)]), "b": iter([samples(n)[1] for n in range(rounds)])}
    assert quickest(["a", "b"], lambda way: next(left[way]), rounds) == chosen


def test_a_way_that_is_slower_is_not_chosen_on_a_busy_machine() -> None:
    """Half of all samples take up to twice as long. By their medians a wrong one would win one time in six."""
    chance = random.Random(1)
    true = {"a": 1.0, "b": 1.2, "c": 1.3, "d": 1.1, "e": 1.25}

    def seconds(way: str) -> float:
        return true[way] * (chance.uniform(1, 2) if chance.random() < 0.5 else 1)

    chosen = [quickest(list(true), seconds, 25) for _ in range(200)]
    assert chosen == ["a"] * 200


def test_rounds_alternate() -> None:
    asked: list[str] = []

    def seconds(way: str) -> float:
        asked.append(way)
        return 1.0

    quickest(["a", "b", "a", "c"], seconds, 3)
    assert "".join(asked) == "cbaabccba", "each way once a round, and nobody always after the same other"


@given(st.lists(st.floats(1e-6, 1.0), min_size=12, max_size=12), st.integers(1, 4))
def test_what_is_chosen_was_measured(samples: list[float], rounds: int) -> None:
    left = iter(samples)
    assert quickest(["a", "b", "c"], lambda way: next(left), rounds) in ("a", "b", "c")


# -- deciding ------------------------------------------------------------------------------------------------


def parse(text: str) -> str:
    if text not in ("slow", "fast", "odd"):
        raise SettingError(f"{text!r} is not a way", SETTING, "slow, fast or odd")
    return text


def question(parts: tuple[str, ...] = ("left", "right"), **facts: object) -> Question[str]:
    return Question("tested", SETTING, parts, "slow", parse, "avx", {"version": 1, **facts})


class Measure:
    """Finds `fast` for all parts, and counts how often it was asked."""

    def __init__(self, keep: bool = True) -> None:
        self.asked, self.keep = 0, keep

    def __call__(self) -> Measured[str]:
        self.asked += 1
        return Measured({"left": "fast", "right": "fast"}, "on no pages", self.keep)


FAST = {"left": "fast", "right": "fast"}
SLOW = {"left": "slow", "right": "slow"}


def test_what_was_measured_is_remembered() -> None:
    measure = Measure()
    first = settle(question(), measure)
    assert first.ways == FAST and first.how.startswith("measured in ") and first.how.endswith(" ms on no pages")
    again = settle(question(), measure)
    assert again == Choice(FAST, f"measured before: {cache_file(question())}", "avx") and measure.asked == 1
    assert settle(question(), measure, recall=False, remember=False).ways == FAST and measure.asked == 2
    assert settle(question(), measure, measuring=False, recall=False).how == "not measured"
    assert [path.name for path in cache_file(question()).parent.iterdir()] == ["tested.json"]


def test_how_long_it_took_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0])
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: next(times))
    assert settle(question(), Measure()).how == "measured in 2000 ms on no pages"


def test_what_must_not_be_kept_is_not_written() -> None:
    settle(question(), Measure(), remember=False)
    settle(question(), Measure(keep=False))
    assert not cache_file(question()).exists()


def test_without_a_measurement_the_default() -> None:
    assert settle(question(), Measure(), measuring=False) == Choice(SLOW, "not measured", "avx")
    assert not cache_file(question()).exists()


def test_a_choice_says_itself() -> None:
    assert str(Choice(FAST, "why", "avx")) == "avx, left=fast, right=fast (why)"
    assert str(Choice({"all": "fast"}, "why", "avx")) == "avx, fast (why)"


# -- what is remembered --------------------------------------------------------------------------------------


def remembered(**changes: object) -> None:
    path = cache_file(question())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**key(question()), "ways": FAST, **changes}))


def test_the_file_says_what_it_is_about() -> None:
    """Line by line, as people may look at it."""
    settle(question(), Measure())
    about = {"schema": "flowcheck-choice/1", "processor": processor(), "kernels": "avx", "version": 1, "ways": FAST}
    assert cache_file(question()).read_text() == json.dumps(about, indent=1) + "\n"


def test_its_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not/there"))
    settle(question(), Measure())
    assert cache_file(question()).is_file()


def test_a_file_too_large_to_be_one_is_none() -> None:
    """It would be right if it were read to its end."""
    remembered(comment="x" * 60_000)
    assert settle(question(), Measure(), measuring=False).ways == FAST
    remembered(comment="x" * 70_000)
    assert settle(question(), Measure(), measuring=False).ways == SLOW


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu (util-linux) is not installed")
def test_the_processor_is_the_one_that_lscpu_names() -> None:
    said = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in said.splitlines())}
    numbers = [told[key] for key in ("CPU family", "Model", "Stepping") if key in told]
    assert processor() == told["Model name"] + (f" ({'/'.join(numbers)})" if numbers else "")


def test_the_processor_is_the_first_that_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "processor\t: 0\nmodel name\t: Some  CPU: fast\ncpu family\t: 6\nmodel\t\t: 85\nstepping\t: 7\n\n"
    said += "processor\t: 1\nmodel name\t: Another\nstepping\t: 8\n\nprocessor\t: 2\nmodel\t: 86\n\n"
    monkeypatch.setattr(Path, "read_text", lambda path, errors: {"/proc/cpuinfo": said}[str(path)])
    assert processor() == "Some CPU: fast (6/85/7)"
    monkeypatch.setattr(Path, "read_text", lambda path, errors: "Processor\t: none of these\n")
    assert processor() == platform.machine()


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, errors: str) -> str:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert processor() == platform.machine()


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": "another"}, {"version": 2}, {"kernels": "mmx"}, {"schema": "x/2"}, {"ways": {"left": "fast"}},
        {"ways": {"left": "fast", "right": "faster"}}, {"ways": {"left": 7, "right": 7}}, {"ways": []}, {"ways": None},
    ],
)
def test_a_stale_memory_is_none(changes: dict[str, object]) -> None:
    remembered()
    assert settle(question(), Measure(), measuring=False).ways == FAST
    remembered(**changes)
    assert settle(question(), Measure(), measuring=False).ways == SLOW
    assert "measured in" in settle(question(), Measure()).how
    assert "measured before" in settle(question(), Measure(), measuring=False).how, "it was written anew"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 60000, b'{"a": 1' + b" " * 70000])
def test_an_unreadable_memory_is_none(content: bytes) -> None:
    path = cache_file(question())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert settle(question(), Measure(), measuring=False).how == "not measured"


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "flowcheck").write_text("a file where the folder should be")
    assert settle(question(), Measure()).ways == FAST
    assert settle(question(), Measure(), measuring=False).how == "not measured"


def test_a_place_that_is_taken_leaves_nothing_aside() -> None:
    cache_file(question()).mkdir(parents=True)
    assert settle(question(), Measure()).ways == FAST
    assert [path.name for path in cache_file(question()).parent.iterdir()] == ["tested.json"]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user of a container: no HOME and no entry in passwd, where "~" stays "~"; or a HOME that is relative."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "not/absolute")
    for _ in range(2):
        assert settle(question(), Measure()).how.startswith("measured in")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert settle(question(), Measure()).how.startswith("measured in")
    assert not list(tmp_path.iterdir())


def test_a_pipe_in_its_place_is_not_waited_for(cache: Path) -> None:
    """Asked in a process of its own: it would wait for good."""
    path = cache / "flowcheck/updating.json"
    path.parent.mkdir()
    os.mkfifo(path)
    code = "from updater import tuning; print(tuning.settle(measuring=False).how)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(tuning.SETTING, None)
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "not measured\n", done.stderr
    assert tuning.question().name == "updating", "the pipe is where the answer would be"


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file(question()) == tmp_path / ".cache/flowcheck/tested.json"


# -- the setting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left", "right", "how", "asked"),
    [
        ("odd", "odd", "odd", SETTING, 0), ("left=odd", "odd", "fast", f"{SETTING}, the rest measured in ", 1),
        (" left=odd , right=slow,", "odd", "slow", SETTING, 0), ("odd,right=slow", "odd", "slow", SETTING, 0),
        ("left=slow,odd", "odd", "odd", SETTING, 0), ("default", "slow", "slow", f"{SETTING}=default", 0),
        ("measure", "fast", "fast", "measured in ", 1), (" ", "fast", "fast", "measured in ", 1),
    ],
)
def test_the_setting_decides(
    monkeypatch: pytest.MonkeyPatch, text: str, left: str, right: str, how: str, asked: int
) -> None:
    monkeypatch.setenv(SETTING, text)
    measure = Measure()
    chosen = settle(question(), measure)
    assert chosen.ways == {"left": left, "right": right} and measure.asked == asked
    assert chosen.how.startswith(how) if how.endswith(" ") else chosen.how == how


def test_the_rest_may_be_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "left=odd")
    assert settle(question(), Measure(), measuring=False).how == f"{SETTING}, the rest not measured"


def test_the_setting_goes_before_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered()
    monkeypatch.setenv(SETTING, "default")
    assert settle(question(), Measure()).ways == SLOW
    monkeypatch.setenv(SETTING, "left=odd")
    assert settle(question(), Measure(), measuring=False).ways == {"left": "odd", "right": "fast"}
    monkeypatch.setenv(SETTING, "measure")
    measure = Measure()
    assert settle(question(), measure, measuring=False).ways == FAST and measure.asked == 1


@pytest.mark.parametrize(
    "text",
    ["faster", "left=", "up=odd", "left:odd", "left=odd=odd", "default,odd", "=odd", "left=measure", ",", " , "],
)
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SettingError, match=f"environment variable {SETTING}: .* is not") as raised:
        settle(question(), Measure())
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("up=odd", "'up' is not one of its parts", "left, right, as in left=slow"),
        (",", "',' is not a way for any part", "one for all parts, or as in left=slow"),
        ("default,odd", "'default' is not for one part, nor beside others", "default alone"),
        ("left=measure", "'measure' is not for one part, nor beside others", "measure alone"),
    ],
)
def test_a_refusal_says_what_would_do(monkeypatch: pytest.MonkeyPatch, text: str, what: str, remedy: str) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SettingError) as raised:
        settle(question(), Measure())
    assert (raised.value.what, raised.value.remedy) == (what, remedy)
