"""What nodes have and what is passed over: who is asked no more, how long a busy one is waited for, what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask import sources
from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.ask.refusals import BusyError, FullError
from flowcheck.ask.sources import Fetched, Found, NoSource, fetch, look, offers_of, take
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import EnvironmentProblem, UserError

from ..hand_api import KEY, HandApi, HandVersion

NO_SLOT = 503, b'{"why": "no slot is left"}'
FULL = 503, b"Service Unavailable"


class Clock:
    """The time of sources.py, which passes in its pauses only. spread: of a pause, in place of chance."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.spread: Callable[[float, float], float] = lambda least, most: 1.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sources, "time", made)
    monkeypatch.setattr(sources, "random", SimpleNamespace(uniform=lambda least, most: made.spread(least, most)))
    return made


def nodes(*apis: HandApi) -> list[NodeClient]:
    return [NodeClient(api.address, KEY, 30.0) for api in apis]


def spoil(version: HandVersion, file: str = MODEL) -> None:
    """Its last byte is another one."""
    data = version.files[file]
    version.files[file] = data[:-1] + bytes([data[-1] ^ 0x40])


def steps(found: Found) -> list[int]:
    return [offer.step for _, offer in found.places]


def problem(call: Any, *given: Any) -> EnvironmentProblem:
    with pytest.raises(EnvironmentProblem) as caught:
        call(*given)
    return caught.value


# -- what is found -------------------------------------------------------------------------------------------


def place(step: int, status: str = "unverified", user: tuple[tuple[int, int], ...] = ()) -> tuple[NodeClient, Offer]:
    return NodeClient(("h", 1), KEY), Offer(f"m{step}", "memory", "run", 1, step, "a", status, 8, user=user)


def test_the_only_run_that_there_was_stays_the_one_that_is_asked_for() -> None:
    assert Found("run", "a", (place(7),), ()).chosen(None, None) == ("run", "a")
    for asked in ((None, None), ("x", None), (None, "y"), ("x", "y")):
        assert Found("", "", (), ()).chosen(*asked) == asked, "nothing is there, and nothing was chosen"


def test_versions_of_which_somebody_has_a_ranks_own_state() -> None:
    found = Found("run", "a", (place(7, user=((0, 2),)), place(8), place(9, user=((1, 1), (4, 5)))), ())
    assert found.with_user(1) == {(1, 7), (1, 9)} and found.with_user(4) == {(1, 9)} and found.with_user(3) == set()


@pytest.mark.parametrize(("said", "best"), [
    (("unverified", "verified"), "verified"), (("verified", "unverified"), "verified"),
    (("unverified", "follows 5", "follows 4"), "follows 5"),
])
def test_the_best_that_any_holder_says_of_a_version(said: tuple[str, ...], best: str) -> None:
    places = [place(7, one) for one in said]
    assert Found("run", "a", (*places, place(8)), ()).versions == {(1, 7): best, (1, 8): "unverified"}


def test_a_source_that_has_verified_it_is_read_first(near: HandApi, far: HandApi) -> None:
    """Bytes of the others may be other ones: the version was taken because this one was compared."""
    near.versions = [HandVersion(7, {"w": [1.0]}, status="follows 6")]
    far.versions = [HandVersion(7, {"w": [2.0]}, tier="disk")]
    fetched = fetch(look(nodes(near, far), None, None), (0, 7), {})
    assert (fetched.version.status, fetched.model["w"].tolist()) == ("verified", [2.0])


def test_what_has_diverged_is_not_found(near: HandApi, far: HandApi) -> None:
    near.versions = [HandVersion(8, status="diverged"), HandVersion(7, status="follows 6")]
    far.versions = []
    assert look(nodes(near, far), None, None).versions == {(0, 7): "follows 6"}


