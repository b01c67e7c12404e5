"""Models and wrappers that are odd, or become so."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from ..run import Mlp, Run
from ..table import Expected, scenario


@scenario(Expected.EQUAL, at=None)
def spectral_norm(run: Run) -> None:
    """Parametrized weights, whose buffers each forward changes."""
    model = run.model()
    parametrizations.spectral_norm(model.middle)
    ddp, optimizer, attachment = run.usual(model=model)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


class _Counting(torch.nn.Module):
    """Buffers of types that no gradient has, which each forward changes; and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("byte", torch.zeros(7, dtype=torch.uint8))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.logical_xor_(torch.arange(5) % 2 == self.small[0] % 2)
            self.small.add_(1)
            self.byte.add_(self.small[0].to(torch.uint8))
            self.turns.mul_(1j)
        return self.inner(x)


@scenario(Expected.EQUAL, at=None, quick=True)
def buffers_of_all_types(run: Run) -> None:
    """bool, int8, uint8 and complex buffers."""
    ddp, optimizer, attachment = run.usual(model=run.model(_Counting))
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def weight_norm_later(run: Run) -> None:
    """A layer is parametrized in mid-run: other names, other parameters, and the optimizer has the old ones."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            parametrizations.weight_norm(ddp.module.last)
            ddp = run.ddp(ddp.module)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def pruned(run: Run) -> None:
    """A mask on a layer: state_dict has weight_orig and weight_mask from then on."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            prune.l1_unstructured(ddp.module.middle, "weight", 0.5)


@scenario(Expected.NAMED)
def pruned_for_good(run: Run) -> None:
    """The mask is made permanent: another parameter of the same name."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            prune.l1_unstructured(ddp.module.middle, "weight", 0.5)
            prune.remove(ddp.module.middle, "weight")


@scenario(Expected.NAMED)
def frozen(run: Run) -> None:
    """A layer is frozen in mid-run, and DDP is made anew for the rest."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            ddp.module.first.requires_grad_(False)
            ddp = run.ddp(ddp.module)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def frozen_and_attached_anew(run: Run) -> None:
    """The same, and the script attaches again. The optimizer still has moments of the frozen layer."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            attachment.close()
            ddp.module.first.requires_grad_(False)
            ddp = run.ddp(ddp.module)
            attachment = run.attach(ddp, optimizer, iteration=i, epoch=1)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL)
def frozen_by_its_rate(run: Run) -> None:
    """A group's learning rate becomes 0."""
    ddp = run.ddp()
    first, *rest = list(ddp.parameters())
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}], 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        if run.now(i):
            optimizer.param_groups[0]["lr"] = 0.0
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED)
def another_wrapper(run: Run) -> None:
    """DDP is made anew around the same model, with a smaller bucket: another order of gradients."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        if run.now(i):
            ddp = run.ddp(ddp.module, bucket_cap_mb=0.02)
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def unused_parameters(run: Run) -> None:
    """A branch that only some iterations take, with find_unused_parameters."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(32, 10), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) if run.number % 2 else self.other(x)

    ddp = run.ddp(run.model(Branches), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.EQUAL, at=None)
def static_graph(run: Run) -> None:
    """static_graph, gradient_as_bucket_view and small buckets."""
    ddp = run.ddp(static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)


@scenario(Expected.NAMED, at=None)
def no_wrapper(run: Run) -> None:
    """The forward goes round DDP from the first iteration on, so nothing is reduced."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp.module, optimizer, attachment, i)


@scenario(Expected.CAUGHT)
def wrapper_passed_by(run: Run) -> None:
    """The forward goes round DDP once: gradients of this rank alone. Ranks differ ever after."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        run.plain(ddp.module if run.now(i) else ddp, optimizer, attachment, i)
