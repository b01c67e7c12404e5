"""Which replica file of a group is served, what an earlier process left, and what may go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.node.served import Kept, Served
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

ANY: Any = object()  # a replica: only whether there is one counts


def replica(path: Path, run_id: str, step: int) -> None:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    Replica({"w": torch.ones(3)}, spec, path=path, run_id=run_id, step=step).close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_state_gets_a_file_of_its_own(tmp_path) -> None:
    served = Served(tmp_path, "node", "a")
    assert served.path(5) == tmp_path / "flowcheck-node-a-1.replica"
    assert served.path(5) == tmp_path / "flowcheck-node-a-2.replica"


@pytest.mark.parametrize(("there", "number"), [
    (["flowcheck-n-g-3.replica", "flowcheck-n-g-12.replica", "flowcheck-n-g-9.replica"], 13),  # as numbers, not text
    (["flowcheck-n-h-7.replica", "flowcheck-m-g-7.replica", "flowcheck-n-g-h-7.replica"], 1),  # other groups, nodes
    (["flowcheck-n-g-x.replica", "flowcheck-n-g-.replica", "flowcheck-n-g-4.replica.new", "flowcheck-n-g-5"], 1),
])  # fmt: skip
def test_numbers_go_on_after_those_of_earlier_processes(tmp_path, there: list[str], number: int) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert Served(tmp_path, "n", "g").path(0).name == f"flowcheck-n-g-{number}.replica"


def test_what_earlier_processes_left_is_found(tmp_path) -> None:
    for number, (run, step) in enumerate([("first", 5), ("second", 9)], 3):
        replica(tmp_path / f"flowcheck-n-g-{number}.replica", run, step)
    replica(tmp_path / "flowcheck-n-other-5.replica", "not ours", 1)
    (tmp_path / "flowcheck-n-g-1.replica").write_bytes(b"torn")
    assert Served(tmp_path, "n", "g").found() == [
        Kept(tmp_path / "flowcheck-n-g-3.replica", "first", 5), Kept(tmp_path / "flowcheck-n-g-4.replica", "second", 9),
    ]  # fmt: skip


def test_when_the_newest_file_holds_a_version_older_ones_go(tmp_path) -> None:
    others = ["flowcheck-n-g-x.replica", "flowcheck-n-h-1.replica", "flowcheck-n-g-1.replica.new"]
    for name in ["flowcheck-n-g-1.replica", "flowcheck-n-g-7.replica", *others]:
        (tmp_path / name).touch()
    served = Served(tmp_path, "n", "g")
    served.path(0).touch()
    newest = served.path(0)
    newest.touch()
    served.keep_only(ANY)
    assert names(tmp_path) == sorted([*others, "flowcheck-n-g-9.replica"])
    served.keep_only(ANY)
    assert newest.exists()


@pytest.mark.parametrize("end", [lambda served: served.remove(), lambda served: served.keep_only(None)])
def test_without_a_replica_nothing_is_served(tmp_path, end: Any) -> None:
    (tmp_path / "flowcheck-n-g-1.replica").touch()
    (tmp_path / "flowcheck-n-h-1.replica").touch()
    served = Served(tmp_path, "n", "g")
    served.path(0).touch()
    end(served)
    assert names(tmp_path) == ["flowcheck-n-h-1.replica"]


def test_a_file_that_somebody_else_removed_is_no_matter(tmp_path, monkeypatch) -> None:
    served = Served(tmp_path, "n", "g")
    gone = tmp_path / "flowcheck-n-g-1.replica"
    monkeypatch.setattr(served, "_files", lambda: [gone])  # it was there a moment ago
    served.remove()
