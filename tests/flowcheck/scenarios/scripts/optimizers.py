"""An optimizer that is not what it was: flags, options, groups, state, and its step itself."""

from __future__ import annotations

import copy
import types

import numpy as np
import torch

from ..run import Run
from ..table import Expected, scenario


@scenario(Expected.NAMED, quick=True)
def loads_a_fused_checkpoint(run: Run) -> None:
    """optimizer.load_state_dict of a checkpoint that was made with fused=True; its tensors are the same."""
    ddp, optimizer, attachment = run.usual(foreach=False)
    for i in run.iterations():
        if run.now(i):
            saved = copy.deepcopy(optimizer.state_dict())
            for group in saved["param_groups"]:
                group["fused"], group["foreach"] = True, None
            optimizer.load_state_dict(saved)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def rolled_back(run: Run) -> None:
    """The optimizer goes back to what it was some steps ago; the model does not."""
    ddp, optimizer, attachment = run.usual()
    saved = {}
    for i in run.iterations():
        if i == run.at - 3:
            saved = copy.deepcopy(optimizer.state_dict())
        if run.now(i):
            optimizer.load_state_dict(saved)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def both_rolled_back(run: Run) -> None:
    """Model and optimizer go back to what they were some steps ago: a loss spike."""
    ddp, optimizer, attachment = run.usual()
    saved = []
    for i in run.iterations():
        if i == run.at - 3:
            saved = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict()])
        if run.now(i):
            ddp.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def groups_changed_over(run: Run) -> None:
    """A parameter moves from one group to another."""
    ddp = run.ddp()
    first, *rest = list(ddp.parameters())
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 1e-2}, {"params": rest}], 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        if run.now(i):
            one, other = optimizer.param_groups
            other["params"].append(one["params"].pop())
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def groups_exchanged(run: Run) -> None:
    """Two groups exchange two parameters of the same shape."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    ddp = run.ddp(model)
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        if run.now(i):
            one, other = (group["params"] for group in optimizer.param_groups)
            one[0], other[0] = other[0], one[0]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def group_added(run: Run) -> None:
    """A layer that was frozen is thawed: DDP is made anew, and the optimizer gets another group."""
    model = run.model()
    model.first.requires_grad_(False)
    ddp = run.ddp(model)
    optimizer = torch.optim.AdamW([*model.middle.parameters(), *model.last.parameters()], 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        if run.now(i):
            model.first.requires_grad_(True)
            ddp = run.ddp(model)
            optimizer.add_param_group({"params": ddp.module.first.parameters()})
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def parameter_taken_out(run: Run) -> None:
    """A parameter is removed from its group."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            del optimizer.param_groups[0]["params"][0]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL)
def options_changed(run: Run) -> None:
    """Learning rate, betas, eps and weight decay change between iterations."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.since(i):
            optimizer.param_groups[0].update(lr=1e-3 / i, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL)
def rate_changed_before_step(run: Run) -> None:
    """The learning rate changes between backward and step, and again after it."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.param_groups[0]["lr"] = 1e-2 if run.since(i) else 1e-3
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1.0


@scenario(Expected.NAMED)
def rate_set_by_a_pre_hook(run: Run) -> None:
    """A step pre-hook that is registered after attach sets the learning rate."""
    ddp, optimizer, attachment = run.usual()

    def warm(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if run.since(run.number):
            optimizer.param_groups[0]["lr"] = 0.01

    optimizer.register_step_pre_hook(warm)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def rate_set_for_one_step_by_hooks(run: Run) -> None:
    """A pre-hook sets the learning rate and a post-hook sets it back: neither before nor after the step it is seen."""
    ddp, optimizer, attachment = run.usual()

    def set_to(rate: float) -> None:
        if run.since(run.number):
            optimizer.param_groups[0]["lr"] = rate

    optimizer.register_step_pre_hook(lambda *_: set_to(0.01))
    optimizer.register_step_post_hook(lambda *_: set_to(0.001))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.CAUGHT)
