"""What a script changes after it has attached: followed, joined anew, or refused; never unnoticed.

The node is made by hand: what counts is which records it gets, and what the attachment says.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ..hand_node import HandNode, until
from .conftest import CLIPPING
from .training import Every, Training, connected, joined

Change = Callable[[Training], Any]


def adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **options)


def weights(one: Training) -> list[torch.nn.Parameter]:
    return list(one.model.parameters())


@torch.no_grad()
def written(one: Training, by: Callable[[torch.Tensor], Any]) -> None:
    for parameter in weights(one):
        by(parameter)


def each_gradient(one: Training, by: Callable[[torch.Tensor], Any]) -> None:
    for parameter in weights(one):
        by(parameter.grad)


def replaced(one: Training) -> None:
    for parameter in weights(one):
        parameter.grad = parameter.grad.clone()


def stored(one: Training) -> None:
    """The state of another optimizer of the same kind, as a checkpoint has it."""
    state = copy.deepcopy(one.optimizer.state_dict())
    one.optimizer.load_state_dict(state)


def turned(one: Training, option: str) -> None:
    group = one.optimizer.param_groups[0]
    group[option] = not group[option]


def as_fused(one: Training) -> None:
    state = copy.deepcopy(one.optimizer.state_dict())
    state["param_groups"][0] |= {"fused": not state["param_groups"][0]["fused"], "foreach": False}
    one.optimizer.load_state_dict(state)


def in_two_groups(one: Training) -> None:
    """Or in one, where they are in two."""
    groups = one.optimizer.param_groups
    if len(groups) > 1:
        groups[0]["params"] += groups.pop()["params"]
    else:
        one.optimizer.add_param_group({"params": [groups[0]["params"].pop()]})


def other_order(one: Training) -> None:
    one.optimizer.param_groups[0]["params"].reverse()


def new_entry(one: Training) -> None:
    entry = one.optimizer.state[weights(one)[0]]
    one.optimizer.state[weights(one)[0]] = dict(entry)


def new_tensor(one: Training) -> None:
    one.optimizer.state[weights(one)[0]]["exp_avg"] = torch.ones_like(weights(one)[0])


def zeroed_state(one: Training) -> None:
    for entry in one.optimizer.state.values():
        entry["exp_avg"].zero_()


def moved(one: Training) -> None:
    for parameter in weights(one):
        parameter.data = parameter.data.clone()


def rolled_back(one: Training) -> None:
    one.model.load_state_dict({name: torch.zeros_like(value) for name, value in one.model.state_dict().items()})


def unheard(one: Training) -> None:
    """A step that calls none of torch's hooks."""
    plain = type(one.optimizer).step.__wrapped__
    one.optimizer.step = lambda: plain(one.optimizer)


def post_hook(one: Training) -> None:
    one.optimizer.register_step_post_hook(lambda *_: written(one, lambda p: p.clamp_(-0.1, 0.1)))


OUTSIDE = {  # before the iteration that has to be noticed; the job goes on
    "written in place": lambda one: written(one, lambda p: p.mul_(0.5)),
    "clamped": lambda one: written(one, lambda p: p.clamp_(-0.01, 0.01)),
    "one element": lambda one: written(one, lambda p: p.view(-1)[0].add_(1.0)),
    "initialised": lambda one: one.model.module.reset_parameters(),
    "model rolled back": rolled_back,
    "optimizer's state loaded": stored,
    "its entry is another": new_entry,
    "a tensor of it is another": new_tensor,
    "momentum reset": zeroed_state,
    "state taken away": lambda one: one.optimizer.state.clear(),
    "lies elsewhere": moved,
    "groups are other objects": lambda one: setattr(one.optimizer, "param_groups", list(one.optimizer.param_groups)),
    "another order": other_order,
    "another group": in_two_groups,
    "fused": as_fused,
    "foreach": lambda one: turned(one, "foreach"),
    "maximize": lambda one: turned(one, "maximize"),
    "stepped by another optimizer": lambda one: (one.backward(0), torch.optim.SGD(weights(one), lr=0.1).step(),
                                                 one.optimizer.zero_grad()),
}
GRADIENTS = {  # between reduction and step: no replica has them
    "clipped by value": lambda one: torch.nn.utils.clip_grad_value_(weights(one), 0.01),
    "noise": lambda one: each_gradient(one, lambda g: g.add_(0.1)),
    "divided": lambda one: each_gradient(one, lambda g: g.div_(3)),
    "one of them": lambda one: weights(one)[0].grad.zero_(),
    "other objects": replaced,
    "given up": lambda one: setattr(weights(one)[0], "grad", None),
    "clipped in part": lambda one: torch.nn.utils.clip_grad_norm_(weights(one)[:1], 0.01),
    "clipped twice": lambda one: [torch.nn.utils.clip_grad_norm_(weights(one), 0.01) for _ in "ab"],
    "unscaled by hand": lambda one: each_gradient(one, lambda g: g.mul_(0.25)),
    "accumulated": lambda one: without_sync(one),
}


