"""Streams of shards and of parity, byte by byte: which shards, of which run, in which order; what of a description is
believed; what a shard that comes back has of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.ask.sources import look
from flowcheck.checkpoint.coding import manual_parity, parity
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.manual_parity import protect, restore_shard
from flowcheck.checkpoint.coding.parity import (
    Padded,
    Protected,
    decode,
    encode,
    pieces_in,
    source_of,
)
from flowcheck.checkpoint.directory import load_step, read_step_manifest
from flowcheck.checkpoint.users import load_user
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem, UserError

from ..hand_api import KEY, TOKEN, HandApi, HandVersion, seal

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the names leave

GONE = "127.0.0.1:9"


def version(shard: int, step: int = 7, **about: Any) -> HandVersion:
    """Shards are not equally long; a parameter's name has dots."""
    count = 10 + 90 * shard
    values = [shard + step + at / 4 for at in range(count)]
    return HandVersion(step, {"layer.w": values, "b": [2.0] * 3}, {
        "state.layer.w.exp_avg": values[::-1], "state.layer.w.step": [float(step)], "state.b.exp_avg": [0.5] * 3},
        shard=f"s{shard}", **about)


def stream(one: HandVersion) -> bytes:
    """By hand: what follows the headers of its files."""
    return b"".join(data[8 + int.from_bytes(data[:8], "little") :] for data in one.files.values())


@pytest.fixture
def apis(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HandApi]]:
    monkeypatch.setattr(parity, "PIECE", 256)
    with ExitStack() as stack:
        yield [stack.enter_context(HandApi(version(shard))) for shard in range(3)]


def names(apis: list[HandApi]) -> list[str]:
    return [one.name for one in apis]


def xor(*streams: bytes) -> bytes:
    length = max(map(len, streams))
    out = 0
    for one in streams:
        out ^= int.from_bytes(one.ljust(length, b"\0"), "little")
    return out.to_bytes(length, "little")


# -- what is written -----------------------------------------------------------------------------------------------


def test_one_stream_is_what_all_shards_are_together(apis: list[HandApi], tmp_path: Path) -> None:
    """One may be lost unless more is asked for, and one stream of parity is the XOR of the others."""
    kept = protect(names(apis), tmp_path, token=TOKEN)
    assert (kept.code, list(kept.sums)) == (Code(3, 1), [3])
    assert kept.stream(3).read_bytes() == xor(*(stream(version(shard)) for shard in range(3)))


def test_shards_are_taken_in_the_order_that_is_asked_for(apis: list[HandApi], tmp_path: Path) -> None:
    """Or in that of their names; a node that is gone is left out."""
    kept = protect([GONE, *reversed(names(apis))], tmp_path / "a", token=TOKEN)
    assert [one.shard for one in kept.versions] == ["s0", "s1", "s2"]
    kept = protect([GONE, *names(apis)], tmp_path / "b", token=TOKEN, shards=["s2", "s0"])
    assert [one.shard for one in kept.versions] == ["s2", "s0"] and list(kept.sums) == [2]


def test_of_several_runs_one_is_asked_for(apis: list[HandApi], tmp_path: Path) -> None:
    for shard in (0, 1):
        apis[shard].versions.append(version(shard, 40, run_id="another"))
    apis[2].versions.append(version(3, 40, run_id="another"))
    with pytest.raises(UserError, match="several"):
        protect(names(apis), tmp_path, token=TOKEN)
    kept = protect(names(apis), tmp_path, token=TOKEN, run_id="another")
    assert {(one.run_id, one.step) for one in kept.versions} == {("another", 40)}
    assert [one.shard for one in kept.versions] == ["s0", "s1", "s3"]
    kept = protect(names(apis), tmp_path, token=TOKEN, run_id="run", parity=2)
    assert kept.step == 7 and len(kept.sums) == 2 and len(list(tmp_path.iterdir())) == 2


