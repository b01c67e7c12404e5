"""recover: what comes back, a fresh start and when there is none, and ranks that agree on one step."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flowcheck
from flowcheck.ask import sources
from flowcheck.control.link import MAGIC
from flowcheck.control.user_state import pack
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.trainer.recover import recovery
from flowcheck.trainer.recover import together as together_ranks
from flowcheck.trainer.recover.recovered import PARTS
from flowcheck.trainer.recover.recovery import Recovered, recover
from flowcheck.trainer.user import rng_state

from ..hand_api import TOKEN, HandApi, HandVersion, seal
from ..hand_node import until

U = "unverified"


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi(HandVersion(7), HandVersion(6, tier="disk")) as made:
        yield made


def problem(call: Any, *given: Any, **named: Any) -> FlowcheckError:
    with pytest.raises(FlowcheckError) as caught:
        call(*given, **named)
    assert caught.value.remedy and isinstance(caught.value, EnvironmentProblem | UserError)
    return caught.value


def spoil(version: HandVersion) -> None:
    data = version.files["model.safetensors"]
    version.files["model.safetensors"] = data[:-1] + bytes([data[-1] ^ 1])


# -- what comes back ---------------------------------------------------------------------------------------


def test_a_version_is_loaded_by_torchs_own_loaders(api: HandApi) -> None:
    recovered = flowcheck.recover(api.name, token=TOKEN)
    assert recovered and (recovered.step, recovered.epoch, recovered.run_id, recovered.shard) == (7, 1, "run", "")
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(1))})
    model.load_state_dict(recovered.model)
    # In the optimizer's numbering w is 0 and b is 1, as the groups of the manifest have them.
    optimizer = torch.optim.SGD([model["w"], model["b"]], lr=1.0, momentum=0.5)
    optimizer.load_state_dict(recovered.optimizer)
    assert model["w"].tolist() == [7.5, 2.0] and model["b"].tolist() == [3.0]
    assert optimizer.state[model["w"]]["momentum_buffer"].tolist() == [1.0, 7.0]
    assert model["b"] not in optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["momentum"] == 0.9
    assert repr(recovered) == (
        f"Recovered(step 7 of run 'run', epoch 0, verified, from {api.name}, memory: {recovered.nbytes:,} bytes in"
        f" {recovered.seconds:.2f} s)"
    )


def test_what_a_version_says_of_itself_comes_with_it() -> None:
    with HandApi(HandVersion(7, status=U, shard="dp1", epoch=4)) as api:
        recovered = recover(api.name, token=TOKEN)
    assert (recovered.status, recovered.unproven, recovered.shard, recovered.epoch) == (U, (), "dp1", 5)
    said = repr(Recovered(7, 5, "run", "", status=U, unproven=("a", "b"), source="x", passed=("y", "z"),
                          version_epoch=4))
    assert "epoch 4, unverified, unproven: a; b, from x" in said and said.endswith("not taken: y; z)")


def test_it_goes_straight_into_the_tensors_of_the_model(api: HandApi) -> None:
    given = {"w": torch.zeros(2), "b": torch.zeros(1)}
    assert recover(api.name, token=TOKEN, into=given).model["w"] is given["w"]
    assert given["w"].tolist() == [7.5, 2.0]


def test_nodes_and_token_from_the_environment(
    api: HandApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\nanother line\n")
    monkeypatch.setenv("FLOWCHECK_NODES", api.name)
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "token"))
    assert recover().step == 7
    assert recover([api.name], token=TOKEN).step == 7


@pytest.mark.parametrize("nodes", [None, "", []])
def test_without_a_node_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, nodes: Any) -> None:
    for there in (False, True):
        monkeypatch.setenv("FLOWCHECK_NODES", "") if there else monkeypatch.delenv("FLOWCHECK_NODES", raising=False)
        with pytest.raises(UserError, match="no node is named") as caught:
            recover(nodes, token=TOKEN)
        assert caught.value.where == "nodes" and "FLOWCHECK_NODES" in caught.value.remedy


def _put(api: HandApi, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """A model that the version fits, an optimizer that `make` makes of its parameters, and `Recovered.load` of both."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(1))})
    optimizer = make([model["w"], model["b"]])
    try:
        recover(api.name, token=TOKEN).load(model, optimizer)
    except UserError as error:
        assert model["w"].tolist() == [0.0, 0.0] and not optimizer.state, "refused, and half of it loaded"
        return error, optimizer
    return model, optimizer


def test_a_version_is_put_where_it_belongs(api: HandApi) -> None:
    model, optimizer = _put(api, lambda them: torch.optim.SGD(them, lr=1.0, momentum=0.5))
    assert model["w"].tolist() == [7.5, 2.0] and optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(("make", "what"), [
    (torch.optim.AdamW, "its groups do not say amsgrad, betas"),
    (lambda them: torch.optim.SGD([{"params": them[:1]}, {"params": them[1:]}], lr=1.0), "its groups have [2] param"),
    (lambda them: torch.optim.SGD(them[::-1], lr=1.0), "the one here has 'b' as its parameter 0"),
])
def test_a_version_of_another_optimizer_is_refused_before_anything_is_loaded(
    api: HandApi, make: Callable[[list[torch.nn.Parameter]], Any], what: str
) -> None:
    assert what in _put(api, make)[0].what


def test_a_version_is_loaded_into_a_model_and_an_optimizer(api: HandApi) -> None:
    model, found = torch.nn.Linear(1, 1), recover(api.name, token=TOKEN)
    for given, what in (((model, {}), "a dict is given for the optimizer"), ((None, None), "a NoneType is given for")):
        with pytest.raises(UserError, match=what):
            found.load(*given)


