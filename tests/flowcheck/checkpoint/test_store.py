"""Versions in a store: whole or not there, whatever is killed, fails or lies; and what the rules let go."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.directory import Meta, load_step
from flowcheck.checkpoint.objects import Missing, StoreError, open_store
from flowcheck.checkpoint.state import load_checkpoint
from flowcheck.checkpoint.store import Entry, Lane, Rules, expired, read_entry
from flowcheck.checkpoint.users import load_user
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER, seal
from flowcheck.errors import UserError

from .test_directory import AtCall, killed_at

META = Meta("run", 2, "verified", ("a mark",), {"name": "sgd", "groups": []}, "torch-cpu", "dp0")
LANE = "n/dp0/run"


def files(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {MODEL: {"w": torch.full((3,), value), "empty": torch.empty(0, 2)},
            OPTIMIZER: {"state.w.momentum_buffer": torch.full((3,), -value)}}


def lane(root: Path, clock: float = 1000.0, **given: Any) -> Lane:
    return Lane(open_store(str(root), {}), LANE, clock=lambda: clock, **given)


def write(to: Lane, step: int, value: float = 1.0, users: dict[int, bytes] | None = None) -> Entry:
    return to.write(step, files(value), META, lambda: users or {})


def found(root: Path) -> list[int]:
    return [entry.version.step for entry in lane(root).entries()[0]]


@pytest.mark.parametrize("said", [10**400, float("nan"), -1.0, "x", None])
def test_a_time_that_is_none_hinders_no_removal(tmp_path: Path, said: Any) -> None:
    to = lane(tmp_path)
    for step in (10, 20):
        entry = write(to, step)
    path = tmp_path / entry.folder / "manifest.json"
    document = json.loads(path.read_text()) | {"stored": said}
    path.write_text(json.dumps(seal({key: value for key, value in document.items() if key != "manifest_sha256"})))
    again = lane(tmp_path)
    assert again.tidy(Rules(seconds=1e6)) == [] and again.entries()[0][1].stored == 0.0
    write(again, 30)
    assert again.tidy(Rules(keep=1)) != [] and found(tmp_path) == [30]


def test_what_is_written_is_a_checkpoint_directory(tmp_path: Path) -> None:
    user = pack({"loader": {"at": 3}}, step=20, rank=3, ranks=4)
    entry = write(lane(tmp_path, 1234.5678), 20, 7.0, {3: user})
    folder = tmp_path / entry.folder
    assert folder.parent == tmp_path / LANE / "epoch-2" and folder.name.startswith("step-000020.")
    loaded = load_step(folder)
    assert loaded.parameters["w"].tolist() == [7.0] * 3 and loaded.step == 20
    assert loaded.optimizer_state["w"]["momentum_buffer"].tolist() == [-7.0] * 3
    assert load_user(folder, loaded.manifest, 3).state == {"loader": {"at": 3}}
    about = loaded.manifest
    assert (about["run_id"], about["shard"], about["status"]) == ("run", "dp0", "verified")
    assert about["unproven"] == ["a mark"]
    assert about["stored"] == 1234.568 == entry.stored and entry.version.nbytes == 24
    assert load_checkpoint(folder.parent).path == folder
    assert read_entry(open_store(str(tmp_path), {}), entry.folder) == entry


def test_the_pointer_names_what_was_written_last(tmp_path: Path) -> None:
    assert lane(tmp_path).latest() == ""
    one, other = write(lane(tmp_path), 20), write(lane(tmp_path), 10)
    assert lane(tmp_path).latest() == other.folder != one.folder
    said = json.loads((tmp_path / LANE / "latest.json").read_text())
    assert (said["epoch"], said["step"], said["version_sha256"]) == (2, 10, other.document["manifest_sha256"])
    assert said["schema"] == "flowcheck/latest/1"
    assert f"{LANE}/{said['folder']}" == other.folder


@pytest.mark.parametrize("text", [b"", b"[]", b'"x"', b"\xff", b"{}", b"[" * 100000, b" " * (1 << 17)])
def test_a_pointer_that_cannot_be_read_names_nothing(tmp_path: Path, text: bytes) -> None:
    write(lane(tmp_path), 20)
    (tmp_path / LANE / "latest.json").write_bytes(text)
    assert lane(tmp_path).latest() == ""


def test_a_pointer_that_was_changed_names_nothing(tmp_path: Path) -> None:
    folder = write(lane(tmp_path), 20).folder.removeprefix(f"{LANE}/")
    path = tmp_path / LANE / "latest.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"folder": folder.replace("20", "30")}))
    assert lane(tmp_path).latest() == ""
    for odd in ("../../x", 7, f"{folder}/..", "epoch-2"):
        path.write_text(json.dumps(seal({key: said[key] for key in ("epoch", "step")} | {"folder": odd})))
        assert lane(tmp_path).latest() == ""
    path.write_text(json.dumps(seal({"folder": folder})))
    assert lane(tmp_path).latest() == f"{LANE}/{folder}"


def test_two_attempts_of_a_step_do_not_meet(tmp_path: Path) -> None:
    one, other = write(lane(tmp_path), 20, 1.0), write(lane(tmp_path), 20, 2.0)
    assert one.folder != other.folder and found(tmp_path) == [20, 20]
    assert load_step(tmp_path / one.folder).parameters["w"][0] == 1.0
    assert load_step(tmp_path / other.folder).parameters["w"][0] == 2.0


# -- killed, failing, lying ------------------------------------------------------------------------------------------


class AtChange(AtCall):
    """Only calls that change something: between two of them a store is the same."""

    CALLS = ("fsync", "mkdir", "open", "replace", "rmdir", "unlink", "write")


@pytest.mark.parametrize(("begin", "stride"), [(3, 9), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_killed_between_any_two_calls(tmp_path: Path, begin: int, stride: int) -> None:
    n, news = begin - stride, []
    while n < begin or news[-1] is not None:
        n += stride
        root = tmp_path / str(n)
        old = write(lane(root), 10, 1.0)

        def work(root: Path = root) -> None:
            to = lane(root)
            write(to, 20, 2.0, {0: b"x"})
            to.tidy(Rules(keep=1))

        killed = killed_at(n, work, AtChange)
        whole, _cut = lane(root).entries()
        for entry in whole:  # what has a manifest is whole
            assert load_step(root / entry.folder).parameters["w"][0] == entry.version.step / 10
        latest = lane(root).latest()
        assert latest in {entry.folder for entry in whole}  # and the pointer names such a one, always
        news.append(latest != old.folder if killed else None)
        # What comes next is not disturbed by what was left, and clears it away.
        after = lane(root, 3000.0)
        last = write(after, 30, 3.0)
        after.tidy(Rules(keep=1))
        assert [one.folder for one in lane(root).entries()[0]] == [last.folder] and lane(root).entries()[1] == []
        assert [path.name for path in (root / LANE / "epoch-2").iterdir()] == [last.folder.rpartition("/")[2]]
    assert n > 40 and False in news and (True in news or stride > 1)
    assert news[:-1] == sorted(news[:-1])  # once it points to the new one, it does


@pytest.mark.parametrize(("begin", "stride"), [(2, 9), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_every_failing_call_is_reported_and_nothing_half_is_pointed_to(tmp_path: Path, begin: int, stride: int) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    n, outcomes = begin - stride, set()
    while True:
        n += stride
        root = tmp_path / str(n)
        old = write(lane(root), 10, 1.0)
        call = AtChange(n, full)
        try:
            with call:
                write(lane(root), 20, 2.0)
        except StoreError as error:
            assert "No space left" in str(error) and error.remedy
            outcomes.add("reported")
        else:
            outcomes.add("done")
        whole, _ = lane(root).entries()
        for entry in whole:
            assert load_step(root / entry.folder).parameters["w"][0] == entry.version.step / 10
        assert lane(root).latest() in {entry.folder for entry in whole} and old.folder in {e.folder for e in whole}
        if len(call.seen) < n:
            break
    assert n > 20 and outcomes == {"reported", "done"}


class Lying:
    """A store that does something else to the objects whose name fits, in one call."""

    def __init__(self, root: Path, at: str, **instead: Callable[..., Any]) -> None:
        self.objects = open_store(str(root), {})
        self.at, self.instead = at, instead

    def __getattr__(self, what: str) -> Any:
        real = getattr(self.objects, what)
        if what not in self.instead:
            return real
        return lambda name, *given: (self.instead[what](real, name, *given) if self.at in name else real(name, *given))


def cut_short(real: Callable[..., None], name: str, pieces: Iterable[bytes | memoryview]) -> None:
    real(name, [b"".join(map(bytes, pieces))[:-2]])


def flip(real: Callable[..., None], name: str, pieces: Iterable[bytes | memoryview]) -> None:
    data = bytearray(b"".join(map(bytes, pieces)))
    data[len(data) // 2] ^= 1
    real(name, [data])


def longer(real: Callable[..., None], name: str, pieces: Iterable[bytes | memoryview]) -> None:
    real(name, [*pieces, b"\0"])


@pytest.mark.parametrize("at", [MODEL, OPTIMIZER, "rank-00001", "manifest.json"])
@pytest.mark.parametrize("how", [cut_short, flip, longer])
def test_what_reads_back_otherwise_is_not_pointed_to(tmp_path: Path, at: str, how: Callable[..., None]) -> None:
    old = write(lane(tmp_path), 10)
    with pytest.raises(StoreError, match="other bytes than those written") as caught:
        lying = Lying(tmp_path, at, put=how, replace=lambda real, name, data: how(
            lambda name, pieces: real(name, b"".join(pieces)), name, [data]))
        write(Lane(lying, LANE), 20, users={1: b"state"})  # type: ignore[arg-type]
    assert at in caught.value.where and caught.value.where.startswith(str(tmp_path)) and caught.value.remedy
    assert lane(tmp_path).latest() == old.folder
    assert found(tmp_path) == [10]  # also a manifest that was damaged is none
    later = lane(tmp_path)
    write(later, 30)
    later.tidy(Rules(keep=1))
    assert found(tmp_path) == [30]


def test_a_pointer_that_reads_back_otherwise(tmp_path: Path) -> None:
    write(lane(tmp_path), 10)
    with pytest.raises(StoreError, match="other bytes"):
        write(Lane(Lying(tmp_path, "latest", replace=lambda real, name, data: real(name, data[:-1])), LANE), 20)  # type: ignore[arg-type]


def test_a_store_that_lists_what_is_not_there(tmp_path: Path) -> None:
    one = write(lane(tmp_path), 10)
    ghost = "step-000099.00000000"
    lying = Lying(tmp_path, "epoch-2", children=lambda real, name: [*real(name), ghost, "odd", "step-7"])
    to = Lane(lying, LANE)  # type: ignore[arg-type]
    whole, cut = to.entries()
    assert [entry.folder for entry in whole] == [one.folder] and cut == [f"{LANE}/epoch-2/{ghost}"]
    assert to.tidy(Rules(keep=1)) == [] and found(tmp_path) == [10]


def test_a_store_that_does_not_list_what_is_there_loses_nothing(tmp_path: Path) -> None:
    """Least of all what the pointer names: while it is not seen, nothing goes."""
    for step in (10, 20, 30):
        write(lane(tmp_path), step)
    hidden = lane(tmp_path).latest().rpartition("/")[2]
    lying = Lying(tmp_path, "epoch-2", children=lambda real, name: [one for one in real(name) if one != hidden])
    assert Lane(lying, LANE).tidy(Rules(keep=1)) == []  # type: ignore[arg-type]
    assert found(tmp_path) == [10, 20, 30]


def test_what_is_long_is_read_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and nothing after the end; also where a store gives less than it was asked for."""
    monkeypatch.setattr("flowcheck.checkpoint.read_back.CHUNK", 16)
    asked: list[tuple[int, int]] = []

    def read(real: Callable[..., bytes], name: str, at: int, size: int) -> bytes:
        asked.append((at, size))
        return real(name, at, min(size, 10))

    write(Lane(Lying(tmp_path, "rank-", read=read), LANE), 20, users={3: bytes(range(40))})  # type: ignore[arg-type]
    assert asked == [(0, 16), (10, 16), (20, 16), (30, 10)] and found(tmp_path) == [20]
    write(lane(tmp_path), 30, users={3: bytes(40)})
    assert found(tmp_path) == [20, 30]


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("how", ["shorter", "longer", "gone"])
def test_objects_of_another_size_are_no_version(tmp_path: Path, file: str, how: str) -> None:
    entry = write(lane(tmp_path), 10)
    path = tmp_path / entry.folder / file
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "shorter" else path.read_bytes() + b"\0")
    with pytest.raises(Missing if how == "gone" else UserError):
        read_entry(open_store(str(tmp_path), {}), entry.folder)
    assert lane(tmp_path).entries() == ([], [])  # and nothing that tidying may take for an attempt


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"{" * 10000])
def test_a_manifest_that_is_damaged_stays_and_is_no_version(tmp_path: Path, text: bytes) -> None:
    entry = write(lane(tmp_path), 10)
    write(lane(tmp_path), 20)
    (tmp_path / entry.folder / "manifest.json").write_bytes(text)
    to = lane(tmp_path)
    assert to.tidy(Rules(keep=1)) == [] and found(tmp_path) == [20] and (tmp_path / entry.folder).exists()


