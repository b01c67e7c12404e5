"""How a machine's way of placing is decided, by the rule of tests/updater/test_choosing.py. What is quicker here is no
test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from parser.machine import Engine, choose_icrc, choose_placing, icrc_kernels, placing

from flowcheck.diagnose.doctor import Machine, Wanted, host
from flowcheck.errors import UserError
from flowcheck.rebuild import calibration
from flowcheck.rebuild.calibration import DEFAULT, NAMES, SETTING, Ground, Way, calibrate, question, settle
from lab.bench import adam as bench_adam
from lab.bench import place as bench_place
from lab.bench.workload import make
from parser import place
from parser.chunk_layout import Protocol
from updater import kernels, tuning
from updater.choosing import cache_file, key

ALL_DEFAULT = dict.fromkeys(NAMES.values(), DEFAULT)


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
    return lambda protocol, written, way: least.get(str(way).replace("-", "_").replace("@", "_at_"), 1.0)


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

    def seldom(protocol: Protocol, written: bool, way: Way) -> float:
        nonlocal count
        count += way.name == "nta"
        return 0.5 if way.name == "nta" and count % 9 == 0 else 1.0 if way == DEFAULT else 1.1

    assert calibrate(seldom, 1024) == dict.fromkeys(Protocol, DEFAULT)


def test_a_distance_is_at_least_one_packet() -> None:
    seen = set()

    def seconds(protocol: Protocol, written: bool, way: Way) -> float:
        seen.add(way.ahead)
        return 1.0

    calibrate(seconds, 4096)
    assert seen == {4096, 8192}


def test_stores_are_compared_until_they_are_in_memory() -> None:
    asked = {}

    def seconds(protocol: Protocol, written: bool, way: Way) -> float:
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
                assert all(ground.seconds(protocol, written, Way(name, 16384)) > 0 for written in (False, True))
        assert not ground.huge or huge


# -- what is remembered --------------------------------------------------------------------------------------


def test_what_was_measured_is_remembered() -> None:
    first = settle(1024)
    assert "measured in" in first.how and "normal pages" in first.how
    assert used() == list(first.ways.values())
    again = settle(1024, measure=False)
    assert again.ways == {part: question(1024, False).parse(str(way)) for part, way in first.ways.items()}
    assert again.how == f"measured before: {cache_file(question(1024, False))}"
    assert settle(4096, measure=False).how == "not measured", "another MTU is another question"
    assert settle(1024, measure=False, recall=False).how == "not measured"
    assert [path.name for path in cache_file(question(1024, False)).parent.iterdir()] == ["placing-1024-normal.json"]


def test_huge_pages_that_are_not_free_are_not_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = calibration._pages
    monkeypatch.setattr(calibration, "_pages", lambda size, huge: pages(size, False))
    assert settle(1024, True).how.endswith("on normal pages")
    assert not cache_file(question(1024, True)).exists() and not cache_file(question(1024, False)).exists()


def remembered(**changes: object) -> None:
    ways = {"ll": "nta@2048", "ll128": "t0-whole@4096", "simple": "none"}
    path = cache_file(question(1024, False))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**key(question(1024, False)), "ways": ways, **changes}))


def test_a_remembered_choice_is_used() -> None:
    remembered()
    assert list(settle(1024).ways.values()) == [Way("nta", 2048), Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]
    assert used() == [Way("nta", 2048), Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": place.version() + 1}, {"mtu": 512}, {"pages": "huge"},
        {"ways": {"ll": "t9", "ll128": "t0", "simple": "t0"}}, {"ways": {"ll": "t0@0", "ll128": "t0", "simple": "t0"}},
    ],
)
def test_what_is_about_something_else_is_not(changes: dict[str, object]) -> None:
    remembered(**changes)
    assert settle(1024, measure=False).ways == ALL_DEFAULT
    assert used() == [DEFAULT] * 3


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
    assert settle(1024).ways == ALL_DEFAULT
    monkeypatch.setenv(SETTING, "ll=t0")
    assert list(settle(1024).ways.values()) == [DEFAULT, Way("t0-whole", 4096), Way("none", DEFAULT.ahead)]
    monkeypatch.setenv(SETTING, "measure")
    assert "measured in" in settle(1024, measure=False).how


@pytest.mark.parametrize(
    "text",
    ["t9", "t0@", "t0@-1", "t0@1e3", "t0@99999999", "t0@" + "9" * 5000, "ll=", "udp=t0", "ll:t0", "ll=t0=nta", ","],
)
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    before = used()
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(UserError, match=SETTING):
        settle(1024)
    assert used() == before
    finding = next(host.check_placing(Machine(), Wanted()))
    assert finding.level == "unusable" and SETTING in finding.text and finding.remedy


def test_a_wrong_setting_of_the_update_is_refused_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.SETTING, "9-vectors")
    with pytest.raises(UserError, match=tuning.SETTING):
        calibration.look_at_updates(measure=False)
    finding = next(host.check_updating(Machine(), Wanted()))
    assert finding.level == "unusable" and tuning.SETTING in finding.text and finding.remedy


def test_unknown_instructions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take their best where they do not know the name; nobody must believe that it was heeded."""
    for name in ("AVX2", "sse", "avx2 ", "0"):
        monkeypatch.setenv("FLOWCHECK_SIMD", name)
        for decide in (partial(settle, measure=False), partial(calibration.look_at_updates, measure=False)):
            with pytest.raises(UserError, match=f"environment variable FLOWCHECK_SIMD: '{name}' is not") as raised:
                decide()
            assert "avx2 or portable" in raised.value.remedy
        finding = next(host.check_placing(Machine(), Wanted()))
        assert finding.level == "unusable" and "FLOWCHECK_SIMD" in finding.text
    for name in ("", *calibration.INSTRUCTION_SETS):
        monkeypatch.setenv("FLOWCHECK_SIMD", name)
        settle(measure=False)
    assert set(place.names()) <= set(calibration.INSTRUCTION_SETS) >= set(kernels.names())


def test_the_bench_refuses_a_wrong_setting_as_a_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for bench, setting in ((bench_adam, tuning.SETTING), (bench_place, SETTING)):
        monkeypatch.setenv(setting, "9-vectors")
        with pytest.raises(UserError, match=setting):
            bench.run(1, 1 << 20)
        monkeypatch.delenv(setting)


def test_the_doctor_says_both(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv(SETTING, "ll=t0-whole@2048")
    monkeypatch.setenv(tuning.SETTING, "2-vectors@1024")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "flowcheck", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = {f["check"]: f["text"] for f in json.loads(done.stdout)["findings"]}
    assert "ll=t0-whole@2048" in found["placing"] and place.in_use() in found["placing"]
    assert found["updating"] == f"{kernels.in_use()}, 2-vectors@1024 ({tuning.SETTING})"
    assert not list(cache.iterdir()), "the doctor changes nothing"


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
