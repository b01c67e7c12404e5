"""What a training script may do besides: reductions in each backward pass, norms that are only logged, a model that is
compiled, a node that is away; and what an attachment says of a job that it does not know."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from flowcheck.errors import UserError
from flowcheck.trainer.describe.parts import Ddp
from flowcheck.trainer.describe.wrapped import parts_of

from ..hand_node import until
from .training import Training, connected, joined


def weights(one: Training) -> list[torch.nn.Parameter]:
    return list(one.model.parameters())


# -- several reductions, and norms that are only measured ------------------------------------------------------


def test_accumulation_without_no_sync_is_followed(training, hand_node) -> None:
    """What micro-batches were multiplied with before the last one was reduced with it."""
    one = training()

    def iterate() -> None:
        one.backward()
        torch.nn.utils.clip_grad_norm_(weights(one), 0.01)
        one.train(between=lambda: torch.nn.utils.clip_grad_norm_(weights(one), 0.5))
        one.attachment.step()

    peer = connected(one, hand_node)
    for _ in range(3):
        iterate()
    peer.expect("flows")
    steady = peer.expect("manifest")["job"]["collectives"]["steady"]
    assert [call["carries"] for call in steady] == ["other", "gradient"]
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    iterate()
    record = peer.expect("record")
    assert 0.01 < record["clip"] < 1 and not record["skipped"]
    one.backward()
    one.said.append(one.said[-1])  # as many AllReduces, one of which is the script's
    one.optimizer.step()
    one.attachment.step()
    assert one.attachment.state == "refused" and "process group of its own" in one.attachment.why


def test_a_clip_before_the_reduction_is_on_the_wire(training, hand_node) -> None:
    """Local gradients of no_sync, clipped before the pass that reduces them."""
    one = training()
    peer = joined(one, hand_node)
    with one.model.no_sync():
        one.model(torch.ones(3, 2)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(weights(one), 0.01)
    one.train()
    one.attachment.step()
    assert peer.expect("record")["clip"] is None


@pytest.mark.parametrize("whole", [True, False])
def test_a_norm_that_is_only_measured_is_no_clipping(training, hand_node, whole: bool) -> None:
    """max_norm=inf multiplies by 1; of all, of each by itself, before the real clipping and after it."""
    one = training()
    peer = joined(one, hand_node)

    def between() -> None:
        for given in [weights(one)] if whole else [[parameter] for parameter in weights(one)]:
            torch.nn.utils.clip_grad_norm_(given, float("inf"))
            one.attachment.clip_grad_norm_(given, math.inf)

    one.train(between=between)
    one.attachment.step()
    one.train(between=lambda: (between(), torch.nn.utils.clip_grad_norm_(weights(one), 0.25), between()))
    one.attachment.step()
    first, second = peer.expect("record")["clip"], peer.expect("record")["clip"]
    assert first is None and 0 < second < 1


def test_a_norm_that_is_no_number_multiplies_all_the_same(training, hand_node) -> None:
    """torch makes NaN of every gradient then."""
    one = training()
    joined(one, hand_node)
    one.backward()
    one.model.module.bias.grad.data[0] = math.inf  # which torch does not count
    torch.nn.utils.clip_grad_norm_(weights(one), math.inf)
    assert one.model.module.weight.grad.isnan().all()
    one.optimizer.step()
    one.attachment.step()
    assert "clip is nan" in one.attachment.why


def test_a_job_that_stays_unknown_says_what_it_waits_for(training, hand_node, caplog) -> None:
    """In the log after ten iterations, and to a node that hears it; over when the job is known."""
    one = training()
    peer = connected(one, hand_node)
    peer.send("wanted", what=["user", "userhead", "notice"], why="")
    assert peer.expect("members") == {"places": [0, 1]}
    for _ in range(10):
        one.train(calls=0)
        one.attachment.step()
    why = peer.expect("notice")["why"]
    assert one.attachment.state == "watching" and one.attachment.why == why
    assert "reduced [] elements where DDP has buckets of [6]" in why and "call the model" in why
    assert [line for line in caplog.messages if "10 iterations were watched" in line]
    one.iterate(2)
    assert peer.expect("flows") and peer.expect("manifest")["first"] == 10


def test_the_hook_that_is_refused_is_named(training, hand_node) -> None:
    one = training()
    connected(one, hand_node)
    one.model.register_comm_hook(None, allreduce_hook)
    one.iterate()
    assert "default_hooks.allreduce_hook" in one.attachment.why


def test_a_scheduler_is_not_blamed_while_a_node_is_away(wrapped, hand_node, caplog) -> None:
    """Nobody takes what is kept with a version, so nothing of it is from before."""
    made: list[Any] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=1.0))
        return made[0]

    model = wrapped(torch.nn.Linear(2, 2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer(model.parameters()), lambda epoch: 0.9**epoch)
    one = Training(lambda *_, **__: model, hand_node.address, make=lambda _: made[0], scheduler=schedule)
    peer = connected(one, hand_node)
    peer.send("wanted", what=["user"], why="")
    sender = one.attachment._senders[0]
    until(lambda: sender.node.takes_user)
    for _ in range(6):
        one.train()
        schedule.step()
        one.attachment.step()
        if one.attachment.number == 3:
            peer.send("joined", iteration=3)
            until(lambda: sender.node.joined is not None)
        if one.attachment.number == 4:
            peer.close()
            until(lambda: not sender.connected)
    assert not [line for line in caplog.messages if "scheduler" in line]
    one.attachment.close(0.0)


def test_what_torch_compile_has_wrapped_is_followed(wrapped) -> None:
    """What is inside reduces as it always does. The lab's scenarios run one."""
    model = wrapped(torch.nn.Linear(2, 2))
    (part,) = parts_of(torch.compile(model, backend="eager"), None)
    assert list(part.state_dict()) == ["weight", "bias"] and part.module is model.module


def test_python_reducer_of_torch_compile_is_refused(wrapped) -> None:
    """It has no buckets."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrapped(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="python_reducer"):
        Ddp(model)
