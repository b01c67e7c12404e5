"""A holder's rounds of parity: which steps, what stays, and what a member that fails does to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.parity import Protected
from flowcheck.checkpoint.users import file_of
from flowcheck.control.user_state import UserState, pack
from flowcheck.errors import FlowcheckError
from flowcheck.node.protect import parity_rounds as module
from flowcheck.node.protect.parity_rounds import Rounds, Streams, kept_in

from ..hand_api import KEY, HandApi, HandVersion
from ..hand_node import LONGEST, until

SHARDS = ("stage0", "stage1")
Said = list[tuple[str, dict[str, Any]]]


def version(shard: str, step: int, **about: Any) -> HandVersion:
    """Shards are not equally long."""
    count = 3 + 20 * SHARDS.index(shard)
    model = {"w": [step + 0.25 * at for at in range(count)]}
    return HandVersion(step, model, {"state.w.m": [1.5]}, shard=shard, **about)


@pytest.fixture
def apis() -> Iterator[list[HandApi]]:
    with HandApi(version("stage0", 4)) as one, HandApi(version("stage1", 4)) as two:
        yield [one, two]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def make(tmp_path: Path, said: Said) -> Callable[..., Rounds]:
    def one(**rules: Any) -> Rounds:
        return Rounds(tmp_path, Code(2, 1), 2, rules.pop("every", 2), lambda event, **fields: said.append(
            (event, fields)), **rules)

    return one


def nodes(apis: list[HandApi], seconds: float = 60.0) -> list[NodeClient]:
    return [NodeClient(api.address, KEY, seconds) for api in apis]


def steps(tmp_path: Path) -> list[int]:
    assert not [path for path in tmp_path.rglob("*") if ".partial-" in path.name]
    return [one.step for one in kept_in(tmp_path)]


def bytes_of(one: HandVersion) -> bytes:
    """A shard's stream, by hand: what follows the headers of its files."""
    return b"".join(data[8 + int.from_bytes(data[:8], "little") :] for data in one.files.values())


def test_the_newest_common_multiple_is_encoded(
    make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path, said: Said
) -> None:
    """Once; with one stream of parity it is the XOR of what the nodes sent, zeros behind the shorter one."""
    apis[0].versions[:] = [version("stage0", step) for step in (8, 7, 6, 4)]
    apis[1].versions[:] = [version("stage1", step) for step in (7, 6, 5, 4)]
    rounds = make()
    kept = rounds.turn(nodes(apis))
    assert kept is not None and (kept.step, [one.shard for one in kept.versions]) == (6, list(SHARDS))
    assert kept.path == tmp_path / "run" / "epoch-0" / "step-000006.parity"
    streams = [bytes_of(version(shard, 6)).ljust(kept.length, b"\0") for shard in SHARDS]
    wanted = bytes(reduce(lambda a, b: a ^ b, both) for both in zip(*streams, strict=True))
    assert kept.stream(2).read_bytes() == wanted
    assert said == [("protected", {"name": "", "epoch": 0, "step": 6, "shards": list(SHARDS), "stream": 2,
                                   "bytes": len(wanted), "padded": 80, "seconds": said[0][1]["seconds"],
                                   "path": str(kept.path)})]
    asked = len(apis[0].asked)
    assert rounds.turn(nodes(apis)) is None and len(apis[0].asked) == asked + 1


def test_the_newest_that_came_stay(make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path) -> None:
    rounds = make()
    for step, left in ((4, [4]), (6, [4, 6]), (8, [6, 8]), (9, [6, 8])):
        for shard, api in zip(SHARDS, apis, strict=True):
            api.versions[:] = [version(shard, step)]
        rounds.turn(nodes(apis))
        assert steps(tmp_path) == left
    for shard, api in zip(SHARDS, apis, strict=True):  # the job went back to step 2, in its next epoch
        api.versions[:] = [version(shard, 2, epoch=1), version(shard, 8)]
    kept = rounds.turn(nodes(apis))
    assert kept is not None and kept.key == (1, 2) and steps(tmp_path) == [8, 2]


