"""Parity of the shards of a job: whatever is lost, up to as many as it allows, comes back; a round that fails harms
nothing; nothing wrong becomes a checkpoint."""

from __future__ import annotations

import itertools
import json
import mmap
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.checkpoint.coding import manual_parity, parity
from flowcheck.checkpoint.coding.manual_parity import protect, restore_shard
from flowcheck.checkpoint.coding.parity import Protected
from flowcheck.checkpoint.directory import load_step
from flowcheck.control.tensors import TensorSpec
from flowcheck.errors import EnvironmentProblem, UserError

from ..hand_api import TOKEN, HandApi, HandVersion

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the names leave

LENGTHS = {"stage0": 5, "stage1": 900, "stage2": 40}
CUT = 512  # bytes of a piece: several of the longest stream


def floats(*seed: object, count: int) -> list[float]:
    return [random.Random(str(seed)).randrange(1 << 20) / 8 for _ in range(count)]


def version(shard: str, step: int, **about: Any) -> HandVersion:
    count = LENGTHS[shard]
    model = {f"{shard}.w": floats(shard, step, count=count), f"{shard}.b": floats(shard, step, "b", count=3)}
    state = {f"state.{shard}.w.momentum_buffer": floats(shard, step, "m", count=count)}
    return HandVersion(step, model, state, shard=shard, **about)