def test_whoever_writes_is_told_that_bytes_move_and_may_end_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def moving() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise Missing("enough")

    with pytest.raises(Missing, match="enough"):
        write(lane(tmp_path, moving=moving), 10)
    assert found(tmp_path) == [] and len(calls) == 5
    calls[:] = [1] * 5
    write(lane(tmp_path, moving=moving), 10)
    assert len(calls) > 12


def test_a_version_names_its_start_and_a_later_one_is_newer(tmp_path: Path) -> None:
    """Whatever its step is: what goes is of the line that was left."""
    to, starts = lane(tmp_path), [f"{began:016x}-{began:016x}-0000 {'f' * 64}" for began in (1, 2)]
    files = {MODEL: {"w": torch.ones(2)}, OPTIMIZER: {"state.w.step": torch.tensor(1.0)}}
    for start, step in ((1, 4), (0, 7), (1, 5)):
        found = to.write(step, files, replace(META, start=starts[start]), dict)
        assert read_entry(to._objects, found.folder).version.start == starts[start]
    to.tidy(Rules(keep=2))
    assert sorted(one.version.step for one in to.entries()[0]) == [4, 5]


# -- what goes -------------------------------------------------------------------------------------------------------


def entry(epoch: int, step: int, stored: float = 0.0, line: str = "") -> Any:
    return SimpleNamespace(order=(epoch, step, stored), stored=stored, folder=f"{epoch}/{step}/{stored}",
                           version=SimpleNamespace(epoch=epoch, step=step, status="unverified"),
                           line=(epoch, line) if line else None)


