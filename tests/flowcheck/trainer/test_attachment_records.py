"""What an attachment tells of a step."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch

from flowcheck.control.checksum import checksum

from ..hand_node import until
from .training import Every, connected, joined


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


def test_a_scaler_is_asked_from_the_first_iteration_on(training, hand_node) -> None:
    one = training(layer=torch.nn.Linear(2, 2).bfloat16(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    one.attachment.step()
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

    def put_all(messages: Any, fill: Any) -> None:
        fill(messages[-1][0])
        queued.append(messages[-1])

    one.attachment._senders[0].put_all = put_all
    one.iterate(2)
    assert [tensors["buffer.count"].item() for _, tensors in queued] == [4, 5]
    assert all(message.checksums for message, _ in queued)
    del one.attachment._senders[0].put_all
    peer.close()


def test_buffers_of_a_device_are_copied_to_the_host(training, hand_node) -> None:
    """There is none here: what is asked of such a tensor is looked at."""
    asked: list[Any] = []

    class OfDevice:
        def detach(self) -> OfDevice:
            return self

        def to(self, device: str, *, copy: bool) -> torch.Tensor:
            asked.append((device, copy))
            return torch.tensor(7)

    one = training(layer=Every())
    peer = joined(one, hand_node)
    part = one.attachment._parts[0].part
    part.state_dict = lambda: {"count": OfDevice()}
    one.iterate()
    assert asked == [("cpu", True)] and safetensors.torch.load(peer.receive()[1])["buffer.count"].item() == 7


def test_a_part_is_told_when_its_job_is_known_and_when_it_is_not_any_more(training, hand_node) -> None:
    """By that it knows what later iterations are compared with."""
    one, told = training(), list[bool]()
    one.attachment._parts[0].part.known = told.append
    joined(one, hand_node)
    assert told == [True]
    one.train(calls=2)
    one.attachment.step()
    assert told == [True, False]
    one.iterate()
    assert told == [True, False, True]


@pytest.mark.parametrize("first", [False, True], ids=["metric after the gradients", "metric before them"])
def test_a_call_that_only_some_iterations_make(training, hand_node, caplog, first: bool) -> None:
    """It does not end the attachment: it is named, the job is told anew by the next usual iteration, with all that was
    called until then, and records go on. The odd iteration has one if its gradients came first."""
    one, metric = training(), {"op": "AllReduce", "count": 1, "dtype": "float32"}
    peer = joined(one, hand_node)
    one.iterate()
    if first:
        one.said.append(metric)
        one.iterate()
    else:
        one.train()
        one.said.append(metric)
        one.attachment.step()
    assert one.attachment.state == "watching"
    assert "iteration 4 made 2 calls" in one.attachment.why and "AllReduce of 1 float32" in one.attachment.why
    assert sum("iteration 4 made" in text for text in caplog.messages) == 1
    one.iterate()  # 5: the job is known again
    assert [peer.expect("record")["iteration"] for _ in range(1 if first else 2)] == [3, 4][:1 if first else 2]
    assert peer.expect("flows")
    again = peer.expect("manifest")
    assert again["first"] == 5
    assert [call["count"] for call in again["job"]["collectives"]["startup"]] == [
        call["count"] for call in one.said[:-1]
    ]
    assert one.attachment.state == "attaching"
    peer.send("joined", iteration=6)
    until(lambda: one.attachment.state == "attached")
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [6, 7] and one.attachment.why == ""


def test_what_a_node_wanted_of_the_job_before_is_forgotten(training, hand_node) -> None:
    """A state that it asked for when it lost its place is not the one that it asks for when the job is told anew."""
    one = training()
    peer = joined(one, hand_node)
    peer.send("wanted", what=["state"], why="lost its place")
    until(lambda: "state" in one.attachment._senders[0].node.wanted)
    one.train(calls=2)
    one.attachment.step()
    assert not one.attachment._senders[0].node.wanted
    one.iterate(2)
    assert peer.expect("flows") and peer.expect("manifest")["first"] == 4


def test_an_optimizer_that_clips_and_scales_itself_says_so(training, hand_node) -> None:
    """As Megatron-Core's does; what its part has heard of a step is in the record, and no other word besides."""
    one = training()
    peer, part = joined(one, hand_node), one.attachment._parts[0].part
    for heard in ((0.5, 1024.0, False), (None, None, False), (0.25, 512.0, True)):
        part.said = lambda heard=heard: heard
        one.train()
        one.attachment.step()
        record = peer.expect("record")
        assert (record["clip"], record["scale"], record["skipped"]) == heard
    one.train()
    one.attachment.step(clip=0.5)
    assert one.attachment.state == "refused" and "the optimizer clips and scales itself" in one.attachment.why