@pytest.mark.parametrize(
    ("named", "where"),
    [
        ({"token": TOKEN}, "nodes"), ({"nodes": "", "token": TOKEN}, "nodes"), ({"nodes": [], "token": TOKEN}, "nodes"),
        ({"nodes": "h", "token": TOKEN}, "nodes"), ({"nodes": "h:1"}, "token"),
        ({"nodes": "h:1", "token": "x"}, "token"),
        *(({"nodes": "h:1", "token": TOKEN, name: value}, name) for name, values in {
            "nodes": (5, b"h:1", "h..i:1", "\0:1", "\ud800:1", [5]), "token": (5, b"x", "\ud800" * 20),
            "ca": (5, "\0"), "seconds": (None, float("inf"), float("nan"), 0, -1.0, "5", True),
            "run_id": (5, b"x"), "shard": (b"x", 0),
            "step": ("3", True, -1, 1.0), "prefer_verified": (None, -1, "1"), "into": ([1], 5, {"w"}),
            "fresh": ("no", 1), "together": ("no", None),
        }.items() for value in values),
    ],
)
def test_arguments_that_cannot_be(named: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWCHECK_NODES", raising=False)
    monkeypatch.delenv("FLOWCHECK_TOKEN_FILE", raising=False)
    with pytest.raises(UserError) as caught:
        recover(**named)
    assert caught.value.where == where and caught.value.remedy


def test_a_token_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", "/nowhere")
    with pytest.raises(UserError, match="FLOWCHECK_TOKEN_FILE: /nowhere: cannot be read"):
        recover("h:1")


def test_an_older_step_where_it_is_asked_for(api: HandApi) -> None:
    assert recover(api.name, token=TOKEN, step=6).source == f"{api.name}, disk"


def test_a_verified_version_is_preferred(api: HandApi) -> None:
    api.versions[0] = HandVersion(17, status=U)
    api.versions[1] = HandVersion(7)
    assert recover(api.name, token=TOKEN).step == 7
    assert recover(api.name, token=TOKEN, prefer_verified=9).step == 17


# -- doubt -------------------------------------------------------------------------------------------------


def test_an_older_version_is_taken_where_the_newest_is_bad_everywhere(api: HandApi) -> None:
    spoil(api.versions[0])
    recovered = recover(api.name, token=TOKEN)
    assert recovered.step == 6 and recovered.model["w"].tolist() == [6.5, 2.0]
    assert len(recovered.passed) == 1 and recovered.passed[0].startswith("step 7 of epoch 0 could be had from nowhere")
    assert "tensor 'b' has other bytes" in recovered.passed[0] and "tensor 'b'" in repr(recovered)


def test_nothing_that_was_found_is_good(api: HandApi) -> None:
    spoil(api.versions[0])
    spoil(api.versions[1])
    error = problem(recover, api.name, token=TOKEN)
    assert error.what.startswith("none of the versions that were found is good") and error.what.count("tensor 'b'") == 2
    assert "fresh" not in error.what
    problem(recover, api.name, token=TOKEN, fresh=True)  # there are versions: a fresh start would hide that


def test_a_step_that_is_not_there(api: HandApi) -> None:
    error = problem(recover, api.name, token=TOKEN, step=8)
    assert error.what == (
        "step 8 is not there for every rank (rank 0: step 6 of epoch 0, step 7 of epoch 0)"
    )
    api.versions.clear()
    assert "(rank 0: nothing)" in problem(recover, api.name, token=TOKEN, step=8).what


def test_versions_that_are_bad_one_after_the_other(api: HandApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MOST_ROUNDS", 1)
    spoil(api.versions[0])
    assert problem(recover, api.name, token=TOKEN).what.startswith("none of 1 versions proved good: step 7")


# -- a fresh start -----------------------------------------------------------------------------------------


def test_a_fresh_start_says_so(api: HandApi, caplog: pytest.LogCaptureFixture) -> None:
    api.versions.clear()
    recovered = recover(api.name, token=TOKEN)
    assert not recovered and (recovered.step, recovered.epoch, recovered.model, recovered.optimizer) == (0, 0, {}, {})
    assert repr(recovered) == "Recovered(nothing: no node has a version, a fresh start at step 0)"
    assert repr(recovered) in caplog.text and caplog.records[-1].levelname == "WARNING"


def test_no_fresh_start_by_chance(api: HandApi, caplog: pytest.LogCaptureFixture) -> None:
    """A node that does not answer may have the version: training that begins anew would throw it away."""
    api.versions.clear()
    with HandApi() as gone:
        pass
    why = f"{gone.name}: connection lost: Connection refused"
    error = problem(recover, [api.name, gone.name], token=TOKEN)
    assert error.what == f"no version was found, and who may have one did not answer: {why}"
    recovered = recover([api.name, gone.name], token=TOKEN, fresh=True)
    assert not recovered and repr(recovered).endswith(f"; not taken: {why})")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_wrong_token_is_what_to_change_and_never_a_fresh_start(api: HandApi, fresh: bool) -> None:
    """Who refuses the token is there, and may have the version: it is not one that did not answer."""
    error = problem(recover, api.name, token=TOKEN[::-1], fresh=fresh)
    assert "token=" in error.remedy and "fresh" not in error.remedy
    api.answers["/v1/versions"] = 401, b'{"why": "the key is missing or wrong"}'
    with HandApi() as other:  # which has the token, and nothing
        error = problem(recover, [other.name, api.name], token=TOKEN, fresh=fresh)
    assert "token=" in error.remedy and "fresh" not in error.remedy


@pytest.mark.parametrize("says", [b"220 mail.example.com ESMTP\r\n", MAGIC + bytes(60)])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_port_that_is_not_the_apis_is_what_to_change(fresh: bool, says: bytes) -> None:
    """What answers there speaks no HTTP: a node's control port, or another service. It ends the connection with most of
    the question unread, which resets it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer() -> None:
            own, _ = server.accept()
            with own:
                own.sendall(says)
                own.recv(16)

        thread = threading.Thread(target=answer)
        thread.start()
        error = problem(recover, f"127.0.0.1:{server.getsockname()[1]}", token=TOKEN, fresh=fresh)
        thread.join()
    assert "api.listen" in error.remedy and "fresh" not in error.remedy


# -- what this rank gave of itself ---------------------------------------------------------------------------


def own(step: int, rank: int = 1, ranks: int = 2, **state: Any) -> bytes:
    given = {"rng": rng_state(), "groups": [{"lr": 0.05, "initial_lr": 0.4}], "user": {"at": step}, **state}
    return pack(given, step=step, rank=rank, ranks=ranks)


def lacks(recovered: Recovered, *parts: str) -> None:
    """These cannot be read, by whatever name torch's own would take silently; the others are there."""
    assert [part for part in PARTS if not recovered.has(part)] == sorted(parts, key=PARTS.index)
    for part in parts:
        with pytest.raises(UserError) as caught:
            getattr(recovered, part)
        assert caught.value.where == f"recovered.{part}" and caught.value.remedy
    assert set(recovered.missing) <= {*parts, "groups"} or not parts


def test_what_a_rank_gave_comes_back(api: HandApi) -> None:
    torch.manual_seed(5)
    api.versions[0].give(1, own(7, scheduler={"last_epoch": 7}, scaler={"scale": 2.0}))
    drawn = torch.rand(3).tolist()
    recovered = recover(api.name, token=TOKEN, rank=1)
    assert (recovered.user, recovered.scheduler, recovered.scaler) == ({"at": 7}, {"last_epoch": 7}, {"scale": 2.0})
    recovered.restore_rng()
    assert torch.rand(3).tolist() == drawn
    (group,) = recovered.optimizer["param_groups"]  # as it was when the iteration began, not in the step before
    assert (group["lr"], group["initial_lr"], group["momentum"], group["params"]) == (0.05, 0.4, 0.9, [0, 1])


def test_a_version_without_it_is_a_version(api: HandApi) -> None:
    for rank, passed in ((None, ()), (1, ("the version has no state of rank 1",))):
        recovered = recover(api.name, token=TOKEN, rank=rank)
        assert recovered.step == 7 and recovered.optimizer["param_groups"][0]["lr"] == 0.1
        assert recovered.passed == passed
        lacks(recovered, *PARTS)
        with pytest.raises(UserError, match="step 7 does not have it"):
            recovered.restore_rng()


def test_a_version_that_has_it_is_preferred_to_a_newer_one(api: HandApi) -> None:
    api.versions[1].give(1, own(6))
    assert recover(api.name, token=TOKEN, rank=1).user == {"at": 6}
    assert recover(api.name, token=TOKEN, rank=0).step == 7 and recover(api.name, token=TOKEN).step == 7
    api.versions[0] = HandVersion(17)
    assert recover(api.name, token=TOKEN, rank=1).step == 17  # but not at any price


def test_a_source_that_has_it_is_preferred_to_a_nearer_one() -> None:
    with HandApi(HandVersion(7), HandVersion(7, tier="disk")) as api:
        api.versions[1].give(1, own(7))
        assert recover(api.name, token=TOKEN, rank=1).source == f"{api.name}, disk"
        assert recover(api.name, token=TOKEN, rank=0).source == f"{api.name}, memory"


@pytest.mark.parametrize(("data", "why"), [
    (b"", "is not a user state"), (own(7)[:-1] + b"x", "has other bytes than those written"),
    (own(6), "is of step 6 and rank 1"), (own(7, rank=0), "is of step 7 and rank 0"),
])
def test_one_that_is_damaged_is_not_taken(data: bytes, why: str) -> None:
    with HandApi(HandVersion(7), HandVersion(7, tier="disk")) as api:
        api.versions[0].give(1, data)
        api.versions[1].give(1, own(7))
        recovered = recover(api.name, token=TOKEN, rank=1)
    assert recovered.source == f"{api.name}, disk" and recovered.user == {"at": 7}
    assert recovered.passed == (f"{api.name}, memory: state of rank 1: {why}",) or why in recovered.passed[0]


@pytest.mark.parametrize("state", [[], {"groups": 7}, {"groups": [], "user": 7}, {"groups": [7]}, {}])
def test_one_of_another_kind_is_not_taken(api: HandApi, state: Any) -> None:
    api.versions[0].give(1, pack(state, step=7, rank=1, ranks=2))
    recovered = recover(api.name, token=TOKEN, rank=1)
    assert recovered.step == 7 and "not one of this version" in recovered.passed[0]
    lacks(recovered, *PARTS)


@pytest.mark.parametrize("rank", [-1, True, "0"])
def test_a_rank_that_is_none(rank: Any) -> None:
    with pytest.raises(UserError, match="is not a rank"):
        recover("h:1", token=TOKEN, rank=rank)


def test_a_job_of_another_size_takes_none_by_itself(api: HandApi) -> None:
    api.versions[0].give(0, own(7, rank=0, ranks=1))
    api.versions[1] = HandVersion(5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert recover(api.name, token=TOKEN).user == {"at": 7}
        api.versions[0].give(0, own(7, rank=0, ranks=2))
        recovered = recover(api.name, token=TOKEN)
        assert recovered.step == 7
        lacks(recovered, *PARTS)
        assert "those of a job of 2 ranks, this one has 1" in recovered.passed[0] and len(recovered.passed) == 1
        assert recover(api.name, token=TOKEN, rank=0).user == {"at": 7}
    finally:
        dist.destroy_process_group()


def test_ranks_take_a_version_that_has_everybodys() -> None:
    with HandApi(HandVersion(8), HandVersion(7), HandVersion(6)) as api:
        for version, ranks in zip(api.versions, ((0,), (0, 1), (0, 1)), strict=True):
            for rank in ranks:
                version.give(rank, own(version.offer["step"], rank))
        found = together(2, lambda rank: recover(api.name, token=TOKEN, rank=rank))
    assert [(one.step, one.user) for one in found] == [(7, {"at": 7})] * 2


# -- ranks together ----------------------------------------------------------------------------------------


def together(count: int, call: Any, store: dist.Store | None = None) -> list[Any]:
    """What `call(rank)` gives on each rank, or raises: threads that share a store, as ranks do."""
    store = store or dist.HashStore()
    out: list[Any] = [None] * count
    own = threading.local()

    def rank(number: int) -> None:
        own.ranks = together_ranks._Together(store, number, count)
        try:
            out[number] = call(number)
        except Exception as error:
            out[number] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "ranks_of", lambda wanted: own.ranks)
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return out


def test_ranks_take_the_newest_that_all_can_have() -> None:
    with HandApi(HandVersion(8, shard="a"), HandVersion(7, shard="a")) as a, HandApi(
        HandVersion(7, shard="b"), HandVersion(6, shard="b")
    ) as b:
        found = together(2, lambda rank: recover((a, b)[rank].name, token=TOKEN))
    assert [(one.step, one.shard) for one in found] == [(7, "a"), (7, "b")]


def test_what_is_bad_for_one_is_bad_for_all() -> None:
    with HandApi(HandVersion(7), HandVersion(6, tier="disk")) as good, HandApi(
        HandVersion(7), HandVersion(6, tier="disk")
    ) as bad:
        spoil(bad.versions[0])
        found = together(2, lambda rank: recover((good, bad)[rank].name, token=TOKEN))
    assert [one.step for one in found] == [6, 6]
    for one in found:
        assert len(one.passed) == 1 and one.passed[0].startswith("rank 1: step 7 of epoch 0 could be had from nowhere")


def test_no_rank_starts_fresh_alone() -> None:
    with HandApi(HandVersion(7)) as has, HandApi() as empty:
        found = together(2, lambda rank: recover((has, empty)[rank].name, token=TOKEN))
    for one in found:
        assert isinstance(one, EnvironmentProblem)
        assert one.what == "no version is there for every rank (rank 0: step 7 of epoch 0; rank 1: nothing)"


def test_what_is_withheld_counts_as_nothing_and_is_said() -> None:
    """A job that trains in shadow mode begins from its own checkpoint, and knows why."""
    why = "step 7 is not offered for recovery: 0 of 3 checksums of the trainer had matched"
    with HandApi() as node:
        node.withheld = [HandVersion(7).offer | {"why": why}, HandVersion(6).offer | {"why": "another"}]
        found = recover(node.name, token=TOKEN)
        assert not found and found.passed == (f"{node.name}: {why}",) and why in repr(found)
        with pytest.raises(EnvironmentProblem, match=r"step 7 is not there .*0 of 3 checksums"):
            recover(node.name, token=TOKEN, step=7)
        for said in together(2, lambda rank: recover(node.name, token=TOKEN)):
            assert not said and said.passed == (f"{node.name}: {why}",)


def test_all_start_fresh_or_none() -> None:
    with HandApi() as empty, HandApi() as gone:
        gone.close()
        found = together(2, lambda rank: recover((empty, gone)[rank].name, token=TOKEN))
        assert all(isinstance(one, EnvironmentProblem) and gone.name in one.what for one in found)
        assert not any(together(2, lambda rank: recover(empty.name, token=TOKEN)))


def test_steps_of_different_runs_are_not_taken_for_each_other() -> None:
    with HandApi(HandVersion(7)) as one, HandApi(HandVersion(7, run_id="other")) as other:
        found = together(2, lambda rank: recover((one, other)[rank].name, token=TOKEN))
    assert all(isinstance(error, UserError) and error.where == "run_id" for error in found)
    assert "'other', 'run'" in found[0].what


@pytest.mark.parametrize(("name", "values"), [
    ("step", (6, None)), ("prefer_verified", (10, 0)), ("fresh", (True, False)), ("run_id", ("a", "b")),
])
def test_ranks_that_ask_for_different_things_get_nothing(name: str, values: tuple[Any, Any]) -> None:
    """Each would work out another step."""
    with HandApi(HandVersion(17, status=U), HandVersion(9), HandVersion(6)) as api:
        said = together(2, lambda rank: recover(api.name, token=TOKEN, **{name: values[rank]}))
    assert [(type(one), one.where) for one in said] == [(UserError, name)] * 2
    assert [one.what for one in said] == [f"rank 1 says {values[1]!r} and this one {values[0]!r}",
                                          f"rank 0 says {values[0]!r} and this one {values[1]!r}"]


def test_two_versions_of_one_step_are_not_taken() -> None:
    """Two starts of the job had the same number, as an absent node can bring about; each rank's nodes have one of them.
    The next step is the same everywhere."""
    with HandApi(HandVersion(8, {"w": [1.0]}), HandVersion(7)) as one, \
            HandApi(HandVersion(8, {"w": [2.0]}), HandVersion(7)) as other:
        found = together(2, lambda rank: recover((one, other)[rank].name, token=TOKEN))
    assert [recovered.step for recovered in found] == [7, 7]
    for recovered in found:
        assert [why.partition(": ")[2] for why in recovered.passed] == [
            "step 8 of epoch 0: ranks of shard '' were given different versions of it"] * 2


def test_ranks_of_different_shards_have_different_versions() -> None:
    with HandApi(HandVersion(8, {"w": [1.0]}, shard="a")) as one, HandApi(HandVersion(8, {"w": [2.0]}, shard="b")) as b:
        found = together(2, lambda rank: recover((one, b)[rank].name, token=TOKEN))
    assert [(recovered.step, recovered.shard, recovered.passed) for recovered in found] == [(8, "a", ()), (8, "b", ())]


@pytest.mark.parametrize("when", ["it begins", "it looks", "it receives"])
def test_nobody_waits_for_a_rank_that_gave_up(when: str) -> None:
    with HandApi(HandVersion(7)) as one, HandApi(HandVersion(7), HandVersion(7, shard="b")) as two:
        if when == "it begins":  # as where one host has no token file
            found = together(2, lambda rank: recover(one.name, token=(TOKEN, "")[rank]))
        elif when == "it looks":
            found = together(2, lambda rank: recover((one, two)[rank].name, token=TOKEN))
        else:
            found = together(2, lambda rank: recover(one.name, token=TOKEN, into={"w": torch.zeros(2 + rank)}))
    assert all(isinstance(error, UserError) for error in found)
    assert found[0].what == f"rank 1 gave up: {found[1].what}"
    said = {"it begins": "there is none", "it looks": "several", "it receives": "is float32 [3]"}
    assert said[when] in found[1].what


def test_a_tier_whose_versions_are_bad_hides_no_other() -> None:
    """A broken disk that lists more versions than are tried: after three of them it is asked for no more."""
    bad = [HandVersion(step, tier="disk") for step in range(10, 40)]
    for one in bad:
        spoil(one)
    with HandApi(*bad, HandVersion(5)) as broken, HandApi(HandVersion(6)) as good:
        recovered = recover([broken.name, good.name], token=TOKEN)
        assert (recovered.step, recovered.source) == (6, f"{good.name}, memory")
        assert len([why for why in recovered.passed if "step 3" in why or "step 4" in why]) == 3
        assert f"{broken.name}, disk: 3 of its versions were not good, and it is asked for no more" in recovered.passed
        assert recover(broken.name, token=TOKEN).step == 5, "its memory is"
        broken.versions = bad
        assert "3 of its versions were not good" in problem(recover, broken.name, token=TOKEN).what, "nor a fresh start"


class Leaving(HandApi):
    """Whose versions from step 10 on leave as soon as they are asked for."""

    def _body(self, request: Any) -> tuple[int, bytes]:
        for one in self.versions:
            if one.offer["step"] >= 10 and f"/{one.id}/" in request.path:
                self.versions.remove(one)
                return 404, b'{"why": "it made room"}'
        return super()._body(request)


def test_versions_that_made_room_do_not_count_against_their_tier() -> None:
    """A job that runs replaces what was listed, again and again; its memory is not broken."""
    with Leaving(*(HandVersion(step) for step in range(10, 15)), HandVersion(5)) as api:
        recovered = recover(api.name, token=TOKEN)
    assert recovered.step == 5 and not any("not good" in why for why in recovered.passed)


def test_but_those_that_are_listed_still_do() -> None:
    """A node says the same of a file that its disk does not give any more."""
    listed = [HandVersion(step, tier="disk") for step in range(10, 40)]
    with HandApi(*listed) as broken, HandApi(HandVersion(6)) as good:
        for one in listed:
            broken.answers[f"/v1/versions/{one.id}/manifest.json"] = 404, b'{"why": "cannot be read"}'
        recovered = recover([broken.name, good.name], token=TOKEN)
    assert recovered.step == 6
    assert f"{broken.name}, disk: 3 of its versions were not good, and it is asked for no more" in recovered.passed


def test_a_node_without_a_slot_for_another_reader_is_asked_again(
    api: HandApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "AGAIN_SECONDS", 0.01)
    path = f"/v1/versions/{api.versions[0].id}/manifest.json"
    api.answers[path] = 503, b'{"why": "no slot is left"}'
    heard = threading.Thread(target=lambda: (until(lambda: api.asked_for(path) > 2), api.answers.clear()))
    heard.start()
    assert recover(api.name, token=TOKEN).step == 7
    heard.join()


def test_one_that_stays_without_is_not_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(sources, "BUSY_SECONDS", 0.05)
    busy = [HandVersion(step) for step in range(10, 15)]
    with HandApi(*busy, HandVersion(5)) as api:
        for one in busy:
            api.answers[f"/v1/versions/{one.id}/manifest.json"] = 503, b'{"why": "no slot is left"}'
        recovered = recover(api.name, token=TOKEN)
    assert recovered.step == 5 and not any("not good" in why for why in recovered.passed)
    assert any("refused: no slot is left" in why for why in recovered.passed)


def test_a_tensor_for_which_there_is_no_memory_is_named(api: HandApi) -> None:
    """Of the newest version; an older one that fits is taken."""
    version = api.versions[0]
    entry = version.document["files"]["model.safetensors"]["tensors"]["w"]
    entry["shape"] = [1 << 46]
    version.document = seal(version.document)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 46], "data_offsets": [0, 1 << 48]},
                         "b": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 48, (1 << 48) + 4]}}).encode()
    version.files["model.safetensors"] = len(header).to_bytes(8, "little") + header + bytes(64)
    recovered = recover(api.name, token=TOKEN)
    assert recovered.step < 7 and any("step 7" in why for why in recovered.passed)


