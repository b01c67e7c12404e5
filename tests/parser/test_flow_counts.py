"""What is counted of one flow where a wrong count would lead to a wrong reading: limits of the tables, repeats, losses
beside reads and writes, marks that only look like NCCL's. Frames as in test_observer_counts.py."""

from __future__ import annotations

import pytest
from parser.observer import Observer

from .test_observer_counts import (
    ACK,
    FIRST,
    LAST,
    LAST_IMM,
    MIDDLE,
    ONLY,
    ONLY_IMM,
    READ,
    SEND_FIRST,
    SEND_LAST,
    SEND_ONLY,
    cts,
    flow,
    frame,
    imm,
    ll,
    noise,
    reth,
    sends,
)

DATA = noise(4096)


def only(psn: int, va: int, size: int, rkey: int = 0x77) -> bytes:
    return frame(ONLY, psn, DATA[:size], extra=reth(va, size, rkey))


def message(psn: int, data: bytes, va: int = 0x1000) -> bytes:
    return frame(ONLY_IMM, psn, data, extra=reth(va, len(data)) + imm(len(data)))


# -- sequences --------------------------------------------------------------------------------------------


def test_the_packet_after_a_gap_that_comes_again_fills_nothing() -> None:
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in (0, 3, 3)))["requests"]
    assert (found["missing_ranges"], found["late"], found["duplicates"]) == ([(1, 2)], 0, 1)


def test_a_gap_that_was_filled_is_listed_no_more() -> None:
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in (0, 4, 2, 1, 3)))["requests"]
    assert (found["missing"], found["missing_ranges"], found["late"], found["gaps"]) == (0, [], 3, 1)


def test_a_packet_in_the_middle_of_a_gap_leaves_two() -> None:
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in (0, 10, 5, 7)))["requests"]
    assert found["missing_ranges"] == [(1, 4), (6, 1), (8, 2)]


def test_a_gap_is_split_where_the_table_is_full() -> None:
    """The oldest gap makes room, and stays counted; all others are where they were."""
    order = [*range(0, 8190, 2), 8200, 8195]  # 4,094 gaps of one, and one of eleven that becomes two
    assert len(order) == 4097
    order = [*range(0, 8192, 2), 8200, 8195]  # one more
    found = flow(*(frame(SEND_ONLY, psn, b"data") for psn in order))["requests"]
    assert found["missing"] == 4095 + 9 - 1
    assert found["missing_ranges"] == [(psn, 1) for psn in range(3, 8190, 2)] + [(8191, 4), (8196, 4)]


def test_a_read_explains_what_follows_it_and_nothing_later() -> None:
    """Its response takes five numbers, of 1,024 bytes each. Four are lost later."""
    read = frame(READ, 7, extra=reth(0x1000, 5001))
    after = [frame(SEND_ONLY, psn, b"data") for psn in (12, 17)]
    assert flow(read, *after)["requests"]["missing_ranges"] == [(13, 4)]


def test_half_a_lap_of_psns_is_a_step_back_and_less_is_a_gap() -> None:
    half = 2**23
    less, back = (flow(*(frame(SEND_ONLY, psn, b"data") for psn in (5, 6 + step)))["requests"]
                  for step in (half - 1, half))
    assert (less["missing"], less["missing_ranges"], less["before_first"]) == (half - 1, [(6, half - 1)], 0)
    assert (back["missing"], back["missing_ranges"], back["before_first"]) == (0, [], 1)


def test_one_repeat_is_one_restart() -> None:
    found = sends(0, 1, 2, 3, 1, 2, 3, 4, 5, 6)
    assert (found["restarts"], found["out_of_order"], found["duplicates"]) == (1, 0, 3)
    assert sends(0, 1, 1, 2, 2, 3)["restarts"] == 2


def test_a_message_that_comes_late_counts_and_one_that_comes_again_does_not() -> None:
    first, second, third = (message(psn, noise(64, psn), 0x1000 * psn) for psn in range(3))
    assert flow(first, third, second)["messages"]["writes"] == 3
    assert flow(first, second, second, third, first)["messages"]["writes"] == 3


# -- messages ---------------------------------------------------------------------------------------------


def test_values_that_find_no_room_are_counted() -> None:
    found = flow(*(only(psn, 0x10000 * psn, 4 * psn + 4) for psn in range(41)), message(41, DATA[:999]))["messages"]
    assert (len(found["sizes"]), found["other_sizes"], found["writes"]) == (32, 10, 42)


