"""The pipeline bench: what its feeder puts into a ring, its rows, and the picture of them."""

import json
import threading
import xml.etree.ElementTree as ElementTree
import zlib
from dataclasses import replace

import pytest
from parser.machine import Engine

from lab.bench import pipeline
from lab.bench.feed import Window
from lab.bench.feeder import Feeder
from lab.bench.figure import draw
from tests.flowcheck.memory_ring import unread

STAGES = ["receive", "place", "update"]
NAMES = [*STAGES, "sequence", "overlapped", "overlapped.slowest", "overlapped.memory", "overlapped.cores"]


def icrc_is_right(frame: bytes) -> bool:
    """IPv4: ones, then all from the IP header on, with what a switch may change as ones."""
    covered = bytearray(b"\xff" * 8 + frame[14:-4])
    for masked in (8 + 1, 8 + 8, 8 + 10, 8 + 11, 8 + 26, 8 + 27, 8 + 32):
        covered[masked] = 0xFF
    return zlib.crc32(covered) == int.from_bytes(frame[-4:], "little")


def test_packets_of_a_lap_are_the_windows_with_other_numbers() -> None:
    """Also where PSNs begin again. FIRST, MIDDLE and LAST packets differ in length, so in what a PSN changes."""
    window = Window(2)
    frames = [bytes(frame[:length]) for frame, length in zip(window._frames, window.lengths.tolist(), strict=True)]
    assert len({len(frame) for frame in frames}) == 3
    again = 2**24 // window.each
    for lap in (0, 1, 77, again - 1, again, again + 3):
        feeder = Feeder(window.addresses, window.lengths, 2, window.packets)
        assert feeder.feed(lap * window.packets, window.packets) == window.packets == feeder.waiting
        for number, (found, frame) in enumerate(zip(unread(feeder.address), frames, strict=True)):
            psn = (lap * window.each + number // 2) % 2**24
            assert found[:51] + found[54:-4] == frame[:51] + frame[54:-4]
            assert int.from_bytes(found[51:54], "big") == psn
            assert (number % 37 and number % 1024 > 3) or icrc_is_right(found)


def test_a_feed_becomes_what_was_sent_with_every_icrc_checked() -> None:
    window = Window(4)
    engine = Engine(replace(window.plan(1).engine, check_icrc=True))
    feeder = Feeder(window.addresses, window.lengths, 4, 1024)
    feeding = threading.Thread(target=feeder.feed, args=(0, 3 * window.packets))
    feeding.start()  # the ring is smaller than a lap: it waits for the engine
    for iteration in range(3):
        left = window.packets
        while left:
            left -= engine.run(0, feeder.address, left)[0]
        assert engine.cells(iteration).all() and (iteration or (engine.region(0) == window.expected).all())
        engine.retire()
    feeding.join()
    assert engine.outcomes(0)["placed"][0] == 3 * window.packets and not engine.disagreements()


def test_a_feed_into_a_full_ring_can_be_stopped() -> None:
    window = Window(1)
    feeder = Feeder(window.addresses, window.lengths, 1, 64)
    assert feeder.feed(0, 64) == 64
    fed: list[int] = []
    feeding = threading.Thread(target=lambda: fed.append(feeder.feed(64, 1)))
    feeding.start()
    feeder.stop()
    feeding.join()
    assert fed == [0] and feeder.waiting == 64


def test_what_is_no_window_is_refused() -> None:
    window = Window(2)
    for flows, entries in ((3, 64), (2, 96)):
        with pytest.raises(ValueError, match="flows"):
            Feeder(window.addresses, window.lengths, flows, entries)
    with pytest.raises(ValueError, match="cache lines"):
        Feeder(window.addresses + window.addresses.dtype.type(8), window.lengths, 2, 64)


def test_rows_of_the_pipeline_and_their_picture() -> None:
    rows = pipeline.run(2, 1 << 20)
    assert [row.name for row in rows] == [f"pipeline.{kind}.{name}" for kind in ("adam", "sgd") for name in NAMES]
    assert {row.name: row.target for row in rows if row.target is not None} == {
        "pipeline.adam.overlapped": 1.1, "pipeline.sgd.overlapped": 1.1,
    }
    assert all(row.less_is_better and row.value > 0 and row.limit > 0 for row in rows)
    for kind in ("adam", "sgd"):
        of = {row.name.removeprefix(f"pipeline.{kind}."): row for row in rows}
        assert of["sequence"].limit == of["overlapped.memory"].limit <= of["overlapped"].limit
        assert of["overlapped.slowest"].limit <= of["overlapped"].limit
        assert of["sequence"].value >= max(of[stage].value for stage in STAGES)
        assert "update" in of["place"].setting.choices
    picture = draw(json.loads(json.dumps([row.as_dict() for row in rows])))
    drawn = ElementTree.fromstring(picture)
    words = {element.text for element in drawn.iter() if element.text and element.text.strip()}
    assert {"overlapped", "one after another", "slowest stage alone"} <= words
    bars = [element for element in drawn.iter() if element.tag.endswith("rect") and element.get("x")]
    assert len(bars) == 2 * (len(STAGES) + 4)
    assert all(0 < float(bar.attrib["width"]) <= 521 for bar in bars)