@pytest.mark.parametrize("what", ["", "no thread is to be had"])
def test_a_rank_that_cannot_even_look_is_told_to_the_others(
    api: HandApi, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    found = recovery.look

    def look(nodes: Any, run_id: str | None, shard: str | None, step: int | None) -> Any:
        if shard is not None:  # of rank 1
            raise RuntimeError(what)
        return found(nodes, run_id, shard, step)

    monkeypatch.setattr(recovery, "look", look)
    errors = together(2, lambda rank: recover(api.name, token=TOKEN, shard="" if rank else None))
    assert isinstance(errors[1], RuntimeError)
    assert isinstance(errors[0], UserError) and errors[0].what == f"rank 1 gave up: RuntimeError: {what}"


def test_a_fault_of_ours_is_told_to_the_other_ranks(api: HandApi, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recovery.fetch

    def fetch(*given: Any) -> Any:
        if given[2]:  # into: of rank 1
            raise RuntimeError("a bug")
        return found(*given)

    monkeypatch.setattr(recovery, "fetch", fetch)
    errors = together(2, lambda rank: recover(api.name, token=TOKEN, into={"w": torch.zeros(2)} if rank else None))
    assert isinstance(errors[1], RuntimeError)
    assert isinstance(errors[0], UserError) and errors[0].what == "rank 1 gave up: RuntimeError: a bug"


def test_a_named_shard_is_not_taken_for_the_only_one_while_a_node_is_gone() -> None:
    """Two groups with a node each, and one of them is down: ranks of that one would take the other's parameters."""
    with HandApi(HandVersion(7, shard="a")) as api:
        with HandApi() as gone:
            pass
        error = problem(recover, [api.name, gone.name], token=TOKEN)
        assert isinstance(error, UserError) and error.where == "shard" and gone.name in error.what
        assert recover([api.name, gone.name], token=TOKEN, shard="a").step == 7
        assert recover(api.name, token=TOKEN).step == 7


def test_a_run_that_was_the_only_one_stays_chosen() -> None:
    """Its newest version proves bad, and by then there is another run."""

    class Joined(HandApi):
        def _body(self, request: Any) -> tuple[int, bytes]:
            if request.path.endswith("model.safetensors") and len(self.versions) == 2:
                self.versions.append(HandVersion(50, run_id="another"))
            return super()._body(request)

    with Joined(HandVersion(7), HandVersion(6)) as joined:
        spoil(joined.versions[0])
        recovered = recover(joined.name, token=TOKEN)
    assert (recovered.run_id, recovered.step) == ("run", 6)


def test_what_a_node_says_can_be_shown(api: HandApi) -> None:
    api.withheld = [{**HandVersion(70).offer, "why": "half a \ud800"}]
    recovered = recover(api.name, token=TOKEN)
    assert repr(replace(recovered, passed=("half a \ud800",))).encode()


def test_a_model_of_another_type_is_not_rounded_into(api: HandApi) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
                                    "b": torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})
    with pytest.raises(UserError, match=r"w is torch.float32, and here torch.bfloat16"):
        recover(api.name, token=TOKEN).load(model, torch.optim.SGD([model["w"], model["b"]], lr=1.0, momentum=0.5))
    assert model["w"].tolist() == [0.0, 0.0]