def without_sync(one: Training) -> None:
    with one.model.no_sync():
        one.model(torch.ones(3, 2)).square().sum().backward()


def is_noticed(one: Training, peer: Any, iteration: int) -> None:
    """No record of this iteration, and a reason."""
    assert one.attachment.state in ("watching", "refused") and one.attachment.why
    if one.attachment.state == "watching":
        one.iterate()  # and the next one joins anew, with all of the state asked for again
        assert peer.expect("flows") and peer.expect("manifest")["first"] == iteration + 1
    else:
        assert set(peer.rest()) <= {"bye"}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_is_changed_outside_of_a_step(training, hand_node, what: str) -> None:
    one = training(make=adam(weight_decay=0.1))
    peer = joined(one, hand_node)
    one.iterate(2)
    assert [peer.expect("record")["iteration"] for _ in range(2)] == [3, 4]
    OUTSIDE[what](one)
    one.iterate()
    is_noticed(one, peer, 5)


@pytest.mark.parametrize("kind", ["replica", "log"])
def test_a_group_more_at_the_begin_of_an_iteration_is_joined_anew(training, hand_node, kind: str) -> None:
    """Where layers are unfrozen."""
    one = training(make=adam(), kind=kind)
    peer = joined(one, hand_node)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3
    in_two_groups(one)
    one.iterate()
    assert one.attachment.state == "watching" and "groups" in one.attachment.why
    is_noticed(one, peer, 4)


@pytest.mark.parametrize("what", ["written in place", "clamped", "model rolled back", "momentum reset", "fused"])
def test_what_is_changed_between_step_and_boundary(training, hand_node, what: str) -> None:
    """The version of that very iteration would be wrong."""
    one = training(make=adam())
    peer = joined(one, hand_node)
    one.train()
    OUTSIDE[what](one)
    one.attachment.step()
    is_noticed(one, peer, 3)


@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_that_are_not_what_was_reduced(training, hand_node, what: str) -> None:
    one = training(make=adam())
    peer = joined(one, hand_node)
    one.train(between=lambda: GRADIENTS[what](one))
    one.attachment.step()
    assert one.attachment.state == "refused" and one.attachment.why
    assert set(peer.rest()) <= {"bye"}


@pytest.mark.parametrize("hook", ["ours", "torch's"])
def test_a_communication_hook_after_attach(training, hand_node, hook: str) -> None:
    one = training()
    if hook == "ours":
        one.model.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        one.model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    hand_node.welcome()
    one.iterate()
    assert one.attachment.state == "refused" and "hook" in one.attachment.why


def test_a_constant_that_is_written_to(training, hand_node) -> None:
    """An average of the weights that is kept in frozen parameters: what a version has of it would be old."""
    one = training(layer=Every())
    peer = joined(one, hand_node)
    one.iterate()
    assert peer.receive()[0]["iteration"] == 3
    one.train()
    with torch.no_grad():
        one.model.module.frozen.mul_(0.5)
    one.attachment.step()
    is_noticed(one, peer, 4)


def test_a_post_hook_that_writes_is_refused_in_the_end(training, hand_node) -> None:
    """What is changed at every step cannot be followed by joining anew."""
    one = training()
    joined(one, hand_node)
    post_hook(one)
    for _ in range(20):
        one.iterate()
    assert one.attachment.state == "refused" and "times in" not in one.attachment.state
    assert "written" in one.attachment.why


def test_steps_that_are_not_heard_are_refused_in_the_end(training, hand_node) -> None:
    one = training()
    joined(one, hand_node)
    unheard(one)
    for _ in range(20):
        one.iterate()
    assert one.attachment.state == "refused" and one.attachment.why


