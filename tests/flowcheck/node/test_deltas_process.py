"""The process that writes a journal's gradients to a store: killed in the middle of an upload, before a real
S3-compatible server, and closed with its node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.control import Api
from flowcheck.node.config.store import Store
from flowcheck.node.process import child
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.store.supervisor import storing

from ..hand_api import TOKEN
from .delta_scene import lane_of, made_of_store, makeable_in
from .kept_scene import Kept, config_of, hashes_in, kept
from .store_scene import s3_options, s3_server

pytestmark = pytest.mark.slow

LONGEST = 120.0
Said = list[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def running(at: Kept) -> Iterator[tuple[ChildProcess, Said]]:
    said: Said = []
    with contextlib.closing(storing(at.config, lambda event, **fields: said.append((event, fields)))) as process:
        yield process, said


def until_sent(at: Kept, process: ChildProcess, said: Said, run: int = 0) -> None:
    """run: iterations more, each after the one before is in the store."""
    for left in range(run, -1, -1):
        newest, end = at.next_number - 1, time.monotonic() + LONGEST
        while not any((event == "delta" and fields["last"] >= newest) or (event == "stored" and fields["step"] > newest)
                      for event, fields in said):
            process.look()
            at.look()
            assert time.monotonic() < end, said
            time.sleep(0.005)
        if left:
            at.run(1)


def test_killed_in_the_middle_of_an_upload_nothing_lacks_and_nothing_is_half(
    slow_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hold = tmp_path / "store", tmp_path / "hold"
    store.mkdir()
    for name, value in {"LD_PRELOAD": slow_files, "SLOW_UNDER": store, "SLOW_MS": 10, "SLOW_HOLD": hold}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.1)
    settings = Store(url=str(store), every=20, deltas=True, keep=9)
    with kept(monkeypatch, tmp_path, keep=12, store=settings) as at, running(at) as (process, said):
        at.run(2)
        until_sent(at, process, said)
        for _ in range(3):
            at.run(2)
            end = time.monotonic() + LONGEST
            while not (half := [part for part in store.glob("*/*/*/*/deltas/*/*/part-*")
                                if not part.parent.with_name(f"{part.parent.name}.json").exists()]):
                process.look()
                assert time.monotonic() < end, said
            hold.touch()
            assert process.process is not None
            process.process.kill()
            hold.unlink()
            until_sent(at, process, said)
            assert half[0].exists()
        at.run(20)
        until_sent(at, process, said, 4)
        assert not [fields for event, fields in said if event in ("delta_gap", "unstored")]
        lane, truth = lane_of(at, store), dict(at.truth)
        there = makeable_in(lane)
        assert [*there] == [*range(min(there), at.next_number + 1)] and len({one.folder for one in there.values()}) == 2
        base = there[at.next_number]
        assert base.line is not None and lane.deltas(base.line).listed().cut == (), "the next base has tidied them away"
    for step in there:
        assert hashes_in(made_of_store(store, there[step], step, tmp_path / "made")) == truth[step]


def test_in_an_object_store_and_back_over_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    with s3_server(tmp_path / "s3") as port:
        settings = Store(url="s3://bucket/ckpt", every=12, deltas=True, keep=1, keep_every=40, options=s3_options(port))
        with kept(monkeypatch, tmp_path, keep=6, store=settings) as at:
            with running(at) as (process, said):
                at.run(1)
                until_sent(at, process, said, 55)
                at.run(3)
            newest = max(fields["last"] for event, fields in said if event == "delta")
            assert newest == at.next_number - 1, "what had come goes there at the end of the node, too"
            assert not [fields for event, fields in said if event in ("delta_gap", "unstored")], said
            truth = dict(at.truth)
        other = config_of(tmp_path / "another", store=settings.model_copy(update={"deltas": False})).model_copy(
            update={"api": Api(listen="127.0.0.1:0"), "journal": None, "name": "another"})
        with contextlib.closing(Serving(other, TOKEN.encode(), lambda *_, **__: None)) as node:
            for step in (40, newest, newest + 1):
                taken = flowcheck.fetch(str(node.address), tmp_path / "got", token=TOKEN, step=step)
                assert taken.source.endswith(", store") and hashes_in(taken.path) == truth[step]
            with pytest.raises(EnvironmentProblem, match="step 20 is not there"):
                flowcheck.fetch(str(node.address), tmp_path / "got", token=TOKEN, step=20)
