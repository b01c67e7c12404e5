"""A version from a node into files: `flowcheck fetch`, for whoever is not the training script.

    taken = flowcheck.fetch("10.0.0.2:7071", "out", token=secret, format="dcp")      taken.path is what was written

    safetensors   OUT/step-000020/       a checkpoint directory (directory.py), as the node writes it
    torch         OUT/step-000020.pt     torch.save: model and optimizer as torch's own state_dicts; no code in it
    dcp           OUT/step-000020.dcp/   by torch.distributed.checkpoint's own writer: any world size, or FSDP, loads it
    hf            OUT/step-000020.hf/    the model alone, as transformers' from_pretrained reads it: one file, or shards
                                         and their index. config.json is the model's own and is not made here

Every hash is checked before anything is written, and what is written appears whole or not at all. A name holds one
version: the same one again replaces it, and anything else that lies there stays (identity.py). Any thread.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.receiving import SECONDS
from flowcheck.ask.sources import Fetched, Found, addresses, take
from flowcheck.ask.torch_state import torch_state
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.checkpoint.files import write_file
from flowcheck.checkpoint.identity import Identity, check_directory, check_file, check_noted, folder_of, note
from flowcheck.checkpoint.paths import path_of
from flowcheck.control.protocol import token_bytes
from flowcheck.control.tls import client_context
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL
from flowcheck.durable import (
    adopt,
    fsync_directory,
    make_directory,
    new_directory,
    partial_name,
    private,
    remove_left,
    remove_tree,
    reporting,
    write_synced,
)
from flowcheck.errors import UserError

__all__ = ["FORMATS", "Taken", "fetch"]

FORMATS = ("safetensors", "torch", "dcp", "hf")
WHOLE = ("dcp", "hf")  # their loaders take what is there for the model, and do not know of shards
LONGEST = 1e6  # seconds that a node may be waited for
SHARD_BYTES = 5_000_000_000  # of tensors in a file of the form `hf`
LEFT = "step-"  # what begins with it and is half is of a fetch that was killed
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, repr=False)
class Taken:
    """What `fetch` wrote.

    path: file or directory.
    step, run_id, epoch, shard, status, unproven: as the version says of itself.
    source: node and tier that it came from. nbytes: received. seconds: that it took to receive.
    passed: of each source that was nearer, or newer, or did not answer: why it was not taken.
    """

    path: Path
    step: int
    run_id: str
    epoch: int
    shard: str
    status: str
    unproven: tuple[str, ...]
    source: str
    nbytes: int
    seconds: float
    passed: tuple[str, ...]

    def __repr__(self) -> str:
        open_ = f", unproven: {'; '.join(self.unproven)}" if self.unproven else ""
        return (
            f"Taken(step {self.step} of run {self.run_id!r}, epoch {self.epoch}, {self.status}{open_}, from"
            f" {self.source}: {self.nbytes:,} bytes in {self.seconds:.2f} s; {self.path})"
        )


def fetch(
    nodes: str | Sequence[str], out: str | os.PathLike[str], *, token: str, format: str = "safetensors",
    run_id: str | None = None, shard: str | None = None, step: int | None = None, seconds: float = SECONDS,
    ca: str = "", whole: bool = False,
) -> Taken:
    """The newest version that nodes have, as files in the directory `out`. The same version is replaced if it is there
    already; of one step, another run, epoch or shard needs another directory.

    nodes: HOST:PORT of their `api.listen`, a list or one text with commas. token: the nodes' shared secret.
    format: one of FORMATS; `dcp` and `hf` are of whole models. run_id, shard: which run, and which group of
    ranks of it; None: the only one that there is. step: this one and no other. seconds: that a node may be silent.
    ca: ask over TLS, and trust these certificates: a PEM file, or "system". "": no TLS.
    whole: a shard that has a name is the whole model all the same; asked for by `dcp` and `hf`.

    Raises UserError, also if something else lies under its name, which is left alone, and if a part of a model might
    pass for a whole one; and EnvironmentProblem: no version is there, none proved good, or it cannot be written.
    """
    if format not in FORMATS:
        raise UserError(f"{format!r} is none of {', '.join(FORMATS)}", where="format", remedy="one of them")
    folder = folder_of(path_of(out, "out", "directory"))
    _check(nodes, token, run_id, shard, step, seconds, ca)
    key, tls = reader_key(token_bytes(token)), client_context(ca) if ca else None
    own = format == "safetensors"  # the form that has room for what ranks gave of themselves
    asked = [NodeClient(address, key, seconds, tls) for address in addresses(nodes)]
    fetched = take(asked, run_id, shard, step, own, partial(_whole, format, whole))
    version = fetched.version
    writers = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp, "hf": _hf}
    path = writers[format](fetched, folder)
    return Taken(
        path, version.step, version.run_id, version.epoch, version.shard, version.status, version.unproven,
        fetched.source, fetched.nbytes, fetched.seconds, fetched.passed,
    )


def _whole(format: str, whole: bool, found: Found) -> None:
    """Raises UserError where the form is of a whole model, and nothing says that what was found is one. A version does
    not say of what it is a part; that a shard has a name says that the job may have others."""
    if format not in WHOLE or whole or not (found.shard or len(found.shards) > 1):
        return
    raise UserError(
        f"{format} is of a whole model, and shard {found.shard!r} of run {found.run_id!r} may be a part of one, with"
        " slices of its tensors", where="format",
        remedy="format safetensors or torch for each shard: they are not joined here (docs/use/layouts.md); whole=True"
        " where each rank of this group has the whole model, as DDP's have",
    )


def _check(
    nodes: object, token: object, run_id: object, shard: object, step: object, seconds: object, ca: object
) -> None:
    """Arguments that cannot be are said here, and not where they are used; in the words of `recover`."""
    if not isinstance(nodes, Iterable):
        raise UserError(f"{nodes!r} is not an address", where="nodes", remedy="HOST:PORT of a node's api.listen")
    if not isinstance(token, str) or any("\ud800" <= one <= "\udfff" for one in token):  # it is a secret: not said
        raise UserError(f"this {type(token).__name__} is not a text", where="token", remedy="the nodes' shared secret")
    for name, value in (("run_id", run_id), ("shard", shard)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{value!r} is not a text", where=name, remedy="a name, or None")
    if step is not None and (type(step) is not int or step < 0):
        raise UserError(f"{step!r} is not a number of steps", where="step", remedy="a whole number, 0 or more")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        raise UserError(f"{seconds!r} is not a time", where="seconds", remedy=f"a number above 0, at most {LONGEST:g}")
    if ca:
        path_of(ca, "ca", "file")


def _safetensors(fetched: Fetched, out: Path) -> Path:
    one = fetched.version
    return write_step(out, one.step, fetched.model, fetched.state, Meta.of(one), lambda: {
        rank: pack(user.state, step=user.step, rank=rank, ranks=user.ranks) for rank, user in fetched.users.items()
    }, lambda path: check_directory(path, Identity.of(one)), several=True)


def _torch(fetched: Fetched, out: Path) -> Path:
    one, path = fetched.version, out / f"step-{fetched.version.step:06d}.pt"
    aside = partial_name(path, several=True)
    with reporting(path, aside=aside), _torchs_errors():
        check_file(path, Identity.of(one))
        make_directory(out)
        remove_left(out, LEFT)
        try:
            with open(aside, "xb", opener=private) as file:
                torch.save({
                    "step": one.step, "run_id": one.run_id, "epoch": one.epoch, "shard": one.shard,
                    "status": one.status, "unproven": list(one.unproven), "model": fetched.model,
                    "optimizer": _optimizer(fetched),
                }, file)
                file.flush()
                os.fsync(file.fileno())
            check_file(path, Identity.of(one))  # writing may have taken minutes
            os.replace(aside, path)
            fsync_directory(out)
        finally:
            aside.unlink(missing_ok=True)
    return path


def _dcp(fetched: Fetched, out: Path) -> Path:
    path = out / f"step-{fetched.version.step:06d}.dcp"
    aside = partial_name(path, several=True)
    with reporting(path, aside=aside), _torchs_errors():
        check_noted(path, Identity.of(fetched.version))
        make_directory(out)
        remove_left(out, LEFT)
        try:
            new_directory(aside)  # torch's files in it are as the umask says
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
                save(_by_name(fetched), storage_writer=FileSystemWriter(aside), no_dist=True)
            note(aside, fetched.version)
            fsync_directory(aside)
            check_noted(path, Identity.of(fetched.version))  # writing may have taken minutes
            adopt(aside, path)
        finally:
            remove_tree(aside)  # what is left is half of the new one, or all of the one that it replaced
    return path


def _hf(fetched: Fetched, out: Path) -> Path:
    path = out / f"step-{fetched.version.step:06d}.hf"
    aside = partial_name(path, several=True)
    with reporting(path, aside=aside):
        check_noted(path, Identity.of(fetched.version))
        make_directory(out)
        remove_left(out, LEFT)
        try:
            new_directory(aside)
            shards = _shards(fetched.model)
            names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
            for name, shard in zip(names if len(shards) > 1 else [MODEL], shards, strict=True):
                write_file(aside / name, shard)
            if len(shards) > 1:
                index = {
                    "metadata": {"total_size": sum(map(_size, fetched.model.values()))},
                    "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
                }
                write_synced(aside / INDEX, [json.dumps(index, indent=2).encode() + b"\n"])
            note(aside, fetched.version)
            fsync_directory(aside)
            check_noted(path, Identity.of(fetched.version))  # writing may have taken minutes
            adopt(aside, path)
        finally:
            remove_tree(aside)  # what is left is half of the new one, or all of the one that it replaced
    return path


@contextmanager
def _torchs_errors() -> Iterator[None]:
    """What the file system said, where torch's writers raise something of their own about it."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        failures = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        refused = next(filter(None, map(_refused, failures)), None)
        if refused is None:
            raise
        raise refused from None


def _refused(error: BaseException | None) -> OSError | None:
    """The first OSError among an error and those that it was raised in consequence of."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _shards(model: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """In the model's order, each of SHARD_BYTES at most, or of one tensor."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in model.items():
        if shards[-1] and _size(tensor) > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= _size(tensor)
    return shards


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer(fetched: Fetched) -> dict[str, Any]:
    one = fetched.version
    return torch_state(one.optimizer, fetched.state, one.rounding, fetched.source)


def _by_name(fetched: Fetched) -> dict[str, Any]:
    """As torch.distributed.checkpoint.state_dict has a model and an optimizer: parameters by their names, which other
    shardings share. Every parameter has a state there, once the optimizer has stepped."""
    optimizer = _optimizer(fetched)
    names = [name for group in fetched.version.optimizer["groups"] for name in group["params"]]
    state: Mapping[int, Any] = optimizer["state"]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in
              optimizer["param_groups"]]
    return {
        "model": fetched.model,
        "optimizer": {"state": {names[number]: values for number, values in state.items()}, "param_groups": groups},
    }
