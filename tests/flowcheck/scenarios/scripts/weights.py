"""Weights and buffers that something else than the optimizer changes."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from ..run import Conv, Run
from ..table import Expected, scenario


@scenario(Expected.CAUGHT, quick=True)
def clamped_through_data(run: Run) -> None:
    """p.data.clamp_ after each step: torch counts nothing."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.since(i):
                for parameter in ddp.parameters():
                    parameter.data.clamp_(-0.05, 0.05)


@scenario(Expected.NAMED)
def clamped_without_grad(run: Run) -> None:
    """The same with torch.no_grad, which torch counts."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()
            if run.since(i):
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter.clamp_(-0.05, 0.05)


@scenario(Expected.NAMED)
def clamped_between_iterations(run: Run) -> None:
    """The same, after attachment.step()."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.since(i):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.clamp_(-0.05, 0.05)


@scenario(Expected.NAMED)
def clamped_before_step(run: Run) -> None:
    """The same, between backward and step."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.now(i):
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter.clamp_(-0.05, 0.05)
            optimizer.step()


@scenario(Expected.CAUGHT, sums=5)
def one_weight_through_data(run: Run) -> None:
    """One element of the largest tensor, once: no sample may hit it, a checksum does."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            ddp.module.middle.weight.data[7, 5] = 0.25


@scenario(Expected.NAMED)
def layer_reset(run: Run) -> None:
    """reset_parameters of the head."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            torch.manual_seed(3)
            ddp.module.last.reset_parameters()


@scenario(Expected.NAMED)
def model_rolled_back(run: Run) -> None:
    """model.load_state_dict of what it was some steps ago."""
    ddp, optimizer, attachment = run.usual()
    saved = {}
    for i in run.iterations():
        if i == run.at - 3:
            saved = copy.deepcopy(ddp.module.state_dict())
        if run.now(i):
            ddp.module.load_state_dict(saved)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def wrapper_rolled_back(run: Run) -> None:
    """The same by load_state_dict of the wrapper."""
    ddp, optimizer, attachment = run.usual()
    saved = {}
    for i in run.iterations():
        if i == run.at - 3:
            saved = copy.deepcopy(ddp.state_dict())
        if run.now(i):
            ddp.load_state_dict(saved)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def loaded_by_assignment(run: Run) -> None:
    """load_state_dict(assign=True): other parameters, which nobody steps."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            ddp.module.load_state_dict(copy.deepcopy(ddp.module.state_dict()), assign=True)
            for parameter in ddp.parameters():
                parameter.requires_grad_(True)
                parameter.grad = torch.zeros_like(parameter)
        with attachment.iteration():
            if not run.since(i):
                run.backward(ddp, optimizer, i)
            optimizer.step()


@scenario(Expected.CAUGHT)
def average_copied_in(run: Run) -> None:
    """An exponential average of the weights is copied into the model."""
    ddp, optimizer, attachment = run.usual()
    average = [parameter.detach().clone() for parameter in ddp.parameters()]
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        for mine, parameter in zip(average, ddp.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)
            if run.now(i):
                parameter.data.copy_(mine)


@scenario(Expected.EQUAL)
def average_evaluated(run: Run) -> None:
    """The average is put in for an evaluation between two iterations, and the weights come back bit for bit."""
    ddp, optimizer, attachment = run.usual()
    average = [parameter.detach().clone() for parameter in ddp.parameters()]
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            kept = [parameter.data for parameter in ddp.parameters()]
            for mine, parameter in zip(average, ddp.parameters(), strict=True):
                parameter.data = mine
            with torch.no_grad():
                run.loss(ddp.module, i)
            for mine, parameter in zip(kept, ddp.parameters(), strict=True):
                parameter.data = mine


@scenario(Expected.NAMED)
def average_swapped_in(run: Run) -> None:
    """Stochastic weight averaging: its weights go into the model, and update_bn computes new buffers."""
    ddp, optimizer, attachment = run.usual(model=run.model(Conv))
    average = AveragedModel(ddp.module)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        average.update_parameters(ddp.module)
        if run.now(i):
            with torch.no_grad():
                for mine, parameter in zip(average.module.parameters(), ddp.parameters(), strict=True):
                    parameter.copy_(mine)
            update_bn([run.batch(i)[0]], ddp.module)


@scenario(Expected.EQUAL)
def running_means_reset(run: Run) -> None:
    """Buffers are edited between iterations and inside of one."""
    ddp, optimizer, attachment = run.usual(model=run.model(Conv))
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.now(i):
                ddp.module.norm.running_mean.zero_()
            optimizer.step()
        if run.now(i):
            ddp.module.norm.reset_running_stats()


@scenario(Expected.NAMED)
def storage_set(run: Run) -> None:
    """p.set_() of other storage with other values."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.set_(parameter.detach() * 0.5)


@scenario(Expected.CAUGHT)
def storage_swapped(run: Run) -> None:
    """p.data = another tensor with other values."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            for parameter in ddp.parameters():
                parameter.data = parameter.data * 0.5


