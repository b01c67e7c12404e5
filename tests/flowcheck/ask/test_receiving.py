"""Receiving many tensors in one go: each has its own bytes, wherever a connection breaks, and a bad one is named."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from flowcheck.ask import receiving
from flowcheck.ask.client import NodeClient
from flowcheck.ask.receiving import AskError
from flowcheck.control.tensors import CHUNK
from flowcheck.control.version import MODEL

from ..hand_api import KEY, HandApi, HandVersion

LARGE = CHUNK // 4 + 7  # floats: more than is asked for in one call


def version(seed: int, sizes: list[int]) -> HandVersion:
    draw = random.Random(seed)
    return HandVersion(7, {f"t{i}": [draw.uniform(-1, 1)] * size for i, size in enumerate(sizes)}, {})


@pytest.fixture
def api() -> Iterator[HandApi]:
    with HandApi() as made:
        yield made


def received(api: HandApi, into: bool = False, seconds: float = 30.0) -> dict[str, torch.Tensor]:
    node = NodeClient(api.address, KEY, seconds)
    (offer,) = node.offers()
    made = node.version(offer)
    given = {name: torch.zeros(one.spec.shape) for name, one in made.files[MODEL].items()} if into else {}
    found = node.tensors(offer, made, MODEL, given)
    assert not into or all(found[name] is given[name] for name in given)
    return found


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("sizes", [
    [1] * (2 * receiving.VIEWS + 1), [3, 0, 5, 0, 0], [LARGE], [2, LARGE, 3, LARGE, 0, 1], [CHUNK // 12] * 7,
], ids=["more than a call takes", "empty ones", "one", "large and small", "parts of a call"])
def test_each_has_its_own_bytes(api: HandApi, sizes: list[int], into: bool) -> None:
    made = version(1, sizes)
    api.versions = [made]
    found = received(api, into)
    data = torch.frombuffer(bytearray(made.files[MODEL]), dtype=torch.uint8)
    flat = torch.cat([found[f"t{i}"].flatten() for i in range(len(sizes))]).view(torch.uint8)
    assert torch.equal(data[-len(flat):], flat) and [len(found[f"t{i}"]) for i in range(len(sizes))] == sizes


@pytest.mark.parametrize("seed", range(4))
def test_wherever_it_is_cut_it_goes_on(api: HandApi, seed: int) -> None:
    draw = random.Random(seed)
    made = version(seed, [draw.randrange(0, 40) for _ in range(300)])
    api.versions = [made]
    size = len(made.files[MODEL])
    first = draw.randrange(1, size - 1)
    api.cut[f"/v1/versions/{made.id}/{MODEL}"] = [first, draw.randrange(1, size - first)]
    found = received(api)
    flat = torch.cat([found[f"t{i}"] for i in range(300)])
    assert torch.equal(flat.view(torch.uint8), torch.frombuffer(bytearray(made.files[MODEL]), dtype=torch.uint8)[
        -4 * len(flat):])


def test_the_bad_one_of_many_is_named(api: HandApi) -> None:
    api.versions = [made := version(3, [16] * 600)]
    data = bytearray(made.files[MODEL])
    data[-4 * 16 * 200 - 1] ^= 0x20
    made.files[MODEL] = bytes(data)
    with pytest.raises(AskError, match="tensor 't399' has other bytes"):
        received(api)


def test_a_node_that_stops_in_the_middle_of_a_tensor(api: HandApi) -> None:
    api.versions = [made := version(3, [LARGE])]
    api.stalls[f"/v1/versions/{made.id}/{MODEL}"] = LARGE  # bytes of each of three answers
    with pytest.raises(AskError, match=r"no answer within 0\.2 s"):
        received(api, seconds=0.2)