class Cluster:
    """A node for each shard, with the versions 6 and 7."""

    def __init__(self, stack: ExitStack) -> None:
        self.nodes = {
            shard: stack.enter_context(HandApi(version(shard, 7), version(shard, 6))) for shard in LENGTHS
        }

    def names(self, *without: str) -> list[str]:
        return [node.name for shard, node in self.nodes.items() if shard not in without]

    def wanted(self, shard: str, step: int = 7) -> dict[str, list[float]]:
        """Its parameters."""
        counts = {f"{shard}.w": ((shard, step), LENGTHS[shard]), f"{shard}.b": ((shard, step, "b"), 3)}
        return {name: floats(*seed, count=count) for name, (seed, count) in counts.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(parity, "PIECE", CUT)
    with ExitStack() as stack:
        yield Cluster(stack)


def write(cluster: Cluster, out: Path, parity: int = 2, **named: Any) -> Protected:
    return protect(cluster.names(), out, token=TOKEN, parity=parity, **named)


def back(cluster: Cluster, kept: Path, out: Path, shard: str, *without: str) -> Path:
    return restore_shard(kept, cluster.names(shard, *without), out, token=TOKEN, shard=shard)


def problem(kind: type[flowcheck.FlowcheckError], call: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*given, **named)
    assert caught.value.remedy
    return caught.value.message()


def test_what_is_written(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path / "new")
    assert kept.path == tmp_path / "new" / "step-000007.parity" and (kept.step, kept.key) == (7, (0, 7))
    assert sorted(path.name for path in kept.path.iterdir()) == ["parity.json", "stream-3.bin", "stream-4.bin"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-000007.parity"]
    longest = 4 * (900 + 3 + 900)
    assert kept.length == longest and {kept.stream(n).stat().st_size for n in (3, 4)} == {longest}
    assert kept.padded == 3 * longest - 4 * sum(2 * count + 3 for count in LENGTHS.values())
    assert Protected.read(kept.path) == kept and [one.shard for one in kept.versions] == list(LENGTHS)


@pytest.mark.parametrize("lost", [gone for count in (1, 2) for gone in itertools.combinations(LENGTHS, count)])
def test_lost_shards_come_back(cluster: Cluster, tmp_path: Path, lost: tuple[str, ...]) -> None:
    """Each from those that are left alone, as checkpoints with every hash checked."""
    kept = write(cluster, tmp_path)
    for shard in lost:
        path = back(cluster, kept.path, tmp_path / shard, shard, *lost)
        assert path == tmp_path / shard / "step-000007" and [one.name for one in path.parent.iterdir()] == [path.name]
        found = load_step(path)
        assert {name: tensor.tolist() for name, tensor in found.parameters.items()} == cluster.wanted(shard)
        assert found.optimizer_state[f"{shard}.w"]["momentum_buffer"].tolist() == floats(
            shard, 7, "m", count=LENGTHS[shard])
        assert (found.manifest["shard"], found.manifest["run_id"], found.manifest["status"]) == (
            shard, "run", "verified")


def test_one_lost_more_than_parity_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path, parity=1)
    said = problem(UserError, back, cluster, kept.path, tmp_path / "x", "stage0", "stage2")
    assert "2 of 4 streams are there, and 3 are needed" in said
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_a_stream_of_parity_that_is_lost_is_one_of_the_lost(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path)
    kept.stream(3).unlink()
    assert load_step(back(cluster, kept.path, tmp_path / "x", "stage1")).step == 7
    said = problem(UserError, back, cluster, kept.path, tmp_path / "y", "stage1", "stage0")
    assert "2 of 5 streams are there" in said


def test_the_newest_step_that_all_have(cluster: Cluster, tmp_path: Path) -> None:
    del cluster.nodes["stage1"].versions[0]
    kept = write(cluster, tmp_path)
    assert kept.step == 6
    found = load_step(back(cluster, kept.path, tmp_path / "x", "stage2"))
    assert {name: one.tolist() for name, one in found.parameters.items()} == cluster.wanted("stage2", 6)
    del cluster.nodes["stage1"].versions[0]
    said = problem(EnvironmentProblem, write, cluster, tmp_path, shards=list(LENGTHS))
    assert "no step of every shard is there: 'stage0', 'stage1', 'stage2'" in said
    assert "step 9 not of every shard" in problem(EnvironmentProblem, write, cluster, tmp_path, step=9,
                                                  shards=["stage0", "stage2"])


def test_shards_that_have_moved_on_are_not_mixed(cluster: Cluster, tmp_path: Path) -> None:
    """The others have another step by now: it is not taken for the one that parity is of."""
    kept = write(cluster, tmp_path)
    for shard in ("stage0", "stage2"):
        cluster.nodes[shard].versions[:] = [version(shard, 8)]
    said = problem(UserError, back, cluster, kept.path, tmp_path / "x", "stage1")
    assert "2 of 5 streams are there" in said
    cluster.nodes["stage0"].versions[:] = [version("stage0", 7, epoch=1)]  # step 7 of another start
    assert "2 of 5" in problem(UserError, back, cluster, kept.path, tmp_path / "x", "stage1")
    other = HandVersion(7, {"stage0.w": [1.0]}, {}, shard="stage0")  # or other bytes under its name
    cluster.nodes["stage0"].versions[:] = [other]
    assert "2 of 5" in problem(UserError, back, cluster, kept.path, tmp_path / "x", "stage1")


def spoil(one: HandVersion, file: str = "optimizer.safetensors") -> None:
    data = one.files[file]
    one.files[file] = data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_round_that_fails_leaves_the_parity_before(cluster: Cluster, tmp_path: Path, file: str) -> None:
    before = write(cluster, tmp_path, step=6)
    spoil(cluster.nodes["stage1"].versions[0], file)
    said = problem(EnvironmentProblem, write, cluster, tmp_path)
    assert "shard 'stage1'" in said and "SHA-256 differs" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006.parity"] and Protected.read(before.path)
    cluster.nodes["stage1"].versions[0] = version("stage1", 7)
    whole = write(cluster, tmp_path)
    spoil(cluster.nodes["stage0"].versions[0], file)  # and where that step has parity already
    problem(EnvironmentProblem, write, cluster, tmp_path)
    cluster.nodes["stage0"].versions[0] = version("stage0", 7)
    assert load_step(back(cluster, whole.path, tmp_path / "x", "stage2")).step == 7


@pytest.mark.parametrize("at", [0, 700, -1])
def test_parity_that_was_changed_makes_no_checkpoint(cluster: Cluster, tmp_path: Path, at: int) -> None:
    kept = write(cluster, tmp_path, parity=1)
    data = bytearray(kept.stream(3).read_bytes())
    data[at] ^= 4
    kept.stream(3).write_bytes(data)
    said = problem(EnvironmentProblem, back, cluster, kept.path, tmp_path / "x", "stage1")
    assert "does not come out as its manifest says" in said and not list((tmp_path / "x").iterdir())


def test_a_node_that_sends_other_bytes_makes_no_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path, parity=1)
    spoil(cluster.nodes["stage0"].versions[0])
    said = problem(EnvironmentProblem, back, cluster, kept.path, tmp_path / "x", "stage1")
    assert "shard 'stage0'" in said and not list((tmp_path / "x").iterdir())


