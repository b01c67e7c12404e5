"""Gradients that are not what was on the wire when the optimizer takes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from ..run import Run
from ..table import Expected, scenario


@scenario(Expected.NAMED, at=None, quick=True)
def hook_right_after_attach(run: Run) -> None:
    """A communication hook of the script's own, one line after attach: it makes gradients half as large."""
    ddp, optimizer, attachment = run.usual()
    ddp.register_comm_hook(None, _halving)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


def _halving(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = allreduce_hook(group, bucket)
    return future.then(lambda done: done.value()[0].mul_(0.5) if isinstance(done.value(), list) else done.value().mul_(0.5))


@scenario(Expected.NAMED)
def hook_in_mid_run(run: Run) -> None:
    """The same hook, when versions are made already."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            ddp.register_comm_hook(None, _halving)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def compressing_hook_in_mid_run(run: Run) -> None:
    """fp16_compress_hook, when versions are made already."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            ddp.register_comm_hook(None, fp16_compress_hook)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def builtin_hook_after_attach(run: Run) -> None:
    """A hook of DDP's C++ side, FP16_COMPRESS."""
    ddp, optimizer, attachment = run.usual()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def builtin_hook_that_sums(run: Run) -> None:
    """A hook of DDP's C++ side, ALLREDUCE, after attach."""
    ddp, optimizer, attachment = run.usual()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None, quick=True)
def values_clipped(run: Run) -> None:
    """clip_grad_value_, in each iteration."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            torch.nn.utils.clip_grad_value_(ddp.parameters(), 1e-3)
            optimizer.step()


@scenario(Expected.NAMED)
def values_clipped_in_mid_run(run: Run) -> None:
    """clip_grad_value_, from a step on."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                torch.nn.utils.clip_grad_value_(ddp.parameters(), 1e-3)
            optimizer.step()


@scenario(Expected.NAMED, at=None, quick=True)
def norm_clipped_by_torch(run: Run) -> None:
    """torch's own clip_grad_norm_, and nobody says the factor."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()


@scenario(Expected.NAMED)
def norm_clipped_when_large(run: Run) -> None:
    """torch's own clip_grad_norm_, whose factor is below one for the first time in mid-run."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1 if run.since(i) else 1e6)
            optimizer.step()


@scenario(Expected.NAMED)
def norm_of_one_layer_clipped(run: Run) -> None:
    """torch's own clip_grad_norm_ of some parameters."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                torch.nn.utils.clip_grad_norm_(ddp.module.middle.parameters(), 0.01)
            optimizer.step()


@scenario(Expected.NAMED)
def divided_by_hand(run: Run) -> None:
    """p.grad /= n."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                for parameter in ddp.parameters():
                    parameter.grad /= 3
            optimizer.step()


@scenario(Expected.CAUGHT)
def noise_through_data(run: Run) -> None:
    """Noise on p.grad.data, which torch does not count; alike in all ranks."""
    ddp, optimizer, attachment = run.usual()
    noise = torch.Generator().manual_seed(7)
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                for parameter in ddp.parameters():
                    parameter.grad.data += 1e-3 * torch.randn(parameter.shape, generator=noise)
            optimizer.step()


@scenario(Expected.CAUGHT)
def one_element_of_a_gradient(run: Run) -> None:
    """One element of the largest gradient, once, through .data."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1)
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.now(i):
                ddp.module.middle.weight.grad.data[100, 3] += 1.0
            optimizer.step()


@scenario(Expected.NAMED)
def replaced(run: Run) -> None:
    """p.grad is another tensor (a filter's)."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                for parameter in ddp.parameters():
                    parameter.grad = parameter.grad - parameter.grad.mean()
            optimizer.step()


@scenario(Expected.NAMED)
def left_out(run: Run) -> None:
    """p.grad = None: a layer is frozen from a step on."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                ddp.module.first.weight.grad = None
            optimizer.step()


@scenario(Expected.NAMED)
def not_zeroed(run: Run) -> None:
    """zero_grad is left out once: two iterations' gradients add up, and the sum is reduced again."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            if not run.now(i):
                optimizer.zero_grad()
            run.loss(ddp, i).backward()
            optimizer.step()


@scenario(Expected.NAMED)
def micro_batches_reduced(run: Run) -> None:
    """Accumulation without no_sync, from a step on: two reductions in an iteration."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                run.loss(ddp, i + 1000).backward()
            optimizer.step()


@scenario(Expected.NAMED)
def reduced_again(run: Run) -> None:
    """The script reduces gradients itself, after DDP has."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                for parameter in ddp.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()


@scenario(Expected.NAMED)
def never_reduced(run: Run) -> None:
    """A whole iteration in no_sync: local SGD."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            if run.now(i):
                with ddp.no_sync():
                    run.backward(ddp, optimizer, i)
            else:
                run.backward(ddp, optimizer, i)
            optimizer.step()


@scenario(Expected.EQUAL)
def tensor_hooks(run: Run) -> None:
    """Hooks of tensors, from a step on, that change gradients before DDP has them."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            for parameter in ddp.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def not_a_number(run: Run) -> None:
    """A loss that is NaN, once."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            (run.loss(ddp, i) * (float("nan") if run.now(i) else 1.0)).backward()
            optimizer.step()


@scenario(Expected.NAMED)
def not_a_number_mended(run: Run) -> None:
    """A loss that is infinite, once, and nan_to_num_ on the gradients."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            (run.loss(ddp, i) * (float("inf") if run.now(i) else 1.0)).backward()
            for parameter in ddp.parameters():
                torch.nan_to_num_(parameter.grad, nan=0.0, posinf=1.0, neginf=-1.0)
            optimizer.step()
