"""How a machine's way of placing is decided, remembered and overridden. What is quicker here is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from parser.machine import Engine, choose_icrc, choose_placing, icrc_kernels, placing

from flowcheck import calibration, doctor
from flowcheck.bench.traffic import make
from flowcheck.calibration import DEFAULT, SETTING, Ground, Way, cache_file, calibrate, settle
from flowcheck.errors import UserError
from parser import place
from parser.wire import Protocol


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own; afterwards everything is placed as before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SETTING, raising=False)
    yield tmp_path
    for protocol in Protocol:
        choose_placing(protocol, DEFAULT.name, DEFAULT.ahead)
    choose_icrc(icrc_kernels()[0])


def used() -> list[Way]:
    return [Way(*way) for way in placing()[1]]


def times(**least: float):  # type: ignore[no-untyped-def]
    """Seconds by the way's text, 1.0 for the others."""
    return lambda protocol, way, written: least.get(str(way).replace("-", "_").replace("@", "_at_"), 1.0)


# -- what is decided -----------------------------------------------------------------------------------------


def test_the_quickest_way_wins_step_by_step() -> None:
    ways = calibrate(times(t0_whole_at_4096=0.8, t0_whole_at_2048=0.7, t0_whole_regular_at_2048=0.5), 1024)
    assert ways == dict.fromkeys(Protocol, Way("t0-whole-regular", 2048))


def test_no_fetching_has_no_distance() -> None:
    assert calibrate(times(none=0.9), 1024) == dict.fromkeys(Protocol, Way("none", DEFAULT.ahead))
    assert str(Way("none", DEFAULT.ahead)) == "none" and str(Way("nta", 2048)) == "nta@2048"


def test_noise_changes_nothing() -> None:
    """A little quicker, or much quicker but seldom, is not better."""
    assert calibrate(times(nta_at_4096=0.98), 1024) == dict.fromkeys(Protocol, DEFAULT)
    count = 0

    def seldom(protocol: Protocol, way: Way, written: bool) -> float:
        nonlocal count
        count += way.name == "nta"
        return 0.5 if way.name == "nta" and count % 9 == 0 else 1.0 if way == DEFAULT else 1.1

    assert calibrate(seldom, 1024) == dict.fromkeys(Protocol, DEFAULT)


def test_a_distance_is_at_least_one_packet() -> None:
    seen = set()

    def seconds(protocol: Protocol, way: Way, written: bool) -> float:
        seen.add(way.ahead)
        return 1.0

    calibrate(seconds, 4096)
    assert seen == {4096, 8192}


def test_stores_are_compared_until_they_are_in_memory() -> None:
    asked = {}

    def seconds(protocol: Protocol, way: Way, written: bool) -> float:
        asked.setdefault(way.name, set()).add(written)
        return 1.0

    calibrate(seconds, 1024)
    assert asked["t0-regular"] == {True} and asked["t0"] == {True, False} and asked["nta"] == {False}


@pytest.mark.parametrize("mtu", [256, 1024, 4096])
@pytest.mark.parametrize("huge", [False, True])
def test_every_way_can_be_measured(mtu: int, huge: bool) -> None:
    with Ground(mtu, huge) as ground:
        for protocol in Protocol:
            for name in place.ways():
                assert all(ground.seconds(protocol, Way(name, 16384), written) > 0 for written in (False, True))
        assert not ground.huge or huge


# -- what is remembered --------------------------------------------------------------------------------------


def test_what_was_measured_is_remembered() -> None:
    first = settle(1024)
    assert "measured in" in first.how and "normal pages" in first.how
    assert used() == list(first.ways.values())
    again = settle(1024, measure=False)
    assert again.ways == {p: calibration._way(str(w)) for p, w in first.ways.items()}
    assert again.how == f"measured before: {cache_file(1024, False)}"
    assert settle(4096, measure=False).how == "not measured", "another MTU is another question"
    assert settle(1024, measure=False, recall=False).how == "not measured"
    assert [path.name for path in cache_file(1024, False).parent.iterdir()] == ["placing-1024-normal.json"]


def test_without_a_measurement_the_default() -> None:
    assert settle(1024, measure=False).ways == dict.fromkeys(Protocol, DEFAULT)
    assert not cache_file(1024, False).exists()


def remembered(**changes: object) -> None:
    ways = {"ll": "nta@2048", "ll128": "t0-whole@4096", "simple": "none"}
    path = cache_file(1024, False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**calibration._key(1024, False), "ways": ways, **changes}))


