"""An attachment on a real DDP model, boundary by boundary, with a node made by hand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import flowcheck
from flowcheck.control.checksum import checksum
from flowcheck.control.protocol import Bye, Limits
from flowcheck.errors import UserError
from flowcheck.trainer import attachment as module
from flowcheck.trainer import sender as sending

from ..hand_node import LONGEST, TOKEN, HandNode, Peer, until

COMMUNICATOR = {"ranks": 2, "nccl_version": "2.27.7"}
FLOW = {"src": 0, "dst": 1, "channel": 0, "src_addr": "10.0.0.1", "dst_addr": "10.0.0.2", "qpns": [17]}


class Training:
    """A training loop whose communicator's calls are made up, and its attachment."""

    def __init__(self, wrap: Any, address: tuple[str, int], *, layer: torch.nn.Module | None = None, rank: int = 0,
                 make: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = wrap(layer if layer is not None else torch.nn.Linear(2, 2), rank=rank)
        self.optimizer = (make or (lambda p: torch.optim.SGD(p, lr=1.0)))(self.model.parameters())
        self.elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.said: list[dict[str, Any]] = []
        self.attachment = flowcheck.attach(
            self.model, self.optimizer, node=f"{address[0]}:{address[1]}", token=TOKEN.decode(),
            **{"max_stall_s": 0.0, "topology": lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]},
               "collectives": lambda since: self.said[since:]} | options,
        )

    def train(self, *, step: int = 1, calls: int = 1) -> None:
        """One iteration, without attachment.step()."""
        self.model(torch.ones(3, 2)).square().sum().backward()
        self.said.extend([{"op": "AllReduce", "count": self.elements, "dtype": "float32"}] * calls)
        for _ in range(step):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate(self, times: int = 1, **told: Any) -> None:
        for _ in range(times):
            self.train(step=0 if told.get("skipped") else 1)
            self.attachment.step(**told)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.module.state_dict().items()}


@pytest.fixture
def training(wrapped: Any, hand_node: HandNode) -> Iterator[Callable[..., Training]]:
    """training(**options) -> one that has not begun."""
    made: list[Training] = []

    def start(**options: Any) -> Training:
        made.append(Training(wrapped, hand_node.address, **options))
        return made[-1]

    yield start
    for one in made:
        one.attachment.close(0.0)


def connected(one: Training, node: HandNode) -> Peer:
    """The connection, once its opening (which is empty as long as the job is not known) has gone out."""
    peer = node.welcome()
    until(lambda: one.attachment._sender.connected and not one.attachment._sender._again.is_set())
    return peer


def known(one: Training, node: HandNode, *, manifest: bool = True) -> Peer:
    """Three iterations, after which the job is known to the node."""
    peer = connected(one, node)
    one.iterate(3)
    peer.expect("flows")
    if manifest:
        peer.expect("manifest")
    return peer


def joined(one: Training, node: HandNode, **options: Any) -> Peer:
    """Attached, after three iterations."""
    peer = known(one, node, **options)
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    return peer


@pytest.fixture
def script() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """script(play): what a node does while the training thread waits. Its failures are those of the test."""
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def run(play: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                play()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join(LONGEST)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


# -- arguments -----------------------------------------------------------------------------------------------


def attach(**options: Any) -> flowcheck.Attachment:
    """Nothing is wrong with the arguments if the model is what is refused."""
    return flowcheck.attach(
        torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]),
        **{"node": "host:1", "token": TOKEN.decode()} | options,
    )


@pytest.mark.parametrize(("node", "token", "what"), [
    ("nowhere", TOKEN.decode(), "node: 'nowhere' is not an address"), ("host:0", TOKEN.decode(), "not an address"),
    ("host:65536", TOKEN.decode(), "not an address"), ("host:-1", TOKEN.decode(), "not an address"),
    (":7070", TOKEN.decode(), "not an address"), ("host:", TOKEN.decode(), "not an address"),
    ("host:http", TOKEN.decode(), "not an address"), ("host:1", "short", "token of 5 characters"),
])
def test_arguments_that_cannot_be_are_refused_at_once(node: str, token: str, what: str) -> None:
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
], ids=str)
def test_numbers_at_their_bounds_are_taken(good: dict[str, Any]) -> None:
    assert "model: is a Linear" in attach(**good).why


