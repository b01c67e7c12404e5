"""Names of runs and of their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.node.runs import new_run_id, run_folder


@pytest.mark.parametrize(("run_id", "folder"), [
    ("run-7", "run-7"), ("20261122-104700-0a1b2c", "20261122-104700-0a1b2c"), ("a/b c", "a%2Fb%20c"), ("..", "%2E."),
    (".hidden.x", "%2Ehidden.x"), ("a.b", "a.b"), ("", "%"), ("%", "%25"), ("\N{SNOWMAN}", "%E2%98%83"),
])
def test_a_run_has_a_folder_of_its_own(run_id: str, folder: str) -> None:
    assert run_folder(run_id, 3) == Path(folder) / "epoch-3"


def test_a_folder_of_any_run_can_be_made(tmp_path) -> None:
    long = [run_folder("x" * 5000 + last, 0) for last in "ab"]
    for folder in long:
        (tmp_path / folder).mkdir(parents=True)
    assert long[0] != long[1] and len({new_run_id() for _ in range(100)}) == 100
