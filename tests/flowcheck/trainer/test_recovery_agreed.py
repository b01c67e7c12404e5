"""What ranks make of what all of them say: one version or none, and whose own state goes with it. Without a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowcheck.control.tensors import TensorSpec
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER, Digest, Version
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.recover import recovery, statements
from flowcheck.trainer.recover.recovery import LONGEST, recover

from ..hand_api import TOKEN, HandApi, HandVersion

# -- arguments at their bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [
    {"seconds": LONGEST}, {"seconds": 1}, {"seconds": 1e-9}, {"step": 0}, {"step": None}, {"prefer_verified": 0},
    {"into": {}}, {"run_id": ""}, {"shard": ""}, {"run_id": None, "shard": None},
], ids=str)
def test_arguments_at_their_bounds_are_taken(given: dict[str, Any]) -> None:
    with HandApi() as api:
        assert not recover(api.name, token=TOKEN, fresh=True, **{key: value for key, value in given.items()
                                                                 if key != "step" or value is None})
    recovery._check(**{"run_id": None, "shard": None, "step": None, "into": None, "prefer_verified": 0, "seconds": 1.0,
                       **given})


@pytest.mark.parametrize("given", [{"seconds": LONGEST + 1}, {"seconds": False}, {"step": 0.0}, {"step": False}])
def test_arguments_beyond_them_are_not(given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        recover("h:1", token=TOKEN, **given)
    assert caught.value.where == next(iter(given))


# -- one version ---------------------------------------------------------------------------------------------

WEIGHT = Digest(TensorSpec("float32", (2, 3)), "ab" * 32)
GROUPS = [{"params": ["w"], "options": {"lr": 0.1, "momentum": 0.9}}]
VERSION = Version("run", 1, 7, "", "verified", (), {"name": "sgd", "groups": GROUPS}, "torch-cpu",
                  {MODEL: {"w": WEIGHT}, OPTIMIZER: {"state.w.momentum_buffer": WEIGHT}}, 3)


@pytest.mark.parametrize("other", [
    {"files": {**VERSION.files, MODEL: {"w": replace(WEIGHT, sha256="cd" * 32)}}},
    {"files": {**VERSION.files, MODEL: {"w": Digest(TensorSpec("int32", (2, 3)), "ab" * 32)}}},
    {"files": {**VERSION.files, MODEL: {"w": Digest(TensorSpec("float32", (3, 2)), "ab" * 32)}}},
    {"files": {**VERSION.files, MODEL: {"v": WEIGHT}}},
    {"files": {**VERSION.files, OPTIMIZER: {}}},
    {"files": {MODEL: VERSION.files[OPTIMIZER], OPTIMIZER: VERSION.files[MODEL]}},
    {"optimizer": {"name": "sgd", "groups": [{"params": ["w"], "options": {"lr": 0.2, "momentum": 0.9}}]}},
    {"optimizer": {"name": "adam", "groups": GROUPS}}, {"rounding": "torch-cpu-fused"},
], ids=lambda other: next(iter(other)))
def test_whatever_training_would_go_on_from_is_part_of_what_a_version_is(other: dict[str, Any]) -> None:
    assert statements.digest_of(replace(VERSION, **other)) != statements.digest_of(VERSION)


@pytest.mark.parametrize("other", [
    {"status": "unverified"}, {"unproven": ("a mark",)}, {"matches": 0}, {"run_id": "another"},
    {"optimizer": {"groups": [{"options": {"momentum": 0.9, "lr": 0.1}, "params": ["w"]}], "name": "sgd"}},
], ids=lambda other: next(iter(other)))
def test_what_a_node_says_besides_is_not(other: dict[str, Any]) -> None:
    assert statements.digest_of(replace(VERSION, **other)) == statements.digest_of(VERSION)


def said(why: str = "", shard: str = "", digest: str = "d", **more: Any) -> dict[str, Any]:
    return {"why": why, "shard": shard, "digest": digest, "own": None, "has": False, **more}


@pytest.mark.parametrize(("ranks", "reasons"), [
    ([said(), said()], ["", ""]),
    ([said(), said("bad here", digest="")], ["", "bad here"]),  # one that has none differs from nobody
    ([said(shard="a"), said(shard="b", digest="e"), said(shard="a")], ["", "", ""]),
    ([said(shard="a"), said(shard="b", digest="e"), said(shard="a", digest="f")], ["a", "", "a"]),
    ([said(shard="a"), said(shard="a", digest="f"), said("bad", shard="b")], ["", "", "bad"]),
])
def test_a_version_is_good_where_all_ranks_of_a_shard_have_the_same(ranks: list[Any], reasons: list[str]) -> None:
    differ = "step 7 of epoch 2: ranks of shard 'a' were given different versions of it"
    assert statements.reasons_of(ranks, (2, 7)) == [differ if reason == "a" else reason for reason in reasons]


def test_ranks_that_were_given_different_versions_go_on_from_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank alone: what the other says is made up. The version before it is the same for both."""
    heard: list[dict[str, Any]] = []

    class Two:
        def exchange(self, mine: dict[str, Any]) -> list[Any]:
            heard.append(mine)
            other = {**mine, "digest": "another"} if mine.get("digest") and len(heard) == 2 else mine
            return [mine, other]

        busy = recovery.ranks_of(False).busy

    monkeypatch.setattr(recovery, "ranks_of", lambda wanted: Two())
    with HandApi(HandVersion(8), HandVersion(7)) as api:
        recovered = recover(api.name, token=TOKEN)
    assert recovered.step == 7 and [why.partition(":")[0] for why in recovered.passed] == ["rank 0", "rank 1"]
    assert len(heard) == 4 and heard[1]["digest"] != heard[3]["digest"]