@pytest.mark.parametrize("change", [
    lambda document: document.update(parity=3), lambda document: document.update(length=1),
    lambda document: document["versions"].pop(), lambda document: document.pop("schema"),
    lambda document: document["versions"][0].update(step=8), lambda document: document.update(data="3"),
    lambda document: document.update(length=float("inf")),
])
def test_a_description_that_was_changed_is_refused(cluster: Cluster, tmp_path: Path, change: Any) -> None:
    kept = write(cluster, tmp_path)
    document = json.loads((kept.path / "parity.json").read_text())
    change(document)
    (kept.path / "parity.json").write_text(json.dumps(document))
    assert "not a directory of parity" in problem(UserError, back, cluster, kept.path, tmp_path / "x", "stage1")


def test_a_description_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text("[" * 100_000)
    assert "not a directory of parity" in problem(UserError, Protected.read, tmp_path)


def test_what_is_somebody_elses_stays(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "step-000007.parity").mkdir()
    (tmp_path / "step-000007.parity" / "letter").write_text("dear")
    assert "not a directory of parity" in problem(UserError, write, cluster, tmp_path)
    assert (tmp_path / "step-000007.parity" / "letter").read_text() == "dear"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("named", "why"), [
    ({"shards": ["stage0"]}, "1 shards"), ({"shards": ["stage0", "stage0"]}, "2 shards"), ({"parity": 0}, "of parity"),
    ({"parity": 30}, "of parity"),
])
def test_requests_that_cannot_be(cluster: Cluster, tmp_path: Path, named: dict[str, Any], why: str) -> None:
    assert why in problem(UserError, write, cluster, tmp_path, **named)
    assert not list(tmp_path.iterdir())


def test_no_such_shard(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path)
    assert "has no shard 'x', only 'stage0', 'stage1', 'stage2'" in problem(
        UserError, restore_shard, kept.path, cluster.names(), tmp_path, token=TOKEN, shard="x")


def test_another_shard_does_not_replace_the_one_that_is_there(cluster: Cluster, tmp_path: Path) -> None:
    """Both are the same step, and so have one name."""
    kept = write(cluster, tmp_path / "p")
    first = back(cluster, kept.path, tmp_path / "q", "stage1")
    before = {one: one.read_bytes() for one in first.rglob("*") if one.is_file()}
    said = problem(UserError, back, cluster, kept.path, tmp_path / "q", "stage0")
    assert "shard 'stage1', and not step 7 of run" in said and "it is left alone" in said
    assert {one: one.read_bytes() for one in first.rglob("*") if one.is_file()} == before
    assert back(cluster, kept.path, tmp_path / "q", "stage1") == first
    assert [one.name for one in (tmp_path / "q").iterdir()] == [first.name]


def test_a_directory_that_cannot_have_its_name(cluster: Cluster, tmp_path: Path) -> None:
    kept = write(cluster, tmp_path)
    for asked in (lambda out: write(cluster, out), lambda out: back(cluster, kept.path, out, "stage1")):
        assert "is not the name of a directory" in problem(UserError, asked, Path("a\0b"))


def test_a_caller_is_warned_before_the_names_leave(cluster: Cluster, tmp_path: Path) -> None:
    """And gets what he asked for as long as they are there."""
    with pytest.warns(FutureWarning, match="flowcheck.protect"):
        kept = flowcheck.protect(cluster.names(), tmp_path, token=TOKEN)
    with pytest.warns(FutureWarning, match="flowcheck.restore_shard"):
        path = flowcheck.restore_shard(kept.path, cluster.names(), tmp_path / "q", token=TOKEN, shard="stage1")
    assert load_step(path).step == 7


def test_tensors_of_several_widths_and_of_none() -> None:
    """The optimizer's follow the model's, wherever these end."""
    values = torch.tensor([1.5, -2.0])
    memory = mmap.mmap(-1, 64)
    for at in (0, 3, 4, 6):
        memory[at : at + 8] = values.numpy().tobytes()
        assert manual_parity._view(memory, at, TensorSpec("float32", (2, 1))).tolist() == [[1.5], [-2.0]]
    none = manual_parity._view(memory, 1, TensorSpec("float64", (0, 3)))
    assert (none.shape, none.dtype) == ((0, 3), torch.float64)
    assert manual_parity._view(memory, 0, TensorSpec("int8", ())).shape == ()


def test_a_wrong_token_is_what_to_change(tmp_path: Path) -> None:
    with HandApi(HandVersion(7, shard="a")) as api, pytest.raises(EnvironmentProblem) as caught:
        protect(api.name, tmp_path / "out", token=TOKEN[::-1])
    assert "the token is wrong" in caught.value.what and "token=" in caught.value.remedy
