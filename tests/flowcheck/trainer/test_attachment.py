"""An attachment on a real DDP model, boundary by boundary, with a node made by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from flowcheck.control.protocol import Limits
from flowcheck.node.groups.membership import NOTHING
from flowcheck.trainer.connection import dialer
from flowcheck.trainer.connection import sender as sending

from ..hand_node import LONGEST, until
from .training import COMMUNICATOR, FLOW, Training, connected, joined, known

# -- from watching to attached -------------------------------------------------------------------------------


def test_states_from_watching_to_closed(training, hand_node) -> None:
    one = training()
    attachment = one.attachment
    assert (attachment.state, attachment.why) == ("watching", "not connected yet")
    peer = connected(one, hand_node)
    assert (attachment.state, attachment.why) == ("watching", "the job's iterations are being watched")
    peer.send("wanted", what=["manifest", "flows"], why="nothing is known of the job yet")
    until(lambda: attachment._senders[0].why)
    assert attachment.why == "the job's iterations are being watched"  # it is this that the node waits for
    one.iterate(2)
    assert (attachment.state, attachment.number) == ("watching", 2)
    one.iterate()
    assert (attachment.state, attachment.why) == ("attaching", "nothing is known of the job yet")
    assert attachment.published == (-1, "")
    peer.send("joined", iteration=3)
    until(lambda: attachment._senders[0].node.joined == 3 and not attachment._senders[0].why)
    assert (attachment.state, attachment.why, attachment.number) == ("attached", "", 3)
    peer.send("progress", iteration=3, status="unverified")
    until(lambda: attachment.published == (3, "unverified"))
    peer.send("wanted", what=["state"], why="iteration 3 is lost")
    until(lambda: attachment.why)
    assert (attachment.state, attachment.why) == ("attaching", "iteration 3 is lost")
    attachment.close(LONGEST)
    assert attachment.state == "closed"
    assert attachment.published == (3, "unverified")


def test_the_log_says_nothing_of_a_start_that_is_as_every_start(training, hand_node, caplog) -> None:
    """What a node wants of a job that it does not know yet is no news: it gives no reason."""
    one = training()
    caplog.clear()
    peer = connected(one, hand_node)
    peer.send("wanted", **vars(NOTHING))
    one.iterate(3)
    assert (one.attachment.state, one.attachment.why) == ("attaching", "the node has not joined yet")
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    assert one.attachment.why == "" and caplog.text == ""


def test_a_node_that_is_not_connected_yet_is_waited_for(training, hand_node, script, monkeypatch) -> None:
    """At the boundary where the job is known. A rank that went on would hold up no other, but the node would join with
    traffic in flight."""
    monkeypatch.setattr(dialer, "Limits", lambda text: Limits(text, seconds=LONGEST))
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
    one.attachment._senders[0].tried = Tried()  # nobody has answered the connection so far
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
    until(lambda: one.attachment._senders[0].node.wanted)
    assert one.attachment.state == "attached"


def test_a_node_that_is_gone(wrapped, hand_node) -> None:
    address = hand_node.address
    hand_node.close()
    one = Training(wrapped, address)
    until(lambda: one.attachment.state == "lost")
    assert one.attachment.why == "no connection: Connection refused" and not one.attachment._senders[0].node.wanted
    one.iterate(4)
    assert one.attachment.state == "lost" and one.attachment.number == 4
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
    assert one.attachment.state == "lost" and one.attachment._senders[0]._backlog.queue.empty()


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
    one.attachment._senders[0].node.joined = 3  # so that records go on
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [4, 5]  # the state is for rank 0 to send


# -- what ends it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "told", "what"), [
    (2, {}, "stepped 2 times"), (2, {"skipped": True}, "stepped 2 times"),
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
    assert one.attachment.number == 5
    assert set(peer.rest()) <= {"bye"}  # no record of it
    one.iterate(2)
    assert one.attachment.number == 5 and one.attachment.state == "refused"


def test_an_iteration_without_a_step_and_without_gradients_is_joined_past(training, hand_node) -> None:
    """A guard of the script's own, before backward. No version follows from the one before, and the next iteration
    joins."""
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    peer.expect("record")
    one.attachment.step()
    assert one.attachment.state == "watching" and "iteration 4 made 0 calls" in one.attachment.why
    one.iterate()
    assert one.attachment.state == "attaching" and peer.expect("flows")
    assert peer.expect("manifest")["first"] == 5


def test_boundaries_that_are_not_where_iterations_end_are_the_end(training, hand_node) -> None:
    """step() twice an iteration, say."""
    one = training()
    peer = joined(one, hand_node)
    for _ in range(3):
        one.iterate()
        one.attachment.step()
    assert one.attachment.state == "refused"
    assert "the optimizer stepped 0 times since the last call of step()" in one.attachment.why
    assert peer.rest().count("record") == 1, "of the iteration before the first of them"


def test_a_script_that_leaves_a_step_out_has_skipped_it(training, hand_node) -> None:
    """Gradients were reduced and the optimizer was not called: its own guard against a NaN, say."""
    one = training()
    peer = joined(one, hand_node)
    one.train(step=0)
    one.attachment.step()
    one.train(step=0)
    one.attachment.step(skipped=True)
    one.iterate()
    assert [peer.expect("record")["skipped"] for _ in range(3)] == [True, True, False]


def test_a_step_that_was_made_was_not_skipped(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.train()
    one.attachment.step(skipped=True)
    assert one.attachment.state == "refused" and "skipped" in one.attachment.why
    assert set(peer.rest()) <= {"bye"}


def test_steps_before_the_job_is_known_are_not_counted(training, hand_node) -> None:
    """Gradients may be accumulated, or the attachment made between the two calls."""
    one = training()
    peer = connected(one, hand_node)
    for steps in (0, 1, 1):
        one.train(step=steps)
        one.attachment.step()
    peer.expect("flows")
    assert one.attachment.state == "attaching"


def test_an_iteration_with_another_call_has_no_record(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    one.train()
    one.said[-1] = {"op": "AllReduce", "count": one.elements + 1, "dtype": "float32"}
    one.attachment.step()
    assert one.attachment.state == "watching"
    assert "iteration 4 made 1 calls on DDP's communicator" in one.attachment.why
    one.attachment.close()
    assert set(peer.rest()) <= {"bye"}


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda one: one.optimizer.param_groups[0].update(lr=float("nan")), "optimizer: lr is nan"),
    (lambda one: one.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
     "optimizer: has a parameter of shape (1,) that is not in the model's state_dict"),
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
    assert one.attachment.number == 3
    (line,) = [line for line in caplog.records if "not attached" in line.getMessage()]
    assert line.exc_info[0] is KeyError and line.getMessage() == "flowcheck: not attached: KeyError: 'flows'"


def test_reasons_of_the_connection_are_logged_with_the_rank(training, hand_node, caplog) -> None:
    one = training(rank=1)
    caplog.clear()
    peer = connected(one, hand_node)
    peer.send("refused", why="you are late")
    until(lambda: one.attachment.why == "refused: you are late")
    assert [line.getMessage() for line in caplog.records] == ["flowcheck: rank 1: refused: you are late"]


def test_a_run_that_the_node_refuses_for_good_is_not_tried_again(training, hand_node, monkeypatch) -> None:
    monkeypatch.setattr(sending, "PAUSE", (0.0, 0.0))
    one = training()
    peer = joined(one, hand_node)
    assert one.attachment.state == "attached"
    peer.send("refused", why="its versions have diverged 2 times", final=True)
    until(lambda: one.attachment.state == "refused")
    assert one.attachment.why == "refused: its versions have diverged 2 times"
    until(lambda: not one.attachment._senders[0]._thread.is_alive())
    one.iterate(2)
    assert (one.attachment.state, one.attachment.number) == ("refused", 5), "training goes on"
    one.attachment.close(LONGEST)
    assert one.attachment.state == "closed"



def test_close_says_goodbye_once(training, hand_node) -> None:
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    one.attachment.close(LONGEST)
    one.attachment.close(LONGEST)
    assert peer.expect("record")["iteration"] == 3 and peer.expect("bye") == {} and peer.ended()
    one.iterate(2)  # the optimizer's hook is gone, and nothing is counted
    assert (one.attachment.state, one.attachment.number, one.attachment._hooks.taken()) == ("closed", 4, [0])
    assert one.attachment.why == ""


def test_close_that_fails_is_no_fault_of_training(training, hand_node, monkeypatch, caplog) -> None:
    """All else is ended all the same: what is replaced in torch is of the whole process, also after this attachment."""
    one, failed = training(), list[Any]()
    remove, replaced = RemovableHandle.remove, torch.nn.utils.clip_grads_with_norm_

    def fails_once(handle: RemovableHandle) -> None:
        failed.append(handle)
        if len(failed) == 1:
            raise ZeroDivisionError
        remove(handle)

    connected(one, hand_node)
    monkeypatch.setattr(RemovableHandle, "remove", fails_once)
    one.attachment.close(LONGEST)
    assert one.attachment.state == "closed" and "ZeroDivisionError" in one.attachment.why
    assert torch.nn.utils.clip_grads_with_norm_ is not replaced
