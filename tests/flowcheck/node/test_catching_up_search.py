"""What the thread does that looks for a peer's version: whom it asks, which version it takes, and what it holds that
against. APIs are made by hand; the test is the thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.ask.receiving import AskError
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.node.peers import catch_up as catching_up
from flowcheck.node.peers.catch_up import AGAIN_SECONDS, ASK_SECONDS, QUIET_SECONDS, RATE

from ..hand_api import KEY, HandApi, HandVersion
from .test_catching_up_turns import Quiet, offer

START = "5" * 64


def of(step: int, **given: Any) -> HandVersion:
    return HandVersion(step, **{"start": START, "shard": "dp0", **given})


@pytest.fixture
def api() -> Iterator[Callable[..., HandApi]]:
    with ExitStack() as stack:
        yield lambda *versions: stack.enter_context(HandApi(*versions))


def search(*apis: HandApi, wait: Callable[[float], None] | None = None) -> Quiet:
    """wait: what happens while it waits until it asks again; None: nobody is asked again."""
    asked = {one.name: one.asked_for("/v1/versions") for one in apis}

    def nothing(seconds: float) -> None:
        assert all(one.asked_for("/v1/versions") <= asked[one.name] + 2 for one in apis)

    at = Quiet([NodeClient(one.address, KEY, 60.0) for one in apis], "dp0", START, (5, 7), {})
    at._ending = SimpleNamespace(wait=wait or nothing, set=lambda: None)  # type: ignore[assignment]
    return at


def later() -> float:
    return time.monotonic() + 1000.0


def test_the_newest_of_use_is_taken_whoever_has_it(api: Callable[..., HandApi]) -> None:
    old = api(of(5), of(4))
    new = api(of(8), of(7), of(6))
    for apis in ((old, new), (new, old)):
        at = search(*apis)
        found = at._newest(later())
        assert found is not None and (found[0].name, found[1].step) == (new.name, 7) and at.failed == {}


@pytest.mark.parametrize("given", [
    {"start": "6" * 64}, {"start": ""}, {"tier": "disk"}, {"shard": "dp1"},
])
def test_a_version_of_something_else_is_none(api: Callable[..., HandApi], given: dict[str, Any]) -> None:
    one = api(of(6, **given))
    at = search(one)
    assert at._newest(later()) is None and at.failed == {one.name: "has no version of this start of the job"}
    assert one.asked_for("/v1/versions") == 1, "it is not asked again"


def test_why_it_has_none_is_said_as_it_says_it(api: Callable[..., HandApi]) -> None:
    one = api()
    at = search(one)
    assert at._newest(later()) is None and at.failed == {one.name: "has no version of this start of the job"}
    at = search(one)
    one.withheld = [{"why": "step 9 is withheld"}, {"why": "so is step 8"}]
    assert at._newest(later()) is None
    assert at.failed == {one.name: "has no version of this start of the job: step 9 is withheld"}
    at = search(one)
    one.answers["/v1/versions"] = 200, b"{}"
    assert at._newest(later()) is None and at.failed == {one.name: "does not list versions"}


def test_who_is_behind_is_asked_again_until_it_is_not(api: Callable[..., HandApi]) -> None:
    """Who has nothing is not."""
    behind, nothing = api(of(3), of(4)), api()
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert len(waited) == 1, "it is of use by now"
        assert at.failed[behind.name] == f"has step {3 + len(waited)}, and steps 5 to 7 are of use"
        behind.versions[:] = [of(3), of(4 + len(waited))]

    at = search(behind, nothing, wait=wait)
    found = at._newest(later())
    assert found is not None and (found[0].name, found[1].step) == (behind.name, 5) and waited == [AGAIN_SECONDS]
    assert (behind.asked_for("/v1/versions"), nothing.asked_for("/v1/versions")) == (2, 1)


def test_but_not_for_ever(api: Callable[..., HandApi]) -> None:
    behind = api(of(3))
    at = search(behind, wait=lambda _: at.end())
    assert at._newest(time.monotonic() - 0.001) is None and not at._ended
    assert behind.asked_for("/v1/versions") == 1
    assert at._newest(later()) is None and at._ended
    assert behind.asked_for("/v1/versions") == 2
    assert at._newest(later()) is None
    assert behind.asked_for("/v1/versions") == 2, "nobody waits for an answer any more"


class Told(Quiet):
    """found: what it finds, one after the other. Who waits for the group's thread goes on at once; at: what that does,
    for each wish."""

    def __init__(self, found: list[tuple[NodeClient, Offer] | None], at: Callable[[Told], None]) -> None:
        super().__init__([], "dp0", START, (5, 7), {"gone": "for a time"})
        self.found, self.deadlines, self.took = found, list[float](), list[Any]()
        answered, self._answered = self._answered, SimpleNamespace(  # type: ignore[assignment]
            clear=lambda: answered.clear(), set=lambda: answered.set(), wait=lambda: at(self))

    def _newest(self, deadline: float) -> tuple[NodeClient, Offer] | None:
        self.deadlines.append(deadline)
        return self.found.pop(0)

    def _take(self, node: NodeClient, wanted: Offer) -> None:
        self.took.append((node.name, wanted.step))


def run(at: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "time", SimpleNamespace(monotonic=lambda: 50.0))
    catching_up._Search._main(at)
    assert at.over


def test_what_is_refused_is_looked_for_again_and_what_is_told_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def group(at: Told) -> None:
        shown.append((at.source, at.wishes and at.wishes.step, at.over))
        at.refuse() if len(shown) == 1 else at.tell({MODEL: {}}, "torch-cpu")

    one, other = (NodeClient(("127.0.0.1", port), KEY) for port in (1, 2))
    at = Told([(one, offer(5)), (other, offer(6)), (one, offer(7))], group)
    at.failed[other.name] = "was behind"
    run(at, monkeypatch)
    assert shown == [(one.name, 5, False), (other.name, 6, False)] and at.took == [(other.name, 6)]
    assert at.deadlines == [50.0 + ASK_SECONDS] * 2 and at.failed == {"gone": "not asked: for a time"}


def test_where_there_is_nothing_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Told([None], lambda _: None)
    run(at, monkeypatch)
    assert at.took == [] and at.wishes is None and at.version is None and at.source == ""


def test_an_end_while_it_looks_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(_: Told) -> None:
        raise AssertionError("nobody answers any more")

    at = Told([(NodeClient(("127.0.0.1", 1), KEY), offer(5))], waits)
    at.end()
    run(at, monkeypatch)
    assert at.took == []


# -- what is taken -------------------------------------------------------------------------------------------------


class Taking:
    """A version of three tensors, one of them empty, and of state; where it goes; pieces of 12 bytes."""

    def __init__(self, one: HandApi, **given: Any) -> None:
        self.api = one
        model = {"a": [1.0, 2.0, 3.0, 4.0], "b": [], "c": [5.0]}
        one.versions[:] = [of(6, model=model, state={"state.a.momentum_buffer": [6.0, 7.0, 8.0, 9.0]}, **given)]
        self.made = one.versions[0]
        self.node = NodeClient(one.address, KEY, 60.0)
        (self.offer,) = self.node.offers()
        self.targets = {
            MODEL: {"c": torch.zeros(1), "a": torch.zeros(4), "b": torch.zeros(0)},
            OPTIMIZER: {"state.a.momentum_buffer": torch.zeros(4)},
        }
        self.search = search(one)
        self.search.tell(self.targets, "torch-cpu")

    def values(self) -> dict[str, list[float]]:
        return {name: tensor.tolist() for tensors in self.targets.values() for name, tensor in tensors.items()}

    def take(self) -> str:
        """Why not."""
        self.search._take(self.node, self.offer)
        assert not self.node.connection.is_open, "it is let go"
        assert (self.search.version is None) == bool(self.search.failed)
        return self.search.failed.get(self.api.name, "")


@pytest.fixture
def taking(api: Callable[..., HandApi], monkeypatch: pytest.MonkeyPatch) -> Taking:
    monkeypatch.setattr("flowcheck.ask.client.CHUNK", 12)
    return Taking(api())


NOTHING = {"a": [0.0] * 4, "b": [], "c": [0.0], "state.a.momentum_buffer": [0.0] * 4}


def test_every_byte_goes_where_it_belongs(taking: Taking) -> None:
    assert taking.take() == "" and taking.search.version == Version.of(taking.made.document, "x")
    assert taking.values() == {"a": [1.0, 2.0, 3.0, 4.0], "b": [], "c": [5.0],
                               "state.a.momentum_buffer": [6.0, 7.0, 8.0, 9.0]}


def test_another_rounding_is_refused_before_a_byte_is_taken(taking: Taking) -> None:
    taking.search.tell(taking.targets, "torch-cuda-foreach")
    assert taking.take() == "is computed as 'torch-cpu', and here it is 'torch-cuda-foreach'"
    assert taking.values() == NOTHING and taking.api.asked_for(".safetensors") == 0


@pytest.mark.parametrize(("file", "name", "tensor"), [
    (MODEL, "a", torch.zeros(5)), (MODEL, "a", torch.zeros(4, dtype=torch.int32)), (MODEL, "a", None),
    (MODEL, "z", torch.zeros(1)), (OPTIMIZER, "state.a.momentum_buffer", torch.zeros(2, 2)),
    (OPTIMIZER, "state.c.step", torch.zeros(())),
])
def test_another_form_is_refused_before_a_byte_is_taken(
    taking: Taking, file: str, name: str, tensor: torch.Tensor | None
) -> None:
    if tensor is None:
        del taking.targets[file][name]
    else:
        taking.targets[file][name] = tensor
    before = taking.values()
    assert taking.take() == f"its {name!r} is not what it is here, or is in one of the two alone"
    assert taking.values() == before and taking.api.asked_for(".safetensors") == 0


def test_of_many_the_first_is_named(taking: Taking) -> None:
    taking.targets[MODEL] |= {"y": torch.zeros(1), "x": torch.zeros(1), "z": torch.zeros(1)}
    assert taking.take().startswith("its 'x' is not")


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_a_file_that_is_not_as_its_hashes_say_is_no_version(taking: Taking, file: str) -> None:
    data = taking.made.files[file]
    taking.made.files[file] = data[:-1] + bytes([data[-1] ^ 1])
    assert "SHA-256 differs" in taking.take()


def test_nothing_is_written_after_the_end(taking: Taking) -> None:
    taking.search.end()
    assert taking.take() == "too slow" and taking.values() == NOTHING


def test_a_version_has_as_long_as_its_size_takes(taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(catching_up, "time", SimpleNamespace(monotonic=lambda: 50.0))
    monkeypatch.setattr(taking.search, "_receive", lambda *given: found.append(given[3:]))
    taking.offer.__dict__["nbytes"] = int(3 * RATE)
    assert taking.take() == ""
    assert found == [(file, 50.0 + 2 * QUIET_SECONDS + 3.0) for file in (MODEL, OPTIMIZER)]


def test_nothing_is_written_after_that(taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    version = taking.node.version(taking.offer)
    monkeypatch.setattr(catching_up, "time", SimpleNamespace(monotonic=lambda: 50.0))
    with closing(taking.node):
        with pytest.raises(AskError, match=r"^too slow$"):
            taking.search._receive(taking.node, taking.offer, version, MODEL, 49.999)
        assert taking.values() == NOTHING
        taking.search._receive(taking.node, taking.offer, version, MODEL, 50.0)
    assert taking.values() == NOTHING | {"a": [1.0, 2.0, 3.0, 4.0], "c": [5.0]}, "until then, it is"