def post_hook_edits_weights(run: Run) -> None:
    """A step post-hook that decays weights by itself."""
    ddp, optimizer, attachment = run.usual()

    def decay(*_: object) -> None:
        if run.since(run.number):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.mul_(0.99)

    optimizer.register_step_post_hook(decay)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def rate_is_float64(run: Run) -> None:
    """The learning rate is a numpy.float64, from a table of rates."""
    rates = np.linspace(1e-3, 1e-4, 100)
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        optimizer.param_groups[0]["lr"] = rates[i]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def rate_is_float32(run: Run) -> None:
    """The learning rate is a numpy.float32, with which torch computes step sizes in that precision."""
    rates = np.linspace(1e-3, 1e-4, 100, dtype=np.float32)
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        optimizer.param_groups[0]["lr"] = rates[i]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def rate_is_a_tensor(run: Run) -> None:
    """The learning rate is a tensor, which is filled anew."""
    ddp, optimizer, attachment = run.usual(lr=torch.tensor(1e-3), foreach=False)
    for i in run.iterations():
        optimizer.param_groups[0]["lr"].fill_(1e-3 / (i + 1))
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.CAUGHT)
def rate_zero_and_moments_wrong(run: Run) -> None:
    """With learning rate 0 moments are edited: parameters show nothing of it."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.since(i):
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.param_groups[0]["weight_decay"] = 0.0
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            for state in optimizer.state.values():
                state["exp_avg"].data.mul_(0.5)


@scenario(Expected.NAMED)
def maximize_flipped(run: Run) -> None:
    """maximize=True from a step on."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0]["maximize"] = True
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def amsgrad_flipped(run: Run) -> None:
    """amsgrad=True from a step on; its state is made by the script."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0]["amsgrad"] = True
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def fused_flipped(run: Run) -> None:
    """fused=True in place of foreach."""
    ddp, optimizer, attachment = run.usual(foreach=True)
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0].update(foreach=False, fused=True)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def decay_decoupled(run: Run) -> None:
    """decoupled_weight_decay flips: Adam becomes AdamW."""
    ddp, optimizer, attachment = run.usual(torch.optim.Adam, weight_decay=0.1)
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0]["decoupled_weight_decay"] = True
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def momentum_begins(run: Run) -> None:
    """SGD gets momentum and Nesterov in mid-run."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1)
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0].update(momentum=0.9, nesterov=True)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def state_cleared(run: Run) -> None:
    """optimizer.state is emptied: a warm restart."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            optimizer.state.clear()
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def state_replaced(run: Run) -> None:
    """One moment is another tensor."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            state = optimizer.state[ddp.module.first.weight]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.CAUGHT)
def state_zeroed(run: Run) -> None:
    """Moments are zeroed in place, which torch counts."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1, momentum=0.9)
    for i in run.iterations():
        if run.now(i):
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def count_set_back(run: Run) -> None:
    """The counter of steps of Adam's state begins anew: another bias correction."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            for state in optimizer.state.values():
                state["step"].zero_()
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def step_is_replaced(run: Run) -> None:
    """optimizer.step is another function, which steps and shrinks weights."""
    ddp, optimizer, attachment = run.usual()
    step = optimizer.step

    def shrinking(self: torch.optim.Optimizer) -> None:
        step()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.mul_(0.99)

    for i in run.iterations():
        if run.now(i):
            optimizer.step = types.MethodType(shrinking, optimizer)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def another_optimizer(run: Run) -> None:
    """From a step on another optimizer steps the same parameters."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.now(i):
                optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            optimizer.step()


@scenario(Expected.NAMED)
def an_optimizer_besides(run: Run) -> None:
    """A second optimizer steps one layer besides."""
    ddp, optimizer, attachment = run.usual()
    besides = torch.optim.SGD(ddp.module.last.parameters(), 0.1)
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.since(i):
                besides.step()


@scenario(Expected.NAMED)
def two_steps(run: Run) -> None:
    """Two steps with the same gradients."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.now(i):
                optimizer.step()


@scenario(Expected.EQUAL)
def step_left_out(run: Run) -> None:
    """The script leaves a step out (its loss was odd), and says nothing."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if not run.now(i):
                optimizer.step()


@scenario(Expected.EQUAL)
def step_left_out_and_said(run: Run) -> None:
    """The script leaves a step out, and says so."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.backward(ddp, optimizer, i)
        if not run.now(i):
            optimizer.step()
        attachment.step(skipped=run.now(i))