def test_the_defaults() -> None:
    attachment = attach()
    assert (attachment.iteration, attachment._checksum_every, attachment._max_stall) == (0, 0, 10.0)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The address of a connection that is never begun, and (last words, seconds for them) of each end of it."""
    made: list[Any] = []

    class Kept(module.Sender):
        def start(self) -> None:
            made.append(self._address)

        def close(self, last: Any, seconds: float) -> None:
            made.append((last, seconds))

    monkeypatch.setattr(module, "Sender", Kept)
    return made


@pytest.mark.parametrize(("node", "address"), [
    ("10.0.0.2:7070", ("10.0.0.2", 7070)), ("[::1]:1", ("::1", 1)), ("XBOX:2", ("XBOX", 2)),
])
def test_the_address_of_the_node(wrapped, kept, node: str, address: tuple[str, int]) -> None:
    Training(wrapped, (node.rpartition(":")[0], address[1])).attachment.close()
    assert kept == [address, (Bye(), 5.0)], "goodbye has five seconds"


def test_a_refusal_does_not_wait_for_the_node(wrapped, kept) -> None:
    one = Training(wrapped, ("host", 1))
    one.iterate()
    one.optimizer.param_groups[0]["lr"] = float("nan")
    one.iterate()
    assert one.attachment.state == "refused" and kept == [("host", 1), (Bye(), 0.0)]


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
    assert (attachment.state, attachment.iteration) == ("closed", 5)
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
    topology, collectives = module._communicator(group, None, None)
    assert topology() == "topology" and collectives(7) == ("since", 7)
    assert module._communicator(group, dict, None) == (dict, group.flowcheck_collectives)


# -- from watching to attached -------------------------------------------------------------------------------


def test_states_from_watching_to_closed(training, hand_node) -> None:
    one = training()
    attachment = one.attachment
    assert (attachment.state, attachment.why) == ("watching", "not connected yet")
    peer = connected(one, hand_node)
    assert (attachment.state, attachment.why) == ("watching", "the job's iterations are being watched")
    peer.send("wanted", what=["manifest", "flows"], why="nothing is known of the job yet")
    until(lambda: attachment._sender.why)
    assert attachment.why == "the job's iterations are being watched"  # it is this that the node waits for
    one.iterate(2)
    assert (attachment.state, attachment.iteration) == ("watching", 2)
    one.iterate()
    assert (attachment.state, attachment.why) == ("attaching", "nothing is known of the job yet")
    assert attachment.published == (-1, "")
    peer.send("joined", iteration=3)
    until(lambda: attachment._sender.joined == 3 and not attachment._sender.why)
    assert (attachment.state, attachment.why, attachment.iteration) == ("attached", "", 3)
    peer.send("progress", iteration=3, status="unverified")
    until(lambda: attachment.published == (3, "unverified"))
    peer.send("wanted", what=["state"], why="iteration 3 is lost")
    until(lambda: attachment.why)
    assert (attachment.state, attachment.why) == ("attaching", "iteration 3 is lost")
    attachment.close(LONGEST)
    assert attachment.state == "closed"
    assert attachment.published == (3, "unverified")


def test_a_node_that_is_not_connected_yet_is_waited_for(training, hand_node, script, monkeypatch) -> None:
    """At the boundary where the job is known. A rank that went on would hold up no other, but the node would join with
    traffic in flight."""
    monkeypatch.setattr(sending, "Limits", lambda text: Limits(text, seconds=LONGEST))
    waits = threading.Event()

    class Tried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def node() -> None:
        assert waits.wait(LONGEST)
        peer = hand_node.welcome()
        peer.expect("flows")
        peer.send("joined", iteration=3)

    one = training(rank=1, max_stall_s=LONGEST)
    one.attachment._sender.tried = Tried()  # nobody has answered the connection so far
    one.iterate(2)
    script(node)
    one.iterate()
    waited = waits.is_set()
    waits.set()
    assert waited and one.attachment.state == "attached"


def test_a_job_that_is_known_and_a_node_that_says_nothing(training, hand_node) -> None:
    one = training()
    known(one, hand_node)
    assert (one.attachment.state, one.attachment.why) == ("attaching", "the node has not joined yet")


def test_other_things_that_a_node_wants_do_not_change_that_it_has_joined(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["flows"], why="of rank 1")
    until(lambda: one.attachment._sender.wanted)
    assert one.attachment.state == "attached"


def test_a_node_that_is_gone(wrapped, hand_node) -> None:
    address = hand_node.address
    hand_node.close()
    one = Training(wrapped, address)
    until(lambda: one.attachment.state == "lost")
    assert one.attachment.why == "no connection: Connection refused" and not one.attachment._sender.wanted
    one.iterate(4)
    assert one.attachment.state == "lost" and one.attachment.iteration == 4
    one.attachment.close(0.0)


def test_a_connection_that_is_lost_is_said_and_comes_back(training, hand_node) -> None:
    """The new connection begins with all that is known of the job."""
    one = training()
    peer = joined(one, hand_node)
    peer.close()
    until(lambda: one.attachment.state == "lost")
    assert one.attachment.why in ("connection closed", "connection lost: Connection reset by peer")
    one.iterate()  # no record of it is kept
    peer = hand_node.welcome()
    assert peer.expect("flows") == {"flows": [FLOW]} and peer.expect("manifest")["first"] == 2
    until(lambda: one.attachment.state == "attaching")
    peer.send("joined", iteration=4)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == 4


def test_an_impostor_at_the_nodes_address_gets_nothing(training, hand_node) -> None:
    """It answers the Hello with a proof that does not prove the token. Nothing follows the Hello."""
    one = training()
    peer = hand_node.accept()
    peer.challenge()
    peer.send("welcome", proof="00" * 32)
    peer.send("wanted", what=["state"], why="give me all you have")
    assert peer.ended()
    until(lambda: one.attachment.state == "lost")
    assert one.attachment.why == "the node does not know the token"
    one.iterate(5)
    assert one.attachment.state == "lost" and one.attachment._sender._queue.empty()


def test_rank_0_tells_the_job_and_its_flows(training, hand_node) -> None:
    one = training(run_id="a run", epoch=2, iteration=40)
    peer = connected(one, hand_node)
    one.iterate(3)
    assert peer.expect("flows") == {"flows": [FLOW]}
    manifest = peer.expect("manifest")
    assert manifest["first"] == 42  # iteration 0 of the manifest is the one that has just ended
    job = manifest["job"]
    assert (job["run_id"], job["epoch"], job["flows"]) == ("a run", 2, [])
    assert job["communicator"]["nccl_version"] == "2.27.7"
    assert [call["carries"] for call in job["collectives"]["startup"]] == ["other", "other"]
    assert [call["carries"] for call in job["collectives"]["steady"]] == ["gradient"]


def test_other_ranks_tell_their_flows_only(training, hand_node) -> None:
    one = training(rank=1)
    peer = known(one, hand_node, manifest=False)
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == 3  # and nothing before it
    peer.send("wanted", what=["state"], why="iteration 3 is lost")
    until(lambda: one.attachment.state == "attaching")
    one.attachment._sender.joined = 3  # so that records go on
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [4, 5]  # the state is for rank 0 to send


# -- the one boundary that waits -----------------------------------------------------------------------------


def test_the_boundary_waits_until_the_node_has_joined_and_has_the_state(training, hand_node, script) -> None:
    one = training(max_stall_s=LONGEST)
    peer = connected(one, hand_node)
    states: list[dict[str, torch.Tensor]] = []

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("progress", iteration=0, status="")  # it says something that is not what is waited for
        peer.send("wanted", what=["state"], why="a state to begin with")
        message, payload = peer.receive()
        (group,) = message.pop("groups")  # of the step that made it
        assert message == {"type": "state", "iteration": 3} and group["lr"] == 1.0
        states.append(safetensors.torch.load(payload))
        peer.send("progress", iteration=1, status="")
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"
    (state,) = states
    assert {name: value.tolist() for name, value in state.items()} == {
        f"model.{name}": value.tolist() for name, value in one.values.items()
    }


def test_the_first_attempt_is_waited_for_as_long_as_told(training) -> None:
    told: list[float | None] = []

    class Tried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            told.append(timeout)
            return False

    one = training(max_stall_s=0.25)
    one.attachment._sender.tried = Tried()
    one.iterate(4)
    assert told == [0.25] and one.attachment.iteration == 4


@pytest.mark.parametrize("state", [False, True], ids=["no state", "a state"])
def test_less_than_a_second_is_waited_too(training, hand_node, script, monkeypatch, state: bool) -> None:
    """The clock stands still, so that half a second is never over: what ends the wait is the node's answer."""
    one = training(max_stall_s=0.5)
    peer = connected(one, hand_node)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        if state:
            peer.send("wanted", what=["state"], why="a state to begin with")
            assert peer.receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"