@scenario(Expected.NAMED)
def storage_moved(run: Run) -> None:
    """p.data = another tensor with the same values (a flat buffer). It may be followed."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            flat, sizes = nn.utils.parameters_to_vector(ddp.parameters()), [p.numel() for p in ddp.parameters()]
            for parameter, part in zip(ddp.parameters(), flat.detach().split(sizes), strict=True):
                parameter.data = part.view_as(parameter)


@scenario(Expected.CAUGHT)
def changed_through_numpy(run: Run) -> None:
    """Through a numpy view, of which torch knows nothing."""
    ddp, optimizer, attachment = run.usual()
    view = ddp.module.last.bias.detach().numpy()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            view[:] = 0.5


@scenario(Expected.NAMED)
def half_precision(run: Run) -> None:
    """model.half() and back: weights lose bits."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            ddp.module.half().float()


@scenario(Expected.NAMED)
def tied(run: Run) -> None:
    """Two layers become one after attach."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    ddp, optimizer, attachment = run.usual(model=model)
    for i in run.iterations():
        if run.now(i):
            model[2].weight = model[0].weight
            ddp = run.ddp(model)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def layer_replaced(run: Run) -> None:
    """The head is another layer, with a group of its own in the same optimizer, and DDP is made anew."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            torch.manual_seed(4)
            ddp.module.last = nn.Linear(240, 10)
            ddp = run.ddp(ddp.module)
            optimizer.add_param_group({"params": ddp.module.last.parameters()})
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def broadcast_by_the_script(run: Run) -> None:
    """Weights of rank 0 go to all, once, after both have added noise of their own."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            for parameter in ddp.parameters():
                parameter.data += 1e-3 * torch.randn_like(parameter)
                dist.broadcast(parameter.data, 0)


@scenario(Expected.CAUGHT)
def weights_of_one_rank(run: Run) -> None:
    """One rank's weights are edited, through .data."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i) and run.rank == 1:
            ddp.module.first.bias.data += 0.5


@scenario(Expected.CAUGHT)
def normed_in_forward(run: Run) -> None:
    """The forward pass norms its own weights (a max norm), through .data."""

    class MaxNorm(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if run.since(run.number):
                self.weight.data.renorm_(2, 0, 0.3)
            return super().forward(x)

    model = nn.Sequential(MaxNorm(32, 64), nn.Tanh(), nn.Linear(64, 10))
    ddp, optimizer, attachment = run.usual(model=model)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def multiplied_by_foreach(run: Run) -> None:
    """torch._foreach_mul_ of all weights, which torch counts."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            with torch.no_grad():
                torch._foreach_mul_(list(ddp.parameters()), 0.99)


@scenario(Expected.CAUGHT)
def changed_in_inference_mode(run: Run) -> None:
    """In torch.inference_mode."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            with torch.inference_mode():
                for parameter in ddp.parameters():
                    parameter.mul_(0.99)


@scenario(Expected.CAUGHT)
def from_one_vector(run: Run) -> None:
    """vector_to_parameters: all weights become views of one vector with other values."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            vector = nn.utils.parameters_to_vector(ddp.parameters())
            nn.utils.vector_to_parameters(vector.detach() * 0.99, ddp.parameters())


@scenario(Expected.CAUGHT)
def changed_and_back_later(run: Run) -> None:
    """The average is put in for one iteration and taken out again: only some versions are wrong."""
    ddp, optimizer, attachment = run.usual()
    kept: list[torch.Tensor] = []
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            kept = [parameter.data.clone() for parameter in ddp.parameters()]
            for parameter in ddp.parameters():
                parameter.data.mul_(0.9)
        if i == run.at + 1:
            for mine, parameter in zip(kept, ddp.parameters(), strict=True):
                parameter.data.copy_(mine)


@scenario(Expected.CAUGHT)
def other_strides(run: Run) -> None:
    """A matrix lies in memory by columns from a step on: its elements are the same, and torch rounds otherwise."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            weight = ddp.module.middle.weight
            weight.data = weight.data.t().contiguous().t()


@scenario(Expected.NAMED)
def double_precision(run: Run) -> None:
    """model.double(), and DDP is made anew."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1)
    for i in run.iterations():
        if run.now(i):
            ddp = run.ddp(ddp.module.double())
        with attachment.iteration():
            optimizer.zero_grad()
            x, y = run.batch(i)
            nn.functional.cross_entropy(ddp(x.to(ddp.module.last.bias.dtype)), y).backward()
            optimizer.step()


@scenario(Expected.NAMED)
def evaluated_through_the_wrapper(run: Run) -> None:
    """Evaluation by DDP's own forward, whose buffers are broadcast. It may be followed."""
    ddp, optimizer, attachment = run.usual(model=run.model(Conv))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            with torch.no_grad():
                run.loss(ddp, i)