def test_groups_of_no_parameters_are_not_matched(api: HandApi) -> None:
    """A version of an optimizer without groups, and a rank that said two of them."""
    api.versions[0].document["optimizer"]["groups"] = []
    api.versions[0].document = seal(api.versions[0].document)
    api.versions[0].files["optimizer.safetensors"] = HandVersion(7, state={}).files["optimizer.safetensors"]
    api.versions[0].document["files"]["optimizer.safetensors"] = {"bytes": 0, "tensors": {}}
    api.versions[0].document = seal(api.versions[0].document)
    api.versions[0].give(0, own(7, rank=0, groups=[{"lr": 0.1}, {"lr": 0.2}]))
    assert recover(api.name, token=TOKEN, rank=0).step == 7


@pytest.mark.parametrize(("name", "value"), [
    ("nbytes", 10**400), ("nbytes", (1 << 50) + 1), ("epoch", 1 << 31), ("epoch", 10**30),
])
def test_numbers_that_no_version_has_are_not_listed(name: str, value: int) -> None:
    with HandApi(HandVersion(5)) as api:
        api.versions[0].offer[name] = value
        why = "an epoch that is none" if name == "epoch" else "is not described"
        assert why in problem(recover, api.name, token=TOKEN).what
        api.versions[0].offer[name], api.withheld = 0, [{"run_id": "run", "epoch": 1 << 31}]
        assert "an epoch that is none" in problem(recover, api.name, token=TOKEN).what