def test_without_any_time_nothing_is_waited_for(training, hand_node, monkeypatch) -> None:
    """Neither for the node nor for its answer to a state: the clock stands still at the deadline."""
    one = training(max_stall_s=0.0)
    peer = connected(one, hand_node)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    one.iterate(3)
    assert one.attachment.state == "attaching"
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    assert (one.attachment.state, one.attachment.iteration) == ("attaching", 4)


def test_other_ranks_wait_at_that_boundary_too(training, hand_node, script) -> None:
    one = training(max_stall_s=LONGEST, rank=1)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.send("wanted", what=["state"], why="of rank 0")
        until(lambda: one.attachment._sender.wanted)
        peer.send("joined", iteration=3)

    script(node)
    one.iterate(3)
    assert one.attachment.state == "attached"
    one.iterate()
    assert peer.expect("record")["iteration"] == 3  # no state was sent by this rank


def test_the_wait_ends_with_the_connection(training, hand_node, script) -> None:
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.close()

    script(node)
    one.iterate(3)
    assert one.attachment.state == "lost"


def test_the_wait_for_the_first_attempt_ends_with_it(wrapped, hand_node) -> None:
    """A node that does not listen costs nothing."""
    address = hand_node.address
    hand_node.close()
    one = Training(wrapped, address, max_stall_s=3600.0)
    one.iterate(3)
    assert one.attachment.state == "lost"
    one.attachment.close(0.0)


