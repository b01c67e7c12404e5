"""Which version is taken, and from where: choices by hand, and fetching from nodes that lie, fail or are silent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from flowcheck.ask import sources
from flowcheck.ask.client import NodeClient
from flowcheck.ask.sources import Key, NoSource, addresses, choose, fetch, look, offers_of, take
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import EnvironmentProblem, UserError

from ..hand_api import KEY, HandApi, HandVersion, seal

V, U = "verified", "unverified"


def refused(call: Any, *given: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*given)
    assert caught.value.remedy
    return caught.value


# -- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("h:1", [("h", 1)]), ("a:1, [::1]:65535", [("a", 1), ("::1", 65535)]),
        (["a:1", "b:1"], [("a", 1), ("b", 1)]), (("a:1",), [("a", 1)]),
        (" Xhost.X:00001 , [::1]:65535 ", [("Xhost.X", 1), ("::1", 65535)]),
    ],
)
def test_addresses(nodes: str | Sequence[str], found: list[tuple[str, int]]) -> None:
    assert addresses(nodes) == found


@pytest.mark.parametrize(("nodes", "what"), [
    *[(one, "is not an address") for one in ("h", "h:", ":1", "h:x", "h:-1", "a:1,", [3], "")],
    *[([one], f"{one!r} is not an address".replace("\0", "\\x00"))
      for one in ("h..i:1", "h\0:1", "h\n:1", "h:000001", "h:1 2", f"{'x' * 64}:1")],
    *[(f"h:{port}", f"port {port[:20]}") for port in ("0", "65536", "70711", "1234567890123456789012345")],
    ([], "is empty, or names a node twice"), ("a:1,a:1", "is empty, or names a node twice"),
])
def test_what_is_not_an_address(nodes: Any, what: str) -> None:
    error = refused(addresses, nodes)
    assert what in error.what and error.where == "nodes"
    assert not what.startswith("port") or ("65535" in error.what and "address" not in error.what)


# -- the choice --------------------------------------------------------------------------------------------

CHOICES: dict[str, tuple[list[dict[Key, str]], dict[str, Any], Key | None]] = {
    "nothing": ([{}], {}, None),
    "the newest": ([{(0, 5): V, (0, 7): V, (0, 6): V}], {}, (0, 7)),
    "of the newest epoch, though its step is older": ([{(0, 9): V, (1, 7): V}], {}, (1, 7)),
    "what all have": ([{(0, 7): V, (0, 6): V}, {(0, 6): V, (0, 5): V}], {}, (0, 6)),
    "nothing that all have": ([{(0, 7): V}, {(0, 6): V}], {}, None),
    "one has nothing": ([{(0, 7): V}, {}], {}, None),
    "the same step of another epoch is another version": ([{(0, 7): V}, {(1, 7): V}], {}, None),
    "a step that was asked for": ([{(0, 7): V, (0, 6): U}], {"step": 6}, (0, 6)),
    "of the newest epoch that has it": ([{(0, 6): V, (1, 6): U, (2, 7): V}], {"step": 6}, (1, 6)),
    "a step that is not there": ([{(0, 7): V}], {"step": 8}, None),
    "step 0 is a step": ([{(0, 0): V, (0, 7): V}], {"step": 0}, (0, 0)),
    "what is bad is not taken": ([{(0, 7): V, (0, 6): V}], {"bad": [(0, 7)]}, (0, 6)),
    "all is bad": ([{(0, 7): V}], {"bad": [(0, 7)]}, None),
    "unverified, and nothing better": ([{(0, 7): U, (0, 6): U}], {"prefer_verified": 9}, (0, 7)),
    "verified, one older": ([{(0, 7): U, (0, 6): V}], {"prefer_verified": 1}, (0, 6)),
    "verified, too old": ([{(0, 7): U, (0, 5): V}], {"prefer_verified": 1}, (0, 7)),
    "verified is not preferred": ([{(0, 7): U, (0, 6): V}], {}, (0, 7)),
    "the newest of those that are verified": ([{(0, 7): U, (0, 6): V, (0, 5): V}], {"prefer_verified": 9}, (0, 6)),
    "verified for one only": ([{(0, 7): U, (0, 6): V}, {(0, 7): U, (0, 6): U}], {"prefer_verified": 9}, (0, 7)),
    "what follows a verified one is not verified": ([{(0, 9): "follows 6", (0, 6): V}], {"prefer_verified": 9}, (0, 6)),
    "and is as new as another": ([{(0, 9): "follows 6", (0, 6): V}], {"prefer_verified": 2}, (0, 9)),
    "nor is what nobody knows": ([{(0, 8): "unheard of", (0, 6): V}], {"prefer_verified": 9}, (0, 6)),
    "what has diverged is not taken": ([{(0, 9): "diverged", (0, 8): U}], {}, (0, 8)),
    "not if it is asked for": ([{(0, 9): "diverged", (0, 8): U}], {"step": 9}, None),
    "nor if another says better": ([{(0, 9): "diverged", (0, 8): U}, {(0, 9): V, (0, 8): V}], {"prefer_verified": 9},
                                   (0, 8)),
    "verified in an epoch before": ([{(1, 7): U, (0, 7): V}], {"prefer_verified": 9}, (1, 7)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice(name: str) -> None:
    held, options, chosen = CHOICES[name]
    assert choose(held, **options) == chosen


# -- looking -----------------------------------------------------------------------------------------------


def nodes(*apis: HandApi, seconds: float = 30.0) -> list[NodeClient]:
    return [NodeClient(api.address, KEY, seconds) for api in apis]


def test_the_nearest_tier_comes_first(near: HandApi, far: HandApi) -> None:
    near.versions.insert(0, HandVersion(5, tier="disk", status=U))
    far.versions.append(HandVersion(5, tier="disk"))
    found = look(nodes(near, far), None, None)
    assert (found.run_id, found.shard, found.absent) == ("run", "", ())
    assert [(node.name, offer.tier, offer.step) for node, offer in found.places] == [
        (near.name, "memory", 7), (far.name, "memory", 7), (near.name, "disk", 5), (near.name, "disk", 6),
        (far.name, "disk", 5),
    ]
    assert found.versions == {(0, 7): V, (0, 5): V, (0, 6): V}
    assert look(nodes(far, near), None, None).versions[0, 5] == V  # whoever is asked first


def test_who_is_silent_is_absent(near: HandApi, far: HandApi) -> None:
    far.quiet.add("/v1/versions")
    found = look([*nodes(near), *nodes(far, seconds=0.2)], None, None)
    assert found.absent == (f"{far.name}: no answer within 0.2 s",) and len(found.places) == 2
    alone = look(nodes(far, seconds=0.2), "run", None)
    assert (alone.run_id, alone.shard, alone.places, alone.versions) == ("run", "", (), {})


def test_what_is_withheld_is_said_of_each_node(near: HandApi, far: HandApi) -> None:
    near.versions.clear()
    near.withheld = [{"why": "a reason"}]
    found = look(nodes(near, far), None, None)
    assert found.withheld == (f"{near.name}: a reason",) and [node.name for node, _ in found.places] == [far.name]
    far.versions.clear()
    with pytest.raises(EnvironmentProblem) as none:
        take(nodes(near, far), None, None, None)
    assert none.value.what == f"there is no version: {near.name}: a reason"


@pytest.mark.parametrize("name", ["run_id", "shard"])
def test_several_runs_or_shards(near: HandApi, name: str) -> None:
    near.versions.append(HandVersion(7, **{name: "other"}))  # type: ignore[arg-type]
    first = "run" if name == "run_id" else ""
    error = refused(look, nodes(near), None, None)
    several = ", ".join(sorted([repr(first), repr("other")]))
    assert error.where == name and error.what == f"the nodes have several: {several}"
    for value, steps in ((first, [7, 6]), ("other", [7]), ("none", [])):
        wanted: dict[str, Any] = {"run_id": None, "shard": None, name: value}
        found = look(nodes(near), **wanted)
        assert [offer.step for _, offer in found.places] == steps and getattr(found, name) == value


# -- fetching ----------------------------------------------------------------------------------------------


def test_a_version_from_the_nearest_source(near: HandApi, far: HandApi) -> None:
    fetched = fetch(look(nodes(near, far), None, None), (0, 7), {})
    assert fetched.source == f"{near.name}, memory" and fetched.passed == () and fetched.version.step == 7
    assert fetched.model["w"].tolist() == [7.5, 2.0]
    assert fetched.state["w"]["momentum_buffer"].tolist() == [1.0, 7.0]
    assert fetched.nbytes == sum(map(len, near.versions[0].files.values())) and fetched.seconds > 0
    assert far.asked_for("manifest.json") == 0 and near.asked_for("manifest.json") == 1


def test_a_source_of_another_step_is_not_asked(near: HandApi, far: HandApi) -> None:
    near.versions[0] = HandVersion(8)
    fetched = fetch(look(nodes(near, far), None, None), (0, 7), {})
    assert fetched.source == f"{far.name}, memory" and near.asked_for("manifest.json") == 0


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_a_flipped_bit_is_never_loaded(near: HandApi, far: HandApi, file: str) -> None:
    data = near.versions[0].files[file]
    near.versions[0].files[file] = data[:-1] + bytes([data[-1] ^ 0x40])
    given = {"w": torch.zeros(2)}
    fetched = fetch(look(nodes(near, far), None, None), (0, 7), given)
    name = "b" if file == MODEL else "state.w.momentum_buffer"
    assert fetched.source == f"{far.name}, memory"
    assert fetched.passed == (f"{near.name}, memory: {file}: tensor {name!r} has other bytes than its manifest says"
                              " (SHA-256 differs)",)
    assert fetched.model["w"] is given["w"] and given["w"].tolist() == [7.5, 2.0]
    assert fetched.nbytes > 2 * len(data)


def test_a_changed_manifest_is_not_believed(near: HandApi, far: HandApi) -> None:
    near.versions[0].document["optimizer"] = {"name": "sgd", "groups": []}
    fetched = fetch(look(nodes(near, far), None, None), (0, 7), {})
    assert fetched.source == f"{far.name}, memory" and "own hash does not match" in fetched.passed[0]


def test_the_disk_is_the_next_tier(near: HandApi, far: HandApi) -> None:
    near.versions[1] = HandVersion(7, tier="disk")
    found = look([*nodes(near), *nodes(far)], None, None)
    near.versions.pop(0)
    far.versions.clear()
    fetched = fetch(found, (0, 7), {})
    assert fetched.source == f"{near.name}, disk"
    why = "refused: there is no such version, or no longer"
    assert fetched.passed == (f"{near.name}: {why}", f"{far.name}: {why}")


def test_no_source_is_good(near: HandApi, far: HandApi) -> None:
    found = look([*nodes(near), *nodes(far, seconds=5)], None, None)
    near.versions[0].document = {}
    far.close()
    with pytest.raises(NoSource) as caught:
        fetch(found, (0, 7), {})
    assert caught.value.what == (
        f"step 7 of epoch 0 could be had from nowhere: {near.name}, memory: its manifest is not a"
        f" flowcheck/checkpoint/3 manifest; {far.name}: connection lost: Connection refused"
    )
    with pytest.raises(NoSource, match="nobody has it any more"):
        fetch(found, (0, 8), {})


@pytest.mark.parametrize("full", [b'{"why": "others are being answered", "full": true}', b"Service Unavailable"])
def test_a_node_that_serves_as_many_as_it_can_is_asked_again(near: HandApi, monkeypatch, full: bytes) -> None:
    """All ranks of a job ask at the same time, and its server refuses those for whom it has no connection."""
    near.answers["/v1/versions"] = 503, full
    assert offers_of(nodes(near)) == [f"{near.name}: refused: it serves as many as it can at once"]
    pauses = list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        near.answers.clear()

    monkeypatch.setattr(time, "sleep", sleep)
    assert look(nodes(near), None, None).absent == () and pauses and all(0.5 <= one <= 1.5 for one in pauses)


@pytest.mark.parametrize("path", ["manifest.json", MODEL, OPTIMIZER, "user/0"])
def test_a_file_waits_for_its_turn(near: HandApi, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    near.versions[0].give(0, pack({}, step=7, rank=0, ranks=1))
    found, path = look(nodes(near), None, None), f"/v1/versions/{near.versions[0].id}/{path}"
    near.answers[path] = 503, b"Service Unavailable"
    monkeypatch.setattr(time, "sleep", lambda seconds: near.answers.clear())
    assert fetch(found, (0, 7), {}, lambda offer: offer.with_user).passed == ()
    near.answers[path] = 503, b"Service Unavailable"
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sources, "QUEUE_SECONDS", 0.0)
    with pytest.raises(NoSource, match="it serves as many as it can at once"):
        fetch(found, (0, 7), {}, lambda offer: offer.with_user)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"x": torch.zeros(2)}, "tensor 'x' is float32 [2], step 7 does not have it"),
        ({"w": torch.zeros(3)}, "tensor 'w' is float32 [3], step 7 has float32 [2]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "tensor 'w' is float64 [2], step 7 has float32 [2]"),
    ],
)
def test_tensors_that_do_not_fit(near: HandApi, given: dict[str, torch.Tensor], what: str) -> None:
    error = refused(fetch, look(nodes(near), None, None), (0, 7), {"b": torch.zeros(1), **given})
    assert (error.what, error.where) == (what, "into") and near.asked_for(MODEL) == 0


def test_a_manifest_may_have_no_optimizer(near: HandApi) -> None:
    one = HandVersion(7, state={})
    one.document = seal({**one.document, "optimizer": {}})
    near.versions[0] = one
    assert fetch(look(nodes(near), None, None), (0, 7), {}).state == {}


def test_what_still_stands_is_taken_where_the_newest_was_gone() -> None:
    before, now = {(0, 3): V, (0, 7): U, (0, 8): U}, {(0, 3): V, (0, 7): U, (0, 9): U, (1, 1): U}
    assert choose([now], bad=[(0, 8)]) == (1, 1)
    assert choose([now], bad=[(0, 8)], stood=before) == (0, 7)
    assert choose([now], bad=[(0, 8)], stood=before, prefer_verified=4) == (0, 3)
    assert choose([now, {(0, 3): V, (0, 9): U}], bad=[(0, 8)], stood=before) == (0, 3)
    assert choose([now], bad=[(0, 3), (0, 7)], stood=before) == (1, 1), "nothing of it stands"
    assert choose([now], bad=[(0, 8)], stood=before, step=9) == (0, 9)
    assert choose([now], bad=list(now), stood=before) is None


def test_a_job_that_builds_versions_faster_than_they_are_asked_for(near: HandApi) -> None:
    """Each time the newest is gone. One older version stands, as one does that somebody else reads."""
    pinned, newest = HandVersion(4), [5]

    class Passing(list[HandVersion]):
        """What is listed, and by then is not there any more but the first."""

        def __iter__(self) -> Iterator[HandVersion]:
            newest[0] += 3
            return iter([pinned, HandVersion(newest[0])])

    near.versions = Passing()
    fetched = take(nodes(near), None, None, None)
    assert fetched.version.step == 4 and len(fetched.passed) == 1, fetched.passed


def test_a_version_that_everybody_has_whole_is_taken_first() -> None:
    held = [{(0, 7): "unverified", (0, 8): "unverified", (1, 2): "unverified"}] * 2
    whole: list[Any] = [{(1, 2), (0, 8)}, {(1, 2), (0, 7), (0, 8)}]
    assert choose(held, users=whole) == (1, 2)
    assert choose(held, users=whole, bad=[(1, 2)]) == (0, 8)
    assert choose(held, users=[{(0, 7)}, {(0, 7)}], bad=[(1, 2)], prefer_user=1) == (0, 7)
    assert choose(held, users=[{(0, 7)}, {(0, 7)}], bad=[(1, 2)], prefer_user=0) == (0, 8)
    assert choose(held, users=[{(0, 8)}, {(0, 8)}], prefer_user=99) == (1, 2), "no other start of the run"
    assert choose(held, users=[{(0, 8)}, set()], bad=[(1, 2)], prefer_user=9) == (0, 8)
    told = [held[0] | {(0, 7): "verified"}] * 2
    assert choose(told, users=[{(0, 8)}] * 2, bad=[(1, 2)], prefer_user=9, prefer_verified=9) == (0, 8)
    assert choose(told, users=[{(0, 7), (0, 8)}] * 2, bad=[(1, 2)], prefer_user=9, prefer_verified=9) == (0, 7)
