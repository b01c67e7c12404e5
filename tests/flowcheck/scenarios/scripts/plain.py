"""Nothing odd: loops as they are written every day, which have to be followed."""

from __future__ import annotations

import torch

from ..run import Conv, Run
from ..table import Expected, scenario


@scenario(Expected.EQUAL, at=None, quick=True)
def adamw(run: Run) -> None:
    """A loop as in torch's tutorial."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            optimizer.step()


@scenario(Expected.EQUAL, at=None)
def batch_norm(run: Run) -> None:
    """Buffers, which each forward changes; SGD with momentum."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, model=run.model(Conv), lr=0.1, momentum=0.9, nesterov=True)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def step_called_by_hand(run: Run) -> None:
    """attachment.step() at the end, gradients that are zeroed and not dropped, clipping by the attachment."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.loss(ddp, i).backward()
        attachment.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        attachment.step()


@scenario(Expected.EQUAL, at=None)
def clip_given(run: Run) -> None:
    """torch's clip_grad_norm_, and its factor told to step()."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.backward(ddp, optimizer, i)
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        attachment.step(clip=float(torch.clamp(0.1 / (norm + 1e-6), max=1.0)))


@scenario(Expected.EQUAL, at=None)
def accumulation(run: Run) -> None:
    """Four micro-batches, of which the last one reduces."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            with ddp.no_sync():
                for micro in range(3):
                    (run.loss(ddp, 100 * i + micro) / 4).backward()
            (run.loss(ddp, i) / 4).backward()
            optimizer.step()


@scenario(Expected.EQUAL, at=None, quick=True)
def accumulation_reduced(run: Run) -> None:
    """Three micro-batches without no_sync: each backward reduces, and the last one carries the sum."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            for micro in range(3):
                (run.loss(ddp, 100 * i + micro) / 3).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()


@scenario(Expected.EQUAL, at=None)
def accumulation_reduced_in_place(run: Run) -> None:
    """The same with gradients that are views of several buckets, each micro-batch clipped before the next one."""
    ddp = run.ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            for micro in range(2):
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
                run.loss(ddp, 100 * i + micro).backward()
            optimizer.step()


@scenario(Expected.EQUAL, at=None)
def norm_logged(run: Run) -> None:
    """clip_grad_norm_ without a bound, to log norms: of each parameter, then of all; and a real one."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            for parameter in ddp.parameters():
                torch.nn.utils.clip_grad_norm_(parameter, float("inf"))
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))
            optimizer.step()


@scenario(Expected.NAMED)
def batch_left_out(run: Run) -> None:
    """The same before the backward pass: nothing is reduced. The job is joined anew, and followed on."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            loss = run.loss(ddp, i)
            if run.now(i):
                continue
            loss.backward()
            optimizer.step()
    assert str(attachment.state) == "attached", attachment.why


@scenario(Expected.EQUAL, at=None)
def fused(run: Run) -> None:
    """Fused Adam with amsgrad."""
    ddp, optimizer, attachment = run.usual(torch.optim.Adam, fused=True, amsgrad=True)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def groups_with_decay(run: Run) -> None:
    """Two groups, one of which decays; maximize, and no foreach."""
    ddp = run.ddp()
    parameters = list(ddp.parameters())
    groups = [{"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
              {"params": [one for one in parameters if one.dim() < 2], "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, maximize=True, foreach=False)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def average_kept_apart(run: Run) -> None:
    """An exponential average of the weights (swa_utils), which never goes back into the model."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ddp, optimizer, attachment = run.usual()
    average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        average.update_parameters(ddp.module)


@scenario(Expected.EQUAL, at=None)
def evaluation_between(run: Run) -> None:
    """The model evaluates between iterations, without gradients and in eval mode."""
    ddp, optimizer, attachment = run.usual(model=run.model(Conv))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if i % 3 == 0:
            ddp.eval()
            with torch.no_grad():
                run.loss(ddp.module, i)
            ddp.train()


@scenario(Expected.EQUAL, at=None)
def dropout(run: Run) -> None:
    """Randomness in the forward pass, another in each rank."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    ddp, optimizer, attachment = run.usual(model=model)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def closure(run: Run) -> None:
    """The optimizer calls forward and backward itself."""
    ddp, optimizer, attachment = run.usual(torch.optim.SGD, lr=0.1)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.step(lambda i=i: run.backward(ddp, optimizer, i))


@scenario(Expected.CAUGHT, at=None)
def compiled_step(run: Run) -> None:
    """torch.compile around optimizer.step."""
    ddp, optimizer, attachment = run.usual()
    step = torch.compile(optimizer.step, backend="eager")
    for i in run.iterations():
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            step()


@scenario(Expected.EQUAL, at=None)
def compiled_wrapper(run: Run) -> None:
    """torch.compile around DDP, as torch's own pages have it."""
    torch._dynamo.config.suppress_errors = True  # the lab's process group is in Python, and would be compiled, too
    ddp = torch.compile(run.ddp(), backend="eager")
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def compiled_model(run: Run) -> None:
    """torch.compile around the model, inside DDP."""
    ddp, optimizer, attachment = run.usual(model=torch.compile(run.model(), backend="eager"))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