def test_the_step_that_a_loss_froze_stays_besides(
    make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path
) -> None:
    """Of that run and epoch, and no other step."""
    rounds = make(keep=1)
    for step, frozen, left in (
        (4, {}, [4]), (6, {("run", 0): 4}, [4, 6]), (8, {("run", 0): 4, ("run", 1): 6, ("another", 0): 6}, [4, 8]),
        (10, {("run", 0): 8, ("run", 1): 4, ("another", 0): 4}, [8, 10]), (12, {}, [12]),
    ):
        for shard, api in zip(SHARDS, apis, strict=True):
            api.versions[:] = [version(shard, step)]
        assert rounds.turn(nodes(apis), frozen) is not None and steps(tmp_path) == left


def test_a_copy_is_read_before_a_file_and_that_before_memory(make: Callable[..., Rounds], apis: list[HandApi]) -> None:
    """In memory it takes a slot of the node's. What a node would make of parity itself, or has in a store, is no
    source at all."""
    rounds = make()
    for step, tiers, read in (
        (4, ("memory", "disk", "copy"), "copy"), (6, ("store", "memory", "disk", "parity"), "disk"),
        (8, ("parity", "memory", "store"), "memory"),
    ):
        of = {tier: version("stage0", step, tier=tier) for tier in tiers}
        apis[0].versions[:] = of.values()
        apis[1].versions[:] = [version("stage1", step)]
        assert rounds.turn(nodes(apis)) is not None
        assert {tier for tier, one in of.items() if apis[0].asked_for(f"{one.id}/manifest.json")} == {read}
    apis[1].versions[:] = [version("stage1", 10), version("stage1", 12, tier="store")]
    apis[0].versions[:] = [version("stage0", 10, tier="parity"), version("stage0", 9), version("stage0", 12)]
    assert rounds.turn(nodes(apis)) is None  # step 10 of stage0 is nowhere but in parity


def test_how_long_it_took_is_said(
    make: Callable[..., Rounds], apis: list[HandApi], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 101.23456])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    make().turn(nodes(apis))
    assert said[0][1]["seconds"] == 1.235


def test_a_job_of_one_shard(apis: list[HandApi], tmp_path: Path) -> None:
    """Its parity is a copy, and lies, stays and is listed as any other."""
    rounds, streams = Rounds(tmp_path, Code(1, 1), 1, 2, lambda *_, **__: None, keep=1), Streams(tmp_path)
    for step, left in ((4, [4]), (6, [4, 6])):
        apis[0].versions[:] = [version("stage0", step)]
        kept = rounds.turn(nodes(apis[:1]), {("run", 0): 4})
        assert kept is not None and kept.stream(1).read_bytes() == bytes_of(version("stage0", step))
        assert [one["step"] for one in streams.held()] == steps(tmp_path) == left


def test_all_members_are_asked_at_once(make: Callable[..., Rounds]) -> None:
    """However many: one that is slow holds up the round by its own time alone."""
    together = threading.Barrier(40)

    def offers() -> list[Any]:
        together.wait(LONGEST)
        return []

    members: list[Any] = [SimpleNamespace(offers=offers, close=lambda: None, diverged=[]) for _ in range(40)]
    assert make().turn(members) is None


def test_a_clock_that_was_set_back_removes_nothing_that_is_newer(
    make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path
) -> None:
    """Parity from before seems to be of tomorrow: what comes now is the newest nevertheless, and is encoded once."""
    rounds = make(keep=2)
    for step, left in ((4, [4]), (6, [4, 6]), (8, [6, 8]), (8, None), (10, [8, 10])):
        for shard, api in zip(SHARDS, apis, strict=True):
            api.versions[:] = [version(shard, step)]
        kept = rounds.turn(nodes(apis))
        if left is None:
            assert kept is None
            continue
        assert kept is not None and steps(tmp_path) == left
        if step == 6:
            for one in kept_in(tmp_path):
                os.utime(one.path, ns=(one.path.stat().st_mtime_ns + 86_400 * 10**9,) * 2)