def test_a_state_that_came_too_late_is_sent_again_at_the_next_boundary(training, hand_node, script) -> None:
    one = training(max_stall_s=3600.0)
    peer = connected(one, hand_node)

    def node() -> None:
        peer.expect("flows")
        peer.expect("manifest")
        peer.send("wanted", what=["state"], why="a state to begin with")
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 3}.items()
        peer.send("wanted", what=["state"], why="too late")

    script(node)
    one.iterate(3)
    assert (one.attachment.state, one.attachment.why) == ("attaching", "too late")

    def later() -> None:
        assert peer.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
        peer.send("joined", iteration=3)  # of the state before: not what is waited for
        peer.send("joined", iteration=4)

    script(later)
    one.iterate()
    assert one.attachment._sender.joined == 4


def test_a_state_without_time_is_sent_and_not_waited_for(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    assert peer.receive()[0].items() >= {"type": "state", "iteration": 4}.items()
    assert (one.attachment.state, one.attachment._sender.wanted) == ("attaching", frozenset())
    one.iterate(2)  # the node is still busy with the state: what it will need next is on its way all the same
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [4, 5]
    peer.send("joined", iteration=4)
    until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == 6


def test_a_state_ends_with_its_connection_and_so_do_the_records_after_it(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="iteration 2 is lost")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3 and peer.receive()[0]["type"] == "state"
    peer.close()
    peer = connected(one, hand_node)
    one.iterate()  # no record: nobody has the state that it would follow
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("wanted", what=["state"], why="a state to begin with")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    assert peer.receive()[0].items() >= {"type": "state", "iteration": 6}.items()


def test_a_state_that_is_not_wanted_is_not_sent(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["flows"], why="of rank 1")
    until(lambda: one.attachment._sender.wanted)
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    one.attachment.close(LONGEST)
    assert peer.expect("bye") == {}


class Every(torch.nn.Module):
    """An optimized tensor, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.weight


def test_a_state_has_every_entry_and_every_tensor_of_the_optimizer(training, hand_node) -> None:
    one = training(layer=Every(), make=lambda p: torch.optim.AdamW(p, lr=0.5))
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    peer.receive()
    state = safetensors.torch.load(peer.receive()[1])
    assert state.keys() == {
        "model.weight", "model.frozen", "model.count", "optimizer.weight.step", "optimizer.weight.exp_avg",
        "optimizer.weight.exp_avg_sq",
    }
    mine = one.optimizer.state[one.model.module.weight]
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in one.values.items())
    assert all(torch.equal(state[f"optimizer.weight.{key}"], value) for key, value in mine.items())
    assert state["optimizer.weight.step"].item() == 4.0 and state["model.count"].item() == 4


def test_a_state_is_the_one_of_its_boundary(training, hand_node) -> None:
    """It is copied before it is queued: training goes on while it is sent."""
    one = training(make=lambda p: torch.optim.AdamW(p, lr=0.5))
    queued: list[dict[str, torch.Tensor]] = []
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._sender.wanted)
    one.attachment._sender.put = lambda message, tensors: queued.append(tensors)
    one.iterate()
    del one.attachment._sender.put
    _, state = queued
    then = {name: value.clone() for name, value in state.items()}
    one.train()
    assert len(state) == 8 and all(torch.equal(state[name], value) for name, value in then.items())
    assert not torch.equal(one.values["weight"], then["model.weight"])


def test_what_is_not_in_the_manifest_is_not_in_a_state(training, hand_node) -> None:
    """An optimizer may keep something of a tensor that it does not step, and things that are no tensors."""
    one = training(layer=Every())
    one.optimizer.state[one.model.module.frozen]["momentum_buffer"] = torch.ones(1)
    one.optimizer.state[one.model.module.weight]["note"] = 7
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._sender.wanted)
    one.iterate()
    peer.receive()
    assert safetensors.torch.load(peer.receive()[1]).keys() == {"model.weight", "model.frozen", "model.count"}


def test_a_node_that_says_nothing_is_not_waited_for_for_ever(training, hand_node, script) -> None:
    """Neither for its first word nor for its answer to a state."""
    one = training(max_stall_s=0.3)
    peer = connected(one, hand_node)
    one.iterate(3)
    assert one.attachment.state == "attaching"
    peer.send("wanted", what=["state"], why="a state")
    until(lambda: one.attachment._sender.wanted)
    one.attachment._sender.answered.clear()
    one.iterate()
    assert one.attachment.state == "attaching" and one.attachment._sender.wanted == frozenset()


# -- records -------------------------------------------------------------------------------------------------


def test_a_record_has_the_hyper_parameters_that_the_step_used(training, hand_node) -> None:
    """A scheduler that steps between optimizer.step() and attachment.step() has changed them by then."""
    one = training()
    schedule = torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda epoch: 0.5**epoch)
    peer = connected(one, hand_node)
    for iteration in range(6):
        one.train()
        schedule.step()
        one.attachment.step()
        if iteration == 2:
            peer.expect("flows")
            peer.expect("manifest")
            peer.send("joined", iteration=3)
            until(lambda: one.attachment.state == "attached")
    rest = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    assert [peer.expect("record")["groups"] for _ in range(3)] == [
        [{"lr": 0.125} | rest], [{"lr": 0.0625} | rest], [{"lr": 0.03125} | rest]
    ]


def test_a_step_that_was_skipped_has_the_hyper_parameters_of_its_end(training, hand_node) -> None:
    """They are not those of the step before: nothing of it is kept."""
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    one.optimizer.param_groups[0]["lr"] = 0.25
    one.iterate(skipped=True)
    first, second = peer.expect("record"), peer.expect("record")
    assert (first["groups"][0]["lr"], first["skipped"]) == (1.0, False)
    assert (second["groups"][0]["lr"], second["skipped"]) == (0.25, True)


def test_what_is_told_of_a_step_is_in_its_record(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    one.iterate(clip=torch.tensor(0.75), scale=torch.tensor(65536.0))
    one.iterate(skipped=1, clip=0.5, scale=2)
    found = [peer.expect("record") for _ in range(3)]
    assert [[one[key] for key in ("iteration", "clip", "scale", "skipped", "checksums")] for one in found] == [
        [3, None, None, False, {}], [4, 0.75, 65536.0, False, {}], [5, 0.5, 2.0, True, {}]
    ]


@pytest.mark.parametrize(("told", "why"), [
    ({"clip": float("nan")}, "no record of iteration 3: clip is nan"),
    ({"clip": torch.tensor(float("inf"))}, "no record of iteration 3: clip is inf"),
    ({"scale": float("inf")}, "no record of iteration 3: scale is inf"),
    ({"scale": float("nan"), "skipped": True}, "no record of iteration 3: scale is nan"),
])
def test_a_step_with_numbers_that_are_none_has_no_record(training, hand_node, caplog, told: Any, why: str) -> None:
    """It is said, once as long as it lasts, and the next good one has a record again."""
    one = training()
    peer = joined(one, hand_node)
    caplog.clear()
    one.iterate(**told)
    assert (one.attachment.why, one.attachment.state) == (why, "attached")
    one.iterate(**told)
    assert one.attachment.why == why.replace("3", "4")
    assert [line.getMessage() for line in caplog.records] == [f"flowcheck: rank 0: {why}"]
    one.iterate()
    assert one.attachment.why == "" and peer.expect("record")["iteration"] == 5
    one.iterate(**told)
    assert len(caplog.records) == 2


def test_a_loss_scale_with_16_bit_parameters_is_refused(training, hand_node) -> None:
    one = training(layer=torch.nn.Linear(2, 2).bfloat16())
    one.attachment.step()
    assert one.attachment.state != "refused"
    one.attachment.step(scale=2.0)
    assert one.attachment.state == "refused" and "a loss scale with 16-bit parameters" in one.attachment.why


@pytest.mark.parametrize("clip", [float("nan"), float("inf"), torch.tensor(float("-inf"))], ids=str)
def test_the_norm_of_an_overflow_does_not_matter(training, hand_node, clip: Any) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate(skipped=True, clip=clip)
    record = peer.expect("record")
    assert (record["clip"], record["skipped"], record["scale"]) == (1.0, True, None)


@pytest.mark.parametrize(("layer", "names"), [
    (Every, {"weight", "frozen", "count"}), (lambda: torch.nn.Linear(2, 2), {"weight", "bias"}),
], ids=["with buffers", "without"])
def test_checksums_each_kth_iteration_are_of_every_entry_after_the_step(training, hand_node, layer, names) -> None:
    one = training(layer=layer(), checksum_every=3, rank=1)
    peer = joined(one, hand_node, manifest=False)
    after = []
    for _ in range(4):
        one.iterate()
        after.append({name: f"{checksum(value):016x}" for name, value in one.values.items()})
    sums = [peer.expect("record")["checksums"] for _ in range(4)]
    assert [bool(found) for found in sums] == [False, False, True, False]  # iterations 3, 4, 5, 6
    assert sums[2] == after[2] and sums[2].keys() == names
    assert all(len(value) == 16 for value in sums[2].values())


def test_buffers_go_with_the_records_of_rank_0(training, hand_node) -> None:
    one = training(layer=Every())
    peer = joined(one, hand_node)
    one.iterate()
    message, payload = peer.receive()
    assert (message["type"], message["iteration"], message["checksums"]) == ("record", 3, {})
    held = safetensors.torch.load(payload)
    assert held.keys() == {"buffer.count"} and held["buffer.count"].item() == 4


def test_buffers_are_those_of_their_iteration(training, hand_node) -> None:
    """Training goes on while they are sent."""
    one = training(layer=Every(), checksum_every=1)
    queued: list[Any] = []
    peer = joined(one, hand_node)
    one.attachment._sender.put = lambda message, tensors: queued.append((message, tensors))
    one.iterate(2)
    assert [tensors["buffer.count"].item() for _, tensors in queued] == [4, 5]
    assert all(message.checksums for message, _ in queued)
    del one.attachment._sender.put
    peer.close()


# -- what ends it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "told", "what"), [
    (0, {}, "stepped 0 times"), (2, {}, "stepped 2 times"), (2, {"skipped": True}, "stepped 2 times"),
    (3, {}, "stepped 3 times"),
])
def test_an_optimizer_that_steps_otherwise_is_refused(training, hand_node, steps: int, told: Any, what: str) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    one.train(step=min(steps, 1))
    for _ in range(steps - 1):
        for parameter in one.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.optimizer.step()
    one.attachment.step(**told)
    assert one.attachment.state == "refused"
    assert f"iteration 4: the optimizer {what} since the last call of step()" in one.attachment.why
    assert one.attachment.iteration == 5
    assert set(peer.rest()) <= {"bye"}  # no record of it
    one.iterate(2)
    assert one.attachment.iteration == 5 and one.attachment.state == "refused"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_skipped_step_may_have_been_made_or_not(training, hand_node, steps: int) -> None:
    """AMP does not call the optimizer after an overflow; a fused one is called and does nothing."""
    one = training()
    peer = joined(one, hand_node)
    one.train(step=steps)
    one.attachment.step(skipped=True)
    one.iterate()
    assert [peer.expect("record")["skipped"] for _ in range(2)] == [True, False]


def test_steps_before_the_job_is_known_are_not_counted(training, hand_node) -> None:
    """Gradients may be accumulated, or the attachment made between the two calls."""
    one = training()
    peer = connected(one, hand_node)
    for steps in (0, 1, 1):
        one.train(step=steps)
        one.attachment.step()
    peer.expect("flows")
    assert one.attachment.state == "attaching"


def test_an_optimizer_whose_steps_are_not_heard_of_is_not_counted(training, hand_node) -> None:
    """Its hooks are of torch's own step; a wrapper may call something else."""
    one = training()
    one.attachment._hook.remove()
    peer = joined(one, hand_node)
    one.iterate()
    record = peer.expect("record")
    assert (record["iteration"], record["groups"][0]["lr"]) == (3, 1.0) and one.attachment.state == "attached"


def test_an_iteration_with_another_call_has_no_record(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    one.train()
    one.said[-1] = {"op": "AllReduce", "count": one.elements + 1, "dtype": "float32"}
    one.attachment.step()
    assert one.attachment.state == "refused" and "iteration 4: 1 calls on DDP's communicator" in one.attachment.why
    assert set(peer.rest()) <= {"bye"}


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda one: one.optimizer.param_groups[0].update(lr=float("nan")), "optimizer: lr is nan"),
    (lambda one: one.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
     "optimizer: has 2 parameter groups, and had 1"),
])
def test_a_step_that_no_replica_could_follow_ends_it(training, hand_node, spoil: Any, why: str) -> None:
    one = training()
    peer = joined(one, hand_node)
    spoil(one)
    one.iterate()
    assert one.attachment.state == "refused" and one.attachment.why.startswith(why)
    assert set(peer.rest()) <= {"bye"}