# The record of a rank may come when its iteration has been built with that of another.
@scenario(Expected.CAUGHT)
def step_left_out_by_one_rank(run: Run) -> None:
    """One rank leaves a step out: from then on ranks have different weights."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if not run.now(i) or run.rank != 1:
                optimizer.step()


# The record of a rank may come when its iteration has been built with that of another.
@scenario(Expected.CAUGHT)
def rate_of_one_rank(run: Run) -> None:
    """One rank's learning rate is another."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i) and run.rank == 1:
            optimizer.param_groups[0]["lr"] = 2e-3
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def boundary_left_out(run: Run) -> None:
    """The script forgets a boundary: two optimizer steps, two reductions, one call."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.backward(ddp, optimizer, i)
        optimizer.step()
        if not run.now(i):
            attachment.step()


@scenario(Expected.NAMED)
def boundary_before_step(run: Run) -> None:
    """attachment.step() stands before optimizer.step()."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.backward(ddp, optimizer, i)
        if run.since(i):
            attachment.step()
            optimizer.step()
        else:
            optimizer.step()
            attachment.step()


@scenario(Expected.NAMED, at=None)
def sharpness_aware(run: Run) -> None:
    """SAM: weights move uphill, a second backward, weights move back, the step."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1, momentum=0.9)
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            with torch.no_grad():
                moved = [parameter.grad * 0.05 for parameter in ddp.parameters()]
                for parameter, by in zip(ddp.parameters(), moved, strict=True):
                    parameter.add_(by)
            run.backward(ddp, optimizer, i)
            with torch.no_grad():
                for parameter, by in zip(ddp.parameters(), moved, strict=True):
                    parameter.sub_(by)
            optimizer.step()


@scenario(Expected.CAUGHT)
def lookahead(run: Run) -> None:
    """Each fourth step weights go half the way back to slow ones (Lookahead)."""
    ddp, optimizer, attachment = run.usual()
    slow = [parameter.detach().clone() for parameter in ddp.parameters()]
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.since(i) and i % 4 == 3:
                for parameter, kept in zip(ddp.parameters(), slow, strict=True):
                    kept.lerp_(parameter.data, 0.5)
                    parameter.data.copy_(kept)


@scenario(Expected.NAMED, at=None)
def subclass_that_adds(run: Run) -> None:
    """A subclass of AdamW whose step centres gradients first."""

    class Centred(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.sub_(parameter.grad.mean())
            super().step(closure)

    ddp, optimizer, attachment = run.usual(Centred)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def another_kind(run: Run) -> None:
    """An optimizer that no replica can follow."""
    ddp, optimizer, attachment = run.usual(torch.optim.RMSprop)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def sharded_optimizer(run: Run) -> None:
    """ZeroRedundancyOptimizer: each rank steps a part and broadcasts it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = run.ddp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def wrapped_in_a_class(run: Run) -> None:
    """A class of a framework has the optimizer, and calls it."""

    class Engine:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    ddp, optimizer, attachment = run.usual()
    engine = Engine(optimizer)
    for i in run.iterations():
        with attachment.iteration():
            run.loss(ddp, i).backward()
            engine.step()


@scenario(Expected.NAMED)
def groups_made_anew(run: Run) -> None:
    """optimizer.param_groups is another list of other dicts, which say the same. It may be followed."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def order_in_a_group(run: Run) -> None:
    """The parameters of a group stand in another order, as torch's state_dict numbers them. It may be followed."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0]["params"].reverse()
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def state_gets_a_key(run: Run) -> None:
    """The script keeps an average in optimizer.state, which a checkpoint of torch's would have."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.since(i):
                for parameter, state in optimizer.state.items():
                    state["average"] = parameter.detach().clone()


@scenario(Expected.NAMED)
def state_exchanged(run: Run) -> None:
    """Two parameters of one shape exchange their moments."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    ddp, optimizer, attachment = run.usual(model=model)
    for i in run.iterations():
        if run.now(i):
            one, other = model[0].weight, model[2].weight
            optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def attached_late(run: Run) -> None:
    """attach in the middle of a job, whose optimizer has state already."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    for i in range(5):
        run.backward(ddp, optimizer, i)
        optimizer.step()
    attachment = run.attach(ddp, optimizer, iteration=5)
    for i in run.iterations(5):
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def made_anew_in_the_process(run: Run) -> None:
    """Model, wrapper and optimizer are made anew and loaded from a checkpoint in memory, and attach is called again
    without a close: an in-process restart."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            saved = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict()])
            ddp = run.ddp()
            optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
            ddp.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            attachment = run.attach(ddp, optimizer, iteration=i)
        run.plain(ddp, optimizer, attachment, i)
