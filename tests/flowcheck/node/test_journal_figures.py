"""What `flowcheck-node --check` says of a journal is what a node does with it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from flowcheck.errors import UserError
from flowcheck.node.check.journal_figures import journal_figures, problem_of
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.versions.journal.room import sizes_of, wants

from .kept_scene import Kept


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("short", [0, 1])
def test_it_refuses_what_the_node_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: bool, short: int
) -> None:
    settings = JournalSettings(directory=tmp_path, megabytes=1, keep=20)
    with closing(Kept(monkeypatch, tmp_path, log=log, run="first")) as at:
        least = wants(settings, *sizes_of(at.session.plan))
    with closing(Kept(monkeypatch, tmp_path, log=log, megabytes=least - short, keep=20)) as at:
        settings = settings.model_copy(update={"megabytes": least - short})
        figures = replace(journal_figures(settings, 1, at.session.plan, 1.0), free=1 << 60)
        said = problem_of(settings, figures)
        assert (said is not None) == bool(at.events("problem")) == bool(short)
        assert figures.state > 0 and (said is None or isinstance(said, UserError))