FOLLOWED: dict[str, Change] = {
    "lr": lambda one: one.optimizer.param_groups[0].update(lr=0.5),
    "betas": lambda one: one.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "decay": lambda one: one.optimizer.param_groups[0].update(weight_decay=0.25),
    "a schedule": lambda one: torch.optim.lr_scheduler.StepLR(one.optimizer, 1, 0.1),
    "a step of the script's own around torch's": lambda one: setattr(
        one.optimizer, "step", SimpleNamespace(of=one.optimizer.step).of),
    "gradients in zeros": lambda one: one.optimizer.zero_grad(set_to_none=False),
    "a copy of the model": lambda one: copy.deepcopy(one.model.module),
    "its state kept": lambda one: (one.model.state_dict(), one.optimizer.state_dict()),
    "evaluated": lambda one: one.model.module(torch.ones(1, 2)),
    "another optimizer for others": lambda one: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0),
    "clipping of others": lambda one: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(1))], 1.0),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_what_changes_nothing_that_is_not_said(training, hand_node, what: str) -> None:
    one = training(make=adam())
    peer = joined(one, hand_node)
    one.iterate()
    FOLLOWED[what](one)
    one.iterate(3)
    assert one.attachment.state == "attached" and one.attachment.why == ""
    records = [peer.expect("record") for _ in range(4)]
    assert [record["iteration"] for record in records] == [3, 4, 5, 6]
    assert records[-1]["groups"][0]["lr"] == one.optimizer.param_groups[0]["lr"]


def test_options_that_a_hook_sets_right_before_the_step(training, hand_node) -> None:
    """A warm-up that sets lr in a step pre-hook, registered after attach."""
    one = training()
    peer = joined(one, hand_node)
    one.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.125))
    before = one.values["weight"]
    one.train()
    one.optimizer.param_groups[0]["lr"] = 7.0
    one.attachment.step()
    assert peer.expect("record")["groups"][0]["lr"] == 0.125 and not torch.equal(one.values["weight"], before)


def test_torchs_own_clipping_is_heard(training, hand_node) -> None:
    """However it was imported: frameworks call it, too."""
    clip = torch.nn.utils.clip_grad_norm_
    one = training(make=adam())
    peer = joined(one, hand_node)
    one.train(between=lambda: clip(weights(one), 0.25))
    one.attachment.step()
    one.train(between=lambda: torch.nn.utils.clip_grads_with_norm_(weights(one), 0.5, torch.tensor(4.0)))
    one.attachment.step()
    norm = []
    one.train(between=lambda: norm.append(clip(one.model.parameters(), 0.125)))
    one.attachment.step(clip=float(torch.clamp(0.125 / (norm[0] + 1e-6), max=1.0)))
    first, second, third = (peer.expect("record")["clip"] for _ in range(3))
    assert 0 < first < 1 and second == float(0.5 / (torch.tensor(4.0) + 1e-6)) and 0 < third < 1
    one.attachment.close(0.0)
    assert torch.nn.utils.clip_grads_with_norm_ is CLIPPING, "torch's own again"


class Two:
    """PyTorch's recipe: one GradScaler, a loss and an optimizer for each of two models."""

    def __init__(self, training: Any, fused: bool = False) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.one = training(scaler=self.scaler, make=adam(fused=fused))
        self.other = torch.nn.Parameter(torch.ones(2))
        self.second = torch.optim.SGD([self.other], lr=0.1)

    def iterate(self, *, first: bool = False, second: bool = False) -> None:
        """first, second: the gradients of this model overflow."""
        one, scaler = self.one, self.scaler
        scaler.scale(one.model(torch.ones(3, 2)).square().sum() * (torch.inf if first else 1.0)).backward()
        scaler.scale(self.other.sum() * (torch.inf if second else 1.0)).backward()
        one.said.append({"op": "AllReduce", "count": one.elements, "dtype": "float32"})
        scaler.step(one.optimizer)
        scaler.step(self.second)
        scaler.update()
        one.optimizer.zero_grad()
        self.second.zero_grad()
        one.attachment.step()


