"""What is measured of gradients: in sessions, in metrics, in files; and that nothing is there without the setting."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.errors import UserError
from flowcheck.node.config.load import load
from flowcheck.node.config.telemetry import Telemetry as Settings
from flowcheck.node.status.metrics import exposition
from flowcheck.node.status.telemetry import Telemetry, parts_of
from flowcheck.rebuild.iteration.measuring import Measured
from flowcheck.rebuild.version.events import Closed, GradientsMeasured, Timed
from updater.measure import Found

from .live_scene import NAMES, Live, small_job
from .told_scene import attached, document

RUN = Path("run-7/epoch-1")


class Scene(Live):
    """measured: what passes found. times: of iterations."""

    def __init__(self, patch: pytest.MonkeyPatch, every: int = 1, **more: Any) -> None:
        self.measured: list[Measured] = []
        self.times: list[Any] = []
        super().__init__(patch, small_job(), telemetry=Settings(every=every), **more)

    def take(self, events: Any) -> None:
        def seen() -> Any:
            for event in events:
                if isinstance(event, GradientsMeasured):
                    self.measured.append(event.measured)
                if isinstance(event, Timed):
                    self.times.append(event.times)
                yield event

        super().take(seen())

    def until(self, count: int) -> Measured:
        """Passes end on threads of their own."""
        while len(self.measured) < count:
            self.look()
        return self.measured[-1]

    def step(self, iteration: int, **fields: Any) -> Closed:
        """As of Live; the pass over the iteration before is waited for."""
        self.traffic(iteration)
        assert self.record(iteration, **fields) == ""
        while not self.closed or self.closed[-1].iteration < iteration:
            self.look()
        return self.closed[-1]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Scene] = []

    def begin(**more: Any) -> Scene:
        made.append(Scene(monkeypatch, **more))
        made[-1].state(0)
        return made[-1]

    yield begin
    for one in made:
        one.session.close()


def test_each_tensor_of_a_published_iteration_is_measured(scene: Callable[..., Scene]) -> None:
    at = scene()
    assert at.step(0).published
    found = at.until(1)
    assert (found.iteration, list(found.names)) == (0, NAMES)
    sizes = {entry.name: math.prod(entry.shape) for entry in at.job.model}
    assert [one.elements for one in found.gradients] == [sizes[name] for name in NAMES]
    for name, gradient, weight in zip(found.names, found.gradients, found.weights, strict=True):
        assert (gradient.squares, gradient.largest, gradient.zeros) == (sizes[name], 1.0, 0)
        assert (weight.squares, weight.change) == (sizes[name], 0.25 * sizes[name])  # 1.0 became 0.5
    at.step(1)
    assert {one.change / one.squares for one in at.until(2).weights} == {1.0}  # 0.5 became 0.0


def test_a_nan_is_named_with_its_tensor_and_element(scene: Callable[..., Scene]) -> None:
    at = scene()
    at.step(0)
    at.until(1)
    bucket = at.job.bucket_layout(1)[1].slices[-1]
    region = at.engine.region(1).view(np.float32)
    at.traffic(1)
    place = at.session.plan.buckets[1]
    region[place.offset // 4 + bucket.offset + 2] = np.nan
    at.record(1)
    at.poll()
    found = at.until(2)
    odd = {name: one for name, one in zip(found.names, found.gradients, strict=True) if one.nans}
    assert {name: (one.nans, one.first_nan, one.infs) for name, one in odd.items()} == {
        bucket.name: (1, bucket.start + 2, 0)}
    assert all(math.isfinite(one.squares) for one in found.gradients)


def test_what_is_missing_is_not_measured_and_only_due_iterations_are(scene: Callable[..., Scene]) -> None:
    at = scene(every=2)
    at.step(0)
    at.until(1)
    at.step(1)
    at.part(2, (0, 20), past=True)  # the second bucket lacks its elements
    at.record(2)
    at.traffic(3)
    at.poll()
    at.finish()
    assert [one.iteration for one in at.measured] == [0, 2]
    whole = {piece.name for piece in at.job.bucket_layout(2)[0].slices}
    lacking = {piece.name for piece in at.job.bucket_layout(2)[1].slices}
    assert {name for name, one in zip(at.measured[1].names, at.measured[1].gradients, strict=True)
            if one.elements} == whole - lacking
    assert {one.elements for one in at.measured[1].weights} == {0}, "no version was published"


def test_versions_go_on_with_the_first_two_slots_and_say_what_they_waited_for(scene: Callable[..., Scene]) -> None:
    """A pass reads the slot that the next version needs."""
    at = scene(slots=2)
    for iteration in range(12):
        assert at.step(iteration).published
    at.finish()
    assert [one.iteration for one in at.measured] == list(range(12))
    assert all(one.elements for found in at.measured for one in found.weights)
    assert [one.measured is not None for one in at.times] == [False] + [True] * 11
    assert at.values() == {name: {1.0 - 0.5 * 12} for name in NAMES}
    assert at.engine.retired[-1:] and at.session.begun == range(0)


def test_checksums_find_versions_as_without(scene: Callable[..., Scene]) -> None:
    at = scene()
    for iteration in range(4):
        assert at.step(iteration, checksums=at.sums(1.0 - 0.5 * (iteration + 1))).status == "verified"
    at.finish()
    assert len(at.measured) == 4 and at.session.matches == 4


def test_without_the_setting_nothing_of_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("memory and threads for what nobody asked for")

    monkeypatch.setattr("flowcheck.rebuild.iteration.measuring.Measurer", never)
    monkeypatch.setattr("flowcheck.rebuild.iteration.measuring.Parts", never)
    at = Live(monkeypatch)
    at.state(0)
    assert at.step(0).published
    at.session.close()
    path = tmp_path / "node.toml"
    path.write_text('[control]\nlisten = "localhost:1"\ntoken_file = "t"\n[capture]\ndevice = "d"\n')
    assert load(path).telemetry is None


# -- figures and files ----------------------------------------------------------------------------------------------


def passes(scene: Scene, *, nan: bool = False) -> Measured:
    iteration = len(scene.closed)
    scene.traffic(iteration)
    if nan:
        scene.engine.region(iteration).view(np.float32)[scene.session.plan.buckets[0].offset // 4 + 7] = np.nan
    scene.record(iteration)
    return scene.until(iteration + 1)


def value(text: bytes, line: str) -> float:
    found = [one for one in text.decode().splitlines() if one.startswith(line)]
    assert len(found) == 1, (line, found)
    return float(found[0].rpartition(" ")[2])


def test_a_nan_is_in_metrics_in_the_file_and_said_once(scene: Callable[..., Scene], tmp_path: Path) -> None:
    at, said = scene(), []
    telemetry = Telemetry(Settings(directory=tmp_path), lambda *_, **__: None)
    for iteration in range(4):
        found = passes(at, nan=iteration in (1, 2))
        telemetry.take("dp0", RUN, found.iteration + 100, found, lambda event, **of: said.append((event, of)))
    piece = next(one for one in at.job.bucket_layout(1)[0].slices if one.offset <= 7 < one.offset + one.length)
    element = piece.start + 7 - piece.offset
    assert said == [("not_finite", {"iteration": 101, "tensor": piece.name, "element": element, "kind": "nan",
                                    "nan": 1, "infinity": 0, "tensors": 1})]
    telemetry.close()
    text, _ = exposition(document(attached(), telemetry=telemetry.document()), "text/plain")
    where = f'{{group="dp0",kind="nan",tensor="{piece.name}"}}'
    assert value(text, f"flowcheck_gradient_not_finite_first_element{where}") == element
    assert value(text, f"flowcheck_gradient_not_finite_iteration{where}") == 102
    assert value(text, 'flowcheck_gradient_iteration{group="dp0"}') == 103
    assert value(text, 'flowcheck_telemetry_rows_total{group="dp0",result="written"}') == 4 * len(NAMES)
    with open(tmp_path / "dp0" / RUN / "gradients.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(NAMES)
    assert [(row["iteration"], row["tensor"], row["nan"], row["first_nan"]) for row in rows if row["nan"] != "0"] == [
        (number, piece.name, "1", str(element)) for number in ("101", "102")]
    assert float(rows[0]["norm"]) == pytest.approx(math.sqrt(int(rows[0]["elements"]))) and rows[0]["zeros"] == "0.0"
    assert {row["update_ratio"] for row in rows[: len(NAMES)]} == {"0.5"}


def test_files_turn_by_size_and_the_oldest_go(scene: Callable[..., Scene], tmp_path: Path) -> None:
    at = scene()
    found = passes(at)
    wide = Measured(0, tuple(f"layer{i}.{'w' * 200}" for i in range(4000)), found.gradients[:1] * 4000,
                    found.weights[:1] * 4000, 0.0)
    for _ in range(8):
        telemetry = Telemetry(Settings(directory=tmp_path, file_mb=1, files=3), lambda *_, **__: None)
        telemetry.take("", RUN, 0, wide, lambda *_, **__: None)
        telemetry.close()
    files = sorted(tmp_path.rglob("*.csv"))
    assert len(files) == 3 and all(file.read_text().startswith("time,iteration,tensor,") for file in files)
    assert all(len(file.read_text().splitlines()) % 4000 == 1 for file in files)


def test_a_directory_that_cannot_be_written_is_said_and_rows_are_counted(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    at, said = scene(), []
    (tmp_path / "file").write_text("")
    telemetry = Telemetry(Settings(directory=tmp_path / "file"), lambda event, **fields: said.append((event, fields)))
    for _ in range(2):
        telemetry.take("dp0", RUN, 0, passes(at), lambda *_, **__: None)
    telemetry.close()
    assert telemetry.document()["dp0"]["rows"] == {"written": 0, "dropped": 2 * len(NAMES)}
    assert [(event, fields["about"]) for event, fields in said] == [("problem", "telemetry")]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the file: opening it does not return."""
    path = tmp_path / "dp0" / RUN / "gradients.csv"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    telemetry = Telemetry(Settings(directory=tmp_path), lambda *_, **__: None)
    one = Found(4, 1.0, 1.0, 1.0, 0, 0, 0, -1, -1)
    for iteration in range(12):
        telemetry.take("dp0", RUN, iteration, Measured(iteration, ("a", "b"), (one,) * 2, (one,) * 2, 0.1),
                       lambda *_, **__: None)
    assert telemetry.document()["dp0"]["rows"] == {"written": 0, "dropped": 4 * 2}
    reader = os.open(path, os.O_RDWR)  # it answers again
    telemetry.close()
    rows = os.read(reader, 1 << 16).decode().splitlines()
    os.close(reader)
    assert [row.split(",")[1] for row in rows] == [str(iteration) for iteration in range(8) for _ in "ab"]
    assert telemetry.document()["dp0"]["rows"] == {"written": 8 * 2, "dropped": 4 * 2}