def test_torchs_default_device_changes_nothing(api: HandApi) -> None:
    """Many scripts set one: what comes is on the CPU, where it was hashed."""
    with torch.device("meta"):
        recovered = recover(api.name, token=TOKEN)
    assert recovered.model["w"].device.type == "cpu" and recovered.model["w"].tolist() == [7.5, 2.0]
    assert {value.device.type for held in recovered.optimizer["state"].values() for value in held.values()} == {"cpu"}


# -- which start of the job comes next -----------------------------------------------------------------------


def test_no_epoch_is_given_out_twice() -> None:
    """An older version is taken; what a later start of the job made is still there, and ordered by epoch and step."""
    with HandApi(HandVersion(20, epoch=3), HandVersion(10, epoch=1)) as api:
        recovered = recover(api.name, token=TOKEN, step=10)
    assert (recovered.step, recovered.version_epoch, recovered.epoch) == (10, 1, 4)
    assert "epoch 1, verified" in repr(recovered)


def test_nor_one_of_another_shard_or_of_what_is_withheld() -> None:
    with HandApi(HandVersion(20), HandVersion(65, epoch=1, shard="a")) as api:
        assert recover(api.name, token=TOKEN, shard="").epoch == 2
        api.withheld = [{**HandVersion(70, epoch=5).offer, "why": "too few matched"}]
        assert recover(api.name, token=TOKEN, shard="").epoch == 6
        api.withheld = [{"epoch": epoch, "run_id": run_id} for epoch, run_id in
                        ((9, "other"), (True, "run"), (-1, "run"), (2.5, "run"), (7, 7))] + [7]
        assert recover(api.name, token=TOKEN, shard="").epoch == 2