def gone(rules: Rules, entries: list[Any], latest: str = "", now: float = 1000.0) -> list[tuple[int, int]]:
    return [one.order[:2] for one in expired(entries, rules, now, latest)]


TEN = [entry(0, step, 900.0 + step) for step in range(0, 100, 10)]


def test_rules() -> None:
    assert gone(Rules(), TEN) == [] and gone(Rules(every=5), TEN) == []
    assert gone(Rules(keep=3), TEN) == [(0, step) for step in range(0, 70, 10)]
    assert gone(Rules(keep=100), TEN) == []
    for keep in range(1, 12):  # also where there are fewer
        for there in range(1, 11):
            goes = [(0, 10 * i) for i in range(max(0, there - keep))]
            assert gone(Rules(keep=keep), TEN[:there]) == goes, (keep, there)
    assert gone(Rules(seconds=20.0), TEN) == [(0, step) for step in range(0, 80, 10)]
    assert gone(Rules(keep=1, seconds=20.0), TEN) == [(0, step) for step in range(0, 80, 10)]
    assert gone(Rules(keep=4, seconds=20.0), TEN) == [(0, step) for step in range(0, 60, 10)]
    assert gone(Rules(keep=1, every=40), TEN) == [(0, step) for step in (10, 20, 30, 50, 60, 70)]
    assert gone(Rules(keep=1, every=35), TEN) == [(0, step) for step in (10, 20, 30, 50, 60, 80)]
    assert gone(Rules(keep=1), TEN, latest="0/30/930.0") == [(0, step) for step in (0, 10, 20, 40, 50, 60, 70, 80)]


