"""Where checkpoints wait and where they lie: directories, each with the manifest that makes it a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.checkpoint.directory import MANIFEST
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.offline.offer import Offer


def write(folder: Path, step: int, content: str = "new") -> Path:
    path = folder / f"step-{step:06}"
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(content)
    return path


def there(out: Path) -> dict[str, str]:
    """Every checkpoint at or below `out`, with its content."""
    return {str(path.parent.relative_to(out)): path.read_text() for path in out.rglob(MANIFEST)}


def test_nothing_is_in_place_before_the_manifest_is_confirmed(tmp_path: Path) -> None:
    """Where they wait is told by dots: nobody takes these for checkpoints to be had."""
    offer = Offer(tmp_path)
    for step in (1, 2):
        assert offer.take(write(offer.aside, step)) == tmp_path / f"step-{step:06}"
    assert there(tmp_path) == {".unconfirmed/step-000001": "new", ".unconfirmed/step-000002": "new"}
    offer.confirm(True)
    assert there(tmp_path) == {"step-000001": "new", "step-000002": "new"}
    offer.take(write(offer.aside, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000003"]


def test_what_is_replaced_waits_until_the_end(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    offer = Offer(tmp_path)
    offer.take(write(offer.aside, 1))
    offer.confirm(True)
    assert there(tmp_path) == {"step-000001": "new", ".replaced/step-000001": "old"}
    offer.take(write(offer.aside, 1, "newer"))
    assert there(tmp_path) == {"step-000001": "newer", ".replaced/step-000001": "old"}, "not what this replay wrote"
    offer.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_what_is_refuted_gives_way_to_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    offer = Offer(tmp_path)
    offer.take(write(offer.aside, 1))
    offer.take(write(offer.aside, 2))
    offer.confirm(True)
    offer.confirm(False)
    assert not offer.confirmed
    assert (tmp_path / "step-000001" / MANIFEST).read_text() == "old" and not (tmp_path / "step-000002").exists()
    offer.clear()
    assert there(tmp_path) == {"step-000001": "old"}


def test_what_is_refuted_while_it_waits_is_gone(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    offer = Offer(tmp_path)
    offer.take(write(offer.aside, 1))
    offer.confirm(False)
    assert there(tmp_path) == {"step-000001": "old"} and not offer.aside.exists()


def test_the_end_clears_what_a_killed_replay_has_left(tmp_path: Path) -> None:
    killed = Offer(tmp_path)
    write(killed.aside, 7)
    write(tmp_path / ".replaced", 8)
    Offer(tmp_path).clear()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "notes.txt").write_text("mine")
    offer = Offer(tmp_path)
    offer.take(write(offer.aside, 1))
    with pytest.raises(UserError, match="not a checkpoint of this project"):
        offer.confirm(True)
    assert (tmp_path / "step-000001" / "notes.txt").read_text() == "mine"


def test_a_place_for_what_is_replaced_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / ".replaced").write_text("a file")
    write(tmp_path, 1, "old")
    offer = Offer(tmp_path)
    offer.take(write(offer.aside, 1))
    with pytest.raises(EnvironmentProblem, match=r"cannot be written") as problem:
        offer.confirm(True)
    assert problem.value.where == str(tmp_path / ".replaced")
