"""What an attachment is given, and who it says it is."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.control.protocol import Bye
from flowcheck.errors import UserError
from flowcheck.trainer import nodes as module
from flowcheck.trainer.nccl.sources import sources_of

from ..hand_node import TOKEN
from .training import Training

# -- arguments -----------------------------------------------------------------------------------------------


def attach(**options: Any) -> flowcheck.Attachment:
    """Nothing is wrong with the arguments if the model is what is refused."""
    return flowcheck.attach(
        torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]),
        **{"node": "host:1", "token": TOKEN.decode()} | options,
    )


@pytest.mark.parametrize(("node", "token", "what"), [
    ("nowhere", TOKEN.decode(), "node: 'nowhere' is not an address"), ("host:0", TOKEN.decode(), "has port 0"),
    ("host:65536", TOKEN.decode(), "has port 65536"), ("host:-1", TOKEN.decode(), "not an address"),
    (":7070", TOKEN.decode(), "not an address"), ("host:", TOKEN.decode(), "not an address"),
    ("host:http", TOKEN.decode(), "not an address"), ("host:1", "short", "token of 5 characters"),
    (["host:1", "host"], TOKEN.decode(), "node: 'host' is not an address"),
    ([7070], TOKEN.decode(), "node: 7070 is not an address"),
    ([], TOKEN.decode(), r"node: \[\] is empty, or names a node twice"),
    (["::1:7", "host:1", "[::1]:7"], TOKEN.decode(), "is empty, or names a node twice"),
])
def test_arguments_that_cannot_be_are_refused_at_once(node: Any, token: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        attach(node=node, token=token)


@pytest.mark.parametrize("odd", [
    {"checksum_every": -1}, {"checksum_every": "100"}, {"epoch": 1.5}, {"epoch": -1}, {"iteration": -3},
    {"max_stall_s": -1.0}, {"max_stall_s": float("inf")}, {"max_stall_s": float("nan")},
    {"max_stall_s": 2 * threading.TIMEOUT_MAX},
], ids=str)
def test_numbers_that_cannot_be_are_refused_at_once(odd: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(odd))}: .* is not a "):
        attach(**odd)


@pytest.mark.parametrize("good", [
    {"checksum_every": 0, "epoch": 0, "iteration": 0, "max_stall_s": 0},
    {"checksum_every": 1, "epoch": 1, "iteration": 1, "max_stall_s": 1},
    {"max_stall_s": threading.TIMEOUT_MAX}, {"node": "host:65535"}, {"node": "[::1]:7070"},
    {"node": ["host:1"]}, {"node": ("host:1", "host:2")},
], ids=str)
def test_numbers_at_their_bounds_are_taken(good: dict[str, Any]) -> None:
    assert "model: is a Linear" in attach(**good).why


def test_an_argument_that_goes_is_obeyed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    attach()
    assert "max_stall_s" not in caplog.text
    attach(max_stall_s=3.0)
    assert "does not read max_stall_s" in caplog.text


def test_the_defaults() -> None:
    attachment = attach()
    assert (attachment.number, attachment.checksum_every, attachment._max_stall) == (0, 100, 10.0)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The address of a connection that is never begun, its last words, and the seconds for them, whole ones."""
    made: list[Any] = []

    class Kept(module.Sender):
        def start(self) -> None:
            made.append(self.address)

        def part(self, last: Any) -> None:
            made.append(last)

        def finish(self, seconds: float) -> None:
            made.append(round(seconds))

    monkeypatch.setattr(module, "Sender", Kept)
    return made


@pytest.mark.parametrize(("node", "address"), [
    ("10.0.0.2:7070", ("10.0.0.2", 7070)), ("[::1]:1", ("::1", 1)), ("XBOX:2", ("XBOX", 2)),
])
def test_the_address_of_the_node(wrapped, kept, node: str, address: tuple[str, int]) -> None:
    Training(wrapped, (node.rpartition(":")[0], address[1])).attachment.close()
    assert kept == [address, Bye(), 5], "goodbye has five seconds"