def test_all_ranks_begin_the_same_start() -> None:
    with HandApi(HandVersion(20)) as one, HandApi(HandVersion(20), HandVersion(3, epoch=6, shard="b")) as two:
        found = together(2, lambda rank: recover((one, two)[rank].name, token=TOKEN, shard=""))
    assert [recovered.epoch for recovered in found] == [7, 7]


def test_a_fresh_start_of_a_run_that_has_something_is_a_later_one() -> None:
    with HandApi(HandVersion(5, epoch=2, shard="a")) as api:
        recovered = recover(api.name, token=TOKEN, shard="b", fresh=True)
    assert (bool(recovered), recovered.step, recovered.epoch, recovered.version_epoch) == (False, 0, 3, -1)


# -- states of some ranks ------------------------------------------------------------------------------------


def test_schedules_of_some_ranks_alone_are_not_taken() -> None:
    """Or learning rates part, and nobody says so."""
    with HandApi(HandVersion(7)) as api:
        api.versions[0].give(0, own(7, 0, scheduler={"last_epoch": 7}, scaler={"scale": 2.0}))
        first, second = together(2, lambda rank: recover(api.name, token=TOKEN, rank=rank))
    assert [one.optimizer["param_groups"][0]["lr"] for one in (first, second)] == [0.1, 0.1]
    assert first.user == {"at": 7}
    lacks(first, "scheduler", "scaler")
    assert first.passed == ("scheduler, scaler, the groups' options: rank 1 has none of its own in this version, and"
                            " all are to go on alike",)
    lacks(second, *PARTS)
    assert second.passed == ("the version has no state of rank 1",)