@pytest.mark.parametrize(("statuses", "read"), [("own", "verified"), (None, "unverified"), ("all", "unverified")])
def test_an_earlier_release_says_verified_of_others_too(near: HandApi, statuses: object, read: str) -> None:
    near.versions, near.statuses = [HandVersion(8), HandVersion(7, status="unverified")], statuses
    assert look(nodes(near), None, None).versions == {(0, 8): read, (0, 7): "unverified"}


def test_a_node_says_what_has_diverged(near: HandApi) -> None:
    good = {"run_id": "run", "epoch": 0, "shard": "", "after": 6, "last": 9}
    near.diverged = [good, {**good, "last": -1}, {**good, "after": True}, 3, {}]
    (node,) = nodes(near)
    node.offers()
    (one,) = node.diverged
    assert [one.covers("run", 0, "", step, "follows 6") for step in (6, 7, 9, 10)] == [False, True, True, False]
    assert not one.covers("run", 0, "", 8, "verified") and not one.covers("run", 1, "", 8, "follows 6")
    for near.diverged in (None, 3, {}, "x"):
        node.offers()
        assert node.diverged == []


def test_the_nearest_tier_of_all_nodes_comes_first(near: HandApi, far: HandApi) -> None:
    near.versions = [HandVersion(1, tier="store"), HandVersion(2, tier="parity"), HandVersion(3, tier="copy")]
    far.versions = [HandVersion(4, tier="disk"), HandVersion(5)]
    found = look(nodes(near, far), None, None)
    assert [offer.tier for _, offer in found.places] == ["memory", "copy", "disk", "parity", "store"]


@pytest.mark.parametrize(("count", "there"), [(2, [7, 6]), (3, [7]), (4, [7])])
def test_a_tier_of_which_three_were_bad_is_asked_no_more(near: HandApi, count: int, there: list[int]) -> None:
    (node,) = nodes(near)
    node.failed["disk"] = count
    found = look([node], None, None)
    said = (f"{near.name}, disk: {count} of its versions were not good, and it is asked for no more",)
    assert steps(found) == there and found.absent == (said if count >= 3 else ())


def test_what_was_refused_and_is_listed_still_counts_against_its_tier_once(near: HandApi) -> None:
    (node,) = nodes(near)
    node.gone |= {near.versions[1].id, "another"}
    for _ in range(2):
        assert steps(look([node], None, None)) == [7, 6]
        assert (dict(node.failed), node.gone) == ({"disk": 1}, set())


def test_a_tier_that_did_not_say_in_time_is_named(near: HandApi, far: HandApi) -> None:
    near.answers["/v1/versions"] = 200, json.dumps(
        {"versions": [near.versions[0].offer], "absent": ["store", "disk", "tape"], "withheld": []}).encode()
    far.answers["/v1/versions"] = 500, b'{"why": "a bug"}'
    found = look(nodes(near, far), None, "")
    assert steps(found) == [7] and found.absent == (
        f"{far.name}: refused: a bug", f"{near.name}, disk: did not say in time what it has",
        f"{near.name}, store: did not say in time what it has")


def test_a_shard_that_was_said_may_be_had_though_a_node_is_gone(near: HandApi, far: HandApi) -> None:
    far.answers["/v1/versions"] = 500, b'{"why": "a bug"}'
    assert steps(look(nodes(near, far), None, None)) == [7, 6], "a job without names of shards has one"
    near.versions = [HandVersion(7, shard="a")]
    assert steps(look(nodes(near, far), None, "a")) == [7]
    with pytest.raises(UserError) as caught:
        look(nodes(near, far), None, None)
    assert (caught.value.where, caught.value.remedy) == ("shard", "say shard=, as this rank has it")
    assert caught.value.what == (
        f"there is shard 'a', and whoever may have another one did not answer: {far.name}: refused: a bug")