def test_two_shards_are_enough(apis: list[HandApi], tmp_path: Path) -> None:
    assert protect(names(apis), tmp_path, token=TOKEN, shards=["s0", "s1"]).code == Code(2, 1)
    for shards in (["s0"], ["s0", "s1", "s0"]):
        with pytest.raises(UserError, match=f"{len(shards)} shards") as refused:
            protect(names(apis), tmp_path, token=TOKEN, shards=shards)
        assert refused.value.where == "shards"


def test_whom_it_trusts_is_asked_of_the_authority_that_is_given(apis: list[HandApi], tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    kept, ca = protect(names(apis), tmp_path / "p", token=TOKEN), str(tmp_path / "ca.pem")
    with pytest.raises(UserError) as refused:
        protect(names(apis), tmp_path, token=TOKEN, ca=ca)
    assert refused.value.where == f"ca {ca}"
    with pytest.raises(UserError) as refused:
        restore_shard(kept.path, names(apis), tmp_path, token=TOKEN, shard="s0", ca=ca)
    assert refused.value.where == f"ca {ca}"


def sources(apis: list[HandApi], stack: ExitStack) -> list[Any]:
    nodes = [NodeClient(one.address, KEY, 60.0) for one in apis]
    return [source_of(stack, look(nodes, "run", f"s{shard}"), (0, 7)) for shard in range(len(apis))]


def test_a_holder_writes_the_stream_that_is_its_own(apis: list[HandApi], tmp_path: Path) -> None:
    """The same bytes, the same mark, and nothing of the others'."""
    whole = protect(names(apis), tmp_path, token=TOKEN, parity=3)
    with ExitStack() as stack:
        one = encode(sources(apis, stack), Code(3, 3), tmp_path / "one.parity", [4])
    assert list(one.sums) == [4] and one.sums[4] == whole.sums[4] and one.mark == whole.mark
    assert one.stream(4).read_bytes() == whole.stream(4).read_bytes()
    assert sorted(path.name for path in one.path.iterdir()) == ["parity.json", "stream-4.bin"]
    assert len(set(whole.sums.values())) == 3


def test_a_source_that_is_gone_since_it_was_found_ends_the_round(apis: list[HandApi], tmp_path: Path) -> None:
    nodes = [NodeClient(one.address, KEY, 60.0) for one in apis]
    found = look(nodes, "run", "s1")
    apis[1].versions.clear()
    with ExitStack() as stack, pytest.raises(EnvironmentProblem, match="shard 's1'") as ended:
        source_of(stack, found, (0, 7))
    assert ended.value.where == apis[1].name and ended.value.remedy


def test_what_a_killed_process_left_aside_is_no_trouble(apis: list[HandApi], tmp_path: Path) -> None:
    aside = parity.partial_name(tmp_path / "step-000007.parity")
    aside.mkdir()
    (aside / "stream-3.bin").write_bytes(b"half")
    kept = protect(names(apis), tmp_path, token=TOKEN)
    assert list(tmp_path.iterdir()) == [kept.path]


# -- what is believed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {"schema": "flowcheck/parity/2"}, {"data": 2}, {"length": 1}, {"length": 1 << 40}, {"data": 4}, {"parity": 0},
    {"streams": {"x": "ab"}}, {"streams": []}, {"versions": []}, {"users": 3}, {"users": [3], "data": 2},
], ids=str)
def test_a_sealed_description_of_something_else_is_refused(
    apis: list[HandApi], tmp_path: Path, change: dict[str, Any]
) -> None:
    kept = protect(names(apis), tmp_path, token=TOKEN)
    path = kept.path / "parity.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(seal(document)))
    assert Protected.read(kept.path) == kept
    path.write_text(json.dumps(seal(document | change)))
    with pytest.raises(UserError, match="is not a directory of parity") as refused:
        Protected.read(kept.path)
    assert refused.value.where == str(kept.path)


