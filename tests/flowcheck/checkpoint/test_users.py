"""What ranks gave of themselves, in a checkpoint directory and out of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.checkpoint.fetch import fetch
from flowcheck.checkpoint.users import file_of, load_user, users_of
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.user_state import pack
from flowcheck.errors import UserError

from ..hand_api import TOKEN, HandApi, HandVersion


def given(rank: int, step: int = 7, at: int = 0) -> bytes:
    return pack({"user": {"at": at or rank}, "rng": {}, "groups": []}, step=step, rank=rank, ranks=4)


def written(out: Path, **users: bytes) -> Path:
    held = {int(rank.removeprefix("r")): data for rank, data in users.items()}
    return write_step(out, 7, {"w": torch.zeros(2)}, {}, Meta(run_id="run"), lambda: held)


def test_every_ranks_own_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, r0=given(0), r3=given(3))
    checkpoint = flowcheck.load_checkpoint(tmp_path)
    assert checkpoint.users == (0, 3) and checkpoint.user(3)["user"] == {"at": 3}
    assert sorted(one.name for one in path.iterdir()) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors", "user"
    ]
    assert json.loads((path / "manifest.json").read_text())["user"].keys() == {"0", "3"}
    with pytest.raises(UserError, match="has no state of rank 1"):
        checkpoint.user(1)
    for odd in ("0", None, -1, True, 0.0):
        with pytest.raises(UserError, match="is not a rank"):
            checkpoint.user(odd)  # type: ignore[arg-type]


def test_a_checkpoint_without_is_as_it_was(tmp_path: Path) -> None:
    path = write_step(tmp_path, 7, {"w": torch.zeros(2)}, {}, Meta(), dict)
    assert "user" not in json.loads((path / "manifest.json").read_text()) and not (path / "user").exists()
    checkpoint = flowcheck.load_checkpoint(path)
    assert checkpoint.users == ()
    with pytest.raises(UserError, match="has no state of rank 0"):
        checkpoint.user(0)


def test_what_is_no_entry_is_left_out() -> None:
    good = {"bytes": 1, "sha256": "x"}
    said: dict[str, Any] = {"user": {"3": good, "0": good, "x": good, "70000": good, "1": 7, "2": {}, "²": good}}
    assert list(users_of(said)) == [0, 3] and users_of({"user": []}) == users_of({}) == {}


def test_a_file_that_is_another_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, r0=given(0), r1=given(1), r2=given(2, step=6))
    checkpoint = flowcheck.load_checkpoint(path)
    file_of(path, 0).write_bytes(given(0, at=9))  # whole in itself, and not what was written
    with pytest.raises(UserError, match=r"rank-00000\.safetensors: has other bytes than those written"):
        checkpoint.user(0)
    file_of(path, 1).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.user(1)
    with pytest.raises(UserError, match="is of step 6 and rank 2"):
        checkpoint.user(2)


def test_a_step_that_is_replaced_gives_no_state_of_another_version(tmp_path: Path) -> None:
    """The same step of another start, say. Its tensors are in memory, and its ranks' states would be of the new one."""
    path = written(tmp_path, r0=given(0), r1=given(1))
    before = flowcheck.load_checkpoint(path)
    assert before.user(0)["user"] == {"at": 0}
    write_step(tmp_path, 7, {"w": torch.ones(2)}, {}, Meta(run_id="run", epoch=1), lambda: {0: given(0, at=9)})
    for rank in (0, 1):
        with pytest.raises(UserError, match="was replaced by another version after its tensors were read") as refused:
            before.user(rank)
        assert refused.value.where == str(path) and "load_checkpoint once more" in refused.value.remedy
    after = flowcheck.load_checkpoint(path)
    assert after.user(0)["user"] == {"at": 9} and after.parameters["w"].tolist() == [1.0, 1.0]


def test_one_that_is_replaced_while_a_state_is_read_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, r0=given(0))
    before = flowcheck.load_checkpoint(path)

    def late(*asked: Any) -> Any:
        written(tmp_path, r0=given(0, at=9))
        return load_user(*asked)

    monkeypatch.setattr("flowcheck.checkpoint.state.load_user", late)
    with pytest.raises(UserError, match="was replaced by another version"):
        before.user(0)


def test_fetched_files_have_those_of_all_ranks(tmp_path: Path) -> None:
    with HandApi(HandVersion(7)) as api:
        for rank in (0, 3):
            api.versions[0].give(rank, given(rank))
        taken = fetch(api.name, tmp_path, token=TOKEN)
        asked = api.asked_for("/user/3")
        fetch(api.name, tmp_path, token=TOKEN, format="torch")
        assert asked == api.asked_for("/user/3") == 1
    checkpoint = flowcheck.load_checkpoint(taken.path)
    assert checkpoint.users == (0, 3) and checkpoint.user(3)["user"] == {"at": 3}


def test_what_the_manifest_says_of_each(tmp_path: Path) -> None:
    path = written(tmp_path, r3=given(3))
    assert json.loads((path / "manifest.json").read_text())["user"] == {
        "3": {"bytes": len(given(3)), "sha256": hashlib.sha256(given(3)).hexdigest()},
    }


def test_ranks_have_a_bound() -> None:
    good = {"bytes": 1, "sha256": "x"}
    said = {"user": {str(MOST_RANKS - 1): good, str(MOST_RANKS): good, "000001": good}}
    assert list(users_of(said)) == [MOST_RANKS - 1]


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    """Its hash is right: whoever wrote it wrote no state."""
    path = written(tmp_path, r0=b"something else")
    with pytest.raises(UserError) as raised:
        flowcheck.load_checkpoint(path).user(0)
    assert str(file_of(path, 0)) in str(raised.value.message())