def test_a_refusal_does_not_wait_for_the_node(wrapped, kept) -> None:
    one = Training(wrapped, ("host", 1))
    one.iterate()
    one.optimizer.param_groups[0]["lr"] = float("nan")
    one.iterate()
    assert one.attachment.state == "refused" and kept == [("host", 1), Bye(), 0]
    one.attachment.close(0.0)


# -- who it is -----------------------------------------------------------------------------------------------


def test_the_hello_says_run_epoch_rank_and_group(training, hand_node) -> None:
    training(rank=1, run_id="a run", epoch=4, group="a group")
    hello = hand_node.accept().welcome()
    assert [hello[key] for key in ("run_id", "epoch", "rank", "ranks", "group")] == ["a run", 4, 1, 2, "a group"]


def test_a_run_without_a_name(training, hand_node) -> None:
    """The node makes one up."""
    training()
    hello = hand_node.accept().welcome()
    assert [hello[key] for key in ("run_id", "epoch", "rank", "ranks", "group")] == ["", 0, 0, 2, ""]


@pytest.mark.parametrize(("group", "named"), [("a group", ["a group"]), ("", ["dp1"])])
def test_one_part_has_the_name_of_the_group_or_its_own(wrapped, kept, group: str, named: list[str]) -> None:
    """Only of several parts each has both."""
    model = wrapped(torch.nn.Linear(1, 1))
    attachment = flowcheck.attach({"dp1": model}, torch.optim.SGD(model.parameters()), node="host:1", group=group,
                                  token=TOKEN.decode(), topology=dict, collectives=lambda since: [])
    assert attachment.parts == named
    attachment.close()


def test_a_job_of_one_rank_is_refused(wrapped) -> None:
    model = wrapped(torch.nn.Linear(1, 1), ranks=1)
    attachment = flowcheck.attach(model, torch.optim.SGD(model.parameters()), node="127.0.0.1:9",
                                  token=TOKEN.decode(), topology=dict, collectives=lambda since: [])
    assert attachment.state == "refused" and "a job of one rank sends no gradients" in attachment.why


def test_rank_and_ranks_are_those_of_the_models_group(wrapped) -> None:
    """The process is rank 1 of 2, and the model's group is this process alone."""
    wrapped(torch.nn.Linear(1, 1), rank=1)
    group = torch.distributed.new_group([1], use_local_synchronization=True)
    model = wrapped(torch.nn.Linear(1, 1), rank=1, process_group=group)
    attachment = flowcheck.attach(model, torch.optim.SGD(model.parameters()), node="127.0.0.1:9",
                                  token=TOKEN.decode(), topology=dict, collectives=lambda since: [])
    assert attachment.rank == 0 and "a job of one rank sends no gradients" in attachment.why


def test_what_is_no_ddp_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and nothing more is tried."""
    attachment = attach(iteration=5)
    assert attachment.state == "refused" and "model: is a Linear" in attachment.why
    assert attachment.published == (-1, "")
    attachment.step()
    attachment.close()
    assert (attachment.state, attachment.number) == ("closed", 5)
    (line,) = caplog.records
    assert line.name == "flowcheck" and line.levelno == logging.WARNING and line.exc_info is None
    assert "not attached: model: is a Linear" in line.getMessage()


@pytest.mark.parametrize("given", [{}, {"topology": dict}, {"collectives": list}], ids=lambda given: [*given, ""][0])
def test_a_backend_that_does_not_tell_its_calls_is_refused(wrapped, given: dict[str, Any]) -> None:
    model = wrapped(torch.nn.Linear(1, 1))
    attachment = flowcheck.attach(
        model, torch.optim.SGD(model.parameters()), node="127.0.0.1:9", token=TOKEN.decode(), **given
    )
    assert attachment.state == "refused"
    assert "attach: the pair backend does not tell torch its connections" in attachment.why


def test_a_process_group_may_tell_them_itself(wrapped) -> None:
    """By two documented attributes; what the caller gives goes before them."""
    group = wrapped(torch.nn.Linear(1, 1)).process_group
    group.flowcheck_topology, group.flowcheck_collectives = lambda: "topology", lambda since: ("since", since)
    topology, collectives = sources_of(group, None, None)
    assert topology() == "topology" and collectives(7) == ("since", 7)
    assert sources_of(group, dict, None) == (dict, group.flowcheck_collectives)
