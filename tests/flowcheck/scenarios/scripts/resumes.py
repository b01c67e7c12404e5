"""Jobs that are started again: from their own checkpoint, from a version, with the same run id."""

from __future__ import annotations

import numpy as np
import torch

import flowcheck

from ..run import Run
from ..table import Expected, scenario


def _save(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if run.rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], run.folder / "own.pt")


@scenario(Expected.EQUAL, at=None, starts=2, iterations=12, quick=True)
def older_checkpoint(run: Run) -> None:
    """The second start goes on from the script's own checkpoint of step 6, with the same run id and the default epoch,
    on other data: two lines of versions, of which the second one lives."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    if run.start:
        model, state = torch.load(run.folder / "own.pt")
        ddp.module.load_state_dict(model)
        optimizer.load_state_dict(state)
    first = 6 * run.start
    attachment = run.attach(ddp, optimizer, iteration=first)
    for i in run.iterations(first):
        run.plain(ddp, optimizer, attachment, i + 1000 * run.start)
        if not run.start and i == 5:
            _save(run, ddp.module, optimizer)


@scenario(Expected.EQUAL, at=None, starts=2, iterations=12)
def older_checkpoint_counted_from_zero(run: Run) -> None:
    """The same, and the second start counts its iterations from 0."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    if run.start:
        model, state = torch.load(run.folder / "own.pt")
        ddp.module.load_state_dict(model)
        optimizer.load_state_dict(state)
    attachment = run.attach(ddp, optimizer)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i + 1000 * run.start)
        if not run.start and i == 5:
            _save(run, ddp.module, optimizer)


@scenario(Expected.EQUAL, at=None, starts=2, iterations=9)
def older_and_shorter(run: Run) -> None:
    """The same, and the second start ends at a step below the first one's newest."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    if run.start:
        model, state = torch.load(run.folder / "own.pt")
        ddp.module.load_state_dict(model)
        optimizer.load_state_dict(state)
    else:
        run.count = 19
    first = 6 * run.start
    attachment = run.attach(ddp, optimizer, iteration=first)
    for i in run.iterations(first):
        run.plain(ddp, optimizer, attachment, i + 1000 * run.start)
        if not run.start and i == 5:
            _save(run, ddp.module, optimizer)


@scenario(Expected.EQUAL, at=None, starts=2, iterations=12)
def recovered_with_numpy_rates(run: Run) -> None:
    """lr is a numpy.float64 and a schedule is attached: the second start has model, optimizer and schedule."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=np.float64(1e-3))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, np.float64(0.5))
    first, since = 0, {}
    if run.start:
        recovered = flowcheck.recover(f"{run.settings['node'].split(':')[0]}:7071", token=run.settings["token"],
                                      run_id=run.settings["run_id"])
        assert recovered, repr(recovered)
        ddp.module.load_state_dict(recovered.model)
        optimizer.load_state_dict(recovered.optimizer)
        schedule.load_state_dict(recovered.scheduler)
        assert schedule.last_epoch == recovered.step, (schedule.last_epoch, recovered.step)
        assert recovered.user == {"seen": recovered.step}, recovered.user
        first, since = recovered.step, {"epoch": recovered.epoch, "iteration": recovered.step}
    attachment = run.attach(ddp, optimizer, scheduler=schedule, **since)
    for i in run.iterations(first):
        run.backward(ddp, optimizer, i)
        optimizer.step()
        schedule.step()
        attachment.step(user={"seen": i + 1})


@scenario(Expected.EQUAL, at=None, starts=3, iterations=8)
def recovered_again_and_again(run: Run) -> None:
    """Three starts, each from the newest version, as a job does that is preempted."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    first, since = 0, {}
    if run.start:
        recovered = flowcheck.recover(f"{run.settings['node'].split(':')[0]}:7071", token=run.settings["token"],
                                      run_id=run.settings["run_id"])
        assert recovered, repr(recovered)
        recovered.load(ddp.module, optimizer)
        first, since = recovered.step, {"epoch": recovered.epoch, "iteration": recovered.step}
    attachment = run.attach(ddp, optimizer, **since)
    for i in run.iterations(first):
        run.plain(ddp, optimizer, attachment, i)


class _Counted(torch.nn.Linear):
    """A layer that counts its forward passes, beside its weights."""

    def __init__(self) -> None:
        super().__init__(32, 10)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.full((1 + self.passes % 3,), self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state[0])


@scenario(Expected.EQUAL, at=None, starts=2, iterations=9)
def extra_state_recovered(run: Run) -> None:
    """What a module gives besides tensors (Transformer Engine's all do) comes back with a version."""
    model = run.model(_Counted)
    ddp = run.ddp(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    first, epoch = 0, 0
    if run.start:
        found = flowcheck.recover(f"{run.settings['node'].split(':')[0]}:7071", token=run.settings["token"],
                                  run_id=run.settings["run_id"])
        found.load(model, optimizer)
        first, epoch = found.step, found.epoch
        assert model.passes == first > 0, (model.passes, found)
    attachment = run.attach(ddp, optimizer, iteration=first, epoch=epoch)
    for i in run.iterations(first):
        run.plain(ddp, optimizer, attachment, i)