@pytest.mark.parametrize("missing", ["scheduler", "scaler", "rng", "user['loader']", "groups"])
def test_a_part_that_could_not_be_kept_costs_no_other_one(missing: str) -> None:
    """On either rank: what all are to have alike nobody takes then."""
    state = {"scheduler": {"last_epoch": 7}, "scaler": {"scale": 2.0}, "missing": {missing: "it is a set"}}
    with HandApi(HandVersion(7)) as api:
        api.versions[0].give(0, own(7, 0, **{key: value for key, value in state.items() if key != missing}))
        api.versions[0].give(1, own(7, 1, **{key: value for key, value in state.items() if key != "missing"}))
        both = together(2, lambda rank: recover(api.name, token=TOKEN, rank=rank))
    alike = missing in ("scheduler", "scaler")
    for one, its in zip(both, (True, False), strict=True):
        lacks(one, *([missing] if alike or (its and missing == "rng") else []))
        assert one.optimizer["param_groups"][0]["lr"] == (0.1 if missing == "groups" else 0.05)
        assert one.missing.get(missing) == ("it is a set" if its else one.missing.get(missing))
    with pytest.raises(KeyError if missing != "user['loader']" else UserError):
        both[0].user["loader"]
    with pytest.raises(KeyError):
        both[0].user["never given"]
    assert both[0].user.get("never given", 3) == 3
    if missing == "user['loader']":
        with pytest.raises(UserError, match="it is a set"):
            both[0].user.get("loader")


# -- frozen parameters ---------------------------------------------------------------------------------------


def test_torch_numbers_frozen_parameters_too() -> None:
    """No version has them; torch's optimizer counts them, and whole groups of them."""
    w, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    frozen = [torch.nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(3)]
    held = [{"params": frozen[:1], "lr": 0.5}, {"params": [w, frozen[1], b]}, {"params": frozen[2:]}]
    optimizer = torch.optim.SGD(held, lr=0.25, momentum=0.9)
    groups = [{**group, "params": [one.requires_grad for one in group["params"]]} for group in optimizer.param_groups]
    with HandApi(HandVersion(7)) as api:
        api.versions[0].give(1, own(7, groups=groups))
        recovered = recover(api.name, token=TOKEN, rank=1)
    assert [group["params"] for group in recovered.optimizer["param_groups"]] == [[0], [1, 2, 3], [4]]
    assert [group["lr"] for group in recovered.optimizer["param_groups"]] == [0.5, 0.25, 0.25]
    optimizer.load_state_dict(recovered.optimizer)
    assert optimizer.state[w]["momentum_buffer"].tolist() == [1.0, 7.0] and b not in optimizer.state
    assert not any(one in optimizer.state for one in frozen)


@pytest.mark.parametrize("params", [[[True]], [[True, True, True]], [[True], [True]], [7], [[]]])
def test_groups_of_another_optimizer_change_nothing(params: list[Any]) -> None:
    with HandApi(HandVersion(7)) as api:
        api.versions[0].give(1, own(7, groups=[{"lr": 0.5, "params": one} for one in params]))
        recovered = recover(api.name, token=TOKEN, rank=1)
    (group,) = recovered.optimizer["param_groups"]
    assert group["params"] == [0, 1] and group["lr"] == (0.5 if params == [7] else 0.1)


def test_a_second_call_is_another_one(api: HandApi) -> None:
    store = dist.HashStore()
    for step in (7, 9):
        api.versions[0] = HandVersion(step)
        assert [one.step for one in together(2, lambda rank: recover(api.name, token=TOKEN), store)] == [step] * 2


