"""How the quickest of several ways that give the same bytes is decided, remembered and overridden.

Two things are chosen so, each a Question: how packets are placed (flowcheck/rebuild/calibration.py) and how versions
are stored (updater/tuning.py). An answer has a way for each part of its question. A bad one is slow and nothing else.
No processor is known here by its name; its name only says when a remembered answer is of another machine.

    choice = settle(question, measure)       the setting, or what is remembered, or measured, or the default
    quickest(ways, seconds, rounds)          the rule by which `measure` decides

    SETTING=t0-whole@2048                    every part so
    SETTING=ll=t0@4096,simple=none           these parts so, the rest as without the setting
    SETTING=default | measure                nothing measured, nor remembered | measured, whatever is remembered

What was measured is kept in the user's cache directory, a file for each question. What cannot be read, or is about
something else, is measured again, and what cannot be written at the next start. Neither is an error.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from updater.errors import UpdaterError

__all__ = ["Choice", "Measured", "Question", "SettingError", "cache_file", "key", "processor", "quickest", "settle"]

SCHEMA = "flowcheck-choice/1"
WORTH = 0.95  # of the time of the first way: less is noise
WON = 0.7  # of the rounds
W = TypeVar("W")


class SettingError(UpdaterError):
    """An environment variable holds no such choice. what, where, remedy: as flowcheck shows them."""

    def __init__(self, what: str, setting: str, remedy: str) -> None:
        self.what, self.where, self.remedy = what, f"environment variable {setting}", remedy
        super().__init__(f"{self.where}: {what}; {remedy}")


@dataclass(frozen=True)
class Question(Generic[W]):
    """What is to be chosen. str() of a way is what `parse` reads.

    name: of its cache file. setting: the environment variable. parts: what has a way of its own, by name. default: the
    way that is taken without a measurement. parse: a way from its text; raises SettingError. kernels: instructions in
    use. facts: what a remembered answer has to agree with, in addition to processor and kernels.
    """

    name: str
    setting: str
    parts: Sequence[str]
    default: W
    parse: Callable[[str], W]
    kernels: str
    facts: Mapping[str, object]


@dataclass(frozen=True)
class Measured(Generic[W]):
    """ways: by part. where: words for people, "on huge pages". keep: is it an answer to the question that was asked?"""

    ways: Mapping[str, W]
    where: str
    keep: bool = True


@dataclass(frozen=True)
class Choice(Generic[W]):
    """What this process does. ways: by part. how: why it is that, for people."""

    ways: Mapping[str, W]
    how: str
    kernels: str

    @property
    def text(self) -> str:
        if len(self.ways) == 1:
            return "".join(map(str, self.ways.values()))
        return ", ".join(f"{part}={way}" for part, way in self.ways.items())

    def __str__(self) -> str:
        return f"{self.kernels}, {self.text} ({self.how})"


def settle(
    question: Question[W], measure: Callable[[], Measured[W]], *,
    measuring: bool = True, recall: bool = True, remember: bool = True,
) -> Choice[W]:
    """Decide. measuring: measure where nothing is remembered; else take the default then. recall: use what is
    remembered. remember: write what was measured. Raises SettingError if the setting is not a setting."""
    wanted = os.environ.get(question.setting, "").strip()
    mode = wanted if wanted in ("", "default", "measure") else ""
    given = {} if wanted == mode else _given(question, wanted)
    ways: Mapping[str, W] = dict.fromkeys(question.parts, question.default)
    how = f"{question.setting}=default" if mode else "not measured"
    if len(given) < len(question.parts) and mode != "default":
        known = _read(question) if recall and mode != "measure" else None
        if known is not None:
            ways, how = known, f"measured before: {cache_file(question)}"
        elif measuring or mode == "measure":
            begin = time.perf_counter()
            found = measure()
            ways, how = found.ways, f"measured in {1e3 * (time.perf_counter() - begin):.0f} ms {found.where}"
            if remember and found.keep:
                _write(question, ways)
    if given:
        how = question.setting if len(given) == len(question.parts) else f"{question.setting}, the rest {how}"
    return Choice({**ways, **given}, how, question.kernels)


def quickest(ways: Sequence[W], seconds: Callable[[W], float], rounds: int) -> W:
    """The first way, unless another is clearly quicker, and was in most rounds. seconds: takes one short sample.

    Every round takes a sample of each way, every second round in the opposite order. Ways are compared by the lower
    quartile of their samples: what disturbs a sample nearly always adds to it, so medians follow the disturbance, and
    the least sample may be a lucky one. A way that won rounds no more often than by chance has shown nothing.
    """
    ways = list(dict.fromkeys(ways))
    taken: list[list[float]] = [[0.0] * len(ways) for _ in range(rounds)]
    for number, row in enumerate(taken):
        order = range(len(ways))
        for i in order if number % 2 else reversed(order):
            row[i] = seconds(ways[i])
    quartile = [sorted(column)[rounds // 4] for column in zip(*taken, strict=True)]
    won = [sum(row[i] < row[0] for row in taken) for i in range(len(ways))]
    good = [i for i in range(1, len(ways)) if quartile[i] < WORTH * quartile[0] and won[i] > WON * rounds]
    return ways[min(good, key=quartile.__getitem__, default=0)]


# -- the setting -------------------------------------------------------------------------------------------


def _given(question: Question[W], text: str) -> dict[str, W]:
    found: dict[str, W] = {}
    as_in = f"as in {question.parts[0]}={question.default}"
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        part, equals, way = piece.rpartition("=")
        if way in ("default", "measure"):
            raise SettingError(f"{way!r} is not for one part, nor beside others", question.setting, f"{way} alone")
        if equals and part not in question.parts:
            remedy = f"{', '.join(question.parts)}, {as_in}"
            raise SettingError(f"{part!r} is not one of its parts", question.setting, remedy)
        found.update(dict.fromkeys([part] if equals else question.parts, question.parse(way)))
    if not found:
        raise SettingError(f"{text!r} is not a way for any part", question.setting, f"one for all parts, or {as_in}")
    return found


# -- what is remembered ------------------------------------------------------------------------------------


def processor() -> str:
    """Name, family, model and stepping, as the kernel tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    numbers = [fields[key] for key in ("cpu family", "model", "stepping") if key in fields]
    name = " ".join((fields.get("model name") or platform.machine()).split())
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def cache_file(question: Question[W]) -> Path:
    """Where its answer is kept: {"schema", "processor", "kernels", each of `facts`, "ways": {part: way}}.

    Raises OSError for a user without a home, as of a container, or with a relative one: the folder that happens to be
    the current one is not a cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    if not folder.is_absolute():
        raise OSError(errno.ENOENT, "no home directory", str(folder))
    return folder / "flowcheck" / f"{question.name}.json"


def key(question: Question[W]) -> dict[str, object]:
    """What a remembered answer has to agree with."""
    return {"schema": SCHEMA, "processor": processor(), "kernels": question.kernels, **question.facts}


def _read(question: Question[W]) -> dict[str, W] | None:
    """None: nothing that can be used."""
    asked = key(question)
    try:
        path = cache_file(question)
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            data = json.loads(file.read(1 << 16))
        if {name: data[name] for name in asked} != asked:
            return None
        return {part: question.parse(data["ways"][part]) for part in question.parts}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _write(question: Question[W], ways: Mapping[str, W]) -> None:
    """Aside, then renamed: nobody reads half a file. What a power cut leaves of it is measured again."""
    text = json.dumps({**key(question), "ways": {part: str(way) for part, way in ways.items()}}, indent=1)
    try:
        path = cache_file(question)
        aside = path.parent / f".{path.name}.partial-{os.getpid()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(text + "\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError:
        pass  # measured again at the next start