def test_a_later_epoch_is_newer_and_has_stretches_of_its_own() -> None:
    entries = [entry(1, 5), entry(0, 50), entry(0, 60), entry(1, 6)]
    assert gone(Rules(keep=1), entries) == [(0, 50), (0, 60), (1, 5)]
    assert gone(Rules(keep=1, every=100), entries) == [(0, 60)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), unique=True, max_size=12),
       st.builds(Rules, st.integers(0, 5), st.sampled_from([0.0, 30.0]), st.integers(0, 20)))
def test_what_stays_stays_however_often_it_is_looked_at(steps: list[tuple[int, int]], rules: Rules) -> None:
    """One by one as they come, or all at once: the same stays, and the newest always."""
    kept: list[Any] = []
    everything = [entry(epoch, step, float(i)) for i, (epoch, step) in enumerate(sorted(steps))]
    for one in everything:
        kept.append(one)
        going = expired(kept, rules, one.stored, one.folder)
        assert one not in going
        kept = [other for other in kept if other not in going]
    last = everything[-1].folder if everything else ""
    now = everything[-1].stored if everything else 0.0
    assert kept == [one for one in everything if one not in expired(everything, rules, now, last)]


def test_tidying_keeps_what_the_pointer_names_and_touches_no_other_lane(tmp_path: Path) -> None:
    other = Lane(open_store(str(tmp_path), {}), "n/dp0/run2", clock=lambda: 1.0)
    write(other, 5)
    to = lane(tmp_path)
    folders = [write(to, step).folder for step in (30, 10, 20)]
    assert to.tidy(Rules(keep=1)) == [folders[1]] and found(tmp_path) == [20, 30]  # 20 was written last
    assert [one.version.step for one in other.entries()[0]] == [5]


@pytest.mark.parametrize("text", [b"", b"{}"])
def test_nothing_goes_where_the_pointer_cannot_be_read(tmp_path: Path, text: bytes) -> None:
    to = lane(tmp_path)
    for step in (10, 20, 30):
        write(to, step)
    (tmp_path / LANE / "latest.json").write_bytes(text)
    assert to.tidy(Rules(keep=1)) == [] and found(tmp_path) == [10, 20, 30]


