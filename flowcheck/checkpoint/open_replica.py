"""A node's replica in shared memory, as another process of the same machine reads it.

    with flowcheck.Replica.latest(run_id="my run") as replica:
        model.load_state_dict(replica.state_dict())
        optimizer.load_state_dict(replica.optimizer_state_dict())

The node may be running, or be gone: its file stays. A Replica is one version, which does not change while it is open:
both calls give the same step, or raise once the node has removed the file: it does that where it finds it to be wrong.
Meanwhile it holds one of the node's version slots, so close it. Any thread.
"""

from __future__ import annotations

import os
import re
import weakref
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flowcheck.ask.torch_state import torch_state
from flowcheck.checkpoint.paths import path_of, readable
from flowcheck.control.message_fields import GROUP
from flowcheck.errors import UserError
from flowcheck.job.version_status import VersionStatus
from updater.errors import UpdaterError
from updater.reader import PinnedVersion, Reader

__all__ = ["Replica"]

SHARED_MEMORY = "/dev/shm"
NAME = re.compile(rf"flowcheck-(.+)-({GROUP.pattern})-([0-9]+)\.replica")  # a group has no hyphen, a node may


class Replica:
    """One version of a replica file, open for reading. Made by `open` and `latest`.

    path: the replica file.
    step: updates applied since the start of the job.
    run_id, epoch: which run.
    status: of this version (docs/reference/events.md).
    verified: the newest step that was found equal to the trainer's own state; None: none was compared.
    """

    def __init__(self, path: Path, reader: Reader, version: PinnedVersion, held: ExitStack) -> None:
        self.path, self.step, self.verified = path, version.step, reader.verified
        self.run_id, self.epoch = reader.run_id, reader.epoch
        self.status = str(VersionStatus.of(version.status, version.step))
        self._version, self._rounding, self._reader = version, reader.rounding, reader
        self._close = weakref.finalize(self, held.close)

    @classmethod
    def open(cls, path: str | os.PathLike[str], step: int | None = None) -> Replica:
        """Open a replica file at its newest version, or at `step`.

        Raises UserError: no such file, not a replica, or no such version in it (any more).
        """
        path = path_of(path)
        if step is not None and (type(step) is not int or step < 0):
            raise UserError(f"{step!r} is not a number of steps", where="step", remedy="a whole number, 0 or more")
        with ExitStack() as stack:
            try:
                reader = stack.enter_context(closing(Reader(path)))
                version = stack.enter_context(reader.pinned(step))
            except (UpdaterError, OSError) as error:
                what = str(error).removeprefix(f"{path}: ") if isinstance(error, UpdaterError) else error.strerror
                raise UserError(
                    what or str(error), where=str(path),
                    remedy="give a file *.replica of a node (`replica.directory` of its settings) that has a version",
                ) from None
            return cls(path, reader, version, stack.pop_all())
        raise AssertionError  # an ExitStack without callbacks swallows nothing

    @classmethod
    def latest(
        cls, directory: str | os.PathLike[str] = SHARED_MEMORY, *, node: str | None = None, group: str | None = None,
        run_id: str | None = None, epoch: int | None = None,
    ) -> Replica:
        """Open the replica that was begun last, at its newest version.

        directory: `replica.directory` of the node's settings.
        node, group: the node's name and attach's `group`; None: any. run_id, epoch: which run; None: any.

        Raises UserError: none exists, or replicas of several groups fit.
        """
        found: dict[str, list[tuple[int, Path]]] = {}
        folder = path_of(directory, "directory", "directory")
        with readable(folder, any_kind=True):
            paths = list(folder.glob("flowcheck-*.replica"))
        for path in paths:
            named = NAME.fullmatch(path.name)
            if named is None or node not in (None, named[1]) or group not in (None, named[2]):
                continue
            if _holds(path, run_id, epoch):
                found.setdefault(f"{named[1]}-{named[2]}", []).append((int(named[3]), path))
        if len(found) > 1:
            raise UserError(
                f"replicas of several groups fit: {', '.join(sorted(found))} (node-group)", where=str(folder),
                remedy="say which with node=, group=, or run_id=",
            )
        for files in found.values():
            return cls.open(max(files)[1])
        asked = {"node": node, "group": group, "run_id": run_id, "epoch": epoch}
        wanted = ", ".join(f"{key} {value!r}" for key, value in asked.items() if value is not None)
        raise UserError(
            f"no replica with a complete version{f' of {wanted}' if wanted else ''}", where=str(folder),
            remedy="check `replica.directory` and `name` of the node's settings, and its lines `state` and `kept`",
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For `model.load_state_dict`: copies, every entry of the model in its order.

        Raises UserError: it is closed, or its node has removed it by now.
        """
        self._check_good()
        state = {name: tensor.clone() for name, tensor in self._version.parameters.items()}
        self._check_good()  # copying takes long
        return state

    def optimizer_state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` of an optimizer with the same groups in the same order as the trainer's: copies.

        Raises UserError as `state_dict` does, and without an optimizer.
        """
        self._check_good()
        state = {
            name: {key: tensor.clone() for key, tensor in values.items()}
            for name, values in self._version.optimizer_state.items()
        }
        self._check_good()
        return torch_state(self._version.optimizer, state, self._rounding, str(self.path))

    def close(self) -> None:
        """Let go of the version; may be called twice."""
        self._close()

    def _check_good(self) -> None:
        if not self._close.alive:
            raise UserError("is closed", where=str(self.path), remedy="open it again, or read inside the with block")
        if not self._reader.is_there() or not self._version.is_there():
            raise UserError(
                "was removed since it was opened: its node found it to be wrong, or has a newer one, or has ended",
                where=str(self.path), remedy="use nothing that was read from it, and open the newest: Replica.latest()",
            )

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        said = "no checksum compared" if self.verified is None else f"verified up to step {self.verified}"
        of = f"run {self.run_id!r}, epoch {self.epoch}"
        return f"Replica(step {self.step} of {of}, {self.status}, {said}; {self.path})"


def _holds(path: Path, run_id: str | None, epoch: int | None) -> bool:
    """Does the file hold a complete version of that run?"""
    try:
        with closing(Reader(path, run_id=run_id, epoch=epoch, mine=True)) as reader:
            return bool(reader.steps)
    except (UpdaterError, OSError):
        return False  # torn, foreign, gone meanwhile, or another run's