# -- what comes back -----------------------------------------------------------------------------------------------


def test_a_shard_comes_back_with_all_that_it_had(apis: list[HandApi], tmp_path: Path) -> None:
    """Status, epoch, optimizer; what its ranks gave of themselves; and no other shard's."""
    for shard, api in enumerate(apis):
        api.versions[:] = [version(shard, epoch=3, status="unverified", optimizer="adamw", rounding="reference",
                                   options={"lr": 0.25})]
        for rank in (2 * shard, 2 * shard + 1):
            api.versions[0].give(rank, pack({"groups": [], "user": {"seen": rank}}, step=7, rank=rank, ranks=6))
    kept = protect(names(apis), tmp_path / "p", token=TOKEN)
    assert kept.users == ((0, 1), (2, 3), (4, 5)) and kept.key == (3, 7)
    path = restore_shard(kept.path, names(apis)[::2], tmp_path / "q", token=TOKEN, shard="s1")
    manifest, found, wanted = read_step_manifest(path), load_step(path), version(1)
    for name in ("run_id", "epoch", "step", "shard", "status", "unproven", "rounding", "optimizer"):
        assert manifest[name] == apis[1].versions[0].document[name], name
    assert manifest["matches"] == kept.versions[1].matches
    assert {rank: load_user(path, manifest, rank).state["user"] for rank in (2, 3)} == {2: {"seen": 2}, 3: {"seen": 3}}
    assert sorted(manifest["user"]) == ["2", "3"]
    assert list(found.parameters) == ["layer.w", "b"]
    assert {name: sorted(state) for name, state in found.optimizer_state.items()} == {
        "layer.w": ["exp_avg", "step"], "b": ["exp_avg"]}
    assert found.optimizer_state["layer.w"]["step"].tolist() == [7.0]
    assert stream(wanted)[:400] == b"".join(
        found.parameters["layer.w"].numpy().tobytes()[at : at + 100] for at in range(0, 400, 100))


def test_parity_is_made_again_of_a_version_without_ranks_states(apis: list[HandApi], tmp_path: Path) -> None:
    kept = protect(names(apis), tmp_path, token=TOKEN)
    assert kept.users == ((), (), ()) and not kept.of_shard(0).exists()


def test_a_place_that_fails_is_left_for_another_one(apis: list[HandApi], tmp_path: Path) -> None:
    """A node that is gone, one whose version has made room, one with other bytes: the next one that has it is taken. A
    version that was made of parity is no piece beside it."""
    kept = protect(names(apis), tmp_path / "p", token=TOKEN)
    with HandApi(version(0)) as room, HandApi(HandVersion(7, {"b": [1.0]}, {}, shard="s0")) as other, \
            HandApi(version(0, tier="parity")) as made:
        room.answers[f"/v1/versions/{room.versions[0].id}/manifest.json"] = 404, b'{"why": "gone"}'
        for nodes, good in (([GONE, room.name, other.name, apis[0].name, apis[1].name], True),
                            ([room.name, other.name, apis[1].name], False), ([made.name, apis[1].name], False)):
            asked = lambda nodes=nodes: restore_shard(  # noqa: E731
                kept.path, nodes, tmp_path / "q", token=TOKEN, shard="s2")
            if good:
                assert load_step(asked()).step == 7
            else:
                with pytest.raises(UserError, match="2 of 4 streams are there"):
                    asked()
        assert made.asked_for("manifest.json") == 0


def test_the_smallest_shard_of_nothing(apis: list[HandApi], tmp_path: Path) -> None:
    """A shard without a byte is one, too."""
    apis[0].versions[:] = [HandVersion(7, {}, {}, shard="s0")]
    kept = protect(names(apis), tmp_path / "p", token=TOKEN)
    path = restore_shard(kept.path, names(apis)[1:], tmp_path / "q", token=TOKEN, shard="s0")
    assert load_step(path).parameters == {}


