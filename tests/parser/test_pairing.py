"""Which flows are one connection: by announced addresses, by UDP source port, and never by a coincidence."""

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


def test_two_partners_are_none() -> None:
    port = connection_port(0x20, 0x31)
    other = next(qpn for qpn in range(0x32, 1 << 24) if connection_port(0x20, qpn) == port)
    flows = {"data": ("A", "B", 0x20, port), "cts": ("B", "A", 0x31, port)}
    assert port_partners(flows)
    assert port_partners({**flows, "other": ("B", "A", other, port)}) == {}
    elsewhere = {**flows, "other": ("B", "C", other, port), "management": ("B", "A", 1, connection_port(0x20, 1))}
    assert port_partners(elsewhere) == {"data": "cts", "cts": "data"}
