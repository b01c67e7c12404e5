"""Which flows are one connection: by announced addresses, by UDP source port, and never by a coincidence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parser.pairing import Announced, connection_port, port_partners

QPN = st.integers(2, (1 << 24) - 1)


def test_announcers_of_what_a_flow_writes() -> None:
    announced = Announced([(1, 7, 0x1000, 64), (1, 7, 0x1040, 64), (2, 7, 0x9000, 64), (2, 8, 0x1000, 64)])
    assert announced.by([(7, 0x1000, 64), (7, 0x1041, 8)]) == {1}
    assert announced.by([(7, 0x1080, 4)]) == set()  # right after the last slot
    assert announced.by([(7, 0x1000, 4), (8, 0x1000, 4)]) == {1, 2}
    assert announced.by([(7, 0x1000, 4), (8, 0x1000, 0)]) == {1}  # an empty write says nothing beside another
    assert announced.by([(8, 0x1000, 0)]) == {2}
    assert Announced([]).by([(7, 0x1000, 64)]) == set()


def test_an_address_that_two_announce_has_two_announcers() -> None:
    assert Announced([(1, 7, 0x1000, 64), (2, 7, 0x1000, 64)]).by([(7, 0x1000, 64)]) == {1, 2}


@given(QPN, QPN)
def test_both_directions_have_one_port(there: int, back: int) -> None:
    port = connection_port(there, back)
    assert port == connection_port(back, there) and 0xC000 <= port < 0x10000
    flows = {"data": ("A", "B", there, port), "cts": ("B", "A", back, port)}
    assert port_partners(flows) == {"data": "cts", "cts": "data"}


@given(QPN, QPN)
def test_a_port_is_the_product_folded(there: int, back: int) -> None:
    """The product's three digits of 20 bits added without carries, then the upper 6 bits upon the lower 14: Linux'
    rdma_calc_flow_label() and rdma_flow_label_to_udp_sport()."""
    digits = np.array([there * back >> at & 0xFFFFF for at in (0, 20, 40)])
    label = int(np.bitwise_xor.reduce(digits))
    assert connection_port(there, back) == 0xC000 + (label % 2**14 ^ label // 2**14)


def test_an_announcer_whose_slots_differ_in_size_has_the_largest() -> None:
    announced = Announced([(1, 7, 0x1000, 64), (1, 7, 0x1000, 8), (2, 7, 0x2000, 0)])
    assert announced.by([(7, 0x1030, 8)]) == {1} and announced.by([(7, 0x1040, 8)]) == set()
    assert announced.by([(7, 0x2000, 8)]) == set()


def test_a_port_that_very_many_share_says_nothing_and_others_do() -> None:
    """64 queue pairs each way are looked at, and 65 no more."""
    port, other = connection_port(0x20, 0x31), connection_port(0x500, 0x600)
    assert port != other

    def pairs(count: int) -> dict:
        unlike = [qpn for qpn in range(0x1000, 0x1100) if connection_port(qpn, 0x31) != port]
        here = {qpn: ("A", "B", qpn, port) for qpn in (0x20, *unlike[: count - 1])}
        there = {qpn: ("B", "A", qpn, port) for qpn in (0x31, *range(0x10000, 0x1003F))}
        return port_partners({**here, **there, "x": ("A", "C", 0x500, other), "y": ("C", "A", 0x600, other)})

    assert pairs(64)[0x20] == 0x31 and pairs(64)["x"] == "y"
    assert pairs(65) == {"x": "y", "y": "x"}


def test_two_partners_are_none() -> None:
    port = connection_port(0x20, 0x31)
    other = next(qpn for qpn in range(0x32, 1 << 24) if connection_port(0x20, qpn) == port)
    flows = {"data": ("A", "B", 0x20, port), "cts": ("B", "A", 0x31, port)}
    assert port_partners(flows)
    assert port_partners({**flows, "other": ("B", "A", other, port)}) == {}
    elsewhere = {**flows, "other": ("B", "C", other, port), "management": ("B", "A", 1, connection_port(0x20, 1))}
    assert port_partners(elsewhere) == {"data": "cts", "cts": "data"}