def test_what_is_lacking_is_said_with_what_there_is(near: HandApi) -> None:
    near.versions = [HandVersion(7, shard="a"), HandVersion(6, shard="b"), HandVersion(5, shard="b", run_id="x")]
    for run_id, shard, lacks, other in (
        ("run", "a", "", ""),
        ("none", None, "run", "nothing is of run 'none'; there is 'run', 'x'"),
        ("none", "a", "run", "nothing is of run 'none'; there is 'run', 'x'"),
        ("run", "c", "shard", "run 'run' has nothing of shard 'c'; it has 'a', 'b'"),
    ):
        found = look(nodes(near), run_id, shard)
        assert (found.lacks, found.other, bool(found.places)) == (lacks, other, not lacks)
    near.versions.clear()
    found = look(nodes(near), "run", "a")
    assert (found.lacks, found.other, found.newest, found.withheld) == ("", "", -1, ())


def test_the_newest_epoch_of_a_run_is_that_of_any_shard_on_any_node(near: HandApi, far: HandApi) -> None:
    near.versions = [HandVersion(7, epoch=2, shard="a"), HandVersion(3, epoch=4, shard="b")]
    far.versions = [HandVersion(7, epoch=3, shard="a"), HandVersion(1, epoch=9, run_id="other")]
    assert look(nodes(near, far), "run", "a").newest == look(nodes(far, near), "run", "a").newest == 4
    far.withheld = [{"run_id": "run", "epoch": 5, "why": "w"}, {"run_id": "run", "epoch": 1, "why": "x"}]
    found = look(nodes(near, far), "run", "a")
    assert found.newest == 5 and found.withheld == (f"{far.name}: w",)
    assert look(nodes(near, far), "other", None).newest == 9 and look(nodes(near, far), "none", None).newest == -1
    near.versions.clear()
    far.versions.clear()
    assert look(nodes(near, far), None, None).newest == 5, "no run was said, and only what is withheld is there"


# -- waiting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "limits", "times", "again"), [
    (BusyError, (), 32, 1), (FullError, (), 1802, 1),  # as long as usual, and once
    (BusyError, (2.0, 5.0), 4, 4), (FullError, (2.0, 5.0), 7, 7),
])
def test_who_has_no_room_for_another_is_waited_for(
    clock: Clock, error: type[BusyError], limits: tuple[float, ...], times: int, again: int
) -> None:
    node, asked = NodeClient(("h", 1), KEY), list[float]()

    def ask() -> None:
        asked.append(clock.now)
        raise error("no slot is left", where="h")

    for count in (times, again):
        asked.clear()
        with pytest.raises(error):
            sources.when_free(node, ask, *limits)
        assert [at - asked[0] for at in asked] == [float(at) for at in range(count)]
    assert node.busy == (not limits)


def test_what_it_says_when_it_has_room_again(clock: Clock) -> None:
    node = NodeClient(("h", 1), KEY)
    left = [BusyError("a", where="h"), FullError("b", where="h"), BusyError("c", where="h")]

    def ask() -> str:
        if left:
            raise left.pop()
        return "said"

    assert sources.when_free(node, ask) == "said" and len(clock.pauses) == 3 and not node.busy


def test_ranks_that_wait_do_not_ask_at_the_same_moments(clock: Clock) -> None:
    clock.spread = Random(3).uniform

    def ask() -> None:
        raise FullError("full", where="h")

    with pytest.raises(FullError):
        sources.when_free(NodeClient(("h", 1), KEY), ask)
    assert 0.5 <= min(clock.pauses) < 0.6 and 1.4 < max(clock.pauses) <= 1.5 and sum(clock.pauses) > 1800


def test_nobody_is_waited_for_who_is_only_asked_what_it_has(near: HandApi, clock: Clock) -> None:
    """`look` waits as long as usual for a connection, because all ranks of a job ask at once, and never for a slot."""
    clock.now = 1e9
    near.answers["/v1/versions"] = FULL
    why = [f"{near.name}: refused: it serves as many as it can at once"]
    assert offers_of(nodes(near), -1.0) == why and clock.pauses == []
    assert offers_of(nodes(near)) == why and len(clock.pauses) == 1
    clock.pauses.clear()
    assert list(look(nodes(near), None, None).absent) == why and sum(clock.pauses) == 31.0
    clock.pauses.clear()
    near.answers["/v1/versions"] = NO_SLOT
    assert look(nodes(near), None, None).absent == (f"{near.name}: refused: no slot is left",)
    assert len(clock.pauses) == 1


