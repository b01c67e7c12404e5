"""Gradients that are not what was on the wire when the optimizer takes them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..run import Run
from ..table import Expected, scenario


@scenario(Expected.NAMED, at=None, quick=True)
def hook_right_after_attach(run: Run) -> None:
    """A communication hook of the script's own, one line after attach: it makes gradients half as large."""
    ddp, optimizer, attachment = run.usual()
    ddp.register_comm_hook(None, _halving)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


def _halving(group, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and wants classes
    return allreduce_hook(group, bucket).then(lambda done: done.value().mul_(0.5))


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
def compressing_hook_right_after_attach(run: Run) -> None:
    """fp16_compress_hook, one line after attach."""
    ddp, optimizer, attachment = run.usual()
    ddp.register_comm_hook(None, fp16_compress_hook)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def compressing_hook_before_attach(run: Run) -> None:
    """fp16_compress_hook, before attach."""
    ddp = run.ddp()
    ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def builtin_hook_that_sums(run: Run) -> None:
    """A hook of DDP's C++ side, ALLREDUCE, after attach."""
    ddp, optimizer, attachment = run.usual()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
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


@scenario(Expected.NAMED, at=None)
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


@scenario(Expected.CAUGHT, sums=5)
def one_element_of_a_gradient(run: Run) -> None:
    """One element of the largest gradient, once, through .data: no sample may hit it, a checksum does."""
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


@scenario(Expected.CAUGHT)
def never_reduced(run: Run) -> None:
    """A whole iteration in no_sync: local SGD. Ranks differ ever after."""
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


@scenario(Expected.NAMED, at=None)
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


@scenario(Expected.NAMED)
def changed_by_a_pre_hook(run: Run) -> None:
    """A step pre-hook that is registered after attach, so it runs later than attach's, halves gradients."""
    ddp, optimizer, attachment = run.usual()

    def halve(*_: object) -> None:
        if run.since(run.number):
            for parameter in ddp.parameters():
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def changed_by_a_global_hook(run: Run) -> None:
    """The same by a pre-hook of all optimizers."""
    ddp, optimizer, attachment = run.usual()

    def halve(*_: object) -> None:
        if run.since(run.number):
            for parameter in ddp.parameters():
                parameter.grad.mul_(0.5)

    register_optimizer_step_pre_hook(halve)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def decayed_by_hand(run: Run) -> None:
    """Weight decay is added to gradients by the script."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1)
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            if run.since(i):
                for parameter in ddp.parameters():
                    parameter.grad.add_(parameter.detach(), alpha=0.01)
            optimizer.step()


@scenario(Expected.CAUGHT)
def hooks_after_accumulation(run: Run) -> None:
    """register_post_accumulate_grad_hook, after DDP was made: each rank's gradient, or the mean, is halved."""
    ddp, optimizer, attachment = run.usual()

    def halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    for i in run.iterations():
        if run.now(i):
            for parameter in ddp.parameters():
                parameter.register_post_accumulate_grad_hook(halve)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def iteration_given_up(run: Run) -> None:
    """An exception between backward and step, which the script catches: it goes on with the next batch."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        try:
            with attachment.iteration():
                run.backward(ddp, optimizer, i)
                if run.now(i):
                    raise RuntimeError("an odd batch")
                optimizer.step()
        except RuntimeError:
            optimizer.zero_grad()


@scenario(Expected.NAMED)
def iteration_without_training(run: Run) -> None:
    """A boundary without forward, backward and step."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            if not run.now(i):
                run.backward(ddp, optimizer, i)
                optimizer.step()


@scenario(Expected.EQUAL, at=None)
def two_forwards(run: Run) -> None:
    """Two forward passes and one backward."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            (run.loss(ddp, i) + run.loss(ddp, i + 500)).backward()
            optimizer.step()


@scenario(Expected.EQUAL, at=None)
def metric_reduced(run: Run) -> None:
    """A metric is reduced in each iteration, on a group of its own."""
    group = dist.new_group()
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            loss = run.backward(ddp, optimizer, i)
            optimizer.step()
            dist.all_reduce(loss, group=group)
