"""Who says what a communicator is: the caller, the group, or what prepare() has set up; node and token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowcheck
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer import sources as module
from flowcheck.trainer.flight_recorder import Flights, parse_flights
from flowcheck.trainer.prepare import Prepared
from flowcheck.trainer.profiler import Call, Communicator
from flowcheck.trainer.settings import nodes_of, token_of
from flowcheck.trainer.sources import HELD, Sources, sources_of

from ..hand_node import TOKEN, HandNode, until
from .nccl_text import Shape, text
from .test_flight_recorder import entry, of
from .test_profiler_calls import FakePlugin, history

MADE = Communicator(1, 1, 6, 0xA, 0, 4, 4, "")
CALL = Call(2, 1, 6, 0xA, 0, "AllReduce", 5, "ncclFloat32", 0, "RING", "LL128", 2, 16, 0, None, True)
FOUND = {"op": "AllReduce", "count": 5, "dtype": "float32", "root": 0, "algorithm": "ring", "protocol": "ll128",
         "channels": 2}


class Recording:
    """Torch's flight recorder, which needs a torch with NCCL: `flights` as a dump of it has them."""

    dump = of()
    reads = 0

    def read(self) -> Flights:
        Recording.reads += 1
        return parse_flights(self.dump)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    monkeypatch.setattr(module, "Recorder", Recording)
    monkeypatch.setattr(Recording, "reads", 0)
    monkeypatch.setattr(Recording, "dump", of())
    return Recording


def made(log: str = "", *records: Any) -> tuple[Sources, FakePlugin]:
    known, plugin = history(MADE, *(records or (CALL,)))
    return Sources(Prepared(history=known, log=log), ranks=4, rank=0, group="0"), plugin


def test_calls_of_the_plugin(recording: type[Recording]) -> None:
    sources, plugin = made()
    assert sources.collectives(0) == [FOUND] and sources.collectives(1) == []
    plugin.next = [replace(CALL, serial=3, count=7)]
    assert sources.collectives(1) == [{**FOUND, "count": 7}]


def test_a_torch_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise EnvironmentProblem("none")

    monkeypatch.setattr(module, "Recorder", absent)
    sources, _ = made()
    assert sources.collectives(0) == [FOUND] and sources.collectives(1) == []


def test_torch_agrees_or_is_refused(recording: type[Recording]) -> None:
    recording.dump = of(entry(0), entry(1, process_group=["7", "other"], collective_seq_id=1))
    assert made()[0].collectives(0) == [FOUND]
    recording.dump = of(entry(0, input_sizes=[[6]]))
    with pytest.raises(UserError, match="torch's flight recorder and NCCL's profiler events: NCCL's call 0"):
        made()[0].collectives(0)


def test_a_recorder_that_has_let_calls_go_is_not_asked(recording: type[Recording]) -> None:
    recording.dump = of(entry(9, collective_seq_id=10))
    assert made()[0].collectives(0) == [FOUND]


def test_torch_is_asked_in_the_first_iterations_alone(recording: type[Recording]) -> None:
    sources, plugin = made()
    for number in range(HELD + 5):
        assert sources.collectives(number) == [FOUND]
        plugin.next = [replace(CALL, serial=3 + number)]
    assert recording.reads == HELD


def test_the_log_is_held_against_the_plugin(recording: type[Recording], tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_bytes(text(Shape(hash=0xA), "2.29.7"))
    with pytest.raises(UserError, match="the calls are known, and the connections are not"):
        made(str(log))[0].topology()
    log.write_bytes(text(Shape(hash=0xA, nodes=2), "2.29.7"))
    with pytest.raises(UserError, match="the log says nodes 2, and the plugin 4"):
        made(str(log))[0].topology()
    log.write_bytes(text(Shape(hash=0xB), "2.29.7"))
    with pytest.raises(UserError, match="no communicator could be rank 0 of 4, hash 0xa"):
        made(str(log))[0].topology()
    with pytest.raises(UserError, match="the calls are known, and the connections are not"):
        made()[0].topology()


def test_without_the_plugin() -> None:
    with pytest.raises(UserError, match="NCCL's calls are not seen: another plugin is in use"):
        Sources(Prepared(problems=("another plugin is in use",)), ranks=4, rank=0, group="0")


# -- which of them --


class Group:
    group_name = "0"


@pytest.fixture
def on_nccl(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group of NCCL's, as far as it is asked: this torch may have no NCCL."""
    monkeypatch.setattr(module.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(module.dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(module.dist, "get_rank", lambda _: 0)
    return Group()


def test_what_is_given_comes_first(on_nccl: Any, recording: type[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = history(MADE, CALL)
    monkeypatch.setattr(module, "prepared", lambda: Prepared(history=known))
    topology, collectives = dict, list
    assert sources_of(on_nccl, topology, collectives) == (topology, collectives)  # type: ignore[arg-type]
    mine, calls = sources_of(on_nccl, topology, None)
    assert mine is topology and calls(0) == [FOUND]
    on_nccl.flowcheck_collectives = collectives
    _, calls = sources_of(on_nccl, topology, None)
    assert calls is collectives


def test_nobody_says_it(on_nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepared", lambda: None)
    with pytest.raises(UserError, match=r"the nccl backend does not tell torch[\s\S]*flowcheck\.prepare\(\)"):
        sources_of(on_nccl, None, None)
    monkeypatch.setattr(module, "prepared", Prepared)
    with pytest.raises(UserError, match="NCCL's calls are not seen: without a plugin"):
        sources_of(on_nccl, None, None)
    monkeypatch.setattr(module.dist, "get_backend", lambda _: "gloo")
    with pytest.raises(UserError, match="the gloo backend"):
        sources_of(on_nccl, None, None)


# -- node and token --


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWCHECK_NODE", " 10.0.0.1:7070 ,10.0.0.2:7070,")
    assert nodes_of(None) == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert nodes_of("here:1") == ["here:1"] and nodes_of(("a:1", "b:1")) == ["a:1", "b:1"] and nodes_of([]) == []
    for nothing in ("", " , "):
        monkeypatch.setenv("FLOWCHECK_NODE", nothing)
        with pytest.raises(UserError, match="no node is named"):
            nodes_of(None)


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token of the environment\nnot this\n")
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "token"))
    assert token_of(None) == b"a token of the environment"
    assert token_of("the given one, no other") == b"the given one, no other"
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"FLOWCHECK_TOKEN_FILE: .*none: cannot be read"):
        token_of(None)
    monkeypatch.delenv("FLOWCHECK_TOKEN_FILE")
    with pytest.raises(UserError, match="token of 0 characters"):
        token_of(None)


def test_attach_takes_both_from_the_environment(
    wrapped: Any, hand_node: HandNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    (tmp_path / "token").write_bytes(TOKEN)
    model = wrapped(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: dict[str, Any] = {"topology": dict, "collectives": lambda since: []}
    with pytest.raises(UserError, match="no node is named"):
        flowcheck.attach(model, optimizer, **said)
    monkeypatch.setenv("FLOWCHECK_NODE", "{}:{}".format(*hand_node.address))
    with pytest.raises(UserError, match="token of 0 characters"):
        flowcheck.attach(model, optimizer, **said)
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "token"))
    attachment = flowcheck.attach(model, optimizer, **said)
    hand_node.welcome()  # the token's proof is checked in there
    until(lambda: attachment._senders[0].connected)
    attachment.close(0.0)
