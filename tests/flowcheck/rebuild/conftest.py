"""Followers whose engine and replica are made up (followed.py): of a port, and of captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowcheck.rebuild.version.policy import Policy

from .followed import FakeReplica, Followed


@pytest.fixture
def live(monkeypatch) -> Callable[..., Followed]:
    return lambda *sources, **options: Followed(monkeypatch, Policy.live(record_seconds=10.0), *sources, **options)


@pytest.fixture
def offline(monkeypatch) -> Callable[..., Followed]:
    return lambda *sources, **options: Followed(
        monkeypatch, Policy.offline(), *sources, **{"replica": FakeReplica(), **options}
    )
