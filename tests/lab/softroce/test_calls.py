"""The calls of torch.distributed, one by one: calls.py does them in the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gang import Gang

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {"protocol": "LL", "channels": 2}),
        (4, {"protocol": "LL128", "algorithm": "tree", "channels": 2, "family": "2.27.7"}),
        (3, {"protocol": "SIMPLE", "channels": 3, "buffer_bytes": {"simple": 262144}, "qps_per_connection": 3}),
        (4, {"protocol": "SIMPLE", "algorithm": "tree", "mtu": 1024, "family": "2.30.7", "adaptive_routing": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value['protocol']}-{value.get('algorithm', 'ring')}",
)
def test_every_call(gang: Gang, ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    gang.begin(ranks, settings, {"calls": True}, tmp_path)
    assert [gang.said(rank) for rank in range(ranks)] == ["done"] * ranks