# -- whose own state -----------------------------------------------------------------------------------------


def given_by(*has: bool | None) -> list[dict[str, Any]]:
    """Of each rank: has it a state of its own in the version? None: it wants none."""
    return [said(own=None if one is None else rank, has=bool(one), missing={}) for rank, one in enumerate(has)]


ALIKE = "has none of its own in this version, and all are to go on alike"


@pytest.mark.parametrize(("ranks", "own", "has", "why", "lacking"), [
    ([True, True], 1, True, "", {}), ([True], None, False, "", {"": "no rank was asked for"}),
    ([None, True], 1, True, "", {}), ([True, False], 1, False, "", {"": "the version has no state of rank 1"}),
    ([True, False], 1, False, "it is damaged", {"": "it is damaged"}),
    ([True, False, True], 0, True, "", dict.fromkeys(statements.ALIKE, "rank 1 " + ALIKE)),
    ([True, None, False, False], 0, True, "",
     dict.fromkeys(statements.ALIKE, "2 ranks, rank 2 the first, " + ALIKE)),
    ([False, False], 0, False, "", {"": "the version has no state of rank 0"}),
])
def test_who_goes_on_without_a_state_of_its_own(
    ranks: list[bool | None], own: int | None, has: bool, why: str, lacking: dict[str, str]
) -> None:
    assert statements.lacking(given_by(*ranks), own, {"user": {}} if has else {}, why) == lacking


# -- torch's numbering ---------------------------------------------------------------------------------------


def state(*sizes: int) -> dict[str, Any]:
    """Of an optimizer with groups of so many parameters, all of which have some."""
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    return {
        "state": {number: f"of {number}" for number in range(sum(sizes))},
        "param_groups": [{"params": list(range(start, start + size)), "lr": 0.1, "momentum": 0.9}
                         for start, size in zip(first, sizes, strict=True)],
    }


def test_frozen_parameters_are_counted_wherever_they_are() -> None:
    """Before, between and after those that are stepped, and as whole groups."""
    groups = [{"lr": 0.5, "params": [False]}, {"lr": 0.4, "params": [True, False, True]},
              {"lr": 0.3, "params": [False, False]}, {"lr": 0.2, "params": [False, True]}]
    for options, rates in ((True, [0.5, 0.4, 0.3, 0.2]), (False, [0.5, 0.1, 0.3, 0.1])):
        made = recovery._as_given(state(2, 1), groups, options)
        assert [group["params"] for group in made["param_groups"]] == [[0], [1, 2, 3], [4, 5], [6, 7]]
        assert [group["lr"] for group in made["param_groups"]] == rates
        assert [group.get("momentum") for group in made["param_groups"]] == [None, 0.9, None, 0.9]
        assert made["state"] == {1: "of 0", 3: "of 1", 7: "of 2"}


def test_what_has_no_state_yet_is_numbered_too() -> None:
    held = {**state(2), "state": {1: "of 1"}}
    made = recovery._as_given(held, [{"params": [True, False, True]}], True)
    assert made["state"] == {2: "of 1"} and made["param_groups"][0]["params"] == [0, 1, 2]


def test_a_rank_that_says_options_and_no_parameters() -> None:
    """As ranks before this version of flowcheck: all are stepped."""
    made = recovery._as_given(state(2, 1), [{"lr": 0.5}, {"lr": 0.4}], True)
    assert made == {**state(2, 1), "param_groups": [
        {"params": [0, 1], "lr": 0.5, "momentum": 0.9}, {"params": [2], "lr": 0.4, "momentum": 0.9}]}