def test_a_parameter_without_a_gradient_ends_it(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.model.module.bias.grad = None
    one.optimizer.step()
    assert one.attachment.state == "refused" and "parameter weight has no gradient" in one.attachment.why
    assert set(peer.rest()) <= {"bye"}


def test_a_fault_of_ours_is_logged_with_its_place_and_training_goes_on(training, hand_node, caplog) -> None:
    one = training(topology=lambda: {"communicator": COMMUNICATOR})  # without flows
    connected(one, hand_node)
    caplog.clear()
    one.iterate(4)
    assert one.attachment.state == "refused" and one.attachment.why == "KeyError: 'flows'"
    assert one.attachment.iteration == 3
    (line,) = [line for line in caplog.records if "not attached" in line.getMessage()]
    assert line.exc_info[0] is KeyError and line.getMessage() == "flowcheck: not attached: KeyError: 'flows'"


def test_reasons_of_the_connection_are_logged_with_the_rank(training, hand_node, caplog) -> None:
    one = training(rank=1)
    peer = connected(one, hand_node)
    peer.send("refused", why="you are late")
    until(lambda: one.attachment.why == "refused: you are late")
    assert [line.getMessage() for line in caplog.records] == ["flowcheck: rank 1: refused: you are late"]


def test_close_says_goodbye_once(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    one.attachment.close(LONGEST)
    one.attachment.close(LONGEST)
    assert peer.expect("record")["iteration"] == 3 and peer.expect("bye") == {} and peer.ended()
    one.iterate(2)  # the optimizer's hook is gone, and nothing is counted
    assert (one.attachment.state, one.attachment.iteration, one.attachment._stepped) == ("closed", 4, 0)
    assert one.attachment.why == ""


def test_close_that_fails_is_no_fault_of_training(training, hand_node, caplog) -> None:
    one = training()
    connected(one, hand_node)
    one.attachment._hook.remove()
    one.attachment._hook = SimpleNamespace(remove=lambda: 1 / 0)
    one.attachment.close(LONGEST)
    assert one.attachment.state == "closed" and "ZeroDivisionError" in one.attachment.why
