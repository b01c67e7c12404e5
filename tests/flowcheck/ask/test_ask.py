"""Asking a node for versions: what it may say, what is refused of it, and connections that break."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch

from flowcheck.ask import client, connection
from flowcheck.ask.client import NodeClient, reader_key, split
from flowcheck.ask.offer import Offer, spans
from flowcheck.ask.receiving import AskError
from flowcheck.control.version import MODEL, OPTIMIZER

from ..hand_api import KEY, TOKEN, HandApi, HandVersion, safetensors, seal


def refused(call: Any, *given: Any) -> str:
    with pytest.raises(AskError) as caught:
        call(*given)
    assert caught.value.exit_code == 3 and "127.0.0.1" in caught.value.where
    return caught.value.what


def model_of(node: NodeClient, **into: torch.Tensor) -> dict[str, torch.Tensor]:
    (offer,) = node.offers()
    return node.tensors(offer, node.version(offer), MODEL, into)


# -- what is there -----------------------------------------------------------------------------------------


def test_the_key_is_not_the_token() -> None:
    assert reader_key(TOKEN.encode()) == KEY and TOKEN not in KEY
    assert reader_key(b"another token, as long") != KEY


def test_who_has_another_key_is_refused(api: HandApi) -> None:
    assert refused(NodeClient(api.address, KEY[::-1]).offers) == "the token is wrong"


def test_what_a_node_offers(api: HandApi, node: NodeClient) -> None:
    api.versions.append(HandVersion(5, tier="disk", epoch=2, shard="dp0", run_id="x", status="unverified"))
    first, second = node.offers()
    assert first == Offer("m0070", "memory", "run", 0, 7, "", "verified", 20, attached=True)
    assert second == Offer(api.versions[1].id, "disk", "x", 2, 5, "dp0", "unverified", 20, attached=True)
    assert node.name == api.name and NodeClient(("::1", 7), KEY).name == "[::1]:7"


@pytest.mark.parametrize(("said", "whys"), [
    ([], []), (None, []), ({"why": "x"}, []), ([3], []), ([{"why": 3}], []), ([{"why": "a"}, {"why": "b"}], ["a"]),
    ([{"why": "x" * 5000}], ["x" * 400]),
])
def test_what_a_node_withholds(api: HandApi, node: NodeClient, said: Any, whys: list[str]) -> None:
    """The reason of the newest, and nothing that is none."""
    api.withheld = said
    assert len(node.offers()) == 1 and node.withheld == whys


@pytest.mark.parametrize(("field", "said", "read"), [
    *[("matches", said, read) for said, read in ((4, 4), (0, 0), (-1, 0), ("4", 0), (True, 0), (None, 0), (1e300, 0))],
    *[(age, said, read) for age in ("age_steps", "age_seconds") for said, read in (
        (3, 3), (0, 0), (2.5, 2.5), (-1, None), ("3", None), (True, None), (float("inf"), None), (None, None))],
    *[("start", said, read) for said, read in (("abc", "abc"), (5, ""), (None, ""))],
    ("step", 0, 0), ("nbytes", 0, 0),
])
def test_what_an_offer_says_besides(api: HandApi, node: NodeClient, field: str, said: Any, read: Any) -> None:
    """Nothing is refused for it: what it cannot be is as if it were not said."""
    api.versions[0].offer[field] = said
    assert getattr(node.offers()[0], field) == read


@pytest.mark.parametrize(("said", "why"), [
    *[(one, "does not list versions") for one in (b"[]", b"{}", b'{"versions": 3}', b'{"versions": {}}')],
    *[(one, "an answer that is not JSON") for one in (b"", b"{", b"\xff", b"[" * 100_000)],
    (b'{"versions": [3]}', "lists a version that is not described"),
])
def test_a_list_that_is_none(api: HandApi, node: NodeClient, said: bytes, why: str) -> None:
    api.answers["/v1/versions"] = 200, said
    assert refused(node.offers) == why


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", 3), ("id", "../x"), ("id", ""), ("id", "m\u0663"), ("tier", "tape"), ("tier", None),
     ("run_id", None), ("epoch", "1"), ("epoch", -1), ("step", True), ("step", -1), ("shard", 0),
     ("status", 1), ("nbytes", -1), ("nbytes", 1.5)],
)
def test_an_offer_that_is_none(api: HandApi, node: NodeClient, field: str, value: Any) -> None:
    api.versions[0].offer[field] = value
    assert refused(node.offers).startswith("lists a version")
    del api.versions[0].offer[field]
    assert refused(node.offers) == "lists a version that is not described"


def test_whose_own_states_there_are(api: HandApi, node: NodeClient) -> None:
    api.versions[0].offer["user"] = [[0, 3], [7, 7]]
    offer = node.offers()[0]
    assert offer.with_user == [0, 1, 2, 3, 7] and offer.has_user(7) and not offer.has_user(4)
    for said in (7, [3], [[1]], [["0", 1]], [[0, -1]], [[0, 65536]], [[False, 1]],
                 [[2, 1]], [[0, 3], [3, 4]], [[0, 1], [2, 3], [3, 4]], [[5, 6], [0, 1]], [[0, 65535]] * 100):
        api.versions[0].offer["user"] = said
        assert refused(node.offers) == "lists a version with states of ranks that are none"


@pytest.mark.parametrize("ranks", [[], [0], [0, 1, 2], [1, 3, 4, 9]])
def test_ranks_in_rows(ranks: list[int]) -> None:
    rows = spans(ranks)
    assert [rank for first, last in rows for rank in range(first, last + 1)] == ranks
    assert len(rows) == sum(rank - 1 not in ranks for rank in ranks)


def test_an_answer_without_an_end(api: HandApi, node: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_TEXT", 100)
    api.answers["/v1/versions"] = 200, b" " * 101
    assert refused(node.offers) == "an answer that is too long"
    api.answers["/v1/versions"] = 200, b'{"versions": []}'.ljust(100)
    assert node.offers() == []


def test_nobody_is_there(node: NodeClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert refused(NodeClient(("127.0.0.1", port), KEY).offers) == "connection lost: Connection refused"


def test_a_node_that_is_silent(api: HandApi) -> None:
    api.quiet.add("/v1/versions")
    assert refused(NodeClient(api.address, KEY, 0.2).offers) == "no answer within 0.2 s"


# -- manifests ---------------------------------------------------------------------------------------------


def test_the_manifest_of_an_offer(node: NodeClient) -> None:
    (offer,) = node.offers()
    version = node.version(offer)
    assert (version.run_id, version.epoch, version.step, version.shard) == ("run", 0, 7, "")
    assert list(version.files[MODEL]) == ["w", "b"] and list(version.files[OPTIMIZER]) == ["state.w.momentum_buffer"]


def test_a_manifest_that_was_changed(api: HandApi, node: NodeClient) -> None:
    (offer,) = node.offers()
    api.versions[0].document["step"] = 8
    assert refused(node.version, offer) == (
        "its manifest was changed after it was written (its own hash does not match)"
    )


@pytest.mark.parametrize(("field", "value"), [("run_id", "x"), ("epoch", 3), ("step", 8), ("shard", "dp1")])
def test_a_manifest_of_another_version(api: HandApi, node: NodeClient, field: str, value: Any) -> None:
    (offer,) = node.offers()
    api.versions[0].document = seal({**api.versions[0].document, field: value})
    assert refused(node.version, offer) == f"offered {field} {getattr(offer, field)!r} and sent {value!r}"


# -- tensors -----------------------------------------------------------------------------------------------


def test_tensors_come_in_the_manifests_order(api: HandApi, node: NodeClient) -> None:
    api.versions[0].files[MODEL] = safetensors({"b": [3.0], "w": [7.5, 2.0]})
    found = model_of(node)
    assert list(found) == ["w", "b"] and found["w"].tolist() == [7.5, 2.0] and found["b"].tolist() == [3.0]
    (offer,) = node.offers()
    state = split(node.tensors(offer, node.version(offer), OPTIMIZER, {}))
    assert list(state) == ["w"] and state["w"]["momentum_buffer"].tolist() == [1.0, 7.0]


def test_names_may_have_points() -> None:
    one = torch.zeros(1)
    assert split({"state.layer.0.weight.exp_avg": one, "state.layer.0.weight.step": one, "state.b.step": one}) == {
        "layer.0.weight": {"exp_avg": one, "step": one}, "b": {"step": one},
    }


def test_tensors_go_straight_into_what_is_given(api: HandApi, node: NodeClient) -> None:
    straight, apart = torch.zeros(1, requires_grad=True), torch.zeros(4)
    found = model_of(node, b=straight, w=apart[::2])
    assert found["b"] is straight and straight.tolist() == [3.0]
    assert found["w"].tolist() == [7.5, 2.0] and apart.tolist() == [7.5, 0.0, 2.0, 0.0]


def test_what_is_not_in_row_major_order_is_written_once_its_hash_agreed(api: HandApi, node: NodeClient) -> None:
    files = api.versions[0].files
    files[MODEL] = files[MODEL][:-5] + bytes([files[MODEL][-5] ^ 1]) + files[MODEL][-4:]  # b has the last four
    given = torch.zeros(4)
    assert "tensor 'w' has other bytes" in refused(lambda: model_of(node, w=given[::2]))
    assert given.tolist() == [0.0] * 4


@pytest.mark.parametrize("at", [0, 5, 8, 11])  # of w's eight bytes and b's four
def test_a_flipped_bit_on_the_way(api: HandApi, node: NodeClient, at: int) -> None:
    data = bytearray(api.versions[0].files[MODEL])
    data[len(data) - 12 + at] ^= 0x10
    api.versions[0].files[MODEL] = bytes(data)
    name = "w" if at < 8 else "b"
    assert refused(lambda: model_of(node)) == (
        f"tensor {name!r} has other bytes than its manifest says (SHA-256 differs)"
    )


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (safetensors({"w": [1.0]}), "tensor 'w' is F32 [1], not F32 [2]"),
        (safetensors({"x": [1.0]}), "tensor 'x' is not expected"),
        (safetensors({"w": [7.5, 2.0], "b": [3.0]}) + b"\0", "1 bytes behind the last tensor"),
        (b"\xff" * 8, f"a safetensors header of {(1 << 64) - 1} bytes in 8"),
        ((9).to_bytes(8, "little") + b"{}      ", "a safetensors header of 9 bytes in 16"),
        (((16 << 20) + 1).to_bytes(8, "little") + bytes((16 << 20) + 4),
         f"a safetensors header of {(16 << 20) + 1} bytes"),
        (bytes(8 + (16 << 20) + 13), "is longer than what its manifest lists"),
        (b"\x01\x00", "connection lost: closed before its end"),
        (safetensors({"w": [7.5, 2.0]}), "lacks tensor 'b', which its manifest lists"),
        ((2).to_bytes(8, "little") + b"[]", "the safetensors header is no object"),
        ((2).to_bytes(8, "little") + b"{]", "the safetensors header is not JSON"),
    ],
)
def test_a_file_that_is_none(api: HandApi, node: NodeClient, data: bytes, what: str) -> None:
    api.versions[0].files[MODEL] = data
    assert refused(lambda: model_of(node)).startswith(what)


def test_a_version_that_is_gone_by_now(api: HandApi, node: NodeClient) -> None:
    (offer,) = node.offers()
    version = node.version(offer)
    api.versions.clear()
    why = "refused: there is no such version, or no longer"
    assert refused(node.version, offer) == why and refused(node.tensors, offer, version, MODEL, {}) == why
    assert api.asked_for(MODEL) == 1  # a refusal is an answer


def test_a_node_may_be_closed_at_any_time(node: NodeClient) -> None:
    node.close()
    assert len(node.offers()) == 1
    node.close()
    node.close()
    assert len(node.offers()) == 1


# -- a manifest that is not there yet ----------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_SECONDS", 0.01)


@pytest.mark.parametrize("release", [False, True])
def test_a_version_that_is_being_hashed_is_asked_for_again(
    api: HandApi, node: NodeClient, hurried: None, release: bool
) -> None:
    """Also where its node begins anew, having let go of it meanwhile."""
    api.hashing = [0, 4, 4, 12, 0, 4, 19]
    (offer,) = node.offers()
    assert node.version(offer, release).step == 7 and api.hashing == []
    assert api.asked_for("manifest.json?release" if release else "manifest.json") == 8


def test_a_version_that_is_hashed_no_further_is_given_up(api: HandApi, hurried: None) -> None:
    api.hashing = [0, 4, *[8] * 100_000]
    node = NodeClient(api.address, KEY, 0.5)
    (offer,) = node.offers()
    began = time.monotonic()
    assert refused(node.version, offer) == "has hashed no more of it for 0.5 s: 8 of 20 bytes so far"
    assert 0.5 < time.monotonic() - began < 30


@pytest.mark.parametrize("said", [b'{"why": "w", "hashed": "4"}', b'{"why": "w", "hashed": true}', b'{"why": "w"}'])
def test_another_reason_is_one(api: HandApi, node: NodeClient, said: bytes) -> None:
    (offer,) = node.offers()
    api.answers[f"/v1/versions/{offer.id}/manifest.json"] = 503, said
    assert refused(node.version, offer) == "refused: w" and api.asked_for("manifest.json") == 1
