"""What is known of a flow: the drawing in machine.h, and the tables that the engine goes by, say the same."""

import re
from itertools import product
from pathlib import Path

from parser.machine import edges

from parser.names import POSITIONS, TRUSTS

HEADER = Path(__file__).parents[2] / "parser" / "include" / "machine.h"


def drawn() -> set[tuple[str, str]]:
    return set(re.findall(r"^ \*     (\w+) -> (\w+)  ", HEADER.read_text(), re.MULTILINE))


def test_the_drawing_is_the_table() -> None:
    positions, trusts = edges()
    assert drawn() == positions | trusts and positions and trusts


def test_every_state_is_in_the_header_in_this_order() -> None:
    text = HEADER.read_text()
    for names, kind in ((POSITIONS, "fc_position"), (TRUSTS, "fc_trust")):
        listed = re.search(rf"enum {kind} {{ (.*?) }};", text)
        assert listed is not None
        assert [name.strip() for name in listed[1].split(",")][:-1] == [f"FC_{name}" for name in names]


def test_nobody_comes_back_from_these() -> None:
    """A flow that was lost for good is not trusted again, and no flow becomes one that was never seen."""
    positions, trusts = edges()
    assert not [pair for pair in trusts if pair[0] == "LOST_FOR_GOOD"]
    assert not [pair for pair in positions if pair[1] == "UNSEEN"]
    assert ("LOST", "TRUSTED") not in trusts, "only after a trial"
    assert all((name, "LOST_FOR_GOOD") in trusts for name in TRUSTS[:3])
    assert not [(a, b) for a, b in product(POSITIONS, TRUSTS) if (a, b) in positions | trusts]