def test_a_remembered_choice_is_used() -> None:
    remembered()
    assert list(settle(1024).ways.values()) == [Way("nta", 2048), Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]
    assert used() == [Way("nta", 2048), Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": "another"}, {"version": place.version() + 1}, {"kernels": "mmx"}, {"schema": "x/2"}, {"mtu": 512},
        {"pages": "huge"}, {"ways": {"ll": "nta@2048"}}, {"ways": {"ll": "t9", "ll128": "t0", "simple": "t0"}},
        {"ways": {"ll": "t0@0", "ll128": "t0", "simple": "t0"}}, {"ways": {"ll": 7, "ll128": 7, "simple": 7}},
        {"ways": []}, {"ways": None},
    ],
)  # fmt: skip
def test_a_stale_memory_is_none(changes: dict[str, object]) -> None:
    remembered(**changes)
    assert settle(1024, measure=False).ways == dict.fromkeys(Protocol, DEFAULT)
    assert "measured in" in settle(1024).how
    assert "measured before" in settle(1024, measure=False).how, "it was written anew"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 60000, b'{"a": 1' + b" " * 70000])
def test_an_unreadable_memory_is_none(content: bytes) -> None:
    path = cache_file(1024, False)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert settle(1024, measure=False).how == "not measured"


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "flowcheck").write_text("a file where the folder should be")
    assert "measured in" in settle(1024).how
    assert settle(1024, measure=False).how == "not measured"


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file(1024, True) == tmp_path / ".cache/flowcheck/placing-1024-huge.json"


# -- the setting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("nta", [Way("nta", DEFAULT.ahead)] * 3),
        ("t0-whole@4096", [Way("t0-whole", 4096)] * 3),
        ("ll=none, simple=nta-regular@2048", [Way("none", DEFAULT.ahead), DEFAULT, Way("nta-regular", 2048)]),
        ("nta@1024,ll128=t0-whole", [Way("nta", 1024), Way("t0-whole", DEFAULT.ahead), Way("nta", 1024)]),
        ("default", [DEFAULT] * 3),
    ],
)
def test_the_setting_decides(monkeypatch: pytest.MonkeyPatch, text: str, ways: list[Way]) -> None:
    monkeypatch.setenv(SETTING, text)
    chosen = settle(1024, measure=False)
    assert list(chosen.ways.values()) == used() == ways
    assert SETTING in chosen.how


def test_the_setting_goes_before_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered()
    monkeypatch.setenv(SETTING, "default")
    assert settle(1024).ways == dict.fromkeys(Protocol, DEFAULT)
    monkeypatch.setenv(SETTING, "ll=t0")
    assert list(settle(1024).ways.values()) == [DEFAULT, Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]
    monkeypatch.setenv(SETTING, "measure")
    assert "measured in" in settle(1024, measure=False).how


@pytest.mark.parametrize("text", ["t9", "t0@", "t0@-1", "t0@1e3", "t0@99999999", "ll=", "udp=t0", "ll:t0", "ll=t0=nta"])
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    before = used()
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(UserError, match=SETTING):
        settle(1024)
    assert used() == before
    finding = next(doctor.check_placing(doctor.Machine(), doctor.Wanted()))
    assert finding.level == "unusable" and SETTING in finding.text and finding.remedy


def test_the_doctor_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "ll=t0-whole@2048")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "flowcheck", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "placing"]
    assert len(found) == 1 and "ll=t0-whole@2048" in found[0]["text"] and place.in_use() in found[0]["text"]
    assert not cache_file(1024, False).exists(), "the doctor changes nothing"


# -- the bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize("mtu", [1024, 4096])
def test_every_choice_gives_the_same_bytes(protocol: Protocol, mtu: int) -> None:
    """The engine over the same packets, with every way and with distances that no measurement would choose."""
    traffic = make(protocol, mtu, 3, 2 << 20, icrc=False)
    for name in place.ways():
        for ahead in (1, 8192, 1 << 20):
            choose_placing(protocol, name, ahead)
            engine = Engine(traffic.config)
            traffic.ring.rewind()
            assert engine.run(0, traffic.ring.address, traffic.packets) == (traffic.packets, False)
            assert engine.outcomes(0)["placed"][0] == traffic.packets
            assert np.array_equal(engine.region(0), traffic.expected), (name, ahead)


@pytest.mark.parametrize("name", icrc_kernels())
def test_every_icrc_finds_the_one_wrong_packet(name: str) -> None:
    traffic = make(Protocol.LL, 1024, 3, 1 << 20, icrc=True)
    traffic.frames[70, 100] ^= 1
    choose_icrc(name)
    engine = Engine(traffic.config)
    assert engine.run(0, traffic.ring.address, traffic.packets) == (traffic.packets, False)
    outcomes = engine.outcomes(0)
    assert (outcomes["placed"][0], outcomes["icrc"][0]) == (traffic.packets - 1, 1)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="isal"):
        choose_icrc("table")
    with pytest.raises(ValueError, match="t0-whole"):
        choose_placing(0, "t9", 1)
    with pytest.raises(ValueError, match="protocol 3"):
        choose_placing(3, "t0", 1)