@pytest.mark.parametrize("groups", [
    [], [{"lr": 0.5}], [{"lr": 0.5}] * 3, [{"params": [True, True]}], [{"params": [True]}, {"params": [True]}],
    [{"params": [True, True]}, {"params": [False]}], [{"params": [True, True]}, {"params": [True, True]}],
    [{"params": [True]}, {"params": [True, True]}], [{"params": [True, True]}, {"params": [True]}, {"lr": 0.5}],
])
def test_groups_of_another_optimizer_leave_everything_as_it_is(groups: list[Any]) -> None:
    held = state(2, 1)
    assert recovery._as_given(held, groups, True) is held


# -- nothing to go on from -----------------------------------------------------------------------------------


def test_the_newest_eight_of_what_there_is_are_named() -> None:
    with HandApi(*(HandVersion(step, epoch=step // 5) for step in range(1, 11))) as api, \
            pytest.raises(EnvironmentProblem) as caught:
        recover(api.name, token=TOKEN, step=99)
    names = ", ".join(f"step {step} of epoch {step // 5}" for step in range(3, 11))
    assert caught.value.what == f"step 99 is not there for every rank (rank 0: {names})"


@pytest.mark.parametrize(("fresh", "what"), [
    (False, "no version was found, and who may have one did not answer: "), (True, ""),
])
def test_a_shard_that_is_not_there_while_a_node_is_gone(fresh: bool, what: str) -> None:
    with HandApi() as gone:
        pass
    with HandApi(HandVersion(7, shard="a")) as api:
        if fresh:
            started = recover([api.name, gone.name], token=TOKEN, shard="b", fresh=True)
            assert not started and len(started.passed) == 2 and gone.name in started.passed[0]
            assert started.passed[1] == "run 'run' has nothing of shard 'b'; it has 'a'"
        else:
            with pytest.raises(EnvironmentProblem) as caught:
                recover([api.name, gone.name], token=TOKEN, shard="b")
            assert caught.value.what.startswith(what) and gone.name in caught.value.what


def test_why_a_step_is_not_there_is_said_with_all_that_is_known() -> None:
    """Of a node that is gone, of one that withholds, and of another shard; after the versions that proved bad."""
    with HandApi() as gone:
        pass
    with HandApi(HandVersion(7)) as api:
        api.withheld = [HandVersion(9).offer | {"why": "too few matched"}]
        with pytest.raises(EnvironmentProblem) as caught:
            recover([api.name, gone.name], token=TOKEN, step=9)
    head, _, why = caught.value.what.partition("): ")
    assert head == "step 9 is not there for every rank (rank 0: step 7 of epoch 0"
    absent, withheld = why.split("; ")
    assert absent.startswith(f"{gone.name}: ") and withheld == f"{api.name}: too few matched"


# -- with a node ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("older", "taken"), [(7, 7), (6, 17)])
def test_a_verified_version_is_taken_if_it_is_ten_steps_older_and_no_more(older: int, taken: int) -> None:
    with HandApi(HandVersion(17, status="unverified"), HandVersion(older)) as api:
        assert recover(api.name, token=TOKEN).step == taken


def test_a_node_that_speaks_no_tls_has_nothing_where_tls_is_wanted() -> None:
    with HandApi(HandVersion(7)) as api:
        with pytest.raises(EnvironmentProblem, match="who may have one did not answer"):
            recover(api.name, token=TOKEN, ca="system")
        assert recover(api.name, token=TOKEN, ca="").step == 7


@pytest.mark.parametrize("name", ["rng", "user", "scheduler", "scaler"])
@pytest.mark.parametrize("value", [[], 7, "x"])
def test_a_rank_whose_state_has_a_part_of_another_form_has_none(name: str, value: object) -> None:
    given = {"rng": {}, "user": {}, "scheduler": {}, "scaler": {}, "groups": []}
    with HandApi(HandVersion(7)) as api:
        api.versions[0].give(1, pack({**given, name: value}, step=7, rank=1, ranks=2))
        recovered = recover(api.name, token=TOKEN, rank=1)
        assert recovered.passed == ("the state of rank 1 is not one of this version of flowcheck",)
        api.versions[0].give(1, pack({**given, name: {"a": 1}}, step=7, rank=1, ranks=2))
        recovered = recover(api.name, token=TOKEN, rank=1)
        assert getattr(recovered, name) == {"a": 1} and recovered.passed == ()