def test_a_buffer_is_as_long_as_its_longest_message() -> None:
    found = flow(message(0, DATA[:64]), message(1, DATA[:512]), message(2, DATA[:128]), message(3, DATA[:4], 0x9000))
    assert found["regions"] == [(0x77, 0x1000, 512), (0x77, 0x9000, 4)]


def test_buffers_at_one_address_under_two_keys_are_two() -> None:
    found = flow(only(0, 0x1000, 64), only(1, 0x1000, 128, rkey=0x78))
    assert found["regions"] == [(0x77, 0x1000, 64), (0x78, 0x1000, 128)]


def test_a_message_is_known_by_its_immediate_however_it_is_split() -> None:
    """1,000 bytes over three queue pairs: 384 of them, not 334, in each piece but the last."""
    found = flow(frame(ONLY_IMM, 0, DATA[:384], extra=reth(0, 384) + imm(1000)))["messages"]["immediate"]
    assert (found["split_little_endian"], found["unexplained"]) == ({3: 1}, 0)
    found = flow(frame(ONLY_IMM, 0, DATA[:334], extra=reth(0, 334) + imm(1000)))["messages"]["immediate"]
    assert (found["split_little_endian"], found["unexplained"]) == ({}, 1)


def test_an_immediate_that_reads_alike_both_ways_says_nothing() -> None:
    found = flow(frame(ONLY_IMM, 0, b"", extra=reth(0x1000, 0) + imm(0)))["messages"]["immediate"]
    assert found == {"little_endian": 0, "big_endian": 0, "unexplained": 0,
                     "split_little_endian": {}, "split_big_endian": {}}


CLOSING = frame(ONLY_IMM, 3, extra=reth(0, 0, 0) + imm(2560))


@pytest.mark.parametrize(("pieces", "of_one"), [
    ([only(0, 0, 1024), only(1, 1024, 1024), only(2, 2048, 512)], 3),
    ([only(0, 0, 1024), only(1, 2048, 1024), only(2, 3072, 512)], 2),  # not one behind the other
    ([only(0, 0, 1024), only(1, 1024, 1024), only(2, 2048, 512, 0x78)], 0),  # another region
    ([only(0, 0, 512), only(1, 512, 1024), only(2, 1536, 1024)], 2),  # the longer behind the shorter
    ([only(0, 0, 1024), only(1, 1024, 512), only(2, 1536, 1024)], 0),
])
def test_pieces_of_a_write_that_the_nic_cut_lie_one_behind_the_other(pieces: list[bytes], of_one: int) -> None:
    """of_one: packets that the immediate after them ends as one message."""
    found = flow(*pieces, CLOSING)["messages"]
    assert found["cut_by_nic"] == {"writes": int(of_one > 0), "packets": of_one}
    assert found["writes"] == 3 - max(of_one, 1) + 1


def test_an_immediate_alone_is_of_no_write_before_a_loss() -> None:
    write = [frame(FIRST, 0, DATA[:1024], extra=reth(0x1000, 1500)), frame(LAST, 1, DATA[1024:1500])]
    closing = {psn: frame(ONLY_IMM, psn, extra=reth(0, 0, 0) + imm(1500)) for psn in (2, 3)}
    assert flow(*write, closing[2])["messages"]["adaptive_routing_pairs"] == 1
    found = flow(*write, closing[3])["messages"]
    assert (found["adaptive_routing_pairs"], found["writes"], found["empty"]) == (0, 2, 1)


def test_a_write_that_lost_a_packet_is_not_held_against_its_immediate() -> None:
    """As many bytes as it should have, of which the last were of another size than those lost."""
    parts = [frame(FIRST, 0, DATA[:1024], extra=reth(0x1000, 2048)), frame(LAST_IMM, 2, DATA[:1024], extra=imm(2048))]
    found = flow(*parts)["messages"]
    assert found["sizes"] == {2048: 1} and found["immediate"]["little_endian"] == 0


def test_the_rest_of_a_message_is_no_message() -> None:
    found = flow(frame(MIDDLE, 5, DATA[:1024]), frame(LAST_IMM, 6, DATA[:100], extra=imm(1124)))["messages"]
    assert (found["writes"], found["sizes"]) == (0, {})


def test_a_send_of_three_packets_is_one() -> None:
    frames = [frame(opcode, psn, DATA[:1024]) for psn, opcode in enumerate((SEND_FIRST, 1, SEND_LAST, SEND_ONLY))]
    assert flow(*frames)["messages"]["sends"] == 2


# -- clear-to-send ----------------------------------------------------------------------------------------