@pytest.mark.parametrize("fused", [False, True])
def test_one_scaler_for_two_optimizers(training, hand_node, fused: bool) -> None:
    """Its scale shrinks whichever of them overflowed; skipped is what the optimizer did."""
    job = Two(training, fused)
    peer = connected(job.one, hand_node)
    for _ in range(3):
        job.iterate()
    peer.expect("flows")
    peer.expect("manifest")
    peer.send("joined", iteration=3)
    until(lambda: job.one.attachment.state == "attached")
    for overflow in ({}, {"second": True}, {"first": True}, {"first": True, "second": True}, {}):
        job.iterate(**overflow)
    found = [peer.expect("record") for _ in range(5)]
    assert [(one["scale"], one["skipped"]) for one in found] == [
        (1024.0, False), (1024.0, False), (512.0, True), (256.0, True), (128.0, False)]


def test_a_scaler_that_attach_was_not_given_is_heard(training, hand_node) -> None:
    """On a CPU torch does not even count that it has written to the gradients."""
    one = training(make=adam())
    peer = joined(one, hand_node)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for overflow in (1.0, torch.inf, 1.0):
        scaler.scale(one.model(torch.ones(3, 2)).square().sum() * overflow).backward()
        one.said.append({"op": "AllReduce", "count": one.elements, "dtype": "float32"})
        scaler.step(one.optimizer)
        scaler.update()
        one.optimizer.zero_grad()
        one.attachment.step()
    found = [peer.expect("record") for _ in range(3)]
    assert [(record["scale"], record["skipped"]) for record in found] == [(256.0, False), (256.0, True), (128.0, False)]


def test_a_boundary_before_the_step(training, hand_node) -> None:
    """Each record would be that of the step before."""
    one = training()
    peer = joined(one, hand_node)
    one.iterate()
    peer.expect("record")
    one.backward()
    one.attachment.step()
    one.optimizer.step()
    one.optimizer.zero_grad()
    assert one.attachment.state == "attached"
    one.backward()
    one.attachment.step()
    assert one.attachment.state == "refused" and "attachment.step()" in one.attachment.why


def test_gradients_clipped_before_they_are_unscaled(training, hand_node) -> None:
    """(g c) / s is not (g / s) c, to the bit."""
    job = Two(training)
    scaler, one = job.scaler, job.one
    connected(one, hand_node)
    for _ in range(3):
        job.iterate()
    scaler.scale(one.model(torch.ones(3, 2)).square().sum()).backward()
    one.said.append({"op": "AllReduce", "count": one.elements, "dtype": "float32"})
    torch.nn.utils.clip_grad_norm_(weights(one), 0.5)
    scaler.step(one.optimizer)
    scaler.update()
    one.attachment.step()
    assert one.attachment.state == "refused" and one.attachment.why


def test_a_closure_makes_its_gradients_within_the_step(training, hand_node) -> None:
    """Lightning's loop. What is done to gradients in it is seen as well."""
    one = training(make=adam())
    peer = joined(one, hand_node)

    def step(spoil: bool = False) -> None:
        def closure() -> float:
            one.optimizer.zero_grad()
            one.backward()
            if spoil:
                each_gradient(one, lambda g: g.mul_(2))
            torch.nn.utils.clip_grad_norm_(weights(one), 0.5)
            return 0.0

        one.optimizer.step(closure=closure)
        one.attachment.step()

    step()
    step()
    assert all(0 < peer.expect("record")["clip"] < 1 for _ in range(2))
    step(spoil=True)
    assert one.attachment.state == "refused"


def test_a_change_now_and_then_is_joined_anew_each_time(training, hand_node) -> None:
    """Weights of an average are put in for an evaluation, every few hundred iterations."""
    one = training()
    peer = joined(one, hand_node)
    number = 3
    for _ in range(5):
        one.iterate(101)
        for _ in range(101):
            assert peer.receive()[0]["type"] == "record"
        number += 101
        written(one, lambda p: p.add_(1.0))
        one.iterate()
        is_noticed(one, peer, number)
        number += 2
        peer.send("joined", iteration=number)
        until(lambda: one.attachment.state == "attached")
    one.iterate()
    assert peer.expect("record")["iteration"] == number


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([None, *OUTSIDE, *GRADIENTS, *FOLLOWED]), max_size=6))
def test_no_sequence_of_changes_goes_unnoticed(wrapped: Any, changes: list[str | None]) -> None:
    """A record of an iteration is sent only if the state before it and its gradients are what the node would have."""
    with contextlib.closing(HandNode()) as node:
        one = Training(wrapped, node.address, make=adam())
        with contextlib.closing(joined(one, node)):
            for change in changes:
                known = one.attachment.state in ("attached", "attaching")  # else there is no version to be spoilt
                if one.attachment.state == "refused":
                    break
                if change in GRADIENTS:
                    one.train(between=lambda change=change: GRADIENTS[change](one))
                    one.attachment.step()
                else:
                    (OUTSIDE | FOLLOWED | {None: lambda _: None})[change](one)
                    one.iterate()
                noticed = one.attachment.state in ("watching", "refused") and one.attachment.why
                assert noticed or not known or change in FOLLOWED or change is None
            one.attachment.close(0.0)