# -- fetching --------------------------------------------------------------------------------------------------


def of(*apis: HandApi, users: bool = False) -> tuple[Fetched, list[NodeClient]]:
    """Step 7, and whom it was asked of."""
    asked = nodes(*apis)
    return fetch(look(asked, None, None), (0, 7), {}, lambda offer: offer.with_user if users else ()), asked


def sizes(version: HandVersion, *files: str) -> int:
    return sum(len(version.files[file]) for file in files)


def test_bytes_of_sources_that_were_given_up_count_too(near: HandApi) -> None:
    """Of one node twice: from memory its model was not good, from disk it is."""
    near.versions[1] = HandVersion(7, tier="disk")
    spoil(near.versions[0])
    fetched, _ = of(near)
    assert fetched.source == f"{near.name}, disk" and 0.0 < fetched.seconds < 600.0
    assert fetched.nbytes == sizes(near.versions[0], MODEL) + sizes(near.versions[1], MODEL, OPTIMIZER)


def test_a_version_that_is_listed_too_often_does_not_keep_anybody_from_the_next_source(
    near: HandApi, far: HandApi
) -> None:
    for count in (sources.MOST_SAME, sources.MOST_SAME + 3):
        near.versions = [HandVersion(7) for _ in range(count)]
        near.asked.clear()
        for number, one in enumerate(near.versions):
            one.id = one.offer["id"] = f"m{number}"
            spoil(one)
        fetched, _ = of(near, far)
        bad = f"{near.name}, memory: {MODEL}: tensor 'b' has other bytes than its manifest says (SHA-256 differs)"
        more = [f"{near.name}, memory: lists it more than 4 times"] if count > 4 else []
        assert fetched.source == f"{far.name}, memory" and near.asked_for("manifest.json") == 4
        assert list(fetched.passed) == [bad] * 4 + more


def test_what_is_held_against_a_node(near: HandApi, far: HandApi, clock: Clock) -> None:
    """A bad version counts against its tier. One that is gone is remembered until the next look, and a node that has no
    slot is neither."""
    spoil(near.versions[0])
    _, (node, other) = of(near, far)
    assert (dict(node.failed), node.gone, dict(other.failed), node.busy) == ({"memory": 1}, set(), {}, False)
    manifest = f"/v1/versions/{near.versions[0].id}/manifest.json"
    near.answers[manifest] = 404, b'{"why": "it made room"}'
    fetched, (node, _) = of(near, far)
    assert (dict(node.failed), node.gone, node.busy) == ({}, {near.versions[0].id}, False)
    assert fetched.passed == (f"{near.name}: refused: it made room",)
    near.answers[manifest] = NO_SLOT
    fetched, (node, _) = of(near, far)
    assert (dict(node.failed), node.gone, node.busy) == ({}, set(), True)
    assert fetched.passed == (f"{near.name}: refused: no slot is left",)


def test_who_has_more_of_the_states_that_are_wanted_comes_first(near: HandApi, far: HandApi) -> None:
    for rank in (0, 1):
        far.versions[0].give(rank, pack({"user": {"of": rank}}, step=7, rank=rank, ranks=2))
    near.versions[0].give(0, pack({"user": {"of": 9}}, step=7, rank=0, ranks=2))
    fetched, _ = of(near, far, users=True)
    assert fetched.source == f"{far.name}, memory" and sorted(fetched.users) == [0, 1]
    assert [fetched.users[rank].state["user"] for rank in (0, 1)] == [{"of": 0}, {"of": 1}]
    fetched, _ = of(near, far)
    assert fetched.source == f"{near.name}, memory" and fetched.users == {}