def announced(*places: tuple[int, int]) -> dict:
    """places: (number, place in the FIFO)."""
    return flow(*(
        frame(ONLY, psn, cts("2.27.7", number, 0x7F0000000000, 0x12, 65536), extra=reth(0x5000 + 512 * at, 64))
        for psn, (number, at) in enumerate(places)
    ))["cts"]


def test_a_fifo_goes_round_and_clear_to_sends_are_missed() -> None:
    assert announced((1, 254), (2, 255), (3, 0), (4, 1))["number_jumps"] == 0
    found = announced((1, 254), (2, 255), (3, 0), (4, 1))["fifo_steps"]
    assert (found["512"], found["other"]) == (3, 0)
    found = announced((1, 0), (2, 1), (4, 3))
    assert (found["number_jumps"], found["fifo_steps"]["512"], found["fifo_steps"]["other"]) == (1, 1, 1)


# -- marks in the payload ---------------------------------------------------------------------------------


def marks(*payloads: bytes) -> dict:
    return flow(*(message(psn, data, 0x1000 * psn) for psn, data in enumerate(payloads)))["payload"]


def kind(data: bytes) -> str:
    found = marks(data)
    return next(name for name in ("ll", "ll128", "constant", "raw") if found[f"{name}_packets"])


def test_what_looks_like_a_flag_at_first_is_none() -> None:
    word = imm(7)
    assert kind(ll(8, 7)) == "ll"
    assert kind(ll(8, 7)[:-4] + imm(8)) == "raw"
    assert kind(b"".join(noise(4, i) + word + noise(8, 99 + i) for i in range(8))) == "raw"  # one flag of each line
    assert kind(bytes(64)) == kind(b"\0\0\x80\x3f" * 16) == "constant"
    assert kind(bytes(16) + noise(48)) == "raw"  # constant at first
    assert kind(noise(120) + (9).to_bytes(8, "little")) == "raw"  # one line is none
    assert kind(noise(120) + (9).to_bytes(8, "little") + noise(120, 2) + (9).to_bytes(8, "little")) == "ll128"


def test_flags_are_those_of_messages() -> None:
    """Two messages, the first of two packets; then one of a flag two steps on."""
    one = ll(128, 5)
    found = flow(
        frame(FIRST, 0, one[:1024], extra=reth(0x1000, 2048)), frame(LAST_IMM, 1, one[1024:], extra=imm(2048)),
        message(2, ll(4, 6)), message(3, ll(4, 8)),
    )["payload"]
    assert (found["ll_packets"], found["first_flag"], found["last_flag"]) == (4, 5, 8)
    assert (found["flag_steps"], found["flag_jumps"]) == (1, 1)
    late = flow(frame(FIRST, 0, ll(64, 5), extra=reth(0x1000, 2048)), frame(LAST_IMM, 1, ll(64, 6), extra=imm(2048)))
    assert (late["payload"]["last_flag"], late["payload"]["flag_steps"]) == (5, 0)


# -- answers and what every packet says -------------------------------------------------------------------


def test_answers_that_come_in_any_order() -> None:
    def answer(psn: int, syndrome: int) -> bytes:
        return frame(ACK, psn, extra=syndrome.to_bytes(1, "big") + b"\0\0\1")

    found = flow(answer(9, 0x1F), answer(4, 0x1F), answer(12, 0x60), answer(7, 0x62), answer(5, 0x6F))["answers"]
    assert (found["psn_low"], found["psn_high"], found["acks"]) == (4, 12, 2)
    assert found["naks"] == {"sequence_error": 1, "remote_access_error": 1, "reserved": 1}
    found = flow(*(answer(psn, 0x1F) for psn in (1, 0xFFFFFF, 5, 2)))["answers"]  # the second belongs before the first
    assert (found["psn_low"], found["psn_high"]) == (0xFFFFFF, 5)


def test_a_flow_lasts_from_its_earliest_to_its_latest_packet() -> None:
    one = Observer()
    for psn, ns in enumerate((50, 90, 20, 70)):
        one.add(frame(SEND_ONLY, psn, b"data"), timestamp_ns=ns)
    report = one.report()
    assert [(found["first_ns"], found["last_ns"]) for found in (report, *report["flows"])] == [(20, 90)] * 2


def test_congestion_is_what_a_switch_has_marked() -> None:
    found = flow(*(frame(SEND_ONLY, psn, b"data", tclass=0xA0 | psn) for psn in range(4)))
    assert found["congestion_marked"] == 1 and found["tclass"] == {0xA0 | ecn: 1 for ecn in range(4)}
