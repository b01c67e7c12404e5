"""What a holder of parity offers and sends: which shards, as of which answers of others, which bytes; and what
others get of its streams."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.checkpoint.coding import parity as parity_module
from flowcheck.checkpoint.coding.parity import Protected
from flowcheck.checkpoint.coding.rebuilding import PIECES, Place
from flowcheck.control.tensors import TensorSpec
from flowcheck.control.user_state import pack
from flowcheck.control.version import Digest
from flowcheck.node.protect import parity_shelf as module
from flowcheck.node.protect.parity_shelf import BAD_SECONDS, FRESH_SECONDS, ParityShelf, StreamShelf
from flowcheck.node.versions.held import Gone
from flowcheck.node.versions.holdings import Pressed

from ..hand_api import KEY, HandApi, HandVersion
from ..hand_node import LONGEST, until
from ..parity_round import parity_of

COUNTS = (40, 90)


def version(shard: int, step: int = 6, tier: str = "copy", epoch: int = 0) -> HandVersion:
    values = [shard + step + at / 8 for at in range(COUNTS[shard])]
    one = HandVersion(step, {"w": values, "b": [2.0] * 5}, {"state.w.m": values[::-1]}, shard=f"s{shard}", tier=tier,
                      epoch=epoch, status="verified" if shard else "unverified")
    for rank in ((0, 1, 4) if shard else ()):
        one.give(rank, pack({"groups": [], "user": {"seen": rank}}, step=step, rank=rank, ranks=5))
    return one


class Holder:
    """Its directory has streams 2 and 3 of steps 6 and 9; the nodes with data are there as long as `there` has them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory / "run" / "epoch-0"
        self.apis = [stack.enter_context(HandApi()) for _ in COUNTS]
        self.kept: dict[int, Protected] = {}
        for step in (6, 9):
            for shard, api in enumerate(self.apis):
                api.versions.append(version(shard, step))
            self.kept[step] = parity_of(self.apis, self.directory, step)
        self.there, self.at = list(self.apis), 100.0
        self.shelf = ParityShelf(directory, lambda: [NodeClient(one.address, KEY, LONGEST) for one in self.there],
                                 1 << 30, lambda: self.at)
        stack.callback(self.shelf.close)
        for one in self.apis:
            one.asked.clear()

    def offered(self) -> list[tuple[int, str]]:
        return [(one.offer.step, one.offer.shard) for one in self.shelf.look()]

    def asked(self) -> int:
        return sum(one.asked_for(PIECES) for one in self.apis)

    def keep(self, step: int, *numbers: int) -> None:
        """Of the streams of that step these alone."""
        path = self.kept[step].path / "parity.json"
        document = json.loads(path.read_text())
        document["streams"] = {number: sums for number, sums in document["streams"].items() if int(number) in numbers}
        path.write_text(json.dumps(parity_module.seal(document)))
        self.kept[step] = Protected.read(self.kept[step].path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    for name in ("OTHERS_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(module, name, LONGEST)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    with ExitStack() as stack:
        yield Holder(tmp_path, stack)


# -- what is offered -----------------------------------------------------------------------------------------------


def test_what_is_offered_of_a_lost_shard(holder: Holder) -> None:
    """The newest first. Each as its manifest and its ranks have it."""
    found = holder.shelf.look()
    assert [(one.offer.step, one.offer.shard) for one in found] == [(9, "s0"), (9, "s1"), (6, "s0"), (6, "s1")]
    zero, one = found[0].offer, found[1].offer
    assert (one.tier, one.run_id, one.epoch, one.status, one.matches) == ("parity", "run", 0, "verified", 1)
    assert (zero.status, zero.matches) == ("unverified", 0) and (zero.nbytes, one.nbytes) == (4 * 85, 4 * 185)
    assert (zero.user, one.user) == ((), ((0, 1), (4, 4)))
    assert len({each.offer.id for each in found}) == 4
    assert found[0].path == holder.kept[9].path and found[0].inode == holder.kept[9].path.stat().st_ino
    assert [each.offer.id for each in holder.shelf.look()] == [each.offer.id for each in found]


def test_a_shard_is_offered_if_enough_other_streams_are_there(holder: Holder) -> None:
    """Its own copy is none of the others."""
    holder.keep(6, 2)
    holder.keep(9)
    assert holder.offered() == [(6, "s0"), (6, "s1")]
    holder.at += FRESH_SECONDS + 1
    holder.there = holder.apis[:1]
    assert holder.offered() == [(6, "s1")]
    holder.at += FRESH_SECONDS + 1
    holder.there = []
    assert holder.offered() == []


def test_an_epoch_goes_before_a_step(tmp_path: Path) -> None:
    with ExitStack() as stack:
        holder = Holder(tmp_path, stack)
        for shard, api in enumerate(holder.apis):
            api.versions[:] = [version(shard, 3, epoch=1)]
        parity_of(holder.apis, tmp_path / "run" / "epoch-1")
        assert holder.offered() == [(3, "s0"), (3, "s1"), (9, "s0"), (9, "s1"), (6, "s0"), (6, "s1")]


def test_others_are_asked_once_in_a_second(holder: Holder) -> None:
    """However many look, and however many rounds are kept."""
    holder.shelf.look()
    assert holder.asked() == 2
    holder.at += FRESH_SECONDS
    holder.shelf.look()
    assert holder.asked() == 2
    holder.at += 0.125
    holder.shelf.look()
    assert holder.asked() == 4


def test_one_that_is_silent_holds_up_nobody_and_is_not_asked_twice(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def wait(asking: Collection[Future[Any]], seconds: float) -> tuple[set[Future[Any]], None]:
        """Until all but one have answered; that one does not in any time."""
        waited.append(seconds)
        until(lambda: sum(one.done() for one in asking) == 1)
        return {one for one in asking if one.done()}, None

    monkeypatch.setattr(module, "wait", wait)
    for step in (6, 9):
        holder.keep(step, 2)
    holder.apis[0].quiet.add(PIECES)
    assert holder.offered() == [(9, "s0"), (6, "s0")]  # of stage 1 there is a copy, and of stage 0 that and a stream
    holder.at += FRESH_SECONDS + 1
    assert holder.offered() == [(9, "s0"), (6, "s0")]
    assert [one.asked_for(PIECES) for one in holder.apis] == [1, 2] and waited == [LONGEST] * 2


def test_an_answer_that_is_none_is_as_if_it_were_not_there(holder: Holder) -> None:
    holder.keep(9)
    holder.keep(6, 2)
    holder.apis[0].answers[PIECES] = 200, b"[]"
    assert holder.offered() == [(6, "s0")]


# -- who has failed ------------------------------------------------------------------------------------------------


class Made:
    """An attempt that has ended."""

    def __init__(self, *places: Place, failed: Place | None = None) -> None:
        self.places, self.failed = list(places), failed


def test_who_failed_is_asked_for_that_no_more_for_a_while(holder: Holder) -> None:
    kept, shelf = holder.kept[6], holder.shelf
    node = NodeClient(("n", 1), KEY)
    of = {0: [Place(0, node)], 1: [Place(1, node)], 2: [Place(2), Place(2, node)]}
    assert shelf.good(kept, of) == of
    shelf.fail(Made(of[0][0], of[2][0], failed=of[2][0]), kept.mark, "why")  # type: ignore[arg-type]
    assert shelf.good(kept, of) == of | {2: [Place(2, node)]}
    assert shelf.good(holder.kept[9], of) == of  # another parity
    shelf.fail(Made(of[0][0], failed=of[0][0]), kept.mark, "why")  # type: ignore[arg-type]
    assert shelf.good(kept, of) == {1: of[1], 2: [Place(2, node)]}
    holder.at += BAD_SECONDS - 1
    assert shelf.good(kept, of) == {1: of[1], 2: [Place(2, node)]}
    holder.at += 1
    assert shelf.good(kept, of) == of


def test_where_nobody_knows_who_it_was_all_are_left(holder: Holder) -> None:
    kept, shelf = holder.kept[6], holder.shelf
    node = NodeClient(("n", 1), KEY)
    of = {0: [Place(0, node)], 1: [Place(1, node)], 2: [Place(2)]}
    shelf.fail(Made(of[0][0], of[2][0]), kept.mark, "a tensor is odd")  # type: ignore[arg-type]
    assert shelf.good(kept, of) == {1: of[1]}
    with pytest.raises(Gone, match=r"there is no such version, or no longer: a tensor is odd$") as gone:
        shelf.hold("nothing")
    assert gone.value.where == "nothing"
    shelf.fail(Made(failed=of[1][0]), kept.mark, "a node is gone")  # type: ignore[arg-type]
    with pytest.raises(Gone, match=r"no longer: a node is gone; a tensor is odd$"):
        shelf.hold("nothing")
    holder.at += BAD_SECONDS
    shelf.good(kept, of)
    with pytest.raises(Gone, match=r"no longer$"):
        shelf.hold("nothing")


# -- what is sent --------------------------------------------------------------------------------------------------


def held(holder: Holder, shard: str, step: int = 9) -> Any:
    return holder.shelf.hold(next(one.offer.id for one in holder.shelf.look()
                                  if (one.offer.step, one.offer.shard) == (step, shard)))


@pytest.mark.parametrize("shard", [0, 1])
def test_every_range_of_a_files_bytes(holder: Holder, shard: int) -> None:
    """Of header and tensors, of both files: as the node that is lost would have sent them."""
    one, wanted = held(holder, f"s{shard}"), version(shard, 9)
    assert json.loads(one.manifest()) == holder.kept[9].versions[shard].document()
    for file, data in wanted.files.items():
        size, tensors = one.size(file), len(data) - 8 - int.from_bytes(data[:8], "little")
        whole = one.read(file, 0, size)
        head = size - tensors
        assert len(whole) == size and whole[head:] == data[-tensors:]
        assert head == 8 + int.from_bytes(whole[:8], "little")
        assert {key: value["shape"] for key, value in json.loads(whole[8:head]).items() if key != "__metadata__"} == \
            {key: value["shape"] for key, value in json.loads(data[8:-tensors]).items() if key != "__metadata__"}
        for first in (0, 1, head - 1, head, head + 1, head + 5, size - 1, size):
            for count in (0, 1, 2, 7, head, size):
                assert one.read(file, first, count) == whole[first : first + count], (file, first, count)
                assert all(len(view) for view in one.views(file, first, count)) or not count or first == size
    with pytest.raises(Gone, match="has no such file") as gone:
        one.size("x" * 100)
    assert gone.value.where == "x" * 64


def test_a_name_is_of_one_place(holder: Holder, tmp_path: Path) -> None:
    """What lies elsewhere is something else, although the file system gives it the number of one that was removed."""
    def ids() -> set[str]:
        return {one.offer.id for shelf in (holder.shelf, StreamShelf(tmp_path)) for one in shelf.look()}

    before = ids()
    holder.kept[9].path.rename(holder.directory / "step-000012.parity")
    assert len(ids() & before) == len(before) // 2 == 4


def test_tensors_of_any_kind_have_their_header(holder: Holder) -> None:
    found = holder.shelf.look()[0]
    kept = holder.kept[9]
    files = {"model.safetensors": {"w": Digest(TensorSpec("bfloat16", (3, 1)), "ab")}, "optimizer.safetensors": {
        "state.w.step": Digest(TensorSpec("int64", ()), "ab")}}
    kept = replace(kept, versions=(replace(kept.versions[0], files=files), *kept.versions[1:]))
    one = module._Made(found, module._Lost(kept, 0, {}), holder.shelf)
    for file, name, dtype, shape, nbytes in (("model.safetensors", "w", "BF16", [3, 1], 6),
                                             ("optimizer.safetensors", "state.w.step", "I64", [], 8)):
        head = one.read(file, 0, one.size(file) - nbytes)
        assert json.loads(head[8:])[name] == {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}


def test_a_header_alone_makes_nothing(holder: Holder) -> None:
    """It is known; the first question for a tensor's bytes begins to make it."""
    one = held(holder, "s1")
    assert len(one.read("model.safetensors", 0, 8)) == 8 and one.made is None
    head = one.size("model.safetensors") - 4 * 95
    assert len(one.read("model.safetensors", 3, head - 3)) == head - 3 and one.made is None
    one.read("model.safetensors", head, 1)
    assert one.made is not None
    made = one.made
    one.read("optimizer.safetensors", 0, 1 << 20)
    assert one.made is made
    one.close()
    assert one.made is None
    one.close()


def test_what_ranks_gave_is_sent(holder: Holder) -> None:
    one = held(holder, "s1")
    assert one.user(4) == version(1, 9).users[4]
    with pytest.raises(Gone, match="no such state of a rank"):
        one.user(2)
    with pytest.raises(Gone, match="no such state of a rank"):
        held(holder, "s0").user(0)


def test_a_source_that_fails_is_left_for_another_one(holder: Holder) -> None:
    """Its own stream first, then a member's: what was given is the same again."""
    holder.keep(9, 2)
    stream = holder.kept[9].stream(2)
    stream.write_bytes(stream.read_bytes()[::-1])
    one = held(holder, "s1")
    with pytest.raises(Gone, match="too few of the other streams are good") as gone:
        one.read("model.safetensors", 0, 1 << 20)
    assert gone.value.where == "step 9, parity" and one.is_gone()
    assert ("", 2, holder.kept[9].mark) in holder.shelf._bad
    holder.at += FRESH_SECONDS + 1
    assert (9, "s1") not in holder.offered() and (6, "s1") in holder.offered()


def test_what_comes_too_slowly_is_refused_and_made_all_the_same(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks again finds what was made meanwhile."""
    holder.keep(9, 2)
    one = held(holder, "s1")
    api = holder.apis[0]
    path = f"/v1/versions/{next(each.id for each in api.versions if each.offer['step'] == 9)}/manifest.json"
    api.quiet.add(path)
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    with pytest.raises(Gone, match="is made again too slowly") as gone:
        one.read("model.safetensors", 0, 1 << 20)
    assert gone.value.where == "step 9, parity" and not one.is_gone() and one.made is not None


def test_what_was_removed_is_gone(holder: Holder) -> None:
    one = held(holder, "s1")
    assert not one.is_gone()
    holder.kept[9].path.rename(holder.directory / "aside")
    shutil.copytree(holder.directory / "aside", holder.kept[9].path)  # another one has its name by now
    assert one.is_gone()
    with pytest.raises(Gone, match="the node has removed it"):
        one.user(4)


def test_what_is_made_at_once_is_bounded(holder: Holder) -> None:
    """One may be made however large it is."""
    shelf = holder.shelf
    shelf._most = 4 * 85 + 4 * 185
    held(holder, "s1")
    held(holder, "s0")
    with pytest.raises(Pressed, match=r"1\.1 KiB are being made again") as pressed:
        held(holder, "s0", 6)
    assert pressed.value.where == "protect.memory_mb"
    held(holder, "s0")  # it is held: nothing more is made
    for each in list(shelf._held.values()):
        shelf.release(each)
    shelf._held.clear()
    shelf._most = 1
    held(holder, "s1")
    shelf._most = 4 * 85 + 4 * 185 - 1
    with pytest.raises(Pressed):
        held(holder, "s0")


# -- streams for others --------------------------------------------------------------------------------------------


def test_streams_for_other_members(holder: Holder, tmp_path: Path) -> None:
    shelf = StreamShelf(tmp_path, lambda: holder.at)
    said = shelf.streams()
    assert [(one["number"], one["mark"], one["nbytes"], one["sha256"]) for one in said] == [
        (number, kept.mark, 4 * 185, kept.sums[number]) for kept in (holder.kept[9], holder.kept[6])
        for number in (2, 3)]
    assert all(one["id"].startswith("r") for one in said) and len({one["id"] for one in said}) == 4
    found = shelf.look()
    assert [one.offer.id for one in found] == [one["id"] for one in said]
    first = found[1]
    assert (first.offer.tier, first.offer.run_id, first.offer.epoch, first.offer.step, first.offer.shard,
            first.offer.status, first.offer.nbytes) == ("row", "run", 0, 9, "", "unverified", 4 * 185)
    assert first.path == holder.kept[9].stream(3) and first.inode == first.path.stat().st_ino
    one, data = shelf.hold(first.offer.id), holder.kept[9].stream(3).read_bytes()
    assert one.size("stream.bin") == len(data)
    for at, count in ((0, 1 << 20), (0, 5), (7, 5), (len(data) - 3, 5), (len(data), 5)):
        assert one.read("stream.bin", at, count) == data[at : at + count]
    with first.path.open("ab") as file:
        file.write(b"more")
    assert one.read("stream.bin", len(data) - 3, 50) == data[-3:]  # no more than was described
    for call in (lambda: one.size("y" * 80), lambda: one.read("model.safetensors", 0, 1)):
        with pytest.raises(Gone, match="has no such file") as gone:
            call()
        assert set(gone.value.where) in ({"y"}, set("model.safetensors")) and len(gone.value.where) <= 64
    one.close()
    one.close()
    with pytest.raises(Gone, match="cannot be read: Bad file descriptor"):
        one.read("stream.bin", 0, 1)


def test_a_stream_that_is_gone_is_not_listed(holder: Holder, tmp_path: Path) -> None:
    shelf = StreamShelf(tmp_path)
    found = shelf.look()
    holder.kept[9].stream(2).unlink()
    assert [one["number"] for one in shelf.streams()] == [3, 2, 3]
    with pytest.raises(Gone, match="no such version"):
        shelf.hold(found[0].offer.id)
    with pytest.raises(Gone, match="cannot be read: No such file"):
        shelf._pin(replace(found[0]))
