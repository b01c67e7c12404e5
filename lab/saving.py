"""What trainers do without FlowCheck: they write checkpoints themselves. Three ways, to hold step times against.

    saver = SAVERS["two-phase"](folder, every=1)
    loop: forward, backward; saver.before_update(); optimizer.step(); saver.after_step(i, model, optimizer)
    saver.close()

Each file is written aside, synced and renamed, and the one before is removed; one rank of a job saves, the others wait
for it in the next AllReduce as far as it makes them wait. All calls come from the training thread.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

__all__ = ["SAVERS", "AsyncDcp", "Saver", "TorchSave", "TwoPhase"]


class Saver:
    """folder: becomes the saver's own. every: iterations from one checkpoint to the next."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        folder.mkdir(parents=True)
        self.folder, self.every = folder, every

    def before_update(self) -> None:
        """The optimizer is about to change what may still be copied."""

    def after_step(self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (iteration + 1) % self.every == 0:
            self._save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def close(self) -> None:
        """Until what was begun is on disk."""

    def _save(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _write(self, state: dict[str, Any]) -> None:
        aside = self.folder / "aside.pt"
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self.folder / "latest.pt")


class TorchSave(Saver):
    """torch.save in the training thread: the step is longer by the whole of it."""

    def _save(self, state: dict[str, Any]) -> None:
        self._write(state)


class AsyncDcp(Saver):
    """torch.distributed.checkpoint.async_save: a copy in the training thread, and a thread of torch's writes it. The
    next one waits for the one before."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        super().__init__(folder, every)
        self._running: Future[Any] | None = None
        self._number = 0

    def _save(self, state: dict[str, Any]) -> None:
        self.close()
        shutil.rmtree(self.folder / str(self._number - 1), ignore_errors=True)
        running = async_save(state, checkpoint_id=self.folder / str(self._number), process_group=_alone(),
                             no_dist=True)
        assert isinstance(running, Future)
        self._running, self._number = running, self._number + 1

    def close(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


@functools.cache
def _alone() -> dist.ProcessGroup | None:
    """A group of this rank only: async_save refuses to work where no backend for the CPU is known to torch."""
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


class TwoPhase(Saver):
    """As CheckFreq (FAST'21, section 4.2) does: a thread copies while the next forward and backward run, and the next
    update waits for the copy; then it is written, and the next checkpoint waits for that."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        super().__init__(folder, every)
        self._copied = threading.Event()
        self._copied.set()
        self._writer: threading.Thread | None = None

    def before_update(self) -> None:
        self._copied.wait()

    def _save(self, state: dict[str, Any]) -> None:
        self.close()
        self._copied.clear()
        self._writer = threading.Thread(target=self._copy_and_write, args=(state,), name="two-phase checkpoint")
        self._writer.start()

    def _copy_and_write(self, state: dict[str, Any]) -> None:
        try:
            copy = _cloned(state)
        finally:
            self._copied.set()
        self._write(copy)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


def _cloned(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {key: _cloned(value) for key, value in state.items()}
    return [_cloned(value) for value in state] if isinstance(state, list) else state


SAVERS: dict[str, type[Saver]] = {"torch-save": TorchSave, "async-dcp": AsyncDcp, "two-phase": TwoPhase}