@pytest.mark.parametrize(("most", "expected"), [
    (4, ["a.0.w", "a.0.b", "a.1.w", "b.w"]), (3, ["a.0", "a.0", "a.1", "b.w"]), (2, ["a", "a", "a", "b"]),
    (1, [""] * 4), (0, [""] * 4),
])
def test_parts_are_the_longest_prefixes_that_have_room(most: int, expected: list[str]) -> None:
    assert parts_of(["a.0.w", "a.0.b", "a.1.w", "b.w"], most) == expected


def test_parts_have_no_names_that_the_board_cannot_hold() -> None:
    assert parts_of([f"a.{'x' * 500}", "b.w"], 8) == ["a", "b"]


def test_metrics_have_no_more_series_than_the_page_says() -> None:
    telemetry = Telemetry(Settings(series=8), lambda *_, **__: None)
    names = tuple(f"block{i // 10}.sub{i}.weight" for i in range(80))
    odd = Found(4, 1.0, 1.0, 1.0, 0, 1, 1, 0, 1)
    telemetry.take("dp0", RUN, 3, Measured(3, names, (odd,) * 80, (odd,) * 80, 0.1), lambda *_, **__: None)
    text, _ = exposition(document(attached(), telemetry=telemetry.document()), "text/plain")
    mine = [line for line in text.decode().splitlines() if line.startswith(
        ("flowcheck_gradient", "flowcheck_update_ratio", "flowcheck_unmeasured", "flowcheck_meas", "flowcheck_telem"))]
    assert len(mine) == 6 * (8 + 1) + 8, "docs/use/operating.md says so"


def test_a_holder_has_nothing_to_measure(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        '[protect]\ncopies = ["a:1"]\n[api]\nlisten = "127.0.0.1:0"\n[tokens]\npeer = "t"\n[telemetry]\n')
    with pytest.raises(UserError, match="follows jobs"):
        load(tmp_path / "node.toml")
