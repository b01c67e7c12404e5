"""Logs of several starts of a job at one node: none is another's, and none goes before there is a newer one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import Base, BaseWanted
from flowcheck.control.start import Start, start_text
from flowcheck.node.versions.journal.folders import folders_in
from flowcheck.node.versions.journal.log_folder import About
from flowcheck.node.versions.journal.log_shelf import LogShelf, logs_here
from flowcheck.node.versions.journal.logbook import LogBook
from flowcheck.node.versions.starts import Coming, epoch_for
from flowcheck.rebuild.version.events import Event

from .kept_scene import Kept
from .log_scene import LoggedJob


class LogKept(Kept):
    """A job of which a log is kept. What a base has is no matter here: it is the trainer's own."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **more: Any) -> None:
        super().__init__(patch, folder, log=True, **more)
        self.next_number = more.get("first", 5)
        keeper, job = self.versions.journal.keeper, self.job
        assert keeper is not None
        about = About(job.run_id, job.epoch, "", more.get("start", ""), keeper.job.first, keeper.job.plan,
                      keeper.job.body)
        self.asked = list[BaseWanted]()
        self.book = LogBook(keeper, about, self.asked.append, self._say)
        self.until(lambda: bool(self.events("journal")))
        self.book.look(None)

    def _note(self, event: Event) -> None:
        """There is no replica to look at."""

    def base(self) -> None:
        """Of the boundary before the next iteration."""
        self.book.take(Base(self.next_number, 0, 1, 4, "0" * 16, 0), b"base")

    def look(self) -> bool:
        moved = super().look()
        self.book.look(self.next_number)
        return moved

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.run(1)
            self.look()

    def close(self) -> None:
        self.book.close()
        super().close()


@contextlib.contextmanager
def log_kept(patch: pytest.MonkeyPatch, folder: Path, **more: Any) -> Iterator[LogKept]:
    with contextlib.closing(LogKept(patch, folder, **more)) as at:
        yield at


def steps(folder: Path) -> dict[int, tuple[int | None, int]]:
    """That can be made, by epoch."""
    return {one.offer.epoch: (one.offer.oldest, one.offer.step) for one in LogShelf(folder).look()}


def journals(at: Kept) -> Path:
    assert at.config.journals is not None
    return at.config.journals


def test_the_log_before_goes_when_this_one_makes_steps_and_not_earlier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with log_kept(monkeypatch, tmp_path) as at:
        at.base()
        at.iterate(4)
        before = {0: (6, 9)}
        at.until(lambda: steps(journals(at)) == before)
    with log_kept(monkeypatch, tmp_path, epoch=1) as at:
        at.iterate(3)
        assert steps(journals(at)) == before
        at.base()
        at.iterate(3)
        at.until(lambda: steps(journals(at)) == {1: (9, 11)})
        at.until(lambda: [one.path.name for one in folders_in(journals(at))] == ["epoch-1"])


@pytest.mark.parametrize(("again", "left"), [("a", {0: (6, 9)}), ("b", {})])
def test_another_start_with_the_same_connections_has_a_log_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: str, left: dict[int, tuple[int, int]]
) -> None:
    with log_kept(monkeypatch, tmp_path, start="a") as at:
        at.base()
        at.iterate(4)
        at.until(lambda: steps(journals(at)) == {0: (6, 9)})
    with log_kept(monkeypatch, tmp_path, start=again) as at:
        assert steps(journals(at)) == left


LINES = [start_text("0" * 64, str(Start(1, "a" * 16, number, 5))) for number in (0, 1)]


def test_a_log_whose_start_joins_again_stays_until_the_new_one_makes_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with log_kept(monkeypatch, tmp_path, start=LINES[0]) as at:
        at.base()
        at.iterate(4)
        at.until(lambda: steps(journals(at)) == {0: (6, 9)})
    for first in (12, 20):  # the second time nothing new had come meanwhile
        with log_kept(monkeypatch, tmp_path, start=LINES[0], first=first) as at:
            at.iterate(1)
            assert steps(journals(at)) == {0: (6, 9)} and at.events("hole") == []
    with log_kept(monkeypatch, tmp_path, start=LINES[0], first=30) as at:
        at.base()
        at.iterate(3)
        at.until(lambda: steps(journals(at)) == {0: (31, 33)})
        at.until(lambda: [one.path.name for one in folders_in(journals(at))] == ["epoch-0"])
    with log_kept(monkeypatch, tmp_path, start=LINES[1], first=40) as at:
        assert steps(journals(at)) == {}


def test_a_base_that_comes_slowly_is_not_asked_for_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with log_kept(monkeypatch, tmp_path) as at:
        asked = at.asked
        for number in range(200):
            at.book.look(number)
            if number % 10 == 9 and number < 100:
                at.book.take(Base(5, 0, 2, 100, "0" * 16, number // 10), b"x")
            assert [one.again for one in asked[1:]] == [True] * (len(asked) - 1) and (len(asked) == 1 or number > 110)
        assert len(asked) > 1


def test_a_start_that_makes_steps_of_a_log_anew_gets_an_epoch_of_its_own(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path, partial(torch.optim.NAdam, lr=0.01))
    job.base()
    job.train(8)
    job.settle()
    seen = logs_here(tmp_path, job.job.run_id)
    assert epoch_for(Coming(job.job.run_id, 0, 0, "another"), seen) == 1
    assert epoch_for(Coming(job.job.run_id, 0, 8, "another"), seen) == 1
    assert epoch_for(Coming(job.job.run_id, 0, 9, "another"), seen) == 0
    assert logs_here(tmp_path, "another run") == []