@pytest.mark.parametrize("lost", [0, 2])
def test_a_stream_that_is_made_again_is_as_long_as_the_longest(
    apis: list[HandApi], tmp_path: Path, lost: int
) -> None:
    """Zeros follow the shard's own bytes, and nothing those."""
    kept, found = protect(names(apis), tmp_path, token=TOKEN), bytearray()
    streams = {shard: Padded(iter([memoryview(stream(version(shard)))])) for shard in range(3) if shard != lost}
    with kept.stream(3).open("rb") as file:
        decode(kept, lost, streams | {3: Padded(pieces_in(file))}, found.extend)
    assert found == stream(version(lost)).ljust(kept.length, b"\0")


def test_what_came_meanwhile_is_left_alone(
    apis: list[HandApi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the first byte was asked for."""
    letter = tmp_path / "q" / "step-000007" / "letter"

    def files(folder: Path, rank: int, real: Any = manual_parity.file_of) -> Path:
        letter.parent.mkdir(exist_ok=True)
        letter.write_text("dear")
        path: Path = real(folder, rank)
        return path

    apis[0].versions[0].give(0, pack({"groups": [], "user": {}}, step=7, rank=0, ranks=1))
    kept = protect(names(apis), tmp_path / "p", token=TOKEN)
    monkeypatch.setattr(manual_parity, "file_of", files)
    with pytest.raises(UserError):
        restore_shard(kept.path, names(apis)[1:], tmp_path / "q", token=TOKEN, shard="s0")
    assert letter.read_text() == "dear" and list((tmp_path / "q").iterdir()) == [letter.parent]


def test_what_cannot_be_written_is_said_of_what_was_asked_for(apis: list[HandApi], tmp_path: Path) -> None:
    """And not of a name aside, which nobody knows."""
    kept = protect(names(apis), tmp_path / "p", token=TOKEN)
    parity.partial_name(tmp_path / "q" / "s0.stream").mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match="cannot be written") as refused:
        restore_shard(kept.path, names(apis)[1:], tmp_path / "q", token=TOKEN, shard="s0")
    assert refused.value.where == str(tmp_path / "q")


def test_no_more_streams_are_read_than_are_needed(apis: list[HandApi], tmp_path: Path) -> None:
    """Those that are there are taken before parity: a changed stream that nobody needs does no harm."""
    kept = protect(names(apis), tmp_path / "p", token=TOKEN, parity=2)
    kept.stream(4).write_bytes(b"")
    path = restore_shard(kept.path, names(apis)[1:], tmp_path / "q", token=TOKEN, shard="s0")
    assert load_step(path).step == 7


# -- pieces --------------------------------------------------------------------------------------------------------


def padded(*pieces: bytes) -> Padded:
    return Padded(iter([memoryview(one) for one in pieces]))


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 5, 2], [12], [3, 9], [4, 0, 8]], ids=str)
def test_pieces_are_taken_in_other_sizes_and_zeros_follow(sizes: list[int]) -> None:
    one, found = padded(b"abc", b"defg", b"h"), b""
    for size in sizes:
        view = bytearray(b"x" * size)
        one.fill(memoryview(view))
        found += view
    assert found == b"abcdefgh\0\0\0\0"
    one.finish()


@pytest.mark.parametrize("taken", [0, 2, 3, 7])
def test_a_stream_that_goes_on_is_refused(taken: int) -> None:
    one = padded(b"abc", b"defg", b"h")
    one.fill(memoryview(bytearray(taken)))
    with pytest.raises(EnvironmentProblem, match="longer than it said"):
        one.finish()


def test_a_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PIECE", 4)
    (tmp_path / "x").write_bytes(b"abcdefghij")
    with (tmp_path / "x").open("rb") as file:
        assert [bytes(one) for one in pieces_in(file)] == [b"abcd", b"efgh", b"ij"]
