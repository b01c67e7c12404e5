"""Nodes' HTTP APIs made by hand (hand_api.py), and who asks them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowcheck.ask.client import NodeClient

from ..hand_api import KEY, HandApi, HandVersion


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(7)) as made:
        yield made


@pytest.fixture
def node(api: HandApi) -> Iterator[NodeClient]:
    made = NodeClient(api.address, KEY, 30.0)
    yield made
    made.close()


@pytest.fixture
def near() -> Iterator[HandApi]:
    with HandApi(HandVersion(7), HandVersion(6, tier="disk")) as made:
        yield made


@pytest.fixture
def far() -> Iterator[HandApi]:
    with HandApi(HandVersion(7)) as made:
        yield made