def test_parity_that_was_damaged_is_said(make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path) -> None:
    """It is no protection, and not taken for one."""
    rounds = make()
    kept = rounds.turn(nodes(apis))
    assert kept is not None
    description = kept.path / "parity.json"
    description.write_text(description.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(FlowcheckError, match="is not a directory of parity"):
        rounds.turn(nodes(apis))


def test_one_stream_of_several_is_kept(apis: list[HandApi], tmp_path: Path, said: Said) -> None:
    both = [Rounds(tmp_path / str(number), Code(2, 2), number, 2, lambda *_, **__: None) for number in (2, 3)]
    found = [one.turn(nodes(apis)) for one in both]
    kept = [one for one in found if one is not None]
    assert [list(one.sums) for one in kept] == [[2], [3]] and kept[0].mark == kept[1].mark
    assert kept[0].stream(2).read_bytes() != kept[1].stream(3).read_bytes()


def lies(api: HandApi) -> None:
    data = api.versions[0].files["optimizer.safetensors"]
    api.versions[0].files["optimizer.safetensors"] = data[:-1] + bytes([data[-1] ^ 1])


def stalls(api: HandApi) -> None:
    api.quiet.add(f"/v1/versions/{api.versions[0].id}/optimizer.safetensors")


def cuts(api: HandApi) -> None:
    api.cut[f"/v1/versions/{api.versions[0].id}/model.safetensors"] = [9, 1, 1]


def makes_room(api: HandApi) -> None:
    api.answers[f"/v1/versions/{api.versions[0].id}/manifest.json"] = 404, b'{"why": "no longer"}'


@pytest.mark.parametrize(("fails", "why"), [
    (lies, "SHA-256 differs"), (makes_room, "shard 'stage1': "), (stalls, "no answer within"),
    (cuts, "closed before its end"),
    (lambda api: api.close(), "connection lost"),
])
def test_a_member_that_fails_ends_the_round(
    make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path, fails: Callable[[HandApi], None], why: str
) -> None:
    """It lies, stalls, is cut off or is gone; the parity before stays, and the next round is as if nothing had been."""
    rounds = make()
    before = rounds.turn(nodes(apis))
    assert before is not None
    for shard, api in zip(SHARDS, apis, strict=True):
        api.versions[:] = [version(shard, 6)]
    fails(apis[1])
    with pytest.raises(FlowcheckError, match=why):
        rounds.turn(nodes(apis, seconds=0.5 if fails is stalls else 10.0))
    assert steps(tmp_path) == [4] and Protected.read(before.path) == before
    with HandApi(version("stage1", 6)) as another:
        after = rounds.turn(nodes([apis[0], another]))
    assert after is not None and steps(tmp_path) == [4, 6]


def test_a_member_that_dies_while_it_is_read(make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path) -> None:
    rounds, failed = make(), list[FlowcheckError]()
    stalls(apis[1])

    def turn() -> None:
        try:
            rounds.turn(nodes(apis))
        except FlowcheckError as error:
            failed.append(error)

    thread = threading.Thread(target=turn)
    thread.start()
    until(lambda: apis[1].asked_for("/optimizer.safetensors"))
    assert kept_in(tmp_path) == []  # half of it is no parity
    apis[1].close()
    thread.join(60.0)
    assert failed and steps(tmp_path) == []


def test_what_ranks_gave_is_kept_beside_it(make: Callable[..., Rounds], apis: list[HandApi]) -> None:
    apis[1].versions[0].give(3, pack({"seen": 12}, step=4, rank=3, ranks=4))
    kept = make().turn(nodes(apis))
    assert kept is not None and kept.users == ((), (3,))
    found = UserState.of(file_of(kept.of_shard(1), 3).read_bytes(), "x")
    assert (found.rank, found.state) == (3, {"seen": 12})


def test_memory_is_bounded(make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path) -> None:
    rounds = make(most=150)
    rounds.turn(nodes(apis))
    for shard, api in zip(SHARDS, apis, strict=True):
        api.versions[:] = [version(shard, 6)]
    with pytest.raises(FlowcheckError, match="B are taken") as refused:
        rounds.turn(nodes(apis))
    assert refused.value.where == "protect.memory_mb" and "set it to 1 or more" in refused.value.remedy
    assert steps(tmp_path) == [4]
    (kept,) = kept_in(tmp_path)
    with pytest.raises(FlowcheckError, match="B are taken"):
        make(most=2 * kept.length - 1).turn(nodes(apis))
    make(most=2 * kept.length).turn(nodes(apis))  # it is just enough
    assert steps(tmp_path) == [4, 6]


def test_what_is_whole_here_is_listed(make: Callable[..., Rounds], apis: list[HandApi], tmp_path: Path) -> None:
    """Each is read once; what is written anew is read again; what is no parity, or goes meanwhile, is passed over."""
    rounds, streams = make(), Streams(tmp_path)
    assert streams.held() == []
    for step in (4, 6):
        for shard, api in zip(SHARDS, apis, strict=True):
            api.versions[:] = [version(shard, step)]
        rounds.turn(nodes(apis))
    for name in ("step-000001", "step-000005", "step-000009"):  # before, between and after them
        (tmp_path / "run" / "epoch-0" / f"{name}.parity").mkdir()
    (tmp_path / "a run" / "epoch-0").mkdir(parents=True)
    (tmp_path / "a run" / "epoch-0" / "step-000002.parity").symlink_to("nothing")
    wanted = [{"run_id": "run", "epoch": 0, "step": step, "stream": 2} for step in (4, 6)]
    assert streams.held() == wanted and [one.step for one in kept_in(tmp_path)] == [4, 6]
    four = tmp_path / "run" / "epoch-0" / "step-000004.parity"
    before = four.stat().st_mtime_ns
    (four / "parity.json").rename(four / "aside")
    os.utime(four, ns=(before, before))
    assert streams.held() == wanted  # it has not changed, and is not read again
    os.utime(four, ns=(before + 1, before + 1))
    assert streams.held() == wanted[1:] and [one.step for one in kept_in(tmp_path)] == [6]
    (four / "aside").rename(four / "parity.json")
    assert streams.held() == wanted


def test_what_is_no_group_is_refused(make: Callable[..., Rounds], apis: list[HandApi]) -> None:
    rounds = make()
    apis[1].versions[:] = [version("stage1", 4, run_id="another")]
    with pytest.raises(FlowcheckError, match="several runs: 'another', 'run'"):
        rounds.turn(nodes(apis))
    apis[1].versions[:] = [version("stage0", 4)]
    with pytest.raises(FlowcheckError, match=r"1 shards \('stage0'\) for 2 streams"):
        rounds.turn(nodes(apis))
    apis[1].versions[:] = [version("stage0", 4), version("stage1", 4)]
    with pytest.raises(FlowcheckError, match="a node follows several shards"):
        rounds.turn(nodes(apis))
    for shard, api in zip(SHARDS, apis, strict=True):  # of a job that nobody follows any more
        api.versions[:] = [version(shard, 4, tier="copy")]
    assert rounds.turn(nodes(apis)) is None


def test_half_of_a_round_that_a_killed_process_left_goes(make: Callable[..., Rounds], tmp_path: Path) -> None:
    half = tmp_path / "run" / "epoch-0" / ".step-000004.parity.partial-1"
    half.mkdir(parents=True)
    (half / "stream-2.bin").write_bytes(b"half")
    make()
    assert not half.exists()