PARTS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "pruned": lambda module: torch.nn.utils.prune.l1_unstructured(module, "weight", 0.5),
    "normed": lambda module: torch.nn.utils.parametrizations.spectral_norm(module),
    "a buffer": lambda module: module.register_buffer("average", torch.zeros(2)),
    "a module": lambda module: module.add_module("adapter", torch.nn.Linear(2, 2)),
    "another weight": lambda module: setattr(module, "weight", torch.nn.Parameter(torch.ones(2, 2))),
}


@pytest.mark.parametrize("what", PARTS)
def test_what_is_registered_in_the_model(training, hand_node, what: str) -> None:
    """Its entries, or their names, are others from then on."""
    one = training()
    joined(one, hand_node)
    one.iterate()
    PARTS[what](one.model.module)
    with contextlib.suppress(RuntimeError):  # DDP itself may not get over it
        one.train()
    one.attachment.step()
    assert one.attachment.state in ("watching", "refused") and one.attachment.why


def test_a_frozen_parameter_with_a_state_in_the_optimizer(training) -> None:
    """Its moments would be in no version."""
    def stepped(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        optimizer = torch.optim.AdamW(held)
        for parameter in held:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        held[1].requires_grad_(False)
        return optimizer

    one = training(make=stepped)
    assert one.attachment.state == "refused" and "frozen" in one.attachment.why


def test_what_is_put_into_the_model_past_torch_is_seen_before_a_checksum(training, hand_node) -> None:
    """Sequential.insert registers nothing. No record with checksums leaves out what a version would lack."""
    one = training(layer=torch.nn.Sequential(torch.nn.Linear(2, 2)), checksum_every=5)
    peer = joined(one, hand_node)
    one.model.module.insert(1, torch.nn.Hardtanh())
    one.model.module._modules["1"].register_buffer("seen", torch.zeros(1))
    one.iterate()  # step 4
    assert peer.receive()[0]["iteration"] == 3
    one.iterate()  # step 5 has checksums
    assert one.attachment.state == "watching" and "1.seen" in one.attachment.why


def test_modules_that_change_no_entry_are_none(training, hand_node) -> None:
    """A metric that is hung into the model for an evaluation, and taken out again."""
    one = training()
    peer = joined(one, hand_node)
    for iteration in range(3, 9):
        one.model.module.metric = torch.nn.Identity()
        one.model.module.register_buffer("angles", torch.zeros(2), persistent=False)
        one.iterate()
        del one.model.module.metric, one.model.module.angles
        assert peer.expect("record")["iteration"] == iteration


def test_buffers_that_each_rank_has_of_its_own(training) -> None:
    one = training(layer=Every())
    assert one.attachment.state == "watching"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it, too
        one = training(layer=Every(), wraps={"broadcast_buffers": False})
    assert one.attachment.state == "refused" and "broadcast_buffers" in one.attachment.why


@pytest.mark.parametrize("early", [True, False], ids=["before attach", "after attach"])
def test_what_a_hook_of_the_step_writes_is_not_taken_for_the_step(
    training: Callable[..., Training], hand_node: HandNode, early: bool
) -> None:
    """Also if it came between what looks before the step and what looks after it when the first one was made."""

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for one in optimizer.param_groups[0]["params"]:
                one.mul_(0.5)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        if early:
            optimizer.register_step_post_hook(halve)
        return optimizer

    mine = training(make=make)
    if not early:
        mine.optimizer.register_step_pre_hook(halve)
    connected(mine, hand_node)
    mine.iterate(20)
    assert mine.attachment.state == "refused"