def test_a_version_that_nobody_has_any_more(near: HandApi, far: HandApi) -> None:
    near.answers["/v1/versions"] = 500, b'{"why": "a bug"}'
    asked = nodes(near, far)
    found = look(asked, None, None)
    with pytest.raises(NoSource) as caught:
        fetch(found, (1, 7), {})
    assert caught.value.what == f"step 7 of epoch 1 could be had from nowhere: {near.name}: refused: a bug"
    assert (caught.value.where, caught.value.remedy) == ("recover", "an older step, or see the nodes")
    assert near.asked_for("manifest.json") == far.asked_for("manifest.json") == 0, "it is another version"


def test_tensors_that_share_memory_get_their_values(near: HandApi) -> None:
    near.versions = [HandVersion(7, {"w": [1.5, 2.0], "b": [1.5, 2.0]}, {})]
    tied = torch.zeros(2)
    fetched = fetch(look(nodes(near), None, None), (0, 7), {"w": tied, "b": tied})
    assert fetched.model["w"] is fetched.model["b"] is tied and tied.tolist() == [1.5, 2.0]


# -- taking ----------------------------------------------------------------------------------------------------


def test_the_newest_that_proves_good_is_taken(near: HandApi) -> None:
    assert take(nodes(near), None, None, None).version.step == 7
    assert take(nodes(near), "run", "", 6).version.step == 6
    spoil(near.versions[0])
    taken = take(nodes(near), None, None, None)
    assert (taken.version.step, taken.source) == (6, f"{near.name}, disk")
    assert taken.passed == (
        f"step 7 of epoch 0 could be had from nowhere: {near.name}, memory: {MODEL}: tensor 'b' has other bytes than"
        " its manifest says (SHA-256 differs)",)


def test_own_states_are_taken_where_they_are_wanted(near: HandApi) -> None:
    near.versions[0].give(3, pack({"user": {"at": 7}}, step=7, rank=3, ranks=4))
    assert take(nodes(near), None, None, None).users == {} and near.asked_for("user/3") == 0
    assert list(take(nodes(near), None, None, None, True).users) == [3] and near.asked_for("user/3") == 1


def test_why_nothing_is_taken(near: HandApi, far: HandApi, monkeypatch: pytest.MonkeyPatch) -> None:
    far.answers["/v1/versions"] = 500, b'{"why": "a bug"}'
    bug, asked = f"{far.name}: refused: a bug", nodes(near, far)
    error = problem(take, asked, None, None, 8)
    assert error.what == f"step 8 is not there: {bug}; the newest that are there: 6, 7"
    assert error.where == f"{near.name}, {far.name}" and error.remedy
    near.withheld = [{"why": "too new"}]
    assert problem(take, asked, "none", None, None).what == (
        f"there is no version: {bug}; {near.name}: too new; nothing is of run 'none'; there is 'run'")
    near.withheld = []
    with monkeypatch.context() as once:
        once.setattr(sources, "MOST_ROUNDS", 1)
        spoil(near.versions[0])
        assert problem(take, nodes(near), None, None, 7).what == (
            f"none of the versions that were found is good: step 7 of epoch 0 could be had from nowhere: {near.name},"
            f" memory: {MODEL}: tensor 'b' has other bytes than its manifest says (SHA-256 differs)")
    spoil(near.versions[1])
    said = problem(take, nodes(near), None, None, None).what
    assert said.count("could be had from nowhere") == 2 and said.count("; step 6 of epoch 0") == 1
    near.versions.clear()
    assert problem(take, nodes(near), None, None, None).what == "there is no version"
    with HandApi() as gone:
        pass
    assert problem(take, nodes(gone), None, None, None).what == (
        f"nobody answered: {gone.name}: connection lost: Connection refused")
