"""A copy of a version that a node has: the same in every byte, whole or not there, and what there was stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY
from flowcheck.ask.receiving import AskError
from flowcheck.checkpoint.copies import take_copy
from flowcheck.checkpoint.directory import load_step
from flowcheck.checkpoint.users import load_user
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.versions.holdings import DiskShelf

from ..hand_api import KEY, HandApi, HandVersion, seal


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(7, epoch=2, shard="dp0", status="unverified")) as made:
        yield made


def copy(api: HandApi, out: Path) -> Path:
    node = NodeClient(api.address, KEY, seconds=60.0)
    return take_copy(node, node.offers()[0], out)


def test_everything_is_the_sources(api: HandApi, tmp_path: Path) -> None:
    state = {"generator": torch.arange(5), "epoch": 3}
    api.versions[0].give(1, pack(state, step=7, rank=1, ranks=2))
    path = copy(api, tmp_path)
    assert path == tmp_path / "step-000007" and [one.name for one in tmp_path.iterdir()] == [path.name]
    found = load_step(path)  # which checks every hash, of files and tensors
    assert {name: one.tolist() for name, one in found.parameters.items()} == {"w": [7.5, 2.0], "b": [3.0]}
    assert found.optimizer_state["w"]["momentum_buffer"].tolist() == [1.0, 7.0]
    source = api.versions[0].document
    for key in ("run_id", "epoch", "step", "shard", "status", "unproven", "rounding", "optimizer"):
        assert found.manifest[key] == source[key], key
    assert found.manifest["copied_from"] == f"{api.name}, memory"
    user = load_user(path, found.manifest, 1)
    assert (user.rank, user.ranks, user.state["epoch"]) == (1, 2, 3)
    assert torch.equal(user.state["generator"], state["generator"])
    with pytest.raises(UserError):
        load_user(path, found.manifest, 0)


@pytest.mark.parametrize(("status", "matches"), [("verified", 4), ("verified", 1), ("unverified", 3)])
def test_what_the_source_would_offer_is_offered_of_its_copy(
    api: HandApi, tmp_path: Path, status: str, matches: int
) -> None:
    """In shadow mode, by how many checksums had matched: as many as the source says, and not as many as its status."""
    api.versions[0].document = seal(api.versions[0].document | {"status": status, "matches": matches})
    copy(api, tmp_path / "source" / "run" / "epoch-2")
    for needs, offered in ((0, True), (matches, True), (matches + 1, False)):
        with closing(DiskShelf(tmp_path, tier=COPY, needs=needs)) as shelf:
            (found,) = shelf.look()
            assert (found.offer.matches, found.offer.status) == (matches, status)
            assert (shelf.withheld(found.offer) == "") == offered, needs


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_leaves_nothing_and_harms_nothing(api: HandApi, tmp_path: Path, file: str) -> None:
    held = api.versions[0]
    before = copy(api, tmp_path)
    there = {one: one.read_bytes() for one in before.iterdir()}
    held.files[file] = held.files[file][:-1] + bytes([held.files[file][-1] ^ 1])
    with pytest.raises(AskError, match="SHA-256 differs"):
        copy(api, tmp_path)
    assert {one: one.read_bytes() for one in before.iterdir()} == there
    with pytest.raises(AskError):
        copy(api, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_connection_that_is_cut_is_gone_on_with(api: HandApi, tmp_path: Path) -> None:
    held = api.versions[0]
    api.cut[f"/v1/versions/{held.id}/model.safetensors"] = [len(held.files["model.safetensors"]) - 3]
    assert load_step(copy(api, tmp_path)).parameters["w"].tolist() == [7.5, 2.0]
    assert api.asked_for("model.safetensors") == 2


def test_a_source_that_goes_on_the_way_leaves_nothing(api: HandApi, tmp_path: Path) -> None:
    api.cut[f"/v1/versions/{api.versions[0].id}/optimizer.safetensors"] = [9, 0, 0, 0]
    with pytest.raises(AskError, match="closed before its end"):
        copy(api, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_newer_copy_of_the_same_step_takes_the_place_at_once(api: HandApi, tmp_path: Path) -> None:
    copy(api, tmp_path)
    api.versions[:] = [HandVersion(7, {"w": [9.0, 9.0], "b": [9.0]}, epoch=2, shard="dp0")]
    assert load_step(copy(api, tmp_path)).parameters["w"].tolist() == [9.0, 9.0]
    assert [one.name for one in tmp_path.iterdir()] == ["step-000007"]


def test_what_is_somebody_elses_stays(api: HandApi, tmp_path: Path) -> None:
    (tmp_path / "step-000007").mkdir()
    with pytest.raises(UserError, match="left alone"):
        copy(api, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentProblem):
        copy(api, tmp_path / "file")