def test_what_processes_before_these_said_is_not_heard(api: HandApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps the store when it starts ranks anew. Here rank 1 died before it came so far, and then rank
    0 comes late: what it said the first time is still there."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with monkeypatch.context() as patch:
        patch.setattr(together_ranks, "TOGETHER_SECONDS", 0.05)
        problem(together_ranks._Together(store, 0, 2).exchange, {"step": "old"})
    assert together(2, lambda rank: recovery.ranks_of(True).exchange({"step": rank}), store) == [
        [{"step": 0}, {"step": 1}]
    ] * 2
    late = threading.Event()

    def again(rank: int) -> Any:
        if rank == 0:
            late.wait(60)
        else:
            threading.Timer(0.1, late.set).start()  # rank 1 sees the session before, whole
        return recovery.ranks_of(True).exchange({"step": 10 + rank})

    assert together(2, again, store) == [[{"step": 10}, {"step": 11}]] * 2


def test_a_rank_that_does_not_come(api: HandApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together_ranks, "TOGETHER_SECONDS", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    ranks = together_ranks._Together(store, 0, 2)
    error = problem(ranks.exchange, {})
    assert error.what.startswith("rank 1 has not said what it can have: ")
    for begun in (False, True):
        if begun:
            store.set("flowcheck/recover/session", "flowcheck/recover/old")
            store.set("flowcheck/recover/old/all", '["", "another"]')
        error = problem(together_ranks._Together(store if begun else dist.HashStore(), 1, 2).exchange, {})
        assert error.what.startswith("rank 0 has not said what it can have: ")


def test_alone_where_torch_distributed_is_not_up(api: HandApi) -> None:
    assert isinstance(recovery.ranks_of(True), together_ranks._Alone)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(recovery.ranks_of(True), together_ranks._Alone)  # nobody to agree with
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("groups", "why"), [
    ([{"params": ["w"], "options": {"lr": "much"}}], "an optimizer whose lr is 'much'"),
    ([{"params": ["w"], "options": {"nesterov": 1}}], "an optimizer whose nesterov is '1'"),
    ([{"params": ["x"], "options": {}}], "state of 'w', which is in none"),
])
def test_a_version_whose_optimizer_cannot_be_torchs_is_left_for_an_older_one(groups: Any, why: str) -> None:
    """State that belongs to no parameter would be dropped, and nobody would hear of it."""
    with HandApi(HandVersion(7), HandVersion(5)) as api:
        first = api.versions[0]
        first.document = seal({**first.document, "optimizer": {**first.document["optimizer"], "groups": groups}})
        got = recover(api.name, token=TOKEN)
    assert got.step == 5 and why in got.passed[0]


def test_another_run_is_named_and_another_shard_is_refused() -> None:
    with HandApi(HandVersion(7, shard="dp1")) as api:
        got = recover(api.name, token=TOKEN, run_id="new")
        assert not got and got.step == 0 and got.passed == ("nothing is of run 'new'; there is 'run'",)
        assert repr(got).startswith("Recovered(nothing: no node has a version of run 'new', a fresh start")
        with pytest.raises(EnvironmentProblem, match=r"run 'run' has nothing of shard 'dp2'; it has 'dp1'"):
            recover(api.name, token=TOKEN, shard="dp2")
        assert recover(api.name, token=TOKEN, shard="dp2", fresh=True).step == 0


@pytest.mark.parametrize("groups", [
    [{"params": [torch.tensor([1, 2])]}], [{"params": [torch.zeros(0), True]}], [{"params": [True, []]}],
])
def test_a_rank_that_says_what_no_parameter_is_has_no_state(api: HandApi, groups: list[Any]) -> None:
    api.versions[0].give(0, own(7, rank=0, ranks=1, groups=groups))
    recovered = recover(api.name, token=TOKEN, rank=0)
    assert recovered.step == 7
    lacks(recovered, *PARTS)
    assert "the state of rank 0 is not one of this version of flowcheck" in recovered.passed


def test_one_version_that_is_listed_many_times_is_tried_a_few(api: HandApi) -> None:
    many = [HandVersion(9) for _ in range(50)]
    for number, one in enumerate(many):
        one.id = one.offer["id"] = f"m{number}"
        spoil(one)
    api.versions = [*many, *api.versions]
    recovered = recover(api.name, token=TOKEN)
    assert recovered.step == 6 and recovered.source.endswith("disk")  # memory: asked for no more
    assert api.asked_for("model.safetensors") == sources.MOST_SAME + 1
    assert any(f"{api.name}, memory: lists it more than 4 times" in why for why in recovered.passed)


def test_a_node_that_stays_without_a_slot_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(sources, "BUSY_SECONDS", 0.3)
    many = [HandVersion(step) for step in range(10, 15)]
    with HandApi(*many, HandVersion(5)) as api:
        for one in many:
            api.answers[f"/v1/versions/{one.id}/manifest.json"] = 503, b'{"why": "no slot is left"}'
        assert recover(api.name, token=TOKEN).step == 5
        asked = [sum(one.id in path for path, _ in api.asked) for one in many]
    assert asked[-1] > 1 and asked[:-1] == [1, 1, 1, 1]


def test_what_a_node_says_is_one_line(api: HandApi) -> None:
    api.answers[f"/v1/versions/{api.versions[0].id}/manifest.json"] = 500, b'{"why": "it is bad\\nand all is good"}'
    api.withheld = [{**HandVersion(70).offer, "why": "first\nsecond"}]
    recovered = recover(api.name, token=TOKEN)
    assert f"{api.name}: refused: it is bad and all is good" in recovered.passed[0]
    with HandApi() as empty:
        empty.withheld = api.withheld
        assert recover(empty.name, token=TOKEN).passed == (f"{empty.name}: first second",)
